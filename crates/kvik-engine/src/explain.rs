//! How a peer would be reached, in words.

use crate::select::Rejected;
use kvik_host::Probes;
use kvik_transport::{Estimate, TransportId};

/// What [`crate::Engine::explain`] found.
#[derive(Debug, Clone)]
pub struct Explanation {
    /// The transport that a transfer would use.
    pub transport: TransportId,
    /// How, in more detail.
    pub mechanism: String,
    /// How long the smallest transfer would take on it, by what was measured with this peer before.
    pub estimate: Option<Estimate>,
    /// The other transports of the engine, each with the reason why it would not be taken.
    pub rejected_transports: Vec<Rejected>,
    /// What this machine allows of the local transport, where the owner is another engine on this host: name,
    /// whether it is well, value, and what it means.
    pub probes: Vec<(String, bool, String, String)>,
}

/// The probes that bear on the local transport.
const LOCAL: [&str; 6] =
    ["memfd_sealing", "process_vm_readv", "yama_ptrace_scope", "seccomp", "pid_namespace", "user_namespace"];

/// What this machine allows of the local transport.
pub(crate) fn probes() -> Vec<(String, bool, String, String)> {
    let relevant = Probes::run().all.into_iter().filter(|probe| LOCAL.contains(&probe.name));
    relevant.map(|probe| (probe.name.to_string(), probe.ok, probe.value, probe.reason)).collect()
}
