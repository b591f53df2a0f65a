//! RDMA devices, as this host has them: queue pairs of one process that reach each other's memory.
//!
//! They need a device, which a soft-RoCE one is: `KVIK_TEST_VERBS=rxe0 cargo test --test verbs --
//! --include-ignored`. With two names the two sides are on a device each; these must reach each other, which
//! two soft-RoCE devices of one host do not.
//!
//! Where there is none, [`over`] runs them over the stand-in for libibverbs (`tests/standins/verbs`).

mod device;
mod failing;
#[path = "../../../../tests/standins/make.rs"]
#[allow(dead_code)]
mod make;
mod moving;
mod over;
#[path = "../common/peer.rs"]
mod peer;
#[path = "../common/said.rs"]
mod said;
#[path = "../../../../tests/standins/standin.rs"]
#[allow(dead_code)]
mod standin;
#[path = "../../../../tests/common/watch.rs"]
mod watch;

use kvik_host::verbs::{
    Completion, Device, Piece, Port, Posted, Queue, QueueAddress, Registration, RequestError, Rma, RmaOp,
    Verbs,
};
use kvik_host::{HugePages, Memory};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
const LEN: usize = 4 << 20;
const PAGE: usize = 4096;

/// The devices to test with.
fn names() -> Vec<String> {
    let names = std::env::var("KVIK_TEST_VERBS").unwrap_or_default();
    let names: Vec<String> = names.split(',').filter(|name| !name.is_empty()).map(Into::into).collect();
    assert!(!names.is_empty(), "KVIK_TEST_VERBS names no RDMA device, such as rxe0");
    names
}

/// The library: the stand-in's, in a process that has its devices.
fn verbs() -> Arc<Verbs> {
    let standin = std::env::var_os(standin::FOLDER).map(|_| standin::Standin::Verbs.library());
    Verbs::load(standin.as_deref()).unwrap()
}

fn port(verbs: &Verbs, name: &str) -> Port {
    let found = verbs.ports().unwrap();
    let port = found.ports.iter().find(|port| port.device == name);
    port.unwrap_or_else(|| panic!("no {name} among {:?}; refused: {:?}", found.ports, found.refused)).clone()
}

struct Side {
    queue: Queue,
    known: Rc<Registration>,
    memory: Arc<Memory>,
    device: Rc<Device>,
    done: Vec<Completion>,
}

impl Side {
    fn on(device: &Rc<Device>, fill: u8, depth: usize) -> Side {
        let memory = Arc::new(Memory::shared(LEN, HugePages::Never).unwrap());
        memory.copy_in(0, &vec![fill; LEN]).unwrap();
        let known = device.register(memory.clone()).unwrap();
        let queue = Queue::open(device, depth).unwrap();
        Side { queue, known, memory, device: device.clone(), done: Vec::new() }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.memory.copy_out(0, &mut bytes).unwrap();
        bytes
    }

    fn fill(&self, with: u8) {
        self.memory.copy_in(0, &vec![with; LEN]).unwrap();
    }

    fn poll(&mut self) {
        self.device.poll(&mut self.done).unwrap();
    }

    /// The requests that have come back.
    fn ended(&self) -> Vec<(u64, Result<(), RequestError>)> {
        let request = |completion: &Completion| match completion {
            Completion::Request { token, result, .. } => Some((*token, result.clone())),
            _ => None,
        };
        self.done.iter().filter_map(request).collect()
    }

    fn until(&mut self, what: &str, mut is_so: impl FnMut(&Side) -> bool) {
        let began = Instant::now();
        while !is_so(self) {
            assert!(began.elapsed() < LIMIT, "never {what}; {} came back: {:?}", self.done.len(), self.done);
            self.poll();
        }
    }

    fn until_ended(&mut self, count: usize) {
        self.until("enough completions", |side| side.ended().len() >= count);
    }

    /// Bytes of this value.
    fn landed(&self, value: u8) -> usize {
        self.bytes().iter().filter(|byte| **byte == value).count()
    }

    /// Gathers a request of one piece.
    fn gather(&mut self, op: RmaOp, peer: &Registration, at: usize, len: usize, token: u64) -> Posted {
        self.gather_to(op, (peer.base(), peer.rkey()), at, len, token)
    }

    /// The same, for a peer of which only base and key are known.
    fn gather_to(&mut self, op: RmaOp, peer: (u64, u32), at: usize, len: usize, token: u64) -> Posted {
        let pieces = [Piece { memory: &self.known, offset: at, len }];
        let (remote, rkey) = (peer.0 + at as u64, peer.1);
        self.queue.post(&Rma { op, pieces: &pieces, remote, rkey, token }).unwrap()
    }
}

/// A device for each side, with a completion queue of its own.
fn devices() -> (Rc<Device>, Rc<Device>) {
    let (verbs, names) = (verbs(), names());
    let open = |name: &str| {
        let port = port(&verbs, name);
        let gid = port.choose_gid(None).unwrap().index;
        Device::open(&verbs, &port, gid).unwrap()
    };
    (open(&names[0]), open(names.get(1).unwrap_or(&names[0])))
}

/// Two sides that are connected, their addresses having gone as bytes.
fn connected(devices: &(Rc<Device>, Rc<Device>), depth: usize) -> (Side, Side) {
    let (mut a, mut b) = (Side::on(&devices.0, 1, depth), Side::on(&devices.1, 2, depth));
    let (to_a, to_b) = (a.queue.address().encode(), b.queue.address().encode());
    connect(&mut a, &to_b);
    connect(&mut b, &to_a);
    (a, b)
}

fn connect(side: &mut Side, address: &[u8]) {
    try_connect(side, address).unwrap();
}

fn try_connect(side: &mut Side, address: &[u8]) -> Result<(), String> {
    side.queue.connect(&QueueAddress::decode(address).unwrap()).map_err(|error| error.to_string())
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LIMIT, "{what} does not come");
        std::thread::yield_now();
    }
}

fn pair(depth: usize) -> (Side, Side) {
    connected(&devices(), depth)
}

fn all_are(bytes: &[u8], value: u8) -> bool {
    bytes.iter().all(|byte| *byte == value)
}
