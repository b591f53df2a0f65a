//! Moves bytes.
//!
//! A transport executes [`WorkRequest`]s and decides nothing: it claims what to do next, does it, and reports it done.
//! Who runs it (the engine around the protocol's node) knows peers, grants and deadlines; a transport knows sockets,
//! mappings and NICs. Between them there are [`Transport`], which each kind implements, and the [`services`] that it
//! gets in return.
//!
//! - [`transport`]: what every transport can do.
//! - [`services`]: what transports need: work, a place for chunks, somebody who hears of sessions.
//! - [`tcp`]: threads that send and place chunks over the channels of sessions, straight from and to registered
//!   memory.
//! - [`local`]: what another process on this host has shown of its memory, and threads that copy from there.
//! - [`rma`]: NICs that move bytes, one-sided; their threads are in [`nics`].
//! - [`region_memory`]: the memory that work requests name.
//! - [`faulty`]: what can go wrong with any of them, on demand, for tests.
//! - [`tls`]: TLS for TCP connections.
//!
//! Threads here never block while they hold a work request, so a work request that must stop is left at once: that is
//! how a transfer's memory is its owner's again the moment the transfer ends, without the help of any peer.

#![forbid(unsafe_code)]

pub mod faulty;
pub mod local;
pub mod nics;
pub mod region_memory;
pub mod rma;
pub mod services;
pub mod tcp;
pub mod tls;
pub mod transport;

mod copy;
mod gpu;
mod pace;
mod sums;

pub use pace::Estimate;
pub use region_memory::{RegionMemory, WeakRegionMemory};
pub use services::{Placement, RmaPeers, Services, SessionEvents, WorkSource};
pub use transport::{Answer, Moved, Queue, Request, Transport, TransportId};

use kvik_core::{Code, Error};
use kvik_host::HostError;
use kvik_proto::{CopyFrom, WorkKind, WorkOutcome, WorkRequest};

/// An error of the machine in the engine's words.
pub fn from_host(code: Code, error: HostError) -> Error {
    let code = match &error {
        HostError::SealMissing { .. } | HostError::SizeMismatch { .. } | HostError::NotMemfd(_) => {
            Code::SealMissing
        }
        HostError::OutOfBounds { .. } => Code::PageOutOfRange,
        HostError::ReadOnlyMemory => Code::InvalidArgument,
        HostError::ProcessRefused { .. } | HostError::NonceMismatch { .. } => Code::TransportUnavailable,
        HostError::Cuda(_) | HostError::Library(_) => Code::DeviceFailed,
        HostError::ProcessGone { .. } | HostError::RemoteUnmapped { .. } => Code::PeerLost,
        _ => code,
    };
    Error::new(code, error.to_string())
}

/// Reports a work request's end, after it has let go of its memory.
pub(crate) fn finish(work: &dyn WorkSource, request: WorkRequest<RegionMemory>, mut outcome: WorkOutcome) {
    if let WorkOutcome::Done { extents, .. } = &mut outcome {
        *extents = extents.saturating_sub(goes_on(&request).into());
    }
    let id = request.id;
    drop(request);
    work.done(id, outcome);
}

/// Whether a work request's first run goes on where that of the chunk before it ended: two chunks of one run are no two
/// extents.
fn goes_on(request: &WorkRequest<RegionMemory>) -> bool {
    let at = request.part.start;
    let source = match &request.kind {
        WorkKind::Copy(CopyFrom::Own(_, view)) => Some(&**view),
        WorkKind::Copy(CopyFrom::Peer(source)) => Some(&source.view),
        WorkKind::Send(_) | WorkKind::Place | WorkKind::Post(..) | WorkKind::Sum => None,
    };
    request.view.joins_at(at) && source.is_none_or(|view| view.joins_at(at))
}
