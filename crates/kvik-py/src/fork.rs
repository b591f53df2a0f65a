//! What a forked child inherits, and must not use.
//!
//! A fork copies the memory of the process but only the thread that called it: the child has an engine whose
//! threads are gone, whose locks may be held by nobody, and whose sockets are the parent's. So every object
//! of the engine is kept in an [`Owned`], which in any other process neither lends it out nor drops it.

use crate::errors::error;
use kvik_core::Code;
use pyo3::prelude::*;
use std::mem;
use std::process;

/// A value that belongs to the process that made it.
pub struct Owned<T> {
    value: Option<T>,
    owner: u32,
}

impl<T> Owned<T> {
    /// Keeps a value for this process.
    pub fn new(value: T) -> Owned<T> {
        Owned { value: Some(value), owner: process::id() }
    }

    /// The value, or nothing in a forked child.
    pub fn here(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.owner == process::id())
    }

    /// The value for good, or nothing in a forked child.
    pub fn take(&mut self) -> Option<T> {
        self.value.take_if(|_| self.owner == process::id())
    }

    /// Drops the value without Python's lock: its end waits for threads, which may want to log.
    pub fn end(&mut self)
    where
        T: Send,
    {
        if let Some(value) = self.take() {
            Python::attach(|py| py.detach(|| drop(value)));
        }
    }

    /// The value.
    ///
    /// # Errors
    /// `EngineForked` in a forked child.
    pub fn get(&self, py: Python<'_>) -> PyResult<&T> {
        self.here().ok_or_else(|| {
            error(
                py,
                Code::EngineForked,
                format!(
                    "this object belongs to process {}, of which process {} is a forked child: \
                     make a new kvik.Engine here, or start the child with the \"spawn\" method",
                    self.owner,
                    process::id()
                ),
            )
        })
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.owner != process::id() {
            // Dropping would close or unlock what the parent still uses.
            mem::forget(self.value.take());
        }
    }
}
