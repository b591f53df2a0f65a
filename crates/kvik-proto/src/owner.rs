//! The side that owns the grant: it checks every request before it touches a page.

use crate::FlowKey;
use crate::checks::Checks;
use crate::flow::{CopyFrom, Cut, Flow, Reach, Role, Work};
use crate::frame::{Begin, Frame, Op, Path, Source};
use crate::node::{Event, Node, Timer};
use crate::pages::{PageList, check_page_count};
use crate::session::{MAX_FLOWS, MAX_HELD};
use kvik_core::{Code, Error, GrantId, Result};
use std::sync::Arc;
use std::time::Duration;

/// How much longer than the initiator the owner keeps a transfer, so that the initiator is the one who ends it.
const GRACE: Duration = Duration::from_secs(1);
/// No transfer of a peer stays open longer than this, whatever it asks for.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

impl<R: Clone> Node<R> {
    /// A peer opens a transfer.
    pub(crate) fn on_begin(&mut self, session_id: u64, begin: Begin, now: Duration) -> Result<()> {
        let Some(session) = self.sessions.get_mut(&session_id) else { return Ok(()) };
        let key = (session_id, begin.transfer);
        let theirs = begin.transfer.is_multiple_of(2) != session.established.opener;
        // Numbers only rise, so a late chunk of an ended transfer cannot be taken for one of a later transfer.
        if !theirs || begin.transfer <= session.last_begun {
            return Err(Error::new(
                Code::ProtocolError,
                format!(
                    "the peer began transfer {}, a number that is not its own or was used",
                    begin.transfer
                ),
            ));
        }
        session.last_begun = begin.transfer;
        if session.owned_flows >= MAX_FLOWS {
            let text = format!("more than {MAX_FLOWS} transfers of this peer are open; let some end first");
            self.refuse(key, (begin.op, begin.path), Error::new(Code::MemoryCapReached, text));
            return Ok(());
        }
        if begin.path == Path::OneSided && !self.has_one_sided(session_id) {
            let error = self.no_one_sided(session_id);
            self.refuse(key, (begin.op, begin.path), error);
            return Ok(());
        }
        match self.grants.state(begin.grant) {
            None => self.park(key, begin, now),
            Some(_) => self.serve(key, begin, now),
        }
        Ok(())
    }

    /// A request for a grant that is not known: whoever gave the ticket may be a step ahead of this engine, so the
    /// request waits, for most of its initiator's patience.
    fn park(&mut self, key: FlowKey, begin: Begin, now: Duration) {
        let grant = begin.grant;
        let time = begin.time.min(LONGEST);
        let deadline = now + time.saturating_sub(time / 10);
        let held = begin.select.positions.as_ref().map_or(0, PageList::held)
            + begin.source.as_ref().map_or(0, |source| source.view.held());
        let flow = Flow { role: Role::Parked { grant }, deadline, held, ..blank(key, &begin) };
        if let Err(error) = self.check_held(&flow) {
            return self.refuse(key, (begin.op, begin.path), error);
        }
        self.enter_session(flow);
        self.parked.entry(grant).or_default().push((key, begin));
    }

    /// The grant that a request waited for is here.
    pub(crate) fn unpark(&mut self, key: FlowKey, begin: Begin, now: Duration) {
        let Some(flow) = self.flows.remove(&key) else { return };
        self.timers.remove(&(flow.deadline, Timer::Flow(key)));
        self.leave_session(&flow);
        self.serve(key, begin, now);
    }

    /// Serves a request whose grant is live, or refuses it.
    fn serve(&mut self, key: FlowKey, begin: Begin, now: Duration) {
        let (grant, op, path, readers) = (begin.grant, begin.op, begin.path, begin.readers);
        match self.owner_flow(key, begin, now) {
            Err(error) => self.refuse(key, (op, path), error),
            Ok((flow, accept)) => {
                let (work, flow_moves) = (flow.work, flow.memory.is_some());
                self.grants.attach(grant, key, readers);
                self.exposed += usize::from(matches!(work, Work::Expose(_)));
                self.enter_session(flow);
                if (op, path) == (Op::Write, Path::Channels) || accept.is_some() {
                    let source = accept.map(|source| Box::new(source.travelling()));
                    self.send(key.0, &Frame::Accept { transfer: key.1, source });
                }
                match work {
                    Work::Send => self.queue_send(key),
                    Work::Copy if flow_moves => {
                        self.copying.push_back(key);
                        self.events.push_back(Event::Copy);
                    }
                    Work::Place | Work::Copy | Work::Wait | Work::Post | Work::Expose(_) => {}
                }
                self.settle_flow(key);
            }
        }
    }

    /// The owner's side of a request, all of it checked, and its memory where the peer is to copy from it.
    fn owner_flow(&mut self, key: FlowKey, begin: Begin, now: Duration) -> Result<(Flow<R>, Option<Source>)> {
        let claim = begin.content.as_ref();
        let offer =
            self.grants.admit(begin.grant, begin.op, &begin.layout, &begin.select, claim, begin.confirm)?;
        let (region, region_id, slot, generation) =
            (offer.region.clone(), offer.region_id, offer.slot, offer.generation);
        let (keys, closed) = (offer.keys.clone(), offer.closed.clone());
        let reader = self.sessions.get(&key.0).map(|session| session.established.peer.engine);
        let reader = reader.ok_or_else(|| Error::new(Code::PeerLost, "the session is gone"))?;
        let mut flow = Flow {
            role: Role::Owner { grant: begin.grant, reader },
            deadline: now + begin.time.min(LONGEST) + GRACE,
            // Nothing but to confirm is the sense of `Confirm`, and none of `Extend`.
            confirm: begin.op == Op::Confirm || (begin.confirm && begin.op != Op::Extend),
            ..blank(key, &begin)
        };
        let Some(shape) = begin.shape else {
            if begin.op == Op::Extend {
                self.grants.extend(begin.grant, begin.time)?;
            }
            if matches!(begin.op, Op::Read | Op::Write) {
                return Err(Error::new(Code::ProtocolError, "a transfer without a shape"));
            }
            // Nothing moves: it is complete as it stands.
            flow.work = Work::Copy;
            return Ok((flow, None));
        };
        closed.check(begin.path)?;
        // The peer is charged for its lists before a few bytes of them become many.
        flow.held = self.grants.unfolded(begin.grant, &begin.select)?
            + begin.source.as_ref().map_or(0, |source| source.view.unfolded());
        self.check_held(&flow)?;
        let view = self.grants.select(begin.grant, &begin.select, shape.order)?;
        check_page_count(&view)?;
        // "Here" is where the error is read: at the initiator.
        shape.check_same_stream(&view.shape())?;
        flow.cut = Cut::from_peer(view.bytes(), begin.unit, begin.chunk, begin.sums)?;
        flow.held += flow.cut.chunks().div_ceil(64) as usize * 8;
        if begin.path == Path::OneSided {
            flow.held += Flow::<R>::held_by_checks(&flow.cut);
        }
        self.check_held(&flow)?;
        let mut accept = None;
        match (begin.op, begin.path) {
            (Op::Read, Path::Channels) => flow.work = Work::Send,
            (Op::Read, Path::Memory) => {
                let keys = Arc::default();
                accept = Some(Source { region: region_id, view: view.clone(), slot, generation, keys });
            }
            (Op::Write, Path::Channels) => {
                view.check_distinct()?;
                flow.work = Work::Place;
                flow.seen = vec![0; flow.cut.chunks().div_ceil(64) as usize];
            }
            (Op::Write, Path::Memory) => {
                view.check_distinct()?;
                let source = begin
                    .source
                    .ok_or_else(|| Error::new(Code::ProtocolError, "a write without its source"))?;
                source.view.shape().check_same_stream(&view.shape())?;
                flow.source = Some(CopyFrom::Peer(Arc::new(source.unfold()?)));
                flow.work = Work::Copy;
            }
            (Op::Read | Op::Write, Path::OneSided) => {
                if begin.op == Op::Write {
                    view.check_distinct()?;
                }
                accept = Some(Source { region: region_id, view: view.clone(), slot, generation, keys });
                flow.work = Work::Expose(Reach::Open);
            }
            (Op::Confirm | Op::Extend, _) => {
                return Err(Error::new(Code::ProtocolError, "a confirmation with a shape"));
            }
        }
        flow.memory = Some((region, Arc::new(view)));
        Ok((flow, accept))
    }

    /// Answers a request that will not be served.
    fn refuse(&mut self, key: FlowKey, (op, path): (Op, Path), error: Error) {
        self.note_refused(key, op, path, error.code);
        self.send_end(key, Err(error));
    }

    /// Forgets a request that waited and has ended.
    pub(crate) fn forget_parked(&mut self, grant: GrantId, key: FlowKey) {
        if let Some(waiting) = self.parked.get_mut(&grant) {
            waiting.retain(|(other, _)| *other != key);
            if waiting.is_empty() {
                self.parked.remove(&grant);
            }
        }
    }

    /// Whether the session's peer may have this flow too.
    fn check_held(&self, flow: &Flow<R>) -> Result<()> {
        let held = self.sessions.get(&flow.key.0).map_or(0, |session| session.held);
        if held + flow.held <= MAX_HELD {
            return Ok(());
        }
        Err(Error::new(
            Code::MemoryCapReached,
            format!(
                "the open transfers of this peer would hold more than {} of page lists; let some end first",
                kvik_core::format_size(MAX_HELD as u64)
            ),
        ))
    }

    /// A flow that the session's peer asked for begins, and counts.
    fn enter_session(&mut self, flow: Flow<R>) {
        if let Some(session) = self.sessions.get_mut(&flow.key.0) {
            session.owned_flows += 1;
            session.held += flow.held;
        }
        self.timers.insert((flow.deadline, Timer::Flow(flow.key)));
        self.flows.insert(flow.key, flow);
    }

    /// Such a flow has gone.
    pub(crate) fn leave_session(&mut self, flow: &Flow<R>) {
        if let Some(session) = self.sessions.get_mut(&flow.key.0) {
            session.owned_flows = session.owned_flows.saturating_sub(1);
            session.held = session.held.saturating_sub(flow.held);
        }
    }
}

/// A flow for a peer's request, before anything is known of the grant.
fn blank<R>(key: FlowKey, begin: &Begin) -> Flow<R> {
    Flow {
        key,
        role: Role::Parked { grant: begin.grant },
        op: begin.op,
        path: begin.path,
        confirm: begin.confirm,
        memory: None,
        source: None,
        cut: Cut { bytes: 0, chunk: 1, unit: 1, sums: false },
        work: Work::Wait,
        next: 0,
        back: Vec::new(),
        done: 0,
        seen: Vec::new(),
        pins: 0,
        posted: 0,
        deadline: Duration::ZERO,
        stop: None,
        stop_flag: Arc::default(),
        peer_ended: false,
        peer_done: false,
        end_sent: false,
        held: 0,
        slot: None,
        first: None,
        extents: 0,
        verify: Duration::ZERO,
        checks: Checks::default(),
        reported: false,
    }
}
