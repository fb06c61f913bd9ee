//! How long a shared record keeps an id.

use crate::error::ConfigError;
use std::time::Duration;

/// What the stores keep ids for unless told otherwise.
pub(crate) const DEFAULT_TTL: Duration = Duration::from_secs(24 * 3600);

/// Above this an id is kept for ever: half of what a 64-bit count of microseconds holds, so that a
/// server's clock can be added to it.
const LONGEST: Duration = Duration::from_micros(i64::MAX as u64 / 2);

/// A TTL as servers take it: rounded up, never 0, `None` for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ttl(Option<Duration>);

impl Ttl {
    /// Rounds up to whole milliseconds, which is what every server can do.
    pub(crate) fn new(ttl: Option<Duration>) -> Result<Self, ConfigError> {
        let Some(ttl) = ttl else {
            return Ok(Ttl(None));
        };
        if ttl.is_zero() {
            return Err(ConfigError::new(
                "ttl",
                "0",
                "a time above zero, or None for ever",
            ));
        }
        if ttl > LONGEST {
            return Ok(Ttl(None));
        }
        let millis = ttl.as_nanos().div_ceil(1_000_000) as u64;
        Ok(Ttl(Some(Duration::from_millis(millis))))
    }

    /// In milliseconds; `None` for ever.
    #[cfg(feature = "redis")]
    pub(crate) fn millis(self) -> Option<u64> {
        self.0.map(|ttl| ttl.as_millis() as u64)
    }

    /// In microseconds; `None` for ever.
    #[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
    pub(crate) fn micros(self) -> Option<i64> {
        self.0.map(|ttl| ttl.as_micros() as i64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn length(ttl: Duration) -> Option<Duration> {
        Ttl::new(Some(ttl)).unwrap().0
    }

    #[test]
    fn a_ttl_is_rounded_up_and_never_zero() {
        assert!(Ttl::new(Some(Duration::ZERO)).is_err());
        for (nanos, millis) in [
            (1, 1),
            (999_999, 1),
            (1_000_000, 1),
            (1_000_001, 2),
            (1_500_000, 2),
        ] {
            assert_eq!(
                length(Duration::from_nanos(nanos)),
                Some(Duration::from_millis(millis))
            );
        }
    }

    #[test]
    fn a_huge_ttl_is_for_ever() {
        assert_eq!(Ttl::new(None), Ok(Ttl(None)));
        for ttl in [
            Duration::MAX,
            Duration::from_secs(u64::MAX),
            Duration::from_millis(i64::MAX as u64),
            Duration::from_millis(i64::MAX as u64 + 1),
        ] {
            assert_eq!(length(ttl), None);
        }
        // Ten thousand years are not.
        let long = Duration::from_secs(10_000 * 365 * 24 * 3600);
        assert_eq!(length(long), Some(long));
    }
}
