//! What transports need from whoever runs them: a few traits with one purpose each.

use crate::{Queue, RegionMemory};
use kvik_core::{Error, Result};
use kvik_proto::{
    Batch, ChunkHeader, Claim, CopyFrom, NicAnswer, NicCall, Nics, WorkId, WorkKind, WorkOutcome, WorkRequest,
};
use std::sync::Arc;

/// A piece of work that has ended, and how.
pub type Ended = (WorkId, WorkOutcome);

/// Where work comes from, and where its end is told.
pub trait WorkSource: Send + Sync + 'static {
    /// The next piece of work in a queue, of what `claim` may be given. Of copies it is whichever is next.
    fn claim(&self, queue: Queue, claim: Claim) -> Option<WorkRequest<RegionMemory>>;

    /// Several of them at once, in the order in which one after the other would be given; of copies only one. Whoever has
    /// not begun one when its transfer must stop reports it `Void`, without touching its memory.
    fn claim_batch(&self, queue: Queue, claim: Claim, most: Batch, into: &mut Vec<WorkRequest<RegionMemory>>);

    /// A piece of work has ended; its memory is not touched any more, and the work request itself is gone: with a
    /// transfer's last work request its memory is let go of before anybody hears of the end.
    fn done(&self, id: WorkId, outcome: WorkOutcome);

    /// The same of several, which are taken out; those of a session best follow each other.
    fn batch_done(&self, ended: &mut Vec<Ended>);

    /// Work that must stop cannot be left for a long time: a device touches its memory, and cannot be stopped. It is
    /// reported done when the device is through.
    fn stuck(&self, id: WorkId, error: Error);

    /// Of a NIC's work request that must stop, nothing is on the wire any more, and nothing will be: what is waited for is
    /// a device of this side.
    fn landed(&self, id: &mut WorkId);
}

/// Where chunks go that come over channels.
pub trait Placement: Send + Sync + 'static {
    /// Where the chunk that a channel of the session announces goes; `None` throws it away.
    ///
    /// # Errors
    /// The channel must be cut.
    fn place(&self, session: u64, header: &ChunkHeader) -> Result<Option<WorkRequest<RegionMemory>>>;
}

/// What transports tell of sessions.
pub trait SessionEvents: Send + Sync + 'static {
    /// Bytes have come from the session's peer. False when the session is over.
    fn heard(&self, session: u64) -> bool;

    /// Channels of the session are wanted: whichever side opened the session opens them.
    fn connect(&self, session: u64);

    /// A channel of the session broke.
    fn broken(&self, session: u64, error: Error);

    /// Something waits to be sent over a local channel.
    fn flush_local(&self);

    /// The path by which the session's peer reached memory here is cut: nothing lands for it any more.
    fn fenced(&self, session: u64);
}

/// How NICs here and at peers speak with each other, and what becomes of it.
pub trait RmaPeers: Send + Sync + 'static {
    /// The NICs of a session's peer.
    fn nics(&self, session: u64) -> Option<Nics>;

    /// Peers reach this side's NICs at these addresses from now on.
    fn moved(&self, nics: Nics);

    /// A NIC here wants a connection to one of the session's peer.
    fn call(&self, session: u64, call: NicCall);

    /// The answer to a NIC of the session's peer.
    fn answer(&self, session: u64, answer: NicAnswer);

    /// This NIC was to have an open connection to one of the session's peer, by `number`: whether it has made one
    /// (true) or had one (false), or why it has none.
    fn warm_up_done(&self, session: u64, nic: usize, number: usize, outcome: Result<bool>);
}

/// All of them.
#[derive(Clone)]
pub struct Services {
    /// Work.
    pub work: Arc<dyn WorkSource>,
    /// Where chunks go.
    pub placement: Arc<dyn Placement>,
    /// Sessions.
    pub sessions: Arc<dyn SessionEvents>,
    /// NICs of peers.
    pub rma: Arc<dyn RmaPeers>,
}

impl Services {
    /// One that is all of them.
    pub fn of<T: WorkSource + Placement + SessionEvents + RmaPeers>(all: &Arc<T>) -> Services {
        Services { work: all.clone(), placement: all.clone(), sessions: all.clone(), rma: all.clone() }
    }
}

/// Reports a work request's end, after it has let go of its memory.
pub(crate) fn finish(work: &dyn WorkSource, request: WorkRequest<RegionMemory>, outcome: WorkOutcome) {
    let (id, outcome) = ended(request, outcome);
    work.done(id, outcome);
}

/// Lets go of a work request's memory: what is to be reported of it.
pub(crate) fn ended(request: WorkRequest<RegionMemory>, mut outcome: WorkOutcome) -> Ended {
    if let WorkOutcome::Done { extents, .. } = &mut outcome {
        *extents = extents.saturating_sub(goes_on(&request).into());
    }
    (request.id, outcome)
}

/// Whether a work request's first run goes on where that of the chunk before it ended: two chunks of one run are no two
/// extents.
fn goes_on(request: &WorkRequest<RegionMemory>) -> bool {
    let at = request.part.start;
    let source = match &request.kind {
        WorkKind::Copy(CopyFrom::Own(_, view)) => Some(&**view),
        WorkKind::Copy(CopyFrom::Peer(source)) => Some(&source.view),
        WorkKind::Send(_) | WorkKind::Place | WorkKind::Post(..) | WorkKind::Stage(..) | WorkKind::Sum => {
            None
        }
    };
    request.view.joins_at(at) && source.is_none_or(|view| view.joins_at(at))
}
