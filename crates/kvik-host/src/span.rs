//! A checked range of addresses: the one place where bytes of registered memory are touched.
//!
//! Copies go through raw pointers. Another thread, another process or the kernel may write the same bytes at
//! the same time; then the copy holds some mix of old and new, which the checks above (generation, checksum)
//! find. What must never exist is a Rust reference to such bytes, which would let the compiler assume that
//! they hold still.

use std::ptr::{self, NonNull};

use crate::error::HostError;

/// The largest piece that [`Span::for_each_chunk`] hands out: it stays in a core's first-level cache.
pub(crate) const CHUNK: usize = 16 << 10;

/// Base and length of memory that stays mapped for as long as the owner of this value lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a span is an address and a length; the bytes are reached by copies that need no exclusive access.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// # Safety
    /// `base` is mapped readable for `len` bytes (and writable, if `copy_in` or `at` for writing is ever used)
    /// until the value that keeps this span is dropped, and no Rust reference to the bytes is alive meanwhile.
    pub(crate) unsafe fn new(base: NonNull<u8>, len: usize) -> Span {
        Span { base, len }
    }

    pub(crate) fn addr(&self) -> usize {
        self.base.as_ptr() as usize
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address of `offset`, after checking that `len` bytes from there lie inside.
    pub(crate) fn at(&self, offset: usize, len: usize) -> Result<*mut u8, HostError> {
        match offset.checked_add(len) {
            // SAFETY: offset <= offset + len <= self.len, so the result is inside the mapping or one past it.
            Some(end) if end <= self.len => Ok(unsafe { self.base.as_ptr().add(offset) }),
            _ => Err(HostError::OutOfBounds { offset, len, size: self.len }),
        }
    }

    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> Result<(), HostError> {
        let to = self.at(offset, from.len())?;
        // SAFETY: `to` is mapped for from.len() bytes; `from` is a live slice, and by the rule of `new` no slice
        // lies in a span, so the two do not overlap.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        Ok(())
    }

    pub(crate) fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), HostError> {
        let from = self.at(offset, into.len())?;
        // SAFETY: as in `copy_in`, the other way round.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies between two spans, which may be the same and may overlap.
    pub(crate) fn copy_from(
        &self,
        offset: usize,
        from: &Span,
        from_at: usize,
        len: usize,
    ) -> Result<(), HostError> {
        let to = self.at(offset, len)?;
        let source = from.at(from_at, len)?;
        // SAFETY: both are mapped for `len` bytes; `ptr::copy` allows overlap, which two registrations of the
        // same buffer would give.
        unsafe { ptr::copy(source, to, len) };
        Ok(())
    }

    /// Copies extents (offset in `from`, offset here, and bytes) that follow one another, and gives the XXH3 sum of them
    /// all, as they were written; `None` where that takes a copy and a sum (see [`crate::sum`]): then some of them may have
    /// been copied.
    pub(crate) fn copy_summed_from(
        &self,
        from: &Span,
        extents: impl Iterator<Item = (usize, usize, usize)>,
    ) -> Result<Option<u64>, HostError> {
        let Some(mut sum) = crate::sum::Xxh3::new() else { return Ok(None) };
        let mut extents = extents.peekable();
        while let Some((from_at, at, len)) = extents.next() {
            let (source, to) = (from.at(from_at, len)?, self.at(at, len)?);
            if source.addr().abs_diff(to.addr()) < len {
                return Ok(None);
            }
            // SAFETY: both are mapped for `len` bytes while their owners live, and they do not overlap.
            if !unsafe { sum.copy(source, len, extents.peek().is_none(), to) } {
                return Ok(None);
            }
        }
        Ok(sum.finish())
    }

    /// Copies a range out through `scratch`, piece by piece, for a checksum.
    pub(crate) fn for_each_chunk(
        &self,
        offset: usize,
        len: usize,
        scratch: &mut [u8],
        mut f: impl FnMut(&[u8]),
    ) -> Result<(), HostError> {
        self.at(offset, len)?;
        let step = scratch.len().min(CHUNK);
        if step == 0 {
            return Err(HostError::InvalidArgument("scratch buffer of no bytes".into()));
        }
        let mut done = 0;
        while done < len {
            let piece = &mut scratch[..step.min(len - done)];
            self.copy_out(offset + done, piece)?;
            f(piece);
            done += piece.len();
        }
        Ok(())
    }

    /// The XXH3 sum of ranges that follow one another, in one pass; `None` where that needs a copy first (see
    /// [`crate::sum`]). Meanwhile as many bytes at `next` are brought into the cache; without it those of the ranges
    /// themselves, ahead of the reading.
    pub(crate) fn sum(
        &self,
        ranges: impl Iterator<Item = (usize, usize)>,
        next: Option<usize>,
    ) -> Result<Option<u64>, HostError> {
        let Some(mut sum) = crate::sum::Xxh3::new() else { return Ok(None) };
        let (mut ranges, mut taken) = (ranges.peekable(), 0);
        while let Some((offset, len)) = ranges.next() {
            let at = self.at(offset, len)?;
            let next = match next {
                Some(next) => self.base.as_ptr().wrapping_add(next + taken),
                None => at.wrapping_add(crate::sum::AHEAD),
            };
            // SAFETY: `at` is mapped for `len` bytes while `self`'s owner lives; no slice is made of them.
            if !unsafe { sum.add(at, len, ranges.peek().is_none(), next) } {
                return Ok(None);
            }
            taken += len;
        }
        Ok(sum.finish())
    }
}

/// On memory of the heap, so that an interpreter that knows no mappings can watch every access.
#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the heap, in exactly as much room as they take.
    struct Heap(NonNull<[u8]>);

    impl Heap {
        fn counting(len: u8) -> Heap {
            Heap(NonNull::from(Box::leak((0..len).collect::<Box<[u8]>>())))
        }

        fn span(&self) -> Span {
            // SAFETY: the box was leaked and lives as long as `self`; no reference to its bytes is left.
            unsafe { Span::new(self.0.cast(), self.0.len()) }
        }

        fn bytes(&self) -> Vec<u8> {
            let mut bytes = vec![0; self.0.len()];
            self.span().copy_out(0, &mut bytes).unwrap();
            bytes
        }
    }

    impl Drop for Heap {
        fn drop(&mut self) {
            // SAFETY: made by `Box::leak`, and given back once; spans of it are gone by then.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }

    #[test]
    fn copies_reach_the_last_byte_and_nothing_beyond() {
        let heap = Heap::counting(20);
        let span = heap.span();
        span.copy_in(17, &[7, 8, 9]).unwrap();
        let mut out = [0; 4];
        span.copy_out(16, &mut out).unwrap();
        assert_eq!(out, [16, 7, 8, 9]);
        span.copy_out(20, &mut []).unwrap();
        for (offset, len) in [(17, 4), (21, 0), (usize::MAX, 1), (1, usize::MAX)] {
            assert!(matches!(span.at(offset, len), Err(HostError::OutOfBounds { .. })), "{len} at {offset}");
        }
        assert!(span.copy_in(17, &[0; 4]).is_err() && span.copy_out(17, &mut [0; 4]).is_err());
        assert_eq!(heap.bytes()[16..], [16, 7, 8, 9], "a refused copy leaves all as it is");
    }

    #[test]
    fn spans_of_the_same_bytes_copy_as_if_through_a_buffer() {
        let (heap, other) = (Heap::counting(30), Heap::counting(8));
        for (to, from, len) in [(5, 0, 20), (0, 5, 20), (3, 3, 9), (22, 0, 8)] {
            let mut expected = heap.bytes();
            expected.copy_within(from..from + len, to);
            heap.span().copy_from(to, &heap.span(), from, len).unwrap();
            assert_eq!(heap.bytes(), expected, "{len} bytes from {from} to {to}");
        }
        heap.span().copy_from(22, &other.span(), 0, 8).unwrap();
        assert_eq!(heap.bytes()[22..], other.bytes());
        assert!(heap.span().copy_from(23, &other.span(), 0, 8).is_err());
        assert!(heap.span().copy_from(0, &other.span(), 1, 8).is_err());
    }

    #[test]
    fn pieces_for_a_sum_cover_the_range_once() {
        let heap = Heap::counting(50);
        let mut seen = Vec::new();
        heap.span().for_each_chunk(3, 47, &mut [0; 10], |piece| seen.extend_from_slice(piece)).unwrap();
        assert_eq!(seen, heap.bytes()[3..]);
        assert!(heap.span().for_each_chunk(4, 47, &mut [0; 10], |_| panic!("out of bounds")).is_err());
        assert!(heap.span().for_each_chunk(3, 47, &mut [], |_| panic!("no room")).is_err());
    }
}
