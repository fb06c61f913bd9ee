//! The transactional mode under handlers that misbehave, commits that fail, connections that are lost, and
//! among the layers of tower: never acked without its effect, and the effect and its record happen
//! together.

#[path = "support/services.rs"]
mod services;
mod support;
#[path = "support/world.rs"]
mod world;

use services::{At, PATIENCE, Proxy, drop_after};
use sqlx::{Connection, Pool};
use std::{
    collections::VecDeque,
    error::Error,
    fmt,
    future::{Ready, pending, poll_fn, ready},
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};
use support::{BoxFuture, Declined, Queue, Retries, deliver, envelope};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tower::{
    Layer, Service, ServiceBuilder, ServiceExt,
    limit::ConcurrencyLimitLayer,
    retry::{Policy, RetryLayer},
    service_fn,
    timeout::{TimeoutLayer, error::Elapsed},
    util::BoxCloneSyncService,
};
use tower_idempotency::{
    BoxError, DeadLetterLayer, Envelope, MessageId, Parked, Store, StoreError, TransactionLayer,
    Unfinished, WithTransaction,
    ack::Always,
    error::{
        BackendErrorKind, Operation, TimedOut,
        UnfinishedCause::{self, Contention, Kept, Lost, Undone, Unknown},
        is_transient,
    },
    transaction::{
        Dialect, Isolation, LentTransaction, TransactionService, future::ResponseFuture,
    },
};
use tower_test::mock;
use world::{MySql, Postgres, Sqlite, World, until};

// ===== the handler =====

/// What a handler has in its hands. In statements `{t}` stands for the table, `{id}` for the message.
struct Job<W: World> {
    id: String,
    table: String,
    transaction: LentTransaction<W::Db>,
}

const EFFECT: &str = "INSERT INTO {t}_l (id) VALUES ('{id}')";

impl<W: World> Job<W> {
    fn spelled(&self, statement: &str) -> String {
        statement
            .replace("{t}", &self.table)
            .replace("{id}", &self.id)
    }

    async fn run(&mut self, statement: &str) -> Result<u64, sqlx::Error> {
        let statement = self.spelled(statement);
        W::execute(&mut self.transaction, statement).await
    }

    async fn number(&mut self, statement: &str) -> Result<i64, sqlx::Error> {
        let statement = self.spelled(statement);
        W::number(&mut self.transaction, statement).await
    }

    /// What is to happen exactly once.
    async fn effect(&mut self) -> Result<(), sqlx::Error> {
        self.run(EFFECT).await.map(drop)
    }
}

type Deed<W> = Box<dyn FnOnce(Job<W>) -> BoxFuture<Result<(), BoxError>> + Send>;

fn deed<W, F>(deed: impl FnOnce(Job<W>) -> F + Send + 'static) -> Deed<W>
where
    W: World,
    F: Future<Output = Result<(), BoxError>> + Send + 'static,
{
    Box::new(|job| Box::pin(deed(job)))
}

/// Does one deed after the other; when there is none left, it has its effect and answers Ok.
struct Hands<W: World> {
    table: String,
    runs: Arc<AtomicUsize>,
    deeds: Arc<Mutex<VecDeque<Deed<W>>>>,
}

impl<W: World> Hands<W> {
    fn runs(&self) -> usize {
        self.runs.load(SeqCst)
    }
}

impl<W: World> Clone for Hands<W> {
    fn clone(&self) -> Self {
        Hands {
            table: self.table.clone(),
            runs: self.runs.clone(),
            deeds: self.deeds.clone(),
        }
    }
}

impl<W: World> Service<WithTransaction<Envelope, W::Db>> for Hands<W> {
    type Response = ();
    type Error = BoxError;
    type Future = BoxFuture<Result<(), BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, message: WithTransaction<Envelope, W::Db>) -> Self::Future {
        self.runs.fetch_add(1, SeqCst);
        let job = Job {
            id: message
                .request
                .meta()
                .id()
                .map_or(String::new(), ToString::to_string),
            table: self.table.clone(),
            transaction: message.transaction,
        };
        let next = self.deeds.lock().unwrap().pop_front();
        let good = || {
            deed(|mut job: Job<W>| async move {
                job.effect().await?;
                Ok(())
            })
        };
        next.unwrap_or_else(good)(job)
    }
}

type Consumer = BoxCloneSyncService<Envelope, (), BoxError>;

// ===== the desk =====

/// A record, a table of effects beside it, and a pool that the handlers run on.
struct Desk<W: World> {
    world: W,
    pool: Pool<W::Db>,
    /// To look, and to be in the way.
    eyes: Pool<W::Db>,
    layer: TransactionLayer<W::Db>,
}

impl<W: World> Desk<W> {
    /// With so many connections. A test that gets `None` is over.
    async fn open(name: &str, connections: u32) -> Option<Self> {
        let world = W::open(name).await?;
        let eyes = world.pool(4).await;
        Some(Self::over(world, eyes, connections).await)
    }

    /// With so many connections through a proxy.
    async fn behind_proxy(name: &str, connections: u32) -> Option<(Self, Proxy)> {
        let mut world = W::open(name).await?;
        let eyes = world.pool(4).await;
        let proxy = world.behind_proxy().await;
        Some((Self::over(world, eyes, connections).await, proxy))
    }

    async fn over(world: W, eyes: Pool<W::Db>, connections: u32) -> Self {
        for statement in [
            "CREATE TABLE {t}_l (id VARCHAR(99) NOT NULL)",
            "CREATE TABLE {t}_r (id INT PRIMARY KEY, n BIGINT NOT NULL)",
            "INSERT INTO {t}_r (id, n) VALUES (1, 0), (2, 0)",
        ] {
            world.run(statement).await;
        }
        let pool = world.pool(connections).await;
        let layer = W::transactions(world.builder(), pool.clone());
        Desk {
            world,
            pool,
            eyes,
            layer,
        }
    }

    fn hands(&self, deeds: impl IntoIterator<Item = Deed<W>>) -> Hands<W> {
        Hands {
            table: self.world.table().to_owned(),
            runs: Arc::default(),
            deeds: Arc::new(Mutex::new(deeds.into_iter().collect())),
        }
    }

    fn consumer(&self, hands: &Hands<W>) -> Consumer {
        BoxCloneSyncService::new(self.layer.layer(hands.clone()))
    }

    /// A consumer whose first message meets this.
    fn meets(&self, first: Deed<W>) -> (Consumer, Hands<W>) {
        let hands = self.hands([first]);
        (self.consumer(&hands), hands)
    }

    async fn number(&self, statement: &str) -> i64 {
        let mut session = self.eyes.acquire().await.unwrap();
        let statement = statement.replace("{t}", self.world.table());
        W::number(&mut session, statement).await.unwrap()
    }

    /// How many effects a message had, and what the record says of it.
    async fn stands(&self, id: &str) -> (i64, String) {
        let count = format!("SELECT count(*) FROM {{t}}_l WHERE id = '{id}'");
        let stored = self.world.stored(id).await;
        let state = stored.map_or("free".to_owned(), |stored| stored.state);
        (self.number(&count).await, state)
    }

    async fn assert_stands(&self, id: &str, effects: i64, state: &str) {
        assert_eq!(self.stands(id).await, (effects, state.to_owned()), "{id}");
    }

    /// The message had its effect once, and is not run again.
    async fn assert_once(&self, consumer: &mut Consumer, hands: &Hands<W>, id: &str) {
        self.assert_stands(id, 1, "done").await;
        let runs = hands.runs();
        deliver(consumer, envelope(id)).await.unwrap();
        assert_eq!(hands.runs(), runs, "{id} runs again");
        self.assert_stands(id, 1, "done").await;
    }

    /// Each connection of the pool is as if nothing had happened: for the next message, and for
    /// whoever uses it otherwise.
    async fn assert_pool_is_good(&self, consumer: &mut Consumer, hands: &Hands<W>) {
        let effect = EFFECT.replace("{t}", self.world.table());
        let begin = if W::IS_MYSQL {
            "START TRANSACTION"
        } else {
            "BEGIN"
        };
        for _ in 0..2 {
            let (before, _) = self.stands("own").await;
            // Refused by sqlx if it counts on a transaction.
            let mut own = self.pool.begin_with(begin).await.unwrap();
            let own_effect = effect.replace("{id}", "own");
            W::execute(&mut own, own_effect.clone()).await.unwrap();
            own.rollback().await.unwrap();
            self.assert_stands("own", before, "free").await;
            let mut own = self.pool.begin().await.unwrap();
            W::execute(&mut own, own_effect).await.unwrap();
            own.commit().await.unwrap();
            self.assert_stands("own", before + 1, "free").await;
            let next = format!("after {before}");
            deliver(consumer, envelope(&next)).await.unwrap();
            self.assert_once(consumer, hands, &next).await;
        }
    }

    async fn close(self) {
        self.pool.close().await;
        self.clean().await;
    }

    /// Where connections of the pool are left that never come back.
    async fn clean(self) {
        self.layer.drained().await;
        self.eyes.close().await;
        self.world.run("DROP TABLE {t}_l").await;
        self.world.run("DROP TABLE {t}_r").await;
        self.world.drop().await;
    }
}

/// Why the message is to be handled again.
#[track_caller]
fn cause<T>(answer: Result<T, BoxError>) -> UnfinishedCause {
    let error = answer.err().expect("not acked");
    assert!(is_transient(&error), "{error}");
    match error.downcast_ref::<Unfinished>() {
        Some(unfinished) => unfinished.cause(),
        None => panic!("{error}"),
    }
}

#[track_caller]
fn parked<T>(answer: Result<T, BoxError>) -> Duration {
    let error = answer.err().expect("not acked");
    assert!(is_transient(&error), "{error}");
    match error.downcast_ref::<Parked>() {
        Some(parked) => parked.retry_after(),
        None => panic!("{error}"),
    }
}

/// In which step of the store the message failed.
#[track_caller]
fn operation<T>(answer: Result<T, BoxError>) -> Operation {
    let error = answer.err().expect("not acked");
    assert!(is_transient(&error), "{error}");
    match error.downcast_ref::<StoreError>() {
        Some(error) => error.operation(),
        None => panic!("{error}"),
    }
}

/// Delivers again as long as the message is parked.
async fn redelivered(consumer: &mut Consumer, id: &str) -> Result<(), BoxError> {
    let mut answer = None;
    until("the message is not parked", async || {
        let now = deliver(consumer, envelope(id)).await;
        let parked = now.as_ref().is_err_and(|error| error.is::<Parked>());
        answer = Some(now);
        !parked
    })
    .await;
    answer.unwrap()
}

// ===== errors that are swallowed =====

/// A handler that goes on after an error which ended its transaction.
async fn swallows_the_end<W: World>(name: &str, breaks: &'static str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    let (mut consumer, hands) = desk.meets(deed(move |mut job: Job<W>| async move {
        job.effect().await?;
        job.run(breaks).await.unwrap_err();
        // SQLite commits that by itself.
        let _ = job.run("INSERT INTO {t}_l (id) VALUES ('after')").await;
        Ok(())
    }));
    assert_eq!(cause(deliver(&mut consumer, envelope("a")).await), Undone);
    desk.assert_stands("a", 0, "free").await;
    let alone = i64::from(W::SESSION.is_none());
    desk.assert_stands("after", alone, "free").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    deliver(&mut consumer, envelope("a")).await.unwrap();
    desk.assert_once(&mut consumer, &hands, "a").await;

    // One that tells is told of by its own error.
    hands
        .deeds
        .lock()
        .unwrap()
        .push_back(deed(move |mut job: Job<W>| async move {
            job.effect().await?;
            job.run(breaks).await?;
            Ok(())
        }));
    let error = deliver(&mut consumer, envelope("b")).await.unwrap_err();
    assert!(error.is::<sqlx::Error>(), "{error}");
    desk.assert_stands("b", 0, "free").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.close().await;
}

/// A handler that goes on after an error which undid one statement.
async fn swallows_one_statement<W: World>(name: &str, savepoint: bool) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    let (mut consumer, hands) = desk.meets(deed(move |mut job: Job<W>| async move {
        job.effect().await?;
        let (fails, table) = ("INSERT INTO {t}_l (id) VALUES (NULL)", job.table.clone());
        if savepoint {
            let mut part = Connection::begin(&mut *job.transaction).await?;
            W::execute(&mut part, fails.replace("{t}", &table))
                .await
                .unwrap_err();
            part.rollback().await?;
        } else {
            job.run(fails).await.unwrap_err();
        }
        job.run("UPDATE {t}_r SET n = n + 1").await?;
        Ok(())
    }));
    deliver(&mut consumer, envelope("a")).await.unwrap();
    assert_eq!(desk.number("SELECT max(n) FROM {t}_r").await, 1);
    desk.assert_once(&mut consumer, &hands, "a").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.close().await;
}

/// A handler whose transaction is ended to solve a deadlock, and which goes on or says so.
async fn is_a_deadlocks_victim<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    for swallows in [true, false] {
        let id = format!("swallows {swallows}");
        let table = desk.world.table().to_owned();
        let spelled = move |statement: &str| statement.replace("{t}", &table);
        let (has_one, first) = oneshot::channel();
        let (go, goes) = oneshot::channel::<()>();
        let (mut consumer, hands) = desk.meets(deed(move |mut job: Job<W>| async move {
            job.effect().await?;
            job.run("UPDATE {t}_r SET n = 0 WHERE id = 1").await?;
            has_one.send(()).unwrap();
            goes.await?;
            let error = job.run("UPDATE {t}_r SET n = 0 WHERE id = 2").await;
            if !swallows {
                error?;
            }
            // MariaDB commits that by itself.
            let _ = job.run("INSERT INTO {t}_l (id) VALUES ('after')").await;
            Ok(())
        }));
        // It has changed more, so the other one is undone.
        let mut other = desk.eyes.begin().await.unwrap();
        if !W::IS_MYSQL {
            // Nor is it the one who looks for deadlocks.
            let patient = spelled("SET LOCAL deadlock_timeout = '1h'");
            W::execute(&mut other, patient).await.unwrap();
        }
        for _ in 0..20 {
            let changed = spelled("INSERT INTO {t}_l (id) VALUES ('other')");
            W::execute(&mut other, changed).await.unwrap();
        }
        let two = spelled("UPDATE {t}_r SET n = 0 WHERE id = 2");
        W::execute(&mut other, two).await.unwrap();
        let call = tokio::spawn({
            let (mut consumer, message) = (consumer.clone(), envelope(&id));
            async move { deliver(&mut consumer, message).await }
        });
        first.await.unwrap();
        let one = spelled("UPDATE {t}_r SET n = 0 WHERE id = 1");
        let waits = tokio::spawn(async move {
            W::execute(&mut other, one).await.unwrap();
            other.rollback().await.unwrap();
        });
        desk.world.until_waiting(&waits).await;
        go.send(()).unwrap();
        let expected = if swallows { Undone } else { Contention };
        assert_eq!(cause(call.await.unwrap()), expected);
        waits.await.unwrap();
        desk.assert_stands(&id, 0, "free").await;
        deliver(&mut consumer, envelope(&id)).await.unwrap();
        desk.assert_once(&mut consumer, &hands, &id).await;
    }
    desk.close().await;
}

// ===== ended by hand =====

async fn rolls_back_by_hand<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    let (mut consumer, hands) = desk.meets(deed(|mut job: Job<W>| async move {
        job.effect().await?;
        job.run("ROLLBACK").await?;
        Ok(())
    }));
    assert_eq!(cause(deliver(&mut consumer, envelope("a")).await), Undone);
    desk.assert_stands("a", 0, "free").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    deliver(&mut consumer, envelope("a")).await.unwrap();
    desk.assert_once(&mut consumer, &hands, "a").await;

    // And says that it failed.
    let (mut consumer, hands) = desk.meets(deed(|mut job: Job<W>| async move {
        job.effect().await?;
        job.run("ROLLBACK").await?;
        Err(Declined.into())
    }));
    let error = deliver(&mut consumer, envelope("b")).await.unwrap_err();
    assert!(error.is::<Declined>(), "{error}");
    desk.assert_stands("b", 0, "free").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.close().await;
}

/// A handler that commits by hand, or by a statement that the database commits before.
async fn commits_by_hand<W: World>(name: &str, how: &'static str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    let commits = move |job: Job<W>| async move {
        let mut job = job;
        job.effect().await?;
        job.run(how).await?;
        Ok::<_, BoxError>(job)
    };

    // Ok: what it wrote is there once, and is recorded.
    let (mut consumer, hands) = desk.meets(deed(move |job| async move {
        commits(job).await?;
        Ok(())
    }));
    match deliver(&mut consumer, envelope("ok")).await {
        Ok(()) => {}
        // SQLite refuses a commit of nothing.
        answer => assert_eq!((cause(answer), W::SESSION), (Unknown, None)),
    }
    // On SQLite that leaves a connection which counts on a transaction; the next message closes it.
    desk.assert_once(&mut consumer, &hands, "ok").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;

    // Err: what it wrote is there, and nobody takes the message for done.
    let (mut consumer, hands) = desk.meets(deed(move |job| async move {
        commits(job).await?;
        Err(Declined.into())
    }));
    let error = deliver(&mut consumer, envelope("err")).await.unwrap_err();
    assert!(error.is::<Declined>(), "{error}");
    let parts = (&mut consumer, &hands);
    desk.assert_claimed_for_a_minute(parts.0, parts.1, "err")
        .await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;

    // Dropped, as when the process is killed.
    let (committed, is_committed) = oneshot::channel();
    let (mut consumer, hands) = desk.meets(deed(move |job| async move {
        let _kept = commits(job).await?;
        committed.send(()).unwrap();
        pending().await
    }));
    let call = tokio::spawn({
        let mut consumer = consumer.clone();
        async move { deliver(&mut consumer, envelope("killed")).await }
    });
    is_committed.await.unwrap();
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    desk.layer.drained().await;
    desk.assert_claimed_for_a_minute(&mut consumer, &hands, "killed")
        .await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.close().await;
}

impl<W: World> Desk<W> {
    /// Its effect was committed without the record: not acked, and after a minute it runs again.
    async fn assert_claimed_for_a_minute(
        &self,
        consumer: &mut Consumer,
        hands: &Hands<W>,
        id: &str,
    ) {
        self.assert_stands(id, 1, "claimed").await;
        let stored = self.world.stored(id).await.unwrap();
        let lasts = stored.expires_at.unwrap() - stored.since;
        assert!((lasts - 60_000_000).abs() < 1_000_000, "{stored:?}");
        let retry_after = parked(deliver(consumer, envelope(id)).await);
        assert!(retry_after <= Duration::from_secs(60), "{retry_after:?}");
        assert!(retry_after > Duration::from_secs(10), "{retry_after:?}");
        assert_eq!(hands.runs(), 1);
        self.world.expire(id).await;
        deliver(consumer, envelope(id)).await.unwrap();
        assert_eq!(hands.runs(), 2);
        self.assert_stands(id, 2, "done").await;
    }
}

// ===== kept =====

/// A handler that answers while a task has its transaction.
async fn keeps_it<W: World>(name: &str) {
    let Some(mut desk) = Desk::<W>::open(name, 2).await else {
        return;
    };
    desk.layer = desk.layer.lock_wait(Duration::from_millis(50));
    for fails in [false, true] {
        let id = format!("fails {fails}");
        let (drops, dropped) = oneshot::channel::<()>();
        let (mut consumer, hands) = desk.meets(deed(move |mut job: Job<W>| async move {
            job.effect().await?;
            tokio::spawn(async move {
                let _kept = job;
                let _ = dropped.await;
            });
            if fails {
                return Err(Declined.into());
            }
            Ok(())
        }));
        let answer = deliver(&mut consumer, envelope(&id)).await;
        if fails {
            let error = answer.unwrap_err();
            assert!(error.is::<Declined>(), "{error}");
        } else {
            assert_eq!(cause(answer), Kept);
        }
        // As long as it is kept, nobody else runs.
        parked(deliver(&mut consumer, envelope(&id)).await);
        assert_eq!(hands.runs(), 1);
        drops.send(()).unwrap();
        redelivered(&mut consumer, &id).await.unwrap();
        assert_eq!(hands.runs(), 2);
        desk.assert_once(&mut consumer, &hands, &id).await;
    }
    desk.close().await;
}

async fn answers_with_it<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    let hands = desk.hands([]);
    let mut answers = desk.layer.layer(service_fn(
        |message: WithTransaction<Envelope, W::Db>| async move {
            Ok::<_, BoxError>(Some(message.transaction))
        },
    ));
    let answer = deliver(&mut answers, envelope("a")).await;
    assert_eq!(cause(answer), Kept);
    let mut consumer = desk.consumer(&hands);
    deliver(&mut consumer, envelope("a")).await.unwrap();
    desk.assert_once(&mut consumer, &hands, "a").await;
    let duplicate = deliver(&mut answers, envelope("a")).await.unwrap();
    assert!(duplicate.is_none());
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.close().await;
}

async fn gives_it_to_a_task_and_waits<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    let (mut consumer, hands) = desk.meets(deed(|mut job: Job<W>| async move {
        let task = tokio::spawn(async move { job.effect().await });
        task.await??;
        Ok(())
    }));
    deliver(&mut consumer, envelope("a")).await.unwrap();
    desk.assert_once(&mut consumer, &hands, "a").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.close().await;
}

/// It is never given back, so its connection is lost, and the message waits until the server ends it.
async fn forgets_it<W: World>(name: &str) {
    let Some(mut desk) = Desk::<W>::open(name, 3).await else {
        return;
    };
    desk.layer = desk.layer.lock_wait(Duration::from_millis(50));
    let (tells, told) = oneshot::channel();
    let (mut consumer, hands) = desk.meets(deed(move |mut job: Job<W>| async move {
        job.effect().await?;
        if let Some(who) = W::SESSION {
            tells.send(job.number(who).await?).unwrap();
        }
        mem::forget(job);
        Ok(())
    }));
    assert_eq!(cause(deliver(&mut consumer, envelope("a")).await), Kept);
    parked(deliver(&mut consumer, envelope("a")).await);
    desk.assert_stands("a", 0, "free").await;
    if W::SESSION.is_some() {
        desk.world.kill(told.await.unwrap()).await;
        redelivered(&mut consumer, "a").await.unwrap();
        desk.assert_once(&mut consumer, &hands, "a").await;
        desk.clean().await;
    } else {
        // The lock on the file is as eternal.
        desk.world.drop().await;
    }
}

async fn panics<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    let (consumer, hands) = desk.meets(deed(|mut job: Job<W>| async move {
        job.effect().await?;
        panic!("the handler panics, as it was told");
    }));
    let call = tokio::spawn({
        let mut consumer = consumer.clone();
        async move { deliver(&mut consumer, envelope("a")).await }
    });
    assert!(call.await.unwrap_err().is_panic());
    let mut consumer = consumer;
    deliver(&mut consumer, envelope("a")).await.unwrap();
    assert_eq!(hands.runs(), 2);
    desk.assert_once(&mut consumer, &hands, "a").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.close().await;
}

async fn outlives_the_ttl<W: World>(name: &str) {
    let Some(mut desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    let ttl = Duration::from_millis(50);
    desk.layer = W::transactions(desk.world.builder().ttl(ttl), desk.pool.clone());
    let (mut consumer, hands) = desk.meets(deed(move |mut job: Job<W>| async move {
        job.effect().await?;
        tokio::time::sleep(3 * ttl).await;
        Ok(())
    }));
    let begin = desk.world.now().await;
    deliver(&mut consumer, envelope("a")).await.unwrap();
    desk.assert_stands("a", 1, "done").await;
    // Its end is counted from its success.
    let stored = desk.world.stored("a").await.unwrap();
    let (ttl, slack) = (ttl.as_micros() as i64, 1000);
    assert!(stored.since >= begin + 3 * ttl - slack, "{stored:?}");
    let lasts = stored.expires_at.unwrap() - stored.since;
    assert!((lasts - ttl).abs() <= slack, "{stored:?}");
    // After it, the message is a new one.
    let expired = async || desk.world.now().await > stored.expires_at.unwrap() + slack;
    until("the record has ended", expired).await;
    deliver(&mut consumer, envelope("a")).await.unwrap();
    assert_eq!(hands.runs(), 2);
    desk.assert_stands("a", 2, "done").await;
    desk.close().await;
}

// ===== savepoints =====

async fn savepoints<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    // One that is committed, and one in it that is dropped.
    let (mut consumer, hands) = desk.meets(deed(|mut job: Job<W>| async move {
        let effect = job.spelled(EFFECT);
        let mut part = Connection::begin(&mut *job.transaction).await?;
        W::execute(&mut part, effect.clone()).await?;
        let mut inner = Connection::begin(&mut *part).await?;
        W::execute(&mut inner, effect).await?;
        drop(inner);
        part.commit().await?;
        Ok(())
    }));
    deliver(&mut consumer, envelope("a")).await.unwrap();
    desk.assert_once(&mut consumer, &hands, "a").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;

    // One that is open as the handler ends, which rolls back its part alone.
    let (mut consumer, hands) = desk.meets(deed(|mut job: Job<W>| async move {
        job.effect().await?;
        let effect = job.spelled(EFFECT);
        let mut part = Connection::begin(&mut *job.transaction).await?;
        W::execute(&mut part, effect).await?;
        Ok(())
    }));
    deliver(&mut consumer, envelope("b")).await.unwrap();
    desk.assert_once(&mut consumer, &hands, "b").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;

    // One that is committed in a transaction that is not.
    let (mut consumer, hands) = desk.meets(deed(|mut job: Job<W>| async move {
        let effect = job.spelled(EFFECT);
        let mut part = Connection::begin(&mut *job.transaction).await?;
        W::execute(&mut part, effect).await?;
        part.commit().await?;
        Err(Declined.into())
    }));
    deliver(&mut consumer, envelope("c")).await.unwrap_err();
    desk.assert_stands("c", 0, "free").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.close().await;
}

/// A savepoint that nobody ends: sqlx would end that in the place of the transaction.
async fn forgets_a_savepoint<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    for (id, within) in [("a", true), ("b", false)] {
        let (mut consumer, hands) = desk.meets(deed(move |mut job: Job<W>| async move {
            if !within {
                job.effect().await?;
            }
            mem::forget(Connection::begin(&mut *job.transaction).await?);
            if within {
                job.effect().await?;
            }
            Ok(())
        }));
        let answer = deliver(&mut consumer, envelope(id)).await;
        assert_eq!(cause(answer), Undone);
        desk.assert_stands(id, 0, "free").await;
        deliver(&mut consumer, envelope(id)).await.unwrap();
        desk.assert_once(&mut consumer, &hands, id).await;
        desk.assert_pool_is_good(&mut consumer, &hands).await;
    }
    desk.close().await;
}

/// An error that passes for the one within it, as `#[error(transparent)]` of thiserror makes them.
#[derive(Debug)]
struct Transparent(sqlx::Error);

impl fmt::Display for Transparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for Transparent {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

async fn hides_who_was_in_the_way<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    let mut other = desk.eyes.begin().await.unwrap();
    let locks = format!("UPDATE {}_r SET n = 1 WHERE id = 1", desk.world.table());
    W::execute(&mut other, locks).await.unwrap();
    let (mut consumer, hands) = desk.meets(deed(|mut job: Job<W>| async move {
        job.effect().await?;
        let lock = "SELECT n FROM {t}_r WHERE id = 1 FOR UPDATE NOWAIT";
        let locked = job.number(lock).await;
        locked.map_err(Transparent)?;
        Ok(())
    }));
    let answer = deliver(&mut consumer, envelope("a")).await;
    assert_eq!(cause(answer), Contention);
    other.rollback().await.unwrap();
    desk.assert_stands("a", 0, "free").await;
    deliver(&mut consumer, envelope("a")).await.unwrap();
    desk.assert_once(&mut consumer, &hands, "a").await;
    desk.close().await;
}

/// A server that answers on no connection that was there, and on each new one: the pool gets over it.
async fn is_silent_on_a_connection<W: World>(name: &str) {
    let Some((desk, proxy)) = Desk::<W>::behind_proxy(name, 1).await else {
        return;
    };
    let limit = Duration::from_millis(1500);
    let builder = desk.world.builder().response_timeout(limit);
    let impatient = W::transactions(builder, desk.pool.clone()).lock_wait(limit);
    let hands = desk.hands([]);
    let mut consumer: Consumer = BoxCloneSyncService::new(impatient.layer(hands.clone()));
    for step in [Step::Begin, Step::Claim, Step::Close, Step::Commit] {
        let id = format!("silent at {step:?}");
        loop {
            step.trap::<W>(&proxy, &id, At::SwallowReply);
            let answer = timeout(PATIENCE, deliver(&mut consumer, envelope(&id))).await;
            answer.expect("not for ever").unwrap_err();
            // A server that is busy may be too late before.
            if proxy.has_sprung() {
                break;
            }
        }
        // No longer than the pool waits for a connection.
        redelivered(&mut consumer, &id).await.unwrap();
        desk.assert_once(&mut consumer, &hands, &id).await;
        let drained = timeout(PATIENCE, impatient.drained()).await;
        drained.expect("not for ever");
    }
    desk.close().await;
}

/// A savepoint that is dropped while it begins takes the whole transaction with it, in sqlx 0.9; one that is
/// dropped while it ends is there or not.
async fn drops_a_savepoint_in_between<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    for polls in 1..4 {
        for (ends, fails) in [(false, false), (false, true), (true, false), (true, true)] {
            let id = format!("{polls} {ends} {fails}");
            let (mut consumer, hands) = desk.meets(deed(move |mut job: Job<W>| async move {
                if ends {
                    let effect = job.spelled(EFFECT);
                    let mut part = Connection::begin(&mut *job.transaction).await?;
                    W::execute(&mut part, effect).await?;
                    drop_after(polls, part.commit()).await;
                } else {
                    job.effect().await?;
                    drop_after(polls, Connection::begin(&mut *job.transaction)).await;
                }
                if fails {
                    return Err(Declined.into());
                }
                Ok(())
            }));
            match deliver(&mut consumer, envelope(&id)).await {
                // It was over before it was dropped.
                Ok(()) => desk.assert_stands(&id, 1, "done").await,
                Err(error) => {
                    if !error.is::<Declined>() {
                        // What sqlx sends for the drop may fail, and be told to whoever comes next.
                        let expected = if fails { Lost } else { Undone };
                        assert_eq!(cause(Err::<(), _>(error)), expected);
                    }
                    desk.assert_stands(&id, 0, "free").await;
                }
            }
            desk.assert_pool_is_good(&mut consumer, &hands).await;
            deliver(&mut consumer, envelope(&id)).await.unwrap();
            desk.assert_once(&mut consumer, &hands, &id).await;
        }
    }
    desk.close().await;
}

// ===== commits that fail =====

/// A foreign key that is looked at when the transaction is committed.
async fn breaks_a_late_key<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    desk.world
        .run("CREATE TABLE {t}_p (id INT PRIMARY KEY)")
        .await;
    desk.world
        .run("CREATE TABLE {t}_c (p INT REFERENCES {t}_p(id) DEFERRABLE INITIALLY DEFERRED)")
        .await;
    let child = || {
        deed(|mut job: Job<W>| async move {
            job.effect().await?;
            job.run("INSERT INTO {t}_c (p) VALUES (7)").await?;
            Ok(())
        })
    };
    let hands = desk.hands([child(), child()]);
    let mut consumer = desk.consumer(&hands);
    let error = deliver(&mut consumer, envelope("a")).await.unwrap_err();
    assert!(!is_transient(&error), "the handler's own: {error}");
    let told = error.downcast_ref::<sqlx::Error>().expect("sqlx's own");
    let told = told.as_database_error().unwrap();
    assert!(told.is_foreign_key_violation(), "{told}");
    desk.assert_stands("a", 0, "free").await;
    desk.world.run("INSERT INTO {t}_p (id) VALUES (7)").await;
    deliver(&mut consumer, envelope("a")).await.unwrap();
    assert_eq!(hands.runs(), 2);
    desk.assert_once(&mut consumer, &hands, "a").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.pool.close().await;
    desk.world.run("DROP TABLE {t}_c").await;
    desk.world.run("DROP TABLE {t}_p").await;
    desk.close().await;
}

/// A trigger that raises when the transaction is committed.
#[tokio::test]
async fn what_a_late_trigger_raises_is_the_handlers_own_error() {
    let Some(desk) = Desk::<Postgres>::open("th_raises", 1).await else {
        return;
    };
    desk.world
        .run(
            "CREATE FUNCTION {t}_f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF NEW.id LIKE 'E%' THEN RAISE EXCEPTION 'no' USING ERRCODE = substr(NEW.id, 2, 5); END IF; \
             RETURN NULL; END $$; \
             CREATE CONSTRAINT TRIGGER {t}_g AFTER INSERT ON {t}_l DEFERRABLE INITIALLY DEFERRED \
             FOR EACH ROW EXECUTE FUNCTION {t}_f()",
        )
        .await;
    let hands = desk.hands([]);
    let mut consumer = desk.consumer(&hands);
    // Raised by hand, a constraint, a text that is too long, a missing table, no permission.
    for code in ["P0001", "23514", "22001", "42P01", "42501"] {
        let id = format!("E{code}");
        let error = deliver(&mut consumer, envelope(&id)).await.unwrap_err();
        assert!(!is_transient(&error), "the handler's own: {error}");
        let told = error.downcast_ref::<sqlx::Error>().expect("sqlx's own");
        assert_eq!(told.as_database_error().unwrap().code().unwrap(), code);
        desk.assert_stands(&id, 0, "free").await;
    }
    for code in ["40001", "40P01", "55P03"] {
        let id = format!("E{code}");
        let answer = deliver(&mut consumer, envelope(&id)).await;
        assert_eq!(cause(answer), Contention);
        desk.assert_stands(&id, 0, "free").await;
    }
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.pool.close().await;
    desk.world
        .run("DROP TABLE {t}_l; DROP FUNCTION {t}_f(); CREATE TABLE {t}_l ()")
        .await;
    desk.close().await;
}

/// Two transactions that each read what the other one writes: the second one to commit is refused.
#[tokio::test]
async fn a_commit_that_cannot_be_serialized_is_contention() {
    let Some((mut desk, proxy)) = Desk::<Postgres>::behind_proxy("th_skew", 1).await else {
        return;
    };
    desk.layer = desk.layer.isolation(Isolation::Serializable);
    let skewed = || {
        deed(|mut job: Job<Postgres>| async move {
            job.effect().await?;
            job.number("SELECT max(n) FROM {t}_r").await?;
            job.run("UPDATE {t}_r SET n = n + 1 WHERE id = 1").await?;
            Ok(())
        })
    };
    let hands = desk.hands([skewed(), skewed()]);
    let mut consumer = desk.consumer(&hands);
    let mut other = desk
        .eyes
        .begin_with("BEGIN ISOLATION LEVEL SERIALIZABLE")
        .await
        .unwrap();
    let table = desk.world.table().to_owned();
    Postgres::number(&mut other, format!("SELECT max(n) FROM {table}_r"))
        .await
        .unwrap();
    let writes = format!("UPDATE {table}_r SET n = n + 1 WHERE id = 2");
    Postgres::execute(&mut other, writes).await.unwrap();
    // After the claim and the effect: the closing statement, whose answer is late.
    proxy.trap("skewed", 2, At::HoldReply);
    let call = tokio::spawn({
        let mut consumer = consumer.clone();
        async move { deliver(&mut consumer, envelope("skewed")).await }
    });
    proxy.holds().await;
    other.commit().await.unwrap();
    proxy.release();
    assert_eq!(cause(call.await.unwrap()), Contention);
    desk.assert_stands("skewed", 0, "free").await;
    deliver(&mut consumer, envelope("skewed")).await.unwrap();
    assert_eq!(hands.runs(), 2);
    desk.assert_once(&mut consumer, &hands, "skewed").await;
    desk.close().await;
}

// ===== lost connections =====

/// When a connection is lost.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Begin,
    Claim,
    Effect,
    Close,
    Commit,
}

impl Step {
    const ALL: [Step; 5] = [
        Step::Begin,
        Step::Claim,
        Step::Effect,
        Step::Close,
        Step::Commit,
    ];

    /// By what the client sends: statements are prepared without the id, and executed with it.
    fn trap<W: World>(self, proxy: &Proxy, id: &str, at: At) {
        let begin = if W::IS_MYSQL {
            "START TRANSACTION"
        } else {
            "BEGIN"
        };
        match self {
            Step::Begin => proxy.trap(begin, 0, at),
            Step::Claim => proxy.trap(id, 0, at),
            Step::Effect => proxy.trap(id, 1, at),
            Step::Close => proxy.trap(id, 2, at),
            Step::Commit => proxy.trap("COMMIT", 0, at),
        }
    }
}

async fn loses_connections<W: World>(name: &str) {
    let Some((desk, proxy)) = Desk::<W>::behind_proxy(name, 1).await else {
        return;
    };
    let hands = desk.hands([]);
    let mut consumer = desk.consumer(&hands);
    // The table is looked up once.
    deliver(&mut consumer, envelope("first")).await.unwrap();
    for step in Step::ALL {
        for at in [At::CutBefore, At::CutReply] {
            let id = format!("{step:?} {at:?}");
            let before = hands.runs();
            step.trap::<W>(&proxy, &id, at);
            let answer = deliver(&mut consumer, envelope(&id)).await;
            proxy.sprung().await;
            let ran = hands.runs() - before;
            match step {
                Step::Begin => assert_eq!(operation(answer), Operation::Begin, "{id}"),
                Step::Claim => assert_eq!(operation(answer), Operation::Claim, "{id}"),
                Step::Effect | Step::Close => assert_eq!(cause(answer), Lost, "{id}"),
                Step::Commit => assert_eq!(cause(answer), Unknown, "{id}"),
            }
            let begun = !matches!(step, Step::Begin | Step::Claim);
            assert_eq!(ran, usize::from(begun), "{id}");
            let committed = step == Step::Commit && at == At::CutReply;
            if committed {
                desk.assert_stands(&id, 1, "done").await;
            } else {
                desk.assert_stands(&id, 0, "free").await;
            }
            deliver(&mut consumer, envelope(&id)).await.unwrap();
            assert_eq!(hands.runs() - before - ran, usize::from(!committed), "{id}");
            desk.assert_once(&mut consumer, &hands, &id).await;
        }
    }
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.close().await;
}

/// A handler that takes the loss of its connection for nothing.
async fn swallows_a_loss<W: World>(name: &str) {
    let Some((desk, proxy)) = Desk::<W>::behind_proxy(name, 1).await else {
        return;
    };
    let (mut consumer, hands) = desk.meets(deed(|mut job: Job<W>| async move {
        job.effect().await?;
        job.run("UPDATE {t}_r SET n = 7").await.unwrap_err();
        Ok(())
    }));
    proxy.trap("n = 7", 0, At::CutReply);
    assert_eq!(cause(deliver(&mut consumer, envelope("a")).await), Lost);
    desk.assert_stands("a", 0, "free").await;
    deliver(&mut consumer, envelope("a")).await.unwrap();
    desk.assert_once(&mut consumer, &hands, "a").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.close().await;
}

/// A server that does not answer any more.
async fn is_silent<W: World>(name: &str) {
    let Some((desk, proxy)) = Desk::<W>::behind_proxy(name, 8).await else {
        return;
    };
    let limit = Duration::from_millis(1500);
    let builder = desk.world.builder().response_timeout(limit);
    let impatient = W::transactions(builder, desk.pool.clone()).lock_wait(limit);
    let hands = desk.hands([]);
    let mut consumer = desk.consumer(&hands);
    let service = ServiceBuilder::new()
        .layer(impatient.clone())
        .layer(TimeoutLayer::new(2 * limit))
        .service(hands.clone());
    let mut meets: Consumer = BoxCloneSyncService::new(service);
    for step in Step::ALL {
        let id = format!("silent at {step:?}");
        let (before, error) = loop {
            let before = hands.runs();
            step.trap::<W>(&proxy, &id, At::SwallowReply);
            let answer = timeout(PATIENCE, deliver(&mut meets, envelope(&id))).await;
            let error = answer.expect("not for ever").unwrap_err();
            // A server that is busy may be too late before.
            if proxy.has_sprung() {
                break (before, error);
            }
        };
        let ran = hands.runs() - before;
        let begun = !matches!(step, Step::Begin | Step::Claim);
        assert_eq!(ran, usize::from(begun), "{step:?}");
        if matches!(step, Step::Begin | Step::Close | Step::Commit) {
            assert_eq!(late(&error), Some(limit), "{step:?}: {error:?}");
        }
        let fails = error.is::<Elapsed>() && !is_transient(&error);
        let answer = Err::<(), _>(error);
        match step {
            Step::Begin => assert_eq!(operation(answer), Operation::Begin),
            // As if somebody had it: a lock that is not to be had looks no different.
            Step::Claim => drop(parked(answer)),
            // A handler that hung has failed, whatever it waited for.
            Step::Effect => assert!(fails, "{answer:?}"),
            Step::Close => assert_eq!(cause(answer), Lost),
            Step::Commit => assert_eq!(cause(answer), Unknown),
        }
        let drained = timeout(PATIENCE, impatient.drained()).await;
        drained.expect("not for ever");
        // Then the connection ends.
        proxy.cut();
        redelivered(&mut consumer, &id).await.unwrap();
        let committed = step == Step::Commit;
        assert_eq!(hands.runs() - before - ran, usize::from(!committed), "{id}");
        desk.assert_once(&mut consumer, &hands, &id).await;
    }
    desk.close().await;
}

/// The limit that ran out.
fn late(error: &BoxError) -> Option<Duration> {
    let mut next: Option<&(dyn Error + 'static)> = Some(error.as_ref());
    while let Some(error) = next {
        if let Some(late) = error.downcast_ref::<TimedOut>() {
            return Some(late.limit());
        }
        next = error.source();
    }
    None
}

/// An administrator ends the session of a handler.
async fn is_killed<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    for swallows in [false, true] {
        let id = format!("swallows {swallows}");
        let (tells, told) = oneshot::channel();
        let (go, goes) = oneshot::channel::<()>();
        let (mut consumer, hands) = desk.meets(deed(move |mut job: Job<W>| async move {
            job.effect().await?;
            tells.send(job.number(W::SESSION.unwrap()).await?).unwrap();
            goes.await?;
            let error = job.effect().await;
            if !swallows {
                error?;
            }
            Ok(())
        }));
        let call = tokio::spawn({
            let (mut consumer, message) = (consumer.clone(), envelope(&id));
            async move { deliver(&mut consumer, message).await }
        });
        desk.world.kill(told.await.unwrap()).await;
        go.send(()).unwrap();
        assert_eq!(cause(call.await.unwrap()), Lost, "{id}");
        desk.assert_stands(&id, 0, "free").await;
        deliver(&mut consumer, envelope(&id)).await.unwrap();
        desk.assert_once(&mut consumer, &hands, &id).await;
    }
    desk.close().await;
}

/// A session that PostgreSQL ends as it was idle in its transaction for too long.
#[tokio::test]
async fn a_session_that_idled_too_long_is_lost() {
    let Some(desk) = Desk::<Postgres>::open("th_idle", 1).await else {
        return;
    };
    for swallows in [false, true] {
        let id = format!("swallows {swallows}");
        let (tells, told) = oneshot::channel();
        let (go, goes) = oneshot::channel::<()>();
        let (mut consumer, hands) = desk.meets(deed(move |mut job: Job<Postgres>| async move {
            job.effect().await?;
            job.run("SET LOCAL idle_in_transaction_session_timeout = '50ms'")
                .await?;
            tells.send(()).unwrap();
            goes.await?;
            if !swallows {
                job.effect().await?;
            }
            Ok(())
        }));
        let call = tokio::spawn({
            let (mut consumer, message) = (consumer.clone(), envelope(&id));
            async move { deliver(&mut consumer, message).await }
        });
        told.await.unwrap();
        until("the server has ended it", async || {
            desk.world.sessions("state = 'idle in transaction'").await == 0
        })
        .await;
        go.send(()).unwrap();
        assert_eq!(cause(call.await.unwrap()), Lost, "{id}");
        desk.assert_stands(&id, 0, "free").await;
        deliver(&mut consumer, envelope(&id)).await.unwrap();
        desk.assert_once(&mut consumer, &hands, &id).await;
    }
    desk.close().await;
}

/// All that a process has ends at once, in the middle of a handler.
async fn ends_with_its_process<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    let (told, mut tells) = mpsc::channel(1);
    let hands = desk.hands([deed(move |mut job: Job<W>| async move {
        job.effect().await?;
        told.send(()).await?;
        pending().await
    })]);
    let builder = desk.world.builder();
    let process = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let url = desk.world.url().to_owned();
    let inside = hands.clone();
    process.spawn(async move {
        let pool = Pool::<W::Db>::connect(&url).await.unwrap();
        let mut consumer = W::transactions(builder, pool).layer(inside);
        deliver(&mut consumer, envelope("a")).await
    });
    tells.recv().await.unwrap();
    desk.assert_stands("a", 0, "free").await;
    process.shutdown_background();
    let mut consumer = desk.consumer(&hands);
    redelivered(&mut consumer, "a").await.unwrap();
    assert_eq!(hands.runs(), 2);
    desk.assert_once(&mut consumer, &hands, "a").await;
    desk.close().await;
}

// ===== the layers around it =====

/// Has its effect, and fails.
fn fails<W: World>() -> Deed<W> {
    deed(|mut job: Job<W>| async move {
        job.effect().await?;
        Err(Declined.into())
    })
}

async fn is_retried_outside<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    let hands = desk.hands([
        fails(),
        fails(),
        // Also what is no failure of the handler's is worth another try.
        deed(|mut job: Job<W>| async move {
            job.effect().await?;
            job.run("ROLLBACK").await?;
            Ok(())
        }),
    ]);
    let service = ServiceBuilder::new()
        .layer(RetryLayer::new(Retries(3)))
        .layer(desk.layer.clone())
        .service(hands.clone());
    let mut consumer = BoxCloneSyncService::new(service);
    deliver(&mut consumer, envelope("a")).await.unwrap();
    assert_eq!(hands.runs(), 4);
    desk.assert_once(&mut consumer, &hands, "a").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.close().await;
}

/// Would try for ever, but what is lent cannot be cloned.
#[derive(Clone)]
struct Inside(Arc<AtomicUsize>);

impl<Req, Res, E> Policy<Req, Res, E> for Inside {
    type Future = Ready<()>;

    fn retry(&mut self, _: &mut Req, _: &mut Result<Res, E>) -> Option<Ready<()>> {
        Some(ready(()))
    }

    fn clone_request(&mut self, _: &Req) -> Option<Req> {
        self.0.fetch_add(1, SeqCst);
        None
    }
}

async fn is_retried_inside<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    let (hands, asked) = (desk.hands([fails()]), Arc::default());
    let service = ServiceBuilder::new()
        .layer(desk.layer.clone())
        .layer(RetryLayer::new(Inside(Arc::clone(&asked))))
        .service(hands.clone());
    let mut consumer = BoxCloneSyncService::new(service);
    let error = deliver(&mut consumer, envelope("a")).await.unwrap_err();
    assert!(error.is::<Declined>(), "{error}");
    assert_eq!((hands.runs(), asked.load(SeqCst)), (1, 1));
    desk.assert_stands("a", 0, "free").await;
    deliver(&mut consumer, envelope("a")).await.unwrap();
    desk.assert_once(&mut consumer, &hands, "a").await;
    desk.close().await;
}

/// A timeout drops the handler in the middle of a statement. `statement`: what takes long, as long as
/// somebody has locked a row, or by itself.
async fn is_timed_out_inside<W: World>(name: &str, statement: &'static str) {
    let Some(mut desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    // So long that the statement ends.
    let builder = desk.world.builder().response_timeout(2 * PATIENCE);
    desk.layer = W::transactions(builder, desk.pool.clone());
    let (alive, dropped) = oneshot::channel::<()>();
    let hands = desk.hands([deed(move |mut job: Job<W>| async move {
        let _alive = alive;
        job.effect().await?;
        job.number(statement).await?;
        pending().await
    })]);
    let service = ServiceBuilder::new()
        .layer(desk.layer.clone())
        .layer(TimeoutLayer::new(Duration::from_millis(200)))
        .service(hands.clone());
    let consumer: Consumer = BoxCloneSyncService::new(service);
    let mut other = match W::SESSION {
        Some(_) => Some(desk.eyes.begin().await.unwrap()),
        None => None,
    };
    if let Some(other) = &mut other {
        let locks = format!("UPDATE {}_r SET n = 1 WHERE id = 1", desk.world.table());
        W::execute(other, locks).await.unwrap();
    }
    let call = tokio::spawn({
        let mut consumer = consumer.clone();
        async move { deliver(&mut consumer, envelope("a")).await }
    });
    dropped.await.unwrap_err();
    if let Some(other) = other {
        other.rollback().await.unwrap();
    }
    let error = call.await.unwrap().unwrap_err();
    assert!(error.is::<Elapsed>(), "{error:?}");
    assert!(!is_transient(&error), "a handler that hung has failed");
    desk.assert_stands("a", 0, "free").await;
    let mut untimed = desk.consumer(&hands);
    desk.assert_pool_is_good(&mut untimed, &hands).await;
    deliver(&mut untimed, envelope("a")).await.unwrap();
    desk.assert_once(&mut untimed, &hands, "a").await;
    desk.close().await;
}

/// The same, with a statement that goes on for longer than the connection is waited for.
async fn is_timed_out_for_good<W: World>(name: &str, statement: &'static str) {
    let Some(desk) = Desk::<W>::open(name, 2).await else {
        return;
    };
    let limit = Duration::from_secs(2);
    let builder = desk.world.builder().response_timeout(limit);
    let impatient = W::transactions(builder, desk.pool.clone());
    let hands = desk.hands([deed(move |mut job: Job<W>| async move {
        job.number(statement).await?;
        Ok(())
    })]);
    let service = ServiceBuilder::new()
        .layer(impatient.clone())
        .layer(TimeoutLayer::new(limit))
        .service(hands.clone());
    let mut meets: Consumer = BoxCloneSyncService::new(service);
    let mut other = desk.eyes.begin().await.unwrap();
    let locks = format!("UPDATE {}_r SET n = 1 WHERE id = 1", desk.world.table());
    W::execute(&mut other, locks).await.unwrap();
    let error = loop {
        let error = deliver(&mut meets, envelope("a")).await.unwrap_err();
        // A server that is busy may be too late for the begin.
        if hands.runs() > 0 {
            break error;
        }
    };
    assert!(error.is::<Elapsed>(), "{error:?}");
    desk.assert_stands("a", 0, "free").await;
    other.rollback().await.unwrap();
    let mut consumer = desk.consumer(&hands);
    redelivered(&mut consumer, "a").await.unwrap();
    desk.assert_once(&mut consumer, &hands, "a").await;
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    impatient.drained().await;
    desk.close().await;
}

async fn is_timed_out_outside<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    // In the handler: rolled back.
    let hands = desk.hands([deed(|mut job: Job<W>| async move {
        job.effect().await?;
        pending().await
    })]);
    let service = ServiceBuilder::new()
        .layer(TimeoutLayer::new(Duration::from_millis(300)))
        .layer(desk.layer.clone())
        .service(hands.clone());
    let mut outside: Consumer = BoxCloneSyncService::new(service);
    let mut consumer = desk.consumer(&hands);
    let error = deliver(&mut outside, envelope("a")).await.unwrap_err();
    assert!(error.is::<Elapsed>(), "{error}");
    desk.layer.drained().await;
    desk.assert_stands("a", 0, "free").await;
    // Should the timeout have come before the handler did, that would hang now.
    hands.deeds.lock().unwrap().clear();
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    deliver(&mut consumer, envelope("a")).await.unwrap();
    desk.assert_once(&mut consumer, &hands, "a").await;

    // In the commit, wherever it is: a task finishes it.
    let hands = desk.hands([]);
    let mut consumer = desk.consumer(&hands);
    let mut service = desk.layer.layer(hands.clone());
    for polls in 0.. {
        let id = format!("polls {polls}");
        let mut call = Box::pin(service.ready().await.unwrap().call(envelope(&id)));
        let mut left = polls;
        let answered = poll_fn(|cx| {
            if format!("{call:?}").contains("Committing") {
                if left == 0 {
                    return Poll::Ready(false);
                }
                left -= 1;
            }
            call.as_mut().poll(cx).map(|answer| answer.is_ok())
        })
        .await;
        drop(call);
        desk.layer.drained().await;
        desk.assert_once(&mut consumer, &hands, &id).await;
        if answered {
            assert!(polls > 0, "none was dropped");
            break;
        }
    }
    desk.assert_pool_is_good(&mut consumer, &hands).await;
    desk.close().await;
}

async fn is_dead_lettered_outside<W: World>(name: &str) {
    let Some(mut desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    desk.layer = desk.layer.lock_wait(Duration::from_millis(50));
    let (hands, queue) = (desk.hands([]), Queue::default());
    let service = ServiceBuilder::new()
        .layer(DeadLetterLayer::new(queue.clone()))
        .layer(RetryLayer::new(Retries(1)))
        .layer(desk.layer.clone())
        .layer(TimeoutLayer::new(PATIENCE))
        .service(hands.clone());
    let mut consumer: Consumer = BoxCloneSyncService::new(service);

    // What failed for good is acked, without an effect and without a record.
    hands.deeds.lock().unwrap().extend([fails(), fails()]);
    deliver(&mut consumer, envelope("failed")).await.unwrap();
    assert_eq!(hands.runs(), 2);
    desk.assert_stands("failed", 0, "free").await;
    let dead = queue.take();
    assert_eq!(dead.len(), 1);
    let redriven = dead[0].clone().redriven();
    deliver(&mut consumer, redriven).await.unwrap();
    desk.assert_once(&mut consumer, &hands, "failed").await;

    // What is nobody's failure is not.
    let undone = || {
        deed(|mut job: Job<W>| async move {
            job.effect().await?;
            job.run("ROLLBACK").await?;
            Ok(())
        })
    };
    hands.deeds.lock().unwrap().extend([undone(), undone()]);
    assert_eq!(
        cause(deliver(&mut consumer, envelope("undone")).await),
        Undone
    );
    desk.assert_stands("undone", 0, "free").await;
    let claimed = "INSERT INTO {t} (message_id, state, owner, since, expires_at) \
                   VALUES ('parked', 'claimed', 'somebody', {now}, {now} + 60000000)";
    desk.world.run(claimed).await;
    parked(deliver(&mut consumer, envelope("parked")).await);
    desk.world.run("ALTER TABLE {t} RENAME TO {t}_x").await;
    let answer = deliver(&mut consumer, envelope("refused")).await;
    assert_eq!(operation(answer), Operation::Claim);
    desk.world.run("ALTER TABLE {t}_x RENAME TO {t}").await;
    assert!(queue.take().is_empty());
    for id in ["undone", "refused"] {
        deliver(&mut consumer, envelope(id)).await.unwrap();
        desk.assert_once(&mut consumer, &hands, id).await;
    }
    desk.close().await;
}

/// With the dead-letter layer inside, its Ok is taken for the handler's: what a handler wrote that failed is
/// committed, and the redrive is skipped. Why it goes outside.
async fn is_dead_lettered_inside<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 1).await else {
        return;
    };
    // It takes envelopes; the transaction goes beside them.
    let (queue, hands) = (Queue::default(), desk.hands([fails()]));
    let inside = {
        let (queue, hands) = (queue.clone(), hands.clone());
        service_fn(move |message: WithTransaction<Envelope, W::Db>| {
            let (mut hands, envelope) = (hands.clone(), message.request.clone());
            let mut message = Some(message);
            let handler = service_fn(move |_: Envelope| hands.call(message.take().unwrap()));
            DeadLetterLayer::new(queue.clone())
                .layer(handler)
                .oneshot(envelope)
        })
    };
    let mut consumer = BoxCloneSyncService::new(desk.layer.layer(inside));
    deliver(&mut consumer, envelope("a")).await.unwrap();
    desk.assert_stands("a", 1, "done").await;
    let redriven = queue.take().remove(0).redriven();
    deliver(&mut consumer, redriven).await.unwrap();
    assert_eq!(hands.runs(), 1, "skipped, although its handler failed");
    desk.close().await;
}

async fn gives_permits_back<W: World>(name: &str) {
    let Some(desk) = Desk::<W>::open(name, 2).await else {
        return;
    };
    let hands = desk.hands([]);
    let mut service = ServiceBuilder::new()
        .layer(desk.layer.clone())
        .layer(ConcurrencyLimitLayer::new(1))
        .service(hands.clone());
    deliver(&mut service, envelope("a")).await.unwrap();
    let claimed = "INSERT INTO {t} (message_id, state, owner, since, expires_at) \
                   VALUES ('parked', 'claimed', 'somebody', {now}, {now} + 60000000)";
    desk.world.run(claimed).await;
    // The answered futures are kept, so the permit must come back with the answer.
    let mut answered = Vec::new();
    for (id, acked) in [("a", true), ("parked", false), ("a", true), ("b", true)] {
        let ready = timeout(PATIENCE, service.ready()).await.expect("a permit");
        let mut call = Box::pin(ready.unwrap().call(envelope(id)));
        assert_eq!(call.as_mut().await.is_ok(), acked, "{id}");
        answered.push(call);
    }
    assert_eq!(hands.runs(), 2);
    drop(answered);
    desk.close().await;
}

// ===== readiness =====

#[tokio::test]
async fn the_instance_that_was_polled_ready_is_the_one_called() {
    let Some(desk) = Desk::<Sqlite>::open("th_ready", 1).await else {
        return;
    };
    // The mock panics when an instance is called that was not ready itself.
    let (mock, mut handle) = mock::pair::<WithTransaction<Envelope, sqlx::Sqlite>, ()>();
    let mut service = mock::Spawn::new(desk.layer.layer(mock));
    handle.allow(0);
    tokio_test::assert_pending!(service.poll_ready());
    for request in 0..3 {
        handle.allow(1);
        tokio_test::assert_ready_ok!(service.poll_ready());
        let id = request.to_string();
        let call = tokio::spawn(service.call(envelope(&id)));
        let called = timeout(PATIENCE, handle.next_request()).await;
        let (message, send) = called.expect("it is called").unwrap();
        tokio_test::assert_pending!(
            service.poll_ready(),
            "the clone has no readiness of its own"
        );
        assert_eq!(message.request.meta().id(), Some(&id.as_str().into()));
        drop(message);
        send.send_response(());
        call.await.unwrap().unwrap();
        desk.assert_stands(&id, 0, "done").await;
    }
    handle.send_error("gone");
    tokio_test::assert_ready_err!(service.poll_ready(), "errors of readiness go up");
    desk.close().await;
}

/// What can be cloned, sent and shared, whatever the handler's future is.
#[test]
fn everything_can_be_sent_shared_and_shown() {
    fn all<T: Clone + Send + Sync + fmt::Debug + 'static>() {}
    fn future<T: Future + Send + fmt::Debug + 'static>() {}
    fn lent<T: Send + fmt::Debug + 'static>() {}

    fn of<DB: Dialect>()
    where
        TransactionLayer<DB>: Clone + Send + Sync + fmt::Debug + 'static,
        TransactionService<Echo, DB>: Clone + Send + Sync + fmt::Debug + 'static,
        ResponseFuture<Echo, Envelope, DB, Always>: Send + fmt::Debug + 'static,
        WithTransaction<Envelope, DB>: Send + fmt::Debug + 'static,
        LentTransaction<DB>: Send + fmt::Debug + 'static,
    {
        all::<TransactionLayer<DB>>();
        all::<TransactionService<Echo, DB>>();
        lent::<WithTransaction<Envelope, DB>>();
        lent::<LentTransaction<DB>>();
    }
    of::<sqlx::Postgres>();
    of::<sqlx::MySql>();
    of::<sqlx::Sqlite>();
    future::<ResponseFuture<Echo, Envelope, sqlx::Postgres, Always>>();
    future::<ResponseFuture<Echo, Envelope, sqlx::MySql, Always>>();
    future::<ResponseFuture<Echo, Envelope, sqlx::Sqlite, Always>>();
}

/// A handler with a name.
#[derive(Clone, Debug)]
struct Echo;

impl<DB: Dialect> Service<WithTransaction<Envelope, DB>> for Echo {
    type Response = ();
    type Error = BoxError;
    type Future = Ready<Result<(), BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: WithTransaction<Envelope, DB>) -> Self::Future {
        ready(Ok(()))
    }
}

// ===== PostgreSQL =====

mod postgres {
    use super::*;

    #[tokio::test]
    async fn a_savepoint_that_is_forgotten_acks_nothing() {
        forgets_a_savepoint::<Postgres>("th_forgets_a_savepoin").await;
    }

    #[tokio::test]
    async fn a_wrapper_hides_no_contention() {
        hides_who_was_in_the_way::<Postgres>("th_hides_who_was_in_t").await;
    }

    #[tokio::test]
    async fn a_silent_connection_is_replaced() {
        is_silent_on_a_connection::<Postgres>("th_is_silent_on_a_con").await;
    }

    #[tokio::test]
    async fn an_error_that_ended_the_transaction_is_not_swallowed() {
        swallows_the_end::<Postgres>(
            "th_swallows_the_end",
            "INSERT INTO {t}_l (id) VALUES (NULL)",
        )
        .await;
    }

    #[tokio::test]
    async fn an_error_that_undid_one_statement_may_be_swallowed() {
        swallows_one_statement::<Postgres>("th_swallows_one_state", true).await;
    }

    #[tokio::test]
    async fn the_victim_of_a_deadlock_is_handled_again() {
        is_a_deadlocks_victim::<Postgres>("th_is_a_deadlocks_vic").await;
    }

    #[tokio::test]
    async fn what_was_rolled_back_by_hand_is_not_acked() {
        rolls_back_by_hand::<Postgres>("th_rolls_back_by_hand").await;
    }

    #[tokio::test]
    async fn what_was_committed_by_hand_is_not_lost() {
        commits_by_hand::<Postgres>("th_commits_by_hand", "COMMIT").await;
    }

    #[tokio::test]
    async fn what_was_committed_and_begun_by_hand_is_not_lost() {
        commits_by_hand::<Postgres>("th_commits_by_hand", "COMMIT; BEGIN").await;
    }

    #[tokio::test]
    async fn a_transaction_that_is_kept_is_not_committed() {
        keeps_it::<Postgres>("th_keeps_it").await;
    }

    #[tokio::test]
    async fn a_transaction_in_the_answer_is_not_committed() {
        answers_with_it::<Postgres>("th_answers_with_it").await;
    }

    #[tokio::test]
    async fn a_task_may_have_it_that_is_waited_for() {
        gives_it_to_a_task_and_waits::<Postgres>("th_gives_it_to_a_task").await;
    }

    #[tokio::test]
    async fn a_transaction_that_is_forgotten_is_not_committed() {
        forgets_it::<Postgres>("th_forgets_it").await;
    }

    #[tokio::test]
    async fn a_panic_rolls_back() {
        panics::<Postgres>("th_panics").await;
    }

    #[tokio::test]
    async fn the_ttl_counts_from_the_end_of_the_handler() {
        outlives_the_ttl::<Postgres>("th_outlives_the_ttl").await;
    }

    #[tokio::test]
    async fn savepoints_are_part_of_the_transaction() {
        savepoints::<Postgres>("th_savepoints").await;
    }

    #[tokio::test]
    async fn a_savepoint_that_is_dropped_in_between_acks_nothing() {
        drops_a_savepoint_in_between::<Postgres>("th_drops_a_savepoint_").await;
    }

    #[tokio::test]
    async fn a_late_constraint_is_the_handlers_own_error() {
        breaks_a_late_key::<Postgres>("th_breaks_a_late_key").await;
    }

    #[tokio::test]
    async fn a_lost_connection_leaves_one_effect() {
        loses_connections::<Postgres>("th_loses_connections").await;
    }

    #[tokio::test]
    async fn a_lost_connection_is_not_swallowed() {
        swallows_a_loss::<Postgres>("th_swallows_a_loss").await;
    }

    #[tokio::test]
    async fn a_silent_server_is_not_waited_for_without_end() {
        is_silent::<Postgres>("th_is_silent").await;
    }

    #[tokio::test]
    async fn a_session_that_was_killed_is_not_the_handlers_failure() {
        is_killed::<Postgres>("th_is_killed").await;
    }

    #[tokio::test]
    async fn what_ends_with_its_process_runs_again() {
        ends_with_its_process::<Postgres>("th_ends_with_its_proc").await;
    }

    #[tokio::test]
    async fn each_attempt_of_a_retry_outside_has_its_own_transaction() {
        is_retried_outside::<Postgres>("th_is_retried_outside").await;
    }

    #[tokio::test]
    async fn a_retry_inside_has_one_attempt() {
        is_retried_inside::<Postgres>("th_is_retried_inside").await;
    }

    #[tokio::test]
    async fn a_timeout_inside_rolls_back() {
        is_timed_out_inside::<Postgres>(
            "th_is_timed_out_insid",
            "SELECT n FROM {t}_r WHERE id = 1 FOR UPDATE",
        )
        .await;
    }

    #[tokio::test]
    async fn a_timeout_in_a_statement_without_end_is_the_handlers_failure() {
        is_timed_out_for_good::<Postgres>(
            "th_is_timed_out_for_g",
            "SELECT n FROM {t}_r WHERE id = 1 FOR UPDATE",
        )
        .await;
    }

    #[tokio::test]
    async fn a_timeout_outside_interrupts_no_commit() {
        is_timed_out_outside::<Postgres>("th_is_timed_out_outsi").await;
    }

    #[tokio::test]
    async fn dead_letters_outside_are_those_of_handlers() {
        is_dead_lettered_outside::<Postgres>("th_is_dead_lettered_o").await;
    }

    #[tokio::test]
    async fn dead_letters_inside_commit_what_failed() {
        is_dead_lettered_inside::<Postgres>("th_is_dead_lettered_i").await;
    }

    #[tokio::test]
    async fn who_is_not_called_gives_the_permit_back() {
        gives_permits_back::<Postgres>("th_gives_permits_back").await;
    }
}

// ===== MySQL, MariaDB =====

mod mysql {
    use super::*;

    /// What a transaction has recorded and not committed yet would be taken for done.
    #[tokio::test]
    async fn what_is_not_committed_is_read_by_no_store() {
        let Some(world) = MySql::open("th_uncommitted").await else {
            return;
        };
        let begin = "SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED";
        let store = world.builder().pool(world.pool_of(1, begin).await).unwrap();
        let error = store.seen(&MessageId::from("a")).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Config);
        assert!(error.to_string().contains("READ UNCOMMITTED"), "{error}");
        world.drop().await;
    }

    #[tokio::test]
    async fn a_savepoint_that_is_forgotten_acks_nothing() {
        forgets_a_savepoint::<MySql>("th_forgets_a_savepoin").await;
    }

    #[tokio::test]
    async fn a_wrapper_hides_no_contention() {
        hides_who_was_in_the_way::<MySql>("th_hides_who_was_in_t").await;
    }

    #[tokio::test]
    async fn a_silent_connection_is_replaced() {
        is_silent_on_a_connection::<MySql>("th_is_silent_on_a_con").await;
    }

    #[tokio::test]
    async fn an_error_that_undid_one_statement_may_be_swallowed() {
        swallows_one_statement::<MySql>("th_swallows_one_state", false).await;
    }

    #[tokio::test]
    async fn the_victim_of_a_deadlock_is_handled_again() {
        is_a_deadlocks_victim::<MySql>("th_is_a_deadlocks_vic").await;
    }

    #[tokio::test]
    async fn what_was_rolled_back_by_hand_is_not_acked() {
        rolls_back_by_hand::<MySql>("th_rolls_back_by_hand").await;
    }

    #[tokio::test]
    async fn what_was_committed_by_hand_is_not_lost() {
        commits_by_hand::<MySql>("th_commits_by_hand", "COMMIT").await;
    }

    #[tokio::test]
    async fn what_was_committed_and_begun_by_hand_is_not_lost() {
        commits_by_hand::<MySql>("th_commits_by_hand", "COMMIT; BEGIN").await;
    }

    #[tokio::test]
    async fn what_ddl_commits_is_not_lost() {
        commits_by_hand::<MySql>("th_commits_by_hand", "TRUNCATE TABLE {t}_r").await;
    }

    #[tokio::test]
    async fn a_transaction_that_is_kept_is_not_committed() {
        keeps_it::<MySql>("th_keeps_it").await;
    }

    #[tokio::test]
    async fn a_transaction_in_the_answer_is_not_committed() {
        answers_with_it::<MySql>("th_answers_with_it").await;
    }

    #[tokio::test]
    async fn a_task_may_have_it_that_is_waited_for() {
        gives_it_to_a_task_and_waits::<MySql>("th_gives_it_to_a_task").await;
    }

    #[tokio::test]
    async fn a_transaction_that_is_forgotten_is_not_committed() {
        forgets_it::<MySql>("th_forgets_it").await;
    }

    #[tokio::test]
    async fn a_panic_rolls_back() {
        panics::<MySql>("th_panics").await;
    }

    #[tokio::test]
    async fn the_ttl_counts_from_the_end_of_the_handler() {
        outlives_the_ttl::<MySql>("th_outlives_the_ttl").await;
    }

    #[tokio::test]
    async fn savepoints_are_part_of_the_transaction() {
        savepoints::<MySql>("th_savepoints").await;
    }

    #[tokio::test]
    async fn a_savepoint_that_is_dropped_in_between_acks_nothing() {
        drops_a_savepoint_in_between::<MySql>("th_drops_a_savepoint_").await;
    }

    #[tokio::test]
    async fn a_lost_connection_leaves_one_effect() {
        loses_connections::<MySql>("th_loses_connections").await;
    }

    #[tokio::test]
    async fn a_lost_connection_is_not_swallowed() {
        swallows_a_loss::<MySql>("th_swallows_a_loss").await;
    }

    #[tokio::test]
    async fn a_silent_server_is_not_waited_for_without_end() {
        is_silent::<MySql>("th_is_silent").await;
    }

    #[tokio::test]
    async fn a_session_that_was_killed_is_not_the_handlers_failure() {
        is_killed::<MySql>("th_is_killed").await;
    }

    #[tokio::test]
    async fn what_ends_with_its_process_runs_again() {
        ends_with_its_process::<MySql>("th_ends_with_its_proc").await;
    }

    #[tokio::test]
    async fn each_attempt_of_a_retry_outside_has_its_own_transaction() {
        is_retried_outside::<MySql>("th_is_retried_outside").await;
    }

    #[tokio::test]
    async fn a_retry_inside_has_one_attempt() {
        is_retried_inside::<MySql>("th_is_retried_inside").await;
    }

    #[tokio::test]
    async fn a_timeout_inside_rolls_back() {
        is_timed_out_inside::<MySql>(
            "th_is_timed_out_insid",
            "SELECT n FROM {t}_r WHERE id = 1 FOR UPDATE",
        )
        .await;
    }

    #[tokio::test]
    async fn a_timeout_in_a_statement_without_end_is_the_handlers_failure() {
        is_timed_out_for_good::<MySql>(
            "th_is_timed_out_for_g",
            "SELECT n FROM {t}_r WHERE id = 1 FOR UPDATE",
        )
        .await;
    }

    #[tokio::test]
    async fn a_timeout_outside_interrupts_no_commit() {
        is_timed_out_outside::<MySql>("th_is_timed_out_outsi").await;
    }

    #[tokio::test]
    async fn dead_letters_outside_are_those_of_handlers() {
        is_dead_lettered_outside::<MySql>("th_is_dead_lettered_o").await;
    }

    #[tokio::test]
    async fn dead_letters_inside_commit_what_failed() {
        is_dead_lettered_inside::<MySql>("th_is_dead_lettered_i").await;
    }

    #[tokio::test]
    async fn who_is_not_called_gives_the_permit_back() {
        gives_permits_back::<MySql>("th_gives_permits_back").await;
    }
}

// ===== SQLite =====

mod sqlite {
    use super::*;

    #[tokio::test]
    async fn a_savepoint_that_is_forgotten_acks_nothing() {
        forgets_a_savepoint::<Sqlite>("th_forgets_a_savepoin").await;
    }

    /// SQLSTATEs look like numbers of SQLite's: 22021 like BUSY.
    #[tokio::test]
    async fn an_error_of_another_database_is_the_handlers_own() {
        let Some(url) = services::postgres() else {
            return;
        };
        let Some(desk) = Desk::<Sqlite>::open("th_another_database", 1).await else {
            return;
        };
        let elsewhere = sqlx::PgPool::connect(&url).await.unwrap();
        let (mut consumer, _) = desk.meets(deed(|mut job: Job<Sqlite>| async move {
            job.effect().await?;
            let raise = "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '22021'; END $$";
            sqlx::raw_sql(raise).execute(&elsewhere).await?;
            Ok(())
        }));
        let error = deliver(&mut consumer, envelope("a")).await.unwrap_err();
        assert!(error.is::<sqlx::Error>(), "{error:?}");
        assert!(!is_transient(&error));
        desk.assert_stands("a", 0, "free").await;
        desk.close().await;
    }

    #[tokio::test]
    async fn an_error_that_ended_the_transaction_is_not_swallowed() {
        swallows_the_end::<Sqlite>(
            "th_swallows_the_end",
            "INSERT OR ROLLBACK INTO {t}_l (id) VALUES (NULL)",
        )
        .await;
    }

    #[tokio::test]
    async fn an_error_that_undid_one_statement_may_be_swallowed() {
        swallows_one_statement::<Sqlite>("th_swallows_one_state", false).await;
    }

    #[tokio::test]
    async fn what_was_rolled_back_by_hand_is_not_acked() {
        rolls_back_by_hand::<Sqlite>("th_rolls_back_by_hand").await;
    }

    #[tokio::test]
    async fn what_was_committed_by_hand_is_not_lost() {
        commits_by_hand::<Sqlite>("th_commits_by_hand", "COMMIT").await;
    }

    #[tokio::test]
    async fn what_was_committed_and_begun_by_hand_is_not_lost() {
        commits_by_hand::<Sqlite>("th_commits_by_hand", "COMMIT; BEGIN").await;
    }

    #[tokio::test]
    async fn a_transaction_that_is_kept_is_not_committed() {
        keeps_it::<Sqlite>("th_keeps_it").await;
    }

    #[tokio::test]
    async fn a_transaction_in_the_answer_is_not_committed() {
        answers_with_it::<Sqlite>("th_answers_with_it").await;
    }

    #[tokio::test]
    async fn a_task_may_have_it_that_is_waited_for() {
        gives_it_to_a_task_and_waits::<Sqlite>("th_gives_it_to_a_task").await;
    }

    #[tokio::test]
    async fn a_transaction_that_is_forgotten_is_not_committed() {
        forgets_it::<Sqlite>("th_forgets_it").await;
    }

    #[tokio::test]
    async fn a_panic_rolls_back() {
        panics::<Sqlite>("th_panics").await;
    }

    #[tokio::test]
    async fn the_ttl_counts_from_the_end_of_the_handler() {
        outlives_the_ttl::<Sqlite>("th_outlives_the_ttl").await;
    }

    #[tokio::test]
    async fn savepoints_are_part_of_the_transaction() {
        savepoints::<Sqlite>("th_savepoints").await;
    }

    #[tokio::test]
    async fn a_savepoint_that_is_dropped_in_between_acks_nothing() {
        drops_a_savepoint_in_between::<Sqlite>("th_drops_a_savepoint_").await;
    }

    #[tokio::test]
    async fn a_late_constraint_is_the_handlers_own_error() {
        breaks_a_late_key::<Sqlite>("th_breaks_a_late_key").await;
    }

    #[tokio::test]
    async fn what_ends_with_its_process_runs_again() {
        ends_with_its_process::<Sqlite>("th_ends_with_its_proc").await;
    }

    #[tokio::test]
    async fn each_attempt_of_a_retry_outside_has_its_own_transaction() {
        is_retried_outside::<Sqlite>("th_is_retried_outside").await;
    }

    #[tokio::test]
    async fn a_retry_inside_has_one_attempt() {
        is_retried_inside::<Sqlite>("th_is_retried_inside").await;
    }

    #[tokio::test]
    async fn a_timeout_inside_rolls_back() {
        is_timed_out_inside::<Sqlite>("th_is_timed_out_insid", "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 3000000) SELECT count(*) FROM c").await;
    }

    #[tokio::test]
    async fn a_timeout_outside_interrupts_no_commit() {
        is_timed_out_outside::<Sqlite>("th_is_timed_out_outsi").await;
    }

    #[tokio::test]
    async fn dead_letters_outside_are_those_of_handlers() {
        is_dead_lettered_outside::<Sqlite>("th_is_dead_lettered_o").await;
    }

    #[tokio::test]
    async fn dead_letters_inside_commit_what_failed() {
        is_dead_lettered_inside::<Sqlite>("th_is_dead_lettered_i").await;
    }

    #[tokio::test]
    async fn who_is_not_called_gives_the_permit_back() {
        gives_permits_back::<Sqlite>("th_gives_permits_back").await;
    }
}
