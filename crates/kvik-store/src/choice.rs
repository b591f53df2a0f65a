//! Whether blocks are fetched or computed again: what a get would take, against what its caller says computing takes.
//!
//! Invariants:
//! - Choosing sends nothing and waits for nothing: it compares with what was measured before.
//! - What the engine has measured is of single transfers, of which a get has several at a time, and sums what they
//!   bring. So its estimate is multiplied by what earlier gets have taken to what was estimated of them ([`Gauge`]).
//! - What is unknown is fetched: so it becomes known. And of what computing would be faster at, some is fetched all the
//!   same, as nothing else would tell that fetching has become faster: the second, then after 2, 4 and 8 more, and from
//!   then on one in [`REFRESH`]. So an estimate that rests on one unlucky transfer does not last.

use crate::sync::lock;
use kvik_core::EngineId;
use kvik_engine::{Engine, Estimate};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Of so many choices against fetching one is for it, when as many as that have found that it takes longer.
const REFRESH: u64 = 16;
/// How much the gets before count when one has ended.
const KEEP: f64 = 0.75;
/// Nothing is believed to be further from its estimate.
const FURTHEST: f64 = 16.0;

/// Why it was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Fetching takes no longer than computing.
    Faster,
    /// Nothing was measured yet on the present connection.
    Unknown,
    /// Fetching takes longer by what is known, and is tried to see whether it still does.
    Refresh,
    /// Fetching takes longer.
    Slower,
    /// The store does not answer at present.
    Unavailable,
}

impl Reason {
    /// All of them, in the order in which they are counted.
    pub const ALL: [Reason; 5] =
        [Reason::Faster, Reason::Unknown, Reason::Refresh, Reason::Slower, Reason::Unavailable];

    /// As it is called in figures.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Faster => "faster",
            Reason::Unknown => "unknown",
            Reason::Refresh => "refresh",
            Reason::Slower => "slower",
            Reason::Unavailable => "unavailable",
        }
    }

    /// Whether the blocks are to be fetched.
    pub fn fetches(self) -> bool {
        matches!(self, Reason::Faster | Reason::Unknown | Reason::Refresh)
    }
}

/// What was chosen, and by which figures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Why; it says what, too ([`Reason::fetches`]).
    pub reason: Reason,
    /// Bytes that a get would bring.
    pub bytes: u64,
    /// What the engine has measured says that they would take; none where that is unknown.
    pub estimate: Option<Estimate>,
    /// The same for a get, by what earlier gets took: what was compared.
    pub fetch: Option<Duration>,
    /// How long computing takes, as the caller has said.
    pub recompute: Duration,
}

/// The choices of a client so far, and what its gets have taken.
#[derive(Default)]
pub(crate) struct Choices {
    counts: [AtomicU64; Reason::ALL.len()],
    /// Seconds that gets took for each that was estimated; none before the first get that could be estimated.
    ratio: Mutex<Option<f64>>,
    against: Mutex<Against>,
}

/// The choices against fetching since one was for it.
#[derive(Clone, Copy)]
struct Against {
    /// How many there were since the last attempt.
    since: u64,
    /// How many there are before the next one.
    wait: u64,
}

impl Default for Against {
    fn default() -> Against {
        Against { since: 0, wait: 1 }
    }
}

impl Against {
    /// One more: whether fetching is tried all the same.
    fn again(&mut self) -> Reason {
        if self.since < self.wait {
            self.since += 1;
            return Reason::Slower;
        }
        *self = Against { since: 0, wait: (2 * self.wait).min(REFRESH - 1) };
        Reason::Refresh
    }
}

/// Tells, when a get has ended, how long it has taken beside what was estimated of it: at its beginning, or, of the
/// first get of a connection, at its end.
pub(crate) struct Gauge {
    pub choices: Arc<Choices>,
    pub engine: Engine,
    pub peer: EngineId,
    pub estimate: Option<Estimate>,
    pub waited: Duration,
}

impl Gauge {
    /// It has ended with so many bytes.
    pub fn ended(self, bytes: u64) {
        let now = || self.engine.estimate(self.peer, bytes).ok().flatten();
        if let Some(estimate) = self.estimate.or_else(now) {
            self.choices.took(bytes, estimate, self.waited);
        }
    }
}

impl Choices {
    /// Chooses, and counts it. `estimate` is none where nothing was measured.
    pub fn choose(&self, bytes: u64, estimate: Option<Estimate>, recompute: Duration) -> Choice {
        let ratio = lock(&self.ratio).unwrap_or(1.0);
        let fetch = estimate.map(|estimate| estimate.total.mul_f64(ratio));
        let mut against = lock(&self.against);
        let reason = match fetch {
            Some(fetch) if fetch > recompute => against.again(),
            known => {
                *against = Against::default();
                if known.is_some() { Reason::Faster } else { Reason::Unknown }
            }
        };
        drop(against);
        self.count(reason);
        Choice { reason, bytes, estimate, fetch, recompute }
    }

    /// Of a get that brought so many bytes this was estimated, and its caller waited for so long.
    fn took(&self, bytes: u64, estimate: Estimate, waited: Duration) {
        let Estimate { start, bytes_per_second, queued, .. } = estimate;
        let expected = start.as_secs_f64() + (queued + bytes) as f64 / bytes_per_second;
        let found = (waited.as_secs_f64() / expected).clamp(1.0 / FURTHEST, FURTHEST);
        if bytes > 0 && found.is_finite() {
            let mut ratio = lock(&self.ratio);
            *ratio = Some(ratio.map_or(found, |ratio| ratio * KEEP + found * (1.0 - KEEP)));
        }
    }

    /// There is no store to choose.
    pub fn unavailable(&self, bytes: u64, recompute: Duration) -> Choice {
        self.count(Reason::Unavailable);
        Choice { reason: Reason::Unavailable, bytes, estimate: None, fetch: None, recompute }
    }

    /// How often each was chosen, by name.
    pub fn counts(&self) -> [(&'static str, u64); Reason::ALL.len()] {
        Reason::ALL.map(|reason| (reason.name(), self.of(reason)))
    }

    fn of(&self, reason: Reason) -> u64 {
        self.counts[reason as usize].load(Ordering::Relaxed)
    }

    fn count(&self, reason: Reason) {
        self.counts[reason as usize].fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPUTING: Duration = Duration::from_millis(100);

    fn estimate(millis: u64) -> Option<Estimate> {
        let total = Duration::from_millis(millis);
        Some(Estimate { start: Duration::ZERO, total, bytes_per_second: 1e9, queued: 0, samples: 3 })
    }

    #[test]
    fn what_is_unknown_or_faster_is_fetched() {
        let choices = Choices::default();
        let reason = |estimate| choices.choose(1 << 20, estimate, COMPUTING).reason;
        assert_eq!(reason(None), Reason::Unknown);
        assert_eq!(reason(estimate(99)), Reason::Faster);
        assert_eq!(reason(estimate(100)), Reason::Faster);
        assert_eq!(reason(estimate(101)), Reason::Slower);
        assert_eq!(choices.unavailable(1, COMPUTING).reason, Reason::Unavailable);
        let counted = choices.counts().map(|(_, count)| count);
        assert_eq!(counted, [2, 1, 0, 1, 1]);
    }

    #[test]
    fn gets_that_take_less_than_estimated_correct_it() {
        let choices = Choices::default();
        // All of them move 1e9 bytes a second.
        let took = |bytes, waited| choices.took(bytes, estimate(0).unwrap(), waited);
        assert_eq!(choices.choose(1, estimate(200), COMPUTING).reason, Reason::Slower);
        took(200_000_000, Duration::from_millis(100));
        let choice = choices.choose(1, estimate(200), COMPUTING);
        assert_eq!((choice.reason, choice.fetch), (Reason::Faster, Some(Duration::from_millis(100))));
        // One that took ten times as long counts for a quarter; one that brought nothing, for nothing.
        took(100_000_000, Duration::from_secs(1));
        took(0, Duration::from_secs(1));
        let fetch = choices.choose(1, estimate(1000), COMPUTING).fetch.unwrap();
        assert!((fetch.as_secs_f64() - (0.5 * 0.75 + 10.0 * 0.25)).abs() < 1e-6, "{fetch:?}");
    }

    #[test]
    fn fetching_is_tried_again_ever_less_often() {
        let choices = Choices::default();
        let tried = |count: usize| -> Vec<usize> {
            (0..count).filter(|_| choices.choose(1, estimate(200), COMPUTING).reason.fetches()).collect()
        };
        let once = vec![1, 4, 9, 18, 34, 50];
        assert_eq!(tried(60), once);
        // Fetching has been faster meanwhile: what is slower after that may be chance again.
        assert_eq!(choices.choose(1, estimate(50), COMPUTING).reason, Reason::Faster);
        assert_eq!(tried(60), once);
    }
}
