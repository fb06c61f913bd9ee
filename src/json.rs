//! JSON text that is carried, not parsed.
//!
//! Everything works on text, so that no digit, no escape and no unknown value is touched. The
//! syntax is `serde_json`'s to judge; nothing here recurses, whatever the nesting.

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::{borrow::Cow, collections::HashSet, fmt};

/// One member of an object, as it stands in the text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member<'a> {
    /// With its quotes and escapes.
    pub(crate) raw_key: &'a str,
    pub(crate) value: &'a str,
}

/// The members of the object that `text` is, in their order, repeated keys and all.
///
/// # Errors
///
/// `text` is not exactly one JSON object.
pub(crate) fn members(text: &str) -> serde_json::Result<Vec<Member<'_>>> {
    struct Object;

    impl<'de> Visitor<'de> for Object {
        type Value = Vec<Member<'de>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some((key, value)) = map.next_entry::<&RawValue, &RawValue>()? {
                members.push(Member {
                    raw_key: key.get(),
                    value: value.get(),
                });
            }
            Ok(members)
        }
    }

    let mut json = serde_json::Deserializer::from_str(text);
    let members = json.deserialize_map(Object)?;
    json.end()?;
    Ok(members)
}

/// Whether every string in a JSON text, keys too, is Unicode: no escape is half of a surrogate
/// pair.
pub(crate) fn is_unicode(json: &str) -> bool {
    let mut rest = json;
    while let Some(at) = rest.find('"') {
        let string = &rest[at..];
        let len = string_len(string);
        if unescape(&string[..len]).is_none() {
            return false;
        }
        rest = &string[len..];
    }
    true
}

/// How long the string is that a JSON text begins with, quotes and all.
fn string_len(json: &str) -> usize {
    let mut escaped = false;
    let end = json.bytes().skip(1).position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(json.len(), |end| end + 2)
}

/// The characters of a JSON string, which `raw` is; `None` when it holds half of a surrogate pair,
/// which no `str` can.
pub(crate) fn unescape(raw: &str) -> Option<Cow<'_, str>> {
    if raw.contains('\\') {
        return serde_json::from_str(raw).ok().map(Cow::Owned);
    }
    raw.strip_prefix('"')?.strip_suffix('"').map(Cow::Borrowed)
}

/// What kind of value a JSON text is, in words.
pub(crate) fn kind(value: &str) -> &'static str {
    match value.bytes().find(|byte| !is_space(*byte)) {
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    }
}

/// White space between JSON tokens.
pub(crate) const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// Appends a JSON text without the white space between its tokens.
pub(crate) fn write_compact(out: &mut String, json: &str) {
    let (mut in_string, mut escaped) = (false, false);
    let mut copied = 0;
    for (at, byte) in json.bytes().enumerate() {
        if in_string {
            in_string = byte != b'"' || escaped;
            escaped = byte == b'\\' && !escaped;
        } else if byte == b'"' {
            in_string = true;
        } else if is_space(byte) {
            out.push_str(&json[copied..at]);
            copied = at + 1;
        }
    }
    out.push_str(&json[copied..]);
}

/// Appends a string as JSON: `/`, `<` and what is not ASCII stay as they are.
pub(crate) fn write_str(out: &mut String, text: &str) {
    let json = serde_json::to_string(text).expect("a string is JSON");
    out.push_str(&json);
}

/// Members that nobody here knows, kept as they came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extras(Vec<Extra>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Extra {
    raw_key: Box<str>,
    value: Box<str>,
}

impl Extras {
    /// Of a repeated key the last one is kept.
    pub(crate) fn new(members: &[Member<'_>]) -> Self {
        let mut known = HashSet::new();
        let mut extras: Vec<_> = members
            .iter()
            .rev()
            .filter(|member| members.len() == 1 || known.insert(Key::of(member.raw_key)))
            .map(|member| Extra {
                raw_key: member.raw_key.into(),
                value: member.value.into(),
            })
            .collect();
        extras.reverse();
        Extras(extras)
    }

    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        let found = self
            .0
            .iter()
            .find(|extra| Key::of(&extra.raw_key) == Key::Text(key.into()))?;
        Some(&found.value)
    }

    /// Puts a value in the place of one with the same key, or at the end.
    pub(crate) fn insert(&mut self, key: &str, value: Box<str>) {
        let same = |extra: &&mut Extra| Key::of(&extra.raw_key) == Key::Text(key.into());
        if let Some(extra) = self.0.iter_mut().find(same) {
            extra.value = value;
        } else {
            let mut raw_key = String::new();
            write_str(&mut raw_key, key);
            self.0.push(Extra {
                raw_key: raw_key.into(),
                value,
            });
        }
    }

    /// Appends the members; `first` of their object or not.
    pub(crate) fn write(&self, out: &mut String, mut first: bool) {
        for extra in &self.0 {
            if !std::mem::take(&mut first) {
                out.push(',');
            }
            out.push_str(&extra.raw_key);
            out.push(':');
            write_compact(out, &extra.value);
        }
    }
}

/// What makes two keys the same: the characters, or, where those are not Unicode, the spelling.
#[derive(PartialEq, Eq, Hash)]
enum Key<'a> {
    Text(Cow<'a, str>),
    Raw(&'a str),
}

impl<'a> Key<'a> {
    fn of(raw: &'a str) -> Self {
        unescape(raw).map_or(Key::Raw(raw), Key::Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_goes_only_between_tokens() {
        let mut out = String::new();
        write_compact(
            &mut out,
            "{ \"a b\" :\t[1 ,\n\"c\\\" d\\\\\" , \"\\\\\"]\r\n}",
        );
        assert_eq!(out, r#"{"a b":[1,"c\" d\\","\\"]}"#);
    }

    #[test]
    fn repeated_keys_are_all_listed() {
        let found = members(r#" {"a": 1, "\u0061":[ 2 ], "b":{"a":3}} "#).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|member| (member.raw_key, member.value))
            .collect();
        assert_eq!(
            found,
            [
                ("\"a\"", "1"),
                (r#""\u0061""#, "[ 2 ]"),
                ("\"b\"", r#"{"a":3}"#)
            ]
        );
    }

    #[test]
    fn only_one_object_is_one() {
        for text in [
            "",
            "null",
            "[]",
            "1",
            "{} {}",
            "{}x",
            "{\"a\":NaN}",
            "\u{feff}{}",
            "{a:1}",
            "{'a':1}",
        ] {
            assert!(members(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn of_a_repeated_unknown_key_the_last_is_kept() {
        let text = r#"{"a":1,"b":2,"\u0061":3,"\ud800":4,"\ud800":5}"#;
        let mut out = String::new();
        Extras::new(&members(text).unwrap()).write(&mut out, true);
        assert_eq!(out, r#""b":2,"\u0061":3,"\ud800":5"#);
    }

    #[test]
    fn kinds_have_their_words() {
        let values = ["{}", "[]", r#""""#, "true", "false", "null", "-1", "0"];
        let kinds = [
            "an object",
            "an array",
            "a string",
            "a boolean",
            "a boolean",
            "null",
            "a number",
            "a number",
        ];
        assert_eq!(values.map(kind), kinds);
    }

    #[test]
    fn half_a_surrogate_pair_is_no_text() {
        assert_eq!(unescape(r#""\ud83e\udd80""#).as_deref(), Some("🦀"));
        assert_eq!(unescape(r#""\ud83e""#), None);
        assert_eq!(unescape(r#""\udd80\ud83e""#), None);
    }
}
