//! What waits for the consumers.

use crate::events::Who;
use crate::sync::{lock, signal};
use kvik_core::{Code, Error, Result};
use kvik_host::event::EventFd;
use kvik_proto::{Identity, Notification, Topic};
use kvik_transport::from_host;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

/// The inboxes of an engine, by topic.
#[derive(Default)]
pub(crate) struct Inboxes {
    open: Mutex<BTreeMap<Topic, Arc<Queue>>>,
    dropped: AtomicU64,
}

pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    waker: EventFd,
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
    fn new() -> Result<Queue> {
        let waker = EventFd::new().map_err(|error| from_host(Code::InvalidArgument, error))?;
        Ok(Queue { state: Mutex::default(), changed: Condvar::new(), waker })
    }

    fn wake(&self, state: &mut State) {
        if !std::mem::replace(&mut state.signalled, true) {
            signal(&self.waker, "an inbox");
        }
        self.changed.notify_all();
    }

    /// False when nobody consumes it any more.
    fn put(&self, from: Who, note: Notification) -> bool {
        let mut state = lock(&self.state);
        if !state.closed {
            state.items.push_back(Item::Note(from, note));
            self.wake(&mut state);
        }
        !state.closed
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
        let mut state = lock(&self.state);
        state.closed = true;
        self.wake(&mut state);
        std::mem::take(&mut state.items)
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
    pub(super) fn open(&self, topic: Topic) -> Result<Arc<Queue>> {
        let queue = Arc::new(Queue::new()?);
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

    /// A notification has come. False where nobody consumes it: it is dropped.
    pub fn notified(&self, from: Who, note: Notification) -> bool {
        let queue = lock(&self.open).get(&note.topic).cloned();
        let kept = queue.is_some_and(|queue| queue.put(from, note));
        self.dropped.fetch_add(u64::from(!kept), Ordering::Relaxed);
        kept
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
