//! The options of an engine: `kvik.config` decides their values, the engine's [`Config`] takes them.
//!
//! What was given as an argument comes as it was given, and is checked here and by the engine; the rest comes
//! from variables, the configuration file and the defaults of the schema, checked there.

use crate::args::{self, natural, seconds};
use crate::errors::OrRaise;
use kvik_core::Result;
use kvik_engine::{Config, NicOptions, TlsFiles, parse_listen};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;

/// The engine's configuration, from the arguments that were given.
pub fn config(
    py: Python<'_>,
    listen: Option<&Bound<'_, PyAny>>,
    given: Option<&Bound<'_, PyDict>>,
) -> PyResult<Config> {
    let arguments = given.map_or_else(|| Ok(PyDict::new(py)), Bound::copy)?;
    arguments.set_item("listen", listen)?;
    let decided = py.import("kvik.config")?.call_method1("engine_arguments", (arguments,))?;
    let given = Given(decided.cast_into::<PyDict>()?);
    let listen: Vec<String> = given.need("listen", args::texts)?;
    Ok(Config {
        listen: listen.iter().map(|text| parse_listen(text)).collect::<Result<_>>().or_raise(py)?,
        advertise: given.may("advertise", args::texts)?.unwrap_or_default(),
        secret: given.may("secret", args::secret)?,
        tls: given.may::<PathBuf>("tls", |_, given| given.extract())?.map(TlsFiles::within),
        transport: given.need::<String>("transport", |_, given| given.extract())?.parse().or_raise(py)?,
        verify: given.need::<String>("verify", |_, given| given.extract())?.parse().or_raise(py)?,
        channels: given.need("channels", natural)?,
        io_threads: given.need("io_threads", natural)?,
        deadline: seconds(py, "deadline", given.need("deadline", |_, given| given.extract())?)?,
        memory_cap: given.need("memory_cap", args::size)?,
        window: given.need("window", args::size)?,
        cpus: given.may("cpus", cpu_numbers)?,
        numa_node: given.may("numa_node", natural)?,
        name: given.need("name", |_, given| given.extract())?,
        nics: nics(py, &given)?,
        nic_threads: given.need("nic_threads", natural)?,
        between: None,
    })
}

/// The NICs, where some are named.
fn nics(py: Python<'_>, given: &Given<'_>) -> PyResult<Option<NicOptions>> {
    let library = given.may("nic_library", |_, given| given.extract())?;
    let Some(named) = given.may::<String>("nics", |_, given| given.extract())? else { return Ok(None) };
    let nics: NicOptions = named.parse().or_raise(py)?;
    Ok(Some(NicOptions { library, ..nics }))
}

/// The decided value of each option; errors of its type say which option it is.
struct Given<'py>(Bound<'py, PyDict>);

impl<'py> Given<'py> {
    fn may<T>(
        &self,
        name: &str,
        read: impl FnOnce(&str, &Bound<'py, PyAny>) -> PyResult<T>,
    ) -> PyResult<Option<T>> {
        let value = self.0.get_item(name)?.filter(|value| !value.is_none());
        value.map(|value| read(name, &value).map_err(|cause| named(&value, name, cause))).transpose()
    }

    fn need<T>(&self, name: &str, read: impl FnOnce(&str, &Bound<'py, PyAny>) -> PyResult<T>) -> PyResult<T> {
        self.may(name, read)?.ok_or_else(|| PyTypeError::new_err(format!("Engine: {name} has no value")))
    }
}

/// Says which argument has the wrong type, as Python does.
fn named(value: &Bound<'_, PyAny>, name: &str, cause: PyErr) -> PyErr {
    let py = value.py();
    let text = cause.value(py).to_string();
    if !cause.get_type(py).is(py.get_type::<PyTypeError>()) || text.starts_with(name) {
        return cause;
    }
    let given = PyTypeError::new_err(format!("argument '{name}': {text}"));
    given.set_cause(py, Some(cause));
    given
}

fn cpu_numbers(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    given.try_iter()?.map(|cpu| natural(name, &cpu?)).collect()
}

/// The engine's own defaults by option, as text; "" is no value. A test compares them with the schema's.
#[pyfunction]
pub fn engine_defaults(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let config = Config::default();
    let several = |parts: Vec<String>| parts.join(",");
    let defaults = PyDict::new(py);
    for (name, value) in [
        ("listen", several(config.listen.iter().map(ToString::to_string).collect())),
        ("advertise", several(config.advertise)),
        ("secret", config.secret.map_or_else(String::new, |_| "set".to_owned())),
        ("tls", config.tls.map_or_else(String::new, |_| "set".to_owned())),
        ("transport", config.transport.name().to_owned()),
        ("verify", config.verify.name().to_owned()),
        ("channels", config.channels.to_string()),
        ("io_threads", config.io_threads.to_string()),
        ("deadline", config.deadline.as_secs_f64().to_string()),
        ("memory_cap", config.memory_cap.to_string()),
        ("window", config.window.to_string()),
        ("nics", config.nics.as_ref().map_or_else(String::new, ToString::to_string)),
        (
            "nic_library",
            config.nics.and_then(|nics| nics.library).map_or_else(String::new, |_| "set".to_owned()),
        ),
        ("nic_threads", config.nic_threads.to_string()),
        ("cpus", several(config.cpus.unwrap_or_default().iter().map(ToString::to_string).collect())),
        ("numa_node", config.numa_node.map_or_else(String::new, |node| node.to_string())),
        ("name", config.name),
    ] {
        defaults.set_item(name, value)?;
    }
    Ok(defaults)
}
