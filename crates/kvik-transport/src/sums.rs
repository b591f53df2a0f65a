//! Checksums of a part of a stream, unit by unit.
//!
//! What a checksum costs is where its bytes are: in the second-level cache it runs several times faster than from
//! memory. So nothing here goes over a whole transfer. The bytes of a piece are summed right before they are sent, or
//! right after they were placed, and the other pass over them finds them in the cache too. While a placed piece is
//! summed, memory is idle: then it fetches what the next call writes to, which takes it less than the call would.

use crate::{RegionMemory, from_host};
use kvik_core::{Code, Error, Order, PageSum, PageSums, Result, View};
use kvik_host::{HostError, Memory};
use std::ops::Range;

/// Bytes that are placed and summed before the next ones are looked at: with those next ones and with what the kernel
/// copies them from, they fit a core's second-level cache.
pub(crate) const PIECE: u64 = 128 << 10;

/// Bytes that are summed and sent before the next ones. The kernel's copy only reads them, so more of them stay in a
/// cache than of those that are placed, and a system call takes more of them.
pub(crate) const SENT: u64 = 512 << 10;

/// Memory that can be summed.
pub(crate) trait Bytes {
    /// Where it is mapped here, if it is.
    fn mapped(&self) -> Option<&Memory> {
        None
    }
    /// The sum of ranges that follow one another in one pass, where that is possible; `next` is what is moved next.
    fn sum(
        &self,
        ranges: impl Iterator<Item = (usize, usize)>,
        next: Option<usize>,
    ) -> Result<Option<u64>, HostError>;
    /// The range, copied out through `scratch`: registered memory is never a slice.
    fn each(
        &self,
        offset: usize,
        len: usize,
        scratch: &mut [u8],
        f: &mut dyn FnMut(&[u8]),
    ) -> Result<(), HostError>;
}

impl Bytes for Memory {
    fn mapped(&self) -> Option<&Memory> {
        Some(self)
    }
    fn sum(
        &self,
        ranges: impl Iterator<Item = (usize, usize)>,
        next: Option<usize>,
    ) -> Result<Option<u64>, HostError> {
        self.sum(ranges, next)
    }
    fn each(
        &self,
        offset: usize,
        len: usize,
        scratch: &mut [u8],
        f: &mut dyn FnMut(&[u8]),
    ) -> Result<(), HostError> {
        self.for_each_chunk(offset, len, scratch, f)
    }
}

/// Where memory is copied to that cannot be summed in one pass, and the sum in the making.
pub(crate) struct Checksummer {
    scratch: Vec<u8>,
    sum: PageSum,
}

impl Default for Checksummer {
    /// As much as one call reads of another process.
    fn default() -> Self {
        Checksummer { scratch: vec![0; 64 << 10], sum: PageSum::default() }
    }
}

impl Checksummer {
    /// The checksum of a part that was placed, or that is sent, in one pass where that is possible. Meanwhile what lies at
    /// `next` comes into the cache.
    pub fn sum_of(
        &mut self,
        bytes: &impl Bytes,
        view: &View,
        part: Range<u64>,
        next: Option<usize>,
    ) -> Result<u64> {
        let ranges = view.runs(part.clone()).map(|run| (run.offset as usize, run.len as usize));
        if let Some(sum) = bytes.sum(ranges, next).map_err(broken)? {
            return Ok(sum);
        }
        let Checksummer { scratch, sum } = self;
        let read = view.runs(part).try_for_each(|run| {
            bytes.each(run.offset as usize, run.len as usize, scratch, &mut |bytes| sum.update(bytes))
        });
        // Also after an error: what was summed until then must not be in the next one.
        let sum = sum.finish();
        read.map_err(broken)?;
        Ok(sum)
    }

    /// The same of memory that the processor does not reach, copied out piece by piece.
    fn sum_of_device(&mut self, memory: &RegionMemory, view: &View, part: Range<u64>) -> Result<u64> {
        let Checksummer { scratch, sum } = self;
        for run in view.runs(part) {
            let (mut at, end) = (run.offset as usize, (run.offset + run.len) as usize);
            while at < end {
                let piece = scratch.len().min(end - at);
                memory.copy_out(at, &mut scratch[..piece])?;
                sum.update(&scratch[..piece]);
                at += piece;
            }
        }
        Ok(sum.finish())
    }
}

/// Sums what was placed of a view with a table for that, as far as it is not known: all that lies whole in `part`.
pub(crate) fn sum_placed(
    checksummer: &mut Checksummer,
    (memory, view): (&Memory, &View),
    part: Range<u64>,
) -> Result<()> {
    let Some(sums) = view.sums() else { return Ok(()) };
    for number in sums.within(part).filter(|number| sums.get(*number).is_none()) {
        sums.set(number, checksummer.sum_of(memory, view, sums.covers(number), None)?);
    }
    Ok(())
}

/// The checksums of the pages of a view, page by page: for each `layers` layers of a page that of all its bytes in
/// them, in the order of layers and slices. Those that `known` has are taken from there, if it is of as many.
///
/// # Errors
/// `InvalidArgument` for 0 layers; what a device says of a copy.
pub fn page_sums(
    memory: &RegionMemory,
    view: &View,
    layers: u32,
    known: Option<&PageSums>,
) -> Result<Vec<u64>> {
    let view = view.clone().with_order(Order::PageFirst);
    let all = PageSums::new(&view, layers)?;
    let known = known.filter(|known| known.is_like(&all));
    let mut checksummer = Checksummer::default();
    let sum = |number| match (known.and_then(|known| known.get(number)), memory) {
        (Some(sum), _) => Ok(sum),
        (None, RegionMemory::Host(memory)) => checksummer.sum_of(&**memory, &view, all.covers(number), None),
        (None, RegionMemory::Device(_)) => checksummer.sum_of_device(memory, &view, all.covers(number)),
    };
    (0..all.len()).map(sum).collect()
}

fn broken(error: HostError) -> Error {
    from_host(Code::InvalidArgument, error)
}

/// Where the bytes lie that are a piece further in the stream.
pub(crate) fn next_piece(view: &View, at: u64) -> Option<usize> {
    view.runs(at + PIECE..at + PIECE + 1).next().map(|run| run.offset as usize)
}

/// The checksums of a chunk in the making, piece by piece.
pub(crate) struct Running {
    sum: PageSum,
    /// Bytes of the chunk that are summed.
    pub done: u64,
    /// Whether they were placed before.
    placed: bool,
}

impl Running {
    /// Of bytes that are sent afterwards.
    pub fn before_sending() -> Running {
        Running { sum: PageSum::default(), done: 0, placed: false }
    }

    /// Of bytes that were placed.
    pub fn after_placing() -> Running {
        Running { placed: true, ..Running::before_sending() }
    }

    /// Takes the chunk's bytes up to `to` at least, of those up to `have` that are there, and calls `each` with the
    /// checksum of every unit that is whole with them: a unit is taken when all of it is there. `part` is the chunk's
    /// part of the stream.
    pub fn go_on(
        &mut self,
        checksummer: &mut Checksummer,
        (memory, view): (&Memory, &View),
        (part, unit): (&Range<u64>, u64),
        (to, have): (u64, u64),
        mut each: impl FnMut(u64),
    ) -> Result<()> {
        let (to, have) = ((part.start + to).min(part.end), (part.start + have).min(part.end));
        let mut at = part.start + self.done;
        while at < to {
            let end = (at + unit).min(part.end);
            if end > have {
                break;
            }
            let next = if self.placed { next_piece(view, at) } else { None };
            each(checksummer.sum_of(memory, view, at..end, next)?);
            at = end;
        }
        self.done = at - part.start;
        Ok(())
    }

    /// As [`Running::go_on`], for a chunk that passes through a buffer: its bytes from `done` up to `to` lie there one
    /// after the other, from `at` on.
    pub fn go_on_staged(
        &mut self,
        checksummer: &mut Checksummer,
        (buffer, mut at): (&Memory, usize),
        (chunk, unit): (u64, u64),
        to: u64,
        mut each: impl FnMut(u64),
    ) -> Result<()> {
        while self.done < to {
            let start = self.done / unit * unit;
            let end = (start + unit).min(chunk);
            let stop = end.min(to);
            let len = (stop - self.done) as usize;
            let whole = if (self.done, stop) == (start, end) {
                buffer.sum([(at, len)].into_iter(), None).map_err(broken)?
            } else {
                None
            };
            match whole {
                Some(sum) => each(sum),
                None => {
                    buffer
                        .for_each_chunk(at, len, &mut checksummer.scratch, |bytes| self.sum.update(bytes))
                        .map_err(broken)?;
                    if stop == end {
                        each(self.sum.finish());
                    }
                }
            }
            (self.done, at) = (stop, at + len);
        }
        Ok(())
    }
}

/// The error for bytes that are not what was sent.
pub(crate) fn mismatch(view: &View, position: u64) -> Error {
    let (layer, page) = view.locate(position);
    Error::new(
        Code::ChecksumMismatch,
        format!(
            "what was placed is not what was sent: page {page}, layer {layer} (position {position} of the transfer); \
             the pages were changed during the transfer, or memory or the network damages data: do not use them"
        ),
    )
    .about_page(page)
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
        let len = part.end - part.start;
        for piece in [1u64, 100, 1499, 1500, 1501, 8192, 1 << 20] {
            // As a receiver, who has nothing beyond what came, and as a sender, who has all.
            for all in [false, true] {
                let mut running = if all { Running::before_sending() } else { Running::after_placing() };
                let (mut checksummer, mut got) = (Checksummer::default(), Vec::new());
                let mut to = 0;
                while running.done < len {
                    to += piece;
                    assert!(to < len + piece, "no progress");
                    let have = if all { len } else { to };
                    let sides = ((&memory, &view), (&part, unit), (to, have));
                    running.go_on(&mut checksummer, sides.0, sides.1, sides.2, |sum| got.push(sum)).unwrap();
                    assert!(running.done <= have && (!all || running.done >= to.min(len)));
                }
                let units = stream[part.start as usize..part.end as usize].chunks(unit as usize);
                assert_eq!(got, units.map(page_sum).collect::<Vec<_>>(), "pieces of {piece}");
            }
        }
    }

    #[test]
    fn pieces_that_pass_through_a_buffer_give_the_sums_of_their_units() {
        let bytes: Vec<u8> = (0..50_000u32).map(|i| (i * 11 + i / 256) as u8).collect();
        for (piece, unit) in [(1usize, 700u64), (4096, 1000), (4096, 4096), (10_000, 4096), (60_000, 4096)] {
            let buffer = Memory::shared(1 << 16, HugePages::Never).unwrap();
            let (mut running, mut checksummer, mut got) =
                (Running::before_sending(), Checksummer::default(), Vec::new());
            for piece in bytes.chunks(piece) {
                buffer.copy_in(77, piece).unwrap();
                let to = running.done + piece.len() as u64;
                let sides = ((&buffer, 77), (bytes.len() as u64, unit));
                running.go_on_staged(&mut checksummer, sides.0, sides.1, to, |sum| got.push(sum)).unwrap();
            }
            let units = bytes.chunks(unit as usize);
            assert_eq!(got, units.map(page_sum).collect::<Vec<_>>(), "pieces of {piece}, units of {unit}");
        }
    }

    /// Memory that goes away while it is read.
    struct Going(bool);

    impl Bytes for Going {
        fn sum(
            &self,
            _: impl Iterator<Item = (usize, usize)>,
            _: Option<usize>,
        ) -> Result<Option<u64>, HostError> {
            Ok(None)
        }
        fn each(&self, _: usize, _: usize, _: &mut [u8], f: &mut dyn FnMut(&[u8])) -> Result<(), HostError> {
            f(b"what is there");
            if self.0 { Err(HostError::InvalidArgument("the source has gone".into())) } else { Ok(()) }
        }
    }

    #[test]
    fn a_read_that_failed_is_not_in_the_next_sum() {
        let layout = Arc::new(Layout::contiguous(1, 4096).unwrap());
        let view = View::new(layout, [0].into(), 0..1, 0..1, Order::LayerFirst).unwrap();
        let mut checksummer = Checksummer::default();
        let mut sum = |going| checksummer.sum_of(&Going(going), &view, 0..4096, None);
        let whole = sum(false).unwrap();
        sum(true).unwrap_err();
        assert_eq!(sum(false).unwrap(), whole);
    }

    #[test]
    fn a_sum_in_one_pass_is_the_sum_of_the_pieces() {
        let memory = Memory::shared(1 << 16, HugePages::Never).unwrap();
        let bytes: Vec<u8> = (0..1u32 << 16).map(|i| (i * 13 + i / 256) as u8).collect();
        memory.copy_in(0, &bytes).unwrap();
        let layout = Arc::new(Layout::contiguous(16, 4096).unwrap());
        let view = View::new(layout, [4, 5, 6, 1].into(), 0..1, 0..1, Order::LayerFirst).unwrap();
        let mut checksummer = Checksummer::default();
        for (part, at) in [(0..4096u64, 16384usize), (100..200, 16484), (10..12000, 16394)] {
            let len = (part.end - part.start) as usize;
            let sum = checksummer.sum_of(&memory, &view, part, None).unwrap();
            assert_eq!(sum, page_sum(&bytes[at..at + len]));
        }
    }
}
