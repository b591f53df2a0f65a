//! What becomes of a transfer whose session ends while it looks for a transport.

use super::*;
use crate::begin::entry;
use crate::config::{Config, Verify};
use crate::end::End;
use crate::inner::Inner;
use crate::report::Report;
use crate::setup::Setup;
use crate::tag::Tag;
use crate::transfers::request::Listener;
use kvik_core::{Class, EngineId, GrantId, Incarnation, Layout, Order, RegionId, Right, Ticket, View};
use kvik_host::HostError;
use kvik_host::clock::boottime;
use kvik_host::device::{Device, DeviceKind, DeviceMemory, DeviceStream, DmaBuf, Handle};
use kvik_proto::Select;
use kvik_transport::RegionMemory;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

const SESSION: u64 = 7;

/// Memory of a device. Whoever asks for the device finds the session ended.
#[derive(Default)]
struct Ending(OnceLock<Weak<Inner>>);

struct Gpu;

fn refused<T>() -> Result<T, HostError> {
    Err(HostError::InvalidArgument("there is no such device".into()))
}

impl fmt::Debug for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ending")
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU 0")
    }
}

impl Device for Gpu {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Other
    }
    fn number(&self) -> u32 {
        0
    }
    fn id(&self) -> usize {
        1
    }
    fn ipc(&self) -> &'static str {
        "none"
    }
    fn stream(&self, _: usize) -> Result<Box<dyn DeviceStream>, HostError> {
        refused()
    }
}

impl DeviceMemory for Ending {
    fn device(&self) -> &dyn Device {
        if let Some(inner) = self.0.get().and_then(Weak::upgrade).filter(|inner| inner.peers.has(SESSION)) {
            inner.peers.end(SESSION, &Error::new(Code::PeerLost, "the peer is gone"));
        }
        &Gpu
    }
    fn addr(&self) -> usize {
        1 << 40
    }
    fn len(&self) -> usize {
        4096
    }
    fn writable(&self) -> bool {
        true
    }
    fn copy_in(&self, _: usize, _: &[u8]) -> Result<(), HostError> {
        refused()
    }
    fn copy_out(&self, _: usize, _: &mut [u8]) -> Result<(), HostError> {
        refused()
    }
    fn flush_writes(&self) -> Result<(), HostError> {
        refused()
    }
    fn export(&self) -> Result<Handle, HostError> {
        refused()
    }
    fn dmabuf(&self) -> Result<DmaBuf, HostError> {
        refused()
    }
}

/// A write of that memory to a grant of this engine.
fn write(owner: Identity, memory: Arc<Ending>) -> TransferRequest {
    let layout = Arc::new(Layout::contiguous(1, 4096).unwrap());
    let ticket = Ticket {
        engine: owner.engine,
        incarnation: owner.incarnation,
        grant: GrantId([1; 16]),
        right: Right::Write,
        expiry: Duration::from_secs(60),
        layout: layout.digest(),
        host: kvik_core::HostTag::new(&[0; 16], 0),
        addresses: Vec::new(),
    };
    let view = View::new(layout, [0].into(), 0..1, 0..1, Order::LayerFirst).unwrap();
    TransferRequest {
        ticket: Arc::new(ticket),
        op: Some(Op::Write),
        class: Class::Handover,
        warm: None,
        memory: Some((RegionMemory::Device(memory), RegionId(1), view)),
        _region: None,
        select: Select::default(),
        content: None,
        confirm: true,
        readers: 1,
        tag: Tag::default(),
        extend: Duration::ZERO,
        deadline: boottime() + Duration::from_secs(60),
        want: Preference::Auto,
        verify: Verify::Auto,
        sums: None,
        after: None,
        extents: 1,
        pages: 1,
    }
}

#[test]
fn a_session_that_ends_while_transports_are_asked_is_waited_for_as_any_that_broke() {
    let inner = Inner::start(Setup::new(Config::default(), Vec::new()).unwrap()).unwrap();
    let Inner { base, peers, transfers, .. } = &*inner;
    let owner = Identity { engine: EngineId([7; 16]), incarnation: Incarnation(1) };
    let facts = base.local().facts;
    base.transports.all().iter().for_each(|one| one.add_session(SESSION, &facts));
    peers.begin(SESSION, owner, None, peers.charge_session().unwrap());
    let (memory, end) = (Arc::new(Ending::default()), Arc::<End<Report>>::default());
    let request = write(owner, memory.clone());
    let (entry, _) = entry(&inner, request, boottime(), Listener::Caller(end.clone())).unwrap();
    let id = transfers.add([entry], |_| ()).start;
    memory.0.set(Arc::downgrade(&inner)).unwrap();
    transfers.launch(id, SESSION);
    assert!(!peers.has(SESSION), "nobody asked for the device");
    assert!(end.outcome().is_none(), "{:?}", end.outcome());
    let dials = |command: &ControlCommand| matches!(command, ControlCommand::Dial(peer, _) if *peer == owner);
    assert!(base.commands.take().iter().any(dials), "nobody dials its owner");
    base.transports.all().iter().for_each(|one| one.stop());
}
