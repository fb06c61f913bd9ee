//! Runs each message id once: the seen-set.
//!
//! A message whose id is remembered is answered with [`Ack::ack`] and its handler is not called.
//! An id is remembered after its handler answered Ok, never before: a handler that fails, panics
//! or is dropped leaves nothing behind, so retry and dead-letter work as without this layer.
//!
//! The mark is made when the store has answered it. A copy that comes before that runs, too: one
//! that arrives *together* with the first, one that comes after a crash between effect and mark,
//! and one that comes while a slow store is still being told (with the default settings that can
//! take up to 21 seconds: four tries of five seconds and the pauses between them). In doubt a
//! message runs again; none is skipped for which no handler behind this record has answered Ok.
//!
//! # One record, one consumer
//!
//! A message is told apart by its id alone. Two handlers that are both to run for a message, such
//! as billing and mail, need a record each: on a shared one, each would skip what the other did.
//!
//! # When it does not compile
//!
//! What a stack lacks is often said only as "trait bounds were not satisfied" at `.ready()`. Asked
//! by hand, the compiler says more: `fn check<S: tower::Service<Job>>(_: &S) {}`, called with the
//! service, names the extractor, predicate or response that does not fit.
//!
//! # Examples
//!
//! ```
//! use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
//! use tower_idempotency::{BoxError, Envelope, IdempotencyLayer, MemoryStore};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! async fn charge(payment: Envelope) -> Result<(), BoxError> {
//!     println!("charging for {}", payment.urn());
//!     Ok(())
//! }
//!
//! let mut consumer = ServiceBuilder::new()
//!     .layer(IdempotencyLayer::new(MemoryStore::new()))
//!     .service(service_fn(charge));
//!
//! let payment = Envelope::new("urn:shop:payment", &serde_json::json!({"cents": 9990}))?;
//! consumer.ready().await?.call(payment.clone()).await?; // charges
//! consumer.ready().await?.call(payment).await?;         // does not
//! # Ok(())
//! # }
//! ```
//!
//! Requests of any other type name themselves by a closure, and a predicate says which answers
//! mean that the work is done:
//!
//! ```
//! use std::time::Duration;
//! use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
//! use tower_idempotency::{BoxError, IdempotencyLayer, MemoryStore, OnStoreError, Outcome};
//!
//! struct Job { key: String }
//!
//! #[derive(Debug, PartialEq)]
//! enum Answer { Sent, TryLater }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! let layer = IdempotencyLayer::new(MemoryStore::new())
//!     .store_timeout(Duration::from_secs(1))
//!     .on_store_error(OnStoreError::FailOpen)
//!     .id_from(|job: &Job| Some(job.key.clone()))
//!     .done_if(|answer: &Outcome<Answer>| *answer == Outcome::Ran(Answer::Sent));
//!
//! let mut mailer = ServiceBuilder::new()
//!     .layer(layer.outcome())
//!     .service(service_fn(|job: Job| async move {
//!         Ok::<_, BoxError>(if job.key == "busy" { Answer::TryLater } else { Answer::Sent })
//!     }));
//!
//! let job = || Job { key: "welcome-7".into() };
//! assert_eq!(mailer.ready().await?.call(job()).await?, Outcome::Ran(Answer::Sent));
//! assert_eq!(mailer.ready().await?.call(job()).await?, Outcome::Duplicate);
//! # Ok(())
//! # }
//! ```

pub mod future;
mod layer;
mod outcome;

pub use self::{
    layer::{IdempotencyLayer, OnMarkError, OnStoreError},
    outcome::{OutcomeFuture, OutcomeLayer, OutcomeService},
};

use self::future::ResponseFuture;
use crate::{
    ack::{Ack, Always, IsDone},
    error::BoxError,
    event::Event,
    id::{ExtractId, MetaId},
    store::Store,
};
use std::{
    fmt, mem,
    task::{Context, Poll},
};
use tower_service::Service;

/// Runs each message id once.
///
/// See the [module docs](self) for examples.
///
/// # Errors
///
/// The inner service's own, untouched; [`StoreError`](crate::StoreError) when the store cannot say
/// whether the message ran, and where [`OnMarkError::Fail`] asks for it. Both mean: no ack.
///
/// # Readiness
///
/// Ready when the inner service is. The instance that was polled ready is the one that is called;
/// for a duplicate it is dropped, which gives back what it had reserved.
///
/// # Clone
///
/// The inner service must be `Clone`: the one that was polled ready moves into the response
/// future and a clone takes its place, as in `tower::retry`. Where it is not, `tower::buffer` makes
/// it so.
#[derive(Clone)]
pub struct Idempotency<S, St, X = MetaId, D = Always> {
    inner: S,
    layer: IdempotencyLayer<St, X, D>,
}

// ===== impl Idempotency =====

impl<S, St: Store> Idempotency<S, St> {
    /// Wraps a service of [`Envelope`](crate::Envelope)s, with the settings of
    /// [`IdempotencyLayer::new`].
    pub fn new(inner: S, store: St) -> Self {
        Idempotency {
            inner,
            layer: IdempotencyLayer::new(store),
        }
    }
}

impl<S, St, X, D> Idempotency<S, St, X, D> {
    /// Gets a reference to the inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Gets a mutable reference to the inner service.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Consumes `self`, giving the inner service back.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S: fmt::Debug, St, X, D> fmt::Debug for Idempotency<S, St, X, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}

impl<S, Req, St, X, D> Service<Req> for Idempotency<S, St, X, D>
where
    S: Service<Req> + Clone,
    S::Response: Ack,
    S::Error: Into<BoxError>,
    St: Store,
    X: ExtractId<Req>,
    D: IsDone<S::Response> + Clone,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ResponseFuture<S, Req, St, D>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let IdempotencyLayer {
            shared,
            extract,
            is_done,
        } = &self.layer;
        match extract.extract_id(&request) {
            Some(id) if !id.is_empty() => {
                let clone = self.inner.clone();
                let ready = mem::replace(&mut self.inner, clone);
                let created_at = extract.created_at(&request);
                let call = (ready, request);
                ResponseFuture::ask(shared.clone(), is_done.clone(), id, created_at, call)
            }
            _ => {
                shared.reporter.report(&Event::NoId);
                let future = self.inner.call(request);
                ResponseFuture::run(shared.clone(), is_done.clone(), future)
            }
        }
    }
}
