//! What the tests of the stores in PostgreSQL share: a table of one's own, looked at and locked
//! over connections of the test's own.
#![allow(dead_code, unreachable_pub, missing_docs)]

use crate::services::{self, PATIENCE, unique};
use sqlx::{
    AssertSqlSafe, Connection, Executor, PgConnection, PgPool, Row,
    postgres::{PgConnectOptions, PgPoolOptions, PgRow},
};
use std::{
    collections::BTreeSet,
    str::FromStr,
    sync::Mutex,
    time::{Duration, Instant},
};
use tower_idempotency::{
    MessageId, Store,
    error::{BackendError, BackendErrorKind},
    store::{
        PostgresStore,
        sql::{PostgresTable, SqlStoreBuilder},
    },
};

/// The server's clock, in microseconds.
pub const NOW: &str = "(extract(epoch from pg_catalog.clock_timestamp()) * 1000000)::bigint";

pub fn id(text: &str) -> MessageId {
    MessageId::from(text)
}

/// A table of the test's own. In statements `{t}` stands for it.
pub struct Db {
    /// Sessions that are opened with it go by the name of the table.
    pub url: String,
    pub table: String,
    pool: PgPool,
}

/// A row of our own record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub state: String,
    pub owner: Option<String>,
    pub since: i64,
    pub expires_at: Option<i64>,
}

impl Db {
    /// Without a table yet.
    pub async fn bare(name: &str) -> Option<Db> {
        let url = services::postgres()?;
        let table = unique(name);
        let pool = PgPoolOptions::new().max_connections(2);
        let pool = pool.connect(&url).await.unwrap();
        let sign = if url.contains('?') { '&' } else { '?' };
        let url = format!("{url}{sign}application_name={table}");
        Some(Db { url, table, pool })
    }

    /// With a table of ours.
    pub async fn migrated(name: &str) -> Option<Db> {
        let db = Db::bare(name).await?;
        db.store().await.migrate().await.unwrap();
        Some(db)
    }

    pub fn builder(&self) -> SqlStoreBuilder<PostgresTable> {
        PostgresStore::builder(&self.table)
    }

    pub async fn store(&self) -> PostgresStore {
        self.builder().connect(&self.url).await.unwrap()
    }

    /// A store that has looked its table up.
    pub async fn warm(&self, builder: SqlStoreBuilder<PostgresTable>) -> PostgresStore {
        let store = builder.connect(&self.url).await.unwrap();
        store.seen(&id("nobody")).await.unwrap();
        store
    }

    pub fn options(&self) -> PgConnectOptions {
        PgConnectOptions::from_str(&self.url).unwrap()
    }

    /// A pool as a user brings it, whose sessions have these settings.
    pub fn users_pool(&self, size: u32, settings: &[(&str, &str)]) -> PgPool {
        PgPoolOptions::new()
            .max_connections(size)
            .connect_lazy_with(self.options().options(settings.iter().copied()))
    }

    pub async fn rows(&self, statement: &str) -> Vec<PgRow> {
        let whole = statement.replace("{t}", &self.table);
        let rows = self.pool.fetch_all(sqlx::raw_sql(AssertSqlSafe(whole)));
        rows.await.unwrap_or_else(|e| panic!("{statement}: {e}"))
    }

    /// The first column of the first row.
    pub async fn get<T>(&self, statement: &str) -> T
    where
        T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
    {
        self.rows(statement).await[0].get(0)
    }

    pub async fn run(&self, statement: &str) {
        self.rows(statement).await;
    }

    pub async fn now(&self) -> i64 {
        self.get(&format!("SELECT {NOW}")).await
    }

    pub async fn stored(&self, key: &str) -> Option<Stored> {
        let statement = "SELECT state, owner, since, expires_at FROM {t} WHERE message_id = $1"
            .replace("{t}", &self.table);
        let row = sqlx::query(AssertSqlSafe(statement))
            .persistent(false)
            .bind(key)
            .fetch_optional(&self.pool);
        row.await.unwrap().map(|row| Stored {
            state: row.get(0),
            owner: row.get(1),
            since: row.get(2),
            expires_at: row.get(3),
        })
    }

    pub async fn keys(&self) -> BTreeSet<String> {
        let rows = self.rows("SELECT message_id FROM {t}").await;
        rows.iter().map(|row| row.get(0)).collect()
    }

    // ===== locks =====

    /// A transaction that is open, with this statement done.
    pub async fn hold(&self, statement: &str) -> Hold {
        let options = self.options().application_name("holder");
        let mut session = PgConnection::connect_with(&options).await.unwrap();
        session.execute("BEGIN").await.unwrap();
        let whole = statement.replace("{t}", &self.table);
        let done = session.execute(sqlx::raw_sql(AssertSqlSafe(whole)));
        done.await.unwrap();
        Hold(session)
    }

    /// What the server knows of the sessions of this table's stores.
    pub async fn sessions(&self, such: &str) -> i64 {
        let statement = "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{t}'";
        self.get(&format!("{statement} AND {such}")).await
    }

    pub async fn waiting(&self) -> i64 {
        self.sessions("wait_event_type = 'Lock'").await
    }

    /// Until so many of them wait for a lock.
    pub async fn until_waiting(&self, sessions: i64) {
        until("sessions wait for a lock", async || {
            self.waiting().await >= sessions
        })
        .await;
    }

    // ===== counts =====

    /// From now on statements that write are counted, those that are rolled back aside.
    pub async fn count_statements(&self) {
        self.run(
            "CREATE TABLE {t}_log (op text);
             CREATE FUNCTION {t}_count() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN INSERT INTO {t}_log VALUES (TG_OP); RETURN NULL; END $$;
             CREATE TRIGGER counts BEFORE INSERT OR DELETE ON {t} FOR EACH STATEMENT
             EXECUTE FUNCTION {t}_count()",
        )
        .await;
    }

    /// How many there were since they were asked for last.
    pub async fn statements(&self, op: &str) -> i64 {
        self.get(&format!(
            "WITH gone AS (DELETE FROM {{t}}_log WHERE op = '{op}' RETURNING 1) SELECT count(*) FROM gone"
        ))
        .await
    }

    pub async fn drop(self) {
        self.run(
            "SET client_min_messages = error; DROP TABLE IF EXISTS {t}, {t}_log;
             DROP FUNCTION IF EXISTS {t}_count; DROP SCHEMA IF EXISTS {t} CASCADE; RESET client_min_messages",
        )
        .await;
        self.pool.close().await;
    }
}

/// An open transaction of another session.
pub struct Hold(PgConnection);

impl Hold {
    pub async fn run(&mut self, statement: String) {
        let done = self.0.execute(sqlx::raw_sql(AssertSqlSafe(statement)));
        done.await.unwrap();
    }

    pub async fn commit(mut self) {
        self.0.execute("COMMIT").await.unwrap();
        self.0.close().await.unwrap();
    }

    pub async fn rollback(mut self) {
        self.0.execute("ROLLBACK").await.unwrap();
        self.0.close().await.unwrap();
    }
}

/// Tables to drop when a test is over.
#[derive(Default)]
pub struct Tables(Mutex<Vec<String>>);

impl Tables {
    pub fn unique(&self, name: &str) -> String {
        let table = unique(name);
        self.0.lock().unwrap().push(table.clone());
        table
    }

    pub async fn drop(self, db: &Db) {
        for table in self.0.into_inner().unwrap() {
            db.run(&format!("DROP TABLE {table}")).await;
        }
    }
}

/// Looks until it is so.
pub async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !so().await {
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[track_caller]
pub fn is_kind<T: std::fmt::Debug>(
    answer: Result<T, BackendError>,
    kind: BackendErrorKind,
) -> BackendError {
    let error = answer.expect_err("an error");
    assert_eq!(error.kind(), kind, "{error}");
    error
}
