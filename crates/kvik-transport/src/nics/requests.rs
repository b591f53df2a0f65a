//! The work requests that a NIC has in flight, of all sessions.

use super::device::{Done, Run};
use super::in_flight::InFlight;
use super::stats::NicStats;
use super::turns::Turns;
use crate::{Ended, RegionMemory, WorkSource};
use kvik_core::Error;
use kvik_proto::WorkRequest;

/// Work requests in flight: half of them are enough small chunks to fill a queue.
const PLACES: usize = 32;

/// See the module's text.
pub(super) struct Requests {
    /// The index is the token of a work request's operations.
    places: Vec<Option<InFlight>>,
    turns: Turns,
    /// What is reported at once, kept for its room.
    ended: Vec<Ended>,
}

impl Requests {
    /// For a NIC that takes so many operations; None where each connection has a queue of its own.
    pub fn new(depth: Option<usize>) -> Requests {
        let operations = depth.unwrap_or(usize::MAX).max(1);
        let (places, turns) = ((0..PLACES).map(|_| None).collect(), Turns::new(PLACES, operations));
        Requests { places, turns, ended: Vec::with_capacity(PLACES) }
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
    /// # Errors
    /// It is none for a NIC.
    pub fn add(&mut self, request: WorkRequest<RegionMemory>) -> Result<(), Box<WorkRequest<RegionMemory>>> {
        let active = InFlight::new(request)?;
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
    pub fn posted(&mut self, place: usize, pieces: &[Run]) {
        if let Some(Some(active)) = self.places.get_mut(place) {
            self.turns.posted(active.posted(pieces));
        }
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
        let Some(Some(active)) = self.places.get_mut(ended.token as usize) else { return Err(ended) };
        let (session, error) = (active.session(), ended.result.err());
        let failed = error.is_some();
        active.ended(error);
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
        let theirs = |active: &InFlight| active.session() == session && active.out == 0;
        self.extract(work, theirs, |mut active| match failed {
            None => active.give_back(),
            Some(why) => {
                active.fail(why.clone());
                active.end(stats)
            }
        });
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
