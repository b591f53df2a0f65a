//! Executors: they do half of a work request when it starts and half when it finishes, so that anything can come
//! between.

use crate::channels::pick;
use crate::coverage::{CHUNK, Fault};
use crate::link::Chunk;
use crate::memory::Mem;
use crate::world::World;
use kvik_core::{Class, Code, Error, Result};
use kvik_proto::{
    Batch, ChunkHeader, Claim, CopyFrom, Op, Path, STATUS_VOID, STATUS_WHOLE, WorkKind, WorkOutcome,
    WorkRequest,
};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A work request that was begun.
pub struct Running {
    pub engine: usize,
    pub link: Option<usize>,
    /// Over which of its channels it sends.
    channel: usize,
    pub request: WorkRequest<Mem>,
    pub chunk: Option<Chunk>,
    /// What was read of the first half.
    read: Vec<u8>,
    stale: bool,
    /// Who waits for it was told that its device does not come to its end.
    stuck: bool,
}

impl Running {
    pub fn new(engine: usize, link: Option<usize>, request: WorkRequest<Mem>) -> Running {
        Running {
            engine,
            link,
            channel: 0,
            request,
            chunk: None,
            read: Vec::new(),
            stale: false,
            stuck: false,
        }
    }
}

fn half(request: &WorkRequest<Mem>) -> u64 {
    request.part.start + (request.part.end - request.part.start) / 2
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
        let claims = [Claim::Next, Claim::Only(Class::Handover), Claim::Only(Class::Bulk), Claim::Beside];
        let claim = claims[self.rng.below(4)];
        let most = Batch { requests: 1 + self.rng.below(3), bytes: u64::MAX };
        let (node, mut given) = (&mut self.engines[engine].node, Vec::new());
        node.session(session).next_batch(Path::Channels, claim, most, now, &mut given);
        for request in given {
            let WorkKind::Send(header) = &request.kind else { panic!("no work request to send") };
            self.check_given(engine, &request, Some((session, header.transfer)));
            let read = request.region.read(&request.view, request.part.start..half(&request));
            self.running.push(Running { channel, read, ..Running::new(engine, Some(at), request) });
        }
        engine
    }

    pub fn start_copy(&mut self, engine: usize) -> usize {
        let now = self.engines[engine].now(self.now);
        let request = self.engines[engine].node.next_copy(now);
        self.engines[engine].copies = request.is_some();
        if let Some(request) = request {
            self.check_given(engine, &request, None);
            let link = self.by_session.get(&request.id.session()).copied();
            let part = request.part.start..half(&request);
            let mut running = Running::new(engine, link, request);
            self.copy(&mut running, part);
            self.running.push(running);
        }
        engine
    }

    /// Copies a part, if its source still is what it was.
    fn copy(&self, running: &mut Running, part: std::ops::Range<u64>) {
        let request = &running.request;
        if let WorkKind::Stage(op, ring, place) = &request.kind {
            return self.stage(request, part, (*op, ring, *place));
        }
        let WorkKind::Copy(from) = &request.kind else { return };
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
            request.region.write(&request.view, part, &bytes);
        }
    }

    /// Copies a part between the owner's pages and a slot of its ring.
    fn stage(
        &self,
        request: &WorkRequest<Mem>,
        part: std::ops::Range<u64>,
        (op, ring, place): (Op, &Mem, u64),
    ) {
        let engine = self.by_session.get(&request.id.session()).map(|at| &self.links[*at]);
        let rings = engine.iter().flat_map(|link| &link.processes).map(|process| &process.ring);
        let mut ours = rings.filter(|other| Rc::ptr_eq(&other.region().arena, &ring.arena));
        assert!(
            ours.next().is_some_and(|ring| ring.holder(place) == Some(request.id.transfer())),
            "P2: a slot is copied that is not the transfer's"
        );
        let at = place + part.start - request.part.start;
        match op {
            Op::Write => {
                let bytes = ring.arena.take(at, part.end - part.start);
                request.region.write(&request.view, part, &bytes);
            }
            _ => ring.arena.place(at, &request.region.read(&request.view, part)),
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
        match self.engines[to].node.session(session).place(&chunk.header, now) {
            Ok(Some(request)) => {
                assert!(!dead, "P6: a chunk of a dead session was taken");
                assert_eq!(chunk.header.session, session, "P8: a chunk of another session was taken");
                self.check_given(to, &request, Some((session, chunk.header.transfer)));
                let part = request.part.start..half(&request);
                let bytes = &chunk.payload[..(part.end - part.start) as usize];
                request.region.write(&request.view, part, bytes);
                self.running.push(Running { chunk: Some(chunk), ..Running::new(to, Some(at), request) });
            }
            Ok(None) => assert_eq!(chunk.header.session, session, "a chunk of another session was let pass"),
            Err(error) => {
                assert!(
                    self.links[at].faults & Fault::Duplicate.bit() != 0,
                    "a chunk was refused though nothing was doubled: {error}"
                );
                self.engines[to].node.session(session).close(error);
            }
        }
        to
    }

    /// A device does not come to the end of what was left, for now.
    fn stick(&mut self, at: usize) -> Option<usize> {
        let running = &mut self.running[at];
        if running.stuck || !running.request.stop.load(Ordering::Acquire) || !self.devices.once_in(8) {
            return None;
        }
        running.stuck = true;
        let (engine, id) = (running.engine, running.request.id);
        let error = Error::new(Code::PagesQuarantined, "a device has its pages in use");
        self.engines[engine].node.work_stuck(id, error);
        Some(engine)
    }

    pub fn finish(&mut self, at: usize) -> usize {
        if let Some(engine) = self.stick(at) {
            return engine;
        }
        let mut running = self.running.swap_remove(at);
        let engine = running.engine;
        let left = running.request.stop.load(Ordering::Acquire) || self.is_cut(&running);
        let outcome = match running.chunk.take() {
            Some(chunk) if !left => finish_place(&running.request, &chunk),
            Some(_) => Ok(false),
            None => match running.request.kind {
                WorkKind::Send(header) => Ok(self.finish_send(&mut running, header, left)),
                _ => self.finish_copy(&mut running, left),
            },
        };
        let outcome = match outcome {
            Ok(true) if matches!(running.request.kind, WorkKind::Sum) => summed(&running.request),
            Ok(true) => WorkOutcome::Done { extents: 1, verify: Duration::ZERO },
            Ok(false) => WorkOutcome::Void,
            Err(error) => WorkOutcome::Failed(error),
        };
        self.engines[engine].node.work_done(running.request.id, outcome);
        engine
    }

    fn finish_send(&mut self, running: &mut Running, header: ChunkHeader, left: bool) -> bool {
        let request = &running.request;
        let mut payload = std::mem::take(&mut running.read);
        match left {
            true => payload.resize(header.len as usize, 0),
            false => payload.extend(request.region.read(&request.view, half(request)..request.part.end)),
        }
        let sums = match request.sums {
            true => payload.chunks(request.unit as usize).map(kvik_core::page_sum).collect(),
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
        self.copy(running, half(&running.request)..running.request.part.end);
        if let (WorkKind::Copy(CopyFrom::Peer(source)), Some(at)) = (&running.request.kind, running.link) {
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

fn finish_place(request: &WorkRequest<Mem>, chunk: &Chunk) -> Result<bool> {
    if chunk.status != STATUS_WHOLE {
        return Ok(false);
    }
    let from = (half(request) - request.part.start) as usize;
    request.region.write(&request.view, half(request)..request.part.end, &chunk.payload[from..]);
    let placed = request.region.read(&request.view, request.part.clone());
    let sums: Vec<u64> = placed.chunks(request.unit as usize).map(kvik_core::page_sum).collect();
    match !request.sums || sums == chunk.sums {
        true => Ok(true),
        false => Err(Error::new(Code::ChecksumMismatch, "checksum")),
    }
}

/// The checksum of each unit, as its memory is now.
fn summed(request: &WorkRequest<Mem>) -> WorkOutcome {
    let bytes = request.region.read(&request.view, request.part.clone());
    let sums = bytes.chunks(request.unit as usize).map(kvik_core::page_sum).collect();
    WorkOutcome::Summed { sums, verify: Duration::ZERO }
}
