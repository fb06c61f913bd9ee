//! The three databases as the tests see them: a table of the test's own, looked at and changed over
//! connections of the test's own.

#![allow(dead_code, unreachable_pub, missing_docs)]

use crate::services::{self, Proxy, unique};
use sqlx::{
    AssertSqlSafe, Connection, Database, Executor, MySqlPool, PgPool, Pool, Row, SqlitePool,
    mysql::{MySqlPoolOptions, MySqlRow},
    pool::PoolOptions,
    postgres::{PgPoolOptions, PgRow},
    sqlite::{SqliteConnectOptions, SqlitePoolOptions, SqliteRow},
};
use std::{
    fs,
    net::ToSocketAddrs,
    path::PathBuf,
    str::FromStr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::{task::JoinHandle, time::sleep};
use tower_idempotency::{
    TransactionLayer,
    error::BackendError,
    store::{
        ClaimStore, MySqlStore, PostgresStore, SqliteStore,
        sql::{MySqlTable, PostgresTable, SqlStoreBuilder, SqliteTable},
    },
    transaction::Dialect,
};

/// A row of our own record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub state: String,
    pub owner: Option<String>,
    pub since: i64,
    pub expires_at: Option<i64>,
}

/// A database with a table of the test's own. In statements `{t}` stands for it, `{now}` for the clock
/// of the server, in microseconds.
pub trait World: Sized + 'static {
    type Db: Dialect;
    type Store: ClaimStore<Error = BackendError>;

    /// The clock of the server at this instant, in microseconds.
    const NOW: &'static str;

    const IS_MYSQL: bool = false;

    /// Asks for the number of one's own session, where there are sessions.
    const SESSION: Option<&'static str> = None;

    /// With its table. A test that gets `None` is over.
    async fn open(name: &str) -> Option<Self>;

    fn builder(&self) -> SqlStoreBuilder<<Self::Db as Dialect>::Table>;

    fn url(&self) -> &str;

    /// Where the server is said to be from now on, and whether that is a pooler in transaction mode.
    fn is_behind(&mut self, url: String, pooler: bool);

    async fn connect(&self, builder: SqlStoreBuilder<<Self::Db as Dialect>::Table>) -> Self::Store;

    /// Of a pool as a user brings it.
    fn options(&self) -> PoolOptions<Self::Db> {
        PoolOptions::new()
    }

    /// A pool as a user brings it, of at most so many connections.
    async fn pool(&self, connections: u32) -> Pool<Self::Db> {
        let options = self.options().max_connections(connections);
        options.connect(self.url()).await.unwrap()
    }

    /// Whether such a pool has a transaction open that waits for its client, as the server knows. Of SQLite: whether
    /// anybody has the file locked.
    async fn left_open(&self) -> bool;

    /// A statement that takes about so long, and does nothing.
    fn takes(time: Duration) -> String;

    /// The same, of sessions that begin with this statement.
    async fn pool_of(&self, connections: u32, begin: &'static str) -> Pool<Self::Db>;

    /// Transactions on the caller's own pool.
    fn transactions(
        builder: SqlStoreBuilder<<Self::Db as Dialect>::Table>,
        pool: Pool<Self::Db>,
    ) -> TransactionLayer<Self::Db>;

    /// Runs a statement, and says how many rows it changed.
    fn execute(
        connection: &mut <Self::Db as Database>::Connection,
        statement: String,
    ) -> impl Future<Output = Result<u64, sqlx::Error>> + Send;

    /// Runs a query for a number.
    fn number(
        connection: &mut <Self::Db as Database>::Connection,
        statement: String,
    ) -> impl Future<Output = Result<i64, sqlx::Error>> + Send;

    /// Runs a query for a text.
    fn text(
        connection: &mut <Self::Db as Database>::Connection,
        statement: String,
    ) -> impl Future<Output = Result<String, sqlx::Error>> + Send;

    /// On a pool as a user brings it, of so many connections, all of which are in use from now on.
    async fn exhausted(&self, connections: u32) -> (Self::Store, Vec<Box<dyn Send>>);

    async fn run(&self, statement: &str);

    /// Asks for a number.
    async fn ask(&self, statement: &str) -> i64;

    async fn now(&self) -> i64;

    async fn stored(&self, key: &str) -> Option<Stored>;

    /// How many rows there are.
    async fn count(&self) -> i64;

    fn table(&self) -> &str;

    /// A transaction that is open, with this statement done.
    async fn hold(&self, statement: &str) -> Self::Open;

    type Open: Open;

    /// Until this call waits for a lock on the table, where that can be seen, or is over.
    async fn until_waiting<T>(&self, call: &JoinHandle<T>);

    async fn drop(self);

    async fn store(&self) -> Self::Store {
        self.connect(self.builder()).await
    }

    /// Puts a proxy between the server and the connections that are made from now on.
    async fn behind_proxy(&mut self) -> Proxy {
        let server = services::host_and_port(self.url());
        let proxy = Proxy::start(server.to_socket_addrs().unwrap().next().unwrap()).await;
        let through = self.url().replace(&server, &proxy.addr().to_string());
        self.is_behind(through, false);
        proxy
    }

    /// Ends a session as an administrator does.
    async fn kill(&self, _session: i64) {
        panic!("there are no sessions");
    }

    /// Makes the end of a record one that is over.
    async fn expire(&self, key: &str) {
        self.run(&format!(
            "UPDATE {{t}} SET expires_at = {{now}} - 1000 WHERE message_id = '{key}'"
        ))
        .await;
    }
}

/// An open transaction of another session.
pub trait Open {
    async fn end(self, how: &str);
}

// ===== PostgreSQL =====

pub struct Postgres {
    url: String,
    table: String,
    pooler: bool,
    pool: PgPool,
}

const POSTGRES_NOW: &str = "(extract(epoch from clock_timestamp()) * 1000000)::bigint";

impl Postgres {
    /// What the server knows of the sessions of this table's stores.
    pub async fn sessions(&self, such: &str) -> i64 {
        let statement = "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{t}'";
        self.rows(&format!("{statement} AND {such}")).await[0].get(0)
    }

    pub async fn rows(&self, statement: &str) -> Vec<PgRow> {
        let whole = spelled(statement, &self.table, POSTGRES_NOW);
        let rows = self.pool.fetch_all(sqlx::raw_sql(AssertSqlSafe(whole)));
        rows.await.unwrap_or_else(|e| panic!("{statement}: {e}"))
    }
}

impl World for Postgres {
    type Db = sqlx::Postgres;
    type Store = PostgresStore;
    type Open = sqlx::PgConnection;

    const NOW: &'static str = POSTGRES_NOW;

    const SESSION: Option<&'static str> = Some("SELECT pg_backend_pid()::bigint");

    async fn kill(&self, session: i64) {
        self.run(&format!("SELECT pg_terminate_backend({session})"))
            .await;
        // It is told, and then ends.
        until("the session has ended", async || {
            self.sessions(&format!("pid = {session}")).await == 0
        })
        .await;
    }

    async fn open(name: &str) -> Option<Self> {
        let url = services::postgres()?;
        let table = unique(name);
        let pool = PgPoolOptions::new().max_connections(2);
        let pool = pool.connect(&url).await.unwrap();
        let sign = if url.contains('?') { '&' } else { '?' };
        let url = format!("{url}{sign}application_name={table}");
        let world = Postgres {
            url,
            table,
            pooler: false,
            pool,
        };
        world.store().await.migrate().await.unwrap();
        Some(world)
    }

    fn builder(&self) -> SqlStoreBuilder<PostgresTable> {
        PostgresStore::builder(&self.table).transaction_pooler(self.pooler)
    }

    fn url(&self) -> &str {
        &self.url
    }

    fn is_behind(&mut self, url: String, pooler: bool) {
        self.url = url;
        self.pooler = pooler;
    }

    async fn connect(&self, builder: SqlStoreBuilder<PostgresTable>) -> PostgresStore {
        builder.connect(&self.url).await.unwrap()
    }

    async fn pool_of(&self, connections: u32, begin: &'static str) -> Pool<sqlx::Postgres> {
        let pool = PgPoolOptions::new().max_connections(connections);
        let pool = pool.after_connect(move |session, _| {
            Box::pin(async move { session.execute(sqlx::raw_sql(begin)).await.map(drop) })
        });
        pool.connect(&self.url).await.unwrap()
    }

    fn transactions(
        builder: SqlStoreBuilder<PostgresTable>,
        pool: Pool<sqlx::Postgres>,
    ) -> TransactionLayer<sqlx::Postgres> {
        TransactionLayer::with_store(builder.pool(pool).unwrap())
    }

    async fn left_open(&self) -> bool {
        self.sessions("state LIKE 'idle in transaction%'").await > 0
    }

    fn takes(time: Duration) -> String {
        format!("SELECT pg_sleep({})", time.as_secs_f32())
    }

    async fn execute(
        connection: &mut sqlx::PgConnection,
        statement: String,
    ) -> Result<u64, sqlx::Error> {
        let done = connection.execute(sqlx::raw_sql(AssertSqlSafe(statement)));
        Ok(done.await?.rows_affected())
    }

    async fn number(
        connection: &mut sqlx::PgConnection,
        statement: String,
    ) -> Result<i64, sqlx::Error> {
        let row = connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(statement)));
        row.await?.try_get(0)
    }

    async fn text(
        connection: &mut sqlx::PgConnection,
        statement: String,
    ) -> Result<String, sqlx::Error> {
        let row = connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(statement)));
        row.await?.try_get(0)
    }

    async fn exhausted(&self, connections: u32) -> (PostgresStore, Vec<Box<dyn Send>>) {
        let pool = PgPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(Duration::from_millis(200))
            .connect(&self.url)
            .await
            .unwrap();
        let store = self.builder().pool(pool.clone()).unwrap();
        looked_up(&store).await;
        let mut taken: Vec<Box<dyn Send>> = Vec::new();
        for _ in 0..connections {
            taken.push(Box::new(until_acquired(|| pool.acquire()).await));
        }
        (store, taken)
    }

    async fn run(&self, statement: &str) {
        self.rows(statement).await;
    }

    async fn ask(&self, statement: &str) -> i64 {
        let whole = spelled(statement, &self.table, POSTGRES_NOW);
        let row = self.pool.fetch_one(sqlx::raw_sql(AssertSqlSafe(whole)));
        row.await.unwrap().get(0)
    }

    async fn now(&self) -> i64 {
        self.rows("SELECT {now}").await[0].get(0)
    }

    async fn stored(&self, key: &str) -> Option<Stored> {
        let statement = "SELECT state, owner, since, expires_at FROM {t} WHERE message_id = $1";
        let statement = spelled(statement, &self.table, "");
        let query = sqlx::query(AssertSqlSafe(statement)).bind(key);
        let row = query.fetch_optional(&self.pool).await.unwrap();
        row.map(|row: PgRow| Stored {
            state: row.get(0),
            owner: row.get(1),
            since: row.get(2),
            expires_at: row.get(3),
        })
    }

    async fn count(&self) -> i64 {
        let statement = format!("SELECT count(*) FROM {}", self.table);
        let row = self.pool.fetch_one(sqlx::raw_sql(AssertSqlSafe(statement)));
        row.await.unwrap().get(0)
    }

    fn table(&self) -> &str {
        &self.table
    }

    async fn hold(&self, statement: &str) -> sqlx::PgConnection {
        let mut session = self.pool.acquire().await.unwrap().detach();
        let whole = spelled(statement, &self.table, POSTGRES_NOW);
        let begun = session.execute(sqlx::raw_sql(AssertSqlSafe(format!("BEGIN; {whole}"))));
        begun.await.unwrap();
        session
    }

    async fn until_waiting<T>(&self, call: &JoinHandle<T>) {
        until("a session waits for a lock", async || {
            self.sessions("wait_event_type = 'Lock'").await > 0 || call.is_finished()
        })
        .await;
    }

    async fn drop(self) {
        self.run("DROP TABLE {t}").await;
        self.pool.close().await;
    }
}

impl Open for sqlx::PgConnection {
    async fn end(mut self, how: &str) {
        let end = self.execute(sqlx::raw_sql(AssertSqlSafe(how.to_owned())));
        end.await.unwrap();
    }
}

// ===== MySQL, MariaDB =====

pub struct MySql {
    url: String,
    table: String,
    pool: MySqlPool,
    /// The connections of its pools that were ever made.
    sessions: Arc<Mutex<Vec<String>>>,
}

const MYSQL_NOW: &str = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) \
     + GREATEST(TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)), 0))";

impl MySql {
    /// Whether it can limit the wait of one statement.
    pub async fn is_mariadb(&self) -> bool {
        let version: String = self.rows("SELECT VERSION()").await[0].get(0);
        version.contains("MariaDB")
    }

    pub async fn rows(&self, statement: &str) -> Vec<MySqlRow> {
        let whole = spelled(statement, &self.table, MYSQL_NOW);
        let rows = self.pool.fetch_all(sqlx::raw_sql(AssertSqlSafe(whole)));
        rows.await.unwrap_or_else(|e| panic!("{statement}: {e}"))
    }
}

impl World for MySql {
    type Db = sqlx::MySql;
    type Store = MySqlStore;
    type Open = sqlx::MySqlConnection;

    const NOW: &'static str = MYSQL_NOW;

    const IS_MYSQL: bool = true;

    const SESSION: Option<&'static str> = Some("SELECT CAST(CONNECTION_ID() AS SIGNED)");

    async fn kill(&self, session: i64) {
        self.run(&format!("KILL {session}")).await;
        until("the session has ended", async || {
            let statement =
                format!("SELECT count(*) FROM information_schema.processlist WHERE id = {session}");
            self.rows(&statement).await[0].get::<i64, _>(0) == 0
        })
        .await;
    }

    async fn open(name: &str) -> Option<Self> {
        let url = services::mysql()?;
        let table = unique(name);
        let pool = MySqlPoolOptions::new().max_connections(2);
        let pool = pool.connect(&url).await.unwrap();
        let world = MySql {
            url,
            table,
            pool,
            sessions: Arc::default(),
        };
        world.store().await.migrate().await.unwrap();
        Some(world)
    }

    fn builder(&self) -> SqlStoreBuilder<MySqlTable> {
        MySqlStore::builder(&self.table)
    }

    fn url(&self) -> &str {
        &self.url
    }

    fn is_behind(&mut self, url: String, _: bool) {
        self.url = url;
    }

    async fn connect(&self, builder: SqlStoreBuilder<MySqlTable>) -> MySqlStore {
        builder.connect(&self.url).await.unwrap()
    }

    async fn pool_of(&self, connections: u32, begin: &'static str) -> Pool<sqlx::MySql> {
        let pool = MySqlPoolOptions::new().max_connections(connections);
        let pool = pool.after_connect(move |session, _| {
            Box::pin(async move { session.execute(sqlx::raw_sql(begin)).await.map(drop) })
        });
        pool.connect(&self.url).await.unwrap()
    }

    fn transactions(
        builder: SqlStoreBuilder<MySqlTable>,
        pool: Pool<sqlx::MySql>,
    ) -> TransactionLayer<sqlx::MySql> {
        TransactionLayer::with_store(builder.pool(pool).unwrap())
    }

    /// Remembers who they are on the server.
    fn options(&self) -> PoolOptions<sqlx::MySql> {
        let sessions = self.sessions.clone();
        PoolOptions::new().after_connect(move |connection, _| {
            let sessions = sessions.clone();
            Box::pin(async move {
                let own = Self::number(
                    connection,
                    "SELECT CAST(CONNECTION_ID() AS SIGNED)".to_owned(),
                )
                .await?;
                sessions.lock().unwrap().push(own.to_string());
                Ok(())
            })
        })
    }

    async fn left_open(&self) -> bool {
        // The table of InnoDB's transactions shows old news to those who ask often.
        let status = self.rows("SHOW ENGINE INNODB STATUS").await;
        let status = String::from_utf8_lossy(status[0].get(2)).into_owned();
        let sessions = self.sessions.lock().unwrap();
        status.split("---TRANSACTION ").skip(1).any(|transaction| {
            let active = transaction
                .lines()
                .next()
                .is_some_and(|it| it.contains("ACTIVE"));
            let session = transaction.split_once(" thread id ");
            let session = session.and_then(|(_, rest)| rest.split(',').next());
            active && session.is_some_and(|it| sessions.iter().any(|own| own == it))
        })
    }

    fn takes(time: Duration) -> String {
        format!("SELECT SLEEP({})", time.as_secs_f32())
    }

    async fn execute(
        connection: &mut sqlx::MySqlConnection,
        statement: String,
    ) -> Result<u64, sqlx::Error> {
        let done = connection.execute(sqlx::raw_sql(AssertSqlSafe(statement)));
        Ok(done.await?.rows_affected())
    }

    async fn number(
        connection: &mut sqlx::MySqlConnection,
        statement: String,
    ) -> Result<i64, sqlx::Error> {
        let row = connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(statement)));
        row.await?.try_get(0)
    }

    async fn text(
        connection: &mut sqlx::MySqlConnection,
        statement: String,
    ) -> Result<String, sqlx::Error> {
        let row = connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(statement)));
        row.await?.try_get(0)
    }

    async fn exhausted(&self, connections: u32) -> (MySqlStore, Vec<Box<dyn Send>>) {
        let pool = MySqlPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(Duration::from_millis(200))
            .connect(&self.url)
            .await
            .unwrap();
        let store = self.builder().pool(pool.clone()).unwrap();
        looked_up(&store).await;
        let mut taken: Vec<Box<dyn Send>> = Vec::new();
        for _ in 0..connections {
            taken.push(Box::new(until_acquired(|| pool.acquire()).await));
        }
        (store, taken)
    }

    async fn run(&self, statement: &str) {
        self.rows(statement).await;
    }

    async fn ask(&self, statement: &str) -> i64 {
        let whole = spelled(statement, &self.table, MYSQL_NOW);
        let row = self.pool.fetch_one(sqlx::raw_sql(AssertSqlSafe(whole)));
        row.await.unwrap().get(0)
    }

    async fn now(&self) -> i64 {
        self.rows("SELECT {now}").await[0].get(0)
    }

    async fn stored(&self, key: &str) -> Option<Stored> {
        let statement = "SELECT CAST(state AS CHAR), CAST(owner AS CHAR), since, expires_at \
                         FROM {t} WHERE message_id = ?";
        let statement = spelled(statement, &self.table, "");
        let query = sqlx::query(AssertSqlSafe(statement)).bind(key);
        let row = query.fetch_optional(&self.pool).await.unwrap();
        row.map(|row: MySqlRow| Stored {
            state: row.get(0),
            owner: row.get(1),
            since: row.get(2),
            expires_at: row.get(3),
        })
    }

    async fn count(&self) -> i64 {
        let statement = format!("SELECT count(*) FROM {}", self.table);
        let row = self.pool.fetch_one(sqlx::raw_sql(AssertSqlSafe(statement)));
        row.await.unwrap().get(0)
    }

    fn table(&self) -> &str {
        &self.table
    }

    async fn hold(&self, statement: &str) -> sqlx::MySqlConnection {
        let mut session = self.pool.acquire().await.unwrap().detach();
        let whole = spelled(statement, &self.table, MYSQL_NOW);
        for statement in ["BEGIN".to_owned(), whole] {
            let done = session.execute(sqlx::raw_sql(AssertSqlSafe(statement)));
            done.await.unwrap();
        }
        session
    }

    async fn until_waiting<T>(&self, call: &JoinHandle<T>) {
        until("a session waits for a lock", async || {
            // What is under way cannot end before the lock does. (The table of InnoDB's waits shows
            // old news to those who ask often.)
            let statement = "SELECT count(*) FROM information_schema.processlist \
                             WHERE id <> CONNECTION_ID() AND info LIKE '%{t}%'";
            self.rows(statement).await[0].get::<i64, _>(0) > 0 || call.is_finished()
        })
        .await;
    }

    async fn drop(self) {
        self.run("DROP TABLE {t}").await;
        self.pool.close().await;
    }
}

impl Open for sqlx::MySqlConnection {
    async fn end(mut self, how: &str) {
        let end = self.execute(sqlx::raw_sql(AssertSqlSafe(how.to_owned())));
        end.await.unwrap();
    }
}

// ===== SQLite =====

pub struct Sqlite {
    url: String,
    dir: PathBuf,
    table: String,
    pool: SqlitePool,
}

const SQLITE_NOW: &str =
    "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000";

impl World for Sqlite {
    type Db = sqlx::Sqlite;
    type Store = SqliteStore;
    type Open = sqlx::SqliteConnection;

    const NOW: &'static str = SQLITE_NOW;

    async fn open(name: &str) -> Option<Self> {
        let dir = std::env::temp_dir().join(unique(name));
        fs::create_dir(&dir).unwrap();
        let url = format!("sqlite://{}", dir.join("seen.db").display());
        let table = unique(name);
        let store = SqliteStore::connect(&url, &table).await.unwrap();
        store.migrate().await.unwrap();
        let pool = SqlitePoolOptions::new().max_connections(2);
        let pool = pool.connect(&url).await.unwrap();
        Some(Sqlite {
            url,
            dir,
            table,
            pool,
        })
    }

    fn builder(&self) -> SqlStoreBuilder<SqliteTable> {
        SqliteStore::builder(&self.table)
    }

    fn url(&self) -> &str {
        &self.url
    }

    fn is_behind(&mut self, _: String, _: bool) {
        panic!("there is no server");
    }

    async fn connect(&self, builder: SqlStoreBuilder<SqliteTable>) -> SqliteStore {
        builder.connect(&self.url).await.unwrap()
    }

    async fn pool_of(&self, connections: u32, begin: &'static str) -> Pool<sqlx::Sqlite> {
        let pool = SqlitePoolOptions::new().max_connections(connections);
        let pool = pool.after_connect(move |session, _| {
            Box::pin(async move { session.execute(sqlx::raw_sql(begin)).await.map(drop) })
        });
        pool.connect(&self.url).await.unwrap()
    }

    fn transactions(
        builder: SqlStoreBuilder<SqliteTable>,
        pool: Pool<sqlx::Sqlite>,
    ) -> TransactionLayer<sqlx::Sqlite> {
        TransactionLayer::with_store(builder.pool(pool).unwrap())
    }

    async fn left_open(&self) -> bool {
        let options = SqliteConnectOptions::from_str(&self.url).unwrap();
        let options = options.busy_timeout(Duration::ZERO);
        let mut own = sqlx::SqliteConnection::connect_with(&options)
            .await
            .unwrap();
        let locked = own.execute("BEGIN IMMEDIATE; ROLLBACK").await;
        own.close().await.unwrap();
        locked.is_err()
    }

    fn takes(time: Duration) -> String {
        // Some millions a second.
        let rows = time.as_millis() * 5000;
        format!(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows}) \
             SELECT count(*) FROM n"
        )
    }

    async fn execute(
        connection: &mut sqlx::SqliteConnection,
        statement: String,
    ) -> Result<u64, sqlx::Error> {
        let done = connection.execute(sqlx::raw_sql(AssertSqlSafe(statement)));
        Ok(done.await?.rows_affected())
    }

    async fn number(
        connection: &mut sqlx::SqliteConnection,
        statement: String,
    ) -> Result<i64, sqlx::Error> {
        let row = connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(statement)));
        row.await?.try_get(0)
    }

    async fn text(
        connection: &mut sqlx::SqliteConnection,
        statement: String,
    ) -> Result<String, sqlx::Error> {
        let row = connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(statement)));
        row.await?.try_get(0)
    }

    async fn exhausted(&self, connections: u32) -> (SqliteStore, Vec<Box<dyn Send>>) {
        let pool = SqlitePoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(Duration::from_millis(200))
            .connect(&self.url)
            .await
            .unwrap();
        let store = self.builder().pool(pool.clone()).unwrap();
        looked_up(&store).await;
        let mut taken: Vec<Box<dyn Send>> = Vec::new();
        for _ in 0..connections {
            taken.push(Box::new(until_acquired(|| pool.acquire()).await));
        }
        (store, taken)
    }

    async fn run(&self, statement: &str) {
        let whole = spelled(statement, &self.table, SQLITE_NOW);
        let done = self.pool.execute(sqlx::raw_sql(AssertSqlSafe(whole)));
        done.await.unwrap_or_else(|e| panic!("{statement}: {e}"));
    }

    async fn ask(&self, statement: &str) -> i64 {
        let whole = spelled(statement, &self.table, SQLITE_NOW);
        let row = self.pool.fetch_one(sqlx::raw_sql(AssertSqlSafe(whole)));
        row.await.unwrap().get(0)
    }

    async fn now(&self) -> i64 {
        let statement = format!("SELECT {SQLITE_NOW}");
        let row = self.pool.fetch_one(sqlx::raw_sql(AssertSqlSafe(statement)));
        row.await.unwrap().get(0)
    }

    async fn stored(&self, key: &str) -> Option<Stored> {
        let statement = "SELECT state, owner, since, expires_at FROM {t} WHERE message_id = ?";
        let statement = spelled(statement, &self.table, "");
        let query = sqlx::query(AssertSqlSafe(statement)).bind(key);
        let row = query.fetch_optional(&self.pool).await.unwrap();
        row.map(|row: SqliteRow| Stored {
            state: row.get(0),
            owner: row.get(1),
            since: row.get(2),
            expires_at: row.get(3),
        })
    }

    async fn count(&self) -> i64 {
        let statement = format!("SELECT count(*) FROM {}", self.table);
        let row = self.pool.fetch_one(sqlx::raw_sql(AssertSqlSafe(statement)));
        row.await.unwrap().get(0)
    }

    fn table(&self) -> &str {
        &self.table
    }

    async fn hold(&self, statement: &str) -> sqlx::SqliteConnection {
        let mut session = self.pool.acquire().await.unwrap().detach();
        let whole = spelled(statement, &self.table, SQLITE_NOW);
        let whole = format!("BEGIN IMMEDIATE; {whole}");
        let done = session.execute(sqlx::raw_sql(AssertSqlSafe(whole)));
        done.await.unwrap();
        session
    }

    /// It cannot be seen: so long that it has begun, as a rule.
    async fn until_waiting<T>(&self, _: &JoinHandle<T>) {
        sleep(Duration::from_millis(100)).await;
    }

    async fn drop(self) {
        self.pool.close().await;
        // A store that was dropped closes its connections a little later.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Open for sqlx::SqliteConnection {
    async fn end(mut self, how: &str) {
        let end = self.execute(sqlx::raw_sql(AssertSqlSafe(how.to_owned())));
        end.await.unwrap();
    }
}

// ===== what they share =====

fn spelled(statement: &str, table: &str, now: &str) -> String {
    statement.replace("{t}", table).replace("{now}", now)
}

async fn looked_up<S: ClaimStore<Error = BackendError>>(store: &S) {
    assert!(!store.seen(&"nobody".into()).await.unwrap());
}

/// A connection is given back in the background.
async fn until_acquired<T, F>(mut acquire: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, sqlx::Error>>,
{
    for _ in 0..100 {
        if let Ok(connection) = acquire().await {
            return connection;
        }
    }
    panic!("no connection");
}

/// Looks until it is so.
pub async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !so().await {
        assert!(start.elapsed() < services::PATIENCE, "not in time: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}
