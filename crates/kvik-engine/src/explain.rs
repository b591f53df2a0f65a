//! How a peer would be reached, in words.

use kvik_host::Probes;

/// What [`crate::Engine::explain`] found.
#[derive(Debug, Clone)]
pub struct Explanation {
    /// The transport that a transfer would use: `"tcp"`, `"local"` or `"self"`.
    pub transport: &'static str,
    /// How, in more detail.
    pub way: String,
    /// Transports that would be passed over, each with its reason.
    pub passed_over: Vec<String>,
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
