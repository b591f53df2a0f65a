//! Memory that is registered, and which transports know of it.

use crate::base::Base;
use crate::sync::lock;
use kvik_core::{RegionId, Result};
use kvik_transport::{RegionMemory, WeakRegionMemory};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long NICs may take to say that they have heard of a region's end, where somebody waits for that: far longer than
/// any driver takes to forget memory.
pub(crate) const ANSWER: Duration = Duration::from_secs(1);

/// How long NICs may take to learn of so many bytes, whose pages the kernel pins one by one.
fn registering(deadline: Duration, bytes: usize) -> Duration {
    deadline + Duration::from_secs(bytes as u64 >> 30)
}

/// See the module's text.
pub(crate) struct Regions {
    base: Arc<Base>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    shown: HashMap<RegionId, WeakRegionMemory>,
    last: u32,
}

impl Regions {
    pub fn new(base: Arc<Base>) -> Regions {
        Regions { base, table: Mutex::default() }
    }

    /// The number of a new region.
    pub fn next_id(&self) -> RegionId {
        let mut table = lock(&self.table);
        table.last += 1;
        RegionId(table.last)
    }

    /// Makes a region known to the transports, or again after [`Regions::withdraw`].
    ///
    /// # Errors
    /// `TransportUnavailable` when a NIC refuses memory of the host, `DeadlineExceeded` when one does not answer.
    /// Memory of a device is then not for NICs.
    pub fn show(&self, id: RegionId, memory: &RegionMemory) -> Result<()> {
        let limit = registering(self.base.setup.config.deadline, memory.len());
        lock(&self.table).shown.insert(id, memory.downgrade());
        let transports = self.base.transports.all();
        transports.iter().try_for_each(|one| one.register(id, memory, limit)).inspect_err(|_| {
            lock(&self.table).shown.remove(&id);
            transports.iter().for_each(|one| one.withdraw(id, ANSWER));
            self.forget(id);
        })
    }

    /// Ends the grants over a region and takes it back from the transports, whose NICs have up to `limit` to answer.
    pub fn withdraw(&self, id: RegionId, memory: RegionMemory, limit: Duration) {
        lock(&self.table).shown.remove(&id);
        self.base.node(|node, _| node.grants().end_all_of(id));
        // NICs let go of memory only when nobody else holds it.
        drop(memory);
        // In order: whoever may be showing it right now comes before the NICs.
        self.base.transports.all().iter().for_each(|one| one.withdraw(id, limit));
    }

    /// Drops what is kept of a region until it is closed for good: until then it may be shown again.
    pub fn forget(&self, id: RegionId) {
        self.base.transports.all().iter().for_each(|one| one.forget(id));
    }

    /// How many there are, and their bytes.
    pub fn held(&self) -> (usize, u64) {
        // Looked at under the lock and not kept: who closes a region takes it from the table first, and finds it free.
        let table = lock(&self.table);
        let held = table.shown.values().filter_map(WeakRegionMemory::upgrade);
        held.fold((0, 0), |(count, bytes), memory| (count + 1, bytes + memory.len() as u64))
    }

    /// Sees to it that GPUs here see what a peer's NIC has written, before anybody here hears that it is there.
    pub fn make_seen(&self) {
        // Under the lock, so that a region which is closed meanwhile is not held by this.
        let (table, mut seen) = (lock(&self.table), Vec::new());
        for held in table.shown.values().filter_map(WeakRegionMemory::upgrade) {
            let Some(device) = held.device().map(|device| device.number()) else { continue };
            if seen.contains(&device) {
                continue;
            }
            seen.push(device);
            if let Err(error) = held.flush_writes() {
                log::error!("GPU {device} may not see what a peer's NIC has written: {error}");
            }
        }
    }
}
