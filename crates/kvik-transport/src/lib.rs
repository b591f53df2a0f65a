//! Moves bytes.
//!
//! A transport executes [`Order`]s and decides nothing: it asks its [`Desk`] what to do next, does it, and reports
//! it done. The desk (the engine around the protocol's node) knows peers, grants and deadlines; a transport knows
//! sockets and mappings.
//!
//! - [`held`]: the memory that orders name.
//! - [`tcp`]: threads that send and place chunks over the channels of sessions, straight from and to registered
//!   memory.
//! - [`copy`]: threads that copy into this process's memory, from itself or from a process on the same host.
//! - [`local`]: what another process on this host has shown of its memory.
//! - [`faulty`]: what can go wrong with any of them, on demand, for tests.
//! - [`nics`]: threads whose NICs move bytes, one-sided.
//! - [`tls`]: TLS for TCP connections.
//!
//! Threads here never block while they hold an order, so an order that must stop is left at once: that is how a
//! transfer's memory is its owner's again the moment the transfer ends, without the help of any peer.

#![forbid(unsafe_code)]

pub mod copy;
pub mod faulty;
pub mod held;
pub mod local;
pub mod nics;
pub mod tcp;
pub mod tls;

mod gpu;
mod sums;

pub use held::{Held, WeakHeld};

use kvik_core::{Code, Error, Result};
use kvik_host::HostError;
use kvik_proto::{ChunkHeader, CopyFrom, NicAnswer, NicCall, Nics, Order, OrderKind, OrderOutcome, OrderRef};
use std::sync::Arc;

/// Where a transport gets its orders.
pub trait Desk: Send + Sync + 'static {
    /// The next chunk to send on any channel of a session.
    fn next_send(&self, session: u64) -> Option<Order<Held>>;
    /// Where the chunk that a channel of the session announces goes; `None` throws it away.
    ///
    /// # Errors
    /// The channel must be cut.
    fn place(&self, session: u64, header: &ChunkHeader) -> Result<Option<Order<Held>>>;
    /// The next part to copy, of any transfer.
    fn next_copy(&self) -> Option<Order<Held>>;
    /// An order has ended; its memory is not touched any more, and the order itself is gone: with a transfer's last
    /// order its memory is let go of before anybody hears of the end.
    fn done(&self, id: OrderRef, outcome: OrderOutcome);
    /// An order that must stop cannot be left for a long time: a device touches its memory, and cannot be stopped. It
    /// is reported done when the device is through.
    fn stuck(&self, id: OrderRef, error: Error);
    /// Bytes have come from the peer of a session. False when the session is over.
    fn alive(&self, session: u64) -> bool;
    /// A channel of a session broke.
    fn channel_lost(&self, session: u64, error: Error);
    /// What the peer of a session has shown of its memory.
    fn local_link(&self, session: u64) -> Option<Arc<local::LocalLink>>;
    /// The next chunk that a NIC moves for a transfer of the session.
    fn next_post(&self, session: u64) -> Option<Order<Held>>;
    /// Whether peers' NICs may reach this engine's memory now.
    fn is_exposed(&self) -> bool;
    /// The NICs of a session's peer.
    fn peer_nics(&self, session: u64) -> Option<Nics>;
    /// Peers reach this engine's NIC of this number at another address from now on.
    fn nic_moved(&self, number: usize, address: Vec<u8>);
    /// A NIC here wants a way to one of the session's peer.
    fn call_nic(&self, session: u64, call: NicCall);
    /// The answer to a NIC of the session's peer.
    fn answer_nic(&self, session: u64, answer: NicAnswer);
    /// This NIC was to have an open way to one of the session's peer, by `number`: whether it has made one (true) or
    /// had one (false), or why it has none.
    fn warmed(&self, session: u64, nic: usize, number: usize, outcome: Result<bool>);
    /// No NIC touches memory for this session any more, which has ended.
    fn fenced(&self, session: u64);
}

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

/// Reports an order's end, after it has let go of its memory.
pub(crate) fn finish(desk: &dyn Desk, order: Order<Held>, mut outcome: OrderOutcome) {
    if let OrderOutcome::Done { extents, .. } = &mut outcome {
        *extents = extents.saturating_sub(goes_on(&order).into());
    }
    let id = order.id;
    drop(order);
    desk.done(id, outcome);
}

/// Whether an order's first run goes on where that of the chunk before it ended: two chunks of one run are no two
/// extents.
fn goes_on(order: &Order<Held>) -> bool {
    let at = order.part.start;
    let source = match &order.kind {
        OrderKind::Copy(CopyFrom::Own(_, view)) => Some(&**view),
        OrderKind::Copy(CopyFrom::Peer(source)) => Some(&source.view),
        OrderKind::Send(_) | OrderKind::Place | OrderKind::Post(..) | OrderKind::Sum => None,
    };
    order.view.joins_at(at) && source.is_none_or(|view| view.joins_at(at))
}
