//! Registered memory of this process: a pointer, a length, and functions that copy.
//!
//! There are two kinds. *Foreign* memory belongs to the caller (a tensor, a buffer); kvik holds whatever keeps
//! it alive. *Shared* memory is allocated by kvik as a sealed memfd, so that a peer on the same host can map
//! it read-only and copy from it without asking.
//!
//! After a fork both kinds stay usable in the child: foreign memory is copied on write as any memory is,
//! shared memory stays shared. Dropping a `Memory` in the child unmaps and closes the child's own copies, never
//! the parent's.
//!
//! This is the one place where bytes of registered memory are touched, by copies through raw pointers. Another thread,
//! another process or the kernel may write the same bytes at the same time; then the copy holds some mix of old and new,
//! which the checks above (generation, checksum) find. What must never exist is a Rust reference to such bytes, which
//! would let the compiler assume that they hold still.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use crate::error::HostError;
use crate::huge_pages::{HugePageFacts, HugePages};
use crate::mapping::Mapping;
use crate::runs::{RecvRun, SendRun};
use crate::sealed;
use crate::sum::{AHEAD, Xxh3};

/// The largest piece that [`Memory::for_each_chunk`] hands out: it stays in a core's first-level cache.
const CHUNK: usize = 16 << 10;

/// Memory that transfers read and write. `Send` and `Sync`; never a slice.
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    // Keeps the bytes mapped.
    backing: Backing,
}

// SAFETY: an address, a length, and what keeps the bytes; they are reached by copies that need no exclusive access.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

enum Backing {
    Foreign { _keep: Box<dyn Any + Send + Sync> },
    Shared { fd: OwnedFd, _mapping: Mapping, pages: PageInfo },
}

/// Which pages shared memory got, and why not bigger ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageInfo {
    /// Bytes of a page that the memory surely has.
    pub page_size: usize,
    /// Whether the kernel was asked for transparent huge pages, which it gives when it finds some.
    pub transparent: bool,
    /// Why the pages are not from a huge-page pool; empty when they are.
    pub why_not_bigger: String,
}

impl Memory {
    /// Registers memory of the caller.
    ///
    /// # Safety
    /// `ptr` stays mapped, readable and writable for `len` bytes until the returned value is dropped (`keep` is
    /// dropped after the last use, and may be what guarantees it). While it lives, no Rust reference to those
    /// bytes is used: they may change at any time.
    pub unsafe fn foreign(ptr: NonNull<u8>, len: usize, keep: Box<dyn Any + Send + Sync>) -> Memory {
        Memory { base: ptr, len, writable: true, backing: Backing::Foreign { _keep: keep } }
    }

    /// Registers memory of the caller that may only be read; every way to write it fails.
    ///
    /// # Safety
    /// As [`Memory::foreign`], but the bytes need not be writable.
    pub unsafe fn foreign_read_only(
        ptr: NonNull<u8>,
        len: usize,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Memory {
        Memory { base: ptr, len, writable: false, backing: Backing::Foreign { _keep: keep } }
    }

    /// Allocates `len` zero bytes that peers on this host can map read-only. Pages of a huge-page pool are taken and
    /// cleared at once, from the NUMA node of the thread that calls; others at their first touch.
    ///
    /// ```
    /// use kvik_host::{HugePages, Memory};
    ///
    /// let memory = Memory::shared(1 << 20, HugePages::Auto)?;
    /// memory.copy_in(4096, b"keys and values")?;
    /// let mut back = [0; 4];
    /// memory.copy_out(4096, &mut back)?;
    /// assert_eq!(&back, b"keys");
    /// # Ok::<(), kvik_host::HostError>(())
    /// ```
    pub fn shared(len: usize, huge: HugePages) -> Result<Memory, HostError> {
        if len == 0 {
            return Err(HostError::InvalidArgument("shared memory needs at least one byte".into()));
        }
        if huge == HugePages::Never {
            return Memory::on_ordinary_pages(len, false, "huge pages were switched off".into());
        }
        let facts = HugePageFacts::read();
        let why = match Memory::from_pool(len, &facts) {
            Ok(memory) => return Ok(memory),
            Err(why) => why,
        };
        if huge == HugePages::Require {
            return Err(HostError::HugePagesUnavailable(why));
        }
        Memory::on_ordinary_pages(len, facts.shared_on_request(), why)
    }

    fn from_pool(len: usize, facts: &HugePageFacts) -> Result<Memory, String> {
        let page_size = facts.choose(len)?.page_size;
        let file_len = sealed::round_up(len, page_size).map_err(|e| e.to_string())?;
        // It takes the pages, so this fails here and not at the first touch if there are none left for this process.
        let (fd, mapping) = sealed::create("kvik", file_len, Some(page_size)).map_err(|e| e.to_string())?;
        let pages = PageInfo { page_size, transparent: false, why_not_bigger: String::new() };
        Ok(Memory::from_parts(fd, mapping, len, pages))
    }

    fn on_ordinary_pages(len: usize, ask_transparent: bool, why: String) -> Result<Memory, HostError> {
        let (fd, mapping) = sealed::create("kvik", len, None)?;
        let transparent = ask_transparent && mapping.advise_huge().is_ok();
        let page_size = rustix::param::page_size();
        let pages = PageInfo { page_size, transparent, why_not_bigger: why };
        Ok(Memory::from_parts(fd, mapping, len, pages))
    }

    /// `mapping` has at least `len` bytes.
    fn from_parts(fd: OwnedFd, mapping: Mapping, len: usize, pages: PageInfo) -> Memory {
        let base = mapping.base();
        Memory { base, len, writable: true, backing: Backing::Shared { fd, _mapping: mapping, pages } }
    }

    /// The address of the first byte.
    pub fn addr(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether transfers may write here.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// The sealed memfd, for memory that can be shared with a peer.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.backing {
            Backing::Foreign { .. } => None,
            Backing::Shared { fd, .. } => Some(fd.as_fd()),
        }
    }

    /// Which pages shared memory got; `None` for foreign memory, whose pages are its owner's affair.
    pub fn pages(&self) -> Option<&PageInfo> {
        match &self.backing {
            Backing::Foreign { .. } => None,
            Backing::Shared { pages, .. } => Some(pages),
        }
    }

    /// Whether `len` bytes at `offset` lie inside.
    pub fn check(&self, offset: usize, len: usize) -> Result<(), HostError> {
        self.at(offset, len).map(|_| ())
    }

    /// Copies `from` to `offset`.
    pub fn copy_in(&self, offset: usize, from: &[u8]) -> Result<(), HostError> {
        let to = self.writable_at(offset, from.len())?;
        // SAFETY: `to` is mapped for from.len() bytes; `from` is a live slice, and by the rule of `foreign` no slice
        // lies in this memory, so the two do not overlap.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        Ok(())
    }

    /// Copies from `offset` into `into`.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), HostError> {
        let from = self.at(offset, into.len())?;
        // SAFETY: as in `copy_in`, the other way round.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// The checksum (XXH3, 64 bits) of ranges (offset and bytes) that follow one another, in one pass; `None` where it
    /// takes [`Self::for_each_chunk`]: few bytes, ranges of odd sizes, and processors without wide vectors. Meanwhile
    /// as many bytes at `next`, which are moved next, come into the cache: a hint, which is right at any offset.
    pub fn sum(
        &self,
        ranges: impl Iterator<Item = (usize, usize)>,
        next: Option<usize>,
    ) -> Result<Option<u64>, HostError> {
        let Some(mut sum) = Xxh3::new() else { return Ok(None) };
        let (mut ranges, mut taken) = (ranges.peekable(), 0);
        while let Some((offset, len)) = ranges.next() {
            let at = self.at(offset, len)?;
            let next = match next {
                Some(next) => self.base.as_ptr().wrapping_add(next + taken),
                None => at.wrapping_add(AHEAD),
            };
            // SAFETY: `at` is mapped for `len` bytes while `self` lives; no slice is made of them.
            if !unsafe { sum.add(at, len, ranges.peek().is_none(), next) } {
                return Ok(None);
            }
            taken += len;
        }
        Ok(sum.finish())
    }

    /// Copies a range out through `scratch` in pieces of at most 16 KiB and hands each to `f`, for checksums.
    pub fn for_each_chunk(
        &self,
        offset: usize,
        len: usize,
        scratch: &mut [u8],
        mut f: impl FnMut(&[u8]),
    ) -> Result<(), HostError> {
        self.check(offset, len)?;
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

    /// Copies `len` bytes from `src` at `src_off` to `dst` at `dst_off`. The two may overlap.
    pub fn copy_between(
        dst: &Memory,
        dst_off: usize,
        src: &Memory,
        src_off: usize,
        len: usize,
    ) -> Result<(), HostError> {
        let to = dst.writable_at(dst_off, len)?;
        let source = src.at(src_off, len)?;
        // SAFETY: both are mapped for `len` bytes; `ptr::copy` allows overlap, which two registrations of the
        // same buffer would give.
        unsafe { ptr::copy(source, to, len) };
        Ok(())
    }

    /// Copies extents (offset in `src`, offset here, and bytes) that follow one another, and gives the checksum (XXH3, 64
    /// bits) of them all in the same pass: of what was written, whatever becomes of `src` meanwhile. `None` where that takes
    /// [`Memory::copy_between`] and [`Memory::sum`], as for what overlaps and for odd addresses; then some of them may have
    /// been copied.
    pub fn copy_summed(
        &self,
        src: &Memory,
        extents: impl Iterator<Item = (usize, usize, usize)>,
    ) -> Result<Option<u64>, HostError> {
        let Some(mut sum) = Xxh3::new() else { return Ok(None) };
        let mut extents = extents.peekable();
        while let Some((from_at, at, len)) = extents.next() {
            let (to, source) = (self.writable_at(at, len)?, src.at(from_at, len)?);
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

    /// A range to send from, without copying it first.
    pub fn send_run(&self, offset: usize, len: usize) -> Result<SendRun<'_>, HostError> {
        let base = self.at(offset, len)?;
        // SAFETY: readable for `len` bytes while `self`, which the run borrows, lives.
        Ok(unsafe { SendRun::from_raw(base, len) })
    }

    /// A range to receive into, without copying afterwards.
    pub fn recv_run(&self, offset: usize, len: usize) -> Result<RecvRun<'_>, HostError> {
        let base = self.writable_at(offset, len)?;
        // SAFETY: writable for `len` bytes while `self`, which the run borrows, lives; no slice lies in it.
        Ok(unsafe { RecvRun::from_raw(base, len) })
    }

    /// The address of `offset`, after checking that `len` bytes from there lie inside.
    fn at(&self, offset: usize, len: usize) -> Result<*mut u8, HostError> {
        match offset.checked_add(len) {
            // SAFETY: offset <= offset + len <= self.len, so the result is inside the memory or one past it.
            Some(end) if end <= self.len => Ok(unsafe { self.base.as_ptr().add(offset) }),
            _ => Err(HostError::OutOfBounds { offset, len, size: self.len }),
        }
    }

    /// The same, if it may be written.
    fn writable_at(&self, offset: usize, len: usize) -> Result<*mut u8, HostError> {
        if self.writable { self.at(offset, len) } else { Err(HostError::ReadOnlyMemory) }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.fd().is_some() { "shared" } else { "foreign" };
        write!(f, "Memory({kind}, {:#x}, {} bytes)", self.addr(), self.len())
    }
}

/// On memory of the heap, so that an interpreter that knows no mappings can watch every access.
#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the heap, in exactly as much room as they take.
    struct Heap(NonNull<[u8]>);

    // SAFETY: the box that it was is this value's alone.
    unsafe impl Send for Heap {}
    // SAFETY: as above.
    unsafe impl Sync for Heap {}

    impl Drop for Heap {
        fn drop(&mut self) {
            // SAFETY: made by `Box::leak`, and given back once; the memory that it was is gone by then.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }

    fn counting(len: u8) -> Memory {
        let heap = Heap(NonNull::from(Box::leak((0..len).collect::<Box<[u8]>>())));
        // SAFETY: the box was leaked and lives as long as `heap`; no reference to its bytes is left.
        unsafe { Memory::foreign(heap.0.cast(), heap.0.len(), Box::new(heap)) }
    }

    fn bytes(memory: &Memory) -> Vec<u8> {
        let mut bytes = vec![0; memory.len()];
        memory.copy_out(0, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn copies_reach_the_last_byte_and_nothing_beyond() {
        let memory = counting(20);
        memory.copy_in(17, &[7, 8, 9]).unwrap();
        let mut out = [0; 4];
        memory.copy_out(16, &mut out).unwrap();
        assert_eq!(out, [16, 7, 8, 9]);
        memory.copy_out(20, &mut []).unwrap();
        for (offset, len) in [(17, 4), (21, 0), (usize::MAX, 1), (1, usize::MAX)] {
            let outside = memory.check(offset, len);
            assert!(matches!(outside, Err(HostError::OutOfBounds { .. })), "{len} at {offset}");
        }
        assert!(memory.copy_in(17, &[0; 4]).is_err() && memory.copy_out(17, &mut [0; 4]).is_err());
        assert_eq!(bytes(&memory)[16..], [16, 7, 8, 9], "a refused copy leaves all as it is");
    }

    #[test]
    fn copies_within_the_same_bytes_are_as_if_through_a_buffer() {
        let (memory, other) = (counting(30), counting(8));
        for (to, from, len) in [(5, 0, 20), (0, 5, 20), (3, 3, 9), (22, 0, 8)] {
            let mut expected = bytes(&memory);
            expected.copy_within(from..from + len, to);
            Memory::copy_between(&memory, to, &memory, from, len).unwrap();
            assert_eq!(bytes(&memory), expected, "{len} bytes from {from} to {to}");
        }
        Memory::copy_between(&memory, 22, &other, 0, 8).unwrap();
        assert_eq!(bytes(&memory)[22..], bytes(&other));
        assert!(Memory::copy_between(&memory, 23, &other, 0, 8).is_err());
        assert!(Memory::copy_between(&memory, 0, &other, 1, 8).is_err());
    }

    #[test]
    fn pieces_for_a_sum_cover_the_range_once() {
        let memory = counting(50);
        let mut seen = Vec::new();
        memory.for_each_chunk(3, 47, &mut [0; 10], |piece| seen.extend_from_slice(piece)).unwrap();
        assert_eq!(seen, bytes(&memory)[3..]);
        assert!(memory.for_each_chunk(4, 47, &mut [0; 10], |_| panic!("out of bounds")).is_err());
        assert!(memory.for_each_chunk(3, 47, &mut [], |_| panic!("no room")).is_err());
    }
}
