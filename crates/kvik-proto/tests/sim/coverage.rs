//! What has met what: a count for every session state, kind of frame and fault.

use std::collections::BTreeMap;

/// How the receiver sees the session as something comes in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It came together with the end of the handshake.
    New,
    Up,
    /// Another session with the same peer is preferred.
    Spare,
    /// Nothing was heard for more than two beats.
    Silent,
    /// It is over on this side.
    Dead,
}

pub const STATES: [&str; 5] = ["new", "up", "spare", "silent", "dead"];
/// Kinds of frames by their number, then what is no frame.
pub const KINDS: [&str; 22] = [
    "(none)",
    "beat",
    "begin",
    "accept",
    "end",
    "ended",
    "open-channels",
    "goodbye",
    "notify",
    "noted",
    "nics",
    "reach",
    "reached",
    "check",
    "checked",
    "accept-staged",
    "lent",
    "used",
    "landed",
    "chunk",
    "nic",
    "join",
];
pub const CHUNK: usize = 19;
pub const NIC: usize = 20;
pub const JOIN: usize = 21;

/// What the adversary does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    Delay = 1,
    Reorder,
    Drop,
    Duplicate,
    Truncate,
    Corrupt,
    Partition,
    Crash,
    Cut,
    Hold,
    Suspend,
    Clock,
}

pub const FAULTS: [&str; 13] = [
    "none",
    "delay",
    "reorder",
    "drop",
    "duplicate",
    "truncate",
    "corrupt",
    "partition",
    "crash",
    "cut",
    "hold",
    "suspend",
    "clock",
];

impl Fault {
    pub fn bit(self) -> u32 {
        1 << self as u32
    }
}

#[derive(Clone, Default)]
pub struct Coverage {
    cells: Vec<u64>,
    pub outcomes: BTreeMap<String, u64>,
}

impl Coverage {
    fn at(state: usize, kind: usize, fault: usize) -> usize {
        (state * KINDS.len() + kind) * FAULTS.len() + fault
    }

    /// Something of a kind came in a session between two engines after these faults had struck there.
    pub fn hit(&mut self, state: State, kind: usize, faults: u32) {
        self.cells.resize(STATES.len() * KINDS.len() * FAULTS.len(), 0);
        let faults = if faults == 0 { 1 } else { faults };
        for fault in (0..FAULTS.len()).filter(|fault| faults & (1 << fault) != 0) {
            self.cells[Self::at(state as usize, kind, fault)] += 1;
        }
    }

    pub fn count(&mut self, outcome: &str) {
        *self.outcomes.entry(outcome.to_owned()).or_default() += 1;
    }

    pub fn add(&mut self, other: &Coverage) {
        self.cells.resize(STATES.len() * KINDS.len() * FAULTS.len(), 0);
        for (cell, more) in self.cells.iter_mut().zip(&other.cells) {
            *cell += more;
        }
        for (outcome, count) in &other.outcomes {
            *self.outcomes.entry(outcome.clone()).or_default() += count;
        }
    }

    /// Prints the table; gives the empty cells that have no reason to be.
    pub fn print(&self) -> Vec<String> {
        let mut empty = Vec::new();
        let mut reasons = BTreeMap::new();
        println!("session x frame {}", FAULTS.map(|fault| format!("{fault:>10}")).concat());
        for (state, state_name) in STATES.iter().enumerate() {
            for (kind, kind_name) in KINDS.iter().enumerate().skip(1) {
                let mut line = format!("{:<16}", format!("{state_name} {kind_name}"));
                for (fault, fault_name) in FAULTS.iter().enumerate() {
                    let count = self.cells.get(Self::at(state, kind, fault)).copied().unwrap_or(0);
                    let reason = unreachable(state_name, kind_name, fault_name);
                    let text = match (count, reason) {
                        (0, Some(_)) => "-".to_owned(),
                        _ => count.to_string(),
                    };
                    if let (0, Some(reason)) = (count, reason) {
                        *reasons.entry(reason).or_insert(0) += 1;
                    }
                    if (count, reason) == (0, None) {
                        empty.push(format!("{state_name} x {kind_name} x {fault_name}"));
                    }
                    line += &format!("{text:>10}");
                }
                println!("{line}");
            }
        }
        for (reason, cells) in reasons {
            println!("- ({cells} cells): {reason}");
        }
        empty
    }
}

/// Why a cell cannot be reached.
fn unreachable(state: &str, kind: &str, _fault: &str) -> Option<&'static str> {
    match (state, kind) {
        (
            "new",
            "accept" | "accept-staged" | "lent" | "used" | "landed" | "ended" | "noted" | "reached" | "check"
            | "checked" | "chunk" | "nic",
        ) => Some(
            "these answer what the receiver has sent, and it has sent nothing before its handshake ended",
        ),
        ("new", "join") => Some(
            "only who listened is asked to join, and to it nothing comes together with the end of a handshake",
        ),
        _ => None,
    }
}
