//! A transaction that records a message: from its begin to its end, whoever drops it in between.

use super::{
    SqlStore,
    engine::{
        Backend, Core, Dropped, FIRST_PAUSE, Held, InTransaction, Isolation, OPEN_LEASE, Within,
        failed, remaining,
    },
    key::nameless,
};
use crate::{
    call::LeftOver,
    error::{
        BackendError, BackendErrorKind, BoxError, Operation, StoreError, TimedOut, Unfinished,
        UnfinishedCause,
    },
    id::MessageId,
    store::claim::Owner,
};
use sqlx::{AssertSqlSafe, Connection, Database, SqlSafeStr, Transaction, pool::PoolConnection};
use std::{error::Error, fmt, future::Future, sync::Arc, time::Duration};
use tokio::{
    runtime::Handle,
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep, timeout},
};

/// How much later than it was to an answer to a wait for a lock is waited for: some servers count in seconds, and
/// some have no limit for a single statement.
const LATE: Duration = Duration::from_secs(1);

/// What a message is parked for at least whose lock was waited for in vain.
const LOCKED: Duration = Duration::from_secs(1);

/// How the transactions of a layer begin.
#[derive(Clone, Debug)]
pub(crate) struct Opening {
    pub(crate) isolation: Option<Isolation>,
    pub(crate) lock_wait: Duration,
    pub(crate) left_over: LeftOver,
}

/// What became of the begin.
pub(crate) enum Opened<B: Backend> {
    /// The message is this transaction's to handle.
    Session(Session<B>),
    /// The message had its effect.
    Done,
    /// Somebody else is at it, perhaps for so long.
    Busy(Duration),
}

/// A transaction in which a message is claimed. Dropped, it is rolled back.
pub(crate) struct Session<B: Backend> {
    /// Some until the drop.
    transaction: Option<Transaction<'static, B::Db>>,
    core: Arc<Core<B>>,
    /// Connections need one even to be dropped.
    runtime: Handle,
    left_over: LeftOver,
    claim: InTransaction,
    turn: Option<OwnedSemaphorePermit>,
}

/// Why it is not known to be committed.
pub(crate) enum NotCommitted {
    /// The database does not accept what was written: as if the last statement of the handler had failed.
    Rejected(sqlx::Error),
    Unfinished(Unfinished),
}

impl NotCommitted {
    fn new(cause: UnfinishedCause, source: impl Into<BoxError>) -> Self {
        NotCommitted::Unfinished(Unfinished::new(cause, source))
    }
}

// ===== begin =====

/// What is to be begun, perhaps several times.
struct Begin<'a, B: Backend> {
    core: Arc<Core<B>>,
    runtime: Handle,
    opening: &'a Opening,
    claim: InTransaction,
    /// Until when others are waited for: counted from when that can begin.
    until: Option<Instant>,
}

impl<B: Backend> Session<B> {
    /// Begins a transaction and claims the message in it. An empty id is none: what is claimed
    /// for it is removed in the end.
    ///
    /// To be polled within the runtime.
    pub(crate) async fn open(
        store: SqlStore<B>,
        runtime: Handle,
        opening: &Opening,
        id: &MessageId,
    ) -> Result<Opened<B>, StoreError> {
        let core = store.core;
        let owner = Owner::random().to_string();
        let column = core.column(&runtime).await.map_err(at(Operation::Begin))?;
        let recorded = !id.is_empty();
        let key = if recorded {
            column.key(id).map_err(at(Operation::Claim))?
        } else {
            nameless(&owner)
        };
        let mut begin = Begin {
            core,
            runtime,
            opening,
            claim: InTransaction {
                key,
                owner,
                recorded,
                place: None,
            },
            until: None,
        };
        let mut pause = FIRST_PAUSE;
        loop {
            if let Some(opened) = begin.once().await? {
                return Ok(opened);
            }
            if begin.left() <= pause {
                return Ok(begin.busy());
            }
            sleep(pause).await;
            pause *= 2;
        }
    }
}

impl<B: Backend> Begin<'_, B> {
    /// `None`: another transaction was in the way, and it is to begin afresh.
    async fn once(&mut self) -> Result<Option<Opened<B>>, StoreError> {
        let turn = if B::LOCKS_ROWS {
            None
        } else {
            // Where the file is locked as a whole, those of this process wait here in turn, and not all at
            // once at the file, each with a connection.
            let turn = self.core.turns.clone().acquire_owned();
            match timeout(self.left(), turn).await {
                Ok(turn) => turn.ok(),
                Err(_) => return Ok(Some(self.busy())),
            }
        };
        let connection = self.acquire().await?;
        let left = self.left();

        // Dropped in the middle, sqlx would leave the transaction open.
        let begin = AssertSqlSafe(B::begin(self.opening.isolation)).into_sql_str();
        let begin = Transaction::begin(connection, Some(begin));
        let begin = self.to_the_end(async move { (begin.await, turn) });
        let response_timeout = self.core.settings.response_timeout;
        let limit = if B::LOCKS_ROWS {
            response_timeout
        } else {
            left + LATE
        };
        let (begun, turn) = match timeout(limit, begin).await {
            Ok(begun) => begun,
            Err(_) if B::LOCKS_ROWS => return Err(at(Operation::Begin)(timed_out(limit))),
            Err(_) => return Ok(Some(self.busy())),
        };
        let transaction = match begun.map_err(failed::<B>) {
            Ok(transaction) => transaction,
            Err(error) if error.kind() == BackendErrorKind::Contention => return Ok(None),
            Err(error) => return Err(at(Operation::Begin)(error)),
        };

        let mut session = Session {
            transaction: Some(transaction),
            core: self.core.clone(),
            runtime: self.runtime.clone(),
            left_over: self.opening.left_over.clone(),
            claim: self.claim.clone(),
            turn,
        };
        let left = self.left();
        let claim = self.to_the_end(async move {
            let held = session.claim(left).await;
            (session, held)
        });
        let Ok((session, held)) = timeout(left + LATE, claim).await else {
            return Ok(Some(self.busy()));
        };
        match held {
            Ok(Held::Yes) => Ok(Some(Opened::Session(session))),
            Ok(Held::Done) => Ok(Some(Opened::Done)),
            Ok(Held::Busy(Some(left))) => Ok(Some(Opened::Busy(left))),
            Ok(Held::Busy(None)) => {
                self.core.endless();
                Ok(Some(Opened::Busy(remaining(OPEN_LEASE))))
            }
            Ok(Held::No | Held::Again) => Ok(None),
            Err(error) if error.kind() == BackendErrorKind::Contention => Ok(None),
            Err(error) => Err(at(Operation::Claim)(error)),
        }
    }

    async fn acquire(&self) -> Result<PoolConnection<B::Db>, StoreError> {
        loop {
            let core = self.core.clone();
            let acquire = async move { core.acquire().await };
            let acquire = Within::new(&self.runtime, Dropped::Ends, acquire);
            let connection = acquire.await.map_err(at(Operation::Begin))?;
            if !connection.is_in_transaction() {
                return Ok(connection);
            }
            // As sqlx counts, somebody left it so.
            drop(connection.detach());
        }
    }

    fn to_the_end<T: 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Within<T> {
        Within::new(&self.runtime, Dropped::GoesOn, work).counted(&self.opening.left_over)
    }

    /// How much longer others are waited for.
    fn left(&mut self) -> Duration {
        let until = self
            .until
            .get_or_insert_with(|| Instant::now() + self.opening.lock_wait);
        until.saturating_duration_since(Instant::now())
    }

    /// Others were waited for in vain.
    fn busy(&self) -> Opened<B> {
        Opened::Busy(self.opening.lock_wait.max(LOCKED))
    }
}

fn at(operation: Operation) -> impl Fn(BackendError) -> StoreError {
    move |error| StoreError::new(operation, error)
}

fn timed_out(limit: Duration) -> BackendError {
    BackendError::new(BackendErrorKind::Unavailable, TimedOut::new(limit))
}

// ===== end =====

impl<B: Backend> Session<B> {
    async fn claim(&mut self, patience: Duration) -> Result<Held, BackendError> {
        let Session {
            transaction,
            core,
            claim,
            ..
        } = self;
        let transaction = transaction.as_mut().expect("taken by the drop alone");
        core.backend.open(transaction, claim, patience).await
    }

    /// The connection, for the statements of the handler.
    pub(crate) fn connection(&self) -> &<B::Db as Database>::Connection {
        self.transaction.as_ref().expect("taken by the drop alone")
    }

    pub(crate) fn connection_mut(&mut self) -> &mut <B::Db as Database>::Connection {
        self.transaction.as_mut().expect("taken by the drop alone")
    }

    /// Records the message and commits.
    pub(crate) async fn commit(mut self) -> Result<(), NotCommitted> {
        let limit = self.core.settings.response_timeout;
        let core = self.core.clone();
        let transaction = self.transaction.as_mut().expect("taken by the drop alone");
        // That the claim is there proves that nothing was undone since.
        let close = core.backend.close(transaction, &self.claim);
        match timeout(limit, close).await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => {
                // An error of this changes nothing: without a commit all is undone.
                let _ = self.roll_back().await;
                let gone = "the message is not claimed any more";
                return Err(NotCommitted::new(UnfinishedCause::Undone, gone));
            }
            Ok(Err(error)) => {
                let _ = self.roll_back().await;
                let cause = match error.kind() {
                    BackendErrorKind::Contention => UnfinishedCause::Contention,
                    BackendErrorKind::Unavailable => UnfinishedCause::Lost,
                    _ => UnfinishedCause::Undone,
                };
                return Err(NotCommitted::new(cause, error));
            }
            Err(_) => {
                return Err(NotCommitted::new(
                    UnfinishedCause::Lost,
                    TimedOut::new(limit),
                ));
            }
        }
        let transaction = self.transaction.take().expect("taken by the drop alone");
        let error = match timeout(limit, transaction.commit()).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error,
            Err(_) => {
                let late = TimedOut::new(limit);
                return Err(NotCommitted::new(UnfinishedCause::Unknown, late));
            }
        };
        let cause = match error.as_database_error() {
            Some(told) if B::rejects(told) => return Err(NotCommitted::Rejected(error)),
            Some(told) if B::classify(told) == BackendErrorKind::Contention => {
                UnfinishedCause::Contention
            }
            _ => UnfinishedCause::Unknown,
        };
        Err(NotCommitted::new(cause, failed::<B>(error)))
    }

    /// Rolls back, which also has the id free at once.
    pub(crate) async fn roll_back(mut self) -> Result<(), BackendError> {
        let transaction = self.transaction.take().expect("taken by the drop alone");
        rolled_back(&self.core, transaction).await
    }

    /// Whether an error, or what it came from, says that another transaction was in the way.
    pub(crate) fn is_contention(error: &BoxError) -> bool {
        let mut next: Option<&(dyn Error + 'static)> = Some(error.as_ref());
        while let Some(error) = next {
            let told = error.downcast_ref::<sqlx::Error>();
            if let Some(told) = told.and_then(sqlx::Error::as_database_error) {
                return B::classify(told) == BackendErrorKind::Contention;
            }
            next = error.source();
        }
        false
    }
}

impl<B: Backend> Drop for Session<B> {
    fn drop(&mut self) {
        let Some(transaction) = self.transaction.take() else {
            return;
        };
        let core = self.core.clone();
        let turn = self.turn.take();
        let under_way = self.left_over.begin();
        // On a runtime that has ended the task is dropped unpolled, and the connection closed.
        let _entered = self.runtime.enter();
        self.runtime.spawn(async move {
            // Unknown or not: without a commit all is undone.
            let _ = rolled_back(&core, transaction).await;
            drop((turn, under_way));
        });
    }
}

async fn rolled_back<B: Backend>(
    core: &Core<B>,
    mut transaction: Transaction<'static, B::Db>,
) -> Result<(), BackendError> {
    let limit = core.settings.response_timeout;
    let roll_back = async {
        core.backend.reopen(&mut transaction).await;
        transaction.rollback().await
    };
    match timeout(limit, roll_back).await {
        Ok(answer) => answer.map_err(failed::<B>),
        Err(_) => Err(timed_out(limit)),
    }
}

impl<B: Backend> fmt::Debug for Session<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("core", &self.core)
            .finish_non_exhaustive()
    }
}
