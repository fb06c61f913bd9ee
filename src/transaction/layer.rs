use super::{Dialect, TransactionService};
use crate::{
    ack::Always,
    call::LeftOver,
    error::{BackendError, ConfigError},
    event::{Event, Reporter},
    id::MetaId,
    idempotency::OutcomeLayer,
    store::sql::{Isolation, SqlStore, session::Opening},
};
use sqlx::Pool;
use std::{fmt, sync::Arc, time::Duration};
use tower_layer::{Layer, Stack};

const DEFAULT_LOCK_WAIT: Duration = Duration::from_secs(5);

/// Beyond it, a lock is waited for no longer.
const LONGEST_LOCK_WAIT: Duration = Duration::from_secs(3600);

/// Wraps services in [`TransactionService`].
///
/// See the [module docs](crate::transaction) for examples.
///
/// Clones, and the services made by them, share the pool and what they were set up with. A setting
/// changed on a clone is the clone's own.
///
/// **One record serves one consumer**: services that are to run for the same messages each need a table of
/// their own.
#[must_use]
pub struct TransactionLayer<DB: Dialect, X = MetaId, D = Always> {
    pub(super) settings: Arc<Settings<DB>>,
    pub(super) extract: X,
    pub(super) is_done: D,
}

/// What a layer and its clones and calls share.
pub(super) struct Settings<DB: Dialect> {
    pub(super) store: SqlStore<DB::Table>,
    pub(super) opening: Opening,
    pub(super) reporter: Reporter,
}

// ===== impl TransactionLayer =====

impl<DB: Dialect> TransactionLayer<DB> {
    /// Handles each message in a transaction of this pool, and records it in this table, which
    /// [`migrate`](TransactionLayer::migrate) makes.
    ///
    /// Messages are remembered for 24 hours; [`with_store`](TransactionLayer::with_store) takes other settings.
    ///
    /// # Errors
    ///
    /// For a name that a table cannot have, as [`SqlStore::builder`].
    pub fn new(pool: Pool<DB>, table: &str) -> Result<Self, ConfigError> {
        Ok(Self::with_store(SqlStore::builder(table).pool(pool)?))
    }

    /// Handles each message in a transaction of this store's pool, and records it in its table, with its TTL,
    /// its [`response_timeout`](crate::store::sql::SqlStoreBuilder::response_timeout) and whether there is a
    /// pooler.
    ///
    /// The handler writes what it writes on the same pool: it is to be one of the caller's own, given to the
    /// store by [`SqlStoreBuilder::pool`](crate::store::sql::SqlStoreBuilder::pool).
    pub fn with_store(store: SqlStore<DB::Table>) -> Self {
        TransactionLayer {
            settings: Arc::new(Settings {
                store,
                opening: Opening {
                    isolation: None,
                    lock_wait: DEFAULT_LOCK_WAIT,
                    left_over: LeftOver::new(),
                },
                reporter: Reporter::default(),
            }),
            extract: MetaId,
            is_done: Always,
        }
    }
}

impl<DB: Dialect, X, D> TransactionLayer<DB, X, D> {
    /// The store on the same table: to make it, to purge it, to have a message run again.
    #[must_use]
    pub fn store(&self) -> &SqlStore<DB::Table> {
        &self.settings.store
    }

    /// Makes the table unless it is there: [`SqlStore::migrate`].
    ///
    /// # Errors
    ///
    /// As [`SqlStore::migrate`].
    pub async fn migrate(&self) -> Result<(), BackendError> {
        self.settings.store.migrate().await
    }

    /// Takes the id from where `extract` says; see
    /// [`IdempotencyLayer::id_from`](crate::IdempotencyLayer::id_from).
    pub fn id_from<Y>(self, extract: Y) -> TransactionLayer<DB, Y, D> {
        TransactionLayer {
            settings: self.settings,
            extract,
            is_done: self.is_done,
        }
    }

    /// Commits only if the handler's Ok means that its work is done.
    ///
    /// An Ok for which `is_done` says no is passed on, but its transaction is rolled back, and a
    /// redelivery runs the handler again. The parameter of a closure needs its type.
    pub fn done_if<E>(self, is_done: E) -> TransactionLayer<DB, X, E> {
        TransactionLayer {
            settings: self.settings,
            extract: self.extract,
            is_done,
        }
    }

    /// How long a call waits for the transaction of another copy of its message before it is
    /// [`Parked`](crate::Parked); 5 seconds unless set, an hour at most, and zero is a millisecond.
    ///
    /// For the claim alone: what the handler waits for is as its session says. MariaDB counts in whole seconds, rounded
    /// up. MySQL has no such limit for a single statement, nor has PostgreSQL for a lock on the whole table, and SQLite's is that of the
    /// connection: there the call answers after a second more, and closes its connection, whose statement the
    /// server ends when its own limit is over.
    pub fn lock_wait(self, max: Duration) -> Self {
        self.set(|settings| settings.opening.lock_wait = max.min(LONGEST_LOCK_WAIT))
    }

    /// The isolation level of the transactions; what the session says unless set. SQLite has one level only,
    /// the highest, whatever is set.
    ///
    /// The record is right at each. Above [`ReadCommitted`](Isolation::ReadCommitted) more handlers meet
    /// serialization failures, which end in [`Unfinished`](crate::Unfinished) and want a retry outside of this layer.
    pub fn isolation(self, level: Isolation) -> Self {
        self.set(|settings| settings.opening.isolation = Some(level))
    }

    /// Is told every decision; see [`IdempotencyLayer::on_event`](crate::IdempotencyLayer::on_event).
    ///
    /// [`Event::Ran`] is told after the commit was answered.
    pub fn on_event(self, hook: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        self.set(|settings| settings.reporter = Reporter::new(hook))
    }

    /// Answers with an [`Outcome`](crate::Outcome), to see which messages ran and which were duplicates.
    ///
    /// The last setting, as [`IdempotencyLayer::outcome`](crate::IdempotencyLayer::outcome).
    pub fn outcome(self) -> Stack<OutcomeLayer, Self> {
        Stack::new(OutcomeLayer::new(), self)
    }

    /// Waits until no begin, commit and rollback is under way any more that was left to a task, as by a dropped
    /// call.
    ///
    /// As [`IdempotencyLayer::drained`](crate::IdempotencyLayer::drained). Without it nothing is lost: what is
    /// not committed by then is rolled back by the server, and its message runs again.
    ///
    /// # Cancel safety
    ///
    /// Dropping it changes nothing.
    pub async fn drained(&self) {
        self.settings.opening.left_over.drained().await;
    }

    fn set(mut self, change: impl FnOnce(&mut Settings<DB>)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self
    }
}

// Of a database there is neither Clone nor Debug.
impl<DB: Dialect> Clone for Settings<DB> {
    fn clone(&self) -> Self {
        Settings {
            store: self.store.clone(),
            opening: self.opening.clone(),
            reporter: self.reporter.clone(),
        }
    }
}

impl<DB: Dialect, X: Clone, D: Clone> Clone for TransactionLayer<DB, X, D> {
    fn clone(&self) -> Self {
        TransactionLayer {
            settings: self.settings.clone(),
            extract: self.extract.clone(),
            is_done: self.is_done.clone(),
        }
    }
}

/// Whatever extractor and predicate are: closures have no `Debug`.
impl<DB: Dialect, X, D> fmt::Debug for TransactionLayer<DB, X, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings {
            store,
            opening,
            reporter,
        } = &*self.settings;
        f.debug_struct("TransactionLayer")
            .field("store", store)
            .field("isolation", &opening.isolation)
            .field("lock_wait", &opening.lock_wait)
            .field("on_event", reporter)
            .finish_non_exhaustive()
    }
}

impl<S, DB: Dialect, X: Clone, D: Clone> Layer<S> for TransactionLayer<DB, X, D> {
    type Service = TransactionService<S, DB, X, D>;

    fn layer(&self, inner: S) -> Self::Service {
        TransactionService {
            inner,
            layer: self.clone(),
        }
    }
}
