//! Copies between devices and the memory of this process, for threads that copy.
//!
//! Such a thread waits for the copies that it has begun: it has nothing else to do meanwhile. Between a device and the
//! host the bytes pass through a buffer of the stream; between two places of devices they go straight. What is copied
//! from may be another process's, on a device or on the host: it is read, and never written. Where the two sides are to be
//! compared, what lies on a device is fetched for that behind the copy, a window at a time, so that a part is waited for once
//! however many units it has.
//!
//! A copy that was begun cannot be stopped. Where its stream does not get to it although its transfer has ended, the
//! thread puts it aside ([`Stuck`]) and goes on with others; the work request is held until the device is through with it. One to or
//! from a ring it puts aside as soon as it takes long, and takes up again: a device that stands still holds up no thread that
//! other transfers need.

use crate::basics::stopped;
use crate::compared::{Comparison, UnitSums, windows};
use crate::sums::{Bytes, Checksummer};
use crate::{RegionMemory, from_host};
use kvik_core::{Code, Error, Extents, View};
use kvik_host::device::{Device, DeviceMemory, DeviceStream};
use kvik_host::{HostError, Memory};
use kvik_proto::{Op, WorkRequest};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the buffer.
const ROOM: u64 = 1 << 20;
/// Bytes of a half of it: what is copied is in one, and what is compared with it in the other.
const HALF: u64 = ROOM / 2;
/// How often a thread that waits for a device looks whether its order must stop.
const LOOK: Duration = Duration::from_millis(50);
/// How long a copy to or from a ring is waited for before the thread goes on with others.
const SOON: Duration = Duration::from_millis(20);
/// How long a work request that must stop is waited for in silence.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// What whoever waits for a transfer is told when a device does not come to the end of its copies.
pub(crate) fn stuck(device: &dyn Device) -> Error {
    Error::new(
        Code::PagesQuarantined,
        format!(
            "{device} still has a copy of its pages in flight, which nobody can stop: do not use or free them until \
             the region is closed; a kernel that does not end, or a device that hangs, is what keeps it (nvidia-smi)"
        ),
    )
}

pub(crate) fn failed(error: HostError) -> Error {
    from_host(Code::DeviceFailed, error)
}

/// Copies that a device has in flight for a work request that has ended, or that takes long.
pub(crate) struct Stuck {
    stream: Box<dyn DeviceStream>,
    /// None: there is no telling when they end.
    mark: Option<u64>,
}

impl Stuck {
    /// Whether the device is through with them.
    pub fn is_over(&mut self) -> bool {
        let Some(mark) = self.mark else { return false };
        match self.stream.reached() {
            Ok(reached) => reached >= mark,
            // A device that is lost has nothing in flight.
            Err(error) => error.is_device_lost(),
        }
    }

    /// Whether it came to its end well.
    fn check(&mut self) -> Result<(), Error> {
        self.stream.reached().map(drop).map_err(failed)
    }

    /// Why their pages are not free.
    pub fn error(&self) -> Error {
        stuck(self.stream.device())
    }
}

/// Why a copy did not come to a good end.
pub(crate) enum Broken {
    /// It failed, or was left; nothing of it is in flight.
    Failed(Error),
    /// Its work request must stop.
    Left,
    /// Its work request must stop, or takes long, and something of it is in flight.
    Stuck(Box<Stuck>),
}

impl From<Error> for Broken {
    fn from(error: Error) -> Broken {
        Broken::Failed(error)
    }
}

impl From<HostError> for Broken {
    fn from(error: HostError) -> Broken {
        Broken::Failed(failed(error))
    }
}

/// Memory that a processor reads, of this process or of another one.
pub(crate) trait Readable: Bytes {
    /// Copies extents: offset here, offset in `into`, and bytes.
    fn copy(&self, into: &Memory, extents: impl Iterator<Item = (usize, usize, usize)>) -> Result<(), Error>;
}

impl Readable for Memory {
    fn copy(
        &self,
        into: &Memory,
        mut extents: impl Iterator<Item = (usize, usize, usize)>,
    ) -> Result<(), Error> {
        extents
            .try_for_each(|(offset, place, len)| Memory::copy_between(into, place, self, offset, len))
            .map_err(|error| from_host(Code::PageOutOfRange, error))
    }
}

/// What a thread copies with: a stream on each device that it has met.
#[derive(Default)]
pub(crate) struct DeviceCopier {
    streams: Vec<Box<dyn DeviceStream>>,
    runs: Vec<(usize, usize)>,
    /// Where to, where from, and bytes.
    pieces: Vec<(usize, usize, usize)>,
}

impl DeviceCopier {
    /// Copies a work request's part from memory of a device that this process has open, and compares the two where that is
    /// asked for: how long that took.
    pub fn copy(
        &mut self,
        checksummer: &mut Checksummer,
        request: &WorkRequest<RegionMemory>,
        from: (&Arc<dyn DeviceMemory>, &View),
    ) -> Result<Duration, Broken> {
        match &request.region {
            RegionMemory::Device(to) => self.across(checksummer, request, from, to),
            RegionMemory::Host(to) => self.down(checksummer, request, from, to),
        }
    }

    fn across(
        &mut self,
        checksummer: &mut Checksummer,
        request: &WorkRequest<RegionMemory>,
        (from, view): (&Arc<dyn DeviceMemory>, &View),
        to: &Arc<dyn DeviceMemory>,
    ) -> Result<Duration, Broken> {
        let (at, source) = (self.stream_of(to.device())?, self.stream_of(from.device())?);
        self.pieces.clear();
        let extents = Extents::new(view, &request.view, request.part.clone());
        self.pieces.extend(extents.map(|e| (e.right as usize, e.left as usize, e.len as usize)));
        let mut begun = self.streams[at].between(to, from, &self.pieces);
        if !request.sums {
            self.wait(at, request, None)?;
            begun?;
            return Ok(Duration::ZERO);
        }
        let mut check = Comparison::of(request);
        for window in windows(&request.part, request.unit, HALF) {
            // Both sides come down behind the copy, and are waited for together where one stream brings them.
            if begun.is_ok() {
                begun = self.bring(at, HALF, (to, &request.view), window.clone());
            }
            if begun.is_ok() && source == at {
                begun = self.bring(at, 0, (from, view), window.clone());
            }
            self.wait(at, request, None)?;
            std::mem::replace(&mut begun, Ok(()))?;
            if source != at {
                let begun = self.bring(source, 0, (from, view), window.clone());
                self.wait(source, request, None)?;
                begun?;
            }
            check.there.take(checksummer, self.streams[source].buffer(), 0, &window)?;
            check.here.take(checksummer, self.streams[at].buffer(), HALF, &window)?;
        }
        Ok(check.end(&request.view)?)
    }

    /// With checksums wanted the source is read twice: what is compared must come from there.
    fn down(
        &mut self,
        checksummer: &mut Checksummer,
        request: &WorkRequest<RegionMemory>,
        (from, view): (&Arc<dyn DeviceMemory>, &View),
        to: &Memory,
    ) -> Result<Duration, Broken> {
        let at = self.stream_of(from.device())?;
        let mut check = Comparison::of(request);
        for window in windows(&request.part, request.unit, HALF) {
            let mut begun = self.bring(at, 0, (from, view), window.clone());
            if begun.is_ok() && request.sums {
                begun = self.bring(at, HALF, (from, view), window.clone());
            }
            self.wait(at, request, None)?;
            begun?;
            let buffer = self.streams[at].buffer();
            buffer
                .copy(to, packed(&request.view, window.clone()).map(|(at, place, len)| (place, at, len)))?;
            if request.sums {
                check.there.take(checksummer, buffer, HALF, &window)?;
                check.here.follow(checksummer, &check.there, (to, &request.view))?;
            }
        }
        Ok(check.end(&request.view)?)
    }

    /// Copies a work request's part from memory that a processor reads to a device of this process, and compares the two
    /// where that is asked for.
    pub fn up(
        &mut self,
        checksummer: &mut Checksummer,
        request: &WorkRequest<RegionMemory>,
        (from, view): (&impl Readable, &View),
        to: &Arc<dyn DeviceMemory>,
    ) -> Result<Duration, Broken> {
        let at = self.stream_of(to.device())?;
        let mut check = Comparison::of(request);
        for window in windows(&request.part, request.unit, HALF) {
            let stream = &mut self.streams[at];
            from.copy(stream.buffer(), packed(view, window.clone()))?;
            take_runs(&mut self.runs, &request.view, window.clone());
            let mut begun = stream.scatter(to, &self.runs, 0);
            if begun.is_ok() && request.sums {
                begun = stream.gather(HALF as usize, to, &self.runs);
            }
            self.wait(at, request, None)?;
            begun?;
            if request.sums {
                check.here.take(checksummer, self.streams[at].buffer(), HALF, &window)?;
                check.there.follow(checksummer, &check.here, (from, view))?;
            }
        }
        Ok(check.end(&request.view)?)
    }

    /// Copies a work request's part from its pages on a device to a ring of the host, from `place` on, or to the pages (a
    /// write) from there.
    pub fn stage(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        op: Op,
        (ring, place): (&Memory, u64),
    ) -> Result<(), Broken> {
        let RegionMemory::Device(pages) = &request.region else {
            return Err(Error::new(Code::InvalidArgument, "pages of the host go through no ring").into());
        };
        let len = (request.part.end - request.part.start) as usize;
        let at = self.stream_of(pages.device())?;
        take_runs(&mut self.runs, &request.view, request.part.clone());
        let stream = &mut self.streams[at];
        // A stream's buffer has room for more than a slot: who gives longer parts has it refused here.
        let begun = match op {
            Op::Write => {
                Memory::copy_between(stream.buffer(), 0, ring, place as usize, len)?;
                stream.scatter(pages, &self.runs, 0)
            }
            _ => stream.gather(0, pages, &self.runs),
        };
        self.wait(at, request, begun.is_ok().then_some(SOON))?;
        begun?;
        match op {
            Op::Write => Ok(()),
            _ => Ok(Memory::copy_between(ring, place as usize, self.streams[at].buffer(), 0, len)?),
        }
    }

    /// Takes up [`DeviceCopier::stage`] again, whose copy took long and is over.
    pub fn stage_on(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        op: Op,
        (ring, place): (&Memory, u64),
        mut late: Stuck,
    ) -> Result<(), Error> {
        late.check()?;
        let len = (request.part.end - request.part.start) as usize;
        if op == Op::Read {
            let copied = Memory::copy_between(ring, place as usize, late.stream.buffer(), 0, len);
            copied.map_err(failed)?;
        }
        let id = late.stream.device().id();
        if self.streams.iter().all(|stream| stream.device().id() != id) {
            self.streams.push(late.stream);
        }
        Ok(())
    }

    /// Begins to fetch a part of pages into a stream's buffer, from `place` on.
    fn bring(
        &mut self,
        at: usize,
        place: u64,
        (from, view): (&Arc<dyn DeviceMemory>, &View),
        part: Range<u64>,
    ) -> Result<(), HostError> {
        take_runs(&mut self.runs, view, part);
        self.streams[at].gather(place as usize, from, &self.runs)
    }

    /// The checksum of each unit of a work request's own pages, which lie on a device.
    pub fn sums(
        &mut self,
        checksummer: &mut Checksummer,
        request: &WorkRequest<RegionMemory>,
        memory: &Arc<dyn DeviceMemory>,
    ) -> Result<Vec<u64>, Broken> {
        let at = self.stream_of(memory.device())?;
        let mut units = UnitSums::of(request);
        for window in windows(&request.part, request.unit, ROOM) {
            let begun = self.bring(at, 0, (memory, &request.view), window.clone());
            self.wait(at, request, None)?;
            begun?;
            units.take(checksummer, self.streams[at].buffer(), 0, &window)?;
        }
        Ok(units.into_sums())
    }

    /// Waits until no stream has anything of a work request in flight.
    ///
    /// # Errors
    /// The work request must stop, and one has.
    pub fn settle(&mut self, request: &WorkRequest<RegionMemory>) -> Result<(), Box<Stuck>> {
        for at in (0..self.streams.len()).rev() {
            if let Err(Broken::Stuck(stuck)) = self.wait(at, request, None) {
                return Err(stuck);
            }
        }
        Ok(())
    }

    /// Waits until a stream is through with all that it was given; no longer than `soon`, where that is given.
    fn wait(
        &mut self,
        at: usize,
        request: &WorkRequest<RegionMemory>,
        soon: Option<Duration>,
    ) -> Result<(), Broken> {
        let (stream, began) = (&mut self.streams[at], Instant::now());
        let mut mark = match stream.mark() {
            Ok(mark) => Some(mark),
            Err(error) => blind(error)?,
        };
        let mut since: Option<Instant> = None;
        loop {
            match mark.map(|mark| stream.wait(mark, soon.unwrap_or(LOOK))) {
                Some(Ok(())) => break,
                Some(Err(HostError::TimedOut { .. })) => {}
                Some(Err(error)) => mark = blind(error)?,
                None => std::thread::sleep(LOOK),
            }
            let must = stopped(&request.stop) && since.get_or_insert_with(Instant::now).elapsed() >= PATIENCE;
            if must || soon.is_some_and(|soon| began.elapsed() >= soon) {
                let stream = self.streams.swap_remove(at);
                return Err(Broken::Stuck(Box::new(Stuck { stream, mark })));
            }
        }
        if stopped(&request.stop) { Err(Broken::Left) } else { Ok(()) }
    }

    /// The stream on a device, made at the first use.
    fn stream_of(&mut self, device: &dyn Device) -> Result<usize, Broken> {
        if let Some(at) = self.streams.iter().position(|stream| stream.device().id() == device.id()) {
            return Ok(at);
        }
        self.streams.push(device.stream(ROOM as usize)?);
        Ok(self.streams.len() - 1)
    }
}

/// Where there is no telling any more how far a stream is: its copies are held for ever, but for those of a device that
/// is lost, which has nothing in flight.
///
/// # Errors
/// `DeviceFailed`: the device is lost.
pub(crate) fn blind(error: HostError) -> Result<Option<u64>, Error> {
    if error.is_device_lost() {
        return Err(failed(error));
    }
    log::error!("the end of a device's copies cannot be known, so their pages stay held: {error}");
    Ok(None)
}

/// The runs of a part, and where each lies in a buffer that has them one behind the other: offset, place, and bytes.
fn packed(view: &View, part: Range<u64>) -> impl Iterator<Item = (usize, usize, usize)> {
    let mut place = 0;
    view.runs(part).map(move |run| {
        let at = place;
        place += run.len as usize;
        (run.offset as usize, at, run.len as usize)
    })
}

/// Takes the runs of a part of a stream.
pub(crate) fn take_runs(runs: &mut Vec<(usize, usize)>, view: &View, part: Range<u64>) {
    runs.clear();
    runs.extend(view.runs(part).map(|run| (run.offset as usize, run.len as usize)));
}
