//! Waiting without the GIL, in steps that let Ctrl-C through.
//!
//! Python handles a signal only between its own instructions, so a native wait of minutes would hold Ctrl-C
//! back for minutes. A step is short enough to be unnoticed, and long enough to cost nothing; what is waited
//! for still ends the step at once.

use crate::args::{Seconds, maybe_seconds};
use crate::errors::OrRaise;
use kvik_core::{Code, Result};
use pyo3::prelude::*;
use std::time::{Duration, Instant};

/// The longest time that a signal waits.
const STEP: Duration = Duration::from_millis(50);

/// Calls `step` with the time it may take until it gives something, or the timeout passes (`None`).
pub fn in_steps<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    step: impl Fn(Duration) -> Option<T> + Sync,
) -> PyResult<Option<T>> {
    // A timeout beyond what the clock can count is no timeout; the transfer's own deadline still holds.
    let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = until.map_or(STEP, |until| until.saturating_duration_since(Instant::now()));
        if let Some(found) = py.detach(|| step(left.min(STEP))) {
            return Ok(Some(found));
        }
        py.check_signals()?;
        if until.is_some_and(|until| Instant::now() >= until) {
            return Ok(None);
        }
    }
}

/// Waits for an end by `wait`, in steps. Where the timeout (seconds) passes first it is what `wait` says of that.
pub fn for_end<T: Send>(
    py: Python<'_>,
    timeout: Option<Seconds>,
    wait: impl Fn(Option<Duration>) -> Result<T> + Sync,
) -> PyResult<T> {
    let limit = maybe_seconds(py, "timeout", timeout)?;
    let ended = in_steps(py, limit, |step| match wait(Some(step)) {
        Err(error) if error.code == Code::WaitTimeout => None,
        ended => Some(ended),
    })?;
    ended.unwrap_or_else(|| wait(Some(Duration::ZERO))).or_raise(py)
}
