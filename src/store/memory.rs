//! A record in this process's memory.
//!
//! # How ids expire
//!
//! Ids are kept in generations. The open one takes new ids for a quarter of the TTL, or until it
//! holds a quarter of the capacity; then it is closed and the next one opens. A closed generation
//! is dropped whole, one TTL after it closed, so an id lives between ttl and ttl × 1.25 and no
//! expiry ever looks at single ids. When the record is full the oldest generation goes.
//!
//! # Claims
//!
//! A claim is held until its lease ends, and up to 20 ms longer: the clock is that of the system's last
//! tick. Claims count for no capacity and are never evicted; those that have ended go when
//! their table is full.
//!
//! # Example
//!
//! ```
//! use std::time::Duration;
//! use tower_idempotency::MemoryStore;
//!
//! let store = MemoryStore::builder()
//!     .ttl(Duration::from_secs(3600))
//!     .capacity(1_000_000)
//!     .build()?;
//! assert!(store.is_empty());
//! # Ok::<_, tower_idempotency::ConfigError>(())
//! ```

mod claims;
#[cfg(all(test, idempotency_model))]
mod model;

use self::claims::Claims;
use super::{Claim, ClaimStore, Lease, Owner, Store};
use crate::{
    error::ConfigError,
    event::{Event, Reporter},
    id::MessageId,
};
use foldhash::quality::RandomState;
use hashbrown::{HashTable, hash_table::Entry};
#[cfg(all(test, idempotency_model))]
use loom::sync::{Mutex, MutexGuard};
#[cfg(not(all(test, idempotency_model)))]
use std::sync::{Mutex, MutexGuard};
use std::{
    collections::VecDeque,
    convert::Infallible,
    fmt,
    future::{Ready, ready},
    hash::BuildHasher,
    mem,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

const DEFAULT_TTL: Duration = Duration::from_secs(24 * 3600);
const DEFAULT_CAPACITY: usize = 10_000_000;

/// Enough that threads seldom meet; a power of two.
const MAX_SHARDS: usize = 64;
/// Coarse clocks advance once in a scheduler tick, which the kernel is built to keep below this.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
const TICK: u64 = 10_000_000;
/// Below this, the chance spread of ids over the shards would show in the capacity.
const MIN_SHARD_CAPACITY: usize = 16_384;

/// A [`Store`] in this process's memory, with a TTL and a capacity.
///
/// Clones share one record. It serves one process: it is gone with a restart, and other workers
/// do not see it. It serves one consumer: a second handler of the same messages needs a record of
/// its own, or each would skip what the other one did.
///
/// A command locks one shard of the record for the time of a few table look-ups, now and then for
/// that of a table's growth; none waits for anything else.
///
/// See the [module docs](self) for how ids expire.
#[derive(Clone)]
pub struct MemoryStore {
    record: Arc<Record>,
}

/// Sets up a [`MemoryStore`].
#[derive(Clone)]
#[must_use]
pub struct MemoryStoreBuilder {
    ttl: Duration,
    capacity: usize,
    clock: Option<Clock>,
    reporter: Reporter,
}

struct Record {
    shards: Box<[Shard]>,
    hasher: RandomState,
    clock: Clock,
    limits: Limits,
    ttl: Duration,
    capacity: usize,
    evicted: AtomicU64,
    reporter: Reporter,
}

/// Alone on its cache lines, so that neighbours do not slow each other down.
#[repr(align(128))]
struct Shard(Mutex<Entries>);

/// What one shard knows.
#[derive(Default)]
struct Entries {
    done: Generations,
    claims: Claims,
}

/// What one shard is held to. Times are nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// How long a closed generation is kept; `None`: ids never expire.
    ttl: Option<u64>,
    /// How long a generation is open.
    window: u64,
    /// How many ids one shard holds.
    ids: usize,
    /// How many ids close a generation.
    quarter: usize,
    /// How late the clock may be.
    tick: u64,
}

/// Nanoseconds since an origin of its own.
#[derive(Clone)]
enum Clock {
    System(Instant),
    /// The system's clock as of its last tick.
    #[cfg(target_os = "linux")]
    Coarse,
    Driven(Arc<dyn Fn() -> Duration + Send + Sync>),
}

/// The ids of one shard, oldest generation first.
#[derive(Default)]
struct Generations {
    closed: VecDeque<Generation>,
    open: Generation,
    /// Over all generations.
    len: usize,
}

#[derive(Default)]
struct Generation {
    /// It takes no id from this time on, and its ids end one TTL later. Brought forward when it is
    /// closed before its time.
    until: u64,
    /// How late `until` may be for its oldest id: the end of its window.
    latest: u64,
    /// Canonical UUIDs, 16 bytes each.
    uuids: HashTable<u128>,
    /// Every other id, verbatim.
    others: HashTable<Box<str>>,
}

/// How an id is looked up: its hash, computed once, and what is compared in full.
#[derive(Clone, Copy)]
struct Key<'a> {
    hash: u64,
    id: Id<'a>,
}

#[derive(Clone, Copy)]
enum Id<'a> {
    Uuid(u128),
    Other(&'a str),
}

// ===== impl MemoryStore =====

impl MemoryStore {
    /// A record of 10,000,000 ids that are kept for 24 hours.
    ///
    /// Takes memory as ids come, not at once.
    #[must_use]
    pub fn new() -> Self {
        MemoryStoreBuilder::new().open(DEFAULT_TTL)
    }

    /// Sets up a record with a TTL or capacity of one's own.
    pub fn builder() -> MemoryStoreBuilder {
        MemoryStoreBuilder::new()
    }

    /// How many ids are remembered.
    ///
    /// Visits every shard; ids past their generation's end are dropped first and not counted.
    #[must_use]
    pub fn len(&self) -> usize {
        let mut len = 0;
        for shard in &self.record.shards {
            let mut entries = shard.lock();
            let now = self.record.clock.now();
            let expired = entries.done.expire(now, &self.record.limits);
            len += entries.done.len;
            drop(entries);
            drop(expired);
        }
        len
    }

    /// Whether no id is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many ids this record holds at most.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.record.capacity
    }

    /// How many ids were dropped before their time because the record was full.
    ///
    /// Above zero, a duplicate of a dropped id runs again: the capacity is too small for the TTL.
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.record.evicted.load(Ordering::Relaxed)
    }

    /// Drops every id, done or claimed, and gives its memory back.
    pub fn clear(&self) {
        for shard in &self.record.shards {
            let old = mem::take(&mut *shard.lock());
            drop(old);
        }
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("ttl", &self.record.ttl)
            .field("capacity", &self.record.capacity)
            .field("evicted", &self.evicted())
            .finish_non_exhaustive()
    }
}

impl Store for MemoryStore {
    type Error = Infallible;
    type Future<T: Send + 'static> = Ready<Result<T, Infallible>>;

    fn seen(&self, id: &MessageId) -> Self::Future<bool> {
        ready(Ok(self.record.seen(id)))
    }

    fn remember(&self, id: &MessageId) -> Self::Future<()> {
        self.record.remember(id);
        ready(Ok(()))
    }

    fn forget(&self, id: &MessageId) -> Self::Future<()> {
        self.record.forget(id);
        ready(Ok(()))
    }
}

impl ClaimStore for MemoryStore {
    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<Claim> {
        ready(Ok(self.record.claim(id, owner, lease)))
    }

    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<bool> {
        ready(Ok(self.record.renew(id, owner, lease)))
    }

    fn complete(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
        ready(Ok(self.record.remember(id) == Some(owner)))
    }

    fn release(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
        ready(Ok(self.record.release(id, owner)))
    }
}

// ===== impl MemoryStoreBuilder =====

impl MemoryStoreBuilder {
    fn new() -> Self {
        MemoryStoreBuilder {
            ttl: DEFAULT_TTL,
            capacity: DEFAULT_CAPACITY,
            clock: None,
            reporter: Reporter::default(),
        }
    }

    /// How long an id is remembered, counted from when it was remembered last; 24 hours unless set.
    ///
    /// An id lives between `ttl` and `ttl` × 1.25. Less than a millisecond becomes one
    /// millisecond; more than the clock can count (centuries) means that ids never expire.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How many ids are held at most; 10,000,000 unless set.
    ///
    /// When the record is full the oldest ids go first, at most a quarter of it at once; that is
    /// counted by [`MemoryStore::evicted`] and reported as [`Event::Evicted`]. A large record is
    /// kept in up to 64 parts that fill by chance, so its first ids may go when it is a few
    /// percent short of full. Ids are counted, not their bytes: an id that is no UUID is kept
    /// verbatim, however long it is.
    pub fn capacity(mut self, ids: usize) -> Self {
        self.capacity = ids;
        self
    }

    /// Takes the time from `clock` in place of the system's monotonic clock, as tests do.
    ///
    /// It answers the time since any fixed origin, and must not run backwards. It is asked under a
    /// lock of the record, so it must neither block nor use the store.
    pub fn clock(mut self, clock: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        self.clock = Some(Clock::Driven(Arc::new(clock)));
        self
    }

    /// Is told of ids that were dropped because the record was full.
    ///
    /// Runs on the caller's thread, outside the record's locks. A panic in it is caught.
    pub fn on_event(mut self, hook: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        self.reporter = Reporter::new(hook);
        self
    }

    /// Makes the record.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for a TTL or a capacity of zero.
    pub fn build(self) -> Result<MemoryStore, ConfigError> {
        if self.capacity == 0 {
            return Err(ConfigError::new("capacity", "0", "at least one id"));
        }
        if self.ttl.is_zero() {
            return Err(ConfigError::new("ttl", "0", "a time above zero"));
        }
        let ttl = self.ttl.max(Duration::from_millis(1));
        Ok(self.open(ttl))
    }

    fn open(self, ttl: Duration) -> MemoryStore {
        let shards = 1
            << (self.capacity / MIN_SHARD_CAPACITY)
                .clamp(1, MAX_SHARDS)
                .ilog2();
        let clock = self.clock.unwrap_or_else(|| Clock::system(ttl));
        MemoryStore {
            record: Arc::new(Record {
                shards: (0..shards).map(|_| Shard::default()).collect(),
                hasher: RandomState::default(),
                limits: Limits::new(ttl, self.capacity / shards, clock.tick()),
                clock,
                ttl,
                capacity: self.capacity,
                evicted: AtomicU64::new(0),
                reporter: self.reporter,
            }),
        }
    }
}

impl fmt::Debug for MemoryStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStoreBuilder")
            .field("ttl", &self.ttl)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

// ===== impl Record =====

impl Record {
    fn seen(&self, id: &MessageId) -> bool {
        let key = self.key(id);
        let mut entries = self.shard(key.hash).lock();
        // The clock is read only for an id that is there: what was never remembered, or was
        // dropped, is unknown at any time.
        let Some(until) = entries.done.find(key).map(|found| found.until) else {
            return false;
        };
        let now = self.clock.now();
        let expired = entries.done.expire(now, &self.limits);
        drop(entries);
        drop(expired);
        self.limits.ttl.is_none_or(|ttl| now < until + ttl)
    }

    /// Answers who held it, if somebody did.
    fn remember(&self, id: &MessageId) -> Option<Owner> {
        let key = self.key(id);
        let mut entries = self.shard(key.hash).lock();
        // Read under the lock: a time that waited for it could put the id where it ends too soon.
        let now = self.clock.now();
        let expired = entries.done.expire(now, &self.limits);
        let evicted = entries.done.remember(key, now, &self.limits, &self.hasher);
        let held = entries.claims.end(key.hash, id);
        drop(entries);
        // Their memory is given back outside the lock.
        drop(expired);
        if let Some(evicted) = evicted {
            let count = evicted.len() as u64;
            drop(evicted);
            self.evicted.fetch_add(count, Ordering::Relaxed);
            self.reporter.report(&Event::Evicted { count });
        }
        held.filter(|&(_, until)| now < until)
            .map(|(owner, _)| owner)
    }

    fn forget(&self, id: &MessageId) {
        let key = self.key(id);
        let mut entries = self.shard(key.hash).lock();
        entries.done.forget(key, &self.hasher);
        entries.claims.end(key.hash, id);
    }

    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> Claim {
        let key = self.key(id);
        let mut entries = self.shard(key.hash).lock();
        let now = self.clock.now();
        let done = entries.done.find(key).map(|found| found.until);
        if done.is_some_and(|until| self.limits.ttl.is_none_or(|ttl| now < until + ttl)) {
            return Claim::Done;
        }
        let end = self.end(now, lease);
        let hasher = |id: &MessageId| self.key(id).hash;
        let busy = entries.claims.claim(key.hash, id, owner, now, end, hasher);
        match busy {
            None => Claim::Won,
            Some(until) => Claim::Busy {
                retry_after: Duration::from_nanos(until - now),
            },
        }
    }

    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> bool {
        let hash = self.key(id).hash;
        let mut entries = self.shard(hash).lock();
        let now = self.clock.now();
        let end = self.end(now, lease);
        entries.claims.renew(hash, id, owner, now, end)
    }

    fn release(&self, id: &MessageId, owner: Owner) -> bool {
        let hash = self.key(id).hash;
        let mut entries = self.shard(hash).lock();
        let now = self.clock.now();
        entries.claims.release(hash, id, owner, now)
    }

    /// When a lease that begins now is over, also by a clock that is late now.
    fn end(&self, now: u64, lease: Lease) -> u64 {
        now + nanos(lease.length()) + self.limits.tick
    }

    fn key<'a>(&self, id: &'a MessageId) -> Key<'a> {
        let id = match id.as_uuid() {
            Some(uuid) => Id::Uuid(uuid),
            None => Id::Other(id.as_str()),
        };
        let hash = match id {
            Id::Uuid(uuid) => self.hasher.hash_one(uuid),
            Id::Other(text) => self.hasher.hash_one(text),
        };
        Key { hash, id }
    }

    fn shard(&self, hash: u64) -> &Shard {
        // The table takes its bucket from the low bits and its tag from the top seven.
        &self.shards[(hash >> 50) as usize & (self.shards.len() - 1)]
    }
}

// ===== impl Shard =====

impl Shard {
    /// A panic under the lock would leave the tables whole, so a poisoned lock is no reason to
    /// stop deduplicating.
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Shard {
    fn default() -> Self {
        Shard(Mutex::new(Entries::default()))
    }
}

// ===== impl Clock =====

impl Clock {
    fn system(ttl: Duration) -> Self {
        #[cfg(target_os = "linux")]
        if ttl >= Duration::from_secs(1) {
            return Clock::Coarse;
        }
        let _ = ttl;
        Clock::System(Instant::now())
    }

    /// By how much it may be late, nanoseconds.
    fn tick(&self) -> u64 {
        match self {
            #[cfg(target_os = "linux")]
            Clock::Coarse => TICK,
            _ => 0,
        }
    }

    fn now(&self) -> u64 {
        let since = match self {
            Clock::System(origin) => origin.elapsed(),
            #[cfg(target_os = "linux")]
            Clock::Coarse => {
                use rustix::time::{ClockId, clock_gettime};

                let now = clock_gettime(ClockId::MonotonicCoarse);
                return now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
            }
            Clock::Driven(clock) => clock(),
        };
        nanos(since).min(u64::MAX / 2)
    }
}

fn nanos(time: Duration) -> u64 {
    time.as_secs()
        .saturating_mul(1_000_000_000)
        .saturating_add(u64::from(time.subsec_nanos()))
}

// ===== impl Limits =====

impl Limits {
    /// A clock that is late by up to a tick makes a life end up to a tick too soon, or too late.
    /// So a closed generation is kept for a tick longer, and the open one closed two ticks sooner.
    fn new(ttl: Duration, ids: usize, tick: u64) -> Self {
        // A quarter of the range leaves room for every sum of a time and a TTL.
        let ttl = Some(nanos(ttl)).filter(|&ttl| ttl < u64::MAX / 4);
        Limits {
            ttl: ttl.map(|ttl| ttl + tick),
            window: ttl.map_or(0, |ttl| ttl / 4 - 2 * tick),
            ids,
            quarter: (ids / 4).max(1),
            tick,
        }
    }
}

// ===== impl Generations =====

impl Generations {
    fn find(&self, key: Key<'_>) -> Option<&Generation> {
        if self.open.contains(key) {
            return Some(&self.open);
        }
        self.closed.iter().rev().find(|old| old.contains(key))
    }

    /// Closes the open generation when its time is over and takes out those past their end.
    fn expire(&mut self, now: u64, limits: &Limits) -> Vec<Generation> {
        let mut expired = Vec::new();
        let Some(ttl) = limits.ttl else {
            return expired;
        };
        if !self.open.is_empty() && now >= self.open.until {
            self.closed.push_back(mem::take(&mut self.open));
        }
        while self
            .closed
            .front()
            .is_some_and(|old| now >= old.until + ttl)
        {
            if let Some(old) = self.closed.pop_front() {
                self.len -= old.len();
                expired.push(old);
            }
        }
        expired
    }

    /// Closes the open generation before its time, and joins neighbours that make one together.
    ///
    /// Ids that are remembered again or forgotten leave generations behind that hold next to
    /// nothing. Joined, no two neighbours fit into one quarter and one window any more, so there are
    /// never more than some twenty, whatever their ids do.
    fn close(&mut self, now: u64, limits: &Limits, hasher: &RandomState) {
        self.open.until = now;
        self.closed.push_back(mem::take(&mut self.open));
        let mut joined: VecDeque<Generation> = VecDeque::new();
        for younger in self.closed.drain(..) {
            match joined.back_mut() {
                Some(older) if older.fits(&younger, limits) => older.join(younger, hasher),
                _ => joined.push_back(younger),
            }
        }
        self.closed = joined;
    }

    /// Puts an id into the open generation; answers the generation that had to make room.
    fn remember(
        &mut self,
        key: Key<'_>,
        now: u64,
        limits: &Limits,
        hasher: &RandomState,
    ) -> Option<Generation> {
        if self.open.len() >= limits.quarter && !self.open.contains(key) {
            self.close(now, limits, hasher);
        }
        if self.open.is_empty() {
            self.open.until = now + limits.window;
            self.open.latest = self.open.until;
        }
        if !self.open.insert(key, hasher) {
            return None;
        }
        self.len += 1;
        self.forget_closed(key, hasher);
        if self.len <= limits.ids {
            return None;
        }
        let evicted = self.closed.pop_front()?;
        self.len -= evicted.len();
        Some(evicted)
    }

    fn forget(&mut self, key: Key<'_>, hasher: &RandomState) {
        if self.open.remove(key) {
            self.len -= 1;
        } else {
            self.forget_closed(key, hasher);
        }
    }

    fn forget_closed(&mut self, key: Key<'_>, hasher: &RandomState) {
        let Some(at) = self.closed.iter_mut().rposition(|old| old.remove(key)) else {
            return;
        };
        self.len -= 1;
        if self.closed[at].is_empty() {
            self.closed.remove(at);
        } else {
            self.closed[at].shrink(hasher);
        }
    }
}

// ===== impl Generation =====

impl Generation {
    fn len(&self) -> usize {
        self.uuids.len() + self.others.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a younger neighbour can join it, within one quarter and without an id that ends too
    /// late.
    fn fits(&self, younger: &Generation, limits: &Limits) -> bool {
        self.len() + younger.len() <= limits.quarter
            && (limits.ttl.is_none() || younger.until <= self.latest)
    }

    fn join(&mut self, younger: Generation, hasher: &RandomState) {
        self.until = younger.until;
        join(&mut self.uuids, younger.uuids, |id| hasher.hash_one(id));
        join(&mut self.others, younger.others, |id| hasher.hash_one(id));
    }

    /// Gives memory back once three quarters of the ids have left.
    fn shrink(&mut self, hasher: &RandomState) {
        shrink(&mut self.uuids, |id| hasher.hash_one(id));
        shrink(&mut self.others, |id| hasher.hash_one(id));
    }

    fn contains(&self, key: Key<'_>) -> bool {
        match key.id {
            Id::Uuid(uuid) => self.uuids.find(key.hash, |&known| known == uuid).is_some(),
            Id::Other(text) => self
                .others
                .find(key.hash, |known| **known == *text)
                .is_some(),
        }
    }

    /// Answers whether it is new.
    fn insert(&mut self, key: Key<'_>, hasher: &RandomState) -> bool {
        match key.id {
            Id::Uuid(uuid) => {
                match self.uuids.entry(
                    key.hash,
                    |&known| known == uuid,
                    |known| hasher.hash_one(known),
                ) {
                    Entry::Occupied(_) => return false,
                    Entry::Vacant(vacant) => vacant.insert(uuid),
                };
            }
            Id::Other(text) => {
                match self.others.entry(
                    key.hash,
                    |known| **known == *text,
                    |known| hasher.hash_one(known),
                ) {
                    Entry::Occupied(_) => return false,
                    Entry::Vacant(vacant) => vacant.insert(text.into()),
                };
            }
        }
        true
    }

    fn remove(&mut self, key: Key<'_>) -> bool {
        match key.id {
            Id::Uuid(uuid) => match self.uuids.find_entry(key.hash, |&known| known == uuid) {
                Ok(entry) => {
                    entry.remove();
                    true
                }
                Err(_) => false,
            },
            Id::Other(text) => match self.others.find_entry(key.hash, |known| **known == *text) {
                Ok(entry) => {
                    entry.remove();
                    true
                }
                Err(_) => false,
            },
        }
    }
}

// ===== tables =====

/// Moves the ids of the smaller table into the larger one. No id is in both.
fn join<T>(into: &mut HashTable<T>, mut from: HashTable<T>, hash: impl Fn(&T) -> u64) {
    if into.len() < from.len() {
        mem::swap(into, &mut from);
    }
    for id in from {
        into.insert_unique(hash(&id), id, &hash);
    }
}

fn shrink<T>(table: &mut HashTable<T>, hash: impl Fn(&T) -> u64) {
    if table.len() < table.capacity() / 4 {
        table.shrink_to(table.len() * 2, hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock that is late by anything up to a tick ends no life before the TTL and none after
    /// 1.25 of it.
    #[test]
    fn a_late_clock_moves_no_bound() {
        let hasher = RandomState::default();
        let key = |uuid: u128| Key {
            hash: hasher.hash_one(uuid),
            id: Id::Uuid(uuid),
        };
        let lateness = [0, TICK / 2, TICK - 1];
        for ttl in [1_000_000_000, 1_000_000_001, 86_400_000_000_000] {
            let limits = Limits::new(Duration::from_nanos(ttl), 100, TICK);
            let window = limits.window;
            for after in [
                0,
                1,
                window / 2,
                window - 1,
                window,
                window + TICK,
                ttl / 4,
                ttl,
            ] {
                for (late, later, latest) in lateness.iter().flat_map(|&late| {
                    lateness
                        .iter()
                        .flat_map(move |&later| lateness.map(|l| (late, later, l)))
                }) {
                    // The first id opens the generation that the second one may come into.
                    let mut generations = Generations::default();
                    let mut remember = |uuid, real: u64, late: u64| {
                        let now = real - late;
                        generations.expire(now, &limits);
                        generations.remember(key(uuid), now, &limits, &hasher);
                    };
                    let first = ttl;
                    let second = first + after;
                    remember(1, first, late);
                    remember(2, second, later.min(late + after));
                    let seen = |real: u64| {
                        let until = generations.find(key(2)).map(|found| found.until);
                        until.is_some_and(|until| real - latest < until + limits.ttl.unwrap_or(0))
                    };
                    assert!(
                        seen(second + ttl - 1),
                        "{ttl} {after} {late} {later} {latest}"
                    );
                    assert!(
                        !seen(second + ttl + ttl / 4),
                        "{ttl} {after} {late} {later} {latest}"
                    );
                }
            }
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_coarse_clock_is_taken_where_a_tick_does_not_matter() {
        let tick = |ttl| Clock::system(ttl).tick();
        assert_eq!(tick(Duration::from_millis(999)), 0);
        assert_eq!(tick(Duration::from_secs(1)), TICK);
        // It is the same clock, read less precisely.
        let coarse = Clock::system(DEFAULT_TTL).now();
        let precise = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let precise = Duration::new(precise.tv_sec as u64, precise.tv_nsec as u32);
        assert!((nanos(precise) - coarse) < 1_000_000_000);
    }

    /// How many closed generations a record of one shard has at the most meanwhile, and how many
    /// buckets its tables have at the end.
    fn worn(ttl: Duration, mut wear: impl FnMut(&MemoryStore, usize)) -> (usize, usize) {
        let store = MemoryStore::builder()
            .ttl(ttl)
            .capacity(400)
            .build()
            .expect("settings");
        let shard = || store.record.shards[0].lock();
        let mut most = 0;
        for round in 0..2000 {
            wear(&store, round);
            most = most.max(shard().done.closed.len());
        }
        let entries = shard();
        let all = entries.done.closed.iter().chain([&entries.done.open]);
        (
            most,
            all.map(|one| one.uuids.capacity() + one.others.capacity())
                .sum(),
        )
    }

    #[test]
    fn ids_that_move_or_go_leave_neither_generations_nor_memory() {
        let id = |number: usize| MessageId::from(number.to_string());
        for ttl in [DEFAULT_TTL, Duration::MAX] {
            // 99 ids again and again, and one new one each time.
            let (generations, buckets) = worn(ttl, |store, round| {
                for number in 0..99 {
                    store.record.remember(&id(number));
                }
                store.record.remember(&id(1000 + round));
            });
            assert!(generations <= 20, "{generations} generations");
            assert!(buckets <= 4000, "{buckets} buckets for 400 ids");

            // All but one of a hundred are forgotten when they are no longer the youngest.
            let (generations, buckets) = worn(ttl, |store, round| {
                for number in 0..100 {
                    store.record.remember(&id(100 * round + number));
                }
                if let Some(old) = round.checked_sub(2) {
                    (1..100).for_each(|number| store.record.forget(&id(100 * old + number)));
                }
            });
            assert!(generations <= 20, "{generations} generations");
            assert!(buckets <= 4000, "{buckets} buckets for 400 ids");
        }
    }

    #[test]
    fn a_table_that_lost_its_ids_shrinks() {
        let uuid =
            |number: usize| MessageId::from(format!("{number:08x}-0000-4000-8000-000000000000"));
        let other = |number: usize| MessageId::from(number.to_string());
        let ids: [&dyn Fn(usize) -> MessageId; 2] = [&uuid, &other];
        for id in ids {
            let store = MemoryStore::builder()
                .capacity(4000)
                .build()
                .expect("settings");
            // Two full generations, so that they are not joined.
            for number in 0..2001 {
                store.record.remember(&id(number));
            }
            let buckets = || {
                let generations = &store.record.shards[0].lock().done;
                let lens: Vec<_> = generations.closed.iter().map(Generation::len).collect();
                assert_eq!(lens.len(), 2);
                let oldest = &generations.closed[0];
                (lens[0], oldest.uuids.capacity() + oldest.others.capacity())
            };
            assert!(buckets().0 == 1000 && buckets().1 >= 1000);
            for number in 0..990 {
                store.record.forget(&id(number));
                let (len, buckets) = buckets();
                assert!(
                    buckets <= (8 * len).max(16),
                    "{buckets} buckets for {len} ids"
                );
            }
            (990..2001).for_each(|number| assert!(store.record.seen(&id(number))));
        }
    }

    #[test]
    fn the_clock_is_read_under_the_lock() {
        use std::sync::OnceLock;

        // A time read before the lock was waited for could be long over.
        let store = Arc::new(OnceLock::<MemoryStore>::new());
        let (in_clock, free) = (store.clone(), Arc::new(AtomicU64::new(0)));
        let count = free.clone();
        let built = MemoryStore::builder()
            .capacity(10)
            .clock(move || {
                let shard = in_clock
                    .get()
                    .map(|store| store.record.shards[0].0.try_lock().is_ok());
                count.fetch_add(u64::from(shard == Some(true)), Ordering::Relaxed);
                Duration::ZERO
            })
            .build()
            .expect("settings");
        let store = store.get_or_init(|| built);
        store.record.remember(&"a".into());
        assert!(store.record.seen(&"a".into()));
        assert_eq!(store.len(), 1);
        assert_eq!(free.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_lock_that_was_poisoned_still_serves() {
        let store = MemoryStore::builder()
            .capacity(10)
            .build()
            .expect("settings");
        let poisoner = store.clone();
        let poisoned = std::thread::spawn(move || {
            let _guard = poisoner.record.shards[0].0.lock();
            panic!("as told");
        });
        assert!(poisoned.join().is_err());
        store.record.remember(&"a".into());
        assert!(store.record.seen(&"a".into()));
        assert_eq!(store.len(), 1);
    }
}
