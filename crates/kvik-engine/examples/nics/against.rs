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

    fn turn(&mut self, op: &str, size: u64, pages: u64) -> Result<f64> {
        self.target.ask("work")?;
        let seconds = self.mover.number(&format!("turn {op} {size} {pages}"))?;
        self.target.ask("rest")?;
        Ok(seconds)
    }

    fn prove(&mut self, op: &str, size: u64) -> Result<()> {
        self.target.ask(&format!("fill {size} 1"))?;
        self.mover.ask(&format!("fill {size} 2"))?;
        self.turn(op, size, self.buffer / size / 2)?;
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
    let mut kvik = Pair::start(&words, &words, buffer, &[])?;
    let mut plain = Plain::start(&options)?;
    let mut rows = Vec::new();
    for op in OPS {
        for size in options.numbers("sizes")? {
            kvik.grant(op, size)?;
            let shape = (transfer / size, open, amount / transfer);
            let pages = shape.0 * shape.2;
            let (mut rates, mut ratios) = ([Vec::new(), Vec::new()], Vec::new());
            kvik.prove(op, size)?;
            plain.prove(op, size)?;
            for round in 0..options.number::<u32>("rounds")? {
                let mut pair = [0.0; 2];
                // Which one comes first alternates.
                for who in [round % 2, (round + 1) % 2] {
                    let seconds = match who {
                        0 => kvik.turn(op, size, shape)?,
                        _ => plain.turn(op, size, pages)?,
                    };
                    pair[who as usize] = (pages * size) as f64 / seconds / 1e9;
                }
                rates.iter_mut().zip(pair).for_each(|(all, rate)| all.push(rate));
                ratios.push(pair[0] / pair[1]);
            }
            kvik.prove(op, size)?;
            plain.prove(op, size)?;
            let [ours, theirs] = rates.map(|all| Spread::of(all).show(2));
            rows.push(vec![op.into(), size.to_string(), ours, theirs, Spread::of(ratios).show(3)]);
        }
    }
    print(&["", "bytes", "kvik GB/s", "plain loop GB/s", "ratio"], &rows);
    Ok(())
}
