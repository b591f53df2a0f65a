//! kvik over a provider of libfabric, and the plain loop over the same provider, in turns.

use crate::Result;
use crate::children::Child;
use crate::pair::{OPS, Pair};
use crate::tables::{Spread, print};
use crate::words::Options;
use crate::{plain, sides};

const DEFAULTS: [(&str, &str); 10] = [
    ("provider", "tcp"),
    ("library", ""),
    ("sizes", "131072,1048576"),
    ("depth", "64"),
    ("buffer", "256"),
    ("verify", "off"),
    ("rounds", "20"),
    ("amount", "512"),
    ("transfer", "32"),
    ("open", "2"),
];

/// The plain loop's two sides.
struct Plain {
    mover: Child,
    target: Child,
    buffer: u64,
}

impl Plain {
    fn start(options: &Options) -> Result<Plain> {
        let words = options.words(&plain::NAMES);
        let mut target = Child::start("plain-target", &words, &[])?;
        let mut mover = Child::start("plain-mover", &words, &[])?;
        let who = target.ask("who")?.join(" ");
        mover.ask(&format!("target {who}"))?;
        Ok(Plain { mover, target, buffer: options.number::<u64>("buffer")? << 20 })
    }

    fn turn(&mut self, mode: &str, op: &str, size: u64, pages: u64) -> Result<f64> {
        self.target.ask(&format!("work {mode}"))?;
        let seconds = self.mover.number(&format!("turn {mode} {op} {size} {pages}"))?;
        self.target.ask("rest")?;
        Ok(seconds)
    }

    fn prove(&mut self, op: &str, size: u64) -> Result<()> {
        self.target.ask(&format!("fill {size} 1"))?;
        self.mover.ask(&format!("fill {size} 2"))?;
        self.turn(plain::MODES[1], op, size, self.buffer / size / 2)?;
        match op {
            "read" => self.mover.ask(&format!("check {size} 1")),
            _ => self.target.ask(&format!("check {size} 2")),
        }
        .map(drop)
    }
}

/// Measures and prints a table.
///
/// # Errors
/// A wrong byte, or a side's.
pub fn run(options: &[String]) -> Result<()> {
    let options = Options::new(options, &DEFAULTS)?;
    let mut words = options.words(&sides::NAMES[1..]);
    words.push(format!("nics=libfabric:{}", options.text("provider")));
    let (amount, transfer) =
        (options.number::<u64>("amount")? << 20, options.number::<u64>("transfer")? << 20);
    let (open, buffer) = (options.number("open")?, options.number("buffer")?);
    let rounds = options.number("rounds")?;
    let mut kvik = Pair::start(&words, &words, buffer, &[])?;
    let mut plain = Plain::start(&options)?;
    let mut rows = Vec::new();
    for op in OPS {
        for size in options.numbers("sizes")? {
            kvik.grant(op, size)?;
            let shape = (transfer / size, open, amount / transfer);
            kvik.prove(op, size)?;
            plain.prove(op, size)?;
            let [ours, spins, sleeps] = measure(&mut kvik, &mut plain, (op, size), shape, rounds)?;
            kvik.prove(op, size)?;
            plain.prove(op, size)?;
            let ratios = (0..ours.len()).map(|round| ours[round] / spins[round].max(sleeps[round])).collect();
            let mut row = vec![op.to_owned(), size.to_string()];
            row.extend([ours, spins, sleeps].map(|rates| Spread::of(rates).show(2)));
            row.push(Spread::of(ratios).show(3));
            rows.push(row);
        }
    }
    let heads = ["", "bytes", "kvik GB/s", "loop that spins", "loop that sleeps", "kvik / the faster loop"];
    print(&heads, &rows);
    Ok(())
}

/// GB/s of kvik and of both loops, round by round.
fn measure(
    kvik: &mut Pair,
    plain: &mut Plain,
    (op, size): (&str, u64),
    shape: (u64, u64, u64),
    rounds: usize,
) -> Result<[Vec<f64>; 3]> {
    let pages = shape.0 * shape.2;
    let mut rates = [const { Vec::new() }; 3];
    for round in 0..rounds {
        // Another one comes first each time.
        for turn in 0..rates.len() {
            let who = (turn + round) % rates.len();
            let seconds = match who {
                0 => kvik.turn(op, size, shape)?,
                mode => plain.turn(plain::MODES[mode - 1], op, size, pages)?,
            };
            rates[who].push((pages * size) as f64 / seconds / 1e9);
        }
    }
    Ok(rates)
}
