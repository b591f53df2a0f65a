//! Executors: they do half of an order when it starts and half when it finishes, so that anything can come between.

use crate::channels::pick;
use crate::coverage::{CHUNK, Fault};
use crate::link::Chunk;
use crate::memory::Mem;
use crate::world::World;
use kvik_core::{Code, Error, Result};
use kvik_proto::{ChunkHeader, CopyFrom, Order, OrderKind, OrderOutcome, STATUS_VOID, STATUS_WHOLE};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// An order that was begun.
pub struct Running {
    pub engine: usize,
    pub link: Option<usize>,
    /// Over which of its channels it sends.
    channel: usize,
    pub order: Order<Mem>,
    pub chunk: Option<Chunk>,
    /// What was read of the first half.
    read: Vec<u8>,
    stale: bool,
}

impl Running {
    fn new(engine: usize, link: Option<usize>, order: Order<Mem>) -> Running {
        Running { engine, link, channel: 0, order, chunk: None, read: Vec::new(), stale: false }
    }
}

fn half(order: &Order<Mem>) -> u64 {
    order.part.start + (order.part.end - order.part.start) / 2
}

impl World {
    fn is_cut(&self, running: &Running) -> bool {
        let link = running.link.map(|at| &self.links[at]);
        link.is_some_and(|link| link.closed[link.side(running.engine)])
    }

    pub fn start_send(&mut self, at: usize, side: usize) -> usize {
        let engine = self.links[at].ends[side];
        let now = self.engines[engine].now(self.now);
        let Some(session) = self.links[at].session else { return engine };
        let Some(channel) = pick(&mut self.rng, self.links[at].channels.usable(side)) else { return engine };
        if let Some(order) = self.engines[engine].node.next_send(session, now) {
            let OrderKind::Send(header) = &order.kind else { panic!("no order to send") };
            self.check_stated(&order, Some((session, header.transfer)));
            let read = order.region.read(&order.view, order.part.start..half(&order));
            self.running.push(Running { channel, read, ..Running::new(engine, Some(at), order) });
        }
        engine
    }

    pub fn start_copy(&mut self, engine: usize) -> usize {
        let now = self.engines[engine].now(self.now);
        let order = self.engines[engine].node.next_copy(now);
        self.engines[engine].copies = order.is_some();
        if let Some(order) = order {
            self.check_stated(&order, None);
            let link = self.by_session.get(&order.id.session()).copied();
            let part = order.part.start..half(&order);
            let mut running = Running::new(engine, link, order);
            self.copy(&mut running, part);
            self.running.push(running);
        }
        engine
    }

    /// Copies a part, if its source still is what it was.
    fn copy(&self, running: &mut Running, part: std::ops::Range<u64>) {
        let order = &running.order;
        let OrderKind::Copy(from) = &order.kind else { return };
        let bytes = match (from, running.link) {
            (CopyFrom::Own(mem, view), _) => mem.read(view, part.clone()),
            (CopyFrom::Peer(source), Some(link)) => {
                let link = &self.links[link];
                let other = &link.processes[1 - link.side(running.engine)];
                running.stale |= other.generation(source.slot) != source.generation;
                other.arena(source.region).peek(&source.view, part.clone())
            }
            (CopyFrom::Peer(_), None) => unreachable!("a peer without a link"),
        };
        if !running.stale {
            order.region.write(&order.view, part, &bytes);
        }
    }

    pub fn start_place(&mut self, at: usize, channel: usize, from: usize) -> usize {
        let link = &mut self.links[at];
        let (to, gone) = (link.channels.all[channel].ends[1 - from], link.gone[1 - from]);
        let session = link.channels.all[channel].serves[1 - from];
        let Some((chunk, overtakes)) = link.channels.next_chunk(channel, from) else { return to };
        if overtakes {
            link.faults |= Fault::Reorder.bit();
        }
        let Some(session) = session.filter(|_| !gone) else { return to };
        assert_eq!(Some(session), link.session, "P8: a channel serves a session that it did not join");
        let (state, faults, dead) =
            (self.state_of(at, 1 - from), self.links[at].faults, self.links[at].closed[1 - from]);
        self.coverage.hit(state, CHUNK, faults);
        let now = self.engines[to].now(self.now);
        self.hear(to, session);
        match self.engines[to].node.place(session, &chunk.header, now) {
            Ok(Some(order)) => {
                assert!(!dead, "P6: a chunk of a dead session was taken");
                assert_eq!(chunk.header.session, session, "P8: a chunk of another session was taken");
                self.check_stated(&order, Some((session, chunk.header.transfer)));
                let part = order.part.start..half(&order);
                let bytes = &chunk.payload[..(part.end - part.start) as usize];
                order.region.write(&order.view, part, bytes);
                self.running.push(Running { chunk: Some(chunk), ..Running::new(to, Some(at), order) });
            }
            Ok(None) => assert_eq!(chunk.header.session, session, "a chunk of another session was let pass"),
            Err(error) => {
                assert!(
                    self.links[at].faults & Fault::Duplicate.bit() != 0,
                    "a chunk was refused though nothing was doubled: {error}"
                );
                self.engines[to].node.close_session(session, error);
            }
        }
        to
    }

    pub fn finish(&mut self, at: usize) -> usize {
        let mut running = self.running.swap_remove(at);
        let engine = running.engine;
        let left = running.order.stop.load(Ordering::Acquire) || self.is_cut(&running);
        let outcome = match running.chunk.take() {
            Some(chunk) if !left => finish_place(&running.order, &chunk),
            Some(_) => Ok(false),
            None => match running.order.kind {
                OrderKind::Send(header) => Ok(self.finish_send(&mut running, header, left)),
                _ => self.finish_copy(&mut running, left),
            },
        };
        let outcome = match outcome {
            Ok(true) if matches!(running.order.kind, OrderKind::Sum) => summed(&running.order),
            Ok(true) => OrderOutcome::Done { extents: 1, verify: Duration::ZERO },
            Ok(false) => OrderOutcome::Void,
            Err(error) => OrderOutcome::Failed(error),
        };
        self.engines[engine].node.order_done(running.order.id, outcome);
        engine
    }

    fn finish_send(&mut self, running: &mut Running, header: ChunkHeader, left: bool) -> bool {
        let order = &running.order;
        let mut payload = std::mem::take(&mut running.read);
        match left {
            true => payload.resize(header.len as usize, 0),
            false => payload.extend(order.region.read(&order.view, half(order)..order.part.end)),
        }
        let sums = match order.sums {
            true => payload.chunks(order.unit as usize).map(kvik_core::page_sum).collect(),
            false => Vec::new(),
        };
        let status = if left { STATUS_VOID } else { STATUS_WHOLE };
        if let Some(at) = running.link {
            let side = self.links[at].side(running.engine);
            let link = &mut self.links[at];
            // What is written stays as it was: other writers bring the same, and count on it.
            if link.flips && header.transfer.is_multiple_of(2) == (side == 1) {
                payload[0] ^= 1;
                link.flips = false;
            }
            link.channels.send(running.channel, side, Chunk { header, payload, sums, status, turn: 0 });
            self.busy.insert(at);
        }
        !left
    }

    fn finish_copy(&mut self, running: &mut Running, left: bool) -> Result<bool> {
        if left {
            return Ok(false);
        }
        self.copy(running, half(&running.order)..running.order.part.end);
        if let (OrderKind::Copy(CopyFrom::Peer(source)), Some(at)) = (&running.order.kind, running.link) {
            let link = &self.links[at];
            let other = &link.processes[1 - link.side(running.engine)];
            running.stale |= other.generation(source.slot) != source.generation;
        }
        match running.stale {
            true => Err(Error::new(Code::StaleGeneration, "stale")),
            false => Ok(true),
        }
    }
}

fn finish_place(order: &Order<Mem>, chunk: &Chunk) -> Result<bool> {
    if chunk.status != STATUS_WHOLE {
        return Ok(false);
    }
    let from = (half(order) - order.part.start) as usize;
    order.region.write(&order.view, half(order)..order.part.end, &chunk.payload[from..]);
    let placed = order.region.read(&order.view, order.part.clone());
    let sums: Vec<u64> = placed.chunks(order.unit as usize).map(kvik_core::page_sum).collect();
    match !order.sums || sums == chunk.sums {
        true => Ok(true),
        false => Err(Error::new(Code::ChecksumMismatch, "checksum")),
    }
}

/// The checksum of each unit, as its memory is now.
fn summed(order: &Order<Mem>) -> OrderOutcome {
    let bytes = order.region.read(&order.view, order.part.clone());
    let sums = bytes.chunks(order.unit as usize).map(kvik_core::page_sum).collect();
    OrderOutcome::Summed { sums, verify: Duration::ZERO }
}
