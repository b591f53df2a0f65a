//! Whether the disk below a store gives anything at present.

use crate::sync::lock;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A disk that was asked and has given nothing for so long has stopped: what is only there is a miss until it gives
/// something again. So is a block whose read takes so long, whatever else the disk gives.
const STOPPED: Duration = Duration::from_secs(2);

/// Whether the disk gives anything.
#[derive(Default)]
pub(crate) struct Pulse(Mutex<Asked>);

/// Reads that have begun and not ended, in the order of their beginnings.
#[derive(Default)]
struct Asked {
    begun: u64,
    reads: Vec<Read>,
    /// When one of them ended last.
    last: Option<Instant>,
}

struct Read {
    number: u64,
    /// The block that is read: its place in the log.
    place: u64,
    began: Instant,
    /// One that began later has ended: it hangs by itself, and says nothing of the disk.
    overtaken: bool,
}

impl Pulse {
    /// A read of a block begins: what it is called at its end.
    pub fn begin(&self, place: u64) -> u64 {
        let mut asked = lock(&self.0);
        asked.begun += 1;
        let number = asked.begun;
        asked.reads.push(Read { number, place, began: Instant::now(), overtaken: false });
        number
    }

    /// One has ended.
    pub fn end(&self, number: u64) {
        let mut asked = lock(&self.0);
        asked.last = Some(Instant::now());
        asked.reads.retain(|read| read.number != number);
        asked.reads.iter_mut().for_each(|read| read.overtaken |= read.number < number);
    }

    /// How long it is until the disk has stopped if it gives nothing; none where it has.
    pub fn left(&self) -> Duration {
        let asked = lock(&self.0);
        let first = asked.reads.iter().find(|read| !read.overtaken);
        first.map_or(STOPPED, |read| left_since(asked.last.map_or(read.began, |last| last.max(read.began))))
    }

    /// How long the read of a block is waited for still; none where it hangs.
    pub fn left_of(&self, place: u64) -> Duration {
        let asked = lock(&self.0);
        let read = asked.reads.iter().find(|read| read.place == place);
        read.map_or(STOPPED, |read| left_since(read.began))
    }
}

fn left_since(then: Instant) -> Duration {
    STOPPED.saturating_sub(then.elapsed())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// As if all of it had been so long ago that who gives nothing has stopped.
    pub fn age(pulse: &Pulse) {
        let Asked { reads, last, .. } = &mut *lock(&pulse.0);
        reads.iter_mut().for_each(|read| read.began -= STOPPED);
        last.iter_mut().for_each(|last| *last -= STOPPED);
    }

    #[test]
    fn one_read_that_hangs_is_no_disk_that_has_stopped() {
        let pulse = Pulse::default();
        let hanging = pulse.begin(1);
        let next = pulse.begin(2);
        pulse.end(next);
        age(&pulse);
        // Nobody has asked since.
        assert_eq!((pulse.left(), pulse.left_of(1), pulse.left_of(2)), (STOPPED, Duration::ZERO, STOPPED));
        // The disk stops with the next one.
        let next = pulse.begin(3);
        age(&pulse);
        assert_eq!(pulse.left(), Duration::ZERO);
        pulse.end(hanging);
        assert!(pulse.left() > Duration::ZERO, "it gives something again");
        age(&pulse);
        assert_eq!(pulse.left(), Duration::ZERO);
        pulse.end(next);
        assert_eq!(pulse.left(), STOPPED);
    }
}
