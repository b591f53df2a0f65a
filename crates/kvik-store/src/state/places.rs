//! Where blocks lie below memory: in the log, in the object store, or in both.

use super::{Filling, State};
use crate::figures::Where;
use crate::index::{Id, Life, NO_SLAB};
use crate::slab::Slot;
use crate::{Identity, Place};
use std::ops::Range;

/// Blocks that are looked at while the lock is held once.
const AT_ONCE: Id = 1 << 14;

impl State {
    /// Where a block lies in a tier below is known now; place 0 is nowhere.
    pub fn set_place(&mut self, id: Id, tier: Where, place: Place) {
        let before = std::mem::replace(self.index.node_mut(id).place_mut(tier), place.0);
        if tier == Where::Object && before != 0 {
            self.freed.push(Place(before));
        }
        if tier == Where::Log && place.0 == 0 {
            self.durable.clear();
        }
        self.hold_or_release(id);
    }

    /// A block was found in a tier, at its place. False where its namespace or the block before it is not known.
    ///
    /// A tier is looked through while blocks are stored in it: those have the higher places, which stay.
    pub fn found(&mut self, identity: &Identity, tier: Where, place: Place) -> bool {
        let Some(namespace) = self.tenants.find(&identity.namespace) else { return false };
        if self.tenants.shape(namespace) != identity.shape {
            return false;
        }
        if let Some(id) = self.index.find(namespace, &identity.key) {
            match self.index.node(id).place_in(tier) {
                Some(known) if known > place && tier == Where::Object => self.freed.push(place),
                Some(known) if known > place => {}
                _ => self.set_place(id, tier, place),
            }
            return true;
        }
        let parent = match &identity.parent {
            None => None,
            Some(key) => match self.index.find(namespace, key) {
                None => return false,
                found => found,
            },
        };
        let (id, now) = (self.index.add(identity.key, parent, namespace, Life::Below), self.now);
        let node = self.index.node_mut(id);
        (*node.place_mut(tier), node.used_at) = (place.0, now);
        parent.iter().for_each(|parent| self.hold_or_release(*parent));
        true
    }

    /// A load hangs whose block somebody else is to bring: that one lies below again. What hangs may still write to its
    /// slot, which is nobody's until then.
    pub fn overtake(&mut self, id: Id) {
        let share = self.share(self.index.node(id).namespace);
        let bytes = self.tenants.shape(self.index.node(id).namespace).bytes();
        let node = self.index.node_mut(id);
        let slot = Slot { slab: std::mem::replace(&mut node.slab, NO_SLAB), slot: node.slot };
        node.life = Life::Below;
        self.slabs.disown(slot);
        self.hanging.push((slot, share, bytes));
    }

    /// A load has ended. Whether somebody else had begun to bring its block: its slot is free then, and that is all.
    pub fn was_overtaken(&mut self, load: &Filling) -> bool {
        let Some(at) = self.hanging.iter().position(|(slot, ..)| *slot == load.slot) else { return false };
        let (slot, share, bytes) = self.hanging.swap_remove(at);
        self.slabs.free(slot);
        self.shares[share].used -= bytes;
        true
    }

    /// A block was written to a tier below.
    pub fn note_written(&mut self, id: Id, tier: Where, place: Place) {
        self.set_place(id, tier, place);
        match tier {
            Where::Object => self.counts.object_written += 1,
            _ => self.counts.written += 1,
        }
        let namespace = self.index.node(id).namespace;
        let bytes = self.tenants.shape(namespace).bytes();
        self.figures_of(namespace).bytes_in[tier as usize] += bytes;
    }

    /// The block that is known at this place of a tier.
    pub fn at(&self, identity: &Identity, tier: Where, place: Place) -> Option<Id> {
        let namespace = self.tenants.find(&identity.namespace)?;
        let id = self.index.find(namespace, &identity.key)?;
        (self.index.node(id).place_in(tier) == Some(place)).then_some(id)
    }

    /// Whether a block in the log is worth its room: it was asked for since it was looked at last, or it is to stay.
    /// Where half of the log was worth it, the next one is not: there is always room to be made.
    pub fn is_wanted_at(&mut self, identity: &Identity, place: Place) -> bool {
        let Some(id) = self.at(identity, Where::Log, place) else { return false };
        let node = self.index.node_mut(id);
        let used = std::mem::take(&mut node.used) && self.wanted < self.below / 2;
        let wanted = used || node.kept_until > 0;
        self.wanted = if wanted { self.wanted + identity.shape.bytes() } else { 0 };
        wanted
    }

    /// No block is in these places of a tier any more, of some blocks that are looked at from this one on: the first of
    /// those that are left, if any are.
    pub fn lose_places(&mut self, tier: Where, first: Id, places: Range<Place>) -> Option<Id> {
        let end = self.index.end().min(first.saturating_add(AT_ONCE));
        for id in first..end {
            let node = self.index.node(id);
            let known = !matches!(node.life, Life::Free | Life::Leaving);
            if known && node.place_in(tier).is_some_and(|place| places.contains(&place)) {
                self.lose_place(id, tier);
            }
        }
        (end < self.index.end()).then_some(end)
    }

    /// A block is no longer in a tier below; where no other one has it, it is gone.
    pub fn lose_place(&mut self, id: Id, tier: Where) {
        self.set_place(id, tier, Place(0));
        if self.index.node(id).is_lost() {
            self.counts.dropped += self.forget(id).len() as u64;
        }
    }
}
