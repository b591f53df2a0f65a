//! Endpoints: peers, and the operations that are in flight.

use super::abi::{self, fi_cq_entry, fi_cq_err_entry, fid_av, fid_cq, fid_domain, fid_ep};
use super::device::{Device, Object};
use super::nic::{Description, Nic};
use super::{Fabric, FabricError, Registration};
use crate::HostError;
use crate::event::{Epoll, Interest};
use crate::library::text;
use crate::rma::{Completion, Posted, RmaOp};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

/// Peers that an address vector is made for; it grows beyond.
const PEERS: usize = 64;
/// Completions that are taken in one call.
const BATCH: usize = 64;
/// Times that a poll hears of a failed operation of which there is no word, before the queue counts as broken: where a
/// library's own threads are at it, too, the word may come a moment later.
const WORDLESS: u32 = 1000;
/// Bytes of the longest address of any provider (EFA 32, sockets 28, shm's name 64 and more).
const LONGEST_ADDRESS: usize = 512;

/// What a provider may use for itself while an operation is in flight (`struct fi_context2`).
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Context([u64; 8]);

/// A peer's endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot(u64);

/// One run of bytes to move.
#[derive(Clone, Copy)]
pub struct Rma<'a> {
    /// The direction.
    pub op: RmaOp,
    /// The own memory.
    pub memory: &'a Rc<Registration>,
    /// The first byte in it.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
    /// The peer.
    pub peer: Slot,
    /// Where the bytes lie there: the peer's [`Registration::base`] and an offset.
    pub remote: u64,
    /// The peer's [`Registration::key`].
    pub key: u64,
    /// Given back with the completion.
    pub token: u64,
}

struct Operation {
    token: u64,
    /// Known to the NIC until the operation has ended.
    _memory: Rc<Registration>,
}

/// An endpoint. When it is dropped, or closed, what was posted and has not ended stops.
pub struct Endpoint {
    // Taken by `end`, in this order.
    ep: ManuallyDrop<Object<fid_ep>>,
    used: ManuallyDrop<Used>,
}

/// What the library uses for an endpoint as long as it is open.
struct Used {
    operations: Vec<Option<Operation>>,
    /// At stable addresses: providers keep pointers to them.
    contexts: Box<[Context]>,
    free: Vec<u32>,
    /// By their addresses; and how often each was added.
    peers: HashMap<Vec<u8>, (Slot, usize)>,
    waits: bool,
    /// The set that the queue's descriptor is in.
    watched: Option<(Rc<Epoll>, c_int)>,
    // In the order in which they are closed.
    cq: Object<fid_cq>,
    av: Object<fid_av>,
    device: Rc<Device>,
}

impl Endpoint {
    /// Opens an endpoint of the device. `depth` bounds the operations in flight, beside the provider's own bound.
    ///
    /// # Errors
    /// libfabric's own, by the step that failed.
    pub fn open(device: &Rc<Device>, depth: usize) -> Result<Endpoint, FabricError> {
        let lib = device.lib();
        let depth = depth.min(device.description().depth()).clamp(1, 1 << 16);
        let d = device.domain.as_ptr();
        // SAFETY: an open device. Each call writes an object if it returns 0, and objects are kept in the order in
        // which they must be closed.
        unsafe {
            let ops = (*d).ops;
            let av: Object<fid_av> = Object::make(lib, "making an address vector", |out| {
                let mut attr =
                    abi::fi_av_attr { type_: abi::FI_AV_TABLE, count: PEERS, ..Default::default() };
                ((*ops).av_open)(d, &mut attr, out, ptr::null_mut())
            })?;
            let (cq, waits) = completion_queue(lib, d, depth)?;
            let ep = make(device)?;
            let fid = ep.fid();
            let bind = (*(*fid).ops).bind;
            lib.check("binding addresses", bind(fid, av.fid(), 0) as isize)?;
            lib.check("binding completions", bind(fid, cq.fid(), abi::FI_TRANSMIT | abi::FI_RECV) as isize)?;
            let enabled = ((*(*fid).ops).control)(fid, abi::FI_ENABLE, ptr::null_mut());
            lib.check("enabling an endpoint", enabled as isize)?;
            let used = Used {
                operations: (0..depth).map(|_| None).collect(),
                contexts: vec![Context([0; 8]); depth].into_boxed_slice(),
                free: (0..depth as u32).rev().collect(),
                peers: HashMap::new(),
                waits,
                watched: None,
                cq,
                av,
                device: device.clone(),
            };
            Ok(Endpoint { ep: ManuallyDrop::new(ep), used: ManuallyDrop::new(used) })
        }
    }

    /// Closes it: nothing that was posted touches memory any more, and no peer reaches memory by it.
    ///
    /// # Errors
    /// libfabric refuses to. The endpoint stays open until the process ends, and so does all that it may still use.
    pub fn close(self) -> Result<(), FabricError> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: its drop does not run.
        unsafe { this.end() }
    }

    /// # Safety
    /// Called once, and nothing of the endpoint is used after it.
    unsafe fn end(&mut self) -> Result<(), FabricError> {
        // SAFETY: taken once, by the caller's promise.
        let (ep, mut used) =
            unsafe { (ManuallyDrop::take(&mut self.ep), ManuallyDrop::take(&mut self.used)) };
        if let Some((epoll, fd)) = used.watched.take() {
            // SAFETY: the queue's own, which is open.
            let taken_out = epoll.delete(unsafe { BorrowedFd::borrow_raw(fd) });
            taken_out.unwrap_or_else(|error| log::debug!("an endpoint's descriptor wakes on: {error}"));
        }
        match ep.close() {
            0 => {
                drop(used);
                Ok(())
            }
            code => {
                let error = used.device.lib().error("closing an endpoint", code.saturating_abs());
                // Its operations' memory and contexts, its queue and its device.
                std::mem::forget(used);
                Err(error)
            }
        }
    }

    fn lib(&self) -> &Fabric {
        self.used.device.lib()
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
            ((*(*self.ep.as_ptr()).cm).getname)(self.ep.fid(), bytes.as_mut_ptr().cast(), &mut len)
        };
        self.lib().check("reading the own address", code as isize)?;
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Knows a peer by the address that it gave, until it was removed as often as it was added.
    ///
    /// # Errors
    /// The address is none of this provider.
    pub fn add_peer(&mut self, address: &[u8]) -> Result<Slot, FabricError> {
        // Providers differ in what a second insertion is: to EFA's it is the first one, and one removal ends both.
        if let Some((slot, times)) = self.used.peers.get_mut(address) {
            *times += 1;
            return Ok(*slot);
        }
        // Of a fixed length that the library knows: a short one would be read beyond its end.
        let mut whole = [0u8; LONGEST_ADDRESS];
        let refused = |fabric: &Fabric| fabric.error("adding a peer's address", libc::EINVAL);
        let Some(room) = whole.get_mut(..address.len()) else { return Err(refused(self.lib())) };
        room.copy_from_slice(address);
        let mut slot = u64::MAX;
        let av = self.used.av.as_ptr();
        // SAFETY: an open address vector, and an address in a buffer longer than any.
        let added =
            unsafe { ((*(*av).ops).insert)(av, whole.as_ptr().cast(), 1, &mut slot, 0, ptr::null_mut()) };
        self.lib().check("adding a peer's address", added as isize)?;
        if added != 1 {
            return Err(refused(self.lib()));
        }
        self.used.peers.insert(address.to_vec(), (Slot(slot), 1));
        Ok(Slot(slot))
    }

    /// Forgets a peer, unless it was added once more. Then nothing may be in flight to it.
    ///
    /// # Errors
    /// libfabric's own.
    pub fn remove_peer(&mut self, peer: Slot) -> Result<(), FabricError> {
        if let Some((_, times)) = self.used.peers.values_mut().find(|(slot, _)| *slot == peer) {
            *times -= 1;
            if *times > 0 {
                return Ok(());
            }
        }
        self.used.peers.retain(|_, (slot, _)| *slot != peer);
        let mut slot = peer.0;
        let av = self.used.av.as_ptr();
        // SAFETY: an open address vector, and one slot.
        let code = unsafe { ((*(*av).ops).remove)(av, &mut slot, 1, 0) };
        self.lib().check("removing a peer's address", code as isize)
    }

    /// Operations that may still be posted.
    pub fn room(&self) -> usize {
        self.used.free.len()
    }

    /// Operations in flight.
    pub fn in_flight(&self) -> usize {
        self.used.operations.len() - self.used.free.len()
    }

    /// Posts an operation.
    ///
    /// # Errors
    /// The range is not in the memory, or libfabric refused; nothing is in flight then.
    pub fn post(&mut self, rma: &Rma<'_>) -> Result<Posted, HostError> {
        let iov = rma.memory.run(rma.offset, rma.len, rma.op)?;
        let Some(&index) = self.used.free.last() else { return Ok(Posted::Full) };
        let remote = abi::fi_rma_iov { addr: rma.remote, len: rma.len, key: rma.key };
        let mut desc = rma.memory.desc();
        let message = abi::fi_msg_rma {
            msg_iov: &iov,
            desc: &mut desc,
            iov_count: 1,
            addr: rma.peer.0,
            rma_iov: &remote,
            rma_iov_count: 1,
            context: (&raw mut self.used.contexts[index as usize]).cast(),
            data: 0,
        };
        let ep = self.ep.as_ptr();
        // SAFETY: an open, enabled endpoint; the message is read during the call. The bytes lie in registered memory,
        // which the operation keeps until it has ended, and the context at a stable address that no
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
        self.used.device.lib().check("posting an operation", code).map_err(HostError::from)?;
        self.used.free.pop();
        let operation = Operation { token: rma.token, _memory: rma.memory.clone() };
        self.used.operations[index as usize] = Some(operation);
        Ok(Posted::Yes)
    }

    /// Lets the provider work, and takes what has ended, into `into`.
    ///
    /// # Errors
    /// The queue itself is broken: the endpoint is of no use any more.
    pub fn poll(&mut self, into: &mut Vec<Completion<FabricError>>) -> Result<(), FabricError> {
        let cq = self.used.cq.as_ptr();
        let mut entries = [fi_cq_entry { op_context: ptr::null_mut() }; BATCH];
        let mut wordless = 0;
        loop {
            // SAFETY: an open queue, and room for as many entries of its format.
            let got = unsafe { ((*(*cq).ops).read)(cq, entries.as_mut_ptr().cast(), BATCH) };
            match got {
                1.. => {
                    for entry in &entries[..got as usize] {
                        into.extend(self.ended(entry.op_context, Ok(())));
                    }
                    if (got as usize) < BATCH {
                        return Ok(());
                    }
                }
                0 => return Ok(()),
                code if code == -abi::FI_EAGAIN => return Ok(()),
                code if code == -abi::FI_EAVAIL => match self.take_error(into) {
                    Err(error) if error.number == libc::EAGAIN && wordless < WORDLESS => wordless += 1,
                    taken => taken?,
                },
                code => return self.lib().check("reading completions", code),
            }
        }
    }

    /// Takes an operation that failed.
    ///
    /// # Errors
    /// There is none (`EAGAIN`), whatever the queue said; or the queue itself is broken.
    fn take_error(&mut self, into: &mut Vec<Completion<FabricError>>) -> Result<(), FabricError> {
        let cq = self.used.cq.as_ptr();
        let mut entry = fi_cq_err_entry::default();
        // SAFETY: an open queue; the call fills the entry.
        let code = unsafe { ((*(*cq).ops).readerr)(cq, &mut entry, 0) };
        self.lib().check("reading a failed completion", code)?;
        let mut error = self.lib().error("an operation failed", entry.err);
        // SAFETY: an open queue, and the entry that it has just filled; a C string, or null.
        let more = unsafe {
            text(((*(*cq).ops).strerror)(cq, entry.prov_errno, entry.err_data, ptr::null_mut(), 0))
        };
        if !more.is_empty() {
            error.text = format!("{} ({more})", error.text);
        }
        into.extend(self.ended(entry.op_context, Err(error)));
        Ok(())
    }

    /// Frees what an operation took. A context that is none of ours is nobody's.
    fn ended(
        &mut self,
        context: *mut c_void,
        result: Result<(), FabricError>,
    ) -> Option<Completion<FabricError>> {
        let first = self.used.contexts.as_ptr() as usize;
        let index = (context as usize).checked_sub(first)? / size_of::<Context>();
        let operation = self.used.operations.get_mut(index)?.take()?;
        self.used.free.push(index as u32);
        Some(Completion { token: operation.token, result })
    }

    /// Adds to `epoll` the descriptor that becomes readable when completions come. False for a provider without one,
    /// which must be polled.
    ///
    /// # Errors
    /// The provider's, or the kernel's.
    pub fn watch(&mut self, epoll: &Rc<Epoll>, token: u64) -> Result<bool, HostError> {
        if !self.used.waits {
            return Ok(false);
        }
        let mut fd: c_int = -1;
        let fid = self.used.cq.fid();
        // SAFETY: an open queue with a descriptor; the call writes its number.
        let code = unsafe { ((*(*fid).ops).control)(fid, abi::FI_GETWAIT, (&raw mut fd).cast()) };
        if code == -libc::ENOSYS {
            // ofi_rxm over verbs takes the wish for one, and has none.
            self.used.waits = false;
            return Ok(false);
        }
        self.lib().check("asking for a descriptor to wait for", code as isize)?;
        // SAFETY: the queue's own, open as long as it is. It is taken out of the set before: a forked child that holds it
        // would keep its events coming.
        epoll.add(unsafe { BorrowedFd::borrow_raw(fd) }, token, Interest::READ)?;
        self.used.watched = Some((epoll.clone(), fd));
        Ok(true)
    }

    /// Whether the thread may sleep until the descriptor of [`Endpoint::watch`] is readable: nothing has come
    /// meanwhile.
    pub fn may_wait(&mut self) -> bool {
        let mut fids = [self.used.cq.fid()];
        let fabric = self.used.device.fabric.as_ptr();
        // SAFETY: an open fabric, and one of its queues.
        self.used.waits && unsafe { ((*(*fabric).ops).trywait)(fabric, fids.as_mut_ptr(), 1) } == 0
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // SAFETY: once, here, unless `close` was called, after which no drop runs.
        if let Err(error) = unsafe { self.end() } {
            log::error!("{error}; the memory of what it has in flight stays lost");
        }
    }
}

impl Device {
    /// Opens the NIC: for memory of GPUs too, where it can know such memory as kvik needs it.
    ///
    /// # Errors
    /// libfabric's own, by the step that failed.
    pub fn open(nic: &Arc<Nic>) -> Result<Rc<Device>, FabricError> {
        let why = match &nic.gpus {
            Ok(description) => match Device::open_for_gpus(nic, description) {
                Ok(device) => return Ok(Rc::new(device)),
                Err(error) => error.text,
            },
            Err(why) => why.clone(),
        };
        Device::open_as(nic, &nic.plain, Err(why)).map(Rc::new)
    }

    /// What a provider promises of copies by CUDA it says only of an endpoint.
    fn open_for_gpus(nic: &Arc<Nic>, description: &Description) -> Result<Device, FabricError> {
        let device = Device::open_as(nic, description, Ok(()))?;
        make(&device)?;
        Ok(device)
    }
}

/// An endpoint that is not enabled, and is told what it must not do.
///
/// # Errors
/// libfabric's own; and what cannot be forbidden.
pub(super) fn make(device: &Device) -> Result<Object<fid_ep>, FabricError> {
    let (lib, info, domain) = (device.lib(), device.description().as_ptr(), device.domain.as_ptr());
    // SAFETY: an open device and its whole description; the call writes an open endpoint if it returns 0, which whoever
    // has it drops before the device.
    let ep = unsafe {
        Object::make(lib, "making an endpoint", |out| {
            ((*(*domain).ops).endpoint)(domain, info, out, ptr::null_mut())
        })?
    };
    if device.nic.provider() == "efa" {
        super::within_host::forbid_shared_memory(lib, &ep)?;
    }
    if device.gpus().is_ok() {
        super::gpus::forbid_copies(lib, &ep)?;
    }
    Ok(ep)
}

/// A queue with room for everything that may be in flight, with a descriptor where the provider has one.
///
/// # Safety
/// `domain` is open.
unsafe fn completion_queue(
    lib: &Fabric,
    domain: *mut fid_domain,
    depth: usize,
) -> Result<(Object<fid_cq>, bool), FabricError> {
    let open = |wait_obj| {
        let call = |out: *mut *mut fid_cq| {
            let format = abi::FI_CQ_FORMAT_CONTEXT;
            let mut attr = abi::fi_cq_attr { size: depth, format, wait_obj, ..Default::default() };
            // SAFETY: the caller's promise.
            unsafe { ((*(*domain).ops).cq_open)(domain, &mut attr, out, ptr::null_mut()) }
        };
        // SAFETY: it writes an open queue when it returns 0.
        unsafe { Object::make(lib, "making a completion queue", call) }
    };
    match open(abi::FI_WAIT_FD) {
        Ok(cq) => Ok((cq, true)),
        Err(_) => open(abi::FI_WAIT_NONE).map(|cq| (cq, false)),
    }
}
