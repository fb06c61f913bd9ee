//! A worker whose clock is wrong: on Redis, PostgreSQL and MySQL only the server's clock counts.
//!
//! The clock is put wrong for a child process, by a small library in C that is loaded before the
//! system's own. SQLite is left out: it has the clock of the host, which is what it serves.
#![cfg(target_os = "linux")]
#![allow(missing_docs)]

#[path = "support/services.rs"]
mod services;

use services::{PATIENCE, unique};
use sqlx::{AssertSqlSafe, Connection, Executor, MySqlConnection, PgConnection, Row};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::runtime::Runtime;
use tower_idempotency::{
    BoxError, MessageId, Store,
    store::{MySqlStore, PostgresStore, RedisStore},
};

const HOUR: i64 = 3600;
const TTL: Duration = Duration::from_secs(60);

// ===== the wrong clock =====

const SHIM: &str = r#"
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, clock, now);
    const char *offset = getenv("CLOCK_OFFSET");
    if (!failed && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += atol(offset);
    return (int)failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec time;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into)
        *into = now.tv_sec;
    return now.tv_sec;
}
"#;

/// The library that puts clocks wrong, gone at the end of the test.
struct Shim(PathBuf);

impl Shim {
    /// Without a compiler the test is over.
    fn build() -> Option<Shim> {
        let compiler = services::program("cc")?;
        let shim = Shim(env::temp_dir().join(unique("skew")));
        fs::create_dir(&shim.0).unwrap();
        let source = shim.0.join("skew.c");
        fs::write(&source, SHIM).unwrap();
        let output = Command::new(compiler)
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(shim.library())
            .arg(&source)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        Some(shim)
    }

    fn library(&self) -> PathBuf {
        self.0.join("skew.so")
    }

    /// Does a job in a process whose clock is off by so many seconds.
    fn child(&self, offset: i64, service: &str, url: &str, record: &str, job: &str) {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let output = Command::new(env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env("LD_PRELOAD", self.library())
            .env("CLOCK_OFFSET", offset.to_string())
            .env("SKEW_SECONDS", offset.to_string())
            .env("SKEW_EPOCH", epoch.as_secs().to_string())
            .env("SKEW_SERVICE", service)
            .env("SKEW_URL", url)
            .env("SKEW_RECORD", record)
            .env("SKEW_JOB", job)
            .output()
            .unwrap();
        check(&output, job);
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn check(output: &Output, job: &str) {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains(&format!("did: {job}")),
        "{job}: {text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

// ===== the worker =====

/// The worker with the wrong clock; without a job it is no test.
#[tokio::test]
async fn child() {
    let Ok(job) = env::var("SKEW_JOB") else {
        return;
    };
    let variable = |name: &str| env::var(name).unwrap();
    // The clock is really off.
    let epoch: i64 = variable("SKEW_EPOCH").parse().unwrap();
    let skew: i64 = variable("SKEW_SECONDS").parse().unwrap();
    let wrong = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let off = wrong.as_secs() as i64 - epoch - skew;
    assert!(
        (0..HOUR / 2).contains(&off),
        "off by {off} s more than told"
    );

    let (url, record) = (variable("SKEW_URL"), variable("SKEW_RECORD"));
    let ttl = match job.split_once(' ').unwrap().0 {
        "watch" => Duration::from_secs(1),
        _ => TTL,
    };
    match variable("SKEW_SERVICE").as_str() {
        "redis" => {
            let store = RedisStore::builder(record.as_str()).ttl(ttl);
            work(store.connect(&url).await.unwrap(), &job).await;
        }
        "postgres" => {
            let store = PostgresStore::builder(&record).ttl(ttl);
            let store = store.connect(&url).await.unwrap();
            store.migrate().await.unwrap();
            // Nothing is over yet, whatever the worker thinks.
            assert_eq!(store.purge().await.unwrap(), 0);
            work(store, &job).await;
        }
        "mysql" => {
            let store = MySqlStore::builder(&record).ttl(ttl);
            let store = store.connect(&url).await.unwrap();
            store.migrate().await.unwrap();
            assert_eq!(store.purge().await.unwrap(), 0);
            work(store, &job).await;
        }
        service => panic!("no such service: {service}"),
    }
    println!("\ndid: {job}");
}

async fn work<St: Store>(store: St, job: &str) {
    let (verb, text) = job.split_once(' ').unwrap();
    let id = MessageId::from(text);
    let seen = async |id: &MessageId| match store.seen(id).await.map_err(Into::into) {
        Ok(seen) => seen,
        Err(error) => panic!("{:?}", BoxError::from(error)),
    };
    let remember = async |id: &MessageId| {
        if let Err(error) = store.remember(id).await.map_err(Into::into) {
            panic!("{:?}", BoxError::from(error));
        }
    };
    match verb {
        "remember" => {
            assert!(!seen(&id).await);
            remember(&id).await;
            assert!(seen(&id).await);
        }
        "see" => assert!(seen(&id).await, "{id:?} is not seen"),
        // A short life ends on time: by the clock that no one can put wrong.
        "watch" => {
            let start = Instant::now();
            remember(&id).await;
            let mut asked = start;
            while seen(&id).await {
                assert!(start.elapsed() < PATIENCE, "it does not end");
                asked = Instant::now();
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let lived = start.elapsed();
            assert!(lived >= Duration::from_secs(1), "it ended after {lived:?}");
            let last = asked - start;
            assert!(last < Duration::from_secs(5), "seen after {last:?}");
            // Left behind, it would count as over for the purge of the next worker.
            if store.forget(&id).await.is_err() {
                panic!("it cannot be forgotten");
            }
        }
        verb => panic!("no such verb: {verb}"),
    }
}

/// What the workers do to a record, whatever the service: `state` answers now and the end of an id,
/// both by the server's clock, in microseconds.
fn workers(service: &str, url: &str, record: &str, mut state: impl FnMut(&str) -> (i64, i64)) {
    let Some(shim) = Shim::build() else { return };
    let ttl = TTL.as_micros() as i64;
    for (offset, text) in [(HOUR, "ahead"), (-HOUR, "behind")] {
        let (before, _) = state(text);
        shim.child(offset, service, url, record, &format!("remember {text}"));
        let (after, end) = state(text);
        // A millisecond either way for Redis, which tells what is left and not when it ends.
        assert!(
            (before + ttl - 2000..=after + ttl + 2000).contains(&end),
            "{service} {offset}: {} us from the earliest right end",
            end - before - ttl
        );
    }
    for offset in [HOUR, -HOUR] {
        for text in ["ahead", "behind"] {
            shim.child(offset, service, url, record, &format!("see {text}"));
        }
        shim.child(offset, service, url, record, "watch short");
    }
}

#[test]
fn redis_does_not_mind_the_workers_clock() {
    let Some(url) = services::redis() else { return };
    let prefix = unique("skew");
    let client = redis::Client::open(url.as_str()).unwrap();
    let mut raw = client.get_connection().unwrap();
    workers("redis", &url, &prefix, |text| {
        let key = format!("{prefix}{text}");
        let left: i64 = redis::cmd("PTTL").arg(key).query(&mut raw).unwrap();
        let (seconds, micros): (i64, i64) = redis::cmd("TIME").query(&mut raw).unwrap();
        let now = seconds * 1_000_000 + micros;
        (now, now + left * 1000)
    });
    for text in ["ahead", "behind"] {
        let key = format!("{prefix}{text}");
        let _: i64 = redis::cmd("DEL").arg(key).query(&mut raw).unwrap();
    }
}

#[test]
fn postgres_does_not_mind_the_workers_clock() {
    let Some(url) = services::postgres() else {
        return;
    };
    let table = unique("skew");
    let runtime = Runtime::new().unwrap();
    let mut raw = runtime.block_on(async {
        let store = PostgresStore::connect(&url, &table).await.unwrap();
        store.migrate().await.unwrap();
        PgConnection::connect(&url).await.unwrap()
    });
    let statement = format!(
        "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, \
         (SELECT expires_at FROM {table} WHERE message_id = $1)"
    );
    workers("postgres", &url, &table, |text| {
        let query = sqlx::query(AssertSqlSafe(statement.clone())).bind(text.to_owned());
        let row = runtime.block_on(query.fetch_one(&mut raw)).unwrap();
        (row.get(0), row.get::<Option<i64>, _>(1).unwrap_or(0))
    });
    let gone = raw.execute(sqlx::raw_sql(AssertSqlSafe(format!("DROP TABLE {table}"))));
    runtime.block_on(gone).unwrap();
}

#[test]
fn mysql_does_not_mind_the_workers_clock() {
    let Some(url) = services::mysql() else { return };
    let table = unique("skew");
    let runtime = Runtime::new().unwrap();
    let mut raw = runtime.block_on(async {
        let store = MySqlStore::connect(&url, &table).await.unwrap();
        store.migrate().await.unwrap();
        MySqlConnection::connect(&url).await.unwrap()
    });
    let statement = format!(
        "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)), \
         (SELECT expires_at FROM {table} WHERE message_id = ?)"
    );
    workers("mysql", &url, &table, |text| {
        let query = sqlx::query(AssertSqlSafe(statement.clone())).bind(text.to_owned());
        let row = runtime.block_on(query.fetch_one(&mut raw)).unwrap();
        (row.get(0), row.get::<Option<i64>, _>(1).unwrap_or(0))
    });
    let gone = raw.execute(sqlx::raw_sql(AssertSqlSafe(format!("DROP TABLE {table}"))));
    runtime.block_on(gone).unwrap();
}

// ===== the sources =====

/// The code of a file, without its comments and the breaks in its strings.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let lines = text.lines().map(str::trim);
    let code: Vec<&str> = lines.filter(|line| !line.starts_with("//")).collect();
    let words = code.join(" ");
    let words = words.split(|c: char| c.is_whitespace() || c == '\\');
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    words.join(" ")
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path());
    files
        .filter(|file| file.extension().is_some_and(|end| end == "rs"))
        .collect()
}

/// A time of the worker's is bound nowhere, and nothing turns errors of an insert into warnings.
#[test]
fn no_store_reads_the_workers_clock_or_ignores_errors() {
    let store = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/store");
    let mut files = vec![store.join("redis.rs"), store.join("ttl.rs")];
    files.extend(sources(&store.join("sql")));
    files.extend(sources(&store.join("foreign")));
    assert!(files.len() >= 9, "{files:?}");
    let mut statements = 0;
    for file in files {
        let code = code(&file);
        for word in ["SystemTime", "UNIX_EPOCH"] {
            assert!(!code.contains(word), "{}: {word}", file.display());
        }
        let code = code.to_ascii_uppercase();
        for word in [
            "INSERT IGNORE",
            "UPDATE IGNORE",
            "OR IGNORE",
            "REPLACE INTO",
        ] {
            assert!(!code.contains(word), "{}: {word}", file.display());
        }
        statements += code.matches("INSERT INTO").count();
    }
    assert!(statements >= 3, "the statements are looked for elsewhere");
}
