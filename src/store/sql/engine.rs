//! What the SQL stores share: how a command becomes a statement on a task.

use super::{
    key::{Column, Table},
    lane::{self, Answer, Batch, Lane},
};
use crate::{
    call::LeftOver,
    error::{BackendError, BackendErrorKind, BoxError, ConfigError, TimedOut},
    id::MessageId,
    store::{
        claim::{Claim, Lease, Owner},
        entry::{Entry, Stats},
        ttl::Ttl,
    },
};
use sqlx::{Connection, Database, Pool, error::DatabaseError, pool::PoolConnection};
use std::{
    error::Error,
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};
use tokio::{
    runtime::Handle,
    sync::{Mutex, Semaphore, oneshot},
    time::{sleep, timeout},
};

pub(super) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// How long a statement for several ids waits for a row before its ids go alone.
const LANE_PATIENCE: Duration = Duration::from_millis(100);

/// How long a claim waits for what another session has locked, before the message counts as one that
/// somebody is busy with.
const CLAIM_PATIENCE: Duration = Duration::from_secs(1);

/// How long a renewal does: the others come after it on the same connection.
const RENEW_PATIENCE: Duration = Duration::from_millis(300);

/// How long is waited for the connection that renewals have, and for an answer on it when it is not new: it
/// may have died while nobody looked, or be in the hands of a runtime that nobody drives.
const RENEWALS_PATIENCE: Duration = Duration::from_secs(2);

/// How often a claim is sent that cannot tell what became of it, because others were at the row.
const CLAIM_TRIES: u32 = 5;

/// How long a migration goes on while others are in its way.
const MIGRATION: Duration = Duration::from_secs(3);

/// How long a driver keeps a connection.
const LONGEST_HOLD: Duration = Duration::from_secs(60);

/// Before a statement that another session was in the way of is sent again the first time.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// How long a claim lasts whose transaction somebody committed by hand, in microseconds. Others never see
/// it otherwise.
pub(super) const OPEN_LEASE: i64 = 60_000_000;

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
    #[cfg_attr(not(feature = "postgres"), expect(dead_code))]
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

/// What is asked about the claim of one id. Leases are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    Claim { lease: i64 },
    Renew { lease: i64 },
    Complete,
    Release,
}

/// A claim within a transaction.
#[derive(Clone, Debug)]
pub struct InTransaction {
    pub(super) key: String,
    pub(super) owner: String,
    /// Whether the message is to be remembered: not without an id.
    pub(super) recorded: bool,
    /// Where its row is, if the database tells.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code))]
    pub(super) place: Option<String>,
}

/// How much of what others do at the same time a transaction sees, by the names of standard SQL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isolation {
    /// Each statement sees what was committed before it.
    ReadCommitted,
    /// All statements see what was committed before the first one.
    RepeatableRead,
    /// As if transactions came one after the other.
    Serializable,
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// The claim is, or was, this owner's.
    Yes,
    /// It is not, or was not any more.
    No,
    /// The message had its effect.
    Done,
    /// Somebody else is at it, for so long unless it is renewed. `None`: without an end.
    Busy(Option<Duration>),
    /// The row was another one when it was written than when it was read: to be asked again.
    Again,
}

// ===== what the databases differ in =====

type ConnectionOf<B> = <<B as Backend>::Db as Database>::Connection;

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

    /// One step on the claim of an id. A claim that waited for a lock as long as `patience` says (on
    /// SQLite, as long as the connection waits) is answered with [`Held::Busy`]; of the other steps that
    /// is an error.
    fn hold(
        &self,
        connection: &mut <Self::Db as Database>::Connection,
        hold: Hold,
        key: &str,
        owner: &str,
        patience: Duration,
    ) -> impl Future<Output = Result<Held, BackendError>> + Send;

    /// Reads what a table of our own says of an id.
    fn entry(
        &self,
        connection: &mut <Self::Db as Database>::Connection,
        key: &str,
    ) -> impl Future<Output = Result<Option<Entry>, BackendError>> + Send;

    /// Counts the rows of a table of our own.
    fn stats(
        &self,
        connection: &mut <Self::Db as Database>::Connection,
    ) -> impl Future<Output = Result<Stats, BackendError>> + Send;

    /// What begins a transaction that may write.
    fn begin(isolation: Option<Isolation>) -> &'static str;

    /// Claims an id within a transaction, for as long as that is open. `patience` as of a
    /// [`hold`](Self::hold), but what was waited for in vain is an error, and what comes later in the
    /// transaction waits as it did before.
    fn open(
        &self,
        connection: &mut <Self::Db as Database>::Connection,
        claim: &mut InTransaction,
        patience: Duration,
    ) -> impl Future<Output = Result<Held, BackendError>> + Send;

    /// Records in the same transaction that the id is done, or, where it is not to be recorded, takes
    /// the claim away. Answers whether the claim was there.
    fn close(
        &self,
        connection: &mut <Self::Db as Database>::Connection,
        claim: &InTransaction,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send;

    /// Makes sure that there is a transaction to roll back where sqlx counts on one and takes it ill when it
    /// is over.
    fn ensure_open(
        &self,
        _: &mut <Self::Db as Database>::Connection,
    ) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Whether this error of a commit says that what was written is not acceptable: by its own
    /// fault, and so that nothing was committed.
    fn rejects(error: &dyn DatabaseError) -> bool;

    /// Makes a session, which nobody else uses, one for renewals: whose statements are committed, and
    /// wait so long for any lock.
    fn settle(
        &self,
        connection: &mut <Self::Db as Database>::Connection,
        patience: Duration,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;
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
    // Without the slashes sqlx would go to this host, and take what follows for a database.
    let whole = scheme == "sqlite" || url[scheme.len()..].starts_with("://");
    if url.contains(':') && whole && expected.split(" or ").any(|good| good == scheme) {
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
#[cfg(any(feature = "postgres", feature = "mysql"))]
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

// ===== what is sent =====

/// What goes to the server at once, and what it answers.
trait Ask<B: Backend>: Send + Sync + 'static {
    type Answer: Send + 'static;

    fn send(
        &self,
        backend: &B,
        connection: &mut ConnectionOf<B>,
        patience: Duration,
    ) -> impl Future<Output = Result<Self::Answer, BackendError>> + Send;

    /// How long it may wait for what others have locked, when it is sent by itself.
    ///
    /// As a rule the server gives up before the time limit does, and the connection stays good.
    fn patience(&self, settings: &Settings) -> Duration {
        settings.response_timeout / 10 * 9
    }

    /// How long what it wrote lasts, in microseconds, where the end may be computed before a wait.
    fn lasts(&self, answer: &Self::Answer, settings: &Settings) -> Option<i64>;
}

/// A command about ids.
struct Keyed {
    command: Command,
    keys: Vec<String>,
}

impl<B: Backend> Ask<B> for Keyed {
    type Answer = Vec<bool>;

    async fn send(
        &self,
        backend: &B,
        connection: &mut ConnectionOf<B>,
        patience: Duration,
    ) -> Result<Vec<bool>, BackendError> {
        let run = backend.run(connection, self.command, &self.keys, patience);
        run.await
    }

    fn lasts(&self, _: &Vec<bool>, settings: &Settings) -> Option<i64> {
        match self.command {
            Command::Remember => settings.ttl.micros(),
            Command::Seen | Command::Forget => None,
        }
    }
}

/// A step on the claim of one id.
struct Holding {
    hold: Hold,
    key: String,
    owner: String,
}

impl<B: Backend> Ask<B> for Holding {
    type Answer = Held;

    async fn send(
        &self,
        backend: &B,
        connection: &mut ConnectionOf<B>,
        patience: Duration,
    ) -> Result<Held, BackendError> {
        let begun = Instant::now();
        let mut pause = FIRST_PAUSE;
        for tries in 1..=CLAIM_TRIES {
            let left = patience.saturating_sub(begun.elapsed()).max(FIRST_PAUSE);
            let step = backend.hold(connection, self.hold, &self.key, &self.owner, left);
            match step.await? {
                Held::Again if begun.elapsed() >= patience => break,
                Held::Again if tries > 2 => {
                    sleep(pause).await;
                    pause *= 2;
                }
                Held::Again => {}
                held => return Ok(held),
            }
        }
        // Others come and go at this row all the time.
        Ok(Held::Busy(Some(pause)))
    }

    fn patience(&self, settings: &Settings) -> Duration {
        let limit = settings.response_timeout;
        match self.hold {
            Hold::Claim { .. } => CLAIM_PATIENCE.min(limit / 2),
            Hold::Renew { .. } => RENEW_PATIENCE.min(limit / 2),
            Hold::Complete | Hold::Release => limit / 10 * 9,
        }
    }

    fn lasts(&self, held: &Held, settings: &Settings) -> Option<i64> {
        match (self.hold, held) {
            (Hold::Claim { lease }, Held::Yes) => Some(lease),
            (Hold::Complete, _) => settings.ttl.micros(),
            _ => None,
        }
    }
}

/// What is recorded of an id.
struct Look {
    key: String,
}

impl<B: Backend> Ask<B> for Look {
    type Answer = Option<Entry>;

    async fn send(
        &self,
        backend: &B,
        connection: &mut ConnectionOf<B>,
        _: Duration,
    ) -> Result<Option<Entry>, BackendError> {
        backend.entry(connection, &self.key).await
    }

    fn lasts(&self, _: &Option<Entry>, _: &Settings) -> Option<i64> {
        None
    }
}

/// How much is recorded.
struct Count;

impl<B: Backend> Ask<B> for Count {
    type Answer = Stats;

    async fn send(
        &self,
        backend: &B,
        connection: &mut ConnectionOf<B>,
        _: Duration,
    ) -> Result<Stats, BackendError> {
        backend.stats(connection).await
    }

    fn lasts(&self, _: &Stats, _: &Settings) -> Option<i64> {
        None
    }
}

/// The count of [`Backend::stats`]: those that are not over, those of them that are not done, those that
/// are over, and since when the oldest is as it is. `name` is the table as it is quoted, `now` the clock.
pub(super) fn count(name: &str, now: &str) -> String {
    format!(
        "SELECT COUNT(CASE WHEN live THEN 1 END) AS count, \
         COUNT(CASE WHEN live AND state <> 'done' THEN 1 END) AS claimed, \
         COUNT(CASE WHEN live THEN NULL ELSE 1 END) AS expired, \
         MIN(CASE WHEN live THEN since END) AS oldest \
         FROM (SELECT state, since, (expires_at IS NULL OR expires_at > {now}) AS live FROM {name}) AS records"
    )
}

// ===== what they share =====

/// What the clones of a store share.
pub(in crate::store) struct Core<B: Backend> {
    pub(super) backend: B,
    pub(super) pool: Pool<B::Db>,
    /// Whether nobody else uses the pool.
    own_pool: bool,
    pub(super) settings: Settings,
    /// Looked up once, and by one at a time.
    column: OnceLock<Column>,
    looks: Arc<Semaphore>,
    seen: Lane,
    remember: Lane,
    /// How many statements for a single id may wait for rows at once: never on all connections.
    singles: Semaphore,
    /// Where one transaction at a time can write: whose turn it is, among those here.
    pub(super) turns: Arc<Semaphore>,
    /// A connection for renewals alone, opened when the first one comes: handlers may have taken
    /// all those of the pool.
    renewals: Mutex<Option<ConnectionOf<B>>>,
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
            looks: Arc::new(Semaphore::new(1)),
            seen: Lane::new(patience),
            remember: Lane::new(patience),
            turns: Arc::new(Semaphore::new(1)),
            renewals: Mutex::new(None),
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

    pub(super) fn claim(
        self: &Arc<Self>,
        id: &MessageId,
        owner: Owner,
        lease: Lease,
    ) -> BoxFuture<Result<Claim, BackendError>> {
        let micros = micros(lease);
        let held = self.hold(Hold::Claim { lease: micros }, id, owner);
        let core = self.clone();
        Box::pin(async move {
            let retry_after = match held.await? {
                Held::Yes => return Ok(Claim::Won),
                Held::Done => return Ok(Claim::Done),
                Held::Busy(Some(left)) => left,
                Held::Busy(None) => {
                    core.endless();
                    lease.length()
                }
                // Not what a claim is answered.
                Held::No | Held::Again => FIRST_PAUSE,
            };
            Ok(Claim::Busy { retry_after })
        })
    }

    pub(super) fn renew(
        self: &Arc<Self>,
        id: &MessageId,
        owner: Owner,
        lease: Lease,
    ) -> BoxFuture<Result<bool, BackendError>> {
        let lease = micros(lease);
        self.held(Hold::Renew { lease }, id, owner)
    }

    pub(super) fn complete(
        self: &Arc<Self>,
        id: &MessageId,
        owner: Owner,
    ) -> BoxFuture<Result<bool, BackendError>> {
        self.held(Hold::Complete, id, owner)
    }

    pub(super) fn release(
        self: &Arc<Self>,
        id: &MessageId,
        owner: Owner,
    ) -> BoxFuture<Result<bool, BackendError>> {
        self.held(Hold::Release, id, owner)
    }

    fn held(
        self: &Arc<Self>,
        hold: Hold,
        id: &MessageId,
        owner: Owner,
    ) -> BoxFuture<Result<bool, BackendError>> {
        let held = self.hold(hold, id, owner);
        Box::pin(async { held.await.map(|held| held == Held::Yes) })
    }

    fn hold(
        self: &Arc<Self>,
        hold: Hold,
        id: &MessageId,
        owner: Owner,
    ) -> impl Future<Output = Result<Held, BackendError>> + Send + use<B> {
        let (core, id) = (self.clone(), id.clone());
        async move {
            let runtime = runtime()?;
            let key = core.column(&runtime).await?.key(&id)?;
            let owner = owner.to_string();
            let ask = Arc::new(Holding { hold, key, owner });
            match hold {
                Hold::Renew { .. } => core.renewed(&runtime, ask).await,
                _ => core.alone(&runtime, ask).await,
            }
        }
    }

    pub(super) async fn entry(
        self: &Arc<Self>,
        id: &MessageId,
    ) -> Result<Option<Entry>, BackendError> {
        let runtime = runtime()?;
        let key = self.column(&runtime).await?.key(id)?;
        self.alone(&runtime, Arc::new(Look { key })).await
    }

    pub(super) async fn stats(self: &Arc<Self>) -> Result<Stats, BackendError> {
        let runtime = runtime()?;
        // A table that will not do is told of as everywhere else.
        self.column(&runtime).await?;
        self.alone(&runtime, Arc::new(Count)).await
    }

    /// Says that a claim was met that no worker here can have made.
    pub(super) fn endless(&self) {
        #[cfg(feature = "tracing")]
        tracing::warn!(
            target: "tower_idempotency",
            table = self.settings.table.name(),
            "a message is claimed without an end: until its row is deleted, nobody runs it"
        );
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
                return core.single(&runtime, command, key).await;
            };
            if let Some(_leave) = lane.alone() {
                return core.single(&runtime, command, key).await;
            }
            match core.gathered(&runtime, lane, command, key.clone()).await {
                Some(answer) => answer,
                None => {
                    // Never closed.
                    let _place = core.singles.acquire().await;
                    core.single(&runtime, command, key).await
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

    /// What the table holds, looked up before its first use. One caller looks, and the others wait for it,
    /// but no longer than a statement may take: then each looks for itself, as the first one may not go on.
    pub(super) async fn column(self: &Arc<Self>, runtime: &Handle) -> Result<Column, BackendError> {
        if let Some(column) = self.column.get() {
            return Ok(*column);
        }
        let limit = self.settings.response_timeout;
        let place = {
            let _entered = runtime.enter();
            timeout(limit, self.looks.clone().acquire_owned())
        };
        let place = place.await;
        if let Some(column) = self.column.get() {
            return Ok(*column);
        }
        let core = self.clone();
        let connection = async move { core.acquire().await };
        let mut connection = Within::new(runtime, Dropped::Ends, connection).await?;
        let core = self.clone();
        let look = async move {
            let _place = place;
            match timeout(limit, core.backend.check(&mut connection)).await {
                Ok(answer) => {
                    core.give_back(Some(connection));
                    answer.map(|column| *core.column.get_or_init(|| column))
                }
                Err(_) => Err(core.hung(connection)),
            }
        };
        Within::new(runtime, Dropped::GoesOn, look).await
    }

    pub(super) async fn acquire(&self) -> Result<PoolConnection<B::Db>, BackendError> {
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
    pub(super) fn give_back(&self, connection: Option<PoolConnection<B::Db>>) {
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

    /// Asks on a connection, within the time limit. Gives the connection back if it can be used
    /// again.
    async fn run<A: Ask<B>>(
        &self,
        mut connection: PoolConnection<B::Db>,
        ask: &A,
        patience: Duration,
    ) -> (
        Option<PoolConnection<B::Db>>,
        Result<A::Answer, BackendError>,
    ) {
        let work = async {
            let mut tries = 0;
            loop {
                let begun = Instant::now();
                let answer = ask.send(&self.backend, &mut connection, patience).await?;
                tries += 1;
                // A row that is inserted after a wait for another session's lock has the end that
                // was computed before the wait. It is ours by now, so a second time does not wait.
                let lasts = ask.lasts(&answer, &self.settings);
                let late = lasts.is_some_and(|micros| begun.elapsed() > slack(micros));
                if !late || tries == 3 {
                    return Ok::<_, BackendError>(answer);
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

    /// One id in a statement of its own.
    async fn single(
        self: &Arc<Self>,
        runtime: &Handle,
        command: Command,
        key: String,
    ) -> Result<bool, BackendError> {
        let keys = vec![key];
        let answers = self.alone(runtime, Arc::new(Keyed { command, keys }));
        Ok(answers.await?.first() == Some(&true))
    }

    /// What is asked about one id; sent again while other sessions are in the way.
    async fn alone<A: Ask<B>>(
        self: &Arc<Self>,
        runtime: &Handle,
        ask: Arc<A>,
    ) -> Result<A::Answer, BackendError> {
        let mut retries = Retries::new(&self.settings);
        loop {
            let core = self.clone();
            let connection = async move { core.acquire().await };
            let connection = Within::new(runtime, Dropped::Ends, connection).await?;
            let (core, ask) = (self.clone(), ask.clone());
            let run = async move {
                let patience = ask.patience(&core.settings);
                let (connection, answer) = core.run(connection, &*ask, patience).await;
                core.give_back(connection);
                answer
            };
            match Within::new(runtime, Dropped::GoesOn, run).await {
                Err(error) => {
                    let pause = retries.pause(error)?;
                    Within::new(runtime, Dropped::Ends, async move { sleep(pause).await }).await;
                }
                answer => return answer,
            }
        }
    }

    /// A renewal, on the connection that there is for them, or else on one of the pool.
    ///
    /// A task sends it from the beginning: those that come after it wait for it, and its caller may be
    /// one that is not polled for a while.
    async fn renewed(
        self: &Arc<Self>,
        runtime: &Handle,
        ask: Arc<Holding>,
    ) -> Result<Held, BackendError> {
        let (core, within) = (self.clone(), runtime.clone());
        spawned(runtime, |reply| async move {
            let mut retries = Retries::new(&core.settings);
            while !reply.is_closed() {
                let answer = match core.apart(&ask).await {
                    Some(Err(error)) => match retries.pause(error) {
                        Ok(pause) => {
                            sleep(pause).await;
                            continue;
                        }
                        Err(error) => Err(error),
                    },
                    Some(held) => held,
                    None => core.alone(&within, ask).await,
                };
                let _ = reply.send(answer);
                return;
            }
        })
        .await
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

    /// Asks on the connection for renewals, one after the other. `None`: it does not do here, and was
    /// not asked.
    async fn apart(&self, ask: &Holding) -> Option<Result<Held, BackendError>> {
        use BackendErrorKind::{Denied, ReadOnly, Schema, Unavailable};

        let limit = self.settings.response_timeout;
        let soon = limit.min(RENEWALS_PATIENCE);
        let mut kept = timeout(soon, self.renewals.lock()).await.ok()?;
        if self.pool.is_closed() {
            *kept = None;
            return None;
        }
        let patience = Ask::<B>::patience(ask, &self.settings);
        loop {
            let fresh = kept.is_none();
            // Taken out, so that it is closed when it is left in the middle of an answer.
            let mut connection = match kept.take() {
                Some(connection) => connection,
                None => match timeout(limit, self.open(patience)).await {
                    Ok(opened) => opened.ok()?,
                    Err(_) => return Some(Err(unavailable(TimedOut::new(limit)))),
                },
            };
            let sent = ask.send(&self.backend, &mut connection, patience);
            let answer = match timeout(if fresh { limit } else { soon }, sent).await {
                Ok(answer) => answer,
                Err(_) if !fresh => continue,
                Err(_) => return Some(Err(unavailable(TimedOut::new(limit)))),
            };
            match answer.as_ref().map_err(BackendError::kind) {
                // It was lost while nobody looked, or is one to a server that is no primary any more.
                Err(Unavailable | ReadOnly) if !fresh => continue,
                Err(Unavailable | ReadOnly) => {}
                // What the pool does to its connections may be missing here, such as a search path.
                Err(Schema | Denied) => {
                    *kept = Some(connection);
                    return None;
                }
                _ => *kept = Some(connection),
            }
            return Some(answer);
        }
    }

    async fn open(&self, patience: Duration) -> Result<ConnectionOf<B>, sqlx::Error> {
        let options = self.pool.connect_options();
        let mut connection = ConnectionOf::<B>::connect_with(&options).await?;
        self.backend.settle(&mut connection, patience).await?;
        Ok(connection)
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

    /// Deletes batch after batch until one is not full, or until it is stopped at some number.
    pub(super) async fn purge(
        &self,
        stop: &(impl Fn(u64) -> bool + Sync),
    ) -> Result<u64, BackendError> {
        let mut total = 0;
        let mut pause = FIRST_PAUSE;
        while !stop(total) {
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

/// What is left of a lease of which so many microseconds are.
pub(super) fn remaining(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0) as u64)
}

/// A lease as the statements have it.
fn micros(lease: Lease) -> i64 {
    // 365 days at most.
    lease.length().as_micros() as i64
}

/// How much later than its statement an end may be computed from, of what lasts so many microseconds.
fn slack(micros: i64) -> Duration {
    Duration::from_micros(micros as u64 / 10)
        .clamp(Duration::from_millis(5), Duration::from_secs(1))
}

/// How long it goes on that something is sent again.
struct Retries {
    begun: Instant,
    limit: Duration,
    pause: Duration,
}

impl Retries {
    fn new(settings: &Settings) -> Self {
        Retries {
            begun: Instant::now(),
            limit: settings.response_timeout / 2,
            pause: FIRST_PAUSE,
        }
    }

    /// How long to wait before it is sent again; the error, if it is not.
    fn pause(&mut self, error: BackendError) -> Result<Duration, BackendError> {
        let pause = self.pause;
        if error.kind() != BackendErrorKind::Contention
            || self.begun.elapsed() + pause >= self.limit
        {
            return Err(error);
        }
        self.pause *= 2;
        Ok(pause)
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
        mut batch: Batch,
    ) -> Option<PoolConnection<B::Db>> {
        if batch.keys.is_empty() {
            return Some(connection);
        }
        let ask = Keyed {
            command: self.command,
            keys: mem::take(&mut batch.keys),
        };
        let run = self.core.run(connection, &ask, LANE_PATIENCE);
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

pub(crate) fn runtime() -> Result<Handle, BackendError> {
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
    spawned(&runtime()?, work).await
}

async fn spawned<T, W, F>(runtime: &Handle, work: W) -> Result<T, BackendError>
where
    T: Send + 'static,
    W: FnOnce(oneshot::Sender<Result<T, BackendError>>) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    let (reply, answer) = oneshot::channel();
    runtime.spawn(work(reply));
    answer
        .await
        .unwrap_or_else(|_| Err(unavailable("the runtime of the statement has ended")))
}

/// What becomes of work whose caller is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dropped {
    /// It ends where it is.
    Ends,
    /// A task finishes it: a connection is not left in the middle of an answer.
    GoesOn,
}

/// Work that is polled and dropped within a runtime, wherever its caller is: connections need
/// one even to be dropped.
pub(crate) struct Within<T: 'static> {
    work: Option<BoxFuture<T>>,
    dropped: Dropped,
    runtime: Handle,
    left_over: Option<LeftOver>,
}

impl<T: 'static> Within<T> {
    pub(crate) fn new(
        runtime: &Handle,
        dropped: Dropped,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        Within {
            work: Some(Box::pin(work)),
            dropped,
            runtime: runtime.clone(),
            left_over: None,
        }
    }

    /// Counts the task that finishes it, if there will be one.
    pub(crate) fn counted(mut self, left_over: &LeftOver) -> Self {
        self.left_over = Some(left_over.clone());
        self
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
                let under_way = self.left_over.as_ref().map(LeftOver::begin);
                // Dropped at once on a runtime that has ended.
                self.runtime.spawn(async {
                    work.await;
                    drop(under_way);
                });
            }
        }
    }
}
