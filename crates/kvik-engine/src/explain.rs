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
    /// What this machine allows: name, whether it is well, value, and what it means.
    pub probes: Vec<(String, bool, String, String)>,
}

/// What this machine allows.
pub(crate) fn probes() -> Vec<(String, bool, String, String)> {
    let found = Probes::run();
    found.all.into_iter().map(|probe| (probe.name.to_string(), probe.ok, probe.value, probe.reason)).collect()
}
