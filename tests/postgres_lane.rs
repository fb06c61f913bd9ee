//! Operations on a store in PostgreSQL that travel together: whatever holds one of them up, fails it
//! or takes its caller away, the others go on, and each gets its own answer.
#![allow(missing_docs)]

#[path = "support/services.rs"]
mod services;

#[path = "support/postgres.rs"]
mod postgres;

use futures_util::{
    FutureExt, StreamExt, TryFutureExt,
    future::{join_all, try_join_all},
    stream::FuturesUnordered,
};
use postgres::{Db, id, is_kind, until};
use services::{PATIENCE, Proxy};
use std::{
    net::ToSocketAddrs,
    time::{Duration, Instant},
};
use tokio::{
    runtime::Runtime,
    time::{sleep, timeout},
};
use tower_idempotency::{Store, error::BackendErrorKind, store::PostgresStore};

/// Longer than any test waits: who is answered was not helped by a time limit.
const LONG: Duration = Duration::from_secs(120);

/// Holds up every write, and every one of the lane, which has no way around it.
const NO_WRITES: &str = "LOCK TABLE {t} IN SHARE MODE";

/// Holds up everything.
const NO_READS: &str = "LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE";

/// How many statements of one kind a store has under way: one that came alone, and one for all that
/// came after it.
const AT_ONCE: i64 = 2;

/// Until what was asked so far has been sent, as far as it can be.
async fn until_held_up(db: &Db) {
    db.until_waiting(1).await;
    let begun = Instant::now();
    while db.waiting().await < AT_ONCE && begun.elapsed() < Duration::from_millis(500) {
        sleep(Duration::from_millis(5)).await;
    }
}

async fn remember_all(store: &PostgresStore, ids: impl IntoIterator<Item = String>) {
    let all = ids.into_iter().map(|text| store.remember(&id(&text)));
    try_join_all(all).await.unwrap();
}

fn named(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|n| format!("{prefix}-{n:04}")).collect()
}

// ===== how many statements =====

#[tokio::test]
async fn what_comes_together_goes_as_one_and_what_comes_alone_as_it_is() {
    let Some(db) = Db::migrated("lane_counts").await else {
        return;
    };
    let store = db.warm(db.builder()).await;
    db.count_statements().await;
    for n in 0..10 {
        store.remember(&id(&format!("alone-{n}"))).await.unwrap();
    }
    assert_eq!(db.statements("INSERT").await, 10);
    store.forget(&id("alone-0")).await.unwrap();
    assert_eq!(db.statements("DELETE").await, 1);

    remember_all(&store, named("together", 64)).await;
    assert!(db.statements("INSERT").await <= 4);
    assert_eq!(db.keys().await.len(), 9 + 64);
    // As many as fit, in as few as there have to be.
    remember_all(&store, named("many", 1000)).await;
    let statements = db.statements("INSERT").await;
    assert!((8..=24).contains(&statements), "{statements}");
    assert_eq!(db.keys().await.len(), 9 + 64 + 1000);

    // One id for all of them: one row, written once.
    let mut mixed = vec!["same".to_owned(); 50];
    for (at, other) in named("beside", 10).into_iter().enumerate() {
        mixed.insert(5 * at, other);
    }
    remember_all(&store, mixed).await;
    assert!(db.statements("INSERT").await <= 4);
    assert!(db.stored("same").await.is_some());
    remember_all(&store, vec!["twice".to_owned(); 2]).await;
    assert!(store.seen(&id("twice")).await.unwrap());
    db.drop().await;
}

#[tokio::test]
async fn callers_that_ask_together_take_one_connection() {
    let Some(db) = Db::migrated("lane_seen").await else {
        return;
    };
    let store = db.warm(db.builder().response_timeout(LONG)).await;
    let known = named("known", 32);
    remember_all(&store, known.clone()).await;
    let locked = db.hold(NO_READS).await;
    // In the way of all of them, in an order that is neither that of their keys nor of their answers.
    let mut asked = known.clone();
    asked.extend(named("aaa", 32));
    asked.extend(named("zzz", 32));
    asked.sort_by_key(|text| text.chars().rev().collect::<String>());
    let all = tokio::spawn(join_all(asked.clone().into_iter().map(|text| {
        let answer = store.seen(&id(&text));
        async move { (text, answer.await.unwrap()) }
    })));
    until_held_up(&db).await;
    assert!(db.sessions("state = 'active'").await <= AT_ONCE);
    locked.commit().await;
    for (text, seen) in all.await.unwrap() {
        assert_eq!(seen, known.contains(&text), "{text}");
    }
    db.drop().await;
}

// ===== each its own answer =====

#[tokio::test]
async fn each_gets_its_own_answer_in_whatever_order() {
    let Some(db) = Db::migrated("lane_r39").await else {
        return;
    };
    let store = db.warm(db.builder()).await;
    let mut orders = vec![];
    for a in 0..4 {
        for b in (0..4).filter(|b| *b != a) {
            for c in (0..4).filter(|c| ![a, b].contains(c)) {
                orders.push([a, b, c, 6 - a - b - c]);
            }
        }
    }
    assert_eq!(orders.len(), 24);
    for (round, order) in orders.into_iter().enumerate() {
        // Which of them is known changes with the round, and so where it stands among the sorted keys.
        let known = format!("{}{round}", ["k", "a", "z"][round % 3]);
        let (one, two) = (format!("f{round}"), format!("p{round}"));
        store.remember(&id(&known)).await.unwrap();
        let four = [&one, &known, &two, &known].map(String::as_str);
        let asked = order.map(|at| four[at]);
        let seen = try_join_all(asked.map(|text| store.seen(&id(text)))).await;
        assert_eq!(seen.unwrap(), asked.map(|text| text == known), "{asked:?}");

        let four = [&one, &known, &two, &one].map(String::as_str);
        let asked = order.map(|at| four[at]);
        try_join_all(asked.map(|text| store.remember(&id(text))))
            .await
            .unwrap();
        for text in [&one, &two, &known] {
            assert_eq!(db.stored(text).await.unwrap().state, "done");
        }
        let seen = try_join_all(asked.map(|text| store.seen(&id(text)))).await;
        assert_eq!(seen.unwrap(), [true; 4]);
    }
    db.drop().await;
}

#[tokio::test]
async fn one_that_fails_fails_alone() {
    let Some(db) = Db::migrated("lane_bad").await else {
        return;
    };
    let store = db.warm(db.builder()).await;
    db.run("ALTER TABLE {t} ADD CONSTRAINT no_bad CHECK (message_id NOT LIKE 'bad%')")
        .await;
    for bad in [vec!["bad"], vec!["bad", "bad2", "bad"]] {
        let mut ids = named("good", 20);
        ids.extend(bad.iter().map(|&text| text.to_owned()));
        ids.extend(named("zood", 20));
        let answers = join_all(ids.iter().map(|text| store.remember(&id(text)))).await;
        for (text, answer) in ids.iter().zip(answers) {
            if text.starts_with("bad") {
                let error = is_kind(answer, BackendErrorKind::Other);
                assert!(error.to_string().contains("no_bad"), "{error}");
                assert!(!error.is_retryable());
            } else {
                answer.unwrap();
                assert!(db.stored(text).await.is_some());
            }
        }
        assert_eq!(db.keys().await.len(), 40);
        db.run("TRUNCATE {t}").await;
    }
    // The lane is as it was.
    db.count_statements().await;
    remember_all(&store, named("later", 64)).await;
    assert!(db.statements("INSERT").await <= 4);
    db.drop().await;
}

// ===== locked rows =====

#[tokio::test]
async fn a_locked_row_holds_up_nobody_else() {
    let Some(db) = Db::migrated("lane_locked").await else {
        return;
    };
    let store = db.warm(db.builder().response_timeout(LONG)).await;
    store.remember(&id("m-locked")).await.unwrap();
    for lock in [
        "SELECT 1 FROM {t} WHERE message_id = 'm-locked' FOR UPDATE",
        "DELETE FROM {t} WHERE message_id = 'm-locked'",
        // Nobody can see this row, and it is in the way.
        "INSERT INTO {t} VALUES ('m-locked', 'done', NULL, 0, NULL)",
    ] {
        if lock.starts_with("INSERT") {
            store.forget(&id("m-locked")).await.unwrap();
        }
        let held = db.hold(lock).await;
        let begun = Instant::now();
        let (before, after) = (named("a", 32), named("z", 32));
        let mut others = FuturesUnordered::new();
        let remember = |text: &String| tokio::spawn(store.remember(&id(text)));
        others.extend(before.iter().map(remember));
        let locked = remember(&"m-locked".to_owned());
        others.extend(after.iter().map(remember));
        while let Some(answer) = timeout(PATIENCE, others.next()).await.unwrap() {
            answer.unwrap().unwrap();
        }
        // Nor those that come while it waits, at its own expense.
        db.until_waiting(1).await;
        timeout(PATIENCE, remember_all(&store, named("later", 64)))
            .await
            .unwrap();
        assert!(!store.seen(&id("nobody")).await.unwrap());
        assert!(!locked.is_finished());
        assert!(begun.elapsed() < LONG / 4);
        held.rollback().await;
        locked.await.unwrap().unwrap();
        assert_eq!(db.keys().await.len(), 64 + 64 + 1);
        db.run("DELETE FROM {t} WHERE message_id <> 'm-locked'")
            .await;
    }
    db.drop().await;
}

#[tokio::test]
async fn more_locked_rows_than_connections_hold_up_nobody_else() {
    let Some(db) = Db::migrated("lane_many_locked").await else {
        return;
    };
    let builder = db.builder().max_connections(4).response_timeout(LONG);
    let store = db.warm(builder).await;
    let locked = named("locked", 12);
    remember_all(&store, locked.clone()).await;
    let held = db.hold("SELECT 1 FROM {t} FOR UPDATE").await;
    let waiting = locked
        .iter()
        .map(|text| tokio::spawn(store.remember(&id(text))));
    let waiting: Vec<_> = waiting.collect();
    db.until_waiting(2).await;
    for round in 0..10 {
        let others = named(&format!("other{round}"), 10);
        timeout(PATIENCE, remember_all(&store, others))
            .await
            .unwrap();
    }
    assert!(waiting.iter().all(|caller| !caller.is_finished()));
    held.commit().await;
    for caller in waiting {
        caller.await.unwrap().unwrap();
    }
    db.drop().await;
}

#[tokio::test]
async fn two_stores_with_opposite_orders_are_not_in_each_others_way() {
    let Some(db) = Db::migrated("lane_opposite").await else {
        return;
    };
    let (one, two) = (db.warm(db.builder()).await, db.warm(db.builder()).await);
    db.count_statements().await;
    const ROUNDS: usize = 10;
    let ids = named("m", 100);
    remember_all(&one, ids.clone()).await;
    db.statements("INSERT").await;
    for _ in 0..ROUNDS {
        // Both are on their way, stopped at the middle or by each other, before either is done.
        let held = db
            .hold("SELECT 1 FROM {t} WHERE message_id = 'm-0050' FOR UPDATE")
            .await;
        let there = ids.iter().map(|text| one.remember(&id(text)));
        let back = ids.iter().rev().map(|text| two.remember(&id(text)));
        let there = tokio::spawn(try_join_all(there));
        let back = tokio::spawn(try_join_all(back));
        db.until_waiting(2).await;
        held.commit().await;
        there.await.unwrap().unwrap();
        back.await.unwrap().unwrap();
    }
    // Had they waited for each other in a circle, each of the ids would have gone alone.
    let statements = db.statements("INSERT").await;
    assert!(
        (statements as usize) < ROUNDS * ids.len() / 2,
        "{statements}"
    );
    // And while rows come and go.
    for _ in 0..10 {
        let there = remember_all(&one, ids.iter().cloned());
        let back = remember_all(&two, ids.iter().rev().cloned());
        let forget = try_join_all(ids.iter().step_by(3).map(|text| two.forget(&id(text))));
        tokio::join!(there, back, async { forget.await.unwrap() });
    }
    remember_all(&one, ids.iter().cloned()).await;
    assert_eq!(db.keys().await.len(), 100);
    db.drop().await;
}

// ===== callers that go away =====

#[tokio::test]
async fn who_is_gone_before_the_statement_is_never_sent() {
    let Some(db) = Db::migrated("lane_gone").await else {
        return;
    };
    let store = db.warm(db.builder().response_timeout(LONG)).await;
    let held = db.hold(NO_WRITES).await;
    let sent = ["sent", "too"].map(|text| tokio::spawn(store.remember(&id(text))));
    until_held_up(&db).await;
    let queued: Vec<_> = named("gone", 20)
        .iter()
        .map(|text| tokio::spawn(store.remember(&id(text))))
        .collect();
    let stays = tokio::spawn(store.remember(&id("stays")));
    tokio::task::yield_now().await;
    for caller in &queued {
        caller.abort();
    }
    for caller in queued {
        assert!(caller.await.unwrap_err().is_cancelled());
    }
    assert!(db.waiting().await <= AT_ONCE, "they wait in the lane");
    held.commit().await;
    for caller in sent {
        caller.await.unwrap().unwrap();
    }
    stays.await.unwrap().unwrap();
    let expected = ["sent", "stays", "too"].map(str::to_owned);
    assert_eq!(db.keys().await, expected.into());

    // Nobody is left: nothing is sent, and the lane can be used again.
    let held = db.hold(NO_WRITES).await;
    let sent = ["sent", "too"].map(|text| tokio::spawn(store.remember(&id(text))));
    until_held_up(&db).await;
    let gone = tokio::spawn(store.remember(&id("gone")));
    tokio::task::yield_now().await;
    gone.abort();
    assert!(gone.await.is_err());
    held.commit().await;
    for caller in sent {
        caller.await.unwrap().unwrap();
    }
    store.remember(&id("last")).await.unwrap();
    assert!(!store.seen(&id("gone")).await.unwrap());
    db.drop().await;
}

#[tokio::test]
async fn who_is_gone_before_a_connection_is_free_is_never_sent() {
    let Some(db) = Db::migrated("lane_pool").await else {
        return;
    };
    let pool = db.users_pool(1, &[]);
    let store = db.builder().pool(pool.clone()).unwrap();
    store.seen(&id("nobody")).await.unwrap();
    db.count_statements().await;
    let connection = pool.acquire().await.unwrap();
    let mut gone = vec![];
    for text in named("gone", 20) {
        gone.push(tokio::spawn(store.remember(&id(&text))));
        gone.push(tokio::spawn(store.forget(&id(&text))));
    }
    tokio::task::yield_now().await;
    let stays = tokio::spawn(store.remember(&id("stays")));
    tokio::task::yield_now().await;
    for caller in gone {
        caller.abort();
        assert!(caller.await.is_err());
    }
    drop(connection);
    stays.await.unwrap().unwrap();
    store.forget(&id("other")).await.unwrap();
    assert_eq!(db.keys().await, ["stays".to_owned()].into());
    assert_eq!(db.statements("INSERT").await, 1);
    assert_eq!(db.statements("DELETE").await, 1);
    db.drop().await;
}

#[tokio::test]
async fn who_is_gone_while_it_is_under_way_takes_no_answer_along() {
    let Some(db) = Db::migrated("lane_flight").await else {
        return;
    };
    let store = db.warm(db.builder().response_timeout(LONG)).await;
    store.remember(&id("known")).await.unwrap();
    let held = db.hold(NO_WRITES).await;
    let callers = ["a", "b", "c"].map(|text| tokio::spawn(store.remember(&id(text))));
    until_held_up(&db).await;
    let [a, b, c] = callers;
    b.abort();
    assert!(b.await.is_err());
    held.commit().await;
    a.await.unwrap().unwrap();
    c.await.unwrap().unwrap();
    // It was sent with the others.
    assert!(db.stored("b").await.is_some());

    let held = db.hold(NO_READS).await;
    let callers = ["a", "b", "known", "none"].map(|text| tokio::spawn(store.seen(&id(text))));
    until_held_up(&db).await;
    let [a, b, known, none] = callers;
    a.abort();
    b.abort();
    held.commit().await;
    assert!(known.await.unwrap().unwrap());
    assert!(!none.await.unwrap().unwrap());

    // All of them.
    let held = db.hold(NO_WRITES).await;
    let caller = tokio::spawn(store.remember(&id("lonely")));
    db.until_waiting(1).await;
    caller.abort();
    held.commit().await;
    until("it was sent", async || db.stored("lonely").await.is_some()).await;
    store.remember(&id("last")).await.unwrap();
    db.drop().await;
}

#[tokio::test]
async fn who_waits_alone_for_a_locked_row_can_go_away() {
    let Some(db) = Db::migrated("lane_alone").await else {
        return;
    };
    let store = db.warm(db.builder().response_timeout(LONG)).await;
    store.remember(&id("m")).await.unwrap();
    let held = db
        .hold("SELECT 1 FROM {t} WHERE message_id = 'm' FOR UPDATE")
        .await;
    let caller = tokio::spawn(store.remember(&id("m")));
    db.until_waiting(1).await;
    sleep(Duration::from_millis(250)).await;
    db.until_waiting(1).await;
    caller.abort();
    assert!(caller.await.is_err());
    store.remember(&id("other")).await.unwrap();
    held.commit().await;
    store.remember(&id("m")).await.unwrap();
    until("nobody is left behind", async || {
        db.sessions("state <> 'idle'").await == 0
    })
    .await;
    db.drop().await;
}

#[tokio::test]
async fn who_is_not_polled_keeps_nobody_waiting() {
    let Some(db) = Db::migrated("lane_lazy").await else {
        return;
    };
    let store = db.builder().pool(db.users_pool(4, &[])).unwrap();
    store.remember(&id("known")).await.unwrap();
    // Begun, and then left alone while others are at work, as in a `select!` or a stream of futures.
    // On a busy machine an answer may be there at once.
    let mut lazy = vec![
        store.seen(&id("known")).map_ok(drop).boxed(),
        store.remember(&id("new")).boxed(),
        store.forget(&id("new")).boxed(),
    ];
    lazy.retain_mut(|call| call.now_or_never().is_none());
    for _ in 0..3 {
        let others = async {
            assert!(store.seen(&id("known")).await.unwrap());
            remember_all(&store, named("other", 20)).await;
            store.forget(&id("other")).await.unwrap();
        };
        timeout(PATIENCE / 2, others).await.expect("an answer");
    }
    try_join_all(lazy).await.unwrap();
    db.drop().await;
}

#[tokio::test]
async fn nor_does_who_is_the_first_of_all() {
    let Some(db) = Db::migrated("lane_first").await else {
        return;
    };
    let store = db.store().await;
    // It looks the table up, for the others too.
    let mut first = store.seen(&id("known"));
    if (&mut first).now_or_never().is_some() {
        return db.drop().await;
    }
    let others = try_join_all([store.seen(&id("a")), store.seen(&id("b"))]);
    let others = timeout(PATIENCE / 2, others).await.expect("an answer");
    assert_eq!(others.unwrap(), [false; 2]);
    assert!(!first.await.unwrap());
    db.drop().await;
}

// ===== the task that drives =====

/// Both kinds of lane, held up by their driver's runtime, which ends.
async fn outlives(size: u32) {
    let Some(db) = Db::migrated("lane_runtime").await else {
        return;
    };
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
    };
    let a: Runtime = runtime();
    // The store and its pool begin there, too.
    let (table, url) = (db.table.clone(), db.url.clone());
    let made = a.spawn(async move {
        let store = PostgresStore::builder(&table)
            .response_timeout(LONG)
            .max_connections(size)
            .connect(&url)
            .await
            .unwrap();
        store.remember(&id("known")).await.unwrap();
        store
    });
    let mut store = made.await.unwrap();
    let mut a = Some(a);
    for (lock, reads) in [(NO_WRITES, false), (NO_READS, true)] {
        let on = a.take().unwrap_or_else(runtime);
        let call = |text: &str| {
            let (store, id) = (store.clone(), id(text));
            async move {
                if reads {
                    store.seen(&id).await
                } else {
                    store.remember(&id).await.map(|()| true)
                }
            }
        };
        let held = db.hold(lock).await;
        // The one goes alone, the other drives.
        let theirs = ["known", "b"].map(|text| {
            let caller = on.spawn(call(text));
            std::thread::sleep(Duration::from_millis(50));
            caller
        });
        until_held_up(&db).await;
        // These wait for what that runtime has under way.
        let ours = ["known", "b", "c"].map(|text| tokio::spawn(call(text)));
        sleep(Duration::from_millis(50)).await;
        assert!(db.waiting().await <= AT_ONCE);
        tokio::task::spawn_blocking(move || drop(on)).await.unwrap();
        for caller in theirs {
            assert!(caller.await.unwrap_err().is_cancelled());
        }
        held.commit().await;
        for (caller, text) in ours.into_iter().zip(["known", "b", "c"]) {
            let answer = timeout(PATIENCE, caller).await.expect("an answer");
            assert!(answer.unwrap().unwrap(), "{text}");
        }
        // The same store, here.
        store = store.clone();
        remember_all(&store, named("later", 64)).await;
        assert!(store.seen(&id("b")).await.unwrap());
        assert!(!store.seen(&id("d")).await.unwrap());
        store.forget(&id("d")).await.unwrap();
    }
    drop(store);
    db.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_the_task_that_drives_leaves_nobody_waiting() {
    outlives(10).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nor_does_it_keep_the_only_connection() {
    outlives(1).await;
}

#[tokio::test]
async fn a_lost_connection_is_told_to_all_that_it_carried() {
    let Some(db) = Db::migrated("lane_cut").await else {
        return;
    };
    let server = services::host_and_port(&db.url);
    let proxy = Proxy::start(server.to_socket_addrs().unwrap().next().unwrap()).await;
    let url = db.url.replace(&server, &proxy.addr().to_string());
    let store = db.builder().response_timeout(LONG).connect(&url).await;
    let store = store.unwrap();
    store.remember(&id("m")).await.unwrap();
    db.count_statements().await;
    let held = db.hold(NO_WRITES).await;
    let callers = named("m", 20).into_iter();
    let callers: Vec<_> = callers
        .map(|text| tokio::spawn(store.remember(&id(&text))))
        .collect();
    until_held_up(&db).await;
    proxy.cut();
    for caller in callers {
        let error = is_kind(caller.await.unwrap(), BackendErrorKind::Unavailable);
        assert!(error.is_retryable());
    }
    held.commit().await;
    // What was sent arrives or not, but none of them went again.
    store.remember(&id("last")).await.unwrap();
    assert!(db.statements("INSERT").await <= AT_ONCE + 1);
    assert!(store.seen(&id("last")).await.unwrap());
    db.drop().await;
}

#[test]
fn a_runtime_that_nobody_drives_any_more_holds_up_nobody_for_long() {
    let live = Runtime::new().unwrap();
    let idle = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let Some((db, store)) = live.block_on(async {
        let db = Db::migrated("idle").await?;
        let limit = Duration::from_millis(500);
        let store = db.warm(db.builder().response_timeout(limit)).await;
        Some((db, store))
    }) else {
        return;
    };
    // Three are under way on the idle runtime, one alone and two by a driver, when it stops.
    let held = live.block_on(db.hold("LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE"));
    let ids = ["a", "b", "c"].map(id);
    idle.block_on(async {
        let calls = join_all(ids.iter().map(|id| store.remember(id)));
        timeout(Duration::from_millis(50), calls).await.unwrap_err();
    });
    live.block_on(async {
        held.rollback().await;
        let start = Instant::now();
        let all = join_all((0..8).map(|n| {
            let (store, own) = (store.clone(), id(&format!("n{n}")));
            async move {
                // A connection that was opened there answers nothing either, and is closed for it.
                while store.remember(&own).await.is_err() {
                    assert!(start.elapsed() < PATIENCE);
                }
                assert!(store.seen(&own).await.unwrap());
            }
        }));
        timeout(PATIENCE, all).await.unwrap();
        db.drop().await;
    });
    drop(idle);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_runs_into_a_statement_timeout_fails_no_other_mark() {
    let Some(db) = Db::migrated("timeout").await else {
        return;
    };
    // Shorter than a statement for several ids waits for a row, and enough for what does not wait.
    let settings = [("statement_timeout", "90ms"), ("synchronous_commit", "off")];
    let store = db.builder().pool(db.users_pool(4, &settings)).unwrap();
    store.remember(&id("held")).await.unwrap();
    let held = db
        .hold("UPDATE {t} SET state = state WHERE message_id = 'held'")
        .await;
    let ids: Vec<_> = (0..20).map(|n| id(&format!("free-{n}"))).collect();
    let (lone, locked) = (id("lone"), id("held"));
    let (_, locked, free) = tokio::join!(
        store.remember(&lone),
        store.remember(&locked),
        join_all(ids.iter().map(|id| store.remember(id)))
    );
    assert!(is_kind(locked, BackendErrorKind::Unavailable).is_retryable());
    // On a machine with other work one or two may take so long by themselves.
    let failed = free.iter().filter(|marked| marked.is_err()).count();
    assert!(failed <= 3, "{failed} fail that have nothing to do with it");
    held.rollback().await;
    db.drop().await;
}
