//! Bytes in place, for every shape of memory; and nothing but them.

use crate::common::*;
use crate::pair::{Kind, OPS, Op, Pair, paged_set, whole};
use kvik_core::{Code, Layers, Layout};
use kvik_engine::{PageSet, Region, TransferOptions, Verify};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// One side's elements.
#[derive(Clone)]
struct Side {
    layout: Arc<Layout>,
    ids: Vec<u32>,
    layers: Range<u32>,
    slices: Range<u32>,
    parts: u32,
}

impl Side {
    fn new(layout: Layout, ids: Vec<u32>) -> Side {
        let (layers, slices) = (0..layout.layers(), 0..layout.slices());
        Side { layout: Arc::new(layout), ids, layers, slices, parts: 1 }
    }

    fn set(&self, region: &Region) -> PageSet {
        let (ids, layers) = (self.ids.as_slice().into(), Some(self.layers.clone()));
        let slices = Some(self.slices.clone());
        PageSet::of_parts(region, self.layout.clone(), self.parts, ids, layers, slices).unwrap()
    }

    /// Where the runs of the stream lie, layer by layer: the naive model of what the planner does.
    fn runs(&self) -> Vec<Range<usize>> {
        let run = self.layout.run_bytes() / u64::from(self.parts);
        let mut all = Vec::new();
        for layer in self.layers.clone() {
            for id in &self.ids {
                for slice in self.slices.clone() {
                    let page = self.layout.at(layer, id / self.parts, slice);
                    let start = (page + u64::from(id % self.parts) * run) as usize;
                    all.push(start..start + run as usize);
                }
            }
        }
        all
    }
}

/// Copies one stream onto another, whatever their runs are.
fn copy(given: &[u8], source: &[Range<usize>], expected: &mut [u8], target: &[Range<usize>]) {
    let stream: Vec<u8> = source.iter().flat_map(|run| &given[run.clone()]).copied().collect();
    let mut left = &stream[..];
    for run in target {
        let (now, later) = left.split_at(run.len());
        expected[run.clone()].copy_from_slice(now);
        left = later;
    }
    assert!(left.is_empty(), "the case itself is wrong");
}

fn cases(random: &mut Random) -> Vec<(&'static str, Side, Side)> {
    let plain = |pages, page, ids: Vec<u32>| Side::new(Layout::contiguous(pages, page).unwrap(), ids);
    let strided = |pages: u32, page: u64, slices: u32, run: u64, layers: u32| {
        let stride = u64::from(pages) * page + 640;
        let layers = Layers::Strided { count: layers, stride };
        Layout::new(64, pages, run, page, slices, run, layers).unwrap()
    };
    let mut some = |count, limit| random.distinct(count, limit);
    let mut cases = vec![
        ("one byte", plain(9, 1, vec![7]), plain(5, 1, vec![0])),
        ("one page", plain(8, 16 << 10, vec![5]), plain(8, 16 << 10, vec![2])),
        ("an odd size", plain(40, 4097, some(33, 40)), plain(50, 4097, some(33, 50))),
        ("scattered", plain(3000, 300, some(2500, 3000)), plain(2800, 300, some(2500, 2800))),
        ("more than a chunk a page", plain(2, 1400 << 10, vec![1, 0]), plain(2, 1400 << 10, vec![0, 1])),
        ("unequal pages", plain(64, 8192, some(20, 64)), plain(80, 4096, some(40, 80))),
    ];
    let (wide, narrow) = (strided(20, 8192, 8, 1024, 3), strided(16, 4096, 4, 1024, 3));
    let (mut left, mut right) = (Side::new(wide, some(9, 20)), Side::new(narrow, some(9, 16)));
    (left.slices, right.slices) = (4..8, 0..4);
    cases.push(("slices of wide pages", left.clone(), right));
    (left.layers, left.slices) = (1..3, 0..8);
    let mut right = Side::new(strided(12, 8192, 8, 1024, 5), some(9, 12));
    right.layers = 2..4;
    cases.push(("some layers", left.clone(), right));
    // Pages of 32 tokens there are two of 16 here.
    let mut right = Side::new(strided(30, 4096, 8, 512, 2), some(18, 30));
    left.parts = 2;
    left.ids = left.ids.iter().flat_map(|id| [id * 2 + 1, id * 2]).collect();
    right.layers = 0..2;
    cases.push(("parts of pages", left, right));
    let mixed =
        Layout::new(0, 32, 4096, 24 << 10, 1, 4096, Layers::Strided { count: 5, stride: 4096 }).unwrap();
    let tight =
        Layout::new(0, 40, 4096, 20 << 10, 1, 4096, Layers::Strided { count: 5, stride: 4096 }).unwrap();
    cases.push(("page by page", Side::new(mixed, some(21, 32)), Side::new(tight, some(21, 40))));
    cases
}

pub fn every_byte_lands_where_it_belongs(kind: &'static Kind) {
    let (pair, mut random) = (Pair::new(kind), Random::new());
    for (name, theirs, mine) in cases(&mut random) {
        let there = kind.granted_region(&pair.owner, theirs.layout.end() + 5, 1);
        let here = kind.region(&pair.other, mine.layout.end() + 9, 0x5A);
        let all = [
            (Op::Read, Verify::Off),
            (Op::Read, Verify::Full),
            (Op::Write, Verify::Off),
            (Op::Write, Verify::Full),
        ];
        for (op, verify) in all {
            if verify == Verify::Off {
                fill(if op == Op::Read { &there } else { &here }, random.below(256) as u8);
            }
            let (from, to) = if op == Op::Read { (&there, &here) } else { (&here, &there) };
            blank(to, 0x77);
            let (mut source, mut target) = (theirs.runs(), mine.runs());
            if op == Op::Write {
                std::mem::swap(&mut source, &mut target);
            }
            let (given, mut expected) = (bytes(from), bytes(to));
            copy(&given, &source, &mut expected, &target);
            let moved: usize = target.iter().map(Range::len).sum();
            let grant = pair.grant(op, &theirs.set(&there));
            let options = TransferOptions {
                deadline: Some(PATIENCE),
                verify: Some(verify),
                remote_parts: (theirs.parts > 1).then_some(theirs.parts),
                ..Default::default()
            };
            let set = mine.set(&here);
            let report = pair.begin_with(op, &set, &grant, options).wait(Some(PATIENCE)).unwrap();
            assert_eq!((report.transport.name(), report.bytes), (kind.transport, moved as u64), "{name}");
            assert!(report.mechanism.contains(kind.mechanism), "{name}: {report:?}");
            assert_eq!(report.checks.contains(&"page_checksum"), verify == Verify::Full, "{name}");
            assert!(bytes(to) == expected, "{name}, {op:?}, {verify:?}: a byte is not where it belongs");
            assert!(bytes(from) == given, "{name}, {op:?}: the source was written");
        }
    }
}

pub fn unequal_streams_are_refused_and_nothing_is_written(kind: &'static Kind) {
    let pair = Pair::new(kind);
    let (there, here) = pair.regions(8, 16 << 10);
    for op in OPS {
        let grant = pair.grant(op, &paged_set(&there, &[1, 3, 5], 16 << 10));
        let before = (bytes(&there), bytes(&here));
        for set in [paged_set(&here, &[0, 1], 16 << 10), paged_set(&here, &[0, 1, 2], 12 << 10)] {
            let options = TransferOptions { deadline: Some(PATIENCE), ..Default::default() };
            let begun = match op {
                Op::Read => pair.other.read(&set, grant.ticket(), None, options),
                Op::Write => pair.other.write(&set, grant.ticket(), None, options),
            };
            assert_eq!(code(begun.and_then(|begun| begun.wait(Some(PATIENCE)))), Code::ShapeMismatch);
        }
        assert!((bytes(&there), bytes(&here)) == before, "{op:?}: something was written");
    }
    pair.pass();
}

/// The source changes all the time: sooner or later between the two looks at it that a checksum takes.
pub fn what_was_changed_on_the_way_is_found(kind: &'static Kind) {
    let pair = Pair::new(kind);
    let (there, here) = pair.regions(64, 64 << 10);
    // Pages of a GPU that are sent are looked at once: what was summed is what is sent.
    if there.device().is_some() && kind.transport == "tcp" {
        return;
    }
    let changing = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0u8;
            while changing.load(Ordering::Relaxed) {
                value = value.wrapping_add(1);
                (0..64).for_each(|page| there.write_at((page << 16) + 77, &[value]).unwrap());
            }
        });
        let (grant, set) = (pair.grant(Op::Read, &whole(&there, 64 << 10)), whole(&here, 64 << 10));
        let until = Instant::now() + PATIENCE;
        let found = loop {
            match pair.run(Op::Read, &set, &grant, Verify::Full) {
                Ok(_) if Instant::now() < until => {}
                other => break other,
            }
        };
        changing.store(false, Ordering::Relaxed);
        let error = found.expect_err("changes were not noticed all the time");
        assert_eq!(error.code, Code::ChecksumMismatch, "{error}");
        assert!(error.text.contains("page ") && error.text.contains("layer 0"), "{error}");
        let peer = if kind.own() { "this engine".to_owned() } else { pair.owner.id().to_string() };
        assert!(error.text.contains(&peer), "{error} does not name {peer}");
    });
    pair.pass();
}
