//! NICs, as a provider describes them.

use super::abi::{self, Info};
use super::{Fabric, FabricError, c_string};
use std::ffi::{CStr, c_char};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// `FI_SOURCE`: the node that is given to `fi_getinfo` is the own address.
const FI_SOURCE: u64 = 1 << 57;

/// One NIC under one provider.
pub struct Nic {
    pub(super) fabric: Arc<Fabric>,
    pub(super) info: NonNull<Info>,
}

// SAFETY: the description belongs to this value alone, and is only read.
unsafe impl Send for Nic {}
// SAFETY: as above.
unsafe impl Sync for Nic {}

impl Drop for Nic {
    fn drop(&mut self) {
        // SAFETY: made by `fi_dupinfo`, and freed once.
        unsafe { (self.fabric.table.freeinfo)(self.info.as_ptr()) };
    }
}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nic({} on {}, depth {})", self.provider(), self.name(), self.depth())
    }
}

impl Nic {
    /// The provider, with the layers that it is made of: `efa`, `tcp;ofi_rxm`.
    pub fn provider(&self) -> String {
        // SAFETY: the structures of a description that `fi_getinfo` has filled are there until it is freed.
        unsafe { text((*(*self.info.as_ptr()).fabric_attr).prov_name) }
    }

    /// The provider's name of the device.
    pub fn name(&self) -> String {
        // SAFETY: as above.
        unsafe { text((*(*self.info.as_ptr()).domain_attr).name) }
    }

    /// Operations that may be under way at a time.
    pub fn depth(&self) -> usize {
        // SAFETY: as above.
        unsafe { (*(*self.info.as_ptr()).tx_attr).size }
    }

    /// Bytes of an operation, at most.
    pub fn longest(&self) -> usize {
        // SAFETY: as above.
        unsafe { (*(*self.info.as_ptr()).ep_attr).max_msg_size }
    }

    fn has_internet_address(&self) -> bool {
        // SAFETY: as above.
        let format = unsafe { (*self.info.as_ptr()).addr_format };
        [abi::FI_SOCKADDR, abi::FI_SOCKADDR_IN, abi::FI_SOCKADDR_IN6].contains(&format)
    }

    /// What memory registration asks for (`FI_MR_...`).
    pub(super) fn mr_mode(&self) -> i32 {
        // SAFETY: as above.
        unsafe { (*(*self.info.as_ptr()).domain_attr).mr_mode }
    }
}

/// # Safety
/// Null, or a C string that lives.
unsafe fn text(at: *const c_char) -> String {
    match at.is_null() {
        true => String::new(),
        // SAFETY: the caller's promise.
        false => unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned(),
    }
}

/// The NICs of a provider. Only one with addresses of the internet is asked about `source`: others look among their own
/// addresses for it, and find nothing.
pub(super) fn list(
    fabric: &Arc<Fabric>,
    provider: &str,
    source: Option<&str>,
) -> Result<Vec<Nic>, FabricError> {
    let all = look(fabric, provider, None)?;
    match source {
        Some(_) if all.iter().any(Nic::has_internet_address) => look(fabric, provider, source),
        _ => Ok(all),
    }
}

fn look(fabric: &Arc<Fabric>, provider: &str, source: Option<&str>) -> Result<Vec<Nic>, FabricError> {
    let what = "looking for NICs";
    let node = source.map(|source| c_string(what, source)).transpose()?;
    let hints = hints(fabric, provider)?;
    let mut found: *mut Info = ptr::null_mut();
    let flags = if node.is_some() { FI_SOURCE } else { 0 };
    let node = node.as_ref().map_or(ptr::null(), |node| node.as_ptr());
    // SAFETY: strings and hints live during the call; what it finds is freed below.
    let code = unsafe {
        (fabric.table.getinfo)(abi::API_VERSION, node, ptr::null(), flags, hints.info.as_ptr(), &mut found)
    };
    if code == -libc::ENODATA {
        return Ok(Vec::new());
    }
    fabric.check(what, code as isize)?;
    let mut nics = Vec::new();
    let mut at = found;
    while !at.is_null() {
        // SAFETY: an element of the list that `fi_getinfo` made; a copy of one has no neighbours.
        let (copy, next) = unsafe { ((fabric.table.dupinfo)(at), (*at).next) };
        if let Some(info) = NonNull::new(copy) {
            nics.push(Nic { fabric: fabric.clone(), info });
        }
        at = next;
    }
    // SAFETY: the list that `fi_getinfo` made, once.
    unsafe { (fabric.table.freeinfo)(found) };
    Ok(nics)
}

/// What kvik asks for: a reliable datagram endpoint with reads and writes, whose completions mean delivery.
fn hints(fabric: &Arc<Fabric>, provider: &str) -> Result<Nic, FabricError> {
    let what = "asking for a provider";
    let name = c_string(what, provider)?;
    // SAFETY: without an argument it makes an empty description.
    let empty = unsafe { (fabric.table.dupinfo)(ptr::null()) };
    let info = NonNull::new(empty).ok_or_else(|| fabric.error(what, libc::ENOMEM))?;
    let hints = Nic { fabric: fabric.clone(), info };
    // SAFETY: an empty description has all its structures. The name is freed with it, by `free`.
    unsafe {
        let info = &mut *info.as_ptr();
        info.caps = abi::FI_MSG | abi::FI_RMA | abi::FI_READ | abi::FI_WRITE;
        info.caps |= abi::FI_REMOTE_READ | abi::FI_REMOTE_WRITE;
        info.mode = abi::FI_CONTEXT | abi::FI_CONTEXT2;
        (*info.ep_attr).kind = abi::FI_EP_RDM;
        (*info.tx_attr).op_flags = abi::FI_DELIVERY_COMPLETE | abi::FI_COMPLETION;
        let domain = &mut *info.domain_attr;
        domain.threading = abi::FI_THREAD_DOMAIN;
        domain.resource_mgmt = abi::FI_RM_ENABLED;
        domain.mr_mode = abi::FI_MR_LOCAL | abi::FI_MR_VIRT_ADDR | abi::FI_MR_ALLOCATED;
        domain.mr_mode |= abi::FI_MR_PROV_KEY;
        (*info.fabric_attr).prov_name = libc::strdup(name.as_ptr());
    }
    Ok(hints)
}
