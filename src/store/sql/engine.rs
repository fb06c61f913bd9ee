//! What the SQL stores share: how a command becomes a statement on a task.

use super::{
    key::{Column, Table},
    lane::{self, Answer, Batch, Lane},
};
use crate::{
    error::{BackendError, BackendErrorKind, BoxError, ConfigError, TimedOut},
    id::MessageId,
    store::ttl::Ttl,
};
use sqlx::{Connection, Database, Pool, error::DatabaseError, pool::PoolConnection};
use std::{
    error::Error,
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};
use tokio::{
    runtime::Handle,
    sync::{Semaphore, oneshot},
    time::{sleep, timeout},
};

pub(super) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// How long a statement for several ids waits for a row before its ids go alone.
const LANE_PATIENCE: Duration = Duration::from_millis(100);

/// How long a migration goes on while others are in its way.
const MIGRATION: Duration = Duration::from_secs(3);

/// How long a driver keeps a connection.
const LONGEST_HOLD: Duration = Duration::from_secs(60);

/// Before a statement that another session was in the way of is sent again the first time.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// How many rows one statement of a purge deletes.
pub(super) const PURGE_BATCH: u32 = 1000;

/// A claim is deleted only so long after its end: its owner may still be taking it again. In
/// microseconds.
pub(super) const CLAIM_GRACE: i64 = 60_000_000;

/// The settings, checked.
#[derive(Clone, Debug)]
pub struct Settings {
    pub(super) table: Table,
    pub(super) layout: Layout,
    pub(super) ttl: Ttl,
    pub(super) response_timeout: Duration,
    pub(super) max_connections: u32,
    pub(super) transaction_pooler: bool,
}

/// Whose table it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Ours,
    Go,
    Php,
}

/// Whose record a store works on, where this database can hold it.
pub trait Record<B>: 'static {
    /// What the table is like.
    const LAYOUT: Layout;
}

/// What is asked about ids, several of which may go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Seen,
    Remember,
    Forget,
}

// ===== what the databases differ in =====

/// The statements of one database for one table.
pub trait Backend: Sized + Send + Sync + 'static {
    type Db: Database;

    /// Whether one statement takes the ids of several callers.
    const GATHERS: bool;

    /// Whether others lock single rows, so that one id may have to wait while the next one does not.
    const LOCKS_ROWS: bool = true;

    fn connect(
        url: &str,
        settings: &Settings,
    ) -> impl Future<Output = Result<Pool<Self::Db>, BackendError>> + Send;

    fn new(settings: &Settings) -> Self;

    /// What an error of this database means.
    fn classify(error: &dyn DatabaseError) -> BackendErrorKind;

    fn ddl(&self) -> String;

    /// One look at the catalogue, and what DDL is missing. Answers whether nothing was.
    fn migrate(
        &self,
        connection: PoolConnection<Self::Db>,
    ) -> impl Future<Output = Result<Migrated, BackendError>> + Send;

    /// Deletes a batch of what is past its end, and says how many.
    fn purge(
        &self,
        connection: &mut PoolConnection<Self::Db>,
    ) -> impl Future<Output = Result<u64, BackendError>> + Send;

    /// Looks the table up: what its key column holds, or what it lacks.
    fn check(
        &self,
        connection: &mut <Self::Db as Database>::Connection,
    ) -> impl Future<Output = Result<Column, BackendError>> + Send;

    /// One statement. Answers for each key whether it is seen; of the other commands the answers
    /// say nothing. `patience`: how long it may wait for a row that another session has locked.
    fn run(
        &self,
        connection: &mut <Self::Db as Database>::Connection,
        command: Command,
        keys: &[String],
        patience: Duration,
    ) -> impl Future<Output = Result<Vec<bool>, BackendError>> + Send;
}

/// What one step of a migration came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Migrated {
    /// Everything is there.
    Complete,
    /// Something was missing and made: look again.
    Again,
}

/// What went wrong, by its code.
pub(super) fn failed<B: Backend>(error: sqlx::Error) -> BackendError {
    use BackendErrorKind::{Config, Other, Schema, Unavailable};

    let kind = match &error {
        sqlx::Error::Database(error) => B::classify(error.as_ref()),
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => Unavailable,
        sqlx::Error::Configuration(_) => Config,
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => Schema,
        _ => Other,
    };
    BackendError::new(kind, error)
}

/// No connection from the pool.
pub(super) fn no_connection<B: Backend>(error: sqlx::Error) -> BackendError {
    let timed_out = matches!(error, sqlx::Error::PoolTimedOut);
    let error = failed::<B>(error);
    if timed_out {
        return error.expected(
            "all of them are in use, or none came about: is the server there, and is it this one?",
        );
    }
    error
}

/// Refuses a URL of another kind of database, which would be tried in vain, without showing it.
pub(super) fn expect_scheme(url: &str, expected: &'static str) -> Result<(), ConfigError> {
    let scheme = url.split(':').next().unwrap_or_default();
    if url.contains(':') && expected.split(" or ").any(|good| good == scheme) {
        return Ok(());
    }
    Err(ConfigError::new("url", "of another kind", expected))
}

/// The table is not there.
pub(super) fn missing(table: &Table, layout: Layout) -> BackendError {
    BackendError::new(
        BackendErrorKind::Schema,
        format!("there is no table `{}`", table.name()),
    )
    .expected(match layout {
        Layout::Ours => "`migrate()` makes it, or the statements of `ddl()`",
        Layout::Go | Layout::Php => "it is the other fleet's to make, see `store::foreign`",
    })
}

/// The table is there, but not as it has to be.
pub(super) fn unfit(
    table: &Table,
    what: impl fmt::Display,
    expected: impl Into<String>,
) -> BackendError {
    BackendError::new(
        BackendErrorKind::Schema,
        format!("the table `{}` {what}", table.name()),
    )
    .expected(expected.into())
}

/// Whether the columns are there, each of one of the types it may have.
pub(super) fn columns_fit<'a>(
    table: &Table,
    needed: &[(&str, &[&str])],
    of_type: impl Fn(&str) -> Option<&'a str>,
) -> Result<(), BackendError> {
    for (name, types) in needed {
        let found = of_type(name);
        if !found.is_some_and(|found| types.contains(&found)) {
            let found = found.unwrap_or("no such column");
            return Err(unfit(
                table,
                format_args!("has {found} for `{name}`"),
                format!("expected {}", types.join(" or ")),
            ));
        }
    }
    Ok(())
}

fn unavailable(source: impl Into<BoxError>) -> BackendError {
    BackendError::new(BackendErrorKind::Unavailable, source)
}

// ===== what they share =====

/// What the clones of a store share.
pub(in crate::store) struct Core<B: Backend> {
    backend: B,
    pool: Pool<B::Db>,
    /// Whether nobody else uses the pool.
    own_pool: bool,
    settings: Settings,
    /// Looked up once.
    column: OnceLock<Column>,
    seen: Lane,
    remember: Lane,
    /// How many statements for a single id may wait for rows at once: never on all connections.
    singles: Semaphore,
}

impl<B: Backend> Core<B> {
    pub(super) fn new(settings: Settings, pool: Pool<B::Db>, own_pool: bool) -> Arc<Self> {
        // A connection may be waited for as well.
        let patience = settings.response_timeout.saturating_mul(2);
        Arc::new(Core {
            backend: B::new(&settings),
            singles: Semaphore::new((pool.options().get_max_connections() as usize / 2).max(1)),
            pool,
            own_pool,
            settings,
            column: OnceLock::new(),
            seen: Lane::new(patience),
            remember: Lane::new(patience),
        })
    }

    pub(super) fn seen(self: &Arc<Self>, id: &MessageId) -> BoxFuture<Result<bool, BackendError>> {
        Box::pin(self.call(Command::Seen, id))
    }

    pub(super) fn remember(
        self: &Arc<Self>,
        id: &MessageId,
    ) -> BoxFuture<Result<(), BackendError>> {
        let call = self.call(Command::Remember, id);
        Box::pin(async { call.await.map(drop) })
    }

    pub(super) fn forget(self: &Arc<Self>, id: &MessageId) -> BoxFuture<Result<(), BackendError>> {
        let call = self.call(Command::Forget, id);
        Box::pin(async { call.await.map(drop) })
    }

    fn call(
        self: &Arc<Self>,
        command: Command,
        id: &MessageId,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send + use<B> {
        let (core, id) = (self.clone(), id.clone());
        async move {
            let runtime = runtime()?;
            let key = match core.column(&runtime).await?.key(&id) {
                Ok(key) => key,
                // It was never remembered, nor will it be: it is run each time, and the mark says why.
                Err(error) if command == Command::Remember => return Err(error),
                Err(_) => return Ok(false),
            };
            let Some(lane) = core.lane(command) else {
                return core.alone(&runtime, command, key).await;
            };
            if let Some(_leave) = lane.alone() {
                return core.alone(&runtime, command, key).await;
            }
            match core.gathered(&runtime, lane, command, key.clone()).await {
                Some(answer) => answer,
                None => {
                    // Never closed.
                    let _place = core.singles.acquire().await;
                    core.alone(&runtime, command, key).await
                }
            }
        }
    }

    pub(super) fn ddl(&self) -> String {
        self.backend.ddl()
    }

    fn lane(&self, command: Command) -> Option<&Lane> {
        match command {
            Command::Seen if B::GATHERS => Some(&self.seen),
            Command::Remember if B::GATHERS => Some(&self.remember),
            _ => None,
        }
    }

    /// What the table holds, looked up before its first use. Whoever comes before the first answer
    /// looks for itself: nobody waits for somebody who may not go on, nor for a row of failures.
    async fn column(self: &Arc<Self>, runtime: &Handle) -> Result<Column, BackendError> {
        if let Some(column) = self.column.get() {
            return Ok(*column);
        }
        let core = self.clone();
        let connection = async move { core.acquire().await };
        let mut connection = Within::new(runtime, Dropped::Ends, connection).await?;
        let core = self.clone();
        let look = async move {
            let limit = core.settings.response_timeout;
            match timeout(limit, core.backend.check(&mut connection)).await {
                Ok(answer) => {
                    core.give_back(Some(connection));
                    answer
                }
                Err(_) => Err(core.hung(connection)),
            }
        };
        let column = Within::new(runtime, Dropped::GoesOn, look).await?;
        Ok(*self.column.get_or_init(|| column))
    }

    async fn acquire(&self) -> Result<PoolConnection<B::Db>, BackendError> {
        let connection = self.pool.acquire().await;
        if let Err(sqlx::Error::PoolTimedOut) = connection {
            self.shed();
        }
        connection.map_err(no_connection::<B>)
    }

    /// Closes the connections that nobody uses: where one gives no answer the others may not either,
    /// and each would cost somebody a time limit.
    fn shed(&self) {
        if self.own_pool {
            while let Some(idle) = self.pool.try_acquire() {
                drop(idle.detach());
            }
        }
    }

    /// Gives a connection back as its drop would do, but within the time limit: the pool first asks
    /// it whether it is good, and would wait for the answer without end.
    fn give_back(&self, connection: Option<PoolConnection<B::Db>>) {
        if let Some(mut connection) = connection {
            // Hidden in sqlx's documentation, as there it is for the drop alone.
            let back = connection.return_to_pool();
            tokio::spawn(timeout(self.settings.response_timeout, back));
        }
    }

    /// Closes a connection that gave no answer: whoever gets it next would wait for that one.
    fn hung(&self, connection: PoolConnection<B::Db>) -> BackendError {
        drop(connection.detach());
        self.shed();
        unavailable(TimedOut::new(self.settings.response_timeout))
    }

    /// One command on a connection, within the time limit. Gives the connection back if it can be
    /// used again.
    async fn run(
        &self,
        mut connection: PoolConnection<B::Db>,
        command: Command,
        keys: &[String],
        patience: Duration,
    ) -> (
        Option<PoolConnection<B::Db>>,
        Result<Vec<bool>, BackendError>,
    ) {
        let work = async {
            let mut tries = 0;
            loop {
                let begun = Instant::now();
                let answer = self
                    .backend
                    .run(&mut connection, command, keys, patience)
                    .await;
                tries += 1;
                // A row that is inserted after a wait for another session's lock has the end that
                // was computed before the wait. It is ours by now, so a second time does not wait.
                let late = command == Command::Remember && begun.elapsed() > self.slack();
                if !late || answer.is_err() || tries == 3 {
                    return answer;
                }
            }
        };
        match timeout(self.settings.response_timeout, work).await {
            // After a failover this may be the old primary; the next connection looks for the new one.
            Ok(Err(error)) if error.kind() == BackendErrorKind::ReadOnly => {
                drop(connection.detach());
                (None, Err(error))
            }
            Ok(answer) => (Some(connection), answer),
            Err(_) => (None, Err(self.hung(connection))),
        }
    }

    /// How much later than its statement an end may be computed from.
    fn slack(&self) -> Duration {
        match self.settings.ttl.micros() {
            Some(ttl) => Duration::from_micros(ttl as u64 / 10)
                .clamp(Duration::from_millis(5), Duration::from_secs(1)),
            None => Duration::MAX,
        }
    }

    /// One id in a statement of its own; sent again while other sessions are in the way.
    async fn alone(
        self: &Arc<Self>,
        runtime: &Handle,
        command: Command,
        key: String,
    ) -> Result<bool, BackendError> {
        let begun = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let core = self.clone();
            let connection = async move { core.acquire().await };
            let connection = Within::new(runtime, Dropped::Ends, connection).await?;
            let (core, keys) = (self.clone(), [key.clone()]);
            let run = async move {
                // The server gives up before the time limit does, and the connection stays good.
                let patience = core.settings.response_timeout / 10 * 9;
                let (connection, answers) = core.run(connection, command, &keys, patience).await;
                core.give_back(connection);
                answers
            };
            match Within::new(runtime, Dropped::GoesOn, run).await {
                Ok(answers) => return Ok(answers.first() == Some(&true)),
                Err(error)
                    if error.kind() == BackendErrorKind::Contention
                        && begun.elapsed() + pause < self.settings.response_timeout / 2 =>
                {
                    Within::new(runtime, Dropped::Ends, async move { sleep(pause).await }).await;
                    pause *= 2;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// One id among others. `None`: it has to go alone.
    async fn gathered(
        self: &Arc<Self>,
        runtime: &Handle,
        lane: &Lane,
        command: Command,
        key: String,
    ) -> Answer {
        let (answer, number) = lane.put(key);
        if let Some(number) = number {
            let driver = Driver {
                core: self.clone(),
                command,
                number,
                ended: false,
            };
            runtime.spawn(driver.drive());
        }
        // The driver may be gone with its runtime, or be on one that nobody drives any more. The caller
        // may be polled outside of any by now.
        let limited = {
            let _entered = runtime.enter();
            timeout(lane.patience(), answer)
        };
        limited.await.unwrap_or(Ok(None)).unwrap_or(None)
    }

    pub(super) async fn migrate(&self) -> Result<(), BackendError> {
        let begun = Instant::now();
        let mut pause = Duration::from_millis(10);
        let mut made = 0;
        loop {
            let mut connection = self.acquire().await?;
            // Under no time limit, as an index may take long; so it has to begin on a good connection.
            let good = timeout(self.settings.response_timeout, connection.ping()).await;
            match good {
                Ok(answer) => answer.map_err(failed::<B>)?,
                Err(_) => return Err(self.hung(connection)),
            }
            match self.backend.migrate(connection).await {
                Ok(Migrated::Complete) => return Ok(()),
                Ok(Migrated::Again) if made < 4 => made += 1,
                Ok(Migrated::Again) => {
                    let index = self.settings.table.index();
                    return Err(unfit(
                        &self.settings.table,
                        format_args!("has another index by the name of `{index}`"),
                        "expected it on `expires_at`, of all rows",
                    ));
                }
                // Somebody else was faster, or is about to be: look again.
                Err(error)
                    if error.kind() == BackendErrorKind::Contention
                        && begun.elapsed() + pause < MIGRATION =>
                {
                    sleep(pause).await;
                    pause *= 2;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Deletes batch after batch until one is not full.
    pub(super) async fn purge(
        &self,
        stop: &(impl Fn() -> bool + Sync),
    ) -> Result<u64, BackendError> {
        let mut total = 0;
        let mut pause = FIRST_PAUSE;
        while !stop() {
            let mut connection = self.acquire().await?;
            let batch = self.backend.purge(&mut connection);
            let batch = match timeout(self.settings.response_timeout, batch).await {
                Ok(answer) => answer,
                Err(_) => Err(self.hung(connection)),
            };
            match batch {
                Ok(deleted) => {
                    total += deleted;
                    if deleted < u64::from(PURGE_BATCH) {
                        break;
                    }
                    pause = FIRST_PAUSE;
                }
                Err(error)
                    if error.kind() == BackendErrorKind::Contention
                        && pause < Duration::from_secs(1) =>
                {
                    sleep(pause).await;
                    pause *= 2;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(total)
    }

    pub(super) fn debug(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("table", &self.settings.table.name())
            .field("ttl", &self.settings.ttl)
            .finish_non_exhaustive()
    }
}

/// Takes the ids of a lane, one statement after the other, until nobody waits.
struct Driver<B: Backend> {
    core: Arc<Core<B>>,
    command: Command,
    number: lane::Driver,
    ended: bool,
}

impl<B: Backend> Driver<B> {
    async fn drive(mut self) {
        let core = self.core.clone();
        let Some(lane) = core.lane(self.command) else {
            return;
        };
        let mut kept = None;
        let mut since = Instant::now();
        while lane.go_on(self.number) {
            // While a connection is awaited, more ids gather.
            let connection = match kept.take() {
                Some(connection) => Ok(connection),
                None => {
                    since = Instant::now();
                    core.acquire().await
                }
            };
            let batch = lane.take();
            kept = match connection {
                Ok(connection) => self.send(connection, batch).await,
                Err(error) => {
                    batch.fail(&error);
                    None
                }
            };
            if since.elapsed() > LONGEST_HOLD {
                // The pool looks after the age of its connections.
                core.give_back(kept.take());
            }
        }
        core.give_back(kept);
        self.ended = true;
    }

    /// Whether each of the ids would meet the same error by itself: the connection is lost, or,
    /// where nobody locks single rows, somebody has locked the whole.
    fn concerns_all(&self, error: &BackendError) -> bool {
        let told = |source: &(dyn Error + 'static)| {
            let source = source.downcast_ref::<sqlx::Error>();
            source.is_some_and(|source| source.as_database_error().is_some())
        };
        match error.kind() {
            BackendErrorKind::Unavailable => !error.source().is_some_and(told),
            BackendErrorKind::Contention => !B::LOCKS_ROWS,
            _ => false,
        }
    }

    /// Gives the connection back if the next statement may have it.
    async fn send(
        &self,
        connection: PoolConnection<B::Db>,
        batch: Batch,
    ) -> Option<PoolConnection<B::Db>> {
        if batch.keys.is_empty() {
            return Some(connection);
        }
        let run = self
            .core
            .run(connection, self.command, &batch.keys, LANE_PATIENCE);
        let (connection, answers) = run.await;
        let pool = &self.core.pool;
        // Not while others wait for one.
        let mut keep = pool.num_idle() > 0 || pool.size() < pool.options().get_max_connections();
        keep &= answers.is_ok() && !pool.is_closed();
        match answers {
            Ok(answers) => batch.answer(&answers),
            Err(error) if self.concerns_all(&error) => batch.fail(&error),
            // One of them is to blame, or all; each finds out for itself, outside of the lane.
            Err(_) => batch.dissolve(),
        }
        if keep {
            return connection;
        }
        self.core.give_back(connection);
        None
    }
}

impl<B: Backend> Drop for Driver<B> {
    fn drop(&mut self) {
        if !self.ended {
            if let Some(lane) = self.core.lane(self.command) {
                lane.abandon(self.number);
            }
        }
    }
}

impl<B: Backend> fmt::Debug for Core<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.debug("Core", f)
    }
}

// ===== tasks =====

pub(super) fn runtime() -> Result<Handle, BackendError> {
    Handle::try_current()
        .map_err(|error| unavailable(error).expected("SQL stores are used within a tokio runtime"))
}

/// Runs on a task: a caller that is dropped leaves no connection in the middle of an answer, and
/// drops none outside of a runtime.
pub(super) async fn task<T, W, F>(work: W) -> Result<T, BackendError>
where
    T: Send + 'static,
    W: FnOnce(oneshot::Sender<Result<T, BackendError>>) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    let (reply, answer) = oneshot::channel();
    runtime()?.spawn(work(reply));
    answer
        .await
        .unwrap_or_else(|_| Err(unavailable("the runtime of the statement has ended")))
}

/// What becomes of work whose caller is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dropped {
    /// It ends where it is.
    Ends,
    /// A task finishes it: a connection is not left in the middle of an answer.
    GoesOn,
}

/// Work that is polled and dropped within a runtime, wherever its caller is: connections need
/// one even to be dropped.
struct Within<T: 'static> {
    work: Option<BoxFuture<T>>,
    dropped: Dropped,
    runtime: Handle,
}

impl<T: 'static> Within<T> {
    fn new(
        runtime: &Handle,
        dropped: Dropped,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        Within {
            work: Some(Box::pin(work)),
            dropped,
            runtime: runtime.clone(),
        }
    }
}

impl<T: 'static> Future for Within<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let this = &mut *self;
        let _entered = this.runtime.enter();
        let work = this.work.as_mut().expect("polled after completion");
        let done = ready!(work.as_mut().poll(cx));
        this.work = None;
        Poll::Ready(done)
    }
}

impl<T: 'static> Drop for Within<T> {
    fn drop(&mut self) {
        let Some(work) = self.work.take() else { return };
        let _entered = self.runtime.enter();
        match self.dropped {
            Dropped::Ends => drop(work),
            Dropped::GoesOn => {
                // Dropped at once on a runtime that has ended.
                self.runtime.spawn(async {
                    work.await;
                });
            }
        }
    }
}
