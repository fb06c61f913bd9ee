//! Puts what failed for good on the dead-letter queue.
//!
//! A message whose handler failed is annotated with a `dead_letter` block, published through a
//! service of the user's, and then answered with Ok, so that the broker lets go of it. Two things
//! are never dead-lettered: a message whose publishing failed (the error goes up, and the message
//! stays with its broker) and one that could not be tried at all, such as one whose store was
//! down ([`is_transient`]).
//!
//! # Order
//!
//! This layer goes outside the idempotency layer. Inside, its Ok would have the message
//! remembered as done, and a redrive skipped.
//!
//! # The block
//!
//! `attempts` counts deliveries: it goes up by one, however often a retry inside tried. `error` is
//! what the error displays, without its sources, and everybody who reads the queue reads it: an
//! error must not display a secret. `exception` stays null.
//!
//! # Examples
//!
//! ```
//! use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
//! use tower_idempotency::{BoxError, DeadLetterLayer, Envelope, IdempotencyLayer, MemoryStore};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! let (queue, mut dead) = tokio::sync::mpsc::unbounded_channel();
//! let publish = service_fn(move |message: Envelope| {
//!     let sent = queue.send(message);
//!     async move { sent }
//! });
//!
//! let mut consumer = ServiceBuilder::new()
//!     .layer(DeadLetterLayer::new(publish))
//!     .layer(IdempotencyLayer::new(MemoryStore::new()))
//!     .service(service_fn(|_: Envelope| async { Err::<(), _>("card declined") }));
//!
//! let payment = Envelope::new("urn:shop:payment", &serde_json::json!({}))?;
//! consumer.ready().await?.call(payment).await?; // acked, since it is on the other queue now
//! let message = dead.recv().await.unwrap();
//! assert_eq!(message.dead_letter().unwrap().error(), Some("card declined"));
//! assert_eq!(message.attempts(), 1);
//! # Ok(())
//! # }
//! ```
//!
//! tower's own middleware has errors that are no failure of the handler either. With load shedding
//! or a buffer in the stack they are passed on as well; a buffer answers `Closed` or, when the
//! service behind it broke, `ServiceError`. So is the `Elapsed` of a timeout that stands outside of
//! the idempotency layer; that of a timeout inside is the handler's failure, and belongs on the
//! dead-letter queue.
//!
//! ```
//! use tower::{buffer::error::{Closed, ServiceError}, load_shed::error::Overloaded};
//! use tower_idempotency::{DeadLetterLayer, envelope::Reason, error::is_transient};
//! # let publish = tower::service_fn(|_: tower_idempotency::Envelope| async { Ok::<_, String>(()) });
//!
//! let layer = DeadLetterLayer::new(publish)
//!     .queue("payments")
//!     .transient_if(|error| {
//!         is_transient(error)
//!             || error.is::<Overloaded>()
//!             || error.is::<Closed>()
//!             || error.is::<ServiceError>()
//!     })
//!     .reason(|error| match error.to_string().as_str() {
//!         "no such handler" => Reason::UnknownUrn,
//!         _ => Reason::Failed,
//!     });
//! # let _ = layer;
//! ```

pub mod future;
mod layer;
mod poison;

pub use self::{layer::DeadLetterLayer, poison::poison};

use self::{future::ResponseFuture, layer::Settings};
use crate::{ack::Ack, envelope::Envelope, error::BoxError};
use std::{
    sync::Arc,
    task::{Context, Poll},
};
use tower_service::Service;

#[cfg(doc)]
use crate::error::is_transient;

/// Puts what failed for good on the dead-letter queue.
///
/// See the [module docs](self) for examples.
///
/// # Errors
///
/// The inner service's own, untouched, where it is transient;
/// [`Unpublished`](crate::error::Unpublished) when publishing failed. Both mean: no ack.
///
/// # Clone
///
/// The publisher must be `Clone`: each call takes a clone with it. The inner service need not be.
#[derive(Clone, Debug)]
pub struct DeadLetter<S, P> {
    inner: S,
    publisher: P,
    settings: Arc<Settings>,
}

// ===== impl DeadLetter =====

impl<S, P> DeadLetter<S, P> {
    /// Wraps a service, with the settings of [`DeadLetterLayer::new`].
    pub fn new(inner: S, publisher: P) -> Self {
        DeadLetter {
            inner,
            publisher,
            settings: Arc::default(),
        }
    }

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

impl<S, P> Service<Envelope> for DeadLetter<S, P>
where
    S: Service<Envelope>,
    S::Response: Ack,
    S::Error: Into<BoxError>,
    P: Service<Envelope> + Clone,
    P::Error: Into<BoxError>,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ResponseFuture<S::Future, P>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, envelope: Envelope) -> Self::Future {
        let kept = envelope.clone();
        let response = self.inner.call(envelope);
        ResponseFuture::new(
            response,
            kept,
            self.publisher.clone(),
            self.settings.clone(),
        )
    }
}
