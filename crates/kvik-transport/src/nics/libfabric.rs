//! NICs by libfabric: two endpoints, which all peers share.
//!
//! With one the NIC's thread posts its own operations; the other is what peers reach. So an operation that never ends
//! costs the first one alone: it is closed, which stops whatever was posted. The address that peers know stays, until
//! one of them must be cut off.

use super::NicOptions;
use super::device::{
    CancelScope, Disconnected, Done, LONGEST, Operation, Posted, RmaDevice, goes_on, lost, no,
};
use crate::{RegionMemory, from_host};
use kvik_core::{Code, Error, Result};
use kvik_host::event::Epoll;
use kvik_host::fabric::{Device, Endpoint, Fabric, FabricError, Nic, Registration, Rma, RmaOp, Slot};
use kvik_host::rma::Completion;
use kvik_proto::{NicKey, Op};
use std::collections::{HashSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

/// How many of its addresses a NIC does not take again: where the lowest free one is given out, as many endpoints are
/// opened to find another.
const ADDRESSES: usize = 64;

/// See the module's text.
pub(crate) struct FabricRmaDevice {
    nic: Arc<Nic>,
    depth: usize,
    // In the order in which they are closed.
    posts: Side,
    target: Side,
    /// The addresses that peers have reached it by lately.
    had: VecDeque<Vec<u8>>,
    watch: Watch,
    /// What was taken off a queue, kept for its room.
    taken: Vec<Completion<FabricError>>,
    device: Rc<Device>,
}

/// One of the two endpoints.
#[derive(Default)]
struct Side {
    /// None from when it was closed until it is needed again: opening one takes its time, and whoever waits for the end
    /// of what the old one had must not wait for that.
    endpoint: Option<Endpoint>,
    /// Why one that was to be closed is open until the process ends.
    not_stopped: Option<Error>,
}

impl Side {
    fn close(&mut self) -> Result<()> {
        if let Some(Err(error)) = self.endpoint.take().map(Endpoint::close) {
            self.not_stopped = Some(goes_on(&error));
        }
        self.not_stopped.clone().map_or(Ok(()), Err)
    }

    fn opened(&mut self, open: impl FnOnce() -> Result<Endpoint>) -> Result<&mut Endpoint> {
        if let Some(why) = &self.not_stopped {
            return Err(why.clone());
        }
        let endpoint = match self.endpoint.take() {
            Some(endpoint) => endpoint,
            None => open()?,
        };
        Ok(self.endpoint.insert(endpoint))
    }

    fn may_wait(&mut self) -> bool {
        self.endpoint.as_mut().is_none_or(Endpoint::may_wait)
    }
}

/// What tells of an endpoint's completions, and as what.
type Watch = Option<(Rc<Epoll>, u64)>;

fn open(device: &Rc<Device>, depth: usize, watch: &Watch) -> Result<Endpoint> {
    let mut endpoint = Endpoint::open(device, depth).map_err(no)?;
    if let Some((epoll, token)) = watch {
        endpoint.watch(epoll, *token).map_err(|error| from_host(Code::InvalidArgument, error))?;
    }
    Ok(endpoint)
}

/// As [`open`], by an address that is not in `had`, and is from now on: a peer that was cut off may still send to it.
/// Some providers give an address out again as soon as it is free: a port of TCP, say.
fn open_elsewhere(
    device: &Rc<Device>,
    depth: usize,
    watch: &Watch,
    had: &mut VecDeque<Vec<u8>>,
) -> Result<Endpoint> {
    // Open, they keep their addresses from the next one.
    let mut known = Vec::new();
    while known.len() < ADDRESSES {
        let mut endpoint = open(device, depth, watch)?;
        let address = endpoint.address().map_err(no)?;
        if had.contains(&address) {
            known.push(endpoint);
            continue;
        }
        had.truncate(ADDRESSES - 1);
        had.push_front(address);
        return Ok(endpoint);
    }
    let text = "the NIC gives no address by which it was not reached before; restart the process";
    Err(Error::new(Code::TransportUnavailable, text))
}

/// The NICs of a provider, one for each device.
pub(super) fn nics(options: &NicOptions, provider: &str) -> Result<Vec<Arc<Nic>>> {
    let fabric = Fabric::load(options.library.as_deref()).map_err(no)?;
    // Its writes into another process go on after its own endpoint was closed, and closing one with operations under
    // case ends the process (seen with libfabric 1.17): nothing that was promised for an end would hold. Where no
    // process writes into another one (`FI_SHM_DISABLE_CMA`) that is better, but forgetting a peer of the own process
    // that has closed its endpoint ends the process still (seen with 2.1 and 2.6), and a target never forgets who has
    // reached it: the 257th peer takes another's place, unnoticed in a build without assertions (`smr_map_add` of 2.1).
    if provider == "shm" {
        let text = "libfabric's provider \"shm\" cannot be stopped in the middle of a transfer: use transport \"local\"";
        return Err(no(text));
    }
    let source = options.source.map(|address| address.to_string());
    let found = fabric.nics(provider, source.as_deref());
    let (path, (major, minor)) = (fabric.path().display(), fabric.version());
    let found = found.map_err(|error| no(format!("{error} ({path}, version {major}.{minor})")))?;
    let mut devices = HashSet::new();
    let nics: Vec<_> = found.into_iter().filter(|nic| devices.insert(nic.name())).map(Arc::new).collect();
    if nics.is_empty() {
        return Err(no(format!(
            "libfabric {major}.{minor} ({path}) has no NIC of provider {provider:?} for one-sided transfers here; \
             `fi_info -p {provider}` shows what it sees, and nothing else is taken in its place"
        )));
    }
    log::info!("libfabric {major}.{minor} ({path}): {} NIC(s) of {:?}", nics.len(), nics[0].provider());
    Ok(nics)
}

impl FabricRmaDevice {
    /// Opens the NIC.
    pub fn open(nic: &Arc<Nic>, depth: usize) -> Result<FabricRmaDevice> {
        let device = Device::open(nic).map_err(no)?;
        match device.gpus() {
            Ok(()) => log::info!("NIC {} reaches memory of GPUs by dma-bufs", nic.name()),
            Err(why) => log::debug!("NIC {} reaches no memory of GPUs: {why}", nic.name()),
        }
        let mut device = FabricRmaDevice {
            nic: nic.clone(),
            depth,
            posts: Side::default(),
            target: Side::default(),
            had: VecDeque::new(),
            watch: None,
            taken: Vec::new(),
            device,
        };
        // What cannot be opened is said before anybody relies on it.
        device.posts()?;
        device.target()?;
        Ok(device)
    }

    /// The endpoint that posts, opened where it is not.
    fn posts(&mut self) -> Result<&mut Endpoint> {
        self.posts.opened(|| open(&self.device, self.depth, &self.watch))
    }

    /// The one that peers reach, opened where it is not.
    fn target(&mut self) -> Result<&mut Endpoint> {
        self.target.opened(|| open_elsewhere(&self.device, self.depth, &self.watch, &mut self.had))
    }
}

impl RmaDevice for FabricRmaDevice {
    type Known = Rc<Registration>;
    type Conn = Slot;

    fn longest(&self) -> u64 {
        (self.nic.longest() as u64).clamp(1, LONGEST)
    }

    fn depth(&self) -> Option<usize> {
        Some(self.depth.min(self.nic.depth()))
    }

    /// EFA takes one, and so do several others.
    fn pieces(&self) -> usize {
        1
    }

    fn is_held(known: &Rc<Registration>, nics: usize) -> bool {
        known.holders() > nics
    }

    fn address(&mut self) -> Result<Vec<u8>> {
        self.target()?.address().map_err(no)
    }

    fn watch(&mut self, epoll: &Rc<Epoll>, token: u64) -> Result<bool> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        let waits = self.posts()?.watch(epoll, token).map_err(fail)?
            && self.target()?.watch(epoll, token).map_err(fail)?;
        if waits {
            self.watch = Some((epoll.clone(), token));
        }
        Ok(waits)
    }

    fn may_wait(&mut self) -> bool {
        self.posts.may_wait() && self.target.may_wait()
    }

    fn register(&mut self, memory: RegionMemory) -> Result<(Rc<Registration>, NicKey)> {
        let known = match memory {
            RegionMemory::Host(memory) => self.device.register(memory, true).map_err(|error| {
                let hint = "raise the limit of locked memory (ulimit -l) if that is why";
                Error::new(Code::TransportUnavailable, format!("{error}; {hint}"))
            }),
            RegionMemory::Device(memory) => self.device.register_gpu(memory, true).map_err(no),
        }?;
        let key = NicKey { key: known.key(), base: known.base() };
        Ok((known, key))
    }

    fn reach(&mut self, session: u64, address: &[u8]) -> Result<Option<Slot>> {
        self.connect(session, address).map(Some)
    }

    /// The address that is known here: a peer that has another one by now has cut the connection to this one.
    fn call(&mut self, _session: u64, address: &[u8]) -> Result<Vec<u8>> {
        Ok(address.to_vec())
    }

    fn connect(&mut self, _session: u64, told: &[u8]) -> Result<Slot> {
        self.posts()?.add_peer(told).map_err(lost)
    }

    fn disconnect_peer(&mut self, session: u64, _from: u8, told: &[u8]) -> Result<Disconnected> {
        let known = self.target.endpoint.as_mut().map(Endpoint::address).transpose().map_err(no)?;
        // One by another address was cut before, when the peer had not heard of it yet; so was one by an endpoint that is
        // closed.
        match known {
            Some(known) if known != told => Ok(Disconnected::Before),
            Some(_) => self.fence(session).map(|_| Disconnected::All),
            None => self.fence(session).map(|_| Disconnected::Before),
        }
    }

    fn admit(&mut self, _session: u64, _from: u8, _told: &[u8]) -> Result<Vec<u8>> {
        self.address()
    }

    fn leave(&mut self, _session: u64, conn: Slot) {
        // With a closed endpoint all that it knew is forgotten.
        if let Some(Err(error)) = self.posts.endpoint.as_mut().map(|posts| posts.remove_peer(conn)) {
            log::debug!("a NIC's peer cannot be forgotten: {error}");
        }
    }

    fn post(&mut self, operation: &Operation<'_, Self>) -> Result<Posted> {
        let [run] = operation.pieces else {
            return Err(Error::new(
                Code::InvalidArgument,
                "libfabric was given an operation of several runs",
            ));
        };
        let rma = Rma {
            op: if operation.op == Op::Read { RmaOp::Read } else { RmaOp::Write },
            memory: operation.memory,
            offset: run.offset,
            len: run.len,
            peer: operation.conn,
            remote: operation.remote,
            key: operation.key,
            token: operation.token,
        };
        let posts = self.posts.endpoint.as_mut().ok_or_else(|| {
            Error::new(Code::PeerLost, "the NIC's connection to the peer was closed to stop a transfer")
        })?;
        posts.post(&rma).map_err(|error| from_host(Code::PeerLost, error))
    }

    /// Posting begins it.
    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<()> {
        if let Some(posts) = &mut self.posts.endpoint {
            posts.poll(&mut self.taken).map_err(lost)?;
        }
        let ended = self.taken.drain(..);
        done.extend(ended.map(|ended| Done { token: ended.token, result: ended.result.map_err(lost) }));
        // Nothing ends there, but many move the bytes of peers only when asked.
        let target = self.target.endpoint.as_mut();
        let polled = target.map_or(Ok(()), |target| target.poll(&mut self.taken));
        self.taken.clear();
        polled.map_err(lost)
    }

    /// Of the NIC itself libfabric tells by failed operations only.
    fn down(&self) -> Option<Error> {
        self.posts.not_stopped.as_ref().or(self.target.not_stopped.as_ref()).cloned()
    }

    fn cancel(&mut self, _session: u64) -> Result<CancelScope> {
        self.posts.close()?;
        Ok(CancelScope::All)
    }

    fn fence(&mut self, _session: u64) -> Result<bool> {
        self.target.close()?;
        Ok(true)
    }

    /// All peers share the endpoints; connections are left one by one.
    fn forget(&mut self, _session: u64) {}
}
