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
use sqlx::{
    AssertSqlSafe, Connection, Database, SqlSafeStr, error::DatabaseError, pool::PoolConnection,
};
use sqlx_core::transaction::TransactionManager;
use std::{error::Error, fmt, future::Future, sync::Arc, time::Duration};
use tokio::{
    runtime::Handle,
    sync::OwnedSemaphorePermit,
    time::{Instant, error::Elapsed, sleep, timeout},
};

/// How much longer than a lock the answer to that is waited for.
const LATE: Duration = Duration::from_secs(1);

/// What a message is parked for whose lock was waited for in vain.
const LOCKED: Duration = Duration::from_secs(5);

/// How long it waits before it begins afresh, at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What would be a fault in here.
const ENDED: &str = "the transaction has ended";

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
    /// Some until the end.
    connection: Option<PoolConnection<B::Db>>,
    core: Arc<Core<B>>,
    /// Connections need one even to be dropped.
    runtime: Handle,
    left_over: LeftOver,
    claim: InTransaction,
    begun: bool,
    turn: Option<OwnedSemaphorePermit>,
}

/// Why it is not known to be committed.
pub(crate) enum NotCommitted {
    /// The database does not accept what was written: as if the last statement of the handler had failed.
    Rejected(sqlx::Error),
    Unfinished(Unfinished),
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
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

impl<B: Backend> Begin<'_, B> {
    /// `None`: another transaction was in the way, and it is to begin afresh.
    async fn once(&mut self) -> Result<Option<Opened<B>>, StoreError> {
        let turn = if B::LOCKS_ROWS {
            None
        } else {
            // Where the file is locked as a whole, those of this store wait here in turn, and not all at
            // once at the file, each with a connection.
            let turn = self.core.turns.clone().acquire_owned();
            let mut closed = self.core.pool.close_event();
            match timeout(self.left(), closed.do_until(turn)).await {
                // Never closed.
                Ok(Ok(turn)) => turn.ok(),
                Ok(Err(error)) => return Err(at(Operation::Begin)(failed::<B>(error))),
                Err(_) => return Ok(Some(self.busy())),
            }
        };
        let mut session = Session {
            connection: Some(self.acquire().await?),
            core: self.core.clone(),
            runtime: self.runtime.clone(),
            left_over: self.opening.left_over.clone(),
            claim: self.claim.clone(),
            begun: false,
            turn,
        };

        // Where the begin waits for others, as long as the claim does elsewhere.
        let limit = if B::LOCKS_ROWS {
            self.core.settings.response_timeout
        } else {
            self.left() + LATE
        };
        let statement = B::begin(self.opening.isolation);
        // Dropped in the middle, sqlx would leave the transaction open.
        let begin = self.to_the_end(async move {
            let begun = session.begin(statement, limit).await;
            (session, begun)
        });
        let (mut session, begun) = begin.await;
        match begun {
            Ok(()) => {}
            Err(Failed::Late) if !B::LOCKS_ROWS => return Ok(Some(self.busy())),
            Err(failed) if failed.is(BackendErrorKind::Contention) => return Ok(None),
            Err(failed) => return Err(StoreError::new(Operation::Begin, failed.error(limit))),
        }

        let left = self.left();
        let claim = self.to_the_end(async move {
            let held = session.claim(left).await;
            (session, held)
        });
        let (session, held) = claim.await;
        if let Ok(Held::Yes) = held {
            return Ok(Some(Opened::Session(session)));
        }
        // Before it is answered: whoever gets the answer may drive the runtime no longer.
        self.to_the_end(session.roll_back()).await;
        match held {
            Ok(Held::Done) => Ok(Some(Opened::Done)),
            Ok(Held::Busy(Some(left))) => Ok(Some(Opened::Busy(left))),
            Ok(Held::Busy(None)) => {
                self.core.endless();
                Ok(Some(Opened::Busy(remaining(OPEN_LEASE))))
            }
            Ok(Held::Yes | Held::No | Held::Again) => Ok(None),
            // Some servers have no limit for what a single statement waits for.
            Err(Failed::Late) => Ok(Some(self.busy())),
            Err(failed) if failed.is(BackendErrorKind::Contention) => Ok(None),
            Err(failed) => Err(StoreError::new(Operation::Claim, failed.error(left))),
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
        Opened::Busy(LOCKED)
    }
}

fn at(operation: Operation) -> impl Fn(BackendError) -> StoreError {
    move |error| StoreError::new(operation, error)
}

// ===== the steps =====

/// Not sqlx's `Transaction`, which never lets go of a connection that gives no answer.
type Manager<B> = <<B as Backend>::Db as Database>::TransactionManager;

/// Why a step was not done.
enum Failed {
    /// It gave no answer in time, and its connection is closed: whoever got that next would wait for the
    /// answer.
    Late,
    With(BackendError),
}

impl Failed {
    fn is(&self, kind: BackendErrorKind) -> bool {
        matches!(self, Failed::With(error) if error.kind() == kind)
    }

    fn error(self, limit: Duration) -> BackendError {
        match self {
            Failed::Late => BackendError::new(BackendErrorKind::Unavailable, TimedOut::new(limit)),
            Failed::With(error) => error,
        }
    }
}

impl<B: Backend> Session<B> {
    /// The connection, for the statements of the handler.
    pub(crate) fn connection(&self) -> &<B::Db as Database>::Connection {
        self.connection.as_ref().expect(ENDED)
    }

    pub(crate) fn connection_mut(&mut self) -> &mut <B::Db as Database>::Connection {
        self.connection.as_mut().expect(ENDED)
    }

    fn depth(&self) -> usize {
        Manager::<B>::get_transaction_depth(self.connection())
    }

    async fn begin(&mut self, statement: &'static str, limit: Duration) -> Result<(), Failed> {
        let statement = AssertSqlSafe(statement).into_sql_str();
        let begin = Manager::<B>::begin(self.connection_mut(), Some(statement));
        let begun = timeout(limit, begin).await;
        let begun = self.answered(begun.map(|begun| begun.map_err(failed::<B>)));
        match &begun {
            Ok(()) => self.begun = true,
            Err(failed) if failed.is(BackendErrorKind::Contention) => {}
            // Perhaps somebody left a transaction open on it, which would stand in the way again.
            Err(_) => self.hang_up(),
        }
        begun
    }

    async fn claim(&mut self, patience: Duration) -> Result<Held, Failed> {
        let Session {
            connection,
            core,
            claim,
            ..
        } = self;
        let connection = connection.as_mut().expect(ENDED);
        let claim = core.backend.open(connection, claim, patience);
        // Some servers count in whole seconds.
        let patience = Duration::from_secs(patience.as_millis().div_ceil(1000).max(1) as u64);
        let held = timeout(patience + LATE, claim).await;
        self.answered(held)
    }

    async fn close(&mut self, limit: Duration) -> Result<bool, Failed> {
        let Session {
            connection,
            core,
            claim,
            ..
        } = self;
        let connection = connection.as_mut().expect(ENDED);
        let closed = timeout(limit, core.backend.close(connection, claim)).await;
        self.answered(closed)
    }

    /// Closes a connection that gave no answer, or is one to a server that is no primary any more.
    fn answered<T>(
        &mut self,
        answer: Result<Result<T, BackendError>, Elapsed>,
    ) -> Result<T, Failed> {
        let failed = match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => Failed::With(error),
            Err(_) => Failed::Late,
        };
        if matches!(failed, Failed::Late) || failed.is(BackendErrorKind::ReadOnly) {
            self.hang_up();
        }
        Err(failed)
    }

    fn hang_up(&mut self) {
        if let Some(connection) = self.connection.take() {
            drop(connection.detach());
        }
    }
}

// ===== the end =====

impl<B: Backend> Session<B> {
    /// Records the message and commits.
    pub(crate) async fn commit(mut self) -> Result<(), NotCommitted> {
        let limit = self.core.settings.response_timeout;
        // That the claim is there proves that nothing was undone since.
        let (cause, source): (_, BoxError) = match self.close(limit).await {
            // Otherwise sqlx would take the end of the transaction for that of the savepoint.
            Ok(true) if self.depth() > 1 => {
                (UnfinishedCause::Undone, "a savepoint was left open".into())
            }
            Ok(true) => return self.committed(limit).await,
            Ok(false) => {
                let gone = "the message is not claimed any more";
                (UnfinishedCause::Undone, gone.into())
            }
            Err(Failed::Late) => (UnfinishedCause::Lost, TimedOut::new(limit).into()),
            Err(Failed::With(error)) => {
                let cause = match error.kind() {
                    BackendErrorKind::Contention => UnfinishedCause::Contention,
                    BackendErrorKind::Unavailable => UnfinishedCause::Lost,
                    _ => UnfinishedCause::Undone,
                };
                (cause, error.into())
            }
        };
        // How that ends changes nothing: without a commit all is undone.
        self.roll_back().await;
        Err(NotCommitted::Unfinished(Unfinished::new(cause, source)))
    }

    async fn committed(mut self, limit: Duration) -> Result<(), NotCommitted> {
        let commit = timeout(limit, Manager::<B>::commit(self.connection_mut())).await;
        let error = match commit {
            Ok(Ok(())) => {
                self.core.give_back(self.connection.take());
                return Ok(());
            }
            Ok(Err(error)) => error,
            Err(_) => {
                self.hang_up();
                let late = Unfinished::new(UnfinishedCause::Unknown, TimedOut::new(limit));
                return Err(NotCommitted::Unfinished(late));
            }
        };
        self.roll_back().await;
        let cause = match error.as_database_error() {
            Some(told) if B::rejects(told) => return Err(NotCommitted::Rejected(error)),
            Some(told) if B::classify(told) == BackendErrorKind::Contention => {
                UnfinishedCause::Contention
            }
            _ => UnfinishedCause::Unknown,
        };
        let error = Unfinished::new(cause, failed::<B>(error));
        Err(NotCommitted::Unfinished(error))
    }

    /// Rolls back, which also has the id free at once. Answers whether its connection was lost.
    pub(crate) async fn roll_back(mut self) -> bool {
        match self.connection.take() {
            Some(connection) => rolled_back(&self.core, connection, self.begun).await,
            None => true,
        }
    }

    /// Whether an error, or what it came from, says that another transaction was in the way.
    pub(crate) fn is_contention(error: &BoxError) -> bool {
        let mut next: Option<&(dyn Error + 'static)> = Some(error.as_ref());
        while let Some(error) = next {
            let told = error.downcast_ref::<sqlx::Error>();
            let told = told.and_then(sqlx::Error::as_database_error);
            // An error that passes for the one within it, as `transparent` of thiserror has it, shows only what
            // that came from.
            let inner = || error.downcast_ref::<Box<dyn DatabaseError>>();
            if let Some(told) = told.or_else(|| inner().map(|it| &**it)) {
                return B::classify(told) == BackendErrorKind::Contention;
            }
            next = error.source();
        }
        false
    }
}

impl<B: Backend> Drop for Session<B> {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take() else {
            return;
        };
        let (core, begun) = (self.core.clone(), self.begun);
        let turn = self.turn.take();
        let under_way = self.left_over.begin();
        // On a runtime that has ended the task is dropped unpolled, and the connection closed.
        let _entered = self.runtime.enter();
        self.runtime.spawn(async move {
            rolled_back(&core, connection, begun).await;
            drop((turn, under_way));
        });
    }
}

/// Rolls back, and gives the connection to the pool. Answers whether it was lost.
async fn rolled_back<B: Backend>(
    core: &Core<B>,
    mut connection: PoolConnection<B::Db>,
    begun: bool,
) -> bool {
    let roll_back = async {
        core.backend.ensure_open(&mut connection).await;
        // What has ended as sqlx counts is something else at the server, perhaps.
        let good = !begun || connection.is_in_transaction();
        while connection.is_in_transaction() {
            Manager::<B>::rollback(&mut connection).await?;
        }
        Ok::<_, sqlx::Error>(good)
    };
    let ended = timeout(core.settings.response_timeout, roll_back).await;
    if let Ok(Ok(true)) = ended {
        core.give_back(Some(connection));
    } else {
        // What it is in the middle of ends with it.
        drop(connection.detach());
    }
    // What else a rollback is answered may be the late answer to a statement before it.
    matches!(
        ended,
        Ok(Err(sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::WorkerCrashed))
    )
}

impl<B: Backend> fmt::Debug for Session<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("core", &self.core)
            .finish_non_exhaustive()
    }
}
