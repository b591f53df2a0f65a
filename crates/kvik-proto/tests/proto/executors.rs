//! Executors: they do half of a work request when it starts and half when it finishes, so that anything can come
//! between.

use crate::memory::Mem;
use crate::world::{Chunk, World};
use kvik_core::{Code, Error, Result};
use kvik_proto::{
    ChunkHeader, Claim, CopyFrom, Path, STATUS_VOID, STATUS_WHOLE, WorkKind, WorkOutcome, WorkRequest,
};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A work request that was begun.
pub struct Running {
    pub peer: usize,
    pub session: Option<u64>,
    pub request: WorkRequest<Mem>,
    pub chunk: Option<Chunk>,
    /// What was read of the first half.
    pub read: Vec<u8>,
    pub stale: bool,
}

impl World {
    fn is_cut(&self, running: &Running) -> bool {
        let link = self.links.iter().find(|link| Some(link.session) == running.session);
        link.is_some_and(|link| link.closed[usize::from(link.ends[1] == running.peer)])
    }

    fn half(request: &WorkRequest<Mem>) -> u64 {
        request.part.start + (request.part.end - request.part.start) / 2
    }

    pub fn start_send(&mut self, at: usize, side: usize) -> usize {
        let (peer, session) = (self.links[at].ends[side], self.links[at].session);
        if let Some(request) =
            self.peers[peer].node.session(session).next_of(Path::Channels, Claim::Next, self.now)
        {
            let read = request.region.read(&request.view, request.part.start..Self::half(&request));
            self.running.push(Running {
                peer,
                session: Some(session),
                request,
                chunk: None,
                read,
                stale: false,
            });
        }
        peer
    }

    pub fn start_copy(&mut self, peer: usize) -> usize {
        let request = self.peers[peer].node.next_copy(self.now);
        self.peers[peer].copies = request.is_some();
        if let Some(request) = request {
            let part = request.part.start..Self::half(&request);
            let mut running =
                Running { peer, session: None, request, chunk: None, read: Vec::new(), stale: false };
            self.copy(&mut running, part);
            self.running.push(running);
        }
        peer
    }

    /// Copies a part, if its source still is what it was.
    fn copy(&self, running: &mut Running, part: std::ops::Range<u64>) {
        let request = &running.request;
        let WorkKind::Copy(from) = &request.kind else { return };
        let bytes = match from {
            CopyFrom::Own(mem, view) => mem.read(view, part.clone()),
            CopyFrom::Peer(source) => {
                let other = &self.peers[1 - running.peer];
                running.stale |= other.fences[source.slot as usize] != source.generation;
                other.regions[&source.region].peek(&source.view, part.clone())
            }
        };
        if !running.stale {
            request.region.write(&request.view, part, &bytes);
        }
    }

    pub fn start_place(&mut self, at: usize, from: usize) -> usize {
        let pick = self.rng.below(self.links[at].chunks[from].len().min(4));
        let (to, session) = (self.links[at].ends[1 - from], self.links[at].session);
        let Some(chunk) = self.links[at].chunks[from].remove(pick) else { return to };
        if self.links[at].closed[1 - from] {
            return to;
        }
        if let Some(request) = self.peers[to].node.session(session).place(&chunk.header, self.now).unwrap() {
            let part = request.part.start..Self::half(&request);
            request.region.write(
                &request.view,
                part.clone(),
                &chunk.payload[..(part.end - part.start) as usize],
            );
            self.running.push(Running {
                peer: to,
                session: Some(session),
                request,
                chunk: Some(chunk),
                read: Vec::new(),
                stale: false,
            });
        }
        to
    }

    pub fn finish(&mut self, at: usize) -> usize {
        let mut running = self.running.swap_remove(at);
        let peer = running.peer;
        let left = running.request.stop.load(Ordering::Acquire) || self.is_cut(&running);
        let outcome = match running.chunk.take() {
            Some(chunk) if !left => finish_place(&running.request, &chunk),
            Some(_) => Ok(false),
            None => match running.request.kind {
                WorkKind::Send(header) => self.finish_send(&mut running, header, left),
                _ => self.finish_copy(&mut running, left),
            },
        };
        let outcome = match outcome {
            Ok(true) if matches!(running.request.kind, WorkKind::Sum) => summed(&running.request),
            Ok(true) => WorkOutcome::Done { extents: 1, verify: Duration::ZERO },
            Ok(false) => WorkOutcome::Void,
            Err(error) => WorkOutcome::Failed(error),
        };
        self.peers[peer].node.work_done(running.request.id, outcome);
        peer
    }

    fn finish_send(&mut self, running: &mut Running, header: ChunkHeader, left: bool) -> Result<bool> {
        let request = &running.request;
        let mut payload = std::mem::take(&mut running.read);
        let rest = Self::half(request)..request.part.end;
        match left {
            true => payload.resize(header.len as usize, 0),
            false => payload.extend(request.region.read(&request.view, rest)),
        }
        let sums = if request.sums {
            payload.chunks(request.unit as usize).map(kvik_core::page_sum).collect()
        } else {
            Vec::new()
        };
        let status = if left { STATUS_VOID } else { STATUS_WHOLE };
        let peer = running.peer;
        let link = self.link(header.session);
        let side = usize::from(link.ends[1] == peer);
        link.chunks[side].push_back(Chunk { header, payload, sums, status });
        Ok(!left)
    }

    fn finish_copy(&mut self, running: &mut Running, left: bool) -> Result<bool> {
        if left {
            return Ok(false);
        }
        self.copy(running, Self::half(&running.request)..running.request.part.end);
        if let WorkKind::Copy(CopyFrom::Peer(source)) = &running.request.kind {
            running.stale |= self.peers[1 - running.peer].fences[source.slot as usize] != source.generation;
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
    let half = World::half(request);
    let from = (half - request.part.start) as usize;
    request.region.write(&request.view, half..request.part.end, &chunk.payload[from..]);
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
