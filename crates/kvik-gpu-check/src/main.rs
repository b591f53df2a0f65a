//! Checks kvik's side of GPUs on this machine: every part of `kvik_host::cuda` with bytes that are looked at, on each
//! device, and how fast pages come and go. It needs NVIDIA's driver and nothing else.
//!
//! Its status is 0 where all is well, 1 where something is wrong, and 77 where there is no GPU to check.

mod by_kernel;
mod parts;
mod pattern;
mod peer;
mod speed;

use kvik_host::cuda::{Cuda, Device};
use parts::{Outcome, PARTS};
use std::process::ExitCode;

const USAGE: &str = "usage: kvik-gpu-check [--device N] [--mib N] [--rounds N]
  --device  only this one (all, if it is not given)
  --mib     MiB of a device's memory to move in each round of the measurement (256)
  --rounds  rounds of the measurement, 0 for none (9)";
const NO_GPU: u8 = 77;

/// What is asked for.
struct Asked {
    device: Option<u32>,
    mib: usize,
    rounds: usize,
}

impl Asked {
    fn read(arguments: &[String]) -> Option<Asked> {
        let mut asked = Asked { device: None, mib: 256, rounds: 9 };
        for pair in arguments.chunks(2) {
            let [name, value] = pair else { return None };
            match name.as_str() {
                "--device" => asked.device = Some(value.parse().ok()?),
                "--mib" => asked.mib = value.parse().ok().filter(|mib| (1..=65_536).contains(mib))?,
                "--rounds" => asked.rounds = value.parse().ok()?,
                _ => return None,
            }
        }
        Some(asked)
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [word, handle] = arguments.as_slice()
        && word == peer::WORD
    {
        return peer::run(handle);
    }
    let Some(asked) = Asked::read(&arguments) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let cuda = match Cuda::get() {
        Ok(cuda) => cuda,
        Err(why) => {
            println!("no GPU to check here: {why}");
            return ExitCode::from(NO_GPU);
        }
    };
    let ((major, minor), count) = (cuda.version(), cuda.devices());
    println!("driver for CUDA {major}.{minor} ({}), {count} device(s)", cuda.path().display());
    let mut wrong = 0;
    for ordinal in 0..count {
        if asked.device.is_none_or(|only| only == ordinal) {
            wrong += check(&cuda, ordinal, &asked);
        }
    }
    if asked.device.is_some_and(|only| only >= count) {
        println!("WRONG  there is no device {}", asked.device.unwrap_or_default());
        wrong += 1;
    }
    match wrong {
        0 => println!("all is well"),
        count => println!("{count} part(s) are wrong"),
    }
    ExitCode::from(u8::from(wrong > 0))
}

/// Checks a device, and says how many parts of it are wrong.
fn check(cuda: &Cuda, ordinal: u32, asked: &Asked) -> usize {
    let device = match cuda.device(ordinal) {
        Ok(device) => device,
        Err(why) => {
            println!("WRONG  device {ordinal}: {why}");
            return 1;
        }
    };
    let gib = device.memory() >> 30;
    let how = if device.has_batches() { "many copies in a call" } else { "one copy in a call (before 12.8)" };
    let small = match device.kernel() {
        Ok(()) => "small pages by a kernel".into(),
        Err(why) => format!("small pages by the copy engine: {why}"),
    };
    println!("device {ordinal}: {}, {}, {gib} GiB, {how}, {small}", device.name(), device.bus());
    let mut wrong = 0;
    for (name, part) in PARTS {
        wrong += usize::from(!say(name, part(&device)));
    }
    if asked.rounds > 0 {
        wrong += usize::from(!say("speed", measured(&device, asked)));
    }
    wrong
}

fn measured(device: &Device, asked: &Asked) -> Outcome {
    match speed::measure(device, asked.mib << 20, asked.rounds) {
        Ok(table) => Outcome::Good(table),
        Err(why) => Outcome::Wrong(why),
    }
}

/// Prints what came of a part; whether it is not wrong.
fn say(name: &str, outcome: Outcome) -> bool {
    let (word, text) = match &outcome {
        Outcome::Good(text) => ("ok   ", text),
        Outcome::Not(text) => ("not  ", text),
        Outcome::Wrong(text) => ("WRONG", text),
    };
    println!("  {word}  {name}{}{text}", if text.is_empty() { "" } else { ": " });
    !matches!(outcome, Outcome::Wrong(_))
}
