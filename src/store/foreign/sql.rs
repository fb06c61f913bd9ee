//! The tables of BabelQueue's Go and PHP SDKs.

use crate::store::sql::{
    SqlStore,
    engine::{Backend, Layout, Record},
};

/// The table that BabelQueue's Go SDK uses unless told otherwise.
#[cfg(feature = "postgres")]
pub const GO_TABLE: &str = "babelqueue_idempotency";

/// The table that BabelQueue's PHP SDK uses unless told otherwise.
pub const PHP_TABLE: &str = "bq_idempotency";

/// The record of BabelQueue's Go SDK in PostgreSQL.
///
/// One row per message: `message_id TEXT PRIMARY KEY`, `created_at TIMESTAMPTZ NOT NULL`,
/// `expires_at TIMESTAMPTZ`. A message was seen while its row is there and not past `expires_at`.
/// [`GO_TABLE`] is the SDK's own default.
///
/// The table is the Go fleet's to make, and to rid of what is over; here is no `migrate` and no
/// `purge`. An id with NUL cannot be stored in it: such a message is
/// never seen, and its mark fails with [`UnsuitableId`](crate::error::BackendErrorKind::UnsuitableId).
///
/// **Not with a fleet that claims.** A Go worker that calls the SDK's `Claim` writes this row before
/// the effect; if it dies, the row says done, and here the message would be skipped.
#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
pub type GoPostgresStore = SqlStore<crate::store::sql::PostgresTable, Go>;

/// The record of BabelQueue's Go SDK, see [`GoPostgresStore`].
#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
#[derive(Debug)]
pub enum Go {}

/// The record of BabelQueue's PHP SDK in an SQL database: `PhpPostgresStore`, `PhpMySqlStore` or
/// `PhpSqliteStore`.
///
/// One row per message: `message_id VARCHAR(255) PRIMARY KEY`, `state VARCHAR(16)`, `expires_at
/// BIGINT`, which has to allow null. A message was seen when its `state` is `seen`; such a row never ends. A claim of a PHP
/// worker (`claimed`) is not seen. [`PHP_TABLE`] is the SDK's own default.
///
/// The table is the PHP fleet's to make, and to rid of what is over; here is no `migrate` and no
/// `purge`. It is looked up once: a key that is changed later goes unnoticed. An id that does not fit its column is never seen,
/// and its mark fails with [`UnsuitableId`](crate::error::BackendErrorKind::UnsuitableId). A column that
/// takes different ids for one, as MySQL's default collation has it, is refused at the first use, with
/// the statement that mends it. A TTL that is set does not matter: there is none in this record.
#[derive(Debug)]
pub enum Php {}

/// The record of BabelQueue's PHP SDK in PostgreSQL, see [`Php`].
#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
pub type PhpPostgresStore = SqlStore<crate::store::sql::PostgresTable, Php>;

/// The record of BabelQueue's PHP SDK in MySQL or MariaDB, see [`Php`].
#[cfg(feature = "mysql")]
#[cfg_attr(docsrs, doc(cfg(feature = "mysql")))]
pub type PhpMySqlStore = SqlStore<crate::store::sql::MySqlTable, Php>;

/// The record of BabelQueue's PHP SDK in SQLite, see [`Php`].
#[cfg(feature = "sqlite")]
#[cfg_attr(docsrs, doc(cfg(feature = "sqlite")))]
pub type PhpSqliteStore = SqlStore<crate::store::sql::SqliteTable, Php>;

impl<B: Backend> Record<B> for Php {
    const LAYOUT: Layout = Layout::Php;
}

#[cfg(feature = "postgres")]
impl Record<crate::store::sql::PostgresTable> for Go {
    const LAYOUT: Layout = Layout::Go;
}
