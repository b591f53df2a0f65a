//! What a log keeps on a real disk.

use crate::blocks::*;
use crate::owner::Index;
use kvik_core::Code;
use kvik_host::{HugePages, Memory};
use kvik_store::{Entry, Log, LogOptions, Place, Shape, Tier};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A directory that goes away.
pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new(name: &str) -> Dir {
        let base = std::env::var_os("CARGO_TARGET_TMPDIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
        Dir::within(&base, name)
    }

    /// One that other users of the host reach.
    pub fn reachable(name: &str) -> Dir {
        Dir::within(&std::env::temp_dir(), name)
    }

    fn within(base: &Path, name: &str) -> Dir {
        let path = base.join(format!("kvik-log-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Dir(path)
    }

    pub fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(&self.0).unwrap().map(|f| f.unwrap().path()).collect();
        files.retain(|path| path.extension().is_some_and(|end| end == "kvik"));
        files.sort();
        files
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn options() -> LogOptions {
    LogOptions { segment: Some(256 << 10), ..LogOptions::new(4 << 20) }
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_restart_finds_what_was_stored_and_not_what_was_removed() {
    let dir = Dir::new("restart");
    for round in 0..3u64 {
        let index = Index::all();
        let log = Log::open(&dir.0, options(), index.clone()).unwrap();
        for number in 0..40 {
            let block = Block::new(number, round.saturating_sub(1), shape(number));
            let found = index.find(&Block::key(number));
            let is_there = round > 0 && number % 5 != 0 && (number / 4) % 3 != 2;
            assert_eq!(found.is_some(), is_there, "block {number} in round {round}");
            if let Some((identity, place)) = found {
                assert_eq!(identity, block.identity());
                assert_eq!(load(&log, place, &identity).unwrap().unwrap(), block.bytes());
            }
        }
        for number in 0..40 {
            let block = Block::new(number, round, shape(number));
            let place = block.store(&log).unwrap();
            index.put(block.identity(), place);
            assert_eq!(
                load(&log, place, &block.identity()).unwrap().unwrap(),
                block.bytes(),
                "before a sync"
            );
            log.sync(&[place], LONG).unwrap();
        }
        for number in (0..40).step_by(5) {
            let gone = log.remove(&Block::key(number), LONG).unwrap();
            log.sync(&[gone], LONG).unwrap();
        }
        log.remove_namespace(&namespace(2), LONG).unwrap();
        assert_eq!(log.usage().failures + log.usage().quarantined, 0);
        drop(log);
        assert_eq!(mode(&dir.0), 0o700);
        assert!(dir.files().iter().chain([&dir.0.join("LOCK")]).all(|path| mode(path) == 0o600));
    }
}

#[test]
fn what_nobody_waits_for_is_durable_in_its_time() {
    let dir = Dir::new("flush");
    let options = LogOptions { flush: Duration::from_millis(20), ..options() };
    let log = Log::open(&dir.0, options, Index::all()).unwrap();
    Block::new(1, 0, shape(4)).store(&log).unwrap();
    let begun = std::time::Instant::now();
    while log.usage().unsynced > 0 {
        assert!(begun.elapsed() < LONG, "nothing was synced");
        std::thread::yield_now();
    }
    assert!(log.usage().syncs > 0);
}

#[test]
fn what_cannot_be_stored_is_refused_by_name() {
    let dir = Dir::new("refused");
    let log = Log::open(&dir.0, options(), Index::all()).unwrap();
    let memory = Memory::shared(1 << 20, HugePages::Never).unwrap();
    let block = Block::new(0, 0, shape(0));
    let refused = |result: kvik_core::Result<Place>, code, words: &str| {
        let error = result.unwrap_err();
        assert!(error.code == code && error.text.contains(words), "{error:?}");
    };
    refused(log.store(&block.entry(), &memory, 0, LONG), Code::InvalidArgument, "was not declared");
    log.declare(namespace(0), b"").unwrap();
    refused(log.store(&block.entry(), &memory, 1 << 20, LONG), Code::InvalidArgument, "does not lie in");
    let many = Entry { sums: [1, 2].into(), ..block.entry() };
    refused(log.store(&many, &memory, 0, LONG), Code::InvalidArgument, "1 checksums, not 2");
    let large = Block::new(0, 0, Shape::new(1, 1, 256 << 10).unwrap());
    refused(
        log.store(&large.entry(), &memory, 0, LONG),
        Code::InvalidArgument,
        "does not fit into a segment",
    );
    assert_eq!(log.declare(namespace(1), &[0; 65537]).unwrap_err().code, Code::InvalidArgument);
    for options in [
        LogOptions::new(1 << 16),
        LogOptions { segment: Some(1 << 20), ..LogOptions::new(4 << 20) },
        LogOptions { unsynced: 0, ..options() },
    ] {
        let error = Log::open(&dir.0, options, Index::all()).map(drop).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument, "{error:?}");
    }
    // A block of another place, and a place where there never was one.
    let place = block.store(&log).unwrap();
    let other = Block::new(1, 0, shape(0));
    for (place, words) in [(place, "has the key"), (Place(place.0 + 1), "beginning is not")] {
        let error = load(&log, place, &other.identity()).unwrap_err();
        assert!(error.code == Code::ChecksumMismatch && error.text.contains(words), "{error:?}");
    }
    assert!(load(&log, place, &block.identity()).is_err(), "what was found wrong once is not served again");
    assert_eq!(load(&log, Place(u64::MAX), &block.identity()).unwrap(), None);
}

#[test]
fn bytes_that_are_not_those_of_their_sums_are_never_given_out() {
    let dir = Dir::new("sums");
    let log = Log::open(&dir.0, options(), Index::all()).unwrap();
    let block = Block::new(7, 0, shape(7));
    let memory = Memory::shared(1 << 17, HugePages::Never).unwrap();
    log.declare(namespace(block.namespace()), b"").unwrap();
    let place = log.store(&block.entry(), &memory, 0, LONG).unwrap();
    let error = load(&log, place, &block.identity()).unwrap_err();
    assert!(error.text.contains("part 0 of 1 does not have its checksum"), "{error:?}");
    assert_eq!(log.usage().quarantined, 1);
}
