//! Fifty copies of one payment arrive together.
//!
//! ```text
//! cargo run --example fifty_copies
//! ```
//!
//! The seen-set lets all of them run: none was done when the others were asked for. With a claim one
//! runs, and the others are parked; or they wait for it, and are duplicates then.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_idempotency::{
    BoxError, Envelope, IdempotencyLayer, Lease, MemoryStore, Outcome, Parked,
};

const COPIES: u32 = 50;

/// What became of the copies.
#[derive(Debug, Default, PartialEq)]
struct Tally {
    charged: u32,
    duplicates: u32,
    parked: u32,
}

/// Delivers all copies at once to what `wrap` makes of the handler.
async fn deliver<S, F>(wrap: impl FnOnce(Charge) -> S) -> Result<Tally, BoxError>
where
    S: Service<Envelope, Response = Outcome<()>, Error = BoxError, Future = F>
        + Clone
        + Send
        + 'static,
    F: Future + Send,
{
    let charged = Arc::new(AtomicU32::new(0));
    let consumer = wrap(Charge(charged.clone()));
    let payment = Envelope::new("urn:shop:payment", &serde_json::json!({"cents": 9990}))?;
    let copies: Vec<_> = (0..COPIES)
        .map(|_| tokio::spawn(consumer.clone().oneshot(payment.clone())))
        .collect();
    let mut tally = Tally::default();
    for copy in copies {
        match copy.await? {
            Ok(Outcome::Duplicate) => tally.duplicates += 1,
            Ok(_) => {}
            Err(error) if error.is::<Parked>() => tally.parked += 1,
            Err(error) => return Err(error),
        }
    }
    tally.charged = charged.load(Relaxed);
    Ok(tally)
}

/// Takes a while to charge, as the world outside does.
#[derive(Clone)]
struct Charge(Arc<AtomicU32>);

impl Charge {
    async fn charge(self, _: Envelope) -> Result<(), BoxError> {
        tokio::time::sleep(Duration::from_millis(50)).await;
        self.0.fetch_add(1, Relaxed);
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let lease = Lease::new(Duration::from_secs(60))?;
    let layer = || IdempotencyLayer::new(MemoryStore::new());
    let handler = |charge: Charge| service_fn(move |payment| charge.clone().charge(payment));

    let seen_set = deliver(|charge| layer().outcome().layer(handler(charge))).await?;
    let claim = deliver(|charge| layer().claim(lease).outcome().layer(handler(charge))).await?;
    let waiting = deliver(|charge| {
        let layer = layer().claim(lease).wait(Duration::from_secs(10));
        layer.outcome().layer(handler(charge))
    })
    .await?;

    println!("{COPIES} copies of one payment, at once");
    println!("                    charged   duplicates   parked");
    for (name, tally) in [
        ("seen-set", &seen_set),
        ("claim", &claim),
        ("claim, waiting", &waiting),
    ] {
        let Tally {
            charged,
            duplicates,
            parked,
        } = tally;
        println!("{name:<18}{charged:>9}{duplicates:>13}{parked:>9}");
    }
    // On a slow machine the last copies may come after the first one's mark.
    assert!(seen_set.charged > 1 && seen_set.charged + seen_set.duplicates == COPIES);
    assert!(claim.charged == 1 && claim.duplicates + claim.parked == COPIES - 1);
    assert!(waiting.charged == 1 && waiting.duplicates == COPIES - 1);
    Ok(())
}
