//! The record of BabelQueue's Go SDK in Redis.

use crate::{
    error::BackendError,
    id::MessageId,
    store::{RedisStore, Store},
};
use redis::Value;
use std::{future::Future, pin::Pin};

/// The record that BabelQueue's Go SDK keeps in Redis, for Go and Rust workers of one consumer.
///
/// The key is the prefix followed by the id, its value is `1`, and an id is seen when its key exists:
/// `EXISTS`, `SET … PX`, `DEL`. Go's own `remember` leaves the time of an id that is already there
/// as it is (`SET … NX`); here it starts anew. Give the prefix that the Go workers use,
/// [`DEFAULT_PREFIX`](Self::DEFAULT_PREFIX) unless set there, and their TTL.
///
/// Not for a fleet whose Go workers call `Claim`: that writes the mark *before* the effect, and a
/// message whose worker crashed in between would be skipped here and lost.
///
/// Errors, cancel safety, clones and connections are those of [`RedisStore`], and so is [what Redis may
/// lose](crate::store::redis#what-redis-may-lose).
///
/// ```no_run
/// use std::time::Duration;
/// use tower_idempotency::store::{RedisStore, foreign::GoRedisStore};
///
/// # async fn run() -> Result<(), tower_idempotency::BoxError> {
/// let connected = RedisStore::builder(GoRedisStore::DEFAULT_PREFIX)
///     .ttl(Duration::from_secs(24 * 3600))
///     .connect("redis://127.0.0.1:6379")
///     .await?;
/// let store = GoRedisStore::new(connected);
/// # let _: GoRedisStore = store;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct GoRedisStore {
    inner: RedisStore,
}

impl GoRedisStore {
    /// The prefix of Go workers that set none.
    pub const DEFAULT_PREFIX: &'static str = "bq:idemp:";

    /// Go's record under the prefix, with the TTL and over the connection of this store.
    ///
    /// Clones of that store should not be used on: they would not see what is remembered here.
    #[must_use]
    pub const fn new(store: RedisStore) -> Self {
        GoRedisStore { inner: store }
    }

    /// The server's `maxmemory-policy`, as [`RedisStore::eviction_policy`].
    #[must_use]
    pub fn eviction_policy(&self) -> Option<&str> {
        self.inner.eviction_policy()
    }
}

impl Store for GoRedisStore {
    type Error = BackendError;
    type Future<T: Send + 'static> = Pin<Box<dyn Future<Output = Result<T, BackendError>> + Send>>;

    fn seen(&self, id: &MessageId) -> Self::Future<bool> {
        let command = self.inner.on("EXISTS", id);
        self.inner
            .send(command, |value| matches!(value, Value::Int(1)))
    }

    fn remember(&self, id: &MessageId) -> Self::Future<()> {
        self.inner.set(id, "1")
    }

    fn forget(&self, id: &MessageId) -> Self::Future<()> {
        self.inner.forget(id)
    }
}
