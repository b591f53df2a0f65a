//! What a work request has in a ring: pages of a device on their way to or from the wire.
//!
//! A write fills slots and posts from them; a read posts into slots and empties them. A piece is done with its last step:
//! that of a read when the device says that its bytes are there. Whatever becomes of a work request, it is not over before
//! the device is through with its last slot.

use super::device::{RmaDevice, Run};
use super::ring::{Rings, SLOT};
use crate::RegionMemory;
use kvik_core::{Error, Result};
use kvik_proto::{Op, WorkRequest};
use std::collections::VecDeque;
use std::ops::Range;

pub(super) struct Staged {
    ring: usize,
    op: Op,
    part: Range<u64>,
    /// Position up to which pieces were begun.
    begun: u64,
    /// Bytes of pieces that are done.
    done: u64,
    pieces: VecDeque<Piece>,
    /// Slots of which nothing is expected any more, and which the device may still have.
    leaving: Vec<usize>,
}

/// What is in one slot.
struct Piece {
    slot: usize,
    part: Range<u64>,
    step: Step,
    /// Position up to which operations were posted.
    posted: u64,
    /// Operations in flight.
    out: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The device fills the slot: of a write, the first.
    Filling,
    /// The wire has it, or is to have it.
    Posting,
    /// The device empties it: of a read, the last.
    Emptying,
}

impl Piece {
    fn bytes(&self) -> u64 {
        self.part.end - self.part.start
    }

    fn is_ready(&self) -> bool {
        self.step == Step::Posting && self.posted < self.part.end
    }
}

impl Staged {
    /// Of a part of a stream, by this ring.
    pub fn new(ring: usize, op: Op, part: Range<u64>) -> Staged {
        let begun = part.start;
        let (pieces, leaving) = (VecDeque::new(), Vec::new());
        Staged { ring, op, part, begun, done: 0, pieces, leaving }
    }

    /// The ring's number.
    pub fn ring(&self) -> usize {
        self.ring
    }

    /// Whether all of it is where it belongs.
    pub fn is_done(&self) -> bool {
        self.done == self.part.end - self.part.start
    }

    /// Whether it has nothing in the ring.
    pub fn is_out(&self) -> bool {
        self.pieces.is_empty() && self.leaving.is_empty()
    }

    /// Whether there is something to post.
    pub fn is_ready(&self) -> bool {
        self.pieces.iter().any(Piece::is_ready)
    }

    /// What is posted next, `longest` bytes at most, or less where they are no one run at the peer: its position, its bytes and
    /// the slot; its place in the ring goes into `pieces`.
    pub fn next(&self, longest: u64, pieces: &mut Vec<Run>) -> Option<(u64, u64, usize)> {
        let piece = self.pieces.iter().find(|piece| piece.is_ready())?;
        let offset = piece.slot * SLOT as usize + (piece.posted - piece.part.start) as usize;
        let len = (piece.part.end - piece.posted).min(longest);
        pieces.push(Run { offset, len: len as usize });
        Some((piece.posted, len, piece.slot))
    }

    /// So many bytes of a slot were posted.
    pub fn posted(&mut self, slot: usize, bytes: u64) {
        if let Some(piece) = self.pieces.iter_mut().find(|piece| piece.slot == slot) {
            piece.posted += bytes;
            piece.out += 1;
        }
    }

    /// An operation of a slot has ended.
    pub fn ended(&mut self, slot: usize) {
        if let Some(piece) = self.pieces.iter_mut().find(|piece| piece.slot == slot) {
            piece.out = piece.out.saturating_sub(1);
        }
    }

    /// All that was posted was stopped.
    pub fn stop(&mut self) {
        self.pieces.iter_mut().for_each(|piece| piece.out = 0);
    }

    /// Begins again: nothing that was posted can land any more.
    pub fn restart(&mut self) {
        self.leave();
        (self.begun, self.done) = (self.part.start, 0);
    }

    /// Nothing is expected any more of slots that no operation has.
    pub fn leave(&mut self) {
        let leaving = &mut self.leaving;
        self.pieces.retain(|piece| {
            if piece.out == 0 {
                leaving.push(piece.slot);
            }
            piece.out > 0
        });
    }

    /// Gives back slots that the device is through with: whether there were any.
    pub fn release<C: RmaDevice>(&mut self, rings: &mut Rings<C>) -> bool {
        let Some(ring) = rings.get_mut(self.ring) else { return false };
        let before = self.leaving.len();
        self.leaving.retain(|slot| !ring.give(*slot));
        before != self.leaving.len()
    }

    /// Takes each piece as far as the device and the wire have come: whether any has gone on.
    ///
    /// # Errors
    /// `DeviceFailed`.
    pub fn advance<C: RmaDevice>(
        &mut self,
        rings: &mut Rings<C>,
        request: &WorkRequest<RegionMemory>,
    ) -> Result<bool> {
        if let Some(lost) = rings.get(self.ring).and_then(|ring| ring.lost.clone()) {
            return Err(lost);
        }
        let (mut moved, mut at) = (false, 0);
        while let Some(piece) = self.pieces.get_mut(at) {
            let copying = rings.get(self.ring).is_some_and(|ring| ring.is_copying(piece.slot));
            let arrived = piece.posted >= piece.part.end && piece.out == 0;
            let over = match piece.step {
                Step::Filling if !copying => {
                    (piece.step, moved) = (Step::Posting, true);
                    false
                }
                Step::Posting if arrived && self.op == Op::Read => {
                    (piece.step, moved) = (Step::Emptying, true);
                    let of = (&request.region, &*request.view, piece.part.clone());
                    rings.copy(self.ring, piece.slot, self.op, of)?;
                    false
                }
                Step::Posting => arrived,
                Step::Emptying => !copying,
                Step::Filling => false,
            };
            if !over {
                at += 1;
                continue;
            }
            (self.done, moved) = (self.done + piece.bytes(), true);
            self.leaving.push(piece.slot);
            self.pieces.remove(at);
        }
        self.release(rings);
        Ok(moved)
    }

    /// Begins the next piece, where there is one, and a slot for it: whether it has.
    ///
    /// # Errors
    /// `DeviceFailed`.
    pub fn begin<C: RmaDevice>(
        &mut self,
        rings: &mut Rings<C>,
        request: &WorkRequest<RegionMemory>,
    ) -> Result<bool> {
        let Some(ring) = rings.get_mut(self.ring).filter(|_| self.begun < self.part.end) else {
            return Ok(false);
        };
        let Some(slot) = ring.take(request.id.session()) else { return Ok(false) };
        let part = self.begun..(self.begun + SLOT).min(self.part.end);
        let step = if self.op == Op::Write { Step::Filling } else { Step::Posting };
        self.begun = part.end;
        self.pieces.push_back(Piece { slot, part: part.clone(), step, posted: part.start, out: 0 });
        if step == Step::Filling {
            let of = (&request.region, &*request.view, part);
            rings.copy(self.ring, slot, self.op, of)?;
        }
        Ok(true)
    }

    /// What whoever waits is told where the device does not come to the end of its copies.
    pub fn stuck<C: RmaDevice>(&self, rings: &Rings<C>) -> Option<Error> {
        rings.get(self.ring).map(|ring| crate::devices::stuck(ring.device()))
    }
}
