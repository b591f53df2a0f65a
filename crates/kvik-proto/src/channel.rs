//! What frames the payload on a data channel: a header before each chunk, and checksums behind it.
//!
//! A chunk describes itself, so channels need no order among each other. Behind the payload comes a trailer:
//! a status (whole, or void when the sender had to stop and filled up with zeros), and one checksum for each
//! unit of the chunk where the transfer has them.

use kvik_core::{Code, Error, Result};

/// Bytes of a chunk's header.
pub const CHUNK_HEADER: usize = 40;
/// Bytes of a trailer without checksums.
pub const TRAILER_STATUS: usize = 8;
/// Bytes of one checksum.
pub const SUM_BYTES: usize = 8;
/// A longer chunk is refused.
pub const MAX_CHUNK: u32 = 4 << 20;
/// More checksums in a chunk are refused, so a trailer is at most 8 KiB.
pub const MAX_SUMS: u32 = 1024;

const MAGIC: [u8; 4] = *b"kvD1";
/// The trailer of a chunk whose payload is what the header says.
pub const STATUS_WHOLE: u64 = 0x656c_6f68_7776_696b;
/// The trailer of a chunk that the sender had to give up.
pub const STATUS_VOID: u64 = 0x6469_6f76_7776_696b;

/// Announces a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHeader {
    /// The session of both sides.
    pub session: u64,
    /// The transfer within the session.
    pub transfer: u64,
    /// Position in the transfer's stream.
    pub position: u64,
    /// Payload bytes.
    pub len: u32,
    /// Checksums in the trailer.
    pub sums: u32,
}

impl ChunkHeader {
    /// The header's bytes.
    pub fn encode(&self) -> [u8; CHUNK_HEADER] {
        let mut bytes = [0; CHUNK_HEADER];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.session.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.transfer.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.position.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.sums.to_le_bytes());
        let check = check(&bytes);
        bytes[36..].copy_from_slice(&check);
        bytes
    }

    /// The header of these bytes.
    ///
    /// # Errors
    /// `ProtocolError` when they are no header, or announce more than a chunk may hold.
    pub fn decode(bytes: &[u8; CHUNK_HEADER]) -> Result<ChunkHeader> {
        let wrong = |why: &str| {
            Error::new(
                Code::ProtocolError,
                format!("the peer sent a damaged chunk header ({why}); the channel is cut"),
            )
        };
        if bytes[..4] != MAGIC || bytes[36..] != check(bytes) {
            return Err(wrong("its mark or checksum does not fit"));
        }
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let (len, sums) = (u32_at(4), u32_at(32));
        if len == 0 || len > MAX_CHUNK || sums > MAX_SUMS {
            return Err(wrong("it announces more than a chunk may hold"));
        }
        Ok(ChunkHeader { session: u64_at(8), transfer: u64_at(16), position: u64_at(24), len, sums })
    }

    /// Bytes of the trailer behind the payload.
    pub fn trailer_bytes(&self) -> usize {
        TRAILER_STATUS + self.sums as usize * SUM_BYTES
    }
}

fn check(bytes: &[u8; CHUNK_HEADER]) -> [u8; 4] {
    (kvik_core::page_sum(&bytes[..36]) as u32).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_and_damage_is_seen() {
        let header = ChunkHeader { session: 1, transfer: 2, position: 1 << 40, len: 4096, sums: 3 };
        let bytes = header.encode();
        assert_eq!(ChunkHeader::decode(&bytes).unwrap(), header);
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(ChunkHeader::decode(&damaged).is_err(), "bit {bit}");
        }
        let long = ChunkHeader { len: MAX_CHUNK + 1, ..header };
        assert!(ChunkHeader::decode(&long.encode()).is_err());
    }
}
