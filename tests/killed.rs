//! Workers that are killed at random moments, over a real Redis and a real PostgreSQL: no message is
//! lost, no two of them run one message at the same time, and an effect repeats only where a kill fell
//! between it and its mark.
//!
//! The test is the broker: it hands messages to worker processes over their stdin, and brings back what a
//! worker held when it died. Each worker writes what its handler does into a ledger, a file that all of
//! them append to.
#![cfg(unix)]
#![allow(missing_docs)]

#[path = "support/broker.rs"]
mod broker;
#[path = "support/services.rs"]
mod services;

use broker::{Answer, Broker, Plan, micros};
use services::{postgres, redis, unique};
use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fs::{self, File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{BoxError, BoxStore, IdempotencyLayer, Lease, Outcome, Parked};

const MESSAGES: usize = 200;
/// Long enough for renewals to come in time on a machine that is busy.
const LEASE: Duration = Duration::from_secs(4);

// ===== the worker =====

/// Not a test: what a worker process does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker() {
    let Ok(url) = env::var("KILLED_URL") else {
        return;
    };
    let record = env::var("KILLED_RECORD").unwrap();
    let ledger = Ledger::open(Path::new(&env::var("KILLED_LEDGER").unwrap()));
    let store = BoxStore::connect(&url, &record).await.unwrap();
    let handler = service_fn(move |id: String| charge(ledger.clone(), id));
    let consumer = IdempotencyLayer::new(store)
        .id_from(|id: &String| Some(id.clone()))
        .claim(Lease::new(LEASE).unwrap())
        .outcome()
        .layer(handler);
    broker::work(|id| {
        let consumer = consumer.clone();
        async move {
            match consumer.oneshot(id).await {
                Ok(Outcome::Ran(())) => Answer::Ack("ran"),
                Ok(_) => Answer::Ack("duplicate"),
                Err(error) => match error.downcast_ref::<Parked>() {
                    Some(parked) => Answer::Back("parked", parked.retry_after()),
                    None => Answer::Back("failed", Duration::ZERO),
                },
            }
        }
    })
    .await;
}

async fn charge(ledger: Ledger, id: String) -> Result<(), BoxError> {
    ledger.write("run", &id);
    pause().await;
    if rand::random_ratio(1, 10) {
        ledger.write("fail", &id);
        return Err("card declined".into());
    }
    ledger.write("effect", &id);
    pause().await;
    ledger.write("end", &id);
    Ok(())
}

/// What the world outside takes, before it did something and after.
async fn pause() {
    tokio::time::sleep(Duration::from_millis(rand::random_range(0..30))).await;
}

#[derive(Clone)]
struct Ledger(Arc<File>);

impl Ledger {
    fn open(path: &Path) -> Self {
        let file = OpenOptions::new().create(true).append(true).open(path);
        Ledger(Arc::new(file.unwrap()))
    }

    /// One short line in one write, which no other one gets into, and no kill takes back.
    fn write(&self, what: &str, id: &str) {
        let line = format!("{what} {id} {} {}\n", std::process::id(), micros());
        (&*self.0).write_all(line.as_bytes()).unwrap();
    }
}

// ===== the broker =====

/// Delivers everything twice.
fn deliver(url: &str, record: &str) -> (Broker, PathBuf, Vec<String>) {
    let ids: Vec<String> = (0..MESSAGES).map(|n| format!("{record}-{n}")).collect();
    let ledger = env::temp_dir().join(record);
    let plan = Plan {
        workers: 3,
        in_flight: 6,
        kills: 30,
        acks: 0..1,
        pause: 20..100,
        patience: Duration::from_secs(180),
    };
    let variables = vec![
        ("KILLED_URL", url.to_owned()),
        ("KILLED_RECORD", record.to_owned()),
        ("KILLED_LEDGER", ledger.display().to_string()),
    ];
    let mut broker = Broker::new(plan, variables);
    broker.deliver(ids.iter().chain(&ids).cloned());
    (broker, ledger, ids)
}

// ===== the ledger =====

/// One run of the handler.
#[derive(Debug)]
struct Run {
    pid: u32,
    began: u128,
    effect: bool,
    ended: Option<u128>,
}

fn audit(name: &str, broker: &Broker, ledger: &Path, ids: &[String]) {
    let text = fs::read_to_string(ledger).unwrap();
    fs::remove_file(ledger).unwrap();
    let mut runs: BTreeMap<&str, Vec<Run>> = BTreeMap::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [what, id, pid, at] = words[..] else {
            panic!("{line:?} in the ledger");
        };
        let (pid, at) = (pid.parse().unwrap(), at.parse().unwrap());
        let runs = runs.entry(id).or_default();
        if what == "run" {
            runs.push(Run {
                pid,
                began: at,
                effect: false,
                ended: None,
            });
            continue;
        }
        let run = runs.iter_mut().rfind(|run| run.pid == pid).unwrap();
        match what {
            "effect" => run.effect = true,
            "end" | "fail" => run.ended = Some(at),
            _ => panic!("{line:?} in the ledger"),
        }
    }

    let mut repeated = BTreeSet::new();
    for id in ids {
        let runs = runs.get_mut(id.as_str()).map(|runs| {
            runs.sort_by_key(|run| run.began);
            &*runs
        });
        let runs = runs.unwrap_or_else(|| panic!("{id} was acked and never ran"));
        let effects = runs.iter().filter(|run| run.effect).count();
        assert!(effects > 0, "{id} was acked without an effect: {runs:?}");
        for (one, next) in runs.iter().zip(&runs[1..]) {
            let died = broker.killed.get(&one.pid);
            let over = one.ended.or(died.map(|(at, _)| *at));
            assert!(
                over.is_some_and(|over| over <= next.began),
                "two runners of {id} at once: {one:?} and {next:?}"
            );
            if one.effect {
                let held = died.is_some_and(|(_, held)| held.contains(id));
                assert!(
                    held,
                    "{id} ran again after an effect that no kill followed: {runs:?}"
                );
                repeated.insert(id);
            }
        }
    }
    println!(
        "{name}: {} deliveries of {MESSAGES} messages, {} kills; 0 missing, {} repeated, each by a \
         kill between effect and mark; {} duplicates, {} parked",
        2 * MESSAGES,
        broker.killed.len(),
        repeated.len(),
        broker.count("duplicate"),
        broker.count("parked"),
    );
    assert!(broker.killed.len() >= 5, "too few kills to show anything");
}

#[test]
fn no_message_is_lost_and_none_runs_twice_at_once_on_redis() {
    let Some(url) = redis() else { return };
    let record = unique("killed");
    let (broker, ledger, ids) = deliver(&url, &record);
    let mut connection = redis::Client::open(url).unwrap().get_connection().unwrap();
    for id in &ids {
        let _: () = redis::Commands::del(&mut connection, format!("{record}{id}")).unwrap();
    }
    audit("Redis", &broker, &ledger, &ids);
}

#[tokio::test]
async fn no_message_is_lost_and_none_runs_twice_at_once_on_postgres() {
    let Some(url) = postgres() else { return };
    let record = unique("killed");
    let (of_url, of_record) = (url.clone(), record.clone());
    let delivered = tokio::task::spawn_blocking(move || deliver(&of_url, &of_record));
    let (broker, ledger, ids) = delivered.await.unwrap();
    let pool = sqlx::PgPool::connect(&url).await.unwrap();
    let drop = format!("DROP TABLE \"{record}\"");
    let dropped = sqlx::raw_sql(sqlx::AssertSqlSafe(drop))
        .execute(&pool)
        .await;
    dropped.unwrap();
    audit("PostgreSQL", &broker, &ledger, &ids);
}
