//! What the workers of the three brokers have in common: the stack, the handler, the settings, and what
//! becomes of a delivery.
#![allow(dead_code, unreachable_pub, missing_docs)]

pub mod amqp;
pub mod list;
pub mod subject;

use futures_util::FutureExt;
use std::{
    env,
    future::Future,
    io,
    panic::AssertUnwindSafe,
    pin::{Pin, pin},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::task::JoinSet;
use tower::{
    ServiceBuilder, ServiceExt,
    retry::{Policy, RetryLayer},
    service_fn,
    timeout::TimeoutLayer,
    util::BoxCloneSyncService,
};
use tower_idempotency::{
    BoxError, BoxStore, DeadLetterLayer, Envelope, IdempotencyLayer, Lease, Parked, TraceLayer,
    claim::ClaimLayer,
    dead_letter::poison,
    envelope::{DeadLetterBlock, Headers, Reason},
};
use tracing_subscriber::fmt::format::FmtSpan;

/// The whole stack: Ok means ack, an error means later.
pub type Consumer = BoxCloneSyncService<Envelope, (), BoxError>;
/// Publishes to the dead-letter queue; Ok when the broker has confirmed it.
pub type Publisher = BoxCloneSyncService<Envelope, (), BoxError>;

/// How often a delivery is tried before it is dead-lettered.
const TRIES: u32 = 3;
/// For one try. All tries and their pauses together stay well below the broker's redelivery window.
const TIMEOUT: Duration = Duration::from_secs(10);
const LEASE: Duration = Duration::from_secs(30);
/// A parked message is looked at again after so long at most; coming early does no harm.
const LATEST: Duration = Duration::from_secs(5);

// ===== the settings =====

/// Taken from the environment.
#[derive(Clone)]
pub struct Settings {
    /// `BROKER_URL`.
    pub broker: String,
    /// `STORE_URL`: Redis, PostgreSQL, MySQL or SQLite.
    pub store: String,
    /// `RECORD`: the store's prefix or table; one for each consumer.
    pub record: String,
    /// `QUEUE`; its dead-letter queue is `<queue>.dlq`.
    pub queue: String,
    /// `IN_FLIGHT`: how many messages at once.
    pub in_flight: usize,
}

impl Settings {
    pub fn from_env(broker: &str) -> Result<Self, BoxError> {
        let or = |name: &str, default: &str| env::var(name).unwrap_or_else(|_| default.to_owned());
        let in_flight = or("IN_FLIGHT", "64");
        Ok(Settings {
            broker: or("BROKER_URL", broker),
            store: or("STORE_URL", "redis://127.0.0.1:6379"),
            record: or("RECORD", "payments_seen"),
            queue: or("QUEUE", "payments"),
            in_flight: in_flight
                .parse()
                .ok()
                .filter(|n| *n > 0)
                .ok_or_else(|| format!("IN_FLIGHT is {in_flight:?}; expected a number above 0"))?,
        })
    }
}

/// For how long a delivery is this worker's without a sign of life, which it gives three times in that time:
/// `REDELIVERY_SECS`, or as long as the broker's own SDKs have it.
pub fn redelivery(default: u64) -> Result<Duration, BoxError> {
    let secs = match env::var("REDELIVERY_SECS") {
        Ok(secs) => secs.parse().ok().filter(|secs| *secs > 0).ok_or_else(|| {
            format!("REDELIVERY_SECS is {secs:?}; expected whole seconds above 0")
        })?,
        Err(_) => default,
    };
    Ok(Duration::from_secs(secs))
}

/// A line for each message, by its span, and warnings, to standard error.
pub fn logs() {
    let logs = tracing_subscriber::fmt().with_max_level(tracing::Level::INFO);
    let logs = logs.with_span_events(FmtSpan::CLOSE);
    logs.with_writer(io::stderr).init();
}

/// When the process is told to end: by SIGTERM or Ctrl-C.
pub async fn shutdown() {
    use tokio::signal::{ctrl_c, unix};

    let mut term = unix::signal(unix::SignalKind::terminate()).expect("signals can be listened to");
    tokio::select! {
        _ = term.recv() => {}
        _ = ctrl_c() => {}
    }
}

// ===== the stack =====

pub struct Stack {
    trace: TraceLayer,
    claim: ClaimLayer<BoxStore>,
}

impl Stack {
    /// The name of the broker's kind goes into the traces.
    pub async fn connect(settings: &Settings, system: &'static str) -> Result<Self, BoxError> {
        let store = BoxStore::connect(&settings.store, &settings.record).await?;
        Ok(Stack {
            trace: TraceLayer::new().system(system),
            claim: IdempotencyLayer::new(store).claim(Lease::new(LEASE)?),
        })
    }

    pub fn consumer(&self, dead_letters: Publisher) -> Consumer {
        let stack = ServiceBuilder::new()
            .layer(self.trace.clone())
            .layer(DeadLetterLayer::new(dead_letters))
            .layer(self.claim.clone())
            .layer(RetryLayer::new(Tries(TRIES)))
            .layer(TimeoutLayer::new(TIMEOUT))
            .service(service_fn(caught));
        BoxCloneSyncService::new(stack)
    }

    /// Waits for what dropped calls left under way.
    pub async fn drained(self) {
        let _ = tokio::time::timeout(TIMEOUT, self.claim.drained()).await;
    }
}

/// Tries again after 100 ms, then 200 ms, and so on.
#[derive(Clone)]
struct Tries(u32);

impl<Res> Policy<Envelope, Res, BoxError> for Tries {
    type Future = tokio::time::Sleep;

    fn retry(
        &mut self,
        _: &mut Envelope,
        result: &mut Result<Res, BoxError>,
    ) -> Option<Self::Future> {
        self.0 -= 1;
        let pause = Duration::from_millis(100) * 2u32.pow(TRIES - self.0 - 1);
        (result.is_err() && self.0 > 0).then(|| tokio::time::sleep(pause))
    }

    fn clone_request(&mut self, message: &Envelope) -> Option<Envelope> {
        Some(message.clone())
    }
}

// ===== the handler =====

#[derive(serde::Deserialize)]
struct Payment {
    cents: u64,
}

/// Charges a payment, and knows nothing of duplicates. `LIMIT` is the most that it charges, in cents.
async fn charge(message: Envelope) -> Result<(), BoxError> {
    let payment: Payment = message.data()?;
    let limit = env::var("LIMIT").map_or(Ok(100_000), |limit| limit.parse::<u64>())?;
    if payment.cents > limit {
        return Err(format!("{} cents are more than {limit}", payment.cents).into());
    }
    println!("charged {} cents: {:?}", payment.cents, message.id());
    Ok(())
}

/// A panic fails the message, not the worker.
async fn caught(message: Envelope) -> Result<(), BoxError> {
    let charged = AssertUnwindSafe(charge(message)).catch_unwind().await;
    charged.unwrap_or_else(|_| Err("the handler panicked".into()))
}

// ===== the connection =====

/// Ready when the worker is to end.
pub type Stop<'a> = Pin<&'a mut dyn Future<Output = ()>>;

/// Has one session after another, until one ends well. A broker that goes away is waited for; one that is not there
/// at first is an error.
pub async fn sessions<C>(
    connect: impl AsyncFn() -> Result<C, BoxError>,
    session: impl AsyncFn(C, &mut Stop<'_>, &Arc<Outage>) -> Result<(), BoxError>,
    stop: impl Future<Output = ()>,
) -> Result<(), BoxError> {
    let mut stop: Stop<'_> = pin!(stop);
    let outage = Arc::new(Outage::default());
    let mut connected = Ok(connect().await?);
    loop {
        let ended = match connected {
            Ok(connection) => session(connection, &mut stop, &outage).await,
            Err(error) => Err(error),
        };
        let Err(error) = ended else { return Ok(()) };
        eprintln!("without the broker: {error}");
        let again = async {
            tokio::time::sleep(outage.pause()).await;
            connect().await
        };
        connected = tokio::select! {
            connected = again => connected,
            () = &mut stop => return Ok(()),
        };
    }
}

/// The deliveries under way, each in a task of its own, which has settled it when it ends.
#[derive(Default)]
pub struct Deliveries(JoinSet<Result<(), BoxError>>);

impl Deliveries {
    pub fn spawn(&mut self, delivery: impl Future<Output = Result<(), BoxError>> + Send + 'static) {
        self.0.spawn(delivery);
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the next one to end has been settled; `None` when there are none.
    pub async fn next(&mut self) -> Option<Result<(), BoxError>> {
        let joined = self.0.join_next().await?;
        Some(joined.unwrap_or_else(|panicked| Err(panicked.into())))
    }

    /// Whether all that have ended were settled.
    pub fn ended(&mut self) -> Result<(), BoxError> {
        while let Some(Some(settled)) = self.next().now_or_never() {
            settled?;
        }
        Ok(())
    }

    /// Lets all of them end.
    pub async fn finish(mut self) {
        while let Some(settled) = self.next().await {
            if let Err(error) = settled {
                eprintln!("not settled, and will come back: {error}");
            }
        }
    }
}

// ===== a delivery =====

/// What is to become of a delivery.
pub enum Settle {
    /// It had its effect, now or before, or is on the dead-letter queue: ack it.
    Ack,
    /// No handler may see it: publish this to the dead-letter queue, then ack it.
    Dead(Vec<u8>),
    /// Not now: have it delivered again, after so long, without counting that as a failure.
    Later(Duration),
}

pub async fn handle(consumer: Consumer, body: &[u8], headers: Headers, outage: &Outage) -> Settle {
    let message = match Envelope::decode(body) {
        Ok(message) => message,
        Err(error) => {
            eprintln!("dead-lettered: {error}");
            let block = DeadLetterBlock::new(Reason::Poison).with_error(&error);
            let block = block.with_original_queue(headers.queue().unwrap_or_default());
            return Settle::Dead(poison(body, &block).into());
        }
    };
    if let Err(rejected) = message.accepts() {
        eprintln!("dead-lettered as it came: {rejected}");
        return Settle::Dead(body.to_vec());
    }
    match consumer.oneshot(message.with_headers(headers)).await {
        Ok(()) => {
            outage.is_over();
            Settle::Ack
        }
        Err(error) => match error.downcast_ref::<Parked>() {
            Some(parked) => Settle::Later(parked.retry_after().min(LATEST)),
            None => {
                eprintln!("not handled: {error}");
                Settle::Later(outage.pause())
            }
        },
    }
}

/// Since when nothing has come through. The store is the same for all messages, so the pause is as well: it is as
/// long as the outage has been so far, which doubles it each time, from a second to a minute.
#[derive(Default)]
pub struct Outage(Mutex<Option<Instant>>);

impl Outage {
    fn is_over(&self) {
        *self.0.lock().expect("no panic under the lock") = None;
    }

    pub fn pause(&self) -> Duration {
        let mut since = self.0.lock().expect("no panic under the lock");
        let lasted = since.get_or_insert_with(Instant::now).elapsed();
        lasted.clamp(Duration::from_secs(1), Duration::from_secs(60))
    }
}
