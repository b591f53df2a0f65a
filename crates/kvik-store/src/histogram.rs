//! Counts of times below fixed bounds: what a quantile is read from.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bounds of what an operation takes, in seconds: three a decade, as those of the engine's transfers.
const LATENCIES: [f64; 18] = [
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0, 30.0,
];
/// Bounds of how long a block lay without being read, in seconds: the store's clock has no finer ones.
const AGES: [f64; 14] =
    [1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21_600.0, 86_400.0];
/// One more than the most bounds: the last is for all above.
const BUCKETS: usize = LATENCIES.len() + 1;

/// A histogram that many threads may add to. To add costs two relaxed additions and no allocation.
pub(crate) struct Histogram {
    bounds: &'static [f64],
    buckets: [AtomicU64; BUCKETS],
    micros: AtomicU64,
}

impl Histogram {
    /// Of what operations take.
    pub fn of_latencies() -> Histogram {
        Histogram::new(&LATENCIES)
    }

    /// Of how long blocks lie.
    pub fn of_ages() -> Histogram {
        Histogram::new(&AGES)
    }

    fn new(bounds: &'static [f64]) -> Histogram {
        Histogram { bounds, buckets: Default::default(), micros: AtomicU64::new(0) }
    }

    pub fn add(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = self.bounds.partition_point(|bound| *bound < seconds);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// Each bound with how many lie between it and the one before, infinity last.
    pub fn counts(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        bounds.zip(&self.buckets).map(|(bound, count)| (bound, count.load(Ordering::Relaxed)))
    }

    /// The sum of all, in seconds.
    pub fn sum(&self) -> f64 {
        self.micros.load(Ordering::Relaxed) as f64 / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_at_a_bound_is_below_it() {
        let histogram = Histogram::of_ages();
        for seconds in [0, 1, 2, 86_400, 86_401, 1 << 40] {
            histogram.add(Duration::from_secs(seconds));
        }
        let counts: Vec<(f64, u64)> = histogram.counts().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counts, [(1.0, 2), (2.0, 1), (86_400.0, 1), (f64::INFINITY, 2)]);
        assert_eq!(histogram.counts().count(), AGES.len() + 1);
        assert!((histogram.sum() - (172_804.0 + (1u64 << 40) as f64)).abs() < 1e-3);
        assert!(LATENCIES.is_sorted() && AGES.is_sorted());
    }
}
