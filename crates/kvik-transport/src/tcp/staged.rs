//! Pages of a device on their way to and from a socket, by way of a buffer of the host.
//!
//! Each direction of a channel has a stream of the device's with a buffer of two halves, made when the first page of that
//! device passes. While the stream fills one half, or empties it, the other is summed and sent, or received and summed. Nobody
//! waits: a mark behind each piece says whether the device is through with its half, and the stream wakes the thread
//! when it gets there.
//!
//! A work request that has ended here still has pieces in flight on the device. It is reported only when the last of them
//! is done: then its bytes are where they belong (success), or the device touches its memory no more (stop). A stream
//! cannot be stopped: where it does not get there, whoever waits for the transfer is told so by name, and the memory
//! stays held until it does.

use crate::basics::stopped;
use crate::devices::{PATIENCE, blind, failed, stuck, take_runs};
use crate::services::finish;
use crate::{RegionMemory, WorkSource, from_host};
use kvik_core::{Code, Error, Result, View};
use kvik_host::Memory;
use kvik_host::device::{Device, DeviceMemory, DeviceStream};
use kvik_host::event::EventFd;
use kvik_proto::{WorkOutcome, WorkRequest};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a half: a device's engine is busy with them for long beside what a copy takes to begin, and with as many
/// that are sent they fit a core's cache.
pub(crate) const HALF: u64 = 256 << 10;

/// What copies between a device and a channel's buffers need of the thread.
pub(crate) struct Copies {
    /// A stream that has got somewhere raises it.
    pub flag: Arc<EventFd>,
    /// The runs of a piece, kept for their room.
    runs: Vec<(usize, usize)>,
}

/// The buffer of one direction of a channel, for one device.
pub(crate) struct Staging {
    stream: Box<dyn DeviceStream>,
    halves: [Half; 2],
    /// Which half the next piece takes: of the two, the one that was given to the device first.
    next: usize,
    /// A copy of the chunk in flight failed.
    error: Option<Error>,
}

#[derive(Default)]
struct Half {
    /// Until it is reached the device has the half.
    mark: Option<u64>,
    /// There is no telling when the device is through with it.
    blind: bool,
    /// The work request that ends with it.
    ending: Option<Ending>,
}

struct Ending {
    request: WorkRequest<RegionMemory>,
    outcome: WorkOutcome,
    /// An earlier copy of it failed.
    failed: Option<Error>,
    /// When it was seen to have to stop.
    since: Option<Instant>,
    told: bool,
}

impl Copies {
    pub fn new() -> Result<Copies> {
        let flag = EventFd::new().map_err(|error| from_host(Code::InvalidArgument, error))?;
        Ok(Copies { flag: Arc::new(flag), runs: Vec::new() })
    }
}

/// The half that a position of a payload is in, whose first piece is in the half `first`.
pub(crate) fn half_of(first: usize, at: u64) -> usize {
    (first + (at / HALF) as usize) % 2
}

/// The end of the piece that it is in.
pub(crate) fn piece_end(at: u64) -> u64 {
    (at / HALF + 1) * HALF
}

/// Where in the buffers it is.
pub(crate) fn place(first: usize, at: u64) -> usize {
    half_of(first, at) * HALF as usize + (at % HALF) as usize
}

impl Staging {
    pub fn new(memory: &dyn DeviceMemory) -> Result<Staging> {
        let stream = memory.device().stream(2 * HALF as usize).map_err(failed)?;
        Ok(Staging { stream, halves: Default::default(), next: 0, error: None })
    }

    /// Whether it is for the device of this memory.
    fn serves(&self, memory: &dyn DeviceMemory) -> bool {
        self.stream.device().id() == memory.device().id()
    }

    pub fn buffer(&self) -> &Memory {
        self.stream.buffer()
    }

    /// The half that the next piece takes, if the device is through with it.
    pub fn free_half(&self) -> Option<usize> {
        self.is_through(self.next).then_some(self.next)
    }

    /// Whether the device is through with a half.
    pub fn is_through(&self, half: usize) -> bool {
        !self.halves[half].is_taken()
    }

    /// Why a copy of the chunk in flight failed, once.
    pub fn take_error(&mut self) -> Option<Error> {
        self.error.take()
    }

    /// Whether the device has nothing of it in flight.
    pub fn is_idle(&self) -> bool {
        !self.halves.iter().any(Half::is_taken)
    }

    /// Begins to fetch a part of a work request's stream into the next half: how many runs it takes.
    pub fn gather(
        &mut self,
        memory: &Arc<dyn DeviceMemory>,
        view: &View,
        part: Range<u64>,
        copies: &mut Copies,
    ) -> Result<u64> {
        take_runs(&mut copies.runs, view, part);
        let begun = self.stream.gather(place(self.next, 0), memory, &copies.runs);
        self.mark(begun.map_err(failed), copies)
    }

    /// Begins to bring the next half's bytes to a part of a work request's stream: how many runs it takes.
    pub fn scatter(
        &mut self,
        memory: &Arc<dyn DeviceMemory>,
        view: &View,
        part: Range<u64>,
        copies: &mut Copies,
    ) -> Result<u64> {
        take_runs(&mut copies.runs, view, part);
        let begun = self.stream.scatter(memory, &copies.runs, place(self.next, 0));
        self.mark(begun.map_err(failed), copies)
    }

    /// Marks the place behind a piece, also behind one of which only a part could be begun: how many runs it takes.
    fn mark(&mut self, begun: Result<()>, copies: &Copies) -> Result<u64> {
        let half = &mut self.halves[self.next];
        half.mark = match self.stream.mark() {
            Ok(mark) => Some(mark),
            // Nothing is in flight where all is lost.
            Err(error) => blind(error)?,
        };
        half.blind = half.mark.is_none();
        let told = self.stream.tell(&copies.flag).map_err(failed);
        self.next = 1 - self.next;
        begun.and(told).map(|()| copies.runs.len() as u64)
    }

    /// A work request has ended. If pieces of it were begun, it is reported when the device is through with the last one.
    pub fn leave(
        &mut self,
        work: &dyn WorkSource,
        request: WorkRequest<RegionMemory>,
        outcome: WorkOutcome,
        begun: bool,
    ) {
        let last = &mut self.halves[1 - self.next];
        // Where another one ends with it, the device has taken no piece of this one.
        match begun && last.is_taken() && last.ending.is_none() {
            true => {
                let ending = Ending { request, outcome, failed: None, since: None, told: false };
                last.ending = Some(ending);
            }
            false => finish(work, request, outcome),
        }
    }

    /// Takes note of what the device is through with, and reports the work requests that ended with it.
    pub fn settle(&mut self, work: &dyn WorkSource) {
        for at in [self.next, 1 - self.next] {
            let half = &mut self.halves[at];
            let Some(mark) = half.mark else { continue };
            let error = match self.stream.reached() {
                Ok(reached) if reached < mark => continue,
                Ok(_) => None,
                Err(error) => match blind(error) {
                    Err(lost) => Some(lost),
                    Ok(_) => {
                        (half.mark, half.blind) = (None, true);
                        continue;
                    }
                },
            };
            half.mark = None;
            let ending = half.ending.take();
            match (error, ending) {
                (None, None) => {}
                (error, Some(ending)) => ending.finish(work, error),
                // It is of the work request that ends with the later half, or of the chunk in flight.
                (Some(error), None) => match &mut self.halves[1 - at].ending {
                    Some(later) => later.failed = Some(error),
                    None => self.error = Some(error),
                },
            }
        }
    }

    /// Looks after work requests that must stop and have pieces in flight: when to look again.
    fn watch(&mut self, work: &dyn WorkSource) -> Option<Instant> {
        let device = self.stream.device();
        let endings = self.halves.iter_mut().filter_map(|half| half.ending.as_mut());
        endings.filter_map(|ending| ending.watch(work, device)).min()
    }

    /// Whether a work request waits for the device.
    fn holds_work(&self) -> bool {
        self.halves.iter().any(|half| half.ending.is_some())
    }
}

impl Half {
    fn is_taken(&self) -> bool {
        self.mark.is_some() || self.blind
    }
}

impl Ending {
    /// The device is through with it: well, or with an error.
    fn finish(self, work: &dyn WorkSource, error: Option<Error>) {
        let outcome = match (self.failed.or(error), self.outcome) {
            (Some(error), WorkOutcome::Done { .. }) => WorkOutcome::Failed(error),
            (_, outcome) => outcome,
        };
        finish(work, self.request, outcome);
    }

    fn watch(&mut self, work: &dyn WorkSource, device: &dyn Device) -> Option<Instant> {
        if self.told || !stopped(&self.request.stop) {
            return None;
        }
        let until = *self.since.get_or_insert_with(Instant::now) + PATIENCE;
        if Instant::now() < until {
            return Some(until);
        }
        self.told = true;
        work.stuck(self.request.id, stuck(device));
        None
    }
}

/// The buffers of one direction of a channel: one of each device whose pages have passed.
#[derive(Default)]
pub(crate) struct Stagings(Vec<Staging>);

impl Stagings {
    /// The buffer for this memory's device, made at the first use.
    pub fn of(&mut self, memory: &dyn DeviceMemory) -> Result<&mut Staging> {
        let at = match self.0.iter().position(|staging| staging.serves(memory)) {
            Some(at) => at,
            None => {
                self.0.push(Staging::new(memory)?);
                self.0.len() - 1
            }
        };
        // It is there: found, or pushed just now.
        self.0
            .get_mut(at)
            .ok_or_else(|| Error::new(Code::DeviceFailed, "a channel has no buffer for a device"))
    }

    /// The same, if there is one.
    fn find(&mut self, region: &RegionMemory) -> Option<&mut Staging> {
        let RegionMemory::Device(memory) = region else { return None };
        self.0.iter_mut().find(|staging| staging.serves(&**memory))
    }

    /// Why a copy of the chunk in flight to this memory failed, once.
    pub fn take_error(&mut self, region: &RegionMemory) -> Option<Error> {
        self.find(region)?.take_error()
    }

    /// A work request has ended, as for [`Staging::leave`].
    pub fn leave(
        &mut self,
        work: &dyn WorkSource,
        request: WorkRequest<RegionMemory>,
        outcome: WorkOutcome,
        begun: bool,
    ) {
        match self.find(&request.region) {
            Some(staging) => staging.leave(work, request, outcome, begun),
            None => finish(work, request, outcome),
        }
    }

    pub fn settle(&mut self, work: &dyn WorkSource) {
        self.0.iter_mut().for_each(|staging| staging.settle(work));
    }

    pub fn watch(&mut self, work: &dyn WorkSource) -> Option<Instant> {
        self.0.iter_mut().filter_map(|staging| staging.watch(work)).min()
    }

    /// Whether a device has something of the channel in flight.
    pub fn is_busy(&self) -> bool {
        !self.0.iter().all(Staging::is_idle)
    }

    /// Whether a device has a work request in flight.
    pub fn holds_work(&self) -> bool {
        self.0.iter().any(Staging::holds_work)
    }
}
