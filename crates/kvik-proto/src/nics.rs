//! What engines tell each other of their NICs, so that one can reach the other's memory.

use crate::wire::{MAX_TEXT, Reader, Writer};
use kvik_core::{Code, Error, Result};

/// Bytes of a provider's name.
const MAX_PROVIDER: usize = 64;
/// Bytes of all addresses with their lengths: a greeting has no room for more. 32 NICs of 32 bytes take 1,088.
pub const MAX_NIC_BYTES: usize = 1536;
/// An engine uses no more NICs than this.
pub const MAX_NICS: usize = 32;

/// The NICs by which an engine is reached one-sidedly. Two engines have a one-sided link when both have NICs of one
/// provider.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nics {
    /// The provider that understands the addresses; empty without one.
    pub provider: String,
    /// Each NIC's address, in the provider's own form.
    pub addresses: Vec<Vec<u8>>,
}

/// How a NIC's peers name exposed memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicKey {
    /// The key of its registration.
    pub key: u64,
    /// What stands for the address of its first byte.
    pub base: u64,
}

/// Bytes of an address that goes with a call or its answer.
const MAX_ADDRESS: usize = 512;

/// What a NIC asks a NIC of the peer for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NicCallKind {
    /// A connection to it. What the asking one could reach there before is cut before this is answered, so that nothing
    /// that it posted earlier can still land.
    Connect,
    /// The key of a page that holds nothing, to try its connection by reading it. This cuts nothing, and opens nothing.
    ProbePage,
}

/// In the byte of the asking NIC's number, of which there are fewer; the second one in answers, from this version on.
const PAGE: u8 = 0x80;
const MOVED: u8 = 0x40;
pub(crate) const MOVES: u16 = 5;

impl NicCallKind {
    fn encode(self, from: u8, w: &mut Writer) -> &mut Writer {
        w.u8(match self {
            NicCallKind::Connect => from & !PAGE,
            NicCallKind::ProbePage => from | PAGE,
        })
    }

    fn decode(r: &mut Reader) -> Result<(u8, NicCallKind)> {
        let byte = r.u8()?;
        Ok((byte & !PAGE, if byte & PAGE == 0 { NicCallKind::Connect } else { NicCallKind::ProbePage }))
    }
}

/// A NIC asks a NIC of the peer for something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicCall {
    /// The number of the NIC that asks, below 128.
    pub from: u8,
    /// The number of the NIC that is asked.
    pub to: u8,
    /// For what.
    pub kind: NicCallKind,
    /// What the asked one needs to know of the other, in the form of what speaks to both.
    pub address: Vec<u8>,
}

/// The answer to a [`NicCall`]; to one for a connection, that nothing posted before it can land any more, whatever the
/// outcome.
#[derive(Debug, Clone)]
pub struct NicAnswer {
    /// The number of the NIC that asked.
    pub from: u8,
    /// The number of the NIC that was asked.
    pub to: u8,
    /// For what.
    pub kind: NicCallKind,
    /// The connection that the call told of was cut before it came: for others, and by no fault of the connection.
    pub moved: bool,
    /// What the asking one needs to know, or why it gets nothing.
    pub outcome: Result<Vec<u8>>,
}

impl NicCall {
    pub(crate) fn encode(&self, w: &mut Writer) {
        self.kind.encode(self.from, w).u8(self.to);
        encode_address(&self.address, w);
    }

    pub(crate) fn decode(r: &mut Reader) -> Result<NicCall> {
        let (from, kind) = NicCallKind::decode(r)?;
        Ok(NicCall { from, to: r.u8()?, kind, address: decode_address(r)? })
    }
}

impl NicAnswer {
    pub(crate) fn encode(&self, w: &mut Writer) {
        self.kind.encode(self.from | if self.moved { MOVED } else { 0 }, w).u8(self.to);
        match &self.outcome {
            Ok(address) => encode_address(address, w.u16(0)),
            Err(error) => drop(w.u16(error.code as u16).text(&error.text, MAX_TEXT)),
        }
    }

    pub(crate) fn decode(r: &mut Reader) -> Result<NicAnswer> {
        let (from, kind) = NicCallKind::decode(r)?;
        let (from, moved, to) = (from & !MOVED, from & MOVED != 0, r.u8()?);
        let outcome = match r.u16()? {
            0 => Ok(decode_address(r)?),
            code => Err(Error::new(Code::from_wire(code), r.text(MAX_TEXT)?)),
        };
        Ok(NicAnswer { from, to, kind, moved, outcome })
    }
}

fn encode_address(address: &[u8], w: &mut Writer) {
    w.u16(address.len() as u16).bytes(address);
}

fn decode_address(r: &mut Reader) -> Result<Vec<u8>> {
    match usize::from(r.u16()?) {
        len if len <= MAX_ADDRESS => Ok(r.take(len)?.to_vec()),
        _ => Err(r.wrong("it has a longer address than a NIC has")),
    }
}

impl Nics {
    /// Whether these NICs and a peer's reach each other.
    pub fn reach(&self, peer: &Nics) -> bool {
        !self.addresses.is_empty() && !peer.addresses.is_empty() && self.provider == peer.provider
    }

    /// Whether a greeting has room for them.
    pub fn fit(&self) -> bool {
        let bytes: usize = self.addresses.iter().map(|address| 2 + address.len()).sum();
        self.addresses.len() <= MAX_NICS && bytes <= MAX_NIC_BYTES && self.provider.len() <= MAX_PROVIDER
    }

    pub(crate) fn encode(&self, w: &mut Writer) {
        w.text(&self.provider, MAX_PROVIDER).u8(self.addresses.len() as u8);
        for address in &self.addresses {
            w.u16(address.len() as u16).bytes(address);
        }
    }

    pub(crate) fn decode(r: &mut Reader) -> Result<Nics> {
        let (provider, count) = (r.text(MAX_PROVIDER)?, usize::from(r.u8()?));
        let mut nics = Nics { provider, addresses: Vec::new() };
        for _ in 0..count {
            let len = usize::from(r.u16()?);
            nics.addresses.push(r.take(len)?.to_vec());
        }
        match nics.fit() {
            true => Ok(nics),
            false => Err(r.wrong("it has more NICs than an engine uses")),
        }
    }
}

pub(crate) fn encode_keys(keys: &[NicKey], w: &mut Writer) {
    w.u8(keys.len() as u8);
    for key in keys {
        w.u64(key.key).u64(key.base);
    }
}

pub(crate) fn decode_keys(r: &mut Reader) -> Result<Vec<NicKey>> {
    let count = usize::from(r.u8()?);
    if count > MAX_NICS {
        return Err(r.wrong("it has keys of more NICs than an engine uses"));
    }
    (0..count).map(|_| Ok(NicKey { key: r.u64()?, base: r.u64()? })).collect()
}
