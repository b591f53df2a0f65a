//! How the stream of a transfer is cut into what is moved, and what is summed, at once.

use crate::channel::{MAX_CHUNK, MAX_SUMS};
use kvik_core::{Code, Error, Result, View};
use std::ops::Range;

/// Largest unit under one checksum: it is summed while it is in the second-level cache, with what moves next beside it.
const MAX_UNIT: u64 = 128 << 10;
/// Smallest unit that is worth a checksum of its own.
const MIN_UNIT: u64 = 4 << 10;

/// How a stream is cut into chunks, and chunks into units with a checksum each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunking {
    /// Bytes of the stream.
    pub bytes: u64,
    /// Bytes of a chunk but the last; a multiple of `unit`.
    pub chunk: u64,
    /// Bytes of a unit but the last.
    pub unit: u64,
    /// Whether units have checksums.
    pub sums: bool,
}

impl Chunking {
    /// Of what moves nothing.
    pub(crate) const NOTHING: Chunking = Chunking { bytes: 0, chunk: 1, unit: 1, sums: false };

    /// Units of whole pages where pages are of a sensible size, or of what checksums of pages cover where those are wanted;
    /// chunks of about `target` bytes.
    pub fn new(view: &View, target: u64, sums: bool) -> Chunking {
        let (row, bytes) = (view.row_bytes(), view.bytes());
        let covered = view.sums().and_then(|sums| sums.unit());
        let unit = if let Some(unit) = covered.filter(|unit| (MIN_UNIT..=MAX_UNIT).contains(unit)) {
            unit
        } else if row < MIN_UNIT {
            row * MIN_UNIT.div_ceil(row)
        } else if row <= MAX_UNIT {
            row
        } else {
            let parts = row.div_ceil(MAX_UNIT);
            if row.is_multiple_of(parts) { row / parts } else { MAX_UNIT }
        };
        let units = (target.min(u64::from(MAX_CHUNK)) / unit).clamp(1, u64::from(MAX_SUMS));
        Chunking { bytes, chunk: unit * units, unit, sums }
    }

    /// The chunking that a peer asks for. Small chunks are refused: there is a bit of memory for each.
    pub fn from_peer(bytes: u64, unit: u32, chunk: u32, sums: bool) -> Result<Chunking> {
        let (unit, chunk) = (u64::from(unit), u64::from(chunk));
        let good = (unit >= MIN_UNIT || unit >= bytes)
            && unit > 0
            && chunk <= u64::from(MAX_CHUNK)
            && chunk.is_multiple_of(unit)
            && chunk >= unit
            && chunk / unit <= u64::from(MAX_SUMS);
        match good {
            true => Ok(Chunking { bytes, chunk, unit, sums }),
            false => Err(Error::new(
                Code::ProtocolError,
                format!("a transfer in chunks of {chunk} bytes and units of {unit}"),
            )),
        }
    }

    /// Number of chunks.
    pub fn chunks(&self) -> u64 {
        self.bytes.div_ceil(self.chunk)
    }

    /// The part of the stream that a chunk covers.
    pub fn part(&self, index: u64) -> Range<u64> {
        let start = index * self.chunk;
        start..(start + self.chunk).min(self.bytes)
    }

    /// Checksums of a chunk.
    pub fn sums_of(&self, part: &Range<u64>) -> u32 {
        match self.sums {
            true => (part.end - part.start).div_ceil(self.unit) as u32,
            false => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvik_core::{Layers, Layout, Order};
    use std::sync::Arc;

    #[test]
    fn chunkings_cover_the_stream_in_units_of_pages() {
        for row in [1u64, 100, 4096, 16 << 10, 65_536, 1 << 20, 3 << 20, (5 << 20) + 1] {
            let layout = Arc::new(Layout::contiguous(7, row).unwrap());
            let pages: Vec<u32> = (0..7).cycle().take(21).collect();
            let view = View::new(layout, pages.into(), 0..1, 0..1, Order::PageFirst).unwrap();
            let huge = Chunking::new(&view, u64::MAX, true);
            Chunking::from_peer(huge.bytes, huge.unit as u32, huge.chunk as u32, true).unwrap();
            let chunking = Chunking::new(&view, 512 << 10, true);
            assert!(
                chunking.chunk <= u64::from(MAX_CHUNK) && chunking.chunk.is_multiple_of(chunking.unit),
                "{row}: {chunking:?}"
            );
            assert!(row > MAX_UNIT || chunking.unit.is_multiple_of(row), "{row}: {chunking:?}");
            Chunking::from_peer(chunking.bytes, chunking.unit as u32, chunking.chunk as u32, true).unwrap();
            let mut at = 0;
            for index in 0..chunking.chunks() {
                let part = chunking.part(index);
                assert_eq!(part.start, at);
                at = part.end;
            }
            assert_eq!(at, chunking.bytes);
        }
    }

    #[test]
    fn where_checksums_of_pages_are_wanted_units_are_what_they_cover() {
        let view = |row, layers, each| {
            let strided = Layers::Strided { count: layers, stride: row * 4 };
            let layout = Arc::new(Layout::new(0, 4, row, row, 1, row, strided).unwrap());
            let view = View::new(layout, [3, 1].into(), 0..layers, 0..1, Order::PageFirst).unwrap();
            Chunking::new(&view.summing(each).unwrap(), 256 << 10, true)
        };
        let chunking = view(16 << 10, 36, 4);
        assert_eq!((chunking.unit, chunking.chunk), (64 << 10, 256 << 10));
        // Those of the last layers cover fewer, and those of very small or very large pages are no sensible units.
        assert_eq!(view(16 << 10, 35, 4).unit, 16 << 10);
        assert_eq!(view(1 << 10, 2, 1).unit, 4 << 10);
        assert_eq!(view(1 << 20, 2, 1).unit, 128 << 10);
    }

    #[test]
    fn a_peer_cannot_ask_for_a_bit_of_memory_a_byte() {
        assert!(Chunking::from_peer(1 << 40, 1, 1, false).is_err());
        assert!(Chunking::from_peer(1 << 40, 0, 0, false).is_err());
        assert!(Chunking::from_peer(100, 100, 100, false).is_ok());
    }
}
