//! Links on which a NIC moves the bytes: what that asks of both sides before memory is its owner's again.
//!
//! The owner's code is not in the path: bytes land late and in any order, after the grant was checked, and may land
//! after the session has died. So its pages are its own again at the first rung of the ladder that succeeds:
//! 1. the initiator has answered. It ends a transfer, or answers an end, only when each of its posted operations
//!    was delivered or never left;
//! 2. the path was cut: [`Event::Fence`] asks for it, [`Node::fenced`] tells that it is done. An operation that was
//!    posted and did not complete can vouch for nothing, not even after the initiator has cut its own side (what is
//!    on the wire still lands): so it ends the session, and with it both sides cut;
//! 3. else they stay in quarantine: the flow stays, and the grant waits for it.

use crate::FlowKey;
use crate::flow::{CopyFrom, Reach, Work};
use crate::frame::Frame;
use crate::nics::{NicAnswer, NicCall, Nics};
use crate::node::{Event, Node, Timer};
use crate::orders::{Order, OrderKind, OrderRef, order};
use kvik_core::{Code, Error, Result};
use std::time::Duration;

impl<R: Clone> Node<R> {
    /// The engine has a one-sided link to the session's peer, for as long as the session lives.
    pub fn add_one_sided(&mut self, session: u64) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.one_sided = true;
        }
    }

    /// This engine's NICs are reached at other addresses from now on: whoever uses them is told.
    pub fn tell_nics(&mut self, nics: &Nics) {
        let users: Vec<u64> = self.sessions.keys().copied().filter(|id| self.has_one_sided(*id)).collect();
        users.into_iter().for_each(|session| self.tell_nics_to(session, nics.clone()));
    }

    /// As [`Node::tell_nics`], for one session.
    pub fn tell_nics_to(&mut self, session: u64, nics: Nics) {
        self.send(session, &Frame::Nics(nics));
    }

    /// So are the peer's.
    pub(crate) fn on_nics(&mut self, id: u64, nics: Nics) -> Result<()> {
        let Some(session) = self.sessions.get_mut(&id) else { return Ok(()) };
        let known = &mut session.established.facts.nics;
        if !session.one_sided || known.provider != nics.provider {
            let text = "the peer told of NICs that this engine does not use";
            return Err(Error::new(Code::ProtocolError, text));
        }
        *known = nics;
        self.events.push_back(Event::NicsMoved(id));
        Ok(())
    }

    /// A NIC of this engine wants a way to one of the session's peer, and that nothing which it posted before can
    /// land there any more: [`Event::Reached`] follows, or the session ends.
    pub fn reach(&mut self, session: u64, call: NicCall) {
        self.send(session, &Frame::Reach(call));
    }

    /// [`Event::Reach`] was done.
    pub fn answer_reach(&mut self, session: u64, answer: NicAnswer) {
        self.send(session, &Frame::Reached(answer));
    }

    /// What only the peer of a one-sided link has reason to say.
    pub(crate) fn on_one_sided(&mut self, id: u64, event: Event) -> Result<()> {
        if !self.has_one_sided(id) {
            let text = "the peer spoke of NICs, and there is no one-sided link to it";
            return Err(Error::new(Code::ProtocolError, text));
        }
        self.events.push_back(event);
        Ok(())
    }

    /// A posted chunk is to be posted by another NIC: nothing of it is under way any more, on either side.
    pub(crate) fn give_back(&mut self, id: OrderRef) {
        let Some(flow) = self.flows.get_mut(&id.key) else { return };
        flow.back.push(id.at / flow.cut.chunk);
        if flow.stop.is_none() {
            self.queue_post(id.key);
        }
    }

    /// The next chunk to post on the session's one-sided link. Transfers take turns.
    pub fn next_post(&mut self, session_id: u64, now: Duration) -> Option<Order<R>> {
        self.expire(now);
        let turns = self.sessions.get(&session_id)?.posting.len();
        for _ in 0..turns {
            let session = self.sessions.get_mut(&session_id)?;
            let transfer = session.posting.pop_front()?;
            let Some(flow) = self.flows.get_mut(&(session_id, transfer)) else { continue };
            let Some(CopyFrom::Peer(exposed)) = flow.source.clone() else { continue };
            let Some(part) = flow.claim() else { continue };
            flow.posted += 1;
            session.posting.push_back(transfer);
            let kind = OrderKind::Post(flow.op, exposed);
            return order(flow, part, kind, now);
        }
        None
    }

    /// Whether the session has something to post.
    pub fn wants_to_post(&self, session_id: u64) -> bool {
        self.sessions.get(&session_id).is_some_and(|session| !session.posting.is_empty())
    }

    /// Transfers for which a peer's NIC may reach pages of this engine.
    pub fn exposed(&self) -> usize {
        self.exposed
    }

    /// No NIC can touch memory for this session any more: [`Event::Fence`] was done. Not taken of a live session.
    pub fn fenced(&mut self, session_id: u64) {
        if self.sessions.contains_key(&session_id) {
            return;
        }
        for key in self.flows_of(session_id) {
            if let Some(flow) = self.flows.get_mut(&key) {
                flow.close_reach();
            }
            self.settle_flow(key);
        }
    }

    pub(crate) fn has_one_sided(&self, session: u64) -> bool {
        self.sessions.get(&session).is_some_and(|session| session.one_sided)
    }

    pub(crate) fn no_one_sided(&self, session: u64) -> Error {
        let text = format!(
            "there is no one-sided link between this engine and {}; use another transport, or \"auto\"",
            self.peer_text(session)
        );
        Error::new(Code::TransportUnavailable, text)
    }

    /// The transfer has something to post, and takes its turn.
    pub(crate) fn queue_post(&mut self, key: FlowKey) {
        if let Some(session) = self.sessions.get_mut(&key.0) {
            if !session.posting.contains(&key.1) {
                session.posting.push_back(key.1);
            }
            self.events.push_back(Event::Post(key.0));
        }
    }

    /// A flow with a NIC under way stops. The owner asks the initiator to stop too, and waits no longer than for a peer
    /// that is silent. The initiator's NIC stops at once, and asks the owner's to vouch for that; its user waits for
    /// the end of what is over already, so a quarter of that time has to do.
    pub(crate) fn tell_to_stop(&mut self, key: FlowKey) {
        let (clock, dead_after) = (self.clock, self.timing.dead_after);
        let Some(flow) = self.flows.get_mut(&key) else { return };
        let owner = matches!(flow.work, Work::Expose(_));
        let patience = clock + if owner { dead_after } else { dead_after / 4 };
        let Some(error) = flow.stop.clone() else { return };
        self.timers.remove(&(flow.deadline, Timer::Flow(key)));
        flow.deadline = if flow.deadline > clock { flow.deadline.min(patience) } else { patience };
        self.timers.insert((flow.deadline, Timer::Flow(key)));
        if flow.work == Work::Expose(Reach::Open) {
            flow.work = Work::Expose(Reach::Told);
            flow.end_sent = true;
            self.send_end(key, Err(error));
        }
    }

    /// The peer has answered an end: nothing that it posted for the transfer is under way any more.
    pub(crate) fn on_answered(&mut self, session: u64, transfer: u64) -> Result<()> {
        let key = (session, transfer);
        let Some(flow) = self.flows.get_mut(&key) else { return Ok(()) };
        match flow.work {
            Work::Expose(Reach::Told) => {
                flow.close_reach();
                self.settle_flow(key);
                Ok(())
            }
            Work::Expose(Reach::Open) => {
                let text = format!("the peer answered an end of transfer {transfer} that was not sent");
                Err(Error::new(Code::ProtocolError, text))
            }
            _ => Ok(()),
        }
    }

    /// Something was posted and cannot be waited for: the session ends, so that both sides cut the path.
    pub(crate) fn break_link(&mut self, session: u64) {
        let text = format!(
            "the one-sided link to {} was cut: an operation on it did not end in time, or failed",
            self.peer_text(session)
        );
        self.close_session(session, Error::new(Code::PeerLost, text));
    }

    /// The session has ended: where a NIC may still touch memory for it, its path must be cut.
    pub(crate) fn ask_for_fence(&mut self, session: u64) {
        let under_way = |key: &FlowKey| self.flows.get(key).is_some_and(crate::flow::Flow::is_under_way);
        if self.flows_of(session).iter().any(under_way) {
            self.events.push_back(Event::Fence(session));
        }
    }

    pub(crate) fn flows_of(&self, session: u64) -> Vec<FlowKey> {
        self.flows.range((session, 0)..=(session, u64::MAX)).map(|(key, _)| *key).collect()
    }
}
