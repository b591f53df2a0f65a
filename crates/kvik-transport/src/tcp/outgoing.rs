//! The sending direction of a channel: one chunk at a time, header, payload and trailer in as few calls as possible.
//!
//! With checksums a payload goes piece by piece: each is summed right before it is sent, so that the kernel's copy
//! finds it in the cache, and the other side receives one piece while the next is summed.

use crate::local::stopped;
use crate::sums::{Running, SENT, Summer};
use crate::tcp::{CHANNEL, Stream};
use crate::{Desk, Held, finish, from_host};
use kvik_core::{Code, Error, Result};
use kvik_host::{Io, RunBuffer, SendBatch, SendRun};
use kvik_proto::{
    CHUNK_HEADER, MAX_SUMS, Order, OrderKind, OrderOutcome, STATUS_VOID, STATUS_WHOLE, SUM_BYTES,
    TRAILER_STATUS,
};
use std::time::{Duration, Instant};

/// What fills up a chunk whose transfer was stopped.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// The sending direction.
#[derive(Default)]
pub(crate) struct Outgoing {
    chunk: Option<Chunk>,
    trailer: Vec<u8>,
}

struct Chunk {
    /// None once it was stopped: the rest is filled up with zeros, and the trailer says so.
    order: Option<Order<Held>>,
    header: [u8; CHUNK_HEADER],
    payload: u64,
    start: u64,
    /// Bytes of the whole trailer.
    trailing: usize,
    /// Checksums that are being made; none are wanted without.
    running: Option<Running>,
    /// Bytes of header, payload and trailer that went.
    sent: u64,
    /// Position in the payload up to which runs were counted.
    counted: u64,
    extents: u64,
    verify: Duration,
}

/// How far sending came.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// There is nothing to send.
    Idle,
    /// The socket is full.
    Blocked,
    /// It was this channel's turn for long enough.
    Yield,
}

/// What a thread's channels share.
pub(crate) struct Tools {
    pub runs: RunBuffer,
    pub summer: Summer,
    pub scratch: Vec<u8>,
}

impl Outgoing {
    pub fn is_busy(&self) -> bool {
        self.chunk.is_some()
    }

    /// Sends chunks of the session until there is nothing more, the socket is full, or `turns` chunks went.
    pub fn advance(
        &mut self,
        desk: &dyn Desk,
        session: u64,
        stream: &mut Stream,
        tools: &mut Tools,
        turns: usize,
    ) -> Result<Progress> {
        for _ in 0..turns {
            if self.chunk.is_none() {
                let Some(order) = desk.next_send(session) else { return Ok(Progress::Idle) };
                self.begin(desk, order);
            }
            if !self.send(desk, stream, tools)? {
                return Ok(Progress::Blocked);
            }
        }
        Ok(Progress::Yield)
    }

    fn begin(&mut self, desk: &dyn Desk, order: Order<Held>) {
        let OrderKind::Send(header) = &order.kind else {
            let error =
                Error::new(Code::ProtocolError, "an order to copy or place was given to a sending channel");
            return finish(desk, order, OrderOutcome::Failed(error));
        };
        self.trailer.clear();
        self.trailer.extend_from_slice(&STATUS_WHOLE.to_le_bytes());
        self.chunk = Some(Chunk {
            header: header.encode(),
            payload: u64::from(header.len),
            start: order.part.start,
            trailing: header.trailer_bytes(),
            running: order.sums.then(Running::before_sending),
            order: Some(order),
            sent: 0,
            counted: 0,
            extents: 0,
            verify: Duration::ZERO,
        });
    }

    /// Sends what is left of the chunk: true when all of it went.
    fn send(&mut self, desk: &dyn Desk, stream: &mut Stream, tools: &mut Tools) -> Result<bool> {
        self.leave_if_stopped(desk);
        while let Some(chunk) = &mut self.chunk {
            let total = CHUNK_HEADER as u64 + chunk.payload + chunk.trailing as u64;
            if chunk.sent == total {
                if let Some(order) = chunk.order.take() {
                    let (extents, verify) = (chunk.extents, chunk.verify);
                    finish(desk, order, OrderOutcome::Done { extents, verify });
                }
                self.chunk = None;
                break;
            }
            if let Err(error) = chunk.sum_next(&mut self.trailer, &mut tools.summer) {
                self.give_up(desk, OrderOutcome::Failed(error));
                continue;
            }
            let mut batch = tools.runs.begin_send();
            fill(chunk, &self.trailer, &mut batch)?;
            match stream.send_batch(&mut batch, &mut tools.scratch)? {
                Io::Done(moved) => chunk.sent += moved as u64,
                Io::Blocked => return Ok(false),
                Io::Closed => return Err(Error::new(Code::PeerLost, "the peer closed a channel")),
            }
            self.leave_if_stopped(desk);
        }
        Ok(true)
    }

    /// Leaves the order in hand when it must stop: its memory is not read any more.
    pub fn leave_if_stopped(&mut self, desk: &dyn Desk) {
        let Some(chunk) = &mut self.chunk else { return };
        if chunk.order.as_ref().is_some_and(|order| stopped(&order.stop)) {
            self.give_up(desk, OrderOutcome::Void);
        }
    }

    /// Fills up what is left of the chunk, without its order.
    fn give_up(&mut self, desk: &dyn Desk, outcome: OrderOutcome) {
        let Some(chunk) = &mut self.chunk else { return };
        if let Some(order) = chunk.order.take() {
            // Where all of the payload went, it is what the header says; and a status of which a part went must
            // not change under way.
            if chunk.sent < CHUNK_HEADER as u64 + chunk.payload {
                self.trailer[..TRAILER_STATUS].copy_from_slice(&STATUS_VOID.to_le_bytes());
            }
            self.trailer.resize(chunk.trailing, 0);
            finish(desk, order, outcome);
        }
    }

    /// The channel is cut: leaves the order in hand.
    pub fn abandon(&mut self, desk: &dyn Desk) {
        if let Some(order) = self.chunk.take().and_then(|chunk| chunk.order) {
            finish(desk, order, OrderOutcome::Void);
        }
    }

    /// Room for the longest trailer, once.
    pub fn new() -> Outgoing {
        Outgoing { chunk: None, trailer: Vec::with_capacity(TRAILER_STATUS + MAX_SUMS as usize * SUM_BYTES) }
    }
}

impl Chunk {
    /// Bytes of payload that went.
    fn at(&self) -> u64 {
        self.sent.saturating_sub(CHUNK_HEADER as u64).min(self.payload)
    }

    /// Sums the next piece, if all that is summed went already.
    fn sum_next(&mut self, trailer: &mut Vec<u8>, summer: &mut Summer) -> Result<()> {
        let at = self.at();
        let (Some(order), Some(running)) = (&self.order, &mut self.running) else { return Ok(()) };
        if running.done > at || running.done == self.payload {
            return Ok(());
        }
        let began = Instant::now();
        let (part, have) = ((&order.part, order.unit), (at + SENT, self.payload));
        running.go_on(summer, (order.region.host(CHANNEL)?, &order.view), part, have, |sum| {
            trailer.extend_from_slice(&sum.to_le_bytes());
        })?;
        self.verify += began.elapsed();
        Ok(())
    }

    /// How much of the payload may go: what is summed, where sums are wanted.
    fn ready(&self) -> u64 {
        match (&self.order, &self.running) {
            (Some(_), Some(running)) => running.done,
            _ => self.payload,
        }
    }
}

/// Puts what is left of the chunk into the batch, as far as it has room and is summed.
fn fill<'m>(chunk: &'m mut Chunk, trailer: &'m [u8], batch: &mut SendBatch<'_, 'm>) -> Result<()> {
    let head = CHUNK_HEADER as u64;
    if chunk.sent < head && !batch.push(SendRun::from(&chunk.header[chunk.sent as usize..])) {
        return Ok(());
    }
    let mut at = chunk.at();
    let ready = chunk.ready();
    if at < chunk.payload {
        match &chunk.order {
            Some(order) => {
                let left = chunk.start + at..chunk.start + ready;
                let memory = order.region.host(CHANNEL)?;
                for run in order.view.runs(left) {
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
