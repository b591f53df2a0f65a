//! Locks and atomics, which loom replaces where it tries every order of threads.

#[cfg(feature = "loom")]
pub(crate) use loom::sync::{
    Arc, Mutex, MutexGuard, RwLock,
    atomic::{AtomicU64, Ordering, fence},
};
use std::sync::PoisonError;
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::{
    Arc, Mutex, MutexGuard, RwLock,
    atomic::{AtomicU64, Ordering, fence},
};
use std::time::Duration;

/// Takes a lock. A thread that panicked under it has been heard of by then, and state is whole between calls.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A time that threads read without a lock, or none. The fence is half of a promise to whoever sleeps by it: who makes
/// something due sees afterwards for how long that thread sleeps, or that thread, after a fence of its own, sees what
/// became due.
pub(crate) struct Soonest(AtomicU64);

impl Default for Soonest {
    fn default() -> Self {
        Soonest(AtomicU64::new(u64::MAX))
    }
}

impl Soonest {
    pub fn set(&self, at: Option<Duration>) {
        let at = at.map_or(u64::MAX, |at| u64::try_from(at.as_nanos()).unwrap_or(u64::MAX - 1));
        self.0.store(at, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    pub fn get(&self) -> Option<Duration> {
        Some(self.0.load(Ordering::Acquire)).filter(|at| *at != u64::MAX).map(Duration::from_nanos)
    }
}
