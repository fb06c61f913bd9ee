//! Runs each message once: a tower layer against the copies that at-least-once delivery brings.
//!
//! Every broker delivers at least once. A worker charges the card, dies before the ack, and the
//! message comes back. [`IdempotencyLayer`] stands in front of the handler, remembers which
//! messages had their effect, and answers a copy with Ok without running it again, so that the
//! broker lets go of it.
//!
//! ```
//! use std::time::Duration;
//! use tower::{Service, ServiceBuilder, ServiceExt, service_fn, timeout::TimeoutLayer};
//! use tower_idempotency::{BoxError, DeadLetterLayer, Envelope, IdempotencyLayer, MemoryStore};
//!
//! async fn charge(payment: Envelope) -> Result<(), BoxError> {
//!     // … moves money …
//!     # let _ = payment;
//!     Ok(())
//! }
//!
//! # async fn publish(_: Envelope) -> Result<(), BoxError> { Ok(()) }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! let store = MemoryStore::builder().ttl(Duration::from_secs(24 * 3600)).build()?;
//!
//! let mut consumer = ServiceBuilder::new()
//!     .layer(DeadLetterLayer::new(service_fn(publish))) // outermost: what failed for good
//!     .layer(IdempotencyLayer::new(store))              // runs each meta.id once
//!     .layer(TimeoutLayer::new(Duration::from_secs(30)))
//!     .service(service_fn(charge));
//!
//! # let body = br#"{"job":"urn:shop:payment","trace_id":"t","data":{},"meta":{"id":"m-1","schema_version":1},"attempts":0}"#;
//! let envelope = Envelope::decode(body)?;
//! envelope.accepts()?;
//! consumer.ready().await?.call(envelope).await?; // Ok: ack. Err: give it back to the broker.
//! # Ok(())
//! # }
//! ```
//!
//! # A worker's loop
//!
//! It does not leave by these `?`. With [`DeadLetterLayer`] outermost, what comes out as an error has not
//! failed: it is to be delivered again, after a pause. Without it, the handler's own errors come out as well,
//! and [`is_transient`](error::is_transient) tells them apart.
//!
//! ```
//! # use std::time::Duration;
//! # use tower::{Service, ServiceExt};
//! # use tower_idempotency::{BoxError, Envelope, Parked};
//! use tower_idempotency::dead_letter::poison;
//! use tower_idempotency::envelope::{DeadLetterBlock, Headers, Reason};
//!
//! # struct Delivery { body: Vec<u8> }
//! # impl Delivery {
//! #     async fn ack(self) {}
//! #     async fn give_back_after(self, _: Duration) {}
//! # }
//! # async fn publish_dead(_: &[u8]) -> Result<(), BoxError> { Ok(()) }
//! async fn handle<S>(consumer: S, delivery: Delivery)
//! where
//!     S: Service<Envelope, Response = (), Error = BoxError>,
//! {
//!     let second = Duration::from_secs(1);
//!     let dead = match Envelope::decode(&delivery.body) {
//!         Ok(message) if message.accepts().is_ok() => {
//!             let message = message.with_headers(Headers::new().with_queue("payments"));
//!             return match consumer.oneshot(message).await {
//!                 Ok(()) => delivery.ack().await,
//!                 Err(error) => {
//!                     // Another copy is being handled, or the store or the dead-letter queue is down.
//!                     let parked = error.downcast_ref::<Parked>().map(Parked::retry_after);
//!                     delivery.give_back_after(parked.unwrap_or(second)).await;
//!                 }
//!             };
//!         }
//!         // Not for this version: as it came.
//!         Ok(_) => delivery.body.clone(),
//!         Err(error) => {
//!             let block = DeadLetterBlock::new(Reason::Poison).with_error(&error);
//!             poison(&delivery.body, &block).into_bytes()
//!         }
//!     };
//!     match publish_dead(&dead).await {
//!         Ok(()) => delivery.ack().await,
//!         Err(_) => delivery.give_back_after(second).await,
//!     }
//! }
//! # let _ = |consumer: tower::util::BoxCloneSyncService<Envelope, (), BoxError>, delivery| {
//! #     handle(consumer, delivery)
//! # };
//! ```
//!
//! The [guide](guide#handing-a-parked-message-back) says what `give_back_after` is on each broker.
//!
//! # What is promised
//!
//! Three modes: the seen-set, which is [`IdempotencyLayer`] as it is; the claim, which
//! `.claim(lease)` turns it into; and, with the feature of a database, the transaction, which `TransactionLayer`
//! lends to the handler.
//!
//! | | seen-set | claim | transaction |
//! |---|---|---|---|
//! | a copy that arrives after the first one's mark was answered | is skipped and acked | is skipped and acked | is skipped and acked |
//! | two copies at the same time | both run | one runs; the other is [`Parked`], or waits | one runs; the other waits, and is then skipped, or runs, or is [`Parked`] |
//! | a message whose handler failed, panicked or was dropped | runs again | runs again | runs again, and what it wrote is rolled back |
//! | a crash before the effect | runs again | runs again when the lease has ended | runs again |
//! | a crash between the effect and the mark | runs again | runs again when the lease has ended | happens to both or to neither |
//! | a store that cannot be asked | nothing runs, nothing is acked, nothing is lost | the same | the same |
//! | a message without an id | runs each time, and is reported | the same | the same |
//!
//! In doubt a message runs again: losing one is worse than repeating one. The [guide] has what each
//! mode costs, how to choose lease and TTL, and how to hand a parked message back to a broker.
//!
//! # The order of the layers
//!
//! Outermost first: dead-letter → idempotency → retry → timeout → handler; with transactions, dead-letter →
//! retry → transaction → timeout → handler.
//!
//! * [`DeadLetterLayer`] inside the idempotency layer would answer Ok for a message that never had
//!   its effect; it would be remembered as done, and its redrive skipped.
//! * A retry outside works, and asks the store for each attempt.
//! * With a timeout outside, a mark that is due when the call is dropped is still made. But the
//!   error is the timeout's, although the effect happened: a retry outside of that timeout runs the
//!   handler again when it comes before the mark is answered, and [`DeadLetterLayer`] should be
//!   told to [let the error through](dead_letter::DeadLetterLayer::transient_if). With the timeout
//!   inside, that error is the handler's failure.
//!
//! One record serves one consumer: two handlers of the same messages on one store would
//! [skip each other's work](idempotency#one-record-one-consumer).
//!
//! # Messages
//!
//! [`Envelope`] is BabelQueue's message, which its SDKs for PHP, Go, Python, Node, Java and .NET
//! read and write. [`IdempotencyLayer`] serves any other request type by a closure that names it,
//! [`id_from`](IdempotencyLayer::id_from). [`DeadLetterLayer`] is for envelopes; with requests of
//! one's own, what ends in an error that is not [transient](error::is_transient) is published where
//! the call is made.
//!
//! # Stores
//!
//! | store | feature | for |
//! |---|---|---|
//! | [`MemoryStore`] | | one process; forgets with it |
//! | `SqliteStore` | `sqlite` | the workers of one host, in a file, without a server |
//! | `RedisStore` | `redis` | a fleet; shares its record with BabelQueue's PHP workers |
//! | `PostgresStore`, `MySqlStore` | `postgres`, `mysql` | a fleet, on a database that it has |
//! | `store::foreign` | of the database | the record of a Go fleet (Redis, PostgreSQL) or a PHP one (SQL) |
//!
//! Only the constructor differs. A store in a server or file takes the name of its key prefix or
//! table and has no default for it, since two consumers of the same messages must not share one. A
//! [`Store`] of one's own is three methods, a [`ClaimStore`] four more; the feature `testing` has their
//! contract as a test. [`BoxStore`] is any of them, chosen by a URL.
//!
//! # Features
//!
//! | feature | |
//! |---|---|
//! | `tokio` (default) | the claim; limits the time of store commands, pauses between tries of a mark, finishes the marks that dropped calls left. Without it the seen-set runs on any executor and does none of this. |
//! | `redis`, `postgres`, `mysql`, `sqlite` | the store of that name, and transactions of the three databases, with `tokio`; the three of SQL need Rust 1.94, as sqlx does |
//! | `testing` | `testing::store_contract` and `claim_store_contract`: what is asked of a [`Store`] and a [`ClaimStore`], as tests |
//! | `tracing` | tells each [event] to `tracing`; `TraceLayer`, a span for each message |
//! | `metrics` | counts each [event] with `metrics`, and measures the age of duplicates |
//! | `cli` | the command `idempotency`, for operators; brings in clients of RabbitMQ and NATS, and needs Rust 1.94 |
//! | `full` | all of them |

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod call;
mod json;

pub mod ack;
#[cfg(feature = "tokio")]
#[cfg_attr(docsrs, doc(cfg(feature = "tokio")))]
pub mod claim;
pub mod dead_letter;
pub mod envelope;
pub mod error;
pub mod event;
#[doc = include_str!("../docs/guide.md")]
pub mod guide {
    // Only this page.
}
pub mod id;
pub mod idempotency;
pub mod store;
#[cfg(feature = "testing")]
#[cfg_attr(docsrs, doc(cfg(feature = "testing")))]
pub mod testing;
#[cfg(feature = "tracing")]
#[cfg_attr(docsrs, doc(cfg(feature = "tracing")))]
pub mod trace;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
#[cfg_attr(
    docsrs,
    doc(cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite")))
)]
pub mod transaction;

#[cfg(feature = "tokio")]
#[cfg_attr(docsrs, doc(cfg(feature = "tokio")))]
pub use self::claim::{ClaimLayer, OnDrop};
#[cfg(feature = "mysql")]
#[cfg_attr(docsrs, doc(cfg(feature = "mysql")))]
pub use self::store::MySqlStore;
#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
pub use self::store::PostgresStore;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use self::store::RedisStore;
#[cfg(feature = "sqlite")]
#[cfg_attr(docsrs, doc(cfg(feature = "sqlite")))]
pub use self::store::SqliteStore;
#[cfg(feature = "tracing")]
#[cfg_attr(docsrs, doc(cfg(feature = "tracing")))]
pub use self::trace::TraceLayer;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
#[cfg_attr(
    docsrs,
    doc(cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite")))
)]
pub use self::transaction::{LentTransaction, TransactionLayer, WithTransaction};
pub use self::{
    ack::{Ack, IsDone, Outcome},
    dead_letter::{DeadLetter, DeadLetterLayer},
    envelope::Envelope,
    error::{BackendError, BoxError, ConfigError, Parked, StoreError, Unfinished},
    id::{ExtractId, MessageId, MetaId},
    idempotency::{Idempotency, IdempotencyLayer, OnMarkError, OnStoreError},
    store::{BoxStore, Claim, ClaimStore, Lease, MemoryStore, MemoryStoreBuilder, Owner, Store},
};
