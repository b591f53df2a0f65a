//! What holds blocks below the memory of the store: the log on a disk, and room for a tier of objects.
//!
//! A tier keeps records and no index: who owns it (the [`TierOwner`]) knows which blocks are there and at which
//! [`Place`], and tells the tier which of them are worth keeping when it needs room. So nothing is known twice, and a
//! tier of ten million blocks costs its owner 8 bytes a block.

use crate::{BlockKey, Entry, NamespaceId, Shape};
use kvik_core::{Error, Result};
use kvik_host::Memory;
use std::time::Duration;

/// Where a tier keeps a block: a number that means something to that tier alone, and never names another record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place(pub u64);

/// How long a thread waits for the tier, before a block that nobody waits for stays in memory only.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// What a block is, without the checksums of its bytes: all that a reader expects of the record at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    /// What the block is called.
    pub key: BlockKey,
    /// The block before it; none for the first of a prompt.
    pub parent: Option<BlockKey>,
    /// Its namespace.
    pub namespace: NamespaceId,
    /// How its bytes are divided.
    pub shape: Shape,
}

impl From<&Entry> for Identity {
    fn from(entry: &Entry) -> Self {
        Identity { key: entry.key, parent: entry.parent, namespace: entry.namespace, shape: entry.shape }
    }
}

/// Something that a tier held when it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found<'a> {
    /// What a namespace means, in its owner's words. It comes before the first of its blocks, and may come again.
    Namespace(NamespaceId, &'a [u8]),
    /// A block. One that was found before under the same key is replaced by it.
    Block(Identity, Place),
    /// A block was removed: whatever was found of it before is void.
    Removed(BlockKey),
    /// A namespace was removed: whatever was found of it before is void, its blocks too.
    NamespaceRemoved(NamespaceId),
}

/// Who knows which blocks a tier holds. Called from threads of the tier, which holds no lock meanwhile; a call must not
/// wait for the tier.
///
/// Before a block is removed, or stored again under the same key, its owner forgets where it was: from then on it does
/// not [`keep`](TierOwner::keep) it. Else a copy that is made at that moment could come after what was said of it, and
/// have the last word at the next restart. So until a block that is stored again is durable, a crash may leave neither;
/// there is no reason to store a block again that a load would give.
pub trait TierOwner: Send + Sync {
    /// Takes what the tier holds, while it is opened, in the order in which it was written: the last word on a key is
    /// the one that counts. It comes from one thread.
    fn found(&self, found: Found<'_>);

    /// Whether the block is still known at this place, and is worth keeping. The tier asks when it needs the room, from
    /// the oldest block on: it copies those that are kept, and drops the others. Where everything is kept there is no
    /// room, and the next [`Tier::store`] fails with `StorageFull`.
    fn keep(&self, identity: &Identity, place: Place) -> bool;

    /// Whether the block is still known at this place, whatever it is worth: one that was to be kept, and could not be
    /// copied yet.
    fn knows(&self, identity: &Identity, place: Place) -> bool {
        self.keep(identity, place)
    }

    /// The block has been copied, and is durable where it is now. Who knows it at `from` knows it at `to` from now on;
    /// who knows it elsewhere, or no longer, changes nothing.
    fn moved(&self, identity: &Identity, from: Place, to: Place);

    /// What was at this place is about to go. Who knows the block there knows it no longer.
    fn dropped(&self, identity: &Identity, place: Place);

    /// What was at the places from the first of these up to the second is about to go, and not all of it could be told.
    /// Who knows a block there knows it no longer.
    fn gone(&self, from: Place, to: Place);

    /// Places whose blocks its owner has forgotten since it was last asked, for a tier that removes what nobody knows.
    fn freed(&self) -> Vec<Place> {
        Vec::new()
    }
}

/// How much a tier holds, and what went wrong with it since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that it may take.
    pub capacity: u64,
    /// Bytes that it takes, with blocks that are no longer wanted and whose room it has not needed yet.
    pub bytes: u64,
    /// Files that it has.
    pub segments: u64,
    /// Bytes that were stored and are not durable yet.
    pub unsynced: u64,
    /// Bytes of blocks that were stored.
    pub stored: u64,
    /// Bytes of blocks that were loaded.
    pub loaded: u64,
    /// Bytes of blocks that were copied to make room.
    pub copied: u64,
    /// Blocks that were dropped to make room.
    pub dropped: u64,
    /// Times that it was made durable.
    pub syncs: u64,
    /// Records that were not what they should be: they are never served again.
    pub quarantined: u64,
    /// Reads, writes and syncs that failed.
    pub failures: u64,
}

/// A place below memory where blocks are kept. Every call may wait for a disk or a network, so none is made from a
/// thread that must not.
pub trait Tier: Send + Sync {
    /// Says what a namespace means, before its first block is stored: at most 64 KiB in its owner's words. They are
    /// kept for as long as one of its blocks is, and come back in [`Found::Namespace`].
    ///
    /// # Errors
    /// `InvalidArgument` for more than 64 KiB, `MemoryCapReached` for more namespaces than a tier keeps in memory.
    fn declare(&self, namespace: NamespaceId, meaning: &[u8]) -> Result<()>;

    /// Stores a block whose bytes lie at `offset` of `memory`, in the order of its shape. They must hold still until
    /// this returns; the memory is free then. A load finds the block at once, and a restart once [`Tier::sync`] has
    /// named its place. Bytes that are not those of `entry.sums` are stored as they are; no load gives them out.
    ///
    /// # Errors
    /// `InvalidArgument` for a namespace that was not declared, a range outside of `memory`, or a block that is larger
    /// than the tier can take; `StorageFull` where no room is left; `DeadlineExceeded` where the tier was not ready for
    /// more `within` this time, because what was stored before is not durable yet or room is still being made;
    /// `StorageFailed` where the disk refuses, or may only be read.
    fn store(&self, entry: &Entry, memory: &Memory, offset: usize, within: Duration) -> Result<Place>;

    /// Waits until all that is named is durable: what [`Tier::store`], [`Tier::remove`] and [`Tier::remove_namespace`]
    /// gave, in any order. Those who wait at the same time share one sync.
    ///
    /// # Errors
    /// `StorageFailed` or `StorageFull` where the disk failed and some of it may not be there after a restart: then
    /// none of it counts as durable, though a restart may find it. It is not tried again: store it again.
    /// `DeadlineExceeded` where it took longer than `within`; the sync goes on, and may be waited for again.
    fn sync(&self, places: &[Place], within: Duration) -> Result<()>;

    /// Reads the block at `place` to `offset` of `into`, and compares its whole identity and the checksum of every part
    /// of its bytes. Gives the checksums; `None` where the block has moved or was dropped meanwhile, as its owner knows
    /// by now.
    ///
    /// # Errors
    /// `ChecksumMismatch` where the record is not the block that is expected, or its bytes are not those that were
    /// stored: the text says where and what. Nothing that was placed counts, and the record is not served again.
    /// `StorageFailed` where the disk could not read it. `InvalidArgument` for a range outside of `into`.
    fn load(
        &self,
        place: Place,
        expected: &Identity,
        into: &Memory,
        offset: usize,
    ) -> Result<Option<Box<[u64]>>>;

    /// Removes a block: writes down that what was stored under this key before this call is void. Once [`Tier::sync`]
    /// has named the place that this gives, no restart finds it. The block's room comes free in its time.
    ///
    /// # Errors
    /// As for [`Tier::store`].
    fn remove(&self, key: &BlockKey, within: Duration) -> Result<Place>;

    /// Removes a namespace with all of its blocks, as [`Tier::remove`] does a block. It must be declared again before
    /// another block of it is stored.
    ///
    /// # Errors
    /// As for [`Tier::store`].
    fn remove_namespace(&self, namespace: &NamespaceId, within: Duration) -> Result<Place>;

    /// Why nothing is ever written to it again, removals neither, until it is opened anew; none where something may be.
    fn never_again(&self) -> Option<Error> {
        None
    }

    /// How much it holds.
    fn usage(&self) -> Usage;
}
