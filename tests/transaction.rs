//! The transactional mode on each database: a message's effect and its record happen together, whoever is
//! in the way.

#[path = "support/services.rs"]
mod services;
#[path = "support/statements.rs"]
mod statements;
#[path = "support/world.rs"]
mod world;

use services::{Bouncer, PATIENCE};
use sqlx::{Pool, sqlite::SqlitePoolOptions};
use std::{
    error::Error,
    fmt,
    future::Future,
    panic::panic_any,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::{Barrier, Semaphore, watch},
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{
    BoxError, Envelope, MessageId, Outcome, Parked, Store, StoreError, TransactionLayer,
    Unfinished, WithTransaction,
    error::{BackendError, BackendErrorKind, Operation, UnfinishedCause, is_transient},
    event::Event,
    store::{Claim, ClaimStore, Lease, Owner},
    transaction::{Isolation, LentTransaction},
};
use world::{Open, World};

const OTHER: Owner = Owner::from_bits(0xB << 100);

/// The TTL unless a test says otherwise, in microseconds.
const DAY: i64 = 24 * 3600 * 1_000_000;

/// As long as no test takes.
const HOUR: Duration = Duration::from_secs(3600);

/// Of the server's clock, in microseconds.
const SECOND: i64 = 1_000_000;

const LEVELS: [Option<Isolation>; 4] = [
    None,
    Some(Isolation::ReadCommitted),
    Some(Isolation::RepeatableRead),
    Some(Isolation::Serializable),
];

/// A message is its id, if it has one.
type Job = Option<String>;
type Answer = Result<Outcome<()>, BoxError>;
type Lent<W> = LentTransaction<<W as World>::Db>;
type Transactions<W> = TransactionLayer<<W as World>::Db, fn(&Job) -> Job>;
type Work = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

fn by_itself(job: &Job) -> Job {
    job.clone()
}

fn id(text: &str) -> MessageId {
    MessageId::from(text)
}

// ===== a consumer =====

/// A consumer, with a table of effects and one of numbers.
struct Desk<W: World> {
    world: W,
    pool: Pool<W::Db>,
    layer: Transactions<W>,
    told: Arc<Mutex<Vec<String>>>,
}

impl<W: World> Desk<W> {
    async fn open(name: &str, connections: u32) -> Option<Self> {
        let world = W::open(name).await?;
        let pool = world.pool(connections).await;
        Some(Desk::on(world, pool).await)
    }

    async fn on(world: W, pool: Pool<W::Db>) -> Self {
        let layer = TransactionLayer::new(pool.clone(), world.table()).unwrap();
        Desk::with(world, pool, layer).await
    }

    async fn with(world: W, pool: Pool<W::Db>, layer: TransactionLayer<W::Db>) -> Self {
        for statement in [
            "CREATE TABLE {t}_l (id VARCHAR(99) NOT NULL)",
            "CREATE TABLE {t}_n (id INT NOT NULL PRIMARY KEY, n BIGINT NOT NULL)",
            "INSERT INTO {t}_n VALUES (1, 0), (2, 0)",
        ] {
            world.run(statement).await;
        }
        let told = Arc::new(Mutex::new(Vec::new()));
        let list = told.clone();
        let layer = layer
            .id_from(by_itself as fn(&Job) -> Job)
            .on_event(move |event| list.lock().unwrap().push(spelled(event)));
        Desk {
            world,
            pool,
            layer,
            told,
        }
    }

    /// Another layer on the same table.
    fn layer(&self, level: Option<Isolation>) -> Transactions<W> {
        match level {
            Some(level) => self.layer.clone().isolation(level),
            None => self.layer.clone(),
        }
    }

    /// What was told since this was asked last.
    fn told(&self) -> Vec<String> {
        std::mem::take(&mut self.told.lock().unwrap())
    }

    /// How often a message had its effect.
    async fn effects(&self, id: &str) -> i64 {
        let statement = format!("SELECT count(*) FROM {{t}}_l WHERE id = '{id}'");
        self.world.ask(&statement).await
    }

    async fn number(&self, of: i64) -> i64 {
        let statement = format!("SELECT n FROM {{t}}_n WHERE id = {of}");
        self.world.ask(&statement).await
    }

    /// A statement for a handler.
    fn spelled(&self, statement: &str) -> String {
        let statement = statement.replace("{t}", self.world.table());
        statement.replace("{now}", W::NOW)
    }

    /// Runs these statements one after the other.
    fn does(&self, statements: &[&str]) -> impl Fn(Lent<W>) -> Work + Clone + Send + use<W> {
        let statements: Vec<String> = statements.iter().map(|it| self.spelled(it)).collect();
        move |mut lent| {
            let statements = statements.clone();
            Box::pin(async move {
                for statement in statements {
                    W::execute(&mut lent, statement).await?;
                }
                Ok(())
            })
        }
    }

    /// Has its effect.
    fn books(&self, id: &str) -> impl Fn(Lent<W>) -> Work + Clone + Send + use<W> {
        self.does(&[&format!("INSERT INTO {{t}}_l VALUES ('{id}')")])
    }

    /// Has its effect, and ends when and as the gate says.
    fn books_at(&self, gate: &Gate, id: &str) -> impl Fn(Lent<W>) -> Work + Clone + Send + use<W> {
        let (gate, statement) = (gate.clone(), format!("INSERT INTO {{t}}_l VALUES ('{id}')"));
        let statement = self.spelled(&statement);
        move |mut lent| {
            let (gate, statement) = (gate.clone(), statement.clone());
            Box::pin(async move {
                W::execute(&mut lent, statement).await?;
                gate.pass().await
            })
        }
    }

    /// It had no effect, and is not recorded.
    async fn nothing(&self, id: &str) {
        assert_eq!(self.world.stored(id).await, None, "{id}");
        assert_eq!(self.effects(id).await, 0, "{id}");
    }

    /// It had its effect once, and is recorded.
    async fn once(&self, id: &str) {
        assert_eq!(self.world.stored(id).await.expect(id).state, "done", "{id}");
        assert_eq!(self.effects(id).await, 1, "{id}");
    }

    async fn close(self) {
        self.layer.drained().await;
        self.pool.close().await;
        for statement in ["DROP TABLE {t}_l", "DROP TABLE {t}_n"] {
            self.world.run(statement).await;
        }
        self.world.drop().await;
    }
}

fn spelled(event: &Event<'_>) -> String {
    let name = event.name();
    match event {
        Event::Ran { id, .. }
        | Event::Duplicate { id, .. }
        | Event::Parked { id, .. }
        | Event::StoreError { id, .. }
        | Event::Unfinished { id, .. } => format!("{name} {id}"),
        _ => name.to_owned(),
    }
}

/// Where a handler waits until it is told how to end.
#[derive(Clone)]
struct Gate {
    begun: Arc<Semaphore>,
    end: watch::Sender<Option<bool>>,
}

impl Gate {
    fn new() -> Self {
        Gate {
            begun: Arc::new(Semaphore::new(0)),
            end: watch::Sender::new(None),
        }
    }

    async fn has_begun(&self) {
        let begun = timeout(PATIENCE, self.begun.acquire()).await;
        begun.expect("the handler begins").unwrap().forget();
    }

    fn end(&self, well: bool) {
        self.end.send_replace(Some(well));
    }

    async fn pass(&self) -> Result<(), BoxError> {
        self.begun.add_permits(1);
        let mut end = self.end.subscribe();
        let end = end.wait_for(Option::is_some).await?;
        if *end == Some(true) {
            Ok(())
        } else {
            Err(Declined.into())
        }
    }
}

/// A failure of a handler's own.
#[derive(Debug, PartialEq)]
struct Declined;

impl fmt::Display for Declined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("declined")
    }
}

impl Error for Declined {}

/// An error of a handler's own that says where it came from.
#[derive(Debug)]
struct Wrapped(sqlx::Error);

impl fmt::Display for Wrapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the booking failed")
    }
}

impl Error for Wrapped {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.0)
    }
}

/// Not to be called.
fn never<L>(_: L) -> Work {
    panic!("the handler was called")
}

fn deliver<W, H, F>(
    layer: &Transactions<W>,
    id: &str,
    handler: H,
) -> impl Future<Output = Answer> + Send + use<W, H, F>
where
    W: World,
    H: Fn(Lent<W>) -> F + Clone + Send + 'static,
    F: Future<Output = Result<(), BoxError>> + Send + 'static,
{
    deliver_job::<W, H, F>(layer, Some(id.to_owned()), handler)
}

fn deliver_job<W, H, F>(
    layer: &Transactions<W>,
    job: Job,
    handler: H,
) -> impl Future<Output = Answer> + Send + use<W, H, F>
where
    W: World,
    H: Fn(Lent<W>) -> F + Clone + Send + 'static,
    F: Future<Output = Result<(), BoxError>> + Send + 'static,
{
    let handler = service_fn(move |with: WithTransaction<Job, W::Db>| handler(with.transaction));
    layer.clone().outcome().layer(handler).oneshot(job)
}

// ===== answers =====

#[track_caller]
fn ran(answer: Answer) {
    assert_eq!(answer.unwrap(), Outcome::Ran(()));
}

#[track_caller]
fn duplicate(answer: Answer) {
    assert_eq!(answer.unwrap(), Outcome::Duplicate);
}

#[track_caller]
fn error<E: Error + 'static>(answer: Answer) -> E {
    let error = answer.expect_err("an error");
    *error.downcast().unwrap_or_else(|other| panic!("{other:?}"))
}

/// Its transaction met another one.
#[track_caller]
fn contention(answer: Answer) -> Unfinished {
    assert!(answer.as_ref().is_err_and(is_transient), "{answer:?}");
    let unfinished = error::<Unfinished>(answer);
    assert_eq!(unfinished.cause(), UnfinishedCause::Contention);
    unfinished
}

/// The code of an error of a statement, wherever it is.
fn code(error: &(dyn Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(told) = error.downcast_ref::<sqlx::Error>() {
            let told = told.as_database_error()?;
            if let Some(told) = told.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
                return Some(told.number().to_string());
            }
            return told.code().map(Into::into);
        }
        next = error.source();
    }
    None
}

/// What messages met before they were settled.
#[derive(Debug, Default)]
struct Met {
    ran: usize,
    duplicates: usize,
    parked: usize,
    unfinished: usize,
    declined: usize,
}

impl Met {
    fn add(&mut self, other: &Met) {
        self.ran += other.ran;
        self.duplicates += other.duplicates;
        self.parked += other.parked;
        self.unfinished += other.unfinished;
        self.declined += other.declined;
    }

    async fn all(tasks: JoinSet<Met>) -> Met {
        let mut all = Met::default();
        for met in tasks.join_all().await {
            all.add(&met);
        }
        all
    }
}

/// Delivers a message again until it is settled, as a broker does.
async fn settled<F>(mut delivery: impl FnMut() -> F) -> Met
where
    F: Future<Output = Answer>,
{
    let mut met = Met::default();
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < 2 * PATIENCE, "{met:?}");
        match delivery().await {
            Ok(Outcome::Ran(())) => met.ran += 1,
            Ok(_) => met.duplicates += 1,
            Err(error) if error.is::<Parked>() => {
                met.parked += 1;
                sleep(Duration::from_millis(5)).await;
                continue;
            }
            Err(error) if error.is::<Declined>() => {
                met.declined += 1;
                continue;
            }
            Err(error) => {
                contention(Err(error));
                met.unfinished += 1;
                sleep(Duration::from_millis(1)).await;
                continue;
            }
        }
        return met;
    }
}

// ===== the protocol =====

async fn protocol<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let before = desk.world.now().await;

    let gate = Gate::new();
    let running = tokio::spawn(deliver::<W, _, _>(&desk.layer, "a", {
        let looks = desk.spelled(
            "SELECT count(*) FROM {t} WHERE message_id = 'a' AND state = 'claimed' \
             AND length(owner) = 32 AND expires_at > since",
        );
        let (gate, books) = (gate.clone(), desk.spelled("INSERT INTO {t}_l VALUES ('a')"));
        move |mut lent| {
            let (gate, looks, books) = (gate.clone(), looks.clone(), books.clone());
            async move {
                // Claimed within the transaction.
                assert_eq!(W::number(&mut lent, looks).await?, 1);
                W::execute(&mut lent, books).await?;
                gate.pass().await
            }
        }
    }));
    gate.has_begun().await;
    desk.nothing("a").await;
    assert!(desk.told().is_empty());
    gate.end(true);
    ran(running.await.unwrap());
    assert_eq!(desk.told(), ["ran a"]);

    let after = desk.world.now().await;
    desk.once("a").await;
    let stored = desk.world.stored("a").await.unwrap();
    let owner = stored.owner.clone().expect("an owner");
    assert!(owner.len() == 32 && owner.bytes().all(|byte| byte.is_ascii_hexdigit()));
    // SQLite has milliseconds, rounded.
    assert!((before - 1000..=after + 1000).contains(&stored.since));
    let ends = stored.expires_at.expect("an end");
    assert!((ends - stored.since - DAY).abs() < SECOND, "{stored:?}");

    for _ in 0..3 {
        duplicate(deliver::<W, _, _>(&desk.layer, "a", never).await);
        assert_eq!(desk.told(), ["duplicate a"]);
        assert_eq!(desk.world.stored("a").await.as_ref(), Some(&stored));
    }
    desk.once("a").await;

    // Another message has another owner.
    ran(deliver::<W, _, _>(&desk.layer, "b", desk.books("b")).await);
    let other = desk.world.stored("b").await.unwrap();
    assert_ne!(other.owner, stored.owner);

    // Past its end it runs again.
    desk.world.expire("a").await;
    ran(deliver::<W, _, _>(&desk.layer, "a", desk.books("a")).await);
    assert_eq!(desk.effects("a").await, 2);
    let again = desk.world.stored("a").await.unwrap();
    assert!(again.since > stored.since && again.owner != stored.owner);
    duplicate(deliver::<W, _, _>(&desk.layer, "a", never).await);
    // And after it was forgotten.
    desk.layer.store().forget(&id("a")).await.unwrap();
    ran(deliver::<W, _, _>(&desk.layer, "a", desk.books("a")).await);
    assert_eq!(desk.effects("a").await, 3);
    desk.close().await;
}

async fn failed<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let fails = {
        let books = desk.books("a");
        move |lent| {
            let books = books(lent);
            async move {
                books.await?;
                Err(Declined.into())
            }
        }
    };
    for _ in 0..2 {
        let answer = deliver::<W, _, _>(&desk.layer, "a", fails.clone()).await;
        assert!(!answer.as_ref().is_err_and(is_transient));
        assert_eq!(error::<Declined>(answer), Declined);
        // Rolled back by the time that it is answered.
        assert_eq!(desk.world.count().await, 0);
        desk.nothing("a").await;
    }
    // What its statements say, if nobody else was in the way, is an error of its own, too.
    let twice = "INSERT INTO {t}_n VALUES (1, 7)";
    let twice = desk.does(&["INSERT INTO {t}_l VALUES ('a')", twice]);
    let answer = deliver::<W, _, _>(&desk.layer, "a", twice).await;
    let violation = error::<sqlx::Error>(answer);
    assert!(
        violation
            .as_database_error()
            .is_some_and(|it| it.is_unique_violation()),
        "{violation:?}"
    );
    desk.nothing("a").await;
    assert!(desk.told().is_empty());

    ran(deliver::<W, _, _>(&desk.layer, "a", desk.books("a")).await);
    desk.once("a").await;
    desk.close().await;
}

async fn panicked<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let late = {
        let books = desk.books("a");
        move |lent| {
            let books = books(lent);
            async move {
                books.await?;
                panic_any(7_u8)
            }
        }
    };
    // Before there is a future of the handler.
    let early = |lent: Lent<W>| -> Work {
        drop(lent);
        panic_any(7_u8)
    };
    let late = tokio::spawn(deliver::<W, _, _>(&desk.layer, "a", late)).await;
    let early = tokio::spawn(deliver::<W, _, _>(&desk.layer, "a", early)).await;
    for ended in [late, early] {
        let payload = ended.unwrap_err().into_panic();
        assert_eq!(payload.downcast_ref::<u8>(), Some(&7));
    }
    desk.layer.drained().await;
    assert_eq!(desk.world.count().await, 0);
    desk.nothing("a").await;
    assert!(desk.told().is_empty());

    ran(deliver::<W, _, _>(&desk.layer, "a", desk.books("a")).await);
    desk.once("a").await;
    desk.close().await;
}

async fn undone<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let layer = desk.layer.clone();
    let layer = layer.done_if(|answer: &Option<u8>| *answer == Some(8));
    let deliver = |answer: u8| {
        let books = desk.books("a");
        let handler = move |with: WithTransaction<Job, W::Db>| {
            let books = books(with.transaction);
            async move { books.await.map(|()| Some(answer)) }
        };
        layer.layer(service_fn(handler)).oneshot(Some("a".into()))
    };
    for _ in 0..2 {
        assert_eq!(deliver(7).await.unwrap(), Some(7));
        assert_eq!(desk.world.count().await, 0);
        desk.nothing("a").await;
        assert!(desk.told().is_empty());
    }
    assert_eq!(deliver(8).await.unwrap(), Some(8));
    desk.once("a").await;
    assert_eq!(deliver(7).await.unwrap(), None);
    assert_eq!(desk.told(), ["ran a", "duplicate a"]);
    desk.close().await;
}

async fn without_id<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let mut effects = 0;
    for job in [None, Some(String::new())] {
        for _ in 0..2 {
            ran(deliver_job::<W, _, _>(&desk.layer, job.clone(), desk.books("x")).await);
            effects += 1;
            assert_eq!(desk.effects("x").await, effects);
            assert_eq!(desk.world.count().await, 0);
            assert_eq!(desk.told(), ["no_id"]);
        }
        let fails = {
            let books = desk.books("x");
            move |lent| {
                let books = books(lent);
                async move {
                    books.await?;
                    Err(Declined.into())
                }
            }
        };
        error::<Declined>(deliver_job::<W, _, _>(&desk.layer, job, fails).await);
        assert_eq!(desk.effects("x").await, effects);
        assert_eq!(desk.world.count().await, 0);
        assert_eq!(desk.told(), ["no_id"]);
    }
    desk.close().await;
}

/// Those without an id are not taken for one message.
async fn several_without_id<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let gate = Gate::new();
    let first = deliver_job::<W, _, _>(&desk.layer, None, desk.books_at(&gate, "x"));
    let first = tokio::spawn(first);
    gate.has_begun().await;
    let second = deliver_job::<W, _, _>(&desk.layer, None, desk.books("x"));
    ran(timeout(PATIENCE, second).await.expect("waits for nobody"));
    gate.end(true);
    ran(first.await.unwrap());
    assert_eq!(desk.effects("x").await, 2);
    assert_eq!(desk.world.count().await, 0);
    desk.close().await;
}

async fn any_id<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let store = desk.world.store().await;
    let long = "é".repeat(150);
    let longer = format!("{long}!");
    let hashed = format!("sha256:{}", "0".repeat(64));
    let ids = [
        " ",
        "   ",
        "\t",
        &long,
        &longer,
        "a\0b",
        "a\0c",
        "a",
        "A",
        "a ",
        "sha256:x",
        &hashed,
        "it's \"so\" \\ `x` $1 ? --",
        "ä",
        "a\u{308}",
        "🦀",
    ];
    for (nr, text) in ids.iter().enumerate() {
        assert!(!store.seen(&id(text)).await.unwrap(), "{text:?}");
        ran(deliver::<W, _, _>(&desk.layer, text, desk.books("x")).await);
        assert_eq!(desk.effects("x").await, nr as i64 + 1, "{text:?}");
    }
    for text in ids {
        duplicate(deliver::<W, _, _>(&desk.layer, text, never).await);
        // As the stores spell it.
        assert!(store.seen(&id(text)).await.unwrap(), "{text:?}");
    }
    assert_eq!(desk.world.count().await, ids.len() as i64);
    assert_eq!(desk.effects("x").await, ids.len() as i64);
    desk.close().await;
}

async fn lifetimes<W: World>(world: Option<W>) {
    let Some(world) = world else { return };
    let pool = world.pool(2).await;
    let for_ever = W::transactions(world.builder().ttl(None), pool.clone());
    let an_hour = W::transactions(world.builder().ttl(HOUR), pool.clone());
    let desk = Desk::with(world, pool, for_ever).await;
    ran(deliver::<W, _, _>(&desk.layer, "a", desk.books("a")).await);
    let stored = desk.world.stored("a").await.unwrap();
    assert_eq!((stored.state.as_str(), stored.expires_at), ("done", None));
    duplicate(deliver::<W, _, _>(&desk.layer, "a", never).await);

    let an_hour = an_hour.id_from(by_itself as fn(&Job) -> Job);
    duplicate(deliver::<W, _, _>(&an_hour, "a", never).await);
    ran(deliver::<W, _, _>(&an_hour, "b", desk.books("b")).await);
    let stored = desk.world.stored("b").await.unwrap();
    let lasts = stored.expires_at.expect("an end") - stored.since;
    assert!((lasts - 3600 * SECOND).abs() < SECOND, "{stored:?}");
    desk.close().await;
}

/// The end counts from the end of the handler by the clock of that instant, however long ago the transaction
/// began.
async fn counted<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let ended = Arc::new(Mutex::new(0));
    let takes_its_time = {
        let (ended, now) = (ended.clone(), desk.spelled("SELECT {now}"));
        move |mut lent: Lent<W>| {
            let (ended, now) = (ended.clone(), now.clone());
            async move {
                let begun = W::number(&mut lent, now.clone()).await?;
                loop {
                    let at = W::number(&mut lent, now.clone()).await?;
                    if at > begun + SECOND {
                        *ended.lock().unwrap() = at;
                        return Ok(());
                    }
                    sleep(Duration::from_millis(20)).await;
                }
            }
        }
    };
    for level in LEVELS {
        let layer = desk.layer(level);
        ran(deliver::<W, _, _>(&layer, "a", takes_its_time.clone()).await);
        let after = desk.world.now().await;
        let stored = desk.world.stored("a").await.unwrap();
        let ended = *ended.lock().unwrap();
        assert!(
            (ended..=after + 1000).contains(&stored.since),
            "{ended} {stored:?}"
        );
        let expires_at = stored.expires_at.expect("an end") - DAY;
        assert!(
            (ended..=after + 1000).contains(&expires_at),
            "{ended} {stored:?}"
        );
        desk.layer.store().forget(&id("a")).await.unwrap();
    }
    desk.close().await;
}

// ===== beside workers of other modes =====

async fn beside_claims<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let store = desk.world.store().await;
    let lease = Lease::new(HOUR).unwrap();
    assert_eq!(
        store.claim(&id("a"), OTHER, lease).await.unwrap(),
        Claim::Won
    );
    let before = desk.world.stored("a").await;
    for _ in 0..3 {
        let answer = deliver::<W, _, _>(&desk.layer, "a", never).await;
        assert!(answer.as_ref().is_err_and(is_transient));
        let parked = error::<Parked>(answer);
        assert_eq!(*parked.id(), id("a"));
        let left = parked.retry_after();
        assert!(
            left <= HOUR && left > (HOUR - PATIENCE).mul_f64(0.75),
            "{left:?}"
        );
        assert_eq!(desk.told(), ["parked a"]);
        assert_eq!(desk.world.stored("a").await, before);
    }
    assert!(store.renew(&id("a"), OTHER, lease).await.unwrap());

    // Its end is over: taken over, and not its own any more.
    desk.world.expire("a").await;
    ran(deliver::<W, _, _>(&desk.layer, "a", desk.books("a")).await);
    desk.once("a").await;
    assert!(!store.renew(&id("a"), OTHER, lease).await.unwrap());
    assert!(!store.release(&id("a"), OTHER).await.unwrap());
    assert!(!store.complete(&id("a"), OTHER).await.unwrap());
    duplicate(deliver::<W, _, _>(&desk.layer, "a", never).await);
    desk.once("a").await;

    // Done, or given up, by who had claimed it.
    store.claim(&id("b"), OTHER, lease).await.unwrap();
    assert!(store.complete(&id("b"), OTHER).await.unwrap());
    duplicate(deliver::<W, _, _>(&desk.layer, "b", never).await);
    store.claim(&id("c"), OTHER, lease).await.unwrap();
    assert!(store.release(&id("c"), OTHER).await.unwrap());
    ran(deliver::<W, _, _>(&desk.layer, "c", desk.books("c")).await);
    assert_eq!(
        store.claim(&id("c"), OTHER, lease).await.unwrap(),
        Claim::Done
    );
    desk.close().await;
}

/// A claim that never ends is nobody's to take, and an operator is told.
async fn beside_a_claim_without_an_end<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let insert = "INSERT INTO {t} VALUES ('a', 'claimed', 'x', {now}, NULL)";
    desk.world.run(insert).await;
    let before = desk.world.stored("a").await;
    let log = statements::log();
    let parked = error::<Parked>(deliver::<W, _, _>(&desk.layer, "a", never).await);
    assert!(parked.retry_after() <= Duration::from_secs(60), "{parked}");
    assert!(parked.retry_after() >= Duration::from_secs(30), "{parked}");
    assert_eq!(log.warnings(desk.world.table()), 1);
    assert_eq!(desk.world.stored("a").await, before);
    assert_eq!(desk.told(), ["parked a"]);
    desk.close().await;
}

/// Whoever looks at a message while its transaction is open.
async fn beside_an_open_one<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let lease = Lease::new(HOUR).unwrap();
    let hasty = desk
        .world
        .builder()
        .response_timeout(Duration::from_secs(3));
    let hasty = desk.world.connect(hasty).await;
    let patient = desk.world.builder().response_timeout(PATIENCE);
    let patient = desk.world.connect(patient).await;
    for store in [&hasty, &patient] {
        assert!(!store.seen(&id("nobody")).await.unwrap());
    }
    for well in [true, false] {
        let (gate, a) = (Gate::new(), id(if well { "well" } else { "ill" }));
        let running = deliver::<W, _, _>(&desk.layer, &a, desk.books_at(&gate, &a));
        let running = tokio::spawn(running);
        gate.has_begun().await;
        // Not done, nor to be had.
        assert!(!hasty.seen(&a).await.unwrap());
        let claim = hasty.claim(&a, OTHER, lease).await.unwrap();
        assert!(matches!(claim, Claim::Busy { .. }), "{claim:?}");
        assert!(!hasty.seen(&a).await.unwrap());
        desk.nothing(&a).await;

        // One that waits for its end is told what came of it.
        let late = {
            let (store, a) = (patient.clone(), a.clone());
            tokio::spawn(async move {
                loop {
                    match store.claim(&a, OTHER, lease).await.unwrap() {
                        Claim::Busy { .. } => {}
                        claim => return claim,
                    }
                }
            })
        };
        desk.world.until_waiting(&late).await;
        assert!(!late.is_finished());
        gate.end(well);
        let answer = running.await.unwrap();
        let late = late.await.unwrap();
        if well {
            ran(answer);
            assert_eq!(late, Claim::Done);
            assert!(hasty.seen(&a).await.unwrap());
            desk.once(&a).await;
        } else {
            error::<Declined>(answer);
            assert_eq!(late, Claim::Won);
            error::<Parked>(deliver::<W, _, _>(&desk.layer, &a, never).await);
        }
    }
    desk.close().await;
}

/// A mark by a worker of the seen-set, or a `forget`, that comes while the transaction is open.
async fn beside_marks<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let store = desk.world.builder().response_timeout(PATIENCE);
    let store = desk.world.connect(store).await;
    assert!(!store.seen(&id("nobody")).await.unwrap());
    for (name, well, marks) in [
        ("marked", true, true),
        ("marked-ill", false, true),
        ("forgotten", true, false),
        ("forgotten-ill", false, false),
    ] {
        let gate = Gate::new();
        let running = deliver::<W, _, _>(&desk.layer, name, desk.books_at(&gate, name));
        let running = tokio::spawn(running);
        gate.has_begun().await;
        let other = {
            let (store, id) = (store.clone(), id(name));
            tokio::spawn(async move {
                if marks {
                    store.remember(&id).await
                } else {
                    store.forget(&id).await
                }
            })
        };
        desk.world.until_waiting(&other).await;
        gate.end(well);
        let answer = running.await.unwrap();
        other.await.unwrap().unwrap();
        if well {
            ran(answer);
        } else {
            error::<Declined>(answer);
        }
        assert_eq!(desk.effects(name).await, i64::from(well), "{name}");
        if marks {
            // The other one's effect stands for the message.
            duplicate(deliver::<W, _, _>(&desk.layer, name, never).await);
        } else if well {
            // Forgotten after it was done, or, where that waited for nobody, before.
            let again = deliver::<W, _, _>(&desk.layer, name, desk.books(name)).await;
            let runs = 1 + i64::from(again.unwrap() == Outcome::Ran(()));
            assert_eq!(desk.effects(name).await, runs);
        } else {
            ran(deliver::<W, _, _>(&desk.layer, name, desk.books(name)).await);
            desk.once(name).await;
        }
        assert_eq!(desk.world.stored(name).await.unwrap().state, "done");
    }
    desk.close().await;
}

/// What another session is about to write is waited for, and believed only when it is committed.
async fn beside_uncommitted<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let claimed = "INSERT INTO {t} VALUES ('KEY', 'claimed', 'x', 0, 1)";
    let done = "INSERT INTO {t} VALUES ('KEY', 'done', NULL, 0, 1)";
    let ways = [
        // A mark.
        (
            "new",
            "",
            "INSERT INTO {t} VALUES ('KEY', 'done', NULL, {now}, NULL)",
            true,
        ),
        // Of who took over a claim that had ended, and is done.
        (
            "taken",
            claimed,
            "UPDATE {t} SET state = 'done', expires_at = NULL WHERE message_id = 'KEY'",
            true,
        ),
        (
            "gone",
            done,
            "DELETE FROM {t} WHERE message_id = 'KEY'",
            false,
        ),
        (
            "released",
            claimed,
            "DELETE FROM {t} WHERE message_id = 'KEY'",
            false,
        ),
    ];
    for level in LEVELS {
        for (way, there, statement, is_done) in ways {
            for end in ["COMMIT", "ROLLBACK"] {
                let key = format!("{way}-{end}-{level:?}").replace(['(', ')'], "");
                if !there.is_empty() {
                    desk.world.run(&there.replace("KEY", &key)).await;
                }
                let holder = desk.world.hold(&statement.replace("KEY", &key)).await;
                let layer = desk.layer(level).lock_wait(PATIENCE);
                let call = deliver::<W, _, _>(&layer, &key, desk.books(&key));
                let call = tokio::spawn(call);
                desk.world.until_waiting(&call).await;
                assert!(!call.is_finished(), "{key}");
                holder.end(end).await;
                let answer = call.await.unwrap();
                if is_done && end == "COMMIT" {
                    duplicate(answer);
                    assert_eq!(desk.effects(&key).await, 0, "{key}");
                } else {
                    ran(answer);
                    desk.once(&key).await;
                }
            }
        }
    }
    desk.close().await;
}

// ===== copies =====

/// At each level of isolation: a copy waits for the first one's end, and believes nothing before.
async fn copies<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    for level in LEVELS {
        for well in [true, false] {
            let key = format!("{level:?}-{well}").replace(['(', ')'], "");
            let layer = desk.layer(level).lock_wait(PATIENCE);
            let gate = Gate::new();
            let first = deliver::<W, _, _>(&layer, &key, desk.books_at(&gate, &key));
            let first = tokio::spawn(first);
            gate.has_begun().await;
            let copy = if well {
                tokio::spawn(deliver::<W, _, _>(&layer, &key, never))
            } else {
                tokio::spawn(deliver::<W, _, _>(&layer, &key, desk.books(&key)))
            };
            desk.world.until_waiting(&copy).await;
            assert!(!copy.is_finished(), "{key}");
            assert!(desk.told().is_empty());
            gate.end(well);
            let (first, copy) = (first.await.unwrap(), copy.await.unwrap());
            if well {
                ran(first);
                duplicate(copy);
            } else {
                error::<Declined>(first);
                ran(copy);
            }
            desk.once(&key).await;
            desk.told();
        }
    }
    desk.close().await;
}

/// A copy that has waited as long as it may is parked: nobody knows yet whether the first one's effect
/// happens.
async fn impatient<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    for level in LEVELS {
        let key = format!("{level:?}").replace(['(', ')'], "");
        let layer = desk.layer(level);
        let hasty = layer.clone().lock_wait(Duration::from_millis(50));
        // The table was looked up.
        desk.layer.store().seen(&id("nobody")).await.unwrap();
        let gate = Gate::new();
        let first = deliver::<W, _, _>(&layer, &key, desk.books_at(&gate, &key));
        let first = tokio::spawn(first);
        gate.has_begun().await;
        let begun = Instant::now();
        let copy = deliver::<W, _, _>(&hasty, &key, never).await;
        // MariaDB counts in whole seconds, and SQLite gets one more.
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
        assert!(copy.as_ref().is_err_and(is_transient));
        let parked = error::<Parked>(copy);
        assert_eq!(*parked.id(), id(&key));
        // How long the other one takes nobody knows.
        let retry_after = parked.retry_after();
        assert!(retry_after <= Duration::from_secs(5), "{parked}");
        assert!(retry_after >= Duration::from_secs(3), "{parked}");
        assert!(!first.is_finished());
        gate.end(false);
        error::<Declined>(first.await.unwrap());
        assert_eq!(desk.told(), [format!("parked {key}")]);
        let met = settled(|| deliver::<W, _, _>(&hasty, &key, desk.books(&key))).await;
        assert_eq!(met.ran, 1);
        desk.once(&key).await;
        desk.told();
    }
    desk.close().await;
}

/// A copy that is parked leaves no connection behind that waits on.
async fn freed<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    for level in LEVELS {
        let key = format!("{level:?}").replace(['(', ')'], "");
        let (layer, gate) = (desk.layer(level), Gate::new());
        let first = deliver::<W, _, _>(&layer, &key, desk.books_at(&gate, &key));
        let first = tokio::spawn(first);
        gate.has_begun().await;
        let hasty = layer.clone().lock_wait(Duration::from_millis(50));
        for nr in 0..2 {
            error::<Parked>(deliver::<W, _, _>(&hasty, &key, never).await);
            let other = format!("{key}{nr}");
            let free = timeout(
                PATIENCE,
                settled(|| deliver::<W, _, _>(&layer, &other, desk.books(&other))),
            );
            assert_eq!(free.await.expect("the other connection is free").ran, 1);
        }
        assert!(!first.is_finished());
        gate.end(false);
        error::<Declined>(first.await.unwrap());
        desk.nothing(&key).await;
    }
    desk.close().await;
}

/// The whole table is locked, which is waited for before a statement can say how long.
async fn table_locked<W: World>(desk: Option<Desk<W>>, lock: &str, end: &str) {
    let Some(desk) = desk else { return };
    ran(deliver::<W, _, _>(&desk.layer, "first", desk.books("first")).await);
    desk.told();
    for level in LEVELS {
        let key = format!("{level:?}").replace(['(', ')'], "");
        let layer = desk.layer(level);
        let hasty = layer.clone().lock_wait(Duration::from_millis(50));
        let holder = desk.world.hold(lock).await;
        // One that has run, too.
        for key in ["first", &key] {
            let begun = Instant::now();
            error::<Parked>(deliver::<W, _, _>(&hasty, key, never).await);
            assert!(
                begun.elapsed() < Duration::from_secs(5),
                "{:?}",
                begun.elapsed()
            );
            assert_eq!(desk.told(), [format!("parked {key}")]);
        }
        holder.end(end).await;
        layer.drained().await;
        desk.nothing(&key).await;
        duplicate(deliver::<W, _, _>(&layer, "first", never).await);
        ran(deliver::<W, _, _>(&layer, &key, desk.books(&key)).await);
        desk.once(&key).await;
        desk.told();
    }
    desk.close().await;
}

/// So many copies at once, on fewer connections.
async fn crowd<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    for level in LEVELS {
        let key = format!("{level:?}").replace(['(', ')'], "");
        let start = Arc::new(Barrier::new(64));
        let mut copies = JoinSet::new();
        for _ in 0..64 {
            let (layer, key, books) = (desk.layer(level), key.clone(), desk.books(&key));
            let start = start.clone();
            copies.spawn(async move {
                start.wait().await;
                settled(|| deliver::<W, _, _>(&layer, &key, books.clone())).await
            });
        }
        let met = Met::all(copies).await;
        assert_eq!((met.ran, met.duplicates), (1, 63), "{met:?}");
        desk.once(&key).await;
    }
    desk.close().await;
}

/// A call has one connection, and never waits for a second one.
async fn alone<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    for nr in 0..3 {
        let key = format!("m{nr}");
        let calls = (0..8).map(|_| deliver::<W, _, _>(&desk.layer, &key, desk.books(&key)));
        let calls = calls.map(tokio::spawn).collect::<Vec<JoinHandle<_>>>();
        let mut runs = 0;
        for call in calls {
            runs += usize::from(call.await.unwrap().unwrap() == Outcome::Ran(()));
        }
        assert_eq!(runs, 1);
        desk.once(&key).await;
    }
    desk.close().await;
}

/// A handler that hangs holds up its own message.
async fn hanging<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    for level in LEVELS {
        let key = format!("{level:?}").replace(['(', ')'], "");
        let layer = desk.layer(level);
        let gate = Gate::new();
        let hangs = deliver::<W, _, _>(&layer, &key, desk.books_at(&gate, &key));
        let hangs = tokio::spawn(hangs);
        gate.has_begun().await;
        let mut others = JoinSet::new();
        for nr in 0..40 {
            let (layer, other) = (layer.clone(), format!("{key}{nr}"));
            let books = desk.books(&other);
            others.spawn(async move {
                settled(|| deliver::<W, _, _>(&layer, &other, books.clone())).await
            });
        }
        let met = timeout(PATIENCE, Met::all(others)).await;
        let met = met.expect("the others go on");
        assert_eq!(met.ran, 40, "{met:?}");
        // At the highest level, PostgreSQL finds conflicts where there are none.
        assert!(
            met.parked == 0 || level == Some(Isolation::Serializable),
            "{met:?}"
        );
        let hasty = layer.clone().lock_wait(Duration::from_millis(1));
        error::<Parked>(deliver::<W, _, _>(&hasty, &key, never).await);
        assert!(!hangs.is_finished());
        gate.end(true);
        let mut hung = Some(hangs.await.unwrap());
        if level != Some(Isolation::Serializable) {
            ran(hung.take().unwrap());
        } else {
            let met = settled(|| {
                let hung = hung.take();
                let again = deliver::<W, _, _>(&layer, &key, desk.books(&key));
                async {
                    match hung {
                        Some(answer) => answer,
                        None => again.await,
                    }
                }
            });
            assert_eq!(met.await.parked, 0, "it is its own copy by now");
        }
        desk.once(&key).await;
    }
    desk.close().await;
}

/// Copies of a few messages, over and over, among new ones, for some seconds. Each second handler fails, and
/// those who wait for its row are let go all at once. Answers what they met.
async fn storm<W: World>(desk: &Desk<W>, level: Isolation, name: &str) -> Met {
    const HOT: usize = 20;
    let end = Instant::now() + Duration::from_secs(4);
    let mut workers = JoinSet::new();
    let runs = Arc::new(AtomicUsize::new(0));
    for worker in 0..64_usize {
        let (layer, runs) = (desk.layer(Some(level)), runs.clone());
        let (name, table) = (name.to_owned(), desk.world.table().to_owned());
        workers.spawn(async move {
            let mut met = Met::default();
            let mut turn = worker;
            while Instant::now() < end {
                // Any order that is another one for each worker will do.
                turn = turn.wrapping_mul(25_214_903_917).wrapping_add(11);
                let key = match (turn >> 20) % 4 {
                    0 => format!("{name}{}", MessageId::random()),
                    // A new handful each half second, so that some are always in question.
                    _ => {
                        let left = end.saturating_duration_since(Instant::now()).as_millis() / 500;
                        format!("{name}{left}-{}", (turn >> 30) % HOT)
                    }
                };
                let statement = format!("INSERT INTO {table}_l VALUES ('{key}')");
                let runs = runs.clone();
                let books = move |mut lent: Lent<W>| {
                    let (statement, fails) =
                        (statement.clone(), runs.fetch_add(1, Relaxed) % 2 == 0);
                    async move {
                        W::execute(&mut lent, statement).await?;
                        if fails {
                            return Err(Declined.into());
                        }
                        Ok(())
                    }
                };
                met.add(&settled(|| deliver::<W, _, _>(&layer, &key, books.clone())).await);
            }
            met
        });
    }
    let met = Met::all(workers).await;
    let ask = async |statement: &str| desk.world.ask(statement).await;
    let effects = ask("SELECT count(*) FROM {t}_l").await;
    assert_eq!(effects, ask("SELECT count(DISTINCT id) FROM {t}_l").await);
    assert_eq!(
        effects,
        ask("SELECT count(*) FROM {t} WHERE state = 'done'").await
    );
    assert_eq!(effects, desk.world.count().await);
    desk.world.run("DELETE FROM {t}_l").await;
    desk.world.run("DELETE FROM {t}").await;
    assert_eq!(effects, met.ran as i64);
    assert!(met.duplicates > 0);
    met
}

// ===== contention of the handler =====

/// What somebody else changed since the handler looked is not changed by the handler; neither happens, and
/// the whole is to be tried again.
async fn overtaken<W: World>(desk: Option<Desk<W>>, levels: &[Isolation], expected: &str) {
    let Some(desk) = desk else { return };
    for (nr, &level) in levels.iter().enumerate() {
        let key = format!("{level:?}");
        let layer = desk.layer(Some(level));
        for wrapped in [false, true] {
            let look = Gate::new();
            let handler = {
                let read = desk.spelled("SELECT n FROM {t}_n WHERE id = 1");
                let write = desk.spelled("UPDATE {t}_n SET n = n + 1 WHERE id = 1");
                let (look, books) = (
                    look.clone(),
                    desk.spelled(&format!("INSERT INTO {{t}}_l VALUES ('{key}')")),
                );
                move |mut lent: Lent<W>| {
                    let (look, read) = (look.clone(), read.clone());
                    let (books, write) = (books.clone(), write.clone());
                    async move {
                        W::execute(&mut lent, books).await?;
                        W::number(&mut lent, read).await?;
                        look.pass().await?;
                        match W::execute(&mut lent, write).await {
                            Err(error) if wrapped => Err(Wrapped(error).into()),
                            Err(error) => Err(error.into()),
                            Ok(_) => Ok(()),
                        }
                    }
                }
            };
            let running = deliver::<W, _, _>(&layer, &key, handler);
            let running = tokio::spawn(running);
            look.has_begun().await;
            desk.world
                .run("UPDATE {t}_n SET n = n + 100 WHERE id = 1")
                .await;
            look.end(true);
            let unfinished = contention(running.await.unwrap());
            let source = unfinished.source().expect("the handler's error");
            assert_eq!(source.is::<Wrapped>(), wrapped, "{source:?}");
            assert_eq!(source.is::<sqlx::Error>(), !wrapped, "{source:?}");
            assert_eq!(
                code(&unfinished).as_deref(),
                Some(expected),
                "{unfinished:?}"
            );
            assert_eq!(desk.told(), [format!("unfinished {key}")]);
            desk.nothing(&key).await;
        }
        let both = [
            &*format!("INSERT INTO {{t}}_l VALUES ('{key}')"),
            "UPDATE {t}_n SET n = n + 1 WHERE id = 1",
        ];
        ran(deliver::<W, _, _>(&layer, &key, desk.does(&both)).await);
        desk.once(&key).await;
        assert_eq!(desk.number(1).await, 201 * (nr as i64 + 1));
        desk.told();
    }
    desk.close().await;
}

/// Two handlers that wait for each other: one of them is undone, and is to be tried again.
async fn deadlock<W: World>(desk: Option<Desk<W>>, expected: &str) {
    let Some(desk) = desk else { return };
    for level in LEVELS {
        desk.world.run("UPDATE {t}_n SET n = 0").await;
        let key = |nr: i64| format!("{nr}{level:?}").replace(['(', ')'], "");
        // The first time, both have one row when they go for the other.
        let met = Arc::new(Barrier::new(2));
        let statements = |nr: i64| {
            let (own, other) = if nr == 1 { (1, 2) } else { (2, 1) };
            [
                format!("INSERT INTO {{t}}_l VALUES ('{}')", key(nr)),
                format!("UPDATE {{t}}_n SET n = n + 1 WHERE id = {own}"),
                format!("UPDATE {{t}}_n SET n = n + 1 WHERE id = {other}"),
            ]
        };
        let calls = [1, 2].map(|nr| {
            let statements = statements(nr).map(|it| desk.spelled(&it));
            let met = met.clone();
            let handler = move |mut lent: Lent<W>| {
                let ([books, own, other], met) = (statements.clone(), met.clone());
                async move {
                    W::execute(&mut lent, books).await?;
                    W::execute(&mut lent, own).await?;
                    met.wait().await;
                    W::execute(&mut lent, other).await?;
                    Ok(())
                }
            };
            tokio::spawn(deliver::<W, _, _>(&desk.layer(level), &key(nr), handler))
        });
        let [first, second] = calls;
        let answers = [first.await.unwrap(), second.await.unwrap()];
        let mut undone = 0;
        for (nr, answer) in (1..).zip(answers) {
            if answer.is_ok() {
                ran(answer);
                desk.once(&key(nr)).await;
                continue;
            }
            undone += 1;
            let unfinished = contention(answer);
            assert_eq!(code(&unfinished).as_deref(), Some(expected));
            desk.nothing(&key(nr)).await;
            let statements = statements(nr);
            let again = desk.does(&statements.each_ref().map(|it| &**it));
            ran(deliver::<W, _, _>(&desk.layer(level), &key(nr), again).await);
            desk.once(&key(nr)).await;
        }
        assert_eq!(undone, 1);
        assert_eq!((desk.number(1).await, desk.number(2).await), (2, 2));
    }
    desk.close().await;
}

/// A lock that the handler waited for in vain.
async fn locked<W: World>(desk: Option<Desk<W>>, expected: &str) {
    let Some(desk) = desk else { return };
    let both = desk.does(&[
        "INSERT INTO {t}_l VALUES ('a')",
        "UPDATE {t}_n SET n = n + 1 WHERE id = 1",
    ]);
    let holder = desk.world.hold("UPDATE {t}_n SET n = 7 WHERE id = 1").await;
    let answer = deliver::<W, _, _>(&desk.layer, "a", both.clone()).await;
    let unfinished = contention(answer);
    assert_eq!(code(&unfinished).as_deref(), Some(expected));
    assert_eq!(desk.told(), ["unfinished a"]);
    desk.nothing("a").await;
    holder.end("ROLLBACK").await;
    ran(deliver::<W, _, _>(&desk.layer, "a", both).await);
    desk.once("a").await;
    assert_eq!(desk.number(1).await, 1);
    desk.close().await;
}

/// Asks within a message's transaction.
async fn asked<W: World>(layer: &Transactions<W>, desk: &Desk<W>, statement: &str) -> i64 {
    let (statement, found) = (desk.spelled(statement), Arc::new(Mutex::new(None)));
    let handler = {
        let found = found.clone();
        move |mut lent: Lent<W>| {
            let (statement, found) = (statement.clone(), found.clone());
            async move {
                let number = W::number(&mut lent, statement).await?;
                *found.lock().unwrap() = Some(number);
                Ok(())
            }
        }
    };
    ran(deliver::<W, _, _>(layer, &MessageId::random(), handler).await);
    found.lock().unwrap().take().expect("an answer")
}

/// What the layer waits for locks is no matter of the handler's.
async fn patience_of_its_own<W: World>(
    world: Option<W>,
    begin: &'static str,
    setting: &str,
    expected: &[i64],
    pooler: bool,
) {
    let Some(mut world) = world else { return };
    if pooler {
        world.is_behind(world.url().to_owned(), true);
    }
    let pool = world.pool_of(1, begin).await;
    let layer = W::transactions(world.builder(), pool.clone());
    let desk = Desk::with(world, pool, layer).await;
    for (nr, &expected) in expected.iter().enumerate() {
        let statement = setting.replace("{nr}", &nr.to_string());
        for level in LEVELS {
            let layer = desk.layer(level).lock_wait(Duration::from_millis(1234));
            // Twice on the same session: nothing is left there, either.
            for _ in 0..2 {
                assert_eq!(
                    asked(&layer, &desk, &statement).await,
                    expected,
                    "{statement}"
                );
            }
            let mut session = desk.pool.acquire().await.unwrap();
            let after = W::number(&mut session, statement.clone()).await.unwrap();
            assert_eq!(after, expected, "{statement}");
        }
    }
    desk.close().await;
}

// ===== cost =====

/// `refused`: where a claim is not to be had, which PostgreSQL looks at by a statement of its own.
async fn costs<W: World>(desk: Option<Desk<W>>, refused: usize) {
    let Some(desk) = desk else { return };
    // What is counted has the name of the record's table: the handler's own has not.
    let handler = desk.does(&["SELECT 1"]);
    // The table is looked up before its first use.
    ran(deliver::<W, _, _>(&desk.layer, "first", handler.clone()).await);
    let cost = async |job: &str, expected: usize, handler: Work| {
        let handler = Arc::new(Mutex::new(Some(handler)));
        let handler = move |lent: Lent<W>| {
            let work = handler.lock().unwrap().take().expect("called once");
            async move {
                let answer = work.await;
                drop(lent);
                answer
            }
        };
        let log = statements::log();
        let answer = deliver::<W, _, _>(&desk.layer, job, handler).await;
        desk.layer.drained().await;
        assert_eq!(
            log.statements(desk.world.table()),
            expected,
            "{job}: {answer:?}"
        );
        answer
    };
    let well = || -> Work { Box::pin(async { Ok(()) }) };
    let ill = || -> Work { Box::pin(async { Err(Declined.into()) }) };
    for nr in 0..3 {
        let key = format!("m{nr}");
        error::<Declined>(cost(&key, 1, ill()).await);
        ran(cost(&key, 2, well()).await);
        duplicate(cost(&key, refused, well()).await);
        ran(cost("", 2, well()).await);
        desk.world.expire(&key).await;
        ran(cost(&key, 2, well()).await);
        let lease = Lease::new(HOUR).unwrap();
        let store = desk.layer.store();
        let claim = store.claim(&id(&format!("c{nr}")), OTHER, lease).await;
        assert!(matches!(claim, Ok(Claim::Won)));
        error::<Parked>(cost(&format!("c{nr}"), refused, well()).await);
    }
    desk.close().await;
}

// ===== without a table =====

async fn without_table<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    let missing = format!("{}_x", desk.world.table());
    let told = desk.told.clone();
    let layer = TransactionLayer::new(desk.pool.clone(), &missing).unwrap();
    let layer = layer
        .id_from(by_itself as fn(&Job) -> Job)
        .on_event(move |event| told.lock().unwrap().push(spelled(event)));
    let says_so = |answer: Answer| {
        assert!(answer.as_ref().is_err_and(is_transient));
        let error = error::<StoreError>(answer);
        let said = error.to_string();
        assert!(
            said.contains(&missing) && said.contains("migrate()"),
            "{said}"
        );
        let source = error.source().expect("a source");
        let source = source
            .downcast_ref::<BackendError>()
            .expect("of the backend");
        assert_eq!(source.kind(), BackendErrorKind::Schema);
        error.operation()
    };
    for _ in 0..2 {
        let answer = deliver::<W, _, _>(&layer, "a", never).await;
        assert_eq!(says_so(answer), Operation::Begin);
        assert_eq!(desk.told(), ["store_error a"]);
        let answer = deliver_job::<W, _, _>(&layer, None, never).await;
        assert_eq!(says_so(answer), Operation::Begin);
        assert_eq!(desk.told(), ["no_id", "store_error "]);
    }
    layer.migrate().await.unwrap();
    ran(deliver::<W, _, _>(&layer, "a", desk.books("a")).await);
    assert_eq!(desk.effects("a").await, 1);
    assert_eq!(desk.told(), ["ran a"]);

    // Gone while it is in use.
    desk.world.run("DROP TABLE {t}_x").await;
    for _ in 0..2 {
        let answer = deliver::<W, _, _>(&layer, "b", never).await;
        assert_eq!(says_so(answer), Operation::Claim);
        assert_eq!(desk.told(), ["store_error b"]);
    }
    layer.migrate().await.unwrap();
    ran(deliver::<W, _, _>(&layer, "b", desk.books("b")).await);
    layer.drained().await;
    desk.world.run("DROP TABLE {t}_x").await;
    desk.close().await;
}

/// What a commit refuses did not run, whatever the handler answered.
async fn refused<W: World>(desk: Option<Desk<W>>) {
    let Some(desk) = desk else { return };
    desk.world
        .run("CREATE TABLE {t}_c (parent INT REFERENCES {t}_n (id) DEFERRABLE INITIALLY DEFERRED)")
        .await;
    let child = |of: u8| {
        let insert = format!("INSERT INTO {{t}}_c VALUES ({of})");
        desk.does(&["INSERT INTO {t}_l VALUES ('a')", &insert])
    };
    let answer = deliver::<W, _, _>(&desk.layer, "a", child(9)).await;
    let violation = error::<sqlx::Error>(answer);
    assert!(
        violation
            .as_database_error()
            .is_some_and(|it| it.is_foreign_key_violation()),
        "{violation:?}"
    );
    assert!(desk.told().is_empty());
    desk.nothing("a").await;
    ran(deliver::<W, _, _>(&desk.layer, "a", child(1)).await);
    assert_eq!(desk.told(), ["ran a"]);
    desk.once("a").await;
    desk.layer.drained().await;
    desk.world.run("DROP TABLE {t}_c").await;
    desk.close().await;
}

mod in_postgres {
    use super::{world::Postgres, *};
    use sqlx::Row;

    async fn desk(name: &str, connections: u32) -> Option<Desk<Postgres>> {
        Desk::open(name, connections).await
    }

    async fn desk_of(name: &str, begin: &'static str) -> Option<Desk<Postgres>> {
        let world = Postgres::open(name).await?;
        let pool = world.pool_of(4, begin).await;
        Some(Desk::on(world, pool).await)
    }

    #[tokio::test]
    async fn a_message_runs_once_until_its_end() {
        protocol(desk("tx_protocol", 4).await).await;
    }

    #[tokio::test]
    async fn what_fails_leaves_nothing() {
        failed(desk("tx_failed", 4).await).await;
    }

    #[tokio::test]
    async fn what_panics_leaves_nothing() {
        panicked(desk("tx_panicked", 4).await).await;
    }

    #[tokio::test]
    async fn what_is_not_done_leaves_nothing() {
        undone(desk("tx_undone", 4).await).await;
    }

    #[tokio::test]
    async fn without_an_id_it_runs_each_time() {
        without_id(desk("tx_without_id", 4).await).await;
    }

    #[tokio::test]
    async fn without_an_id_nobody_is_waited_for() {
        several_without_id(desk("tx_several", 4).await).await;
    }

    #[tokio::test]
    async fn any_id_runs_once() {
        any_id(desk("tx_any_id", 4).await).await;
    }

    #[tokio::test]
    async fn it_is_remembered_as_long_as_the_store_says() {
        lifetimes(Postgres::open("tx_lifetimes").await).await;
    }

    #[tokio::test]
    async fn the_end_counts_from_the_end_of_the_handler() {
        counted(desk("tx_counted", 4).await).await;
    }

    #[tokio::test]
    async fn what_a_worker_has_claimed_is_parked() {
        beside_claims(desk("tx_claims", 4).await).await;
    }

    #[tokio::test]
    async fn what_is_claimed_without_an_end_is_parked() {
        beside_a_claim_without_an_end(desk("tx_endless", 4).await).await;
    }

    #[tokio::test]
    async fn an_open_transaction_is_neither_done_nor_to_be_had() {
        beside_an_open_one(desk("tx_open", 4).await).await;
    }

    #[tokio::test]
    async fn marks_of_others_lose_nothing() {
        beside_marks(desk("tx_marks", 4).await).await;
    }

    #[tokio::test]
    async fn what_is_not_committed_is_waited_for() {
        beside_uncommitted(desk("tx_uncommitted", 4).await).await;
    }

    #[tokio::test]
    async fn a_copy_waits_for_the_commit_and_skips_or_the_rollback_and_runs() {
        copies(desk("tx_copies", 4).await).await;
    }

    #[tokio::test]
    async fn a_copy_that_has_waited_long_enough_is_parked() {
        impatient(desk("tx_impatient", 4).await).await;
    }

    #[tokio::test]
    async fn a_copy_that_is_parked_leaves_its_connection() {
        freed(desk("tx_freed", 2).await).await;
    }

    #[tokio::test]
    async fn a_table_that_is_locked_is_not_waited_for_any_longer() {
        let desk = desk("tx_table_locked", 6).await;
        table_locked(desk, "LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE", "ROLLBACK").await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_many_copies_one_runs() {
        crowd(desk("tx_crowd", 8).await).await;
    }

    #[tokio::test]
    async fn one_connection_is_enough() {
        alone(desk("tx_alone", 1).await).await;
    }

    #[tokio::test]
    async fn a_handler_that_hangs_holds_up_no_other_message() {
        hanging(desk("tx_hanging", 6).await).await;
    }

    #[tokio::test]
    async fn a_handler_that_was_overtaken_is_tried_again() {
        let levels = [Isolation::RepeatableRead, Isolation::Serializable];
        overtaken(desk("tx_overtaken", 4).await, &levels, "40001").await;
    }

    #[tokio::test]
    async fn a_handler_in_a_deadlock_is_tried_again() {
        deadlock(desk("tx_deadlock", 4).await, "40P01").await;
    }

    #[tokio::test]
    async fn a_handler_that_waited_for_a_lock_in_vain_is_tried_again() {
        let desk = desk_of("tx_locked", "SET lock_timeout = '100ms'").await;
        locked(desk, "55P03").await;
    }

    #[tokio::test]
    async fn the_handler_waits_for_locks_as_its_session_says() {
        let setting = "SELECT setting::bigint FROM pg_settings WHERE name = 'lock_timeout'";
        for pooler in [false, true] {
            for (begin, expected) in [("SELECT 1", 0), ("SET lock_timeout = '7s'", 7000)] {
                let world = Postgres::open("tx_patience").await;
                patience_of_its_own(world, begin, setting, &[expected], pooler).await;
            }
        }
    }

    #[tokio::test]
    async fn a_message_costs_two_statements_and_a_duplicate_no_more() {
        costs(desk("tx_costs", 2).await, 2).await;
    }

    #[tokio::test]
    async fn without_a_table_nothing_runs() {
        without_table(desk("tx_table", 2).await).await;
    }

    #[tokio::test]
    async fn what_the_commit_refuses_did_not_run() {
        refused(desk("tx_refused", 2).await).await;
    }

    #[tokio::test]
    async fn the_handler_has_the_level_that_was_set() {
        let Some(desk) = desk("tx_level", 1).await else {
            return;
        };
        let has = async |set: Option<Isolation>, level: &str| {
            let statement = format!(
                "SELECT count(*) FROM {{t}}_n WHERE id = 1 \
                 AND current_setting('transaction_isolation') = '{level}'"
            );
            asked(&desk.layer(set), &desk, &statement).await == 1
        };
        for (level, name) in [
            (Isolation::Serializable, "serializable"),
            (Isolation::RepeatableRead, "repeatable read"),
            (Isolation::ReadCommitted, "read committed"),
        ] {
            assert!(has(Some(level), name).await, "{name}");
            // It is no setting of the session.
            assert!(has(None, "read committed").await, "{name}");
        }
        desk.close().await;
    }

    /// It locks the row, which stands in its `xmax` until somebody else writes there, and no more.
    #[tokio::test]
    async fn who_does_not_run_writes_no_row() {
        let Some(desk) = desk("tx_unwritten", 2).await else {
            return;
        };
        let store = desk.world.store().await;
        let lease = Lease::new(HOUR).unwrap();
        store.claim(&id("busy"), OTHER, lease).await.unwrap();
        ran(deliver::<Postgres, _, _>(&desk.layer, "done", desk.books("done")).await);
        let versions = async || {
            let statement = "SELECT message_id || ctid::text || xmin::text FROM {t} ORDER BY 1";
            let rows = desk.world.rows(statement).await;
            rows.iter().map(|row| row.get(0)).collect::<Vec<String>>()
        };
        let before = versions().await;
        for level in LEVELS {
            let layer = desk.layer(level);
            duplicate(deliver::<Postgres, _, _>(&layer, "done", never).await);
            error::<Parked>(deliver::<Postgres, _, _>(&layer, "busy", never).await);
        }
        assert_eq!(versions().await, before);
        desk.close().await;
    }

    /// Two handlers of which each would have seen what the other one wrote, had they come one after the
    /// other: found out by the statements of either, or as late as the commit.
    #[tokio::test]
    async fn a_conflict_that_the_commit_finds_is_tried_again() {
        let Some(desk) = desk("tx_skew", 4).await else {
            return;
        };
        let layer = desk.layer(Some(Isolation::Serializable));
        let begun = Gate::new();
        let calls = ["a", "b"].map(|key| {
            let sum = desk.spelled("SELECT sum(n)::bigint FROM {t}_n");
            let books = desk.spelled(&format!("INSERT INTO {{t}}_l VALUES ('{key}')"));
            let write = desk.spelled(&format!(
                "INSERT INTO {{t}}_n VALUES ({}, 1)",
                key.as_bytes()[0]
            ));
            let begun = begun.clone();
            let handler = move |mut lent: Lent<Postgres>| {
                let (sum, books, write) = (sum.clone(), books.clone(), write.clone());
                let begun = begun.clone();
                async move {
                    Postgres::number(&mut lent, sum).await?;
                    begun.pass().await?;
                    Postgres::execute(&mut lent, books).await?;
                    Postgres::execute(&mut lent, write).await?;
                    Ok(())
                }
            };
            tokio::spawn(deliver::<Postgres, _, _>(&layer, key, handler))
        });
        begun.has_begun().await;
        begun.has_begun().await;
        begun.end(true);
        let mut undone = Vec::new();
        for (key, call) in ["a", "b"].into_iter().zip(calls) {
            let answer = call.await.unwrap();
            if answer.is_ok() {
                desk.once(key).await;
                continue;
            }
            assert_eq!(code(&contention(answer)).as_deref(), Some("40001"));
            desk.nothing(key).await;
            undone.push(key);
        }
        assert!(!undone.is_empty());
        for key in undone {
            ran(deliver::<Postgres, _, _>(&layer, key, desk.books(key)).await);
        }
        for key in ["a", "b"] {
            desk.once(key).await;
        }
        desk.close().await;
    }

    /// In a small table all rows are on one page, by which the server finds conflicts where there are none:
    /// among those who search for a row. The layer does not.
    #[tokio::test(flavor = "multi_thread")]
    async fn different_messages_are_not_in_each_others_way_at_the_highest_level() {
        let Some(desk) = desk("tx_false", 16).await else {
            return;
        };
        let next = Arc::new(Mutex::new(0..500));
        let mut workers = JoinSet::new();
        for _ in 0..16 {
            let layer = desk.layer(Some(Isolation::Serializable));
            let (next, table) = (next.clone(), desk.world.table().to_owned());
            workers.spawn(async move {
                let mut met = Met::default();
                loop {
                    let Some(nr) = next.lock().unwrap().next() else {
                        return met;
                    };
                    let key = format!("m{nr}");
                    let books = format!("INSERT INTO {table}_l VALUES ('{key}')");
                    let handler = move |mut lent: Lent<Postgres>| {
                        let books = books.clone();
                        async move {
                            Postgres::execute(&mut lent, books).await?;
                            Ok(())
                        }
                    };
                    let deliver = || deliver::<Postgres, _, _>(&layer, &key, handler.clone());
                    met.add(&settled(deliver).await);
                }
            });
        }
        let met = Met::all(workers).await;
        assert_eq!((met.ran, met.duplicates), (500, 0), "{met:?}");
        assert_eq!((met.unfinished, met.parked), (0, 0), "{met:?}");
        let effects = desk.world.ask("SELECT count(DISTINCT id) FROM {t}_l").await;
        assert_eq!(effects, 500);
        assert_eq!(desk.world.ask("SELECT count(*) FROM {t}_l").await, 500);
        assert_eq!(desk.world.count().await, 500);
        desk.close().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_pooler_in_transaction_mode_carries_messages() {
        let Some(mut world) = Postgres::open("tx_bouncer").await else {
            return;
        };
        let Some(bouncer) = Bouncer::start(world.url()) else {
            return;
        };
        world.is_behind(bouncer.url(), true);
        let options: sqlx::postgres::PgConnectOptions = bouncer.url().parse().unwrap();
        let pool = sqlx::postgres::PgPoolOptions::new()
            .max_connections(8)
            .connect_with(options.statement_cache_capacity(0))
            .await
            .unwrap();
        let layer = Postgres::transactions(world.builder(), pool.clone());
        let desk = Desk::with(world, pool, layer).await;
        let insert = desk.spelled("INSERT INTO {t}_l VALUES ($1)");
        for level in LEVELS {
            let layer = desk.layer(level);
            let mut copies = JoinSet::new();
            for nr in 0..120 {
                let key = format!("{}{level:?}", nr % 40).replace(['(', ')'], "");
                let (layer, insert) = (layer.clone(), insert.clone());
                copies.spawn(async move {
                    let handler = {
                        let key = key.clone();
                        move |mut lent: Lent<Postgres>| {
                            let (insert, key) = (insert.clone(), key.clone());
                            async move {
                                // Otherwise it is prepared under a name, whatever the
                                // capacity of the cache.
                                let insert = sqlx::query(sqlx::AssertSqlSafe(insert));
                                let insert = insert.bind(key).persistent(false);
                                insert.execute(&mut *lent).await?;
                                Ok(())
                            }
                        }
                    };
                    settled(|| deliver::<Postgres, _, _>(&layer, &key, handler.clone())).await
                });
            }
            let met = Met::all(copies).await;
            assert_eq!((met.ran, met.duplicates), (40, 80), "{met:?}");
        }
        let effects = desk.world.ask("SELECT count(DISTINCT id) FROM {t}_l").await;
        assert_eq!(effects, 160);
        assert_eq!(desk.world.ask("SELECT count(*) FROM {t}_l").await, 160);

        // Nor is anything left of what fails, or in the sessions of others.
        error::<Declined>(
            deliver::<Postgres, _, _>(&desk.layer, "ill", |_| async { Err(Declined.into()) }).await,
        );
        desk.nothing("ill").await;
        let setting = "SELECT setting::bigint FROM pg_settings WHERE name = 'lock_timeout'";
        for _ in 0..8 {
            assert_eq!(asked(&desk.layer, &desk, setting).await, 0);
        }
        desk.close().await;
    }
}

mod in_mysql {
    use super::{world::MySql, *};

    async fn desk(name: &str, connections: u32) -> Option<Desk<MySql>> {
        Desk::open(name, connections).await
    }

    async fn desk_of(name: &str, begin: &'static str) -> Option<Desk<MySql>> {
        let world = MySql::open(name).await?;
        let pool = world.pool_of(4, begin).await;
        Some(Desk::on(world, pool).await)
    }

    #[tokio::test]
    async fn a_message_runs_once_until_its_end() {
        protocol(desk("tx_protocol", 4).await).await;
    }

    #[tokio::test]
    async fn what_fails_leaves_nothing() {
        failed(desk("tx_failed", 4).await).await;
    }

    #[tokio::test]
    async fn what_panics_leaves_nothing() {
        panicked(desk("tx_panicked", 4).await).await;
    }

    #[tokio::test]
    async fn what_is_not_done_leaves_nothing() {
        undone(desk("tx_undone", 4).await).await;
    }

    #[tokio::test]
    async fn without_an_id_it_runs_each_time() {
        without_id(desk("tx_without_id", 4).await).await;
    }

    #[tokio::test]
    async fn without_an_id_nobody_is_waited_for() {
        several_without_id(desk("tx_several", 4).await).await;
    }

    #[tokio::test]
    async fn any_id_runs_once() {
        any_id(desk("tx_any_id", 4).await).await;
    }

    #[tokio::test]
    async fn it_is_remembered_as_long_as_the_store_says() {
        lifetimes(MySql::open("tx_lifetimes").await).await;
    }

    #[tokio::test]
    async fn the_end_counts_from_the_end_of_the_handler() {
        counted(desk("tx_counted", 4).await).await;
    }

    #[tokio::test]
    async fn what_a_worker_has_claimed_is_parked() {
        beside_claims(desk("tx_claims", 4).await).await;
    }

    #[tokio::test]
    async fn what_is_claimed_without_an_end_is_parked() {
        beside_a_claim_without_an_end(desk("tx_endless", 4).await).await;
    }

    #[tokio::test]
    async fn an_open_transaction_is_neither_done_nor_to_be_had() {
        beside_an_open_one(desk("tx_open", 4).await).await;
    }

    #[tokio::test]
    async fn marks_of_others_lose_nothing() {
        beside_marks(desk("tx_marks", 4).await).await;
    }

    #[tokio::test]
    async fn what_is_not_committed_is_waited_for() {
        beside_uncommitted(desk("tx_uncommitted", 4).await).await;
    }

    #[tokio::test]
    async fn a_copy_waits_for_the_commit_and_skips_or_the_rollback_and_runs() {
        copies(desk("tx_copies", 4).await).await;
    }

    #[tokio::test]
    async fn a_copy_that_has_waited_long_enough_is_parked() {
        impatient(desk("tx_impatient", 4).await).await;
    }

    #[tokio::test]
    async fn a_copy_that_is_parked_leaves_its_connection() {
        freed(desk("tx_freed", 2).await).await;
    }

    #[tokio::test]
    async fn a_table_that_is_locked_is_not_waited_for_any_longer() {
        let desk = desk("tx_table_locked", 6).await;
        table_locked(desk, "LOCK TABLES {t} WRITE", "UNLOCK TABLES").await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_many_copies_one_runs() {
        crowd(desk("tx_crowd", 8).await).await;
    }

    #[tokio::test]
    async fn one_connection_is_enough() {
        alone(desk("tx_alone", 1).await).await;
    }

    #[tokio::test]
    async fn a_message_costs_two_statements_and_a_duplicate_no_more() {
        costs(desk("tx_costs", 2).await, 1).await;
    }

    #[tokio::test]
    async fn without_a_table_nothing_runs() {
        without_table(desk("tx_table", 2).await).await;
    }

    #[tokio::test]
    async fn a_handler_that_hangs_holds_up_no_other_message() {
        hanging(desk("tx_hanging", 6).await).await;
    }

    /// Where the server notices it, which is a setting of MariaDB.
    #[tokio::test]
    async fn a_handler_that_was_overtaken_is_tried_again() {
        let Some(world) = MySql::open("tx_overtaken").await else {
            return;
        };
        if !world.is_mariadb().await {
            world.drop().await;
            return;
        }
        let pool = world
            .pool_of(4, "SET SESSION innodb_snapshot_isolation = ON")
            .await;
        let desk = Desk::on(world, pool).await;
        overtaken(Some(desk), &[Isolation::RepeatableRead], "1020").await;
    }

    #[tokio::test]
    async fn a_copy_waits_where_the_server_notices_what_was_overtaken() {
        let Some(world) = MySql::open("tx_snapshot").await else {
            return;
        };
        if !world.is_mariadb().await {
            world.drop().await;
            return;
        }
        let pool = world
            .pool_of(4, "SET SESSION innodb_snapshot_isolation = ON")
            .await;
        copies(Some(Desk::on(world, pool).await)).await;
    }

    #[tokio::test]
    async fn a_handler_in_a_deadlock_is_tried_again() {
        deadlock(desk("tx_deadlock", 4).await, "1213").await;
    }

    #[tokio::test]
    async fn a_handler_that_waited_for_a_lock_in_vain_is_tried_again() {
        let desk = desk_of("tx_locked", "SET SESSION innodb_lock_wait_timeout = 1").await;
        locked(desk, "1205").await;
    }

    #[tokio::test]
    async fn the_handler_waits_for_locks_as_its_session_says() {
        let begin = "SET SESSION innodb_lock_wait_timeout = 7, lock_wait_timeout = 8";
        let setting =
            "SELECT CAST(IF({nr}, @@innodb_lock_wait_timeout, @@lock_wait_timeout) AS SIGNED)";
        let world = MySql::open("tx_patience").await;
        patience_of_its_own(world, begin, setting, &[8, 7], false).await;
    }

    /// By what it sees of others, and what it locks: the server does not tell.
    #[tokio::test]
    async fn the_handler_has_the_level_that_was_set() {
        let Some(desk) = desk("tx_level", 1).await else {
            return;
        };
        // The session's own is REPEATABLE READ, and it stays so.
        for level in [
            Isolation::Serializable,
            Isolation::RepeatableRead,
            Isolation::ReadCommitted,
        ] {
            let set = level_of(&desk, Some(level)).await;
            assert_eq!(set, level);
            assert_eq!(level_of(&desk, None).await, Isolation::RepeatableRead);
        }
        desk.close().await;
    }

    async fn level_of(desk: &Desk<MySql>, level: Option<Isolation>) -> Isolation {
        let (look, seen) = (Gate::new(), Arc::new(Mutex::new((0, 0))));
        let handler = {
            let read = desk.spelled("SELECT n FROM {t}_n WHERE id = 1");
            let (look, seen) = (look.clone(), seen.clone());
            move |mut lent: Lent<MySql>| {
                let (look, seen, read) = (look.clone(), seen.clone(), read.clone());
                async move {
                    let first = MySql::number(&mut lent, read.clone()).await?;
                    look.pass().await?;
                    let second = MySql::number(&mut lent, read).await?;
                    *seen.lock().unwrap() = (first, second);
                    Ok(())
                }
            }
        };
        let job = MessageId::random();
        let running = deliver::<MySql, _, _>(&desk.layer(level), &job, handler);
        let running = tokio::spawn(running);
        look.has_begun().await;
        let pool = desk.world.pool(1).await;
        let mut session = pool.acquire().await.unwrap();
        let lock = desk.spelled("SELECT n FROM {t}_n WHERE id = 1 FOR UPDATE NOWAIT");
        let free = MySql::execute(&mut session, lock).await.is_ok();
        if free {
            let change = desk.spelled("UPDATE {t}_n SET n = n + 1 WHERE id = 1");
            MySql::execute(&mut session, change).await.unwrap();
        }
        drop(session);
        pool.close().await;
        look.end(true);
        ran(running.await.unwrap());
        let (first, second) = *seen.lock().unwrap();
        match (free, first == second) {
            (false, _) => Isolation::Serializable,
            (true, true) => Isolation::RepeatableRead,
            (true, false) => Isolation::ReadCommitted,
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn copies_among_new_messages_run_once_each_at_read_committed() {
        if let Some(desk) = desk("tx_storm_rc", 24).await {
            println!("{:?}", storm(&desk, Isolation::ReadCommitted, "rc").await);
            desk.close().await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn copies_among_new_messages_run_once_each_at_repeatable_read() {
        if let Some(desk) = desk("tx_storm_rr", 24).await {
            println!("{:?}", storm(&desk, Isolation::RepeatableRead, "rr").await);
            desk.close().await;
        }
    }
}

mod in_sqlite {
    use super::{world::Sqlite, *};

    async fn desk(name: &str, connections: u32) -> Option<Desk<Sqlite>> {
        Desk::open(name, connections).await
    }

    #[tokio::test]
    async fn a_message_runs_once_until_its_end() {
        protocol(desk("tx_protocol", 4).await).await;
    }

    #[tokio::test]
    async fn what_fails_leaves_nothing() {
        failed(desk("tx_failed", 4).await).await;
    }

    #[tokio::test]
    async fn what_panics_leaves_nothing() {
        panicked(desk("tx_panicked", 4).await).await;
    }

    #[tokio::test]
    async fn what_is_not_done_leaves_nothing() {
        undone(desk("tx_undone", 4).await).await;
    }

    #[tokio::test]
    async fn without_an_id_it_runs_each_time() {
        without_id(desk("tx_without_id", 4).await).await;
    }

    #[tokio::test]
    async fn any_id_runs_once() {
        any_id(desk("tx_any_id", 4).await).await;
    }

    #[tokio::test]
    async fn it_is_remembered_as_long_as_the_store_says() {
        lifetimes(Sqlite::open("tx_lifetimes").await).await;
    }

    #[tokio::test]
    async fn the_end_counts_from_the_end_of_the_handler() {
        counted(desk("tx_counted", 4).await).await;
    }

    #[tokio::test]
    async fn what_a_worker_has_claimed_is_parked() {
        beside_claims(desk("tx_claims", 4).await).await;
    }

    #[tokio::test]
    async fn what_is_claimed_without_an_end_is_parked() {
        beside_a_claim_without_an_end(desk("tx_endless", 4).await).await;
    }

    #[tokio::test]
    async fn an_open_transaction_is_neither_done_nor_to_be_had() {
        beside_an_open_one(desk("tx_open", 4).await).await;
    }

    #[tokio::test]
    async fn marks_of_others_lose_nothing() {
        beside_marks(desk("tx_marks", 4).await).await;
    }

    #[tokio::test]
    async fn what_is_not_committed_is_waited_for() {
        beside_uncommitted(desk("tx_uncommitted", 4).await).await;
    }

    #[tokio::test]
    async fn a_copy_waits_for_the_commit_and_skips_or_the_rollback_and_runs() {
        copies(desk("tx_copies", 4).await).await;
    }

    #[tokio::test]
    async fn a_copy_that_has_waited_long_enough_is_parked() {
        impatient(desk("tx_impatient", 4).await).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_many_copies_one_runs() {
        crowd(desk("tx_crowd", 8).await).await;
    }

    #[tokio::test]
    async fn one_connection_is_enough() {
        alone(desk("tx_alone", 1).await).await;
    }

    #[tokio::test]
    async fn a_message_costs_two_statements_and_a_duplicate_no_more() {
        costs(desk("tx_costs", 2).await, 1).await;
    }

    #[tokio::test]
    async fn without_a_table_nothing_runs() {
        without_table(desk("tx_table", 2).await).await;
    }

    #[tokio::test]
    async fn what_the_commit_refuses_did_not_run() {
        refused(desk("tx_refused", 2).await).await;
    }

    /// One after the other, none of which finds the file locked for too long.
    #[tokio::test(flavor = "multi_thread")]
    async fn many_messages_on_one_file_all_run() {
        let Some(desk) = desk("tx_file", 10).await else {
            return;
        };
        let mut workers = JoinSet::new();
        for worker in 0..50 {
            let (layer, table) = (desk.layer.clone(), desk.world.table().to_owned());
            workers.spawn(async move {
                let mut met = Met::default();
                for nr in 0..40 {
                    let key = format!("{worker}-{nr}");
                    let books = format!("INSERT INTO {table}_l VALUES ('{key}')");
                    let handler = move |mut lent: Lent<Sqlite>| {
                        let books = books.clone();
                        async move {
                            Sqlite::execute(&mut lent, books).await?;
                            Ok(())
                        }
                    };
                    let deliver = || deliver::<Sqlite, _, _>(&layer, &key, handler.clone());
                    met.add(&settled(deliver).await);
                }
                met
            });
        }
        let met = Met::all(workers).await;
        println!("{met:?}");
        assert_eq!(
            (met.ran, met.duplicates, met.unfinished),
            (2000, 0, 0),
            "{met:?}"
        );
        let effects = desk.world.ask("SELECT count(DISTINCT id) FROM {t}_l").await;
        assert_eq!(effects, 2000);
        assert_eq!(desk.world.ask("SELECT count(*) FROM {t}_l").await, 2000);
        assert_eq!(desk.world.count().await, 2000);
        desk.close().await;
    }
}

#[tokio::test]
async fn a_duplicate_says_when_its_message_was_made() {
    let pool = SqlitePoolOptions::new().max_connections(1);
    let pool = pool.connect("sqlite::memory:").await.unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let list = told.clone();
    let layer = TransactionLayer::new(pool, "seen").unwrap();
    layer.migrate().await.unwrap();
    let layer = layer.on_event(move |event| {
        if let Event::Duplicate { created_at, .. } = event {
            list.lock().unwrap().push(*created_at);
        }
    });
    let handler = |_: WithTransaction<Envelope, sqlx::Sqlite>| async { Ok::<_, BoxError>(()) };
    for made in ["1", "1", "-7", "null"] {
        let body = format!(
            r#"{{"job":"urn:x","data":{{}},"meta":{{"id":"a","created_at":{made},"schema_version":1}}}}"#
        );
        let message = Envelope::decode(body.as_bytes()).unwrap();
        layer
            .layer(service_fn(handler))
            .oneshot(message)
            .await
            .unwrap();
    }
    assert_eq!(*told.lock().unwrap(), [Some(1), Some(-7), None]);
}
