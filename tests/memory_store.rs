//! The record in memory: lives, evictions, threads.

mod support;

use proptest::prelude::*;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use support::now;
use tower_idempotency::{MemoryStore, MessageId, Store, event::Event};

/// A time that the test moves.
#[derive(Clone, Default)]
struct Clock(Arc<AtomicU64>);

impl Clock {
    fn set(&self, time: Duration) {
        self.0
            .store(u64::try_from(time.as_nanos()).unwrap(), Ordering::SeqCst);
    }

    fn read(&self) -> impl Fn() -> Duration + Send + Sync + 'static {
        let clock = self.0.clone();
        move || Duration::from_nanos(clock.load(Ordering::SeqCst))
    }
}

fn store(ttl: Duration) -> (MemoryStore, Clock) {
    let clock = Clock::default();
    let store = MemoryStore::builder()
        .ttl(ttl)
        .clock(clock.read())
        .build()
        .unwrap();
    (store, clock)
}

fn seen(store: &MemoryStore, id: &str) -> bool {
    now(store.seen(&id.into())).unwrap()
}

fn remember(store: &MemoryStore, id: &str) {
    now(store.remember(&id.into())).unwrap();
}

fn forget(store: &MemoryStore, id: &str) {
    now(store.forget(&id.into())).unwrap();
}

const SECOND: Duration = Duration::from_secs(1);

/// Ids of both kinds: the record keeps canonical UUIDs apart from all others.
fn id(number: usize) -> String {
    if number % 2 == 0 {
        format!("{number:08x}-0000-4000-8000-000000000000")
    } else {
        format!("order-{number}")
    }
}

// ===== settings =====

#[test]
fn zero_is_refused_by_name() {
    let error = MemoryStore::builder()
        .ttl(Duration::ZERO)
        .build()
        .unwrap_err();
    assert_eq!(error.to_string(), "`ttl` is 0; expected a time above zero");
    let error = MemoryStore::builder().capacity(0).build().unwrap_err();
    assert_eq!(
        error.to_string(),
        "`capacity` is 0; expected at least one id"
    );
}

#[test]
fn below_a_millisecond_is_a_millisecond() {
    for nanos in [1, 999, 1000, 999_999, 1_000_000] {
        let (store, clock) = store(Duration::from_nanos(nanos));
        remember(&store, "a");
        clock.set(Duration::from_nanos(999_999));
        assert!(seen(&store, "a"), "{nanos} ns became less");
        clock.set(Duration::from_nanos(1_250_000));
        assert!(!seen(&store, "a"), "{nanos} ns became more");
    }
}

#[test]
fn huge_ttls_never_end_and_never_panic() {
    for ttl in [
        Duration::MAX,
        Duration::from_secs(u64::MAX),
        Duration::from_millis(i64::MAX as u64),
        Duration::from_millis(i64::MAX as u64 + 1),
        Duration::from_nanos(u64::MAX),
        Duration::from_nanos(u64::MAX / 4),
        Duration::from_nanos(u64::MAX / 4 - 1),
        Duration::from_secs(10_000 * 366 * 24 * 3600),
    ] {
        for start in [Duration::ZERO, 100 * 366 * 24 * 3600 * SECOND] {
            let (store, clock) = store(ttl);
            clock.set(start);
            remember(&store, "a");
            clock.set(start + 100 * 365 * 24 * 3600 * SECOND);
            assert!(seen(&store, "a"), "{ttl:?}");
            remember(&store, "b");
            assert_eq!(store.len(), 2);
        }
        let by_system_clock = MemoryStore::builder().ttl(ttl).build().unwrap();
        remember(&by_system_clock, "a");
        assert!(seen(&by_system_clock, "a"));
    }
    let (store, _) = store(SECOND);
    let endless = MemoryStore::builder()
        .clock(|| Duration::MAX)
        .build()
        .unwrap();
    for store in [store, endless] {
        remember(&store, "a");
        assert!(seen(&store, "a"));
    }
}

#[test]
fn the_defaults_hold_a_day_and_ten_million() {
    let store = MemoryStore::default();
    assert_eq!(store.capacity(), 10_000_000);
    assert_eq!(
        format!("{store:?}"),
        "MemoryStore { ttl: 86400s, capacity: 10000000, evicted: 0, .. }"
    );
}

// ===== lives =====

#[test]
fn an_id_is_gone_after_the_store_sat_idle() {
    let (store, clock) = store(4 * SECOND);
    remember(&store, "a");
    for idle in [10, 100, 100_000] {
        clock.set(idle * 4 * SECOND);
        assert!(!seen(&store, "a"));
        assert!(store.is_empty());
        remember(&store, "a");
        assert!(seen(&store, "a"));
    }
    clock.set(100_000 * 4 * SECOND + 4 * SECOND - Duration::from_nanos(1));
    assert!(seen(&store, "a"));
}

#[test]
fn remembering_again_starts_the_time_anew() {
    let (store, clock) = store(4 * SECOND);
    for second in 0..50 {
        clock.set(second * SECOND);
        remember(&store, "a");
        assert_eq!(store.len(), 1);
    }
    clock.set((49 + 4) * SECOND - Duration::from_nanos(1));
    assert!(seen(&store, "a"));
    clock.set((49 + 5) * SECOND);
    assert!(!seen(&store, "a"));
}

#[test]
fn asking_does_not_renew() {
    let (store, clock) = store(4 * SECOND);
    remember(&store, "a");
    for tick in 0..40 {
        clock.set(tick * SECOND / 10);
        assert!(seen(&store, "a"));
    }
    clock.set(5 * SECOND);
    assert!(!seen(&store, "a"));
}

#[test]
fn clear_and_forget() {
    let (store, _) = store(SECOND);
    let clone = store.clone();
    for number in 0..100 {
        remember(&store, &id(number));
    }
    assert_eq!(clone.len(), 100);
    assert!(!clone.is_empty());
    forget(&clone, &id(7));
    forget(&clone, "not there");
    assert!(!seen(&store, &id(7)));
    assert_eq!(store.len(), 99);
    clone.clear();
    assert!(store.is_empty());
    assert!(!seen(&store, &id(8)));
}

// ===== eviction =====

#[test]
fn when_full_the_oldest_quarter_goes_and_that_is_told() {
    let told = Arc::new(AtomicU64::new(0));
    let store = MemoryStore::builder()
        .capacity(100)
        .on_event({
            let told = told.clone();
            move |event| {
                if let Event::Evicted { count, .. } = event {
                    told.fetch_add(*count, Ordering::SeqCst);
                }
            }
        })
        .build()
        .unwrap();
    for number in 0..100 {
        remember(&store, &id(number));
    }
    assert_eq!((store.len(), store.evicted()), (100, 0));
    remember(&store, &id(100));
    assert_eq!((store.len(), store.evicted()), (76, 25));
    assert_eq!(told.load(Ordering::SeqCst), 25);
    for number in 0..=100 {
        assert_eq!(seen(&store, &id(number)), number >= 25, "{number}");
    }
}

#[test]
fn a_hook_that_panics_at_an_eviction_breaks_nothing() {
    let store = MemoryStore::builder()
        .capacity(1)
        .on_event(|_| panic!("as told"))
        .build()
        .unwrap();
    remember(&store, "a");
    remember(&store, "b");
    assert!(seen(&store, "b"));
    assert_eq!((store.len(), store.evicted()), (1, 1));
}

#[test]
fn a_large_record_never_holds_more_than_its_capacity() {
    let capacity = 100_000;
    let store = MemoryStore::builder().capacity(capacity).build().unwrap();
    for number in 0..3 * capacity {
        remember(&store, &id(number));
    }
    assert!(store.len() <= capacity);
    assert_eq!(store.len() as u64 + store.evicted(), 3 * capacity as u64);
    // Its shards fill by chance, but what is young is there.
    for number in 3 * capacity - capacity / 2..3 * capacity {
        assert!(seen(&store, &id(number)), "{number}");
    }
}

// ===== a model =====

#[derive(Clone, Debug)]
enum Step {
    Remember(usize),
    Seen(usize),
    Forget(usize),
    Wait(u64),
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    let id = 0..24_usize;
    prop_oneof![
        8 => id.clone().prop_map(Step::Remember),
        8 => id.clone().prop_map(Step::Seen),
        2 => id.prop_map(Step::Forget),
        4 => (0..1500_u64).prop_map(Step::Wait),
        1 => (10_000..100_000_u64).prop_map(Step::Wait),
        1 => Just(Step::Clear),
    ]
}

proptest! {
    /// Ids live between ttl and ttl * 1.25 from when they were remembered last.
    #[test]
    fn lives_have_their_bounds(steps in prop::collection::vec(step(), 1..200)) {
        let ttl = 1000;
        let (store, clock) = store(Duration::from_nanos(ttl * 1_000_000));
        let mut time = 0;
        let mut last = std::collections::HashMap::new();
        for step in steps {
            match step {
                Step::Remember(number) => {
                    remember(&store, &id(number));
                    last.insert(number, time);
                    prop_assert!(seen(&store, &id(number)));
                }
                Step::Seen(number) => {
                    let seen = seen(&store, &id(number));
                    match last.get(&number).map(|at| time - at) {
                        Some(age) if age < ttl => prop_assert!(seen, "gone at {age}"),
                        Some(age) if age < ttl + ttl / 4 => {}
                        Some(age) => prop_assert!(!seen, "there at {age}"),
                        None => prop_assert!(!seen),
                    }
                }
                Step::Forget(number) => {
                    forget(&store, &id(number));
                    last.remove(&number);
                }
                Step::Wait(millis) => {
                    time += millis;
                    clock.set(Duration::from_millis(time));
                }
                Step::Clear => {
                    store.clear();
                    last.clear();
                }
            }
            let sure = last.values().filter(|at| time - *at < ttl).count();
            let perhaps = last.values().filter(|at| time - *at < ttl + ttl / 4).count();
            prop_assert!((sure..=perhaps).contains(&store.len()));
        }
    }

    /// A full record drops what was remembered longest ago, at most a quarter at once, and counts it.
    #[test]
    fn evictions_take_the_oldest(
        capacity in 1..20_usize,
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let store = MemoryStore::builder()
            .ttl(Duration::MAX)
            .capacity(capacity)
            .build()
            .unwrap();
        // Oldest first.
        let mut model: Vec<usize> = Vec::new();
        for step in steps {
            let evicted = store.evicted();
            match step {
                Step::Remember(number) => {
                    remember(&store, &id(number));
                    model.retain(|known| *known != number);
                    model.push(number);
                }
                Step::Forget(number) => {
                    forget(&store, &id(number));
                    model.retain(|known| *known != number);
                }
                Step::Clear => {
                    store.clear();
                    model.clear();
                }
                Step::Seen(_) | Step::Wait(_) => {}
            }
            let evicted = usize::try_from(store.evicted() - evicted).unwrap();
            prop_assert!(evicted <= (capacity / 4).max(1));
            model.drain(..evicted);
            prop_assert_eq!(store.len(), model.len());
            prop_assert!(store.len() <= capacity);
            for number in 0..24 {
                prop_assert_eq!(seen(&store, &id(number)), model.contains(&number));
            }
        }
    }
}

// ===== threads =====

#[test]
fn many_threads_on_one_record() {
    let store = MemoryStore::new();
    let threads = 8;
    let own = 5000;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let store = store.clone();
            scope.spawn(move || {
                for number in 0..own {
                    let mine = id(thread * own + number);
                    assert!(!seen(&store, &mine));
                    remember(&store, &mine);
                    assert!(seen(&store, &mine));
                    // One id that all of them work on.
                    remember(&store, "shared");
                    if number % 10 == 0 {
                        forget(&store, &mine);
                        assert!(!seen(&store, &mine));
                        forget(&store, "shared");
                    }
                }
            });
        }
    });
    forget(&store, "shared");
    assert_eq!(store.len(), threads * (own - own / 10));
}

#[test]
fn an_answer_is_ready_at_once() {
    let store = MemoryStore::new();
    let id = MessageId::random();
    assert!(!store.seen(&id).into_inner().unwrap());
    store.remember(&id).into_inner().unwrap();
    assert!(store.seen(&id).into_inner().unwrap());
}
