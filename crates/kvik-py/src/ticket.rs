//! `kvik.Ticket`.

use crate::args::{Seconds, seconds};
use crate::errors::OrRaise;
use crate::layout::hex;
use kvik_core::{GrantId, Ticket};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::hash::{Hash, Hasher};

/// What travels from the owner of pages to those who may use them: at most 256 characters, `str(ticket)`.
///
/// `Ticket(text)` reads it back, and raises TicketInvalid for a truncated or altered one and TicketVersion
/// for one of a kvik that this one does not understand. It is plain data: it may be pickled, and used in a
/// forked child.
#[pyclass(name = "Ticket", module = "kvik", frozen, eq, hash)]
#[derive(PartialEq, Eq)]
pub struct PyTicket(pub Ticket);

impl Hash for PyTicket {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.0.engine, self.0.grant).hash(state);
    }
}

#[pymethods]
impl PyTicket {
    #[new]
    fn new(py: Python<'_>, text: &str) -> PyResult<PyTicket> {
        text.parse::<Ticket>().or_raise(py).map(PyTicket)
    }

    /// The owner, as in its `Engine.id`.
    #[getter]
    fn engine_id(&self) -> String {
        self.0.engine.to_string()
    }

    /// The start of the owner that gave the grant.
    #[getter]
    fn incarnation(&self) -> u64 {
        self.0.incarnation.0
    }

    /// Where the owner listens, as "HOST:PORT".
    #[getter]
    fn addresses(&self) -> Vec<String> {
        self.0.addresses.iter().map(ToString::to_string).collect()
    }

    /// The grant, 32 hexadecimal digits.
    #[getter]
    fn grant_id(&self) -> String {
        self.0.grant.to_string()
    }

    /// "read" or "write".
    #[getter]
    fn right(&self) -> &'static str {
        self.0.right.name()
    }

    /// Digest of the layout that the pages have at the owner.
    #[getter]
    fn layout_digest(&self) -> String {
        hex(&self.0.layout)
    }

    /// Seconds that the grant was to live when the ticket was made. The owner alone judges expiry.
    #[getter]
    fn expires_in(&self) -> f64 {
        self.0.expiry.as_secs_f64()
    }

    /// The same ticket for another grant of the same engine: for a process that acts for it.
    ///
    /// grant_id: 32 hexadecimal digits, random. expiry: seconds.
    fn with_grant(&self, py: Python<'_>, grant_id: &str, expiry: Seconds) -> PyResult<PyTicket> {
        let grant = GrantId::from_hex(grant_id).or_raise(py)?;
        Ok(PyTicket(self.0.with_grant(grant, seconds(py, "expiry", expiry)?)))
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyAny>, (String,)) {
        (slf.get_type().into_any(), (slf.get().0.to_string(),))
    }

    /// The grant's id is cut: whoever has all of it may use the pages.
    fn __repr__(&self) -> String {
        let (engine, grant) = (self.0.engine.to_string(), self.0.grant.to_string());
        let (right, at) = (self.0.right.name(), self.addresses().join(", "));
        format!("<kvik.Ticket {right} grant {grant:.8}… of engine {engine:.8}… at {at}>")
    }
}

/// A ticket, or its text.
pub fn ticket(object: &Bound<'_, PyAny>) -> PyResult<Ticket> {
    if let Ok(ticket) = object.cast::<PyTicket>() {
        return Ok(ticket.get().0.clone());
    }
    match object.cast::<PyString>() {
        Ok(text) => text.to_str()?.parse::<Ticket>().or_raise(object.py()),
        Err(_) => Err(PyTypeError::new_err("ticket takes a kvik.Ticket or its text")),
    }
}
