//! Checksums of a part of a stream, unit by unit.
//!
//! What a checksum costs is where its bytes are: in the second-level cache it runs several times faster than from
//! memory. So nothing here goes over a whole chunk. The bytes of a piece are summed right before they are sent, or
//! right after they were placed, and the other pass over them finds them in the cache too.

use crate::from_host;
use kvik_core::{Code, PageSum, Result, View};
use kvik_host::Memory;
use std::ops::Range;

/// Bytes that are moved and summed before the next ones are looked at: with what the kernel copies for them they
/// fit a core's second-level cache, and a system call costs little beside them.
pub(crate) const PIECE: u64 = 128 << 10;

/// Copies pieces of memory to where they can be summed: registered memory is never a slice.
pub(crate) struct Summer {
    scratch: Vec<u8>,
    sum: PageSum,
}

impl Default for Summer {
    /// 8 KiB leave room in the first-level cache for what they are copied from.
    fn default() -> Self {
        Summer { scratch: vec![0; 8 << 10], sum: PageSum::default() }
    }
}

impl Summer {
    /// The checksum of the part, read by `read(offset, len, scratch, take)`.
    pub fn sum_of(
        &mut self,
        view: &View,
        part: Range<u64>,
        read: impl Fn(usize, usize, &mut [u8], &mut dyn FnMut(&[u8])) -> Result<(), kvik_host::HostError>,
    ) -> Result<u64> {
        let Summer { scratch, sum } = self;
        for run in view.runs(part) {
            read(run.offset as usize, run.len as usize, scratch, &mut |bytes| sum.update(bytes))
                .map_err(|error| from_host(Code::InvalidArgument, error))?;
        }
        Ok(sum.finish())
    }
}

/// The checksums of a chunk in the making, piece by piece.
#[derive(Default)]
pub(crate) struct Running {
    sum: PageSum,
    /// Bytes of the chunk that are summed.
    pub done: u64,
}

impl Running {
    /// Takes the chunk's bytes up to `to`, and calls `each` with the start and checksum of every unit that is whole
    /// with them. `part` is the chunk's part of the stream.
    pub fn go_on(
        &mut self,
        summer: &mut Summer,
        (memory, view): (&Memory, &View),
        part: &Range<u64>,
        unit: u64,
        to: u64,
        mut each: impl FnMut(u64, u64),
    ) -> Result<()> {
        let to = (part.start + to).min(part.end);
        let mut at = part.start + self.done;
        while at < to {
            let start = part.start + (at - part.start) / unit * unit;
            let end = (start + unit).min(part.end);
            let stop = end.min(to);
            for run in view.runs(at..stop) {
                let (offset, len) = (run.offset as usize, run.len as usize);
                memory
                    .for_each_chunk(offset, len, &mut summer.scratch, |bytes| self.sum.update(bytes))
                    .map_err(|error| from_host(Code::InvalidArgument, error))?;
            }
            if stop == end {
                each(start, self.sum.finish());
            }
            at = stop;
        }
        self.done = at - part.start;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvik_core::{Layout, Order, page_sum};
    use kvik_host::HugePages;
    use std::sync::Arc;

    #[test]
    fn pieces_of_any_size_give_the_sums_of_their_units() {
        let memory = Memory::shared(1 << 16, HugePages::Never).unwrap();
        let bytes: Vec<u8> = (0..1u32 << 16).map(|i| (i * 7 + i / 256) as u8).collect();
        memory.copy_in(0, &bytes).unwrap();
        let layout = Arc::new(Layout::contiguous(16, 4096).unwrap());
        let view = View::new(layout, [9, 2, 3, 15, 0].into(), 0..1, 0..1, Order::LayerFirst).unwrap();
        let mut stream = Vec::new();
        for run in view.runs(0..view.bytes()) {
            stream.extend_from_slice(&bytes[run.offset as usize..(run.offset + run.len) as usize]);
        }
        // A chunk that begins inside the stream and whose last unit is short.
        let (part, unit) = (4096..view.bytes() - 100, 1500);
        for piece in [1u64, 100, 1499, 1500, 1501, 8192, 1 << 20] {
            let (mut running, mut summer, mut got) = (Running::default(), Summer::default(), Vec::new());
            let mut to = 0;
            while running.done < part.end - part.start {
                to += piece;
                running
                    .go_on(&mut summer, (&memory, &view), &part, unit, to, |start, sum| {
                        got.push((start, sum))
                    })
                    .unwrap();
            }
            let units = stream[part.start as usize..part.end as usize].chunks(unit as usize).enumerate();
            let expected: Vec<(u64, u64)> =
                units.map(|(i, unit_bytes)| (part.start + i as u64 * unit, page_sum(unit_bytes))).collect();
            assert_eq!(got, expected, "pieces of {piece}");
        }
    }
}
