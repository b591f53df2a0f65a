//! Whether the object store is worth asking: after some failures it is not, for a time that doubles.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Failures that follow one another before the store is left alone.
const FAILURES: u32 = 3;
/// How long it is left alone, at first and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// See the module's text.
#[derive(Default)]
pub(super) struct Breaker(Mutex<Failures>);

#[derive(Default)]
struct Failures {
    /// Those that follow one another.
    count: u32,
    /// Until when nobody asks; then the next one probes, and the others wait for what it finds.
    until: Option<Instant>,
}

impl Breaker {
    fn lock(&self) -> MutexGuard<'_, Failures> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long nobody is to ask; none where somebody may.
    pub fn closed_for(&self) -> Option<Duration> {
        let until = self.lock().until?;
        Some(until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
    }

    /// Takes the right to ask. Where the store was left alone until now, one has it: it is left alone on for all others.
    pub fn admit(&self) -> bool {
        let mut failures = self.lock();
        match failures.until {
            Some(until) if Instant::now() < until => false,
            Some(_) => {
                failures.until = Some(Instant::now() + backoff(failures.count));
                true
            }
            None => true,
        }
    }

    /// It has answered.
    pub fn answered(&self) {
        *self.lock() = Failures::default();
    }

    /// It has not, or said that it cannot. Gives how long it is left alone, where that begins or goes on with this.
    pub fn failed(&self) -> Option<Duration> {
        let mut failures = self.lock();
        failures.count = failures.count.saturating_add(1);
        if failures.count < FAILURES {
            return None;
        }
        let time = backoff(failures.count);
        failures.until = Some(Instant::now() + time);
        Some(time)
    }
}

fn backoff(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(FAILURES).min(16);
    (BACKOFF.0 * 2_u32.pow(doublings)).min(BACKOFF.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_after_some_failures_and_for_longer_each_time() {
        let breaker = Breaker::default();
        assert_eq!((breaker.failed(), breaker.failed(), breaker.closed_for()), (None, None, None));
        assert!(breaker.admit());
        assert_eq!(breaker.failed(), Some(BACKOFF.0));
        assert!(breaker.closed_for().is_some() && !breaker.admit());
        assert_eq!((breaker.failed(), breaker.failed()), (Some(BACKOFF.0 * 2), Some(BACKOFF.0 * 4)));
        assert_eq!((0..40).filter_map(|_| breaker.failed()).max(), Some(BACKOFF.1));
        breaker.answered();
        assert!(breaker.admit() && breaker.closed_for().is_none());
    }
}
