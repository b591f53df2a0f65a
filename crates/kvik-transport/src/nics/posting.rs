//! The work requests that a NIC has in flight: taken while there are places, posted in turns, reported when nothing of
//! them is in flight any more.

use super::device::{Operation, Posted, RmaDevice};
use super::requests::token;
use super::worker::Worker;
use crate::Queue;
use crate::services::finish;
use kvik_core::{Code, Error, Result};
use kvik_proto::{Claim, WorkOutcome};

impl<C: RmaDevice> Worker<C> {
    /// Takes what has ended. Whether anything has.
    pub(super) fn take_completions(&mut self) -> bool {
        let mut done = std::mem::take(&mut self.done);
        let polled = if self.broken.is_none() { self.device.poll(&mut done) } else { Ok(()) };
        let moved = !done.is_empty();
        for ended in done.drain(..) {
            match self.requests.ended(ended) {
                Ok((session, true)) => {
                    self.stats.operation_failed();
                    self.peers.fail(session);
                }
                Ok((session, false)) => {
                    if let Some(peer) = self.peers.get(session) {
                        peer.works();
                    }
                }
                Err(other) => self.probe_done(other),
            }
        }
        self.done = done;
        // Last: of what is cut off then, nothing has ended.
        if let Err(error) = polled {
            self.device_failed(error);
        }
        moved
    }

    pub(super) fn report(&mut self) {
        for session in self.requests.stuck() {
            self.cut(session);
        }
        self.requests.report(&*self.services.work, &self.stats);
    }

    /// Claims work requests if there are places for them, handovers first, of each session in turn. Whether it has, and
    /// may find more: those of the next session or batch are for its next turn, after the other NICs of its thread.
    pub(super) fn take_work(&mut self) -> bool {
        let (mut took, mut claimed) = (false, std::mem::take(&mut self.claimed));
        while !took && let Some((class, session, most)) = self.requests.turns().next_to_claim() {
            if self.peers.may_take(session) {
                let (queue, claim) = (Queue::Post(session), Claim::Only(class));
                self.services.work.claim_batch(queue, claim, most, &mut claimed);
            }
            if claimed.is_empty() {
                self.requests.turns().wait_no_more(session, class);
            }
            for request in claimed.drain(..) {
                took = true;
                let ring = self.rings.of(&request.region);
                if let Err(request) = self.requests.add(request, ring) {
                    let text = "a work request for a channel or a copy was given to a NIC";
                    let outcome = WorkOutcome::Failed(Error::new(Code::ProtocolError, text));
                    finish(&*self.services.work, *request, outcome);
                }
            }
        }
        self.claimed = claimed;
        took
    }

    /// Posts operations while there is room, of each session in turn.
    pub(super) fn post(&mut self) -> bool {
        let mut posted = false;
        while let Some(place) = self.requests.turns().next_to_post() {
            match self.post_next(place) {
                Ok(Some(Posted::Yes)) => posted = true,
                Ok(Some(Posted::Full)) => self.requests.turns().full(),
                Ok(None) => self.requests.pause(place),
                Err(error) => {
                    self.requests.pause(place);
                    if let Some(active) = self.requests.get(place) {
                        active.fail(error);
                    }
                }
            }
        }
        self.device.flush();
        posted
    }

    /// Posts a work request's next operation. None: there is none, or it waits for its connection, which brings it
    /// back.
    fn post_next(&mut self, place: usize) -> Result<Option<Posted>> {
        let Some(active) = self.requests.get(place) else { return Ok(None) };
        let (longest, most) = (self.device.longest(), self.device.pieces());
        let Some(next) = active.next(longest, most, &mut self.pieces) else { return Ok(None) };
        let session = active.session();
        let Some((conn, nic)) = self.conn(session)? else { return Ok(None) };
        let Some(active) = self.requests.get(place) else { return Ok(None) };
        let no = |text: &str| Error::new(Code::TransportUnavailable, text);
        let ring = active.staged.as_ref().and_then(|staged| self.rings.get(staged.ring()));
        let memory = match ring {
            Some(ring) => Some(&ring.known),
            None => self.memories.get(active.request.region.name()),
        };
        let memory = memory.ok_or_else(|| no("the NIC does not know this memory: its region was closed"))?;
        let key = active.source.keys.get(nic);
        let key = key.ok_or_else(|| no("the peer's NIC does not know its memory"))?;
        let operation = Operation {
            op: active.op,
            memory,
            pieces: &self.pieces,
            conn,
            remote: key.base.wrapping_add(next.there),
            key: key.key,
            token: token(place, next.slot),
        };
        match self.device.post(&operation) {
            Ok(Posted::Full) => Ok(Some(Posted::Full)),
            Ok(Posted::Yes) => {
                self.requests.posted(place, next.slot, &self.pieces);
                Ok(Some(Posted::Yes))
            }
            // As an operation that failed: a connection that the peer has closed refuses, and a new one does not.
            Err(error) => {
                active.doubt.get_or_insert(error);
                self.stats.operation_failed();
                self.peers.fail(session);
                Ok(None)
            }
        }
    }

    /// A session's work requests, of which nothing is in flight here, go to other NICs, or fail.
    pub(super) fn reassign(&mut self, session: u64, others: bool, why: &Error) {
        self.requests.reassign(session, &*self.services.work, &self.stats, (!others).then_some(why));
    }

    /// Operations in flight to a session's peer.
    pub(super) fn in_flight(&self, session: u64) -> usize {
        self.requests.operations(session) + usize::from(self.probes.is_in_flight(session))
    }
}
