//! Knowing, for the price of one load, that this process is a forked child.
//!
//! A child inherits memory and descriptors, but no thread: an engine of the parent cannot work there, and must
//! neither be used nor do anything to the parent's peers. Asking for the process number costs a system call each
//! time; a handler that `fork` runs in the child costs nothing until then.
//!
//! Programs that make children with the bare `clone` system call do not run such handlers and are not seen here.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::HostError;

/// How many forks lie between the first process and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// The result of registering the handler, which is done once.
static REGISTERED: OnceLock<i32> = OnceLock::new();

/// Runs in every forked child, where only such simple things are allowed.
extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Remembers the process it was made in.
#[derive(Clone, Copy, Debug)]
pub struct ForkGuard {
    made_at: u64,
}

impl ForkGuard {
    /// A guard for the calling process.
    pub fn new() -> Result<ForkGuard, HostError> {
        let status = *REGISTERED.get_or_init(|| {
            // SAFETY: the handler touches one atomic and lives as long as the program.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) }
        });
        if status != 0 {
            let error = std::io::Error::from_raw_os_error(status);
            return Err(HostError::os("registering a handler for forked children", error));
        }
        Ok(ForkGuard { made_at: FORKS.load(Ordering::Relaxed) })
    }

    /// Whether the calling process is a forked child of the one that made the guard.
    pub fn is_child(&self) -> bool {
        FORKS.load(Ordering::Relaxed) != self.made_at
    }
}
