//! The stores in Redis, against real servers: what they write, what they read of what workers in
//! other languages write, and what happens when connections and servers fail.
//!
//! `REDIS_URL` names a server for the harmless part; the rest start `redis-server` themselves.
#![allow(missing_docs)]

mod support;

#[path = "support/services.rs"]
mod services;

use futures_util::{StreamExt, stream};
use proptest::prelude::*;
use redis::{Client, aio::MultiplexedConnection, cluster::ClusterClient};
use services::{OwnRedis, PATIENCE, Proxy, unique, wait_until};
use std::{
    collections::{BTreeMap, BTreeSet},
    future::{Future, poll_fn},
    net::SocketAddr,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread,
    time::{Duration, Instant},
};
use support::{Handler, deliver, envelope, layer};
use tower::ServiceBuilder;
use tower_idempotency::{
    ConfigError, MessageId, Store,
    error::{BackendError, BackendErrorKind},
    store::{RedisStore, foreign::GoRedisStore},
};

// ===== help =====

async fn raw(url: &str) -> MultiplexedConnection {
    let client = Client::open(url).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

async fn ask<T: redis::FromRedisValue>(raw: &MultiplexedConnection, words: &[&str]) -> T {
    let mut command = redis::cmd(words[0]);
    command.arg(&words[1..]);
    command.query_async(&mut raw.clone()).await.unwrap()
}

fn url(addr: SocketAddr) -> String {
    format!("redis://{addr}")
}

fn id(text: &str) -> MessageId {
    MessageId::from(text)
}

/// A store whose commands answer within a short time, or not at all.
async fn hasty(url: &str) -> RedisStore {
    RedisStore::builder(unique("hasty"))
        .response_timeout(Duration::from_millis(250))
        .connect(url)
        .await
        .unwrap()
}

/// Tries until it succeeds, and answers the errors until then.
async fn heals<T, F>(mut attempt: impl FnMut() -> F, limit: Duration) -> (T, Vec<BackendError>)
where
    F: Future<Output = Result<T, BackendError>>,
{
    let (start, mut errors) = (Instant::now(), Vec::new());
    loop {
        match attempt().await {
            Ok(answer) => return (answer, errors),
            Err(error) => errors.push(error),
        }
        assert!(start.elapsed() < limit, "{:?}", errors.last());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn setting(error: &BackendError) -> &'static str {
    let source = std::error::Error::source(error).unwrap();
    source.downcast_ref::<ConfigError>().unwrap().setting()
}

fn servers() -> Option<()> {
    services::program("redis-server").map(drop)
}

// ===== what is stored =====

#[tokio::test]
async fn php_workers_share_the_record() {
    let Some(url) = services::redis() else { return };
    let prefix = unique("php");
    let store = RedisStore::connect(&url, prefix.as_str()).await.unwrap();
    let (raw, key) = (raw(&url).await, format!("{prefix}m"));
    let (key, id) = (key.as_str(), id("m"));
    let claim = ["SET", key, "1", "NX", "PX", "60000"];

    // A claim of theirs is not seen, whatever it looks like; then they finish it.
    assert!(ask::<Option<String>>(&raw, &claim).await.is_some());
    assert!(!store.seen(&id).await.unwrap());
    for claimed in ["1:00000000000000000000000000000000", "", "22", "2 ", "02"] {
        let _: () = ask(&raw, &["SET", key, claimed]).await;
        assert!(!store.seen(&id).await.unwrap(), "{claimed:?}");
    }
    let _: () = ask(&raw, &["SET", key, "2", "PX", "60000"]).await;
    assert!(store.seen(&id).await.unwrap());
    // They release, and we finish.
    let _: () = ask(&raw, &["DEL", key]).await;
    assert!(!store.seen(&id).await.unwrap());
    store.remember(&id).await.unwrap();
    assert_eq!(ask::<String>(&raw, &["GET", key]).await, "2");
    assert!(ask::<Option<String>>(&raw, &claim).await.is_none());
    // Done wins over their claim, and forgetting leaves nothing.
    let _: () = ask(&raw, &["SET", key, "1", "PX", "60000"]).await;
    store.remember(&id).await.unwrap();
    assert_eq!(ask::<String>(&raw, &["GET", key]).await, "2");
    store.forget(&id).await.unwrap();
    assert_eq!(ask::<i64>(&raw, &["EXISTS", key]).await, 0);
    store.forget(&id).await.unwrap();
    assert!(ask::<Option<String>>(&raw, &claim).await.is_some());
}

#[tokio::test]
async fn go_workers_share_their_record() {
    let Some(url) = services::redis() else { return };
    let prefix = unique("go");
    let store = RedisStore::builder(prefix.as_str())
        .ttl(Duration::from_secs(60))
        .connect(&url)
        .await
        .unwrap();
    let store = GoRedisStore::new(store);
    let (raw, key) = (raw(&url).await, format!("{prefix}m"));
    let (key, id) = (key.as_str(), id("m"));
    let remember = ["SET", key, "1", "NX", "PX", "60000"];

    assert!(!store.seen(&id).await.unwrap());
    let _: () = ask(&raw, &remember).await;
    assert!(store.seen(&id).await.unwrap());
    let _: () = ask(&raw, &["DEL", key]).await;
    assert!(!store.seen(&id).await.unwrap());
    store.remember(&id).await.unwrap();
    assert_eq!(ask::<i64>(&raw, &["EXISTS", key]).await, 1);
    assert_eq!(ask::<String>(&raw, &["GET", key]).await, "1");
    let left: i64 = ask(&raw, &["PTTL", key]).await;
    assert!((59_000..=60_000).contains(&left), "{left}");
    assert!(ask::<Option<String>>(&raw, &remember).await.is_none());
    // Any value at all is a mark to them.
    let _: () = ask(&raw, &["SET", key, "x"]).await;
    assert!(store.seen(&id).await.unwrap());
    store.forget(&id).await.unwrap();
    assert_eq!(ask::<i64>(&raw, &["EXISTS", key]).await, 0);
    assert_eq!(GoRedisStore::DEFAULT_PREFIX, "bq:idemp:");
}

#[tokio::test]
async fn each_write_sets_the_time_an_id_has_left() {
    let Some(url) = services::redis() else { return };
    let prefix = unique("ttl");
    let raw = raw(&url).await;
    let key = format!("{prefix}m");
    let key = key.as_str();
    // Half of an i64 of microseconds is the longest time that is not for ever.
    let longest = Duration::from_micros(i64::MAX as u64 / 2);
    let day = Duration::from_secs(24 * 3600);
    for (ttl, left) in [
        (Some(day), Some(day)),
        (
            Some(Duration::from_millis(12_345)),
            Some(Duration::from_millis(12_345)),
        ),
        (None, None),
        (Some(longest), Some(longest)),
        (Some(longest + Duration::from_micros(1)), None),
        (Some(Duration::MAX), None),
    ] {
        let store = RedisStore::builder(prefix.as_str()).ttl(ttl);
        let store = store.connect(&url).await.unwrap();
        for before in [
            &["DEL", key][..],
            &["PERSIST", key],
            &["PEXPIRE", key, "1000"],
        ] {
            let _: i64 = ask(&raw, before).await;
            store.remember(&id("m")).await.unwrap();
            let pttl: i64 = ask(&raw, &["PTTL", key]).await;
            match left {
                Some(left) => {
                    let left = left.as_nanos().div_ceil(1_000_000) as i64;
                    assert!((left - 1000..=left).contains(&pttl), "{ttl:?}: {pttl}");
                }
                None => assert_eq!(pttl, -1, "{ttl:?}"),
            }
            assert!(store.seen(&id("m")).await.unwrap());
        }
    }
    // Less than a millisecond is one, and over.
    for nanos in [1, 999_999] {
        let store = RedisStore::builder(prefix.as_str()).ttl(Duration::from_nanos(nanos));
        let store = store.connect(&url).await.unwrap();
        store.remember(&id("short")).await.unwrap();
        let start = Instant::now();
        while store.seen(&id("short")).await.unwrap() {
            assert!(start.elapsed() < PATIENCE);
        }
    }
    let default = RedisStore::connect(&url, prefix.as_str()).await.unwrap();
    default.remember(&id("m")).await.unwrap();
    let left: i64 = ask(&raw, &["PTTL", key]).await;
    assert!((86_399_000..=86_400_000).contains(&left), "{left}");
    let _: () = ask(&raw, &["DEL", key]).await;
}

#[tokio::test]
async fn a_new_message_costs_two_commands_and_a_duplicate_one() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let store = RedisStore::connect(&server.url(), "p:").await.unwrap();
    let counts = || -> BTreeMap<String, u64> {
        let info = server.command(&["INFO", "commandstats"]);
        let lines = info
            .lines()
            .filter_map(|line| line.strip_prefix("cmdstat_"));
        let counts = lines.filter_map(|line| {
            let (name, rest) = line.split_once(":calls=")?;
            Some((name.to_owned(), rest.split(',').next()?.parse().ok()?))
        });
        counts.filter(|(name, _)| name != "info").collect()
    };
    let handler = Handler::default();
    let (layer, events) = layer(store.clone());
    let mut service = ServiceBuilder::new().layer(layer).service(handler.clone());
    let mut before = counts();
    for expected in [&["get", "set"][..], &["get"], &["get"]] {
        deliver(&mut service, envelope("m")).await.unwrap();
        let after = counts();
        let mut sent = Vec::new();
        for (name, count) in &after {
            let times = count - before.get(name).unwrap_or(&0);
            sent.extend((0..times).map(|_| name.clone()));
        }
        assert_eq!(sent, expected);
        before = after;
    }
    assert_eq!(handler.runs(), 1);
    assert_eq!(events.all(), ["ran m", "duplicate m", "duplicate m"]);
    store.forget(&id("m")).await.unwrap();
    deliver(&mut service, envelope("m")).await.unwrap();
    assert_eq!(handler.runs(), 2);
}

#[tokio::test]
async fn ids_are_compared_by_their_bytes() {
    let Some(url) = services::redis() else { return };
    let store = RedisStore::builder(unique("ids")).ttl(Duration::from_secs(60));
    let store = store.connect(&url).await.unwrap();
    let long = "x".repeat(1_000_000);
    let longer = format!("{long}y");
    let ids = [
        "f1e2d3c4-0000-4000-8000-000000000000",
        "F1E2D3C4-0000-4000-8000-000000000000",
        "a",
        "A",
        "a ",
        " a",
        "a\0",
        "a\0b",
        "a\r\n",
        "a\r\nDEL a",
        "*",
        "a*",
        "?",
        "{",
        "}",
        "{}",
        "{a}b",
        "{a}c",
        "é",
        "e\u{301}",
        "ß",
        "ss",
        "🦀",
        " ",
        "\t",
        "%s",
        "\\",
        "'",
        "\"",
        long.as_str(),
        longer.as_str(),
    ];
    for (index, known) in ids.iter().enumerate() {
        for (other, text) in ids.iter().enumerate() {
            assert_eq!(
                store.seen(&id(text)).await.unwrap(),
                other < index,
                "{known:.9}"
            );
        }
        store.remember(&id(known)).await.unwrap();
    }
    for (index, known) in ids.iter().enumerate() {
        store.forget(&id(known)).await.unwrap();
        let next = ids.get(index + 1);
        assert!(!store.seen(&id(known)).await.unwrap());
        if let Some(next) = next {
            assert!(store.seen(&id(next)).await.unwrap());
        }
    }
}

#[test]
fn prefix_and_id_tell_records_apart() {
    let Some(url) = services::redis() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let part = "[ab:{}]{1,3}";
    let config = ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(prefix in part, other in part, one in part, two in part)| {
        let same = prefix == other;
        // What the documentation asks for: no prefix is the beginning of another one.
        prop_assume!(same || !(prefix.starts_with(&other) || other.starts_with(&prefix)));
        let base = unique("apart");
        let seen = runtime.block_on(async {
            let ttl = Duration::from_secs(60);
            let mine = RedisStore::builder(format!("{base}{prefix}")).ttl(ttl);
            let mine = mine.connect(&url).await.unwrap();
            let theirs = RedisStore::connect(&url, format!("{base}{other}")).await.unwrap();
            mine.remember(&id(&one)).await.unwrap();
            theirs.seen(&id(&two)).await.unwrap()
        });
        prop_assert_eq!(seen, same && one == two);
    });
    // Why it asks for it.
    let base = unique("apart");
    let seen = runtime.block_on(async {
        let mine = RedisStore::builder(format!("{base}a:")).ttl(Duration::from_secs(60));
        let mine = mine.connect(&url).await.unwrap();
        let theirs = RedisStore::connect(&url, format!("{base}a:b:"))
            .await
            .unwrap();
        mine.remember(&id("b:c")).await.unwrap();
        theirs.seen(&id("c")).await.unwrap()
    });
    assert!(seen);
}

#[tokio::test]
async fn what_cannot_be_held_to_is_refused() {
    let Some(url) = services::redis() else { return };
    let refused = async |builder: tower_idempotency::store::RedisStoreBuilder| {
        setting(&builder.connect(&url).await.unwrap_err())
    };
    let ok = || RedisStore::builder("p:");
    assert_eq!(refused(RedisStore::builder("")).await, "prefix");
    assert_eq!(refused(ok().ttl(Duration::ZERO)).await, "ttl");
    assert_eq!(
        refused(ok().response_timeout(Duration::ZERO)).await,
        "response_timeout"
    );
    assert_eq!(
        refused(ok().connection_timeout(Duration::ZERO)).await,
        "connection_timeout"
    );
}

#[tokio::test]
async fn a_key_that_is_no_string_is_an_error() {
    let Some(url) = services::redis() else { return };
    let prefix = unique("list");
    let store = RedisStore::connect(&url, prefix.as_str()).await.unwrap();
    let raw = raw(&url).await;
    let key = format!("{prefix}m");
    let _: i64 = ask(&raw, &["LPUSH", &key, "1"]).await;
    let error = store.seen(&id("m")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Schema);
    let text = error.to_string();
    assert!(
        text.contains(&prefix) && text.contains("expected a string"),
        "{text}"
    );
    store.forget(&id("m")).await.unwrap();
    assert!(!store.seen(&id("m")).await.unwrap());
}

#[tokio::test]
async fn the_newer_protocol_serves_as_well() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&["--maxmemory-policy", "volatile-lru"]);
    let url = format!("{}/1?protocol=resp3", server.url());
    let store = RedisStore::connect(&url, "p:").await.unwrap();
    assert_eq!(store.eviction_policy(), Some("volatile-lru"));
    let go = RedisStore::connect(&url, "go:").await.unwrap();
    let go = GoRedisStore::new(go);
    for round in [false, true] {
        assert_eq!(store.seen(&id("m")).await.unwrap(), round);
        assert_eq!(go.seen(&id("m")).await.unwrap(), round);
        store.remember(&id("m")).await.unwrap();
        go.remember(&id("m")).await.unwrap();
    }
    store.forget(&id("m")).await.unwrap();
    assert!(!store.seen(&id("m")).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racers_see_what_they_remembered() {
    let Some(url) = services::redis() else { return };
    let store = RedisStore::builder(unique("race")).ttl(Duration::from_secs(60));
    let store = store.connect(&url).await.unwrap();
    let racers = (0..64).map(|racer| {
        let store = store.clone();
        tokio::spawn(async move {
            for round in 0..20 {
                let own = id(&format!("{racer}-{round}"));
                assert!(!store.seen(&own).await.unwrap());
                store.remember(&own).await.unwrap();
                store.remember(&id("shared")).await.unwrap();
                assert!(store.seen(&own).await.unwrap());
                assert!(store.seen(&id("shared")).await.unwrap());
                if round % 2 == 0 {
                    store.forget(&own).await.unwrap();
                    assert!(!store.seen(&own).await.unwrap());
                }
            }
        })
    });
    for racer in racers.collect::<Vec<_>>() {
        racer.await.unwrap();
    }
}

// ===== connections that fail =====

#[tokio::test]
async fn a_connection_that_was_cut_costs_no_command() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = RedisStore::connect(&url(proxy.addr()), "p:").await.unwrap();
    store.remember(&id("m")).await.unwrap();
    for round in 1..=10 {
        proxy.cut();
        assert!(store.seen(&id("m")).await.unwrap());
        proxy.cut();
        store.remember(&id(&round.to_string())).await.unwrap();
        proxy.cut();
        store.forget(&id(&round.to_string())).await.unwrap();
        assert_eq!(proxy.connections(), 1 + 3 * round);
    }
    // All who find it cut share the next one.
    proxy.cut();
    let racers: Vec<_> = (0..64)
        .map(|racer| {
            let store = store.clone();
            tokio::spawn(async move {
                store
                    .seen(&id(if racer % 2 == 0 { "m" } else { "n" }))
                    .await
            })
        })
        .collect();
    for (index, racer) in racers.into_iter().enumerate() {
        assert_eq!(racer.await.unwrap().unwrap(), index % 2 == 0);
    }
    assert_eq!(proxy.connections(), 32);
}

#[tokio::test]
async fn an_attempt_that_fails_is_answered_to_all_who_wait() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = RedisStore::connect(&url(proxy.addr()), "p:").await.unwrap();
    store.remember(&id("m")).await.unwrap();
    proxy.refuse(true);
    proxy.cut();
    let racers: Vec<_> = (0..64)
        .map(|_| tokio::spawn(store.seen(&id("m"))))
        .collect();
    for racer in racers {
        let error = racer.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    }
    let attempts = proxy.connections() - 1;
    assert!((1..=8).contains(&attempts), "{attempts} attempts");
    proxy.refuse(false);
    assert!(store.seen(&id("m")).await.unwrap());
    assert_eq!(proxy.connections(), attempts + 2);
}

#[tokio::test]
async fn a_command_under_way_when_the_connection_is_cut_is_sent_again() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = RedisStore::connect(&url(proxy.addr()), "p:").await.unwrap();
    let raw = raw(&server.url()).await;
    for message in ["a", "b", "c"] {
        proxy.hold_replies();
        let remembering = tokio::spawn(store.remember(&id(message)));
        let key = format!("p:{message}");
        while ask::<i64>(&raw, &["EXISTS", &key]).await == 0 {
            tokio::task::yield_now().await;
        }
        // It took effect and nobody knows; now it takes effect again.
        let _: i64 = ask(&raw, &["DEL", &key]).await;
        proxy.cut();
        proxy.release();
        remembering.await.unwrap().unwrap();
        assert_eq!(ask::<String>(&raw, &["GET", &key]).await, "2");
    }
    assert_eq!(proxy.connections(), 4);

    // Once, not again and again.
    proxy.refuse(true);
    proxy.cut();
    let error = store.seen(&id("a")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    assert_eq!(proxy.connections(), 5);
    proxy.refuse(false);
    assert!(store.seen(&id("a")).await.unwrap());
    assert_eq!(proxy.connections(), 6);
}

#[tokio::test]
async fn a_connection_that_no_longer_answers_is_replaced() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = hasty(&url(proxy.addr())).await;
    for round in 1..=3 {
        proxy.swallow_present();
        let before = server.info("commandstats", "cmdstat_set");
        let error = store.remember(&id("m")).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Unavailable);
        assert!(error.is_retryable());
        assert!(
            error.to_string().contains("no answer within 250ms"),
            "{error}"
        );
        // It took effect, was not sent twice, and what comes next works.
        let calls = |line: Option<String>| -> u64 {
            let line = line.unwrap_or_else(|| "calls=0,".to_owned());
            line["calls=".len()..]
                .split(',')
                .next()
                .unwrap()
                .parse()
                .unwrap()
        };
        let after = server.info("commandstats", "cmdstat_set");
        assert_eq!(calls(after), calls(before) + 1);
        assert_eq!(proxy.connections(), round);
        assert!(store.seen(&id("m")).await.unwrap());
        assert_eq!(proxy.connections(), round + 1);
    }
}

/// What the last of its commands learns too late says nothing of the connection that came after it.
#[tokio::test]
async fn a_connection_that_answers_stays() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = hasty(&url(proxy.addr())).await;
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(800) {
        store.remember(&id("m")).await.unwrap();
    }
    assert_eq!(proxy.connections(), 1);

    proxy.swallow_present();
    let early = tokio::spawn(store.seen(&id("m")));
    tokio::time::sleep(Duration::from_millis(125)).await;
    let late = tokio::spawn(store.seen(&id("m")));
    assert!(early.await.unwrap().is_err());
    assert!(store.seen(&id("m")).await.unwrap());
    assert!(late.await.unwrap().is_err());
    assert!(store.seen(&id("m")).await.unwrap());
    assert_eq!(proxy.connections(), 2);
}

/// Callers that wait for less than the limit would otherwise never find out.
#[tokio::test]
async fn a_silent_connection_is_replaced_although_its_callers_give_up() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = hasty(&url(proxy.addr())).await;
    store.remember(&id("m")).await.unwrap();
    proxy.swallow_present();
    let start = Instant::now();
    loop {
        let patience = Duration::from_millis(50);
        match tokio::time::timeout(patience, store.seen(&id("m"))).await {
            Ok(seen) => break assert!(seen.unwrap()),
            Err(_) => assert!(start.elapsed() < Duration::from_secs(5), "never replaced"),
        }
    }
    assert_eq!(proxy.connections(), 2);
}

#[tokio::test]
async fn a_late_reply_is_not_taken_for_another_commands() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = hasty(&url(proxy.addr())).await;
    store.remember(&id("known")).await.unwrap();
    let interleaved = async || {
        let answers = stream::iter(0..1000).map(|n| {
            let store = store.clone();
            async move {
                let message = if n % 2 == 0 { "known" } else { "unknown" };
                assert_eq!(store.seen(&id(message)).await.unwrap(), n % 2 == 0);
            }
        });
        answers.buffer_unordered(16).collect::<Vec<()>>().await;
    };
    // Past the limit.
    proxy.delay_replies(Duration::from_millis(400));
    let error = store.seen(&id("known")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    proxy.delay_replies(Duration::ZERO);
    interleaved().await;
    assert_eq!(proxy.connections(), 2);

    // After its caller gave up, on a connection that stays.
    for given_up in ["known", "unknown", "known"] {
        proxy.hold_replies();
        let asking = store.seen(&id(given_up));
        let waiting = tokio::time::timeout(Duration::from_millis(20), asking).await;
        assert!(waiting.is_err());
        proxy.release();
        interleaved().await;
    }
    assert_eq!(proxy.connections(), 2);
}

/// Polls as often as that and drops it; answers its output if it came first.
async fn polled<F: Future>(times: usize, future: F) -> Option<F::Output> {
    let mut future = Box::pin(future);
    let mut left = times;
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        let poll = future.as_mut().poll(cx).map(Some);
        if poll.is_pending() && left == 0 {
            return Poll::Ready(None);
        }
        poll
    })
    .await
}

#[tokio::test]
async fn a_command_can_be_dropped_at_each_await() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&[]);
    let proxy = Proxy::start(server.addr()).await;
    let store = RedisStore::connect(&url(proxy.addr()), "p:").await.unwrap();
    store.remember(&id("known")).await.unwrap();
    for cut in [false, true] {
        let mut most = 0;
        for operation in ["seen", "remember", "forget"] {
            for times in 0.. {
                if cut {
                    proxy.cut();
                }
                let message = id(&format!("{operation}-{times}"));
                let done = match operation {
                    "seen" => polled(times, store.seen(&message))
                        .await
                        .map(|it| it.map(drop)),
                    "remember" => polled(times, store.remember(&message)).await,
                    _ => polled(times, store.forget(&message)).await,
                };
                assert!(store.seen(&id("known")).await.unwrap());
                assert!(!store.seen(&id("unknown")).await.unwrap());
                if let Some(done) = done {
                    done.unwrap();
                    break;
                }
                most = most.max(times);
            }
        }
        // With a connection to make there is more to wait for.
        assert!(most >= if cut { 2 } else { 1 }, "{most}");
    }
}

// ===== servers that fail =====

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_was_killed_and_came_back_is_found() {
    let Some(()) = servers() else { return };
    let mut server = OwnRedis::start(&["--appendonly", "yes", "--appendfsync", "always"]);
    let store = RedisStore::connect(&server.url(), "p:").await.unwrap();
    store.remember(&id("m")).await.unwrap();
    server.restart();
    assert!(store.seen(&id("m")).await.unwrap(), "no command is lost");

    server.kill();
    for _ in 0..3 {
        let error = store.seen(&id("m")).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Unavailable);
        let error = store.remember(&id("n")).await.unwrap_err();
        assert!(error.is_retryable());
    }
    server.restart();
    assert!(store.seen(&id("m")).await.unwrap());
    assert!(!store.seen(&id("n")).await.unwrap());
    store.remember(&id("n")).await.unwrap();
}

#[tokio::test]
async fn a_server_that_is_not_there_is_an_error_at_once() {
    let Some(()) = servers() else { return };
    let mut server = OwnRedis::start(&[]);
    server.kill();
    let error = RedisStore::connect(&server.url(), "p:").await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    // Nor one that accepts and says nothing.
    server.restart();
    let proxy = Proxy::start(server.addr()).await;
    proxy.swallow_replies(true);
    let limit = Duration::from_millis(200);
    let builder = RedisStore::builder("p:").connection_timeout(limit);
    let start = Instant::now();
    let error = builder.connect(&url(proxy.addr())).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    assert!(start.elapsed() >= limit);
    assert_eq!(proxy.connections(), 1);
}

#[tokio::test]
async fn no_password_is_told() {
    let Some(()) = servers() else { return };
    let hello = ["--requirepass", "right", "--rename-command", "HELLO", ""];
    let server = OwnRedis::start(&hello);
    let addr = server.addr();
    let tell = |error: &BackendError| {
        let text = format!("{error} {error:?}");
        assert!(!text.contains("hunter2"), "{text}");
    };
    for (url, kind) in [
        (format!("redis://:hunter2@{addr}"), BackendErrorKind::Denied),
        (
            format!("redis://hunter2:hunter2@{addr}"),
            BackendErrorKind::Denied,
        ),
        (
            format!("redis://:hunter2@{addr}/3"),
            BackendErrorKind::Denied,
        ),
        (format!("redis://{addr}"), BackendErrorKind::Denied),
        (
            format!("redis://:hunter2@{addr}/?protocol=resp3"),
            BackendErrorKind::Other,
        ),
        ("redis://:hunter2@".to_owned(), BackendErrorKind::Config),
        ("redis:/:hunter2@x".to_owned(), BackendErrorKind::Config),
        (":hunter2@localhost".to_owned(), BackendErrorKind::Config),
        (format!("http://:hunter2@{addr}"), BackendErrorKind::Config),
        (
            format!("redis://:hunter2@{addr}/x"),
            BackendErrorKind::Config,
        ),
        (
            "redis://:hunter2@127.0.0.1:port".to_owned(),
            BackendErrorKind::Config,
        ),
        (
            "redis://:hunter2@127.0.0.1:1".to_owned(),
            BackendErrorKind::Unavailable,
        ),
    ] {
        let connected = RedisStore::connect(&url, "p:").await;
        let error = connected.expect_err(&url);
        assert_eq!(error.kind(), kind, "{url}: {error}");
        tell(&error);
    }
    // A cluster's client tells no more than that there is no connection.
    let cluster = ClusterClient::new([format!("redis://:hunter2@{addr}/?protocol=resp3")]);
    let builder = RedisStore::builder("p:");
    let error = builder.cluster(cluster.unwrap()).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    tell(&error);

    let server = OwnRedis::start(&["--requirepass", "hunter2"]);
    let builder = RedisStore::builder("p:");
    let store = builder
        .connect(&format!("redis://:hunter2@{}", server.addr()))
        .await
        .unwrap();
    store.remember(&id("m")).await.unwrap();
    assert!(store.seen(&id("m")).await.unwrap());
    let text = format!("{store:?} {:?}", GoRedisStore::new(store.clone()));
    assert!(text.contains("p:") && !text.contains("hunter2"), "{text}");
}

#[tokio::test]
async fn permissions_are_told_apart() {
    let Some(()) = servers() else { return };
    let server = OwnRedis::start(&["--maxmemory-policy", "allkeys-lru"]);
    let user = [
        "ACL", "SETUSER", "worker", "on", ">secret", "~p:*", "+get", "+set",
    ];
    assert_eq!(server.command(&user), "OK");
    let url = format!("redis://worker:secret@{}", server.addr());
    // It need not be allowed to read the configuration.
    let store = RedisStore::connect(&url, "p:").await.unwrap();
    assert_eq!(store.eviction_policy(), None);
    store.remember(&id("m")).await.unwrap();
    assert!(store.seen(&id("m")).await.unwrap());
    let error = store.forget(&id("m")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Denied);
    let elsewhere = RedisStore::connect(&url, "q:").await.unwrap();
    let error = elsewhere.seen(&id("m")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Denied);
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn an_evicting_server_is_told_and_forgets() {
    let Some(()) = servers() else { return };
    let full = ["--maxmemory", "3mb", "--maxmemory-policy"];
    let evicting = OwnRedis::start(&[&full[..], &["allkeys-lru"]].concat());
    let store = RedisStore::connect(&evicting.url(), "p:").await.unwrap();
    assert_eq!(store.eviction_policy(), Some("allkeys-lru"));
    let padding = "x".repeat(10_000);
    let ids: Vec<MessageId> = (0..1000).map(|n| id(&format!("{n}{padding}"))).collect();
    for id in &ids {
        store.remember(id).await.unwrap();
    }
    // Which ones, the server leaves to chance: it looks at a few, and its idea of their age is in seconds.
    let mut kept = 0;
    for id in &ids {
        kept += usize::from(store.seen(id).await.unwrap());
    }
    assert!(kept < ids.len(), "10 MB of ids do not fit into 3 MB");

    let full = OwnRedis::start(&[&full[..], &["noeviction"]].concat());
    let store = RedisStore::connect(&full.url(), "p:").await.unwrap();
    assert_eq!(store.eviction_policy(), Some("noeviction"));
    store.remember(&id("first")).await.unwrap();
    assert_eq!(full.command(&["CONFIG", "SET", "maxmemory", "1"]), "OK");
    let error = store.remember(&id("second")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Other);
    assert!(error.to_string().contains("OOM"), "{error}");
    assert!(store.seen(&id("first")).await.unwrap());
    store.forget(&id("first")).await.unwrap();
}

#[cfg(feature = "tracing")]
#[tokio::test]
async fn an_evicting_server_is_warned_of() {
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

    let Some(()) = servers() else { return };
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone());
    let _guard = tracing::subscriber::set_default(subscriber.finish());
    for (policy, warned) in [
        ("noeviction", false),
        ("volatile-ttl", true),
        ("allkeys-lru", true),
    ] {
        let server = OwnRedis::start(&["--maxmemory-policy", policy]);
        lines.0.lock().unwrap().clear();
        RedisStore::connect(&server.url(), "p:").await.unwrap();
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let mut ours = text
            .lines()
            .filter(|line| line.contains("tower_idempotency"));
        assert_eq!(
            ours.any(|line| line.contains("WARN") && line.contains(policy)),
            warned,
            "{text}"
        );
    }
}

// ===== failover =====

#[tokio::test]
async fn a_replica_takes_no_writes_until_it_is_promoted() {
    let Some(()) = servers() else { return };
    let (primary, server) = (OwnRedis::start(&[]), OwnRedis::start(&[]));
    let store = RedisStore::connect(&server.url(), "p:").await.unwrap();
    store.remember(&id("before")).await.unwrap();
    let port = primary.port().to_string();
    assert_eq!(server.command(&["REPLICAOF", "127.0.0.1", &port]), "OK");
    for _ in 0..5 {
        let error = store.remember(&id("m")).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::ReadOnly);
        assert!(error.is_retryable());
    }
    assert_eq!(server.command(&["REPLICAOF", "NO", "ONE"]), "OK");
    store.remember(&id("m")).await.unwrap();
    assert!(store.seen(&id("m")).await.unwrap());
}

/// What a name that moves to another address does: the old connection stays open, to a replica.
#[tokio::test]
async fn a_name_that_moved_to_the_new_primary_is_followed() {
    let Some(()) = servers() else { return };
    let (old, new) = (OwnRedis::start(&[]), OwnRedis::start(&[]));
    let proxy = Proxy::start(old.addr()).await;
    let store = RedisStore::connect(&url(proxy.addr()), "p:").await.unwrap();
    store.remember(&id("before")).await.unwrap();

    let port = new.port().to_string();
    assert_eq!(old.command(&["REPLICAOF", "127.0.0.1", &port]), "OK");
    // Not moved yet: errors, and not one connection for each.
    let start = Instant::now();
    let mut errors = 0;
    while errors < 500 {
        let error = store.remember(&id("m")).await.unwrap_err();
        assert!(error.is_retryable(), "{error}");
        errors += 1;
    }
    let most = 2 + 2 * start.elapsed().as_secs() + 2;
    assert!(
        proxy.connections() <= most,
        "{} connections",
        proxy.connections()
    );

    proxy.retarget(new.addr());
    let ((), errors) = heals(|| store.remember(&id("m")), Duration::from_secs(5)).await;
    for error in errors {
        assert_eq!(error.kind(), BackendErrorKind::ReadOnly);
    }
    let raw = raw(&new.url()).await;
    assert_eq!(ask::<String>(&raw, &["GET", "p:m"]).await, "2");
    assert!(store.seen(&id("m")).await.unwrap());
}

#[tokio::test]
async fn an_old_connection_to_a_replica_costs_no_command() {
    let Some(()) = servers() else { return };
    let (old, new) = (OwnRedis::start(&[]), OwnRedis::start(&[]));
    let proxy = Proxy::start(old.addr()).await;
    let store = RedisStore::connect(&url(proxy.addr()), "p:").await.unwrap();
    // Time has to pass for a connection not to be young any more.
    tokio::time::sleep(Duration::from_millis(600)).await;
    proxy.retarget(new.addr());
    let port = new.port().to_string();
    assert_eq!(old.command(&["REPLICAOF", "127.0.0.1", &port]), "OK");
    store.remember(&id("m")).await.unwrap();
    assert_eq!(proxy.connections(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_are_asked_for_the_new_primary() {
    let Some(()) = servers() else { return };
    let primary = OwnRedis::start(&[]);
    let port = primary.port().to_string();
    let replica = OwnRedis::start(&["--replicaof", &format!("127.0.0.1 {port}")]);
    wait_until("the replica follows", || {
        replica.info("replication", "master_link_status").as_deref() == Some("up")
    });
    let sentinel = OwnRedis::start_sentinel(&format!(
        "sentinel monitor main 127.0.0.1 {port} 1\nsentinel down-after-milliseconds main 1000\n\
         sentinel failover-timeout main 1000"
    ));
    wait_until("the sentinel knows the replica", || {
        sentinel.command(&["INFO", "sentinel"]).contains("slaves=1")
    });
    let client = || {
        let kind = redis::sentinel::SentinelServerType::Master;
        redis::sentinel::SentinelClient::build(vec![sentinel.url()], "main".to_owned(), None, kind)
            .unwrap()
    };
    let store = RedisStore::builder("p:").sentinel(client()).await.unwrap();
    store.remember(&id("before")).await.unwrap();
    wait_until("the replica has it", || {
        replica.command(&["EXISTS", "p:before"]) == "1"
    });

    // The old primary lives on as a replica.
    wait_until("the failover begins", || {
        sentinel.command(&["SENTINEL", "FAILOVER", "main"]) == "OK"
    });
    wait_until("the replica is promoted", || {
        replica.info("replication", "role").as_deref() == Some("master")
    });
    let ((), errors) = heals(|| store.remember(&id("m")), PATIENCE).await;
    assert!(errors.iter().all(BackendError::is_retryable), "{errors:?}");
    // A write to the old primary, before it was demoted, may be gone; one after that is not.
    wait_until("the old primary is demoted", || {
        primary.info("replication", "role").as_deref() == Some("slave")
    });
    heals(|| store.remember(&id("after")), Duration::from_secs(5)).await;
    assert_eq!(replica.command(&["GET", "p:after"]), "2");
    assert!(store.seen(&id("before")).await.unwrap());

    // And now it dies.
    let mut replica = replica;
    replica.kill();
    let error = store.seen(&id("before")).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    heals(|| store.remember(&id("again")), PATIENCE).await;
    assert_eq!(primary.command(&["GET", "p:again"]), "2");
}

// ===== cluster =====

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_id_has_its_place_in_a_cluster() {
    let Some(()) = servers() else { return };
    let nodes = services::cluster();
    let client = ClusterClient::new(nodes.iter().map(OwnRedis::url)).unwrap();
    let store = RedisStore::builder("p:").cluster(client).await.unwrap();
    assert_eq!(store.eviction_policy(), Some("noeviction"));
    let mut ids = BTreeSet::new();
    let braces = [
        "", "{", "}", "{}", "{a}", "}{", "{{a}}", "{a}b", "a{}{b}", "{\0}",
    ];
    for n in 0..10_000 {
        let random = uuid::Uuid::new_v4();
        ids.insert(match braces[n % braces.len()] {
            // Outside of what would be hashed.
            "" => random.to_string(),
            text => format!("{text}{random}"),
        });
    }
    ids.extend(braces.iter().skip(1).map(|&text| text.to_owned()));
    let ids: Vec<_> = ids.iter().map(|text| id(text)).collect();
    let each = async |wanted: Option<bool>, from: usize| {
        let all = stream::iter(ids.iter().skip(from).step_by(2)).map(|id| {
            let store = store.clone();
            async move {
                match wanted {
                    None => store.forget(id).await.unwrap(),
                    Some(wanted) => assert_eq!(store.seen(id).await.unwrap(), wanted, "{id:?}"),
                }
            }
        });
        all.buffer_unordered(64).collect::<Vec<()>>().await;
    };
    each(Some(false), 0).await;
    each(Some(false), 1).await;
    let all = stream::iter(&ids).map(|id| store.remember(id));
    let answers: Vec<_> = all.buffer_unordered(64).collect().await;
    assert!(answers.into_iter().all(|answer| answer.is_ok()));
    let sizes: Vec<usize> = nodes
        .iter()
        .map(|node| node.command(&["DBSIZE"]).parse().unwrap())
        .collect();
    assert_eq!(sizes.iter().sum::<usize>(), ids.len());
    // Three of ten have a hash tag of their own, and go where that goes.
    assert!(sizes.iter().all(|&size| size > 1500), "{sizes:?}");
    each(Some(true), 0).await;
    each(Some(true), 1).await;
    each(None, 0).await;
    each(Some(false), 0).await;
    each(Some(true), 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_node_that_came_back_is_found() {
    let Some(()) = servers() else { return };
    let mut nodes = services::cluster();
    let client = ClusterClient::new([nodes[0].url(), nodes[1].url()]).unwrap();
    let store = RedisStore::builder("p:")
        .response_timeout(Duration::from_secs(1))
        .cluster(client)
        .await
        .unwrap();
    let ids: Vec<_> = (0..30).map(|n| id(&n.to_string())).collect();
    for id in &ids {
        store.remember(id).await.unwrap();
    }
    nodes[2].kill();
    let mut errors = 0;
    for id in &ids {
        match store.seen(id).await {
            Ok(seen) => assert!(seen),
            Err(error) => {
                assert_eq!(error.kind(), BackendErrorKind::Unavailable, "{error}");
                errors += 1;
                break;
            }
        }
    }
    assert_eq!(errors, 1);
    nodes[2].restart();
    for id in &ids {
        heals(|| store.remember(id), PATIENCE).await;
    }
    for id in &ids {
        assert!(store.seen(id).await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_node_that_no_longer_answers_is_connected_to_anew() {
    let Some(()) = servers() else { return };
    let nodes = services::cluster();
    // The others send clients to it by way of the proxy.
    let proxy = Proxy::start(nodes[2].addr()).await;
    let (port, bus) = (proxy.addr().port(), nodes[2].port() + 10_000);
    let announce = ["CONFIG", "SET", "cluster-announce-port", &port.to_string()];
    let bus = ["cluster-announce-bus-port", &bus.to_string()];
    assert_eq!(nodes[2].command(&[&announce[..], &bus].concat()), "OK");
    wait_until("it is announced", || {
        nodes[..2].iter().all(|node| {
            let known = node.command(&["CLUSTER", "NODES"]);
            known.contains(&format!(":{port}@"))
        })
    });
    let client = ClusterClient::new([nodes[0].url(), nodes[1].url()]).unwrap();
    let store = RedisStore::builder("p:")
        .response_timeout(Duration::from_millis(500))
        .cluster(client)
        .await
        .unwrap();
    let ids: Vec<_> = (0..30).map(|n| id(&n.to_string())).collect();
    for id in &ids {
        store.remember(id).await.unwrap();
    }
    assert_ne!(nodes[2].command(&["DBSIZE"]), "0");
    proxy.swallow_present();
    let mut errors = Vec::new();
    for id in &ids {
        errors.extend(store.remember(id).await.err());
    }
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert_eq!(errors[0].kind(), BackendErrorKind::Unavailable);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_in_a_cluster_is_followed() {
    let Some(()) = servers() else { return };
    let nodes = services::cluster();
    let replica = OwnRedis::start(&["--cluster-enabled", "yes"]);
    let port = nodes[0].port().to_string();
    assert_eq!(
        replica.command(&["CLUSTER", "MEET", "127.0.0.1", &port]),
        "OK"
    );
    let primary = nodes[0].command(&["CLUSTER", "MYID"]);
    wait_until("the replica knows its primary", || {
        replica.command(&["CLUSTER", "REPLICATE", &primary]) == "OK"
    });
    wait_until("the replica follows", || {
        replica.info("replication", "master_link_status").as_deref() == Some("up")
    });
    let client = ClusterClient::new(nodes.iter().map(OwnRedis::url)).unwrap();
    let store = RedisStore::builder("p:").cluster(client).await.unwrap();
    let ids: Vec<_> = (0..30).map(|n| id(&n.to_string())).collect();
    for id in &ids {
        store.remember(id).await.unwrap();
    }
    // They all vote.
    wait_until("all know the replica", || {
        let all = nodes.iter().chain([&replica]);
        all.map(|node| node.command(&["CLUSTER", "NODES"]))
            .all(|known| known.matches(" connected").count() == 4 && known.contains("slave"))
    });
    // The primary may not hear of it; the server gives up after five seconds.
    let mut begun: Option<Instant> = None;
    wait_until("the replica is promoted", || {
        if begun.is_none_or(|begun| begun.elapsed() > Duration::from_secs(6)) {
            begun = Some(Instant::now());
            replica.command(&["CLUSTER", "FAILOVER"]);
        }
        replica.info("replication", "role").as_deref() == Some("master")
    });
    for id in &ids {
        let ((), errors) = heals(|| store.remember(id), Duration::from_secs(5)).await;
        assert!(errors.iter().all(BackendError::is_retryable), "{errors:?}");
        assert!(store.seen(id).await.unwrap());
    }
    wait_until("the old primary is demoted", || {
        nodes[0].info("replication", "role").as_deref() == Some("slave")
    });
    for id in &ids {
        store.remember(id).await.unwrap();
    }
    assert_ne!(replica.command(&["DBSIZE"]), "0");
}

#[tokio::test]
async fn a_cluster_needs_a_cluster_client() {
    let Some(()) = servers() else { return };
    let nodes = services::cluster();
    let store = RedisStore::connect(&nodes[0].url(), "p:").await.unwrap();
    let mut moved = 0;
    for n in 0..50 {
        if let Err(error) = store.seen(&id(&n.to_string())).await {
            assert_eq!(error.kind(), BackendErrorKind::Other);
            assert!(
                error.to_string().contains("needs a cluster client"),
                "{error}"
            );
            moved += 1;
        }
    }
    assert!(moved > 0);
}

// ===== runtimes =====

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Drives a future without a runtime.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park_timeout(PATIENCE),
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn without_a_runtime_a_command_is_an_error() {
    let Some(url) = services::redis() else { return };
    let error = block_on(RedisStore::connect(&url, "p:")).unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    let first = runtime();
    let store = RedisStore::builder(unique("runtime")).ttl(Duration::from_secs(60));
    let store = first.block_on(store.connect(&url)).unwrap();
    let (one, seen) = (id("m"), store.seen(&id("m")));
    for error in [
        block_on(store.remember(&one)).unwrap_err(),
        block_on(store.forget(&one)).unwrap_err(),
        block_on(seen).map(drop).unwrap_err(),
    ] {
        assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    }
    first.block_on(store.remember(&one)).unwrap();

    // A record outlives the runtime it was opened in.
    drop(first);
    let second = runtime();
    assert!(second.block_on(store.seen(&one)).unwrap());
}

#[test]
fn a_command_begun_in_a_runtime_can_end_outside() {
    let Some(()) = servers() else { return };
    let (server, runtime) = (OwnRedis::start(&[]), runtime());
    let proxy = runtime.block_on(Proxy::start(server.addr()));
    let store = runtime.block_on(RedisStore::connect(&url(proxy.addr()), "p:"));
    let store = store.unwrap();
    for message in ["a", "b"] {
        // The first has to connect anew on the way.
        if message == "a" {
            proxy.cut();
        }
        let mut remembering = store.remember(&id(message));
        let begun = runtime.block_on(polled(1, &mut remembering));
        if begun.is_none() {
            block_on(remembering).unwrap();
        }
        assert_eq!(server.command(&["GET", &format!("p:{message}")]), "2");
    }
    assert_eq!(proxy.connections(), 2);
}

#[test]
fn a_command_whose_runtime_ended_is_an_error() {
    let Some(()) = servers() else { return };
    let (server, outside, inside) = (OwnRedis::start(&[]), runtime(), runtime());
    let proxy = outside.block_on(Proxy::start(server.addr()));
    let store = inside.block_on(RedisStore::connect(&url(proxy.addr()), "p:"));
    let store = store.unwrap();
    proxy.hold_replies();
    let mut remembering = store.remember(&id("m"));
    assert!(inside.block_on(polled(1, &mut remembering)).is_none());
    drop(inside);
    let error = block_on(remembering).unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    proxy.release();
    assert!(outside.block_on(store.remember(&id("m"))).is_ok());
}

#[test]
fn a_runtime_that_nobody_drives_any_more_holds_up_nobody_for_long() {
    let Some(()) = servers() else { return };
    let live = tokio::runtime::Runtime::new().unwrap();
    let idle = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let server = OwnRedis::start(&[]);
    let limit = Duration::from_millis(100);
    let (proxy, store) = live.block_on(async {
        let proxy = Proxy::start(server.addr()).await;
        let builder = RedisStore::builder("p:");
        let builder = builder.response_timeout(limit).connection_timeout(limit);
        let store = builder.connect(&url(proxy.addr())).await.unwrap();
        // Whoever connects now waits for the server's first words.
        proxy.swallow_replies(true);
        proxy.cut();
        (proxy, store)
    });
    idle.block_on(async {
        let connected = proxy.connections();
        let mut call = pin!(store.seen(&id("m")));
        let begun = poll_fn(|cx| {
            let _ = call.as_mut().poll(cx);
            Poll::Ready(())
        });
        begun.await;
        let start = Instant::now();
        while proxy.connections() == connected && start.elapsed() < PATIENCE {
            let _ = tokio::time::timeout(Duration::from_millis(5), call.as_mut()).await;
        }
    });
    live.block_on(async {
        proxy.swallow_replies(false);
        let heals = async {
            while store.seen(&id("m")).await.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, heals)
            .await
            .expect("it heals");
    });
    drop(idle);
}
