//! The queues of the three brokers, as the workers of `examples/` have them, seen from outside.

#![allow(dead_code, unreachable_pub, missing_docs)]

use crate::services;
use async_nats::jetstream::{self, stream};
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties,
    options::{
        BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions,
        QueueDeleteOptions,
    },
    types::FieldTable,
};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Broker {
    RabbitMq,
    Redis,
    JetStream,
}

impl Broker {
    /// A test that gets `None` is over.
    pub fn url(self) -> Option<String> {
        match self {
            Broker::RabbitMq => services::rabbitmq(),
            Broker::Redis => services::redis(),
            Broker::JetStream => services::nats(),
        }
    }

    /// Makes a queue and its dead-letter queue, where they have to be there before something is published.
    pub async fn declare(self, queue: &str) {
        match self {
            Broker::RabbitMq => {
                let channel = channel().await;
                for name in [queue.to_owned(), format!("{queue}.dlq")] {
                    let durable = QueueDeclareOptions::durable();
                    let declared =
                        channel.queue_declare(name.into(), durable, FieldTable::default());
                    declared.await.unwrap();
                }
            }
            Broker::Redis => {}
            Broker::JetStream => {
                let jetstream = jetstream().await;
                for subject in [queue.to_owned(), format!("{queue}.dlq")] {
                    let config = stream::Config {
                        name: subject.replace('.', "_"),
                        subjects: vec![subject],
                        retention: stream::RetentionPolicy::WorkQueue,
                        ..Default::default()
                    };
                    jetstream.get_or_create_stream(config).await.unwrap();
                }
            }
        }
    }

    /// Returns when the broker has all of them.
    pub async fn publish(self, queue: &str, bodies: &[&str]) {
        match self {
            Broker::RabbitMq => {
                let channel = channel().await;
                channel
                    .confirm_select(ConfirmSelectOptions::default())
                    .await
                    .unwrap();
                let properties = BasicProperties::default().with_delivery_mode(2);
                let mut confirms = Vec::new();
                for body in bodies {
                    let (options, properties) =
                        (BasicPublishOptions::default(), properties.clone());
                    let sent = channel.basic_publish(
                        "".into(),
                        queue.into(),
                        options,
                        body.as_bytes(),
                        properties,
                    );
                    confirms.push(sent.await.unwrap());
                }
                for confirm in confirms {
                    assert_eq!(confirm.await.unwrap(), Confirmation::Ack(None));
                }
            }
            Broker::Redis => {
                let mut redis = redis().await;
                let _: () = redis::cmd("RPUSH")
                    .arg(queue)
                    .arg(bodies)
                    .query_async(&mut redis)
                    .await
                    .unwrap();
            }
            Broker::JetStream => {
                let jetstream = jetstream().await;
                let mut acks = Vec::new();
                for body in bodies {
                    let body = body.to_string().into();
                    acks.push(jetstream.publish(queue.to_owned(), body).await.unwrap());
                }
                for ack in acks {
                    ack.await.unwrap();
                }
            }
        }
    }

    /// How many messages wait for a worker, now or later; on RabbitMQ without those that a worker holds.
    pub async fn waiting(self, queue: &str) -> u64 {
        match self {
            Broker::RabbitMq => {
                let mut waiting = ready(queue).await.expect("the queue");
                for name in parking(queue) {
                    waiting += ready(&name).await.unwrap_or(0);
                }
                waiting.into()
            }
            Broker::Redis => {
                let mut redis = redis().await;
                let (ready, processing): (u64, u64) = redis::pipe()
                    .atomic()
                    .llen(queue)
                    .llen(format!("{queue}:processing"))
                    .query_async(&mut redis)
                    .await
                    .unwrap();
                ready + processing
            }
            Broker::JetStream => {
                let stream = jetstream()
                    .await
                    .get_stream(queue.replace('.', "_"))
                    .await
                    .unwrap();
                stream.cached_info().state.messages
            }
        }
    }

    /// How many messages there are, when no worker holds any; and, of Redis, reservations.
    pub async fn left(self, queue: &str) -> u64 {
        let mut left = self.waiting(queue).await;
        if self == Broker::Redis {
            let mut redis = redis().await;
            let deadlines = format!("{queue}:processing:deadlines");
            let held: u64 = redis::cmd("ZCARD")
                .arg(deadlines)
                .query_async(&mut redis)
                .await
                .unwrap();
            left += held;
        }
        left
    }

    /// The bodies on the dead-letter queue, which stay there.
    pub async fn dead(self, queue: &str) -> Vec<Vec<u8>> {
        let queue = format!("{queue}.dlq");
        let mut dead = Vec::new();
        match self {
            Broker::RabbitMq => {
                let channel = channel().await;
                while let Some(message) = channel
                    .basic_get(queue.clone().into(), BasicGetOptions::default())
                    .await
                    .unwrap()
                {
                    dead.push(message.delivery.data.clone());
                }
                // They go back with the channel.
                channel.close(200, "seen".into()).await.unwrap();
            }
            Broker::Redis => {
                let mut redis = redis().await;
                let all = redis::cmd("LRANGE")
                    .arg(&queue)
                    .arg(0)
                    .arg(-1)
                    .query_async(&mut redis)
                    .await;
                dead = all.unwrap();
            }
            Broker::JetStream => {
                let stream = jetstream()
                    .await
                    .get_stream(queue.replace('.', "_"))
                    .await
                    .unwrap();
                let state = &stream.cached_info().state;
                if state.messages > 0 {
                    for sequence in state.first_sequence..=state.last_sequence {
                        // Those between that were acked are gone.
                        if let Ok(message) = stream.get_raw_message(sequence).await {
                            dead.push(message.payload.to_vec());
                        }
                    }
                }
                assert_eq!(dead.len() as u64, state.messages);
            }
        }
        dead
    }

    /// Deletes all that there is of a queue.
    pub async fn delete(self, queue: &str) {
        match self {
            Broker::RabbitMq => {
                let channel = channel().await;
                let own = [queue.to_owned(), format!("{queue}.dlq")];
                for name in own.into_iter().chain(parking(queue)) {
                    let deleted = channel.queue_delete(name.into(), QueueDeleteOptions::default());
                    deleted.await.unwrap();
                }
            }
            Broker::Redis => {
                let mut redis = redis().await;
                let keys = [
                    "",
                    ":processing",
                    ":processing:deadlines",
                    ".dlq",
                    ".dlq:processing",
                    ".dlq:processing:deadlines",
                ];
                let keys: Vec<String> = keys.iter().map(|end| format!("{queue}{end}")).collect();
                let _: () = redis::cmd("DEL")
                    .arg(keys)
                    .query_async(&mut redis)
                    .await
                    .unwrap();
            }
            Broker::JetStream => {
                let jetstream = jetstream().await;
                for subject in [queue.to_owned(), format!("{queue}.dlq")] {
                    jetstream
                        .delete_stream(subject.replace('.', "_"))
                        .await
                        .unwrap();
                }
            }
        }
    }
}

async fn channel() -> Channel {
    let url = services::rabbitmq().expect("it was there");
    let connection = Connection::connect(&url, ConnectionProperties::default())
        .await
        .unwrap();
    connection.create_channel().await.unwrap()
}

/// How many messages are ready on a queue of RabbitMQ, if there is one.
async fn ready(queue: &str) -> Option<u32> {
    let passive = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::durable()
    };
    let channel = channel().await;
    let declared = channel
        .queue_declare(queue.into(), passive, FieldTable::default())
        .await;
    declared.ok().map(|queue| queue.message_count())
}

/// Where messages of a queue of RabbitMQ wait to be delivered later.
fn parking(queue: &str) -> impl Iterator<Item = String> {
    (0..9).map(move |n| format!("{queue}.later.{}", 250 << n))
}

async fn redis() -> redis::aio::MultiplexedConnection {
    let url = services::redis().expect("it was there");
    let client = redis::Client::open(url).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

async fn jetstream() -> jetstream::Context {
    let url = services::nats().expect("it was there");
    jetstream::new(async_nats::connect(url).await.unwrap())
}
