//! A shared mapping of a file, unmapped when dropped.
//!
//! A forked child has an address space of its own: dropping its copy of a mapping unmaps it there and leaves
//! the parent's alone. The bytes stay shared between the two.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::HostError;
use crate::span::Span;

#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: its bytes are reached only through `Span` or atomics.
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

    /// The first `len` bytes as a span, for the owner of this mapping to keep beside it.
    pub(crate) fn span(&self, len: usize) -> Result<Span, HostError> {
        if len > self.len {
            return Err(HostError::OutOfBounds { offset: 0, len, size: self.len });
        }
        // SAFETY: mapped for at least `len` bytes until this value drops; the callers keep both together.
        Ok(unsafe { Span::new(self.base, len) })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
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
        // SAFETY: this value owns the mapping, and every span of it is kept beside it and goes with it.
        // An error can only mean that it is not mapped, which is what is wanted.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.len) };
    }
}
