//! Errors that the layers add to those of the services they wrap.
//!
//! As in tower, a layer that adds an error answers with [`BoxError`]; what it adds is a small
//! struct to downcast to.
//!
//! ```
//! use tower_idempotency::{BoxError, StoreError, error::{Operation, is_transient}};
//!
//! let error: BoxError = StoreError::new(Operation::Seen, "connection refused").into();
//! assert!(is_transient(&error));
//! assert_eq!(error.downcast_ref::<StoreError>().unwrap().operation(), Operation::Seen);
//! ```

use crate::id::MessageId;
use std::{borrow::Cow, error::Error, fmt, sync::Arc, time::Duration};

/// An error of any service: tower's own alias.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Whether an error is the state of the infrastructure and not the handler's failure: such a
/// message belongs back on its queue, not on the dead-letter queue.
///
/// True for [`StoreError`], [`Parked`], [`Unfinished`] and [`Unpublished`]. Looks at the error itself, not at its
/// sources: a handler that fails because of an error of this kind has failed.
///
/// tower's own errors are not known here. Where load shedding or a buffer stands in the stack
/// (`Overloaded`, `Closed`, `ServiceError`), or a timeout *outside* of the idempotency layer
/// (`Elapsed`), widen the predicate of [`DeadLetterLayer`](crate::DeadLetterLayer::transient_if). A
/// timeout around the handler is another matter: a handler that hung has failed.
#[must_use]
pub fn is_transient(error: &BoxError) -> bool {
    error.is::<StoreError>()
        || error.is::<Parked>()
        || error.is::<Unfinished>()
        || error.is::<Unpublished>()
}

/// What the store was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Whether an id is remembered.
    Seen,
    /// To remember an id.
    Remember,
    /// To drop an id.
    Forget,
    /// To claim an id.
    Claim,
    /// To hold a claim for longer.
    Renew,
    /// To remember an id and end its claim.
    Complete,
    /// To end a claim.
    Release,
    /// To begin a transaction for a message.
    Begin,
}

impl Operation {
    /// The name of the operation: `seen`, `remember`, `forget`, `claim`, `renew`, `complete`,
    /// `release`, `begin`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Operation::Seen => "seen",
            Operation::Remember => "remember",
            Operation::Forget => "forget",
            Operation::Claim => "claim",
            Operation::Renew => "renew",
            Operation::Complete => "complete",
            Operation::Release => "release",
            Operation::Begin => "begin",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The store did not do what it was asked, or did not say so in time.
///
/// From `seen`, `claim` and `begin`, the handler did not run. From `remember` and `complete` (errors only where
/// [`OnMarkError::Fail`](crate::OnMarkError::Fail) asks for them), it ran and its effect stands.
#[derive(Debug)]
pub struct StoreError {
    operation: Operation,
    source: BoxError,
}

impl StoreError {
    /// An error of this operation.
    pub fn new(operation: Operation, source: impl Into<BoxError>) -> Self {
        StoreError {
            operation,
            source: source.into(),
        }
    }

    /// Which operation failed.
    #[must_use]
    pub const fn operation(&self) -> Operation {
        self.operation
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the idempotency store failed at `{}`: {}",
            self.operation, self.source
        )
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(self.source.as_ref())
    }
}

/// Somebody else is busy with the message: another copy of it is being handled. Or, in a transaction on
/// SQLite, with the file, by which one message at a time can be handled.
///
/// It must not be acked, since that one may still fail, and it has not failed: to be handed back to the
/// broker for a later delivery, after [`retry_after`](Parked::retry_after), without spending what
/// deliveries a message has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parked {
    id: MessageId,
    retry_after: Duration,
}

impl Parked {
    /// This message is to come again after a while.
    #[must_use]
    pub const fn new(id: MessageId, retry_after: Duration) -> Self {
        Parked { id, retry_after }
    }

    /// The message.
    #[must_use]
    pub const fn id(&self) -> &MessageId {
        &self.id
    }

    /// How long to wait before it is delivered again; never zero.
    ///
    /// Three quarters to the whole of what is left of the other one's lease, by chance, so that copies
    /// do not come back all at once. Of a transaction nobody knows how long it takes: then the same of five
    /// seconds.
    #[must_use]
    pub const fn retry_after(&self) -> Duration {
        self.retry_after
    }
}

impl fmt::Display for Parked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "somebody else is busy with the message {:?}; to be delivered again in {:?}",
            self.id, self.retry_after
        )
    }
}

impl Error for Parked {}

/// The handler of a message ran, and its transaction is not known to be committed: to be delivered again,
/// and handled as a whole.
///
/// It must not be acked. Nothing that the handler wrote in its transaction has happened, or, where the
/// [cause](Unfinished::cause) is [`Unknown`](UnfinishedCause::Unknown), either all of it or nothing; then the next
/// delivery finds out. (What a handler writes after its transaction is over is in no transaction any more.) The [source](Error::source) is what went wrong: the handler's own error, where it gave one.
#[derive(Debug)]
pub struct Unfinished {
    cause: UnfinishedCause,
    source: BoxError,
}

/// Why a transaction is not known to be committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnfinishedCause {
    /// Another transaction was in the way of a statement of the handler's, or of the commit: serialization
    /// failure, deadlock, lock wait. To be handled again soon.
    Contention,
    /// It was over before it could be committed, although the handler answered Ok: a statement had failed and
    /// its error was not passed on, which has the database undo the others too, or it was rolled back by
    /// hand. As a rule that is a fault of the handler's, which comes again with the message.
    Undone,
    /// The handler answered Ok and did not give it back: some task has it still.
    Kept,
    /// It was not committed: its connection was lost before that, or the database was not able to write.
    Lost,
    /// The commit was sent, and its answer did not come, or does not say what became of it. Also, on SQLite, where
    /// the handler had committed by hand.
    Unknown,
}

impl Unfinished {
    /// A transaction that is not known to be committed.
    pub fn new(cause: UnfinishedCause, source: impl Into<BoxError>) -> Self {
        Unfinished {
            cause,
            source: source.into(),
        }
    }

    /// Why it is not known to be committed.
    #[must_use]
    pub const fn cause(&self) -> UnfinishedCause {
        self.cause
    }
}

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.cause {
            UnfinishedCause::Contention => "another transaction was in the way of the message's",
            UnfinishedCause::Undone => {
                "the message's transaction was undone before it could be committed"
            }
            UnfinishedCause::Kept => "the message's transaction was not given back",
            UnfinishedCause::Lost => "the message's transaction was lost before its commit",
            UnfinishedCause::Unknown => {
                "the message's transaction was perhaps committed, and perhaps not"
            }
        };
        write!(f, "{what}: {}", self.source)
    }
}

impl Error for Unfinished {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(self.source.as_ref())
    }
}

/// The store gave no answer within the time limit.
///
/// Whether the command took effect is unknown. Found as the source of a [`StoreError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut {
    limit: Duration,
}

impl TimedOut {
    /// No answer within `limit`.
    #[must_use]
    pub const fn new(limit: Duration) -> Self {
        TimedOut { limit }
    }

    /// The limit that ran out.
    #[must_use]
    pub const fn limit(&self) -> Duration {
        self.limit
    }
}

impl fmt::Display for TimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no answer within {:?}", self.limit)
    }
}

impl Error for TimedOut {}

/// A store could not do something on its server or in its file.
///
/// Found as the source of a [`StoreError`]. What kind it is of is told by error codes (SQLSTATE, error
/// number, Redis error code), never by a text.
#[derive(Clone, Debug)]
pub struct BackendError {
    kind: BackendErrorKind,
    expected: Option<Cow<'static, str>>,
    source: Arc<dyn Error + Send + Sync>,
}

/// What stood in the way of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendErrorKind {
    /// No answer: connection refused or lost, response timeout, no connection free in the pool, the
    /// server starting or stopping, a missing runtime.
    Unavailable,
    /// Another session was in the way: deadlock, serialization failure, lock wait, busy file.
    Contention,
    /// The server takes no writes: a replica, such as the old primary after a failover.
    ReadOnly,
    /// Credentials or permissions.
    Denied,
    /// Table, column or key is missing or not what the store works with.
    Schema,
    /// This record cannot hold an id like this.
    UnsuitableId,
    /// A setting that cannot be held to, where the source is a [`ConfigError`], or a URL that is none.
    Config,
    /// Anything else.
    Other,
}

impl BackendError {
    /// An error of this kind.
    pub fn new(kind: BackendErrorKind, source: impl Into<BoxError>) -> Self {
        BackendError {
            kind,
            expected: None,
            source: Arc::from(source.into()),
        }
    }

    /// Adds what was expected, or what to do.
    #[must_use]
    pub fn expected(mut self, expected: impl Into<Cow<'static, str>>) -> Self {
        self.expected = Some(expected.into());
        self
    }

    /// What stood in the way.
    #[must_use]
    pub const fn kind(&self) -> BackendErrorKind {
        self.kind
    }

    /// Whether the same again may succeed with nobody changing anything.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(
            self.kind,
            BackendErrorKind::Unavailable
                | BackendErrorKind::Contention
                | BackendErrorKind::ReadOnly
        )
    }
}

impl From<ConfigError> for BackendError {
    fn from(error: ConfigError) -> Self {
        BackendError::new(BackendErrorKind::Config, error)
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)?;
        match &self.expected {
            Some(expected) => write!(f, "; {expected}"),
            None => Ok(()),
        }
    }
}

impl Error for BackendError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(self.source.as_ref())
    }
}

/// A message failed for good and could not be put on the dead-letter queue.
///
/// It must not be acked: no copy of it is known to be anywhere else.
#[derive(Debug)]
pub struct Unpublished {
    failure: BoxError,
    source: BoxError,
}

impl Unpublished {
    /// The handler failed with `failure`, then publishing with `source`.
    pub fn new(failure: impl Into<BoxError>, source: impl Into<BoxError>) -> Self {
        Unpublished {
            failure: failure.into(),
            source: source.into(),
        }
    }

    /// Why the message was to be dead-lettered.
    #[must_use]
    pub fn failure(&self) -> &BoxError {
        &self.failure
    }
}

impl fmt::Display for Unpublished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "not put on the dead-letter queue: {}; the message failed: {}",
            self.source, self.failure
        )
    }
}

impl Error for Unpublished {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(self.source.as_ref())
    }
}

/// A setting that cannot be held to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    setting: &'static str,
    given: String,
    expected: &'static str,
}

impl ConfigError {
    /// `setting` was `given`, but must be what is `expected`.
    pub fn new(setting: &'static str, given: impl Into<String>, expected: &'static str) -> Self {
        ConfigError {
            setting,
            given: given.into(),
            expected,
        }
    }

    /// The name of the setting.
    #[must_use]
    pub const fn setting(&self) -> &'static str {
        self.setting
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` is {}; expected {}",
            self.setting, self.given, self.expected
        )
    }
}

impl Error for ConfigError {}
