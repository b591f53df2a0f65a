//! The side that begins a transfer.

use super::Transfers;
use super::count_readers;
use super::onesided::no_one_sided;
use crate::checks::{Check, Checks};
use crate::chunking::Chunking;
use crate::connection::Context;
use crate::flow::{CopyFrom, Flow, Role, Work};
use crate::frame::{Begin, Frame, MAX_READERS, Op, Path, Select, Source, TravellingSource};
use crate::lending::Borrowing;
use crate::offer::{Given, Request};
use crate::pages::check_page_count;
use crate::{FlowKey, MAX_PAGES};
use kvik_core::{Class, Code, ContentClaim, Error, GrantId, RegionId, Result, View};
use std::sync::Arc;
use std::time::Duration;

/// The initiator's memory in a transfer.
#[derive(Debug, Clone)]
pub struct Side<R> {
    /// The memory.
    pub region: R,
    /// Its id.
    pub region_id: RegionId,
    /// The pages.
    pub view: View,
    /// Fence slot for a write over [`Path::Memory`]; it is raised when the transfer ends.
    pub fence: Option<(u32, u64)>,
}

/// A transfer to begin.
#[derive(Debug, Clone)]
pub struct Open<R> {
    /// The grant.
    pub grant: GrantId,
    /// Digest of the layout that the ticket was made for.
    pub layout: [u8; 8],
    /// What this side takes the pages to hold, or brings; see [`Begin::content`].
    pub content: Option<ContentClaim>,
    /// What to do.
    pub op: Op,
    /// What the transfer is for.
    pub class: Class,
    /// How the bytes are to go.
    pub path: Path,
    /// Whether checksums are wanted.
    pub sums: bool,
    /// Over [`Path::OneSided`]: how much is compared once it has moved.
    pub check: Check,
    /// Whether success counts as a use of the grant.
    pub confirm: bool,
    /// How many engines use the grant together, as far as this one knows: from 1 to [`MAX_READERS`].
    pub readers: u16,
    /// When it must have ended.
    pub deadline: Duration,
    /// Bytes of a chunk, about.
    pub chunk: u64,
    /// This side's memory; none for `Confirm` and `Extend`.
    pub side: Option<Side<R>>,
    /// Which of the grant's pages.
    pub select: Select,
    /// For `Extend`: how much time.
    pub extend: Duration,
}

impl<R: Clone> Open<R> {
    /// What can be known to be wrong before anybody is asked.
    pub(crate) fn check_side(&self) -> Result<()> {
        let wrong = |why: &str| Err(Error::new(Code::InvalidArgument, why));
        if self.readers == 0 || self.readers > MAX_READERS {
            let text = format!("{} readers cannot be: a grant has from 1 to {MAX_READERS}", self.readers);
            return wrong(&text);
        }
        let moves = matches!(self.op, Op::Read | Op::Write);
        let Some(side) = &self.side else {
            return if moves { wrong("a transfer needs memory on this side") } else { Ok(()) };
        };
        if !moves {
            return wrong("a confirmation or extension moves nothing: it takes no memory");
        }
        check_page_count(&side.view)?;
        if self.select.positions.as_ref().is_some_and(|named| named.count() > MAX_PAGES) {
            return wrong("more pages of the grant are named than one transfer takes: move them in parts");
        }
        if self.op == Op::Read { side.view.check_distinct() } else { Ok(()) }
    }

    fn chunking(&self) -> Chunking {
        match &self.side {
            Some(side) => Chunking::new(&side.view, self.chunk, self.sums),
            None => Chunking::NOTHING,
        }
    }

    fn flow(&self, key: FlowKey, role: Role, work: Work) -> Flow<R> {
        let chunking = self.chunking();
        Flow {
            confirm: self.op == Op::Confirm || (self.confirm && self.op != Op::Extend),
            memory: self.side.as_ref().map(|side| (side.region.clone(), Arc::new(side.view.clone()))),
            seen: vec![0; if work == Work::Place { chunking.chunks().div_ceil(64) as usize } else { 0 }],
            chunking,
            work,
            deadline: self.deadline,
            slot: self.side.as_ref().and_then(|side| side.fence).map(|(slot, _)| slot),
            checks: Checks::new(self.check),
            ..Flow::new(key, role, (self.op, self.path, self.class))
        }
    }
}

impl<R: Clone> Open<R> {
    /// A flow within the engine, all of it checked.
    fn own_flow(&self, key: FlowKey, given: &Given<R>, cx: &mut Context<'_, R>) -> Result<Flow<R>> {
        let mut flow = self.flow(key, Role::Both { grant: self.grant }, Work::Copy);
        let Some(side) = &self.side else {
            if self.op == Op::Extend {
                cx.call().extend_grant(self.grant, self.extend)?;
            }
            return Ok(flow);
        };
        let offer = given.offer();
        let granted = given.select(&self.select, side.view.order())?;
        side.view.shape().check_same_stream(&granted.shape())?;
        let mine = (side.region.clone(), Arc::new(side.view.clone()));
        let granted = (offer.region.clone(), Arc::new(granted));
        let (from, to) = if self.op == Op::Read { (granted, mine) } else { (mine, granted) };
        to.1.check_distinct()?;
        if side.region_id == offer.region_id && to.1.overlaps(&from.1) {
            return Err(Error::new(
                Code::DuplicatePage,
                "source and destination share bytes: what is read would depend on what is already written",
            ));
        }
        (flow.source, flow.memory) = (Some(CopyFrom::Own(from.0, from.1)), Some(to));
        Ok(flow)
    }
}

impl<R: Clone> Transfers<R> {
    /// Begins a transfer with the peer of a session, whose side was checked. `Finished` tells its end.
    ///
    /// # Errors
    /// `PeerLost` when the session is gone, `InvalidArgument` for a write from shared memory without a fence slot,
    /// `MemoryCapReached` while too much waits to be sent, `TransportUnavailable` for [`Path::OneSided`] without a
    /// one-sided link to the peer.
    pub fn begin(&mut self, open: Open<R>, now: Duration, cx: &mut Context<'_, R>) -> Result<FlowKey> {
        if open.op == Op::Write
            && open.path == Path::Memory
            && open.side.as_ref().is_none_or(|side| side.fence.is_none())
        {
            return Err(Error::new(Code::InvalidArgument, "a write from shared memory needs a fence slot"));
        }
        let Some(connection) = cx.connection() else {
            return Err(lost());
        };
        if connection.is_full() {
            return Err(Error::new(
                Code::MemoryCapReached,
                "too many requests to this peer wait to be sent; begin fewer at once",
            ));
        }
        if open.path == Path::OneSided && !cx.has_one_sided() {
            return Err(no_one_sided(cx));
        }
        let key = (self.session, self.next);
        self.next += 2;
        let work = match (open.op, open.path) {
            (Op::Read, Path::Channels) => Work::Place,
            _ => Work::Wait,
        };
        let flow = open.flow(key, Role::Initiator, work);
        let source = match (&open.side, open.op, open.path) {
            (Some(side), Op::Write, Path::Memory) => side.fence.map(|(slot, generation)| Source {
                region: side.region_id,
                view: side.view.clone(),
                slot,
                generation,
                keys: Arc::default(),
            }),
            _ => None,
        };
        let source = source.map(|source| source.travelling());
        let begin = Begin {
            transfer: key.1,
            grant: open.grant,
            layout: open.layout,
            content: open.content,
            op: open.op,
            class: open.class,
            path: open.path,
            sums: open.sums,
            confirm: open.confirm,
            readers: open.readers,
            time: if open.op == Op::Extend { open.extend } else { open.deadline.saturating_sub(now) },
            unit: flow.chunking.unit as u32,
            chunk: flow.chunking.chunk as u32,
            shape: open.side.as_ref().map(|side| side.view.shape()),
            select: open.select,
            source,
        };
        self.flows.insert(flow);
        cx.send(&Frame::Begin(Box::new(begin)));
        Ok(key)
    }

    /// Begins a transfer with a grant of this engine itself: a copy, with all checks of a peer's transfer.
    ///
    /// # Errors
    /// The way the grant ended, `GrantWrongRight`, `ContentMismatch`, `ContentRequired`, `PageNotGranted`,
    /// `ShapeMismatch`, `InvalidArgument` or `DuplicatePage`.
    pub fn begin_own(&mut self, open: Open<R>, cx: &mut Context<'_, R>) -> Result<FlowKey> {
        open.check_side()?;
        let key = (self.session, self.next);
        let asked = Request {
            op: open.op,
            layout: &open.layout,
            select: &open.select,
            claim: open.content.as_ref(),
            confirm: open.confirm,
        };
        let admitted = cx.call().grants().admit(open.grant, &asked, key)?;
        let given = admitted.ok_or_else(|| cx.call().grants().why_not_admitted(open.grant))?;
        let flow = match open.own_flow(key, &given, cx) {
            Ok(flow) => flow,
            Err(error) => {
                cx.call().refuse_grant(open.grant, key);
                return Err(error);
            }
        };
        self.next += 1;
        count_readers(open.grant, &given, open.readers, cx);
        let copies = flow.source.is_some();
        self.flows.insert(flow);
        if copies {
            self.queue_copy(key.1, cx);
        }
        self.settle(key.1, cx);
        Ok(key)
    }

    /// The owner takes part; `staged`: with slots of its ring in place of its pages.
    pub fn on_accept(
        &mut self,
        transfer: u64,
        source: Option<Box<TravellingSource>>,
        staged: bool,
        cx: &mut Context<'_, R>,
    ) -> Result<()> {
        let Some(flow) = self.flows.get_mut(&transfer).filter(|flow| flow.stop.is_none()) else {
            return Ok(());
        };
        match (&flow.role, flow.op, flow.path, flow.work, source) {
            (Role::Initiator, Op::Write, Path::Channels, Work::Wait, None) => {
                flow.work = Work::Send;
                self.queue_send(transfer, cx);
                Ok(())
            }
            (
                Role::Initiator,
                Op::Read | Op::Write,
                path @ (Path::Memory | Path::OneSided),
                Work::Wait,
                Some(source),
            ) if (flow.op, path) != (Op::Write, Path::Memory) && (!staged || path == Path::OneSided) => {
                let shape = flow.memory.as_ref().map(|(_, view)| view.shape());
                if let Some(Err(error)) = shape.map(|shape| shape.check_same_stream(&source.view.shape())) {
                    self.stop(transfer, error, cx);
                    return Ok(());
                }
                flow.source = Some(CopyFrom::Peer(Arc::new(source.unfold()?)));
                if staged {
                    flow.seen = vec![0; flow.chunking.chunks().div_ceil(64) as usize];
                    flow.borrowing = Some(Borrowing::default());
                }
                if path == Path::OneSided {
                    flow.work = Work::Post;
                    self.queue_post(transfer, cx);
                } else {
                    flow.work = Work::Copy;
                    self.queue_copy(transfer, cx);
                }
                Ok(())
            }
            _ => Err(Error::new(
                Code::ProtocolError,
                format!("the peer accepted transfer {transfer} in a way that does not fit"),
            )),
        }
    }
}

/// There is no session to begin a transfer on.
pub(crate) fn lost() -> Error {
    Error::new(Code::PeerLost, "the connection to the peer broke before the transfer began")
}
