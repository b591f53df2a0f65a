//! What waits for the consumers.

use crate::events::Who;
use crate::sync::{lock, signal};
use kvik_core::{Code, Error, Result};
use kvik_host::clock::boottime;
use kvik_host::event::EventFd;
use kvik_proto::{Identity, Notification, Topic};
use kvik_transport::from_host;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long an acknowledgement may wait for something to go with.
pub(super) const SOON: Duration = Duration::from_millis(1);

/// What the notifications of a topic are handed to, see [`Inbox::handing`](crate::Inbox::handing).
pub(crate) type Taker = Box<dyn Fn(&Who, &[u8]) + Send + Sync>;

/// The inboxes of an engine, by topic.
#[derive(Default)]
pub(crate) struct Inboxes {
    open: Mutex<BTreeMap<Topic, Arc<Queue>>>,
    dropped: AtomicU64,
    unsent: Mutex<Unsent>,
}

/// Sessions in which acknowledgements of what was handed on wait for something to go with.
#[derive(Default)]
struct Unsent {
    sessions: Vec<u64>,
    /// When they are sent at the latest, as time since boot.
    due: Option<Duration>,
}

pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    waker: EventFd,
    /// Held while it is called: who has closed the queue knows that no call goes on.
    taker: Mutex<Option<Taker>>,
    hands: bool,
}

/// What became of a notification that came.
pub(crate) enum Came {
    /// It waits for its consumer.
    Waits,
    /// Nobody consumes it.
    Dropped,
    /// It is to be handed on.
    For(Arc<Queue>, Who),
}

#[derive(Default)]
struct State {
    closed: bool,
    items: VecDeque<Item>,
    /// Peers of whose end the consumer hears.
    followed: HashSet<Identity>,
    /// The waker is signalled.
    signalled: bool,
}

pub(super) enum Item {
    Note(Who, Notification),
    Lost(Who, Error),
}

impl Queue {
    fn new(taker: Option<Taker>) -> Result<Queue> {
        let waker = EventFd::new().map_err(|error| from_host(Code::InvalidArgument, error))?;
        let (hands, taker) = (taker.is_some(), Mutex::new(taker));
        Ok(Queue { state: Mutex::default(), changed: Condvar::new(), waker, taker, hands })
    }

    fn wake(&self, state: &mut State) {
        if !std::mem::replace(&mut state.signalled, true) {
            signal(&self.waker, "an inbox");
        }
        self.changed.notify_all();
    }

    fn put(self: &Arc<Queue>, from: Who, note: &Notification) -> Came {
        let mut state = lock(&self.state);
        if state.closed {
            return Came::Dropped;
        }
        if self.hands {
            state.followed.insert(identity(&from));
            return Came::For(self.clone(), from);
        }
        state.items.push_back(Item::Note(from, note.clone()));
        self.wake(&mut state);
        Came::Waits
    }

    /// Hands a notification on.
    pub fn hand(&self, from: &Who, payload: &[u8]) {
        if let Some(taker) = &*lock(&self.taker) {
            taker(from, payload);
        }
    }

    /// A session has ended: what came on it and was not taken is nobody's.
    fn forget(&self, session: u64) {
        lock(&self.state)
            .items
            .retain(|item| !matches!(item, Item::Note(_, note) if note.session == session));
    }

    /// The consumer is to hear of a peer's end.
    pub(super) fn follow(&self, who: &Who) {
        lock(&self.state).followed.insert(identity(who));
    }

    /// What is signalled while something waits.
    pub(super) fn waker(&self) -> &EventFd {
        &self.waker
    }

    /// A peer has no session any more.
    pub(super) fn lose(&self, who: &Who, error: &Error) {
        let mut state = lock(&self.state);
        if state.followed.remove(&identity(who)) {
            state.items.push_back(Item::Lost(who.clone(), error.clone()));
            self.wake(&mut state);
        }
    }

    pub(super) fn take(&self, until: Instant) -> Option<Item> {
        let mut state = lock(&self.state);
        loop {
            if state.closed {
                return None;
            }
            let item = state.items.pop_front();
            if state.items.is_empty() && std::mem::take(&mut state.signalled) {
                drop(self.waker.drain());
            }
            if let Some(Item::Note(who, _)) = &item {
                state.followed.insert(identity(who));
            }
            let left = until.saturating_duration_since(Instant::now());
            if item.is_some() || left.is_zero() {
                return item;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }

    /// Nobody consumes it any more: what it had.
    fn close(&self) -> VecDeque<Item> {
        let left = {
            let mut state = lock(&self.state);
            state.closed = true;
            self.wake(&mut state);
            std::mem::take(&mut state.items)
        };
        let taker = lock(&self.taker).take();
        drop(taker);
        left
    }
}

pub(super) fn identity(who: &Who) -> Identity {
    Identity { engine: who.engine, incarnation: who.incarnation }
}

impl Inboxes {
    /// The queue of a topic, for its consumer.
    ///
    /// # Errors
    /// `InvalidArgument` for one that has a consumer.
    pub(super) fn open(&self, topic: Topic, taker: Option<Taker>) -> Result<Arc<Queue>> {
        let queue = Arc::new(Queue::new(taker)?);
        match lock(&self.open).entry(topic) {
            Entry::Vacant(place) => Ok(place.insert(queue).clone()),
            Entry::Occupied(_) => {
                let text = format!("topic {topic} has an inbox already, and takes one: close that first");
                Err(Error::new(Code::InvalidArgument, text))
            }
        }
    }

    /// A consumer goes: the notifications that it has not taken, as session and number.
    pub(super) fn leave(&self, topic: Topic, of: &Arc<Queue>) -> Vec<(u64, u64)> {
        {
            let mut open = lock(&self.open);
            if open.get(&topic).is_some_and(|queue| Arc::ptr_eq(queue, of)) {
                open.remove(&topic);
            }
        }
        let left = of.close();
        let left = left.iter().filter_map(Item::note).map(|note| (note.session, note.number));
        let left: Vec<(u64, u64)> = left.collect();
        self.dropped.fetch_add(left.len() as u64, Ordering::Relaxed);
        left
    }

    /// A notification has come.
    pub fn notified(&self, from: Who, note: &Notification) -> Came {
        let queue = lock(&self.open).get(&note.topic).cloned();
        let came = queue.map_or(Came::Dropped, |queue| queue.put(from, note));
        self.dropped.fetch_add(u64::from(matches!(came, Came::Dropped)), Ordering::Relaxed);
        came
    }

    /// Acknowledgements wait in these sessions for something to go with.
    pub fn add_unsent(&self, sessions: Vec<u64>) {
        let mut unsent = lock(&self.unsent);
        unsent.sessions.extend(sessions);
        unsent.due.get_or_insert_with(|| boottime() + SOON);
    }

    /// When acknowledgements are to be sent at the latest.
    pub fn next_due(&self) -> Option<Duration> {
        lock(&self.unsent).due
    }

    /// The sessions in which acknowledgements are to be sent now.
    pub fn due(&self, now: Duration) -> Vec<u64> {
        let mut unsent = lock(&self.unsent);
        match unsent.due {
            Some(due) if due <= now => {
                let mut sessions = std::mem::take(&mut *unsent).sessions;
                sessions.sort_unstable();
                sessions.dedup();
                sessions
            }
            _ => Vec::new(),
        }
    }

    /// A session has ended, and with it maybe the peer.
    pub fn ended(&self, session: u64, lost: Option<(&Who, &Error)>) {
        let open: Vec<Arc<Queue>> = lock(&self.open).values().cloned().collect();
        for queue in open {
            queue.forget(session);
            if let Some((who, error)) = lost {
                queue.lose(who, error);
            }
        }
    }

    /// The engine is closed: nothing comes any more.
    pub fn close(&self) {
        let open = std::mem::take(&mut *lock(&self.open));
        open.into_values().for_each(|queue| drop(queue.close()));
    }

    /// Notifications that nobody consumed.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

impl Item {
    fn note(&self) -> Option<&Notification> {
        match self {
            Item::Note(_, note) => Some(note),
            Item::Lost(..) => None,
        }
    }
}
