//! A worker on NATS JetStream: charges the payments on a queue, each of them once.
//!
//! ```text
//! cargo run --features cli,tracing --example produce -- --broker nats://127.0.0.1:4222 --count 20 --duplicates 20
//! cargo run --features cli,tracing --example jetstream_worker     # Ctrl-C ends it
//! ```
//!
//! `BROKER_URL` (`nats://127.0.0.1:4222`), `STORE_URL` (`redis://127.0.0.1:6379`; PostgreSQL, MySQL or SQLite as well), `RECORD`
//! (`payments_seen`), `QUEUE` (`payments`), `IN_FLIGHT` (64), `REDELIVERY_SECS` (30), `LIMIT` (100000: more cents are declined). The queue is the subject of a stream, what failed for good has the
//! subject `<queue>.dlq` in a stream of its own. Streams are named by their subject, with `_` for `.`.

mod worker;

use async_nats::{
    HeaderMap,
    client::Client,
    jetstream::{
        self, AckKind, Message,
        consumer::{AckPolicy, pull},
    },
};
use futures_util::{FutureExt, StreamExt};
use std::{future::Future, sync::Arc, time::Duration};
use tower::{service_fn, util::BoxCloneSyncService};
use tower_idempotency::{BoxError, Envelope, envelope::Headers};
use worker::{
    Consumer, Deliveries, Outage, Publisher, Settings, Settle, Stack, Stop,
    subject::{declare, publish},
};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    worker::logs();
    let settings = Settings::from_env("nats://127.0.0.1:4222")?;
    let stack = Stack::connect(&settings, "nats").await?;
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
    // Connects again by itself, for as long as it takes.
    let client = async_nats::connect(broker).await?;
    let session = async |(), stop: &mut Stop<'_>, outage: &Arc<Outage>| {
        session(&client, queue, in_flight, &stack, stop, outage).await
    };
    worker::sessions(async || Ok(()), session, stop).await
}

/// As long as nothing goes wrong with the consumer.
async fn session(
    client: &Client,
    queue: &str,
    in_flight: usize,
    stack: impl Fn(Publisher) -> Consumer,
    stop: &mut Stop<'_>,
    outage: &Arc<Outage>,
) -> Result<(), BoxError> {
    let jetstream = jetstream::new(client.clone());
    let dead_letters = format!("{queue}.dlq");
    declare(&jetstream, &dead_letters).await?;
    let config = pull::Config {
        durable_name: Some("worker".to_owned()),
        ack_policy: AckPolicy::Explicit,
        ack_wait: worker::redelivery(30)?,
        // Neither a parked message nor one that met an outage is to be given up, or to hold up the others.
        max_deliver: -1,
        max_ack_pending: -1,
        ..Default::default()
    };
    let pull = declare(&jetstream, queue)
        .await?
        .get_or_create_consumer("worker", config)
        .await?;
    let ack_wait = pull.cached_info().config.ack_wait;
    let mut messages = pull
        .stream()
        .max_messages_per_batch(in_flight)
        .messages()
        .await?;
    let publisher = jetstream.clone();
    let consumer = stack(BoxCloneSyncService::new(service_fn(
        move |message: Envelope| {
            let (jetstream, subject) = (publisher.clone(), dead_letters.clone());
            async move {
                publish(
                    &jetstream,
                    subject,
                    message.headers(),
                    message.encode().into(),
                )
                .await
            }
        },
    )));
    let mut deliveries = Deliveries::default();
    let ended = loop {
        tokio::select! {
            () = &mut *stop => break Ok(()),
            Some(settled) = deliveries.next() => if let Err(error) = settled { break Err(error) },
            message = messages.next(), if deliveries.len() < in_flight => match message {
                Some(Ok(message)) => {
                    let (jetstream, consumer, outage) = (jetstream.clone(), consumer.clone(), outage.clone());
                    let queue = queue.to_owned();
                    deliveries.spawn(async move { settle(&jetstream, &queue, consumer, message, ack_wait, &outage).await });
                }
                Some(Err(error)) => break Err(error.into()),
                None => break Err("the consumer is gone".into()),
            },
        }
    };
    // What was fetched and not begun, others may have at once.
    while let Some(Some(Ok(message))) = messages.next().now_or_never() {
        let _ = message.ack_with(AckKind::Nak(None)).await;
    }
    deliveries.finish().await;
    // An ack is only on its way until then.
    let _ = tokio::time::timeout(Duration::from_secs(5), client.flush()).await;
    ended
}

async fn settle(
    jetstream: &jetstream::Context,
    queue: &str,
    consumer: Consumer,
    message: Message,
    ack_wait: Duration,
    outage: &Outage,
) -> Result<(), BoxError> {
    let table = message.headers.iter().flat_map(HeaderMap::iter);
    let texts =
        table.filter_map(|(name, values)| Some((name.to_string(), values.first()?.as_str())));
    let headers = texts.collect::<Headers>().with_queue(queue);
    let handled = worker::handle(consumer, &message.payload, headers.clone(), outage);
    tokio::pin!(handled);
    let settle = loop {
        match tokio::time::timeout(ack_wait / 3, &mut handled).await {
            Ok(settle) => break settle,
            // An error of this one says nothing; when the time runs out, the message comes again.
            Err(_) => drop(message.ack_with(AckKind::Progress).await),
        }
    };
    let kind = match settle {
        Settle::Ack => AckKind::Ack,
        Settle::Dead(body) => {
            match publish(jetstream, format!("{queue}.dlq"), &headers, body).await {
                Ok(()) => AckKind::Ack,
                // It may be too large for the server, which is no reason to hold up the others.
                Err(error) => {
                    eprintln!("not dead-lettered: {error}");
                    AckKind::Nak(Some(outage.pause()))
                }
            }
        }
        Settle::Later(pause) => AckKind::Nak(Some(pause)),
    };
    message.ack_with(kind).await
}
