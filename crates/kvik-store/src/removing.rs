//! Removals are said to the tiers below.
//!
//! What was decided, and what of it a tier has confirmed, is in [`crate::unsaid`].

use crate::below::REMOVAL;
use crate::figures::Where;
use crate::index::Life;
use crate::state::State;
use crate::store::{Store, check_keys};
use crate::tenants::Known;
use crate::tier::{PATIENCE, Place, Tier};
use crate::{BlockKey, NamespaceId};
use kvik_core::{Code, Error, Result};
use std::time::Instant;

/// Removals that are being said to a tier. Dropped, they were said or not, whatever became of who was to say them.
struct Saying {
    store: Store,
    tier: Where,
    keys: Vec<BlockKey>,
    said: bool,
}

impl Saying {
    fn new(store: &Store, tier: Where, keys: Vec<BlockKey>) -> Saying {
        Saying { store: store.clone(), tier, keys, said: false }
    }

    /// Says them to their tier, and waits until they are durable there if that is `awaited`.
    fn to(mut self, tier: &dyn Tier, by: Instant, awaited: bool) -> Result<()> {
        let left = || by.saturating_duration_since(Instant::now());
        let said = self.keys.iter().map(|key| tier.remove(key, left())).collect::<Result<Vec<Place>>>();
        self.said =
            said.and_then(|said| if awaited { tier.sync(&said, left()) } else { Ok(()) }).map(|()| true)?;
        Ok(())
    }
}

impl Drop for Saying {
    fn drop(&mut self) {
        self.store.state().unsaid.of(self.tier).end(&self.keys, self.said);
        self.store.note_change();
    }
}

/// How the tiers of a store hear of removals.
pub(crate) struct Removing<'a>(pub &'a Store);

impl Removing<'_> {
    /// Has all tiers confirm what was removed, also before this call.
    ///
    /// # Errors
    /// What a tier says, `DeadlineExceeded`; the blocks are gone from memory all the same.
    pub fn everywhere(&self, by: Instant) -> Result<()> {
        let all = [Where::Log, Where::Object].map(|tier| self.from(tier, by));
        all.into_iter().collect()
    }

    fn from(&self, to: Where, by: Instant) -> Result<()> {
        let store = self.0;
        let mut state = store.state();
        let until = state.unsaid.of(to).next();
        while !state.unsaid.of(to).are_said(until) {
            let State { unsaid, index, .. } = &mut *state;
            let keys = unsaid.of(to).begin(until, index);
            if keys.is_empty() {
                // Others say them, or are bringing the blocks.
                if Instant::now() >= by {
                    let late = Error::new(Code::DeadlineExceeded, "it has not confirmed all of it yet");
                    return Err(self.may_be_back(to, &late));
                }
                state = store.wait(state, by);
                continue;
            }
            drop(state);
            let saying = Saying::new(store, to, keys);
            let said = match store.far().filter(|_| to == Where::Object) {
                Some(far) => saying.to(&far.objects, by, true),
                None => store.have_said(by, move |log| saying.to(log, by, true)),
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

    /// What a tier has not confirmed may be found again.
    pub fn may_be_back(&self, tier: Where, error: &Error) -> Error {
        let (name, what) = match (self.0.below(), self.0.far()) {
            (_, Some(far)) if tier == Where::Object => {
                (format!("the object store at {}", far.objects.name()), "it")
            }
            (Some(below), _) => (format!("the log in {}", below.log.name()), "that disk"),
            _ => (tier.name().to_owned(), "it"),
        };
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
        if self.state().unsaid.are_full() {
            Removing(self).everywhere(by)?;
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
        for gone in &gone {
            // One without a place may be in the log all the same: it is being written, or its disk has failed to sync it.
            if self.below().is_some() {
                state.unsaid.of(Where::Log).add(gone.key);
            }
            if gone.object != 0 {
                state.unsaid.of(Where::Object).add(gone.key);
            }
        }
        drop(state);
        Removing(self).everywhere(by)?;
        known.map(|()| gone.len())
    }

    /// Takes out all blocks of the namespaces that are wanted; how many went.
    ///
    /// # Errors
    /// The log could not be told: after a restart they may be back.
    pub fn clear(&self, wanted: impl Fn(&Known) -> bool) -> Result<usize> {
        let (gone, cleared) = self.take_out(wanted);
        self.state().counts.removed += gone as u64;
        cleared.map(|()| gone)
    }

    /// Takes out all blocks of namespaces, here and below: how many went here, and what the tiers said.
    pub fn take_out(&self, wanted: impl Fn(&Known) -> bool) -> (usize, Result<()>) {
        let by = Instant::now() + REMOVAL;
        let known = self.far().map_or(Ok(()), |far| far.know(by - REMOVAL / 2));
        let mut state = self.state();
        let cleared: Vec<bool> = state.tenants.namespaces().map(wanted).collect();
        let all = state.tenants.namespaces().zip(&cleared);
        let ids: Vec<NamespaceId> = all.filter(|(_, cleared)| **cleared).map(|(known, _)| known.id).collect();
        let gone = state.forget_all(|namespace| cleared[usize::from(namespace)]);
        drop(state);
        if ids.is_empty() {
            return (gone, known);
        }
        let back = |tier| move |error| Removing(self).may_be_back(tier, &error);
        let told = self
            .clear_below(&ids, by)
            .map_err(back(Where::Log))
            .and_then(|()| self.far().map_or(Ok(()), |far| far.clear(&ids, by)).map_err(back(Where::Object)));
        (gone, told.and(known))
    }

    /// A block was removed while it was written: its removal is said once more, on this thread.
    ///
    /// # Errors
    /// What the tier says. The next removal says it then.
    pub fn say_late(&self, to: Where, key: &BlockKey) -> Result<()> {
        let Some(tier) = self.tier(to) else { return Ok(()) };
        let begin = || {
            let mut state = self.state();
            let State { unsaid, index, .. } = &mut *state;
            unsaid.of(to).begin_one(key, index)
        };
        while begin() {
            // What was gathered for an object store before it is sent before it.
            Saying::new(self, to, vec![*key]).to(tier, Instant::now() + PATIENCE, to == Where::Log)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Reserved;
    use crate::write::tests::{KEY, fill, open, put, write};
    use std::path::PathBuf;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let folder = std::env::temp_dir().join(format!("kvik-store-{name}-{}", std::process::id()));
            drop(std::fs::remove_dir_all(&folder));
            Folder(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            drop(std::fs::remove_dir_all(&self.0));
        }
    }

    /// Does what the threads that write have to do.
    fn serve(store: &Store) {
        let writers = &store.below().unwrap().writers;
        writers.close();
        writers.serve(store);
    }

    /// Takes a block out, whose removal nobody says in time.
    fn take_out(store: &Store) {
        let mut state = store.state();
        let id = state.index.find(0, &KEY).unwrap();
        let gone = state.forget(id);
        gone.iter().for_each(|gone| state.unsaid.of(Where::Log).add(gone.key));
        drop(state);
        assert_eq!(Removing(store).everywhere(Instant::now()).unwrap_err().code, Code::DeadlineExceeded);
    }

    #[test]
    fn a_removal_that_was_not_said_fails_until_it_is() {
        for again in [false, true] {
            let folder = Folder::new("unsaid");
            let store = open(&folder.0);
            write(&store, put(&store), |_| {});
            take_out(&store);
            if again {
                // What the log has is wanted again.
                write(&store, put(&store), |_| {});
                Removing(&store).everywhere(Instant::now()).unwrap();
            } else {
                let error = Removing(&store).everywhere(Instant::now()).unwrap_err();
                assert!(
                    error.code == Code::DeadlineExceeded && error.text.contains("remove it again"),
                    "{error}"
                );
                std::thread::scope(|scope| {
                    let removing = scope.spawn(|| store.remove(0, &[KEY]));
                    while !removing.is_finished() {
                        serve(&store);
                    }
                    assert_eq!(removing.join().unwrap().unwrap(), 0);
                });
            }
            drop(store);
            assert_eq!(open(&folder.0).contains(0, &[KEY]).unwrap(), [again]);
        }
    }

    #[test]
    fn a_removal_that_comes_late_voids_nothing_that_was_stored_meanwhile() {
        let folder = Folder::new("late");
        let store = open(&folder.0);
        write(&store, put(&store), |_| {});
        take_out(&store);
        let saying = {
            let mut state = store.state();
            let State { unsaid, index, .. } = &mut *state;
            assert!(unsaid.of(Where::Log).begin_one(&KEY, index));
            Saying::new(&store, Where::Log, vec![KEY])
        };
        // Whoever says it takes long, and the block comes again.
        let reserved = store.state().reserve(0, None, KEY, |_| false).unwrap();
        let early = matches!(reserved, Reserved::New(_));
        if let Reserved::New(filling) = reserved {
            write(&store, fill(&store, filling), |_| {});
        }
        saying.to(&store.below().unwrap().log, Instant::now() + PATIENCE, true).unwrap();
        if !early {
            write(&store, put(&store), |_| {});
        }
        drop(store);
        assert_eq!(open(&folder.0).contains(0, &[KEY]).unwrap(), [true]);
    }

    #[test]
    fn a_put_that_fails_brings_nothing_back_that_was_removed() {
        let folder = Folder::new("failed-put");
        let store = open(&folder.0);
        let (id, mut brought) = (put(&store), None);
        write(&store, id, |log| {
            store.state().forget(id);
            let said = log.remove(&KEY, PATIENCE).unwrap();
            log.sync(&[said], PATIENCE).unwrap();
            brought = Some(store.reserve(0, None, &[KEY]).unwrap());
        });
        drop(brought);
        serve(&store);
        drop(store);
        assert_eq!(open(&folder.0).contains(0, &[KEY]).unwrap(), [false]);
    }
}
