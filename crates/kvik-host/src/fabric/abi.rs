//! libfabric's binary interface, as far as kvik uses it: the structures of its symbol version FABRIC_1.3.
//!
//! A newer library keeps that version beside its own, with these layouts. Fields come in the order of the public
//! headers (`rdma/fabric.h`, `fi_domain.h`, `fi_endpoint.h`, `fi_eq.h`, `fi_rma.h`, libfabric 1.17); functions that
//! kvik never calls are [`Unused`], and what follows the last one that it does call is left out, since tables are only
//! ever read in place.
//!
//! [`MrAttr`] is the other way about: kvik makes it and libraries read it, as far as they know it. So it has all that
//! 2.6 knows, which only ever grew at its end, and what comes after its use here is zeros.

use std::ffi::{c_char, c_int, c_void};

/// A place in a table that is never called.
pub type Unused = *const c_void;
/// A peer in an address vector (`fi_addr_t`).
pub type FiAddr = u64;

/// The interface version that kvik asks for: `FI_VERSION(1, 14)`.
pub const API_VERSION: u32 = 1 << 16 | 14;
/// The first one that registers dma-bufs: an older library does not take it, and a provider that was asked for an
/// older one does not take them.
pub const DMABUF_VERSION: u32 = 1 << 16 | 20;

pub const FI_MSG: u64 = 1 << 1;
pub const FI_RMA: u64 = 1 << 2;
pub const FI_READ: u64 = 1 << 8;
pub const FI_WRITE: u64 = 1 << 9;
pub const FI_RECV: u64 = 1 << 10;
pub const FI_TRANSMIT: u64 = 1 << 11;
pub const FI_REMOTE_READ: u64 = 1 << 12;
pub const FI_REMOTE_WRITE: u64 = 1 << 13;
pub const FI_COMPLETION: u64 = 1 << 24;
pub const FI_DELIVERY_COMPLETE: u64 = 1 << 28;

/// Memory of GPUs: offered only to who asks for it.
pub const FI_HMEM: u64 = 1 << 47;
pub const FI_CONTEXT: u64 = 1 << 59;
pub const FI_CONTEXT2: u64 = 1 << 52;

pub const FI_MR_LOCAL: c_int = 1 << 2;
pub const FI_MR_VIRT_ADDR: c_int = 1 << 4;
pub const FI_MR_ALLOCATED: c_int = 1 << 5;
pub const FI_MR_PROV_KEY: c_int = 1 << 6;
pub const FI_MR_HMEM: c_int = 1 << 10;

/// A flag of `fi_mr_regattr`.
pub const FI_MR_DMABUF: u64 = 1 << 40;
/// `enum fi_hmem_iface`.
pub const FI_HMEM_CUDA: u32 = 1;

/// `enum` of address formats.
pub const FI_SOCKADDR: u32 = 1;
pub const FI_SOCKADDR_IN: u32 = 2;
pub const FI_SOCKADDR_IN6: u32 = 3;

pub const FI_EP_RDM: u32 = 3;
pub const FI_THREAD_DOMAIN: u32 = 3;
pub const FI_RM_ENABLED: u32 = 2;
pub const FI_AV_TABLE: u32 = 2;
pub const FI_WAIT_NONE: u32 = 0;
pub const FI_WAIT_FD: u32 = 3;
pub const FI_CQ_FORMAT_CONTEXT: u32 = 1;
/// `enum` of `fi_control` commands.
pub const FI_GETWAIT: c_int = 5;
pub const FI_ENABLE: c_int = 6;
pub const FI_OPT_ENDPOINT: c_int = 0;
/// A `bool`; since libfabric 1.18.
pub const FI_OPT_CUDA_API_PERMITTED: c_int = 10;
/// A `bool`; since libfabric 1.21.
pub const FI_OPT_SHARED_MEMORY_PERMITTED: c_int = 11;

/// Negative returns: `errno`s, and libfabric's own from 256 on.
pub const FI_EAGAIN: isize = libc::EAGAIN as isize;
pub const FI_EAVAIL: isize = 259;

#[repr(C)]
pub struct TxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
    pub tclass: u32,
}

#[repr(C)]
pub struct EpAttr {
    pub kind: u32,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
}

#[repr(C)]
pub struct DomainAttr {
    pub domain: *mut c_void,
    pub name: *mut c_char,
    pub threading: u32,
    pub control_progress: u32,
    pub data_progress: u32,
    pub resource_mgmt: u32,
    pub av_type: u32,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
}

#[repr(C)]
pub struct FabricAttr {
    pub fabric: *mut c_void,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

#[repr(C)]
pub struct Info {
    pub next: *mut Info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut c_void,
    pub tx_attr: *mut TxAttr,
    pub rx_attr: *mut c_void,
    pub ep_attr: *mut EpAttr,
    pub domain_attr: *mut DomainAttr,
    pub fabric_attr: *mut FabricAttr,
    pub nic: *mut c_void,
}

/// What every object begins with.
#[repr(C)]
pub struct Fid {
    pub class: usize,
    pub context: *mut c_void,
    pub ops: *mut Ops,
}

#[repr(C)]
pub struct Ops {
    pub size: usize,
    pub close: unsafe extern "C" fn(*mut Fid) -> c_int,
    pub bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
    pub control: unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int,
}

#[repr(C)]
pub struct FidFabric {
    pub fid: Fid,
    pub ops: *mut OpsFabric,
}

#[repr(C)]
pub struct OpsFabric {
    pub size: usize,
    pub domain: unsafe extern "C" fn(*mut FidFabric, *mut Info, *mut *mut FidDomain, *mut c_void) -> c_int,
    pub passive_ep: Unused,
    pub eq_open: Unused,
    pub wait_open: Unused,
    pub trywait: unsafe extern "C" fn(*mut FidFabric, *mut *mut Fid, c_int) -> c_int,
}

#[repr(C)]
pub struct FidDomain {
    pub fid: Fid,
    pub ops: *mut OpsDomain,
    pub mr: *mut OpsMr,
}

#[repr(C)]
pub struct OpsDomain {
    pub size: usize,
    pub av_open: unsafe extern "C" fn(*mut FidDomain, *mut AvAttr, *mut *mut FidAv, *mut c_void) -> c_int,
    pub cq_open: unsafe extern "C" fn(*mut FidDomain, *mut CqAttr, *mut *mut FidCq, *mut c_void) -> c_int,
    pub endpoint: unsafe extern "C" fn(*mut FidDomain, *mut Info, *mut *mut FidEp, *mut c_void) -> c_int,
}

#[repr(C)]
pub struct OpsMr {
    pub size: usize,
    pub reg: unsafe extern "C" fn(
        *mut Fid,
        *const c_void,
        usize,
        u64,
        u64,
        u64,
        u64,
        *mut *mut FidMr,
        *mut c_void,
    ) -> c_int,
    pub regv: Unused,
    pub regattr: unsafe extern "C" fn(*mut Fid, *const MrAttr, u64, *mut *mut FidMr) -> c_int,
}

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
    pub base_mr: *const FidMr,
    pub sub_mr_cnt: usize,
}

#[repr(C)]
pub union MrDevice {
    pub reserved: u64,
    pub cuda: c_int,
}

#[repr(C)]
pub struct FidMr {
    pub fid: Fid,
    pub desc: *mut c_void,
    pub key: u64,
}

#[repr(C)]
pub struct AvAttr {
    pub kind: u32,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

#[repr(C)]
pub struct FidAv {
    pub fid: Fid,
    pub ops: *mut OpsAv,
}

#[repr(C)]
pub struct OpsAv {
    pub size: usize,
    pub insert:
        unsafe extern "C" fn(*mut FidAv, *const c_void, usize, *mut FiAddr, u64, *mut c_void) -> c_int,
    pub insertsvc: Unused,
    pub insertsym: Unused,
    pub remove: unsafe extern "C" fn(*mut FidAv, *mut FiAddr, usize, u64) -> c_int,
}

#[repr(C)]
pub struct CqAttr {
    pub size: usize,
    pub flags: u64,
    pub format: u32,
    pub wait_obj: u32,
    pub signaling_vector: c_int,
    pub wait_cond: u32,
    pub wait_set: *mut c_void,
}

#[repr(C)]
pub struct FidCq {
    pub fid: Fid,
    pub ops: *mut OpsCq,
}

#[repr(C)]
pub struct OpsCq {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut FidCq, *mut c_void, usize) -> isize,
    pub readfrom: Unused,
    pub readerr: unsafe extern "C" fn(*mut FidCq, *mut CqError, u64) -> isize,
    pub sread: Unused,
    pub sreadfrom: Unused,
    pub signal: Unused,
    pub strerror: unsafe extern "C" fn(*mut FidCq, c_int, *const c_void, *mut c_char, usize) -> *const c_char,
}

/// A completion in the format [`FI_CQ_FORMAT_CONTEXT`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CqEntry {
    pub context: *mut c_void,
}

#[repr(C)]
pub struct CqError {
    pub context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
}

#[repr(C)]
pub struct FidEp {
    pub fid: Fid,
    pub ops: *mut OpsEp,
    pub cm: *mut OpsCm,
    pub msg: *mut c_void,
    pub rma: *mut OpsRma,
}

#[repr(C)]
pub struct OpsEp {
    pub size: usize,
    pub cancel: Unused,
    pub getopt: Unused,
    /// Object, level, option, value, bytes of the value.
    pub setopt: unsafe extern "C" fn(*mut Fid, c_int, c_int, *const c_void, usize) -> c_int,
}

#[repr(C)]
pub struct OpsCm {
    pub size: usize,
    pub setname: Unused,
    pub getname: unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int,
}

#[repr(C)]
pub struct RmaIov {
    pub addr: u64,
    pub len: usize,
    pub key: u64,
}

#[repr(C)]
pub struct MsgRma {
    pub iov: *const libc::iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: FiAddr,
    pub rma_iov: *const RmaIov,
    pub rma_iov_count: usize,
    pub context: *mut c_void,
    pub data: u64,
}

#[repr(C)]
pub struct OpsRma {
    pub size: usize,
    pub read: Unused,
    pub readv: Unused,
    pub readmsg: unsafe extern "C" fn(*mut FidEp, *const MsgRma, u64) -> isize,
    pub write: Unused,
    pub writev: Unused,
    pub writemsg: unsafe extern "C" fn(*mut FidEp, *const MsgRma, u64) -> isize,
}
