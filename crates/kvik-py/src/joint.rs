//! `kvik.Read` and `kvik.JointRead`: several reads as one.

use crate::args::{Ends, Natural, Seconds};
use crate::content::PyContent;
use crate::errors::{OrRaise, raised};
use crate::fork::Owned;
use crate::ids::positions as named;
use crate::region::PyPageSet;
use crate::requests::{Part, common, options};
use crate::ticket::{PyTicket, ticket as given};
use crate::transfer::report;
use crate::wait::for_end;
use kvik_core::Ticket;
use kvik_engine::{Engine, JointRead, JointReport, Read, TransferOptions};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};
use std::os::fd::IntoRawFd;
use std::sync::Arc;
use std::time::Duration;

/// One of the reads of `Engine.read_all`: what `Engine.read` takes, but for what all of them have together.
///
/// Raises TicketInvalid, TicketVersion, BufferInvalid (`local` is read-only), InvalidArgument.
#[pyclass(name = "Read", module = "kvik", frozen)]
pub struct PyRead {
    local: Py<PyPageSet>,
    ticket: Ticket,
    positions: Option<Arc<[u32]>>,
    options: TransferOptions,
}

#[pymethods]
impl PyRead {
    #[new]
    #[pyo3(signature = (local, ticket, positions=None, *, confirm=true, remote_layers=None, remote_slices=None,
                        remote_parts=None, readers=Natural::of(1), content=None),
           text_signature = "(local, ticket, positions=None, *, confirm=True, remote_layers=None, remote_slices=None, \
                             remote_parts=None, readers=1, content=None)")]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keyword arguments")]
    fn new(
        local: &Bound<'_, PyPageSet>,
        ticket: &Bound<'_, PyAny>,
        positions: Option<&Bound<'_, PyAny>>,
        confirm: bool,
        remote_layers: Option<Ends>,
        remote_slices: Option<Ends>,
        remote_parts: Option<Natural>,
        readers: Natural,
        content: Option<&Bound<'_, PyContent>>,
    ) -> PyResult<PyRead> {
        let py = local.py();
        let part = Part { layers: remote_layers, slices: remote_slices, parts: remote_parts };
        let common = common(py, None, readers, content, "")?;
        local.get().region.get().check_writable(py, "a read")?;
        Ok(PyRead {
            local: local.clone().unbind(),
            ticket: given(ticket)?,
            positions: positions.map(named).transpose()?,
            options: options(py, common, None, None, confirm, part)?,
        })
    }

    /// The page set on this side.
    #[getter]
    fn local(&self, py: Python<'_>) -> Py<PyPageSet> {
        self.local.clone_ref(py)
    }

    /// The ticket of the pages on the other.
    #[getter]
    fn ticket(&self) -> PyTicket {
        PyTicket(self.ticket.clone())
    }
}

/// Several reads that end as one, from `Engine.read_all`. Use `wait()`, or `await` it in asyncio.
///
/// Success means that the bytes of all are in place and were checked; an end of any kind means that nothing touches
/// the memory of this side any more. Cancelling a task that awaits it cancels all. Dropping the object does not.
#[pyclass(name = "JointRead", module = "kvik", frozen, weakref)]
pub struct PyJointRead {
    joint: Owned<JointRead>,
    engine: Py<PyAny>,
    reads: Vec<Py<PyRead>>,
}

#[pymethods]
impl PyJointRead {
    /// Whether all reads have ended, well or not. Cheap: meant for polling.
    #[getter]
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.joint.get(py)?.is_done())
    }

    /// The engine that runs them.
    #[getter]
    fn engine(&self, py: Python<'_>) -> Py<PyAny> {
        self.engine.clone_ref(py)
    }

    /// The reads, in the order of the call.
    #[getter]
    fn reads<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.reads)
    }

    /// Wait for the end of all, and return the report or raise the error of the first that failed.
    ///
    /// timeout: seconds, or None: as long as their deadline lets them take. If the timeout passes first, WaitTimeout is
    /// raised and they go on. Ctrl-C interrupts the wait, not the reads. Other Python threads run meanwhile.
    #[pyo3(signature = (timeout=None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<Seconds>) -> PyResult<Bound<'py, PyAny>> {
        let joint = self.joint.get(py)?;
        joint_report(py, &for_end(py, timeout, |step| joint.wait(step))?)
    }

    /// The report if all succeeded; None while one runs and if one failed.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let result = self.joint.get(py)?.result();
        result.and_then(Result::ok).map(|done| joint_report(py, &done)).transpose()
    }

    /// The error of the first that failed; None while one runs and if all succeeded.
    fn error(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        let result = self.joint.get(py)?.result();
        Ok(result.and_then(Result::err).map(|cause| raised(py, cause)))
    }

    /// What became of each read, in the order of the call: its Report, or its error, which is Cancelled for those that
    /// another one's failure has ended. None while one runs.
    fn outcomes<'py>(&self, py: Python<'py>) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        let outcomes = self.joint.get(py)?.outcomes();
        let shown = |outcome| match outcome {
            Ok(done) => report(py, done),
            Err(error) => Ok(raised(py, error).into_value(py).into_bound(py).into_any()),
        };
        outcomes.map(|all| all.into_iter().map(shown).collect()).transpose()
    }

    /// Ask all to end now. They have ended when `done` is true: until then their memory may still be touched.
    ///
    /// After the end of cancelled reads, `wait` raises Cancelled. Reads that have ended stay as they are.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let joint = self.joint.get(py)?;
        py.detach(|| joint.cancel());
        Ok(())
    }

    /// A descriptor that becomes readable when all have ended (at once if they have), for event loops.
    ///
    /// Each call makes one, which the caller must close with `os.close`. For asyncio `await` does all this.
    fn done_fd(&self, py: Python<'_>) -> PyResult<i32> {
        let joint = self.joint.get(py)?;
        Ok(py.detach(|| joint.done_fd()).or_raise(py)?.into_raw_fd())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        static WAIT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        WAIT.import(slf.py(), "kvik._awaiting", "result_of")?.call1((slf,))?.call_method0("__await__")
    }

    fn __repr__(&self) -> String {
        let Some(joint) = self.joint.here() else {
            return "<kvik.JointRead of the parent process>".into();
        };
        let count = self.reads.len();
        match joint.result() {
            None => format!("<kvik.JointRead of {count} on its way>"),
            Some(Ok(report)) => format!("<kvik.JointRead of {count} done: {} bytes>", report.bytes),
            Some(Err(error)) => format!("<kvik.JointRead of {count} failed: {}>", error.code),
        }
    }
}

/// Begins several reads; `together` is what all of them have.
pub fn begin<T>(
    engine: &Engine,
    of: &Bound<'_, T>,
    reads: Vec<Py<PyRead>>,
    together: &TransferOptions,
    deadline: Option<Duration>,
) -> PyResult<PyJointRead> {
    let py = of.py();
    let one = |read: &Py<PyRead>| -> PyResult<Read> {
        let read = read.get();
        let TransferOptions { class, transport, verify, after, tag, .. } = together.clone();
        let options = TransferOptions { class, transport, verify, after, tag, ..read.options.clone() };
        let local = read.local.get().pages.get(py)?.clone();
        Ok(Read { local, ticket: read.ticket.clone(), positions: read.positions.clone(), options })
    };
    let wanted: Vec<Read> = reads.iter().map(one).collect::<PyResult<_>>()?;
    let joint = py.detach(|| engine.read_all(wanted, deadline)).or_raise(py)?;
    Ok(PyJointRead { joint: Owned::new(joint), engine: of.clone().into_any().unbind(), reads })
}

fn joint_report<'py>(py: Python<'py>, joint: &JointReport) -> PyResult<Bound<'py, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let reads: Vec<_> = joint.reads.iter().map(|one| report(py, one.clone())).collect::<PyResult<_>>()?;
    let parts = (joint.bytes, joint.total.as_secs_f64(), PyTuple::new(py, reads)?);
    CLASS.import(py, "kvik._report", "JointReport")?.call1(parts)
}
