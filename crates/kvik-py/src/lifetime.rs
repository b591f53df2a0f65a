//! How an engine of Python starts, and ends when it is dropped without `close`.

use crate::engine::PyEngine;
use crate::kept::Kept;
use crate::process;
use kvik_core::Result;
use kvik_engine::{Config, Engine};
use pyo3::exceptions::PyResourceWarning;
use pyo3::prelude::*;
use std::time::Duration;

/// How long an engine that is dropped without `close` may take to close.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);

/// Close an engine, and let go of what Python keeps for it, also where closing failed.
pub(crate) fn close(py: Python<'_>, engine: &Engine, kept: &Kept, timeout: Duration) -> Result<()> {
    let closed = py.detach(|| engine.close(timeout));
    kept.clear(py);
    let process = process::current();
    process.closed(engine);
    process.inbox.give_up_held(py);
    closed
}

/// An engine in one line; None for one of the parent process.
pub(crate) fn described(engine: Option<&Engine>) -> String {
    let Some(engine) = engine else { return "<kvik.Engine of the parent process>".into() };
    let name = match engine.name() {
        "" => String::new(),
        name => format!(" {name:?}"),
    };
    let at = match engine.is_closed() {
        true => "closed".into(),
        false => engine.addresses().iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    };
    format!("<kvik.Engine{name} {:.8}… at {at}>", engine.id().to_string())
}

impl Drop for PyEngine {
    /// Regions, page sets and transfers refer to the engine, so when it is dropped nobody can use it any
    /// more.
    fn drop(&mut self) {
        // Both are of this process, or neither is.
        let (Some(engine), Some(kept)) = (self.0.here(), self.1.here()) else { return };
        if engine.is_closed() {
            return;
        }
        Python::try_attach(|py| {
            if let Err(warning) = PyErr::warn(
                py,
                &py.get_type::<PyResourceWarning>(),
                c"a kvik.Engine was dropped, not closed",
                1,
            ) {
                warning.write_unraisable(py, None);
            }
            if let Err(late) = close(py, engine, kept, DROP_TIMEOUT) {
                log::warn!(target: "kvik.engine", "closing a dropped engine: {late}");
            }
        });
    }
}

/// An engine that runs, and that `kvik stat` and `kvik trace` can look at.
pub(crate) fn started(config: Config) -> Result<Engine> {
    let engine = Engine::start(config)?;
    if let Err(error) = kvik_observe::observe(&engine) {
        log::warn!("{error}");
    }
    Ok(engine)
}
