//! Log records of Rust, for Python's `logging`.
//!
//! A thread that moves data formats its record and puts it into the bounded inbox; the Python thread
//! `kvik-log` takes it from there (`python/kvik/_logs.py`). The level is cached in the `log` crate: a record
//! that nobody wants costs one atomic load.

use crate::args::{Seconds, seconds};
use crate::process::{self, Record};
use log::kv::Key;
use log::{Level, LevelFilter, Log, Metadata};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// What a record may name beside its text; Python gets them as `kvik_peer` and so on.
const KEYS: [(&str, &str); 5] = [
    ("engine", "kvik_engine"),
    ("peer", "kvik_peer"),
    ("transfer", "kvik_transfer"),
    ("grant", "kvik_grant"),
    ("request", "kvik_request"),
];

struct ToPython;

impl Log for ToPython {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level() && metadata.target().starts_with("kvik")
    }

    fn log(&self, record: &log::Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let id = |name| record.key_values().get(Key::from_str(name)).map(|value| value.to_string());
        let told = |(name, python)| Some((python, id(name).filter(|id| !id.is_empty())?));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        process::current().inbox.put_record((
            python_level(record.level()),
            logger_name(record.target()),
            record.args().to_string(),
            now.as_secs_f64(),
            std::thread::current().name().unwrap_or("kvik").to_owned(),
            record.file_static().unwrap_or("kvik"),
            record.line().unwrap_or(0),
            KEYS.into_iter().filter_map(told).collect(),
        ));
    }

    fn flush(&self) {}
}

/// `kvik_engine::peers` and `kvik.engine.peers` are both `kvik.engine`: one logger a crate.
fn logger_name(target: &str) -> String {
    let dotted = target.replace("::", ".").replacen("kvik_", "kvik.", 1);
    dotted.splitn(3, '.').take(2).collect::<Vec<_>>().join(".")
}

fn python_level(level: Level) -> u8 {
    match level {
        Level::Error => 40,
        Level::Warn => 30,
        Level::Info => 20,
        Level::Debug => 10,
        Level::Trace => 5,
    }
}

/// Makes records of this library go to Python. Off until `set_log_level` says which are wanted.
pub fn install() {
    static TO_PYTHON: ToPython = ToPython;
    // A second load of the module finds the logger of the first, which is the same.
    let _ = log::set_logger(&TO_PYTHON);
}

/// Caches the lowest level that Python's loggers want.
#[pyfunction]
pub fn set_log_level(level: u32) {
    log::set_max_level(match level {
        0..=5 => LevelFilter::Trace,
        6..=10 => LevelFilter::Debug,
        11..=20 => LevelFilter::Info,
        21..=30 => LevelFilter::Warn,
        31..=40 => LevelFilter::Error,
        _ => LevelFilter::Off,
    });
}

/// Waits for log records, without the GIL; `None` when the thread is to end. Gives up Python objects on the
/// way.
#[pyfunction]
pub fn next_records(py: Python<'_>) -> Option<Vec<Record>> {
    let inbox = &process::current().inbox;
    let (mut records, dropped) = py.detach(|| inbox.next())?;
    inbox.give_up_held(py);
    if dropped > 0 {
        let text = format!("{dropped} log records were dropped: Python took them too slowly");
        let record: Record =
            (30, "kvik.log".into(), text, 0.0, "kvik-log".into(), "kvik", 0, BTreeMap::new());
        records.insert(0, record);
    }
    Some(records)
}

/// Waits until Python's loggers have had every record so far; false at the timeout (seconds).
#[pyfunction]
pub fn flush_records(py: Python<'_>, timeout: Seconds) -> PyResult<bool> {
    let timeout = seconds(py, "timeout", timeout)?;
    Ok(py.detach(|| process::current().inbox.flush(timeout)))
}

/// Lets `next_records` return `None` once nothing is left; `False` takes that back.
#[pyfunction]
pub fn stop_records(stopping: bool) {
    process::current().inbox.stop(stopping);
}

/// Names the calling thread for the kernel, which Python before 3.14 does not.
#[pyfunction]
pub fn name_thread(name: std::ffi::CString) {
    // A thread without its name works as well.
    let _ = rustix::thread::set_name(&name);
}

/// Closes every engine of this process within the timeout (seconds); for the end of the interpreter.
#[pyfunction]
pub fn close_all(py: Python<'_>, timeout: Seconds) -> PyResult<()> {
    let timeout = seconds(py, "timeout", timeout)?;
    let process = process::current();
    py.detach(|| process.close_all(timeout));
    process.inbox.give_up_held(py);
    Ok(())
}
