//! From what a caller asks for to a transfer in the table of transfers that has set out.

use crate::closing::closed;
use crate::config::Preference;
use crate::inner::Inner;
use crate::planner::{Plan, claim, plan};
use crate::region::PageSet;
use crate::report::TransferOptions;
use crate::stream_order::Then;
use crate::transfers::request::{Listener, TransferEntry, TransferRequest};
use kvik_core::{Code, Error, GrantId, Result, Right, Ticket, View};
use kvik_host::clock::boottime;
use kvik_host::device::CallerStream;
use kvik_proto::Op;
use kvik_transport::RegionMemory;
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

/// How many sessions may break before a transfer begins.
const RETRIES: u8 = 3;

/// How a transfer that is in the table starts.
pub(crate) struct Start {
    /// The grant, where it is of this engine itself.
    own: Option<GrantId>,
    /// A stream of a device that it comes behind, and the memory there.
    after: Option<(CallerStream, RegionMemory)>,
}

/// What a read or a write is to do: `request`, with what it moves.
///
/// # Errors
/// What can be seen from here: see [`Engine::read`](crate::Engine::read).
pub(crate) fn moving(
    inner: &Arc<Inner>,
    op: Op,
    local: &PageSet,
    request: TransferRequest,
    positions: Option<Arc<[u32]>>,
    options: &TransferOptions,
) -> Result<TransferRequest> {
    inner.base.setup.check()?;
    let memory = local.region.memory()?;
    if op == Op::Read {
        local.view.check_distinct()?;
        check_writable(&memory)?;
    }
    check_own(inner, local)?;
    check_right(op, &request.ticket)?;
    let content = claim(positions.as_deref(), options)?;
    let Plan { view, select, extents } = plan(&local.view, positions, options)?;
    let pages = view.pages().len() as u64;
    let memory = Some((memory, local.region.id(), view));
    let _region: Option<Arc<dyn Any + Send + Sync>> = Some(local.region.inner.clone());
    Ok(TransferRequest { op: Some(op), memory, _region, select, content, extents, pages, ..request })
}

/// A transfer for the table of transfers, and how it is to start once it is there.
///
/// # Errors
/// `PeerRestarted` for an own ticket of an earlier start; `TransportUnavailable`; `MemoryCapReached`.
pub(crate) fn entry(
    inner: &Inner,
    request: TransferRequest,
    began: Duration,
    listener: Listener,
) -> Result<(TransferEntry, Start)> {
    let identity = &inner.base.setup.local.identity;
    let own = request.ticket.engine == identity.engine;
    if own && request.ticket.incarnation != identity.incarnation {
        let text = "the ticket is of an earlier start of this engine; it is void: ask for a new one";
        return Err(Error::new(Code::PeerRestarted, text));
    }
    if request.want != Preference::Auto && own && request.want != inner.base.setup.config.transport {
        return Err(Error::new(
            Code::TransportUnavailable,
            "the ticket is this engine's own, which is served by a plain copy: leave the transport out",
        ));
    }
    let of_view = |view: &View| (view.bytes() >> 18) + view.sums().map_or(0, |sums| 16 * sums.len() as u64);
    let size = 1024 + 8 * request.pages + request.memory.as_ref().map_or(0, |(_, _, view)| of_view(view));
    let lease = inner.base.budget.take(size, "a transfer")?;
    let after = request.after.zip(request.memory.as_ref().map(|(memory, ..)| memory.clone()));
    let after_stream = after.is_some();
    let start = Start { own: own.then_some(request.ticket.grant), after };
    let entry = TransferEntry {
        listener,
        plan: boottime().saturating_sub(began),
        request,
        after_stream,
        began,
        key: None,
        begun: began,
        taken: None,
        refused: Vec::new(),
        fence: None,
        stopped: None,
        retries: RETRIES,
        _lease: lease,
    };
    Ok((entry, start))
}

/// Lets a transfer in the table start.
///
/// # Errors
/// Of a stream that cannot be waited for; the transfer has ended with it.
pub(crate) fn set_out(inner: &Inner, id: u64, start: Start) -> Result<()> {
    let Inner { base, transfers, streams, .. } = inner;
    // An engine that closes ends what is in the table of transfers by then: either it has seen this transfer, or this
    // sees it.
    if base.setup.is_closed() {
        transfers.give_up(id, closed());
    }
    match (start.after, start.own) {
        (None, Some(grant)) if streams.is_waiting(grant) => {
            transfers.wait(id);
            if !streams.waits_for(grant, id) {
                transfers.set_out(id);
            }
        }
        (None, _) => transfers.set_out(id),
        (Some((stream, memory)), own) => {
            transfers.wait(id);
            let begins = streams.go_on_after(stream, &memory, Then::Begin(id, own));
            begins.inspect_err(|error| transfers.give_up(id, error.clone()))?;
        }
    }
    Ok(())
}

/// # Errors
/// `InvalidArgument` for pages of another engine.
pub(crate) fn check_own(inner: &Arc<Inner>, pages: &PageSet) -> Result<()> {
    match Arc::ptr_eq(&pages.region.inner.engine, inner) {
        true => Ok(()),
        false => Err(Error::new(
            Code::InvalidArgument,
            "the page set is of a region of another engine: take pages of a region that this engine registered",
        )),
    }
}

fn check_right(op: Op, ticket: &Ticket) -> Result<()> {
    let right = if op == Op::Read { Right::Read } else { Right::Write };
    if ticket.right == right {
        return Ok(());
    }
    Err(Error::new(
        Code::GrantWrongRight,
        format!(
            "the ticket is for a {}, a {} was asked for: ask the owner for a {} grant",
            ticket.right.name(),
            right.name(),
            right.name()
        ),
    ))
}

/// # Errors
/// `BufferInvalid` for memory that can only be a source.
pub(crate) fn check_writable(memory: &RegionMemory) -> Result<()> {
    match memory.writable() {
        true => Ok(()),
        false => Err(Error::new(
            Code::BufferInvalid,
            "the region was registered from a read-only buffer: it can be a source, not a destination",
        )),
    }
}
