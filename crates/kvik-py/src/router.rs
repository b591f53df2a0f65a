//! The router's face: it runs on threads of its own and takes no part in the engine.

use crate::args::{Natural, Seconds, seconds, wrong};
use crate::errors;
use kvik_core::Code;
use kvik_router::{EngineUrl, RouterConfig, RouterError, RunningRouter};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

/// A router that listens. Ends when it is stopped, or when the last reference to it goes.
#[pyclass(name = "RunningRouter", module = "kvik._native", frozen)]
pub struct PyRouter(RunningRouter);

/// Starts a router that is listening when this returns. Times in seconds, sizes in bytes.
///
/// Raises InvalidArgument for a setting or URL that cannot work, OSError when the address cannot be listened on.
#[pyfunction]
#[pyo3(signature = (*, host, port, prefill, decode, connect_timeout, prefill_timeout, decode_timeout,
    client_timeout, release_timeout, drain_timeout, max_body, max_body_memory, max_inflight, transfer_mode="pull"))]
#[expect(clippy::too_many_arguments, reason = "each is a keyword of the Python function")]
pub fn serve_router(
    py: Python<'_>,
    host: String,
    port: Natural,
    prefill: Vec<String>,
    decode: Vec<String>,
    connect_timeout: Seconds,
    prefill_timeout: Seconds,
    decode_timeout: Seconds,
    client_timeout: Seconds,
    release_timeout: Seconds,
    drain_timeout: Seconds,
    max_body: Natural,
    max_body_memory: Natural,
    max_inflight: Natural,
    transfer_mode: &str,
) -> PyResult<PyRouter> {
    let stream = match transfer_mode {
        "pull" => false,
        "stream" => true,
        other => return Err(wrong(py, "transfer_mode", other, "\"pull\" or \"stream\"")),
    };
    let urls = |texts: Vec<String>| {
        texts.iter().map(|text| text.parse::<EngineUrl>()).collect::<Result<Vec<_>, _>>()
    };
    let urls = urls(prefill).and_then(|prefill| Ok((prefill, urls(decode)?)));
    let (prefill, decode) = urls.map_err(|error| raised(py, &error))?;
    let config = RouterConfig {
        host,
        port: port.within(py, "port")?,
        connect_timeout: seconds(py, "connect_timeout", connect_timeout)?,
        prefill_timeout: seconds(py, "prefill_timeout", prefill_timeout)?,
        decode_timeout: seconds(py, "decode_timeout", decode_timeout)?,
        client_timeout: seconds(py, "client_timeout", client_timeout)?,
        release_timeout: seconds(py, "release_timeout", release_timeout)?,
        drain_timeout: seconds(py, "drain_timeout", drain_timeout)?,
        max_body: max_body.within(py, "max_body")?,
        max_body_memory: max_body_memory.within(py, "max_body_memory")?,
        max_inflight: max_inflight.within(py, "max_inflight")?,
        stream,
        ..RouterConfig::new(prefill, decode)
    };
    py.detach(|| RunningRouter::start(config)).map(PyRouter).map_err(|error| raised(py, &error))
}

#[pymethods]
impl PyRouter {
    /// "HOST:PORT" with the port that was taken.
    #[getter]
    fn address(&self) -> String {
        self.0.addr().to_string()
    }

    /// Tells it to finish what it has, within its drain timeout, and to end. Returns at once.
    fn stop(&self) {
        self.0.stop();
    }

    /// Tells it to end without finishing anything. Returns at once.
    fn stop_now(&self) {
        self.0.stop_now();
    }

    /// Waits at most `timeout` seconds for its end: how many requests it has cut off; None while it runs.
    ///
    /// Raises OSError when it ended although nobody stopped it.
    fn wait(&self, py: Python<'_>, timeout: Seconds) -> PyResult<Option<usize>> {
        let timeout = seconds(py, "timeout", timeout)?;
        let ended = py.detach(|| self.0.wait(Some(timeout))).transpose();
        ended.map_err(|error| raised(py, &error))
    }
}

fn raised(py: Python<'_>, error: &RouterError) -> PyErr {
    match error {
        RouterError::Config(text) => errors::error(py, Code::InvalidArgument, text),
        RouterError::Failed(text) => PyOSError::new_err(text.clone()),
    }
}
