//! What an engine's object remembers of its regions, until the engine ends.

use crate::engine::PyEngine;
use crate::process;
use crate::region::PyRegion;
use kvik_core::Result;
use kvik_engine::{Config, Engine};
use kvik_host::thread::lock;
use pyo3::exceptions::PyResourceWarning;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use std::sync::Mutex;
use std::time::Duration;

/// How long an engine that is dropped without `close` may take to close.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);

/// See the module's text.
#[derive(Default)]
pub(crate) struct Kept {
    /// Weak references to registered regions, whose memory is given back when the engine closes.
    regions: Mutex<Vec<Py<PyWeakrefReference>>>,
}

impl Kept {
    /// When the list is full, those that are over are let go and room is made for as many as are left: so a region costs
    /// a constant time.
    pub fn keep_region(&self, region: &Bound<'_, PyRegion>) -> PyResult<()> {
        let (py, weak) = (region.py(), PyWeakrefReference::new(region)?.unbind());
        let mut regions = lock(&self.regions);
        if regions.len() == regions.capacity() {
            regions.retain(|weak| weak.bind(py).upgrade().is_some());
            let left = regions.len();
            regions.reserve(left.max(16));
        }
        regions.push(weak);
        Ok(())
    }

    /// Lets go of all of them, once the engine is closed.
    pub fn clear(&self, py: Python<'_>) {
        let regions = std::mem::take(&mut *lock(&self.regions));
        for weak in regions {
            if let Some(Ok(region)) = weak.bind(py).upgrade().map(|region| region.cast_into::<PyRegion>()) {
                region.get().abandon(py);
            }
        }
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

/// Close an engine, and let go of what Python keeps for it, also where closing failed.
pub(crate) fn close(py: Python<'_>, engine: &Engine, kept: &Kept, timeout: Duration) -> Result<()> {
    let closed = py.detach(|| engine.close(timeout));
    kept.clear(py);
    let process = process::current();
    process.closed(engine);
    process.inbox.give_up_held(py);
    closed
}

impl Drop for PyEngine {
    /// Regions, page sets and transfers refer to the engine, so when it is dropped nobody can use it any
    /// more.
    fn drop(&mut self) {
        let both = self.0.here().zip(self.1.here());
        let Some((engine, kept)) = both.filter(|(engine, _)| !engine.is_closed()) else { return };
        Python::try_attach(|py| {
            let kind = py.get_type::<PyResourceWarning>();
            if let Err(warning) = PyErr::warn(py, &kind, c"a kvik.Engine was dropped, not closed", 1) {
                warning.write_unraisable(py, None);
            }
            if let Err(late) = close(py, engine, kept, DROP_TIMEOUT) {
                log::warn!(target: "kvik.engine", "closing a dropped engine: {late}");
            }
        });
    }
}
