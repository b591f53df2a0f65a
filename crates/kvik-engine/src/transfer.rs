//! The handle of a transfer.

use crate::end::End;
use crate::report::Report;
use crate::transfers::Transfers;
use kvik_core::{Code, Error, Result};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// A transfer in flight. Dropping it does not end it: its deadline does.
#[derive(Clone)]
pub struct Transfer {
    pub(crate) transfers: Arc<Transfers>,
    pub(crate) id: u64,
    pub(crate) end: Arc<End<Report>>,
}

impl Transfer {
    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        self.end.is_there()
    }

    /// The outcome, if it has ended.
    pub fn result(&self) -> Option<Result<Report>> {
        self.end.outcome()
    }

    /// Waits for the end; with `None` as long as its deadline takes.
    ///
    /// When this returns with anything but `WaitTimeout`, nothing on this side touches the memory any more.
    ///
    /// # Errors
    /// Why it failed; `WaitTimeout` when `timeout` passes first, and the transfer goes on.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Report> {
        self.transfers.check_fork()?;
        let late = "the transfer had not ended when the wait did; it goes on until its deadline: wait again, or cancel it";
        self.end.wait(timeout, late)
    }

    /// Asks for the end. The outcome is `Cancelled`, unless another one was faster.
    pub fn cancel(&self) {
        if self.transfers.check_fork().is_ok() {
            let text = "the transfer was cancelled here; start another one if its pages are still wanted";
            self.transfers.cancel(self.id..self.id + 1, &Error::new(Code::Cancelled, text));
        }
    }

    /// A descriptor that becomes readable when the transfer ends, for event loops.
    ///
    /// # Errors
    /// `InvalidArgument` when the process has too many descriptors.
    pub fn done_fd(&self) -> Result<OwnedFd> {
        self.transfers.check_fork()?;
        self.end.fd()
    }
}
