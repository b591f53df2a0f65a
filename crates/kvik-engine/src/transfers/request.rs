//! A transfer: what it is to do, and how far it is.

use crate::budget::Lease;
use crate::config::{Preference, Verify};
use crate::end::End;
use crate::planner::chunk_bytes;
use crate::report::Report;
use crate::select::Rejected;
use crate::tag::Tag;
use crate::transfers::joint::Joint;
use crate::warm_up::WarmUpState;
use kvik_core::{Class, ContentClaim, Error, RegionId, Result, Ticket, View};
use kvik_host::FenceSlot;
use kvik_host::device::CallerStream;
use kvik_proto::{Finished, FlowKey, Identity, Op, Open, Path, Select, Side};
use kvik_transport::{Estimate, Moved, RegionMemory, Request, Transport, TransportId};
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

/// What a transfer is to do.
pub(crate) struct TransferRequest {
    pub ticket: Arc<Ticket>,
    /// None: nothing is asked of the owner, only how it would be reached.
    pub op: Option<Op>,
    pub class: Class,
    /// What is to be ready before it has ended; without an operation only.
    pub warm: Option<Arc<WarmUpState>>,
    pub memory: Option<(RegionMemory, RegionId, View)>,
    /// The region's handle: it stays registered, and shown to the peers on this host, while the transfer runs.
    pub _region: Option<Arc<dyn Any + Send + Sync>>,
    pub select: Select,
    /// What the pages are taken to hold, or are written to hold.
    pub content: Option<ContentClaim>,
    pub confirm: bool,
    pub readers: u16,
    pub tag: Tag,
    pub extend: Duration,
    pub deadline: Duration,
    pub want: Preference,
    pub verify: Verify,
    /// Layers that a checksum of this side's pages covers, where they are wanted.
    pub sums: Option<u32>,
    /// A stream of this side's device that it comes behind.
    pub after: Option<CallerStream>,
    pub extents: u64,
    pub pages: u64,
}

impl TransferRequest {
    pub fn owner(&self) -> Identity {
        Identity { engine: self.ticket.engine, incarnation: self.ticket.incarnation }
    }

    pub fn moves(&self) -> bool {
        self.memory.is_some()
    }

    /// It begins anew: what was summed of what it had placed counts for nothing.
    pub fn forget_sums(&mut self) -> Result<()> {
        let Some((_, _, view)) = &mut self.memory else { return Ok(()) };
        if let Some(layers) = self.sums.filter(|_| view.sums().is_some()) {
            *view = view.clone().summing(layers)?;
        }
        Ok(())
    }

    /// What transports are asked.
    pub fn request(&self, session: u64) -> Request<'_> {
        let memory = self.memory.as_ref().map(|(memory, region, _)| (*region, memory));
        let bytes = self.memory.as_ref().map_or(0, |(_, _, view)| view.bytes());
        Request { session, op: self.op, memory, bytes }
    }

    pub fn open(&self, path: Path, channels: u16, fence: Option<(u32, u64)>) -> Option<Open<RegionMemory>> {
        let side = self.memory.as_ref().map(|(memory, id, view)| Side {
            region: memory.clone(),
            region_id: *id,
            view: view.clone(),
            fence,
        });
        let network = path != Path::Memory;
        let chunk = side.as_ref().map_or(0, |side| chunk_bytes(&side.view, network, channels));
        Some(Open {
            grant: self.ticket.grant,
            layout: self.ticket.layout,
            content: self.content,
            op: self.op?,
            class: self.class,
            path,
            sums: path != Path::OneSided && self.verify.sums(network),
            check: self.verify.of_nics(),
            confirm: self.confirm,
            readers: self.readers,
            deadline: self.deadline,
            chunk,
            side,
            select: self.select.clone(),
            extend: self.extend,
        })
    }
}

/// Who hears of a transfer's end.
#[derive(Clone)]
pub(crate) enum Listener {
    Caller(Arc<End<Report>>),
    /// It is one of several that end as one.
    Joint(Arc<Joint>),
}

/// A transfer that this side began.
pub(crate) struct TransferEntry {
    pub listener: Listener,
    pub request: TransferRequest,
    /// It waits for a stream of a device: nothing of it begins.
    pub after_stream: bool,
    pub began: Duration,
    pub plan: Duration,
    pub key: Option<FlowKey>,
    /// When the protocol began with it.
    pub begun: Duration,
    /// What moves it, once that is known.
    pub taken: Option<Taken>,
    /// Transports that turned out not to serve it.
    pub refused: Vec<Rejected>,
    pub fence: Option<FenceSlot>,
    /// Set when somebody wants its end: it begins nothing any more.
    pub stopped: Option<Error>,
    /// How often it may still wait for another session when one breaks before it begins.
    pub retries: u8,
    pub _lease: Lease,
}

/// Which transport a transfer has taken.
pub(crate) struct Taken {
    pub id: TransportId,
    pub path: Path,
    /// None: a plain copy within this engine.
    pub by: Option<Arc<dyn Transport>>,
    /// The session on which it was asked.
    pub session: u64,
    pub estimate: Option<Estimate>,
    pub rejected: Vec<Rejected>,
}

impl Taken {
    pub fn own() -> Taken {
        let (by, session, estimate, rejected) = (None, 0, None, Vec::new());
        Taken { id: TransportId::Own, path: Path::Memory, by, session, estimate, rejected }
    }

    /// How the bytes go, or went.
    pub fn mechanism(&self, request: &TransferRequest, finished: Option<&Finished>) -> String {
        // How the bytes went is what was seen, where this side saw it.
        let copied_from = finished.and_then(|finished| finished.copied_from);
        let staged_there = finished.is_some_and(|finished| finished.staged_there);
        let moved = Moved { request: request.request(self.session), copied_from, staged_there };
        self.by.as_ref().map_or_else(|| "copy".to_owned(), |by| by.mechanism(&moved))
    }
}
