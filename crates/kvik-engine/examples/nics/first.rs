//! The first transfer between two engines that have never met, and the ones behind it, by NICs a side.
//!
//! Each round starts both engines anew, twice: once the first transfer is the first that they hear of each
//! other, once `warm` has opened before all that it needs. What `warm` took is shown beside it.

use crate::Result;
use crate::pair::{Fabric, OPS, Pair, library, standin};
use crate::tables::{Spread, print};
use crate::words::Options;

const DEPTH: u64 = 256;
const BUFFER: u64 = 64; // MiB
const DEFAULTS: [(&str, &str); 7] = [
    ("library", ""),
    ("over", ""),
    ("nics", "1,4,16"),
    ("rounds", "10"),
    ("size", "65536"),
    ("count", "64"),
    ("more", "5"),
];

/// Milliseconds of one kind of transfer, one for each round: in all, and until the first byte could move.
#[derive(Default)]
struct Times {
    all: Vec<f64>,
    post: Vec<f64>,
}

impl Times {
    fn add(&mut self, [all, post]: [f64; 2]) {
        self.all.push(all);
        self.post.push(post);
    }

    fn row(self, op: &str, nics: u64, which: &str) -> Vec<String> {
        let figures = [self.all, self.post].map(|figures| Spread::of(figures).show(2));
        [op.to_owned(), nics.to_string(), which.to_owned()].into_iter().chain(figures).collect()
    }
}

/// What is measured with so many NICs a side.
#[derive(Default)]
struct Rows {
    warming: Vec<f64>,
    cold: Times,
    warm: Times,
    later: Times,
}

/// Measures and prints two tables.
///
/// # Errors
/// A transfer that failed, or a side's.
pub fn run(options: &[String]) -> Result<()> {
    let options = Options::new(options, &DEFAULTS)?;
    let options = match options.text("over") {
        "" => options.with("library", library(&options)?),
        // What there is of NICs is the machine's own.
        _ => options.with("nics", "1".to_owned()),
    };
    let nics = options.numbers("nics")?;
    let (mut rows, mut warming) = (Vec::new(), Vec::new());
    for op in OPS {
        let mut all: Vec<Rows> = nics.iter().map(|_| Rows::default()).collect();
        for round in 0..options.number::<usize>("rounds")? {
            for turn in 0..nics.len() {
                let which = (turn + round) % nics.len();
                for warm in [round % 2 == 0, round % 2 != 0] {
                    once(&options, op, nics[which], warm, &mut all[which])?;
                }
            }
        }
        for (count, of) in nics.iter().zip(all) {
            let spread = Spread::of(of.warming);
            warming.push(vec![op.to_owned(), count.to_string(), spread.show(2)]);
            rows.push(of.cold.row(op, *count, "cold"));
            rows.push(of.warm.row(op, *count, "after warm"));
            rows.push(of.later.row(op, *count, "later"));
        }
    }
    print(&["", "NICs", "", "ms", "of it until it began"], &rows);
    print(&["before a", "pairs of NICs", "warm-up ms"], &warming);
    Ok(())
}

/// Two engines from their start, with so many NICs each.
fn once(options: &Options, op: &str, nics: u64, warm: bool, rows: &mut Rows) -> Result<()> {
    let fabric = Fabric::new()?;
    let words = match options.text("over") {
        "" => standin(options.text("library"), DEPTH, BUFFER),
        over => vec![format!("nics={over}"), format!("depth={DEPTH}"), format!("buffer={BUFFER}")],
    };
    let mut pair = Pair::start(&words, &words, BUFFER, &fabric.env(nics, DEPTH))?;
    let (size, count) = (options.number::<u64>("size")?, options.number::<u64>("count")?);
    pair.grant(op, size)?;
    // Memory that nobody has touched yet would cost its first use.
    pair.owner.ask(&format!("fill {size} 1"))?;
    pair.mover.ask(&format!("fill {size} 2"))?;
    if warm {
        rows.warming.push(1e3 * pair.mover.number(&format!("warm {op} {size} {nics}"))?);
    }
    let mut go = || -> Result<[f64; 2]> {
        let words = pair.mover.ask(&format!("once {op} {size} {count}"))?;
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<f64>().ok());
        number(0).zip(number(1)).map(|(all, post)| [1e3 * all, 1e3 * post]).ok_or("no times".into())
    };
    if warm { &mut rows.warm } else { &mut rows.cold }.add(go()?);
    let mut later = Times::default();
    for _ in 0..options.number::<usize>("more")? {
        later.add(go()?);
    }
    rows.later.add([Spread::of(later.all).median, Spread::of(later.post).median]);
    Ok(())
}
