//! One engine: a node, a clock of its own, and the memory of its process.

use crate::memory::{Arena, Mem, PAGE_BYTES};
use kvik_core::{EngineId, Incarnation, Layout, RegionId};
use kvik_proto::{Facts, FlowKey, Identity, Local, Node, Ring, Secret, Timing, Topic};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Slots of a ring: fewer than transfers want.
pub const SLOTS: usize = 3;

pub const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Time since boot as one engine's machine sees it: it never goes back, but drifts, and jumps when it was suspended.
pub struct Clock {
    base: Duration,
    since: Duration,
    permille: u32,
}

impl Clock {
    pub fn at(&self, now: Duration) -> Duration {
        self.base + now.saturating_sub(self.since) * self.permille / 1000
    }

    /// When the world's time is that this clock shows `at`.
    pub fn when(&self, at: Duration) -> Duration {
        self.since + at.saturating_sub(self.base) * 1000 / self.permille + Duration::from_micros(1)
    }

    pub fn set(&mut self, now: Duration, jump: Duration, permille: u32) {
        *self = Clock { base: self.at(now) + jump, since: now, permille };
    }
}

/// What a process has mapped; peers on its host can read it even after it has died.
pub struct Process {
    pub incarnation: Incarnation,
    arenas: RefCell<Vec<Rc<Arena>>>,
    /// What NICs reach in place of pages that they do not.
    pub ring: Arc<Ring<Mem>>,
    /// The generation of each fence slot.
    fences: RefCell<Vec<u64>>,
}

impl Process {
    fn new(incarnation: Incarnation) -> Rc<Process> {
        let layout = Arc::new(Layout::contiguous(SLOTS as u32, PAGE_BYTES).unwrap());
        let mem = Mem { arena: Arena::new(layout, 0), lease: 0 };
        let ring = Ring::new(mem, Arc::default(), SLOTS, PAGE_BYTES);
        Rc::new(Process { incarnation, arenas: RefCell::default(), ring, fences: RefCell::new(vec![0]) })
    }

    pub fn region(&self, arena: &Rc<Arena>) -> RegionId {
        let mut arenas = self.arenas.borrow_mut();
        arenas.push(arena.clone());
        RegionId(arenas.len() as u32)
    }

    pub fn arena(&self, region: RegionId) -> Rc<Arena> {
        self.arenas.borrow()[region.0 as usize - 1].clone()
    }

    pub fn slot(&self) -> (u32, u64) {
        let mut fences = self.fences.borrow_mut();
        fences.push(7);
        (fences.len() as u32 - 1, 7)
    }

    pub fn generation(&self, slot: u32) -> u64 {
        self.fences.borrow()[slot as usize]
    }

    pub fn raise(&self, slot: u32) {
        self.fences.borrow_mut()[slot as usize] += 1;
    }
}

pub struct Engine {
    pub node: Node<Mem>,
    pub identity: Identity,
    pub process: Rc<Process>,
    pub clock: Clock,
    /// Transfers that it began and that have not ended: their index in the world's list.
    pub open: BTreeMap<FlowKey, usize>,
    /// When something was last heard in each session, by its own clock, and by the simulator's own account.
    pub heard: BTreeMap<u64, Duration>,
    pub ticked: Duration,
    /// Its executors do not finish what they have begun.
    pub hold: bool,
    /// The process does not run; its NIC does.
    pub asleep: bool,
    pub copies: bool,
    /// Notifications that its consumers have not taken: session, topic and number.
    pub inbox: VecDeque<(u64, Topic, u64)>,
    /// Its consumer takes each the moment it comes, or none for now.
    pub eager: bool,
    pub deaf: bool,
    /// Notifications that it sent and that have not ended: deadline, session, topic and number.
    pub unended: BTreeSet<(Duration, u64, Topic, u64)>,
    /// Sessions that have ended or acknowledged some since it was last asked: by then it says what became of them.
    pub decided: Vec<u64>,
    /// Indices of its links.
    pub links: Vec<usize>,
    /// Grants that it gave and whose pages are not its own again: indices of their tickets.
    pub given: Vec<usize>,
}

impl Engine {
    pub fn new(number: usize, start: u64, now: Duration) -> Engine {
        let mut id = [7; 16];
        id[..8].copy_from_slice(&(number as u64 + 1).to_be_bytes());
        let identity = Identity { engine: EngineId(id), incarnation: Incarnation(start) };
        let boot = ms(1_000_000 + 1000 * number as u64);
        Engine {
            node: Node::new(identity, Timing::default(), boot),
            identity,
            process: Process::new(identity.incarnation),
            clock: Clock { base: boot, since: now, permille: 1000 },
            open: BTreeMap::new(),
            heard: BTreeMap::new(),
            ticked: boot,
            hold: false,
            asleep: false,
            copies: false,
            inbox: VecDeque::new(),
            eager: false,
            deaf: false,
            unended: BTreeSet::new(),
            decided: Vec::new(),
            links: Vec::new(),
            given: Vec::new(),
        }
    }

    pub fn now(&self, world: Duration) -> Duration {
        self.clock.at(world)
    }

    /// As its handshakes know it.
    pub fn local(&self) -> Local {
        Local { identity: self.identity, secret: Secret::new(None), facts: Facts::default() }
    }

    /// The process dies and is started again, on the same machine and with the same address.
    pub fn restart(&mut self, now: Duration) {
        let mut fresh = Engine::new(0, self.identity.incarnation.0 + 1, now);
        fresh.identity.engine = self.identity.engine;
        let clock = Clock { base: self.now(now), since: now, permille: self.clock.permille };
        fresh.node = Node::new(fresh.identity, Timing::default(), clock.base);
        (fresh.clock, fresh.ticked) = (clock, self.now(now));
        *self = fresh;
    }
}
