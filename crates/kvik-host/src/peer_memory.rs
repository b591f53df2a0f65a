//! A peer's shared memory, mapped read-only into this process.
//!
//! Nothing that the peer says is believed. The descriptor must be a memfd, carry every seal that keeps a
//! reader alive, and have exactly the size that was announced; each failure has its own error. Whether bytes
//! read from it still count is for the [fence](crate::fence) to say.

use std::os::fd::{AsFd, OwnedFd};

use crate::error::HostError;
use crate::mapping::Mapping;
use crate::memory::Memory;
use crate::runs::SendRun;
use crate::sealed;
use crate::span::Span;

/// Memory of another process on this host, readable and never writable here.
#[derive(Debug)]
pub struct PeerMemory {
    span: Span,
    mapping: Mapping,
}

impl PeerMemory {
    /// Bytes that [`PeerMemory::populate`] looks at.
    pub const STEP: usize = 2 << 20;

    /// Checks and maps a descriptor that came from a peer. `expected_len` is the length the peer announced for
    /// the region; the file has exactly that, or the next multiple of its huge page.
    ///
    /// The descriptor is closed on return; the mapping keeps the memory.
    pub fn map(fd: OwnedFd, expected_len: usize) -> Result<PeerMemory, HostError> {
        let have = sealed::check(fd.as_fd())?;
        let file_len = sealed::file_len(fd.as_fd(), expected_len)?;
        if expected_len == 0 || have != file_len as u64 {
            return Err(HostError::SizeMismatch { have, want: expected_len as u64 });
        }
        let mapping = Mapping::shared(fd.as_fd(), file_len, false)?;
        // Only a wish: without it the copy takes more page faults and is as right.
        let _ = mapping.advise_huge();
        Ok(PeerMemory { span: mapping.span(expected_len)?, mapping })
    }

    /// Makes page-table entries for the pages of a range that lie in memory already, so that no copy pays for them one by
    /// one. `offset` is a multiple of [`PeerMemory::STEP`]; at most that many bytes are looked at, a bounded piece of work.
    /// A page that its owner has not touched stays untouched: it costs no memory. `seen` is scratch space. True when
    /// every page of the range is there.
    ///
    /// # Errors
    /// The kernel cannot, or will not: the copies then take page faults, and are as right.
    pub fn populate(&self, offset: usize, seen: &mut Vec<u8>) -> Result<bool, HostError> {
        self.check(offset, 0)?;
        self.mapping.populate(offset, PeerMemory::STEP, seen)
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.span.len()
    }

    /// Whether there are no bytes; never so for a mapping that was made.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `len` bytes at `offset` lie inside.
    pub fn check(&self, offset: usize, len: usize) -> Result<(), HostError> {
        self.span.at(offset, len).map(|_| ())
    }

    /// Copies from `offset` into `into`.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), HostError> {
        self.span.copy_out(offset, into)
    }

    /// Copies `len` bytes at `offset` into memory of this process.
    pub fn copy_into(
        &self,
        offset: usize,
        dst: &Memory,
        dst_off: usize,
        len: usize,
    ) -> Result<(), HostError> {
        dst.writable_span()?.copy_from(dst_off, &self.span, offset, len)
    }

    /// The checksum (XXH3, 64 bits) of a range, in one pass; `None` where it takes [`Self::for_each_chunk`]: short
    /// ranges, and processors without wide vectors. Meanwhile `len` bytes at `next`, which are moved next, come into
    /// the cache: a hint, which is right at any offset.
    pub fn sum(&self, offset: usize, len: usize, next: Option<usize>) -> Result<Option<u64>, HostError> {
        self.span.sum(offset, len, next)
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

    /// A range to send from, without copying it first.
    pub fn send_run(&self, offset: usize, len: usize) -> Result<SendRun<'_>, HostError> {
        let base = self.span.at(offset, len)?;
        // SAFETY: readable for `len` bytes while `self`, which the run borrows, lives.
        Ok(unsafe { SendRun::from_raw(base, len) })
    }
}
