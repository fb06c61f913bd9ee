//! The table of a store in PostgreSQL: made by many workers at once, and rid of what is past its
//! end while they work on it.
#![allow(missing_docs)]

#[path = "support/services.rs"]
mod services;

#[path = "support/postgres.rs"]
mod postgres;

use futures_util::future::{join_all, try_join_all};
use postgres::{Db, NOW, id, is_kind, until};
use services::{PATIENCE, unique};
use sqlx::Row;
use std::{
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Waker},
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};
use tower_idempotency::{Store, error::BackendErrorKind, store::PostgresStore};

const HOUR: Duration = Duration::from_secs(3600);

// ===== migrate =====

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_workers_make_one_table() {
    let Some(db) = Db::bare("migrate").await else {
        return;
    };
    for round in 0..6 {
        let table = unique("migrate_16");
        let stores = (0..16).map(|_| {
            let builder = PostgresStore::builder(&table).max_connections(1);
            builder.pool(db.users_pool(1, &[])).unwrap()
        });
        let stores: Vec<_> = stores.collect();
        // All of them are connected, and begin together.
        try_join_all(stores.iter().map(|store| async {
            is_kind(store.seen(&id("m")).await, BackendErrorKind::Schema);
            Ok::<_, ()>(())
        }))
        .await
        .unwrap();
        if round % 2 == 1 {
            let ddl = stores[0].ddl();
            let (table_only, _) = ddl.split_once(';').unwrap();
            db.run(table_only).await;
        }
        let tasks = stores.iter().map(|store| {
            let store = store.clone();
            tokio::spawn(async move {
                store.migrate().await?;
                store.remember(&id("m")).await?;
                store.seen(&id("m")).await
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            assert!(task.await.unwrap().unwrap());
        }
        let indexes: i64 = db
            .get(&format!(
                "SELECT count(*) FROM pg_indexes WHERE tablename = '{table}'"
            ))
            .await;
        assert_eq!(indexes, 2);
        db.run(&format!("DROP TABLE {table}")).await;
    }
    db.drop().await;
}

#[tokio::test]
async fn a_transaction_that_writes_is_not_in_the_way_of_a_migration() {
    let Some(db) = Db::migrated("beside").await else {
        return;
    };
    let store = db.store().await;
    // It would wait for this one if it asked for any lock that changes the table.
    let held = db
        .hold("INSERT INTO {t} VALUES ('theirs', 'done', NULL, 0, NULL)")
        .await;
    for _ in 0..10 {
        store.migrate().await.unwrap();
    }
    assert_eq!(db.waiting().await, 0);
    held.commit().await;
    assert!(store.seen(&id("theirs")).await.unwrap());

    // The index is missing: then it has to wait, and says so when it waited enough.
    db.run("DROP INDEX {t}_expires_at").await;
    let held = db
        .hold("UPDATE {t} SET since = 1 WHERE message_id = 'theirs'")
        .await;
    let begun = Instant::now();
    let error = is_kind(store.migrate().await, BackendErrorKind::Contention);
    assert!(error.is_retryable() && begun.elapsed() < PATIENCE);
    // Others were not kept out meanwhile.
    timeout(PATIENCE, store.remember(&id("ours")))
        .await
        .unwrap()
        .unwrap();
    let waits = tokio::spawn({
        let store = store.clone();
        async move { store.migrate().await }
    });
    db.until_waiting(1).await;
    held.commit().await;
    waits.await.unwrap().unwrap();
    let index =
        "SELECT count(*) FROM pg_indexes WHERE tablename = '{t}' AND indexname = '{t}_expires_at'";
    assert_eq!(db.get::<i64>(index).await, 1);
    // Any index that begins with the column will do.
    db.run("DROP INDEX {t}_expires_at; CREATE INDEX ON {t} (expires_at, state)")
        .await;
    store.migrate().await.unwrap();
    assert_eq!(db.get::<i64>(index).await, 0);
    db.drop().await;
}

#[tokio::test]
async fn a_dropped_migration_goes_on() {
    let Some(db) = Db::bare("migrate_drop").await else {
        return;
    };
    let store = db.store().await;
    {
        let call = pin!(store.migrate());
        assert!(
            call.poll(&mut Context::from_waker(Waker::noop()))
                .is_pending()
        );
    }
    until("the table is there", async || {
        db.get::<bool>("SELECT to_regclass('{t}') IS NOT NULL")
            .await
    })
    .await;
    db.drop().await;
}

// ===== purge =====

impl Db {
    async fn expired(&self, prefix: &str, rows: u32) {
        self.run(&format!(
            "INSERT INTO {{t}} SELECT '{prefix}' || n, 'done', NULL, 0, {NOW} - n FROM generate_series(1, {rows}) AS n"
        ))
        .await;
    }

    /// Statements that delete stop before they look for rows, but after they have begun, while a
    /// session holds the lock that [`gate`](Self::gate) takes.
    async fn gated(&self) {
        self.run(
            "CREATE SCHEMA {t};
             CREATE FUNCTION {t}.wait() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN PERFORM pg_advisory_xact_lock(hashtext('{t}')); RETURN NULL; END $$;
             CREATE TRIGGER waits BEFORE DELETE ON {t} FOR EACH STATEMENT EXECUTE FUNCTION {t}.wait()",
        )
        .await;
    }

    async fn gate(&self) -> postgres::Hold {
        self.hold("SELECT pg_advisory_xact_lock(hashtext('{t}'))")
            .await
    }
}

fn purge(store: &PostgresStore) -> tokio::task::JoinHandle<u64> {
    let store = store.clone();
    tokio::spawn(async move { store.purge().await.unwrap() })
}

#[tokio::test]
async fn only_what_is_past_its_end_goes() {
    let Some(db) = Db::migrated("purge").await else {
        return;
    };
    let store = db.store().await;
    for (name, state, end) in [
        ("never", "done", "NULL"),
        ("live", "done", "{now} + 60000000"),
        ("over", "done", "{now} - 1"),
        ("long over", "done", "1"),
        ("claimed", "claimed", "{now} + 60000000"),
        ("claimed for ever", "claimed", "NULL"),
        ("claim over", "claimed", "{now} - 1000000"),
        ("claim over for long", "claimed", "{now} - 50000000"),
        ("claim over for a minute", "claimed", "{now} - 60000001"),
    ] {
        let end = end.replace("{now}", NOW);
        db.run(&format!(
            "INSERT INTO {{t}} VALUES ('{name}', '{state}', NULL, 0, {end})"
        ))
        .await;
    }
    assert_eq!(store.purge().await.unwrap(), 3);
    let left = [
        "never",
        "live",
        "claimed",
        "claimed for ever",
        "claim over",
        "claim over for long",
    ];
    assert_eq!(db.keys().await, left.map(str::to_owned).into());
    assert_eq!(store.purge().await.unwrap(), 0);
    db.drop().await;
}

#[tokio::test]
async fn a_purge_goes_in_batches() {
    let Some(db) = Db::migrated("batches").await else {
        return;
    };
    let store = db.store().await;
    db.count_statements().await;
    for (rows, statements) in [(0, 1), (999, 1), (1000, 2), (2500, 3)] {
        db.expired("m", rows).await;
        assert_eq!(store.purge().await.unwrap(), u64::from(rows));
        assert_eq!(db.statements("DELETE").await, statements, "{rows}");
        assert!(db.keys().await.is_empty());
    }
    db.drop().await;
}

#[tokio::test]
async fn rows_that_others_hold_are_left_alone() {
    let Some(db) = Db::migrated("skips").await else {
        return;
    };
    let store = db.builder().ttl(HOUR).connect(&db.url).await.unwrap();
    for (at_once, lock, commits) in [
        (
            true,
            "SELECT 1 FROM {t} WHERE message_id = 'm3' FOR UPDATE",
            false,
        ),
        (
            true,
            "UPDATE {t} SET expires_at = NULL WHERE message_id = 'm3'",
            true,
        ),
        (
            true,
            "UPDATE {t} SET expires_at = NULL WHERE message_id = 'm3'",
            false,
        ),
        (
            true,
            "SELECT 1 FROM {t} WHERE message_id = 'm3' FOR KEY SHARE",
            false,
        ),
    ] {
        db.expired("m", 20).await;
        let held = db.hold(lock).await;
        let deleted = timeout(PATIENCE / 2, store.purge()).await;
        assert!(
            at_once && deleted.expect("it waits for nobody").unwrap() == 19,
            "{lock}"
        );
        assert_eq!(db.keys().await, ["m3".to_owned()].into());
        if commits {
            held.commit().await;
            assert_eq!(store.purge().await.unwrap(), 0);
            assert!(store.seen(&id("m3")).await.unwrap());
        } else {
            held.rollback().await;
            assert_eq!(store.purge().await.unwrap(), 1);
        }
        db.run("DELETE FROM {t}").await;
    }
    db.drop().await;
}

#[tokio::test]
async fn a_row_that_is_marked_again_at_that_moment_stays() {
    let Some(db) = Db::migrated("marked").await else {
        return;
    };
    let store = db.builder().ttl(HOUR).connect(&db.url).await.unwrap();
    db.gated().await;
    db.expired("m", 20).await;
    // The purge has begun, and sees the rows as they were then.
    let gate = db.gate().await;
    let purging = purge(&store);
    db.until_waiting(1).await;
    store.remember(&id("m1")).await.unwrap();
    store.remember(&id("m20")).await.unwrap();
    db.run(&format!(
        "UPDATE {{t}} SET state = 'claimed', expires_at = {NOW} + 60000000 WHERE message_id = 'm7'"
    ))
    .await;
    gate.rollback().await;
    assert_eq!(purging.await.unwrap(), 17);
    let left = ["m1", "m20", "m7"].map(str::to_owned);
    assert_eq!(db.keys().await, left.into());
    assert!(store.seen(&id("m1")).await.unwrap());
    db.drop().await;
}

#[tokio::test]
async fn a_purge_finds_its_rows_by_the_index() {
    let Some(db) = Db::migrated("plan").await else {
        return;
    };
    let store = db.store().await;
    db.gated().await;
    db.expired("m", 2000).await;
    db.run(&format!(
        "INSERT INTO {{t}} SELECT 'live' || n, 'done', NULL, 0, {NOW} + 60000000 + n * 1000000::bigint \
         FROM generate_series(1, 50000) AS n; ANALYZE {{t}}"
    ))
    .await;
    // The statement as it is sent.
    let gate = db.gate().await;
    let purging = purge(&store);
    db.until_waiting(1).await;
    let statement: String = db
        .get("SELECT query FROM pg_stat_activity WHERE application_name = '{t}' AND wait_event_type = 'Lock'")
        .await;
    let plan = db.rows(&format!("EXPLAIN {statement}")).await;
    let plan: Vec<String> = plan.iter().map(|row| row.get(0)).collect();
    let plan = plan.join("\n");
    assert!(plan.contains(&format!("{}_expires_at", db.table)), "{plan}");
    assert!(plan.contains(&format!("{}_pkey", db.table)), "{plan}");
    assert!(plan.contains("Index Cond: (expires_at <="), "{plan}");
    assert!(!plan.contains("Seq Scan"), "{plan}");
    gate.rollback().await;
    assert_eq!(purging.await.unwrap(), 2000);
    db.drop().await;
}

#[tokio::test]
async fn a_dropped_purge_ends_after_its_statement() {
    let Some(db) = Db::migrated("purge_drop").await else {
        return;
    };
    let store = db.store().await;
    db.gated().await;
    db.expired("m", 3000).await;
    let gate = db.gate().await;
    let purging = purge(&store);
    db.until_waiting(1).await;
    purging.abort();
    assert!(purging.await.is_err());
    gate.rollback().await;
    until("the statement is done", async || {
        db.keys().await.len() < 3000
    })
    .await;
    until("it ends there", async || {
        db.sessions("state <> 'idle'").await == 0
    })
    .await;
    assert_eq!(db.keys().await.len(), 2000);
    assert_eq!(store.purge().await.unwrap(), 2000);
    db.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_is_in_nobodys_way() {
    let Some(db) = Db::migrated("traffic").await else {
        return;
    };
    let long = db.builder().ttl(HOUR).max_connections(5);
    let long = long.connect(&db.url).await.unwrap();
    let short = db.builder().ttl(Duration::from_nanos(1)).max_connections(5);
    let short = short.connect(&db.url).await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let purged = Arc::new(AtomicUsize::new(0));
    let purges = (0..2).map(|_| {
        let (store, over, purged) = (long.clone(), over.clone(), purged.clone());
        tokio::spawn(async move {
            while !over.load(Ordering::SeqCst) {
                let deleted = store.purge().await.unwrap();
                purged.fetch_add(deleted as usize, Ordering::SeqCst);
            }
        })
    });
    let purges: Vec<_> = purges.collect();
    let begun = Instant::now();
    let workers = (0..64).map(|worker| {
        let (long, short) = (long.clone(), short.clone());
        tokio::spawn(async move {
            let mut slowest = Duration::ZERO;
            let mut round = 0;
            while begun.elapsed() < Duration::from_secs(3) {
                round += 1;
                // Half of them share their ids, in orders of their own.
                let text = match worker % 2 {
                    0 => format!("s{}", (round * (worker + 1)) % 50),
                    _ => format!("w{worker}-{}", round % 7),
                };
                let m = id(&text);
                let sent = Instant::now();
                short.remember(&m).await.unwrap();
                long.remember(&m).await.unwrap();
                // Its own rows are nobody else's to end.
                if worker % 2 == 1 {
                    assert!(long.seen(&m).await.unwrap(), "{text}");
                }
                slowest = slowest.max(sent.elapsed());
            }
            slowest
        })
    });
    for worker in join_all(workers.collect::<Vec<_>>()).await {
        assert!(worker.unwrap() < PATIENCE / 2);
    }
    over.store(true, Ordering::SeqCst);
    for purge in purges {
        purge.await.unwrap();
    }
    assert!(purged.load(Ordering::SeqCst) > 0);
    db.drop().await;
}

#[tokio::test]
async fn a_purge_in_the_background_tells_and_stops() {
    let Some(db) = Db::migrated("every").await else {
        return;
    };
    let store = db.store().await;
    db.expired("m", 2500).await;
    let told: Arc<Mutex<Vec<u64>>> = Arc::default();
    let tells = || {
        let told = told.clone();
        move |deleted: Result<_, _>| told.lock().unwrap().push(deleted.unwrap())
    };
    let count = || told.lock().unwrap().len();
    let every = store
        .purge_every(Duration::from_millis(50), tells())
        .unwrap();
    until("it purges again", async || count() >= 3).await;
    assert_eq!(told.lock().unwrap()[..3], [2500, 0, 0]);
    every.stop().await;
    let before = count();
    sleep(Duration::from_millis(200)).await;
    assert_eq!(count(), before);

    // It stops in the middle of an hour, and in the middle of many batches.
    let every = store.purge_every(HOUR, tells()).unwrap();
    until("it begins at once", async || count() > before).await;
    timeout(PATIENCE, every.stop()).await.unwrap();
    db.gated().await;
    db.expired("m", 3000).await;
    let gate = db.gate().await;
    let every = store.purge_every(HOUR, tells()).unwrap();
    db.until_waiting(1).await;
    let stopped = tokio::spawn(every.stop());
    tokio::task::yield_now().await;
    gate.rollback().await;
    timeout(PATIENCE, stopped).await.unwrap().unwrap();
    assert_eq!(*told.lock().unwrap().last().unwrap(), 1000);
    assert_eq!(db.keys().await.len(), 2000);

    // So it does when it is dropped.
    let gate = db.gate().await;
    let every = store
        .purge_every(Duration::from_millis(1), tells())
        .unwrap();
    db.until_waiting(1).await;
    drop(every);
    gate.rollback().await;
    until("its statement is done", async || {
        db.keys().await.len() == 1000
    })
    .await;
    until("it ends", async || {
        db.sessions("state <> 'idle'").await == 0
    })
    .await;
    sleep(Duration::from_millis(100)).await;
    assert_eq!(db.keys().await.len(), 1000);

    // What fails is told, and it goes on.
    db.run("DROP TABLE {t}").await;
    let failures = Arc::new(AtomicUsize::new(0));
    let counted = failures.clone();
    let every = store.purge_every(Duration::from_millis(20), move |deleted| {
        is_kind(deleted, BackendErrorKind::Schema);
        counted.fetch_add(1, Ordering::SeqCst);
    });
    until("it goes on", async || failures.load(Ordering::SeqCst) >= 2).await;
    every.unwrap().stop().await;
    db.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_nodes_that_purge_do_the_work_of_one() {
    let Some(db) = Db::migrated("nodes").await else {
        return;
    };
    db.count_statements().await;
    db.expired("m", 5000).await;
    let interval = Duration::from_millis(400);
    let total = Arc::new(AtomicUsize::new(0));
    let begun = Instant::now();
    let mut nodes = vec![];
    for _ in 0..10 {
        let store = db.builder().pool(db.users_pool(1, &[])).unwrap();
        let total = total.clone();
        let every = store.purge_every(interval, move |deleted| {
            total.fetch_add(deleted.unwrap() as usize, Ordering::SeqCst);
        });
        nodes.push(every.unwrap());
    }
    sleep(interval * 5).await;
    join_all(nodes.into_iter().map(|node| node.stop())).await;
    let intervals = begun.elapsed().as_millis() as i64 * 4 / (interval.as_millis() as i64 * 3) + 2;
    // Each row was deleted once, and each node looked once per interval.
    assert_eq!(total.load(Ordering::SeqCst), 5000);
    let statements = db.statements("DELETE").await;
    assert!(
        (10..=10 * intervals + 5).contains(&statements),
        "{statements}"
    );
    assert!(db.keys().await.is_empty());
    db.drop().await;
}

#[tokio::test]
async fn a_panic_of_who_is_told_ends_no_purge() {
    let Some(db) = Db::migrated("panic").await else {
        return;
    };
    let told = Arc::new(AtomicUsize::new(0));
    let tell = told.clone();
    let purge = db
        .store()
        .await
        .purge_every(Duration::from_millis(10), move |_| {
            tell.fetch_add(1, Ordering::SeqCst);
            panic!("who is told panics, as it was told");
        });
    until("it goes on", async || told.load(Ordering::SeqCst) >= 3).await;
    purge.unwrap().stop().await;
    db.drop().await;
}

#[tokio::test]
async fn an_index_that_only_has_the_name_is_refused() {
    let Some(db) = Db::migrated("index_name").await else {
        return;
    };
    db.run("DROP INDEX {t}_expires_at; CREATE INDEX {t}_expires_at ON {t} (expires_at) WHERE state = 'done'")
        .await;
    let migrated = timeout(PATIENCE, db.store().await.migrate()).await;
    let error = is_kind(migrated.expect("it ends"), BackendErrorKind::Schema);
    assert!(error.to_string().contains("_expires_at"), "{error}");
    db.drop().await;
}
