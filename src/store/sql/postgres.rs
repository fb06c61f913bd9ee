//! A table in PostgreSQL.

use super::{
    SqlStoreBuilder,
    engine::{
        Backend, CLAIM_GRACE, Command, Held, Hold, InTransaction, Isolation, Layout, Migrated,
        OPEN_LEASE, PURGE_BATCH, Settings, columns_fit, count, expect_scheme, failed, missing,
        no_connection, remaining, unfit,
    },
    key::{Column, Table},
};
use crate::{
    error::{BackendError, BackendErrorKind},
    store::{
        entry::{Entry, Stats},
        ttl::Ttl,
    },
};
use sqlx::{
    AssertSqlSafe, Executor, PgConnection, PgPool, Postgres, Row,
    error::DatabaseError,
    pool::PoolConnection,
    postgres::{PgArguments, PgDatabaseError, PgPoolOptions, PgRow},
};
use std::{error::Error, sync::Arc, time::Duration};

/// Microseconds since 1970, at the instant they are asked for.
const NOW: &str = "(extract(epoch from clock_timestamp()) * 1000000)::bigint";

/// The same as of the start of the statement, which an index can be searched with.
const START: &str = "(extract(epoch from statement_timestamp()) * 1000000)::bigint";

/// What to do where prepared statements are lost or mixed up.
const POOLER: &str = "behind a pooler in transaction mode, set `transaction_pooler(true)`";

/// How long the statements of `migrate()` wait for a lock.
const DDL_PATIENCE: &str = "2s";

/// A table in PostgreSQL, of a [`PostgresStore`](crate::PostgresStore) or of another fleet.
#[derive(Debug)]
pub struct PostgresTable {
    table: Table,
    layout: Layout,
    ttl: Ttl,
    transaction_pooler: bool,
    identity: Arc<str>,
    seen_one: Arc<str>,
    seen: Arc<str>,
    remember: Arc<str>,
    forget: Arc<str>,
    claim: Arc<str>,
    renew: Arc<str>,
    complete: Arc<str>,
    release: Arc<str>,
    open: Arc<str>,
    look: Arc<str>,
    close: Arc<str>,
    withdraw: Arc<str>,
}

impl<R> SqlStoreBuilder<PostgresTable, R> {
    /// Sends each statement whole, for a pooler in transaction mode; off unless set.
    ///
    /// Statements are prepared, as everywhere in sqlx. Behind a pooler that hands out another
    /// server connection for each transaction (PgBouncer with `pool_mode = transaction`), a
    /// prepared statement may be missing, or be somebody else's of the same name. Without this
    /// setting the store refuses what the wrong statement answered, with an error that names it; the
    /// statements of others on the same database have no such guard. An older PgBouncer also needs
    /// `ignore_startup_parameters = extra_float_digits` for sqlx. Nothing else here keeps state in a
    /// session.
    ///
    /// Each statement is then parsed and planned anew, which takes some 50 microseconds longer. On a
    /// pool of the caller's own, its other statements need the same care.
    #[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
    pub fn transaction_pooler(mut self, there_is_one: bool) -> Self {
        self.transaction_pooler = there_is_one;
        self
    }
}

// ===== impl PostgresTable =====

impl PostgresTable {
    fn of(settings: &Settings) -> Self {
        let table = settings.table.clone();
        let layout = settings.layout;
        let name = table.quoted('"');
        // Of `remember`: `$1` are the ids, `$2` is the TTL, `$3` how long to wait for a lock.
        let (done, columns, values, update) = match layout {
            Layout::Ours => (
                format!("state = 'done' AND (expires_at IS NULL OR expires_at > {NOW})"),
                "state, owner, since, expires_at",
                format!("'done', NULL, {NOW}, {NOW} + $2::bigint"),
                format!(
                    "state = 'done', owner = NULL, since = {NOW}, expires_at = {NOW} + $2::bigint"
                ),
            ),
            Layout::Go => {
                let end = "clock_timestamp() + $2::bigint * interval '1 microsecond'";
                (
                    "(expires_at IS NULL OR expires_at > clock_timestamp())".to_owned(),
                    "created_at, expires_at",
                    format!("clock_timestamp(), {end}"),
                    format!("created_at = clock_timestamp(), expires_at = {end}"),
                )
            }
            // No end at all: what `$2` says does not matter, but it is there.
            Layout::Php => (
                "state = 'seen'".to_owned(),
                "state, expires_at",
                "'seen', CASE WHEN $2::bigint IS NULL THEN NULL::bigint END".to_owned(),
                "state = 'seen', expires_at = NULL".to_owned(),
            ),
        };
        // In force for the one transaction that a statement of its own is.
        let bound = |parameter: &str| {
            format!(
                "WITH bound AS MATERIALIZED (SELECT set_config('lock_timeout', {parameter}::text, true))"
            )
        };
        let ours = "r.message_id = $1::text AND r.state = 'claimed' AND r.owner = $2::text";
        let mine = format!("{ours} AND r.expires_at > {NOW}");
        let here = format!("r.ctid = $3::text::tid AND {ours}");
        let free = format!(
            "((r.state = 'claimed' AND r.owner = $2::text) OR r.expires_at <= {NOW}) IS TRUE"
        );
        // How a record stands that is not to be had.
        let stands = format!(
            "CASE r.state WHEN 'done' THEN 'done' ELSE concat('busy ', r.expires_at - {NOW}) END"
        );
        // What a pooler may run in the place of a statement is another store's of the same name: each
        // compares what it is with what it is meant to be.
        let identity = format!("{layout:?} {name}");
        PostgresTable {
            seen_one: format!(
                "SELECT CASE WHEN EXISTS \
                 (SELECT 1 FROM {name} WHERE message_id = ($1::text[])[1] AND {done}) THEN '1' END, \
                 $2::text = 'seen one {identity}'"
            )
            .into(),
            // Written so that the plan is made for the ids at hand and the table as it is: by its
            // key, whatever size the table had when the statement was prepared.
            seen: format!(
                "SELECT string_agg(nr::text, ','), $2::text = 'seen {identity}' \
                 FROM generate_series(1, $3::bigint) AS nr, LATERAL \
                 (SELECT 1 FROM {name} WHERE message_id = ($1::text[])[nr::int] AND {done} OFFSET 0) AS found"
            )
            .into(),
            remember: format!(
                "{} INSERT INTO {name} (message_id, {columns}) \
                 SELECT id, {values} FROM bound, unnest($1::text[]) AS id \
                 WHERE $4::text = 'remember {identity}' \
                 ON CONFLICT (message_id) DO UPDATE SET {update}",
                bound("$3")
            )
            .into(),
            forget: format!(
                "{}, gone AS (DELETE FROM {name} USING bound WHERE message_id = ($1::text[])[1] \
                 AND $3::text = 'forget {identity}') SELECT NULL::text, $3::text = 'forget {identity}'",
                bound("$2")
            )
            .into(),
            // Of the claims: `$1` is the id, `$2` the owner, `$3` how long to wait for a lock, `$4` the
            // lease or the TTL.
            //
            // A claim looks first, so that one that is not to be had writes nothing at all. What is
            // found may be over, or may have come, by the time that the row is locked; so the row
            // decides then. Neither found nor won: it changed in between.
            claim: format!(
                "{}, found AS MATERIALIZED (SELECT {stands} AS state \
                     FROM {name} AS r WHERE r.message_id = $1::text AND NOT {free}), \
                     won AS (INSERT INTO {name} AS r (message_id, state, owner, since, expires_at) \
                     SELECT $1::text, 'claimed', $2::text, {NOW}, {NOW} + $4::bigint FROM bound \
                     WHERE $5::text = 'claim {identity}' AND NOT EXISTS (SELECT 1 FROM found) \
                     ON CONFLICT (message_id) DO UPDATE SET state = 'claimed', owner = $2::text, \
                     since = {NOW}, expires_at = {NOW} + $4::bigint WHERE {free} RETURNING 'yes'::text AS state) \
                     SELECT COALESCE((SELECT state FROM won), (SELECT state FROM found)), \
                     $5::text = 'claim {identity}'",
                bound("$3")
            )
            .into(),
            renew: format!(
                "{}, held AS (UPDATE {name} AS r SET expires_at = {NOW} + $4::bigint FROM bound \
                     WHERE {mine} AND $5::text = 'renew {identity}' RETURNING 'yes'::text AS state) \
                     SELECT COALESCE((SELECT state FROM held), 'no'), $5::text = 'renew {identity}'",
                bound("$3")
            )
            .into(),
            complete: format!(
                "{}, done AS (INSERT INTO {name} AS r (message_id, state, owner, since, expires_at) \
                     SELECT $1::text, 'done', NULL, {NOW}, {NOW} + $4::bigint FROM bound \
                     WHERE $5::text = 'complete {identity}' \
                     ON CONFLICT (message_id) DO UPDATE SET state = 'done', owner = CASE WHEN r.owner = $2::text \
                     AND (r.state = 'done' OR r.expires_at > {NOW}) THEN $2::text END, since = {NOW}, \
                     expires_at = {NOW} + $4::bigint RETURNING owner) \
                     SELECT CASE WHEN (SELECT owner FROM done) IS NULL THEN 'no' ELSE 'yes' END, \
                     $5::text = 'complete {identity}'",
                bound("$3")
            )
            .into(),
            release: format!(
                "{}, gone AS (DELETE FROM {name} AS r USING bound \
                     WHERE {mine} AND $4::text = 'release {identity}' RETURNING 'yes'::text AS state) \
                     SELECT COALESCE((SELECT state FROM gone), 'no'), $4::text = 'release {identity}'",
                bound("$3")
            )
            .into(),
            // In a transaction that goes on, and is to wait for locks as it did before. Nothing comes of
            // it where the message is not to be had; then a look says why.
            //
            // Where transactions are to be as if one came after the other, a row that is searched for stands for
            // all those beside it. So nothing is searched for before there is reason to, and the
            // end finds the row by where it is.
            open: format!(
                "WITH bound AS MATERIALIZED (SELECT before.wait, set_config('lock_timeout', $3::text, true) \
                     FROM (SELECT current_setting('lock_timeout') AS wait OFFSET 0) AS before) \
                     INSERT INTO {name} AS r (message_id, state, owner, since, expires_at) \
                     SELECT $1::text, 'claimed', $2::text, {NOW}, {NOW} + $4::bigint FROM bound \
                     WHERE $5::text = 'open {identity}' ON CONFLICT (message_id) DO UPDATE SET \
                     state = 'claimed', owner = $2::text, since = {NOW}, expires_at = {NOW} + $4::bigint \
                     WHERE {free} RETURNING r.ctid::text, $5::text = 'open {identity}', \
                     set_config('lock_timeout', (SELECT wait FROM bound), true)"
            )
            .into(),
            look: format!(
                "SELECT (SELECT {stands} FROM {name} AS r WHERE r.message_id = $1::text), \
                     $2::text = 'look {identity}'"
            )
            .into(),
            close: format!(
                "UPDATE {name} AS r SET state = 'done', since = {NOW}, \
                     expires_at = {NOW} + $4::bigint WHERE {here} AND $5::text = 'close {identity}' \
                     RETURNING 'yes'::text, $5::text = 'close {identity}'"
            )
            .into(),
            withdraw: format!(
                "DELETE FROM {name} AS r WHERE {here} AND $4::text = 'withdraw {identity}' \
                     RETURNING 'yes'::text, $4::text = 'withdraw {identity}'"
            )
            .into(),
            identity: identity.into(),
            table,
            layout,
            ttl: settings.ttl,
            transaction_pooler: settings.transaction_pooler,
        }
    }

    /// Runs a statement that answers with a row: the numbers of the keys it names, and whether it is
    /// the one that was meant.
    async fn ask(
        &self,
        connection: &mut PgConnection,
        statement: &Arc<str>,
        keys: &[String],
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<bool>, BackendError> {
        let named = self.row(connection, statement, parameters).await?;
        let mut answers = vec![false; keys.len()];
        for nr in named.iter().flat_map(|named| named.split(',')) {
            let answer = nr.parse::<usize>().ok().and_then(|nr| nr.checked_sub(1));
            if let Some(answer) = answer.and_then(|at| answers.get_mut(at)) {
                *answer = true;
            }
        }
        Ok(answers)
    }

    /// Runs a statement that answers with a row: a text, and whether the statement is the one that
    /// was meant.
    async fn row(
        &self,
        connection: &mut PgConnection,
        statement: &Arc<str>,
        parameters: &[Parameter<'_>],
    ) -> Result<Option<String>, BackendError> {
        let row = self.row_if_any(connection, statement, parameters).await?;
        row.ok_or_else(mixed_up)
    }

    /// The same of a statement that may also answer with none.
    async fn row_if_any(
        &self,
        connection: &mut PgConnection,
        statement: &Arc<str>,
        parameters: &[Parameter<'_>],
    ) -> Result<Option<Option<String>>, BackendError> {
        // To the end: a row is answered before its statement is committed.
        let rows = if self.transaction_pooler {
            let whole = written_out(statement, parameters);
            let whole = sqlx::raw_sql(AssertSqlSafe(whole));
            connection.fetch_all(whole).await
        } else {
            connection.fetch_all(bound(statement, parameters)).await
        };
        let rows = rows.map_err(|error| self.explained(error))?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let columns = || Ok((row.try_get(0)?, row.try_get(1)?));
        let (text, meant): (Option<String>, bool) = columns().map_err(failed::<Self>)?;
        if meant {
            Ok(Some(text))
        } else {
            Err(mixed_up())
        }
    }

    /// Runs a statement that writes a row for each key, if it is the one that was meant.
    async fn tell(
        &self,
        connection: &mut PgConnection,
        statement: &Arc<str>,
        keys: &[String],
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<bool>, BackendError> {
        let told = if self.transaction_pooler {
            let whole = written_out(statement, parameters);
            let whole = sqlx::raw_sql(AssertSqlSafe(whole));
            connection.execute(whole).await
        } else {
            connection.execute(bound(statement, parameters)).await
        };
        let told = told.map_err(|error| self.explained(error))?;
        if told.rows_affected() != keys.len() as u64 {
            return Err(mixed_up());
        }
        Ok(vec![true; keys.len()])
    }

    /// Says what to do where there is something to do.
    fn explained(&self, error: sqlx::Error) -> BackendError {
        match error
            .as_database_error()
            .and_then(DatabaseError::code)
            .as_deref()
        {
            Some("42P01") => missing(&self.table, self.layout),
            Some("26000" | "42P05" | "08P01") => failed::<PostgresTable>(error).expected(POOLER),
            _ => failed::<PostgresTable>(error),
        }
    }
}

/// The four values of an answer, with a blank between them. Only the last one may have some.
fn told(row: &str) -> Result<[&str; 4], BackendError> {
    let mut values = row.splitn(4, ' ');
    match [(); 4].map(|()| values.next()) {
        [Some(a), Some(b), Some(c), Some(d)] => Ok([a, b, c, d]),
        _ => Err(mixed_up()),
    }
}

/// A number of an answer; a null is empty.
fn number(text: &str) -> Result<Option<i64>, BackendError> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| mixed_up())
}

/// What stands for `$1`, `$2` and so on.
#[derive(Clone, Copy, Debug)]
enum Parameter<'a> {
    Ids(&'a [String]),
    Text(&'a str),
    Number(Option<i64>),
    Wait(Duration),
    /// Which statement it is, and whose.
    Identity(&'static str, &'a str),
}

/// A statement with its parameters.
fn bound<'q>(
    statement: &Arc<str>,
    parameters: &[Parameter<'q>],
) -> sqlx::query::Query<'q, Postgres, PgArguments> {
    let mut query = sqlx::query(AssertSqlSafe(statement.clone()));
    for parameter in parameters {
        query = match *parameter {
            Parameter::Ids(ids) => query.bind(ids),
            Parameter::Text(text) => query.bind(text),
            Parameter::Number(number) => query.bind(number),
            Parameter::Wait(wait) => query.bind(milliseconds(wait)),
            Parameter::Identity(command, of) => query.bind(format!("{command} {of}")),
        };
    }
    query
}

/// Something else was run than what was meant.
fn mixed_up() -> BackendError {
    let error = "another statement was run in the place of this one";
    BackendError::new(BackendErrorKind::Config, error).expected(POOLER)
}

/// PostgreSQL takes 0 for "for ever".
fn milliseconds(wait: Duration) -> String {
    format!("{}ms", wait.as_millis().clamp(1, i32::MAX as u128))
}

/// A statement that stands for itself. Ids come last: what they contain is no parameter.
fn written_out(statement: &str, parameters: &[Parameter<'_>]) -> String {
    let mut whole = statement.to_owned();
    for (at, parameter) in parameters.iter().enumerate().rev() {
        let value = match parameter {
            Parameter::Ids(ids) => {
                let literals: Vec<String> = ids.iter().map(|id| literal(id)).collect();
                format!("ARRAY[{}]", literals.join(","))
            }
            Parameter::Text(text) => literal(text),
            Parameter::Number(Some(number)) => number.to_string(),
            Parameter::Number(None) => "NULL".to_owned(),
            Parameter::Wait(wait) => format!("'{}'", milliseconds(*wait)),
            // Of the names of tables, which need no escape.
            Parameter::Identity(command, of) => format!("'{command} {of}'"),
        };
        whole = whole.replace(&format!("${}", at + 1), &value);
    }
    whole
}

/// A text that no setting of the server reads in any other way: without a character that could need
/// an escape, or else in hex.
fn literal(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_:./@".contains(&byte);
    if text.bytes().all(plain) {
        return format!("'{text}'");
    }
    let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("convert_from(decode('{hex}', 'hex'), 'UTF8')")
}

impl Backend for PostgresTable {
    type Db = Postgres;

    const GATHERS: bool = true;

    async fn connect(url: &str, settings: &Settings) -> Result<PgPool, BackendError> {
        expect_scheme(url, "postgres or postgresql")?;
        let mut pool = PgPoolOptions::new()
            .max_connections(settings.max_connections)
            .acquire_timeout(settings.response_timeout);
        if !settings.transaction_pooler {
            // A lock of the whole table is waited for before a statement can say how long; a statement
            // that is given up here would stay behind in the server.
            let wait = milliseconds(settings.response_timeout / 10 * 9);
            pool = pool.after_connect(move |session, _| {
                let set = format!("SET lock_timeout = '{wait}'");
                Box::pin(async move {
                    let set = session.execute(sqlx::raw_sql(AssertSqlSafe(set)));
                    set.await.map(drop)
                })
            });
        }
        pool.connect(url).await.map_err(no_connection::<Self>)
    }

    fn new(settings: &Settings) -> Self {
        Self::of(settings)
    }

    /// By SQLSTATE.
    fn classify(error: &dyn DatabaseError) -> BackendErrorKind {
        match error.try_downcast_ref::<PgDatabaseError>() {
            Some(error) => kind(error.code()),
            None => BackendErrorKind::Other,
        }
    }

    fn ddl(&self) -> String {
        let [make, index] = ddl(&self.table);
        format!("{make};\n{index};\n")
    }

    async fn migrate(
        &self,
        mut connection: PoolConnection<Postgres>,
    ) -> Result<Migrated, BackendError> {
        let columns = look(&mut connection, &self.table).await;
        let columns = columns.map_err(failed::<Self>)?;
        let [make, index] = ddl(&self.table);
        let missing = match columns {
            None => format!("{make}; {index}"),
            Some(columns) => {
                self.check(&mut connection).await?;
                let indexed = |column: &Found| column.name == "expires_at" && column.indexed;
                if columns.iter().any(indexed) {
                    return Ok(Migrated::Complete);
                }
                index
            }
        };
        // Sent as one, which is one transaction.
        let together =
            format!("SELECT set_config('lock_timeout', '{DDL_PATIENCE}', true); {missing}");
        let made = connection
            .execute(sqlx::raw_sql(AssertSqlSafe(together)))
            .await;
        match made {
            Ok(_) => Ok(Migrated::Again),
            Err(error) => {
                let code = error.as_database_error().and_then(DatabaseError::code);
                // Another worker makes the same at this moment.
                let lost = matches!(code.as_deref(), Some("23505" | "42P07" | "42710" | "XX000"));
                Err(if lost {
                    BackendError::new(BackendErrorKind::Contention, error)
                } else {
                    failed::<Self>(error)
                })
            }
        }
    }

    async fn purge(&self, connection: &mut PoolConnection<Postgres>) -> Result<u64, BackendError> {
        let name = self.table.quoted('"');
        let past = format!(
            "expires_at <= {START} AND (state = 'done' OR expires_at <= {START} - {CLAIM_GRACE})"
        );
        let statement = format!(
            "DELETE FROM {name} WHERE message_id = ANY(ARRAY(SELECT message_id FROM {name} WHERE {past} \
             ORDER BY expires_at LIMIT {PURGE_BATCH} FOR UPDATE SKIP LOCKED)) AND {past}"
        );
        let deleted = connection
            .execute(sqlx::raw_sql(AssertSqlSafe(statement)))
            .await;
        match deleted {
            Ok(deleted) => Ok(deleted.rows_affected()),
            Err(error) => Err(self.explained(error)),
        }
    }

    async fn check(&self, connection: &mut PgConnection) -> Result<Column, BackendError> {
        let encoding = connection
            .fetch_one("SELECT current_setting('server_encoding')")
            .await
            .and_then(|row| row.try_get::<String, _>(0))
            .map_err(failed::<Self>)?;
        if encoding != "UTF8" {
            return Err(unfit(
                &self.table,
                format_args!("is in a database with the encoding {encoding}"),
                "expected UTF8, which has all characters",
            ));
        }
        let columns = look(connection, &self.table)
            .await
            .map_err(failed::<PostgresTable>)?
            .ok_or_else(|| missing(&self.table, self.layout))?;
        let needed: &[(&str, &[&str])] = match self.layout {
            Layout::Ours => &[
                ("message_id", &["text"]),
                ("state", &["text"]),
                ("owner", &["text"]),
                ("since", &["bigint"]),
                ("expires_at", &["bigint"]),
            ],
            Layout::Go => &[
                ("message_id", &["text", "character varying"]),
                ("created_at", &["timestamp with time zone"]),
                ("expires_at", &["timestamp with time zone"]),
            ],
            Layout::Php => &[
                ("message_id", &["text", "character varying"]),
                ("state", &["text", "character varying"]),
                ("expires_at", &["bigint"]),
            ],
        };
        columns_fit(&self.table, needed, |name| {
            let column = columns.iter().find(|column| column.name == name);
            column.map(|column| column.of_type.as_str())
        })?;
        let key = columns
            .iter()
            .find(|column| column.name == "message_id")
            .ok_or_else(|| missing(&self.table, self.layout))?;
        if !key.unique {
            return Err(unfit(
                &self.table,
                "lets one `message_id` stand in two rows",
                "expected it to be the primary key",
            ));
        }
        if !key.deterministic {
            return Err(unfit(
                &self.table,
                "compares `message_id` by a nondeterministic collation",
                r#"expected one that tells all ids apart, such as "C""#,
            ));
        }
        Ok(match self.layout {
            Layout::Ours => Column::Ours,
            _ => Column::Verbatim {
                chars: key.length,
                bytes: None,
                nul: false,
            },
        })
    }

    async fn run(
        &self,
        connection: &mut PgConnection,
        command: Command,
        keys: &[String],
        patience: Duration,
    ) -> Result<Vec<bool>, BackendError> {
        let ids = Parameter::Ids(keys);
        let identity = |command| Parameter::Identity(command, &self.identity);
        match command {
            Command::Seen if keys.len() == 1 => {
                let parameters = [ids, identity("seen one")];
                self.ask(connection, &self.seen_one, keys, &parameters)
                    .await
            }
            Command::Seen => {
                let count = Parameter::Number(Some(keys.len() as i64));
                let parameters = [ids, identity("seen"), count];
                self.ask(connection, &self.seen, keys, &parameters).await
            }
            Command::Remember => {
                let parameters = [
                    ids,
                    Parameter::Number(self.ttl.micros()),
                    Parameter::Wait(patience),
                    identity("remember"),
                ];
                self.tell(connection, &self.remember, keys, &parameters)
                    .await
            }
            Command::Forget => {
                let parameters = [ids, Parameter::Wait(patience), identity("forget")];
                self.ask(connection, &self.forget, keys, &parameters).await
            }
        }
    }

    async fn hold(
        &self,
        connection: &mut PgConnection,
        hold: Hold,
        key: &str,
        owner: &str,
        patience: Duration,
    ) -> Result<Held, BackendError> {
        let (statement, name, number) = match hold {
            Hold::Claim { lease } => (&self.claim, "claim", Some(Some(lease))),
            Hold::Renew { lease } => (&self.renew, "renew", Some(Some(lease))),
            Hold::Complete => (&self.complete, "complete", Some(self.ttl.micros())),
            Hold::Release => (&self.release, "release", None),
        };
        let mut parameters = vec![
            Parameter::Text(key),
            Parameter::Text(owner),
            Parameter::Wait(patience),
        ];
        parameters.extend(number.map(Parameter::Number));
        parameters.push(Parameter::Identity(name, &self.identity));
        match self.row(connection, statement, &parameters).await {
            Ok(answer) => held(answer.as_deref()),
            // Somebody has locked the row for longer than was waited, or the table.
            Err(error) if matches!(hold, Hold::Claim { .. }) && is_locked(&error) => {
                Ok(Held::Busy(Some(patience)))
            }
            Err(error) => Err(error),
        }
    }

    async fn entry(
        &self,
        connection: &mut PgConnection,
        key: &str,
    ) -> Result<Option<Entry>, BackendError> {
        let (name, identity) = (self.table.quoted('"'), &self.identity);
        let statement = format!(
            "SELECT (SELECT concat(since, ' ', expires_at - {NOW}, ' ', owner, ' ', state) \
             FROM {name} WHERE message_id = $1::text), $2::text = 'entry {identity}'"
        );
        let parameters = [Parameter::Text(key), Parameter::Identity("entry", identity)];
        let row = self.row(connection, &statement.into(), &parameters).await?;
        row.map(|row| {
            let [since, left, owner, state] = told(&row)?;
            let owner = Some(owner.to_owned()).filter(|owner| !owner.is_empty());
            let since = number(since)?.unwrap_or_default();
            Ok(Entry::of_row(state, owner, since, number(left)?))
        })
        .transpose()
    }

    async fn stats(&self, connection: &mut PgConnection) -> Result<Stats, BackendError> {
        let (name, identity) = (self.table.quoted('"'), &self.identity);
        let statement = format!(
            "SELECT concat(count, ' ', claimed, ' ', expired, ' ', oldest), \
             $1::text = 'stats {identity}' FROM ({}) AS counted",
            count(&name, START)
        );
        let parameters = [Parameter::Identity("stats", identity)];
        let row = self.row(connection, &statement.into(), &parameters).await?;
        let [count, claimed, expired, oldest] = told(row.as_deref().unwrap_or_default())?;
        Ok(Stats::of_row(
            number(count)?.unwrap_or_default(),
            number(claimed)?.unwrap_or_default(),
            number(expired)?.unwrap_or_default(),
            number(oldest)?,
        ))
    }

    fn begin(isolation: Option<Isolation>) -> &'static str {
        match isolation {
            None => "BEGIN",
            Some(Isolation::ReadCommitted) => "BEGIN ISOLATION LEVEL READ COMMITTED",
            Some(Isolation::RepeatableRead) => "BEGIN ISOLATION LEVEL REPEATABLE READ",
            Some(Isolation::Serializable) => "BEGIN ISOLATION LEVEL SERIALIZABLE",
        }
    }

    async fn open(
        &self,
        connection: &mut PgConnection,
        claim: &mut InTransaction,
        patience: Duration,
    ) -> Result<Held, BackendError> {
        let parameters = [
            Parameter::Text(&claim.key),
            Parameter::Text(&claim.owner),
            Parameter::Wait(patience),
            Parameter::Number(Some(OPEN_LEASE)),
            Parameter::Identity("open", &self.identity),
        ];
        let open = self.row_if_any(connection, &self.open, &parameters);
        if let Some(place) = open.await? {
            claim.place = place;
            return Ok(Held::Yes);
        }
        let parameters = [
            Parameter::Text(&claim.key),
            Parameter::Identity("look", &self.identity),
        ];
        let stands = self.row(connection, &self.look, &parameters).await?;
        held(stands.as_deref())
    }

    async fn close(
        &self,
        connection: &mut PgConnection,
        claim: &InTransaction,
    ) -> Result<bool, BackendError> {
        let place = claim.place.as_deref().unwrap_or_default();
        let mut parameters = vec![
            Parameter::Text(&claim.key),
            Parameter::Text(&claim.owner),
            Parameter::Text(place),
        ];
        let (statement, name) = if claim.recorded {
            parameters.push(Parameter::Number(self.ttl.micros()));
            (&self.close, "close")
        } else {
            (&self.withdraw, "withdraw")
        };
        parameters.push(Parameter::Identity(name, &self.identity));
        let closed = self.row_if_any(connection, statement, &parameters);
        Ok(closed.await?.is_some())
    }

    /// What a constraint or a trigger says, whatever it is; not what may pass, nor what ends the session or says that
    /// the outcome is unknown.
    fn rejects(error: &dyn DatabaseError) -> bool {
        use BackendErrorKind::{Contention, ReadOnly, Unavailable};

        let code = error.code().unwrap_or_default();
        let unclear = code == "40003" || code.starts_with("XX");
        !unclear && !matches!(Self::classify(error), Contention | ReadOnly | Unavailable)
    }

    async fn settle(
        &self,
        session: &mut PgConnection,
        patience: Duration,
    ) -> Result<(), sqlx::Error> {
        // Behind a pooler in transaction mode a session is not one's own.
        if self.transaction_pooler {
            return Ok(());
        }
        let set = format!("SET lock_timeout = '{}'", milliseconds(patience));
        let set = session.execute(sqlx::raw_sql(AssertSqlSafe(set)));
        set.await.map(drop)
    }
}

/// What the statements of claims say.
fn held(answer: Option<&str>) -> Result<Held, BackendError> {
    Ok(match answer {
        None => Held::Again,
        Some("yes") => Held::Yes,
        Some("no") => Held::No,
        Some("done") => Held::Done,
        Some(busy) => {
            let left = busy.strip_prefix("busy ").ok_or_else(mixed_up)?;
            // Without a number, it never ends.
            Held::Busy(left.parse::<i64>().ok().map(remaining))
        }
    })
}

/// Whether a lock was waited for in vain.
fn is_locked(error: &BackendError) -> bool {
    let error = error
        .source()
        .and_then(|it| it.downcast_ref::<sqlx::Error>());
    let code = error
        .and_then(sqlx::Error::as_database_error)
        .and_then(DatabaseError::code);
    code.as_deref() == Some("55P03")
}

/// What a SQLSTATE means.
fn kind(code: &str) -> BackendErrorKind {
    use BackendErrorKind::{
        Contention, Denied, Other, ReadOnly, Schema, Unavailable, UnsuitableId,
    };

    match code {
        // Serialization failure, deadlock, lock not available.
        "40001" | "40P01" | "55P03" => Contention,
        // Read-only transaction: a standby.
        "25006" => ReadOnly,
        "42501" => Denied,
        // String too long, or with a character that cannot be stored; index row too large.
        "22001" | "22021" | "22P05" | "54000" => UnsuitableId,
        // No such database.
        "3D000" => Schema,
        // Query cancelled, as by `statement_timeout`; session ended, as by
        // `idle_in_transaction_session_timeout` and `transaction_timeout`.
        "57014" | "25P03" | "25P04" => Unavailable,
        _ => match &code[..code.len().min(2)] {
            // Connection; resources (disk, memory, connections); an operator's shutdown; I/O.
            "08" | "53" | "57" | "58" => Unavailable,
            "28" => Denied,
            // Names and types, among them a missing table.
            "42" | "3F" => Schema,
            _ => Other,
        },
    }
}

// ===== the catalogue =====

/// A column of the table.
struct Found {
    name: String,
    of_type: String,
    length: Option<usize>,
    /// Whether it is unique by itself.
    unique: bool,
    deterministic: bool,
    indexed: bool,
}

/// The columns, or `None` without such a table.
async fn look(
    connection: &mut PgConnection,
    table: &Table,
) -> Result<Option<Vec<Found>>, sqlx::Error> {
    let statement = format!(
        "SELECT a.attname::text, format_type(a.atttypid, NULL), \
         CASE WHEN a.atttypmod > 4 AND a.atttypid = 'varchar'::regtype THEN a.atttypmod - 4 END, \
         EXISTS (SELECT 1 FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid \
         AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indnkeyatts = 1 \
         AND i.indkey[0] = a.attnum), \
         COALESCE((SELECT c.collisdeterministic FROM pg_collation c WHERE c.oid = a.attcollation), true), \
         EXISTS (SELECT 1 FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisvalid \
         AND i.indpred IS NULL AND i.indkey[0] = a.attnum) \
         FROM pg_attribute a WHERE a.attrelid = to_regclass('{}') AND a.attnum > 0 AND NOT a.attisdropped",
        table.quoted('"')
    );
    let rows = connection
        .fetch_all(sqlx::raw_sql(AssertSqlSafe(statement)))
        .await?;
    let found = |row: &PgRow| {
        Ok(Found {
            name: row.try_get(0)?,
            of_type: row.try_get(1)?,
            length: row
                .try_get::<Option<i32>, _>(2)?
                .map(|length| length as usize),
            unique: row.try_get(3)?,
            deterministic: row.try_get(4)?,
            indexed: row.try_get(5)?,
        })
    };
    if rows.is_empty() {
        return Ok(None);
    }
    rows.iter().map(found).collect::<Result<_, _>>().map(Some)
}

/// What makes the table, and what its index.
fn ddl(table: &Table) -> [String; 2] {
    let name = table.quoted('"');
    [
        format!(
            "CREATE TABLE IF NOT EXISTS {name} (\n    \
             message_id text COLLATE \"C\" NOT NULL PRIMARY KEY,\n    \
             state text NOT NULL,\n    \
             owner text,\n    \
             since bigint NOT NULL,\n    \
             expires_at bigint\n)"
        ),
        format!(
            "CREATE INDEX IF NOT EXISTS \"{}\" ON {name} (expires_at)",
            table.index()
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
            ("40001", Contention),
            ("40P01", Contention),
            ("55P03", Contention),
            ("25006", ReadOnly),
            ("57P01", Unavailable),
            ("57P03", Unavailable),
            ("53300", Unavailable),
            ("08006", Unavailable),
            ("57014", Unavailable),
            ("25P03", Unavailable),
            ("25P04", Unavailable),
            ("28P01", Denied),
            ("42501", Denied),
            ("42P01", Schema),
            ("42P10", Schema),
            ("3D000", Schema),
            ("22001", UnsuitableId),
            ("23505", Other),
            ("", Other),
            ("é", Other),
        ] {
            assert_eq!(kind(code), expected, "{code}");
        }
    }

    #[test]
    fn what_is_written_out_needs_no_escape() {
        let ids = ["a-B_1".to_owned(), "$2'; --\\".to_owned()];
        let whole = written_out(
            "x($1::text[], $2::bigint, $3::text)",
            &[
                Parameter::Ids(&ids),
                Parameter::Number(None),
                Parameter::Wait(Duration::from_nanos(1)),
            ],
        );
        assert_eq!(
            whole,
            "x(ARRAY['a-B_1',convert_from(decode('2432273b202d2d5c', 'hex'), 'UTF8')]::text[], \
             NULL::bigint, '1ms'::text)"
        );
    }
}
