//! The contract of the claim: what runs, what is parked, what is recorded, and what a store that
//! fails does to it.

mod support;

use std::{
    collections::HashSet,
    convert::Infallible,
    future::ready,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    rc::Rc,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};
use support::{
    BoxFuture, Broken, Declined, Do, ELSEWHERE, Events, FaultStore, Handler, Standing,
    What::{self, Fail, Hang, Wait},
    When::{After, Before},
    deliver, envelope, layer, now,
};
use tokio::time::{Instant, sleep, timeout};
use tower::{
    Layer, Service, ServiceBuilder, ServiceExt,
    limit::ConcurrencyLimit,
    retry::{Policy, RetryLayer},
    service_fn,
};
use tower_idempotency::{
    BoxError, Claim, ClaimLayer, ClaimStore, DeadLetterLayer, Envelope, IdempotencyLayer, Lease,
    MemoryStore, MessageId, OnMarkError, OnStoreError, Outcome, Owner, Parked, Store, StoreError,
    claim::ClaimService,
    error::{
        Operation::{self, Claim as Claims, Complete, Release},
        TimedOut, is_transient,
    },
    event::Event,
};

const SECOND: Duration = Duration::from_secs(1);
const MILLI: Duration = Duration::from_millis(1);

/// Three seconds, renewed each second.
fn lease() -> Lease {
    Lease::new(3 * SECOND).unwrap()
}

fn claiming(store: &FaultStore) -> (ClaimLayer<FaultStore>, Events) {
    let (layer, events) = layer(store.clone());
    (layer.claim(lease()), events)
}

fn parked(error: &BoxError) -> &Parked {
    error.downcast_ref().expect("parked")
}

fn operation(error: &BoxError) -> Operation {
    let error = error.downcast_ref::<StoreError>();
    error.expect("a store error").operation()
}

/// Which commands were sent.
fn commands(store: &FaultStore) -> Vec<Operation> {
    store.claims().iter().map(|sent| sent.operation).collect()
}

/// Tries this many times more.
#[derive(Clone)]
struct Retries(usize);

impl<Req: Clone, Res, E> Policy<Req, Res, E> for Retries {
    type Future = std::future::Ready<()>;

    fn retry(
        &mut self,
        _: &mut Req,
        result: &mut Result<Res, E>,
    ) -> Option<std::future::Ready<()>> {
        (result.is_err() && self.0 > 0).then(|| {
            self.0 -= 1;
            ready(())
        })
    }

    fn clone_request(&mut self, request: &Req) -> Option<Req> {
        Some(request.clone())
    }
}

// ===== what runs =====

/// Delivers ids to a handler with a script; answers which deliveries ran it.
async fn ran(script: &[Do], ids: &[&str]) -> Vec<bool> {
    let handler = Handler::new(script.iter().copied());
    let (layer, _) = claiming(&FaultStore::timed([]));
    let mut service = layer.layer(handler.clone());
    let mut ran = Vec::new();
    for id in ids {
        let before = handler.runs();
        let _ = catch_unwind(AssertUnwindSafe(|| {
            now(deliver(&mut service, envelope(id)))
        }));
        layer.drained().await;
        ran.push(handler.runs() > before);
    }
    ran
}

#[tokio::test(start_paused = true)]
async fn a_message_has_its_effect_once() {
    use Do::{Fail, Panic, Succeed};

    assert_eq!(ran(&[], &["a", "a", "a"]).await, [true, false, false]);
    assert_eq!(
        ran(&[], &["a", "b", "a", "c", "b"]).await,
        [true, true, false, true, false]
    );
    // A failure leaves nothing behind, however it fails.
    assert_eq!(
        ran(&[Fail, Succeed], &["a", "a", "a"]).await,
        [true, true, false]
    );
    assert_eq!(
        ran(&[Panic, Fail, Panic], &["a", "a", "a", "a", "a"]).await,
        [true, true, true, true, false]
    );
    // Other messages are not touched by it.
    assert_eq!(
        ran(&[Panic], &["a", "b", "b", "a", "a"]).await,
        [true, true, false, true, false]
    );
    // Without an id nothing can be told apart.
    assert_eq!(ran(&[], &["", "", ""]).await, [true, true, true]);
    // A blank is an id like any other.
    assert_eq!(ran(&[], &[" ", " ", "  "]).await, [true, false, true]);
}

#[tokio::test(start_paused = true)]
async fn of_two_copies_one_runs_and_the_other_is_parked() {
    let (handler, store) = (Handler::new([Do::Sleep(SECOND / 2)]), FaultStore::timed([]));
    let (layer, events) = claiming(&store);
    let mut service = layer.layer(handler.clone());
    let mut other = service.clone();
    let (one, error) = tokio::join!(
        deliver(&mut service, envelope("a")),
        deliver(&mut other, envelope("a")),
    );
    one.unwrap();
    assert_eq!(parked(&error.unwrap_err()).id(), &MessageId::from("a"));
    deliver(&mut other, envelope("a")).await.unwrap();
    layer.drained().await;
    assert_eq!(handler.runs(), 1);
    assert_eq!(events.all(), ["parked a", "ran a", "duplicate a"]);
    // A new message costs two commands, a duplicate one. Each call is somebody of its own.
    assert_eq!(commands(&store), [Claims, Claims, Complete, Claims]);
    let sent = store.claims();
    assert_eq!(sent[0].owner, sent[2].owner);
    let owners: HashSet<_> = sent.iter().map(|sent| sent.owner).collect();
    assert_eq!(owners.len(), 3);
    assert_eq!(store.calls().len(), sent.len(), "and nothing else is asked");
}

#[tokio::test(start_paused = true)]
async fn what_another_process_does_counts() {
    let (handler, store) = (Handler::default(), FaultStore::timed([]));
    let (layer, _) = claiming(&store);
    let mut service = layer.layer(handler.clone());
    store.claimed_elsewhere("a", lease());
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    parked(&error);
    // It died: its claim ends with the lease.
    sleep(3 * SECOND - MILLI).await;
    parked(&deliver(&mut service, envelope("a")).await.unwrap_err());
    sleep(MILLI).await;
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 1);
    // And what it marked, with a claim or without one, is done.
    for id in ["b", "c"] {
        store.inner.remember(&id.into()).await.unwrap();
        store.inner.complete(&id.into(), ELSEWHERE).await.unwrap();
        deliver(&mut service, envelope(id)).await.unwrap();
    }
    assert_eq!(handler.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_claim_holds_up_nobody_who_asks_for_none() {
    let store = FaultStore::timed([]);
    let handler = Handler::new([Do::Sleep(SECOND), Do::Succeed]);
    let (claims, _) = claiming(&store);
    let mut claiming = claims.layer(handler.clone());
    let running = tokio::spawn(claiming.ready().await.unwrap().call(envelope("a")));
    tokio::task::yield_now().await;
    let mut plain = IdempotencyLayer::new(store.clone()).layer(handler.clone());
    deliver(&mut plain, envelope("a")).await.unwrap();
    running.await.unwrap().unwrap();
    assert_eq!(handler.runs(), 2);
    deliver(&mut claiming, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn copies_that_arrive_together() {
    let deliveries = |layer: ClaimLayer<FaultStore>, handler: &Handler| {
        let calls: Vec<_> = (0..50)
            .map(|_| {
                let mut service = layer.clone().outcome().layer(handler.clone());
                tokio::spawn(async move { deliver(&mut service, envelope("a")).await })
            })
            .collect();
        async move {
            let mut answers = Vec::new();
            for call in calls {
                answers.push(call.await.unwrap());
            }
            answers
        }
    };
    let count = |answers: &[Result<Outcome<()>, BoxError>], outcome| {
        let those = |answer: &&Result<Outcome<()>, _>| matches!(answer, Ok(it) if *it == outcome);
        answers.iter().filter(those).count()
    };

    let handler = Handler::new([Do::Sleep(50 * MILLI); 50]);
    let (layer, _) = claiming(&FaultStore::timed([]));
    let answers = deliveries(layer, &handler).await;
    assert_eq!(handler.runs(), 1);
    assert_eq!(count(&answers, Outcome::Ran(())), 1);
    let waiting = answers.iter().filter_map(|answer| answer.as_ref().err());
    assert_eq!(waiting.map(parked).count(), 49);

    let handler = Handler::new([Do::Sleep(50 * MILLI); 50]);
    let (layer, _) = claiming(&FaultStore::timed([]));
    let answers = deliveries(layer.wait(SECOND), &handler).await;
    assert_eq!(handler.runs(), 1);
    assert_eq!(count(&answers, Outcome::Ran(())), 1);
    assert_eq!(count(&answers, Outcome::Duplicate), 49);

    // For contrast, the seen-set: nobody has marked anything when they ask.
    let handler = Handler::new([Do::Sleep(50 * MILLI); 50]);
    let store = MemoryStore::new();
    let service = IdempotencyLayer::new(store.clone()).layer(handler.clone());
    let calls: Vec<_> = (0..50)
        .map(|_| tokio::spawn(service.clone().oneshot(envelope("a"))))
        .collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    assert_eq!((handler.runs(), store.len()), (50, 1));
}

#[tokio::test(start_paused = true)]
async fn a_message_without_an_id_runs_each_time_and_is_reported() {
    let (handler, store) = (Handler::new([Do::Succeed, Do::Fail]), FaultStore::timed([]));
    let (layer, events) = claiming(&store);
    let mut service = layer.layer(handler.clone());
    deliver(&mut service, envelope("")).await.unwrap();
    let error = deliver(&mut service, envelope("")).await.unwrap_err();
    assert!(error.is::<Declined>());
    deliver(&mut service, envelope("")).await.unwrap();
    assert_eq!(handler.runs(), 3);
    assert_eq!(events.all(), ["no_id -"; 3]);
    assert!(store.calls().is_empty());
    // Dropped, it leaves nothing.
    let hanging = Handler::new([Do::Hang]);
    let mut call = Box::pin(layer.layer(hanging).call(envelope("")));
    let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending());
    drop(call);
    layer.drained().await;
    assert!(store.calls().is_empty());
    assert_eq!(events.all().len(), 4);
}

#[tokio::test(start_paused = true)]
async fn an_ok_that_is_not_done_gives_the_claim_back() {
    let store = FaultStore::timed([]);
    let (layer, events) = layer(store.clone());
    let answers = Arc::new(Mutex::new(vec![Some(1), None, Some(3)]));
    let mut service = layer
        .done_if(|answer: &Option<i32>| *answer == Some(3))
        .claim(lease())
        .layer(service_fn(move |_: Envelope| {
            ready(Ok::<_, BoxError>(answers.lock().unwrap().remove(0)))
        }));
    for expected in [Some(1), None] {
        let answer = deliver(&mut service, envelope("a")).await.unwrap();
        assert_eq!(answer, expected);
        assert_eq!(store.standing("a"), Standing::Free);
    }
    let answer = deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(answer, Some(3));
    assert_eq!(store.standing("a"), Standing::Done);
    assert_eq!(events.all(), ["ran a"]);
    let [c, r, m] = [Claims, Release, Complete];
    assert_eq!(commands(&store), [c, r, c, r, c, m]);
}

#[tokio::test(start_paused = true)]
async fn outcome_tells_a_run_from_a_duplicate() {
    let (layer, _) = claiming(&FaultStore::timed([]));
    let mut service = ServiceBuilder::new()
        .layer(layer.outcome())
        .service(service_fn(|_: Envelope| ready(Ok::<_, Infallible>(7))));
    let answer = deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(answer, Outcome::Ran(7));
    let answer = deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(answer, Outcome::Duplicate);
}

#[tokio::test(start_paused = true)]
async fn the_ttl_counts_from_success_and_not_from_the_claim() {
    let start = Instant::now();
    let memory = MemoryStore::builder()
        .ttl(16 * SECOND)
        .clock(move || start.elapsed())
        .build()
        .unwrap();
    let handler = Handler::new([Do::Fail, Do::Sleep(10 * SECOND)]);
    let (layer, _) = claiming(&FaultStore::over(memory, []));
    let mut service = layer.layer(handler.clone());
    deliver(&mut service, envelope("a")).await.unwrap_err();
    sleep(10 * SECOND).await;
    // Claimed at 10 s, done at 20 s.
    deliver(&mut service, envelope("a")).await.unwrap();
    sleep(15 * SECOND).await;
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(
        handler.runs(),
        2,
        "16 s after it succeeded, not after it began"
    );
    sleep(6 * SECOND).await;
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 3, "20 + 16 * 1.25 is over");
}

// ===== parked =====

#[tokio::test(start_paused = true)]
async fn parked_says_when_to_come_again() {
    let mut told = HashSet::new();
    for (age, left) in [
        (Duration::ZERO, 3 * SECOND),
        (SECOND, 2 * SECOND),
        (2999 * MILLI - 99 * MILLI, 100 * MILLI),
    ] {
        let store = FaultStore::timed([]);
        let mut service = claiming(&store).0.layer(Handler::default());
        store.claimed_elsewhere("a", lease());
        sleep(age).await;
        for _ in 0..20 {
            let error = deliver(&mut service, envelope("a")).await.unwrap_err();
            assert!(is_transient(&error));
            let parked = parked(&error);
            assert_eq!(parked.id(), &MessageId::from("a"));
            let retry_after = parked.retry_after();
            assert!(
                left * 3 / 4 <= retry_after && retry_after <= left,
                "{retry_after:?} where {left:?} are left"
            );
            told.insert(retry_after);
        }
    }
    assert!(
        told.len() > 50,
        "by chance, so that copies do not meet again"
    );
}

#[tokio::test(start_paused = true)]
async fn nobody_is_told_to_come_again_at_once() {
    for left in [MILLI, 9 * MILLI] {
        let store = FaultStore::timed([]);
        store.claimed_elsewhere("a", Lease::new(SECOND).unwrap());
        sleep(SECOND - left).await;
        let mut service = claiming(&store).0.layer(Handler::default());
        let error = deliver(&mut service, envelope("a")).await.unwrap_err();
        assert_eq!(parked(&error).retry_after(), 10 * MILLI);
    }
}

#[tokio::test(start_paused = true)]
async fn no_retry_after_of_a_store_is_too_long() {
    // Such as that of a record which has no end.
    #[derive(Clone)]
    struct Busy(Duration);

    impl Store for Busy {
        type Error = Infallible;
        type Future<T: Send + 'static> = std::future::Ready<Result<T, Infallible>>;

        fn seen(&self, _: &MessageId) -> Self::Future<bool> {
            ready(Ok(false))
        }
        fn remember(&self, _: &MessageId) -> Self::Future<()> {
            ready(Ok(()))
        }
        fn forget(&self, _: &MessageId) -> Self::Future<()> {
            ready(Ok(()))
        }
    }

    impl ClaimStore for Busy {
        fn claim(&self, _: &MessageId, _: Owner, _: Lease) -> Self::Future<Claim> {
            let retry_after = self.0;
            ready(Ok(Claim::Busy { retry_after }))
        }
        fn renew(&self, _: &MessageId, _: Owner, _: Lease) -> Self::Future<bool> {
            ready(Ok(false))
        }
        fn complete(&self, _: &MessageId, _: Owner) -> Self::Future<bool> {
            ready(Ok(false))
        }
        fn release(&self, _: &MessageId, _: Owner) -> Self::Future<bool> {
            ready(Ok(false))
        }
    }

    for (busy, least) in [
        (Duration::MAX, Duration::from_secs(1 << 62)),
        (Duration::ZERO, 10 * MILLI),
    ] {
        let layer = IdempotencyLayer::new(Busy(busy)).claim(lease());
        let mut service = layer.layer(Handler::default());
        for _ in 0..1000 {
            let error = deliver(&mut service, envelope("a")).await.unwrap_err();
            assert!(parked(&error).retry_after() >= least);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_parked_message_is_no_dead_letter() {
    let (store, dead) = (FaultStore::timed([]), Arc::new(AtomicUsize::new(0)));
    let count = dead.clone();
    let mut consumer = ServiceBuilder::new()
        .layer(DeadLetterLayer::new(service_fn(move |_: Envelope| {
            count.fetch_add(1, Ordering::SeqCst);
            ready(Ok::<_, Infallible>(()))
        })))
        .layer(claiming(&store).0)
        .service(Handler::new([Do::Fail]));
    store.claimed_elsewhere("a", lease());
    parked(&deliver(&mut consumer, envelope("a")).await.unwrap_err());
    assert_eq!(dead.load(Ordering::SeqCst), 0);
    store.released_elsewhere("a");
    deliver(&mut consumer, envelope("a")).await.unwrap();
    assert_eq!(dead.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_comes_again_as_it_is_told_does_not_storm() {
    for _ in 0..20 {
        let (handler, store) = (Handler::default(), FaultStore::timed([]));
        let mut service = claiming(&store).0.layer(handler.clone());
        store.claimed_elsewhere("a", Lease::new(60 * SECOND).unwrap());
        let start = Instant::now();
        let mut deliveries = 1;
        while let Err(error) = deliver(&mut service, envelope("a")).await {
            sleep(parked(&error).retry_after()).await;
            deliveries += 1;
        }
        assert_eq!(handler.runs(), 1);
        assert!(deliveries <= 10, "{deliveries} deliveries");
        assert!(start.elapsed() < 61 * SECOND, "{:?}", start.elapsed());
    }
}

// ===== a handler that fails =====

#[tokio::test(start_paused = true)]
async fn the_claim_is_given_back_before_the_error_is() {
    let (handler, store) = (
        Handler::new([Do::Fail, Do::Fail]),
        FaultStore::timed([(Release, Before, Wait(2 * SECOND))]),
    );
    let (layer, events) = claiming(&store);
    let mut service = layer.layer(handler.clone());
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    assert!(error.is::<Declined>(), "as it was");
    assert_eq!(store.standing("a"), Standing::Free);
    // A retry outside finds it free.
    let mut retried = ServiceBuilder::new()
        .layer(RetryLayer::new(Retries(1)))
        .service(service);
    deliver(&mut retried, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 3);
    assert_eq!(events.all(), ["ran a"]);
    let [c, r, m] = [Claims, Release, Complete];
    assert_eq!(commands(&store), [c, r, c, r, c, m]);
    let owners: Vec<_> = store.claims().iter().map(|sent| sent.owner).collect();
    let distinct: HashSet<_> = owners.iter().collect();
    assert_eq!(distinct.len(), 3, "one to each call");
    assert!(owners.chunks(2).all(|pair| pair[0] == pair[1]));
}

#[tokio::test(start_paused = true)]
async fn a_redelivery_during_the_release_is_never_skipped() {
    for (when, ran) in [(Before, false), (After, true)] {
        let store = FaultStore::timed([(Release, when, Wait(100 * MILLI))]);
        let handler = Handler::new([Do::Fail]);
        let (layer, _) = claiming(&store);
        let mut service = layer.layer(handler.clone());
        let failing = tokio::spawn(service.ready().await.unwrap().call(envelope("a")));
        sleep(50 * MILLI).await;
        assert_eq!(commands(&store), [Claims, Release]);
        match deliver(&mut service, envelope("a")).await {
            Ok(()) => assert!(ran),
            Err(error) => assert!(!ran && error.is::<Parked>()),
        }
        assert!(failing.await.unwrap().unwrap_err().is::<Declined>());
        deliver(&mut service, envelope("a")).await.unwrap();
        assert_eq!(handler.runs(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_fails_is_reported_and_parks_the_message() {
    for what in [Fail, Hang] {
        let (handler, store) = (
            Handler::new([Do::Fail]),
            FaultStore::timed([(Release, Before, what)]),
        );
        let (layer, events) = claiming(&store);
        let mut service = layer.layer(handler.clone());
        let start = Instant::now();
        let error = deliver(&mut service, envelope("a")).await.unwrap_err();
        assert!(error.is::<Declined>(), "and nothing of the store's");
        let limit = if matches!(what, Hang) { 5 } else { 0 };
        assert_eq!(start.elapsed().as_secs(), limit);
        assert_eq!(events.all(), ["release_failed a"]);
        assert_eq!(commands(&store), [Claims, Release], "sent once");
        // It is renewed no longer, and ends with its lease.
        if matches!(what, Fail) {
            parked(&deliver(&mut service, envelope("a")).await.unwrap_err());
        }
        sleep(3 * SECOND).await;
        deliver(&mut service, envelope("a")).await.unwrap();
        assert_eq!(handler.runs(), 2);
    }
}

// ===== events =====

#[tokio::test(start_paused = true)]
async fn each_delivery_is_told_once_and_after_the_record() {
    let store = FaultStore::timed([(Claims, Before, Wait(SECOND / 4))]);
    let events = Events::default();
    let standings = Arc::new(Mutex::new(Vec::new()));
    let (hook, in_hook, told) = (events.hook(), store.clone(), standings.clone());
    let layer = IdempotencyLayer::new(store)
        .on_event(move |event| {
            hook(event);
            if let Event::Ran { id, .. } | Event::Duplicate { id, .. } = event {
                told.lock().unwrap().push(in_hook.standing(id.as_str()));
            }
        })
        .claim(lease());
    let mut service = layer.layer(Handler::new([Do::Fail, Do::Sleep(SECOND / 4)]));
    deliver(&mut service, envelope("a")).await.unwrap_err();
    let running = tokio::spawn(service.ready().await.unwrap().call(envelope("a")));
    tokio::task::yield_now().await;
    for _ in 0..3 {
        deliver(&mut service, envelope("a")).await.unwrap_err();
    }
    running.await.unwrap().unwrap();
    for _ in 0..3 {
        deliver(&mut service, envelope("a")).await.unwrap();
    }
    assert_eq!(
        events.all(),
        [["parked a"; 3].as_slice(), &["ran a"], &["duplicate a"; 3]].concat()
    );
    assert_eq!(*standings.lock().unwrap(), [Standing::Done; 4]);
}

#[tokio::test(start_paused = true)]
async fn parked_is_told_with_what_the_caller_is_told() {
    let told = Arc::new(Mutex::new(Duration::ZERO));
    let in_hook = told.clone();
    let store = FaultStore::timed([]);
    store.claimed_elsewhere("a", lease());
    let mut service = IdempotencyLayer::new(store)
        .on_event(move |event| {
            if let Event::Parked { retry_after, .. } = event {
                *in_hook.lock().unwrap() = *retry_after;
            }
        })
        .claim(lease())
        .layer(Handler::default());
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    assert_eq!(parked(&error).retry_after(), *told.lock().unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_the_hook_changes_no_outcome() {
    let faults = [
        (Release, Before, Fail),
        (Claims, Before, Fail),
        (Claims, Before, Fail),
        (Claims, Before, Fail),
        (Complete, Before, Fail),
        (Complete, Before, Fail),
    ];
    let (handler, store) = (Handler::default(), FaultStore::timed(faults));
    let mut service = IdempotencyLayer::new(store.clone())
        .mark_retries(0)
        .on_store_error(OnStoreError::FailOpen)
        .on_event(|event| panic!("the hook panics at {}", event.name()))
        .claim(lease())
        .layer(handler.clone());
    // Failed open and not marked; marking failed again; parked until the lease ends.
    deliver(&mut service, envelope("a")).await.unwrap();
    deliver(&mut service, envelope("a")).await.unwrap();
    parked(&deliver(&mut service, envelope("a")).await.unwrap_err());
    sleep(3 * SECOND).await;
    deliver(&mut service, envelope("a")).await.unwrap();
    deliver(&mut service, envelope("a")).await.unwrap();
    deliver(&mut service, envelope("")).await.unwrap();
    assert_eq!(handler.runs(), 4);
    assert_eq!(store.standing("a"), Standing::Done);
}

// ===== the mark =====

#[tokio::test(start_paused = true)]
async fn a_mark_is_sent_again_until_it_is_made() {
    let faults = [
        (Complete, Before, Fail),
        (Complete, Before, Hang),
        (Complete, After, Fail),
    ];
    let (handler, store) = (Handler::default(), FaultStore::timed(faults));
    let (layer, events) = claiming(&store);
    let start = Instant::now();
    let mut service = layer.layer(handler.clone());
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(start.elapsed().as_millis(), 100 + 5000 + 200 + 400);
    let owners: HashSet<_> = store.claims().iter().map(|sent| sent.owner).collect();
    assert_eq!((store.sent(Complete).len(), owners.len()), (4, 1));
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 1);
    assert_eq!(events.all(), ["ran a", "duplicate a"]);
}

#[tokio::test(start_paused = true)]
async fn a_mark_that_fails_for_good_leaves_the_claim_to_its_lease() {
    for fails in [false, true] {
        let (handler, store) = (
            Handler::default(),
            FaultStore::timed([(Complete, Before, Fail); 2]),
        );
        let (layer, events) = layer(store.clone());
        let policy = if fails {
            OnMarkError::Fail
        } else {
            OnMarkError::Ack
        };
        let layer = layer.mark_retries(1).on_mark_error(policy);
        let layer = layer.claim(lease());
        let mut service = layer.layer(handler.clone());
        match deliver(&mut service, envelope("a")).await {
            Ok(()) => assert!(!fails),
            Err(error) => assert!(fails && is_transient(&error) && operation(&error) == Complete),
        }
        assert_eq!(events.all(), ["mark_failed a"]);
        assert_eq!(store.sent(Release), [], "its effect happened");
        parked(&deliver(&mut service, envelope("a")).await.unwrap_err());
        sleep(3 * SECOND).await;
        deliver(&mut service, envelope("a")).await.unwrap();
        assert_eq!(handler.runs(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_was_lost_unnoticed_is_told_by_the_mark() {
    // The record lost it between two renewals.
    let (handler, store) = (Handler::new([Do::Sleep(SECOND / 2)]), FaultStore::timed([]));
    let (layer, events) = claiming(&store);
    let mut service = layer.layer(handler);
    let running = tokio::spawn(service.ready().await.unwrap().call(envelope("a")));
    sleep(SECOND / 4).await;
    store.forgets("a");
    running.await.unwrap().unwrap();
    assert_eq!(events.all(), ["lease_lost a", "ran a"]);
    assert_eq!(store.standing("a"), Standing::Done);
}

#[tokio::test(start_paused = true)]
async fn a_mark_that_was_sent_again_tells_of_no_loss() {
    let store = FaultStore::timed([(Complete, After, Fail)]);
    let (layer, events) = claiming(&store);
    deliver(&mut layer.layer(Handler::default()), envelope("a"))
        .await
        .unwrap();
    assert_eq!(store.sent(Complete).len(), 2);
    assert_eq!(events.all(), ["ran a"]);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_was_lost_unnoticed_is_told_by_the_release() {
    let store = FaultStore::timed([]);
    let (layer, events) = claiming(&store);
    let in_handler = store.clone();
    let mut service = layer.layer(service_fn(move |_: Envelope| {
        in_handler.forgets("a");
        ready(Err::<(), _>(Declined))
    }));
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    assert!(error.is::<Declined>());
    assert_eq!(events.all(), ["lease_lost a"]);
}

// ===== waiting =====

#[tokio::test(start_paused = true)]
async fn a_waiter_runs_when_the_first_one_failed_and_skips_when_it_did_not() {
    for (first, runs, told) in [
        (Do::Sleep(SECOND), 1, ["ran a", "duplicate a"].as_slice()),
        (Do::Fail, 2, &["ran a"]),
    ] {
        let store = FaultStore::timed([(Release, Before, Wait(SECOND))]);
        let handler = Handler::new([first]);
        let (layer, events) = claiming(&store);
        let layer = layer.wait(10 * SECOND);
        let (mut one, mut other) = (layer.layer(handler.clone()), layer.layer(handler.clone()));
        let (one, other) = tokio::join!(
            deliver(&mut one, envelope("a")),
            deliver(&mut other, envelope("a")),
        );
        assert_eq!((one.is_err(), handler.runs()), (runs == 2, runs));
        other.unwrap();
        assert_eq!(events.all(), told);
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_asks_after_pauses_that_double_up_to_a_second() {
    let mut firsts = HashSet::new();
    for _ in 0..20 {
        let store = FaultStore::timed([]);
        store.claimed_elsewhere("a", Lease::new(60 * SECOND).unwrap());
        let mut service = claiming(&store)
            .0
            .wait(10 * SECOND)
            .layer(Handler::default());
        deliver(&mut service, envelope("a")).await.unwrap_err();
        let sent = store.claims();
        // The last one is cut short by the end.
        let pauses: Vec<_> = sent.windows(2).map(|two| two[1].at - two[0].at).collect();
        for (number, pause) in pauses[..pauses.len() - 1].iter().enumerate() {
            let middle = (50 * MILLI * (1 << number.min(10))).min(SECOND);
            // A timer is late by up to a millisecond.
            let bounds = middle * 3 / 4..=middle * 5 / 4 + MILLI;
            assert!(bounds.contains(pause), "{pause:?} at {number}");
        }
        assert!((12..=20).contains(&sent.len()), "{} times", sent.len());
        let owners: HashSet<_> = sent.iter().map(|sent| sent.owner).collect();
        assert_eq!(owners.len(), 1, "it is one call");
        firsts.insert(pauses[0]);
        firsts.insert(pauses[7]);
    }
    assert!(firsts.len() > 10, "by chance");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_parked_when_its_time_is_over() {
    for max in [Duration::ZERO, 30 * MILLI, 100 * MILLI, 5 * SECOND] {
        let store = FaultStore::timed([]);
        let held = Lease::new(60 * SECOND).unwrap();
        store.claimed_elsewhere("a", held);
        let (layer, events) = claiming(&store);
        let mut service = layer.wait(max).layer(Handler::default());
        let start = Instant::now();
        let error = deliver(&mut service, envelope("a")).await.unwrap_err();
        assert_eq!(start.elapsed(), max);
        assert!(parked(&error).retry_after() <= held.length() - max);
        assert_eq!(events.all(), ["parked a"], "told once");
        assert_eq!(store.claims().last().unwrap().at, start + max);
    }
}

#[tokio::test(start_paused = true)]
async fn the_time_of_a_waiter_counts_from_the_call() {
    let store = FaultStore::timed([]);
    store.claimed_elsewhere("a", Lease::new(60 * SECOND).unwrap());
    let mut service = claiming(&store)
        .0
        .wait(2 * SECOND)
        .layer(Handler::default());
    let start = Instant::now();
    let call = service.ready().await.unwrap().call(envelope("a"));
    // Nobody polls it for a while.
    sleep(3 * SECOND / 2).await;
    parked(&call.await.unwrap_err());
    assert_eq!(start.elapsed(), 2 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_may_wait_for_ever() {
    let (handler, store) = (Handler::default(), FaultStore::timed([]));
    store.claimed_elsewhere("a", Lease::new(3600 * SECOND).unwrap());
    let mut service = claiming(&store)
        .0
        .wait(Duration::MAX)
        .layer(handler.clone());
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_store_fails_says_so() {
    for fail_open in [false, true] {
        let faults = [
            (Claims, Before, Wait(MILLI)),
            (Claims, Before, Fail),
            (Claims, Before, Fail),
            (Claims, Before, Fail),
        ];
        let (handler, store) = (Handler::default(), FaultStore::timed(faults));
        store.claimed_elsewhere("a", Lease::new(60 * SECOND).unwrap());
        let (layer, events) = layer(store.clone());
        let layer = if fail_open {
            layer.on_store_error(OnStoreError::FailOpen)
        } else {
            layer
        };
        let mut service = layer.claim(lease()).wait(9 * SECOND).layer(handler.clone());
        let answer = deliver(&mut service, envelope("a")).await;
        assert_eq!(
            commands(&store)[..5],
            [Claims, Claims, Claims, Claims, Release]
        );
        if fail_open {
            answer.unwrap();
            assert_eq!(events.all(), ["failed_open a", "ran a"]);
            assert_eq!(handler.runs(), 1);
        } else {
            assert_eq!(operation(&answer.unwrap_err()), Claims);
            assert_eq!(events.all(), ["store_error a"]);
            assert!(matches!(store.standing("a"), Standing::Claimed(_)));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_holds_nothing_of_the_inner_service() {
    let (handler, store) = (
        Handler::new([Do::Succeed, Do::Sleep(2 * SECOND)]),
        FaultStore::timed([]),
    );
    store.claimed_elsewhere("a", Lease::new(60 * SECOND).unwrap());
    let (layer, events) = claiming(&store);
    let inner = ConcurrencyLimit::new(handler.clone(), 1);
    let mut service = layer.wait(30 * SECOND).layer(inner);
    let waiter = tokio::spawn(service.ready().await.unwrap().call(envelope("a")));
    sleep(5 * SECOND).await;
    // The one permit there is serves another message.
    timeout(Duration::ZERO, deliver(&mut service, envelope("b")))
        .await
        .expect("the permit is free")
        .unwrap();
    // When the waiter has won, somebody else has the permit: it waits for it, and its claim holds.
    let running = tokio::spawn(service.ready().await.unwrap().call(envelope("c")));
    tokio::task::yield_now().await;
    assert_eq!(handler.runs(), 2);
    store.released_elsewhere("a");
    sleep(3 * SECOND / 2).await;
    assert!(matches!(store.standing("a"), Standing::Claimed(_)));
    assert_eq!(handler.runs(), 2);
    running.await.unwrap().unwrap();
    waiter.await.unwrap().unwrap();
    assert_eq!(handler.runs(), 3);
    assert_eq!(events.all(), ["ran b", "ran c", "ran a"]);
}

/// Ready at first; its clones are when they are let.
struct Turnstile {
    handler: Handler,
    gate: Arc<Mutex<Gate>>,
    ready: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Gate {
    Shut,
    Open,
    Broken,
    Panics,
}

impl Turnstile {
    fn new(handler: &Handler) -> (Self, Arc<Mutex<Gate>>) {
        let gate = Arc::new(Mutex::new(Gate::Open));
        let turnstile = Turnstile {
            handler: handler.clone(),
            gate: gate.clone(),
            ready: false,
        };
        (turnstile, gate)
    }
}

impl Clone for Turnstile {
    fn clone(&self) -> Self {
        Turnstile {
            handler: self.handler.clone(),
            gate: self.gate.clone(),
            ready: false,
        }
    }
}

impl Service<Envelope> for Turnstile {
    type Response = ();
    type Error = BoxError;
    type Future = BoxFuture<Result<(), BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match *self.gate.lock().unwrap() {
            Gate::Open => {
                self.ready = true;
                Poll::Ready(Ok(()))
            }
            Gate::Shut => {
                // Looks again in a second.
                let waker = cx.waker().clone();
                tokio::spawn(async move {
                    sleep(SECOND).await;
                    waker.wake();
                });
                Poll::Pending
            }
            Gate::Broken => Poll::Ready(Err(Declined.into())),
            Gate::Panics => panic!("not ready, as it was told"),
        }
    }

    fn call(&mut self, message: Envelope) -> Self::Future {
        assert!(self.ready, "called, although it is not ready");
        self.ready = false;
        self.handler.call(message)
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_readied_anew_once_it_has_won() {
    let (handler, store) = (Handler::default(), FaultStore::timed([]));
    store.claimed_elsewhere("a", lease());
    let (layer, _) = claiming(&store);
    let (inner, gate) = Turnstile::new(&handler);
    let mut service = layer.wait(30 * SECOND).layer(inner);
    let waiter = tokio::spawn(service.ready().await.unwrap().call(envelope("a")));
    tokio::task::yield_now().await;
    *gate.lock().unwrap() = Gate::Shut;
    // The lease ends at 3 s. From then on the claim is the waiter's, and renewed.
    sleep(10 * SECOND).await;
    assert_eq!(handler.runs(), 0);
    assert!(matches!(store.standing("a"), Standing::Claimed(_)));
    *gate.lock().unwrap() = Gate::Open;
    waiter.await.unwrap().unwrap();
    assert_eq!(handler.runs(), 1);
    assert_eq!(store.standing("a"), Standing::Done);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_service_broke_gives_its_claim_back() {
    for broken in [Gate::Broken, Gate::Panics] {
        let (handler, store) = (Handler::default(), FaultStore::timed([]));
        store.claimed_elsewhere("a", lease());
        let (layer, events) = claiming(&store);
        let (inner, gate) = Turnstile::new(&handler);
        let mut service = layer.clone().wait(30 * SECOND).layer(inner);
        let mut call = Box::pin(service.ready().await.unwrap().call(envelope("a")));
        *gate.lock().unwrap() = broken;
        if broken == Gate::Panics {
            assert!(tokio::spawn(call).await.unwrap_err().is_panic());
            layer.drained().await;
        } else {
            // Before the error is returned.
            let error = call.as_mut().await.unwrap_err();
            assert!(error.is::<Declined>());
        }
        assert_eq!(commands(&store).last(), Some(&Release));
        assert_eq!(store.standing("a"), Standing::Free);
        assert_eq!((handler.runs(), events.all()), (0, vec![]));
    }
}

// ===== a store that fails at the claim =====

#[tokio::test(start_paused = true)]
async fn a_claim_whose_reply_was_lost_is_ones_own() {
    // No claim is waited for longer than its lease.
    for (what, took) in [(Fail, 100), (Hang, lease().length().as_millis() + 100)] {
        let (handler, store) = (
            Handler::default(),
            FaultStore::timed([(Claims, After, what)]),
        );
        let (layer, events) = claiming(&store);
        let mut service = layer.layer(handler.clone());
        let start = Instant::now();
        deliver(&mut service, envelope("a")).await.unwrap();
        assert_eq!(start.elapsed().as_millis(), took);
        assert_eq!(handler.runs(), 1);
        assert_eq!(commands(&store), [Claims, Claims, Complete]);
        let owners: HashSet<_> = store.claims().iter().map(|sent| sent.owner).collect();
        assert_eq!(owners.len(), 1);
        assert_eq!(events.all(), ["ran a"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_never_takes_anothers_claim_for_its_own() {
    let (handler, store) = (
        Handler::default(),
        FaultStore::timed([(Claims, After, Fail)]),
    );
    store.claimed_elsewhere("a", lease());
    let mut service = claiming(&store).0.layer(handler.clone());
    parked(&deliver(&mut service, envelope("a")).await.unwrap_err());
    assert_eq!(handler.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_fails_for_good_is_sent_three_times_and_then_released() {
    for (when, what) in [(Before, Fail), (After, Fail), (Before, Hang), (After, Hang)] {
        let (handler, store) = (
            Handler::default(),
            FaultStore::timed([(Claims, when, what); 3]),
        );
        let (layer, events) = claiming(&store);
        let mut service = layer.layer(handler.clone());
        let start = Instant::now();
        let error = deliver(&mut service, envelope("a")).await.unwrap_err();
        assert!(is_transient(&error));
        assert_eq!(operation(&error), Claims);
        if matches!(what, Hang) {
            let error = error.downcast_ref::<StoreError>().unwrap();
            let source = std::error::Error::source(error).unwrap();
            assert_eq!(
                source.downcast_ref::<TimedOut>().unwrap().limit(),
                lease().length()
            );
        }
        let limit = if matches!(what, Hang) { 3000 } else { 0 };
        let at: Vec<_> = store
            .claims()
            .iter()
            .map(|sent| (sent.at - start).as_millis())
            .collect();
        let ends = [0, limit + 100, 2 * limit + 300, 3 * limit + 300];
        assert_eq!(at, ends);
        assert_eq!(commands(&store), [Claims, Claims, Claims, Release]);
        let owners: HashSet<_> = store.claims().iter().map(|sent| sent.owner).collect();
        assert_eq!(owners.len(), 1);
        assert_eq!(events.all(), ["store_error a"]);
        // At once, by a redelivery.
        deliver(&mut service, envelope("a")).await.unwrap();
        assert_eq!(handler.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_fails_for_good_is_told_once_whatever_the_release_says() {
    let faults = [
        (Claims, After, Fail),
        (Claims, After, Fail),
        (Claims, After, Fail),
        (Release, Before, Fail),
    ];
    let store = FaultStore::timed(faults);
    let (layer, events) = claiming(&store);
    let error = deliver(&mut layer.layer(Handler::default()), envelope("a")).await;
    assert_eq!(operation(&error.unwrap_err()), Claims);
    assert_eq!(events.all(), ["store_error a"]);
    sleep(3 * SECOND).await;
    assert_eq!(
        store.standing("a"),
        Standing::Free,
        "the lease is the backstop"
    );
}

#[tokio::test(start_paused = true)]
async fn failing_open_releases_then_runs_and_completes() {
    for when in [Before, After] {
        let (handler, store) = (
            Handler::new([Do::Sleep(SECOND)]),
            FaultStore::timed([(Claims, when, Fail); 3]),
        );
        let (layer, events) = layer(store.clone());
        let layer = layer.on_store_error(OnStoreError::FailOpen).claim(lease());
        let mut service = layer.layer(handler.clone());
        let running = tokio::spawn(service.ready().await.unwrap().call(envelope("a")));
        sleep(SECOND / 2).await;
        assert_eq!(handler.runs(), 1);
        assert_eq!(store.standing("a"), Standing::Free);
        running.await.unwrap().unwrap();
        let [c, r, m] = [Claims, Release, Complete];
        assert_eq!(commands(&store), [c, c, c, r, m]);
        assert_eq!(store.standing("a"), Standing::Done);
        deliver(&mut service, envelope("a")).await.unwrap();
        assert_eq!(handler.runs(), 1);
        assert_eq!(events.all(), ["failed_open a", "ran a", "duplicate a"]);
    }
}

#[tokio::test(start_paused = true)]
async fn failing_open_has_nothing_to_give_back() {
    let faults = [(Claims, Before, Fail); 6];
    let (handler, store) = (
        Handler::new([Do::Fail, Do::Hang]),
        FaultStore::timed(faults),
    );
    let (layer, events) = layer(store.clone());
    let layer = layer.on_store_error(OnStoreError::FailOpen).claim(lease());
    let mut service = layer.layer(handler.clone());
    let error = deliver(&mut service, envelope("a")).await.unwrap_err();
    assert!(error.is::<Declined>());
    timeout(SECOND, deliver(&mut service, envelope("a")))
        .await
        .unwrap_err();
    layer.drained().await;
    assert_eq!(store.sent(Release).len(), 2, "one after each claim");
    assert_eq!(events.all(), ["failed_open a"; 2]);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_at_a_command_leaves_no_claim() {
    for operation in [Claims, Release] {
        let store = FaultStore::timed([(operation, Before, What::Panic)]);
        let (layer, events) = claiming(&store);
        let mut service = layer.layer(Handler::new([Do::Fail]));
        let call = tokio::spawn(service.ready().await.unwrap().call(envelope("a")));
        assert!(call.await.unwrap_err().is_panic());
        layer.drained().await;
        assert_eq!(commands(&store).last(), Some(&Release));
        assert_eq!(store.standing("a"), Standing::Free);
        assert!(events.all().is_empty());
    }
}

// ===== the types =====

#[tokio::test(start_paused = true)]
async fn any_request_type_is_served() {
    // Neither Send nor 'static, and the closure neither: nothing here needs it.
    #[derive(Clone)]
    struct Job<'a> {
        key: &'a str,
        _not_send: Rc<()>,
    }

    let runs = std::cell::Cell::new(0);
    let prefix = String::from("billing:");
    let done = Rc::new(true);
    let mut service = IdempotencyLayer::new(MemoryStore::new())
        .id_from(|job: &Job<'_>| Some(format!("{prefix}{}", job.key)))
        .done_if(|_: &Option<Rc<()>>| *done)
        .claim(lease())
        .wait(SECOND)
        .layer(service_fn(|job: Job<'_>| {
            runs.set(runs.get() + 1);
            ready(Ok::<_, Infallible>(Some(job._not_send)))
        }));
    let text = String::from("a");
    let job = Job {
        key: &text,
        _not_send: Rc::new(()),
    };
    deliver(&mut service, job.clone()).await.unwrap();
    deliver(&mut service, job).await.unwrap();
    assert_eq!(runs.get(), 1);
}

#[test]
fn types_are_what_users_need_them_to_be() {
    fn all<T: Clone + Send + Sync + 'static>() {}
    fn send<T: Send + 'static>(_: &T) {}
    fn sync<T: Sync>(_: &T) {}
    fn debug<T: std::fmt::Debug>(_: &T) {}

    type Extract = fn(&Envelope) -> Option<String>;

    all::<ClaimLayer<MemoryStore>>();
    all::<ClaimLayer<FaultStore, Extract, fn(&()) -> bool>>();
    all::<ClaimService<Handler, MemoryStore>>();
    debug(&claiming(&FaultStore::new([])).0);
    // Neither the store nor the closures have a Debug of their own.
    let layer = IdempotencyLayer::new(FaultStore::new([]))
        .id_from(|_: &Envelope| Some("a"))
        .done_if(|(): &()| true)
        .claim(lease());
    debug(&layer.layer(()));
    let service = |_: Envelope| ready(Ok::<_, Infallible>(()));
    let mut quick = IdempotencyLayer::new(MemoryStore::new())
        .claim(lease())
        .layer(service_fn(service));
    let call = quick.call(envelope("a"));
    send(&call);
    sync(&call);
    debug(&call);
    send(&layer.layer(Handler::default()).call(envelope("a")));
}

#[test]
fn a_setting_changed_on_a_clone_is_the_clones_own() {
    let store = FaultStore::new([]);
    let (layer, _) = claiming(&store);
    let other = layer.clone().wait(SECOND);
    let shown = |layer: &ClaimLayer<_>| format!("{layer:?}").contains("wait: Some(1s)");
    assert_eq!((shown(&layer), shown(&other)), (false, true));
    let mut service = other.layer(Handler::default());
    assert_eq!(service.get_ref().runs(), 0);
    now(deliver(&mut service, envelope("a"))).unwrap();
    assert_eq!(service.get_mut().runs(), 1);
    assert_eq!(service.into_inner().runs(), 1);
    now(deliver(&mut layer.layer(Handler::default()), envelope("a"))).unwrap();
    assert_eq!(store.sent(Complete).len(), 1, "they share the record");
}

#[test]
fn readiness_is_the_inner_services() {
    let (layer, _) = claiming(&FaultStore::new([]));
    let mut service = layer.layer(Broken);
    let error = now(ServiceExt::<Envelope>::ready(&mut service)).map(drop);
    assert!(error.unwrap_err().is::<Declined>());
}

#[test]
#[should_panic(expected = "polled after completion")]
fn a_future_that_is_done_is_not_polled_again() {
    let (layer, _) = claiming(&FaultStore::new([]));
    let mut service = layer.layer(Handler::default());
    let mut call = pin!(service.call(envelope("a")));
    now(call.as_mut()).unwrap();
    let _ = now(call);
}

// ===== a claim that is over before the handler begins =====

/// The answer comes after the lease: the message may have been run by somebody else.
#[tokio::test(start_paused = true)]
async fn a_claim_that_is_answered_too_late_is_sent_again() {
    let late = Wait(lease().length() + SECOND);
    let store = FaultStore::timed([(Claims, After, late)]);
    let (layer, events) = claiming(&store);
    let handler = Handler::default();
    let call = tokio::spawn(layer.layer(handler.clone()).oneshot(envelope("a")));
    sleep(lease().length()).await;
    let other = layer.layer(handler.clone()).oneshot(envelope("a")).await;
    other.unwrap();
    call.await.unwrap().unwrap();
    assert_eq!(handler.runs(), 1);
    assert_eq!(events.all(), ["ran a", "duplicate a"]);
}

/// Won after a wait, and lost before the service was ready: what somebody else did is not done again.
#[tokio::test(start_paused = true)]
async fn a_claim_that_is_lost_before_its_service_is_ready_is_sent_again() {
    let (handler, store) = (Handler::default(), FaultStore::timed([]));
    store.claimed_elsewhere("a", lease());
    let (layer, events) = claiming(&store);
    let (inner, gate) = Turnstile::new(&handler);
    let call = tokio::spawn(layer.wait(60 * SECOND).layer(inner).oneshot(envelope("a")));
    sleep(SECOND / 10).await;
    *gate.lock().unwrap() = Gate::Shut;
    store.released_elsewhere("a");
    sleep(2 * SECOND).await;
    assert!(matches!(store.standing("a"), Standing::Claimed(_)));
    // The record is lost, and another worker does the message.
    store.forgets("a");
    now(store.inner.remember(&"a".into())).unwrap();
    sleep(2 * SECOND).await;
    assert_eq!(events.all(), ["lease_lost a"]);
    *gate.lock().unwrap() = Gate::Open;
    call.await.unwrap().unwrap();
    assert_eq!(handler.runs(), 0);
    assert_eq!(events.all(), ["lease_lost a", "duplicate a"]);
}
