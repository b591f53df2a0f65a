//! What keeps an engine's grants and regions while Python refers to none of them.

use crate::process::lock;
use crate::region::PyRegion;
use kvik_core::GrantState;
use kvik_engine::Grant;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use std::sync::Mutex;

/// What the object of an engine remembers for Python.
#[derive(Default)]
pub(crate) struct Kept {
    /// Grants that were live when last looked at. A ticket may outlive the Python objects that it was made
    /// from, and the engine unregisters a region that nobody refers to: so this refers to its live grants.
    grants: Mutex<Vec<Grant>>,
    /// Weak references to registered regions, whose memory is given back when the engine closes.
    regions: Mutex<Vec<Py<PyWeakrefReference>>>,
}

impl Kept {
    pub fn keep_grant(&self, grant: &Grant) {
        push(&self.grants, grant.clone(), |grant| grant.state() == GrantState::Live);
    }

    pub fn keep_region(&self, region: &Bound<'_, PyRegion>) -> PyResult<()> {
        let py = region.py();
        let weak = PyWeakrefReference::new(region)?.unbind();
        push(&self.regions, weak, |weak| weak.bind(py).upgrade().is_some());
        Ok(())
    }

    /// Lets go of everything, once the engine is closed.
    pub fn clear(&self, py: Python<'_>) {
        drop(take(&self.grants));
        for weak in take(&self.regions) {
            if let Some(Ok(region)) = weak.bind(py).upgrade().map(|region| region.cast_into::<PyRegion>()) {
                region.get().abandon(py);
            }
        }
    }
}

/// Adds an element. When the list is full, those that are over are let go and room is made for as many as are
/// left: so an element costs a constant time.
fn push<T>(list: &Mutex<Vec<T>>, element: T, lasts: impl Fn(&T) -> bool) {
    let mut list = lock(list);
    if list.len() == list.capacity() {
        list.retain(lasts);
        let left = list.len();
        list.reserve(left.max(16));
    }
    list.push(element);
}

fn take<T>(list: &Mutex<Vec<T>>) -> Vec<T> {
    std::mem::take(&mut *lock(list))
}
