//! kvik's peer protocol, sans-IO.
//!
//! This crate owns no socket, no thread and no clock. Bytes and the time come in; bytes, work requests and events go
//! out; given the same input it does the same. A [`Handshake`] turns the first bytes of a connection into a session. A
//! [`Node`] is one engine's whole state: its sessions, the grants that it gave, and the flows (its sides of
//! transfers) that are open. Payload never enters: for a chunk on a data channel the node parses the header and
//! gives a [`WorkRequest`] that says where it goes; whoever moves the bytes executes the work request and reports it
//! done.

#![forbid(unsafe_code)]

mod calls;
mod channel;
mod checks;
mod chunking;
mod common;
mod connection;
mod dues;
mod event;
mod flow;
mod frame;
mod granting;
mod grants;
mod handshake;
mod holding;
mod lending;
mod looks;
mod nics;
mod node;
mod notify;
mod offer;
mod pages;
mod peers;
mod reclaim;
mod ring;
mod session;
mod sessions;
mod sync;
mod transfers;
mod wire;

pub use calls::SessionCalls;
pub use channel::{
    CHUNK_HEADER, ChunkHeader, MAX_CHUNK, MAX_SUMS, STATUS_VOID, STATUS_WHOLE, SUM_BYTES, TRAILER_STATUS,
};
pub use checks::Check;
pub use chunking::Chunking;
pub use connection::{LAST_WORD, MAX_CHANNELS};
pub use event::{Event, Finished, Notification, Served, Timing, WINDOW};
pub use flow::CopyFrom;
pub use frame::{
    Begin, FRAME_HEADER, Frame, MAX_FRAME, MAX_NOTIFICATION, MAX_READERS, Op, Path, Select, Source, Topic,
    TravellingSource, frame_header,
};

pub use granting::GrantCalls;
pub use grants::already_given;
pub use handshake::{
    Binding, Established, Facts, Greeting, Handshake, Identity, Join, JoinKind, Local, Nonce, Secret,
    SessionKey, VERSIONS, joined, read_joined, refusal,
};
pub use holding::Holding;
pub use nics::{MAX_NIC_BYTES, MAX_NICS, NicAnswer, NicCall, NicCallKind, NicKey, Nics};
pub use node::{Node, Protocol};
pub use notify::{NOTE_WINDOW, NOTE_WINDOW_BYTES, check_payload};
pub use offer::{Closed, Offer};
pub use pages::{MAX_PAGES, PageList, TravellingView};
pub use peers::SessionState;
pub use reclaim::{Reclaim, ReclaimCounts};
pub use ring::Ring;
pub use transfers::{Batch, Claim, Open, Side, WorkId, WorkKind, WorkOutcome, WorkRequest};

/// A transfer: its session's number and its own within the session.
pub type FlowKey = (u64, u64);
/// The session number of transfers within the engine.
pub const OWN_SESSION: u64 = 0;
