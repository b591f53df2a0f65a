//! The orders that a NIC has in hand: taken while there are places, posted in turns, reported when nothing of them is
//! under way any more.

use super::active::Active;
use super::card::{Card, Operation, Posted};
use super::warm::Knock;
use super::worker::Worker;
use crate::{Held, Queue, Services, finish};
use kvik_core::{Code, Error, Result};
use kvik_proto::{Order, OrderOutcome};
use std::time::Duration;

/// How long an operation may take to end after its transfer has.
pub(super) const PATIENCE: Duration = Duration::from_millis(250);

impl<C: Card> Worker<C> {
    /// Takes what has ended. Whether anything has.
    pub(super) fn take_completions(&mut self) -> bool {
        let mut done = std::mem::take(&mut self.done);
        if self.broken.is_none()
            && let Err(error) = self.card.poll(&mut done)
        {
            self.card_failed(error);
        }
        let moved = !done.is_empty();
        for ended in done.drain(..) {
            let Some(Some(active)) = self.orders.get_mut(ended.token as usize) else {
                self.knocked(ended);
                continue;
            };
            let session = active.session();
            let error = ended.result.err();
            let failed = error.is_some();
            active.ended(error);
            if failed {
                self.stats.operation_failed();
                self.sick.insert(session);
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
        for (index, place) in self.orders.iter_mut().enumerate() {
            if let Some(over) = place.take_if(|active| active.is_over()) {
                self.turns.retain(|turn| *turn != index);
                over.report(&*services.work, &self.stats);
            }
        }
    }

    /// Sessions of transfers that have ended while operations for them have not.
    fn stuck(&mut self) -> Vec<u64> {
        let stuck = self.orders.iter_mut().flatten().filter_map(|active| {
            let session = active.session();
            active.is_stuck(PATIENCE).then_some(session)
        });
        stuck.collect()
    }

    /// Takes orders while there are places for them.
    pub(super) fn take_orders(&mut self, services: &Services) -> bool {
        let mut took = false;
        for index in 0..self.orders.len() {
            if self.orders[index].is_some() {
                continue;
            }
            let Some(order) = self.next_order(services) else { return took };
            took = true;
            match Active::new(order) {
                Ok(active) => {
                    self.orders[index] = Some(active);
                    self.turns.push_back(index);
                }
                Err(order) => {
                    let text = "an order for a channel or a copy was given to a NIC";
                    finish(
                        &*services.work,
                        *order,
                        OrderOutcome::Failed(Error::new(Code::ProtocolError, text)),
                    );
                }
            }
        }
        took
    }

    /// The next order of any session that may have one and can be reached.
    fn next_order(&mut self, services: &Services) -> Option<Order<Held>> {
        while let Some(session) = self.wants.first().copied() {
            if self.may_take(session)
                && let Some(order) = services.work.claim(Queue::Post(session))
            {
                return Some(order);
            }
            self.wants.remove(&session);
        }
        None
    }

    /// Posts operations while there is room, of each order in turn.
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
                    if let Some(Some(active)) = self.orders.get_mut(index) {
                        active.fail(error);
                    }
                }
            }
        }
        self.card.flush();
        posted
    }

    /// Posts an order's next operation. None: there is none, or it waits for its way, which brings it back.
    fn post_next(&mut self, services: &Services, index: usize) -> Result<Option<Posted>> {
        let Some(Some(active)) = self.orders.get(index) else { return Ok(None) };
        let (longest, most) = (self.card.longest(), self.card.pieces());
        let Some(there) = active.next(longest, most, &mut self.pieces) else { return Ok(None) };
        let session = active.session();
        let Some((way, nic)) = self.way(services, session)? else { return Ok(None) };
        let Some(Some(active)) = self.orders.get_mut(index) else { return Ok(None) };
        let no = |text: &str| Error::new(Code::TransportUnavailable, text);
        let memory = self.known.get(&active.order.region.name());
        let memory = memory.ok_or_else(|| no("the NIC does not know this memory: its region was closed"))?;
        let key = active.source.keys.get(nic);
        let key = key.ok_or_else(|| no("the peer's NIC does not know its memory"))?;
        let operation = Operation {
            op: active.op,
            memory,
            pieces: &self.pieces,
            way,
            remote: key.base.wrapping_add(there),
            key: key.key,
            token: index as u64,
        };
        match self.card.post(&operation) {
            Ok(Posted::Full) => Ok(Some(Posted::Full)),
            Ok(Posted::Yes) => {
                active.posted(&self.pieces);
                Ok(Some(Posted::Yes))
            }
            // As an operation that failed: a connection that the peer has closed refuses, and a new one does not.
            Err(error) => {
                active.doubt.get_or_insert(error);
                self.stats.operation_failed();
                self.sick.insert(session);
                Ok(None)
            }
        }
    }

    /// A session's orders that waited for its way go on.
    pub(super) fn resume(&mut self, session: u64) {
        for (index, active) in self.orders.iter_mut().enumerate() {
            if let Some(active) = active.as_mut().filter(|active| active.session() == session) {
                active.restart();
                if !self.turns.contains(&index) {
                    self.turns.push_back(index);
                }
            }
        }
    }

    /// A session's orders, of which nothing is under way here, go to other NICs, for which nothing of them may be on
    /// the wire either; or they fail.
    pub(super) fn hand_over(&mut self, services: &Services, session: u64, others: bool, why: &Error) {
        for (index, place) in self.orders.iter_mut().enumerate() {
            let theirs = |active: &mut Active| active.session() == session && active.out == 0;
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

    /// Operations under way to a session's peer.
    pub(super) fn under_way(&self, session: u64) -> u32 {
        let orders = self.orders.iter().flatten().filter(|active| active.session() == session);
        let knocks = self.knocks.get(&session).is_some_and(Knock::is_under_way);
        orders.map(|active| active.out).sum::<u32>() + u32::from(knocks)
    }
}
