//! Threads that copy into this process's memory.
//!
//! The owner of the destination copies, whoever began the transfer. A copy from another process counts only if the
//! source's fence had the agreed generation before it and still has it afterwards.
//!
//! They also sum what a NIC has moved, which no thread has seen pass. Where one of the two sides lies on a GPU, its
//! streams copy (`devices`), from memory of this process or of another one.
//!
//! With checksums a part is copied piece by piece, and each piece is compared, or summed, while it is in the cache; checksums
//! of pages are made of mapped memory as it is copied, in one pass.

use crate::basics::{lock, stopped};
use crate::compared::windows;
use crate::devices::{Broken, DeviceCopier, Readable, Stuck};
use crate::fenced::within_fence;
use crate::local::{Links, PeerRegion, link_broke};
use crate::services::finish;
use crate::sums::{Bytes, Checksummer, PIECE, mismatch, next_piece, sum_placed};
use crate::{Queue, RegionMemory, WorkSource, from_host};
use kvik_core::{Code, Error, Extents, PageSums, Result, View};
use kvik_host::thread::{ThreadOptions, spawn_named};
use kvik_host::{HostError, Memory, RunBuffer};
use kvik_proto::{Claim, CopyFrom, Op, Source, WorkKind, WorkOutcome, WorkRequest};
use std::cell::RefCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Who asks for memory here.
const COPIER: &str = "a copy within the host";

/// Runs of memory that one call to the kernel reads.
const RUNS: usize = 512;

/// How often a thread looks for the end of copies that a GPU does not come to.
const LOOK: Duration = Duration::from_millis(50);

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
                log::error!("a copying thread panicked, and what it had in flight stays held");
            }
        }
    }
}

/// A thread: what it copies with, and what it has put aside for a GPU that does not come to it.
#[derive(Default)]
struct CopyThread {
    copier: Copier,
    stuck: Vec<(WorkRequest<RegionMemory>, Box<Stuck>)>,
    heard: u64,
}

fn run(work: &dyn WorkSource, links: &Links, waker: &Waker) {
    let mut thread = CopyThread::default();
    while catch_unwind(AssertUnwindSafe(|| thread.run(work, links, waker))).is_err() {
        // There may be more to do than it has heard of; what panics again and again has no CPU to itself.
        thread.heard = lock(&waker.state).0.wrapping_sub(1);
        std::thread::sleep(LOOK);
    }
}

impl CopyThread {
    /// Copies what there is to copy, until the pool ends.
    fn run(&mut self, work: &dyn WorkSource, links: &Links, waker: &Waker) {
        while self.wait(waker) {
            loop {
                // No waker tells when a GPU is through after all: it is looked for, however much there is to do.
                while let Some(at) = self.stuck.iter_mut().position(|(_, stuck)| stuck.is_over()) {
                    let (request, stuck) = self.stuck.swap_remove(at);
                    let outcome = self.copier.go_on(&request, *stuck);
                    finish(work, request, outcome);
                }
                let Some(request) = work.claim(Queue::Copy, Claim::Next) else { break };
                let ended = catch_unwind(AssertUnwindSafe(|| self.copier.execute(links, &request)));
                match ended.unwrap_or_else(|_| self.copier.give_up(&request)) {
                    Ok(outcome) => finish(work, request, outcome),
                    Err(held) => {
                        if stopped(&request.stop) {
                            work.stuck(request.id, held.error());
                        }
                        self.stuck.push((request, held));
                    }
                }
            }
        }
    }

    /// Waits until there may be something to do. False: the pool ends, and nothing is left.
    fn wait(&mut self, waker: &Waker) -> bool {
        let mut state = lock(&waker.state);
        while state.0 == self.heard && !state.1 && self.stuck.is_empty() {
            state = waker.woken.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if !self.stuck.is_empty() && state.0 == self.heard {
            let waited = waker.woken.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        self.heard = state.0;
        !(state.1 && self.stuck.is_empty())
    }
}

#[derive(Default)]
struct Copier {
    checksummer: Checksummer,
    gpus: DeviceCopier,
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
        let outcome = match &request.kind {
            WorkKind::Copy(CopyFrom::Own(memory, view)) => {
                self.copy(request, memory, view).map(|verify| copied(request, view, verify))
            }
            WorkKind::Copy(CopyFrom::Peer(source)) => {
                self.copy_peer(links, request, source).map(|verify| copied(request, &source.view, verify))
            }
            WorkKind::Stage(op, ring, place) => self.stage(request, *op, (ring, *place)),
            WorkKind::Sum => self.sum(request),
            WorkKind::Send(_) | WorkKind::Place | WorkKind::Post(..) => {
                let text = "a work request for a channel was given to a copying thread";
                Err(Error::new(Code::ProtocolError, text).into())
            }
        };
        match outcome {
            Ok(outcome) => Ok(outcome),
            Err(Broken::Failed(error)) => Ok(WorkOutcome::Failed(error)),
            Err(Broken::Left) => Ok(WorkOutcome::Void),
            Err(Broken::Stuck(stuck)) => Err(stuck),
        }
    }

    /// It panicked over the work request, which fails as soon as no GPU has anything of it.
    ///
    /// # Errors
    /// As for [`Copier::execute`].
    fn give_up(&mut self, request: &WorkRequest<RegionMemory>) -> Result<WorkOutcome, Box<Stuck>> {
        self.gpus.settle(request)?;
        let text = "a copying thread of this engine panicked, which is a fault of kvik; the transfer can be tried again";
        Ok(WorkOutcome::Failed(Error::new(Code::TransportUnavailable, text)))
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

    /// From memory that this process has open: how long checksums took, as of each copy.
    fn copy(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        from: &RegionMemory,
        view: &View,
    ) -> Result<Duration, Broken> {
        match from {
            RegionMemory::Host(from) => self.copy_readable(request, &**from, view),
            RegionMemory::Device(from) => self.gpus.copy(&mut self.checksummer, request, (from, view)),
        }
    }

    fn copy_readable(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        from: &impl Readable,
        view: &View,
    ) -> Result<Duration, Broken> {
        match &request.region {
            RegionMemory::Host(to) => Ok(self.copy_pieces(request, (from, view), to)?),
            RegionMemory::Device(to) => self.gpus.up(&mut self.checksummer, request, (from, view), to),
        }
    }

    fn copy_peer(
        &mut self,
        links: &Links,
        request: &WorkRequest<RegionMemory>,
        source: &Source,
    ) -> Result<Duration, Broken> {
        // There was one when the transfer began.
        let link = links.get(request.id.session()).ok_or_else(link_broke)?;
        let fence = link.fence(&request.stop)?;
        let region = link.region(source.region, &request.stop)?;
        let copied = within_fence(&fence, (source, &region), || match &*region {
            PeerRegion::Device(memory) => {
                let from = memory.open(&link, &request.stop)?;
                self.gpus.copy(&mut self.checksummer, request, (&from, &source.view))
            }
            PeerRegion::Mapped(memory, _) => self.copy_readable(request, &**memory, &source.view),
            PeerRegion::Process { process, addr, len } => {
                let runs = RefCell::new((RunBuffer::new(RUNS), RunBuffer::new(RUNS)));
                let there = Elsewhere { process, addr: *addr, len: *len, runs };
                self.copy_readable(request, &there, &source.view)
            }
        });
        link.was_read(&region);
        copied
    }

    /// Copies piece by piece, compares each with its source, whose bytes lie as `view` says, and sums it where its pages
    /// have a table for that.
    fn copy_pieces(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        (from, view): (&impl Readable, &View),
        to: &Memory,
    ) -> Result<Duration> {
        let mut verify = Duration::ZERO;
        for piece in pieces(request) {
            match (request.view.sums(), from.mapped()) {
                (Some(sums), Some(mapped)) if sums.is_whole(&piece) => {
                    for number in sums.within(piece.clone()) {
                        if !copy_summed(request, (mapped, view), to, (sums, number))? {
                            from.copy(to, extents(request, view, sums.covers(number)))?;
                        }
                    }
                }
                _ => from.copy(to, extents(request, view, piece.clone()))?,
            }
            verify += self.compare(request, piece.clone(), (from, view), to)?;
            if request.view.sums().is_some() {
                let began = Instant::now();
                sum_placed(&mut self.checksummer, (to, &request.view), piece)?;
                verify += began.elapsed();
            }
        }
        Ok(verify)
    }

    /// Compares checksums of source and destination, unit by unit, where they are wanted.
    fn compare(
        &mut self,
        request: &WorkRequest<RegionMemory>,
        piece: Range<u64>,
        (from, view): (&impl Bytes, &View),
        to: &Memory,
    ) -> Result<Duration> {
        if !request.sums {
            return Ok(Duration::ZERO);
        }
        let began = Instant::now();
        for unit in windows(&piece, request.unit, request.unit) {
            let start = unit.start;
            let there = self.checksummer.sum_of(from, view, unit.clone(), next_piece(view, start))?;
            let next = next_piece(&request.view, start);
            if there != self.checksummer.sum_of(to, &request.view, unit, next)? {
                return Err(mismatch(&request.view, start));
            }
        }
        Ok(began.elapsed())
    }
}

/// Copies a part of the stream that one checksum of pages covers, and sums it in the same pass; false where that is to
/// be done in two.
fn copy_summed(
    request: &WorkRequest<RegionMemory>,
    (from, view): (&Memory, &View),
    to: &Memory,
    (sums, number): (&PageSums, usize),
) -> Result<bool> {
    let copied = to.copy_summed(from, extents(request, view, sums.covers(number)));
    let sum = copied.map_err(|error| from_host(Code::PageOutOfRange, error))?;
    sum.into_iter().for_each(|sum| sums.set(number, sum));
    Ok(sum.is_some())
}

/// The extents of a part of the stream: offsets in the source and in the destination, and bytes.
fn extents<'a>(
    request: &'a WorkRequest<RegionMemory>,
    from: &'a View,
    part: Range<u64>,
) -> impl Iterator<Item = (usize, usize, usize)> + 'a {
    let extents = Extents::new(from, &request.view, part);
    extents.map(|e| (e.left as usize, e.right as usize, e.len as usize))
}

fn copied(request: &WorkRequest<RegionMemory>, from: &View, verify: Duration) -> WorkOutcome {
    WorkOutcome::Done { extents: extents(request, from, request.part.clone()).count() as u64, verify }
}

fn done_staging(request: &WorkRequest<RegionMemory>) -> WorkOutcome {
    let extents = request.view.runs(request.part.clone()).count() as u64;
    WorkOutcome::Done { extents, verify: Duration::ZERO }
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

/// Memory of another process, which is read through the kernel: many extents a call. With checksums wanted it is read
/// twice, since what is compared must come from there.
struct Elsewhere<'a> {
    process: &'a kvik_host::ProcessMemory,
    addr: u64,
    len: u64,
    /// Room for the runs of a call, here and there.
    runs: RefCell<(RunBuffer, RunBuffer)>,
}

impl Readable for Elsewhere<'_> {
    fn copy(&self, into: &Memory, extents: impl Iterator<Item = (usize, usize, usize)>) -> Result<()> {
        let broken = |error| from_host(Code::PeerLost, error);
        let (local, remote) = &mut *self.runs.borrow_mut();
        let mut extents = extents.peekable();
        while extents.peek().is_some() {
            let (mut to_all, mut from_all) = (local.begin_recv(), remote.begin_remote());
            while let Some((offset, place, len)) = extents.peek().copied() {
                let inside = offset.checked_add(len).is_some_and(|end| end as u64 <= self.len);
                let from = self.addr.checked_add(offset as u64).filter(|_| inside);
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
        let (local, remote) = &mut *self.runs.borrow_mut();
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
