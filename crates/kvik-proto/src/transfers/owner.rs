//! The side that owns the grant: it checks every request before it touches a page.

use super::onesided::no_one_sided;
use super::{Transfers, count_readers, served};
use crate::FlowKey;
use crate::chunking::Chunking;
use crate::connection::Context;
use crate::flow::{CopyFrom, Flow, Reach, Role, Work};
use crate::frame::{Begin, Frame, Op, Path, Source};
use crate::lending::Lending;
use crate::offer::{Given, Request};
use crate::pages::{PageList, check_page_count};
use crate::ring::Ring;
use kvik_core::{Code, Error, Result};
use std::sync::Arc;
use std::time::Duration;

/// How much longer than the initiator the owner keeps a transfer, so that the initiator is the one who ends it.
const GRACE: Duration = Duration::from_secs(1);
/// From this version on peers use rings.
const RINGS: u16 = 4;
/// No transfer of a peer stays open longer than this, whatever it asks for.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

impl<R: Clone> Transfers<R> {
    /// A peer opens a transfer.
    pub fn on_begin(&mut self, begin: Begin, now: Duration, cx: &mut Context<'_, R>) -> Result<()> {
        let Some(connection) = cx.connection() else { return Ok(()) };
        let key = (self.session, begin.transfer);
        let theirs = begin.transfer.is_multiple_of(2) != connection.established().opener;
        // Numbers only rise, so a late chunk of an ended transfer cannot be taken for one of a later transfer.
        if !theirs || begin.transfer <= self.last_begun {
            return Err(Error::new(
                Code::ProtocolError,
                format!(
                    "the peer began transfer {}, a number that is not its own or was used",
                    begin.transfer
                ),
            ));
        }
        self.last_begun = begin.transfer;
        if let Err(error) = self.flows.check_count() {
            refuse(key, asked(&begin), error, cx);
            return Ok(());
        }
        if begin.path == Path::OneSided && !cx.has_one_sided() {
            let error = no_one_sided(cx);
            refuse(key, asked(&begin), error, cx);
            return Ok(());
        }
        self.serve(key, begin, now, cx);
        Ok(())
    }

    /// A request for a grant that is not known or not ready: whoever gave the ticket may be a step ahead of this engine,
    /// so the request waits, for most of its initiator's patience.
    fn park(&mut self, key: FlowKey, begin: Begin, now: Duration, cx: &mut Context<'_, R>) {
        let grant = begin.grant;
        let time = begin.time.min(LONGEST);
        let deadline = now + time.saturating_sub(time / 10);
        let held = begin.select.positions.as_ref().map_or(0, PageList::held)
            + begin.source.as_ref().map_or(0, |source| source.view.held());
        let flow = Flow { deadline, held, ..Flow::new(key, Role::Parked { grant }, asked(&begin)) };
        if let Err(error) = self.flows.check_held(&flow) {
            return refuse(key, asked(&begin), error, cx);
        }
        // The grant may have come since it was looked for.
        if !cx.call().grants().park(grant, key) {
            return self.serve(key, begin, now, cx);
        }
        self.flows.insert(flow);
        self.parked.insert(key.1, begin);
    }

    /// The grant that a request waited for is here, and ready.
    pub fn unpark(&mut self, transfer: u64, now: Duration, cx: &mut Context<'_, R>) {
        let Some(begin) = self.parked.remove(&transfer) else { return };
        self.flows.remove(transfer);
        self.serve((self.session, transfer), begin, now, cx);
    }

    /// Serves a request whose grant is live, or refuses it; one whose grant is not known or not ready waits for it.
    fn serve(&mut self, key: FlowKey, begin: Begin, now: Duration, cx: &mut Context<'_, R>) {
        let (grant, asked, readers) = (begin.grant, asked(&begin), begin.readers);
        let request = Request {
            op: begin.op,
            layout: &begin.layout,
            select: &begin.select,
            claim: begin.content.as_ref(),
            confirm: begin.confirm,
        };
        let admitted = cx.call().grants().admit(grant, &request, key);
        let given = match admitted {
            Ok(Some(given)) => given,
            Ok(None) => return self.park(key, begin, now, cx),
            Err(error) => return refuse(key, asked, error, cx),
        };
        match self.owner_flow(key, begin, &given, now, cx) {
            Err(error) => {
                cx.call().refuse_grant(grant, key);
                refuse(key, asked, error, cx);
            }
            Ok((flow, accept)) => {
                let (work, flow_moves) = (flow.work, flow.memory.is_some());
                count_readers(grant, &given, readers, cx);
                if matches!(work, Work::Expose(_)) {
                    cx.call().expose(true);
                }
                let (transfer, staged) = (key.1, flow.lending.is_some());
                self.flows.insert(flow);
                match accept.map(|source| Box::new(source.travelling())) {
                    Some(source) if staged => cx.send(&Frame::AcceptStaged { transfer, source }),
                    None if (asked.0, asked.1) != (Op::Write, Path::Channels) => {}
                    source => cx.send(&Frame::Accept { transfer, source }),
                }
                self.lend(transfer, cx);
                match work {
                    Work::Send => self.queue_send(key.1, cx),
                    Work::Copy if flow_moves => self.queue_copy(key.1, cx),
                    Work::Place | Work::Copy | Work::Wait | Work::Post | Work::Expose(_) => {}
                }
                self.settle(key.1, cx);
            }
        }
    }

    /// The owner's side of a request, all of it checked, and its memory where the peer is to copy from it.
    fn owner_flow(
        &self,
        key: FlowKey,
        begin: Begin,
        given: &Given<R>,
        now: Duration,
        cx: &mut Context<'_, R>,
    ) -> Result<(Flow<R>, Option<Source>)> {
        let offer = given.offer();
        let (region_id, slot, generation) = (offer.region_id, offer.slot, offer.generation);
        let reader = cx.reader().ok_or_else(|| Error::new(Code::PeerLost, "the session is gone"))?;
        let mut flow = Flow {
            deadline: now + begin.time.min(LONGEST) + GRACE,
            // Nothing but to confirm is the sense of `Confirm`, and none of `Extend`.
            confirm: begin.op == Op::Confirm || (begin.confirm && begin.op != Op::Extend),
            ..Flow::new(key, Role::Owner { grant: begin.grant, reader }, asked(&begin))
        };
        let Some(shape) = begin.shape else {
            if begin.op == Op::Extend {
                cx.call().extend_grant(begin.grant, begin.time)?;
            }
            if matches!(begin.op, Op::Read | Op::Write) {
                return Err(Error::new(Code::ProtocolError, "a transfer without a shape"));
            }
            // Nothing moves: it is complete as it stands.
            flow.work = Work::Copy;
            return Ok((flow, None));
        };
        let ring = offer.ring.clone().filter(|_| begin.path == Path::OneSided && speaks_of_rings(cx));
        if ring.is_none() {
            offer.closed.check(begin.path)?;
        }
        // The peer is charged for its lists before a few bytes of them become many.
        flow.held =
            given.unfolded(&begin.select)? + begin.source.as_ref().map_or(0, |source| source.view.unfolded());
        self.flows.check_held(&flow)?;
        let view = given.select(&begin.select, shape.order)?;
        check_page_count(&view)?;
        // "Here" is where the error is read: at the initiator.
        shape.check_same_stream(&view.shape())?;
        flow.chunking = Chunking::from_peer(view.bytes(), begin.unit, begin.chunk, begin.sums)?;
        flow.held += flow.chunking.chunks().div_ceil(64) as usize * 8;
        if begin.path == Path::OneSided {
            flow.held += Flow::<R>::held_by_checks(&flow.chunking);
        }
        self.flows.check_held(&flow)?;
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
                flow.seen = vec![0; flow.chunking.chunks().div_ceil(64) as usize];
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
                let keys = ring.as_ref().map_or(&offer.keys, |ring| ring.keys()).clone();
                accept = Some(Source { region: region_id, view: view.clone(), slot, generation, keys });
                flow.work = Work::Expose(Reach::Open);
                flow.lending = ring.map(|ring| lending(ring, &flow.chunking)).transpose()?;
            }
            (Op::Confirm | Op::Extend, _) => {
                return Err(Error::new(Code::ProtocolError, "a confirmation with a shape"));
            }
        }
        flow.memory = Some((offer.region.clone(), Arc::new(view)));
        Ok((flow, accept))
    }
}

/// Whether the peer can use a ring of this side.
fn speaks_of_rings<R: Clone>(cx: &mut Context<'_, R>) -> bool {
    cx.connection().is_some_and(|connection| connection.established().version >= RINGS)
}

/// Slots for a transfer that is cut so.
fn lending<R>(ring: Arc<Ring<R>>, chunking: &Chunking) -> Result<Lending<R>> {
    let (chunk, slot) = (chunking.chunk.min(chunking.bytes), ring.slot_bytes());
    if chunk > slot {
        let text = format!(
            "the peer moves chunks of {chunk} bytes, and the pages go through page-locked memory in slots of {slot}"
        );
        return Err(Error::new(Code::TransportUnavailable, text));
    }
    Ok(Lending::new(ring))
}

fn asked(begin: &Begin) -> served::Asked {
    (begin.op, begin.path, begin.class)
}

/// Answers a request that will not be served.
fn refuse<R: Clone>(key: FlowKey, asked: served::Asked, error: Error, cx: &mut Context<'_, R>) {
    served::note_refused(asked, error.code, cx);
    cx.send_end(key.1, Err(error));
}
