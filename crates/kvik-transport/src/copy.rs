//! Threads that copy into this process's memory.
//!
//! The owner of the destination copies, whoever began the transfer. A copy from another process counts only if the
//! source's fence had the agreed generation before it and still has it afterwards.
//!
//! They also sum what a NIC has moved, which no thread has seen pass. Where one of the two sides lies on a GPU, its
//! streams copy (`gpu`), from memory of this process or of another one.
//!
//! With checksums a part is copied piece by piece, and each piece is compared, or summed, while it is in the cache; checksums
//! of pages are made of mapped memory as it is copied, in one pass.

use crate::basics::{lock, stopped};
use crate::compared::windows;
use crate::devices::{Broken, DeviceCopier, HostPages, Readable, Stuck};
use crate::fenced::within_fence;
use crate::local::{Links, LocalLink, PeerRegion, link_broke};
use crate::services::finish;
use crate::sums::{Bytes, Checksummer, PIECE, mismatch, next_piece, sum_placed};
use crate::{Queue, RegionMemory, WorkSource, from_host};
use kvik_core::{Code, Error, Extents, PageSums, Result, View};
use kvik_host::device::DeviceMemory;
use kvik_host::thread::{ThreadOptions, spawn_named};
use kvik_host::{HostError, Memory, RunBuffer};
use kvik_proto::{Claim, CopyFrom, Op, Source, WorkKind, WorkOutcome, WorkRequest};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Who asks for memory here.
const COPIER: &str = "a copy within the host";

/// Runs of memory that one call to the kernel reads.
const RUNS: usize = 512;

/// How often a thread looks for the end of copies that a GPU does not come to.
const LOOK: Duration = Duration::from_millis(50);

/// Runs that were copied, and the time spent on checksums.
type Copied = (u64, Duration);

/// The copying threads of an engine.
pub(crate) struct CopyPool {
    waker: Arc<Waker>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Waker {
    state: Mutex<(u64, bool)>,
    woken: Condvar,
}

impl Drop for CopyPool {
    fn drop(&mut self) {
        self.stop();
    }
}

impl CopyPool {
    /// Starts `threads` threads.
    pub fn start(
        work: Arc<dyn WorkSource>,
        links: Arc<Links>,
        threads: usize,
        options: &ThreadOptions,
    ) -> Result<CopyPool> {
        let waker = Arc::new(Waker::default());
        let pool = CopyPool { waker: waker.clone(), threads: Mutex::default() };
        for number in 0..threads {
            let (work, links, waker) = (work.clone(), links.clone(), waker.clone());
            let thread =
                spawn_named(&format!("kvik-copy-{number}"), options, move || run(&*work, &links, &waker));
            lock(&pool.threads).push(thread.map_err(|error| from_host(Code::InvalidArgument, error))?);
        }
        Ok(pool)
    }

    /// There is something to copy.
    pub fn wake(&self) {
        lock(&self.waker.state).0 += 1;
        self.waker.woken.notify_all();
    }

    /// Ends the threads, after the part that each has in flight.
    pub fn stop(&self) {
        lock(&self.waker.state).1 = true;
        self.waker.woken.notify_all();
        for thread in lock(&self.threads).drain(..) {
            if thread.join().is_err() {
                log::error!("a copying thread panicked; its transfers end by their deadlines");
            }
        }
    }
}

fn run(work: &dyn WorkSource, links: &Links, waker: &Waker) {
    let mut copier = Copier::default();
    let mut stuck: Vec<(WorkRequest<RegionMemory>, Box<Stuck>)> = Vec::new();
    let mut heard = 0;
    loop {
        {
            let mut state = lock(&waker.state);
            while state.0 == heard && !state.1 && stuck.is_empty() {
                state = waker.woken.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if !stuck.is_empty() {
                let waited = waker.woken.wait_timeout(state, LOOK);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.1 && stuck.is_empty() {
                return;
            }
            heard = state.0;
        }
        // No waker tells when a GPU is through after all: it is looked for.
        while let Some(at) = stuck.iter_mut().position(|(_, stuck)| stuck.is_over()) {
            let (request, stuck) = stuck.swap_remove(at);
            let outcome = copier.go_on(&request, *stuck);
            finish(work, request, outcome);
        }
        while let Some(request) = work.claim(Queue::Copy, Claim::Next) {
            match copier.execute(links, &request) {
                Ok(outcome) => finish(work, request, outcome),
                Err(held) => {
                    if stopped(&request.stop) {
                        work.stuck(request.id, held.error());
                    }
                    stuck.push((request, held));
                }
            }
        }
    }
}

struct Copier {
    checksummer: Checksummer,
    gpus: DeviceCopier,
    local: RunBuffer,
    remote: RunBuffer,
}

impl Default for Copier {
    fn default() -> Self {
        let (local, remote) = (RunBuffer::new(RUNS), RunBuffer::new(RUNS));
        Copier { checksummer: Checksummer::default(), gpus: DeviceCopier::default(), local, remote }
    }
}

impl Copier {
    /// # Errors
    /// A GPU has something of the work request in flight that does not end.
    fn execute(
        &mut self,
        links: &Links,
        request: &WorkRequest<RegionMemory>,
    ) -> Result<WorkOutcome, Box<Stuck>> {
        if stopped(&request.stop) {
            return Ok(WorkOutcome::Void);
        }
        let result = match &request.kind {
            WorkKind::Copy(CopyFrom::Own(memory, view)) => match (memory, &request.region) {
                (RegionMemory::Host(from), RegionMemory::Host(_)) => self.copy_mapped(request, from, view),
                _ => return ended(self.copy_gpu(request, memory, view)),
            },
            WorkKind::Copy(CopyFrom::Peer(source)) => match links.get(request.id.session()) {
                Some(link) => return ended(self.copy_peer(request, source, &link)),
                // There was one when the transfer began.
                None => Err(link_broke()),
            },
            WorkKind::Stage(op, ring, place) => return ended(self.stage(request, *op, (ring, *place))),
            WorkKind::Sum => return ended(self.sum(request)),
            WorkKind::Send(_) | WorkKind::Place | WorkKind::Post(..) => Err(Error::new(
                Code::ProtocolError,
                "a work request for a channel was given to a copying thread",
            )),
        };
        Ok(match result {
            Ok((extents, verify)) => WorkOutcome::Done { extents, verify },
            Err(error) => WorkOutcome::Failed(error),
        })
    }

    fn copy_gpu(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        from: &RegionMemory,
        view: &View,
    ) -> Result<WorkOutcome, Broken> {
        let (extents, verify) = self.gpus.copy(&mut self.checksummer, request, from, view)?;
        Ok(WorkOutcome::Done { extents, verify })
    }

    /// Between the pages of a GPU and a ring, for a peer's NIC.
    fn stage(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        op: Op,
        (ring, place): (&RegionMemory, u64),
    ) -> Result<WorkOutcome, Broken> {
        self.gpus.stage(request, op, (ring.host(COPIER)?, place))?;
        Ok(done_staging(request))
    }

    /// What was put aside, and that the GPU is through with.
    fn go_on(&mut self, request: &WorkRequest<RegionMemory>, late: Stuck) -> WorkOutcome {
        let WorkKind::Stage(op, ring, place) = &request.kind else { return WorkOutcome::Void };
        if stopped(&request.stop) {
            return WorkOutcome::Void;
        }
        let ring = ring.host(COPIER);
        let staged = ring.and_then(|ring| self.gpus.stage_on(request, *op, (ring, *place), late));
        match staged {
            Ok(()) => done_staging(request),
            Err(error) => WorkOutcome::Failed(error),
        }
    }

    /// The checksum of each unit, of what a NIC has moved.
    fn sum(&mut self, request: &WorkRequest<RegionMemory>) -> Result<WorkOutcome, Broken> {
        let began = Instant::now();
        let sums = match &request.region {
            RegionMemory::Device(memory) => {
                // What a NIC has written is not seen by a GPU's copies before.
                memory.flush_writes()?;
                self.gpus.sums(&mut self.checksummer, request, memory)?
            }
            RegionMemory::Host(memory) => self.sum_host(request, memory)?,
        };
        Ok(WorkOutcome::Summed { sums, verify: began.elapsed() })
    }

    fn sum_host(&mut self, request: &WorkRequest<RegionMemory>, memory: &Memory) -> Result<Vec<u64>, Broken> {
        let (view, mut sums) = (&request.view, Vec::new());
        for unit in windows(&request.part, request.unit, request.unit) {
            if stopped(&request.stop) {
                return Err(Broken::Left);
            }
            let next = next_piece(view, unit.start);
            sums.push(self.checksummer.sum_of(memory, view, unit, next)?);
        }
        Ok(sums)
    }

    /// From memory that a processor reads, this process's own or a peer's that is mapped, to memory of the host.
    fn copy_mapped(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        from: &Memory,
        view: &View,
    ) -> Result<Copied> {
        let to = request.region.host(COPIER)?;
        self.copy_pieces(request, view, from, |_, extents| {
            extents.into_iter().try_for_each(|e| {
                Memory::copy_between(to, e.right as usize, from, e.left as usize, e.len as usize)
                    .map_err(|error| from_host(Code::PageOutOfRange, error))
            })
        })
    }

    /// Copies piece by piece, compares each with its source, whose bytes lie as `view` says, and sums it where its pages
    /// have a table for that.
    fn copy_pieces(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        view: &View,
        source: &impl Bytes,
        mut copy: impl FnMut(&mut Copier, Extents<'_>) -> Result<()>,
    ) -> Result<Copied> {
        let mut verify = Duration::ZERO;
        for piece in pieces(request) {
            match (request.view.sums(), source.mapped()) {
                (Some(sums), Some(from)) if sums.is_whole(&piece) => {
                    for number in sums.within(piece.clone()) {
                        if !Copier::copy_summed(request, (view, sums), from, number)? {
                            copy(self, Extents::new(view, &request.view, sums.covers(number)))?;
                        }
                    }
                }
                _ => copy(self, Extents::new(view, &request.view, piece.clone()))?,
            }
            verify += self.compare(request, piece.clone(), source, view)?;
            if request.view.sums().is_some() {
                let (began, own) = (Instant::now(), request.region.host(COPIER)?);
                sum_placed(&mut self.checksummer, (&**own, &request.view), piece)?;
                verify += began.elapsed();
            }
        }
        Ok((Extents::new(view, &request.view, request.part.clone()).count() as u64, verify))
    }

    /// Copies a part of the stream that one checksum of pages covers, and sums it in the same pass; false where that is to
    /// be done in two.
    fn copy_summed(
        request: &WorkRequest<RegionMemory>,
        (view, sums): (&View, &PageSums),
        from: &Memory,
        number: usize,
    ) -> Result<bool> {
        let extents = Extents::new(view, &request.view, sums.covers(number));
        let extents = extents.map(|e| (e.left as usize, e.right as usize, e.len as usize));
        let copied = request.region.host(COPIER)?.copy_summed(from, extents);
        let sum = copied.map_err(|error| from_host(Code::PageOutOfRange, error))?;
        sum.into_iter().for_each(|sum| sums.set(number, sum));
        Ok(sum.is_some())
    }

    fn copy_peer(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        source: &Source,
        link: &LocalLink,
    ) -> Result<WorkOutcome, Broken> {
        let fence = link.fence(&request.stop)?;
        let region = link.region(source.region, &request.stop)?;
        let copied = within_fence(&fence, (source, &region), || {
            let (extents, verify) = match (&*region, &request.region) {
                (PeerRegion::Device(memory), _) => {
                    return self.copy_gpu(
                        request,
                        &RegionMemory::Device(memory.open(link, &request.stop)?),
                        &source.view,
                    );
                }
                (PeerRegion::Mapped(memory, _), RegionMemory::Device(to)) => {
                    return self.copy_up(request, &source.view, (&mut &**memory, &**memory), to);
                }
                (PeerRegion::Mapped(memory, _), _) => self.copy_mapped(request, memory, &source.view)?,
                (PeerRegion::Process { process, addr, len }, to) => {
                    let there = Elsewhere { process, addr: *addr, len: *len };
                    if let RegionMemory::Device(to) = to {
                        let mut batched = Batched::of(&there);
                        return self.copy_up(request, &source.view, (&mut batched, &there), to);
                    }
                    self.copy_process(request, source, &there)?
                }
            };
            Ok(WorkOutcome::Done { extents, verify })
        });
        link.was_read(&region);
        copied
    }

    /// From memory of another process that a processor reads to a GPU of this one.
    fn copy_up(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        view: &View,
        (memory, bytes): (&mut dyn Readable, &impl Bytes),
        to: &Arc<dyn DeviceMemory>,
    ) -> Result<WorkOutcome, Broken> {
        let from = HostPages { memory, bytes, view };
        let (extents, verify) = self.gpus.up(&mut self.checksummer, request, from, to)?;
        Ok(WorkOutcome::Done { extents, verify })
    }

    /// Reads through the kernel, many extents a call. With checksums wanted the source is read twice, since what is
    /// compared must come from there.
    fn copy_process(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        source: &Source,
        there: &Elsewhere<'_>,
    ) -> Result<Copied> {
        let to = request.region.host(COPIER)?;
        self.copy_pieces(request, &source.view, there, |copier, extents| {
            let extents = extents.map(|e| (e.left, e.right as usize, e.len as usize));
            there.read(to, extents, &mut copier.local, &mut copier.remote)
        })
    }

    /// Compares checksums of source and destination, unit by unit, where they are wanted.
    fn compare(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        piece: Range<u64>,
        bytes: &impl Bytes,
        source: &View,
    ) -> Result<Duration> {
        if !request.sums {
            return Ok(Duration::ZERO);
        }
        let (began, own) = (Instant::now(), request.region.host(COPIER)?);
        let mut start = piece.start;
        while start < piece.end {
            let end = (start + request.unit).min(piece.end);
            let (from, to) = (next_piece(source, start), next_piece(&request.view, start));
            let there = self.checksummer.sum_of(bytes, source, start..end, from)?;
            let here = self.checksummer.sum_of(&**own, &request.view, start..end, to)?;
            if there != here {
                return Err(mismatch(&request.view, start));
            }
            start = end;
        }
        Ok(began.elapsed())
    }
}

fn done_staging(request: &WorkRequest<RegionMemory>) -> WorkOutcome {
    let extents = request.view.runs(request.part.clone()).count() as u64;
    WorkOutcome::Done { extents, verify: Duration::ZERO }
}

/// How a work request ended, unless a GPU has something of it in flight.
fn ended(result: Result<WorkOutcome, Broken>) -> Result<WorkOutcome, Box<Stuck>> {
    match result {
        Ok(outcome) => Ok(outcome),
        Err(Broken::Failed(error)) => Ok(WorkOutcome::Failed(error)),
        Err(Broken::Left) => Ok(WorkOutcome::Void),
        Err(Broken::Stuck(stuck)) => Err(stuck),
    }
}

/// A work request's part in pieces that are copied, compared and summed before the next ones: of whole units where they
/// are compared, of what checksums of pages cover where those are wanted, and all of it at once where nothing is.
fn pieces(request: &WorkRequest<RegionMemory>) -> impl Iterator<Item = Range<u64>> {
    let (part, unit, sums) = (request.part.clone(), request.unit.max(1), request.view.sums());
    let mut at = part.start;
    std::iter::from_fn(move || {
        let start = at;
        let whole = |sums: &PageSums| match sums.within(start..start + PIECE) {
            none if none.is_empty() => sums.within(0..start).end,
            several => several.end - 1,
        };
        at = match sums {
            Some(sums) => sums.covers(whole(sums)).end,
            None if request.sums => start + unit * (PIECE / unit).max(1),
            None => part.end,
        };
        at = at.min(part.end);
        (start < at).then_some(start..at)
    })
}

/// Memory of another process, which is read through the kernel.
struct Elsewhere<'a> {
    process: &'a kvik_host::ProcessMemory,
    addr: u64,
    len: u64,
}

impl Elsewhere<'_> {
    /// Copies extents (offset there, offset here, and bytes), many a call.
    fn read(
        &self,
        into: &Memory,
        extents: impl Iterator<Item = (u64, usize, usize)>,
        local: &mut RunBuffer,
        remote: &mut RunBuffer,
    ) -> Result<()> {
        let broken = |error| from_host(Code::PeerLost, error);
        let mut extents = extents.peekable();
        while extents.peek().is_some() {
            let (mut to_all, mut from_all) = (local.begin_recv(), remote.begin_remote());
            while let Some((offset, place, len)) = extents.peek().copied() {
                let inside = offset.checked_add(len as u64).is_some_and(|end| end <= self.len);
                let from = self.addr.checked_add(offset).filter(|_| inside);
                let from = from
                    .ok_or_else(|| Error::new(Code::PageOutOfRange, "the peer's layout leaves its region"))?;
                let to = into.recv_run(place, len).map_err(broken)?;
                if !to_all.push(to) {
                    break;
                }
                // Both buffers have the same room, and neighbours are merged before they come here.
                if !from_all.push(from, len) {
                    return Err(Error::new(
                        Code::PageOutOfRange,
                        "the peer's region has an address that cannot be",
                    ));
                }
                extents.next();
            }
            self.process.read(&mut from_all, &mut to_all).map_err(broken)?;
        }
        Ok(())
    }
}

/// The same, with what it takes to read many runs a call.
struct Batched<'a, 'p> {
    there: &'a Elsewhere<'p>,
    local: RunBuffer,
    remote: RunBuffer,
}

impl<'a, 'p> Batched<'a, 'p> {
    fn of(there: &'a Elsewhere<'p>) -> Batched<'a, 'p> {
        Batched { there, local: RunBuffer::new(RUNS), remote: RunBuffer::new(RUNS) }
    }
}

impl Readable for Batched<'_, '_> {
    fn take(&mut self, runs: &[(usize, usize)], into: &Memory) -> Result<()> {
        let mut place = 0;
        let extents = runs.iter().map(|(offset, len)| {
            let at = place;
            place += len;
            (*offset as u64, at, *len)
        });
        self.there.read(into, extents, &mut self.local, &mut self.remote)
    }
}

impl Bytes for Elsewhere<'_> {
    fn sum(
        &self,
        _: impl Iterator<Item = (usize, usize)>,
        _: Option<usize>,
    ) -> Result<Option<u64>, HostError> {
        Ok(None)
    }

    fn each(
        &self,
        offset: usize,
        len: usize,
        scratch: &mut [u8],
        f: &mut dyn FnMut(&[u8]),
    ) -> Result<(), HostError> {
        let (mut local, mut remote) = (RunBuffer::new(1), RunBuffer::new(1));
        let (start, mut at) = (self.addr + offset as u64, 0);
        while at < len {
            let step = (len - at).min(scratch.len());
            let (mut to, mut from) = (local.begin_recv(), remote.begin_remote());
            if !to.push((&mut scratch[..step]).into()) || !from.push(start + at as u64, step) {
                return Err(HostError::InvalidArgument("an address that cannot be".into()));
            }
            self.process.read(&mut from, &mut to)?;
            f(&scratch[..step]);
            at += step;
        }
        Ok(())
    }
}
