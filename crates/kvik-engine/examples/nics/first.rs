//! The first transfer between two engines that have never met, and the ones behind it, by NICs a side.
//!
//! Each round starts both engines anew, twice: once the first transfer is the first that they hear of each
//! other, once `explain` has opened the session before. What `explain` took is shown beside it.

use crate::Result;
use crate::pair::{Fabric, OPS, Pair, library, standin};
use crate::tables::{Spread, print};
use crate::words::Options;

const DEPTH: u64 = 256;
const BUFFER: u64 = 64; // MiB
const DEFAULTS: [(&str, &str); 6] = [
    ("library", ""),
    ("nics", "1,4,16"),
    ("rounds", "10"),
    ("size", "65536"),
    ("count", "64"),
    ("more", "5"),
];

/// Milliseconds of one kind of transfer, one for each round.
#[derive(Default)]
struct Times {
    explain: Vec<f64>,
    cold: Vec<f64>,
    cold_post: Vec<f64>,
    warm: Vec<f64>,
    next: Vec<f64>,
}

/// Measures and prints a table.
///
/// # Errors
/// A transfer that failed, a wrong byte, or a side's.
pub fn run(options: &[String]) -> Result<()> {
    let options = Options::new(options, &DEFAULTS)?;
    let options = options.with("library", library(&options)?);
    let nics = options.numbers("nics")?;
    let mut rows = Vec::new();
    for op in OPS {
        let mut all: Vec<Times> = nics.iter().map(|_| Times::default()).collect();
        for round in 0..options.number::<usize>("rounds")? {
            for turn in 0..nics.len() {
                let which = (turn + round) % nics.len();
                for warm in [round % 2 == 0, round % 2 != 0] {
                    once(&options, op, nics[which], warm, &mut all[which])?;
                }
            }
        }
        for (count, times) in nics.iter().zip(all) {
            let Times { explain, cold, cold_post, warm, next } = times;
            let figures = [cold, cold_post, explain, warm, next];
            let cells = figures.map(|figures| Spread::of(figures).show(2));
            rows.push([op.to_owned(), count.to_string()].into_iter().chain(cells).collect());
        }
    }
    let heads =
        ["", "NICs", "cold ms", "of it until it began", "explain ms", "first after it ms", "later ms"];
    print(&heads, &rows);
    Ok(())
}

/// Two engines from their start, with so many NICs each.
fn once(options: &Options, op: &str, nics: u64, warm: bool, times: &mut Times) -> Result<()> {
    let fabric = Fabric::new()?;
    let words = standin(options.text("library"), DEPTH, BUFFER);
    let mut pair = Pair::start(&words, &words, BUFFER, &fabric.env(nics, DEPTH))?;
    let (size, count) = (options.number::<u64>("size")?, options.number::<u64>("count")?);
    pair.grant(op, size)?;
    // Memory that nobody has touched yet would cost its first use.
    pair.owner.ask(&format!("fill {size} 1"))?;
    pair.mover.ask(&format!("fill {size} 2"))?;
    if warm {
        times.explain.push(1e3 * pair.mover.number(&format!("explain {op} {size}"))?);
    }
    let mut go = || -> Result<[f64; 2]> {
        let words = pair.mover.ask(&format!("once {op} {size} {count}"))?;
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<f64>().ok());
        number(0).zip(number(1)).map(|(all, post)| [1e3 * all, 1e3 * post]).ok_or("no times".into())
    };
    let [all, post] = go()?;
    if warm {
        times.warm.push(all);
    } else {
        times.cold.push(all);
        times.cold_post.push(post);
    }
    let later = (0..options.number::<usize>("more")?).map(|_| Ok(go()?[0])).collect::<Result<Vec<f64>>>()?;
    times.next.push(Spread::of(later).median);
    Ok(())
}
