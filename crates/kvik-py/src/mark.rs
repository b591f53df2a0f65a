//! `kvik.StreamMark`: a point in a stream of a GPU.

use crate::args::Seconds;
use crate::errors::OrRaise;
use crate::fork::Owned;
use crate::gpus;
use crate::wait::for_end;
use kvik_engine::{Region, StreamMark};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// A point in a stream of a GPU, from `Region.mark`.
#[pyclass(name = "StreamMark", module = "kvik", frozen)]
pub struct PyStreamMark(Owned<StreamMark>);

#[pymethods]
impl PyStreamMark {
    /// Wait until the stream has done all that it was given before the mark.
    ///
    /// timeout: seconds; None for the engine's deadline. WaitTimeout when it passes first. Raises DeviceFailed where the
    /// stream never gets there, EngineClosed. Other Python threads run meanwhile.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<()> {
        let mark = self.0.get(py)?;
        let timeout = timeout.unwrap_or_else(|| Seconds::of(mark.deadline().as_secs_f64()));
        for_end(py, Some(timeout), |step| mark.wait(step))
    }
}

/// See `Region.mark`.
pub fn mark(py: Python<'_>, region: &Region, stream: &Bound<'_, PyAny>) -> PyResult<PyStreamMark> {
    let stream = gpus::stream(Some(stream))?.ok_or_else(|| PyTypeError::new_err("stream is None"))?;
    Ok(PyStreamMark(Owned::new(region.mark(stream).or_raise(py)?)))
}
