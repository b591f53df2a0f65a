//! A shared mapping of a file, unmapped when dropped.
//!
//! A forked child has an address space of its own: dropping its copy of a mapping unmaps it there and leaves
//! the parent's alone. The bytes stay shared between the two.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::HostError;

#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: its bytes are reached only through `Memory` or atomics.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` from its start, shared.
    pub(crate) fn shared(fd: BorrowedFd<'_>, len: usize, writable: bool) -> Result<Mapping, HostError> {
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: the kernel picks the address, so no existing mapping is touched.
        let at = unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }
            .map_err(|e| HostError::os(format!("mapping {len} bytes of shared memory"), e))?;
        match NonNull::new(at.cast::<u8>()) {
            Some(base) => Ok(Mapping { base, len }),
            None => Err(HostError::InvalidArgument("the kernel mapped shared memory at address zero".into())),
        }
    }

    /// The first byte, for the owner of this mapping to keep beside it.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Makes page-table entries for what lies in memory already of `len` bytes at `offset`, a multiple of the page size,
    /// and for nothing else: a read of a page that nobody has touched would commit it. True when all of it did.
    pub(crate) fn populate(&self, offset: usize, len: usize, seen: &mut Vec<u8>) -> Result<bool, HostError> {
        let page = rustix::param::page_size();
        let len = len.min(self.len.saturating_sub(offset));
        seen.clear();
        seen.resize(len.div_ceil(page), 0);
        // SAFETY: inside the mapping, since `offset` and `len` were bounded by it.
        let at = unsafe { self.base.as_ptr().add(offset.min(self.len)) };
        // SAFETY: `seen` has a byte for each page of the range, which is mapped; nothing of it is read.
        if unsafe { libc::mincore(at.cast::<c_void>(), len, seen.as_mut_ptr()) } != 0 {
            return Err(HostError::os("looking for pages in memory", std::io::Error::last_os_error()));
        }
        let mut next = 0;
        for run in seen.chunk_by(|a, b| a & 1 == b & 1) {
            let first = next;
            next += run.len();
            if run[0] & 1 == 0 {
                continue;
            }
            // SAFETY: pages of the range above; what is there is mapped for reading, and nothing changes.
            unsafe {
                let at = at.add(first * page).cast::<c_void>();
                rustix::mm::madvise(at, run.len() * page, Advice::LinuxPopulateRead)
            }
            .map_err(|e| HostError::os("mapping pages that are in memory (needs Linux 5.14 or newer)", e))?;
        }
        Ok(seen.iter().all(|seen| seen & 1 == 1))
    }

    /// Asks for transparent huge pages; the kernel may give none.
    pub(crate) fn advise_huge(&self) -> Result<(), HostError> {
        // SAFETY: the range is this mapping; the advice changes no contents.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast::<c_void>(), self.len, Advice::LinuxHugepage) }
            .map_err(|e| HostError::os("asking for transparent huge pages", e))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and who has its address keeps it too.
        // An error can only mean that it is not mapped, which is what is wanted.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.len) };
    }
}
