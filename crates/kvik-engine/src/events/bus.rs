//! The queues.

use super::event::{Event, Who};
use crate::sync::{lock, signal};
use kvik_core::{Code, Result};
use kvik_host::event::EventFd;
use kvik_proto::Notification;
use kvik_transport::from_host;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// Events that wait for one user, notifications aside.
const MOST: usize = 1024;

/// See the module's text above.
#[derive(Default)]
pub(crate) struct EventBus {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    closed: bool,
    users: BTreeMap<u64, Queue>,
    last_user: u64,
    /// Notifications that came while there was no user.
    unclaimed: VecDeque<Arc<Note>>,
    /// Of everything that is queued, so that events and notifications come out in their order.
    clock: u64,
}

/// A notification in the queues of those who have not taken it.
struct Note {
    clock: u64,
    from: Who,
    note: Notification,
}

struct Queue {
    events: VecDeque<(u64, Event)>,
    notes: VecDeque<Arc<Note>>,
    lost: u64,
    waker: Arc<EventFd>,
    /// The waker is signalled.
    signalled: bool,
    /// Who is handing on what was taken last.
    busy: Option<ThreadId>,
}

impl Queue {
    fn wake(&mut self) {
        if !std::mem::replace(&mut self.signalled, true) {
            signal(&self.waker, "a user of events");
        }
    }

    fn next(&mut self) -> Option<Next> {
        if self.lost > 0 {
            return Some(Next::Event(Event::EventsLost(std::mem::take(&mut self.lost))));
        }
        let event = self.events.front().map(|(clock, _)| *clock);
        match (event, self.notes.front().map(|note| note.clock)) {
            (Some(event), Some(note)) if note < event => self.notes.pop_front().map(Next::Note),
            (None, Some(_)) => self.notes.pop_front().map(Next::Note),
            _ => self.events.pop_front().map(|(_, event)| Next::Event(event)),
        }
    }

    fn is_empty(&self) -> bool {
        self.events.is_empty() && self.notes.is_empty() && self.lost == 0
    }
}

enum Next {
    Event(Event),
    Note(Arc<Note>),
}

/// Session and number of notifications that everybody has taken.
pub(crate) type Taken = Vec<(u64, u64)>;

/// The last reference to a notification was given up.
fn settle(note: Arc<Note>, taken: &mut Taken) {
    if let Some(note) = Arc::into_inner(note) {
        taken.push((note.note.session, note.note.number));
    }
}

impl EventBus {
    /// A new user.
    pub fn join(&self) -> Result<(u64, Arc<EventFd>)> {
        let waker = Arc::new(EventFd::new().map_err(|error| from_host(Code::InvalidArgument, error))?);
        let mut state = lock(&self.state);
        state.last_user += 1;
        let id = state.last_user;
        let notes = std::mem::take(&mut state.unclaimed);
        let events = VecDeque::new();
        let mut queue = Queue { events, notes, lost: 0, waker: waker.clone(), signalled: false, busy: None };
        if state.closed || !queue.is_empty() {
            queue.wake();
        }
        state.users.insert(id, queue);
        Ok((id, waker))
    }

    /// A user goes. What the last one leaves is for the next one.
    pub(super) fn leave(&self, id: u64) -> Taken {
        let mut state = lock(&self.state);
        let mut taken = Taken::new();
        if let Some(mut queue) = state.users.remove(&id) {
            queue.wake();
            match state.users.is_empty() && !state.closed {
                true => state.unclaimed = queue.notes,
                false => queue.notes.into_iter().for_each(|note| settle(note, &mut taken)),
            }
        }
        drop(state);
        self.changed.notify_all();
        taken
    }

    pub(super) fn has(&self, id: u64) -> bool {
        lock(&self.state).users.contains_key(&id)
    }

    /// Says something to every user.
    pub fn publish(&self, event: Event) {
        let mut state = lock(&self.state);
        if state.closed || state.users.is_empty() {
            return;
        }
        state.clock += 1;
        let clock = state.clock;
        for queue in state.users.values_mut() {
            queue.events.push_back((clock, event.clone()));
            if queue.events.len() > MOST {
                queue.events.pop_front();
                queue.lost += 1;
            }
            queue.wake();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// A notification has come.
    pub fn notified(&self, from: Who, note: Notification) {
        let mut state = lock(&self.state);
        if state.closed {
            return;
        }
        state.clock += 1;
        let note = Arc::new(Note { clock: state.clock, from, note });
        if state.users.is_empty() {
            return state.unclaimed.push_back(note);
        }
        for queue in state.users.values_mut() {
            queue.notes.push_back(note.clone());
            queue.wake();
        }
        // Before anybody can take it: the last one who does must hold the last reference.
        drop(note);
        drop(state);
        self.changed.notify_all();
    }

    /// A session is over: what came on it and was not taken is nobody's.
    pub fn forget(&self, session: u64) {
        let mut state = lock(&self.state);
        let kept = |note: &Arc<Note>| note.note.session != session;
        state.unclaimed.retain(kept);
        state.users.values_mut().for_each(|queue| queue.notes.retain(kept));
    }

    /// The next event of a user, and what everybody has taken with it.
    pub fn take(&self, id: u64, timeout: Duration, busy: bool) -> (Option<Event>, Taken) {
        let until = Instant::now() + timeout.min(crate::config::MAX_DEADLINE);
        let mut state = lock(&self.state);
        if let Some(queue) = state.users.get_mut(&id)
            && queue.busy.take().is_some()
        {
            self.changed.notify_all();
        }
        let mut taken = Taken::new();
        loop {
            let closed = state.closed;
            let Some(queue) = state.users.get_mut(&id).filter(|_| !closed) else { return (None, taken) };
            let next = queue.next();
            if queue.is_empty() && std::mem::take(&mut queue.signalled) {
                drop(queue.waker.drain());
            }
            let event = match next {
                Some(Next::Event(event)) => Some(event),
                Some(Next::Note(note)) => {
                    let event = Event::Notification(note.from.clone(), note.note.payload.clone());
                    settle(note, &mut taken);
                    Some(event)
                }
                None => None,
            };
            if event.is_some() {
                queue.busy = busy.then(|| std::thread::current().id());
                return (event, taken);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return (None, taken);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The engine is closed: nothing comes any more, and whoever is handing something on has a moment to do so.
    pub fn close(&self, until: Instant) {
        let mut state = lock(&self.state);
        state.closed = true;
        state.unclaimed.clear();
        for queue in state.users.values_mut() {
            queue.events.clear();
            queue.notes.clear();
            queue.lost = 0;
            queue.wake();
        }
        self.changed.notify_all();
        let own = std::thread::current().id();
        let busy = |state: &State| state.users.values().any(|queue| queue.busy.is_some_and(|who| who != own));
        while busy(&state) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return log::warn!("somebody is still handling an event of an engine that is closed");
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvik_core::{EngineId, Incarnation};
    use kvik_proto::Identity;

    /// A lost acknowledgement is made good by the next one, so only the last of all would show it from outside.
    #[test]
    fn whatever_was_taken_is_acknowledged_however_soon() {
        const COUNT: u64 = 20_000;
        let events = EventBus::default();
        let (user, _waker) = events.join().unwrap();
        let (engine, incarnation) = (EngineId([1; 16]), Incarnation(1));
        std::thread::scope(|scope| {
            let events = &events;
            // Gone with whoever takes, so that nobody waits for one that has failed.
            let (next, turn) = std::sync::mpsc::channel();
            scope.spawn(move || {
                for number in 1..=COUNT {
                    let who = Who { engine, incarnation, name: String::new() };
                    let peer = Identity { engine, incarnation };
                    let payload = Arc::from(&b"x"[..]);
                    events.notified(who, Notification { session: 1, peer, topic: 0, number, payload });
                    if turn.recv().is_err() {
                        return;
                    }
                }
            });
            for number in 1..=COUNT {
                // It looks all the time, to be there before the other thread has left `notified`.
                let taken = loop {
                    if let (Some(_), taken) = events.take(user, Duration::ZERO, false) {
                        break taken;
                    }
                    std::hint::spin_loop();
                };
                assert_eq!(taken, [(1, number)]);
                next.send(()).unwrap();
            }
        });
    }
}
