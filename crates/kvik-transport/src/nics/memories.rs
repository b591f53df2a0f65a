//! The memory that a NIC knows.

use super::device::RmaDevice;
use crate::{RegionMemory, from_host};
use kvik_core::{Code, Result};
use kvik_host::{HugePages, Memory};
use kvik_proto::NicKey;
use std::collections::HashMap;

/// Bytes of the page that peers' NICs read to see that they reach this one.
const PAGE_BYTES: usize = 4096;

/// See the module's text.
pub(super) struct Memories<C: RmaDevice> {
    /// By name.
    known: HashMap<usize, C::Known>,
    /// Memory that is let go of when nobody but the NICs holds it.
    leaving: HashMap<usize, C::Known>,
    page: Option<(C::Known, NicKey)>,
}

impl<C: RmaDevice> Memories<C> {
    pub fn new() -> Memories<C> {
        Memories { known: HashMap::new(), leaving: HashMap::new(), page: None }
    }

    pub fn register(&mut self, device: &mut C, memory: RegionMemory) -> Result<NicKey> {
        let name = memory.name();
        let (known, key) = device.register(memory)?;
        self.known.insert(name, known);
        Ok(key)
    }

    pub fn get(&self, name: usize) -> Option<&C::Known> {
        self.known.get(&name)
    }

    /// Nobody needs it any more: it is let go of when nobody but so many NICs holds it.
    pub fn withdraw(&mut self, name: usize, nics: usize) {
        self.leaving.extend(self.known.remove_entry(&name));
        self.let_go(nics);
    }

    /// It is needed again.
    pub fn keep(&mut self, name: usize) {
        self.known.extend(self.leaving.remove_entry(&name));
    }

    pub fn let_go(&mut self, nics: usize) {
        self.leaving.retain(|_, known| C::is_held(known, nics));
    }

    /// Whether some is to be let go of.
    pub fn is_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// A page that nothing else is kept in, and its key; the NIC learns of it when it is first needed.
    pub fn page(&mut self, device: &mut C) -> Result<(&C::Known, NicKey)> {
        let (known, key) = match self.page.take() {
            Some(page) => page,
            None => {
                let memory = Memory::shared(PAGE_BYTES, HugePages::Never);
                let memory = memory.map_err(|error| from_host(Code::MemoryCapReached, error))?;
                device.register(RegionMemory::from(memory))?
            }
        };
        Ok((&self.page.insert((known, key)).0, key))
    }
}
