//! A NIC's thread: what it is told, and when it sleeps.

use super::connections::Peer;
use super::device::{Done, RmaDevice, Run};
use super::requests::Requests;
use super::stats::NicStats;
use super::warm_up::Probe;
use super::{Command, Fence, Inbox, Told, Unreachable};
use crate::{RegionMemory, Services, from_host};
use kvik_core::{Code, Error, Result};
use kvik_host::event::{Epoll, Events, Interest};
use kvik_proto::NicKey;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const WAKER: u64 = 0;
const QUEUE: u64 = 1;
/// How long the thread sleeps at most while something is in flight: stops are looked at.
const STOP_POLL: Duration = Duration::from_millis(10);
/// An idle thread wakes this rarely; everything that matters wakes it at once.
const IDLE_WAIT: Duration = Duration::from_secs(3600);
/// Polls in vain before a thread that has nothing to wait for lets others run for a moment.
const SPINS: u32 = 200;
const SPIN_PAUSE: Duration = Duration::from_micros(20);

/// A thread's place in its pool.
pub(super) struct Place {
    /// The NIC's number, by which peers name it.
    pub number: usize,
    pub inbox: Arc<Inbox>,
    pub unreachable: Arc<Unreachable>,
    pub stats: Arc<NicStats>,
    pub told: Arc<Told>,
}

/// See the module's text.
pub(super) struct Worker<C: RmaDevice> {
    inbox: Arc<Inbox>,
    pub number: usize,
    pub unreachable: Arc<Unreachable>,
    pub stats: Arc<NicStats>,
    /// What all NICs of the engine share with it.
    pub told: Arc<Told>,
    epoll: Rc<Epoll>,
    pub services: Option<Arc<Services>>,
    // What follows is in the order in which it is let go of: what the device made before the device.
    pub known: HashMap<usize, C::Known>,
    /// Memory that is let go of when nobody else holds it.
    leaving: HashMap<usize, C::Known>,
    /// What peers' NICs read to see that they reach this one, once one has asked for it.
    pub page: Option<(C::Known, NicKey)>,
    pub device: C,
    /// The device tells by a descriptor when to poll.
    waits: bool,
    /// Why the NIC cannot be used now.
    pub down: Option<Error>,
    /// Why it never can again: what has ended cannot be learnt of it.
    pub broken: Option<Error>,
    pub peers: HashMap<u64, Peer<C::Conn>>,
    /// Sessions whose peer cannot be reached as it was.
    pub degraded: BTreeSet<u64>,
    /// Connections that are to be warmed up, by session.
    pub probes: HashMap<u64, Probe>,
    /// The number of the next operation that is no work request's.
    pub next_probe: u64,
    /// Until when peers' NICs may read the page.
    pub probed_until: Option<Instant>,
    pub requests: Requests,
    pub done: Vec<Done>,
    /// The runs of the next operation, kept for their room.
    pub pieces: Vec<Run>,
}

impl<C: RmaDevice> Worker<C> {
    /// The thread's state, and the address that peers reach its NIC by.
    pub fn new(mut device: C, place: Place) -> Result<(Self, Vec<u8>)> {
        let Place { number, inbox, unreachable, stats, told } = place;
        let fail = |error| from_host(Code::InvalidArgument, error);
        let epoll = Rc::new(Epoll::new().map_err(fail)?);
        epoll.add(&inbox.waker, WAKER, Interest::READ).map_err(fail)?;
        let address = device.address()?;
        let waits = device.watch(&epoll, QUEUE)?;
        let requests = Requests::new(device.depth());
        let worker = Worker {
            inbox,
            number,
            unreachable,
            stats,
            told,
            epoll,
            services: None,
            known: HashMap::new(),
            leaving: HashMap::new(),
            page: None,
            device,
            waits,
            down: None,
            broken: None,
            peers: HashMap::new(),
            degraded: BTreeSet::new(),
            probes: HashMap::new(),
            next_probe: 0,
            probed_until: None,
            requests,
            done: Vec::new(),
            pieces: Vec::new(),
        };
        Ok((worker, address))
    }

    pub fn run(&mut self) {
        let (mut events, mut commands) = (Events::new(8), Vec::new());
        let mut idle = 0;
        loop {
            let wait = self.wait(idle);
            if let Err(error) = self.epoll.wait(&mut events, wait) {
                log::error!("a NIC's thread cannot wait and ends: {error}");
                return self.end();
            }
            if events.iter().any(|event| event.token == WAKER) {
                if let Err(error) = self.inbox.waker.drain() {
                    log::error!("a NIC's thread cannot read its waker: {error}");
                }
                self.inbox.take(&mut commands);
                for command in commands.drain(..) {
                    if matches!(command, Command::Stop) {
                        return self.end();
                    }
                    self.execute(command);
                }
            }
            let moved = self.progress();
            idle = if moved { 0 } else { idle.saturating_add(1) };
        }
    }

    /// How long the thread may sleep now.
    fn wait(&mut self, idle: u32) -> Duration {
        let busy = !self.requests.is_empty()
            || !self.leaving.is_empty()
            || !self.degraded.is_empty()
            || self.is_warming_up()
            || self.told.is_exposed();
        match (busy, self.waits) {
            (_, true) if self.broken.is_none() && !self.device.may_wait() => Duration::ZERO,
            (true, true) => STOP_POLL,
            (true, false) if idle < SPINS => Duration::ZERO,
            (true, false) => SPIN_PAUSE,
            (false, _) => self.soonest_opening().unwrap_or(IDLE_WAIT),
        }
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Serve(services) => self.services = Some(services),
            Command::Post(session) => self.requests.turns().wait(session),
            Command::Register(memory, answer) => {
                let known = self.register(memory);
                let _ = answer.send(known);
            }
            Command::Unregister(name, answer) => {
                self.leaving.extend(self.known.remove_entry(&name));
                self.let_go();
                let _ = answer.send(());
            }
            Command::Keep(name) => self.known.extend(self.leaving.remove_entry(&name)),
            Command::Find(session) => self.find(session),
            Command::Called(session, call) => self.called(session, call),
            Command::Answered(session, answer) => self.answered(session, answer),
            Command::WarmUp(session, until) => self.warm_up(session, until),
            Command::Forget(session) => self.forget(session),
            Command::Fence(fence) => self.fence(&fence),
            // Their flags are looked at in every turn.
            Command::Halt | Command::Expose | Command::Stop => {}
        }
    }

    fn register(&mut self, memory: RegionMemory) -> Result<NicKey> {
        let name = memory.name();
        let (known, key) = self.device.register(memory)?;
        self.known.insert(name, known);
        Ok(key)
    }

    /// Lets go of memory that only NICs hold.
    fn let_go(&mut self) {
        let nics = self.unreachable.nics;
        self.leaving.retain(|_, known| C::is_held(known, nics));
    }

    /// One turn: takes what has ended, and posts what there is room for. Whether anything moved.
    fn progress(&mut self) -> bool {
        if !self.leaving.is_empty() {
            self.let_go();
        }
        let Some(services) = self.services.clone() else { return false };
        let mut moved = self.take_completions();
        self.look_at_port();
        self.reconnect(&services);
        self.progress_probes(&services);
        self.report(&services);
        moved |= self.take_work(&services);
        moved |= self.post(&services);
        // What could not be posted at all is over at once.
        self.report(&services);
        moved
    }

    /// Nothing of the session's peer may land here any more.
    fn fence(&mut self, fence: &Fence) {
        let session = fence.session;
        self.abandon(session, "the session has ended");
        let cut = self.device.fence(session);
        match (cut, self.services.clone()) {
            (Ok(moved), Some(services)) => {
                // First: what all peers need next takes its time.
                if fence.is_done() {
                    services.sessions.fenced(session);
                }
                if moved {
                    self.tell_address(&services);
                }
            }
            // Then pages stay in quarantine, and nobody takes them for free.
            (Err(error), _) => log::error!("a NIC cannot cut off a peer: {error}"),
            (Ok(_), None) => {}
        }
        self.close_conn(session);
        self.peers.remove(&session);
        self.degraded.remove(&session);
        self.probes.remove(&session);
        self.device.forget(session);
    }

    pub fn forget(&mut self, session: u64) {
        self.requests.turns().wait_no_more(session);
        self.degraded.remove(&session);
        self.unreachable.clear(session, self.number);
        self.end_probe(session);
        // Operations that are in flight name it still: it goes with them, by a fence, or with its probe.
        if self.in_flight(session) == 0 {
            self.close_conn(session);
            self.peers.remove(&session);
            self.device.forget(session);
        }
    }

    fn end(&mut self) {
        for session in self.requests.sessions() {
            self.abandon(session, "the engine was closed");
        }
        self.services = None;
    }

    /// Fails a session's work requests, and stops what was posted for them. Nobody is left to vouch for what is on the
    /// wire: the other side cuts its own path.
    fn abandon(&mut self, session: u64, why: &str) {
        if self.in_flight(session) > 0 {
            self.cut(session);
        }
        if let Some(services) = self.services.clone() {
            self.reassign(&services, session, false, &Error::new(Code::PeerLost, why));
        }
    }
}
