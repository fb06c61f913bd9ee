//! Records that workers in other languages keep in a form of their own.
//!
//! These say *done* and *not seen*, and no more: they serve the seen-set
//! ([`Store`](super::Store)).

// ===== Redis =====

#[cfg(feature = "redis")]
mod redis;

#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use self::redis::GoRedisStore;

// ===== SQL =====

#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
mod sql;

#[cfg(feature = "mysql")]
#[cfg_attr(docsrs, doc(cfg(feature = "mysql")))]
pub use self::sql::PhpMySqlStore;
#[cfg(feature = "sqlite")]
#[cfg_attr(docsrs, doc(cfg(feature = "sqlite")))]
pub use self::sql::PhpSqliteStore;
#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
pub use self::sql::{GO_TABLE, Go, GoPostgresStore, PhpPostgresStore};
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
#[cfg_attr(
    docsrs,
    doc(cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite")))
)]
pub use self::sql::{PHP_TABLE, Php};
