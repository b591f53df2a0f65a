//! One GPU, and its primary context.

use super::abi::{self, Code, Handle, Table};
use super::kernel::Kernel;
use super::{Cuda, CudaError};
use crate::error::HostError;
use crate::thread::{ThreadOptions, lock, spawn_named};
use std::any::Any;
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// The interface that has copies in batches: 12.8.
const BATCHES: i32 = 12080;

/// One GPU, with its primary context. A cheap clone.
///
/// A context that kvik has asked for once stays until the process ends, and so do events, which are used again.
#[derive(Clone)]
pub struct Device(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub cuda: Cuda,
    pub ordinal: i32,
    pub context: Handle,
    name: String,
    uuid: [u8; 16],
    bus: String,
    memory: u64,
    /// The widest stride of a copy in rows.
    pub pitch: usize,
    /// Whether the driver takes many copies in one call.
    pub batches: AtomicBool,
    kernel: OnceLock<Kernel>,
    /// Events that nobody uses now.
    events: Mutex<Vec<Event>>,
    /// What copies still use whose marks nobody asks any more, each with the event behind them.
    left: Mutex<Vec<(Event, Vec<InUse>)>>,
}

/// What a copy uses, which is held and not looked at.
pub(super) type InUse = Arc<dyn Any + Send + Sync>;

/// An event of the driver's.
#[derive(Clone, Copy)]
pub(super) struct Event(pub Handle);

// SAFETY: an event is the context's, and the driver's functions on it may be called by any thread.
unsafe impl Send for Event {}
// SAFETY: the context is the process's; the driver locks what threads share, and the rest here does too.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// Makes a device's context current to this thread, as long as it lives.
pub(super) struct Current<'d> {
    device: &'d Inner,
    // What is current is a thread's own.
    _here: PhantomData<*mut ()>,
}

impl Device {
    pub(super) fn open(cuda: &Cuda, ordinal: u32) -> Result<Device, HostError> {
        cuda.0.check_process()?;
        let wanted = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let mut devices = lock(&cuda.0.devices);
        // One whose context is gone (`cudaDeviceReset`) is of no use to whoever asks now.
        devices.retain(|known| known.ordinal != wanted || known.enter().is_ok());
        if let Some(there) = devices.iter().find(|known| known.ordinal == wanted) {
            return Ok(Device(there.clone()));
        }
        if ordinal >= cuda.devices() {
            let there = cuda.devices();
            let text =
                format!("there is none: this process sees {there}, counted from 0 (CUDA_VISIBLE_DEVICES)");
            return Err(CudaError::own(format!("opening device {ordinal}"), text).into());
        }
        let inner = Arc::new(Inner::open(cuda, wanted)?);
        devices.push(inner.clone());
        drop(devices);
        // Not under the lock: the driver waits for what runs on the device.
        inner.load_kernel()?;
        Ok(Device(inner))
    }

    /// The library.
    pub fn cuda(&self) -> &Cuda {
        &self.0.cuda
    }

    /// Its number among the devices that this process sees.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal.unsigned_abs()
    }

    /// What its maker calls it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// What it is known by in every process.
    pub fn uuid(&self) -> [u8; 16] {
        self.0.uuid
    }

    /// Its address on the PCIe bus as the kernel writes it, such as `0000:3b:00.0`; the driver writes its letters large.
    pub fn bus(&self) -> &str {
        &self.0.bus
    }

    /// Bytes of memory that it has.
    pub fn memory(&self) -> u64 {
        self.0.memory
    }

    /// Whether its memory can be exported as dma-bufs.
    pub fn has_dmabuf(&self) -> bool {
        self.0.cuda.table().range_handle.is_some() && self.0.attribute(abi::DMA_BUF).unwrap_or(0) != 0
    }

    /// Whether the driver takes many copies in one call (CUDA 12.8 has it); small pages are slower without.
    pub fn has_batches(&self) -> bool {
        self.0.batches.load(Ordering::Relaxed)
    }

    /// Whether many small pages go by a kernel of kvik's, or else why not; they are slower without.
    ///
    /// # Errors
    /// The driver's reason, in words.
    pub fn kernel(&self) -> Result<(), String> {
        match self.0.kernel.get() {
            Some(kernel) => kernel.refused().map_or(Ok(()), |why| Err(why.to_owned())),
            None => Err("it is being loaded".into()),
        }
    }

    /// Whether it is the other one.
    pub fn is(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Lets go of memory whose copies have ended after their marks were dropped. Nobody needs to call it: using the
    /// device does. It says how many such marks are left.
    pub fn settle(&self) -> usize {
        self.0.settle()
    }
}

impl Cuda {
    /// What the device of this ordinal is known by in every process; without making a context on it.
    pub(super) fn uuid_of(&self, ordinal: u32) -> Result<[u8; 16], HostError> {
        self.0.check_process()?;
        let (mut device, mut uuid) = (0, abi::Uuid([0; 16]));
        // SAFETY: each call writes what it is given room for, and the driver checks the ordinal.
        let code = unsafe {
            match (self.table().device)(&mut device, ordinal as c_int) {
                abi::SUCCESS => (self.table().device_uuid)(&mut uuid, device),
                code => code,
            }
        };
        self.check(code, || format!("asking for the uuid of device {ordinal}"))?;
        Ok(uuid.0)
    }
}

impl Inner {
    fn open(cuda: &Cuda, ordinal: i32) -> Result<Inner, HostError> {
        let table = cuda.table();
        let what = |what: &str| format!("{what} device {ordinal}");
        let (mut device, mut name, mut bus) = (0, [0 as c_char; 256], [0 as c_char; 32]);
        let (mut uuid, mut memory, mut context) = (abi::Uuid([0; 16]), 0usize, ptr::null_mut());
        // SAFETY: an ordinal that there is; each call writes what it is given room for.
        unsafe {
            cuda.check((table.device)(&mut device, ordinal), || what("finding"))?;
            let code = (table.device_name)(name.as_mut_ptr(), name.len() as c_int, device);
            cuda.check(code, || what("asking for the name of"))?;
            cuda.check((table.device_uuid)(&mut uuid, device), || what("asking for the uuid of"))?;
            cuda.check((table.device_memory)(&mut memory, device), || what("asking for the memory of"))?;
            let code = (table.device_bus)(bus.as_mut_ptr(), bus.len() as c_int, device);
            cuda.check(code, || what("asking for the bus of"))?;
        }
        let mut pitch = 0;
        // SAFETY: writes a number.
        let code = unsafe { (table.device_attribute)(&mut pitch, abi::MAX_PITCH, device) };
        cuda.check(code, || what("asking for the longest rows of"))?;
        // SAFETY: a device that there is. It is never released.
        let code = unsafe { (table.primary_retain)(&mut context, device) };
        cuda.check(code, || what("making the primary context of"))?;
        Ok(Inner {
            cuda: cuda.clone(),
            ordinal: device,
            context,
            name: text(&name),
            uuid: uuid.0,
            bus: text(&bus).to_ascii_lowercase(),
            memory: memory as u64,
            pitch: usize::try_from(pitch).unwrap_or(0),
            batches: AtomicBool::new(cuda.0.version >= BATCHES && table.copy_batch.is_some()),
            kernel: OnceLock::new(),
            events: Mutex::default(),
            left: Mutex::default(),
        })
    }

    /// Loads the kernel, once. Who asks meanwhile goes on without it.
    fn load_kernel(&self) -> Result<(), HostError> {
        let _current = self.enter()?;
        let attribute = |attribute| self.attribute(attribute).unwrap_or(0);
        // SAFETY: the context is current.
        self.kernel.get_or_init(|| unsafe { Kernel::load(self.cuda.table(), self.ordinal, attribute) });
        Ok(())
    }

    /// The kernel, where it can be used.
    pub fn kernel(&self) -> Option<&Kernel> {
        self.kernel.get().filter(|kernel| kernel.refused().is_none())
    }

    /// Makes the context current. A forked child has none of it.
    pub fn enter(&self) -> Result<Current<'_>, HostError> {
        self.cuda.0.check_process()?;
        // SAFETY: a context that is retained while this lives.
        let code = unsafe { (self.cuda.table().push)(self.context) };
        self.cuda.check(code, || format!("making the context of device {} current", self.ordinal))?;
        Ok(Current { device: self, _here: PhantomData })
    }

    pub fn attribute(&self, attribute: c_int) -> Result<c_int, HostError> {
        self.cuda.0.check_process()?;
        let mut value = 0;
        // SAFETY: writes a number.
        let code = unsafe { (self.cuda.table().device_attribute)(&mut value, attribute, self.ordinal) };
        self.cuda.check(code, || format!("asking device {} for its attribute {attribute}", self.ordinal))?;
        Ok(value)
    }

    pub fn check(&self, code: Code, what: impl FnOnce() -> String) -> Result<(), CudaError> {
        self.cuda.check(code, || format!("{} (device {})", what(), self.ordinal))
    }

    /// An event that is nobody's.
    pub fn event(&self, _current: &Current<'_>) -> Result<Event, CudaError> {
        if let Some(event) = lock(&self.events).pop() {
            return Ok(event);
        }
        let mut event = ptr::null_mut();
        // SAFETY: the device's context is current; written if it returns 0, and destroyed once.
        let code = unsafe { (self.cuda.table().event_create)(&mut event, abi::EVENT_DISABLE_TIMING) };
        self.check(code, || "making an event".into())?;
        Ok(Event(event))
    }

    /// Takes an event back. Not in a forked child, where the lock may be held by a thread that is not there.
    pub fn give_back(&self, event: Event) {
        if self.cuda.0.guard.is_child() {
            return;
        }
        lock(&self.events).push(event);
    }

    /// Whether what was enqueued before the event has ended. A context that is lost runs nothing any more: that is an
    /// error that says so, after which memory is free as well; after other errors it is not known to be.
    pub fn has_ended(&self, event: Event) -> Result<bool, CudaError> {
        // SAFETY: an event of this device that is not destroyed.
        let code = unsafe { (self.cuda.table().event_query)(event.0) };
        match code {
            abi::NOT_READY => Ok(false),
            code => self.check(code, || "copying".into()).map(|()| true),
        }
    }

    /// Keeps what copies use until they have ended.
    pub fn leave(&self, event: Event, held: Vec<InUse>) {
        lock(&self.left).push((event, held));
    }

    pub fn settle(&self) -> usize {
        let current = match self.enter() {
            Err(HostError::Forked { .. }) => return 0,
            current => current,
        };
        let over = |event: &Event| match &current {
            Ok(_) => self.has_ended(*event).unwrap_or_else(|error| error.is_lost()),
            Err(HostError::Cuda(error)) => error.is_lost(),
            Err(_) => false,
        };
        let mut left = lock(&self.left);
        let (ended, in_flight): (Vec<_>, Vec<_>) = left.drain(..).partition(|(event, _)| over(event));
        *left = in_flight;
        let count = left.len();
        drop(left);
        // Not under the lock: what is let go of may drop anything.
        for (event, held) in ended {
            self.give_back(event);
            drop(held);
        }
        count
    }
}

/// Gives something back in a thread of its own: the driver waits there until the device has done all that it was given
/// by anybody, and a device that hangs never has.
pub(super) fn give_back_apart(device: &Device, give_back: impl FnOnce(&Table) + Send + 'static) {
    // A forked child has nothing to give back.
    if device.0.cuda.0.guard.is_child() {
        return;
    }
    let device = device.clone();
    let undo = move || {
        if let Ok(_current) = device.0.enter() {
            give_back(device.0.cuda.table());
        }
    };
    if let Err(error) = spawn_named("kvik-gpu-free", &ThreadOptions::default(), undo) {
        log::warn!("memory of a GPU's copies stays allocated: {error}");
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut was = ptr::null_mut();
        // SAFETY: takes off what `enter` put on, in the same thread.
        unsafe { (self.device.cuda.table().pop)(&mut was) };
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {}, {})", self.0.ordinal, self.0.name, self.0.bus)
    }
}

fn text(room: &[c_char]) -> String {
    let bytes: Vec<u8> = room.iter().map(|byte| *byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}
