//! Claims in the tables of PostgreSQL, MySQL and SQLite: what each step writes, who wins, and what is
//! answered when others are in the way.

#[path = "support/services.rs"]
mod services;
#[path = "support/statements.rs"]
mod statements;
#[path = "support/world.rs"]
mod world;

use services::{Bouncer, PATIENCE, Proxy, drop_after};
use sqlx::{Executor, Row};
use std::{
    collections::HashMap,
    net::ToSocketAddrs,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{sync::Barrier, time::sleep};
use tower_idempotency::{
    MessageId, Store,
    error::{BackendError, BackendErrorKind},
    store::{Claim, ClaimStore, Lease, Owner},
};
use world::{Open, Stored, World, until};

const ME: Owner = Owner::from_bits(0xA);
const OTHER: Owner = Owner::from_bits(0xB << 100);

/// The TTL of the stores here, in microseconds, unless a test says otherwise.
const DAY: i64 = 24 * 3600 * 1_000_000;

/// As long as no test takes.
const LONG: i64 = 3600 * 1_000_000;

fn id(text: &str) -> MessageId {
    MessageId::from(text)
}

fn hex(owner: Owner) -> Option<String> {
    Some(owner.to_string())
}

fn lease(micros: i64) -> Lease {
    Lease::new(Duration::from_micros(micros as u64)).unwrap()
}

fn long() -> Lease {
    lease(LONG)
}

/// What is left of somebody's lease.
#[track_caller]
fn busy(claim: Claim) -> Duration {
    match claim {
        Claim::Busy { retry_after } => retry_after,
        other => panic!("{other:?}"),
    }
}

/// Takes the times of a step by the clock of the server, and says of a record that it was written
/// in that step and lasts so long from then.
struct Step(i64);

impl Step {
    async fn begin<W: World>(world: &W) -> Step {
        Step(world.now().await)
    }

    async fn wrote<W: World>(
        &self,
        world: &W,
        key: &str,
        state: &str,
        owner: Option<String>,
        lasts: i64,
    ) {
        let after = world.now().await;
        let stored = world.stored(key).await.expect("a record");
        assert_eq!(stored.state, state, "{key}");
        assert_eq!(stored.owner, owner, "{key}");
        // SQLite has milliseconds, rounded.
        let within = self.0 - 1000..=after + 1000;
        assert!(
            within.contains(&stored.since),
            "{key}: {stored:?}, {within:?}"
        );
        let expires_at = stored.expires_at.expect("an end");
        assert!(
            within.contains(&(expires_at - lasts)),
            "{key}: {stored:?}, {within:?}"
        );
    }
}

// ===== what each step writes =====

async fn steps<W: World>(world: Option<W>) {
    let Some(world) = world else { return };
    let store = world.store().await;

    // Free.
    let step = Step::begin(&world).await;
    assert_eq!(store.claim(&id("a"), ME, long()).await.unwrap(), Claim::Won);
    step.wrote(&world, "a", "claimed", hex(ME), LONG).await;
    assert!(!store.seen(&id("a")).await.unwrap());

    // Somebody else's: nothing changes.
    let before = world.stored("a").await;
    for _ in 0..2 {
        let claim = store.claim(&id("a"), OTHER, lease(2 * LONG)).await;
        let left = busy(claim.unwrap());
        assert!(left <= long().length(), "{left:?}");
        assert!(left > long().length() - PATIENCE, "{left:?}");
    }
    assert!(!store.renew(&id("a"), OTHER, long()).await.unwrap());
    assert!(!store.release(&id("a"), OTHER).await.unwrap());
    assert_eq!(world.stored("a").await, before);

    // Mine: it starts anew.
    let step = Step::begin(&world).await;
    let again = store.claim(&id("a"), ME, lease(2 * LONG)).await;
    assert_eq!(again.unwrap(), Claim::Won);
    step.wrote(&world, "a", "claimed", hex(ME), 2 * LONG).await;
    let since = world.stored("a").await.unwrap().since;
    let step = Step::begin(&world).await;
    assert!(store.renew(&id("a"), ME, lease(3 * LONG)).await.unwrap());
    let renewed = world.stored("a").await.unwrap();
    assert_eq!(renewed.since, since, "held since it was claimed");
    world
        .run("UPDATE {t} SET since = {now} WHERE message_id = 'a'")
        .await;
    step.wrote(&world, "a", "claimed", hex(ME), 3 * LONG).await;

    // Given up.
    assert!(store.release(&id("a"), ME).await.unwrap());
    assert_eq!(world.stored("a").await, None);
    assert!(!store.release(&id("a"), ME).await.unwrap());
    assert!(!store.renew(&id("a"), ME, long()).await.unwrap());
    assert_eq!(world.stored("a").await, None);

    // Over: nobody's, and everybody's.
    store.claim(&id("a"), ME, long()).await.unwrap();
    world.expire("a").await;
    let before = world.stored("a").await;
    assert!(!store.renew(&id("a"), ME, long()).await.unwrap());
    assert!(!store.release(&id("a"), ME).await.unwrap());
    assert_eq!(world.stored("a").await, before);
    let step = Step::begin(&world).await;
    let claim = store.claim(&id("a"), OTHER, long()).await;
    assert_eq!(claim.unwrap(), Claim::Won);
    step.wrote(&world, "a", "claimed", hex(OTHER), LONG).await;
    // The one who had it before has it no more.
    busy(store.claim(&id("a"), ME, long()).await.unwrap());
    // Its own, also past its end.
    world.expire("a").await;
    let step = Step::begin(&world).await;
    let claim = store.claim(&id("a"), OTHER, long()).await;
    assert_eq!(claim.unwrap(), Claim::Won);
    step.wrote(&world, "a", "claimed", hex(OTHER), LONG).await;

    world.drop().await;
}

async fn done<W: World>(world: Option<W>) {
    let Some(world) = world else { return };
    let store = world.store().await;

    // Held: done, and it says so as often as it is sent.
    store.claim(&id("a"), ME, long()).await.unwrap();
    for _ in 0..3 {
        let step = Step::begin(&world).await;
        assert!(store.complete(&id("a"), ME).await.unwrap());
        step.wrote(&world, "a", "done", hex(ME), DAY).await;
    }
    assert!(store.seen(&id("a")).await.unwrap());

    // Done stays done: nobody holds it, nobody takes it, not even who had it.
    let before = world.stored("a").await;
    for owner in [ME, OTHER] {
        let claim = store.claim(&id("a"), owner, long()).await;
        assert_eq!(claim.unwrap(), Claim::Done);
        assert!(!store.renew(&id("a"), owner, long()).await.unwrap());
        assert!(!store.release(&id("a"), owner).await.unwrap());
    }
    assert_eq!(world.stored("a").await, before);

    // Past its end it can be claimed, by who had it as well.
    for owner in [OTHER, ME] {
        world.expire("a").await;
        assert!(!store.seen(&id("a")).await.unwrap());
        let step = Step::begin(&world).await;
        let claim = store.claim(&id("a"), owner, long()).await;
        assert_eq!(claim.unwrap(), Claim::Won);
        step.wrote(&world, "a", "claimed", hex(owner), LONG).await;
        assert!(store.complete(&id("a"), owner).await.unwrap());
    }

    // Whatever the owner: free, somebody else's, over, done by somebody else, done without an owner.
    let step = Step::begin(&world).await;
    assert!(!store.complete(&id("free"), ME).await.unwrap());
    step.wrote(&world, "free", "done", None, DAY).await;
    store.claim(&id("others"), OTHER, long()).await.unwrap();
    store.claim(&id("over"), ME, long()).await.unwrap();
    world.expire("over").await;
    store.claim(&id("othersdone"), OTHER, long()).await.unwrap();
    store.complete(&id("othersdone"), OTHER).await.unwrap();
    store.remember(&id("remembered")).await.unwrap();
    for key in ["others", "over", "othersdone", "remembered"] {
        for _ in 0..2 {
            let step = Step::begin(&world).await;
            assert!(!store.complete(&id(key), ME).await.unwrap(), "{key}");
            step.wrote(&world, key, "done", None, DAY).await;
        }
    }

    // The seen-set's own steps work on what is claimed.
    store.claim(&id("b"), ME, long()).await.unwrap();
    let step = Step::begin(&world).await;
    store.remember(&id("b")).await.unwrap();
    step.wrote(&world, "b", "done", None, DAY).await;
    assert!(!store.renew(&id("b"), ME, long()).await.unwrap());
    store.claim(&id("c"), ME, long()).await.unwrap();
    store.forget(&id("c")).await.unwrap();
    assert_eq!(world.stored("c").await, None);
    assert!(!store.renew(&id("c"), ME, long()).await.unwrap());

    // For ever.
    let forever = world.connect(world.builder().ttl(None)).await;
    forever.claim(&id("d"), ME, long()).await.unwrap();
    assert!(forever.complete(&id("d"), ME).await.unwrap());
    let stored = world.stored("d").await.unwrap();
    let expected = Stored {
        state: "done".to_owned(),
        owner: hex(ME),
        since: stored.since,
        expires_at: None,
    };
    assert_eq!(stored, expected);
    for owner in [ME, OTHER] {
        let claim = forever.claim(&id("d"), owner, long()).await;
        assert_eq!(claim.unwrap(), Claim::Done);
    }
    assert!(forever.complete(&id("d"), ME).await.unwrap());
    assert_eq!(world.stored("d").await.unwrap().expires_at, None);

    world.drop().await;
}

// ===== who wins =====

/// So many claim one id, each with an owner of its own, through several stores. Answers who won.
async fn race<S: ClaimStore<Error = BackendError>>(stores: &[S], key: &str) -> Owner {
    let racers = 64;
    let start = Arc::new(Barrier::new(racers));
    let racers: Vec<_> = (0..racers)
        .map(|number| {
            let store = stores[number % stores.len()].clone();
            let (id, owner, start) = (id(key), Owner::random(), start.clone());
            tokio::spawn(async move {
                start.wait().await;
                (owner, store.claim(&id, owner, long()).await.unwrap())
            })
        })
        .collect();
    let mut winners = Vec::new();
    for racer in racers {
        match racer.await.unwrap() {
            (owner, Claim::Won) => winners.push(owner),
            (_, Claim::Busy { retry_after }) => assert!(retry_after <= long().length()),
            (_, Claim::Done) => panic!("nobody completed {key}"),
        }
    }
    assert_eq!(winners.len(), 1, "{key}: {winners:?}");
    winners[0]
}

async fn races<W: World>(world: Option<W>) {
    let Some(world) = world else { return };
    // A wait for a connection is none for a lock.
    let patient = || world.builder().response_timeout(PATIENCE);
    let stores = [
        world.connect(patient()).await,
        world.connect(patient()).await,
    ];
    for turn in 0..3 {
        // Free.
        let key = format!("fresh{turn}");
        let winner = race(&stores, &key).await;
        assert_eq!(world.stored(&key).await.unwrap().owner, hex(winner));

        // Over.
        world.expire(&key).await;
        let next = race(&stores, &key).await;
        assert_ne!(next, winner);
        assert_eq!(world.stored(&key).await.unwrap().owner, hex(next));

        // Done, and past its end.
        stores[0].complete(&id(&key), next).await.unwrap();
        world.expire(&key).await;
        let winner = race(&stores, &key).await;
        assert_eq!(world.stored(&key).await.unwrap().owner, hex(winner));
    }

    // Given up meanwhile: nobody but who came after that wins, and no two do.
    for turn in 0..3 {
        let key = format!("released{turn}");
        stores[0].claim(&id(&key), ME, long()).await.unwrap();
        let racers: Vec<_> = (0..64)
            .map(|number| {
                let (store, id) = (stores[number % 2].clone(), id(&key));
                tokio::spawn(async move {
                    if number == 20 {
                        assert!(store.release(&id, ME).await.unwrap());
                        return 0;
                    }
                    let claim = store.claim(&id, Owner::random(), long()).await.unwrap();
                    assert_ne!(claim, Claim::Done);
                    usize::from(claim == Claim::Won)
                })
            })
            .collect();
        let mut won = 0;
        for racer in racers {
            won += racer.await.unwrap();
        }
        assert!(won <= 1, "{won} won {key}");
        let stored = world.stored(&key).await;
        assert_eq!(won == 1, stored.is_some(), "{stored:?}");
    }
    drop(stores);
    world.drop().await;
}

// ===== others in the way =====

/// A store that has looked its table up, and waits for a lock for a second when it claims.
async fn patient<W: World>(world: &W) -> W::Store {
    let builder = world.builder().response_timeout(PATIENCE);
    let store = world.connect(builder).await;
    assert!(!store.seen(&id("nobody")).await.unwrap());
    store
}

fn started<T: Send + 'static>(
    call: impl Future<Output = T> + Send + 'static,
) -> tokio::task::JoinHandle<T> {
    tokio::spawn(call)
}

/// A row, or the file, that is locked for longer than is waited: not a failure of a claim, but of all
/// other steps.
async fn locked<W: World>(world: Option<W>, bounded: bool) {
    let Some(world) = world else { return };
    // What the session waits otherwise is far longer, where a claim does not wait for that.
    let store = if bounded {
        patient(&world).await
    } else {
        world.store().await
    };
    store.claim(&id("mine"), ME, long()).await.unwrap();
    store.claim(&id("over"), OTHER, long()).await.unwrap();
    world.expire("over").await;
    let insert = "INSERT INTO {t} VALUES ('new', 'claimed', 'x', {now}, {now} + 1000000000)";
    let change = "UPDATE {t} SET since = since + 1";
    for statement in [insert, change] {
        let key = if statement == insert { "new" } else { "over" };
        let holder = world.hold(statement).await;
        let begun = Instant::now();
        let left = busy(store.claim(&id(key), ME, long()).await.unwrap());
        assert!(left <= Duration::from_secs(1), "{left:?}");
        // The lock is still there; what was waited is not what the session waits otherwise.
        assert!(!bounded || begun.elapsed() < PATIENCE / 2);
        holder.end("ROLLBACK").await;
        let step = Step::begin(&world).await;
        let claim = store.claim(&id(key), ME, long()).await;
        assert_eq!(claim.unwrap(), Claim::Won);
        step.wrote(&world, key, "claimed", hex(ME), LONG).await;
        store.release(&id(key), ME).await.unwrap();
        store.claim(&id("over"), OTHER, long()).await.unwrap();
        world.expire("over").await;
    }

    let hasty = world.store().await;
    assert!(!hasty.seen(&id("nobody")).await.unwrap());
    let before = world.stored("mine").await;
    let holder = world.hold(change).await;
    let mine = id("mine");
    let (renewed, released, completed) = tokio::join!(
        hasty.renew(&mine, ME, long()),
        hasty.release(&mine, ME),
        hasty.complete(&mine, ME)
    );
    for answer in [renewed, released, completed] {
        let error = answer.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Contention, "{error}");
    }
    holder.end("ROLLBACK").await;
    assert_eq!(world.stored("mine").await, before);
    // What was given up did not stay behind.
    assert!(hasty.renew(&id("mine"), ME, long()).await.unwrap());
    world.drop().await;
}

/// What is written after a wait has the end that it would have without one.
async fn waited<W: World>(world: Option<W>) {
    let Some(world) = world else { return };
    let store = patient(&world).await;
    let second = 1_000_000;
    let ways: [(&str, &str); 2] = [
        (
            "inserted",
            "INSERT INTO {t} VALUES ('KEY', 'claimed', 'x', {now}, {now} + 1000000000)",
        ),
        (
            "over",
            "UPDATE {t} SET since = since + 1 WHERE message_id = 'KEY'",
        ),
    ];
    for (way, statement) in ways {
        let mut won = 0;
        for turn in 0.. {
            assert!(turn < 20, "the machine is too slow: {way}");
            let key = format!("{way}{turn}");
            if way == "over" {
                store.claim(&id(&key), OTHER, long()).await.unwrap();
                world.expire(&key).await;
            }
            let holder = world.hold(&statement.replace("KEY", &key)).await;
            let claim = started(store.claim(&id(&key), ME, lease(second)));
            world.until_waiting(&claim).await;
            sleep(Duration::from_millis(300)).await;
            let released = world.now().await;
            holder.end("ROLLBACK").await;
            // Or it waited for too long.
            if claim.await.unwrap().unwrap() == Claim::Won {
                let stored = world.stored(&key).await.unwrap();
                let end = stored.expires_at.unwrap();
                // What a statement takes may be missing, of a second a tenth of it.
                assert!(
                    end >= released + second - 101_000,
                    "{way}: {stored:?}, {released}"
                );
                assert!(end <= world.now().await + second + 1000);
                won += 1;
            }
            if won == 2 {
                break;
            }
        }
    }
    // Renewals, and what is done.
    let builder = world.builder().response_timeout(PATIENCE);
    let short = world.connect(builder.ttl(Duration::from_secs(1))).await;
    short.seen(&id("nobody")).await.unwrap();
    let holder = world
        .hold("INSERT INTO {t} VALUES ('done', 'claimed', 'x', {now}, {now} + 1000000000)")
        .await;
    let complete = started(short.complete(&id("done"), ME));
    world.until_waiting(&complete).await;
    sleep(Duration::from_millis(300)).await;
    let released = world.now().await;
    holder.end("ROLLBACK").await;
    assert!(!complete.await.unwrap().unwrap());
    let end = world.stored("done").await.unwrap().expires_at.unwrap();
    assert!(end >= released + second - 101_000, "{end}, {released}");
    world.drop().await;
}

/// Whoever meets a row that is not committed trusts neither what it says nor that it will stay.
async fn uncommitted<W: World>(world: Option<W>) {
    let Some(world) = world else { return };
    let store = patient(&world).await;
    let row = |state: &str| {
        format!("INSERT INTO {{t}} VALUES ('KEY', '{state}', 'x', {{now}}, {{now}} + 1000000000)")
    };
    for (state, end) in [
        ("done", "ROLLBACK"),
        ("done", "COMMIT"),
        ("claimed", "ROLLBACK"),
        ("claimed", "COMMIT"),
    ] {
        let mut told = false;
        for turn in 0..20 {
            let key = format!("{state}{end}{turn}");
            let holder = world.hold(&row(state).replace("KEY", &key)).await;
            let claim = started(store.claim(&id(&key), ME, long()));
            world.until_waiting(&claim).await;
            holder.end(end).await;
            let claim = claim.await.unwrap().unwrap();
            match (state, end, claim) {
                (_, "ROLLBACK", Claim::Won) => told = true,
                ("done", "COMMIT", Claim::Done) => told = true,
                ("claimed", "COMMIT", Claim::Busy { retry_after }) => {
                    told = retry_after > Duration::from_secs(2);
                }
                // It waited for too long.
                (_, _, Claim::Busy { .. }) => {}
                other => panic!("{other:?}"),
            }
            if told {
                break;
            }
        }
        assert!(told, "{state} {end}");
    }
    world.drop().await;
}

/// What ends never, and is no worker's of ours.
async fn endless<W: World>(world: Option<W>) {
    let Some(world) = world else { return };
    let store = world.store().await;
    let rows = [
        ("a", "'claimed', 'x'"),
        ("b", "'claimed', NULL"),
        ("c", "'odd', NULL"),
    ];
    for (key, row) in rows {
        let insert = format!("INSERT INTO {{t}} VALUES ('{key}', {row}, {{now}}, NULL)");
        world.run(&insert).await;
        let log = statements::log();
        let claim = store.claim(&id(key), ME, long()).await.unwrap();
        let retry_after = long().length();
        assert_eq!(claim, Claim::Busy { retry_after });
        assert_eq!(log.warnings(world.table()), 1);
        assert!(!store.seen(&id(key)).await.unwrap());
        assert!(store.release(&id(key), ME).await.is_ok_and(|held| !held));
        assert_eq!(world.stored(key).await.unwrap().expires_at, None);
    }
    // With an end, another state is like a claim.
    world
        .run("UPDATE {t} SET expires_at = {now} + 5000000 WHERE message_id = 'c'")
        .await;
    let left = busy(store.claim(&id("c"), ME, long()).await.unwrap());
    assert!(left <= Duration::from_secs(5));
    world.expire("c").await;
    let step = Step::begin(&world).await;
    assert_eq!(store.claim(&id("c"), ME, long()).await.unwrap(), Claim::Won);
    step.wrote(&world, "c", "claimed", hex(ME), LONG).await;
    world.drop().await;
}

// ===== the connection of the renewals =====

async fn exhausted<W: World>(world: Option<W>) {
    let Some(world) = world else { return };
    let outside = world.store().await;
    for key in ["a", "b"] {
        outside.claim(&id(key), ME, long()).await.unwrap();
    }
    let (store, taken) = world.exhausted(2).await;
    for key in ["a", "b", "a"] {
        let step = Step::begin(&world).await;
        assert!(store.renew(&id(key), ME, lease(2 * LONG)).await.unwrap());
        world
            .run(&format!(
                "UPDATE {{t}} SET since = {{now}} WHERE message_id = '{key}'"
            ))
            .await;
        step.wrote(&world, key, "claimed", hex(ME), 2 * LONG).await;
    }
    assert!(!store.renew(&id("a"), OTHER, long()).await.unwrap());
    // All others need one of the pool.
    let error = store.claim(&id("c"), ME, long()).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable, "{error}");
    drop(taken);
    let mut claim = store.claim(&id("c"), ME, long()).await;
    for _ in 0..100 {
        if claim.is_ok() {
            break;
        }
        claim = store.claim(&id("c"), ME, long()).await;
    }
    assert_eq!(claim.unwrap(), Claim::Won);
    drop(store);
    world.drop().await;
}

/// A server behind a proxy that breaks the connections.
async fn lost<W: World>(world: Option<W>) {
    let Some(mut world) = world else { return };
    let server = services::host_and_port(world.url());
    let proxy = Proxy::start(server.to_socket_addrs().unwrap().next().unwrap()).await;
    let through = world.url().replace(&server, &proxy.addr().to_string());
    world.is_behind(through, false);
    let limit = Duration::from_secs(2);
    let store = world.connect(world.builder().response_timeout(limit)).await;
    store.claim(&id("a"), ME, long()).await.unwrap();
    assert!(store.renew(&id("a"), ME, long()).await.unwrap());
    let open = proxy.connections();
    for _ in 0..5 {
        assert!(store.renew(&id("a"), ME, long()).await.unwrap());
    }
    assert_eq!(proxy.connections(), open, "one connection serves");
    for _ in 0..3 {
        proxy.cut();
        assert!(store.renew(&id("a"), ME, long()).await.unwrap());
    }

    // One that died while nobody looked gives no answer. It is replaced at once.
    proxy.swallow_present();
    assert!(store.renew(&id("a"), ME, long()).await.unwrap());
    // Nor does the next one: that is unknown.
    proxy.swallow_replies(true);
    let error = store.renew(&id("a"), ME, long()).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable, "{error}");
    proxy.swallow_replies(false);
    until("it renews again", async || {
        let renewed = store.renew(&id("a"), ME, long()).await;
        renewed.is_ok_and(|held| held)
    })
    .await;

    // No server for a while.
    proxy.refuse(true);
    proxy.cut();
    let error = store.renew(&id("a"), ME, long()).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Unavailable, "{error}");
    proxy.refuse(false);
    until("it renews again", async || {
        store
            .renew(&id("a"), ME, long())
            .await
            .is_ok_and(|held| held)
    })
    .await;
    world.drop().await;
}

/// Calls that are dropped wherever they are.
async fn dropped<W: World>(world: Option<W>) {
    let Some(world) = world else { return };
    let builder = world
        .builder()
        .max_connections(1)
        .response_timeout(PATIENCE);
    let store = world.connect(builder).await;
    store.seen(&id("nobody")).await.unwrap();
    for polls in 0..8 {
        let (claimed, fresh) = (format!("c{polls}"), format!("f{polls}"));
        store.claim(&id(&claimed), ME, long()).await.unwrap();
        drop_after(polls, store.claim(&id(&fresh), OTHER, long())).await;
        drop_after(polls, store.renew(&id(&claimed), ME, long())).await;
        // All are answered, by what they asked.
        let (mut renewed, mut claims) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            renewed.push(store.renew(&id(&claimed), ME, long()).await.unwrap());
            claims.push(store.claim(&id(&claimed), OTHER, long()).await.unwrap());
        }
        assert_eq!(renewed, [true; 3]);
        for claim in claims {
            busy(claim);
        }
        drop_after(polls, store.complete(&id(&claimed), ME)).await;
        assert!(store.complete(&id(&claimed), ME).await.unwrap());
        assert_eq!(
            store.claim(&id(&claimed), ME, long()).await.unwrap(),
            Claim::Done
        );
        // Whether the dropped claim took effect is not known; its own owner has it either way.
        let claim = store.claim(&id(&fresh), OTHER, long()).await;
        assert_eq!(claim.unwrap(), Claim::Won);
        drop_after(polls, store.release(&id(&fresh), OTHER)).await;
        store.release(&id(&fresh), OTHER).await.unwrap();
        assert_eq!(
            store.claim(&id(&fresh), ME, long()).await.unwrap(),
            Claim::Won
        );
    }
    // Nor does the end of a store need a runtime.
    std::thread::spawn(move || drop(store)).join().unwrap();
    world.drop().await;
}

// ===== what may come =====

/// What a record is, as the contract has it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Known {
    Claimed(Owner),
    Done(Option<Owner>),
}

/// Steps by chance, each answered as a record in memory would: none leaves a claim without an end.
async fn chance<W: World>(world: Option<W>) {
    let Some(world) = world else { return };
    let store = world.store().await;
    let owners = [ME, OTHER, Owner::from_bits(u128::MAX)];
    // The last three are stored as their hash, and in need of an escape.
    let long_id = "x".repeat(300);
    let keys = ["a", "it's $1 ?", "sha256:", &long_id];
    let mut known: HashMap<&str, (Known, bool)> = HashMap::new();
    let mut chance: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut pick = |of: usize| {
        chance = chance
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (chance >> 33) as usize % of
    };
    for step in 0..250 {
        let (key, owner, what) = (keys[pick(4)], owners[pick(3)], pick(11));
        let name = id(key);
        let (record, over) = match known.get(key) {
            Some((record, over)) => (Some(*record), *over),
            None => (None, false),
        };
        let live = record.filter(|_| !over);
        let held = live == Some(Known::Claimed(owner));
        let next = match what {
            0..=3 => {
                let expected = match live {
                    Some(Known::Done(_)) => "done",
                    Some(Known::Claimed(other)) if other != owner => "busy",
                    _ => "won",
                };
                let answer = match store.claim(&name, owner, long()).await.unwrap() {
                    Claim::Won => "won",
                    Claim::Done => "done",
                    Claim::Busy { .. } => "busy",
                };
                assert_eq!(answer, expected, "step {step}: {record:?}, {over}");
                match answer {
                    "won" => Some((Known::Claimed(owner), false)),
                    _ => record.map(|record| (record, over)),
                }
            }
            4 => {
                let answer = store.renew(&name, owner, long()).await.unwrap();
                assert_eq!(answer, held, "step {step}");
                record.map(|record| (record, over))
            }
            5 => {
                let answer = store.release(&name, owner).await.unwrap();
                assert_eq!(answer, held, "step {step}");
                record.filter(|_| !held).map(|record| (record, over))
            }
            6 | 7 => {
                let answer = store.complete(&name, owner).await.unwrap();
                let mine = held || record == Some(Known::Done(Some(owner)));
                assert_eq!(answer, mine, "step {step}: {record:?}, {over}");
                Some((Known::Done(mine.then_some(owner)), false))
            }
            8 => {
                store.remember(&name).await.unwrap();
                Some((Known::Done(None), false))
            }
            9 => {
                store.forget(&name).await.unwrap();
                None
            }
            _ => {
                world.run("UPDATE {t} SET expires_at = {now} - 1000").await;
                known.values_mut().for_each(|record| record.1 = true);
                known.get(key).copied()
            }
        };
        match next {
            Some(record) => drop(known.insert(key, record)),
            None => drop(known.remove(key)),
        }
        let seen = matches!(known.get(key), Some((Known::Done(_), false)));
        assert_eq!(store.seen(&name).await.unwrap(), seen, "step {step}");
    }
    let endless = "DELETE FROM {t} WHERE state <> 'claimed' OR (expires_at IS NOT NULL AND owner IS NOT NULL)";
    world.run(endless).await;
    assert_eq!(world.count().await, 0);
    world.drop().await;
}

/// The number that is stored is of the right magnitude.
async fn lengths<W: World>(world: Option<W>) {
    let Some(world) = world else { return };
    let store = world.store().await;
    let mut millis: u64 = 10;
    while millis <= Lease::MAX.as_millis() as u64 {
        let key = millis.to_string();
        let asked = Lease::new(Duration::from_millis(millis)).unwrap();
        let micros = millis as i64 * 1000;
        let step = Step::begin(&world).await;
        let claim = store.claim(&id(&key), ME, asked).await.unwrap();
        // The shortest ones may have ended before they were read back.
        assert!(claim == Claim::Won || millis < 1000, "{claim:?}");
        step.wrote(&world, &key, "claimed", hex(ME), micros).await;
        if millis >= 10_000 {
            let step = Step::begin(&world).await;
            assert!(store.renew(&id(&key), ME, asked).await.unwrap());
            let end = world.stored(&key).await.unwrap().expires_at.unwrap();
            assert!(end >= step.0 - 1000 + micros && end <= world.now().await + 1000 + micros);
            let left = busy(store.claim(&id(&key), OTHER, long()).await.unwrap());
            assert!(left <= asked.length(), "{left:?} of {asked:?}");
            assert!(left + PATIENCE >= asked.length(), "{left:?} of {asked:?}");
        }
        millis = millis * 7 / 2 + 1;
    }
    let claim = store.claim(&id("max"), ME, Lease::new(Lease::MAX).unwrap());
    assert_eq!(claim.await.unwrap(), Claim::Won);
    world.drop().await;
}

/// How many statements a message costs.
async fn costs<W: World>(world: Option<W>, new: usize, duplicate: usize) {
    let Some(world) = world else { return };
    let store = world.store().await;
    store.seen(&id("nobody")).await.unwrap();
    let table = world.table().to_owned();
    let log = statements::log();
    for key in ["a", "b", "c"] {
        store.claim(&id(key), ME, long()).await.unwrap();
        store.complete(&id(key), ME).await.unwrap();
    }
    assert_eq!(log.statements(&table), 3 * new);
    let log = statements::log();
    for key in ["a", "b", "c"] {
        assert_eq!(
            store.claim(&id(key), OTHER, long()).await.unwrap(),
            Claim::Done
        );
    }
    assert_eq!(log.statements(&table), 3 * duplicate);
    // Nor is more needed where somebody else's record is over.
    for state in ["done", "claimed"] {
        world.expire("a").await;
        let log = statements::log();
        let claim = store.claim(&id("a"), Owner::random(), long()).await;
        assert_eq!(claim.unwrap(), Claim::Won);
        assert_eq!(log.statements(&table), duplicate, "{state}");
    }
    world.drop().await;
}

// ===== the databases =====

mod in_postgres {
    use super::{world::Postgres, *};

    #[tokio::test]
    async fn each_step_writes_what_it_says() {
        steps(Postgres::open("claim_steps").await).await;
    }

    #[tokio::test]
    async fn done_is_done_whoever_says_so() {
        done(Postgres::open("claim_done").await).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_many_one_wins() {
        races(Postgres::open("claim_races").await).await;
    }

    #[tokio::test]
    async fn what_is_locked_is_busy() {
        locked(Postgres::open("claim_locked").await, true).await;
    }

    #[tokio::test]
    async fn an_end_is_computed_after_a_wait() {
        waited(Postgres::open("claim_waited").await).await;
    }

    #[tokio::test]
    async fn what_is_not_committed_is_not_believed() {
        uncommitted(Postgres::open("claim_uncommitted").await).await;
    }

    #[tokio::test]
    async fn a_claim_without_an_end_is_busy() {
        endless(Postgres::open("claim_endless").await).await;
    }

    #[tokio::test]
    async fn renewals_need_no_connection_of_the_pool() {
        exhausted(Postgres::open("claim_exhausted").await).await;
    }

    #[tokio::test]
    async fn a_lost_connection_of_the_renewals_heals() {
        lost(Postgres::open("claim_lost").await).await;
    }

    #[tokio::test]
    async fn calls_may_be_dropped() {
        dropped(Postgres::open("claim_dropped").await).await;
    }

    #[tokio::test]
    async fn any_order_of_steps_is_answered_by_the_contract() {
        chance(Postgres::open("claim_chance").await).await;
    }

    #[tokio::test]
    async fn a_lease_is_stored_in_microseconds() {
        lengths(Postgres::open("claim_lengths").await).await;
    }

    #[tokio::test]
    async fn a_message_costs_so_many_statements() {
        costs(Postgres::open("claim_costs").await, 2, 1).await;
    }
    /// Also where each statement is sent whole.
    #[tokio::test]
    async fn a_pooler_in_transaction_mode_carries_claims() {
        let Some(url) = services::postgres() else {
            return;
        };
        let Some(bouncer) = Bouncer::start(&url) else {
            return;
        };
        let behind = async |name: &str| {
            let mut world = Postgres::open(name).await?;
            world.is_behind(bouncer.url(), true);
            Some(world)
        };
        steps(behind("claim_bouncer").await).await;
        done(behind("claim_bouncer").await).await;
        chance(behind("claim_bouncer").await).await;
    }

    /// Without the setting, an answer is never one of another store's statement.
    #[tokio::test]
    async fn a_pooler_that_mixes_statements_up_mixes_no_claims_up() {
        let Some(a) = Postgres::open("claim_mixed_a").await else {
            return;
        };
        let b = Postgres::open("claim_mixed_b").await.unwrap();
        let Some(bouncer) = Bouncer::start(a.url()) else {
            return;
        };
        let url = bouncer.url();
        let mut refused = 0;
        for round in 0..20 {
            let open = |world: &Postgres| {
                let pool = sqlx::postgres::PgPoolOptions::new()
                    .max_connections(1)
                    .connect_lazy(&url);
                world.builder().pool(pool.unwrap()).unwrap()
            };
            let (in_a, in_b) = (open(&a), open(&b));
            for n in 0..6 {
                let (one, other) = (format!("{round}-{n}-a"), format!("{round}-{n}-b"));
                let (of_a, of_b) = tokio::join!(
                    in_a.claim(&id(&one), ME, long()),
                    in_b.claim(&id(&other), ME, long())
                );
                let claims = [(&a, &b, one, of_a), (&b, &a, other, of_b)];
                for (right, wrong, key, claim) in claims {
                    assert_eq!(wrong.stored(&key).await, None);
                    match claim {
                        Ok(claim) => {
                            assert_eq!(claim, Claim::Won);
                            assert_eq!(right.stored(&key).await.unwrap().owner, hex(ME));
                        }
                        Err(_) => refused += 1,
                    }
                }
            }
        }
        assert!(refused > 0, "the pooler mixed nothing up");
        a.drop().await;
        b.drop().await;
    }

    #[tokio::test]
    async fn who_does_not_win_writes_nothing() {
        let Some(world) = Postgres::open("claim_unwritten").await else {
            return;
        };
        let store = world.store().await;
        store.claim(&id("busy"), OTHER, long()).await.unwrap();
        store.complete(&id("done"), OTHER).await.unwrap();
        // Not even a lock of the row, which would stand in its `xmax`.
        let versions = async || {
            let statement = "SELECT message_id || ctid::text || xmin::text || ' ' || xmax::text FROM {t} ORDER BY 1";
            let rows = world.rows(statement).await;
            rows.iter().map(|row| row.get(0)).collect::<Vec<String>>()
        };
        let before = versions().await;
        for _ in 0..3 {
            busy(store.claim(&id("busy"), ME, long()).await.unwrap());
            let claim = store.claim(&id("done"), ME, long()).await;
            assert_eq!(claim.unwrap(), Claim::Done);
            for key in ["busy", "done", "nobody"] {
                assert!(!store.renew(&id(key), ME, long()).await.unwrap());
                assert!(!store.release(&id(key), ME).await.unwrap());
            }
        }
        assert_eq!(versions().await, before);
        world.drop().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn renewals_share_one_connection_and_leave_nothing_open() {
        let Some(world) = Postgres::open("claim_sessions").await else {
            return;
        };
        let (store, taken) = world.exhausted(1).await;
        let outside = world.store().await;
        for n in 0..20 {
            let claim = outside.claim(&id(&n.to_string()), ME, long()).await;
            assert_eq!(claim.unwrap(), Claim::Won);
        }
        drop(outside);
        until("only the pool of one is left", async || {
            world.sessions("true").await == 1
        })
        .await;
        let renewals: Vec<_> = (0..20)
            .map(|n| started(store.renew(&id(&n.to_string()), ME, long())))
            .collect();
        for renewal in renewals {
            assert!(renewal.await.unwrap().unwrap());
        }
        assert_eq!(world.sessions("true").await, 2);
        for polls in 0..8 {
            drop_after(polls, store.renew(&id("1"), ME, long())).await;
        }
        assert!(store.renew(&id("1"), ME, long()).await.unwrap());
        assert_eq!(world.sessions("state <> 'idle'").await, 0);
        assert_eq!(world.sessions("true").await, 2);
        drop((store, taken));
        world.drop().await;
    }

    #[tokio::test]
    async fn a_table_that_only_the_pool_finds_is_renewed_over_the_pool() {
        let Some(world) = Postgres::open("claim_path").await else {
            return;
        };
        let table = world.table();
        world
            .run("CREATE SCHEMA s_{t}; ALTER TABLE {t} SET SCHEMA s_{t}")
            .await;
        let set = format!("SET search_path = s_{table}");
        let pool = sqlx::postgres::PgPoolOptions::new()
            .max_connections(2)
            .after_connect(move |session, _| {
                let set = sqlx::raw_sql(sqlx::AssertSqlSafe(set.clone()));
                Box::pin(async move { session.execute(set).await.map(drop) })
            })
            .connect_lazy(world.url())
            .unwrap();
        let store = world.builder().pool(pool).unwrap();
        store.claim(&id("a"), ME, long()).await.unwrap();
        for _ in 0..3 {
            assert!(store.renew(&id("a"), ME, long()).await.unwrap());
            assert!(!store.renew(&id("b"), ME, long()).await.unwrap());
        }
        world
            .run("ALTER TABLE s_{t}.{t} SET SCHEMA public; DROP SCHEMA s_{t}")
            .await;
        world.drop().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn no_isolation_level_lets_two_win() {
        let Some(world) = Postgres::open("claim_levels").await else {
            return;
        };
        for level in ["repeatable read", "serializable"] {
            let options = world.url().parse::<sqlx::postgres::PgConnectOptions>();
            let options = options
                .unwrap()
                .options([("default_transaction_isolation", level)]);
            let pool = sqlx::postgres::PgPoolOptions::new()
                .max_connections(8)
                .connect_lazy_with(options);
            let builder = world.builder().response_timeout(PATIENCE);
            let store = builder.pool(pool).unwrap();
            store.seen(&id("nobody")).await.unwrap();
            let winner = race(std::slice::from_ref(&store), level).await;
            world.expire(level).await;
            assert_ne!(race(std::slice::from_ref(&store), level).await, winner);
        }
        world.drop().await;
    }
}

mod in_mysql {
    use super::{world::MySql, *};

    #[tokio::test]
    async fn each_step_writes_what_it_says() {
        steps(MySql::open("claim_steps").await).await;
    }

    #[tokio::test]
    async fn done_is_done_whoever_says_so() {
        done(MySql::open("claim_done").await).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_many_one_wins() {
        races(MySql::open("claim_races").await).await;
    }

    #[tokio::test]
    async fn what_is_locked_is_busy() {
        let world = MySql::open("claim_locked").await;
        let bounded = match &world {
            Some(world) => world.is_mariadb().await,
            None => false,
        };
        locked(world, bounded).await;
    }

    #[tokio::test]
    async fn an_end_is_computed_after_a_wait() {
        waited(MySql::open("claim_waited").await).await;
    }

    #[tokio::test]
    async fn what_is_not_committed_is_not_believed() {
        uncommitted(MySql::open("claim_uncommitted").await).await;
    }

    #[tokio::test]
    async fn a_claim_without_an_end_is_busy() {
        endless(MySql::open("claim_endless").await).await;
    }

    #[tokio::test]
    async fn renewals_need_no_connection_of_the_pool() {
        exhausted(MySql::open("claim_exhausted").await).await;
    }

    #[tokio::test]
    async fn a_lost_connection_of_the_renewals_heals() {
        lost(MySql::open("claim_lost").await).await;
    }

    #[tokio::test]
    async fn calls_may_be_dropped() {
        dropped(MySql::open("claim_dropped").await).await;
    }

    #[tokio::test]
    async fn any_order_of_steps_is_answered_by_the_contract() {
        chance(MySql::open("claim_chance").await).await;
    }

    #[tokio::test]
    async fn a_lease_is_stored_in_microseconds() {
        lengths(MySql::open("claim_lengths").await).await;
    }

    #[tokio::test]
    async fn a_message_costs_so_many_statements() {
        costs(MySql::open("claim_costs").await, 4, 2).await;
    }
    #[tokio::test(flavor = "multi_thread")]
    async fn a_users_sessions_are_left_as_they_are_whatever_they_have_set() {
        let Some(world) = MySql::open("claim_users").await else {
            return;
        };
        let mut modes = vec!["", "ANSI_QUOTES,NO_BACKSLASH_ESCAPES"];
        if world.is_mariadb().await {
            modes.push("SIMULTANEOUS_ASSIGNMENT");
        }
        for mode in modes {
            for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
                let set = format!(
                    "SET SESSION sql_mode = '{mode}', innodb_lock_wait_timeout = 7, lock_wait_timeout = 8; \
                     SET SESSION TRANSACTION ISOLATION LEVEL {level}; SET time_zone = '+05:00'"
                );
                let pool = sqlx::mysql::MySqlPoolOptions::new()
                    .max_connections(1)
                    .after_connect(move |session, _| {
                        let set = sqlx::raw_sql(sqlx::AssertSqlSafe(set.clone()));
                        Box::pin(async move { session.execute(set).await.map(drop) })
                    })
                    .connect_lazy(world.url())
                    .unwrap();
                let store = world.builder().pool(pool.clone()).unwrap();
                let a = id("a");
                assert_eq!(store.claim(&a, ME, long()).await.unwrap(), Claim::Won);
                busy(store.claim(&a, OTHER, long()).await.unwrap());
                assert!(store.renew(&a, ME, long()).await.unwrap());
                assert!(store.complete(&a, ME).await.unwrap());
                assert!(store.complete(&a, ME).await.unwrap());
                assert_eq!(store.claim(&a, ME, long()).await.unwrap(), Claim::Done);
                world.expire("a").await;
                let step = Step::begin(&world).await;
                let log = statements::log();
                assert_eq!(store.claim(&a, OTHER, long()).await.unwrap(), Claim::Won);
                // To be written and read back, once.
                assert_eq!(log.statements(world.table()), 2, "{mode}");
                step.wrote(&world, "a", "claimed", hex(OTHER), LONG).await;
                assert!(store.release(&a, OTHER).await.unwrap());
                let found = "SELECT @@innodb_lock_wait_timeout, @@lock_wait_timeout, CAST(@@sql_mode AS CHAR)";
                let row = pool.fetch_one(sqlx::raw_sql(found)).await.unwrap();
                assert_eq!((row.get::<u64, _>(0), row.get::<u64, _>(1)), (7, 8));
                // The driver adds modes of its own.
                assert!(
                    row.get::<String, _>(2)
                        .contains(mode.split(',').next().unwrap())
                );
                pool.close().await;
            }
        }
        world.drop().await;
    }
}

mod in_sqlite {
    use super::{world::Sqlite, *};

    #[tokio::test]
    async fn each_step_writes_what_it_says() {
        steps(Sqlite::open("claim_steps").await).await;
    }

    #[tokio::test]
    async fn done_is_done_whoever_says_so() {
        done(Sqlite::open("claim_done").await).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_many_one_wins() {
        races(Sqlite::open("claim_races").await).await;
    }

    #[tokio::test]
    async fn what_is_locked_is_busy() {
        locked(Sqlite::open("claim_locked").await, false).await;
    }

    #[tokio::test]
    async fn an_end_is_computed_after_a_wait() {
        waited(Sqlite::open("claim_waited").await).await;
    }

    #[tokio::test]
    async fn what_is_not_committed_is_not_believed() {
        uncommitted(Sqlite::open("claim_uncommitted").await).await;
    }

    #[tokio::test]
    async fn a_claim_without_an_end_is_busy() {
        endless(Sqlite::open("claim_endless").await).await;
    }

    #[tokio::test]
    async fn renewals_need_no_connection_of_the_pool() {
        exhausted(Sqlite::open("claim_exhausted").await).await;
    }

    #[tokio::test]
    async fn calls_may_be_dropped() {
        dropped(Sqlite::open("claim_dropped").await).await;
    }

    #[tokio::test]
    async fn any_order_of_steps_is_answered_by_the_contract() {
        chance(Sqlite::open("claim_chance").await).await;
    }

    #[tokio::test]
    async fn a_lease_is_stored_in_microseconds() {
        lengths(Sqlite::open("claim_lengths").await).await;
    }

    #[tokio::test]
    async fn a_message_costs_so_many_statements() {
        costs(Sqlite::open("claim_costs").await, 2, 1).await;
    }

    #[tokio::test]
    async fn a_table_that_only_the_pool_finds_is_renewed_over_the_pool() {
        let Some(world) = Sqlite::open("claim_attached").await else {
            return;
        };
        let file = world.url().trim_start_matches("sqlite://").to_owned();
        let pool = sqlx::sqlite::SqlitePoolOptions::new()
            .max_connections(1)
            .after_connect(move |session, _| {
                let attach = format!("ATTACH '{file}' AS side");
                let attach = sqlx::raw_sql(sqlx::AssertSqlSafe(attach));
                Box::pin(async move { session.execute(attach).await.map(drop) })
            })
            .connect(&world.url().replace("seen.db", "main.db?mode=rwc"))
            .await
            .unwrap();
        let table = format!("side.{}", world.table());
        let builder = tower_idempotency::SqliteStore::builder(&table);
        let store = builder.pool(pool).unwrap();
        store.claim(&id("a"), ME, long()).await.unwrap();
        for _ in 0..3 {
            assert!(store.renew(&id("a"), ME, long()).await.unwrap());
            assert!(!store.renew(&id("b"), ME, long()).await.unwrap());
        }
        drop(store);
        world.drop().await;
    }
}
