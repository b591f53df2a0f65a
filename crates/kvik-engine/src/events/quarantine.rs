//! Grants that are over while a transfer may still touch their pages.
//!
//! Mostly that takes the microseconds until the other side has answered, which is nobody's business. What lasts longer
//! than [`PATIENCE`], or was an error of `revoke`, is told, and so is its end.

use super::Event;
use crate::inner::{Inner, lock};
use kvik_core::GrantId;
use kvik_host::clock::boottime;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_millis(100);

/// See the module's text.
#[derive(Default)]
pub(crate) struct Quarantine {
    grants: Mutex<HashMap<GrantId, Kept>>,
}

struct Kept {
    pages: u64,
    tell_at: Option<Duration>,
}

impl Inner {
    /// A grant is over, but not its use.
    pub fn begin_quarantine(&self, id: GrantId, pages: u64) {
        let at = boottime() + PATIENCE;
        lock(&self.quarantine.grants).insert(id, Kept { pages, tell_at: Some(at) });
        // Its end may have been dealt with by another thread before its beginning was.
        match lock(&self.tables).grants.contains_key(&id) {
            true => self.wake_by(at),
            false => self.end_quarantine(id),
        }
    }

    /// When something is to be told.
    pub fn next_quarantine(&self) -> Option<Duration> {
        lock(&self.quarantine.grants).values().filter_map(|kept| kept.tell_at).min()
    }

    /// Tells what has lasted for too long.
    pub fn tell_quarantine(&self, now: Duration) {
        let mut grants = lock(&self.quarantine.grants);
        let late = |kept: &Kept| kept.tell_at.is_some_and(|at| at <= now);
        for (id, kept) in grants.iter_mut().filter(|(_, kept)| late(kept)) {
            kept.tell_at = None;
            self.events.publish(Event::PagesQuarantined(*id, kept.pages));
        }
    }

    /// Tells of a grant whose owner has just heard that its pages are not free.
    pub fn tell_quarantine_of(&self, id: GrantId) {
        let mut grants = lock(&self.quarantine.grants);
        if let Some(kept) = grants.get_mut(&id)
            && kept.tell_at.take().is_some()
        {
            self.events.publish(Event::PagesQuarantined(id, kept.pages));
        }
    }

    /// The pages are the owner's again.
    pub fn end_quarantine(&self, id: GrantId) {
        if let Some(Kept { pages, tell_at: None }) = lock(&self.quarantine.grants).remove(&id) {
            self.events.publish(Event::PagesReturned(id, pages));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::grant::GrantCell;
    use crate::tag::Tag;
    use kvik_core::GrantState;
    use kvik_proto::Event as Proto;
    use std::sync::Arc;

    /// An engine without threads, that gave a grant.
    fn inner(id: GrantId) -> Inner {
        let inner = Inner::new(Config::default(), &[]).unwrap();
        let cell = Arc::new(GrantCell::new(Tag::new("")));
        let (slot, lease) = (inner.fence.slot().unwrap(), inner.budget.take(1, "a grant").unwrap());
        lock(&inner.tables).grants.insert(id, (cell, slot, lease));
        inner
    }

    fn told(inner: &Inner, user: u64) -> Vec<&'static str> {
        let next = || inner.events.take(user, Duration::ZERO, false).0;
        std::iter::from_fn(next).map(|event| event.name()).collect()
    }

    #[test]
    fn what_is_over_soon_is_nobodys_business_and_what_lasts_is_told_with_its_end() {
        let id = GrantId([7; 16]);
        let inner = inner(id);
        let (user, _waker) = inner.events.join().unwrap();
        inner.begin_quarantine(id, 5);
        let at = inner.next_quarantine().unwrap();
        inner.tell_quarantine(at - Duration::from_nanos(1));
        assert!(told(&inner, user).is_empty());
        inner.tell_quarantine(at);
        inner.tell_quarantine(at + PATIENCE);
        inner.tell_quarantine_of(id);
        assert_eq!((told(&inner, user), inner.next_quarantine()), (vec!["pages_quarantined"], None));
        inner.on_event(Proto::GrantEnded(id, GrantState::Revoked));
        assert_eq!(told(&inner, user), ["pages_returned", "grant_ended"]);
        // The end was dealt with before the beginning: nothing is left of it.
        inner.begin_quarantine(id, 5);
        assert_eq!(inner.next_quarantine(), None);
    }

    #[test]
    fn an_owner_that_was_refused_its_pages_is_told_at_once() {
        let id = GrantId([7; 16]);
        let inner = inner(id);
        let (user, _waker) = inner.events.join().unwrap();
        inner.begin_quarantine(id, 5);
        inner.tell_quarantine_of(id);
        assert_eq!(told(&inner, user), ["pages_quarantined"]);
        inner.tell_quarantine(boottime() + PATIENCE);
        assert!(told(&inner, user).is_empty());
    }
}
