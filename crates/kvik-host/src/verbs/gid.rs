//! GIDs: the addresses of a port, and which of them to use.

use super::abi;
use super::port::Link;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// What packets look like that are sent from a GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// InfiniBand's own.
    InfiniBand,
    /// Ethernet frames, which no router forwards.
    RoceV1,
    /// UDP, which routers forward.
    RoceV2,
}

impl GidKind {
    /// By the library's number.
    pub(super) fn from_number(number: u32) -> Option<GidKind> {
        match number {
            abi::IBV_GID_TYPE_IB => Some(GidKind::InfiniBand),
            abi::IBV_GID_TYPE_ROCE_V1 => Some(GidKind::RoceV1),
            abi::IBV_GID_TYPE_ROCE_V2 => Some(GidKind::RoceV2),
            _ => None,
        }
    }

    /// The library's number.
    pub(super) fn number(self) -> u32 {
        match self {
            GidKind::InfiniBand => abi::IBV_GID_TYPE_IB,
            GidKind::RoceV1 => abi::IBV_GID_TYPE_ROCE_V1,
            GidKind::RoceV2 => abi::IBV_GID_TYPE_ROCE_V2,
        }
    }

    /// By the kernel's words, in `gid_attrs/types`. The first form means either, by the link.
    pub(super) fn from_words(words: &str, link: Link) -> Option<GidKind> {
        match (words.trim(), link) {
            ("IB/RoCE v1", Link::InfiniBand) => Some(GidKind::InfiniBand),
            ("IB/RoCE v1", Link::Ethernet) => Some(GidKind::RoceV1),
            ("RoCE v2", _) => Some(GidKind::RoceV2),
            _ => None,
        }
    }
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GidKind::InfiniBand => "InfiniBand",
            GidKind::RoceV1 => "RoCE v1",
            GidKind::RoceV2 => "RoCE v2",
        })
    }
}

/// An entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gid {
    /// Its place in the table.
    pub index: u8,
    /// The address.
    pub raw: [u8; 16],
    /// What packets look like.
    pub kind: GidKind,
    /// The network interface behind it; empty where there is none.
    pub interface: String,
}

impl Gid {
    /// The address as one of the internet, which it is on a RoCE port.
    pub fn ip(&self) -> IpAddr {
        ip_of(self.raw)
    }

    /// Whether it means nothing beyond its own link.
    fn is_link_local(&self) -> bool {
        match self.ip() {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            GidKind::InfiniBand => write!(f, "{}: {}", self.index, Ipv6Addr::from(self.raw))?,
            kind => write!(f, "{}: {} {kind}", self.index, self.ip())?,
        }
        match self.interface.as_str() {
            "" => Ok(()),
            interface => write!(f, " ({interface})"),
        }
    }
}

/// A RoCE GID as an address of the internet.
pub(super) fn ip_of(raw: [u8; 16]) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(raw)).to_canonical()
}

/// Chooses from a table: the entry at `index`, if the user names one. Otherwise on InfiniBand the first, and on
/// Ethernet one that means something beyond the link, then RoCE v2, then IPv4. A text says why there is none.
pub(super) fn choose(table: &[Gid], link: Link, index: Option<u8>) -> Result<&Gid, String> {
    let index = match (index, link) {
        (Some(index), _) => Some(index),
        (None, Link::InfiniBand) => Some(0),
        (None, Link::Ethernet) => None,
    };
    if let Some(index) = index {
        let found = table.iter().find(|gid| gid.index == index);
        return found.ok_or_else(|| format!("there is no GID at index {index}; the table: {}", list(table)));
    }
    let rank = |gid: &&Gid| (gid.is_link_local(), gid.kind != GidKind::RoceV2, gid.ip().is_ipv6(), gid.index);
    table.iter().min_by_key(rank).ok_or_else(|| {
        format!(
            "there is no GID; give the network interface an address, or name an index; the table: {}",
            list(table)
        )
    })
}

/// A table in words.
pub(super) fn list(table: &[Gid]) -> String {
    match table {
        [] => "empty".into(),
        table => table.iter().map(Gid::to_string).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, ip: &str, kind: GidKind) -> Gid {
        let raw = match ip.parse().unwrap() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        Gid { index, raw, kind, interface: "eth0".into() }
    }

    /// What a RoCE device with one IPv4 and one IPv6 address has.
    fn roce() -> Vec<Gid> {
        use GidKind::{RoceV1, RoceV2};
        vec![
            gid(0, "fe80::1", RoceV1),
            gid(1, "fe80::1", RoceV2),
            gid(2, "10.0.0.7", RoceV1),
            gid(3, "10.0.0.7", RoceV2),
            gid(4, "2001:db8::7", RoceV1),
            gid(5, "2001:db8::7", RoceV2),
        ]
    }

    fn chosen(table: &[Gid], index: Option<u8>) -> Result<u8, String> {
        choose(table, Link::Ethernet, index).map(|gid| gid.index)
    }

    #[test]
    fn version_two_and_ipv4_come_first() {
        assert_eq!(chosen(&roce(), None), Ok(3));
        assert_eq!(chosen(&roce()[..3], None), Ok(2), "version 1 before link-local");
        assert_eq!(chosen(&roce()[4..], None), Ok(5));
    }

    #[test]
    fn link_local_ones_are_taken_only_where_there_is_nothing_else() {
        assert_eq!(chosen(&roce()[..2], None), Ok(1));
        let table = [gid(0, "169.254.3.4", GidKind::RoceV2), gid(1, "2001:db8::7", GidKind::RoceV1)];
        assert_eq!(chosen(&table, None), Ok(1));
    }

    #[test]
    fn an_index_is_taken_as_it_is() {
        for index in 0..6 {
            assert_eq!(chosen(&roce(), Some(index)), Ok(index));
        }
        let error = chosen(&roce(), Some(9)).unwrap_err();
        for word in ["index 9", "3: 10.0.0.7 RoCE v2 (eth0)", "0: fe80::1 RoCE v1 (eth0)"] {
            assert!(error.contains(word), "{word} in: {error}");
        }
    }

    #[test]
    fn what_is_missing_is_said_with_the_table() {
        let error = chosen(&[], None).unwrap_err();
        assert!(error.contains("no GID") && error.contains("empty"), "{error}");
    }

    #[test]
    fn on_infiniband_it_is_the_first() {
        let table = [gid(0, "fe80::2:c903:0:1", GidKind::InfiniBand), gid(1, "fd00::1", GidKind::InfiniBand)];
        let index = |index| choose(&table, Link::InfiniBand, index).map(|gid| gid.index);
        assert_eq!((index(None), index(Some(1))), (Ok(0), Ok(1)));
    }

    #[test]
    fn the_kernel_has_one_word_for_two_kinds() {
        let kind = |words, link| GidKind::from_words(words, link);
        assert_eq!(kind("IB/RoCE v1\n", Link::InfiniBand), Some(GidKind::InfiniBand));
        assert_eq!(kind("IB/RoCE v1\n", Link::Ethernet), Some(GidKind::RoceV1));
        assert_eq!(kind("RoCE v2\n", Link::Ethernet), Some(GidKind::RoceV2));
        assert_eq!(kind("RoCE v3\n", Link::Ethernet), None);
        for number in 0..3 {
            assert_eq!(GidKind::from_number(number).map(GidKind::number), Some(number));
        }
        assert_eq!(GidKind::from_number(3), None);
    }
}
