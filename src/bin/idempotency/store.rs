//! The record, of a kind that its URL names.

use crate::Usage;
use sqlx::{
    Connection, MySqlConnection, PgConnection,
    mysql::MySqlPoolOptions,
    postgres::PgPoolOptions,
    sqlite::{SqliteConnectOptions, SqlitePoolOptions},
};
use std::{str::FromStr, time::Duration};
use tower_idempotency::{
    BackendError, BoxError, MessageId, MySqlStore, PostgresStore, RedisStore, SqliteStore, Store,
    store::{Entry, Stats},
};

/// How long a statement may take, and how long is waited for a connection.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long one may take that reads a whole table, or that many rows are deleted with.
const LONG_PATIENCE: Duration = Duration::from_secs(600);

pub(crate) enum Records {
    Redis(RedisStore),
    Postgres(PostgresStore),
    MySql(MySqlStore),
    Sqlite(SqliteStore),
}

#[derive(Clone, Copy)]
enum Kind {
    Redis,
    Postgres,
    MySql,
    Sqlite,
}

fn kind(url: &str) -> Result<Kind, Usage> {
    // What is no URL may be anything, also a password.
    let scheme = url.split_once(':').map(|(scheme, _)| scheme);
    match scheme {
        Some("redis" | "rediss" | "valkey" | "valkeys") => Ok(Kind::Redis),
        Some("postgres" | "postgresql") => Ok(Kind::Postgres),
        Some("mysql" | "mariadb") => Ok(Kind::MySql),
        Some("sqlite") => Ok(Kind::Sqlite),
        _ => Err(Usage(
            "--store is of no scheme known here; expected redis://, postgres://, mysql:// or sqlite:".into(),
        )),
    }
}

/// Refuses a file of SQLite that is not there, which would be made otherwise.
pub(crate) fn is_there(url: &str) -> Result<(), BoxError> {
    if let Kind::Sqlite = kind(url)? {
        let options = SqliteConnectOptions::from_str(url)?;
        let file = options.get_filename();
        // Others are refused by the store.
        let named = !file.as_os_str().is_empty() && !url.contains("memory");
        if named && !file.exists() {
            return Err(Usage(format!("there is no file {}", file.display())).into());
        }
    }
    Ok(())
}

/// The statements that make its table; none of Redis.
pub(crate) fn ddl(url: &str, name: &str) -> Result<String, BoxError> {
    // Pools that nothing is asked of, and that connect to nothing.
    Ok(match kind(url)? {
        Kind::Redis => String::new(),
        Kind::Postgres => {
            let pool = PgPoolOptions::new().connect_lazy("postgres://localhost/none")?;
            PostgresStore::builder(name)
                .pool(pool)
                .map_err(BackendError::from)?
                .ddl()
        }
        Kind::MySql => {
            let pool = MySqlPoolOptions::new().connect_lazy("mysql://localhost/none")?;
            MySqlStore::builder(name)
                .pool(pool)
                .map_err(BackendError::from)?
                .ddl()
        }
        Kind::Sqlite => {
            let pool = SqlitePoolOptions::new().connect_lazy("sqlite:none")?;
            SqliteStore::builder(name)
                .pool(pool)
                .map_err(BackendError::from)?
                .ddl()
        }
    })
}

/// A server that is not there is told of at once, and why. A pool would try until its patience is at an end.
async fn answers<C: Connection>(url: &str) -> Result<(), BoxError> {
    match tokio::time::timeout(PATIENCE, C::connect(url)).await {
        Ok(Ok(connection)) => drop(connection.close().await),
        Ok(Err(error @ sqlx::Error::Io(_))) => return Err(error.into()),
        // The store knows better what else is wrong.
        Ok(Err(_)) => {}
        Err(_) => {
            let why = format!("the server does not answer within {PATIENCE:?}");
            return Err(why.into());
        }
    }
    Ok(())
}

impl Records {
    pub(crate) async fn connect(url: &str, name: &str, pooler: bool) -> Result<Self, BoxError> {
        match kind(url)? {
            Kind::Postgres => answers::<PgConnection>(url).await?,
            Kind::MySql => answers::<MySqlConnection>(url).await?,
            Kind::Redis | Kind::Sqlite => {}
        }
        Self::connect_within(PATIENCE, url, name, pooler).await
    }

    /// For what may take long; a server that is not there is told of as soon as otherwise.
    pub(crate) async fn connect_for_long(
        url: &str,
        name: &str,
        pooler: bool,
    ) -> Result<Self, BoxError> {
        Self::connect(url, name, pooler).await?;
        Self::connect_within(LONG_PATIENCE, url, name, pooler).await
    }

    async fn connect_within(
        limit: Duration,
        url: &str,
        name: &str,
        pooler: bool,
    ) -> Result<Self, BoxError> {
        Ok(match kind(url)? {
            Kind::Redis => {
                let builder = RedisStore::builder(name).response_timeout(PATIENCE);
                Records::Redis(builder.connect(url).await?)
            }
            Kind::Postgres => {
                let builder = PostgresStore::builder(name).response_timeout(limit);
                let builder = builder.transaction_pooler(pooler).max_connections(2);
                Records::Postgres(builder.connect(url).await?)
            }
            Kind::MySql => {
                let builder = MySqlStore::builder(name).response_timeout(limit);
                Records::MySql(builder.max_connections(2).connect(url).await?)
            }
            Kind::Sqlite => {
                let builder = SqliteStore::builder(name).response_timeout(limit);
                Records::Sqlite(builder.max_connections(2).connect(url).await?)
            }
        })
    }

    pub(crate) async fn seen(&self, id: &MessageId) -> Result<bool, BackendError> {
        match self {
            Records::Redis(store) => store.seen(id).await,
            Records::Postgres(store) => store.seen(id).await,
            Records::MySql(store) => store.seen(id).await,
            Records::Sqlite(store) => store.seen(id).await,
        }
    }

    pub(crate) async fn entry(&self, id: &MessageId) -> Result<Option<Entry>, BackendError> {
        match self {
            Records::Redis(store) => store.entry(id).await,
            Records::Postgres(store) => store.entry(id).await,
            Records::MySql(store) => store.entry(id).await,
            Records::Sqlite(store) => store.entry(id).await,
        }
    }

    pub(crate) async fn forget(&self, id: &MessageId) -> Result<(), BackendError> {
        match self {
            Records::Redis(store) => store.forget(id).await,
            Records::Postgres(store) => store.forget(id).await,
            Records::MySql(store) => store.forget(id).await,
            Records::Sqlite(store) => store.forget(id).await,
        }
    }

    /// Redis drops its keys by itself.
    pub(crate) async fn purge(
        &self,
        go_on: impl Fn(u64) -> bool + Send + Sync + 'static,
    ) -> Result<u64, BackendError> {
        match self {
            Records::Redis(_) => Ok(0),
            Records::Postgres(store) => store.purge_while(go_on).await,
            Records::MySql(store) => store.purge_while(go_on).await,
            Records::Sqlite(store) => store.purge_while(go_on).await,
        }
    }

    pub(crate) async fn stats(&self) -> Result<Stats, BackendError> {
        match self {
            Records::Redis(store) => store.stats().await,
            Records::Postgres(store) => store.stats().await,
            Records::MySql(store) => store.stats().await,
            Records::Sqlite(store) => store.stats().await,
        }
    }

    /// Redis has nothing to make.
    pub(crate) async fn migrate(&self) -> Result<(), BackendError> {
        match self {
            Records::Redis(_) => Ok(()),
            Records::Postgres(store) => store.migrate().await,
            Records::MySql(store) => store.migrate().await,
            Records::Sqlite(store) => store.migrate().await,
        }
    }
}
