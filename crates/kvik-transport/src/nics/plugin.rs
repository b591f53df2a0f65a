//! NICs that a plug-in brings: connections to peers by their addresses, and one cut for all peers.
//!
//! A peer's connection needs only the address that the peer has told. So cutting a peer off means that the address
//! changes, for all of them: who had a connection takes the new address, and posts again what it had in flight.

use super::NicOptions;
use super::device::{
    CancelScope, Disconnected, Done, LONGEST, Operation, PIECES, Posted, RmaDevice, lost, no,
};
use crate::{RegionMemory, from_host};
use kvik_core::{Code, Error, Result};
use kvik_host::event::Epoll;
use kvik_host::plugin::{self, Conn, Plugin, PluginDevice, PluginError, Region, Rma};
use kvik_host::rma::{Completion, RmaOp};
use kvik_proto::{NicKey, Op};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// See the module's text.
pub(super) struct PluginRmaDevice {
    name: String,
    device: PluginDevice,
    /// By session.
    conns: HashMap<u64, Conn>,
    /// What was taken off the device, kept for its room.
    taken: Vec<Completion<PluginError>>,
}

/// The plug-in that the options name.
pub(super) fn load(options: &NicOptions) -> Result<Arc<Plugin>> {
    let Some(file) = &options.library else {
        let text = "nics=\"plugin\" needs the plug-in's file: set `nic_library` (KVIK_NIC_LIBRARY)";
        return Err(Error::new(Code::InvalidArgument, text));
    };
    Plugin::load(file).map_err(no)
}

/// Its devices: their names and numbers.
pub(super) fn nics(plugin: &Plugin) -> Result<Vec<(String, u32)>> {
    let devices = plugin.devices().map_err(no)?;
    let (name, path, version) = (plugin.name(), plugin.path().display(), plugin.version());
    if devices.is_empty() {
        return Err(no(format!(
            "the plug-in {name} ({path}) has no NIC here; its vendor's tools show what it sees, \
             and nothing else is taken in its place"
        )));
    }
    log::info!("the plug-in {name} ({path}, version {version} of the interface): {} NIC(s)", devices.len());
    Ok(devices.into_iter().zip(0..).collect())
}

impl PluginRmaDevice {
    /// Opens the device of this number.
    pub fn open(plugin: &Arc<Plugin>, number: u32, depth: usize) -> Result<PluginRmaDevice> {
        let device = PluginDevice::open(plugin, number, depth).map_err(no)?;
        Ok(PluginRmaDevice {
            name: plugin.name().to_owned(),
            device,
            conns: HashMap::new(),
            taken: Vec::new(),
        })
    }

    /// What a cut has closed.
    fn closed(&mut self, session: u64, cut: plugin::CancelScope) -> CancelScope {
        match cut {
            plugin::CancelScope::Conn => {
                self.conns.remove(&session);
                CancelScope::Session
            }
            plugin::CancelScope::Everything => {
                self.conns.clear();
                CancelScope::All
            }
        }
    }
}

impl RmaDevice for PluginRmaDevice {
    type Known = Rc<Region>;
    type Conn = Conn;

    fn longest(&self) -> u64 {
        self.device.longest().clamp(1, LONGEST)
    }

    fn depth(&self) -> Option<usize> {
        Some(self.device.depth())
    }

    fn pieces(&self) -> usize {
        self.device.pieces().min(PIECES)
    }

    fn is_held(known: &Rc<Region>, nics: usize) -> bool {
        known.holders() > nics
    }

    fn address(&mut self) -> Result<Vec<u8>> {
        Ok(self.device.address().to_vec())
    }

    fn watch(&mut self, epoll: &Rc<Epoll>, token: u64) -> Result<bool> {
        self.device.watch(epoll, token).map_err(|error| from_host(Code::InvalidArgument, error))
    }

    fn may_wait(&mut self) -> bool {
        self.device.may_wait()
    }

    fn register(&mut self, memory: RegionMemory) -> Result<(Rc<Region>, NicKey)> {
        let region = match memory {
            RegionMemory::Host(memory) => self.device.register(memory),
            RegionMemory::Device(memory) => self.device.register_device(memory),
        };
        let region = region.map_err(no)?;
        let key = NicKey { key: region.key(), base: region.base() };
        Ok((region, key))
    }

    fn reach(&mut self, session: u64, address: &[u8]) -> Result<Option<Conn>> {
        self.connect(session, address).map(Some)
    }

    /// The address that is known here: a peer that has another one by now has cut the connection to this one.
    fn call(&mut self, _session: u64, address: &[u8]) -> Result<Vec<u8>> {
        Ok(address.to_vec())
    }

    fn connect(&mut self, session: u64, told: &[u8]) -> Result<Conn> {
        if let Some(before) = self.conns.get(&session).copied() {
            self.device.close_conn(before).map_err(lost)?;
            self.conns.remove(&session);
        }
        let conn = self.device.open_conn(told).map_err(lost)?;
        self.conns.insert(session, conn);
        Ok(conn)
    }

    fn disconnect_peer(&mut self, session: u64, _from: u8, told: &[u8]) -> Result<Disconnected> {
        // One by another address was cut before, when the peer had not heard of it yet.
        if self.device.address() != told {
            return Ok(Disconnected::Before);
        }
        self.fence(session).map(|_| Disconnected::All)
    }

    fn admit(&mut self, _session: u64, _from: u8, _told: &[u8]) -> Result<Vec<u8>> {
        self.down().map_or_else(|| self.address(), Err)
    }

    fn leave(&mut self, session: u64, conn: Conn) {
        match self.device.close_conn(conn) {
            Ok(()) => drop(self.conns.remove(&session)),
            Err(error) => log::error!("a connection to a peer stays: {error}"),
        }
    }

    fn post(&mut self, operation: &Operation<'_, Self>) -> Result<Posted> {
        let rma = Rma {
            op: if operation.op == Op::Read { RmaOp::Read } else { RmaOp::Write },
            memory: operation.memory,
            pieces: operation.pieces,
            conn: operation.conn,
            remote: operation.remote,
            key: operation.key,
            token: operation.token,
        };
        self.device.post(&rma).map_err(|error| from_host(Code::PeerLost, error))
    }

    /// Posting begins it.
    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<()> {
        let polled = self.device.poll(&mut self.taken).map_err(lost);
        let ended = self.taken.drain(..);
        done.extend(ended.map(|ended| Done { token: ended.token, result: ended.result.map_err(lost) }));
        polled
    }

    fn down(&self) -> Option<Error> {
        let text = || format!("the plug-in {} says that its device cannot be used now", self.name);
        (!self.device.is_up()).then(|| Error::new(Code::PeerLost, text()))
    }

    fn cancel(&mut self, session: u64) -> Result<CancelScope> {
        let Some(conn) = self.conns.get(&session).copied() else { return Ok(CancelScope::Session) };
        let cut = self.device.cancel(conn).map_err(lost)?;
        Ok(self.closed(session, cut))
    }

    /// All peers share the address.
    fn fence(&mut self, _session: u64) -> Result<bool> {
        self.device.fence().map(|_| true).map_err(lost)
    }

    fn forget(&mut self, session: u64) {
        if let Some(conn) = self.conns.get(&session).copied() {
            self.leave(session, conn);
        }
    }
}
