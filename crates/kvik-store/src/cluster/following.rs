//! The end of what follows the list of a store's servers.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Ends the thread that asks who the servers are.
#[derive(Default)]
pub(crate) struct Following {
    ended: Mutex<bool>,
    changed: Condvar,
}

impl Following {
    pub fn end(&self) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits for so long; whether it has ended.
    pub fn wait(&self, time: Duration) -> bool {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(ended, time, |ended| !*ended);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
