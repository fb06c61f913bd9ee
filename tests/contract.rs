//! The contract kit: the crate's stores pass it, and faulty ones are found out by the rule they
//! break.

#[path = "support/services.rs"]
mod services;

use futures_util::FutureExt;
use std::{
    collections::HashMap,
    future::Future,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::task::{try_id, yield_now};
use tower_idempotency::{
    BoxError, MemoryStore, MessageId, Store,
    error::Operation::{self, Forget, Remember, Seen},
    testing::{StoreContract, store_contract},
};

// ===== the crate's stores =====

async fn memory(ttl: Duration) -> MemoryStore {
    MemoryStore::builder().ttl(ttl).build().unwrap()
}

#[tokio::test]
async fn memory_store() {
    store_contract(memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn memory_store_on_many_threads() {
    // As a task: the check is Send when the stores are made by something that is.
    tokio::spawn(store_contract(memory)).await.unwrap();
}

#[cfg(feature = "redis")]
mod in_redis {
    use super::services::{cluster, program, redis, unique};
    use std::time::Duration;
    use tower_idempotency::{
        store::{RedisStore, foreign::GoRedisStore},
        testing::store_contract,
    };

    async fn open(url: &str, ttl: Duration) -> RedisStore {
        let builder = RedisStore::builder(unique("contract") + ":").ttl(ttl);
        builder.connect(url).await.unwrap()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn redis_store() {
        let Some(url) = redis() else { return };
        store_contract(async |ttl| open(&url, ttl).await).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn go_redis_store() {
        let Some(url) = redis() else { return };
        store_contract(async |ttl| GoRedisStore::new(open(&url, ttl).await)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn redis_store_on_a_cluster() {
        let Some(_) = program("redis-server") else {
            return;
        };
        let nodes = cluster();
        let client = ::redis::cluster::ClusterClient::new([nodes[0].url(), nodes[1].url()]);
        let client = client.unwrap();
        store_contract(async |ttl: Duration| {
            let builder = RedisStore::builder(unique("contract") + ":").ttl(ttl);
            builder.cluster(client.clone()).await.unwrap()
        })
        .await;
    }
}

#[cfg(feature = "postgres")]
mod in_postgres {
    use super::services::{postgres, unique};
    use sqlx::{AssertSqlSafe, Executor, PgPool};
    use std::{sync::Mutex, time::Duration};
    use tower_idempotency::{
        PostgresStore,
        store::foreign::{GoPostgresStore, PhpPostgresStore},
        testing::{StoreContract, store_contract},
    };

    /// Makes a table for each store, and drops them in the end.
    struct Tables {
        pool: PgPool,
        names: Mutex<Vec<String>>,
    }

    impl Tables {
        async fn open() -> Option<Self> {
            let options = sqlx::postgres::PgPoolOptions::new().max_connections(10);
            Some(Tables {
                pool: options.connect(&postgres()?).await.unwrap(),
                names: Mutex::default(),
            })
        }

        fn name(&self) -> String {
            let name = unique("contract");
            self.names.lock().unwrap().push(name.clone());
            name
        }

        async fn run(&self, statement: String) {
            let done = self.pool.execute(sqlx::raw_sql(AssertSqlSafe(statement)));
            done.await.unwrap();
        }

        async fn drop(self) {
            let names = self.names.lock().unwrap().join(", ");
            self.run(format!("DROP TABLE {names}")).await;
        }
    }

    async fn ours(pooler: bool) {
        let Some(tables) = Tables::open().await else {
            return;
        };
        store_contract(async |ttl: Duration| {
            let builder = PostgresStore::builder(&tables.name()).ttl(ttl);
            let builder = builder.transaction_pooler(pooler);
            let store = builder.pool(tables.pool.clone()).unwrap();
            store.migrate().await.unwrap();
            store
        })
        .await;
        tables.drop().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn postgres_store() {
        ours(false).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn postgres_store_with_whole_statements() {
        ours(true).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn go_postgres_store() {
        let Some(tables) = Tables::open().await else {
            return;
        };
        let contract = StoreContract::new(async |ttl: Duration| {
            let name = tables.name();
            let make = format!(
                "CREATE TABLE {name} (message_id TEXT PRIMARY KEY, \
                 created_at TIMESTAMPTZ NOT NULL DEFAULT now(), expires_at TIMESTAMPTZ NULL)"
            );
            tables.run(make).await;
            let builder = GoPostgresStore::builder(&name).ttl(ttl);
            builder.pool(tables.pool.clone()).unwrap()
        });
        contract.ids(|id| !id.contains('\0')).check().await;
        tables.drop().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn php_postgres_store() {
        let Some(tables) = Tables::open().await else {
            return;
        };
        let contract = StoreContract::new(async |_| {
            let name = tables.name();
            let make = format!(
                "CREATE TABLE {name} (message_id VARCHAR(255) PRIMARY KEY, state VARCHAR(16), expires_at BIGINT)"
            );
            tables.run(make).await;
            PhpPostgresStore::builder(&name)
                .pool(tables.pool.clone())
                .unwrap()
        });
        let contract = contract.ids(|id| !id.contains('\0') && id.chars().count() <= 255);
        contract.no_expiry().check().await;
        tables.drop().await;
    }
}

#[cfg(feature = "mysql")]
mod in_mysql {
    use super::services::{mysql, unique};
    use sqlx::{AssertSqlSafe, Executor, MySqlPool};
    use std::{sync::Mutex, time::Duration};
    use tower_idempotency::{
        MySqlStore,
        store::foreign::PhpMySqlStore,
        testing::{StoreContract, store_contract},
    };

    async fn open() -> Option<MySqlPool> {
        let options = sqlx::mysql::MySqlPoolOptions::new().max_connections(10);
        Some(options.connect(&mysql()?).await.unwrap())
    }

    async fn run(pool: &MySqlPool, statement: String) {
        let done = pool.execute(sqlx::raw_sql(AssertSqlSafe(statement)));
        done.await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn mysql_store() {
        let Some(pool) = open().await else { return };
        let names = Mutex::new(Vec::new());
        store_contract(async |ttl: Duration| {
            let name = unique("contract");
            names.lock().unwrap().push(name.clone());
            let builder = MySqlStore::builder(&name).ttl(ttl);
            let store = builder.pool(pool.clone()).unwrap();
            store.migrate().await.unwrap();
            store
        })
        .await;
        let names = names.into_inner().unwrap().join(", ");
        run(&pool, format!("DROP TABLE {names}")).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn php_mysql_store() {
        let Some(pool) = open().await else { return };
        let names = Mutex::new(Vec::new());
        let contract = StoreContract::new(async |_| {
            let name = unique("contract");
            names.lock().unwrap().push(name.clone());
            let make = format!(
                "CREATE TABLE {name} (message_id VARBINARY(255) PRIMARY KEY, state VARCHAR(16), expires_at BIGINT)"
            );
            run(&pool, make).await;
            let builder = PhpMySqlStore::builder(&name);
            builder.pool(pool.clone()).unwrap()
        });
        let contract = contract.ids(|id| id.len() <= 255);
        contract.no_expiry().check().await;
        let names = names.into_inner().unwrap().join(", ");
        run(&pool, format!("DROP TABLE {names}")).await;
    }
}

#[cfg(feature = "sqlite")]
mod in_sqlite {
    use super::services::unique;
    use std::{env, fs, path::PathBuf, time::Duration};
    use tower_idempotency::{
        SqliteStore,
        store::foreign::PhpSqliteStore,
        testing::{StoreContract, store_contract},
    };

    fn folder() -> PathBuf {
        let folder = env::temp_dir().join(unique("contract"));
        fs::create_dir(&folder).unwrap();
        folder
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn sqlite_store() {
        let folder = folder();
        let url = format!("sqlite://{}", folder.join("seen.db").display());
        store_contract(async |ttl: Duration| {
            let builder = SqliteStore::builder(&unique("contract")).ttl(ttl);
            let store = builder.connect(&url).await.unwrap();
            store.migrate().await.unwrap();
            store
        })
        .await;
        fs::remove_dir_all(folder).unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn php_sqlite_store() {
        let folder = folder();
        let file = folder.join("seen.db");
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&file);
        let options = options.create_if_missing(true);
        let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
        let contract = StoreContract::new(async |_| {
            let name = unique("contract");
            let make = format!(
                "CREATE TABLE {name} (message_id VARCHAR(255) PRIMARY KEY, state VARCHAR(16), expires_at BIGINT)"
            );
            let make = sqlx::raw_sql(sqlx::AssertSqlSafe(make));
            make.execute(&pool).await.unwrap();
            let builder = PhpSqliteStore::builder(&name);
            builder.pool(pool.clone()).unwrap()
        });
        let contract = contract.ids(|id| !id.contains('\0'));
        contract.no_expiry().check().await;
        fs::remove_dir_all(folder).unwrap();
    }
}

// ===== a store that does as told =====

/// What is wrong with a [`Faulty`] store.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Nothing,
    // Ids.
    FoldsCase,
    TrimsBlanks,
    CutsLongIds,
    HashesOnlyLongIds,
    TakesStarForAll,
    RefusesLongIds,
    RefusesButMarks,
    RefusesAndClears,
    PanicsAtLongIds,
    // Commands.
    BeginsFull,
    SeenRemembers,
    RemembersNothing,
    RememberTwiceFails,
    ForgetsNothing,
    ForgetsAll,
    ForgetOfNothingFails,
    ForgetIsForGood,
    // Company.
    ClonesApart,
    StaysWithItsTask,
    ShiftsAnswers,
    TwoAtOnceFail,
    RewritesTheRecord,
    LosesAfterDrop,
    LeavesItsReply,
    HangsAfterDrop,
    // Time.
    PanicsAtHugeTtl,
    FailsAtTinyTtl,
    TakesTinyTtlForNone,
    EndsEarly,
    NeverRenews,
    SeenRenews,
    NeverExpires,
    KeepsTheExpired,
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
    /// When each id ends; `None` is never.
    record: Mutex<HashMap<String, Option<Instant>>>,
    under_way: Mutex<Vec<(Operation, String)>>,
    /// Of `seen`, in the order of the questions.
    answers: Mutex<Vec<bool>>,
    questions_dropped: AtomicUsize,
    command_was_dropped: AtomicBool,
}

/// A command under way.
struct UnderWay {
    shared: Arc<Shared>,
    command: (Operation, String),
    done: bool,
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>;

fn alive(end: Option<Instant>) -> bool {
    end.is_none_or(|end| Instant::now() < end)
}

impl Faulty {
    fn open(fault: Fault, ttl: Duration) -> Self {
        let shared = Arc::<Shared>::default();
        if fault == BeginsFull {
            let id = "00000001-0000-4000-8000-000000000000".to_owned();
            shared.record.lock().unwrap().insert(id, None);
        }
        Faulty { fault, ttl, shared }
    }

    /// What an id is in this record.
    fn key(&self, id: &str) -> String {
        const HASH: &str =
            "sha256:15258faa6649aeec09f46e1af824138031c5adc24e7b2c586e4316c48056d92d";
        match self.fault {
            FoldsCase => id.to_lowercase(),
            TrimsBlanks => id.trim_end_matches(' ').to_owned(),
            CutsLongIds => String::from_utf8_lossy(&id.as_bytes()[..id.len().min(255)]).into(),
            // One of the kit's long ids will do.
            HashesOnlyLongIds if id == "long-id-".repeat(32) => HASH.to_owned(),
            _ => id.to_owned(),
        }
    }

    /// When an id ends that is remembered now.
    fn end(&self) -> Result<Option<Instant>, BoxError> {
        let now = Instant::now();
        Ok(match self.fault {
            PanicsAtHugeTtl => Some(now + self.ttl),
            FailsAtTinyTtl if self.ttl < Duration::from_millis(1) => {
                return Err("invalid expire time".into());
            }
            EndsEarly => now.checked_add(self.ttl / 2),
            TakesTinyTtlForNone if self.ttl < Duration::from_millis(1) => None,
            NeverExpires => None,
            _ => now.checked_add(self.ttl),
        })
    }

    /// What a command does, and what `seen` answers.
    fn apply(&self, operation: Operation, id: &str) -> Result<bool, BoxError> {
        let key = self.key(id);
        let mut record = self.shared.record.lock().unwrap();
        let entry = record.get(&key).copied();
        let seen = entry.is_some_and(alive);
        let long = id.len() > 255;
        match (operation, self.fault) {
            (Remember, RefusesLongIds) if long => return Err("too long".into()),
            (Remember, RefusesButMarks) if long => {
                record.insert(key, None);
                return Err("too long".into());
            }
            (Remember, RefusesAndClears) if long => {
                record.clear();
                return Err("too long".into());
            }
            (Remember, RemembersNothing) => {}
            (Remember, RememberTwiceFails) if seen => return Err("duplicate key".into()),
            (Remember, NeverRenews) if seen => {}
            (Remember, KeepsTheExpired | ForgetIsForGood) if entry.is_some() && !seen => {}
            (Remember, LosesAfterDrop)
                if (self.shared.command_was_dropped).swap(false, Ordering::SeqCst) => {}
            (Remember, _) | (Seen, SeenRemembers) => {
                record.insert(key, self.end()?);
            }
            (Seen, SeenRenews) if seen => {
                record.insert(key, self.end()?);
            }
            (Forget, ForgetsNothing) => {}
            (Forget, ForgetOfNothingFails) if !seen => return Err("no such id".into()),
            (Forget, ForgetIsForGood) => {
                record.insert(key, Some(Instant::now()));
            }
            (Forget, ForgetsAll) => record.clear(),
            (Forget, TakesStarForAll) if id == "*" => record.clear(),
            (Forget, _) => {
                record.remove(&key);
            }
            _ => {}
        }
        Ok(seen)
    }

    fn command(&self, operation: Operation, id: &MessageId) -> BoxFuture<bool> {
        let (fault, id) = (self.fault, id.clone());
        assert!(fault != PanicsAtLongIds || id.len() <= 255, "out of space");
        let command = UnderWay {
            shared: self.shared.clone(),
            command: (operation, id.to_string()),
            done: false,
        };
        let store = Faulty {
            shared: self.shared.clone(),
            ..*self
        };
        Box::pin(async move {
            let mut command = command;
            let (shared, task) = (&store.shared, try_id());
            let locked = {
                let mut under_way = shared.under_way.lock().unwrap();
                let locked = operation != Seen && under_way.contains(&command.command);
                under_way.push(command.command.clone());
                locked
            };
            let replies = matches!(fault, ShiftsAnswers | LeavesItsReply);
            let place = if replies && operation == Seen {
                let seen = store.apply(Seen, &id)?;
                let mut answers = shared.answers.lock().unwrap();
                answers.push(seen);
                answers.len() - 1
            } else {
                0
            };
            let before = shared.record.lock().unwrap().clone();
            yield_now().await;
            command.done = true;
            match fault {
                TwoAtOnceFail if locked => Err("locked".into()),
                StaysWithItsTask if try_id() != task => Err("not at home".into()),
                HangsAfterDrop if shared.command_was_dropped.load(Ordering::SeqCst) => {
                    std::future::pending().await
                }
                ShiftsAnswers if operation == Seen => {
                    let answers = shared.answers.lock().unwrap();
                    Ok(*answers.get(place + 1).unwrap_or(&answers[place]))
                }
                LeavesItsReply if operation == Seen => {
                    let behind = shared.questions_dropped.load(Ordering::SeqCst);
                    Ok(shared.answers.lock().unwrap()[place.saturating_sub(behind)])
                }
                RewritesTheRecord if operation == Remember => {
                    *shared.record.lock().unwrap() = before;
                    store.apply(operation, &id)
                }
                IsSlowAtFirst if store.ttl == Duration::from_millis(700) => {
                    tokio::time::sleep(store.ttl).await;
                    store.apply(operation, &id)
                }
                _ => store.apply(operation, &id),
            }
        })
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut under_way = self.shared.under_way.lock().unwrap();
        if let Some(at) = under_way.iter().position(|other| *other == self.command) {
            under_way.swap_remove(at);
            // One that was never polled is none.
            if !self.done {
                let question = usize::from(self.command.0 == Seen);
                (self.shared.questions_dropped).fetch_add(question, Ordering::SeqCst);
                (self.shared.command_was_dropped).store(true, Ordering::SeqCst);
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
        self.command(Seen, id)
    }

    fn remember(&self, id: &MessageId) -> BoxFuture<()> {
        Box::pin(self.command(Remember, id).map(|done| done.map(drop)))
    }

    fn forget(&self, id: &MessageId) -> BoxFuture<()> {
        Box::pin(self.command(Forget, id).map(|done| done.map(drop)))
    }
}

// ===== what the kit says of it =====

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
            assert_names(verdict(store_contract(faulty($fault))).await, &[$($part),+]);
        }
    )+ };
}

const BYTES: &str = "ids are compared by their bytes";

bites! {
    // Ids.
    folded_case: FoldsCase => [BYTES, "case", "seen → true, not false, mixed up with \""];
    trimmed_blanks: TrimsBlanks => [BYTES, "blanks", r#"mixed up with "a"#];
    cut_ids: CutsLongIds => [BYTES, "length", "xxx…xxx", " bytes)", "mixed up with \"xxx"];
    hashes_unescaped: HashesOnlyLongIds => [BYTES, "the hash of another id", "long-id-long"];
    a_pattern_in_forget: TakesStarForAll => [BYTES, r#"seen → false, not true, mixed up with "*""#];
    refused_ids: RefusesLongIds => [BYTES, "remember → an error, too long", " bytes)"];
    a_panic: PanicsAtLongIds => [" bytes)", "seen → a panic, out of space"];
    // Commands.
    a_record_that_is_not_empty: BeginsFull => ["never remembered is not seen"];
    asking_remembers: SeenRemembers => ["to ask for an id does not remember it"];
    remembers_nothing: RemembersNothing => ["what was remembered is seen"];
    remember_twice: RememberTwiceFails => ["may be sent twice", "an error, duplicate key"];
    forgets_nothing: ForgetsNothing => ["what was forgotten is not seen"];
    forgets_all: ForgetsAll => ["forget drops its own id and no other"];
    forget_of_nothing: ForgetOfNothingFails => ["to forget what is not there is no error"];
    forgotten_for_good: ForgetIsForGood => ["what was forgotten can be remembered again"];
    // Company.
    clones_apart: ClonesApart => ["clones share one record"];
    stays_with_its_task: StaysWithItsTask => ["polled by one task and then by another"];
    shifted_answers: ShiftsAnswers => ["each command gets its own answer"];
    two_at_once: TwoAtOnceFail => ["may be under way together", "an error, locked"];
    read_then_write: RewritesTheRecord => ["each command takes effect, whoever else works"];
    a_reply_left_behind: LeavesItsReply => ["a dropped command harms no other"];
    lost_after_a_drop: LosesAfterDrop => ["a dropped command harms no other", "seen → false"];
    // Time.
    a_huge_ttl: PanicsAtHugeTtl => ["a huge TTL means", "remember → a panic, overflow"];
    a_tiny_ttl: FailsAtTinyTtl => ["a TTL below a millisecond", "invalid expire time"];
    a_tiny_ttl_for_none: TakesTinyTtlForNone => ["a TTL below a millisecond", "seen → true"];
    ends_early: EndsEarly => ["until its TTL has passed", "into its TTL of"];
    never_renews: NeverRenews => ["remember starts the id's time anew"];
    asking_renews: SeenRenews => ["no longer seen at some time after its TTL"];
    never_expires: NeverExpires => ["no longer seen at some time after its TTL"];
    expired_for_good: KeepsTheExpired => ["an expired id can be remembered again"];
}

#[tokio::test]
async fn no_answer_at_all() {
    let kit = StoreContract::new(faulty(HangsAfterDrop)).store_timeout(Duration::from_secs(2));
    assert_names(
        verdict(kit.check()).await,
        &["a dropped command harms no other", "nothing within 2s"],
    );
}

#[tokio::test]
async fn without_a_fault_it_passes() {
    assert_eq!(verdict(store_contract(faulty(Nothing))).await, None);
}

#[tokio::test]
async fn what_was_too_slow_to_tell_is_tried_again() {
    let ttls = Mutex::new(Vec::new());
    let kit = StoreContract::new(async |ttl| {
        ttls.lock().unwrap().push(ttl);
        Faulty::open(IsSlowAtFirst, ttl)
    });
    assert_eq!(verdict(kit.check()).await, None);
    for millis in [700, 1400] {
        assert!(
            ttls.lock()
                .unwrap()
                .contains(&Duration::from_millis(millis))
        );
    }
}

// ===== stores with limits =====

/// What the kit says of a store that cannot hold long ids, and says so.
async fn verdict_on_short(fault: Fault) -> Option<String> {
    let kit = StoreContract::new(faulty(fault)).ids(|id| id.len() <= 255);
    verdict(kit.check()).await
}

#[tokio::test]
async fn ids_that_are_refused_do_no_harm() {
    const REFUSED: &str = "that the store cannot hold is refused by remember and never seen";
    let (passes, cuts, marks, clears, panics) = tokio::join!(
        verdict_on_short(RefusesLongIds),
        verdict_on_short(CutsLongIds),
        verdict_on_short(RefusesButMarks),
        verdict_on_short(RefusesAndClears),
        verdict_on_short(PanicsAtLongIds),
    );
    assert_eq!(passes, None);
    assert_names(cuts, &[REFUSED, "remember → Ok, not an error"]);
    assert_names(marks, &[REFUSED, "seen → true"]);
    assert_names(clears, &["cannot hold touches no other", "seen → false"]);
    assert_names(panics, &[REFUSED, "a panic, out of space"]);
}

#[tokio::test]
async fn a_record_without_expiry_is_not_watched() {
    let kit = StoreContract::new(faulty(NeverExpires)).no_expiry();
    assert_eq!(verdict(kit.check()).await, None);
}
