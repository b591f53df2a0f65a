//! What travels from the owner of pages to those who may use them.
//!
//! A ticket is small whatever the number of pages: it names the engine, the grant, and where to ask. Everything
//! else comes over the control connection. A checksum finds damage; it is no proof of origin, and the grant's id is
//! no substitute for the secret.

use crate::{Code, EngineId, Error, GrantId, HostTag, Incarnation, Result, Right};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

/// More addresses than this are not put into a ticket.
pub const MAX_TICKET_ADDRESSES: usize = 4;
/// Longest text form of a ticket, in bytes.
pub const MAX_TICKET_TEXT: usize = 256;

const PREFIX: &str = "kvik1.";
const FAMILY: &str = "kvik";

/// Names a grant and where its owner is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    /// The owner.
    pub engine: EngineId,
    /// The start of the owner that gave the grant.
    pub incarnation: Incarnation,
    /// The grant.
    pub grant: GrantId,
    /// What it allows.
    pub right: Right,
    /// How long the grant was to live when the ticket was made. The owner alone judges expiry.
    pub expiry: Duration,
    /// Digest of the layout that the pages have at the owner.
    pub layout: [u8; 8],
    /// Where the owner was when it gave the ticket; tells whether its loopback addresses mean the same here.
    pub host: HostTag,
    /// Where the owner listens: at most [`MAX_TICKET_ADDRESSES`].
    pub addresses: Vec<SocketAddr>,
}

impl Ticket {
    /// The same ticket for another grant of the same engine: for a process that hands out grants on the engine's
    /// behalf.
    pub fn with_grant(&self, grant: GrantId, expiry: Duration) -> Ticket {
        Ticket { grant, expiry, ..self.clone() }
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(160);
        bytes.extend_from_slice(&self.engine.0);
        bytes.extend_from_slice(&self.incarnation.0.to_le_bytes());
        bytes.extend_from_slice(&self.grant.0);
        bytes.push(match self.right {
            Right::Read => 0,
            Right::Write => 1,
        });
        let millis = u32::try_from(self.expiry.as_millis()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&millis.to_le_bytes());
        bytes.extend_from_slice(&self.layout);
        bytes.extend_from_slice(&self.host.0);
        for address in self.addresses.iter().take(MAX_TICKET_ADDRESSES) {
            match address.ip() {
                IpAddr::V4(ip) => {
                    bytes.push(4);
                    bytes.extend_from_slice(&ip.octets());
                }
                IpAddr::V6(ip) => {
                    bytes.push(6);
                    bytes.extend_from_slice(&ip.octets());
                }
            }
            bytes.extend_from_slice(&address.port().to_le_bytes());
        }
        let sum = (crate::page_sum(&bytes) as u32).to_le_bytes();
        bytes.extend_from_slice(&sum);
        bytes
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", URL_SAFE_NO_PAD.encode(self.encode()))
    }
}

impl FromStr for Ticket {
    type Err = Error;

    /// # Errors
    /// `TicketVersion` for a ticket of another version, `TicketInvalid` for anything else that is not a whole ticket.
    fn from_str(text: &str) -> Result<Ticket> {
        let text = text.trim();
        let Some(body) = text.strip_prefix(PREFIX) else {
            let version = text.split_once('.').map_or("", |(version, _)| version);
            if version
                .strip_prefix(FAMILY)
                .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
            {
                return Err(Error::new(
                    Code::TicketVersion,
                    format!(
                        "the ticket is of version {version}; this kvik reads kvik1: run the same release on both sides"
                    ),
                ));
            }
            return Err(invalid("it does not begin as a ticket does"));
        };
        if text.len() > MAX_TICKET_TEXT {
            return Err(invalid("it is longer than any ticket"));
        }
        let bytes = URL_SAFE_NO_PAD
            .decode(body)
            .map_err(|_| invalid("it is truncated or holds strange characters"))?;
        let (bytes, sum) = bytes.split_last_chunk::<4>().ok_or_else(|| invalid("it is truncated"))?;
        if (crate::page_sum(bytes) as u32).to_le_bytes() != *sum {
            return Err(invalid("its checksum does not fit: it was truncated or altered"));
        }
        decode(bytes).ok_or_else(|| invalid("its fields make no sense"))
    }
}

fn decode(mut bytes: &[u8]) -> Option<Ticket> {
    fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
        let (head, rest) = bytes.split_first_chunk::<N>()?;
        *bytes = rest;
        Some(*head)
    }
    let engine = EngineId(take(&mut bytes)?);
    let incarnation = Incarnation(u64::from_le_bytes(take(&mut bytes)?));
    let grant = GrantId(take(&mut bytes)?);
    let right = match take::<1>(&mut bytes)? {
        [0] => Right::Read,
        [1] => Right::Write,
        _ => return None,
    };
    let expiry = Duration::from_millis(u32::from_le_bytes(take(&mut bytes)?).into());
    let layout = take(&mut bytes)?;
    let host = HostTag(take(&mut bytes)?);
    let mut addresses = Vec::new();
    while !bytes.is_empty() {
        let ip = match take::<1>(&mut bytes)? {
            [4] => IpAddr::V4(Ipv4Addr::from(take::<4>(&mut bytes)?)),
            [6] => IpAddr::V6(Ipv6Addr::from(take::<16>(&mut bytes)?)),
            _ => return None,
        };
        addresses.push(SocketAddr::new(ip, u16::from_le_bytes(take(&mut bytes)?)));
    }
    let usable = |address: &SocketAddr| !address.ip().is_unspecified() && address.port() != 0;
    let good =
        !addresses.is_empty() && addresses.len() <= MAX_TICKET_ADDRESSES && addresses.iter().all(usable);
    good.then_some(Ticket { engine, incarnation, grant, right, expiry, layout, host, addresses })
}

fn invalid(why: &str) -> Error {
    Error::new(
        Code::TicketInvalid,
        format!("this is not a whole ticket: {why}; pass on the text exactly as the owner's grant gave it"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket(addresses: &[&str]) -> Ticket {
        Ticket {
            engine: EngineId([7; 16]),
            incarnation: Incarnation(42),
            grant: GrantId([9; 16]),
            right: Right::Write,
            expiry: Duration::from_secs(120),
            layout: [1; 8],
            host: HostTag([2; 8]),
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
        }
    }

    #[test]
    fn damage_and_other_versions_are_named() {
        let text = ticket(&["127.0.0.1:4000"]).to_string();
        for cut in 0..text.len() {
            assert!(text[..cut].parse::<Ticket>().is_err(), "cut at {cut}");
        }
        for at in PREFIX.len()..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            let altered = String::from_utf8(bytes).unwrap();
            assert!(altered == text || altered.parse::<Ticket>().is_err(), "altered at {at}");
        }
        assert_eq!(text.replace("kvik1.", "kvik2.").parse::<Ticket>().unwrap_err().code, Code::TicketVersion);
        assert_eq!("hello".parse::<Ticket>().unwrap_err().code, Code::TicketInvalid);
    }

    #[test]
    fn a_wildcard_address_is_no_address() {
        assert!(ticket(&["0.0.0.0:4000"]).to_string().parse::<Ticket>().is_err());
        assert!(ticket(&[]).to_string().parse::<Ticket>().is_err());
    }
}
