//! `kvik.WarmUp`: a warm-up in progress.

use crate::args::{Seconds, maybe_seconds};
use crate::errors::{OrRaise, raised};
use crate::fork::Owned;
use crate::wait::for_end;
use kvik_core::Result;
use kvik_engine::{Engine, NicPair, PairState, TransportId, WarmUp, WarmUpReport};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};
use std::os::fd::IntoRawFd;

/// A warm-up on its way, from `Engine.warm_up`. Use `wait()`, or `await` it in asyncio, or neither.
#[pyclass(name = "WarmUp", module = "kvik", frozen, weakref)]
pub struct PyWarmUp(Owned<WarmUp>);

#[pymethods]
impl PyWarmUp {
    /// Whether it has ended, well or not.
    #[getter]
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.0.get(py)?.is_done())
    }

    /// Wait until all that can be open is, and return a `WarmUpReport`.
    ///
    /// timeout: seconds, or None: until its own timeout. WaitTimeout when this one passes first; the warm-up goes
    /// on. Raises why the peer cannot be reached. Other Python threads run meanwhile.
    #[pyo3(signature = (timeout=None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<Seconds>) -> PyResult<Bound<'py, PyAny>> {
        let warming = self.0.get(py)?;
        warmed(py, for_end(py, timeout, |step| warming.wait(step))?)
    }

    /// The error that ended it; None while it is on its way and when it ended well.
    fn error(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        let result = self.0.get(py)?.result();
        Ok(result.and_then(Result::err).map(|cause| raised(py, cause)))
    }

    /// End it. What is open by then stays open, and `wait` raises Cancelled.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let warming = self.0.get(py)?;
        py.detach(|| warming.cancel());
        Ok(())
    }

    /// A descriptor that becomes readable when it ends (at once if it has), for event loops.
    ///
    /// Each call makes one, which the caller must close with `os.close`. For asyncio `await warming` does all this.
    fn done_fd(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.0.get(py)?.done_fd().or_raise(py)?.into_raw_fd())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        static WAIT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        WAIT.import(slf.py(), "kvik._awaiting", "warm_up_report_of")?.call1((slf,))?.call_method0("__await__")
    }

    fn __repr__(&self) -> String {
        let Some(warming) = self.0.here() else {
            return "<kvik.WarmUp of the parent process>".into();
        };
        match warming.result() {
            None => "<kvik.WarmUp on its way>".into(),
            Some(Ok(warmed)) => format!("<kvik.WarmUp done: {}>", names(&warmed.transports).join(", ")),
            Some(Err(error)) => format!("<kvik.WarmUp failed: {}>", error.code),
        }
    }
}

/// Begins a warm-up.
pub fn warm_up(
    py: Python<'_>,
    engine: &Engine,
    ticket: &Bound<'_, PyAny>,
    timeout: Option<Seconds>,
) -> PyResult<PyWarmUp> {
    let (ticket, timeout) = (crate::ticket::ticket(ticket)?, maybe_seconds(py, "timeout", timeout)?);
    Ok(PyWarmUp(Owned::new(py.detach(|| engine.warm_up(&ticket, timeout)).or_raise(py)?)))
}

fn warmed(py: Python<'_>, warmed: WarmUpReport) -> PyResult<Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let pairs = warmed.pairs.iter().map(|one| pair(py, one)).collect::<PyResult<Vec<_>>>()?;
    CLASS.import(py, "kvik._report", "WarmUpReport")?.call1((
        warmed.connected,
        PyTuple::new(py, names(&warmed.transports))?,
        PyTuple::new(py, names(&warmed.made))?,
        warmed.channels,
        PyTuple::new(py, pairs)?,
        PyTuple::new(py, warmed.rejected_transports.iter().map(ToString::to_string).collect::<Vec<_>>())?,
        warmed.took.as_secs_f64(),
    ))
}

fn pair<'py>(py: Python<'py>, pair: &NicPair) -> PyResult<Bound<'py, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let reason = match &pair.state {
        PairState::Failed(why) => why.text.as_str(),
        PairState::Opened | PairState::AlreadyOpen => "",
    };
    let class = CLASS.import(py, "kvik._report", "NicPair")?;
    class.call1((&pair.nic, pair.peer_nic, pair.state.name(), reason))
}

/// The words for transports.
fn names(transports: &[TransportId]) -> Vec<&'static str> {
    transports.iter().map(|transport| transport.name()).collect()
}
