//! One session: a connection to a peer, the transfers that go over it, and its notifications.
//!
//! A session is what one thread at a time works on. It reaches no other session; see [`crate::common`] for how it asks
//! for what concerns others. It outlives its connection for as long as it takes to stop its transfers. The transfers of
//! the engine within itself are a session that has no connection.

use crate::OWN_SESSION;
use crate::common::Call;
use crate::connection::{Beat, Connection, Context};
use crate::event::Event;
use crate::frame::Frame;
use crate::handshake::{Established, Join};
use crate::notify::Notes;
use crate::peers::SessionState;
use crate::transfers::{ChunkEvent, Transfers};
use kvik_core::{Code, Error, Result};
use std::time::Duration;

/// See the module's text.
pub(crate) struct Session<R> {
    id: u64,
    connection: Option<Connection>,
    /// Why the connection was cut, until the consequences are drawn.
    cut: Option<Error>,
    transfers: Transfers<R>,
    notes: Notes,
    /// When it was last said to want to be looked at.
    announced: Option<Duration>,
}

impl<R: Clone> Session<R> {
    /// A handshake has ended well.
    pub fn new(established: Established, heartbeat: Duration, now: Duration) -> Session<R> {
        let (id, first) = (established.session, if established.opener { 2 } else { 3 });
        let connection = Connection::new(established, heartbeat, now);
        Session { connection: Some(connection), ..Session::without_connection(id, first) }
    }

    /// The engine's transfers within itself.
    pub fn own() -> Session<R> {
        Session::without_connection(OWN_SESSION, 1)
    }

    fn without_connection(id: u64, first: u64) -> Session<R> {
        let (transfers, notes) = (Transfers::new(id, first), Notes::default());
        Session { id, connection: None, cut: None, transfers, notes, announced: None }
    }

    // ---- its parts ----

    pub fn connection(&self) -> Option<&Connection> {
        self.connection.as_ref()
    }

    pub fn connection_mut(&mut self) -> Option<&mut Connection> {
        self.connection.as_mut()
    }

    pub fn transfers(&self) -> &Transfers<R> {
        &self.transfers
    }

    /// The parts, each with what it reaches beside itself.
    pub fn parts<'a>(
        &'a mut self,
        call: &'a mut Call<'_, R>,
    ) -> (&'a mut Transfers<R>, &'a mut Notes, Context<'a, R>) {
        let call = Call { common: call.common, output: call.output };
        let context = Context::new(self.id, &mut self.connection, &mut self.cut, call);
        (&mut self.transfers, &mut self.notes, context)
    }

    // ---- how it stands ----

    pub fn is_live(&self) -> bool {
        self.connection.is_some()
    }

    /// Nothing of it is left.
    pub fn is_gone(&self) -> bool {
        self.connection.is_none() && self.transfers.flows().len() == 0 && self.id != OWN_SESSION
    }

    /// True when nothing that was sent waits for an answer.
    pub fn is_quiet(&self) -> bool {
        let answered = self.connection.as_ref().is_none_or(Connection::is_quiet);
        answered && self.notes.is_quiet() && self.transfers.flows().len() == 0
    }

    /// Bytes that are held because of its peer: what it sent and asked for, and what it leaves unread.
    pub fn held(&self) -> u64 {
        let Some(connection) = &self.connection else { return 0 };
        (connection.held() + self.transfers.flows().held() + self.notes.held()) as u64
    }

    pub fn state(&self, now: Duration) -> Option<SessionState> {
        let connection = self.connection.as_ref()?;
        Some(SessionState {
            session: self.id,
            peer: connection.peer(),
            silent: now.saturating_sub(connection.last_in()),
            suspect: connection.is_suspect(),
            leaving: connection.is_leaving(),
            transfers: self.transfers.flows().len(),
        })
    }

    /// Who takes part in a grant by this transfer, in words.
    pub fn holder(&self, transfer: u64) -> String {
        match (&self.connection, self.transfers.flows().reader_of(transfer)) {
            _ if self.id == OWN_SESSION => "this engine itself".to_owned(),
            (Some(connection), _) => connection.peer_text(),
            (None, Some(reader)) => format!("engine {reader}, which is gone"),
            (None, None) => "the peer".to_owned(),
        }
    }

    /// When it was last said to want to be looked at, and when it does now. What is gone does not.
    pub fn change_due(&mut self) -> (Option<Duration>, Option<Duration>) {
        let due = if self.is_gone() { None } else { self.due() };
        (std::mem::replace(&mut self.announced, due), due)
    }

    /// When [`Session::tick`] wants to be called again.
    fn due(&self) -> Option<Duration> {
        let beat = self.connection.as_ref().map(Connection::due);
        [beat, self.transfers.flows().due(), self.notes.due()].into_iter().flatten().min()
    }

    // ---- what happens ----

    /// Something has come from the peer: it lives.
    pub fn heard(&mut self, now: Duration, call: &mut Call<'_, R>) {
        if self.connection.as_mut().is_some_and(|connection| connection.heard(now)) {
            call.tell(Event::Heard(self.id));
        }
    }

    /// A further connection asks to join.
    ///
    /// # Errors
    /// Why it may not.
    pub fn join(&mut self, join: &Join, now: Duration, call: &mut Call<'_, R>) -> Result<(), &'static str> {
        self.connection.as_mut().ok_or("there is no such session")?.join(join)?;
        self.heard(now, call);
        Ok(())
    }

    /// Bytes have come on the control connection.
    pub fn receive(&mut self, bytes: &[u8], now: Duration, call: &mut Call<'_, R>) {
        self.heard(now, call);
        let Some(connection) = self.connection.as_mut() else { return };
        let (mut input, mut taken) = (connection.take_input(bytes), 0);
        let result = loop {
            if self.connection.is_none() {
                return;
            }
            match Frame::decode(&input[taken..]) {
                Ok(Some((frame, len))) => {
                    taken += len;
                    if let Err(error) = self.on_frame(frame, now, call) {
                        break Err(error);
                    }
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        input.drain(..taken);
        if let Some(connection) = self.connection.as_mut() {
            connection.keep_input(input);
        }
        if let Err(error) = result {
            self.close(error, call);
        }
    }

    /// Deals with the next frame.
    fn on_frame(&mut self, frame: Frame, now: Duration, call: &mut Call<'_, R>) -> Result<()> {
        let id = self.id;
        let (transfers, notes, mut cx) = self.parts(call);
        let cx = &mut cx;
        match frame {
            Frame::Beat => Ok(()),
            Frame::Begin(begin) => transfers.on_begin(*begin, now, cx),
            Frame::Accept { transfer, source } => transfers.on_accept(transfer, source, false, cx),
            Frame::End { transfer, outcome } => transfers.on_end(transfer, outcome, cx),
            Frame::Ended { transfer } => {
                if let Some(connection) = cx.connection() {
                    connection.answered(transfer);
                }
                transfers.on_answered(transfer, cx)
            }
            Frame::OpenChannels => {
                cx.tell(Event::OpenChannels(id));
                Ok(())
            }
            Frame::Notify { topic, number, payload } => notes.on_notify(topic, number, payload, cx),
            Frame::Noted { topic, upto } => notes.on_noted(topic, upto, cx),
            Frame::Nics(nics) => {
                if let Some(connection) = cx.connection() {
                    connection.move_nics(nics)?;
                    cx.tell(Event::NicsMoved(id));
                }
                Ok(())
            }
            Frame::Reach(call) => on_one_sided(Event::Reach(id, call), cx),
            Frame::Reached(answer) => on_one_sided(Event::Reached(id, answer), cx),
            Frame::Check { transfer, at, sums } => transfers.on_check(transfer, at, sums, cx),
            Frame::Checked { transfer, at } => transfers.on_checked(transfer, at, cx),
            Frame::AcceptStaged { transfer, source } => transfers.on_accept(transfer, Some(source), true, cx),
            Frame::Lent { transfer, at, place } => {
                transfers.on_chunk(transfer, at, ChunkEvent::Lent(place), cx)
            }
            Frame::Used { transfer, at } => transfers.on_chunk(transfer, at, ChunkEvent::Used, cx),
            Frame::Landed { transfer, at } => transfers.on_chunk(transfer, at, ChunkEvent::Landed, cx),
            Frame::Goodbye => {
                cx.tell(Event::Goodbye(id));
                let text = format!("{} closed the connection in order", cx.peer_text());
                Err(Error::new(Code::PeerLost, text))
            }
        }
    }

    /// Sends a frame, unless the connection is gone.
    pub fn send(&mut self, frame: &Frame, call: &mut Call<'_, R>) {
        self.parts(call).2.send(frame);
    }

    /// Lets time pass: beats, deaths, deadlines. What was due first comes first.
    pub fn tick(&mut self, now: Duration, call: &mut Call<'_, R>) {
        while let Some(due) = self.due().filter(|due| *due <= now) {
            if self.connection.as_ref().is_some_and(|connection| connection.due() == due) {
                let busy = self.transfers.flows().len() > 0 || self.notes.are_open();
                let beat = self.parts(call).2.beat(now, busy);
                match beat {
                    Beat::On => {}
                    Beat::Dead(error) => self.close(error, call),
                    Beat::Spare => {
                        let text = "a second connection to the same peer was closed";
                        self.close(Error::new(Code::PeerLost, text), call);
                    }
                }
            } else {
                let (transfers, notes, mut cx) = self.parts(call);
                transfers.tick(due, &mut cx);
                notes.tick(due, &mut cx);
            }
            self.settle(call);
        }
    }

    /// A data channel of the session has ended. A peer that closes in order says so on the control connection, and what
    /// goes on another connection may come later: the session's transfers end at once, new ones go in another session,
    /// and this one ends with what its peer says within [`LAST_WORD`](crate::LAST_WORD), or else as lost. An error that
    /// is no end of a connection ends it at once.
    pub fn channel_lost(&mut self, error: Error, now: Duration, call: &mut Call<'_, R>) {
        if error.code != Code::PeerLost {
            return self.close(error, call);
        }
        let (transfers, _, mut cx) = self.parts(call);
        if cx.connection().is_some() {
            cx.lose_channel(error.clone(), now);
            transfers.stop_each(&error, &mut cx);
        }
    }

    /// Ends the session: its flows stop, and conclude once their work requests are done.
    pub fn close(&mut self, error: Error, call: &mut Call<'_, R>) {
        self.parts(call).2.cut(error);
        self.settle(call);
    }

    /// Draws the consequences of a connection that was cut. To be called after whatever may have cut it.
    pub fn settle(&mut self, call: &mut Call<'_, R>) {
        let Some(error) = self.cut.take() else { return };
        let id = self.id;
        let (transfers, notes, mut cx) = self.parts(call);
        transfers.stop_all(&error, &mut cx);
        notes.lose(&error, &mut cx);
        // Where a NIC may still touch memory for it, its path must be cut.
        if transfers.flows().are_in_flight() {
            cx.tell(Event::Fence(id));
        }
    }
}

/// What only the peer of a one-sided link has reason to say.
fn on_one_sided<R: Clone>(event: Event, cx: &mut Context<'_, R>) -> Result<()> {
    if !cx.has_one_sided() {
        let text = "the peer spoke of NICs, and there is no one-sided link to it";
        return Err(Error::new(Code::ProtocolError, text));
    }
    cx.tell(event);
    Ok(())
}
