//! The flows of a session: which are open, when each is due, and what its peer's hold here.

use crate::flow::{Flow, Role};
use kvik_core::{Class, Code, EngineId, Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// More transfers of a peer than this are not open at once.
const MAX_FLOWS: usize = 4096;
/// More bytes than this are not held for a peer's open transfers.
const MAX_HELD: usize = 32 << 20;

/// See the module's text.
pub(crate) struct Flows<R> {
    open: BTreeMap<u64, Flow<R>>,
    deadlines: BTreeSet<(Duration, u64)>,
    /// Transfers that the peer began and that are open, and bytes held for them.
    owned: usize,
    held: usize,
}

impl<R> Flows<R> {
    pub fn new() -> Flows<R> {
        Flows { open: BTreeMap::new(), deadlines: BTreeSet::new(), owned: 0, held: 0 }
    }

    /// How many are open.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Bytes that the peer's transfers hold here.
    pub fn held(&self) -> usize {
        self.owned * size_of::<Flow<R>>() + self.held
    }

    /// Bytes that those which have not ended have still to move, by what is known here.
    pub fn bytes_left(&self) -> u64 {
        let open = self.open.values().filter(|flow| flow.stop.is_none());
        open.map(|flow| flow.chunking.bytes - flow.bytes_done()).fold(0, u64::saturating_add)
    }

    pub fn get(&self, transfer: &u64) -> Option<&Flow<R>> {
        self.open.get(transfer)
    }

    pub fn get_mut(&mut self, transfer: &u64) -> Option<&mut Flow<R>> {
        self.open.get_mut(transfer)
    }

    /// Their numbers, in order.
    pub fn numbers(&self) -> Vec<u64> {
        self.open.keys().copied().collect()
    }

    /// The class of one that is open. What is not takes no turn.
    pub fn class_of(&self, transfer: u64) -> Option<Class> {
        self.open.get(&transfer).map(|flow| flow.class)
    }

    /// Who takes part in a grant by one of them, where that cannot be asked of the connection any more.
    pub fn reader_of(&self, transfer: u64) -> Option<EngineId> {
        match self.open.get(&transfer)?.role {
            Role::Owner { reader, .. } => Some(reader),
            _ => None,
        }
    }

    /// Whether a NIC can touch memory for any of them.
    pub fn are_in_flight(&self) -> bool {
        self.open.values().any(Flow::is_in_flight)
    }

    // ---- coming and going ----

    /// # Errors
    /// `MemoryCapReached`: the peer has too many.
    pub fn check_count(&self) -> Result<()> {
        match self.owned < MAX_FLOWS {
            true => Ok(()),
            false => Err(Error::new(
                Code::MemoryCapReached,
                format!("more than {MAX_FLOWS} transfers of this peer are open; let some end first"),
            )),
        }
    }

    /// Whether the session's peer may have this flow too.
    ///
    /// # Errors
    /// `MemoryCapReached`.
    pub fn check_held(&self, flow: &Flow<R>) -> Result<()> {
        if self.held + flow.held <= MAX_HELD {
            return Ok(());
        }
        Err(Error::new(
            Code::MemoryCapReached,
            format!(
                "the open transfers of this peer would hold more than {} of page lists; let some end first",
                kvik_core::format_size(MAX_HELD as u64)
            ),
        ))
    }

    /// A flow begins.
    pub fn insert(&mut self, flow: Flow<R>) {
        if is_peers(&flow) {
            self.owned += 1;
            self.held += flow.held;
        }
        self.deadlines.insert((flow.deadline, flow.key.1));
        self.open.insert(flow.key.1, flow);
    }

    /// A flow has gone.
    pub fn remove(&mut self, transfer: u64) -> Option<Flow<R>> {
        let flow = self.open.remove(&transfer)?;
        self.deadlines.remove(&(flow.deadline, transfer));
        if is_peers(&flow) {
            self.owned = self.owned.saturating_sub(1);
            self.held = self.held.saturating_sub(flow.held);
        }
        Some(flow)
    }

    // ---- time ----

    /// The deadline that comes next.
    pub fn due(&self) -> Option<Duration> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// A flow whose deadline has passed; it is due no more.
    pub fn take_overdue(&mut self, now: Duration) -> Option<u64> {
        let (at, transfer) = self.deadlines.pop_first()?;
        if at > now {
            self.deadlines.insert((at, transfer));
            return None;
        }
        Some(transfer)
    }

    /// A flow has another deadline from now on.
    pub fn set_deadline(&mut self, transfer: u64, deadline: Duration) {
        let Some(flow) = self.open.get_mut(&transfer) else { return };
        self.deadlines.remove(&(flow.deadline, transfer));
        flow.deadline = deadline;
        self.deadlines.insert((deadline, transfer));
    }
}

/// Whether the peer asked for it, and is charged for it.
fn is_peers<R>(flow: &Flow<R>) -> bool {
    matches!(flow.role, Role::Owner { .. } | Role::Parked { .. })
}
