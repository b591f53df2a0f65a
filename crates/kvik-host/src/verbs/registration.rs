//! Memory that a device knows.

use super::abi::{self, ibv_mr};
use super::device::Device;
use super::port::Port;
use super::{Object, VerbsError};
use crate::device::DeviceMemory;
use crate::rma::{Kept, RmaOp};
use crate::{HostError, Memory};
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;

/// Memory that a device knows. It stays so while a request on it is in flight.
///
/// The end of it is a fence: the device refuses what a peer sends to it afterwards, and the peer's queue pair fails.
pub struct Registration {
    mr: ManuallyDrop<Object<ibv_mr>>,
    kept: ManuallyDrop<Kept>,
    base: u64,
    device: Rc<Device>,
}

impl Device {
    /// Makes memory known to the device.
    ///
    /// # Errors
    /// The kernel's or the driver's, with what to do: often the limit of locked memory.
    pub fn register(self: &Rc<Device>, memory: Arc<Memory>) -> Result<Rc<Registration>, VerbsError> {
        let (at, len) = (memory.addr(), memory.len());
        let table = &self.verbs.table;
        let flags = flags(memory.writable());
        // SAFETY: an open domain; the memory is mapped while `memory` lives, which is kept until the
        // registration has ended, and peers are let write only what may be written.
        let mr = unsafe {
            let made = (table.reg_mr)(self.pd.as_ptr(), at as *mut c_void, len, flags as c_int);
            Object::new(made, table.dereg_mr)
        };
        let mr = mr.map_err(|number| refusal(&self.port, len, number, &memlock_limit()))?;
        Ok(self.registered(mr, Kept::Host(memory), at))
    }

    /// Makes memory of a GPU known to the device, by its dma-buf. Peers name it by its own addresses.
    ///
    /// # Errors
    /// The GPU or its driver makes no dma-bufs, or library, kernel or driver of this device cannot take them.
    pub fn register_gpu(
        self: &Rc<Device>,
        memory: Arc<dyn DeviceMemory>,
    ) -> Result<Rc<Registration>, VerbsError> {
        let buffer = memory.dmabuf().map_err(|error| {
            let what = format!("registering memory of GPU {} with {}", memory.device().number(), self.port);
            VerbsError::own(what, error.to_string())
        })?;
        let (at, len) = (memory.addr(), memory.len());
        let table = &self.verbs.table;
        let Some(reg) = table.reg_dmabuf_mr else {
            let text = format!("{} is too old for it: rdma-core 34 has it", self.verbs.path().display());
            return Err(VerbsError::own(format!("registering a dma-buf with {}", self.port), text));
        };
        let flags = flags(memory.writable());
        // SAFETY: an open domain and an open descriptor, which is kept until the registration has ended. The
        // kernel checks the range.
        let mr = unsafe {
            let (fd, flags) = (buffer.fd.as_raw_fd(), flags as c_int);
            let made = reg(self.pd.as_ptr(), buffer.offset, len, at as u64, fd, flags);
            Object::new(made, table.dereg_mr)
        };
        let mr = mr.map_err(|number| {
            let what = format!("registering a dma-buf of {len} bytes with {}", self.port);
            VerbsError::os(what, number)
                .hint("the driver of the device must know dma-bufs, and the other device allow it")
        })?;
        Ok(self.registered(mr, Kept::Device { _dmabuf: Some(buffer.fd), memory }, at))
    }

    fn registered(self: &Rc<Device>, mr: Object<ibv_mr>, kept: Kept, at: usize) -> Rc<Registration> {
        let (mr, kept) = (ManuallyDrop::new(mr), ManuallyDrop::new(kept));
        Rc::new(Registration { mr, kept, base: at as u64, device: self.clone() })
    }
}

/// Why a device does not take memory, and what to do; `limit` is that of locked memory, in words.
fn refusal(port: &Port, len: usize, number: c_int, limit: &str) -> VerbsError {
    let error = VerbsError::os(format!("registering {len} bytes with {port}"), number);
    match number {
        libc::ENOMEM | libc::EAGAIN | libc::EPERM => error.hint(&format!(
            "the device locks all of it in memory, and this process may lock {limit}: raise that (ulimit -l \
             unlimited; LimitMEMLOCK=infinity for a service; --ulimit memlock=-1 for a container)"
        )),
        libc::EFAULT => error.hint("the memory is not mapped, or not writable, as it was said to be"),
        _ => error,
    }
}

/// Peers may read it, and write it where it may be written at all.
fn flags(writable: bool) -> u32 {
    let mut flags = abi::IBV_ACCESS_REMOTE_READ;
    if writable {
        flags |= abi::IBV_ACCESS_LOCAL_WRITE | abi::IBV_ACCESS_REMOTE_WRITE;
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

    /// Those who hold the memory, this registration among them.
    pub fn holders(&self) -> usize {
        self.kept.holders()
    }

    /// Whether it is of this device: another one knows its keys for other memory, or none.
    pub(super) fn is_of(&self, device: &Device) -> bool {
        std::ptr::eq(&*self.device, device)
    }

    /// The address of a range for a request, which must lie in it; and be writable, where the request writes it.
    pub(super) fn at(&self, offset: usize, len: usize, op: RmaOp) -> Result<u64, HostError> {
        Ok(self.kept.at(offset, len, op)? as u64)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: taken once, here; no method runs after it.
        let (mr, kept) = unsafe { (ManuallyDrop::take(&mut self.mr), ManuallyDrop::take(&mut self.kept)) };
        match mr.close() {
            Ok(()) => drop(kept),
            // The device may still know the memory: it must never be used for anything else.
            Err(number) => {
                let error = VerbsError::os(format!("giving up memory with {}", self.device.port), number);
                log::error!("{error}; {} bytes of memory stay lost", kept.len());
                std::mem::forget(kept);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{Link, PortState};

    #[test]
    fn peers_write_only_what_may_be_written() {
        assert_eq!(flags(true), 7);
        assert_eq!(flags(false), abi::IBV_ACCESS_REMOTE_READ);
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
        let text = refusal(&port, 4096, libc::ENOMEM, "64 KiB (ulimit -l)").to_string();
        for word in ["4096 bytes", "device mlx5_0 port 1", "64 KiB", "ulimit -l unlimited"] {
            assert!(text.contains(word), "{word} in: {text}");
        }
    }

    #[test]
    fn the_limit_of_locked_memory_is_said_as_the_shell_says_it() {
        let text = memlock_limit();
        assert!(text.contains("ulimit -l"), "{text}");
    }
}
