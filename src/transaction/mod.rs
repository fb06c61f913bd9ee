//! Runs each message once, in a transaction that records it: no window at all.
//!
//! With the [seen-set](crate::idempotency) or the [claim](crate::claim), a worker that dies between the
//! effect and its mark leaves a message that runs again. Where the effect is a write to PostgreSQL, MySQL,
//! MariaDB or SQLite, the record can be written by the same transaction: then both happen or neither.
//!
//! The layer begins a transaction, claims the message in it, and lends it to the handler. When that
//! answers Ok, the message is recorded as done and all of it is committed; otherwise all of it is rolled
//! back.
//!
//! | the message is | the call |
//! |---|---|
//! | free | claims it, runs the handler, records it and commits, answers Ok |
//! | done | rolls back, answers [`Ack::ack`]: a duplicate |
//! | in the transaction of another call | waits for that one to end, [at most so long](TransactionLayer::lock_wait); then it is done, or free, or the answer is [`Parked`](crate::Parked) |
//! | claimed by a worker in [claim](crate::claim) mode | rolls back, answers [`Parked`](crate::Parked) |
//! | without a usable id | runs the handler in a transaction, and remembers nothing |
//!
//! # The handler
//!
//! It is a service of [`WithTransaction`], and executes its statements on what that lends, as on any connection of
//! sqlx: `query(..).execute(&mut *transaction)`. A savepoint is `transaction.begin()` with
//! [`sqlx::Connection`]. It neither commits nor rolls back: it drops the transaction, if only
//! with its own future, and answers.
//!
//! # What is inside
//!
//! What the handler writes by the transaction that it was lent: that happens exactly once, whichever worker
//! dies when. Outside is everything else: mail, HTTP calls, other databases, messages published to a
//! broker, statements on another connection, even of the same pool, tables of an engine without transactions
//! (MyISAM), and a file that is attached to a SQLite database in WAL mode, which commits each file by itself. Those
//! happen at least once, as a transaction may be rolled back after them. The usual remedy is an *outbox*: what is to be
//! sent is written into a table by the same transaction, under an id that follows from the message's own, and
//! sent by a worker that reads the table.
//!
//! A handler returns the errors of its statements, and of savepoints that could not begin. It may have been its
//! transaction that ended by them, and what it writes afterwards is then committed statement by statement
//! (on PostgreSQL after a savepoint that did not begin, on MySQL after a deadlock, on SQLite after a full disk): it is not acked, and comes
//! again with the next delivery.
//!
//! # What ends as `Unfinished`
//!
//! [`Unfinished`](crate::Unfinished) says that the handler ran and nothing is known to be committed, so that the
//! message is to be delivered again. [`is_transient`](crate::error::is_transient) is true for it.
//!
//! * Another transaction was in the way of the handler's statements: a serialization failure, a deadlock, a lock
//!   that was not to be had. In the way of the layer's own statements, they begin afresh instead,
//!   before the handler runs.
//! * The handler answered Ok, but its transaction was undone: it met an error of a statement and went on, where
//!   PostgreSQL has by then given up the whole transaction, and MySQL after a deadlock. That the claim is still
//!   there when the message is recorded is the proof that nothing was undone.
//! * The handler's future has ended, and some task still has the transaction.
//! * The connection was lost, or gave no answer to the commit. If that was committed nevertheless, the next
//!   delivery finds the message done.
//!
//! A commit that the database does not accept, since a constraint is checked as late as that, is answered as the
//! handler's own error, by the [`sqlx::Error`].
//!
//! A handler that commits by hand, or by a statement that the database commits before (DDL on MySQL), has
//! what it wrote until then committed without the record; a crash before the end then repeats it, a minute
//! later. Nothing is lost. (On SQLite the commit of the layer then fails, although the record is there by now: the answer is
//! [`Unfinished`](crate::Unfinished), and the next delivery is a duplicate.)
//!
//! A handler that drops out of a statement, as by a timeout, waits for that in its rollback, for the store's
//! [`response_timeout`](crate::store::sql::SqlStoreBuilder::response_timeout); then its connection is closed. Its own error is the answer.
//!
//! # The order of the layers
//!
//! Outermost first: dead-letter → retry → transaction → timeout → handler, so that each attempt has
//! a transaction of its own. A retry *inside* has nothing to repeat an attempt with: what is lent is lent
//! once, and a request with it is no `Clone`. A timeout inside drops the handler, which is then rolled back.
//!
//! # Connections
//!
//! A call takes one connection of the pool, when it is called, and has it until its transaction has ended; never a second one.
//! It waits for one as long as the pool's `acquire_timeout` says.
//! A handler that takes another one of the same pool may wait for handlers that do the same. A copy that waits for
//! another one's transaction has a connection, too. As ever with transactions, handlers are to be short: one that
//! takes long holds its row, and what it wrote, but no other message up.
//!
//! **SQLite has one writer.** A transaction here locks the file from its begin to its end, so handlers of
//! one file go one after the other, whichever message they handle, and a long one holds up all others, as well as claims and marks
//! of stores on the same file. Calls of one layer and its clones wait their turn, as long as [`lock_wait`](TransactionLayer::lock_wait)
//! says and without a connection, and are then [`Parked`](crate::Parked), as are those that somebody else has locked the file for. Readers are not
//! held up in WAL mode.
//!
//! A handler that changes the search path of its transaction (`SET LOCAL search_path`, `SET LOCAL ROLE`, `USE`) needs a
//! table that is named with its schema. No trigger may write to a row of the record.
//!
//! # Sharing a record
//!
//! It is the table of [`SqlStore`](crate::store::sql::SqlStore). Workers in any mode may share it: nothing is lost,
//! and the guarantee is that of the weakest mode among them.
//!
//! # Example
//!
#![cfg_attr(feature = "sqlite", doc = "```")]
#![cfg_attr(not(feature = "sqlite"), doc = "```ignore")]
//! use sqlx::{Sqlite, SqlitePool};
//! use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
//! use tower_idempotency::{BoxError, Envelope, TransactionLayer, WithTransaction};
//!
//! async fn book(message: WithTransaction<Envelope, Sqlite>) -> Result<(), BoxError> {
//!     let WithTransaction { request, mut transaction } = message;
//!     let cents = request.data::<serde_json::Value>()?["cents"].as_i64();
//!     sqlx::query("INSERT INTO ledger (cents) VALUES (?)")
//!         .bind(cents)
//!         .execute(&mut *transaction)
//!         .await?;
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! # let dir = std::env::temp_dir().join(tower_idempotency::MessageId::random().as_str());
//! # std::fs::create_dir(&dir)?;
//! # let url = format!("sqlite://{}?mode=rwc", dir.join("shop.db").display());
//! let pool = SqlitePool::connect(&url).await?;
//! sqlx::query("CREATE TABLE ledger (cents INTEGER)").execute(&pool).await?;
//! let layer = TransactionLayer::new(pool.clone(), "billing_seen")?;
//! layer.migrate().await?;
//!
//! let mut consumer = ServiceBuilder::new().layer(layer).service(service_fn(book));
//!
//! let payment = Envelope::new("urn:shop:payment", &serde_json::json!({"cents": 9990}))?;
//! consumer.ready().await?.call(payment.clone()).await?; // books
//! consumer.ready().await?.call(payment).await?;         // does not
//!
//! let sum: i64 = sqlx::query_scalar("SELECT sum(cents) FROM ledger").fetch_one(&pool).await?;
//! assert_eq!(sum, 9990);
//! # pool.close().await;
//! # std::fs::remove_dir_all(&dir)?;
//! # Ok(())
//! # }
//! ```

pub mod future;
mod layer;

pub use self::layer::TransactionLayer;
pub use crate::store::sql::Isolation;

use self::future::ResponseFuture;
use crate::{
    ack::{Ack, Always, IsDone},
    error::BoxError,
    event::Event,
    id::{ExtractId, MessageId, MetaId},
    store::sql::{engine::Backend, session::Session},
};
use sqlx::Database;
use std::{
    fmt, mem,
    ops::{Deref, DerefMut},
    task::{Context, Poll},
};
use tokio::sync::oneshot;
use tower_service::Service;

/// A database that a transaction can be lent of: [`sqlx::Postgres`], [`sqlx::MySql`], [`sqlx::Sqlite`].
///
/// Not to be implemented elsewhere.
pub trait Dialect: Database {
    /// The table of its stores.
    type Table: Backend<Db = Self>;
}

#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
impl Dialect for sqlx::Postgres {
    type Table = crate::store::sql::PostgresTable;
}

#[cfg(feature = "mysql")]
#[cfg_attr(docsrs, doc(cfg(feature = "mysql")))]
impl Dialect for sqlx::MySql {
    type Table = crate::store::sql::MySqlTable;
}

#[cfg(feature = "sqlite")]
#[cfg_attr(docsrs, doc(cfg(feature = "sqlite")))]
impl Dialect for sqlx::Sqlite {
    type Table = crate::store::sql::SqliteTable;
}

/// A request with the transaction that it is to be handled in.
#[derive(Debug)]
pub struct WithTransaction<Req, DB: Dialect> {
    /// The request.
    pub request: Req,
    /// The transaction.
    pub transaction: LentTransaction<DB>,
}

/// The transaction of a message, lent to its handler: a connection to execute statements on.
///
/// It derefs to the connection of sqlx. Dropped, it goes back to the layer, which commits it if the handler
/// answers Ok, and else rolls it back. It has to be dropped by the time that the handler's future has ended;
/// what is kept longer is never committed.
pub struct LentTransaction<DB: Dialect> {
    /// Some until the drop.
    session: Option<Session<DB::Table>>,
    home: Option<oneshot::Sender<Session<DB::Table>>>,
}

/// Runs each message id once, in a transaction.
///
/// Made by [`TransactionLayer`]. See the [module docs](self) for an example.
///
/// # Errors
///
/// The inner service's own, untouched, unless another transaction was in its way; [`Unfinished`](crate::Unfinished) when its
/// transaction is not known to be committed; [`Parked`](crate::Parked) while somebody else is at the message;
/// [`StoreError`](crate::StoreError) when there is no transaction to be had. All of them mean: no ack.
///
/// # Readiness
///
/// As [`Idempotency`](crate::Idempotency#readiness). What the inner service reserved is held while the call waits for
/// a connection, and for the transaction of another copy.
///
/// # Runtime
///
/// A call is polled within a tokio runtime with its I/O and time drivers (`enable_all`); outside of one it ends in a
/// [`StoreError`](crate::StoreError).
///
/// # Clone
///
/// As [`Idempotency`](crate::Idempotency#clone).
pub struct TransactionService<S, DB: Dialect, X = MetaId, D = Always> {
    inner: S,
    layer: TransactionLayer<DB, X, D>,
}

// ===== impl LentTransaction =====

impl<DB: Dialect> LentTransaction<DB> {
    fn new(session: Session<DB::Table>, home: oneshot::Sender<Session<DB::Table>>) -> Self {
        LentTransaction {
            session: Some(session),
            home: Some(home),
        }
    }
}

impl<DB: Dialect> Deref for LentTransaction<DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &Self::Target {
        let session = self.session.as_ref().expect("there until the drop");
        session.connection()
    }
}

impl<DB: Dialect> DerefMut for LentTransaction<DB> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        let session = self.session.as_mut().expect("there until the drop");
        session.connection_mut()
    }
}

impl<DB: Dialect> Drop for LentTransaction<DB> {
    fn drop(&mut self) {
        if let (Some(session), Some(home)) = (self.session.take(), self.home.take()) {
            // If nobody waits for it any more, this rolls it back.
            drop(home.send(session));
        }
    }
}

impl<DB: Dialect> fmt::Debug for LentTransaction<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentTransaction").finish_non_exhaustive()
    }
}

// ===== impl TransactionService =====

impl<S, DB: Dialect, X, D> TransactionService<S, DB, X, D> {
    /// Gets a reference to the inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Gets a mutable reference to the inner service.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Consumes `self`, giving the inner service back.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S: Clone, DB: Dialect, X: Clone, D: Clone> Clone for TransactionService<S, DB, X, D> {
    fn clone(&self) -> Self {
        TransactionService {
            inner: self.inner.clone(),
            layer: self.layer.clone(),
        }
    }
}

impl<S: fmt::Debug, DB: Dialect, X, D> fmt::Debug for TransactionService<S, DB, X, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransactionService")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}

impl<S, Req, DB, X, D> Service<Req> for TransactionService<S, DB, X, D>
where
    S: Service<WithTransaction<Req, DB>> + Clone,
    S::Response: Ack,
    S::Error: Into<BoxError>,
    DB: Dialect,
    X: ExtractId<Req>,
    D: IsDone<S::Response> + Clone,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = ResponseFuture<S, Req, DB, D>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let TransactionLayer {
            settings,
            extract,
            is_done,
        } = &self.layer;
        let id = extract.extract_id(&request);
        let id = id.unwrap_or_else(|| MessageId::from(""));
        if id.is_empty() {
            settings.reporter.report(&Event::NoId);
        }
        let created_at = extract.created_at(&request);
        let clone = self.inner.clone();
        let call = (mem::replace(&mut self.inner, clone), request);
        ResponseFuture::new(settings.clone(), is_done.clone(), id, created_at, call)
    }
}
