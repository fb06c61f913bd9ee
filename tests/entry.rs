//! What a record says of a message and how many it holds, on the real servers.
#![allow(missing_docs)]

#[path = "support/services.rs"]
mod services;

use services::{Bouncer, cluster, unique};
use sqlx::{AssertSqlSafe, MySqlPool, PgPool};
use std::{
    env, fs,
    time::{Duration, SystemTime},
};
use tower_idempotency::{
    Claim, ClaimStore, Lease, MessageId, MySqlStore, Owner, PostgresStore, RedisStore, SqliteStore,
    error::{BackendError, BackendErrorKind},
    store::{Entry, EntryState, Stats},
};

const TTL: Duration = Duration::from_secs(3600);
const LEASE: Duration = Duration::from_secs(30);

/// The stores that tell.
trait Tells: ClaimStore<Error = BackendError> {
    /// Whether it keeps since when a message is as it is, and who marked it.
    const KEEPS: bool = true;

    async fn look(&self, id: &str) -> Option<Entry>;
    async fn counted(&self) -> Stats;
}

impl Tells for RedisStore {
    const KEEPS: bool = false;

    async fn look(&self, id: &str) -> Option<Entry> {
        RedisStore::entry(self, &id.into()).await.unwrap()
    }

    async fn counted(&self) -> Stats {
        RedisStore::stats(self).await.unwrap()
    }
}

impl Tells for PostgresStore {
    async fn look(&self, id: &str) -> Option<Entry> {
        PostgresStore::entry(self, &id.into()).await.unwrap()
    }

    async fn counted(&self) -> Stats {
        PostgresStore::stats(self).await.unwrap()
    }
}

impl Tells for MySqlStore {
    async fn look(&self, id: &str) -> Option<Entry> {
        MySqlStore::entry(self, &id.into()).await.unwrap()
    }

    async fn counted(&self) -> Stats {
        MySqlStore::stats(self).await.unwrap()
    }
}

impl Tells for SqliteStore {
    async fn look(&self, id: &str) -> Option<Entry> {
        SqliteStore::entry(self, &id.into()).await.unwrap()
    }

    async fn counted(&self) -> Stats {
        SqliteStore::stats(self).await.unwrap()
    }
}

async fn claimed(store: &impl Tells, id: &str) -> Owner {
    let (owner, lease) = (Owner::random(), Lease::new(LEASE).unwrap());
    let claim = store.claim(&id.into(), owner, lease).await.unwrap();
    assert_eq!(claim, Claim::Won);
    owner
}

/// At about this time: the server's clock may be a little off.
fn about_now(time: SystemTime) -> bool {
    let minute = Duration::from_secs(60);
    let now = SystemTime::now();
    (now - minute..now + minute).contains(&time)
}

/// Of an empty record with this TTL.
async fn what_a_record_tells<St: Tells>(store: St) {
    assert_eq!(store.look("none").await, None);
    assert_eq!(store.counted().await, Stats::default());

    store.remember(&"seen".into()).await.unwrap();
    let seen = store.look("seen").await.unwrap();
    assert_eq!((seen.state(), seen.owner()), (EntryState::Done, None));
    let left = seen.expires_in().unwrap();
    assert!(left <= TTL && left > TTL - LEASE, "{left:?}");
    assert_eq!(seen.since().is_some(), St::KEEPS);
    assert!(seen.since().is_none_or(about_now), "{seen:?}");

    let owner = claimed(&store, "claimed").await;
    let entry = store.look("claimed").await.unwrap();
    assert_eq!(entry.state(), EntryState::Claimed);
    assert_eq!(entry.owner(), Some(&*owner.to_string()));
    let left = entry.expires_in().unwrap();
    assert!(left <= LEASE && left > LEASE / 2, "{left:?}");
    assert!(entry.since().is_none_or(about_now), "{entry:?}");

    let owner = claimed(&store, "completed").await;
    assert!(store.complete(&"completed".into(), owner).await.unwrap());
    let entry = store.look("completed").await.unwrap();
    assert_eq!(entry.state(), EntryState::Done);
    let kept = St::KEEPS.then(|| owner.to_string());
    assert_eq!(entry.owner(), kept.as_deref());

    // Too long for a row, with what ends a text, and with what a pattern or a quote would be.
    for odd in ["x".repeat(5000), "nul\0".to_owned(), "'\"$1 %*".to_owned()] {
        assert_eq!(store.look(&odd).await, None);
        store.remember(&odd.as_str().into()).await.unwrap();
        let entry = store.look(&odd).await.unwrap();
        assert_eq!(entry.state(), EntryState::Done, "{odd:.9}");
    }

    let stats = store.counted().await;
    assert_eq!((stats.count(), stats.claimed(), stats.expired()), (6, 1, 0));
    assert_eq!(stats.oldest(), if St::KEEPS { seen.since() } else { None });
}

/// Of an empty record in a table whose marks end at once, and one on the same table where they never do.
async fn what_is_over<St: Tells>(short: St, endless: St) {
    short.remember(&"over".into()).await.unwrap();
    let entry = loop {
        let entry = short.look("over").await.unwrap();
        if entry.expires_in() == Some(Duration::ZERO) {
            break entry;
        }
    };
    assert_eq!(entry.state(), EntryState::Done);
    endless.remember(&"endless".into()).await.unwrap();
    let entry = endless.look("endless").await.unwrap();
    assert_eq!(entry.expires_in(), None);
    let stats = endless.counted().await;
    assert_eq!((stats.count(), stats.claimed(), stats.expired()), (1, 0, 1));
    assert_eq!(stats.oldest(), entry.since());
}

// ===== Redis =====

#[tokio::test]
async fn a_record_in_redis_tells() {
    let Some(url) = services::redis() else { return };
    // Each of them a pattern of its own, were it taken for one.
    let prefix = format!("{}:[a-z]*?\\:", unique("entry"));
    let store = RedisStore::builder(&*prefix).ttl(TTL).connect(&url);
    let store = store.await.unwrap();
    what_a_record_tells(store.clone()).await;

    let raw = redis::Client::open(url).unwrap();
    let mut raw = raw.get_connection().unwrap();
    for (id, value, expected, owner) in [
        ("php", "1", EntryState::Claimed, None),
        ("short", "1:abc", EntryState::Foreign, None),
        (
            "upper",
            "1:ABCDEF0123456789ABCDEF0123456789",
            EntryState::Foreign,
            None,
        ),
        ("else", "0", EntryState::Foreign, None),
        (
            "ours",
            "1:abcdef0123456789abcdef0123456789",
            EntryState::Claimed,
            Some("abcdef0123456789abcdef0123456789"),
        ),
    ] {
        let mut set = redis::cmd("SET");
        set.arg(format!("{prefix}{id}")).arg(value);
        set.exec(&mut raw).unwrap();
        let entry = store.look(id).await.unwrap();
        assert_eq!((entry.state(), entry.owner()), (expected, owner), "{id}");
        assert_eq!(entry.expires_in(), None, "{id}");
    }
    let stats = store.counted().await;
    assert_eq!((stats.count(), stats.claimed()), (11, 6));

    let mut push = redis::cmd("RPUSH");
    push.arg(format!("{prefix}list")).arg("x");
    push.exec(&mut raw).unwrap();
    let error = RedisStore::entry(&store, &"list".into()).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Schema);
    // It is not a record, and keeps nobody from counting those that are.
    assert_eq!(store.counted().await.count(), 11);

    let mut drop = redis::cmd("DEL");
    for id in ["seen", "claimed", "completed", "nul\0", "'\"$1 %*"] {
        drop.arg(format!("{prefix}{id}"));
    }
    drop.arg(format!("{prefix}{}", "x".repeat(5000)));
    for id in ["php", "short", "upper", "else", "ours", "list"] {
        drop.arg(format!("{prefix}{id}"));
    }
    drop.exec(&mut raw).unwrap();
}

#[tokio::test]
async fn more_keys_than_one_scan_answers_are_all_counted() {
    let Some(url) = services::redis() else { return };
    let prefix = unique("entry_many");
    let store = RedisStore::connect(&url, &*prefix).await.unwrap();
    let raw = redis::Client::open(url).unwrap();
    let mut raw = raw.get_connection().unwrap();
    let keys: Vec<String> = (0..2500).map(|n| format!("{prefix}{n}")).collect();
    let mut set = redis::cmd("MSET");
    for (n, key) in keys.iter().enumerate() {
        set.arg(key).arg(if n % 5 == 0 { "1" } else { "2" });
    }
    set.exec(&mut raw).unwrap();
    let stats = store.stats().await.unwrap();
    redis::cmd("DEL").arg(&keys).exec(&mut raw).unwrap();
    // Others write at the same time, so that the server's table may grow: then one may come twice.
    assert!((2500..2600).contains(&stats.count()), "{stats:?}");
    assert!((500..520).contains(&stats.claimed()), "{stats:?}");
}

#[tokio::test]
async fn a_cluster_tells_of_a_message_and_says_that_it_does_not_count() {
    if services::program("redis-server").is_none() {
        return;
    }
    let nodes = cluster();
    let urls: Vec<String> = nodes.iter().map(|node| node.url()).collect();
    let client = redis::cluster::ClusterClient::new(urls).unwrap();
    let store = RedisStore::builder("entry:").cluster(client).await.unwrap();
    let owner = claimed(&store, "m").await;
    let entry = store.look("m").await.unwrap();
    assert_eq!(entry.owner(), Some(&*owner.to_string()));
    let error = RedisStore::stats(&store).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Config);
    assert!(error.to_string().contains("cluster"), "{error}");
}

// ===== the databases =====

#[tokio::test]
async fn a_table_in_postgres_tells() {
    let Some(url) = services::postgres() else {
        return;
    };
    let raw = PgPool::connect(&url).await.unwrap();
    let Some(bouncer) = Bouncer::start(&url) else {
        return;
    };
    for pooler in [false, true] {
        let (tells, over) = (unique("entry"), unique("entry"));
        let store = async |table: &str, ttl: Option<Duration>| {
            let builder = PostgresStore::builder(table).ttl(ttl);
            let url = if pooler { bouncer.url() } else { url.clone() };
            let store = builder.transaction_pooler(pooler).connect(&url).await;
            let store = store.unwrap();
            store.migrate().await.unwrap();
            store
        };
        what_a_record_tells(store(&tells, Some(TTL)).await).await;
        let short = store(&over, Some(Duration::from_millis(1))).await;
        what_is_over(short, store(&over, None).await).await;

        // A state with a blank, by somebody else.
        let foreign = format!("INSERT INTO {tells} VALUES ('f', 'at work', 'some one', 5, NULL)");
        sqlx::raw_sql(AssertSqlSafe(foreign))
            .execute(&raw)
            .await
            .unwrap();
        let drop = format!("DROP TABLE {tells}, {over}");
        let found = store(&tells, None).await.stats().await.unwrap();
        assert_eq!((found.count(), found.claimed()), (7, 2));
        assert_eq!(
            found.oldest(),
            Some(SystemTime::UNIX_EPOCH + Duration::from_micros(5))
        );
        sqlx::raw_sql(AssertSqlSafe(drop))
            .execute(&raw)
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_table_in_mysql_tells() {
    let Some(url) = services::mysql() else { return };
    let raw = MySqlPool::connect(&url).await.unwrap();
    let (tells, over) = (unique("entry"), unique("entry"));
    let store = async |table: &str, ttl: Option<Duration>| {
        let builder = MySqlStore::builder(table).ttl(ttl);
        let store = builder.connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        store
    };
    what_a_record_tells(store(&tells, Some(TTL)).await).await;
    let short = store(&over, Some(Duration::from_millis(1))).await;
    what_is_over(short, store(&over, None).await).await;
    let foreign = format!("INSERT INTO {tells} VALUES ('f', 'at work', 'some one', 5, NULL)");
    sqlx::raw_sql(AssertSqlSafe(foreign))
        .execute(&raw)
        .await
        .unwrap();
    let entry = store(&tells, None).await.entry(&"f".into()).await;
    let entry = entry.unwrap().unwrap();
    assert_eq!(entry.state(), EntryState::Foreign);
    assert_eq!(entry.owner(), Some("some one"));
    let drop = format!("DROP TABLE {tells}, {over}");
    sqlx::raw_sql(AssertSqlSafe(drop))
        .execute(&raw)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_table_in_sqlite_tells() {
    let dir = env::temp_dir().join(unique("entry"));
    fs::create_dir(&dir).unwrap();
    let url = format!("sqlite://{}", dir.join("seen.db").display());
    let store = async |table: &str, ttl: Option<Duration>| {
        let builder = SqliteStore::builder(table).ttl(ttl);
        let store = builder.connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        store
    };
    what_a_record_tells(store("tells", Some(TTL)).await).await;
    let short = store("over", Some(Duration::from_millis(1))).await;
    what_is_over(short, store("over", None).await).await;
    fs::remove_dir_all(dir).unwrap();
}

#[tokio::test]
async fn without_its_table_a_store_says_so() {
    let dir = env::temp_dir().join(unique("entry_none"));
    fs::create_dir(&dir).unwrap();
    let url = format!("sqlite://{}", dir.join("seen.db").display());
    let store = SqliteStore::connect(&url, "none").await.unwrap();
    let id = MessageId::from("m");
    for error in [
        store.entry(&id).await.unwrap_err(),
        store.stats().await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), BackendErrorKind::Schema);
        assert!(error.to_string().contains("`none`"), "{error}");
    }
    fs::remove_dir_all(dir).unwrap();
}

/// A purge that is told to stop stops between two statements, and says how far it came.
#[tokio::test]
async fn a_purge_can_be_stopped_and_tells_how_far_it_is() {
    let dir = env::temp_dir().join(unique("entry_purge"));
    fs::create_dir(&dir).unwrap();
    let url = format!("sqlite://{}", dir.join("seen.db").display());
    let store = SqliteStore::connect(&url, "seen").await.unwrap();
    store.migrate().await.unwrap();
    let raw = sqlx::SqlitePool::connect(&url).await.unwrap();
    sqlx::query(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2500) \
         INSERT INTO seen SELECT 'm' || i, 'done', NULL, 1, 2 FROM n",
    )
    .execute(&raw)
    .await
    .unwrap();
    let purged = store.purge_while(|deleted| deleted < 1000).await.unwrap();
    assert_eq!(purged, 1000);
    assert_eq!(store.stats().await.unwrap().expired(), 1500);
    let (tell, told) = std::sync::mpsc::channel();
    let tell = std::sync::Mutex::new(tell);
    let purged = store.purge_while(move |deleted| tell.lock().unwrap().send(deleted).is_ok());
    assert_eq!(purged.await.unwrap(), 1500);
    assert_eq!(told.iter().collect::<Vec<_>>(), [0, 1000]);
    let panics = store.purge_while(|_| panic!("on purpose")).await;
    assert_eq!(panics.unwrap_err().kind(), BackendErrorKind::Unavailable);
    fs::remove_dir_all(dir).unwrap();
}
