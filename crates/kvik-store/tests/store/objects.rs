//! A store with an object store below: what goes from memory and the log comes back from there, also after a restart;
//! and whatever that store gives, no block is another one.

use crate::bucket::{Bucket, Meddling};
use crate::rig::*;
use kvik_store::{LogOptions, ObjectOptions, StoreOptions};
use object_store::ObjectStoreExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const MEMORY: u64 = 1 << 20;
/// Of four blocks each: three times what memory has room for.
const PROMPTS: u32 = 60;

fn prompt(number: u32) -> [u32; 4] {
    [number, number + 1000, number + 2000, number + 3000]
}

/// Small objects that are sent at once, so that there are many.
fn small(bucket: &Arc<Bucket>) -> ObjectOptions {
    let all = ObjectOptions::new(kvik_store::Bucket::Store(bucket.clone(), "kv/a".into()), 64 << 20);
    ObjectOptions { batch: 128 << 10, flush: Duration::from_millis(20), ..all }
}

fn rig_with(object: ObjectOptions, log: Option<&Path>) -> Rig {
    let log = log.map(|folder| (folder.to_owned(), LogOptions::new(512 << 10)));
    Rig::with(StoreOptions { memory: MEMORY, log, object: Some(object), ..StoreOptions::default() })
}

fn value(rig: &Rig, name: &str) -> u64 {
    value_of(rig, &format!("kvik_store_object_{name}"))
}

fn value_of(rig: &Rig, name: &str) -> u64 {
    let (text, name) = (rig.client.metrics().unwrap(), format!("{name} "));
    text.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |value| value.parse().unwrap())
}

/// Waits until all that was gathered is in the object store.
fn sent(rig: &Rig) {
    becomes(|| value(rig, "unsent_bytes") == 0);
}

/// Puts prompts, each of which is gathered before the next one comes.
fn put_all(rig: &Rig, prompts: std::ops::Range<u32>) {
    for number in prompts {
        let before = rig.client.stat().unwrap().object_written;
        let stored = rig.put(&prompt(number)).stored;
        assert_eq!(stored, 4);
        becomes(|| rig.client.stat().unwrap().object_written == before + 4);
    }
    sent(rig);
}

/// Waits until so many blocks are in the log, or are not, since it was too slow for them.
fn logged(rig: &Rig, blocks: u64) {
    becomes(|| {
        let counts = rig.client.stat().unwrap();
        counts.written + counts.unwritten == blocks
    });
}

fn opened(rig: &Rig) {
    becomes(|| value(rig, "open") == 1);
}

/// How many blocks of all prompts are there; each that is was compared.
fn there(rig: &Rig) -> usize {
    (0..PROMPTS).map(|number| rig.get(&prompt(number))).sum()
}

#[test]
fn what_goes_from_memory_comes_back_also_after_a_restart() {
    let bucket = Bucket::new();
    {
        let rig = rig_with(small(&bucket), None);
        put_all(&rig, 0..PROMPTS);
        let counts = rig.client.stat().unwrap();
        assert!(counts.evicted > 100, "{counts:?}");
        assert_eq!(there(&rig), 4 * PROMPTS as usize);
        let counts = rig.client.stat().unwrap();
        assert!(counts.object_loaded > 100, "{counts:?}");
        // Those of a prompt lie together, and come by one request.
        let requests = bucket.reads.load(Ordering::Relaxed);
        println!("{} blocks by {requests} reads", counts.object_loaded);
        assert_eq!(rig.client.stat().unwrap().misses, 0);
    }
    let rig = rig_with(small(&bucket), None);
    opened(&rig);
    assert_eq!(rig.client.stat().unwrap().blocks, 4 * u64::from(PROMPTS));
    assert_eq!(rig.client.stat().unwrap().memory_bytes, 0);
    assert_eq!(rig.space.prefetch(&rig.keys(&prompt(7))).unwrap(), 4);
    assert_eq!(there(&rig), 4 * PROMPTS as usize);
    assert_eq!((rig.client.stat().unwrap().corrupt, rig.client.stat().unwrap().misses), (0, 0));
}

#[test]
fn what_goes_from_the_log_too_comes_back() {
    let (bucket, folder) = (Bucket::new(), Folder::new("object-log"));
    {
        let rig = rig_with(small(&bucket), Some(&folder.0));
        // A block that memory moves out before the log's turn comes is not written there.
        for number in 0..PROMPTS {
            put_all(&rig, number..number + 1);
            logged(&rig, 4 * u64::from(number + 1));
        }
        assert_eq!(there(&rig), 4 * PROMPTS as usize);
        let counts = rig.client.stat().unwrap();
        assert!(counts.object_loaded > 0 && counts.loaded > 0, "{counts:?}");
    }
    // With what is left of the log, and without it.
    for log in [Some(&*folder.0), None] {
        let rig = rig_with(small(&bucket), log);
        opened(&rig);
        let found = there(&rig);
        assert_eq!(found, 4 * PROMPTS as usize, "with the log {log:?}: {:?}", rig.client.stat());
    }
}

#[test]
fn what_only_the_object_store_has_is_durable_once_it_is_put_so() {
    let (bucket, folder) = (Bucket::new(), Folder::new("object-durable"));
    let again = prompt(0);
    {
        let rig = rig_with(small(&bucket), Some(&folder.0));
        // Nothing is left to be written to the log when it is put again: that would drop it from there once more.
        for number in 0..PROMPTS {
            put_all(&rig, number..number + 1);
            logged(&rig, 4 * u64::from(number + 1));
        }
        // The log has dropped it for others, and memory has moved it out.
        becomes(|| value_of(&rig, "kvik_store_log_dropped_blocks_total") > 8);
        let stored = put_until(kvik_store::Ack::Durable, &rig.space, &rig.pages, None, &rig.keys(&again));
        assert_eq!(stored.refused, 0, "{stored:?}");
    }
    let log = Some((folder.0.clone(), LogOptions::new(512 << 10)));
    let rig = Rig::with(StoreOptions { memory: MEMORY, log, ..StoreOptions::default() });
    assert_eq!(rig.get(&again), 4);
}

#[test]
fn what_was_removed_is_gone_after_a_restart_too() {
    let bucket = Bucket::new();
    let other = namespace("other");
    {
        let rig = rig_with(small(&bucket), None);
        put_all(&rig, 0..4);
        assert_eq!(rig.space.remove(&rig.keys(&prompt(1))[1..2]).unwrap(), 3);
        assert_eq!(rig.get(&prompt(1)), 1);
        let space = rig.client.open("two", &other, shape()).unwrap();
        put(&space, &rig.pages, None, &keys(&other, &prompt(1)));
        becomes(|| rig.client.stat().unwrap().object_written == 20);
        assert_eq!(space.clear().unwrap(), 4);
        // Put again, it is there again.
        put(&space, &rig.pages, None, &keys(&other, &prompt(2)));
        becomes(|| rig.client.stat().unwrap().object_written == 24);
        sent(&rig);
    }
    let rig = rig_with(small(&bucket), None);
    opened(&rig);
    let left: Vec<usize> = (0..4).map(|number| rig.get(&prompt(number))).collect();
    assert_eq!(left, [4, 1, 4, 4]);
    let space = rig.client.open("two", &other, shape()).unwrap();
    assert_eq!(get(&space, &rig.pages, &keys(&other, &prompt(1))), 0);
    assert_eq!(get(&space, &rig.pages, &keys(&other, &prompt(2))), 4);
}

#[test]
fn objects_of_which_nothing_is_left_go() {
    let bucket = Bucket::new();
    let rig = rig_with(small(&bucket), None);
    put_all(&rig, 0..PROMPTS);
    let before = bucket.objects().len();
    assert!(before >= 20, "{before} objects");
    for number in 0..PROMPTS {
        assert_eq!(rig.space.remove(&rig.keys(&prompt(number))[..1]).unwrap(), 4);
    }
    becomes(|| bucket.objects().len() <= 2);
    drop(rig);
    let rig = rig_with(small(&bucket), None);
    opened(&rig);
    assert_eq!((rig.client.stat().unwrap().blocks, there(&rig)), (0, 0));
}

#[test]
fn what_was_removed_one_by_one_takes_few_objects_and_stays_gone() {
    const MOST: u32 = 40;
    let (bucket, mut random) = (Bucket::new(), Random::new());
    // One that stays, so that no object with removals is the oldest.
    let mut there = vec![0];
    {
        let rig = rig_with(small(&bucket), None);
        put_all(&rig, 0..1);
        for turn in 0..200 {
            let number = 1 + random.below(u64::from(MOST)) as u32;
            let before = rig.client.stat().unwrap().object_written;
            // Some are removed while they are gathered, some are put again.
            if rig.put(&prompt(number)).stored == 4 && turn % 3 > 0 {
                becomes(|| rig.client.stat().unwrap().object_written >= before + 4);
            }
            there.retain(|other| *other != number);
            match random.below(4) {
                0 => there.push(number),
                _ => assert_eq!(rig.space.remove(&rig.keys(&prompt(number))[..1]).unwrap(), 4),
            }
        }
        // What is there is in an object or two each, and all that were removed are in a few.
        becomes(|| bucket.objects().len() <= 2 * there.len() + 12);
        for number in 0..=MOST {
            assert_eq!(rig.get(&prompt(number)), if there.contains(&number) { 4 } else { 0 }, "{number}");
        }
        sent(&rig);
    }
    let rig = rig_with(small(&bucket), None);
    opened(&rig);
    for number in 0..=MOST {
        let gone = !there.contains(&number);
        assert!(!gone || rig.get(&prompt(number)) == 0, "prompt {number} was removed");
    }
    assert_eq!(rig.get(&prompt(0)), 4);
}

#[test]
fn it_takes_no_more_than_it_may() {
    let bucket = Bucket::new();
    let rig = rig_with(ObjectOptions { size: 1 << 20, ..small(&bucket) }, None);
    put_all(&rig, 0..PROMPTS);
    becomes(|| value(&rig, "bytes") <= 1 << 20 && rig.client.stat().unwrap().dropped > 0);
    assert!(there(&rig) < 4 * PROMPTS as usize);
    // The youngest are those that stay.
    assert_eq!(rig.get(&prompt(PROMPTS - 1)), 4);
    assert_eq!(rig.client.stat().unwrap().corrupt, 0);
}

/// Nothing of memory, which would answer for the object store.
fn forgotten(bucket: &Arc<Bucket>, object: ObjectOptions) -> Rig {
    {
        let rig = rig_with(small(bucket), None);
        put_all(&rig, 0..PROMPTS);
    }
    let rig = rig_with(object, None);
    opened(&rig);
    rig
}

#[test]
fn a_store_that_lies_gives_misses_and_never_other_bytes() {
    for meddling in [Meddling::Truncates, Meddling::Swaps, Meddling::Flips] {
        let bucket = Bucket::new();
        let rig = forgotten(&bucket, small(&bucket));
        bucket.set(meddling);
        // `get` compares every byte of what it is given. Of a run that is cut short the first blocks may be whole.
        let found = there(&rig);
        let (counts, damaged) = (rig.client.stat().unwrap(), value(&rig, "quarantined_records_total"));
        println!("{meddling:?}: {found} blocks found, {damaged} damaged");
        assert!(found < 4 * PROMPTS as usize && damaged > 0, "{meddling:?}");
        assert!(meddling == Meddling::Truncates || found == 0, "{meddling:?}: {found}");
        assert_eq!(counts.hits, found as u64);
        // A get ends with the first block that is missing, and those behind it are entered a moment later.
        becomes(|| rig.client.stat().unwrap().corrupt == value(&rig, "quarantined_records_total"));
        assert_eq!(counts.misses, 4 * u64::from(PROMPTS) - found as u64);
        // The store goes on, and takes them again.
        bucket.set(Meddling::None);
        put(&rig.space, &rig.pages, None, &rig.keys(&prompt(1)));
        assert_eq!(rig.get(&prompt(1)), 4);
    }
}

#[test]
fn an_object_that_was_changed_or_cut_is_not_used_after_a_restart() {
    let bucket = Bucket::new();
    {
        let rig = rig_with(small(&bucket), None);
        put_all(&rig, 0..PROMPTS);
    }
    let names = bucket.objects();
    for (at, name) in names.iter().enumerate() {
        let stored = |bytes: Vec<u8>| {
            let put = bucket.inner.put(name, bytes.into());
            futures_util::FutureExt::now_or_never(put).unwrap().unwrap();
        };
        let read = async { bucket.inner.get(name).await.unwrap().bytes().await.unwrap() };
        let mut bytes = futures_util::FutureExt::now_or_never(read).unwrap().to_vec();
        let last = bytes.len() - 1;
        match at % 3 {
            0 => stored(bytes[..last / 2].to_vec()),
            1 => {
                bytes[last] ^= 1;
                stored(bytes);
            }
            _ => {}
        }
    }
    let rig = rig_with(small(&bucket), None);
    opened(&rig);
    let (found, damaged) = (there(&rig), value(&rig, "quarantined_records_total"));
    println!("{found} blocks of {} objects, {damaged} of them damaged", names.len());
    assert_eq!(damaged as usize, names.len().div_ceil(3) + (names.len() + 1) / 3);
    assert!(found > 0 && found < 4 * PROMPTS as usize);
    assert_eq!(rig.client.stat().unwrap().corrupt, 0);
}

#[test]
fn an_empty_object_keeps_no_other_one_from_being_used() {
    let bucket = Bucket::new();
    put_all(&rig_with(small(&bucket), None), 0..3);
    // As a disk without power leaves a file.
    let empty = object_store::path::Path::from("kv/a/0000009999.kvik");
    futures_util::FutureExt::now_or_never(bucket.inner.put(&empty, Vec::new().into())).unwrap().unwrap();
    let rig = rig_with(small(&bucket), None);
    opened(&rig);
    assert_eq!(rig.client.stat().unwrap().blocks, 12);
    assert_eq!((value(&rig, "quarantined_records_total"), value(&rig, "failures_total")), (1, 0));
}

#[test]
fn objects_that_are_cut_short_close_the_store_for_no_other_one() {
    let bucket = Bucket::new();
    let rig = forgotten(&bucket, small(&bucket));
    for name in &bucket.objects()[..6] {
        let put = bucket.inner.put(name, vec![0].into());
        futures_util::FutureExt::now_or_never(put).unwrap().unwrap();
    }
    let found = there(&rig);
    assert!(found > 0 && found < 4 * PROMPTS as usize, "{found}");
    assert_eq!((value(&rig, "shut"), value(&rig, "failures_total")), (0, 0));
}

#[test]
fn objects_that_are_refused_close_the_store_for_no_other_one() {
    let bucket = Bucket::new();
    let rig = forgotten(&bucket, small(&bucket));
    // As those that were archived. The others are read last.
    let names = bucket.objects();
    let refused: Vec<String> = names[..names.len() - 2].iter().map(|name| name.to_string()).collect();
    bucket.refused.lock().unwrap().extend(refused);
    let found = there(&rig);
    assert!(found > 0 && found < 4 * PROMPTS as usize, "{found}");
    assert_eq!((value(&rig, "shut"), rig.client.stat().unwrap().corrupt), (0, 0));
    // What is not given is taken again when it is put again.
    rig.put(&prompt(1));
    assert_eq!(rig.get(&prompt(1)), 4);
    drop(rig);
    let rig = rig_with(small(&bucket), None);
    opened(&rig);
    assert!(there(&rig) > 0);
    drop(rig);
    // Who is refused everything does not go on asking.
    bucket.refused.lock().unwrap().clear();
    let rig = rig_with(small(&bucket), None);
    opened(&rig);
    bucket.refused.lock().unwrap().extend([".kvik".into(), "owner".into()]);
    assert_eq!((there(&rig), value(&rig, "shut")), (0, 1));
}

#[test]
fn a_store_that_lets_nothing_be_written_is_read_on() {
    let bucket = Bucket::new();
    let rig = forgotten(&bucket, small(&bucket));
    bucket.set(Meddling::Full);
    assert_eq!(rig.put(&prompt(500)).stored, 4);
    becomes(|| value(&rig, "failures_total") >= 4);
    assert_eq!((value(&rig, "shut"), there(&rig)), (0, 4 * PROMPTS as usize));
    bucket.set(Meddling::None);
    sent(&rig);
}

#[test]
fn a_store_that_lets_nothing_be_removed_is_read_on_and_grows_no_more() {
    const SIZE: u64 = 1 << 20;
    let bucket = Bucket::new();
    let rig = rig_with(ObjectOptions { size: SIZE, ..small(&bucket) }, None);
    put_all(&rig, 0..16);
    bucket.set(Meddling::Keeps);
    let mut number = 100;
    becomes(|| {
        number += 1;
        rig.put(&prompt(number));
        value(&rig, "failures_total") >= 6
    });
    assert_eq!(value(&rig, "shut"), 0);
    for more in 0..PROMPTS {
        rig.put(&prompt(1000 + more));
    }
    let tries = value(&rig, "failures_total");
    becomes(|| value(&rig, "failures_total") >= tries + 2);
    let bytes = value(&rig, "bytes");
    assert!(bytes > SIZE && bytes <= SIZE + (256 << 10), "{bytes}");
    bucket.set(Meddling::None);
    becomes(|| value(&rig, "bytes") <= SIZE);
    sent(&rig);
    put_all(&rig, 2000..2002);
}

#[test]
fn a_store_that_fails_is_left_alone_and_met_again() {
    let bucket = Bucket::new();
    let rig = forgotten(&bucket, small(&bucket));
    bucket.set(Meddling::Fails);
    let found = there(&rig);
    assert_eq!((found, value(&rig, "shut")), (0, 1));
    let asked = bucket.reads.load(Ordering::Relaxed);
    assert!(asked < 100, "{asked} reads of a store that fails");
    // Memory goes on, and so do puts.
    assert_eq!(rig.put(&prompt(500)).stored, 4);
    assert_eq!(rig.get(&prompt(500)), 4);
    // What is only there is taken again when it is put again.
    becomes(|| {
        rig.put(&prompt(7));
        rig.get(&prompt(7)) == 4
    });
    bucket.set(Meddling::None);
    becomes(|| rig.get(&prompt(3)) == 4);
    assert_eq!(there(&rig), 4 * PROMPTS as usize);
    assert_eq!(rig.client.stat().unwrap().corrupt, 0);
    sent(&rig);
}

#[test]
fn a_store_that_lets_nothing_be_written_over_fails_and_is_met_again() {
    let bucket = Bucket::new();
    let rig = rig_with(small(&bucket), None);
    opened(&rig);
    bucket.set(Meddling::Conflicts);
    assert_eq!(rig.put(&prompt(1)).stored, 4);
    becomes(|| value(&rig, "failures_total") > 0);
    bucket.set(Meddling::None);
    becomes(|| value(&rig, "shut") == 0);
    put_all(&rig, 2..3);
}

#[test]
fn a_store_that_hangs_keeps_nobody_from_what_is_in_memory() {
    let bucket = Bucket::new();
    let rig = forgotten(&bucket, ObjectOptions { patience: Duration::from_secs(600), ..small(&bucket) });
    rig.put(&prompt(500));
    bucket.set(Meddling::Hangs);
    let over = AtomicU32::new(0);
    std::thread::scope(|scope| {
        // More of them than the store has threads for requests. A few wait; for the others there is no room to bring them.
        let waiting: Vec<_> = (0..24)
            .map(|number| {
                let (space, pages) = (&rig.space, Pages::new(&rig.engine, 4, shape()));
                let (keys, over) = (rig.keys(&prompt(number)), &over);
                scope.spawn(move || {
                    let limit = Some(Duration::from_secs(15));
                    let got = space.get(&keys, &pages.set(&[0, 1, 2, 3]), limit).unwrap().wait();
                    over.fetch_add(1, Ordering::Relaxed);
                    got
                })
            })
            .collect();
        becomes(|| bucket.reads.load(Ordering::Relaxed) > 0);
        for _ in 0..20 {
            assert_eq!(rig.get(&prompt(500)), 4);
        }
        assert!(over.load(Ordering::Relaxed) < 24, "some were to be still on their way");
        let got: Vec<_> = waiting.into_iter().map(|one| one.join().unwrap()).collect();
        assert!(got.iter().all(|got| matches!(got, Ok(0))), "a miss each, by its deadline: {got:?}");
    });
}

#[test]
fn a_dead_store_keeps_no_server_from_starting() {
    for meddling in [Meddling::Fails, Meddling::Hangs] {
        let bucket = Bucket::new();
        bucket.set(meddling);
        let rig = rig_with(small(&bucket), None);
        assert_eq!((rig.put(&prompt(1)).stored, rig.get(&prompt(1)), value(&rig, "open")), (4, 4, 0));
        let error = rig.space.remove(&rig.keys(&prompt(1))).expect_err("it may be in the object store");
        assert_eq!(error.code, kvik_core::Code::DeadlineExceeded, "{error}");
        assert_eq!(rig.get(&prompt(1)), 0);
        bucket.set(Meddling::None);
        if meddling == Meddling::Fails {
            opened(&rig);
            put_all(&rig, 1..2);
        }
    }
}

#[test]
fn who_comes_last_has_the_prefix() {
    let bucket = Bucket::new();
    let first = rig_with(small(&bucket), None);
    put_all(&first, 0..4);
    let second = rig_with(small(&bucket), None);
    opened(&second);
    let before = bucket.objects();
    // It notices before it writes, and serves what it has.
    first.put(&prompt(100));
    becomes(|| value(&first, "unsent_bytes") == 0 && first.client.stat().unwrap().object_written >= 20);
    assert_eq!(bucket.objects(), before);
    assert_eq!((first.get(&prompt(100)), first.get(&prompt(2))), (4, 4));
    put_all(&second, 200..210);
    assert_eq!((second.get(&prompt(2)), second.get(&prompt(205)), second.get(&prompt(100))), (4, 4, 0));
}

#[test]
fn what_a_killed_server_was_sending_keeps_nobody_from_writing() {
    let other = Bucket::new();
    put_all(&rig_with(small(&other), None), 0..1);
    let name = other.objects().remove(0);
    let read = async { other.inner.get(&name).await.unwrap().bytes().await.unwrap() };
    let whole = futures_util::FutureExt::now_or_never(read).unwrap();
    // All of it, and a part of it that is shorter than any end.
    for late in [whole.clone(), whole.slice(..40)] {
        let bucket = Bucket::new();
        {
            let rig = rig_with(small(&bucket), None);
            opened(&rig);
            // The names are listed: it comes under the one that is next.
            let put = bucket.inner.put(&name, late.into());
            futures_util::FutureExt::now_or_never(put).unwrap().unwrap();
            put_all(&rig, 1..4);
            assert_eq!(value(&rig, "failures_total"), 0);
            assert_eq!(rig.space.remove(&rig.keys(&prompt(3))).unwrap(), 4);
        }
        let rig = rig_with(small(&bucket), None);
        opened(&rig);
        let left: Vec<usize> = (0..4).map(|number| rig.get(&prompt(number))).collect();
        assert_eq!(left, [0, 4, 4, 0]);
    }
}
