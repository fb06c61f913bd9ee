//! The stores in PostgreSQL: what they write, what they read of what workers in other languages
//! write, and what happens when connections, sessions and settings are not as they should be.
#![allow(missing_docs)]

mod support;

#[path = "support/services.rs"]
mod services;

#[path = "support/postgres.rs"]
mod postgres;

use futures_util::future::{join_all, try_join_all};
use postgres::{Db, NOW, Tables, id, is_kind, until};
use services::{Bouncer, PATIENCE, Proxy, unique};
use sqlx::{Executor, PgPool, Row, postgres::PgPoolOptions};
use std::{
    error::Error,
    future::{Future, poll_fn},
    io::{Read, Write},
    net::{TcpListener, ToSocketAddrs},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    thread,
    time::{Duration, Instant},
};
use support::{Handler, deliver, envelope, layer, now};
use tokio::time::{sleep, timeout};
use tower::ServiceBuilder;
use tower_idempotency::{
    MessageId, Store,
    error::{BackendError, BackendErrorKind, TimedOut},
    store::{
        PostgresStore,
        foreign::{GO_TABLE, GoPostgresStore, PHP_TABLE, PhpPostgresStore},
    },
    testing::store_contract,
};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

fn micros(time: Duration) -> i64 {
    time.as_micros() as i64
}

// ===== rows =====

#[tokio::test]
async fn a_row_says_what_was_done_when_and_for_how_long() {
    let Some(db) = Db::migrated("rows").await else {
        return;
    };
    let ten_thousand_years = Duration::from_secs(10_000 * 365 * 24 * 3600);
    for (ttl, left) in [
        (Some(MINUTE), Some(MINUTE)),
        (None, None),
        (
            Some(Duration::from_nanos(1)),
            Some(Duration::from_millis(1)),
        ),
        (
            Some(Duration::from_micros(1500)),
            Some(Duration::from_millis(2)),
        ),
        (Some(ten_thousand_years), Some(ten_thousand_years)),
        (Some(Duration::from_millis(i64::MAX as u64)), None),
        (Some(Duration::from_secs(u64::MAX)), None),
        (Some(Duration::MAX), None),
    ] {
        let store = db.builder().ttl(ttl).connect(&db.url).await.unwrap();
        // First as a new row, then over the one that is there.
        for _ in 0..2 {
            let before = db.now().await;
            store.remember(&id("m")).await.unwrap();
            let after = db.now().await;
            let row = db.stored("m").await.unwrap();
            assert_eq!((row.state.as_str(), row.owner), ("done", None));
            assert!((before..=after).contains(&row.since), "{ttl:?}");
            match left.map(micros) {
                Some(left) => {
                    let end = row.expires_at.unwrap();
                    assert!((before + left..=after + left).contains(&end), "{ttl:?}");
                }
                None => assert_eq!(row.expires_at, None, "{ttl:?}"),
            }
        }
    }
    let default = db.store().await;
    default.remember(&id("m")).await.unwrap();
    let row = db.stored("m").await.unwrap();
    let left = row.expires_at.unwrap() - row.since;
    assert!((left - micros(24 * HOUR)).abs() < 1_000_000);
    default.forget(&id("m")).await.unwrap();
    assert_eq!(db.stored("m").await, None);
    default.forget(&id("m")).await.unwrap();
    db.drop().await;
}

#[tokio::test]
async fn only_what_is_done_and_not_past_its_end_is_seen() {
    let Some(db) = Db::migrated("states").await else {
        return;
    };
    let store = db.builder().ttl(HOUR).connect(&db.url).await.unwrap();
    let rows = [
        ("claimed", "NULL", false),
        ("claimed", "{now} + 60000000", false),
        ("claimed", "{now} - 1", false),
        ("done", "NULL", true),
        ("done", "{now} + 60000000", true),
        ("done", "{now} - 1", false),
        ("done", "0", false),
        ("something", "NULL", false),
    ];
    for (nr, (state, end, _)) in rows.iter().enumerate() {
        let end = end.replace("{now}", NOW);
        db.run(&format!(
            "INSERT INTO {{t}} VALUES ('m{nr}', '{state}', 'somebody', {NOW}, {end})"
        ))
        .await;
    }
    let ids: Vec<MessageId> = (0..rows.len()).map(|nr| id(&format!("m{nr}"))).collect();
    let expected: Vec<bool> = rows.iter().map(|row| row.2).collect();
    // One by one and together: these are two statements.
    let mut alone = vec![];
    for id in &ids {
        alone.push(store.seen(id).await.unwrap());
    }
    assert_eq!(alone, expected);
    let together = try_join_all(ids.iter().map(|id| store.seen(id))).await;
    assert_eq!(together.unwrap(), expected);
    // Done, whatever it was, and whoever held it.
    for id in &ids {
        store.remember(id).await.unwrap();
        let row = db.stored(id).await.unwrap();
        assert_eq!((row.state.as_str(), row.owner), ("done", None));
        assert!(row.expires_at.unwrap() > row.since + micros(HOUR) / 2);
        assert!(store.seen(id).await.unwrap());
        // A claim is dropped, too.
        db.run("UPDATE {t} SET state = 'claimed', owner = 'x'")
            .await;
        store.forget(id).await.unwrap();
        assert_eq!(db.stored(id).await, None);
    }
    db.drop().await;
}

#[tokio::test]
async fn ids_that_do_not_fit_are_stored_as_their_hash() {
    let Some(db) = Db::migrated("hash").await else {
        return;
    };
    let store = db.store().await;
    let long = "é".repeat(128);
    for (text, verbatim) in [
        ("a", true),
        ("", true),
        (" ", true),
        ("'; DROP TABLE x; --\\", true),
        ("$1 $2 ${t}", true),
        (&long[..254], true),
        (&format!("x{}", &long[..254]), true),
        (&long, false),
        ("a\0b", false),
        ("sha256:", false),
        ("sha256:0000", false),
    ] {
        store.remember(&id(text)).await.unwrap();
        let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
        let hash: String = db
            .get(&format!(
                "SELECT 'sha256:' || encode(sha256(decode('{hex}', 'hex')), 'hex')"
            ))
            .await;
        let key = if verbatim { text } else { &hash };
        assert_eq!(db.keys().await, [key.to_owned()].into());
        assert!(store.seen(&id(text)).await.unwrap());
        // What the hash is spelled like is another id.
        assert!(!store.seen(&id(&hash)).await.unwrap());
        store.forget(&id(text)).await.unwrap();
        assert!(db.keys().await.is_empty(), "{text:?}");
    }
    db.drop().await;
}

#[tokio::test]
async fn two_consumers_of_one_message_both_run() {
    let (Some(billing), Some(mail)) = (Db::migrated("billing").await, Db::migrated("mail").await)
    else {
        return;
    };
    billing.count_statements().await;
    for db in [&billing, &mail] {
        let handler = Handler::default();
        let (layer, events) = layer(db.store().await);
        let mut service = ServiceBuilder::new().layer(layer).service(handler.clone());
        for _ in 0..3 {
            deliver(&mut service, envelope("m")).await.unwrap();
        }
        assert_eq!(handler.runs(), 1);
        assert_eq!(events.all(), ["ran m", "duplicate m", "duplicate m"]);
    }
    // A duplicate writes nothing.
    assert_eq!(billing.statements("INSERT").await, 1);
    billing.drop().await;
    mail.drop().await;
}

#[tokio::test]
async fn the_statements_for_a_table_make_what_migrate_makes() {
    let Some(db) = Db::bare("ddl").await else {
        return;
    };
    let (made, written) = (unique("ddl_made"), unique("ddl_written"));
    db.run(&format!("CREATE SCHEMA {made}; CREATE SCHEMA {written}"))
        .await;
    let store = |schema: &str| {
        let builder = PostgresStore::builder(&format!("{schema}.Seen"));
        builder.pool(db.users_pool(1, &[])).unwrap()
    };
    let (by_migrate, by_hand) = (store(&made), store(&written));
    by_migrate.migrate().await.unwrap();
    for _ in 0..2 {
        db.run(&by_hand.ddl()).await;
    }
    let mut catalogues = vec![];
    for schema in [&made, &written] {
        let mut catalogue: Vec<String> = vec![];
        for query in [
            "SELECT format('%s %s %s %s %s', column_name, data_type, is_nullable, collation_name, column_default) \
             FROM information_schema.columns WHERE table_schema = '{s}' ORDER BY ordinal_position",
            "SELECT indexdef FROM pg_indexes WHERE schemaname = '{s}' ORDER BY indexname",
            "SELECT conname || pg_get_constraintdef(oid) FROM pg_constraint \
             WHERE connamespace = '{s}'::regnamespace ORDER BY conname",
            "SELECT format('%s %s %s', relname, relkind, relpersistence) FROM pg_class WHERE relnamespace = '{s}'::regnamespace ORDER BY relname",
        ] {
            for row in db.rows(&query.replace("{s}", schema)).await {
                catalogue.push(row.get::<String, _>(0).replace(schema.as_str(), "s"));
            }
        }
        catalogues.push(catalogue);
    }
    assert_eq!(catalogues[0], catalogues[1]);
    for expected in [
        "message_id text NO C ",
        "state text NO  ",
        "owner text YES  ",
        "since bigint NO  ",
        "expires_at bigint YES  ",
        r#"CREATE UNIQUE INDEX "Seen_pkey" ON s."Seen" USING btree (message_id)"#,
        r#"CREATE INDEX "Seen_expires_at" ON s."Seen" USING btree (expires_at)"#,
        "Seen_pkeyPRIMARY KEY (message_id)",
    ] {
        assert!(
            catalogues[0].iter().any(|line| line == expected),
            "{expected}"
        );
    }
    // And each works on its own.
    by_hand.migrate().await.unwrap();
    by_hand.remember(&id("m")).await.unwrap();
    assert!(by_hand.seen(&id("m")).await.unwrap());
    assert!(!by_migrate.seen(&id("m")).await.unwrap());
    assert_eq!(by_hand.purge().await.unwrap(), 0);
    db.run(&format!(
        "DROP SCHEMA {made} CASCADE; DROP SCHEMA {written} CASCADE"
    ))
    .await;
    db.drop().await;
}

// ===== other fleets =====

const GO: &str = "CREATE TABLE {t} (message_id TEXT PRIMARY KEY, \
                  created_at TIMESTAMPTZ NOT NULL DEFAULT now(), expires_at TIMESTAMPTZ NULL)";

const PHP: &str =
    "CREATE TABLE {t} (message_id VARCHAR(255) PRIMARY KEY, state VARCHAR(16), expires_at BIGINT)";

#[tokio::test]
async fn go_workers_share_their_record() {
    let Some(db) = Db::bare("go").await else {
        return;
    };
    db.run(GO).await;
    let builder = GoPostgresStore::builder(&db.table).ttl(MINUTE);
    let store = builder.connect(&db.url).await.unwrap();
    let m = id("m");
    // What Go's own store says, with the end computed by its worker.
    let go_seen = async || -> bool {
        db.get("SELECT EXISTS (SELECT 1 FROM {t} WHERE message_id = 'm' AND (expires_at IS NULL OR expires_at > now()))")
            .await
    };
    let go_remember = async |end: &str| {
        db.rows(&format!(
            "INSERT INTO {{t}} (message_id, expires_at) VALUES ('m', {end}) ON CONFLICT DO NOTHING RETURNING 1"
        ))
        .await
        .len()
    };
    let forget = "DELETE FROM {t} WHERE message_id = 'm'";

    assert!(!store.seen(&m).await.unwrap());
    assert_eq!(
        go_remember("'2100-01-01 00:00:00+00'::timestamptz").await,
        1
    );
    assert!(store.seen(&m).await.unwrap());
    db.run(forget).await;
    assert!(!store.seen(&m).await.unwrap());
    assert_eq!(go_remember("NULL").await, 1);
    assert!(store.seen(&m).await.unwrap());
    store.forget(&m).await.unwrap();
    assert!(!go_seen().await);

    // Theirs is past its end, and in the way of nobody.
    assert_eq!(go_remember("now() - interval '1 ms'").await, 1);
    db.run("UPDATE {t} SET created_at = now() - interval '1 h'")
        .await;
    assert!(!store.seen(&m).await.unwrap());
    assert!(
        !try_join_all([store.seen(&m), store.seen(&id("n"))])
            .await
            .unwrap()[0]
    );
    for _ in 0..2 {
        store.remember(&m).await.unwrap();
        assert!(go_seen().await);
        assert!(store.seen(&m).await.unwrap());
        let fresh: bool = db
            .get(
                "SELECT created_at BETWEEN now() - interval '1 s' AND now() AND \
                 expires_at - created_at BETWEEN interval '60 s' AND interval '60.1 s' FROM {t}",
            )
            .await;
        assert!(fresh);
    }
    assert_eq!(go_remember("NULL").await, 0);
    db.run(forget).await;
    assert!(!store.seen(&m).await.unwrap());

    let for_ever = GoPostgresStore::builder(&db.table).ttl(None);
    let for_ever = for_ever.connect(&db.url).await.unwrap();
    for_ever.remember(&m).await.unwrap();
    assert!(db.get::<bool>("SELECT expires_at IS NULL FROM {t}").await);
    assert_eq!(GO_TABLE, "babelqueue_idempotency");
    db.drop().await;
}

#[tokio::test]
async fn php_workers_share_their_record() {
    let Some(db) = Db::bare("php").await else {
        return;
    };
    db.run(PHP).await;
    let store = PhpPostgresStore::connect(&db.url, &db.table).await.unwrap();
    let m = id("m");
    let php_claims = "INSERT INTO {t} (message_id, state, expires_at) \
                      VALUES ('m', 'claimed', extract(epoch from now())::bigint + 300) ON CONFLICT DO NOTHING RETURNING 1";
    let php_marks = "UPDATE {t} SET state = 'seen', expires_at = NULL WHERE message_id = 'm'";
    let php_releases = "DELETE FROM {t} WHERE message_id = 'm' AND state = 'claimed'";
    let php_seen = "SELECT state = 'seen' AND expires_at IS NULL FROM {t} WHERE message_id = 'm'";

    assert!(!store.seen(&m).await.unwrap());
    // Claimed is not seen; then they finish.
    assert_eq!(db.rows(php_claims).await.len(), 1);
    assert!(!store.seen(&m).await.unwrap());
    assert!(
        !try_join_all([store.seen(&m), store.seen(&id("n"))])
            .await
            .unwrap()[0]
    );
    db.run(php_marks).await;
    assert!(store.seen(&m).await.unwrap());
    assert!(
        try_join_all([store.seen(&m), store.seen(&id("n"))])
            .await
            .unwrap()[0]
    );
    store.forget(&m).await.unwrap();
    // Claimed, and released.
    assert_eq!(db.rows(php_claims).await.len(), 1);
    db.run(php_releases).await;
    assert!(!store.seen(&m).await.unwrap());
    // Claimed, and we are done: their release finds nothing of theirs, their claim something of ours.
    assert_eq!(db.rows(php_claims).await.len(), 1);
    store.remember(&m).await.unwrap();
    store.remember(&m).await.unwrap();
    db.run(php_releases).await;
    assert!(db.get::<bool>(php_seen).await);
    assert!(store.seen(&m).await.unwrap());
    assert!(db.rows(php_claims).await.is_empty());
    store.forget(&m).await.unwrap();
    assert!(db.keys().await.is_empty());
    store.remember(&m).await.unwrap();
    assert!(db.get::<bool>(php_seen).await);
    assert_eq!(PHP_TABLE, "bq_idempotency");
    db.drop().await;
}

#[tokio::test]
async fn an_id_that_a_record_cannot_hold_is_refused_and_touches_no_other() {
    let Some(db) = Db::bare("unsuitable").await else {
        return;
    };
    db.run(PHP).await;
    let php = PhpPostgresStore::connect(&db.url, &db.table).await.unwrap();
    let (fits, long) = ("é".repeat(255), "é".repeat(256));
    php.remember(&id(&fits)).await.unwrap();
    assert!(php.seen(&id(&fits)).await.unwrap());
    for text in [&long, "a\0b", &"x".repeat(65536)] {
        let ids = [id("good"), id(text), id(&fits)];
        let answers = join_all(ids.iter().map(|id| php.remember(id))).await;
        let [good, bad, other] = <[_; 3]>::try_from(answers).unwrap();
        good.unwrap();
        other.unwrap();
        is_kind(bad, BackendErrorKind::UnsuitableId);
        let seen = try_join_all(ids.iter().map(|id| php.seen(id))).await;
        assert_eq!(seen.unwrap(), [true, false, true]);
        php.forget(&id(text)).await.unwrap();
        assert_eq!(db.keys().await, ["good".to_owned(), fits.clone()].into());
    }
    // Without a limit of its own, the column takes what PostgreSQL can index.
    db.run("DROP TABLE {t}").await;
    db.run(GO).await;
    let go = GoPostgresStore::connect(&db.url, &db.table).await.unwrap();
    go.remember(&id(&long)).await.unwrap();
    assert!(go.seen(&id(&long)).await.unwrap());
    refuses(&go, "a\0b").await;
    assert_eq!(db.keys().await, ["good".to_owned(), long].into());
    db.drop().await;
}

async fn refuses(go: &GoPostgresStore, text: &str) {
    let ids = [id("good"), id(text)];
    let answers = join_all(ids.iter().map(|id| go.remember(id))).await;
    let [good, bad] = <[_; 2]>::try_from(answers).unwrap();
    good.unwrap();
    is_kind(bad, BackendErrorKind::UnsuitableId);
    assert!(!go.seen(&id(text)).await.unwrap());
    go.forget(&id(text)).await.unwrap();
}

#[tokio::test]
async fn an_id_too_long_for_an_index_is_refused_like_any_other() {
    let Some(db) = Db::bare("indexed").await else {
        return;
    };
    db.run(GO).await;
    let go = GoPostgresStore::connect(&db.url, &db.table).await.unwrap();
    // Some kilobytes that cannot be compressed.
    let random: String = (0..200).map(|_| MessageId::random().to_string()).collect();
    refuses(&go, &random).await;
    assert_eq!(db.keys().await, ["good".to_owned()].into());
    db.drop().await;
}

// ===== clocks =====

/// A schema in which the server's clock goes wrong by so much, for those whose search path has it.
async fn skew(db: &Db, by: &str) {
    db.run(&format!(
        "CREATE SCHEMA {{t}};
         CREATE FUNCTION {{t}}.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
         $$ SELECT pg_catalog.clock_timestamp() + interval '{by}' $$;
         CREATE FUNCTION {{t}}.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS
         $$ SELECT pg_catalog.statement_timestamp() + interval '{by}' $$"
    ))
    .await;
}

#[tokio::test]
async fn the_servers_clock_counts_and_not_the_workers() {
    for (by, hours) in [("1 hour", 1), ("-1 hour", -1)] {
        let Some(db) = Db::migrated("clock").await else {
            return;
        };
        skew(&db, by).await;
        let off = hours * micros(HOUR);
        // Worker and server are an hour apart for this one, and not for the other.
        let path = format!("{},pg_catalog,public", db.table);
        let pool = db.users_pool(2, &[("search_path", &path)]);
        let skewed = db.builder().ttl(MINUTE).pool(pool).unwrap();
        let straight = db.builder().ttl(MINUTE).connect(&db.url).await.unwrap();
        let before = db.now().await + off;
        skewed.remember(&id("m")).await.unwrap();
        let after = db.now().await + off;
        let row = db.stored("m").await.unwrap();
        assert!((before..=after).contains(&row.since));
        let end = row.expires_at.unwrap() - micros(MINUTE);
        assert!((before..=after).contains(&end));
        assert!(skewed.seen(&id("m")).await.unwrap());
        assert!(
            try_join_all([skewed.seen(&id("m")), skewed.seen(&id("m"))])
                .await
                .unwrap()[0]
        );
        assert_eq!(skewed.purge().await.unwrap(), 0);
        // By the other clock it has ended, or has not.
        assert_eq!(straight.seen(&id("m")).await.unwrap(), hours > 0);
        assert_eq!(straight.purge().await.unwrap(), u64::from(hours < 0));
        db.drop().await;
    }
}

/// Longer than the TTL, and than what several ids wait together.
const LOCKED: Duration = Duration::from_millis(1500);
const SHORT: Duration = Duration::from_millis(300);

#[tokio::test]
async fn waiting_for_a_lock_does_not_shorten_the_time_an_id_is_kept() {
    let Some(db) = Db::migrated("deadline").await else {
        return;
    };
    let store = db.warm(db.builder().ttl(SHORT)).await;
    store.remember(&id("m")).await.unwrap();
    for (lock, commits) in [
        ("UPDATE {t} SET expires_at = 1 WHERE message_id = 'm'", true),
        ("SELECT 1 FROM {t} WHERE message_id = 'm' FOR UPDATE", false),
        ("DELETE FROM {t} WHERE message_id = 'm'", true),
        // The end is computed before the wait for this one.
        ("INSERT INTO {t} VALUES ('m', 'done', NULL, 0, 0)", false),
        ("LOCK TABLE {t} IN SHARE MODE", true),
    ] {
        for beside in [0, 20] {
            if lock.starts_with("INSERT") {
                store.forget(&id("m")).await.unwrap();
            }
            let held = db.hold(lock).await;
            let ids = (0..beside).map(|n| format!("x{n}"));
            let ids: Vec<String> = ids.chain(["m".to_owned()]).collect();
            let all = ids.iter().map(|text| store.remember(&id(text)));
            let all = tokio::spawn(try_join_all(all));
            db.until_waiting(1).await;
            sleep(LOCKED).await;
            let released = db.now().await;
            if commits {
                held.commit().await;
            } else {
                held.rollback().await;
            }
            all.await.unwrap().unwrap();
            let answered = db.now().await;
            let row = db.stored("m").await.unwrap();
            let end = row.expires_at.unwrap() - micros(SHORT);
            // A tenth of the time is what an end may be off by.
            let tolerance = micros(SHORT) / 10;
            assert!(
                (released - tolerance..=answered).contains(&end),
                "{lock}, {beside}: {} µs",
                end - released
            );
        }
    }
    db.drop().await;
}

#[tokio::test]
async fn an_end_is_computed_when_the_row_is_written() {
    let Some(db) = Db::migrated("written").await else {
        return;
    };
    let store = db.warm(db.builder().ttl(HOUR)).await;
    store.remember(&id("m")).await.unwrap();
    // Not so long that the statement would be sent again for it.
    for _ in 0..2 {
        let held = db
            .hold("UPDATE {t} SET since = 1 WHERE message_id = 'm'")
            .await;
        let caller = tokio::spawn(store.remember(&id("m")));
        db.until_waiting(1).await;
        sleep(Duration::from_millis(500)).await;
        let released = db.now().await;
        held.commit().await;
        caller.await.unwrap().unwrap();
        let row = db.stored("m").await.unwrap();
        assert!(row.since >= released);
        assert!(row.expires_at.unwrap() >= released + micros(HOUR));
    }
    db.drop().await;
}

#[tokio::test]
async fn many_short_waits_do_not_shorten_it_either() {
    let Some(db) = Db::migrated("waits").await else {
        return;
    };
    let store = db.warm(db.builder().ttl(SHORT)).await;
    // Each lock is shorter than what a statement for several ids waits for one, and they follow
    // one upon the other in the order of the ids.
    let mut locks = vec![];
    for n in 0..8 {
        let lock = format!("INSERT INTO {{t}} VALUES ('m{n}', 'done', NULL, 0, 0)");
        locks.push(db.hold(&lock).await);
    }
    let ids = ["a".to_owned()].into_iter();
    let ids: Vec<String> = ids.chain((0..8).map(|n| format!("m{n}"))).collect();
    let all = ids.iter().map(|text| store.remember(&id(text)));
    let all = tokio::spawn(try_join_all(all));
    db.until_waiting(1).await;
    for lock in locks {
        sleep(Duration::from_millis(60)).await;
        lock.rollback().await;
    }
    all.await.unwrap().unwrap();
    let answered = db.now().await;
    // Of the last one, which waited to the end, as of the others once all was said.
    for text in &ids {
        let end = db.stored(text).await.unwrap().expires_at.unwrap();
        let early = answered - (end - micros(SHORT));
        // They go together, or each for itself when the machine is slow: by then the others may
        // have been answered for a while.
        if text == "m7" {
            assert!(
                early < micros(Duration::from_millis(200)),
                "{text}: {early}"
            );
        }
        assert!(early < micros(PATIENCE), "{text}: {early}");
    }
    db.drop().await;
}

// ===== connections =====

async fn proxied(db: &Db) -> (Proxy, String) {
    let server = services::host_and_port(&db.url);
    let proxy = Proxy::start(server.to_socket_addrs().unwrap().next().unwrap()).await;
    let url = db.url.replace(&server, &proxy.addr().to_string());
    (proxy, url)
}

#[tokio::test]
async fn a_server_that_comes_back_is_found_again() {
    let Some(db) = Db::migrated("restart").await else {
        return;
    };
    let (proxy, url) = proxied(&db).await;
    let builder = db.builder().response_timeout(PATIENCE).max_connections(4);
    let store = builder.connect(&url).await.unwrap();
    let ids: Vec<MessageId> = (0..40).map(|n| id(&format!("m{n}"))).collect();
    try_join_all(ids.iter().map(|id| store.remember(id)))
        .await
        .unwrap();
    for _ in 0..3 {
        // Idle connections that are gone cost nobody an error.
        proxy.cut();
        until("they are gone", async || db.sessions("true").await == 0).await;
        try_join_all(ids.iter().map(|id| store.seen(id)))
            .await
            .unwrap();
        store.forget(&id("m0")).await.unwrap();
        store.remember(&id("m0")).await.unwrap();
    }
    // While it is away, an error says so at once, not after the time limit.
    proxy.refuse(true);
    proxy.cut();
    for _ in 0..3 {
        let begun = Instant::now();
        let error = is_kind(store.seen(&id("m1")).await, BackendErrorKind::Unavailable);
        assert!(error.is_retryable());
        is_kind(
            store.remember(&id("m1")).await,
            BackendErrorKind::Unavailable,
        );
        is_kind(store.forget(&id("m1")).await, BackendErrorKind::Unavailable);
        assert!(begun.elapsed() < PATIENCE / 2);
    }
    proxy.refuse(false);
    assert!(store.seen(&id("m1")).await.unwrap());
    store.remember(&id("after")).await.unwrap();
    assert_eq!(db.keys().await.len(), 41);
    db.drop().await;
}

#[tokio::test]
async fn sessions_that_an_operator_ends_are_replaced() {
    let Some(db) = Db::migrated("terminate").await else {
        return;
    };
    let store = db.warm(db.builder()).await;
    let end =
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{t}'";
    // Under way: 57P01 is no answer.
    let held = db.hold("LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE").await;
    let caller = tokio::spawn(store.seen(&id("m")));
    db.until_waiting(1).await;
    db.run(end).await;
    is_kind(caller.await.unwrap(), BackendErrorKind::Unavailable);
    held.commit().await;
    for _ in 0..5 {
        store.remember(&id("m")).await.unwrap();
        db.run(end).await;
        until("they are gone", async || db.sessions("true").await == 0).await;
        assert!(store.seen(&id("m")).await.unwrap());
    }
    db.drop().await;
}

#[tokio::test]
async fn a_connection_that_hangs_costs_one_time_limit() {
    let Some(db) = Db::migrated("hung").await else {
        return;
    };
    let (proxy, url) = proxied(&db).await;
    let limit = Duration::from_millis(500);
    let pool = only_one(&url);
    let builder = db.builder().response_timeout(limit);
    let store = builder.pool(pool.clone()).unwrap();
    store.remember(&id("m")).await.unwrap();
    for commands in ["seen", "remember", "forget"] {
        // Prepared, so that nothing is asked but the statement itself.
        store.remember(&id("m")).await.unwrap();
        store.forget(&id("other")).await.unwrap();
        assert!(store.seen(&id("m")).await.unwrap());
        // In the middle of an answer, which is lost: whether it took effect is unknown.
        let held = db.hold("LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE").await;
        let (ours, text) = (store.clone(), id(commands));
        let begun = Instant::now();
        let caller = tokio::spawn(async move {
            match commands {
                "seen" => ours.seen(&text).await.map(drop),
                "remember" => ours.remember(&text).await,
                _ => ours.forget(&text).await,
            }
        });
        db.until_waiting(1).await;
        proxy.swallow_present();
        held.commit().await;
        let error = is_kind(caller.await.unwrap(), BackendErrorKind::Unavailable);
        let source = error.source().unwrap().downcast_ref::<TimedOut>();
        assert_eq!(source.unwrap().limit(), limit);
        assert!((limit..limit * 20).contains(&begun.elapsed()));
        assert!(store.seen(&id("m")).await.unwrap(), "{commands}");
    }
    assert!(db.stored("remember").await.is_some());
    // While it was idle: the next one finds out.
    until("it is idle", async || pool.num_idle() == 1).await;
    proxy.swallow_present();
    is_kind(store.seen(&id("m")).await, BackendErrorKind::Unavailable);
    assert!(store.seen(&id("m")).await.unwrap());
    db.drop().await;
}

/// A pool of one connection, which has time to connect on a busy machine.
fn only_one(url: &str) -> PgPool {
    PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(Duration::from_secs(2))
        .connect_lazy(url)
        .unwrap()
}

#[tokio::test]
async fn a_connection_that_hangs_as_it_is_given_back_costs_one_time_limit() {
    let Some(db) = Db::migrated("given_back").await else {
        return;
    };
    let (proxy, url) = proxied(&db).await;
    let store = db.builder().response_timeout(Duration::from_millis(500));
    let store = store.pool(only_one(&url)).unwrap();
    store.remember(&id("m")).await.unwrap();
    // The answer is there, but the pool has not seen yet that the connection is good.
    proxy.swallow_present();
    let _ = store.seen(&id("m")).await;
    assert!(store.seen(&id("m")).await.unwrap());
    db.drop().await;
}

#[tokio::test]
async fn connections_that_hang_together_cost_one_time_limit() {
    let Some(db) = Db::migrated("all_hung").await else {
        return;
    };
    let (proxy, url) = proxied(&db).await;
    let builder = db.builder().response_timeout(Duration::from_millis(500));
    let store = builder.connect(&url).await.unwrap();
    let ids: Vec<MessageId> = (0..40).map(|n| id(&format!("m{n}"))).collect();
    try_join_all(ids.iter().map(|id| store.forget(id)))
        .await
        .unwrap();
    assert!(db.sessions("true").await > 5);
    proxy.swallow_present();
    is_kind(store.seen(&id("m")).await, BackendErrorKind::Unavailable);
    assert!(!store.seen(&id("m")).await.unwrap());
    store.remember(&id("m")).await.unwrap();
    db.drop().await;
}

#[tokio::test]
async fn a_purge_whose_connection_hangs_ends() {
    let Some(db) = Db::migrated("hung_purge").await else {
        return;
    };
    let (proxy, url) = proxied(&db).await;
    let limit = Duration::from_millis(500);
    let builder = db.builder().response_timeout(limit).max_connections(1);
    let store = builder.connect(&url).await.unwrap();
    for background in [false, true] {
        store.remember(&id("m")).await.unwrap();
        let held = db.hold("LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE").await;
        let purging = tokio::spawn(store.clone_purge());
        db.until_waiting(1).await;
        let every = background.then(|| store.purge_every(HOUR, drop).unwrap());
        proxy.swallow_present();
        held.commit().await;
        let purged = timeout(PATIENCE, purging).await.expect("it ends");
        is_kind(purged.unwrap(), BackendErrorKind::Unavailable);
        if let Some(every) = every {
            timeout(PATIENCE, every.stop()).await.expect("it stops");
        }
        // Nor does it keep the connection.
        assert!(store.seen(&id("m")).await.unwrap());
    }
    db.drop().await;
}

#[tokio::test]
async fn what_is_not_let_in_says_why() {
    let Some(db) = Db::migrated("denied").await else {
        return;
    };
    let role = db.table.clone();
    db.run(&format!("CREATE ROLE {role} NOLOGIN")).await;
    let as_role = |password: &str| {
        let (scheme, rest) = db.url.split_once("://").unwrap();
        let host = rest.split_once('@').map_or(rest, |(_, host)| host);
        format!("{scheme}://{role}{password}@{host}")
    };
    let url = as_role(":s3cret");
    let refused = db.builder().connect(&url).await;
    let error = is_kind(refused, BackendErrorKind::Denied);
    assert!(!error.is_retryable());
    // Neither in time nor with a wait.
    let missing = db.url.replace("/test", "/no_such_database");
    let error = is_kind(
        db.builder().connect(&missing).await,
        BackendErrorKind::Schema,
    );
    assert!(!error.is_retryable() && error.to_string().contains("no_such_database"));
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = nobody.local_addr().unwrap();
    drop(nobody);
    let hasty = db.builder().response_timeout(Duration::from_millis(200));
    let url = format!("postgres://somebody:s3cret@{closed}/test");
    let error = is_kind(hasty.connect(&url).await, BackendErrorKind::Unavailable);
    assert!(error.is_retryable());
    for url in [
        "postgres://somebody:s3cret@[::1/test",
        "postgres://somebody:s3cret@localhost:port/test",
        "mysql://somebody:s3cret@localhost/test",
        "s3cret",
    ] {
        let error = db.builder().connect(url).await.unwrap_err();
        let is_url = url.starts_with("mysql");
        assert!(
            is_url || error.kind() == BackendErrorKind::Config,
            "{error:?}"
        );
        assert!(
            !format!("{error} {error:?}").contains("s3cret"),
            "{error:?}"
        );
    }

    // Let in, and allowed to read.
    db.run(&format!(
        "ALTER ROLE {role} LOGIN; GRANT SELECT ON {{t}} TO {role}"
    ))
    .await;
    let reader = db.builder().connect(&as_role("")).await.unwrap();
    assert!(!reader.seen(&id("m")).await.unwrap());
    let error = is_kind(reader.remember(&id("m")).await, BackendErrorKind::Denied);
    assert!(!error.is_retryable());
    is_kind(reader.forget(&id("m")).await, BackendErrorKind::Denied);
    is_kind(reader.purge().await, BackendErrorKind::Denied);
    // Nothing is missing, so nothing is made.
    reader.migrate().await.unwrap();
    let none = PostgresStore::builder(&unique("denied"));
    let none = none.connect(&as_role("")).await.unwrap();
    is_kind(none.migrate().await, BackendErrorKind::Denied);
    drop((reader, none));
    db.run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
        .await;
    db.drop().await;
}

#[tokio::test]
async fn a_pool_with_no_connection_to_spare_says_so_in_time() {
    let Some(db) = Db::migrated("exhausted").await else {
        return;
    };
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(Duration::from_millis(300))
        .connect_lazy_with(db.options());
    let store = db.builder().pool(pool.clone()).unwrap();
    // Before the first use and later.
    for _ in 0..2 {
        let held = pool.acquire().await.unwrap();
        let begun = Instant::now();
        let m = id("m");
        let (seen, remember, forget) =
            tokio::join!(store.seen(&m), store.remember(&m), store.forget(&m));
        for answer in [seen.map(drop), remember, forget] {
            let error = is_kind(answer, BackendErrorKind::Unavailable);
            assert!(error.is_retryable());
        }
        is_kind(store.migrate().await, BackendErrorKind::Unavailable);
        is_kind(store.purge().await, BackendErrorKind::Unavailable);
        assert!(begun.elapsed() < Duration::from_secs(20));
        drop(held);
        store.remember(&m).await.unwrap();
        assert!(store.seen(&m).await.unwrap());
        store.forget(&m).await.unwrap();
    }
    // A store on a user's pool takes a connection for a statement only, and none while idle.
    until("the connection is back", async || pool.num_idle() == 1).await;
    drop(pool.try_acquire().unwrap());
    pool.close().await;
    is_kind(store.seen(&id("m")).await, BackendErrorKind::Unavailable);
    db.drop().await;
}

#[tokio::test]
async fn a_closed_session_keeps_no_settings_of_ours() {
    let Some(db) = Db::migrated("settings").await else {
        return;
    };
    let pool = db.users_pool(1, &[("lock_timeout", "1234")]);
    let store = db.builder().pool(pool.clone()).unwrap();
    store.migrate().await.unwrap();
    let m = id("m");
    for _ in 0..2 {
        store.remember(&m).await.unwrap();
        store.forget(&m).await.unwrap();
        store.seen(&m).await.unwrap();
        store.purge().await.unwrap();
        db.run("DROP INDEX {t}_expires_at").await;
        store.migrate().await.unwrap();
        let setting = pool.fetch_one("SHOW lock_timeout").await.unwrap();
        assert_eq!(setting.get::<&str, _>(0), "1234ms");
    }
    pool.close().await;
    db.drop().await;
}

// ===== dropped calls =====

#[tokio::test(flavor = "multi_thread")]
async fn dropped_calls_leave_the_connection_as_it_was() {
    let Some(db) = Db::migrated("dropped").await else {
        return;
    };
    let pool = db.users_pool(1, &[]);
    let store = db.builder().pool(pool.clone()).unwrap();
    store.remember(&id("known")).await.unwrap();
    let session = async || -> i32 {
        let row = pool.fetch_one("SELECT pg_backend_pid()").await.unwrap();
        row.get(0)
    };
    for round in 0..1000_u64 {
        let fresh = db.builder().pool(pool.clone()).unwrap();
        // Every other one looks the table up first.
        let store = if round % 2 == 0 { &store } else { &fresh };
        let m = id(&format!("m{round}"));
        let call: std::pin::Pin<Box<dyn Future<Output = ()> + Send>> = match round % 5 {
            0 => Box::pin(drop_answer(store.seen(&m))),
            1 => Box::pin(drop_answer(store.remember(&m))),
            2 => Box::pin(drop_answer(store.forget(&m))),
            3 => Box::pin(drop_answer(store.clone_purge())),
            _ => Box::pin(drop_answer(store.clone_migrate())),
        };
        // After so many polls, or at some instant.
        if round % 3 == 0 {
            let _ = timeout(Duration::from_micros(round * 7 % 3000), call).await;
        } else {
            polled(call, 1 + round / 3 % 3).await;
        }
    }
    assert!(store.seen(&id("known")).await.unwrap());
    store.remember(&id("last")).await.unwrap();
    assert!(store.seen(&id("last")).await.unwrap());
    // A statement that is under way is not cut off: its connection serves the next one.
    let pid = session().await;
    for _ in 0..3 {
        let held = db.hold("LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE").await;
        let call = tokio::spawn(store.remember(&id("m")));
        db.until_waiting(1).await;
        call.abort();
        assert!(call.await.is_err());
        held.commit().await;
        assert_eq!(session().await, pid);
    }
    until("all is quiet", async || {
        db.sessions("state <> 'idle'").await == 0 && db.sessions("true").await == 1
    })
    .await;
    db.drop().await;
}

trait InTheBackground {
    fn clone_purge(&self) -> impl Future<Output = Result<u64, BackendError>> + Send + 'static;
    fn clone_migrate(&self) -> impl Future<Output = Result<(), BackendError>> + Send + 'static;
}

impl InTheBackground for PostgresStore {
    fn clone_purge(&self) -> impl Future<Output = Result<u64, BackendError>> + Send + 'static {
        let store = self.clone();
        async move { store.purge().await }
    }

    fn clone_migrate(&self) -> impl Future<Output = Result<(), BackendError>> + Send + 'static {
        let store = self.clone();
        async move { store.migrate().await }
    }
}

async fn drop_answer<T>(call: impl Future<Output = Result<T, BackendError>> + Send) {
    call.await.unwrap();
}

/// Polls it so many times, when it asks to be, and drops it.
async fn polled(future: impl Future<Output = ()>, times: u64) {
    let mut future = pin!(future);
    let mut polls = 0;
    poll_fn(|cx| {
        polls += 1;
        let done = future.as_mut().poll(cx).is_ready();
        if done || polls >= times {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}

#[test]
fn outside_of_a_runtime_there_is_an_error_and_no_panic() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let Some((db, store)) = runtime.block_on(async {
        let db = Db::migrated("outside").await?;
        let store = db.warm(db.builder()).await;
        Some((db, store))
    }) else {
        return;
    };
    let fresh = {
        let _guard = runtime.enter();
        db.builder().pool(db.users_pool(1, &[])).unwrap()
    };
    let m = id("m");
    for store in [&store, &fresh] {
        for answer in [
            now(store.seen(&m)).map(drop),
            now(store.remember(&m)),
            now(store.forget(&m)),
            now(store.migrate()),
            now(store.purge()).map(drop),
            store.purge_every(MINUTE, drop).map(drop),
            now(PostgresStore::connect(&db.url, &db.table)).map(drop),
        ] {
            let error = is_kind(answer, BackendErrorKind::Unavailable);
            assert!(error.to_string().contains("tokio runtime"), "{error}");
        }
    }
    // Begun within it, dropped outside: while it waits, and once it is answered.
    let held = runtime.block_on(db.hold("LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE"));
    let mut calls: Vec<std::pin::Pin<Box<dyn Future<Output = ()> + Send>>> = vec![
        Box::pin(drop_answer(store.seen(&m))),
        Box::pin(drop_answer(store.remember(&m))),
        Box::pin(drop_answer(store.forget(&m))),
        Box::pin(drop_answer(fresh.seen(&m))),
        Box::pin(drop_answer(store.clone_purge())),
    ];
    runtime.block_on(async {
        tokio::select! {
            _ = join_all(&mut calls) => panic!("the table is locked"),
            () = db.until_waiting(4) => {}
        }
    });
    let late = calls.pop();
    drop(calls);
    runtime.block_on(async {
        held.commit().await;
        store.remember(&id("after")).await.unwrap();
        assert!(fresh.seen(&id("after")).await.unwrap());
    });
    drop(late);
    runtime.block_on(db.drop());
    drop(store);
    drop(runtime);
    // The last of it goes when nothing is left to go to.
    drop(fresh);
}

// ===== tables that are not as they should be =====

#[tokio::test]
async fn a_missing_table_is_named_with_what_makes_it() {
    let Some(db) = Db::bare("missing").await else {
        return;
    };
    let store = db.store().await;
    let m = id("m");
    // Before its first use, and when it is dropped later.
    for _ in 0..2 {
        let together = join_all((0..5).map(|n| store.remember(&id(&format!("m{n}"))))).await;
        let singles = [
            store.seen(&m).await.map(drop),
            store.remember(&m).await,
            store.forget(&m).await,
            store.purge().await.map(drop),
        ];
        for answer in singles.into_iter().chain(together) {
            let error = is_kind(answer, BackendErrorKind::Schema);
            let text = error.to_string();
            assert!(
                text.contains("migrate()") && text.contains(&db.table),
                "{text}"
            );
            assert!(!error.is_retryable());
        }
        store.migrate().await.unwrap();
        store.remember(&m).await.unwrap();
        assert!(store.seen(&m).await.unwrap());
        db.run("DROP TABLE {t}").await;
    }
    db.drop().await;
}

#[tokio::test]
async fn a_table_that_cannot_keep_the_promise_is_refused_until_it_can() {
    let Some(db) = Db::bare("unfit").await else {
        return;
    };
    let columns =
        "message_id text COLLATE \"C\", state text, owner text, since bigint, expires_at bigint";
    let key = "message_id text COLLATE \"C\" PRIMARY KEY";
    let make = |columns: &str| format!("CREATE TABLE {{t}} ({columns})");
    let icu: i64 = db
        .get(
            "SELECT count(*) FROM pg_collation WHERE collprovider = 'i' AND collname = 'und-x-icu'",
        )
        .await;
    let folding = columns.replace("\"C\"", "{t}_folding") + ", PRIMARY KEY (message_id)";
    let keyed = columns.replace("message_id text COLLATE \"C\"", key);
    let mut cases = vec![
        // Two rows of one id: which of them is it?
        (make(columns), "primary key"),
        (
            make(&format!("{columns}, UNIQUE (message_id, state)")),
            "primary key",
        ),
        (
            make(&format!("{columns}, UNIQUE (message_id) DEFERRABLE")),
            "primary key",
        ),
        (
            make(columns) + "; CREATE UNIQUE INDEX ON {t} (message_id) WHERE state = 'done'",
            "primary key",
        ),
        (
            make(columns) + "; CREATE UNIQUE INDEX ON {t} (lower(message_id))",
            "primary key",
        ),
        (
            make(&keyed.replace("text COLLATE \"C\"", "varchar(36)")),
            "`message_id`",
        ),
        (
            make(&keyed.replace("text COLLATE \"C\"", "uuid")),
            "`message_id`",
        ),
        (
            make(&keyed.replace("expires_at bigint", "expires_at timestamptz")),
            "`expires_at`",
        ),
        (
            make(&keyed.replace("expires_at bigint", "expires_at integer")),
            "`expires_at`",
        ),
        (make(&keyed.replace(", owner text", "")), "`owner`"),
        (
            make(&keyed.replace("since bigint", "since numeric")),
            "`since`",
        ),
    ];
    if icu > 0 {
        db.run("CREATE COLLATION {t}_folding (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
            .await;
        cases.push((make(&folding), "nondeterministic"));
    }
    let store = db.store().await;
    for (make, says) in cases {
        db.run(&make).await;
        for answer in [
            store.seen(&id("m")).await.map(drop),
            store.remember(&id("m")).await,
            store.forget(&id("m")).await,
            store.migrate().await,
        ] {
            let error = is_kind(answer, BackendErrorKind::Schema);
            assert!(!error.is_retryable());
            let text = error.to_string();
            assert!(
                text.contains(says) && text.contains(&db.table),
                "{make}: {text}"
            );
        }
        db.run("DROP TABLE {t}").await;
    }
    // The same store, once it is as it should be; what is there more does not matter.
    db.run(&make(&format!(
        "{columns}, UNIQUE (message_id), added text DEFAULT 'x'"
    )))
    .await;
    store.migrate().await.unwrap();
    store.remember(&id("m")).await.unwrap();
    assert!(store.seen(&id("m")).await.unwrap());

    // A foreign table, too.
    db.run("DROP TABLE {t}").await;
    db.run(&PHP.replace(" PRIMARY KEY", "")).await;
    let php = PhpPostgresStore::connect(&db.url, &db.table).await.unwrap();
    is_kind(php.seen(&id("m")).await, BackendErrorKind::Schema);
    let go = GoPostgresStore::connect(&db.url, &db.table).await.unwrap();
    is_kind(go.remember(&id("m")).await, BackendErrorKind::Schema);
    db.run("ALTER TABLE {t} ADD PRIMARY KEY (message_id)").await;
    php.remember(&id("m")).await.unwrap();
    if icu > 0 {
        db.run("ALTER TABLE {t} ALTER message_id TYPE varchar(255) COLLATE {t}_folding")
            .await;
        let php = PhpPostgresStore::connect(&db.url, &db.table).await.unwrap();
        let error = is_kind(php.seen(&id("M")).await, BackendErrorKind::Schema);
        assert!(error.to_string().contains("nondeterministic"));
        db.run("DROP TABLE {t}; DROP COLLATION {t}_folding").await;
    }
    db.drop().await;
}

// ===== settings of the sessions =====

#[tokio::test]
async fn a_row_that_stays_locked_is_told_in_time_and_costs_no_connection() {
    let Some(db) = Db::migrated("stays").await else {
        return;
    };
    let limit = Duration::from_millis(600);
    let builder = db.builder().response_timeout(limit);
    let store = builder.pool(db.users_pool(1, &[])).unwrap();
    store.remember(&id("m")).await.unwrap();
    let session = "SELECT pid FROM pg_stat_activity WHERE application_name = '{t}'";
    let pid: i32 = db.get(session).await;
    let held = db
        .hold("SELECT 1 FROM {t} WHERE message_id = 'm' FOR UPDATE")
        .await;
    for remember in [true, false] {
        let begun = Instant::now();
        let answer = match remember {
            true => store.remember(&id("m")).await,
            false => store.forget(&id("m")).await,
        };
        let error = is_kind(answer, BackendErrorKind::Contention);
        assert!(error.is_retryable());
        assert!((limit / 2..limit * 20).contains(&begun.elapsed()));
    }
    // Reading is never in anybody's way.
    assert!(store.seen(&id("m")).await.unwrap());
    held.commit().await;
    store.remember(&id("m")).await.unwrap();
    assert_eq!(db.get::<i32>(session).await, pid);
    db.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_isolation_level_lets_an_error_through() {
    let Some(db) = Db::migrated("isolation").await else {
        return;
    };
    for level in ["serializable", "repeatable read", "read uncommitted"] {
        let settings = [("default_transaction_isolation", level)];
        let stores = [0, 1].map(|_| {
            let pool = db.users_pool(6, &settings);
            db.builder().pool(pool).unwrap()
        });
        for round in 0..8 {
            let mut racers = vec![];
            for racer in 0..64 {
                // Some ids for all, some for few, some for one.
                let text = match racer % 4 {
                    0 => format!("hot{round}"),
                    1 => format!("warm{}", racer % 8),
                    _ => format!("own{round}-{racer}"),
                };
                let store = stores[racer % 2].clone();
                racers.push(tokio::spawn(async move {
                    let m = id(&text);
                    store.seen(&m).await?;
                    store.remember(&m).await?;
                    store.seen(&m).await
                }));
            }
            db.run("INSERT INTO {t} SELECT 'x' || n, 'done', NULL, 0, 1 FROM generate_series(1, 50) AS n")
                .await;
            stores[0].purge().await.unwrap();
            for racer in racers {
                let seen = racer.await.unwrap();
                assert!(seen.unwrap_or_else(|e| panic!("{level}: {e} {e:?}")));
            }
        }
        let shown = db.users_pool(1, &settings);
        let shown = shown.fetch_one("SHOW transaction_isolation").await.unwrap();
        assert_eq!(shown.get::<&str, _>(0), level);
    }
    db.drop().await;
}

/// Errors of other sessions' making, in words that nobody can read: what counts is the code.
#[tokio::test]
async fn errors_are_told_apart_by_their_code() {
    let Some(db) = Db::migrated("codes").await else {
        return;
    };
    let store = db.warm(db.builder()).await;
    // What a trigger counts with a sequence stays counted when its statement fails.
    db.run(
        "CREATE SCHEMA {t};
         CREATE SEQUENCE {t}.tries MINVALUE 0 START 0;
         CREATE FUNCTION {t}.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
           IF nextval('{t}.tries') < TG_ARGV[1]::int THEN
             RAISE EXCEPTION 'Schlüssel »%« existiert bereits', NEW.message_id USING ERRCODE = TG_ARGV[0];
           END IF;
           RETURN NEW;
         END $$",
    )
    .await;
    use BackendErrorKind::{
        Contention, Denied, Other, ReadOnly, Schema, Unavailable, UnsuitableId,
    };
    for (code, kind) in [
        ("40001", Contention),
        ("40P01", Contention),
        ("55P03", Contention),
        ("25006", ReadOnly),
        ("53100", Unavailable),
        ("57014", Unavailable),
        ("42501", Denied),
        ("22001", UnsuitableId),
        ("42703", Schema),
        ("23505", Other),
        ("P0001", Other),
    ] {
        let fails = |times: u32| {
            format!(
                "DROP TRIGGER IF EXISTS fails ON {{t}}; ALTER SEQUENCE {{t}}.tries RESTART; CREATE TRIGGER fails \
                 BEFORE INSERT ON {{t}} FOR EACH ROW EXECUTE FUNCTION {{t}}.fail('{code}', '{times}')"
            )
        };
        db.run(&fails(1_000_000)).await;
        let error = is_kind(store.remember(&id("m")).await, kind);
        assert!(error.to_string().contains("Schlüssel »m«"), "{error}");
        let retryable = matches!(kind, Contention | ReadOnly | Unavailable);
        assert_eq!(error.is_retryable(), retryable, "{code}");
        // What passes is not even noticed.
        db.run(&fails(3)).await;
        if kind == Contention {
            store.remember(&id("m")).await.unwrap();
            assert!(store.seen(&id("m")).await.unwrap());
        }
    }
    db.drop().await;
}

#[tokio::test]
async fn limits_that_the_user_set_are_kept_and_can_be_tried_again() {
    let Some(db) = Db::migrated("limits").await else {
        return;
    };
    let pool = db.users_pool(2, &[("statement_timeout", "150")]);
    let store = db.builder().pool(pool).unwrap();
    store.remember(&id("m")).await.unwrap();
    let held = db.hold("LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE").await;
    let error = is_kind(store.seen(&id("m")).await, BackendErrorKind::Unavailable);
    assert!(error.is_retryable());
    is_kind(
        store.remember(&id("m")).await,
        BackendErrorKind::Unavailable,
    );
    held.commit().await;
    assert!(store.seen(&id("m")).await.unwrap());

    // A standby, or what looks like one.
    let pool = db.users_pool(2, &[("default_transaction_read_only", "on")]);
    let store = db.builder().pool(pool).unwrap();
    assert!(store.seen(&id("m")).await.unwrap());
    let error = is_kind(store.remember(&id("m")).await, BackendErrorKind::ReadOnly);
    assert!(error.is_retryable());
    is_kind(store.forget(&id("m")).await, BackendErrorKind::ReadOnly);
    is_kind(store.purge().await, BackendErrorKind::ReadOnly);
    store.migrate().await.unwrap();

    // Other time zones, date styles, ways to read a text: nothing depends on them.
    let odd = [
        ("timezone", "Asia/Kathmandu"),
        ("datestyle", "German"),
        ("standard_conforming_strings", "off"),
        ("backslash_quote", "off"),
        ("plan_cache_mode", "force_generic_plan"),
    ];
    for pooler in [false, true] {
        let store = db.builder().transaction_pooler(pooler).ttl(HOUR);
        let store = store.pool(db.users_pool(2, &odd)).unwrap();
        for text in ["m", "a'b\\'c\\", "é\n\u{1f980}"] {
            store.remember(&id(text)).await.unwrap();
            assert!(store.seen(&id(text)).await.unwrap());
            let row = db.stored(text).await.unwrap();
            assert!((row.since - db.now().await).abs() < micros(MINUTE));
        }
    }
    db.drop().await;
}

// ===== a pooler =====

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_in_transaction_mode_carries_everything() {
    let Some(db) = Db::bare("bouncer").await else {
        return;
    };
    let Some(bouncer) = Bouncer::start(&db.url) else {
        return;
    };
    let url = bouncer.url();
    let tables = Tables::default();
    store_contract(async |ttl| {
        let table = tables.unique("bouncer_contract");
        let builder = PostgresStore::builder(&table).ttl(ttl);
        let store = builder
            .transaction_pooler(true)
            .connect(&url)
            .await
            .unwrap();
        store.migrate().await.unwrap();
        store
    })
    .await;

    let stores = [HOUR, HOUR * 2].map(|ttl| {
        let pool = PgPoolOptions::new().max_connections(10).connect_lazy(&url);
        let builder = db.builder().ttl(ttl).transaction_pooler(true);
        builder.pool(pool.unwrap()).unwrap()
    });
    try_join_all(stores.each_ref().map(|store| store.migrate()))
        .await
        .unwrap();
    let workers: Vec<_> = (0..64)
        .map(|worker| {
            let store = stores[worker % 2].clone();
            let other = stores[(worker + 1) % 2].clone();
            tokio::spawn(async move {
                for round in 0..20 {
                    let own = id(&format!("w{worker}'-{round}"));
                    let shared = id(&format!("s{round}"));
                    assert!(!store.seen(&own).await?);
                    store.remember(&own).await?;
                    store.remember(&shared).await?;
                    assert!(other.seen(&own).await?);
                    assert!(other.seen(&shared).await?);
                    other.forget(&own).await?;
                    assert!(!store.seen(&own).await?);
                    store.remember(&own).await?;
                }
                Ok::<(), BackendError>(())
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap().unwrap();
    }
    assert_eq!(db.keys().await.len(), 64 * 20 + 20);
    assert_eq!(stores[0].purge().await.unwrap(), 0);
    // Nothing of ours stays in a session that the next client gets.
    let pool = PgPoolOptions::new().max_connections(4);
    let pool = pool.connect(&url).await.unwrap();
    for _ in 0..20 {
        let show = sqlx::raw_sql("SHOW lock_timeout").fetch_one(&pool).await;
        assert_eq!(show.unwrap().get::<&str, _>(0), "0");
    }
    tables.drop(&db).await;
    db.drop().await;
}

/// Has a store mark one id, and ask for another that nobody marks here. How often it was refused.
async fn consume(db: &Db, store: &PostgresStore, own: &MessageId, foreign: &MessageId) -> usize {
    let mut refused = 0;
    for asked in [own, foreign] {
        match store.seen(asked).await {
            Ok(seen) => assert!(!seen, "{asked} was never run here"),
            Err(_) => refused += 1,
        }
    }
    match store.remember(own).await {
        Ok(()) => assert!(db.keys().await.contains(&**own), "{own} was marked here"),
        Err(_) => refused += 1,
    }
    refused
}

/// Prepared statements are numbered for each connection, and what the pooler runs under a number may
/// be another store's. Then there is an error, and no answer from the wrong table.
#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_that_mixes_statements_up_mixes_no_tables_up() {
    let Some(a) = Db::migrated("mixed_a").await else {
        return;
    };
    let b = Db::migrated("mixed_b").await.unwrap();
    let Some(bouncer) = Bouncer::start(&a.url) else {
        return;
    };
    let mut refused = 0;
    for round in 0..40 {
        let url = bouncer.url();
        let open = |db: &Db| {
            let pool = PgPoolOptions::new().max_connections(1).connect_lazy(&url);
            db.builder().pool(pool.unwrap()).unwrap()
        };
        let (in_a, in_b) = (open(&a), open(&b));
        for n in 0..8 {
            // Both ask for both; each is told of one. Together, so that they are in two sessions, and
            // alone, so that they change places.
            let [one, other] = ["a", "b"].map(|of| id(&format!("{round}-{n}-{of}")));
            let use_a = consume(&a, &in_a, &one, &other);
            let use_b = consume(&b, &in_b, &other, &one);
            refused += if n % 2 == 0 {
                let (a, b) = tokio::join!(use_a, use_b);
                a + b
            } else {
                use_b.await + use_a.await
            };
        }
    }
    assert!(refused > 0, "the pooler mixed nothing up");
    a.drop().await;
    b.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_given_up_on_a_locked_table_does_not_stay_in_the_server() {
    let Some(db) = Db::migrated("orphans").await else {
        return;
    };
    let limit = Duration::from_millis(500);
    let store = db.warm(db.builder().response_timeout(limit)).await;
    let held = db.hold("LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE").await;
    let m = id("m");
    for _ in 0..3 {
        let error = store.remember(&m).await.unwrap_err();
        assert!(error.is_retryable(), "{error}");
    }
    until("nobody waits", async || db.waiting().await == 0).await;
    held.rollback().await;
    store.remember(&m).await.unwrap();
    db.drop().await;
}

#[tokio::test]
async fn limits_beyond_all_clocks_are_none() {
    let Some(db) = Db::migrated("endless").await else {
        return;
    };
    let store = db.warm(db.builder().response_timeout(Duration::MAX)).await;
    store.remember(&id("m")).await.unwrap();
    for _ in 0..16 {
        let told = Arc::new(AtomicUsize::new(0));
        let tell = told.clone();
        let purge = store.purge_every(Duration::MAX, move |purged| {
            purged.unwrap();
            tell.fetch_add(1, Ordering::SeqCst);
        });
        until("it purges", async || told.load(Ordering::SeqCst) == 1).await;
        purge.unwrap().stop().await;
    }
    db.drop().await;
}

#[tokio::test]
async fn a_url_of_another_kind_is_refused_and_not_told() {
    for url in [
        "http://postgres:s3cret@127.0.0.1/test",
        "mysql://root:s3cret@127.0.0.1/test",
        "127.0.0.1:5432/s3cret",
        "s3cret",
        "",
    ] {
        let error = is_kind(
            PostgresStore::connect(url, "seen").await,
            BackendErrorKind::Config,
        );
        assert!(error.to_string().contains("postgres"), "{error}");
        assert!(!format!("{error} {error:?}").contains("s3cret"));
    }
}

#[tokio::test]
async fn a_statement_that_the_pooler_lost_says_which_setting_helps() {
    let Some(db) = Db::migrated("unprepared").await else {
        return;
    };
    // Each time it comes back from the pool, the session is another one.
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .before_acquire(|connection, _| {
            Box::pin(async move {
                connection.execute("DEALLOCATE ALL").await?;
                Ok(true)
            })
        })
        .connect_lazy_with(db.options());
    let store = db.builder().pool(pool.clone()).unwrap();
    store.remember(&id("m")).await.unwrap();
    let error = store.remember(&id("m")).await.unwrap_err();
    assert!(
        error.to_string().contains("transaction_pooler(true)"),
        "{error}"
    );
    let store = db.builder().transaction_pooler(true).pool(pool).unwrap();
    for _ in 0..3 {
        store.remember(&id("m")).await.unwrap();
        assert!(store.seen(&id("m")).await.unwrap());
        store.forget(&id("m")).await.unwrap();
    }
    db.drop().await;
}

/// What a server says to those who come with a wrong password, whatever they send.
fn guard() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let mut packet = [0; 4096];
            let _ = client.read(&mut packet);
            let fields =
                b"SFATAL\0VFATAL\0C28P01\0Mpassword authentication failed for user \"billing\"\0\0";
            let mut answer = vec![b'E'];
            answer.extend((fields.len() as u32 + 4).to_be_bytes());
            answer.extend(fields);
            let _ = client.write_all(&answer);
        }
    });
    port
}

#[tokio::test]
async fn a_wrong_password_is_denied_and_not_told() {
    let url = format!("postgres://billing:s3cret@127.0.0.1:{}/test", guard());
    let error = is_kind(
        PostgresStore::connect(&url, "seen").await,
        BackendErrorKind::Denied,
    );
    assert!(!error.is_retryable());
    assert!(error.to_string().contains("password authentication failed"));
    assert!(!format!("{error} {error:?}").contains("s3cret"));
    // With a pool that connects later each call says so, and none waits for the pool's time limit.
    let pool = PgPool::connect_lazy(&url).unwrap();
    let store = PostgresStore::builder("seen").pool(pool).unwrap();
    for _ in 0..2 {
        is_kind(store.seen(&id("m")).await, BackendErrorKind::Denied);
        is_kind(store.remember(&id("m")).await, BackendErrorKind::Denied);
    }
    assert!(!format!("{store:?}").contains("s3cret"));
}
