use super::{Idempotency, outcome::OutcomeLayer};
use crate::{
    ack::Always,
    call::Shared,
    event::{Event, Reporter},
    id::MetaId,
    store::Store,
};
use std::{fmt, sync::Arc, time::Duration};
use tower_layer::{Layer, Stack};

const DEFAULT_STORE_TIMEOUT: Duration = Duration::from_secs(5);
const DEFAULT_MARK_RETRIES: u32 = 3;

/// Wraps services in [`Idempotency`].
///
/// See the [module docs](crate::idempotency) for examples.
///
/// Clones, and the services made by them, share the store and what they were set up with. A
/// setting changed on a clone is the clone's own.
///
/// **One record serves one consumer.** Services that are to run for the same messages each need a
/// store of their own, or ids of their own:
/// `.id_from(|message: &Envelope| Some(format!("billing:{}", message.id()?)))`.
#[derive(Clone)]
#[must_use]
pub struct IdempotencyLayer<St, X = MetaId, D = Always> {
    pub(crate) shared: Arc<Shared<St>>,
    pub(crate) extract: X,
    pub(crate) is_done: D,
}

/// What to do with a message when the store cannot say whether it ran before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnStoreError {
    /// Do not run it: answer [`StoreError`](crate::StoreError), so that the broker redelivers it.
    #[default]
    FailClosed,
    /// Run it, and remember it if the store is back by then. It may be run twice.
    FailOpen,
}

/// What to answer when a handler succeeded and its id could not be remembered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnMarkError {
    /// The handler's own Ok, since the effect happened. The message is acked; if its broker
    /// redelivers it nevertheless, it runs again.
    #[default]
    Ack,
    /// [`StoreError`](crate::StoreError), and the handler's answer is lost. The broker redelivers
    /// the message, which then runs again.
    Fail,
}

// ===== impl IdempotencyLayer =====

impl<St: Store> IdempotencyLayer<St> {
    /// Runs each `meta.id` once, as `store` records it.
    ///
    /// Unless set otherwise: a store command may take 5 seconds; a store that cannot say whether
    /// a message ran fails its call; a mark that fails is sent again 3 times, after 100, 200 and
    /// 400 ms, and then reported.
    pub fn new(store: St) -> Self {
        IdempotencyLayer {
            shared: Arc::new(Shared {
                store,
                limit: Some(DEFAULT_STORE_TIMEOUT),
                mark_retries: DEFAULT_MARK_RETRIES,
                fail_open: false,
                fail_on_mark_error: false,
                reporter: Reporter::default(),
                #[cfg(feature = "tokio")]
                left_over: crate::call::LeftOver::new(),
            }),
            extract: MetaId,
            is_done: Always,
        }
    }
}

impl<St: Store, X, D> IdempotencyLayer<St, X, D> {
    /// Takes the id from where `extract` says: any [`ExtractId`](crate::ExtractId), such as a
    /// closure `Fn(&Req) -> Option<impl Into<MessageId>>`.
    ///
    /// `None` and the empty id are no usable id: the handler is run and
    /// [`Event::NoId`] reported. The parameter of a closure needs its type, and the id must
    /// not borrow from the request: `|job: &Job| Some(MessageId::from(job.key.as_str()))` does not,
    /// and takes no heap up to 36 bytes.
    ///
    /// A closure that makes an id of several parts must answer `None` when the part that tells
    /// messages apart is empty. Else all such messages have one id, and all but the first are
    /// skipped.
    pub fn id_from<Y>(self, extract: Y) -> IdempotencyLayer<St, Y, D> {
        IdempotencyLayer {
            shared: self.shared,
            extract,
            is_done: self.is_done,
        }
    }

    /// Remembers an id only if the handler's Ok means that its work is done.
    ///
    /// An Ok for which `is_done` says no is passed on, and a redelivery runs the handler again.
    /// Without it every Ok is done. The parameter of a closure needs its type. A predicate that
    /// panics leaves an effect unmarked.
    pub fn done_if<E>(self, is_done: E) -> IdempotencyLayer<St, X, E> {
        IdempotencyLayer {
            shared: self.shared,
            extract: self.extract,
            is_done,
        }
    }

    /// The time limit of one store command; 5 seconds unless set, `None` for no limit.
    ///
    /// It is counted from when the store first has the call wait, so a store in memory pays for
    /// no timer. When it runs out the answer is unknown, and that is a store error. It needs the
    /// feature `tokio` and a tokio runtime with its time driver (`enable_time`); elsewhere there is
    /// no limit.
    pub fn store_timeout(self, limit: impl Into<Option<Duration>>) -> Self {
        let limit = limit.into();
        self.set(|shared| shared.limit = limit)
    }

    /// What to do when the store cannot say whether a message ran; [`OnStoreError::FailClosed`]
    /// unless set.
    pub fn on_store_error(self, policy: OnStoreError) -> Self {
        self.set(|shared| shared.fail_open = policy == OnStoreError::FailOpen)
    }

    /// How often a mark that failed is sent again, after pauses of 100 ms, 200 ms and so on; 3
    /// unless set. Without a timer (see [`store_timeout`](IdempotencyLayer::store_timeout)) there
    /// are no pauses.
    pub fn mark_retries(self, retries: u32) -> Self {
        self.set(|shared| shared.mark_retries = retries)
    }

    /// What to answer when the last try to remember an id failed; [`OnMarkError::Ack`] unless
    /// set. [`Event::MarkFailed`] is reported either way.
    pub fn on_mark_error(self, policy: OnMarkError) -> Self {
        self.set(|shared| shared.fail_on_mark_error = policy == OnMarkError::Fail)
    }

    /// Is told every decision. A later hook replaces an earlier one.
    ///
    /// Runs on the thread of the call, so it must not block. A panic in it is caught.
    pub fn on_event(self, hook: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        self.set(|shared| shared.reporter = Reporter::new(hook))
    }

    /// Answers with an [`Outcome`](crate::Outcome), to see which messages ran and which were duplicates.
    ///
    /// The last setting: it gives a layer that maps the inner service's responses. A predicate
    /// of [`done_if`](IdempotencyLayer::done_if) is asked about the mapped ones.
    pub fn outcome(self) -> Stack<OutcomeLayer, Self> {
        Stack::new(OutcomeLayer::new(), self)
    }

    /// Waits until no mark is under way any more that a dropped call left to a task.
    ///
    /// For the shutdown of a worker: end or drop the calls, await this, then end the runtime. It
    /// covers this layer, its clones and their services. Marks of calls that are still held by
    /// somebody are not waited for.
    ///
    /// With the default settings a mark ends within 21 seconds, made or not. Without a
    /// [`store_timeout`](IdempotencyLayer::store_timeout) it may never end, nor does one on a
    /// runtime that nobody drives any more; a worker that must end gives this a timeout.
    ///
    /// # Cancel safety
    ///
    /// Dropping it changes nothing.
    ///
    /// # Example
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower::{ServiceBuilder, service_fn};
    /// use tower_idempotency::{BoxError, Envelope, IdempotencyLayer, MemoryStore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), BoxError> {
    /// # async fn charge(_: Envelope) -> Result<(), BoxError> { Ok(()) }
    /// let layer = IdempotencyLayer::new(MemoryStore::new());
    /// let consumer = ServiceBuilder::new()
    ///     .layer(layer.clone().outcome())
    ///     .service(service_fn(charge));
    /// // … consume, until it is time to stop …
    /// drop(consumer);
    /// tokio::time::timeout(Duration::from_secs(25), layer.drained()).await?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "tokio")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tokio")))]
    pub async fn drained(&self) {
        self.shared.left_over.drained().await;
    }

    fn set(mut self, change: impl FnOnce(&mut Shared<St>)) -> Self {
        change(Arc::make_mut(&mut self.shared));
        self
    }
}

/// Whatever store, extractor and predicate are: closures have no `Debug`.
impl<St, X, D> fmt::Debug for IdempotencyLayer<St, X, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = &self.shared;
        f.debug_struct("IdempotencyLayer")
            .field("store_timeout", &shared.limit)
            .field("fail_open", &shared.fail_open)
            .field("mark_retries", &shared.mark_retries)
            .field("fail_on_mark_error", &shared.fail_on_mark_error)
            .field("on_event", &shared.reporter)
            .finish_non_exhaustive()
    }
}

impl<S, St, X: Clone, D: Clone> Layer<S> for IdempotencyLayer<St, X, D> {
    type Service = Idempotency<S, St, X, D>;

    fn layer(&self, inner: S) -> Self::Service {
        let layer = IdempotencyLayer {
            shared: self.shared.clone(),
            extract: self.extract.clone(),
            is_done: self.is_done.clone(),
        };
        Idempotency { inner, layer }
    }
}
