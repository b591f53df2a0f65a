//! What happens to blocks: they are filled, read, moved out and forgotten. One lock guards all of it.
//!
//! ```text
//!            reserve            publish              evict (no copy below)
//!  (unknown) -------> Filling ---------> Resident --------------------------> (unknown)
//!                        | abandon          |  ^
//!                        v            evict |  | publish
//!                    (unknown)              v  |
//!                                         Below -> Loading        remove: Leaving until nobody reads it
//! ```
//!
//! A block whose tier does not give it goes from Below to Filling when it is put again, and back there when it is abandoned;
//! from Loading too, where the tier has stopped: the load that hangs has its slot until it ends, and no block any more.
//!
//! Invariants:
//! - Only [`Filling`] gives access to a slot before its block is published, and there is one of it for each such slot;
//!   only [`State::pin`] gives access afterwards, and to resident blocks only. So bytes that are not whole and summed
//!   are read by nobody.
//! - A block that is pinned, filling or loading is not evicted; its slot is its own until the last of them lets go.
//! - A block is here only while its parent is: whoever goes takes what comes after it along.

mod durable;
mod places;

use crate::figures::{Cause, Figures, OfTenant, Where};
use crate::index::{Id, Index, Life, NO_SLAB, Node};
use crate::policy::PolicyKind;
use crate::share::{Share, makes_room, why_full};
use crate::slab::{Class, Slabs, Slot};
use crate::tenants::Tenants;
use crate::unsaid::Removals;
use crate::{BlockKey, Counts, Place};
use durable::Durable;
use kvik_core::Result;
use std::collections::BTreeSet;
use std::time::Duration;

/// Blocks that are asked to go for one that comes, before it is refused.
const TRIES: usize = 64;

/// The right, and the duty, to bring the bytes of a block.
#[derive(Debug)]
#[must_use = "a block that is neither published nor abandoned stays as it is for ever"]
pub(crate) struct Filling {
    pub id: Id,
    pub slot: Slot,
}

/// What a put finds of a key.
pub(crate) enum Reserved {
    /// The block is here.
    Here,
    /// Somebody else is bringing it.
    Busy,
    /// It is to be brought.
    New(Filling),
    /// There is no room, for this reason.
    NoRoom(Cause),
}

/// See the module's text.
pub(crate) struct State {
    pub index: Index,
    pub slabs: Slabs,
    pub tenants: Tenants,
    pub counts: Counts,
    pub figures: Figures,
    /// That of all tenants without a quota, then one for each tenant that has one.
    pub shares: Vec<Share>,
    /// The tenant's share; 0 beyond its end.
    share_of: Vec<usize>,
    /// Bytes that the tier below may take, 0 without one. What leaves memory stays there: so whatever comes is taken, on
    /// its way there.
    below: u64,
    /// Bytes of blocks that were found worth their room below since one was not.
    wanted: u64,
    pub durable: Durable,
    /// Blocks that are to stay, by the second in which that ends.
    pub kept: BTreeSet<(u32, Id)>,
    /// Places in the object store whose blocks are not known any more, until that tier takes them.
    pub freed: Vec<Place>,
    /// Bytes of blocks that somebody reads.
    pub lent: u64,
    /// Slots of loads that hang, and whose blocks were brought by others, with the share that they count for.
    hanging: Vec<(Slot, usize, u64)>,
    /// Removals that a tier has not confirmed.
    pub unsaid: Removals,
    /// Seconds since the store began.
    now: u32,
}

/// How long ago something was.
fn seconds(now: u32, then: u32) -> Duration {
    Duration::from_secs(now.saturating_sub(then).into())
}

/// Whether a block's copy in memory may go.
fn may_go(index: &Index, id: Id) -> bool {
    let node = index.node(id);
    node.life == Life::Resident
        && node.pins == 0
        && node.kept_until == 0
        && (node.place != 0 || node.object != 0 || !index.has_children(id))
}

/// What a policy knows a block by, apart from its number.
fn fingerprint(key: &BlockKey) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&key.0[8..16]);
    u64::from_le_bytes(word)
}

impl State {
    pub fn new(slabs: Slabs, tenants: Tenants, policy: PolicyKind, below: u64) -> State {
        let mut shares = vec![Share::common(policy, slabs.capacity())];
        let mut share_of = Vec::new();
        for tenant in tenants.tenants() {
            share_of.push(if tenant.quota.is_some() { shares.len() } else { 0 });
            shares.extend(tenant.quota.map(|quota| Share::of(policy, &tenant.name, quota)));
        }
        State {
            index: Index::new(),
            slabs,
            tenants,
            counts: Counts::default(),
            figures: Figures::new(),
            shares,
            share_of,
            below,
            wanted: 0,
            durable: Durable::default(),
            kept: BTreeSet::new(),
            freed: Vec::new(),
            lent: 0,
            hanging: Vec::new(),
            unsaid: Removals::default(),
            now: 0,
        }
    }

    fn share(&self, namespace: u16) -> usize {
        let tenant = usize::from(self.tenants.namespace(namespace).tenant);
        self.share_of.get(tenant).copied().unwrap_or(0)
    }

    /// The figures of a namespace's tenant.
    pub fn figures_of(&mut self, namespace: u16) -> &mut OfTenant {
        self.figures.of(self.tenants.series(namespace))
    }

    /// Bytes of blocks in memory.
    pub fn used(&self) -> u64 {
        self.shares.iter().map(|share| share.used).sum()
    }

    // ---- coming ----

    /// Looks at a block that somebody wants to bring, behind `parent`. One that lies below, or is on its way from there,
    /// is here, unless it `is_brought` again.
    ///
    /// # Errors
    /// The machine has no memory.
    pub fn reserve(
        &mut self,
        namespace: u16,
        parent: Option<Id>,
        key: BlockKey,
        mut is_brought: impl FnMut(&Node) -> bool,
    ) -> Result<Reserved> {
        if let Some(id) = self.index.find(namespace, &key) {
            return Ok(match self.index.node(id).life {
                Life::Filling => Reserved::Busy,
                life @ (Life::Below | Life::Loading) if is_brought(self.index.node(id)) => {
                    if life == Life::Loading {
                        self.overtake(id);
                    }
                    match self.begin(id, Life::Filling)? {
                        Ok(filling) => Reserved::New(filling),
                        Err(cause) => Reserved::NoRoom(cause),
                    }
                }
                _ => Reserved::Here,
            });
        }
        if self.unsaid.are_saying(&key) {
            return Ok(Reserved::NoRoom(Cause::InUse));
        }
        let id = self.index.add(key, parent, namespace, Life::Filling);
        parent.iter().for_each(|parent| self.hold_or_release(*parent));
        match self.place(id, true) {
            Ok(Ok(slot)) => Ok(Reserved::New(Filling { id, slot })),
            other => {
                self.take_out(id);
                self.index.release(id);
                Ok(Reserved::NoRoom(other?.err().unwrap_or(Cause::InUse)))
            }
        }
    }

    /// Blocks were asked to be kept that cannot be, since the one before them is not.
    pub fn ask_for(&mut self, namespace: u16, keys: &[BlockKey]) {
        let (share, bytes) = (self.share(namespace), self.tenants.shape(namespace).bytes() as u32);
        for key in keys {
            if self.index.find(namespace, key).is_none() {
                self.shares[share].policy.admits(fingerprint(key), bytes);
            }
        }
    }

    /// Begins to bring a block that lies below, from there (`Loading`) or by a put (`Filling`); or why there is no room.
    ///
    /// # Errors
    /// The machine has no memory.
    pub fn begin(&mut self, id: Id, life: Life) -> Result<Result<Filling, Cause>> {
        debug_assert_eq!(self.index.node(id).life, Life::Below);
        self.index.node_mut(id).life = life;
        let placed = self.place(id, life == Life::Filling);
        if !matches!(placed, Ok(Ok(_))) {
            self.index.node_mut(id).life = Life::Below;
        }
        Ok(placed?.map(|slot| Filling { id, slot }))
    }

    /// The bytes are there, and summed: whoever asks for the block gets it from now on. False when it was removed
    /// meanwhile. It stays until [`State::touch`] or [`State::list`] has told the policy of it.
    pub fn publish(&mut self, filling: Filling, sum: u64) -> bool {
        let Filling { id, .. } = filling;
        if self.index.node(id).life == Life::Leaving {
            self.settle(id);
            return false;
        }
        let now = self.now;
        let node = self.index.node_mut(id);
        let loaded = node.life == Life::Loading;
        let from = if node.place != 0 { Where::Log } else { Where::Object };
        if !loaded {
            node.used_at = now;
            self.unsaid.put_again(&node.key);
        }
        let lost = !loaded && node.failed;
        (node.life, node.sum, node.listed, node.failed) = (Life::Resident, sum, false, false);
        if lost {
            // What its tier does not give is no copy: it is written there anew.
            self.set_place(id, from, Place(0));
        }
        let node = self.index.node(id);
        let namespace = node.namespace;
        let bytes = self.tenants.shape(namespace).bytes();
        let of = self.figures_of(namespace);
        of.bytes_in[Where::Memory as usize] += bytes;
        of.bytes_out[from as usize] += if loaded { bytes } else { 0 };
        true
    }

    /// The bytes did not come. A block that lies below is there still; one that lies nowhere is gone, and what others
    /// are bringing behind it goes with it.
    pub fn abandon(&mut self, filling: Filling) {
        let Filling { id, .. } = filling;
        let Node { life, place, object, .. } = *self.index.node(id);
        match life {
            Life::Filling if place == 0 && object == 0 => {
                self.forget(id);
                self.settle(id);
            }
            Life::Loading | Life::Filling => {
                self.free_slot(id);
                self.index.node_mut(id).life = Life::Below;
                // What it was brought from may have let go of it meanwhile.
                if self.index.node(id).is_lost() {
                    self.counts.dropped += self.forget(id).len() as u64;
                }
            }
            _ => self.settle(id),
        }
    }

    // ---- being read ----

    /// Keeps a resident block where it is until [`State::unpin`].
    pub fn pin(&mut self, id: Id) -> Option<Slot> {
        let node = self.index.node_mut(id);
        if node.life != Life::Resident {
            return None;
        }
        node.pins += 1;
        let slot = Slot { slab: node.slab, slot: node.slot };
        let (first, namespace) = (node.pins == 1, node.namespace);
        self.lent += if first { self.tenants.shape(namespace).bytes() } else { 0 };
        self.hold_or_release(id);
        Some(slot)
    }

    pub fn unpin(&mut self, id: Id) {
        let node = self.index.node_mut(id);
        node.pins = node.pins.saturating_sub(1);
        let (last, namespace, life) = (node.pins == 0, node.namespace, node.life);
        let bytes = if last { self.tenants.shape(namespace).bytes() } else { 0 };
        self.lent = self.lent.saturating_sub(bytes);
        match life {
            Life::Leaving => self.settle(id),
            _ => self.hold_or_release(id),
        }
    }

    /// Blocks of one request were asked for, or `put`, in this order. The last ones count first: who asks for a block
    /// asks for those before it, which are thus to stay longer.
    pub fn touch(&mut self, namespace: u16, ids: &[Id], put: bool) {
        let (share, now) = (self.share(namespace), self.now);
        self.shares[share].policy.request();
        for id in ids.iter().rev() {
            let node = self.index.node_mut(*id);
            if !put {
                node.used = true;
                let gap = seconds(now, std::mem::replace(&mut node.used_at, now));
                self.figures.reuse_gap.add(gap);
            }
            if node.life == Life::Resident && node.listed {
                let fingerprint = fingerprint(&node.key);
                self.shares[share].policy.touch(*id, fingerprint);
            }
            self.list(*id);
        }
    }

    /// The policy learns of a block that was published. One that comes is not one that came back, so it is inserted
    /// only, and with the others of its request, the last one first.
    pub fn list(&mut self, id: Id) {
        let node = self.index.node_mut(id);
        if node.life == Life::Resident && !std::mem::replace(&mut node.listed, true) {
            let (fingerprint, namespace) = (fingerprint(&node.key), node.namespace);
            let (share, bytes) = (self.share(namespace), self.tenants.shape(namespace).bytes() as u32);
            self.shares[share].policy.insert(id, fingerprint, bytes);
            self.hold_or_release(id);
        }
    }

    /// The policy names a block, or does not: one that is read, is to stay, or is in memory only and has others behind
    /// it, must not go.
    fn hold_or_release(&mut self, id: Id) {
        let node = self.index.node(id);
        if node.life != Life::Resident {
            return;
        }
        let must_stay = !may_go(&self.index, id);
        let share = self.share(node.namespace);
        match must_stay {
            true => self.shares[share].policy.hold(id),
            false => self.shares[share].policy.release(id),
        }
    }

    /// Takes a block out of the index; the one before it may go now.
    fn take_out(&mut self, id: Id) {
        let parent = self.index.parent(id);
        self.durable.forget(id);
        self.index.take_out(id);
        parent.iter().for_each(|parent| self.hold_or_release(*parent));
    }

    /// Keeps a resident block until this second, at least: no other block makes it go. False where more than half of
    /// what its tenant may have would be kept.
    pub fn keep(&mut self, id: Id, until: u32) -> bool {
        let Node { life, namespace, kept_until, .. } = *self.index.node(id);
        let (share, bytes) = (self.share(namespace), self.tenants.shape(namespace).bytes());
        if life != Life::Resident {
            return false;
        }
        self.let_go(id);
        let most = self.shares[share].quota.unwrap_or(self.slabs.capacity()) / 2;
        let until = if until > self.now { until.max(kept_until) } else { 0 };
        if until > 0 && self.shares[share].kept + bytes <= most {
            self.shares[share].kept += bytes;
            self.kept.insert((until, id));
            self.index.node_mut(id).kept_until = until;
            self.hold_or_release(id);
        }
        until == 0 || self.index.node(id).kept_until == until
    }

    /// A block is like any other again.
    fn let_go(&mut self, id: Id) {
        let node = self.index.node_mut(id);
        let until = std::mem::take(&mut node.kept_until);
        let namespace = node.namespace;
        if self.kept.remove(&(until, id)) {
            let (share, bytes) = (self.share(namespace), self.tenants.shape(namespace).bytes());
            self.shares[share].kept -= bytes;
            self.hold_or_release(id);
        }
    }

    /// Time has passed: what was to stay until now is let go of.
    pub fn set_now(&mut self, now: u32) {
        self.now = now;
        while let Some((until, id)) = self.kept.first().copied().filter(|(until, _)| *until <= now) {
            debug_assert_eq!(self.index.node(id).kept_until, until);
            self.let_go(id);
        }
    }

    pub fn now(&self) -> u32 {
        self.now
    }

    // ---- going ----

    /// Takes a block out, and all that come after it: what they were called. Who reads one of them goes on reading, and
    /// who is bringing one finds out at its end.
    pub fn forget(&mut self, id: Id) -> Vec<BlockKey> {
        let family = self.index.family(id);
        let take_out = |id: Id| {
            let Node { key, object, life, namespace, .. } = *self.index.node(id);
            self.freed.extend((object != 0).then_some(Place(object)));
            if life == Life::Resident {
                let share = self.share(namespace);
                self.shares[share].policy.remove(id);
            }
            self.take_out(id);
            if matches!(life, Life::Resident | Life::Below) {
                self.settle(id);
            }
            key
        };
        family.into_iter().map(take_out).collect()
    }

    /// A block that was taken out is let go of, unless somebody reads it still.
    fn settle(&mut self, id: Id) {
        if self.index.node(id).pins == 0 {
            self.free_slot(id);
            self.index.release(id);
        }
    }

    fn free_slot(&mut self, id: Id) {
        self.let_go(id);
        let node = self.index.node_mut(id);
        let slab = std::mem::replace(&mut node.slab, NO_SLAB);
        if slab != NO_SLAB {
            let (slot, namespace) = (node.slot, node.namespace);
            self.slabs.free(Slot { slab, slot });
            let (share, bytes) = (self.share(namespace), self.tenants.shape(namespace).bytes());
            self.shares[share].used -= bytes;
        }
    }

    /// Takes out all blocks of namespaces; how many went.
    pub fn forget_all(&mut self, wanted: impl Fn(u16) -> bool) -> usize {
        let index = &self.index;
        let root = |id: &Id| index.parent(*id).is_none() && wanted(index.node(*id).namespace);
        let roots: Vec<Id> = index.ids().filter(root).collect();
        roots.into_iter().map(|root| self.forget(root).len()).sum()
    }

    /// Takes out a block by its key, in whatever namespace.
    pub fn forget_key(&mut self, key: &BlockKey) {
        while let Some(id) = self.index.find_any(key) {
            self.forget(id);
        }
    }

    // ---- room ----

    /// A slot for a block, if others can go for it; or why they cannot.
    ///
    /// What is `new` has to be worth another one's place.
    fn place(&mut self, id: Id, new: bool) -> Result<Result<Slot, Cause>> {
        let namespace = self.index.node(id).namespace;
        let (share, shape) = (self.share(namespace), self.tenants.shape(namespace));
        if let Some(cause) = self.shares[share].too_large(shape.bytes(), self.slabs.fit(&shape)) {
            return Ok(Err(cause));
        }
        let tenant = self.tenants.namespace(namespace).tenant;
        let (quota, apart) = (self.shares[share].quota, self.tenants.tenant(namespace).apart);
        // Room for another shape is made by all of a slab: so nobody else's blocks are among those of who has a quota.
        let class = Class { shape, apart: (apart || quota.is_some()).then_some(tenant), quota };
        if let Some(quota) = quota {
            while self.shares[share].used + shape.bytes() > quota {
                if !self.admits(share, id, new) {
                    return Ok(Err(Cause::NotAdmitted));
                }
                if self.evict(share).is_none() {
                    return Ok(Err(Cause::Quota));
                }
            }
        }
        for _ in 0..TRIES {
            if let Some(slot) = self.slabs.take(class, id)? {
                let node = self.index.node_mut(id);
                (node.slab, node.slot) = (slot.slab, slot.slot);
                self.shares[share].used += shape.bytes();
                return Ok(Ok(slot));
            }
            if !self.admits(share, id, new) {
                return Ok(Err(Cause::NotAdmitted));
            }
            let full = self.slabs.slots_left(class) == 0;
            let makes_room = makes_room(&self.shares, share, full).into_iter().flatten();
            let Some(freed) = makes_room.filter_map(|share| self.evict(share)).next() else {
                return Ok(Err(if full { Cause::Quota } else { why_full(&self.shares, self.lent) }));
            };
            if self.slabs.class(freed) != Some(class) {
                self.empty(freed.slab);
            }
        }
        Ok(Err(why_full(&self.shares, self.lent)))
    }

    /// The next block of a share goes; the slot that it had.
    fn evict(&mut self, share: usize) -> Option<Slot> {
        let id = self.shares[share].policy.victim()?;
        let Node { slab, slot, .. } = *self.index.node(id);
        self.move_out(id);
        Some(Slot { slab, slot })
    }

    fn admits(&mut self, share: usize, id: Id, new: bool) -> bool {
        let (fingerprint, bytes) = {
            let node = self.index.node(id);
            (fingerprint(&node.key), self.tenants.shape(node.namespace).bytes() as u32)
        };
        let admits = !new || self.below > 0 || self.shares[share].policy.admits(fingerprint, bytes);
        self.counts.not_admitted += u64::from(!admits);
        admits
    }

    /// All blocks of a slab that may go do so, for blocks of another shape; none where one is read, on its way, or to stay:
    /// the others would go for nothing.
    fn empty(&mut self, slab: u16) {
        let stays = |id: Id| {
            let node = self.index.node(id);
            node.life != Life::Resident || node.pins > 0 || node.kept_until > 0
        };
        if self.slabs.owners(slab).into_iter().any(stays) {
            return;
        }
        // Those that come after others may be behind them here: a few passes take out whole families.
        for _ in 0..TRIES {
            let owners = self.slabs.owners(slab);
            let going: Vec<Id> = owners.into_iter().filter(|id| may_go(&self.index, *id)).collect();
            if going.is_empty() {
                return;
            }
            going.into_iter().for_each(|id| self.move_out(id));
        }
    }

    /// The copy of a block in memory makes room for others.
    fn move_out(&mut self, id: Id) {
        self.counts.evicted += 1;
        let Node { key, namespace, place, object, used_at, .. } = *self.index.node(id);
        let share = self.share(namespace);
        self.figures.evict(self.shares[share].deciding(), seconds(self.now, used_at));
        self.shares[share].policy.evict(id, fingerprint(&key));
        self.index.node_mut(id).life = Life::Below;
        self.free_slot(id);
        if place == 0 && object == 0 {
            self.take_out(id);
            self.index.release(id);
        }
    }
}
