//! A worker on RabbitMQ: charges the payments on a queue, each of them once.
//!
//! ```text
//! cargo run --features cli,tracing --example produce -- --broker amqp://127.0.0.1:5672 --count 20 --duplicates 20
//! cargo run --features cli,tracing --example rabbitmq_worker      # Ctrl-C ends it
//! ```
//!
//! `BROKER_URL` (`amqp://127.0.0.1:5672`), `STORE_URL` (`redis://127.0.0.1:6379`; PostgreSQL, MySQL or SQLite as well), `RECORD`
//! (`payments_seen`), `QUEUE` (`payments`), `IN_FLIGHT` (64), `LIMIT` (100000: more cents are declined). What failed for good is on `<queue>.dlq`. What is to be
//! delivered later waits in `<queue>.later.<ms>`: quorum queues, so that a node of a cluster may fail meanwhile.

mod worker;

use futures_util::StreamExt;
use lapin::{
    Connection, ConnectionProperties,
    message::Delivery,
    options::*,
    types::{AMQPValue, FieldTable, ShortString},
};
use std::{future::Future, sync::Arc};
use tower::{service_fn, util::BoxCloneSyncService};
use tower_idempotency::{BoxError, Envelope, envelope::Headers};
use worker::{
    Consumer, Deliveries, Outage, Publisher, Settings, Settle, Stack, Stop,
    amqp::{Outbound, copied, properties},
};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    worker::logs();
    let settings = Settings::from_env("amqp://127.0.0.1:5672")?;
    let stack = Stack::connect(&settings, "rabbitmq").await?;
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
    let connect = async || {
        let connected = Connection::connect(broker, ConnectionProperties::default());
        Ok(Arc::new(connected.await?))
    };
    let session = async |connection: Arc<Connection>, stop: &mut Stop<'_>, outage: &Arc<Outage>| {
        session(connection, queue, in_flight, &stack, stop, outage).await
    };
    worker::sessions(connect, session, stop).await
}

/// As long as one connection lasts. What was not acked comes back when it is closed.
async fn session(
    connection: Arc<Connection>,
    queue: &str,
    in_flight: usize,
    stack: impl Fn(Publisher) -> Consumer,
    stop: &mut Stop<'_>,
    outage: &Arc<Outage>,
) -> Result<(), BoxError> {
    let channel = connection.create_channel().await?;
    let outbound = Outbound::new(connection.clone());
    let (own, dead_letters) = (ShortString::try_new(queue)?, format!("{queue}.dlq"));
    for name in [own.clone(), ShortString::try_new(&*dead_letters)?] {
        channel
            .queue_declare(name, QueueDeclareOptions::durable(), FieldTable::default())
            .await?;
    }
    // As many again are on their way, so that no place is empty for as long as the broker takes to fill it.
    let prefetch = u16::try_from(in_flight.saturating_mul(2)).unwrap_or(u16::MAX);
    channel
        .basic_qos(prefetch, BasicQosOptions::default())
        .await?;
    let consume = channel.basic_consume(
        own,
        "".into(),
        BasicConsumeOptions::default(),
        FieldTable::default(),
    );
    let mut consume = consume.await?;
    let publisher = outbound.clone();
    let consumer = stack(BoxCloneSyncService::new(service_fn(
        move |message: Envelope| {
            let (outbound, queue, body) =
                (publisher.clone(), dead_letters.clone(), message.encode());
            let properties = properties(&message);
            async move { outbound.publish(&queue, body.as_bytes(), properties).await }
        },
    )));
    let mut deliveries = Deliveries::default();
    let ended = loop {
        tokio::select! {
            () = &mut *stop => break Ok(()),
            Some(settled) = deliveries.next() => if let Err(error) = settled { break Err(error) },
            delivery = consume.next(), if deliveries.len() < in_flight => match delivery {
                Some(Ok(delivery)) => {
                    let (outbound, queue, consumer) = (outbound.clone(), queue.to_owned(), consumer.clone());
                    let outage = outage.clone();
                    deliveries.spawn(async move { settle(&outbound, &queue, consumer, delivery, &outage).await });
                }
                Some(Err(error)) => break Err(error.into()),
                None => break Err("the broker has cancelled the consumer".into()),
            },
        }
    };
    // Nothing more is pushed, when something is acked, that nobody would look at.
    let _ = channel
        .basic_cancel(consume.tag(), BasicCancelOptions::default())
        .await;
    deliveries.finish().await;
    let _ = connection.close(200, "done".into()).await;
    ended
}

async fn settle(
    outbound: &Outbound,
    queue: &str,
    consumer: Consumer,
    delivery: Delivery,
    outage: &Outage,
) -> Result<(), BoxError> {
    let table = delivery
        .properties
        .headers()
        .iter()
        .flat_map(FieldTable::inner);
    let texts = table.filter_map(|(name, value)| match value {
        AMQPValue::LongString(value) => {
            Some((name.as_str(), std::str::from_utf8(value.as_bytes()).ok()?))
        }
        _ => None,
    });
    let headers = texts.collect::<Headers>().with_queue(queue);
    let properties = copied(&delivery.properties);
    match worker::handle(consumer, &delivery.data, headers, outage).await {
        Settle::Ack => {}
        Settle::Dead(body) => {
            let dead_letters = format!("{queue}.dlq");
            let sent = outbound.publish(&dead_letters, &body, properties.clone());
            // It may be too large, or the queue full, which is no reason to hold up the others.
            if let Err(error) = sent.await {
                eprintln!("not dead-lettered: {error}");
                let later =
                    outbound.publish_later(queue, outage.pause(), &delivery.data, properties);
                later.await?;
            }
        }
        Settle::Later(pause) => {
            let later = outbound.publish_later(queue, pause, &delivery.data, properties);
            later.await?;
        }
    }
    delivery.ack(BasicAckOptions::default()).await?;
    Ok(())
}
