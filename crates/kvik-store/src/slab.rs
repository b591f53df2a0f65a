//! The memory of the tier `memory`: slabs of slots, each slab for blocks of one shape.
//!
//! A slab is a region of its own, registered with the engine, so that its blocks are granted and read like any pages.
//! Memory is taken slab by slab up to the capacity, and a slab that is empty is given back when blocks of another
//! shape need room.

use crate::Shape;
use crate::index::{Id, NONE};
use kvik_core::{Layers, Layout, Result};
use kvik_engine::{Engine, PageSet, Region, RegionMemory};
use kvik_host::{HugePages, Memory};
use std::sync::Arc;

/// Slots begin at multiples of this, where blocks are as large: what direct I/O of disks needs.
const ALIGNED: u64 = 4096;
/// Slots of smaller blocks begin at multiples of this, a line of the processor's cache.
const LINE: u64 = 64;
/// Memory is taken in so many slabs, at least; so is a quota.
const SLABS: u64 = 16;
/// A slab is not larger, unless one block is.
const LARGEST: u64 = 1 << 30;
/// The first slab of a shape takes so much of a quota, one part of this many.
const FIRST_OF: u64 = 256;

/// Who shares slabs: blocks of one shape, of tenants that are not kept apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Class {
    pub shape: Shape,
    /// The tenant that has slabs of its own.
    pub apart: Option<u16>,
    /// Bytes that all of its blocks may take.
    pub quota: Option<u64>,
}

/// Where a block lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    pub slab: u16,
    pub slot: u32,
}

struct Slab {
    class: Class,
    region: Region,
    memory: Arc<Memory>,
    layout: Arc<Layout>,
    stride: u64,
    /// Who has each slot.
    owners: Vec<Id>,
    free: Vec<u32>,
}

impl Slab {
    fn is_empty(&self) -> bool {
        self.free.len() == self.owners.len()
    }

    fn bytes(&self) -> u64 {
        self.stride * self.owners.len() as u64
    }
}

/// See the module's text.
pub(crate) struct Slabs {
    engine: Engine,
    capacity: u64,
    taken: u64,
    slabs: Vec<Option<Slab>>,
}

/// The bytes that a slot takes.
fn stride(shape: &Shape) -> u64 {
    let to = if shape.bytes() >= ALIGNED { ALIGNED } else { LINE };
    shape.bytes().next_multiple_of(to)
}

impl Slabs {
    pub fn new(engine: Engine, capacity: u64) -> Slabs {
        Slabs { engine, capacity, taken: 0, slabs: Vec::new() }
    }

    /// Bytes that slabs may have.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes of all slabs.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// A slot for a block; none where there is no room in the slabs that are there, nor for another slab.
    ///
    /// # Errors
    /// The machine has no memory, or a NIC refuses it.
    pub fn take(&mut self, class: Class, owner: Id) -> Result<Option<Slot>> {
        let has_room = |slab: &Option<Slab>| {
            slab.as_ref().is_some_and(|slab| slab.class == class && !slab.free.is_empty())
        };
        let at = match self.slabs.iter().position(has_room) {
            Some(at) => Some(at),
            None => self.grow(class)?,
        };
        let Some((at, slab)) = at.and_then(|at| Some((at, self.slabs[at].as_mut()?))) else {
            return Ok(None);
        };
        let Some(slot) = slab.free.pop() else { return Ok(None) };
        slab.owners[slot as usize] = owner;
        Ok(Some(Slot { slab: at as u16, slot }))
    }

    /// A slab more, if there is room for one; room is made by slabs of other classes that are empty.
    fn grow(&mut self, class: Class) -> Result<Option<usize>> {
        let stride = stride(&class.shape);
        for at in 0..self.slabs.len() {
            let is_own = |slab: &Slab| class.quota.is_some() && slab.class.apart == class.apart;
            if self.slabs[at].as_ref().is_some_and(|slab| slab.is_empty() && is_own(slab)) {
                self.give_back(at);
            }
        }
        // What is beyond the quota would be nobody's.
        let most = self.slots_left(class).saturating_mul(stride);
        if most == 0 {
            return Ok(None);
        }
        let wanted = self.size(class, most).max(stride);
        let mut at = 0;
        while self.capacity - self.taken < wanted && at < self.slabs.len() {
            if self.slabs[at].as_ref().is_some_and(Slab::is_empty) {
                self.give_back(at);
            }
            at += 1;
        }
        let slots = ((self.capacity - self.taken).min(wanted) / stride).min(u64::from(NONE - 1)) as u32;
        let place = self.slabs.iter().position(Option::is_none).unwrap_or(self.slabs.len());
        if slots == 0 || place >= usize::from(u16::MAX) {
            return Ok(None);
        }
        let slab = self.make(class, stride, slots)?;
        self.taken += slab.bytes();
        match self.slabs.get_mut(place) {
            Some(free) => *free = Some(slab),
            None => self.slabs.push(Some(slab)),
        }
        Ok(Some(place))
    }

    /// Bytes of one slab more, of which a quota has room for `most`. As many as its shape has there already: so who uses little
    /// of a quota takes little memory. But few, and less where the quota is nearly full: so that other shapes have room there.
    fn size(&self, class: Class, most: u64) -> u64 {
        let largest = (self.capacity / SLABS).min(LARGEST);
        let Some(quota) = class.quota else { return largest };
        let quota = quota.min(self.capacity);
        let of_class = self.slabs.iter().flatten().filter(|slab| slab.class == class);
        let has: u64 = of_class.map(Slab::bytes).sum();
        largest.min(has.min(most / 2).clamp(quota / FIRST_OF, quota / SLABS)).min(most)
    }

    fn make(&self, class: Class, stride: u64, slots: u32) -> Result<Slab> {
        let Class { shape, .. } = class;
        let layers = Layers::Strided { count: shape.layers(), stride: shape.layer_bytes() };
        let run = shape.run_bytes();
        let layout = Layout::new(0, slots, run, stride, shape.slices(), run, layers)?;
        let bytes = usize::try_from(u64::from(slots) * stride).unwrap_or(usize::MAX);
        let memory = Memory::shared(bytes, HugePages::Auto).map_err(crate::no_memory)?;
        let memory = Arc::new(memory);
        let region = self.engine.register(RegionMemory::Host(memory.clone()))?;
        let owners = vec![NONE; slots as usize];
        let free = (0..slots).rev().collect();
        Ok(Slab { class, region, memory, layout: Arc::new(layout), stride, owners, free })
    }

    fn give_back(&mut self, at: usize) {
        if let Some(slab) = self.slabs[at].take() {
            self.taken -= slab.bytes();
        }
    }

    /// A slot is free again.
    pub fn free(&mut self, slot: Slot) {
        if let Some(slab) = &mut self.slabs[usize::from(slot.slab)] {
            slab.owners[slot.slot as usize] = NONE;
            slab.free.push(slot.slot);
        }
    }

    /// A slot is nobody's, and is not free yet.
    pub fn disown(&mut self, slot: Slot) {
        if let Some(slab) = &mut self.slabs[usize::from(slot.slab)] {
            slab.owners[slot.slot as usize] = NONE;
        }
    }

    /// Which class a slot is of.
    pub fn class(&self, slot: Slot) -> Option<Class> {
        self.slabs[usize::from(slot.slab)].as_ref().map(|slab| slab.class)
    }

    /// Whether there would be room for a block of a shape if there were no other one.
    pub fn fit(&self, shape: &Shape) -> bool {
        stride(shape) <= self.capacity
    }

    /// Slots that the slabs of a tenant may have more: with those of all shapes, it has room for its quota.
    pub fn slots_left(&self, class: Class) -> u64 {
        let Some(quota) = class.quota else { return u64::MAX };
        let own = self.slabs.iter().flatten().filter(|slab| slab.class.apart == class.apart);
        let room: u64 = own.map(|slab| slab.class.shape.bytes() * slab.owners.len() as u64).sum();
        quota.saturating_sub(room) / class.shape.bytes()
    }

    /// Who has slots of a slab.
    pub fn owners(&self, slab: u16) -> Vec<Id> {
        let slab = self.slabs[usize::from(slab)].as_ref();
        slab.map_or_else(Vec::new, |slab| slab.owners.iter().copied().filter(|id| *id != NONE).collect())
    }

    /// The pages of slots of one slab, in this order.
    ///
    /// # Errors
    /// None for slots that are taken.
    pub fn pages(&self, slab: u16, slots: Arc<[u32]>) -> Result<PageSet> {
        let slab = self.slabs[usize::from(slab)].as_ref().ok_or_else(crate::slab_gone)?;
        PageSet::new(&slab.region, slab.layout.clone(), slots, None, None)
    }

    /// The memory of a slot, and where its bytes begin.
    pub fn bytes(&self, slot: Slot) -> Option<(Arc<Memory>, u64)> {
        let slab = self.slabs[usize::from(slot.slab)].as_ref()?;
        Some((slab.memory.clone(), slab.layout.at(0, slot.slot, 0)))
    }
}
