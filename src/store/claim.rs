//! What a claim is made of: who holds it, for how long, and what a store answers.

use super::Store;
use crate::{error::ConfigError, id::MessageId};
use std::{fmt, time::Duration};

/// A [`Store`] that also records which messages somebody is busy with.
///
/// # Contract
///
/// * Each operation is one atomic step on the record of one id, whoever else works on it: of many
///   who claim a free id at once, exactly one wins.
/// * A record that is claimed says nothing of an effect: [`seen`](Store::seen) answers no.
/// * A claim ends with its lease, in the store's own clock, and an id whose claim has ended can be
///   claimed by anybody. There is no claim without an end.
/// * `claim` by the owner who holds the id is a success, and the lease starts anew: a claim
///   whose answer was lost may be sent again.
/// * `renew` and `release` touch only a record that is claimed, by this owner, and not past its end.
///   Otherwise they change nothing and answer false.
/// * `complete` marks done *whatever the owner*, since the effect did happen: also an id that is free,
///   done, or claimed by somebody else.
/// * [`remember`](Store::remember) and [`forget`](Store::forget) work on a claimed id as on any other.
/// * An error means *unknown*: the command may have taken effect, and may still do so later.
///
/// With the feature `testing`, `testing::claim_store_contract` has it as a test.
pub trait ClaimStore: Store {
    /// Claims this message for `owner`, if nobody else holds it and it is not done.
    ///
    /// What has to be waited for, such as a lock that somebody holds on the record, is waited for so long
    /// and no longer, and then the answer is [`Claim::Busy`].
    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<Claim>;

    /// Has the lease start anew. Answers whether `owner` held the claim.
    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<bool>;

    /// Records that this message had its effect. Answers whether `owner` still held the claim.
    ///
    /// Sent again after its answer was lost, it may answer either.
    fn complete(&self, id: &MessageId, owner: Owner) -> Self::Future<bool>;

    /// Gives the claim up, so that the next delivery runs at once. Answers whether `owner` held it.
    fn release(&self, id: &MessageId, owner: Owner) -> Self::Future<bool>;
}

/// What became of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Claim {
    /// It is held now, until the lease ends.
    Won,
    /// The message had its effect.
    Done,
    /// Somebody else is busy with the message.
    Busy {
        /// When that claim ends unless it is renewed; how long to wait where a store cannot tell.
        retry_after: Duration,
    },
}

// ===== the owner =====

/// Who holds a claim: 128 bits that nobody else has.
///
/// Each call of a service takes a fresh one. It is shown as 32 lower-case hex digits, as the shared
/// stores have it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner(u128);

impl Owner {
    /// A fresh owner, of random bits.
    ///
    /// # Panics
    ///
    /// When the operating system gives no random bytes.
    #[cfg(feature = "tokio")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tokio")))]
    #[must_use]
    pub fn random() -> Self {
        Owner(rand::random())
    }

    /// The owner of these bits.
    #[must_use]
    pub const fn from_bits(bits: u128) -> Self {
        Owner(bits)
    }

    /// The bits of this owner.
    #[must_use]
    pub const fn to_bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({self})")
    }
}

// ===== the lease =====

/// How long a claim is held without a sign of life, and how often one is given.
///
/// When a worker dies, its messages can be run by others once their lease has ended. While it lives, its
/// claims are renewed, so a lease says nothing of how long a handler may run. It has to be longer than
/// what may hold a renewal up: the slowest answer of the store, a failover of it, a pause of the
/// process. 30 to 60 seconds is usual.
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::store::Lease;
///
/// let lease = Lease::new(Duration::from_secs(60))?;
/// assert_eq!(lease.renewed_every(), Duration::from_secs(20));
///
/// let error = Lease::new(Duration::ZERO).unwrap_err();
/// assert_eq!(error.to_string(), "`lease` is 0ns; expected 10 ms to 365 days");
/// # Ok::<_, tower_idempotency::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    length: Duration,
    renew_every: Duration,
}

impl Lease {
    /// The shortest lease: every store here can hold it, and a renewal in time fits into it.
    pub const MIN: Duration = Duration::from_millis(10);

    /// The longest lease. What is held for longer is renewed.
    pub const MAX: Duration = Duration::from_secs(365 * 24 * 3600);

    /// A lease of this length, rounded up to whole milliseconds, and renewed before a third of it has
    /// passed.
    ///
    /// # Errors
    ///
    /// Below [`MIN`](Self::MIN), such as 0, and above [`MAX`](Self::MAX).
    pub fn new(length: Duration) -> Result<Self, ConfigError> {
        if !(Self::MIN..=Self::MAX).contains(&length) {
            return Err(ConfigError::new(
                "lease",
                format!("{length:?}"),
                "10 ms to 365 days",
            ));
        }
        let length = Duration::from_millis(length.as_nanos().div_ceil(1_000_000) as u64);
        Ok(Lease {
            length,
            renew_every: length / 3,
        })
    }

    /// How long it is not renewed at most, a third of its length unless set: a claim is renewed in the last
    /// quarter of that, and not more than five seconds before its end.
    ///
    /// # Errors
    ///
    /// Below 1 ms, and above half of the lease, where one late renewal would lose the claim.
    pub fn renew_every(self, interval: Duration) -> Result<Self, ConfigError> {
        if !(Duration::from_millis(1)..=self.length / 2).contains(&interval) {
            return Err(ConfigError::new(
                "renew_every",
                format!("{interval:?}"),
                "1 ms to half of the lease",
            ));
        }
        Ok(Lease {
            renew_every: interval,
            ..self
        })
    }

    /// How long a claim is held without a renewal.
    #[must_use]
    pub const fn length(&self) -> Duration {
        self.length
    }

    /// How long a claim is not renewed at most, while its store answers.
    #[must_use]
    pub const fn renewed_every(&self) -> Duration {
        self.renew_every
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_that_cannot_be_held_is_refused() {
        let length = |nanos| Lease::new(Duration::from_nanos(nanos)).map(|lease| lease.length());
        for nanos in [0, 1, 9_999_999] {
            let error = length(nanos).unwrap_err();
            assert_eq!(error.setting(), "lease");
            assert!(error.to_string().contains("10 ms to 365 days"), "{error}");
        }
        assert!(Lease::new(Lease::MAX + Duration::from_nanos(1)).is_err());
        assert!(Lease::new(Duration::MAX).is_err());
        assert_eq!(length(10_000_000), Ok(Duration::from_millis(10)));
        assert_eq!(length(10_000_001), Ok(Duration::from_millis(11)));
        assert_eq!(Lease::new(Lease::MAX).unwrap().length(), Lease::MAX);
    }

    #[test]
    fn a_renewal_comes_before_half_of_the_lease() {
        let lease = Lease::new(Duration::from_secs(3)).unwrap();
        assert_eq!(lease.renewed_every(), Duration::from_secs(1));
        let every = |interval| lease.renew_every(interval).map(|it| it.renewed_every());
        let half = Duration::from_millis(1500);
        assert_eq!(every(half), Ok(half));
        for interval in [
            Duration::ZERO,
            Duration::from_micros(999),
            half + Duration::from_nanos(1),
            Duration::MAX,
        ] {
            assert_eq!(every(interval).unwrap_err().setting(), "renew_every");
        }
    }

    #[test]
    fn an_owner_is_32_lower_case_hex_digits() {
        let owner = Owner::from_bits(0xAB << 8);
        assert_eq!(owner.to_string(), "0000000000000000000000000000ab00");
        assert_eq!(owner.to_string(), format!("{:032x}", owner.to_bits()));
    }

    #[test]
    #[cfg(feature = "tokio")]
    fn owners_differ() {
        let owners: std::collections::HashSet<_> = (0..1000).map(|_| Owner::random()).collect();
        assert_eq!(owners.len(), 1000);
    }
}
