//! The chunks of one transfer that have slots of an owner's [`Ring`], as the owner sees them, and as the initiator does.

use crate::FlowKey;
use crate::ring::Ring;
use kvik_core::Class;
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
    step: Lent,
}

/// Whose turn a slot is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lent {
    /// It is to be copied: of a read, the first.
    Waiting,
    Copying,
    /// The initiator's NIC has it: of a write, the first.
    Out,
}

impl<R> Lending<R> {
    /// By slots of this ring.
    pub fn new(ring: Arc<Ring<R>>) -> Lending<R> {
        Lending { ring, pieces: Vec::new() }
    }

    pub fn region(&self) -> &R {
        self.ring.region()
    }

    /// Takes a slot for a chunk: where it is. None: the flow waits for one.
    pub fn take(
        &mut self,
        (key, class): (FlowKey, Class),
        (at, step): (u64, Lent),
        tell: impl FnMut(FlowKey),
    ) -> Option<u64> {
        let slot = self.ring.take(key, class, tell)?;
        self.pieces.push(LentPiece { at, slot, step });
        Some(self.ring.place(slot))
    }

    /// The next chunk to copy, and where its slot is.
    pub fn claim(&mut self) -> Option<(u64, u64)> {
        let piece = self.pieces.iter_mut().find(|piece| piece.step == Lent::Waiting)?;
        piece.step = Lent::Copying;
        Some((piece.at, self.ring.place(piece.slot)))
    }

    /// A chunk goes from one step to another: where its slot is. None: it was not there.
    pub fn turn(&mut self, at: u64, from: Lent, to: Lent) -> Option<u64> {
        let piece = self.pieces.iter_mut().find(|piece| (piece.at, piece.step) == (at, from))?;
        piece.step = to;
        Some(self.ring.place(piece.slot))
    }

    /// A chunk that has come so far is done, and its slot is given back. None: it was not there.
    pub fn give(&mut self, at: u64, step: Lent, tell: impl FnMut(FlowKey)) -> Option<()> {
        let index = self.pieces.iter().position(|piece| (piece.at, piece.step) == (at, step))?;
        self.ring.give(self.pieces.swap_remove(index).slot, tell);
        Some(())
    }

    /// Takes no slot any more.
    pub fn leave(&self, (key, class): (FlowKey, Class), tell: impl FnMut(FlowKey)) {
        self.ring.leave(key, class, tell);
    }

    /// Gives all slots back: no NIC and no copy has anything of them.
    pub fn give_all(&self, mut tell: impl FnMut(FlowKey)) {
        self.pieces.iter().for_each(|piece| self.ring.give(piece.slot, &mut tell));
    }
}

/// The initiator's side.
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

impl Borrowing {
    /// A slot was lent for a chunk.
    pub fn lent(&mut self, at: u64, place: u64) {
        self.pieces.push(BorrowedPiece { at, place, step: Borrowed::Waiting });
    }

    /// The next chunk to post, and where its slot is.
    pub fn claim(&mut self) -> Option<(u64, u64)> {
        let piece = self.pieces.iter_mut().find(|piece| piece.step == Borrowed::Waiting)?;
        piece.step = Borrowed::Posted;
        Some((piece.at, piece.place))
    }

    /// A chunk was posted and is to be posted again: its slot is lent to it still.
    pub fn give_back(&mut self, at: u64) {
        let mut pieces = self.pieces.iter_mut();
        pieces.by_ref().filter(|piece| piece.at == at).for_each(|piece| piece.step = Borrowed::Waiting);
    }

    /// The NIC has moved a chunk. Whether it was there.
    pub fn moved(&mut self, at: u64, write: bool) -> bool {
        let posted = |piece: &BorrowedPiece| (piece.at, piece.step) == (at, Borrowed::Posted);
        let Some(index) = self.pieces.iter().position(posted) else { return false };
        match write {
            true => self.pieces[index].step = Borrowed::Used,
            false => drop(self.pieces.swap_remove(index)),
        }
        true
    }

    /// A chunk is in the owner's pages. Whether it was to come there.
    pub fn landed(&mut self, at: u64) -> bool {
        let used = |piece: &BorrowedPiece| (piece.at, piece.step) == (at, Borrowed::Used);
        let index = self.pieces.iter().position(used);
        index.map(|index| self.pieces.swap_remove(index)).is_some()
    }
}
