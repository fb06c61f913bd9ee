//! Who is busy with which message.

use crate::{id::MessageId, store::Owner};
use hashbrown::HashTable;

/// Below this, room that was made stays.
const SMALL: usize = 1024;

/// The claims of one shard. They are few, and no capacity evicts them. Times are nanoseconds.
#[derive(Default)]
pub(super) struct Claims {
    table: HashTable<Held>,
}

struct Held {
    id: MessageId,
    owner: Owner,
    until: u64,
}

impl Claims {
    /// Holds an id until `end`, or answers until when somebody else does.
    ///
    /// `hash` is that of the id, by `hasher`.
    pub(super) fn claim(
        &mut self,
        hash: u64,
        id: &MessageId,
        owner: Owner,
        now: u64,
        end: u64,
        hasher: impl Fn(&MessageId) -> u64,
    ) -> Option<u64> {
        if let Some(held) = self.table.find_mut(hash, |held| held.id == *id) {
            if held.owner != owner && now < held.until {
                return Some(held.until);
            }
            held.owner = owner;
            held.until = end;
            return None;
        }
        self.make_room(now, &hasher);
        let held = Held {
            id: id.clone(),
            owner,
            until: end,
        };
        self.table
            .insert_unique(hash, held, |held| hasher(&held.id));
        None
    }

    /// Answers whether `owner` held it.
    pub(super) fn renew(
        &mut self,
        hash: u64,
        id: &MessageId,
        owner: Owner,
        now: u64,
        end: u64,
    ) -> bool {
        match self.table.find_mut(hash, |held| held.id == *id) {
            Some(held) if held.owner == owner && now < held.until => {
                held.until = end;
                true
            }
            _ => false,
        }
    }

    /// Answers whether `owner` held it. Leaves what is not his.
    pub(super) fn release(&mut self, hash: u64, id: &MessageId, owner: Owner, now: u64) -> bool {
        match self.table.find_entry(hash, |held| held.id == *id) {
            Ok(entry) if entry.get().owner == owner && now < entry.get().until => {
                entry.remove();
                true
            }
            _ => false,
        }
    }

    /// Ends a claim, whoever held it: who, and until when.
    pub(super) fn end(&mut self, hash: u64, id: &MessageId) -> Option<(Owner, u64)> {
        if self.table.is_empty() {
            return None;
        }
        let entry = self.table.find_entry(hash, |held| held.id == *id).ok()?;
        let (held, _) = entry.remove();
        Some((held.owner, held.until))
    }

    /// Rids a full table of what has ended, before it grows: claims of calls that never came back.
    fn make_room(&mut self, now: u64, hasher: impl Fn(&MessageId) -> u64) {
        if self.table.len() < self.table.capacity() {
            return;
        }
        self.table.retain(|held| now < held.until);
        let (len, capacity) = (self.table.len(), self.table.capacity());
        if len > capacity / 2 {
            self.table.reserve(len.max(1), |held| hasher(&held.id));
        } else if len < capacity / 8 && capacity > SMALL {
            self.table.shrink_to(len * 2, |held| hasher(&held.id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(id: &MessageId) -> u64 {
        // Bad on purpose: ids meet.
        id.len() as u64
    }

    #[test]
    fn what_has_ended_makes_room() {
        let mut claims = Claims::default();
        let mut most = 0;
        for number in 0..100_000_u64 {
            let id = MessageId::random();
            let number_hash = id.as_uuid().unwrap_or(0) as u64;
            let by_value = |id: &MessageId| id.as_uuid().unwrap_or(0) as u64;
            // Each of them is left behind, and ends 100 claims later.
            let owner = Owner::from_bits(u128::from(number));
            let busy = claims.claim(number_hash, &id, owner, number, number + 100, by_value);
            assert_eq!(busy, None);
            most = most.max(claims.table.capacity());
        }
        assert!(
            most <= 1000,
            "room for {most} claims of which 100 are alive"
        );
    }

    #[test]
    fn a_burst_gives_its_memory_back() {
        let mut claims = Claims::default();
        let by_value = |id: &MessageId| id.as_uuid().unwrap_or(0) as u64;
        let mut claim = |now, end| {
            let id = MessageId::random();
            claims.claim(by_value(&id), &id, Owner::from_bits(1), now, end, by_value);
            claims.table.capacity()
        };
        let burst = (0..20_000).map(|_| claim(0, 1)).max();
        assert!(burst >= Some(20_000));
        let after = (0..40_000).map(|_| claim(1, 1)).last();
        assert!(after <= Some(SMALL * 8), "{after:?}");
    }

    #[test]
    fn ids_of_one_hash_are_told_apart() {
        let mut claims = Claims::default();
        let (a, b) = (MessageId::from("a"), MessageId::from("b"));
        let (mine, other) = (Owner::from_bits(1), Owner::from_bits(2));
        assert_eq!(claims.claim(1, &a, mine, 0, 10, hash), None);
        assert_eq!(claims.claim(1, &b, other, 0, 20, hash), None);
        assert_eq!(claims.claim(1, &b, mine, 0, 10, hash), Some(20));
        assert!(!claims.release(1, &b, mine, 0));
        assert!(!claims.renew(1, &a, other, 0, 30));
        assert_eq!(claims.end(1, &a), Some((mine, 10)));
        assert_eq!(claims.end(1, &a), None);
        assert!(claims.release(1, &b, other, 19));
    }

    #[test]
    fn a_claim_holds_until_its_end_and_no_longer() {
        let mut claims = Claims::default();
        let id = MessageId::from("a");
        let (mine, other) = (Owner::from_bits(1), Owner::from_bits(2));
        assert_eq!(claims.claim(1, &id, mine, 0, 10, hash), None);
        assert_eq!(claims.claim(1, &id, other, 9, 19, hash), Some(10));
        // At its end it is over, for its owner as well.
        assert!(!claims.renew(1, &id, mine, 10, 20));
        assert!(!claims.release(1, &id, mine, 10));
        assert_eq!(claims.claim(1, &id, other, 10, 20, hash), None);
        // Sent again, it starts anew.
        assert_eq!(claims.claim(1, &id, other, 15, 25, hash), None);
        assert_eq!(claims.claim(1, &id, mine, 20, 30, hash), Some(25));
        // Over, but nobody took it: its owner may.
        assert_eq!(claims.claim(1, &id, other, 40, 50, hash), None);
    }
}
