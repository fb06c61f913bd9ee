use super::DeadLetter;
use crate::{
    envelope::Reason,
    error::{BoxError, is_transient},
};
use std::{fmt, sync::Arc};
use tower_layer::Layer;

/// Wraps services of [`Envelope`](crate::Envelope)s in [`DeadLetter`].
///
/// See the [module docs](crate::dead_letter) for examples.
#[derive(Clone, Debug)]
#[must_use]
pub struct DeadLetterLayer<P> {
    publisher: P,
    settings: Arc<Settings>,
}

#[derive(Clone)]
pub(super) struct Settings {
    /// The queue that messages are received from, where their headers do not say.
    pub(super) queue: Option<String>,
    pub(super) is_transient: Arc<dyn Fn(&BoxError) -> bool + Send + Sync>,
    pub(super) reason: Arc<dyn Fn(&BoxError) -> Reason + Send + Sync>,
}

// ===== impl DeadLetterLayer =====

impl<P> DeadLetterLayer<P> {
    /// Publishes to the dead-letter queue through `publisher`: a `Service<Envelope>` whose Ok means
    /// that the broker has confirmed the message. A clone of it is used for each.
    ///
    /// Unless set otherwise, what [`is_transient`] knows is passed on and everything else is
    /// dead-lettered with the reason `failed`.
    pub fn new(publisher: P) -> Self {
        DeadLetterLayer {
            publisher,
            settings: Arc::default(),
        }
    }

    /// Names the queue that messages are received from, for those that name no queue themselves
    /// and whose [`Headers`](crate::envelope::Headers) do not either.
    pub fn queue(self, queue: impl Into<String>) -> Self {
        let queue = Some(queue.into());
        self.set(|settings| settings.queue = queue)
    }

    /// Passes errors on untouched for which `is_transient` says yes.
    ///
    /// It takes the place of [`is_transient`], so it should ask that one first: a message
    /// that could not be tried has not failed.
    pub fn transient_if(
        self,
        is_transient: impl Fn(&BoxError) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.set(|settings| settings.is_transient = Arc::new(is_transient))
    }

    /// Says why a message is dead-lettered; [`Reason::Failed`] unless set.
    pub fn reason(self, reason: impl Fn(&BoxError) -> Reason + Send + Sync + 'static) -> Self {
        self.set(|settings| settings.reason = Arc::new(reason))
    }

    fn set(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self
    }
}

impl<S, P: Clone> Layer<S> for DeadLetterLayer<P> {
    type Service = DeadLetter<S, P>;

    fn layer(&self, inner: S) -> Self::Service {
        let DeadLetterLayer {
            publisher,
            settings,
        } = self.clone();
        DeadLetter {
            inner,
            publisher,
            settings,
        }
    }
}

// ===== impl Settings =====

impl Default for Settings {
    fn default() -> Self {
        Settings {
            queue: None,
            is_transient: Arc::new(is_transient),
            reason: Arc::new(|_| Reason::Failed),
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}
