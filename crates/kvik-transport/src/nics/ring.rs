//! Page-locked memory by which a NIC moves pages of a device that it does not reach itself.
//!
//! A ring is one NIC's for one device: a stream with a buffer of [`SLOTS`] slots, which the NIC learns of once. Pages come
//! and go through it slot by slot, so what the device copies and what the wire carries overlap. A slot is a session's from
//! when it is taken until neither the device nor an operation has anything of it.
//!
//! Slots are shared as operations are (`turns`): a session takes one more only while it has less than is free. So one
//! whose peer is stuck keeps its share, and no more.

use super::device::RmaDevice;
use crate::devices::{blind, failed};
use crate::{RegionMemory, from_host};
use kvik_core::{Code, Error, Result, View};
use kvik_host::device::{Device, DeviceMemory, DeviceStream};
use kvik_host::event::{Epoll, EventFd};
use kvik_proto::Op;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a slot: a device's engine is busy with them for long beside what a copy takes to begin.
pub(super) const SLOT: u64 = 256 << 10;
/// Slots of a ring. The half that one session has holds more than a link of 200 Gbit/s carries while a slot is filled.
pub(super) const SLOTS: usize = 16;

/// The rings of a NIC, one of each device with memory that it does not reach.
pub(super) struct Rings<C: RmaDevice> {
    rings: Vec<Ring<C>>,
    /// The memory that goes through them, by name.
    staged: HashSet<usize>,
    /// A stream that has got somewhere raises it.
    flag: Arc<EventFd>,
}

/// See the module's text.
pub(super) struct Ring<C: RmaDevice> {
    /// How the NIC knows the buffer.
    pub known: C::Known,
    stream: Box<dyn DeviceStream>,
    slots: [Slot; SLOTS],
    /// The runs of a copy, kept for their room.
    runs: Vec<(usize, usize)>,
    /// Why the device does nothing any more.
    pub lost: Option<Error>,
}

#[derive(Default)]
struct Slot {
    /// Whose it is.
    session: Option<u64>,
    /// Until it is reached the device has the slot.
    mark: Option<u64>,
    /// There is no telling when the device is through with it.
    blind: bool,
}

impl<C: RmaDevice> Rings<C> {
    /// None yet.
    ///
    /// # Errors
    /// The kernel's: it has no descriptor to spare.
    pub fn new(epoll: &Epoll, token: u64) -> Result<Rings<C>> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        let flag = Arc::new(EventFd::new().map_err(fail)?);
        epoll.add(&*flag, token, kvik_host::event::Interest::READ).map_err(fail)?;
        Ok(Rings { rings: Vec::new(), staged: HashSet::new(), flag })
    }

    /// Sees to it that memory which the NIC does not reach can go through a ring of its device.
    ///
    /// # Errors
    /// It is the host's, there is no page-locked memory, or the NIC does not take it.
    pub fn admit(&mut self, device: &mut C, memory: &RegionMemory) -> Result<()> {
        let RegionMemory::Device(on) = memory else {
            return Err(Error::new(Code::InvalidArgument, "memory of the host needs no ring"));
        };
        if self.position(on.device()).is_none() {
            self.rings.push(Ring::new(device, &**on)?);
        }
        self.staged.insert(memory.name());
        Ok(())
    }

    /// Memory of this name goes through none any more.
    pub fn withdraw(&mut self, name: usize) {
        self.staged.remove(&name);
    }

    /// The ring that this memory goes through.
    pub fn of(&self, memory: &RegionMemory) -> Option<usize> {
        let RegionMemory::Device(on) = memory else { return None };
        self.staged.contains(&memory.name()).then(|| self.position(on.device()))?
    }

    fn position(&self, device: &dyn Device) -> Option<usize> {
        self.rings.iter().position(|ring| ring.stream.device().id() == device.id())
    }

    pub fn get(&self, ring: usize) -> Option<&Ring<C>> {
        self.rings.get(ring)
    }

    pub fn get_mut(&mut self, ring: usize) -> Option<&mut Ring<C>> {
        self.rings.get_mut(ring)
    }

    /// Takes note of what devices are through with.
    pub fn settle(&mut self) {
        if self.rings.is_empty() {
            return;
        }
        // First: what is told from here on is looked at next time.
        if let Err(error) = self.flag.drain() {
            log::error!("a NIC cannot hear of the copies of devices, and looks at them: {error}");
        }
        self.rings.iter_mut().for_each(Ring::settle);
    }

    /// Begins to fill a slot from a part of a stream (a write), or to empty it into one (a read).
    ///
    /// # Errors
    /// `DeviceFailed`; the device may have something of the slot all the same.
    pub fn copy(
        &mut self,
        ring: usize,
        slot: usize,
        op: Op,
        (memory, view, part): (&RegionMemory, &View, Range<u64>),
    ) -> Result<()> {
        let flag = self.flag.clone();
        match (self.get_mut(ring), memory) {
            (Some(ring), RegionMemory::Device(memory)) => ring.copy(slot, op, (memory, view, part), &flag),
            _ => Err(Error::new(Code::DeviceFailed, "a NIC has no ring for a device")),
        }
    }
}

impl<C: RmaDevice> Ring<C> {
    fn new(device: &mut C, memory: &dyn DeviceMemory) -> Result<Ring<C>> {
        let on = memory.device();
        let refused = |why: &dyn std::fmt::Display| {
            let text = format!("no page-locked ring for {on}: {why}");
            Error::new(Code::TransportUnavailable, text)
        };
        let stream = on.stream(SLOTS * SLOT as usize).map_err(|error| refused(&error))?;
        let buffer = RegionMemory::Host(stream.buffer().clone());
        let (known, _) = device.register(buffer).map_err(|error| refused(&error.text))?;
        Ok(Ring { known, stream, slots: Default::default(), runs: Vec::new(), lost: None })
    }

    /// The device.
    pub fn device(&self) -> &dyn Device {
        self.stream.device()
    }

    /// Takes a slot for a session, where it may have one more.
    pub fn take(&mut self, session: u64) -> Option<usize> {
        let held = self.slots.iter().filter(|slot| slot.session == Some(session)).count();
        let free = self.slots.iter().filter(|slot| slot.session.is_none()).count();
        let at = self.slots.iter().position(|slot| slot.session.is_none()).filter(|_| held < free)?;
        self.slots[at].session = Some(session);
        Some(at)
    }

    /// Gives it back, unless the device has something of it.
    pub fn give(&mut self, slot: usize) -> bool {
        let is_free = !self.is_copying(slot);
        if is_free {
            self.slots[slot].session = None;
        }
        is_free
    }

    /// Whether the device has something of a slot.
    pub fn is_copying(&self, slot: usize) -> bool {
        self.slots[slot].mark.is_some() || self.slots[slot].blind
    }

    fn settle(&mut self) {
        if self.slots.iter().all(|slot| slot.mark.is_none()) {
            return;
        }
        let reached = self.stream.reached();
        let lost = reached.map_err(blind);
        for slot in self.slots.iter_mut().filter(|slot| slot.mark.is_some()) {
            match &lost {
                Ok(reached) if slot.mark > Some(*reached) => {}
                Ok(_) | Err(Err(_)) => slot.mark = None,
                Err(Ok(_)) => (slot.mark, slot.blind) = (None, true),
            }
        }
        if let Err(Err(error)) = lost {
            self.lost.get_or_insert(error);
        }
    }

    fn copy(
        &mut self,
        slot: usize,
        op: Op,
        (memory, view, part): (&Arc<dyn DeviceMemory>, &View, Range<u64>),
        flag: &Arc<EventFd>,
    ) -> Result<()> {
        self.runs.clear();
        self.runs.extend(view.runs(part).map(|run| (run.offset as usize, run.len as usize)));
        let at = slot * SLOT as usize;
        let begun = match op {
            Op::Read => self.stream.scatter(memory, &self.runs, at),
            _ => self.stream.gather(at, memory, &self.runs),
        };
        let of = &mut self.slots[slot];
        // Also behind a copy of which only a part could be begun.
        of.mark = match self.stream.mark() {
            Ok(mark) => Some(mark),
            // Nothing is in flight where all is lost.
            Err(error) => blind(error)?,
        };
        of.blind = of.mark.is_none();
        let told = self.stream.tell(flag);
        begun.and(told).map_err(failed)
    }
}
