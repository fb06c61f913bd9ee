//! What holds for every sequence of bytes. The property tests and the fuzz target share it.

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::de::IgnoredAny;
use serde_json::{Map, Value, value::RawValue};
use std::{collections::HashMap, str};
use tower_idempotency::{
    Envelope,
    dead_letter::poison,
    envelope::{DeadLetterBlock, Reason},
};

/// Every pointer that a decode error may name.
const POINTERS: [&str; 20] = [
    "",
    "/job",
    "/urn",
    "/trace_id",
    "/data",
    "/meta",
    "/meta/id",
    "/meta/queue",
    "/meta/lang",
    "/meta/schema_version",
    "/meta/created_at",
    "/attempts",
    "/dead_letter",
    "/dead_letter/reason",
    "/dead_letter/error",
    "/dead_letter/exception",
    "/dead_letter/failed_at",
    "/dead_letter/original_queue",
    "/dead_letter/attempts",
    "/dead_letter/lang",
];

/// Checks everything. Says whether the body decodes.
pub(crate) fn check(body: &[u8]) -> bool {
    record(body);
    match Envelope::decode(body) {
        Ok(envelope) => {
            decoded(&envelope);
            true
        }
        Err(error) => {
            let pointer = error.pointer();
            assert!(POINTERS.contains(&pointer), "{pointer}");
            assert!(error.to_string().starts_with("poison body: "), "{error}");
            false
        }
    }
}

/// What holds for every envelope that was decoded.
fn decoded(envelope: &Envelope) {
    assert!(!envelope.urn().is_empty());
    assert!(!format!("{envelope:?}").is_empty());
    let text = envelope.encode();
    assert!(text.bytes().all(|byte| byte >= b' '), "{text:?}");
    strict(&text);

    let again = Envelope::decode(text.as_bytes()).expect("what we write can be read");
    assert_eq!(again.encode(), text);
    assert_eq!(again.warnings(), []);
    assert_eq!(again.urn(), envelope.urn());
    assert_eq!(again.meta().id(), envelope.meta().id());
    assert_eq!(again.trace_id(), envelope.trace_id());
    assert_eq!(again.attempts(), envelope.attempts());
    assert_eq!(again.accepts(), envelope.accepts());
    assert_eq!(again.meta().queue(), envelope.meta().queue());
    assert_eq!(again.meta().lang(), envelope.meta().lang());
    assert_eq!(
        again.meta().schema_version(),
        envelope.meta().schema_version()
    );
    assert_eq!(again.meta().created_at(), envelope.meta().created_at());
    assert_eq!(again.raw_data().is_some(), envelope.raw_data().is_some());

    // Any data can be skipped; what a value cannot hold is an error.
    envelope.data::<IgnoredAny>().expect("the data is JSON");
    if let Ok(data) = envelope.data::<Value>() {
        assert_eq!(data.is_object(), envelope.raw_data().is_some());
        assert_eq!(again.data::<Value>().expect("as before"), data);
    }

    let dead = envelope
        .clone()
        .with_dead_letter(DeadLetterBlock::new(Reason::Failed).with_error("it\nfailed"));
    let dead = Envelope::decode(dead.encode().as_bytes()).expect("an annotated one can be read");
    let block = dead.dead_letter().expect("it was annotated");
    assert_eq!(block.attempts(), Some(envelope.attempts()));
    assert_eq!(dead.redriven().encode(), again.redriven().encode());
}

/// What holds for the record of any body: it is one strict JSON object from which the body can be
/// had again.
fn record(body: &[u8]) {
    let block = DeadLetterBlock::new(Reason::Poison).with_error("un\"known\n");
    let alone = poison(b"{}", &block);
    let end = &alone[1..];
    let record = poison(body, &block);
    strict(&record);
    let members: HashMap<String, &RawValue> = serde_json::from_str(&record).expect("an object");
    assert_eq!(members["dead_letter"].get(), &end[14..end.len() - 1]);
    let head = record.strip_suffix(end).expect("the block comes last");

    if is_spliced(head, body) {
        let keys: HashMap<String, &RawValue> =
            serde_json::from_slice(body).expect("an object is spliced");
        assert!(!keys.contains_key("dead_letter"));
        return;
    }
    assert_eq!(
        members.len(),
        2 + usize::from(members.contains_key("raw_encoding"))
    );
    let raw: String = serde_json::from_str(members["raw"].get()).expect("a string");
    if members.contains_key("raw_encoding") {
        assert_eq!(members["raw_encoding"].get(), "\"base64\"");
        assert!(str::from_utf8(body).is_err());
        assert_eq!(BASE64_STANDARD.decode(raw).expect("base64"), body);
    } else {
        assert_eq!(raw.as_bytes(), body);
        if let Ok(object) = serde_json::from_slice::<Map<String, Value>>(body) {
            assert!(object.contains_key("dead_letter"), "why was it wrapped?");
        }
    }
}

/// Whether what stands before the block is the body, but for its last brace and the white space
/// around it.
fn is_spliced(head: &str, body: &[u8]) -> bool {
    let Some(object) = str::from_utf8(body)
        .ok()
        .and_then(|text| text.trim_matches([' ', '\t', '\n', '\r']).strip_suffix('}'))
    else {
        return false;
    };
    match head.strip_suffix(',') {
        Some(head) => head == object,
        None => object.trim_end_matches([' ', '\t', '\n', '\r']) == head,
    }
}

fn strict(json: &str) {
    serde_json::from_str::<IgnoredAny>(json).unwrap_or_else(|error| panic!("{error}: {json:?}"));
}
