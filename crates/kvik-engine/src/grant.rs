//! The owner's handle of a grant.

use crate::config::MAX_DEADLINE;
use crate::region::Region;
use crate::shared::Shared;
use crate::tag::Tag;
use kvik_core::{Code, Error, GrantId, GrantState, Result, Right, Ticket, Use};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a grant allows.
#[derive(Debug, Clone)]
pub struct GrantOptions {
    /// Read or write. Default: read.
    pub right: Right,
    /// How often. Default: once, by one reader, or by as many as the readers themselves declare.
    pub uses: Use,
    /// How long it lives if it is not extended. Default 120 s.
    pub expiry: Duration,
    /// How long it lives at most, with all extensions. Default 600 s.
    pub max_expiry: Duration,
    /// Its id, where somebody else has already made the ticket. Default: a new one.
    pub id: Option<GrantId>,
    /// A request id for this side's log lines; it is never sent.
    pub tag: String,
}

impl Default for GrantOptions {
    fn default() -> Self {
        GrantOptions {
            right: Right::Read,
            uses: Use::Once(1),
            expiry: Duration::from_secs(120),
            max_expiry: Duration::from_secs(600),
            id: None,
            tag: String::new(),
        }
    }
}

impl GrantOptions {
    pub(crate) fn check(&self) -> Result<()> {
        let most = Duration::from_secs(7 * 24 * 3600);
        if self.expiry.is_zero() || self.expiry > self.max_expiry || self.max_expiry > most {
            return Err(Error::new(
                Code::InvalidArgument,
                format!(
                    "a grant's expiry ({:?}) is more than 0 and at most its max_expiry ({:?}), which is at most {most:?}",
                    self.expiry, self.max_expiry
                ),
            ));
        }
        if self.uses == Use::Once(0) {
            return Err(Error::new(
                Code::InvalidArgument,
                "a grant for no reader is none: use is at least 1, or many",
            ));
        }
        Ok(())
    }
}

/// A grant that this engine has given.
#[derive(Clone)]
pub struct Grant {
    pub(crate) shared: Arc<Shared>,
    pub(crate) ticket: Arc<Ticket>,
    pub(crate) cell: Arc<GrantCell>,
    /// The region stays registered while its grant is held.
    pub(crate) _region: Region,
}

/// Where the end of a grant appears.
pub(crate) struct GrantCell {
    /// The request that it was given for, for logs.
    pub tag: Tag,
    state: Mutex<GrantState>,
    changed: Condvar,
}

impl GrantCell {
    pub fn new(tag: Tag) -> GrantCell {
        GrantCell { tag, state: Mutex::new(GrantState::Live), changed: Condvar::new() }
    }
    fn lock(&self) -> MutexGuard<'_, GrantState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn set(&self, state: GrantState) {
        *self.lock() = state;
        self.changed.notify_all();
    }
}

impl Grant {
    /// Its id.
    pub fn id(&self) -> GrantId {
        self.ticket.grant
    }
    /// What those who may use it need.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }
    /// Where it stands. Anything but live means that the pages are the owner's again.
    pub fn state(&self) -> GrantState {
        *self.cell.lock()
    }

    /// Takes it back. When this returns, the pages are the owner's again.
    ///
    /// # Errors
    /// `PagesQuarantined` when that could not be brought about by the timeout; wait for the grant then.
    pub fn revoke(&self, timeout: Duration) -> Result<()> {
        self.shared.check_fork()?;
        self.shared.end_grant(self.id(), GrantState::Revoked);
        match self.wait(timeout) {
            Some(_) => Ok(()),
            None => {
                self.shared.tell_quarantine_of(self.id());
                Err(Error::new(
                    Code::PagesQuarantined,
                    format!(
                        "pages of grant {} may still be touched by a transfer; wait for the grant before you use them",
                        self.id()
                    ),
                ))
            }
        }
    }

    /// Gives it more time, up to its `max_expiry`: how much it now has.
    ///
    /// # Errors
    /// The way it ended.
    pub fn extend(&self, by: Duration) -> Result<Duration> {
        self.shared.check()?;
        self.shared.node(|node, now| node.extend_grant(self.id(), by, now))
    }

    /// The final state, once the pages are the owner's again; `None` at the timeout.
    pub fn wait(&self, timeout: Duration) -> Option<GrantState> {
        let until = Instant::now() + timeout.min(MAX_DEADLINE);
        let mut state = self.cell.lock();
        while *state == GrantState::Live {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.cell.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(*state)
    }
}
