//! The seam for programs that watch an engine from the same process. Recordings and `kvik stat` are built on it, in
//! `kvik-observe`; the engine knows none of them.

use crate::config::Preference;
use crate::engine::Engine;
use crate::inner::Inner;
use crate::metrics::metrics_text;
use crate::observers::Observer;
use kvik_core::Result;
use kvik_host::thread::ThreadOptions;
use std::sync::{Arc, Weak};

/// An engine that is not kept running by this.
#[derive(Clone)]
pub struct WeakEngine(Weak<Inner>);

impl WeakEngine {
    /// As [`Engine::metrics`]; `None` when the engine is gone.
    pub fn metrics(&self) -> Option<String> {
        Some(metrics_text(&*self.0.upgrade()?))
    }
}

impl Engine {
    /// Lets `observer` see this engine until it is closed.
    ///
    /// # Errors
    /// `EngineClosed`, or `InvalidArgument` when it has an observer.
    pub fn observe(&self, observer: Arc<dyn Observer>) -> Result<()> {
        self.inner().base.setup.check()?;
        self.inner().base.observers.add(observer)
    }

    /// The engine, without keeping it running.
    pub fn downgrade(&self) -> WeakEngine {
        WeakEngine(Arc::downgrade(self.inner()))
    }

    /// Where its threads run, for others that belong to it; their CPU time is counted with theirs.
    pub fn thread_options(&self) -> ThreadOptions {
        self.inner().base.thread_options()
    }

    /// The transport that transfers take unless they ask for another one.
    pub fn transport(&self) -> Preference {
        self.inner().base.setup.config.transport
    }
}
