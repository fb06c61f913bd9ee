//! What a message costs over the shared stores: the layer beside the raw client that sends the same
//! commands one by one, on the same connection settings.
//!
//! `cargo bench --bench stores --all-features` takes some minutes and ends with tables of its own:
//! messages per second, the ratios, and whether each reaches its target. What is compared is the
//! best of several turns, which the contenders take in alternation.
//!
//! It needs the servers of `REDIS_URL`, `POSTGRES_URL` and `MYSQL_URL` (where they usually are, unless
//! set), says `skipped` of one that is not there, and works on tables and keys of its own. Without
//! `--bench`, or with `--test`, everything runs once, at sizes that show nothing.

mod rivals;

#[path = "../tests/support/services.rs"]
mod services;

use redis::AsyncCommands;
use rivals::{Random, Request};
use sqlx::{AssertSqlSafe, Executor, MySqlPool, PgPool, Pool, Row, SqlitePool};
use std::{
    collections::BTreeMap,
    env, fs,
    future::{Future, Ready, ready},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::watch;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_idempotency::{
    BoxError, ClaimStore, IdempotencyLayer, Lease, MemoryStore, MessageId, MySqlStore,
    PostgresStore, RedisStore, SqliteStore, Store, TransactionLayer, WithTransaction, event::Event,
    transaction::Dialect,
};

const IN_FLIGHT: [usize; 3] = [1, 16, 64];
const CONNECTIONS: u32 = 10;
const TTL: Duration = Duration::from_secs(24 * 3600);

type Deliver = Arc<dyn Fn(Request) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// Who delivers a message, its record being empty at first.
struct Contender {
    store: &'static str,
    name: &'static str,
    deliver: Deliver,
}

/// So many transactions are under way at most, each on a connection.
const TRANSACTIONS: usize = 16;

const LAYER: &str = "layer";
const CLAIM: &str = "claim";
const RAW: &str = "one by one";
const TRANSACTION: &str = "transaction";
const OWN: &str = "no record";
const BY_HAND: &str = "by hand";

// ===== the contenders =====

fn handle(_: Request) -> Ready<Result<(), BoxError>> {
    ready(Ok(()))
}

/// The layer in both modes, on one record.
fn layers<St: ClaimStore>(store: &'static str, record: St) -> [Contender; 2] {
    let layer = IdempotencyLayer::new(record)
        .id_from(|request: &Request| Some(MessageId::from(request.id.as_str())));
    let lease = Lease::new(Duration::from_secs(60)).expect("a lease");
    [
        contender(store, LAYER, layer.clone().layer(service_fn(handle))),
        contender(store, CLAIM, layer.claim(lease).layer(service_fn(handle))),
    ]
}

fn contender<S>(store: &'static str, name: &'static str, service: S) -> Contender
where
    S: Service<Request, Response = (), Error = BoxError, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
{
    Contender {
        store,
        name,
        deliver: Arc::new(move |request| {
            let mut service = service.clone();
            Box::pin(async move {
                let ready = service.ready().await.expect("ready");
                ready.call(request).await.expect("an answer");
            })
        }),
    }
}

/// What people write in the place of the layer.
fn raw<F, G>(
    store: &'static str,
    seen: impl Fn(String) -> F + Send + Sync + 'static,
    remember: impl Fn(String) -> G + Send + Sync + 'static,
) -> Contender
where
    F: Future<Output = bool> + Send + 'static,
    G: Future<Output = ()> + Send + 'static,
{
    let (seen, remember) = (Arc::new(seen), Arc::new(remember));
    Contender {
        store,
        name: RAW,
        deliver: Arc::new(move |request| {
            let (seen, remember) = (seen.clone(), remember.clone());
            Box::pin(async move {
                if seen(request.id.clone()).await {
                    return;
                }
                let id = request.id.clone();
                handle(request).await.expect("handled");
                remember(id).await;
            })
        }),
    }
}

async fn redis() -> Option<[Contender; 3]> {
    let url = services::redis()?;
    let prefix = services::unique("bench");
    let store = RedisStore::connect(&url, format!("{prefix}:l:"))
        .await
        .expect("a store");
    let client = redis::Client::open(url).expect("a client");
    let connection = client
        .get_multiplexed_async_connection()
        .await
        .expect("a connection");
    let (ask, tell) = (connection.clone(), connection);
    let ours = prefix.clone();
    let raw = raw(
        "Redis",
        move |id| {
            let (mut connection, key) = (ask.clone(), format!("{ours}:r:{id}"));
            async move {
                let value: Option<String> = connection.get(key).await.expect("an answer");
                value.as_deref() == Some("2")
            }
        },
        move |id| {
            let (mut connection, key) = (tell.clone(), format!("{prefix}:r:{id}"));
            async move {
                let ttl = TTL.as_millis() as u64;
                let (): () = connection.pset_ex(key, "2", ttl).await.expect("remembered");
            }
        },
    );
    let [seen_set, claim] = layers("Redis", store);
    Some([seen_set, claim, raw])
}

async fn postgres() -> Option<([Contender; 3], PgPool, [String; 2])> {
    let url = services::postgres()?;
    let tables = [services::unique("bench_l"), services::unique("bench_r")];
    let mut pools = Vec::new();
    for table in &tables {
        let options = sqlx::postgres::PgPoolOptions::new().max_connections(CONNECTIONS);
        let pool = options.connect(&url).await.expect("a pool");
        let store = PostgresStore::builder(table)
            .pool(pool.clone())
            .expect("a store");
        store.migrate().await.expect("a table");
        pools.push(pool);
    }
    let store = PostgresStore::builder(&tables[0]).ttl(TTL);
    let store = store.pool(pools[0].clone()).expect("a store");
    let pool = pools.remove(1);
    let (ask, tell) = (pool.clone(), pool.clone());
    let now = "(extract(epoch from clock_timestamp()) * 1000000)::bigint";
    let table = &tables[1];
    let select: Arc<str> = format!(
        "SELECT 1 FROM {table} WHERE message_id = $1 AND state = 'done' AND (expires_at IS NULL OR expires_at > {now})"
    )
    .into();
    let upsert: Arc<str> = format!(
        "INSERT INTO {table} (message_id, state, since, expires_at) VALUES ($1, 'done', {now}, {now} + $2) \
         ON CONFLICT (message_id) DO UPDATE SET state = 'done', owner = NULL, since = {now}, expires_at = {now} + $2"
    )
    .into();
    let raw = raw(
        "PostgreSQL",
        move |id| {
            let (pool, select) = (ask.clone(), select.clone());
            async move {
                let row = sqlx::query(AssertSqlSafe(select))
                    .bind(id)
                    .fetch_optional(&pool)
                    .await;
                row.expect("an answer").is_some()
            }
        },
        move |id| {
            let (pool, upsert) = (tell.clone(), upsert.clone());
            async move {
                let query = sqlx::query(AssertSqlSafe(upsert)).bind(id);
                query
                    .bind(TTL.as_micros() as i64)
                    .execute(&pool)
                    .await
                    .expect("remembered");
            }
        },
    );
    let [seen_set, claim] = layers("PostgreSQL", store);
    Some(([seen_set, claim, raw], pool, tables))
}

async fn mysql() -> Option<([Contender; 3], MySqlPool, [String; 2])> {
    let url = services::mysql()?;
    let tables = [services::unique("bench_l"), services::unique("bench_r")];
    let options = sqlx::mysql::MySqlPoolOptions::new().max_connections(CONNECTIONS);
    let pool = options.clone().connect(&url).await.expect("a pool");
    for table in &tables {
        let store = MySqlStore::builder(table)
            .pool(pool.clone())
            .expect("a store");
        store.migrate().await.expect("a table");
    }
    let own = options.connect(&url).await.expect("a pool");
    let store = MySqlStore::builder(&tables[0])
        .ttl(TTL)
        .pool(own)
        .expect("a store");
    let (ask, tell) = (pool.clone(), pool.clone());
    let now = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";
    let table = &tables[1];
    let select: Arc<str> = format!(
        "SELECT 1 FROM {table} WHERE message_id = ? AND state = 'done' AND (expires_at IS NULL OR expires_at > {now})"
    )
    .into();
    let upsert: Arc<str> = format!(
        "INSERT INTO {table} (message_id, state, since, expires_at) VALUES (?, 'done', {now}, {now} + ?) \
         ON DUPLICATE KEY UPDATE state = 'done', owner = NULL, since = {now}, expires_at = {now} + ?"
    )
    .into();
    let raw = raw(
        "MariaDB",
        move |id| {
            let (pool, select) = (ask.clone(), select.clone());
            async move {
                let row = sqlx::query(AssertSqlSafe(select))
                    .bind(id)
                    .fetch_optional(&pool)
                    .await;
                row.expect("an answer").is_some()
            }
        },
        move |id| {
            let (pool, upsert) = (tell.clone(), upsert.clone());
            async move {
                let ttl = TTL.as_micros() as i64;
                let query = sqlx::query(AssertSqlSafe(upsert))
                    .bind(id)
                    .bind(ttl)
                    .bind(ttl);
                query.execute(&pool).await.expect("remembered");
            }
        },
    );
    let [seen_set, claim] = layers("MariaDB", store);
    Some(([seen_set, claim, raw], pool, tables))
}

async fn sqlite(folder: &std::path::Path) -> ([Contender; 3], SqlitePool) {
    let url = |name: &str| format!("sqlite://{}", folder.join(name).display());
    let store = SqliteStore::builder("seen")
        .ttl(TTL)
        .connect(&url("layer.db"))
        .await
        .expect("a store");
    store.migrate().await.expect("a table");
    let twin = SqliteStore::connect(&url("raw.db"), "seen")
        .await
        .expect("a store");
    twin.migrate().await.expect("a table");
    let options: sqlx::sqlite::SqliteConnectOptions = url("raw.db").parse().expect("options");
    let options = options
        .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
        .synchronous(sqlx::sqlite::SqliteSynchronous::Normal)
        .busy_timeout(Duration::from_secs(4))
        // As the store has it.
        .pragma("wal_autocheckpoint", "32768");
    let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(CONNECTIONS);
    let pool = pool.connect_with(options).await.expect("a pool");
    let (ask, tell) = (pool.clone(), pool.clone());
    let now = "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000";
    let select: Arc<str> = format!(
        "SELECT 1 FROM seen WHERE message_id = ?1 AND state = 'done' AND (expires_at IS NULL OR expires_at > {now})"
    )
    .into();
    let upsert: Arc<str> = format!(
        "INSERT INTO seen (message_id, state, since, expires_at) VALUES (?1, 'done', {now}, {now} + ?2) \
         ON CONFLICT (message_id) DO UPDATE SET state = 'done', owner = NULL, since = {now}, expires_at = {now} + ?2"
    )
    .into();
    let raw = raw(
        "SQLite",
        move |id| {
            let (pool, select) = (ask.clone(), select.clone());
            async move {
                let row = sqlx::query(AssertSqlSafe(select))
                    .bind(id)
                    .fetch_optional(&pool)
                    .await;
                row.expect("an answer").is_some()
            }
        },
        move |id| {
            let (pool, upsert) = (tell.clone(), upsert.clone());
            async move {
                let query = sqlx::query(AssertSqlSafe(upsert)).bind(id);
                query
                    .bind(TTL.as_micros() as i64)
                    .execute(&pool)
                    .await
                    .expect("remembered");
            }
        },
    );
    let [seen_set, claim] = layers("SQLite", store);
    ([seen_set, claim, raw], pool)
}

// ===== the turns =====

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stream {
    First,
    Duplicate,
}

/// Delivers with so many under way at once, for about so long; messages per second.
async fn turn(
    deliver: &Deliver,
    in_flight: usize,
    length: Duration,
    message: impl Fn() -> Request + Clone + Send + 'static,
) -> f64 {
    let done = Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let workers: Vec<_> = (0..in_flight)
        .map(|_| {
            let (deliver, done, message) = (deliver.clone(), done.clone(), message.clone());
            tokio::spawn(async move {
                while start.elapsed() < length {
                    deliver(message()).await;
                    done.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.expect("a worker");
    }
    done.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64()
}

fn fresh() -> Request {
    Request {
        id: MessageId::random().to_string(),
        cents: 9990,
    }
}

/// Messages per second, the best turn of each.
type Figures = BTreeMap<(&'static str, Stream, usize, &'static str), f64>;

async fn compete(contenders: &[Contender], size: &Size, figures: &mut Figures) {
    let mut random = Random(7);
    let known: Arc<Vec<String>> = (0..size.known)
        .map(|_| random.uuid().hyphenated().to_string())
        .collect::<Vec<_>>()
        .into();
    for contender in contenders {
        for id in known.iter() {
            let (id, cents) = (id.clone(), 9990);
            (contender.deliver)(Request { id, cents }).await;
        }
    }
    for in_flight in IN_FLIGHT {
        for _ in 0..size.turns {
            for contender in contenders {
                let first = turn(&contender.deliver, in_flight, size.length, fresh).await;
                let (next, ids) = (Arc::new(AtomicUsize::new(0)), known.clone());
                let again = move || Request {
                    id: ids[next.fetch_add(1, Ordering::Relaxed) % ids.len()].clone(),
                    cents: 9990,
                };
                let duplicate = turn(&contender.deliver, in_flight, size.length, again).await;
                for (stream, figure) in [(Stream::First, first), (Stream::Duplicate, duplicate)] {
                    let key = (contender.store, stream, in_flight, contender.name);
                    let best = figures.entry(key).or_default();
                    *best = best.max(figure);
                }
            }
        }
    }
}

// ===== large tables =====

/// A table of so many rows, and some of its ids.
async fn filled(pool: &PgPool, rows: u64, size: &Size) -> (String, PostgresStore, Vec<MessageId>) {
    let table = services::unique("bench_n");
    let store = PostgresStore::builder(&table)
        .pool(pool.clone())
        .expect("a store");
    store.migrate().await.expect("a table");
    let fill = format!(
        "INSERT INTO {table} SELECT gen_random_uuid()::text, 'done', NULL, 0, \
         (extract(epoch from clock_timestamp()) * 1000000)::bigint + 86400000000 FROM generate_series(1, {rows})"
    );
    run(pool, &fill).await;
    run(pool, &format!("VACUUM ANALYZE {table}")).await;
    let some = format!("SELECT message_id FROM {table} LIMIT {}", size.known);
    let some = pool.fetch_all(sqlx::raw_sql(AssertSqlSafe(some))).await;
    let ids = some.expect("ids");
    let ids = ids
        .iter()
        .map(|row| MessageId::from(row.get::<&str, _>(0)))
        .collect();
    (table, store, ids)
}

/// How long `seen` takes among few rows and among many, in microseconds; the best of some turns.
async fn seen_among(pool: &PgPool, few: u64, many: u64, size: &Size) -> [f64; 2] {
    let tables = [
        filled(pool, few, size).await,
        filled(pool, many, size).await,
    ];
    // What filling them left to write would be written meanwhile.
    run(pool, "CHECKPOINT").await;
    let mut best = [f64::MAX; 2];
    for _ in 0..=2 * size.turns {
        for (best, (_, store, ids)) in best.iter_mut().zip(&tables) {
            let start = Instant::now();
            for id in ids {
                assert!(store.seen(id).await.expect("an answer"));
            }
            let each = start.elapsed().as_secs_f64() * 1e6 / ids.len() as f64;
            *best = best.min(each);
        }
    }
    for (table, ..) in &tables {
        run(pool, &format!("DROP TABLE {table}")).await;
    }
    best
}

/// Purges so many rows while others mark; how long in all, and the slowest mark, in milliseconds.
async fn purge(pool: &PgPool, rows: u64) -> (f64, f64) {
    let table = services::unique("bench_p");
    let store = PostgresStore::builder(&table)
        .pool(pool.clone())
        .expect("a store");
    store.migrate().await.expect("a table");
    let fill = format!(
        "INSERT INTO {table} SELECT n::text, 'done', NULL, 0, n FROM generate_series(1, {rows}) AS n"
    );
    run(pool, &fill).await;
    let purging = tokio::spawn({
        let store = store.clone();
        async move {
            let start = Instant::now();
            let deleted = store.purge().await.expect("purged");
            (start.elapsed(), deleted)
        }
    });
    let mut slowest = Duration::ZERO;
    let mut marked: u64 = 0;
    while !purging.is_finished() {
        // Of those that are about to be deleted, and so are locked now and then.
        marked += 1;
        let id = MessageId::from((rows - marked % rows).to_string());
        let start = Instant::now();
        store.remember(&id).await.expect("remembered");
        slowest = slowest.max(start.elapsed());
    }
    let (took, deleted) = purging.await.expect("purged");
    assert!(deleted <= rows && deleted + marked >= rows);
    run(pool, &format!("DROP TABLE {table}")).await;
    (took.as_secs_f64() * 1e3, slowest.as_secs_f64() * 1e3)
}

async fn run(pool: &PgPool, statement: &str) {
    let done = pool.execute(sqlx::raw_sql(AssertSqlSafe(statement.to_owned())));
    done.await.expect(statement);
}

// ===== claims that are held =====

/// Holds so many claims at once, and answers which part of one core the process takes meanwhile, the
/// share of the server aside. Each is renewed once in that time.
async fn held<St: ClaimStore>(store: St, size: &Size) -> f64 {
    let lease = Lease::new(size.lease).expect("a lease");
    let (end, ended) = watch::channel(false);
    let begun = Arc::new(AtomicUsize::new(0));
    let handler = {
        let (begun, ended) = (begun.clone(), ended.clone());
        service_fn(move |_: Request| {
            begun.fetch_add(1, Ordering::Relaxed);
            let mut ended = ended.clone();
            async move {
                let ended = ended.wait_for(|ended| *ended).await;
                ended.map(drop).map_err(BoxError::from)
            }
        })
    };
    let lost = Arc::new(AtomicUsize::new(0));
    let count = lost.clone();
    let service = IdempotencyLayer::new(store)
        .on_event(move |event| {
            if let Event::LeaseLost { .. } = event {
                count.fetch_add(1, Ordering::Relaxed);
            }
        })
        .id_from(|request: &Request| Some(MessageId::from(request.id.as_str())))
        .claim(lease)
        .layer(handler);
    let calls: Vec<_> = (0..size.held)
        .map(|_| tokio::spawn(service.clone().oneshot(fresh())))
        .collect();
    while begun.load(Ordering::Relaxed) < size.held {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (start, before) = (Instant::now(), cpu_time());
    tokio::time::sleep(lease.renewed_every()).await;
    let share = (cpu_time() - before).as_secs_f64() / start.elapsed().as_secs_f64();
    end.send_replace(true);
    for call in calls {
        call.await.expect("no panic").expect("an answer");
    }
    assert_eq!(lost.load(Ordering::Relaxed), 0, "a lease was lost");
    share
}

/// What the process has used, of all its threads.
fn cpu_time() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Behind the name, which may contain blanks: the fields 14 and 15, in hundredths of a second.
    let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
    let ticks = fields
        .skip(11)
        .take(2)
        .filter_map(|it| it.parse::<u64>().ok());
    Duration::from_millis(10 * ticks.sum::<u64>())
}

// ===== the transactional mode =====

/// A database that handlers write to.
trait Books: Dialect {
    const STORE: &'static str;
    const BEGIN: &'static str;
    /// The parameters of a statement.
    const VALUES: [&'static str; 2];
    /// How a copy is noticed by hand.
    const INSERT_NEW: [&'static str; 2];

    /// One statement.
    fn book(
        connection: &mut Self::Connection,
        statement: Arc<str>,
        number: i64,
        id: String,
    ) -> impl Future<Output = ()> + Send;

    fn run(pool: &Pool<Self>, statement: String) -> impl Future<Output = ()> + Send;
}

/// Written once for each: sqlx has no bound that says this of any database.
macro_rules! books {
    ($db:ty, $connection:ty, $name:literal, $begin:literal, $values:expr, $insert_new:expr) => {
        impl Books for $db {
            const STORE: &'static str = $name;
            const BEGIN: &'static str = $begin;
            const VALUES: [&'static str; 2] = $values;
            const INSERT_NEW: [&'static str; 2] = $insert_new;

            async fn book(
                connection: &mut $connection,
                statement: Arc<str>,
                number: i64,
                id: String,
            ) {
                let query = sqlx::query(AssertSqlSafe(statement)).bind(number).bind(id);
                query.execute(connection).await.expect("booked");
            }

            async fn run(pool: &Pool<Self>, statement: String) {
                let done = pool.execute(sqlx::raw_sql(AssertSqlSafe(statement.clone())));
                done.await.expect(&statement);
            }
        }
    };
}

books!(
    sqlx::Postgres,
    sqlx::PgConnection,
    "PostgreSQL",
    "BEGIN",
    ["$1", "$2"],
    ["INSERT", "ON CONFLICT DO NOTHING"]
);
books!(
    sqlx::MySql,
    sqlx::MySqlConnection,
    "MariaDB",
    "BEGIN",
    ["?", "?"],
    ["INSERT IGNORE", ""]
);
books!(
    sqlx::Sqlite,
    sqlx::SqliteConnection,
    "SQLite",
    "BEGIN IMMEDIATE",
    ["?1", "?2"],
    ["INSERT", "ON CONFLICT DO NOTHING"]
);

/// What a handler writes: so many accounts by their key, so many rows with a key of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Handler {
    accounts: usize,
    rows: usize,
}

/// A ledger's line; a transfer; an order with three lines, its stock and an outbox.
const HANDLERS: [Handler; 3] = [
    Handler {
        accounts: 0,
        rows: 1,
    },
    Handler {
        accounts: 2,
        rows: 1,
    },
    Handler {
        accounts: 3,
        rows: 5,
    },
];

const ACCOUNTS: usize = 10_000;

/// The tables and statements of one contender.
struct Statements {
    insert: Arc<str>,
    update: Arc<str>,
    /// Of a record by hand.
    record: [Arc<str>; 2],
}

impl Statements {
    async fn new<DB: Books>(pool: &Pool<DB>, name: &str) -> Self {
        let [number, id] = DB::VALUES;
        let table = "(number BIGINT, id VARCHAR(48) NOT NULL PRIMARY KEY)";
        for end in ["rows", "accounts"] {
            DB::run(pool, format!("CREATE TABLE {name}_{end} {table}")).await;
        }
        let accounts: Vec<String> = (0..ACCOUNTS)
            .map(|n| format!("(0, 'account {n}')"))
            .collect();
        let fill = format!("INSERT INTO {name}_accounts VALUES {}", accounts.join(","));
        DB::run(pool, fill).await;
        let [insert, end] = DB::INSERT_NEW;
        Statements {
            insert: format!("INSERT INTO {name}_rows VALUES ({number}, {id})").into(),
            update: format!(
                "UPDATE {name}_accounts SET number = number + {number} WHERE id = {id}"
            )
            .into(),
            record: [
                format!(
                    "{insert} INTO {name} (since, message_id, state, expires_at) \
                     VALUES ({number}, {id}, 'claimed', 0) {end}"
                )
                .into(),
                format!(
                    "UPDATE {name} SET state = 'done', expires_at = {number} WHERE message_id = {id}"
                )
                .into(),
            ],
        }
    }

    async fn handle<DB: Books>(
        &self,
        handler: Handler,
        connection: &mut DB::Connection,
        id: String,
    ) {
        // In the order of the accounts, so that no two wait for each other.
        let mut accounts: Vec<usize> = (0..handler.accounts)
            .map(|_| rand::random_range(0..ACCOUNTS))
            .collect();
        accounts.sort_unstable();
        for account in accounts {
            let account = format!("account {account}");
            DB::book(connection, self.update.clone(), 1, account).await;
        }
        for row in 0..handler.rows {
            DB::book(connection, self.insert.clone(), 1, format!("{id} {row}")).await;
        }
    }
}

/// Handlers that write in the transaction they are lent, beside the same ones with a transaction of their own:
/// without any record, and with one that is kept by hand, by two plain statements.
async fn transactions<DB: Books>(pool: Pool<DB>, size: &Size, figures: &mut Transactions) {
    let mut names = Vec::new();
    let mut statements = Vec::new();
    for whose in [TRANSACTION, OWN, BY_HAND] {
        let name = services::unique("bench_t");
        let layer = TransactionLayer::new(pool.clone(), &name).expect("a layer");
        layer.migrate().await.expect("a table");
        statements.push((whose, layer, Arc::new(Statements::new(&pool, &name).await)));
        names.push(name);
    }
    for handler in HANDLERS {
        let contenders: Vec<Contender> = statements
            .iter()
            .map(|(whose, layer, statements)| {
                let statements = statements.clone();
                if *whose == TRANSACTION {
                    let service = service_fn(move |message: WithTransaction<Request, DB>| {
                        let statements = statements.clone();
                        async move {
                            let WithTransaction {
                                request,
                                mut transaction,
                            } = message;
                            statements
                                .handle::<DB>(handler, &mut transaction, request.id)
                                .await;
                            Ok::<_, BoxError>(())
                        }
                    });
                    let layer = layer
                        .clone()
                        .id_from(|request: &Request| Some(MessageId::from(&*request.id)));
                    return contender(DB::STORE, whose, layer.layer(service));
                }
                let (pool, by_hand) = (pool.clone(), *whose == BY_HAND);
                let deliver: Deliver = Arc::new(move |request| {
                    let (pool, statements) = (pool.clone(), statements.clone());
                    Box::pin(async move {
                        let id = request.id;
                        let [claim, close] = &statements.record;
                        let mut transaction = pool.begin_with(DB::BEGIN).await.expect("begun");
                        if by_hand {
                            DB::book(&mut transaction, claim.clone(), 1, id.clone()).await;
                        }
                        let handled =
                            statements.handle::<DB>(handler, &mut transaction, id.clone());
                        handled.await;
                        if by_hand {
                            DB::book(&mut transaction, close.clone(), 1, id).await;
                        }
                        transaction.commit().await.expect("committed");
                    })
                });
                Contender {
                    store: DB::STORE,
                    name: whose,
                    deliver,
                }
            })
            .collect();
        for in_flight in [1, TRANSACTIONS] {
            for _ in 0..size.turns {
                for contender in &contenders {
                    let figure = turn(&contender.deliver, in_flight, size.length, fresh).await;
                    let key = (DB::STORE, handler, in_flight, contender.name);
                    let best = figures.entry(key).or_default();
                    *best = best.max(figure);
                }
            }
        }
    }
    for name in names {
        for end in ["", "_rows", "_accounts"] {
            DB::run(&pool, format!("DROP TABLE {name}{end}")).await;
        }
    }
    pool.close().await;
}

/// Messages per second, the best turn of each.
type Transactions = BTreeMap<(&'static str, Handler, usize, &'static str), f64>;

// ===== what is printed =====

fn table(figures: &Figures) {
    println!("\nmessages per second, the best turn\n");
    println!(
        "{:<12}{:>10}{:>12}{:>14}{:>14}{:>8}{:>14}",
        "", "in flight", "", LAYER, RAW, "ratio", CLAIM
    );
    for (&(store, stream, in_flight, name), &figure) in figures {
        if name == LAYER {
            let raw = figures[&(store, stream, in_flight, RAW)];
            let claim = figures[&(store, stream, in_flight, CLAIM)];
            let stream = format!("{stream:?}").to_lowercase();
            println!(
                "{store:<12}{in_flight:>10}{stream:>12}{figure:>14.0}{raw:>14.0}{:>8.2}{claim:>14.0}",
                figure / raw
            );
        }
    }
    println!();
}

fn transactions_table(figures: &Transactions) {
    println!(
        "{:<12}{:>12}{:>10}{:>14}{:>12}{:>8}{:>12}{:>8}",
        "", "statements", "in flight", TRANSACTION, OWN, "ratio", BY_HAND, "ratio"
    );
    for (&(store, handler, in_flight, name), &ours) in figures {
        if name == TRANSACTION {
            let [own, by_hand] =
                [OWN, BY_HAND].map(|name| figures[&(store, handler, in_flight, name)]);
            let statements = handler.accounts + handler.rows;
            println!(
                "{store:<12}{statements:>12}{in_flight:>10}{ours:>14.0}{own:>12.0}{:>8.2}{by_hand:>12.0}{:>8.2}",
                ours / own,
                ours / by_hand
            );
        }
    }
    println!();
}

/// A figure beside what it should be.
fn judge(name: &str, figure: f64, target: f64, at_least: bool) {
    let reached = (figure >= target) == at_least;
    let sign = if at_least { ">=" } else { "<=" };
    let verdict = if reached { "ok" } else { "missed" };
    println!("{name:<66} {figure:>8.2}   {sign} {target:.1}   {verdict}");
}

struct Size {
    known: usize,
    turns: usize,
    length: Duration,
    many: u64,
    expired: u64,
    held: usize,
    lease: Duration,
}

const FULL: Size = Size {
    known: 2000,
    turns: 6,
    length: Duration::from_millis(700),
    many: 5_000_000,
    expired: 1_000_000,
    held: 10_000,
    lease: Duration::from_secs(60),
};

const TEST: Size = Size {
    known: 20,
    turns: 1,
    length: Duration::from_millis(10),
    many: 2000,
    expired: 3000,
    held: 50,
    lease: Duration::from_secs(3),
};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let args: Vec<String> = env::args().collect();
    let full = args.iter().any(|arg| arg == "--bench") && !args.iter().any(|arg| arg == "--test");
    let size = if full { FULL } else { TEST };
    let wanted = |name: &str| {
        let filter = args.iter().skip(1).find(|arg| !arg.starts_with('-'));
        filter.is_none_or(|filter| name.contains(filter.as_str()))
    };
    let mut figures = Figures::new();
    let mut transacted = Transactions::new();
    let mut others = Vec::new();

    if wanted("redis") {
        if let Some(contenders) = redis().await {
            compete(&contenders, &size, &mut figures).await;
        }
    }
    if wanted("postgres") {
        if let Some((contenders, pool, tables)) = postgres().await {
            compete(&contenders, &size, &mut figures).await;
            for table in tables {
                run(&pool, &format!("DROP TABLE {table}")).await;
            }
            let [few, many] = seen_among(&pool, 1000, size.many, &size).await;
            println!(
                "PostgreSQL: seen takes {few:.0} us among 1000 rows, {many:.0} us among {}",
                size.many
            );
            others.push((
                "PostgreSQL: seen among many rows beside few",
                many / few,
                1.3,
                false,
            ));
            let (took, slowest) = purge(&pool, size.expired).await;
            println!(
                "PostgreSQL: {} expired rows purged in {took:.0} ms; the slowest mark beside it took {slowest:.1} ms",
                size.expired
            );
        }
    }
    if wanted("mysql") {
        if let Some((contenders, pool, tables)) = mysql().await {
            compete(&contenders, &size, &mut figures).await;
            for table in tables {
                let drop = format!("DROP TABLE {table}");
                pool.execute(sqlx::raw_sql(AssertSqlSafe(drop)))
                    .await
                    .expect("dropped");
            }
        }
    }
    if wanted("sqlite") {
        let folder = env::temp_dir().join(services::unique("bench"));
        fs::create_dir(&folder).expect("a folder");
        let (contenders, pool) = sqlite(&folder).await;
        compete(&contenders, &size, &mut figures).await;
        pool.close().await;
        let _ = fs::remove_dir_all(&folder);
    }

    if wanted("held") {
        let claims = format!("{} claims held for {:?}", size.held, size.lease);
        let mut shares = vec![("memory", held(MemoryStore::new(), &size).await)];
        if let Some(url) = services::redis() {
            let prefix = services::unique("bench");
            let store = RedisStore::builder(prefix).ttl(Duration::from_secs(60));
            let store = store.connect(&url).await.expect("a store");
            shares.push(("Redis", held(store, &size).await));
        }
        if let Some(url) = services::postgres() {
            let table = services::unique("bench_h");
            let store = PostgresStore::connect(&url, &table).await.expect("a store");
            store.migrate().await.expect("a table");
            shares.push(("PostgreSQL", held(store, &size).await));
            let pool = PgPool::connect(&url).await.expect("a pool");
            run(&pool, &format!("DROP TABLE {table}")).await;
        }
        for (store, share) in shares {
            let what = format!("{claims} in {store}: percent of one core");
            judge(&what, 100.0 * share, 5.0, false);
        }
    }

    if wanted("transaction") {
        let connections = TRANSACTIONS as u32;
        if let Some(url) = services::postgres() {
            let pool = sqlx::postgres::PgPoolOptions::new().max_connections(connections);
            let pool = pool.connect(&url).await.expect("a pool");
            transactions(pool, &size, &mut transacted).await;
        }
        if let Some(url) = services::mysql() {
            let pool = sqlx::mysql::MySqlPoolOptions::new().max_connections(connections);
            let pool = pool.connect(&url).await.expect("a pool");
            transactions(pool, &size, &mut transacted).await;
        }
        let folder = env::temp_dir().join(services::unique("bench"));
        fs::create_dir(&folder).expect("a folder");
        let options = sqlx::sqlite::SqliteConnectOptions::new()
            .filename(folder.join("shop.db"))
            .create_if_missing(true)
            .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
            .synchronous(sqlx::sqlite::SqliteSynchronous::Normal)
            .busy_timeout(Duration::from_secs(4))
            // As a store's own pool has it.
            .page_size(1024)
            .pragma("wal_autocheckpoint", "32768");
        let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(connections);
        let pool = pool.connect_with(options).await.expect("a pool");
        transactions(pool, &size, &mut transacted).await;
        let _ = fs::remove_dir_all(&folder);
    }

    table(&figures);
    let ratio = |store, stream, in_flight| {
        let layer = figures.get(&(store, stream, in_flight, LAYER))?;
        Some(layer / figures.get(&(store, stream, in_flight, RAW))?)
    };
    transactions_table(&transacted);
    for (&(store, handler, in_flight, name), &figure) in &transacted {
        if name == TRANSACTION && in_flight == TRANSACTIONS {
            let own = transacted[&(store, handler, in_flight, OWN)];
            let statements = handler.accounts + handler.rows;
            let what =
                format!("{store}, 16 in flight, {statements} statements: beside no record at all");
            judge(&what, figure / own, 0.7, true);
        }
    }
    for (name, store, in_flight, target) in [
        (
            "Redis, 64 in flight: new messages beside the raw client",
            "Redis",
            64,
            0.8,
        ),
        (
            "PostgreSQL, 64 in flight: beside one statement per operation",
            "PostgreSQL",
            64,
            6.0,
        ),
        (
            "PostgreSQL, 1 in flight: beside one statement per operation",
            "PostgreSQL",
            1,
            0.9,
        ),
        (
            "SQLite, 64 in flight: beside one transaction per operation",
            "SQLite",
            64,
            10.0,
        ),
    ] {
        if let Some(figure) = ratio(store, Stream::First, in_flight) {
            judge(name, figure, target, true);
        }
    }
    for (name, figure, target, at_least) in others {
        judge(name, figure, target, at_least);
    }
}
