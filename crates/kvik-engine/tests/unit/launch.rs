//! What becomes of a transfer whose session or local link ends while it looks for a transport.

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
use kvik_transport::local::LOCAL_LINK;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

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

/// A transfer between that memory and a grant of an owner.
fn request(owner: Identity, memory: Arc<Ending>, op: Op, want: Preference) -> TransferRequest {
    let layout = Arc::new(Layout::contiguous(1, 4096).unwrap());
    let ticket = Ticket {
        engine: owner.engine,
        incarnation: owner.incarnation,
        grant: GrantId([1; 16]),
        right: if op == Op::Read { Right::Read } else { Right::Write },
        expiry: Duration::from_secs(60),
        layout: layout.digest(),
        host: kvik_core::HostTag::new(&[0; 16], 0),
        addresses: Vec::new(),
    };
    let view = View::new(layout, [0].into(), 0..1, 0..1, Order::LayerFirst).unwrap();
    TransferRequest {
        ticket: Arc::new(ticket),
        op: Some(op),
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
        want,
        verify: Verify::Auto,
        sums: None,
        after: None,
        extents: 1,
        pages: 1,
    }
}

/// An engine with a session, and with a transfer that has not begun on it; with what the transfer's caller hears.
fn with_a_transfer(
    memory: &Arc<Ending>,
    op: Op,
    want: Preference,
) -> (Arc<Inner>, Identity, u64, Arc<End<Report>>) {
    let inner = Inner::start(Setup::new(Config::default(), Vec::new()).unwrap()).unwrap();
    let Inner { base, peers, transfers, .. } = &*inner;
    let owner = Identity { engine: EngineId([7; 16]), incarnation: Incarnation(1) };
    let facts = base.local().facts;
    base.transports.all().iter().for_each(|one| one.add_session(SESSION, &facts));
    peers.begin(SESSION, owner, None, peers.charge_session().unwrap());
    let end = Arc::<End<Report>>::default();
    let request = request(owner, memory.clone(), op, want);
    let (entry, _) = entry(&inner, request, boottime(), Listener::Caller(end.clone())).unwrap();
    let id = transfers.add([entry], |_| ()).start;
    (inner, owner, id, end)
}

fn stop(inner: &Inner) {
    inner.base.transports.all().iter().for_each(|one| one.stop());
}

/// Whether the engine was told to reach this owner.
fn dials(inner: &Inner, owner: Identity) -> bool {
    let dials = |command: &ControlCommand| matches!(command, ControlCommand::Dial(peer, _) if *peer == owner);
    inner.base.commands.take().iter().any(dials)
}

#[test]
fn a_session_that_ends_while_transports_are_asked_is_waited_for_as_any_that_broke() {
    let memory = Arc::new(Ending::default());
    let (inner, owner, id, end) = with_a_transfer(&memory, Op::Write, Preference::Auto);
    memory.0.set(Arc::downgrade(&inner)).unwrap();
    inner.transfers.launch(id, SESSION);
    assert!(!inner.peers.has(SESSION), "nobody asked for the device");
    assert!(end.outcome().is_none(), "{:?}", end.outcome());
    assert!(dials(&inner, owner), "nobody dials its owner");
    stop(&inner);
}

/// A process that dies closes its local link and its session one after the other.
#[test]
fn a_peer_that_closed_its_local_link_is_given_time_to_end_its_session_as_well() {
    let memory = Arc::new(Ending::default());
    let (inner, owner, id, end) = with_a_transfer(&memory, Op::Read, Preference::Local);
    let Inner { base, peers, transfers, .. } = &*inner;
    let closed = Error::new(Code::PeerLost, "the peer closed its local link");
    base.transports.local().unwrap().failed(SESSION, &closed);
    transfers.launch(id, SESSION);
    assert!(end.outcome().is_none(), "{:?}", end.outcome());
    peers.end(SESSION, &closed);
    transfers.wait_again(&owner, &closed);
    assert!(end.outcome().is_none(), "{:?}", end.outcome());
    assert!(dials(&inner, owner), "nobody dials its owner");
    stop(&inner);
}

#[test]
fn a_local_link_that_failed_under_a_session_that_goes_on_fails_what_has_asked_for_it() {
    let lost = (Code::PeerLost, Some(LOCAL_LINK));
    for (code, after) in [(Code::ProtocolError, None), lost] {
        let memory = Arc::new(Ending::default());
        let (inner, _, id, end) = with_a_transfer(&memory, Op::Read, Preference::Local);
        let local = inner.base.transports.local().unwrap();
        local.failed(SESSION, &Error::new(code, "so it is"));
        if let Some(after) = after {
            inner.transfers.launch(id, SESSION);
            assert!(end.outcome().is_none(), "{:?}", end.outcome());
            assert_eq!(local.expire(Instant::now() + after), [SESSION]);
        }
        inner.transfers.launch(id, SESSION);
        let error = end.outcome().expect("it is over").unwrap_err();
        assert_eq!(error.code, Code::TransportUnavailable);
        assert!(error.text.contains("the local link failed: so it is"), "{error}");
        stop(&inner);
    }
}

/// A thread that finds the session gone may come later than one that has begun the transfer on the next session.
#[test]
fn what_has_begun_does_not_wait_for_a_session() {
    let memory = Arc::new(Ending::default());
    let (inner, _, id, end) = with_a_transfer(&memory, Op::Read, Preference::Auto);
    let transfers = &inner.transfers;
    lock(&transfers.table).entries.get_mut(&id).unwrap().key = Some((SESSION + 1, 2));
    transfers.lost_before(id, Error::new(Code::PeerLost, "the peer is gone"));
    assert_eq!(
        transfers.next_deadline(),
        None,
        "the control thread would look for its deadline all the time"
    );
    assert!(end.outcome().is_none(), "{:?}", end.outcome());
    stop(&inner);
}
