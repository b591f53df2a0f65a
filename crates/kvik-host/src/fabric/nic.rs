//! NICs, as a provider describes them.

use super::abi::{self, fi_info};
use super::{Fabric, FabricError, c_string, newer};
use crate::library::text;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// One NIC under one provider.
pub struct Nic {
    pub(super) plain: Description,
    /// The same NIC where it may know memory of GPUs, or why that cannot be.
    pub(super) gpus: Result<Description, String>,
}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nic({} on {}, depth {})", self.provider(), self.name(), self.depth())
    }
}

impl Nic {
    /// The provider, with the layers that it is made of: `efa`, `tcp;ofi_rxm`.
    pub fn provider(&self) -> String {
        self.plain.provider()
    }

    /// The provider's name of the device.
    pub fn name(&self) -> String {
        self.plain.name()
    }

    /// Operations that may be in flight at a time.
    pub fn depth(&self) -> usize {
        self.plain.depth()
    }

    /// Bytes of an operation, at most.
    pub fn longest(&self) -> usize {
        self.plain.longest()
    }

    pub(super) fn lib(&self) -> &Arc<Fabric> {
        &self.plain.fabric
    }
}

/// What a provider says of a NIC, and what it is opened by.
pub(super) struct Description {
    fabric: Arc<Fabric>,
    info: NonNull<fi_info>,
}

// SAFETY: the description belongs to this value alone, and is only read.
unsafe impl Send for Description {}
// SAFETY: as above.
unsafe impl Sync for Description {}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: made by `fi_dupinfo`, and freed once.
        unsafe { (self.fabric.table.freeinfo)(self.info.as_ptr()) };
    }
}

impl Description {
    pub fn as_ptr(&self) -> *mut fi_info {
        self.info.as_ptr()
    }

    fn provider(&self) -> String {
        // SAFETY: the structures of a description that `fi_getinfo` has filled are there until it is freed.
        unsafe { text((*(*self.info.as_ptr()).fabric_attr).prov_name) }
    }

    fn name(&self) -> String {
        // SAFETY: as above.
        unsafe { text((*(*self.info.as_ptr()).domain_attr).name) }
    }

    pub fn depth(&self) -> usize {
        // SAFETY: as above.
        unsafe { (*(*self.info.as_ptr()).tx_attr).size }
    }

    fn longest(&self) -> usize {
        // SAFETY: as above.
        unsafe { (*(*self.info.as_ptr()).ep_attr).max_msg_size }
    }

    fn has_internet_address(&self) -> bool {
        // SAFETY: as above.
        let format = unsafe { (*self.info.as_ptr()).addr_format };
        [abi::FI_SOCKADDR, abi::FI_SOCKADDR_IN, abi::FI_SOCKADDR_IN6].contains(&format)
    }

    /// What memory registration asks for (`FI_MR_...`).
    pub fn mr_mode(&self) -> i32 {
        // SAFETY: as above.
        unsafe { (*(*self.info.as_ptr()).domain_attr).mr_mode }
    }

    /// The own address, where it is known before an endpoint is.
    fn source(&self) -> &[u8] {
        // SAFETY: as above; an address that is there has as many bytes as is said.
        unsafe {
            let info = &*self.info.as_ptr();
            match info.src_addr.is_null() {
                true => &[],
                false => std::slice::from_raw_parts(info.src_addr.cast(), info.src_addrlen),
            }
        }
    }

    /// What tells EFA's two ways to use one device apart: `efa` and `efa-direct`.
    fn fabric(&self) -> String {
        // SAFETY: as above.
        unsafe { text((*(*self.info.as_ptr()).fabric_attr).name) }
    }

    /// Whether both are of one NIC, used in one way.
    fn is_of_same(&self, other: &Description) -> bool {
        let name = |of: &Description| (of.name(), of.fabric(), of.provider());
        name(self) == name(other) && self.source() == other.source()
    }
}

/// Which memory a NIC is asked to know.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Memories {
    /// The host's.
    Host,
    /// GPUs' too.
    Gpus,
}

/// The NICs of a provider. Only one with addresses of the internet is asked about `source`: others look among their own
/// addresses for it, and find nothing.
///
/// A provider is asked for memory of GPUs beside, and not instead: many are there for the host's only.
pub(super) fn list(
    fabric: &Arc<Fabric>,
    provider: &str,
    source: Option<&str>,
) -> Result<Vec<Nic>, FabricError> {
    let mut found = look(fabric, provider, None, Memories::Host)?;
    let source = source.filter(|_| found.iter().any(Description::has_internet_address));
    if source.is_some() {
        found = look(fabric, provider, source, Memories::Host)?;
    }
    let (mut for_gpus, why) = for_gpus(fabric, provider, source);
    let with_gpus = |plain: Description| {
        let at = for_gpus.iter().position(|one| one.is_of_same(&plain));
        let gpus = at.map(|at| for_gpus.remove(at)).ok_or_else(|| why.clone());
        Nic { plain, gpus }
    };
    Ok(found.into_iter().map(with_gpus).collect())
}

/// The NICs that may know memory of GPUs, and why the others may not.
fn for_gpus(fabric: &Arc<Fabric>, provider: &str, source: Option<&str>) -> (Vec<Description>, String) {
    let (major, minor) = fabric.version();
    let library = format!("libfabric {major}.{minor} ({})", fabric.path().display());
    if (major, minor) < (1, 20) {
        return (Vec::new(), format!("{library} knows no dma-bufs: install 1.20 or newer"));
    }
    let (found, failed) = match look(fabric, provider, source, Memories::Gpus) {
        Ok(found) => (found, String::new()),
        Err(error) => (Vec::new(), format!(" ({})", error.text)),
    };
    let why = format!(
        "the provider {provider:?} of {library} offers no memory of GPUs (FI_HMEM){failed}: it must be built for CUDA, \
         as the EFA installer's is and distributions' are not, and find libcudart.so and the driver when it is loaded; \
         `fi_info -p {provider} -t FI_EP_RDM -c FI_HMEM` shows whether it does"
    );
    (found, why)
}

fn look(
    fabric: &Arc<Fabric>,
    provider: &str,
    source: Option<&str>,
    memories: Memories,
) -> Result<Vec<Description>, FabricError> {
    let what = "looking for NICs";
    let node = source.map(|source| c_string(what, source)).transpose()?;
    let hints = hints(fabric, provider, memories)?;
    let version = if memories == Memories::Gpus { newer::DMABUF_VERSION } else { newer::API_VERSION };
    let mut found: *mut fi_info = ptr::null_mut();
    // With it the node is the own address.
    let flags = if node.is_some() { abi::FI_SOURCE } else { 0 };
    let node = node.as_ref().map_or(ptr::null(), |node| node.as_ptr());
    // SAFETY: strings and hints live during the call; what it finds is freed below.
    let code =
        unsafe { (fabric.table.getinfo)(version, node, ptr::null(), flags, hints.info.as_ptr(), &mut found) };
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
            nics.push(Description { fabric: fabric.clone(), info });
        }
        at = next;
    }
    // SAFETY: the list that `fi_getinfo` made, once.
    unsafe { (fabric.table.freeinfo)(found) };
    Ok(nics)
}

/// What kvik asks for: a reliable datagram endpoint with reads and writes, whose completions mean delivery.
fn hints(fabric: &Arc<Fabric>, provider: &str, memories: Memories) -> Result<Description, FabricError> {
    let what = "asking for a provider";
    let name = c_string(what, provider)?;
    // SAFETY: without an argument it makes an empty description.
    let empty = unsafe { (fabric.table.dupinfo)(ptr::null()) };
    let info = NonNull::new(empty).ok_or_else(|| fabric.error(what, libc::ENOMEM))?;
    let hints = Description { fabric: fabric.clone(), info };
    // SAFETY: an empty description has all its structures. The name is freed with it, by `free`.
    unsafe {
        let info = &mut *info.as_ptr();
        info.caps = abi::FI_MSG | abi::FI_RMA | abi::FI_READ | abi::FI_WRITE;
        info.caps |= abi::FI_REMOTE_READ | abi::FI_REMOTE_WRITE;
        info.mode = abi::FI_CONTEXT | abi::FI_CONTEXT2;
        (*info.ep_attr).type_ = abi::FI_EP_RDM;
        (*info.tx_attr).op_flags = abi::FI_DELIVERY_COMPLETE | abi::FI_COMPLETION;
        let domain = &mut *info.domain_attr;
        domain.threading = abi::FI_THREAD_DOMAIN;
        domain.resource_mgmt = abi::FI_RM_ENABLED;
        domain.mr_mode = abi::FI_MR_LOCAL | abi::FI_MR_VIRT_ADDR | abi::FI_MR_ALLOCATED;
        domain.mr_mode |= abi::FI_MR_PROV_KEY;
        if memories == Memories::Gpus {
            info.caps |= abi::FI_HMEM;
            domain.mr_mode |= abi::FI_MR_HMEM;
        }
        (*info.fabric_attr).prov_name = libc::strdup(name.as_ptr());
    }
    Ok(hints)
}
