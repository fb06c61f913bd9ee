//! Claims that are renewed, that are lost, and that are taken again; the task that does it.

mod support;

use std::{
    collections::HashMap,
    convert::Infallible,
    future::pending,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Waker},
    time::Duration,
};
use support::{
    BoxFuture, Declined, Do, ELSEWHERE, Events, FaultStore, Handler, Sent, Standing,
    What::{self, Fail, Hang, Wait},
    When::{After, Before},
    deliver, envelope, layer, now,
};
use tokio::{
    runtime::{Builder, Handle, Runtime},
    task::JoinHandle,
    time::{Instant, sleep, sleep_until, timeout},
};
use tower::{Layer, Service, service_fn};
use tower_idempotency::{
    BoxError, Claim, ClaimLayer, ClaimStore, Envelope, IdempotencyLayer, Lease, MemoryStore,
    MessageId, OnDrop, Owner, Parked, Store,
    error::Operation::{self, Claim as Claims, Complete, Release, Renew},
};

const SECOND: Duration = Duration::from_secs(1);
const MILLI: Duration = Duration::from_millis(1);

/// Three seconds, renewed each second, looked at each quarter of one.
fn lease() -> Lease {
    Lease::new(3 * SECOND).unwrap()
}

fn claiming(store: &FaultStore) -> (ClaimLayer<FaultStore>, Events) {
    let (layer, events) = layer(store.clone());
    (layer.claim(lease()), events)
}

type Call = JoinHandle<Result<(), BoxError>>;

/// Starts a call, as far as its first wait.
async fn start(layer: &ClaimLayer<FaultStore>, id: &str, does: Do) -> Call {
    let call = tokio::spawn(layer.layer(Handler::new([does])).call(envelope(id)));
    tokio::task::yield_now().await;
    call
}

/// Ends a call, if it has not ended by itself.
async fn ended(call: Call) {
    call.abort();
    let _ = call.await;
}

fn commands(store: &FaultStore) -> Vec<Operation> {
    store.claims().iter().map(|sent| sent.operation).collect()
}

fn claimed(store: &FaultStore, id: &str) -> bool {
    matches!(store.standing(id), Standing::Claimed(_))
}

/// Whether these are all by one.
fn one_owner(sent: &[Sent]) -> bool {
    sent.windows(2).all(|two| two[0].owner == two[1].owner)
}

const NOTHING: [&str; 0] = [];

// ===== it holds =====

#[tokio::test(start_paused = true)]
async fn a_handler_may_take_longer_than_many_leases() {
    for length in [3 * SECOND, 200 * MILLI] {
        let (store, lease) = (FaultStore::timed([]), Lease::new(length).unwrap());
        let (layer, events) = layer(store.clone());
        let layer = layer.claim(lease);
        let handler = Handler::new([Do::Sleep(20 * length)]);
        let running = tokio::spawn(layer.layer(handler.clone()).call(envelope("a")));
        tokio::task::yield_now().await;
        let mut service = layer.layer(handler.clone());
        let (begin, mut copies) = (Instant::now(), 0);
        while begin.elapsed() < 20 * length - 2 * MILLI {
            let error = deliver(&mut service, envelope("a")).await.unwrap_err();
            assert!(error.is::<Parked>());
            copies += 1;
            sleep(length / 60).await;
        }
        running.await.unwrap().unwrap();
        deliver(&mut service, envelope("a")).await.unwrap();
        assert_eq!(handler.runs(), 1);
        let told = events.all();
        assert_eq!(told[..copies], vec!["parked a"; copies]);
        assert_eq!(told[copies..], ["ran a", "duplicate a"]);
        // About every third, and not more often.
        let sent = store.sent(Renew);
        assert!(one_owner(&sent));
        let third = length / 3;
        for two in sent.windows(2) {
            let gap = two[1].at - two[0].at;
            let bounds = third * 3 / 4 - 2 * MILLI..=third + 2 * MILLI;
            assert!(bounds.contains(&gap), "{gap:?} of {length:?}");
        }
        assert!((60..=82).contains(&sent.len()), "{} renewals", sent.len());
    }
}

#[tokio::test(start_paused = true)]
async fn the_shortest_lease_holds() {
    let store = FaultStore::timed([]);
    let (layer, events) = layer(store.clone());
    let layer = layer.claim(Lease::new(Lease::MIN).unwrap());
    let running = start(&layer, "a", Do::Sleep(SECOND)).await;
    for _ in 0..999 {
        assert!(claimed(&store, "a"));
        sleep(MILLI).await;
    }
    running.await.unwrap().unwrap();
    assert_eq!(events.all(), ["ran a"]);
}

#[tokio::test(start_paused = true)]
async fn it_is_renewed_as_often_as_the_lease_says() {
    let store = FaultStore::timed([]);
    let (layer, _) = layer(store.clone());
    let lease = Lease::new(60 * SECOND).unwrap();
    let layer = layer.claim(lease.renew_every(SECOND).unwrap());
    let running = start(&layer, "a", Do::Hang).await;
    sleep(100 * SECOND).await;
    let renewals = store.sent(Renew).len();
    assert!((99..=135).contains(&renewals), "{renewals}");
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_fails_is_tried_again() {
    for fault in [
        (Renew, Before, Fail),
        (Renew, After, Fail),
        (Renew, Before, Hang),
        (Renew, After, Hang),
        (Renew, Before, What::Panic),
    ] {
        let store = FaultStore::timed([fault]);
        let (layer, events) = claiming(&store);
        let running = start(&layer, "a", Do::Sleep(30 * SECOND)).await;
        for _ in 0..290 {
            assert!(claimed(&store, "a"), "{fault:?}");
            sleep(100 * MILLI).await;
        }
        let sent = store.sent(Renew);
        let gap = sent[1].at - sent[0].at;
        // One that hangs is given a second. Those that fail are tried at the next look.
        let most = if matches!(fault.2, Hang) {
            1250 * MILLI
        } else {
            250 * MILLI
        };
        assert!(gap <= most + 3 * MILLI, "{gap:?} after {fault:?}");
        running.await.unwrap().unwrap();
        assert_eq!(events.all(), ["ran a"]);
    }
}

#[tokio::test(start_paused = true)]
async fn renewals_of_which_many_fail_keep_the_claim() {
    let store = FaultStore::timed([]);
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut failing = 0;
    for _ in 0..400 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let fails = random >> 33 < (1 << 31) / 10 * 4;
        failing += usize::from(fails);
        let what = if fails { Fail } else { Wait(MILLI) };
        store.fault(Renew, Before, what);
    }
    assert!((130..=190).contains(&failing), "{failing} of 400");
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", Do::Sleep(90 * SECOND)).await;
    for _ in 0..899 {
        assert!(claimed(&store, "a"));
        sleep(100 * MILLI).await;
    }
    running.await.unwrap().unwrap();
    assert_eq!(events.all(), ["ran a"]);
}

#[tokio::test(start_paused = true)]
async fn the_claim_holds_until_the_mark_is_answered() {
    // The store is slow to mark: the call's own mark, and one that a dropped call left.
    for dropped in [false, true] {
        let store = FaultStore::timed([]);
        let (layer, events) = layer(store.clone());
        let layer = layer.store_timeout(60 * SECOND).claim(lease());
        store.fault(Complete, Before, Wait(20 * SECOND));
        store.fault(Complete, Before, Wait(20 * SECOND));
        let running = start(&layer, "a", Do::Succeed).await;
        assert_eq!(commands(&store), [Claims, Complete]);
        if dropped {
            running.abort();
            sleep(MILLI).await;
        }
        for _ in 0..190 {
            assert!(claimed(&store, "a"), "dropped: {dropped}");
            sleep(100 * MILLI).await;
        }
        layer.drained().await;
        sleep(2 * SECOND).await;
        assert_eq!(store.standing("a"), Standing::Done);
        assert_eq!(events.all(), ["ran a"]);
        // And no longer.
        let renewals = store.sent(Renew).len();
        assert!(renewals >= 19);
        sleep(5 * SECOND).await;
        assert_eq!(store.sent(Renew).len(), renewals);
        let _ = running.await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_given_back_is_renewed_no_longer() {
    for does in [Do::FailAfter(SECOND / 2), Do::Hang] {
        let store = FaultStore::timed([(Release, Before, Fail); 5]);
        let (layer, events) = claiming(&store);
        let running = start(&layer, "a", does).await;
        sleep(SECOND / 2 + MILLI).await;
        ended(running).await;
        layer.drained().await;
        assert_eq!(events.all(), ["release_failed a"]);
        sleep(5 * SECOND).await;
        assert_eq!(store.sent(Renew), []);
        assert_eq!(store.standing("a"), Standing::Free);
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_kept_ends_with_its_lease() {
    let store = FaultStore::timed([]);
    let (layer, events) = claiming(&store);
    let layer = layer.on_drop(OnDrop::KeepUntilLease);
    let running = start(&layer, "a", Do::Hang).await;
    sleep(9 * SECOND + SECOND / 10).await;
    let renewed = store.sent(Renew).last().unwrap().at;
    running.abort();
    running.await.unwrap_err();
    layer.drained().await;
    sleep_until(renewed + 3 * SECOND - 2 * MILLI).await;
    assert!(claimed(&store, "a"));
    sleep(3 * MILLI).await;
    assert_eq!(store.standing("a"), Standing::Free);
    assert_eq!((store.sent(Release), events.all()), (vec![], vec![]));
}

// ===== it is lost =====

/// Renewals fail from now on.
fn renewals_fail(store: &FaultStore) {
    (0..1000).for_each(|_| store.fault(Renew, Before, Fail));
}

#[tokio::test(start_paused = true)]
async fn renewals_that_fail_past_the_end_are_told_once_and_the_handler_runs_on() {
    let store = FaultStore::timed([]);
    renewals_fail(&store);
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", Do::Sleep(10 * SECOND)).await;
    sleep(3 * SECOND - 3 * MILLI).await;
    assert_eq!(events.all(), NOTHING, "it is still held");
    sleep(SECOND / 4 + 6 * MILLI).await;
    assert_eq!(events.all(), ["lease_lost a"]);
    let tries = store.sent(Renew).len();
    assert!((8..=11).contains(&tries), "{tries} tries");
    assert_eq!(store.sent(Claims).len(), 1, "an error says no no");
    sleep(SECOND).await;
    assert_eq!(store.sent(Renew).len(), tries, "what is lost is left alone");
    // Somebody else may claim it; the first one's effect is an effect.
    store.claimed_elsewhere("a", lease());
    running.await.unwrap().unwrap();
    assert_eq!(events.all(), ["lease_lost a", "ran a"]);
    assert_eq!(store.standing("a"), Standing::Done);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_fails_after_its_claim_was_lost_leaves_the_next_one_alone() {
    let store = FaultStore::timed([]);
    renewals_fail(&store);
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", Do::FailAfter(4 * SECOND)).await;
    sleep(7 * SECOND / 2).await;
    store.claimed_elsewhere("a", lease());
    let error = running.await.unwrap().unwrap_err();
    assert!(error.is::<Declined>());
    assert_eq!(store.sent(Release).len(), 1);
    let held = store.inner.renew(&"a".into(), ELSEWHERE, lease()).await;
    assert!(held.unwrap(), "what is another's was not released");
    assert_eq!(events.all(), ["lease_lost a"]);
}

#[tokio::test(start_paused = true)]
async fn hung_renewals_past_the_end_are_told_once() {
    let store = FaultStore::timed([(Renew, Before, Hang); 100]);
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", Do::Sleep(10 * SECOND)).await;
    sleep(2999 * MILLI).await;
    assert_eq!(events.all(), NOTHING);
    sleep(1300 * MILLI).await;
    assert_eq!(events.all(), ["lease_lost a"]);
    running.await.unwrap().unwrap();
    assert_eq!(events.all(), ["lease_lost a", "ran a"]);
}

#[tokio::test(start_paused = true)]
async fn a_record_that_lost_the_claim_is_claimed_again() {
    let store = FaultStore::timed([]);
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", Do::Sleep(10 * SECOND)).await;
    sleep(SECOND / 2).await;
    store.forgets("a");
    sleep(SECOND / 2).await;
    assert_eq!(commands(&store), [Claims, Renew, Claims]);
    assert!(one_owner(&store.claims()));
    assert!(claimed(&store, "a"));
    // It is renewed as before.
    sleep(8 * SECOND).await;
    assert!(claimed(&store, "a"));
    assert_eq!(store.sent(Claims).len(), 2);
    running.await.unwrap().unwrap();
    assert_eq!(events.all(), ["ran a"], "nobody came between");
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_somebody_else_took_is_lost() {
    for ok in [true, false] {
        let store = FaultStore::timed([]);
        let (layer, events) = claiming(&store);
        let does = if ok {
            Do::Sleep(10 * SECOND)
        } else {
            Do::FailAfter(10 * SECOND)
        };
        let running = start(&layer, "a", does).await;
        sleep(SECOND / 2).await;
        store.forgets("a");
        store.claimed_elsewhere("a", Lease::new(60 * SECOND).unwrap());
        sleep(SECOND / 2).await;
        assert_eq!(events.all(), ["lease_lost a"]);
        sleep(5 * SECOND).await;
        assert_eq!(commands(&store), [Claims, Renew, Claims]);
        assert_eq!(running.await.unwrap().is_ok(), ok);
        let told: &[_] = if ok {
            &["lease_lost a", "ran a"]
        } else {
            &["lease_lost a"]
        };
        assert_eq!(events.all(), told);
        assert_eq!(store.standing("a") == Standing::Done, ok);
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_that_somebody_else_had_done_is_lost() {
    let store = FaultStore::timed([]);
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", Do::Sleep(5 * SECOND)).await;
    sleep(SECOND / 2).await;
    store.inner.complete(&"a".into(), ELSEWHERE).await.unwrap();
    sleep(SECOND).await;
    assert_eq!(commands(&store), [Claims, Renew, Claims]);
    assert_eq!(events.all(), ["lease_lost a"]);
    running.await.unwrap().unwrap();
    assert_eq!(events.all(), ["lease_lost a", "ran a"]);
}

#[tokio::test(start_paused = true)]
async fn what_our_own_mark_did_is_no_loss() {
    // The mark is made and its answer lost: a renewal finds the message done, by us.
    let store = FaultStore::timed([(Complete, After, Hang)]);
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", Do::Succeed).await;
    sleep(4 * SECOND).await;
    assert!(store.sent(Renew).len() > 1);
    assert!(store.sent(Claims).len() > 2, "it was claimed again: done");
    assert_eq!(events.all(), NOTHING);
    running.await.unwrap().unwrap();
    assert_eq!(events.all(), ["ran a"]);

    // So it is when the task that marks is that of a dropped call.
    let store = FaultStore::timed([
        (Complete, After, Hang),
        (Complete, Before, Wait(4 * SECOND)),
    ]);
    let (layer, events) = claiming(&store);
    ended(start(&layer, "a", Do::Succeed).await).await;
    layer.drained().await;
    sleep(5 * SECOND).await;
    assert!(store.sent(Claims).len() > 2);
    assert_eq!(events.all(), ["ran a"]);
}

#[tokio::test(start_paused = true)]
async fn the_lease_counts_from_before_the_claim_was_sent() {
    // The claim is made at once, and its answer takes two of the three seconds.
    let store = FaultStore::timed([(Claims, After, Wait(2 * SECOND))]);
    let (layer, events) = claiming(&store);
    let begin = Instant::now();
    let running = start(&layer, "a", Do::Sleep(20 * SECOND)).await;
    sleep(2 * SECOND + 10 * MILLI).await;
    let first = store.sent(Renew)[0].at - begin;
    assert!(first <= 2 * SECOND + 3 * MILLI, "renewed at {first:?}");
    for _ in 0..170 {
        assert!(claimed(&store, "a"));
        sleep(100 * MILLI).await;
    }
    running.await.unwrap().unwrap();
    assert_eq!(events.all(), ["ran a"]);

    let store = FaultStore::timed([(Claims, After, Wait(2 * SECOND))]);
    renewals_fail(&store);
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", Do::Hang).await;
    sleep(3 * SECOND - 3 * MILLI).await;
    assert_eq!(events.all(), NOTHING);
    sleep(SECOND / 4 + 6 * MILLI).await;
    assert_eq!(events.all(), ["lease_lost a"]);
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn the_lease_counts_from_before_the_renewal_was_sent() {
    // Renewed at 0.75 s, answered at 1.70 s, and never again: it ends at 3.75 s.
    let store = FaultStore::timed([(Renew, After, Wait(950 * MILLI))]);
    renewals_fail(&store);
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", Do::Hang).await;
    sleep(SECOND).await;
    let end = store.sent(Renew)[0].at + 3 * SECOND;
    sleep_until(end - 3 * MILLI).await;
    assert_eq!(events.all(), NOTHING);
    sleep_until(end + SECOND / 4 + 3 * MILLI).await;
    assert_eq!(events.all(), ["lease_lost a"]);
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn the_lease_counts_from_when_it_was_taken_again() {
    // The renewal that found nothing took most of a second; the claim after it begins a lease.
    let store = FaultStore::timed([(Renew, Before, Wait(950 * MILLI))]);
    renewals_fail(&store);
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", Do::Hang).await;
    sleep(SECOND).await;
    store.forgets("a");
    sleep(SECOND).await;
    let end = store.sent(Claims)[1].at + 3 * SECOND;
    sleep_until(end - 3 * MILLI).await;
    assert_eq!(events.all(), NOTHING);
    sleep_until(end + SECOND / 4 + 3 * MILLI).await;
    assert_eq!(events.all(), ["lease_lost a"]);
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn the_mark_of_a_first_one_ends_the_claim_of_the_second() {
    let (one, other) = {
        let store = FaultStore::timed([]);
        let other = FaultStore::over(store.inner.clone(), []);
        (store, other)
    };
    renewals_fail(&one);
    let (first, first_told) = claiming(&one);
    let (second, second_told) = claiming(&other);
    let first_call = start(&first, "a", Do::Sleep(5 * SECOND)).await;
    sleep(7 * SECOND / 2).await;
    let second_call = start(&second, "a", Do::Sleep(5 * SECOND)).await;
    first_call.await.unwrap().unwrap();
    assert_eq!(one.standing("a"), Standing::Done);
    second_call.await.unwrap().unwrap();
    assert_eq!(first_told.all(), ["lease_lost a", "ran a"]);
    assert_eq!(second_told.all(), ["lease_lost a", "ran a"]);
}

// ===== a call leaves while a renewal is under way =====

#[tokio::test(start_paused = true)]
async fn a_renewal_that_comes_after_the_release_takes_nothing_again() {
    // Sent at 0.75 s, it reaches the store at 1.25 s; the release is made at 1 s.
    for does in [Do::FailAfter(SECOND), Do::Hang, Do::Sleep(SECOND)] {
        let store = FaultStore::timed([(Renew, Before, Wait(SECOND / 2))]);
        let (layer, events) = claiming(&store);
        let running = start(&layer, "a", does).await;
        sleep(SECOND + 10 * MILLI).await;
        ended(running).await;
        layer.drained().await;
        let end = if matches!(does, Do::Sleep(_)) {
            Complete
        } else {
            Release
        };
        assert_eq!(commands(&store), [Claims, Renew, end]);
        let standing = store.standing("a");
        assert_eq!(standing == Standing::Free, end == Release);
        sleep(5 * SECOND).await;
        assert_eq!(commands(&store), [Claims, Renew, end]);
        assert_eq!(store.standing("a"), standing);
        let told: &[_] = if end == Complete { &["ran a"] } else { &[] };
        assert_eq!(events.all(), told);
    }
}

/// The record loses the claim, which is taken again by a command that is slow; meanwhile the call
/// leaves.
async fn leaves_while_it_is_taken_again(
    does: Do,
    what: What,
) -> (FaultStore, Events, ClaimLayer<FaultStore>) {
    let store = FaultStore::timed([]);
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", does).await;
    sleep(SECOND / 2).await;
    store.forgets("a");
    let when = if matches!(what, Wait(_)) {
        Before
    } else {
        After
    };
    store.fault(Claims, when, what);
    sleep(SECOND / 2 + 10 * MILLI).await;
    // Sent at 0.75 s.
    assert_eq!(commands(&store)[..3], [Claims, Renew, Claims]);
    ended(running).await;
    (store, events, layer)
}

#[tokio::test(start_paused = true)]
async fn what_is_taken_again_for_a_call_that_has_left_is_released() {
    for does in [Do::FailAfter(SECOND), Do::Hang] {
        // Won after the release was answered.
        let slow = Wait(SECOND / 2);
        let (store, events, layer) = leaves_while_it_is_taken_again(does, slow).await;
        layer.drained().await;
        assert_eq!(commands(&store), [Claims, Renew, Claims, Release]);
        store.fault(Release, Before, Wait(SECOND));
        sleep(SECOND / 2).await;
        assert!(claimed(&store, "a"), "it came too late");
        let waited = Instant::now();
        layer.drained().await;
        assert!(
            waited.elapsed() > SECOND / 2,
            "waits for this release as well"
        );
        assert_eq!(commands(&store), [Claims, Renew, Claims, Release, Release]);
        assert_eq!(store.standing("a"), Standing::Free);
        assert!(one_owner(&store.claims()));
        // Only who has a handler to end is told.
        let told: &[_] = if matches!(does, Do::Hang) {
            &[]
        } else {
            &["lease_lost a"]
        };
        assert_eq!(events.all(), told);
    }
}

#[tokio::test(start_paused = true)]
async fn what_may_have_been_taken_again_for_a_call_that_has_left_is_released() {
    // Taken, and its answer lost. Until the time limit that could be anything.
    let (store, _, layer) = leaves_while_it_is_taken_again(Do::Hang, Hang).await;
    layer.drained().await;
    assert_eq!(store.standing("a"), Standing::Free);
    // Somebody else's by now: that is not touched.
    store.claimed_elsewhere("a", Lease::new(60 * SECOND).unwrap());
    sleep(2 * SECOND).await;
    layer.drained().await;
    let released = [Claims, Renew, Claims, Release, Release];
    assert_eq!(commands(&store), released);
    store.released_elsewhere("a");
}

#[tokio::test(start_paused = true)]
async fn a_message_that_is_done_by_then_is_not_released() {
    let slow = Wait(SECOND / 2);
    let (store, _, _) = leaves_while_it_is_taken_again(Do::Sleep(SECOND), slow).await;
    sleep(2 * SECOND).await;
    assert_eq!(commands(&store), [Claims, Renew, Claims, Complete]);
    assert_eq!(store.standing("a"), Standing::Done);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_was_taken_again_late_is_told_as_lost_by_nobody() {
    // An unknown answer to it is tried again, as one to a renewal.
    let store = FaultStore::timed([]);
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", Do::Sleep(10 * SECOND)).await;
    sleep(SECOND / 2).await;
    store.forgets("a");
    store.fault(Claims, After, Fail);
    for _ in 0..90 {
        sleep(100 * MILLI).await;
        assert!(claimed(&store, "a") || store.sent(Claims).len() == 1);
    }
    running.await.unwrap().unwrap();
    assert_eq!(events.all(), ["ran a"]);
}

// ===== the task =====

fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

/// Calls that are held by the test itself, so that each task is one of the layer's.
type Held = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

fn hold(layer: &ClaimLayer<FaultStore>, id: &str) -> Held {
    let mut call: Held = Box::pin(layer.layer(Handler::new([Do::Hang])).call(envelope(id)));
    let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending());
    call
}

#[tokio::test(start_paused = true)]
async fn one_task_serves_a_layer_and_its_clones_and_ends_when_there_is_nothing_to_do() {
    let store = FaultStore::timed([]);
    let (layer, _) = claiming(&store);
    assert_eq!(tasks(), 0);
    for round in 0..3 {
        let mut calls = Vec::new();
        for number in 0..10 {
            let layer = layer.clone().wait(SECOND * number);
            calls.push(hold(&layer, &format!("{round}-{number}")));
            assert_eq!(tasks(), 1);
            sleep(SECOND).await;
        }
        assert_eq!(tasks(), 1);
        calls.truncate(1);
        layer.drained().await;
        sleep(10 * SECOND).await;
        assert_eq!(tasks(), 1, "one claim is left");
        assert!(claimed(&store, &format!("{round}-0")));
        drop(calls);
        layer.drained().await;
        sleep(SECOND).await;
        assert_eq!(tasks(), 0, "ended in round {round}");
    }
    // A busy layer has one all the time, which need not be started for each message.
    for number in 0..100 {
        deliver(
            &mut layer.layer(Handler::default()),
            envelope(&number.to_string()),
        )
        .await
        .unwrap();
        sleep(100 * MILLI).await;
        assert_eq!(tasks(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn two_layers_have_two_tasks() {
    let store = FaultStore::timed([]);
    let (seen_set, _) = layer(store.clone());
    let (one, other) = (seen_set.clone().claim(lease()), seen_set.claim(lease()));
    let calls = [hold(&one, "a"), hold(&other, "b"), hold(&one, "c")];
    assert_eq!(tasks(), 2);
    drop(calls);
    sleep(SECOND).await;
    assert_eq!(tasks(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_task_lives_on_without_the_layer_and_not_without_claims() {
    let store = FaultStore::timed([]);
    let (layer, _) = claiming(&store);
    let call = hold(&layer, "a");
    drop(layer);
    sleep(10 * SECOND).await;
    assert!(claimed(&store, "a"));
    drop(call);
    sleep(SECOND).await;
    assert_eq!(tasks(), 0);
    assert_eq!(store.standing("a"), Standing::Free);
}

/// Counts the renewals that are under way, each of which takes a while.
#[derive(Clone)]
struct Slow {
    inner: MemoryStore,
    under_way: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

impl Store for Slow {
    type Error = Infallible;
    type Future<T: Send + 'static> = BoxFuture<Result<T, Infallible>>;

    fn seen(&self, id: &MessageId) -> Self::Future<bool> {
        Box::pin(self.inner.seen(id))
    }
    fn remember(&self, id: &MessageId) -> Self::Future<()> {
        Box::pin(self.inner.remember(id))
    }
    fn forget(&self, id: &MessageId) -> Self::Future<()> {
        Box::pin(self.inner.forget(id))
    }
}

impl ClaimStore for Slow {
    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<Claim> {
        Box::pin(self.inner.claim(id, owner, lease))
    }
    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<bool> {
        let (store, id) = (self.clone(), id.clone());
        Box::pin(async move {
            let under_way = store.under_way.fetch_add(1, Ordering::SeqCst) + 1;
            store.most.fetch_max(under_way, Ordering::SeqCst);
            sleep(5 * MILLI).await;
            store.under_way.fetch_sub(1, Ordering::SeqCst);
            store.inner.renew(&id, owner, lease).await
        })
    }
    fn complete(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
        Box::pin(self.inner.complete(id, owner))
    }
    fn release(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
        Box::pin(self.inner.release(id, owner))
    }
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_claims_are_all_renewed_and_few_at_once() {
    let timed = FaultStore::timed([]);
    let store = Slow {
        inner: timed.inner.clone(),
        under_way: Arc::default(),
        most: Arc::default(),
    };
    let events = Events::default();
    let layer = IdempotencyLayer::new(store.clone())
        .on_event(events.hook())
        .claim(Lease::new(30 * SECOND).unwrap());
    let mut calls = Vec::new();
    for number in 0..10_000 {
        let hang = |_: Envelope| pending::<Result<(), Infallible>>();
        let mut service = layer.layer(service_fn(hang));
        let mut call = Box::pin(service.call(envelope(&number.to_string())));
        let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
        calls.push(call);
    }
    assert_eq!(tasks(), 1);
    sleep(100 * SECOND).await;
    for number in 0..10_000 {
        assert!(claimed(&timed, &number.to_string()), "{number}");
    }
    assert_eq!(store.most.load(Ordering::SeqCst), 64);
    assert_eq!(events.all(), NOTHING);
}

#[tokio::test(start_paused = true)]
async fn claims_that_hang_hold_up_no_others() {
    let store = FaultStore::timed([(Renew, Before, Hang); 32]);
    let (layer, events) = claiming(&store);
    let calls: Vec<_> = (0..100).map(|n| hold(&layer, &n.to_string())).collect();
    sleep(20 * SECOND).await;
    for number in 0..100 {
        assert!(claimed(&store, &number.to_string()), "{number}");
    }
    assert_eq!(events.all(), NOTHING);
    drop(calls);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_has_left_before_its_turn_is_not_renewed() {
    // More are due than are renewed at once.
    let store = FaultStore::timed([(Renew, Before, Hang); 64]);
    let (layer, _) = claiming(&store);
    let mut calls: Vec<_> = (0..100).map(|n| hold(&layer, &n.to_string())).collect();
    // They have not taken so long yet that others go on beside them.
    sleep(SECOND * 3 / 4 + SECOND / 20).await;
    assert_eq!(store.sent(Renew).len(), 64);
    // One that stays has the task go on.
    calls.truncate(1);
    let stays = store.sent(Claims)[0].owner;
    sleep(10 * SECOND).await;
    let mut renewed = renewals(&store);
    assert!(renewed.remove(&stays).is_some_and(|times| times > 5));
    assert!(renewed.len() <= 64, "{} claims", renewed.len());
}

// ===== runtimes that end =====

fn worker() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

fn hold_on(runtime: &Runtime, layer: &ClaimLayer<FaultStore>, id: &str) -> Held {
    let _entered = runtime.enter();
    hold(layer, id)
}

/// Waits until it is so, on a machine that may be slow.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = std::time::Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < 60 * SECOND, "never came: {what}");
        std::thread::sleep(10 * MILLI);
    }
}

/// How often each claim was renewed.
fn renewals(store: &FaultStore) -> HashMap<Owner, usize> {
    let mut renewals = HashMap::new();
    for sent in store.sent(Renew) {
        *renewals.entry(sent.owner).or_default() += 1;
    }
    renewals
}

#[test]
fn renewals_go_on_where_a_runtime_does_when_another_one_ends() {
    let store = FaultStore::new([]);
    let (layer, _) = layer(store.clone());
    let layer = layer.claim(Lease::new(SECOND).unwrap());
    let (first, second) = (worker(), worker());
    // The first claim starts the task, which so is on the first runtime.
    let call = hold_on(&first, &layer, "a");
    let held = hold_on(&second, &layer, "b");
    let owner = store.sent(Claims)[1].owner;
    until("a renewal", || renewals(&store).contains_key(&owner));
    drop(first);
    drop(call);
    let _late = hold_on(&second, &layer, "c");
    let late = store.sent(Claims)[2].owner;
    let before = renewals(&store)[&owner];
    until("renewals of both", || {
        let renewals = renewals(&store);
        renewals[&owner] > before + 2 && renewals.get(&late).is_some_and(|&times| times > 2)
    });
    assert_eq!(second.metrics().num_alive_tasks(), 1);
    drop(held);
}

#[test]
fn renewals_go_on_when_nobody_drives_the_runtime_of_the_task() {
    let store = FaultStore::new([]);
    let (layer, _) = layer(store.clone());
    let layer = layer.claim(Lease::new(SECOND).unwrap());
    let still = Builder::new_current_thread().enable_all().build().unwrap();
    let _call = hold_on(&still, &layer, "a");
    // Claims come elsewhere until the task is late, and one of them starts another.
    let driven = worker();
    let mut held = Vec::new();
    until("a task that is driven", || {
        held.push(hold_on(&driven, &layer, &format!("b{}", held.len())));
        driven.metrics().num_alive_tasks() == 1
    });
    until("renewals of all", || {
        let renewals = renewals(&store);
        renewals.len() == held.len() + 1 && renewals.values().all(|&times| times > 2)
    });
    // Driven again, the first one has nothing to do any more.
    until("the end of the first task", || {
        still.block_on(tokio::task::yield_now());
        still.metrics().num_alive_tasks() == 0
    });
    let before = renewals(&store);
    until("more of them", || {
        let now = renewals(&store);
        now.iter().all(|(owner, times)| *times > before[owner])
    });
}

#[test]
fn a_claim_on_a_runtime_that_shuts_down_panics_nowhere_and_blocks_nobody() {
    // Claims while its runtime is being dropped: the task is dropped at once, under no lock.
    struct ClaimsInDrop(ClaimLayer<FaultStore>);

    impl Drop for ClaimsInDrop {
        fn drop(&mut self) {
            now(deliver(
                &mut self.0.layer(Handler::default()),
                envelope("a"),
            ))
            .unwrap();
        }
    }

    let store = FaultStore::new([]);
    let (layer, events) = claiming(&store);
    let runtime = worker();
    let claims = ClaimsInDrop(layer.clone());
    runtime.spawn(async move {
        let _claims = claims;
        pending::<()>().await;
    });
    drop(runtime);
    assert_eq!(events.all(), ["ran a"]);
    assert_eq!(store.standing("a"), Standing::Done);
    // And the next one is served as ever.
    worker().block_on(async {
        deliver(&mut layer.layer(Handler::default()), envelope("b"))
            .await
            .unwrap();
        let hanging = layer.layer(Handler::new([Do::Hang])).call(envelope("c"));
        timeout(10 * MILLI, hanging).await.unwrap_err();
        layer.drained().await;
    });
    assert_eq!(store.standing("c"), Standing::Free);
}

#[test]
fn renewals_go_on_elsewhere_when_the_runtime_of_the_task_ends() {
    let store = FaultStore::new([]);
    let (layer, _) = layer(store.clone());
    let layer = layer.claim(Lease::new(SECOND).unwrap());
    let (first, second) = (worker(), worker());
    // Claims of a runtime that is gone as well are no way on.
    let calls: Vec<_> = (0..100)
        .map(|n| hold_on(&first, &layer, &format!("a{n}")))
        .collect();
    let _held = hold_on(&second, &layer, "b");
    let owner = store.sent(Claims)[100].owner;
    until("a renewal", || renewals(&store).contains_key(&owner));
    drop(first);
    let before = renewals(&store)[&owner];
    until("renewals without another claim", || {
        renewals(&store)[&owner] > before + 3
    });
    drop(calls);
}

#[tokio::test(start_paused = true)]
async fn what_is_taken_again_for_a_call_that_keeps_its_claim_is_kept() {
    let store = FaultStore::timed([]);
    let (layer, _) = claiming(&store);
    let layer = layer.on_drop(OnDrop::KeepUntilLease);
    let running = start(&layer, "a", Do::Hang).await;
    sleep(SECOND / 2).await;
    store.forgets("a");
    store.fault(Claims, Before, Wait(SECOND / 2));
    sleep(SECOND / 2).await;
    ended(running).await;
    sleep(SECOND).await;
    assert!(claimed(&store, "a"));
    sleep(3 * SECOND).await;
    assert_eq!(store.standing("a"), Standing::Free);
}

/// Nor after a mark that failed: its effect happened.
#[tokio::test(start_paused = true)]
async fn what_is_taken_again_after_a_mark_that_failed_is_kept() {
    let store = FaultStore::timed([(Complete, Before, Fail); 1]);
    let (layer, events) = layer(store.clone());
    let layer = layer.mark_retries(0).claim(Lease::new(3 * SECOND).unwrap());
    let running = start(&layer, "a", Do::Sleep(SECOND)).await;
    sleep(SECOND / 2).await;
    store.forgets("a");
    store.fault(Claims, Before, Wait(SECOND));
    assert!(running.await.unwrap().is_ok());
    assert_eq!(events.all(), ["mark_failed a"]);
    sleep(2 * SECOND).await;
    assert!(claimed(&store, "a"));
    sleep(3 * SECOND).await;
    assert_eq!(store.standing("a"), Standing::Free);
}

/// Gives no answer to the renewals of some ids, as a cluster does one node of which is gone.
#[tokio::test(start_paused = true)]
async fn renewals_without_an_answer_hold_up_no_others() {
    let store = FaultStore::timed([]);
    store.hangs_renewals_of(|id| id.starts_with("hung"));
    let (layer, events) = layer(store.clone());
    let layer = layer.claim(Lease::new(12 * SECOND).unwrap());
    let hung: Vec<Held> = (0..1000)
        .map(|n| hold(&layer, &format!("hung{n}")))
        .collect();
    let good: Vec<Held> = (0..100)
        .map(|n| hold(&layer, &format!("good{n}")))
        .collect();
    for _ in 0..60 {
        sleep(SECOND / 2).await;
        for n in 0..good.len() {
            assert!(claimed(&store, &format!("good{n}")), "good{n}");
        }
    }
    let lost = events.all();
    assert!(
        lost.iter()
            .all(|event| event.starts_with("lease_lost hung"))
    );
    drop(hung);
}

/// What ends on the way to the store is not lost.
#[tokio::test(start_paused = true)]
async fn a_release_that_takes_longer_than_its_claim_tells_of_no_loss() {
    let store = FaultStore::timed([(Release, Before, Wait(4 * SECOND))]);
    let (layer, events) = claiming(&store);
    let running = start(&layer, "a", Do::Fail).await;
    assert!(running.await.unwrap().is_err());
    assert_eq!(events.all(), NOTHING);
}
