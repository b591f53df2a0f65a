//! What every transport can do for an engine, whatever moves its bytes.
//!
//! An engine has a list of transports in the order of its preference. It tells each of them of sessions and memory,
//! asks all of them about a transfer, and takes one ([`Answer`]). After that the protocol gives out the work: a
//! transport is woken for a [`Queue`], claims what is there, and reports it done.
//!
//! A transport calls back into the engine from its own threads or from [`Transport::open`], and never while it holds
//! a lock of its own: the engine may hold one of its locks when it calls here.

use crate::RegionMemory;
use crate::nics::NicStats;
use crate::pace::Estimate;
use kvik_core::{RegionId, Result};
use kvik_proto::{Facts, Op, Path};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Which transport it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TransportId {
    /// A plain copy within one engine; nothing that reaches a peer.
    Own,
    /// Memory of another process on the same host.
    Local,
    /// RMA by libfabric.
    Libfabric,
    /// RMA by libibverbs.
    Verbs,
    /// RMA by a plug-in.
    Plugin,
    /// TCP channels.
    Tcp,
}

impl TransportId {
    /// The word for it in reports, events and metrics.
    pub fn name(self) -> &'static str {
        match self {
            TransportId::Own => "self",
            TransportId::Local => "local",
            TransportId::Libfabric => "libfabric",
            TransportId::Verbs => "verbs",
            TransportId::Plugin => "plugin",
            TransportId::Tcp => "tcp",
        }
    }

    /// Whether NICs move its bytes, one-sided.
    pub fn is_rma(self) -> bool {
        matches!(self, TransportId::Libfabric | TransportId::Verbs | TransportId::Plugin)
    }
}

impl fmt::Display for TransportId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A transfer that is to be moved by somebody.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The session with the owner of the other side's pages.
    pub session: u64,
    /// None: nothing is asked of the owner, only how it would be reached.
    pub op: Option<Op>,
    /// This side's memory; none where nothing moves.
    pub memory: Option<(RegionId, &'a RegionMemory)>,
    /// Bytes to move.
    pub bytes: u64,
}

/// What a transport says to a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// It can, and would take about so long. No estimate: nothing was measured with this peer.
    Ready(Option<Estimate>),
    /// It will know soon: [`SessionEvents::opened`](crate::SessionEvents::opened) tells when.
    Opening,
    /// It cannot, and why.
    No(Arc<str>),
}

/// A transfer as its transport saw it.
#[derive(Debug, Clone, Copy)]
pub struct Moved<'a> {
    /// The request.
    pub request: Request<'a>,
    /// The region of the peer that was copied from here, where that was so.
    pub copied_from: Option<RegionId>,
    /// It went through a ring of the peer's.
    pub staged_there: bool,
}

/// A queue of work that the protocol keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Queue {
    /// Chunks to send over channels of the session.
    Send(u64),
    /// Parts to copy or sum within this process's reach, of any session.
    Copy,
    /// Chunks that NICs move for the session.
    Post(u64),
}

/// Moves the bytes of transfers. See the module's text.
pub trait Transport: Send + Sync {
    /// Which one it is.
    fn id(&self) -> TransportId;

    /// How the protocol gives out its work.
    fn path(&self) -> Path;

    /// A session has begun with a peer that has said this of itself. The transport finds out whether it reaches the
    /// peer, and remembers why not.
    fn add_session(&self, session: u64, peer: &Facts);

    /// The session is over: closes what is open for it. What its peer may still reach here is for
    /// [`Transport::fence`].
    fn end_session(&self, session: u64);

    /// Makes memory known, within `limit`; memory that was withdrawn and not let go of yet, as before.
    ///
    /// # Errors
    /// `TransportUnavailable` when memory of the host is refused, `DeadlineExceeded` when a device does not answer.
    /// That memory of a device cannot be used is no error: [`Transport::answer`] and [`Transport::closed`] say so.
    fn register(&self, region: RegionId, memory: &RegionMemory, limit: Duration) -> Result<()>;

    /// Takes memory back, from peers too. It is let go of as soon as nobody else holds it. Devices have up to `limit` to
    /// say that they have heard so; with none nobody waits for them, which is for callers that their own threads may be.
    fn withdraw(&self, region: RegionId, limit: Duration);

    /// Drops what is still known of a region that was withdrawn: nobody asks for it any more.
    fn forget(&self, _region: RegionId) {}

    /// Why a peer cannot do this with a region over this transport, where it cannot.
    fn closed(&self, _region: RegionId, _memory: &RegionMemory, _op: Op) -> Option<Arc<str>> {
        None
    }

    /// Whether it can serve a request, and how long that would take.
    fn answer(&self, request: &Request<'_>) -> Answer;

    /// A transfer was given to it on this session: it opens what is missing, if sessions have anything of their own that
    /// is opened so late.
    fn open(&self, _session: u64) {}

    /// Opens all that the first transfer would wait for, before `until`;
    /// [`SessionEvents`](crate::SessionEvents) tells what has come.
    fn warm(&self, _session: u64, _until: Instant) {}

    /// There may be something in a queue, which need not be one of its own.
    fn wake(&self, queue: Queue);

    /// Work of the session that must stop is left, soon.
    fn cancel(&self, session: u64);

    /// Cuts the path by which the session's peer reaches memory here; [`SessionEvents`](crate::SessionEvents) tells
    /// when nothing can land any more. Only what lets peers reach memory without this process does anything.
    fn fence(&self, _session: u64) {}

    /// So many transfers of peers may reach memory of this process.
    fn expose(&self, _transfers: usize) {}

    /// How the bytes of a transfer go, or went, in words.
    fn mechanism(&self, of: &Moved<'_>) -> String;

    /// A transfer of the session has moved so many bytes in this time.
    fn measured(&self, session: u64, bytes: u64, took: Duration);

    /// What each of its devices has done, if it has any.
    fn devices(&self) -> &[Arc<NicStats>] {
        &[]
    }

    /// Ends its threads, after what each has in flight.
    fn stop(&self);
}
