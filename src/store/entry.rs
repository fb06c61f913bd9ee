//! What a record says of a message, for whoever has to find out why it was skipped.

use std::time::{Duration, SystemTime};

/// What is recorded of one message, as [`RedisStore::entry`](crate::RedisStore::entry) and
/// [`SqlStore::entry`](crate::store::sql::SqlStore::entry) find it.
///
/// It is what was there when it was read: nothing is decided by it, which is what a
/// [claim](crate::ClaimStore::claim) is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub(super) state: EntryState,
    pub(super) owner: Option<String>,
    pub(super) since: Option<SystemTime>,
    pub(super) expires_in: Option<Duration>,
}

/// How a message stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EntryState {
    /// It had its effect: the next delivery is skipped.
    Done,
    /// Somebody is at it, or was: until the claim ends, the next delivery is parked.
    Claimed,
    /// Something is recorded that is neither mark nor claim, by somebody else. Claims take it for
    /// a claim of theirs; without claims the next delivery runs.
    Foreign,
}

impl Entry {
    /// How the message stands.
    #[must_use]
    pub fn state(&self) -> EntryState {
        self.state
    }

    /// Who holds the claim, or held it when the message was done: the hex digits of an
    /// [`Owner`](crate::Owner).
    ///
    /// `None` when no claim made the record, when it was not its owner any more that marked the
    /// message done, and where the record does not keep it: Redis of what is done, BabelQueue's
    /// PHP SDK of its claims.
    #[must_use]
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// When the message got into this state, in the clock of the server. `None` for Redis, which
    /// does not keep it.
    #[must_use]
    pub fn since(&self) -> Option<SystemTime> {
        self.since
    }

    /// How long from now the record lasts; `None` for ever.
    ///
    /// Zero: it is over, and the row is still there for a purge to delete. Such a message counts as
    /// one that was never recorded.
    #[must_use]
    pub fn expires_in(&self) -> Option<Duration> {
        self.expires_in
    }
}

/// How many messages a record holds, as [`RedisStore::stats`](crate::RedisStore::stats) and
/// [`SqlStore::stats`](crate::store::sql::SqlStore::stats) count them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub(super) count: u64,
    pub(super) claimed: u64,
    pub(super) expired: u64,
    pub(super) oldest: Option<SystemTime>,
}

impl Stats {
    /// How many messages are recorded, those that are claimed among them and those that are over not.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// How many of them are not done.
    #[must_use]
    pub fn claimed(&self) -> u64 {
        self.claimed
    }

    /// How many rows are over and wait for a purge. 0 for Redis, which drops keys by itself.
    #[must_use]
    pub fn expired(&self) -> u64 {
        self.expired
    }

    /// Since when the oldest of them is as it is, in the clock of the server. `None` when there are
    /// none, and for Redis, which does not keep it.
    #[must_use]
    pub fn oldest(&self) -> Option<SystemTime> {
        self.oldest
    }
}

// ===== what the SQL stores read =====

#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
impl Entry {
    /// From a row; `left` as long as it lasts, in microseconds.
    pub(super) fn of_row(
        state: &str,
        owner: Option<String>,
        since: i64,
        left: Option<i64>,
    ) -> Self {
        Entry {
            state: match state {
                "done" => EntryState::Done,
                "claimed" => EntryState::Claimed,
                _ => EntryState::Foreign,
            },
            owner,
            since: instant(since),
            expires_in: left.map(|left| Duration::from_micros(left.max(0) as u64)),
        }
    }
}

#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
impl Stats {
    /// From the answer of a count.
    pub(super) fn of_row(count: i64, claimed: i64, expired: i64, oldest: Option<i64>) -> Self {
        let number = |count: i64| u64::try_from(count).unwrap_or(0);
        Stats {
            count: number(count),
            claimed: number(claimed),
            expired: number(expired),
            oldest: oldest.and_then(instant),
        }
    }
}

/// Of microseconds since 1970, where there is such an instant.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
fn instant(micros: i64) -> Option<SystemTime> {
    let length = Duration::from_micros(micros.unsigned_abs());
    if micros < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(length)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(length)
    }
}
