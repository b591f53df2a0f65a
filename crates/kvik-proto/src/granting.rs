//! The calls that concern the grants of an engine.

use crate::node::{Node, Protocol};
use crate::offer::Offer;
use kvik_core::{GrantId, GrantState, RegionId, Result};
use std::ops::Deref;
use std::time::Duration;

/// The grants: see [`Node::grants`].
pub struct GrantCalls<'a, R, S> {
    node: &'a mut Node<R, S>,
}

impl<R: Clone, S: Deref<Target = Protocol<R>>> Node<R, S> {
    /// What concerns the grants of this engine.
    pub fn grants(&mut self) -> GrantCalls<'_, R, S> {
        GrantCalls { node: self }
    }
}

impl<R: Clone, S: Deref<Target = Protocol<R>>> GrantCalls<'_, R, S> {
    /// Gives a grant. Requests that came before it are served now.
    ///
    /// # Errors
    /// `InvalidArgument` for an id that was used before.
    pub fn give(&mut self, id: GrantId, offer: Offer<R>, now: Duration) -> Result<()> {
        self.node.call().add_grant(id, offer, true)?;
        self.serve_parked(id, now);
        Ok(())
    }

    /// Gives a grant over pages that somebody still writes or reads. Requests wait until it is [ready](Self::ready); it
    /// ends like any other, also before.
    ///
    /// # Errors
    /// `InvalidArgument` for an id that was used before.
    pub fn give_later(&mut self, id: GrantId, offer: Offer<R>, now: Duration) -> Result<()> {
        self.node.call().add_grant(id, offer, false)?;
        self.node.expire(now);
        Ok(())
    }

    /// What the pages of a grant waited for has ended: requests are served from now on.
    pub fn ready(&mut self, id: GrantId, now: Duration) {
        self.node.table().set_ready(id);
        self.serve_parked(id, now);
    }

    fn serve_parked(&mut self, id: GrantId, now: Duration) {
        self.node.expire(now);
        let parked = self.node.table().take_parked(id);
        for (session, transfer) in parked {
            self.node.with_transfers(session, |transfers, cx| transfers.unpark(transfer, now, cx));
        }
    }

    /// Ends a grant. `GrantEnded` comes when its pages are the owner's again, which may be at once.
    pub fn end(&mut self, id: GrantId, state: GrantState) {
        self.node.call().end_grant(id, state);
    }

    /// Gives a live grant more time: how much it now has.
    ///
    /// # Errors
    /// The way the grant ended, or `GrantUnknown`.
    pub fn extend(&mut self, id: GrantId, by: Duration, now: Duration) -> Result<Duration> {
        self.node.expire(now);
        Ok(self.node.call().extend_grant(id, by)?.saturating_sub(now))
    }

    /// Ends all grants over a region that is to be closed.
    pub fn end_all_of(&mut self, region: RegionId) {
        let over = self.node.table().of_region(region);
        for id in over {
            self.end(id, GrantState::Closed);
        }
    }

    /// Ends every grant, for an engine that closes.
    pub fn end_all(&mut self) {
        let all = self.node.table().all();
        for id in all {
            self.end(id, GrantState::Closed);
        }
    }
}
