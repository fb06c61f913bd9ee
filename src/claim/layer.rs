use super::{ClaimService, renewal::Renewal};
use crate::{
    ack::Always,
    call::Shared,
    id::MetaId,
    idempotency::{IdempotencyLayer, OutcomeLayer},
    store::{ClaimStore, Lease},
};
use std::{fmt, sync::Arc, time::Duration};
use tower_layer::{Layer, Stack};

/// Wraps services in [`ClaimService`].
///
/// Made by [`IdempotencyLayer::claim`]. See the [module docs](crate::claim) for examples.
///
/// Clones, and the services made by them, share the store, what they were set up with, and the task that
/// renews their claims. A setting changed on a clone is the clone's own.
#[derive(Clone)]
#[must_use]
pub struct ClaimLayer<St, X = MetaId, D = Always> {
    pub(super) settings: Arc<Settings<St>>,
    pub(super) extract: X,
    pub(super) is_done: D,
}

/// What a layer and its clones and calls share.
#[derive(Clone)]
pub(super) struct Settings<St> {
    pub(super) shared: Shared<St>,
    pub(super) renewal: Renewal<St>,
    /// How long a call waits while somebody else is busy with its message.
    pub(super) wait: Option<Duration>,
    pub(super) keeps_claim: bool,
}

/// What becomes of a claim when the call is dropped while its handler is running, or its handler panics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnDrop {
    /// It is released, so that a redelivery runs at once.
    #[default]
    Release,
    /// It is renewed no longer and ends with its lease: for handlers whose work goes on after they were
    /// dropped, such as on a blocking thread.
    KeepUntilLease,
}

// ===== impl IdempotencyLayer =====

impl<St: ClaimStore, X, D> IdempotencyLayer<St, X, D> {
    /// Has each message claimed before its handler runs, so that of copies which arrive together one
    /// runs.
    ///
    /// The last setting of this layer: it gives a [`ClaimLayer`], which has settings of its own. See
    /// [`claim`](crate::claim) for what changes.
    ///
    /// A claim that fails is sent again twice, after 100 and 200 ms, by the same owner, and then
    /// released. It may take as long as [`store_timeout`](IdempotencyLayer::store_timeout) says, and no longer than
    /// the lease: one that was over before the handler could begin is claimed anew, twice, and then an error.
    #[cfg_attr(docsrs, doc(cfg(feature = "tokio")))]
    pub fn claim(self, lease: Lease) -> ClaimLayer<St, X, D> {
        let shared = Shared::clone(&self.shared);
        ClaimLayer {
            settings: Arc::new(Settings {
                renewal: Renewal::new(shared.clone(), lease),
                shared,
                wait: None,
                keeps_claim: false,
            }),
            extract: self.extract,
            is_done: self.is_done,
        }
    }
}

// ===== impl ClaimLayer =====

impl<St: ClaimStore, X, D> ClaimLayer<St, X, D> {
    /// Waits while somebody else is busy with a message, at most so long, counted from the call. Then,
    /// and unless set, it is [`Parked`](crate::Parked).
    ///
    /// The claim is sent again after 50 ms, then after pauses that double up to a second, give or take
    /// a fourth. Meanwhile the call holds nothing of the inner service: what that had reserved is given
    /// back, and it is made ready anew once the claim is won.
    ///
    /// For brokers that have no way to deliver later. A call that waits keeps its message from being
    /// acked, and its worker from taking another one where that takes one at a time.
    pub fn wait(self, max: Duration) -> Self {
        self.set(|settings| settings.wait = Some(max))
    }

    /// What becomes of a claim when the call is dropped while its handler is running;
    /// [`OnDrop::Release`] unless set.
    pub fn on_drop(self, policy: OnDrop) -> Self {
        self.set(|settings| settings.keeps_claim = policy == OnDrop::KeepUntilLease)
    }

    /// Answers with an [`Outcome`](crate::Outcome), to see which messages ran and which were duplicates.
    ///
    /// The last setting, as [`IdempotencyLayer::outcome`].
    pub fn outcome(self) -> Stack<OutcomeLayer, Self> {
        Stack::new(OutcomeLayer::new(), self)
    }

    /// Waits until no mark and no release is under way any more that a dropped call left to a task.
    ///
    /// As [`IdempotencyLayer::drained`], which see. A claim that is kept until its lease ends is not
    /// waited for.
    ///
    /// # Cancel safety
    ///
    /// Dropping it changes nothing.
    pub async fn drained(&self) {
        self.settings.shared.left_over.drained().await;
    }

    fn set(mut self, change: impl FnOnce(&mut Settings<St>)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self
    }
}

/// Whatever store, extractor and predicate are: closures have no `Debug`.
impl<St, X, D> fmt::Debug for ClaimLayer<St, X, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = &self.settings;
        f.debug_struct("ClaimLayer")
            .field("lease", &settings.renewal.lease())
            .field("wait", &settings.wait)
            .field("keeps_claim", &settings.keeps_claim)
            .field("store_timeout", &settings.shared.limit)
            .field("fail_open", &settings.shared.fail_open)
            .field("mark_retries", &settings.shared.mark_retries)
            .field("fail_on_mark_error", &settings.shared.fail_on_mark_error)
            .field("on_event", &settings.shared.reporter)
            .finish_non_exhaustive()
    }
}

impl<S, St, X: Clone, D: Clone> Layer<S> for ClaimLayer<St, X, D> {
    type Service = ClaimService<S, St, X, D>;

    fn layer(&self, inner: S) -> Self::Service {
        let layer = ClaimLayer {
            settings: self.settings.clone(),
            extract: self.extract.clone(),
            is_done: self.is_done.clone(),
        };
        ClaimService { inner, layer }
    }
}
