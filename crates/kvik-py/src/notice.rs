//! `kvik.Notice`: a notification that was sent.

use crate::args::Seconds;
use crate::errors::{OrRaise, error, raised};
use crate::fork::Owned;
use crate::wait::{for_end, in_steps};
use kvik_core::{Code, EngineId, Result};
use kvik_engine::{Engine, Notice, Notifying, To};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;
use std::borrow::Cow;
use std::os::fd::IntoRawFd;
use std::sync::Arc;
use std::time::Duration;

/// A notification on its way, from `Engine.notify`. Use `wait()`, or `await` it in asyncio, or neither.
///
/// It has ended well when every user of events in the peer's program has taken it.
#[pyclass(name = "Notice", module = "kvik", frozen, weakref)]
pub struct PyNotice(Owned<Notice>);

#[pymethods]
impl PyNotice {
    /// Whether it has ended, well or not.
    #[getter]
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.0.get(py)?.is_done())
    }

    /// The error that ended it; None while it is on its way and when it was taken.
    fn error(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        let result = self.0.get(py)?.result();
        Ok(result.and_then(Result::err).map(|cause| raised(py, cause)))
    }

    /// Wait until the peer's program has taken it.
    ///
    /// timeout: seconds, or None: until its deadline. WaitTimeout when the timeout passes first. Raises
    /// DeadlineExceeded when it was not taken by its deadline and PeerLost when the connection ended first: it
    /// may have been taken all the same.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<()> {
        let notice = self.0.get(py)?;
        for_end(py, timeout, |step| notice.wait(step))
    }

    /// A descriptor that becomes readable when it ends (at once if it has), for event loops.
    ///
    /// Each call makes one, which the caller must close with `os.close`. For asyncio `await notice` does all this.
    fn done_fd(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.0.get(py)?.done_fd().or_raise(py)?.into_raw_fd())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        static WAIT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        WAIT.import(slf.py(), "kvik._awaiting", "taken")?.call1((slf,))?.call_method0("__await__")
    }
}

/// Sends a notification, waiting for its place in steps that let Ctrl-C through.
pub fn notify(
    py: Python<'_>,
    engine: &Engine,
    to: &Bound<'_, PyAny>,
    payload: &Bound<'_, PyAny>,
    deadline: Option<Duration>,
) -> PyResult<PyNotice> {
    let Ok(bytes) = payload.extract::<Cow<'_, [u8]>>() else {
        let text = format!("payload takes bytes, not {}: encode a text", payload.get_type().name()?);
        return Err(PyTypeError::new_err(text));
    };
    let notifying = Notifying::begin(engine, 0, whom(to)?, &bytes, deadline).or_raise(py)?;
    let sent = in_steps(py, None, |step| notifying.wait(step).transpose())?;
    let late = || error(py, Code::NotificationsFull, "the notification found no place in time; try again");
    Ok(PyNotice(Owned::new(sent.ok_or_else(late)?.or_raise(py)?)))
}

/// A ticket, its text, or the id of a peer.
pub fn whom(to: &Bound<'_, PyAny>) -> PyResult<To> {
    if let Ok(text) = to.cast::<PyString>()
        && let Ok(peer) = EngineId::from_hex(text.to_str()?)
    {
        return Ok(To::Peer(peer));
    }
    match crate::ticket::ticket(to) {
        Err(error) if error.is_instance_of::<PyTypeError>(to.py()) => {
            Err(PyTypeError::new_err("a peer is named by a kvik.Ticket, its text, or its id"))
        }
        ticket => Ok(To::Ticket(Arc::new(ticket?))),
    }
}
