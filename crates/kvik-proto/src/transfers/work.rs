//! Work requests: what whoever moves the bytes is told to do, and what becomes of a flow when they are done.

use super::staging::{self, ChunkEvent};
use super::turns::{Claim, Turns};
use super::{Transfers, break_link};
use crate::FlowKey;
use crate::channel::ChunkHeader;
use crate::connection::Context;
use crate::event::{Event, Finished};
use crate::flow::{CopyFrom, Flow, Role, Work};
use crate::frame::{Frame, Op, Source};
use kvik_core::{Class, ClassQueue, Code, Error, Result, View};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Which work request; give it back when the work request is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkId {
    pub(super) key: FlowKey,
    /// Where its part of the stream begins.
    pub(super) at: u64,
    /// Bytes of the session's window that it takes.
    window: u64,
    class: Class,
    /// Whether it is for a NIC.
    posted: bool,
}

impl WorkId {
    /// The session that it belongs to.
    pub fn session(&self) -> u64 {
        self.key.0
    }

    /// Its transfer.
    pub fn transfer(&self) -> FlowKey {
        self.key
    }

    /// The class of its transfer.
    pub fn class(&self) -> Class {
        self.class
    }

    /// Nothing of a NIC's work request is on the wire any more, and nothing of it will be: only a device of this side still
    /// has something of it. From now on it is as one that no NIC has: how it ends says nothing of the link, and nobody need
    /// cut that to be sure of it.
    pub(crate) fn landed<R: Clone>(&mut self, transfers: &mut Transfers<R>, cx: &mut Context<'_, R>) {
        let was_posted = std::mem::take(&mut self.posted);
        if let Some(flow) = transfers.flows.get_mut(&self.key.1).filter(|_| was_posted) {
            flow.posted = flow.posted.saturating_sub(1);
            end_ahead(flow, cx);
        }
    }
}

/// What to do with a part of a transfer's stream.
#[derive(Debug)]
pub struct WorkRequest<R> {
    /// To report it done.
    pub id: WorkId,
    /// When set, the work request must be left at once and reported `Void`: the memory is about to be the owner's
    /// again.
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
    pub kind: WorkKind<R>,
}

/// The kinds of work requests.
#[derive(Debug)]
pub enum WorkKind<R> {
    /// Send it behind this header, with a trailer.
    Send(ChunkHeader),
    /// Place what follows on the channel, and check the trailer.
    Place,
    /// Copy it from there.
    Copy(CopyFrom<R>),
    /// Have the NIC move it to (a write) or from (a read) the owner's memory. `Done` means delivery-complete: the
    /// bytes are in place and nothing of them is in flight. `Void` means that nothing was posted. `Failed` means
    /// that something may be in flight: the link is not used any more. Where a place is given, the part lies in the owner's
    /// ring from there on, and not where the source's view says.
    Post(Op, Arc<Source>, Option<u64>),
    /// Copy it into this ring from there on (a read of the peer's), or from the ring to the pages (a write).
    Stage(Op, R, u64),
    /// Sum each unit of it; nothing is moved.
    Sum,
}

/// How a work request ended.
#[derive(Debug)]
pub enum WorkOutcome {
    /// All of it is done and checked.
    Done {
        /// Runs of memory that it took, without one that only goes on from the part before.
        extents: u64,
        /// Time spent on checksums.
        verify: Duration,
    },
    /// Of [`WorkKind::Sum`]: the checksum of each unit.
    Summed {
        /// In the order of the stream; the last unit may be shorter than the others.
        sums: Vec<u64>,
        /// Time spent on them.
        verify: Duration,
    },
    /// It was left: stopped here, or given up by the sender.
    Void,
    /// Of [`WorkKind::Post`]: it is to be given out again, and what was posted of it counts for nothing. Nothing of
    /// it is in flight: the peer has answered a [`crate::NicCall`] since, or nothing was posted.
    Back,
    /// It failed, and the transfer with it.
    Failed(Error),
}

impl<R: Clone> Transfers<R> {
    /// The next chunk to send on a channel of the session. Transfers of a class take turns.
    ///
    /// None also while the session's window is full: then `Event::Send` follows when there is room.
    pub fn next_send(&mut self, claim: Claim, cx: &mut Context<'_, R>) -> Option<WorkRequest<R>> {
        if !cx.is_live() {
            return None;
        }
        for class in Turns::order(&self.turns.sending, claim) {
            while let Some(transfer) = self.turns.sending.pop(class) {
                let Some(flow) = self.flows.get_mut(&transfer) else { continue };
                if !self.turns.has_room(class, flow.ahead(), cx.call().common.window()) {
                    self.turns.sending.put_back(class, transfer);
                    break;
                }
                let Some(part) = flow.claim() else { continue };
                let len = part.end - part.start;
                self.turns.take_room(class, len);
                if flow.has_more() {
                    self.turns.sending.push(class, transfer);
                }
                let was = self.turns.sending.turn();
                self.turns.sending.took(class, len);
                let sums = flow.chunking.sums_of(&part);
                let (session, position, len) = (self.session, part.start, len as u32);
                let header = ChunkHeader { session, transfer, position, len, sums };
                let request = request(flow, part, WorkKind::Send(header), cx.clock());
                note_turn_of_bulk(&self.turns.sending, was, class, cx);
                return request;
            }
        }
        None
    }

    /// What to do with a chunk that a channel of the session announces: `None` means that it must be thrown away,
    /// since its transfer has ended.
    ///
    /// # Errors
    /// `ProtocolError`: the channel must be cut.
    pub fn place(&mut self, header: &ChunkHeader, now: Duration) -> Result<Option<WorkRequest<R>>> {
        let Some(flow) = self.flows.get_mut(&header.transfer) else { return Ok(None) };
        if flow.stop.is_some() {
            return Ok(None);
        }
        if flow.work != Work::Place {
            let text = format!("a chunk came for transfer {}, which takes none", header.transfer);
            return Err(Error::new(Code::ProtocolError, text));
        }
        let part = flow.arrive(header.position, header.len, header.sums)?;
        Ok(request(flow, part, WorkKind::Place, now))
    }

    /// It is the session's turn: the next part to copy or to sum, of any transfer of a class. They take turns, and the
    /// session leaves the queue of those that have something when it has no more.
    pub fn next_copy(
        &mut self,
        class: Class,
        now: Duration,
        cx: &mut Context<'_, R>,
    ) -> Option<WorkRequest<R>> {
        let next = self.claim_copy(class, now);
        let bytes = next.as_ref().map_or(0, |request| request.part.end - request.part.start);
        let over = self.turns.leave_copy_queue(class);
        cx.call().common.copied(class, self.session, bytes, over);
        next
    }

    fn claim_copy(&mut self, class: Class, now: Duration) -> Option<WorkRequest<R>> {
        while let Some(transfer) = self.turns.copying.pop(class) {
            let Some(flow) = self.flows.get_mut(&transfer) else { continue };
            let source = flow.source.clone().filter(|_| flow.work == Work::Copy);
            let (part, kind) = match source {
                Some(source) => (flow.claim(), WorkKind::Copy(source)),
                None => match staging::claim(flow) {
                    Some((part, kind)) => (Some(part), kind),
                    None => (flow.claim_sums(), WorkKind::Sum),
                },
            };
            flow.checks.queued = part.is_some();
            let Some(part) = part else { continue };
            self.turns.copying.push(class, transfer);
            return request(flow, part, kind, now);
        }
        None
    }

    /// A work request has ended; whoever executed it does not touch its memory any more.
    pub fn done(&mut self, id: WorkId, outcome: WorkOutcome, cx: &mut Context<'_, R>) {
        if self.turns.make_room(id.class, id.window) && cx.is_live() {
            cx.tell(Event::Send(self.session));
        }
        let transfer = id.key.1;
        let Some(flow) = self.flows.get_mut(&transfer) else { return };
        flow.pins = flow.pins.saturating_sub(1);
        flow.posted = flow.posted.saturating_sub(id.posted.into());
        match outcome {
            WorkOutcome::Done { extents, verify } => {
                flow.extents += extents;
                flow.verify += verify;
                if flow.lending.is_some() || flow.borrowing.is_some() {
                    // Of a work request of this process it is always the chunk's turn.
                    let _ = self.on_chunk(transfer, id.at, ChunkEvent::Done, cx);
                } else {
                    flow.done += 1;
                    if id.posted && flow.checks.delivered(id.key, &flow.chunking, id.at) {
                        self.queue_sums(transfer, cx);
                    }
                }
            }
            WorkOutcome::Summed { sums, verify } => {
                flow.verify += verify;
                self.on_summed(id, sums, cx);
            }
            WorkOutcome::Void => {}
            WorkOutcome::Back => self.give_back(id, cx),
            // What the peer has called a success is in place there.
            WorkOutcome::Failed(_) if flow.peer_done => {}
            WorkOutcome::Failed(error) => {
                let error = name_peer(flow.is_own(), error, cx);
                self.stop(transfer, error, cx);
                if id.posted {
                    break_link(cx);
                }
            }
        }
        self.settle(transfer, cx);
    }

    /// A work request that must stop cannot be left for a long time: a device touches its memory, and cannot be
    /// stopped. Who began the transfer hears of its end now, and why the pages are not free. The flow stays, and a
    /// grant that it is of, until the work request is done. A NIC's work request ends the session, too: the owner cuts
    /// its own path.
    pub fn stuck(&mut self, id: WorkId, error: Error, cx: &mut Context<'_, R>) {
        if id.posted {
            // An end that is told would vouch for it.
            break_link(cx);
        }
        let Some(flow) = self.flows.get_mut(&id.key.1) else { return };
        if flow.stop.is_none() || flow.reported || !matches!(flow.role, Role::Initiator | Role::Both { .. }) {
            return;
        }
        let error = match &flow.stop {
            Some(why) => Error::new(error.code, format!("{}; {}", why.text, error.text)),
            None => error,
        };
        flow.reported = true;
        flow.stop = Some(error.clone());
        let finished = finished(flow, Err(error));
        cx.tell(Event::Finished(finished));
        end_ahead(flow, cx);
    }

    /// The transfer has something to send, and takes its turn.
    pub(super) fn queue_send(&mut self, transfer: u64, cx: &mut Context<'_, R>) {
        if let Some(class) = self.flows.class_of(transfer).filter(|_| cx.is_live()) {
            self.turns.sending.push(class, transfer);
            cx.tell(Event::Send(self.session));
        }
    }

    /// The transfer has something to copy, and takes its turn.
    pub(super) fn queue_copy(&mut self, transfer: u64, cx: &mut Context<'_, R>) {
        let Some(class) = self.flows.class_of(transfer) else { return };
        self.turns.copying.push(class, transfer);
        self.want_copy(class, cx);
    }

    /// The session has something of a class to copy or to sum, and takes its turn among the sessions.
    pub(super) fn want_copy(&mut self, class: Class, cx: &mut Context<'_, R>) {
        if self.turns.enter_copy_queue(class) {
            cx.call().common.queue_copy(class, self.session);
        }
        cx.tell(Event::Copy);
    }
}

/// Channels that take only bulk while it waits had nothing to do while a handover did: their turn may have come.
fn note_turn_of_bulk<R: Clone>(
    sending: &ClassQueue<u64>,
    was: [Class; 2],
    class: Class,
    cx: &mut Context<'_, R>,
) {
    let turn = sending.turn() != was || !sending.waits(Class::Handover);
    if class == Class::Handover && sending.waits(Class::Bulk) && turn {
        cx.tell(Event::Send(cx.session()));
    }
}

/// Damage is somewhere between two engines: which ones is for both to know.
pub(super) fn name_peer<R: Clone>(own: bool, error: Error, cx: &mut Context<'_, R>) -> Error {
    if error.code != Code::ChecksumMismatch {
        return error;
    }
    let engine = cx.call().identity().engine;
    let text = match own {
        true => format!("{} (found by this engine within itself)", error.text),
        false => {
            format!("{} (found by engine {engine} in a transfer with {})", error.text, cx.peer_text())
        }
    };
    Error::new(error.code, text)
}

/// Tells the peer that this side has ended.
pub(super) fn tell_end<R: Clone>(flow: &Flow<R>, outcome: &Result<()>, cx: &mut Context<'_, R>) {
    let transfer = flow.key.1;
    match (flow.peer_ended, flow.end_sent) {
        (true, _) if flow.answered => {}
        (true, _) => cx.send(&Frame::Ended { transfer }),
        (false, true) => {}
        (false, false) => cx.send_end(transfer, outcome.clone()),
    }
}

/// Tells the peer of a stopped flow that this side has ended, ahead of the conclusion, as soon as no NIC has anything of
/// it: what a device of this side still has is no reason for the owner to wait, or to cut the session. An end of the
/// peer's is answered; one of this side's own is told once it was reported here.
pub(super) fn end_ahead<R: Clone>(flow: &mut Flow<R>, cx: &mut Context<'_, R>) {
    let transfer = flow.key.1;
    let Some(error) = flow.stop.as_ref().filter(|_| flow.posted == 0 && !flow.is_own()) else { return };
    if flow.peer_ended {
        // On other paths this side's device may have something of the owner's pages, and nobody waits for this.
        if flow.work == Work::Post && !std::mem::replace(&mut flow.answered, true) {
            cx.send(&Frame::Ended { transfer });
        }
    } else if flow.reported && !std::mem::replace(&mut flow.end_sent, true) {
        cx.send_end(transfer, Err(error.clone()));
    }
}

/// Tells who began the transfer here how it has ended.
pub(super) fn report<R: Clone>(flow: &Flow<R>, outcome: Result<()>, cx: &mut Context<'_, R>) {
    if !flow.reported {
        cx.tell(Event::Finished(finished(flow, outcome)));
    }
}

fn finished<R>(flow: &Flow<R>, outcome: Result<()>) -> Finished {
    Finished {
        key: flow.key,
        bytes: if outcome.is_ok() { flow.chunking.bytes } else { flow.bytes_done() },
        outcome,
        first: flow.first,
        extents: flow.extents,
        verify: flow.verify,
        staged_there: flow.borrowing.is_some(),
        copied_from: match &flow.source {
            Some(CopyFrom::Peer(source)) => Some(source.region),
            _ => None,
        },
    }
}

pub(super) fn request<R: Clone>(
    flow: &mut Flow<R>,
    part: Range<u64>,
    kind: WorkKind<R>,
    now: Duration,
) -> Option<WorkRequest<R>> {
    flow.first.get_or_insert(now);
    let (region, view) = flow.memory.clone()?;
    let window = if matches!(kind, WorkKind::Send(_)) { part.end - part.start } else { 0 };
    Some(WorkRequest {
        id: WorkId {
            key: flow.key,
            at: part.start,
            window,
            class: flow.class,
            posted: matches!(kind, WorkKind::Post(..)),
        },
        stop: flow.stop_flag.clone(),
        region,
        view,
        part,
        unit: flow.chunking.unit,
        sums: flow.chunking.sums,
        kind,
    })
}
