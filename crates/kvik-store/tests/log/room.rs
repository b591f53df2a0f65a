//! Making room while others read, within the capacity.

use crate::basics::Dir;
use crate::blocks::*;
use crate::owner::Index;
use kvik_core::Code;
use kvik_store::{Log, LogOptions, Tier};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

fn options() -> LogOptions {
    LogOptions { segment: Some(256 << 10), unsynced: 256 << 10, ..LogOptions::new(3 << 20) }
}

fn descriptors(dir: &Dir) -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    links.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to.starts_with(&dir.0))).count()
}

#[test]
fn room_is_made_under_readers_within_the_capacity() {
    let base = seed();
    let dir = Dir::new("readers");
    // Every tenth block is wanted for good.
    let hot = |number: u64| number.is_multiple_of(10);
    let wanted: std::collections::HashSet<_> =
        (0..2000).filter(|n| hot(*n)).take(40).map(Block::key).collect();
    let index = Index::keeping(move |key| wanted.contains(key));
    let log = Log::open(&dir.0, options(), index.clone()).unwrap();
    let (stop, stored, loaded) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for reader in 0..3 {
            let (log, index, stop, stored, loaded) = (&log, &index, &stop, &stored, &loaded);
            scope.spawn(move || {
                let mut rng = Rng(base + reader);
                while !stop.load(Ordering::SeqCst) {
                    let upper = stored.load(Ordering::SeqCst);
                    let number = if upper == 0 { continue } else { rng.below(upper) };
                    let Some((identity, place)) = index.find(&Block::key(number)) else { continue };
                    match load(log, place, &identity).unwrap() {
                        Some(bytes) => {
                            assert!(
                                bytes == Block::new(number, 0, shape(number)).bytes(),
                                "wrong block {number}"
                            );
                            loaded.fetch_add(1, Ordering::SeqCst);
                        }
                        // Its owner was told before.
                        None => assert_ne!(index.find(&Block::key(number)), Some((identity, place))),
                    }
                }
            });
        }
        for number in 0..2000 {
            let block = Block::new(number, 0, shape(number));
            let place = block.store(&log).unwrap();
            index.put(block.identity(), place);
            stored.store(number + 1, Ordering::SeqCst);
            let usage = log.usage();
            assert!(usage.bytes <= usage.capacity, "{usage:?}");
        }
        stop.store(true, Ordering::SeqCst);
    });
    let usage = log.usage();
    println!("{} loads under {} bytes copied, {} dropped", loaded.into_inner(), usage.copied, usage.dropped);
    assert!(usage.copied > 0 && usage.dropped > 500 && usage.failures + usage.quarantined == 0, "{usage:?}");
    assert!(index.known().moved > 0);
    // What goes does so a moment after the last reader.
    let until = Instant::now() + LONG;
    loop {
        let files = dir.files();
        let bytes: u64 = files.iter().filter_map(|file| Some(std::fs::metadata(file).ok()?.len())).sum();
        let open = descriptors(&dir);
        if bytes <= usage.capacity && files.len() <= 12 && open <= 2 * files.len() + 2 {
            break;
        }
        assert!(Instant::now() < until, "{bytes} bytes in {files:?}, {open} descriptors");
        std::thread::yield_now();
    }
    for number in (0..2000).filter(|n| hot(*n)).take(40) {
        let (identity, place) = index.find(&Block::key(number)).expect("a block that is wanted");
        assert!(
            load(&log, place, &identity).unwrap().unwrap() == Block::new(number, 0, shape(number)).bytes()
        );
    }
    drop(log);
    assert_eq!(descriptors(&dir), 0);
    let again = Index::all();
    let log = Log::open(&dir.0, options(), again.clone()).unwrap();
    for number in (0..2000).filter(|n| hot(*n)).take(40) {
        let (identity, place) = again.find(&Block::key(number)).expect("a block that is wanted");
        assert!(load(&log, place, &identity).unwrap().is_some());
    }
}

#[test]
fn a_log_in_which_everything_is_kept_is_full_until_something_is_not() {
    let dir = Dir::new("full");
    let keep = std::sync::Arc::new(AtomicBool::new(true));
    let keeps = keep.clone();
    let index = Index::keeping(move |_| keeps.load(Ordering::SeqCst));
    let log = Log::open(&dir.0, options(), index.clone()).unwrap();
    let mut last = 0;
    let error = loop {
        let block = Block::new(last, 0, shape(7));
        match block.store(&log) {
            Ok(place) => index.put(block.identity(), place),
            Err(error) => break error,
        }
        last += 1;
        assert!(last < 1000, "more than there is room for");
    };
    assert!(error.code == Code::StorageFull && error.text.contains("is to be kept"), "{error:?}");
    assert!(last * (64 << 10) > 3 << 19, "only {last} blocks had room");
    for number in 0..last {
        let (identity, place) = index.find(&Block::key(number)).expect("what is kept");
        assert!(load(&log, place, &identity).unwrap().is_some());
    }
    let usage = log.usage();
    assert!(usage.dropped == 0 && usage.bytes <= usage.capacity, "{usage:?}");
    keep.store(false, Ordering::SeqCst);
    let begun = Instant::now();
    let block = Block::new(last, 0, shape(7));
    while let Err(error) = block.store(&log) {
        assert!(error.code == Code::StorageFull && begun.elapsed() < LONG, "{error:?}");
        std::thread::yield_now();
    }
}

#[test]
fn restarts_do_not_use_up_the_capacity() {
    let dir = Dir::new("restarts");
    for number in 0..60 {
        let index = Index::all();
        let log = Log::open(&dir.0, options(), index.clone()).unwrap();
        assert_eq!(index.known().blocks.len() as u64, number);
        Block::new(number, 0, shape(0)).store(&log).unwrap();
        assert!(log.usage().bytes < 1 << 20, "{:?}", log.usage());
    }
}

/// Its owner wants a block, and removes it while it is copied: the copy must not come after the removal.
#[test]
fn a_block_that_is_removed_while_it_is_copied_stays_removed() {
    let dir = Dir::new("removed");
    let log: Arc<OnceLock<Log>> = Arc::default();
    let (removes, removed) = (log.clone(), Arc::new(Mutex::new(Vec::new())));
    let gone = removed.clone();
    let index = Index::keeping(move |key| {
        if gone.lock().unwrap().len() == 5 {
            return false;
        }
        removes.get().unwrap().remove(key, LONG).unwrap();
        gone.lock().unwrap().push(*key);
        true
    });
    assert!(log.set(Log::open(&dir.0, options(), index.clone()).unwrap()).is_ok());
    let open = log.get().unwrap();
    for number in 0.. {
        let block = Block::new(number, 0, shape(2));
        index.put(block.identity(), block.store(open).unwrap());
        if removed.lock().unwrap().len() == 5 {
            break;
        }
        assert!(number < 5000, "no room was made");
    }
    // The log and its owner hold each other, so it ends with the process; what it wrote is looked at in a copy.
    let place = Block::new(9000, 0, shape(2)).store(open).unwrap();
    open.sync(&[place], LONG).unwrap();
    let copy = Dir::new("removed-copy");
    std::fs::create_dir(&copy.0).unwrap();
    for file in dir.files() {
        std::fs::copy(&file, copy.0.join(file.file_name().unwrap())).unwrap();
    }
    let again = Index::all();
    let _log = Log::open(&copy.0, options(), again.clone()).unwrap();
    for key in removed.lock().unwrap().iter() {
        assert!(again.find(key).is_none(), "block {key} is back");
    }
}
