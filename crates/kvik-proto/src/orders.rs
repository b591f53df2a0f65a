//! Orders: what whoever moves the bytes is told to do, and what becomes of a flow when they are done.

use crate::FlowKey;
use crate::channel::ChunkHeader;
use crate::flow::{CopyFrom, Flow, Role, Work};
use crate::frame::{Frame, Op, Source};
use crate::node::{Event, Finished, Node, Timer};
use crate::rungs::Rung;
use kvik_core::{Code, Error, Result, View};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Which order; give it back when the order is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrderRef {
    pub(crate) key: FlowKey,
    /// Where its part of the stream begins.
    pub(crate) at: u64,
    /// Bytes of the session's window that it takes.
    window: u64,
    /// Whether it is for a NIC.
    posted: bool,
}

impl OrderRef {
    /// The session that it belongs to.
    pub fn session(&self) -> u64 {
        self.key.0
    }
}

/// What to do with a part of a transfer's stream.
#[derive(Debug)]
pub struct Order<R> {
    /// To report it done.
    pub id: OrderRef,
    /// When set, the order must be left at once and reported `Void`: the memory is about to be the owner's again.
    pub stop: Arc<AtomicBool>,
    /// This process's memory.
    pub region: R,
    /// The elements in it.
    pub view: Arc<View>,
    /// The part of the stream.
    pub part: Range<u64>,
    /// Bytes under one checksum.
    pub unit: u64,
    /// Whether checksums are wanted.
    pub sums: bool,
    /// What to do.
    pub kind: OrderKind<R>,
}

/// The kinds of orders.
#[derive(Debug)]
pub enum OrderKind<R> {
    /// Send it behind this header, with a trailer.
    Send(ChunkHeader),
    /// Place what follows on the channel, and check the trailer.
    Place,
    /// Copy it from there.
    Copy(CopyFrom<R>),
    /// Have the NIC move it to (a write) or from (a read) the owner's memory. `Done` means delivery-complete: the
    /// bytes are in place and nothing of them is under way. `Void` means that nothing was posted. `Failed` means
    /// that something may be under way: the link is not used any more.
    Post(Op, Arc<Source>),
    /// Sum each unit of it; nothing is moved.
    Sum,
}

/// How an order ended.
#[derive(Debug)]
pub enum OrderOutcome {
    /// All of it is done and checked.
    Done {
        /// Runs of memory that it took, without one that only goes on from the part before.
        extents: u64,
        /// Time spent on checksums.
        verify: Duration,
    },
    /// Of [`OrderKind::Sum`]: the checksum of each unit.
    Summed {
        /// In the order of the stream; the last unit may be shorter than the others.
        sums: Vec<u64>,
        /// Time spent on them.
        verify: Duration,
    },
    /// It was left: stopped here, or given up by the sender.
    Void,
    /// Of [`OrderKind::Post`]: it is to be given out again, and what was posted of it counts for nothing. Nothing of
    /// it is under way: the peer has answered a [`crate::NicCall`] since, or nothing was posted.
    Back,
    /// It failed, and the transfer with it.
    Failed(Error),
}

impl<R: Clone> Node<R> {
    /// The next chunk to send on a channel of the session. Transfers take turns.
    ///
    /// None also while the session's window is full: then `Event::Send` follows when there is room.
    pub fn next_send(&mut self, session_id: u64, now: Duration) -> Option<Order<R>> {
        self.expire(now);
        let turns = self.sessions.get(&session_id)?.sending.len();
        for _ in 0..turns {
            let session = self.sessions.get_mut(&session_id)?;
            let transfer = session.sending.pop_front()?;
            let key = (session_id, transfer);
            let Some(flow) = self.flows.get_mut(&key) else { continue };
            if session.in_flight > 0 && session.in_flight + flow.ahead() > self.window {
                session.full = true;
                session.sending.push_front(transfer);
                return None;
            }
            let Some(part) = flow.claim() else { continue };
            session.in_flight += part.end - part.start;
            session.sending.push_back(transfer);
            let header = ChunkHeader {
                session: session_id,
                transfer,
                position: part.start,
                len: (part.end - part.start) as u32,
                sums: flow.cut.sums_of(&part),
            };
            return order(flow, part, OrderKind::Send(header), now);
        }
        None
    }

    /// Whether the session has something to send.
    pub fn wants_to_send(&self, session_id: u64) -> bool {
        self.sessions.get(&session_id).is_some_and(|session| !session.sending.is_empty())
    }

    /// What to do with a chunk that a channel of the session announces: `None` means that it must be thrown away,
    /// since its transfer has ended.
    ///
    /// # Errors
    /// `ProtocolError`: the channel must be cut.
    pub fn place(
        &mut self,
        session_id: u64,
        header: &ChunkHeader,
        now: Duration,
    ) -> Result<Option<Order<R>>> {
        self.expire(now);
        if header.session != session_id {
            return Err(Error::new(Code::ProtocolError, "a chunk of another session came on this channel"));
        }
        self.touch(session_id, now);
        let Some(flow) = self.flows.get_mut(&(session_id, header.transfer)) else { return Ok(None) };
        if flow.stop.is_some() {
            return Ok(None);
        }
        if flow.work != Work::Place {
            let text = format!("a chunk came for transfer {}, which takes none", header.transfer);
            return Err(Error::new(Code::ProtocolError, text));
        }
        let part = flow.arrive(header.position, header.len, header.sums)?;
        Ok(order(flow, part, OrderKind::Place, now))
    }

    /// The next part to copy or to sum, of any transfer. Transfers take turns.
    pub fn next_copy(&mut self, now: Duration) -> Option<Order<R>> {
        self.expire(now);
        for _ in 0..self.copying.len() {
            let key = self.copying.pop_front()?;
            let Some(flow) = self.flows.get_mut(&key) else { continue };
            let source = flow.source.clone().filter(|_| flow.work == Work::Copy);
            let (part, kind) = match source {
                Some(source) => (flow.claim(), OrderKind::Copy(source)),
                None => (flow.claim_sums(), OrderKind::Sum),
            };
            flow.checks.queued = part.is_some();
            let Some(part) = part else { continue };
            self.copying.push_back(key);
            return order(flow, part, kind, now);
        }
        None
    }

    /// An order has ended; whoever executed it does not touch its memory any more.
    pub fn order_done(&mut self, id: OrderRef, outcome: OrderOutcome) {
        self.make_room(id);
        let Some(flow) = self.flows.get_mut(&id.key) else { return };
        flow.pins = flow.pins.saturating_sub(1);
        flow.posted = flow.posted.saturating_sub(id.posted.into());
        match outcome {
            OrderOutcome::Done { extents, verify } => {
                flow.done += 1;
                flow.extents += extents;
                flow.verify += verify;
                if id.posted && flow.checks.delivered(id.key, &flow.cut, id.at) {
                    self.queue_sums(id.key);
                }
            }
            OrderOutcome::Summed { sums, verify } => {
                flow.verify += verify;
                self.on_summed(id, sums);
            }
            OrderOutcome::Void => {}
            OrderOutcome::Back => self.give_back(id),
            // What the peer has called a success is in place there.
            OrderOutcome::Failed(_) if flow.peer_done => {}
            OrderOutcome::Failed(error) => {
                let error = self.name_peer(id.key, error);
                self.stop_flow(id.key, error);
                if id.posted {
                    self.break_link(id.key.0);
                }
            }
        }
        self.settle_flow(id.key);
    }

    /// An order that must stop cannot be left for a long time: a device touches its memory, and cannot be stopped. Who
    /// began the transfer hears of its end now, and why the pages are not free. The flow stays, and a grant that it is
    /// of, until the order is done. A NIC's order ends the session, too: the owner cuts its own path.
    pub fn order_stuck(&mut self, id: OrderRef, error: Error) {
        if id.posted {
            // An end that is told would vouch for it.
            self.break_link(id.key.0);
        }
        let Some(flow) = self.flows.get_mut(&id.key) else { return };
        if flow.stop.is_none() || flow.reported || !matches!(flow.role, Role::Initiator | Role::Both { .. }) {
            return;
        }
        let error = match &flow.stop {
            Some(why) => Error::new(error.code, format!("{}; {}", why.text, error.text)),
            None => error,
        };
        flow.reported = true;
        let tells = !Self::is_own(id.key) && !flow.peer_ended && !std::mem::replace(&mut flow.end_sent, true);
        let finished = finished(flow, Err(error.clone()));
        self.events.push_back(Event::Finished(finished));
        if tells {
            self.send_end(id.key, Err(error));
        }
    }

    /// Damage is somewhere between two engines: which ones is for both to know.
    pub(crate) fn name_peer(&self, key: FlowKey, error: Error) -> Error {
        if error.code != Code::ChecksumMismatch {
            return error;
        }
        let text = match Self::is_own(key) {
            true => format!("{} (found by this engine within itself)", error.text),
            false => format!(
                "{} (found by engine {} in a transfer with {})",
                error.text,
                self.identity.engine,
                self.peer_text(key.0)
            ),
        };
        Error::new(error.code, text)
    }

    /// What an order took of its session's window is free again.
    fn make_room(&mut self, id: OrderRef) {
        let Some(session) = self.sessions.get_mut(&id.key.0).filter(|_| id.window > 0) else { return };
        session.in_flight = session.in_flight.saturating_sub(id.window);
        if std::mem::take(&mut session.full) {
            self.events.push_back(Event::Send(id.key.0));
        }
    }

    /// Bytes of chunks that a session's channels have in hand to send.
    pub fn in_flight(&self, session_id: u64) -> u64 {
        self.sessions.get(&session_id).map_or(0, |session| session.in_flight)
    }

    /// The transfer has something to send, and takes its turn.
    pub(crate) fn queue_send(&mut self, key: FlowKey) {
        if let Some(session) = self.sessions.get_mut(&key.0) {
            session.sending.push_back(key.1);
            self.events.push_back(Event::Send(key.0));
        }
    }

    /// Ends a flow as soon as its orders are done.
    pub(crate) fn stop_flow(&mut self, key: FlowKey, error: Error) {
        let Some(flow) = self.flows.get_mut(&key) else { return };
        let first = flow.set_stop(error);
        if flow.pins > 0 {
            self.events.push_back(Event::Stop(key.0));
        }
        if first && flow.is_under_way() && self.sessions.contains_key(&key.0) {
            self.tell_to_stop(key);
        }
        self.settle_flow(key);
    }

    /// The peer takes no further part.
    pub(crate) fn on_end(&mut self, session: u64, transfer: u64, outcome: Result<()>) -> Result<()> {
        let key = (session, transfer);
        let Some(flow) = self.flows.get_mut(&key) else {
            self.send(session, &Frame::Ended { transfer });
            return Ok(());
        };
        match outcome {
            Err(error) => {
                flow.peer_ended = true;
                flow.close_reach();
                self.stop_flow(key, error);
            }
            // The reader has all its bytes, or the writer's bytes are all in place. The executor of the last order
            // here may not have said so yet, and touches its memory until it has.
            Ok(()) if flow.can_be_done() => {
                (flow.peer_ended, flow.peer_done) = (true, true);
                flow.close_reach();
                self.settle_flow(key);
            }
            Ok(()) => {
                let text = format!("the peer called transfer {transfer} a success before it was one");
                return Err(Error::new(Code::ProtocolError, text));
            }
        }
        Ok(())
    }

    /// Looks whether a flow has come to its end.
    pub(crate) fn settle_flow(&mut self, key: FlowKey) {
        let Some(flow) = self.flows.get(&key) else { return };
        if flow.is_touched() {
            return;
        }
        if flow.peer_done {
            return self.conclude(key, Ok(()));
        }
        if let Some(error) = flow.stop.clone() {
            return self.conclude(key, Err(error));
        }
        // Who sends waits for the other side to say that it is in place.
        if flow.is_complete() && matches!(flow.work, Work::Place | Work::Copy | Work::Post) {
            self.conclude(key, Ok(()));
        }
    }

    /// The flow is over on this side: nothing here touches its memory any more.
    fn conclude(&mut self, key: FlowKey, outcome: Result<()>) {
        let Some(flow) = self.flows.remove(&key) else { return };
        self.exposed -= usize::from(matches!(flow.work, Work::Expose(_)));
        self.timers.remove(&(flow.deadline, Timer::Flow(key)));
        if let Some(slot) = flow.slot {
            self.events.push_back(Event::Raise(slot));
        }
        if !Self::is_own(key) {
            self.tell_end(&flow, &outcome);
        }
        let rung = self.rung_of(&flow);
        if matches!(flow.role, Role::Initiator) && outcome.is_err() {
            self.rungs.transfers[rung as usize] += 1;
        }
        match flow.role {
            Role::Initiator => self.report(&flow, outcome),
            Role::Parked { grant } => {
                self.note_unserved(&flow, &outcome);
                self.leave_session(&flow);
                self.forget_parked(grant, key);
            }
            Role::Owner { grant, reader } => {
                self.note_served(&flow, reader, &outcome);
                self.leave_session(&flow);
                let confirmed = outcome.is_ok() && flow.confirm && self.grants.confirm(grant, reader);
                self.leave(grant, key, confirmed, rung);
            }
            Role::Both { grant } => {
                let reader = self.identity.engine;
                let confirmed = outcome.is_ok() && flow.confirm && self.grants.confirm(grant, reader);
                self.leave(grant, key, confirmed, rung);
                self.report(&flow, outcome);
            }
        }
    }

    fn leave(&mut self, grant: kvik_core::GrantId, key: FlowKey, consumed: bool, rung: Rung) {
        self.note_rung(grant, key, rung);
        if consumed {
            self.end_grant(grant, kvik_core::GrantState::Consumed);
        }
        if let Some(state) = self.grants.detach(grant, key) {
            self.events.push_back(Event::GrantEnded(grant, state));
        }
    }

    fn tell_end(&mut self, flow: &Flow<R>, outcome: &Result<()>) {
        let key = flow.key;
        match (flow.peer_ended, flow.end_sent) {
            (true, _) => self.send(key.0, &Frame::Ended { transfer: key.1 }),
            (false, true) => {}
            (false, false) => self.send_end(key, outcome.clone()),
        }
    }

    fn report(&mut self, flow: &Flow<R>, outcome: Result<()>) {
        if !flow.reported {
            self.events.push_back(Event::Finished(finished(flow, outcome)));
        }
    }
}

fn finished<R>(flow: &Flow<R>, outcome: Result<()>) -> Finished {
    Finished {
        key: flow.key,
        bytes: if outcome.is_ok() { flow.cut.bytes } else { flow.bytes_done() },
        outcome,
        first: flow.first,
        extents: flow.extents,
        verify: flow.verify,
        copied_from: match &flow.source {
            Some(CopyFrom::Peer(source)) => Some(source.region),
            _ => None,
        },
    }
}

pub(crate) fn order<R: Clone>(
    flow: &mut Flow<R>,
    part: Range<u64>,
    kind: OrderKind<R>,
    now: Duration,
) -> Option<Order<R>> {
    flow.first.get_or_insert(now);
    let (region, view) = flow.memory.clone()?;
    let window = if matches!(kind, OrderKind::Send(_)) { part.end - part.start } else { 0 };
    Some(Order {
        id: OrderRef { key: flow.key, at: part.start, window, posted: matches!(kind, OrderKind::Post(..)) },
        stop: flow.stop_flag.clone(),
        region,
        view,
        part,
        unit: flow.cut.unit,
        sums: flow.cut.sums,
        kind,
    })
}
