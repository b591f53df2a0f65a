//! The receiving direction of a channel: each chunk goes straight to where it belongs.
//!
//! One call takes the rest of a payload, its trailer and the next chunk's header where they have come. With checksums
//! it takes a piece of the payload, which is summed at once, while it is in the cache.

use crate::copy::mismatch;
use crate::local::stopped;
use crate::sums::{PIECE, Running};
use crate::tcp::outgoing::Tools;
use crate::tcp::{CHANNEL, Stream};
use crate::{Desk, Held, finish, from_host};
use kvik_core::{Code, Error, Result};
use kvik_host::{Io, RecvRun};
use kvik_proto::{
    CHUNK_HEADER, ChunkHeader, MAX_SUMS, Order, OrderOutcome, STATUS_VOID, STATUS_WHOLE, SUM_BYTES,
    TRAILER_STATUS,
};
use std::time::{Duration, Instant};

/// The longest trailer and the next header behind it.
const TAIL: usize = TRAILER_STATUS + MAX_SUMS as usize * SUM_BYTES + CHUNK_HEADER;

/// How often the desk is told that bytes of a chunk come. Each chunk's header tells it too.
const TELL: Duration = Duration::from_millis(10);

/// The receiving direction.
pub(crate) struct Incoming {
    state: State,
    tail: Vec<u8>,
    /// The checksums of what was placed, of the chunk in hand.
    sums: Vec<u64>,
    /// When the desk was last told that the peer lives.
    told: Instant,
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
    order: Option<Order<Held>>,
    /// Bytes of payload and trailer that have come.
    got: u64,
    counted: u64,
    extents: u64,
    /// Checksums that are being made; none are wanted without.
    running: Option<Running>,
    verify: Duration,
}

impl Chunk {
    fn payload(&self) -> u64 {
        u64::from(self.header.len)
    }
    fn total(&self) -> u64 {
        self.payload() + self.header.trailer_bytes() as u64
    }

    /// Up to where the payload is received in this call.
    fn upto(&self) -> u64 {
        match (&self.order, &self.running) {
            (Some(_), Some(_)) => self.payload().min(self.got + PIECE),
            _ => self.payload(),
        }
    }

    /// Sums what has come.
    fn sum_up(&mut self, sums: &mut Vec<u64>, tools: &mut Tools) -> Result<()> {
        let got = self.got.min(self.payload());
        let (Some(order), Some(running)) = (&self.order, &mut self.running) else { return Ok(()) };
        if running.done == got {
            return Ok(());
        }
        let began = Instant::now();
        let memory = order.region.host(CHANNEL)?;
        let (side, part) = ((&**memory, &*order.view), (&order.part, order.unit));
        running.go_on(&mut tools.summer, side, part, (got, got), |sum| sums.push(sum))?;
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
        }
    }

    /// Takes what has come, for at most `turns` calls. True when there may be more.
    ///
    /// # Errors
    /// The channel must be cut.
    pub fn advance(
        &mut self,
        desk: &dyn Desk,
        session: u64,
        stream: &mut Stream,
        tools: &mut Tools,
        turns: usize,
    ) -> Result<bool> {
        for _ in 0..turns {
            self.leave_if_stopped(desk);
            let moved = match &mut self.state {
                State::Header(got) => stream.recv(&mut self.tail[*got..CHUNK_HEADER])?,
                State::Chunk(chunk) => receive(chunk, &mut self.tail, stream, tools)?,
            };
            match moved {
                Io::Blocked => return Ok(false),
                Io::Closed => return Err(Error::new(Code::PeerLost, "the peer closed a channel")),
                Io::Done(moved) => self.took(moved, desk, session, tools)?,
            }
        }
        Ok(true)
    }

    /// Accounts for bytes that came, and goes on to the next state where they complete one.
    fn took(&mut self, moved: usize, desk: &dyn Desk, session: u64, tools: &mut Tools) -> Result<()> {
        match &mut self.state {
            State::Header(got) => *got += moved,
            State::Chunk(chunk) => {
                // Once in a while is enough for who counts in seconds.
                if self.told.elapsed() >= TELL {
                    self.told = Instant::now();
                    desk.alive(session);
                }
                chunk.got += moved as u64;
                if let Err(error) = chunk.sum_up(&mut self.sums, tools)
                    && let Some(order) = chunk.order.take()
                {
                    finish(desk, order, OrderOutcome::Failed(error));
                }
                if chunk.got < chunk.total() {
                    return Ok(());
                }
                let ahead = (chunk.got - chunk.total()) as usize;
                let trailer = chunk.header.trailer_bytes();
                if let Some(order) = chunk.order.take() {
                    let outcome = check(chunk, &order, &self.tail[..trailer], &self.sums);
                    finish(desk, order, outcome);
                }
                self.tail.copy_within(trailer..trailer + ahead, 0);
                self.state = State::Header(ahead);
            }
        }
        if let State::Header(CHUNK_HEADER) = self.state {
            let mut bytes = [0; CHUNK_HEADER];
            bytes.copy_from_slice(&self.tail[..CHUNK_HEADER]);
            let header = ChunkHeader::decode(&bytes)?;
            let order = desk.place(session, &header)?;
            self.sums.clear();
            let sums = order.as_ref().is_some_and(|order| order.sums);
            let running = sums.then(Running::after_placing);
            let verify = Duration::ZERO;
            self.state =
                State::Chunk(Chunk { header, order, got: 0, counted: 0, extents: 0, running, verify });
        }
        Ok(())
    }

    /// Leaves the order in hand when it must stop: its memory is not written any more.
    pub fn leave_if_stopped(&mut self, desk: &dyn Desk) {
        if let State::Chunk(chunk) = &mut self.state
            && let Some(order) = chunk.order.take_if(|order| stopped(&order.stop))
        {
            finish(desk, order, OrderOutcome::Void);
        }
    }

    /// The channel is cut: leaves the order in hand.
    pub fn abandon(&mut self, desk: &dyn Desk) {
        if let State::Chunk(chunk) = &mut self.state
            && let Some(order) = chunk.order.take()
        {
            finish(desk, order, OrderOutcome::Void);
        }
    }
}

/// One call for the rest of the payload, the trailer, and the header that may follow.
fn receive(chunk: &mut Chunk, tail: &mut [u8], stream: &mut Stream, tools: &mut Tools) -> Result<Io> {
    let payload = chunk.payload();
    let mut at = chunk.got.min(payload);
    let upto = chunk.upto();
    let mut batch = tools.runs.begin_recv();
    let mut whole = true;
    if at < payload {
        match &chunk.order {
            Some(order) => {
                let (start, memory) = (order.part.start, order.region.host(CHANNEL)?);
                for run in order.view.runs(start + at..start + upto) {
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
fn check(chunk: &Chunk, order: &Order<Held>, trailer: &[u8], placed: &[u64]) -> OrderOutcome {
    let (status, sums) = trailer.split_at(TRAILER_STATUS);
    if status == STATUS_VOID.to_le_bytes() {
        return OrderOutcome::Void;
    }
    if status != STATUS_WHOLE.to_le_bytes() {
        let text = "a chunk's trailer is damaged; the transfer is given up";
        return OrderOutcome::Failed(Error::new(Code::ChecksumMismatch, text));
    }
    if !order.sums {
        return OrderOutcome::Done { extents: chunk.extents, verify: Duration::ZERO };
    }
    let mut wrong =
        sums.chunks_exact(SUM_BYTES).zip(placed).position(|(sent, sum)| sent != sum.to_le_bytes());
    if placed.len() * SUM_BYTES != sums.len() {
        wrong.get_or_insert(placed.len().min(sums.len() / SUM_BYTES));
    }
    match wrong {
        Some(unit) => {
            let position = order.part.start + unit as u64 * order.unit;
            OrderOutcome::Failed(mismatch(&order.view, position))
        }
        None => OrderOutcome::Done { extents: chunk.extents, verify: chunk.verify },
    }
}
