//! What names a message, and how a request says it.
//!
//! A request that is not an [`Envelope`] names itself by a closure:
//!
//! ```
//! use tower_idempotency::{ExtractId, MessageId};
//!
//! struct Job { key: String }
//!
//! let by_key = |job: &Job| Some(MessageId::from(job.key.as_str()));
//! let id = by_key.extract_id(&Job { key: "invoice-7".into() });
//! assert_eq!(id.as_deref(), Some("invoice-7"));
//! ```

use crate::envelope::Envelope;
use std::{
    borrow::{Borrow, Cow},
    fmt,
    hash::{Hash, Hasher},
    ops::Deref,
    str,
    sync::Arc,
};
use uuid::Uuid;

/// The length of a hyphenated UUID: what is kept without the heap.
const INLINE: usize = 36;

/// The name of a message: same bytes, same message; different bytes, different messages.
///
/// Taken verbatim: neither case nor blanks are folded. Up to 36 bytes it lives without the heap, above
/// that it is shared, so a clone never copies a long id. It derefs to `str`.
///
/// It knows from the start whether it is a canonical UUID (lower-case, hyphenated, 36
/// characters), which [`MemoryStore`](crate::MemoryStore) keeps in 16 bytes.
#[derive(Clone)]
pub struct MessageId(Repr);

#[derive(Clone)]
enum Repr {
    /// The text beside its value, so that neither is ever made again.
    Uuid {
        text: [u8; INLINE],
        value: [u8; 16],
    },
    /// The first `len` bytes count.
    Short {
        text: [u8; INLINE],
        len: u8,
    },
    Long(Arc<str>),
}

// ===== impl MessageId =====

impl MessageId {
    /// A fresh version 4 UUID.
    ///
    /// # Panics
    ///
    /// When the operating system gives no random bytes.
    #[must_use]
    pub fn random() -> Self {
        let uuid = Uuid::new_v4();
        let mut text = [0; INLINE];
        uuid.hyphenated().encode_lower(&mut text);
        MessageId(Repr::Uuid {
            text,
            value: uuid.into_bytes(),
        })
    }

    /// The id as it was given.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match &self.0 {
            Repr::Uuid { text, .. } => utf8(text),
            Repr::Short { text, len } => utf8(&text[..usize::from(*len)]),
            Repr::Long(text) => text,
        }
    }

    /// Whether it is empty: no usable id. Asked of each message, it looks at no byte.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        match &self.0 {
            Repr::Uuid { .. } => false,
            Repr::Short { len, .. } => *len == 0,
            Repr::Long(text) => text.is_empty(),
        }
    }

    /// The value of an id that is a canonical UUID: lower-case, hyphenated, 36 characters.
    ///
    /// Two ids have the same value only if they are the same bytes.
    #[must_use]
    pub fn as_uuid(&self) -> Option<u128> {
        match &self.0 {
            Repr::Uuid { value, .. } => Some(u128::from_be_bytes(*value)),
            _ => None,
        }
    }
}

/// The bytes came out of a `str`, whole.
fn utf8(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).expect("an id is made from a str")
}

/// The value of a canonical UUID. Any other spelling of one is another id, so it is none here.
///
/// By hand and without branches, as it is paid for each delivery: the `uuid` crate's parser, which
/// takes every spelling there is, takes three times as long. Inlined, the loops would not become
/// vector instructions, which costs as much again.
#[inline(never)]
fn canonical_uuid(text: &[u8; INLINE]) -> Option<[u8; 16]> {
    let mut digits = [0; 32];
    digits[..8].copy_from_slice(&text[..8]);
    digits[8..12].copy_from_slice(&text[9..13]);
    digits[12..16].copy_from_slice(&text[14..18]);
    digits[16..20].copy_from_slice(&text[19..23]);
    digits[20..].copy_from_slice(&text[24..]);
    let mut invalid = (text[8] | text[13] | text[18] | text[23]) ^ b'-';
    invalid |= (text[8] & text[13] & text[18] & text[23]) ^ b'-';
    for digit in &mut digits {
        let decimal = digit.wrapping_sub(b'0');
        let letter = digit.wrapping_sub(b'a');
        invalid |= u8::from(decimal > 9 && letter > 5);
        *digit = if decimal > 9 {
            letter.wrapping_add(10)
        } else {
            decimal
        };
    }
    let mut value = [0; 16];
    for (byte, pair) in value.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    (invalid == 0).then_some(value)
}

impl From<&str> for MessageId {
    fn from(id: &str) -> Self {
        let bytes = id.as_bytes();
        if let Ok(text) = <&[u8; INLINE]>::try_from(bytes) {
            return MessageId(match canonical_uuid(text) {
                Some(value) => Repr::Uuid { text: *text, value },
                None => Repr::Short {
                    text: *text,
                    len: INLINE as u8,
                },
            });
        }
        if bytes.len() < INLINE {
            let mut text = [0; INLINE];
            text[..bytes.len()].copy_from_slice(bytes);
            return MessageId(Repr::Short {
                text,
                len: bytes.len() as u8,
            });
        }
        MessageId(Repr::Long(id.into()))
    }
}

impl From<String> for MessageId {
    fn from(id: String) -> Self {
        id.as_str().into()
    }
}

impl From<&String> for MessageId {
    fn from(id: &String) -> Self {
        id.as_str().into()
    }
}

impl From<Cow<'_, str>> for MessageId {
    fn from(id: Cow<'_, str>) -> Self {
        id.as_ref().into()
    }
}

impl From<Arc<str>> for MessageId {
    fn from(id: Arc<str>) -> Self {
        if id.len() > INLINE {
            MessageId(Repr::Long(id))
        } else {
            id.as_ref().into()
        }
    }
}

impl Deref for MessageId {
    type Target = str;

    fn deref(&self) -> &str {
        self.as_str()
    }
}

impl AsRef<str> for MessageId {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl Borrow<str> for MessageId {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl PartialEq for MessageId {
    fn eq(&self, other: &Self) -> bool {
        match (self.as_uuid(), other.as_uuid()) {
            (Some(one), Some(other)) => one == other,
            (None, None) => self.as_str() == other.as_str(),
            _ => false,
        }
    }
}

impl Eq for MessageId {}

impl PartialEq<str> for MessageId {
    fn eq(&self, other: &str) -> bool {
        self.as_str() == other
    }
}

impl PartialEq<&str> for MessageId {
    fn eq(&self, other: &&str) -> bool {
        self.as_str() == *other
    }
}

impl PartialOrd for MessageId {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for MessageId {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl Hash for MessageId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self)
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// Says how a request names itself.
///
/// Closures `Fn(&Req) -> Option<impl Into<MessageId>>` are extractors; [`MetaId`] is the one for
/// an [`Envelope`]. `None`, and likewise an empty id, is no usable id: the layer then runs the
/// handler unprotected and reports it.
///
/// What identifies a message is what its producer named it by. A trace id, a delivery count or a
/// hash of the body names something else.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say how a `{Req}` names itself",
    label = "no id of `{Req}`",
    note = "for requests that are no `Envelope`: `.id_from(|request: &{Req}| Some(request.id.clone()))`"
)]
pub trait ExtractId<Req: ?Sized> {
    /// The id of this request, or `None` when it has no usable one.
    fn extract_id(&self, request: &Req) -> Option<MessageId>;

    /// When the message was made, in milliseconds since the Unix epoch, where it says so: then an
    /// [`Event`](crate::event::Event) can tell the age of a duplicate. It decides nothing.
    fn created_at(&self, _request: &Req) -> Option<i64> {
        None
    }
}

impl<F, Req: ?Sized, I> ExtractId<Req> for F
where
    F: Fn(&Req) -> Option<I>,
    I: Into<MessageId>,
{
    fn extract_id(&self, request: &Req) -> Option<MessageId> {
        self(request).map(Into::into)
    }
}

/// Names an [`Envelope`] by its `meta.id`, verbatim, and dates it by its `meta.created_at`.
#[derive(Clone, Copy, Debug, Default)]
pub struct MetaId;

impl ExtractId<Envelope> for MetaId {
    fn extract_id(&self, envelope: &Envelope) -> Option<MessageId> {
        envelope.id().cloned()
    }

    fn created_at(&self, envelope: &Envelope) -> Option<i64> {
        envelope.meta().created_at()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "f1e2d3c4-b5a6-4789-90ab-cdef01234567";

    #[test]
    fn canonical_uuids_are_known_by_value() {
        let id = MessageId::from(UUID);
        assert_eq!(id.as_uuid(), Some(0xf1e2d3c4_b5a6_4789_90ab_cdef01234567));
        assert_eq!(id.as_str(), UUID);
    }

    #[test]
    fn other_spellings_of_a_uuid_are_other_ids() {
        let spellings = [
            UUID.to_uppercase(),
            UUID.replace('-', ""),
            UUID.replace('f', "F"),
            format!("{{{UUID}}}"),
            format!("urn:uuid:{UUID}"),
            format!("{UUID} "),
            UUID.replace("-4789", "4-789"),
            "f1e2d3c4_b5a6_4789_90ab_cdef01234567".into(),
            "f1e2d3c4-b5a6-4789-90ab-cdef0123456g".into(),
            "------------------------------------".into(),
        ];
        for spelling in spellings {
            let id = MessageId::from(spelling.as_str());
            assert_eq!(id.as_uuid(), None, "{spelling}");
            assert_eq!(id.as_str(), spelling);
            assert_ne!(id, MessageId::from(UUID));
        }
    }

    #[test]
    fn every_length_is_kept_verbatim() {
        for len in [0, 1, 35, 36, 37, 255, 256, 1024, 65_536] {
            let text = "x".repeat(len);
            let id = MessageId::from(text.as_str());
            assert_eq!(&*id, text);
            assert_eq!(id.clone(), id);
        }
        for text in ["a\0b", " ", "\r\n", "é", "e\u{301}", "🦀🦀🦀🦀🦀🦀🦀🦀🦀"]
        {
            assert_eq!(&*MessageId::from(text), text);
        }
    }

    #[test]
    fn long_ids_are_shared_by_clones() {
        let id = MessageId::from("x".repeat(37));
        assert_eq!(id.as_ptr(), id.clone().as_ptr());
    }

    #[test]
    fn random_ids_are_canonical_version_4() {
        let id = MessageId::random();
        assert_eq!(MessageId::from(id.as_str()).as_uuid(), id.as_uuid());
        assert_eq!(&id[14..15], "4");
        assert!(matches!(&id[19..20], "8" | "9" | "a" | "b"));
        assert_ne!(id, MessageId::random());
    }

    #[test]
    fn an_id_is_found_by_its_str() {
        let set = std::collections::HashSet::from([MessageId::from(UUID)]);
        assert!(set.contains(UUID));
    }

    #[test]
    fn closures_answer_anything_that_becomes_an_id() {
        fn id<X: ExtractId<String>>(extract: X) -> Option<MessageId> {
            extract.extract_id(&"a".to_owned())
        }
        assert_eq!(id(|text: &String| Some(text.clone())).as_deref(), Some("a"));
        assert_eq!(
            id(|text: &String| Some(MessageId::from(text))).as_deref(),
            Some("a")
        );
        assert_eq!(id(|_: &String| Some("b")).as_deref(), Some("b"));
        assert_eq!(id(|_: &String| None::<String>), None);
    }

    #[test]
    fn an_id_is_small() {
        assert!(size_of::<MessageId>() <= 56);
    }
}
