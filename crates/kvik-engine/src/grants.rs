//! The grants that this engine has given, until their pages are its own again.
//!
//! A grant that is over may still be used by a transfer: its pages are in quarantine. Mostly that takes the microseconds
//! until the other side has answered, which is nobody's business. What lasts longer than [`PATIENCE`], or was an error
//! of `revoke`, is told, and so is its end. What two threads have to carry out for one grant comes in any order: once
//! its end was, nothing is kept of it.

use crate::base::Base;
use crate::budget::Lease;
use crate::end::End;
use crate::events::Event;
use crate::sync::lock;
use crate::tag::Tag;
use kvik_core::{GrantId, GrantState, Result};
use kvik_host::FenceSlot;
use kvik_host::clock::boottime;
use kvik_proto::already_given;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_millis(100);

/// Where the end of a grant appears.
pub(crate) struct GrantCell {
    /// The request that it was given for, for logs.
    pub tag: Tag,
    pub end: End<GrantState>,
}

/// See the module's text.
pub(crate) struct Grants {
    base: Arc<Base>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    given: HashMap<GrantId, Given>,
    /// Those in quarantine of which nothing was told, and when it is to be.
    untold: BTreeSet<(Duration, GrantId)>,
}

struct Given {
    cell: Arc<GrantCell>,
    quarantine: Option<Quarantine>,
    /// The region, where its grant keeps it. It goes under no lock: its other grants may end with it.
    kept: Option<Arc<dyn Send + Sync>>,
    _slot: FenceSlot,
    _lease: Lease,
}

struct Quarantine {
    pages: u64,
    /// When it is told; none when it was.
    tell_at: Option<Duration>,
}

impl Table {
    /// The pages of a quarantine that is to be told of now; none when there is none, or it was told.
    fn tell(&mut self, id: GrantId) -> Option<Event> {
        let quarantine = self.given.get_mut(&id)?.quarantine.as_mut()?;
        self.untold.remove(&(quarantine.tell_at.take()?, id));
        Some(Event::PagesQuarantined(id, quarantine.pages))
    }

    /// Nothing is kept of a grant any more, and nothing told.
    fn remove(&mut self, id: GrantId) -> Option<Given> {
        let given = self.given.remove(&id)?;
        if let Some(Quarantine { tell_at: Some(at), .. }) = given.quarantine {
            self.untold.remove(&(at, id));
        }
        Some(given)
    }
}

impl Grants {
    pub fn new(base: Arc<Base>) -> Grants {
        Grants { base, table: Mutex::default() }
    }

    /// A grant is about to be given. One that has its id keeps its slot: while it is open, that must not become
    /// somebody else's.
    ///
    /// # Errors
    /// `InvalidArgument` for the id of a grant that is open.
    pub fn add(&self, id: GrantId, cell: Arc<GrantCell>, slot: FenceSlot, lease: Lease) -> Result<()> {
        match lock(&self.table).given.entry(id) {
            Entry::Occupied(_) => Err(already_given(id)),
            Entry::Vacant(place) => {
                place.insert(Given { cell, quarantine: None, kept: None, _slot: slot, _lease: lease });
                Ok(())
            }
        }
    }

    /// It was not given. For who has added it, and nobody else.
    pub fn forget(&self, id: GrantId) {
        lock(&self.table).remove(id);
    }

    /// A region stays registered until this grant over it has ended.
    pub fn keep(&self, id: GrantId, cell: &Arc<GrantCell>, region: Arc<dyn Send + Sync>) {
        let mut table = lock(&self.table);
        if let Some(given) = table.given.get_mut(&id).filter(|given| Arc::ptr_eq(&given.cell, cell)) {
            given.kept = Some(region);
        }
    }

    /// The engine's threads have gone: nobody ends a grant any more, and none keeps its region.
    pub fn let_go(&self) {
        let kept: Vec<_> = lock(&self.table).given.values_mut().map(|given| given.kept.take()).collect();
        drop(kept);
    }

    /// A grant is over, but not its use, unless its end was dealt with before.
    pub fn begin_quarantine(&self, id: GrantId, pages: u64) {
        let at = boottime() + PATIENCE;
        let table = &mut *lock(&self.table);
        let Some(given @ Given { quarantine: None, .. }) = table.given.get_mut(&id) else { return };
        given.quarantine = Some(Quarantine { pages, tell_at: Some(at) });
        table.untold.insert((at, id));
        self.base.commands.wake_by(at);
    }

    /// A grant has ended: its pages are the owner's again.
    pub fn ended(&self, id: GrantId, state: GrantState) {
        let Base { setup, observers, progress, .. } = &*self.base;
        let given = lock(&self.table).remove(id);
        observers.metrics.grant_ended(state);
        if let Some(Given { cell, quarantine, kept, .. }) = given {
            // Before anybody hears of the end, as memory of transfers.
            drop(kept);
            cell.end.set(Ok(state));
            log::debug!(engine:% = setup.id(), grant:% = id, request:% = cell.tag; "grant ended: {}", state.name());
            if let Some(Quarantine { pages, tell_at: None }) = quarantine {
                observers.events.publish(Event::PagesReturned(id, pages));
            }
        }
        observers.events.publish(Event::GrantEnded(id, state));
        progress.note();
    }

    /// When something is to be told.
    pub fn next_quarantine(&self) -> Option<Duration> {
        lock(&self.table).untold.first().map(|(at, _)| *at)
    }

    /// Tells what has lasted for too long.
    pub fn tell_quarantine(&self, now: Duration) {
        let mut table = lock(&self.table);
        while let Some((_, id)) = table.untold.first().copied().filter(|(at, _)| *at <= now) {
            table.tell(id).into_iter().for_each(|event| self.base.observers.events.publish(event));
        }
    }

    /// Tells of a grant whose owner has just heard that its pages are not free.
    pub fn tell_quarantine_of(&self, id: GrantId) {
        let mut table = lock(&self.table);
        table.tell(id).into_iter().for_each(|event| self.base.observers.events.publish(event));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::setup::Setup;

    /// Those of an engine without threads, which gave this one.
    fn grants(id: GrantId) -> Grants {
        let base = Arc::new(Base::new(Setup::new(Config::default(), Vec::new()).unwrap()).unwrap());
        let (slot, lease) = (base.fence.slot().unwrap(), base.budget.take(1, "a grant").unwrap());
        let grants = Grants::new(base);
        grants.add(id, Arc::new(GrantCell { tag: Tag::new(""), end: End::default() }), slot, lease).unwrap();
        grants
    }

    fn told(grants: &Grants, user: u64) -> Vec<&'static str> {
        let next = || grants.base.observers.events.take(user, Duration::ZERO, false).0;
        std::iter::from_fn(next).map(|event| event.name()).collect()
    }

    #[test]
    fn what_is_over_soon_is_nobodys_business_and_what_lasts_is_told_with_its_end() {
        let id = GrantId([7; 16]);
        let grants = grants(id);
        let (user, _waker) = grants.base.observers.events.join().unwrap();
        grants.begin_quarantine(id, 5);
        let at = grants.next_quarantine().unwrap();
        grants.tell_quarantine(at - Duration::from_nanos(1));
        assert!(told(&grants, user).is_empty());
        grants.tell_quarantine(at);
        grants.tell_quarantine(at + PATIENCE);
        grants.tell_quarantine_of(id);
        assert_eq!((told(&grants, user), grants.next_quarantine()), (vec!["pages_quarantined"], None));
        grants.ended(id, GrantState::Revoked);
        assert_eq!(told(&grants, user), ["pages_returned", "grant_ended"]);
        // The end was dealt with before the beginning: nothing is left of it.
        grants.begin_quarantine(id, 5);
        assert_eq!((grants.next_quarantine(), lock(&grants.table).given.len()), (None, 0));
    }

    #[test]
    fn an_open_grant_keeps_its_id_and_of_one_that_was_not_given_nothing_is_told() {
        let id = GrantId([7; 16]);
        let grants = grants(id);
        let (slot, lease) =
            (grants.base.fence.slot().unwrap(), grants.base.budget.take(1, "a grant").unwrap());
        let cell = Arc::new(GrantCell { tag: Tag::new(""), end: End::default() });
        let error = grants.add(id, cell, slot, lease).unwrap_err();
        assert_eq!(error.text, already_given(id).text);
        // What is told of the end of an earlier one with its id may be late.
        grants.begin_quarantine(id, 5);
        grants.forget(id);
        assert_eq!((grants.next_quarantine(), lock(&grants.table).given.len()), (None, 0));
    }

    #[test]
    fn an_owner_that_was_refused_its_pages_is_told_at_once() {
        let id = GrantId([7; 16]);
        let grants = grants(id);
        let (user, _waker) = grants.base.observers.events.join().unwrap();
        grants.begin_quarantine(id, 5);
        grants.tell_quarantine_of(id);
        assert_eq!(told(&grants, user), ["pages_quarantined"]);
        grants.tell_quarantine(boottime() + PATIENCE);
        assert!(told(&grants, user).is_empty());
    }
}
