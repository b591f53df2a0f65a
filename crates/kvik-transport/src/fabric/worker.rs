//! A NIC's thread.

use super::active::Active;
use super::{Command, Fence, Inbox, name_of};
use crate::{Desk, Held, finish, from_host};
use kvik_core::{Code, Error, Result};
use kvik_host::event::{Epoll, Events, Interest};
use kvik_host::fabric::{
    Completion, Device, Endpoint, FabricError, Nic, Posted, Registration, Rma, RmaOp, Slot,
};
use kvik_proto::{NicKey, Op, OrderOutcome};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const BELL: u64 = 0;
const QUEUE: u64 = 1;
/// Orders in hand: enough small chunks to fill a queue, few enough that transfers take turns.
const ORDERS: usize = 16;
/// Bytes of an operation: a NIC is as fast with this as with more, and transfers take turns.
const LONGEST: u64 = 1 << 20;
/// How long an operation may take to end after its transfer has.
const PATIENCE: Duration = Duration::from_millis(250);
/// How long the thread sleeps at most while something is under way: stops are looked at.
const GLANCE: Duration = Duration::from_millis(10);
/// An idle thread wakes this rarely; everything that matters wakes it at once.
const NAP: Duration = Duration::from_secs(3600);
/// Polls in vain before a thread that has nothing to wait for lets others run for a moment.
const SPINS: u32 = 200;
const BREATH: Duration = Duration::from_micros(20);

/// A session's peer.
#[derive(Default)]
struct Peer {
    slot: Option<Slot>,
    /// Which of its NICs this one talks to.
    nic: usize,
    /// The session is over: it is forgotten when no operation that is under way names it.
    over: bool,
}

pub(crate) struct Worker {
    inbox: Arc<Inbox>,
    /// Which NIC of how many.
    number: usize,
    count: usize,
    depth: usize,
    longest: u64,
    epoll: Epoll,
    /// Own operations go here.
    posts: Endpoint,
    /// What peers reach.
    target: Endpoint,
    /// Both tell by a descriptor when to poll.
    waits: bool,
    device: Rc<Device>,
    desk: Option<Arc<dyn Desk>>,
    known: HashMap<usize, Rc<Registration>>,
    /// Memory that is let go of when nobody else holds it.
    leaving: HashMap<usize, Rc<Registration>>,
    peers: HashMap<u64, Peer>,
    /// Sessions that may have something to post.
    wants: BTreeSet<u64>,
    orders: Vec<Option<Active>>,
    /// Orders with something left to post.
    turns: VecDeque<usize>,
    done: Vec<Completion>,
}

fn refused(error: FabricError) -> Error {
    Error::new(Code::TransportUnavailable, error.to_string())
}

impl Worker {
    /// Opens the NIC: the thread's state, and the address that peers reach it by.
    pub fn open(
        nic: &Arc<Nic>,
        (number, count): (usize, usize),
        inbox: Arc<Inbox>,
        depth: usize,
    ) -> Result<(Worker, Vec<u8>)> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        let epoll = Epoll::new().map_err(fail)?;
        epoll.add(&inbox.bell, BELL, Interest::READ).map_err(fail)?;
        let device = Device::open(nic).map_err(refused)?;
        let mut posts = Endpoint::open(&device, depth).map_err(refused)?;
        let mut target = Endpoint::open(&device, depth).map_err(refused)?;
        let address = target.address().map_err(refused)?;
        let waits = posts.watch(&epoll, QUEUE).map_err(fail)? && target.watch(&epoll, QUEUE).map_err(fail)?;
        let worker = Worker {
            inbox,
            number,
            count,
            depth,
            longest: (nic.longest() as u64).clamp(1, LONGEST),
            epoll,
            posts,
            target,
            waits,
            device,
            desk: None,
            known: HashMap::new(),
            leaving: HashMap::new(),
            peers: HashMap::new(),
            wants: BTreeSet::new(),
            orders: (0..ORDERS).map(|_| None).collect(),
            turns: VecDeque::new(),
            done: Vec::new(),
        };
        Ok((worker, address))
    }

    pub fn run(&mut self) {
        let (mut events, mut commands) = (Events::new(8), Vec::new());
        let mut idle = 0;
        loop {
            let nap = self.nap(idle);
            if let Err(error) = self.epoll.wait(&mut events, nap) {
                log::error!("a NIC's thread cannot wait and ends: {error}");
                return self.end();
            }
            if events.iter().any(|event| event.token == BELL) {
                if let Err(error) = self.inbox.bell.drain() {
                    log::error!("a NIC's thread cannot hear its bell: {error}");
                }
                self.inbox.take(&mut commands);
                for command in commands.drain(..) {
                    if matches!(command, Command::Stop) {
                        return self.end();
                    }
                    self.obey(command);
                }
            }
            let moved = self.progress();
            idle = if moved { 0 } else { idle.saturating_add(1) };
        }
    }

    /// How long the thread may sleep now.
    fn nap(&mut self, idle: u32) -> Duration {
        let busy = self.orders.iter().any(Option::is_some)
            || !self.leaving.is_empty()
            || self.desk.as_ref().is_some_and(|desk| desk.is_exposed());
        match (busy, self.waits) {
            (_, true) if !(self.posts.may_wait() && self.target.may_wait()) => Duration::ZERO,
            (true, true) => GLANCE,
            (true, false) if idle < SPINS => Duration::ZERO,
            (true, false) => BREATH,
            (false, _) => NAP,
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Serve(desk) => self.desk = Some(desk),
            Command::Post(session) => drop(self.wants.insert(session)),
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
            Command::Forget(session) => self.forget(session),
            Command::Fence(fence) => self.fence(&fence),
            // Their flags, and the desk, are looked at in every turn.
            Command::Halt | Command::Expose | Command::Stop => {}
        }
    }

    fn register(&mut self, memory: Held) -> Result<NicKey> {
        let name = name_of(&memory);
        let known = self.device.register(memory, true).map_err(|error| {
            let hint = "raise the limit of locked memory (ulimit -l) if that is why";
            Error::new(Code::TransportUnavailable, format!("{error}; {hint}"))
        })?;
        let key = NicKey { key: known.key(), base: known.base() };
        self.known.insert(name, known);
        Ok(key)
    }

    /// Lets go of memory that only NICs hold.
    fn let_go(&mut self) {
        let nics = self.count;
        self.leaving.retain(|_, known| Arc::strong_count(known.memory()) > nics);
    }

    /// The session's peer has other addresses.
    fn find(&mut self, session: u64) {
        let mut orders = self.orders.iter().flatten().filter(|active| active.order.id.session() == session);
        if orders.any(|active| active.out > 0) {
            return self.cut();
        }
        if let Some(slot) = self.peers.remove(&session).and_then(|peer| peer.slot)
            && let Err(error) = self.posts.remove_peer(slot)
        {
            log::debug!("a NIC's peer cannot be forgotten: {error}");
        }
        for (index, place) in self.orders.iter_mut().enumerate() {
            let of_peer = |active: &&mut Active| active.order.id.session() == session;
            if place.as_mut().filter(of_peer).is_some_and(Active::try_again) && !self.turns.contains(&index) {
                self.turns.push_back(index);
            }
        }
    }

    /// One turn: takes what has ended, and posts what there is room for. Whether anything moved.
    fn progress(&mut self) -> bool {
        if !self.leaving.is_empty() {
            self.let_go();
        }
        let Some(desk) = self.desk.clone() else { return false };
        let mut done = std::mem::take(&mut self.done);
        for (what, polled) in
            [("own", self.posts.poll(&mut done)), ("target", self.target.poll(&mut Vec::new()))]
        {
            if let Err(error) = polled {
                log::error!("the completions of a NIC's {what} endpoint cannot be read: {error}");
            }
        }
        let mut moved = !done.is_empty();
        for completion in done.drain(..) {
            if let Some(Some(active)) = self.orders.get_mut(completion.token as usize) {
                let failed = |error: FabricError| Error::new(Code::PeerLost, error.to_string());
                active.ended(completion.result.map_err(failed));
            }
        }
        self.done = done;
        if self.orders.iter_mut().flatten().any(|active| active.is_stuck(PATIENCE)) {
            self.cut();
        }
        self.report(&*desk);
        if self.peers.values().any(|peer| peer.over) {
            self.forget_those_over();
        }
        moved |= self.take_orders(&*desk);
        moved |= self.post();
        // What could not be posted at all is over at once.
        self.report(&*desk);
        moved
    }

    fn report(&mut self, desk: &dyn Desk) {
        for (index, place) in self.orders.iter_mut().enumerate() {
            if let Some(over) = place.take_if(|active| active.is_over()) {
                self.turns.retain(|turn| *turn != index);
                over.report(desk);
            }
        }
    }

    /// Takes orders while there are places for them.
    fn take_orders(&mut self, desk: &dyn Desk) -> bool {
        let mut took = false;
        for (index, place) in self.orders.iter_mut().enumerate().filter(|(_, place)| place.is_none()) {
            let Some(order) = next_order(desk, &mut self.wants) else { return took };
            took = true;
            match Active::new(order) {
                Ok(active) => {
                    *place = Some(active);
                    self.turns.push_back(index);
                }
                Err(order) => {
                    let text = "an order for a channel or a copy was given to a NIC";
                    finish(desk, *order, OrderOutcome::Failed(Error::new(Code::ProtocolError, text)));
                }
            }
        }
        took
    }

    /// Posts operations while there is room, of each order in turn.
    fn post(&mut self) -> bool {
        let mut posted = false;
        while self.posts.room() > 0 {
            let Some(index) = self.turns.pop_front() else { return posted };
            match self.post_next(index) {
                Ok(Some(Posted::Yes)) => {
                    posted = true;
                    self.turns.push_back(index);
                }
                Ok(Some(Posted::Full)) => {
                    self.turns.push_front(index);
                    return posted;
                }
                Ok(None) => {}
                Err(error) => {
                    if let Some(Some(active)) = self.orders.get_mut(index) {
                        active.fail(error);
                    }
                }
            }
        }
        posted
    }

    /// Posts an order's next operation; none is left where there is none.
    fn post_next(&mut self, index: usize) -> Result<Option<Posted>> {
        let Some(Some(active)) = self.orders.get_mut(index) else { return Ok(None) };
        let Some(extent) = active.next(self.longest) else { return Ok(None) };
        let no = |text: &str| Error::new(Code::TransportUnavailable, text);
        let session = active.order.id.session();
        let peer = reach(&mut self.posts, &mut self.peers, self.desk.as_deref(), session, self.number)?;
        let memory = self.known.get(&name_of(&active.order.region));
        let memory = memory.ok_or_else(|| no("the NIC does not know this memory: its region was closed"))?;
        let key = active.source.keys.get(peer.1);
        let key = key.ok_or_else(|| no("the peer's NIC does not know its memory"))?;
        let rma = Rma {
            op: if active.op == Op::Read { RmaOp::Read } else { RmaOp::Write },
            memory,
            offset: extent.right as usize,
            len: extent.len as usize,
            peer: peer.0,
            remote: key.base.wrapping_add(extent.left),
            key: key.key,
            token: index as u64,
        };
        let posted = self.posts.post(&rma).map_err(|error| from_host(Code::PeerLost, error))?;
        if posted == Posted::Yes {
            active.posted(extent.len);
        }
        Ok(Some(posted))
    }

    /// Closes the endpoint of the own operations: none of them touches memory of this process any more. What other
    /// transfers had under way begins again on a new one.
    fn cut(&mut self) {
        match self.reopened() {
            Ok(endpoint) => self.posts = endpoint,
            Err(error) => {
                log::error!("a NIC's endpoint cannot be opened again: {error}; the NIC is out of use");
                return;
            }
        }
        self.peers.clear();
        self.turns.clear();
        for (index, place) in self.orders.iter_mut().enumerate() {
            if place.as_mut().is_some_and(Active::begin_again) {
                self.turns.push_back(index);
            }
        }
    }

    fn reopened(&mut self) -> Result<Endpoint> {
        let mut endpoint = Endpoint::open(&self.device, self.depth).map_err(refused)?;
        endpoint.watch(&self.epoll, QUEUE).map_err(|error| from_host(Code::InvalidArgument, error))?;
        Ok(endpoint)
    }

    fn forget(&mut self, session: u64) {
        self.wants.remove(&session);
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.over = true;
            self.forget_those_over();
        }
    }

    /// Gives back the slots of sessions that are over. Operations that are under way name theirs still.
    fn forget_those_over(&mut self) {
        let under_way = |session| {
            let mut orders = self.orders.iter().flatten();
            orders.any(|active| active.out > 0 && active.order.id.session() == session)
        };
        self.peers.retain(|session, peer| {
            if !peer.over || under_way(*session) {
                return true;
            }
            if let Some(slot) = peer.slot
                && let Err(error) = self.posts.remove_peer(slot)
            {
                log::debug!("a NIC's peer cannot be forgotten: {error}");
            }
            false
        });
    }

    /// Nothing of the session's peer may land here any more.
    fn fence(&mut self, fence: &Fence) {
        let session = fence.session;
        for active in self.orders.iter_mut().flatten().filter(|active| active.order.id.session() == session) {
            active.fail(Error::new(Code::PeerLost, "the session has ended"));
        }
        if self.orders.iter().flatten().any(|active| active.order.id.session() == session && active.out > 0) {
            self.cut();
        }
        let desk = self.desk.clone();
        if let Some(desk) = &desk {
            self.report(&**desk);
        }
        let moved = self.reopened().and_then(|mut target| {
            let address = target.address().map_err(refused)?;
            self.target = target;
            Ok(address)
        });
        match (moved, desk) {
            (Ok(address), Some(desk)) => {
                desk.nic_moved(self.number, address);
                if fence.is_done() {
                    desk.fenced(session);
                }
            }
            // Then pages stay in quarantine, and nobody takes them for free.
            (Err(error), _) => log::error!("a NIC's endpoint cannot be replaced: {error}"),
            (Ok(_), None) => {}
        }
    }

    fn end(&mut self) {
        // With it the operations end; so do their orders.
        if let (Ok(endpoint), Some(desk)) = (self.reopened(), self.desk.take()) {
            self.posts = endpoint;
            for mut active in self.orders.iter_mut().filter_map(Option::take) {
                active.out = 0;
                active.fail(Error::new(Code::EngineClosed, "the engine was closed"));
                active.report(&*desk);
            }
        }
    }
}

/// The next order of any session that may have one.
fn next_order(desk: &dyn Desk, wants: &mut BTreeSet<u64>) -> Option<kvik_proto::Order<Held>> {
    while let Some(session) = wants.first().copied() {
        match desk.next_post(session) {
            Some(order) => return Some(order),
            None => drop(wants.remove(&session)),
        }
    }
    None
}

/// The slot of a session's peer, and which of its NICs it is.
fn reach(
    endpoint: &mut Endpoint,
    peers: &mut HashMap<u64, Peer>,
    desk: Option<&dyn Desk>,
    session: u64,
    number: usize,
) -> Result<(Slot, usize)> {
    let peer = peers.entry(session).or_default();
    if let Some(slot) = peer.slot {
        return Ok((slot, peer.nic));
    }
    let gone = || Error::new(Code::PeerLost, "the session has ended");
    let nics = desk.and_then(|desk| desk.peer_nics(session)).ok_or_else(gone)?;
    peer.nic = number % nics.addresses.len().max(1);
    let address = nics.addresses.get(peer.nic).ok_or_else(gone)?;
    let slot = endpoint.add_peer(address).map_err(|error| Error::new(Code::PeerLost, error.to_string()))?;
    peer.slot = Some(slot);
    Ok((slot, peer.nic))
}
