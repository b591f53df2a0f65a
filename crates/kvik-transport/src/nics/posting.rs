//! The work requests that a NIC has in flight: taken while there are places, posted in turns, reported when nothing of
//! them is in flight any more.

use super::device::{Operation, Posted, RmaDevice};
use super::in_flight::InFlight;
use super::warm_up::Probe;
use super::worker::Worker;
use crate::{Queue, RegionMemory, Services, finish};
use kvik_core::{Class, Code, Error, Result};
use kvik_proto::{Claim, WorkOutcome, WorkRequest};
use std::time::Duration;

/// Work requests of bulk that a NIC has at most: with chunks of 512 KiB they keep it busy, and a handover waits for no
/// more.
const BULK_PLACES: usize = 4;
/// How long an operation may take to end after its transfer has.
pub(super) const PATIENCE: Duration = Duration::from_millis(250);

impl<C: RmaDevice> Worker<C> {
    /// Takes what has ended. Whether anything has.
    pub(super) fn take_completions(&mut self) -> bool {
        let mut done = std::mem::take(&mut self.done);
        if self.broken.is_none()
            && let Err(error) = self.device.poll(&mut done)
        {
            self.device_failed(error);
        }
        let moved = !done.is_empty();
        for ended in done.drain(..) {
            let Some(Some(active)) = self.requests.get_mut(ended.token as usize) else {
                self.probe_done(ended);
                continue;
            };
            let session = active.session();
            let error = ended.result.err();
            let failed = error.is_some();
            active.ended(error);
            if failed {
                self.stats.operation_failed();
                self.degraded.insert(session);
            } else if let Some(peer) = self.peers.get_mut(&session) {
                peer.works();
            }
        }
        self.done = done;
        moved
    }

    pub(super) fn report(&mut self, services: &Services) {
        for session in self.stuck() {
            self.cut(session);
        }
        for (index, place) in self.requests.iter_mut().enumerate() {
            if let Some(over) = place.take_if(|active| active.is_over()) {
                self.turns.retain(|turn| *turn != index);
                over.report(&*services.work, &self.stats);
            }
        }
    }

    /// Sessions of transfers that have ended while operations for them have not.
    fn stuck(&mut self) -> Vec<u64> {
        let stuck = self.requests.iter_mut().flatten().filter_map(|active| {
            let session = active.session();
            active.is_stuck(PATIENCE).then_some(session)
        });
        stuck.collect()
    }

    /// Takes work requests while there are places for them.
    pub(super) fn take_work(&mut self, services: &Services) -> bool {
        let mut took = false;
        for index in 0..self.requests.len() {
            if self.requests[index].is_some() {
                continue;
            }
            let Some(request) = self.next_request(services) else { return took };
            took = true;
            match InFlight::new(request) {
                Ok(active) => {
                    self.requests[index] = Some(active);
                    self.turns.push_back(index);
                }
                Err(request) => {
                    let text = "a work request for a channel or a copy was given to a NIC";
                    finish(
                        &*services.work,
                        *request,
                        WorkOutcome::Failed(Error::new(Code::ProtocolError, text)),
                    );
                }
            }
        }
        took
    }

    /// The next work request of any session that may have one and can be reached. What a NIC has goes in its own order:
    /// so bulk has few places, and only one before its turn while the NIC has handovers.
    fn next_request(&mut self, services: &Services) -> Option<WorkRequest<RegionMemory>> {
        let has = |class: Class| {
            let requests = self.requests.iter().flatten();
            requests.filter(|active| active.request.id.class() == class).count()
        };
        let turn = self.wants.turn();
        // One place it has in any case: handovers may be stuck.
        let places = if turn[0] == Class::Bulk || has(Class::Handover) == 0 { BULK_PLACES } else { 1 };
        let bulk = has(Class::Bulk) < places;
        for class in turn.into_iter().filter(|class| bulk || *class == Class::Handover) {
            while let Some(session) = self.wants.pop(class) {
                if self.may_take(session)
                    && let Some(request) = services.work.claim(Queue::Post(session), Claim::Only(class))
                {
                    self.wants.push(class, session);
                    self.wants.took(class, request.part.end - request.part.start);
                    return Some(request);
                }
            }
        }
        None
    }

    /// Posts operations while there is room, of each work request in turn.
    pub(super) fn post(&mut self, services: &Services) -> bool {
        let (mut posted, mut full) = (false, 0);
        // Until there is no room for any of them: a peer's queue may be full while another's is not.
        while full < self.turns.len() {
            let Some(index) = self.turns.pop_front() else { break };
            match self.post_next(services, index) {
                Ok(Some(Posted::Yes)) => {
                    (posted, full) = (true, 0);
                    self.turns.push_back(index);
                }
                Ok(Some(Posted::Full)) => {
                    full += 1;
                    self.turns.push_back(index);
                }
                Ok(None) => {}
                Err(error) => {
                    if let Some(Some(active)) = self.requests.get_mut(index) {
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
    fn post_next(&mut self, services: &Services, index: usize) -> Result<Option<Posted>> {
        let Some(Some(active)) = self.requests.get(index) else { return Ok(None) };
        let (longest, most) = (self.device.longest(), self.device.pieces());
        let Some(there) = active.next(longest, most, &mut self.pieces) else { return Ok(None) };
        let session = active.session();
        let Some((conn, nic)) = self.conn(services, session)? else { return Ok(None) };
        let Some(Some(active)) = self.requests.get_mut(index) else { return Ok(None) };
        let no = |text: &str| Error::new(Code::TransportUnavailable, text);
        let memory = self.known.get(&active.request.region.name());
        let memory = memory.ok_or_else(|| no("the NIC does not know this memory: its region was closed"))?;
        let key = active.source.keys.get(nic);
        let key = key.ok_or_else(|| no("the peer's NIC does not know its memory"))?;
        let operation = Operation {
            op: active.op,
            memory,
            pieces: &self.pieces,
            conn,
            remote: key.base.wrapping_add(there),
            key: key.key,
            token: index as u64,
        };
        match self.device.post(&operation) {
            Ok(Posted::Full) => Ok(Some(Posted::Full)),
            Ok(Posted::Yes) => {
                active.posted(&self.pieces);
                Ok(Some(Posted::Yes))
            }
            // As an operation that failed: a connection that the peer has closed refuses, and a new one does not.
            Err(error) => {
                active.doubt.get_or_insert(error);
                self.stats.operation_failed();
                self.degraded.insert(session);
                Ok(None)
            }
        }
    }

    /// A session's work requests that waited for its connection go on.
    pub(super) fn resume(&mut self, session: u64) {
        for (index, active) in self.requests.iter_mut().enumerate() {
            if let Some(active) = active.as_mut().filter(|active| active.session() == session) {
                active.restart();
                if !self.turns.contains(&index) {
                    self.turns.push_back(index);
                }
            }
        }
    }

    /// A session's work requests, of which nothing is in flight here, go to other NICs, for which nothing of them may
    /// be on the wire either; or they fail.
    pub(super) fn reassign(&mut self, services: &Services, session: u64, others: bool, why: &Error) {
        for (index, place) in self.requests.iter_mut().enumerate() {
            let theirs = |active: &mut InFlight| active.session() == session && active.out == 0;
            let Some(mut active) = place.take_if(theirs) else { continue };
            self.turns.retain(|turn| *turn != index);
            match others {
                true => active.give_back(&*services.work),
                false => {
                    active.fail(why.clone());
                    active.report(&*services.work, &self.stats);
                }
            }
        }
    }

    /// Operations in flight to a session's peer.
    pub(super) fn in_flight(&self, session: u64) -> u32 {
        let requests = self.requests.iter().flatten().filter(|active| active.session() == session);
        let probes = self.probes.get(&session).is_some_and(Probe::is_in_flight);
        requests.map(|active| active.out).sum::<u32>() + u32::from(probes)
    }
}
