//! Engines, links, NICs and what happens between them, all in one thread and moved by a seeded die.

use crate::channels::Step;
use crate::coverage::{Coverage, Fault, State};
use crate::engine::{Engine, ms};
use crate::executors::Running;
use crate::link::Link;
use crate::memory::{Arena, Mem, Rng};
use crate::nic::Post;
use crate::notes::NOTED;
use kvik_core::{Class, Code, Content, Error, GrantId, GrantState, Right, Use, View};
use kvik_proto::*;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::time::Duration;

/// A grant, as whoever has its ticket knows it, and as its owner does.
pub struct Ticket {
    pub owner: usize,
    pub identity: Identity,
    pub id: GrantId,
    pub right: Right,
    pub uses: Use,
    /// What its pages hold; writers bring what the next seed gives.
    pub seed: u64,
    pub arena: Rc<Arena>,
    pub view: View,
    /// What its owner says that the pages hold.
    pub content: Option<Content>,
    pub lease: u64,
    pub expires: Duration,
    pub extended: bool,
    pub issued: bool,
    /// What its pages waited for has ended.
    pub ready: bool,
    /// Its pages are given again, with other content, as soon as they are free.
    pub again: bool,
    pub state: Option<GrantState>,
    /// What its region held when it ended.
    pub last: Option<Vec<u8>>,
}

impl Ticket {
    /// Its pages are its grant's alone from now on: whoever touched them before broke a promise.
    pub fn make_ready(&mut self) {
        let per = self.view.parts();
        self.arena.lease(self.lease, self.view.pages().iter().map(|id| id / per).collect());
        self.ready = true;
    }
}

/// A transfer.
pub struct Begun {
    pub engine: usize,
    pub ticket: usize,
    pub key: FlowKey,
    pub op: Op,
    pub class: Class,
    pub lease: u64,
    pub arena: Option<Rc<Arena>>,
    pub view: Option<View>,
    pub theirs: Option<View>,
    pub deadline: Duration,
    pub confirm: bool,
    pub check: Check,
    /// It stated what the grant holds, and asked for it in a way that the owner takes.
    pub fits: bool,
    /// The grant had ended like this before it began.
    pub hopeless: Option<GrantState>,
    pub outcome: Option<Result<(), Code>>,
}

pub enum Action {
    Bytes(usize, usize),
    Chunk(usize, usize, usize),
    Greet(usize, usize, usize),
    Hangup(usize, usize, usize),
    Eof(usize, usize),
    Send(usize, usize),
    Post(usize, usize),
    Copy(usize),
    Finish(usize),
    Nic(usize),
    Fence(usize),
    Take(usize),
    /// One of an engine's flows is stopped, whose grant has ended.
    Stop(usize, usize),
}

pub struct World {
    pub now: Duration,
    pub engines: Vec<Engine>,
    pub links: Vec<Link>,
    pub by_session: HashMap<u64, usize>,
    /// Links in which something may happen.
    pub busy: BTreeSet<usize>,
    pub running: Vec<Running>,
    pub posts: Vec<Post>,
    /// Endpoints that are to be closed: engine and session.
    pub fences: Vec<(usize, u64)>,
    /// Nobody closes one for now.
    pub fences_hang: bool,
    pub tickets: Vec<Ticket>,
    pub by_grant: HashMap<GrantId, usize>,
    pub begun: Vec<Begun>,
    pub regrants: usize,
    /// Memory whose owner was told that a device still has something of it: engine and lease.
    pub kept: Vec<(usize, Rc<Arena>, u64)>,
    pub rng: Rng,
    /// What devices do.
    pub devices: Rng,
    pub coverage: Coverage,
    leases: u64,
}

impl World {
    pub fn new(engines: usize, seed: u64) -> World {
        let now = Duration::from_secs(1000);
        World {
            now,
            engines: (0..engines).map(|number| Engine::new(number, 1, now)).collect(),
            links: Vec::new(),
            by_session: HashMap::new(),
            busy: BTreeSet::new(),
            running: Vec::new(),
            posts: Vec::new(),
            fences: Vec::new(),
            fences_hang: false,
            tickets: Vec::new(),
            by_grant: HashMap::new(),
            begun: Vec::new(),
            regrants: 0,
            kept: Vec::new(),
            rng: Rng(seed.wrapping_mul(0x2545_F491_4F6C_DD1D)),
            devices: Rng(seed),
            coverage: Coverage::default(),
            leases: 0,
        }
    }

    pub fn next_lease(&mut self) -> u64 {
        self.leases += 1;
        self.leases
    }

    pub fn nonce(&mut self) -> Nonce {
        let mut nonce = [0; 32];
        nonce[..8].copy_from_slice(&self.rng.next().to_le_bytes());
        nonce
    }

    /// One engine connects to another, of which it wants this start.
    pub fn dial(&mut self, opener: usize, listener: usize, want: Identity) {
        let (nonce, other) = (self.nonce(), self.nonce());
        let (left, hello) = Handshake::open(self.engines[opener].local(), nonce, Some(want));
        let right = Handshake::listen(self.engines[listener].local(), other);
        let at = self.links.len();
        // What befell the pair before is what this session comes after.
        let known = [opener, listener].map(|end| &self.engines[end].links).into_iter().flatten();
        let ends = [opener, listener];
        let last = known.filter(|at| self.links[**at].ends.iter().all(|end| ends.contains(end))).max();
        let faults = last.map_or(0, |at| self.links[*at].faults);
        self.links.push(Link {
            session: None,
            ends: [opener, listener],
            processes: [opener, listener].map(|end| self.engines[end].process.clone()),
            shake: [Some(left), Some(right)],
            greeting: Default::default(),
            control: [hello.into(), Default::default()],
            channels: Default::default(),
            frames: Default::default(),
            notes: Default::default(),
            closed: [false; 2],
            gone: [false; 2],
            lost: [false; 2],
            flips: false,
            stalled: false,
            one_sided: !self.rng.once_in(5),
            fenced: [false; 2],
            faults,
        });
        for end in [opener, listener] {
            self.engines[end].links.push(at);
        }
        self.busy.insert(at);
    }

    /// How one side sees the session of a link.
    pub fn state_of(&self, at: usize, side: usize) -> State {
        let (link, engine) = (&self.links[at], &self.engines[self.links[at].ends[side]]);
        let Some(session) = link.session.filter(|_| !link.gone[side] && !link.closed[side]) else {
            return State::Dead;
        };
        let Some(established) = engine.node.established(session) else { return State::Dead };
        let heard = engine.heard.get(&session).copied().unwrap_or_default();
        if engine.node.session_with(&established.peer) != Some(session) {
            State::Spare
        } else if engine.now(self.now).saturating_sub(heard) > ms(1000) {
            State::Silent
        } else {
            State::Up
        }
    }

    /// Something came in a session: if it lives, it is heard.
    pub fn hear(&mut self, engine: usize, session: u64) {
        let engine = &mut self.engines[engine];
        let now = engine.clock.at(self.now);
        if let Some(heard) = engine.heard.get_mut(&session) {
            *heard = now;
        }
    }

    pub fn close(&mut self, engine: usize, session: u64) {
        self.engines[engine].node.session(session).close(Error::new(Code::PeerLost, "cut"));
        self.pump(engine);
    }

    pub fn strike(&mut self, engine: usize, fault: Fault) {
        for at in self.engines[engine].links.clone() {
            self.links[at].faults |= fault.bit();
            self.busy.insert(at);
        }
    }

    // ---- what happens ----

    /// Everything that can happen now.
    pub fn actions(&mut self, actions: &mut Vec<Action>) {
        actions.clear();
        let mut idle = Vec::new();
        for at in &self.busy {
            let before = actions.len();
            self.link_actions(*at, actions);
            if actions.len() == before {
                idle.push(*at);
            }
        }
        for at in idle {
            self.busy.remove(&at);
        }
        for (at, engine) in self.engines.iter().enumerate() {
            if engine.copies && !engine.asleep {
                actions.push(Action::Copy(at));
            }
            if !engine.inbox.is_empty() && !engine.deaf && !engine.asleep {
                actions.push(Action::Take(at));
            }
            if !engine.asleep {
                actions.extend((0..engine.node.held_stops()).map(|which| Action::Stop(at, which)));
            }
        }
        let works = |engine: usize| !self.engines[engine].hold && !self.engines[engine].asleep;
        let running = self.running.iter().enumerate().filter(|(_, running)| works(running.engine));
        actions.extend(running.map(|(at, _)| Action::Finish(at)));
        let moves = |post: &Post| {
            let link = &self.links[post.link];
            !link.stalled && link.lost == [false; 2] && !post.late && post.moves()
        };
        actions.extend((0..self.posts.len()).filter(|at| moves(&self.posts[*at])).map(Action::Nic));
        if !self.fences_hang {
            let awake = |(at, _): &(usize, u64)| !self.engines[*at].asleep;
            actions.extend(
                self.fences
                    .iter()
                    .enumerate()
                    .filter(|(_, fence)| awake(fence))
                    .map(|(at, _)| Action::Fence(at)),
            );
        }
    }

    fn link_actions(&self, at: usize, actions: &mut Vec<Action>) {
        let link = &self.links[at];
        for side in 0..2 {
            let (node, awake) = (&self.engines[link.ends[side]].node, !self.engines[link.ends[side]].asleep);
            if let Some(session) = link.session.filter(|_| awake && !link.closed[side] && !link.gone[side]) {
                if node.wants_to_send(session) && link.channels.usable(side).next().is_some() {
                    actions.push(Action::Send(at, side));
                }
                if node.wants_to_post(session) {
                    actions.push(Action::Post(at, side));
                }
            }
            self.channel_actions(at, side, |channel, step| {
                actions.push(match step {
                    Step::Greet => Action::Greet(at, channel, side),
                    Step::Chunk => Action::Chunk(at, channel, side),
                    Step::Hangup => Action::Hangup(at, channel, side),
                });
            });
            let (from, to) = (side, &self.engines[link.ends[1 - side]]);
            if link.lost[from] || link.stalled || to.asleep {
                continue;
            }
            if !link.control[from].is_empty() {
                actions.push(Action::Bytes(at, from));
            } else if link.closed[from] && !link.closed[1 - from] {
                actions.push(Action::Eof(at, from));
            }
        }
    }

    /// Lets one thing happen.
    pub fn act(&mut self, action: Action) {
        let engine = match action {
            Action::Bytes(at, from) => self.deliver(at, from),
            Action::Chunk(at, channel, from) => self.start_place(at, channel, from),
            Action::Greet(at, channel, from) => self.greet_channel(at, channel, from),
            Action::Hangup(at, channel, from) => self.hang_up(at, channel, from),
            Action::Eof(at, from) => self.break_off(at, 1 - from),
            Action::Send(at, side) => self.start_send(at, side),
            Action::Post(at, side) => self.start_post(at, side),
            Action::Copy(engine) => self.start_copy(engine),
            Action::Finish(at) => self.finish(at),
            Action::Nic(at) => self.move_post(at),
            Action::Fence(at) => self.fence(at),
            Action::Take(engine) => self.take_notes(engine),
            Action::Stop(engine, which) => {
                self.engines[engine].node.stop_held(which);
                engine
            }
        };
        self.pump(engine);
    }

    /// One side learns that the connection is gone.
    pub fn break_off(&mut self, at: usize, side: usize) -> usize {
        let engine = self.links[at].ends[side];
        if let Some(session) = self.links[at].session.filter(|_| !self.links[at].gone[side]) {
            let error = Error::new(Code::PeerLost, "the connection broke");
            self.engines[engine].node.session(session).close(error);
        }
        self.links[at].closed[side] = true;
        engine
    }

    pub fn deliver(&mut self, at: usize, from: usize) -> usize {
        // What is long comes in longer pieces: a burst must not take up a whole schedule.
        let most = self.links[at].control[from].len().max(4000);
        let most = if self.rng.once_in(4) { 40 } else { most };
        let piece = 1 + self.rng.below(most);
        let link = &mut self.links[at];
        let (to, side) = (link.ends[1 - from], 1 - from);
        let take = piece.min(link.control[from].len());
        let bytes = link.control[from].make_contiguous()[..take].to_vec();
        link.control[from].drain(..take);
        if link.gone[side] {
            return to;
        }
        match (link.shake[side].is_some(), link.session) {
            (true, _) if link.closed[side] => {}
            (true, _) => self.greet(at, side, bytes),
            (false, Some(session)) => self.receive(at, side, session, bytes, None),
            (false, None) => {}
        }
        to
    }

    fn greet(&mut self, at: usize, side: usize, bytes: Vec<u8>) {
        let now = self.engines[self.links[at].ends[side]].now(self.now);
        let link = &mut self.links[at];
        let Some(shake) = &mut link.shake[side] else { return };
        link.greeting[side].extend(bytes);
        let mut out = Vec::new();
        let result = shake.receive(&mut link.greeting[side], &mut out);
        link.control[side].extend(out);
        let engine = link.ends[side];
        match result {
            Ok(None) => {}
            Ok(Some(Greeting::Join(_))) => panic!("a control connection joins"),
            Ok(Some(Greeting::Control(mut established))) => {
                link.shake[side] = None;
                let (session, rest) = (established.session, std::mem::take(&mut link.greeting[side]));
                link.session = Some(session);
                established.one_sided = link.one_sided;
                self.by_session.insert(session, at);
                let engine = &mut self.engines[engine];
                engine.node.add_session(established, now);
                engine.heard.insert(session, now);
                if !rest.is_empty() {
                    self.receive(at, side, session, rest, Some(State::New));
                }
            }
            Err(error) => {
                link.closed[side] = true;
                let restarted = link.processes[1].incarnation.0 > 1;
                assert!(error.code == Code::PeerRestarted && restarted, "a handshake failed: {error}");
                self.coverage.count("peer_restarted");
            }
        }
        self.busy.insert(at);
    }

    fn receive(&mut self, at: usize, side: usize, session: u64, bytes: Vec<u8>, state: Option<State>) {
        let state = state.unwrap_or_else(|| self.state_of(at, side));
        let (mut kinds, engine) = (Vec::new(), self.links[at].ends[side]);
        self.links[at].frames[1 - side].feed(&bytes, &mut kinds);
        for (kind, start) in kinds {
            self.coverage.hit(state, usize::from(kind), self.links[at].faults);
            if kind == NOTED {
                self.links[at].acknowledge(side, start);
                self.engines[engine].decided.push(session);
            }
        }
        self.hear(engine, session);
        let now = self.engines[engine].now(self.now);
        self.engines[engine].node.session(session).receive(&bytes, now);
    }

    // ---- time ----

    /// Lets everything happen, in a random order, that can without time passing.
    pub fn settle(&mut self) {
        let mut actions = Vec::new();
        for _ in 0..1_000_000 {
            self.actions(&mut actions);
            if actions.is_empty() {
                return;
            }
            let pick = self.rng.below(actions.len());
            self.act(actions.swap_remove(pick));
        }
        panic!("the world does not come to rest");
    }

    /// Lets time pass, with all that happens in it.
    pub fn advance(&mut self, by: Duration) {
        let end = self.now + by;
        loop {
            self.settle();
            let awake = self.engines.iter().filter(|engine| !engine.asleep);
            let next = awake.filter_map(|engine| engine.node.next_timeout().map(|at| engine.clock.when(at)));
            let next = next.min().filter(|at| *at <= end);
            self.now = next.unwrap_or(end).max(self.now);
            self.tick();
            if next.is_none() {
                return self.settle();
            }
        }
    }

    pub fn tick(&mut self) {
        for at in 0..self.engines.len() {
            let now = self.engines[at].now(self.now);
            let engine = &mut self.engines[at];
            if engine.asleep {
                continue;
            }
            // It slept, or its clock jumped: it reads before it judges.
            if now.saturating_sub(engine.ticked) > ms(1000) {
                engine.heard.values_mut().for_each(|heard| *heard = now);
            }
            engine.ticked = now;
            engine.node.tick(now);
            self.pump(at);
            self.check_silence(at);
        }
    }
}

/// Memory of one lease.
pub fn mem(arena: &Rc<Arena>, lease: u64) -> Mem {
    Mem { arena: arena.clone(), lease }
}
