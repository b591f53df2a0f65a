//! Memory of GPUs, by the CUDA driver's library, loaded at run time.
//!
//! * [`Cuda`]: the library; [`Cuda::locate`] says what an address is ([`Place`]);
//! * [`Device`]: one GPU, with its primary context, which is the one that PyTorch and all of the CUDA runtime use;
//! * [`GpuMemory`]: memory of a device that somebody registered, or a peer's ([`GpuMemory::open`]);
//! * [`Pinned`]: page-locked memory of the host, which is a [`Memory`](crate::Memory) too: what GPUs copy from and to;
//! * [`Stream`]: copies that are in flight; [`Mark`]: a place in it, to ask and to wait for;
//! * [`DmaBuf`](crate::device::DmaBuf) and [`IpcHandle`]: the same memory for a NIC, and for another process of this
//!   host.
//!
//! Transports see all of it as a [`Device`](crate::device::Device), whatever kind it is.
//!
//! A transfer's thread has a stream, and nothing of it blocks:
//!
//! ```no_run
//! # use kvik_host::{cuda::*, event::*, HostError};
//! # use std::{sync::Arc, time::Duration};
//! # fn f(addr: usize, len: usize, pages: &[(usize, usize)], tensor: Box<u8>) -> Result<(), HostError> {
//! // SAFETY: `tensor` keeps the memory allocated.
//! let memory = Arc::new(unsafe { GpuMemory::new(addr, len, tensor) }?);
//! let staging = Arc::new(Pinned::new(memory.device(), 1 << 20)?);
//! let (epoll, flag) = (Epoll::new()?, Arc::new(EventFd::new()?));
//! epoll.add(&*flag, 1, Interest::READ)?;
//!
//! let mut stream = Stream::new(memory.device())?;
//! stream.gather(&staging, 0, &memory, pages)?;   // enqueued, not done
//! let mut mark = stream.mark()?;
//! stream.tell(&flag)?;                            // the flag goes up once all before it is done
//! epoll.wait(&mut Events::new(1), Duration::from_secs(1))?;
//! flag.drain()?;
//! if mark.is_done()? {
//!     staging.memory().send_run(0, 4096)?;        // only now the bytes count
//! }
//! # Ok(()) }
//! ```
//!
//! **No byte of a device is touched by the CPU.** [`GpuMemory`] has an address and no slice, no run and no sum; its
//! bytes come by copies.
//!
//! **Order.** A stream of kvik's waits for nobody's kernels: it is no part of the default stream's order
//! (`CU_STREAM_NON_BLOCKING`). Who hands memory over for reading has either waited for the kernels that write it
//! (`torch.cuda.synchronize()`, or an event of theirs), or says behind what the copies come:
//! [`Stream::after_default`], [`Stream::after_stream`]. The other way about there is nothing to do: what is launched
//! after a mark is done sees the bytes. [`GpuMemory::copy_in`] and [`GpuMemory::copy_out`] are in the default stream's
//! order. Within a stream, what one call enqueues comes behind what the calls before it did;
//! the pieces of one call are in no order.
//!
//! **Small pages.** The driver's copy engine takes half a microsecond to four for each piece, however short. So the
//! pieces of a call that lie at equal distances go to it as one copy of rows, and of the others many small ones go to a
//! kernel of kvik's, all in one launch; a few, and long ones, to the copy engine in batches, where the driver takes
//! those (CUDA 12.8). One call with many pieces is much faster than many calls. `kernel.rs` has what decides, and the
//! measurements that it is from; [`Device::kernel`] says whether there is a kernel, and [`Stream::copy_by`] has it one
//! way, to compare. The kernel takes multiprocessors while it copies, and waits for the program's kernels where those
//! fill the device.
//!
//! **What is in flight stays where it is.** Each copy holds its memory until the mark behind it was seen to be done;
//! a mark or a stream that is dropped earlier leaves that to the device, which lets go of it once it is so. Nothing is
//! waited for, and nothing is freed under a copy.
//!
//! **Where the driver itself waits.** [`Cuda::device`], and what else uses a device first, loads the kernel, for which
//! the driver waits until all that the device was given is done, and so may others' calls that come meanwhile. Freeing
//! memory of a device and page-locked memory, and closing a peer's, may wait for all that the device was given by
//! anybody; what transfers use is given back in a thread of its own. And a stream takes about a thousand copies that
//! have not begun: who enqueues more on a device that hangs waits with it, so a window is kept.
//!
//! **Threads.** All of this may be used from any thread: a context is made current for each call, and what was current
//! before is so again afterwards. A [`Stream`] and a [`Mark`] belong to whoever holds them.
//!
//! **Forks.** The driver does not survive a fork. In a child everything here fails with [`HostError::Forked`], and
//! dropping does nothing.
//!
//! **A device that fails** (an illegal address, an ECC error) takes its context along: each call names that from then
//! on ([`CudaError::is_lost`]), marks included, [`Stream::tell`] tells, and nothing hangs. A stream that only never
//! gets anywhere (a kernel before it that does not end) is for [`Mark::wait`]'s bound, and for the caller's own
//! deadline.

mod abi;
mod batch;
mod device;
mod error;
mod kernel;
mod lists;
mod memory;
mod piece;
mod pinned;
mod place;
mod rows;
mod seam;
mod share;
mod small;
mod stream;

pub use device::Device;
pub use error::CudaError;
pub use memory::GpuMemory;
pub use pinned::Pinned;
pub use place::{Kind, Place};
pub use share::IpcHandle;
pub use small::Way;
pub use stream::{Mark, Stream};

use crate::error::HostError;
use crate::fork::ForkGuard;
use crate::library::{self, Library, LibraryError, Wanted};
use abi::{Code, NEWER, Table};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

/// Where the driver's library is found.
pub const LIBCUDA: Wanted = Wanted {
    soname: "libcuda.so.1",
    folders: &[],
    option: "LD_PRELOAD",
    packages: "it comes with NVIDIA's driver; Debian: libcuda1; Ubuntu: libnvidia-compute-VERSION; \
               Fedora: xorg-x11-drv-nvidia-cuda-libs",
    container: "run it with nvidia-container-toolkit and --gpus all, and NVIDIA_DRIVER_CAPABILITIES=compute,utility, \
                which mounts the host's",
};

/// The oldest interface that kvik takes: 11.4, of the driver 470.
const OLDEST: i32 = 11040;

/// The one that this process has: the driver is one for all.
static CUDA: OnceLock<Cuda> = OnceLock::new();

/// The CUDA driver's library. A cheap clone.
#[derive(Clone)]
pub struct Cuda(Arc<Inner>);

struct Inner {
    library: Library,
    table: Table,
    version: i32,
    count: i32,
    guard: ForkGuard,
    devices: Mutex<Vec<Arc<device::Inner>>>,
}

impl Cuda {
    /// Loads the library, or takes the copy that the process has, and initialises CUDA.
    ///
    /// Who forks afterwards has no CUDA in the child, whatever library asks for it there.
    ///
    /// # Errors
    /// [`HostError::Library`]: it is nowhere, or too old; the text says where it was looked for, which package has it
    /// and what a container needs. [`HostError::Cuda`]: there is no GPU, or the driver does not work.
    /// [`HostError::Forked`].
    pub fn get() -> Result<Cuda, HostError> {
        Cuda::load(None)
    }

    /// As [`Cuda::get`], from this file if the process has no copy yet.
    ///
    /// # Errors
    /// As for [`Cuda::get`].
    pub fn load(file: Option<&Path>) -> Result<Cuda, HostError> {
        if let Some(cuda) = CUDA.get() {
            cuda.0.check_process()?;
            return Ok(cuda.clone());
        }
        let cuda = Cuda::begin(Library::open(LIBCUDA, file)?)?;
        // Two threads at once get the same library twice, and keep one of the two.
        Ok(CUDA.get_or_init(|| cuda).clone())
    }

    /// The library, if this process has initialised CUDA by it: by kvik or by anybody else. Loads and initialises
    /// nothing. Without it no address of this process can be a device's.
    pub fn loaded() -> Option<Cuda> {
        if let Some(cuda) = CUDA.get() {
            return cuda.0.check_process().is_ok().then(|| cuda.clone());
        }
        library::has(LIBCUDA.soname).then_some(())?;
        let library = Library::open(LIBCUDA, None).ok()?;
        let table = Table::load(&library).ok()?;
        let mut count = 0;
        // SAFETY: writes a number. It fails where nobody has initialised CUDA, and initialises nothing itself.
        let code = unsafe { (table.device_count)(&mut count) };
        if code != abi::SUCCESS {
            return None;
        }
        Cuda::load(None).ok()
    }

    /// What CUDA knows of an address: none where it is ordinary memory of the host, or no memory at all.
    ///
    /// # Errors
    /// The driver's, where it knows of the address and cannot tell.
    pub fn locate(addr: usize) -> Result<Option<Place>, HostError> {
        match Cuda::loaded() {
            Some(cuda) => cuda.place_of(addr),
            None => Ok(None),
        }
    }

    fn begin(library: Library) -> Result<Cuda, HostError> {
        let table = Table::load(&library)?;
        let guard = ForkGuard::new()?;
        let mut version = 0;
        // SAFETY: writes a number, also before anything is initialised.
        let code = unsafe { (table.version)(&mut version) };
        if code != abi::SUCCESS {
            return Err(CudaError::driver(&table, "asking for the driver's version", code).into());
        }
        if version < OLDEST {
            return Err(LibraryError(format!(
                "{} is of a driver for CUDA {}; kvik takes {} or newer: {NEWER}",
                library.path().display(),
                words(version),
                words(OLDEST)
            ))
            .into());
        }
        // SAFETY: no flags; it may be called any number of times.
        let code = unsafe { (table.init)(0) };
        if code != abi::SUCCESS {
            let what = format!("initialising {}", library.path().display());
            return Err(CudaError::driver(&table, what, code).into());
        }
        let mut count = 0;
        // SAFETY: writes a number.
        let code = unsafe { (table.device_count)(&mut count) };
        if code != abi::SUCCESS || count < 1 {
            let code = if code == abi::SUCCESS { abi::NO_DEVICE } else { code };
            return Err(CudaError::driver(&table, "counting the GPUs", code).into());
        }
        Ok(Cuda(Arc::new(Inner { library, table, version, count, guard, devices: Mutex::default() })))
    }

    /// The file that it came from.
    pub fn path(&self) -> &Path {
        self.0.library.path()
    }

    /// Major and minor version of the interface that the driver has.
    pub fn version(&self) -> (u32, u32) {
        let version = self.0.version.unsigned_abs();
        (version / 1000, version % 1000 / 10)
    }

    /// How many devices this process sees; their ordinals count from 0.
    pub fn devices(&self) -> u32 {
        self.0.count.unsigned_abs()
    }

    /// A device by its ordinal, with its primary context, which is made if nobody has.
    ///
    /// # Errors
    /// There is no such device, or no context can be made on it. [`HostError::Forked`].
    pub fn device(&self, ordinal: u32) -> Result<Device, HostError> {
        Device::open(self, ordinal)
    }

    fn table(&self) -> &Table {
        &self.0.table
    }

    fn check(&self, code: Code, what: impl FnOnce() -> String) -> Result<(), CudaError> {
        if code == abi::SUCCESS {
            return Ok(());
        }
        Err(CudaError::driver(&self.0.table, what(), code))
    }
}

impl Inner {
    fn check_process(&self) -> Result<(), HostError> {
        if self.guard.is_child() {
            return Err(HostError::Forked { what: "CUDA" });
        }
        Ok(())
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({}, {})", words(self.0.version), self.path().display())
    }
}

fn words(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_said_as_people_say_them() {
        assert_eq!((words(11040), words(12080), words(13000)), ("11.4".into(), "12.8".into(), "13.0".into()));
    }
}
