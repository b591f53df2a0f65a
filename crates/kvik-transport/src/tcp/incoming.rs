//! The receiving direction of a channel: each chunk goes straight to where it belongs.
//!
//! One call takes the rest of a payload, its trailer and the next chunk's header where they have come. With checksums
//! it takes a piece of the payload, which is summed at once, while it is in the cache. Pages of a GPU are received into
//! page-locked memory piece by piece; one goes on to the GPU while the next is received.

use crate::basics::stopped;
use crate::sums::{PIECE, Running, mismatch, sum_placed};
use crate::tcp::outgoing::Tools;
use crate::tcp::staged::{HALF, Stagings, half_of, piece_end, place};
use crate::tcp::stream::{CHANNEL, Stream};
use crate::{RegionMemory, Services, WorkSource, from_host};
use kvik_core::{Class, Code, Error, Result};
use kvik_host::device::DeviceMemory;
use kvik_host::{Io, RecvRun};
use kvik_proto::{
    CHUNK_HEADER, ChunkHeader, MAX_SUMS, STATUS_VOID, STATUS_WHOLE, SUM_BYTES, TRAILER_STATUS, WorkOutcome,
    WorkRequest,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest trailer and the next header behind it.
const TAIL: usize = TRAILER_STATUS + MAX_SUMS as usize * SUM_BYTES + CHUNK_HEADER;

/// How often the session is said to live because bytes of a chunk come. Each chunk's header tells it too.
const TELL: Duration = Duration::from_millis(10);

/// Calls of a turn: a peer that sends little at a time has no longer ones than others.
const CALLS: usize = 64;

/// The receiving direction.
pub(crate) struct Incoming {
    state: State,
    tail: Vec<u8>,
    /// The checksums of what was placed, of the chunk in flight.
    sums: Vec<u64>,
    /// When the peer was last said to live.
    told: Instant,
    /// For pages of GPUs.
    pub stagings: Stagings,
    /// It waits for a GPU.
    waits: bool,
}

// There is one a channel, and a box would be an allocation a chunk.
#[expect(clippy::large_enum_variant)]
enum State {
    /// Bytes of the next header that have come, in `tail`.
    Header(usize),
    Chunk(Chunk),
}

struct Chunk {
    header: ChunkHeader,
    /// None: what comes is thrown away.
    request: Option<WorkRequest<RegionMemory>>,
    /// Bytes of payload and trailer that have come.
    got: u64,
    counted: u64,
    extents: u64,
    /// Bytes of the payload that were handed to a GPU.
    handed: u64,
    /// The half of the buffers that the first piece is in; known with the first byte.
    first: usize,
    /// Bytes of the payload of which the pages' checksums are made, where they are wanted.
    summed: u64,
    /// Checksums that are being made; none are wanted without.
    running: Option<Running>,
    verify: Duration,
}

impl Chunk {
    fn new(
        header: ChunkHeader,
        request: Option<WorkRequest<RegionMemory>>,
        running: Option<Running>,
    ) -> Chunk {
        let (got, counted, extents, handed, first, summed) = (0, 0, 0, 0, 0, 0);
        let verify = Duration::ZERO;
        Chunk { header, request, got, counted, extents, handed, first, summed, running, verify }
    }

    fn payload(&self) -> u64 {
        u64::from(self.header.len)
    }
    fn total(&self) -> u64 {
        self.payload() + self.header.trailer_bytes() as u64
    }

    /// Up to where the payload is received in this call.
    fn upto(&self) -> u64 {
        let piece = if self.gpu().is_some() { piece_end(self.got) } else { u64::MAX };
        match &self.request {
            Some(request) if self.running.is_some() || request.view.sums().is_some() => {
                self.payload().min(self.got + PIECE).min(piece)
            }
            _ => self.payload().min(piece),
        }
    }

    /// The work request, where its pages lie on a GPU.
    fn gpu(&self) -> Option<(&WorkRequest<RegionMemory>, &Arc<dyn DeviceMemory>)> {
        match self.request.as_ref().map(|request| (request, &request.region)) {
            Some((request, RegionMemory::Device(memory))) => Some((request, memory)),
            _ => None,
        }
    }

    /// Whether there is room for what comes next: not while the GPU has the half that it belongs into.
    fn has_room(&mut self, stagings: &mut Stagings) -> Result<bool> {
        let at = self.got;
        let Some((_, memory)) = self.gpu().filter(|_| at < self.payload()) else { return Ok(true) };
        let staging = stagings.of(&**memory)?;
        let free = staging.free_half();
        if at == 0 {
            self.first = free.unwrap_or_default();
        }
        Ok(free == Some(half_of(self.first, at)))
    }

    /// Hands a piece that is whole to the GPU.
    fn hand_on(&mut self, stagings: &mut Stagings, tools: &mut Tools) -> Result<()> {
        let got = self.got.min(self.payload());
        let Some((request, memory)) = self.gpu() else { return Ok(()) };
        if got == self.handed || (got < self.payload() && !got.is_multiple_of(HALF)) {
            return Ok(());
        }
        let start = request.part.start;
        let staging = stagings.of(&**memory)?;
        let runs =
            staging.scatter(memory, &request.view, start + self.handed..start + got, &mut tools.copies);
        self.handed = got;
        self.extents += runs?;
        staging.take_error().map_or(Ok(()), Err)
    }

    /// Sums of what has come what checksums of pages are wanted of. Those of its units that cover the same are these.
    fn sum_pages(&mut self, placed: &[u64], tools: &mut Tools) -> Result<()> {
        let Some(request) = &self.request else { return Ok(()) };
        let (Some(sums), RegionMemory::Host(memory)) = (request.view.sums(), &request.region) else {
            return Ok(());
        };
        let (began, start) = (Instant::now(), request.part.start);
        let come = start + self.summed..start + self.got.min(self.payload());
        let whole = sums.within(come.clone());
        if whole.is_empty() {
            return Ok(());
        }
        if self.running.is_some() && sums.unit() == Some(request.unit) {
            let unit = |number| ((sums.covers(number).start - start) / request.unit) as usize;
            for number in whole.clone() {
                placed.get(unit(number)).into_iter().for_each(|sum| sums.set(number, *sum));
            }
        }
        sum_placed(&mut tools.checksummer, (memory, &request.view), come)?;
        self.summed = sums.covers(whole.end - 1).end - start;
        self.verify += began.elapsed();
        Ok(())
    }

    /// Sums what has come.
    fn sum_up(&mut self, sums: &mut Vec<u64>, stagings: &mut Stagings, tools: &mut Tools) -> Result<()> {
        let got = self.got.min(self.payload());
        let (Some(request), Some(running)) = (&self.request, &mut self.running) else { return Ok(()) };
        if running.done == got {
            return Ok(());
        }
        let began = Instant::now();
        if let RegionMemory::Device(memory) = &request.region {
            let place = (stagings.of(&**memory)?.buffer(), place(self.first, running.done));
            let sizes = (u64::from(self.header.len), request.unit);
            running.go_on_staged(&mut tools.checksummer, place, sizes, got, |sum| sums.push(sum))?;
            self.verify += began.elapsed();
            return Ok(());
        }
        let memory = request.region.host(CHANNEL)?;
        let (side, part) = ((&**memory, &*request.view), (&request.part, request.unit));
        running.go_on(&mut tools.checksummer, side, part, (got, got), |sum| sums.push(sum))?;
        self.verify += began.elapsed();
        Ok(())
    }
}

impl Incoming {
    pub fn new() -> Incoming {
        Incoming {
            state: State::Header(0),
            tail: vec![0; TAIL],
            sums: Vec::with_capacity(MAX_SUMS as usize),
            told: Instant::now(),
            stagings: Stagings::default(),
            waits: false,
        }
    }

    /// Whether it is a GPU that it waits for: it takes nothing from the socket meanwhile.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// The class of what comes; as long as that is not known it may be a handover.
    pub fn class(&self) -> Class {
        match &self.state {
            State::Chunk(Chunk { request: Some(request), .. }) => request.id.class(),
            State::Chunk(_) | State::Header(_) => Class::Handover,
        }
    }

    /// Takes what has come, until the channel's turn is over, and for at most [`CALLS`] calls. True when there may be
    /// more.
    ///
    /// # Errors
    /// The channel must be cut.
    pub fn advance(
        &mut self,
        services: &Services,
        session: u64,
        stream: &mut Stream,
        tools: &mut Tools,
    ) -> Result<bool> {
        let work = &*services.work;
        self.stagings.settle(work);
        self.waits = false;
        for _ in 0..CALLS {
            if tools.turn_is_over() {
                break;
            }
            self.leave_if_stopped(work);
            let moved = match &mut self.state {
                State::Header(got) => stream.recv(&mut self.tail[*got..CHUNK_HEADER])?,
                State::Chunk(chunk) => match chunk.has_room(&mut self.stagings) {
                    Ok(true) => receive(chunk, &mut self.stagings, &mut self.tail, stream, tools)?,
                    Ok(false) => {
                        self.waits = true;
                        return Ok(false);
                    }
                    Err(error) => {
                        self.leave(work, WorkOutcome::Failed(error));
                        continue;
                    }
                },
            };
            match moved {
                Io::Blocked => return Ok(false),
                Io::Closed => return Err(Error::new(Code::PeerLost, "the peer closed a channel")),
                Io::Done(moved) => {
                    tools.moved[self.class() as usize] += moved as u64;
                    self.took(moved, services, session, tools)?;
                }
            }
        }
        Ok(true)
    }

    /// Accounts for bytes that came, and goes on to the next state where they complete one.
    fn took(&mut self, moved: usize, services: &Services, session: u64, tools: &mut Tools) -> Result<()> {
        match &mut self.state {
            State::Header(got) => *got += moved,
            State::Chunk(chunk) => {
                // Once in a while is enough for who counts in seconds.
                if self.told.elapsed() >= TELL {
                    self.told = Instant::now();
                    services.sessions.heard(session);
                }
                chunk.got += moved as u64;
                let summed = chunk.sum_up(&mut self.sums, &mut self.stagings, tools);
                let summed = summed.and_then(|()| chunk.sum_pages(&self.sums, tools));
                let placed = summed.and_then(|()| chunk.hand_on(&mut self.stagings, tools));
                if let Err(error) = placed
                    && let Some(request) = chunk.request.take()
                {
                    self.stagings.leave(
                        &*services.work,
                        request,
                        WorkOutcome::Failed(error),
                        chunk.handed > 0,
                    );
                }
                if chunk.got < chunk.total() {
                    return Ok(());
                }
                self.complete(services)?;
            }
        }
        if let State::Header(CHUNK_HEADER) = self.state {
            let mut bytes = [0; CHUNK_HEADER];
            bytes.copy_from_slice(&self.tail[..CHUNK_HEADER]);
            let header = ChunkHeader::decode(&bytes)?;
            let request = services.placement.place(session, &header)?;
            self.sums.clear();
            let sums = request.as_ref().is_some_and(|request| request.sums);
            let running = sums.then(Running::after_placing);
            self.state = State::Chunk(Chunk::new(header, request, running));
        }
        Ok(())
    }

    /// A chunk has come, with its trailer.
    fn complete(&mut self, services: &Services) -> Result<()> {
        let State::Chunk(chunk) = &mut self.state else { return Ok(()) };
        let ahead = (chunk.got - chunk.total()) as usize;
        let trailer = chunk.header.trailer_bytes();
        let status = &self.tail[..TRAILER_STATUS];
        if status != STATUS_VOID.to_le_bytes() && status != STATUS_WHOLE.to_le_bytes() {
            // Bytes may be missing, or too many: what comes next is no header, and whose it would be nobody knows.
            let text = "a chunk's trailer is damaged; the channel is cut";
            return Err(Error::new(Code::ProtocolError, text));
        }
        if let Some(request) = chunk.request.take() {
            let outcome = match self.stagings.take_error(&request.region) {
                Some(error) => WorkOutcome::Failed(error),
                None => check(chunk, &request, &self.tail[..trailer], &self.sums),
            };
            self.stagings.leave(&*services.work, request, outcome, chunk.handed > 0);
        }
        self.tail.copy_within(trailer..trailer + ahead, 0);
        self.state = State::Header(ahead);
        Ok(())
    }

    /// Leaves the work request in flight when it must stop: its memory is not written any more.
    pub fn leave_if_stopped(&mut self, work: &dyn WorkSource) {
        if let State::Chunk(Chunk { request: Some(request), .. }) = &self.state
            && stopped(&request.stop)
        {
            self.leave(work, WorkOutcome::Void);
        }
    }

    /// Leaves the work request in flight: what comes of its chunk is thrown away.
    fn leave(&mut self, work: &dyn WorkSource, outcome: WorkOutcome) {
        if let State::Chunk(chunk) = &mut self.state
            && let Some(request) = chunk.request.take()
        {
            self.stagings.leave(work, request, outcome, chunk.handed > 0);
        }
    }

    /// The channel is cut: leaves the work request in flight. What a GPU still has is given.
    pub fn abandon(mut self, work: &dyn WorkSource) -> Stagings {
        self.leave(work, WorkOutcome::Void);
        self.stagings
    }
}

/// One call for the rest of the payload, the trailer, and the header that may follow.
fn receive(
    chunk: &mut Chunk,
    stagings: &mut Stagings,
    tail: &mut [u8],
    stream: &mut Stream,
    tools: &mut Tools,
) -> Result<Io> {
    let payload = chunk.payload();
    let mut at = chunk.got.min(payload);
    let upto = chunk.upto();
    let mut batch = tools.runs.begin_recv();
    let mut whole = true;
    if at < payload {
        match &chunk.request {
            Some(WorkRequest { region: RegionMemory::Device(memory), .. }) => {
                let into = stagings.of(&**memory)?.buffer();
                let into = into.recv_run(place(chunk.first, at), (upto - at) as usize);
                whole = batch.push(into.map_err(|error| from_host(Code::PageOutOfRange, error))?);
            }
            Some(request) => {
                let (start, memory) = (request.part.start, request.region.host(CHANNEL)?);
                for run in request.view.runs(start + at..start + upto) {
                    let into = memory.recv_run(run.offset as usize, run.len as usize);
                    if !batch.push(into.map_err(|error| from_host(Code::PageOutOfRange, error))?) {
                        whole = false;
                        break;
                    }
                    at += run.len;
                    if at > chunk.counted {
                        chunk.counted = at;
                        chunk.extents += 1;
                    }
                }
            }
            None => {
                let len = ((payload - at) as usize).min(tools.scratch.len());
                whole = batch.push(RecvRun::from(&mut tools.scratch[..len])) && len as u64 == payload - at;
            }
        }
    }
    if whole && upto == payload {
        let got = chunk.got.saturating_sub(payload) as usize;
        let end = chunk.header.trailer_bytes() + CHUNK_HEADER;
        // Without room it is taken in the next turn.
        let _ = batch.push(RecvRun::from(&mut tail[got..end]));
    }
    stream.recv_batch(&mut batch)
}

/// Compares what was placed with what was sent.
fn check(chunk: &Chunk, request: &WorkRequest<RegionMemory>, trailer: &[u8], placed: &[u64]) -> WorkOutcome {
    let (status, sums) = trailer.split_at(TRAILER_STATUS);
    if status == STATUS_VOID.to_le_bytes() {
        return WorkOutcome::Void;
    }
    if !request.sums {
        return WorkOutcome::Done { extents: chunk.extents, verify: chunk.verify };
    }
    let mut wrong =
        sums.chunks_exact(SUM_BYTES).zip(placed).position(|(sent, sum)| sent != sum.to_le_bytes());
    if placed.len() * SUM_BYTES != sums.len() {
        wrong.get_or_insert(placed.len().min(sums.len() / SUM_BYTES));
    }
    match wrong {
        Some(unit) => {
            let position = request.part.start + unit as u64 * request.unit;
            WorkOutcome::Failed(mismatch(&request.view, position))
        }
        None => WorkOutcome::Done { extents: chunk.extents, verify: chunk.verify },
    }
}
