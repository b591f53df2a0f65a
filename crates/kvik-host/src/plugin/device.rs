//! An open device: memory that it knows, connections to peers, and what is in flight on them.

use super::abi;
use super::{Plugin, PluginError, Region};
use crate::HostError;
use crate::event::{Epoll, Interest};
use crate::rma::{Completion, Posted, RmaOp, Run};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

/// Completions that are taken in one call, and calls in one poll: others have a turn too.
const BATCH: usize = 64;
const ROUNDS: usize = 16;

/// A connection to a peer's device. No two have one number, whichever is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Conn(u64);

/// Runs here, to or from one run at the peer.
#[derive(Clone, Copy)]
pub struct Rma<'a> {
    /// The direction.
    pub op: RmaOp,
    /// The own memory.
    pub memory: &'a Rc<Region>,
    /// What of it, in the order in which it lies at the peer; no more than [`PluginDevice::pieces`].
    pub pieces: &'a [Run],
    /// The connection to the peer.
    pub conn: Conn,
    /// Where the bytes lie there: the peer's [`Region::base`] and an offset.
    pub remote: u64,
    /// The peer's [`Region::key`].
    pub key: u64,
    /// Given back with the completion.
    pub token: u64,
}

/// What a cut has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelScope {
    /// What was posted on the way.
    Conn,
    /// Whatever was posted on the device; all connections are closed.
    Everything,
}

/// The device itself, closed when nothing needs it any more.
pub(super) struct Opened {
    pub at: NonNull<abi::kvik_nic_device>,
    pub plugin: Arc<Plugin>,
}

impl Opened {
    pub fn check(&self, what: &'static str, code: i32) -> Result<(), PluginError> {
        self.plugin.check(what, self.at.as_ptr(), code)
    }

    /// Asks for an address: by `address`, or by `fence`.
    fn told(
        &self,
        what: &'static str,
        ask: unsafe extern "C" fn(*mut abi::kvik_nic_device, *mut u8, *mut u32) -> i32,
    ) -> Result<Vec<u8>, PluginError> {
        let mut bytes = [0u8; abi::KVIK_NIC_ADDRESS];
        let mut len = bytes.len() as u32;
        // SAFETY: an open device, and room for `len` bytes.
        let code = unsafe { ask(self.at.as_ptr(), bytes.as_mut_ptr(), &mut len) };
        self.check(what, code)?;
        match bytes.get(..len as usize) {
            Some([]) => Err(self.plugin.wrong(what, "it gives an address of no bytes")),
            Some(address) => Ok(address.to_vec()),
            None => {
                let text =
                    format!("it gives an address of {len} bytes, and {} is the most", abi::KVIK_NIC_ADDRESS);
                Err(self.plugin.wrong(what, text))
            }
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: an open device, closed once, by the thread that opened it; its regions keep it and are
        // gone.
        unsafe { (self.plugin.functions.close)(self.at.as_ptr()) };
    }
}

struct Operation {
    token: u64,
    conn: Conn,
    /// Known to the device until the operation has ended.
    _memory: Rc<Region>,
}

/// See the module's text.
pub struct PluginDevice {
    conns: HashMap<Conn, NonNull<abi::kvik_nic_conn>>,
    /// What is in flight, by the numbers that the plug-in has for it: each is given out once.
    operations: HashMap<u64, Operation>,
    next: u64,
    limits: abi::kvik_nic_limits,
    /// The address that peers were told last.
    address: Vec<u8>,
    memories: abi::kvik_nic_memories,
    device: Rc<Opened>,
}

impl PluginDevice {
    /// Opens a device of the plug-in, for this thread. `depth` bounds the operations in flight, beside the
    /// device's own bound.
    ///
    /// # Errors
    /// The plug-in's own, or what it says of the device makes no sense.
    pub fn open(plugin: &Arc<Plugin>, number: u32, depth: usize) -> Result<PluginDevice, PluginError> {
        let mut made = ptr::null_mut();
        // SAFETY: of the table, by the header's rules: it writes a device if it returns 0.
        let code = unsafe { (plugin.functions.open)(number, &mut made) };
        let what = "opening a device";
        plugin.check(what, ptr::null_mut(), code)?;
        let at = NonNull::new(made).ok_or_else(|| plugin.wrong(what, "it gives none"))?;
        let device = Rc::new(Opened { at, plugin: plugin.clone() });
        let mut limits = abi::kvik_nic_limits::default();
        let what = "asking what a device takes";
        // SAFETY: an open device, and where to write.
        device.check(what, unsafe { (plugin.functions.limits)(at.as_ptr(), &mut limits) })?;
        if limits.longest == 0 || limits.pieces == 0 || limits.depth == 0 {
            let abi::kvik_nic_limits { longest, pieces, depth } = limits;
            let text = format!("no operation: {longest} bytes, {pieces} pieces, {depth} in flight");
            return Err(plugin.wrong(what, text));
        }
        limits.depth = limits.depth.min(u32::try_from(depth).unwrap_or(u32::MAX)).max(1);
        let mut memories = abi::kvik_nic_memories::default();
        if let Some(ask) = plugin.functions.memories {
            let what = "asking which memory a device reaches";
            // SAFETY: an open device, and where to write.
            device.check(what, unsafe { ask(at.as_ptr(), &mut memories) })?;
            if memories.dmabuf > abi::KVIK_NIC_DMABUF_NEEDED {
                return Err(plugin.wrong(what, format!("{} says nothing of dma-bufs", memories.dmabuf)));
            }
        }
        let address = device.told("asking for a device's address", plugin.functions.address)?;
        Ok(PluginDevice {
            conns: HashMap::new(),
            operations: HashMap::new(),
            next: 1,
            limits,
            address,
            memories,
            device,
        })
    }

    pub(super) fn plugin(&self) -> &Plugin {
        &self.device.plugin
    }

    /// The device itself, for those who keep it open.
    pub(super) fn opened(&self) -> &Rc<Opened> {
        &self.device
    }

    /// Which memory of other devices it reaches.
    pub(super) fn memories(&self) -> abi::kvik_nic_memories {
        self.memories
    }

    pub(super) fn at(&self) -> *mut abi::kvik_nic_device {
        self.device.at.as_ptr()
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Bytes of one operation, at most.
    pub fn longest(&self) -> u64 {
        self.limits.longest
    }

    /// Pieces of one operation, at most.
    pub fn pieces(&self) -> usize {
        (self.limits.pieces as usize).min(abi::KVIK_NIC_PIECES)
    }

    /// Operations in flight, at most.
    pub fn depth(&self) -> usize {
        self.limits.depth as usize
    }

    /// The address by which peers reach it.
    pub fn address(&self) -> &[u8] {
        &self.address
    }

    /// Operations in flight.
    pub fn in_flight(&self) -> usize {
        self.operations.len()
    }

    /// Opens a connection to the device of this address.
    ///
    /// # Errors
    /// It is no address of this plug-in.
    pub fn open_conn(&mut self, address: &[u8]) -> Result<Conn, PluginError> {
        let what = "opening a connection to a peer";
        if address.is_empty() || address.len() > abi::KVIK_NIC_ADDRESS {
            let text = format!(
                "the peer's address has {} bytes, and 1 to {} are taken",
                address.len(),
                abi::KVIK_NIC_ADDRESS
            );
            return Err(self.plugin().wrong(what, text));
        }
        let mut made = ptr::null_mut();
        let open = self.plugin().functions.conn_open;
        // SAFETY: an open device, and an address of this length; it writes a connection if it returns 0.
        let code = unsafe { open(self.at(), address.as_ptr(), address.len() as u32, &mut made) };
        self.device.check(what, code)?;
        let at = NonNull::new(made).ok_or_else(|| self.plugin().wrong(what, "it gives none"))?;
        let conn = Conn(self.number());
        self.conns.insert(conn, at);
        Ok(conn)
    }

    /// Closes a connection.
    ///
    /// # Errors
    /// Something is in flight on it: it stays, and must be cut.
    pub fn close_conn(&mut self, conn: Conn) -> Result<(), PluginError> {
        if self.is_busy(conn) {
            return Err(self
                .plugin()
                .wrong("closing a connection to a peer", "operations are in flight on it"));
        }
        if let Some(at) = self.conns.remove(&conn) {
            // SAFETY: an open device and an open connection of it, closed once; nothing is in flight on it.
            unsafe { (self.plugin().functions.conn_close)(self.at(), at.as_ptr()) };
        }
        Ok(())
    }

    fn is_busy(&self, conn: Conn) -> bool {
        self.operations.values().any(|operation| operation.conn == conn)
    }

    /// Posts an operation.
    ///
    /// # Errors
    /// A piece does not lie in the memory, there is no such connection, or the plug-in refused; nothing is in flight
    /// then.
    pub fn post(&mut self, rma: &Rma<'_>) -> Result<Posted, HostError> {
        let what = "posting an operation";
        let wrong = |text: &str| HostError::from(self.plugin().wrong(what, text));
        if rma.pieces.is_empty() || rma.pieces.len() > self.pieces() {
            return Err(wrong("it has no pieces, or more than the device takes"));
        }
        let conn = *self.conns.get(&rma.conn).ok_or_else(|| wrong("its connection is closed"))?;
        if !rma.memory.is_of(&self.device) {
            return Err(wrong("its memory is known to another device"));
        }
        let mut pieces = [abi::kvik_nic_piece { start: ptr::null_mut(), length: 0 }; abi::KVIK_NIC_PIECES];
        for (piece, run) in pieces.iter_mut().zip(rma.pieces) {
            *piece = abi::kvik_nic_piece { start: rma.memory.at(run, rma.op)?, length: run.len as u64 };
        }
        if self.operations.len() >= self.limits.depth as usize {
            return Ok(Posted::Full);
        }
        let token = self.number();
        let post = abi::kvik_nic_post {
            conn: conn.as_ptr(),
            region: rma.memory.region(),
            pieces: pieces.as_ptr(),
            count: rma.pieces.len() as u32,
            op: if rma.op == RmaOp::Read { abi::KVIK_NIC_READ } else { abi::KVIK_NIC_WRITE },
            remote: rma.remote,
            key: rma.key,
            token,
        };
        // SAFETY: an open device with an open connection and a region of it; the post is read during the call. The
        // bytes lie in memory that the region keeps, and the operation keeps the region until it has ended.
        let code = unsafe { (self.plugin().functions.post)(self.at(), &post) };
        self.device.check(what, code)?;
        match code {
            abi::KVIK_NIC_OK => {
                let operation = Operation { token: rma.token, conn: rma.conn, _memory: rma.memory.clone() };
                self.operations.insert(token, operation);
                Ok(Posted::Yes)
            }
            abi::KVIK_NIC_FULL => Ok(Posted::Full),
            code => Err(self.plugin().wrong(what, format!("it answers {code}")).into()),
        }
    }

    /// Lets the device work, and takes what has ended, into `into`.
    ///
    /// # Errors
    /// Nothing can be learnt of operations any more: what is in flight must be cut.
    pub fn poll(&mut self, into: &mut Vec<Completion<PluginError>>) -> Result<(), PluginError> {
        let what = "polling for completions";
        let mut batch = [abi::kvik_nic_completion::default(); BATCH];
        for _ in 0..ROUNDS {
            // SAFETY: an open device, and room for so many completions.
            let got = unsafe { (self.plugin().functions.poll)(self.at(), batch.as_mut_ptr(), BATCH as u32) };
            self.device.check(what, got)?;
            let told = batch.get(..got as usize).ok_or_else(|| {
                self.plugin().wrong(what, format!("it says {got}, and there was room for {BATCH}"))
            })?;
            for completion in told {
                let operation = self.operations.remove(&completion.token).ok_or_else(|| {
                    let text = format!("it tells of operation {}, which is not in flight", completion.token);
                    self.plugin().wrong(what, text)
                })?;
                let result = match completion.status {
                    status @ 1.. => Err(self.plugin().wrong(what, format!("it gives status {status}"))),
                    status => self.device.check("an operation failed", status),
                };
                into.push(Completion { token: operation.token, result });
            }
            if told.len() < BATCH {
                break;
            }
        }
        Ok(())
    }

    /// Adds to `epoll` the descriptor that is readable while there is something to poll for. False for a
    /// device without one, which must be polled.
    ///
    /// # Errors
    /// It is no descriptor that can be waited for.
    pub fn watch(&mut self, epoll: &Epoll, token: u64) -> Result<bool, HostError> {
        // SAFETY: an open device.
        let fd = unsafe { (self.plugin().functions.descriptor)(self.at()) };
        if fd < 0 {
            return Ok(false);
        }
        // SAFETY: not -1, and by the header's rules open as long as the device, which this value keeps. If it
        // is none, the kernel says so.
        epoll.add(unsafe { BorrowedFd::borrow_raw(fd) }, token, Interest::READ)?;
        Ok(true)
    }

    /// Whether the thread may sleep until the descriptor of [`PluginDevice::watch`] is readable.
    pub fn may_wait(&mut self) -> bool {
        // SAFETY: an open device.
        unsafe { (self.plugin().functions.may_sleep)(self.at()) > 0 }
    }

    /// Whether the device can be used now.
    pub fn is_up(&self) -> bool {
        // SAFETY: an open device.
        self.plugin().functions.is_up.is_none_or(|is_up| unsafe { is_up(self.at()) != 0 })
    }

    /// Stops what was posted on a connection, and closes it: none of it touches memory of this process any more, and
    /// nothing is heard of it.
    ///
    /// # Errors
    /// It cannot be stopped; all is as before.
    pub fn cancel(&mut self, conn: Conn) -> Result<CancelScope, PluginError> {
        let Some(at) = self.conns.get(&conn) else { return Ok(CancelScope::Conn) };
        // SAFETY: an open device and an open connection of it, which is closed by the call unless it fails.
        let code = unsafe { (self.plugin().functions.cancel)(self.at(), at.as_ptr()) };
        self.device.check("cutting what was posted", code)?;
        match code {
            abi::KVIK_NIC_OK => {
                self.conns.remove(&conn);
                self.operations.retain(|_, operation| operation.conn != conn);
                Ok(CancelScope::Conn)
            }
            abi::KVIK_NIC_ALL => {
                self.conns.clear();
                self.operations.clear();
                Ok(CancelScope::Everything)
            }
            code => Err(self.plugin().wrong("cutting what was posted", format!("it answers {code}"))),
        }
    }

    /// Cuts what peers can reach: nothing that one of them has posted or will post by the address that they
    /// know touches memory here any more. Gives the address that it is reached by from now on.
    ///
    /// # Errors
    /// It cannot be cut, or the address is the old one, by which a peer that was slow may still come.
    pub fn fence(&mut self) -> Result<Vec<u8>, PluginError> {
        let what = "cutting off peers";
        let address = self.device.told(what, self.plugin().functions.fence)?;
        if address == self.address {
            return Err(self.plugin().wrong(what, "it keeps the address that peers know already"));
        }
        self.address.clone_from(&address);
        Ok(address)
    }
}

impl Drop for PluginDevice {
    fn drop(&mut self) {
        for conn in self.conns.keys().copied().collect::<Vec<_>>() {
            let ended = if self.is_busy(conn) { self.cancel(conn).map(drop) } else { self.close_conn(conn) };
            if let Err(error) = ended {
                // What it may still touch stays where it is, and so does the device. Others' are still to be cut.
                let left: Vec<_> = self.operations.extract_if(|_, left| left.conn == conn).collect();
                log::error!("{error}; the memory of {} operations stays lost", left.len());
                std::mem::forget(left);
            }
        }
    }
}
