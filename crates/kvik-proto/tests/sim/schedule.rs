//! What engines do: give grants, begin transfers, confirm, extend, revoke and close.

use crate::claims;
use crate::engine::ms;
use crate::memory::{Arena, PAGE_BYTES, PAGES, content};
use crate::world::{Begun, Ticket, World, mem};
use kvik_core::{Class, Code, Error, GrantId, GrantState, Layout, Order, RegionId, Right, Use, View};
use kvik_proto::*;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

fn view_of(layout: &Arc<Layout>, parts: u32, ids: &[u32]) -> View {
    View::of_parts(layout.clone(), parts, ids.into(), 0..1, 0..layout.slices(), Order::LayerFirst).unwrap()
}

impl World {
    pub fn layout() -> Arc<Layout> {
        Arc::new(Layout::contiguous(PAGES, PAGE_BYTES).unwrap())
    }

    /// Plans a grant over memory of its own; whoever wants has its ticket.
    pub fn plan(&mut self, owner: usize, again: bool) -> usize {
        let rng = &mut self.rng;
        let right = if rng.once_in(3) { Right::Read } else { Right::Write };
        let parts = if rng.once_in(3) { 2 } else { 1 };
        let most = (PAGES * parts) as usize;
        let (first, count) = (rng.below(3), 1 + rng.below(most));
        let ids: Vec<u32> = (first as u32..(first + count).min(most) as u32).collect();
        let seed = rng.next();
        let arena = Arena::new(Self::layout(), seed);
        let view = view_of(&arena.layout, parts, &ids);
        self.ticket(owner, right, seed, arena, view, again)
    }

    /// The same pages once more, with other content.
    pub fn regrant(&mut self, index: usize) -> usize {
        let (seed, old) = (self.rng.next(), &self.tickets[index]);
        let (owner, right, arena, view) = (old.owner, old.right, old.arena.clone(), old.view.clone());
        arena.fill(seed);
        self.ticket(owner, right, seed, arena, view, false)
    }

    fn ticket(
        &mut self,
        owner: usize,
        right: Right,
        seed: u64,
        arena: Rc<Arena>,
        view: View,
        again: bool,
    ) -> usize {
        let uses = [Use::Once(1), Use::Once(2), Use::Many][self.rng.below(3)];
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.rng.next().to_le_bytes());
        let (id, lease, identity) = (GrantId(id), self.next_lease(), self.engines[owner].identity);
        self.by_grant.insert(id, self.tickets.len());
        let content = claims::drawn(&mut self.rng, seed, view.pages().len(), view.parts());
        self.tickets.push(Ticket {
            owner,
            identity,
            id,
            right,
            uses,
            seed,
            arena,
            view,
            content,
            lease,
            expires: Duration::ZERO,
            extended: false,
            issued: false,
            ready: false,
            again,
            state: None,
            last: None,
        });
        self.tickets.len() - 1
    }

    /// The owner gives the grant, unless it was restarted meanwhile; sometimes before its pages are free.
    pub fn issue(&mut self, index: usize, life: Duration) {
        let (later, staged) = (self.rng.once_in(4), !self.rng.once_in(3));
        let ticket = &mut self.tickets[index];
        let engine = &mut self.engines[ticket.owner];
        if engine.asleep || ticket.identity != engine.identity || std::mem::replace(&mut ticket.issued, true)
        {
            return;
        }
        let now = engine.clock.at(self.now);
        let (slot, generation) = engine.process.slot();
        ticket.expires = now + life;
        if !later {
            ticket.make_ready();
        }
        let offer = Offer {
            region: mem(&ticket.arena, ticket.lease),
            region_id: engine.process.region(&ticket.arena),
            view: ticket.view.clone(),
            content: ticket.content.clone(),
            right: ticket.right,
            uses: ticket.uses,
            expires: ticket.expires,
            latest: now + ms(90_000),
            slot,
            generation,
            keys: Arc::default(),
            ring: staged.then(|| engine.process.ring.clone()),
            closed: Closed { nics: staged.then(|| "no NIC reaches these pages".into()), ..Closed::default() },
        };
        match later {
            true => engine.node.grants().give_later(ticket.id, offer, now).unwrap(),
            false => engine.node.grants().give(ticket.id, offer, now).unwrap(),
        }
        engine.given.push(index);
        let owner = ticket.owner;
        self.pump(owner);
    }

    /// What the pages of a grant waited for has ended.
    pub fn ready(&mut self, index: usize) {
        let ticket = &mut self.tickets[index];
        let engine = &mut self.engines[ticket.owner];
        if engine.asleep || !ticket.issued || ticket.ready || ticket.identity != engine.identity {
            return;
        }
        // One that is over serves nobody, also when it is said to be ready.
        if engine.node.grant_state(ticket.id) == Some(GrantState::Live) {
            ticket.make_ready();
        }
        let now = engine.clock.at(self.now);
        engine.node.grants().ready(ticket.id, now);
        let owner = ticket.owner;
        self.pump(owner);
    }

    pub fn end_grant(&mut self, index: usize, state: GrantState) {
        let ticket = &self.tickets[index];
        let (owner, id) = (ticket.owner, ticket.id);
        let engine = &mut self.engines[owner];
        // One that is overdue has expired; an owner that has slept may not have looked yet.
        let overdue = ticket.issued && !ticket.extended && engine.clock.at(self.now) >= ticket.expires;
        if ticket.identity != engine.identity || engine.asleep || overdue {
            return;
        }
        engine.node.grants().end(id, state);
        self.pump(owner);
    }

    /// How the grant has ended already, as far as it can be known for sure.
    fn hopeless(&self, index: usize) -> Option<GrantState> {
        let (ticket, owner) = (&self.tickets[index], &self.engines[self.tickets[index].owner]);
        if ticket.identity != owner.identity {
            return Some(GrantState::Live);
        }
        let overdue = !ticket.extended && owner.now(self.now) >= ticket.expires;
        match owner.node.grant_state(ticket.id) {
            Some(GrantState::Live) if overdue => Some(GrantState::Expired),
            Some(GrantState::Live) | None => None,
            ended => ended,
        }
    }

    /// The session for a ticket; without one the engine connects, and the transfer is not begun this time.
    fn session_for(&mut self, engine: usize, index: usize) -> Option<u64> {
        let (owner, identity) = (self.tickets[index].owner, self.tickets[index].identity);
        if identity == self.engines[engine].identity {
            return Some(OWN_SESSION);
        }
        if owner == engine {
            return None;
        }
        let session = self.engines[engine].node.session_with(&identity);
        if session.is_none() {
            self.dial(engine, owner, identity);
        }
        session
    }

    /// An engine begins a transfer with a grant, if it has a session for it.
    pub fn begin(&mut self, engine: usize, index: usize) -> bool {
        if self.engines[engine].asleep {
            return false;
        }
        let Some(session) = self.session_for(engine, index) else { return false };
        let right = self.tickets[index].right;
        let op = match (right, self.rng.below(24)) {
            (_, 0) => Op::Confirm,
            (_, 1) => Op::Extend,
            (Right::Read, 2) => Op::Write,
            (Right::Write, 2) => Op::Read,
            (Right::Read, _) => Op::Read,
            (Right::Write, _) => Op::Write,
        };
        let path = match self.rng.below(5) {
            0 => Path::Channels,
            1 => Path::Memory,
            _ => Path::OneSided,
        };
        let patience = if self.rng.once_in(4) { 150 } else { 4000 };
        let now = self.engines[engine].now(self.now);
        let (lease, deadline) = (self.next_lease(), now + ms(patience));
        let confirm = !self.rng.once_in(3);
        let moves = matches!(op, Op::Read | Op::Write);
        let times = 1 + u32::from(self.tickets[index].content.is_some() && self.rng.once_in(3));
        let (positions, taken) = self.positions(index, times);
        let last = positions.last().map_or(0, |position| (position / times) as usize);
        let (content, right) = self.state(index, op, last);
        let fits = right && (!moves || taken && !(confirm && self.uses_up_a_beginning(index, last)));
        let (arena, mine, theirs) = match moves {
            true => {
                let (arena, mine, theirs) = self.side(index, op, lease, times, &positions);
                (Some(arena), Some(mine), Some(theirs))
            }
            false => (None, None, None),
        };
        let process = self.engines[engine].process.clone();
        let side = arena.as_ref().zip(mine.as_ref()).map(|(arena, view)| Side {
            region: mem(arena, lease),
            region_id: if session == OWN_SESSION { RegionId(u32::MAX) } else { process.region(arena) },
            view: view.clone(),
            fence: (op == Op::Write && path == Path::Memory).then(|| process.slot()),
        });
        let check = [Check::No, Check::Sample, Check::All, Check::All][self.rng.below(4)];
        let class = Class::ALL[usize::from(self.rng.once_in(3))];
        let ticket = &self.tickets[index];
        let open = Open {
            grant: ticket.id,
            layout: ticket.arena.layout.digest(),
            content,
            op,
            class,
            path: if moves { path } else { Path::Channels },
            sums: true,
            check,
            confirm,
            readers: 1 + u16::from(self.rng.once_in(6)),
            deadline,
            chunk: PAGE_BYTES,
            side,
            select: Select {
                positions: moves.then(|| PageList::of(&positions.into())),
                parts: theirs.as_ref().map(|view| view.parts()),
                ..Select::default()
            },
            extend: ms(2000),
        };
        let hopeless = self.hopeless(index);
        self.tickets[index].extended |= op == Op::Extend && fits;
        let engine_now = now;
        let node = &mut self.engines[engine].node;
        let result = match session {
            OWN_SESSION => node.begin_own(open, engine_now),
            _ => node.session(session).begin(open, engine_now),
        };
        match result {
            Ok(key) => {
                let begun = Begun {
                    engine,
                    ticket: index,
                    key,
                    op,
                    class,
                    lease,
                    arena,
                    view: mine,
                    theirs,
                    deadline,
                    confirm: fits && (confirm || op == Op::Confirm),
                    check,
                    fits,
                    hopeless,
                    outcome: None,
                };
                self.engines[engine].open.insert(key, self.begun.len());
                self.begun.push(begun);
                self.pump(engine);
                true
            }
            Err(error) => {
                self.coverage.count(error.code.name());
                self.pump(engine);
                false
            }
        }
    }

    /// This side's memory for a transfer of what is at some positions of a grant.
    fn side(
        &mut self,
        index: usize,
        op: Op,
        lease: u64,
        times: u32,
        positions: &[u32],
    ) -> (Rc<Arena>, View, View) {
        let ticket = &self.tickets[index];
        let (parts, granted) = (ticket.view.parts() * times, ticket.view.pages());
        let id = |position: &u32| granted[(position / times) as usize] * times + position % times;
        let ids: Vec<u32> = positions.iter().map(id).collect();
        let arena = Arena::new(Self::layout(), self.rng.next());
        let theirs = view_of(&self.tickets[index].arena.layout, parts, &ids);
        let mine = view_of(&arena.layout, parts, &(0..ids.len() as u32).collect::<Vec<u32>>());
        if op == Op::Write {
            arena.put(&mine, &content(self.tickets[index].seed ^ 1, &theirs));
        }
        arena.lease(lease, mine.pages().iter().map(|id| id / parts).collect());
        (arena, mine, theirs)
    }

    pub fn cancel(&mut self) {
        let open = self.begun.iter().rev().take(3).filter(|begun| begun.outcome.is_none());
        let Some((engine, key)) = open.map(|begun| (begun.engine, begun.key)).next() else { return };
        if !self.engines[engine].asleep && self.engines[engine].open.contains_key(&key) {
            self.engines[engine].node.cancel(key, Error::new(Code::Cancelled, "cancelled"));
            self.pump(engine);
        }
    }
    /// A NIC of an engine wants a connection that it may never use.
    pub fn request_connection(&mut self, engine: usize, session: u64) {
        if self.links[self.by_session[&session]].one_sided {
            let call = crate::nic::connect(self.rng.next() as u8 & 0x7F, vec![0; 24]);
            self.engines[engine].node.session(session).reach(call);
        }
    }

    /// An engine has opened its endpoints again, or wants a connection to those of another.
    pub fn tell_nics(&mut self, engine: usize) {
        if !self.engines[engine].asleep {
            let sessions = self.engines[engine].node.sessions();
            match sessions.first().filter(|_| self.rng.once_in(2)) {
                Some(session) => self.request_connection(engine, *session),
                None => self.engines[engine].node.tell_nics(&Nics::default()),
            }
            self.pump(engine);
        }
    }

    pub fn ask_for_channels(&mut self, engine: usize) {
        let sessions = self.engines[engine].node.sessions();
        if let Some(session) = sessions.first().filter(|_| !self.engines[engine].asleep) {
            self.engines[engine].node.session(*session).ask_for_channels();
            self.pump(engine);
        }
    }
}
