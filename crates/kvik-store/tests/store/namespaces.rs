//! More namespaces than a store knows: each reset of a serving engine makes some.

use crate::rig::*;
use kvik_engine::{Config, Engine};
use kvik_store::{Ack, BlockKey, Client, LogOptions, Namespace, Server, Space, StoreOptions};

/// More than a store knows at a time.
const MANY: u32 = 5000;
/// So large that no block has to go for another one.
const MEMORY: u64 = 256 << 20;

/// A namespace of its own, as a reset makes it.
fn after_reset(number: u32) -> Namespace {
    Namespace { revision: format!("reset {number}"), ..namespace("tiny") }
}

/// A block that every namespace has by the same key: one that is found in another namespace than its own is noticed.
fn key() -> [BlockKey; 1] {
    let [key] = keys(&namespace("tiny"), &[1])[..] else { panic!("one key") };
    [key]
}

/// Opens many in turn and puts a block in each, which is `cleared` or not. The last one's.
fn open_many(client: &Client, pages: &Pages, cleared: bool) -> Space {
    let mut last = None;
    for number in 0..MANY {
        let space = client.open("one", &after_reset(number), shape()).unwrap();
        assert_eq!(put(&space, pages, None, &key()).stored, 1, "namespace {number}");
        assert_eq!(if cleared { space.clear().unwrap() } else { 1 }, 1);
        last = Some(space);
    }
    last.unwrap()
}

#[test]
fn a_namespace_that_was_forgotten_is_opened_again_by_whoever_asks() {
    let (there, other) =
        (Engine::start(Config::default()).unwrap(), Engine::start(Config::default()).unwrap());
    let server = Server::start(&there, &StoreOptions { memory: MEMORY, ..StoreOptions::default() }).unwrap();
    let rig = Rig::served(&there.addresses()[0].to_string());
    assert_eq!((rig.put(&[1, 2]).stored, rig.space.clear().unwrap()), (2, 2));
    let client = Client::connect(&other, &there.addresses()[0].to_string(), None).unwrap();
    let last = open_many(&client, &Pages::new(&other, 64, shape()), true);
    assert_eq!(rig.get(&[1, 2]), 0);
    assert_eq!((rig.put(&[1, 2]).stored, rig.get(&[1, 2])), (2, 2));
    assert_eq!(last.contains(&key()).unwrap(), [false]);
    assert_eq!(server.counts().blocks, 2);
}

#[test]
fn whatever_is_asked_first_of_a_forgotten_namespace_is_answered() {
    let rig = Rig::new(MEMORY);
    let asked: [&dyn Fn(&Space) -> u64; 4] = [
        &|space| space.contains(&key()).unwrap().len() as u64 - 1,
        &|space| space.prefetch(&key()).unwrap(),
        &|space| space.pin(&key(), std::time::Duration::ZERO).unwrap(),
        &|space| space.remove(&key()).unwrap(),
    ];
    let old: Vec<Space> = (0..asked.len() as u32)
        .map(|number| rig.client.open("one", &after_reset(MANY + number), shape()).unwrap())
        .collect();
    open_many(&rig.client, &rig.pages, true);
    old.iter().zip(asked).for_each(|(space, ask)| assert_eq!(ask(space), 0));
}

#[test]
fn one_tenants_many_namespaces_take_from_its_own_and_none_is_found_in_another() {
    let rig = Rig::new(MEMORY);
    let other = rig.client.open("two", &namespace("other"), shape()).unwrap();
    assert_eq!(put(&other, &rig.pages, None, &key()).stored, 1);
    let kept = rig.client.open("one", &namespace("kept"), shape()).unwrap();
    assert_eq!(put(&kept, &rig.pages, None, &key()).stored, 1);
    assert_eq!(kept.pin(&key(), std::time::Duration::from_secs(600)).unwrap(), 1);
    let old = rig.client.open("one", &namespace("old"), shape()).unwrap();
    assert_eq!(put(&old, &rig.pages, None, &key()).stored, 1);
    let last = open_many(&rig.client, &rig.pages, false);
    assert_eq!(get(&last, &rig.pages, &key()), 1);
    assert_eq!((get(&other, &rig.pages, &key()), get(&kept, &rig.pages, &key())), (1, 1));
    // What it had went with it; what others have by this key is not its own.
    assert_eq!(get(&old, &rig.pages, &key()), 0);
    assert_eq!(put(&old, &rig.pages, None, &key()).stored, 1);
    assert_eq!(get(&old, &rig.pages, &key()), 1);
    assert!(rig.client.stat().unwrap().blocks > 4000, "{:?}", rig.client.stat());
}

#[test]
fn what_went_with_its_namespace_stays_gone_after_a_restart() {
    let folder = Folder::new("namespaces");
    let options = || {
        let log = Some((folder.0.clone(), LogOptions::new(MEMORY)));
        StoreOptions { memory: MEMORY, log, ..StoreOptions::default() }
    };
    let rig = Rig::with(options());
    let durable = put_until(Ack::Durable, &rig.space, &rig.pages, None, &rig.keys(&[1]));
    assert_eq!((durable.stored, rig.get(&[1])), (1, 1));
    open_many(&rig.client, &rig.pages, false);
    // There is nothing to remove: so nothing is said of the block that could keep it from coming back.
    assert_eq!(rig.space.remove(&rig.keys(&[1])).unwrap(), 0);
    drop(rig);
    let rig = Rig::with(options());
    assert_eq!(rig.get(&[1]), 0);
    let last = rig.client.open("one", &after_reset(MANY - 1), shape()).unwrap();
    assert_eq!(get(&last, &rig.pages, &key()), 1);
}

#[test]
fn more_tenants_come_than_a_store_knows_namespaces() {
    let rig = Rig::new(MEMORY);
    let name = |number: u32| format!("tenant {number}");
    let open = |number: u32| rig.client.open(&name(number), &after_reset(number), shape()).unwrap();
    let first = open(0);
    let last: Vec<Space> = (1..=MANY)
        .map(|number| {
            let space = open(number);
            assert_eq!(put(&space, &rig.pages, None, &key()).stored, 1, "tenant {number}");
            space
        })
        .skip(MANY as usize - 3000)
        .collect();
    // Those that were used last are there, and whoever is cleared is no other one.
    assert!(last.iter().all(|space| space.contains(&key()).unwrap() == [true]));
    assert_eq!(rig.client.clear_tenant(&name(MANY - 1)).unwrap(), 1);
    assert_eq!(rig.client.clear_tenant(&name(1)).unwrap(), 0);
    let here = last.iter().filter(|space| space.contains(&key()).unwrap() == [true]);
    assert_eq!(here.count(), last.len() - 1);
    assert_eq!(first.contains(&key()).unwrap(), [false]);
    assert_eq!(put(&first, &rig.pages, None, &key()).stored, 1);
}
