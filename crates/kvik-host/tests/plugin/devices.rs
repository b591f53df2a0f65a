//! Memory of devices that a plug-in reaches, and what is said of memory that it does not.
//!
//! The device is a memfd behind addresses at which there is nothing.

use crate::plugins::{broken, sample};
use kvik_host::HostError;
use kvik_host::device::{Device, DeviceKind, DeviceMemory, DeviceStream, DmaBuf, Handle};
use kvik_host::plugin::{Conn, Plugin, PluginDevice, PluginError, Posted, Region, Rma, RmaOp};
use kvik_host::rma::Run;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
/// Where the memory lies in its dma-buf.
const OFFSET: usize = 512;
const LEN: usize = 1 << 20;

#[derive(Clone, Copy)]
struct Board(DeviceKind);

impl fmt::Display for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "board 3")
    }
}

impl Device for Board {
    fn kind(&self) -> DeviceKind {
        self.0
    }
    fn number(&self) -> u32 {
        3
    }
    fn id(&self) -> usize {
        3
    }
    fn ipc(&self) -> &'static str {
        "none"
    }
    fn stream(&self, _room: usize) -> Result<Box<dyn DeviceStream>, HostError> {
        Err(none("streams"))
    }
}

/// What the board's driver makes of a memory.
#[derive(Clone, Copy)]
enum DmaBufs {
    Mapped,
    /// The processor may not map them, as with most drivers.
    Unmapped,
    None,
}

/// Memory of a board.
struct OnBoard {
    board: Board,
    file: File,
    dmabufs: DmaBufs,
    writable: bool,
}

fn none(what: &str) -> HostError {
    HostError::InvalidArgument(format!("board 3 has no {what}"))
}

impl fmt::Debug for OnBoard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OnBoard")
    }
}

impl OnBoard {
    fn new(fill: u8) -> OnBoard {
        let file = File::from(memfd_create("board", MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(&vec![0xAA; OFFSET], 0).unwrap();
        let memory =
            OnBoard { board: Board(DeviceKind::Cuda), file, dmabufs: DmaBufs::Mapped, writable: true };
        memory.copy_in(0, &vec![fill; LEN]).unwrap();
        memory
    }
}

impl DeviceMemory for OnBoard {
    fn device(&self) -> &dyn Device {
        &self.board
    }
    /// Whoever takes it for an address of the processor ends there.
    fn addr(&self) -> usize {
        0x1000
    }
    fn len(&self) -> usize {
        LEN
    }
    fn writable(&self) -> bool {
        self.writable
    }
    fn copy_in(&self, offset: usize, from: &[u8]) -> Result<(), HostError> {
        self.file.write_all_at(from, (OFFSET + offset) as u64).unwrap();
        Ok(())
    }
    fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), HostError> {
        self.file.read_exact_at(into, (OFFSET + offset) as u64).unwrap();
        Ok(())
    }
    fn flush_writes(&self) -> Result<(), HostError> {
        Ok(())
    }
    fn export(&self) -> Result<Handle, HostError> {
        Err(none("handles"))
    }
    fn dmabuf(&self) -> Result<DmaBuf, HostError> {
        let fd = match self.dmabufs {
            DmaBufs::Mapped => self.file.try_clone().unwrap().into(),
            DmaBufs::Unmapped => eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
            DmaBufs::None => return Err(none("dma-bufs today")),
        };
        Ok(DmaBuf { fd, offset: OFFSET as u64, ordered: true })
    }
}

struct Side {
    memory: Arc<OnBoard>,
    known: Rc<Region>,
    device: PluginDevice,
}

impl Side {
    fn of(file: PathBuf, memory: OnBoard) -> Result<Side, PluginError> {
        let memory = Arc::new(memory);
        let mut device = PluginDevice::open(&Plugin::load(&file).unwrap(), 0, 16)?;
        let known = device.register_device(memory.clone())?;
        Ok(Side { memory, known, device })
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.memory.copy_out(0, &mut bytes).unwrap();
        bytes
    }

    fn post(&mut self, op: RmaOp, conn: Conn, to: &Region, pieces: &[Run]) -> Result<Posted, HostError> {
        let (remote, key) = (to.base() + 77, to.key());
        self.device.post(&Rma { op, memory: &self.known, pieces, conn, remote, key, token: 1 })
    }
}

/// Both work until `a` has nothing in flight any more.
fn settle(a: &mut Side, b: &mut Side) {
    let (began, mut done) = (Instant::now(), Vec::new());
    while a.device.in_flight() > 0 {
        assert!(began.elapsed() < LIMIT, "{} operations have not ended", a.device.in_flight());
        a.device.poll(&mut done).unwrap();
        b.device.poll(&mut Vec::new()).unwrap();
    }
    assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
}

fn refused(file: PathBuf, memory: OnBoard, words: &[&str]) {
    let text = Side::of(file, memory).map(|_| ()).unwrap_err().to_string();
    words.iter().for_each(|word| assert!(text.contains(word), "{word:?} is not in: {text}"));
}

#[test]
fn pieces_of_a_device_go_both_ways() {
    let (mut a, mut b) =
        (Side::of(sample(), OnBoard::new(1)).unwrap(), Side::of(sample(), OnBoard::new(2)).unwrap());
    let conn = a.device.open_conn(b.device.address()).unwrap();
    let pieces = [Run { offset: LEN - 1000, len: 1000 }, Run { offset: 8192, len: 3000 }];
    for (piece, fill) in pieces.iter().zip([5, 6]) {
        a.memory.copy_in(piece.offset, &vec![fill; piece.len]).unwrap();
    }
    let expected = [vec![5; 1000], vec![6; 3000]].concat();
    assert_eq!(a.post(RmaOp::Write, conn, &b.known, &pieces).unwrap(), Posted::Yes);
    settle(&mut a, &mut b);
    let there = b.bytes();
    assert!(there[77..77 + expected.len()] == expected);
    assert!(there[..77].iter().chain(&there[77 + expected.len()..]).all(|byte| *byte == 2));
    let before = a.bytes();
    a.memory.copy_in(0, &vec![1; LEN]).unwrap();
    assert_eq!(a.post(RmaOp::Read, conn, &b.known, &pieces).unwrap(), Posted::Yes);
    settle(&mut a, &mut b);
    assert!(a.bytes() == before);
    let mut head = [0; OFFSET];
    a.memory.file.read_exact_at(&mut head, 0).unwrap();
    assert!(head.iter().all(|byte| *byte == 0xAA), "what lies before it in the dma-buf was written");
}

#[test]
fn nothing_is_posted_beyond_a_devices_memory_or_into_what_is_read_only() {
    let mut a = Side::of(sample(), OnBoard { writable: false, ..OnBoard::new(1) }).unwrap();
    let b = Side::of(sample(), OnBoard::new(2)).unwrap();
    let conn = a.device.open_conn(b.device.address()).unwrap();
    for run in [Run { offset: LEN - 1, len: 2 }, Run { offset: usize::MAX, len: 2 }] {
        let error = a.post(RmaOp::Write, conn, &b.known, &[run]).unwrap_err();
        assert!(matches!(error, HostError::OutOfBounds { .. }), "{error}");
    }
    let error = a.post(RmaOp::Read, conn, &b.known, &[Run { offset: 0, len: 1 }]).unwrap_err();
    assert!(matches!(error, HostError::ReadOnlyMemory), "{error}");
    assert_eq!(a.device.in_flight(), 0);
}

#[test]
fn a_devices_memory_is_held_as_long_as_it_is_known() {
    let Side { memory, known, device } = Side::of(sample(), OnBoard::new(1)).unwrap();
    assert_eq!((Arc::strong_count(&memory), known.holders()), (2, 2));
    drop(known);
    assert_eq!(Arc::strong_count(&memory), 1);
    drop(device);
    let Side { memory, known, device } = Side::of(broken("remove"), OnBoard::new(1)).unwrap();
    drop((known, device));
    assert_eq!(Arc::strong_count(&memory), 2, "the plug-in may still touch it");
}

#[test]
fn what_a_plug_in_does_not_reach_is_refused_with_the_reason() {
    let other = OnBoard { board: Board(DeviceKind::Other), ..OnBoard::new(1) };
    refused(sample(), other, &["the plug-in sample", "reaches no memory of board 3"]);
    let hidden = || OnBoard { dmabufs: DmaBufs::None, ..OnBoard::new(1) };
    refused(sample(), hidden(), &["needs a dma-buf of the memory of board 3", "no dma-bufs today"]);
    let unmapped = OnBoard { dmabufs: DmaBufs::Unmapped, ..OnBoard::new(1) };
    refused(sample(), unmapped, &["making memory known", "may not map the GPU's dma-buf"]);
    // One that has not asked for a dma-buf is given none.
    assert!(Side::of(broken("nothing"), hidden()).is_ok());
    assert!(Side::of(broken("nothing"), OnBoard::new(1)).is_ok());
    // One that takes what there is: its key says what there was.
    let key = |memory| Side::of(broken("wanted"), memory).unwrap().known.key();
    assert_eq!((key(OnBoard::new(1)), key(hidden())), (1, 0));
    // A table of before, and one that has half of it.
    for rule in ["first", "half"] {
        refused(broken(rule), OnBoard::new(1), &["reaches no memory of board 3"]);
    }
    refused(broken("region"), OnBoard::new(1), &["it gives no region"]);
    refused(broken("dmabuf"), OnBoard::new(1), &["which memory a device reaches", "9 says nothing"]);
}
