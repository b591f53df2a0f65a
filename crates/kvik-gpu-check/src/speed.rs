//! How fast pages come and go, by the driver's copy engine and by kvik's kernel, beside one copy of the same bytes: one after
//! the other in each round, and medians.

use crate::parts::{Checked, LIMIT, memory, pinned, text};
use crate::pattern::shuffled;
use kvik_host::cuda::{Device, GpuMemory, Pinned, Stream, Way};
use std::fmt::Write;
use std::sync::Arc;
use std::time::Instant;

/// Of the order of pages, in every run.
const SEED: u64 = 1;
/// What is moved within the device at most: the engine takes long for many pages there.
const WITHIN: usize = 256 << 20;
const SIZES: [usize; 4] = [4 << 10, 16 << 10, 64 << 10, 128 << 10];
const DIRECTIONS: [&str; 3] = ["to the host", "to the device", "within the device"];

/// Pages, or one piece, and how they are moved.
struct Case {
    name: String,
    way: Way,
    pieces: Vec<(usize, usize)>,
    /// Where they go within the device, where from, and bytes.
    within: Vec<(usize, usize, usize)>,
    /// Seconds of each round, and those of them until all was enqueued: of each direction.
    took: [Vec<(f64, f64)>; 3],
}

struct Rig {
    stream: Stream,
    memory: Arc<GpuMemory>,
    second: Arc<GpuMemory>,
    staging: Arc<Pinned>,
}

/// Measures, and says what was measured as a table.
pub fn measure(device: &Device, bytes: usize, rounds: usize) -> Checked<String> {
    let (stream, second) = (Stream::new(device).map_err(text)?, memory(device, bytes.min(WITHIN))?);
    let (memory, staging) = (memory(device, 2 * bytes)?, pinned(device, bytes)?);
    let mut rig = Rig { stream, memory, second, staging };
    let mut cases = cases(bytes, device.kernel().is_ok());
    // The first round is not counted: it pays for what is made at first use.
    for round in 0..=rounds {
        for case in &mut cases {
            for direction in 0..DIRECTIONS.len() {
                let took = rig.run(case, direction)?;
                if round > 0 {
                    case.took[direction].push(took);
                }
            }
        }
    }
    Ok(table(&cases, bytes, rounds))
}

/// One copy, rows, and pages of each size by each way.
fn cases(bytes: usize, by_kernel: bool) -> Vec<Case> {
    let mut cases = vec![Case::new("one copy".into(), Way::Engine, vec![(0, bytes)], bytes)];
    let rows = (0..bytes / SIZES[1]).map(|number| (2 * number * SIZES[1], SIZES[1])).collect();
    cases.push(Case::new("every other page of 16 KiB".into(), Way::Faster, rows, bytes));
    for page in SIZES {
        let pages = shuffled(SEED, 2 * bytes / page);
        let pieces: Vec<_> =
            pages.into_iter().take(bytes / page).map(|number| (number * page, page)).collect();
        for (way, name) in [(Way::Engine, "engine"), (Way::Kernel, "kernel")] {
            if way == Way::Engine || by_kernel {
                let name = format!("pages of {} KiB, {name}", page >> 10);
                cases.push(Case::new(name, way, pieces.clone(), bytes));
            }
        }
    }
    cases
}

impl Case {
    fn new(name: String, way: Way, pieces: Vec<(usize, usize)>, bytes: usize) -> Case {
        let (mut within, mut at, room) = (Vec::new(), 0, bytes.min(WITHIN));
        for (offset, len) in &pieces {
            let len = (*len).min(room - at);
            if len == 0 {
                break;
            }
            within.push((at, *offset, len));
            at += len;
        }
        Case { name, way, pieces, within, took: Default::default() }
    }

    /// How many pieces it moves in a direction, and how many bytes.
    fn amount(&self, direction: usize) -> (usize, usize) {
        match direction {
            2 => (self.within.len(), self.within.iter().map(|(.., len)| len).sum()),
            _ => (self.pieces.len(), self.pieces.iter().map(|(_, len)| len).sum()),
        }
    }
}

impl Rig {
    /// Moves the pieces: seconds until they are there, and until they were enqueued.
    fn run(&mut self, case: &Case, direction: usize) -> Checked<(f64, f64)> {
        self.stream.copy_by(case.way);
        let begun = Instant::now();
        match direction {
            0 => self.stream.gather(&self.staging, 0, &self.memory, &case.pieces),
            1 => self.stream.scatter(&self.memory, &case.pieces, &self.staging, 0),
            _ => self.stream.between(&self.second, &self.memory, &case.within),
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
    let (mib, within) = (bytes >> 20, bytes.min(WITHIN) >> 20);
    let mut text = format!(
        "GB/s for {mib} MiB ({within} MiB within the device), medians of {rounds} rounds (least to most), pages in an order \
         that is drawn, seed {SEED}"
    );
    for (direction, name) in DIRECTIONS.iter().enumerate() {
        let rate = |case: &Case| {
            let bytes = case.amount(direction).1 as f64;
            middle(case.took[direction].iter().map(|(all, _)| bytes / all / 1e9).collect())
        };
        let whole = cases.first().map_or(f64::NAN, |case| rate(case).0);
        let _ = write!(text, "\n         {name}");
        for case in cases {
            let (median, least, most) = rate(case);
            let (enqueue, ..) = middle(case.took[direction].iter().map(|(_, enqueue)| *enqueue).collect());
            let (each, share) = (enqueue * 1e6 / case.amount(direction).0 as f64, 100.0 * median / whole);
            let _ = write!(
                text,
                "\n           {:<27} {median:8.2} ({least:.2} to {most:.2}), {share:3.0} % of one copy, \
                 {each:.2} µs of the CPU a piece",
                case.name
            );
        }
    }
    text
}
