//! Any bytes: what the property tests ask of them, asked of what coverage leads to.

#![no_main]

#[path = "../../tests/envelope/invariants.rs"]
mod invariants;

use libfuzzer_sys::fuzz_target;

/// Members that a body is made of when the input names them, since chance spells few keys right.
const MEMBERS: [&str; 16] = [
    r#""job":"urn:a""#,
    r#""urn":"urn:b""#,
    r#""trace_id":"t""#,
    r#""data":{"a":[1e400,-0,"\ud83e"]}"#,
    r#""data":[ ]"#,
    r#""meta":{"id":"m","queue":"q","lang":"php","schema_version":1,"created_at":5}"#,
    r#""meta":{"ts":1,"ext":{"a":"\udd80"}}"#,
    r#""attempts":-1"#,
    r#""attempts":1.0"#,
    r#""dead_letter":{"reason":"failed","attempts":2,"ext":1}"#,
    r#""dead_letter":null"#,
    r#""timestamp":1"#,
    r#""\u006aob":5"#,
    r#""x":"\ud83e\udd80""#,
    r#""x":[[[[{"y":{}}]]]]"#,
    r#""meta":{"id":"\ud800"}"#,
];

fuzz_target!(|input: &[u8]| {
    invariants::check(input);

    // The same input once more, as what stands between known members.
    let mut body = b"{".to_vec();
    for byte in input {
        match MEMBERS.get(usize::from(byte.wrapping_sub(0x80))) {
            Some(member) => {
                body.extend_from_slice(if body.len() > 1 { b"," } else { b"" });
                body.extend_from_slice(member.as_bytes());
            }
            None => body.push(*byte),
        }
    }
    body.push(b'}');
    invariants::check(&body);
});
