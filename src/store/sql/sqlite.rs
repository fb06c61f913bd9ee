//! A table in a file of SQLite.

use super::{
    engine::{
        Backend, CLAIM_GRACE, Command, Held, Hold, InTransaction, Isolation, Layout, Migrated,
        OPEN_LEASE, PURGE_BATCH, Settings, count, expect_scheme, failed, missing, no_connection,
        remaining, unfit,
    },
    key::{Column, Table},
};
use crate::{
    error::{BackendError, BackendErrorKind, ConfigError},
    store::{
        entry::{Entry, Stats},
        ttl::Ttl,
    },
};
use sqlx::{
    AssertSqlSafe, Connection, Executor, Row, Sqlite, SqliteConnection, SqlitePool,
    error::DatabaseError,
    pool::PoolConnection,
    sqlite::{
        SqliteConnectOptions, SqliteError, SqliteJournalMode, SqlitePoolOptions, SqliteRow,
        SqliteSynchronous,
    },
};
use std::{path::Path, str::FromStr, sync::Arc, time::Duration};
use tokio::time::{Instant, sleep};

/// Microseconds since 1970. SQLite reads the clock once in a statement, when it has the locks it
/// needs, in milliseconds.
const NOW: &str = "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000";

/// The page size of a file that is made here, in bytes. Ids are in no order, so that each row of a
/// statement changes a page of its own, which is then written whole.
const PAGE: u32 = 1024;

/// After how many pages the log is written into the file: some 32 MiB, since that waits for the disk.
const CHECKPOINT: &str = "32768";

/// A table in SQLite, of a [`SqliteStore`](crate::SqliteStore) or of another fleet.
#[derive(Debug)]
pub struct SqliteTable {
    table: Table,
    layout: Layout,
    ttl: Ttl,
    seen: Arc<str>,
    remember: Arc<str>,
    forget: Arc<str>,
    claim: Arc<str>,
    renew: Arc<str>,
    complete: Arc<str>,
    release: Arc<str>,
    close: Arc<str>,
    withdraw: Arc<str>,
}

impl SqliteTable {
    /// Tells a missing table from other faults of a statement, for which SQLite has one number.
    async fn explained(
        &self,
        error: sqlx::Error,
        connection: &mut SqliteConnection,
    ) -> BackendError {
        let generic = |error: &dyn DatabaseError| error.code().as_deref() == Some("1");
        if error.as_database_error().is_some_and(generic) {
            if let Err(found) = self.check(connection).await {
                return found;
            }
        }
        failed::<Self>(error)
    }
}

/// What a row says after a claim: its state, its owner, and how much is left.
fn held(row: &SqliteRow, me: &str) -> Result<Held, sqlx::Error> {
    let (state, owner, left): (String, Option<String>, Option<i64>) =
        (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    Ok(match state.as_str() {
        "done" => Held::Done,
        "claimed" if owner.as_deref() == Some(me) => Held::Yes,
        _ => Held::Busy(left.map(remaining)),
    })
}

impl Backend for SqliteTable {
    type Db = Sqlite;

    const GATHERS: bool = true;

    const LOCKS_ROWS: bool = false;

    async fn connect(url: &str, settings: &Settings) -> Result<SqlitePool, BackendError> {
        expect_scheme(url, "sqlite")?;
        let options = SqliteConnectOptions::from_str(url).map_err(failed::<Self>)?;
        let file = options.get_filename();
        let unnamed = file.as_os_str().is_empty() || file == Path::new(":memory:");
        if unnamed || url.contains(":memory:") || url.contains("mode=memory") {
            return Err(ConfigError::new(
                "url",
                "a database in memory",
                "a file; each connection has a database in memory of its own, and a MemoryStore serves better",
            )
            .into());
        }
        // Otherwise it would look like a file that cannot be opened at the moment.
        let folder = file.parent().filter(|it| !it.as_os_str().is_empty());
        if folder.is_some_and(|folder| !folder.is_dir()) || file.is_dir() {
            let expected = "a file in a folder that is there";
            return Err(ConfigError::new("url", "of no such file", expected).into());
        }
        let options = options
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .busy_timeout(settings.response_timeout / 10 * 9)
            .page_size(PAGE)
            .pragma("wal_autocheckpoint", CHECKPOINT);
        let begun = Instant::now();
        loop {
            let pool = SqlitePoolOptions::new()
                .max_connections(settings.max_connections)
                .acquire_timeout(settings.response_timeout)
                .connect_with(options.clone())
                .await
                .map_err(no_connection::<Self>);
            match pool {
                // The switch to WAL does not wait for others that do the same.
                Err(error)
                    if error.kind() == BackendErrorKind::Contention
                        && begun.elapsed() < settings.response_timeout =>
                {
                    sleep(Duration::from_millis(10)).await;
                }
                pool => return pool,
            }
        }
    }

    fn new(settings: &Settings) -> Self {
        let (table, layout) = (settings.table.clone(), settings.layout);
        let name = table.quoted('"');
        // `?1` are the ids as a JSON array, `?2` is the TTL.
        let (done, columns, values, update) = match layout {
            Layout::Ours => (
                format!("state = 'done' AND (expires_at IS NULL OR expires_at > {NOW})"),
                "state, owner, since, expires_at",
                format!("'done', NULL, {NOW}, {NOW} + ?2"),
                format!("state = 'done', owner = NULL, since = {NOW}, expires_at = {NOW} + ?2"),
            ),
            Layout::Go | Layout::Php => (
                "state = 'seen'".to_owned(),
                "state, expires_at",
                "'seen', NULL".to_owned(),
                "state = 'seen', expires_at = NULL".to_owned(),
            ),
        };
        let ours = "message_id = ?1 AND state = 'claimed' AND owner = ?2";
        let mine = format!("{ours} AND expires_at > {NOW}");
        SqliteTable {
            seen: format!(
                "SELECT key FROM json_each(?1) AS id \
                 WHERE EXISTS (SELECT 1 FROM {name} WHERE message_id = id.value COLLATE BINARY AND {done})"
            )
            .into(),
            remember: format!(
                "INSERT INTO {name} (message_id, {columns}) \
                 SELECT value, {values} FROM json_each(?1) WHERE true \
                 ON CONFLICT (message_id) DO UPDATE SET {update}"
            )
            .into(),
            forget: format!(
                "DELETE FROM {name} WHERE message_id COLLATE BINARY IN (SELECT value FROM json_each(?1))"
            )
            .into(),
            // Of the claims: `?1` is the id, `?2` the owner, `?3` the lease or the TTL. All assignments
            // see the row as it was, at the same instant.
            claim: {
                let new = |column: &str, value: &str| {
                    format!(
                        "{column} = CASE WHEN (r.state = 'claimed' AND r.owner = ?2) \
                         OR r.expires_at <= {NOW} THEN {value} ELSE r.{column} END"
                    )
                };
                format!(
                    "INSERT INTO {name} AS r (message_id, state, owner, since, expires_at) \
                     VALUES (?1, 'claimed', ?2, {NOW}, {NOW} + ?3) ON CONFLICT (message_id) DO UPDATE SET \
                     {}, {}, {}, {} RETURNING state, owner, expires_at - {NOW}",
                    new("state", "'claimed'"),
                    new("owner", "?2"),
                    new("since", NOW),
                    new("expires_at", &format!("{NOW} + ?3")),
                )
                .into()
            },
            renew: format!(
                "UPDATE {name} SET expires_at = {NOW} + ?3 WHERE {mine} RETURNING 1"
            )
            .into(),
            complete: format!(
                "INSERT INTO {name} AS r (message_id, state, owner, since, expires_at) \
                 VALUES (?1, 'done', NULL, {NOW}, {NOW} + ?3) ON CONFLICT (message_id) DO UPDATE SET \
                 state = 'done', owner = CASE WHEN r.owner = ?2 \
                 AND (r.state = 'done' OR r.expires_at > {NOW}) THEN ?2 END, \
                 since = {NOW}, expires_at = {NOW} + ?3 RETURNING owner IS NOT NULL"
            )
            .into(),
            release: format!("DELETE FROM {name} WHERE {mine} RETURNING 1").into(),
            close: format!(
                "UPDATE {name} SET state = 'done', since = {NOW}, expires_at = {NOW} + ?3 \
                 WHERE {ours} RETURNING 1"
            )
            .into(),
            withdraw: format!("DELETE FROM {name} WHERE {ours} RETURNING 1").into(),
            table,
            layout,
            ttl: settings.ttl,
        }
    }

    /// By result code.
    fn classify(error: &dyn DatabaseError) -> BackendErrorKind {
        // Codes of other databases may be numbers, too.
        let error = error.try_downcast_ref::<SqliteError>();
        let code = error.and_then(|error| error.code()?.parse().ok());
        code.map_or(BackendErrorKind::Other, kind)
    }

    fn ddl(&self) -> String {
        let [make, index] = ddl(&self.table);
        format!("{make};\n{index};\n")
    }

    async fn migrate(
        &self,
        mut connection: PoolConnection<Sqlite>,
    ) -> Result<Migrated, BackendError> {
        let [make, index] = ddl(&self.table);
        let missing = if columns(&mut connection, &self.table).await?.is_empty() {
            // The index comes with the next look.
            make
        } else {
            self.check(&mut connection).await?;
            if indexed(&mut connection, &self.table).await? {
                return Ok(Migrated::Complete);
            }
            index
        };
        let made = connection.execute(sqlx::raw_sql(AssertSqlSafe(missing)));
        made.await.map_err(failed::<Self>)?;
        Ok(Migrated::Again)
    }

    async fn purge(&self, connection: &mut PoolConnection<Sqlite>) -> Result<u64, BackendError> {
        let name = self.table.quoted('"');
        let statement = format!(
            "DELETE FROM {name} WHERE message_id IN (SELECT message_id FROM {name} \
             WHERE expires_at <= {NOW} AND (state = 'done' OR expires_at <= {NOW} - {CLAIM_GRACE}) \
             ORDER BY expires_at LIMIT {PURGE_BATCH})"
        );
        let deleted = connection
            .execute(sqlx::raw_sql(AssertSqlSafe(statement)))
            .await;
        match deleted {
            Ok(deleted) => Ok(deleted.rows_affected()),
            Err(error) => Err(self.explained(error, connection).await),
        }
    }

    async fn check(&self, connection: &mut SqliteConnection) -> Result<Column, BackendError> {
        let found = match columns(connection, &self.table).await {
            // The file of this name is not attached here.
            Err(error)
                if self.table.schema().is_some() && error.kind() == BackendErrorKind::Other =>
            {
                return Err(missing(&self.table, self.layout));
            }
            found => found?,
        };
        if found.is_empty() {
            return Err(missing(&self.table, self.layout));
        }
        let needed: &[&str] = match self.layout {
            Layout::Ours => &["message_id", "state", "owner", "since", "expires_at"],
            Layout::Go | Layout::Php => &["message_id", "state", "expires_at"],
        };
        for name in needed {
            if !found.iter().any(|column| column == name) {
                return Err(unfit(
                    &self.table,
                    format_args!("has no column `{name}`"),
                    format!("expected {}", needed.join(", ")),
                ));
            }
        }
        if !texts(connection, &self.table).await? {
            return Err(unfit(
                &self.table,
                "takes texts in `message_id` for numbers",
                "expected the type TEXT, or one with CHAR in its name",
            ));
        }
        if !unique(connection, &self.table).await? {
            return Err(unfit(
                &self.table,
                "has no primary key that tells all ids apart",
                "expected `message_id` alone, with the collation BINARY",
            ));
        }
        Ok(match self.layout {
            Layout::Ours => Column::Ours,
            // A length in the type of a column says nothing here.
            // Nor does every SQLite keep a NUL on its way out of JSON.
            Layout::Go | Layout::Php => Column::Verbatim {
                chars: None,
                bytes: None,
                nul: false,
            },
        })
    }

    async fn run(
        &self,
        connection: &mut SqliteConnection,
        command: Command,
        keys: &[String],
        _: Duration,
    ) -> Result<Vec<bool>, BackendError> {
        let ids = array(keys);
        let answer = match command {
            Command::Seen => {
                let query = sqlx::query(AssertSqlSafe(self.seen.clone())).bind(ids);
                query.fetch_all(&mut *connection).await.map(|rows| {
                    let mut seen = vec![false; keys.len()];
                    for row in rows {
                        let at = row.try_get::<i64, _>(0).map(|at| at as usize);
                        if let Some(seen) = at.ok().and_then(|at| seen.get_mut(at)) {
                            *seen = true;
                        }
                    }
                    seen
                })
            }
            Command::Remember | Command::Forget => {
                let query = if command == Command::Remember {
                    let query = sqlx::query(AssertSqlSafe(self.remember.clone())).bind(ids);
                    match self.layout {
                        Layout::Ours => query.bind(self.ttl.micros()),
                        Layout::Go | Layout::Php => query,
                    }
                } else {
                    sqlx::query(AssertSqlSafe(self.forget.clone())).bind(ids)
                };
                let done = query.execute(&mut *connection).await;
                done.map(|_| vec![true; keys.len()])
            }
        };
        match answer {
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.explained(error, connection).await),
        }
    }

    async fn hold(
        &self,
        connection: &mut SqliteConnection,
        hold: Hold,
        key: &str,
        owner: &str,
        patience: Duration,
    ) -> Result<Held, BackendError> {
        let (statement, last) = match hold {
            Hold::Claim { lease } => (&self.claim, Some(lease)),
            Hold::Renew { lease } => (&self.renew, Some(lease)),
            Hold::Complete => (&self.complete, self.ttl.micros()),
            Hold::Release => (&self.release, None),
        };
        let claims = matches!(hold, Hold::Claim { .. });
        let query = sqlx::query(AssertSqlSafe(statement.clone()));
        let query = query.bind(key).bind(owner).bind(last);
        // To the end: a row is answered before its statement is committed.
        let rows = match query.fetch_all(&mut *connection).await {
            Ok(rows) => rows,
            // Somebody has locked the file for longer than the connection waits.
            Err(error) if claims && is_busy(&error) => return Ok(Held::Busy(Some(patience))),
            Err(error) => return Err(self.explained(error, connection).await),
        };
        let held = match rows.first() {
            Some(row) if claims => held(row, owner),
            Some(row) => row
                .try_get(0)
                .map(|yes| if yes { Held::Yes } else { Held::No }),
            None if claims => Ok(Held::Again),
            None => Ok(Held::No),
        };
        held.map_err(failed::<Self>)
    }

    async fn entry(
        &self,
        connection: &mut SqliteConnection,
        key: &str,
    ) -> Result<Option<Entry>, BackendError> {
        let statement = format!(
            "SELECT state, owner, since, expires_at - {NOW} FROM {} WHERE message_id = ?1",
            self.table.quoted('"')
        );
        let query = sqlx::query(AssertSqlSafe(statement)).bind(key);
        let row = match query.fetch_optional(&mut *connection).await {
            Ok(row) => row,
            Err(error) => return Err(self.explained(error, connection).await),
        };
        let entry = |row: SqliteRow| {
            let state: String = row.try_get(0)?;
            let (since, left) = (row.try_get(2)?, row.try_get(3)?);
            Ok(Entry::of_row(&state, row.try_get(1)?, since, left))
        };
        row.map(entry).transpose().map_err(failed::<Self>)
    }

    async fn stats(&self, connection: &mut SqliteConnection) -> Result<Stats, BackendError> {
        let count = count(&self.table.quoted('"'), NOW);
        let counted = connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(count)));
        let row = match counted.await {
            Ok(row) => row,
            Err(error) => return Err(self.explained(error, connection).await),
        };
        let columns = || {
            let (count, claimed) = (row.try_get(0)?, row.try_get(1)?);
            Ok(Stats::of_row(
                count,
                claimed,
                row.try_get(2)?,
                row.try_get(3)?,
            ))
        };
        columns().map_err(failed::<Self>)
    }

    /// The file is locked at once: a transaction that reads first cannot wait for it later.
    fn begin(_: Option<Isolation>) -> &'static str {
        "BEGIN IMMEDIATE"
    }

    async fn open(
        &self,
        connection: &mut SqliteConnection,
        claim: &mut InTransaction,
        patience: Duration,
    ) -> Result<Held, BackendError> {
        let InTransaction { key, owner, .. } = claim;
        let claim = Hold::Claim { lease: OPEN_LEASE };
        self.hold(connection, claim, key, owner, patience).await
    }

    async fn close(
        &self,
        connection: &mut SqliteConnection,
        claim: &InTransaction,
    ) -> Result<bool, BackendError> {
        let InTransaction { key, owner, .. } = claim;
        let query = |statement: &Arc<str>| sqlx::query(AssertSqlSafe(statement.clone()));
        let query = if claim.recorded {
            let close = query(&self.close).bind(key).bind(owner);
            close.bind(self.ttl.micros())
        } else {
            query(&self.withdraw).bind(key).bind(owner)
        };
        match query.fetch_all(&mut *connection).await {
            Ok(rows) => Ok(rows.len() == 1),
            Err(error) => Err(self.explained(error, connection).await),
        }
    }

    /// SQLite ends a transaction by itself on some errors, such as a full disk. Rolled back in vain, it would still be
    /// open as sqlx counts, and whoever got the connection next would begin a savepoint.
    async fn ensure_open(&self, connection: &mut SqliteConnection) {
        // What drops have left to do may end it yet, and be counted.
        let _ = connection.ping().await;
        if connection.is_in_transaction() {
            // An error if there is one, which is as good.
            let _ = connection.execute(sqlx::raw_sql("BEGIN")).await;
        }
    }

    fn rejects(error: &dyn DatabaseError) -> bool {
        // CONSTRAINT, as of a foreign key that is checked late.
        let code = error.code().and_then(|code| code.parse::<i32>().ok());
        code.is_some_and(|code| code & 0xff == 19)
    }

    async fn settle(
        &self,
        session: &mut SqliteConnection,
        patience: Duration,
    ) -> Result<(), sqlx::Error> {
        let set = format!("PRAGMA busy_timeout = {}", patience.as_millis());
        let set = session.execute(sqlx::raw_sql(AssertSqlSafe(set)));
        set.await.map(drop)
    }
}

/// Whether somebody else has locked the file.
fn is_busy(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    let code = code.and_then(|code| code.parse::<i32>().ok());
    code.is_some_and(|code| code & 0xff == 5)
}

/// The ids as one parameter.
fn array(keys: &[String]) -> String {
    // Strings always have a spelling in JSON.
    serde_json::to_string(keys).unwrap_or_default()
}

/// What a result code means; the low byte is the class.
fn kind(code: i32) -> BackendErrorKind {
    use BackendErrorKind::{Contention, Denied, Other, Unavailable};

    match code & 0xff {
        // BUSY, LOCKED.
        5 | 6 => Contention,
        // PERM, READONLY, AUTH.
        3 | 8 | 23 => Denied,
        // NOMEM, INTERRUPT, IOERR, FULL, CANTOPEN, PROTOCOL.
        7 | 9 | 10 | 13 | 14 | 15 => Unavailable,
        _ => Other,
    }
}

// ===== the catalogue =====

async fn rows(
    connection: &mut SqliteConnection,
    statement: String,
) -> Result<Vec<SqliteRow>, BackendError> {
    let rows = connection.fetch_all(sqlx::raw_sql(AssertSqlSafe(statement)));
    rows.await.map_err(failed::<SqliteTable>)
}

/// Calls a table-valued pragma.
fn pragma(name: &str, of: &str, table: &Table) -> String {
    match table.schema() {
        Some(schema) => format!("pragma_{name}({of}, '{schema}')"),
        None => format!("pragma_{name}({of})"),
    }
}

async fn columns(
    connection: &mut SqliteConnection,
    table: &Table,
) -> Result<Vec<String>, BackendError> {
    let info = pragma("table_info", &format!("'{}'", table.name()), table);
    let rows = rows(connection, format!("SELECT name FROM {info}")).await?;
    let names = rows.iter().map(|row| row.try_get(0));
    names
        .collect::<Result<_, _>>()
        .map_err(failed::<SqliteTable>)
}

/// Whether `message_id` keeps a text as it is, by the rules of
/// <https://www.sqlite.org/datatype3.html#determination_of_column_affinity>.
async fn texts(connection: &mut SqliteConnection, table: &Table) -> Result<bool, BackendError> {
    let info = pragma("table_info", &format!("'{}'", table.name()), table);
    let statement = format!(
        "SELECT 1 FROM {info} WHERE name = 'message_id' AND upper(type) NOT LIKE '%INT%' \
         AND (upper(type) LIKE '%CHAR%' OR upper(type) LIKE '%CLOB%' OR upper(type) LIKE '%TEXT%')"
    );
    Ok(!rows(connection, statement).await?.is_empty())
}

/// Whether some unique index is of `message_id` alone, byte by byte.
async fn unique(connection: &mut SqliteConnection, table: &Table) -> Result<bool, BackendError> {
    let list = pragma("index_list", &format!("'{}'", table.name()), table);
    let info = pragma("index_xinfo", "l.name", table);
    let statement = format!(
        "SELECT 1 FROM {list} AS l WHERE l.\"unique\" AND NOT l.partial \
         AND (SELECT count(*) FROM {info} AS x WHERE x.key) = 1 \
         AND EXISTS (SELECT 1 FROM {info} AS x WHERE x.key AND x.name = 'message_id' AND x.coll = 'BINARY')"
    );
    Ok(!rows(connection, statement).await?.is_empty())
}

/// Whether some index begins with `expires_at`.
async fn indexed(connection: &mut SqliteConnection, table: &Table) -> Result<bool, BackendError> {
    let list = pragma("index_list", &format!("'{}'", table.name()), table);
    let info = pragma("index_info", "l.name", table);
    let statement = format!(
        "SELECT 1 FROM {list} AS l WHERE NOT l.partial \
         AND EXISTS (SELECT 1 FROM {info} AS i WHERE i.seqno = 0 AND i.name = 'expires_at')"
    );
    Ok(!rows(connection, statement).await?.is_empty())
}

/// What makes the table, and what its index.
fn ddl(table: &Table) -> [String; 2] {
    let name = table.quoted('"');
    // Of an index the schema stands before its own name.
    let index = match table.schema() {
        Some(schema) => format!("\"{schema}\".\"{}\"", table.index()),
        None => format!("\"{}\"", table.index()),
    };
    [
        format!(
            "CREATE TABLE IF NOT EXISTS {name} (\n    \
             message_id TEXT COLLATE BINARY NOT NULL PRIMARY KEY,\n    \
             state TEXT NOT NULL,\n    \
             owner TEXT,\n    \
             since INTEGER NOT NULL,\n    \
             expires_at INTEGER\n) WITHOUT ROWID"
        ),
        format!(
            "CREATE INDEX IF NOT EXISTS {index} ON \"{}\" (expires_at)",
            table.name()
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_says_what_can_be_tried_again() {
        use BackendErrorKind::*;
        for (code, expected) in [
            (5, Contention),
            (517, Contention),
            (6, Contention),
            (8, Denied),
            (14, Unavailable),
            (13, Unavailable),
            (1, Other),
            (11, Other),
        ] {
            assert_eq!(kind(code), expected, "{code}");
        }
    }
}
