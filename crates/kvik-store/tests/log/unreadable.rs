//! A block, or the head of a record, that a disk does not give any more, in a segment that is to make room.

use crate::basics::Dir;
use crate::blocks::*;
use crate::owner::Index;
use kvik_core::Code;
use kvik_store::{BlockKey, Directory, Files, Log, LogFile, LogOptions, MemoryRange, Place, Tier};
use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What a disk does not do.
#[derive(Default)]
struct Bad {
    /// It does not give the record at this place.
    record: Mutex<Option<Place>>,
    syncs: AtomicBool,
}

struct Spoiled {
    files: Directory,
    bad: Arc<Bad>,
}

struct SpoiledFile {
    file: Arc<dyn LogFile>,
    name: String,
    bad: Arc<Bad>,
}

fn failed() -> io::Error {
    io::Error::other("a bad sector")
}

fn name_of(place: Place) -> String {
    format!("{:010}.kvik", place.0 >> 32)
}

fn offset_of(place: Place) -> u64 {
    (place.0 & u64::from(u32::MAX)) * 64
}

impl Spoiled {
    fn file(&self, name: &str, file: Arc<dyn LogFile>) -> Arc<dyn LogFile> {
        Arc::new(SpoiledFile { file, name: name.to_owned(), bad: self.bad.clone() })
    }
}

impl Files for Spoiled {
    fn name(&self) -> String {
        self.files.name()
    }

    fn read_only(&self) -> bool {
        false
    }

    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        self.files.list()
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(self.file(name, self.files.create(name)?))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(self.file(name, self.files.open(name)?))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.files.remove(name)
    }

    fn sync(&self) -> io::Result<()> {
        self.files.sync()
    }
}

impl LogFile for SpoiledFile {
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn allocate(&self, bytes: u64) -> io::Result<()> {
        self.file.allocate(bytes)
    }

    fn truncate(&self, bytes: u64) -> io::Result<()> {
        self.file.truncate(bytes)
    }

    fn write(&self, offset: u64, head: &[u8], body: Option<MemoryRange<'_>>) -> io::Result<()> {
        self.file.write(offset, head, body)
    }

    fn read(&self, offset: u64, head: &mut [u8], body: Option<MemoryRange<'_>>) -> io::Result<usize> {
        let bad = *self.bad.record.lock().unwrap();
        if bad.is_some_and(|place| name_of(place) == self.name && offset_of(place) == offset) {
            return Err(failed());
        }
        self.file.read(offset, head, body)
    }

    fn sync(&self) -> io::Result<()> {
        if self.bad.syncs.load(Ordering::SeqCst) { Err(failed()) } else { self.file.sync() }
    }
}

fn open(dir: &Dir, bad: &Arc<Bad>, index: &Arc<Index>, unreadable: Duration) -> Log {
    let options =
        LogOptions { segment: Some(256 << 10), unsynced: 256 << 10, unreadable, ..LogOptions::new(3 << 20) };
    let files = Spoiled { files: Directory::open(&dir.0).unwrap(), bad: bad.clone() };
    Log::open_on(Box::new(files), options, index.clone()).unwrap()
}

fn store(log: &Log, index: &Index, number: u64) -> kvik_core::Result<()> {
    let block = Block::new(number, 0, shape(7));
    index.put(block.identity(), block.store(log)?);
    let usage = log.usage();
    assert!(usage.bytes <= usage.capacity, "{usage:?}");
    Ok(())
}

/// An index that wants the first two blocks wherever they lie, which it says once of each place.
fn wanting() -> Arc<Index> {
    let asked: Mutex<HashSet<(BlockKey, Place)>> = Mutex::default();
    let wanted = [Block::key(0), Block::key(1)];
    let keep = move |known: &crate::owner::Known, key: &BlockKey| {
        let place = known.blocks[key].1;
        wanted.contains(key) && asked.lock().unwrap().insert((*key, place))
    };
    Index::telling(keep, |_| ())
}

/// A log of which the second block, that is wanted, cannot be read, and that needs the room of its segment.
fn spoiled(dir: &Dir, unreadable: Duration) -> (Arc<Bad>, Arc<Index>, Log, u64) {
    let (bad, index) = (Arc::new(Bad::default()), wanting());
    let log = open(dir, &bad, &index, unreadable);
    (0..2).for_each(|number| store(&log, &index, number).unwrap());
    *bad.record.lock().unwrap() = index.find(&Block::key(1)).map(|(_, place)| place);
    let refused = (2..200).find(|number| store(&log, &index, *number).is_err());
    (bad, index, log, refused.expect("no room can be made"))
}

#[test]
fn a_block_that_cannot_be_read_for_a_while_is_kept_within_the_capacity() {
    let dir = Dir::new("unreadable");
    let (bad, index, log, mut number) = spoiled(&dir, Duration::from_secs(60));
    let dropped = log.usage().dropped;
    for _ in 0..20 {
        let error = store(&log, &index, number).unwrap_err();
        assert_eq!(log.usage().dropped, dropped, "nothing went");
        assert!(error.code == Code::StorageFailed && error.text.contains("reading segment"), "{error}");
        let usage = log.usage();
        assert!(usage.bytes <= usage.capacity, "{usage:?}");
    }
    let before = index.find(&Block::key(1)).expect("it is wanted").1;
    *bad.record.lock().unwrap() = None;
    while index.find(&Block::key(1)).expect("it is wanted").1 == before {
        store(&log, &index, number).unwrap();
        number += 1;
        assert!(number < 1000, "no room was made");
    }
    for wanted in 0..2 {
        let (identity, place) = index.find(&Block::key(wanted)).expect("it is wanted");
        let bytes = load(&log, place, &identity).unwrap().unwrap();
        assert!(bytes == Block::new(wanted, 0, shape(7)).bytes());
    }
}

/// After a while, in which a disk may come back.
#[test]
fn a_block_that_is_never_read_again_is_given_up_alone() {
    let dir = Dir::new("given-up");
    let (_bad, index, log, first) = spoiled(&dir, Duration::from_secs(2));
    let (mut number, until) = (first, Instant::now() + Duration::from_secs(60));
    // Three times the capacity.
    while number < first + 150 {
        match store(&log, &index, number) {
            Ok(()) => number += 1,
            Err(error) => {
                assert!(error.code == Code::StorageFailed && Instant::now() < until, "{error}");
                let usage = log.usage();
                assert!(usage.bytes <= usage.capacity, "{usage:?}");
                // Nothing happens but that time passes.
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
    assert!(index.find(&Block::key(1)).is_none() && index.known().dropped.contains(&Block::key(1)));
    let (identity, place) = index.find(&Block::key(0)).expect("it is wanted, and can be read");
    assert!(load(&log, place, &identity).unwrap().is_some());
}

#[test]
fn a_block_whose_record_is_damaged_goes_with_its_segment() {
    let dir = Dir::new("passed-over");
    let (bad, index) = (Arc::new(Bad::default()), Index::keeping(|_| false));
    let log = open(&dir, &bad, &index, Duration::from_secs(60));
    store(&log, &index, 0).unwrap();
    let place = index.find(&Block::key(0)).unwrap().1;
    log.sync(&[place], LONG).unwrap();
    // Its segment has no footer then: what is in it is looked for. The disk is bad before the block is stored: the log may
    // sync it unasked, a second later or while it ends the sync before.
    bad.syncs.store(true, Ordering::SeqCst);
    store(&log, &index, 1).unwrap();
    log.sync(&[index.find(&Block::key(1)).unwrap().1], LONG).unwrap_err();
    bad.syncs.store(false, Ordering::SeqCst);
    let path = dir.0.join(name_of(place));
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[offset_of(place) as usize] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    for number in 2.. {
        store(&log, &index, number).unwrap();
        if !path.exists() {
            break;
        }
        assert!(number < 1000, "no room was made");
    }
    assert!(
        (0..2).all(|number| index.find(&Block::key(number)).is_none()),
        "a block of a segment that is gone"
    );
}
