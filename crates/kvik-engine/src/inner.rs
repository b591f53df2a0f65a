//! What connects the parts of an engine: the protocol's events go to them from here, and transports' calls to the
//! protocol.
//!
//! Each part has a lock of its own. Whoever takes a second one takes it in this order: a control connection's output,
//! what peers' lives are told under, transfers, peers, what waits for notifications' ends, those of the protocol; and
//! one of any other part last (the table of peers that were met, regions, grants, events, metrics, commands).
//! `docs/architecture.md` has every lock, and the few pairs of those that come last.

use crate::base::Base;
use crate::commands::ControlCommand;
use crate::grants::Grants;
use crate::output::ControlConns;
use crate::peers::Peers;
use crate::protocol::Carrier;
use crate::regions::Regions;
use crate::setup::Setup;
use crate::stream_order::StreamOrder;
use crate::transfers::Transfers;
use kvik_core::{Error, Result};
use kvik_proto::{
    Batch, ChunkHeader, Claim, Event, NicAnswer, NicCall, Nics, Op, Path, Served, WorkId, WorkOutcome,
    WorkRequest,
};
use kvik_transport::{
    Ended, Placement, Queue, RegionMemory, RmaPeers, Services, SessionEvents, Transport, WorkSource,
};
use std::sync::Arc;

/// See the module's text.
pub(crate) struct Inner {
    pub base: Arc<Base>,
    pub conns: ControlConns,
    pub peers: Arc<Peers>,
    pub regions: Regions,
    pub grants: Grants,
    pub transfers: Arc<Transfers>,
    pub streams: Arc<StreamOrder>,
}

impl Inner {
    /// Without its control thread.
    ///
    /// # Errors
    /// As for [`Transports::start`](crate::transports::Transports::start); `InvalidArgument` where the machine has no
    /// memory or descriptors.
    pub fn start(setup: Setup) -> Result<Arc<Inner>> {
        let base = Arc::new(Base::new(setup)?);
        let peers = Arc::new(Peers::new(base.clone()));
        let transfers = Arc::new(Transfers::new(base.clone(), peers.clone()));
        let inner = Arc::new(Inner {
            conns: ControlConns::default(),
            regions: Regions::new(base.clone()),
            grants: Grants::new(base.clone()),
            streams: StreamOrder::new(base.clone(), transfers.clone()),
            transfers,
            peers,
            base,
        });
        let base = &inner.base;
        let carrier = Arc::downgrade(&inner);
        base.protocol.set_carrier(carrier);
        let (services, options) = (Services::of(&inner), base.thread_options());
        base.transports.start(&base.setup, base.fence.clone(), services, &options)?;
        Ok(inner)
    }

    fn wake(&self, queue: Queue) {
        self.base.transports.all().iter().for_each(|one| one.wake(queue));
    }

    fn on_served(&self, served: &Served) {
        if (served.op, served.path, served.outcome) == (Op::Write, Path::OneSided, Ok(())) {
            self.regions.make_seen();
        }
        let Base { observers, transports, .. } = &*self.base;
        observers.metrics.served(served, transports.of(served.path));
    }

    fn on_session_down(&self, session: u64, error: &Error) {
        self.conns.cut(session);
        if let Some(peer) = self.peers.end(session, error) {
            self.transfers.wait_again(&peer, error);
        }
        self.base.progress.note();
    }
}

impl Carrier for Inner {
    fn flush(&self, session: u64) {
        self.conns.flush(session, &self.base);
    }

    fn carry_out(&self, event: Event) {
        let Base { transports, observers, .. } = &*self.base;
        match event {
            Event::Send(session) => self.wake(Queue::Send(session)),
            Event::Copy => self.wake(Queue::Copy),
            Event::Post(session) => self.wake(Queue::Post(session)),
            Event::Stop(session) => transports.all().iter().for_each(|one| one.cancel(session)),
            Event::Raise(_) | Event::Exposed => {}
            Event::Fence(session) => transports.all().iter().for_each(|one| one.fence(session)),
            Event::NicsMoved(session) => transports.rma().into_iter().for_each(|rma| rma.find_again(session)),
            Event::Reach(session, call) => {
                if let Some(answer) = transports.called(session, call) {
                    self.base.node(|node, _| node.session(session).answer_reach(answer));
                }
            }
            Event::Reached(session, answer) => {
                if let Some(rma) = transports.rma() {
                    rma.answered(session, answer);
                }
            }
            Event::Finished(finished) => self.transfers.on_finished(finished),
            Event::Served(served) => self.on_served(&served),
            Event::GrantEnded(id, state) => self.grants.ended(id, state),
            Event::SessionDown(session, error) => self.on_session_down(session, &error),
            Event::OpenChannels(session) => transports.tcp().into_iter().for_each(|tcp| tcp.open(session)),
            Event::Ending(id, pages) => self.grants.begin_quarantine(id, pages),
            Event::Silent(session)
            | Event::Heard(session)
            | Event::Goodbye(session)
            | Event::Left(session) => {
                self.peers.on_life(session, &event);
            }
            Event::Notified(note) => self.peers.on_notified(note),
            Event::NoteEnded { session, topic, number, outcome } => {
                observers.notices.ended(session, topic, number, outcome);
            }
            Event::NoteRoom(_) => observers.notices.moved.note(),
        }
    }
}

impl WorkSource for Inner {
    fn claim(&self, queue: Queue, claim: Claim) -> Option<WorkRequest<RegionMemory>> {
        self.base.node(|node, now| match queue {
            Queue::Send(session) => node.session(session).next_of(Path::Channels, claim, now),
            Queue::Copy => node.next_copy(now),
            Queue::Post(session) => node.session(session).next_of(Path::OneSided, claim, now),
        })
    }
    fn claim_batch(
        &self,
        queue: Queue,
        claim: Claim,
        most: Batch,
        into: &mut Vec<WorkRequest<RegionMemory>>,
    ) {
        self.base.node(|node, now| match queue {
            Queue::Send(session) => node.session(session).next_batch(Path::Channels, claim, most, now, into),
            Queue::Copy => into.extend(node.next_copy(now)),
            Queue::Post(session) => node.session(session).next_batch(Path::OneSided, claim, most, now, into),
        });
    }
    fn done(&self, id: WorkId, outcome: WorkOutcome) {
        self.base.node(|node, _| node.work_done(id, outcome));
    }
    fn batch_done(&self, ended: &mut Vec<Ended>) {
        self.base.node(|node, _| node.batch_done(ended));
    }
    fn stuck(&self, id: WorkId, error: Error) {
        self.base.node(|node, _| node.work_stuck(id, error));
    }
    fn landed(&self, id: &mut WorkId) {
        self.base.node(|node, _| node.work_landed(id));
    }
}

impl Placement for Inner {
    fn place(&self, session: u64, header: &ChunkHeader) -> Result<Option<WorkRequest<RegionMemory>>> {
        self.base.node(|node, now| node.session(session).place(header, now))
    }
}

impl SessionEvents for Inner {
    fn heard(&self, session: u64) -> bool {
        self.base.node(|node, now| {
            node.session(session).touch(now);
            node.is_live(session)
        })
    }
    fn connect(&self, session: u64) {
        match self.base.node(|node, _| node.established(session).map(|session| session.opener)) {
            Some(true) => self.base.commands.tell(ControlCommand::OpenChannels(session)),
            Some(false) => self.base.node(|node, _| node.session(session).ask_for_channels()),
            None => {}
        }
    }
    fn broken(&self, session: u64, error: Error) {
        self.base.commands.tell(ControlCommand::Broken(session, error));
    }
    fn flush_local(&self) {
        self.base.commands.tell(ControlCommand::FlushLocal);
    }
    fn fenced(&self, session: u64) {
        self.base.node(|node, _| node.session(session).fenced());
    }
}

impl RmaPeers for Inner {
    fn nics(&self, session: u64) -> Option<Nics> {
        self.base.node(|node, _| node.established(session).map(|session| session.facts.nics.clone()))
    }
    fn moved(&self, nics: Nics) {
        self.base.node(|node, _| node.tell_nics(&nics));
    }
    fn call(&self, session: u64, call: NicCall) {
        self.base.node(|node, _| node.session(session).reach(call));
    }
    fn answer(&self, session: u64, answer: NicAnswer) {
        self.base.node(|node, _| node.session(session).answer_reach(answer));
    }
    fn warm_up_done(&self, session: u64, nic: usize, number: usize, outcome: Result<bool>) {
        self.transfers.on_warm_up(session, nic, number, &outcome);
    }
}
