//! Whether the disk below a store gives anything at present.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A disk that was asked and has given nothing for so long has stopped: what is only there is a miss until it gives
/// something again.
const STOPPED: Duration = Duration::from_secs(2);

/// Whether the disk gives anything.
#[derive(Default)]
pub(crate) struct Pulse(Mutex<Option<Asked>>);

/// Reads that have begun and not ended.
struct Asked {
    count: usize,
    /// When one of them ended, or the first began.
    last: Instant,
}

impl Pulse {
    fn lock(&self) -> MutexGuard<'_, Option<Asked>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A read begins.
    pub fn begin(&self) {
        match &mut *self.lock() {
            Some(asked) => asked.count += 1,
            none => *none = Some(Asked { count: 1, last: Instant::now() }),
        }
    }

    /// One has ended.
    pub fn end(&self) {
        let mut reads = self.lock();
        *reads = reads
            .take()
            .filter(|asked| asked.count > 1)
            .map(|asked| Asked { count: asked.count - 1, last: Instant::now() });
    }

    /// How long it is until the disk has stopped if it gives nothing; none where it has.
    pub fn left(&self) -> Duration {
        self.lock().as_ref().map_or(STOPPED, |asked| STOPPED.saturating_sub(asked.last.elapsed()))
    }
}
