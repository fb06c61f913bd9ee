//! Publishing to a queue of RabbitMQ, at once or for later.
#![allow(dead_code)]

use lapin::{
    BasicProperties, Channel, Confirmation,
    options::{BasicPublishOptions, QueueDeclareOptions},
    types::{AMQPValue, FieldTable, ShortString},
};
use std::time::Duration;
use tower_idempotency::{BoxError, Envelope};

/// A queue from which a message comes back: a new one for the broker, which counts anew.
pub async fn later(channel: &Channel, queue: &str, pause: Duration) -> Result<String, BoxError> {
    let long_enough = |millis: &u32| u128::from(*millis) >= pause.as_millis();
    let millis = (0..8)
        .map(|n| 250 << n)
        .find(long_enough)
        .unwrap_or(250 << 8);
    let mut arguments = FieldTable::default();
    arguments.insert("x-message-ttl".into(), AMQPValue::LongUInt(millis));
    for (name, value) in [
        ("x-dead-letter-exchange", ""),
        ("x-dead-letter-routing-key", queue),
        ("x-queue-type", "quorum"),
        ("x-dead-letter-strategy", "at-least-once"),
        ("x-overflow", "reject-publish"),
    ] {
        arguments.insert(name.into(), AMQPValue::LongString(value.into()));
    }
    let name = format!("{queue}.later.{millis}");
    channel
        .queue_declare(
            ShortString::try_new(&*name)?,
            QueueDeclareOptions::durable(),
            arguments,
        )
        .await?;
    Ok(name)
}

/// Answers when the broker has it for sure, on that queue.
pub async fn publish(
    channel: &Channel,
    queue: &str,
    body: &[u8],
    properties: BasicProperties,
) -> Result<(), BoxError> {
    let options = BasicPublishOptions {
        mandatory: true,
        ..Default::default()
    };
    let sent = channel.basic_publish(
        "".into(),
        ShortString::try_new(queue)?,
        options,
        body,
        properties,
    );
    match sent.await?.await? {
        Confirmation::Ack(None) => Ok(()),
        refused => Err(format!("{queue} did not take a message: {refused:?}").into()),
    }
}

/// Those that BabelQueue's SDKs give a message, as far as they fit.
pub fn properties(message: &Envelope) -> BasicProperties {
    let mut headers = FieldTable::default();
    let text = |value: &str| AMQPValue::LongString(value.into());
    for (name, value) in message
        .headers()
        .iter()
        .filter(|(name, _)| name.len() < 256)
    {
        headers.insert(name.into(), text(value));
    }
    headers.insert("x-schema-version".into(), AMQPValue::LongLongInt(1));
    headers.insert(
        "x-source-lang".into(),
        text(message.meta().lang().unwrap_or_default()),
    );
    headers.insert(
        "x-attempts".into(),
        AMQPValue::LongLongInt(message.attempts()),
    );
    let short = |value: Option<&str>| ShortString::try_new(value?).ok();
    let mut properties = BasicProperties::default()
        .with_content_type("application/json".into())
        .with_content_encoding("utf-8".into())
        .with_delivery_mode(2)
        .with_app_id("babelqueue".into())
        .with_headers(headers);
    if let Some(id) = short(message.id().map(|id| id.as_str())) {
        properties = properties.with_message_id(id);
    }
    if let Some(trace_id) = short(message.trace_id()) {
        properties = properties.with_correlation_id(trace_id);
    }
    if let Some(urn) = short(Some(message.urn())) {
        properties = properties.with_type(urn);
    }
    properties
}
