//! The stores in SQLite: what they write, several processes on one file, ids that travel together,
//! and what happens when locks, files and tables are in the way.
#![allow(missing_docs)]

mod support;

#[path = "support/services.rs"]
mod services;

use futures_util::future::join_all;
use services::{PATIENCE, unique};
use sqlx::{
    AssertSqlSafe, Connection, Executor, Row, SqliteConnection, SqlitePool,
    sqlite::{SqliteConnectOptions, SqlitePoolOptions, SqliteRow},
};
use std::{
    env, fs,
    future::{Future, poll_fn},
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    pin::Pin,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use support::{deliver, envelope, layer};
use tokio::{
    runtime::Runtime,
    sync::Barrier,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower::{ServiceBuilder, service_fn};
use tower_idempotency::{
    BoxError, ConfigError, Envelope, MessageId, Store,
    error::{BackendError, BackendErrorKind},
    store::{
        SqliteStore,
        foreign::{PHP_TABLE, PhpSqliteStore},
    },
};

// ===== help =====

const MINUTE: i64 = 60_000_000;

/// A folder of the test's own, gone at its end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = env::temp_dir().join(unique(name));
        fs::create_dir(&dir).unwrap();
        Dir(dir)
    }

    fn file(&self) -> PathBuf {
        self.0.join("seen.db")
    }

    fn url(&self) -> String {
        format!("sqlite://{}", self.file().display())
    }

    /// A connection of the test's own.
    async fn raw(&self) -> SqliteConnection {
        let options = SqliteConnectOptions::new()
            .filename(self.file())
            .create_if_missing(true)
            .busy_timeout(PATIENCE);
        SqliteConnection::connect_with(&options).await.unwrap()
    }

    async fn store(&self, ttl: impl Into<Option<Duration>>) -> SqliteStore {
        let builder = SqliteStore::builder("seen").ttl(ttl);
        let store = builder.connect(&self.url()).await.unwrap();
        store.migrate().await.unwrap();
        store
    }

    async fn pool(&self, connections: u32) -> SqlitePool {
        let options = SqlitePoolOptions::new().max_connections(connections);
        options.connect(&self.url()).await.unwrap()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

async fn run(raw: &mut SqliteConnection, statement: impl Into<String>) {
    let statement = statement.into();
    let done = raw.execute(sqlx::raw_sql(AssertSqlSafe(statement.clone())));
    done.await
        .unwrap_or_else(|error| panic!("{statement}: {error}"));
}

async fn fetch(raw: &mut SqliteConnection, statement: impl Into<String>) -> Vec<SqliteRow> {
    let statement = statement.into();
    let rows = raw.fetch_all(sqlx::raw_sql(AssertSqlSafe(statement.clone())));
    rows.await
        .unwrap_or_else(|error| panic!("{statement}: {error}"))
}

async fn number(raw: &mut SqliteConnection, statement: &str) -> i64 {
    fetch(raw, statement).await[0].get(0)
}

/// Microseconds since 1970 by the clock of the host.
fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    now.as_micros() as i64
}

/// A row of a table of ours.
#[derive(Debug, PartialEq)]
struct Record {
    id: String,
    state: String,
    owner: Option<String>,
    since: i64,
    expires_at: Option<i64>,
}

async fn records(raw: &mut SqliteConnection) -> Vec<Record> {
    // What is no text or no integer is not shown as one.
    let rows = fetch(
        raw,
        "SELECT message_id, state, owner, since, expires_at FROM seen \
         WHERE typeof(message_id) = 'text' AND typeof(state) = 'text' \
         AND typeof(since) = 'integer' AND typeof(expires_at) IN ('integer', 'null') \
         ORDER BY message_id",
    );
    let record = |row: &SqliteRow| Record {
        id: row.get(0),
        state: row.get(1),
        owner: row.get(2),
        since: row.get(3),
        expires_at: row.get(4),
    };
    rows.await.iter().map(record).collect()
}

async fn ids(raw: &mut SqliteConnection) -> Vec<String> {
    records(raw).await.into_iter().map(|row| row.id).collect()
}

async fn put(raw: &mut SqliteConnection, id: &str, state: &str, end: Option<i64>) {
    let owner = match state {
        "claimed" => "'000102030405060708090a0b0c0d0e0f'",
        _ => "NULL",
    };
    let end = end.map_or("NULL".to_owned(), |end| end.to_string());
    run(
        raw,
        format!("REPLACE INTO seen VALUES ('{id}', '{state}', {owner}, 1, {end})"),
    )
    .await;
}

/// Many rows at once, `{n}` being their numbers from 0.
async fn fill(raw: &mut SqliteConnection, rows: u32, id: &str, end: i64) {
    run(
        raw,
        format!(
            "WITH RECURSIVE n(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < {rows} - 1) \
             INSERT INTO seen SELECT replace('{id}', '{{n}}', n), 'done', NULL, 1, {end} FROM n"
        ),
    )
    .await;
}

fn id(text: &str) -> MessageId {
    MessageId::from(text)
}

/// Gives a call that has to wait the time to get to where it waits.
async fn waits<F: Future + Unpin>(call: &mut F) {
    let answered = timeout(Duration::from_millis(200), call).await.is_ok();
    assert!(!answered, "answered, although the file is locked");
}

/// Polls once, and answers whether it is under way.
async fn begin<F: Future + Unpin>(call: &mut F) -> bool {
    poll_fn(|cx| Poll::Ready(Pin::new(&mut *call).poll(cx).is_pending())).await
}

// ===== what is stored =====

#[tokio::test]
async fn a_mark_is_a_row_with_its_end_in_the_clock_of_the_host() {
    let dir = Dir::new("rows");
    let mut raw = dir.raw().await;
    drop(dir.store(None).await);
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
        let builder = SqliteStore::builder("seen").ttl(ttl);
        let store = builder.connect(&dir.url()).await.unwrap();
        for before in ["absent", "done", "claimed", "over"] {
            match before {
                "absent" => run(&mut raw, "DELETE FROM seen").await,
                "over" => put(&mut raw, "m", "done", Some(1)).await,
                state => put(&mut raw, "m", state, Some(now() + MINUTE)).await,
            }
            // SQLite's clock has milliseconds, rounded.
            let t0 = now() - 1000;
            store.remember(&id("m")).await.unwrap();
            let t1 = now() + 1000;
            let [record] = records(&mut raw).await.try_into().unwrap();
            assert_eq!((record.id.as_str(), record.state.as_str()), ("m", "done"));
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
    let default = SqliteStore::connect(&dir.url(), "seen").await.unwrap();
    default.remember(&id("m")).await.unwrap();
    let left = records(&mut raw).await[0].expires_at.unwrap() - now();
    let day = day.as_micros() as i64;
    assert!((day - MINUTE..=day + 1000).contains(&left), "{left}");
    default.forget(&id("m")).await.unwrap();
    assert_eq!(records(&mut raw).await, []);
}

#[tokio::test]
async fn only_what_is_done_and_not_over_was_seen() {
    let dir = Dir::new("reads");
    let store = dir.store(Duration::from_secs(60)).await;
    let mut raw = dir.raw().await;
    for (state, end, seen) in [
        ("done", None, true),
        ("done", Some(now() + MINUTE), true),
        ("done", Some(now() - 2000), false),
        ("done", Some(0), false),
        ("claimed", None, false),
        ("claimed", Some(now() + MINUTE), false),
        ("claimed", Some(now() - 2000), false),
        ("DONE", None, false),
        ("", None, false),
    ] {
        put(&mut raw, "m", state, end).await;
        assert_eq!(store.seen(&id("m")).await.unwrap(), seen, "{state} {end:?}");
        // A mark stands whatever was there; forgetting leaves nothing.
        store.remember(&id("m")).await.unwrap();
        assert!(store.seen(&id("m")).await.unwrap());
        put(&mut raw, "m", state, end).await;
        store.forget(&id("m")).await.unwrap();
        assert_eq!(records(&mut raw).await, [], "{state} {end:?}");
    }
}

#[tokio::test]
async fn ids_are_stored_verbatim_or_as_their_hash() {
    let dir = Dir::new("ids");
    let store = dir.store(None).await;
    let mut raw = dir.raw().await;
    let (fits, long) = ("x".repeat(255), "x".repeat(256));
    let hash = "sha256:85e62acd750c4eb56b7b6a1d66dca5bfaac5f062608a1a893410d0288936c09a";
    let empty_hash = "sha256:9fd714ce6f63c3b320c944b70e80a5d105fd2f3e2d30ae2fa81370e223f50d07";
    for (given, stored) in [
        ("a", "a"),
        ("A", "A"),
        ("a ", "a "),
        ("a\\'\"`%_;--", "a\\'\"`%_;--"),
        ("\u{1}\u{7f}\r\n\t", "\u{1}\u{7f}\r\n\t"),
        ("007", "007"),
        ("1e2", "1e2"),
        ("é", "é"),
        ("e\u{301}", "e\u{301}"),
        ("🦀", "🦀"),
        (&fits, &fits),
        (&long, hash),
        ("sha256:", empty_hash),
    ] {
        store.remember(&id(given)).await.unwrap();
        assert_eq!(ids(&mut raw).await, [stored], "{given:?}");
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
}

#[tokio::test]
async fn ddl_makes_what_migrate_makes() {
    let (by_hand, migrated) = (Dir::new("by_hand"), Dir::new("migrated"));
    drop(migrated.store(None).await);
    let store = SqliteStore::connect(&by_hand.url(), "seen").await.unwrap();
    run(&mut by_hand.raw().await, store.ddl()).await;
    let mut made = Vec::new();
    for dir in [&by_hand, &migrated] {
        let schema =
            "SELECT group_concat(sql, ';') FROM (SELECT sql FROM sqlite_master ORDER BY name)";
        let schema = fetch(&mut dir.raw().await, schema).await;
        made.push(schema[0].get::<String, _>(0));
    }
    assert_eq!(made[0], made[1]);
    assert!(made[0].contains("message_id TEXT COLLATE BINARY NOT NULL PRIMARY KEY"));
    assert!(made[0].contains("seen_expires_at"));
    store.migrate().await.unwrap();
    store.remember(&id("m")).await.unwrap();
    assert!(store.seen(&id("m")).await.unwrap());
}

#[tokio::test]
async fn a_crash_of_a_worker_loses_nothing_by_the_settings_of_its_connections() {
    let dir = Dir::new("wal");
    let store = dir.store(None).await;
    store.remember(&id("m")).await.unwrap();
    // The mode is kept in the file: whoever opens it has it.
    let mode = fetch(&mut dir.raw().await, "PRAGMA journal_mode").await;
    assert_eq!(mode[0].get::<String, _>(0), "wal");
    assert!(dir.0.join("seen.db-wal").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_of_the_callers_own_serves() {
    let dir = Dir::new("pool");
    // One connection, and a handler that uses it: the store holds none while the handler runs.
    let pool = SqlitePoolOptions::new()
        .max_connections(1)
        .acquire_timeout(PATIENCE)
        .connect_with(
            SqliteConnectOptions::new()
                .filename(dir.file())
                .create_if_missing(true),
        )
        .await
        .unwrap();
    let store = SqliteStore::builder("seen").pool(pool.clone()).unwrap();
    store.migrate().await.unwrap();
    let mut calls = Vec::new();
    for n in 0..8 {
        let pool = pool.clone();
        let (layer, _) = layer(store.clone());
        let mut service =
            ServiceBuilder::new()
                .layer(layer)
                .service(service_fn(move |_: Envelope| {
                    let pool = pool.clone();
                    async move {
                        let _one = pool.acquire().await?;
                        sleep(Duration::from_millis(1)).await;
                        Ok::<_, BoxError>(())
                    }
                }));
        calls.push(async move { deliver(&mut service, envelope(&format!("m-{n}"))).await });
    }
    for answer in join_all(calls).await {
        answer.unwrap();
    }
    assert_eq!(ids(&mut dir.raw().await).await.len(), 8);
    let taken = pool.acquire().await.unwrap();
    let hasty = SqlitePoolOptions::new()
        .max_connections(1)
        .acquire_timeout(Duration::from_millis(100))
        .connect(&dir.url())
        .await
        .unwrap();
    drop(taken);
    let taken = hasty.acquire().await.unwrap();
    let exhausted = SqliteStore::builder("seen").pool(hasty.clone()).unwrap();
    let error = exhausted.seen(&id("m-1")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable);
    drop(taken);
    assert!(exhausted.seen(&id("m-1")).await.unwrap());
}

// ===== several processes =====

/// What a child of a test does; without a job it is no test.
#[tokio::test(flavor = "multi_thread")]
async fn child() {
    let Ok(job) = env::var("SQLITE_JOB") else {
        return;
    };
    let url = env::var("SQLITE_JOB_URL").unwrap();
    let number: usize = env::var("SQLITE_JOB_NUMBER").unwrap().parse().unwrap();
    let store = SqliteStore::connect(&url, "seen").await.unwrap();
    store.migrate().await.unwrap();
    match job.as_str() {
        "share" => {
            // Everybody marks the same ids, every other process backwards.
            let mut tasks = JoinSet::new();
            for task in 0..16 {
                let store = store.clone();
                tasks.spawn(async move {
                    for n in (0..SHARED).filter(|n| n % 16 == task) {
                        let n = if number % 2 == 0 { n } else { SHARED - 1 - n };
                        let one = id(&format!("m-{n:05}"));
                        store.remember(&one).await?;
                        assert!(store.seen(&one).await?, "{one:?} is lost");
                        let other = id(&format!("never-{n}"));
                        assert!(!store.seen(&other).await?, "{other:?} was never there");
                        let own = id(&format!("own-{number}-{n}"));
                        store.remember(&own).await?;
                        if n % 8 == 0 {
                            store.forget(&own).await?;
                            assert!(!store.seen(&own).await?, "{own:?} is back");
                        }
                    }
                    Ok::<_, BackendError>(())
                });
            }
            while let Some(task) = tasks.join_next().await {
                task.unwrap().unwrap();
            }
        }
        "boot" => store
            .remember(&id(&format!("booted-{number}")))
            .await
            .unwrap(),
        "mark" => {
            let mut out = std::io::stdout();
            for n in 0.. {
                store.remember(&id(&format!("m-{n}"))).await.unwrap();
                writeln!(out, "\nmarked {n}").unwrap();
                out.flush().unwrap();
            }
        }
        job => panic!("no such job: {job}"),
    }
    println!("\ndone with {job}");
}

const SHARED: usize = 1600;

fn start(job: &str, dir: &Dir, number: usize) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env("SQLITE_JOB", job)
        .env("SQLITE_JOB_URL", dir.url())
        .env("SQLITE_JOB_NUMBER", number.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn finish(child: Child, job: &str) {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains(&format!("done with {job}")),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[tokio::test]
async fn several_processes_share_a_file() {
    let dir = Dir::new("share");
    let children: Vec<Child> = (0..4).map(|n| start("share", &dir, n)).collect();
    for child in children {
        finish(child, "share");
    }
    let mut raw = dir.raw().await;
    let marks = ids(&mut raw).await;
    let of = |kind: &str| marks.iter().filter(|id| id.starts_with(kind)).count();
    assert_eq!(of("m-"), SHARED);
    assert_eq!(of("own-"), 4 * SHARED / 8 * 7);
    assert_eq!(marks.len(), of("m-") + of("own-"));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_workers_may_migrate_a_new_file_at_once() {
    let dir = Dir::new("boot");
    let children: Vec<Child> = (0..4).map(|n| start("boot", &dir, n)).collect();
    let all = Arc::new(Barrier::new(16));
    let mut tasks = JoinSet::new();
    for n in 4..20 {
        let (url, all) = (dir.url(), all.clone());
        tasks.spawn(async move {
            all.wait().await;
            let builder = SqliteStore::builder("seen").max_connections(2);
            let store = builder.connect(&url).await?;
            store.migrate().await?;
            store.remember(&id(&format!("booted-{n}"))).await
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap().unwrap();
    }
    for child in children {
        finish(child, "boot");
    }
    let mut raw = dir.raw().await;
    assert_eq!(ids(&mut raw).await.len(), 20);
    let indexes = "SELECT count(*) FROM sqlite_master WHERE name = 'seen_expires_at'";
    assert_eq!(number(&mut raw, indexes).await, 1);
}

#[tokio::test]
async fn a_killed_worker_leaves_every_mark_that_was_answered() {
    let dir = Dir::new("killed");
    let mut child = start("mark", &dir, 0);
    let out = BufReader::new(child.stdout.take().unwrap());
    let mut last = None;
    let marked = |line: &str| line.strip_prefix("marked ")?.parse::<usize>().ok();
    let mut lines = out.lines().map_while(Result::ok);
    for n in lines.by_ref().filter_map(|line| marked(&line)) {
        last = Some(n);
        if n == 300 {
            // SIGKILL, in the middle of whatever it does.
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    let last = last.expect("some marks");
    assert!(last >= 300);
    let store = dir.store(None).await;
    for n in 0..=last {
        assert!(
            store.seen(&id(&format!("m-{n}"))).await.unwrap(),
            "{n} of {last}"
        );
    }
    store.remember(&id("after")).await.unwrap();
    let check = fetch(&mut dir.raw().await, "PRAGMA integrity_check").await;
    assert_eq!(check[0].get::<String, _>(0), "ok");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_writers_in_one_process_are_not_turned_away() {
    let dir = Dir::new("writers");
    // Two stores, so that not all go by one lane.
    let stores = [dir.store(None).await, dir.store(None).await];
    let mut tasks = JoinSet::new();
    for task in 0..50_usize {
        let store = stores[task % 2].clone();
        tasks.spawn(async move {
            for n in 0..100 {
                let one = id(&format!("m-{task}-{n}"));
                assert!(!store.seen(&one).await?);
                store.remember(&one).await?;
                assert!(store.seen(&one).await?, "{one:?} is lost");
                if n % 10 == 0 {
                    store.forget(&one).await?;
                    assert!(!store.seen(&one).await?, "{one:?} is back");
                }
            }
            Ok::<_, BackendError>(())
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap().unwrap();
    }
    assert_eq!(ids(&mut dir.raw().await).await.len(), 50 * 90);
}

// ===== locks =====

#[tokio::test(flavor = "multi_thread")]
async fn readers_do_not_wait_for_a_writer() {
    let dir = Dir::new("locked");
    let store = dir.store(None).await;
    store.remember(&id("before")).await.unwrap();
    let mut holder = dir.raw().await;
    run(&mut holder, "BEGIN IMMEDIATE").await;
    put(&mut holder, "theirs", "done", None).await;
    let mut waiting = join_all(["m", "n", "o"].map(|one| store.remember(&id(one))));
    waits(&mut waiting).await;
    // Longer than those that travel together wait before they go alone.
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(500) {
        assert!(store.seen(&id("before")).await.unwrap());
        assert!(!store.seen(&id("theirs")).await.unwrap());
        assert!(!store.seen(&id("m")).await.unwrap());
    }
    waits(&mut waiting).await;
    run(&mut holder, "COMMIT").await;
    for answer in waiting.await {
        answer.unwrap();
    }
    for one in ["before", "theirs", "m", "n", "o"] {
        assert!(store.seen(&id(one)).await.unwrap(), "{one}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_is_held_too_long_can_be_tried_again() {
    let dir = Dir::new("held");
    drop(dir.store(None).await);
    let store = SqliteStore::builder("seen")
        .response_timeout(Duration::from_millis(300))
        .max_connections(2)
        .connect(&dir.url())
        .await
        .unwrap();
    store.remember(&id("before")).await.unwrap();
    let mut holder = dir.raw().await;
    run(&mut holder, "BEGIN IMMEDIATE").await;
    for _ in 0..2 {
        let start = Instant::now();
        let calls = ["m", "n", "o"].map(|one| store.remember(&id(one)));
        for answer in join_all(calls).await {
            let error = answer.unwrap_err();
            assert!(error.is_retryable(), "{error:?}");
        }
        let error = store.forget(&id("before")).await.unwrap_err();
        assert!(error.is_retryable(), "{error:?}");
        let error = store.purge().await.unwrap_err();
        assert!(error.is_retryable(), "{error:?}");
        assert!(start.elapsed() < PATIENCE);
        assert!(store.seen(&id("before")).await.unwrap());
    }
    run(&mut holder, "ROLLBACK").await;
    store.remember(&id("m")).await.unwrap();
    assert!(store.seen(&id("m")).await.unwrap());
    store.forget(&id("before")).await.unwrap();
    assert!(!store.seen(&id("before")).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_counts_from_after_the_wait_for_a_lock() {
    let dir = Dir::new("waits");
    let ttl = Duration::from_millis(300);
    let store = dir.store(ttl).await;
    store.remember(&id("there")).await.unwrap();
    let mut holder = dir.raw().await;
    run(&mut holder, "BEGIN IMMEDIATE").await;
    let mut waiting = join_all(["there", "new"].map(|one| store.remember(&id(one))));
    // Far longer than the ids are to live.
    let answered = timeout(Duration::from_millis(1500), &mut waiting).await;
    assert!(answered.is_err(), "the file is locked");
    let t0 = now() - 1000;
    run(&mut holder, "COMMIT").await;
    for answer in waiting.await {
        answer.unwrap();
    }
    let t1 = now() + 1000;
    let ttl = ttl.as_micros() as i64;
    for record in records(&mut holder).await {
        let end = record.expires_at.unwrap();
        assert!(
            (t0 + ttl..=t1 + ttl).contains(&end),
            "{}: {} us from the earliest right end",
            record.id,
            end - t0 - ttl
        );
    }
}

// ===== ids that travel together =====

#[tokio::test(flavor = "multi_thread")]
async fn marks_that_wait_go_together() {
    let dir = Dir::new("together");
    let store = dir.store(None).await;
    store.remember(&id("first")).await.unwrap();
    let mut holder = dir.raw().await;
    run(&mut holder, "BEGIN IMMEDIATE").await;
    let texts: Vec<String> = (0..120).map(|n| format!("m-{n}")).collect();
    let mut calls = join_all(texts.iter().map(|one| store.remember(&id(one))));
    waits(&mut calls).await;
    let wal = dir.0.join("seen.db-wal");
    let before = fs::metadata(&wal).unwrap().len();
    run(&mut holder, "COMMIT").await;
    for answer in calls.await {
        answer.unwrap();
    }
    // A commit writes at least the page of the row to the log; 120 of them would write 120.
    let pages = (fs::metadata(&wal).unwrap().len() - before) / 4096;
    assert!(pages < 60, "{pages} pages in the log");
    for one in &texts {
        assert!(store.seen(&id(one)).await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_item_that_fails_fails_alone() {
    let dir = Dir::new("item");
    let store = dir.store(None).await;
    let mut raw = dir.raw().await;
    run(
        &mut raw,
        "CREATE TRIGGER refuse BEFORE INSERT ON seen WHEN NEW.message_id = 'bad' \
         BEGIN SELECT RAISE(ABORT, 'no'); END",
    )
    .await;
    run(&mut raw, "BEGIN IMMEDIATE").await;
    // Each twice: the bad one among the others, first, and last.
    let texts = ["bad", "a", "b", "bad", "a", "c", "z", "z"];
    let mut calls = join_all(texts.map(|one| store.remember(&id(one))));
    waits(&mut calls).await;
    run(&mut raw, "COMMIT").await;
    for (one, answer) in texts.iter().zip(calls.await) {
        match *one {
            "bad" => assert_eq!(answer.unwrap_err().kind(), BackendErrorKind::Other),
            one => answer.unwrap_or_else(|error| panic!("{one}: {error}")),
        }
    }
    assert_eq!(ids(&mut raw).await, ["a", "b", "c", "z"]);
    let asked = join_all(texts.map(|one| store.seen(&id(one)))).await;
    let seen: Vec<bool> = asked.into_iter().map(Result::unwrap).collect();
    assert_eq!(seen, [false, true, true, false, true, true, true, true]);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_of_many_questions_has_its_own_answer() {
    let dir = Dir::new("answers");
    let store = dir.store(None).await;
    fill(&mut dir.raw().await, 300, "m-{n}", now() + MINUTE).await;
    for turn in 0..20 {
        // In no order, more than one statement takes, some twice, some that are not there.
        let asked: Vec<usize> = (0..400).map(|n| (n * 7919 + turn) % 450).collect();
        let calls = asked.iter().map(|n| store.seen(&id(&format!("m-{n}"))));
        let answers = join_all(calls).await;
        for (n, answer) in asked.iter().zip(answers) {
            assert_eq!(answer.unwrap(), *n < 300, "m-{n}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_dropped_is_withdrawn_or_done() {
    let dir = Dir::new("dropped");
    let pool = dir_pool_of_one(&dir).await;
    let store = SqliteStore::builder("seen").pool(pool).unwrap();
    store.migrate().await.unwrap();
    assert!(!store.seen(&id("m")).await.unwrap());
    let mut holder = dir.raw().await;
    run(&mut holder, "BEGIN IMMEDIATE").await;
    let mut in_flight = Box::pin(store.remember(&id("a-in-flight")));
    waits(&mut in_flight).await;
    let mut queued = Box::pin(store.remember(&id("b-queued")));
    waits(&mut queued).await;
    let mut kept = Box::pin(store.remember(&id("c-kept")));
    waits(&mut kept).await;
    let never_polled = store.remember(&id("d-never"));
    drop((never_polled, queued, in_flight));
    run(&mut holder, "COMMIT").await;
    kept.await.unwrap();
    store.remember(&id("e-after")).await.unwrap();
    let marks = ids(&mut holder).await;
    let sure = |text: &&String| text.as_str() != "a-in-flight" && text.as_str() != "b-queued";
    let marks: Vec<_> = marks.iter().filter(sure).collect();
    assert_eq!(marks, ["c-kept", "e-after"]);
}

async fn dir_pool_of_one(dir: &Dir) -> SqlitePool {
    drop(dir.store(None).await);
    dir.pool(1).await
}

#[tokio::test]
async fn a_queue_of_dropped_calls_costs_nothing() {
    let dir = Dir::new("withdrawn");
    let store = dir.store(None).await;
    assert!(!store.seen(&id("m")).await.unwrap());
    // On one thread, the driving task cannot have begun before this gives way to it.
    let mut calls = join_all((0..50).map(|n| store.remember(&id(&format!("m-{n}")))));
    assert!(begin(&mut calls).await);
    drop(calls);
    store.remember(&id("kept")).await.unwrap();
    assert_eq!(ids(&mut dir.raw().await).await, ["kept"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_dropped_at_any_await_leaves_the_pool_usable() {
    let dir = Dir::new("polls");
    let pool = dir_pool_of_one(&dir).await;
    let fresh = || SqliteStore::builder("seen").pool(pool.clone()).unwrap();
    let used = fresh();
    for polls in 0..10 {
        for store in [&used, &fresh()] {
            let (m, n) = (id(&format!("m-{polls}")), id("n"));
            services::drop_after(polls, store.remember(&m)).await;
            services::drop_after(polls, store.seen(&m)).await;
            services::drop_after(polls, store.forget(&m)).await;
            services::drop_after(polls, store.migrate()).await;
            services::drop_after(polls, store.purge()).await;
            store.remember(&n).await.unwrap();
            assert!(store.seen(&n).await.unwrap());
            assert!(!store.seen(&id("never")).await.unwrap());
            store.forget(&n).await.unwrap();
            assert!(!store.seen(&n).await.unwrap());
        }
    }
    // Nobody is left who holds the file: it can be locked whole.
    let mut raw = dir.raw().await;
    run(&mut raw, "BEGIN EXCLUSIVE").await;
    run(&mut raw, "COMMIT").await;
}

#[test]
fn the_end_of_the_driving_runtime_loses_no_call() {
    let dir = Dir::new("runtimes");
    let [first, second, third] = [(); 3].map(|()| Runtime::new().unwrap());
    let (store, mut holder) = third.block_on(async {
        drop(dir.store(None).await);
        let store = SqliteStore::builder("seen")
            .pool(dir.pool(4).await)
            .unwrap();
        assert!(!store.seen(&id("m")).await.unwrap());
        let mut holder = dir.raw().await;
        run(&mut holder, "BEGIN IMMEDIATE").await;
        (store, holder)
    });
    // The first runtime drives the lane, since its calls came first.
    let mut driving = join_all(["f-0", "f-1", "f-2"].map(|one| store.remember(&id(one))));
    first.block_on(waits(&mut driving));
    let mut calls = join_all((0..10).map(|n| store.remember(&id(&format!("m-{n}")))));
    second.block_on(waits(&mut calls));
    drop(first);
    drop(driving);
    third.block_on(run(&mut holder, "COMMIT"));
    for answer in second.block_on(calls) {
        answer.unwrap();
    }
    second.block_on(async {
        for n in 0..10 {
            assert!(store.seen(&id(&format!("m-{n}"))).await.unwrap(), "{n}");
        }
        store.remember(&id("after")).await.unwrap();
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn outside_of_a_runtime_there_is_an_error_and_no_panic() {
    let dir = Dir::new("outside");
    let used = dir.store(None).await;
    assert!(!used.seen(&id("m")).await.unwrap());
    let fresh = SqliteStore::builder("seen")
        .pool(dir.pool(1).await)
        .unwrap();
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
    // Begun here and dropped there, while the statement waits for the file.
    let mut holder = dir.raw().await;
    run(&mut holder, "BEGIN IMMEDIATE").await;
    let mut call = used.remember(&id("m"));
    waits(&mut call).await;
    thread::spawn(move || drop(call)).join().expect("no panic");
    run(&mut holder, "COMMIT").await;
    used.remember(&id("n")).await.unwrap();
    assert!(used.seen(&id("n")).await.unwrap());
    thread::spawn(move || drop((used, fresh)))
        .join()
        .expect("no panic");
}

// ===== files and tables that do not serve =====

#[tokio::test]
async fn a_database_in_memory_is_refused() {
    let file = unique("file");
    for url in [
        "sqlite::memory:".to_owned(),
        "sqlite://:memory:".to_owned(),
        format!("sqlite://{file}?mode=memory"),
        format!("sqlite://{file}?mode=memory&cache=shared"),
        format!("sqlite://{file}?cache=shared&mode=memory"),
    ] {
        let error = SqliteStore::connect(&url, "seen").await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Config, "{url}");
        let source = std::error::Error::source(&error).unwrap();
        let source = source.downcast_ref::<ConfigError>().unwrap();
        assert_eq!(source.setting(), "url");
        assert!(!fs::exists(&file).unwrap());
    }
}

/// Without a name, each connection has a database of its own that nobody else sees.
#[tokio::test]
async fn a_database_without_a_file_is_refused() {
    for url in ["sqlite:", "sqlite://", "sqlite://%3Amemory%3A"] {
        let error = SqliteStore::connect(url, "seen").await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Config, "{url}: {error}");
    }
}

#[tokio::test]
async fn a_file_that_does_not_serve_says_why() {
    let dir = Dir::new("files");
    let store = dir.store(None).await;
    store.remember(&id("m")).await.unwrap();

    // May be read only.
    let url = format!("{}?mode=ro", dir.url());
    let reader = SqliteStore::connect(&url, "seen").await.unwrap();
    reader.migrate().await.unwrap();
    assert!(reader.seen(&id("m")).await.unwrap());
    for refused in [
        reader.remember(&id("n")).await,
        reader.forget(&id("m")).await,
        reader.purge().await.map(drop),
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Denied, "{error}");
        assert!(!error.is_retryable());
    }
    assert!(store.seen(&id("m")).await.unwrap());

    // A folder that takes no file of anybody.
    let url = "sqlite:///proc/seen.db";
    let error = SqliteStore::connect(url, "seen").await.unwrap_err();
    let right = [BackendErrorKind::Unavailable, BackendErrorKind::Denied];
    assert!(right.contains(&error.kind()), "{error:?}");
    // No such folder, and a folder in place of the file: to try again would not help.
    let nowhere = dir.0.join("nowhere").join("seen.db");
    for place in [nowhere.display(), dir.0.display()] {
        let url = format!("sqlite://{place}");
        let error = SqliteStore::connect(&url, "seen").await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Config, "{error}");
        assert!(!error.is_retryable());
    }

    // Something else.
    let other = dir.0.join("other.txt");
    fs::write(
        &other,
        "not a database, but long enough for one. ".repeat(500),
    )
    .unwrap();
    let url = format!("sqlite://{}", other.display());
    let error = SqliteStore::connect(&url, "seen").await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Other, "{error}");
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn a_file_that_is_deleted_begins_anew() {
    let dir = Dir::new("deleted");
    let store = dir.store(None).await;
    store.remember(&id("m")).await.unwrap();
    for file in ["seen.db", "seen.db-wal", "seen.db-shm"] {
        fs::remove_file(dir.0.join(file)).unwrap();
    }
    // The open store has the old file or an error, but no answer that is made up.
    match store.seen(&id("m")).await {
        Ok(seen) => assert!(seen),
        Err(error) => assert_ne!(error.kind(), BackendErrorKind::Config),
    }
    let new = SqliteStore::connect(&dir.url(), "seen").await.unwrap();
    let error = new.seen(&id("m")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Schema);
    new.migrate().await.unwrap();
    assert!(!new.seen(&id("m")).await.unwrap());
    new.remember(&id("m")).await.unwrap();
    assert!(new.seen(&id("m")).await.unwrap());
}

#[tokio::test]
async fn a_missing_table_names_what_makes_it() {
    let dir = Dir::new("missing");
    let store = SqliteStore::connect(&dir.url(), "seen").await.unwrap();
    let mut raw = dir.raw().await;
    let m = id("m");
    // Missing from the start, then dropped under way.
    for turn in 0..2 {
        for missing in [
            store.seen(&m).await.map(drop),
            store.remember(&m).await,
            store.forget(&m).await,
            store.purge().await.map(drop),
        ] {
            let error = missing.unwrap_err();
            assert_eq!(error.kind(), BackendErrorKind::Schema, "{turn}: {error}");
            assert!(!error.is_retryable());
            let told = error.to_string();
            assert!(
                told.contains("migrate()") && told.contains("seen"),
                "{told}"
            );
        }
        store.migrate().await.unwrap();
        store.remember(&m).await.unwrap();
        assert!(store.seen(&m).await.unwrap());
        run(&mut raw, "DROP TABLE seen").await;
    }
}

#[tokio::test]
async fn a_table_that_does_not_serve_is_refused() {
    let rest = "state TEXT, owner TEXT, since INTEGER, expires_at INTEGER";
    for columns in [
        // Two ids would be one.
        format!("message_id TEXT COLLATE NOCASE PRIMARY KEY, {rest}"),
        format!("message_id TEXT COLLATE RTRIM PRIMARY KEY, {rest}"),
        format!("message_id TEXT COLLATE NOCASE, {rest}, UNIQUE (message_id)"),
        // Without a key two workers both insert.
        format!("message_id TEXT, {rest}"),
        format!("message_id TEXT, {rest}, UNIQUE (message_id, state)"),
        "message_id TEXT PRIMARY KEY, state TEXT, expires_at INTEGER".to_owned(),
        "id TEXT PRIMARY KEY".to_owned(),
        format!("message_id INTEGER PRIMARY KEY, {rest}"),
    ] {
        let dir = Dir::new("unfit");
        let mut raw = dir.raw().await;
        run(&mut raw, format!("CREATE TABLE seen ({columns})")).await;
        let store = SqliteStore::connect(&dir.url(), "seen").await.unwrap();
        for refused in [
            store.migrate().await,
            store.remember(&id("m")).await,
            store.seen(&id("m")).await.map(drop),
        ] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), BackendErrorKind::Schema, "{columns}");
            assert!(!error.is_retryable());
        }
        assert_eq!(number(&mut raw, "SELECT count(*) FROM seen").await, 0);
    }
    let dir = Dir::new("fit");
    let mut raw = dir.raw().await;
    let columns = format!("message_id TEXT NOT NULL, {rest}, UNIQUE (message_id)");
    run(&mut raw, format!("CREATE TABLE seen ({columns})")).await;
    let store = SqliteStore::connect(&dir.url(), "seen").await.unwrap();
    store.migrate().await.unwrap();
    store.remember(&id("m")).await.unwrap();
    assert!(store.seen(&id("m")).await.unwrap());
}

/// By the type of its column SQLite turns texts that look like numbers into numbers.
#[tokio::test]
async fn a_key_that_takes_texts_for_numbers_is_refused() {
    for of_type in ["STRING", "NUMERIC", "INT", "REAL", "DECIMAL(20)", "UUID"] {
        let dir = Dir::new("affinity");
        let mut raw = dir.raw().await;
        run(
            &mut raw,
            format!(
                "CREATE TABLE seen (message_id {of_type} NOT NULL PRIMARY KEY, state TEXT, \
                 owner TEXT, since INTEGER, expires_at INTEGER)"
            ),
        )
        .await;
        let store = SqliteStore::connect(&dir.url(), "seen").await.unwrap();
        let refused = store.remember(&id("100")).await;
        for other in ["1e2", "0100", "100.0", " 100"] {
            let taken = store.seen(&id(other)).await.unwrap_or(false);
            assert!(!taken, "{of_type}: {other:?} was never remembered");
        }
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Schema, "{of_type}");
    }
}

// ===== PHP's table =====

const PHP: &str = "CREATE TABLE bq_idempotency (message_id VARCHAR(255) NOT NULL PRIMARY KEY, \
     state VARCHAR(16) NOT NULL, expires_at BIGINT NULL)";

async fn php_rows(raw: &mut SqliteConnection) -> Vec<(String, Option<i64>)> {
    let rows = fetch(raw, "SELECT state, expires_at FROM bq_idempotency").await;
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[tokio::test]
async fn php_workers_share_their_record() {
    let dir = Dir::new("php");
    let mut raw = dir.raw().await;
    run(&mut raw, PHP).await;
    let store = PhpSqliteStore::connect(&dir.url(), PHP_TABLE)
        .await
        .unwrap();
    let m = id("m");
    // As PDO sends them: prepared, with bound texts.
    let claim =
        "INSERT INTO bq_idempotency (message_id, state, expires_at) VALUES (?, 'claimed', 9)";
    let done = "UPDATE bq_idempotency SET state = 'seen', expires_at = NULL WHERE message_id = ?";
    let release = "DELETE FROM bq_idempotency WHERE message_id = ? AND state = 'claimed'";
    let look = "SELECT count(*) FROM bq_idempotency WHERE message_id = ? AND state = 'seen'";
    async fn php(raw: &mut SqliteConnection, statement: &'static str) -> Result<(), sqlx::Error> {
        let query = sqlx::query(statement).bind("m");
        query.execute(raw).await.map(drop)
    }
    async fn seen(raw: &mut SqliteConnection, look: &'static str) -> bool {
        let row = sqlx::query(look).bind("m").fetch_one(raw).await.unwrap();
        row.get::<i64, _>(0) == 1
    }

    assert!(!store.seen(&m).await.unwrap());
    php(&mut raw, claim).await.unwrap();
    assert!(!store.seen(&m).await.unwrap());
    php(&mut raw, release).await.unwrap();
    assert!(!store.seen(&m).await.unwrap());
    php(&mut raw, claim).await.unwrap();
    php(&mut raw, done).await.unwrap();
    assert!(store.seen(&m).await.unwrap());
    store.remember(&m).await.unwrap();
    assert_eq!(php_rows(&mut raw).await, [("seen".into(), None)]);
    store.forget(&m).await.unwrap();
    assert_eq!(php_rows(&mut raw).await, []);
    // Over a claim of theirs, which they then release: the mark stays.
    php(&mut raw, claim).await.unwrap();
    store.remember(&m).await.unwrap();
    php(&mut raw, release).await.unwrap();
    assert_eq!(php_rows(&mut raw).await, [("seen".into(), None)]);
    assert!(seen(&mut raw, look).await);
    store.forget(&m).await.unwrap();
    store.remember(&m).await.unwrap();
    assert!(seen(&mut raw, look).await);
    let again = php(&mut raw, claim).await.unwrap_err();
    assert!(again.into_database_error().unwrap().is_unique_violation());
    for state in ["SEEN", "seen ", "done", ""] {
        let other = format!("REPLACE INTO bq_idempotency VALUES ('m', '{state}', NULL)");
        run(&mut raw, other).await;
        assert!(!store.seen(&m).await.unwrap(), "{state:?}");
    }
}

#[tokio::test]
async fn a_key_of_phps_that_folds_case_is_refused() {
    let dir = Dir::new("php_folds");
    let mut raw = dir.raw().await;
    run(
        &mut raw,
        PHP.replace("NOT NULL PRIMARY", "COLLATE NOCASE PRIMARY"),
    )
    .await;
    let store = PhpSqliteStore::connect(&dir.url(), PHP_TABLE)
        .await
        .unwrap();
    let error = store.remember(&id("m")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Schema);
    let error = store.seen(&id("m")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Schema);
}

// ===== purge =====

#[tokio::test]
async fn a_purge_takes_what_is_over_and_nothing_else() {
    let dir = Dir::new("purge");
    let store = dir.store(Duration::from_secs(60)).await;
    let mut raw = dir.raw().await;
    assert_eq!(store.purge().await.unwrap(), 0);
    for (id, state, end) in [
        ("done-over", "done", Some(now() - 2000)),
        ("done-long-over", "done", Some(0)),
        ("done-not-yet", "done", Some(now() + MINUTE)),
        ("done-for-ever", "done", None),
        ("claimed-over", "claimed", Some(now() - MINUTE / 2)),
        ("claimed-long-over", "claimed", Some(now() - MINUTE - 2000)),
        ("claimed-not-yet", "claimed", Some(now() + MINUTE)),
        ("claimed-for-ever", "claimed", None),
    ] {
        put(&mut raw, id, state, end).await;
    }
    store.remember(&id("marked")).await.unwrap();
    assert_eq!(store.purge().await.unwrap(), 3);
    let left = [
        "claimed-for-ever",
        "claimed-not-yet",
        "claimed-over",
        "done-for-ever",
        "done-not-yet",
        "marked",
    ];
    assert_eq!(ids(&mut raw).await, left);
    assert_eq!(store.purge().await.unwrap(), 0);
    // More than one batch, and claims in between that stay.
    fill(&mut raw, 2500, "over-{n}", 1).await;
    assert_eq!(store.purge().await.unwrap(), 2500);
    assert_eq!(ids(&mut raw).await, left);
}

#[tokio::test]
async fn a_purge_and_a_question_search_an_index() {
    let dir = Dir::new("steps");
    drop(dir.store(None).await);
    // How many hundreds of steps the statements of the pool take.
    let steps = Arc::new(AtomicU64::new(0));
    let counted = steps.clone();
    let pool = SqlitePoolOptions::new()
        .max_connections(1)
        .after_connect(move |connection, _| {
            let counted = counted.clone();
            Box::pin(async move {
                let count = move || {
                    counted.fetch_add(100, Ordering::SeqCst);
                    true
                };
                connection
                    .lock_handle()
                    .await?
                    .set_progress_handler(100, count);
                Ok(())
            })
        })
        .connect(&dir.url())
        .await
        .unwrap();
    let store = SqliteStore::builder("seen").pool(pool).unwrap();
    assert!(!store.seen(&id("m")).await.unwrap());
    fill(
        &mut dir.raw().await,
        50_000,
        "live-{n}",
        now() + MINUTE * 60,
    )
    .await;
    fill(&mut dir.raw().await, 5, "over-{n}", 1).await;
    let before = steps.load(Ordering::SeqCst);
    assert_eq!(store.purge().await.unwrap(), 5);
    assert!(store.seen(&id("live-40000")).await.unwrap());
    store.remember(&id("live-40000")).await.unwrap();
    store.forget(&id("live-40000")).await.unwrap();
    let taken = steps.load(Ordering::SeqCst) - before;
    assert!(taken < 10_000, "{taken} steps for a table of 50,000 rows");
    // And the counting works.
    let before = steps.load(Ordering::SeqCst);
    fill(&mut dir.raw().await, 1000, "over-{n}", 1).await;
    assert_eq!(store.purge().await.unwrap(), 1000);
    assert!(steps.load(Ordering::SeqCst) - before > 10_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_beside_marks_takes_none_of_them() {
    let dir = Dir::new("traffic");
    let store = dir.store(Duration::from_secs(3600)).await;
    let other = dir.store(Duration::from_secs(3600)).await;
    let mut raw = dir.raw().await;
    fill(&mut raw, 6400, "over-{n}", 1).await;
    let all = Arc::new(Barrier::new(32 + 2));
    let mut tasks = JoinSet::new();
    for task in 0..32 {
        let (store, all) = (store.clone(), all.clone());
        tasks.spawn(async move {
            all.wait().await;
            for n in 0..40 {
                for one in [
                    format!("over-{}", task * 200 + n),
                    format!("over-{}-new-{n}", task * 200),
                ] {
                    store.remember(&id(&one)).await?;
                    assert!(store.seen(&id(&one)).await?, "{one} was purged");
                }
            }
            Ok::<_, BackendError>(())
        });
    }
    let mut purges = JoinSet::new();
    for store in [store.clone(), other] {
        let all = all.clone();
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
    store.purge().await.unwrap();
    let left = records(&mut raw).await;
    assert_eq!(left.len(), 32 * 40 * 2);
    assert!(left.iter().all(|row| row.expires_at.unwrap() > now()));
}
