//! A NIC places the bytes: in pieces, in any order, after the grant was checked, while processes sleep, and from the
//! wire even after the initiator has died or has closed its endpoint. Only the target's own endpoint, closed, stops
//! them.

use crate::coverage::NIC;
use crate::executors::Running;
use crate::memory::Mem;
use crate::world::World;
use kvik_core::{Class, Code, Error};
use kvik_proto::{
    Batch, Check, Claim, FlowKey, NicAnswer, NicCall, NicCallKind, Nics, Op, Path, Ring, Source, WorkKind,
    WorkOutcome, WorkRequest,
};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// In the initiator's queue.
    Queued,
    /// On the wire to the owner; with its bytes when it is a write.
    Out(Vec<u8>),
    /// On the wire back.
    Back(Vec<u8>),
    Done,
    Lost,
}

/// An operation of an initiator's NIC.
pub struct Post {
    pub engine: usize,
    pub link: usize,
    /// None once its process or its endpoint is gone.
    pub request: Option<WorkRequest<Mem>>,
    /// It failed: it goes to another NIC once the owner has cut the connection that it took.
    pub mends: Option<u8>,
    /// What is on the wire takes a detour, until the adversary relents.
    pub late: bool,
    op: Op,
    source: Arc<Source>,
    owner: Mem,
    /// Where in the owner's ring the part lies, if it does, and where it begins in the stream.
    slot: Option<(Arc<Ring<Mem>>, u64, u64)>,
    key: FlowKey,
    /// All of it is compared: then, and only then, damage is sure to be found.
    compared: bool,
    pub pieces: Vec<(Range<u64>, Piece)>,
}

impl Post {
    /// Its process or endpoint is gone: what is on the wire stays there.
    pub fn orphan(&mut self) -> Option<WorkRequest<Mem>> {
        self.late = true;
        for (_, piece) in &mut self.pieces {
            if matches!(piece, Piece::Queued | Piece::Back(_)) {
                *piece = Piece::Lost;
            }
        }
        self.request.take()
    }

    /// The place of a part in the owner's ring.
    fn place(&self, part: &Range<u64>) -> Option<(&Mem, u64)> {
        let (ring, place, start) = self.slot.as_ref()?;
        assert!(
            ring.holder(*place) == Some(self.key),
            "P2: a NIC reaches a slot that is not lent to its transfer"
        );
        Some((ring.region(), place + part.start - start))
    }

    fn write_there(&self, part: Range<u64>, bytes: &[u8]) {
        match self.place(&part) {
            Some((ring, at)) => ring.arena.place(at, bytes),
            None => self.owner.write(&self.source.view, part, bytes),
        }
    }

    fn read_there(&self, part: Range<u64>) -> Vec<u8> {
        match self.place(&part) {
            Some((ring, at)) => ring.arena.take(at, part.end - part.start),
            None => self.owner.read(&self.source.view, part),
        }
    }

    pub fn moves(&self) -> bool {
        let waits = |piece: &Piece| matches!(piece, Piece::Queued | Piece::Out(_) | Piece::Back(_));
        let all_done = self.pieces.iter().all(|(_, piece)| *piece == Piece::Done);
        let all_done = all_done && self.request.is_some() && self.mends.is_none();
        self.pieces.iter().any(|(_, piece)| waits(piece)) || all_done
    }

    fn is_over(&self) -> bool {
        self.request.is_none() && !self.moves()
    }

    /// Whether it must stop, and nothing of it is on the wire, nor will be.
    fn is_left(&self) -> bool {
        let on_wire = |piece: &Piece| !matches!(piece, Piece::Queued | Piece::Done);
        let stops = |request: &WorkRequest<Mem>| request.stop.load(Ordering::Acquire);
        self.request.as_ref().is_some_and(stops)
            && self.mends.is_none()
            && !self.pieces.iter().any(|(_, piece)| on_wire(piece))
    }
}

impl World {
    pub fn start_post(&mut self, at: usize, side: usize) -> usize {
        let engine = self.links[at].ends[side];
        let now = self.engines[engine].now(self.now);
        let Some(session) = self.links[at].session else { return engine };
        let claim = [Claim::Only(Class::Handover), Claim::Only(Class::Bulk), Claim::Next][self.rng.below(3)];
        let most = Batch { requests: 1 + self.rng.below(4), bytes: u64::MAX };
        let (node, mut given) = (&mut self.engines[engine].node, Vec::new());
        node.session(session).next_batch(Path::OneSided, claim, most, now, &mut given);
        given.into_iter().for_each(|request| self.post(at, side, request));
        engine
    }

    fn post(&mut self, at: usize, side: usize, request: WorkRequest<Mem>) {
        let engine = self.links[at].ends[side];
        self.check_given(engine, &request, None);
        let WorkKind::Post(op, source, place) = &request.kind else { panic!("no post") };
        let (op, source, place) = (*op, source.clone(), *place);
        let begun = self.begun.binary_search_by_key(&request.region.lease, |begun| begun.lease);
        let begun = &self.begun[begun.expect("a post without a transfer")];
        let (ticket, compared) = (&self.tickets[begun.ticket], begun.check == Check::All);
        let owner = Mem { arena: ticket.arena.clone(), lease: ticket.lease };
        let exposed = self.links[at].processes[1 - side].arena(source.region);
        assert!(Rc::ptr_eq(&exposed, &owner.arena), "P5: another region was exposed than was granted");
        let ring = self.links[at].processes[1 - side].ring.clone();
        let slot = place.map(|place| (ring, place, request.part.start));
        let key = request.id.transfer();
        let third = (request.part.end - request.part.start).div_ceil(3);
        let cuts = request.part.clone().step_by(third as usize);
        let pieces = cuts.map(|from| (from..(from + third).min(request.part.end), Piece::Queued)).collect();
        self.posts.push(Post {
            engine,
            link: at,
            request: Some(request),
            mends: None,
            late: false,
            op,
            source,
            owner,
            slot,
            key,
            compared,
            pieces,
        });
    }

    /// A device of the initiator's still has something of an operation that was left: its end comes late.
    fn leave_to_a_device(&mut self, at: usize) -> usize {
        let post = &mut self.posts[at];
        let (engine, link) = (post.engine, post.link);
        if let Some(mut request) = post.orphan() {
            self.engines[engine].node.work_landed(&mut request.id);
            self.running.push(Running::new(engine, Some(link), request));
        }
        self.drop_posts();
        engine
    }

    /// One piece of an operation moves on.
    pub fn move_post(&mut self, at: usize) -> usize {
        let engine = self.posts[at].engine;
        if self.posts[at].is_left() && self.rng.once_in(2) {
            return self.leave_to_a_device(at);
        }
        let waiting: Vec<usize> = self.posts[at].pieces.iter().enumerate().filter_map(waits).collect();
        if let Some(pick) = waiting.get(self.rng.below(waiting.len())) {
            self.move_piece(at, *pick);
        }
        let post = &mut self.posts[at];
        let count = |what: Piece| post.pieces.iter().filter(|(_, piece)| *piece == what).count();
        // One that gave up knows nothing of what is on the wire.
        let done = WorkOutcome::Done { extents: 1, verify: Duration::ZERO };
        let (request, outcome) = if post.mends.is_some() {
            (None, done)
        } else if count(Piece::Done) == post.pieces.len() {
            self.report_delivered(engine);
            self.drop_posts();
            return engine;
        } else if count(Piece::Lost) > 0 && self.rng.once_in(3) {
            (post.orphan(), WorkOutcome::Failed(Error::new(Code::PeerLost, "the NIC gave up")))
        } else if count(Piece::Lost) > 0 && self.rng.once_in(2) {
            self.mend(at);
            return engine;
        } else {
            (None, done)
        };
        if let Some(request) = request {
            self.engines[engine].node.work_done(request.id, outcome);
        }
        self.drop_posts();
        engine
    }

    /// The NIC tells of all that is in place, of all sessions.
    fn report_delivered(&mut self, engine: usize) {
        let delivered = |post: &&mut Post| {
            let all = post.pieces.iter().all(|(_, piece)| *piece == Piece::Done);
            post.engine == engine && post.mends.is_none() && all
        };
        let requests = self.posts.iter_mut().filter(delivered).filter_map(|post| post.request.take());
        let done = |request: WorkRequest<Mem>| {
            (request.id, WorkOutcome::Done { extents: 1, verify: Duration::ZERO })
        };
        let mut ended = requests.map(done).collect();
        self.engines[engine].node.batch_done(&mut ended);
    }

    /// The NIC has heard that an operation failed, and asks for a connection that is free of it.
    fn mend(&mut self, at: usize) {
        let post = &mut self.posts[at];
        let (engine, link) = (post.engine, post.link);
        let Some(session) = self.links[link].session else { return };
        let number = self.rng.next() as u8 & 0x7F;
        post.mends = Some(number);
        // What had not left does not leave any more; what is on the wire may still land.
        for (_, piece) in post.pieces.iter_mut().filter(|(_, piece)| *piece == Piece::Queued) {
            *piece = Piece::Lost;
        }
        self.engines[engine].node.session(session).reach(connect(number, Vec::new()));
    }

    /// The peer wants a connection: what it has on the wire to this engine is cut.
    pub fn on_reach(&mut self, engine: usize, session: u64, call: &NicCall) {
        let link = self.by_session[&session];
        for post in self.posts.iter_mut().filter(|post| post.engine != engine && post.link == link) {
            for (_, piece) in post.pieces.iter_mut().filter(|(_, piece)| matches!(piece, Piece::Out(_))) {
                *piece = Piece::Lost;
            }
        }
        let NicCall { from, to, kind, .. } = *call;
        let answer = NicAnswer { from, to, kind, moved: false, outcome: Ok(Vec::new()) };
        self.engines[engine].node.session(session).answer_reach(answer);
        self.drop_posts();
    }

    /// It was: what failed goes to another NIC.
    pub fn on_reached(&mut self, engine: usize, session: u64, number: u8) {
        let link = self.by_session[&session];
        let mends =
            |post: &&mut Post| post.engine == engine && post.link == link && post.mends == Some(number);
        let requests = self.posts.iter_mut().filter(mends).filter_map(Post::orphan);
        let mut ended = requests.map(|request| (request.id, WorkOutcome::Back)).collect();
        self.engines[engine].node.batch_done(&mut ended);
        self.drop_posts();
    }

    fn move_piece(&mut self, at: usize, pick: usize) {
        let link = &self.links[self.posts[at].link];
        let owner_side = 1 - link.side(self.posts[at].engine);
        let stopped = link.fenced[owner_side] || link.gone[owner_side];
        let (state, faults) = (self.state_of(self.posts[at].link, owner_side), link.faults);
        let post = &mut self.posts[at];
        let (part, piece) = post.pieces[pick].clone();
        post.pieces[pick].1 = match (piece, post.op, &post.request) {
            (Piece::Queued, Op::Write, Some(request)) => Piece::Out(request.region.read(&request.view, part)),
            (Piece::Queued, _, Some(_)) => Piece::Out(Vec::new()),
            (Piece::Out(_), _, _) if stopped => Piece::Lost,
            (Piece::Out(bytes), Op::Write, _) => {
                self.coverage.hit(state, NIC, faults);
                post.write_there(part, &bytes);
                Piece::Done
            }
            (Piece::Out(_), _, request) => {
                self.coverage.hit(state, NIC, faults);
                let bytes = post.read_there(part);
                if request.is_some() { Piece::Back(bytes) } else { Piece::Lost }
            }
            (Piece::Back(mut bytes), _, Some(request)) => {
                if post.compared && std::mem::take(&mut self.links[post.link].flips) {
                    bytes[0] ^= 1;
                }
                request.region.write(&request.view, part, &bytes);
                Piece::Done
            }
            _ => Piece::Lost,
        };
    }

    /// An engine closes its endpoint of a session, and says so.
    pub fn fence(&mut self, at: usize) -> usize {
        let (engine, session) = self.fences.swap_remove(at);
        let link = self.by_session[&session];
        let side = self.links[link].side(engine);
        self.links[link].fenced[side] = true;
        let mut ended = Vec::new();
        for post in self.posts.iter_mut().filter(|post| post.engine == engine && post.link == link) {
            let Some(request) = post.orphan() else { continue };
            let outcome = match self.rng.once_in(2) {
                true => WorkOutcome::Void,
                false => WorkOutcome::Failed(Error::new(Code::PeerLost, "flushed")),
            };
            ended.push((request.id, outcome));
        }
        self.engines[engine].node.batch_done(&mut ended);
        self.engines[engine].node.session(session).fenced();
        self.engines[engine].node.tell_nics(&Nics::default());
        self.drop_posts();
        engine
    }

    pub fn drop_posts(&mut self) {
        self.posts.retain(|post| !post.is_over());
    }
}

fn waits((at, (_, piece)): (usize, &(Range<u64>, Piece))) -> Option<usize> {
    matches!(piece, Piece::Queued | Piece::Out(_) | Piece::Back(_)).then_some(at)
}

/// A call for a connection to the peer's first NIC.
pub fn connect(from: u8, address: Vec<u8>) -> NicCall {
    NicCall { from, to: 0, kind: NicCallKind::Connect, address }
}
