//! The shared fence table: how a reader learns that what it copied no longer counts.
//!
//! A peer that copies from shared memory, or with `process_vm_readv`, asks nobody. So the owner of the memory
//! keeps one 64-bit *generation* a grant in memory that the peer maps read-only. The owner ends a grant by
//! raising its generation, in nanoseconds and without the peer's help, and may write the pages at once. The
//! peer checks, copies, and checks again:
//!
//! ```text
//! owner                         peer
//! raise generation              generation == granted?      else stale
//! (barrier)                     copy
//! write the pages anew          (barrier)
//!                               generation == granted?      else throw the copy away
//! ```
//!
//! If the copy saw one byte of the new contents, then the second check sees the raised generation: that is what
//! the two barriers are for (see [`FenceTable::raise`] and [`PeerFence::generation`]).
//!
//! Generations only rise, also when a slot passes from one grant to the next, so a number and a slot never mean
//! two grants.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};

use crate::error::HostError;
use crate::fork::ForkGuard;
use crate::mapping::Mapping;
use crate::sealed;
use crate::thread::lock;

/// The largest table, and so the largest that a peer can make this process map: 8 MiB.
pub const MAX_SLOTS: u32 = 1 << 20;

const SLOT_BYTES: usize = size_of::<AtomicU64>();

/// A mapped array of generations, the owner's or a peer's.
#[derive(Debug)]
struct Cells {
    mapping: Mapping,
    slots: u32,
}

impl Cells {
    fn get(&self, slot: u32) -> Result<&AtomicU64, HostError> {
        if slot >= self.slots {
            return Err(HostError::NoSuchSlot { slot, slots: self.slots });
        }
        let base = self.mapping.base().as_ptr().cast::<AtomicU64>();
        // SAFETY: slot < slots and the mapping holds that many, page-aligned; atomics may change under a reference.
        Ok(unsafe { &*base.add(slot as usize) })
    }
}

/// The owner's table.
#[derive(Debug)]
pub struct FenceTable {
    cells: Cells,
    fd: OwnedFd,
    free: Mutex<VecDeque<u32>>,
    fork: ForkGuard,
}

impl FenceTable {
    /// A table of `slots` generations, 1 to [`MAX_SLOTS`].
    pub fn new(slots: u32) -> Result<Arc<FenceTable>, HostError> {
        if slots == 0 || slots > MAX_SLOTS {
            return Err(HostError::InvalidArgument(format!(
                "a fence table has 1 to {MAX_SLOTS} slots, not {slots}"
            )));
        }
        let fork = ForkGuard::new()?;
        let (fd, mapping) = sealed::create("kvik-fence", slots as usize * SLOT_BYTES, None)?;
        let free = Mutex::new((0..slots).collect());
        Ok(Arc::new(FenceTable { cells: Cells { mapping, slots }, fd, free, fork }))
    }

    /// Slots in the table.
    pub fn slots(&self) -> u32 {
        self.cells.slots
    }

    /// The sealed memfd, to be sent to peers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Takes a free slot, the one that has been free for longest. Dropping it raises its generation and frees it.
    pub fn slot(self: &Arc<Self>) -> Result<FenceSlot, HostError> {
        self.owned()?;
        let index = lock(&self.free).pop_front();
        let index = index.ok_or(HostError::FenceFull { slots: self.cells.slots })?;
        Ok(FenceSlot { table: Arc::clone(self), index })
    }

    /// The generation of `slot` now.
    pub fn generation(&self, slot: u32) -> Result<u64, HostError> {
        Ok(self.cells.get(slot)?.load(Ordering::Acquire))
    }

    /// Ends whatever was granted under the generation of `slot`, and gives the new one. When this returns, the
    /// owner may write the pages.
    pub fn raise(&self, slot: u32) -> Result<u64, HostError> {
        self.owned()?;
        let raised = self.cells.get(slot)?.fetch_add(1, Ordering::AcqRel) + 1;
        // A release store lets later writes move before it. The writes that follow are those of the pages' new
        // contents, and a reader must never see one of them and the old generation.
        fence(Ordering::SeqCst);
        Ok(raised)
    }

    /// The table is shared with forked children, which must not end their parent's grants.
    fn owned(&self) -> Result<(), HostError> {
        if self.fork.is_child() { Err(HostError::Forked { what: "the fence table" }) } else { Ok(()) }
    }
}

/// One slot of a [`FenceTable`], held by one grant.
#[derive(Debug)]
pub struct FenceSlot {
    table: Arc<FenceTable>,
    index: u32,
}

impl FenceSlot {
    /// Its number in the table.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Its generation now.
    pub fn generation(&self) -> Result<u64, HostError> {
        self.table.generation(self.index)
    }

    /// Raises its generation: see [`FenceTable::raise`].
    pub fn raise(&self) -> Result<u64, HostError> {
        self.table.raise(self.index)
    }
}

impl Drop for FenceSlot {
    fn drop(&mut self) {
        // In a forked child this does nothing, and the slot stays taken there: it is the parent's.
        if self.table.raise(self.index).is_ok() {
            lock(&self.table.free).push_back(self.index);
        }
    }
}

/// A peer's table, mapped read-only.
#[derive(Debug)]
pub struct PeerFence {
    cells: Cells,
}

impl PeerFence {
    /// Checks and maps a descriptor that came from a peer. The file's size gives the number of slots, which is
    /// limited by [`MAX_SLOTS`].
    pub fn map(fd: OwnedFd) -> Result<PeerFence, HostError> {
        let size = sealed::check(fd.as_fd())?;
        let most = u64::from(MAX_SLOTS) * SLOT_BYTES as u64;
        if size == 0 || size > most || size % SLOT_BYTES as u64 != 0 {
            return Err(HostError::SizeMismatch { have: size, want: most });
        }
        // At most MAX_SLOTS, so neither cast can lose anything.
        let slots = (size / SLOT_BYTES as u64) as u32;
        let mapping = Mapping::shared(fd.as_fd(), size as usize, false)?;
        Ok(PeerFence { cells: Cells { mapping, slots } })
    }

    /// Slots in the table.
    pub fn slots(&self) -> u32 {
        self.cells.slots
    }

    /// The generation of `slot` now, for the check before a copy and for the one after it.
    pub fn generation(&self, slot: u32) -> Result<u64, HostError> {
        let cell = self.cells.get(slot)?;
        // Second check: no read of the copy may be done later than the load that approves it. An acquire load does
        // not keep earlier reads before itself; a fence before it does.
        fence(Ordering::Acquire);
        // Relaxed, because only a relaxed load is sure to be a plain one, and the mapping is read-only.
        let generation = cell.load(Ordering::Relaxed);
        // First check: no read of the copy may be done earlier than the load that allows it.
        fence(Ordering::Acquire);
        Ok(generation)
    }
}
