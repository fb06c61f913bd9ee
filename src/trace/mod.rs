//! A `tracing` span for each message, with what was decided about it.
//!
//! The span has the fields that BabelQueue's SDKs give theirs, by OpenTelemetry's names:
//!
//! | field | |
//! |---|---|
//! | `otel.name` | `process <urn>`; the span's own name, which `tracing` wants to be a constant, is `process` |
//! | `otel.kind` | `consumer` |
//! | `messaging.system` | `babelqueue`, unless [`TraceLayer::system`] says otherwise |
//! | `messaging.operation` | `process` |
//! | `messaging.destination.name` | `meta.queue`, else the queue it was received from |
//! | `messaging.message.id` | `meta.id` |
//! | `messaging.message.conversation_id` | `trace_id` |
//! | `messaging.babelqueue.attempts` | `attempts` |
//! | `messaging.babelqueue.decision` | the [name](crate::event::Event::name) of the last event of the message: `ran`, `duplicate`, `parked`, and so on; or `dead_lettered`; none when the handler failed and nobody dead-lettered it |
//! | `otel.status_code`, `error` | `ERROR` and the error, for a message that is answered with one and was not just parked |
//!
//! What a message does not have is not recorded. `otel.name`, `otel.kind` and `otel.status_code` are what
//! `tracing-opentelemetry` looks for.
//!
//! # Order
//!
//! Outermost, so that all that is done with the message is inside. A decision is recorded in the span that is current
//! where it is made: with another span between this layer and the one that decides, the other one gets
//! it, or nobody.
//!
//! # Examples
//!
//! ```
//! use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
//! use tower_idempotency::{BoxError, Envelope, IdempotencyLayer, MemoryStore, TraceLayer};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! let mut consumer = ServiceBuilder::new()
//!     .layer(TraceLayer::new().system("rabbitmq"))
//!     .layer(IdempotencyLayer::new(MemoryStore::new()))
//!     .service(service_fn(|_: Envelope| async { Ok::<_, BoxError>(()) }));
//!
//! let payment = Envelope::new("urn:shop:payment", &serde_json::json!({}))?;
//! consumer.ready().await?.call(payment).await?;
//! # Ok(())
//! # }
//! ```
//!
//! A producer's span becomes the parent through its `traceparent`, which travels beside the envelope:
//!
//! ```
//! # use tower_idempotency::TraceLayer;
//! let layer = TraceLayer::new().on_span(|span, envelope| {
//!     if let Some(parent) = envelope.headers().get("traceparent") {
//!         // With tracing-opentelemetry: span.set_parent(propagator.extract(..)).
//!         # let _ = (span, parent);
//!     }
//! });
//! # let _ = layer;
//! ```

pub mod future;
mod layer;

pub use self::layer::TraceLayer;

use self::{future::ResponseFuture, layer::Settings};
use crate::{envelope::Envelope, error::BoxError};
use std::{
    sync::Arc,
    task::{Context, Poll},
};
use tower_service::Service;
use tracing::Span;

/// Tells the span of the message, if that is the current one, what was decided.
pub(crate) fn decided(decision: &'static str) {
    Span::current().record("messaging.babelqueue.decision", decision);
}

/// Gives each message a span.
///
/// See the [module docs](self) for its fields and an example. Answers and errors pass untouched.
#[derive(Clone, Debug)]
pub struct Trace<S> {
    inner: S,
    settings: Arc<Settings>,
}

// ===== impl Trace =====

impl<S> Trace<S> {
    /// Wraps a service, with the settings of [`TraceLayer::new`].
    pub fn new(inner: S) -> Self {
        Trace {
            inner,
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

impl<S> Service<Envelope> for Trace<S>
where
    S: Service<Envelope>,
    S::Error: Into<BoxError>,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ResponseFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, envelope: Envelope) -> Self::Future {
        let span = self.settings.span(&envelope);
        let response = span.in_scope(|| self.inner.call(envelope));
        ResponseFuture::new(response, span)
    }
}
