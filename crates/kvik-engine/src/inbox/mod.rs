//! Inboxes: the notifications of a topic, for a library on top of an engine.
//!
//! Topic 0 is the program's, whose users all see its notifications among their [events](crate::Events). Any other topic
//! has one consumer, or none.
//!
//! Invariants:
//! - A notification that the consumer takes is acknowledged with what is sent to the peer next, or a millisecond
//!   later: an answer brings it along. Where a topic has no consumer it is acknowledged as it comes, and counted: it fills
//!   nobody's window. Each topic of a session has a window of its own, so that a slow consumer holds up its own topic
//!   only.
//! - After [`Message::PeerLost`] no notification comes that the peer has sent in a session before: what was not taken by
//!   then is dropped, and its sender knows that it may be.
//! - What is held is bounded: notifications by the windows of those who send them, ends of peers by what the consumer
//!   has taken and asked for itself.
//! - Where notifications are handed on as they come ([`Inbox::handing`]), each is as good as taken then. The one
//!   that is just handed on when its session ends may come after [`Message::PeerLost`].

mod queues;

use crate::end::duplicate;
use crate::engine::Engine;
use crate::events::Who;
use crate::inner::Inner;
use crate::protocol::Calls;
use crate::sync::lock;
use kvik_core::{Code, Error, Result};
use kvik_proto::{Notification, Topic};
pub(crate) use queues::{Came, Inboxes};
use queues::{Item, Queue, SOON, Taker, identity};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Acknowledgements that wait, at most: a small part of a sender's window.
const MOST: usize = 64;

/// What an inbox has.
#[derive(Debug, Clone)]
pub enum Message {
    /// A peer's notification of the inbox's topic.
    Notification(Who, Arc<[u8]>),
    /// The last session with a peer has ended, and why: one whose notification was taken from this inbox, or that it
    /// [follows](Inbox::follow). It is followed no more.
    PeerLost(Who, Error),
}

/// The notifications of a topic, and the ends of the peers that they came from. Dropped, it is closed.
pub struct Inbox {
    inner: Arc<Inner>,
    topic: Topic,
    queue: Arc<Queue>,
    unsent: Mutex<Unsent>,
}

/// Sessions in which acknowledgements wait, and since when.
#[derive(Default)]
struct Unsent {
    sessions: Vec<u64>,
    since: Option<Instant>,
}

impl Engine {
    /// The notifications of a topic that peers send from now on ([`Engine::notify_on`]), for one consumer.
    ///
    /// Those of a topic without an inbox are acknowledged and dropped, and counted
    /// (`kvik_notifications_dropped_total`).
    ///
    /// # Errors
    /// `InvalidArgument` for topic 0, whose notifications are among the [`events`](Engine::events), and for one that
    /// has an inbox; `EngineClosed`, `EngineForked`.
    pub fn inbox(&self, topic: Topic) -> Result<Inbox> {
        Inbox::open(self, topic, None)
    }
}

impl Unsent {
    /// When they are sent at the latest, while the consumer waits for the next notification. One that is busy sends
    /// them when it asks for that, or with its answer.
    fn due(&self) -> Option<Instant> {
        self.since.map(|since| since + SOON)
    }
}

impl Inbox {
    /// As [`Engine::inbox`], for a consumer that cannot wait for a thread of its own to wake: `take` is called with each
    /// notification as it comes, by the thread of the engine that everybody's heartbeats depend on. So it does what takes
    /// microseconds, waits for nothing, and hands on whatever is left. The inbox has the ends of peers only.
    ///
    /// The inbox is closed by anybody but `take`: when [`Inbox::close`] returns, no call of it goes on, and it is
    /// dropped.
    ///
    /// # Errors
    /// As for [`Engine::inbox`].
    pub fn handing(
        engine: &Engine,
        topic: Topic,
        take: impl Fn(&Who, &[u8]) + Send + Sync + 'static,
    ) -> Result<Inbox> {
        Inbox::open(engine, topic, Some(Box::new(take)))
    }

    fn open(engine: &Engine, topic: Topic, taker: Option<Taker>) -> Result<Inbox> {
        let inner = engine.inner().clone();
        inner.base.setup.check()?;
        if topic == 0 {
            let text = "topic 0 is the program's, whose notifications are among its events";
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let queue = inner.base.observers.inboxes.open(topic, taker)?;
        // An engine that closes ends the inboxes that are there by then: either it has seen this one, or this sees it.
        let inbox = Inbox { inner, topic, queue, unsent: Mutex::default() };
        inbox.inner.base.setup.check()?;
        Ok(inbox)
    }

    /// The topic.
    pub fn topic(&self) -> Topic {
        self.topic
    }

    /// What comes next; `None` when nothing came in time, or the inbox is closed. A notification counts as taken when
    /// this returns it; its sender hears so with what goes to it next, and at the latest when this is called again and
    /// nothing more has come.
    ///
    /// # Errors
    /// `EngineClosed` once the engine is closed, `EngineForked`.
    pub fn next(&self, timeout: Duration) -> Result<Option<Message>> {
        let base = &self.inner.base;
        base.setup.check_fork()?;
        let until = Instant::now() + timeout.min(crate::config::MAX_DEADLINE);
        loop {
            let waits = lock(&self.unsent).due();
            match self.queue.take(waits.map_or(until, |due| due.min(until))) {
                Some(Item::Note(who, note)) => {
                    self.taken(&note);
                    return Ok(Some(Message::Notification(who, note.payload)));
                }
                Some(Item::Lost(who, error)) => return Ok(Some(Message::PeerLost(who, error))),
                None => self.acknowledge(),
            }
            if waits.is_none() || self.queue.is_closed() || Instant::now() >= until {
                return base.setup.check().map(|()| None);
            }
        }
    }

    /// A notification is the consumer's.
    fn taken(&self, note: &Notification) {
        let taken = |node: &mut Calls<'_>| node.session(note.session).note_taken(note.topic, note.number);
        let sessions = self.inner.base.protocol.node_unsent(taken);
        let (mut unsent, now) = (lock(&self.unsent), Instant::now());
        unsent.sessions.extend(sessions);
        let since = *unsent.since.get_or_insert(now);
        if unsent.sessions.len() >= MOST || now - since >= SOON {
            drop(unsent);
            self.acknowledge();
        }
    }

    /// Sends the acknowledgements that wait.
    fn acknowledge(&self) {
        let Unsent { mut sessions, .. } = std::mem::take(&mut *lock(&self.unsent));
        sessions.sort_unstable();
        sessions.dedup();
        self.inner.base.protocol.flush(sessions);
    }

    /// Hears of the end of this peer, also where no notification of it has come: [`Message::PeerLost`], at once if
    /// there is no session with it.
    ///
    /// # Errors
    /// `EngineClosed`, `EngineForked`.
    pub fn follow(&self, who: &Who) -> Result<()> {
        self.inner.base.setup.check()?;
        self.queue.follow(who);
        // In this order: an end that comes meanwhile is seen here, or sees that the peer is followed.
        if let Some(error) = self.inner.peers.table.why_gone(&identity(who)) {
            self.queue.lose(who, &error);
        }
        Ok(())
    }

    /// A descriptor that is readable while something waits here, and from the end on; for event loops.
    ///
    /// # Errors
    /// `EngineForked`; `InvalidArgument` when the process has too many descriptors.
    pub fn fd(&self) -> Result<OwnedFd> {
        self.inner.base.setup.check_fork()?;
        duplicate(self.queue.waker())
    }

    /// Ends it: a call that waits in another thread finds nothing, and what was not taken is acknowledged and dropped.
    pub fn close(&self) {
        let base = &self.inner.base;
        if base.setup.check_fork().is_err() {
            return;
        }
        self.acknowledge();
        let left = base.observers.inboxes.leave(self.topic, &self.queue);
        base.node(|node, _| {
            left.iter().for_each(|(session, number)| node.session(*session).note_taken(self.topic, *number))
        });
    }
}

impl Inbox {
    /// Whether it has ended, by itself or with its engine.
    pub fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.close();
    }
}
