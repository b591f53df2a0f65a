//! What two queue pairs must know of each other to be connected, as bytes. The bytes of a peer are checked, each field.

use super::gid::GidKind;
use super::port::{Link, mtu_bytes};

/// Bytes of an encoded address.
const LEN: usize = 32;
/// The layout below.
const VERSION: u8 = 1;
/// Numbers of queue pairs and packets have 24 bits.
const BITS_24: u32 = (1 << 24) - 1;

pub use crate::error::AddressError;

/// A queue pair, as a peer needs to know it.
///
/// Encoded, little-endian: version (1 byte), link (1 InfiniBand, 2 Ethernet), code of the MTU (1), reads that
/// it answers at a time (1), number of the queue pair (4), first packet number (4), LID (2), kind of the GID
/// (1), zero (1), GID (16).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueAddress {
    /// What carries the packets.
    pub link: Link,
    /// The library's code of the port's MTU, 1 (256 bytes) to 5 (4096).
    pub(super) mtu_code: u8,
    /// Reads that it answers at a time.
    pub reads: u8,
    /// The number of the queue pair, of 24 bits, in its device.
    pub number: u32,
    /// The number of the first packet that it sends, of 24 bits.
    pub first_packet: u32,
    /// The port's local identifier; 0 on Ethernet.
    pub lid: u16,
    /// What packets look like.
    pub kind: GidKind,
    /// The GID.
    pub gid: [u8; 16],
}

impl QueueAddress {
    /// Bytes of payload in a packet, at most.
    pub fn mtu(&self) -> usize {
        mtu_bytes(self.mtu_code.into())
    }

    /// As a peer takes it.
    pub fn encode(&self) -> Vec<u8> {
        let link = match self.link {
            Link::InfiniBand => 1,
            Link::Ethernet => 2,
        };
        let mut bytes = vec![VERSION, link, self.mtu_code, self.reads];
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.first_packet.to_le_bytes());
        bytes.extend(self.lid.to_le_bytes());
        bytes.extend([self.kind.number() as u8, 0]);
        bytes.extend(self.gid);
        debug_assert_eq!(bytes.len(), LEN);
        bytes
    }

    /// Reads what a peer gave.
    ///
    /// # Errors
    /// Which field is wrong.
    pub fn decode(bytes: &[u8]) -> Result<QueueAddress, AddressError> {
        let no = |text: String| Err(AddressError(text));
        match bytes.first() {
            Some(&VERSION) => {}
            Some(version) => {
                let text = format!("its version is {version}, and this kvik knows {VERSION}");
                return no(format!("{text}; let both sides run releases next to each other"));
            }
            None => return no("it is empty".into()),
        }
        let Ok(&bytes) = <&[u8; LEN]>::try_from(bytes) else {
            return no(format!("it has {} bytes where version {VERSION} has {LEN}", bytes.len()));
        };
        let [_, link, mtu_code, reads, n0, n1, n2, n3, p0, p1, p2, p3, l0, l1, kind, zero, gid @ ..] = bytes;
        let link = match link {
            1 => Link::InfiniBand,
            2 => Link::Ethernet,
            other => {
                return no(format!("its link layer is {other}, which is neither InfiniBand nor Ethernet"));
            }
        };
        let Some(kind) = GidKind::from_number(kind.into()) else {
            return no(format!("its GID is of kind {kind}, which nobody knows"));
        };
        let address = QueueAddress {
            link,
            mtu_code,
            reads,
            number: u32::from_le_bytes([n0, n1, n2, n3]),
            first_packet: u32::from_le_bytes([p0, p1, p2, p3]),
            lid: u16::from_le_bytes([l0, l1]),
            kind,
            gid,
        };
        if zero != 0 {
            return no(format!("byte 15 is {zero} where version {VERSION} has 0"));
        }
        address.check().map_err(AddressError).map(|()| address)
    }

    fn check(&self) -> Result<(), String> {
        if !(1..=5).contains(&self.mtu_code) {
            return Err(format!("its MTU has code {}, which is not 1 to 5", self.mtu_code));
        }
        // 0 and 1 are the subnet manager's queue pairs.
        if !(2..BITS_24).contains(&self.number) {
            return Err(format!("its number {:#x} is none of a queue pair", self.number));
        }
        if self.first_packet > BITS_24 {
            return Err(format!("its first packet number {:#x} has more than 24 bits", self.first_packet));
        }
        if (self.link == Link::InfiniBand) != (self.kind == GidKind::InfiniBand) {
            return Err(format!("a {} GID does not go with a link layer of {}", self.kind, self.link));
        }
        if self.link == Link::Ethernet && (self.gid == [0; 16] || self.gid[0] == 0xFF) {
            return Err("its GID is zero or multicast".into());
        }
        // From 0xC000 on are multicast groups.
        if self.link == Link::InfiniBand && !(1..0xC000).contains(&self.lid) {
            return Err(format!("its LID {:#x} is none of one port", self.lid));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> QueueAddress {
        QueueAddress {
            link: Link::Ethernet,
            mtu_code: 3,
            reads: 16,
            number: 0x01_2345,
            first_packet: 0xFF_FFFF,
            lid: 0,
            kind: GidKind::RoceV2,
            gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 9, 0, 1],
        }
    }

    fn refused(change: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut bytes = address().encode();
        change(&mut bytes);
        QueueAddress::decode(&bytes).unwrap_err().to_string()
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let infiniband =
            QueueAddress { link: Link::InfiniBand, kind: GidKind::InfiniBand, lid: 7, ..address() };
        for address in [address(), infiniband] {
            let bytes = address.encode();
            assert_eq!(bytes.len(), LEN);
            assert_eq!(QueueAddress::decode(&bytes), Ok(address));
        }
        assert_eq!(address().mtu(), 1024);
    }

    #[test]
    fn the_layout_is_what_peers_of_this_version_have() {
        let bytes = [
            1, 2, 3, 16, 0x45, 0x23, 1, 0, 0xFF, 0xFF, 0xFF, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0xFF, 0xFF, 10, 9, 0, 1,
        ];
        assert_eq!(address().encode(), bytes);
    }

    #[test]
    fn each_wrong_field_is_named() {
        assert!(refused(|bytes| bytes.clear()).contains("empty"));
        assert!(refused(|bytes| bytes[0] = 9).contains("version is 9"));
        assert!(refused(|bytes| bytes.truncate(31)).contains("31 bytes"));
        assert!(refused(|bytes| bytes.push(0)).contains("33 bytes"));
        assert!(refused(|bytes| bytes[1] = 3).contains("link layer is 3"));
        assert!(refused(|bytes| bytes[1] = 1).contains("RoCE v2 GID"));
        assert!(refused(|bytes| bytes[2] = 0).contains("MTU"));
        assert!(refused(|bytes| bytes[2] = 6).contains("MTU"));
        assert!(refused(|bytes| bytes[7] = 1).contains("0x1012345"));
        assert!(refused(|bytes| bytes[4..8].fill(0)).contains("0x0"));
        assert!(refused(|bytes| bytes[11] = 1).contains("24 bits"));
        assert!(refused(|bytes| bytes[14] = 3).contains("kind 3"));
        assert!(refused(|bytes| bytes[15] = 1).contains("byte 15"));
        assert!(refused(|bytes| bytes[16..].fill(0)).contains("zero or multicast"));
        assert!(refused(|bytes| bytes[16] = 0xFF).contains("zero or multicast"));
        let lid = refused(|bytes| {
            bytes[1] = 1;
            bytes[14] = 0;
            bytes[12..14].copy_from_slice(&0xC000u16.to_le_bytes());
        });
        assert!(lid.contains("LID 0xc000"), "{lid}");
    }

    #[test]
    fn no_bytes_of_a_peer_are_too_strange() {
        let mut random = vec![0u8; 1 << 16];
        getrandom::fill(&mut random).unwrap();
        let (mut whole, mut taken) = (address().encode(), 0);
        for chunk in random.chunks_exact(40) {
            let len = usize::from(chunk[0]) % 40;
            let _ = QueueAddress::decode(&chunk[1..1 + len.min(39)]);
            // One byte of a good one changed: what is taken is what its bytes say.
            let at = usize::from(chunk[1]) % LEN;
            let kept = std::mem::replace(&mut whole[at], chunk[2]);
            if let Ok(address) = QueueAddress::decode(&whole) {
                assert_eq!(address.encode(), whole);
                taken += 1;
            }
            whole[at] = kept;
        }
        assert!(taken > 0);
    }
}
