//! What a copy to or from a device is compared by: checksums of units, of bytes that pass through a buffer.

use crate::RegionMemory;
use crate::sums::{Bytes, Checksummer, Running, mismatch, next_piece};
use kvik_core::{Result, View};
use kvik_host::Memory;
use kvik_proto::WorkRequest;
use std::ops::Range;
use std::time::{Duration, Instant};

/// A part in windows of at most `room` bytes: of whole units, where a unit has room.
pub(crate) fn windows(part: &Range<u64>, unit: u64, room: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let (start, end, unit, room) = (part.start, part.end, unit.max(1), room.max(1));
    let window = if unit <= room { room / unit * unit } else { room };
    (start..end).step_by(window as usize).map(move |at| at..(at + window).min(end))
}

/// The checksums of a part's units, in their order.
pub(crate) struct UnitSums {
    running: Running,
    part: Range<u64>,
    unit: u64,
    /// Of the units that are known so far.
    sums: Vec<u64>,
    took: Duration,
}

impl UnitSums {
    pub fn of(request: &WorkRequest<RegionMemory>) -> UnitSums {
        let (part, unit) = (request.part.clone(), request.unit.max(1));
        UnitSums { running: Running::before_sending(), part, unit, sums: Vec::new(), took: Duration::ZERO }
    }

    /// Takes the next window of the part, which lies in a buffer from `at` on.
    pub fn take(
        &mut self,
        checksummer: &mut Checksummer,
        buffer: &Memory,
        at: u64,
        window: &Range<u64>,
    ) -> Result<()> {
        let began = Instant::now();
        let len = (self.part.end - self.part.start, self.unit);
        let (to, sums) = (self.running.done + (window.end - window.start), &mut self.sums);
        let taken =
            self.running.go_on_staged(checksummer, (buffer, at as usize), len, to, |sum| sums.push(sum));
        self.took += began.elapsed();
        taken
    }

    /// Sums memory that a processor reads, until as many units are known as of the other side.
    pub fn follow(
        &mut self,
        checksummer: &mut Checksummer,
        other: &UnitSums,
        (memory, view): (&impl Bytes, &View),
    ) -> Result<()> {
        let began = Instant::now();
        while self.sums.len() < other.sums.len() {
            let start = self.part.start + self.sums.len() as u64 * self.unit;
            let unit = start..(start + self.unit).min(self.part.end);
            self.sums.push(checksummer.sum_of(memory, view, unit, next_piece(view, start))?);
        }
        self.took += began.elapsed();
        Ok(())
    }

    /// The checksums, when all of the part was taken.
    pub fn into_sums(self) -> Vec<u64> {
        self.sums
    }
}

/// The two sides of a copy.
pub(crate) struct Comparison {
    /// Where the bytes were copied from.
    pub there: UnitSums,
    /// Where they are now.
    pub here: UnitSums,
}

impl Comparison {
    pub fn of(request: &WorkRequest<RegionMemory>) -> Comparison {
        Comparison { there: UnitSums::of(request), here: UnitSums::of(request) }
    }

    /// The time that checksums took; none where none were wanted.
    ///
    /// # Errors
    /// `ChecksumMismatch`: the two sides differ, and on which page.
    pub fn end(self, view: &View) -> Result<Duration> {
        if self.there.sums == self.here.sums {
            return Ok(self.there.took + self.here.took);
        }
        let equal = self.there.sums.iter().zip(&self.here.sums).take_while(|(a, b)| a == b).count() as u64;
        Err(mismatch(view, self.here.part.start + equal * self.here.unit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_of_whole_units_where_a_unit_has_room() {
        let cut = |part: Range<u64>, unit, room| windows(&part, unit, room).collect::<Vec<_>>();
        assert_eq!(cut(10..10, 4, 8), []);
        assert_eq!(cut(10..33, 4, 8), [10..18, 18..26, 26..33]);
        assert_eq!(cut(10..33, 6, 8), [10..16, 16..22, 22..28, 28..33]);
        assert_eq!(cut(10..33, 9, 8), [10..18, 18..26, 26..33]);
        assert_eq!(cut(0..7, 0, 3), [0..3, 3..6, 6..7]);
        assert_eq!(cut(0..2, 0, 0), [0..1, 1..2]);
    }
}
