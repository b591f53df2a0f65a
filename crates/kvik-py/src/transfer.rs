//! `kvik.Transfer`, and the report as Python's dataclass.

use crate::args::Seconds;
use crate::errors::{OrRaise, raised};
use crate::fork::Owned;
use crate::ids::positions as named;
use crate::region::PyPageSet;
use crate::requests;
use crate::ticket::ticket;
use crate::wait::for_end;
use kvik_core::{Result, Ticket};
use kvik_engine::{Engine, PageSet, Report, Transfer, TransferOptions};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use std::os::fd::IntoRawFd;
use std::sync::Arc;
use std::time::Duration;

/// One read or write, from `Engine.read` or `Engine.write`. Use `wait()`, or `await` it in asyncio.
///
/// Success means that the bytes are in place and were checked; an end of any kind means that nothing touches
/// the memory of this side any more. Every transfer ends by its deadline. Cancelling a task that awaits it
/// cancels the transfer. Dropping the object does not.
#[pyclass(name = "Transfer", module = "kvik", frozen, weakref)]
pub struct PyTransfer {
    transfer: Owned<Transfer>,
    engine: Py<PyAny>,
    local: Option<Py<PyPageSet>>,
}

impl PyTransfer {
    /// The Python object of a transfer.
    pub fn new(transfer: Transfer, engine: Py<PyAny>, local: Option<Py<PyPageSet>>) -> PyTransfer {
        PyTransfer { transfer: Owned::new(transfer), engine, local }
    }
}

#[pymethods]
impl PyTransfer {
    /// Whether it has ended, well or not. Cheap: meant for polling.
    #[getter]
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.transfer.get(py)?.is_done())
    }

    /// The engine that runs it.
    #[getter]
    fn engine(&self, py: Python<'_>) -> Py<PyAny> {
        self.engine.clone_ref(py)
    }

    /// The page set on this side; None for `Engine.release`.
    #[getter]
    fn local(&self, py: Python<'_>) -> Option<Py<PyPageSet>> {
        self.local.as_ref().map(|local| local.clone_ref(py))
    }

    /// Wait for the end, and return the report or raise the error that ended the transfer.
    ///
    /// timeout: seconds, or None: as long as the transfer's own deadline lets it take. If the timeout passes
    /// first, WaitTimeout is raised and the transfer goes on. Ctrl-C interrupts the wait, not the transfer.
    /// Other Python threads run meanwhile.
    #[pyo3(signature = (timeout=None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<Seconds>) -> PyResult<Bound<'py, PyAny>> {
        let transfer = self.transfer.get(py)?;
        report(py, for_end(py, timeout, |step| transfer.wait(step))?)
    }

    /// The report if it succeeded; None while it runs and if it failed.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let result = self.transfer.get(py)?.result();
        result.and_then(Result::ok).map(|done| report(py, done)).transpose()
    }

    /// The error that ended it; None while it runs and if it succeeded.
    fn error(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        let result = self.transfer.get(py)?.result();
        Ok(result.and_then(Result::err).map(|cause| raised(py, cause)))
    }

    /// Ask it to end now. It has ended when `done` is true: until then its memory may still be touched.
    ///
    /// After the end of a cancelled transfer, `wait` raises Cancelled. A transfer that has ended stays as it
    /// is.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let transfer = self.transfer.get(py)?;
        py.detach(|| transfer.cancel());
        Ok(())
    }

    /// A descriptor that becomes readable when the transfer ends (at once if it has), for event loops.
    ///
    /// Each call makes one, which the caller must close with `os.close`. For asyncio `await transfer` does
    /// all this.
    fn done_fd(&self, py: Python<'_>) -> PyResult<i32> {
        let transfer = self.transfer.get(py)?;
        Ok(py.detach(|| transfer.done_fd()).or_raise(py)?.into_raw_fd())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        static WAIT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        WAIT.import(slf.py(), "kvik._awaiting", "result_of")?.call1((slf,))?.call_method0("__await__")
    }

    fn __repr__(&self) -> String {
        let Some(transfer) = self.transfer.here() else {
            return "<kvik.Transfer of the parent process>".into();
        };
        match transfer.result() {
            None => "<kvik.Transfer on its way>".into(),
            Some(Ok(report)) => {
                format!("<kvik.Transfer done: {} bytes by {}>", report.bytes, report.mechanism)
            }
            Some(Err(error)) => format!("<kvik.Transfer failed: {}>", error.code),
        }
    }
}

type Begin = fn(&Engine, &PageSet, &Ticket, Option<Arc<[u32]>>, TransferOptions) -> Result<Transfer>;

/// Begins a read or a write.
pub fn begin<T>(
    engine: &Engine,
    of: &Bound<'_, T>,
    begin: Begin,
    local: &Bound<'_, PyPageSet>,
    given: &Bound<'_, PyAny>,
    positions: Option<&Bound<'_, PyAny>>,
    options: TransferOptions,
) -> PyResult<PyTransfer> {
    let py = of.py();
    let pages = local.get().pages.get(py)?;
    let (ticket, positions) = (ticket(given)?, positions.map(named).transpose()?);
    let transfer = py.detach(|| begin(engine, pages, &ticket, positions, options)).or_raise(py)?;
    Ok(PyTransfer::new(transfer, of.clone().into_any().unbind(), Some(local.clone().unbind())))
}

/// A `kvik.Report`.
pub fn report<'py>(py: Python<'py>, report: Report) -> PyResult<Bound<'py, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let time = |part: Duration| part.as_secs_f64();
    // A tuple has twelve at most.
    let further = PyDict::new(py);
    further.set_item("estimate", requests::estimated(py, report.estimate)?)?;
    let parts = (
        report.bytes,
        report.extents,
        report.pages,
        report.transport.name(),
        report.mechanism,
        PyTuple::new(py, report.checks)?,
        time(report.plan),
        time(report.post),
        time(report.wire),
        time(report.verify),
        time(report.total),
        PyTuple::new(py, report.rejected_transports.iter().map(ToString::to_string).collect::<Vec<_>>())?,
    );
    CLASS.import(py, "kvik._report", "Report")?.call(parts, Some(&further))
}
