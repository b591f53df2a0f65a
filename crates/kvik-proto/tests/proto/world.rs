//! Engines without machines: nodes, pipes, channels, executors and a clock, all of them in one thread and all of
//! them moved by hand or by a seeded die.

use crate::executors::Running;
use crate::memory::{Mem, Rng};
use kvik_core::{
    Class, Code, EngineId, Error, GrantId, GrantState, Incarnation, RegionId, Result, Right, Use, View,
};
use kvik_proto::*;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

pub const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// One engine.
pub struct Peer {
    pub node: Node<Mem>,
    pub identity: Identity,
    pub regions: HashMap<RegionId, Mem>,
    /// The generation of each fence slot.
    pub fences: Vec<u64>,
    pub finished: HashMap<FlowKey, Finished>,
    pub ended: HashMap<GrantId, GrantState>,
    pub downs: Vec<(u64, Error)>,
    pub asked_for_channels: usize,
    pub served: Vec<Served>,
    /// Notifications that came, how those that were sent ended, and what was heard of the peers' lives.
    pub notes: VecDeque<Notification>,
    pub note_ends: HashMap<(u64, Topic, u64), Result<()>>,
    pub lives: Vec<&'static str>,
    pub asked_to_fence: Vec<u64>,
    /// Its executors do not finish what they have begun.
    pub hold: bool,
    /// The process does not run.
    pub asleep: bool,
    pub copies: bool,
    transfers: HashMap<FlowKey, Mem>,
    grants: HashMap<GrantId, Mem>,
}

/// A chunk on its way.
pub struct Chunk {
    pub header: ChunkHeader,
    pub payload: Vec<u8>,
    pub sums: Vec<u64>,
    pub status: u64,
}

/// One session's connections. Direction 0 is from the opener.
pub struct Link {
    pub session: u64,
    pub ends: [usize; 2],
    pub control: [VecDeque<u8>; 2],
    pub chunks: [VecDeque<Chunk>; 2],
    /// Which ends have cut it.
    pub closed: [bool; 2],
    /// Nothing arrives any more, and nobody is told.
    pub lost: bool,
}

pub enum Action {
    Bytes(usize, usize),
    Chunk(usize, usize),
    Eof(usize, usize),
    Send(usize, usize),
    Copy(usize),
    Finish(usize),
}

pub struct World {
    pub now: Duration,
    pub peers: Vec<Peer>,
    pub links: Vec<Link>,
    pub rng: Rng,
    pub running: Vec<Running>,
    serial: u8,
    layouts: HashMap<GrantId, [u8; 8]>,
}

pub fn identity(number: u8) -> Identity {
    Identity { engine: EngineId([number; 16]), incarnation: Incarnation(number.into()) }
}

pub fn local(number: u8, secret: Option<&[u8]>) -> Local {
    Local { identity: identity(number), secret: Secret::new(secret), facts: Facts::default() }
}

/// Shakes hands over a perfect wire: what the opener and the listener hold then.
pub fn shake(
    opener: Local,
    listener: Local,
    want: Option<Identity>,
    nonce: u8,
) -> (Result<Established>, Result<Established>) {
    let (mut left, mut to_right) = Handshake::open(opener, [nonce; 32], want);
    let mut right = Handshake::listen(listener, [nonce ^ 0x55; 32]);
    let (mut to_left, mut results) = (Vec::new(), (None, None));
    for _ in 0..4 {
        take(right.receive(&mut to_right, &mut to_left), &mut results.1);
        take(left.receive(&mut to_left, &mut to_right), &mut results.0);
    }
    let never = || Err(Error::new(Code::PeerLost, "never"));
    (results.0.unwrap_or_else(never), results.1.unwrap_or_else(never))
}

fn take(result: Result<Option<Greeting>>, into: &mut Option<Result<Established>>) {
    match result {
        Ok(Some(Greeting::Control(established))) => drop(into.get_or_insert(Ok(established))),
        Ok(_) => {}
        Err(error) => drop(into.get_or_insert(Err(error))),
    }
}

impl World {
    pub fn new(peers: u8, seed: u64) -> World {
        let now = Duration::from_secs(1000);
        let peer = |number| Peer {
            node: Node::new(identity(number), Timing::default(), now),
            identity: identity(number),
            regions: HashMap::new(),
            fences: vec![0],
            finished: HashMap::new(),
            ended: HashMap::new(),
            downs: Vec::new(),
            asked_for_channels: 0,
            served: Vec::new(),
            notes: VecDeque::new(),
            note_ends: HashMap::new(),
            lives: Vec::new(),
            asked_to_fence: Vec::new(),
            hold: false,
            asleep: false,
            copies: false,
            transfers: HashMap::new(),
            grants: HashMap::new(),
        };
        let peers = (1..=peers).map(peer).collect();
        World {
            now,
            peers,
            links: Vec::new(),
            rng: Rng(seed),
            running: Vec::new(),
            serial: 0,
            layouts: HashMap::new(),
        }
    }

    /// Two engines with a session that the first one opened.
    pub fn pair(seed: u64) -> (World, u64) {
        let mut world = World::new(2, seed);
        let session = world.connect(0, 1);
        (world, session)
    }

    /// Two engines with a session that the first one opened, and a one-sided link.
    pub fn one_sided_pair(seed: u64) -> (World, u64) {
        let mut world = World::new(2, seed);
        let session = world.connect_with(0, 1, [true; 2]);
        (world, session)
    }

    /// A handshake that both sides have ended, of which neither node knows yet.
    pub fn handshake(&mut self, opener: usize, listener: usize) -> (Established, Established) {
        self.serial += 1;
        let locals = [opener, listener].map(|peer| local(peer as u8 + 1, None));
        let [left, right] = locals;
        let (left, right) = shake(left, right, Some(self.peers[listener].identity), self.serial);
        let (left, right) = (left.unwrap(), right.unwrap());
        self.links.push(Link {
            session: left.session,
            ends: [opener, listener],
            control: Default::default(),
            chunks: Default::default(),
            closed: [false; 2],
            lost: false,
        });
        (left, right)
    }

    pub fn connect(&mut self, opener: usize, listener: usize) -> u64 {
        self.connect_with(opener, listener, [false; 2])
    }

    /// A session of which the opener and the listener have a one-sided link, or have none.
    pub fn connect_with(&mut self, opener: usize, listener: usize, one_sided: [bool; 2]) -> u64 {
        let (mut left, mut right) = self.handshake(opener, listener);
        [left.one_sided, right.one_sided] = one_sided;
        let session = left.session;
        self.peers[listener].node.add_session(right, self.now);
        self.peers[opener].node.add_session(left, self.now);
        session
    }

    pub fn link(&mut self, session: u64) -> &mut Link {
        self.links.iter_mut().find(|link| link.session == session).unwrap()
    }

    // ---- memory, grants, transfers ----

    pub fn region(&mut self, peer: usize, mem: &Mem) -> RegionId {
        let id = RegionId(self.peers[peer].regions.len() as u32 + 1);
        self.peers[peer].regions.insert(id, mem.clone());
        id
    }

    pub fn slot(&mut self, peer: usize) -> (u32, u64) {
        let fences = &mut self.peers[peer].fences;
        fences.push(7);
        (fences.len() as u32 - 1, 7)
    }

    pub fn offer(&mut self, peer: usize, mem: &Mem, view: &View, right: Right, uses: Use) -> Offer<Mem> {
        let (slot, generation) = self.slot(peer);
        Offer {
            region: mem.clone(),
            region_id: self.region(peer, mem),
            view: view.clone(),
            content: None,
            right,
            uses,
            expires: self.now + ms(120_000),
            latest: self.now + ms(600_000),
            slot,
            generation,
            keys: Arc::default(),
            ring: None,
            closed: Default::default(),
        }
    }

    pub fn issue(&mut self, peer: usize, id: GrantId, offer: Offer<Mem>) {
        self.note_offer(peer, id, &offer);
        self.peers[peer].node.grants().give(id, offer, self.now).unwrap();
        self.pump(peer);
    }

    /// Over pages that are still in use.
    pub fn issue_later(&mut self, peer: usize, id: GrantId, offer: Offer<Mem>) {
        self.note_offer(peer, id, &offer);
        self.peers[peer].node.grants().give_later(id, offer, self.now).unwrap();
        self.pump(peer);
    }

    fn note_offer(&mut self, peer: usize, id: GrantId, offer: &Offer<Mem>) {
        self.layouts.insert(id, offer.view.layout().digest());
        self.peers[peer].grants.insert(id, offer.region.clone());
    }

    /// What the pages waited for has ended.
    pub fn ready(&mut self, peer: usize, id: GrantId) {
        self.peers[peer].node.grants().ready(id, self.now);
        self.pump(peer);
    }

    pub fn grant(&mut self, peer: usize, mem: &Mem, view: &View, right: Right, uses: Use) -> GrantId {
        let (id, offer) = (self.grant_id(), self.offer(peer, mem, view, right, uses));
        self.issue(peer, id, offer);
        id
    }

    pub fn grant_id(&mut self) -> GrantId {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.rng.next().to_le_bytes());
        GrantId(bytes)
    }

    /// A transfer of all pages of a grant, with checksums, confirmed, within 30 s.
    pub fn open(
        &mut self,
        peer: usize,
        grant: GrantId,
        op: Op,
        path: Path,
        side: Option<(&Mem, &View)>,
    ) -> Open<Mem> {
        // A grant that was not given yet is given later over the layout that this side has.
        let own = side.map(|(_, view)| view.layout().digest());
        let side = side.map(|(mem, view)| Side {
            region: mem.clone(),
            region_id: self.region(peer, mem),
            view: view.clone(),
            fence: (op == Op::Write && path == Path::Memory).then(|| self.slot(peer)),
        });
        Open {
            grant,
            layout: self.layouts.get(&grant).copied().or(own).unwrap_or_default(),
            content: None,
            op,
            class: Class::Handover,
            path,
            sums: true,
            check: Check::No,
            confirm: true,
            readers: 1,
            deadline: self.now + ms(30_000),
            chunk: 8 << 10,
            side,
            select: Select::default(),
            extend: ms(0),
        }
    }

    pub fn begin(&mut self, peer: usize, session: u64, open: Open<Mem>) -> FlowKey {
        self.try_begin(peer, session, open).unwrap()
    }

    pub fn try_begin(&mut self, peer: usize, session: u64, open: Open<Mem>) -> Result<FlowKey> {
        let mem = open.side.as_ref().map(|side| side.region.clone());
        let key = match session {
            OWN_SESSION => self.peers[peer].node.begin_own(open, self.now),
            _ => self.peers[peer].node.session(session).begin(open, self.now),
        }?;
        if let Some(mem) = mem {
            self.peers[peer].transfers.insert(key, mem);
        }
        self.pump(peer);
        Ok(key)
    }

    /// Begins, lets all happen that can without time passing, and gives the outcome.
    pub fn transfer(&mut self, peer: usize, session: u64, open: Open<Mem>) -> Result<()> {
        let key = self.begin(peer, session, open);
        self.settle();
        self.outcome(peer, key).unwrap_or_else(|| panic!("{key:?} has not ended"))
    }

    pub fn outcome(&self, peer: usize, key: FlowKey) -> Option<Result<()>> {
        self.peers[peer].finished.get(&key).map(|finished| finished.outcome.clone())
    }

    pub fn code(&self, peer: usize, key: FlowKey) -> Option<Code> {
        self.outcome(peer, key).and_then(Result::err).map(|error| error.code)
    }

    pub fn end_grant(&mut self, peer: usize, id: GrantId, state: GrantState) {
        self.peers[peer].node.grants().end(id, state);
        self.pump(peer);
    }

    pub fn cancel(&mut self, peer: usize, key: FlowKey) {
        self.peers[peer].node.cancel(key, Error::new(Code::Cancelled, "cancelled"));
        self.pump(peer);
    }

    pub fn cut(&mut self, peer: usize, session: u64) {
        self.peers[peer].node.session(session).close(Error::new(Code::PeerLost, "cut"));
        self.pump(peer);
    }

    // ---- what happens ----

    /// Everything that can happen now.
    pub fn actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        for (at, link) in self.links.iter().enumerate() {
            for side in 0..2 {
                let (from, to) = (side, &self.peers[link.ends[1 - side]]);
                let awake = !self.peers[link.ends[side]].asleep;
                if awake && !link.closed[side] && self.peers[link.ends[side]].node.wants_to_send(link.session)
                {
                    actions.push(Action::Send(at, side));
                }
                if link.lost || to.asleep {
                    continue;
                }
                if !link.control[from].is_empty() {
                    actions.push(Action::Bytes(at, from));
                } else if link.closed[from] && !link.closed[1 - from] {
                    actions.push(Action::Eof(at, from));
                }
                if !link.chunks[from].is_empty() {
                    actions.push(Action::Chunk(at, from));
                }
            }
        }
        let copiers = self.peers.iter().enumerate().filter(|(_, peer)| peer.copies && !peer.asleep);
        actions.extend(copiers.map(|(at, _)| Action::Copy(at)));
        let works = |running: &Running| !self.peers[running.peer].hold && !self.peers[running.peer].asleep;
        let running = self.running.iter().enumerate().filter(|(_, running)| works(running));
        actions.extend(running.map(|(at, _)| Action::Finish(at)));
        actions
    }

    /// Lets one thing happen. Bytes come in pieces of at most `piece`.
    pub fn act(&mut self, action: Action, piece: usize) {
        let peer = match action {
            Action::Bytes(at, from) => self.deliver(at, from, piece),
            Action::Chunk(at, from) => self.start_place(at, from),
            Action::Eof(at, from) => {
                let (to, session) = (self.links[at].ends[1 - from], self.links[at].session);
                let error = Error::new(Code::PeerLost, "the connection broke");
                self.peers[to].node.session(session).close(error);
                self.links[at].closed[1 - from] = true;
                to
            }
            Action::Send(at, side) => self.start_send(at, side),
            Action::Copy(peer) => self.start_copy(peer),
            Action::Finish(at) => self.finish(at),
        };
        self.pump(peer);
    }

    /// Lets everything happen, in a random order, that can without time passing.
    pub fn settle(&mut self) {
        for _ in 0..200_000 {
            let mut actions = self.actions();
            if actions.is_empty() {
                return;
            }
            let action = actions.swap_remove(self.rng.below(actions.len()));
            let piece = 1 + self.rng.below(400);
            self.act(action, piece);
        }
        panic!("the world does not come to rest");
    }

    /// Lets time pass, with all that happens in it.
    pub fn advance(&mut self, by: Duration) {
        let end = self.now + by;
        loop {
            self.settle();
            let awake = self.peers.iter().filter(|peer| !peer.asleep);
            let next = awake.filter_map(|peer| peer.node.next_timeout()).min().filter(|at| *at <= end);
            self.now = next.unwrap_or(end).max(self.now);
            self.tick();
            if next.is_none() {
                return self.settle();
            }
        }
    }

    pub fn tick(&mut self) {
        for at in 0..self.peers.len() {
            if !self.peers[at].asleep {
                self.peers[at].node.tick(self.now);
                self.pump(at);
            }
        }
    }

    fn deliver(&mut self, at: usize, from: usize, piece: usize) -> usize {
        let link = &mut self.links[at];
        let take = piece.min(link.control[from].len());
        let bytes: Vec<u8> = link.control[from].drain(..take).collect();
        let (to, session) = (link.ends[1 - from], link.session);
        self.peers[to].node.session(session).receive(&bytes, self.now);
        to
    }

    /// Takes what a node has to say.
    pub fn pump(&mut self, at: usize) {
        while let Some(event) = self.peers[at].node.next_event() {
            self.on_event(at, event);
        }
        for link in &mut self.links {
            let Some(side) = link.ends.iter().position(|end| *end == at) else { continue };
            let mut output = Vec::new();
            self.peers[at].node.session(link.session).take_output(&mut output);
            link.control[side].extend(output);
        }
    }

    fn on_event(&mut self, at: usize, event: Event) {
        match event {
            Event::Finished(finished) => {
                let told = finished.outcome.as_ref().err().map(|error| error.code);
                // Whoever is told that pages are held does not take them for free.
                if let Some(mem) = self.peers[at].transfers.remove(&finished.key)
                    && told != Some(Code::PagesQuarantined)
                {
                    self.give_back(at, &mem);
                }
                let before = self.peers[at].finished.insert(finished.key, finished);
                assert!(before.is_none(), "a transfer ended twice");
            }
            Event::GrantEnded(id, state) => {
                let mem = self.peers[at].grants.remove(&id).expect("a grant ended twice");
                self.give_back(at, &mem);
                self.peers[at].ended.insert(id, state);
            }
            Event::Raise(slot) => self.peers[at].fences[slot as usize] += 1,
            Event::SessionDown(session, error) => {
                let link = self.link(session);
                let side = usize::from(link.ends[1] == at);
                link.closed[side] = true;
                link.control[1 - side].clear();
                self.peers[at].downs.push((session, error));
            }
            Event::Copy => self.peers[at].copies = true,
            Event::Served(served) => self.peers[at].served.push(served),
            Event::OpenChannels(_) => self.peers[at].asked_for_channels += 1,
            Event::Notified(note) => self.peers[at].notes.push_back(note),
            Event::NoteEnded { session, topic, number, outcome } => {
                let before = self.peers[at].note_ends.insert((session, topic, number), outcome);
                assert!(before.is_none(), "a notification ended twice");
            }
            Event::Silent(_) => self.peers[at].lives.push("silent"),
            Event::Heard(_) => self.peers[at].lives.push("heard"),
            Event::Goodbye(_) => self.peers[at].lives.push("goodbye"),
            Event::Left(_) => self.peers[at].lives.push("left"),
            Event::Ending(id, pages) => assert!(pages > 0 && self.peers[at].grants.contains_key(&id)),
            Event::Fence(session) => self.peers[at].asked_to_fence.push(session),
            Event::Send(_) | Event::Stop(_) | Event::NoteRoom(_) | Event::Post(_) | Event::NicsMoved(_) => {}
            Event::Reach(..) | Event::Reached(..) | Event::Exposed => {}
        }
    }

    /// The caller is told that nothing touches its memory.
    fn give_back(&mut self, at: usize, mem: &Mem) {
        let peer = &self.peers[at];
        let used = peer.transfers.values().chain(peer.grants.values()).any(|other| other.is(mem));
        if used {
            return;
        }
        for running in self.running.iter().filter(|running| running.peer == at) {
            assert!(
                !running.request.region.is(mem),
                "a work request is open on memory that was reported to be free"
            );
            if let WorkKind::Copy(CopyFrom::Own(from, _)) = &running.request.kind {
                assert!(!from.is(mem), "a work request reads memory that was reported to be free");
            }
        }
        mem.set_free();
    }

    /// Nothing goes on, nobody waits, and nothing is left to remember.
    pub fn assert_quiet(&mut self) {
        assert!(self.running.is_empty());
        for (at, peer) in self.peers.iter().enumerate() {
            assert!(peer.node.is_quiet(), "engine {at} is not quiet");
            assert!(peer.transfers.is_empty(), "engine {at} has transfers that never ended");
        }
    }

    /// Ends everything; no timer may be left then.
    pub fn assert_no_leak(&mut self) {
        for at in 0..self.peers.len() {
            self.peers[at].node.grants().end_all();
            for session in self.peers[at].node.sessions() {
                self.cut(at, session);
            }
            self.pump(at);
        }
        self.advance(ms(3000));
        for (at, peer) in self.peers.iter().enumerate() {
            assert!(peer.grants.is_empty(), "engine {at} has grants that never ended");
            assert_eq!(peer.node.open_grants(), 0);
            assert_eq!(peer.node.next_timeout(), None, "engine {at} has a timer for nothing");
        }
    }
}

/// A layout on the heap.
pub fn layout(pages: u32, page_bytes: u64) -> Arc<kvik_core::Layout> {
    Arc::new(kvik_core::Layout::contiguous(pages, page_bytes).unwrap())
}
