//! Everything that the first transfer with a peer would wait for, made before it.
//!
//! A warm-up waits for a session as a transfer does, and goes on on it: it asks for what is missing, and looks again
//! whenever something of it has come. Nothing is asked of the grant, and no memory is touched.

mod state;

use crate::engine::Engine;
use crate::report::TransferOptions;
use crate::transfer::Transfer;
use crate::transfers::request::TransferRequest;
use kvik_core::{Result, Ticket};
use kvik_host::clock::boottime;
use kvik_proto::Identity;
pub use state::{NicPair, PairState, WarmUpReport};
pub(crate) use state::{State, WarmUpState};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// A warm-up in progress. Dropping it does not end it: its timeout does.
#[derive(Clone)]
pub struct WarmUp {
    transfer: Transfer,
    warm: Arc<WarmUpState>,
}

impl WarmUp {
    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        self.transfer.is_done()
    }

    /// What came of it, if it has ended.
    pub fn result(&self) -> Option<Result<WarmUpReport>> {
        Some(self.transfer.result()?.map(|report| self.warm.told(report)))
    }

    /// Waits for its end; with `None` as long as its own timeout takes.
    ///
    /// # Errors
    /// Why the peer could not be reached; `WaitTimeout` when `timeout` passes first.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<WarmUpReport> {
        self.transfer.transfers.check_fork()?;
        let late = "the warm-up had not ended when the wait did; it goes on until its timeout: wait again";
        self.transfer.end.wait(timeout, late).map(|report| self.warm.told(report))
    }

    /// Ends it. What is open by then stays open.
    pub fn cancel(&self) {
        self.transfer.cancel();
    }

    /// A descriptor that becomes readable at its end, for event loops.
    ///
    /// # Errors
    /// `InvalidArgument` when the process has too many descriptors.
    pub fn done_fd(&self) -> Result<OwnedFd> {
        self.transfer.done_fd()
    }
}

impl Engine {
    /// Opens everything that the first transfer with the ticket's owner would wait for: the session, and of what this
    /// engine's `transport` allows the data channels, the local link and the connection of each NIC here to its NIC
    /// there, with an operation over it. `auto` allows all of them. No page is touched, and of the ticket only the
    /// owner counts: a [`ticket_template`](Engine::ticket_template) does, and so does a ticket whose grant has ended.
    ///
    /// One that finds all of it there does nothing and says so. Several at a time share the work. It does not disturb
    /// transfers. The connections serve this engine's reads and writes alike; for transfers that the peer begins, the
    /// peer warms its own.
    ///
    /// A NIC that reaches none of the peer's is among the report's pairs with the reason, and so is one that has not
    /// when `timeout` (the engine's deadline, if none is given) is over; the others are warm all the same.
    ///
    /// # Errors
    /// Here and from [`WarmUp::wait`]: `InvalidArgument` for a bad timeout; why the owner cannot be reached, or not
    /// over this engine's `transport` (`PeerUnreachable`, `PeerRestarted`, `TransportUnavailable` and others);
    /// `DeadlineExceeded` when its data channels have not joined by then.
    pub fn warm_up(&self, ticket: &Ticket, timeout: Option<Duration>) -> Result<WarmUp> {
        let base = &self.inner().base;
        base.setup.check()?;
        let options = TransferOptions { deadline: timeout, ..TransferOptions::default() };
        let owner = Identity { engine: ticket.engine, incarnation: ticket.incarnation };
        let met = owner.engine == self.id() || base.node(|node, _| node.session_with(&owner)).is_some();
        let warm = Arc::new(WarmUpState::new(!met));
        let request = TransferRequest { warm: Some(warm.clone()), ..self.request(ticket, &options)? };
        Ok(WarmUp { transfer: self.begin(request, boottime())?, warm })
    }
}
