//! Memory that a device knows.

use super::abi::{self, ibv_mr};
use super::device::Device;
use super::port::Port;
use super::{Object, VerbsError};
use crate::device::DeviceMemory;
use crate::{HostError, Memory};
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

/// Who may reach registered memory, and how it is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Peers may read it, and write it where it may be written at all.
    pub remote: bool,
    /// The device asks the kernel for pages when it needs them, instead of having all of them locked: for
    /// devices that can.
    pub on_demand: bool,
}

/// What must stay where it is while the device knows it.
enum Keep {
    Memory(Arc<Memory>),
    // In this order: the descriptor is closed before the memory may be freed.
    DmaBuf { _fd: OwnedFd, gpu: Option<Arc<dyn DeviceMemory>> },
}

/// Memory that a device knows. It stays so while a request on it is in flight.
///
/// The end of it is a fence: the device refuses what a peer sends to it afterwards, and the peer's queue pair
/// fails.
pub struct Registration {
    mr: ManuallyDrop<Object<ibv_mr>>,
    keep: ManuallyDrop<Keep>,
    base: u64,
    len: usize,
    writable: bool,
    device: Rc<Device>,
}

impl Device {
    /// Makes memory known to the device.
    ///
    /// # Errors
    /// The kernel's or the driver's, with what to do: often the limit of locked memory.
    pub fn register(
        self: &Rc<Device>,
        memory: Arc<Memory>,
        access: Access,
    ) -> Result<Rc<Registration>, VerbsError> {
        let (at, len, writable) = (memory.addr(), memory.len(), memory.writable());
        let table = &self.verbs.table;
        let flags = flags(access, writable);
        // SAFETY: an open domain; the memory is mapped while `memory` lives, which is kept until the
        // registration has ended, and peers are let write only what may be written.
        let mr = unsafe {
            let made = (table.reg_mr)(self.pd.as_ptr(), at as *mut c_void, len, flags as c_int);
            Object::new(made, table.dereg_mr)
        };
        let mr = mr.map_err(|number| refusal(&self.port, len, access, number, &memlock_limit()))?;
        let (mr, keep) = (ManuallyDrop::new(mr), ManuallyDrop::new(Keep::Memory(memory)));
        Ok(Rc::new(Registration { mr, keep, base: at as u64, len, writable, device: self.clone() }))
    }

    /// Makes the memory behind a dma-buf known, such as a GPU's: `len` bytes at `offset` of it, which
    /// requests and peers name from `base` on.
    ///
    /// # Errors
    /// As [`Device::register`]; and where library, kernel or driver cannot do it.
    pub fn register_dmabuf(
        self: &Rc<Device>,
        fd: OwnedFd,
        (offset, len): (u64, usize),
        base: u64,
        remote: bool,
    ) -> Result<Rc<Registration>, VerbsError> {
        self.register_buffer((fd, None), (offset, len), base, remote)
    }

    /// Makes memory of a GPU known to the device, by its dma-buf. Peers name it by its own addresses.
    ///
    /// # Errors
    /// The GPU or its driver makes no dma-bufs, or as for [`Device::register_dmabuf`].
    pub fn register_gpu(
        self: &Rc<Device>,
        memory: Arc<dyn DeviceMemory>,
        remote: bool,
    ) -> Result<Rc<Registration>, VerbsError> {
        let buffer = memory.dmabuf().map_err(|error| {
            let what = format!("registering memory of GPU {} with {}", memory.device().number(), self.port);
            VerbsError::own(what, error.to_string())
        })?;
        let (range, base) = ((buffer.offset, memory.len()), memory.addr() as u64);
        self.register_buffer((buffer.fd, Some(memory)), range, base, remote)
    }

    fn register_buffer(
        self: &Rc<Device>,
        (fd, gpu): (OwnedFd, Option<Arc<dyn DeviceMemory>>),
        (offset, len): (u64, usize),
        base: u64,
        remote: bool,
    ) -> Result<Rc<Registration>, VerbsError> {
        let table = &self.verbs.table;
        let Some(reg) = table.reg_dmabuf_mr else {
            let text = format!("{} is too old for it: rdma-core 34 has it", self.verbs.path().display());
            return Err(VerbsError::own(format!("registering a dma-buf with {}", self.port), text));
        };
        let flags = flags(Access { remote, on_demand: false }, true);
        // SAFETY: an open domain and an open descriptor, which is kept until the registration has ended. The
        // kernel checks the range.
        let mr = unsafe {
            let made = reg(self.pd.as_ptr(), offset, len, base, fd.as_raw_fd(), flags as c_int);
            Object::new(made, table.dereg_mr)
        };
        let mr = mr.map_err(|number| {
            let what = format!("registering a dma-buf of {len} bytes with {}", self.port);
            VerbsError::os(what, number)
                .hint("the driver of the device must know dma-bufs, and the other device allow it")
        })?;
        let (mr, keep) = (ManuallyDrop::new(mr), ManuallyDrop::new(Keep::DmaBuf { _fd: fd, gpu }));
        Ok(Rc::new(Registration { mr, keep, base, len, writable: true, device: self.clone() }))
    }
}

/// Why a device does not take memory, and what to do; `limit` is that of locked memory, in words.
fn refusal(port: &Port, len: usize, access: Access, number: c_int, limit: &str) -> VerbsError {
    let error = VerbsError::os(format!("registering {len} bytes with {port}"), number);
    match number {
        _ if access.on_demand => {
            error.hint("the device may not page on demand; register the memory without that")
        }
        libc::ENOMEM | libc::EAGAIN | libc::EPERM => error.hint(&format!(
            "the device locks all of it in memory, and this process may lock {limit}: raise that (ulimit -l \
             unlimited; LimitMEMLOCK=infinity for a service; --ulimit memlock=-1 for a container), or, on a \
             device that pages on demand, have it do so"
        )),
        libc::EFAULT => error.hint("the memory is not mapped, or not writable, as it was said to be"),
        _ => error,
    }
}

fn flags(access: Access, writable: bool) -> u32 {
    let mut flags = 0;
    if writable {
        flags |= abi::IBV_ACCESS_LOCAL_WRITE;
    }
    if access.remote {
        flags |= abi::IBV_ACCESS_REMOTE_READ;
    }
    if access.remote && writable {
        flags |= abi::IBV_ACCESS_REMOTE_WRITE;
    }
    if access.on_demand {
        flags |= abi::IBV_ACCESS_ON_DEMAND;
    }
    flags
}

/// The limit of locked memory, in words.
fn memlock_limit() -> String {
    match rustix::process::getrlimit(rustix::process::Resource::Memlock).current {
        Some(bytes) => format!("{} KiB (ulimit -l)", bytes / 1024),
        None => "any amount (ulimit -l is unlimited), so the machine's memory may be short".into(),
    }
}

impl Registration {
    /// How peers name it.
    pub fn rkey(&self) -> u32 {
        // SAFETY: an open registration.
        unsafe { (*self.mr.as_ptr()).rkey }
    }

    /// How own requests name it.
    pub fn lkey(&self) -> u32 {
        // SAFETY: an open registration.
        unsafe { (*self.mr.as_ptr()).lkey }
    }

    /// What peers take for the address of its first byte.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The GPU's memory; none for any other.
    pub fn gpu(&self) -> Option<&Arc<dyn DeviceMemory>> {
        match &*self.keep {
            Keep::DmaBuf { gpu, .. } => gpu.as_ref(),
            Keep::Memory(_) => None,
        }
    }

    /// The memory; none for a dma-buf.
    pub fn memory(&self) -> Option<&Arc<Memory>> {
        match &*self.keep {
            Keep::Memory(memory) => Some(memory),
            Keep::DmaBuf { .. } => None,
        }
    }

    /// Whether it is of this device: another one knows its keys for other memory, or none.
    pub(super) fn is_of(&self, device: &Device) -> bool {
        std::ptr::eq(&*self.device, device)
    }

    /// The address of a range for a request, which must lie in it; and be writable, where the request writes
    /// it.
    pub(super) fn at(&self, offset: usize, len: usize, written: bool) -> Result<u64, HostError> {
        if written && !self.writable {
            return Err(HostError::ReadOnlyMemory);
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.base + offset as u64),
            _ => Err(HostError::OutOfBounds { offset, len, size: self.len }),
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: taken once, here; no method runs after it.
        let (mr, keep) = unsafe { (ManuallyDrop::take(&mut self.mr), ManuallyDrop::take(&mut self.keep)) };
        match mr.close() {
            Ok(()) => drop(keep),
            // The device may still know the memory: it must never be used for anything else.
            Err(_) => std::mem::forget(keep),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{Link, PortState};

    #[test]
    fn peers_write_only_what_may_be_written() {
        let both = Access { remote: true, on_demand: false };
        let own = Access { remote: false, on_demand: true };
        assert_eq!(flags(both, true), 7);
        assert_eq!(flags(both, false), abi::IBV_ACCESS_REMOTE_READ);
        assert_eq!(flags(own, true), abi::IBV_ACCESS_LOCAL_WRITE | abi::IBV_ACCESS_ON_DEMAND);
        assert_eq!(flags(own, false), abi::IBV_ACCESS_ON_DEMAND);
    }

    #[test]
    fn a_refusal_says_what_may_be_locked_and_how_to_raise_it() {
        let port = Port {
            device: "mlx5_0".into(),
            number: 1,
            state: PortState::Active,
            link: Link::Ethernet,
            mtu: 1024,
            longest: 1 << 30,
            lid: 0,
            gigabits: 100,
            gids: Vec::new(),
        };
        let access = |on_demand| Access { remote: true, on_demand };
        let text = refusal(&port, 4096, access(false), libc::ENOMEM, "64 KiB (ulimit -l)").to_string();
        let words = ["4096 bytes", "device mlx5_0 port 1", "64 KiB", "ulimit -l unlimited", "on demand"];
        for word in words {
            assert!(text.contains(word), "{word} in: {text}");
        }
        let text = refusal(&port, 1, access(true), libc::EOPNOTSUPP, "").to_string();
        assert!(text.contains("without that"), "{text}");
    }

    #[test]
    fn the_limit_of_locked_memory_is_said_as_the_shell_says_it() {
        let text = memlock_limit();
        assert!(text.contains("ulimit -l"), "{text}");
    }
}
