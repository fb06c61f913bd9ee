//! The envelope and the poison record, through the public API.

#[path = "envelope/invariants.rs"]
mod invariants;

use proptest::{
    collection::vec, prelude::*, sample::select, strategy::ValueTree, test_runner::TestRunner,
};
use serde::{Serialize, Serializer, de::IgnoredAny, ser::Error as _};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, error::Error as _};
use tower_idempotency::{
    Envelope, MessageId,
    dead_letter::poison,
    envelope::{DeadLetterBlock, DecodeError, EnvelopeError, Headers, Reason, Rejected},
};

const VALID: &str = r#"{"job":"urn:a","trace_id":"t","data":{"n":1},"meta":{"id":"m","queue":"q","lang":"php","schema_version":1,"created_at":5},"attempts":2}"#;

const STRINGS: [&str; 9] = [
    "/trace_id",
    "/meta/id",
    "/meta/queue",
    "/meta/lang",
    "/dead_letter/reason",
    "/dead_letter/error",
    "/dead_letter/exception",
    "/dead_letter/original_queue",
    "/dead_letter/lang",
];
const INTEGERS: [&str; 5] = [
    "/attempts",
    "/meta/schema_version",
    "/meta/created_at",
    "/dead_letter/failed_at",
    "/dead_letter/attempts",
];
const OBJECTS: [&str; 3] = ["/data", "/meta", "/dead_letter"];

#[track_caller]
fn decode(body: &str) -> Envelope {
    assert!(invariants::check(body.as_bytes()), "{body}");
    Envelope::decode(body.as_bytes()).unwrap()
}

#[track_caller]
fn refused(body: impl AsRef<[u8]>) -> DecodeError {
    let body = body.as_ref();
    assert!(!invariants::check(body), "{}", body.escape_ascii());
    Envelope::decode(body).unwrap_err()
}

/// A body with these members and a job.
fn with(members: &str) -> String {
    format!(r#"{{"job":"urn:a",{members}}}"#)
}

/// A body with one value where the pointer says.
fn at(pointer: &str, value: &str) -> String {
    match pointer[1..].split_once('/') {
        Some((parent, key)) => with(&format!(r#""{parent}":{{"{key}":{value}}}"#)),
        None => with(&format!(r#""{}":{value}"#, &pointer[1..])),
    }
}

fn warnings(envelope: &Envelope) -> Vec<&'static str> {
    envelope.warnings().iter().map(|w| w.pointer()).collect()
}

fn nested(depth: usize) -> String {
    "[".repeat(depth) + &"]".repeat(depth)
}

// ===== what is poison =====

#[test]
fn only_one_json_object_is_a_body() {
    let bodies = [
        "",
        " ",
        "\n\t\r ",
        "null",
        "[]",
        "[{}]",
        "1",
        "\"{}\"",
        "true",
        "{",
        "}",
        "{\"job\":\"urn:a\"",
        "{\"job\":\"urn:a\"}}",
        "{\"job\":\"urn:a\"}{}",
        "{\"job\":\"urn:a\"} x",
        "{\"job\":\"urn:a\"}\0",
        "\u{feff}{\"job\":\"urn:a\"}",
        "{\"job\":\"urn:a\",}",
        "{\"job\" \"urn:a\"}",
        "{'job':'urn:a'}",
        "{job:\"urn:a\"}",
        "{\"job\":\"urn:a\",1:2}",
        "{\"job\":\"urn:a\"/**/}",
        "{\"job\":\"urn:\na\"}",
        "{\"job\":\"urn:\u{1f}a\"}",
        "{\"job\":\"urn:\\a\"}",
        "{\"job\":\"urn:\\u00g0\"}",
        "{\u{a0}\"job\":\"urn:a\"}",
    ];
    for body in bodies {
        let error = refused(body);
        assert_eq!(error.pointer(), "", "{body:?}");
        assert!(
            error.to_string().ends_with("expected one JSON object"),
            "{error}"
        );
        assert!(error.source().is_some());
    }
}

#[test]
fn what_is_no_json_is_poison_in_every_place() {
    let values = [
        "NaN",
        "Infinity",
        "-Infinity",
        "nan",
        "01",
        "-",
        "-01",
        "1.",
        ".5",
        "+1",
        "1e",
        "1e+",
        "0x1",
        "1_000",
        "True",
        "nul",
        "undefined",
        "'x'",
        "\"\t\"",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\\ud80\"",
        "[1,]",
        "[,]",
        "{\"a\"}",
        "{\"a\":}",
        "{,}",
        "{1:1}",
        "[",
        "]",
    ];
    for value in values {
        for members in [
            format!(r#""data":{{"x":{value}}}"#),
            format!(r#""unknown":{value}"#),
            format!(r#""meta":{{"ext":{value}}}"#),
            format!(r#""dead_letter":{{"ext":[{value}]}}"#),
            format!(r#""timestamp":{value}"#),
            format!(r#""attempts":{value}"#),
        ] {
            assert_eq!(refused(with(&members)).pointer(), "", "{members}");
        }
    }
}

#[test]
fn invalid_utf8_is_poison_also_inside_strings() {
    let sequences: [&[u8]; 8] = [
        b"\xff",
        b"\x80",
        b"\xc3",
        b"\xc0\xaf",         // overlong
        b"\xed\xa0\x80",     // a surrogate
        b"\xf4\x90\x80\x80", // past the last character
        b"\xe2\x82",
        b"\xf0\x9f\xa6",
    ];
    for sequence in sequences {
        for place in [
            r#"{"job":"urn:@"}"#,
            r#"{"job":"urn:a","data":{"x":"@"}}"#,
            r#"{"job":"urn:a","@":1}"#,
            r#"{"job":"urn:a"}@"#,
            r#"@{"job":"urn:a"}"#,
        ] {
            let (before, after) = place.split_once('@').unwrap();
            let body = [before.as_bytes(), sequence, after.as_bytes()].concat();
            let error = refused(&body);
            assert_eq!(error.pointer(), "");
            assert!(error.to_string().ends_with("expected UTF-8"), "{error}");
            let record: Value =
                serde_json::from_str(&poison(&body, &DeadLetterBlock::new(Reason::Poison)))
                    .unwrap();
            assert_eq!(record["raw_encoding"], "base64");
        }
    }
}

#[test]
fn a_known_key_of_another_type_is_poison_that_names_it() {
    let wrong_strings = ["1", "1.5", "true", "false", "[]", "{}", "[\"x\"]"];
    let wrong_integers = [
        "\"1\"",
        "true",
        "false",
        "[]",
        "{}",
        "1.0",
        "1e0",
        "1E2",
        "-0.0",
        "0e0",
        "9223372036854775808",
        "-9223372036854775809",
        "1e400",
        "123456789012345678901234567890",
    ];
    let wrong_objects = [
        "1", "\"\"", "\"{}\"", "true", "[1]", "[[]]", "[{}]", "[ 0 ]",
    ];
    let table = STRINGS
        .iter()
        .flat_map(|pointer| wrong_strings.map(|value| (*pointer, value)))
        .chain(
            INTEGERS
                .iter()
                .flat_map(|pointer| wrong_integers.map(|value| (*pointer, value))),
        )
        .chain(
            OBJECTS
                .iter()
                .flat_map(|pointer| wrong_objects.map(|value| (*pointer, value))),
        )
        .chain([("/meta", "[]"), ("/dead_letter", "[]"), ("/meta", "[ ]")]);
    for (pointer, value) in table {
        let error = refused(at(pointer, value));
        assert_eq!(error.pointer(), pointer, "{value}");
        let text = error.to_string();
        assert!(text.contains(&format!("{pointer} is ")), "{text}");
        assert!(text.contains("expected "), "{text}");
    }
}

#[test]
fn null_is_a_missing_key() {
    for pointer in STRINGS.iter().chain(&INTEGERS).chain(&OBJECTS) {
        decode(&at(pointer, "null"));
    }
    let plain = decode(r#"{"job":"urn:a"}"#);
    let nulls = decode(
        r#"{"job":"urn:a","trace_id":null,"data":null,"meta":null,"attempts":null,"dead_letter":null}"#,
    );
    assert_eq!(nulls, plain);
    assert_eq!(nulls.encode(), r#"{"job":"urn:a","meta":{},"attempts":0}"#);
    assert_eq!(nulls.trace_id(), None);
    assert_eq!(nulls.raw_data(), None);
    assert_eq!(nulls.id(), None);
    assert_eq!(nulls.dead_letter(), None);
    assert_eq!(nulls.data::<Option<Value>>().unwrap(), None);
}

#[test]
fn integers_are_literals_of_64_bits() {
    for (value, number) in [
        ("0", 0),
        ("-0", 0),
        ("-1", -1),
        ("9223372036854775807", i64::MAX),
        ("-9223372036854775808", i64::MIN),
    ] {
        for pointer in INTEGERS {
            let envelope = decode(&at(pointer, value));
            let read = match pointer {
                "/attempts" => Some(envelope.attempts()),
                "/meta/schema_version" => envelope.meta().schema_version(),
                "/meta/created_at" => envelope.meta().created_at(),
                "/dead_letter/failed_at" => envelope.dead_letter().unwrap().failed_at(),
                _ => envelope.dead_letter().unwrap().attempts(),
            };
            assert_eq!(read, Some(number), "{pointer}");
        }
    }
}

#[test]
fn an_error_does_not_show_what_is_long_or_nested() {
    let secret = "s".repeat(100);
    let text = refused(at("/attempts", &format!("\"{secret}\""))).to_string();
    assert!(!text.contains(&secret), "{text}");
    let text = refused(at("/trace_id", r#"{"secret":1}"#)).to_string();
    assert!(!text.contains("secret"), "{text}");
}

// ===== identity =====

#[test]
fn identity_is_job_else_urn() {
    #[rustfmt::skip]
    let table: [(&str, Option<&str>, &[&str]); 25] = [
        (r#""job":"urn:a""#,                         Some("urn:a"), &[]),
        (r#""urn":"urn:b""#,                         Some("urn:b"), &[]),
        (r#""job":"urn:a","urn":"urn:b""#,           Some("urn:a"), &["/urn"]),
        (r#""urn":"urn:b","job":"urn:a""#,           Some("urn:a"), &["/urn"]),
        (r#""job":"urn:a","urn":5"#,                 Some("urn:a"), &["/urn"]),
        (r#""job":"urn:a","urn":null"#,              Some("urn:a"), &["/urn"]),
        (r#""job":"","urn":"urn:b""#,                Some("urn:b"), &[]),
        (r#""job":" \t\n\u000b\f\r","urn":"urn:b""#, Some("urn:b"), &[]),
        (r#""job":null,"urn":"urn:b""#,              Some("urn:b"), &["/job"]),
        (r#""job":5,"urn":"urn:b""#,                 Some("urn:b"), &["/job"]),
        (r#""job":true,"urn":"urn:b""#,              Some("urn:b"), &["/job"]),
        (r#""job":{},"urn":"urn:b""#,                Some("urn:b"), &["/job"]),
        (r#""job":["urn:a"],"urn":"urn:b""#,         Some("urn:b"), &["/job"]),
        ("\"job\":\"\u{a0}\",\"urn\":\"urn:b\"",     Some("\u{a0}"), &["/urn"]),
        (r#""job":"\u2003""#,                        Some("\u{2003}"), &[]),
        (r#""job":"\u0000""#,                        Some("\0"), &[]),
        (r#""job":"\u001c""#,                        Some("\u{1c}"), &[]),
        (r#""job":" urn:a ""#,                       Some(" urn:a "), &[]),
        (r#""\u006aob":"urn:a""#,                    Some("urn:a"), &[]),
        (r#""job":"urn:a","job":5,"urn":"urn:b""#,   Some("urn:b"), &["/job"]),
        (r#""x":1"#,                                 None, &[]),
        (r#""job":"\u0020""#,                        None, &[]),
        (r#""job":5,"urn":5"#,                       None, &[]),
        (r#""job":"","urn":" ""#,                    None, &[]),
        (r#""JOB":"urn:a","Job":"urn:a","job ":"x""#, None, &[]),
    ];
    for (members, urn, warned) in table {
        let body = format!("{{{members}}}");
        match urn {
            Some(urn) => {
                let envelope = decode(&body);
                assert_eq!(envelope.urn(), urn, "{body}");
                assert_eq!(warnings(&envelope), warned, "{body}");
                let written: Value = serde_json::from_str(&envelope.encode()).unwrap();
                assert_eq!(written["job"], urn);
                assert_eq!(written.get("urn"), None);
            }
            None => {
                let error = refused(&body);
                assert_eq!(error.pointer(), "", "{body}");
                assert!(error.to_string().contains("/job nor /urn"), "{error}");
            }
        }
    }
}

// ===== repeated keys =====

#[test]
fn of_a_repeated_key_the_last_counts_whole() {
    let envelope = decode(&with(
        r#""job":"urn:z","trace_id":"1","trace_id":"2","attempts":1,"attempts":7,
           "data":{"a":1},"data":{"b":2},
           "meta":{"id":"1","queue":"q","x":1},"meta":{"id":"2","id":"3"},
           "dead_letter":{"reason":"failed","x":1},"dead_letter":{"reason":"poison"},
           "k":1,"l":2,"\u006b":3"#,
    ));
    assert_eq!(envelope.urn(), "urn:z");
    assert_eq!(envelope.id().unwrap(), &MessageId::from("3"));
    assert_eq!(envelope.meta().queue(), None);
    assert_eq!(envelope.extra("k"), Some("3"));
    assert_eq!(
        envelope.encode(),
        r#"{"job":"urn:z","trace_id":"2","data":{"b":2},"meta":{"id":"3"},"attempts":7,"dead_letter":{"reason":"poison","error":null,"exception":null,"original_queue":null},"l":2,"\u006b":3}"#
    );
}

#[test]
fn of_two_unknown_keys_the_last_is_kept() {
    let envelope = decode(&with(
        r#""meta":{"\u006b":1,"k":2},"dead_letter":{"k":1,"k":null},"k":1,"k":[]"#,
    ));
    assert_eq!(
        envelope.encode(),
        r#"{"job":"urn:a","meta":{"k":2},"attempts":0,"dead_letter":{"error":null,"exception":null,"original_queue":null,"k":null},"k":[]}"#
    );
}

#[test]
fn a_null_after_a_value_takes_its_place() {
    let envelope = decode(&with(
        r#""trace_id":"1","trace_id":null,"data":{},"data":null,"meta":{"id":"1"},"meta":null,
           "attempts":3,"attempts":null,"dead_letter":{},"dead_letter":null"#,
    ));
    assert_eq!(
        envelope.encode(),
        r#"{"job":"urn:a","meta":{},"attempts":0}"#
    );
}

#[test]
fn an_earlier_occurrence_of_another_type_is_poison() {
    for (pointer, wrong) in STRINGS
        .map(|pointer| (pointer, "1"))
        .into_iter()
        .chain(INTEGERS.map(|pointer| (pointer, "\"1\"")))
        .chain(OBJECTS.map(|pointer| (pointer, "1")))
    {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let members = format!(r#""{key}":{wrong},"{key}":null"#);
        let body = match parent {
            "" => with(&members),
            _ => at(parent, &format!("{{{members}}}")),
        };
        assert_eq!(refused(body).pointer(), pointer);
    }
    let body = with(r#""meta":{"id":1},"meta":{"id":"1"}"#);
    assert_eq!(refused(body).pointer(), "/meta/id");
}

// ===== half a surrogate pair =====

#[test]
fn half_a_surrogate_pair_is_carried_where_nobody_reads_it() {
    for half in [
        r"\ud800",
        r"\udfff",
        r"\udd80\ud83e",
        r"\ud83e x \udd80",
        r"\uD800\\",
    ] {
        let envelope = decode(&with(&format!(
            r#""data":{{"{half}":"{half}"}},"meta":{{"{half}":"{half}"}},"dead_letter":{{"ext":"{half}"}},"{half}":["{half}"],"urn":"{half}""#
        )));
        assert_eq!(
            envelope.encode(),
            format!(
                r#"{{"job":"urn:a","data":{{"{half}":"{half}"}},"meta":{{"{half}":"{half}"}},"attempts":0,"dead_letter":{{"error":null,"exception":null,"original_queue":null,"ext":"{half}"}},"{half}":["{half}"]}}"#
            )
        );
        assert!(envelope.data::<Value>().is_err());
    }
}

#[test]
fn half_a_surrogate_pair_in_a_known_string_is_poison() {
    for pointer in STRINGS.iter().chain(&["/job"]) {
        let error = refused(at(pointer, r#""a\ud800""#));
        assert_eq!(error.pointer(), *pointer);
        assert!(error.to_string().contains("surrogate"), "{error}");
    }
    assert_eq!(refused(r#"{"urn":"\udc00"}"#).pointer(), "/urn");
    assert_eq!(
        refused(r#"{"job":"\udc00","urn":"urn:b"}"#).pointer(),
        "/job"
    );
    assert_eq!(
        decode(&at("/meta/id", r#""\ud83e\udd80""#)).id().unwrap(),
        &MessageId::from("🦀")
    );
}

#[test]
fn a_body_with_half_a_surrogate_pair_is_wrapped() {
    let block = DeadLetterBlock::new(Reason::Poison);
    for body in [
        r#"{"job":"\ud800"}"#,
        r#"{"\udc00":1}"#,
        r#"{"a":"\ud83e \udd80"}"#,
    ] {
        let record: Value = serde_json::from_str(&poison(body.as_bytes(), &block)).unwrap();
        assert_eq!(record["raw"], body);
    }
    let whole = r#"{"a":"\ud83e\udd80"}"#;
    assert!(poison(whole.as_bytes(), &block).starts_with(r#"{"a":"\ud83e\udd80","dead_letter":"#));
}

// ===== what is carried =====

#[test]
fn every_digit_survives() {
    let numbers = [
        "99.90",
        "9223372036854775808",
        "18446744073709551616",
        "1e400",
        "-1e400",
        "-0",
        "-0.0",
        "1E+2",
        "0.1e-9",
        "1e-400",
        "0.1000000000000000055511151231257827",
        "123456789012345678901234567890.0",
    ];
    let list = numbers.join(",");
    let members = format!(
        r#""data":{{"n":[{list}]}},"meta":{{"ext":[{list}]}},"attempts":0,"dead_letter":{{"error":null,"exception":null,"original_queue":null,"ext":[{list}]}},"n":[{list}]"#
    );
    assert_eq!(decode(&with(&members)).encode(), with(&members));
    let digits = "7".repeat(10_000);
    assert_eq!(
        decode(&with(&format!(r#""n":{digits}"#))).extra("n"),
        Some(&*digits)
    );
}

#[test]
fn any_depth_is_carried() {
    let deep = nested(10_000);
    let envelope = decode(&with(&format!(
        r#""data":{{"d":{deep}}},"meta":{{"ext":{deep}}},"dead_letter":{{"ext":{deep}}},"d":{deep}"#
    )));
    assert_eq!(envelope.raw_data(), Some(&*format!(r#"{{"d":{deep}}}"#)));
    assert_eq!(envelope.extra("d"), Some(&*deep));
    assert_eq!(envelope.meta().extra("ext"), Some(&*deep));
    assert!(envelope.encode().contains(&format!(r#""ext":{deep}"#)));
    assert!(envelope.data::<Value>().is_err());
    assert!(envelope.data::<IgnoredAny>().is_ok());

    let objects = r#"{"a":"#.repeat(10_000) + "1" + &"}".repeat(10_000);
    assert_eq!(decode(&at("/data", &objects)).raw_data(), Some(&*objects));
    // Where it is of the wrong type, refused without a stack overflow.
    assert_eq!(refused(at("/meta/id", &deep)).pointer(), "/meta/id");
    assert_eq!(refused(&deep).pointer(), "");
    assert_eq!(refused(&deep[..10_000]).pointer(), "");
}

#[test]
fn a_large_payload_is_carried() {
    let text = "0123456789abcde\\n".repeat(1 << 20);
    assert!(text.len() >= 16 << 20);
    let body = with(&format!(
        r#""data":{{"x":"{text}"}},"meta":{{}},"attempts":0"#
    ));
    let envelope = Envelope::decode(body.as_bytes()).unwrap();
    assert_eq!(envelope.encode(), body);
    let clone = envelope.clone().with_attempts(1);
    assert_eq!(
        clone.raw_data().unwrap().as_ptr(),
        envelope.raw_data().unwrap().as_ptr(),
        "a clone copies no data"
    );
    assert!(Envelope::decode(&body.as_bytes()[..body.len() - 1]).is_err());
}

#[test]
fn an_empty_array_as_data_is_an_empty_object() {
    for value in ["[]", "[ \n ]", "[\t\r\n ]", "{}"] {
        let envelope = decode(&at("/data", value));
        assert_eq!(envelope.data::<Value>().unwrap(), json!({}));
        assert_eq!(
            envelope.encode(),
            r#"{"job":"urn:a","data":{},"meta":{},"attempts":0}"#
        );
    }
}

#[test]
fn forbidden_keys_are_dropped_with_a_warning() {
    for (members, pointer) in [
        (r#""timestamp":1,"timestamp":2"#, "/timestamp"),
        (r#""time\u0073tamp":null"#, "/timestamp"),
        (r#""meta":{"max_retries":3}"#, "/meta/max_retries"),
        (r#""meta":{"attempts":"x"}"#, "/meta/attempts"),
        (r#""meta":{"source":{}}"#, "/meta/source"),
        (r#""meta":{"ts":[1]}"#, "/meta/ts"),
    ] {
        let envelope = decode(&with(members));
        assert_eq!(warnings(&envelope), [pointer], "{members}");
        assert!(
            envelope.warnings()[0]
                .to_string()
                .starts_with(&format!("{pointer}: ")),
        );
        assert_eq!(
            envelope.encode(),
            r#"{"job":"urn:a","meta":{},"attempts":0}"#
        );
    }
    // The same names elsewhere are nobody's business.
    let members = r#""data":{"timestamp":1},"meta":{"timestamp":1,"ext":{"ts":1}},"attempts":0,"ts":1,"source":2,"max_retries":3,"Timestamp":4"#;
    let envelope = decode(&with(members));
    assert_eq!(warnings(&envelope), [""; 0]);
    assert_eq!(envelope.encode(), with(members));
}

#[test]
fn keys_may_be_spelled_with_escapes() {
    let envelope = decode(
        r#"{"\u006aob":"urn:a","trace\u005fid":"t","d\u0061ta":{},"m\u0065ta":{"\u0069d":"m"},"\u0061ttempts":3,"dead\u005fletter":{"reaso\u006e":"failed"}}"#,
    );
    assert_eq!(
        envelope.encode(),
        r#"{"job":"urn:a","trace_id":"t","data":{},"meta":{"id":"m"},"attempts":3,"dead_letter":{"reason":"failed","error":null,"exception":null,"original_queue":null}}"#
    );
    let block = DeadLetterBlock::new(Reason::Poison);
    let record: Value =
        serde_json::from_str(&poison(br#"{"dead\u005fletter":1}"#, &block)).unwrap();
    assert_eq!(record["raw"], r#"{"dead\u005fletter":1}"#);
}

// ===== encode =====

#[test]
fn keys_are_written_in_the_order_of_the_format() {
    let envelope = decode(
        r#"{"z":1,"attempts":2,"dead_letter":{"x":1,"lang":"go","attempts":2,"original_queue":"q","failed_at":9,"exception":"E","error":"e","reason":"failed"},
            "meta":{"b":1,"created_at":5,"schema_version":1,"lang":"php","a":2,"queue":"q","id":"m"},"data":{"b":1,"a":2},"trace_id":"t","a":2,"urn":"urn:a"}"#,
    );
    assert_eq!(
        envelope.encode(),
        r#"{"job":"urn:a","trace_id":"t","data":{"b":1,"a":2},"meta":{"id":"m","queue":"q","lang":"php","schema_version":1,"created_at":5,"b":1,"a":2},"attempts":2,"dead_letter":{"reason":"failed","error":"e","exception":"E","failed_at":9,"original_queue":"q","attempts":2,"lang":"go","x":1},"z":1,"a":2}"#
    );
    assert_eq!(decode(VALID).encode(), VALID);
}

#[test]
fn white_space_goes_but_for_blanks_in_strings() {
    let body = "\r\n{ \"job\" :\t\"urn:a b\" , \"data\" : { \"a b\" : [ 1 ,\n2 , \"x \\\" y\\\\\" ] } ,\n\"meta\" : { \"e x\" : \" \" } , \"u u\" : { } }\n";
    assert_eq!(
        decode(body).encode(),
        r#"{"job":"urn:a b","data":{"a b":[1,2,"x \" y\\"]},"meta":{"e x":" "},"attempts":0,"u u":{}}"#
    );
}

#[test]
fn only_what_must_be_is_escaped() {
    let envelope = decode(
        r#"{"job":"urn:\/\u003c\u00e9\u2028\ud83e\udd80","trace_id":"\u0000\b\t\n\f\r\"\\\u001f\u007f","data":{"x":"\/\u00e9"},"meta":{"id":"<a href='&'>"}}"#,
    );
    assert_eq!(
        envelope.encode(),
        "{\"job\":\"urn:/<é\u{2028}🦀\",\"trace_id\":\"\\u0000\\b\\t\\n\\f\\r\\\"\\\\\\u001f\u{7f}\",\"data\":{\"x\":\"\\/\\u00e9\"},\"meta\":{\"id\":\"<a href='&'>\"},\"attempts\":0}"
    );
}

// ===== producers =====

#[test]
fn a_new_message_has_all_that_consumers_ask_for() {
    let before = Envelope::new("urn:a", &json!({})).unwrap();
    let envelope = Envelope::new("urn:a", &json!({"b": 1, "a": "é/"})).unwrap();
    assert_eq!(envelope.accepts(), Ok(()));
    assert_eq!(envelope.urn(), "urn:a");
    assert_eq!(envelope.attempts(), 0);
    assert_eq!(envelope.dead_letter(), None);
    assert_eq!(envelope.warnings(), []);
    let meta = envelope.meta();
    assert_eq!(meta.queue(), Some("default"));
    assert_eq!(meta.lang(), Some("rust"));
    assert_eq!(meta.schema_version(), Some(1));
    assert!(meta.created_at().unwrap() >= before.meta().created_at().unwrap());
    assert!(meta.created_at().unwrap() > 1_700_000_000_000);
    for id in [meta.id().unwrap().as_str(), envelope.trace_id().unwrap()] {
        assert!(MessageId::from(id).as_uuid().is_some(), "{id}");
        assert_eq!(&id[14..15], "4");
        assert!("89ab".contains(&id[19..20]));
    }
    assert_ne!(
        envelope.id().unwrap().as_str(),
        envelope.trace_id().unwrap()
    );
    assert_ne!(envelope.id(), before.id());
    assert_ne!(envelope.trace_id(), before.trace_id());

    let envelope = envelope
        .with_id("m")
        .with_trace_id("t")
        .with_queue("q")
        .with_attempts(3)
        .with_extra("x", &[1])
        .unwrap()
        .with_meta_extra("ext", "y")
        .unwrap();
    let created_at = envelope.meta().created_at().unwrap();
    assert_eq!(
        envelope.encode(),
        format!(
            r#"{{"job":"urn:a","trace_id":"t","data":{{"a":"é/","b":1}},"meta":{{"id":"m","queue":"q","lang":"rust","schema_version":1,"created_at":{created_at},"ext":"y"}},"attempts":3,"x":[1]}}"#
        )
    );
    assert_eq!(decode(&envelope.encode()), envelope);
}

/// Has no JSON.
struct Unserializable;

impl Serialize for Unserializable {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(S::Error::custom("secret key"))
    }
}

#[test]
fn a_producer_needs_a_urn_and_an_object() {
    for urn in ["", " ", "\t\n\x0b\x0c\r "] {
        let error = Envelope::new(urn, &json!({})).unwrap_err();
        assert_eq!(error.pointer(), "/job");
        assert!(error.to_string().contains("blank"), "{error}");
    }
    assert_eq!(Envelope::new("\u{a0}", &json!({})).unwrap().urn(), "\u{a0}");

    fn refused<T: Serialize>(data: T) -> EnvelopeError {
        Envelope::new("urn:a", &data).unwrap_err()
    }
    for (error, found) in [
        (refused(()), "null"),
        (refused(None::<Map<String, Value>>), "null"),
        (refused([0; 0]), "an array"),
        (refused("{}"), "a string"),
        (refused(1), "a number"),
        (refused(true), "a boolean"),
    ] {
        assert_eq!(error.pointer(), "/data");
        assert_eq!(
            error.to_string(),
            format!("/data is {found}; expected an object")
        );
        assert!(error.source().is_none());
    }
    for error in [refused(Unserializable), refused(BTreeMap::from([([0], 1)]))] {
        assert_eq!(error.pointer(), "/data");
        assert!(error.source().is_some());
    }
    let map = BTreeMap::from([(1, 2)]);
    assert_eq!(
        Envelope::new("urn:a", &map).unwrap().raw_data(),
        Some(r#"{"1":2}"#)
    );
}

#[test]
fn extras_are_for_keys_of_ones_own() {
    let envelope = || Envelope::new("urn:a", &json!({})).unwrap();
    let top = [
        ("job", "/job"),
        ("urn", "/urn"),
        ("trace_id", "/trace_id"),
        ("data", "/data"),
        ("meta", "/meta"),
        ("attempts", "/attempts"),
        ("dead_letter", "/dead_letter"),
        ("timestamp", "/timestamp"),
    ];
    for (key, pointer) in top {
        assert_eq!(
            envelope().with_extra(key, &1).unwrap_err().pointer(),
            pointer
        );
    }
    let meta = [
        ("id", "/meta/id"),
        ("queue", "/meta/queue"),
        ("lang", "/meta/lang"),
        ("schema_version", "/meta/schema_version"),
        ("created_at", "/meta/created_at"),
        ("max_retries", "/meta/max_retries"),
        ("attempts", "/meta/attempts"),
        ("source", "/meta/source"),
        ("ts", "/meta/ts"),
    ];
    for (key, pointer) in meta {
        let error = envelope().with_meta_extra(key, &1).unwrap_err();
        assert_eq!(error.pointer(), pointer);
        assert!(error.to_string().starts_with(&format!("{pointer} is ")));
    }
    for (key, pointer) in [("a~b/c", "/a~0b~1c"), ("~1", "/~01"), ("", "/")] {
        let error = envelope().with_extra(key, &Unserializable).unwrap_err();
        assert_eq!(error.pointer(), pointer);
        assert!(error.source().is_some());
        let error = envelope()
            .with_meta_extra(key, &Unserializable)
            .unwrap_err();
        assert_eq!(error.pointer(), format!("/meta{pointer}"));
    }

    // Other keys, also those that are forbidden or known elsewhere, take any value.
    let sent = envelope()
        .with_extra("ts", &json!({"a": [1, null]}))
        .unwrap()
        .with_extra("a~b/c\"\n", "x")
        .unwrap()
        .with_extra("ts", &2)
        .unwrap()
        .with_meta_extra("job", &json!(null))
        .unwrap()
        .with_meta_extra("timestamp", &1.5)
        .unwrap();
    let read = decode(&sent.encode());
    assert_eq!(read, sent);
    assert_eq!(read.extra("ts"), Some("2"));
    assert_eq!(read.extra("a~b/c\"\n"), Some("\"x\""));
    assert_eq!(read.extra("a"), None);
    assert_eq!(read.meta().extra("job"), Some("null"));
    assert_eq!(read.meta().extra("timestamp"), Some("1.5"));
}

#[test]
fn an_extra_takes_the_place_of_one_that_is_spelled_otherwise() {
    let envelope = decode(&with(r#""\u006b":1,"l":2,"meta":{"\u006b":1}"#))
        .with_extra("k", &3)
        .unwrap()
        .with_meta_extra("k", &4)
        .unwrap();
    assert_eq!(
        envelope.encode(),
        r#"{"job":"urn:a","meta":{"\u006b":4},"attempts":0,"\u006b":3,"l":2}"#
    );
}

// ===== consumers =====

#[test]
fn accepts_says_why_not() {
    assert_eq!(decode(VALID).accepts(), Ok(()));
    let table = [
        (
            r#""schema_version":1"#,
            r#""schema_version":2"#,
            Rejected::SchemaVersion(Some(2)),
        ),
        (
            r#""schema_version":1"#,
            r#""schema_version":0"#,
            Rejected::SchemaVersion(Some(0)),
        ),
        (
            r#""schema_version":1"#,
            r#""schema_version":null"#,
            Rejected::SchemaVersion(None),
        ),
        (
            r#""schema_version":1"#,
            r#""version":1"#,
            Rejected::SchemaVersion(None),
        ),
        (r#""data":{"n":1}"#, r#""data":null"#, Rejected::DataMissing),
        (r#""data":{"n":1}"#, r#""Data":{}"#, Rejected::DataMissing),
        (
            r#""trace_id":"t""#,
            r#""trace_id":"""#,
            Rejected::TraceIdMissing,
        ),
        (
            r#""trace_id":"t""#,
            r#""trace_id":" \t\n\u000b\f\r""#,
            Rejected::TraceIdMissing,
        ),
        (
            r#""trace_id":"t""#,
            r#""trace_id":null"#,
            Rejected::TraceIdMissing,
        ),
        (
            r#""trace_id":"t""#,
            r#""traceId":"t""#,
            Rejected::TraceIdMissing,
        ),
        (
            r#""attempts":2"#,
            r#""attempts":-1"#,
            Rejected::AttemptsNegative(-1),
        ),
    ];
    for (found, put, rejected) in table {
        let body = VALID.replace(found, put);
        assert_ne!(body, VALID);
        assert_eq!(decode(&body).accepts(), Err(rejected), "{body}");
        assert!(rejected.to_string().contains("expected"), "{rejected}");
    }
    for (found, put) in [
        (r#""trace_id":"t""#, "\"trace_id\":\"\u{a0}\""),
        (r#""attempts":2"#, r#""attempts":null"#),
        (r#","attempts":2"#, ""),
        (r#""data":{"n":1}"#, r#""data":[]"#),
        (r#""id":"m","queue":"q","lang":"php","#, ""),
        (r#""lang":"php""#, r#""lang":"cobol""#),
    ] {
        let body = VALID.replace(found, put);
        assert_ne!(body, VALID);
        assert_eq!(decode(&body).accepts(), Ok(()), "{body}");
    }
}

#[test]
fn meta_is_read() {
    let envelope = decode(VALID);
    let meta = envelope.meta();
    assert_eq!(meta.id().map(MessageId::as_str), Some("m"));
    assert_eq!(envelope.id(), meta.id());
    assert_eq!(meta.queue(), Some("q"));
    assert_eq!(meta.lang(), Some("php"));
    assert_eq!(meta.schema_version(), Some(1));
    assert_eq!(meta.created_at(), Some(5));
    assert_eq!(envelope.trace_id(), Some("t"));
    assert_eq!(envelope.data::<Value>().unwrap(), json!({"n": 1}));
    for id in ["", " ", "a\\u0000b", "É"] {
        let envelope = decode(&at("/meta/id", &format!("\"{id}\"")));
        let read: String = serde_json::from_str(&format!("\"{id}\"")).unwrap();
        assert_eq!(envelope.meta().id().map(MessageId::as_str), Some(&*read));
    }
}

#[test]
fn debug_leaves_the_data_out() {
    let body = VALID.replace(r#""n":1"#, r#""card":"4111""#);
    let shown = format!("{:?}", decode(&body));
    assert!(
        !shown.contains("4111") && !shown.contains("card"),
        "{shown}"
    );
    assert!(
        shown.contains("urn:a") && shown.contains("\"m\""),
        "{shown}"
    );
}

#[test]
fn a_replay_is_marked_by_a_header_that_is_not_empty() {
    let envelope = decode(VALID);
    assert!(!envelope.is_replay());
    for (name, value, set) in [
        ("bq-replay-bypass", "1", true),
        ("bq-replay-bypass", "0", true),
        ("bq-replay-bypass", " ", true),
        ("bq-replay-bypass", "", false),
        ("BQ-Replay-Bypass", "1", false),
    ] {
        let headers = Headers::new().with(name, value);
        assert_eq!(envelope.clone().with_headers(headers).is_replay(), set);
    }
    let headers = Headers::from_iter([("a", "1"), ("b", "2"), ("a", "3")]).with_queue("q");
    let marked = envelope.clone().with_headers(headers).with_replay_bypass();
    assert!(marked.is_replay());
    assert_eq!(marked.headers().queue(), Some("q"));
    assert_eq!(
        marked.headers().iter().collect::<Vec<_>>(),
        [("a", "3"), ("b", "2"), ("bq-replay-bypass", "1")]
    );
    assert_eq!(marked.encode(), envelope.encode(), "it is out of band");
}

// ===== dead letters =====

#[test]
fn the_block_names_the_original_queue() {
    let block = || DeadLetterBlock::new(Reason::Failed);
    let table = [
        (Some("meta"), Some("received"), Some("block"), Some("meta")),
        (Some(""), Some("received"), Some("block"), Some("received")),
        (None, Some("received"), Some("block"), Some("received")),
        (None, None, Some("block"), Some("block")),
        (Some(""), None, Some("block"), Some("block")),
        (None, None, None, None),
    ];
    for (meta, received, given, expected) in table {
        let mut envelope = decode(r#"{"job":"urn:a","attempts":4}"#);
        if let Some(queue) = meta {
            envelope = envelope.with_queue(queue);
        }
        if let Some(queue) = received {
            envelope = envelope.with_headers(Headers::new().with_queue(queue));
        }
        let block = match given {
            Some(queue) => block().with_original_queue(queue),
            None => block(),
        };
        let envelope = envelope.with_dead_letter(block.with_attempts(99));
        let block = envelope.dead_letter().unwrap();
        assert_eq!(block.original_queue(), expected);
        assert_eq!(block.attempts(), Some(4));
    }
}

#[test]
fn the_block_is_written_in_order_with_nulls() {
    let before = DeadLetterBlock::new(Reason::Failed).failed_at().unwrap();
    let plain = decode(VALID).with_dead_letter(DeadLetterBlock::new(Reason::UnknownUrn));
    let failed_at = plain.dead_letter().unwrap().failed_at().unwrap();
    assert!(failed_at >= before);
    assert_eq!(
        plain.encode(),
        format!(
            r#"{},"dead_letter":{{"reason":"unknown_urn","error":null,"exception":null,"failed_at":{failed_at},"original_queue":"q","attempts":2,"lang":"rust"}}}}"#,
            &VALID[..VALID.len() - 1]
        )
    );
    let full = decode(VALID).with_dead_letter(
        DeadLetterBlock::new(Reason::Failed)
            .with_error("no \"money\"\n")
            .with_exception("shop::Declined"),
    );
    let failed_at = full.dead_letter().unwrap().failed_at().unwrap();
    assert_eq!(
        full.encode(),
        format!(
            r#"{},"dead_letter":{{"reason":"failed","error":"no \"money\"\n","exception":"shop::Declined","failed_at":{failed_at},"original_queue":"q","attempts":2,"lang":"rust"}}}}"#,
            &VALID[..VALID.len() - 1]
        )
    );
    assert_eq!(decode(&full.encode()), full);
    let block = full.dead_letter().unwrap();
    assert_eq!(block.reason(), Some("failed"));
    assert_eq!(block.error(), Some("no \"money\"\n"));
    assert_eq!(block.exception(), Some("shop::Declined"));
    assert_eq!(block.lang(), Some("rust"));
    let reasons = [Reason::Failed, Reason::UnknownUrn, Reason::Poison];
    assert_eq!(
        reasons.map(|reason| reason.to_string()),
        ["failed", "unknown_urn", "poison"]
    );
    assert_eq!(Reason::default(), Reason::Failed);
}

#[test]
fn a_redrive_drops_the_block_and_the_attempts_alone() {
    let body = VALID.replace(
        r#","attempts":2}"#,
        r#","attempts":2,"dead_letter":{"reason":"failed","x":1},"extra":1e400}"#,
    );
    assert_eq!(
        decode(&body).redriven().encode(),
        VALID.replace(r#","attempts":2}"#, r#","attempts":0,"extra":1e400}"#)
    );
}

#[test]
fn a_poison_record_is_the_body_with_a_block() {
    let block = DeadLetterBlock::new(Reason::Poison)
        .with_error("poison \"x\"")
        .with_original_queue("q");
    let failed_at = block.failed_at().unwrap();
    let end = format!(
        r#""dead_letter":{{"reason":"poison","error":"poison \"x\"","exception":null,"failed_at":{failed_at},"original_queue":"q","attempts":0,"lang":"rust"}}}}"#
    );
    let table: [(&[u8], &str); 17] = [
        (b"{}", "{"),
        (b" \r\n{ \t}\n ", "{"),
        (
            b"\n{ \"attempts\" : \"3\", \"a\":1e400,\"a\":2 }\r\n",
            "{ \"attempts\" : \"3\", \"a\":1e400,\"a\":2 ,",
        ),
        (br#"{"a":{"dead_letter":1}}"#, r#"{"a":{"dead_letter":1},"#),
        (br#"{"a":"}"}"#, r#"{"a":"}","#),
        (
            br#"{"dead_letter":null}"#,
            r#"{"raw":"{\"dead_letter\":null}","#,
        ),
        (b"", r#"{"raw":"","#),
        (b" ", r#"{"raw":" ","#),
        (b"null", r#"{"raw":"null","#),
        (b"[]", r#"{"raw":"[]","#),
        (b"\"a\"", r#"{"raw":"\"a\"","#),
        (b"{}{}", r#"{"raw":"{}{}","#),
        (b"{\"a\":NaN}", r#"{"raw":"{\"a\":NaN}","#),
        (
            "\u{feff}{}\u{7f}é/\0".as_bytes(),
            "{\"raw\":\"\u{feff}{}\u{7f}é/\\u0000\",",
        ),
        ("{}\u{a0}".as_bytes(), "{\"raw\":\"{}\u{a0}\","),
        (
            b"{\"a\":\"\xff\"}",
            r#"{"raw":"eyJhIjoi/yJ9","raw_encoding":"base64","#,
        ),
        (b"\xff", r#"{"raw":"/w==","raw_encoding":"base64","#),
    ];
    for (body, head) in table {
        invariants::check(body);
        assert_eq!(poison(body, &block), format!("{head}{end}"));
    }
}

// ===== properties =====

/// A string's text between its quotes: whatever JSON allows, halves of surrogate pairs too.
fn string() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => any::<char>().prop_map(|c| {
            let json = serde_json::to_string(&c).unwrap();
            json[1..json.len() - 1].to_owned()
        }),
        2 => any::<u16>().prop_map(|unit| format!("\\u{unit:04x}")),
        1 => (0xd800..0xe000u16).prop_map(|unit| format!("\\u{unit:04X}")),
        1 => select(&["\\/", "\\\"", "\\\\", " ", "🦀", "\\ud83e\\udd80", "}", "urn:a"][..])
            .prop_map(str::to_owned),
    ];
    vec(piece, 0..5).prop_map(|pieces| pieces.concat())
}

fn number() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<i64>().prop_map(|number| number.to_string()),
        "-?(0|[1-9][0-9]{0,25})(\\.[0-9]{1,9})?([eE][+-]?[0-9]{1,4})?",
        select(&["0", "1", "-1", "1.0", "1e0", "9223372036854775808", "-0"][..])
            .prop_map(str::to_owned),
    ]
}

fn space() -> impl Strategy<Value = &'static str> {
    select(&["", "", "", " ", "\n", "\t\r\n "][..])
}

fn key() -> impl Strategy<Value = String> {
    let known = [
        "job",
        "urn",
        "trace_id",
        "data",
        "meta",
        "attempts",
        "dead_letter",
        "timestamp",
        "id",
        "queue",
        "lang",
        "schema_version",
        "created_at",
        "max_retries",
        "ts",
        "source",
        "reason",
        "error",
        "failed_at",
        "original_queue",
        "exception",
        "\\u006aob",
        "m\\u0065ta",
        "ext",
    ];
    prop_oneof![3 => select(known.to_vec()).prop_map(str::to_owned), 1 => string()]
}

fn value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        number(),
        string().prop_map(|text| format!("\"{text}\"")),
        select(&["null", "true", "false", "[]", "{}", "[ ]"][..]).prop_map(str::to_owned),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let item =
            (space(), inner.clone(), space()).prop_map(|(a, value, b)| a.to_owned() + &value + b);
        prop_oneof![
            vec(item, 0..4).prop_map(|items| format!("[{}]", items.join(","))),
            vec((key(), inner), 0..4).prop_map(object),
        ]
    })
}

fn object(members: Vec<(String, String)>) -> String {
    let members: Vec<_> = members
        .into_iter()
        .map(|(key, value)| format!("\"{key}\":{value}"))
        .collect();
    format!("{{{}}}", members.join(","))
}

/// Mostly a body that decodes: known keys of the right type, in any order, repeated or not, with
/// others between them.
fn body() -> impl Strategy<Value = String> {
    let text = || string().prop_map(|text| format!("\"{text}\""));
    let integer = || any::<i64>().prop_map(|number| number.to_string());
    let data = vec((key(), value()), 0..3).prop_map(object);
    let meta = vec(
        prop_oneof![
            text().prop_map(|text| ("id".to_owned(), text)),
            text().prop_map(|text| ("queue".to_owned(), text)),
            Just(("schema_version".to_owned(), "1".to_owned())),
            integer().prop_map(|number| ("created_at".to_owned(), number)),
            (string(), value()),
            (key(), value()),
        ],
        0..5,
    )
    .prop_map(object);
    let block = vec(
        prop_oneof![
            text().prop_map(|text| ("error".to_owned(), text)),
            integer().prop_map(|number| ("failed_at".to_owned(), number)),
            (string(), value()),
        ],
        0..3,
    )
    .prop_map(object);
    let member = prop_oneof![
        text().prop_map(|text| ("trace_id".to_owned(), text)),
        text().prop_map(|text| ("urn".to_owned(), text)),
        data.prop_map(|data| ("data".to_owned(), data)),
        meta.prop_map(|meta| ("meta".to_owned(), meta)),
        integer().prop_map(|number| ("attempts".to_owned(), number)),
        block.prop_map(|block| ("dead_letter".to_owned(), block)),
        (string(), value()),
        (key(), value()),
    ];
    let job = text().prop_map(|text| ("job".to_owned(), text.replace("\\ud8", "x")));
    (vec(member, 0..6), job, space(), space()).prop_map(|(mut members, job, before, after)| {
        let at = members.len() / 2;
        members.insert(at, job);
        format!("{before}{}{after}", object(members))
    })
}

#[test]
fn the_bodies_below_are_a_fair_mix() {
    let mut runner = TestRunner::deterministic();
    let decoded = (0..500)
        .filter(|_| {
            let body = body().new_tree(&mut runner).unwrap().current();
            Envelope::decode(body.as_bytes()).is_ok()
        })
        .count();
    assert!((150..450).contains(&decoded), "{decoded} of 500");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..Default::default() })]

    #[test]
    fn arbitrary_bytes_are_read_or_recorded(bytes in vec(any::<u8>(), 0..256)) {
        invariants::check(&bytes);
    }

    #[test]
    fn arbitrary_text_is_read_or_recorded(text in any::<String>()) {
        invariants::check(text.as_bytes());
    }

    #[test]
    fn any_body_is_read_or_recorded(body in body()) {
        invariants::check(body.as_bytes());
    }

    #[test]
    fn any_object_is_read_or_recorded(members in vec((key(), value()), 0..8)) {
        invariants::check(object(members).as_bytes());
    }

    #[test]
    fn a_damaged_body_is_read_or_recorded(
        body in body(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 1..4),
    ) {
        let mut bytes = body.into_bytes();
        for (at, byte, how) in damage {
            let at = at.index(bytes.len() + 1);
            match how {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, byte),
                2 if at < bytes.len() => bytes[at] ^= 1 << (byte % 8),
                _ if at < bytes.len() => drop(bytes.remove(at)),
                _ => {}
            }
        }
        invariants::check(&bytes);
    }

    #[test]
    fn unknown_values_survive(key in string(), value in value()) {
        let whole = format!(
            r#"{{"job":"urn:a","data":{{"x":{value}}},"meta":{{"x{key}":{value}}},"attempts":0,"x{key}":{value}}}"#
        );
        let written = decode(&whole).encode();
        prop_assert_eq!(&decode(&written).encode(), &written);
        // White space apart, nothing changed.
        prop_assert_eq!(tokens(&written), tokens(&whole));
    }

    #[test]
    fn what_a_producer_sets_is_read(
        urn in "[^ \t\n\u{b}\u{c}\r].{0,8}",
        id in any::<String>(),
        queue in any::<String>(),
        text in any::<String>(),
        number in any::<i64>(),
        attempts in any::<i64>(),
    ) {
        let data = json!({text.clone(): text.clone(), "n": number});
        let sent = Envelope::new(urn.clone(), &data).unwrap()
            .with_id(id.as_str())
            .with_queue(queue.clone())
            .with_trace_id(text.clone())
            .with_attempts(attempts)
            .with_meta_extra("ext", &text).unwrap()
            .with_extra(&format!("x-{text}"), &number).unwrap()
            .with_dead_letter(DeadLetterBlock::new(Reason::Failed).with_error(&text));
        let read = decode(&sent.encode());
        prop_assert_eq!(&read, &sent);
        prop_assert_eq!(read.urn(), urn);
        prop_assert_eq!(read.meta().id().unwrap().as_str(), id);
        prop_assert_eq!(read.meta().queue(), Some(&*queue));
        prop_assert_eq!(read.trace_id(), Some(&*text));
        prop_assert_eq!(read.attempts(), attempts);
        prop_assert_eq!(read.data::<Value>().unwrap(), data);
        prop_assert_eq!(read.dead_letter().unwrap().error(), Some(&*text));
    }
}

/// A JSON text without the white space outside strings.
fn tokens(json: &str) -> String {
    let mut out = String::new();
    for (at, part) in json
        .replace("\\\\", "\u{1}")
        .replace("\\\"", "\u{2}")
        .split('"')
        .enumerate()
    {
        if at % 2 == 0 {
            out.extend(
                part.chars()
                    .filter(|c| !matches!(c, ' ' | '\t' | '\n' | '\r')),
            );
        } else {
            out.push_str(&format!("\"{part}\""));
        }
    }
    out
}
