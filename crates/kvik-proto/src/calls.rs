//! The calls that concern one session.

use crate::FlowKey;
use crate::channel::ChunkHeader;
use crate::frame::{Frame, Path, Topic};
use crate::nics::{MOVES, NicAnswer, NicCall, Nics};
use crate::node::{Node, Protocol};
use crate::notify::check_payload;
use crate::transfers::{Batch, Claim, Open, Transfers, WorkRequest, lost};
use kvik_core::{Code, Error, Result};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

/// A session, which may be over: see [`Node::session`].
pub struct SessionCalls<'a, R, S> {
    node: &'a mut Node<R, S>,
    id: u64,
}

impl<R: Clone, S: Deref<Target = Protocol<R>>> Node<R, S> {
    /// What concerns one session, which may be over.
    pub fn session(&mut self, id: u64) -> SessionCalls<'_, R, S> {
        SessionCalls { node: self, id }
    }
}

impl<R: Clone, S: Deref<Target = Protocol<R>>> SessionCalls<'_, R, S> {
    /// Bytes have come on the session's control connection.
    pub fn receive(&mut self, bytes: &[u8], now: Duration) {
        self.node.expire(now);
        self.node.with(self.id, |session, call| session.receive(bytes, now, call));
    }

    /// Some of a chunk has come on one of the session's channels: the peer lives.
    pub fn touch(&mut self, now: Duration) {
        self.node.with(self.id, |session, call| session.heard(now, call));
    }

    /// Bytes to send on the session's control connection. An empty buffer is taken in exchange.
    pub fn take_output(&mut self, into: &mut Vec<u8>) {
        self.node.with_connection(self.id, |connection| connection.take_output(into));
    }

    /// Ends a session: its flows stop, and conclude once their work requests are done.
    pub fn close(&mut self, error: Error) {
        self.node.with(self.id, |session, call| session.close(error, call));
    }

    /// A data channel of a session has ended: the session ends with its peer's last word, or without it soon.
    pub fn channel_lost(&mut self, error: Error, now: Duration) {
        self.node.with(self.id, |session, call| session.channel_lost(error, now, call));
    }

    /// Asks the peer, who opened the session, for data channels.
    pub fn ask_for_channels(&mut self) {
        self.node.send(self.id, &Frame::OpenChannels);
    }

    /// Begins a transfer with the peer of a session. `Finished` tells its end.
    ///
    /// # Errors
    /// `PeerLost` when the session is gone, `InvalidArgument` or `DuplicatePage` for a side that cannot be moved,
    /// `MemoryCapReached` while too much waits to be sent, `TransportUnavailable` for [`crate::Path::OneSided`] without
    /// a one-sided link to the peer.
    pub fn begin(&mut self, open: Open<R>, now: Duration) -> Result<FlowKey> {
        open.check_side()?;
        let begun = self.node.with_transfers(self.id, |transfers, cx| transfers.begin(open, now, cx));
        begun.unwrap_or_else(|| Err(lost()))
    }

    /// The next chunk of those that `claim` may be given: to send over [`Path::Channels`], to post over
    /// [`Path::OneSided`].
    pub fn next_of(&mut self, path: Path, claim: Claim, now: Duration) -> Option<WorkRequest<R>> {
        self.node.expire(now);
        self.node.with_transfers(self.id, |transfers, cx| match path {
            Path::OneSided => transfers.next_post(claim, cx),
            Path::Channels | Path::Memory => transfers.next_send(claim, cx),
        })?
    }

    /// Several of them at once, in the order in which one after the other would be given. Each is given: whoever has
    /// not begun one when its transfer must stop reports it `Void`.
    pub fn next_batch(
        &mut self,
        path: Path,
        claim: Claim,
        most: Batch,
        now: Duration,
        into: &mut Vec<WorkRequest<R>>,
    ) {
        self.node.expire(now);
        self.node.with_transfers(self.id, |transfers, cx| {
            let (mut given, mut bytes) = (0, 0);
            while given < most.requests && bytes < most.bytes {
                let next = match path {
                    Path::OneSided => transfers.next_post(claim, cx),
                    Path::Channels | Path::Memory => transfers.next_send(claim, cx),
                };
                let Some(request) = next else { return };
                (given, bytes) = (given + 1, bytes + request.part.end - request.part.start);
                into.push(request);
            }
        });
    }

    /// What to do with a chunk that a channel of the session announces: `None` means that it must be thrown away,
    /// since its transfer has ended.
    ///
    /// # Errors
    /// `ProtocolError`: the channel must be cut.
    pub fn place(&mut self, header: &ChunkHeader, now: Duration) -> Result<Option<WorkRequest<R>>> {
        self.node.expire(now);
        if header.session != self.id {
            return Err(Error::new(Code::ProtocolError, "a chunk of another session came on this channel"));
        }
        let placed = self.node.with(self.id, |session, call| {
            session.heard(now, call);
            session.parts(call).0.place(header, now)
        });
        placed.unwrap_or(Ok(None))
    }

    /// Sends a notification: its number in the session, among those of its topic. Its end comes as [`crate::Event::NoteEnded`].
    ///
    /// # Errors
    /// `NotificationsFull` while the window is; [`crate::Event::NoteRoom`] says when to try again. `InvalidArgument`
    /// for more than [`crate::MAX_NOTIFICATION`] bytes; `PeerLost` when the session is over.
    pub fn notify(&mut self, topic: Topic, payload: &Arc<[u8]>, deadline: Duration) -> Result<u64> {
        check_payload(payload)?;
        let sent = self.node.with(self.id, |session, call| {
            let (_, notes, mut cx) = session.parts(call);
            notes.send(topic, payload, deadline, &mut cx)
        });
        sent.unwrap_or_else(|| Err(crate::notify::lost()))
    }

    /// The consumer has taken a notification. Those of a session that is over are nobody's any more.
    pub fn note_taken(&mut self, topic: Topic, number: u64) {
        self.node.with(self.id, |session, call| {
            let (_, notes, mut cx) = session.parts(call);
            notes.taken(topic, number, &mut cx);
        });
    }

    /// As [`Node::tell_nics`], for one session.
    pub fn tell_nics(&mut self, nics: Nics) {
        self.node.send(self.id, &Frame::Nics(nics));
    }

    /// A NIC of this engine wants a connection to one of the session's peer, and that nothing which it posted before
    /// can land there any more: [`crate::Event::Reached`] follows, or the session ends.
    pub fn reach(&mut self, call: NicCall) {
        self.node.send(self.id, &Frame::Reach(call));
    }

    /// [`crate::Event::Reach`] was done.
    pub fn answer_reach(&mut self, answer: NicAnswer) {
        let understood = self.node.established(self.id).is_some_and(|session| session.version >= MOVES);
        let moved = answer.moved && understood;
        self.node.send(self.id, &Frame::Reached(NicAnswer { moved, ..answer }));
    }

    /// No NIC can touch memory for this session any more: [`crate::Event::Fence`] was done. Not taken of a live
    /// session.
    pub fn fenced(&mut self) {
        self.node.with_transfers(self.id, Transfers::fenced);
    }
}
