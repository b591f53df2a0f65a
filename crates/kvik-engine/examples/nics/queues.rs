//! Few and many extents in a transfer, over queues of several depths: whether a full queue costs anything.
//!
//! Every count of extents walks through the same buffer, and every turn moves about as many extents, over a
//! session that is up and with transfers open all the time: so what is compared is the rate of a steady
//! stream, and not how long one transfer takes to begin. So many transfers are open that their extents fill
//! the deepest queue, or [`OPEN`] of them.

use crate::Result;
use crate::pair::{Fabric, OPS, Pair, library, standin};
use crate::tables::{Spread, print};
use crate::words::Options;

const PAGE: u64 = 16 << 10;
/// Transfers open at a time, at least and at most.
const OPEN: [u64; 2] = [2, 64];
const DEFAULTS: [(&str, &str); 5] = [
    ("library", ""),
    ("depths", "64,256,4096"),
    ("counts", "20,200,2000,20000"),
    ("rounds", "10"),
    ("extents", "80000"),
];

/// Measures and prints a table.
///
/// # Errors
/// A transfer that failed, a wrong byte, or a side's.
pub fn run(options: &[String]) -> Result<()> {
    let options = Options::new(options, &DEFAULTS)?;
    let (counts, depths) = (options.numbers("counts")?, options.numbers("depths")?);
    let (rounds, extents) = (options.number::<usize>("rounds")?, options.number::<u64>("extents")?);
    let most = counts.iter().max().copied().unwrap_or(1);
    let deepest = depths.iter().max().copied().unwrap_or(1);
    // Every other page is moved.
    let buffer = (2 * most * PAGE).div_ceil(1 << 20);
    let (library, mut rows) = (library(&options)?, Vec::new());
    for depth in depths {
        let fabric = Fabric::new()?;
        let words = standin(&library, depth, buffer);
        let mut pair = Pair::start(&words, &words, buffer, &fabric.env(1, depth))?;
        for op in OPS {
            pair.grant(op, PAGE)?;
            pair.prove(op, PAGE)?;
            let mut rates = vec![Vec::new(); counts.len()];
            for round in 0..rounds {
                // Another one comes first each time.
                for turn in 0..counts.len() {
                    let which = (turn + round) % counts.len();
                    let count = counts[which];
                    let open = (2 * deepest).div_ceil(count).clamp(OPEN[0], OPEN[1]);
                    let transfers = (extents / count).max(2 * OPEN[0]);
                    let seconds = pair.turn(op, PAGE, (count, open, transfers))?;
                    rates[which].push((count * transfers) as f64 / seconds / 1e3);
                }
            }
            pair.prove(op, PAGE)?;
            rows.extend(row(op, depth, &counts, &rates));
        }
    }
    print(&["", "depth", "extents", "1000 extents/s", "of the best with fewer"], &rows);
    Ok(())
}

/// A row for each count: the rates, and what they are of the best rate of a smaller count in the same round.
fn row<'a>(
    op: &'a str,
    depth: u64,
    counts: &'a [u64],
    rates: &'a [Vec<f64>],
) -> impl Iterator<Item = Vec<String>> + 'a {
    counts.iter().zip(rates).map(move |(count, own)| {
        let fewer: Vec<&Vec<f64>> =
            counts.iter().zip(rates).filter(|(other, _)| *other < count).map(|(_, rates)| rates).collect();
        let best = |round: usize| fewer.iter().map(|rates| rates[round]).fold(0.0, f64::max);
        let ratios = own.iter().enumerate().map(|(round, rate)| rate / best(round)).collect();
        let ratio = if fewer.is_empty() { "-".to_owned() } else { Spread::of(ratios).show(2) };
        let rate = Spread::of(own.clone()).show(1);
        vec![op.to_owned(), depth.to_string(), count.to_string(), rate, ratio]
    })
}
