//! One side of a transfer, and what tests do with two of them.

use crate::standin::Standin;
use kvik_host::fabric::{Device, Endpoint, Fabric, FabricError, Nic, Posted, Registration, Rma, RmaOp, Slot};
use kvik_host::rma::Completion;
use kvik_host::{HugePages, Memory};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
pub const LEN: usize = 1 << 20;

pub fn fabric() -> Arc<Fabric> {
    Fabric::load(Some(&Standin::Fabric.library())).unwrap()
}

pub fn nics() -> Vec<Arc<Nic>> {
    fabric().nics("efa", None).unwrap().into_iter().map(Arc::new).collect()
}

pub struct Side {
    pub endpoint: Endpoint,
    pub known: Rc<Registration>,
    pub memory: Arc<Memory>,
    pub device: Rc<Device>,
    pub done: Vec<Completion<FabricError>>,
}

impl Side {
    pub fn new(nic: &Arc<Nic>, fill: u8, depth: usize) -> Side {
        let device = Device::open(nic).unwrap();
        let endpoint = Endpoint::open(&device, depth).unwrap();
        let memory = Arc::new(Memory::shared(LEN, HugePages::Never).unwrap());
        memory.copy_in(0, &vec![fill; LEN]).unwrap();
        let known = device.register(memory.clone(), true).unwrap();
        Side { endpoint, known, memory, device, done: Vec::new() }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.memory.copy_out(0, &mut bytes).unwrap();
        bytes
    }

    /// Bytes of this value.
    pub fn landed(&self, value: u8) -> usize {
        self.bytes().iter().filter(|byte| **byte == value).count()
    }

    pub fn tokens(&self) -> Vec<u64> {
        self.done.iter().map(|done| done.token).collect()
    }
}

/// Two sides on one device, the first filled with 1 and the other with 2, and the first one's slot for the other.
pub fn pair(nic: &Arc<Nic>, depth: usize) -> (Side, Side, Slot) {
    let (mut a, mut b) = (Side::new(nic, 1, depth), Side::new(nic, 2, depth));
    let slot = a.endpoint.add_peer(&b.endpoint.address().unwrap()).unwrap();
    (a, b, slot)
}

pub fn rma<'a>(
    op: RmaOp,
    (here, there): (&'a Rc<Registration>, &Registration),
    peer: Slot,
    (from, len, token): (usize, usize, u64),
) -> Rma<'a> {
    let (remote, key) = (there.base() + from as u64, there.key());
    Rma { op, memory: here, offset: from, len, peer, remote, key, token }
}

/// Posts each: offset, bytes and token.
pub fn post_all(
    a: &mut Side,
    there: &Registration,
    slot: Slot,
    op: RmaOp,
    parts: impl IntoIterator<Item = (usize, usize, u64)>,
) {
    let known = a.known.clone();
    for part in parts {
        assert_eq!(a.endpoint.post(&rma(op, (&known, there), slot, part)).unwrap(), Posted::Yes, "{part:?}");
    }
}

/// Polls until there are as many completions.
pub fn until(a: &mut Side, count: usize) {
    let began = Instant::now();
    while a.done.len() < count {
        assert!(began.elapsed() < LIMIT, "{} of {count} completions", a.done.len());
        a.endpoint.poll(&mut a.done).unwrap();
    }
}

pub fn wait(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < LIMIT, "{what} does not come");
        std::thread::yield_now();
    }
}
