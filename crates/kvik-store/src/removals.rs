//! Removals that were decided and that a tier below has not confirmed.
//!
//! Invariants:
//! - A key is here from the moment at which its block is taken out until the tier has confirmed that no restart finds it;
//!   or until its block is put again, since what the tier has of it is then wanted. So who removes it again is told the
//!   truth of it, though nobody knows the block any more.
//! - While a removal is being said, its block is not taken: the removal could come behind it, and void it with a restart.
//! - While a block is being brought, no removal of it begins to be said: for the same reason.

use crate::BlockKey;
use crate::figures::Where;
use crate::index::{Index, Life};
use crate::state::{Gone, State};
use crate::store::Store;
use crate::tier::{Place, Tier};
use crate::write::PATIENCE;
use kvik_core::{Code, Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

/// No more blocks are taken out while the removals of so many are not confirmed.
const MOST: usize = 1 << 16;
/// Removals that are said, and made durable, at once.
const AT_ONCE: usize = 4096;

/// Those of one tier.
#[derive(Default)]
pub(crate) struct Unsaid {
    /// The number of each key's removal.
    numbers: HashMap<BlockKey, u64>,
    /// In the order in which they were decided.
    removals: BTreeMap<u64, Removal>,
    next: u64,
}

struct Removal {
    key: BlockKey,
    saying: bool,
    /// It came to be needed again while it was said: what is said may not count for what it is needed for.
    again: bool,
}

impl Unsaid {
    pub fn add(&mut self, key: BlockKey) {
        if let Some(removal) = self.numbers.get(&key).and_then(|number| self.removals.get_mut(number)) {
            removal.again = removal.saying;
            return;
        }
        self.numbers.insert(key, self.next);
        self.removals.insert(self.next, Removal { key, saying: false, again: false });
        self.next += 1;
    }

    fn get(&self, key: &BlockKey) -> Option<&Removal> {
        self.removals.get(self.numbers.get(key)?)
    }

    pub fn has(&self, key: &BlockKey) -> bool {
        self.numbers.contains_key(key)
    }

    pub fn is_saying(&self, key: &BlockKey) -> bool {
        self.get(key).is_some_and(|removal| removal.saying)
    }

    /// The block is here again.
    pub fn put_again(&mut self, key: &BlockKey) {
        if !self.is_saying(key)
            && let Some(number) = self.numbers.remove(key)
        {
            self.removals.remove(&number);
        }
    }

    /// Whether all are confirmed that were decided before this one.
    fn are_said(&self, until: u64) -> bool {
        self.removals.first_key_value().is_none_or(|(first, _)| *first >= until)
    }

    /// Begins to say some of those that were decided before this one, and that nobody says.
    fn begin(&mut self, until: u64, index: &Index) -> Vec<BlockKey> {
        let waiting = self.removals.range_mut(..until).map(|(_, removal)| removal);
        let waiting = waiting.filter(|removal| !removal.saying && !is_coming(index, &removal.key));
        let begin = |removal: &mut Removal| {
            removal.saying = true;
            removal.key
        };
        waiting.take(AT_ONCE).map(begin).collect()
    }

    /// The same of one key; whether it did.
    fn begin_one(&mut self, key: &BlockKey, index: &Index) -> bool {
        let removal = self.numbers.get(key).and_then(|number| self.removals.get_mut(number));
        let removal = removal.filter(|removal| !removal.saying && !is_coming(index, key));
        removal.is_some_and(|removal| !std::mem::replace(&mut removal.saying, true))
    }

    /// These were said, or they were not.
    fn end(&mut self, keys: &[BlockKey], said: bool) {
        for key in keys {
            let Some(number) = self.numbers.get(key).copied() else { continue };
            let Some(removal) = self.removals.get_mut(&number) else { continue };
            removal.saying = false;
            if !std::mem::take(&mut removal.again) && said {
                self.removals.remove(&number);
                self.numbers.remove(key);
            }
        }
    }
}

/// Whether a put is bringing a block of this key.
fn is_coming(index: &Index, key: &BlockKey) -> bool {
    index.find_any(key).is_some_and(|id| index.node(id).life == Life::Filling)
}

impl State {
    /// Blocks were taken out: what the tiers have of them is to go too.
    pub fn note_removed(&mut self, gone: &[Gone], log: bool) {
        for gone in gone {
            // One without a place may be in the log all the same: it is being written, or its disk has failed to sync it.
            if log {
                self.unsaid_mut(Where::Log).add(gone.key);
            }
            if gone.object != 0 {
                self.unsaid_mut(Where::Object).add(gone.key);
            }
        }
    }

    /// Whether so many removals are not confirmed that there are to be no more.
    pub fn is_full_of_removals(&self) -> bool {
        self.unsaid.iter().any(|unsaid| unsaid.numbers.len() >= MOST)
    }

    pub fn unsaid_mut(&mut self, tier: Where) -> &mut Unsaid {
        &mut self.unsaid[tier as usize]
    }
}

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
        self.store.state().unsaid_mut(self.tier).end(&self.keys, self.said);
        self.store.note_change();
    }
}

impl Store {
    /// Has all tiers confirm what was removed, also before this call.
    ///
    /// # Errors
    /// What a tier says, `DeadlineExceeded`; the blocks are gone from memory all the same.
    pub fn remove_below(&self, by: Instant) -> Result<()> {
        let all = [Where::Log, Where::Object].map(|tier| self.say_removed(tier, by));
        all.into_iter().collect()
    }

    fn say_removed(&self, to: Where, by: Instant) -> Result<()> {
        let mut state = self.state();
        let until = state.unsaid_mut(to).next;
        while !state.unsaid_mut(to).are_said(until) {
            let State { unsaid, index, .. } = &mut *state;
            let keys = unsaid[to as usize].begin(until, index);
            if keys.is_empty() {
                // Others say them, or are bringing the blocks.
                if Instant::now() >= by {
                    let late = Error::new(Code::DeadlineExceeded, "it has not confirmed all of it yet");
                    return Err(self.may_be_back(to, &late));
                }
                state = self.wait(state, by);
                continue;
            }
            drop(state);
            let saying = Saying::new(self, to, keys);
            let said = match self.far().filter(|_| to == Where::Object) {
                Some(far) => saying.to(&far.objects, by, true),
                None => self.have_said(by, move |log| saying.to(log, by, true)),
            };
            said.map_err(|error| self.may_be_back(to, &error))?;
            state = self.state();
        }
        Ok(())
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
            unsaid[to as usize].begin_one(key, index)
        };
        while begin() {
            // What was gathered for an object store before it is sent before it.
            Saying::new(self, to, vec![*key]).to(tier, Instant::now() + PATIENCE, to == Where::Log)?;
        }
        Ok(())
    }

    /// Blocks that were being brought did not come: where they had been removed before, that counts.
    pub fn say_soon(&self, keys: Vec<(Where, BlockKey)>) {
        for (to, key) in keys {
            let say = move |store: &Store| {
                if let Err(error) = store.say_late(to, &key) {
                    let tier = to.name();
                    log::warn!(
                        "block {key} was removed, and may be in the tier {tier} after a restart: {error}"
                    );
                }
            };
            self.have_done(to, say);
        }
    }

    /// What a tier has not confirmed may be found again.
    pub fn may_be_back(&self, tier: Where, error: &Error) -> Error {
        let (name, what) = match (self.below(), self.far()) {
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
        state.note_removed(&gone, true);
        drop(state);
        assert_eq!(store.remove_below(Instant::now()).unwrap_err().code, Code::DeadlineExceeded);
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
                store.remove_below(Instant::now()).unwrap();
            } else {
                let error = store.remove_below(Instant::now()).unwrap_err();
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
            assert!(unsaid[Where::Log as usize].begin_one(&KEY, index));
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
