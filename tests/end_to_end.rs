//! The workers of `examples/` at work on the real brokers: two processes handle 1,000 messages, of which a fifth is
//! delivered twice or more, while they are killed, cut off from their broker, and their store is restarted. No message
//! is lost; an effect repeats where the guide says that it may, and nowhere else; the dead-letter queue holds
//! what failed for good, and a redrive runs it again.
#![cfg(unix)]
#![allow(missing_docs, unreachable_pub)]
// Each of the workers brings along what they share.
#![allow(clippy::duplicate_mod)]

#[path = "../examples/worker/amqp.rs"]
mod amqp;
#[path = "../examples/jetstream_worker.rs"]
#[allow(dead_code)]
mod jetstream_worker;
#[path = "support/broker_queues.rs"]
mod queues;
#[path = "../examples/rabbitmq_worker.rs"]
#[allow(dead_code)]
mod rabbitmq_worker;
#[path = "../examples/redis_worker.rs"]
#[allow(dead_code)]
mod redis_worker;
#[path = "support/services.rs"]
mod services;

use amqp::Outbound;
use futures_util::future::join_all;
use lapin::{
    BasicProperties, Connection, ConnectionProperties,
    options::QueueDeclareOptions,
    types::{AMQPValue, FieldTable},
};
use queues::Broker;
use services::{OwnRedis, Proxy, host_and_port, postgres, unique};
use sqlx::PgPool;
use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fs::{self, File, OpenOptions},
    future::Future,
    io::Write,
    net::ToSocketAddrs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tower::{ServiceBuilder, service_fn, util::BoxCloneSyncService};
use tower_idempotency::{
    BoxError, BoxStore, DeadLetterLayer, Envelope, IdempotencyLayer, Lease, TransactionLayer,
    WithTransaction, event::Event,
};

const MESSAGES: usize = 1_000;
/// Of the messages; each of them is delivered twice, every fourth three times.
const DUPLICATED: usize = 200;
/// Every so many messages fail until they are redriven.
const FAILING: usize = 50;
const IN_FLIGHT: usize = 16;
/// Short, so that what a killed worker had claimed comes back soon; long enough for a busy machine.
const LEASE: Duration = Duration::from_secs(4);
const PATIENCE: Duration = Duration::from_secs(120);

type Consumer = BoxCloneSyncService<Envelope, (), BoxError>;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    SeenSet,
    Claim,
    Transaction,
}

// ===== the worker =====

/// Not a test: what a worker process does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker() {
    let Ok(broker) = env::var("E2E_BROKER") else {
        return;
    };
    let of = |name: &str| env::var(name).unwrap();
    let (url, queue) = (of("E2E_URL"), of("E2E_QUEUE"));
    let ledger = Ledger::open(Path::new(&of("E2E_LEDGER")));
    let mode = of("E2E_MODE");
    let stack: Arc<dyn Fn(Consumer) -> Consumer + Send + Sync>;
    let drained: std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;
    if mode == "Transaction" {
        let pool = PgPool::connect(&of("E2E_STORE")).await.unwrap();
        let layer = TransactionLayer::new(pool, &of("E2E_RECORD")).unwrap();
        layer.migrate().await.unwrap();
        let last = layer.clone();
        drained = Box::pin(async move { last.drained().await });
        let effects = format!("{}_effects", of("E2E_RECORD"));
        stack = Arc::new(move |dead| {
            let effects = effects.clone();
            let charge = move |message| charge_in_transaction(effects.clone(), message);
            BoxCloneSyncService::new(
                ServiceBuilder::new()
                    .layer(DeadLetterLayer::new(dead))
                    .layer(layer.clone())
                    .service(service_fn(charge)),
            )
        });
    } else {
        let store = BoxStore::connect(&of("E2E_STORE"), &of("E2E_RECORD"))
            .await
            .unwrap();
        let told = ledger.clone();
        let layer = IdempotencyLayer::new(store).on_event(move |event| {
            let id = match event {
                Event::Ran { id, .. }
                | Event::MarkFailed { id, .. }
                | Event::LeaseLost { id, .. } => id,
                _ => return,
            };
            told.write(&format!("{} {id}", event.name()));
        });
        let claim = layer.clone().claim(Lease::new(LEASE).unwrap());
        let (of_marks, of_claims) = (layer.clone(), claim.clone());
        drained = Box::pin(async move {
            of_marks.drained().await;
            of_claims.drained().await;
        });
        let claims = mode == "Claim";
        stack = Arc::new(move |dead| {
            let ledger = ledger.clone();
            let dead = DeadLetterLayer::new(dead);
            let charge = service_fn(move |message| charge(ledger.clone(), message));
            // Says when the layer was asked, which is before it asks the store.
            let asked = |message: Envelope| {
                let headers = message
                    .headers()
                    .clone()
                    .with("asked", micros().to_string());
                message.with_headers(headers)
            };
            let builder = ServiceBuilder::new().layer(dead).map_request(asked);
            if claims {
                BoxCloneSyncService::new(builder.layer(claim.clone()).service(charge))
            } else {
                BoxCloneSyncService::new(builder.layer(layer.clone()).service(charge))
            }
        });
    }
    let stack = move |dead| stack(dead);
    let worked = match broker.as_str() {
        "RabbitMq" => rabbitmq_worker::work(&url, &queue, IN_FLIGHT, stack, terminated()).await,
        "Redis" => redis_worker::work(&url, &queue, IN_FLIGHT, stack, terminated()).await,
        "JetStream" => jetstream_worker::work(&url, &queue, IN_FLIGHT, stack, terminated()).await,
        other => panic!("{other}"),
    };
    worked.unwrap();
    drained.await;
}

async fn terminated() {
    use tokio::signal::unix::{SignalKind, signal};

    signal(SignalKind::terminate()).unwrap().recv().await;
}

fn fails(message: &Envelope) -> bool {
    let fixed = env::var("E2E_FIXED").is_ok();
    message.raw_data() == Some(r#"{"fails":true}"#) && !fixed
}

async fn charge(ledger: Ledger, message: Envelope) -> Result<(), BoxError> {
    pause().await;
    if fails(&message) {
        return Err("card declined".into());
    }
    let id = message.id().ok_or("no id")?;
    let asked = message.headers().get("asked").ok_or("not asked")?;
    ledger.write(&format!("effect {id} {asked}"));
    pause().await;
    Ok(())
}

async fn charge_in_transaction(
    effects: String,
    message: WithTransaction<Envelope, sqlx::Postgres>,
) -> Result<(), BoxError> {
    let WithTransaction {
        request: message,
        mut transaction,
    } = message;
    pause().await;
    if fails(&message) {
        return Err("card declined".into());
    }
    let insert = format!("INSERT INTO {effects} (id) VALUES ($1)");
    sqlx::query(sqlx::AssertSqlSafe(insert))
        .bind(message.id().map(|id| id.as_str().to_owned()))
        .execute(&mut *transaction)
        .await?;
    pause().await;
    Ok(())
}

/// So that there is something before and after the effect that a kill can fall into.
async fn pause() {
    tokio::time::sleep(Duration::from_millis(rand::random_range(0..15))).await;
}

fn micros() -> u128 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_micros()
}

#[derive(Clone)]
struct Ledger(Arc<File>);

impl Ledger {
    fn open(path: &Path) -> Self {
        let file = OpenOptions::new().create(true).append(true).open(path);
        Ledger(Arc::new(file.unwrap()))
    }

    /// One short line in one write, which no other one gets into, and no kill takes back.
    fn write(&self, what: &str) {
        let line = format!("{} {} {what}\n", std::process::id(), micros());
        (&*self.0).write_all(line.as_bytes()).unwrap();
    }
}

// ===== the fleet =====

struct Fleet {
    broker: Broker,
    mode: Mode,
    /// Names everything that is this test's own.
    run: String,
    url: String,
    store: String,
    ledger: PathBuf,
    workers: Vec<Child>,
    killed: BTreeSet<u32>,
    pool: Option<PgPool>,
}

impl Fleet {
    fn spawn(&mut self, fixed: bool) {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log())
            .unwrap();
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--exact", "worker", "--nocapture"])
            .env("E2E_BROKER", format!("{:?}", self.broker))
            .env("E2E_MODE", format!("{:?}", self.mode))
            .env("E2E_URL", &self.url)
            .env("E2E_QUEUE", &self.run)
            .env("E2E_STORE", &self.store)
            .env("E2E_RECORD", &self.run)
            .env("E2E_LEDGER", &self.ledger)
            .env("REDELIVERY_SECS", "3")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        if fixed {
            command.env("E2E_FIXED", "1");
        }
        self.workers.push(command.spawn().unwrap());
    }

    fn log(&self) -> PathBuf {
        self.ledger.with_extension("log")
    }

    /// SIGKILL for the one that has been there longest, and another one in its place.
    fn kill(&mut self) {
        let mut worker = self.workers.remove(0);
        worker.kill().unwrap();
        worker.wait().unwrap();
        self.killed.insert(worker.id());
        self.spawn(false);
    }

    /// SIGTERM for all, which end by themselves.
    async fn stop(&mut self) {
        for worker in &self.workers {
            let pid = worker.id().to_string();
            assert!(Command::new("kill").arg(pid).status().unwrap().success());
        }
        let start = Instant::now();
        for mut worker in self.workers.drain(..) {
            let status = loop {
                if let Some(status) = worker.try_wait().unwrap() {
                    break status;
                }
                assert!(start.elapsed() < PATIENCE, "a worker does not end");
                tokio::time::sleep(Duration::from_millis(20)).await;
            };
            assert!(status.success(), "a worker ended with {status}");
        }
    }

    /// How many effects there are of each message.
    async fn effects(&self) -> BTreeMap<String, u64> {
        let mut effects = BTreeMap::new();
        if let Some(pool) = &self.pool {
            let select = format!("SELECT id FROM {}_effects", self.run);
            let ids = sqlx::query_scalar::<_, String>(sqlx::AssertSqlSafe(select));
            for id in ids.fetch_all(pool).await.unwrap() {
                *effects.entry(id).or_default() += 1;
            }
            return effects;
        }
        for line in self.lines() {
            if line.what == "effect" {
                *effects.entry(line.id).or_default() += 1;
            }
        }
        effects
    }

    fn lines(&self) -> Vec<Line> {
        let text = fs::read_to_string(&self.ledger).unwrap_or_default();
        text.lines().map(Line::parse).collect()
    }

    async fn until(&self, what: &str, mut so: impl AsyncFnMut() -> bool) {
        let start = Instant::now();
        while !so().await {
            if start.elapsed() > PATIENCE {
                let log = fs::read_to_string(self.log()).unwrap_or_default();
                let last: Vec<&str> = log.lines().rev().take(30).collect();
                panic!(
                    "{:?}, {:?}: not in time: {what}\n{last:#?}",
                    self.broker, self.mode
                );
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn until_effects(&self, count: usize) {
        let what = format!("{count} messages with an effect");
        self.until(&what, async || self.effects().await.len() >= count)
            .await;
    }

    /// Until the broker has nothing left that a worker would handle.
    async fn until_drained(&mut self, fixed: bool) {
        let (broker, run) = (self.broker, self.run.clone());
        for _ in 0..5 {
            self.until("nothing waits", async || broker.waiting(&run).await == 0)
                .await;
            // What a worker holds, the broker does not count; it is back when the worker has ended.
            self.stop().await;
            if broker.left(&run).await == 0 {
                return;
            }
            self.spawn(fixed);
            self.spawn(fixed);
        }
        panic!("{broker:?}: messages come back and back");
    }
}

/// A line of the ledger.
#[derive(Clone, Debug)]
struct Line {
    pid: u32,
    at: u128,
    what: String,
    id: String,
    asked: u128,
}

impl Line {
    fn parse(line: &str) -> Line {
        let mut words = line.split(' ');
        let mut word = || words.next().unwrap_or_default().to_owned();
        Line {
            pid: word().parse().unwrap(),
            at: word().parse().unwrap(),
            what: word(),
            id: word(),
            asked: word().parse().unwrap_or_default(),
        }
    }
}

/// The same URL with another host and port.
fn through(url: &str, proxy: &Proxy) -> String {
    let (scheme, rest) = url.split_once("://").unwrap();
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, tail) = rest.split_at(end);
    let user = authority
        .rsplit_once('@')
        .map_or(String::new(), |(user, _)| format!("{user}@"));
    format!("{scheme}://{user}{}{tail}", proxy.addr())
}

async fn proxy(url: &str) -> Proxy {
    let target = host_and_port(url)
        .to_socket_addrs()
        .unwrap()
        .next()
        .unwrap();
    Proxy::start(target).await
}

// ===== the run =====

async fn nothing_is_lost(broker: Broker, mode: Mode) {
    let Some(url) = broker.url() else { return };
    let run = unique(&format!(
        "e2e_{broker:?}_{}",
        format!("{mode:?}").to_lowercase()
    ));
    let to_broker = proxy(&url).await;
    let mut redis = None;
    let mut to_postgres = None;
    let mut pool = None;
    let store = if mode == Mode::Transaction {
        let Some(url) = postgres() else { return };
        let opened = PgPool::connect(&url).await.unwrap();
        let create = format!("CREATE TABLE {run}_effects (id TEXT NOT NULL)");
        sqlx::raw_sql(sqlx::AssertSqlSafe(create))
            .execute(&opened)
            .await
            .unwrap();
        pool = Some(opened);
        let proxy = to_postgres.insert(proxy(&url).await);
        through(&url, proxy)
    } else {
        // What it acknowledged is on its disk.
        let args = ["--appendonly", "yes", "--appendfsync", "always"];
        let started = tokio::task::spawn_blocking(move || OwnRedis::start(&args))
            .await
            .unwrap();
        redis.insert(started).url()
    };
    let mut fleet = Fleet {
        broker,
        mode,
        url: through(&url, &to_broker),
        store,
        ledger: env::temp_dir().join(&run),
        run: run.clone(),
        workers: Vec::new(),
        killed: BTreeSet::new(),
        pool,
    };

    let messages: Vec<(String, String)> = (0..MESSAGES).map(|n| message(&run, n)).collect();
    let good: BTreeSet<&str> = ids(&messages, |n| n % FAILING != 0);
    let bad: BTreeSet<&str> = ids(&messages, |n| n % FAILING == 0);
    let deliveries = deliveries(&messages);
    broker.declare(&run).await;
    broker.publish(&run, &deliveries).await;

    let begun = Instant::now();
    fleet.spawn(false);
    fleet.spawn(false);
    let part = |percent: usize| good.len() * percent / 100;
    fleet.until_effects(part(12)).await;
    fleet.kill();
    fleet.until_effects(part(25)).await;
    to_broker.cut();
    fleet.until_effects(part(37)).await;
    fleet.kill();
    fleet.until_effects(part(50)).await;
    if let Some(proxy) = &to_postgres {
        proxy.cut();
    }
    if let Some(mut server) = redis.take() {
        let restart = move || {
            server.restart();
            server
        };
        redis = Some(tokio::task::spawn_blocking(restart).await.unwrap());
    }
    fleet.until_effects(part(62)).await;
    to_broker.refuse(true);
    to_broker.cut();
    tokio::time::sleep(Duration::from_millis(500)).await;
    to_broker.refuse(false);
    fleet.until_effects(part(75)).await;
    fleet.kill();
    fleet.kill();
    fleet.until_effects(good.len()).await;
    fleet.until_drained(false).await;
    let took = begun.elapsed();

    // Nothing is lost, and nothing else had an effect.
    let effects = fleet.effects().await;
    let had: BTreeSet<&str> = effects.keys().map(String::as_str).collect();
    assert_eq!(had, good, "what had an effect");
    let repeated = audit(&fleet, &effects);

    // The dead-letter queue holds what failed for good: each of them, and nothing else.
    let dead = broker.dead(&run).await;
    let dead: Vec<Envelope> = dead
        .iter()
        .map(|body| Envelope::decode(body).unwrap())
        .collect();
    let found: BTreeSet<&str> = dead.iter().map(|it| it.id().unwrap().as_str()).collect();
    assert_eq!(found, bad, "what is on the dead-letter queue");
    for message in &dead {
        let block = message.dead_letter().expect("a block");
        assert_eq!(block.error(), Some("card declined"));
        assert_eq!(block.original_queue(), Some(run.as_str()));
        assert_eq!(message.attempts(), 1, "parking spends no attempt");
    }

    // What was wrong is put right, and a redrive runs it.
    fleet.spawn(true);
    let redriven = redrive(&url, &run).await;
    assert_eq!(redriven, dead.len(), "redriven");
    fleet.until_effects(MESSAGES).await;
    fleet.until_drained(true).await;
    let effects = fleet.effects().await;
    for id in bad.iter().filter(|_| mode != Mode::SeenSet) {
        assert_eq!(effects[*id], 1, "effects of {id} after the redrive");
    }
    // Copies that are redriven together may run together in the seen-set mode.
    audit(&fleet, &effects);
    assert!(
        broker.dead(&run).await.is_empty(),
        "dead letters that were redriven"
    );

    println!(
        "{broker:?}, {mode:?}: {} deliveries of {MESSAGES} messages, {} kills, in {took:.1?}; 0 missing, {repeated} repeated; \
         {} dead letters of {} messages, redriven",
        deliveries.len(),
        fleet.killed.len(),
        dead.len(),
        bad.len(),
    );
    broker.delete(&run).await;
    if let Some(pool) = &fleet.pool {
        let drop = format!("DROP TABLE {run}_effects; DROP TABLE {run}");
        sqlx::raw_sql(sqlx::AssertSqlSafe(drop))
            .execute(pool)
            .await
            .unwrap();
    }
    let _ = fs::remove_file(&fleet.ledger);
    let _ = fs::remove_file(fleet.log());
    drop(redis);
}

/// Its id and its body.
fn message(run: &str, n: usize) -> (String, String) {
    let id = format!("{run}-{n}");
    let data = if n % FAILING == 0 {
        r#"{"fails":true}"#
    } else {
        "{}"
    };
    let body = format!(
        r#"{{"job":"urn:shop:payment","trace_id":"t","data":{data},"meta":{{"id":"{id}","queue":"{run}","lang":"php","schema_version":1,"created_at":1790000000000}},"attempts":0}}"#
    );
    (id, body)
}

fn ids(messages: &[(String, String)], such: impl Fn(usize) -> bool) -> BTreeSet<&str> {
    let numbered = messages.iter().enumerate();
    numbered
        .filter(|(n, _)| such(*n))
        .map(|(_, (id, _))| id.as_str())
        .collect()
}

/// Copies follow their message at once, after a while, or last of all.
fn deliveries(messages: &[(String, String)]) -> Vec<&str> {
    let mut deliveries: Vec<&str> = messages.iter().map(|(_, body)| body.as_str()).collect();
    let every = MESSAGES / DUPLICATED;
    for (n, (_, body)) in messages.iter().enumerate().filter(|(n, _)| n % every == 0) {
        let copies = if n % (4 * every) == 0 { 2 } else { 1 };
        for _ in 0..copies {
            let at = deliveries.iter().position(|it| it == body).unwrap();
            let after = [1, 10, 100, MESSAGES][rand::random_range(0..4)];
            deliveries.insert((at + after).min(deliveries.len()), body);
        }
    }
    deliveries
}

/// How many messages had their effect more than once: each time only where it may.
fn audit(fleet: &Fleet, effects: &BTreeMap<String, u64>) -> usize {
    let repeated: Vec<&String> = effects
        .iter()
        .filter(|(_, count)| **count > 1)
        .map(|(id, _)| id)
        .collect();
    if fleet.mode == Mode::Transaction {
        assert!(
            repeated.is_empty(),
            "repeated in a transaction: {repeated:?}"
        );
        return 0;
    }
    let lines = fleet.lines();
    for id in &repeated {
        let of_id: Vec<&Line> = lines.iter().filter(|line| line.id == **id).collect();
        let runs: Vec<&Line> = of_id
            .iter()
            .copied()
            .filter(|line| line.what == "effect")
            .collect();
        let happened = |what: &str, pid: u32| {
            of_id
                .iter()
                .any(|line| line.what == what && line.pid == pid)
        };
        for (one, next) in runs.iter().zip(&runs[1..]) {
            let died = fleet.killed.contains(&one.pid);
            let unmarked = happened("mark_failed", one.pid);
            let late = match fleet.mode {
                // The copy was looked up before the mark was answered.
                Mode::SeenSet => {
                    let mut marks = of_id
                        .iter()
                        .filter(|line| line.what == "ran" && line.pid == one.pid);
                    marks.any(|mark| mark.at >= one.at && next.asked < mark.at)
                }
                _ => happened("lease_lost", one.pid),
            };
            assert!(
                died || unmarked || late,
                "{:?}: {id} ran again for no reason that is documented: {of_id:#?}",
                fleet.mode
            );
        }
    }
    repeated.len()
}

/// By the command, which answers how many it moved.
async fn redrive(url: &str, queue: &str) -> usize {
    let (url, from) = (url.to_owned(), format!("{queue}.dlq"));
    let command = move || {
        Command::new(env!("CARGO_BIN_EXE_idempotency"))
            .args(["redrive", "--json", "--broker", &url, "--from", &from])
            .output()
            .unwrap()
    };
    let output = tokio::task::spawn_blocking(command).await.unwrap();
    assert!(output.status.success(), "{output:?}");
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    answer["redriven"].as_u64().unwrap() as usize
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_with_the_seen_set() {
    nothing_is_lost(Broker::RabbitMq, Mode::SeenSet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_with_claims() {
    nothing_is_lost(Broker::RabbitMq, Mode::Claim).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_in_a_transaction() {
    nothing_is_lost(Broker::RabbitMq, Mode::Transaction).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_lists_with_the_seen_set() {
    nothing_is_lost(Broker::Redis, Mode::SeenSet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_lists_with_claims() {
    nothing_is_lost(Broker::Redis, Mode::Claim).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_lists_in_a_transaction() {
    nothing_is_lost(Broker::Redis, Mode::Transaction).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jetstream_with_the_seen_set() {
    nothing_is_lost(Broker::JetStream, Mode::SeenSet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jetstream_with_claims() {
    nothing_is_lost(Broker::JetStream, Mode::Claim).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jetstream_in_a_transaction() {
    nothing_is_lost(Broker::JetStream, Mode::Transaction).await;
}

/// Whoever publishes beside others is told of its own message whether a queue took it.
#[tokio::test]
async fn rabbitmq_is_believed_message_by_message() {
    let Some(url) = services::rabbitmq() else {
        return;
    };
    let (there, nowhere) = (unique("e2e"), unique("e2e_nowhere"));
    Broker::RabbitMq.declare(&there).await;
    let connection = Connection::connect(&url, ConnectionProperties::default());
    let connection = Arc::new(connection.await.unwrap());
    let outbound = Outbound::new(connection.clone());
    let publishes = (0..200).map(async |n| {
        let queue = if n % 3 == 0 { &nowhere } else { &there };
        let sent = outbound.publish(queue, b"{}", BasicProperties::default());
        assert_eq!(sent.await.is_ok(), n % 3 != 0, "{n}");
    });
    join_all(publishes).await;

    // A channel that the broker has closed is not the last one.
    let other = format!("{there}.later.250");
    let plain = connection.create_channel().await.unwrap();
    let declared = plain.queue_declare(
        other.as_str().into(),
        QueueDeclareOptions::durable(),
        FieldTable::default(),
    );
    declared.await.unwrap();
    let properties = BasicProperties::default();
    let later = outbound.publish_later(&there, Duration::from_millis(1), b"{}", properties.clone());
    assert!(later.await.is_err(), "there is another queue of that name");
    outbound.publish(&there, b"{}", properties).await.unwrap();
    connection.close(200, "done".into()).await.unwrap();
    Broker::RabbitMq.delete(&there).await;
}

#[test]
fn a_copy_is_not_dropped_refused_or_copied_further() {
    let text = |value: &str| AMQPValue::LongString(value.into());
    let mut headers = FieldTable::default();
    for name in ["CC", "BCC", "x-delivery-count", "traceparent"] {
        headers.insert(name.into(), text("q"));
    }
    let own = BasicProperties::default()
        .with_headers(headers)
        .with_expiration("1".into())
        .with_user_id("php".into())
        .with_delivery_mode(1)
        .with_message_id("a".into())
        .with_type("urn:x".into())
        .with_priority(3);
    let mut kept = FieldTable::default();
    kept.insert("traceparent".into(), text("q"));
    let expected = BasicProperties::default()
        .with_headers(kept)
        .with_delivery_mode(2)
        .with_message_id("a".into())
        .with_type("urn:x".into())
        .with_priority(3);
    assert_eq!(amqp::copied(&own), expected);
}
