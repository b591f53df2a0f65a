//! NICs by verbs: reliable connections, one pair of queue pairs for each direction between two NICs.
//!
//! Who wants to reach a peer's NIC makes a queue pair (the initiator), and asks the peer for one that answers it (the
//! target). An initiator carries the own operations; a target only lets the peer's ones in. So each is cut alone: what
//! was posted by closing the initiator, what a peer may still send by closing its target. Other peers notice nothing.

use super::NicOptions;
use super::device::{
    CancelScope, Disconnected, Done, LONGEST, Operation, PIECES, Posted, RmaDevice, goes_on, lost, no,
};
use crate::{RegionMemory, from_host};
use kvik_core::{Code, Error, Result};
use kvik_host::event::Epoll;
use kvik_host::verbs::{
    Completion, Device, Event, Piece, Port, PortState, Queue, QueueAddress, Registration, Rma, RmaOp, Verbs,
    rank,
};
use kvik_proto::{NicKey, Op};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a busy thread looks for events of the device; one that sleeps is woken by them.
const LOOK: Duration = Duration::from_millis(5);

/// A port to open.
pub(super) struct Nic {
    verbs: Arc<Verbs>,
    port: Port,
    gid: u8,
}

/// See the module's text.
pub(super) struct VerbsRmaDevice {
    // In the order in which they are let go of.
    initiators: HashMap<u64, Queue>,
    /// By session, and the number of the peer's NIC.
    targets: HashMap<(u64, u8), Queue>,
    device: Rc<Device>,
    depth: usize,
    /// Sessions whose initiator queue pairs have something gathered.
    gathered: Vec<u64>,
    /// The port has no link.
    down: Option<Error>,
    /// Why the device does nothing any more, whatever its port does.
    failed: Option<Error>,
    /// Why the device's descriptors cannot be read: it is gone, and they wake whoever waits for them without end.
    unread: Option<Error>,
    /// Why a session's queue pair that was to be ended is there until the process ends.
    not_stopped: HashMap<u64, Error>,
    /// The port has changed since its GID was looked up.
    moved: bool,
    looked: Instant,
    /// What was taken off the device, kept for its room.
    taken: Vec<Completion>,
    events: Vec<Event>,
}

/// The name of a port: that of its device, and its number where it is not the first.
fn name(port: &Port) -> String {
    match port.number {
        1 => port.device.clone(),
        number => format!("{}/{number}", port.device),
    }
}

/// The ports that are in use, or those that the options name, each with the GID that it is reached at.
pub(super) fn nics(options: &NicOptions) -> Result<Vec<(String, Nic)>> {
    let verbs = Verbs::load(options.library.as_deref()).map_err(no)?;
    let path = verbs.path().display();
    let mut found = verbs.ports().map_err(no)?;
    rank(&mut found.ports);
    let refused = found.refused.iter().map(|why| format!("; {why}")).collect::<String>();
    let mut nics = Vec::new();
    for port in found.ports {
        let gid = options.gids.get(&name(&port)).copied();
        let wanted = options.devices.contains(&name(&port));
        if port.state != PortState::Active && !wanted {
            continue;
        }
        if port.state != PortState::Active {
            return Err(no(format!(
                "{port} has no link: {:?}; bring it up, or name another NIC",
                port.state
            )));
        }
        match port.choose_gid(gid) {
            Ok(gid) => {
                let gid = gid.index;
                nics.push((name(&port), Nic { verbs: verbs.clone(), port, gid }));
            }
            Err(why) if wanted => return Err(no(why)),
            Err(why) => log::warn!("{port} is not used: {why}"),
        }
    }
    if nics.is_empty() {
        return Err(no(format!(
            "libibverbs ({path}) has no RDMA device with an active port here{refused}; `ibv_devices` and `rdma link` \
             show what there is, and nothing else is taken in its place"
        )));
    }
    log::info!("libibverbs ({path}): {} NIC(s)", nics.len());
    Ok(nics)
}

impl VerbsRmaDevice {
    /// Opens the port.
    pub fn open(nic: Nic, depth: usize) -> Result<VerbsRmaDevice> {
        let device = Device::open(&nic.verbs, &nic.port, nic.gid).map_err(no)?;
        log::info!("{} is reached at GID {}", device.port(), device.gid());
        Ok(VerbsRmaDevice {
            initiators: HashMap::new(),
            targets: HashMap::new(),
            device,
            depth,
            gathered: Vec::new(),
            down: None,
            failed: None,
            unread: None,
            not_stopped: HashMap::new(),
            moved: false,
            looked: Instant::now(),
            taken: Vec::new(),
            events: Vec::new(),
        })
    }

    /// Ends queue pairs of a session; nothing of it can be said to be stopped once one was not ended.
    fn end(&mut self, session: u64, queues: impl IntoIterator<Item = Queue>) -> Result<()> {
        for queue in queues {
            if let Err(error) = queue.close() {
                self.not_stopped.insert(session, goes_on(&error));
            }
        }
        self.not_stopped.get(&session).cloned().map_or(Ok(()), Err)
    }

    /// Ends those by which a session's peer reaches memory here.
    fn end_targets(&mut self, session: u64) -> Result<()> {
        let targets: Vec<Queue> =
            self.targets.extract_if(|(of, _), _| *of == session).map(|(_, target)| target).collect();
        self.end(session, targets)
    }

    /// Before a queue pair is connected: by which entry of the port's table it is reached.
    fn find_gid(&mut self) -> Result<()> {
        if self.moved {
            self.device.find_gid().map_err(no)?;
            self.moved = false;
        }
        Ok(())
    }

    /// Takes the device's events.
    fn look(&mut self) {
        self.looked = Instant::now();
        self.unread = self.device.events(&mut self.events).err().map(no);
        let (port, number) = (self.device.port(), self.device.port().number);
        for event in self.events.drain(..) {
            match event {
                Event::PortDown { port: at } if at == number => {
                    self.down = Some(Error::new(Code::PeerLost, format!("{port} has lost its link")));
                }
                Event::PortUp { port: at } if at == number => (self.down, self.moved) = (None, true),
                Event::DeviceFatal { what } => {
                    self.failed = Some(Error::new(Code::PeerLost, format!("{port}: {what}")))
                }
                // Its requests come back and say why.
                Event::QueueFailed { what, .. } => log::debug!("{port}: {what}"),
                Event::PortChanged { what, .. } => {
                    log::info!("{port}: {what}");
                    self.moved = true;
                }
                Event::Other { what } => log::info!("{port}: {what}"),
                Event::PortDown { .. } | Event::PortUp { .. } => {}
            }
        }
    }
}

impl RmaDevice for VerbsRmaDevice {
    type Known = Rc<Registration>;
    /// The session, which names its initiator queue pair.
    type Conn = u64;

    fn longest(&self) -> u64 {
        u64::from(self.device.port().longest).clamp(1, LONGEST)
    }

    fn depth(&self) -> Option<usize> {
        None
    }

    fn pieces(&self) -> usize {
        self.initiators.values().next().map_or(1, Queue::max_pieces).min(PIECES)
    }

    fn is_held(known: &Rc<Registration>, nics: usize) -> bool {
        known.holders() > nics
    }

    /// Where it is, for whoever reads it: a connection is asked for.
    fn address(&mut self) -> Result<Vec<u8>> {
        Ok(self.device.gid().raw.to_vec())
    }

    fn watch(&mut self, epoll: &Rc<Epoll>, token: u64) -> Result<bool> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        self.device.watch(epoll, token).map_err(fail)?;
        self.device.watch_events(epoll, token).map_err(fail)?;
        Ok(true)
    }

    fn may_wait(&mut self) -> bool {
        self.look();
        let may = self.device.may_wait();
        self.unread = self.unread.take().or(may.as_ref().err().map(no));
        self.unread.is_none() && may.unwrap_or(false)
    }

    fn register(&mut self, memory: RegionMemory) -> Result<(Rc<Registration>, NicKey)> {
        let registration = match memory {
            RegionMemory::Host(memory) => self.device.register(memory),
            RegionMemory::Device(memory) => self.device.register_gpu(memory),
        };
        let registration = registration.map_err(no)?;
        let key = NicKey { key: registration.rkey().into(), base: registration.base() };
        Ok((registration, key))
    }

    fn reach(&mut self, _session: u64, _address: &[u8]) -> Result<Option<u64>> {
        Ok(None)
    }

    fn call(&mut self, session: u64, _address: &[u8]) -> Result<Vec<u8>> {
        // What was there before goes first: its places are needed again.
        self.initiators.remove(&session);
        self.find_gid()?;
        let initiator = Queue::open(&self.device, self.depth).map_err(no)?;
        let told = initiator.address().encode();
        self.initiators.insert(session, initiator);
        Ok(told)
    }

    fn connect(&mut self, session: u64, told: &[u8]) -> Result<u64> {
        self.find_gid()?;
        let address = QueueAddress::decode(told).map_err(no)?;
        let initiator = self
            .initiators
            .get_mut(&session)
            .ok_or_else(|| no("the NIC's queue pair to the peer is gone"))?;
        initiator.connect(&address).map_err(no)?;
        Ok(session)
    }

    fn disconnect_peer(&mut self, session: u64, from: u8, _told: &[u8]) -> Result<Disconnected> {
        let before = self.targets.remove(&(session, from));
        self.end(session, before)?;
        Ok(Disconnected::Alone)
    }

    fn admit(&mut self, session: u64, from: u8, told: &[u8]) -> Result<Vec<u8>> {
        if let Some(why) = self.failed.as_ref().or(self.down.as_ref()) {
            return Err(why.clone());
        }
        self.find_gid()?;
        let address = QueueAddress::decode(told).map_err(no)?;
        // It posts nothing itself.
        let mut target = Queue::open(&self.device, 1).map_err(no)?;
        target.connect(&address).map_err(no)?;
        let answer = target.address().encode();
        self.targets.insert((session, from), target);
        Ok(answer)
    }

    fn leave(&mut self, session: u64, _conn: u64) {
        self.initiators.remove(&session);
    }

    fn post(&mut self, operation: &Operation<'_, Self>) -> Result<Posted> {
        let session = operation.conn;
        let initiator = self
            .initiators
            .get_mut(&session)
            .ok_or_else(|| no("the NIC's queue pair to the peer is gone"))?;
        let empty = Piece { memory: operation.memory, offset: 0, len: 0 };
        let mut pieces = [empty; PIECES];
        for (piece, run) in pieces.iter_mut().zip(operation.pieces) {
            (piece.offset, piece.len) = (run.offset, run.len);
        }
        let rma = Rma {
            op: if operation.op == Op::Read { RmaOp::Read } else { RmaOp::Write },
            pieces: &pieces[..operation.pieces.len().min(PIECES)],
            remote: operation.remote,
            rkey: operation.key as u32,
            token: operation.token,
        };
        match initiator.post(&rma).map_err(|error| from_host(Code::PeerLost, error))? {
            Posted::Full => Ok(Posted::Full),
            Posted::Yes => {
                if !self.gathered.contains(&session) {
                    self.gathered.push(session);
                }
                Ok(Posted::Yes)
            }
        }
    }

    fn flush(&mut self) {
        for session in self.gathered.drain(..) {
            // Where that is refused, all requests of the queue pair come back and say so.
            if let Some(Err(error)) = self.initiators.get_mut(&session).map(Queue::flush) {
                log::debug!("{error}");
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<()> {
        if self.looked.elapsed() > LOOK {
            self.look();
        }
        let polled = self.device.poll(&mut self.taken);
        for completion in self.taken.drain(..) {
            let Completion::Request { queue, token, result } = completion else { continue };
            // What a queue pair that is closed had in flight was told when it was closed.
            if self.initiators.values().any(|initiator| initiator.id() == queue) {
                done.push(Done { token, result: result.map_err(lost) });
            }
        }
        polled.map_err(no)?;
        self.unread.clone().map_or(Ok(()), Err)
    }

    fn down(&self) -> Option<Error> {
        self.not_stopped.values().next().or(self.failed.as_ref()).or(self.down.as_ref()).cloned()
    }

    fn cancel(&mut self, session: u64) -> Result<CancelScope> {
        let initiator = self.initiators.remove(&session);
        self.end(session, initiator)?;
        Ok(CancelScope::Session)
    }

    fn fence(&mut self, session: u64) -> Result<bool> {
        self.end_targets(session)?;
        Ok(false)
    }

    fn forget(&mut self, session: u64) {
        self.initiators.remove(&session);
        // One that stays is why the NIC is out of use, and why a fence that comes later fails.
        let _ = self.end_targets(session);
    }
}
