//! libibverbs' binary interface, as far as kvik uses it: the structures of its symbol version IBVERBS_1.1.
//!
//! Fields come in the order of the public header (`infiniband/verbs.h` of rdma-core 44), and have kept it
//! since that version of the symbols was made. Control calls are symbols; posting and polling go through the
//! table in the context, as the header's own inline functions do. Of structures that the library makes, what
//! follows the last field that kvik reads is left out, since they are only ever read in place.

use std::ffi::{c_char, c_int, c_void};

/// A place in a table that is never called.
pub type Unused = *const c_void;

pub const TRANSPORT_IB: c_int = 0;
pub const LINK_LAYER_ETHERNET: u8 = 2;

pub const GID_TYPE_IB: u32 = 0;
pub const GID_TYPE_ROCE_V1: u32 = 1;
pub const GID_TYPE_ROCE_V2: u32 = 2;

pub const ACCESS_LOCAL_WRITE: c_int = 1;
pub const ACCESS_REMOTE_WRITE: c_int = 1 << 1;
pub const ACCESS_REMOTE_READ: c_int = 1 << 2;
pub const ACCESS_ON_DEMAND: c_int = 1 << 6;

pub const QPT_RC: c_int = 2;
pub const QPS_INIT: c_int = 1;
pub const QPS_RTR: c_int = 2;
pub const QPS_RTS: c_int = 3;
pub const QPS_ERR: c_int = 6;

pub const QP_STATE: c_int = 1;
pub const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub const QP_PKEY_INDEX: c_int = 1 << 4;
pub const QP_PORT: c_int = 1 << 5;
pub const QP_AV: c_int = 1 << 7;
pub const QP_PATH_MTU: c_int = 1 << 8;
pub const QP_TIMEOUT: c_int = 1 << 9;
pub const QP_RETRY_CNT: c_int = 1 << 10;
pub const QP_RNR_RETRY: c_int = 1 << 11;
pub const QP_RQ_PSN: c_int = 1 << 12;
pub const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub const QP_SQ_PSN: c_int = 1 << 16;
pub const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub const QP_DEST_QPN: c_int = 1 << 20;

pub const WR_RDMA_WRITE: c_int = 0;
pub const WR_RDMA_WRITE_WITH_IMM: c_int = 1;
pub const WR_RDMA_READ: c_int = 4;
pub const SEND_SIGNALED: u32 = 1 << 1;

pub const WC_SUCCESS: c_int = 0;
pub const WC_WR_FLUSH_ERR: c_int = 5;
pub const WC_RECV_RDMA_WITH_IMM: c_int = 129;

pub const EVENT_CQ_ERR: c_int = 0;
pub const EVENT_QP_FATAL: c_int = 1;
pub const EVENT_QP_REQ_ERR: c_int = 2;
pub const EVENT_QP_ACCESS_ERR: c_int = 3;
pub const EVENT_DEVICE_FATAL: c_int = 8;
pub const EVENT_PORT_ACTIVE: c_int = 9;
pub const EVENT_PORT_ERR: c_int = 10;
pub const EVENT_LID_CHANGE: c_int = 11;
pub const EVENT_PKEY_CHANGE: c_int = 12;
pub const EVENT_SM_CHANGE: c_int = 13;
pub const EVENT_CLIENT_REREGISTER: c_int = 17;
pub const EVENT_GID_CHANGE: c_int = 18;

#[repr(C)]
pub struct Device {
    pub ops: [Unused; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
}

#[repr(C)]
pub struct Context {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
}

#[repr(C)]
pub struct ContextOps {
    pub before_poll: [Unused; 11],
    pub poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int,
    pub req_notify_cq: unsafe extern "C" fn(*mut Cq, c_int) -> c_int,
    pub before_post: [Unused; 12],
    pub post_send: unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int,
    pub post_recv: unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int,
    pub after_post: [Unused; 5],
}

#[repr(C)]
pub struct DeviceAttr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: u32,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub after_reads: [c_int; 16],
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// The whole structure; the symbol `ibv_query_port` fills it up to `port_cap_flags2`.
#[repr(C)]
pub struct PortAttr {
    pub state: c_int,
    pub max_mtu: c_int,
    pub active_mtu: c_int,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub struct Gid(pub [u8; 16]);

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct GidEntry {
    pub gid: Gid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

/// A protection domain, of which nothing is read.
#[repr(C)]
pub struct Pd(c_void);

#[repr(C)]
pub struct CompChannel {
    pub context: *mut Context,
    pub fd: c_int,
}

#[repr(C)]
pub struct Cq {
    pub context: *mut Context,
    pub channel: *mut CompChannel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
}

#[repr(C)]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
pub struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut c_void,
    pub pd: *mut Pd,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub handle: u32,
    pub qp_num: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Wc {
    pub wr_id: u64,
    pub status: c_int,
    pub opcode: c_int,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// In network byte order.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: u32,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub cap: QpCap,
    pub qp_type: c_int,
    pub sq_sig_all: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QpAttr {
    pub qp_state: c_int,
    pub cur_qp_state: c_int,
    pub path_mtu: c_int,
    pub path_mig_state: c_int,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: u32,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// A request; of the unions, only the remote address and key of reads and writes have names.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: c_int,
    pub send_flags: u32,
    /// In network byte order.
    pub imm_data: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub others: [u64; 9],
}

#[repr(C)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

#[repr(C)]
pub struct AsyncEvent {
    /// A pointer to the queue pair or completion queue, or the number of the port.
    pub element: usize,
    pub event_type: c_int,
}

#[cfg(all(test, target_pointer_width = "64"))]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// What a C program printed that was compiled against the header of rdma-core 44 for x86-64.
    #[test]
    fn structures_have_the_sizes_and_offsets_of_the_header() {
        assert_eq!(offset_of!(Device, node_type), 16);
        assert_eq!(offset_of!(Device, transport_type), 20);
        assert_eq!(size_of::<ContextOps>(), 256);
        assert_eq!(offset_of!(ContextOps, poll_cq), 88);
        assert_eq!(offset_of!(ContextOps, req_notify_cq), 96);
        assert_eq!(offset_of!(ContextOps, post_send), 200);
        assert_eq!(offset_of!(ContextOps, post_recv), 208);
        assert_eq!(offset_of!(Context, ops), 8);
        assert_eq!(offset_of!(Context, cmd_fd), 264);
        assert_eq!(offset_of!(Context, async_fd), 268);
        assert_eq!(offset_of!(CompChannel, fd), 8);
        assert_eq!(offset_of!(Cq, cqe), 28);
        assert_eq!(offset_of!(Mr, lkey), 36);
        assert_eq!(offset_of!(Mr, rkey), 40);
        assert_eq!(offset_of!(Qp, qp_num), 52);
        assert_eq!((size_of::<AsyncEvent>(), offset_of!(AsyncEvent, event_type)), (16, 8));
    }

    #[test]
    fn attributes_have_the_sizes_and_offsets_of_the_header() {
        assert_eq!(size_of::<DeviceAttr>(), 232);
        assert_eq!(offset_of!(DeviceAttr, max_qp_wr), 112);
        assert_eq!(offset_of!(DeviceAttr, max_sge), 120);
        assert_eq!(offset_of!(DeviceAttr, max_sge_rd), 124);
        assert_eq!(offset_of!(DeviceAttr, max_cqe), 132);
        assert_eq!(offset_of!(DeviceAttr, max_qp_rd_atom), 144);
        assert_eq!(offset_of!(DeviceAttr, max_qp_init_rd_atom), 156);
        assert_eq!(offset_of!(DeviceAttr, phys_port_cnt), 227);
        assert_eq!(size_of::<PortAttr>(), 52);
        assert_eq!(offset_of!(PortAttr, max_msg_sz), 20);
        assert_eq!(offset_of!(PortAttr, lid), 34);
        assert_eq!(offset_of!(PortAttr, active_width), 43);
        assert_eq!(offset_of!(PortAttr, link_layer), 46);
        assert_eq!(offset_of!(PortAttr, port_cap_flags2), 48);
        assert_eq!((size_of::<GidEntry>(), offset_of!(GidEntry, gid_type)), (32, 24));
        assert_eq!(offset_of!(GidEntry, ndev_ifindex), 28);
        assert_eq!((size_of::<GlobalRoute>(), offset_of!(GlobalRoute, sgid_index)), (24, 20));
        assert_eq!((size_of::<AhAttr>(), offset_of!(AhAttr, dlid)), (32, 24));
        assert_eq!(offset_of!(AhAttr, is_global), 29);
        assert_eq!((size_of::<QpCap>(), size_of::<QpAttr>()), (20, 144));
        assert_eq!(offset_of!(QpAttr, qp_access_flags), 32);
        assert_eq!(offset_of!(QpAttr, ah_attr), 56);
        assert_eq!(offset_of!(QpAttr, max_rd_atomic), 126);
        assert_eq!(offset_of!(QpAttr, rnr_retry), 132);
        assert_eq!(offset_of!(QpAttr, rate_limit), 136);
    }

    #[test]
    fn requests_have_the_sizes_and_offsets_of_the_header() {
        assert_eq!((size_of::<QpInitAttr>(), offset_of!(QpInitAttr, cap)), (64, 32));
        assert_eq!(offset_of!(QpInitAttr, qp_type), 52);
        assert_eq!((size_of::<Sge>(), size_of::<RecvWr>(), size_of::<SendWr>()), (16, 32, 128));
        assert_eq!(offset_of!(SendWr, num_sge), 24);
        assert_eq!(offset_of!(SendWr, send_flags), 32);
        assert_eq!(offset_of!(SendWr, imm_data), 36);
        assert_eq!(offset_of!(SendWr, remote_addr), 40);
        assert_eq!(offset_of!(SendWr, rkey), 48);
        assert_eq!((size_of::<Wc>(), offset_of!(Wc, vendor_err)), (48, 16));
        assert_eq!(offset_of!(Wc, imm_data), 24);
        assert_eq!(offset_of!(Wc, wc_flags), 36);
    }
}
