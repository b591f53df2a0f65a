//! Notifications: small payloads to a peer's engine, in order, over the control connection.
//!
//! Each belongs to a topic: 0 is the program's own, others are of libraries in the same process, which know nothing of
//! each other. A topic of a session has a window, numbers and acknowledgements of its own, in each direction: so a
//! consumer that does not take holds up its own topic, and no other one.
//!
//! Invariants, for each topic:
//! - A sender has at most [`NOTE_WINDOW`] notifications of [`NOTE_WINDOW_BYTES`] together that are not acknowledged;
//!   beyond that it sends nothing and says `NotificationsFull`. A peer that sends more is cut off.
//! - Numbers count from 1 in each direction of a session without gaps, and an acknowledgement covers all up to its
//!   number: so what arrives is in order and whole, or the session ends. Between topics there is no order.
//! - The receiver acknowledges what its consumer has taken, never what it merely holds: a consumer that does not
//!   take fills the window, and nothing else. What it takes out of turn is acknowledged with what came before it.
//! - A notification ends once at its sender: acknowledged, at its deadline, or with its session. It keeps its place
//!   in the window until the peer has acknowledged it, whatever its sender was told.
//!
//! So within a session a notification arrives exactly once, and over the end of a session at most once: where the
//! acknowledgement did not come, the sender cannot know.
//!
//! A peer can make this side hold a window for each topic that somebody here consumes, and for topic 0: what nobody
//! consumes is taken at once by whoever receives it.

use crate::connection::Context;
use crate::event::{Event, Notification};
use crate::frame::{Frame, MAX_NOTIFICATION, Topic};
use kvik_core::{Code, Error, Result};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Notifications of a topic to a peer that are not acknowledged, at most.
pub const NOTE_WINDOW: usize = 1024;
/// Bytes of them, at most.
pub const NOTE_WINDOW_BYTES: usize = 1 << 20;

/// Both directions of a session.
#[derive(Default)]
pub(crate) struct Notes {
    /// Those that something was sent or has come of.
    topics: BTreeMap<Topic, Line>,
}

/// Both directions of a topic.
#[derive(Default)]
struct Line {
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
    /// Deadlines of those that are not acknowledged, with their numbers.
    deadlines: BTreeSet<(Duration, u64)>,
}

struct Unanswered {
    bytes: usize,
    deadline: Duration,
    /// Its sender was told how it ended.
    told: bool,
}

impl Line {
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
    /// Some deadlines have passed.
    fn tick<R: Clone>(&mut self, topic: Topic, now: Duration, cx: &mut Context<'_, R>) {
        while let Some(&(at, number)) = self.deadlines.first()
            && at <= now
        {
            self.deadlines.pop_first();
            let Some(at) = number.checked_sub(self.first()) else { continue };
            let Some(note) = self.unanswered.get_mut(at as usize) else { continue };
            note.told = true;
            let error = Error::new(
                Code::DeadlineExceeded,
                format!(
                    "{} did not take the notification by its deadline; it may still do so: look whether its program \
                     consumes its events",
                    cx.peer_text()
                ),
            );
            let session = cx.session();
            cx.tell(Event::NoteEnded { session, topic, number, outcome: Err(error) });
        }
    }
}

impl Notes {
    /// Bytes that the peer's notifications hold here.
    pub fn held(&self) -> usize {
        let slots = |line: &Line| line.held.capacity() * size_of::<(usize, bool)>();
        self.topics.values().map(|line| size_of::<Line>() + line.held_bytes + slots(line)).sum()
    }

    /// Whether every notification that was sent was acknowledged.
    pub fn is_quiet(&self) -> bool {
        self.topics.values().all(|line| line.unanswered.is_empty())
    }

    /// Whether the end of the session would lose some: sent or come, and not taken.
    pub fn are_open(&self) -> bool {
        self.topics.values().any(|line| !line.unanswered.is_empty() || !line.held.is_empty())
    }

    /// The deadline that comes next.
    pub fn due(&self) -> Option<Duration> {
        self.topics.values().filter_map(|line| line.deadlines.first()).map(|(at, _)| *at).min()
    }

    /// Sends a notification whose payload was checked: its number in the session, among those of its topic.
    ///
    /// # Errors
    /// `NotificationsFull` while the window is, `PeerLost` when the session is over.
    pub fn send<R: Clone>(
        &mut self,
        topic: Topic,
        payload: &Arc<[u8]>,
        deadline: Duration,
        cx: &mut Context<'_, R>,
    ) -> Result<u64> {
        if !cx.is_live() {
            return Err(lost());
        }
        let line = self.topics.entry(topic).or_default();
        if !line.has_room(payload.len()) {
            let of_topic = if topic == 0 { String::new() } else { format!(" of topic {topic}") };
            return Err(Error::new(
                Code::NotificationsFull,
                format!(
                    "{} has not taken the {} notifications ({} bytes){of_topic} that were sent to it: it consumes \
                     its events too slowly, or not at all",
                    cx.peer_text(),
                    line.unanswered.len(),
                    line.unanswered_bytes
                ),
            ));
        }
        line.sent += 1;
        let number = line.sent;
        line.unanswered.push_back(Unanswered { bytes: payload.len(), deadline, told: false });
        line.unanswered_bytes += payload.len();
        line.deadlines.insert((deadline, number));
        cx.send(&Frame::Notify { topic, number, payload: payload.clone() });
        Ok(number)
    }

    /// The consumer has taken a notification. Those of a session that is over are nobody's any more.
    pub fn taken<R: Clone>(&mut self, topic: Topic, number: u64, cx: &mut Context<'_, R>) {
        if let Some(upto) = self.topics.get_mut(&topic).and_then(|line| line.take(number)) {
            cx.send(&Frame::Noted { topic, upto });
        }
    }

    /// The peer's next notification.
    pub fn on_notify<R: Clone>(
        &mut self,
        topic: Topic,
        number: u64,
        payload: Arc<[u8]>,
        cx: &mut Context<'_, R>,
    ) -> Result<()> {
        let Some(peer) = cx.connection().map(|connection| connection.peer()) else { return Ok(()) };
        self.topics.entry(topic).or_default().accept(number, payload.len())?;
        let session = cx.session();
        cx.tell(Event::Notified(Notification { session, peer, topic, number, payload }));
        Ok(())
    }

    /// The peer has taken those of a topic up to this one.
    pub fn on_noted<R: Clone>(&mut self, topic: Topic, upto: u64, cx: &mut Context<'_, R>) -> Result<()> {
        let line = self.topics.entry(topic).or_default();
        if upto < line.first() || upto > line.sent {
            let text = format!(
                "the peer acknowledged notification {upto} of topic {topic}; {} of {} wait for that",
                line.unanswered.len(),
                line.sent
            );
            return Err(Error::new(Code::ProtocolError, text));
        }
        let session = cx.session();
        for number in line.first()..=upto {
            let Some(note) = line.unanswered.pop_front() else { break };
            line.unanswered_bytes -= note.bytes;
            if !note.told {
                line.deadlines.remove(&(note.deadline, number));
                cx.tell(Event::NoteEnded { session, topic, number, outcome: Ok(()) });
            }
        }
        cx.tell(Event::NoteRoom(session));
        Ok(())
    }

    /// Some deadlines have passed.
    pub fn tick<R: Clone>(&mut self, now: Duration, cx: &mut Context<'_, R>) {
        for (topic, line) in &mut self.topics {
            line.tick(*topic, now, cx);
        }
    }

    /// A session is over: what was not acknowledged may have arrived, or not.
    pub fn lose<R: Clone>(&mut self, error: &Error, cx: &mut Context<'_, R>) {
        let (session, topics) = (cx.session(), std::mem::take(&mut self.topics));
        for (topic, line) in topics {
            for (number, note) in (line.first()..).zip(line.unanswered) {
                if note.told {
                    continue;
                }
                let text = format!("it is not known whether the peer took the notification: {}", error.text);
                let outcome = Err(Error::new(error.code, text));
                cx.tell(Event::NoteEnded { session, topic, number, outcome });
            }
        }
    }
}

/// There is no session to send a notification on.
pub(crate) fn lost() -> Error {
    Error::new(Code::PeerLost, "the connection to the peer broke before it was notified")
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
