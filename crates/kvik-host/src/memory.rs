//! Registered memory of this process: a pointer, a length, and functions that copy.
//!
//! There are two kinds. *Foreign* memory belongs to the caller (a tensor, a buffer); kvik holds whatever keeps
//! it alive. *Shared* memory is allocated by kvik as a sealed memfd, so that a peer on the same host can map
//! it read-only and copy from it without asking.
//!
//! After a fork both kinds stay usable in the child: foreign memory is copied on write as any memory is,
//! shared memory stays shared. Dropping a `Memory` in the child unmaps and closes the child's own copies, never
//! the parent's.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use crate::error::HostError;
use crate::huge_pages::{HugePageFacts, HugePages};
use crate::mapping::Mapping;
use crate::runs::{RecvRun, SendRun};
use crate::sealed;
use crate::span::Span;

/// Memory that transfers read and write. `Send` and `Sync`; never a slice.
pub struct Memory {
    span: Span,
    writable: bool,
    backing: Backing,
}

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
        // SAFETY: the caller's promise is that of `Span::new`.
        let span = unsafe { Span::new(ptr, len) };
        Memory { span, writable: true, backing: Backing::Foreign { _keep: keep } }
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
        // SAFETY: the caller's promise is that of `Span::new`, and nothing is written through this one.
        let span = unsafe { Span::new(ptr, len) };
        Memory { span, writable: false, backing: Backing::Foreign { _keep: keep } }
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
        Memory::from_parts(fd, mapping, len, pages).map_err(|e| e.to_string())
    }

    fn on_ordinary_pages(len: usize, ask_transparent: bool, why: String) -> Result<Memory, HostError> {
        let (fd, mapping) = sealed::create("kvik", len, None)?;
        let transparent = ask_transparent && mapping.advise_huge().is_ok();
        let page_size = rustix::param::page_size();
        Memory::from_parts(fd, mapping, len, PageInfo { page_size, transparent, why_not_bigger: why })
    }

    fn from_parts(fd: OwnedFd, mapping: Mapping, len: usize, pages: PageInfo) -> Result<Memory, HostError> {
        let span = mapping.span(len)?;
        Ok(Memory { span, writable: true, backing: Backing::Shared { fd, _mapping: mapping, pages } })
    }

    /// The address of the first byte.
    pub fn addr(&self) -> usize {
        self.span.addr()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.span.len()
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
        self.span.at(offset, len).map(|_| ())
    }

    /// Copies `from` to `offset`.
    pub fn copy_in(&self, offset: usize, from: &[u8]) -> Result<(), HostError> {
        self.writable_span()?.copy_in(offset, from)
    }

    /// Copies from `offset` into `into`.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), HostError> {
        self.span.copy_out(offset, into)
    }

    /// The checksum (XXH3, 64 bits) of ranges (offset and bytes) that follow one another, in one pass; `None` where it
    /// takes [`Self::for_each_chunk`]: few bytes, ranges of odd sizes, and processors without wide vectors. Meanwhile
    /// as many bytes at `next`, which are moved next, come into the cache: a hint, which is right at any offset.
    pub fn sum(
        &self,
        ranges: impl Iterator<Item = (usize, usize)>,
        next: Option<usize>,
    ) -> Result<Option<u64>, HostError> {
        self.span.sum(ranges, next)
    }

    /// Copies a range out through `scratch` in pieces of at most 16 KiB and hands each to `f`, for checksums.
    pub fn for_each_chunk(
        &self,
        offset: usize,
        len: usize,
        scratch: &mut [u8],
        f: impl FnMut(&[u8]),
    ) -> Result<(), HostError> {
        self.span.for_each_chunk(offset, len, scratch, f)
    }

    /// Copies `len` bytes from `src` at `src_off` to `dst` at `dst_off`. The two may overlap.
    pub fn copy_between(
        dst: &Memory,
        dst_off: usize,
        src: &Memory,
        src_off: usize,
        len: usize,
    ) -> Result<(), HostError> {
        dst.writable_span()?.copy_from(dst_off, &src.span, src_off, len)
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
        self.writable_span()?.copy_summed_from(&src.span, extents)
    }

    /// A range to send from, without copying it first.
    pub fn send_run(&self, offset: usize, len: usize) -> Result<SendRun<'_>, HostError> {
        let base = self.span.at(offset, len)?;
        // SAFETY: readable for `len` bytes while `self`, which the run borrows, lives.
        Ok(unsafe { SendRun::from_raw(base, len) })
    }

    /// A range to receive into, without copying afterwards.
    pub fn recv_run(&self, offset: usize, len: usize) -> Result<RecvRun<'_>, HostError> {
        let base = self.writable_span()?.at(offset, len)?;
        // SAFETY: writable for `len` bytes while `self`, which the run borrows, lives; no slice lies in it.
        Ok(unsafe { RecvRun::from_raw(base, len) })
    }

    /// The span, if it may be written.
    pub(crate) fn writable_span(&self) -> Result<&Span, HostError> {
        if self.writable { Ok(&self.span) } else { Err(HostError::ReadOnlyMemory) }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.fd().is_some() { "shared" } else { "foreign" };
        write!(f, "Memory({kind}, {:#x}, {} bytes)", self.addr(), self.len())
    }
}
