//! How fast pages come and go, beside one copy of the same bytes: one after the other in each round, and medians.

use crate::parts::{Checked, LIMIT, memory, pinned, text};
use crate::pattern::shuffled;
use kvik_host::cuda::{Device, GpuMemory, Pinned, Stream};
use std::fmt::Write;
use std::sync::Arc;
use std::time::Instant;

/// Of the order of pages, in every run.
const SEED: u64 = 1;

/// A way to move half of the memory.
struct Case {
    name: &'static str,
    pieces: Vec<(usize, usize)>,
    /// Seconds of each round, and those of them until all was enqueued: to the host, and to the device.
    took: [Vec<(f64, f64)>; 2],
}

struct Rig {
    stream: Stream,
    memory: Arc<GpuMemory>,
    staging: Arc<Pinned>,
}

/// Measures, and says what was measured as a table.
pub fn measure(device: &Device, bytes: usize, rounds: usize) -> Checked<String> {
    let len = 2 * bytes;
    let stream = Stream::new(device).map_err(text)?;
    let mut rig = Rig { stream, memory: memory(device, len)?, staging: pinned(device, bytes)? };
    let mut cases = [
        Case::new("one copy", vec![(0, bytes)]),
        Case::new("pages of 16 KiB, drawn", drawn(len, bytes, 16 << 10)),
        Case::new("pages of 128 KiB, drawn", drawn(len, bytes, 128 << 10)),
        Case::new("every other page of 16 KiB", every_other(bytes, 16 << 10)),
    ];
    // The first round is not counted: it pays for what is made at first use.
    for round in 0..=rounds {
        for case in &mut cases {
            for to_device in [false, true] {
                let took = rig.run(&case.pieces, to_device)?;
                if round > 0 {
                    case.took[usize::from(to_device)].push(took);
                }
            }
        }
    }
    Ok(table(&cases, bytes, rounds))
}

impl Case {
    fn new(name: &'static str, pieces: Vec<(usize, usize)>) -> Case {
        Case { name, pieces, took: Default::default() }
    }
}

/// As many pages as have so many bytes, of all that there are.
fn drawn(len: usize, bytes: usize, page: usize) -> Vec<(usize, usize)> {
    let pages = shuffled(SEED, len / page);
    pages.into_iter().take(bytes / page).map(|number| (number * page, page)).collect()
}

fn every_other(bytes: usize, page: usize) -> Vec<(usize, usize)> {
    (0..bytes / page).map(|number| (2 * number * page, page)).collect()
}

impl Rig {
    /// Moves the pieces: seconds until they are there, and until they were enqueued.
    fn run(&mut self, pieces: &[(usize, usize)], to_device: bool) -> Checked<(f64, f64)> {
        let begun = Instant::now();
        if to_device {
            self.stream.scatter(&self.memory, pieces, &self.staging, 0)
        } else {
            self.stream.gather(&self.staging, 0, &self.memory, pieces)
        }
        .map_err(text)?;
        let enqueued = begun.elapsed();
        let mut mark = self.stream.mark().map_err(text)?;
        mark.wait(&mut self.stream, LIMIT).map_err(text)?;
        Ok((begun.elapsed().as_secs_f64(), enqueued.as_secs_f64()))
    }
}

/// The middle one, the least and the most.
fn middle(mut numbers: Vec<f64>) -> (f64, f64, f64) {
    numbers.sort_by(f64::total_cmp);
    let at = |index: usize| numbers.get(index).copied().unwrap_or(f64::NAN);
    let (half, last) = (numbers.len() / 2, numbers.len().saturating_sub(1));
    let median =
        if numbers.len() % 2 == 1 { at(half) } else { (at(half.saturating_sub(1)) + at(half)) / 2.0 };
    (median, at(0), at(last))
}

fn table(cases: &[Case], bytes: usize, rounds: usize) -> String {
    let mib = bytes >> 20;
    let mut text = format!("GB/s for {mib} MiB, medians of {rounds} rounds (least to most), seed {SEED}");
    for (direction, name) in ["to the host", "to the device"].iter().enumerate() {
        let rate = |case: &Case| {
            let rates = case.took[direction].iter().map(|(all, _)| bytes as f64 / all / 1e9);
            middle(rates.collect())
        };
        let whole = cases.first().map_or(f64::NAN, |case| rate(case).0);
        let _ = write!(text, "\n         {name}");
        for case in cases {
            let (median, least, most) = rate(case);
            let (enqueue, ..) = middle(case.took[direction].iter().map(|(_, enqueue)| *enqueue).collect());
            let (each, share) = (enqueue * 1e6 / case.pieces.len() as f64, 100.0 * median / whole);
            let _ = write!(
                text,
                "\n           {:<27} {median:7.2} ({least:.2} to {most:.2}), {share:3.0} % of one copy, \
                 {each:.2} µs of the CPU a piece",
                case.name
            );
        }
    }
    text
}
