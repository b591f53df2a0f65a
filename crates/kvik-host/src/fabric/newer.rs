//! What kvik uses of libfabrics that are newer than the header from which `abi.rs` is made.

use super::abi::fid_mr;
use std::ffi::{c_int, c_void};

/// The interface version that kvik asks for: `FI_VERSION(1, 14)`.
pub const API_VERSION: u32 = 1 << 16 | 14;
/// The first one that registers dma-bufs: an older library does not take it, and a provider that was asked for an
/// older one does not take them.
pub const DMABUF_VERSION: u32 = 1 << 16 | 20;

/// A flag of `fi_mr_regattr`.
pub const FI_MR_DMABUF: u64 = 1 << 40;
/// A `bool`; since libfabric 1.18.
pub const FI_OPT_CUDA_API_PERMITTED: c_int = 10;
/// A `bool`; since libfabric 1.21.
pub const FI_OPT_SHARED_MEMORY_PERMITTED: c_int = 11;

/// A range of a dma-buf (`struct fi_mr_dmabuf`).
#[repr(C)]
pub struct MrDmabuf {
    pub fd: c_int,
    /// Where in the dma-buf the range begins.
    pub offset: u64,
    pub len: usize,
    /// The address of the dma-buf's first byte: that of the range's is this and the offset.
    pub base_addr: *mut c_void,
}

/// `struct fi_mr_attr`: kvik makes it and libraries read it, as far as they know it. So it has all that 2.6 knows,
/// which only ever grew at its end, and what comes after its use here is zeros.
#[repr(C)]
pub struct MrAttr {
    /// With [`FI_MR_DMABUF`]; else it is a list of runs.
    pub dmabuf: *const MrDmabuf,
    pub iov_count: usize,
    pub access: u64,
    pub offset: u64,
    pub requested_key: u64,
    pub context: *mut c_void,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
    pub iface: u32,
    /// A union of 8 bytes, which for CUDA is the number of the device.
    pub device: MrDevice,
    /// Since 1.19, 1.22, and 2.0 (the last two).
    pub hmem_data: *mut c_void,
    pub page_size: usize,
    pub base_mr: *const fid_mr,
    pub sub_mr_cnt: usize,
}

#[repr(C)]
pub union MrDevice {
    pub reserved: u64,
    pub cuda: c_int,
}
