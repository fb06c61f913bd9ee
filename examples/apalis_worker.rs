//! Charges each payment once in an apalis worker, whose requests are apalis's own.
//!
//! ```text
//! cargo run --example apalis_worker
//! ```
//!
//! The queue brings one of three payments three times. apalis works on all that it has at once, so
//! each payment is claimed, and a copy waits for the first one to end.
//!
//! The layer is around the handler, not a `.layer(..)` of the builder. Those are outside of where
//! apalis keeps count of its tasks, which would not see a duplicate: its backend would be told that
//! it is Pending, not Done. apalis's own layers, as `.retry(..)`, go to the builder, outermost first.

use apalis::prelude::{Event, EventListenerExt, MemoryStorage, Task, TaskSink, WorkerBuilder};
use std::{
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};
use tower::{ServiceBuilder, service_fn};
use tower_idempotency::{BoxError, IdempotencyLayer, Lease, MemoryStore};

const DELIVERIES: [(&str, u64); 5] = [
    ("order-1", 9990),
    ("order-2", 500),
    ("order-1", 9990),
    ("order-3", 1250),
    ("order-1", 9990),
];
const PAYMENTS: u32 = 3;

/// A job. Copies of it have the same key; the id that apalis gives a task is new each time.
struct Payment {
    key: String,
    cents: u64,
}

static CHARGES: AtomicU32 = AtomicU32::new(0);

/// Takes a while, as the world outside does, and knows nothing of duplicates.
async fn charge(payment: Payment) -> Result<(), BoxError> {
    tokio::time::sleep(Duration::from_millis(50)).await;
    println!("{}: charged {} cents", payment.key, payment.cents);
    CHARGES.fetch_add(1, Relaxed);
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let mut queue = MemoryStorage::new();
    for (key, cents) in DELIVERIES {
        let key = key.to_owned();
        queue.push(Payment { key, cents }).await?;
    }

    let idempotency = IdempotencyLayer::new(MemoryStore::new())
        .id_from(|task: &Task<Payment>| Some(task.args.key.clone()))
        .claim(Lease::new(Duration::from_secs(60))?)
        .wait(Duration::from_secs(10));
    let handler = ServiceBuilder::new()
        .layer(idempotency)
        .service(service_fn(|task: Task<Payment>| charge(task.args)));

    let acked = AtomicU32::new(0);
    let worker = WorkerBuilder::new("payments")
        .backend(queue)
        .on_event(move |worker, event| match event {
            Event::Success(_) if acked.fetch_add(1, Relaxed) + 1 == DELIVERIES.len() as u32 => {
                worker.stop().expect("it is running");
            }
            Event::Error(error) => panic!("not handled: {error}"),
            _ => {}
        })
        .build(handler);
    worker.run().await?;

    let (deliveries, charges) = (DELIVERIES.len(), CHARGES.load(Relaxed));
    println!("{deliveries} deliveries of {PAYMENTS} payments, {charges} charges");
    assert_eq!(charges, PAYMENTS);
    Ok(())
}
