//! Notifications: small payloads to a peer's engine, in order, over the control connection.
//!
//! Invariants:
//! - A sender has at most [`NOTE_WINDOW`] notifications of [`NOTE_WINDOW_BYTES`] together that are not acknowledged;
//!   beyond that it sends nothing and says `NotificationsFull`. A peer that sends more is cut off.
//! - Numbers count from 1 in each direction of a session without gaps, and an acknowledgement covers all up to its
//!   number: so what arrives is in order and whole, or the session ends.
//! - The receiver acknowledges what its consumer has taken, never what it merely holds: a consumer that does not
//!   take fills the window, and nothing else.
//! - A notification ends once at its sender: acknowledged, at its deadline, or with its session. It keeps its place
//!   in the window until the peer has acknowledged it, whatever its sender was told.
//!
//! So within a session a notification arrives exactly once, and over the end of a session at most once: where the
//! acknowledgement did not come, the sender cannot know.

use crate::frame::Frame;
use crate::handshake::Identity;
use crate::node::{Event, Node, Timer};
use kvik_core::{Code, Error, Result};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a notification at most. It shares the control connection with heartbeats and the ends of transfers, which
/// wait for it: so much takes half a millisecond on a link of 1 Gbit/s. What is larger belongs into pages.
pub const MAX_NOTIFICATION: usize = 64 << 10;
/// Notifications to a peer that are not acknowledged, at most.
pub const NOTE_WINDOW: usize = 1024;
/// Bytes of them, at most.
pub const NOTE_WINDOW_BYTES: usize = 1 << 20;

/// A notification that has come. It is acknowledged by [`Node::note_taken`].
#[derive(Debug, Clone)]
pub struct Notification {
    /// On which session.
    pub session: u64,
    /// From whom.
    pub peer: Identity,
    /// Its number in the session.
    pub number: u64,
    /// What it says.
    pub payload: Arc<[u8]>,
}

/// Both directions of a session.
#[derive(Default)]
pub(crate) struct Notes {
    /// The number of the latest that was sent.
    sent: u64,
    /// Those that are not acknowledged, oldest first.
    unanswered: VecDeque<Unanswered>,
    unanswered_bytes: usize,
    /// The number of the latest that came.
    came: u64,
    /// Those that are not taken, or were taken before an older one: length, and whether it was taken.
    held: VecDeque<(usize, bool)>,
    held_bytes: usize,
}

struct Unanswered {
    bytes: usize,
    deadline: Duration,
    /// Its sender was told how it ended.
    told: bool,
}

impl Notes {
    /// Bytes that the peer's notifications hold here.
    pub fn held(&self) -> usize {
        self.held_bytes + self.held.capacity() * size_of::<(usize, bool)>()
    }

    /// Whether every notification that was sent was acknowledged.
    pub fn is_quiet(&self) -> bool {
        self.unanswered.is_empty()
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.unanswered.len() < NOTE_WINDOW && self.unanswered_bytes + bytes <= NOTE_WINDOW_BYTES
    }

    /// The number of the oldest that is not acknowledged.
    fn first(&self) -> u64 {
        self.sent - self.unanswered.len() as u64 + 1
    }

    /// The peer's next notification.
    fn accept(&mut self, number: u64, bytes: usize) -> Result<()> {
        let wrong = |why: String| Err(Error::new(Code::ProtocolError, why));
        if number != self.came + 1 {
            let text = format!("the peer sent notification {number} after notification {}", self.came);
            return wrong(text);
        }
        if self.held.len() >= NOTE_WINDOW || self.held_bytes + bytes > NOTE_WINDOW_BYTES {
            return wrong(format!(
                "the peer sent notifications beyond the window of {NOTE_WINDOW} and {NOTE_WINDOW_BYTES} bytes"
            ));
        }
        self.came = number;
        self.held.push_back((bytes, false));
        self.held_bytes += bytes;
        Ok(())
    }

    /// The consumer has taken one: the number up to which all are taken now, if that has risen.
    fn take(&mut self, number: u64) -> Option<u64> {
        let first = self.came - self.held.len() as u64 + 1;
        let at = usize::try_from(number.checked_sub(first)?).ok()?;
        self.held.get_mut(at)?.1 = true;
        let mut upto = None;
        let mut next = first;
        while let Some((bytes, true)) = self.held.front() {
            self.held_bytes -= bytes;
            self.held.pop_front();
            upto = Some(next);
            next += 1;
        }
        upto
    }
}

impl<R: Clone> Node<R> {
    /// Sends a notification: its number in the session. Its end comes as [`Event::NoteEnded`].
    ///
    /// # Errors
    /// `NotificationsFull` while the window is; [`Event::NoteRoom`] says when to try again. `InvalidArgument` for
    /// more than [`MAX_NOTIFICATION`] bytes; `PeerLost` when the session is over.
    pub fn notify(&mut self, session: u64, payload: &Arc<[u8]>, deadline: Duration) -> Result<u64> {
        check_payload(payload)?;
        let text = self.peer_text(session);
        let Some(open) = self.sessions.get_mut(&session) else {
            return Err(Error::new(
                Code::PeerLost,
                "the connection to the peer broke before it was notified",
            ));
        };
        let notes = &mut open.notes;
        if !notes.has_room(payload.len()) {
            return Err(Error::new(
                Code::NotificationsFull,
                format!(
                    "{text} has not taken the {} notifications ({} bytes) that were sent to it: it consumes its \
                     events too slowly, or not at all",
                    notes.unanswered.len(),
                    notes.unanswered_bytes
                ),
            ));
        }
        notes.sent += 1;
        let number = notes.sent;
        notes.unanswered.push_back(Unanswered { bytes: payload.len(), deadline, told: false });
        notes.unanswered_bytes += payload.len();
        self.timers.insert((deadline, Timer::Note(session, number)));
        self.send(session, &Frame::Notify { number, payload: payload.clone() });
        Ok(number)
    }

    /// The consumer has taken a notification. Those of a session that is over are nobody's any more.
    pub fn note_taken(&mut self, session: u64, number: u64) {
        let taken = self.sessions.get_mut(&session).and_then(|open| open.notes.take(number));
        if let Some(upto) = taken {
            self.send(session, &Frame::Noted { upto });
        }
    }

    pub(crate) fn on_notify(&mut self, session: u64, number: u64, payload: Arc<[u8]>) -> Result<()> {
        let Some(open) = self.sessions.get_mut(&session) else { return Ok(()) };
        open.notes.accept(number, payload.len())?;
        let peer = open.established.peer;
        self.events.push_back(Event::Notified(Notification { session, peer, number, payload }));
        Ok(())
    }

    pub(crate) fn on_noted(&mut self, session: u64, upto: u64) -> Result<()> {
        let Some(open) = self.sessions.get_mut(&session) else { return Ok(()) };
        let notes = &mut open.notes;
        if upto < notes.first() || upto > notes.sent {
            let text = format!(
                "the peer acknowledged notification {upto}; {} of {} wait for that",
                notes.unanswered.len(),
                notes.sent
            );
            return Err(Error::new(Code::ProtocolError, text));
        }
        for number in notes.first()..=upto {
            let Some(note) = notes.unanswered.pop_front() else { break };
            notes.unanswered_bytes -= note.bytes;
            if !note.told {
                self.timers.remove(&(note.deadline, Timer::Note(session, number)));
                self.events.push_back(Event::NoteEnded { session, number, outcome: Ok(()) });
            }
        }
        self.events.push_back(Event::NoteRoom(session));
        Ok(())
    }

    /// A notification's deadline has passed.
    pub(crate) fn note_timer(&mut self, session: u64, number: u64) {
        let text = self.peer_text(session);
        let Some(open) = self.sessions.get_mut(&session) else { return };
        let Some(at) = number.checked_sub(open.notes.first()) else { return };
        let Some(note) = open.notes.unanswered.get_mut(at as usize) else { return };
        note.told = true;
        let error = Error::new(
            Code::DeadlineExceeded,
            format!(
                "{text} did not take the notification by its deadline; it may still do so: look whether its program \
                 consumes its events"
            ),
        );
        self.events.push_back(Event::NoteEnded { session, number, outcome: Err(error) });
    }

    /// A session is over: what was not acknowledged may have arrived, or not.
    pub(crate) fn lose_notes(&mut self, session: u64, notes: Notes, error: &Error) {
        for (number, note) in (notes.first()..).zip(notes.unanswered) {
            if note.told {
                continue;
            }
            self.timers.remove(&(note.deadline, Timer::Note(session, number)));
            let text = format!("it is not known whether the peer took the notification: {}", error.text);
            let outcome = Err(Error::new(error.code, text));
            self.events.push_back(Event::NoteEnded { session, number, outcome });
        }
    }
}

/// # Errors
/// `InvalidArgument` for a payload that no notification can have.
pub fn check_payload(payload: &[u8]) -> Result<()> {
    match payload.len() {
        0..=MAX_NOTIFICATION => Ok(()),
        len => Err(Error::new(
            Code::InvalidArgument,
            format!(
                "a notification has at most {MAX_NOTIFICATION} bytes, not {len}: send what is larger as pages, and \
                 notify the peer of the ticket"
            ),
        )),
    }
}
