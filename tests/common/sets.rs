//! The descriptors that threads of this process sleep on, and what a program does to them that closes all that it knows
//! nothing of.

use kvik_host::event::EventFd;
use std::collections::BTreeSet;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// The sets that threads of this process sleep on.
pub fn sets() -> BTreeSet<RawFd> {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let sets = descriptors.filter(|path| {
        std::fs::read_link(path).is_ok_and(|what| what.as_os_str() == "anon_inode:[eventpoll]")
    });
    sets.map(|path| path.file_name().unwrap().to_str().unwrap().parse().unwrap()).collect()
}

/// Puts something else in the place of a set; who waits on it notices when it waits again.
pub fn take_away(set: RawFd) {
    // SAFETY: it is open, and not closed by this value.
    let mut taken = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(set) });
    rustix::io::dup2(EventFd::new().unwrap(), &mut taken).unwrap();
}
