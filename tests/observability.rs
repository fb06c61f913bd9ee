//! What the features `tracing` and `metrics` say of each event.

mod support;

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use std::{
    collections::BTreeMap,
    fmt,
    future::Future,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{self, Waker},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use support::{
    Do, FaultStore, Handler, Queue,
    What::{Fail, Hang},
    When::Before,
    deliver, envelope, layer, now,
};
use tower::{Layer, Service, util::BoxCloneSyncService};
use tower_idempotency::{
    BoxError, ClaimStore, DeadLetterLayer, Envelope, ExtractId, IdempotencyLayer, Lease,
    MemoryStore, MessageId, OnStoreError, Owner, Store, TraceLayer,
    envelope::Headers,
    error::Operation::{Remember, Seen},
};
use tracing::{
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};
use tracing_subscriber::layer::{Context, SubscriberExt};

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
                .poll(&mut task::Context::from_waker(Waker::noop()))
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
        .filter(|(key, ..)| key.key().name() != "tower_idempotency_duplicate_age_seconds")
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

/// The ages in the histogram, in seconds.
fn ages(work: impl FnOnce()) -> Vec<f64> {
    let recorder = DebuggingRecorder::new();
    metrics::with_local_recorder(&recorder, work);
    let metrics = recorder.snapshotter().snapshot().into_vec();
    let ages = metrics.into_iter().filter_map(|(key, _, _, value)| {
        let of_ages = key.key().name() == "tower_idempotency_duplicate_age_seconds";
        match value {
            DebugValue::Histogram(ages) if of_ages => Some(ages),
            _ => None,
        }
    });
    ages.flatten().map(|age| age.0).collect()
}

/// A message that was made so many seconds ago.
fn aged(id: &str, seconds: i64) -> Envelope {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let created_at = now.as_millis() as i64 - 1000 * seconds;
    let body = format!(
        r#"{{"job":"urn:x","data":{{}},"meta":{{"id":"{id}","created_at":{created_at}}}}}"#
    );
    Envelope::decode(body.as_bytes()).unwrap()
}

#[test]
fn the_age_of_a_duplicate_is_measured_in_both_modes() {
    let _alone = alone();
    let check = |mut service: BoxCloneSyncService<Envelope, (), BoxError>| {
        let ages = ages(|| {
            for seconds in [0, 90, 86_400, -3600] {
                now(deliver(&mut service, aged("a", seconds))).unwrap();
            }
            // A message that ran is none, nor has this duplicate an age.
            now(deliver(&mut service, aged("b", 5))).unwrap();
            let undated = br#"{"job":"urn:x","data":{},"meta":{"id":"a"}}"#;
            now(deliver(&mut service, Envelope::decode(undated).unwrap())).unwrap();
        });
        let [minutes, day, future] = ages[..] else {
            panic!("{ages:?}");
        };
        assert!((90.0..100.0).contains(&minutes), "{minutes}");
        assert!((86_400.0..86_410.0).contains(&day), "{day}");
        // Its producer's clock is an hour ahead.
        assert_eq!(future, 0.0);
    };
    let layer = IdempotencyLayer::new(MemoryStore::new());
    check(BoxCloneSyncService::new(layer.layer(Handler::default())));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let lease = Lease::new(Duration::from_secs(30)).unwrap();
    let layer = IdempotencyLayer::new(MemoryStore::new()).claim(lease);
    check(BoxCloneSyncService::new(layer.layer(Handler::default())));
}

#[test]
fn requests_of_ones_own_say_themselves_when_they_were_made() {
    #[derive(Clone)]
    struct Key;

    impl ExtractId<i64> for Key {
        fn extract_id(&self, _: &i64) -> Option<MessageId> {
            Some("a".into())
        }

        fn created_at(&self, request: &i64) -> Option<i64> {
            Some(*request)
        }
    }

    let _alone = alone();
    let mut service = IdempotencyLayer::new(MemoryStore::new())
        .id_from(Key)
        .layer(tower::service_fn(|_: i64| async { Ok::<_, BoxError>(()) }));
    let ages = ages(|| {
        for created_at in [0, 0, -1, i64::MIN] {
            now(deliver(&mut service, created_at)).unwrap();
        }
    });
    // Before 1970 there is no age.
    assert_eq!(ages.len(), 1);
    assert!(ages[0] > 50.0 * 365.0 * 86_400.0);
}

// ===== spans =====

type Fields = BTreeMap<String, String>;

/// Keeps what the spans record; of a field the last value.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<Fields>>>);

struct Visitor<'a>(&'a mut Fields);

impl Visit for Visitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Spans {
    fn on_new_span(&self, span: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let mut fields = Fields::from([("span".to_owned(), span.metadata().name().to_owned())]);
        span.record(&mut Visitor(&mut fields));
        self.0.lock().unwrap().push(fields);
    }

    fn on_record(&self, _: &Id, record: &Record<'_>, _: Context<'_, S>) {
        record.record(&mut Visitor(self.0.lock().unwrap().last_mut().unwrap()));
    }
}

fn spans(work: impl FnOnce()) -> Vec<Fields> {
    let spans = Spans::default();
    let subscriber = tracing_subscriber::registry().with(spans.clone());
    tracing::subscriber::with_default(subscriber, work);
    let spans = spans.0.lock().unwrap();
    spans.clone()
}

fn decisions(spans: &[Fields]) -> Vec<Option<&str>> {
    let decision = |span: &Fields| span.get("messaging.babelqueue.decision").cloned();
    let known = spans.iter().map(decision);
    let names = [
        "ran",
        "duplicate",
        "parked",
        "store_error",
        "failed_open",
        "no_id",
        "mark_failed",
        "dead_lettered",
    ];
    let name = |told: Option<String>| {
        told.map(|told| {
            *names
                .iter()
                .find(|name| **name == told)
                .expect("a decision")
        })
    };
    known.map(name).collect()
}

#[test]
fn each_message_has_a_span_with_the_fields_of_the_sdks() {
    let _alone = alone();
    let body = r#"{"job":"urn:shop:payment","trace_id":"t-1","data":{},"meta":{"id":"a\n","queue":"payments"},"attempts":2}"#;
    let message = Envelope::decode(body.as_bytes()).unwrap();
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let mut service = TraceLayer::new().layer(layer.layer(Handler::default()));
    let spans = spans(|| {
        now(deliver(&mut service, message.clone())).unwrap();
        now(deliver(&mut service, message.clone())).unwrap();
    });
    let expected = [
        ("span", "process"),
        ("otel.name", "process urn:shop:payment"),
        ("otel.kind", "consumer"),
        ("messaging.system", "babelqueue"),
        ("messaging.operation", "process"),
        ("messaging.destination.name", "payments"),
        ("messaging.message.id", "a\n"),
        ("messaging.message.conversation_id", "t-1"),
        ("messaging.babelqueue.attempts", "2"),
        ("messaging.babelqueue.decision", "ran"),
    ];
    assert_eq!(spans.len(), 2);
    assert_eq!(
        spans[0],
        expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into()
    );
    assert_eq!(spans[1]["messaging.babelqueue.decision"], "duplicate");
}

#[test]
fn what_a_message_does_not_have_is_not_recorded_and_the_queue_is_the_received_one() {
    let _alone = alone();
    let message = Envelope::decode(br#"{"job":"urn:x","data":{}}"#).unwrap();
    let message = message.with_headers(Headers::new().with_queue("inbox"));
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let mut service = TraceLayer::new()
        .system("redis")
        .layer(layer.layer(Handler::default()));
    let spans = spans(|| now(deliver(&mut service, message)).unwrap());
    assert_eq!(spans[0]["messaging.system"], "redis");
    assert_eq!(spans[0]["messaging.destination.name"], "inbox");
    assert_eq!(spans[0]["messaging.babelqueue.decision"], "no_id");
    assert!(!spans[0].contains_key("messaging.message.id"));
    assert!(!spans[0].contains_key("messaging.message.conversation_id"));
}

#[test]
fn each_decision_is_recorded_in_the_span_of_its_message() {
    let _alone = alone();
    let store = FaultStore::new([(Seen, Before, Fail), (Remember, Before, Fail)]);
    let (layer, _) = layer(store);
    let layer = layer.mark_retries(0);
    let queue = Queue::default();
    let handler = Handler::new([Do::Succeed, Do::Fail]);
    let mut service = tower::ServiceBuilder::new()
        .layer(TraceLayer::new())
        .layer(DeadLetterLayer::new(queue))
        .layer(layer)
        .service(handler);
    let spans = spans(|| {
        now(deliver(&mut service, envelope("a"))).unwrap_err();
        now(deliver(&mut service, envelope("a"))).unwrap();
        now(deliver(&mut service, envelope("b"))).unwrap();
        now(deliver(&mut service, envelope("c"))).unwrap();
    });
    let told = decisions(&spans);
    let expected = ["store_error", "mark_failed", "dead_lettered", "ran"];
    assert_eq!(told, expected.map(Some));
    assert_eq!(spans[0]["otel.status_code"], "ERROR");
    assert!(
        spans[0]["error"].contains("connection reset"),
        "{:?}",
        spans[0]
    );
    for span in &spans[1..] {
        assert!(!span.contains_key("error"), "{span:?}");
    }
}

#[test]
fn a_parked_message_is_no_error_and_a_failed_one_has_no_decision() {
    let _alone = alone();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let store = MemoryStore::new();
    let lease = Lease::new(Duration::from_secs(30)).unwrap();
    now(store.claim(&"a".into(), Owner::random(), lease)).unwrap();
    let layer = IdempotencyLayer::new(store).claim(lease);
    let mut service = TraceLayer::new().layer(layer.layer(Handler::new([Do::Fail])));
    let spans = spans(|| {
        now(deliver(&mut service, envelope("a"))).unwrap_err();
        now(deliver(&mut service, envelope("b"))).unwrap_err();
    });
    assert_eq!(decisions(&spans), [Some("parked"), None]);
    assert!(!spans[0].contains_key("otel.status_code"));
    assert_eq!(spans[1]["otel.status_code"], "ERROR");
}

#[test]
fn the_handler_and_its_drop_are_within_the_span_and_it_may_be_changed_before() {
    let _alone = alone();
    let seen = Arc::new(Mutex::new(Vec::new()));
    struct Told(Arc<Mutex<Vec<&'static str>>>, &'static str);
    impl Drop for Told {
        fn drop(&mut self) {
            let name = tracing::Span::current()
                .metadata()
                .map_or("none", |it| it.name());
            assert_eq!(name, "process", "{}", self.1);
            self.0.lock().unwrap().push(self.1);
        }
    }
    let told = seen.clone();
    let handler = tower::service_fn(move |message: Envelope| {
        let told = Told(told.clone(), "dropped");
        async move {
            drop(Told(told.0.clone(), "ran"));
            if message.id().is_some_and(|id| *id == "hangs") {
                std::future::pending::<()>().await;
            }
            drop(told);
            Ok::<_, BoxError>(())
        }
    });
    let mut service = TraceLayer::new()
        .on_span(|span, envelope| {
            span.record("error", envelope.headers().get("traceparent").unwrap());
        })
        .layer(handler);
    let headers = Headers::new().with("traceparent", "00-1-2-01");
    let spans = spans(|| {
        now(deliver(
            &mut service,
            envelope("a").with_headers(headers.clone()),
        ))
        .unwrap();
        let mut call = Box::pin(service.call(envelope("hangs").with_headers(headers)));
        let pending = call
            .as_mut()
            .poll(&mut task::Context::from_waker(Waker::noop()));
        assert!(pending.is_pending());
        drop(call);
    });
    assert_eq!(*seen.lock().unwrap(), ["ran", "dropped", "ran", "dropped"]);
    assert_eq!(spans[0]["error"], "00-1-2-01");
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
