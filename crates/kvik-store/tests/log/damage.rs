//! Files that are not what the log wrote: a miss or an error, and never a wrong block.

use crate::blocks::*;
use crate::disk::{Contents, Disk};
use crate::owner::Index;
use kvik_core::{Code, page_sum};
use kvik_store::{Log, LogOptions, Tier};

const BLOCKS: u64 = 40;
/// Bytes of a record's head without sums.
const HEAD: usize = 144;

fn options() -> LogOptions {
    LogOptions { segment: Some(128 << 10), ..LogOptions::new(4 << 20) }
}

/// A log of a few segments. With `closed` all have a footer, without the last one has none.
fn written(closed: bool) -> Contents {
    let disk = Disk::default();
    let log = Log::open_on(Box::new(disk.clone()), options(), Index::all()).unwrap();
    for number in 0..BLOCKS {
        let place = Block::new(number, 0, shape(number)).store(&log).unwrap();
        log.sync(&[place], LONG).unwrap();
    }
    let gone = log.remove(&Block::key(0), LONG).unwrap();
    log.sync(&[gone], LONG).unwrap();
    let contents = disk.contents();
    drop(log);
    if closed { disk.contents() } else { contents }
}

fn segments(contents: &Contents) -> Vec<String> {
    contents.names.keys().cloned().collect()
}

/// Opens what is there, and loads all that is found: right, or an error that says where. Gives how many were right.
fn served(contents: Contents, context: &str) -> u64 {
    let index = Index::all();
    let disk = Disk::holding(contents);
    let log = Log::open_on(Box::new(disk.clone()), options(), index.clone())
        .unwrap_or_else(|error| panic!("{context}: {error:?}"));
    let mut right = 0;
    let known: Vec<_> = index.known().blocks.values().copied().collect();
    for (identity, place) in known {
        match load(&log, place, &identity) {
            Ok(bytes) => {
                let bytes = bytes.unwrap_or_else(|| panic!("{context}: no place"));
                let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                let block = Block::new(number, 0, shape(number));
                assert!(identity == block.identity() && bytes == block.bytes(), "{context}: a wrong block");
                right += 1;
            }
            Err(error) => {
                assert!(
                    error.code == Code::ChecksumMismatch
                        && error.text.contains("segment")
                        && error.text.contains("byte"),
                    "{context}: {error:?}"
                );
                assert!(log.usage().quarantined > 0);
            }
        }
    }
    right
}

/// A log over what is there goes on taking blocks, and finds them again.
fn goes_on(contents: Contents, context: &str) {
    let disk = Disk::holding(contents);
    let log = Log::open_on(Box::new(disk.clone()), options(), Index::all()).unwrap();
    let block = Block::new(1000, 0, shape(3));
    let place = block.store(&log).unwrap();
    log.sync(&[place], LONG).unwrap();
    drop(log);
    let again = Index::all();
    let log = Log::open_on(Box::new(disk), options(), again.clone()).unwrap();
    let (identity, place) = again.find(&Block::key(1000)).unwrap_or_else(|| panic!("{context}: lost"));
    assert!(load(&log, place, &identity).unwrap().unwrap() == block.bytes(), "{context}");
}

/// Where records begin in a file, with the bytes of head and body.
fn records(file: &[u8]) -> Vec<(usize, usize, usize)> {
    let starts = (64..file.len() - 64).step_by(64).filter(|at| file[*at..].starts_with(b"KREC"));
    starts
        .map(|at| {
            let head = 8 * usize::from(u16::from_le_bytes([file[at + 6], file[at + 7]]));
            let body = u64::from_le_bytes(file[at + 16..at + 24].try_into().unwrap()) as usize;
            (at, head, body)
        })
        .collect()
}

#[test]
fn whole_files_give_every_block() {
    for closed in [true, false] {
        let contents = written(closed);
        assert!(segments(&contents).len() >= 3, "{:?}", contents.names);
        assert_eq!(served(contents, "whole"), BLOCKS - 1);
    }
}

#[test]
fn a_flipped_bit_in_a_record_is_a_miss() {
    let base = seed();
    let mut rng = Rng(base);
    for closed in [true, false] {
        let contents = written(closed);
        let name = segments(&contents)[if closed { 0 } else { segments(&contents).len() - 2 }].clone();
        let file = contents.clone().named(&name).clone();
        let (mut blocks, mut flips) = (0, 0);
        for (at, head, body) in records(&file) {
            // Every byte of the heads of some blocks (of what fills a page, a sample), and a sample of their bodies.
            if file[at + 4] != 1 || blocks == 3 || file[at + 40..at + 72] == Block::key(0).0 {
                continue;
            }
            blocks += 1;
            let every = at..at + head.min(168);
            let sampled: Vec<_> = (0..30).map(|_| at + rng.below((head + body) as u64) as usize).collect();
            for byte in every.chain(sampled) {
                let mut flipped = contents.clone();
                flipped.named(&name)[byte] ^= 1 << rng.below(8);
                let context = format!("KVIK_SEED={base} byte {} of a record, closed {closed}", byte - at);
                assert_eq!(served(flipped, &context), BLOCKS - 2, "{context}: 1 is a miss, and no more");
                flips += 1;
            }
        }
        println!("{flips} flips in records, each a miss");
        assert_eq!(blocks, 3);
    }
}

#[test]
fn damage_anywhere_serves_nothing_wrong() {
    let base = seed();
    let mut rng = Rng(base);
    for round in 0..200u64 {
        let closed = round % 2 == 0;
        let mut contents = written_once(closed);
        let names = segments(&contents);
        let name = names[rng.below(names.len() as u64) as usize].clone();
        let context = format!("KVIK_SEED={base} round {round} of {name}");
        let file = contents.named(&name);
        let at = rng.below(file.len() as u64) as usize;
        match round % 5 {
            // Of the edges and of the footer, where flips are rare otherwise.
            0 => file[at % 64] ^= 1 << rng.below(8),
            1 => {
                let from = file.len() - 1 - rng.below(2000.min(file.len() as u64)) as usize;
                file[from] ^= 1 << rng.below(8);
            }
            2 => file.truncate(at),
            3 => file[at..].fill(0),
            _ => {
                let to = (at + rng.below(5000) as usize).min(file.len());
                file[at..to].iter_mut().for_each(|byte| *byte = rng.next() as u8);
            }
        }
        served(contents.clone(), &context);
        goes_on(contents, &context);
    }
}

/// As [`written`], made once.
fn written_once(closed: bool) -> Contents {
    static MADE: std::sync::OnceLock<[Contents; 2]> = std::sync::OnceLock::new();
    MADE.get_or_init(|| [written(false), written(true)])[usize::from(closed)].clone()
}

#[test]
fn files_that_are_cut_at_any_field_lose_no_more_than_what_is_cut() {
    for closed in [true, false] {
        let contents = written(closed);
        let name = segments(&contents)[0].clone();
        let file = contents.clone().named(&name).clone();
        let edges = [0, 8, 12, 16, 20, 24, 40, 56, 63, 64, file.len() - 64, file.len() - 8, file.len() - 1];
        let fields = [0, 4, 5, 6, 8, 16, 24, 28, 32, 40, 72, 104, 136, HEAD, HEAD + 8];
        let of_records = records(&file).into_iter().take(6);
        let cuts = of_records.flat_map(|(at, head, body)| {
            fields.into_iter().map(move |field| at + field).chain([at + head + body / 2, at + head + body])
        });
        for cut in cuts.chain(edges) {
            let mut cut_off = contents.clone();
            cut_off.named(&name).truncate(cut);
            let right = served(cut_off, &format!("cut at {cut}, closed {closed}"));
            let blocks = |file: &[u8]| {
                records(file)
                    .iter()
                    .filter(|(at, ..)| file[at + 4] == 1)
                    .map(|(at, h, b)| at + h + b)
                    .collect::<Vec<_>>()
            };
            let whole = blocks(&file).iter().filter(|end| **end <= cut).count() as u64;
            let before = blocks(&file).len() as u64;
            // Below the header's end the file is none of the log's, but for a trailer, which is cut off.
            let expected = if cut < 64 { BLOCKS - 1 - (before - 1) } else { BLOCKS - 1 - (before - whole) };
            // The block that was removed is the first of the file.
            let expected = if (64..blocks(&file)[0]).contains(&cut) { expected + 1 } else { expected };
            assert_eq!(right, expected, "cut at {cut}, closed {closed}");
        }
    }
}

#[test]
fn segments_under_other_names_are_nobodys() {
    for closed in [true, false] {
        let contents = written(closed);
        let names = segments(&contents);
        let mut swapped = contents.clone();
        let (a, b) = (swapped.names[&names[0]], swapped.names[&names[1]]);
        swapped.names.insert(names[0].clone(), b);
        swapped.names.insert(names[1].clone(), a);
        let right = served(swapped, "swapped");
        assert!(right < BLOCKS - 1, "{right} blocks of segments whose names were swapped");
        // Of another log: same numbers, other seeds; and records of one in the other.
        let mut mixed = contents.clone();
        let other = written(closed).named(&names[0]).clone();
        let tail = other.len().min(mixed.named(&names[0]).len()) / 2;
        mixed.named(&names[0])[tail..other.len()].copy_from_slice(&other[tail..]);
        assert!(served(mixed, "half of another log's") < BLOCKS - 1);
    }
}

#[test]
fn foreign_files_are_left_as_they_are() {
    let mut contents = written(true);
    let number = contents.files.len();
    let foreign = b"#!/bin/sh\necho something else\n".repeat(40);
    for (at, name) in ["0000000500.kvik", "notes.txt", "12.kvik"].into_iter().enumerate() {
        contents.names.insert(name.into(), number + at);
        contents.files.push(foreign.clone());
    }
    let disk = Disk::holding(contents);
    let index = Index::all();
    let log = Log::open_on(Box::new(disk.clone()), options(), index.clone()).unwrap();
    assert_eq!(index.known().blocks.len() as u64, BLOCKS - 1);
    assert_eq!(log.usage().quarantined, 1, "only one has a segment's name");
    Block::new(1, 0, shape(1)).store(&log).unwrap();
    drop(log);
    let left = disk.contents();
    assert!(
        (0..3).all(|at| left.files[number + at] == foreign) && left.names.contains_key("0000000500.kvik")
    );
}

#[test]
fn a_newer_format_is_refused_by_name_and_left_untouched() {
    let mut contents = written(false);
    let name = segments(&contents)[1].clone();
    let file = contents.named(&name);
    file[8..12].copy_from_slice(&2u32.to_le_bytes());
    let sum = page_sum(&file[..12]) as u32;
    file[12..16].copy_from_slice(&sum.to_le_bytes());
    let disk = Disk::holding(contents);
    let error = Log::open_on(Box::new(disk.clone()), options(), Index::all()).map(drop).unwrap_err();
    assert_eq!(error.code, Code::StorageFailed);
    for word in ["segment 1", "version 2", "up to 1", "Nothing was changed"] {
        assert!(error.text.contains(word), "{error:?}");
    }
    assert!(disk.history().1.is_empty(), "something was changed");
}

/// Heads with honest sums and lengths that no record has: whoever wrote them knew the seed.
#[test]
fn lengths_beyond_all_bounds_allocate_nothing() {
    let contents = written(false);
    let name = segments(&contents)[0].clone();
    let file = contents.clone().named(&name).clone();
    let seed = file[24..40].to_vec();
    let (at, head, _) = records(&file).into_iter().find(|(at, ..)| file[at + 4] == 1).unwrap();
    let numbers = [u64::MAX, 1 << 63, 1 << 40, 1 << 30, 1 << 20, 65, 0];
    for number in numbers {
        for (field, bytes) in [(6, 2), (16, 8), (24, 4), (28, 4), (32, 8)] {
            let mut forged = contents.clone();
            let record = &mut forged.named(&name)[at..at + head];
            record[field..field + bytes].copy_from_slice(&number.to_le_bytes()[..bytes]);
            let parts = [&seed[..], &record[..136], &record[144..]].concat();
            record[136..144].copy_from_slice(&page_sum(&parts).to_le_bytes());
            served(forged, &format!("{number} at {field}"));
        }
    }
    // And a trailer that lists more than there is.
    let contents = written(true);
    for (field, bytes) in [(20, 4), (40, 8)] {
        for number in numbers {
            let mut forged = contents.clone();
            let file = forged.named(&name);
            let end = file.len() - 64;
            let edge = &mut file[end..];
            edge[field..field + bytes].copy_from_slice(&number.to_le_bytes()[..bytes]);
            let sum = page_sum(&edge[..56]);
            edge[56..].copy_from_slice(&sum.to_le_bytes());
            assert_eq!(served(forged, &format!("trailer: {number} at {field}")), BLOCKS - 1);
        }
    }
}

/// What is stored cannot pass for a record, also where a crash has left nothing before it.
#[test]
fn a_block_full_of_records_is_not_taken_for_records() {
    let disk = Disk::default();
    let log = Log::open_on(Box::new(disk.clone()), options(), Index::all()).unwrap();
    let block = Block::new(4, 0, shape(3));
    let place = block.store(&log).unwrap();
    log.sync(&[place], LONG).unwrap();
    let mut contents = disk.contents();
    let name = segments(&contents)[0].clone();
    let (at, head, body) = *records(contents.named(&name)).last().unwrap();
    // The record of another log, which has another seed, at its very place.
    let other = Disk::default();
    let log = Log::open_on(Box::new(other.clone()), options(), Index::all()).unwrap();
    let same = block.store(&log).unwrap();
    log.sync(&[same], LONG).unwrap();
    assert_eq!(place, same);
    let record = other.contents().named(&name)[at..at + head + body].to_vec();
    contents.named(&name)[at..at + head + body].copy_from_slice(&record);
    let index = Index::all();
    let _log = Log::open_on(Box::new(Disk::holding(contents)), options(), index.clone()).unwrap();
    assert!(index.known().blocks.is_empty(), "a record of another log was taken");
}
