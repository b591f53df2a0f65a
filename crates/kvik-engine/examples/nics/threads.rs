//! Work requests of 16 NICs that move nothing, by how many threads drive them: what kvik itself can carry, and what
//! that costs.
//!
//! All pairs of engines are up from the start, and those whose turn it is not sleep. The owner's side takes no part but
//! for the beginning and the end of each transfer.

use crate::Result;
use crate::pair::{Pair, still};
use crate::tables::{Spread, print};
use crate::words::Options;

/// Bytes of a work request where a transfer is large.
const CHUNK: u64 = 512 << 10;
const DEFAULTS: [(&str, &str); 9] = [
    ("threads", "1,2,4,16"),
    ("nics", "16"),
    ("polled", "0,1"),
    ("sizes", "524288,16384"),
    ("rounds", "10"),
    ("buffer", "2048"),
    ("transfer", "512"),
    ("open", "4"),
    ("requests", "400000,40000"),
];

/// What one number of threads did, round by round.
#[derive(Default)]
struct Figures {
    /// Thousands of work requests a second.
    rate: Vec<f64>,
    /// The rate, of that with as many threads as NICs in the same round.
    of_each: Vec<f64>,
    /// CPU seconds of the threads of NICs, and of the whole process, for a million work requests.
    nics: Vec<f64>,
    all: Vec<f64>,
}

/// Measures and prints a table.
///
/// # Errors
/// A transfer that failed, or a side's.
pub fn run(options: &[String]) -> Result<()> {
    let options = Options::new(options, &DEFAULTS)?;
    let (library, counts) = (still()?, options.numbers("threads")?);
    let (sizes, requests) = (options.numbers("sizes")?, options.numbers("requests")?);
    let mut rows = Vec::new();
    for polled in options.numbers("polled")? {
        let mut pairs = Vec::new();
        for threads in &counts {
            pairs.push(start(&options, &library, *threads, polled)?);
        }
        for (size, requests) in sizes.iter().zip(&requests) {
            pairs.iter_mut().try_for_each(|pair| pair.grant("read", *size))?;
            let figures = measure(&options, &mut pairs, *size, *requests)?;
            for (threads, of) in counts.iter().zip(figures) {
                let how = if polled == 1 { "polled" } else { "descriptor" };
                let mut row = vec![how.to_owned(), size.to_string(), threads.to_string()];
                row.push(Spread::of(of.rate).show(0));
                row.extend([of.of_each, of.nics, of.all].map(|figures| Spread::of(figures).show(2)));
                rows.push(row);
            }
        }
    }
    let cpu = ["NICs' CPU s a million", "all CPU s a million"];
    print(&["NICs", "extents", "threads", "1000 requests/s", "of the last row", cpu[0], cpu[1]], &rows);
    Ok(())
}

/// Two engines of so many threads each.
fn start(options: &Options, library: &str, threads: u64, polled: u64) -> Result<Pair> {
    let names: Vec<_> = (0..options.number::<u64>("nics")?).map(|number| format!("still{number}")).collect();
    let buffer = options.number::<u64>("buffer")?;
    let words = [
        format!("nics=plugin:{}", names.join(",")),
        format!("nic_threads={threads}"),
        format!("library={library}"),
        "depth=256".to_owned(),
        format!("buffer={buffer}"),
    ];
    Pair::start(&words, &words, buffer, &[("KVIK_STILL_POLLED".to_owned(), polled.to_string())])
}

/// Turns of so many work requests, in extents of `size`: each pair's figures.
fn measure(options: &Options, pairs: &mut [Pair], size: u64, requests: u64) -> Result<Vec<Figures>> {
    let transfer = options.number::<u64>("transfer")? << 20;
    let shape = (transfer / size, options.number("open")?, (requests * CHUNK).div_ceil(transfer));
    let requests = (shape.2 * transfer / CHUNK) as f64;
    let mut all: Vec<Figures> = pairs.iter().map(|_| Figures::default()).collect();
    for round in 0..=options.number::<usize>("rounds")? {
        let mut rates = vec![0.0; pairs.len()];
        // Another one comes first each time.
        for turn in 0..pairs.len() {
            let which = (turn + round) % pairs.len();
            let mut cpu = [pairs[which].cpu()?, [0.0; 2]];
            let seconds = pairs[which].turn("read", size, shape)?;
            cpu[1] = pairs[which].cpu()?;
            // The first round opens connections and threads.
            if round > 0 {
                rates[which] = requests / seconds / 1e3;
                let [nics, whole] = [0, 1].map(|at| (cpu[1][at] - cpu[0][at]) / requests * 1e6);
                all[which].nics.push(nics);
                all[which].all.push(whole);
            }
        }
        if round > 0 {
            let last = rates.last().copied().unwrap_or_default();
            for (of, rate) in all.iter_mut().zip(rates) {
                of.rate.push(rate);
                of.of_each.push(rate / last);
            }
        }
    }
    Ok(all)
}
