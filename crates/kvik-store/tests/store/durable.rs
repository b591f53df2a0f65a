//! A store with a log: what was acknowledged as durable is there after a restart, and what goes from memory stays below.

use crate::rig::*;
use kvik_engine::{Config, Engine};
use kvik_store::{Ack, Client, LogOptions, Shape, StoreOptions, Stored};
use std::path::Path;
use std::time::{Duration, Instant};

fn rig(folder: &Path, size: u64) -> Rig {
    let log = Some((folder.to_owned(), LogOptions::new(size)));
    Rig::with(StoreOptions { memory: 1 << 20, log, ..StoreOptions::default() })
}

fn durable(rig: &Rig, prompt: &[u32]) -> Stored {
    put_until(Ack::Durable, &rig.space, &rig.pages, None, &rig.keys(prompt))
}

/// Waits until so many blocks were written.
fn written(rig: &Rig, count: u64) {
    let until = Instant::now() + Duration::from_secs(60);
    while rig.client.stat().unwrap().written < count {
        assert!(Instant::now() < until, "{:?}", rig.client.stat().unwrap());
        std::thread::yield_now();
    }
}

#[test]
fn a_restart_finds_what_is_durable() {
    let folder = Folder::new("restart");
    {
        let rig = rig(&folder.0, 64 << 20);
        assert_eq!(durable(&rig, &[1, 2, 3, 4]), Stored { stored: 4, known: 0, refused: 0 });
        assert_eq!(durable(&rig, &[1, 2, 5]), Stored { stored: 1, known: 2, refused: 0 });
        rig.put(&[6, 7]);
        written(&rig, 7);
    }
    let rig = rig(&folder.0, 64 << 20);
    assert_eq!(rig.client.stat().unwrap().blocks, 7);
    assert_eq!(rig.client.stat().unwrap().memory_bytes, 0);
    assert_eq!((rig.get(&[1, 2, 3, 4]), rig.get(&[1, 2, 5]), rig.get(&[6, 7])), (4, 3, 2));
    assert_eq!(rig.client.stat().unwrap().loaded, 7);
    // From now on they are in memory.
    assert_eq!(rig.get(&[1, 2, 3, 4]), 4);
    assert_eq!(rig.client.stat().unwrap().loaded, 7);
    // What was known before is durable as it is.
    assert_eq!(durable(&rig, &[1, 2, 3, 4]), Stored { stored: 0, known: 4, refused: 0 });
}

#[test]
fn a_store_that_ends_well_has_written_all() {
    let folder = Folder::new("ends");
    {
        let rig = rig(&folder.0, 64 << 20);
        for prompt in 0..15 {
            assert_eq!(rig.put(&[prompt, prompt + 100, prompt + 200]).stored, 3);
        }
    }
    let rig = rig(&folder.0, 64 << 20);
    assert!((0..15).all(|prompt| rig.get(&[prompt, prompt + 100, prompt + 200]) == 3));
}

#[test]
fn what_goes_from_memory_stays_below() {
    let folder = Folder::new("below");
    let rig = rig(&folder.0, 64 << 20);
    for prompt in 0..60 {
        rig.put(&[prompt, prompt + 100, prompt + 200, prompt + 300]);
        written(&rig, 4 * (u64::from(prompt) + 1));
    }
    assert!(rig.client.stat().unwrap().evicted > 100);
    for prompt in 0..60 {
        assert_eq!(rig.get(&[prompt, prompt + 100, prompt + 200, prompt + 300]), 4, "prompt {prompt}");
    }
    assert!(rig.client.stat().unwrap().memory_taken <= 1 << 20);
    assert_eq!(rig.space.prefetch(&rig.keys(&[3, 103, 203, 9])).unwrap(), 3);
}

#[test]
fn what_was_removed_is_gone_after_a_restart_too() {
    let folder = Folder::new("removed");
    let other = namespace("other");
    {
        let rig = rig(&folder.0, 64 << 20);
        durable(&rig, &[1, 2, 3]);
        durable(&rig, &[4, 5]);
        assert_eq!(rig.space.remove(&rig.keys(&[1, 2])[1..]).unwrap(), 2);
        let space = rig.client.open("two", &other, shape()).unwrap();
        put_until(Ack::Durable, &space, &rig.pages, None, &keys(&other, &[1, 2]));
        assert_eq!(space.clear().unwrap(), 2);
        // Put again, it is there again.
        put_until(Ack::Durable, &space, &rig.pages, None, &keys(&other, &[7]));
    }
    let rig = rig(&folder.0, 64 << 20);
    assert_eq!((rig.get(&[1, 2, 3]), rig.get(&[4, 5])), (1, 2));
    let space = rig.client.open("two", &other, shape()).unwrap();
    assert_eq!(get(&space, &rig.pages, &keys(&other, &[1, 2])), 0);
    assert_eq!(get(&space, &rig.pages, &keys(&other, &[7])), 1);
}

#[test]
fn a_log_that_is_full_keeps_what_is_asked_for() {
    let folder = Folder::new("full");
    let size = 8 << 20;
    let rig = rig(&folder.0, size);
    let favourite = [9001, 9002, 9003];
    durable(&rig, &favourite);
    for prompt in 0..600 {
        durable(&rig, &[prompt, prompt + 1000, prompt + 2000]);
        if prompt % 5 == 0 {
            assert_eq!(rig.get(&favourite), 3, "after {prompt} others");
        }
    }
    let counts = rig.client.stat().unwrap();
    assert!(counts.dropped > 100, "{counts:?}");
    assert!(rig.get(&[599, 1599, 2599]) == 3);
    let bytes: u64 =
        std::fs::read_dir(&folder.0).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert!(bytes <= size, "{bytes} bytes in a log of {size}");
}

#[test]
fn what_was_removed_stays_gone_when_what_comes_before_it_was_copied() {
    let folder = Folder::new("copied");
    let (before, removed) = ([9001, 9002, 9003], [9001, 9002, 9003, 9004]);
    {
        let rig = rig(&folder.0, 8 << 20);
        durable(&rig, &before);
        let files = std::fs::read_dir(&folder.0).unwrap().map(|file| file.unwrap().path());
        let oldest = files.filter(|path| path.extension().is_some_and(|end| end == "kvik")).min().unwrap();
        let mut numbers = 0..1000;
        let mut another = || {
            let number = numbers.next().expect("a log that is full by now");
            durable(&rig, &[number, number + 1000, number + 2000]);
        };
        // More than a segment has room for.
        (0..50).for_each(|_| another());
        durable(&rig, &removed);
        assert_eq!(rig.space.remove(&rig.keys(&removed)[3..]).unwrap(), 1);
        while oldest.exists() {
            another();
            assert_eq!(rig.get(&before), 3);
        }
    }
    let rig = rig(&folder.0, 8 << 20);
    assert_eq!(rig.get(&before), 3);
    assert_eq!(rig.space.contains(&rig.keys(&removed)).unwrap(), [true, true, true, false]);
}

#[test]
fn bytes_that_changed_on_the_disk_are_a_miss() {
    let folder = Folder::new("flipped");
    {
        let rig = rig(&folder.0, 64 << 20);
        for prompt in 0..20 {
            durable(&rig, &[prompt, prompt + 100]);
        }
    }
    let mut random = Random::new();
    for entry in std::fs::read_dir(&folder.0).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        for _ in 0..bytes.len() / 60_000 {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << random.below(8);
        }
        std::fs::write(&path, bytes).unwrap();
    }
    let rig = rig(&folder.0, 64 << 20);
    // `get` compares every byte of what it is given.
    let found: usize = (0..20).map(|prompt| rig.get(&[prompt, prompt + 100])).sum();
    println!("{found} of 40 blocks are left");
    assert!(found < 40 && rig.client.stat().unwrap().corrupt + (40 - found as u64) > 0);
    // The store goes on, and takes them again.
    for prompt in 0..20 {
        durable(&rig, &[prompt, prompt + 100]);
        assert_eq!(rig.get(&[prompt, prompt + 100]), 2);
    }
}

#[test]
fn two_stores_have_no_log_in_common() {
    let folder = Folder::new("twice");
    let first = rig(&folder.0, 64 << 20);
    let log = Some((folder.0.clone(), LogOptions::new(64 << 20)));
    let options = StoreOptions { memory: 1 << 20, log, ..StoreOptions::default() };
    let error = kvik_store::Client::embedded(&first.engine, &options).err().unwrap();
    assert_eq!(error.code, kvik_core::Code::StorageFailed, "{error}");
}

#[test]
fn a_client_that_reads_late_gets_all_parts_of_an_answer() {
    const BLOCKS: u32 = 120;
    let folder = Folder::new("late");
    let big = Shape::new(1, 1, 1 << 20).unwrap();
    let open = || {
        let engine = Engine::start(Config::default()).unwrap();
        let log = Some((folder.0.clone(), LogOptions::new(512 << 20)));
        let options = StoreOptions { memory: 256 << 20, log, ..StoreOptions::default() };
        let client = Client::embedded(&engine, &options).unwrap();
        let space = client.open("one", &namespace("big"), big).unwrap();
        let pages = Pages::new(&engine, BLOCKS, big);
        (engine, client, space, pages)
    };
    let keys = keys(&namespace("big"), &(0..BLOCKS).collect::<Vec<_>>());
    let ids: Vec<u32> = (0..BLOCKS).collect();
    {
        let (_engine, _client, space, pages) = open();
        put_until(Ack::Durable, &space, &pages, None, &keys);
    }
    let (_engine, client, space, pages) = open();
    let mut getting = space.get(&keys, &pages.set(&ids), Some(Duration::from_secs(90))).unwrap();
    // All of it is brought back, window by window, before the first answer is looked at.
    let until = Instant::now() + Duration::from_secs(60);
    while client.stat().unwrap().loaded < u64::from(BLOCKS) {
        assert!(Instant::now() < until, "{:?}", client.stat().unwrap());
        std::thread::yield_now();
    }
    while getting.next(None).unwrap().is_some() {}
    assert_eq!(getting.verified(), BLOCKS as usize);
    assert!(ids.iter().zip(&keys).all(|(page, key)| pages.holds(*page, key)));
}
