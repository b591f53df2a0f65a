//! What can be asked of the protocol at any time: it changes nothing.

use crate::FlowKey;
use crate::connection::Connection;
use crate::handshake::{Established, Identity};
use crate::holding::Holding;
use crate::node::Protocol;
use crate::peers::SessionState;
use crate::reclaim::ReclaimCounts;
use crate::session::Session;
use crate::sync::{AtomicU64, Ordering, lock};
use kvik_core::{GrantId, GrantState, RegionId};
use std::sync::Arc;
use std::time::Duration;

impl<R: Clone> Protocol<R> {
    /// What the handshake of a session found out.
    pub fn established(&self, session: u64) -> Option<Arc<Established>> {
        self.look(session, |one| one.connection().map(|connection| connection.established().clone()))?
    }

    /// Whether a session is there, and not over.
    pub fn is_live(&self, session: u64) -> bool {
        self.look(session, Session::is_live).unwrap_or_default()
    }

    /// Whether nothing was heard on a session for half of the time after which its peer is dead.
    pub fn is_suspect(&self, session: u64) -> bool {
        self.look(session, |one| one.connection().is_some_and(Connection::is_suspect)).unwrap_or_default()
    }

    /// Transfers of a session that are open, which may outlive it for as long as it takes to stop them.
    pub fn transfers_in(&self, session: u64) -> usize {
        self.look(session, |session| session.transfers().flows().len()).unwrap_or_default()
    }

    /// Bytes that the open transfers of a session have still to move, those of either side, by what is known here: of
    /// what the peer copies, or its NIC moves, nothing counts as moved before the end.
    pub fn bytes_left(&self, session: u64) -> u64 {
        self.look(session, |session| session.transfers().flows().bytes_left()).unwrap_or_default()
    }

    /// Bytes that are held here because of a session: what its peer sent and asked for, and what it leaves unread.
    pub fn held_for(&self, session: u64) -> u64 {
        self.look(session, Session::held).unwrap_or_default()
    }

    /// Whether the session has something to send.
    pub fn wants_to_send(&self, session: u64) -> bool {
        self.look(session, |one| one.is_live() && one.transfers().turns().wants_to_send()).unwrap_or_default()
    }

    /// Whether the session has something to post.
    pub fn wants_to_post(&self, session: u64) -> bool {
        self.look(session, |one| one.is_live() && one.transfers().turns().wants_to_post()).unwrap_or_default()
    }

    /// Bytes of chunks that a session's channels have in flight to send.
    pub fn in_flight(&self, session: u64) -> u64 {
        let look = |one: &Session<R>| if one.is_live() { one.transfers().turns().in_flight() } else { 0 };
        self.look(session, look).unwrap_or_default()
    }

    /// Where a grant stands; `None` when it is unknown.
    pub fn grant_state(&self, id: GrantId) -> Option<GrantState> {
        self.table().state(id)
    }

    /// Number of grants that have not ended.
    pub fn open_grants(&self) -> usize {
        self.table().len()
    }

    /// Pages of grants that are over while a transfer may still touch them: they are not the owner's again yet.
    pub fn quarantined(&self) -> u64 {
        self.table().quarantined()
    }

    /// What keeps a grant from ending; `None` when it has ended or was never given.
    pub fn holding(&self, id: GrantId) -> Option<Holding> {
        let (given, flows) = self.table().held(id)?;
        let view = &given.offer().view;
        let by = flows.iter().map(|key| self.holder(*key)).collect();
        Some(Holding { grant: id, pages: view.pages().clone(), parts: view.parts(), by })
    }

    /// The same of every grant over a region that is ending.
    pub fn holdings_of(&self, region: RegionId) -> Vec<Holding> {
        let over = self.table().of_region(region);
        over.into_iter().filter_map(|id| self.holding(id)).collect()
    }

    /// The same of every grant that is ending.
    pub fn holdings(&self) -> Vec<Holding> {
        let all = self.table().all();
        all.into_iter().filter_map(|id| self.holding(id)).collect()
    }

    fn holder(&self, (session, transfer): FlowKey) -> String {
        self.look(session, |session| session.holder(transfer)).unwrap_or_default()
    }

    /// The session for new transfers with this peer.
    pub fn session_with(&self, peer: &Identity) -> Option<u64> {
        lock(&self.preferred).get(peer).copied()
    }

    /// Every session's number.
    pub fn sessions(&self) -> Vec<u64> {
        self.each(|id, session| session.is_live().then_some(id)).flatten().collect()
    }

    /// Every session, as it stands now.
    pub fn session_states(&self, now: Duration) -> Vec<SessionState> {
        self.each(|_, session| session.state(now)).flatten().collect()
    }

    /// True when nothing that was sent waits for an answer.
    pub fn is_quiet(&self) -> bool {
        self.each(|_, session| session.is_quiet()).all(|quiet| quiet)
    }

    /// Transfers and requests that have not ended on this side.
    pub fn open_flows(&self) -> usize {
        self.each(|_, session| session.transfers().flows().len()).sum()
    }

    /// Looks at a session.
    pub(crate) fn look<T>(&self, id: u64, f: impl FnOnce(&Session<R>) -> T) -> Option<T> {
        self.sessions.get(id).map(|cell| f(&lock(&cell)))
    }

    /// Looks at each session, by their numbers.
    pub(crate) fn each<T>(&self, mut f: impl FnMut(u64, &Session<R>) -> T) -> impl Iterator<Item = T> {
        self.sessions.all().into_iter().map(move |(id, cell)| f(id, &lock(&cell)))
    }

    /// Beats that were sent later than half a heartbeat after they were due.
    pub fn late_beats(&self) -> u64 {
        self.common.counts.late_beats.load(Ordering::Relaxed)
    }

    /// By what memory came back that was still used when it was asked for.
    pub fn reclaims(&self) -> ReclaimCounts {
        let counts = &self.common.counts;
        let read = |counts: &[AtomicU64; 3]| std::array::from_fn(|at| counts[at].load(Ordering::Relaxed));
        ReclaimCounts { grants: read(&counts.grants), transfers: read(&counts.transfers) }
    }

    /// Transfers for which a peer's NIC may reach pages of this engine.
    pub fn exposed(&self) -> usize {
        self.common.counts.exposed.load(Ordering::Acquire) as usize
    }

    /// When [`crate::Node::tick`] wants to be called again.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.dues.soonest().into_iter().chain(self.common.next_expiry()).min()
    }
}
