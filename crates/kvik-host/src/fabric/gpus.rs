//! Memory of GPUs: moved by the NIC itself, and by nothing else.
//!
//! A provider that offers such memory may copy it by CUDA where the NIC does not reach it (`fi_efa(7)`,
//! `fi_endpoint(3)`): in the thread that posts or polls, which waits in `cudaMemcpy` for whatever the GPU was given before.
//! With a GPU that stands still the NIC's thread would stand still too, and no deadline of any transfer would hold. So no
//! endpoint may do it, and a NIC whose endpoints cannot be told so knows no GPU.

use super::abi::fid_ep;
use super::device::{Object, forbid};
use super::newer::FI_OPT_CUDA_API_PERMITTED;
use super::{Fabric, FabricError};
use std::ffi::c_int;

/// Before the endpoint is enabled.
///
/// # Errors
/// The provider copies by CUDA, or makes no promise that it does not.
pub(super) fn forbid_copies(lib: &Fabric, ep: &Object<fid_ep>) -> Result<(), FabricError> {
    let code = forbid(ep, FI_OPT_CUDA_API_PERMITTED);
    if code == 0 {
        return Ok(());
    }
    let mut error = lib.error("keeping copies by CUDA out of memory of GPUs", -code);
    error.text = format!("{} ({})", meaning(-code), error.text);
    Err(error)
}

/// What each refusal says, by `fi_endpoint(3)`, and what to do.
fn meaning(number: c_int) -> &'static str {
    match number {
        libc::EINVAL => {
            "libfabric found no CUDA when it was loaded: it takes libcudart.so, the driver and a GPU that this process \
             sees"
        }
        libc::EOPNOTSUPP => {
            "the NIC's provider would copy memory of GPUs by CUDA, and wait with a GPU that stands still, since the NIC \
             does not reach it: that takes GPUDirect RDMA (NVIDIA's open kernel modules, or nvidia-peermem)"
        }
        _ => {
            "the NIC's provider does not promise to leave memory of GPUs to the NIC, and would wait in copies by CUDA \
             with a GPU that stands still"
        }
    }
}
