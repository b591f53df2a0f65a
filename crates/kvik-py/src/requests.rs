//! What Python says of a transfer, and hears of how one would go.

use crate::args::{Ends, Natural, Seconds, maybe_seconds, range};
use crate::content::{PyContent, content};
use crate::errors::OrRaise;
use kvik_engine::{Estimate, Explanation, TransferOptions};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

/// Keyword arguments that there are not; of an earlier one, what is used instead.
pub fn refuse(other: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
    let Some(name) = other.and_then(|other| other.keys().iter().next()) else { return Ok(()) };
    let name: String = name.extract()?;
    Err(PyTypeError::new_err(match name.as_str() {
        "remote" => {
            "there is no remote=: pages are named by their position in the grant, and not by the owner's ids; use \
             positions="
                .to_owned()
        }
        name => format!("there is no keyword argument {name}="),
    }))
}

/// Which part of the grant, and how it is seen.
pub struct Part {
    pub layers: Option<Ends>,
    pub slices: Option<Ends>,
    pub parts: Option<Natural>,
}

/// What every request to an owner has.
pub fn common(
    py: Python<'_>,
    deadline: Option<Seconds>,
    readers: Natural,
    given: Option<&Bound<'_, PyContent>>,
    tag: &str,
) -> PyResult<TransferOptions> {
    Ok(TransferOptions {
        content: content(given),
        deadline: maybe_seconds(py, "deadline", deadline)?,
        readers: Some(readers.within(py, "readers")?),
        tag: tag.to_owned(),
        ..TransferOptions::default()
    })
}

pub fn options(
    py: Python<'_>,
    common: TransferOptions,
    transport: Option<&str>,
    verify: Option<&str>,
    confirm: bool,
    part: Part,
) -> PyResult<TransferOptions> {
    Ok(TransferOptions {
        transport: transport.map(str::parse).transpose().or_raise(py)?,
        verify: verify.map(str::parse).transpose().or_raise(py)?,
        confirm: Some(confirm),
        remote_layers: part.layers.map(|ends| range(py, "remote_layers", ends)).transpose()?,
        remote_slices: part.slices.map(|ends| range(py, "remote_slices", ends)).transpose()?,
        remote_parts: part.parts.map(|parts| parts.within(py, "remote_parts")).transpose()?,
        ..common
    })
}

/// A `kvik.Estimate`, or None.
pub fn estimated(py: Python<'_>, found: Option<Estimate>) -> PyResult<Option<Bound<'_, PyAny>>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let Some(Estimate { start, total, bytes_per_second, queued, samples }) = found else { return Ok(None) };
    let class = CLASS.import(py, "kvik._report", "Estimate")?;
    class.call1((total.as_secs_f64(), start.as_secs_f64(), bytes_per_second, queued, samples)).map(Some)
}

/// A dict, as `Engine.explain` tells of it.
pub fn explained(py: Python<'_>, found: Explanation) -> PyResult<Bound<'_, PyDict>> {
    let told = PyDict::new(py);
    told.set_item("transport", found.transport.name())?;
    told.set_item("mechanism", found.mechanism)?;
    told.set_item("estimate", estimated(py, found.estimate)?)?;
    let rejected: Vec<_> = found.rejected_transports.iter().map(ToString::to_string).collect();
    told.set_item("rejected_transports", rejected)?;
    let mut probes = Vec::with_capacity(found.probes.len());
    for (name, works, reason, detail) in found.probes {
        let probe = PyDict::new(py);
        probe.set_item("name", name)?;
        probe.set_item("works", works)?;
        probe.set_item("reason", reason)?;
        probe.set_item("detail", detail)?;
        probes.push(probe);
    }
    told.set_item("probes", probes)?;
    Ok(told)
}
