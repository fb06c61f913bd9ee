//! Runs each message once, and one copy of it at a time: the claim.
//!
//! The [seen-set](crate::idempotency) lets two copies that arrive together both run. Here a message is
//! *claimed* before its handler runs, in one atomic step of the store, and whoever comes meanwhile is
//! told that somebody is busy with it. Claimed is not done: when a worker dies, its claim ends with
//! the [`Lease`](crate::Lease), and the redelivery runs.
//!
//! | the message is | the call |
//! |---|---|
//! | free, or its claim has ended | claims it, runs the handler, marks it done, answers Ok |
//! | done | answers [`Ack::ack`]: a duplicate |
//! | claimed by another call | answers [`Parked`](crate::Parked), or [waits](ClaimLayer::wait) |
//!
//! When the handler fails, its claim is released before the error is returned, so that a retry outside
//! of this layer finds the id free. While it runs, the claim is renewed by one task for all the claims of
//! a layer and its clones, so a handler may take longer than the lease. One that hangs keeps its
//! claim for as long as it hangs: a timeout belongs inside.
//!
//! # What remains
//!
//! The claim keeps two handlers from running for one message at the same time, for as long as its
//! renewals reach the store. It does not make the effect and its mark one step: a worker that dies
//! between them leaves a message that runs again. Nor does it stop a handler whose claim is
//! lost, since its worker was paused for longer than the lease, or the store lost the record: that is
//! reported as [`LeaseLost`](crate::event::Event::LeaseLost), and the handler goes on beside
//! whoever claimed the message next. What was waited for before the handler could begin, the answer of the
//! store or the readiness of the inner service, is no such case: when the lease ended meanwhile, the
//! message is claimed anew first.
//!
//! Workers with and without claims may share a record: nothing is lost, and no claim holds up
//! a worker that does not ask for one.
//!
//! # A parked message
//!
//! [`Parked`](crate::Parked) is no failure: the message is to be handed back to the broker and delivered
//! again [later](crate::Parked::retry_after). [`is_transient`](crate::error::is_transient) is true for it,
//! and [`DeadLetterLayer`](crate::DeadLetterLayer) lets it through. A retry *inside* of this layer never
//! sees it; one outside should leave it alone, or wait as long as it says.
//!
//! # Examples
//!
//! ```
//! use std::time::Duration;
//! use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
//! use tower_idempotency::{BoxError, Envelope, IdempotencyLayer, Lease, MemoryStore, Parked};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! async fn charge(payment: Envelope) -> Result<(), BoxError> {
//!     println!("charging for {}", payment.urn());
//!     tokio::time::sleep(Duration::from_millis(50)).await;
//!     Ok(())
//! }
//!
//! let lease = Lease::new(Duration::from_secs(60))?;
//! let consumer = ServiceBuilder::new()
//!     .layer(IdempotencyLayer::new(MemoryStore::new()).claim(lease))
//!     .service(service_fn(charge));
//!
//! let payment = Envelope::new("urn:shop:payment", &serde_json::json!({"cents": 9990}))?;
//! let (one, other) = tokio::join!(
//!     consumer.clone().oneshot(payment.clone()), // charges
//!     consumer.clone().oneshot(payment.clone()), // finds it claimed
//! );
//! assert!(one.is_ok());
//! let error = other.unwrap_err();
//! let parked = error.downcast_ref::<Parked>().ok_or("the other one")?;
//! assert!(parked.retry_after() <= lease.length());
//! # Ok(())
//! # }
//! ```
//!
//! A copy that arrives meanwhile waits for the first one to end:
//!
//! ```
//! # use std::time::Duration;
//! # use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
//! # use tower_idempotency::{BoxError, IdempotencyLayer, Lease, MemoryStore, Outcome};
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), BoxError> {
//! # async fn mail(_: String) -> Result<(), BoxError> {
//! #     tokio::time::sleep(Duration::from_millis(50)).await;
//! #     Ok(())
//! # }
//! let layer = IdempotencyLayer::new(MemoryStore::new())
//!     .id_from(|address: &String| Some(address.clone()))
//!     .claim(Lease::new(Duration::from_secs(30))?)
//!     .wait(Duration::from_secs(5))
//!     .outcome();
//! let mailer = ServiceBuilder::new().layer(layer).service(service_fn(mail));
//!
//! let (one, other) = tokio::join!(
//!     mailer.clone().oneshot("ada@example.org".to_owned()),
//!     mailer.clone().oneshot("ada@example.org".to_owned()),
//! );
//! assert_eq!(one?, Outcome::Ran(()));
//! assert_eq!(other?, Outcome::Duplicate);
//! # Ok(())
//! # }
//! ```

pub mod future;
mod guard;
mod layer;
mod renewal;

pub use self::layer::{ClaimLayer, OnDrop};

use self::future::ResponseFuture;
use crate::{
    ack::{Ack, Always, IsDone},
    error::BoxError,
    event::Event,
    id::{ExtractId, MetaId},
    store::ClaimStore,
};
use std::{
    fmt, mem,
    task::{Context, Poll},
};
use tower_service::Service;

/// Runs each message id once, and one copy of it at a time.
///
/// Made by [`ClaimLayer`]. See the [module docs](self) for examples.
///
/// # Errors
///
/// The inner service's own, untouched; [`Parked`](crate::Parked) while somebody else is busy with the
/// message; [`StoreError`](crate::StoreError) when the store cannot say whether it may run, and where
/// [`OnMarkError::Fail`](crate::OnMarkError::Fail) asks for it. All of them mean: no ack.
///
/// # Readiness
///
/// As [`Idempotency`](crate::Idempotency#readiness). After a [wait](ClaimLayer::wait) the call makes a clone
/// of the inner service ready by itself.
///
/// # Runtime
///
/// Claims are renewed, and dropped calls finished, on the tokio runtime that a call is polled on, which needs
/// its time driver (`enable_time`). Polled outside of one, a claim holds for one lease.
///
/// # Clone
///
/// As [`Idempotency`](crate::Idempotency#clone).
#[derive(Clone)]
pub struct ClaimService<S, St, X = MetaId, D = Always> {
    inner: S,
    layer: ClaimLayer<St, X, D>,
}

// ===== impl ClaimService =====

impl<S, St, X, D> ClaimService<S, St, X, D> {
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

impl<S: fmt::Debug, St, X, D> fmt::Debug for ClaimService<S, St, X, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimService")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}

impl<S, Req, St, X, D> Service<Req> for ClaimService<S, St, X, D>
where
    S: Service<Req> + Clone,
    S::Response: Ack,
    S::Error: Into<BoxError>,
    St: ClaimStore,
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
        let ClaimLayer {
            settings,
            extract,
            is_done,
        } = &self.layer;
        match extract.extract_id(&request) {
            Some(id) if !id.is_empty() => {
                let clone = self.inner.clone();
                let ready = mem::replace(&mut self.inner, clone);
                let created_at = extract.created_at(&request);
                let call = (ready, request);
                ResponseFuture::claim(settings.clone(), is_done.clone(), id, created_at, call)
            }
            _ => {
                settings.shared.reporter.report(&Event::NoId);
                let future = self.inner.call(request);
                ResponseFuture::run(settings.clone(), is_done.clone(), future)
            }
        }
    }
}
