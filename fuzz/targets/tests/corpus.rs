//! Every target over the committed corpus, and over mutations of it: the same in every run, with no tool but cargo.
//!
//! `KVIK_FUZZ_SEED` takes another seed, `KVIK_FUZZ_TIMES` multiplies the number of mutations. An input that fails is
//! printed in hexadecimal digits: as a file in `fuzz/corpus/TARGET` it is tried first from then on.

use std::path::Path;

/// The seed of mutations, unless another one is asked for.
const SEED: u64 = 0x6b76_696b;
/// No mutation is longer.
const LONGEST: usize = 4096;

struct Die(u64);

impl Die {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, most: usize) -> usize {
        (self.next() % most.max(1) as u64) as usize
    }
}

/// Prints the input when the target panics.
struct Input<'a> {
    target: &'a str,
    from: String,
    bytes: &'a [u8],
}

impl Drop for Input<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let hex: String = self.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            eprintln!("target {}, {}, input {hex}", self.target, self.from);
        }
    }
}

fn run(target: &str, from: String, bytes: &[u8]) {
    let _input = Input { target, from, bytes };
    kvik_fuzz_targets::run(target, bytes);
}

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus").join(target);
    let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|path| (path.display().to_string(), std::fs::read(path).unwrap())).collect()
}

fn mutated(die: &mut Die, corpus: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = corpus[die.below(corpus.len())].1.clone();
    for _ in 0..=die.below(6) {
        let at = die.below(bytes.len());
        match die.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << die.below(8),
            1 if !bytes.is_empty() => bytes[at] = die.next() as u8,
            2 => bytes.truncate(at),
            3 => bytes.insert(at, die.next() as u8),
            4 => {
                let edge = [0, 1, u64::MAX, 1 << 63, 1 << 31, 1 << 32][die.below(6)];
                let end = (at + [1, 2, 4, 8][die.below(4)]).min(bytes.len());
                bytes[at..end].copy_from_slice(&u64::to_le_bytes(edge)[..end - at]);
            }
            5 => {
                let other = &corpus[die.below(corpus.len())].1;
                bytes.truncate(at);
                bytes.extend(&other[die.below(other.len())..]);
            }
            _ => bytes.extend((0..die.below(64)).map(|_| die.next() as u8)),
        }
    }
    bytes.truncate(LONGEST);
    bytes
}

/// The corpus, and so many mutations of it.
fn check(target: &str, mutations: u64) {
    let corpus = corpus(target);
    assert!(!corpus.is_empty(), "{target} has no corpus");
    run(target, "the empty input".into(), &[]);
    for (file, bytes) in &corpus {
        run(target, file.clone(), bytes);
    }
    let seed = variable("KVIK_FUZZ_SEED", SEED);
    let mut die = Die(seed.max(1));
    for number in 0..mutations * variable("KVIK_FUZZ_TIMES", 1) {
        let bytes = mutated(&mut die, &corpus);
        run(target, format!("seed {seed}, mutation {number}"), &bytes);
    }
}

#[test]
fn frames() {
    check("frame", 20_000);
}

#[test]
fn nodes() {
    check("node", 6_000);
}

#[test]
fn greetings() {
    check("greeting", 6_000);
}

#[test]
fn joins() {
    check("join", 6_000);
}

#[test]
fn chunks() {
    check("chunk", 20_000);
}

#[test]
fn channels() {
    check("channel", 600);
}

#[test]
fn tickets() {
    check("ticket", 20_000);
}

#[test]
fn layouts() {
    check("layout", 20_000);
}

#[test]
fn local_links() {
    check("local", 2_000);
}

#[test]
fn stat_requests() {
    check("stat", 200);
}

#[test]
fn router_bodies() {
    check("router", 10_000);
}

#[test]
fn addresses() {
    check("address", 20_000);
}

#[test]
fn segments() {
    check("segment", 3_000);
}

#[test]
fn store_messages() {
    check("message", 20_000);
}

#[test]
fn every_target_is_here_and_has_a_program() {
    let (tests, manifest) = (include_str!("corpus.rs"), include_str!("../../Cargo.toml"));
    for (target, _) in kvik_fuzz_targets::TARGETS {
        assert!(tests.contains(&format!("check(\"{target}\", ")), "{target} is not tested here");
        assert!(manifest.contains(&format!("name = \"{target}\"")), "{target} is not in fuzz/Cargo.toml");
    }
}

/// Eight bytes of a page list stand for a million pages: they stay eight until their sender was charged for all.
#[test]
fn a_source_of_a_million_pages_costs_what_came() {
    use kvik_core::{Layout, Order, RegionId, View};
    use kvik_proto::{Frame, MAX_PAGES, Source, TravellingView};
    let layout = std::sync::Arc::new(Layout::contiguous(MAX_PAGES as u32, 8).unwrap());
    let view = View::new(layout, (0..MAX_PAGES as u32).collect(), 0..1, 0..1, Order::LayerFirst).unwrap();
    let view = TravellingView::of(&view);
    let source = Source { region: RegionId(1), view, slot: 0, generation: 0, keys: [].into() };
    let mut bytes = Vec::new();
    Frame::Accept { transfer: 2, source: Some(Box::new(source)) }.encode(&mut bytes);
    assert!(bytes.len() < 200);
    let (decoded, held) = kvik_fuzz_targets::most_held(|| Frame::decode(&bytes));
    assert!(held < 4096, "{held} bytes are held for a frame of {}", bytes.len());
    let Ok(Some((Frame::Accept { source: Some(source), .. }, _))) = decoded else { panic!("another frame") };
    assert_eq!(source.view.unfolded(), MAX_PAGES as usize * 4);
    assert_eq!(source.unfold().unwrap().view.pages().len() as u64, MAX_PAGES);
}
