//! The command `idempotency`, on all stores and all brokers.
#![allow(missing_docs, unreachable_pub)]

#[path = "support/broker_queues.rs"]
mod queues;
#[path = "support/services.rs"]
mod services;

use futures_util::future::join_all;
use lapin::{
    BasicProperties, Connection, ConnectionProperties,
    options::{
        BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions,
        QueueDeleteOptions, QueuePurgeOptions,
    },
    types::{AMQPValue, FieldTable},
};
use queues::Broker;
use serde_json::{Value, json};
use services::{PATIENCE, host_and_port, unique};
use std::{
    env, fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
    time::Duration,
};
use tower_idempotency::{
    ClaimStore, Envelope, Lease, MessageId, MySqlStore, Owner, PostgresStore, RedisStore,
    SqliteStore, Store,
    dead_letter::poison,
    envelope::{DeadLetterBlock, Headers, Reason, frame, unframe},
    store::BoxStore,
};

// ===== help =====

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_idempotency"));
    command
        .args(arguments)
        .env_remove("IDEMPOTENCY_STORE")
        .env_remove("IDEMPOTENCY_NAME")
        .env_remove("IDEMPOTENCY_BROKER")
        .stdin(Stdio::null());
    command
}

/// Runs it beside the runtime, and says with what code it ended.
async fn run(arguments: &[&str]) -> (i32, String, String) {
    let mut command = command(arguments);
    let done = tokio::task::spawn_blocking(move || command.output().unwrap());
    ended(done.await.unwrap())
}

fn ended(output: Output) -> (i32, String, String) {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

async fn told(arguments: &[&str]) -> (i32, Value) {
    let (code, out, err) = run(&[arguments, &["--json"]].concat()).await;
    let json = serde_json::from_str(&out);
    (code, json.unwrap_or_else(|_| panic!("{code}: {out}{err}")))
}

/// A record of the test's own.
struct Place {
    url: String,
    name: String,
    dir: Option<PathBuf>,
}

impl Place {
    fn new(url: String) -> Place {
        let (name, dir) = (unique("cli"), None);
        Place { url, name, dir }
    }

    fn sqlite() -> Place {
        let dir = env::temp_dir().join(unique("cli"));
        fs::create_dir(&dir).unwrap();
        let url = format!("sqlite://{}", dir.join("seen.db").display());
        Place {
            dir: Some(dir),
            ..Place::new(url)
        }
    }

    async fn ask(&self, arguments: &[&str]) -> (i32, Value) {
        told(&[arguments, &["--store", &self.url, "--name", &self.name]].concat()).await
    }

    async fn drop(self) {
        let sql = format!("DROP TABLE {}", self.name);
        let sql = sqlx::raw_sql(sqlx::AssertSqlSafe(sql));
        if let Some(dir) = &self.dir {
            fs::remove_dir_all(dir).unwrap();
        } else if self.url.starts_with("postgres") {
            let pool = sqlx::PgPool::connect(&self.url).await.unwrap();
            sql.execute(&pool).await.unwrap();
        } else if self.url.starts_with("mysql") {
            let pool = sqlx::MySqlPool::connect(&self.url).await.unwrap();
            sql.execute(&pool).await.unwrap();
        }
    }
}

fn places() -> Vec<Place> {
    let urls = [services::redis(), services::postgres(), services::mysql()];
    let servers = urls.into_iter().flatten().map(Place::new);
    servers.chain([Place::sqlite()]).collect()
}

/// A store that keeps ids for a moment.
async fn short(url: &str, name: &str) -> BoxStore {
    let ttl = Duration::from_millis(1);
    match url.split(':').next().unwrap() {
        "redis" => BoxStore::new(
            RedisStore::builder(name)
                .ttl(ttl)
                .connect(url)
                .await
                .unwrap(),
        ),
        "postgres" => BoxStore::new(
            PostgresStore::builder(name)
                .ttl(ttl)
                .connect(url)
                .await
                .unwrap(),
        ),
        "mysql" => BoxStore::new(
            MySqlStore::builder(name)
                .ttl(ttl)
                .connect(url)
                .await
                .unwrap(),
        ),
        _ => BoxStore::new(
            SqliteStore::builder(name)
                .ttl(ttl)
                .connect(url)
                .await
                .unwrap(),
        ),
    }
}

// ===== the record =====

#[tokio::test]
async fn it_tells_and_tends_the_record_of_every_store() {
    join_all(places().into_iter().map(async |place| {
        let kind = place.url.split(':').next().unwrap().to_owned();
        let sql = kind != "redis";
        assert_eq!(
            place.ask(&["migrate"]).await,
            (0, json!({"migrated": true})),
            "{kind}"
        );
        assert_eq!(
            place.ask(&["seen", "m"]).await,
            (1, json!({"id": "m", "seen": false})),
            "{kind}"
        );
        let (code, why) = place.ask(&["why", "m"]).await;
        assert_eq!((code, &why["state"]), (1, &Value::Null), "{kind}");

        let store = BoxStore::connect(&place.url, &place.name).await.unwrap();
        store.remember(&"m".into()).await.unwrap();
        store.remember(&"-dash \" ü".into()).await.unwrap();
        let (owner, lease) = (
            Owner::random(),
            Lease::new(Duration::from_secs(50)).unwrap(),
        );
        store.claim(&"c".into(), owner, lease).await.unwrap();

        assert_eq!(
            place.ask(&["seen", "m"]).await,
            (0, json!({"id": "m", "seen": true})),
            "{kind}"
        );
        // Claimed is not done.
        assert_eq!(place.ask(&["seen", "c"]).await.0, 1, "{kind}");
        let odd = json!({"id": "-dash \" ü", "seen": true});
        let asked = [
            "--json",
            "--store",
            &place.url,
            "--name",
            &place.name,
            "seen",
            "--",
            "-dash \" ü",
        ];
        let (code, out, _) = run(&asked).await;
        assert_eq!(
            (code, serde_json::from_str::<Value>(&out).unwrap()),
            (0, odd),
            "{kind}"
        );

        let (code, why) = place.ask(&["why", "m"]).await;
        assert_eq!(
            (code, &why["state"], &why["owner"]),
            (0, &json!("done"), &Value::Null),
            "{kind}"
        );
        assert_eq!(why["since"].is_string(), sql, "{kind}: {why}");
        let left = why["expires_in"].as_f64().unwrap();
        assert!(left > 86_000.0 && left <= 86_400.0, "{kind}: {why}");
        let (code, why) = place.ask(&["why", "c"]).await;
        assert_eq!((code, &why["state"]), (0, &json!("claimed")), "{kind}");
        assert_eq!(why["owner"], json!(owner.to_string()), "{kind}");
        assert!(why["expires_in"].as_f64().unwrap() <= 50.0, "{kind}");

        let (code, stats) = place.ask(&["stats"]).await;
        assert_eq!(
            (code, &stats["count"], &stats["claimed"]),
            (0, &json!(3), &json!(1)),
            "{kind}"
        );
        assert_eq!(stats["oldest"].is_string(), sql, "{kind}: {stats}");

        assert_eq!(
            place.ask(&["forget", "m", "c", "none"]).await,
            (1, json!({"forgotten": 2, "unknown": ["none"]})),
            "{kind}"
        );
        for id in ["m", "c"] {
            assert_eq!(place.ask(&["why", id]).await.0, 1, "{kind}");
        }

        short(&place.url, &place.name)
            .await
            .remember(&"over".into())
            .await
            .unwrap();
        let expired = async || place.ask(&["why", "over"]).await;
        while expired().await.0 == 0 {}
        let (_, why) = expired().await;
        assert_eq!(why["expired"], json!(sql), "{kind}: {why}");
        let purged = json!({"deleted": u64::from(sql), "interrupted": false});
        assert_eq!(place.ask(&["purge"]).await, (0, purged), "{kind}");
        store.forget(&"-dash \" ü".into()).await.unwrap();
        let (_, stats) = place.ask(&["stats"]).await;
        assert_eq!(
            (&stats["count"], &stats["expired"]),
            (&json!(0), &json!(0)),
            "{kind}"
        );
        place.drop().await;
    }))
    .await;
}

#[tokio::test]
async fn it_prints_statements_without_a_server() {
    for (url, quote) in [
        ("postgres://nowhere.invalid/x", '"'),
        ("mysql://nowhere.invalid/x", '`'),
        ("sqlite:///nowhere/x.db", '"'),
    ] {
        let (code, out, err) = run(&["ddl", "--store", url, "--name", "orders_seen"]).await;
        assert_eq!((code, &*err), (0, ""), "{url}");
        assert!(
            out.contains(&format!(
                "CREATE TABLE IF NOT EXISTS {quote}orders_seen{quote}"
            )),
            "{out}"
        );
    }
    let (code, out, _) = run(&["ddl", "--store", "redis://nowhere.invalid", "--name", "x"]).await;
    assert_eq!((code, out.trim()), (0, ""));
    let (code, _, err) = run(&["ddl", "--store", "postgres://h/x", "--name", "no table"]).await;
    assert_eq!(code, 2);
    assert!(err.contains("no table"), "{err}");
}

#[tokio::test]
async fn what_cannot_be_asked_is_said_and_what_fails_is_told_apart() {
    let usage: &[&[&str]] = &[
        &[],
        &["seen"],
        &["seen", "m"],
        &["seen", "m", "--store", "redis://127.0.0.1"],
        &["seen", "m", "--store", "redis://127.0.0.1", "--name", ""],
        &["seen", "m", "--store", "s3://bucket", "--name", "x"],
        &[
            "seen",
            "m",
            "--store",
            "sqlite:///no/such/file.db",
            "--name",
            "x",
        ],
        &["forget"],
        &["seen", ""],
        &["forget", "a", ""],
        &["redrive", "--from", "q"],
        &["redrive", "--from", "q", "--broker", "kafka://h"],
        &["redrive", "--from", "", "--broker", "redis://h"],
        &[
            "redrive",
            "--from",
            "q",
            "--broker",
            "redis://h",
            "--forget",
        ],
        &[
            "redrive",
            "--from",
            "q",
            "--broker",
            "redis://h",
            "--max",
            "many",
        ],
    ];
    for arguments in usage {
        let (code, out, err) = run(arguments).await;
        assert_eq!((code, &*out), (2, ""), "{arguments:?}: {err}");
        assert!(!err.is_empty(), "{arguments:?}");
    }
    let closed = "127.0.0.1:1";
    for (scheme, path) in [("redis", ""), ("postgres", "/d"), ("mysql", "/d")] {
        let url = format!("{scheme}://u:hush1@{closed}{path}");
        let (code, _, err) = run(&["seen", "m", "--store", &url, "--name", "x"]).await;
        assert_eq!(code, 3, "{err}");
        assert!(!err.contains("hush1"), "{err}");
    }
    for scheme in ["redis", "amqp", "nats"] {
        let url = format!("{scheme}://u:hush1@{closed}");
        let (code, _, err) = run(&["redrive", "--from", "q", "--broker", &url]).await;
        assert_eq!(code, 3, "{err}");
        assert!(!err.contains("hush1"), "{err}");
    }
}

#[tokio::test]
async fn no_password_is_printed_whatever_goes_wrong() {
    let mut asked: Vec<Vec<String>> = Vec::new();
    for (variable, scheme) in [
        (services::redis(), "redis"),
        (services::postgres(), "postgres"),
        (services::mysql(), "mysql"),
    ] {
        let Some(there) = variable else { continue };
        let host = host_and_port(&there);
        for url in [
            format!("{scheme}://nobody:hu%24h1@{host}/test"),
            format!("{scheme}://nobody:hu%24h1@{host}:notaport/test"),
            format!("{scheme}://nobody:hu%24h1@[::bad/test"),
        ] {
            asked.push(
                ["seen", "m", "--name", "x", "--store", &url]
                    .map(str::to_owned)
                    .into(),
            );
            // In the place of an id, and of an option that there is not.
            asked.push(["seen", "m", &url].map(str::to_owned).into());
            asked.push(
                ["seen", "m", &format!("--shop={url}")]
                    .map(str::to_owned)
                    .into(),
            );
        }
    }
    for broker in [Broker::RabbitMq, Broker::Redis, Broker::JetStream] {
        let Some(there) = broker.url() else { continue };
        let (scheme, _) = there.split_once("://").unwrap();
        for url in [
            format!(
                "{scheme}://nobody:hu%24h1@{}/no%2Fsuch",
                host_and_port(&there)
            ),
            format!("{scheme}://nobody:hu%24h1@h:notaport"),
            format!("nope{scheme}://nobody:hu%24h1@h"),
        ] {
            asked.push(
                ["redrive", "--from", "q", "--broker", &url]
                    .map(str::to_owned)
                    .into(),
            );
        }
    }
    for arguments in asked {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (_, out, err) = run(&arguments).await;
        for secret in ["hu%24h1", "hu$h1"] {
            assert!(
                !out.contains(secret) && !err.contains(secret),
                "{arguments:?}: {out}{err}"
            );
        }
    }
    let help = command(&["redrive", "--help"])
        .env("IDEMPOTENCY_STORE", "redis://:hush2@h")
        .env("IDEMPOTENCY_BROKER", "amqp://u:hush2@h")
        .output()
        .unwrap();
    let (code, out, _) = ended(help);
    assert_eq!(code, 0);
    assert!(
        out.contains("IDEMPOTENCY_BROKER") && !out.contains("hush2"),
        "{out}"
    );
}

// ===== redrive =====

/// A dead letter of the queue.
fn dead(id: &str, queue: &str) -> String {
    let message = Envelope::new("urn:shop:payment", &json!({"cents": 1250})).unwrap();
    let block = DeadLetterBlock::new(Reason::Failed).with_error("no funds");
    message
        .with_id(id)
        .with_queue(queue)
        .with_attempts(3)
        .with_dead_letter(block)
        .encode()
}

fn ids(bodies: &[Vec<u8>]) -> Vec<String> {
    let id = |body: &Vec<u8>| Envelope::decode(body).ok()?.id().map(|id| id.to_string());
    bodies
        .iter()
        .map(|body| id(body).unwrap_or_default())
        .collect()
}

/// All that is on a queue, which are put there as the dead letters of another name.
async fn on(broker: Broker, queue: &str) -> Vec<Vec<u8>> {
    broker.dead(queue.strip_suffix(".dlq").unwrap()).await
}

/// A queue whose name says that dead letters are on it, as its helper wants it.
async fn each_broker(test: impl AsyncFn(Broker, &str, &str)) {
    for broker in [Broker::RabbitMq, Broker::Redis, Broker::JetStream] {
        let Some(url) = broker.url() else { continue };
        let queue = unique("cli");
        broker.declare(&queue).await;
        // Where they go is looked into in the same way.
        broker.declare(&format!("{queue}.to")).await;
        test(broker, &url, &queue).await;
        broker.delete(&queue).await;
        broker.delete(&format!("{queue}.to")).await;
    }
}

#[tokio::test]
async fn a_redrive_takes_what_can_go_and_names_what_stays() {
    each_broker(async |broker, url, queue| {
        let (from, to) = (format!("{queue}.dlq"), format!("{queue}.to.dlq"));
        let bad_version = dead("v2", &to).replace("\"schema_version\":1", "\"schema_version\":2");
        let no_queue =
            r#"{"job":"urn:x","data":{},"meta":{"id":"lost","schema_version":1}}"#.to_owned();
        let nowhere = dead("nowhere", &format!("{queue} no such"));
        let block = DeadLetterBlock::new(Reason::Poison).with_error("no brace at column 1");
        let bodies = [
            poison(b"nonsense", &block),
            dead("a", &to),
            bad_version,
            dead("b", &to),
            no_queue,
            nowhere,
            dead("c", &to),
        ];
        let bodies: Vec<&str> = bodies.iter().map(String::as_str).collect();
        broker.publish(&from, &bodies).await;

        // Told, not done.
        let order = ["redrive", "--from", &from, "--broker", url];
        let dry = [&order[..], &["--dry-run"]].concat();
        let (code, plan) = told(&dry).await;
        let on_redis = broker == Broker::Redis;
        // A list is made by what is put there.
        let would = if on_redis { 4 } else { 3 };
        assert_eq!((code, &plan["redriven"]), (4, &json!(would)), "{broker:?}");
        assert_eq!(
            on(broker, &from).await,
            bodies
                .iter()
                .map(|body| body.as_bytes())
                .collect::<Vec<_>>(),
            "{broker:?}: after a dry run"
        );
        assert!(on(broker, &to).await.is_empty(), "{broker:?}");

        let (code, out, err) = run(&[&order[..], &["--json", "--max", "1"]].concat()).await;
        let out: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            (code, &out["redriven"]),
            (4, &json!(1)),
            "{broker:?}: {err}"
        );
        assert_eq!(ids(&on(broker, &to).await), ["a"], "{broker:?}");

        let (code, out, err) = run(&[&order[..], &["--json"]].concat()).await;
        let out: Value = serde_json::from_str(&out).unwrap();
        let stay = if on_redis { 3 } else { 4 };
        assert_eq!((code, &out["left"]), (4, &json!(stay)), "{broker:?}: {err}");
        assert!(
            err.contains("no brace at column 1") && err.contains("(\"v2\")"),
            "{err}"
        );
        assert_eq!(err.lines().count(), stay, "{broker:?}: {err}");
        let left = on(broker, &from).await;
        let expected: Vec<&[u8]> = [0, 2, 4, 5][..stay]
            .iter()
            .map(|at| bodies[*at].as_bytes())
            .collect();
        assert_eq!(left, expected, "{broker:?}: byte for byte, in their order");
        let went = on(broker, &to).await;
        assert_eq!(ids(&went), ["a", "b", "c"], "{broker:?}");
        for body in went {
            let message = Envelope::decode(&body).unwrap();
            assert!(
                message.dead_letter().is_none() && message.attempts() == 0,
                "{broker:?}"
            );
            assert!(message.data::<Value>().unwrap() == json!({"cents": 1250}));
        }
        if on_redis {
            let client = redis::Client::open(url).unwrap();
            let mut raw = client.get_connection().unwrap();
            redis::cmd("DEL")
                .arg(format!("{queue} no such"))
                .exec(&mut raw)
                .unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_dead_letter_is_not_redriven_onto_its_own_queue() {
    each_broker(async |broker, url, queue| {
        let from = format!("{queue}.dlq");
        let bodies = ["a", "b", "c"].map(|id| dead(id, &from));
        broker
            .publish(&from, &bodies.each_ref().map(String::as_str))
            .await;
        let order = ["redrive", "--from", &from, "--broker", url];
        let (code, out) = told(&order).await;
        assert_eq!((code, &out["left"]), (4, &json!(3)), "{broker:?}");
        let itself = [&order[..], &["--to", &from]].concat();
        let (code, _, err) = run(&itself).await;
        assert_eq!(code, 2, "{broker:?}: {err}");
        let stay: Vec<Vec<u8>> = bodies.map(String::into_bytes).into();
        assert_eq!(on(broker, &from).await, stay, "{broker:?}");
    })
    .await;
}

#[tokio::test]
async fn what_is_forgotten_before_it_is_redriven_runs_again() {
    let Some(store_url) = services::redis() else {
        return;
    };
    each_broker(async |broker, url, queue| {
        let (from, to) = (format!("{queue}.dlq"), format!("{queue}.to.dlq"));
        let name = unique("cli_forget");
        let store = RedisStore::connect(&store_url, &*name).await.unwrap();
        let id = MessageId::from("a");
        store.remember(&id).await.unwrap();
        broker
            .publish(&from, &[&dead("a", queue), "nonsense"])
            .await;
        let order = [
            "redrive", "--from", &from, "--to", &to, "--broker", url, "--forget", "--store",
            &store_url, "--name", &name,
        ];
        let (_, dry) = told(&[&order[..], &["--dry-run"]].concat()).await;
        assert_eq!(dry["redriven"], json!(1));
        assert!(
            store.seen(&id).await.unwrap(),
            "{broker:?}: nothing is forgotten in a dry run"
        );
        let (code, out) = told(&order).await;
        assert_eq!((code, &out["redriven"]), (4, &json!(1)), "{broker:?}");
        assert!(!store.seen(&id).await.unwrap(), "{broker:?}");

        // What cannot be forgotten is not published, and stays.
        broker.publish(&from, &[&dead("b", queue)]).await;
        let key = format!("{name}b");
        let mut raw = redis::Client::open(&*store_url)
            .unwrap()
            .get_connection()
            .unwrap();
        let wrong = [
            "redrive",
            "--from",
            &from,
            "--to",
            &to,
            "--broker",
            url,
            "--forget",
            "--name",
            "no_such_table",
            "--store",
        ];
        let dir = Place::sqlite();
        fs::write(dir.dir.as_ref().unwrap().join("seen.db"), "").unwrap();
        let (code, out, err) = run(&[&wrong[..], &[&dir.url]].concat()).await;
        assert_eq!((code, &*out), (3, ""), "{broker:?}: {err}");
        assert!(err.contains("no_such_table"), "{err}");
        let planned = run(&[&wrong[..], &[&dir.url, "--dry-run"]].concat()).await;
        assert_eq!(planned.0, 3, "{broker:?}: {planned:?}");
        assert_eq!(
            ids(&on(broker, &from).await).last().unwrap(),
            "b",
            "{broker:?}"
        );
        assert_eq!(ids(&on(broker, &to).await), ["a"], "{broker:?}");
        fs::remove_dir_all(dir.dir.unwrap()).unwrap();
        redis::cmd("DEL").arg(key).exec(&mut raw).unwrap();
    })
    .await;
}

// ===== what each broker keeps beside the body =====

#[tokio::test]
async fn headers_in_a_frame_stay_and_a_replay_is_marked() {
    let Some(url) = services::redis() else { return };
    let (from, to) = (unique("cli"), unique("cli"));
    let headers = Headers::new().with("traceparent", "00-1");
    let framed = Envelope::decode(dead("a", &to).as_bytes())
        .unwrap()
        .with_headers(headers);
    let mut raw = redis::Client::open(&*url)
        .unwrap()
        .get_connection()
        .unwrap();
    let mut push = redis::cmd("RPUSH");
    push.arg(&from).arg(frame(&framed)).arg(dead("b", &to));
    push.exec(&mut raw).unwrap();
    let (code, _) = told(&["redrive", "--from", &from, "--broker", &url, "--bypass"]).await;
    assert_eq!(code, 0);
    let went: Vec<Vec<u8>> = redis::cmd("LRANGE")
        .arg(&to)
        .arg(0)
        .arg(-1)
        .query(&mut raw)
        .unwrap();
    let read = |stored: &Vec<u8>| {
        let (body, headers) = unframe(stored).unwrap();
        Envelope::decode(body.as_bytes())
            .unwrap()
            .with_headers(headers)
    };
    let went: Vec<Envelope> = went.iter().map(read).collect();
    assert!(went.iter().all(Envelope::is_replay));
    assert_eq!(went[0].headers().get("traceparent"), Some("00-1"));
    assert_eq!(went[1].headers().iter().count(), 1);

    // A replay that failed again is redriven as no replay unless that is said.
    let back = ["redrive", "--from", &to, "--to", &from, "--broker", &url];
    assert_eq!(run(&back).await.0, 0);
    let went: Vec<Vec<u8>> = redis::cmd("LRANGE")
        .arg(&from)
        .arg(0)
        .arg(-1)
        .query(&mut raw)
        .unwrap();
    assert_eq!(read(&went[0]).headers().iter().count(), 1);
    assert!(
        unframe(&went[1]).is_none(),
        "without headers there is no frame"
    );
    redis::cmd("DEL").arg(&from).exec(&mut raw).unwrap();

    // A target that is no list: the message stays.
    redis::cmd("RPUSH")
        .arg(&from)
        .arg(dead("c", &to))
        .exec(&mut raw)
        .unwrap();
    redis::cmd("DEL").arg(&to).exec(&mut raw).unwrap();
    redis::cmd("SET")
        .arg(&to)
        .arg("text")
        .exec(&mut raw)
        .unwrap();
    let (code, out) = told(&["redrive", "--from", &from, "--broker", &url]).await;
    assert_eq!((code, &out["left"]), (4, &json!(1)));
    let left: u64 = redis::cmd("LLEN").arg(&from).query(&mut raw).unwrap();
    assert_eq!(left, 1);
    redis::cmd("DEL")
        .arg(&from)
        .arg(&to)
        .exec(&mut raw)
        .unwrap();
}

#[tokio::test]
async fn rabbitmqs_properties_stay_but_for_what_the_way_there_left() {
    let Some(url) = services::rabbitmq() else {
        return;
    };
    let (queue, trap) = (unique("cli"), unique("cli_trap"));
    let from = format!("{queue}.dlq");
    let connection = Connection::connect(&url, ConnectionProperties::default())
        .await
        .unwrap();
    let channel = connection.create_channel().await.unwrap();
    let confirms = ConfirmSelectOptions::default();
    channel.confirm_select(confirms).await.unwrap();
    for name in [&queue, &from, &trap] {
        let durable = QueueDeclareOptions::durable();
        channel
            .queue_declare(name.as_str().into(), durable, FieldTable::default())
            .await
            .unwrap();
    }
    let mut headers = FieldTable::default();
    headers.insert("traceparent".into(), AMQPValue::LongString("00-1".into()));
    headers.insert("x-attempts".into(), AMQPValue::LongLongInt(3));
    headers.insert("x-death".into(), AMQPValue::LongString("often".into()));
    headers.insert(
        "x-first-death-queue".into(),
        AMQPValue::LongString("q".into()),
    );
    let copies = vec![AMQPValue::LongString(trap.as_str().into())];
    headers.insert("CC".into(), AMQPValue::FieldArray(copies.into()));
    let properties = BasicProperties::default()
        .with_headers(headers)
        .with_delivery_mode(1)
        .with_message_id("a".into())
        .with_correlation_id("trace".into())
        .with_priority(3)
        .with_timestamp(7)
        .with_user_id("guest".into())
        .with_expiration("600000".into())
        .with_type("urn:shop:payment".into());
    let body = dead("a", &queue);
    let sent = channel.basic_publish(
        "".into(),
        from.as_str().into(),
        BasicPublishOptions::default(),
        body.as_bytes(),
        properties.clone(),
    );
    sent.await.unwrap().await.unwrap();
    let order = ["redrive", "--from", &from, "--broker", &url, "--bypass"];
    assert_eq!(told(&order).await.1["redriven"], json!(1));
    let purged = channel.queue_purge(trap.as_str().into(), QueuePurgeOptions::default());
    assert_eq!(purged.await.unwrap(), 1, "the copy of the producer's own");
    let options = BasicGetOptions { no_ack: true };
    let got = channel
        .basic_get(queue.as_str().into(), options)
        .await
        .unwrap()
        .unwrap();
    let got = got.delivery.properties;
    assert_eq!(got.message_id().as_ref().unwrap().as_str(), "a");
    assert_eq!(got.correlation_id(), properties.correlation_id());
    assert_eq!((got.priority(), got.timestamp()), (&Some(3), &Some(7)));
    assert_eq!(
        (got.delivery_mode(), got.kind()),
        (&Some(2), properties.kind())
    );
    assert_eq!((got.user_id(), got.expiration()), (&None, &None));
    let headers = got.headers().clone().unwrap();
    let text = |name: &str| headers.inner().get(name).cloned();
    assert_eq!(
        text("traceparent"),
        Some(AMQPValue::LongString("00-1".into()))
    );
    assert_eq!(
        text("bq-replay-bypass"),
        Some(AMQPValue::LongString("1".into()))
    );
    assert_eq!(text("x-attempts"), Some(AMQPValue::LongLongInt(0)));
    assert_eq!(headers.inner().len(), 3, "{headers:?}");

    // A replay that failed again is redriven as no replay unless that is said.
    let sent = channel.basic_publish(
        "".into(),
        from.as_str().into(),
        BasicPublishOptions::default(),
        body.as_bytes(),
        got,
    );
    sent.await.unwrap().await.unwrap();
    assert_eq!(told(&order[..5]).await.1["redriven"], json!(1));
    let got = channel
        .basic_get(queue.as_str().into(), options)
        .await
        .unwrap()
        .unwrap();
    let headers = got.delivery.properties.headers().clone().unwrap();
    assert_eq!(headers.inner().len(), 2, "{headers:?}");
    for name in [queue, from, trap] {
        channel
            .queue_delete(name.into(), QueueDeleteOptions::default())
            .await
            .unwrap();
    }
}

/// A quorum queue drops what was taken back too often: looking at a dead letter must not be what loses it.
#[tokio::test]
async fn a_dead_letter_outlives_any_number_of_looks_at_it() {
    let Some(url) = services::rabbitmq() else {
        return;
    };
    let from = unique("cli_quorum");
    let connection = Connection::connect(&url, ConnectionProperties::default())
        .await
        .unwrap();
    let channel = connection.create_channel().await.unwrap();
    let mut arguments = FieldTable::default();
    arguments.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("quorum".into()),
    );
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(2));
    channel
        .queue_declare(
            from.as_str().into(),
            QueueDeclareOptions::durable(),
            arguments,
        )
        .await
        .unwrap();
    let to = unique("cli_to");
    Broker::RabbitMq.declare(&to).await;
    let bodies = ["nonsense".to_owned(), dead("a", &to), dead("b", &to)];
    Broker::RabbitMq
        .publish(&from, &bodies.each_ref().map(String::as_str))
        .await;
    let passive = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::durable()
    };
    for round in 0..8 {
        // What was handed back is there when the queue has noticed.
        let back = async {
            let ready =
                || channel.queue_declare(from.as_str().into(), passive, FieldTable::default());
            while ready().await.unwrap().message_count() < 3 {}
        };
        tokio::time::timeout(PATIENCE, back).await.unwrap();
        let (code, out) = told(&["redrive", "--from", &from, "--broker", &url, "--dry-run"]).await;
        assert_eq!(
            (code, &out["redriven"], &out["left"]),
            (4, &json!(2), &json!(1)),
            "round {round}"
        );
    }
    Broker::RabbitMq.delete(&to).await;
    channel
        .queue_delete(from.into(), QueueDeleteOptions::default())
        .await
        .unwrap();
    connection.close(200, "done".into()).await.unwrap();
}

#[tokio::test]
async fn jetstreams_headers_stay_but_for_the_servers_own() {
    use async_nats::{HeaderMap, jetstream};

    let Some(url) = services::nats() else { return };
    let (queue, broker) = (unique("cli"), Broker::JetStream);
    broker.declare(&queue).await;
    let context = jetstream::new(async_nats::connect(&url).await.unwrap());
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Msg-Id", "a");
    headers.insert("traceparent", "00-1");
    let from = format!("{queue}.dlq");
    for id in ["a", "b"] {
        // Both by one id for the server, which knows it within one stream alone.
        let to = if id == "a" { &from } else { &queue };
        let sent =
            context.publish_with_headers(to.clone(), headers.clone(), dead(id, &queue).into());
        sent.await.unwrap().await.unwrap();
    }
    let (code, out) = told(&["redrive", "--from", &from, "--broker", &url, "--bypass"]).await;
    assert_eq!((code, &out["redriven"]), (0, &json!(1)));
    let mut stream = context.get_stream(&queue).await.unwrap();
    let last = stream.info().await.unwrap().state.last_sequence;
    let message = stream.get_raw_message(last).await.unwrap();
    assert_eq!(
        ids(&[message.payload.to_vec()]),
        ["a"],
        "not taken for a duplicate"
    );
    for (name, value) in [("traceparent", "00-1"), ("bq-replay-bypass", "1")] {
        assert_eq!(message.headers.get(name).unwrap().as_str(), value);
    }
    assert!(message.headers.get("Nats-Msg-Id").is_none());

    // A replay that failed again is redriven as no replay unless that is said.
    stream.delete_message(last - 1).await.unwrap();
    let back = ["redrive", "--from", &queue, "--to", &from, "--broker", &url];
    assert_eq!(run(&back).await.0, 0);
    let mut dead_letters = context.get_stream(from.replace('.', "_")).await.unwrap();
    let last = dead_letters.info().await.unwrap().state.last_sequence;
    let message = dead_letters.get_raw_message(last).await.unwrap();
    assert!(message.headers.get("bq-replay-bypass").is_none());
    assert!(message.headers.get("traceparent").is_some());

    // What it cannot take away it does not redrive.
    let kept = unique("cli_kept");
    let config = jetstream::stream::Config {
        name: kept.clone(),
        subjects: vec![kept.clone()],
        deny_delete: true,
        ..Default::default()
    };
    context.create_stream(config).await.unwrap();
    broker.publish(&kept, &[&dead("k", &queue)]).await;
    let (code, _, err) = run(&["redrive", "--from", &kept, "--broker", &url]).await;
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("denies"), "{err}");
    for wrong in ["a.*", "a..b", ">", "$JS.API.STREAM.PURGE.a"] {
        assert_eq!(
            run(&["redrive", "--from", wrong, "--broker", &url]).await.0,
            2
        );
    }
    let (code, _, err) = run(&["redrive", "--from", &unique("cli_none"), "--broker", &url]).await;
    assert_eq!(code, 3, "{err}");
    context.delete_stream(&kept).await.unwrap();
    broker.delete(&queue).await;
}

/// A stream of `interest` confirms what nobody waits for, and drops it.
#[tokio::test]
async fn jetstream_has_to_keep_what_is_redriven() {
    use async_nats::jetstream::{
        self,
        consumer::pull,
        stream::{Config, RetentionPolicy},
    };

    let Some(url) = services::nats() else { return };
    let (queue, broker) = (unique("cli"), Broker::JetStream);
    broker.declare(&queue).await;
    let context = jetstream::new(async_nats::connect(&url).await.unwrap());
    let (from, interest) = (format!("{queue}.dlq"), unique("cli_interest"));
    let config = Config {
        name: interest.clone(),
        subjects: vec![format!("{interest}.>")],
        retention: RetentionPolicy::Interest,
        ..Default::default()
    };
    let stream = context.create_stream(config).await.unwrap();
    let to = format!("{interest}.payments");
    let purge = dead("purge", "$JS.API.STREAM.PURGE.nowhere");
    broker.publish(&from, &[&dead("a", &to), &purge]).await;
    let order = ["redrive", "--from", &from, "--broker", &url];
    let reads = |name: &str, filter: &str| pull::Config {
        durable_name: (!name.is_empty()).then(|| name.to_owned()),
        filter_subject: format!("{interest}.{filter}"),
        ..Default::default()
    };
    let others = [
        ("", "payments"),
        ("refunds", "refunds"),
        ("longer", "payments.eu"),
        ("deeper", "*.payments"),
    ];
    for (name, filter) in others {
        stream.create_consumer(reads(name, filter)).await.unwrap();
        let (code, _, err) = run(&order).await;
        assert_eq!(code, 4, "{filter}: {err}");
        assert!(err.contains("no durable one takes"), "{filter}: {err}");
        assert!(err.contains("is no subject of a queue"), "{err}");
    }
    assert_eq!(ids(&on(broker, &from).await), ["a", "purge"]);
    stream.create_consumer(reads("all", "*")).await.unwrap();
    let (code, out) = told(&order).await;
    assert_eq!((code, &out["redriven"]), (4, &json!(1)));
    assert_eq!(ids(&on(broker, &from).await), ["purge"]);
    let kept = context.get_stream(&interest).await.unwrap();
    assert_eq!(kept.cached_info().state.messages, 1);
    context.delete_stream(&interest).await.unwrap();

    // Nor is it kept, or is that known, where one of a subject drives out the other, or nothing is confirmed.
    let few = Config {
        max_messages_per_subject: 1,
        ..Default::default()
    };
    let silent = Config {
        no_ack: true,
        ..Default::default()
    };
    for config in [few, silent] {
        let name = unique("cli_few");
        let config = Config {
            name: name.clone(),
            subjects: vec![name.clone()],
            ..config
        };
        context.create_stream(config).await.unwrap();
        let (code, out) = told(&[&order[..], &["--to", &name]].concat()).await;
        assert_eq!((code, &out["left"]), (4, &json!(1)));
        assert_eq!(ids(&on(broker, &from).await), ["purge"]);
        context.delete_stream(&name).await.unwrap();
    }
    broker.delete(&queue).await;
}

/// A producer may send what no client reads: it stays, and the others go.
#[tokio::test]
async fn headers_that_cannot_be_read_hold_up_no_others() {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    let Some(url) = services::nats() else { return };
    let (queue, broker) = (unique("cli"), Broker::JetStream);
    broker.declare(&queue).await;
    broker.declare(&format!("{queue}.to")).await;
    let (from, to) = (format!("{queue}.dlq"), format!("{queue}.to.dlq"));
    broker.publish(&from, &[&dead("a", &to)]).await;
    let mut raw = TcpStream::connect(host_and_port(&url)).await.unwrap();
    let (head, body) = (b"NATS/1.0\r\nX-Odd: \xff\r\n\r\n", dead("odd", &to));
    let sizes = format!("{} {}", head.len(), head.len() + body.len());
    let order = "CONNECT {\"verbose\":false,\"headers\":true}\r\n";
    let told = format!("{order}HPUB {from} {sizes}\r\n").into_bytes();
    let all = [&told[..], head, body.as_bytes(), b"\r\nPING\r\n"].concat();
    raw.write_all(&all).await.unwrap();
    let mut answer = String::new();
    while !answer.contains("PONG") {
        let mut bytes = [0; 4096];
        let read = raw.read(&mut bytes).await.unwrap();
        assert!(read > 0, "{answer}");
        answer += &String::from_utf8_lossy(&bytes[..read]);
    }
    broker.publish(&from, &[&dead("b", &to)]).await;
    for round in 0..2 {
        let (code, out, err) = run(&["redrive", "--from", &from, "--broker", &url]).await;
        assert_eq!(code, 4, "{round}: {out}{err}");
        assert!(
            err.contains("stays: message") && err.contains("at sequence 2"),
            "{err}"
        );
        assert_eq!(ids(&on(broker, &to).await), ["a", "b"], "{err}");
    }
    assert_eq!(broker.waiting(&from).await, 1);
    broker.delete(&queue).await;
    broker.delete(&format!("{queue}.to")).await;
}

#[tokio::test]
async fn nothing_from_outside_is_a_panic() {
    // A time that no calendar has.
    let place = Place::sqlite();
    assert_eq!(place.ask(&["migrate"]).await.0, 0);
    let pool = sqlx::SqlitePool::connect(&place.url).await.unwrap();
    for (id, since) in [("a", -1), ("b", i64::MAX)] {
        let sql = format!(
            "INSERT INTO {} (message_id, state, since) VALUES ('{id}', 2, {since})",
            place.name
        );
        let sql = sqlx::raw_sql(sqlx::AssertSqlSafe(sql));
        sql.execute(&pool).await.unwrap();
        let (code, why) = place.ask(&["why", id]).await;
        assert_eq!((code, &why["since"]), (0, &Value::Null));
    }
    let (code, stats) = place.ask(&["stats"]).await;
    assert_eq!(
        (code, &stats["count"], &stats["oldest"]),
        (0, &json!(2), &Value::Null)
    );

    // Nobody listens.
    let full = ["forget", "a", "--store", &place.url, "--name", &place.name];
    let wrong = ["forget"];
    for (arguments, code) in [(&full[..], 0), (&wrong, 2)] {
        let mut child = command(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        assert_eq!(child.wait().unwrap().code(), Some(code), "{arguments:?}");
    }
    #[cfg(unix)]
    {
        use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

        let mut command = command(&["seen"]);
        command.arg(OsStr::from_bytes(b"\xff"));
        let (code, _, err) = ended(command.output().unwrap());
        assert_eq!(code, 2, "{err}");
    }
    pool.close().await;
    place.drop().await;
}
