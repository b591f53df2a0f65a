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
//! - [`tls`]: TLS for TCP connections.
//!
//! Threads here never block while they hold a work request, so a work request that must stop is left at once: that is
//! how a transfer's memory is its owner's again the moment the transfer ends, without the help of any peer.

#![forbid(unsafe_code)]

pub mod local;
pub mod nics;
pub mod region_memory;
pub mod rma;
pub mod services;
pub mod tcp;
pub mod tls;
pub mod transport;

mod basics;
mod compared;
mod copy;
mod devices;
mod fenced;
mod pace;
mod sums;

pub use basics::from_host;
pub use pace::Estimate;
pub use region_memory::{RegionMemory, WeakRegionMemory};
pub use services::{Ended, Placement, RmaPeers, Services, SessionEvents, WorkSource};
pub use sums::page_sums;
pub use transport::{Answer, Moved, Queue, Request, Transport, TransportId};
