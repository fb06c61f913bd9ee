//! The stores in MySQL and MariaDB, against a real server: what they write, what they read of what
//! PHP workers write, what they refuse, and what happens when locks, connections and rights are in
//! the way.
//!
//! `MYSQL_URL` names the server; the tests make and drop tables, a database and users of their own.
//! Run on MariaDB 10.11; nothing here is beyond MySQL 8 but the collation `utf8mb4_nopad_bin`.
#![allow(missing_docs)]

mod support;

#[path = "support/services.rs"]
mod services;

use futures_util::future::join_all;
use services::{PATIENCE, Proxy, unique};
use sqlx::{
    AssertSqlSafe, Connection, Executor, MySqlConnection, MySqlPool, Row,
    mysql::{MySqlConnectOptions, MySqlPoolOptions, MySqlRow},
};
use std::{
    collections::BTreeSet,
    future::Future,
    net::ToSocketAddrs,
    str::FromStr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use support::{deliver, envelope, layer};
use tokio::{sync::Barrier, task::JoinSet, time::sleep};
use tower::{ServiceBuilder, service_fn};
use tower_idempotency::{
    BoxError, Envelope, MessageId, Store,
    error::{BackendError, BackendErrorKind},
    store::{
        MySqlStore,
        foreign::{PHP_TABLE, PhpMySqlStore},
    },
    testing::StoreContract,
};

// ===== help =====

/// Microseconds since 1970 by the server's clock, in UTC.
const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";
const MINUTE: i64 = 60_000_000;

async fn raw(url: &str) -> MySqlConnection {
    MySqlConnection::connect(url).await.unwrap()
}

async fn run(raw: &mut MySqlConnection, statement: impl Into<String>) {
    let statement = statement.into();
    let done = raw.execute(sqlx::raw_sql(AssertSqlSafe(statement.clone())));
    done.await
        .unwrap_or_else(|error| panic!("{statement}: {error}"));
}

async fn fetch(raw: &mut MySqlConnection, statement: impl Into<String>) -> Vec<MySqlRow> {
    let statement = statement.into();
    let rows = raw.fetch_all(sqlx::raw_sql(AssertSqlSafe(statement.clone())));
    rows.await
        .unwrap_or_else(|error| panic!("{statement}: {error}"))
}

async fn number(raw: &mut MySqlConnection, statement: impl Into<String>) -> i64 {
    let statement = format!("SELECT CAST(({}) AS SIGNED)", statement.into());
    fetch(raw, statement).await[0].get(0)
}

async fn text(raw: &mut MySqlConnection, statement: impl Into<String>) -> Option<String> {
    let statement = format!("SELECT CAST(({}) AS CHAR)", statement.into());
    fetch(raw, statement).await[0].get(0)
}

async fn now(raw: &mut MySqlConnection) -> i64 {
    number(raw, format!("SELECT {NOW}")).await
}

/// A row of a table of ours.
#[derive(Debug, PartialEq)]
struct Record {
    id: Vec<u8>,
    state: String,
    owner: Option<String>,
    since: i64,
    expires_at: Option<i64>,
}

async fn records(raw: &mut MySqlConnection, table: &str) -> Vec<Record> {
    let rows = fetch(
        raw,
        format!(
            "SELECT message_id, CAST(state AS CHAR), CAST(owner AS CHAR), since, expires_at \
             FROM {table} ORDER BY message_id"
        ),
    );
    let record = |row: &MySqlRow| Record {
        id: row.get(0),
        state: row.get(1),
        owner: row.get(2),
        since: row.get(3),
        expires_at: row.get(4),
    };
    rows.await.iter().map(record).collect()
}

async fn end(raw: &mut MySqlConnection, table: &str) -> i64 {
    records(raw, table).await[0].expires_at.unwrap()
}

async fn put(raw: &mut MySqlConnection, table: &str, id: &str, state: &str, end: &str) {
    let owner = match state {
        "claimed" => "'000102030405060708090a0b0c0d0e0f'",
        _ => "NULL",
    };
    let row = format!("REPLACE INTO {table} VALUES ('{id}', '{state}', {owner}, {NOW}, {end})");
    run(raw, row).await;
}

async fn drop_table(raw: &mut MySqlConnection, table: &str) {
    run(raw, format!("DROP TABLE {table}")).await;
}

/// Until a statement on this table has been under way for a while, which it is only when it waits.
/// (The server's own list of those that wait is not refreshed while others keep reading it.)
async fn until_waiting(raw: &mut MySqlConnection, table: &str) {
    let start = Instant::now();
    let under_way = format!(
        "SELECT max(id) FROM information_schema.processlist \
         WHERE info LIKE '%`{table}`%' AND id <> CONNECTION_ID()"
    );
    let (mut last, mut looks) = (None, 0);
    while last.is_none() || looks < 10 {
        assert!(start.elapsed() < PATIENCE, "nobody waits");
        sleep(Duration::from_millis(20)).await;
        let now = text(raw, under_way.as_str()).await;
        looks = if now == last { looks + 1 } else { 0 };
        last = now;
    }
}

fn id(text: &str) -> MessageId {
    MessageId::from(text)
}

/// A store on a table of the test's own, and that table's name.
async fn store(url: &str, name: &str, ttl: impl Into<Option<Duration>>) -> (MySqlStore, String) {
    let table = unique(name);
    let builder = MySqlStore::builder(&table).ttl(ttl);
    let store = builder.connect(url).await.unwrap();
    store.migrate().await.unwrap();
    (store, table)
}

/// A pool whose sessions begin with this statement.
async fn pool(url: &str, connections: u32, begin: &str) -> MySqlPool {
    let begin: Arc<str> = begin.into();
    let options = MySqlPoolOptions::new()
        .max_connections(connections)
        .after_connect(move |connection, _| {
            let begin = begin.clone();
            Box::pin(async move {
                if !begin.is_empty() {
                    connection
                        .execute(sqlx::raw_sql(AssertSqlSafe(begin.to_string())))
                        .await?;
                }
                Ok(())
            })
        });
    options.connect(url).await.unwrap()
}

async fn proxied(url: &str) -> (Proxy, String) {
    let server = services::host_and_port(url);
    let target = server.to_socket_addrs().unwrap().next().unwrap();
    let proxy = Proxy::start(target).await;
    let url = url.replace(&server, &proxy.addr().to_string());
    (proxy, url)
}

/// Tries until it succeeds.
async fn heals<T, F>(mut attempt: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, BackendError>>,
{
    let start = Instant::now();
    loop {
        match attempt().await {
            Ok(answer) => return answer,
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                assert!(start.elapsed() < PATIENCE, "{error}");
            }
        }
        sleep(Duration::from_millis(20)).await;
    }
}

// ===== what is stored =====

#[tokio::test]
async fn a_mark_is_a_row_with_its_end_in_the_servers_clock() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (_, table) = store(&url, "rows", None).await;
    let day = Duration::from_secs(24 * 3600);
    let longest = Duration::from_micros(i64::MAX as u64 / 2 / 1000 * 1000);
    for (ttl, lasts) in [
        (Some(day), Some(day)),
        // Rounded up to whole milliseconds.
        (
            Some(Duration::from_nanos(1_500_001)),
            Some(Duration::from_millis(2)),
        ),
        (
            Some(Duration::from_nanos(1)),
            Some(Duration::from_millis(1)),
        ),
        (Some(longest), Some(longest)),
        (Some(Duration::MAX), None),
        (Some(Duration::from_secs(u64::MAX)), None),
        (None, None),
    ] {
        let builder = MySqlStore::builder(&table).ttl(ttl);
        let store = builder.connect(&url).await.unwrap();
        for before in ["absent", "done", "claimed", "over"] {
            match before {
                "absent" => run(&mut raw, format!("DELETE FROM {table}")).await,
                "over" => put(&mut raw, &table, "m", "done", "1").await,
                state => put(&mut raw, &table, "m", state, &format!("{NOW} + {MINUTE}")).await,
            }
            let t0 = now(&mut raw).await;
            store.remember(&id("m")).await.unwrap();
            let t1 = now(&mut raw).await;
            let [record] = records(&mut raw, &table).await.try_into().unwrap();
            assert_eq!((&record.id[..], record.state.as_str()), (&b"m"[..], "done"));
            assert_eq!(record.owner, None, "{before}");
            assert!((t0..=t1).contains(&record.since), "{record:?} {t0} {t1}");
            match (lasts, record.expires_at) {
                (Some(lasts), Some(end)) => {
                    let lasts = lasts.as_micros() as i64;
                    assert!(
                        (t0 + lasts..=t1 + lasts).contains(&end),
                        "{ttl:?} {record:?}"
                    );
                }
                (None, None) => {}
                _ => panic!("{ttl:?} {record:?}"),
            }
        }
    }
    let default = MySqlStore::connect(&url, &table).await.unwrap();
    default.remember(&id("m")).await.unwrap();
    let left = end(&mut raw, &table).await - now(&mut raw).await;
    let day = day.as_micros() as i64;
    assert!((day - MINUTE..=day).contains(&left), "{left}");
    default.forget(&id("m")).await.unwrap();
    assert_eq!(records(&mut raw, &table).await, []);
    drop_table(&mut raw, &table).await;
}

#[tokio::test]
async fn only_what_is_done_and_not_over_was_seen() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (store, table) = store(&url, "reads", Duration::from_secs(60)).await;
    for (state, end, seen) in [
        ("done", "NULL".to_owned(), true),
        ("done", format!("{NOW} + {MINUTE}"), true),
        ("done", format!("{NOW} - 1"), false),
        ("done", "0".to_owned(), false),
        ("claimed", "NULL".to_owned(), false),
        ("claimed", format!("{NOW} + {MINUTE}"), false),
        ("claimed", format!("{NOW} - 1"), false),
        ("DONE", "NULL".to_owned(), false),
        ("", "NULL".to_owned(), false),
    ] {
        put(&mut raw, &table, "m", state, &end).await;
        assert_eq!(store.seen(&id("m")).await.unwrap(), seen, "{state} {end}");
        // A mark stands whatever was there; forgetting leaves nothing.
        store.remember(&id("m")).await.unwrap();
        assert!(store.seen(&id("m")).await.unwrap());
        put(&mut raw, &table, "m", state, &end).await;
        store.forget(&id("m")).await.unwrap();
        assert_eq!(records(&mut raw, &table).await, [], "{state} {end}");
    }
    drop_table(&mut raw, &table).await;
}

#[tokio::test]
async fn an_id_ends_when_its_row_says() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    for millis in [50, 250, 999] {
        let ttl = Duration::from_millis(millis);
        let (store, table) = store(&url, "ends", ttl).await;
        store.remember(&id("m")).await.unwrap();
        let end = end(&mut raw, &table).await;
        loop {
            let before = now(&mut raw).await;
            let seen = store.seen(&id("m")).await.unwrap();
            let after = now(&mut raw).await;
            // In between, either answer is right.
            if after < end {
                assert!(seen, "over {} us early", end - after);
            }
            if before > end {
                assert!(!seen, "{} us late", before - end);
                break;
            }
        }
        drop_table(&mut raw, &table).await;
    }
}

#[tokio::test]
async fn ids_are_stored_verbatim_or_as_their_hash() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (store, table) = store(&url, "ids", None).await;
    let (fits, long) = ("x".repeat(255), "x".repeat(256));
    let hash = "sha256:85e62acd750c4eb56b7b6a1d66dca5bfaac5f062608a1a893410d0288936c09a";
    let empty_hash = "sha256:9fd714ce6f63c3b320c944b70e80a5d105fd2f3e2d30ae2fa81370e223f50d07";
    for (given, stored) in [
        ("a", "a"),
        ("A", "A"),
        ("a ", "a "),
        ("a\\'\"`%_;--", "a\\'\"`%_;--"),
        ("é", "é"),
        ("e\u{301}", "e\u{301}"),
        ("🦀", "🦀"),
        (&fits, &fits),
        (&long, hash),
        ("sha256:", empty_hash),
    ] {
        store.remember(&id(given)).await.unwrap();
        let rows = records(&mut raw, &table).await;
        assert_eq!(rows.len(), 1, "{given:?}");
        assert_eq!(rows[0].id, stored.as_bytes(), "{given:?}");
        assert!(store.seen(&id(given)).await.unwrap());
        store.forget(&id(given)).await.unwrap();
    }
    // What a hash is spelled like is an id of its own, and a NUL does not end one.
    store.remember(&id(&long)).await.unwrap();
    assert!(!store.seen(&id(hash)).await.unwrap());
    store.remember(&id("a\0b")).await.unwrap();
    for other in ["a", "a\0", "a\0c"] {
        assert!(!store.seen(&id(other)).await.unwrap(), "{other:?}");
    }
    drop_table(&mut raw, &table).await;
}

#[tokio::test]
async fn ids_that_a_collation_would_fold_are_different() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (store, table) = store(&url, "folds", None).await;
    for family in FOLDED {
        for (at, one) in family.iter().enumerate() {
            store.remember(&id(one)).await.unwrap();
            for other in &family[at + 1..] {
                assert!(!store.seen(&id(other)).await.unwrap(), "{one:?} {other:?}");
            }
        }
    }
    drop_table(&mut raw, &table).await;
}

/// What the collations of MySQL take for one, some or other of them.
const FOLDED: &[&[&str]] = &[
    &["AbC", "abc", "ABC", "ａｂｃ"],
    &["a", "a ", "a  ", "a\t", "a\u{a0}", " a", "a\n", "a\r\n"],
    &["é", "e\u{301}", "e", "É", "E"],
    &["ß", "ss", "ẞ", "SS"],
    &["i", "ı", "I", "İ"],
    &["🦀", "🐙", "?"],
    &["1", "01", "1.0", "+1", "１"],
];

#[tokio::test]
async fn ddl_makes_what_migrate_makes() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (_, migrated) = store(&url, "migrated", None).await;
    let table = unique("by_hand");
    let by_hand = MySqlStore::connect(&url, &table).await.unwrap();
    run(&mut raw, by_hand.ddl()).await;
    let mut made = Vec::new();
    for table in [&migrated, &table] {
        let create = fetch(&mut raw, format!("SHOW CREATE TABLE {table}")).await;
        made.push(create[0].get::<String, _>(1).replace(table.as_str(), "T"));
    }
    assert_eq!(made[0], made[1]);
    assert!(
        made[0].contains("PRIMARY KEY (`message_id`)"),
        "{}",
        made[0]
    );
    assert!(made[0].contains("`message_id` varbinary(255) NOT NULL"));
    assert!(made[0].contains("KEY `T_expires_at` (`expires_at`)"));
    // There is nothing left to do, and it does.
    by_hand.migrate().await.unwrap();
    by_hand.remember(&id("m")).await.unwrap();
    assert!(by_hand.seen(&id("m")).await.unwrap());
    drop_table(&mut raw, &migrated).await;
    drop_table(&mut raw, &table).await;
}

// ===== settings of the session =====

#[tokio::test]
async fn the_time_zone_of_a_session_shifts_no_end() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (plain, table) = store(&url, "zones", Duration::from_secs(60)).await;
    // Not loaded on every server.
    let named = text(
        &mut raw,
        "SELECT CONVERT_TZ('2026-01-01', 'UTC', 'Europe/Berlin')",
    )
    .await;
    let zones = ["+05:00", "-11:00", "+12:45", "Europe/Berlin"];
    let zones = &zones[..if named.is_some() { 4 } else { 3 }];
    for zone in zones {
        let options = MySqlConnectOptions::from_str(&url)
            .unwrap()
            .timezone(Some((*zone).to_owned()));
        let pool = MySqlPoolOptions::new().connect_with(options).await.unwrap();
        let mut session = pool.acquire().await.unwrap();
        assert_eq!(
            text(&mut session, "SELECT @@session.time_zone")
                .await
                .as_deref(),
            Some(*zone)
        );
        drop(session);
        let zoned = MySqlStore::builder(&table)
            .ttl(Duration::from_secs(60))
            .pool(pool)
            .unwrap();
        let t0 = now(&mut raw).await;
        zoned.remember(&id("m")).await.unwrap();
        let t1 = now(&mut raw).await;
        let end = end(&mut raw, &table).await;
        assert!((t0 + MINUTE..=t1 + MINUTE).contains(&end), "{zone}");
        assert!(plain.seen(&id("m")).await.unwrap(), "{zone}");
        plain.remember(&id("n")).await.unwrap();
        assert!(zoned.seen(&id("n")).await.unwrap(), "{zone}");
        // Nor does it move what a purge takes for over.
        put(
            &mut raw,
            &table,
            "over",
            "done",
            &format!("{NOW} - {MINUTE}"),
        )
        .await;
        assert_eq!(zoned.purge().await.unwrap(), 1, "{zone}");
        run(&mut raw, format!("DELETE FROM {table}")).await;
    }
    drop_table(&mut raw, &table).await;
}

#[tokio::test]
async fn no_mode_of_a_session_changes_an_id() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    for mode in [
        // Not strict: what does not fit is cut, with a warning.
        "",
        "ANSI_QUOTES",
        "NO_BACKSLASH_ESCAPES",
        "ANSI",
        "TRADITIONAL",
        "PAD_CHAR_TO_FULL_LENGTH",
        "NO_UNSIGNED_SUBTRACTION,IGNORE_SPACE,HIGH_NOT_PRECEDENCE",
    ] {
        let table = unique("modes");
        let pool = pool(&url, 2, &format!("SET SESSION sql_mode = '{mode}'")).await;
        let store = MySqlStore::builder(&table).pool(pool).unwrap();
        store.migrate().await.unwrap();
        store.migrate().await.unwrap();
        let ids: Vec<String> = [255, 256, 1024, 65536]
            .into_iter()
            .flat_map(|len| ["x", "y"].map(|last| "é".repeat(len / 2 - 1) + "_" + last))
            .chain(["a\\", "a\\\\", "a'", "a\"", "a`", "a\0", "a"].map(Into::into))
            .collect();
        for (at, one) in ids.iter().enumerate() {
            assert!(!store.seen(&id(one)).await.unwrap(), "{mode}: {at}");
            store.remember(&id(one)).await.unwrap();
            assert!(store.seen(&id(one)).await.unwrap(), "{mode}: {at}");
        }
        assert_eq!(records(&mut raw, &table).await.len(), ids.len());
        put(&mut raw, &table, "over", "done", "1").await;
        assert_eq!(store.purge().await.unwrap(), 1, "{mode}");
        for one in &ids {
            store.forget(&id(one)).await.unwrap();
        }
        assert_eq!(records(&mut raw, &table).await, [], "{mode}");
        drop_table(&mut raw, &table).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_deadlock_comes_through_at_any_isolation() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    for isolation in ["REPEATABLE READ", "READ COMMITTED", "SERIALIZABLE"] {
        let table = unique("hot");
        let begin = format!("SET SESSION TRANSACTION ISOLATION LEVEL {isolation}");
        let pool = pool(&url, 16, &begin).await;
        let store = MySqlStore::builder(&table).pool(pool).unwrap();
        store.migrate().await.unwrap();
        let until = Instant::now() + Duration::from_secs(3);
        let mut tasks = JoinSet::new();
        for task in 0..64_usize {
            let store = store.clone();
            tasks.spawn(async move {
                let mut kept = Vec::new();
                // A poor man's dice, different in each task.
                let mut dice = task * 7919 + 1;
                let mut turn = 0;
                // Some turns on a slow machine as well.
                while turn < 4 || Instant::now() < until {
                    turn += 1;
                    dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let hot = id(&format!("hot-{}", (dice >> 33) % 200));
                    match (dice >> 13) % 4 {
                        0 => store.forget(&hot).await?,
                        1 => drop(store.seen(&hot).await?),
                        _ => store.remember(&hot).await?,
                    }
                    // Nobody else touches these.
                    let own = id(&format!("{:016x}-{task}-{turn}", dice));
                    store.remember(&own).await?;
                    assert!(store.seen(&own).await?, "{own:?} is lost");
                    if turn % 3 == 0 {
                        store.forget(&own).await?;
                        assert!(!store.seen(&own).await?, "{own:?} is back");
                    } else {
                        kept.push(own);
                    }
                }
                Ok::<_, BackendError>(kept)
            });
        }
        let mut kept = BTreeSet::new();
        while let Some(task) = tasks.join_next().await {
            let task = task
                .unwrap()
                .unwrap_or_else(|e| panic!("{isolation}: {e:?}"));
            kept.extend(task.iter().map(|own| own.as_bytes().to_vec()));
        }
        assert!(kept.len() > 64, "{isolation}: {}", kept.len());
        let rows = records(&mut raw, &table).await;
        let stored: BTreeSet<Vec<u8>> = rows.into_iter().map(|row| row.id).collect();
        assert!(kept.is_subset(&stored), "{isolation}");
        drop_table(&mut raw, &table).await;
    }
}

#[tokio::test]
async fn the_snapshot_of_another_transaction_does_not_matter() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (writer, table) = store(&url, "snapshot", None).await;
    let begin = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ";
    let pool = pool(&url, 1, begin).await;
    let reader = MySqlStore::builder(&table).pool(pool).unwrap();
    // The reader's session has read before, and a transaction with a snapshot stays open.
    assert!(!reader.seen(&id("m")).await.unwrap());
    run(
        &mut raw,
        "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    )
    .await;
    run(&mut raw, "START TRANSACTION WITH CONSISTENT SNAPSHOT").await;
    writer.remember(&id("m")).await.unwrap();
    assert_eq!(records(&mut raw, &table).await, [], "the snapshot is open");
    assert!(reader.seen(&id("m")).await.unwrap());
    reader.remember(&id("m")).await.unwrap();
    writer.forget(&id("m")).await.unwrap();
    assert!(!reader.seen(&id("m")).await.unwrap());
    run(&mut raw, "COMMIT").await;
    drop_table(&mut raw, &table).await;
}

// ===== PHP's table =====

async fn php_table(raw: &mut MySqlConnection, key: &str) -> String {
    let table = unique("php");
    let ddl = format!(
        "CREATE TABLE {table} (message_id VARCHAR(255) {key} PRIMARY KEY, \
         state VARCHAR(16) NOT NULL, expires_at BIGINT NULL) DEFAULT CHARSET utf8mb4"
    );
    run(raw, ddl).await;
    table
}

async fn php(url: &str, table: &str) -> PhpMySqlStore {
    PhpMySqlStore::connect(url, table).await.unwrap()
}

/// State and end of the one row.
async fn php_rows(raw: &mut MySqlConnection, table: &str) -> Vec<(String, Option<i64>)> {
    let rows = fetch(
        raw,
        format!("SELECT CAST(state AS CHAR), expires_at FROM {table}"),
    );
    let row = |row: &MySqlRow| (row.get(0), row.get(1));
    rows.await.iter().map(row).collect()
}

#[tokio::test]
async fn php_workers_share_their_record() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let table = php_table(&mut raw, "CHARACTER SET ascii COLLATE ascii_bin").await;
    run(
        &mut raw,
        format!("ALTER TABLE {table} MODIFY message_id VARBINARY(255) NOT NULL"),
    )
    .await;
    let (store, m) = (php(&url, &table).await, id("m"));
    let claim = format!("INSERT INTO {table} VALUES ('m', 'claimed', UNIX_TIMESTAMP() + 60)");
    let seen =
        format!("UPDATE {table} SET state = 'seen', expires_at = NULL WHERE message_id = 'm'");
    let release = format!("DELETE FROM {table} WHERE message_id = 'm' AND state = 'claimed'");
    let is_seen = format!("SELECT count(*) FROM {table} WHERE message_id = 'm' AND state = 'seen'");

    assert!(!store.seen(&m).await.unwrap());
    // They claim, release, claim and finish.
    run(&mut raw, claim.as_str()).await;
    assert!(!store.seen(&m).await.unwrap());
    run(&mut raw, release.as_str()).await;
    assert!(!store.seen(&m).await.unwrap());
    run(&mut raw, claim.as_str()).await;
    run(&mut raw, seen.as_str()).await;
    assert!(store.seen(&m).await.unwrap());
    // A mark of ours over theirs, and one over a claim of theirs: as they write it.
    store.remember(&m).await.unwrap();
    assert_eq!(php_rows(&mut raw, &table).await, [("seen".into(), None)]);
    store.forget(&m).await.unwrap();
    assert_eq!(php_rows(&mut raw, &table).await, []);
    run(&mut raw, claim.as_str()).await;
    store.remember(&m).await.unwrap();
    assert_eq!(php_rows(&mut raw, &table).await, [("seen".into(), None)]);
    // Their release of a claim that we made a mark of changes nothing.
    run(&mut raw, release.as_str()).await;
    assert_eq!(number(&mut raw, is_seen.as_str()).await, 1);
    assert!(store.seen(&m).await.unwrap());
    // A mark of ours where there was nothing stands in the way of a claim of theirs.
    store.forget(&m).await.unwrap();
    store.remember(&m).await.unwrap();
    assert_eq!(number(&mut raw, is_seen.as_str()).await, 1);
    let again = raw.execute(sqlx::raw_sql(AssertSqlSafe(claim))).await;
    let again = again.unwrap_err().into_database_error().unwrap();
    assert!(again.is_unique_violation(), "{again}");
    store.forget(&m).await.unwrap();
    assert_eq!(number(&mut raw, is_seen.as_str()).await, 0);
    // What else may stand in the state is no mark.
    for state in ["SEEN", "seen ", "", "done"] {
        run(
            &mut raw,
            format!("REPLACE INTO {table} VALUES ('m', '{state}', NULL)"),
        )
        .await;
        let seen = store.seen(&m).await.unwrap();
        // Where the collation of *their* column takes it for `seen`, so do they.
        let theirs = number(&mut raw, is_seen.as_str()).await == 1;
        assert_eq!(seen, theirs, "{state:?}");
    }
    assert_eq!(PHP_TABLE, "bq_idempotency");
    drop_table(&mut raw, &table).await;
}

/// What `utf8mb4_nopad_bin` is called on this server.
async fn exact_collation(raw: &mut MySqlConnection) -> String {
    let exact = text(
        raw,
        "SELECT min(collation_name) FROM information_schema.collations \
         WHERE collation_name IN ('utf8mb4_nopad_bin', 'utf8mb4_0900_bin')",
    );
    exact.await.expect("a byte-exact collation")
}

#[tokio::test]
async fn a_key_that_takes_two_ids_for_one_is_refused_with_the_statement_that_mends_it() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    for key in [
        "COLLATE utf8mb4_general_ci",
        "COLLATE utf8mb4_bin",
        "COLLATE utf8mb4_unicode_ci",
        "CHARACTER SET latin1 COLLATE latin1_bin",
    ] {
        let table = php_table(&mut raw, key).await;
        run(
            &mut raw,
            format!("INSERT INTO {table} VALUES ('before', 'seen', NULL)"),
        )
        .await;
        let store = php(&url, &table).await;
        let mut told = String::new();
        let m = id("m");
        for refused in [
            store.seen(&m).await.map(drop),
            store.remember(&m).await,
            store.forget(&m).await,
        ] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), BackendErrorKind::Schema, "{key}: {error}");
            assert!(!error.is_retryable());
            told = error.to_string();
        }
        assert_eq!(php_rows(&mut raw, &table).await.len(), 1, "{key}");
        let alter = told.split('`').collect::<Vec<_>>().join("`");
        let alter = alter.split_once("run `").expect("what to run").1;
        let alter = alter.strip_suffix('`').unwrap();
        assert!(alter.starts_with("ALTER TABLE "), "{told}");
        run(&mut raw, alter).await;
        // The same store serves from now on, and no two of these are one.
        assert!(store.seen(&id("before")).await.unwrap(), "{key}");
        for (at, one) in FOLDED.iter().copied().flatten().enumerate() {
            assert!(!store.seen(&id(one)).await.unwrap(), "{key}: {one:?}");
            store.remember(&id(one)).await.unwrap();
            assert_eq!(php_rows(&mut raw, &table).await.len(), at + 2, "{key}");
        }
        drop_table(&mut raw, &table).await;
    }
}

#[tokio::test]
async fn a_key_that_is_byte_exact_is_taken_as_it_is() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let exact = exact_collation(&mut raw).await;
    let table = php_table(&mut raw, &format!("COLLATE {exact}")).await;
    let store = php(&url, &table).await;
    for (at, one) in FOLDED.iter().copied().flatten().enumerate() {
        assert!(!store.seen(&id(one)).await.unwrap(), "{one:?}");
        store.remember(&id(one)).await.unwrap();
        assert!(store.seen(&id(one)).await.unwrap(), "{one:?}");
        assert_eq!(php_rows(&mut raw, &table).await.len(), at + 1);
    }
    drop_table(&mut raw, &table).await;
}

/// In a column of another character set, what it lacks becomes `?` where the mode is not strict.
#[tokio::test]
async fn a_key_that_cannot_hold_all_characters_is_refused() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let others = fetch(
        &mut raw,
        "SELECT CAST(collation_name AS CHAR), CAST(character_set_name AS CHAR) \
         FROM information_schema.collations WHERE collation_name LIKE '%\\_nopad\\_bin' \
         AND character_set_name IN ('latin1', 'ascii', 'utf8mb3', 'utf8')",
    )
    .await;
    for other in others {
        let (collation, charset): (String, String) = (other.get(0), other.get(1));
        let key = format!("CHARACTER SET {charset} COLLATE {collation}");
        let table = php_table(&mut raw, &key).await;
        let pool = pool(&url, 1, "SET SESSION sql_mode = ''").await;
        let store = PhpMySqlStore::builder(&table).pool(pool).unwrap();
        let refused = store.remember(&id("🦀")).await;
        let taken = store.seen(&id("?")).await.unwrap_or(false);
        assert!(!taken, "{collation}: `?` was never remembered");
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Schema, "{collation}");
        drop_table(&mut raw, &table).await;
    }
}

#[tokio::test]
async fn an_id_that_phps_column_cannot_hold_is_not_cut() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let exact = exact_collation(&mut raw).await;
    for (key, unit) in [
        // So many characters, or so many bytes.
        (format!("VARCHAR(20) COLLATE {exact}"), "é"),
        ("VARBINARY(40)".to_owned(), "é"),
        ("VARBINARY(20)".to_owned(), "e"),
    ] {
        for mode in ["", "STRICT_ALL_TABLES"] {
            let table = php_table(&mut raw, "").await;
            run(
                &mut raw,
                format!("ALTER TABLE {table} MODIFY message_id {key} NOT NULL"),
            )
            .await;
            let pool = pool(&url, 2, &format!("SET SESSION sql_mode = '{mode}'")).await;
            let store = PhpMySqlStore::builder(&table).pool(pool).unwrap();
            let (fits, long) = (id(&unit.repeat(20)), id(&unit.repeat(21)));
            store.remember(&fits).await.unwrap();
            assert!(store.seen(&fits).await.unwrap());
            for long in [&long, &id(&unit.repeat(60_000))] {
                assert!(!store.seen(long).await.unwrap(), "{key}");
                let error = store.remember(long).await.unwrap_err();
                assert_eq!(error.kind(), BackendErrorKind::UnsuitableId, "{key}");
                assert!(!error.is_retryable());
                store.forget(long).await.unwrap();
                assert!(!store.seen(long).await.unwrap(), "{key}");
            }
            // Nor was the one that they begin with touched.
            assert!(store.seen(&fits).await.unwrap(), "{key}");
            assert_eq!(php_rows(&mut raw, &table).await.len(), 1);
            drop_table(&mut raw, &table).await;
        }
    }
}

/// Other than in `contract.rs`, where the column is binary.
#[tokio::test(flavor = "multi_thread")]
async fn phps_record_keeps_the_contract_with_a_collation_that_is_exact() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let exact = exact_collation(&mut raw).await;
    let tables = Mutex::new(Vec::new());
    StoreContract::new(async |ttl| {
        let table = unique("php_contract");
        let mut raw = MySqlConnection::connect(&url).await.unwrap();
        let make = format!(
            "CREATE TABLE {table} (message_id VARCHAR(255) COLLATE {exact} PRIMARY KEY, \
             state VARCHAR(16) NOT NULL, expires_at BIGINT NULL)"
        );
        run(&mut raw, make).await;
        tables.lock().unwrap().push(table.clone());
        let builder = PhpMySqlStore::builder(&table).ttl(ttl);
        builder.connect(&url).await.unwrap()
    })
    .ids(|id| id.chars().count() <= 255)
    .no_expiry()
    .check()
    .await;
    for table in tables.into_inner().unwrap() {
        drop_table(&mut raw, &table).await;
    }
}

#[tokio::test]
async fn sessions_that_commit_nothing_are_refused() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let table = unique("autocommit");
    let store = MySqlStore::connect(&url, &table).await.unwrap();
    store.migrate().await.unwrap();

    let pool = sqlx::mysql::MySqlPoolOptions::new().after_connect(|session, _| {
        Box::pin(async move {
            session
                .execute(sqlx::raw_sql("SET SESSION autocommit = 0"))
                .await
                .map(drop)
        })
    });
    let pool = pool.connect(&url).await.unwrap();
    let silent = MySqlStore::builder(&table).pool(pool).unwrap();
    let error = silent.remember(&id("m")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Config);
    assert!(error.to_string().contains("autocommit"), "{error}");
    assert!(!store.seen(&id("m")).await.unwrap());
    drop_table(&mut raw, &table).await;
}

// ===== tables that do not serve =====

#[tokio::test]
async fn a_table_that_does_not_serve_is_refused() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let rest = "state VARCHAR(16), owner VARCHAR(32), since BIGINT, expires_at BIGINT";
    for (columns, complaint) in [
        // Without a key two workers both insert.
        (format!("message_id VARBINARY(255), {rest}"), "primary key"),
        (
            format!("message_id VARBINARY(255), {rest}, KEY (message_id)"),
            "primary key",
        ),
        (
            format!("message_id VARBINARY(255), {rest}, UNIQUE (message_id, state)"),
            "primary key",
        ),
        (
            format!("message_id VARBINARY(255), {rest}, UNIQUE (message_id(20))"),
            "primary key",
        ),
        // The purge goes by the primary one.
        (
            format!("message_id VARBINARY(255) NOT NULL, {rest}, UNIQUE (message_id)"),
            "primary key",
        ),
        (
            format!("message_id VARCHAR(255) PRIMARY KEY, {rest}"),
            "`message_id`",
        ),
        (
            format!("message_id VARBINARY(64) PRIMARY KEY, {rest}"),
            "room",
        ),
        (
            format!("message_id BIGINT PRIMARY KEY, {rest}"),
            "`message_id`",
        ),
        (
            "message_id VARBINARY(255) PRIMARY KEY, state VARCHAR(16), owner VARCHAR(32), \
             since BIGINT, expires_at DATETIME"
                .into(),
            "`expires_at`",
        ),
        (
            "message_id VARBINARY(255) PRIMARY KEY, state VARCHAR(16), owner VARCHAR(32), \
             since BIGINT, expires_at INT"
                .into(),
            "`expires_at`",
        ),
        (
            "message_id VARBINARY(255) PRIMARY KEY, state VARCHAR(16), expires_at BIGINT".into(),
            "`owner`",
        ),
    ] {
        let table = unique("unfit");
        run(&mut raw, format!("CREATE TABLE {table} ({columns})")).await;
        let store = MySqlStore::connect(&url, &table).await.unwrap();
        let m = id("m");
        for refused in [
            store.migrate().await,
            store.remember(&m).await,
            store.seen(&m).await.map(drop),
        ] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), BackendErrorKind::Schema, "{columns}");
            assert!(error.to_string().contains(complaint), "{columns}: {error}");
            assert!(!error.is_retryable());
        }
        assert_eq!(
            number(&mut raw, format!("SELECT count(*) FROM {table}")).await,
            0
        );
        drop_table(&mut raw, &table).await;
    }
}

#[tokio::test]
async fn a_missing_table_names_what_makes_it() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let table = unique("missing");
    let store = MySqlStore::connect(&url, &table).await.unwrap();
    let m = id("m");
    // Missing from the start, then dropped under way.
    for _ in 0..2 {
        for missing in [
            store.seen(&m).await.map(drop),
            store.remember(&m).await,
            store.forget(&m).await,
            store.purge().await.map(drop),
        ] {
            let error = missing.unwrap_err();
            assert_eq!(error.kind(), BackendErrorKind::Schema);
            assert!(!error.is_retryable());
            let told = error.to_string();
            assert!(
                told.contains("migrate()") && told.contains(&table),
                "{told}"
            );
        }
        store.migrate().await.unwrap();
        store.remember(&m).await.unwrap();
        assert!(store.seen(&m).await.unwrap());
        drop_table(&mut raw, &table).await;
    }
}

// ===== locks =====

#[tokio::test]
async fn an_end_counts_from_after_the_wait_for_a_lock() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let ttl = Duration::from_millis(300);
    for (before, holds, ends) in [
        // The row is there: it is updated.
        ("done", "UPDATE {t} SET since = 1", "COMMIT"),
        ("done", "UPDATE {t} SET since = 1", "ROLLBACK"),
        ("claimed", "SELECT * FROM {t} FOR UPDATE", "COMMIT"),
        // It goes away meanwhile: it is inserted.
        ("done", "DELETE FROM {t}", "COMMIT"),
        ("done", "DELETE FROM {t}", "ROLLBACK"),
        // Another session inserts it.
        (
            "",
            "INSERT INTO {t} VALUES ('m', 'done', NULL, 1, 1)",
            "COMMIT",
        ),
        (
            "",
            "INSERT INTO {t} VALUES ('m', 'done', NULL, 1, 1)",
            "ROLLBACK",
        ),
        (
            "",
            "INSERT INTO {t} VALUES ('m', 'claimed', 'x', 1, NULL)",
            "COMMIT",
        ),
    ] {
        let (store, table) = store(&url, "waits", ttl).await;
        let mut holder = MySqlConnection::connect(&url).await.unwrap();
        if !before.is_empty() {
            put(&mut raw, &table, "m", before, &format!("{NOW} + {MINUTE}")).await;
        }
        run(&mut holder, "START TRANSACTION").await;
        run(&mut holder, holds.replace("{t}", &table)).await;
        let waiting = tokio::spawn(store.remember(&id("m")));
        until_waiting(&mut raw, &table).await;
        // Far longer than the id is to live.
        sleep(Duration::from_millis(1500)).await;
        let t0 = now(&mut raw).await;
        run(&mut holder, ends).await;
        waiting.await.unwrap().unwrap();
        let t1 = now(&mut raw).await;
        let ttl = ttl.as_micros() as i64;
        let [record] = records(&mut raw, &table).await.try_into().unwrap();
        let end = record.expires_at.unwrap();
        assert!(
            (t0 + ttl..=t1 + ttl).contains(&end),
            "{holds} {ends}: {} us from the earliest right end",
            end - t0 - ttl
        );
        assert_eq!((record.state.as_str(), record.owner), ("done", None));
        assert!(record.since >= t0, "{holds} {ends}");
        drop_table(&mut raw, &table).await;
    }
}

/// A session that holds the row of `m`.
async fn hold(url: &str, table: &str) -> MySqlConnection {
    let mut holder = raw(url).await;
    put(&mut holder, table, "m", "claimed", "NULL").await;
    run(&mut holder, "START TRANSACTION").await;
    let lock = format!("SELECT * FROM {table} WHERE message_id = 'm' FOR UPDATE");
    run(&mut holder, lock).await;
    holder
}

#[tokio::test]
async fn a_lock_that_the_server_waits_for_too_long_can_be_tried_again() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (_, table) = store(&url, "patience", None).await;
    let pool = pool(&url, 2, "SET SESSION innodb_lock_wait_timeout = 1").await;
    let store = MySqlStore::builder(&table).pool(pool).unwrap();
    let mut holder = hold(&url, &table).await;
    for refused in [store.remember(&id("m")).await, store.forget(&id("m")).await] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Contention, "{error}");
        assert!(error.is_retryable());
    }
    // Neither readers nor other ids wait for it.
    assert!(!store.seen(&id("m")).await.unwrap());
    store.remember(&id("n")).await.unwrap();
    run(&mut holder, "COMMIT").await;
    store.remember(&id("m")).await.unwrap();
    assert!(store.seen(&id("m")).await.unwrap());
    drop_table(&mut raw, &table).await;
}

#[tokio::test]
async fn a_row_that_is_held_too_long_leaves_the_pool_usable() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (_, table) = store(&url, "held", None).await;
    let pool = pool(&url, 1, "").await;
    let store = MySqlStore::builder(&table)
        .response_timeout(Duration::from_millis(400))
        .pool(pool.clone())
        .unwrap();
    assert!(!store.seen(&id("m")).await.unwrap());
    let mut holder = hold(&url, &table).await;
    for _ in 0..2 {
        let start = Instant::now();
        let error = store.remember(&id("m")).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Unavailable, "{error}");
        assert!(error.is_retryable());
        assert!(start.elapsed() >= Duration::from_millis(400));
        assert!(start.elapsed() < Duration::from_secs(10));
        // The one connection there may be is not the one that still waits.
        store.remember(&id("n")).await.unwrap();
        assert!(store.seen(&id("n")).await.unwrap());
        assert!(!store.seen(&id("m")).await.unwrap());
    }
    run(&mut holder, "ROLLBACK").await;
    store.remember(&id("m")).await.unwrap();
    assert!(store.seen(&id("m")).await.unwrap());
    drop_table(&mut raw, &table).await;
}

// ===== connections =====

#[tokio::test(flavor = "multi_thread")]
async fn lost_connections_heal() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (_, table) = store(&url, "faults", None).await;
    let (proxy, through) = proxied(&url).await;
    let store = MySqlStore::builder(&table)
        .response_timeout(Duration::from_millis(500))
        .max_connections(4)
        .connect(&through)
        .await
        .unwrap();
    store.remember(&id("before")).await.unwrap();

    // Cut while idle.
    proxy.cut();
    heals(|| store.seen(&id("before"))).await;
    // Cut under way: unknown, so an error, and not that it is well.
    let mut holder = hold(&url, &table).await;
    let waiting = tokio::spawn(store.remember(&id("m")));
    until_waiting(&mut raw, &table).await;
    proxy.cut();
    let error = waiting.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable, "{error}");
    run(&mut holder, "COMMIT").await;
    heals(|| store.remember(&id("m"))).await;
    assert!(store.seen(&id("m")).await.unwrap());

    // Nobody there.
    proxy.refuse(true);
    proxy.cut();
    let error = store.seen(&id("before")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable, "{error}");
    let error = store.purge().await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable, "{error}");
    let error = MySqlStore::connect(&through, &table).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable, "{error}");
    proxy.refuse(false);
    assert!(heals(|| store.seen(&id("before"))).await);

    // Connections that are there and dead: each is found out within the time limit.
    let mut asked = JoinSet::new();
    for n in 0..8 {
        asked.spawn(store.remember(&id(&format!("warm-{n}"))));
    }
    while let Some(answer) = asked.join_next().await {
        answer.unwrap().unwrap();
    }
    proxy.swallow_present();
    let start = Instant::now();
    let error = store.seen(&id("before")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable, "{error}");
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(heals(|| store.seen(&id("before"))).await);
    heals(|| store.remember(&id("after"))).await;
    assert!(heals(|| store.seen(&id("after"))).await);
    assert!(!heals(|| store.seen(&id("never"))).await);
    drop_table(&mut raw, &table).await;
}

#[tokio::test]
async fn errors_of_access_say_what_they_are() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (database, user) = (unique("db"), unique("u"));
    let options = MySqlConnectOptions::from_str(&url).unwrap();
    let host = services::host_and_port(&url);
    assert_eq!(options.get_host(), host.rsplit_once(':').unwrap().0);
    run(&mut raw, format!("CREATE DATABASE {database}")).await;
    run(
        &mut raw,
        format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'right-word'"),
    )
    .await;

    // A table in a schema that is not the connection's.
    let qualified = format!("{database}.seen");
    let root = MySqlStore::connect(&url, &qualified).await.unwrap();
    root.migrate().await.unwrap();
    root.migrate().await.unwrap();
    root.remember(&id("m")).await.unwrap();
    assert_eq!(records(&mut raw, &qualified).await.len(), 1);

    let wrong = format!("mysql://{user}:wrong-word@{host}/{database}");
    let error = MySqlStore::connect(&wrong, "seen").await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{error}");
    assert!(!error.is_retryable());
    assert!(!format!("{error} {error:?}").contains("wrong-word"));
    let theirs = format!("mysql://{user}:right-word@{host}/{database}");
    // Not a right on anything there.
    let error = MySqlStore::connect(&theirs, "seen").await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{error}");
    // May look but not touch.
    run(
        &mut raw,
        format!("GRANT SELECT ON {database}.* TO '{user}'@'%'"),
    )
    .await;
    let reader = MySqlStore::connect(&theirs, "seen").await.unwrap();
    assert!(reader.seen(&id("m")).await.unwrap());
    let absent = MySqlStore::connect(&theirs, "absent").await.unwrap();
    put(&mut raw, &qualified, "over", "done", "1").await;
    for refused in [
        reader.remember(&id("n")).await,
        reader.forget(&id("m")).await,
        reader.purge().await.map(drop),
        absent.migrate().await,
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Denied, "{error}");
        assert!(!error.is_retryable());
    }
    reader.migrate().await.unwrap();

    let nowhere = unique("nowhere");
    let mut other = url.rsplit_once('/').unwrap().0.to_owned();
    other.push_str(&format!("/{nowhere}"));
    let error = MySqlStore::connect(&other, "seen").await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Schema, "{error}");
    let error = MySqlStore::connect("mysql://root@127.0.0.1:1/test", "seen").await;
    assert_eq!(error.unwrap_err().kind(), BackendErrorKind::Unavailable);
    run(&mut raw, format!("DROP DATABASE {database}")).await;
    run(&mut raw, format!("DROP USER '{user}'@'%'")).await;
}

#[tokio::test]
async fn an_exhausted_pool_is_unavailable_for_as_long() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (_, table) = store(&url, "exhausted", None).await;
    let pool = MySqlPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(Duration::from_millis(200))
        .connect(&url)
        .await
        .unwrap();
    let taken = pool.acquire().await.unwrap();
    let store = MySqlStore::builder(&table).pool(pool.clone()).unwrap();
    for refused in [
        store.seen(&id("m")).await.map(drop),
        store.remember(&id("m")).await,
        store.migrate().await,
        store.purge().await.map(drop),
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Unavailable, "{error}");
        assert!(error.is_retryable());
    }
    drop(taken);
    store.remember(&id("m")).await.unwrap();
    assert!(store.seen(&id("m")).await.unwrap());
    pool.close().await;
    let error = store.seen(&id("m")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable, "{error}");
    drop_table(&mut raw, &table).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_may_use_the_stores_pool() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (_, table) = store(&url, "shared", None).await;
    let pool = MySqlPoolOptions::new()
        .max_connections(2)
        .acquire_timeout(PATIENCE)
        .connect(&url)
        .await
        .unwrap();
    let store = MySqlStore::builder(&table).pool(pool.clone()).unwrap();
    // All that the pool has are in the hands of two handlers at a time: a store that kept one
    // while they run would leave them waiting.
    let (both, most) = (Arc::new(Barrier::new(2)), Arc::new(AtomicUsize::new(0)));
    let mut calls = Vec::new();
    for n in 0..8 {
        let (pool, both, most) = (pool.clone(), both.clone(), most.clone());
        let (layer, _) = layer(store.clone());
        let mut service =
            ServiceBuilder::new()
                .layer(layer)
                .service(service_fn(move |_: Envelope| {
                    let (pool, both, most) = (pool.clone(), both.clone(), most.clone());
                    async move {
                        let _one = pool.acquire().await?;
                        both.wait().await;
                        most.fetch_add(1, Ordering::SeqCst);
                        Ok::<_, BoxError>(())
                    }
                }));
        calls.push(async move { deliver(&mut service, envelope(&format!("m-{n}"))).await });
    }
    for answer in join_all(calls).await {
        answer.unwrap();
    }
    assert_eq!(most.load(Ordering::SeqCst), 8);
    assert_eq!(records(&mut raw, &table).await.len(), 8);
    drop_table(&mut raw, &table).await;
}

// ===== calls that are dropped =====

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_call_leaves_the_connection_usable() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (_, table) = store(&url, "dropped", None).await;
    let (proxy, through) = proxied(&url).await;
    let threads = Arc::new(Mutex::new(Vec::new()));
    let told = threads.clone();
    let pool = MySqlPoolOptions::new()
        .max_connections(1)
        .after_connect(move |connection, _| {
            let told = told.clone();
            Box::pin(async move {
                let id = number(connection, "SELECT CONNECTION_ID()").await;
                told.lock().unwrap().push(id);
                Ok(())
            })
        })
        .connect(&through)
        .await
        .unwrap();
    let fresh = || MySqlStore::builder(&table).pool(pool.clone()).unwrap();
    let used = fresh();
    // Replies come late, so that each await is met under way.
    proxy.delay_replies(Duration::from_millis(2));
    for polls in 0..12 {
        // The first use has more awaits: it looks the table up.
        for store in [&used, &fresh()] {
            let (m, n) = (id(&format!("m-{polls}")), id("n"));
            services::drop_after(polls, store.remember(&m)).await;
            services::drop_after(polls, store.seen(&m)).await;
            services::drop_after(polls, store.forget(&m)).await;
            services::drop_after(polls, store.migrate()).await;
            services::drop_after(polls, store.purge()).await;
            store.remember(&n).await.unwrap();
            assert!(store.seen(&n).await.unwrap());
            // The answer is that of this call, not of one that was dropped.
            assert!(!store.seen(&id("never")).await.unwrap());
            store.forget(&n).await.unwrap();
            assert!(!store.seen(&n).await.unwrap());
        }
    }
    // Dropped in the middle of a reply.
    for _ in 0..3 {
        proxy.hold_replies();
        let call = tokio::spawn(used.remember(&id("held")));
        sleep(Duration::from_millis(20)).await;
        call.abort();
        proxy.release();
        assert!(!used.seen(&id("never")).await.unwrap());
        used.remember(&id("n")).await.unwrap();
        assert!(used.seen(&id("n")).await.unwrap());
    }
    let ids = threads.lock().unwrap().clone();
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    let open = format!(
        "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_mysql_thread_id IN ({})",
        ids.join(",")
    );
    let start = Instant::now();
    while number(&mut raw, open.as_str()).await > 0 {
        assert!(start.elapsed() < PATIENCE, "a transaction stays open");
        sleep(Duration::from_millis(250)).await;
    }
    drop_table(&mut raw, &table).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outside_of_a_runtime_there_is_an_error_and_no_panic() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (_, table) = store(&url, "outside", None).await;
    let pool = pool(&url, 1, "").await;
    let fresh = MySqlStore::builder(&table).pool(pool.clone()).unwrap();
    let used = MySqlStore::builder(&table).pool(pool.clone()).unwrap();
    assert!(!used.seen(&id("m")).await.unwrap());
    for store in [&fresh, &used] {
        let error = services::poll_outside(store.remember(&id("m")))
            .unwrap()
            .unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Unavailable);
        assert!(error.to_string().contains("runtime"), "{error}");
        let error = services::poll_outside(store.seen(&id("m")))
            .unwrap()
            .unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    }
    let store = used.clone();
    let purge = thread::spawn(move || store.purge_every(PATIENCE, drop).map(drop));
    let error = purge.join().unwrap().unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    assert_eq!(records(&mut raw, &table).await, []);

    // Begun here and dropped there, while the statement waits for a row.
    let mut holder = hold(&url, &table).await;
    let mut call = used.remember(&id("m"));
    tokio::select! {
        _ = &mut call => panic!("the row is held"),
        () = until_waiting(&mut raw, &table) => {}
    }
    thread::spawn(move || drop(call)).join().expect("no panic");
    run(&mut holder, "COMMIT").await;
    used.remember(&id("n")).await.unwrap();
    assert!(used.seen(&id("n")).await.unwrap());
    // The last handle of a store may go anywhere, too.
    thread::spawn(move || drop((used, fresh, pool)))
        .join()
        .expect("no panic");
    drop_table(&mut raw, &table).await;
}

// ===== migrate =====

#[tokio::test(flavor = "multi_thread")]
async fn many_workers_may_migrate_at_once() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let table = unique("boot");
    for existing in [false, true] {
        let stores = (0..16).map(|_| async {
            let builder = MySqlStore::builder(&table).max_connections(2);
            builder.connect(&url).await.unwrap()
        });
        let stores = join_all(stores).await;
        if existing {
            // The second time, only the index is missing.
            let gone = format!("ALTER TABLE {table} DROP INDEX {table}_expires_at");
            run(&mut raw, gone).await;
        }
        let all = Arc::new(Barrier::new(stores.len()));
        let mut tasks = JoinSet::new();
        for store in stores {
            let all = all.clone();
            tasks.spawn(async move {
                all.wait().await;
                store.migrate().await?;
                store.remember(&id("m")).await
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap().unwrap();
        }
        let indexes = format!(
            "SELECT count(*) FROM information_schema.statistics \
             WHERE table_schema = DATABASE() AND table_name = '{table}' AND column_name = 'expires_at'"
        );
        assert_eq!(number(&mut raw, indexes).await, 1);
    }
    drop_table(&mut raw, &table).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_beside_an_open_transaction() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (store, table) = store(&url, "beside", None).await;
    let mut holder = hold(&url, &table).await;
    // There is nothing to do, so nothing to wait for, for whoever boots. A server that is busy may be slow
    // for once.
    let mut fastest = Duration::MAX;
    for _ in 0..3 {
        let other = MySqlStore::connect(&url, &table).await.unwrap();
        let start = Instant::now();
        other.migrate().await.unwrap();
        fastest = fastest.min(start.elapsed());
    }
    assert!(fastest < Duration::from_millis(1900), "{fastest:?}");
    run(&mut holder, "COMMIT").await;
    run(
        &mut raw,
        format!("ALTER TABLE {table} DROP INDEX {table}_expires_at"),
    )
    .await;
    let mut holder = hold(&url, &table).await;
    let start = Instant::now();
    let error = store.migrate().await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Contention, "{error}");
    assert!(error.is_retryable());
    assert!(start.elapsed() >= Duration::from_millis(1900));
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    // It gave up for good: nobody is kept waiting behind it.
    store.remember(&id("n")).await.unwrap();
    run(&mut holder, "COMMIT").await;
    store.migrate().await.unwrap();
    put(&mut raw, &table, "over", "done", "1").await;
    assert_eq!(store.purge().await.unwrap(), 1);
    drop_table(&mut raw, &table).await;
}

// ===== purge =====

#[tokio::test]
async fn a_purge_takes_what_is_over_and_nothing_else() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (_, table) = store(&url, "purge", Duration::from_secs(60)).await;
    // Of a pool of one: the connections of a purge do not come back to it.
    let pool = pool(&url, 1, "").await;
    let store = MySqlStore::builder(&table).pool(pool).unwrap();
    assert_eq!(store.purge().await.unwrap(), 0);
    for (id, state, end) in [
        ("done-over", "done", format!("{NOW} - 1")),
        ("done-long-over", "done", "0".to_owned()),
        ("done-not-yet", "done", format!("{NOW} + {MINUTE}")),
        ("done-for-ever", "done", "NULL".to_owned()),
        ("claimed-over", "claimed", format!("{NOW} - {MINUTE} / 2")),
        (
            "claimed-long-over",
            "claimed",
            format!("{NOW} - {MINUTE} - 1"),
        ),
        ("claimed-not-yet", "claimed", format!("{NOW} + {MINUTE}")),
        ("claimed-for-ever", "claimed", "NULL".to_owned()),
    ] {
        put(&mut raw, &table, id, state, &end.replace("/ 2", "DIV 2")).await;
    }
    store.remember(&id("marked")).await.unwrap();
    assert_eq!(store.purge().await.unwrap(), 3);
    let left = records(&mut raw, &table).await;
    let left: Vec<_> = left
        .iter()
        .map(|row| String::from_utf8_lossy(&row.id))
        .collect();
    assert_eq!(
        left,
        [
            "claimed-for-ever",
            "claimed-not-yet",
            "claimed-over",
            "done-for-ever",
            "done-not-yet",
            "marked"
        ]
    );
    assert_eq!(store.purge().await.unwrap(), 0);
    assert!(store.seen(&id("marked")).await.unwrap());
    drop_table(&mut raw, &table).await;
}

/// Many rows at once, `{n}` being their numbers from 0.
async fn fill(raw: &mut MySqlConnection, table: &str, rows: usize, id: &str, end: &str) {
    let rows: Vec<String> = (0..rows)
        .map(|n| {
            format!(
                "('{}', 'done', NULL, 1, {end})",
                id.replace("{n}", &n.to_string())
            )
        })
        .collect();
    for rows in rows.chunks(500) {
        run(
            raw,
            format!("INSERT INTO {table} VALUES {}", rows.join(",")),
        )
        .await;
    }
}

#[tokio::test]
async fn a_purge_skips_what_others_hold() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (store, table) = store(&url, "skips", Duration::from_secs(60)).await;
    fill(&mut raw, &table, 2500, "over-{n}", "1").await;
    let mut holder = MySqlConnection::connect(&url).await.unwrap();
    run(&mut holder, "START TRANSACTION").await;
    // One is being marked again, one is merely looked at.
    let mark =
        format!("UPDATE {table} SET expires_at = {NOW} + {MINUTE} WHERE message_id = 'over-7'");
    run(&mut holder, mark).await;
    let lock = format!("SELECT * FROM {table} WHERE message_id = 'over-8' FOR UPDATE");
    run(&mut holder, lock).await;
    // Neither is waited for: the transaction does not end before the purge does.
    assert_eq!(store.purge().await.unwrap(), 2498);
    run(&mut holder, "COMMIT").await;
    assert!(store.seen(&id("over-7")).await.unwrap());
    assert_eq!(store.purge().await.unwrap(), 1);
    let left = records(&mut raw, &table).await;
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].id, b"over-7");
    drop_table(&mut raw, &table).await;
}

#[tokio::test]
async fn a_purge_searches_the_index() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (store, table) = store(&url, "explain", None).await;
    let builder = MySqlStore::builder(&table).response_timeout(PATIENCE);
    let patient = builder.connect(&url).await.unwrap();
    drop(store);
    fill(
        &mut raw,
        &table,
        3000,
        "live-{n}",
        &format!("{NOW} + {MINUTE}"),
    )
    .await;
    fill(&mut raw, &table, 20, "over-{n}", "1").await;
    run(&mut raw, format!("ANALYZE TABLE {table}")).await;
    // The statement itself, caught while it waits for the table.
    let mut holder = MySqlConnection::connect(&url).await.unwrap();
    run(&mut holder, format!("LOCK TABLES {table} WRITE")).await;
    let purge = tokio::spawn(async move { patient.purge().await });
    let caught = format!(
        "SELECT max(info) FROM information_schema.processlist \
         WHERE info LIKE '%`{table}`%' AND info LIKE '%SKIP LOCKED%' AND id <> CONNECTION_ID()"
    );
    let start = Instant::now();
    let statement = loop {
        if let Some(statement) = text(&mut raw, caught.as_str()).await {
            break statement;
        }
        assert!(start.elapsed() < PATIENCE, "no purge to be seen");
        sleep(Duration::from_millis(20)).await;
    };
    run(&mut holder, "UNLOCK TABLES").await;
    // Twenty are over; the plan is looked at when none of them is left, or some.
    let plan = fetch(&mut raw, format!("EXPLAIN {statement}")).await;
    assert_eq!(plan.len(), 1);
    let key: Option<String> = plan[0].get("key");
    assert_eq!(key, Some(format!("{table}_expires_at")));
    assert_eq!(plan[0].get::<String, _>("type"), "range");
    assert_eq!(purge.await.unwrap().unwrap(), 20);
    drop_table(&mut raw, &table).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_gives_up_on_a_table_that_is_locked() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (_, table) = store(&url, "given_up", None).await;
    let store = MySqlStore::builder(&table)
        .response_timeout(Duration::from_millis(300))
        .connect(&url)
        .await
        .unwrap();
    put(&mut raw, &table, "over", "done", "1").await;
    let mut holder = MySqlConnection::connect(&url).await.unwrap();
    // The server would wait for a day, or a year.
    run(&mut holder, format!("LOCK TABLES {table} WRITE")).await;
    let told = Arc::new(AtomicUsize::new(0));
    let tell = told.clone();
    let purge = store.purge_every(Duration::from_millis(10), move |deleted| {
        assert!(deleted.unwrap_err().is_retryable());
        tell.fetch_add(1, Ordering::SeqCst);
    });
    let (purge, start) = (purge.unwrap(), Instant::now());
    while told.load(Ordering::SeqCst) < 2 {
        assert!(start.elapsed() < PATIENCE, "it waits for the table");
        sleep(Duration::from_millis(20)).await;
    }
    tokio::time::timeout(PATIENCE, purge.stop())
        .await
        .expect("it stops");
    run(&mut holder, "UNLOCK TABLES").await;
    assert_eq!(store.purge().await.unwrap(), 1);
    drop_table(&mut raw, &table).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_beside_marks_takes_none_of_them() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (store, table) = store(&url, "traffic", Duration::from_secs(3600)).await;
    fill(&mut raw, &table, 6400, "over-{n}", "1").await;
    let all = Arc::new(Barrier::new(64 + 2));
    let mut tasks = JoinSet::new();
    for task in 0..64 {
        let (store, all) = (store.clone(), all.clone());
        tasks.spawn(async move {
            all.wait().await;
            for n in 0..40 {
                // Some of those that are over, and new ones between them.
                for one in [
                    format!("over-{}", task * 100 + n),
                    format!("over-{}-new-{n}", task * 100),
                ] {
                    store.remember(&id(&one)).await?;
                    assert!(store.seen(&id(&one)).await?, "{one} was purged");
                }
            }
            Ok::<_, BackendError>(())
        });
    }
    let mut purges = JoinSet::new();
    for _ in 0..2 {
        let (store, all) = (store.clone(), all.clone());
        purges.spawn(async move {
            all.wait().await;
            store.purge().await
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap().unwrap();
    }
    while let Some(purge) = purges.join_next().await {
        purge.unwrap().unwrap();
    }
    // What was locked at that moment goes now, and no mark with it.
    store.purge().await.unwrap();
    let left = records(&mut raw, &table).await;
    assert_eq!(left.len(), 64 * 40 * 2);
    let clock = now(&mut raw).await;
    assert!(left.iter().all(|row| row.expires_at.unwrap() > clock));
    drop_table(&mut raw, &table).await;
}

#[tokio::test]
async fn a_purge_in_the_background_ends_when_told() {
    let Some(url) = services::mysql() else { return };
    let mut raw = raw(&url).await;
    let (store, table) = store(&url, "every", None).await;
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let purge = store
        .purge_every(Duration::from_millis(10), move |deleted| {
            let _ = tell.send(deleted.unwrap());
        })
        .unwrap();
    fill(&mut raw, &table, 10, "over-{n}", "1").await;
    let mut total = 0;
    while total < 10 {
        total += told.recv().await.expect("it goes on");
    }
    assert_eq!(total, 10);
    purge.stop().await;
    while told.try_recv().is_ok() {}
    assert!(told.recv().await.is_none(), "its hook is gone");
    put(&mut raw, &table, "over", "done", "1").await;
    assert_eq!(records(&mut raw, &table).await.len(), 1);
    drop_table(&mut raw, &table).await;
}
