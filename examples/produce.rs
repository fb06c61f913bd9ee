//! Publishes payments, some of them more than once, to a queue of any of the three brokers.
//!
//! ```text
//! cargo run --features cli,tracing --example produce -- --broker amqp://127.0.0.1:5672 --count 1000 --duplicates 20
//! cargo run --features cli,tracing --example produce -- --broker redis://127.0.0.1:6379 --queue refunds --cents 900
//! ```

mod worker;

use async_nats::jetstream;
use clap::Parser;
use lapin::{
    Connection, ConnectionProperties,
    options::*,
    types::{FieldTable, ShortString},
};
use std::sync::Arc;
use tower_idempotency::{
    BoxError, Envelope,
    envelope::{Headers, frame},
};
use worker::{
    amqp::{self, Outbound},
    subject,
};

#[derive(Parser)]
struct Args {
    /// amqp://…, redis://… or nats://…
    #[arg(long, default_value = "amqp://127.0.0.1:5672")]
    broker: String,
    #[arg(long, default_value = "payments")]
    queue: String,
    /// How many payments.
    #[arg(long, default_value_t = 1)]
    count: u32,
    /// How many of a hundred are sent twice.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=100))]
    duplicates: u32,
    /// Of each payment.
    #[arg(long, default_value_t = 1250)]
    cents: u64,
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let args = Args::parse();
    let mut messages = Vec::new();
    for n in 0..args.count {
        let payment = serde_json::json!({ "cents": args.cents });
        let message = Envelope::new("urn:shop:payment", &payment)?.with_queue(&*args.queue);
        // Spread evenly.
        let copies = |payments: u32| u64::from(payments) * u64::from(args.duplicates) / 100;
        if copies(n + 1) > copies(n) {
            messages.push(message.clone());
        }
        messages.push(message);
    }
    match args.broker.split_once("://").map(|(scheme, _)| scheme) {
        Some("amqp") => to_rabbitmq(&args, &messages).await?,
        Some("redis") => to_redis(&args, &messages).await?,
        Some("nats") => to_jetstream(&args, &messages).await?,
        other => {
            return Err(
                format!("the broker's scheme is {other:?}; expected amqp, redis or nats").into(),
            );
        }
    }
    println!("{} messages for {} payments", messages.len(), args.count);
    Ok(())
}

async fn to_rabbitmq(args: &Args, messages: &[Envelope]) -> Result<(), BoxError> {
    let connection = Connection::connect(&args.broker, ConnectionProperties::default()).await?;
    let connection = Arc::new(connection);
    let channel = connection.create_channel().await?;
    let outbound = Outbound::new(connection.clone());
    let name = ShortString::try_new(&*args.queue)?;
    channel
        .queue_declare(name, QueueDeclareOptions::durable(), FieldTable::default())
        .await?;
    for message in messages {
        let body = message.encode();
        let properties = amqp::properties(message);
        outbound
            .publish(&args.queue, body.as_bytes(), properties)
            .await?;
    }
    Ok(connection.close(200, "done".into()).await?)
}

async fn to_redis(args: &Args, messages: &[Envelope]) -> Result<(), BoxError> {
    let client = redis::Client::open(&*args.broker)?;
    let mut connection = client.get_multiplexed_async_connection().await?;
    for messages in messages.chunks(100) {
        let stored: Vec<Vec<u8>> = messages.iter().map(frame).collect();
        let mut push = redis::cmd("RPUSH");
        push.arg(&args.queue)
            .arg(stored)
            .exec_async(&mut connection)
            .await?;
    }
    Ok(())
}

async fn to_jetstream(args: &Args, messages: &[Envelope]) -> Result<(), BoxError> {
    let jetstream = jetstream::new(async_nats::connect(&*args.broker).await?);
    subject::declare(&jetstream, &args.queue).await?;
    for message in messages {
        let body = message.encode().into_bytes();
        subject::publish(&jetstream, args.queue.clone(), &Headers::new(), body).await?;
    }
    Ok(())
}
