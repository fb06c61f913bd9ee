//! Queues of RabbitMQ.

use super::{BYPASS, Refused, Run};
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, ErrorKind,
    message::Delivery,
    options::{
        BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions,
        QueueDeclareOptions,
    },
    protocol::{AMQPErrorKind, AMQPSoftError},
    types::{AMQPValue, FieldTable, ShortString},
};
use tower_idempotency::BoxError;

/// How often a quorum queue took a message back. It has a limit, above which the message is gone.
const RETURNS: &str = "x-delivery-count";

const PASSIVE: QueueDeclareOptions = QueueDeclareOptions {
    passive: true,
    durable: true,
    exclusive: false,
    auto_delete: false,
    nowait: false,
};

pub(super) async fn redrive(run: &mut Run<'_>) -> Result<(), BoxError> {
    let connection =
        Connection::connect(&run.order.broker, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    let confirms = ConfirmSelectOptions::default();
    channel.confirm_select(confirms).await?;
    let done = from_queue(&connection, &channel, run).await;
    // What stays goes back with the channel; what was acked before that is gone.
    let closed = connection.close(200, "done".into()).await;
    done?;
    Ok(closed?)
}

async fn from_queue(
    connection: &Connection,
    channel: &Channel,
    run: &mut Run<'_>,
) -> Result<(), BoxError> {
    let from = ShortString::try_new(&*run.order.from)?;
    let queue = channel.queue_declare(from.clone(), PASSIVE, FieldTable::default());
    let length = queue.await?.message_count().into();
    while run.goes_on(length) {
        let next = channel.basic_get(from.clone(), BasicGetOptions::default());
        let Some(found) = next.await? else {
            return Ok(());
        };
        let found = found.delivery;
        let gone = match run.plan(&found.data) {
            Ok(it) if run.order.dry_run => {
                run.could_forget(&it).await?;
                match refuses(connection, &it.to).await? {
                    None => run.moved(&it),
                    Some(why) => run.stays(&found.data, why),
                }
                false
            }
            Ok(it) => {
                run.forget(&it).await?;
                let properties = properties(&found.properties, run.order.bypass);
                let body = it.message.encode();
                match publish(channel, &it.to, body.as_bytes(), properties).await? {
                    Ok(()) => {
                        run.moved(&it);
                        true
                    }
                    Err(why) => {
                        run.stays(&found.data, why);
                        false
                    }
                }
            }
            Err(why) => {
                run.stays(&found.data, why);
                false
            }
        };
        if gone || returned(&found.properties) && put_behind(channel, run, &found).await? {
            found.ack(BasicAckOptions::default()).await?;
        }
    }
    Ok(())
}

/// What stays is taken back with the channel, and a quorum queue counts that: one time too often, and the message is
/// gone. A copy was never taken back. Answers whether there is one.
async fn put_behind(channel: &Channel, run: &Run<'_>, found: &Delivery) -> Result<bool, BoxError> {
    let own = &found.properties;
    let properties = copied(own).with_headers(headers_without(own, |_| false));
    let copy = publish(channel, &run.order.from, &found.data, properties).await?;
    Ok(copy.is_ok())
}

fn returned(properties: &BasicProperties) -> bool {
    let headers = properties.headers().as_ref();
    headers.is_some_and(|headers| headers.inner().contains_key(RETURNS))
}

/// Why it would not go to a queue. On a channel of its own, which is closed if there is none.
async fn refuses(connection: &Connection, queue: &str) -> Result<Option<Refused>, BoxError> {
    let Ok(name) = ShortString::try_new(queue) else {
        return Ok(Some(no_name(queue)));
    };
    let channel = connection.create_channel().await?;
    let known = channel.queue_declare(name, PASSIVE, FieldTable::default());
    match known.await {
        Ok(_) => channel.close(200, "known".into()).await?,
        Err(error) => match error.kind() {
            ErrorKind::ProtocolError(error)
                if matches!(error.kind(), AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND)) =>
            {
                return Ok(Some(not_there(queue)));
            }
            _ => return Err(error.into()),
        },
    }
    Ok(None)
}

fn no_name(queue: &str) -> Refused {
    Refused(format!("{queue:?} is no name of a queue"))
}

fn not_there(queue: &str) -> Refused {
    Refused(format!("there is no queue {queue:?}"))
}

/// Answers when the broker has it on that queue.
async fn publish(
    channel: &Channel,
    queue: &str,
    body: &[u8],
    properties: BasicProperties,
) -> Result<Result<(), Refused>, BoxError> {
    let Ok(name) = ShortString::try_new(queue) else {
        return Ok(Err(no_name(queue)));
    };
    let options = BasicPublishOptions {
        mandatory: true,
        ..BasicPublishOptions::default()
    };
    let sent = channel.basic_publish("".into(), name, options, body, properties);
    Ok(match sent.await?.await? {
        Confirmation::Ack(None) => Ok(()),
        Confirmation::Ack(Some(_)) => Err(not_there(queue)),
        _ => Err(Refused(format!("the queue {queue:?} does not take it"))),
    })
}

/// The message's own, with no attempts, and without what says how it came to be a dead letter.
fn properties(own: &BasicProperties, bypass: bool) -> BasicProperties {
    let mut headers = headers_without(own, |name| {
        name == "x-death"
            || name == BYPASS
            || name.starts_with("x-first-death-")
            || name.starts_with("x-last-death-")
    });
    if headers.inner().contains_key("x-attempts") {
        headers.insert("x-attempts".into(), AMQPValue::LongLongInt(0));
    }
    if bypass {
        headers.insert(BYPASS.into(), AMQPValue::LongString("1".into()));
    }
    copied(own).with_headers(headers)
}

/// Without those either that say how often it was taken back, and which other queues get a copy.
fn headers_without(own: &BasicProperties, out: impl Fn(&str) -> bool) -> FieldTable {
    let mut headers = FieldTable::default();
    for (name, value) in own.headers().iter().flat_map(|headers| headers.inner()) {
        if !matches!(name.as_str(), RETURNS | "CC" | "BCC") && !out(name.as_str()) {
            headers.insert(name.clone(), value.clone());
        }
    }
    headers
}

/// All but the headers; the user, as a message that names one is taken from that user alone; and the time after which the
/// broker drops it.
fn copied(own: &BasicProperties) -> BasicProperties {
    type With = fn(BasicProperties, ShortString) -> BasicProperties;
    let texts: [(&Option<ShortString>, With); 8] = [
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
        (own.cluster_id(), BasicProperties::with_cluster_id),
    ];
    // What a quorum queue kept on its disk anyway, another one would lose.
    let mut copy = BasicProperties::default().with_delivery_mode(2);
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
