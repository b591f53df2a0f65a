//! Pieces at equal distances, which one copy of the driver's takes: a page of each layer, or every other page.
//!
//! Each copy costs the CPU a microsecond or two, which is what small pages are bound by. Rows are one.

use super::abi::{self, Addr, Code, Copy2d, Handle, Side, Table};
use super::piece::Direction;
use std::ffi::c_void;
use std::ptr;

/// Fewer rows are no run: two pages have some distance always.
const LEAST: usize = 4;

/// Pieces of one length at one distance in a device's memory, which lie packed in the host's.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rows {
    /// The first one's address.
    pub at: Addr,
    /// Bytes of each.
    pub len: usize,
    /// From one to the next.
    pub stride: usize,
    pub count: usize,
    /// Where the first one is among the packed bytes.
    packed: usize,
}

impl Rows {
    /// The longest run of rows that the pieces begin with, and the pieces after it; a single one where it is not worth
    /// a copy of rows. Empty pieces are skipped. `pitch` is the widest stride that the device takes.
    pub fn first(
        mut pieces: &[(usize, usize)],
        base: Addr,
        packed: usize,
        pitch: usize,
    ) -> Option<(Rows, &[(usize, usize)])> {
        let (first, len) = next(&mut pieces)?;
        let one = Rows { at: base + first as Addr, len, stride: len, count: 1, packed };
        let after_one = pieces;
        let (mut count, mut stride, mut last) = (1, len, first);
        loop {
            let mut after = pieces;
            let Some((offset, more)) = next(&mut after) else { break };
            let step = offset.wrapping_sub(last);
            let fits =
                if count == 1 { offset > last && step >= len && step <= pitch } else { step == stride };
            if !fits || more != len {
                break;
            }
            (stride, count, last, pieces) = (step, count + 1, offset, after);
        }
        if stride == len {
            // Without gaps they are one, however many.
            let len = len * count;
            return Some((Rows { len, stride: len, ..one }, pieces));
        }
        if count < LEAST {
            return Some((one, after_one));
        }
        Some((Rows { stride, count, ..one }, pieces))
    }

    /// Where the first row is among the packed bytes that begin at `place`.
    pub fn place(&self, place: *mut c_void) -> *mut c_void {
        place.wrapping_byte_add(self.packed)
    }

    /// Hands all of them to the driver as one copy, from or to packed bytes that begin at `place`.
    ///
    /// # Safety
    /// The context of `stream` is current, and all rows on both sides are memory until the copy has ended.
    pub unsafe fn enqueue(
        &self,
        table: &Table,
        place: *mut c_void,
        direction: Direction,
        stream: Handle,
    ) -> Code {
        let (x, y, array) = (0, 0, ptr::null_mut());
        let host = self.place(place);
        let packed = Side { x, y, kind: abi::TYPE_HOST, host, device: 0, array, pitch: self.len };
        let (kind, host) = (abi::TYPE_DEVICE, ptr::null_mut());
        let rows = Side { x, y, kind, host, device: self.at, array, pitch: self.stride };
        let (from, to) = if direction == Direction::ToHost { (rows, packed) } else { (packed, rows) };
        let order = Copy2d { from, to, width: self.len, height: self.count };
        // SAFETY: the caller's promise.
        unsafe { (table.rows_async)(&order, stream) }
    }
}

/// The next piece with bytes.
fn next(pieces: &mut &[(usize, usize)]) -> Option<(usize, usize)> {
    while let Some((first, rest)) = pieces.split_first() {
        *pieces = rest;
        if first.1 > 0 {
            return Some(*first);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of pieces: offset, bytes, stride, count, place.
    fn rows(pieces: &[(usize, usize)], pitch: usize) -> Vec<(u64, usize, usize, usize, usize)> {
        let (mut left, mut packed, mut all) = (pieces, 0, Vec::new());
        while let Some((rows, rest)) = Rows::first(left, 1 << 40, packed, pitch) {
            packed += rows.len * rows.count;
            all.push((rows.at - (1 << 40), rows.len, rows.stride, rows.count, rows.packed));
            left = rest;
        }
        all
    }

    #[test]
    fn equal_distances_are_one_copy_and_all_else_is_several() {
        const WIDE: usize = 1 << 30;
        assert_eq!(rows(&[], WIDE), []);
        assert_eq!(rows(&[(0, 0), (5, 0)], WIDE), []);
        assert_eq!(rows(&[(64, 16)], WIDE), [(64, 16, 16, 1, 0)]);
        let four = [(0, 16), (100, 16), (200, 16), (300, 16)];
        assert_eq!(rows(&four, WIDE), [(0, 16, 100, 4, 0)]);
        // Without gaps they are one piece, however few.
        assert_eq!(rows(&[(32, 16), (48, 16)], WIDE), [(32, 32, 32, 1, 0)]);
        // Too few, and too far apart.
        let single = |at: usize| (at as u64 * 100, 16, 16, 1, at * 16);
        assert_eq!(rows(&four[..3], WIDE), [single(0), single(1), single(2)]);
        assert_eq!(rows(&four, 99), [single(0), single(1), single(2), single(3)]);
        // Another length, another distance.
        let more = [&four[..], &[(400, 8)]].concat();
        assert_eq!(rows(&more, WIDE), [(0, 16, 100, 4, 0), (400, 8, 8, 1, 64)]);
        let more = [&four[..], &[(500, 16)]].concat();
        assert_eq!(rows(&more, WIDE), [(0, 16, 100, 4, 0), (500, 16, 16, 1, 64)]);
        // The other way about, and overlapping.
        assert_eq!(rows(&[(100, 16), (0, 16)], WIDE), [(100, 16, 16, 1, 0), (0, 16, 16, 1, 16)]);
        assert_eq!(rows(&[(0, 16), (8, 16)], WIDE), [(0, 16, 16, 1, 0), (8, 16, 16, 1, 16)]);
    }

    #[test]
    fn rows_cover_the_pieces_in_their_order() {
        // A generator that needs no crate; the seed is fixed, so a failure repeats.
        let mut state = 0x5EED_u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..2000 {
            let count = draw(12);
            let pieces: Vec<(usize, usize)> =
                (0..count).map(|_| (draw(6) as usize * 64, [0, 16, 64, 64][draw(4) as usize])).collect();
            let mut expected = Vec::new();
            for (offset, len) in &pieces {
                expected.extend(*offset..offset + len);
            }
            let mut covered = Vec::new();
            for (at, len, stride, count, packed) in rows(&pieces, 200) {
                assert!(packed == covered.len() && (count == 1 || stride <= 200), "{pieces:?}");
                for row in 0..count {
                    let first = at as usize + row * stride;
                    covered.extend(first..first + len);
                }
            }
            assert_eq!(covered, expected, "{pieces:?}");
        }
    }
}
