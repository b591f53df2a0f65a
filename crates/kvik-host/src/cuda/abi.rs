//! What kvik uses of the driver's interface (`cuda.h`), at the versions that its header gives plain names to.
//!
//! Without a suffix for threads, a null stream is the legacy default one.

use crate::library::{Library, LibraryError};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// `CUresult`.
pub(super) type Code = c_int;
/// `CUdeviceptr`.
pub(super) type Addr = u64;
/// `CUdevice`.
pub(super) type Ordinal = c_int;
/// `CUcontext`, `CUstream`, `CUevent`: what the driver hands out.
pub(super) type Handle = *mut c_void;

pub(super) const SUCCESS: Code = 0;
pub(super) const INVALID_VALUE: Code = 1;
pub(super) const OUT_OF_MEMORY: Code = 2;
pub(super) const NOT_INITIALIZED: Code = 3;
pub(super) const DEINITIALIZED: Code = 4;
pub(super) const STUB_LIBRARY: Code = 34;
pub(super) const DEVICE_UNAVAILABLE: Code = 46;
pub(super) const NO_DEVICE: Code = 100;
pub(super) const INVALID_CONTEXT: Code = 201;
pub(super) const ECC_UNCORRECTABLE: Code = 214;
pub(super) const NVLINK_UNCORRECTABLE: Code = 220;
pub(super) const CONTAINED: Code = 226;
pub(super) const NOT_READY: Code = 600;
pub(super) const ILLEGAL_ADDRESS: Code = 700;
pub(super) const LAUNCH_TIMEOUT: Code = 702;
pub(super) const CONTEXT_IS_DESTROYED: Code = 709;
pub(super) const ASSERT: Code = 710;
pub(super) const HARDWARE_STACK_ERROR: Code = 714;
/// The last of those that a kernel's fault gives, from the one above on.
pub(super) const LAUNCH_FAILED: Code = 719;
pub(super) const NOT_SUPPORTED: Code = 801;
pub(super) const SYSTEM_NOT_READY: Code = 802;
pub(super) const SYSTEM_DRIVER_MISMATCH: Code = 803;
pub(super) const UNKNOWN: Code = 999;

/// `CUpointer_attribute`.
pub(super) const OF_CONTEXT: c_int = 1;
pub(super) const OF_MEMORY_TYPE: c_int = 2;
pub(super) const OF_SYNC_MEMOPS: c_int = 6;
pub(super) const OF_IS_MANAGED: c_int = 8;
pub(super) const OF_ORDINAL: c_int = 9;
pub(super) const OF_IPC_CAPABLE: c_int = 10;
pub(super) const OF_RANGE_START: c_int = 11;
pub(super) const OF_RANGE_SIZE: c_int = 12;

/// `CUmemorytype`.
pub(super) const TYPE_HOST: u32 = 1;
pub(super) const TYPE_DEVICE: u32 = 2;

/// `CUdevice_attribute`.
pub(super) const MAX_PITCH: c_int = 11;
pub(super) const MULTIPROCESSORS: c_int = 16;
pub(super) const UNIFIED_ADDRESSING: c_int = 41;
/// Whether page-locked memory that was the host's before has the host's addresses for kernels, too.
pub(super) const HOST_POINTERS: c_int = 91;
pub(super) const GPU_DIRECT_RDMA: c_int = 116;
pub(super) const FLUSH_OPTIONS: c_int = 117;
pub(super) const WRITES_ORDERING: c_int = 118;
pub(super) const DMA_BUF: c_int = 124;
/// Of the flush options: the host can do it.
pub(super) const FLUSH_BY_HOST: c_int = 1;
/// Of the orderings: from this one on, the device itself sees writes in order.
pub(super) const ORDERED_FOR_OWNER: c_int = 100;

pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
pub(super) const HOST_PORTABLE: c_uint = 1;
pub(super) const IPC_LAZY_PEER_ACCESS: c_uint = 1;
pub(super) const RANGE_DMA_BUF: c_int = 1;
pub(super) const FLUSH_CURRENT_CONTEXT: c_int = 0;
pub(super) const FLUSH_TO_OWNER: c_int = 100;

/// `CUipcMemHandle`, which goes by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IpcMemHandle(pub [u8; 64]);

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Uuid(pub [u8; 16]);

/// `CUDA_MEMCPY2D`.
#[repr(C)]
pub(super) struct Copy2d {
    pub from: Side,
    pub to: Side,
    pub width: usize,
    pub height: usize,
}

/// What it says of where bytes come from, and of where they go.
#[repr(C)]
pub(super) struct Side {
    pub x: usize,
    pub y: usize,
    /// One of the types of memory, by which one of the next three counts.
    pub kind: u32,
    pub host: *mut c_void,
    pub device: Addr,
    pub array: Handle,
    pub pitch: usize,
}

const _: () = assert!(size_of::<Side>() == 56 && size_of::<Copy2d>() == 128);

/// `CUmemcpyAttributes`: the places are hints, and may be empty (`CUmemLocation`: kind and number).
#[repr(C)]
pub(super) struct CopyAttributes {
    pub order: c_int,
    pub source: [c_int; 2],
    pub target: [c_int; 2],
    pub flags: c_uint,
}

/// Sources are read in the order of the stream.
pub(super) const ORDER_OF_STREAM: c_int = 1;

/// `cuMemcpyBatchAsync` of CUDA 12.8: targets, sources, lengths and how many, attributes, from which copy on each
/// holds and how many, which copy failed, and the stream.
pub(super) type CopyBatch = unsafe extern "C" fn(
    *mut Addr,
    *mut Addr,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    *mut usize,
    Handle,
) -> Code;

/// What the driver calls when a stream has come to it: also after a failure, which is the second argument.
pub(super) type Callback = unsafe extern "C" fn(Handle, Code, *mut c_void);

macro_rules! table {
    ($($(#[$doc:meta])* $field:ident: $symbol:literal ($($arg:ty),*),)+) => {
        /// The driver's functions.
        #[derive(Clone, Copy, Debug)]
        pub(super) struct Table {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($arg),*) -> Code,)+
            /// Of drivers for CUDA 11.7 and newer.
            pub range_handle: Option<unsafe extern "C" fn(*mut c_void, Addr, usize, c_int, u64) -> Code>,
            /// Of drivers for CUDA 12.8 and newer.
            pub copy_batch: Option<CopyBatch>,
        }

        impl Table {
            pub fn load(library: &Library) -> Result<Table, LibraryError> {
                // SAFETY: the types of the fields are those that the header gives for these names.
                unsafe {
                    Ok(Table {
                        $($field: needed(library, $symbol)?,)+
                        range_handle: library.plain_function(c"cuMemGetHandleForAddressRange"),
                        copy_batch: library.plain_function(c"cuMemcpyBatchAsync"),
                    })
                }
            }
        }
    };
}

pub(super) const NEWER: &str = "install NVIDIA's driver 470 or newer";

/// A function that every driver which is new enough has.
///
/// # Safety
/// As for [`Library::plain_function`].
unsafe fn needed<F: Copy>(library: &Library, name: &CStr) -> Result<F, LibraryError> {
    // SAFETY: the caller's promise.
    unsafe { library.plain_function(name) }.ok_or_else(|| {
        LibraryError(format!(
            "{} has no {}: it is no CUDA driver, or one from before CUDA 11.4; {}",
            library.path().display(),
            name.to_string_lossy(),
            NEWER
        ))
    })
}

table! {
    init: c"cuInit" (c_uint),
    version: c"cuDriverGetVersion" (*mut c_int),
    error_name: c"cuGetErrorName" (Code, *mut *const c_char),
    error_text: c"cuGetErrorString" (Code, *mut *const c_char),
    device_count: c"cuDeviceGetCount" (*mut c_int),
    device: c"cuDeviceGet" (*mut Ordinal, c_int),
    device_name: c"cuDeviceGetName" (*mut c_char, c_int, Ordinal),
    device_uuid: c"cuDeviceGetUuid_v2" (*mut Uuid, Ordinal),
    device_memory: c"cuDeviceTotalMem_v2" (*mut usize, Ordinal),
    device_attribute: c"cuDeviceGetAttribute" (*mut c_int, c_int, Ordinal),
    device_bus: c"cuDeviceGetPCIBusId" (*mut c_char, c_int, Ordinal),
    primary_retain: c"cuDevicePrimaryCtxRetain" (*mut Handle, Ordinal),
    push: c"cuCtxPushCurrent_v2" (Handle),
    pop: c"cuCtxPopCurrent_v2" (*mut Handle),
    alloc: c"cuMemAlloc_v2" (*mut Addr, usize),
    free: c"cuMemFree_v2" (Addr),
    address_range: c"cuMemGetAddressRange_v2" (*mut Addr, *mut usize, Addr),
    host_alloc: c"cuMemHostAlloc" (*mut *mut c_void, usize, c_uint),
    host_free: c"cuMemFreeHost" (*mut c_void),
    attributes: c"cuPointerGetAttributes" (c_uint, *mut c_int, *mut *mut c_void, Addr),
    set_attribute: c"cuPointerSetAttribute" (*const c_void, c_int, Addr),
    to_device: c"cuMemcpyHtoD_v2" (Addr, *const c_void, usize),
    to_host: c"cuMemcpyDtoH_v2" (*mut c_void, Addr, usize),
    to_device_async: c"cuMemcpyHtoDAsync_v2" (Addr, *const c_void, usize, Handle),
    to_host_async: c"cuMemcpyDtoHAsync_v2" (*mut c_void, Addr, usize, Handle),
    within_async: c"cuMemcpyDtoDAsync_v2" (Addr, Addr, usize, Handle),
    across_async: c"cuMemcpyPeerAsync" (Addr, Handle, Addr, Handle, usize, Handle),
    rows_async: c"cuMemcpy2DAsync_v2" (*const Copy2d, Handle),
    stream_create: c"cuStreamCreate" (*mut Handle, c_uint),
    stream_destroy: c"cuStreamDestroy_v2" (Handle),
    stream_synchronize: c"cuStreamSynchronize" (Handle),
    stream_wait_event: c"cuStreamWaitEvent" (Handle, Handle, c_uint),
    stream_callback: c"cuStreamAddCallback" (Handle, Callback, *mut c_void, c_uint),
    event_create: c"cuEventCreate" (*mut Handle, c_uint),
    event_record: c"cuEventRecord" (Handle, Handle),
    event_query: c"cuEventQuery" (Handle),
    module_load: c"cuModuleLoadData" (*mut Handle, *const c_void),
    module_function: c"cuModuleGetFunction" (*mut Handle, Handle, *const c_char),
    launch: c"cuLaunchKernel"
        (Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void),
    ipc_export: c"cuIpcGetMemHandle" (*mut IpcMemHandle, Addr),
    ipc_open: c"cuIpcOpenMemHandle_v2" (*mut Addr, IpcMemHandle, c_uint),
    ipc_close: c"cuIpcCloseMemHandle" (Addr),
    flush_writes: c"cuFlushGPUDirectRDMAWrites" (c_int, c_int),
}
