//! kvik's two sides, started and introduced to each other; and the stand-in that they may be over.

use crate::Result;
use crate::children::Child;
use crate::words::Options;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Directions.
pub const OPS: [&str; 2] = ["read", "write"];

/// An owner and a mover.
pub struct Pair {
    // The mover goes first.
    pub mover: Child,
    pub owner: Child,
    buffer: u64,
}

impl Pair {
    /// Starts both. Their words are options of [`crate::sides`]; the buffer's size comes in MiB.
    ///
    /// # Errors
    /// A side cannot be started.
    pub fn start(owner: &[String], mover: &[String], buffer: u64, env: &[(String, String)]) -> Result<Pair> {
        let (owner, mover) = (Child::start("owner", owner, env)?, Child::start("mover", mover, env)?);
        Ok(Pair { owner, mover, buffer: buffer << 20 })
    }

    /// Grants all pages of a size for an operation.
    ///
    /// # Errors
    /// The owner's or the mover's.
    pub fn grant(&mut self, op: &str, size: u64) -> Result<()> {
        let ticket = self.owner.ask(&format!("grant {op} {size}"))?.join(" ");
        self.mover.ask(&format!("ticket {op} {size} {ticket}")).map(drop)
    }

    /// Moves all pages once, and compares every byte.
    ///
    /// # Errors
    /// A byte is wrong, or a side's.
    pub fn prove(&mut self, op: &str, size: u64) -> Result<()> {
        self.owner.ask(&format!("fill {size} 1"))?;
        self.mover.ask(&format!("fill {size} 2"))?;
        self.mover.ask(&format!("once {op} {size} {}", self.buffer / size / 2))?;
        match op {
            "read" => self.mover.ask(&format!("check {size} 1")),
            _ => self.owner.ask(&format!("check {size} 2")),
        }
        .map(drop)
    }

    /// Moves so many transfers of so many pages, some of them open at a time: the seconds that it took.
    ///
    /// # Errors
    /// A side's.
    pub fn turn(&mut self, op: &str, size: u64, (count, open, transfers): (u64, u64, u64)) -> Result<f64> {
        self.mover.number(&format!("turn {op} {size} {count} {open} {transfers}"))
    }

    /// CPU seconds of the mover's threads of NICs so far, and of all of its threads.
    ///
    /// # Errors
    /// The side's.
    pub fn cpu(&mut self) -> Result<[f64; 2]> {
        let words = self.mover.ask("cpu")?;
        let number = |at: usize| words.get(at).and_then(|word| word.parse().ok());
        Ok([number(0).ok_or("no times")?, number(1).ok_or("no times")?])
    }
}

/// The folder of the stand-in's fabric, which goes with the value. Its daemon is started by the first side
/// and ends with the last.
pub struct Fabric(PathBuf);

impl Fabric {
    /// An empty one.
    ///
    /// # Errors
    /// The temporary folder cannot be written.
    pub fn new() -> Result<Fabric> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("kvik-nics-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder)?;
        Ok(Fabric(folder))
    }

    /// What its users find in their environment.
    pub fn env(&self, devices: u64, depth: u64) -> Vec<(String, String)> {
        [
            ("DIR", self.0.display().to_string()),
            ("DEVICES", devices.to_string()),
            ("DEPTH", depth.to_string()),
            ("SEED", "1".to_owned()),
        ]
        .map(|(name, value)| (format!("KVIK_STANDIN_{name}"), value))
        .to_vec()
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The stand-in's library: the one that was named, or the checkout's, built beside this program if it has to be.
///
/// # Errors
/// It cannot be built: gcc, make and the headers of libfabric are needed.
pub fn library(options: &Options) -> Result<String> {
    let named = options.text("library");
    if !named.is_empty() {
        return Ok(named.to_owned());
    }
    build(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/standins/fabric"), "libfabric.so.1")
}

/// The stand-in's library for verbs, built as [`library`] is.
///
/// # Errors
/// It cannot be built: gcc, make and the headers of libibverbs are needed.
pub fn verbs() -> Result<String> {
    build(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/standins/verbs"), "libibverbs.so.1")
}

/// The stand-in's library for GPUs.
///
/// # Errors
/// It cannot be built: gcc and make are needed.
pub fn cuda() -> Result<String> {
    build(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/standins/cuda"), "libcuda.so.1")
}

/// A plug-in whose devices move nothing, built as [`library`] is.
///
/// # Errors
/// It cannot be built: gcc and make are needed.
pub fn still() -> Result<String> {
    build(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/plugin"), "still.so")
}

/// A library of the checkout's, with what it needs beside it, in a folder of its own beside this program.
fn build(sources: &str, name: &str) -> Result<String> {
    let folder = std::env::current_exe()?.with_file_name("nics-standin").join(name);
    std::fs::create_dir_all(&folder)?;
    let mut make = Command::new("make");
    make.args(["-s", "-C", sources]).arg(format!("OUT={}", folder.display()));
    let status = make.status().map_err(|error| format!("make, to build {name}: {error}"))?;
    match status.success() {
        true => Ok(folder.join(name).display().to_string()),
        false => Err(format!("{name} could not be built: make ended with {status}").into()),
    }
}

/// The options of sides over the stand-in's library.
pub fn standin(library: &str, depth: u64, buffer: u64) -> Vec<String> {
    let nics = "nics=efa".to_owned();
    vec![nics, format!("library={library}"), format!("depth={depth}"), format!("buffer={buffer}")]
}
