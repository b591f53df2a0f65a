//! The sending direction of a channel: one chunk at a time, header, payload and trailer in as few calls as possible.
//!
//! With checksums a payload goes piece by piece: each is summed right before it is sent, so that the kernel's copy
//! finds it in the cache, and the other side receives one piece while the next is summed. Pages of a GPU go piece by
//! piece too: one is fetched while the one before is sent.

use crate::basics::stopped;
use crate::services::finish;
use crate::sums::{Checksummer, Running, SENT};
use crate::tcp::staged::{Copies, HALF, Stagings, half_of, piece_end, place};
use crate::tcp::stream::{CHANNEL, Stream};
use crate::{Queue, RegionMemory, WorkSource, from_host};
use kvik_core::{Class, Code, Error, Result};
use kvik_host::{Io, RunBuffer, SendBatch, SendRun};
use kvik_proto::{
    CHUNK_HEADER, Claim, MAX_SUMS, STATUS_VOID, STATUS_WHOLE, SUM_BYTES, TRAILER_STATUS, WorkKind,
    WorkOutcome, WorkRequest,
};
use std::time::{Duration, Instant};

/// What fills up a chunk whose transfer was stopped.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Bytes that a channel moves before another one has its turn; the chunk that goes beyond it is finished.
pub(crate) const TURN: u64 = 1 << 20;

/// The sending direction.
#[derive(Default)]
pub(crate) struct Outgoing {
    chunk: Option<Chunk>,
    /// Of the chunk, or of the one before it.
    pub class: Class,
    trailer: Vec<u8>,
    /// For pages of GPUs.
    pub stagings: Stagings,
}

struct Chunk {
    /// None once it was stopped: the rest is filled up with zeros, and the trailer says so.
    request: Option<WorkRequest<RegionMemory>>,
    header: [u8; CHUNK_HEADER],
    payload: u64,
    start: u64,
    /// Bytes of the whole trailer.
    trailing: usize,
    /// Checksums that are being made; none are wanted without.
    running: Option<Running>,
    /// Bytes of header, payload and trailer that went.
    sent: u64,
    /// Position in the payload up to which it was fetched, or began to be, from a GPU.
    fetched: u64,
    /// The half of the buffers that its first piece is in.
    first: usize,
    /// Position in the payload up to which runs were counted.
    counted: u64,
    extents: u64,
    verify: Duration,
}

/// How far sending came.
pub(crate) enum Progress {
    /// There is nothing to send, or a GPU has not come to its copies yet.
    Idle,
    /// The socket is full.
    Blocked,
    /// It was this channel's turn for long enough.
    Yield,
}

/// What a thread's channels share.
pub(crate) struct Tools {
    pub runs: RunBuffer,
    pub checksummer: Checksummer,
    pub scratch: Vec<u8>,
    pub copies: Copies,
    /// Bytes of each class that the channel whose turn it is has moved in it.
    pub moved: [u64; 2],
}

impl Tools {
    /// Whether the channel's turn is over.
    pub fn turn_is_over(&self) -> bool {
        self.moved.iter().sum::<u64>() >= TURN
    }
}

impl Outgoing {
    /// Sends chunks of the session that the first of these claims that gives anything gives, until there is nothing
    /// more, the socket is full, or the channel's turn is over.
    pub fn advance(
        &mut self,
        work: &dyn WorkSource,
        session: u64,
        stream: &mut Stream,
        tools: &mut Tools,
        claims: &[Claim],
    ) -> Result<Progress> {
        self.stagings.settle(work);
        while !tools.turn_is_over() {
            if self.chunk.is_none() {
                let request = claims.iter().find_map(|claim| work.claim(Queue::Send(session), *claim));
                let Some(request) = request else { return Ok(Progress::Idle) };
                self.class = request.id.class();
                self.begin(work, request);
            }
            if let Some(progress) = self.send(work, stream, tools)? {
                return Ok(progress);
            }
        }
        Ok(Progress::Yield)
    }

    fn begin(&mut self, work: &dyn WorkSource, request: WorkRequest<RegionMemory>) {
        let WorkKind::Send(header) = &request.kind else {
            let error = Error::new(
                Code::ProtocolError,
                "a work request to copy or place was given to a sending channel",
            );
            return finish(work, request, WorkOutcome::Failed(error));
        };
        self.trailer.clear();
        self.trailer.extend_from_slice(&STATUS_WHOLE.to_le_bytes());
        self.chunk = Some(Chunk {
            header: header.encode(),
            payload: u64::from(header.len),
            start: request.part.start,
            trailing: header.trailer_bytes(),
            running: request.sums.then(Running::before_sending),
            request: Some(request),
            sent: 0,
            fetched: 0,
            first: 0,
            counted: 0,
            extents: 0,
            verify: Duration::ZERO,
        });
    }

    /// Sends what is left of the chunk: why some of it is still left.
    fn send(
        &mut self,
        work: &dyn WorkSource,
        stream: &mut Stream,
        tools: &mut Tools,
    ) -> Result<Option<Progress>> {
        self.leave_if_stopped(work);
        while let Some(chunk) = &mut self.chunk {
            let total = CHUNK_HEADER as u64 + chunk.payload + chunk.trailing as u64;
            if chunk.sent == total {
                if let Some(request) = chunk.request.take() {
                    let (extents, verify) = (chunk.extents, chunk.verify);
                    finish(work, request, WorkOutcome::Done { extents, verify });
                }
                self.chunk = None;
                break;
            }
            let prepared = match chunk.is_staged() {
                true => chunk.fetch(&mut self.stagings, &mut self.trailer, tools),
                false => chunk.sum_next(&mut self.trailer, &mut tools.checksummer).map(|()| true),
            };
            match prepared {
                Ok(true) => {}
                Ok(false) => return Ok(Some(Progress::Idle)),
                Err(error) => {
                    self.give_up(work, WorkOutcome::Failed(error));
                    continue;
                }
            }
            let mut batch = tools.runs.begin_send();
            fill(chunk, &mut self.stagings, &self.trailer, &mut batch)?;
            match stream.send_batch(&mut batch, &mut tools.scratch)? {
                Io::Done(moved) => {
                    chunk.sent += moved as u64;
                    tools.moved[self.class as usize] += moved as u64;
                }
                Io::Blocked => return Ok(Some(Progress::Blocked)),
                Io::Closed => return Err(Error::new(Code::PeerLost, "the peer closed a channel")),
            }
            self.leave_if_stopped(work);
        }
        Ok(None)
    }

    /// Leaves the work request in flight when it must stop: its memory is not read any more.
    pub fn leave_if_stopped(&mut self, work: &dyn WorkSource) {
        let Some(chunk) = &mut self.chunk else { return };
        if chunk.request.as_ref().is_some_and(|request| stopped(&request.stop)) {
            self.give_up(work, WorkOutcome::Void);
        }
    }

    /// Fills up what is left of the chunk, without its order.
    fn give_up(&mut self, work: &dyn WorkSource, outcome: WorkOutcome) {
        let Some(chunk) = &mut self.chunk else { return };
        if let Some(request) = chunk.request.take() {
            // Where all of the payload went, it is what the header says; and a status of which a part went must
            // not change under way.
            if chunk.sent < CHUNK_HEADER as u64 + chunk.payload {
                self.trailer[..TRAILER_STATUS].copy_from_slice(&STATUS_VOID.to_le_bytes());
            }
            self.trailer.resize(chunk.trailing, 0);
            self.stagings.leave(work, request, outcome, chunk.fetched > 0);
        }
    }

    /// The channel is cut: leaves the work request in flight. What a GPU still has is given.
    pub fn abandon(mut self, work: &dyn WorkSource) -> Stagings {
        if let Some(Chunk { request: Some(request), fetched, .. }) = self.chunk.take() {
            self.stagings.leave(work, request, WorkOutcome::Void, fetched > 0);
        }
        self.stagings
    }

    /// Room for the longest trailer, once.
    pub fn new() -> Outgoing {
        let trailer = Vec::with_capacity(TRAILER_STATUS + MAX_SUMS as usize * SUM_BYTES);
        Outgoing { trailer, ..Outgoing::default() }
    }
}

impl Chunk {
    /// Bytes of payload that went.
    fn at(&self) -> u64 {
        self.sent.saturating_sub(CHUNK_HEADER as u64).min(self.payload)
    }

    /// Sums the next piece, if all that is summed went already.
    fn sum_next(&mut self, trailer: &mut Vec<u8>, checksummer: &mut Checksummer) -> Result<()> {
        let at = self.at();
        let (Some(request), Some(running)) = (&self.request, &mut self.running) else { return Ok(()) };
        if running.done > at || running.done == self.payload {
            return Ok(());
        }
        let began = Instant::now();
        let (part, have) = ((&request.part, request.unit), (at + SENT, self.payload));
        running.go_on(checksummer, (request.region.host(CHANNEL)?, &request.view), part, have, |sum| {
            trailer.extend_from_slice(&sum.to_le_bytes());
        })?;
        self.verify += began.elapsed();
        Ok(())
    }

    /// Whether its pages lie on a GPU.
    fn is_staged(&self) -> bool {
        self.request.as_ref().is_some_and(|request| matches!(request.region, RegionMemory::Device(_)))
    }

    /// Begins to fetch what there is room for, and sums the piece that is sent next: false while it is not there.
    fn fetch(&mut self, stagings: &mut Stagings, trailer: &mut Vec<u8>, tools: &mut Tools) -> Result<bool> {
        let at = self.at();
        let Some(WorkRequest { region: RegionMemory::Device(memory), view, unit, .. }) = &self.request else {
            return Ok(true);
        };
        let staging = stagings.of(&**memory)?;
        // One piece ahead of the one that is sent, which keeps its half.
        while self.fetched < self.payload && self.fetched <= at / HALF * HALF + HALF {
            let Some(half) = staging.free_half() else { break };
            if self.fetched == 0 {
                self.first = half;
            }
            let end = piece_end(self.fetched).min(self.payload);
            let part = self.start + self.fetched..self.start + end;
            self.fetched = end;
            self.extents += staging.gather(memory, view, part, &mut tools.copies)?;
        }
        if at == self.payload {
            return Ok(true);
        }
        if at >= self.fetched || !staging.is_through(half_of(self.first, at)) {
            return Ok(false);
        }
        if let Some(error) = staging.take_error() {
            return Err(error);
        }
        let (end, unit) = (piece_end(at).min(self.payload), *unit);
        let Some(running) = self.running.as_mut().filter(|running| running.done < end) else {
            return Ok(true);
        };
        let began = Instant::now();
        let place = (staging.buffer(), place(self.first, running.done));
        running.go_on_staged(&mut tools.checksummer, place, (self.payload, unit), end, |sum| {
            trailer.extend_from_slice(&sum.to_le_bytes());
        })?;
        self.verify += began.elapsed();
        Ok(true)
    }

    /// How much of the payload may go: what is summed, where sums are wanted.
    fn ready(&self) -> u64 {
        match (&self.request, &self.running) {
            (Some(_), _) if self.is_staged() => piece_end(self.at()).min(self.payload),
            (Some(_), Some(running)) => running.done,
            _ => self.payload,
        }
    }
}

/// Puts what is left of the chunk into the batch, as far as it has room and is summed.
fn fill<'m>(
    chunk: &'m mut Chunk,
    stagings: &'m mut Stagings,
    trailer: &'m [u8],
    batch: &mut SendBatch<'_, 'm>,
) -> Result<()> {
    let head = CHUNK_HEADER as u64;
    if chunk.sent < head && !batch.push(SendRun::from(&chunk.header[chunk.sent as usize..])) {
        return Ok(());
    }
    let mut at = chunk.at();
    let ready = chunk.ready();
    if at < chunk.payload {
        match &chunk.request {
            Some(WorkRequest { region: RegionMemory::Device(memory), .. }) => {
                let bytes =
                    stagings.of(&**memory)?.buffer().send_run(place(chunk.first, at), (ready - at) as usize);
                if !batch.push(bytes.map_err(|error| from_host(Code::PageOutOfRange, error))?) {
                    return Ok(());
                }
            }
            Some(request) => {
                let left = chunk.start + at..chunk.start + ready;
                let memory = request.region.host(CHANNEL)?;
                for run in request.view.runs(left) {
                    let bytes = memory.send_run(run.offset as usize, run.len as usize);
                    if !batch.push(bytes.map_err(|error| from_host(Code::PageOutOfRange, error))?) {
                        return Ok(());
                    }
                    at += run.len;
                    if at > chunk.counted {
                        chunk.counted = at;
                        chunk.extents += 1;
                    }
                }
            }
            None => {
                while at < chunk.payload {
                    let len = (chunk.payload - at).min(ZEROS.len() as u64);
                    if !batch.push(SendRun::from(&ZEROS[..len as usize])) {
                        return Ok(());
                    }
                    at += len;
                }
            }
        }
    }
    if ready < chunk.payload {
        return Ok(());
    }
    let trailing = chunk.sent.saturating_sub(head + chunk.payload);
    // A batch without room for the trailer sends it in the next turn.
    let _ = batch.push(SendRun::from(&trailer[trailing as usize..]));
    Ok(())
}
