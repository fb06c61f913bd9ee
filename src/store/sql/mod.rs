//! Records in tables of PostgreSQL, MySQL, MariaDB and SQLite.
//!
//! [`PostgresStore`], [`MySqlStore`] and [`SqliteStore`] keep one row per message in a table of their
//! own, made by `migrate()` or from `ddl()`:
//!
//! | column | |
//! |---|---|
//! | `message_id` | the primary key, compared byte by byte |
//! | `state` | `done`, or `claimed` while a claim is held |
//! | `owner` | who holds the claim, or held it when it was done; else null |
//! | `since` | when it got into this state |
//! | `expires_at` | when it ends; null for never |
//!
//! Times are microseconds since 1970 in the clock of the server (for SQLite, of the host), read when
//! the statement writes: neither the clock of a worker nor a wait for a lock moves an end. An id over
//! 255 bytes, with NUL in it, or that begins with `sha256:`, is stored as `sha256:` and the hex of its
//! SHA-256.
//!
//! # One table, one consumer
//!
//! A table is named where a store is made; there is no default. Two handlers that are both to run
//! for a message need a table each: on a shared one, each would skip what the other did.
//!
//! # Set-up
//!
//! `migrate()` may be called at every start by every worker. Where that is not wanted, the
//! statements of `ddl()` make the same table. Rows past their end count as never seen; `purge()`
//! deletes them, and [`purge_every`](PostgresStore::purge_every) does so in the background.
//!
//! # What a statement costs
//!
//! Each operation is one statement outside of any transaction; on MySQL `claim`, `renew` and
//! `complete` are two, since what was written is read back. On PostgreSQL and SQLite, `seen` and
//! `remember` that come while another one is under way gather and go together as the next statement;
//! one that comes alone never waits for others. The steps of a claim go by themselves.
//!
//! # Claims
//!
//! A claim waits for a row that another session has locked for a second, or for half of the
//! [`response_timeout`](SqlStoreBuilder::response_timeout) if that is less; then somebody is busy with the
//! message. MySQL, other than MariaDB, has no such limit for one statement: there it waits as long as
//! `innodb_lock_wait_timeout` of the session says, and on SQLite as long as the `busy_timeout`. On PostgreSQL a claim that is not won
//! writes nothing.
//!
//! Renewals have one connection of their own beside the pool, which is opened with the options of the
//! pool when the first one comes, and go one after the other: handlers that hold all connections of a
//! pool stop no renewal. What a pool does to its connections besides, such as to set a `search_path`, is
//! not done there; a renewal that does not find its table that way takes a connection of the pool.
//! Where a table of the same name is found instead, each claim is taken again over the pool in place of its
//! renewal: then the table is to be named with its schema.
//!
//! A call that is dropped leaves no connection in the middle of an answer: a statement that was sent
//! is finished by a task, one that was not is withdrawn. Whether it took effect is then unknown, as
//! the contract of [`Store`] has it.
//!
//! # TLS
//!
//! The features of `sqlx` decide: `sqlx = { version = "0.9", features = ["tls-rustls"] }` beside
//! this crate turns it on for the stores, too. Without such a feature a connection is in the clear,
//! unless the URL asks for TLS, and then fails.
//!
//! # Runtime
//!
//! A store is used within a tokio runtime with its I/O and time drivers (`enable_all`); outside of
//! one an operation is an error.

pub(crate) mod engine;
mod key;
mod lane;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
pub(crate) mod session;
#[cfg(feature = "sqlite")]
mod sqlite;

pub use self::engine::Isolation;
#[cfg(feature = "mysql")]
#[cfg_attr(docsrs, doc(cfg(feature = "mysql")))]
pub use self::mysql::MySqlTable;
#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
pub use self::postgres::PostgresTable;
#[cfg(feature = "sqlite")]
#[cfg_attr(docsrs, doc(cfg(feature = "sqlite")))]
pub use self::sqlite::SqliteTable;

use self::{
    engine::{Backend, BoxFuture, Core, FIRST_PAUSE, Layout, Record, Settings, runtime, task},
    key::Table,
};
use super::ttl::{DEFAULT_TTL, Ttl};
use crate::{
    error::{BackendError, ConfigError},
    id::MessageId,
    store::{Claim, ClaimStore, Entry, Lease, Owner, Stats, Store},
};
use sqlx::Pool;
use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    marker::PhantomData,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};
use tokio::{sync::watch, task::JoinHandle, time::timeout};

/// Below the layer's own limit, so that the error can say what happened.
const DEFAULT_RESPONSE_TIMEOUT: Duration = Duration::from_secs(4);
const DEFAULT_CONNECTIONS: u32 = 10;

const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

// ===== the stores =====

/// A [`Store`] in a table of an SQL database: [`PostgresStore`], [`MySqlStore`] or [`SqliteStore`].
///
/// Clones share its connections. See the [module docs](self) for the table, and for examples.
pub struct SqlStore<B: Backend, R = Ours> {
    core: Arc<Core<B>>,
    record: PhantomData<fn() -> R>,
}

/// A table of our own.
#[derive(Debug)]
pub enum Ours {}

impl<B: Backend, R: Record<B>> SqlStore<B, R> {
    /// Sets up a store in this table, perhaps `schema.table`.
    ///
    /// A name is letters, digits and underscores, begins with no digit, and has at most 52 of them.
    /// It is taken as it is spelled; where the database folds the case of names, as SQLite and some
    /// MySQL servers do, two that differ in nothing else are one table.
    pub fn builder(table: &str) -> SqlStoreBuilder<B, R> {
        SqlStoreBuilder::new(table)
    }

    /// Connects to a database, with the settings of [`builder`](SqlStore::builder).
    ///
    /// # Errors
    ///
    /// As [`SqlStoreBuilder::connect`].
    pub async fn connect(url: &str, table: &str) -> Result<Self, BackendError> {
        Self::builder(table).connect(url).await
    }
}

impl<B: Backend> SqlStore<B> {
    /// The statements that make the table and its index.
    #[must_use]
    pub fn ddl(&self) -> String {
        self.core.ddl()
    }

    /// Makes the table and its index unless they are there.
    ///
    /// Looks first and does only what is missing, so every worker may call it at every start. No
    /// statement waits more than two seconds for a lock (on SQLite, than the `busy_timeout`); when
    /// another worker makes the table meanwhile, that is as good.
    ///
    /// # Errors
    ///
    /// [`Schema`](crate::error::BackendErrorKind::Schema) when there is a table of this name that cannot be worked
    /// with, [`Contention`](crate::error::BackendErrorKind::Contention) when the index is missing and a
    /// transaction that wrote to the table is still open.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it goes on in the background.
    pub async fn migrate(&self) -> Result<(), BackendError> {
        let core = self.core.clone();
        task(|reply| async move {
            let _ = reply.send(core.migrate().await);
        })
        .await
    }

    /// Deletes the rows that are past their end, and says how many.
    ///
    /// In statements of 1000 rows each, which skip rows that others hold locked and look at the
    /// end again under the lock; claims go only a minute after their end.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it ends after the statement that is under way.
    pub async fn purge(&self) -> Result<u64, BackendError> {
        self.purge_while(|_| true).await
    }

    /// [`purge`](SqlStore::purge), which may be ended between two statements: `go_on` is asked before each
    /// one, and told how many rows were deleted until then.
    ///
    /// Answers with the number of rows that were deleted when it ended, either way.
    ///
    /// # Panics
    ///
    /// A panic of `go_on` ends the purge with an error.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it ends after the statement that is under way.
    pub async fn purge_while(
        &self,
        go_on: impl Fn(u64) -> bool + Send + Sync + 'static,
    ) -> Result<u64, BackendError> {
        let core = self.core.clone();
        task(|reply| async move {
            let stop = |deleted| reply.is_closed() || !go_on(deleted);
            let deleted = core.purge(&stop).await;
            let _ = reply.send(deleted);
        })
        .await
    }

    /// What is recorded of this message: why its next delivery would be skipped or parked.
    ///
    /// `None` when there is no row. One that is over is told of as long as it is there, see
    /// [`Entry::expires_in`].
    ///
    /// # Errors
    ///
    /// What [`seen`](Store::seen) fails with.
    ///
    /// # Cancel safety
    ///
    /// It writes nothing.
    pub async fn entry(&self, id: &MessageId) -> Result<Option<Entry>, BackendError> {
        self.core.entry(id).await
    }

    /// Counts the rows of the table, in one statement that reads all of it.
    ///
    /// Some million rows take seconds: that is to be within the
    /// [`response_timeout`](SqlStoreBuilder::response_timeout) of this store.
    ///
    /// # Errors
    ///
    /// What [`seen`](Store::seen) fails with.
    ///
    /// # Cancel safety
    ///
    /// It writes nothing; dropped, the statement is still finished.
    pub async fn stats(&self) -> Result<Stats, BackendError> {
        self.core.stats().await
    }

    /// Purges now and then every `interval`, give or take a fourth of it, so that workers do not all
    /// do it at once. `told` hears of each purge; a panic in it is caught. It goes on until the handle
    /// is stopped or dropped.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::error::BackendErrorKind::Unavailable) outside a tokio runtime.
    pub fn purge_every(
        &self,
        interval: Duration,
        told: impl FnMut(Result<u64, BackendError>) + Send + 'static,
    ) -> Result<Purge, BackendError> {
        purge_every(self.core.clone(), interval, told)
    }
}

impl<B: Backend, R> SqlStore<B, R> {
    fn new(core: Arc<Core<B>>) -> Self {
        SqlStore {
            core,
            record: PhantomData,
        }
    }
}

impl<B: Backend, R: 'static> Store for SqlStore<B, R> {
    type Error = BackendError;
    type Future<T: Send + 'static> = BoxFuture<Result<T, BackendError>>;

    fn seen(&self, id: &MessageId) -> Self::Future<bool> {
        self.core.seen(id)
    }

    fn remember(&self, id: &MessageId) -> Self::Future<()> {
        self.core.remember(id)
    }

    fn forget(&self, id: &MessageId) -> Self::Future<()> {
        self.core.forget(id)
    }
}

/// Only a table of our own has claims; those of other fleets cannot tell one of ours safely.
impl<B: Backend> ClaimStore for SqlStore<B> {
    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<Claim> {
        self.core.claim(id, owner, lease)
    }

    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<bool> {
        self.core.renew(id, owner, lease)
    }

    fn complete(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
        self.core.complete(id, owner)
    }

    fn release(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
        self.core.release(id, owner)
    }
}

impl<B: Backend, R> Clone for SqlStore<B, R> {
    fn clone(&self) -> Self {
        SqlStore::new(self.core.clone())
    }
}

impl<B: Backend, R> fmt::Debug for SqlStore<B, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.core.debug("SqlStore", f)
    }
}

/// A store in PostgreSQL 12 or later.
///
/// # Example
///
/// ```no_run
/// use std::time::Duration;
/// use tower_idempotency::{BoxError, IdempotencyLayer, PostgresStore};
///
/// # async fn example() -> Result<(), BoxError> {
/// let store = PostgresStore::builder("billing_seen")
///     .ttl(Duration::from_secs(7 * 24 * 3600))
///     .connect("postgres://billing@db.internal/shop")
///     .await?;
/// store.migrate().await?;
/// let purge = store.purge_every(Duration::from_secs(60), |deleted| {
///     if let Err(error) = deleted {
///         eprintln!("expired rows stay: {error}");
///     }
/// })?;
/// let layer = IdempotencyLayer::new(store);
/// # let _ = layer.id_from(|id: &String| Some(id.clone()));
/// // … and when the worker stops:
/// purge.stop().await;
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
pub type PostgresStore = SqlStore<PostgresTable>;

/// A store in MySQL 8 or MariaDB 10.6 or later.
///
/// The table is InnoDB's. Times come from the server's clock, whatever the time zone of the session;
/// started with `--sysdate-is-now`, a server computes ends from the start of the statement, before
/// it waited for a lock. Where there is a binary log, its format has to be `ROW` or `MIXED`.
///
/// # Example
///
/// ```no_run
/// use tower_idempotency::{BoxError, IdempotencyLayer, MySqlStore};
///
/// # async fn example() -> Result<(), BoxError> {
/// let store = MySqlStore::connect("mysql://billing@db.internal/shop", "billing_seen").await?;
/// store.migrate().await?;
/// let layer = IdempotencyLayer::new(store);
/// # let _ = layer.id_from(|id: &String| Some(id.clone()));
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "mysql")]
#[cfg_attr(docsrs, doc(cfg(feature = "mysql")))]
pub type MySqlStore = SqlStore<MySqlTable>;

/// A store in a file of SQLite, for the workers of one host and without a server.
///
/// [`connect`](SqlStore::connect) makes the file if there is none, keeps it in WAL mode and with
/// `synchronous = NORMAL`: a crash of a worker loses nothing; a power failure or a crash of the host
/// may lose the last marks, and their messages can run again. Several processes may share the
/// file; it must not lie on a network drive. A new file has pages of 1 KiB, and the log beside
/// it grows to some 32 MiB before it is written into the file. Its folder has to be there. On a pool
/// of the caller's own its options hold; it needs a `busy_timeout` below the
/// [`response_timeout`](SqlStoreBuilder::response_timeout), and for claims no `locking_mode = EXCLUSIVE`, which
/// shuts out the connection of the renewals.
///
/// Times come from the clock of the host, in milliseconds.
///
/// # Example
///
/// ```
/// use tower_idempotency::{BoxError, MessageId, SqliteStore, Store};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// # let dir = std::env::temp_dir().join(MessageId::random().as_str());
/// # std::fs::create_dir(&dir)?;
/// # let file = dir.join("seen.db");
/// # let url = format!("sqlite://{}", file.display());
/// // such as "sqlite:///var/lib/billing/seen.db"
/// let store = SqliteStore::connect(&url, "billing_seen").await?;
/// store.migrate().await?;
/// let id = MessageId::from("m-1");
/// store.remember(&id).await?;
/// assert!(store.seen(&id).await?);
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "sqlite")]
#[cfg_attr(docsrs, doc(cfg(feature = "sqlite")))]
pub type SqliteStore = SqlStore<SqliteTable>;

// ===== the set-up of a store =====

/// Sets up one of the SQL stores.
#[must_use]
pub struct SqlStoreBuilder<B, R = Ours> {
    table: String,
    ttl: Option<Duration>,
    response_timeout: Duration,
    max_connections: u32,
    transaction_pooler: bool,
    record: PhantomData<fn() -> (B, R)>,
}

impl<B: Backend> Record<B> for Ours {
    const LAYOUT: Layout = Layout::Ours;
}

impl<B, R> SqlStoreBuilder<B, R> {
    fn new(table: &str) -> Self {
        SqlStoreBuilder {
            table: table.to_owned(),
            ttl: Some(DEFAULT_TTL),
            response_timeout: DEFAULT_RESPONSE_TIMEOUT,
            max_connections: DEFAULT_CONNECTIONS,
            transaction_pooler: false,
            record: PhantomData,
        }
    }

    /// How long an id is remembered, counted from when it was remembered last, in the server's
    /// clock; 24 hours unless set, `None` for ever.
    ///
    /// Rounded up to whole milliseconds. More than 146,000 years means for ever.
    pub fn ttl(mut self, ttl: impl Into<Option<Duration>>) -> Self {
        self.ttl = ttl.into();
        self
    }

    /// How long one statement may take once it has a connection; 4 seconds unless set.
    ///
    /// When it runs out, its connection is closed, and what was asked is unknown. It
    /// should be below the layer's [`store_timeout`](crate::IdempotencyLayer::store_timeout), which
    /// also covers the wait for a connection.
    pub fn response_timeout(mut self, limit: Duration) -> Self {
        self.response_timeout = limit;
        self
    }

    /// How many connections a pool of the store's own may have; 10 unless set.
    ///
    /// Does not matter where the caller brings the pool.
    pub fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = connections;
        self
    }
}

impl<B: Backend, R: Record<B>> SqlStoreBuilder<B, R> {
    /// Connects with a pool of the store's own.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::error::BackendErrorKind::Config) for a setting that cannot be held to; else what the
    /// database said. No error shows the password of the URL.
    pub async fn connect(self, url: &str) -> Result<SqlStore<B, R>, BackendError> {
        let settings = self.check()?;
        runtime()?;
        let pool = B::connect(url, &settings).await?;
        Ok(SqlStore::new(Core::new(settings, pool, true)))
    }

    /// Uses a pool of the caller's own.
    ///
    /// An operation takes a connection for one statement at a time, never two at once, and none
    /// while a handler runs. Renewals of claims have a connection beside the pool, with its options. It waits for one as long as the pool's `acquire_timeout` says, 30
    /// seconds in sqlx: below the layer's [`store_timeout`](crate::IdempotencyLayer::store_timeout) the
    /// error can say so. A `lock_timeout` (PostgreSQL) or `innodb_lock_wait_timeout` (MySQL) below
    /// [`response_timeout`](SqlStoreBuilder::response_timeout), which a pool of the store's own has, lets
    /// the server end what is given up here. Needs sqlx 0.9.
    ///
    /// # Errors
    ///
    /// For a setting that cannot be held to.
    pub fn pool(self, pool: Pool<B::Db>) -> Result<SqlStore<B, R>, ConfigError> {
        Ok(SqlStore::new(Core::new(self.check()?, pool, false)))
    }

    fn check(self) -> Result<Settings, ConfigError> {
        if self.response_timeout.is_zero() {
            return Err(ConfigError::new(
                "response_timeout",
                "0",
                "a time above zero",
            ));
        }
        if self.max_connections == 0 {
            return Err(ConfigError::new(
                "max_connections",
                "0",
                "at least one connection",
            ));
        }
        Ok(Settings {
            table: Table::new(&self.table)?,
            layout: R::LAYOUT,
            ttl: Ttl::new(self.ttl)?,
            // So far from now that no clock is overrun.
            response_timeout: self.response_timeout.min(YEAR),
            max_connections: self.max_connections,
            transaction_pooler: self.transaction_pooler,
        })
    }
}

impl<B, R> fmt::Debug for SqlStoreBuilder<B, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqlStoreBuilder")
            .field("table", &self.table)
            .field("ttl", &self.ttl)
            .field("response_timeout", &self.response_timeout)
            .finish_non_exhaustive()
    }
}

// ===== the purge in the background =====

/// A purge that runs in the background, until it is stopped or dropped.
#[derive(Debug)]
#[must_use = "dropped, it ends: to be kept in a variable, not in `_`"]
pub struct Purge {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// Whether it was stopped.
struct Stop(watch::Receiver<bool>);

impl Purge {
    /// Ends it, after the statement that is under way.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        // It was stopped, or its runtime was.
        let _ = self.task.await;
    }
}

impl Stop {
    fn is_asked(&self) -> bool {
        // Without its sender nobody could stop it any more.
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    async fn asked(&mut self) {
        let _ = self.0.wait_for(|stop| *stop).await;
    }
}

fn purge_every<B: Backend>(
    core: Arc<Core<B>>,
    interval: Duration,
    mut told: impl FnMut(Result<u64, BackendError>) + Send + 'static,
) -> Result<Purge, BackendError> {
    let (stop, asked) = watch::channel(false);
    let mut asked = Stop(asked);
    let task = runtime()?.spawn(async move {
        while !asked.is_asked() {
            let purged = core.purge(&|_| asked.is_asked()).await;
            // A panic of who listens ends no purge.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| told(purged))) {
                // What it threw may panic again when it is dropped.
                mem::forget(payload);
            }
            let pause = jittered(interval.clamp(FIRST_PAUSE, YEAR));
            // Either the pause is over or it ends here.
            let _ = timeout(pause, asked.asked()).await;
        }
    });
    Ok(Purge { stop, task })
}

/// The interval, give or take a fourth of it.
fn jittered(interval: Duration) -> Duration {
    let chance = RandomState::new().hash_one(()) % 512;
    interval / 1024 * (768 + chance as u32)
}
