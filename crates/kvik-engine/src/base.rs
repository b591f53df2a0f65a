//! What the parts of an engine stand on.

use crate::budget::Budget;
use crate::commands::Commands;
use crate::observers::Observers;
use crate::protocol::{Calls, Protocol};
use crate::setup::Setup;
use crate::sync::Progress;
use crate::transports::Transports;
use kvik_core::{Code, Result};
use kvik_host::FenceTable;
use kvik_host::thread::ThreadOptions;
use kvik_proto::Local;
use kvik_transport::from_host;
use std::sync::Arc;
use std::time::Duration;

/// Grants, and writes within the host, that can be open at once: 512 KiB of generations.
const FENCE_SLOTS: u32 = 1 << 16;

/// See the module's text.
pub(crate) struct Base {
    pub setup: Setup,
    pub budget: Budget,
    pub fence: Arc<FenceTable>,
    pub commands: Arc<Commands>,
    pub transports: Arc<Transports>,
    pub protocol: Protocol,
    pub observers: Observers,
    /// Transfers, grants and sessions that end.
    pub progress: Progress,
}

impl Base {
    pub fn new(setup: Setup) -> Result<Base> {
        let fence = FenceTable::new(FENCE_SLOTS).map_err(|error| from_host(Code::InvalidArgument, error))?;
        let (commands, transports) = (Arc::new(Commands::new()?), Arc::<Transports>::default());
        let (identity, window) = (setup.local.identity, setup.config.window);
        Ok(Base {
            budget: Budget::new(setup.config.memory_cap),
            protocol: Protocol::new(identity, window, fence.clone(), transports.clone(), commands.clone()),
            setup,
            fence,
            commands,
            transports,
            observers: Observers::new(),
            progress: Progress::default(),
        })
    }

    /// See [`Protocol::node`].
    pub fn node<T>(&self, f: impl FnOnce(&mut Calls<'_>, Duration) -> T) -> T {
        self.protocol.node(f)
    }

    /// What this engine says of itself in a handshake.
    pub fn local(&self) -> Local {
        let mut local = self.setup.local.clone();
        local.facts.nics = self.transports.rma().map(|rma| rma.nics()).unwrap_or_default();
        local
    }

    /// Where the engine's threads run, and where their CPU time is counted.
    pub fn thread_options(&self) -> ThreadOptions {
        let config = &self.setup.config;
        let times = self.observers.metrics.threads.clone();
        ThreadOptions { cpus: config.cpus.clone(), numa_node: config.numa_node, times }
    }
}
