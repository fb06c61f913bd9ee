//! Claims in the tables of PostgreSQL, MySQL and SQLite: what each step writes, who wins, and what is
//! answered when others are in the way.

#[path = "support/services.rs"]
mod services;
#[path = "sql_claim/world.rs"]
mod world;

use std::time::Duration;
use tower_idempotency::{
    MessageId, Store,
    store::{Claim, ClaimStore, Lease, Owner},
};
use world::{Stored, World};

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

async fn steps<W: World>(name: &str) {
    let Some(world) = W::open(name).await else {
        return;
    };
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
        assert!(left > long().length() - services::PATIENCE, "{left:?}");
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

async fn done<W: World>(name: &str) {
    let Some(world) = W::open(name).await else {
        return;
    };
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
async fn race<S: ClaimStore<Error = E>, E: std::fmt::Debug + Send + 'static>(
    stores: &[S],
    key: &str,
) -> Owner {
    let racers = 64;
    let start = std::sync::Arc::new(tokio::sync::Barrier::new(racers));
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

async fn races<W: World>(name: &str)
where
    W::Store: ClaimStore<Error = tower_idempotency::error::BackendError>,
{
    let Some(world) = W::open(name).await else {
        return;
    };
    // A wait for a connection is none for a lock.
    let patient = || world.builder().response_timeout(services::PATIENCE);
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

// ===== the databases =====

mod in_postgres {
    use super::{world::Postgres, *};

    #[tokio::test]
    async fn each_step_writes_what_it_says() {
        steps::<Postgres>("claim_steps").await;
    }

    #[tokio::test]
    async fn done_is_done_whoever_says_so() {
        done::<Postgres>("claim_done").await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_many_one_wins() {
        races::<Postgres>("claim_races").await;
    }
}

mod in_mysql {
    use super::{world::MySql, *};

    #[tokio::test]
    async fn each_step_writes_what_it_says() {
        steps::<MySql>("claim_steps").await;
    }

    #[tokio::test]
    async fn done_is_done_whoever_says_so() {
        done::<MySql>("claim_done").await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_many_one_wins() {
        races::<MySql>("claim_races").await;
    }
}

mod in_sqlite {
    use super::{world::Sqlite, *};

    #[tokio::test]
    async fn each_step_writes_what_it_says() {
        steps::<Sqlite>("claim_steps").await;
    }

    #[tokio::test]
    async fn done_is_done_whoever_says_so() {
        done::<Sqlite>("claim_done").await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_many_one_wins() {
        races::<Sqlite>("claim_races").await;
    }
}
