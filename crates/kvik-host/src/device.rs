//! Memory of devices, which no processor touches, and what transports need of it, whatever the device is.
//!
//! * [`is_device`] and [`open`]: what an address is, and what peers have exported;
//! * [`Device`]: one of them;
//! * [`DeviceMemory`]: registered memory that lies on one: an address, a length, and no byte for a processor;
//! * [`DeviceStream`]: copies in flight, in order, with a buffer of the host that they go to and come from;
//! * [`CallerStream`] and [`DeviceMark`]: a stream of the program's own, and a place in it that one can wait for.
//!
//! [`cuda`](crate::cuda) is the one kind today. Another one implements the three traits, and has its place in the two
//! functions.
//!
//! **Nothing here blocks**, but for what says so: a device that stands still holds up its copies and nobody's thread.
//! What a stream was given cannot be taken back. It holds the memory of its copies until they have ended, also when it
//! is dropped before.

use crate::cuda::{Cuda, GpuMemory, IpcHandle, Kind};
use crate::error::HostError;
use crate::event::EventFd;
use crate::memory::Memory;
use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// What another process of this host opens a device's memory by. What it says is checked when it is opened.
pub type Handle = [u8; 96];

/// What a device is, for those outside of this process's own libraries who have to name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// A GPU of the CUDA driver, by its ordinal.
    Cuda,
    /// Nobody else has a name for it.
    Other,
}

/// A device. It is shown as people call it: `GPU 0`.
pub trait Device: fmt::Display {
    /// What it is.
    fn kind(&self) -> DeviceKind;

    /// Its number among the devices of its kind that this process sees.
    fn number(&self) -> u32;

    /// The same for the same device, and for no other while this one is held.
    fn id(&self) -> usize;

    /// How processes of this host read each other's memory on it, in a word for reports.
    fn ipc(&self) -> &'static str;

    /// A stream of its own, with a buffer of so many bytes, which no other stream waits for and which waits for none.
    ///
    /// # Errors
    /// The library's.
    fn stream(&self, room: usize) -> Result<Box<dyn DeviceStream>, HostError>;
}

/// Registered memory of a device.
pub trait DeviceMemory: Any + Send + Sync + fmt::Debug {
    /// Where it lies.
    fn device(&self) -> &dyn Device;

    /// The address of the first byte: a number, for devices and NICs.
    fn addr(&self) -> usize;

    /// Bytes.
    fn len(&self) -> usize;

    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether transfers may write here: not in a peer's.
    fn writable(&self) -> bool;

    /// Copies `from` to `offset`, behind all that the device's default stream has been given, and returns when it is
    /// there. It has no deadline: transfers have streams.
    ///
    /// # Errors
    /// Out of bounds, a peer's memory, or the library's.
    fn copy_in(&self, offset: usize, from: &[u8]) -> Result<(), HostError>;

    /// Copies from `offset` into `into`, in the same order, and without a deadline too.
    ///
    /// # Errors
    /// Out of bounds, or the library's.
    fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), HostError>;

    /// Sees to it that what NICs have written on the device, and told of, is seen by what is launched there from now on.
    ///
    /// # Errors
    /// The device cannot do it, or the library's.
    fn flush_writes(&self) -> Result<(), HostError>;

    /// What another process opens the memory by. It stays valid while the memory is allocated.
    ///
    /// # Errors
    /// This memory cannot be shared, or the library's.
    fn export(&self) -> Result<Handle, HostError>;

    /// The memory as a dma-buf, for NICs.
    ///
    /// # Errors
    /// The device, its driver or this memory cannot do it.
    fn dmabuf(&self) -> Result<DmaBuf, HostError>;
}

/// Memory of a device as a descriptor, for libibverbs and for libfabric.
#[derive(Debug)]
pub struct DmaBuf {
    /// The dma-buf. It keeps the bytes, but not what they mean: it is closed before the memory is freed.
    pub fd: OwnedFd,
    /// Where in it the memory's first byte is: dma-bufs are made of whole pages.
    pub offset: u64,
    /// Whether the driver was made to finish each blocking copy into this memory before it says so, as a NIC needs it.
    /// Memory of pools and mappings has no such setting: who copies into it waits for the copy by an event.
    pub ordered: bool,
}

/// Copies that one thread has in flight on one device. What one call gives it comes behind what the calls before did;
/// the pieces of one call are in no order.
pub trait DeviceStream: Send {
    /// Its device.
    fn device(&self) -> &dyn Device;

    /// Its buffer, page-locked, which NICs can be told of. What a copy brings here counts, and what one takes from here
    /// may be changed, once a mark behind the copy is reached.
    fn buffer(&self) -> &Arc<Memory>;

    /// Begins to copy pieces (offset and bytes) of the device's memory into the buffer, one behind the other from `at`
    /// on.
    ///
    /// # Errors
    /// Out of bounds, memory of another device, or the library's; then some may be in flight, which the next mark is
    /// behind.
    fn gather(
        &mut self,
        at: usize,
        from: &Arc<dyn DeviceMemory>,
        pieces: &[(usize, usize)],
    ) -> Result<(), HostError>;

    /// Begins to copy what lies in the buffer from `at` on to pieces (offset and bytes) of the device's memory, which
    /// do not overlap.
    ///
    /// # Errors
    /// As for [`DeviceStream::gather`], or a peer's memory.
    fn scatter(
        &mut self,
        to: &Arc<dyn DeviceMemory>,
        pieces: &[(usize, usize)],
        at: usize,
    ) -> Result<(), HostError>;

    /// Begins to copy pieces (where to, where from, bytes) between memories of this device, of two of its kind, or from
    /// a peer's. Those that are written do not overlap.
    ///
    /// # Errors
    /// As for [`DeviceStream::scatter`].
    fn between(
        &mut self,
        to: &Arc<dyn DeviceMemory>,
        from: &Arc<dyn DeviceMemory>,
        pieces: &[(usize, usize, usize)],
    ) -> Result<(), HostError>;

    /// Marks this place: numbers rise.
    ///
    /// # Errors
    /// The library's; what copies use stays held.
    fn mark(&mut self) -> Result<u64, HostError>;

    /// The last mark that it has reached, which all copies before have ended at; 0 before the first. Does not wait.
    ///
    /// # Errors
    /// The device is lost ([`HostError::is_device_lost`]): no copy counts, and nothing is in flight any more. So says each
    /// call from then on. After any other error something may be in flight.
    fn reached(&mut self) -> Result<u64, HostError>;

    /// Waits until it has reached a mark, at most so long.
    ///
    /// # Errors
    /// [`HostError::TimedOut`]: it is still in flight. As for [`DeviceStream::reached`].
    fn wait(&mut self, mark: u64, limit: Duration) -> Result<(), HostError>;

    /// Raises the flag when it gets here, or fails before. A thread of the library's does it; nobody waits.
    ///
    /// # Errors
    /// The library's.
    fn tell(&mut self, flag: &Arc<EventFd>) -> Result<(), HostError>;

    /// Marks the place that a stream of the program's is at. The flag is raised once it is reached, or has failed: at
    /// that moment, or later where marks of other streams that came before are not reached yet. The program's stream
    /// waits for nothing.
    ///
    /// # Errors
    /// The library's: the stream may be another device's.
    fn mark_of(
        &mut self,
        stream: CallerStream,
        flag: &Arc<EventFd>,
    ) -> Result<Box<dyn DeviceMark>, HostError>;
}

/// A stream of the program that uses kvik, by its driver's handle: 0 is the device's default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallerStream(usize);

impl CallerStream {
    /// A `CUstream`, such as `torch.cuda.current_stream().cuda_stream`.
    ///
    /// # Safety
    /// It is a stream, and not destroyed before the call that is given this has returned.
    pub unsafe fn new(handle: usize) -> CallerStream {
        CallerStream(handle)
    }

    /// The driver's handle.
    pub fn handle(self) -> usize {
        self.0
    }
}

/// A place in a stream.
pub trait DeviceMark: Send {
    /// Whether all that the stream was given before has ended. Asks the library, and does not wait.
    ///
    /// # Errors
    /// The device is lost, or the library's.
    fn is_reached(&mut self) -> Result<bool, HostError>;
}

/// Whether an address is a device's, which no processor may touch. Loads no library: a process that has none has no
/// such memory.
///
/// # Errors
/// The library's, where it knows of the address and cannot tell.
pub fn is_device(addr: usize) -> Result<bool, HostError> {
    Ok(Cuda::locate(addr)?.is_some_and(|place| place.kind != Kind::Pinned))
}

/// Checks that this process uses devices of that kind: nothing here begins it. Whoever does not use CUDA gets no context
/// of it, nor the trouble with forks that comes along.
///
/// # Errors
/// It does not.
pub fn is_used() -> Result<(), HostError> {
    let loaded = Cuda::loaded().map(|_| ());
    loaded.ok_or_else(|| HostError::InvalidArgument("this process does not use CUDA".into()))
}

/// Opens what another process of this host has exported, for reading only. `keep` is dropped once it is closed again,
/// which is after the last use, in a thread of its own. A process that had not used the device gets a context on it, for which
/// the library may wait until the device has done what it was given.
///
/// # Errors
/// This process does not use such devices, does not see this one, the peer is gone, or the library refuses it.
pub fn open(handle: &Handle, keep: Box<dyn Any + Send + Sync>) -> Result<Arc<dyn DeviceMemory>, HostError> {
    is_used()?;
    Ok(Arc::new(GpuMemory::open(&IpcHandle::decode(handle), keep)?))
}
