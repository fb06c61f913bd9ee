//! BabelQueue's message: the wire format that its SDKs in every language share.
//!
//! An [`Envelope`] says what happened (a URN), carries the data, and bears the id that a message
//! is told apart by:
//!
//! ```text
//! {"job":"urn:babel:orders:created","trace_id":"7b3f…","data":{…},
//!  "meta":{"id":"f1e2…","queue":"orders","lang":"php","schema_version":1,"created_at":1749132727000},
//!  "attempts":0}
//! ```
//!
//! # Consuming
//!
//! ```
//! use tower_idempotency::Envelope;
//!
//! #[derive(serde::Deserialize)]
//! struct Order { order_id: u64 }
//!
//! let body = br#"{"job":"urn:shop:order","trace_id":"t-1","data":{"order_id":1042},
//!                 "meta":{"id":"m-1","schema_version":1},"attempts":0}"#;
//! let envelope = Envelope::decode(body)?;
//! envelope.accepts()?;
//! assert_eq!(envelope.id().map(|id| id.as_str()), Some("m-1"));
//! assert_eq!(envelope.data::<Order>()?.order_id, 1042);
//! # Ok::<_, tower_idempotency::BoxError>(())
//! ```
//!
//! A body that does not decode is poison: it goes to the dead-letter queue as
//! [`dead_letter::poison`](crate::dead_letter::poison) records it, never to a handler.
//!
//! # Producing
//!
//! ```
//! use tower_idempotency::Envelope;
//!
//! let body = Envelope::new("urn:shop:order", &serde_json::json!({"order_id": 1042}))?
//!     .with_queue("orders")
//!     .with_meta_extra("ext", &serde_json::json!({"shop": "eu"}))?
//!     .encode();
//! # assert!(Envelope::decode(body.as_bytes()).is_ok());
//! # Ok::<_, tower_idempotency::envelope::EnvelopeError>(())
//! ```
//!
//! # What is kept
//!
//! The data and everything that is not part of the format stay the JSON text they came as until
//! somebody asks for them: every digit survives a round trip, and a duplicate never pays for the
//! parsing. A key that the format knows is normalised: an escaped character becomes the
//! character itself, and a null is the same as a missing key.

mod frame;

pub use self::frame::{frame, unframe};

use crate::{
    id::MessageId,
    json::{self, Extras, Member},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    error::Error,
    fmt,
    str::{self, Utf8Error},
    sync::Arc,
    time::SystemTime,
};

/// The one version of the format there is.
const SCHEMA_VERSION: i64 = 1;
/// How this SDK names itself in `meta.lang`.
const LANG: &str = "rust";
const DEFAULT_QUEUE: &str = "default";
/// The header that marks a deliberate replay.
const REPLAY_BYPASS: &str = "bq-replay-bypass";

const CORE_KEYS: [&str; 7] = [
    "job",
    "urn",
    "trace_id",
    "data",
    "meta",
    "attempts",
    "dead_letter",
];
const CORE_META_KEYS: [&str; 5] = ["id", "queue", "lang", "schema_version", "created_at"];

/// A message.
///
/// A clone copies no data. See the [module docs](self) for examples.
#[derive(Clone, PartialEq, Eq)]
pub struct Envelope {
    body: Arc<Body>,
    headers: Headers,
}

#[derive(Clone, PartialEq, Eq)]
struct Body {
    urn: Box<str>,
    trace_id: Option<Box<str>>,
    /// The text of a JSON object.
    data: Option<Arc<str>>,
    meta: Meta,
    attempts: i64,
    dead_letter: Option<DeadLetterBlock>,
    extras: Extras,
    warnings: Vec<Warning>,
}

/// What a message says of itself: the block `meta`, which no hop changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    id: Option<MessageId>,
    queue: Option<Box<str>>,
    lang: Option<Box<str>>,
    schema_version: Option<i64>,
    created_at: Option<i64>,
    extras: Extras,
}

/// Why and when a message was put on the dead-letter queue: the block `dead_letter`.
///
/// ```
/// use tower_idempotency::{Envelope, envelope::{DeadLetterBlock, Reason}};
///
/// let failed = Envelope::new("urn:shop:order", &serde_json::json!({}))?
///     .with_queue("orders")
///     .with_attempts(3)
///     .with_dead_letter(DeadLetterBlock::new(Reason::Failed).with_error("card declined"));
/// let block = failed.dead_letter().unwrap();
/// assert_eq!(block.original_queue(), Some("orders"));
/// assert_eq!(block.attempts(), Some(3));
/// # Ok::<_, tower_idempotency::envelope::EnvelopeError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterBlock {
    reason: Option<Box<str>>,
    error: Option<Box<str>>,
    exception: Option<Box<str>>,
    failed_at: Option<i64>,
    original_queue: Option<Box<str>>,
    attempts: Option<i64>,
    lang: Option<Box<str>>,
    extras: Extras,
}

/// Why a message is on the dead-letter queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// Its handler failed for good.
    #[default]
    Failed,
    /// Nobody here handles its URN.
    UnknownUrn,
    /// Its body does not decode.
    Poison,
}

/// What came with a message out of band: the broker's headers, and the queue it was received from.
///
/// ```
/// use tower_idempotency::envelope::Headers;
///
/// let headers = Headers::new().with_queue("orders").with("bq-replay-bypass", "1");
/// assert_eq!(headers.get("bq-replay-bypass"), Some("1"));
/// ```
///
/// A clone copies nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers(Option<Arc<HeaderParts>>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct HeaderParts {
    queue: Option<Box<str>>,
    pairs: BTreeMap<Box<str>, Box<str>>,
}

/// Something about a body that decode mended, for its producer to mend at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Warning {
    pointer: &'static str,
    mended: &'static str,
}

// ===== impl Envelope =====

impl Envelope {
    /// A new message, with a fresh version 4 id and trace id, for the queue `default`.
    ///
    /// # Errors
    ///
    /// The URN is blank, or `data` does not serialize as a JSON object.
    pub fn new<T: Serialize + ?Sized>(
        urn: impl Into<String>,
        data: &T,
    ) -> Result<Self, EnvelopeError> {
        let urn = urn.into();
        if is_blank(&urn) {
            return Err(EnvelopeError::new(
                "/job",
                format!("{urn:?} is blank; expected a URN"),
            ));
        }
        let data = to_json("/data", data)?;
        if !data.starts_with('{') {
            let found = json::kind(&data);
            return Err(EnvelopeError::new(
                "/data",
                format!("is {found}; expected an object"),
            ));
        }
        let body = Body {
            urn: urn.into(),
            trace_id: Some(MessageId::random().as_str().into()),
            data: Some(data.into()),
            meta: Meta {
                id: Some(MessageId::random()),
                queue: Some(DEFAULT_QUEUE.into()),
                lang: Some(LANG.into()),
                schema_version: Some(SCHEMA_VERSION),
                created_at: Some(now_millis()),
                extras: Extras::default(),
            },
            attempts: 0,
            dead_letter: None,
            extras: Extras::default(),
            warnings: Vec::new(),
        };
        Ok(Envelope {
            body: Arc::new(body),
            headers: Headers::default(),
        })
    }

    /// Reads a body.
    ///
    /// Of a repeated key the last one counts, whole; those before it must have the right type, too.
    /// What the format forbids is dropped, with a [`Warning`]. What it does not know is kept. An
    /// empty array as `data`, which PHP's JSON encoder makes of an empty map, is taken as `{}`.
    ///
    /// It takes time in proportion to the body, and memory up to some twenty times its size where
    /// that consists of nothing but keys: bodies want a limit of size before they come here.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] for poison: what is not exactly one JSON object in UTF-8, has a known key of
    /// another type, or names no URN. No number is refused for its size, and no nesting for its
    /// depth.
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let text = str::from_utf8(body).map_err(|error| DecodeError("", Cause::Utf8(error)))?;
        let members = json::members(text).map_err(|error| DecodeError("", Cause::Json(error)))?;
        let mut warnings = Vec::new();
        let mut warn = |pointer, mended| {
            let warning = Warning { pointer, mended };
            if !warnings.contains(&warning) {
                #[cfg(feature = "tracing")]
                tracing::warn!("{warning}");
                warnings.push(warning);
            }
        };

        let (mut job, mut urn) = (None, None);
        let (mut trace_id, mut data, mut attempts, mut dead_letter) = (None, None, None, None);
        let mut meta = Meta::default();
        let mut extras = Vec::new();
        for member in &members {
            let value = member.value;
            match json::unescape(member.raw_key).as_deref() {
                Some("job") => job = Some(value),
                Some("urn") => urn = Some(value),
                Some("trace_id") => trace_id = string("/trace_id", value)?,
                Some("data") => data = object_of_data(value)?,
                Some("meta") => meta = Meta::decode(value, &mut warn)?,
                Some("attempts") => attempts = integer("/attempts", value)?,
                Some("dead_letter") => dead_letter = DeadLetterBlock::decode(value)?,
                Some("timestamp") => warn("/timestamp", FORBIDDEN),
                _ => extras.push(*member),
            }
        }

        let body = Body {
            urn: identity(job, urn, &mut warn)?,
            trace_id,
            data,
            meta,
            attempts: attempts.unwrap_or(0),
            dead_letter,
            extras: Extras::new(&extras),
            warnings,
        };
        Ok(Envelope {
            body: Arc::new(body),
            headers: Headers::default(),
        })
    }

    /// Writes the body: compact JSON in UTF-8 on one line, the format's keys in its order, then
    /// what it does not know.
    ///
    /// Carried values go out as they came, but for white space between their tokens. The
    /// [`Headers`] are not part of the body.
    #[must_use]
    pub fn encode(&self) -> String {
        let body = &*self.body;
        let mut out = String::with_capacity(256 + body.data.as_ref().map_or(0, |data| data.len()));
        out.push_str("{\"job\":");
        json::write_str(&mut out, &body.urn);
        if let Some(trace_id) = &body.trace_id {
            out.push_str(",\"trace_id\":");
            json::write_str(&mut out, trace_id);
        }
        if let Some(data) = &body.data {
            out.push_str(",\"data\":");
            json::write_compact(&mut out, data);
        }
        out.push_str(",\"meta\":");
        body.meta.write(&mut out);
        out.push_str(",\"attempts\":");
        out.push_str(&body.attempts.to_string());
        if let Some(dead_letter) = &body.dead_letter {
            out.push_str(",\"dead_letter\":");
            dead_letter.write(&mut out);
        }
        body.extras.write(&mut out, false);
        out.push('}');
        out
    }

    /// Whether a consumer of this version may handle the message.
    ///
    /// # Errors
    ///
    /// [`Rejected`] says why not.
    pub fn accepts(&self) -> Result<(), Rejected> {
        let body = &*self.body;
        if body.meta.schema_version != Some(SCHEMA_VERSION) {
            return Err(Rejected::SchemaVersion(body.meta.schema_version));
        }
        if body.data.is_none() {
            return Err(Rejected::DataMissing);
        }
        if body.trace_id.as_deref().is_none_or(is_blank) {
            return Err(Rejected::TraceIdMissing);
        }
        if body.attempts < 0 {
            return Err(Rejected::AttemptsNegative(body.attempts));
        }
        Ok(())
    }

    /// What happened: the key `job` on the wire. Never blank.
    #[must_use]
    pub fn urn(&self) -> &str {
        &self.body.urn
    }

    /// The id that the message is told apart by: `meta.id`, unless that is missing, null or empty and
    /// so of no use. ([`Meta::id`] has it as it came.)
    ///
    /// An id that is made of this one needs no check of its own: made of an empty one it would be
    /// the same for every message without an id, and all but the first would be skipped.
    #[must_use]
    pub fn id(&self) -> Option<&MessageId> {
        self.body.meta.id().filter(|id| !id.is_empty())
    }

    /// What ties the message to others across services. Copies of different messages share it.
    #[must_use]
    pub fn trace_id(&self) -> Option<&str> {
        self.body.trace_id.as_deref()
    }

    /// Parses the data; a message without any reads as `null`.
    ///
    /// # Errors
    ///
    /// The data does not have the shape of `T`, or nests deeper than `serde_json` goes (128).
    pub fn data<'a, T: Deserialize<'a>>(&'a self) -> serde_json::Result<T> {
        serde_json::from_str(self.raw_data().unwrap_or("null"))
    }

    /// The JSON text of the data, an object, as it came.
    #[must_use]
    pub fn raw_data(&self) -> Option<&str> {
        self.body.data.as_deref()
    }

    /// The block `meta`.
    #[must_use]
    pub fn meta(&self) -> &Meta {
        &self.body.meta
    }

    /// How often the message was tried before; a message that does not say was not.
    #[must_use]
    pub fn attempts(&self) -> i64 {
        self.body.attempts
    }

    /// The block that a dead-lettered message bears.
    #[must_use]
    pub fn dead_letter(&self) -> Option<&DeadLetterBlock> {
        self.body.dead_letter.as_ref()
    }

    /// The JSON text of a top-level key that the format does not know.
    #[must_use]
    pub fn extra(&self, key: &str) -> Option<&str> {
        self.body.extras.get(key)
    }

    /// What [`decode`](Envelope::decode) mended.
    #[must_use]
    pub fn warnings(&self) -> &[Warning] {
        &self.body.warnings
    }

    /// What came with the message out of band.
    #[must_use]
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// Whether somebody runs the message again on purpose and asks that what it did to the outside
    /// is not done again: the header `bq-replay-bypass` is there and not empty.
    ///
    /// For the handler to heed. It changes nothing about deduplication.
    #[must_use]
    pub fn is_replay(&self) -> bool {
        self.headers
            .get(REPLAY_BYPASS)
            .is_some_and(|value| !value.is_empty())
    }

    /// Names the queue the message is meant for: `meta.queue`.
    #[must_use]
    pub fn with_queue(self, queue: impl Into<String>) -> Self {
        self.change(|body| body.meta.queue = Some(queue.into().into()))
    }

    /// Goes on with a trace, in place of the fresh one.
    #[must_use]
    pub fn with_trace_id(self, trace_id: impl Into<String>) -> Self {
        self.change(|body| body.trace_id = Some(trace_id.into().into()))
    }

    /// Names the message, in place of the fresh id. For producers who can send one twice: the
    /// same id makes it the same message.
    #[must_use]
    pub fn with_id(self, id: impl Into<MessageId>) -> Self {
        self.change(|body| body.meta.id = Some(id.into()))
    }

    /// Sets how often the message was tried before.
    #[must_use]
    pub fn with_attempts(self, attempts: i64) -> Self {
        self.change(|body| body.attempts = attempts)
    }

    /// Adds a top-level key that the format does not know, or puts another value in its place.
    ///
    /// # Errors
    ///
    /// The key is one of the format's own or one that it forbids, or `value` does not serialize.
    pub fn with_extra<T: Serialize + ?Sized>(
        self,
        key: &str,
        value: &T,
    ) -> Result<Self, EnvelopeError> {
        let value = extra("/", key, value, &CORE_KEYS, |key| key == "timestamp")?;
        Ok(self.change(|body| body.extras.insert(key, value)))
    }

    /// Adds a key to `meta` that the format does not know, or puts another value in its place.
    ///
    /// # Errors
    ///
    /// As [`with_extra`](Envelope::with_extra).
    pub fn with_meta_extra<T: Serialize + ?Sized>(
        self,
        key: &str,
        value: &T,
    ) -> Result<Self, EnvelopeError> {
        let value = extra("/meta/", key, value, &CORE_META_KEYS, |key| {
            forbidden_in_meta(key).is_some()
        })?;
        Ok(self.change(|body| body.meta.extras.insert(key, value)))
    }

    /// Annotates the message for the dead-letter queue.
    ///
    /// The block takes the message's `attempts`, and as original queue its `meta.queue`, or, where
    /// that is missing or empty, the queue it was received from ([`Headers::queue`]) or what the
    /// block has.
    #[must_use]
    pub fn with_dead_letter(self, mut block: DeadLetterBlock) -> Self {
        let received = self.headers.queue();
        let queue = self
            .meta()
            .queue()
            .filter(|queue| !queue.is_empty())
            .or(received);
        if let Some(queue) = queue {
            block.original_queue = Some(queue.into());
        }
        block.attempts = Some(self.attempts());
        self.change(|body| body.dead_letter = Some(block))
    }

    /// Makes a dead-lettered message ready for its queue again: without the block, with no
    /// attempts, everything else as it was, the id too.
    ///
    /// An id that is remembered is skipped then as before: a deliberate second run takes a
    /// [`forget`](crate::Store::forget) first.
    #[must_use]
    pub fn redriven(self) -> Self {
        self.change(|body| {
            body.dead_letter = None;
            body.attempts = 0;
        })
    }

    /// Puts other headers beside the body.
    #[must_use]
    pub fn with_headers(mut self, headers: Headers) -> Self {
        self.headers = headers;
        self
    }

    /// Marks the message as a deliberate replay; see [`is_replay`](Envelope::is_replay).
    #[must_use]
    pub fn with_replay_bypass(mut self) -> Self {
        self.headers = self.headers.with(REPLAY_BYPASS, "1");
        self
    }

    fn change(mut self, change: impl FnOnce(&mut Body)) -> Self {
        change(Arc::make_mut(&mut self.body));
        self
    }
}

/// Leaves out the data, which may be anybody's secret.
impl fmt::Debug for Envelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Envelope")
            .field("urn", &self.urn())
            .field("id", &self.id())
            .field("attempts", &self.attempts())
            .finish_non_exhaustive()
    }
}

// ===== impl Meta =====

impl Meta {
    fn decode(
        value: &str,
        warn: &mut impl FnMut(&'static str, &'static str),
    ) -> Result<Self, DecodeError> {
        let mut meta = Meta::default();
        let Some(members) = object("/meta", value)? else {
            return Ok(meta);
        };
        let mut extras = Vec::new();
        for member in &members {
            let value = member.value;
            match json::unescape(member.raw_key).as_deref() {
                Some("id") => meta.id = string("/meta/id", value)?.map(|id| (*id).into()),
                Some("queue") => meta.queue = string("/meta/queue", value)?,
                Some("lang") => meta.lang = string("/meta/lang", value)?,
                Some("schema_version") => {
                    meta.schema_version = integer("/meta/schema_version", value)?;
                }
                Some("created_at") => meta.created_at = integer("/meta/created_at", value)?,
                key => match key.and_then(forbidden_in_meta) {
                    Some(pointer) => warn(pointer, FORBIDDEN),
                    None => extras.push(*member),
                },
            }
        }
        meta.extras = Extras::new(&extras);
        Ok(meta)
    }

    fn write(&self, out: &mut String) {
        let mut members = Members::new(out);
        members.string("id", self.id.as_deref());
        members.string("queue", self.queue.as_deref());
        members.string("lang", self.lang.as_deref());
        members.integer("schema_version", self.schema_version);
        members.integer("created_at", self.created_at);
        members.end(&self.extras);
    }

    /// The id as it came; it may be empty. [`Envelope::id`] is the usable one.
    #[must_use]
    pub fn id(&self) -> Option<&MessageId> {
        self.id.as_ref()
    }

    /// The queue the message is meant for.
    #[must_use]
    pub fn queue(&self) -> Option<&str> {
        self.queue.as_deref()
    }

    /// The language of the producer's SDK.
    #[must_use]
    pub fn lang(&self) -> Option<&str> {
        self.lang.as_deref()
    }

    /// The version of the format.
    #[must_use]
    pub fn schema_version(&self) -> Option<i64> {
        self.schema_version
    }

    /// When the message was made, milliseconds since 1970 by its producer's clock.
    #[must_use]
    pub fn created_at(&self) -> Option<i64> {
        self.created_at
    }

    /// The JSON text of a key that the format does not know.
    #[must_use]
    pub fn extra(&self, key: &str) -> Option<&str> {
        self.extras.get(key)
    }
}

// ===== impl DeadLetterBlock =====

impl DeadLetterBlock {
    /// A block for a message that failed now.
    #[must_use]
    pub fn new(reason: Reason) -> Self {
        DeadLetterBlock {
            reason: Some(reason.as_str().into()),
            error: None,
            exception: None,
            failed_at: Some(now_millis()),
            original_queue: None,
            attempts: Some(0),
            lang: Some(LANG.into()),
            extras: Extras::default(),
        }
    }

    /// Says what went wrong, in words.
    #[must_use]
    pub fn with_error(mut self, error: impl fmt::Display) -> Self {
        self.error = Some(error.to_string().into());
        self
    }

    /// Names the type of what went wrong.
    #[must_use]
    pub fn with_exception(mut self, exception: impl Into<String>) -> Self {
        self.exception = Some(exception.into().into());
        self
    }

    /// Names the queue that the message was received from.
    #[must_use]
    pub fn with_original_queue(mut self, queue: impl Into<String>) -> Self {
        self.original_queue = Some(queue.into().into());
        self
    }

    /// Says how often the message was tried.
    #[must_use]
    pub fn with_attempts(mut self, attempts: i64) -> Self {
        self.attempts = Some(attempts);
        self
    }

    /// Why: `failed`, `unknown_urn`, `poison`, or what another SDK wrote.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// What went wrong, in words.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// The type of what went wrong.
    #[must_use]
    pub fn exception(&self) -> Option<&str> {
        self.exception.as_deref()
    }

    /// When the message failed, milliseconds since 1970 by that worker's clock.
    #[must_use]
    pub fn failed_at(&self) -> Option<i64> {
        self.failed_at
    }

    /// The queue that a redrive brings the message back to.
    #[must_use]
    pub fn original_queue(&self) -> Option<&str> {
        self.original_queue.as_deref()
    }

    /// How often the message was tried.
    #[must_use]
    pub fn attempts(&self) -> Option<i64> {
        self.attempts
    }

    /// The language of the SDK that wrote the block.
    #[must_use]
    pub fn lang(&self) -> Option<&str> {
        self.lang.as_deref()
    }

    fn decode(value: &str) -> Result<Option<Self>, DecodeError> {
        let Some(members) = object("/dead_letter", value)? else {
            return Ok(None);
        };
        let mut block = DeadLetterBlock {
            reason: None,
            error: None,
            exception: None,
            failed_at: None,
            original_queue: None,
            attempts: None,
            lang: None,
            extras: Extras::default(),
        };
        let mut extras = Vec::new();
        for member in &members {
            let value = member.value;
            match json::unescape(member.raw_key).as_deref() {
                Some("reason") => block.reason = string("/dead_letter/reason", value)?,
                Some("error") => block.error = string("/dead_letter/error", value)?,
                Some("exception") => block.exception = string("/dead_letter/exception", value)?,
                Some("failed_at") => block.failed_at = integer("/dead_letter/failed_at", value)?,
                Some("original_queue") => {
                    block.original_queue = string("/dead_letter/original_queue", value)?;
                }
                Some("attempts") => block.attempts = integer("/dead_letter/attempts", value)?,
                Some("lang") => block.lang = string("/dead_letter/lang", value)?,
                _ => extras.push(*member),
            }
        }
        block.extras = Extras::new(&extras);
        Ok(Some(block))
    }

    pub(crate) fn write(&self, out: &mut String) {
        let mut members = Members::new(out);
        members.string("reason", self.reason.as_deref());
        members.string_or_null("error", self.error.as_deref());
        members.string_or_null("exception", self.exception.as_deref());
        members.integer("failed_at", self.failed_at);
        members.string_or_null("original_queue", self.original_queue.as_deref());
        members.integer("attempts", self.attempts);
        members.string("lang", self.lang.as_deref());
        members.end(&self.extras);
    }
}

// ===== impl Reason =====

impl Reason {
    /// The reason as it stands in the block: `failed`, `unknown_urn`, `poison`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Reason::Failed => "failed",
            Reason::UnknownUrn => "unknown_urn",
            Reason::Poison => "poison",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

// ===== impl Headers =====

impl Headers {
    /// None.
    #[must_use]
    pub const fn new() -> Self {
        Headers(None)
    }

    /// Adds a header, or puts another value in its place. Names are told apart by their bytes.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.parts()
            .pairs
            .insert(name.into().into(), value.into().into());
        self
    }

    /// Names the queue that the message was received from.
    #[must_use]
    pub fn with_queue(mut self, queue: impl Into<String>) -> Self {
        self.parts().queue = Some(queue.into().into());
        self
    }

    /// The value of a header.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        Some(self.0.as_ref()?.pairs.get(name)?)
    }

    /// All headers, ordered by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .flat_map(|parts| &parts.pairs)
            .map(|(name, value)| (&**name, &**value))
    }

    /// The queue that the message was received from.
    #[must_use]
    pub fn queue(&self) -> Option<&str> {
        self.0.as_ref()?.queue.as_deref()
    }

    fn parts(&mut self) -> &mut HeaderParts {
        Arc::make_mut(self.0.get_or_insert_default())
    }
}

impl<N: Into<String>, V: Into<String>> FromIterator<(N, V)> for Headers {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        pairs
            .into_iter()
            .fold(Headers::new(), |headers, (name, value)| {
                headers.with(name, value)
            })
    }
}

// ===== impl Warning =====

const FORBIDDEN: &str = "the format forbids this key; it was dropped";

impl Warning {
    /// Where: a JSON pointer.
    #[must_use]
    pub const fn pointer(&self) -> &'static str {
        self.pointer
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.pointer, self.mended)
    }
}

// ===== errors =====

/// The body is poison: no consumer can make a message of it.
#[derive(Debug)]
pub struct DecodeError(&'static str, Cause);

#[derive(Debug)]
enum Cause {
    Utf8(Utf8Error),
    Json(serde_json::Error),
    Type {
        expected: &'static str,
        found: String,
    },
    Surrogate,
    Identity,
}

impl DecodeError {
    /// Where: a JSON pointer, empty for the body as a whole.
    #[must_use]
    pub const fn pointer(&self) -> &'static str {
        self.0
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DecodeError(pointer, cause) = self;
        match cause {
            Cause::Utf8(error) => write!(f, "poison body: {error}; expected UTF-8"),
            Cause::Json(error) => write!(f, "poison body: {error}; expected one JSON object"),
            Cause::Type { expected, found } => {
                write!(f, "poison body: {pointer} is {found}; expected {expected}")
            }
            Cause::Surrogate => write!(
                f,
                "poison body: {pointer} has half of a surrogate pair; expected Unicode characters"
            ),
            Cause::Identity => f.write_str(
                "poison body: neither /job nor /urn says what it is; expected a string that is \
                 not blank",
            ),
        }
    }
}

impl Error for DecodeError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.1 {
            Cause::Utf8(error) => Some(error),
            Cause::Json(error) => Some(error),
            _ => None,
        }
    }
}

/// Why a consumer may not handle a message that decodes.
///
/// Trying again mends none of these: such a message goes to the dead-letter queue, byte for byte as
/// it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejected {
    /// `meta.schema_version` is not 1. It gets no `dead_letter` block either: this version cannot
    /// know where that belongs.
    SchemaVersion(Option<i64>),
    /// There is no `data`.
    DataMissing,
    /// `trace_id` is missing or blank.
    TraceIdMissing,
    /// `attempts` is below zero.
    AttemptsNegative(i64),
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rejected::SchemaVersion(Some(version)) => {
                write!(
                    f,
                    "/meta/schema_version is {version}; expected {SCHEMA_VERSION}"
                )
            }
            Rejected::SchemaVersion(None) => {
                write!(
                    f,
                    "/meta/schema_version is missing; expected {SCHEMA_VERSION}"
                )
            }
            Rejected::DataMissing => f.write_str("/data is missing; expected an object"),
            Rejected::TraceIdMissing => {
                f.write_str("/trace_id is missing or blank; expected a string that is not blank")
            }
            Rejected::AttemptsNegative(attempts) => {
                write!(f, "/attempts is {attempts}; expected 0 or more")
            }
        }
    }
}

impl Error for Rejected {}

/// A producer gave what no envelope can hold.
#[derive(Debug)]
pub struct EnvelopeError {
    pointer: String,
    problem: String,
    source: Option<serde_json::Error>,
}

impl EnvelopeError {
    fn new(pointer: impl Into<String>, problem: impl Into<String>) -> Self {
        EnvelopeError {
            pointer: pointer.into(),
            problem: problem.into(),
            source: None,
        }
    }

    /// Where it would have stood: a JSON pointer.
    #[must_use]
    pub fn pointer(&self) -> &str {
        &self.pointer
    }
}

impl fmt::Display for EnvelopeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.pointer, self.problem)
    }
}

impl Error for EnvelopeError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|error| error as _)
    }
}

// ===== reading =====

fn identity(
    job: Option<&str>,
    urn: Option<&str>,
    warn: &mut impl FnMut(&'static str, &'static str),
) -> Result<Box<str>, DecodeError> {
    if let Some(value) = job {
        if !value.starts_with('"') {
            warn("/job", "not a string; it was ignored");
        } else if let Some(job) = string("/job", value)?.filter(|job| !is_blank(job)) {
            if urn.is_some() {
                warn("/urn", "the message has a valid /job; it was dropped");
            }
            return Ok(job);
        }
    }
    urn.filter(|value| value.starts_with('"'))
        .and_then(|value| string("/urn", value).transpose())
        .transpose()?
        .filter(|urn| !is_blank(urn))
        .ok_or(DecodeError("", Cause::Identity))
}

fn string(pointer: &'static str, value: &str) -> Result<Option<Box<str>>, DecodeError> {
    match value.as_bytes() {
        b"null" => Ok(None),
        [b'"', ..] => match json::unescape(value) {
            Some(text) => Ok(Some(text.into())),
            None => Err(DecodeError(pointer, Cause::Surrogate)),
        },
        _ => Err(wrong_type(pointer, value, "a string or null")),
    }
}

/// An integer literal: a fraction or an exponent makes it a number of another type.
fn integer(pointer: &'static str, value: &str) -> Result<Option<i64>, DecodeError> {
    if value == "null" {
        return Ok(None);
    }
    match value.parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(wrong_type(pointer, value, "a 64-bit integer or null")),
    }
}

fn object<'a>(
    pointer: &'static str,
    value: &'a str,
) -> Result<Option<Vec<Member<'a>>>, DecodeError> {
    match value.as_bytes() {
        b"null" => Ok(None),
        [b'{', ..] => json::members(value)
            .map(Some)
            .map_err(|error| DecodeError(pointer, Cause::Json(error))),
        _ => Err(wrong_type(pointer, value, "an object or null")),
    }
}

fn object_of_data(value: &str) -> Result<Option<Arc<str>>, DecodeError> {
    match value.as_bytes() {
        b"null" => Ok(None),
        [b'{', ..] => Ok(Some(value.into())),
        [b'[', inner @ .., b']'] if inner.iter().all(|byte| json::is_space(*byte)) => {
            Ok(Some("{}".into()))
        }
        _ => Err(wrong_type("/data", value, "an object or null")),
    }
}

fn wrong_type(pointer: &'static str, value: &str, expected: &'static str) -> DecodeError {
    const SHOWN: usize = 40;

    let mut found = json::kind(value).to_owned();
    if value.len() <= SHOWN && !value.starts_with(['{', '[']) && value != "null" {
        found = format!("{found} ({value})");
    }
    DecodeError(pointer, Cause::Type { expected, found })
}

fn forbidden_in_meta(key: &str) -> Option<&'static str> {
    match key {
        "max_retries" => Some("/meta/max_retries"),
        "attempts" => Some("/meta/attempts"),
        "source" => Some("/meta/source"),
        "ts" => Some("/meta/ts"),
        _ => None,
    }
}

/// Blank is the format's word: nothing but these six characters, none of Unicode's others.
fn is_blank(text: &str) -> bool {
    text.bytes()
        .all(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\x0b' | b'\x0c' | b'\r'))
}

// ===== writing =====

/// Writes an object, member by member; what is `None` is left out.
struct Members<'a> {
    out: &'a mut String,
    first: bool,
}

impl<'a> Members<'a> {
    fn new(out: &'a mut String) -> Self {
        out.push('{');
        Members { out, first: true }
    }

    fn key(&mut self, key: &str) {
        if !std::mem::take(&mut self.first) {
            self.out.push(',');
        }
        self.out.push('"');
        self.out.push_str(key);
        self.out.push_str("\":");
    }

    fn string(&mut self, key: &str, value: Option<&str>) {
        if let Some(value) = value {
            self.key(key);
            json::write_str(self.out, value);
        }
    }

    fn string_or_null(&mut self, key: &str, value: Option<&str>) {
        if value.is_some() {
            self.string(key, value);
        } else {
            self.key(key);
            self.out.push_str("null");
        }
    }

    fn integer(&mut self, key: &str, value: Option<i64>) {
        if let Some(value) = value {
            self.key(key);
            self.out.push_str(&value.to_string());
        }
    }

    fn end(self, extras: &Extras) {
        extras.write(self.out, self.first);
        self.out.push('}');
    }
}

fn extra<T: Serialize + ?Sized>(
    parent: &str,
    key: &str,
    value: &T,
    core: &[&str],
    is_forbidden: impl Fn(&str) -> bool,
) -> Result<Box<str>, EnvelopeError> {
    let pointer = format!("{parent}{}", key.replace('~', "~0").replace('/', "~1"));
    if core.contains(&key) {
        return Err(EnvelopeError::new(
            pointer,
            "is a key of the format; expected one of your own",
        ));
    }
    if is_forbidden(key) {
        return Err(EnvelopeError::new(
            pointer,
            "is forbidden; expected another key",
        ));
    }
    to_json(&pointer, value).map(Into::into)
}

fn to_json<T: Serialize + ?Sized>(pointer: &str, value: &T) -> Result<String, EnvelopeError> {
    serde_json::to_string(value).map_err(|source| EnvelopeError {
        pointer: pointer.into(),
        problem: format!("is no JSON: {source}"),
        source: Some(source),
    })
}

fn now_millis() -> i64 {
    let since = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
