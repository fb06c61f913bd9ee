//! Calls of the transactional mode that are dropped at each point, on each kind of thread: what becomes of
//! their transactions and of the connections they had.

#[path = "support/services.rs"]
mod services;
#[path = "support/world.rs"]
mod world;

use services::{PATIENCE, poll_outside, wait_until};
use sqlx::{Database, Pool};
use std::{
    fmt,
    future::{Future, pending, poll_fn},
    marker::PhantomData,
    panic,
    pin::{Pin, pin},
    sync::{
        self, Arc, Once,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::Duration,
};
use tokio::{
    runtime::{Builder, Runtime},
    sync::{Mutex, Semaphore},
    task::yield_now,
    time::{sleep, timeout},
};
use tower::{Layer, Service, ServiceExt};
use tower_idempotency::{
    BoxError, Outcome, StoreError, TransactionLayer, Unfinished, WithTransaction,
    error::{Operation, UnfinishedCause},
    event::Event,
    transaction::{LentTransaction, future::ResponseFuture},
};
use world::{World, until};

// ===== what is called =====

/// What a handler does, step by step.
enum Do<W: World> {
    /// Lets others go first.
    Yield,
    /// Writes one of the rows that its message is to have.
    Write,
    /// A statement that takes so long.
    Take(Duration),
    /// Waits for the gate.
    Gate,
    Hang,
    Fail,
    Panic,
    PanicInCall,
    /// Has somebody else keep the transaction.
    Give(mpsc::Sender<LentTransaction<W::Db>>),
}

use Do::{Fail, Gate, Give, Hang, Take, Write, Yield};

/// How the panics begin that are meant.
const MEANT: &str = "as it was told";

struct Handler<W: World> {
    table: String,
    script: Arc<Vec<Do<W>>>,
    /// How many have begun.
    runs: Arc<AtomicUsize>,
    /// How many steps were begun.
    steps: Arc<AtomicUsize>,
    gate: Arc<Semaphore>,
    of: PhantomData<fn() -> W>,
}

impl<W: World> Clone for Handler<W> {
    fn clone(&self) -> Self {
        Handler {
            table: self.table.clone(),
            script: self.script.clone(),
            runs: self.runs.clone(),
            steps: self.steps.clone(),
            gate: self.gate.clone(),
            of: PhantomData,
        }
    }
}

impl<W: World> Handler<W> {
    fn runs(&self) -> usize {
        self.runs.load(Relaxed)
    }

    /// Until so many steps were begun.
    async fn is_at(&self, step: usize) {
        let at = || self.steps.load(Relaxed) >= step;
        until("the handler is so far", async || at()).await;
    }

    fn opens_the_gate(&self) {
        self.gate.add_permits(1);
    }
}

impl<W: World> Service<WithTransaction<String, W::Db>> for Handler<W> {
    type Response = ();
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, with: WithTransaction<String, W::Db>) -> Self::Future {
        self.runs.fetch_add(1, Relaxed);
        if let Some(Do::PanicInCall) = self.script.first() {
            panic!("the handler panics in its call, {MEANT}");
        }
        let this = self.clone();
        Box::pin(async move {
            let WithTransaction {
                request: id,
                transaction,
            } = with;
            let mut transaction = Some(transaction);
            for step in this.script.iter() {
                this.steps.fetch_add(1, Relaxed);
                let own = transaction.as_mut();
                match step {
                    Do::Yield => yield_now().await,
                    Do::Write => {
                        let write = format!("INSERT INTO {}_l (id) VALUES ('{id}')", this.table);
                        W::execute(own.expect("not given away"), write).await?;
                    }
                    Do::Take(time) => {
                        W::execute(own.expect("not given away"), W::takes(*time)).await?;
                    }
                    Do::Gate => this.gate.acquire().await?.forget(),
                    Do::Hang => pending().await,
                    Do::Fail => return Err("the handler fails, as it was told".into()),
                    Do::Panic => panic!("the handler panics, {MEANT}"),
                    Do::PanicInCall => {}
                    Do::Give(to) => {
                        let _ = to.send(transaction.take().expect("not given away"));
                    }
                }
            }
            Ok(())
        })
    }
}

// ===== where it is called =====

type Layer_<W> = TransactionLayer<<W as World>::Db, fn(&String) -> Option<String>>;
type Call<W> = ResponseFuture<Handler<W>, String, <W as World>::Db, tower_idempotency::ack::Always>;

#[allow(clippy::ptr_arg)] // That is what a request is here.
fn by_itself(id: &String) -> Option<String> {
    assert!(!id.starts_with("panic"), "the extractor panics, {MEANT}");
    Some(id.clone())
}

/// A layer over a pool, with a table of effects, and what was seen of it.
struct Scene<W: World> {
    world: W,
    pool: Pool<W::Db>,
    layer: Layer_<W>,
    events: Arc<sync::Mutex<Vec<String>>>,
    /// A session of the test's own, for which no pool has to be there.
    eye: Mutex<<W::Db as Database>::Connection>,
    uses: AtomicUsize,
    calm: Calm,
}

impl<W: World> Scene<W> {
    /// On a pool of so many connections.
    async fn open(world: Option<W>, connections: u32) -> Option<Self> {
        let world = world?;
        let calm = Calm::from_now_on();
        for statement in [
            "CREATE TABLE {t}_l (id VARCHAR(99) NOT NULL)",
            "CREATE TABLE {t}_f (n BIGINT NOT NULL)",
            "INSERT INTO {t}_f (n) VALUES (0)",
        ] {
            world.run(statement).await;
        }
        let (pool, layer, events) = anew(&world, connections).await;
        let eye = world.pool(1).await.acquire().await.unwrap().detach();
        Some(Scene {
            eye: Mutex::new(eye),
            world,
            pool,
            layer,
            events,
            uses: AtomicUsize::new(0),
            calm,
        })
    }

    fn handler(&self, script: impl IntoIterator<Item = Do<W>>) -> Handler<W> {
        Handler {
            table: self.world.table().to_owned(),
            script: Arc::new(script.into_iter().collect()),
            runs: Arc::default(),
            steps: Arc::default(),
            gate: Arc::new(Semaphore::new(0)),
            of: PhantomData,
        }
    }

    /// One that has its effect at once.
    fn quick(&self) -> Handler<W> {
        self.handler([Write, Write])
    }

    fn call(&self, handler: &Handler<W>, id: &str) -> Call<W> {
        self.layer.layer(handler.clone()).call(id.to_owned())
    }

    fn events(&self) -> Vec<String> {
        self.events.lock().unwrap().clone()
    }

    /// Another delivery of it, which is in time.
    async fn deliver(&self, id: &str) -> Result<Outcome<()>, BoxError> {
        let consumer = self.layer.clone().outcome().layer(self.quick());
        within("a delivery", consumer.oneshot(id.to_owned())).await
    }

    async fn number(&self, of: &str) -> i64 {
        let of = of.replace("{t}", self.world.table());
        W::number(&mut *self.eye.lock().await, of).await.unwrap()
    }

    /// Whether it had its effect: whole and recorded, or nothing of it at all.
    async fn had_its_effect(&self, id: &str) -> bool {
        let rows = format!("SELECT count(*) FROM {{t}}_l WHERE id = '{id}'");
        let rows = self.number(&rows).await;
        let state = self.world.stored(id).await.map(|stored| stored.state);
        match (rows, state.as_deref()) {
            (0, None) => false,
            (2, Some("done")) => true,
            other => panic!("{id}: {other:?}"),
        }
    }

    /// As if it had not been delivered.
    async fn undo(&self, id: &str) {
        let ran = format!("ran {id}");
        self.events.lock().unwrap().retain(|event| *event != ran);
        for (table, column) in [("{t}", "message_id"), ("{t}_l", "id")] {
            let delete = format!("DELETE FROM {table} WHERE {column} = '{id}'");
            self.world.run(&delete).await;
        }
    }

    /// Until what was dropped has come to its end: no transaction is left, and each connection of the
    /// pool can be had, and is in none.
    async fn settles(&self) {
        self.drains().await;
        assert!(!self.world.left_open().await, "a transaction is left");
        self.has_all_connections().await;
    }

    /// The same, where the calls were another runtime's than the test is, which perhaps is no more.
    fn settles_on(&self, of: &Runtime, home: &Runtime, ended: bool) {
        of.block_on(self.drains());
        home.block_on(self.left_nothing_open());
        if ended {
            // A connection of a runtime that has ended cannot be used, and yet its ping succeeds when the
            // answer comes so fast that there is nothing to wait for.
            of.block_on(async {
                while let Some(idle) = self.pool.try_acquire() {
                    drop(idle.detach());
                }
            });
        }
        of.block_on(self.has_all_connections());
    }

    async fn drains(&self) {
        within("what dropped calls left", self.layer.drained()).await;
    }

    async fn left_nothing_open(&self) {
        until("no transaction is left", async || {
            !self.world.left_open().await
        })
        .await;
    }

    async fn has_all_connections(&self) {
        let mut all = Vec::new();
        for _ in 0..self.pool.options().get_max_connections() {
            all.push(within("a connection", self.pool.acquire()).await.unwrap());
        }
        for own in &mut all {
            // What is written outside of a transaction is seen by others at once.
            let write = format!("UPDATE {}_f SET n = n + 1", self.world.table());
            W::execute(own, write).await.unwrap();
            let uses = self.uses.fetch_add(1, Relaxed) as i64 + 1;
            assert_eq!(self.number("SELECT n FROM {t}_f").await, uses);
        }
    }

    /// Whether all that was delivered had its effect once, and is recorded.
    async fn balances(&self, messages: usize) {
        let messages = messages as i64;
        let recorded = "SELECT count(*) FROM {t} WHERE state = 'done'";
        assert_eq!(self.number(recorded).await, messages);
        assert_eq!(self.world.count().await, messages, "none but these");
        let effects = "SELECT count(*) FROM (SELECT id FROM {t}_l GROUP BY id \
                       HAVING count(*) = 2) effects";
        assert_eq!(self.number(effects).await, messages);
        let rows = self.number("SELECT count(*) FROM {t}_l").await;
        assert_eq!(rows, 2 * messages);
    }

    async fn ends(self) {
        self.calm.holds();
        within("the end of the pool", self.pool.close()).await;
        self.world.run("DROP TABLE {t}_l").await;
        self.world.run("DROP TABLE {t}_f").await;
        self.world.drop().await;
    }
}

/// A pool of so many connections, and a layer over it.
async fn anew<W: World>(
    world: &W,
    connections: u32,
) -> (Pool<W::Db>, Layer_<W>, Arc<sync::Mutex<Vec<String>>>) {
    let pool = world.pool(connections).await;
    let events = Arc::new(sync::Mutex::new(Vec::new()));
    let told = events.clone();
    let layer = TransactionLayer::new(pool.clone(), world.table()).unwrap();
    let layer = layer
        .id_from(by_itself as fn(&String) -> Option<String>)
        .on_event(move |event| told.lock().unwrap().push(name(event)));
    (pool, layer, events)
}

fn name(event: &Event<'_>) -> String {
    match event {
        Event::Ran { id, .. } => format!("ran {}", id.as_str()),
        Event::Duplicate { id, .. } => format!("duplicate {}", id.as_str()),
        other => format!("{other:?}"),
    }
}

/// Anything a test waits for has this long.
async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    let done = timeout(PATIENCE, work).await;
    done.unwrap_or_else(|_| panic!("not in time: {what}"))
}

/// No panic of any thread of this process, but those that are meant. Tasks swallow theirs, above all those that
/// are dropped with their runtime.
struct Calm(usize);

static PANICS: sync::Mutex<Vec<String>> = sync::Mutex::new(Vec::new());

impl Calm {
    fn from_now_on() -> Calm {
        static BEGIN: Once = Once::new();
        BEGIN.call_once(|| {
            let usual = panic::take_hook();
            panic::set_hook(Box::new(move |told| {
                let text = told.to_string();
                if text.contains(MEANT) {
                    return;
                }
                // What another test finds is told by that one.
                if !told
                    .location()
                    .is_some_and(|it| it.file().starts_with("tests"))
                {
                    PANICS.lock().unwrap().push(text);
                }
                usual(told);
            }));
        });
        Calm(PANICS.lock().unwrap().len())
    }

    fn holds(&self) {
        let panics = PANICS.lock().unwrap()[self.0..].to_vec();
        assert!(panics.is_empty(), "panics: {panics:?}");
    }
}

// ===== how far it is polled =====

/// Polls a call as a runtime does, so often at most; answers whether it ended.
async fn polled<F: Future>(times: usize, mut call: Pin<&mut F>) -> bool {
    let mut left = times;
    poll_fn(|cx| {
        if left > 0 && call.as_mut().poll(cx).is_ready() {
            return Poll::Ready(true);
        }
        left = left.saturating_sub(1);
        if left == 0 {
            Poll::Ready(false)
        } else {
            Poll::Pending
        }
    })
    .await
}

/// How many polls it takes.
async fn polls<F: Future>(call: F) -> usize {
    let mut call = pin!(call);
    let mut polls = 0;
    poll_fn(|cx| {
        polls += 1;
        call.as_mut().poll(cx).map(drop)
    })
    .await;
    polls
}

/// Polls a call until it is in that state, by its `Debug`. Not, if it is over: a server may answer so fast that
/// one poll goes through several states.
async fn reaches<F: Future + fmt::Debug>(state: &str, mut call: Pin<&mut F>) -> bool {
    let reached = poll_fn(|cx| {
        if format!("{call:?}").contains(&format!("state: {state:?}")) {
            return Poll::Ready(true);
        }
        if call.as_mut().poll(cx).is_ready() {
            return Poll::Ready(false);
        }
        if format!("{call:?}").contains(&format!("state: {state:?}")) {
            return Poll::Ready(true);
        }
        Poll::Pending
    });
    within(state, reached).await
}

/// Gives replies this much time to come, of four.
async fn lingers(so: usize) {
    match so % 4 {
        0 => {}
        1 => yield_now().await,
        2 => {
            for _ in 0..20 {
                yield_now().await;
            }
        }
        _ => sleep(Duration::from_millis(1)).await,
    }
}

// ===== at each poll =====

/// The issue's own test: a pool of one, and a thousand calls, dropped at each poll.
async fn at_each_poll<W: World>(world: Option<W>) {
    let Some(scene) = Scene::open(world, 1).await else {
        return;
    };
    let short = Duration::from_millis(1);
    let script = [Yield, Write, Yield, Take(short), Write, Yield];
    let handler = scene.handler(script);
    let mut points = 0;
    for whole in 0..20 {
        let polls = polls(scene.call(&handler, &format!("whole {whole}"))).await;
        points = points.max(polls + 3);
    }
    assert!(points > 8, "{points}");

    let mut left = 0;
    let drops = 1000;
    for i in 0..drops {
        let id = format!("dropped {i}");
        let mut call = Box::pin(scene.call(&handler, &id));
        let (times, round) = (i % points, i / points);
        polled(times, call.as_mut()).await;
        lingers(round).await;
        drop(call);
        // The next one finds what this one left, or it is looked at first.
        if round / 4 % 2 == 0 {
            scene.settles().await;
            left += usize::from(!scene.had_its_effect(&id).await);
        }
    }
    // A message runs.
    assert_eq!(scene.deliver("last").await.unwrap(), Outcome::Ran(()));
    assert!(scene.had_its_effect("last").await);
    scene.settles().await;
    assert!(left > drops / 20, "{left} of {drops} were left");

    // Each is whole or was not there, and a redelivery makes it whole.
    let mut ran = 0;
    for i in 0..drops {
        let id = format!("dropped {i}");
        let had = scene.had_its_effect(&id).await;
        let again = scene.deliver(&id).await.unwrap();
        assert_eq!(again == Outcome::Duplicate, had, "{id}");
        ran += usize::from(!had);
    }
    assert!(ran > 0 && ran < drops, "{ran} of {drops} ran again");
    scene.balances(drops + 21).await;
    scene.ends().await;
}

/// What was begun for nobody is over when that is said of it.
async fn at_the_begin<W: World>(world: Option<W>) {
    let Some(scene) = Scene::open(world, 1).await else {
        return;
    };
    scene.deliver("before").await.unwrap();
    // It is never over by then, nor does it wait for anybody.
    let handler = scene.handler([const { Yield }; 9]);
    for round in 0..300 {
        let mut call = Box::pin(scene.call(&handler, "a"));
        polled(1 + round % 4, call.as_mut()).await;
        drop(call);
        scene.drains().await;
        assert!(!scene.world.left_open().await, "round {round}");
    }
    scene.settles().await;
    assert_eq!(scene.deliver("a").await.unwrap(), Outcome::Ran(()));
    scene.balances(2).await;
    scene.ends().await;
}

async fn within_the_handler<W: World>(world: Option<W>) {
    let Some(scene) = Scene::open(world, 1).await else {
        return;
    };
    let scripts = [
        vec![Hang],
        vec![Write, Hang],
        vec![Write, Write, Hang],
        // Within a statement.
        vec![Write, Take(Duration::from_millis(50)), Write],
        vec![Take(Duration::from_millis(50)), Write, Write],
    ];
    for (i, script) in scripts.into_iter().enumerate() {
        let id = format!("m{i}");
        let hangs = script.iter().position(|it| matches!(it, Hang | Take(_)));
        let handler = scene.handler(script);
        let call = tokio::spawn(scene.call(&handler, &id));
        handler.is_at(hangs.unwrap() + 1).await;
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
        scene.settles().await;
        assert!(!scene.had_its_effect(&id).await, "{id}");
        assert_eq!(scene.deliver(&id).await.unwrap(), Outcome::Ran(()));
    }
    scene.balances(5).await;
    scene.ends().await;
}

/// It takes longer than the answer to its rollback may.
async fn within_a_long_statement<W: World>(world: Option<W>) {
    let Some(mut scene) = Scene::open(world, 1).await else {
        return;
    };
    let builder = scene.world.builder();
    let builder = builder.response_timeout(Duration::from_millis(500));
    let store = builder.pool(scene.pool.clone()).unwrap();
    let hasty = TransactionLayer::with_store(store);
    let hasty = hasty.id_from(by_itself as fn(&String) -> Option<String>);
    let patient = std::mem::replace(&mut scene.layer, hasty);
    let handler = scene.handler([Write, Take(Duration::from_secs(2)), Write]);
    let at_it = || handler.steps.load(Relaxed) == 2;
    while !at_it() {
        let call = tokio::spawn(scene.call(&handler, "a"));
        until("it is at it or has not begun", async || {
            at_it() || call.is_finished()
        })
        .await;
        call.abort();
        if let Ok(answer) = call.await {
            // The layer's own statements were too slow, too.
            assert!(answer.unwrap_err().is::<StoreError>());
        }
    }
    scene.drains().await;
    scene.left_nothing_open().await;
    scene.layer = patient;
    scene.settles().await;
    assert!(!scene.had_its_effect("a").await);
    assert_eq!(scene.deliver("a").await.unwrap(), Outcome::Ran(()));
    scene.balances(1).await;
    scene.ends().await;
}

async fn during_the_commit<W: World>(world: Option<W>) {
    let Some(scene) = Scene::open(world, 1).await else {
        return;
    };
    let mut over = 0;
    for polls in 0..100 {
        let id = format!("m{polls}");
        let handler = scene.quick();
        let mut call = loop {
            let mut call = Box::pin(scene.call(&handler, &id));
            if reaches("Committing", call.as_mut()).await {
                break call;
            }
            scene.undo(&id).await;
        };
        if polled(polls, call.as_mut()).await {
            over += 1;
        }
        let ran = format!("ran {id}");
        let told = scene.events().contains(&ran);
        drop(call);
        if !told {
            let mut drained = pin!(scene.layer.drained());
            let at_once = drained
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()));
            assert!(at_once.is_pending(), "waits for the commit");
        }
        within("the commit", scene.layer.drained()).await;
        assert!(scene.had_its_effect(&id).await, "{id}");
        let such = |it: &&String| **it == ran;
        assert_eq!(scene.events().iter().filter(such).count(), 1, "{id}");
        scene.settles().await;
        assert_eq!(scene.deliver(&id).await.unwrap(), Outcome::Duplicate);
        if over == 3 {
            assert!(polls > 3, "there are several points");
            scene.balances(polls + 1).await;
            return scene.ends().await;
        }
    }
    panic!("it does not end");
}

// ===== copies =====

async fn while_it_waits<W: World>(world: Option<W>) {
    let Some(mut scene) = Scene::open(world, 2).await else {
        return;
    };
    scene.layer = scene.layer.lock_wait(Duration::from_secs(2));

    // It is given up, and the first one does not notice.
    let first = scene.handler([Write, Gate, Write]);
    let one = tokio::spawn(scene.call(&first, "a"));
    first.is_at(2).await;
    let copy = scene.quick();
    let other = tokio::spawn(scene.call(&copy, "a"));
    scene.world.until_waiting(&other).await;
    other.abort();
    assert!(other.await.unwrap_err().is_cancelled());
    // What it waited with is free at last, while the first one is at work.
    within("what was given up", scene.layer.drained()).await;
    let free = within("a connection", scene.pool.acquire()).await;
    drop(free.unwrap());
    first.opens_the_gate();
    within("the first", one).await.unwrap().unwrap();
    assert!(scene.had_its_effect("a").await);

    // It is given up, and the first one ends before it has waited so long: it finds the message done.
    let first = scene.handler([Write, Gate, Write]);
    let one = tokio::spawn(scene.call(&first, "b"));
    first.is_at(2).await;
    let other = tokio::spawn(scene.call(&copy, "b"));
    scene.world.until_waiting(&other).await;
    other.abort();
    assert!(other.await.unwrap_err().is_cancelled());
    first.opens_the_gate();
    within("the first", one).await.unwrap().unwrap();
    scene.settles().await;
    assert!(scene.had_its_effect("b").await);

    // It is given up, and wins when the first one fails: that is undone.
    let first = scene.handler([Write, Gate, Fail]);
    let one = tokio::spawn(scene.call(&first, "c"));
    first.is_at(2).await;
    let other = tokio::spawn(scene.call(&copy, "c"));
    scene.world.until_waiting(&other).await;
    other.abort();
    assert!(other.await.unwrap_err().is_cancelled());
    first.opens_the_gate();
    within("the first", one).await.unwrap().unwrap_err();
    scene.settles().await;
    assert!(!scene.had_its_effect("c").await);
    assert_eq!(copy.runs(), 0);
    assert_eq!(scene.deliver("c").await.unwrap(), Outcome::Ran(()));

    for id in ["a", "b"] {
        assert_eq!(scene.deliver(id).await.unwrap(), Outcome::Duplicate);
    }
    scene.balances(3).await;
    scene.ends().await;
}

/// All connections are taken, so that it waits for one when it is dropped, or as it gets it.
async fn while_it_acquires<W: World>(world: Option<W>) {
    let Some(scene) = Scene::open(world, 2).await else {
        return;
    };
    scene.deliver("before").await.unwrap();
    let handler = scene.handler([Hang]);
    for i in 0..100 {
        let one = within("one", scene.pool.acquire()).await.unwrap();
        let two = within("two", scene.pool.acquire()).await.unwrap();
        let mut calls: Vec<_> = (0..3)
            .map(|_| Box::pin(scene.call(&handler, "a")))
            .collect();
        for call in &mut calls {
            assert!(!polled(1, call.as_mut()).await);
        }
        assert_eq!(handler.runs(), 0);
        if i % 2 == 0 {
            drop((one, two));
            lingers(i / 2).await;
            drop(calls);
        } else {
            calls.pop();
            lingers(i / 2).await;
            drop(one);
            drop(calls);
            drop(two);
        }
        scene.settles().await;
    }
    assert!(!scene.had_its_effect("a").await);
    assert_eq!(scene.deliver("a").await.unwrap(), Outcome::Ran(()));
    scene.balances(2).await;
    scene.ends().await;
}

// ===== panics =====

async fn panics<W: World>(world: Option<W>) {
    let Some(scene) = Scene::open(world, 1).await else {
        return;
    };
    // In the handler.
    let scripts = [
        vec![Do::PanicInCall],
        vec![Do::Panic],
        vec![Write, Do::Panic],
        vec![Write, Yield, Write, Yield, Do::Panic],
    ];
    let panics = scripts.len();
    for (i, script) in scripts.into_iter().enumerate() {
        let id = format!("m{i}");
        let handler = scene.handler(script);
        let call = tokio::spawn(scene.call(&handler, &id));
        assert!(within("it", call).await.unwrap_err().is_panic());
        assert_eq!(handler.runs(), 1);
        scene.settles().await;
        assert!(!scene.had_its_effect(&id).await);
        assert_eq!(scene.deliver(&id).await.unwrap(), Outcome::Ran(()));
    }

    // In the predicate.
    let layer = scene.layer.clone();
    let layer = layer.done_if(|(): &()| panic!("the predicate panics, {MEANT}"));
    let call = layer.layer(scene.quick()).oneshot("predicate".to_owned());
    let call = tokio::spawn(call);
    assert!(within("it", call).await.unwrap_err().is_panic());
    scene.settles().await;
    assert!(!scene.had_its_effect("predicate").await);
    let again = scene.deliver("predicate").await.unwrap();
    assert_eq!(again, Outcome::Ran(()));

    // In the extractor: before there is anything.
    let mut service = scene.layer.layer(scene.quick());
    let call = async move { service.call("panic".to_owned()).await };
    let call = tokio::spawn(call);
    assert!(within("it", call).await.unwrap_err().is_panic());
    scene.settles().await;
    let of = "SELECT count(*) FROM {t}_l WHERE id = 'panic'";
    assert_eq!(scene.number(of).await, 0);

    // In the hook: whoever listens changes no outcome, with the call or after it.
    let told = Arc::new(AtomicUsize::new(0));
    let hook = told.clone();
    let layer = scene.layer.clone().on_event(move |_| {
        hook.fetch_add(1, Relaxed);
        panic!("the hook panics, {MEANT}")
    });
    let consumer = layer.clone().outcome().layer(scene.quick());
    for expected in [Outcome::Ran(()), Outcome::Duplicate] {
        let answer = consumer.clone().oneshot("hook".to_owned());
        assert_eq!(within("it", answer).await.unwrap(), expected);
    }
    let before = loop {
        let before = told.load(Relaxed);
        let mut call = Box::pin(layer.layer(scene.quick()).call("later".to_owned()));
        if reaches("Committing", call.as_mut()).await {
            break before;
        }
        scene.undo("later").await;
    };
    within("the commit", layer.drained()).await;
    assert!(scene.had_its_effect("later").await);
    assert_eq!(told.load(Relaxed), before + 1);
    scene.settles().await;

    assert_eq!(scene.deliver("next").await.unwrap(), Outcome::Ran(()));
    scene.balances(panics + 4).await;
    scene.ends().await;
}

// ===== the end of the pool =====

async fn closed_meanwhile<W: World>(world: Option<W>) {
    let Some(mut scene) = Scene::open(world, 1).await else {
        return;
    };
    for (id, goes_on) in [("a", true), ("b", false)] {
        let handler = scene.handler([Write, Gate, Write]);
        let one = tokio::spawn(scene.call(&handler, id));
        handler.is_at(2).await;
        // One waits for the connection.
        let mut waits = Box::pin(scene.call(&handler, "c"));
        assert!(!polled(1, waits.as_mut()).await);
        let pool = scene.pool.clone();
        let close = tokio::spawn(async move { pool.close().await });
        until("it closes", async || scene.pool.is_closed()).await;
        not_begun(within("who waits", waits).await);
        not_begun(within("who comes later", scene.call(&handler, "d")).await);
        assert!(!close.is_finished(), "waits for the one who has begun");
        if goes_on {
            handler.opens_the_gate();
            within("it", one).await.unwrap().unwrap();
        } else {
            one.abort();
            assert!(one.await.unwrap_err().is_cancelled());
        }
        within("the close", close).await.unwrap();
        within("what was left", scene.layer.drained()).await;
        assert_eq!(handler.runs(), 1);
        assert_eq!(scene.had_its_effect(id).await, goes_on);
        (scene.pool, scene.layer, scene.events) = anew(&scene.world, 1).await;
        scene.settles().await;
    }
    for id in ["b", "c", "d"] {
        assert_eq!(scene.deliver(id).await.unwrap(), Outcome::Ran(()));
    }
    scene.balances(4).await;
    scene.ends().await;
}

#[track_caller]
fn not_begun(answer: Result<(), BoxError>) {
    let error = answer.unwrap_err();
    let error = error.downcast_ref::<StoreError>().expect("a StoreError");
    assert_eq!(error.operation(), Operation::Begin);
}

/// A call has all that it needs.
async fn with_nothing_left<W: World>(world: Option<W>) {
    let Some(mut scene) = Scene::open(world, 1).await else {
        return;
    };
    for (id, goes_on) in [("a", true), ("b", false)] {
        let handler = scene.handler([Write, Gate, Write]);
        let one = tokio::spawn(scene.call(&handler, id));
        handler.is_at(2).await;
        let (pool, layer, _) = anew(&scene.world, 1).await;
        drop(std::mem::replace(&mut scene.layer, layer));
        drop(std::mem::replace(&mut scene.pool, pool));
        if goes_on {
            handler.opens_the_gate();
            within("it", one).await.unwrap().unwrap();
        } else {
            one.abort();
            assert!(one.await.unwrap_err().is_cancelled());
        }
        // The layer that counts what was left is gone.
        scene.left_nothing_open().await;
        scene.settles().await;
        assert_eq!(scene.had_its_effect(id).await, goes_on);
    }
    assert_eq!(scene.deliver("b").await.unwrap(), Outcome::Ran(()));
    scene.balances(2).await;
    scene.ends().await;
}

// ===== on each kind of thread =====

/// Always there, for what the test itself asks.
fn home() -> Runtime {
    runtime(true)
}

fn runtime(threads: bool) -> Runtime {
    counted(threads).0
}

/// With the number of its threads.
fn counted(threads: bool) -> (Runtime, Arc<AtomicUsize>) {
    let mut builder = if threads {
        Builder::new_multi_thread()
    } else {
        Builder::new_current_thread()
    };
    let count = Arc::new(AtomicUsize::new(0));
    let (begun, ended) = (count.clone(), count.clone());
    builder
        .worker_threads(1)
        .on_thread_start(move || {
            begun.fetch_add(1, Relaxed);
        })
        .on_thread_stop(move || {
            ended.fetch_sub(1, Relaxed);
        });
    (builder.enable_all().build().unwrap(), count)
}

/// What becomes of the runtime that a call was polled in.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    Not,
    /// Before the call is dropped.
    Dropped,
    InBackground,
    InTime,
    /// While it is dropped.
    Meanwhile,
}

fn elsewhere<W: World>(world: impl AsyncFnOnce() -> Option<W>) {
    let home = home();
    let Some(mut scene) = home.block_on(async { Scene::open(world().await, 1).await }) else {
        return;
    };
    let mut messages = 0;
    let ways = [
        Ends::Not,
        Ends::Dropped,
        Ends::InBackground,
        Ends::InTime,
        Ends::Meanwhile,
    ];
    for ends in ways {
        for (threads, in_another) in [(false, false), (false, true), (true, false), (true, true)] {
            for state in ["Ready", "Opening", "Running", "Committing"] {
                messages += 1;
                let id = format!("m{messages}");
                let at = format!("{id}: {state}, {ends:?}, {threads}, {in_another}");
                let ((first, count), second) = (counted(threads), runtime(false));
                (scene.pool, scene.layer, scene.events) = first.block_on(anew(&scene.world, 1));
                let script = if state == "Running" {
                    vec![Write, Hang]
                } else {
                    vec![Write, Write]
                };
                let handler = scene.handler(script);
                let call = loop {
                    let mut call = Box::pin(scene.call(&handler, &id));
                    if first.block_on(reaches(state, call.as_mut())) {
                        break call;
                    }
                    home.block_on(scene.undo(&id));
                };

                let runs_on = ends_runtime((first, count), ends, || {
                    drop_on_a_thread(call, in_another.then_some(&second));
                });
                let of = runs_on.unwrap_or(second);
                scene.settles_on(&of, &home, ends != Ends::Not);
                let had = home.block_on(scene.had_its_effect(&id));
                match state {
                    // It is committed as long as there is somebody to do it.
                    "Committing" if ends == Ends::Not => assert!(had, "{at}"),
                    "Committing" => {}
                    _ => assert!(!had, "{at}"),
                }
                let again = of.block_on(scene.deliver(&id)).unwrap();
                assert_eq!(again == Outcome::Duplicate, had, "{at}");
                of.block_on(scene.pool.close());
                scene.calm.holds();
            }
        }
    }
    home.block_on(async {
        scene.balances(messages).await;
        scene.ends().await;
    });
}

/// Has it end, and drops the call. Answers the runtime that is there still.
fn ends_runtime(
    (runtime, threads): (Runtime, Arc<AtomicUsize>),
    ends: Ends,
    drops: impl FnOnce(),
) -> Option<Runtime> {
    match ends {
        Ends::Not => {
            drops();
            return Some(runtime);
        }
        Ends::Dropped => {
            drop(runtime);
            drops();
        }
        Ends::InBackground => {
            runtime.shutdown_background();
            drops();
        }
        Ends::InTime => {
            runtime.shutdown_timeout(PATIENCE);
            drops();
        }
        Ends::Meanwhile => {
            let end = thread::spawn(move || runtime.shutdown_timeout(PATIENCE));
            drops();
            end.join().expect("no panic");
        }
    }
    // It is over when they are.
    wait_until("its threads have ended", || threads.load(Relaxed) == 0);
    None
}

/// Without a runtime, or within another one than it was polled in.
fn drop_on_a_thread<T: Send>(it: T, runtime: Option<&Runtime>) {
    thread::scope(|scope| {
        let dropped = scope.spawn(move || match runtime {
            Some(runtime) => runtime.block_on(async move { drop(it) }),
            None => drop(it),
        });
        dropped.join().expect("no panic");
    });
}

/// As tasks, which are dropped with their runtime.
fn with_its_runtime<W: World>(world: impl AsyncFnOnce() -> Option<W>) {
    let home = home();
    let Some(mut scene) = home.block_on(async { Scene::open(world().await, 1).await }) else {
        return;
    };
    let mut messages = 0;
    for ends in [Ends::Dropped, Ends::InBackground, Ends::InTime] {
        for threads in [false, true] {
            for state in ["Ready", "Opening", "Running", "Committing", "left over"] {
                messages += 1;
                let id = format!("m{messages}");
                let (of, count) = counted(threads);
                (scene.pool, scene.layer, scene.events) = of.block_on(anew(&scene.world, 1));
                let handler = scene.handler(if ["Running", "left over"].contains(&state) {
                    vec![Write, Hang]
                } else {
                    vec![Write, Write]
                });
                let until = if state == "left over" {
                    "Running"
                } else {
                    state
                };
                let call = loop {
                    let mut call = Box::pin(scene.call(&handler, &id));
                    if of.block_on(reaches(until, call.as_mut())) {
                        break call;
                    }
                    home.block_on(scene.undo(&id));
                };
                if state == "left over" {
                    drop(call);
                } else {
                    drop(of.spawn(call));
                }
                ends_runtime((of, count), ends, || {});
                let of = runtime(false);
                scene.settles_on(&of, &home, true);
                let had = home.block_on(scene.had_its_effect(&id));
                let again = of.block_on(scene.deliver(&id)).unwrap();
                assert_eq!(again == Outcome::Duplicate, had, "{id}");
                of.block_on(scene.pool.close());
                scene.calm.holds();
            }
        }
    }
    home.block_on(async {
        scene.balances(messages).await;
        scene.ends().await;
    });
}

/// Wakes the thread that blocks on a call without a runtime.
struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn outside<W: World>(world: impl AsyncFnOnce() -> Option<W>) {
    let home = home();
    let Some(scene) = home.block_on(async { Scene::open(world().await, 1).await }) else {
        return;
    };
    // From its first poll on.
    let handler = scene.quick();
    let answer = poll_outside(Box::pin(scene.call(&handler, "a")));
    not_begun(answer.expect("at once"));
    assert_eq!(handler.runs(), 0);
    let told = scene.events();
    assert_eq!(told.len(), 1);
    assert!(told[0].starts_with("StoreError"), "{told:?}");
    scene.settles_on(&home, &home, false);
    assert!(!home.block_on(scene.had_its_effect("a")));

    // From then on when it has begun, while its runtime goes on.
    for state in ["Opening", "Running", "Committing"] {
        let mut call = loop {
            let mut call = Box::pin(scene.call(&handler, state));
            if home.block_on(reaches(state, call.as_mut())) {
                break call;
            }
            home.block_on(scene.undo(state));
        };
        let (over, answer) = mpsc::channel();
        thread::spawn(move || {
            let waker = Waker::from(Arc::new(Unpark(thread::current())));
            let mut cx = Context::from_waker(&waker);
            loop {
                if let Poll::Ready(answer) = call.as_mut().poll(&mut cx) {
                    return over.send(answer);
                }
                thread::park();
            }
        });
        let answer = answer.recv_timeout(PATIENCE).expect("an answer, in time");
        answer.unwrap();
        assert!(home.block_on(scene.had_its_effect(state)));
        scene.settles_on(&home, &home, false);
    }
    home.block_on(async {
        assert_eq!(scene.deliver("a").await.unwrap(), Outcome::Ran(()));
        scene.balances(4).await;
        scene.ends().await;
    });
}

/// It is taken out of the handler, and dropped after all that it belonged to.
fn what_was_lent<W: World>(world: impl AsyncFnOnce() -> Option<W>) {
    let home = home();
    let Some(mut scene) = home.block_on(async { Scene::open(world().await, 1).await }) else {
        return;
    };
    let mut messages = 0;
    for threads in [false, true] {
        for (ends, whole) in [
            (Ends::Not, false),
            (Ends::Not, true),
            (Ends::Dropped, false),
            (Ends::Dropped, true),
            (Ends::InBackground, false),
            (Ends::Meanwhile, false),
        ] {
            messages += 1;
            let id = format!("m{messages}");
            let (of, count) = counted(threads);
            (scene.pool, scene.layer, scene.events) = of.block_on(anew(&scene.world, 1));
            let (to, given) = mpsc::channel();
            let last = if whole { Yield } else { Hang };
            let handler = scene.handler([Write, Write, Give(to), last]);
            let mut call = Box::pin(scene.call(&handler, &id));
            if whole {
                // The handler says Ok, and somebody else has it.
                let error = of.block_on(within("it", call)).unwrap_err();
                let error = error.downcast_ref::<Unfinished>().expect("Unfinished");
                assert_eq!(error.cause(), UnfinishedCause::Kept);
            } else {
                assert!(of.block_on(reaches("Running", call.as_mut())));
                of.block_on(async {
                    while handler.steps.load(Relaxed) < 4 {
                        assert!(!polled(1, call.as_mut()).await);
                        sleep(Duration::from_millis(1)).await;
                    }
                });
                drop(call);
            }
            let lent = given.try_recv().unwrap();
            let runs_on = ends_runtime((of, count), ends, || drop_on_a_thread(lent, None));
            let of = runs_on.unwrap_or_else(|| runtime(false));
            scene.settles_on(&of, &home, ends != Ends::Not);
            assert!(!home.block_on(scene.had_its_effect(&id)), "{id}");
            let again = of.block_on(scene.deliver(&id)).unwrap();
            assert_eq!(again, Outcome::Ran(()));
            of.block_on(scene.pool.close());
            scene.calm.holds();
        }
    }
    home.block_on(async {
        scene.balances(messages).await;
        scene.ends().await;
    });
}

mod postgres {
    use super::{world::Postgres, *};

    #[tokio::test]
    async fn a_pool_of_one_survives_a_thousand_drops() {
        at_each_poll(Postgres::open("drops_polls").await).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_pool_of_one_survives_them_on_many_threads() {
        at_each_poll(Postgres::open("drops_threads").await).await;
    }

    #[tokio::test]
    async fn what_was_begun_for_nobody_is_over_when_drained() {
        at_the_begin(Postgres::open("drops_begin").await).await;
    }

    #[tokio::test]
    async fn a_handler_may_be_dropped_wherever_it_waits() {
        within_the_handler(Postgres::open("drops_handler").await).await;
    }

    #[tokio::test]
    async fn a_long_statement_may_be_dropped() {
        within_a_long_statement(Postgres::open("drops_long").await).await;
    }

    #[tokio::test]
    async fn a_commit_is_finished_after_the_drop() {
        during_the_commit(Postgres::open("drops_commit").await).await;
    }

    #[tokio::test]
    async fn a_copy_that_waits_may_be_dropped() {
        while_it_waits(Postgres::open("drops_waits").await).await;
    }

    #[tokio::test]
    async fn a_call_that_waits_for_a_connection_may_be_dropped() {
        while_it_acquires(Postgres::open("drops_acquire").await).await;
    }

    #[tokio::test]
    async fn a_panic_leaves_nothing_open() {
        panics(Postgres::open("drops_panics").await).await;
    }

    #[tokio::test]
    async fn a_pool_may_be_closed_meanwhile() {
        closed_meanwhile(Postgres::open("drops_closed").await).await;
    }

    #[tokio::test]
    async fn a_call_outlives_its_layer_and_pool() {
        with_nothing_left(Postgres::open("drops_nothing").await).await;
    }

    #[test]
    fn a_call_may_be_dropped_on_any_thread() {
        elsewhere(async || Postgres::open("drops_elsewhere").await);
    }

    #[test]
    fn a_task_may_be_dropped_with_its_runtime() {
        with_its_runtime(async || Postgres::open("drops_runtime").await);
    }

    #[test]
    fn a_call_may_be_polled_outside_of_a_runtime() {
        outside(async || Postgres::open("drops_outside").await);
    }

    #[test]
    fn what_was_lent_may_be_dropped_last() {
        what_was_lent(async || Postgres::open("drops_lent").await);
    }
}

mod mysql {
    use super::{world::MySql, *};

    #[tokio::test]
    async fn a_pool_of_one_survives_a_thousand_drops() {
        at_each_poll(MySql::open("drops_polls").await).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_pool_of_one_survives_them_on_many_threads() {
        at_each_poll(MySql::open("drops_threads").await).await;
    }

    #[tokio::test]
    async fn what_was_begun_for_nobody_is_over_when_drained() {
        at_the_begin(MySql::open("drops_begin").await).await;
    }

    #[tokio::test]
    async fn a_handler_may_be_dropped_wherever_it_waits() {
        within_the_handler(MySql::open("drops_handler").await).await;
    }

    #[tokio::test]
    async fn a_long_statement_may_be_dropped() {
        within_a_long_statement(MySql::open("drops_long").await).await;
    }

    #[tokio::test]
    async fn a_commit_is_finished_after_the_drop() {
        during_the_commit(MySql::open("drops_commit").await).await;
    }

    #[tokio::test]
    async fn a_copy_that_waits_may_be_dropped() {
        while_it_waits(MySql::open("drops_waits").await).await;
    }

    #[tokio::test]
    async fn a_call_that_waits_for_a_connection_may_be_dropped() {
        while_it_acquires(MySql::open("drops_acquire").await).await;
    }

    #[tokio::test]
    async fn a_panic_leaves_nothing_open() {
        panics(MySql::open("drops_panics").await).await;
    }

    #[tokio::test]
    async fn a_pool_may_be_closed_meanwhile() {
        closed_meanwhile(MySql::open("drops_closed").await).await;
    }

    #[tokio::test]
    async fn a_call_outlives_its_layer_and_pool() {
        with_nothing_left(MySql::open("drops_nothing").await).await;
    }

    #[test]
    fn a_call_may_be_dropped_on_any_thread() {
        elsewhere(async || MySql::open("drops_elsewhere").await);
    }

    #[test]
    fn a_task_may_be_dropped_with_its_runtime() {
        with_its_runtime(async || MySql::open("drops_runtime").await);
    }

    #[test]
    fn a_call_may_be_polled_outside_of_a_runtime() {
        outside(async || MySql::open("drops_outside").await);
    }

    #[test]
    fn what_was_lent_may_be_dropped_last() {
        what_was_lent(async || MySql::open("drops_lent").await);
    }
}

mod sqlite {
    use super::{world::Sqlite, *};

    #[tokio::test]
    async fn a_pool_of_one_survives_a_thousand_drops() {
        at_each_poll(Sqlite::open("drops_polls").await).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_pool_of_one_survives_them_on_many_threads() {
        at_each_poll(Sqlite::open("drops_threads").await).await;
    }

    #[tokio::test]
    async fn what_was_begun_for_nobody_is_over_when_drained() {
        at_the_begin(Sqlite::open("drops_begin").await).await;
    }

    #[tokio::test]
    async fn a_handler_may_be_dropped_wherever_it_waits() {
        within_the_handler(Sqlite::open("drops_handler").await).await;
    }

    #[tokio::test]
    async fn a_long_statement_may_be_dropped() {
        within_a_long_statement(Sqlite::open("drops_long").await).await;
    }

    #[tokio::test]
    async fn a_commit_is_finished_after_the_drop() {
        during_the_commit(Sqlite::open("drops_commit").await).await;
    }

    #[tokio::test]
    async fn a_copy_that_waits_may_be_dropped() {
        while_it_waits(Sqlite::open("drops_waits").await).await;
    }

    #[tokio::test]
    async fn a_call_that_waits_for_a_connection_may_be_dropped() {
        while_it_acquires(Sqlite::open("drops_acquire").await).await;
    }

    #[tokio::test]
    async fn a_panic_leaves_nothing_open() {
        panics(Sqlite::open("drops_panics").await).await;
    }

    #[tokio::test]
    async fn a_pool_may_be_closed_meanwhile() {
        closed_meanwhile(Sqlite::open("drops_closed").await).await;
    }

    #[tokio::test]
    async fn a_call_outlives_its_layer_and_pool() {
        with_nothing_left(Sqlite::open("drops_nothing").await).await;
    }

    #[test]
    fn a_call_may_be_dropped_on_any_thread() {
        elsewhere(async || Sqlite::open("drops_elsewhere").await);
    }

    #[test]
    fn a_task_may_be_dropped_with_its_runtime() {
        with_its_runtime(async || Sqlite::open("drops_runtime").await);
    }

    #[test]
    fn a_call_may_be_polled_outside_of_a_runtime() {
        outside(async || Sqlite::open("drops_outside").await);
    }

    #[test]
    fn what_was_lent_may_be_dropped_last() {
        what_was_lent(async || Sqlite::open("drops_lent").await);
    }
}
