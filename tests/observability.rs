//! What the features `tracing` and `metrics` say of each event.

mod support;

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use std::{
    collections::BTreeMap,
    future::Future,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Waker},
    time::Duration,
};
use support::{
    FaultStore, Handler,
    What::{Fail, Hang},
    When::Before,
    deliver, envelope, layer, now,
};
use tower::{Layer, Service};
use tower_idempotency::{
    Envelope, IdempotencyLayer, MemoryStore, OnStoreError, Store,
    error::Operation::{Remember, Seen},
};

/// One test at a time: `tracing` keeps for all threads what the subscriber of one of them wants.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());

    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes each event happen, each another number of times; answers what the hooks were told.
fn everything_happens() -> Vec<String> {
    let mut told = Vec::new();
    let mut with = |store: FaultStore, ids: &[&str]| {
        let (layer, events) = layer(store);
        let mut service = layer
            .mark_retries(0)
            .store_timeout(None)
            .layer(Handler::default());
        for id in ids {
            let _ = now(deliver(&mut service, envelope(id)));
        }
        told.extend(events.all());
    };
    with(FaultStore::new([]), &["a", "b", "b", "b"]);
    with(FaultStore::new([(Seen, Before, Fail); 3]), &["a", "b", "c"]);
    with(
        FaultStore::new([(Remember, Before, Fail); 4]),
        &["a", "b", "c", "d"],
    );
    with(FaultStore::new([]), &[""; 5]);

    let (open, events) = layer(FaultStore::new([(Seen, Before, Fail)]));
    let mut open = open
        .on_store_error(OnStoreError::FailOpen)
        .layer(Handler::default());
    now(deliver(&mut open, envelope("nasty\u{1b}[31m\n"))).unwrap();
    told.extend(events.all());

    for _ in 0..6 {
        let (layer, events) = layer(FaultStore::new([(Remember, Before, Hang)]));
        let mut call = Box::pin(layer.layer(Handler::default()).call(envelope("a")));
        assert!(
            call.as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_pending()
        );
        drop(call);
        told.extend(events.all());
    }

    let full = MemoryStore::builder()
        .ttl(Duration::from_secs(1))
        .capacity(28)
        .build()
        .unwrap();
    for id in 0..29 {
        now(full.remember(&id.to_string().into())).unwrap();
    }
    told
}

#[test]
fn metrics_count_what_the_hooks_are_told() {
    let _alone = alone();
    let recorder = DebuggingRecorder::new();
    let told = metrics::with_local_recorder(&recorder, everything_happens);
    let counted: BTreeMap<String, u64> = recorder
        .snapshotter()
        .snapshot()
        .into_vec()
        .into_iter()
        .map(|(key, _, _, value)| {
            let key = key.key();
            assert_eq!(key.name(), "tower_idempotency_events_total");
            let label = key.labels().next().unwrap();
            assert_eq!(label.key(), "event");
            let DebugValue::Counter(value) = value else {
                panic!("not a counter")
            };
            (label.value().to_owned(), value)
        })
        .collect();
    let expected = [
        ("abandoned", 6),
        ("duplicate", 2),
        ("evicted", 7),
        ("failed_open", 1),
        ("mark_failed", 4),
        ("no_id", 5),
        ("ran", 3),
        ("store_error", 3),
    ];
    assert_eq!(
        counted,
        expected
            .map(|(name, count)| (name.to_owned(), count))
            .into()
    );
    for (name, count) in expected {
        let hooks = told
            .iter()
            .filter(|told| told.split(' ').next() == Some(name))
            .count();
        assert!(hooks as u64 == count || name == "evicted", "{name}");
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn log(level: tracing::Level, work: impl FnOnce()) -> Vec<String> {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(false)
        .without_time()
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, work);
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    text.lines().map(|line| line.trim().to_owned()).collect()
}

#[test]
fn the_log_has_the_usual_at_debug_and_the_rest_as_warnings() {
    let _alone = alone();
    let lines = log(tracing::Level::DEBUG, || drop(everything_happens()));
    let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
    assert_eq!(count("DEBUG"), 3 + 2);
    assert_eq!(count("WARN"), 6 + 6 + 4 + 3 + 1);
    assert_eq!(
        lines.len(),
        count("DEBUG") + count("WARN"),
        "one line to an event"
    );
    assert_eq!(count("tower_idempotency"), lines.len());
    assert_eq!(count(r#"id="b""#), 1 + 2 + 1 + 1);
    assert_eq!(count("connection reset"), 3 + 4 + 1);
    assert_eq!(count("count=7"), 1);
    // What a producer wrote cannot break the log.
    assert_eq!(count(r#"nasty\u{1b}[31m\n"#), 2);
}

#[test]
fn a_subscriber_that_panics_changes_no_outcome() {
    let _alone = alone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_writer(|| -> io::Empty { panic!("as told") })
        .finish();
    let told = tracing::subscriber::with_default(subscriber, everything_happens);
    assert!(told.is_empty(), "the hooks come after it");
}

#[test]
fn what_decode_mended_is_a_warning() {
    let _alone = alone();
    let body = br#"{"job":"urn:x","urn":"urn:y","timestamp":1,"meta":{"ts":1,"ts":2}}"#;
    let lines = log(tracing::Level::WARN, || {
        drop(Envelope::decode(body).unwrap())
    });
    assert_eq!(lines.len(), 3);
    for pointer in ["/urn", "/timestamp", "/meta/ts"] {
        assert_eq!(
            lines.iter().filter(|line| line.contains(pointer)).count(),
            1,
            "{pointer}"
        );
    }
}

#[test]
fn without_a_subscriber_or_recorder_nothing_happens() {
    let _alone = alone();
    let mut service = IdempotencyLayer::new(MemoryStore::new()).layer(Handler::default());
    now(deliver(&mut service, envelope("a"))).unwrap();
}
