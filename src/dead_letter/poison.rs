use crate::{envelope::DeadLetterBlock, json};
use base64::{Engine, prelude::BASE64_STANDARD};
use std::str;

/// The record of a body that does not decode, for the dead-letter queue.
///
/// One strict JSON object without a key `dead_letter` gets the block spliced in before its last
/// brace; every other character of it stays as it was. Anything else is wrapped, as
/// `{"raw":"<text>","dead_letter":…}`, or, when it is not UTF-8, as
/// `{"raw":"<base64>","raw_encoding":"base64","dead_letter":…}`. Nothing is lost either way.
///
/// ```
/// use tower_idempotency::{dead_letter::poison, envelope::{DeadLetterBlock, Reason}};
///
/// let block = DeadLetterBlock::new(Reason::Poison)
///     .with_error("poison body: /attempts is a string (\"3\"); expected a 64-bit integer or null")
///     .with_original_queue("orders");
/// let record = poison(br#"{"job":"urn:shop:order","attempts":"3"}"#, &block);
/// assert!(record.starts_with(r#"{"job":"urn:shop:order","attempts":"3","dead_letter":{"#));
/// ```
#[must_use]
pub fn poison(body: &[u8], block: &DeadLetterBlock) -> String {
    let mut out = String::with_capacity(body.len() + 256);
    match str::from_utf8(body) {
        Ok(text) => match strict_object(text) {
            Some(object) => {
                // Without its last brace, and without the white space of an empty object.
                let open = &object[..object.len() - 1];
                let is_empty = open[1..].bytes().all(json::is_space);
                out.push_str(if is_empty { "{" } else { open });
                out.push_str(if is_empty { "" } else { "," });
            }
            None => {
                out.push_str("{\"raw\":");
                json::write_str(&mut out, text);
                out.push(',');
            }
        },
        Err(_) => {
            out.push_str("{\"raw\":\"");
            BASE64_STANDARD.encode_string(body, &mut out);
            out.push_str("\",\"raw_encoding\":\"base64\",");
        }
    }
    out.push_str("\"dead_letter\":");
    block.write(&mut out);
    out.push('}');
    out
}

/// The object that a text is, white space around it apart, if a block can be spliced into it.
fn strict_object(text: &str) -> Option<&str> {
    let members = json::members(text).ok()?;
    let has_block = members
        .iter()
        .any(|member| json::unescape(member.raw_key).as_deref() == Some("dead_letter"));
    let strict = !has_block && json::is_unicode(text);
    strict.then(|| text.trim_matches([' ', '\t', '\n', '\r']))
}
