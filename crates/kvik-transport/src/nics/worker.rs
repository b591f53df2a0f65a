//! A NIC: what it is told, one turn of it, and when the next one is due. Its `thread` gives them.

use super::device::{Done, RmaDevice, Run};
use super::inbox::{Command, Fence, Reader};
use super::memories::Memories;
use super::peers::Peers;
use super::probes::Probes;
use super::requests::Requests;
use super::ring::Rings;
use super::stats::NicStats;
use super::told::{Told, Unreachable};
use crate::{RegionMemory, Services, from_host};
use kvik_core::{Code, Error, Result};
use kvik_host::event::Epoll;
use kvik_proto::WorkRequest;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The tokens of a NIC's own set: what the device tells, and devices whose pages go through rings.
const QUEUE: u64 = 0;
const RINGS: u64 = 1;
/// How long the thread sleeps at most while something is in flight: stops are looked at.
const STOP_POLL: Duration = Duration::from_millis(10);
/// An idle NIC has a turn this rarely; everything that matters wakes its thread at once.
const IDLE_WAIT: Duration = Duration::from_secs(3600);
/// Polls in vain before a NIC that has no descriptor, or never lets its thread wait for it, lets others run for a
/// moment.
const SPINS: u32 = 200;
const SPIN_PAUSE: Duration = Duration::from_micros(20);

/// A NIC's place in its pool.
pub(super) struct Place {
    /// The NIC's number, by which peers name it.
    pub number: usize,
    pub inbox: Reader,
    pub unreachable: Arc<Unreachable>,
    pub stats: Arc<NicStats>,
    pub told: Arc<Told>,
}

/// See the module's text.
pub(super) struct Worker<C: RmaDevice> {
    inbox: Reader,
    pub number: usize,
    pub stats: Arc<NicStats>,
    /// What all NICs of the engine share with it.
    pub told: Arc<Told>,
    /// What of the device is waited for.
    pub epoll: Rc<Epoll>,
    pub services: Arc<Services>,
    // In the order in which they are let go of: what the device made before the device.
    pub memories: Memories<C>,
    pub rings: Rings<C>,
    pub device: C,
    /// The device tells by a descriptor when to poll.
    waits: bool,
    /// Turns in a row in which nothing moved.
    idle: u32,
    /// It has claimed work requests in its last turn, and may find more.
    pub took: bool,
    /// Peers must take another address, and do not know it yet.
    untold: bool,
    /// It was told to end.
    ending: bool,
    /// When the next turn is due, if nothing happens before.
    pub due: Instant,
    /// Why the NIC never can be used again: what has ended cannot be learnt of it.
    pub broken: Option<Error>,
    pub peers: Peers<C::Conn>,
    pub requests: Requests,
    pub probes: Probes,
    pub done: Vec<Done>,
    /// The runs of the next operation, kept for their room.
    pub pieces: Vec<Run>,
    /// What was claimed at once, kept for its room.
    pub claimed: Vec<WorkRequest<RegionMemory>>,
}

impl<C: RmaDevice> Worker<C> {
    /// The address that peers reach the NIC by, and what makes its state when it is to serve.
    pub fn open(mut device: C, place: Place) -> Result<(Vec<u8>, impl FnOnce(Arc<Services>) -> Self)> {
        let Place { number, inbox, unreachable, stats, told } = place;
        let fail = |error| from_host(Code::InvalidArgument, error);
        let epoll = Rc::new(Epoll::new().map_err(fail)?);
        let address = device.address()?;
        let waits = device.watch(&epoll, QUEUE)?;
        let rings = Rings::new(&epoll, RINGS)?;
        inbox.watch(&epoll)?;
        let serve = move |services| Worker {
            requests: Requests::new(device.depth()),
            peers: Peers::new(number, stats.clone(), unreachable),
            inbox,
            number,
            stats,
            told,
            epoll,
            services,
            memories: Memories::new(),
            rings,
            device,
            waits,
            idle: 0,
            took: false,
            untold: false,
            ending: false,
            due: Instant::now(),
            broken: None,
            probes: Probes::default(),
            done: Vec::new(),
            pieces: Vec::new(),
            claimed: Vec::new(),
        };
        Ok((address, serve))
    }

    /// Does what it was told, and what is left in `commands`, and has its turn. False: it was told to end, and has.
    pub fn turn(&mut self, told: bool, commands: &mut Vec<Command>) -> bool {
        if told {
            self.inbox.take(commands);
            commands.reverse();
        }
        // One by one: what comes after one that panics is left for the next turn.
        while let Some(command) = commands.pop() {
            if matches!(command, Command::Stop) {
                commands.clear();
                self.ending = true;
                self.end();
                break;
            }
            self.execute(command);
        }
        if self.ending {
            // Nothing is on the wire any more, but a device may still have something of a work request.
            self.stage();
            self.report();
            self.due = Instant::now() + STOP_POLL;
            return self.requests.are_staged();
        }
        self.idle = if self.progress() { 0 } else { self.idle.saturating_add(1) };
        let wait = self.wait();
        self.due = Instant::now() + wait;
        true
    }

    /// How long the NIC needs no turn now, unless something happens.
    fn wait(&mut self) -> Duration {
        let busy = !self.requests.is_empty()
            || self.memories.is_leaving()
            || !self.peers.degraded().is_empty()
            || self.probes.is_busy()
            || self.told.is_exposed();
        if self.took {
            return Duration::ZERO;
        }
        // Something has come meanwhile; or there never is anything, and it is as one that has no descriptor.
        let comes = self.waits && self.broken.is_none() && !self.device.may_wait();
        match (busy, self.waits && !comes) {
            _ if comes && self.idle < SPINS => Duration::ZERO,
            (true, true) => STOP_POLL,
            (true, false) if self.idle < SPINS => Duration::ZERO,
            (true, false) => SPIN_PAUSE,
            (false, _) => self.peers.soonest_opening().unwrap_or(IDLE_WAIT),
        }
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Post(session) => self.requests.turns().wait(session),
            Command::Register(memory, answer) => {
                let _ = answer.send(self.memories.register(&mut self.device, memory));
            }
            Command::Unregister(name, answer) => {
                self.memories.withdraw(name, self.peers.nics_here());
                self.rings.withdraw(name);
                let _ = answer.send(());
            }
            Command::Stage(memory, answer) => {
                let _ = answer.send(self.rings.admit(&mut self.device, &memory));
            }
            Command::Keep(name) => self.memories.keep(name),
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

    /// One turn: takes what has ended, and posts what there is room for. Whether anything moved.
    fn progress(&mut self) -> bool {
        if std::mem::take(&mut self.untold) {
            self.tell_address();
        }
        self.memories.let_go(self.peers.nics_here());
        let mut moved = self.take_completions();
        moved |= self.stage();
        self.peers.set_down(self.broken.clone().or_else(|| self.device.down()));
        self.reconnect();
        self.progress_probes();
        self.report();
        self.took = self.take_work();
        moved |= self.took && self.stage();
        moved |= self.took;
        moved |= self.post();
        // What could not be posted at all is over at once.
        self.report();
        moved
    }

    /// What goes through rings goes on, as far as devices and the wire have come.
    fn stage(&mut self) -> bool {
        self.requests.stage(&mut self.rings, &*self.services.work)
    }

    /// Nothing of the session's peer may land here any more.
    fn fence(&mut self, fence: &Fence) {
        let session = fence.session();
        self.abandon(session, "the session has ended");
        match self.device.fence(session) {
            Ok(moved) => {
                if fence.is_done() {
                    self.services.sessions.fenced(session);
                }
                // Later, and once for all that were cut off with it: what all peers need next takes its time, and each
                // move costs the others what they have in flight.
                self.untold |= moved;
            }
            // Then pages stay in quarantine, and nobody takes them for free.
            Err(error) => log::error!("a NIC cannot cut off a peer: {error}"),
        }
        self.probes.remove(session);
        self.forget_peer(session);
    }

    pub fn forget(&mut self, session: u64) {
        self.requests.turns().forget(session);
        self.peers.leave(session);
        self.probes.end(session);
        // Operations that are in flight name it still: it goes with them, by a fence, or with its probe.
        if self.in_flight(session) == 0 {
            self.forget_peer(session);
        }
    }

    fn forget_peer(&mut self, session: u64) {
        self.close_conn(session);
        self.peers.remove(session);
        self.device.forget(session);
    }

    pub fn end(&mut self) {
        for session in self.requests.sessions() {
            self.abandon(session, "the engine was closed");
        }
    }

    /// Fails a session's work requests, and stops what was posted for them. Nobody is left to vouch for what is on the
    /// wire: the other side cuts its own path.
    fn abandon(&mut self, session: u64, why: &str) {
        if self.in_flight(session) > 0 {
            self.cut(session);
        }
        self.reassign(session, false, &Error::new(Code::PeerLost, why));
    }
}
