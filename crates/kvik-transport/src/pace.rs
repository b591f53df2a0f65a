//! What a link is measured to do: `t = a + bytes / B`.
//!
//! Each transfer that has ended is a point (bytes, time). The line through the points is found by least squares, with
//! older points counting less and less. As long as all points are of about one size, there is no telling the start
//! from the rest: then the line goes through the origin.

use std::time::Duration;

/// How much the points before count when one is added.
const KEEP: f64 = 0.9;
/// Points have two sizes when their spread is more than this part of their mean.
const SPREAD: f64 = 0.05;

/// How long a transfer would take, by what was measured with this peer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Before the first byte.
    pub start: Duration,
    /// All of it.
    pub total: Duration,
    /// From then on.
    pub bytes_per_second: f64,
    /// Bytes that go before it, and that `total` counts too; none unless they were asked for.
    pub queued: u64,
    /// Transfers that it comes of.
    pub samples: u64,
}

impl Estimate {
    /// The same behind so many bytes that go first.
    pub fn behind(self, queued: u64) -> Estimate {
        let more = Duration::try_from_secs_f64(queued as f64 / self.bytes_per_second);
        let total = self.total.saturating_add(more.unwrap_or(Duration::MAX));
        Estimate { total, queued: self.queued.saturating_add(queued), ..self }
    }
}

/// The transfers of a link so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pace {
    samples: u64,
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl Pace {
    /// A transfer has moved so much in this time.
    pub fn add(&mut self, bytes: u64, took: Duration) {
        let (x, y) = (bytes as f64, took.as_secs_f64());
        if bytes == 0 || y <= 0.0 {
            return;
        }
        for (sum, new) in [
            (&mut self.weight, 1.0),
            (&mut self.x, x),
            (&mut self.y, y),
            (&mut self.xx, x * x),
            (&mut self.xy, x * y),
        ] {
            *sum = *sum * KEEP + new;
        }
        self.samples += 1;
    }

    /// How long so many bytes would take; none before anything was measured.
    pub fn estimate(&self, bytes: u64) -> Option<Estimate> {
        if self.samples == 0 {
            return None;
        }
        let (start, slope) = self.line();
        let (bytes_per_second, samples) = (1.0 / slope, self.samples);
        let total = Duration::try_from_secs_f64(start + bytes as f64 * slope).unwrap_or(Duration::MAX);
        let start = Duration::from_secs_f64(start);
        Some(Estimate { start, total, bytes_per_second, queued: 0, samples })
    }

    /// Seconds before the first byte, and for each byte.
    fn line(&self) -> (f64, f64) {
        let (mean_x, mean_y) = (self.x / self.weight, self.y / self.weight);
        let spread = self.xx / self.weight - mean_x * mean_x;
        let through_origin = (0.0, mean_y / mean_x);
        if spread <= (SPREAD * mean_x).powi(2) {
            return through_origin;
        }
        let slope = (self.xy / self.weight - mean_x * mean_y) / spread;
        let start = mean_y - slope * mean_x;
        // Noise can tilt it so that it means nothing.
        if slope > 0.0 && (0.0..1e6).contains(&start) { (start, slope) } else { through_origin }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn what_goes_before_takes_its_time_too() {
        let mut pace = Pace::default();
        pace.add(1_000_000, Duration::from_secs(1));
        let alone = pace.estimate(2_000_000).unwrap();
        let behind = alone.behind(3_000_000);
        assert_eq!((alone.queued, behind.queued, behind.start), (0, 3_000_000, alone.start));
        assert!((behind.total.as_secs_f64() - 5.0).abs() < 1e-6, "{behind:?}");
        assert_eq!(behind.behind(u64::MAX).queued, u64::MAX);
    }

    #[test]
    fn nothing_is_estimated_before_it_was_measured() {
        let mut pace = Pace::default();
        pace.add(0, micros(5));
        pace.add(5, Duration::ZERO);
        assert_eq!(pace.estimate(100), None);
    }

    #[test]
    fn start_and_bandwidth_are_told_apart_once_sizes_differ() {
        let mut pace = Pace::default();
        // 100 µs, and 1 GB/s.
        pace.add(1_000_000, micros(1_100));
        let one = pace.estimate(2_000_000).unwrap();
        assert_eq!((one.start, one.samples), (Duration::ZERO, 1));
        assert!((one.total.as_secs_f64() - 2.2e-3).abs() < 1e-6, "{one:?}");
        for _ in 0..20 {
            pace.add(1_000_000, micros(1_100));
            pace.add(10_000, micros(110));
        }
        let both = pace.estimate(4_000_000).unwrap();
        assert!((both.start.as_secs_f64() - 1e-4).abs() < 1e-7, "{both:?}");
        assert!((both.bytes_per_second / 1e9 - 1.0).abs() < 1e-3, "{both:?}");
        assert!((both.total.as_secs_f64() - 4.1e-3).abs() < 1e-5, "{both:?}");
    }

    #[test]
    fn what_is_old_counts_less() {
        let mut pace = Pace::default();
        for bytes in [1 << 20, 1 << 16].repeat(100) {
            pace.add(bytes, Duration::from_secs_f64(bytes as f64 / 1e9));
        }
        for bytes in [1 << 20, 1 << 16].repeat(50) {
            pace.add(bytes, Duration::from_secs_f64(bytes as f64 / 2e9));
        }
        let now = pace.estimate(1 << 20).unwrap();
        assert!((now.bytes_per_second / 2e9 - 1.0).abs() < 0.01, "{now:?}");
    }
}
