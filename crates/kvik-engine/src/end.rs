//! Where the outcome of something in flight appears.

use crate::config::MAX_DEADLINE;
use crate::sync::{lock, signal};
use kvik_core::{Code, Error, Result};
use kvik_host::event::EventFd;
use kvik_transport::from_host;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// An outcome that comes once, for any number of those who wait for it.
pub(crate) struct End<T> {
    state: Mutex<State<T>>,
    arrived: Condvar,
}

struct State<T> {
    outcome: Option<Result<T>>,
    watchers: Vec<EventFd>,
}

impl<T> Default for End<T> {
    fn default() -> Self {
        End { state: Mutex::new(State { outcome: None, watchers: Vec::new() }), arrived: Condvar::new() }
    }
}

impl<T: Clone> End<T> {
    /// Sets the outcome, once, and wakes everybody.
    pub fn set(&self, outcome: Result<T>) {
        let mut state = lock(&self.state);
        if state.outcome.is_none() {
            state.outcome = Some(outcome);
            state.watchers.drain(..).for_each(|watcher| signal(&watcher, "a waiter"));
        }
        drop(state);
        self.arrived.notify_all();
    }

    /// The outcome, if it is there.
    pub fn outcome(&self) -> Option<Result<T>> {
        lock(&self.state).outcome.clone()
    }

    pub fn is_there(&self) -> bool {
        lock(&self.state).outcome.is_some()
    }

    /// Waits for the outcome.
    ///
    /// # Errors
    /// What it says; `WaitTimeout` with this text when `timeout` passes first.
    pub fn wait(&self, timeout: Option<Duration>, late: &str) -> Result<T> {
        let until = timeout.map(|timeout| Instant::now() + timeout.min(MAX_DEADLINE));
        let mut state = lock(&self.state);
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone();
            }
            state = match until {
                None => self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(Error::new(Code::WaitTimeout, late));
                    }
                    self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// A descriptor that becomes readable when the outcome is there.
    ///
    /// # Errors
    /// `InvalidArgument` when the process has too many descriptors.
    pub fn fd(self: &Arc<Self>) -> Result<OwnedFd> {
        let event = EventFd::new().map_err(|error| from_host(Code::InvalidArgument, error))?;
        let fd = duplicate(&event)?;
        let mut state = lock(&self.state);
        match state.outcome {
            Some(_) => event.signal().map_err(|error| from_host(Code::InvalidArgument, error))?,
            None => state.watchers.push(event),
        }
        Ok(fd)
    }
}

/// Another descriptor of the same event.
///
/// # Errors
/// `InvalidArgument` when the process has too many descriptors.
pub(crate) fn duplicate(event: &EventFd) -> Result<OwnedFd> {
    event.as_fd().try_clone_to_owned().map_err(|error| {
        let text = format!("a descriptor cannot be duplicated ({error}); raise ulimit -n");
        Error::new(Code::InvalidArgument, text)
    })
}
