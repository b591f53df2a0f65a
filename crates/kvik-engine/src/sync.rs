//! What several parts use between threads.

use kvik_host::event::EventFd;
pub(crate) use kvik_host::thread::lock;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Wakes who waits for an event.
pub(crate) fn signal(event: &EventFd, who: &str) {
    if let Err(error) = event.signal() {
        log::error!("{who} cannot be woken: {error}");
    }
}

/// Counts something that happens, for those who wait for it.
#[derive(Default)]
pub(crate) struct Progress {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Progress {
    pub fn note(&self) {
        *lock(&self.count) += 1;
        self.changed.notify_all();
    }

    pub fn count(&self) -> u64 {
        *lock(&self.count)
    }

    /// Waits until it happens again, or the time is over.
    pub fn wait(&self, most: Duration) {
        self.wait_since(self.count(), most);
    }

    /// Waits until it has happened again since it was `count`, or the time is over.
    pub fn wait_since(&self, count: u64, most: Duration) {
        let guard = lock(&self.count);
        if *guard == count {
            drop(self.changed.wait_timeout(guard, most).unwrap_or_else(PoisonError::into_inner));
        }
    }
}
