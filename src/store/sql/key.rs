//! How an id is stored in a column, and which table it is.

use crate::error::{BackendError, BackendErrorKind, ConfigError};
use sha2::{Digest, Sha256};
use std::fmt::Write;

/// The longest id that is stored verbatim, in bytes.
const LONGEST: usize = 255;

/// What stands before the hash of an id that is not stored verbatim.
const HASHED: &str = "sha256:";

/// How much room the name of an index leaves to that of its table.
const LONGEST_TABLE: usize = 63 - INDEX.len();

/// What the name of the index adds to that of its table.
const INDEX: &str = "_expires_at";

/// What a column can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// One of our own tables: any id, those that do not fit as their hash.
    Ours,
    /// Somebody else's: verbatim or not at all.
    Verbatim {
        chars: Option<usize>,
        bytes: Option<usize>,
        nul: bool,
    },
}

impl Column {
    /// What is stored for an id. Two ids never share it: what is stored verbatim does not begin as a
    /// hash does.
    pub(super) fn key(self, id: &str) -> Result<String, BackendError> {
        match self {
            Column::Ours => {
                let verbatim = id.len() <= LONGEST && !id.contains('\0') && !id.starts_with(HASHED);
                Ok(if verbatim { id.to_owned() } else { hashed(id) })
            }
            Column::Verbatim { chars, bytes, nul } => {
                let limit = if chars.is_some_and(|chars| id.chars().count() > chars)
                    || bytes.is_some_and(|bytes| id.len() > bytes)
                {
                    "it is longer than the column `message_id`"
                } else if !nul && id.contains('\0') {
                    "it contains NUL, which the column `message_id` cannot hold"
                } else {
                    return Ok(id.to_owned());
                };
                Err(BackendError::new(
                    BackendErrorKind::UnsuitableId,
                    format!("the id {:?} cannot be stored: {limit}", shortened(id)),
                )
                .expected("it is not deduplicated"))
            }
        }
    }
}

/// What is stored while a message without an id is being handled: no id is ever stored so.
pub(super) fn nameless(owner: &str) -> String {
    format!("{HASHED}none:{owner}")
}

fn hashed(id: &str) -> String {
    let mut key = String::with_capacity(HASHED.len() + 64);
    key.push_str(HASHED);
    for byte in Sha256::digest(id) {
        // Writing to a String does not fail.
        let _ = write!(key, "{byte:02x}");
    }
    key
}

/// Enough of an id to know it by.
fn shortened(id: &str) -> String {
    let mut short: String = id.chars().take(60).collect();
    if short.len() < id.len() {
        short.push('…');
    }
    short
}

/// A table, perhaps in a schema: names that need no escaping, so they can be put into statements.
#[derive(Clone, Debug)]
pub(in crate::store) struct Table {
    schema: Option<String>,
    name: String,
}

impl Table {
    pub(super) fn new(given: &str) -> Result<Self, ConfigError> {
        let (schema, name) = match given.split_once('.') {
            Some((schema, name)) => (Some(schema), name),
            None => (None, given),
        };
        let word = |word: &str| {
            let mut bytes = word.bytes();
            bytes
                .next()
                .is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
                && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        };
        let fits = word(name)
            && name.len() <= LONGEST_TABLE
            && schema.is_none_or(|schema| word(schema) && schema.len() <= 63);
        if !fits {
            return Err(ConfigError::new(
                "table",
                format!("{given:?}"),
                "letters, digits and underscores that begin with no digit, at most 52 of them, perhaps after a schema and a dot",
            ));
        }
        Ok(Table {
            schema: schema.map(Into::into),
            name: name.into(),
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    #[cfg(any(feature = "mysql", feature = "sqlite"))]
    pub(super) fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// As a statement has it.
    pub(super) fn quoted(&self, quote: char) -> String {
        let name = format!("{quote}{}{quote}", self.name);
        match &self.schema {
            Some(schema) => format!("{quote}{schema}{quote}.{name}"),
            None => name,
        }
    }

    /// The index for the purge.
    pub(super) fn index(&self) -> String {
        format!("{}{INDEX}", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(id: &str) -> String {
        Column::Ours.key(id).unwrap()
    }

    #[test]
    fn what_does_not_fit_is_stored_as_its_hash() {
        let long = "x".repeat(256);
        assert_eq!(
            key(&long),
            "sha256:85e62acd750c4eb56b7b6a1d66dca5bfaac5f062608a1a893410d0288936c09a"
        );
        assert_eq!(
            key("sha256:"),
            "sha256:9fd714ce6f63c3b320c944b70e80a5d105fd2f3e2d30ae2fa81370e223f50d07"
        );
        for id in ["", "a", " a ", "SHA256:x", "sha256", &"é".repeat(127)] {
            assert_eq!(key(id), id);
        }
        for id in [&long, "a\0b", "sha256:x", &"é".repeat(128)] {
            assert!(key(id).starts_with("sha256:"), "{id:?}");
        }
        for id in ["none:7", &nameless("7")] {
            assert_ne!(key(id), nameless("7"));
        }
        // The spelling of a stored hash is an id of its own.
        assert_ne!(key(&key(&long)), key(&long));
    }

    #[test]
    fn a_foreign_column_takes_an_id_verbatim_or_not_at_all() {
        let column = Column::Verbatim {
            chars: Some(3),
            bytes: None,
            nul: false,
        };
        assert_eq!(column.key("ééé").unwrap(), "ééé");
        for id in ["éééé", "a\0"] {
            let error = column.key(id).unwrap_err();
            assert_eq!(error.kind(), BackendErrorKind::UnsuitableId);
            assert!(!error.is_retryable());
        }
        let column = Column::Verbatim {
            chars: None,
            bytes: Some(3),
            nul: true,
        };
        assert!(column.key("éé").is_err());
        assert_eq!(column.key("a\0b").unwrap(), "a\0b");
    }

    #[test]
    fn table_names_need_no_escaping() {
        for good in [
            "seen",
            "_s",
            "Billing_2",
            "shop.billing_seen",
            &"t".repeat(52),
        ] {
            assert!(Table::new(good).is_ok(), "{good}");
        }
        let long = "t".repeat(53);
        for bad in [
            "", "2seen", "a b", "a-b", "a.b.c", ".a", "a.", "a\"b", "a`b", "é", "a;b", "a\0", &long,
        ] {
            let error = Table::new(bad).unwrap_err();
            assert_eq!(error.setting(), "table");
            assert!(error.to_string().contains(&format!("{bad:?}")));
        }
        let table = Table::new("shop.billing").unwrap();
        assert_eq!(table.quoted('"'), r#""shop"."billing""#);
        assert_eq!(table.index(), "billing_expires_at");
    }

    proptest! {
        #[test]
        fn different_ids_are_stored_differently(
            a in "(sha256:)?\\PC{0,3}", b in "(sha256:)?\\PC{0,3}", long in 0usize..300
        ) {
            let (a, b) = (a + &"x".repeat(long), b + &"x".repeat(long));
            prop_assert_eq!(a == b, key(&a) == key(&b));
        }
    }
}
