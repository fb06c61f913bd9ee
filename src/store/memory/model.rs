//! The store's own code under loom: two or three threads in every order that its lock allows.
//!
//! `RUSTFLAGS='--cfg idempotency_model' cargo test --no-default-features --lib store::memory::model`
//!
//! The clock is an atomic of loom's, so it may be read late, as a coarse clock is. A thread counts
//! its lease as the layer does: from a time that it read before it sent the command.

use super::*;
use loom::{
    sync::{Arc, atomic::AtomicU64},
    thread,
};
use std::{
    collections::BTreeSet,
    sync::{Mutex as Outside, PoisonError},
};

/// Milliseconds.
const LEASE: u64 = 10;

/// What the threads of one run share.
#[derive(Clone)]
struct World {
    store: MemoryStore,
    clock: Arc<AtomicU64>,
}

impl World {
    fn new() -> Self {
        let clock = Arc::new(AtomicU64::new(0));
        let read = clock.clone();
        let store = MemoryStore::builder()
            .ttl(Duration::MAX)
            .capacity(8)
            .clock(move || Duration::from_millis(read.load(Ordering::SeqCst)))
            .build()
            .expect("settings");
        World { store, clock }
    }

    fn time(&self) -> u64 {
        self.clock.load(Ordering::SeqCst)
    }

    fn set(&self, time: u64) {
        self.clock.store(time, Ordering::SeqCst);
    }

    fn claim(&self, owner: u128) -> Claim {
        self.store
            .record
            .claim(&id(), Owner::from_bits(owner), lease())
    }

    fn won(&self, owner: u128) -> bool {
        self.claim(owner) == Claim::Won
    }

    fn renew(&self, owner: u128) -> bool {
        self.store
            .record
            .renew(&id(), Owner::from_bits(owner), lease())
    }

    fn release(&self, owner: u128) -> bool {
        self.store.record.release(&id(), Owner::from_bits(owner))
    }

    /// Answers whether `owner` held it.
    fn complete(&self, owner: u128) -> bool {
        self.store.record.remember(&id()) == Some(Owner::from_bits(owner))
    }

    fn forget(&self) {
        self.store.record.forget(&id());
    }

    fn seen(&self) -> bool {
        self.store.record.seen(&id())
    }

    /// Who holds it now, of those that these tests know.
    fn holder(&self) -> Option<u128> {
        (1..=3).find(|&owner| self.renew(owner))
    }

    fn spawn<T: 'static>(&self, work: impl FnOnce(World) -> T + 'static) -> thread::JoinHandle<T> {
        let world = self.clone();
        thread::spawn(move || work(world))
    }
}

fn id() -> MessageId {
    MessageId::from("a")
}

fn lease() -> Lease {
    Lease::new(Duration::from_millis(LEASE)).expect("a lease")
}

fn join<T>(thread: thread::JoinHandle<T>) -> T {
    thread.join().expect("a thread that does not panic")
}

/// Runs this in every order. Answers every outcome there was.
fn explore<T: Ord + Send + 'static>(run: impl Fn() -> T + Send + Sync + 'static) -> BTreeSet<T> {
    let outcomes = std::sync::Arc::new(Outside::new((BTreeSet::new(), 0_u64)));
    let seen = outcomes.clone();
    loom::model(move || {
        let outcome = run();
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.0.insert(outcome);
        seen.1 += 1;
    });
    let mut outcomes = outcomes.lock().unwrap_or_else(PoisonError::into_inner);
    let name = std::thread::current();
    println!("{}: {} orders", name.name().unwrap_or("?"), outcomes.1);
    mem::take(&mut outcomes.0)
}

/// A runner: from when, and until when he holds it by his own count.
type Run = Option<(u64, u64)>;

/// Claims, and counts from before that.
fn run(world: &World, owner: u128) -> Run {
    let sent = world.time();
    // The claim was won at this time or before.
    world.won(owner).then(|| (world.time(), sent + LEASE))
}

#[test]
fn of_two_who_claim_one_wins() {
    let outcomes = explore(|| {
        let world = World::new();
        let other = world.spawn(|world| world.won(2));
        let won = (world.won(1), join(other));
        assert_eq!(world.holder(), Some(if won.0 { 1 } else { 2 }));
        won
    });
    assert_eq!(outcomes, BTreeSet::from([(false, true), (true, false)]));
}

#[test]
fn of_three_who_claim_one_wins() {
    let outcomes = explore(|| {
        let world = World::new();
        let others = [2, 3].map(|owner| world.spawn(move |world| world.won(owner)));
        let first = world.won(1);
        let [second, third] = others.map(join);
        [first, second, third]
    });
    let one = |won: &[bool; 3]| won.iter().filter(|&&won| won).count() == 1;
    assert!(outcomes.iter().all(one), "{outcomes:?}");
    assert_eq!(outcomes.len(), 3);
}

#[test]
fn of_two_who_take_an_ended_claim_over_one_wins() {
    let outcomes = explore(|| {
        let world = World::new();
        assert!(world.won(3));
        world.set(LEASE);
        let other = world.spawn(|world| world.won(2));
        let won = (world.won(1), join(other));
        assert_eq!(world.holder(), Some(if won.0 { 1 } else { 2 }));
        won
    });
    assert_eq!(outcomes, BTreeSet::from([(false, true), (true, false)]));
}

#[test]
fn a_claim_that_ends_meanwhile_is_taken_over_by_one_at_a_time() {
    let outcomes = explore(|| {
        let world = World::new();
        let first = run(&world, 3);
        let time = world.spawn(|world| {
            world.set(LEASE);
            world.set(2 * LEASE);
        });
        let other = world.spawn(|world| run(&world, 2));
        let mut runs = [first, run(&world, 1), join(other)];
        join(time);
        runs.sort();
        let runs: Vec<_> = runs.into_iter().flatten().collect();
        for two in runs.windows(2) {
            assert!(two[0].1 <= two[1].0, "two runners: {runs:?}");
        }
        runs.len()
    });
    // Nobody, one of the two, and one after the other.
    assert_eq!(outcomes, BTreeSet::from([1, 2, 3]));
}

#[test]
fn a_release_frees_and_loses_nobody_elses_claim() {
    let outcomes = explore(|| {
        let world = World::new();
        assert!(world.won(1));
        let other = world.spawn(|world| world.won(2));
        let released = (world.release(1), world.release(1));
        let won = join(other);
        assert_eq!(released, (true, false));
        assert_eq!(world.holder(), won.then_some(2));
        won
    });
    assert_eq!(outcomes, BTreeSet::from([false, true]));
}

#[test]
fn a_late_release_leaves_the_claim_of_whoever_took_over() {
    let outcomes = explore(|| {
        let world = World::new();
        assert!(world.won(1));
        world.set(LEASE);
        let other = world.spawn(|world| world.won(2));
        let released = world.release(1);
        assert!(join(other));
        assert_eq!(world.holder(), Some(2));
        released
    });
    assert_eq!(outcomes, BTreeSet::from([false]));
}

#[test]
fn a_completion_leaves_no_moment_in_which_the_message_is_free() {
    let outcomes = explore(|| {
        let world = World::new();
        assert!(world.won(1));
        let other =
            world.spawn(|world| [world.claim(2), world.claim(2)].map(|it| it == Claim::Done));
        assert!(world.complete(1));
        let done = join(other);
        assert!(world.seen());
        assert_eq!(world.claim(3), Claim::Done);
        assert_eq!(world.holder(), None);
        done
    });
    // Busy, then done; never won, and never done and then busy.
    let expected = [[false, false], [false, true], [true, true]];
    assert_eq!(outcomes, BTreeSet::from(expected));
}

#[test]
fn a_completion_by_one_who_lost_his_claim_ends_the_others() {
    let outcomes = explore(|| {
        let world = World::new();
        assert!(world.won(1));
        world.set(LEASE);
        let other = world.spawn(|world| (world.claim(2), world.renew(2)));
        assert!(!world.complete(1), "it was over");
        let (claim, renewed) = join(other);
        assert!(!renewed || claim == Claim::Won);
        assert!(world.seen());
        assert_eq!(world.holder(), None);
        assert_eq!(world.claim(3), Claim::Done);
        (claim == Claim::Won, renewed)
    });
    let expected = [(false, false), (true, false), (true, true)];
    assert_eq!(outcomes, BTreeSet::from(expected));
}

#[test]
fn of_a_renewal_and_a_takeover_one_comes_first() {
    let outcomes = explore(|| {
        let world = World::new();
        let first = world.time() + LEASE;
        assert!(world.won(1));
        let time = world.spawn(|world| {
            world.set(LEASE - 1);
            world.set(LEASE);
        });
        let other = world.spawn(|world| run(&world, 2));
        let sent = world.time();
        let renewed = world.renew(1);
        let until = if renewed { sent + LEASE } else { first };
        let taken = join(other);
        join(time);
        if let Some((from, _)) = taken {
            assert!(until <= from, "two runners: until {until}, from {from}");
        }
        let holder = world.holder();
        match taken {
            Some(_) => assert_eq!(holder, Some(2)),
            None => assert_ne!(holder, Some(2)),
        }
        (renewed, taken.is_some())
    });
    // Both: a renewal at the start ends when the claim would have ended. Neither: the takeover came
    // too soon, the renewal too late.
    let all = [(false, false), (false, true), (true, false), (true, true)];
    assert_eq!(outcomes, BTreeSet::from(all));
}

#[test]
fn done_stays_done_whatever_is_released() {
    let outcomes = explore(|| {
        let world = World::new();
        assert!(world.won(1));
        let other = world.spawn(|world| (world.claim(2) == Claim::Done, world.release(1)));
        let held = world.complete(1);
        let (done, released) = join(other);
        assert!(world.seen());
        assert_eq!(world.claim(2), Claim::Done);
        (held, done, released)
    });
    // Whoever came first had held it; what is done is held by nobody.
    let expected = [
        (false, false, true),
        (true, false, false),
        (true, true, false),
    ];
    assert_eq!(outcomes, BTreeSet::from(expected));
}

#[test]
fn done_stays_done_whatever_is_renewed() {
    let outcomes = explore(|| {
        let world = World::new();
        assert!(world.won(1));
        let other = world.spawn(|world| {
            let renewed = world.renew(1);
            (renewed, world.claim(1) == Claim::Done, world.renew(1))
        });
        assert!(world.complete(1));
        let other = join(other);
        assert!(world.seen());
        assert_eq!(world.holder(), None);
        other
    });
    let expected = [
        (false, true, false),
        (true, true, false),
        (true, false, false),
        (true, false, true),
    ];
    assert_eq!(outcomes, BTreeSet::from(expected));
}

#[test]
fn what_is_forgotten_is_free_and_won_by_one() {
    let outcomes = explore(|| {
        let world = World::new();
        assert!(world.complete(3) || world.seen());
        let forget = world.spawn(|world| world.forget());
        let other = world.spawn(|world| world.claim(2));
        let claims = [world.claim(1), join(other)];
        join(forget);
        claims.map(|claim| match claim {
            Claim::Won => 'w',
            Claim::Done => 'd',
            Claim::Busy { .. } => 'b',
        })
    });
    let expected = [['d', 'd'], ['d', 'w'], ['w', 'd'], ['w', 'b'], ['b', 'w']];
    assert_eq!(outcomes, BTreeSet::from(expected));
}

#[test]
fn a_claim_is_forgotten_whole() {
    let outcomes = explore(|| {
        let world = World::new();
        assert!(world.won(1));
        let forget = world.spawn(|world| world.forget());
        let other = world.spawn(|world| world.won(2));
        let renewed = world.renew(1);
        let won = join(other);
        join(forget);
        assert!(!world.seen());
        assert_eq!(world.holder(), won.then_some(2));
        (renewed, won)
    });
    let all = [(false, false), (false, true), (true, false), (true, true)];
    assert_eq!(outcomes, BTreeSet::from(all));
}
