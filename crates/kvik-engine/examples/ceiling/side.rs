//! An engine of the measurement: the protocol's state and what the engine's threads do around each call of it.

use crate::{CHUNK, now};
use kvik_core::{EngineId, GrantId, Incarnation, RegionId, Right, Use, View};
use kvik_proto::{
    Batch, Check, ChunkHeader, Claim, Closed, Established, Event, Facts, Identity, Local, Node, Offer, Op,
    Open, Path, Protocol, Secret, Select, Side, Timing, WorkId, WorkOutcome, WorkRequest,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(600);

/// Stands for memory: it is only handed back.
pub type Memory = Arc<()>;
pub type Ended = (WorkId, WorkOutcome);
pub type Chunks = Vec<WorkRequest<Memory>>;

pub fn identity(number: usize) -> Identity {
    let mut engine = [0; 16];
    engine[..8].copy_from_slice(&(number as u64 + 1).to_le_bytes());
    Identity { engine: EngineId(engine), incarnation: Incarnation(number as u64 + 1) }
}

pub fn local(number: usize) -> Local {
    Local { identity: identity(number), secret: Secret::new(None), facts: Facts::default() }
}

/// One thread's calls of the protocol.
type Calls<'a> = Node<Memory, &'a Protocol<Memory>>;

/// The protocol, with what `kvik-engine` does around each call: the time, the events, the sessions that have something
/// to send, and when the control thread must wake.
pub struct Engine {
    protocol: Protocol<Memory>,
    view: View,
    memory: Memory,
    wakes_at: AtomicU64,
    /// Transfers that have ended since somebody looked.
    ended: AtomicUsize,
    /// Something is to be sent on a control connection.
    output: AtomicBool,
    grants: AtomicU64,
}

impl Engine {
    pub fn new(identity: Identity, view: &View) -> Engine {
        Engine {
            protocol: Protocol::new(identity, Timing::default()),
            view: view.clone(),
            memory: Arc::default(),
            wakes_at: AtomicU64::new(0),
            ended: AtomicUsize::new(0),
            output: AtomicBool::new(false),
            grants: AtomicU64::new(0),
        }
    }

    /// As the engine does it.
    fn node<T>(&self, f: impl FnOnce(&mut Calls<'_>, Duration) -> T) -> T {
        let now = now();
        let mut node = Calls::on(&self.protocol, now);
        let result = f(&mut node, now);
        let (mut events, mut unsent) = (Vec::new(), Vec::new());
        while let Some(event) = node.next_event() {
            events.push(event);
        }
        node.take_unsent(&mut unsent);
        if !unsent.is_empty() {
            self.output.store(true, Ordering::Relaxed);
        }
        events.into_iter().for_each(|event| self.on_event(event));
        let timeout = self.protocol.next_timeout();
        if timeout.is_some_and(|at| (at.as_nanos() as u64) < self.wakes_at.load(Ordering::SeqCst)) {
            self.wakes_at.store(0, Ordering::SeqCst);
        }
        result
    }

    fn on_event(&self, event: Event) {
        match event {
            Event::Finished(finished) => {
                finished.outcome.expect("a transfer");
                self.ended.fetch_add(1, Ordering::Relaxed);
            }
            Event::SessionDown(_, error) => panic!("a session ended: {error}"),
            _ => {}
        }
    }

    pub fn add_session(&self, established: Established) {
        self.node(|node, now| node.add_session(established, now));
    }

    pub fn tick(&self) {
        self.node(|node, now| node.tick(now));
    }

    /// A grant for one reader.
    pub fn grant(&self) -> GrantId {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.grants.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        let expires = now() + LONG;
        let offer = Offer {
            region: self.memory.clone(),
            region_id: RegionId(1),
            view: self.view.clone(),
            content: None,
            right: Right::Read,
            uses: Use::Once(1),
            expires,
            latest: expires,
            slot: 1,
            generation: 1,
            keys: Arc::default(),
            ring: None,
            closed: Closed::default(),
        };
        self.node(|node, now| node.grants().give(GrantId(id), offer, now)).expect("a grant");
        GrantId(id)
    }

    pub fn begin(&self, session: u64, grant: GrantId) {
        let side = Side {
            region: self.memory.clone(),
            region_id: RegionId(1),
            view: self.view.clone(),
            fence: None,
        };
        let open = Open {
            class: kvik_core::Class::Handover,
            grant,
            layout: self.view.layout().digest(),
            content: None,
            op: Op::Read,
            path: Path::Channels,
            sums: true,
            check: Check::No,
            confirm: true,
            readers: 1,
            deadline: now() + LONG,
            chunk: CHUNK,
            side: Some(side),
            select: Select::default(),
            extend: Duration::ZERO,
        };
        self.node(|node, now| node.session(session).begin(open, now)).expect("a transfer");
    }

    /// Claims up to so many chunks to send at once.
    pub fn claim(&self, session: u64, most: usize, into: &mut Chunks) {
        self.node(|node, now| match most {
            1 => into.extend(node.session(session).next_of(Path::Channels, Claim::Next, now)),
            _ => {
                let most = Batch { requests: most, bytes: u64::MAX };
                node.session(session).next_batch(Path::Channels, Claim::Next, most, now, into);
            }
        });
    }

    pub fn place(&self, session: u64, header: &ChunkHeader) -> Option<WorkRequest<Memory>> {
        self.node(|node, now| node.session(session).place(header, now)).expect("a chunk that fits")
    }

    pub fn done(&self, id: WorkId, outcome: WorkOutcome) {
        self.node(|node, _| node.work_done(id, outcome));
    }

    /// Several at once.
    pub fn batch_done(&self, ended: &mut Vec<Ended>) {
        self.node(|node, _| node.batch_done(ended));
    }

    /// How many transfers have ended since this was asked.
    pub fn take_ended(&self) -> usize {
        self.ended.swap(0, Ordering::Relaxed)
    }

    pub fn has_output(&self) -> bool {
        self.output.swap(false, Ordering::Relaxed)
    }

    pub fn take_output(&self, session: u64, into: &mut Vec<u8>) {
        Calls::on(&self.protocol, Duration::ZERO).session(session).take_output(into);
    }

    pub fn receive(&self, session: u64, bytes: &[u8]) {
        self.node(|node, now| node.session(session).receive(bytes, now));
    }
}
