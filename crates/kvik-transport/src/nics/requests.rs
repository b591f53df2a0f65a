//! The work requests that a NIC has in flight, of all sessions.

use super::device::{Done, RmaDevice, Run};
use super::in_flight::InFlight;
use super::ring::{Rings, SLOTS};
use super::stats::NicStats;
use super::turns::Turns;
use crate::{Ended, RegionMemory, WorkSource};
use kvik_core::Error;
use kvik_proto::WorkRequest;

/// Work requests in flight: half of them are enough small chunks to fill a queue.
const PLACES: usize = 32;

/// See the module's text.
pub(super) struct Requests {
    places: Vec<Option<InFlight>>,
    turns: Turns,
    /// What is reported at once, kept for its room.
    ended: Vec<Ended>,
    /// The place that is asked first whether it needs a slot of a ring.
    first: usize,
}

/// The token of operations of a place, and of a slot where they go through one.
pub(super) fn token(place: usize, slot: Option<usize>) -> u64 {
    (place + slot.map_or(0, |slot| (slot + 1) * PLACES)) as u64
}

/// What a token says, unless it is a probe's.
fn place_of(token: u64) -> Option<(usize, Option<usize>)> {
    let token = usize::try_from(token).ok().filter(|token| *token < PLACES * (1 + SLOTS))?;
    Some((token % PLACES, (token / PLACES).checked_sub(1)))
}

impl Requests {
    /// For a NIC that takes so many operations; None where each connection has a queue of its own.
    pub fn new(depth: Option<usize>) -> Requests {
        let operations = depth.unwrap_or(usize::MAX).max(1);
        let (places, turns) = ((0..PLACES).map(|_| None).collect(), Turns::new(PLACES, operations));
        Requests { places, turns, ended: Vec::with_capacity(PLACES), first: 0 }
    }

    pub fn turns(&mut self) -> &mut Turns {
        &mut self.turns
    }

    pub fn is_empty(&self) -> bool {
        self.places.iter().all(Option::is_none)
    }

    /// Operations in flight for a session.
    pub fn operations(&self, session: u64) -> usize {
        self.turns.operations(session)
    }

    /// Takes a work request up, for which [`Turns::next_to_claim`] had a place.
    ///
    /// Through a ring, where its pages are not for the NIC itself.
    ///
    /// # Errors
    /// It is none for a NIC.
    pub fn add(
        &mut self,
        request: WorkRequest<RegionMemory>,
        ring: Option<usize>,
    ) -> Result<(), Box<WorkRequest<RegionMemory>>> {
        let active = InFlight::new(request, ring)?;
        let Some(place) = self.places.iter().position(Option::is_none) else {
            return Err(Box::new(active.request));
        };
        let part = &active.request.part;
        self.turns.take(active.session(), place, active.class(), part.end - part.start);
        self.places[place] = Some(active);
        Ok(())
    }

    pub fn get(&mut self, place: usize) -> Option<&mut InFlight> {
        self.places.get_mut(place)?.as_mut()
    }

    /// An operation of this work request was posted, whose turn it was.
    pub fn posted(&mut self, place: usize, slot: Option<usize>, pieces: &[Run]) {
        if let Some(Some(active)) = self.places.get_mut(place) {
            self.turns.posted(active.posted(pieces, slot));
        }
    }

    /// What goes through rings goes on, and finds slots in turn: whether anything has.
    pub fn stage<C: RmaDevice>(&mut self, rings: &mut Rings<C>, work: &dyn WorkSource) -> bool {
        // Also where nothing is staged any more: a device may raise the flag behind the last turn that needed it, and a
        // flag that nobody lowers wakes the thread for ever.
        rings.settle();
        if !self.places.iter().flatten().any(|active| active.staged.is_some()) {
            return false;
        }
        let mut moved = false;
        for active in self.places.iter_mut().flatten() {
            moved |= active.stage(rings, work);
        }
        let (first, all) = (self.first, self.places.len());
        loop {
            let mut begun = false;
            for at in (first..all).chain(0..first) {
                if self.places[at].as_mut().is_some_and(|active| active.stage_more(rings, work)) {
                    (begun, self.first) = (true, (at + 1) % all);
                }
            }
            moved |= begun;
            if !begun {
                break;
            }
        }
        for (place, active) in self.places.iter().enumerate() {
            if let Some(active) = active.as_ref().filter(|active| active.is_staged_ready()) {
                self.turns.ready(active.session(), place);
            }
        }
        moved
    }

    /// Whether a device has something of a work request here.
    pub fn are_staged(&self) -> bool {
        self.places.iter().flatten().any(InFlight::is_in_a_ring)
    }

    /// There is nothing to post for it now, or never.
    pub fn pause(&mut self, place: usize) {
        if let Some(session) = self.get(place).map(|active| active.session()) {
            self.turns.not_ready(session, place);
        }
    }

    /// An operation has ended: the session that it was for, and whether it failed.
    ///
    /// # Errors
    /// It was no work request's, and is given back.
    pub fn ended(&mut self, ended: Done) -> Result<(u64, bool), Done> {
        let Some((place, slot)) = place_of(ended.token) else { return Err(ended) };
        let Some(Some(active)) = self.places.get_mut(place) else { return Err(ended) };
        let (session, error) = (active.session(), ended.result.err());
        let failed = error.is_some();
        active.ended(slot, error);
        self.turns.ended(session, 1);
        Ok((session, failed))
    }

    /// What was posted was stopped: for these sessions, which are given back.
    pub fn stop(&mut self, theirs: impl Fn(u64) -> bool, error: &Error) -> Vec<u64> {
        let mut stopped = Vec::new();
        for active in self.places.iter_mut().flatten().filter(|active| theirs(active.session())) {
            let operations = active.stop(error);
            if operations > 0 {
                self.turns.ended(active.session(), operations);
                stopped.push(active.session());
            }
        }
        stopped
    }

    /// What was posted for a session cannot be stopped: who waits for it is told.
    pub fn give_up(&mut self, session: u64, work: &dyn WorkSource, error: &Error) {
        self.of(session).for_each(|active| active.give_up(work, error));
    }

    /// Sessions of transfers that have ended while operations for them have not.
    pub fn stuck(&mut self) -> Vec<u64> {
        let stuck = self.places.iter_mut().flatten().filter_map(|active| {
            let session = active.session();
            active.is_stuck().then_some(session)
        });
        stuck.collect()
    }

    /// A session's work requests that waited for its connection go on.
    pub fn resume(&mut self, session: u64) {
        for (place, active) in self.places.iter_mut().enumerate() {
            if let Some(active) = active.as_mut().filter(|active| active.session() == session) {
                active.restart();
                self.turns.ready(session, place);
            }
        }
    }

    /// Why operations for a session failed first.
    pub fn doubt(&mut self, session: u64) -> Option<&Error> {
        self.of(session).next().and_then(|active| active.doubt.as_ref())
    }

    /// Reports those that are over.
    pub fn report(&mut self, work: &dyn WorkSource, stats: &NicStats) {
        self.extract(work, |active| active.is_over(), |over| over.end(stats));
    }

    /// A session's work requests, of which nothing is in flight here, go to other NICs, for which nothing of them may
    /// be on the wire either; or they fail.
    pub fn reassign(
        &mut self,
        session: u64,
        work: &dyn WorkSource,
        stats: &NicStats,
        failed: Option<&Error>,
    ) {
        self.of(session).filter(|active| active.out == 0).for_each(|active| active.part(failed));
        self.extract(work, |active| active.session() == session && active.is_over(), |over| over.end(stats));
    }

    /// The sessions that have any.
    pub fn sessions(&self) -> Vec<u64> {
        self.places.iter().flatten().map(InFlight::session).collect()
    }

    fn of(&mut self, session: u64) -> impl Iterator<Item = &mut InFlight> {
        self.places.iter_mut().flatten().filter(move |active| active.session() == session)
    }

    /// Reports some, those of a session together.
    fn extract(
        &mut self,
        work: &dyn WorkSource,
        which: impl Fn(&InFlight) -> bool,
        end: impl Fn(InFlight) -> Ended,
    ) {
        for (place, active) in self.places.iter_mut().enumerate() {
            if let Some(active) = active.take_if(|active| which(active)) {
                self.turns.give(active.session(), place, active.class());
                self.ended.push(end(active));
            }
        }
        if !self.ended.is_empty() {
            self.ended.sort_unstable_by_key(|(id, _)| id.session());
            work.batch_done(&mut self.ended);
        }
    }
}
