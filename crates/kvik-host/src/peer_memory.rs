//! A peer's shared memory, mapped read-only into this process.
//!
//! Nothing that the peer says is believed. The descriptor must be a memfd, carry every seal that keeps a
//! reader alive, and have exactly the size that was announced; each failure has its own error. Whether bytes
//! read from it still count is for the [fence](crate::fence) to say.

use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};

use crate::error::HostError;
use crate::mapping::Mapping;
use crate::memory::Memory;
use crate::sealed;

/// Memory of another process on this host, readable and never writable here: all that [`Memory`] can do but write.
#[derive(Debug)]
pub struct PeerMemory {
    memory: Memory,
    // After the memory, which lies in it.
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
        // SAFETY: mapped for at least `expected_len` bytes until the mapping is dropped, which is after the memory. It is
        // mapped for reading, and its bytes have no Rust reference: they are another process's.
        let memory = unsafe { Memory::foreign_read_only(mapping.base(), expected_len, Box::new(())) };
        Ok(PeerMemory { memory, mapping })
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
}

impl Deref for PeerMemory {
    type Target = Memory;

    fn deref(&self) -> &Memory {
        &self.memory
    }
}
