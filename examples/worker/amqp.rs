//! Publishing to a queue of RabbitMQ, at once or for later.
#![allow(dead_code)]

use lapin::{
    BasicProperties, Channel, Confirmation, Connection,
    options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions},
    types::{AMQPValue, FieldTable, ShortString},
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::sync::{MappedMutexGuard, Mutex, MutexGuard};
use tower_idempotency::{BoxError, Envelope};

/// Publishes one message after the other: of several that are under way on a channel, the client does not know which one it
/// was that no queue took.
#[derive(Clone)]
pub struct Outbound {
    connection: Arc<Connection>,
    channel: Arc<Mutex<Option<Channel>>>,
}

impl Outbound {
    pub fn new(connection: Arc<Connection>) -> Self {
        Outbound {
            connection,
            channel: Arc::default(),
        }
    }

    /// The channel; a new one when the broker has closed it, as it does on what it does not like.
    async fn channel(&self) -> Result<MappedMutexGuard<'_, Channel>, BoxError> {
        let mut channel = self.channel.lock().await;
        if !channel.as_ref().is_some_and(|it| it.status().connected()) {
            let opened = self.connection.create_channel().await?;
            let confirms = ConfirmSelectOptions::default();
            opened.confirm_select(confirms).await?;
            *channel = Some(opened);
        }
        MutexGuard::try_map(channel, Option::as_mut).map_err(|_| "there is no channel".into())
    }

    /// Answers when the broker has it for sure, on that queue.
    pub async fn publish(
        &self,
        queue: &str,
        body: &[u8],
        properties: BasicProperties,
    ) -> Result<(), BoxError> {
        let options = BasicPublishOptions {
            mandatory: true,
            ..Default::default()
        };
        let name = ShortString::try_new(queue)?;
        let channel = self.channel().await?;
        let sent = channel.basic_publish("".into(), name, options, body, properties);
        match sent.await?.await? {
            Confirmation::Ack(None) => Ok(()),
            refused => Err(format!("{queue} did not take a message: {refused:?}").into()),
        }
    }

    /// The same to a queue from which it comes back after a pause: a new message for the broker, which counts anew.
    pub async fn publish_later(
        &self,
        queue: &str,
        pause: Duration,
        body: &[u8],
        properties: BasicProperties,
    ) -> Result<(), BoxError> {
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
        let short = ShortString::try_new(&*name)?;
        let channel = self.channel().await?;
        channel
            .queue_declare(short, QueueDeclareOptions::durable(), arguments)
            .await?;
        drop(channel);
        self.publish(&name, body, properties).await
    }
}

/// Those of a delivery, for a copy of it: without what the broker would act on again, which is when it is dropped, whose
/// it has to be, and who else gets one, and without how often it was handed back.
pub fn copied(own: &BasicProperties) -> BasicProperties {
    let table = own.headers().iter().flat_map(FieldTable::inner);
    let kept =
        table.filter(|(name, _)| !matches!(name.as_str(), "CC" | "BCC" | "x-delivery-count"));
    let headers: BTreeMap<_, _> = kept.map(|(k, v)| (k.clone(), v.clone())).collect();
    let mut copy = BasicProperties::default()
        .with_delivery_mode(2)
        .with_headers(headers.into());
    type With = fn(BasicProperties, ShortString) -> BasicProperties;
    let texts: [(&Option<ShortString>, With); 7] = [
        (own.content_type(), BasicProperties::with_content_type),
        (
            own.content_encoding(),
            BasicProperties::with_content_encoding,
        ),
        (own.correlation_id(), BasicProperties::with_correlation_id),
        (own.reply_to(), BasicProperties::with_reply_to),
        (own.message_id(), BasicProperties::with_message_id),
        (own.kind(), BasicProperties::with_type),
        (own.app_id(), BasicProperties::with_app_id),
    ];
    for (text, with) in texts {
        if let Some(text) = text.clone() {
            copy = with(copy, text);
        }
    }
    if let Some(time) = own.timestamp() {
        copy = copy.with_timestamp(*time);
    }
    if let Some(priority) = own.priority() {
        copy = copy.with_priority(*priority);
    }
    copy
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
