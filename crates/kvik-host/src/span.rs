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

    /// The XXH3 sum of a range, in one pass; `None` where that needs a copy first (see [`crate::sum`]).
    pub(crate) fn sum(&self, offset: usize, len: usize) -> Result<Option<u64>, HostError> {
        let at = self.at(offset, len)?;
        // SAFETY: `at` is mapped for `len` bytes while `self`'s owner lives; no slice is made of them.
        Ok(unsafe { crate::sum::xxh3(at, len) })
    }
}
