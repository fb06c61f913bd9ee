//! The contract of the layer: what runs, what is skipped, what is remembered.

mod support;

use std::{
    convert::Infallible,
    future::ready,
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use support::{Broken, Declined, Do, Events, FaultStore, Handler, deliver, envelope, layer, now};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_idempotency::{
    Ack, BoxError, Envelope, Idempotency, IdempotencyLayer, MemoryStore, MessageId, Outcome, Store,
    envelope::Headers, event::Event,
};

/// Delivers ids to a handler with a script; answers which deliveries ran it.
fn ran(script: &[Do], ids: &[&str]) -> Vec<bool> {
    let handler = Handler::new(script.iter().copied());
    let mut service = IdempotencyLayer::new(MemoryStore::new()).layer(handler.clone());
    ids.iter()
        .map(|id| {
            let before = handler.runs();
            let _ = catch_unwind(AssertUnwindSafe(|| {
                now(deliver(&mut service, envelope(id)))
            }));
            handler.runs() > before
        })
        .collect()
}

#[test]
fn a_message_has_its_effect_once() {
    use Do::{Fail, Panic, Succeed};

    assert_eq!(ran(&[], &["a", "a"]), [true, false]);
    assert_eq!(
        ran(&[], &["a", "a", "a", "a", "a"]),
        [true, false, false, false, false]
    );
    assert_eq!(
        ran(&[], &["a", "b", "a", "c", "b"]),
        [true, true, false, true, false]
    );
    // A failure leaves nothing behind, however it fails.
    assert_eq!(ran(&[Fail, Succeed], &["a", "a", "a"]), [true, true, false]);
    assert_eq!(
        ran(&[Fail, Fail, Fail], &["a", "a", "a", "a", "a"]),
        [true, true, true, true, false]
    );
    assert_eq!(
        ran(&[Panic, Fail, Panic], &["a", "a", "a", "a", "a"]),
        [true, true, true, true, false]
    );
    // Other messages are not touched by it.
    assert_eq!(
        ran(&[Panic], &["a", "b", "b", "a", "a"]),
        [true, true, false, true, false]
    );
    // Without an id nothing can be told apart.
    assert_eq!(ran(&[], &["", "", ""]), [true, true, true]);
    // A blank is an id like any other.
    assert_eq!(ran(&[], &[" ", " ", "  "]), [true, false, true]);
}

#[test]
fn ids_are_compared_by_their_bytes() {
    let long = "x".repeat(65_536);
    let longer = format!("{}y", &long[1..]);
    let hex = "f1e2d3c4-b5a6-4789-90ab-cdef01234567";
    let ids = [
        "AbC",
        "abc",
        "ABC",
        "a",
        "a ",
        "a\t",
        "a\u{a0}",
        " a",
        "a\0b",
        "a\0",
        "\r\n",
        "\u{e9}",
        "e\u{301}",
        "ß",
        "ss",
        "i",
        "ı",
        "\u{ff41}",
        "urn:x:1",
        "a b",
        "*",
        ">",
        "a..b",
        "🦀",
        "sha256:00",
        hex,
        &hex.to_uppercase(),
        &hex.replace('-', ""),
        &hex[..35],
        &format!("{hex} "),
        &long[..255],
        &long[..256],
        &long[..1024],
        &long,
        &longer,
    ];
    let ran = ran(&[], &[ids, ids].concat());
    for (at, id) in ids.iter().enumerate() {
        assert!(ran[at], "{id:.20?} was taken for another id");
        assert!(!ran[at + ids.len()], "{id:.20?} was not known again");
    }
}

#[test]
fn only_the_id_makes_a_message_the_same() {
    let handler = Handler::default();
    let mut service = Idempotency::new(handler.clone(), MemoryStore::new());
    let one = envelope("one").with_trace_id("t").with_attempts(0);
    let other = envelope("other").with_trace_id("t").with_attempts(0);
    now(deliver(&mut service, one.clone())).unwrap();
    now(deliver(&mut service, other)).unwrap();
    assert_eq!(handler.runs(), 2);
    // Attempts, trace, headers and data of a copy may differ.
    let copy = Envelope::new("urn:test:other", &serde_json::json!({"cents": 1}))
        .unwrap()
        .with_id("one")
        .with_attempts(7)
        .with_headers(Headers::new().with("x", "y"));
    now(deliver(&mut service, copy)).unwrap();
    assert_eq!(handler.runs(), 2);
}

#[test]
fn a_message_without_an_id_runs_each_time_and_is_reported() {
    for meta in [r#"{}"#, r#"{"id":null}"#, r#"{"id":""}"#] {
        let body = format!(r#"{{"job":"urn:x","data":{{}},"meta":{meta}}}"#);
        let message = Envelope::decode(body.as_bytes()).unwrap();
        let handler = Handler::new([Do::Succeed, Do::Fail]);
        let (layer, events) = layer(MemoryStore::new());
        let mut service = layer.layer(handler.clone());
        now(deliver(&mut service, message.clone())).unwrap();
        let error = now(deliver(&mut service, message.clone())).unwrap_err();
        assert!(error.is::<Declined>());
        now(deliver(&mut service, message)).unwrap();
        assert_eq!(handler.runs(), 3);
        assert_eq!(events.all(), ["no_id -"; 3]);
    }
}

#[test]
fn an_extractor_that_answers_an_empty_id_has_none() {
    let handler = Handler::default();
    let (layer, events) = layer(MemoryStore::new());
    let mut service = layer.id_from(|_: &u32| Some("")).layer(handler.clone());
    now(deliver(&mut service, 1)).unwrap();
    now(deliver(&mut service, 1)).unwrap();
    assert_eq!(handler.runs(), 2);
    assert_eq!(events.all(), ["no_id -"; 2]);
}

#[test]
fn the_error_of_the_handler_goes_on_untouched() {
    let mut service = Idempotency::new(Handler::new([Do::Fail]), MemoryStore::new());
    let error = now(deliver(&mut service, envelope("a"))).unwrap_err();
    assert!(error.is::<Declined>());
}

#[test]
fn an_ok_that_is_not_done_stays_unmarked() {
    let store = MemoryStore::new();
    let answers = Arc::new(std::sync::Mutex::new(vec![Some(1), Some(2), None, Some(3)]));
    let mut service = IdempotencyLayer::new(store.clone())
        .done_if(|answer: &Option<i32>| *answer == Some(3))
        .layer(service_fn(move |_: Envelope| {
            ready(Ok::<_, BoxError>(answers.lock().unwrap().remove(0)))
        }));
    let mut answers = || now(deliver(&mut service, envelope("a"))).unwrap();
    assert_eq!(answers(), Some(1));
    assert_eq!(answers(), Some(2));
    assert!(store.is_empty());
    assert_eq!(answers(), None);
    assert_eq!(answers(), Some(3));
    assert_eq!(store.len(), 1);
    // From here on a duplicate.
    assert_eq!(answers(), None);
}

#[test]
fn outcome_tells_a_run_from_a_duplicate() {
    let mut service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(MemoryStore::new()).outcome())
        .service(service_fn(|_: Envelope| ready(Ok::<_, Infallible>(7))));
    assert_eq!(
        now(deliver(&mut service, envelope("a"))).unwrap(),
        Outcome::Ran(7)
    );
    assert_eq!(
        now(deliver(&mut service, envelope("a"))).unwrap(),
        Outcome::Duplicate
    );
}

#[test]
fn any_request_type_is_served() {
    // Neither Send nor 'static, and the closure neither: nothing here needs it.
    #[derive(Clone)]
    struct Job<'a> {
        key: &'a str,
        _not_send: Rc<()>,
    }

    let runs = std::cell::Cell::new(0);
    let prefix = String::from("billing:");
    let mut service = IdempotencyLayer::new(MemoryStore::new())
        .id_from(|job: &Job<'_>| Some(format!("{prefix}{}", job.key)))
        .layer(service_fn(|_: Job<'_>| {
            runs.set(runs.get() + 1);
            ready(Ok::<_, Infallible>(()))
        }));
    let text = String::from("a");
    let job = Job {
        key: &text,
        _not_send: Rc::new(()),
    };
    now(deliver(&mut service, job.clone())).unwrap();
    now(deliver(&mut service, job)).unwrap();
    assert_eq!(runs.get(), 1);
}

#[test]
fn forget_makes_the_next_delivery_run() {
    let store = MemoryStore::new();
    let handler = Handler::default();
    let mut service = Idempotency::new(handler.clone(), store.clone());
    for _ in 0..3 {
        now(deliver(&mut service, envelope("a"))).unwrap();
        now(deliver(&mut service, envelope("a"))).unwrap();
        now(store.forget(&"a".into())).unwrap();
        now(store.forget(&"never seen".into())).unwrap();
    }
    assert_eq!(handler.runs(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_handler_under_way_marks_done_after_a_forget() {
    let store = MemoryStore::new();
    let handler = Handler::new([Do::Sleep(Duration::from_secs(1))]);
    let mut service = Idempotency::new(handler.clone(), store.clone());
    let running = tokio::spawn(service.ready().await.unwrap().call(envelope("a")));
    tokio::task::yield_now().await;
    store.forget(&"a".into()).await.unwrap();
    running.await.unwrap().unwrap();
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 1);
}

#[test]
fn the_replay_header_changes_nothing() {
    let handler = Handler::default();
    let mut service = Idempotency::new(handler.clone(), MemoryStore::new());
    now(deliver(&mut service, envelope("a"))).unwrap();
    let replay = envelope("a").with_replay_bypass();
    assert!(replay.is_replay());
    now(deliver(&mut service, replay)).unwrap();
    assert_eq!(handler.runs(), 1);
}

#[test]
fn the_ttl_counts_from_success_and_no_duplicate_renews_it() {
    let clock = Arc::new(AtomicU64::new(0));
    let store = MemoryStore::builder()
        .ttl(Duration::from_secs(16))
        .clock({
            let clock = clock.clone();
            move || Duration::from_secs(clock.load(Ordering::Relaxed))
        })
        .build()
        .unwrap();
    let handler = Handler::new([Do::Fail]);
    let mut service = Idempotency::new(handler.clone(), store);
    let mut at = |second| {
        clock.store(second, Ordering::Relaxed);
        let before = handler.runs();
        let _ = now(deliver(&mut service, envelope("a")));
        handler.runs() > before
    };
    assert!(at(0), "fails");
    assert!(at(10), "succeeds");
    for second in 11..=25 {
        assert!(!at(second), "a duplicate in second {second}");
    }
    assert!(at(30), "10 + 16 * 1.25 is over");
}

#[test]
fn a_copy_that_waited_its_turn_sees_the_mark() {
    // Both are called before either is polled: the store is asked at the first poll.
    let handler = Handler::default();
    let mut service = Idempotency::new(handler.clone(), MemoryStore::new());
    let first = now(service.ready()).unwrap().call(envelope("a"));
    let second = now(service.ready()).unwrap().call(envelope("a"));
    now(first).unwrap();
    now(second).unwrap();
    assert_eq!(handler.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn two_copies_at_once_both_run_and_both_are_done() {
    // What the seen-set does not prevent: documented, and so asserted.
    let store = MemoryStore::new();
    let handler = Handler::new([Do::Sleep(Duration::from_secs(1)); 2]);
    let service = Idempotency::new(handler.clone(), store.clone());
    let copy =
        |mut service: Idempotency<_, _>| async move { deliver(&mut service, envelope("a")).await };
    let (one, other) = tokio::join!(copy(service.clone()), copy(service.clone()));
    one.unwrap();
    other.unwrap();
    assert_eq!(handler.runs(), 2);
    copy(service).await.unwrap();
    assert_eq!((handler.runs(), store.len()), (2, 1));
}

#[test]
fn two_layers_stacked_by_mistake_lose_nothing() {
    let store = MemoryStore::new();
    let handler = Handler::new([Do::Fail, Do::Succeed]);
    let mut service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(store.clone()))
        .layer(IdempotencyLayer::new(store.clone()))
        .service(handler.clone());
    now(deliver(&mut service, envelope("a"))).unwrap_err();
    assert!(store.is_empty());
    now(deliver(&mut service, envelope("a"))).unwrap();
    now(deliver(&mut service, envelope("a"))).unwrap();
    assert_eq!((handler.runs(), store.len()), (2, 1));
}

#[test]
fn each_delivery_is_told_once_and_after_the_record() {
    let store = MemoryStore::new();
    let events = Events::default();
    let hook = events.hook();
    let written = Arc::new(AtomicU64::new(0));
    let (in_hook, counted) = (store.clone(), written.clone());
    let mut service = IdempotencyLayer::new(store)
        .on_event(move |event| {
            hook(event);
            if let Event::Ran { id, .. } = event {
                counted.fetch_add(u64::from(now(in_hook.seen(id)).unwrap()), Ordering::Relaxed);
            }
        })
        .layer(Handler::new([Do::Fail]));
    for _ in 0..11 {
        let _ = now(deliver(&mut service, envelope("a")));
    }
    let mut expected = vec!["ran a"];
    expected.resize(10, "duplicate a");
    assert_eq!(events.all(), expected);
    assert_eq!(
        written.load(Ordering::Relaxed),
        1,
        "told before it was written"
    );
}

#[test]
fn a_panic_in_the_hook_changes_no_outcome() {
    let handler = Handler::default();
    let mut service = IdempotencyLayer::new(MemoryStore::new())
        .on_event(|event| panic!("the hook panics at {}", event.name()))
        .layer(handler.clone());
    now(deliver(&mut service, envelope("a"))).unwrap();
    now(deliver(&mut service, envelope("a"))).unwrap();
    now(deliver(&mut service, envelope(""))).unwrap();
    assert_eq!(handler.runs(), 2);
}

#[test]
fn what_a_hook_throws_changes_no_outcome_either() {
    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    let mut service = IdempotencyLayer::new(MemoryStore::new())
        .on_event(|_| std::panic::panic_any(Bomb))
        .layer(Handler::default());
    now(deliver(&mut service, envelope("a"))).unwrap();
}

#[test]
fn a_setting_changed_on_a_clone_is_the_clones_own() {
    let store = MemoryStore::new();
    let (layer, events) = layer(store.clone());
    let others = Events::default();
    let other = layer
        .clone()
        .on_event(others.hook())
        .id_from(|message: &Envelope| Some(MessageId::from(message.trace_id()?)));
    let handler = Handler::default();
    let message = envelope("a").with_trace_id("t");
    now(deliver(&mut layer.layer(handler.clone()), message.clone())).unwrap();
    now(deliver(&mut other.layer(handler.clone()), message)).unwrap();
    assert_eq!(events.all(), ["ran a"]);
    assert_eq!(others.all(), ["ran t"]);
    assert_eq!((handler.runs(), store.len()), (2, 2));
}

#[test]
fn one_layer_makes_services_that_share_the_record() {
    let handler = Handler::default();
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let (mut one, mut other) = (layer.layer(handler.clone()), layer.layer(handler.clone()));
    now(deliver(&mut one, envelope("a"))).unwrap();
    now(deliver(&mut other, envelope("a"))).unwrap();
    now(deliver(&mut other.clone(), envelope("a"))).unwrap();
    assert_eq!(handler.runs(), 1);
    assert_eq!(one.get_ref().runs(), 1);
    assert_eq!(one.get_mut().runs(), 1);
    assert_eq!(one.into_inner().runs(), 1);
}

#[test]
fn consumers_that_share_a_record_skip_each_others_work() {
    // Why one record serves one consumer: mail acks a message that it never handled.
    let (billing, mail) = (Handler::default(), Handler::default());
    let layer = IdempotencyLayer::new(MemoryStore::new());
    now(deliver(&mut layer.layer(billing.clone()), envelope("a"))).unwrap();
    now(deliver(&mut layer.layer(mail.clone()), envelope("a"))).unwrap();
    assert_eq!((billing.runs(), mail.runs()), (1, 0));

    // Ids of their own are a way out.
    let store = MemoryStore::new();
    let own = |consumer: &'static str| {
        IdempotencyLayer::new(store.clone())
            .id_from(move |message: &Envelope| Some(format!("{consumer}:{}", message.id()?)))
    };
    for _ in 0..2 {
        now(deliver(
            &mut own("billing").layer(billing.clone()),
            envelope("b"),
        ))
        .unwrap();
        now(deliver(&mut own("mail").layer(mail.clone()), envelope("b"))).unwrap();
    }
    assert_eq!((billing.runs(), mail.runs()), (2, 1));
    // Made of an empty id, one would be the same for every message that has none.
    for _ in 0..2 {
        now(deliver(&mut own("mail").layer(mail.clone()), envelope(""))).unwrap();
    }
    assert_eq!(mail.runs(), 3);
}

#[test]
fn consumers_with_records_of_their_own_each_run_a_message() {
    let (billing, mail) = (Handler::default(), Handler::default());
    let mut to_billing = Idempotency::new(billing.clone(), MemoryStore::new());
    let mut to_mail = Idempotency::new(mail.clone(), MemoryStore::new());
    for _ in 0..2 {
        now(deliver(&mut to_billing, envelope("a"))).unwrap();
        now(deliver(&mut to_mail, envelope("a"))).unwrap();
    }
    assert_eq!((billing.runs(), mail.runs()), (1, 1));
}

#[test]
fn a_custom_response_says_itself_what_acks_it() {
    #[derive(Debug, PartialEq)]
    struct Settled(&'static str);

    impl Ack for Settled {
        fn ack() -> Self {
            Settled("as before")
        }
    }

    let mut service = Idempotency::new(
        service_fn(|_: Envelope| ready(Ok::<_, Infallible>(Settled("now")))),
        MemoryStore::new(),
    );
    assert_eq!(
        now(deliver(&mut service, envelope("a"))).unwrap(),
        Settled("now")
    );
    assert_eq!(
        now(deliver(&mut service, envelope("a"))).unwrap(),
        Settled("as before")
    );
}

#[test]
#[should_panic(expected = "polled after completion")]
fn a_future_that_is_done_is_not_polled_again() {
    let mut service = Idempotency::new(Handler::default(), MemoryStore::new());
    let mut future = std::pin::pin!(service.call(envelope("a")));
    now(future.as_mut()).unwrap();
    let _ = now(future);
}

#[test]
fn readiness_is_the_inner_services() {
    let mut service = Idempotency::new(Broken, MemoryStore::new());
    let error = now(service.ready()).map(drop).unwrap_err();
    assert!(error.is::<Declined>());
}

#[test]
fn types_are_what_users_need_them_to_be() {
    fn all<T: Clone + Send + Sync + 'static>() {}
    fn send<T: Send>(_: &T) {}
    fn debug<T: std::fmt::Debug>(_: &T) {}

    type Extract = fn(&Envelope) -> Option<String>;

    all::<IdempotencyLayer<MemoryStore>>();
    all::<IdempotencyLayer<FaultStore, Extract, fn(&()) -> bool>>();
    all::<Idempotency<Handler, MemoryStore>>();
    all::<MemoryStore>();
    all::<Envelope>();
    all::<MessageId>();
    let mut service = Idempotency::new(Handler::default(), MemoryStore::new());
    debug(&IdempotencyLayer::new(MemoryStore::new()));
    // Neither the store nor the closures have a Debug of their own.
    let layer = IdempotencyLayer::new(FaultStore::new([]))
        .id_from(|_: &Envelope| Some("a"))
        .done_if(|(): &()| true);
    debug(&layer.layer(()));
    let future = service.call(envelope("a"));
    send(&future);
    debug(&future);
    let mut slow = Idempotency::new(Handler::default(), FaultStore::new([]));
    send(&slow.call(envelope("a")));
}
