//! Claims in Redis, against real servers: what is written at each step, who wins a race, and what
//! happens when replies, connections, scripts and servers are lost.
//!
//! `REDIS_URL` names a server for the harmless part; the rest start `redis-server` themselves.
#![allow(missing_docs)]

mod support;

#[path = "support/services.rs"]
mod services;

use redis::{Client, aio::MultiplexedConnection, cluster::ClusterClient};
use services::{OwnRedis, PATIENCE, Proxy, drop_after, poll_outside, unique, wait_until};
use std::{
    collections::BTreeMap,
    future::Future,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tower_idempotency::{
    MessageId, Store,
    error::{BackendError, BackendErrorKind},
    store::{Claim, ClaimStore, Lease, Owner, RedisStore},
};

// ===== help =====

const A: Owner = Owner::from_bits(0xa);
const B: Owner = Owner::from_bits(u128::MAX);
const HELD_BY_A: &str = "1:0000000000000000000000000000000a";
const HELD_BY_B: &str = "1:ffffffffffffffffffffffffffffffff";

fn id(text: &str) -> MessageId {
    MessageId::from(text)
}

fn lease(secs: u64) -> Lease {
    Lease::new(Duration::from_secs(secs)).unwrap()
}

/// Long enough that nothing here sees its end.
fn long() -> Lease {
    lease(600)
}

fn url(addr: SocketAddr) -> String {
    format!("redis://{addr}")
}

fn servers() -> Option<()> {
    services::program("redis-server").map(drop)
}

async fn raw(url: &str) -> MultiplexedConnection {
    let client = Client::open(url).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

async fn ask<T: redis::FromRedisValue>(raw: &MultiplexedConnection, words: &[&str]) -> T {
    let mut command = redis::cmd(words[0]);
    command.arg(&words[1..]);
    command.query_async(&mut raw.clone()).await.unwrap()
}

/// A store and a plain client that looks at what it writes.
struct Record {
    store: RedisStore,
    raw: MultiplexedConnection,
    prefix: String,
}

impl Record {
    async fn new(url: &str) -> Record {
        let prefix = unique("claim");
        let store = RedisStore::builder(prefix.as_str()).ttl(Duration::from_secs(3600));
        Record {
            store: store.connect(url).await.unwrap(),
            raw: raw(url).await,
            prefix,
        }
    }

    fn key(&self, message: &MessageId) -> String {
        format!("{}{message}", self.prefix)
    }

    async fn ask<T: redis::FromRedisValue>(
        &self,
        name: &str,
        message: &MessageId,
        more: &[&str],
    ) -> T {
        let key = self.key(message);
        ask(&self.raw, &[&[name, key.as_str()][..], more].concat()).await
    }

    async fn value(&self, message: &MessageId) -> Option<String> {
        self.ask("GET", message, &[]).await
    }

    async fn pttl(&self, message: &MessageId) -> i64 {
        self.ask("PTTL", message, &[]).await
    }

    /// What is there, and for about how long: some seconds may have passed.
    async fn is(&self, message: &MessageId, value: &str, secs: i64) {
        assert_eq!(self.value(message).await.as_deref(), Some(value));
        let left = self.pttl(message).await;
        let end = secs * 1000;
        assert!((end - 20_000..=end).contains(&left), "{left} of {end}");
    }

    async fn set(&self, message: &MessageId, value: &str, more: &[&str]) {
        let _: () = self
            .ask("SET", message, &[&[value][..], more].concat())
            .await;
    }

    /// Ends a claim before its time.
    async fn end(&self, message: &MessageId) {
        let _: i64 = self.ask("PEXPIRE", message, &["1"]).await;
        let start = Instant::now();
        while self.value(message).await.is_some() {
            assert!(start.elapsed() < PATIENCE);
        }
    }

    async fn delete(&self, message: &MessageId) {
        let _: i64 = self.ask("DEL", message, &[]).await;
    }
}

fn busy(claim: Claim) -> Duration {
    match claim {
        Claim::Busy { retry_after } => retry_after,
        other => panic!("{other:?}"),
    }
}

async fn wins(store: &RedisStore, message: &MessageId, owner: Owner) {
    let claim = store.claim(message, owner, long()).await.unwrap();
    assert_eq!(claim, Claim::Won);
}

fn calls(server: &OwnRedis) -> BTreeMap<String, u64> {
    let info = server.command(&["INFO", "commandstats"]);
    let lines = info
        .lines()
        .filter_map(|line| line.strip_prefix("cmdstat_"));
    let counts = lines.filter_map(|line| {
        let (name, rest) = line.split_once(":calls=")?;
        Some((name.to_owned(), rest.split(',').next()?.parse().ok()?))
    });
    counts.filter(|(name, _)| name != "info").collect()
}

/// What was called since, each name as often as it was.
fn called_since(before: &BTreeMap<String, u64>, server: &OwnRedis) -> Vec<String> {
    let mut called = Vec::new();
    for (name, count) in calls(server) {
        let times = count - before.get(&name).unwrap_or(&0);
        called.extend((0..times).map(|_| name.clone()));
    }
    called
}

async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let answer = tokio::time::timeout(PATIENCE, future).await;
    answer.unwrap_or_else(|_| panic!("not in time: {what}"))
}

// ===== each step =====

#[tokio::test]
async fn a_claim_is_the_owners_until_its_lease_ends() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    let (store, m) = (&record.store, &id("m"));

    assert_eq!(store.claim(m, A, lease(60)).await.unwrap(), Claim::Won);
    record.is(m, HELD_BY_A, 60).await;
    assert!(!store.seen(m).await.unwrap());
    // Somebody else's changes nothing.
    let left = busy(store.claim(m, B, lease(600)).await.unwrap());
    assert!(left > Duration::from_secs(40) && left <= Duration::from_secs(60));
    assert!(!store.renew(m, B, lease(600)).await.unwrap());
    assert!(!store.release(m, B).await.unwrap());
    record.is(m, HELD_BY_A, 60).await;
    // One's own, sent again, and its renewals start the lease anew, whatever was asked before.
    assert_eq!(store.claim(m, A, lease(600)).await.unwrap(), Claim::Won);
    record.is(m, HELD_BY_A, 600).await;
    assert_eq!(store.claim(m, A, lease(60)).await.unwrap(), Claim::Won);
    record.is(m, HELD_BY_A, 60).await;
    assert!(store.renew(m, A, lease(600)).await.unwrap());
    record.is(m, HELD_BY_A, 600).await;
    assert!(store.renew(m, A, lease(60)).await.unwrap());
    record.is(m, HELD_BY_A, 60).await;

    // After its end nobody has it.
    record.end(m).await;
    assert!(!store.renew(m, A, long()).await.unwrap());
    assert!(!store.release(m, A).await.unwrap());
    assert_eq!(record.value(m).await, None);
    wins(store, m, B).await;
    record.is(m, HELD_BY_B, 600).await;
    // And what comes late touches no successor.
    assert!(!store.renew(m, A, lease(60)).await.unwrap());
    assert!(!store.release(m, A).await.unwrap());
    record.is(m, HELD_BY_B, 600).await;
    assert!(store.release(m, B).await.unwrap());
    assert_eq!(record.value(m).await, None);
    assert!(!store.release(m, B).await.unwrap());
    wins(store, m, A).await;
    record.delete(m).await;
}

#[tokio::test]
async fn a_lease_may_have_any_length_there_is() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    let m = &id("m");
    for millis in [Lease::MIN, Duration::from_millis(12_345), Lease::MAX] {
        let asked = Lease::new(millis).unwrap();
        let claim = record.store.claim(m, A, asked).await.unwrap();
        assert_eq!(claim, Claim::Won);
        let (left, end) = (record.pttl(m).await, millis.as_millis() as i64);
        assert!(left <= end && left > end - 10_000, "{left} of {end}");
    }
    // A short one ends by itself.
    let claim = record.store.claim(m, A, Lease::new(Lease::MIN).unwrap());
    assert_eq!(claim.await.unwrap(), Claim::Won);
    let start = Instant::now();
    while record.store.claim(m, B, long()).await.unwrap() != Claim::Won {
        assert!(start.elapsed() < PATIENCE);
    }
    record.delete(m).await;
}

#[tokio::test]
async fn an_effect_is_marked_whoever_has_the_claim() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    let (store, m) = (&record.store, &id("m"));
    // (what is there, the end of it) and whether A held it.
    for (before, held) in [
        (None, false),
        (Some(HELD_BY_A), true),
        (Some(HELD_BY_B), false),
        (Some("2"), false),
        (Some("1"), false),
        (Some(""), false),
    ] {
        let _: i64 = record.ask("DEL", m, &[]).await;
        if let Some(value) = before {
            record.set(m, value, &["PX", "60000"]).await;
        }
        assert_eq!(store.complete(m, A).await.unwrap(), held, "{before:?}");
        record.is(m, "2", 3600).await;
        assert!(store.seen(m).await.unwrap());
        for owner in [A, B] {
            let claim = store.claim(m, owner, lease(60)).await.unwrap();
            assert_eq!(claim, Claim::Done);
            assert!(!store.renew(m, owner, lease(60)).await.unwrap());
            assert!(!store.release(m, owner).await.unwrap());
        }
        record.is(m, "2", 3600).await;
    }
    // For ever, where marks are.
    let store = RedisStore::builder(record.prefix.as_str()).ttl(None);
    let store = store.connect(&url).await.unwrap();
    store.forget(m).await.unwrap();
    wins(&store, m, A).await;
    assert!(store.complete(m, A).await.unwrap());
    assert_eq!(record.pttl(m).await, -1);
    assert!(!store.release(m, A).await.unwrap());
    assert!(store.seen(m).await.unwrap());
    record.delete(m).await;
}

#[tokio::test]
async fn marks_and_forgetting_work_on_a_claimed_id() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    let (store, m) = (&record.store, &id("m"));
    wins(store, m, A).await;
    store.remember(m).await.unwrap();
    record.is(m, "2", 3600).await;
    assert!(!store.renew(m, A, long()).await.unwrap());
    store.forget(m).await.unwrap();
    wins(store, m, A).await;
    store.forget(m).await.unwrap();
    assert_eq!(record.value(m).await, None);
    assert!(!store.renew(m, A, long()).await.unwrap());
    wins(store, m, B).await;
    assert!(!store.complete(m, A).await.unwrap());
    assert!(store.seen(m).await.unwrap());
    record.delete(m).await;
}

/// What cannot be read is somebody's, never free and never done.
#[tokio::test]
async fn a_value_of_another_kind_is_busy_until_it_ends() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    let (store, m) = (&record.store, &id("m"));
    let almost = HELD_BY_A.to_uppercase();
    for value in [
        "1",
        "1:",
        "1:zz",
        "1:a",
        "x",
        "",
        "0",
        "22",
        "2 ",
        " 2",
        "2\n",
        "02",
        "2:0000000000000000000000000000000a",
        "0000000000000000000000000000000a",
        almost.as_str(),
        &format!("{HELD_BY_A} "),
    ] {
        record.set(m, value, &["PX", "60000"]).await;
        let left = busy(store.claim(m, A, lease(600)).await.unwrap());
        assert!(left <= Duration::from_secs(60), "{value:?}: {left:?}");
        assert!(left > Duration::from_secs(40), "{value:?}: {left:?}");
        assert!(!store.seen(m).await.unwrap(), "{value:?}");
        assert!(!store.renew(m, A, lease(600)).await.unwrap(), "{value:?}");
        assert!(!store.release(m, A).await.unwrap(), "{value:?}");
        record.is(m, value, 60).await;
        // Without an end, whoever asks comes again after a lease of its own.
        record.set(m, value, &[]).await;
        let left = busy(store.claim(m, A, lease(7)).await.unwrap());
        assert_eq!(left, Duration::from_secs(7), "{value:?}");
        assert!(!store.seen(m).await.unwrap(), "{value:?}");
        assert!(!store.renew(m, A, lease(600)).await.unwrap(), "{value:?}");
        assert!(!store.release(m, A).await.unwrap(), "{value:?}");
        assert_eq!(record.value(m).await.as_deref(), Some(value));
        assert_eq!(record.pttl(m).await, -1);
        // With one, it is free once that has come.
        record.end(m).await;
        wins(store, m, A).await;
    }
    record.delete(m).await;
}

#[tokio::test]
async fn a_claim_of_ones_own_never_stays_without_an_end() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    let (store, m) = (&record.store, &id("m"));
    for renewed in [false, true] {
        record.set(m, HELD_BY_A, &[]).await;
        if renewed {
            assert!(store.renew(m, A, lease(60)).await.unwrap());
        } else {
            let claim = store.claim(m, A, lease(60)).await.unwrap();
            assert_eq!(claim, Claim::Won);
        }
        record.is(m, HELD_BY_A, 60).await;
    }
    record.delete(m).await;
}

#[cfg(feature = "tracing")]
#[tokio::test]
async fn a_claim_without_an_end_is_warned_of() {
    use std::{io, sync::Mutex};

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    let (lines, m) = (Lines::default(), &id("m"));
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone());
    let _guard = tracing::subscriber::set_default(subscriber.finish());
    for (end, warned) in [(&["PX", "60000"][..], false), (&[], true)] {
        record.set(m, "1", end).await;
        busy(record.store.claim(m, A, long()).await.unwrap());
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let mut ours = text
            .lines()
            .filter(|line| line.contains("tower_idempotency") && line.contains("WARN"));
        let told = ours.any(|line| line.contains(&record.key(m)));
        assert_eq!(told, warned, "{text}");
    }
    record.delete(m).await;
}

#[tokio::test]
async fn a_key_that_is_no_string_is_an_error_and_stays() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    let (store, m) = (&record.store, &id("m"));
    let _: i64 = record.ask("LPUSH", m, &["1"]).await;
    for error in [
        store.claim(m, A, long()).await.map(drop).unwrap_err(),
        store.renew(m, A, long()).await.map(drop).unwrap_err(),
        store.complete(m, A).await.map(drop).unwrap_err(),
        store.release(m, A).await.map(drop).unwrap_err(),
    ] {
        assert_eq!(error.kind(), BackendErrorKind::Schema, "{error}");
        let text = error.to_string();
        assert!(text.contains(&record.prefix), "{text}");
    }
    assert_eq!(record.ask::<i64>("LLEN", m, &[]).await, 1);
    record.delete(m).await;
}

#[tokio::test]
async fn ids_are_compared_by_their_bytes() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    let big = "x".repeat(100_000);
    let ids: Vec<MessageId> = [
        "a", "A", "a ", " a", "a\0", "a\r\n", "{a}b", "{a}c", "é", "e\u{301}", "*", "%s", "'", &big,
    ]
    .iter()
    .map(|text| id(text))
    .collect();
    for message in &ids {
        wins(&record.store, message, A).await;
        record.is(message, HELD_BY_A, 600).await;
    }
    for message in &ids {
        assert!(record.store.release(message, A).await.unwrap());
        assert_eq!(record.value(message).await, None);
    }
}

#[tokio::test]
async fn the_newer_protocol_serves_as_well() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let record = Record::new(&format!("{}/0?protocol=resp3", server.url())).await;
    let (store, m) = (&record.store, &id("m"));
    for _ in 0..2 {
        wins(store, m, A).await;
        let left = busy(store.claim(m, B, long()).await.unwrap());
        assert!(left > Duration::from_secs(500));
        assert!(store.renew(m, A, long()).await.unwrap());
        assert!(!store.renew(m, B, long()).await.unwrap());
        assert!(store.release(m, A).await.unwrap());
        wins(store, m, B).await;
        assert!(!store.complete(m, A).await.unwrap());
        assert_eq!(store.claim(m, A, long()).await.unwrap(), Claim::Done);
        store.forget(m).await.unwrap();
        wins(store, m, A).await;
        assert!(store.complete(m, A).await.unwrap());
        store.forget(m).await.unwrap();
    }
}

#[tokio::test]
async fn a_full_server_renews_and_releases_but_takes_no_claims() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&["--maxmemory-policy", "noeviction"]);
    let record = Record::new(&server.url()).await;
    let (store, m) = (&record.store, &id("m"));
    wins(store, m, A).await;
    assert_eq!(server.command(&["CONFIG", "SET", "maxmemory", "1"]), "OK");
    for error in [
        store.claim(&id("n"), A, long()).await.map(drop),
        store.complete(m, A).await.map(drop),
    ] {
        let error = error.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Other);
        assert!(error.to_string().contains("OOM"), "{error}");
    }
    record.is(m, HELD_BY_A, 600).await;
    busy(store.claim(m, B, long()).await.unwrap());
    assert!(store.renew(m, A, lease(60)).await.unwrap());
    record.is(m, HELD_BY_A, 60).await;
    assert!(store.release(m, A).await.unwrap());
}

#[tokio::test]
async fn permissions_that_are_missing_are_told() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let allow = |rules: &[&str]| {
        let user = [
            "ACL", "SETUSER", "worker", "reset", "on", ">secret", "~p:*", "+get", "+set",
        ];
        assert_eq!(server.command(&[&user[..], rules].concat()), "OK");
    };
    let url = format!("redis://worker:secret@{}", server.addr());
    let denied = async |rules: &[&str]| {
        allow(rules);
        let store = RedisStore::connect(&url, "p:").await.unwrap();
        wins_unless_denied(&store).await
    };
    assert!(denied(&[]).await);
    assert!(denied(&["+evalsha"]).await);
    // What the module's documentation asks for.
    let scripts = ["+eval", "+evalsha", "+pttl", "+pexpire", "+del"];
    assert!(!denied(&scripts).await);
    // Not half of it.
    assert!(denied(&scripts[..3]).await);
}

/// Whether one of the steps was denied; all the others have to succeed.
async fn wins_unless_denied(store: &RedisStore) -> bool {
    let m = &id("m");
    let steps = [
        store.claim(m, A, long()).await.map(drop),
        store.claim(m, B, long()).await.map(drop),
        store.renew(m, A, long()).await.map(drop),
        store.release(m, A).await.map(drop),
        store.complete(m, A).await.map(drop),
    ];
    let errors: Vec<BackendError> = steps.into_iter().filter_map(Result::err).collect();
    for error in &errors {
        // Redis 7 has no code for what a script may not call.
        let kind = error.kind();
        assert!(
            matches!(kind, BackendErrorKind::Denied | BackendErrorKind::Other),
            "{error}"
        );
        assert!(!error.is_retryable(), "{error}");
    }
    let _ = store.forget(m).await;
    !errors.is_empty()
}

#[tokio::test]
async fn outside_of_a_runtime_a_step_is_an_error() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    let (store, m) = (&record.store, &id("m"));
    let steps = [
        poll_outside(store.claim(m, A, long())).map(|answer| answer.map(drop)),
        poll_outside(store.renew(m, A, long())).map(|answer| answer.map(drop)),
        poll_outside(store.complete(m, A)).map(|answer| answer.map(drop)),
        poll_outside(store.release(m, A)).map(|answer| answer.map(drop)),
    ];
    for step in steps {
        let error = step.expect("an answer at once").unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    }
}

// ===== together with PHP =====

/// What a worker does; the last four are PHP's.
#[derive(Clone, Copy, Debug)]
enum Does {
    Claim(Owner),
    Renew(Owner),
    Complete(Owner),
    Release(Owner),
    Seen,
    Remember,
    Forget,
    PhpClaim,
    PhpRelease,
    PhpRemember,
    PhpSeen,
}

const OURS: [Does; 9] = [
    Does::Claim(A),
    Does::Claim(B),
    Does::Renew(A),
    Does::Complete(A),
    Does::Release(A),
    Does::Release(B),
    Does::Seen,
    Does::Remember,
    Does::Forget,
];
const PHPS: [Does; 4] = [
    Does::PhpClaim,
    Does::PhpRelease,
    Does::PhpRemember,
    Does::PhpSeen,
];

fn held_by(owner: Owner) -> &'static str {
    if owner == A { HELD_BY_A } else { HELD_BY_B }
}

/// What is there afterwards, and what is answered.
fn expected(there: Option<&'static str>, does: Does) -> (Option<&'static str>, &'static str) {
    let yes = |yes| if yes { "yes" } else { "no" };
    let holds = |owner| there == Some(held_by(owner));
    let done = there == Some("2");
    match does {
        Does::Claim(_) if done => (there, "done"),
        Does::Claim(owner) if there.is_none() || holds(owner) => (Some(held_by(owner)), "won"),
        Does::Claim(_) => (there, "busy"),
        Does::Renew(owner) => (there, yes(holds(owner))),
        Does::Complete(owner) => (Some("2"), yes(holds(owner))),
        Does::Release(owner) if holds(owner) => (None, "yes"),
        Does::Release(_) => (there, "no"),
        Does::Seen | Does::PhpSeen => (there, yes(done)),
        Does::Remember | Does::PhpRemember => (Some("2"), "yes"),
        Does::Forget | Does::PhpRelease => (None, "yes"),
        Does::PhpClaim if there.is_none() => (Some("1"), "won"),
        Does::PhpClaim => (there, "no"),
    }
}

async fn done(record: &Record, m: &MessageId, does: Does) -> &'static str {
    let store = &record.store;
    let yes = |yes| if yes { "yes" } else { "no" };
    match does {
        Does::Claim(owner) => match store.claim(m, owner, long()).await.unwrap() {
            Claim::Won => "won",
            Claim::Done => "done",
            Claim::Busy { .. } => "busy",
        },
        Does::Renew(owner) => yes(store.renew(m, owner, long()).await.unwrap()),
        Does::Complete(owner) => yes(store.complete(m, owner).await.unwrap()),
        Does::Release(owner) => yes(store.release(m, owner).await.unwrap()),
        Does::Seen => yes(store.seen(m).await.unwrap()),
        Does::Remember => {
            store.remember(m).await.unwrap();
            "yes"
        }
        Does::Forget => {
            store.forget(m).await.unwrap();
            "yes"
        }
        Does::PhpClaim => {
            let claim = ["1", "NX", "EX", "300"];
            let set: Option<String> = record.ask("SET", m, &claim).await;
            if set.is_some() { "won" } else { "no" }
        }
        Does::PhpRelease => {
            record.delete(m).await;
            "yes"
        }
        Does::PhpRemember => {
            record.set(m, "2", &["EX", "3600"]).await;
            "yes"
        }
        Does::PhpSeen => yes(record.value(m).await.as_deref() == Some("2")),
    }
}

/// Whatever was there, each of our steps, then each of theirs, then each of ours.
#[tokio::test]
async fn php_workers_share_the_claims() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    let m = &id("m");
    for before in [None, Some("1"), Some("2"), Some(HELD_BY_A), Some(HELD_BY_B)] {
        for first in OURS {
            for php in PHPS {
                for last in OURS {
                    record.delete(m).await;
                    if let Some(value) = before {
                        record.set(m, value, &["PX", "300000"]).await;
                    }
                    let mut there = before;
                    for does in [first, php, last] {
                        let (then, answer) = expected(there, does);
                        let what = format!("{before:?}: {first:?}, {php:?}, {last:?}");
                        assert_eq!(done(&record, m, does).await, answer, "{what}");
                        there = then;
                    }
                    assert_eq!(record.value(m).await.as_deref(), there);
                    // Whoever wrote it last, it ends.
                    assert_eq!(record.pttl(m).await > 0, there.is_some());
                }
            }
        }
    }
    record.delete(m).await;
}

// ===== what it costs =====

#[tokio::test]
async fn a_new_message_costs_two_commands_and_any_other_one() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let record = Record::new(&server.url()).await;
    let (store, warm, m) = (&record.store, &id("warm"), &id("m"));
    // The server gets each script once.
    let before = calls(&server);
    wins(store, warm, A).await;
    assert!(store.renew(warm, A, long()).await.unwrap());
    assert!(store.release(warm, A).await.unwrap());
    assert!(!store.complete(warm, A).await.unwrap());
    let called = called_since(&before, &server);
    let count = |name: &str| called.iter().filter(|&it| it == name).count();
    assert_eq!((count("eval"), count("evalsha")), (4, 4), "{called:?}");

    // What scripts call is counted too.
    let before = calls(&server);
    wins(store, m, A).await;
    assert!(store.complete(m, A).await.unwrap());
    let new = called_since(&before, &server);
    assert_eq!(new, ["evalsha", "evalsha", "get", "get", "set", "set"]);
    let before = calls(&server);
    assert_eq!(store.claim(m, B, long()).await.unwrap(), Claim::Done);
    assert_eq!(called_since(&before, &server), ["evalsha", "get"]);
    let n = &id("n");
    wins(store, n, A).await;
    let before = calls(&server);
    busy(store.claim(n, B, long()).await.unwrap());
    assert_eq!(called_since(&before, &server), ["evalsha", "get", "pttl"]);
    let before = calls(&server);
    assert!(store.renew(n, A, long()).await.unwrap());
    assert_eq!(
        called_since(&before, &server),
        ["evalsha", "get", "pexpire"]
    );
    let before = calls(&server);
    assert!(store.release(n, A).await.unwrap());
    assert_eq!(called_since(&before, &server), ["del", "evalsha", "get"]);
}

// ===== races =====

/// Eight stores with eight racers each, on connections of their own.
async fn race(url: &str, prefix: &str, racer: impl AsyncRacer) -> usize {
    let wins = Arc::new(AtomicUsize::new(0));
    let mut racers = Vec::new();
    for _ in 0..8 {
        let store = RedisStore::connect(url, prefix).await.unwrap();
        for _ in 0..8 {
            let won = racer.clone().run(store.clone(), Owner::random());
            let wins = wins.clone();
            racers.push(tokio::spawn(async move {
                if won.await {
                    wins.fetch_add(1, Ordering::SeqCst);
                }
            }));
        }
    }
    for racer in racers {
        racer.await.unwrap();
    }
    wins.load(Ordering::SeqCst)
}

/// Whether this owner won.
trait AsyncRacer: Clone {
    fn run(self, store: RedisStore, owner: Owner) -> impl Future<Output = bool> + Send + 'static;
}

impl<F, Fut> AsyncRacer for F
where
    F: Fn(RedisStore, Owner) -> Fut + Clone,
    Fut: Future<Output = bool> + Send + 'static,
{
    fn run(self, store: RedisStore, owner: Owner) -> impl Future<Output = bool> + Send + 'static {
        self(store, owner)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_many_wins_a_free_id() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    for round in 0..10 {
        let m = id(&round.to_string());
        match round % 3 {
            0 => {}
            1 => {
                wins(&record.store, &m, A).await;
                record.end(&m).await;
            }
            _ => {
                wins(&record.store, &m, A).await;
                assert!(record.store.release(&m, A).await.unwrap());
            }
        }
        let of = m.clone();
        let racer = move |store: RedisStore, owner| {
            let claim = store.claim(&of, owner, long());
            async move { claim.await.unwrap() == Claim::Won }
        };
        assert_eq!(race(&url, &record.prefix, racer).await, 1, "{round}");
        record.delete(&m).await;
    }
}

/// Racers that ask until somebody has won, while the claim ends or is given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_many_wins_what_is_given_up() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    for released in [true, false, true, false] {
        let m = id("m");
        wins(&record.store, &m, A).await;
        let over = Arc::new(AtomicBool::new(false));
        let of = m.clone();
        let racer = move |store: RedisStore, owner| {
            let (over, m) = (over.clone(), of.clone());
            async move {
                while !over.load(Ordering::SeqCst) {
                    match store.claim(&m, owner, long()).await.unwrap() {
                        Claim::Won => {
                            over.store(true, Ordering::SeqCst);
                            return true;
                        }
                        Claim::Busy { .. } => {}
                        Claim::Done => panic!("nobody completed it"),
                    }
                }
                false
            }
        };
        let giving_up = async {
            if released {
                assert!(record.store.release(&m, A).await.unwrap());
            } else {
                let _: i64 = record.ask("PEXPIRE", &m, &["1"]).await;
            }
        };
        let racing = race(&url, &record.prefix, racer);
        let (won, ()) = tokio::join!(soon("a winner", racing), giving_up);
        assert_eq!(won, 1);
        assert!(!record.store.renew(&m, A, long()).await.unwrap());
        assert_ne!(record.value(&m).await.as_deref(), Some(HELD_BY_A));
        record.delete(&m).await;
    }
}

// ===== scripts and servers that are lost =====

#[tokio::test]
async fn a_server_that_lost_the_scripts_gets_them_again() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let record = Record::new(&server.url()).await;
    let (store, m) = (&record.store, &id("m"));
    let flush = || assert_eq!(server.command(&["SCRIPT", "FLUSH"]), "OK");
    for _ in 0..2 {
        flush();
        wins(store, m, A).await;
        flush();
        busy(store.claim(m, B, long()).await.unwrap());
        flush();
        assert!(store.renew(m, A, long()).await.unwrap());
        flush();
        assert!(store.release(m, A).await.unwrap());
        wins(store, m, B).await;
        flush();
        assert!(store.complete(m, B).await.unwrap());
        flush();
        assert_eq!(store.claim(m, A, long()).await.unwrap(), Claim::Done);
        store.forget(m).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_goes_with_a_server_that_keeps_nothing() {
    let Some(()) = servers() else { return };
    let mut server = OwnRedis::start(&[]);
    let record = Record::new(&server.url()).await;
    let (store, m) = (&record.store, &id("m"));
    wins(store, m, A).await;
    assert!(store.renew(m, A, long()).await.unwrap());
    server.restart();
    assert!(!store.renew(m, A, long()).await.unwrap());
    server.restart();
    wins(store, m, B).await;
    server.restart();
    // Sent over the connection that is lost, and then again: nothing tells that the first one found nothing.
    assert!(store.release(m, B).await.unwrap());
    wins(store, m, A).await;
    server.restart();
    assert!(store.complete(m, A).await.unwrap());
    // The effect did happen.
    assert!(store.seen(m).await.unwrap());
    // Over a connection that is good.
    store.forget(m).await.unwrap();
    assert!(!store.release(m, A).await.unwrap());
    assert!(!store.complete(m, A).await.unwrap());

    server.kill();
    for error in [
        store.claim(m, A, long()).await.map(drop),
        store.renew(m, A, long()).await.map(drop),
        store.complete(m, A).await.map(drop),
        store.release(m, A).await.map(drop),
    ] {
        assert_eq!(error.unwrap_err().kind(), BackendErrorKind::Unavailable);
    }
}

fn replica_of(port: u16) -> OwnRedis {
    let replica = OwnRedis::start(&[]);
    let follow = ["REPLICAOF", "127.0.0.1", &port.to_string()];
    assert_eq!(replica.command(&follow), "OK");
    replica
}

#[tokio::test]
async fn a_replica_answers_that_it_is_one() {
    let Some(()) = servers() else { return };
    let primary = OwnRedis::start(&[]);
    let replica = replica_of(primary.port());
    let m = &id("m");
    let at_primary = RedisStore::connect(&primary.url(), "p:").await.unwrap();
    wins(&at_primary, m, A).await;
    wait_until("the replica has it", || {
        replica.command(&["EXISTS", "p:m"]) == "1"
    });
    let store = RedisStore::connect(&replica.url(), "p:").await.unwrap();
    for error in [
        store.claim(&id("free"), A, long()).await.map(drop),
        store.claim(m, A, long()).await.map(drop),
        store.renew(m, A, long()).await.map(drop),
        store.complete(m, A).await.map(drop),
        store.release(m, A).await.map(drop),
    ] {
        let error = error.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::ReadOnly, "{error}");
        assert!(error.is_retryable());
    }
    assert_eq!(primary.command(&["GET", "p:m"]), HELD_BY_A);
}

/// What a name that moves to the new primary does: the old connections lead to a replica.
#[tokio::test]
async fn an_old_connection_to_a_replica_costs_no_claim() {
    let Some(()) = servers() else { return };
    let (old, new) = (OwnRedis::start(&[]), OwnRedis::start(&[]));
    let proxy = Proxy::start(old.addr()).await;
    let store = RedisStore::connect(&url(proxy.addr()), "p:").await.unwrap();
    let m = &id("m");
    wins(&store, m, A).await;
    assert!(store.renew(m, A, long()).await.unwrap());
    // The new primary has all that the old one had, and is followed by it.
    let set = ["SET", "p:m", HELD_BY_A, "PX", "600000"];
    assert_eq!(new.command(&set), "OK");
    // Time has to pass for a connection not to be young any more.
    tokio::time::sleep(Duration::from_millis(600)).await;
    proxy.retarget(new.addr());
    let follow = ["REPLICAOF", "127.0.0.1", &new.port().to_string()];
    assert_eq!(old.command(&follow), "OK");
    wait_until("the old primary follows", || {
        old.info("replication", "master_link_status").as_deref() == Some("up")
    });
    assert!(store.renew(m, A, lease(60)).await.unwrap());
    wins(&store, &id("n"), B).await;
    assert!(store.renew(&id("n"), B, long()).await.unwrap());
    assert_eq!(proxy.connections(), 4);
    assert_eq!(new.command(&["GET", "p:n"]), HELD_BY_B);
    let left: i64 = new.command(&["PTTL", "p:m"]).parse().unwrap();
    assert!(left <= 60_000, "{left}");
}

/// Replication lags, and a claim that was answered is not on the server that takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_lost_at_a_failover_has_two_runners_and_one_mark() {
    let Some(()) = servers() else { return };
    let mut primary = OwnRedis::start(&[]);
    let lag = Proxy::start(primary.addr()).await;
    let replica = replica_of(lag.addr().port());
    wait_until("the replica follows", || {
        replica.info("replication", "master_link_status").as_deref() == Some("up")
    });
    let name = Proxy::start(primary.addr()).await;
    let a = RedisStore::connect(&url(name.addr()), "p:").await.unwrap();
    let b = RedisStore::connect(&url(name.addr()), "p:").await.unwrap();
    let m = &id("m");
    lag.hold_replies();
    wins(&a, m, A).await;
    assert!(a.renew(m, A, long()).await.unwrap());
    busy(b.claim(m, B, long()).await.unwrap());
    assert_eq!(replica.command(&["EXISTS", "p:m"]), "0");

    primary.kill();
    assert_eq!(replica.command(&["REPLICAOF", "NO", "ONE"]), "OK");
    name.retarget(replica.addr());
    wins(&b, m, B).await;
    // A is told, cannot come back, and does no harm to the other's claim.
    assert!(!a.renew(m, A, long()).await.unwrap());
    busy(a.claim(m, A, long()).await.unwrap());
    assert!(!a.release(m, A).await.unwrap());
    assert!(b.renew(m, B, long()).await.unwrap());
    // Its effect did happen, and the third copy does not run.
    assert!(!a.complete(m, A).await.unwrap());
    assert_eq!(replica.command(&["GET", "p:m"]), "2");
    assert!(!b.renew(m, B, long()).await.unwrap());
    assert_eq!(b.claim(m, B, long()).await.unwrap(), Claim::Done);
    assert!(!b.complete(m, B).await.unwrap());
    assert!(b.seen(m).await.unwrap());
}

// ===== replies that are lost, commands that come late =====

#[tokio::test]
async fn a_claim_whose_reply_was_lost_is_ones_own() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = RedisStore::builder("p:").response_timeout(Duration::from_millis(500));
    let store = store.connect(&url(proxy.addr())).await.unwrap();
    wins(&store, &id("warm"), A).await;
    let m = &id("m");
    proxy.swallow_present();
    let error = store.claim(m, A, lease(60)).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    assert_eq!(server.command(&["GET", "p:m"]), HELD_BY_A);
    // To somebody else it is a claim like any other.
    let left = busy(soon("an answer", patient(|| store.claim(m, B, long()))).await);
    assert!(left <= Duration::from_secs(60));
    let again = soon("an answer", patient(|| store.claim(m, A, long()))).await;
    assert_eq!(again, Claim::Won);
    let left: i64 = server.command(&["PTTL", "p:m"]).parse().unwrap();
    assert!(left > 500_000, "{left}");
}

/// On a loaded machine, a short limit may run out once more.
async fn patient<T, F>(mut attempt: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, BackendError>>,
{
    loop {
        if let Ok(answer) = attempt().await {
            return answer;
        }
    }
}

/// The connection is lost after a step took effect and before its reply came: it is sent again, perhaps
/// after somebody else did something.
#[tokio::test]
async fn a_step_may_take_effect_twice() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = RedisStore::connect(&url(proxy.addr()), "p:").await.unwrap();
    let warm = &id("warm");
    wins(&store, warm, A).await;
    assert!(store.renew(warm, A, long()).await.unwrap());
    assert!(store.release(warm, A).await.unwrap());
    assert!(!store.complete(warm, A).await.unwrap());
    store.forget(warm).await.unwrap();

    let set = |value: &str| {
        let set = ["SET", "p:m", value, "PX", "60000"];
        assert_eq!(server.command(&set), "OK");
    };
    let get = || match server.command(&["EXISTS", "p:m"]).as_str() {
        "0" => "free".to_owned(),
        _ => server.command(&["GET", "p:m"]),
    };
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Claim,
        Renew,
        Complete,
        Release,
    }
    use Step::{Claim as Claims, Complete, Release, Renew};
    let (held, theirs) = (HELD_BY_A, HELD_BY_B);
    // What is there before, after the step, and by somebody's doing when it is sent again; whether it is
    // held or won by its answer, and what is there in the end. What ended a claim and was sent twice does
    // not tell of one that was lost.
    for (step, before, after, meanwhile, answer, last) in [
        (Claims, "free", held, held, true, held),
        (Claims, "free", held, "free", true, held),
        (Claims, "free", held, theirs, false, theirs),
        (Renew, held, held, held, true, held),
        (Renew, held, held, "free", false, "free"),
        (Renew, held, held, theirs, false, theirs),
        (Complete, held, "2", "2", true, "2"),
        (Complete, held, "2", "free", true, "2"),
        (Complete, held, "2", theirs, true, "2"),
        (Release, held, "free", "free", true, "free"),
        (Release, held, "free", theirs, true, theirs),
        (Release, held, "free", "2", true, "2"),
    ] {
        if before == "free" {
            server.command(&["DEL", "p:m"]);
        } else {
            set(before);
        }
        // What shows that it took effect.
        let took_effect = || match step {
            Renew => server.command(&["PTTL", "p:m"]).parse::<i64>().unwrap() > 60_000,
            _ => get() == after,
        };
        // Both connections are there again.
        assert!(!store.seen(warm).await.unwrap());
        assert!(!store.renew(warm, A, long()).await.unwrap());
        proxy.hold_replies();
        let (by, m) = (store.clone(), id("m"));
        let under_way = tokio::spawn(async move {
            match step {
                Claims => by.claim(&m, A, long()).await.map(|it| it == Claim::Won),
                Renew => by.renew(&m, A, long()).await,
                Complete => by.complete(&m, A).await,
                Release => by.release(&m, A).await,
            }
        });
        let start = Instant::now();
        while !took_effect() {
            assert!(start.elapsed() < PATIENCE, "{step:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        match meanwhile {
            "free" => drop(server.command(&["DEL", "p:m"])),
            value if value == after => {}
            value => set(value),
        }
        proxy.cut();
        proxy.release();
        let got = soon("an answer", under_way).await.unwrap().unwrap();
        assert_eq!(got, answer, "{step:?}, {meanwhile} meanwhile");
        assert_eq!(get(), last, "{step:?}, {meanwhile} meanwhile");
    }
}

/// Commands overtake each other on different connections.
#[tokio::test]
async fn a_claim_that_comes_after_its_release_ends_with_its_lease() {
    let Some(url) = services::redis() else { return };
    let record = Record::new(&url).await;
    let (store, m) = (&record.store, &id("m"));
    assert!(!store.release(m, A).await.unwrap());
    assert_eq!(store.claim(m, A, lease(60)).await.unwrap(), Claim::Won);
    let left = busy(store.claim(m, B, long()).await.unwrap());
    assert!(left <= Duration::from_secs(60), "{left:?}");
    record.is(m, HELD_BY_A, 60).await;
    record.end(m).await;
    wins(store, m, B).await;
    // After the mark it is told so, and after a successor's claim it is not won.
    busy(store.claim(m, A, long()).await.unwrap());
    assert!(store.complete(m, B).await.unwrap());
    assert_eq!(store.claim(m, A, long()).await.unwrap(), Claim::Done);
    record.is(m, "2", 3600).await;
    record.delete(m).await;
}

#[tokio::test]
async fn a_step_can_be_dropped_at_each_await() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = RedisStore::connect(&url(proxy.addr()), "p:").await.unwrap();
    let (done, held) = (&id("done"), &id("held"));
    store.remember(done).await.unwrap();
    for cut in [false, true] {
        for step in ["claim", "renew", "complete", "release"] {
            for polls in 0..12 {
                let m = &id(&format!("{step}-{polls}-{cut}"));
                wins(&store, held, A).await;
                if step != "claim" {
                    wins(&store, m, A).await;
                }
                // Each server's script is sent whole now and then as well.
                if polls % 2 == 0 {
                    assert_eq!(server.command(&["SCRIPT", "FLUSH"]), "OK");
                }
                if cut {
                    proxy.cut();
                }
                match step {
                    "claim" => drop_after(polls, store.claim(m, A, long())).await,
                    "renew" => drop_after(polls, store.renew(m, A, long())).await,
                    "complete" => drop_after(polls, store.complete(m, A)).await,
                    _ => drop_after(polls, store.release(m, A)).await,
                }
                // Answers are still those of the commands they belong to.
                assert_eq!(store.claim(done, B, long()).await.unwrap(), Claim::Done);
                busy(store.claim(held, B, long()).await.unwrap());
                assert!(store.renew(held, A, long()).await.unwrap());
                assert!(!store.renew(held, B, long()).await.unwrap());
                // It took effect or not; what was dropped can be done again.
                match step {
                    "complete" => {
                        store.complete(m, A).await.unwrap();
                        assert!(store.seen(m).await.unwrap());
                    }
                    "release" => {
                        store.release(m, A).await.unwrap();
                        wins(&store, m, B).await;
                    }
                    _ => {
                        wins(&store, m, A).await;
                        assert!(store.release(m, A).await.unwrap());
                    }
                }
            }
        }
    }
}

// ===== renewals =====

#[tokio::test]
async fn renewals_have_a_connection_of_their_own() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = RedisStore::builder("p:").response_timeout(10 * PATIENCE);
    let store = store.connect(&url(proxy.addr())).await.unwrap();
    let m = &id("m");
    for message in ["m", "n", "o"] {
        wins(&store, &id(message), A).await;
    }
    assert!(store.release(&id("n"), A).await.unwrap());
    assert!(store.complete(&id("o"), A).await.unwrap());
    store.clone().remember(&id("p")).await.unwrap();
    store.forget(&id("p")).await.unwrap();
    assert_eq!(proxy.connections(), 1);
    // Made when it is needed first, and only then.
    assert!(store.renew(m, A, long()).await.unwrap());
    assert!(store.clone().renew(m, A, long()).await.unwrap());
    assert_eq!(proxy.connections(), 2);
    assert!(!store.seen(m).await.unwrap());
    wins(&store, &id("n"), A).await;
    assert_eq!(proxy.connections(), 2);
    // It heals like the other one.
    proxy.cut();
    assert!(store.renew(m, A, long()).await.unwrap());
    assert!(!store.seen(m).await.unwrap());
    assert_eq!(proxy.connections(), 4);
}

#[tokio::test]
async fn renewals_go_on_while_the_other_connection_hangs() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = RedisStore::builder("p:").response_timeout(10 * PATIENCE);
    let store = store.connect(&url(proxy.addr())).await.unwrap();
    let m = &id("m");
    wins(&store, m, A).await;
    proxy.swallow_present();
    let hung: Vec<_> = (0..100)
        .map(|n| tokio::spawn(store.claim(&id(&n.to_string()), A, long())))
        .collect();
    // They were sent, and their answers never come.
    wait_for_keys(&server, 101).await;
    for secs in 1..=50 {
        let renewed = soon("a renewal", store.renew(m, A, lease(1000 + secs))).await;
        assert!(renewed.unwrap());
        let left: i64 = server.command(&["PTTL", "p:m"]).parse().unwrap();
        assert!(left > 900_000, "{left}");
    }
    assert!(hung.iter().all(|claim| !claim.is_finished()));
    assert_eq!(proxy.connections(), 2);
    for claim in hung {
        claim.abort();
    }
}

async fn wait_for_keys(server: &OwnRedis, count: usize) {
    let start = Instant::now();
    while server.command(&["DBSIZE"]) != count.to_string() {
        assert!(start.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewals_find_the_primary_that_sentinels_name() {
    let Some(()) = servers() else { return };
    let primary = OwnRedis::start(&[]);
    let sentinel = OwnRedis::start_sentinel(&format!(
        "sentinel monitor main 127.0.0.1 {} 1",
        primary.port()
    ));
    let kind = redis::sentinel::SentinelServerType::Master;
    let client =
        redis::sentinel::SentinelClient::build(vec![sentinel.url()], "main".to_owned(), None, kind);
    let store = RedisStore::builder("p:").sentinel(client.unwrap());
    let store = store.await.unwrap();
    let m = &id("m");
    wins(&store, m, A).await;
    assert!(store.renew(m, A, long()).await.unwrap());
    assert!(store.complete(m, A).await.unwrap());
    assert_eq!(primary.command(&["GET", "p:m"]), "2");
}

// ===== cluster =====

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_node_of_a_cluster_gets_the_scripts() {
    let Some(()) = servers() else { return };
    let nodes = services::cluster();
    let client = ClusterClient::new(nodes.iter().map(OwnRedis::url)).unwrap();
    let store = RedisStore::builder("p:").cluster(client).await.unwrap();
    let ids: Vec<_> = (0..60)
        .map(|n| id(&["", "{", "}", "{}", "{a}", "}{"][n % 6].repeat(n % 3 + 1)))
        .collect::<Vec<_>>()
        .into_iter()
        .enumerate()
        .map(|(n, part)| id(&format!("{part}{n}")))
        .collect();
    for round in 0..2 {
        for m in &ids {
            wins(&store, m, A).await;
            busy(store.claim(m, B, long()).await.unwrap());
            assert!(store.renew(m, A, long()).await.unwrap());
            assert!(!store.renew(m, B, long()).await.unwrap());
            assert!(store.release(m, A).await.unwrap());
            wins(&store, m, B).await;
            assert!(!store.complete(m, A).await.unwrap());
            assert_eq!(store.claim(m, B, long()).await.unwrap(), Claim::Done);
            store.forget(m).await.unwrap();
        }
        for node in &nodes {
            let calls = calls(node);
            // Each script once, and once more after it was lost.
            assert_eq!(calls.get("eval"), Some(&(4 * (round + 1))), "{calls:?}");
            assert!(calls["evalsha"] > 40, "{calls:?}");
            assert_eq!(node.command(&["SCRIPT", "FLUSH"]), "OK");
        }
    }
}
