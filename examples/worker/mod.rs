//! What the workers of the three brokers have in common: the stack, the handler, the settings, and what
//! becomes of a delivery.
#![allow(dead_code, unreachable_pub, missing_docs)]

use futures_util::FutureExt;
use std::{
    env,
    panic::AssertUnwindSafe,
    sync::Mutex,
    time::{Duration, Instant},
};
use tower::{
    ServiceBuilder, ServiceExt,
    retry::{Policy, RetryLayer},
    service_fn,
    timeout::TimeoutLayer,
    util::BoxCloneSyncService,
};
use tower_idempotency::{
    BoxError, BoxStore, DeadLetterLayer, Envelope, IdempotencyLayer, Lease, Parked,
    claim::ClaimLayer,
    dead_letter::poison,
    envelope::{DeadLetterBlock, Headers, Reason},
};

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

pub struct Stack(ClaimLayer<BoxStore>);

impl Stack {
    pub async fn connect(settings: &Settings) -> Result<Self, BoxError> {
        let store = BoxStore::connect(&settings.store, &settings.record).await?;
        let lease = Lease::new(LEASE)?;
        Ok(Stack(IdempotencyLayer::new(store).claim(lease)))
    }

    pub fn consumer(&self, dead_letters: Publisher) -> Consumer {
        let stack = ServiceBuilder::new()
            .layer(DeadLetterLayer::new(dead_letters))
            .layer(self.0.clone())
            .layer(RetryLayer::new(Tries(TRIES)))
            .layer(TimeoutLayer::new(TIMEOUT))
            .service(service_fn(caught));
        BoxCloneSyncService::new(stack)
    }

    /// Waits for what dropped calls left under way.
    pub async fn drained(self) {
        let _ = tokio::time::timeout(TIMEOUT, self.0.drained()).await;
    }
}

/// Tries again after 100 ms, then 200 ms, and so on.
#[derive(Clone)]
struct Tries(u32);

impl<Res> Policy<Envelope, Res, BoxError> for Tries {
    type Future = tokio::time::Sleep;

    fn retry(&mut self, _: &mut Envelope, result: &mut Result<Res, BoxError>) -> Option<Self::Future> {
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
