//! What the layer costs a worker of each broker, with Redis as the store: the workers of `examples/`, 64 messages in
//! flight, a handler that does nothing. Messages per second, the median of a few rounds, in which the
//! variants take turns.
//!
//! ```text
//! cargo bench --features cli,tracing --bench workers                # or of one broker: -- jetstream
//! cargo bench --features cli,tracing --bench workers -- --test   # a few messages, to see that it runs
//! ```
#![allow(missing_docs, unreachable_pub)]
// Each of the workers brings along what they share.
#![allow(clippy::duplicate_mod)]

#[path = "../examples/jetstream_worker.rs"]
#[allow(dead_code)]
mod jetstream_worker;
#[path = "../tests/support/broker_queues.rs"]
mod queues;
#[path = "../examples/rabbitmq_worker.rs"]
#[allow(dead_code)]
mod rabbitmq_worker;
#[path = "../examples/redis_worker.rs"]
#[allow(dead_code)]
mod redis_worker;
#[path = "../tests/support/services.rs"]
mod services;

use queues::Broker;
use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::Notify;
use tower::{ServiceBuilder, ServiceExt, service_fn, util::BoxCloneSyncService};
use tower_idempotency::{BoxError, BoxStore, DeadLetterLayer, Envelope, IdempotencyLayer, Lease};

const IN_FLIGHT: usize = 64;
const MESSAGES: usize = 20_000;
const ROUNDS: usize = 5;

type Consumer = BoxCloneSyncService<Envelope, (), BoxError>;

#[derive(Clone, Copy, PartialEq)]
enum Layer {
    None,
    /// A GET before the handler, a SET after it.
    ByHand,
    SeenSet,
    Claim,
}

#[tokio::main]
async fn main() {
    let test = env::args().any(|arg| arg == "--test");
    let (messages, rounds) = if test { (200, 1) } else { (MESSAGES, ROUNDS) };
    println!("messages per second, {IN_FLIGHT} in flight, median of {rounds} rounds of {messages}");
    println!(
        "{:<10} {:>10} {:>18} {:>18} {:>18}",
        "", "no layer", "by hand", "seen-set", "claim"
    );
    for broker in [Broker::RabbitMq, Broker::Redis, Broker::JetStream] {
        let name = format!("{broker:?}");
        let asked = env::args().skip(1).find(|arg| !arg.starts_with('-'));
        if asked.is_some_and(|asked| !name.eq_ignore_ascii_case(&asked))
            || broker.url().is_none()
            || services::redis().is_none()
        {
            continue;
        }
        let mut rates = [const { Vec::new() }; 4];
        for _ in 0..rounds {
            let layers = [Layer::None, Layer::ByHand, Layer::SeenSet, Layer::Claim];
            for (layer, rates) in layers.into_iter().zip(&mut rates) {
                rates.push(run(broker, layer, messages).await);
            }
        }
        let [none, by_hand, seen_set, claim] = rates.map(|mut rates| {
            rates.sort_by(f64::total_cmp);
            rates[rates.len() / 2]
        });
        let beside = |rate: f64| format!("{rate:.0} ({:+.0} %)", 100.0 * (rate / none - 1.0));
        println!(
            "{name:<10} {none:>10.0} {:>18} {:>18} {:>18}",
            beside(by_hand),
            beside(seen_set),
            beside(claim)
        );
    }
}

/// Messages per second, from when the worker begins to connect until the last one was handled.
async fn run(broker: Broker, layer: Layer, messages: usize) -> f64 {
    let queue = services::unique("bench");
    let url = broker.url().expect("it was there");
    broker.declare(&queue).await;
    let bodies: Vec<String> = (0..messages).map(|n| body(&queue, n)).collect();
    let bodies: Vec<&str> = bodies.iter().map(String::as_str).collect();
    for bodies in bodies.chunks(1_000) {
        broker.publish(&queue, bodies).await;
    }

    let prefix = format!("{queue}:");
    let store = BoxStore::connect(&services::redis_url(), &prefix)
        .await
        .expect("it was there");
    let client = redis::Client::open(services::redis_url()).expect("a URL");
    let redis = client.get_multiplexed_async_connection().await;
    let redis = redis.expect("it was there");
    let key = prefix.clone();
    let (handled, all) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let stop = all.clone();
    let stack = move |dead: Consumer| {
        let (handled, all) = (handled.clone(), all.clone());
        // Outermost, so that a message counts when the layer is done with it.
        let counted = move |answer: Result<(), BoxError>| {
            if answer.is_ok() && handled.fetch_add(1, Relaxed) + 1 == messages {
                all.notify_one();
            }
            answer
        };
        let builder = ServiceBuilder::new()
            .map_result(counted)
            .layer(DeadLetterLayer::new(dead));
        let handler = service_fn(async |_: Envelope| Ok::<_, BoxError>(()));
        let seen_set = IdempotencyLayer::new(store.clone());
        match layer {
            Layer::None => BoxCloneSyncService::new(builder.service(handler)),
            Layer::ByHand => {
                let (redis, prefix) = (redis.clone(), key.clone());
                BoxCloneSyncService::new(builder.service(service_fn(move |message: Envelope| {
                    let (mut redis, prefix) = (redis.clone(), prefix.clone());
                    async move {
                        let id = message.id().ok_or("no id")?.as_str();
                        let key = format!("{prefix}{id}");
                        let get = redis::Cmd::get(&key);
                        if get
                            .query_async::<Option<String>>(&mut redis)
                            .await?
                            .is_some()
                        {
                            return Ok(());
                        }
                        handler.oneshot(message).await?;
                        let set = redis::Cmd::pset_ex(&key, "2", 86_400_000);
                        set.exec_async(&mut redis).await?;
                        Ok::<_, BoxError>(())
                    }
                })))
            }
            Layer::SeenSet => BoxCloneSyncService::new(builder.layer(seen_set).service(handler)),
            Layer::Claim => {
                let lease = Lease::new(Duration::from_secs(60)).expect("a lease");
                BoxCloneSyncService::new(builder.layer(seen_set.claim(lease)).service(handler))
            }
        }
    };
    let begun = Instant::now();
    let took = Arc::new(std::sync::Mutex::new(Duration::ZERO));
    let stopped = {
        let took = took.clone();
        async move {
            stop.notified().await;
            *took.lock().expect("no panic under the lock") = begun.elapsed();
        }
    };
    let worked = match broker {
        Broker::RabbitMq => rabbitmq_worker::work(&url, &queue, IN_FLIGHT, stack, stopped).await,
        Broker::Redis => redis_worker::work(&url, &queue, IN_FLIGHT, stack, stopped).await,
        Broker::JetStream => jetstream_worker::work(&url, &queue, IN_FLIGHT, stack, stopped).await,
    };
    worked.expect("the worker works");
    let took = *took.lock().expect("no panic under the lock");
    broker.delete(&queue).await;
    forget(&prefix, messages).await;
    messages as f64 / took.as_secs_f64()
}

fn body(queue: &str, n: usize) -> String {
    format!(
        r#"{{"job":"urn:shop:payment","trace_id":"t","data":{{"cents":{n}}},"meta":{{"id":"{n}","queue":"{queue}","lang":"php","schema_version":1,"created_at":1790000000000}},"attempts":0}}"#
    )
}

/// The records of a run.
async fn forget(prefix: &str, messages: usize) {
    let client = redis::Client::open(services::redis_url()).expect("a URL");
    let mut redis = client
        .get_multiplexed_async_connection()
        .await
        .expect("it was there");
    let keys: Vec<String> = (0..messages).map(|n| format!("{prefix}{n}")).collect();
    for keys in keys.chunks(1_000) {
        let mut unlink = redis::cmd("UNLINK");
        let unlinked = unlink.arg(keys).exec_async(&mut redis).await;
        unlinked.expect("it was there");
    }
}
