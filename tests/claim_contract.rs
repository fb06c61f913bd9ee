//! The contract kit for claims: the crate's stores pass it, and faulty ones are found out by the rule
//! they break.

#[path = "support/services.rs"]
mod services;

use futures_util::{FutureExt, future::join_all};
use std::{
    collections::HashMap,
    future::Future,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::task::{try_id, yield_now};
use tower_idempotency::{
    BoxError, BoxStore, Claim, ClaimStore, Lease, MemoryStore, MessageId, Owner, Store,
    testing::{ClaimStoreContract, claim_store_contract},
};

// ===== the crate's stores =====

async fn memory(ttl: Duration) -> MemoryStore {
    MemoryStore::builder().ttl(ttl).build().unwrap()
}

#[tokio::test]
async fn memory_store() {
    claim_store_contract(memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn memory_store_on_many_threads() {
    // As a task: the check is Send when the stores are made by something that is.
    let check = tokio::spawn(claim_store_contract(memory));
    check.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn boxed_store() {
    claim_store_contract(async |ttl| BoxStore::new(memory(ttl).await)).await;
}

/// To the nanosecond, which no kit can watch.
#[tokio::test]
async fn memory_store_at_the_end_of_a_lease() {
    const SECOND: u64 = 1_000_000_000;
    let clock = Arc::new(AtomicU64::new(0));
    let read = clock.clone();
    let store = MemoryStore::builder()
        .ttl(Duration::from_secs(100))
        .clock(move || Duration::from_nanos(read.load(Ordering::SeqCst)))
        .build()
        .unwrap();
    let at = |nanos| clock.store(nanos, Ordering::SeqCst);
    let lease = Lease::new(Duration::from_secs(10)).unwrap();
    let [a, b] = [1, 2].map(Owner::from_bits);
    let claim = async |id: &str, owner| store.claim(&id.into(), owner, lease).await.unwrap();
    let renew = async |id: &str, owner| store.renew(&id.into(), owner, lease).await.unwrap();
    let complete = async |id: &str, owner| store.complete(&id.into(), owner).await.unwrap();
    let release = async |id: &str, owner| store.release(&id.into(), owner).await.unwrap();
    let busy = |nanos| Claim::Busy {
        retry_after: Duration::from_nanos(nanos),
    };

    for id in ["won", "renewed", "released", "completed", "again"] {
        assert_eq!(claim(id, a).await, Claim::Won);
        assert_eq!(claim(id, b).await, busy(10 * SECOND));
    }
    at(10 * SECOND - 1);
    for id in ["won", "renewed", "released", "completed", "again"] {
        assert_eq!(claim(id, b).await, busy(1));
    }
    assert!(renew("renewed", a).await);
    assert_eq!(claim("again", a).await, Claim::Won);
    at(10 * SECOND);
    assert_eq!(claim("won", b).await, Claim::Won);
    assert!(!renew("won", a).await);
    assert!(!release("released", a).await);
    assert!(!renew("released", a).await);
    assert!(!complete("completed", a).await);
    assert_eq!(claim("completed", b).await, Claim::Done);
    // What started anew ends anew.
    at(20 * SECOND - 2);
    for id in ["renewed", "again"] {
        assert_eq!(claim(id, b).await, busy(1));
    }
    at(20 * SECOND - 1);
    for id in ["renewed", "again"] {
        assert!(!renew(id, a).await);
        assert_eq!(claim(id, b).await, Claim::Won);
    }
    // So does what was taken over.
    assert_eq!(claim("won", a).await, busy(1));
    at(20 * SECOND);
    assert_eq!(claim("won", a).await, Claim::Won);
}

#[cfg(feature = "redis")]
mod in_redis {
    use super::services::{cluster, program, redis, unique};
    use std::time::Duration;
    use tower_idempotency::{BoxStore, RedisStore, testing::claim_store_contract};

    async fn open(url: &str, ttl: Duration) -> RedisStore {
        let builder = RedisStore::builder(unique("claims") + ":").ttl(ttl);
        builder.connect(url).await.unwrap()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn redis_store() {
        let Some(url) = redis() else { return };
        claim_store_contract(async |ttl| open(&url, ttl).await).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn redis_store_in_a_box() {
        let Some(url) = redis() else { return };
        claim_store_contract(async |ttl| BoxStore::new(open(&url, ttl).await)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn redis_store_on_a_cluster() {
        let Some(_) = program("redis-server") else {
            return;
        };
        let nodes = cluster();
        let client = ::redis::cluster::ClusterClient::new([nodes[0].url(), nodes[1].url()]);
        let client = client.unwrap();
        claim_store_contract(async |ttl: Duration| {
            let builder = RedisStore::builder(unique("claims") + ":").ttl(ttl);
            builder.cluster(client.clone()).await.unwrap()
        })
        .await;
    }
}

#[cfg(feature = "postgres")]
mod in_postgres {
    use super::services::{postgres, unique};
    use sqlx::{AssertSqlSafe, Executor};
    use std::{sync::Mutex, time::Duration};
    use tower_idempotency::{PostgresStore, testing::claim_store_contract};

    async fn check(pooler: bool) {
        let Some(url) = postgres() else { return };
        let options = sqlx::postgres::PgPoolOptions::new().max_connections(10);
        let pool = options.connect(&url).await.unwrap();
        let names = Mutex::new(Vec::new());
        claim_store_contract(async |ttl: Duration| {
            let name = unique("claims");
            names.lock().unwrap().push(name.clone());
            let builder = PostgresStore::builder(&name).ttl(ttl);
            let builder = builder.transaction_pooler(pooler);
            let store = builder.pool(pool.clone()).unwrap();
            store.migrate().await.unwrap();
            store
        })
        .await;
        let names = names.into_inner().unwrap().join(", ");
        let drop = sqlx::raw_sql(AssertSqlSafe(format!("DROP TABLE {names}")));
        pool.execute(drop).await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn postgres_store() {
        check(false).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn postgres_store_with_whole_statements() {
        check(true).await;
    }
}

#[cfg(feature = "mysql")]
mod in_mysql {
    use super::services::{mysql, unique};
    use sqlx::{AssertSqlSafe, Executor};
    use std::{sync::Mutex, time::Duration};
    use tower_idempotency::{MySqlStore, testing::claim_store_contract};

    #[tokio::test(flavor = "multi_thread")]
    async fn mysql_store() {
        let Some(url) = mysql() else { return };
        let options = sqlx::mysql::MySqlPoolOptions::new().max_connections(10);
        let pool = options.connect(&url).await.unwrap();
        let names = Mutex::new(Vec::new());
        claim_store_contract(async |ttl: Duration| {
            let name = unique("claims");
            names.lock().unwrap().push(name.clone());
            let store = MySqlStore::builder(&name).ttl(ttl).pool(pool.clone());
            let store = store.unwrap();
            store.migrate().await.unwrap();
            store
        })
        .await;
        let names = names.into_inner().unwrap().join(", ");
        let drop = sqlx::raw_sql(AssertSqlSafe(format!("DROP TABLE {names}")));
        pool.execute(drop).await.unwrap();
    }
}

#[cfg(feature = "sqlite")]
mod in_sqlite {
    use super::services::unique;
    use std::{env, fs, time::Duration};
    use tower_idempotency::{SqliteStore, testing::claim_store_contract};

    #[tokio::test(flavor = "multi_thread")]
    async fn sqlite_store() {
        let folder = env::temp_dir().join(unique("claims"));
        fs::create_dir(&folder).unwrap();
        let url = format!("sqlite://{}", folder.join("seen.db").display());
        claim_store_contract(async |ttl: Duration| {
            let builder = SqliteStore::builder(&unique("claims")).ttl(ttl);
            let store = builder.connect(&url).await.unwrap();
            store.migrate().await.unwrap();
            store
        })
        .await;
        fs::remove_dir_all(folder).unwrap();
    }
}

// ===== a store that does as told =====

/// What is wrong with a [`Faulty`] store.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Nothing,
    // Ids and owners.
    FoldsCase,
    CutsLongIds,
    RefusesLongIds,
    RefusesButClaims,
    ReleaseTakesStarForAll,
    CutsOwners,
    ReadsOwnersAsFloats,
    // Claims.
    OneClaimForAll,
    ClaimsNothing,
    EveryClaimWins,
    ClaimFailsWhenBusy,
    RefusesItsOwner,
    ClaimsWhatIsDone,
    DoneIsBusy,
    BusyForNoTime,
    BusyForFarTooLong,
    BusyForTheWholeLease,
    ClaimedIsSeen,
    // Renewals.
    RenewsForAnybody,
    RenewClaimsWhatIsFree,
    RenewUnmarks,
    RenewAnswersFalse,
    // Marks.
    CompleteForItsOwnerOnly,
    CompleteFailsForOthers,
    CompleteAnswersTrue,
    CompleteTwiceFails,
    CompleteDoesNothing,
    RememberLeavesTheClaim,
    RememberFailsWhenClaimed,
    // Ends.
    ReleaseForAnybody,
    ReleaseUnmarks,
    ReleaseAnswersTrue,
    ReleaseDoesNothing,
    ForgetLeavesTheClaim,
    ForgetLeavesTheDone,
    // Company.
    ClonesApart,
    ReadsThenWrites,
    ReadsThenTakesOver,
    ClaimOverwritesTheMark,
    TwoAtOnceFail,
    StaysWithItsTask,
    LeavesItsReply,
    LocksWhatWasDropped,
    // Time.
    MillisForSeconds,
    SecondsForMillis,
    NeverEnds,
    EndsOnlyForItsOwner,
    TakenOverForGood,
    GhostsStay,
    PanicsAtTheLongest,
    RenewsNothing,
    RenewKeepsTheLonger,
    SentAgainKeepsTheLease,
    RenewsTheEnded,
    RevivesTheEnded,
    ReleasesTheEnded,
    CompletesTheEnded,
    EndedIsDone,
    KeepsTheLeaseOfTheDone,
    TtlForLease,
    TtlFromClaim,
    ExpiredIsDone,
    ExpiredIsDoneUntilAsked,
    ExpiredIsRenewed,
    DoneNeverExpires,
    IsSlowAtFirst,
}
use Fault::*;

/// A correct store in memory, but for its fault. Commands wait once before they take effect, so
/// that they can be under way together and be dropped.
struct Faulty {
    fault: Fault,
    ttl: Duration,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    record: Mutex<HashMap<String, Entry>>,
    under_way: Mutex<Vec<String>>,
    released: Mutex<Vec<(String, Owner)>>,
    command_was_dropped: AtomicBool,
}

/// `end` is `None` for never.
#[derive(Clone, Copy, Debug)]
enum Entry {
    Claimed {
        owner: Owner,
        since: Instant,
        end: Option<Instant>,
        lease: Duration,
    },
    Done {
        by: Option<Owner>,
        end: Option<Instant>,
    },
}
use Entry::{Claimed, Done};

/// Any but a claim.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Command {
    Seen,
    Remember,
    Forget,
    Renew(Owner, Duration),
    Complete(Owner),
    Release(Owner),
}

/// A command under way.
struct UnderWay {
    shared: Arc<Shared>,
    id: String,
    /// What being dropped leaves behind.
    lock: Option<Entry>,
    done: bool,
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>;

const TICK: Duration = Duration::from_millis(1);

const BUSY: Result<Claim, BoxError> = Ok(Claim::Busy { retry_after: TICK });

fn over(end: Option<Instant>) -> bool {
    end.is_some_and(|end| end <= Instant::now())
}

impl Faulty {
    fn open(fault: Fault, ttl: Duration) -> Self {
        let shared = Arc::default();
        Faulty { fault, ttl, shared }
    }

    /// What an id is in this record.
    fn key(&self, id: &str) -> String {
        match self.fault {
            FoldsCase => id.to_lowercase(),
            CutsLongIds => String::from_utf8_lossy(&id.as_bytes()[..id.len().min(255)]).into(),
            OneClaimForAll => String::new(),
            _ => id.to_owned(),
        }
    }

    fn same(&self, one: Owner, other: Owner) -> bool {
        match self.fault {
            CutsOwners => one.to_bits() as u64 == other.to_bits() as u64,
            ReadsOwnersAsFloats => one.to_bits() as f64 == other.to_bits() as f64,
            _ => one == other,
        }
    }

    fn end(&self, lease: Duration) -> Option<Instant> {
        let now = Instant::now();
        match self.fault {
            MillisForSeconds => now.checked_add(lease * 1000),
            SecondsForMillis => now.checked_add(lease / 1000),
            TtlForLease => now.checked_add(self.ttl),
            NeverEnds => None,
            PanicsAtTheLongest if lease == Lease::MAX => panic!("out of range"),
            _ => now.checked_add(lease),
        }
    }

    fn done(&self, entry: Option<Entry>, by: Option<Owner>) -> Entry {
        let end = match (self.fault, entry) {
            (KeepsTheLeaseOfTheDone, Some(Claimed { end, .. })) => end,
            (TtlFromClaim, Some(Claimed { since, .. })) => since.checked_add(self.ttl),
            (DoneNeverExpires, _) => None,
            _ => Instant::now().checked_add(self.ttl),
        };
        Done { by, end }
    }

    /// What is there of an id, as long as it counts.
    fn alive(entry: Option<Entry>) -> Option<Entry> {
        entry.filter(|entry| match entry {
            Claimed { end, .. } | Done { end, .. } => !over(*end),
        })
    }

    fn claim(
        &self,
        id: &str,
        before: Option<Entry>,
        owner: Owner,
        lease: Duration,
    ) -> Result<Claim, BoxError> {
        let mut record = self.shared.record.lock().unwrap();
        let key = self.key(id);
        let mut entry = record.get(&key).copied();
        match (self.fault, before) {
            (ReadsThenWrites, _) => entry = before,
            (ReadsThenTakesOver, Some(Claimed { end, .. })) if over(end) => entry = before,
            (ClaimOverwritesTheMark, None) if matches!(entry, Some(Done { .. })) => entry = before,
            (RefusesLongIds, _) if id.len() > 255 => return Err("too long".into()),
            _ => {}
        }
        let mut end = self.end(lease);
        match (Self::alive(entry), self.fault) {
            (Some(Done { .. }), ClaimsWhatIsDone) => {}
            (Some(Done { .. }), DoneIsBusy) => return BUSY,
            (Some(Done { .. }), _) => return Ok(Claim::Done),
            (Some(Claimed { .. }), EveryClaimWins) => {}
            (Some(Claimed { owner: holder, .. }), RefusesItsOwner) if holder == owner => {
                return BUSY;
            }
            (
                Some(Claimed {
                    owner: holder,
                    end: held,
                    ..
                }),
                fault,
            ) if self.same(holder, owner) => {
                if fault == SentAgainKeepsTheLease {
                    end = held;
                }
            }
            (Some(Claimed { .. }), ClaimFailsWhenBusy) => return Err("duplicate key".into()),
            (Some(Claimed { end, lease, .. }), fault) => {
                let left = end.map_or(TICK, |end| end.saturating_duration_since(Instant::now()));
                let retry_after = match fault {
                    BusyForNoTime => Duration::ZERO,
                    BusyForFarTooLong => left * 1000,
                    BusyForTheWholeLease => lease,
                    _ => left,
                };
                return Ok(Claim::Busy { retry_after });
            }
            (None, ClaimsNothing) => return Ok(Claim::Won),
            (None, fault) => match (entry, fault) {
                (Some(Claimed { owner: holder, .. }), EndsOnlyForItsOwner) if holder != owner => {
                    return BUSY;
                }
                (Some(Claimed { .. }), EndedIsDone) => return Ok(Claim::Done),
                (Some(Done { .. }), ExpiredIsDone | ExpiredIsDoneUntilAsked) => {
                    return Ok(Claim::Done);
                }
                (Some(Claimed { .. }), TakenOverForGood) => end = None,
                _ => {}
            },
        }
        let released = self.shared.released.lock().unwrap();
        if self.fault == GhostsStay && released.contains(&(key.clone(), owner)) {
            end = None;
        }
        let claimed = Claimed {
            owner,
            since: Instant::now(),
            end,
            lease,
        };
        record.insert(key, claimed);
        if self.fault == RefusesButClaims && id.len() > 255 {
            return Err("too long".into());
        }
        Ok(Claim::Won)
    }

    /// Any other command.
    fn apply(&self, id: &str, before: Option<Entry>, command: Command) -> Result<bool, BoxError> {
        let mut record = self.shared.record.lock().unwrap();
        let (key, fault) = (self.key(id), self.fault);
        let refuses = match fault {
            RefusesLongIds => command != Command::Seen,
            RefusesButClaims => matches!(command, Command::Complete(_)),
            _ => false,
        };
        if refuses && id.len() > 255 {
            return Err("too long".into());
        }
        let entry = match fault {
            ReadsThenWrites => before,
            _ => record.get(&key).copied(),
        };
        let owner = match command {
            Command::Renew(owner, _) | Command::Complete(owner) | Command::Release(owner) => {
                Some(owner)
            }
            _ => None,
        };
        let mine = |holder| owner.is_some_and(|owner| self.same(owner, holder));
        let is_done = matches!(Self::alive(entry), Some(Done { .. }));
        let is_claimed = matches!(Self::alive(entry), Some(Claimed { .. }));
        let (held, was_held) = match entry {
            Some(Claimed { owner, end, .. }) => (!over(end) && mine(owner), mine(owner)),
            _ => (false, false),
        };
        let did = matches!(entry, Some(Done { by: Some(by), .. }) if mine(by));
        match command {
            Command::Seen => {
                if fault == ExpiredIsDoneUntilAsked {
                    record.retain(|_, entry| Self::alive(Some(*entry)).is_some());
                }
                Ok(is_done || fault == ClaimedIsSeen && is_claimed)
            }
            Command::Forget => {
                let leaves = match fault {
                    ForgetLeavesTheClaim => is_claimed,
                    ForgetLeavesTheDone => is_done,
                    _ => false,
                };
                if !leaves {
                    record.remove(&key);
                }
                Ok(true)
            }
            Command::Remember => match fault {
                RememberLeavesTheClaim if is_claimed => Ok(true),
                RememberFailsWhenClaimed if is_claimed => Err("duplicate key".into()),
                _ => {
                    record.insert(key, self.done(entry, None));
                    Ok(true)
                }
            },
            Command::Complete(owner) => {
                match fault {
                    CompleteForItsOwnerOnly if !held => return Ok(false),
                    CompleteFailsForOthers if is_claimed && !held => return Err("not yours".into()),
                    CompleteTwiceFails if is_done => return Err("no claim".into()),
                    CompleteDoesNothing => return Ok(held),
                    _ => record.insert(key, self.done(entry, Some(owner))),
                };
                let true_at_end = fault == CompletesTheEnded && was_held;
                Ok(held || true_at_end || fault == CompleteAnswersTrue)
            }
            Command::Release(_) => {
                let changes = match fault {
                    ReleaseForAnybody => is_claimed,
                    ReleaseUnmarks => held || did,
                    ReleaseDoesNothing => false,
                    ReleasesTheEnded => was_held,
                    _ => held,
                };
                if fault == ReleaseTakesStarForAll && id == "*" {
                    record.clear();
                }
                if changes {
                    record.remove(&key);
                    let owner = owner.expect("one who releases");
                    self.shared.released.lock().unwrap().push((key, owner));
                }
                Ok(changes || fault == ReleaseAnswersTrue || fault == ReleaseDoesNothing && held)
            }
            Command::Renew(owner, lease) => {
                let changes = match fault {
                    RenewsForAnybody => is_claimed,
                    RenewClaimsWhatIsFree => held || entry.is_none(),
                    RenewUnmarks => held || is_done && did,
                    RenewsTheEnded | RevivesTheEnded => was_held,
                    ExpiredIsRenewed => held || !is_done && matches!(entry, Some(Done { .. })),
                    RenewsNothing => false,
                    _ => held,
                };
                let mut end = self.end(lease);
                let (mut holder, mut since) = (owner, Instant::now());
                if let Some(Claimed {
                    owner,
                    since: first,
                    end: old,
                    ..
                }) = entry
                {
                    (holder, since) = (owner, first);
                    if fault == RenewKeepsTheLonger {
                        end = end.max(old);
                    }
                }
                if changes {
                    let renewed = Claimed {
                        owner: holder,
                        since,
                        end,
                        lease,
                    };
                    record.insert(key, renewed);
                }
                match fault {
                    RenewAnswersFalse => Ok(false),
                    RenewsForAnybody | RenewsTheEnded => Ok(changes),
                    _ => Ok(held),
                }
            }
        }
    }

    /// Waits for its turn, then does what is done at once.
    fn command<T: Send + 'static>(
        &self,
        id: &MessageId,
        lease: Option<Duration>,
        apply: impl FnOnce(&Faulty, &str, Option<Entry>) -> Result<T, BoxError> + Send + 'static,
    ) -> BoxFuture<T> {
        let (fault, id) = (self.fault, id.to_string());
        let (shared, ttl) = (self.shared.clone(), self.ttl);
        let store = Faulty { fault, ttl, shared };
        let slow = ttl == SHORT || lease == Some(SHORT);
        Box::pin(async move {
            let shared = &store.shared;
            let alone = !shared.under_way.lock().unwrap().contains(&id);
            let locks = fault == LocksWhatWasDropped && lease.is_some();
            let mut under_way = UnderWay::new(&store, &id, locks);
            let before = shared.record.lock().unwrap().get(&store.key(&id)).copied();
            let task = try_id();
            yield_now().await;
            under_way.done = true;
            match fault {
                TwoAtOnceFail if !alone => return Err("locked".into()),
                StaysWithItsTask if try_id() != task => return Err("not at home".into()),
                IsSlowAtFirst if slow => tokio::time::sleep(SHORT).await,
                _ => {}
            }
            apply(&store, &id, before)
        })
    }

    fn told(&self, id: &MessageId, command: Command) -> BoxFuture<bool> {
        self.command(id, None, move |store, id, before| {
            let answer = store.apply(id, before, command)?;
            let owned = matches!(command, Command::Renew(..) | Command::Release(_));
            let dropped = &store.shared.command_was_dropped;
            let shifted = store.fault == LeavesItsReply && owned;
            Ok(answer ^ (shifted && dropped.swap(false, Ordering::SeqCst)))
        })
    }
}

impl UnderWay {
    fn new(store: &Faulty, id: &str, locks: bool) -> Self {
        store.shared.under_way.lock().unwrap().push(id.to_owned());
        let lock = Claimed {
            owner: Owner::random(),
            since: Instant::now(),
            end: None,
            lease: TICK,
        };
        UnderWay {
            shared: store.shared.clone(),
            id: id.to_owned(),
            lock: locks.then_some(lock),
            done: false,
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut under_way = self.shared.under_way.lock().unwrap();
        if let Some(at) = under_way.iter().position(|other| *other == self.id) {
            under_way.swap_remove(at);
        }
        if !self.done {
            let dropped = &self.shared.command_was_dropped;
            dropped.store(true, Ordering::SeqCst);
            if let Some(lock) = self.lock {
                let mut record = self.shared.record.lock().unwrap();
                record.insert(self.id.clone(), lock);
            }
        }
    }
}

impl Clone for Faulty {
    fn clone(&self) -> Self {
        let shared = match self.fault {
            ClonesApart => Arc::new(Shared {
                record: Mutex::new(self.shared.record.lock().unwrap().clone()),
                ..Shared::default()
            }),
            _ => self.shared.clone(),
        };
        Faulty { shared, ..*self }
    }
}

impl Store for Faulty {
    type Error = BoxError;
    type Future<T: Send + 'static> = BoxFuture<T>;

    fn seen(&self, id: &MessageId) -> BoxFuture<bool> {
        self.told(id, Command::Seen)
    }

    fn remember(&self, id: &MessageId) -> BoxFuture<()> {
        Box::pin(self.told(id, Command::Remember).map(|done| done.map(drop)))
    }

    fn forget(&self, id: &MessageId) -> BoxFuture<()> {
        Box::pin(self.told(id, Command::Forget).map(|done| done.map(drop)))
    }
}

impl ClaimStore for Faulty {
    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<Claim> {
        let lease = lease.length();
        self.command(id, Some(lease), move |store, id, before| {
            store.claim(id, before, owner, lease)
        })
    }

    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<bool> {
        self.told(id, Command::Renew(owner, lease.length()))
    }

    fn complete(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool> {
        self.told(id, Command::Complete(owner))
    }

    fn release(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool> {
        self.told(id, Command::Release(owner))
    }
}

// ===== what the kit says of it =====

/// The TTL and the lease that are watched first.
const SHORT: Duration = Duration::from_millis(700);

fn faulty(fault: Fault) -> impl AsyncFn(Duration) -> Faulty {
    async move |ttl| Faulty::open(fault, ttl)
}

/// What the kit panics with.
async fn verdict(check: impl Future<Output = ()>) -> Option<String> {
    let panic = AssertUnwindSafe(check).catch_unwind().await.err()?;
    Some(*panic.downcast::<String>().expect("a message with the rule"))
}

#[track_caller]
fn assert_names(verdict: Option<String>, parts: &[&str]) {
    let verdict = verdict.expect("the kit found nothing");
    for part in parts {
        assert!(verdict.contains(part), "no {part:?} in: {verdict}");
    }
}

macro_rules! bites {
    ($($test:ident: $fault:ident => [$($part:expr),+ $(,)?];)+) => { $(
        #[tokio::test]
        async fn $test() {
            assert_names(verdict(claim_store_contract(faulty($fault))).await, &[$($part),+]);
        }
    )+ };
}

const BYTES: &str = "ids are compared by their bytes";
const OWNERS: &str = "owners are compared by all of their bits";
const HELD: &str = "an id that another owner holds is Busy";
const DONE: &str = "a claim of what is done is answered by Done";
const RETRY: &str = "Busy tells a time above zero, and no longer than what is left";
const RENEW_NOT: &str = "renew answers false to one who does not hold the id, and changes nothing";
const RELEASE_NOT: &str =
    "release answers false to one who does not hold the id, and changes nothing";
const COMPLETE_NOT: &str =
    "complete marks done whatever the owner, and answers false to one who does not hold the id";
const ONE_WINNER: &str = "of many who claim an id at once, one wins";
const LEASE: &str = "a claim is held until its lease has passed since it was sent";
const ANEW: &str = "renew, and the own claim sent again, start a new lease";
const ENDS: &str = "an id can be won by another at some time after its lease";
const DROPPED: &str = "a dropped command harms no other, nor its owner's next one";

bites! {
    // Ids and owners.
    folded_case: FoldsCase => [BYTES, "case", "→ Busy, not Won, mixed up with \""];
    cut_ids: CutsLongIds => [BYTES, "length", "mixed up with \"xxx"];
    refused_ids: RefusesLongIds => [BYTES, "→ an error, too long", " bytes)"];
    a_pattern_in_release: ReleaseTakesStarForAll => [BYTES, "→ false, not true"];
    cut_owners: CutsOwners => [OWNERS];
    owners_as_numbers: ReadsOwnersAsFloats => [OWNERS];
    // Claims.
    one_claim_for_all: OneClaimForAll => ["a claim holds its own id and no other"];
    claims_nothing: ClaimsNothing => [HELD, "claim by 0xb → Won, not Busy"];
    every_claim_wins: EveryClaimWins => [HELD, "claim by 0xb → Won, not Busy"];
    an_error_for_busy: ClaimFailsWhenBusy => [HELD, "claim by 0xb → an error, duplicate key"];
    its_owner_is_refused: RefusesItsOwner => ["the owner who holds an id wins it again"];
    done_is_claimed: ClaimsWhatIsDone => [DONE, "→ Won, not Done"];
    done_is_busy: DoneIsBusy => [DONE, "→ Busy, not Done"];
    busy_for_no_time: BusyForNoTime => [RETRY, "Busy for 0ns"];
    busy_for_far_too_long: BusyForFarTooLong => [RETRY];
    claimed_is_seen: ClaimedIsSeen => ["what is not done is not seen, claimed or not"];
    // Renewals.
    renews_for_anybody: RenewsForAnybody => [RENEW_NOT, "renew by 0xb → true, not false"];
    renew_claims: RenewClaimsWhatIsFree => [RENEW_NOT];
    renew_unmarks: RenewUnmarks => [RENEW_NOT, "seen → false, not true"];
    renew_answers_false: RenewAnswersFalse => ["renew answers true to the owner who holds the id"];
    // Marks.
    completes_for_its_owner_only: CompleteForItsOwnerOnly => [COMPLETE_NOT, "seen → false"];
    complete_fails_for_others: CompleteFailsForOthers => [COMPLETE_NOT, "an error, not yours"];
    complete_answers_true: CompleteAnswersTrue => [COMPLETE_NOT, "→ true, not false"];
    complete_twice: CompleteTwiceFails => ["complete may be sent twice", "an error, no claim"];
    complete_does_nothing: CompleteDoesNothing => ["complete marks done, and answers true"];
    remember_leaves_the_claim: RememberLeavesTheClaim => ["remember marks an id done, claimed or not"];
    remember_fails: RememberFailsWhenClaimed => ["remember marks an id done, claimed or not"];
    // Ends.
    releases_for_anybody: ReleaseForAnybody => [RELEASE_NOT, "release by 0xb → true, not false"];
    release_unmarks: ReleaseUnmarks => [RELEASE_NOT];
    release_answers_true: ReleaseAnswersTrue => [RELEASE_NOT];
    release_does_nothing: ReleaseDoesNothing => ["release frees the id of the owner who holds it"];
    forget_leaves_the_claim: ForgetLeavesTheClaim => ["forget drops what is recorded of an id"];
    forget_leaves_the_done: ForgetLeavesTheDone => ["forget drops what is recorded of an id"];
    // Company.
    clones_apart: ClonesApart => ["clones share their claims"];
    stays_with_its_task: StaysWithItsTask => ["polled by one task and then by another"];
    read_then_write: ReadsThenWrites => [ONE_WINNER, "claim by 64 → Won by 64"];
    a_mark_is_overwritten: ClaimOverwritesTheMark => ["no claim undoes a mark that is made at the same"];
    two_at_once: TwoAtOnceFail => ["commands on one id may be under way together", "an error, locked"];
    a_reply_left_behind: LeavesItsReply => [DROPPED];
    a_lock_left_behind: LocksWhatWasDropped => [DROPPED, "→ Busy, not Won"];
    the_longest_lease: PanicsAtTheLongest => ["the longest lease", "a panic, out of range"];
}

/// Those that take time, at once.
async fn all_bite(faults: &[(Fault, &[&str])]) {
    let verdicts = faults.iter().map(|(fault, parts)| async move {
        let verdict = verdict(claim_store_contract(faulty(*fault))).await;
        assert!(verdict.is_some(), "the kit found nothing in {fault:?}");
        assert_names(verdict, parts);
    });
    join_all(verdicts).await;
}

#[tokio::test]
async fn leases() {
    all_bite(&[
        (BusyForTheWholeLease, &[RETRY, "Busy for 700ms, with "]),
        (MillisForSeconds, &[RETRY]),
        (TtlForLease, &[RETRY]),
        (SecondsForMillis, &[LEASE, " into a lease of 700ms"]),
        (RenewsNothing, &[ANEW, "claim by 0xb → Won, "]),
        (RenewKeepsTheLonger, &[RETRY]),
        (SentAgainKeepsTheLease, &[ANEW, "claim by 0xb → Won, "]),
    ])
    .await;
}

#[tokio::test]
async fn leases_that_do_not_end() {
    all_bite(&[
        (NeverEnds, &[ENDS]),
        (EndsOnlyForItsOwner, &[ENDS]),
        (TakenOverForGood, &[ENDS, "claim by 0xc → Busy, "]),
        (GhostsStay, &[ENDS, "claim by 0xb → Busy, "]),
    ])
    .await;
}

#[tokio::test]
async fn commands_on_what_has_ended() {
    const ENDED: &str = "where a claim has ended, ";
    all_bite(&[
        (RenewsTheEnded, &[ENDED, RENEW_NOT]),
        (RevivesTheEnded, &[ENDED, RENEW_NOT]),
        (ReleasesTheEnded, &[ENDED, RELEASE_NOT]),
        (CompletesTheEnded, &[ENDED, COMPLETE_NOT]),
        (
            EndedIsDone,
            &["a claim that ended says nothing of an effect"],
        ),
        (ReadsThenTakesOver, &[ENDED, ONE_WINNER]),
    ])
    .await;
}

#[tokio::test]
async fn what_is_done() {
    const EXPIRED: &str = "where the TTL is over, ";
    all_bite(&[
        (
            KeepsTheLeaseOfTheDone,
            &["what is done stays so, past the lease"],
        ),
        (
            TtlFromClaim,
            &["the TTL counts from when an id was marked done"],
        ),
        (ExpiredIsDone, &[EXPIRED, "→ Done, not Won"]),
        (ExpiredIsDoneUntilAsked, &[EXPIRED, "→ Done, not Won"]),
        (ExpiredIsRenewed, &[EXPIRED, RENEW_NOT]),
        (
            DoneNeverExpires,
            &["no longer seen at some time after its TTL"],
        ),
    ])
    .await;
}

#[tokio::test]
async fn without_a_fault_it_passes() {
    assert_eq!(verdict(claim_store_contract(faulty(Nothing))).await, None);
}

#[tokio::test]
async fn what_was_too_slow_to_tell_is_tried_again() {
    let ttls = Mutex::new(Vec::new());
    let kit = ClaimStoreContract::new(async |ttl| {
        ttls.lock().unwrap().push(ttl);
        Faulty::open(IsSlowAtFirst, ttl)
    });
    assert_eq!(verdict(kit.check()).await, None);
    let ttls = ttls.into_inner().unwrap();
    assert!(ttls.contains(&SHORT) && ttls.contains(&(2 * SHORT)));
    assert!(!ttls.contains(&(4 * SHORT)), "{ttls:?}");
}

// ===== stores with limits =====

#[tokio::test]
async fn ids_that_are_refused_do_no_harm() {
    const REFUSED: &str = "that the store cannot hold is refused";
    let on_short = async |fault| {
        let kit = ClaimStoreContract::new(faulty(fault)).ids(|id| id.len() <= 255);
        verdict(kit.check()).await
    };
    let (passes, cuts, claims) = tokio::join!(
        on_short(RefusesLongIds),
        on_short(CutsLongIds),
        on_short(RefusesButClaims),
    );
    assert_eq!(passes, None);
    assert_names(cuts, &[REFUSED, "claim → Won, not an error"]);
    assert_names(claims, &[REFUSED]);
}

#[tokio::test]
async fn a_record_without_expiry_is_not_watched() {
    let kit = ClaimStoreContract::new(faulty(DoneNeverExpires)).no_expiry();
    assert_eq!(verdict(kit.check()).await, None);
}
