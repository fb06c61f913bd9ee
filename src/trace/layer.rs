use super::Trace;
use crate::envelope::Envelope;
use std::{borrow::Cow, fmt, sync::Arc};
use tower_layer::Layer;
use tracing::{Span, field, info_span};

/// Wraps services of [`Envelope`]s in [`Trace`].
///
/// See the [module docs](crate::trace) for examples.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct TraceLayer {
    settings: Arc<Settings>,
}

type OnSpan = dyn Fn(&Span, &Envelope) + Send + Sync;

#[derive(Clone)]
pub(super) struct Settings {
    system: Cow<'static, str>,
    on_span: Option<Arc<OnSpan>>,
}

// ===== impl TraceLayer =====

impl TraceLayer {
    /// Gives each message a span of the level `INFO`, with the target `tower_idempotency`.
    pub fn new() -> Self {
        TraceLayer::default()
    }

    /// Says what carries the messages, as `messaging.system`: `rabbitmq`, for example. `babelqueue` unless
    /// set, as in BabelQueue's SDKs.
    pub fn system(mut self, system: impl Into<Cow<'static, str>>) -> Self {
        Arc::make_mut(&mut self.settings).system = system.into();
        self
    }

    /// Is given each span before it is entered for the first time, to set its parent, for example.
    ///
    /// # Panics
    ///
    /// A panic in it is one of the call, before the message is handed on.
    pub fn on_span(mut self, on_span: impl Fn(&Span, &Envelope) + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.settings).on_span = Some(Arc::new(on_span));
        self
    }
}

impl<S> Layer<S> for TraceLayer {
    type Service = Trace<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Trace {
            inner,
            settings: self.settings.clone(),
        }
    }
}

// ===== impl Settings =====

impl Settings {
    pub(super) fn span(&self, envelope: &Envelope) -> Span {
        let queue = envelope.meta().queue().or(envelope.headers().queue());
        // As strings, which subscribers escape: a producer's line break must not break a log.
        let span = info_span!(
            target: "tower_idempotency",
            "process",
            otel.name = format!("process {}", envelope.urn()),
            otel.kind = "consumer",
            otel.status_code = field::Empty,
            error = field::Empty,
            messaging.system = &*self.system,
            messaging.operation = "process",
            messaging.destination.name = queue,
            messaging.message.id = envelope.id().map(|id| id.as_str()),
            messaging.message.conversation_id = envelope.trace_id(),
            messaging.babelqueue.attempts = envelope.attempts(),
            messaging.babelqueue.decision = field::Empty,
        );
        if let Some(on_span) = &self.on_span {
            on_span(&span, envelope);
        }
        span
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            system: Cow::Borrowed("babelqueue"),
            on_span: None,
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("system", &self.system)
            .field("on_span", &self.on_span.is_some())
            .finish()
    }
}
