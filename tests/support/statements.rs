//! Which statements the driver says it has sent, and what the crate warns of.

#![allow(dead_code, unreachable_pub, missing_docs)]

use std::{
    fmt::{self, Write},
    sync::{Mutex, Once},
};
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
    subscriber::set_global_default,
};

/// All of this process, each with its target.
static TOLD: Mutex<Vec<(&str, String)>> = Mutex::new(Vec::new());

/// What is told from some instant on.
pub struct Log(usize);

/// From now on.
pub fn log() -> Log {
    static BEGIN: Once = Once::new();
    BEGIN.call_once(|| set_global_default(Listener).unwrap());
    Log(TOLD.lock().unwrap().len())
}

impl Log {
    /// How many statements there were about this table.
    pub fn statements(&self, table: &str) -> usize {
        self.count("sqlx::query", table)
    }

    /// How many warnings there were about it.
    pub fn warnings(&self, table: &str) -> usize {
        self.count("tower_idempotency", table)
    }

    fn count(&self, target: &str, table: &str) -> usize {
        let told = TOLD.lock().unwrap();
        let such = |it: &&(&str, String)| it.0 == target && it.1.contains(table);
        told[self.0..].iter().filter(such).count()
    }
}

struct Listener;

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        ["sqlx::query", "tower_idempotency"].contains(&metadata.target())
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        let told = (event.metadata().target(), text.0);
        TOLD.lock().unwrap().push(told);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = write!(self.0, "{field}={value:?} ");
    }
}
