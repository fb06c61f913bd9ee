//! What a message costs: the layer beside the bare service, the same store calls made directly,
//! and what people write in its place.
//!
//! `cargo bench --bench overhead` takes some minutes and ends with tables of its own: nanoseconds
//! per message, the ratios between contenders, and whether each reaches its target. What is
//! compared is the best pass of each, which other work on the machine disturbs least.
//!
//! Without `--bench`, or with `--test`, everything runs once, at sizes that show nothing.

mod rivals;

use criterion::{Criterion, SamplingMode, Throughput};
use dashmap::DashSet;
use futures_util::FutureExt;
use rivals::{IdSet, Random, Request, SeenLayer};
use std::{
    collections::{HashMap, HashSet},
    env,
    future::{Future, Ready, ready},
    hint::black_box,
    sync::{Arc, Barrier, Mutex},
    thread,
    time::{Duration, Instant},
};
use tower::{
    Layer, Service, ServiceBuilder, ServiceExt, retry::Policy, service_fn, timeout::TimeoutLayer,
};
use tower_idempotency::{
    BoxError, ExtractId, IdempotencyLayer, Lease, MemoryStore, MessageId, Store,
};
use uuid::Uuid;

// ===== the contenders =====

/// Takes a pass of deliveries and answers how long that took.
type Worker = Box<dyn FnMut(Vec<Request>) -> Duration>;

/// Makes workers that share one record.
type Team = Box<dyn Fn() -> Worker + Send + Sync>;

const BARE: &str = "bare service";
const DIRECT: &str = "store calls, no layer";
const LAYER: &str = "layer";
const CLAIM: &str = "layer with claims";
const HASH_SET: &str = "Mutex<HashSet<String>>";
const DASH_SET: &str = "DashSet<String>";
const MOKA: &str = "moka with TTL";
const STACK: &str = "retry, timeout";
const LAYER_STACK: &str = "layer, retry, timeout";

/// A name, and what makes a team with an empty record.
type Contender = (&'static str, fn() -> Team);

const CONTENDERS: [Contender; 9] = [
    (BARE, || team(service_fn(handle))),
    (DIRECT, direct),
    (LAYER, || team(layer().layer(service_fn(handle)))),
    (CLAIM, || {
        let lease = Lease::new(Duration::from_secs(60)).expect("a lease");
        team(layer().claim(lease).layer(service_fn(handle)))
    }),
    (HASH_SET, || rival(Mutex::<HashSet<String>>::default())),
    (DASH_SET, || rival(DashSet::<String>::default())),
    (MOKA, || rival(rivals::cache())),
    (STACK, || team(stack())),
    (LAYER_STACK, || team(layer().layer(stack()))),
];

fn handle(request: Request) -> Ready<Result<(), BoxError>> {
    black_box(request.cents);
    ready(Ok(()))
}

fn layer() -> IdempotencyLayer<MemoryStore, impl ExtractId<Request> + Copy + Send + Sync> {
    IdempotencyLayer::new(MemoryStore::new())
        .id_from(|request: &Request| Some(MessageId::from(request.id.as_str())))
}

fn rival<T: IdSet>(set: T) -> Team {
    team(SeenLayer(Arc::new(set)).layer(service_fn(handle)))
}

/// What stands inside the layer as a rule.
fn stack() -> impl Service<Request, Response = (), Error = BoxError> + Clone + Send + Sync + 'static
{
    ServiceBuilder::new()
        .retry(Twice)
        .layer(TimeoutLayer::new(Duration::from_secs(30)))
        .service(service_fn(handle))
}

/// Tries again once.
#[derive(Clone)]
struct Twice;

impl Policy<Request, (), BoxError> for Twice {
    type Future = Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request,
        answer: &mut Result<(), BoxError>,
    ) -> Option<Self::Future> {
        answer.is_err().then(|| ready(()))
    }

    fn clone_request(&mut self, request: &Request) -> Option<Request> {
        Some(request.clone())
    }
}

fn team<S>(service: S) -> Team
where
    S: Service<Request, Response = (), Error = BoxError> + Clone + Send + Sync + 'static,
{
    Box::new(move || {
        let mut service = service.clone();
        // The timeout asks for a runtime with a timer.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime");
        Box::new(move |mut requests| {
            let _entered = runtime.enter();
            time(async {
                for request in requests.drain(..) {
                    let ready = service.ready().await.expect("ready");
                    ready.call(request).await.expect("an answer");
                }
            })
        })
    })
}

/// The calls that the layer makes, without it.
fn direct() -> Team {
    let store = MemoryStore::new();
    Box::new(move || {
        let store = store.clone();
        let mut service = service_fn(handle);
        Box::new(move |mut requests| {
            time(async {
                for request in requests.drain(..) {
                    let id = MessageId::from(request.id.as_str());
                    if store.seen(&id).await.expect("an answer") {
                        continue;
                    }
                    let ready = service.ready().await.expect("ready");
                    ready.call(request).await.expect("an answer");
                    store.remember(&id).await.expect("remembered");
                }
            })
        })
    })
}

/// Nothing here ever waits, so one poll is the whole pass.
fn time(pass: impl Future<Output = ()>) -> Duration {
    let start = Instant::now();
    pass.now_or_never().expect("nothing waits");
    start.elapsed()
}

// ===== the streams =====

#[derive(Clone, Copy, PartialEq)]
enum Stream {
    First,
    InOrder,
    Shuffled,
    Tenth,
}

const STREAMS: [Stream; 4] = [
    Stream::First,
    Stream::InOrder,
    Stream::Shuffled,
    Stream::Tenth,
];

impl Stream {
    fn name(self) -> &'static str {
        match self {
            Stream::First => "first",
            Stream::InOrder => "in order",
            Stream::Shuffled => "shuffled",
            Stream::Tenth => "10 % dup",
        }
    }

    fn of(self, ids: &[Uuid]) -> Vec<Uuid> {
        let mut random = Random(1);
        let mut stream = ids.to_vec();
        match self {
            Stream::First | Stream::InOrder => {}
            Stream::Shuffled => shuffle(&mut stream),
            Stream::Tenth => {
                for at in (9..stream.len()).step_by(10) {
                    stream[at] = stream[random.below(at)];
                }
            }
        }
        stream
    }

    /// Whether every id was delivered before.
    fn again(self) -> bool {
        matches!(self, Stream::InOrder | Stream::Shuffled)
    }
}

fn ids(seed: u64, count: usize) -> Vec<Uuid> {
    let mut random = Random(seed);
    (0..count).map(|_| random.uuid()).collect()
}

fn shuffle<T>(items: &mut [T]) {
    let mut random = Random(2);
    for at in (1..items.len()).rev() {
        items.swap(at, random.below(at + 1));
    }
}

fn requests(stream: &[Uuid]) -> Vec<Request> {
    let request = |id: &Uuid| Request {
        id: id.hyphenated().to_string(),
        cents: 9990,
    };
    stream.iter().map(request).collect()
}

fn message_ids(ids: &[Uuid]) -> Vec<MessageId> {
    let parse = |id: &Uuid| MessageId::from(id.hyphenated().to_string());
    ids.iter().map(parse).collect()
}

// ===== what was measured =====

/// Nanoseconds per message of each pass, by what was done and by whom.
#[derive(Default)]
struct Figures(HashMap<(String, &'static str), Vec<f64>>);

impl Figures {
    /// Has criterion run passes, and keeps what each of them took.
    fn measure(
        &mut self,
        criterion: &mut Criterion,
        what: &str,
        who: &'static str,
        messages: usize,
        mut pass: impl FnMut() -> Duration,
    ) {
        let mut group = criterion.benchmark_group(what);
        group
            .throughput(Throughput::Elements(messages as u64))
            .sampling_mode(SamplingMode::Flat)
            .sample_size(10)
            .warm_up_time(Duration::from_millis(50))
            // Room for ten passes with what is done before each of them.
            .measurement_time(Duration::from_millis(500 + messages as u64 / 500));
        group.bench_function(who, |bencher| {
            bencher.iter_custom(|passes| {
                let mut total = Duration::ZERO;
                for _ in 0..passes {
                    let took = pass();
                    let passes = self.0.entry((what.to_owned(), who)).or_default();
                    passes.push(took.as_nanos() as f64 / messages as f64);
                    total += took;
                }
                total
            });
        });
        group.finish();
    }

    fn best(&self, what: &str, who: &'static str) -> Option<f64> {
        let passes = self.0.get(&(what.to_owned(), who))?;
        passes.iter().copied().min_by(f64::total_cmp)
    }

    fn median(&self, what: &str, who: &'static str) -> Option<f64> {
        let mut passes = self.0.get(&(what.to_owned(), who))?.clone();
        passes.sort_by(f64::total_cmp);
        passes.get(passes.len() / 2).copied()
    }

    /// Best and median, or a dash for what did not run.
    fn cell(&self, what: &str, who: &'static str) -> String {
        match (self.best(what, who), self.median(what, who)) {
            (Some(best), Some(median)) => format!("{best:.0} ({median:.0})"),
            _ => "-".to_owned(),
        }
    }
}

/// A figure beside what it should be; nothing for what did not run.
fn judge(name: &str, figure: Option<f64>, target: f64, at_least: bool) {
    let Some(figure) = figure else { return };
    let reached = if at_least {
        figure >= target
    } else {
        figure <= target
    };
    let sign = if at_least { ">=" } else { "<=" };
    let verdict = if reached { "ok" } else { "missed" };
    println!("{name:<76} {figure:>5.2}   {sign} {target:.1}   {verdict}");
}

// ===== a message through each contender =====

fn passes(stream: Stream, size: usize) -> String {
    format!("{}, {size} ids", stream.name())
}

fn measure_messages(criterion: &mut Criterion, figures: &mut Figures, sizes: &[usize]) {
    for &size in sizes {
        let ids = ids(3, size);
        for stream in STREAMS {
            let order = stream.of(&ids);
            for (name, contender) in CONTENDERS {
                // For duplicates one filled record serves every pass.
                let mut filled = None;
                let pass = || {
                    let mut fresh;
                    let worker = if stream.again() {
                        filled.get_or_insert_with(|| {
                            let mut worker = contender()();
                            worker(requests(&ids));
                            worker
                        })
                    } else {
                        fresh = contender()();
                        &mut fresh
                    };
                    worker(requests(&order))
                };
                figures.measure(criterion, &passes(stream, size), name, size, pass);
            }
        }
    }
}

fn report_messages(figures: &Figures, sizes: &[usize]) {
    for &size in sizes {
        println!("\nns per message, best pass (median pass), {size} ids\n");
        print!("{:<24}", "");
        for stream in STREAMS {
            print!("{:>15}", stream.name());
        }
        println!();
        for (name, _) in CONTENDERS {
            print!("{name:<24}");
            for stream in STREAMS {
                print!("{:>15}", figures.cell(&passes(stream, size), name));
            }
            println!();
        }
    }
    println!();
    for &size in sizes {
        for stream in STREAMS {
            let what = passes(stream, size);
            let best = |who| figures.best(&what, who);
            let ratio = best(LAYER).zip(best(DIRECT)).map(|(a, b)| a / b);
            judge(&format!("{LAYER} / {DIRECT}: {what}"), ratio, 1.5, false);
            let ratio = best(CLAIM).zip(best(LAYER)).map(|(a, b)| a / b);
            judge(&format!("{CLAIM} / {LAYER}: {what}"), ratio, 2.0, false);
        }
    }
    let Some(&size) = sizes.last() else { return };
    let targets = [
        (HASH_SET, Stream::First, 0.5),
        (MOKA, Stream::First, 0.2),
        (HASH_SET, Stream::Shuffled, 0.6),
        (MOKA, Stream::Shuffled, 0.3),
    ];
    for (rival, stream, target) in targets {
        let what = passes(stream, size);
        let over_bare = |who| Some(figures.best(&what, who)? - figures.best(&what, BARE)?);
        let ratio = over_bare(LAYER).zip(over_bare(rival)).map(|(a, b)| a / b);
        let name = format!("{LAYER} / {rival}, both less bare: {what}");
        judge(&name, ratio, target, false);
    }
}

// ===== the store beside a bare set =====

const STORE: &str = "MemoryStore";
const STORE_OF_FOUR: &str = "MemoryStore, 4 generations";
const BARE_SET: &str = "Mutex<HashSet<u128>>";

/// The first ids of an empty record.
const NEW: &str = "new";
/// New ids beside as many that are there, so that no table has to grow far.
const BESIDE: &str = "new beside known";
/// Ids that are there.
const KNOWN: &str = "known";

const WORK: [&str; 3] = [NEW, BESIDE, KNOWN];

/// How many new ids come beside known ones: little enough for no generation to end.
fn beside(size: usize) -> usize {
    size / 8
}

fn store(generations: usize, size: usize) -> MemoryStore {
    if generations == 1 {
        return MemoryStore::new();
    }
    // The known ids fill three and a quarter quarters of it.
    MemoryStore::builder()
        .capacity(size / 13 * 16)
        .build()
        .expect("a capacity")
}

fn use_store(store: &MemoryStore, ids: &[MessageId]) -> Duration {
    time(async {
        for id in ids {
            black_box(store.seen(id).await.expect("an answer"));
            store.remember(id).await.expect("remembered");
        }
    })
}

fn use_set(set: &Mutex<HashSet<u128>>, ids: &[u128]) -> Duration {
    let start = Instant::now();
    for id in ids {
        black_box(set.lock().unwrap().contains(id));
        set.lock().unwrap().insert(*id);
    }
    start.elapsed()
}

fn store_work(work: &str, size: usize) -> String {
    format!("store, {work}, {size} ids")
}

fn measure_store(criterion: &mut Criterion, figures: &mut Figures, sizes: &[usize]) {
    for &size in sizes {
        let known = ids(4, size);
        let new = ids(5, beside(size));
        let shuffled = Stream::Shuffled.of(&known);
        for work in WORK {
            let (before, now): (&[Uuid], &[Uuid]) = match work {
                NEW => (&[], &known),
                BESIDE => (&known, &new),
                _ => (&known, &shuffled),
            };
            let what = store_work(work, size);

            let (before_parsed, now_parsed) = (message_ids(before), message_ids(now));
            for (name, generations) in [(STORE, 1), (STORE_OF_FOUR, 4)] {
                if generations > 1 && work == NEW {
                    continue;
                }
                let pass = || {
                    let store = store(generations, size);
                    use_store(&store, &before_parsed);
                    use_store(&store, &now_parsed)
                };
                figures.measure(criterion, &what, name, now.len(), pass);
            }

            let values = |ids: &[Uuid]| ids.iter().map(Uuid::as_u128).collect::<Vec<_>>();
            let (before, now) = (values(before), values(now));
            let pass = || {
                let set = Mutex::new(HashSet::with_capacity(size + beside(size)));
                use_set(&set, &before);
                use_set(&set, &now)
            };
            figures.measure(criterion, &what, BARE_SET, now.len(), pass);
        }
    }
}

fn report_store(figures: &Figures, sizes: &[usize]) {
    for &size in sizes {
        println!("\nns per id, asked for and remembered, best pass (median pass), {size} ids\n");
        print!("{:<28}", "");
        for work in WORK {
            print!("{work:>18}");
        }
        println!();
        for name in [STORE, STORE_OF_FOUR, BARE_SET] {
            print!("{name:<28}");
            for work in WORK {
                print!("{:>18}", figures.cell(&store_work(work, size), name));
            }
            println!();
        }
    }
    println!();
    for &size in sizes {
        for (who, work) in [
            (STORE, NEW),
            (STORE, BESIDE),
            (STORE, KNOWN),
            (STORE_OF_FOUR, BESIDE),
            (STORE_OF_FOUR, KNOWN),
        ] {
            let what = store_work(work, size);
            let best = |who| figures.best(&what, who);
            let ratio = best(who).zip(best(BARE_SET)).map(|(a, b)| a / b);
            let name = format!("{who} / presized {BARE_SET}: {work}, {size}");
            judge(&name, ratio, 1.5, false);
        }
    }
}

// ===== one thread and two =====

/// What a thread does once all have made their ids.
type Share = Box<dyn FnOnce() -> Duration>;

/// Each thread prepares its share, all start together, and the last one counts.
fn together(threads: usize, prepare: impl Fn(u64) -> Share + Sync) -> Duration {
    let barrier = Barrier::new(threads);
    let (barrier, prepare) = (&barrier, &prepare);
    thread::scope(|scope| {
        let shares: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    let share = prepare(thread as u64);
                    barrier.wait();
                    share()
                })
            })
            .collect();
        let took = shares
            .into_iter()
            .map(|share| share.join().expect("no panic"));
        took.max().unwrap_or_default()
    })
}

const STORE_NEW: &str = "MemoryStore, new ids";
const STORE_KNOWN: &str = "MemoryStore, known ids";

fn threads_work(threads: usize) -> String {
    format!("threads, {threads}")
}

/// The contenders that a second thread is tried with.
fn shared_by_threads() -> impl Iterator<Item = Contender> {
    let alone = |&(name, _): &Contender| name != STACK && name != LAYER_STACK;
    CONTENDERS.into_iter().filter(alone)
}

/// The same work, by one thread whole or by two in halves.
fn measure_threads(criterion: &mut Criterion, figures: &mut Figures, size: usize) {
    for (name, known) in [(STORE_NEW, false), (STORE_KNOWN, true)] {
        for threads in [1, 2] {
            let pass = || {
                let store = MemoryStore::new();
                together(threads, |thread| {
                    let ids = message_ids(&ids(10 + thread, size / threads));
                    let store = store.clone();
                    if known {
                        use_store(&store, &ids);
                    }
                    Box::new(move || use_store(&store, &ids))
                })
            };
            figures.measure(criterion, &threads_work(threads), name, size, pass);
        }
    }
    // A pass of these takes longer.
    let size = size / 2;
    for (name, contender) in shared_by_threads() {
        for threads in [1, 2] {
            let pass = || {
                let team = contender();
                together(threads, |thread| {
                    let requests = requests(&ids(10 + thread, size / threads));
                    let mut worker = team();
                    Box::new(move || worker(requests))
                })
            };
            figures.measure(criterion, &threads_work(threads), name, size, pass);
        }
    }
}

fn report_threads(figures: &Figures, size: usize) {
    println!("\nns per message, first deliveries to one record, best pass (median pass)");
    println!("{size} ids for MemoryStore, half as many for what calls a service\n");
    println!(
        "{:<24}{:>15}{:>15}{:>15}",
        "", "1 thread", "2 threads", "throughput"
    );
    let throughput = |name| {
        let best = |threads| figures.best(&threads_work(threads), name);
        best(1).zip(best(2)).map(|(one, two)| one / two)
    };
    let names = shared_by_threads().map(|(name, _)| name);
    for name in [STORE_NEW, STORE_KNOWN].into_iter().chain(names) {
        let [one, two] = [1, 2].map(|threads| figures.cell(&threads_work(threads), name));
        let times = throughput(name).map_or("-".to_owned(), |times| format!("x {times:.2}"));
        println!("{name:<24}{one:>15}{two:>15}{times:>15}");
    }
    println!();
    for name in [STORE_NEW, STORE_KNOWN] {
        let what = format!("{name}: throughput of two threads / of one");
        judge(&what, throughput(name), 1.6, true);
    }
}

fn main() {
    let given = |name| env::args().any(|argument| argument == name);
    // As criterion has it.
    let trial = !given("--bench") || given("--test");
    let sizes = if trial {
        [200, 2_000]
    } else {
        [20_000, 1_000_000]
    };
    let [_, large] = sizes;

    let mut criterion = Criterion::default()
        .without_plots()
        .nresamples(2_000)
        .configure_from_args();
    let mut figures = Figures::default();
    measure_messages(&mut criterion, &mut figures, &sizes);
    measure_store(&mut criterion, &mut figures, &sizes);
    measure_threads(&mut criterion, &mut figures, large);
    criterion.final_summary();

    if figures.0.is_empty() {
        return;
    }
    report_messages(&figures, &sizes);
    report_store(&figures, &sizes);
    report_threads(&figures, large);
    if trial {
        println!("\nA trial run: these figures show nothing.");
    }
}
