//! `kvik.Grant`.

use crate::args::{Seconds, maybe_seconds, seconds};
use crate::errors::OrRaise;
use crate::fork::Owned;
use crate::region::PyPageSet;
use crate::ticket::PyTicket;
use crate::wait::in_steps;
use kvik_engine::Grant;
use pyo3::prelude::*;

/// The owner's permission on a page set, from `Engine.grant`. It lives until it is consumed, expires or is
/// revoked.
#[pyclass(name = "Grant", module = "kvik", frozen, weakref)]
pub struct PyGrant {
    grant: Owned<Grant>,
    pages: Py<PyPageSet>,
}

impl PyGrant {
    /// The Python object of a grant.
    pub fn new(grant: Grant, pages: Py<PyPageSet>) -> PyGrant {
        PyGrant { grant: Owned::new(grant), pages }
    }
}

#[pymethods]
impl PyGrant {
    /// What its users need: give them `str(grant.ticket)`.
    #[getter]
    fn ticket(&self, py: Python<'_>) -> PyResult<PyTicket> {
        Ok(PyTicket(self.grant.get(py)?.ticket().clone()))
    }

    /// 32 hexadecimal digits.
    #[getter]
    fn id(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.grant.get(py)?.id().to_string())
    }

    /// "live", "consumed", "expired", "revoked" or "closed". Only a live grant serves requests.
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(self.grant.get(py)?.state().name())
    }

    /// The pages that it is for.
    #[getter]
    fn pages(&self, py: Python<'_>) -> Py<PyPageSet> {
        self.pages.clone_ref(py)
    }

    /// Take the permission back. When this returns no peer touches the pages.
    ///
    /// timeout: seconds to wait for peers that are using it. Raises PagesQuarantined if one may still touch
    /// the pages then. Revoking a grant that has ended does nothing.
    #[pyo3(signature = (timeout=Seconds::of(5.0)), text_signature = "($self, timeout=5.0)")]
    fn revoke(&self, py: Python<'_>, timeout: Seconds) -> PyResult<()> {
        let (grant, timeout) = (self.grant.get(py)?, seconds(py, "timeout", timeout)?);
        py.detach(|| grant.revoke(timeout)).or_raise(py)
    }

    /// Let it live longer: by `seconds`, and no longer than its `max_expiry` from its start.
    ///
    /// Returns the seconds it now has left. Raises GrantExpired, GrantConsumed or GrantRevoked once it has
    /// ended.
    fn extend(&self, py: Python<'_>, seconds: Seconds) -> PyResult<f64> {
        let (grant, by) = (self.grant.get(py)?, crate::args::seconds(py, "seconds", seconds)?);
        Ok(py.detach(|| grant.extend(by)).or_raise(py)?.as_secs_f64())
    }

    /// Wait until it has ended and its pages are the owner's again; returns the final state.
    ///
    /// timeout: seconds, or None: as long as the grant lives. Returns None if the timeout passes first.
    ///     Ctrl-C interrupts.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<Option<&'static str>> {
        let (grant, timeout) = (self.grant.get(py)?, maybe_seconds(py, "timeout", timeout)?);
        Ok(in_steps(py, timeout, |step| grant.wait(step))?.map(|state| state.name()))
    }

    fn __repr__(&self) -> String {
        let Some(grant) = self.grant.here() else { return "<kvik.Grant of the parent process>".into() };
        let (right, id) = (grant.ticket().right.name(), grant.id().to_string());
        format!("<kvik.Grant {right} {id:.8}…, {}>", grant.state().name())
    }
}
