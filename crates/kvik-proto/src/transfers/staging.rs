//! Transfers whose owner's pages no NIC reaches: the initiator's NIC moves their chunks to and from slots of the owner's
//! [`Ring`], and the owner copies between the slots and the pages.
//!
//! The owner lends a slot for a chunk: of a read once the chunk's bytes are in it, of a write at once. The initiator's NIC
//! moves the chunk, and the initiator says so when nothing of it is in flight. Of a write the owner then empties the slot into
//! its pages and says that they have landed; before that the chunk is not done. A slot that was not given back so is held
//! until its flow concludes, which is as for pages that are exposed: after the initiator has answered, or after the path was
//! cut, and after the last copy of this process.

use super::Transfers;
use super::work::{WorkId, WorkKind};
use crate::common::Effect;
use crate::connection::Context;
use crate::flow::Flow;
use crate::frame::{Frame, Op};
use crate::ring::Ring;
use kvik_core::{Code, Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// The owner's side.
pub(crate) struct Lending<R> {
    ring: Arc<Ring<R>>,
    pieces: Vec<LentPiece>,
}

/// A chunk that has a slot.
struct LentPiece {
    at: u64,
    slot: usize,
    step: Step,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// It is to be copied: of a read, the first.
    Waiting,
    Copying,
    /// The initiator's NIC has the slot: of a write, the first.
    Lent,
}

/// The initiator's side: the chunks that it has slots for.
#[derive(Default)]
pub(crate) struct Borrowing {
    pieces: Vec<BorrowedPiece>,
}

struct BorrowedPiece {
    at: u64,
    place: u64,
    step: Borrowed,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Borrowed {
    /// It is to be posted.
    Waiting,
    Posted,
    /// Of a write: the owner empties the slot.
    Used,
}

impl<R> Lending<R> {
    /// By slots of this ring.
    pub fn new(ring: Arc<Ring<R>>) -> Lending<R> {
        Lending { ring, pieces: Vec::new() }
    }

    fn piece(&mut self, at: u64, step: Step) -> Option<usize> {
        self.pieces.iter().position(|piece| (piece.at, piece.step) == (at, step))
    }
}

impl<R: Clone> Flow<R> {
    /// The next part to copy to a slot or from one.
    pub(super) fn claim_staging(&mut self) -> Option<(Range<u64>, WorkKind<R>)> {
        let lending = self.lending.as_mut().filter(|_| self.stop.is_none())?;
        let piece = lending.pieces.iter_mut().find(|piece| piece.step == Step::Waiting)?;
        piece.step = Step::Copying;
        self.pins += 1;
        let ring = &lending.ring;
        let kind = WorkKind::Stage(self.op, ring.region().clone(), ring.place(piece.slot));
        Some((self.chunking.part(piece.at / self.chunking.chunk), kind))
    }

    /// The next chunk to post, and where its slot is.
    pub(super) fn claim_borrowed(&mut self) -> Option<(Range<u64>, u64)> {
        let borrowing = self.borrowing.as_mut().filter(|_| self.stop.is_none())?;
        let piece = borrowing.pieces.iter_mut().find(|piece| piece.step == Borrowed::Waiting)?;
        piece.step = Borrowed::Posted;
        self.pins += 1;
        Some((self.chunking.part(piece.at / self.chunking.chunk), piece.place))
    }

    /// A chunk was posted and is to be posted again: its slot is lent to it still.
    pub(super) fn give_back_borrowed(&mut self, at: u64) {
        let pieces = self.borrowing.iter_mut().flat_map(|borrowing| &mut borrowing.pieces);
        pieces.filter(|piece| piece.at == at).for_each(|piece| piece.step = Borrowed::Waiting);
    }
}

impl<R: Clone> Transfers<R> {
    /// Takes slots for the next chunks of a transfer, while there are any for it.
    pub(crate) fn lend(&mut self, transfer: u64, cx: &mut Context<'_, R>) {
        while let Some(flow) = self.flows.get_mut(&transfer) {
            let Some(lending) = &mut flow.lending else { return };
            if flow.stop.is_some() || flow.next >= flow.chunking.chunks() {
                return;
            }
            let tell = |other| cx.call().later(Effect::Lend(other));
            let Some(slot) = lending.ring.take(flow.key, flow.class, tell) else { return };
            let (at, place) = (flow.chunking.part(flow.next).start, lending.ring.place(slot));
            flow.next += 1;
            let write = flow.op == Op::Write;
            let step = if write { Step::Lent } else { Step::Waiting };
            lending.pieces.push(LentPiece { at, slot, step });
            match write {
                true => cx.send(&Frame::Lent { transfer, at, place }),
                false => self.queue_sums(transfer, cx),
            }
        }
    }

    /// A transfer takes no slots any more.
    pub(super) fn lend_no_more(flow: &Flow<R>, cx: &mut Context<'_, R>) {
        if let Some(lending) = &flow.lending {
            lending.ring.leave(flow.key, flow.class, |other| cx.call().later(Effect::Lend(other)));
        }
    }

    /// It has concluded: no NIC and no copy has anything of its slots.
    pub(super) fn return_slots(flow: &Flow<R>, cx: &mut Context<'_, R>) {
        Self::lend_no_more(flow, cx);
        let Some(lending) = &flow.lending else { return };
        for piece in &lending.pieces {
            lending.ring.give(piece.slot, |other| cx.call().later(Effect::Lend(other)));
        }
    }

    /// A chunk was copied to its slot, or from it.
    pub(super) fn on_staged(&mut self, id: WorkId, cx: &mut Context<'_, R>) {
        let (transfer, at) = (id.key.1, id.at);
        let Some(flow) = self.flows.get_mut(&transfer).filter(|flow| flow.stop.is_none()) else { return };
        let Some(lending) = &mut flow.lending else { return };
        let Some(index) = lending.piece(at, Step::Copying) else { return };
        if flow.op == Op::Write {
            cx.send(&Frame::Landed { transfer, at });
            return self.give_slot(transfer, index, cx);
        }
        let piece = &mut lending.pieces[index];
        piece.step = Step::Lent;
        let place = lending.ring.place(piece.slot);
        cx.send(&Frame::Lent { transfer, at, place });
    }

    /// The initiator's NIC is through with the slot of a chunk.
    pub fn on_used(&mut self, transfer: u64, at: u64, cx: &mut Context<'_, R>) -> Result<()> {
        let Some(flow) = self.flows.get_mut(&transfer).filter(|flow| flow.stop.is_none()) else {
            return Ok(());
        };
        let found = flow.lending.as_mut().and_then(|lending| Some((lending.piece(at, Step::Lent)?, lending)));
        let Some((index, lending)) = found else { return Err(unfit(transfer, "was through with a slot")) };
        if flow.op == Op::Write {
            lending.pieces[index].step = Step::Waiting;
            self.queue_sums(transfer, cx);
        } else {
            self.give_slot(transfer, index, cx);
        }
        Ok(())
    }

    /// A chunk is done on this side: its slot is lent anew.
    fn give_slot(&mut self, transfer: u64, index: usize, cx: &mut Context<'_, R>) {
        let Some(flow) = self.flows.get_mut(&transfer) else { return };
        let Some(lending) = &mut flow.lending else { return };
        let piece = lending.pieces.swap_remove(index);
        flow.done += 1;
        lending.ring.give(piece.slot, |other| cx.call().later(Effect::Lend(other)));
        self.lend(transfer, cx);
    }

    /// The owner has lent a slot for a chunk.
    pub fn on_lent(&mut self, transfer: u64, at: u64, place: u64, cx: &mut Context<'_, R>) -> Result<()> {
        let Some(flow) = self.flows.get_mut(&transfer).filter(|flow| flow.stop.is_none()) else {
            return Ok(());
        };
        let fits = flow.borrowing.is_some() && flow.note_chunk(at);
        let Some(borrowing) = flow.borrowing.as_mut().filter(|_| fits) else {
            return Err(unfit(transfer, "lent a slot"));
        };
        borrowing.pieces.push(BorrowedPiece { at, place, step: Borrowed::Waiting });
        self.queue_post(transfer, cx);
        Ok(())
    }

    /// The own NIC has moved a chunk by a slot, and nothing of it is in flight.
    pub(super) fn on_moved(&mut self, id: WorkId, cx: &mut Context<'_, R>) {
        let (transfer, at) = (id.key.1, id.at);
        let Some(flow) = self.flows.get_mut(&transfer).filter(|flow| flow.stop.is_none()) else { return };
        let Some(borrowing) = &mut flow.borrowing else { return };
        let Some(index) = borrowing.pieces.iter().position(|piece| piece.at == at) else { return };
        cx.send(&Frame::Used { transfer, at });
        if flow.op == Op::Write {
            borrowing.pieces[index].step = Borrowed::Used;
        } else {
            borrowing.pieces.swap_remove(index);
            self.on_delivered(transfer, at, cx);
        }
    }

    /// A chunk is in the owner's pages.
    pub fn on_landed(&mut self, transfer: u64, at: u64, cx: &mut Context<'_, R>) -> Result<()> {
        let Some(flow) = self.flows.get_mut(&transfer).filter(|flow| flow.stop.is_none()) else {
            return Ok(());
        };
        let used = |piece: &BorrowedPiece| (piece.at, piece.step) == (at, Borrowed::Used);
        let found = flow.borrowing.as_mut().and_then(|borrowing| {
            let index = borrowing.pieces.iter().position(used)?;
            Some(borrowing.pieces.swap_remove(index))
        });
        if found.is_none() {
            return Err(unfit(transfer, "said that a chunk has landed"));
        }
        self.on_delivered(transfer, at, cx);
        self.settle(transfer, cx);
        Ok(())
    }
}

fn unfit(transfer: u64, what: &str) -> Error {
    let text = format!("the peer {what} of transfer {transfer} that is none of it, or at another time");
    Error::new(Code::ProtocolError, text)
}
