//! What a NIC's thread needs of the NIC, whatever speaks to it.

use crate::RegionMemory;
use kvik_core::{Code, Error, Result};
use kvik_host::event::Epoll;
pub(crate) use kvik_host::rma::{Posted, Run};
use kvik_proto::{NicKey, Op};
use std::fmt::Display;
use std::rc::Rc;

/// An open NIC. It and all that comes of it are one thread's.
pub(crate) trait RmaDevice: Sized {
    /// Memory that it knows.
    type Known;
    /// The connection to a peer's NIC.
    type Conn: Copy;

    /// Bytes of an operation, at most; at most [`LONGEST`].
    fn longest(&self) -> u64;
    /// Operations in flight over all connections; None where each has a queue of its own.
    fn depth(&self) -> Option<usize>;
    /// Runs of memory here that one operation takes; at most [`PIECES`].
    fn pieces(&self) -> usize;
    /// Whether anybody but this many NICs holds the memory.
    fn is_held(known: &Self::Known, nics: usize) -> bool;
    /// The address that peers are told when they meet.
    ///
    /// # Errors
    /// The library's.
    fn address(&mut self) -> Result<Vec<u8>>;
    /// Adds what tells of completions to `epoll`; false where there is no such thing, and the NIC must be polled.
    ///
    /// # Errors
    /// The library's, or the kernel's.
    fn watch(&mut self, epoll: &Rc<Epoll>, token: u64) -> Result<bool>;
    /// Whether the thread may sleep until what is watched tells: nothing has come meanwhile.
    fn may_wait(&mut self) -> bool;
    /// Makes memory known to the NIC, for own operations and for those of peers.
    ///
    /// # Errors
    /// The library's.
    fn register(&mut self, memory: RegionMemory) -> Result<(Self::Known, NicKey)>;
    /// Opens the connection to a peer's NIC of this address; None where the peer must be asked first.
    ///
    /// # Errors
    /// The address is none of this kind.
    fn reach(&mut self, session: u64, address: &[u8]) -> Result<Option<Self::Conn>>;
    /// What the peer is told when it is asked for a connection to its NIC, and to cut what there was before.
    ///
    /// # Errors
    /// There is no end of it here. The peer is asked all the same, and told nothing.
    fn call(&mut self, session: u64, address: &[u8]) -> Result<Vec<u8>>;
    /// Opens the connection by what the peer has answered.
    ///
    /// # Errors
    /// The answer makes no sense.
    fn connect(&mut self, session: u64, told: &[u8]) -> Result<Self::Conn>;
    /// The NIC `from` of the session's peer wants a connection to this one: cuts what it could reach before.
    ///
    /// # Errors
    /// It cannot be cut.
    fn disconnect_peer(&mut self, session: u64, from: u8, told: &[u8]) -> Result<Disconnected>;
    /// Then opens the new connection: what the peer needs to know of it.
    ///
    /// # Errors
    /// What it told makes no sense, or there is no connection.
    fn admit(&mut self, session: u64, from: u8, told: &[u8]) -> Result<Vec<u8>>;
    /// Closes it. Nothing is in flight on it.
    fn leave(&mut self, session: u64, conn: Self::Conn);
    /// Posts an operation.
    ///
    /// # Errors
    /// It was refused; nothing of it is in flight.
    fn post(&mut self, operation: &Operation<'_, Self>) -> Result<Posted>;
    /// Has the NIC begin with what was posted, where it has not yet.
    fn flush(&mut self);
    /// Lets the NIC work, and takes what has ended.
    ///
    /// # Errors
    /// Nothing can be learnt of operations any more.
    fn poll(&mut self, done: &mut Vec<Done>) -> Result<()>;
    /// Why it cannot be used now: its port is down, say. Looked at after each poll.
    fn down(&self) -> Option<Error>;
    /// Stops what was posted to a session's peer: it touches no memory of this process any more, and nothing is
    /// heard of it.
    ///
    /// # Errors
    /// It cannot be stopped; what is in flight stays so.
    fn cancel(&mut self, session: u64) -> Result<CancelScope>;
    /// Cuts the path by which a session's peer reaches memory here. Whether all peers share it: then they must take
    /// another address from now on, which [`RmaDevice::address`] gives.
    ///
    /// # Errors
    /// It cannot be cut.
    fn fence(&mut self, session: u64) -> Result<bool>;
    /// The session is over, and nothing that was posted for it on either side is in flight.
    fn forget(&mut self, session: u64);
}

/// Bytes of any operation, at most: a NIC is as fast with this as with more, and sessions take turns.
pub(crate) const LONGEST: u64 = 1 << 20;

/// Runs of memory here that any operation takes, at most.
pub(crate) const PIECES: usize = 8;

/// Runs here to or from one run at the peer.
pub(crate) struct Operation<'a, C: RmaDevice> {
    pub op: Op,
    /// The own memory.
    pub memory: &'a C::Known,
    /// What of it, in the order in which it lies at the peer.
    pub pieces: &'a [Run],
    pub conn: C::Conn,
    /// Where the bytes lie at the peer, by its key.
    pub remote: u64,
    pub key: u64,
    /// Given back with the completion.
    pub token: u64,
}

/// An operation has ended: its memory is not touched any more by it.
pub(crate) type Done = kvik_host::rma::Completion<Error>;

/// What a peer could reach, and cannot any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disconnected {
    /// Its own connection.
    Alone,
    /// What all peers shared, as for [`RmaDevice::fence`].
    All,
    /// Nothing any more: that was cut before, with what all peers shared then.
    Before,
}

/// Whose operations a cut has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CancelScope {
    /// All that were posted on this NIC; connections must be opened again.
    All,
    /// Those of the session's work requests.
    Session,
}

/// The NIC, or its library, refused.
pub(super) fn no(error: impl Display) -> Error {
    Error::new(Code::TransportUnavailable, error.to_string())
}

/// Nothing is to be reached over the connection, or nothing can be learnt of it.
pub(super) fn lost(error: impl Display) -> Error {
    Error::new(Code::PeerLost, error.to_string())
}

/// Something of a NIC that was to be stopped was not: it may touch memory until the process ends.
pub(crate) fn goes_on(error: &dyn Display) -> Error {
    let text = format!(
        "{error}: what it had in flight, and peers that reach it, may touch memory of this process still; restart the \
         process"
    );
    Error::new(Code::PagesQuarantined, text)
}
