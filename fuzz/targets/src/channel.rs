//! Data channels: headers of chunks, and the threads that place what follows them.

use crate::feed;
use crate::greetings::{identity, shaken};
use arbitrary::Unstructured;
use kvik_core::{Class, Code, Error, GrantId, Layout, Order as Sort, RegionId, Result, View, page_sum};
use kvik_host::socket::{TcpListener, TcpOptions};
use kvik_host::thread::ThreadOptions;
use kvik_host::{HugePages, Memory};
use kvik_proto::{
    Batch, CHUNK_HEADER, ChunkHeader, Claim, Event, MAX_CHUNK, MAX_SUMS, Nics, Node, Op, Open, Path,
    STATUS_VOID, STATUS_WHOLE, Select, Side, Timing, WorkId, WorkOutcome, WorkRequest,
};
use kvik_transport::tcp::{Tcp, TcpConfig};
use kvik_transport::{Ended, Placement, Queue, RegionMemory, RmaPeers, Services, SessionEvents, WorkSource};
use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// A channel that is not given up within this time hangs.
const PATIENCE: Duration = Duration::from_secs(10);
/// The node's time stands still.
const NOW: Duration = Duration::from_secs(1000);

/// A header is what it says or refused.
pub fn chunk(data: &[u8]) {
    let mut bytes = [0; CHUNK_HEADER];
    let len = data.len().min(CHUNK_HEADER);
    bytes[..len].copy_from_slice(&data[..len]);
    if let Ok(header) = ChunkHeader::decode(&bytes) {
        assert_eq!(header.encode(), bytes, "a header has one form");
    }
    let Ok(header) = header(&mut Unstructured::new(data), feed::number) else { return };
    let possible = header.len > 0 && header.len <= MAX_CHUNK && header.sums <= MAX_SUMS;
    match ChunkHeader::decode(&header.encode()) {
        Ok(back) => assert!(back == header && possible && back.trailer_bytes() <= 8 + 8 * MAX_SUMS as usize),
        Err(_) => assert!(!possible, "{header:?} was refused"),
    }
}

fn header(
    u: &mut Unstructured,
    mut number: impl FnMut(&mut Unstructured) -> arbitrary::Result<u64>,
) -> arbitrary::Result<ChunkHeader> {
    let (session, transfer, position) = (number(u)?, number(u)?, number(u)?);
    Ok(ChunkHeader { session, transfer, position, len: feed::small(u)?, sums: feed::small(u)? })
}

/// What an exec's node begins: a read of as many pages, whose chunks the channel brings.
const PAGES: u32 = 16;
const PAGE: u64 = 4096;

/// What the transport asks: one node, made anew for each input.
#[derive(Default)]
struct Table {
    served: Mutex<Option<Served>>,
    lost: Condvar,
}

struct Served {
    node: Node<RegionMemory>,
    session: u64,
    given: usize,
    back: usize,
    lost: bool,
}

impl Table {
    fn served(&self) -> MutexGuard<'_, Option<Served>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WorkSource for Table {
    fn claim(&self, _: Queue, _: Claim) -> Option<WorkRequest<RegionMemory>> {
        None
    }
    fn claim_batch(&self, _: Queue, _: Claim, _: Batch, _: &mut Vec<WorkRequest<RegionMemory>>) {}
    fn batch_done(&self, ended: &mut Vec<Ended>) {
        ended.drain(..).for_each(|(id, outcome)| self.done(id, outcome));
    }
    fn done(&self, id: WorkId, outcome: WorkOutcome) {
        if let Some(served) = self.served().as_mut().filter(|served| served.session == id.session()) {
            served.back += 1;
            served.node.work_done(id, outcome);
        }
    }
    fn stuck(&self, _: WorkId, _: Error) {}
    fn landed(&self, _: &mut WorkId) {}
}

impl Placement for Table {
    fn place(&self, session: u64, header: &ChunkHeader) -> Result<Option<WorkRequest<RegionMemory>>> {
        let mut served = self.served();
        let Some(served) = served.as_mut().filter(|served| served.session == session) else {
            return Ok(None);
        };
        let request = served.node.session(session).place(header, NOW)?;
        served.given += usize::from(request.is_some());
        Ok(request)
    }
}

impl SessionEvents for Table {
    fn heard(&self, session: u64) -> bool {
        self.served().as_ref().is_some_and(|served| served.session == session)
    }
    fn connect(&self, _: u64) {}
    fn broken(&self, session: u64, _: Error) {
        if let Some(served) = self.served().as_mut().filter(|served| served.session == session) {
            served.lost = true;
        }
        self.lost.notify_all();
    }
    fn flush_local(&self) {}
    fn fenced(&self, _: u64) {}
}

impl RmaPeers for Table {
    fn nics(&self, _: u64) -> Option<Nics> {
        None
    }
    fn moved(&self, _: Nics) {}
    fn call(&self, _: u64, _: kvik_proto::NicCall) {}
    fn answer(&self, _: u64, _: kvik_proto::NicAnswer) {}
    fn warm_up_done(&self, _: u64, _: usize, _: usize, _: Result<bool>) {}
}

/// What all inputs share: one data thread, and somewhere to connect to.
struct Stage {
    table: Arc<Table>,
    tcp: Tcp,
    listener: TcpListener,
    port: u16,
    memory: RegionMemory,
    view: View,
    turn: u32,
}

static STAGE: OnceLock<Mutex<Stage>> = OnceLock::new();

fn stage() -> Mutex<Stage> {
    let table = Arc::new(Table::default());
    let config = TcpConfig { threads: 1, channels: 1, tls: false };
    let tcp = Tcp::start(config, &Services::of(&table), &ThreadOptions::default()).expect("a thread");
    let listener = TcpListener::bind(([0, 0, 0, 0], 0).into(), 16, &TcpOptions::default()).expect("a port");
    let port = listener.local_addr().expect("its address").port();
    let memory = Memory::shared((u64::from(PAGES) * PAGE) as usize, HugePages::Never).expect("memory").into();
    let layout = Arc::new(Layout::contiguous(PAGES, PAGE).expect("a layout"));
    let pages: Vec<u32> = (0..PAGES).rev().collect();
    let view = View::new(layout, pages.into(), 0..1, 0..1, Sort::LayerFirst).expect("a view");
    Mutex::new(Stage { table, tcp, listener, port, memory, view, turn: 0 })
}

/// The threads of a data channel: chunks that fit, that do not fit, that come twice, and raw bytes. The connection
/// ends, every work request is given back, and the transfer ends once.
pub fn channel(data: &[u8]) {
    let mut stage = STAGE.get_or_init(stage).lock().unwrap_or_else(PoisonError::into_inner);
    let stage = &mut *stage;
    // Another address each time: the kernel keeps the pairs of closed connections for a minute.
    stage.turn = stage.turn.wrapping_add(1);
    let [_, a, b, c] = stage.turn.to_be_bytes();
    let mut peer =
        TcpStream::connect(SocketAddr::from(([127, a, b, c.max(1)], stage.port))).expect("a connection");
    let conn = loop {
        if let Some((conn, _)) = stage.listener.accept().expect("a listener") {
            break conn;
        }
    };
    let (mut served, transfer) = served(stage);
    let session = served.session;
    let bytes = stream(data, session, transfer);
    served.lost = false;
    *stage.table.served() = Some(served);
    stage.tcp.add(session, conn);
    // The other side may cut the channel before it has all.
    let _ = peer.write_all(&bytes).and_then(|()| peer.shutdown(Shutdown::Write));
    let waited = stage.table.lost.wait_timeout_while(stage.table.served(), PATIENCE, |served| {
        served.as_ref().is_some_and(|served| !served.lost)
    });
    let mut served = waited.unwrap_or_else(PoisonError::into_inner).0.take().expect("the node's state");
    assert!(served.lost, "the channel was not given up");
    assert_eq!(served.given, served.back, "a work request was kept");
    served.node.session(session).close(Error::new(Code::PeerLost, "cut"));
    let mut ends = 0;
    while let Some(event) = served.node.next_event() {
        ends += usize::from(matches!(event, Event::Finished(_)));
    }
    assert!(ends == 1 && served.node.is_quiet(), "the transfer ended {ends} times");
}

fn served(stage: &Stage) -> (Served, u64) {
    let (mut established, _) = shaken(None);
    established.session = established.session.wrapping_add(stage.turn.into()).max(1);
    let session = established.session;
    let mut node = Node::new(identity(1), Timing::default(), NOW);
    node.add_session(established, NOW);
    let side =
        Side { region: stage.memory.clone(), region_id: RegionId(1), view: stage.view.clone(), fence: None };
    let open = Open {
        grant: GrantId([1; 16]),
        layout: [0; 8],
        content: None,
        op: Op::Read,
        class: Class::Handover,
        path: Path::Channels,
        sums: true,
        check: kvik_proto::Check::No,
        confirm: true,
        readers: 1,
        deadline: NOW + Duration::from_secs(30),
        chunk: 2 * PAGE,
        side: Some(side),
        select: Select::default(),
        extend: Duration::ZERO,
    };
    let key = node.session(session).begin(open, NOW).expect("a transfer");
    (Served { node, session, given: 0, back: 0, lost: false }, key.1)
}

/// What the peer sends.
fn stream(data: &[u8], session: u64, transfer: u64) -> Vec<u8> {
    let Some((mode, data)) = data.split_first() else { return Vec::new() };
    if mode % 4 == 0 {
        return data.to_vec();
    }
    let (mut out, mut u) = (Vec::new(), Unstructured::new(data));
    while !u.is_empty() && out.len() < 1 << 20 && chunk_into(&mut out, &mut u, session, transfer).is_ok() {}
    out
}

fn chunk_into(out: &mut Vec<u8>, u: &mut Unstructured, session: u64, transfer: u64) -> arbitrary::Result<()> {
    let mut announced = ChunkHeader {
        session,
        transfer,
        position: u.int_in_range(0..=u64::from(PAGES) / 2)? * 2 * PAGE,
        len: 2 * PAGE as u32,
        sums: 2,
    };
    match u.int_in_range(0u8..=9)? {
        0 => announced.position = feed::number(u)?,
        1 => announced.len = feed::small(u)?.min(1 << 16),
        2 => announced.sums = feed::small(u)?.min(1500),
        3 => announced.transfer = feed::number(u)?,
        4 => announced.session = feed::number(u)?,
        _ => {}
    }
    out.extend(announced.encode());
    let payload = vec![u.arbitrary::<u8>()?; announced.len as usize];
    let mut trailer = match u.int_in_range(0u8..=5)? {
        0 => STATUS_VOID,
        1 => u.arbitrary()?,
        _ => STATUS_WHOLE,
    }
    .to_le_bytes()
    .to_vec();
    let honest = page_sum(payload.get(..PAGE as usize).unwrap_or_default());
    for _ in 0..announced.sums {
        trailer.extend(if u.ratio(7, 8)? { honest } else { u.arbitrary()? }.to_le_bytes());
    }
    out.extend(payload);
    out.extend(trailer);
    if u.ratio(1, 16)? {
        // From here on the stream is out of step.
        let keep = u.int_in_range(0..=out.len())?;
        out.truncate(keep);
    }
    Ok(())
}
