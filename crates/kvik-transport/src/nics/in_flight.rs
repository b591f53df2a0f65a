//! A work request that a NIC has in flight.
//!
//! Its operations go to and from the pages themselves, or to and from slots of a ring (`staged`).

use super::device::{RmaDevice, Run};
use super::ring::Rings;
use super::staged::Staged;
use super::stats::NicStats;
use crate::basics::stopped;
use crate::devices;
use crate::services::ended;
use crate::{Ended, RegionMemory, WorkSource};
use kvik_core::{Class, Error, Extent, Extents, Result};
use kvik_proto::{Op, Source, WorkKind, WorkOutcome, WorkRequest};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an operation may take to end after its transfer has.
pub(super) const PATIENCE: Duration = Duration::from_millis(250);

pub(super) struct InFlight {
    pub request: WorkRequest<RegionMemory>,
    pub op: Op,
    pub source: Arc<Source>,
    /// Where it lies in the owner's ring, if it does; else where the source says.
    place: Option<u64>,
    /// What it has in a ring, where it goes through one.
    pub staged: Option<Staged>,
    /// Position in the stream up to which operations were posted.
    at: u64,
    /// Operations in flight.
    pub out: usize,
    extents: u64,
    /// It has failed.
    error: Option<Error>,
    /// An operation failed: what was posted may still land until the connection has mended.
    pub doubt: Option<Error>,
    /// When it was first seen to have to stop.
    left_since: Option<Instant>,
    /// Its transfer was told that it cannot be stopped.
    given_up: bool,
    /// Nothing is waited for any more but a device.
    parted: Option<Parting>,
    /// Its session knows that nothing of it is on the wire.
    landed: bool,
}

/// Why a work request leaves a NIC before its end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Parting {
    /// Another NIC is to have it.
    Back,
    /// It has failed with its connection.
    Failed,
}

/// What is posted next.
pub(super) struct Next {
    /// The offset in the peer's region, or in its ring.
    pub there: u64,
    /// The slot that the bytes are in or go to; none of the pages themselves.
    pub slot: Option<usize>,
}

impl InFlight {
    /// # Errors
    /// It is no work request for a NIC.
    pub fn new(
        request: WorkRequest<RegionMemory>,
        ring: Option<usize>,
    ) -> Result<InFlight, Box<WorkRequest<RegionMemory>>> {
        let WorkKind::Post(op, source, place) = &request.kind else { return Err(Box::new(request)) };
        let (op, source, place, at) = (*op, source.clone(), *place, request.part.start);
        let staged = ring.map(|ring| Staged::new(ring, op, request.part.clone()));
        Ok(InFlight {
            request,
            op,
            source,
            place,
            staged,
            at,
            out: 0,
            extents: 0,
            error: None,
            doubt: None,
            left_since: None,
            given_up: false,
            parted: None,
            landed: false,
        })
    }

    pub fn class(&self) -> Class {
        self.request.id.class()
    }

    pub fn session(&self) -> u64 {
        self.request.id.session()
    }

    /// What is posted next, `longest` bytes at most: one run at the peer, whose offset in its region is given, and
    /// up to `most` runs here, which go into `pieces`.
    pub fn next(&self, longest: u64, most: usize, pieces: &mut Vec<Run>) -> Option<Next> {
        pieces.clear();
        if self.is_left() || self.doubt.is_some() || self.parted.is_some() {
            return None;
        }
        if let Some(staged) = &self.staged {
            let (at, len, slot) = staged.next(longest, pieces)?;
            let (there, len) = match self.in_ring(at) {
                Some(there) => (there, len),
                None => {
                    let run = self.source.view.runs(at..at + len).next()?;
                    (run.offset, run.len.min(len))
                }
            };
            pieces.last_mut()?.len = len as usize;
            return Some(Next { there, slot: Some(slot) });
        }
        if let Some(there) = self.in_ring(self.at) {
            let mut room = longest;
            for run in self.request.view.runs(self.at..self.request.part.end).take(most) {
                let len = run.len.min(room);
                pieces.push(Run { offset: run.offset as usize, len: len as usize });
                room -= len;
                if room == 0 {
                    break;
                }
            }
            return (!pieces.is_empty()).then_some(Next { there, slot: None });
        }
        let mut extents = Extents::new(&self.source.view, &self.request.view, self.at..self.request.part.end);
        let first = extents.next()?;
        let (mut there, mut room) = (first.left, longest);
        let mut next = Some(first);
        while let Some(Extent { left, right, len }) = next.filter(|extent| extent.left == there) {
            let len = len.min(room);
            pieces.push(Run { offset: right as usize, len: len as usize });
            (there, room) = (left + len, room - len);
            next = if room > 0 && pieces.len() < most { extents.next() } else { None };
        }
        Some(Next { there: first.left, slot: None })
    }

    /// The offset of a position in the owner's ring, where it lies there.
    fn in_ring(&self, at: u64) -> Option<u64> {
        Some(self.place?.wrapping_add(at - self.request.part.start))
    }

    /// An operation of these runs was posted: their bytes.
    pub fn posted(&mut self, pieces: &[Run], slot: Option<usize>) -> u64 {
        let bytes = pieces.iter().map(|run| run.len as u64).sum();
        self.out += 1;
        match (&mut self.staged, slot) {
            (Some(staged), Some(slot)) => staged.posted(slot, bytes),
            _ => {
                self.at += bytes;
                self.extents += pieces.len() as u64;
            }
        }
        bytes
    }

    /// An operation has ended, or was stopped.
    pub fn ended(&mut self, slot: Option<usize>, error: Option<Error>) {
        self.out -= 1;
        if let (Some(staged), Some(slot)) = (&mut self.staged, slot) {
            staged.ended(slot);
        }
        if let Some(error) = error {
            self.doubt.get_or_insert(error);
        }
    }

    pub fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
    }

    /// Nothing more is posted for it.
    pub fn is_left(&self) -> bool {
        self.error.is_some() || stopped(&self.request.stop)
    }

    /// Whether it was left, and has waited in vain for its operations to end.
    pub fn is_stuck(&mut self) -> bool {
        if self.out == 0 || !self.is_left() {
            return false;
        }
        self.left_since.get_or_insert_with(Instant::now).elapsed() > PATIENCE
    }

    /// What is in flight cannot be stopped: who waits for its transfer is told, once.
    pub fn give_up(&mut self, work: &dyn WorkSource, why: &Error) {
        if self.out > 0 && !std::mem::replace(&mut self.given_up, true) {
            work.stuck(self.request.id, why.clone());
        }
    }

    /// Whether all of it is where it belongs, as far as operations and copies that have ended can tell.
    fn is_all_there(&self) -> bool {
        self.staged.as_ref().map_or(self.at >= self.request.part.end, Staged::is_done)
    }

    /// Whether nothing of it is in flight, here or on the wire, and nothing more will be.
    pub fn is_over(&self) -> bool {
        if self.is_in_a_ring() {
            return false;
        }
        self.parted.is_some()
            || (self.out == 0 && self.doubt.is_none() && (self.is_left() || self.is_all_there()))
    }

    /// What goes through a ring goes on, as far as the device and the wire have come: whether it has.
    pub fn stage<C: RmaDevice>(&mut self, rings: &mut Rings<C>, work: &dyn WorkSource) -> bool {
        if self.staged.is_none() {
            return false;
        }
        if self.doubt.is_some() || self.parted.is_some() || self.is_left() {
            return self.unstage(rings, work);
        }
        let Some(staged) = &mut self.staged else { return false };
        let moved = staged.advance(rings, &self.request);
        self.unstage_if_err(moved, rings, work)
    }

    /// Takes one slot more, where it needs one and there is one: whether it has.
    pub fn stage_more<C: RmaDevice>(&mut self, rings: &mut Rings<C>, work: &dyn WorkSource) -> bool {
        if self.doubt.is_some() || self.parted.is_some() || self.is_left() {
            return false;
        }
        let Some(staged) = &mut self.staged else { return false };
        let begun = staged.begin(rings, &self.request);
        self.unstage_if_err(begun, rings, work)
    }

    fn unstage_if_err<C: RmaDevice>(
        &mut self,
        moved: Result<bool>,
        rings: &mut Rings<C>,
        work: &dyn WorkSource,
    ) -> bool {
        moved.unwrap_or_else(|error| {
            self.fail(error);
            self.unstage(rings, work);
            true
        })
    }

    /// Whether it goes through a ring and has something to post.
    pub fn is_staged_ready(&self) -> bool {
        self.staged.as_ref().is_some_and(Staged::is_ready)
    }

    /// Whether it has something in a ring.
    pub fn is_in_a_ring(&self) -> bool {
        self.staged.as_ref().is_some_and(|staged| !staged.is_out())
    }

    /// It goes through a ring, and goes no further: slots go back as the device is through with them.
    fn unstage<C: RmaDevice>(&mut self, rings: &mut Rings<C>, work: &dyn WorkSource) -> bool {
        let (left, parted) = (self.is_left(), self.parted);
        let Some(staged) = &mut self.staged else { return false };
        if left || parted.is_some() {
            staged.leave();
        }
        let moved = staged.release(rings);
        let waits = !staged.is_out();
        // Of one that was parted nobody waits for the wire any more, but its transfer may still wait for the device.
        let on_wire = self.out > 0 || (self.doubt.is_some() && parted.is_none());
        if !left || on_wire || !(waits || self.error.is_some()) {
            return moved;
        }
        // The link has nothing to do with what is waited for, or with what has failed, unless it failed itself.
        if parted != Some(Parting::Failed) && !std::mem::replace(&mut self.landed, true) {
            work.landed(&mut self.request.id);
        }
        let late = self.left_since.get_or_insert_with(Instant::now).elapsed() > devices::PATIENCE;
        if waits && late && stopped(&self.request.stop) && !std::mem::replace(&mut self.given_up, true) {
            staged.stuck(rings).into_iter().for_each(|why| work.stuck(self.request.id, why));
        }
        moved
    }

    /// Its operations were stopped here, so many; on the way there may still be something of them.
    pub fn stop(&mut self, error: &Error) -> usize {
        if self.out > 0 {
            self.doubt.get_or_insert(error.clone());
        }
        self.staged.iter_mut().for_each(Staged::stop);
        std::mem::take(&mut self.out)
    }

    /// The connection has mended: nothing that was posted can land any more. It begins again, which does no harm, since
    /// each byte is written as before.
    pub fn restart(&mut self) {
        if self.parted.is_some() || self.doubt.take().is_none() {
            return;
        }
        (self.at, self.extents) = (self.request.part.start, 0);
        self.staged.iter_mut().for_each(Staged::restart);
    }

    /// It goes to another NIC, for which nothing that was posted can land any more, or it has failed with its connection:
    /// as soon as no device has anything of it.
    pub fn part(&mut self, failed: Option<&Error>) {
        self.parted = Some(if failed.is_some() { Parting::Failed } else { Parting::Back });
        failed.cloned().into_iter().for_each(|why| self.fail(why));
        self.staged.iter_mut().for_each(Staged::leave);
    }

    /// What is to be reported of it.
    pub fn end(self, stats: &NicStats) -> Ended {
        let all = self.is_all_there();
        let outcome = match self.error.or(self.doubt) {
            _ if self.parted == Some(Parting::Back) => WorkOutcome::Back,
            Some(error) => WorkOutcome::Failed(error),
            None if all => {
                stats.moved(self.op, self.request.part.end - self.request.part.start);
                // Before anybody hears that it is there; what comes by a copy of the device's is seen as it is.
                let direct = self.op == Op::Read && self.staged.is_none();
                let seen = if direct { self.request.region.flush_writes() } else { Ok(()) };
                let extents = match self.staged {
                    Some(_) if self.place.is_some() => {
                        self.request.view.runs(self.request.part.clone()).count() as u64
                    }
                    Some(_) => {
                        let (view, part) = (&self.request.view, self.request.part.clone());
                        Extents::new(&self.source.view, view, part).count() as u64
                    }
                    None => self.extents,
                };
                match seen {
                    Ok(()) => WorkOutcome::Done { extents, verify: Duration::ZERO },
                    Err(error) => WorkOutcome::Failed(error),
                }
            }
            None => WorkOutcome::Void,
        };
        ended(self.request, outcome)
    }
}
