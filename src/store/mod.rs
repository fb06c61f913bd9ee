//! Where it is recorded which messages had their effect.

mod boxed;
mod claim;
#[cfg(any(
    feature = "redis",
    feature = "postgres",
    feature = "mysql",
    feature = "sqlite"
))]
mod entry;
#[cfg(any(
    feature = "redis",
    feature = "postgres",
    feature = "mysql",
    feature = "sqlite"
))]
#[cfg_attr(
    docsrs,
    doc(cfg(any(
        feature = "redis",
        feature = "postgres",
        feature = "mysql",
        feature = "sqlite"
    )))
)]
pub mod foreign;
pub mod memory;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub mod redis;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
#[cfg_attr(
    docsrs,
    doc(cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite")))
)]
pub mod sql;
#[cfg(any(
    feature = "redis",
    feature = "postgres",
    feature = "mysql",
    feature = "sqlite"
))]
mod ttl;

#[cfg(any(
    feature = "redis",
    feature = "postgres",
    feature = "mysql",
    feature = "sqlite"
))]
#[cfg_attr(
    docsrs,
    doc(cfg(any(
        feature = "redis",
        feature = "postgres",
        feature = "mysql",
        feature = "sqlite"
    )))
)]
pub use self::entry::{Entry, EntryState, Stats};
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use self::redis::{RedisStore, RedisStoreBuilder};
#[cfg(feature = "mysql")]
#[cfg_attr(docsrs, doc(cfg(feature = "mysql")))]
pub use self::sql::MySqlStore;
#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
pub use self::sql::PostgresStore;
#[cfg(feature = "sqlite")]
#[cfg_attr(docsrs, doc(cfg(feature = "sqlite")))]
pub use self::sql::SqliteStore;
pub use self::{
    boxed::BoxStore,
    claim::{Claim, ClaimStore, Lease, Owner},
    memory::{MemoryStore, MemoryStoreBuilder},
};

use crate::{error::BoxError, id::MessageId};
use std::future::Future;

/// A record of the messages that had their effect.
///
/// # Contract
///
/// * Ids are compared by their bytes: no folding of case or blanks, no limit of length.
/// * Each operation takes effect at once and as a whole, whoever else works on the record.
/// * `remember` may be sent twice, and again for an id that is already there: it is the same
///   as once, and the id's time starts anew.
/// * An id is remembered for as long as the store says: expiry is its affair, in its own clock, and
///   an expired id counts as never seen.
/// * A future that is dropped may or may not have taken effect. What its caller learns by an
///   error is *unknown*, never *no*.
/// * Clones share one record.
///
/// # Futures
///
/// The future is named by the store, so that one in memory answers with
/// [`std::future::Ready`] and allocates nothing. A remote store says
/// `type Future<T: Send + 'static> = Pin<Box<dyn Future<Output = Result<T, Self::Error>> + Send>>`.
///
/// ```
/// use std::{collections::HashSet, future::Future, io, pin::Pin, sync::{Arc, Mutex}};
/// use tower_idempotency::{MessageId, Store};
///
/// #[derive(Clone, Default)]
/// struct MyStore(Arc<Mutex<HashSet<MessageId>>>);
///
/// impl Store for MyStore {
///     type Error = io::Error;
///     type Future<T: Send + 'static> =
///         Pin<Box<dyn Future<Output = Result<T, Self::Error>> + Send>>;
///
///     fn seen(&self, id: &MessageId) -> Self::Future<bool> {
///         let (set, id) = (self.0.clone(), id.clone());
///         Box::pin(async move { Ok(set.lock().unwrap().contains(&id)) })
///     }
///
///     fn remember(&self, id: &MessageId) -> Self::Future<()> {
///         let (set, id) = (self.0.clone(), id.clone());
///         Box::pin(async move { set.lock().unwrap().insert(id); Ok(()) })
///     }
///
///     fn forget(&self, id: &MessageId) -> Self::Future<()> {
///         let (set, id) = (self.0.clone(), id.clone());
///         Box::pin(async move { set.lock().unwrap().remove(&id); Ok(()) })
///     }
/// }
/// ```
pub trait Store: Clone + Send + Sync + 'static {
    /// What goes wrong.
    type Error: Into<BoxError>;

    /// The answer under way. It owns what it needs: a call that is dropped may hand its work to
    /// a task.
    type Future<T: Send + 'static>: Future<Output = Result<T, Self::Error>> + Send + 'static;

    /// Whether this message had its effect.
    fn seen(&self, id: &MessageId) -> Self::Future<bool>;

    /// Records that this message had its effect.
    fn remember(&self, id: &MessageId) -> Self::Future<()>;

    /// Drops what is recorded of this message, so that its next delivery runs. No record is no
    /// error.
    ///
    /// For a deliberate second run: no layer calls it. A handler under way still marks its message
    /// done: forget after it ended.
    fn forget(&self, id: &MessageId) -> Self::Future<()>;
}
