//! `kvik.Events`, and events and peers as Python's dataclasses.

use crate::args::{Seconds, maybe_seconds};
use crate::errors::{OrRaise, error};
use crate::fork::Owned;
use crate::wait::in_steps;
use kvik_core::Code;
use kvik_engine::{Engine, Event, Events, Meeting, Peer, Who};
use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyTuple, PyType};
use std::os::fd::IntoRawFd;
use std::time::Duration;

/// What happens to an engine, from `Engine.events`: an iterator, also in asyncio, that ends with the engine.
///
/// Each of them gets every event. A notification is acknowledged when all of them have taken it, so one that
/// is not read any more must be closed: it would hold up every peer that notifies this engine. Of other events
/// the oldest are dropped when 1024 wait, and an event of kind "events_lost" says how many.
#[pyclass(name = "Events", module = "kvik", frozen, weakref)]
pub struct PyEvents(Owned<Events>);

impl PyEvents {
    /// The Python object of a user's queue.
    pub fn new(events: Events) -> PyEvents {
        PyEvents(Owned::new(events))
    }
}

#[pymethods]
impl PyEvents {
    /// The next event; None when none came within the timeout (seconds; None: however long it takes).
    ///
    /// Ctrl-C interrupts it, and other Python threads run meanwhile. Raises EngineClosed once the engine or this
    /// iterator is closed.
    #[pyo3(signature = (timeout=None))]
    fn next<'py>(&self, py: Python<'py>, timeout: Option<Seconds>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let limit = maybe_seconds(py, "timeout", timeout)?;
        let found = self.take(py, limit, false)?;
        found.map(|event| told(py, event.ok_or_else(|| over(py))?)).transpose()
    }

    /// The next event if one waits, else None. Cheap: meant for event loops.
    fn poll<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.0.get(py)?.next(Duration::ZERO) {
            Err(error) if error.code == Code::EngineClosed => Ok(None),
            next => next.or_raise(py)?.map(|event| told(py, event)).transpose(),
        }
    }

    /// A descriptor that is readable while an event waits, and from the end on; for event loops.
    ///
    /// Each call makes one, which the caller must close with `os.close`. For asyncio `async for` does all this.
    fn fd(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.0.get(py)?.fd().or_raise(py)?.into_raw_fd())
    }

    /// Whether it has ended: by `close`, or with its engine.
    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.0.get(py)?.is_closed())
    }

    /// End it. It holds back nothing any more, and whoever waits for it gets nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let events = self.0.get(py)?;
        py.detach(|| events.close());
        Ok(())
    }

    /// As `next`, for the thread of a callback: the engine's close waits until the thread asks again.
    fn _hand_on<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, None, true)?.flatten().map(|event| told(py, event)).transpose()
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let event = self.take(py, None, false)?.flatten();
        told(py, event.ok_or_else(|| PyStopIteration::new_err(()))?)
    }

    fn __aiter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __anext__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        static NEXT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        NEXT.import(slf.py(), "kvik._awaiting", "next_event")?.call1((slf,))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: Option<&Bound<'_, PyType>>,
        _value: Option<&Bound<'_, PyAny>>,
        _trace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.close(py)
    }
}

impl PyEvents {
    /// The next event, or inside nothing where none comes any more; nothing at the limit.
    fn take(
        &self,
        py: Python<'_>,
        limit: Option<Duration>,
        hand_on: bool,
    ) -> PyResult<Option<Option<Event>>> {
        let events = self.0.get(py)?;
        let next = |step: Duration| if hand_on { events.next_to_hand_on(step) } else { events.next(step) };
        let found = in_steps(py, limit, |step| match next(step) {
            Ok(event @ Some(_)) => Some(Ok(event)),
            Ok(None) => events.is_closed().then_some(Ok(None)),
            Err(error) if error.code == Code::EngineClosed => Some(Ok(None)),
            Err(error) => Some(Err(error)),
        })?;
        found.transpose().or_raise(py)
    }
}

fn over(py: Python<'_>) -> PyErr {
    error(py, Code::EngineClosed, "no more events come: the engine, or they, were closed")
}

/// The event as Python sees it.
fn told<'py>(py: Python<'py>, event: Event) -> PyResult<Bound<'py, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let fields = PyDict::new(py);
    fields.set_item("kind", event.name())?;
    let of = |who: &Who| {
        fields.set_item("peer", who.engine.to_string())?;
        fields.set_item("incarnation", who.incarnation.0)?;
        fields.set_item("name", &who.name)
    };
    let why = |error: &kvik_core::Error| {
        fields.set_item("code", error.code.name())?;
        fields.set_item("reason", &error.text)
    };
    match &event {
        Event::PeerUp(who, reason) => of(who).and_then(|()| fields.set_item("reason", reason)),
        Event::PeerSuspect(who) => of(who),
        Event::PeerLost(who, error) | Event::PeerRestarted(who, error) => of(who).and_then(|()| why(error)),
        Event::GrantEnded(grant, state) => {
            fields.set_item("grant", grant.to_string())?;
            fields.set_item("state", state.name())
        }
        Event::PagesQuarantined(grant, pages) | Event::PagesReturned(grant, pages) => {
            fields.set_item("grant", grant.to_string())?;
            fields.set_item("pages", pages)
        }
        Event::TransportChanged { peer, from, to, reason } => {
            of(peer)?;
            fields.set_item("instead_of", from.name())?;
            fields.set_item("transport", to.name())?;
            fields.set_item("reason", reason)
        }
        Event::Notification(who, payload) => {
            of(who)?;
            fields.set_item("payload", PyBytes::new(py, payload))
        }
        Event::EventsLost(lost) => fields.set_item("lost", lost),
    }?;
    CLASS.import(py, "kvik._events", "Event")?.call((), Some(&fields))
}

/// Meets whoever listens at an address, waiting in steps that let Ctrl-C through: the peer as Python sees it.
pub fn meet<'py>(
    py: Python<'py>,
    engine: &Engine,
    address: &str,
    deadline: Option<Duration>,
) -> PyResult<Bound<'py, PyAny>> {
    let meeting = py.detach(|| Meeting::begin(engine, address, deadline)).or_raise(py)?;
    let met = in_steps(py, None, |step| meeting.wait(step).transpose())?;
    let lost = || error(py, Code::PeerLost, "the connection to whom was met is gone already: meet again");
    let who = met.ok_or_else(lost)?.or_raise(py)?;
    let found = py.detach(|| engine.peers()).into_iter();
    let one = found.filter(|peer| (peer.engine, peer.incarnation) == (who.engine, who.incarnation)).collect();
    peers(py, one)?.pop().ok_or_else(lost)
}

/// The peers as Python sees them.
pub fn peers(py: Python<'_>, peers: Vec<Peer>) -> PyResult<Vec<Bound<'_, PyAny>>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = CLASS.import(py, "kvik._events", "Peer")?;
    let one = |peer: Peer| {
        class.call1((
            peer.engine.to_string(),
            peer.incarnation.0,
            peer.name,
            peer.address.map(|address| address.to_string()),
            peer.state.name(),
            peer.silent.map(|silent| silent.as_secs_f64()),
            PyTuple::new(py, peer.transports.iter().map(|transport| transport.name()).collect::<Vec<_>>())?,
            peer.channels,
            peer.transfers,
            peer.reconnecting,
            peer.reason,
        ))
    };
    peers.into_iter().map(one).collect()
}
