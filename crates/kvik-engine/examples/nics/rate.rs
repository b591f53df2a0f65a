//! kvik alone: one turn, and its rate in a line that other programs read.

use crate::Result;
use crate::pair::Pair;
use crate::sides;
use crate::words::Options;

const DEFAULTS: [(&str, &str); 13] = [
    ("nics", "libfabric:tcp"),
    ("theirs", "libfabric:tcp"),
    ("library", ""),
    ("depth", "64"),
    ("buffer", "64"),
    ("verify", "off"),
    ("cpu", ""),
    ("their_cpu", ""),
    ("op", "read"),
    ("size", "65536"),
    ("count", "64"),
    ("open", "2"),
    ("transfers", "16"),
];

/// Moves `transfers` of `count` pages of `size` bytes, `open` at a time, between the mover's `nics` and the
/// owner's `theirs`, and prints bytes and seconds: `moved BYTES SECONDS`.
///
/// # Errors
/// A wrong byte, or a side's.
pub fn run(options: &[String]) -> Result<()> {
    let options = Options::new(options, &DEFAULTS)?;
    let (op, size) = (options.text("op"), options.number::<u64>("size")?);
    let mover = options.words(&sides::NAMES);
    let owner = options.with("nics", options.text("theirs").to_owned());
    let owner = owner.with("cpu", options.text("their_cpu").to_owned()).words(&sides::NAMES);
    let mut pair = Pair::start(&owner, &mover, options.number("buffer")?, &[])?;
    pair.grant(op, size)?;
    // The connection is open then, and all memory has been touched.
    pair.prove(op, size)?;
    let (count, transfers) = (options.number::<u64>("count")?, options.number::<u64>("transfers")?);
    let seconds = pair.turn(op, size, (count, options.number("open")?, transfers))?;
    println!("moved {} {seconds}", count * transfers * size);
    Ok(())
}
