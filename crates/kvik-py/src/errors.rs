//! One Python exception class for each [`Code`], under `KvikError`.
//!
//! The classes are made when the module is loaded, from [`Code::ALL`], so that a new code is an exception
//! without a second list to keep. Where Python has a class of the same meaning, ours is also one of those:
//! code that catches `ConnectionError` catches a lost peer.

use kvik_core::{Code, Error, Subject};
use pyo3::exceptions::{
    PyConnectionError, PyException, PyIndexError, PyRuntimeError, PyTimeoutError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

static CLASSES: PyOnceLock<Vec<(Code, Py<PyType>)>> = PyOnceLock::new();

/// Makes the classes and puts them into the module.
pub fn install(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let base =
        new_class(py, "KvikError", "kvik_error", "Any error of kvik.", &[py.get_type::<PyException>()])?;
    module.add("KvikError", &base)?;
    let mut classes = Vec::with_capacity(Code::ALL.len());
    for &code in Code::ALL {
        let mut bases = vec![base.clone()];
        bases.extend(sibling(py, code));
        let class = new_class(py, code.class(), code.name(), code.about(), &bases)?;
        module.add(code.class(), &class)?;
        classes.push((code, class.unbind()));
    }
    // A second load of the module would keep the first classes, which the functions below raise.
    let _ = CLASSES.set(py, classes);
    Ok(())
}

/// The class of Python that means the same.
fn sibling(py: Python<'_>, code: Code) -> Option<Bound<'_, PyType>> {
    match code {
        Code::InvalidArgument | Code::TicketInvalid => Some(py.get_type::<PyValueError>()),
        Code::PageOutOfRange => Some(py.get_type::<PyIndexError>()),
        Code::WaitTimeout | Code::DeadlineExceeded => Some(py.get_type::<PyTimeoutError>()),
        Code::PeerUnreachable | Code::PeerLost => Some(py.get_type::<PyConnectionError>()),
        _ => None,
    }
}

fn new_class<'py>(
    py: Python<'py>,
    name: &str,
    code: &str,
    about: &str,
    bases: &[Bound<'py, PyType>],
) -> PyResult<Bound<'py, PyType>> {
    let body = PyDict::new(py);
    body.set_item("code", code)?;
    body.set_item("__doc__", about)?;
    for name in ["peer", "grant", "region", "page", "read"] {
        body.set_item(name, py.None())?;
    }
    // Where users find it, so that tracebacks and pickles name it there.
    body.set_item("__module__", "kvik")?;
    let class = py.get_type::<PyType>().call1((name, PyTuple::new(py, bases)?, body))?;
    Ok(class.cast_into::<PyType>()?)
}

/// The Python exception of an error.
pub fn raised(py: Python<'_>, error: Error) -> PyErr {
    let class = CLASSES.get(py).and_then(|all| all.iter().find(|(code, _)| *code == error.code));
    match class {
        Some((_, class)) => match exception(class.bind(py), &error) {
            Ok(exception) => PyErr::from_value(exception),
            Err(failed) => failed,
        },
        None => PyRuntimeError::new_err(error.text),
    }
}

/// The exception, with what it is about as attributes: ids in the form in which Python has them elsewhere.
fn exception<'py>(class: &Bound<'py, PyType>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let exception = class.call1((error.text.as_str(),))?;
    let Subject { peer, grant, region, page, read } = error.subject();
    exception.setattr("peer", peer.map(|peer| peer.to_string()))?;
    exception.setattr("grant", grant.map(|grant| grant.to_string()))?;
    exception.setattr("region", region.map(|region| region.0))?;
    exception.setattr("page", page)?;
    exception.setattr("read", read)?;
    Ok(exception)
}

/// The Python exception of this kind with this text.
pub fn error(py: Python<'_>, code: Code, text: impl Into<String>) -> PyErr {
    raised(py, Error::new(code, text))
}

/// Turns the errors of the engine into those of Python.
pub trait OrRaise<T> {
    /// The value, or the Python exception.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for kvik_core::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raised(py, error))
    }
}
