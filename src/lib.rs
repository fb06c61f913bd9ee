//! x
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod call;
mod json;

pub mod ack;
pub mod dead_letter;
pub mod envelope;
pub mod error;
pub mod event;
pub mod id;
pub mod idempotency;
pub mod store;

pub use self::{
    ack::{Ack, IsDone, Outcome},
    dead_letter::{DeadLetter, DeadLetterLayer},
    envelope::Envelope,
    error::{BoxError, ConfigError, StoreError},
    id::{ExtractId, MessageId, MetaId},
    idempotency::{Idempotency, IdempotencyLayer, OnMarkError, OnStoreError},
    store::{MemoryStore, MemoryStoreBuilder, Store},
};
