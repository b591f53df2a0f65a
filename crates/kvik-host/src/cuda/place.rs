//! What an address is.

use super::abi::{self, Addr};
use super::{Cuda, CudaError};
use crate::error::HostError;
use std::ffi::{c_int, c_uint, c_void};

/// Who may touch memory that CUDA knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A device's: no CPU may touch it.
    Device,
    /// Managed: it moves between host and device. It can be copied, but shared with no NIC and no process.
    Managed,
    /// The host's, page-locked for devices: ordinary memory to everybody else.
    Pinned,
}

/// Memory that CUDA knows, at one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Who may touch it.
    pub kind: Kind,
    /// The device by its ordinal.
    pub device: u32,
    /// The context that it was allocated in; 0 where it has none, as memory of pools and of mapped reservations.
    pub context: usize,
    /// The first byte of the allocation that the address lies in.
    pub base: usize,
    /// Bytes of that allocation.
    pub len: usize,
    /// Whether another process of this host can be given it ([`super::GpuMemory::export`]).
    pub exportable: bool,
}

const ASKED: [c_int; 7] = [
    abi::OF_MEMORY_TYPE,
    abi::OF_CONTEXT,
    abi::OF_IS_MANAGED,
    abi::OF_ORDINAL,
    abi::OF_IPC_CAPABLE,
    abi::OF_RANGE_START,
    abi::OF_RANGE_SIZE,
];

impl Cuda {
    /// What CUDA knows of an address; see [`Cuda::locate`].
    ///
    /// # Errors
    /// The driver's.
    pub fn place_of(&self, addr: usize) -> Result<Option<Place>, HostError> {
        self.0.check_process()?;
        // Each answer is at most as large as this; what is not answered stays zero.
        let mut answers = [0u64; ASKED.len()];
        let mut asked = ASKED;
        let mut into = answers.each_mut().map(|answer| (answer as *mut u64).cast::<c_void>());
        // SAFETY: as many attributes as places to write to, each large enough and aligned for any of these.
        let code = unsafe {
            (self.table().attributes)(
                asked.len() as c_uint,
                asked.as_mut_ptr(),
                into.as_mut_ptr(),
                addr as Addr,
            )
        };
        // Memory that it does not know: newer drivers answer with zeros, older ones refuse.
        if code == abi::INVALID_VALUE {
            return Ok(None);
        }
        self.check(code, || format!("asking what lies at {addr:#x}"))?;
        let [kind, context, managed, ordinal, exportable, base, len] = answers;
        let kind = match kind as u32 {
            abi::TYPE_DEVICE if managed as u32 != 0 => Kind::Managed,
            abi::TYPE_HOST if managed as u32 != 0 => Kind::Managed,
            abi::TYPE_DEVICE => Kind::Device,
            abi::TYPE_HOST => Kind::Pinned,
            _ => return Ok(None),
        };
        let ordinal = u32::try_from(ordinal as u32 as i32);
        let place = ordinal.ok().map(|device| Place {
            kind,
            device,
            context: context as usize,
            base: base as usize,
            len: len as usize,
            exportable: kind == Kind::Device && exportable as u8 != 0,
        });
        let holds = |place: &Place| addr >= place.base && addr - place.base < place.len;
        match place {
            Some(place) if kind == Kind::Pinned || holds(&place) => Ok(Some(place)),
            _ => {
                let text = format!("the driver's answer makes no sense: {answers:x?}");
                Err(CudaError::own(format!("asking what lies at {addr:#x}"), text).into())
            }
        }
    }
}
