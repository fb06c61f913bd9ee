//! Calls that are dropped at each point, on each kind of thread: what becomes of their claims.

mod support;

use std::{
    collections::HashSet,
    future::{Future, poll_fn, ready},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    task::{Context, Poll, Waker},
    time::Duration,
};
use support::{
    BoxFuture, Declined, Do, Events, FaultStore, Handler, Standing,
    What::{self, Fail, Hang, Wait},
    When::{self, After, Before},
    deliver, envelope, layer, now,
};
use tokio::{
    runtime::{Builder, Runtime},
    time::{Instant, sleep, timeout},
};
use tower::{Layer, Service, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_idempotency::{
    BoxError, ClaimLayer, ClaimStore, Envelope, IdempotencyLayer, Lease, MemoryStore, MessageId,
    OnDrop, OnStoreError, Owner, Parked, Store,
    error::Operation::{self, Claim, Complete, Release},
    store,
};

const SECOND: Duration = Duration::from_secs(1);

fn lease() -> Lease {
    Lease::new(3 * SECOND).unwrap()
}

fn claiming(store: &FaultStore) -> (ClaimLayer<FaultStore>, Events) {
    let (layer, events) = layer(store.clone());
    (layer.claim(lease()), events)
}

fn commands(store: &FaultStore) -> Vec<Operation> {
    store.claims().iter().map(|sent| sent.operation).collect()
}

// ===== at each point =====

/// Polls a call as a runtime does, until it has waited this often; answers whether it ended.
async fn waits_times<F: Future + ?Sized>(times: usize, mut call: Pin<&mut F>) -> bool {
    let mut left = times;
    poll_fn(|cx| {
        if left > 0 && call.as_mut().poll(cx).is_ready() {
            return Poll::Ready(true);
        }
        left = left.saturating_sub(1);
        if left == 0 {
            Poll::Ready(false)
        } else {
            Poll::Pending
        }
    })
    .await
}

/// What is found after a drop.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Found {
    /// Nobody holds it.
    Free,
    /// Its handler was running: nobody holds it, unless claims are kept.
    Running,
    /// It had its effect, and that is recorded.
    Done,
}

/// A way that a call goes.
#[derive(Clone, Copy)]
struct Way<'a> {
    faults: &'a [(Operation, When, What)],
    script: &'a [Do],
    fail_open: bool,
    /// What is found when it is dropped after no wait, after one, and so on until it is over.
    found: &'a [Found],
}

/// Drops a call at each point of its way.
async fn drops(way: Way<'_>, policy: OnDrop) {
    for (waits, &found) in way.found.iter().enumerate() {
        let at = format!("dropped after {waits} waits, {policy:?}");
        let handler = Handler::new(way.script.iter().copied());
        let store = FaultStore::timed(way.faults.iter().copied());
        let (layer, events) = layer(store.clone());
        let layer = layer.on_store_error(if way.fail_open {
            OnStoreError::FailOpen
        } else {
            OnStoreError::FailClosed
        });
        let layer = layer.claim(lease()).on_drop(policy);
        // One permit, so that what is not given back shows.
        let mut service = layer.layer(ConcurrencyLimit::new(handler.clone(), 1));
        let mut call = Box::pin(service.ready().await.unwrap().call(envelope("a")));
        let ended = waits_times(waits, call.as_mut()).await;
        assert_eq!(ended, waits + 1 == way.found.len(), "{at}");
        let sent = commands(&store);
        drop(call);
        assert_eq!(commands(&store), sent, "{at}: the drop calls no store");
        layer.drained().await;

        let keeps = found == Found::Running && policy == OnDrop::KeepUntilLease;
        let standing = store.standing("a");
        match found {
            Found::Done => assert_eq!(standing, Standing::Done, "{at}"),
            Found::Running if keeps => {
                assert!(matches!(standing, Standing::Claimed(_)), "{at}");
                assert_eq!(store.sent(Release), [], "{at}");
            }
            Found::Running | Found::Free => assert_eq!(standing, Standing::Free, "{at}"),
        }
        // Nothing is given back after the handler's Ok.
        let (marks, all) = (found == Found::Done, commands(&store));
        let mark = all.iter().position(|&command| command == Complete);
        assert_eq!(mark.is_some(), marks, "{at}");
        assert!(
            mark.is_none_or(|mark| !all[mark..].contains(&Release)),
            "{at}"
        );
        let mut told = events.all();
        told.retain(|event| event != "failed_open a" && event != "store_error a");
        assert_eq!(told, if marks { vec!["ran a"] } else { vec![] }, "{at}");
        let owners: HashSet<_> = store.claims().iter().map(|sent| sent.owner).collect();
        assert!(owners.len() <= 1, "{at}");

        // A redelivery at that moment, and one after the lease.
        store.heals();
        let runs = handler.runs();
        let again = deliver(&mut service, envelope("a")).await;
        if keeps {
            assert!(again.unwrap_err().is::<Parked>(), "{at}");
            assert_eq!(handler.runs(), runs, "{at}");
            sleep(3 * SECOND).await;
            deliver(&mut service, envelope("a")).await.unwrap();
        }
        assert_eq!(handler.runs() > runs, !marks, "{at}");
    }
}

const HALF: What = Wait(Duration::from_millis(500));

#[tokio::test(start_paused = true)]
async fn a_call_may_be_dropped_at_each_point() {
    use Found::{Done, Free, Running};

    for policy in [OnDrop::Release, OnDrop::KeepUntilLease] {
        let way = Way {
            faults: &[
                (Claim, After, HALF),
                (Complete, Before, Fail),
                (Complete, Before, HALF),
            ],
            script: &[Do::Sleep(SECOND)],
            fail_open: false,
            // Unpolled, claiming, running, pausing, marking, over.
            found: &[Free, Free, Running, Done, Done, Done],
        };
        drops(way, policy).await;
        let way = Way {
            faults: &[(Claim, Before, HALF)],
            found: &[Free, Free, Running, Done],
            ..way
        };
        drops(way, policy).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_mark_that_was_made_before_the_drop_is_no_lost_claim() {
    // The call's own command did it, and the one that is sent after the drop finds it done.
    let way = Way {
        faults: &[(Complete, After, HALF)],
        script: &[Do::Sleep(SECOND)],
        fail_open: false,
        // Unpolled, running, marking, over.
        found: &[Found::Free, Found::Running, Found::Done, Found::Done],
    };
    drops(way, OnDrop::Release).await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_fails_may_be_dropped_at_each_point() {
    for policy in [OnDrop::Release, OnDrop::KeepUntilLease] {
        for when in [Before, After] {
            let way = Way {
                faults: &[(Claim, when, HALF), (Release, when, HALF)],
                script: &[Do::Fail],
                fail_open: false,
                // Unpolled, claiming, releasing, over.
                found: &[Found::Free; 4],
            };
            drops(way, policy).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_fails_may_be_dropped_at_each_point() {
    use Found::{Done, Free};

    // It was made each time, and its answer lost.
    let lost = (Claim, After, Fail);
    let way = Way {
        faults: &[lost, (Claim, After, HALF), (Release, Before, HALF)],
        script: &[Do::Fail],
        fail_open: false,
        // Unpolled, pausing, claiming, releasing, over.
        found: &[Free; 5],
    };
    drops(way, OnDrop::Release).await;
    let way = Way {
        faults: &[lost, lost, lost, (Release, Before, HALF)],
        // Unpolled, pausing twice, releasing, over.
        found: &[Free; 5],
        ..way
    };
    drops(way, OnDrop::Release).await;
    // Failing open, the handler runs without a claim.
    let way = Way {
        faults: &[
            lost,
            lost,
            lost,
            (Release, Before, HALF),
            (Complete, Before, HALF),
        ],
        script: &[Do::Sleep(SECOND)],
        fail_open: true,
        // Unpolled, pausing twice, releasing, running, marking, over.
        found: &[Free, Free, Free, Free, Free, Done, Done],
    };
    drops(way, OnDrop::KeepUntilLease).await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_may_be_dropped_at_each_point() {
    // Unpolled, claiming, waiting, claiming, waiting.
    for waits in 0..5 {
        let store = FaultStore::timed([(Claim, Before, HALF); 2]);
        store.claimed_elsewhere("a", lease());
        let (layer, events) = claiming(&store);
        let layer = layer.wait(10 * SECOND);
        let mut service = layer.layer(ConcurrencyLimit::new(Handler::default(), 1));
        let mut call = Box::pin(service.ready().await.unwrap().call(envelope("a")));
        assert!(!waits_times(waits, call.as_mut()).await);
        drop(call);
        layer.drained().await;
        // Only a claim that was not answered has to be released: it may arrive after that, so a release
        // that found nothing is sent again three times.
        let releases = if waits % 2 == 1 { 4 } else { 0 };
        assert_eq!(store.sent(Release).len(), releases, "after {waits} waits");
        let standing = store.standing("a");
        assert!(matches!(standing, Standing::Claimed(_)), "not its own");
        assert!(events.all().is_empty());
        store.heals();
        deliver(&mut service, envelope("a")).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_has_won_may_be_dropped_before_its_service_is_ready() {
    for policy in [OnDrop::Release, OnDrop::KeepUntilLease] {
        let store = FaultStore::timed([]);
        store.claimed_elsewhere("a", lease());
        let (layer, events) = claiming(&store);
        let layer = layer.wait(10 * SECOND).on_drop(policy);
        let mut service = layer.layer(ConcurrencyLimit::new(Handler::new([Do::Hang]), 1));
        let call = service.ready().await.unwrap().call(envelope("a"));
        let call = tokio::spawn(call);
        tokio::task::yield_now().await;
        let other = tokio::spawn(service.ready().await.unwrap().call(envelope("b")));
        store.released_elsewhere("a");
        sleep(2 * SECOND).await;
        let own = store.sent(Claim)[0].owner;
        assert!(store.inner.renew(&"a".into(), own, lease()).await.unwrap());
        call.abort();
        call.await.unwrap_err();
        layer.drained().await;
        assert_eq!(store.standing("a"), Standing::Free, "nothing was running");
        other.abort();
        assert!(events.all().is_empty());
    }
}

// ===== what a drop leaves =====

#[tokio::test(start_paused = true)]
async fn a_handler_that_panics_gives_its_claim_back() {
    let store = FaultStore::timed([]);
    let (layer, events) = claiming(&store);
    let in_call = |_: Envelope| -> std::future::Ready<Result<(), Declined>> {
        panic!("the handler panics in its call, as it was told")
    };
    let mut service = layer.layer(service_fn(in_call));
    let call = service.ready().await.unwrap().call(envelope("a"));
    assert!(tokio::spawn(call).await.unwrap_err().is_panic());
    let mut service = layer.layer(Handler::new([Do::Panic]));
    let call = service.ready().await.unwrap().call(envelope("b"));
    assert!(tokio::spawn(call).await.unwrap_err().is_panic());
    layer.drained().await;
    for id in ["a", "b"] {
        assert_eq!(store.standing(id), Standing::Free);
    }
    assert_eq!(commands(&store), [Claim, Release, Claim, Release]);
    assert!(events.all().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_predicate_that_panics_gives_the_claim_back() {
    let store = FaultStore::timed([]);
    let (layer, _) = layer(store.clone());
    let layer = layer
        .done_if(|(): &()| panic!("the predicate panics, as it was told"))
        .claim(lease());
    let mut service = layer.layer(Handler::default());
    let call = service.ready().await.unwrap().call(envelope("a"));
    assert!(tokio::spawn(call).await.unwrap_err().is_panic());
    layer.drained().await;
    assert_eq!(store.standing("a"), Standing::Free);
}

#[tokio::test(start_paused = true)]
async fn what_is_left_is_sent_again_and_reported_like_any_other() {
    for (operation, script, told) in [
        (Complete, Do::Succeed, "mark_failed a"),
        (Release, Do::Hang, "release_failed a"),
    ] {
        let first = usize::from(operation == Complete);
        // The call's own mark hangs; a release was not sent yet.
        let hang = std::iter::repeat_n((operation, Before, Hang), first);
        for (faults, ends) in [(3, true), (4, false)] {
            let store = FaultStore::timed(hang.clone());
            let (layer, events) = claiming(&store);
            let mut service = layer.layer(Handler::new([script]));
            for _ in 0..faults {
                store.fault(operation, Before, Fail);
            }
            timeout(SECOND, deliver(&mut service, envelope("a")))
                .await
                .unwrap_err();
            let start = Instant::now();
            layer.drained().await;
            assert_eq!(start.elapsed().as_millis(), 100 + 200 + 400);
            assert_eq!(store.sent(operation).len(), first + 4);
            match (ends, operation) {
                (true, Complete) => assert_eq!(events.all(), ["ran a"]),
                (true, _) => assert!(events.all().is_empty()),
                (false, _) => assert_eq!(events.all(), [told]),
            }
            let standing = store.standing("a");
            match (ends, operation) {
                (true, Complete) => assert_eq!(standing, Standing::Done),
                (true, _) => assert_eq!(standing, Standing::Free),
                (false, _) => assert!(matches!(standing, Standing::Claimed(_))),
            }
            // At latest after the lease.
            sleep(3 * SECOND).await;
            assert_eq!(store.standing("a") == Standing::Free, !(ends && first == 1));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn drained_waits_for_marks_and_releases_and_for_nothing_else() {
    let faults = [
        (Complete, Before, Hang),
        (Complete, Before, Wait(2 * SECOND)),
        (Release, Before, Wait(SECOND)),
    ];
    let store = FaultStore::timed(faults);
    let (layer, events) = claiming(&store);
    let start = Instant::now();
    layer.drained().await;
    // One marks, one runs, one runs on.
    let script = [Do::Succeed, Do::Hang, Do::Hang];
    let mut service = layer.layer(Handler::new(script));
    let mut calls = Vec::new();
    for id in ["a", "b", "c"] {
        let mut call = Box::pin(service.call(envelope(id)));
        waits_times(1, call.as_mut()).await;
        calls.push(call);
    }
    assert_eq!(store.standing("b"), Standing::Claimed(3 * SECOND));
    drop(calls.drain(..2));
    layer.clone().drained().await;
    assert_eq!(start.elapsed(), 2 * SECOND);
    assert_eq!(store.standing("a"), Standing::Done);
    assert_eq!(store.standing("b"), Standing::Free);
    assert!(matches!(store.standing("c"), Standing::Claimed(_)));
    assert_eq!(events.all(), ["ran a"]);
    layer.drained().await;
    assert_eq!(start.elapsed(), 2 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_at_what_is_left_is_told_as_abandoned() {
    for (operation, script) in [(Complete, Do::Succeed), (Release, Do::Hang)] {
        let store = FaultStore::timed([]);
        if operation == Complete {
            store.fault(Complete, Before, Hang);
        }
        store.fault(operation, Before, What::Panic);
        let (layer, events) = claiming(&store);
        let mut service = layer.layer(Handler::new([script]));
        timeout(SECOND, deliver(&mut service, envelope("a")))
            .await
            .unwrap_err();
        layer.drained().await;
        assert_eq!(events.all(), ["abandoned a"]);
        assert_eq!(events.abandoned(), [operation]);
        // It is renewed no longer.
        sleep(3 * SECOND).await;
        assert_eq!(store.standing("a"), Standing::Free);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_at_the_mark_is_asked_again_by_a_task() {
    let (handler, store) = (
        Handler::default(),
        FaultStore::timed([(Complete, Before, What::Panic)]),
    );
    let (layer, events) = claiming(&store);
    let mut service = layer.layer(handler.clone());
    let call = service.ready().await.unwrap().call(envelope("a"));
    assert!(tokio::spawn(call).await.unwrap_err().is_panic());
    layer.drained().await;
    assert_eq!(store.standing("a"), Standing::Done);
    assert_eq!(events.all(), ["ran a"]);
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(handler.runs(), 1);
}

/// What a handler holds: gone in time, whoever claims the message next finds nothing of it at work.
struct Holds(Events, FaultStore);

impl Drop for Holds {
    fn drop(&mut self) {
        let early = self.1.sent(Release).is_empty();
        self.0.tell(if early { "in time" } else { "too late" });
    }
}

/// A handler whose future keeps what it holds after its end, too.
fn holding(
    events: &Events,
    store: &FaultStore,
    fails: bool,
) -> impl Fn(Envelope) -> BoxFuture<Result<(), Declined>> + Clone + use<> {
    let (events, store) = (events.clone(), store.clone());
    move |_| {
        let holds = Holds(events.clone(), store.clone());
        Box::pin(poll_fn(move |_| {
            let _ = &holds;
            if fails {
                Poll::Ready(Err(Declined))
            } else {
                Poll::Pending
            }
        }))
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_call_holds_is_gone_before_its_claim_is() {
    for fails in [false, true] {
        let store = FaultStore::timed([]);
        let (layer, events) = claiming(&store);
        let mut service = layer.layer(service_fn(holding(&events, &store, fails)));
        let mut call = Box::pin(service.ready().await.unwrap().call(envelope("a")));
        assert_eq!(waits_times(1, call.as_mut()).await, fails);
        drop(call);
        layer.drained().await;
        assert_eq!(events.all(), ["in time"]);
        assert_eq!(store.standing("a"), Standing::Free);
    }
}

#[test]
fn what_a_call_holds_is_gone_before_its_claim_is_handed_on() {
    let store = FaultStore::new([]);
    let (layer, events) = claiming(&store);
    let mut service = layer.layer(service_fn(holding(&events, &store, false)));
    let mut call = Box::pin(service.call(envelope("a")));
    let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending());
    drop(call);
    assert_eq!(events.all(), ["in time", "abandoned a"]);
}

// ===== where a call is dropped =====

/// A record whose time is set by hand, since these runtimes take the real one.
fn hand_timed(faults: &[(Operation, When, What)]) -> (FaultStore, Arc<AtomicU64>) {
    let seconds = Arc::new(AtomicU64::new(0));
    let clock = seconds.clone();
    let memory = MemoryStore::builder()
        .clock(move || Duration::from_secs(clock.load(Ordering::SeqCst)))
        .build()
        .unwrap();
    let store = FaultStore::over(memory, faults.iter().copied());
    (store, seconds)
}

fn worker() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

/// A call that waits for its handler or for its mark, polled on a runtime of its own.
struct Waiting {
    runtime: Runtime,
    store: FaultStore,
    seconds: Arc<AtomicU64>,
    layer: ClaimLayer<FaultStore>,
    events: Events,
    told: mpsc::Receiver<()>,
    call: BoxFuture<()>,
}

/// What is due when the call is dropped.
const DUE: [Operation; 2] = [Release, Complete];

fn waiting(due: Operation) -> Waiting {
    let faults: &[_] = match due {
        Complete => &[(Complete, Before, Hang)],
        _ => &[],
    };
    let script = if due == Complete {
        Do::Succeed
    } else {
        Do::Hang
    };
    let (store, seconds) = hand_timed(faults);
    let (tell, told) = mpsc::channel();
    let events = Events::default();
    let hook = events.hook();
    let layer = IdempotencyLayer::new(store.clone())
        .on_event(move |event| {
            hook(event);
            let _ = tell.send(());
        })
        // Long enough for no renewal to be due.
        .claim(Lease::new(3600 * SECOND).unwrap());
    let mut service = layer.layer(Handler::new([script]));
    let runtime = worker();
    let mut call: BoxFuture<()> = Box::pin(async move {
        drop(service.call(envelope("a")).await);
    });
    runtime.block_on(waits_times(1, call.as_mut()));
    Waiting {
        runtime,
        store,
        seconds,
        layer,
        events,
        told,
        call,
    }
}

/// It is told once, and the message is runnable when its lease has ended, and not before.
fn is_abandoned(due: Operation, store: &FaultStore, seconds: &AtomicU64, events: &Events) {
    assert_eq!(events.all(), ["abandoned a"]);
    assert_eq!(events.abandoned(), [due]);
    assert_eq!(store.sent(Release), []);
    seconds.store(3599, Ordering::SeqCst);
    assert!(matches!(store.standing("a"), Standing::Claimed(_)));
    seconds.store(3600, Ordering::SeqCst);
    assert_eq!(store.standing("a"), Standing::Free);
}

fn is_finished(due: Operation, store: &FaultStore) {
    let standing = store.standing("a");
    match due {
        Complete => assert_eq!(standing, Standing::Done),
        _ => assert_eq!(standing, Standing::Free),
    }
}

#[test]
fn dropped_on_a_thread_without_a_runtime_it_goes_to_the_one_it_was_polled_on() {
    for due in DUE {
        let it = waiting(due);
        std::thread::spawn(move || drop(it.call)).join().unwrap();
        it.runtime.block_on(it.layer.drained());
        is_finished(due, &it.store);
        let told: &[_] = if due == Complete { &["ran a"] } else { &[] };
        assert_eq!(it.events.all(), told);
    }
}

#[test]
fn dropped_on_another_runtime_it_goes_to_that_one() {
    for due in DUE {
        let it = waiting(due);
        drop(it.runtime);
        let other = Builder::new_current_thread().enable_all().build().unwrap();
        other.block_on(async {
            drop(it.call);
            it.layer.drained().await;
        });
        is_finished(due, &it.store);
    }
}

#[test]
fn dropped_after_its_runtime_it_is_reported_as_abandoned() {
    for due in DUE {
        let it = waiting(due);
        drop(it.runtime);
        drop(it.call);
        is_abandoned(due, &it.store, &it.seconds, &it.events);
        now(it.layer.drained());
    }
}

#[test]
fn dropped_by_a_runtime_that_shuts_down_it_is_reported_as_abandoned() {
    let ends: [fn(Runtime); 3] = [
        |runtime| drop(runtime),
        |runtime| runtime.shutdown_timeout(10 * SECOND),
        |runtime| runtime.shutdown_background(),
    ];
    for due in DUE {
        for end in ends {
            let it = waiting(due);
            it.runtime.spawn(it.call);
            end(it.runtime);
            it.told.recv_timeout(30 * SECOND).unwrap();
            is_abandoned(due, &it.store, &it.seconds, &it.events);
        }
    }
}

#[test]
fn dropped_by_a_runtime_of_one_thread_that_shuts_down_it_is_reported_as_abandoned() {
    for due in DUE {
        let it = waiting(due);
        drop(it.runtime);
        let one = Builder::new_current_thread().build().unwrap();
        one.spawn(it.call);
        drop(one);
        is_abandoned(due, &it.store, &it.seconds, &it.events);
    }
}

#[test]
fn a_runtime_of_one_thread_finishes_what_drained_waits_for() {
    for due in DUE {
        let it = waiting(due);
        drop(it.runtime);
        let one = Builder::new_current_thread().enable_all().build().unwrap();
        let call = one.spawn(it.call);
        one.block_on(async {
            tokio::task::yield_now().await;
            call.abort();
            call.await.unwrap_err();
            it.layer.drained().await;
        });
        drop(one);
        is_finished(due, &it.store);
    }
}

#[test]
fn a_claim_that_is_kept_is_nobodys_to_report() {
    let (store, seconds) = hand_timed(&[]);
    let (layer, events) = layer(store.clone());
    let layer = layer
        .claim(Lease::new(3600 * SECOND).unwrap())
        .on_drop(OnDrop::KeepUntilLease);
    let mut call = Box::pin(layer.layer(Handler::new([Do::Hang])).call(envelope("a")));
    let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending());
    drop(call);
    now(layer.drained());
    assert!(events.all().is_empty());
    assert!(matches!(store.standing("a"), Standing::Claimed(_)));
    seconds.store(3600, Ordering::SeqCst);
    assert_eq!(store.standing("a"), Standing::Free);
}

// ===== on no runtime at all =====

#[test]
fn without_a_runtime_nothing_is_timed_and_nothing_panics() {
    let faults = [
        (Claim, Before, Fail),
        (Claim, After, Fail),
        (Complete, Before, Fail),
        (Complete, After, Fail),
    ];
    let (handler, (store, _)) = (Handler::new([Do::Fail]), hand_timed(&faults));
    let (layer, events) = claiming(&store);
    let mut service = layer.clone().wait(SECOND).layer(handler.clone());
    // Sent again without a pause; released; run; parked at once, since there is no timer to wait by.
    now(deliver(&mut service, envelope("a"))).unwrap_err();
    now(deliver(&mut service, envelope("a"))).unwrap();
    store.claimed_elsewhere("b", lease());
    let error = now(deliver(&mut service, envelope("b"))).unwrap_err();
    assert!(error.is::<Parked>());
    assert_eq!(handler.runs(), 2);
    assert_eq!(events.all(), ["ran a", "parked b"]);
    let [c, r, m] = [Claim, Release, Complete];
    assert_eq!(commands(&store), [c, c, c, r, c, m, m, m, c]);
}

#[test]
fn without_a_runtime_a_claim_holds_for_one_lease_and_its_loss_is_told() {
    let (store, seconds) = hand_timed(&[]);
    let (layer, events) = claiming(&store);
    let in_handler = seconds.clone();
    let late = move |_: Envelope| {
        in_handler.store(3, Ordering::SeqCst);
        ready(Ok::<_, Declined>(()))
    };
    now(deliver(&mut layer.layer(service_fn(late)), envelope("a"))).unwrap();
    assert_eq!(events.all(), ["lease_lost a", "ran a"]);
}

#[test]
fn without_a_runtime_a_drop_is_reported_as_abandoned() {
    for (due, script) in [(Release, Do::Hang), (Complete, Do::Succeed)] {
        let (store, seconds) = hand_timed(&[(Complete, Before, Hang)]);
        let (layer, events) = layer(store.clone());
        let layer = layer.claim(Lease::new(3600 * SECOND).unwrap());
        let mut call = Box::pin(layer.layer(Handler::new([script])).call(envelope("a")));
        let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
        let sent = commands(&store);
        drop(call);
        assert_eq!(commands(&store), sent, "the drop calls no store");
        is_abandoned(due, &store, &seconds, &events);
    }
}

#[test]
fn on_a_runtime_without_a_time_driver_nothing_is_timed_and_nothing_lost() {
    let runtime = Builder::new_current_thread().build().unwrap();
    let faults = [(Claim, After, Fail), (Complete, After, Fail)];
    let (store, _) = hand_timed(&faults);
    let (layer, events) = claiming(&store);
    let mut service = layer.layer(Handler::new([Do::Succeed, Do::Hang]));
    runtime.block_on(async {
        deliver(&mut service, envelope("a")).await.unwrap();
        let mut hanging = Box::pin(service.call(envelope("b")));
        waits_times(1, hanging.as_mut()).await;
        drop(hanging);
        layer.drained().await;
    });
    assert_eq!(store.standing("a"), Standing::Done);
    assert_eq!(store.standing("b"), Standing::Free);
    assert_eq!(events.all(), ["ran a"]);
}

// ===== a claim that arrives after its release =====

/// Its claims go on when their call is dropped, and arrive a while later: as over a pool of connections.
#[derive(Clone)]
struct Late(MemoryStore);

impl Store for Late {
    type Error = BoxError;
    type Future<T: Send + 'static> = BoxFuture<Result<T, BoxError>>;

    fn seen(&self, id: &MessageId) -> Self::Future<bool> {
        let seen = self.0.seen(id);
        Box::pin(async { Ok(seen.await?) })
    }

    fn remember(&self, id: &MessageId) -> Self::Future<()> {
        let done = self.0.remember(id);
        Box::pin(async { Ok(done.await?) })
    }

    fn forget(&self, id: &MessageId) -> Self::Future<()> {
        let done = self.0.forget(id);
        Box::pin(async { Ok(done.await?) })
    }
}

impl ClaimStore for Late {
    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<store::Claim> {
        let (store, id) = (self.0.clone(), id.clone());
        let arrives = tokio::spawn(async move {
            sleep(SECOND / 10).await;
            store.claim(&id, owner, lease).await
        });
        Box::pin(async { Ok(arrives.await??) })
    }

    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<bool> {
        let renewed = self.0.renew(id, owner, lease);
        Box::pin(async { Ok(renewed.await?) })
    }

    fn complete(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
        let done = self.0.complete(id, owner);
        Box::pin(async { Ok(done.await?) })
    }

    fn release(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
        let released = self.0.release(id, owner);
        Box::pin(async { Ok(released.await?) })
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_arrives_after_its_call_was_dropped_is_released() {
    let store = Late(MemoryStore::new());
    let (layer, events) = layer(store.clone());
    let layer = layer.claim(lease());
    let mut call = Box::pin(layer.layer(Handler::default()).call(envelope("a")));
    assert!(!waits_times(1, call.as_mut()).await);
    drop(call);
    layer.drained().await;
    let other = store.0.claim(&"a".into(), Owner::random(), lease());
    assert_eq!(now(other).unwrap(), store::Claim::Won);
    assert!(events.all().is_empty());
}
