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
mod tests {
    use super::*;
    use crate::state::Reserved;
    use crate::tier::Tier;
    use crate::write::tests::{KEY, NAMESPACE, fill, open, put, shape, write, write_with};
    use crate::{Bucket, ObjectOptions, StoreOptions};
    use kvik_engine::{Config, Engine};
    use object_store::memory::InMemory;
    use std::path::PathBuf;
    use std::sync::Arc;

    const REMOVED: Removed = Removed::Block(KEY);
    const CLEARED: Removed = Removed::Namespace(NAMESPACE);
    const OTHER: BlockKey = BlockKey([3; 32]);

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

    /// Has something done while the threads that write have what they have to do done.
    fn served<T: Send>(store: &Store, what: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let doing = scope.spawn(what);
            while !doing.is_finished() {
                serve(store);
            }
            doing.join().unwrap()
        })
    }

    fn numbered(number: u32) -> NamespaceId {
        let mut id = [9; 32];
        id[..4].copy_from_slice(&number.to_le_bytes());
        NamespaceId(id)
    }

    fn cleared(store: &Store) -> Result<usize> {
        store.clear(|known, _| known.id == NAMESPACE)
    }

    /// Begins to say what was removed, which the log does not confirm in time.
    fn say_late(store: &Store, what: &Removed) {
        let late = Saying::some(store, Where::Log, u64::MAX, Instant::now()).unwrap_err();
        assert_eq!(late.code, Code::DeadlineExceeded);
        assert!(store.state().unsaid.of(Where::Log).has(what), "it may be there after a restart");
    }

    /// Takes a block out, whose removal nobody says in time.
    fn take_out(store: &Store) {
        let mut state = store.state();
        let id = state.index.find(0, &KEY).unwrap();
        let gone = state.forget(id);
        gone.iter().for_each(|key| Removing(store).note(&mut state, Removed::Block(*key)));
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
                say_late(&store, &REMOVED);
                assert_eq!(served(&store, || store.remove(0, &[KEY])).unwrap(), 0);
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
            assert!(unsaid.of(Where::Log).begin_one(&REMOVED, index));
            Saying::new(&store, Where::Log, vec![REMOVED])
        };
        // Whoever says it takes long, and the block comes again.
        let reserved = store.state().reserve(0, None, KEY, |_| false).unwrap();
        let early = matches!(reserved, Reserved::New(_));
        if let Reserved::New(filling) = reserved {
            write(&store, fill(&store, filling), |_| {});
        }
        saying.say(Instant::now() + PATIENCE, true).unwrap();
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

    /// A store with nothing but an object store below.
    fn open_far(bucket: &Arc<InMemory>) -> Store {
        let object = Some(ObjectOptions::new(Bucket::Store(bucket.clone(), "kv".into()), 256 << 20));
        let options = StoreOptions { memory: 1 << 20, object, ..StoreOptions::default() };
        let store = Store::open(Engine::start(Config::default()).unwrap(), &options).unwrap();
        store.namespace(NAMESPACE, "one", shape(), "tiny@1").unwrap();
        store.far().unwrap().know(Instant::now() + PATIENCE).unwrap();
        store
    }

    #[test]
    fn a_block_of_which_no_place_is_known_is_removed_from_the_object_store() {
        let bucket = Arc::new(InMemory::new());
        let store = open_far(&bucket);
        let reserved = store.state().reserve(0, None, OTHER, |_| false).unwrap();
        let Reserved::New(filling) = reserved else { panic!("no room") };
        // The other one keeps the object from going.
        let blocks = [(put(&store), KEY), (fill(&store, filling), OTHER)];
        let places = blocks.map(|(id, key)| store.write(id, &key, Where::Object, PATIENCE).unwrap().unwrap());
        store.far().unwrap().objects.sync(&places, PATIENCE).unwrap();
        {
            // A removal that nobody says, until the block is put again.
            let mut state = store.state();
            state.forget(blocks[0].0);
            Removing(&store).note(&mut state, REMOVED);
        }
        put(&store);
        assert_eq!(store.remove(0, &[KEY]).unwrap(), 1);
        drop(store);
        assert_eq!(open_far(&bucket).contains(0, &[KEY, OTHER]).unwrap(), [false, true]);
    }

    #[test]
    fn nothing_waits_for_a_tier_that_is_never_written_again() {
        let bucket = Arc::new(InMemory::new());
        let (store, _other) = (open_far(&bucket), open_far(&bucket));
        {
            // As many as wait at most, before the store knows that the prefix is another one's.
            let mut state = store.state();
            let keys = (0..1 << 16).map(|number| BlockKey(numbered(number).0));
            keys.for_each(|key| Removing(&store).note(&mut state, Removed::Block(key)));
        }
        put(&store);
        assert_eq!(store.remove(0, &[KEY]).unwrap_err().code, Code::StorageFailed);
        assert_eq!(store.contains(0, &[KEY]).unwrap(), [false]);
        for number in 0..4200 {
            store.namespace(numbered(number), "one", shape(), "tiny@1").unwrap();
        }
        // What was removed is there still.
        let error = store.remove(0, &[KEY]).unwrap_err();
        assert!(error.code == Code::StorageFailed && error.text.contains("taken over"), "{error}");
        assert_eq!(cleared(&store).unwrap_err().code, Code::StorageFailed);
    }

    #[test]
    fn a_namespace_whose_removal_was_not_said_is_found_until_it_is() {
        let folder = Folder::new("unforgotten");
        let store = open(&folder.0);
        write(&store, put(&store), |_| {});
        assert_eq!(cleared(&store).unwrap_err().code, Code::DeadlineExceeded);
        // It is the longest-unused, and has no block.
        let next = |number: u32| store.namespace(numbered(number), "one", shape(), "tiny@1");
        let full = (0..4200).find_map(|number| Some((number, next(number).err()?)));
        let (number, error) = full.expect("as many as a store knows");
        assert!(number > 4000 && error.code == Code::DeadlineExceeded, "{number}: {error}");
        assert!(error.text.contains("no room for namespace"), "{error}");
        assert_eq!(served(&store, || cleared(&store)).unwrap(), 0);
        served(&store, || next(number)).unwrap();
        drop(store);
        assert_eq!(open(&folder.0).contains(0, &[KEY]).unwrap(), [false]);
    }

    #[test]
    fn a_clear_that_was_not_said_fails_until_it_is_and_voids_nothing_that_is_stored_later() {
        for again in [false, true] {
            let folder = Folder::new("uncleared");
            let store = open(&folder.0);
            write(&store, put(&store), |_| {});
            assert_eq!(cleared(&store).unwrap_err().code, Code::DeadlineExceeded);
            assert_eq!(Removing(&store).everywhere(Instant::now()).unwrap_err().code, Code::DeadlineExceeded);
            say_late(&store, &CLEARED);
            if again {
                // Memory has it at once; who writes it says the removal first.
                assert!(store.write(put(&store), &KEY, Where::Log, PATIENCE).unwrap().is_some());
            }
            assert_eq!(served(&store, || store.remove(0, &[OTHER])).unwrap(), 0);
            drop(store);
            assert_eq!(open(&folder.0).contains(0, &[KEY]).unwrap(), [again]);
        }
    }

    #[test]
    fn nothing_is_written_of_a_namespace_whose_removal_is_being_said() {
        let folder = Folder::new("clearing");
        let store = open(&folder.0);
        write(&store, put(&store), |_| {});
        let saying = {
            let mut state = store.state();
            assert_eq!(state.forget_all(|_| true), 1);
            Removing(&store).note(&mut state, CLEARED);
            let State { unsaid, index, .. } = &mut *state;
            assert!(unsaid.of(Where::Log).begin_one(&CLEARED, index));
            Saying::new(&store, Where::Log, vec![CLEARED])
        };
        // Whoever says it takes long, and the block comes again.
        let id = put(&store);
        let early = store.write(id, &KEY, Where::Log, std::time::Duration::ZERO);
        saying.say(Instant::now() + PATIENCE, true).unwrap();
        assert!(store.write(id, &KEY, Where::Log, PATIENCE).unwrap().is_some());
        let error = early.unwrap_err();
        assert!(error.code == Code::DeadlineExceeded && error.text.contains("clearing"), "{error}");
        drop(store);
        assert_eq!(open(&folder.0).contains(0, &[KEY]).unwrap(), [true]);
    }

    #[test]
    fn a_put_whose_block_is_cleared_while_it_is_written_does_not_fail() {
        let folder = Folder::new("cleared-meanwhile");
        let store = open(&folder.0);
        let id = put(&store);
        write_with(&store, id, |log| {
            store.state().forget_all(|_| true);
            log.remove_namespace(&NAMESPACE, PATIENCE).unwrap();
        })
        .unwrap();
        drop(store);
        assert_eq!(open(&folder.0).contains(0, &[KEY]).unwrap(), [false]);
    }

    #[test]
    fn who_clears_a_tenant_removes_nothing_of_one_that_had_its_number() {
        let folder = Folder::new("tenant-numbers");
        let store = open(&folder.0);
        let open_of = |id, tenant: &str| store.namespace(id, tenant, shape(), "tiny@1").unwrap();
        for number in 1..4096 {
            open_of(numbered(number), if number < 3 { "one" } else { "many" });
        }
        let of = |tenant: &str| store.state().tenants.named(tenant);
        let before = of("one");
        // All of the first tenant's are forgotten for it.
        let new = served(&store, || open_of(numbered(4096), "new"));
        assert_eq!((of("new"), of("one")), (before, None));
        let put = |number, key| {
            let reserved = store.state().reserve(number, None, key, |_| false).unwrap();
            let Reserved::New(filling) = reserved else { panic!("no room") };
            fill(&store, filling)
        };
        put(new, OTHER);
        assert_eq!(served(&store, || store.clear(|_, tenant| tenant == "one")).unwrap(), 0);
        let id = put(open_of(NAMESPACE, "one"), KEY);
        assert!(store.write(id, &KEY, Where::Log, PATIENCE).unwrap().is_some());
        assert_eq!(served(&store, || store.clear(|_, tenant| tenant == "new")).unwrap(), 1);
        drop(store);
        assert_eq!(open(&folder.0).contains(0, &[KEY]).unwrap(), [true]);
    }
}
