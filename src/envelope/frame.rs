//! Headers for brokers whose messages have none.

use super::{Envelope, Headers};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// What every frame has, and hardly any bare body.
const MARK: &[u8] = br#""__bq_frame""#;

/// What BabelQueue's SDKs store on a Redis list for a message: the envelope as it is, or, where it
/// has headers, a frame around both, `{"__bq_frame":1,"headers":{…},"body":"<envelope>"}`.
///
/// A header without a name or a value is left out, as it is there.
///
/// ```
/// use tower_idempotency::{Envelope, envelope::{frame, unframe}};
///
/// let message = Envelope::new("urn:shop:order", &serde_json::json!({"order_id": 1042}))?;
/// assert_eq!(frame(&message), message.encode().as_bytes());
/// let stored = frame(&message.clone().with_replay_bypass());
/// let (body, headers) = unframe(&stored).expect("it has a header");
/// assert_eq!(body, message.encode());
/// assert!(Envelope::decode(body.as_bytes())?.with_headers(headers).is_replay());
/// # Ok::<_, tower_idempotency::BoxError>(())
/// ```
#[must_use]
pub fn frame(message: &Envelope) -> Vec<u8> {
    let body = message.encode();
    let headers: BTreeMap<&str, &str> = message
        .headers()
        .iter()
        .filter(|(name, value)| !name.is_empty() && !value.is_empty())
        .collect();
    if headers.is_empty() {
        return body.into_bytes();
    }
    let written = (
        serde_json::to_string(&headers).expect("texts can be written"),
        serde_json::to_string(&body).expect("a text can be written"),
    );
    format!(
        r#"{{"__bq_frame":1,"headers":{},"body":{}}}"#,
        written.0, written.1
    )
    .into_bytes()
}

/// The body and the headers, if what is stored is a [`frame`]; `None` for a bare envelope, and for
/// whatever else is no frame.
///
/// The body is not looked into. Of the headers, those that are texts are taken.
#[must_use]
pub fn unframe(stored: &[u8]) -> Option<(String, Headers)> {
    if !stored.starts_with(b"{") || !stored.windows(MARK.len()).any(|part| part == MARK) {
        return None;
    }
    let mut frame: Map<String, Value> = serde_json::from_slice(stored).ok()?;
    let version = frame.get("__bq_frame").and_then(Value::as_i64);
    version.filter(|version| *version != 0)?;
    let Value::String(body) = frame.remove("body")? else {
        return None;
    };
    let headers = frame.get("headers").and_then(Value::as_object);
    let headers = headers
        .into_iter()
        .flatten()
        .filter_map(|(name, value)| Some((name.as_str(), value.as_str()?)))
        .filter(|(name, value)| !name.is_empty() && !value.is_empty())
        .collect();
    Some((body, headers))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &str = r#"{"job":"urn:x","trace_id":"t","data":{},"meta":{"id":"a","schema_version":1},"attempts":0}"#;

    #[test]
    fn a_frame_has_what_it_was_made_of() {
        let message = Envelope::decode(BODY.as_bytes()).unwrap();
        assert_eq!(frame(&message), message.encode().as_bytes());
        let headers = Headers::new()
            .with("traceparent", "00-\"ü\\")
            .with("", "x")
            .with("empty", "");
        let stored = frame(&message.clone().with_headers(headers));
        assert!(stored.starts_with(br#"{"__bq_frame":1,"headers":{"traceparent":""#));
        let (body, headers) = unframe(&stored).unwrap();
        assert_eq!(body, message.encode());
        let headers: Vec<_> = headers.iter().collect();
        assert_eq!(headers, [("traceparent", "00-\"ü\\")]);
    }

    #[test]
    fn what_is_no_frame_is_none() {
        for stored in [
            "",
            "nonsense",
            BODY,
            // The mark is in the data.
            r#"{"job":"urn:x","data":{"__bq_frame":1,"body":"b"}}"#,
            r#"{"__bq_frame":0,"headers":{},"body":"b"}"#,
            r#"{"__bq_frame":"1","headers":{},"body":"b"}"#,
            r#"{"__bq_frame":1,"headers":{}}"#,
            r#"{"__bq_frame":1,"headers":{},"body":{}}"#,
            r#"["__bq_frame"]"#,
            r#"{"__bq_frame":1,"headers":{},"body":"b""#,
        ] {
            assert!(unframe(stored.as_bytes()).is_none(), "{stored}");
        }
        assert!(unframe(b"{\"__bq_frame\":1,\"body\":\"\xff\"}").is_none());
        let odd = r#"{"__bq_frame":2,"headers":{"a":1,"b":"c","d":""},"body":""}"#;
        let (body, headers) = unframe(odd.as_bytes()).unwrap();
        assert_eq!(body, "");
        assert_eq!(headers.iter().collect::<Vec<_>>(), [("b", "c")]);
    }
}
