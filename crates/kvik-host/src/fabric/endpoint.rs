//! An open NIC: registered memory, peers, and the operations that are under way.

use super::abi::{self, CqEntry, CqError, Fid, FidAv, FidCq, FidDomain, FidEp, FidFabric, FidMr};
use super::{Fabric, FabricError, Nic};
use crate::{HostError, Memory};
use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_void};
use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Peers that an address vector is made for; it grows beyond.
const PEERS: usize = 64;
/// Completions that are taken in one call.
const BATCH: usize = 64;
/// Bytes of the longest address of any provider (EFA 32, sockets 28, shm's name 64 and more).
const LONGEST_ADDRESS: usize = 512;

/// What a provider may use for itself while an operation is under way (`struct fi_context2`).
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Context([u64; 8]);

/// A peer's endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot(u64);

/// Registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registered {
    /// To name it here.
    pub id: u64,
    /// To name it in a peer's operations.
    pub key: u64,
    /// What a peer takes for the address of the first byte.
    pub base: u64,
}

/// The direction of an operation, seen from who posts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RmaOp {
    /// Remote bytes come here.
    Read,
    /// Own bytes go there.
    Write,
}

/// One run of bytes to move.
#[derive(Debug, Clone, Copy)]
pub struct Rma {
    /// The direction.
    pub op: RmaOp,
    /// The own memory, by [`Registered::id`].
    pub memory: u64,
    /// The first byte in it.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
    /// The peer.
    pub peer: Slot,
    /// Where the bytes lie there: the peer's [`Registered::base`] and an offset.
    pub remote: u64,
    /// The peer's [`Registered::key`].
    pub key: u64,
    /// Given back with the completion.
    pub token: u64,
}

/// What became of a post.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posted {
    /// It is under way.
    Yes,
    /// There is no room: take completions first.
    Full,
}

/// An operation has ended: its memory is not touched any more by it.
#[derive(Debug)]
pub struct Completion {
    /// Of the operation.
    pub token: u64,
    /// Whether the bytes were delivered.
    pub result: Result<(), FabricError>,
}

struct Region {
    mr: NonNull<FidMr>,
    /// Kept while the NIC knows it.
    memory: Arc<Memory>,
    /// Operations under way on it.
    posted: usize,
}

struct Operation {
    token: u64,
    memory: u64,
}

/// See the module's text.
pub struct Endpoint {
    // In the order in which they are closed: with the endpoint, what was posted and has not ended stops.
    ep: Object<FidEp>,
    regions: HashMap<u64, Region>,
    cq: Object<FidCq>,
    av: Object<FidAv>,
    domain: Object<FidDomain>,
    fabric: Object<FidFabric>,
    nic: Arc<Nic>,
    next: u64,
    /// At stable addresses: providers keep pointers to them.
    contexts: Box<[Context]>,
    operations: Vec<Option<Operation>>,
    free: Vec<u32>,
    waits: bool,
    /// libfabric is told that one thread at a time uses it.
    _one_thread: PhantomData<std::cell::Cell<()>>,
}

// SAFETY: libfabric's objects are bound to no thread; `FI_THREAD_DOMAIN` asks that calls do not overlap, which the
// methods' `&mut self` and the missing `Sync` see to.
unsafe impl Send for Endpoint {}

/// An object of libfabric, closed with the value.
struct Object<T>(NonNull<T>);

impl<T> Object<T> {
    /// # Safety
    /// `T` begins with a [`Fid`], as every object does, and the value is dropped before what the object needs.
    unsafe fn new(made: *mut T) -> Option<Object<T>> {
        NonNull::new(made).map(Object)
    }

    fn fid(&self) -> *mut Fid {
        self.0.as_ptr().cast()
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: by the rule of `new` an open object, closed once.
        let code = unsafe { ((*(*self.fid()).ops).close)(self.fid()) };
        debug_assert_eq!(code, 0, "something that needs this object was not closed before it");
    }
}

impl Endpoint {
    /// Opens the NIC. `depth` bounds the operations under way, beside the provider's own bound.
    ///
    /// # Errors
    /// libfabric's own, by the step that failed.
    pub fn open(nic: &Arc<Nic>, depth: usize) -> Result<Endpoint, FabricError> {
        let lib = &nic.fabric;
        let info = nic.info.as_ptr();
        let depth = depth.min(nic.depth()).clamp(1, 1 << 16);
        // SAFETY: `info` is a whole description, which lives as long as `nic`. Each call writes an object if it
        // returns 0, and objects are kept in the order in which they must be closed.
        unsafe {
            let fabric = make(lib, "opening the fabric", |out| {
                (lib.table.fabric)((*info).fabric_attr, out, ptr::null_mut())
            })?;
            let domain: Object<FidDomain> = make(lib, "opening the device", |out| {
                let fabric: &Object<FidFabric> = &fabric;
                ((*(*fabric.0.as_ptr()).ops).domain)(fabric.0.as_ptr(), info, out, ptr::null_mut())
            })?;
            let d = domain.0.as_ptr();
            let ops = (*d).ops;
            let av: Object<FidAv> = make(lib, "making an address vector", |out| {
                let mut attr: abi::AvAttr = std::mem::zeroed();
                (attr.kind, attr.count) = (abi::FI_AV_TABLE, PEERS);
                ((*ops).av_open)(d, &mut attr, out, ptr::null_mut())
            })?;
            let (cq, waits) = completion_queue(lib, d, depth)?;
            let ep: Object<FidEp> =
                make(lib, "making an endpoint", |out| ((*ops).endpoint)(d, info, out, ptr::null_mut()))?;
            let fid = ep.fid();
            let bind = (*(*fid).ops).bind;
            lib.check("binding addresses", bind(fid, av.fid(), 0) as isize)?;
            lib.check("binding completions", bind(fid, cq.fid(), abi::FI_TRANSMIT | abi::FI_RECV) as isize)?;
            let enabled = ((*(*fid).ops).control)(fid, abi::FI_ENABLE, ptr::null_mut());
            lib.check("enabling an endpoint", enabled as isize)?;
            Ok(Endpoint {
                ep,
                regions: HashMap::new(),
                cq,
                av,
                domain,
                fabric,
                nic: nic.clone(),
                next: 1,
                contexts: vec![Context([0; 8]); depth].into_boxed_slice(),
                operations: (0..depth).map(|_| None).collect(),
                free: (0..depth as u32).rev().collect(),
                waits,
                _one_thread: PhantomData,
            })
        }
    }

    fn lib(&self) -> &Fabric {
        &self.nic.fabric
    }

    /// The address by which peers know it.
    ///
    /// # Errors
    /// libfabric's own.
    pub fn address(&mut self) -> Result<Vec<u8>, FabricError> {
        let mut bytes = vec![0u8; LONGEST_ADDRESS];
        let mut len = bytes.len();
        // SAFETY: an open endpoint, and room for `len` bytes; the call writes the length of the address.
        let code = unsafe {
            ((*(*self.ep.0.as_ptr()).cm).getname)(self.ep.fid(), bytes.as_mut_ptr().cast(), &mut len)
        };
        self.lib().check("reading the own address", code as isize)?;
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Knows a peer by the address that it gave.
    ///
    /// # Errors
    /// The address is none of this provider.
    pub fn add_peer(&mut self, address: &[u8]) -> Result<Slot, FabricError> {
        // Of a fixed length that the library knows: a short one would be read beyond its end.
        let mut whole = [0u8; LONGEST_ADDRESS];
        let refused = |fabric: &Fabric| fabric.error("adding a peer's address", libc::EINVAL);
        let Some(room) = whole.get_mut(..address.len()) else { return Err(refused(self.lib())) };
        room.copy_from_slice(address);
        let mut slot = u64::MAX;
        let av = self.av.0.as_ptr();
        // SAFETY: an open address vector, and an address in a buffer longer than any.
        let added =
            unsafe { ((*(*av).ops).insert)(av, whole.as_ptr().cast(), 1, &mut slot, 0, ptr::null_mut()) };
        self.lib().check("adding a peer's address", added as isize)?;
        match added {
            1 => Ok(Slot(slot)),
            _ => Err(refused(self.lib())),
        }
    }

    /// Forgets a peer. Nothing may be under way to it.
    ///
    /// # Errors
    /// libfabric's own.
    pub fn remove_peer(&mut self, peer: Slot) -> Result<(), FabricError> {
        let mut slot = peer.0;
        let av = self.av.0.as_ptr();
        // SAFETY: an open address vector, and one slot.
        let code = unsafe { ((*(*av).ops).remove)(av, &mut slot, 1, 0) };
        self.lib().check("removing a peer's address", code as isize)
    }

    /// Makes memory known to the NIC: for own operations, and for peers' where they may reach it.
    ///
    /// # Errors
    /// libfabric's own: often the limit of locked memory (`ulimit -l`).
    pub fn register(&mut self, memory: Arc<Memory>, remote: bool) -> Result<Registered, FabricError> {
        let id = self.next;
        self.next += 1;
        let mut access = abi::FI_READ | abi::FI_WRITE;
        if remote {
            access |= abi::FI_REMOTE_READ | abi::FI_REMOTE_WRITE;
        }
        let (at, len) = (memory.addr(), memory.len());
        let mode = self.nic.mr_mode();
        let domain = self.domain.0.as_ptr();
        let mut made: *mut FidMr = ptr::null_mut();
        // SAFETY: an open device; the memory is mapped while `memory` lives, which is kept until the registration is
        // closed. `id` is a key of its own where the caller has to give one.
        let code = unsafe {
            let reg = (*(*domain).mr).reg;
            reg(self.domain.fid(), at as *const c_void, len, access, 0, id, 0, &mut made, ptr::null_mut())
        };
        self.lib().check("registering memory", code as isize)?;
        let Some(mr) = NonNull::new(made) else {
            return Err(self.lib().error("registering memory", libc::EIO));
        };
        self.regions.insert(id, Region { mr, memory, posted: 0 });
        if mode & abi::FI_MR_ENDPOINT != 0 {
            self.bind_region(mr)?;
        }
        // SAFETY: an open registration.
        let key = unsafe { (*mr.as_ptr()).key };
        let base = if mode & abi::FI_MR_VIRT_ADDR != 0 { at as u64 } else { 0 };
        Ok(Registered { id, key, base })
    }

    /// Some providers know memory by endpoint.
    fn bind_region(&mut self, mr: NonNull<FidMr>) -> Result<(), FabricError> {
        let fid: *mut Fid = mr.as_ptr().cast();
        // SAFETY: an open registration and an open endpoint of one device.
        let bound = unsafe { ((*(*fid).ops).bind)(fid, self.ep.fid(), 0) };
        self.lib().check("binding memory to an endpoint", bound as isize)?;
        // SAFETY: as above.
        let enabled = unsafe { ((*(*fid).ops).control)(fid, abi::FI_ENABLE, ptr::null_mut()) };
        self.lib().check("enabling memory", enabled as isize)
    }

    /// Takes memory from the NIC. It is no fence: what a peer has under way may still land.
    ///
    /// # Errors
    /// Operations of this side are under way on it.
    pub fn unregister(&mut self, id: u64) -> Result<(), FabricError> {
        if self.regions.get(&id).is_some_and(|region| region.posted > 0) {
            return Err(self.lib().error("unregistering memory with operations under way", libc::EBUSY));
        }
        self.regions.remove(&id);
        Ok(())
    }

    /// Operations that may still be posted.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Operations under way.
    pub fn under_way(&self) -> usize {
        self.operations.len() - self.free.len()
    }

    /// Posts an operation.
    ///
    /// # Errors
    /// The range is not in the memory, or libfabric refused; nothing is under way then.
    pub fn post(&mut self, rma: &Rma) -> Result<Posted, HostError> {
        let Some(region) = self.regions.get_mut(&rma.memory) else {
            return Err(HostError::InvalidArgument(format!("memory {} is not registered here", rma.memory)));
        };
        let iov = match rma.op {
            RmaOp::Read => region.memory.recv_run(rma.offset, rma.len)?.as_iovec(),
            RmaOp::Write => region.memory.send_run(rma.offset, rma.len)?.as_iovec(),
        };
        let Some(&index) = self.free.last() else { return Ok(Posted::Full) };
        let remote = abi::RmaIov { addr: rma.remote, len: rma.len, key: rma.key };
        // SAFETY: an open registration.
        let mut desc = unsafe { (*region.mr.as_ptr()).desc };
        let message = abi::MsgRma {
            iov: &iov,
            desc: &mut desc,
            iov_count: 1,
            addr: rma.peer.0,
            rma_iov: &remote,
            rma_iov_count: 1,
            context: (&raw mut self.contexts[index as usize]).cast(),
            data: 0,
        };
        let ep = self.ep.0.as_ptr();
        // SAFETY: an open, enabled endpoint; the message is read during the call. The bytes lie in registered memory,
        // which is kept until the operation has ended (`unregister`), and the context at a stable address that no
        // other operation uses until then.
        let code = unsafe {
            let ops = (*ep).rma;
            match rma.op {
                RmaOp::Read => ((*ops).readmsg)(ep, &message, abi::FI_COMPLETION),
                RmaOp::Write => {
                    ((*ops).writemsg)(ep, &message, abi::FI_COMPLETION | abi::FI_DELIVERY_COMPLETE)
                }
            }
        };
        if code == -abi::FI_EAGAIN {
            return Ok(Posted::Full);
        }
        self.nic.fabric.check("posting an operation", code).map_err(HostError::from)?;
        region.posted += 1;
        self.free.pop();
        self.operations[index as usize] = Some(Operation { token: rma.token, memory: rma.memory });
        Ok(Posted::Yes)
    }

    /// Lets the provider work, and takes what has ended, into `into`.
    ///
    /// # Errors
    /// The queue itself is broken: the endpoint is of no use any more.
    pub fn poll(&mut self, into: &mut Vec<Completion>) -> Result<(), FabricError> {
        let cq = self.cq.0.as_ptr();
        let mut entries = [CqEntry { context: ptr::null_mut() }; BATCH];
        loop {
            // SAFETY: an open queue, and room for as many entries of its format.
            let got = unsafe { ((*(*cq).ops).read)(cq, entries.as_mut_ptr().cast(), BATCH) };
            match got {
                1.. => {
                    for entry in &entries[..got as usize] {
                        into.extend(self.ended(entry.context, Ok(())));
                    }
                    if (got as usize) < BATCH {
                        return Ok(());
                    }
                }
                0 => return Ok(()),
                code if code == -abi::FI_EAGAIN => return Ok(()),
                code if code == -abi::FI_EAVAIL => self.take_error(into)?,
                code => return self.lib().check("reading completions", code),
            }
        }
    }

    /// Takes an operation that failed.
    fn take_error(&mut self, into: &mut Vec<Completion>) -> Result<(), FabricError> {
        let cq = self.cq.0.as_ptr();
        // SAFETY: all zeros is an empty entry, and the call fills it.
        let (code, entry) = unsafe {
            let mut entry: CqError = std::mem::zeroed();
            (((*(*cq).ops).readerr)(cq, &mut entry, 0), entry)
        };
        if code == -abi::FI_EAGAIN {
            return Ok(());
        }
        self.lib().check("reading a failed completion", code)?;
        let mut error = self.lib().error("an operation failed", entry.err);
        // SAFETY: an open queue, and the entry that it has just filled; a C string, or null.
        let more =
            unsafe { ((*(*cq).ops).strerror)(cq, entry.prov_errno, entry.err_data, ptr::null_mut(), 0) };
        if !more.is_null() {
            // SAFETY: as above.
            let more = unsafe { CStr::from_ptr(more) }.to_string_lossy();
            error.text = format!("{} ({more})", error.text);
        }
        into.extend(self.ended(entry.context, Err(error)));
        Ok(())
    }

    /// Frees what an operation took. A context that is none of ours is nobody's.
    fn ended(&mut self, context: *mut c_void, result: Result<(), FabricError>) -> Option<Completion> {
        let first = self.contexts.as_ptr() as usize;
        let index = (context as usize).checked_sub(first)? / size_of::<Context>();
        let operation = self.operations.get_mut(index)?.take()?;
        self.free.push(index as u32);
        if let Some(region) = self.regions.get_mut(&operation.memory) {
            region.posted -= 1;
        }
        Some(Completion { token: operation.token, result })
    }

    /// A descriptor that becomes readable when completions come; none for providers that must be polled.
    ///
    /// # Errors
    /// libfabric's own.
    pub fn wait_fd(&mut self) -> Result<Option<RawFd>, FabricError> {
        if !self.waits {
            return Ok(None);
        }
        let mut fd: c_int = -1;
        let fid = self.cq.fid();
        // SAFETY: an open queue with a descriptor; the call writes its number.
        let code = unsafe { ((*(*fid).ops).control)(fid, abi::FI_GETWAIT, (&raw mut fd).cast()) };
        self.lib().check("asking for a descriptor to wait for", code as isize)?;
        Ok(Some(fd))
    }

    /// Whether the thread may sleep until [`Endpoint::wait_fd`] is readable: nothing has come meanwhile.
    pub fn may_wait(&mut self) -> bool {
        let mut fids = [self.cq.fid()];
        let fabric = self.fabric.0.as_ptr();
        // SAFETY: an open fabric, and one of its queues.
        self.waits && unsafe { ((*(*fabric).ops).trywait)(fabric, fids.as_mut_ptr(), 1) } == 0
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // Memory that is known by its endpoint goes before it.
        if self.nic.mr_mode() & abi::FI_MR_ENDPOINT != 0 {
            self.regions.clear();
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let fid: *mut Fid = self.mr.as_ptr().cast();
        // SAFETY: an open registration, closed once.
        let code = unsafe { ((*(*fid).ops).close)(fid) };
        debug_assert_eq!(code, 0, "a registration could not be closed");
    }
}

/// Makes an object.
///
/// # Safety
/// `call` writes an open object that begins with a [`Fid`] when it returns 0.
unsafe fn make<T>(
    lib: &Fabric,
    what: &'static str,
    call: impl FnOnce(*mut *mut T) -> c_int,
) -> Result<Object<T>, FabricError> {
    let mut made = ptr::null_mut();
    lib.check(what, call(&mut made) as isize)?;
    // SAFETY: the caller's promise.
    unsafe { Object::new(made) }.ok_or_else(|| lib.error(what, libc::EIO))
}

/// A queue with room for everything that may be under way, with a descriptor where the provider has one.
///
/// # Safety
/// `domain` is open.
unsafe fn completion_queue(
    lib: &Fabric,
    domain: *mut FidDomain,
    depth: usize,
) -> Result<(Object<FidCq>, bool), FabricError> {
    let open = |wait_obj| {
        let call = |out: *mut *mut FidCq| {
            // SAFETY: all zeros asks for defaults; the caller's promise.
            unsafe {
                let mut attr: abi::CqAttr = std::mem::zeroed();
                (attr.size, attr.format, attr.wait_obj) = (depth, abi::FI_CQ_FORMAT_CONTEXT, wait_obj);
                ((*(*domain).ops).cq_open)(domain, &mut attr, out, ptr::null_mut())
            }
        };
        // SAFETY: it writes an open queue when it returns 0.
        unsafe { make(lib, "making a completion queue", call) }
    };
    match open(abi::FI_WAIT_FD) {
        Ok(cq) => Ok((cq, true)),
        Err(_) => open(abi::FI_WAIT_NONE).map(|cq| (cq, false)),
    }
}
