//! What the idempotency layer and the stores decided, told in one place.
//!
//! Each of their decisions about a message is an [`Event`]; that a handler failed is its own to
//! tell. An event goes to the `on_event` hook, to `tracing`
//! (feature `tracing`; target `tower_idempotency`), where it is also the decision of the message's
//! span, and to the counter `tower_idempotency_events_total` with the label `event` (feature `metrics`).
//! The age of a duplicate goes to the histogram `tower_idempotency_duplicate_age_seconds`.
//!
//! ```
//! use tower_idempotency::{IdempotencyLayer, MemoryStore, event::Event};
//!
//! let layer = IdempotencyLayer::new(MemoryStore::new()).on_event(|event| {
//!     if let Event::MarkFailed { id, error, .. } = event {
//!         eprintln!("{id} had its effect, but {error}");
//!     }
//! });
//! # let _ = layer;
//! ```

use crate::{
    error::{Operation, StoreError, Unfinished},
    id::MessageId,
};
use std::{
    fmt, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// A decision about a message.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The handler succeeded and its id is remembered. Told after the record was written.
    #[non_exhaustive]
    Ran {
        /// The message.
        id: &'a MessageId,
    },
    /// The id was remembered; the handler was not called.
    #[non_exhaustive]
    Duplicate {
        /// The message.
        id: &'a MessageId,
        /// When it was made, in milliseconds since the Unix epoch, by its producer's clock; where it
        /// [says so](crate::ExtractId::created_at).
        created_at: Option<i64>,
    },
    /// Somebody else is busy with the message; the handler was not called.
    #[non_exhaustive]
    Parked {
        /// The message.
        id: &'a MessageId,
        /// When it is to be delivered again.
        retry_after: Duration,
    },
    /// The message has no usable id, so the handler runs each time. Told before it does.
    NoId,
    /// The store could not say whether the id is remembered or claimed, and the handler is run
    /// nevertheless. Told before it runs, and before it is made ready where the call had waited.
    #[non_exhaustive]
    FailedOpen {
        /// The message.
        id: &'a MessageId,
        /// What the store said.
        error: &'a StoreError,
    },
    /// The store could not say whether the id is remembered or claimed, or begin a transaction; the
    /// handler was not called.
    #[non_exhaustive]
    StoreError {
        /// The message; empty for one without an id.
        id: &'a MessageId,
        /// What the store said.
        error: &'a StoreError,
    },
    /// The handler succeeded, but the store did not say that its id is remembered: a redelivery may
    /// run it again.
    #[non_exhaustive]
    MarkFailed {
        /// The message.
        id: &'a MessageId,
        /// What the store said to the last try.
        error: &'a StoreError,
    },
    /// The claim ended while the handler was running, before it could begin or while its mark was due: renewals came too late or
    /// failed, or somebody dropped the record. Another copy may run beside it. Told at most once for a
    /// claim, and not where it could be taken again, since nobody held it by then. A handler that runs goes on; one
    /// that has not begun waits for a claim anew.
    #[non_exhaustive]
    LeaseLost {
        /// The message.
        id: &'a MessageId,
    },
    /// The handler failed and the store did not say that its claim is released: the message is
    /// parked until the lease ends.
    #[non_exhaustive]
    ReleaseFailed {
        /// The message.
        id: &'a MessageId,
        /// What the store said to the last try.
        error: &'a StoreError,
    },
    /// The call was dropped, and no runtime was there for what it left to do. After the handler
    /// succeeded that is its mark, and a redelivery may run it again; before, it is the release of the
    /// claim, and the message is parked until the lease ends.
    #[non_exhaustive]
    Abandoned {
        /// The message.
        id: &'a MessageId,
        /// What was left to do.
        operation: Operation,
    },
    /// The handler ran, and its transaction is not known to be committed: the message is to run again.
    #[non_exhaustive]
    Unfinished {
        /// The message; empty for one without an id.
        id: &'a MessageId,
        /// What became of the transaction.
        error: &'a Unfinished,
    },
    /// A full record dropped its oldest ids before their time: duplicates of them run again.
    #[non_exhaustive]
    Evicted {
        /// How many ids.
        count: u64,
    },
}

impl Event<'_> {
    /// How old a duplicate is: the time since its message was made, by the producer's clock and this
    /// host's. Zero for one from the future; `None` for what is no duplicate, and where the message does
    /// not say when it was made.
    ///
    /// A record has to be kept for longer than this: the effect came after the message was made.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        let Event::Duplicate {
            created_at: Some(created_at),
            ..
        } = self
        else {
            return None;
        };
        let created_at = Duration::from_millis(u64::try_from(*created_at).ok()?);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
        Some(now.saturating_sub(created_at))
    }

    /// The name of the decision, as the metrics have it: `ran`, `duplicate`, `parked`, `no_id`,
    /// `failed_open`, `store_error`, `mark_failed`, `lease_lost`, `release_failed`, `abandoned`,
    /// `unfinished`, `evicted`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Event::Ran { .. } => "ran",
            Event::Duplicate { .. } => "duplicate",
            Event::Parked { .. } => "parked",
            Event::NoId => "no_id",
            Event::FailedOpen { .. } => "failed_open",
            Event::StoreError { .. } => "store_error",
            Event::MarkFailed { .. } => "mark_failed",
            Event::LeaseLost { .. } => "lease_lost",
            Event::ReleaseFailed { .. } => "release_failed",
            Event::Abandoned { .. } => "abandoned",
            Event::Unfinished { .. } => "unfinished",
            Event::Evicted { .. } => "evicted",
        }
    }
}

type Hook = dyn Fn(&Event<'_>) + Send + Sync;

/// The one place that every event goes through.
#[derive(Clone, Default)]
pub(crate) struct Reporter {
    hook: Option<Arc<Hook>>,
}

impl Reporter {
    pub(crate) fn new(hook: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        Reporter {
            hook: Some(Arc::new(hook)),
        }
    }

    /// Tells an event. Never panics: whoever listens and does has changed no outcome.
    pub(crate) fn report(&self, event: &Event<'_>) {
        if cfg!(not(any(feature = "tracing", feature = "metrics"))) && self.hook.is_none() {
            return;
        }
        let told = catch_unwind(AssertUnwindSafe(|| {
            #[cfg(feature = "tracing")]
            {
                trace(event);
                crate::trace::decided(event.name());
            }
            #[cfg(feature = "metrics")]
            measure(event);
            if let Some(hook) = &self.hook {
                hook(event);
            }
        }));
        if let Err(payload) = told {
            // The panic was told of already, and what it threw may panic again when it is dropped.
            mem::forget(payload);
        }
    }
}

impl fmt::Debug for Reporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.hook.is_some() {
            "Some(..)"
        } else {
            "None"
        })
    }
}

/// Debug for the usual, warn for what an operator must see.
#[cfg(feature = "tracing")]
fn trace(event: &Event<'_>) {
    use tracing::{debug, warn};

    match event {
        Event::Ran { id } => debug!(?id, "ran"),
        Event::Duplicate { id, .. } => debug!(?id, "duplicate, not run again"),
        Event::Parked { id, retry_after } => {
            debug!(?id, ?retry_after, "parked, somebody else is busy with it");
        }
        Event::NoId => warn!("run without deduplication: no usable id"),
        Event::FailedOpen { id, error } => {
            warn!(?id, %error, "run without knowing whether it ran before");
        }
        Event::StoreError { id, error } => warn!(?id, %error, "not run"),
        Event::MarkFailed { id, error } => warn!(?id, %error, "ran, but is not remembered"),
        Event::LeaseLost { id } => warn!(?id, "the claim ended before the handler did"),
        Event::ReleaseFailed { id, error } => {
            warn!(?id, %error, "failed, and is parked until its lease ends");
        }
        Event::Abandoned { id, operation } => {
            warn!(?id, %operation, "dropped, and what was left to do is not done");
        }
        Event::Unfinished { id, error } => warn!(?id, %error, "ran, and is to run again"),
        Event::Evicted { count } => warn!(count, "the record is full: oldest ids dropped"),
    }
}

#[cfg(feature = "metrics")]
fn measure(event: &Event<'_>) {
    count(event);
    if let Some(age) = event.age() {
        metrics::histogram!("tower_idempotency_duplicate_age_seconds").record(age);
    }
}

/// Tells the recorder in use what the metrics are, and in which units: for a `HELP` line in what
/// Prometheus reads, for example. Once, after the recorder was installed.
#[cfg(feature = "metrics")]
#[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
pub fn describe_metrics() {
    use metrics::{Unit, describe_counter, describe_histogram};

    describe_counter!(
        "tower_idempotency_events_total",
        Unit::Count,
        "Decisions about messages, by the name of the event"
    );
    describe_histogram!(
        "tower_idempotency_duplicate_age_seconds",
        Unit::Seconds,
        "Time from when a message was made to when a duplicate of it was skipped; a TTL has to be longer"
    );
}

/// Name and label are literals in each arm: from others the macro makes a key on the heap, each time.
#[cfg(feature = "metrics")]
fn count(event: &Event<'_>) {
    use metrics::counter;

    match event {
        Event::Ran { .. } => counter!("tower_idempotency_events_total", "event" => "ran"),
        Event::Duplicate { .. } => {
            counter!("tower_idempotency_events_total", "event" => "duplicate")
        }
        Event::Parked { .. } => counter!("tower_idempotency_events_total", "event" => "parked"),
        Event::NoId => counter!("tower_idempotency_events_total", "event" => "no_id"),
        Event::FailedOpen { .. } => {
            counter!("tower_idempotency_events_total", "event" => "failed_open")
        }
        Event::StoreError { .. } => {
            counter!("tower_idempotency_events_total", "event" => "store_error")
        }
        Event::MarkFailed { .. } => {
            counter!("tower_idempotency_events_total", "event" => "mark_failed")
        }
        Event::LeaseLost { .. } => {
            counter!("tower_idempotency_events_total", "event" => "lease_lost")
        }
        Event::ReleaseFailed { .. } => {
            counter!("tower_idempotency_events_total", "event" => "release_failed")
        }
        Event::Abandoned { .. } => {
            counter!("tower_idempotency_events_total", "event" => "abandoned")
        }
        Event::Unfinished { .. } => {
            counter!("tower_idempotency_events_total", "event" => "unfinished")
        }
        Event::Evicted { .. } => counter!("tower_idempotency_events_total", "event" => "evicted"),
    }
    .increment(match event {
        Event::Evicted { count } => *count,
        _ => 1,
    });
}
