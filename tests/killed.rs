//! Workers that are killed at random moments, over a real Redis and a real PostgreSQL: no message is
//! lost, no two of them run one message at the same time, and an effect repeats only where a kill fell
//! between it and its mark.
//!
//! The test is the broker: it hands messages to worker processes over their stdin, and brings back what a
//! worker held when it died. Each worker writes what its handler does into a ledger, a file that all of
//! them append to.
#![cfg(unix)]
#![allow(missing_docs)]

#[path = "support/services.rs"]
mod services;

use services::{postgres, redis, unique};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    env,
    fs::{self, File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{BoxError, BoxStore, IdempotencyLayer, Lease, Outcome, Parked};

const MESSAGES: usize = 200;
const WORKERS: usize = 3;
/// How many messages a worker holds at most.
const IN_FLIGHT: usize = 6;
/// After so many the workers are left alone.
const KILLS: usize = 30;
/// Long enough for renewals to come in time on a machine that is busy.
const LEASE: Duration = Duration::from_secs(4);

// ===== the worker =====

/// Not a test: what a worker process does. Says `| ack <id>` or `| back <id> <milliseconds>`.
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
    println!("| ready");

    let (deliver, mut deliveries) = tokio::sync::mpsc::unbounded_channel();
    thread::spawn(move || {
        for line in std::io::stdin().lines() {
            let Ok(id) = line else { return };
            if deliver.send(id).is_err() {
                return;
            }
        }
    });
    while let Some(id) = deliveries.recv().await {
        let consumer = consumer.clone();
        tokio::spawn(async move {
            let answer = match consumer.oneshot(id.clone()).await {
                Ok(Outcome::Ran(())) => format!("| ack {id} ran"),
                Ok(_) => format!("| ack {id} duplicate"),
                Err(error) => {
                    let pause = error.downcast_ref::<Parked>().map(Parked::retry_after);
                    format!("| back {id} {}", pause.unwrap_or_default().as_millis())
                }
            };
            println!("{answer}");
        });
    }
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

fn micros() -> u128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap().as_micros()
}

// ===== the broker =====

struct Worker {
    child: Child,
    stdin: ChildStdin,
    ready: bool,
    killed: bool,
    /// Each delivery that it has not settled: an id may be there twice.
    holds: Vec<String>,
}

/// What a worker said; `None` at its end.
type Said = (u32, Option<String>);

struct Broker {
    url: String,
    record: String,
    ledger: PathBuf,
    workers: HashMap<u32, Worker>,
    said: Receiver<Said>,
    say: Sender<Said>,
    queue: VecDeque<String>,
    later: Vec<(Instant, String)>,
    /// When a process was dead for sure, and what it held.
    killed: HashMap<u32, (u128, HashSet<String>)>,
    open: usize,
    parked: usize,
    duplicates: usize,
}

impl Broker {
    fn start(&mut self) {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "worker", "--nocapture"])
            .env("KILLED_URL", &self.url)
            .env("KILLED_RECORD", &self.record)
            .env("KILLED_LEDGER", &self.ledger)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (pid, say) = (child.id(), self.say.clone());
        let stdout = child.stdout.take().unwrap();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                if let Some(said) = line.split_once("| ").map(|(_, said)| said.to_owned()) {
                    let _ = say.send((pid, Some(said)));
                }
            }
            let _ = say.send((pid, None));
        });
        let worker = Worker {
            stdin: child.stdin.take().unwrap(),
            child,
            ready: false,
            killed: false,
            holds: Vec::new(),
        };
        self.workers.insert(pid, worker);
    }

    fn hand_out(&mut self) {
        let now = Instant::now();
        let (due, later) = self.later.drain(..).partition(|(at, _)| *at <= now);
        self.later = later;
        let due: Vec<(Instant, String)> = due;
        self.queue.extend(due.into_iter().map(|(_, id)| id));
        for worker in self.workers.values_mut() {
            while worker.ready && !worker.killed && worker.holds.len() < IN_FLIGHT {
                let Some(id) = self.queue.pop_front() else {
                    return;
                };
                // One that is dead takes nothing; what it holds comes back.
                let _ = worker.stdin.write_all(format!("{id}\n").as_bytes());
                worker.holds.push(id);
            }
        }
    }

    fn hear(&mut self, pid: u32, said: Option<String>) {
        let worker = self.workers.get_mut(&pid).unwrap();
        let Some(said) = said else {
            assert!(worker.killed, "worker {pid} ended by itself");
            let worker = self.workers.remove(&pid).unwrap();
            self.queue.extend(worker.holds);
            self.start();
            return;
        };
        let words: Vec<&str> = said.split(' ').collect();
        let mut settle = |id: &str| {
            let at = worker.holds.iter().position(|held| held == id).unwrap();
            worker.holds.swap_remove(at);
        };
        match words[..] {
            ["ready"] => worker.ready = true,
            ["ack", id, how] => {
                settle(id);
                self.open -= 1;
                self.duplicates += usize::from(how == "duplicate");
            }
            ["back", id, pause] => {
                settle(id);
                let pause = pause.parse().unwrap();
                self.parked += usize::from(pause > 0);
                let due = Instant::now() + Duration::from_millis(pause);
                self.later.push((due, id.to_owned()));
            }
            _ => panic!("worker {pid} said {said:?}"),
        }
    }

    /// Kills one that is at work.
    fn kill(&mut self) {
        let busy = self.workers.iter_mut();
        let mut busy: Vec<_> = busy
            .filter(|(_, it)| !it.killed && !it.holds.is_empty())
            .collect();
        if busy.is_empty() {
            return;
        }
        let chance = rand::random_range(0..busy.len());
        let (pid, worker) = &mut busy[chance];
        worker.child.kill().unwrap();
        worker.child.wait().unwrap();
        worker.killed = true;
        let held = worker.holds.iter().cloned().collect();
        self.killed.insert(**pid, (micros(), held));
    }
}

/// Delivers everything twice, kills workers meanwhile, and ends when each delivery was acked.
fn deliver(url: &str, record: &str) -> (Broker, Vec<String>) {
    let ids: Vec<String> = (0..MESSAGES).map(|n| format!("{record}-{n}")).collect();
    let (say, said) = channel();
    let mut broker = Broker {
        url: url.to_owned(),
        record: record.to_owned(),
        ledger: env::temp_dir().join(record),
        workers: HashMap::new(),
        said,
        say,
        queue: ids.iter().chain(&ids).cloned().collect(),
        later: Vec::new(),
        killed: HashMap::new(),
        open: 2 * MESSAGES,
        parked: 0,
        duplicates: 0,
    };
    for _ in 0..WORKERS {
        broker.start();
    }
    let begun = Instant::now();
    let mut next_kill = begun;
    while broker.open > 0 {
        assert!(
            begun.elapsed() < Duration::from_secs(180),
            "{} deliveries are still open",
            broker.open
        );
        broker.hand_out();
        match broker.said.recv_timeout(Duration::from_millis(5)) {
            Ok((pid, said)) => broker.hear(pid, said),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => unreachable!("the broker says, too"),
        }
        if broker.killed.len() < KILLS && Instant::now() > next_kill {
            broker.kill();
            let pause = Duration::from_millis(rand::random_range(20..100));
            next_kill = Instant::now() + pause;
        }
    }
    for worker in broker.workers.values_mut() {
        let _ = worker.child.kill();
        let _ = worker.child.wait();
    }
    (broker, ids)
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

fn audit(name: &str, broker: &Broker, ids: &[String]) {
    let text = fs::read_to_string(&broker.ledger).unwrap();
    fs::remove_file(&broker.ledger).unwrap();
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
        broker.duplicates,
        broker.parked,
    );
    assert!(broker.killed.len() >= 5, "too few kills to show anything");
}

#[test]
fn no_message_is_lost_and_none_runs_twice_at_once_on_redis() {
    let Some(url) = redis() else { return };
    let record = unique("killed");
    let (broker, ids) = deliver(&url, &record);
    let mut connection = redis::Client::open(url).unwrap().get_connection().unwrap();
    for id in &ids {
        let _: () = redis::Commands::del(&mut connection, format!("{record}{id}")).unwrap();
    }
    audit("Redis", &broker, &ids);
}

#[tokio::test]
async fn no_message_is_lost_and_none_runs_twice_at_once_on_postgres() {
    let Some(url) = postgres() else { return };
    let record = unique("killed");
    let (of_url, of_record) = (url.clone(), record.clone());
    let delivered = tokio::task::spawn_blocking(move || deliver(&of_url, &of_record));
    let (broker, ids) = delivered.await.unwrap();
    let pool = sqlx::PgPool::connect(&url).await.unwrap();
    let drop = format!("DROP TABLE \"{record}\"");
    let dropped = sqlx::raw_sql(sqlx::AssertSqlSafe(drop))
        .execute(&pool)
        .await;
    dropped.unwrap();
    audit("PostgreSQL", &broker, &ids);
}
