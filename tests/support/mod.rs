//! What the tests of the layers share: envelopes, a handler that does as told, a store that
//! fails as told, a record of events.
#![allow(dead_code, unreachable_pub, missing_docs)]

use std::{
    collections::VecDeque,
    fmt,
    future::{Future, Ready, pending},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tower::{Service, ServiceExt};
use tower_idempotency::{
    BoxError, Envelope, IdempotencyLayer, MemoryStore, MessageId, Store, error::Operation,
    event::Event,
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

/// A store in memory whose commands fail as told, each fault once, in order per command.
#[derive(Clone)]
pub struct FaultStore {
    pub inner: MemoryStore,
    faults: Arc<Mutex<VecDeque<(Operation, When, What)>>>,
    calls: Arc<Mutex<Vec<Operation>>>,
}

impl FaultStore {
    pub fn new(faults: impl IntoIterator<Item = (Operation, When, What)>) -> Self {
        FaultStore {
            inner: MemoryStore::new(),
            faults: Arc::new(Mutex::new(faults.into_iter().collect())),
            calls: Arc::default(),
        }
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
pub struct Events(Arc<Mutex<Vec<String>>>);

impl Events {
    pub fn hook(&self) -> impl Fn(&Event<'_>) + Send + Sync + 'static {
        let events = self.0.clone();
        move |event| {
            let id = match event {
                Event::Ran { id, .. }
                | Event::Duplicate { id, .. }
                | Event::FailedOpen { id, .. }
                | Event::StoreError { id, .. }
                | Event::MarkFailed { id, .. }
                | Event::Abandoned { id, .. } => id.as_str(),
                _ => "-",
            };
            events
                .lock()
                .unwrap()
                .push(format!("{} {id}", event.name()));
        }
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
