//! Claims that are over before their handler begins, and what old commands do to what is won anew.

mod support;

use std::{
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
    time::Duration,
};
use support::{
    BoxFuture, Do, Events, FaultStore, Handler, Standing,
    What::{Fail, Wait},
    When::{After, Before},
    envelope, layer,
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};
use tower::{Layer, Service, ServiceExt};
use tower_idempotency::{
    BoxError, ClaimLayer, Envelope, Lease,
    error::Operation::{Claim as Claims, Release, Renew},
};

const SECOND: Duration = Duration::from_secs(1);
const MILLI: Duration = Duration::from_millis(1);

fn lease() -> Lease {
    Lease::new(3 * SECOND).unwrap()
}

fn claiming(store: &FaultStore) -> (ClaimLayer<FaultStore>, Events) {
    let (layer, events) = layer(store.clone());
    (layer.claim(lease()), events)
}

/// Ready while its gate is open.
#[derive(Clone)]
struct Gated {
    handler: Handler,
    gate: Arc<Mutex<Gate>>,
}

#[derive(Default)]
struct Gate {
    open: bool,
    waker: Option<Waker>,
}

fn set(gate: &Mutex<Gate>, open: bool) {
    let mut gate = gate.lock().unwrap();
    gate.open = open;
    if let Some(waker) = gate.waker.take() {
        waker.wake();
    }
}

impl Service<Envelope> for Gated {
    type Response = ();
    type Error = BoxError;
    type Future = BoxFuture<Result<(), BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        let mut gate = self.gate.lock().unwrap();
        if gate.open {
            return Poll::Ready(Ok(()));
        }
        gate.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    fn call(&mut self, message: Envelope) -> Self::Future {
        self.handler.call(message)
    }
}

struct Readying {
    call: JoinHandle<Result<(), BoxError>>,
    gate: Arc<Mutex<Gate>>,
    won: Instant,
}

/// A call that waited, has won its claim, and waits for its service.
async fn readying(
    store: &FaultStore,
    layer: &ClaimLayer<FaultStore>,
    handler: &Handler,
) -> Readying {
    store.claimed_elsewhere("a", lease());
    let gate = Arc::new(Mutex::new(Gate::default()));
    set(&gate, true);
    let inner = Gated {
        handler: handler.clone(),
        gate: gate.clone(),
    };
    let layer = layer.clone().wait(60 * SECOND);
    let call = tokio::spawn(layer.layer(inner).oneshot(envelope("a")));
    sleep(10 * MILLI).await;
    set(&gate, false);
    store.released_elsewhere("a");
    sleep(200 * MILLI).await;
    assert!(matches!(store.standing("a"), Standing::Claimed(_)));
    let won = store.sent(Claims).last().unwrap().at;
    Readying { call, gate, won }
}

impl Readying {
    async fn after(&self, time: Duration) {
        tokio::time::sleep_until(self.won + time).await;
    }
}

/// Nobody else holds it: it is won anew, and the handler runs under a claim that is renewed.
#[tokio::test(start_paused = true)]
async fn what_nobody_took_meanwhile_is_won_anew() {
    let (handler, store) = (
        Handler::new([Do::Sleep(10 * SECOND)]),
        FaultStore::timed([]),
    );
    let (layer, events) = claiming(&store);
    let readying = readying(&store, &layer, &handler).await;
    // Its renewals fail until it is over.
    for _ in 0..20 {
        store.fault(Renew, Before, Fail);
    }
    readying.after(4 * SECOND).await;
    assert_eq!((store.standing("a"), handler.runs()), (Standing::Free, 0));
    store.heals();
    set(&readying.gate, true);
    sleep(5 * SECOND).await;
    assert_eq!(handler.runs(), 1);
    assert!(matches!(store.standing("a"), Standing::Claimed(_)));
    readying.call.await.unwrap().unwrap();
    assert_eq!(store.standing("a"), Standing::Done);
    assert_eq!(events.all(), ["lease_lost a", "ran a"]);
}

/// The answer to an older claim, that somebody else was busy, says nothing of one that was won since.
#[tokio::test(start_paused = true)]
async fn an_older_answer_ends_no_claim_that_was_won_anew() {
    let (handler, store) = (
        Handler::new([Do::Sleep(10 * SECOND)]),
        FaultStore::timed([]),
    );
    let (layer, events) = claiming(&store);
    let readying = readying(&store, &layer, &handler).await;
    // Shortly before the end the renewal finds it taken, and is answered a while later.
    for _ in 0..8 {
        store.fault(Renew, Before, Fail);
    }
    while store.sent(Renew).len() < 8 {
        sleep(10 * MILLI).await;
    }
    store.forgets("a");
    store.claimed_elsewhere("a", Lease::new(60 * SECOND).unwrap());
    store.fault(Claims, After, Wait(950 * MILLI));
    let sent = store.sent(Claims).len();
    while store.sent(Claims).len() == sent {
        sleep(MILLI).await;
    }
    readying.after(3 * SECOND + 10 * MILLI).await;
    store.released_elsewhere("a");
    set(&readying.gate, true);
    sleep(100 * MILLI).await;
    assert_eq!(handler.runs(), 1);
    sleep(5 * SECOND).await;
    assert!(matches!(store.standing("a"), Standing::Claimed(_)));
    readying.call.await.unwrap().unwrap();
    assert_eq!(events.all(), ["ran a"]);
}

/// A renewal that takes the claim again for a call which waits by now gives that back, and nothing that
/// the call has won since.
#[tokio::test(start_paused = true)]
async fn a_renewal_gives_nothing_back_that_its_call_won_since() {
    // When the call asks again is a matter of chance.
    for _ in 0..20 {
        gives_nothing_back().await;
    }
}

async fn gives_nothing_back() {
    let (handler, store) = (Handler::new([Do::Sleep(2 * SECOND)]), FaultStore::timed([]));
    let (layer, _) = claiming(&store);
    let readying = readying(&store, &layer, &handler).await;
    for _ in 0..8 {
        store.fault(Renew, Before, Fail);
    }
    while store.sent(Renew).len() < 8 {
        sleep(10 * MILLI).await;
    }
    store.forgets("a");
    store.claimed_elsewhere("a", Lease::new(60 * SECOND).unwrap());
    store.fault(Claims, Before, Wait(950 * MILLI));
    let sent = store.sent(Claims).len();
    while store.sent(Claims).len() == sent {
        sleep(MILLI).await;
    }
    let again = Instant::now();
    readying.after(3 * SECOND + 10 * MILLI).await;
    store.fault(Release, Before, Wait(500 * MILLI));
    set(&readying.gate, true);
    // Somebody else is busy with it: the call waits, and then the renewal's claim arrives.
    tokio::time::sleep_until(again + 945 * MILLI).await;
    assert_eq!(handler.runs(), 0);
    store.released_elsewhere("a");
    while handler.runs() == 0 {
        sleep(MILLI).await;
    }
    for _ in 0..19 {
        sleep(100 * MILLI).await;
        assert!(matches!(store.standing("a"), Standing::Claimed(_)));
    }
    readying.call.await.unwrap().unwrap();
}
