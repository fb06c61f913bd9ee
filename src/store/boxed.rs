//! A store of a kind that is chosen when the program runs.

use super::{Claim, ClaimStore, Lease, MemoryStore, Owner, Store};
use crate::{
    error::{BackendError, BoxError, ConfigError},
    id::MessageId,
};
use std::{fmt, future::Future, pin::Pin, sync::Arc};

type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>;

/// Any [`ClaimStore`], of one type: for programs that are told by their configuration where to keep the
/// record.
///
/// A command costs an allocation and a call through a table more than the store itself.
///
/// ```
/// use tower_idempotency::{IdempotencyLayer, store::BoxStore};
///
/// # fn main() -> Result<(), tower_idempotency::BoxError> {
/// # #[cfg(feature = "tokio")]
/// # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
/// let url = std::env::var("RECORD_URL").unwrap_or_else(|_| "memory:".to_owned());
/// let store = BoxStore::connect(&url, "billing_seen").await?;
/// let layer = IdempotencyLayer::new(store);
/// # let _: IdempotencyLayer<BoxStore> = layer;
/// # Ok::<_, tower_idempotency::BoxError>(())
/// # })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct BoxStore {
    store: Arc<dyn AnyStore>,
}

/// What [`ClaimStore`] is without its associated types.
trait AnyStore: Send + Sync {
    fn seen(&self, id: &MessageId) -> BoxFuture<bool>;
    fn remember(&self, id: &MessageId) -> BoxFuture<()>;
    fn forget(&self, id: &MessageId) -> BoxFuture<()>;
    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<Claim>;
    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<bool>;
    fn complete(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool>;
    fn release(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool>;
}

fn boxed<T, E: Into<BoxError>>(
    command: impl Future<Output = Result<T, E>> + Send + 'static,
) -> BoxFuture<T> {
    Box::pin(async { command.await.map_err(Into::into) })
}

impl<St: ClaimStore> AnyStore for St {
    fn seen(&self, id: &MessageId) -> BoxFuture<bool> {
        boxed(Store::seen(self, id))
    }

    fn remember(&self, id: &MessageId) -> BoxFuture<()> {
        boxed(Store::remember(self, id))
    }

    fn forget(&self, id: &MessageId) -> BoxFuture<()> {
        boxed(Store::forget(self, id))
    }

    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<Claim> {
        boxed(ClaimStore::claim(self, id, owner, lease))
    }

    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<bool> {
        boxed(ClaimStore::renew(self, id, owner, lease))
    }

    fn complete(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool> {
        boxed(ClaimStore::complete(self, id, owner))
    }

    fn release(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool> {
        boxed(ClaimStore::release(self, id, owner))
    }
}

impl BoxStore {
    /// Boxes a store.
    pub fn new(store: impl ClaimStore) -> Self {
        BoxStore {
            store: Arc::new(store),
        }
    }

    /// Connects to the store that a URL names, which keeps ids for 24 hours.
    ///
    /// | URL | store | feature | `name` is |
    /// |---|---|---|---|
    /// | `memory:` | a new [`MemoryStore`] | | without a meaning |
    /// | `redis://`, `rediss://`, `valkey://`, `valkeys://` | `RedisStore` | `redis` | the prefix of the keys |
    /// | `postgres://`, `postgresql://` | `PostgresStore` | `postgres` | the table |
    /// | `mysql://`, `mariadb://` | `MySqlStore` | `mysql` | the table |
    /// | `sqlite:` | `SqliteStore` | `sqlite` | the table |
    ///
    /// The defaults are those of each store's own `connect`. A table is made unless it is there, as
    /// `migrate()` does it, since a boxed store cannot be asked to later; nor can it be asked to purge:
    /// a job beside the workers does, or a store made by its own type and then [boxed](Self::new).
    /// The name must not be empty, even where it has no meaning. One of letters, digits and underscores
    /// serves all of them, so that another URL is all that a move takes.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::error::BackendErrorKind::Config), with the [`ConfigError`] as the source, when
    /// the URL is of no scheme in this table or of one whose feature is not on; for `rediss://` and
    /// `valkeys://` that is also one of the TLS features of the `redis` crate. Else what the store's
    /// `connect` and `migrate` fail with. No error shows the password of a URL.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it may still make the table.
    pub async fn connect(url: &str, name: &str) -> Result<Self, BackendError> {
        if name.is_empty() {
            let expected = "the prefix or table of one consumer, which no other one has";
            return Err(ConfigError::new("name", "empty", expected).into());
        }
        let (scheme, rest) = url.split_once(':').unwrap_or_default();
        // Without a host, the SQL drivers would take the one they are used to.
        if SERVERS.contains(&scheme) && !rest.starts_with("//") {
            return Err(of_scheme(scheme, "`//` and a host after it").into());
        }
        match scheme {
            "memory" if rest.is_empty() || rest == "//" => Ok(BoxStore::new(MemoryStore::new())),
            #[cfg(feature = "redis")]
            "rediss" | "valkeys" if !redis_has_tls() => Err(of_scheme(
                scheme,
                "a TLS feature of the `redis` crate to be on, such as `tokio-rustls-comp`",
            )
            .into()),
            #[cfg(feature = "redis")]
            "redis" | "rediss" | "valkey" | "valkeys" => {
                let store = super::RedisStore::connect(url, name).await?;
                Ok(BoxStore::new(store))
            }
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => {
                let store = super::PostgresStore::connect(url, name).await?;
                store.migrate().await?;
                Ok(BoxStore::new(store))
            }
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => {
                let store = super::MySqlStore::connect(url, name).await?;
                store.migrate().await?;
                Ok(BoxStore::new(store))
            }
            #[cfg(feature = "sqlite")]
            "sqlite" => {
                let store = super::SqliteStore::connect(url, name).await?;
                store.migrate().await?;
                Ok(BoxStore::new(store))
            }
            _ => Err(refused(url).into()),
        }
    }
}

/// The schemes whose URLs name a host.
const SERVERS: [&str; 8] = [
    "redis",
    "rediss",
    "valkey",
    "valkeys",
    "postgres",
    "postgresql",
    "mysql",
    "mariadb",
];

/// Whether the application turned TLS on in the `redis` crate.
#[cfg(feature = "redis")]
fn redis_has_tls() -> bool {
    let with_tls = ::redis::ConnectionAddr::TcpTls {
        host: String::new(),
        port: 0,
        insecure: false,
        tls_params: None,
    };
    with_tls.is_supported()
}

/// Why a URL has no store here. Shows no more of it than its scheme, and nothing where that may be part of
/// a password.
fn refused(url: &str) -> ConfigError {
    let (scheme, rest) = url.split_once(':').unwrap_or_default();
    let expected = match scheme {
        "memory" => "`memory:` and nothing after it",
        "redis" | "rediss" | "valkey" | "valkeys" => {
            "the feature `redis` of `tower-idempotency` to be on"
        }
        "postgres" | "postgresql" => "the feature `postgres` of `tower-idempotency` to be on",
        "mysql" | "mariadb" => "the feature `mysql` of `tower-idempotency` to be on",
        "sqlite" => "the feature `sqlite` of `tower-idempotency` to be on",
        _ => {
            let expected = "`memory:`, `redis://`, `rediss://`, `valkey://`, `valkeys://`, \
                            `postgres://`, `postgresql://`, `mysql://`, `mariadb://` or `sqlite:`";
            let is_one = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
                && scheme
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
            if !is_one || !rest.starts_with("//") {
                return ConfigError::new("url", "none", expected);
            }
            expected
        }
    };
    of_scheme(scheme, expected)
}

fn of_scheme(scheme: &str, expected: &'static str) -> ConfigError {
    ConfigError::new("url", format!("of the scheme `{scheme}`"), expected)
}

impl Store for BoxStore {
    type Error = BoxError;
    type Future<T: Send + 'static> = BoxFuture<T>;

    fn seen(&self, id: &MessageId) -> BoxFuture<bool> {
        self.store.seen(id)
    }

    fn remember(&self, id: &MessageId) -> BoxFuture<()> {
        self.store.remember(id)
    }

    fn forget(&self, id: &MessageId) -> BoxFuture<()> {
        self.store.forget(id)
    }
}

impl ClaimStore for BoxStore {
    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<Claim> {
        self.store.claim(id, owner, lease)
    }

    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<bool> {
        self.store.renew(id, owner, lease)
    }

    fn complete(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool> {
        self.store.complete(id, owner)
    }

    fn release(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool> {
        self.store.release(id, owner)
    }
}

impl fmt::Debug for BoxStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BoxStore")
    }
}
