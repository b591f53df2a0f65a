//! What was removed stays removed, whichever tier is late, fails or is gone.

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
        brought = Some(store.reserve(0, None, &[KEY], false).unwrap());
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
fn what_is_being_written_is_not_said_to_be_gone_before_that_has_ended() {
    let folder = Folder::new("being-written");
    let store = open(&folder.0);
    put(&store);
    let mut state = store.state();
    let State { unsaid, index, .. } = &mut *state;
    let (unsaid, block) = (unsaid.of(Where::Log), (KEY, NAMESPACE));
    unsaid.write(block);
    unsaid.write(block);
    unsaid.add(REMOVED);
    unsaid.add(CLEARED);
    let until = unsaid.next();
    // One of two writes has ended, and the other one may still come.
    assert!(unsaid.written(&block));
    assert!(!unsaid.may_begin(until, index) && unsaid.begin(until, index).is_empty());
    assert!(unsaid.written(&block));
    assert_eq!(unsaid.begin(until, index), [REMOVED, CLEARED]);
}

#[test]
fn who_clears_a_tenant_removes_nothing_of_one_that_had_its_number() {
    let folder = Folder::new("tenant-numbers");
    let store = open(&folder.0);
    let open_of = |id, tenant: &str| store.namespace(id, tenant, shape(), "tiny@1").unwrap();
    let tenant = |namespace: u16| store.state().tenants.namespace(namespace).tenant;
    let before = tenant(open_of(numbered(1), "one"));
    for number in 2..4096 {
        open_of(numbered(number), if number < 3 { "one" } else { "many" });
    }
    // All of the first tenant's are forgotten for it.
    let new = served(&store, || open_of(numbered(4096), "new"));
    assert_eq!(tenant(new), before);
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
