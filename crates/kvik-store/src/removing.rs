//! Removals are said to the tiers below.
//!
//! What was decided, and what of it a tier has confirmed, is in [`crate::unsaid`].

use crate::below::REMOVAL;
use crate::figures::Where;
use crate::index::{Id, Life};
use crate::state::State;
use crate::store::{Store, check_keys};
use crate::tenants::Known;
use crate::tier::{PATIENCE, Place};
use crate::unsaid::Removed;
use crate::{BlockKey, NamespaceId};
use kvik_core::{Code, Error, Result};
use std::sync::MutexGuard;
use std::time::Instant;

/// Removals that are being said to a tier, by the thread that has them. Dropped, they were said or not, whatever became of
/// who was to say them.
struct Saying {
    store: Store,
    tier: Where,
    all: Vec<Removed>,
    said: bool,
}

impl Saying {
    fn new(store: &Store, tier: Where, all: Vec<Removed>) -> Saying {
        Saying { store: store.clone(), tier, all, said: false }
    }

    /// Says some of what was decided before this number, as far as nobody else does.
    fn some(store: &Store, tier: Where, until: u64, by: Instant) -> Result<()> {
        let all = {
            let mut state = store.state();
            let State { unsaid, index, .. } = &mut *state;
            unsaid.of(tier).begin(until, index)
        };
        if all.is_empty() { Ok(()) } else { Saying::new(store, tier, all).say(by, true) }
    }

    /// Says them, and waits until they are durable there if that is `awaited`.
    fn say(mut self, by: Instant, awaited: bool) -> Result<()> {
        let Some(tier) = self.store.tier(self.tier) else { return Ok(()) };
        let left = || by.saturating_duration_since(Instant::now());
        let one = |what: &Removed| match what {
            Removed::Block(key) => tier.remove(key, left()),
            Removed::Namespace(id) => tier.remove_namespace(id, left()),
        };
        let said = self.all.iter().map(one).collect::<Result<Vec<Place>>>();
        self.said =
            said.and_then(|said| if awaited { tier.sync(&said, left()) } else { Ok(()) }).map(|()| true)?;
        Ok(())
    }
}

impl Drop for Saying {
    fn drop(&mut self) {
        self.store.state().unsaid.of(self.tier).end(&self.all, self.said);
        self.store.note_change();
    }
}

/// How the tiers of a store hear of removals.
pub(crate) struct Removing<'a>(pub &'a Store);

impl<'a> Removing<'a> {
    /// Those who are told.
    fn tiers(&self) -> impl Iterator<Item = Where> + use<'a> {
        let store = self.0;
        [Where::Log, Where::Object].into_iter().filter(|tier| store.tier(*tier).is_some())
    }

    /// Something was taken out. Every tier may have it, whatever is known of where it lies: it is being written, its disk has
    /// failed to sync it, it could not be read, or the blocks before it are gone.
    fn note(&self, state: &mut State, what: Removed) {
        self.tiers().for_each(|tier| state.unsaid.of(tier).add(what));
    }

    /// Has all tiers confirm what was removed, also before this call.
    ///
    /// # Errors
    /// What a tier says, `DeadlineExceeded`; the blocks are gone from memory all the same.
    pub fn everywhere(&self, by: Instant) -> Result<()> {
        let all = [Where::Log, Where::Object].map(|tier| self.from(tier, by));
        all.into_iter().collect()
    }

    fn from(&self, to: Where, by: Instant) -> Result<()> {
        let Some(tier) = self.0.tier(to) else { return Ok(()) };
        // Whether it can be written again may show when it is tried.
        let said = if tier.never_again().is_none() { self.all_from(to, by) } else { Ok(()) };
        match tier.never_again() {
            Some(error) if self.0.state().unsaid.of(to).give_up() => Err(self.never_gone(to, &error)),
            _ => said,
        }
    }

    fn all_from(&self, to: Where, by: Instant) -> Result<()> {
        let store = self.0;
        let mut state = store.state();
        let until = state.unsaid.of(to).next();
        while !state.unsaid.of(to).are_said(until) {
            let State { unsaid, index, .. } = &mut *state;
            if !unsaid.of(to).may_begin(until, index) {
                // Others say them, or are bringing the blocks.
                if Instant::now() >= by {
                    return Err(self.may_be_back(to, &self.unconfirmed(to)));
                }
                state = store.wait(state, by);
                continue;
            }
            drop(state);
            let said = match to {
                Where::Object => Saying::some(store, to, until, by),
                _ => store.have_said(by, move |store| Saying::some(store, to, until, by)),
            };
            said.map_err(|error| self.may_be_back(to, &error))?;
            state = store.state();
        }
        Ok(())
    }

    /// Blocks that were being brought did not come: where they had been removed before, that counts.
    pub fn soon(&self, keys: Vec<(Where, BlockKey)>) {
        for (to, key) in keys {
            let say = move |store: &Store| {
                if let Err(error) = store.say_late(to, &key) {
                    let tier = to.name();
                    log::warn!(
                        "block {key} was removed, and may be in the tier {tier} after a restart: {error}"
                    );
                }
            };
            self.0.have_done(to, say);
        }
    }

    /// What a tier is called, and what answers for it.
    fn name(&self, tier: Where) -> (String, &'static str) {
        match (self.0.below(), self.0.far()) {
            (_, Some(far)) if tier == Where::Object => {
                (format!("the object store at {}", far.objects.name()), "it")
            }
            (Some(below), _) => (format!("the log in {}", below.log.name()), "that disk"),
            _ => (tier.name().to_owned(), "it"),
        }
    }

    fn unconfirmed(&self, tier: Where) -> Error {
        let (name, what) = self.name(tier);
        let text =
            format!("{name} has not confirmed yet what was removed before: look whether {what} answers");
        Error::new(Code::DeadlineExceeded, text)
    }

    /// What a tier will not confirm may be found again.
    fn never_gone(&self, tier: Where, error: &Error) -> Error {
        let (name, _) = self.name(tier);
        let text = format!(
            "what was removed may still be in {name}, and be found by whoever is started with it: this store writes \
             nothing there any more ({error})"
        );
        Error::new(error.code, text)
    }

    /// What a tier has not confirmed may be found again.
    pub fn may_be_back(&self, tier: Where, error: &Error) -> Error {
        let (name, what) = self.name(tier);
        let text = format!(
            "what was removed may still be in {name}, and be found after a restart: remove it again, and look whether \
             {what} answers ({error})"
        );
        Error::new(error.code, text)
    }
}

impl Store {
    /// Takes blocks out, and all that come after them; how many went. What was removed before, and a tier has not
    /// confirmed since, is removed with it.
    ///
    /// # Errors
    /// As for [`Store::contains`]; what a tier says, `DeadlineExceeded`: after a restart some of what was removed may be
    /// back, until a removal succeeds.
    pub fn remove(&self, namespace: u16, keys: &[BlockKey]) -> Result<usize> {
        check_keys(keys)?;
        let by = Instant::now() + REMOVAL;
        let known = self.far().map_or(Ok(()), |far| far.know(by - REMOVAL / 2));
        let full = || self.state().unsaid.are_full();
        if full() {
            let said = Removing(self).everywhere(by);
            // There is room also where they were given up.
            if full() {
                said?;
            }
        }
        let mut state = self.state();
        let found = keys.iter().filter_map(|key| state.index.find(namespace, key)).collect::<Vec<_>>();
        let mut gone = Vec::new();
        for id in found {
            // It may have gone with one before it.
            if !matches!(state.index.node(id).life, Life::Free | Life::Leaving) {
                gone.extend(state.forget(id));
            }
        }
        state.counts.removed += gone.len() as u64;
        gone.iter().for_each(|key| Removing(self).note(&mut state, Removed::Block(*key)));
        drop(state);
        Removing(self).everywhere(by)?;
        known.map(|()| gone.len())
    }

    /// Takes out all blocks of the namespaces that are wanted, with these names of their tenants; how many went. What was removed before, and a tier has not
    /// confirmed since, is removed with it.
    ///
    /// # Errors
    /// As for [`Store::remove`].
    pub fn clear(&self, wanted: impl Fn(&Known, &str) -> bool) -> Result<usize> {
        let (gone, cleared) = self.take_out(wanted);
        self.state().counts.removed += gone as u64;
        cleared.map(|()| gone)
    }

    /// Takes out all blocks of namespaces, here and below: how many went here, and what the tiers said.
    pub fn take_out(&self, wanted: impl Fn(&Known, &str) -> bool) -> (usize, Result<()>) {
        let by = Instant::now() + REMOVAL;
        let known = self.far().map_or(Ok(()), |far| far.know(by - REMOVAL / 2));
        let mut state = self.state();
        let all = state.tenants.namespaces().enumerate();
        // What was forgotten is not here, and may be by another number.
        let is_cleared = |(number, known): (usize, &Known)| {
            let (number, tenant) = (number as u16, &state.tenants.tenant(number as u16).name);
            state.tenants.find(&known.id) == Some(number) && wanted(known, tenant)
        };
        let cleared: Vec<bool> = all.map(is_cleared).collect();
        let all = state.tenants.namespaces().zip(&cleared);
        let ids: Vec<NamespaceId> = all.filter(|(_, cleared)| **cleared).map(|(known, _)| known.id).collect();
        let gone = state.forget_all(|namespace| cleared[usize::from(namespace)]);
        ids.into_iter().for_each(|id| Removing(self).note(&mut state, Removed::Namespace(id)));
        drop(state);
        (gone, Removing(self).everywhere(by).and(known))
    }

    /// The state, for who is about to write a block to a tier: nothing is left to be said there of its namespace, which would
    /// void the block behind which it comes. None where the block is gone.
    ///
    /// # Errors
    /// What the tier says, `DeadlineExceeded`.
    pub fn before_writing(
        &self,
        (id, key): (Id, &BlockKey),
        to: Where,
        by: Instant,
    ) -> Result<Option<MutexGuard<'_, State>>> {
        let mut state = self.state();
        loop {
            let State { unsaid, index, tenants, .. } = &mut *state;
            let node = index.node(id);
            if node.key != *key || matches!(node.life, Life::Free | Life::Leaving) {
                return Ok(None);
            }
            let (unsaid, what) = (unsaid.of(to), Removed::Namespace(tenants.namespace(node.namespace).id));
            if !unsaid.has(&what) {
                return Ok(Some(state));
            }
            if unsaid.begin_one(&what, index) {
                drop(state);
                Saying::new(self, to, vec![what]).say(by, true)?;
                state = self.state();
            } else if Instant::now() < by {
                // Whoever has begun is at it: it ends, whatever this thread does.
                state = self.wait(state, by);
            } else {
                return Err(Removing(self).unconfirmed(to));
            }
        }
    }

    /// A block was removed while it was written: its removal is said once more, on this thread.
    ///
    /// # Errors
    /// What the tier says. The next removal says it then.
    pub fn say_late(&self, to: Where, key: &BlockKey) -> Result<()> {
        let what = Removed::Block(*key);
        let begin = || {
            let mut state = self.state();
            let State { unsaid, index, .. } = &mut *state;
            unsaid.of(to).begin_one(&what, index)
        };
        while begin() {
            // What was gathered for an object store before it is sent before it.
            Saying::new(self, to, vec![what]).say(Instant::now() + PATIENCE, to == Where::Log)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
