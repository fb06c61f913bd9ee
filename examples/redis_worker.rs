//! A worker on Redis lists, in the layout of BabelQueue's SDKs: charges the payments on a queue, each of them once.
//!
//! ```text
//! cargo run --features cli,tracing --example produce -- --broker redis://127.0.0.1:6379 --count 20 --duplicates 20
//! cargo run --features cli,tracing --example redis_worker         # Ctrl-C ends it
//! ```
//!
//! `BROKER_URL` (`redis://127.0.0.1:6379`), `STORE_URL` (`redis://127.0.0.1:6379`; PostgreSQL, MySQL or SQLite as well), `RECORD`
//! (`payments_seen`), `QUEUE` (`payments`), `IN_FLIGHT` (64), `REDELIVERY_SECS` (90), `LIMIT` (100000: more cents are declined). What failed for good is on `<queue>.dlq`. What is in hand, or
//! to be delivered later, is on `<queue>:processing` until its time in `<queue>:processing:deadlines` is over.

mod worker;

use futures_util::FutureExt;
use redis::{Client, aio::MultiplexedConnection};
use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};
use tower::{service_fn, util::BoxCloneSyncService};
use tower_idempotency::{
    BoxError, Envelope,
    envelope::{Headers, frame, unframe},
};
use worker::{
    Consumer, Deliveries, Outage, Publisher, Settings, Settle, Stack, Stop,
    list::{Queue, Reservation},
};

/// How soon an empty queue is looked at again; the pause doubles up to a second.
const SHORT: Duration = Duration::from_millis(100);
const SECOND: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    worker::logs();
    let settings = Settings::from_env("redis://127.0.0.1:6379")?;
    let stack = Stack::connect(&settings, "redis").await?;
    let consumer = |dead_letters| stack.consumer(dead_letters);
    work(
        &settings.broker,
        &settings.queue,
        settings.in_flight,
        consumer,
        worker::shutdown(),
    )
    .await?;
    stack.drained().await;
    Ok(())
}

/// Works until told to stop.
pub async fn work(
    broker: &str,
    queue: &str,
    in_flight: usize,
    stack: impl Fn(Publisher) -> Consumer,
    stop: impl Future<Output = ()>,
) -> Result<(), BoxError> {
    let (client, window) = (Client::open(broker)?, worker::redelivery(90)?);
    let connect = async || Ok(client.get_multiplexed_async_connection().await?);
    let session =
        async |connection: MultiplexedConnection, stop: &mut Stop<'_>, outage: &Arc<Outage>| {
            let queue = Queue {
                connection,
                name: queue.to_owned(),
                window,
            };
            session(queue, in_flight, &stack, stop, outage).await
        };
    worker::sessions(connect, session, stop).await
}

/// As long as one connection lasts. A reservation whose reply was lost lapses, and the message comes back.
async fn session(
    mut queue: Queue,
    in_flight: usize,
    stack: impl Fn(Publisher) -> Consumer,
    stop: &mut Stop<'_>,
    outage: &Arc<Outage>,
) -> Result<(), BoxError> {
    let own = queue.clone();
    let consumer = stack(BoxCloneSyncService::new(service_fn(
        move |message: Envelope| {
            let mut queue = own.clone();
            async move { Ok(queue.bury(&frame(&message)).await?) }
        },
    )));
    let mut deliveries = Deliveries::default();
    let (mut swept, mut idle) = (None::<Instant>, SHORT);
    let ended = async {
        loop {
            deliveries.ended()?;
            if swept.is_none_or(|swept| swept.elapsed() >= SECOND) {
                queue.sweep().await?;
                swept = Some(Instant::now());
            }
            let full = deliveries.len() >= in_flight;
            // Waited for in any case: a reply that nobody gets is a message that nobody has.
            let reserved = if full { None } else { queue.reserve().await? };
            if let Some(reservation) = reserved {
                deliveries.spawn(settle(
                    queue.clone(),
                    reservation,
                    consumer.clone(),
                    outage.clone(),
                ));
                idle = SHORT;
                match stop.as_mut().now_or_never() {
                    Some(()) => return Ok(()),
                    None => continue,
                }
            }
            tokio::select! {
                () = &mut *stop => return Ok(()),
                Some(settled) = deliveries.next(), if full => settled?,
                () = tokio::time::sleep(idle) => idle = SECOND.min(idle * 2),
            }
        }
    };
    let ended = ended.await;
    deliveries.finish().await;
    ended
}

async fn settle(
    mut queue: Queue,
    reservation: Reservation,
    consumer: Consumer,
    outage: Arc<Outage>,
) -> Result<(), BoxError> {
    let stored = reservation.stored();
    let unframed = unframe(stored);
    let (body, headers) = match &unframed {
        Some((body, headers)) => (body.as_bytes(), headers.clone()),
        None => (stored, Headers::new()),
    };
    let handled = worker::handle(consumer, body, headers.with_queue(&queue.name), &outage);
    tokio::pin!(handled);
    let settle = loop {
        match tokio::time::timeout(queue.window / 3, &mut handled).await {
            Ok(settle) => break settle,
            // An error of this one says nothing; when the time runs out, the message comes again.
            Err(_) => drop(queue.keep(&reservation, queue.window).await),
        }
    };
    let held = match settle {
        Settle::Ack => queue.ack(&reservation).await?,
        Settle::Dead(dead) if dead == body => queue.dead_letter(&reservation, stored).await?,
        Settle::Dead(dead) => queue.dead_letter(&reservation, &dead).await?,
        Settle::Later(pause) => queue.keep(&reservation, pause).await?,
    };
    if !held {
        eprintln!("settled too late: a message is delivered again");
    }
    Ok(())
}
