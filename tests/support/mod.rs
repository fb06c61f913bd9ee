//! What the tests of the layers share: envelopes, a handler that does as told, a store that
//! fails as told, a record of events.
#![allow(dead_code, unreachable_pub, missing_docs)]

use std::{
    collections::VecDeque,
    fmt,
    future::{Future, Ready, pending, ready},
    mem,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower::{Service, ServiceExt, retry::Policy};
use tower_idempotency::{
    BoxError, Claim, ClaimStore, Envelope, IdempotencyLayer, Lease, MemoryStore, MessageId, Owner,
    Store, error::Operation, event::Event,
};

pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

pub fn envelope(id: &str) -> Envelope {
    Envelope::new("urn:test:payment", &serde_json::json!({"cents": 9990}))
        .unwrap()
        .with_id(id)
}

pub async fn deliver<S, Req>(service: &mut S, request: Req) -> Result<S::Response, S::Error>
where
    S: Service<Req>,
{
    service.ready().await?.call(request).await
}

/// The whole of a poll of a future that is not waiting for anything.
pub fn now<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    match future
        .as_mut()
        .poll(&mut Context::from_waker(std::task::Waker::noop()))
    {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the future waits for something"),
    }
}

// ===== the handler =====

#[derive(Clone, Copy, Debug)]
pub enum Do {
    Succeed,
    Fail,
    Panic,
    Hang,
    Sleep(Duration),
    FailAfter(Duration),
}

#[derive(Debug)]
pub struct Declined;

impl fmt::Display for Declined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("card declined")
    }
}

impl std::error::Error for Declined {}

/// Counts its runs and does what its script says; when that is over, it succeeds.
#[derive(Clone, Default)]
pub struct Handler {
    runs: Arc<AtomicUsize>,
    script: Arc<Mutex<VecDeque<Do>>>,
}

impl Handler {
    pub fn new(script: impl IntoIterator<Item = Do>) -> Self {
        Handler {
            script: Arc::new(Mutex::new(script.into_iter().collect())),
            ..Self::default()
        }
    }

    pub fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

impl<Req> Service<Req> for Handler {
    type Response = ();
    type Error = BoxError;
    type Future = BoxFuture<Result<(), BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Req) -> Self::Future {
        self.runs.fetch_add(1, Ordering::SeqCst);
        let next = self
            .script
            .lock()
            .unwrap()
            .pop_front()
            .unwrap_or(Do::Succeed);
        Box::pin(async move {
            match next {
                Do::Succeed => Ok(()),
                Do::Fail => Err(Declined.into()),
                Do::Panic => panic!("the handler panics, as it was told"),
                Do::Hang => pending().await,
                Do::Sleep(time) => {
                    tokio::time::sleep(time).await;
                    Ok(())
                }
                Do::FailAfter(time) => {
                    tokio::time::sleep(time).await;
                    Err(Declined.into())
                }
            }
        })
    }
}

/// Never ready: it broke.
#[derive(Clone)]
pub struct Broken;

impl<Req> Service<Req> for Broken {
    type Response = ();
    type Error = Declined;
    type Future = Ready<Result<(), Declined>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Declined>> {
        Poll::Ready(Err(Declined))
    }

    fn call(&mut self, _: Req) -> Self::Future {
        panic!("called, although it is not ready")
    }
}

// ===== around it =====

/// Tries this many times more.
#[derive(Clone)]
pub struct Retries(pub usize);

impl<Req: Clone, Res, E> Policy<Req, Res, E> for Retries {
    type Future = Ready<()>;

    fn retry(&mut self, _: &mut Req, result: &mut Result<Res, E>) -> Option<Ready<()>> {
        (result.is_err() && self.0 > 0).then(|| {
            self.0 -= 1;
            ready(())
        })
    }

    fn clone_request(&mut self, request: &Req) -> Option<Req> {
        Some(request.clone())
    }
}

/// A dead-letter queue.
#[derive(Clone, Default)]
pub struct Queue(Arc<Mutex<Vec<Envelope>>>);

impl Queue {
    pub fn take(&self) -> Vec<Envelope> {
        mem::take(&mut self.0.lock().unwrap())
    }
}

impl Service<Envelope> for Queue {
    type Response = ();
    type Error = BoxError;
    type Future = Ready<Result<(), BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, message: Envelope) -> Self::Future {
        self.0.lock().unwrap().push(message);
        ready(Ok(()))
    }
}

// ===== the store =====

/// When, seen from the real command, something happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum When {
    Before,
    After,
}

#[derive(Clone, Copy, Debug)]
pub enum What {
    Fail,
    Wait(Duration),
    Hang,
    Panic,
}

/// Which ids.
pub type Ids = fn(&str) -> bool;

/// A store in memory whose commands fail as told, each fault once, in order per command.
#[derive(Clone)]
pub struct FaultStore {
    pub inner: MemoryStore,
    faults: Arc<Mutex<VecDeque<(Operation, When, What)>>>,
    calls: Arc<Mutex<Vec<Operation>>>,
    claims: Arc<Mutex<Vec<Sent>>>,
    hung: Arc<Mutex<Option<Ids>>>,
}

/// A command of a claim: whose it is, and when it was sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sent {
    pub operation: Operation,
    pub owner: Owner,
    pub at: Instant,
}

/// How the record has a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Standing {
    Free,
    /// For so long.
    Claimed(Duration),
    Done,
}

impl FaultStore {
    pub fn new(faults: impl IntoIterator<Item = (Operation, When, What)>) -> Self {
        Self::over(MemoryStore::new(), faults)
    }

    pub fn over(
        inner: MemoryStore,
        faults: impl IntoIterator<Item = (Operation, When, What)>,
    ) -> Self {
        FaultStore {
            inner,
            faults: Arc::new(Mutex::new(faults.into_iter().collect())),
            calls: Arc::default(),
            claims: Arc::default(),
            hung: Arc::default(),
        }
    }

    /// One whose leases end in the time of a runtime that may be paused.
    pub fn timed(faults: impl IntoIterator<Item = (Operation, When, What)>) -> Self {
        let start = Instant::now();
        let inner = MemoryStore::builder().clock(move || start.elapsed());
        Self::over(inner.build().unwrap(), faults)
    }

    /// From now on, after those that are still to come.
    pub fn fault(&self, operation: Operation, when: When, what: What) {
        let fault = (operation, when, what);
        self.faults.lock().unwrap().push_back(fault);
    }

    /// From now on renewals of these ids get no answer.
    pub fn hangs_renewals_of(&self, ids: Ids) {
        *self.hung.lock().unwrap() = Some(ids);
    }

    /// From now on nothing fails.
    pub fn heals(&self) {
        self.faults.lock().unwrap().clear();
    }

    /// The commands of claims that were sent.
    pub fn claims(&self) -> Vec<Sent> {
        self.claims.lock().unwrap().clone()
    }

    /// Those of one kind.
    pub fn sent(&self, operation: Operation) -> Vec<Sent> {
        let mut sent = self.claims();
        sent.retain(|sent| sent.operation == operation);
        sent
    }

    /// What a claim would find.
    pub fn standing(&self, id: &str) -> Standing {
        let (id, nobody) = (MessageId::from(id), Owner::from_bits(u128::MAX));
        let lease = Lease::new(Lease::MIN).unwrap();
        match now(self.inner.claim(&id, nobody, lease)).unwrap() {
            Claim::Won => {
                assert!(now(self.inner.release(&id, nobody)).unwrap());
                Standing::Free
            }
            Claim::Done => Standing::Done,
            Claim::Busy { retry_after } => Standing::Claimed(retry_after),
        }
    }

    /// Somebody else claims it, in another process.
    pub fn claimed_elsewhere(&self, id: &str, lease: Lease) {
        let claim = now(self.inner.claim(&id.into(), ELSEWHERE, lease)).unwrap();
        assert_eq!(claim, Claim::Won);
    }

    /// Somebody else gives up what he claimed.
    pub fn released_elsewhere(&self, id: &str) {
        assert!(now(self.inner.release(&id.into(), ELSEWHERE)).unwrap());
    }

    /// The record loses a message.
    pub fn forgets(&self, id: &str) {
        now(self.inner.forget(&id.into())).unwrap();
    }

    /// Which commands were sent.
    pub fn calls(&self) -> Vec<Operation> {
        self.calls.lock().unwrap().clone()
    }

    pub fn remembers(&self, id: &str) -> bool {
        now(self.inner.seen(&id.into())).unwrap()
    }

    fn command<T: Send + 'static>(
        &self,
        operation: Operation,
        real: impl FnOnce(&MemoryStore) -> T + Send + 'static,
    ) -> BoxFuture<Result<T, BoxError>> {
        self.calls.lock().unwrap().push(operation);
        let fault = {
            let mut faults = self.faults.lock().unwrap();
            let next = faults.iter().position(|fault| fault.0 == operation);
            next.and_then(|at| faults.remove(at))
        };
        if let Some((_, _, What::Panic)) = fault {
            panic!("the store panics, as it was told");
        }
        let inner = self.inner.clone();
        Box::pin(async move {
            let Some((_, when, what)) = fault else {
                return Ok(real(&inner));
            };
            let mut real = Some(real);
            let early = (when == When::After).then(|| real.take().unwrap()(&inner));
            match what {
                What::Fail => return Err("connection reset".into()),
                What::Wait(time) => tokio::time::sleep(time).await,
                What::Hang => pending().await,
                What::Panic => unreachable!(),
            }
            Ok(early.unwrap_or_else(|| real.take().unwrap()(&inner)))
        })
    }
}

/// Who claims in another process.
pub const ELSEWHERE: Owner = Owner::from_bits(0xE15E);

impl FaultStore {
    fn claims_command<T: Send + 'static>(
        &self,
        operation: Operation,
        owner: Owner,
        real: impl FnOnce(&MemoryStore) -> T + Send + 'static,
    ) -> BoxFuture<Result<T, BoxError>> {
        let at = Instant::now();
        self.claims.lock().unwrap().push(Sent {
            operation,
            owner,
            at,
        });
        self.command(operation, real)
    }
}

impl ClaimStore for FaultStore {
    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<Claim> {
        let id = id.clone();
        self.claims_command(Operation::Claim, owner, move |store| {
            now(store.claim(&id, owner, lease)).unwrap()
        })
    }

    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<bool> {
        if self.hung.lock().unwrap().is_some_and(|hung| hung(id)) {
            return Box::pin(pending());
        }
        let id = id.clone();
        self.claims_command(Operation::Renew, owner, move |store| {
            now(store.renew(&id, owner, lease)).unwrap()
        })
    }

    fn complete(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
        let id = id.clone();
        self.claims_command(Operation::Complete, owner, move |store| {
            now(store.complete(&id, owner)).unwrap()
        })
    }

    fn release(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
        let id = id.clone();
        self.claims_command(Operation::Release, owner, move |store| {
            now(store.release(&id, owner)).unwrap()
        })
    }
}

impl Store for FaultStore {
    type Error = BoxError;
    type Future<T: Send + 'static> = BoxFuture<Result<T, BoxError>>;

    fn seen(&self, id: &MessageId) -> Self::Future<bool> {
        let id = id.clone();
        self.command(Operation::Seen, move |store| now(store.seen(&id)).unwrap())
    }

    fn remember(&self, id: &MessageId) -> Self::Future<()> {
        let id = id.clone();
        self.command(Operation::Remember, move |store| {
            now(store.remember(&id)).unwrap()
        })
    }

    fn forget(&self, id: &MessageId) -> Self::Future<()> {
        let id = id.clone();
        self.command(Operation::Forget, move |store| {
            now(store.forget(&id)).unwrap()
        })
    }
}

// ===== the events =====

/// The events that were told, each as its name and the id it is about.
#[derive(Clone, Default)]
pub struct Events(Arc<Mutex<Vec<String>>>, Arc<Mutex<Vec<Operation>>>);

impl Events {
    pub fn hook(&self) -> impl Fn(&Event<'_>) + Send + Sync + 'static {
        let (events, operations) = (self.0.clone(), self.1.clone());
        move |event| {
            if let Event::Abandoned { operation, .. } = event {
                operations.lock().unwrap().push(*operation);
            }
            let id = match event {
                Event::Ran { id, .. }
                | Event::Duplicate { id, .. }
                | Event::FailedOpen { id, .. }
                | Event::StoreError { id, .. }
                | Event::MarkFailed { id, .. }
                | Event::Parked { id, .. }
                | Event::LeaseLost { id, .. }
                | Event::ReleaseFailed { id, .. }
                | Event::Abandoned { id, .. }
                | Event::Unfinished { id, .. } => id.as_str(),
                _ => "-",
            };
            events
                .lock()
                .unwrap()
                .push(format!("{} {id}", event.name()));
        }
    }

    /// What was abandoned.
    pub fn abandoned(&self) -> Vec<Operation> {
        self.1.lock().unwrap().clone()
    }

    pub fn tell(&self, what: &str) {
        self.0.lock().unwrap().push(what.to_owned());
    }

    pub fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

pub fn layer<St: Store>(store: St) -> (IdempotencyLayer<St>, Events) {
    let events = Events::default();
    (IdempotencyLayer::new(store).on_event(events.hook()), events)
}
