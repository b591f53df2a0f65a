//! Transfers whose owner's pages no NIC reaches: the initiator's NIC moves their chunks to and from slots of the owner's
//! [`Ring`](crate::Ring), and the owner copies between the slots and the pages.
//!
//! The owner lends a slot for a chunk: of a read once the chunk's bytes are in it, of a write at once. The initiator's NIC
//! moves the chunk, and the initiator says so when nothing of it is in flight. Of a write the owner then empties the slot into
//! its pages and says that they have landed; before that the chunk is not done. A slot that was not given back so is held
//! until its flow concludes, which is as for pages that are exposed: after the initiator has answered, or after the path was
//! cut, and after the last copy of this process.

use super::Transfers;
use super::work::WorkKind;
use crate::common::Effect;
use crate::connection::Context;
use crate::flow::Flow;
use crate::frame::{Frame, Op};
use crate::lending::Lent;
use kvik_core::{Code, Error, Result};
use std::ops::Range;

/// What has become of a chunk that goes through a slot.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ChunkEvent {
    /// The owner has lent a slot for it, which begins there.
    Lent(u64),
    /// The initiator's NIC is through with its slot.
    Used,
    /// It is in the owner's pages.
    Landed,
    /// A work request of this process has copied or moved it.
    Done,
}

/// What a flow does next.
enum Next {
    Nothing,
    Post,
    /// It copies or sums.
    Copy,
    Lend,
}

impl<R: Clone> Transfers<R> {
    /// Takes slots for the next chunks of a transfer, while there are any for it.
    pub(crate) fn lend(&mut self, transfer: u64, cx: &mut Context<'_, R>) {
        while let Some(flow) = self.flows.get_mut(&transfer) {
            let Some(lending) = &mut flow.lending else { return };
            if flow.stop.is_some() || flow.next >= flow.chunking.chunks() {
                return;
            }
            let (at, write) = (flow.chunking.part(flow.next).start, flow.op == Op::Write);
            let step = if write { Lent::Out } else { Lent::Waiting };
            let tell = |other| cx.call().later(Effect::Lend(other));
            let Some(place) = lending.take((flow.key, flow.class), (at, step), tell) else { return };
            flow.next += 1;
            match write {
                true => cx.send(&Frame::Lent { transfer, at, place }),
                false => self.queue_sums(transfer, cx),
            }
        }
    }

    /// Something has become of a chunk.
    pub fn on_chunk(
        &mut self,
        transfer: u64,
        at: u64,
        event: ChunkEvent,
        cx: &mut Context<'_, R>,
    ) -> Result<()> {
        let Some(flow) = self.flows.get_mut(&transfer).filter(|flow| flow.stop.is_none()) else {
            return Ok(());
        };
        let next = match event {
            ChunkEvent::Lent(place) => borrow(flow, at, place),
            ChunkEvent::Used => take_back(flow, at, cx),
            ChunkEvent::Landed => landed(flow, at),
            ChunkEvent::Done if flow.lending.is_some() => copied(flow, at, cx),
            ChunkEvent::Done => moved(flow, at, cx),
        };
        match next.ok_or_else(|| unfit(transfer, event))? {
            Next::Nothing => {}
            Next::Post => self.queue_post(transfer, cx),
            Next::Copy => self.queue_sums(transfer, cx),
            Next::Lend => self.lend(transfer, cx),
        }
        self.settle(transfer, cx);
        Ok(())
    }
}

/// The owner has lent a slot for a chunk.
fn borrow<R>(flow: &mut Flow<R>, at: u64, place: u64) -> Option<Next> {
    let is_new = flow.borrowing.is_some() && flow.note_chunk(at);
    flow.borrowing.as_mut().filter(|_| is_new)?.lent(at, place);
    Some(Next::Post)
}

/// The own NIC has moved a chunk, and nothing of it is in flight.
fn moved<R: Clone>(flow: &mut Flow<R>, at: u64, cx: &mut Context<'_, R>) -> Option<Next> {
    let write = flow.op == Op::Write;
    flow.borrowing.as_mut()?.moved(at, write).then_some(())?;
    cx.send(&Frame::Used { transfer: flow.key.1, at });
    Some(if write { Next::Nothing } else { delivered(flow, at) })
}

/// The initiator's NIC is through with the slot of a chunk.
fn take_back<R: Clone>(flow: &mut Flow<R>, at: u64, cx: &mut Context<'_, R>) -> Option<Next> {
    let lending = flow.lending.as_mut()?;
    if flow.op == Op::Write {
        lending.turn(at, Lent::Out, Lent::Waiting)?;
        return Some(Next::Copy);
    }
    lending.give(at, Lent::Out, |other| cx.call().later(Effect::Lend(other)))?;
    flow.done += 1;
    Some(Next::Lend)
}

/// A chunk was copied to its slot, or from it.
fn copied<R: Clone>(flow: &mut Flow<R>, at: u64, cx: &mut Context<'_, R>) -> Option<Next> {
    let (lending, transfer) = (flow.lending.as_mut()?, flow.key.1);
    if flow.op == Op::Write {
        cx.send(&Frame::Landed { transfer, at });
        lending.give(at, Lent::Copying, |other| cx.call().later(Effect::Lend(other)))?;
        flow.done += 1;
        return Some(Next::Lend);
    }
    let place = lending.turn(at, Lent::Copying, Lent::Out)?;
    cx.send(&Frame::Lent { transfer, at, place });
    Some(Next::Nothing)
}

/// A chunk is in the owner's pages.
fn landed<R>(flow: &mut Flow<R>, at: u64) -> Option<Next> {
    flow.borrowing.as_mut()?.landed(at).then(|| delivered(flow, at))
}

/// A chunk that the own NIC has moved is where it belongs.
fn delivered<R>(flow: &mut Flow<R>, at: u64) -> Next {
    flow.done += 1;
    match flow.checks.delivered(flow.key, &flow.chunking, at) {
        true => Next::Copy,
        false => Next::Nothing,
    }
}

/// The next part to copy to a slot or from one.
pub(super) fn claim<R: Clone>(flow: &mut Flow<R>) -> Option<(Range<u64>, WorkKind<R>)> {
    let lending = flow.lending.as_mut().filter(|_| flow.stop.is_none())?;
    let (at, place) = lending.claim()?;
    let kind = WorkKind::Stage(flow.op, lending.region().clone(), place);
    flow.pins += 1;
    Some((flow.chunking.part(at / flow.chunking.chunk), kind))
}

/// The next chunk to post by a slot, and where that is.
pub(super) fn claim_borrowed<R>(flow: &mut Flow<R>) -> Option<(Range<u64>, u64)> {
    let (at, place) = flow.borrowing.as_mut().filter(|_| flow.stop.is_none())?.claim()?;
    flow.pins += 1;
    Some((flow.chunking.part(at / flow.chunking.chunk), place))
}

/// A transfer takes no slots any more.
pub(super) fn lend_no_more<R: Clone>(flow: &Flow<R>, cx: &mut Context<'_, R>) {
    if let Some(lending) = &flow.lending {
        lending.leave((flow.key, flow.class), |other| cx.call().later(Effect::Lend(other)));
    }
}

/// It has concluded: no NIC and no copy has anything of its slots.
pub(super) fn return_slots<R: Clone>(flow: &Flow<R>, cx: &mut Context<'_, R>) {
    lend_no_more(flow, cx);
    if let Some(lending) = &flow.lending {
        lending.give_all(|other| cx.call().later(Effect::Lend(other)));
    }
}

fn unfit(transfer: u64, event: ChunkEvent) -> Error {
    let what = match event {
        ChunkEvent::Lent(_) => "lent a slot for",
        ChunkEvent::Used => "was through with the slot of",
        ChunkEvent::Landed | ChunkEvent::Done => "has placed",
    };
    let text =
        format!("the peer {what} a chunk of transfer {transfer} that is none, or whose turn it was not");
    Error::new(Code::ProtocolError, text)
}
