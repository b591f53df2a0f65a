//! kvik's peer protocol, sans-IO.
//!
//! This crate owns no socket, no thread and no clock. Bytes and the time come in; bytes, orders and events go out;
//! given the same input it does the same. A [`Handshake`] turns the first bytes of a connection into a session. A
//! [`Node`] is one engine's whole state: its sessions, the grants that it gave, and the flows (its sides of
//! transfers) that are open. Payload never enters: for a chunk on a data channel the node parses the header and
//! gives an [`Order`] that says where it goes; whoever moves the bytes executes the order and reports it done.

#![forbid(unsafe_code)]

mod channel;
mod checks;
mod flow;
mod frame;
mod grants;
mod handshake;
mod holding;
mod initiator;
mod nics;
mod node;
mod notify;
mod onesided;
mod orders;
mod owner;
mod pages;
mod peers;
mod rungs;
mod served;
mod session;
mod wire;

pub use channel::{
    CHUNK_HEADER, ChunkHeader, MAX_CHUNK, MAX_SUMS, STATUS_VOID, STATUS_WHOLE, SUM_BYTES, TRAILER_STATUS,
};
pub use checks::Check;
pub use flow::{CopyFrom, Cut};
pub use frame::{
    Begin, FRAME_HEADER, Frame, MAX_FRAME, MAX_READERS, Op, Path, Select, Source, TravellingSource,
    frame_header,
};
pub use grants::{Closed, Offer};
pub use handshake::{
    Binding, Established, Facts, Greeting, Handshake, Identity, Join, JoinKind, Local, Nonce, Secret,
    SessionKey, VERSIONS, joined, read_joined, refusal,
};
pub use holding::Holding;
pub use initiator::{Open, Side};
pub use nics::{MAX_NIC_BYTES, MAX_NICS, NicAnswer, NicAsk, NicCall, NicKey, Nics};
pub use node::{Event, Finished, Node, Timing, WINDOW};
pub use notify::{MAX_NOTIFICATION, NOTE_WINDOW, NOTE_WINDOW_BYTES, Notification, check_payload};
pub use orders::{Order, OrderKind, OrderOutcome, OrderRef};
pub use pages::{MAX_PAGES, PageList, TravellingView};
pub use peers::SessionState;
pub use rungs::{Rung, Rungs};
pub use served::Served;
pub use session::MAX_CHANNELS;

/// A transfer: its session's number and its own within the session.
pub type FlowKey = (u64, u64);
/// The session number of transfers within the engine.
pub const OWN_SESSION: u64 = 0;
