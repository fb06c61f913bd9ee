//! The layer among tower's own: readiness, permits, and the order of the stack.

mod support;

use std::{
    future::ready,
    sync::{Arc, Mutex},
    time::Duration,
};
use support::{
    Broken, Declined, Do, Events, FaultStore, Handler, Queue, Retries, Standing,
    What::{Fail, Wait},
    When::Before,
    deliver, envelope, layer, now,
};
use tokio::time::Instant;
use tower::{
    Layer, Service, ServiceBuilder, ServiceExt,
    buffer::{
        BufferLayer,
        error::{Closed, ServiceError},
    },
    limit::{ConcurrencyLimit, ConcurrencyLimitLayer},
    load_shed::{LoadShedLayer, error::Overloaded},
    retry::RetryLayer,
    service_fn,
    timeout::{TimeoutLayer, error::Elapsed},
    util::BoxCloneSyncService,
};
use tower_idempotency::{
    BoxError, ClaimLayer, DeadLetterLayer, Envelope, ExtractId, Idempotency, IdempotencyLayer,
    Lease, MemoryStore, Outcome, Parked, StoreError,
    error::{
        Operation::{Claim, Complete, Release, Remember, Seen},
        is_transient,
    },
};
use tower_test::{assert_request_eq, mock};

const SECOND: Duration = Duration::from_secs(1);

// ===== readiness =====

/// For requests that are numbers, as the mocks take them.
fn numbered() -> IdempotencyLayer<MemoryStore, impl ExtractId<u64> + Clone> {
    IdempotencyLayer::new(MemoryStore::new()).id_from(|request: &u64| Some(request.to_string()))
}

#[tokio::test]
async fn the_instance_that_was_polled_ready_is_the_one_called() {
    // The mock panics when an instance is called that was not ready itself.
    let (mock, mut handle) = mock::pair::<u64, ()>();
    let mut service = mock::Spawn::new(numbered().layer(mock));
    handle.allow(0);
    tokio_test::assert_pending!(service.poll_ready());
    for request in 0..10 {
        handle.allow(1);
        tokio_test::assert_ready_ok!(service.poll_ready());
        let mut call = tokio_test::task::spawn(service.call(request));
        tokio_test::assert_pending!(call.poll());
        assert_request_eq!(handle, request).send_response(());
        tokio_test::assert_ready_ok!(call.poll());
    }
}

#[tokio::test]
async fn a_service_that_is_not_ready_is_not_called() {
    let (mock, mut handle) = mock::pair::<u64, ()>();
    let mut service = mock::Spawn::new(numbered().layer(mock));
    handle.allow(1);
    tokio_test::assert_ready_ok!(service.poll_ready());
    let mut call = tokio_test::task::spawn(service.call(1));
    tokio_test::assert_pending!(call.poll());
    tokio_test::assert_pending!(
        service.poll_ready(),
        "the clone has no readiness of its own"
    );
    assert_request_eq!(handle, 1).send_error("down");
    tokio_test::assert_ready_err!(call.poll());
    handle.send_error("gone");
    tokio_test::assert_ready_err!(service.poll_ready(), "errors of readiness go up");
}

#[tokio::test]
async fn the_layer_that_tells_outcomes_is_ready_when_its_service_is() {
    let (mock, mut handle) = mock::pair::<u64, ()>();
    let mut service = mock::Spawn::new(numbered().outcome().layer(mock));
    handle.allow(0);
    tokio_test::assert_pending!(service.poll_ready());
    handle.allow(1);
    tokio_test::assert_ready_ok!(service.poll_ready());
    let mut call = tokio_test::task::spawn(service.call(1));
    tokio_test::assert_pending!(call.poll());
    assert_request_eq!(handle, 1).send_response(());
    assert_eq!(tokio_test::assert_ready_ok!(call.poll()), Outcome::Ran(()));
}

#[test]
fn a_skipped_message_gives_its_permit_back() {
    let handler = Handler::default();
    let mut service = Idempotency::new(
        ConcurrencyLimit::new(handler.clone(), 1),
        MemoryStore::new(),
    );
    now(deliver(&mut service, envelope("a"))).unwrap();
    // The answered futures are kept, so the permit must come back with the answer.
    let mut answered = Vec::new();
    for _ in 0..10 {
        let mut call = Box::pin(now(service.ready()).unwrap().call(envelope("a")));
        now(call.as_mut()).unwrap();
        answered.push(call);
    }
    let mut run = Box::pin(now(service.ready()).unwrap().call(envelope("b")));
    now(run.as_mut()).unwrap();
    now(deliver(&mut service, envelope("c"))).unwrap();
    assert_eq!(handler.runs(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_store_error_and_a_drop_give_the_permit_back() {
    let faults = [(Seen, Before, Fail), (Seen, Before, Wait(SECOND))];
    let limited = ConcurrencyLimit::new(Handler::default(), 1);
    let mut service = Idempotency::new(limited, FaultStore::new(faults));
    let mut failed = Box::pin(service.ready().await.unwrap().call(envelope("a")));
    failed.as_mut().await.unwrap_err();
    let dropped = deliver(&mut service, envelope("a"));
    tokio::time::timeout(SECOND / 2, dropped).await.unwrap_err();
    deliver(&mut service, envelope("a")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_permit_is_free_while_the_mark_is_made() {
    let store = FaultStore::new([(Remember, Before, Wait(SECOND))]);
    let mut service = Idempotency::new(ConcurrencyLimit::new(Handler::default(), 1), store);
    let marking = tokio::spawn(service.ready().await.unwrap().call(envelope("a")));
    tokio::time::sleep(SECOND / 2).await;
    let start = Instant::now();
    deliver(&mut service, envelope("b")).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    marking.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_buffer_inside_and_outside() {
    let handler = Handler::default();
    let mut service = ServiceBuilder::new()
        .layer(BufferLayer::new(4))
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .layer(BufferLayer::new(4))
        .layer(ConcurrencyLimitLayer::new(2))
        .service(handler.clone());
    for message in 0..1000 {
        let id = (message % 300).to_string();
        deliver(&mut service, envelope(&id)).await.unwrap();
    }
    assert_eq!(handler.runs(), 300);
}

#[tokio::test]
async fn many_callers_of_one_boxed_service() {
    let handler = Handler::default();
    let service: BoxCloneSyncService<Envelope, (), BoxError> = BoxCloneSyncService::new(
        ServiceBuilder::new()
            .layer(IdempotencyLayer::new(MemoryStore::new()))
            .layer(ConcurrencyLimitLayer::new(1))
            .service(handler.clone()),
    );
    let callers: Vec<_> = (0..32)
        .map(|caller| {
            let mut service = service.clone();
            tokio::spawn(async move {
                for message in 0..32 {
                    let id = format!("{caller}-{message}");
                    deliver(&mut service, envelope(&id)).await.unwrap();
                    deliver(&mut service, envelope(&id)).await.unwrap();
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    assert_eq!(handler.runs(), 32 * 32);
}

#[tokio::test(start_paused = true)]
async fn what_is_shed_is_not_marked() {
    let handler = Handler::new([Do::Sleep(SECOND)]);
    let store = MemoryStore::new();
    let service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(store.clone()))
        .layer(LoadShedLayer::new())
        .layer(ConcurrencyLimitLayer::new(1))
        .service(handler.clone());
    let mut one = service.clone();
    let running = tokio::spawn(async move { deliver(&mut one, envelope("a")).await });
    tokio::task::yield_now().await;
    let mut other = service.clone();
    let error = deliver(&mut other, envelope("b")).await.unwrap_err();
    assert!(error.is::<Overloaded>());
    running.await.unwrap().unwrap();
    assert_eq!(store.len(), 1);
    deliver(&mut other, envelope("b")).await.unwrap();
    assert_eq!(handler.runs(), 2);

    let mut outside = ServiceBuilder::new()
        .layer(LoadShedLayer::new())
        .layer(IdempotencyLayer::new(store))
        .service(handler.clone());
    deliver(&mut outside, envelope("b")).await.unwrap();
    assert_eq!(handler.runs(), 2);
}

// ===== retry =====

#[test]
fn retry_inside_is_one_delivery() {
    let (handler, store) = (Handler::new([Do::Fail, Do::Fail]), FaultStore::new([]));
    let (layer, events) = layer(store.clone());
    let mut service = ServiceBuilder::new()
        .layer(layer)
        .layer(RetryLayer::new(Retries(2)))
        .service(handler.clone());
    now(deliver(&mut service, envelope("a"))).unwrap();
    now(deliver(&mut service, envelope("a"))).unwrap();
    assert_eq!(handler.runs(), 3);
    assert_eq!(store.calls(), [Seen, Remember, Seen]);
    assert_eq!(events.all(), ["ran a", "duplicate a"]);
}

#[test]
fn retry_outside_asks_for_each_attempt() {
    let faults = [(Seen, Before, Fail)];
    let (handler, store) = (Handler::new([Do::Fail]), FaultStore::new(faults));
    let mut service = ServiceBuilder::new()
        .layer(RetryLayer::new(Retries(2)))
        .layer(IdempotencyLayer::new(store.clone()))
        .service(handler.clone());
    now(deliver(&mut service, envelope("a"))).unwrap();
    assert_eq!(handler.runs(), 2);
    assert_eq!(store.calls(), [Seen, Seen, Seen, Remember]);
}

#[test]
fn retries_that_run_out_leave_the_message_unmarked() {
    let (handler, store) = (Handler::new([Do::Fail; 3]), MemoryStore::new());
    let mut service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(store.clone()))
        .layer(RetryLayer::new(Retries(2)))
        .service(handler.clone());
    let error = now(deliver(&mut service, envelope("a"))).unwrap_err();
    assert!(error.is::<Declined>());
    assert!(store.is_empty());
    now(deliver(&mut service, envelope("a"))).unwrap();
    assert_eq!(handler.runs(), 4);
}

// ===== timeout =====

#[tokio::test(start_paused = true)]
async fn timeout_inside_leaves_the_message_unmarked() {
    let (handler, store) = (Handler::new([Do::Hang]), MemoryStore::new());
    let mut service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(store.clone()))
        .layer(TimeoutLayer::new(SECOND))
        .service(handler.clone());
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    assert!(error.is::<Elapsed>());
    assert!(store.is_empty());
    deliver(&mut service, envelope("a")).await.unwrap();
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn timeout_outside_loses_no_mark_that_is_due() {
    let (handler, store) = (
        Handler::new([Do::Hang]),
        FaultStore::new([(Remember, Before, Wait(3 * SECOND))]),
    );
    let idempotency = IdempotencyLayer::new(store.clone());
    let mut service = ServiceBuilder::new()
        .layer(TimeoutLayer::new(SECOND))
        .layer(idempotency.clone())
        .service(handler.clone());
    // During the handler: nothing happened, so nothing is marked.
    assert!(
        deliver(&mut service, envelope("a"))
            .await
            .unwrap_err()
            .is::<Elapsed>()
    );
    idempotency.drained().await;
    assert!(!store.remembers("a"));
    // During the mark: the effect happened.
    assert!(
        deliver(&mut service, envelope("a"))
            .await
            .unwrap_err()
            .is::<Elapsed>()
    );
    idempotency.drained().await;
    assert!(store.remembers("a"));
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_retry_outside_a_timeout_outside_repeats_the_effect_of_a_slow_mark() {
    // The timeout ends the call while its mark is made, and the retry asks before that is answered.
    // Why the two go inside: there the mark is not theirs to interrupt.
    let mark = (Remember, Before, Wait(3 * SECOND));
    let (handler, store) = (Handler::default(), FaultStore::new([mark, mark]));
    let idempotency = IdempotencyLayer::new(store.clone());
    let mut service = ServiceBuilder::new()
        .layer(RetryLayer::new(Retries(1)))
        .layer(TimeoutLayer::new(SECOND))
        .layer(idempotency.clone())
        .service(handler.clone());
    let _ = deliver(&mut service, envelope("a")).await;
    idempotency.drained().await;
    assert_eq!(handler.runs(), 2);

    let (handler, store) = (Handler::default(), FaultStore::new([mark]));
    let mut service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(store))
        .layer(RetryLayer::new(Retries(1)))
        .layer(TimeoutLayer::new(SECOND))
        .service(handler.clone());
    deliver(&mut service, envelope("a")).await.unwrap();
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 1);
}

// ===== dead letters =====

#[tokio::test(start_paused = true)]
async fn the_recommended_stack() {
    // Fails for good, is redriven, and then has its effect once.
    let (handler, queue, store) = (
        Handler::new([Do::Fail, Do::Hang, Do::Fail]),
        Queue::default(),
        MemoryStore::new(),
    );
    let mut consumer = ServiceBuilder::new()
        .layer(DeadLetterLayer::new(queue.clone()))
        .layer(IdempotencyLayer::new(store.clone()))
        .layer(RetryLayer::new(Retries(2)))
        .layer(TimeoutLayer::new(30 * SECOND))
        .service(handler.clone());
    deliver(&mut consumer, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 3);
    assert!(store.is_empty());
    let dead = queue.take();
    assert_eq!(dead.len(), 1);
    assert_eq!(
        dead[0].dead_letter().unwrap().error(),
        Some("card declined")
    );

    let redriven = Envelope::decode(dead[0].encode().as_bytes())
        .unwrap()
        .redriven();
    assert_eq!(redriven.encode(), envelope_like(&redriven));
    deliver(&mut consumer, redriven.clone()).await.unwrap();
    deliver(&mut consumer, redriven).await.unwrap();
    assert_eq!((handler.runs(), store.len()), (4, 1));
    assert!(queue.take().is_empty());
}

/// The message as it was before it was dead-lettered.
fn envelope_like(message: &Envelope) -> String {
    let meta = message.meta();
    format!(
        r#"{{"job":"urn:test:payment","trace_id":"{}","data":{{"cents":9990}},"meta":{{"id":"a","queue":"default","lang":"rust","schema_version":1,"created_at":{}}},"attempts":0}}"#,
        message.trace_id().unwrap(),
        meta.created_at().unwrap(),
    )
}

#[test]
fn the_wrong_order_loses_a_redriven_message() {
    // With the dead-letter layer inside, its Ok is taken for the handler's: the message that never
    // had its effect is remembered as done, and its redrive skipped. This is why it goes outside.
    let (handler, queue, store) = (
        Handler::new([Do::Fail]),
        Queue::default(),
        MemoryStore::new(),
    );
    let mut consumer = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(store.clone()))
        .layer(DeadLetterLayer::new(queue.clone()))
        .service(handler.clone());
    now(deliver(&mut consumer, envelope("a"))).unwrap();
    assert_eq!(store.len(), 1, "marked, although its handler failed");
    let redriven = queue.take().remove(0).redriven();
    now(deliver(&mut consumer, redriven)).unwrap();
    assert_eq!(
        handler.runs(),
        1,
        "skipped, although it never had its effect"
    );
}

#[test]
fn a_store_that_is_down_fills_no_dead_letter_queue() {
    let (handler, queue) = (Handler::default(), Queue::default());
    let mut consumer = ServiceBuilder::new()
        .layer(DeadLetterLayer::new(queue.clone()))
        .layer(IdempotencyLayer::new(FaultStore::new([(
            Seen, Before, Fail,
        )])))
        .service(handler.clone());
    let error = now(deliver(&mut consumer, envelope("a"))).unwrap_err();
    assert!(error.is::<StoreError>());
    assert!(queue.take().is_empty());
    now(deliver(&mut consumer, envelope("a"))).unwrap();
    assert_eq!(handler.runs(), 1);
}

#[test]
fn a_wider_predicate_lets_towers_own_errors_through() {
    let queue = Queue::default();
    let layer = DeadLetterLayer::new(queue.clone())
        .transient_if(|error| is_transient(error) || error.is::<Overloaded>());
    let mut consumer = layer.layer(service_fn(|_: Envelope| {
        ready(Err::<(), BoxError>(Overloaded::new().into()))
    }));
    let error = now(deliver(&mut consumer, envelope("a"))).unwrap_err();
    assert!(error.is::<Overloaded>());
    assert!(queue.take().is_empty());
}

#[tokio::test]
async fn a_buffer_whose_service_broke_has_tried_no_message() {
    let queue = Queue::default();
    let layer = DeadLetterLayer::new(queue.clone()).transient_if(|error| {
        is_transient(error) || error.is::<Closed>() || error.is::<ServiceError>()
    });
    let mut consumer = ServiceBuilder::new()
        .layer(layer)
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .layer(BufferLayer::new(4))
        .service(Broken);
    for _ in 0..3 {
        deliver(&mut consumer, envelope("a")).await.unwrap_err();
    }
    assert!(queue.take().is_empty());
}

#[test]
fn a_message_that_cannot_be_dead_lettered_runs_again() {
    let handler = Handler::new([Do::Fail, Do::Fail]);
    let (store, queue) = (MemoryStore::new(), Queue::default());
    let down = Arc::new(Mutex::new(true));
    let publisher = {
        let (down, queue) = (down.clone(), queue.clone());
        service_fn(move |message| {
            let sent = if *down.lock().unwrap() {
                None
            } else {
                Some(queue.clone().call(message))
            };
            async move { sent.ok_or("broker gone")?.await }
        })
    };
    let mut consumer = ServiceBuilder::new()
        .layer(DeadLetterLayer::new(publisher))
        .layer(IdempotencyLayer::new(store.clone()))
        .service(handler.clone());
    let error = now(deliver(&mut consumer, envelope("a"))).unwrap_err();
    assert!(is_transient(&error), "{error}");
    assert!(store.is_empty() && queue.take().is_empty());
    *down.lock().unwrap() = false;
    now(deliver(&mut consumer, envelope("a"))).unwrap();
    assert_eq!((handler.runs(), queue.take().len()), (2, 1));
    assert!(store.is_empty());
}

// ===== claims =====

fn claiming(store: &FaultStore) -> (ClaimLayer<FaultStore>, Events) {
    let (layer, events) = layer(store.clone());
    (layer.claim(Lease::new(3 * SECOND).unwrap()), events)
}

#[tokio::test(start_paused = true)]
async fn a_claiming_service_calls_the_instance_that_was_polled_ready() {
    let layer = numbered().claim(Lease::new(SECOND).unwrap());
    let (mock, mut handle) = mock::pair::<u64, ()>();
    let mut service = mock::Spawn::new(layer.layer(mock));
    handle.allow(0);
    tokio_test::assert_pending!(service.poll_ready());
    for request in 0..10 {
        handle.allow(1);
        tokio_test::assert_ready_ok!(service.poll_ready());
        let mut call = tokio_test::task::spawn(service.call(request));
        tokio_test::assert_pending!(call.poll());
        tokio_test::assert_pending!(
            service.poll_ready(),
            "the clone has no readiness of its own"
        );
        assert_request_eq!(handle, request).send_response(());
        tokio_test::assert_ready_ok!(call.poll());
    }
}

#[tokio::test(start_paused = true)]
async fn a_parked_message_gives_its_permit_back() {
    let store = FaultStore::timed([]);
    store.claimed_elsewhere("a", Lease::new(60 * SECOND).unwrap());
    let inner = ConcurrencyLimit::new(Handler::default(), 1);
    let mut service = claiming(&store).0.layer(inner);
    // The answered future is kept, so the permit must come back with the answer.
    let mut call = Box::pin(service.ready().await.unwrap().call(envelope("a")));
    assert!(call.as_mut().await.unwrap_err().is::<Parked>());
    now(deliver(&mut service, envelope("b"))).unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_permit_is_free_while_a_claim_is_ended() {
    for (script, end) in [(Do::Succeed, Complete), (Do::Fail, Release)] {
        let store = FaultStore::timed([(end, Before, Wait(SECOND))]);
        let inner = ConcurrencyLimit::new(Handler::new([script]), 1);
        let mut service = claiming(&store).0.layer(inner);
        let ending = tokio::spawn(service.ready().await.unwrap().call(envelope("a")));
        tokio::time::sleep(SECOND / 2).await;
        assert_eq!(store.sent(end).len(), 1);
        now(deliver(&mut service, envelope("b"))).unwrap();
        let _ = ending.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn one_claim_covers_all_tries_of_a_retry_inside() {
    let (handler, store) = (
        Handler::new([
            Do::FailAfter(2 * SECOND),
            Do::FailAfter(2 * SECOND),
            Do::Sleep(2 * SECOND),
        ]),
        FaultStore::timed([]),
    );
    let (layer, events) = claiming(&store);
    let mut service = ServiceBuilder::new()
        .layer(layer)
        .layer(RetryLayer::new(Retries(2)))
        .service(handler.clone());
    let running = tokio::spawn(service.ready().await.unwrap().call(envelope("a")));
    tokio::task::yield_now().await;
    for _ in 0..59 {
        assert!(matches!(store.standing("a"), Standing::Claimed(_)));
        tokio::time::sleep(SECOND / 10).await;
    }
    running.await.unwrap().unwrap();
    assert_eq!(handler.runs(), 3);
    assert_eq!(store.sent(Claim).len(), 1);
    assert_eq!(store.sent(Release), []);
    assert_eq!(events.all(), ["ran a"]);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_inside_frees_the_claim() {
    let (handler, store) = (Handler::new([Do::Hang]), FaultStore::timed([]));
    let (layer, events) = claiming(&store);
    let mut service = ServiceBuilder::new()
        .layer(layer)
        .layer(TimeoutLayer::new(10 * SECOND))
        .service(handler.clone());
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    assert!(error.is::<Elapsed>());
    assert_eq!(store.standing("a"), Standing::Free);
    deliver(&mut service, envelope("a")).await.unwrap();
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 2);
    assert_eq!(events.all(), ["ran a", "duplicate a"]);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_outside_drops_the_call_and_its_claim_is_released() {
    let (handler, store) = (
        Handler::new([Do::Hang]),
        FaultStore::timed([(Complete, Before, Wait(12 * SECOND))]),
    );
    let (layer, events) = claiming(&store);
    let mut service = ServiceBuilder::new()
        .layer(TimeoutLayer::new(SECOND))
        .layer(layer.clone())
        .service(handler.clone());
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    assert!(error.is::<Elapsed>());
    layer.drained().await;
    assert_eq!(store.standing("a"), Standing::Free);
    // During the mark: it is made, and until then the claim holds, so that no copy runs.
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    assert!(error.is::<Elapsed>());
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    assert!(error.is::<Parked>());
    layer.drained().await;
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 2);
    assert_eq!(events.all(), ["parked a", "ran a", "duplicate a"]);
}

#[tokio::test(start_paused = true)]
async fn a_retry_outside_a_timeout_outside_repeats_no_effect_of_a_slow_mark() {
    // What it does with the seen-set: here the second try finds the claim of the first.
    let (handler, store) = (
        Handler::default(),
        FaultStore::timed([(Complete, Before, Wait(4 * SECOND))]),
    );
    let (layer, _) = claiming(&store);
    let mut service = ServiceBuilder::new()
        .layer(RetryLayer::new(Retries(1)))
        .layer(TimeoutLayer::new(SECOND))
        .layer(layer.clone())
        .service(handler.clone());
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    assert!(error.is::<Parked>());
    layer.drained().await;
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_recommended_stack_with_claims() {
    let (handler, queue, store) = (
        Handler::new([Do::Fail, Do::Hang, Do::Fail]),
        Queue::default(),
        FaultStore::timed([]),
    );
    let (layer, events) = claiming(&store);
    let mut consumer = ServiceBuilder::new()
        .layer(DeadLetterLayer::new(queue.clone()))
        .layer(layer)
        .layer(RetryLayer::new(Retries(2)))
        .layer(TimeoutLayer::new(30 * SECOND))
        .service(handler.clone());
    // A copy that arrives meanwhile is neither run nor dead-lettered.
    let first = tokio::spawn(consumer.ready().await.unwrap().call(envelope("a")));
    tokio::time::sleep(10 * SECOND).await;
    let error = deliver(&mut consumer, envelope("a")).await.unwrap_err();
    assert!(error.is::<Parked>());
    assert!(queue.take().is_empty());
    first.await.unwrap().unwrap();
    assert_eq!(handler.runs(), 3);
    assert_eq!(store.standing("a"), Standing::Free, "it failed for good");
    let dead = queue.take();
    assert_eq!(dead.len(), 1);
    let redriven = dead[0].clone().redriven();
    deliver(&mut consumer, redriven.clone()).await.unwrap();
    deliver(&mut consumer, redriven).await.unwrap();
    assert_eq!(handler.runs(), 4);
    assert_eq!(events.all(), ["parked a", "ran a", "duplicate a"]);
}

#[tokio::test(start_paused = true)]
async fn claims_among_buffers_and_limits_in_a_box() {
    let (handler, store) = (Handler::default(), FaultStore::timed([]));
    let service: BoxCloneSyncService<Envelope, (), BoxError> = BoxCloneSyncService::new(
        ServiceBuilder::new()
            .layer(BufferLayer::new(4))
            .layer(claiming(&store).0.wait(60 * SECOND))
            .layer(BufferLayer::new(4))
            .layer(ConcurrencyLimitLayer::new(2))
            .service(handler.clone()),
    );
    // Each message by each of the callers, all at once.
    let callers: Vec<_> = (0..16)
        .map(|_| {
            let mut service = service.clone();
            tokio::spawn(async move {
                for message in 0..32 {
                    deliver(&mut service, envelope(&message.to_string()))
                        .await
                        .unwrap();
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    assert_eq!(handler.runs(), 32);
}
