//! Notifications: what each side of a session sent, was told of and took, by the simulator's own account, topic by topic.
//!
//! The account of what the peer has acknowledged comes from the frames on the wire, not from what nodes say: so it
//! is known exactly when the window of a topic is full, and an acknowledgement of what nobody took is seen as it arrives.

use crate::engine::ms;
use crate::link::{Link, START};
use crate::memory::pattern;
use crate::world::World;
use kvik_core::{Code, Error, Result};
use kvik_proto::{Identity, MAX_NOTIFICATION, NOTE_WINDOW, NOTE_WINDOW_BYTES, Notification, Topic};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The frame that acknowledges notifications.
pub const NOTED: u16 = 9;
/// The topics that there are.
const TOPICS: [Topic; 3] = [0, 1, 255];

struct Note {
    payload: Arc<[u8]>,
    deadline: Duration,
    taken: bool,
    ended: bool,
}

/// One direction of a session, by topic.
pub type Lines = BTreeMap<Topic, Line>;

/// One direction of a topic of a session.
#[derive(Default)]
pub struct Line {
    sent: Vec<Note>,
    /// Up to here, and bytes behind: the receiver was given, and took; an acknowledgement came back; all have ended.
    came: usize,
    taken: usize,
    held: usize,
    acked: usize,
    unacked: usize,
    ended: usize,
    /// The sender was told that the window is full; and has something acknowledged since, but was not told of room.
    refused: bool,
    owed: bool,
}

fn bytes(notes: &[Note]) -> usize {
    notes.iter().map(|note| note.payload.len()).sum()
}

impl Line {
    fn has_room(&self, bytes: usize) -> bool {
        self.sent.len() - self.acked < NOTE_WINDOW && self.unacked + bytes <= NOTE_WINDOW_BYTES
    }

    /// An acknowledgement has come to the sender.
    fn acknowledge(&mut self, upto: u64) {
        let upto = upto as usize;
        self.owed |= std::mem::take(&mut self.refused);
        assert!(upto <= self.taken, "notification {upto} was acknowledged before it was taken");
        assert!(upto > self.acked, "notification {upto} was acknowledged twice");
        self.unacked -= bytes(&self.sent[self.acked..upto]);
        self.acked = upto;
    }

    /// The receiver's consumer has taken one, in its turn or before.
    fn take(&mut self, number: u64) {
        self.sent[number as usize - 1].taken = true;
        while let Some(note) = self.sent[..self.came].get(self.taken).filter(|note| note.taken) {
            self.held -= note.payload.len();
            self.taken += 1;
        }
    }
}

impl Link {
    /// An acknowledgement has come to a side: its topic, and up to which number.
    pub fn acknowledge(&mut self, side: usize, start: [u8; START]) {
        let [topic, upto @ ..] = start;
        let line =
            self.notes[side].get_mut(&topic).expect("a topic was acknowledged that nothing was sent of");
        line.acknowledge(u64::from_le_bytes(upto));
    }
}

impl World {
    /// An engine notifies a peer: of little, or of more than the window lets through.
    pub fn notify(&mut self, engine: usize) {
        let recent = self.engines[engine].links.len().min(3);
        let pick = self.engines[engine].links.len() - recent + self.rng.below(recent);
        if let Some(at) = self.engines[engine].links.get(pick).copied() {
            self.notify_on(at, self.links[at].side(engine));
        }
    }

    pub fn notify_on(&mut self, at: usize, side: usize) {
        let engine = self.links[at].ends[side];
        let Some(session) = self.links[at].session.filter(|_| !self.links[at].gone[side]) else { return };
        if self.engines[engine].asleep || self.links[at].shake[side].is_some() {
            return;
        }
        let many = NOTE_WINDOW_BYTES / MAX_NOTIFICATION;
        let (count, most) = match self.rng.below(400) {
            0 => (NOTE_WINDOW + 1, 8),
            1..3 => (many + 1, MAX_NOTIFICATION),
            3..7 => (1, MAX_NOTIFICATION),
            _ => (1 + self.rng.below(4), 200),
        };
        let patience = if self.rng.once_in(4) { 150 } else { 4000 };
        let deadline = self.engines[engine].now(self.now) + ms(patience);
        let topic = TOPICS[self.rng.below(TOPICS.len())];
        let mut full = false;
        for _ in 0..count {
            let len = match self.rng.below(4) {
                0 => 0,
                1 => self.rng.below(most + 1),
                _ => most,
            };
            let payload: Arc<[u8]> = pattern(self.rng.0, len as u64).into();
            full |= !self.send_note(at, side, session, topic, payload, deadline);
        }
        // Those of other topics have a window of their own.
        for other in TOPICS.into_iter().filter(|other| full && *other != topic) {
            if self.send_note(at, side, session, other, Arc::from(&b"beside"[..]), deadline) {
                self.coverage.count("notification_beside_a_full_topic");
            }
        }
        self.pump(engine);
    }

    /// False where the window is full.
    fn send_note(
        &mut self,
        at: usize,
        side: usize,
        session: u64,
        topic: Topic,
        payload: Arc<[u8]>,
        deadline: Duration,
    ) -> bool {
        let engine = &mut self.engines[self.links[at].ends[side]];
        let line = self.links[at].notes[side].entry(topic).or_default();
        let alive = engine.heard.contains_key(&session);
        let room = line.has_room(payload.len());
        match engine.node.session(session).notify(topic, &payload, deadline).map_err(|error| error.code) {
            Ok(number) => {
                assert!(alive, "a notification was sent in a session that is over");
                assert!(room, "notification {number} was sent beyond the window");
                assert_eq!(number, line.sent.len() as u64 + 1);
                line.unacked += payload.len();
                line.sent.push(Note { payload, deadline, taken: false, ended: false });
                engine.unended.insert((deadline, session, topic, number));
                return true;
            }
            Err(Code::NotificationsFull) => {
                assert!(alive && !room, "a notification was refused though the window has room");
                line.refused = true;
                self.coverage.count(Code::NotificationsFull.name());
                return false;
            }
            Err(Code::PeerLost) => assert!(!alive, "a notification was refused in a live session"),
            Err(code) => panic!("a notification was refused: {code}"),
        }
        true
    }

    /// One has come. Who takes at once does it here, before the node is asked for anything else.
    pub fn on_notified(&mut self, at: usize, note: Notification) {
        let Notification { session, peer, topic, number, payload } = note;
        let link = &mut self.links[self.by_session[&session]];
        let from = 1 - link.side(at);
        let sender = link.ends[from];
        let incarnation = link.processes[from].incarnation;
        let line = link.notes[from]
            .get_mut(&topic)
            .expect("a notification came of a topic that nothing was sent of");
        assert!(
            self.engines[at].heard.contains_key(&session),
            "P6: a notification came from a session that is over"
        );
        assert_eq!(peer, Identity { incarnation, ..self.engines[sender].identity });
        assert_eq!(number, line.came as u64 + 1, "notifications came out of order, or not once");
        assert!(line.sent[line.came].payload == payload, "P1: notification {number} came with other bytes");
        line.came += 1;
        line.held += payload.len();
        assert!(
            line.came - line.taken <= NOTE_WINDOW && line.held <= NOTE_WINDOW_BYTES,
            "more notifications came than the window lets through"
        );
        self.engines[at].inbox.push_back((session, topic, number));
        if self.engines[at].eager {
            // It takes the oldest, of whatever topic.
            self.take_note(at, 0);
        }
    }

    /// The consumer takes some of what has come, mostly in turn.
    pub fn take_notes(&mut self, at: usize) -> usize {
        let waiting = self.engines[at].inbox.len();
        let count = if self.rng.once_in(2) { 1 } else { 1 + self.rng.below(waiting) };
        for _ in 0..count.min(waiting) {
            let pick = if self.rng.once_in(4) { self.rng.below(3) } else { 0 };
            self.take_note(at, pick);
        }
        at
    }

    fn take_note(&mut self, at: usize, pick: usize) {
        let engine = &mut self.engines[at];
        let pick = pick.min(engine.inbox.len().saturating_sub(1));
        let Some((session, topic, number)) = engine.inbox.remove(pick) else { return };
        let link = &mut self.links[self.by_session[&session]];
        let from = 1 - link.side(at);
        if engine.heard.contains_key(&session) {
            link.notes[from].get_mut(&topic).unwrap().take(number);
        }
        engine.node.session(session).note_taken(topic, number);
    }

    /// The sender learns how one has ended.
    pub fn on_note_ended(
        &mut self,
        at: usize,
        session: u64,
        (topic, number): (Topic, u64),
        outcome: Result<()>,
    ) {
        let link = &mut self.links[self.by_session[&session]];
        let side = link.side(at);
        let (line, engine) = (link.notes[side].get_mut(&topic).unwrap(), &mut self.engines[at]);
        let (acked, alive) = (line.acked, engine.heard.contains_key(&session));
        let note = &mut line.sent[number as usize - 1];
        assert!(!std::mem::replace(&mut note.ended, true), "notification {number} ended twice");
        engine.unended.remove(&(note.deadline, session, topic, number));
        let what = match outcome.map_err(|error: Error| error.code) {
            Ok(()) => {
                assert!(
                    note.taken && number as usize <= acked,
                    "notification {number} was never acknowledged"
                );
                "notification_taken"
            }
            Err(Code::DeadlineExceeded) if alive => {
                assert!(engine.ticked >= note.deadline, "notification {number} ended before its deadline");
                "notification_late"
            }
            Err(code) => {
                assert!(!alive, "notification {number} of a live session ended with {code}");
                "notification_unknown"
            }
        };
        while line.sent.get(line.ended).is_some_and(|note| note.ended) {
            line.ended += 1;
        }
        self.coverage.count(what);
    }

    pub fn on_note_room(&mut self, at: usize, session: u64) {
        let link = &mut self.links[self.by_session[&session]];
        let side = link.side(at);
        let lines = &mut link.notes[side];
        let mut room = lines.values().map(|line| line.sent.len() - line.acked < NOTE_WINDOW);
        assert!(room.any(|room| room), "full windows were said to have room");
        lines.values_mut().for_each(|line| line.owed = false);
    }

    /// A session is over, or has acknowledged something: its sender knows of each that this decides, and of the room.
    pub fn check_line(&self, at: usize, session: u64) {
        let link = &self.links[self.by_session[&session]];
        let alive = self.engines[at].heard.contains_key(&session);
        for (topic, line) in &link.notes[link.side(at)] {
            let decided = if alive { line.acked } else { line.sent.len() };
            assert!(
                line.ended >= decided,
                "P3: engine {at} was not told how notification {} of topic {topic} ended",
                line.ended + 1
            );
            assert!(!alive || !line.owed, "a full window was never said to have room");
        }
    }

    /// The end of a schedule: all were taken, or nobody can know.
    pub fn check_lines(&self) {
        for link in &self.links {
            for side in (0..2).filter(|side| !link.gone[*side]) {
                let mut lines = link.notes[side].values();
                assert!(lines.all(|line| line.ended == line.sent.len()), "a notification never ended");
            }
        }
        for engine in &self.engines {
            assert!(engine.inbox.is_empty() && engine.unended.is_empty());
        }
    }
}
