//! A work request that a NIC has in flight.

use super::device::Run;
use super::stats::NicStats;
use crate::basics::stopped;
use crate::services::ended;
use crate::{Ended, RegionMemory, WorkSource};
use kvik_core::{Class, Error, Extent, Extents};
use kvik_proto::{Op, Source, WorkKind, WorkOutcome, WorkRequest};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an operation may take to end after its transfer has.
pub(super) const PATIENCE: Duration = Duration::from_millis(250);

pub(super) struct InFlight {
    pub request: WorkRequest<RegionMemory>,
    pub op: Op,
    pub source: Arc<Source>,
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
}

impl InFlight {
    /// # Errors
    /// It is no work request for a NIC.
    pub fn new(request: WorkRequest<RegionMemory>) -> Result<InFlight, Box<WorkRequest<RegionMemory>>> {
        let WorkKind::Post(op, source) = &request.kind else { return Err(Box::new(request)) };
        let (op, source, at) = (*op, source.clone(), request.part.start);
        Ok(InFlight {
            request,
            op,
            source,
            at,
            out: 0,
            extents: 0,
            error: None,
            doubt: None,
            left_since: None,
            given_up: false,
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
    pub fn next(&self, longest: u64, most: usize, pieces: &mut Vec<Run>) -> Option<u64> {
        pieces.clear();
        if self.is_left() || self.doubt.is_some() || self.at >= self.request.part.end {
            return None;
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
        Some(first.left)
    }

    /// An operation of these runs was posted: their bytes.
    pub fn posted(&mut self, pieces: &[Run]) -> u64 {
        let bytes = pieces.iter().map(|run| run.len as u64).sum();
        self.at += bytes;
        self.out += 1;
        self.extents += pieces.len() as u64;
        bytes
    }

    /// An operation has ended, or was stopped.
    pub fn ended(&mut self, error: Option<Error>) {
        self.out -= 1;
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

    /// Whether nothing of it is in flight, here or on the wire, and nothing more will be.
    pub fn is_over(&self) -> bool {
        self.out == 0 && self.doubt.is_none() && (self.is_left() || self.at >= self.request.part.end)
    }

    /// Its operations were stopped here, so many; on the way there may still be something of them.
    pub fn stop(&mut self, error: &Error) -> usize {
        if self.out > 0 {
            self.doubt.get_or_insert(error.clone());
        }
        std::mem::take(&mut self.out)
    }

    /// The connection has mended: nothing that was posted can land any more. It begins again, which does no harm, since
    /// each byte is written as before.
    pub fn restart(&mut self) {
        if self.doubt.take().is_some() {
            (self.at, self.extents) = (self.request.part.start, 0);
        }
    }

    /// What is to be reported of it.
    pub fn end(self, stats: &NicStats) -> Ended {
        let all = self.at >= self.request.part.end;
        let outcome = match self.error.or(self.doubt) {
            Some(error) => WorkOutcome::Failed(error),
            None if all => {
                stats.moved(self.op, self.request.part.end - self.request.part.start);
                // Before anybody hears that it is there.
                let seen = if self.op == Op::Read { self.request.region.flush_writes() } else { Ok(()) };
                match seen {
                    Ok(()) => WorkOutcome::Done { extents: self.extents, verify: Duration::ZERO },
                    Err(error) => WorkOutcome::Failed(error),
                }
            }
            None => WorkOutcome::Void,
        };
        ended(self.request, outcome)
    }

    /// It goes to another NIC: nothing that was posted can land any more.
    pub fn give_back(self) -> Ended {
        ended(self.request, WorkOutcome::Back)
    }
}
