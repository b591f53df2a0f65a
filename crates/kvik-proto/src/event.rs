//! What a node says to the engine around it, and the times that it goes by.

use crate::FlowKey;
use crate::frame::{Op, Path, Topic};
use crate::handshake::Identity;
use crate::nics::{NicAnswer, NicCall};
use kvik_core::{Class, Code, EngineId, Error, GrantId, GrantState, RegionId, Result};
use std::sync::Arc;
use std::time::Duration;

/// The times that decide about life and death.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// A side that has sent nothing for this long sends a beat.
    pub heartbeat: Duration,
    /// A peer that was silent for this long is dead.
    pub dead_after: Duration,
}

impl Default for Timing {
    /// A beat every 0.5 s; dead after 2 s, as promised in P6.
    fn default() -> Self {
        Timing { heartbeat: Duration::from_millis(500), dead_after: Duration::from_secs(2) }
    }
}

/// Bytes that a session's channels have in flight at most, unless the engine says otherwise: more than so many channels
/// as a peer usually has ever take, so that it bounds and does not slow.
pub const WINDOW: u64 = 32 << 20;

/// What happened, for the engine around the node.
#[derive(Debug)]
pub enum Event {
    /// There may be something to send on the session's channels.
    Send(u64),
    /// There may be something to copy.
    Copy,
    /// A flow of the session must stop: executors look at their work requests' flags.
    Stop(u64),
    /// A transfer that this side began has ended; nothing here touches its memory any more.
    Finished(Finished),
    /// A request of a peer has ended on this side, which owns the grant.
    Served(Served),
    /// A grant has ended; its pages are the owner's again.
    GrantEnded(GrantId, GrantState),
    /// A grant is over while a transfer takes part in it: so many pages are not the owner's yet. `GrantEnded` follows.
    Ending(GrantId, u64),
    /// This fence slot must be raised, before the next event is asked for.
    Raise(u32),
    /// More, or fewer, transfers are open for which a peer's NIC may reach pages of this engine.
    Exposed,
    /// The session is over: its connections must be cut.
    SessionDown(u64, Error),
    /// The peer asks for data channels.
    OpenChannels(u64),
    /// Nothing was heard on the session for half of the time after which its peer is dead.
    Silent(u64),
    /// Something was heard again on a session that was silent.
    Heard(u64),
    /// The peer closes the session in order; `SessionDown` follows.
    Goodbye(u64),
    /// This side does, since it is a second one to the same peer.
    Left(u64),
    /// A notification has come.
    Notified(Notification),
    /// A notification that this side sent has ended: acknowledged, or why not.
    NoteEnded {
        /// On which session.
        session: u64,
        /// Of which topic.
        topic: Topic,
        /// Its number.
        number: u64,
        /// Acknowledged, or why not.
        outcome: Result<()>,
    },
    /// The window of a topic of notifications has room again.
    NoteRoom(u64),
    /// There may be something to post on the session's one-sided link.
    Post(u64),
    /// The NICs of the session's peer have other addresses now.
    NicsMoved(u64),
    /// A NIC of the session's peer wants a connection to a NIC here: what it could reach by the connection that it had
    /// must be cut first; then [`crate::SessionCalls::answer_reach`].
    Reach(u64, NicCall),
    /// The peer has answered what [`crate::SessionCalls::reach`] asked.
    Reached(u64, NicAnswer),
    /// The session is over and a NIC may still touch memory for it: the path must be cut (queue pair drained,
    /// endpoint closed), its posted work requests be reported, and then [`crate::SessionCalls::fenced`] be called.
    Fence(u64),
}

/// The end of a transfer.
#[derive(Debug)]
pub struct Finished {
    /// Which.
    pub key: FlowKey,
    /// Success, or why not.
    pub outcome: Result<()>,
    /// Bytes that are in place.
    pub bytes: u64,
    /// When the first work request was given, if any was.
    pub first: Option<Duration>,
    /// Runs of memory that were moved, as counted on this side.
    pub extents: u64,
    /// Time spent on checksums on this side, over all threads.
    pub verify: Duration,
    /// It went through a ring of the peer's.
    pub staged_there: bool,
    /// The peer's region that was copied from, where this side copied.
    pub copied_from: Option<RegionId>,
}

/// The end of a peer's request, as the owner of the grant sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Served {
    /// Whose request it was.
    pub peer: EngineId,
    /// What it asked for.
    pub op: Op,
    /// What it is for.
    pub class: Class,
    /// How its bytes went, or would have gone.
    pub path: Path,
    /// Success, or the kind of the error.
    pub outcome: Result<(), Code>,
    /// The error was this side's answer, not the peer's own doing or the end of the session.
    pub refused: bool,
    /// Bytes that this side knows to have been moved.
    pub bytes: u64,
}

/// A notification that has come. It is acknowledged by [`crate::SessionCalls::note_taken`].
#[derive(Debug, Clone)]
pub struct Notification {
    /// On which session.
    pub session: u64,
    /// From whom.
    pub peer: Identity,
    /// What it is about; 0 for the program's own.
    pub topic: Topic,
    /// Its number in the session, among those of its topic.
    pub number: u64,
    /// What it says.
    pub payload: Arc<[u8]>,
}
