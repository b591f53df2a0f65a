//! Names of engines, their starts, grants and regions.

use crate::{Code, Error, Result};
use std::fmt;
use std::net::SocketAddr;

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; 16]);

        impl $name {
            /// A new one from the system's random source.
            pub fn random() -> Result<Self> {
                let mut bytes = [0; 16];
                fill_random(&mut bytes)?;
                Ok($name(bytes))
            }

            /// From 32 hexadecimal digits.
            pub fn from_hex(text: &str) -> Result<Self> {
                parse_hex(text).map($name).ok_or_else(|| {
                    Error::new(Code::InvalidArgument, format!("{text:?} is not an id: it takes 32 hexadecimal digits"))
                })
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

random_id! {
    /// Names one engine by its place: an engine that is started again at the same addresses of a host keeps it,
    /// and has another [`Incarnation`]. No two engines that run share one.
    EngineId
}

impl EngineId {
    /// The id of the engine at these addresses, in one boot of a host (the kernel's `boot_id`) and one network
    /// namespace (its inode number): there, only one engine at a time can listen on an address.
    pub fn at(boot_id: &[u8; 16], network_namespace: u64, addresses: &[SocketAddr]) -> EngineId {
        let mut hasher = blake3::Hasher::new_derive_key("kvik engine id v1");
        hasher.update(boot_id);
        hasher.update(&network_namespace.to_le_bytes());
        for address in addresses {
            let text = address.to_string();
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        let mut id = [0; 16];
        hasher.finalize_xof().fill(&mut id);
        EngineId(id)
    }
}

random_id! {
    /// Names one grant: 128 random bits, so that it cannot be guessed.
    GrantId
}

/// The start of an engine that an id belongs to; a restarted engine has another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u64);

impl Incarnation {
    /// A new one from the system's random source.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 8];
        fill_random(&mut bytes)?;
        Ok(Incarnation(u64::from_le_bytes(bytes)))
    }
}

/// Names a region within its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u32);

/// Eight bytes that are equal for two engines only if they run on one boot of one host and in one network
/// namespace, so that a loopback address of one means the same to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostTag(pub [u8; 8]);

impl HostTag {
    /// The tag of a boot (the kernel's `boot_id`) and a network namespace (its inode number).
    pub fn new(boot_id: &[u8; 16], network_namespace: u64) -> HostTag {
        let mut hasher = blake3::Hasher::new_derive_key("kvik host tag v1");
        hasher.update(boot_id);
        hasher.update(&network_namespace.to_le_bytes());
        let mut tag = [0; 8];
        hasher.finalize_xof().fill(&mut tag);
        HostTag(tag)
    }
}

fn fill_random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|error| {
        Error::new(Code::InvalidArgument, format!("the system's random source failed ({error}); ids need it"))
    })
}

fn parse_hex(text: &str) -> Option<[u8; 16]> {
    let digits = text.as_bytes();
    if digits.len() != 32 {
        return None;
    }
    let mut bytes = [0; 16];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let high = char::from(pair[0]).to_digit(16)?;
        let low = char::from(pair[1]).to_digit(16)?;
        *byte = (high * 16 + low) as u8;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_comes_back() {
        let id = GrantId::random().unwrap();
        assert_eq!(GrantId::from_hex(&id.to_string()).unwrap(), id);
        assert!(GrantId::from_hex("xyz").is_err());
        assert!(GrantId::from_hex(&"é".repeat(16)).is_err());
    }

    #[test]
    fn an_engine_is_where_it_listens() {
        let address = |port| vec![SocketAddr::from(([10, 0, 0, 1], port))];
        let here = EngineId::at(&[1; 16], 1, &address(5000));
        assert_eq!(here, EngineId::at(&[1; 16], 1, &address(5000)));
        assert_ne!(here, EngineId::at(&[1; 16], 1, &address(5001)));
        assert_ne!(here, EngineId::at(&[2; 16], 1, &address(5000)));
        assert_ne!(here, EngineId::at(&[1; 16], 2, &address(5000)));
        assert_ne!(here, EngineId::at(&[1; 16], 1, &[address(5000), address(5000)].concat()));
    }

    #[test]
    fn another_boot_or_namespace_is_another_host() {
        let here = HostTag::new(&[1; 16], 1);
        assert_eq!(here, HostTag::new(&[1; 16], 1));
        assert_ne!(here, HostTag::new(&[2; 16], 1));
        assert_ne!(here, HostTag::new(&[1; 16], 2));
    }
}
