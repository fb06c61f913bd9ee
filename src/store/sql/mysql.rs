//! A table in MySQL or MariaDB.

use super::{
    engine::{
        Backend, CLAIM_GRACE, Command, Held, Hold, InTransaction, Isolation, Layout, Migrated,
        OPEN_LEASE, PURGE_BATCH, Settings, columns_fit, count, expect_scheme, failed, missing,
        no_connection, remaining, unfit,
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
    AssertSqlSafe, Executor, MySql, MySqlConnection, MySqlPool, Row,
    error::DatabaseError,
    mysql::{MySqlDatabaseError, MySqlPoolOptions, MySqlRow},
    pool::PoolConnection,
};
use std::{fmt, sync::Arc, time::Duration};

/// Microseconds since 1970, at the instant they are asked for.
///
/// `SYSDATE` is the clock of that instant, but in the time zone of the session, which may have an
/// hour twice, or leave one out. So it only says how long ago the statement started, if that is believable;
/// when that was is told in UTC.
const NOW: &str = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) \
     + IF(TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) BETWEEN 0 AND 1500000000, \
     TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)), 0))";

/// The same as of the start of the statement, which an index can be searched with.
const START: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// How long `migrate()` waits for a lock, in seconds.
const DDL_PATIENCE: u32 = 2;

/// What a claim runs under on MariaDB, for the one statement: so many seconds to wait for locks, and
/// assignments one after the other, as everywhere else. To MySQL it is a comment: there is no
/// such thing, and the session's own settings hold.
fn claim_settings(wait: impl fmt::Display) -> String {
    format!(
        "/*M! SET STATEMENT innodb_lock_wait_timeout = {wait}, lock_wait_timeout = {wait}, \
         sql_mode = 'STRICT_TRANS_TABLES' FOR */ "
    )
}

/// What is told of a claim within a transaction.
const OPENED: u64 = 1;
const DONE: u64 = 2;
const ENDLESS: u64 = 3;
/// Or more, by so many microseconds.
const BUSY: u64 = 4;

/// A table in MySQL or MariaDB, of a [`MySqlStore`](crate::MySqlStore) or of another fleet.
#[derive(Debug)]
pub struct MySqlTable {
    table: Table,
    layout: Layout,
    ttl: Ttl,
    seen: Arc<str>,
    remember: Arc<str>,
    forget: Arc<str>,
    claim: Arc<str>,
    claimed: Arc<str>,
    renew: Arc<str>,
    renewed: Arc<str>,
    complete: Arc<str>,
    completed: Arc<str>,
    release: Arc<str>,
    open: Arc<str>,
    close: Arc<str>,
    withdraw: Arc<str>,
}

impl MySqlTable {
    /// Says what to do where there is something to do.
    fn explained(&self, error: sqlx::Error) -> BackendError {
        let number = error
            .as_database_error()
            .and_then(|error| error.try_downcast_ref::<MySqlDatabaseError>())
            .map(MySqlDatabaseError::number);
        match number {
            Some(1146) => missing(&self.table, self.layout),
            _ => failed::<Self>(error),
        }
    }

    /// Refuses sessions in which no mark would ever be committed, and those that take what others have not
    /// committed for marks.
    async fn commits(&self, connection: &mut MySqlConnection) -> Result<(), BackendError> {
        // The level goes by either name, or by both.
        let settings = connection.fetch_all(sqlx::raw_sql(
            "SHOW SESSION VARIABLES WHERE Variable_name IN ('autocommit', 'tx_isolation', 'transaction_isolation')",
        ));
        for row in settings.await.map_err(failed::<Self>)? {
            let value: String = row.try_get(1).map_err(failed::<Self>)?;
            let refused = match value.as_str() {
                "OFF" => ("without autocommit", "sessions with autocommit"),
                "READ-UNCOMMITTED" => ("at READ UNCOMMITTED", "READ COMMITTED or above"),
                _ => continue,
            };
            return Err(ConfigError::new("pool", refused.0, refused.1).into());
        }
        Ok(())
    }
}

impl Backend for MySqlTable {
    type Db = MySql;

    /// Statements for several rows lock gaps between them, which makes deadlocks of what is no
    /// conflict.
    const GATHERS: bool = false;

    async fn connect(url: &str, settings: &Settings) -> Result<MySqlPool, BackendError> {
        expect_scheme(url, "mysql or mariadb")?;
        // A statement that is given up here would stay behind in the server.
        let wait = (settings.response_timeout / 10 * 9).as_secs().max(1);
        MySqlPoolOptions::new()
            .max_connections(settings.max_connections)
            .acquire_timeout(settings.response_timeout)
            .after_connect(move |session, _| {
                let set = format!(
                    "SET SESSION innodb_lock_wait_timeout = {wait}, lock_wait_timeout = {wait}"
                );
                Box::pin(async move {
                    let set = session.execute(sqlx::raw_sql(AssertSqlSafe(set)));
                    set.await.map(drop)
                })
            })
            .connect(url)
            .await
            .map_err(no_connection::<Self>)
    }

    fn new(settings: &Settings) -> Self {
        let (table, layout) = (settings.table.clone(), settings.layout);
        let name = table.quoted('`');
        let (done, columns, values, update) = match layout {
            Layout::Ours => (
                format!("state = 'done' AND (expires_at IS NULL OR expires_at > {NOW})"),
                "state, owner, since, expires_at",
                format!("'done', NULL, {NOW}, {NOW} + ?"),
                // With the clock of this instant: what VALUES has was computed before the row was
                // waited for.
                format!("state = 'done', owner = NULL, since = {NOW}, expires_at = {NOW} + ?"),
            ),
            Layout::Go | Layout::Php => (
                "state = 'seen'".to_owned(),
                "state, expires_at",
                "'seen', NULL".to_owned(),
                "state = 'seen', expires_at = NULL".to_owned(),
            ),
        };
        let ours = "message_id = ? AND owner = ? AND state = 'claimed'";
        let mine = format!("{ours} AND expires_at > {NOW}");
        MySqlTable {
            seen: format!("SELECT 1 FROM {name} WHERE message_id = ? AND {done}").into(),
            remember: format!(
                "INSERT INTO {name} (message_id, {columns}) VALUES (?, {values}) \
                 ON DUPLICATE KEY UPDATE {update}"
            )
            .into(),
            forget: format!("DELETE FROM {name} WHERE message_id = ?").into(),
            // Each assignment sees what those before it came to. So the state tells the others whether a
            // row that was done is taken, and the owner whether one that was claimed is. A later
            // one may see a later clock, which ends no claim that an earlier one has seen
            // end. A row that stays keeps all it has.
            claim: format!(
                "{}INSERT INTO {name} (message_id, state, owner, since, expires_at) \
                 VALUES (?, 'claimed', ?, {NOW}, {NOW} + ?) ON DUPLICATE KEY UPDATE \
                 state = IF(expires_at <= {NOW}, 'claimed', state), \
                 owner = IF(state = 'claimed' AND (owner = ? OR expires_at <= {NOW}), ?, owner), \
                 since = IF(state = 'claimed' AND owner = ?, {NOW}, since), \
                 expires_at = IF(state = 'claimed' AND owner = ?, {NOW} + ?, expires_at)",
                // The shortest wait there is.
                claim_settings(1)
            )
            .into(),
            claimed: format!(
                "SELECT CAST(state AS CHAR), owner = ?, expires_at - {NOW} FROM {name} WHERE message_id = ?"
            )
            .into(),
            renew: format!("UPDATE {name} SET expires_at = {NOW} + ? WHERE {mine}").into(),
            renewed: format!("SELECT 1 FROM {name} WHERE {mine}").into(),
            // The owner first, by what the row is before the others change it.
            complete: format!(
                "INSERT INTO {name} (message_id, state, owner, since, expires_at) \
                 VALUES (?, 'done', NULL, {NOW}, {NOW} + ?) ON DUPLICATE KEY UPDATE \
                 owner = IF(owner = ? AND (state = 'done' OR expires_at > {NOW}), owner, NULL), \
                 state = 'done', since = {NOW}, expires_at = {NOW} + ?"
            )
            .into(),
            completed: format!(
                "SELECT 1 FROM {name} WHERE message_id = ? AND owner = ? AND state = 'done'"
            )
            .into(),
            release: format!("DELETE FROM {name} WHERE {mine}").into(),
            // As `claim`, and what came of it is told where the server tells the number of a new row, by
            // a statement that says so in either case. The last assignment sees what the others came
            // to. A condition is always evaluated; a sum ends at its first null.
            open: format!(
                "INSERT INTO {name} (message_id, state, owner, since, expires_at) \
                 VALUES (?, 'claimed', ?, IF(LAST_INSERT_ID({OPENED}) = {OPENED}, {START}, NULL), {START} + {OPEN_LEASE}) \
                 ON DUPLICATE KEY UPDATE state = IF(expires_at <= {NOW}, 'claimed', state), \
                 owner = IF(state = 'claimed' AND expires_at <= {NOW}, ?, owner), \
                 since = IF(state = 'claimed' AND owner = ?, {NOW}, since), \
                 expires_at = IF(LAST_INSERT_ID(CASE WHEN state = 'claimed' AND owner = ? THEN {OPENED} \
                 WHEN state = 'done' THEN {DONE} WHEN expires_at IS NULL THEN {ENDLESS} \
                 ELSE {BUSY} + GREATEST(expires_at - {NOW}, 0) END) = {OPENED}, {NOW} + {OPEN_LEASE}, expires_at)"
            )
            .into(),
            // It has nothing to wait for: the row is locked already.
            close: format!(
                "UPDATE {name} SET state = 'done', since = {START}, expires_at = {START} + ? WHERE {ours}"
            )
            .into(),
            withdraw: format!("DELETE FROM {name} WHERE {ours}").into(),
            table,
            layout,
            ttl: settings.ttl,
        }
    }

    /// By error number.
    fn classify(error: &dyn DatabaseError) -> BackendErrorKind {
        match error.try_downcast_ref::<MySqlDatabaseError>() {
            Some(error) => kind(error.number()),
            None => BackendErrorKind::Other,
        }
    }

    fn ddl(&self) -> String {
        format!("{};\n", ddl(&self.table))
    }

    async fn migrate(
        &self,
        mut connection: PoolConnection<MySql>,
    ) -> Result<Migrated, BackendError> {
        let found = columns(&mut connection, &self.table).await?;
        let statement = if found.is_empty() {
            ddl(&self.table)
        } else {
            self.check(&mut connection).await?;
            if found
                .iter()
                .any(|column| column.name == "expires_at" && column.indexed)
            {
                return Ok(Migrated::Complete);
            }
            format!(
                "CREATE INDEX `{}` ON {} (expires_at)",
                self.table.index(),
                self.table.quoted('`')
            )
        };
        // Not the pool's any more: the setting goes with the session.
        let mut session = connection.detach();
        let patience = format!("SET SESSION lock_wait_timeout = {DDL_PATIENCE}");
        let set = session.execute(sqlx::raw_sql(AssertSqlSafe(patience)));
        set.await.map_err(failed::<Self>)?;
        let made = session.execute(sqlx::raw_sql(AssertSqlSafe(statement)));
        match made.await.map_err(|error| (number(&error), error)) {
            // There already: another worker was faster.
            Ok(_) | Err((Some(1050 | 1061), _)) => Ok(Migrated::Again),
            Err((_, error)) => Err(failed::<Self>(error)),
        }
    }

    async fn purge(&self, connection: &mut PoolConnection<MySql>) -> Result<u64, BackendError> {
        let name = self.table.quoted('`');
        let past = format!(
            "expires_at <= {START} AND (state = 'done' OR expires_at <= {START} - {CLAIM_GRACE})"
        );
        // Not the pool's any more: the transaction ends with the session, whatever happens.
        connection.close_on_drop();
        let session = &mut **connection;
        // Otherwise the gaps between the rows would be locked, too.
        for statement in [
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
            "START TRANSACTION",
        ] {
            let done = session.execute(sqlx::raw_sql(statement));
            done.await.map_err(failed::<Self>)?;
        }
        let lock = format!(
            "SELECT message_id FROM {name} WHERE {past} ORDER BY expires_at \
             LIMIT {PURGE_BATCH} FOR UPDATE SKIP LOCKED"
        );
        let locked = session.fetch_all(sqlx::raw_sql(AssertSqlSafe(lock))).await;
        let locked = locked.map_err(|error| self.explained(error))?;
        if locked.is_empty() {
            return Ok(0);
        }
        let ids: Vec<Vec<u8>> = locked
            .iter()
            .map(|row| row.try_get(0))
            .collect::<Result<_, _>>()
            .map_err(failed::<Self>)?;
        let places = vec!["?"; ids.len()].join(",");
        // By the key alone: a scan would wait for the rows that were skipped.
        let delete = format!(
            "DELETE {name} FROM {name} FORCE INDEX (PRIMARY) \
             WHERE message_id IN ({places}) AND {past}"
        );
        let mut delete = sqlx::query(AssertSqlSafe(delete)).persistent(false);
        for id in ids {
            delete = delete.bind(id);
        }
        delete
            .execute(&mut *session)
            .await
            .map_err(failed::<Self>)?;
        let commit = session.execute(sqlx::raw_sql("COMMIT"));
        commit.await.map_err(failed::<Self>)?;
        Ok(locked.len() as u64)
    }

    async fn check(&self, connection: &mut MySqlConnection) -> Result<Column, BackendError> {
        let found = columns(connection, &self.table).await?;
        if found.is_empty() {
            return Err(missing(&self.table, self.layout));
        }
        let text: &[&str] = &["varchar", "char", "varbinary", "text", "blob"];
        let needed: &[(&str, &[&str])] = match self.layout {
            Layout::Ours => &[
                ("message_id", &["varbinary"]),
                ("state", text),
                ("owner", text),
                ("since", &["bigint"]),
                ("expires_at", &["bigint"]),
            ],
            Layout::Go | Layout::Php => &[
                ("message_id", &["varchar", "varbinary"]),
                ("state", text),
                ("expires_at", &["bigint"]),
            ],
        };
        columns_fit(&self.table, needed, |name| {
            let column = found.iter().find(|column| column.name == name);
            column.map(|column| column.of_type.as_str())
        })?;
        let key = found
            .iter()
            .find(|column| column.name == "message_id")
            .ok_or_else(|| missing(&self.table, self.layout))?;
        let name = self.table.quoted('`');
        // The purge of our own table goes by the primary key.
        if !key.unique || self.layout == Layout::Ours && !key.primary {
            return Err(unfit(
                &self.table,
                "has another primary key than `message_id`, or none",
                format!("run `ALTER TABLE {name} ADD PRIMARY KEY (message_id)`"),
            ));
        }
        self.commits(connection).await?;
        if let Some(collation) = key.collation.as_deref().filter(|name| !byte_exact(name)) {
            return Err(unfit(
                &self.table,
                format_args!(
                    "compares `message_id` by the collation {collation}, which takes different ids for one"
                ),
                format!("run `ALTER TABLE {name} MODIFY message_id VARBINARY(255) NOT NULL`"),
            ));
        }
        let length = key.length.and_then(|length| usize::try_from(length).ok());
        if self.layout == Layout::Ours {
            return match length {
                Some(length) if length >= 255 => Ok(Column::Ours),
                _ => Err(unfit(
                    &self.table,
                    "has too little room for `message_id`",
                    format!("run `ALTER TABLE {name} MODIFY message_id VARBINARY(255) NOT NULL`"),
                )),
            };
        }
        let binary = key.collation.is_none();
        Ok(Column::Verbatim {
            chars: length.filter(|_| !binary),
            bytes: length.filter(|_| binary),
            nul: true,
        })
    }

    async fn run(
        &self,
        connection: &mut MySqlConnection,
        command: Command,
        keys: &[String],
        _: Duration,
    ) -> Result<Vec<bool>, BackendError> {
        let mut answers = Vec::with_capacity(keys.len());
        for key in keys {
            let statement = match command {
                Command::Seen => &self.seen,
                Command::Remember => &self.remember,
                Command::Forget => &self.forget,
            };
            let mut query = sqlx::query(AssertSqlSafe(statement.clone())).bind(key);
            if command == Command::Remember && self.layout == Layout::Ours {
                query = query.bind(self.ttl.micros()).bind(self.ttl.micros());
            }
            // Not by the number of rows: that counts what was found or what was changed, as the
            // session has it.
            let answer = if command == Command::Seen {
                let row = query.fetch_optional(&mut *connection).await;
                row.map(|row| row.is_some())
            } else {
                query.execute(&mut *connection).await.map(|_| true)
            };
            answers.push(answer.map_err(|error| self.explained(error))?);
        }
        Ok(answers)
    }

    /// Writes, then reads back what came of it: there is no `RETURNING`, and a number of rows counts
    /// what was found or what was changed, as the session has it.
    async fn hold(
        &self,
        connection: &mut MySqlConnection,
        hold: Hold,
        key: &str,
        owner: &str,
        patience: Duration,
    ) -> Result<Held, BackendError> {
        let query = |statement: &Arc<str>| sqlx::query(AssertSqlSafe(statement.clone()));
        let write = match hold {
            Hold::Claim { lease } => {
                let claim = query(&self.claim).bind(key).bind(owner).bind(lease);
                let claim = claim.bind(owner).bind(owner).bind(owner).bind(owner);
                claim.bind(lease)
            }
            Hold::Renew { lease } => query(&self.renew).bind(lease).bind(key).bind(owner),
            Hold::Complete => {
                let ttl = self.ttl.micros();
                let complete = query(&self.complete).bind(key).bind(ttl);
                complete.bind(owner).bind(ttl)
            }
            Hold::Release => query(&self.release).bind(key).bind(owner),
        };
        let written = match write.execute(&mut *connection).await {
            Ok(written) => written,
            // Somebody has locked the row, or the table, for longer than was waited.
            Err(error)
                if matches!(hold, Hold::Claim { .. })
                    && matches!(number(&error), Some(1205 | 3572)) =>
            {
                return Ok(Held::Busy(Some(patience)));
            }
            Err(error) => return Err(self.explained(error)),
        };
        let read = match hold {
            Hold::Claim { .. } => query(&self.claimed).bind(owner).bind(key),
            Hold::Renew { .. } => query(&self.renewed).bind(key).bind(owner),
            Hold::Complete => query(&self.completed).bind(key).bind(owner),
            // Of rows that are deleted there is one count.
            Hold::Release if written.rows_affected() > 0 => return Ok(Held::Yes),
            Hold::Release => return Ok(Held::No),
        };
        let row = read.fetch_optional(&mut *connection).await;
        let row = row.map_err(|error| self.explained(error))?;
        match (hold, row) {
            (Hold::Claim { .. }, Some(row)) => held(&row).map_err(failed::<Self>),
            (Hold::Claim { .. }, None) => Ok(Held::Again),
            (_, Some(_)) => Ok(Held::Yes),
            (_, None) => Ok(Held::No),
        }
    }

    async fn entry(
        &self,
        connection: &mut MySqlConnection,
        key: &str,
    ) -> Result<Option<Entry>, BackendError> {
        let statement = format!(
            "SELECT CAST(state AS CHAR), CAST(owner AS CHAR), since, expires_at - {NOW} \
             FROM {} WHERE message_id = ?",
            self.table.quoted('`')
        );
        let query = sqlx::query(AssertSqlSafe(statement)).bind(key);
        let row = query.fetch_optional(connection).await;
        let entry = |row: MySqlRow| {
            let state: String = row.try_get(0)?;
            let (since, left) = (row.try_get(2)?, row.try_get(3)?);
            Ok(Entry::of_row(&state, row.try_get(1)?, since, left))
        };
        let row = row.map_err(|error| self.explained(error))?;
        row.map(entry).transpose().map_err(failed::<Self>)
    }

    async fn stats(&self, connection: &mut MySqlConnection) -> Result<Stats, BackendError> {
        let count = count(&self.table.quoted('`'), START);
        let row = connection
            .fetch_one(sqlx::raw_sql(AssertSqlSafe(count)))
            .await
            .map_err(|error| self.explained(error))?;
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

    fn begin(isolation: Option<Isolation>) -> &'static str {
        match isolation {
            None => "START TRANSACTION",
            Some(Isolation::ReadCommitted) => {
                "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION"
            }
            Some(Isolation::RepeatableRead) => {
                "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; START TRANSACTION"
            }
            Some(Isolation::Serializable) => {
                "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE; START TRANSACTION"
            }
        }
    }

    async fn open(
        &self,
        connection: &mut MySqlConnection,
        claim: &mut InTransaction,
        patience: Duration,
    ) -> Result<Held, BackendError> {
        let InTransaction { key, owner, .. } = &*claim;
        // In whole seconds, of which the server takes no more than a year.
        let wait = patience.as_millis().div_ceil(1000).clamp(1, 31_536_000);
        let open = format!("{}{}", claim_settings(wait), self.open);
        let open = sqlx::query(AssertSqlSafe(open)).bind(key).bind(owner);
        let open = open.bind(owner).bind(owner).bind(owner);
        let opened = open.execute(&mut *connection).await;
        let opened = opened.map_err(|error| self.explained(error))?;
        match opened.last_insert_id() {
            OPENED => Ok(Held::Yes),
            DONE => Ok(Held::Done),
            ENDLESS => Ok(Held::Busy(None)),
            told if told >= BUSY => Ok(Held::Busy(Some(Duration::from_micros(told - BUSY)))),
            _ => {
                let error = "the server did not tell what LAST_INSERT_ID() was set to";
                Err(BackendError::new(BackendErrorKind::Other, error))
            }
        }
    }

    async fn close(
        &self,
        connection: &mut MySqlConnection,
        claim: &InTransaction,
    ) -> Result<bool, BackendError> {
        let InTransaction { key, owner, .. } = claim;
        let query = |statement: &Arc<str>| sqlx::query(AssertSqlSafe(statement.clone()));
        let close = if claim.recorded {
            query(&self.close).bind(self.ttl.micros())
        } else {
            query(&self.withdraw)
        };
        let closed = close.bind(key).bind(owner).execute(&mut *connection).await;
        // A row that is found is changed: either count is the same here.
        let closed = closed.map_err(|error| self.explained(error))?;
        Ok(closed.rows_affected() == 1)
    }

    /// Nothing is checked as late as in a commit.
    fn rejects(_: &dyn DatabaseError) -> bool {
        false
    }

    async fn settle(
        &self,
        session: &mut MySqlConnection,
        patience: Duration,
    ) -> Result<(), sqlx::Error> {
        let wait = patience.as_secs().max(1);
        let set = format!(
            "SET SESSION autocommit = 1, innodb_lock_wait_timeout = {wait}, lock_wait_timeout = {wait}"
        );
        let set = session.execute(sqlx::raw_sql(AssertSqlSafe(set)));
        set.await.map(drop)
    }
}

/// What a row says after a claim: its state, whether it is the owner's, and how much is left.
fn held(row: &MySqlRow) -> Result<Held, sqlx::Error> {
    let (state, mine, left): (String, Option<bool>, Option<i64>) =
        (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    Ok(match left {
        // It has ended since.
        Some(..=0) => Held::Again,
        _ if state == "done" => Held::Done,
        Some(_) if state == "claimed" && mine == Some(true) => Held::Yes,
        left => Held::Busy(left.map(remaining)),
    })
}

fn number(error: &sqlx::Error) -> Option<u16> {
    let error = error.as_database_error()?;
    let error = error.try_downcast_ref::<MySqlDatabaseError>()?;
    Some(error.number())
}

/// What an error number means, of MySQL and of MariaDB.
fn kind(number: u16) -> BackendErrorKind {
    use BackendErrorKind::{
        Contention, Denied, Other, ReadOnly, Schema, Unavailable, UnsuitableId,
    };

    match number {
        // Lock wait timeout, deadlock, row changed since it was read, NOWAIT, to be prepared again.
        // Of a group: rolled back as another member was first.
        1205 | 1213 | 1020 | 3572 | 1615 | 3101 => Contention,
        // Option prevents statement (--read-only), read-only transaction, read-only mode.
        1290 | 1792 | 1836 => ReadOnly,
        // Access to the server, a database, a command, a table, a column, an object; method.
        1044 | 1045 | 1142 | 1143 | 1227 | 1251 | 1698 => Denied,
        // No database chosen; unknown database, column, table; no such table in the engine.
        1046 | 1049 | 1054 | 1146 | 1932 => Schema,
        1406 => UnsuitableId,
        // Too many connections, node not ready, shutdown, net errors, killed, query interrupted, disk full, table
        // definition changed, too many prepared statements, disconnected for inactivity.
        1040
        | 1053
        | 1077
        | 1152
        | 1158..=1161
        | 1184
        | 1203
        | 1226
        | 1317
        | 1021
        | 1030
        | 1412
        | 1927
        | 2006
        | 2013
        | 3024
        | 4031 => Unavailable,
        _ => Other,
    }
}

/// Whether a collation tells all texts apart, also those that differ in their trailing blanks, and
/// its character set has all characters: where the mode is not strict, those it lacks become `?`.
fn byte_exact(collation: &str) -> bool {
    collation == "binary"
        || collation.starts_with("utf8mb4_")
            && (collation.ends_with("_nopad_bin") || collation.ends_with("_0900_bin"))
}

// ===== the catalogue =====

/// A column of the table.
struct Found {
    name: String,
    of_type: String,
    length: Option<i64>,
    collation: Option<String>,
    /// Whether it is unique by itself.
    unique: bool,
    primary: bool,
    indexed: bool,
}

/// The columns; none without such a table.
async fn columns(
    connection: &mut MySqlConnection,
    table: &Table,
) -> Result<Vec<Found>, BackendError> {
    let schema = match table.schema() {
        Some(schema) => format!("'{schema}'"),
        None => "DATABASE()".to_owned(),
    };
    let indexed = |what: &str| {
        format!(
            "EXISTS (SELECT 1 FROM information_schema.statistics s WHERE s.table_schema = c.table_schema \
             AND s.table_name = c.table_name AND s.column_name = c.column_name AND s.seq_in_index = 1{what})"
        )
    };
    let unique = indexed(
        " AND s.non_unique = 0 AND s.sub_part IS NULL AND NOT EXISTS (SELECT 1 FROM information_schema.statistics o \
         WHERE o.table_schema = s.table_schema AND o.table_name = s.table_name \
         AND o.index_name = s.index_name AND o.seq_in_index > 1)",
    );
    let primary = indexed(" AND s.index_name = 'PRIMARY'");
    let statement = format!(
        "SELECT CAST(c.column_name AS CHAR), CAST(LOWER(c.data_type) AS CHAR), \
         CAST(c.character_maximum_length AS SIGNED), CAST(c.collation_name AS CHAR), {unique}, {primary}, {} \
         FROM information_schema.columns c WHERE c.table_schema = {schema} AND c.table_name = '{}'",
        indexed(""),
        table.name()
    );
    let rows = connection
        .fetch_all(sqlx::raw_sql(AssertSqlSafe(statement)))
        .await
        .map_err(failed::<MySqlTable>)?;
    let found = |row: &MySqlRow| {
        Ok(Found {
            name: row.try_get(0)?,
            of_type: row.try_get(1)?,
            length: row.try_get(2)?,
            collation: row.try_get(3)?,
            unique: row.try_get::<i64, _>(4)? != 0,
            primary: row.try_get::<i64, _>(5)? != 0,
            indexed: row.try_get::<i64, _>(6)? != 0,
        })
    };
    rows.iter()
        .map(found)
        .collect::<Result<_, sqlx::Error>>()
        .map_err(failed::<MySqlTable>)
}

/// What makes the table with its index.
fn ddl(table: &Table) -> String {
    format!(
        "CREATE TABLE IF NOT EXISTS {} (\n    \
         message_id VARBINARY(255) NOT NULL PRIMARY KEY,\n    \
         state VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,\n    \
         owner VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NULL,\n    \
         since BIGINT NOT NULL,\n    \
         expires_at BIGINT NULL,\n    \
         INDEX `{}` (expires_at)\n) ENGINE = InnoDB",
        table.quoted('`'),
        table.index()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_says_what_can_be_tried_again() {
        use BackendErrorKind::*;
        for (number, expected) in [
            (1213, Contention),
            (1205, Contention),
            (1040, Unavailable),
            (2006, Unavailable),
            (1290, ReadOnly),
            (1045, Denied),
            (1146, Schema),
            (1406, UnsuitableId),
            (1062, Other),
        ] {
            assert_eq!(kind(number), expected, "{number}");
        }
    }

    #[test]
    fn a_collation_that_pads_or_folds_is_not_byte_exact() {
        for good in ["binary", "utf8mb4_0900_bin", "utf8mb4_nopad_bin"] {
            assert!(byte_exact(good), "{good}");
        }
        for bad in [
            "utf8mb4_bin",
            "utf8mb4_0900_ai_ci",
            "utf8mb4_general_ci",
            "latin1_swedish_ci",
            "utf8mb4_general_nopad_ci",
            "latin1_nopad_bin",
            "utf8mb3_nopad_bin",
        ] {
            assert!(!byte_exact(bad), "{bad}");
        }
    }
}
