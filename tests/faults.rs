//! Stores that fail, hang and answer late; calls that are dropped at each point.

mod support;

use std::{
    convert::Infallible,
    future::{Future, poll_fn, ready},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::mpsc,
    task::{Context, Poll, Waker},
    time::Duration,
};
use support::{
    BoxFuture, Do, Events, FaultStore, Handler,
    What::{self, Fail, Hang, Wait},
    When::{After, Before},
    deliver, envelope, layer, now,
};
use tokio::{
    runtime::{Builder, Runtime},
    time::Instant,
};
use tower::{Layer, Service, ServiceExt};
use tower_idempotency::{
    IdempotencyLayer, MessageId, OnMarkError, OnStoreError, Store, StoreError,
    error::{
        Operation::{self, Remember, Seen},
        TimedOut, is_transient,
    },
};

fn operation(error: &tower_idempotency::BoxError) -> Operation {
    assert!(is_transient(error));
    error
        .downcast_ref::<StoreError>()
        .expect("a store error")
        .operation()
}

const SECOND: Duration = Duration::from_secs(1);

// ===== the question =====

#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_say_runs_nothing() {
    for fault in [(Seen, Before, Fail), (Seen, After, Fail)] {
        let (handler, store) = (Handler::default(), FaultStore::new([fault]));
        let (layer, events) = layer(store.clone());
        let mut service = layer.layer(handler.clone());
        let error = deliver(&mut service, envelope("a")).await.unwrap_err();
        assert_eq!(operation(&error), Seen);
        assert_eq!(
            error.to_string(),
            "the idempotency store failed at `seen`: connection reset"
        );
        assert_eq!((handler.runs(), store.remembers("a")), (0, false));
        deliver(&mut service, envelope("a")).await.unwrap();
        deliver(&mut service, envelope("a")).await.unwrap();
        assert_eq!(handler.runs(), 1);
        assert_eq!(events.all(), ["store_error a", "ran a", "duplicate a"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_is_given_five_seconds() {
    let (handler, store) = (Handler::default(), FaultStore::new([(Seen, Before, Hang)]));
    let mut service = IdempotencyLayer::new(store).layer(handler.clone());
    let start = Instant::now();
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    assert_eq!(start.elapsed().as_secs(), 5);
    let source = std::error::Error::source(error.downcast_ref::<StoreError>().unwrap()).unwrap();
    assert_eq!(
        source.downcast_ref::<TimedOut>().unwrap().limit(),
        5 * SECOND
    );
    assert_eq!(handler.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_time_limit_is_the_users() {
    let hang = || FaultStore::new([(Seen, Before, Wait(60 * SECOND))]);
    let limited = IdempotencyLayer::new(hang()).store_timeout(SECOND / 4);
    let start = Instant::now();
    deliver(&mut limited.layer(Handler::default()), envelope("a"))
        .await
        .unwrap_err();
    assert_eq!(start.elapsed().as_millis(), 250);
    let patient = IdempotencyLayer::new(hang()).store_timeout(None);
    let start = Instant::now();
    deliver(&mut patient.layer(Handler::default()), envelope("a"))
        .await
        .unwrap();
    assert_eq!(start.elapsed().as_secs(), 60);
    // The longest there is ends no call early and panics nowhere.
    let endless = IdempotencyLayer::new(hang()).store_timeout(Duration::MAX);
    deliver(&mut endless.layer(Handler::default()), envelope("a"))
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_handler_is_not_held_to_the_stores_time_limit() {
    let handler = Handler::new([Do::Sleep(3600 * SECOND)]);
    let mut service = IdempotencyLayer::new(FaultStore::new([])).layer(handler);
    deliver(&mut service, envelope("a")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn failing_open_runs_and_marks() {
    for what in [Fail, Hang] {
        let (handler, store) = (Handler::default(), FaultStore::new([(Seen, Before, what)]));
        let (layer, events) = layer(store.clone());
        let mut service = layer
            .on_store_error(OnStoreError::FailOpen)
            .layer(handler.clone());
        deliver(&mut service, envelope("a")).await.unwrap();
        assert!(store.remembers("a"));
        deliver(&mut service, envelope("a")).await.unwrap();
        assert_eq!(handler.runs(), 1);
        assert_eq!(events.all(), ["failed_open a", "ran a", "duplicate a"]);
    }
}

// ===== the mark =====

#[tokio::test(start_paused = true)]
async fn a_mark_is_sent_again_until_it_is_made() {
    let faults = [
        (Remember, Before, Fail),
        (Remember, After, Fail),
        (Remember, Before, Fail),
    ];
    let (handler, store) = (Handler::default(), FaultStore::new(faults));
    let (layer, events) = layer(store.clone());
    let start = Instant::now();
    let mut service = layer.layer(handler.clone());
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(start.elapsed().as_millis(), 100 + 200 + 400);
    assert_eq!(
        store.calls(),
        [Seen, Remember, Remember, Remember, Remember]
    );
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 1);
    assert_eq!(events.all(), ["ran a", "duplicate a"]);
}

#[tokio::test(start_paused = true)]
async fn a_mark_that_fails_for_good_is_reported_and_the_effect_stands() {
    let (handler, store) = (
        Handler::default(),
        FaultStore::new([(Remember, Before, Fail); 4]),
    );
    let (layer, events) = layer(store.clone());
    let mut service = layer.layer(handler.clone());
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(
        store.calls(),
        [Seen, Remember, Remember, Remember, Remember]
    );
    assert_eq!(events.all(), ["mark_failed a"]);
    assert!(!store.remembers("a"));
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_mark_that_fails_for_good_is_an_error_where_that_is_asked_for() {
    let store = FaultStore::new([(Remember, Before, Fail); 2]);
    let (layer, events) = layer(store.clone());
    let layer = layer.mark_retries(1).on_mark_error(OnMarkError::Fail);
    let mut service = layer.layer(Handler::default());
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    assert_eq!(operation(&error), Remember);
    assert_eq!(store.calls(), [Seen, Remember, Remember]);
    assert_eq!(events.all(), ["mark_failed a"]);
}

#[tokio::test(start_paused = true)]
async fn a_mark_that_hangs_ends() {
    let store = FaultStore::new([(Remember, After, Hang); 4]);
    let (layer, events) = layer(store.clone());
    let start = Instant::now();
    deliver(&mut layer.layer(Handler::default()), envelope("a"))
        .await
        .unwrap();
    assert_eq!(start.elapsed().as_millis(), 4 * 5000 + 100 + 200 + 400);
    assert_eq!(events.all(), ["mark_failed a"]);
    assert!(store.remembers("a"), "unknown is not no");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_marked_for_a_handler_that_failed() {
    let store = FaultStore::new([]);
    let (layer, events) = layer(store.clone());
    let mut service = layer.layer(Handler::new([Do::Fail]));
    deliver(&mut service, envelope("a")).await.unwrap_err();
    assert_eq!(store.calls(), [Seen]);
    assert!(events.all().is_empty());
}

// ===== drops =====

/// Polls a call once, that waits for something.
async fn waits<F: Future>(mut call: Pin<&mut F>) {
    let polled = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
    assert!(polled.is_pending());
}

/// Polls a call this often, then drops it; answers whether it had ended before.
async fn drop_after<F: Future>(polls: usize, call: F) -> bool {
    let mut call = pin!(call);
    for _ in 0..polls {
        let polled = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
        if polled.is_ready() {
            return true;
        }
        tokio::time::sleep(SECOND).await;
    }
    false
}

#[tokio::test(start_paused = true)]
async fn a_call_may_be_dropped_at_each_point() {
    // Each await of the call waits once: the question, the handler, the mark.
    let wait = Wait(SECOND / 2);
    let script = || {
        (
            Handler::new([Do::Sleep(SECOND / 2)]),
            [(Seen, Before, wait), (Remember, Before, wait)],
        )
    };
    let mut ended = false;
    let mut seen_at_drop = Vec::new();
    for polls in 0.. {
        let (handler, faults) = script();
        let store = FaultStore::new(faults);
        let (layer, events) = layer(store.clone());
        let mut service = layer.layer(handler.clone());
        let call = service.ready().await.unwrap().call(envelope("a"));
        ended |= drop_after(polls, call).await;
        seen_at_drop.push((store.calls().len(), handler.runs()));
        layer.drained().await;

        // What was dropped before the handler's Ok left nothing; after it, the mark was made.
        let marked = store.calls().contains(&Remember);
        assert_eq!(store.remembers("a"), marked, "after {polls} polls");
        let told: &[_] = if marked { &["ran a"] } else { &[] };
        assert_eq!(events.all(), told, "after {polls} polls");
        let runs = handler.runs();
        deliver(&mut service, envelope("a")).await.unwrap();
        assert_eq!(
            handler.runs() - runs,
            usize::from(!marked),
            "after {polls} polls"
        );
        if ended {
            break;
        }
    }
    // Unpolled, asking, running, marking, done: each was met.
    assert_eq!(seen_at_drop, [(0, 0), (1, 0), (1, 1), (2, 1), (2, 1)]);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_between_effect_and_mark_leaves_the_mark_to_be_made() {
    let (handler, store) = (
        Handler::default(),
        FaultStore::new([(Remember, Before, Wait(SECOND / 10))]),
    );
    let (layer, _) = layer(store.clone());
    let mut service = layer.layer(handler.clone());
    tokio::time::timeout(SECOND / 20, deliver(&mut service, envelope("a")))
        .await
        .unwrap_err();
    tokio::time::sleep(3 * SECOND / 10).await;
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_left_over_mark_is_retried_and_reported_like_any_other() {
    let faults = [
        (Remember, Before, Hang),
        (Remember, Before, Fail),
        (Remember, After, Fail),
    ];
    let store = FaultStore::new(faults);
    let (layer, events) = layer(store.clone());
    let mut service = layer.layer(Handler::default());
    tokio::time::timeout(SECOND, deliver(&mut service, envelope("a")))
        .await
        .unwrap_err();
    layer.drained().await;
    assert_eq!(
        store.calls(),
        [Seen, Remember, Remember, Remember, Remember]
    );
    assert_eq!(events.all(), ["ran a"]);

    let store = FaultStore::new([(Remember, Before, Hang); 5]);
    let (layer, events) = self::layer(store.clone());
    let mut service = layer.layer(Handler::default());
    tokio::time::timeout(SECOND, deliver(&mut service, envelope("a")))
        .await
        .unwrap_err();
    layer.drained().await;
    assert_eq!(store.calls().len(), 1 + 1 + 4);
    assert_eq!(events.all(), ["mark_failed a"]);
}

#[tokio::test(start_paused = true)]
async fn an_aborted_task_leaves_the_mark_to_be_made() {
    let (handler, store) = (
        Handler::default(),
        FaultStore::new([(Remember, Before, Wait(SECOND))]),
    );
    let (layer, events) = layer(store.clone());
    let mut service = layer.layer(handler.clone());
    let task = tokio::spawn(async move { deliver(&mut service, envelope("a")).await });
    tokio::time::sleep(SECOND / 2).await;
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    let start = Instant::now();
    layer.clone().drained().await;
    assert_eq!(
        start.elapsed(),
        Duration::ZERO,
        "the second command answers at once"
    );
    assert!(store.remembers("a"));
    assert_eq!(events.all(), ["ran a"]);
}

#[tokio::test(start_paused = true)]
async fn drained_waits_for_all_and_for_nothing_else() {
    let store = FaultStore::new([
        (Remember, Before, Hang),
        (Remember, Before, Hang),
        (Remember, Before, Wait(SECOND)),
        (Remember, Before, Wait(2 * SECOND)),
    ]);
    let (layer, events) = layer(store);
    let start = Instant::now();
    layer.drained().await;
    for id in ["a", "b"] {
        let mut call = Box::pin(layer.layer(Handler::default()).call(envelope(id)));
        waits(call.as_mut()).await;
    }
    layer.drained().await;
    assert_eq!(start.elapsed().as_secs(), 2);
    assert_eq!(events.all().len(), 2);
}

#[test]
fn a_runtime_that_shuts_down_finishes_what_drained_waits_for() {
    let (handler, store) = (
        Handler::default(),
        FaultStore::new([(Remember, Before, Hang)]),
    );
    let (layer, events) = layer(store.clone());
    let runtime = Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    let mut service = layer.layer(handler);
    runtime.block_on(async {
        drop_after(1, service.call(envelope("a"))).await;
        layer.drained().await;
    });
    drop(runtime);
    assert!(store.remembers("a"));
    assert_eq!(events.all(), ["ran a"]);
}

/// A call that waits for its mark, polled on a runtime of its own.
fn marking(events: &Events) -> (Runtime, FaultStore, BoxFuture<()>) {
    let store = FaultStore::new([(Remember, Before, Hang)]);
    let layer = IdempotencyLayer::new(store.clone()).on_event(events.hook());
    let mut service = layer.layer(Handler::default());
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let mut call = Box::pin(async move { drop(service.call(envelope("a")).await) });
    runtime.block_on(waits(call.as_mut()));
    (runtime, store, call)
}

#[test]
fn dropped_on_a_thread_without_a_runtime_the_mark_goes_to_the_one_it_was_polled_on() {
    let events = Events::default();
    let (told, tell) = mpsc::channel();
    let store = FaultStore::new([(Remember, Before, Hang)]);
    let layer = IdempotencyLayer::new(store.clone()).on_event({
        let hook = events.hook();
        move |event| {
            hook(event);
            told.send(()).unwrap();
        }
    });
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let mut call = Box::pin(layer.layer(Handler::default()).call(envelope("a")));
    runtime.block_on(waits(call.as_mut()));
    std::thread::spawn(move || drop(call)).join().unwrap();
    tell.recv_timeout(10 * SECOND).unwrap();
    assert_eq!(events.all(), ["ran a"]);
    assert!(store.remembers("a"));
}

#[test]
fn dropped_on_another_runtime_the_mark_goes_to_that_one() {
    // The one it was polled on is gone.
    let events = Events::default();
    let (runtime, store, call) = marking(&events);
    drop(runtime);
    let other = Builder::new_current_thread().enable_all().build().unwrap();
    other.block_on(async {
        drop(call);
        tokio::task::yield_now().await;
    });
    assert_eq!(events.all(), ["ran a"]);
    assert!(store.remembers("a"));
}

#[test]
fn dropped_on_none_the_mark_goes_to_the_runtime_it_was_polled_on_last() {
    let events = Events::default();
    let store = FaultStore::new([(Remember, Before, Hang)]);
    let layer = IdempotencyLayer::new(store.clone())
        .on_event(events.hook())
        // A timer would tie the call to the runtime that it was started on.
        .store_timeout(None);
    let mut call = Box::pin(layer.layer(Handler::default()).call(envelope("a")));
    let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
    let (first, last) = (runtime(), runtime());
    first.block_on(waits(call.as_mut()));
    last.block_on(waits(call.as_mut()));
    drop(first);
    drop(call);
    last.block_on(layer.drained());
    assert_eq!(events.all(), ["ran a"]);
}

#[test]
fn on_a_runtime_without_a_time_driver_nothing_is_timed_and_nothing_lost() {
    let runtime = Builder::new_current_thread().build().unwrap();
    let faults = [(Remember, Before, Fail), (Remember, After, Fail)];
    let store = FaultStore::new(faults);
    let (layer, events) = layer(store.clone());
    let mut service = layer.layer(Handler::default());
    runtime
        .block_on(deliver(&mut service, envelope("a")))
        .unwrap();
    assert_eq!(store.calls(), [Seen, Remember, Remember, Remember]);

    let hanging = FaultStore::new([(Seen, Before, Hang)]);
    let mut service = layer_of(hanging).layer(Handler::default());
    runtime.block_on(waits(Box::pin(service.call(envelope("b"))).as_mut()));
    assert_eq!(events.all(), ["ran a"]);
}

fn layer_of(store: FaultStore) -> IdempotencyLayer<FaultStore> {
    IdempotencyLayer::new(store)
}

#[test]
fn what_a_call_holds_is_gone_before_its_mark_is_handed_on() {
    // A command that is dropped after the next one was sent could take effect after it.
    #[derive(Clone)]
    struct Hanging(Events);

    struct Command(Events);

    impl Future for Command {
        type Output = Result<(), Infallible>;

        fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
            Poll::Pending
        }
    }

    impl Drop for Command {
        fn drop(&mut self) {
            self.0.tell("command dropped");
        }
    }

    type Answer<T> = Pin<Box<dyn Future<Output = Result<T, Infallible>> + Send>>;

    impl Store for Hanging {
        type Error = Infallible;
        type Future<T: Send + 'static> = Answer<T>;

        fn seen(&self, _: &MessageId) -> Answer<bool> {
            Box::pin(ready(Ok(false)))
        }

        fn remember(&self, _: &MessageId) -> Answer<()> {
            Box::pin(Command(self.0.clone()))
        }

        fn forget(&self, _: &MessageId) -> Answer<()> {
            Box::pin(ready(Ok(())))
        }
    }

    let events = Events::default();
    let layer = IdempotencyLayer::new(Hanging(events.clone())).on_event(events.hook());
    let mut call = Box::pin(layer.layer(Handler::default()).call(envelope("a")));
    let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending());
    drop(call);
    assert_eq!(events.all(), ["command dropped", "abandoned a"]);
}

#[test]
fn dropped_after_its_runtime_the_mark_is_reported_as_abandoned() {
    let events = Events::default();
    let (runtime, store, call) = marking(&events);
    drop(runtime);
    drop(call);
    assert_eq!(events.all(), ["abandoned a"]);
    assert!(!store.remembers("a"));
}

#[test]
fn dropped_by_a_runtime_that_shuts_down_the_mark_is_reported_as_abandoned() {
    for background in [false, true] {
        let events = Events::default();
        let (runtime, store, call) = marking(&events);
        runtime.spawn(call);
        if background {
            runtime.shutdown_timeout(10 * SECOND);
        } else {
            drop(runtime);
        }
        assert_eq!(events.all(), ["abandoned a"]);
        assert!(!store.remembers("a"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_at_the_mark_is_asked_again_by_a_task() {
    let (handler, store) = (
        Handler::default(),
        FaultStore::new([(Remember, Before, What::Panic)]),
    );
    let (layer, events) = layer(store.clone());
    let mut service = layer.layer(handler.clone());
    let task = tokio::spawn(async move { deliver(&mut service, envelope("a")).await });
    assert!(task.await.unwrap_err().is_panic());
    layer.drained().await;
    assert!(store.remembers("a"));
    assert_eq!(events.all(), ["ran a"]);
}

#[test]
fn a_hook_may_panic_while_a_panic_unwinds() {
    let store = FaultStore::new([(Remember, Before, What::Panic)]);
    let layer = IdempotencyLayer::new(store).on_event(|_| panic!("the hook panics too"));
    let mut service = layer.layer(Handler::default());
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        now(deliver(&mut service, envelope("a")))
    }));
    let panic = unwound.unwrap_err();
    assert_eq!(
        panic.downcast_ref::<&str>(),
        Some(&"the store panics, as it was told")
    );
}
