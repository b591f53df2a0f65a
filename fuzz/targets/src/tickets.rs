//! Tickets: they come through clients and proxies as text.

use crate::feed;
use crate::most_held;
use arbitrary::Unstructured;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use kvik_core::{
    EngineId, GrantId, HostTag, Incarnation, MAX_TICKET_ADDRESSES, MAX_TICKET_TEXT, Right, Ticket, page_sum,
    parse_size,
};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Text as it is, bytes behind an honest checksum, or a ticket that is built and must come back.
pub fn ticket(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    match mode % 3 {
        0 => {
            let text = String::from_utf8_lossy(data);
            check(&text);
            // What else people write, as text of the same kind.
            let _ = (parse_size(&text), GrantId::from_hex(&text), EngineId::from_hex(&text));
        }
        1 => {
            let mut bytes = data.to_vec();
            bytes.extend((page_sum(data) as u32).to_le_bytes());
            check(&format!("kvik1.{}", URL_SAFE_NO_PAD.encode(bytes)));
        }
        _ => drop(built(&mut Unstructured::new(data))),
    }
}

fn check(text: &str) {
    let (ticket, held) = most_held(|| text.parse::<Ticket>());
    assert!(held <= 4 * text.len() + 4096, "{held} bytes for a ticket of {}", text.len());
    let Ok(ticket) = ticket else { return };
    assert!(text.trim().len() <= MAX_TICKET_TEXT);
    assert_eq!(ticket.to_string(), text.trim(), "a ticket has one text");
}

fn built(u: &mut Unstructured) -> arbitrary::Result<()> {
    let mut addresses = Vec::new();
    for _ in 0..u.int_in_range(1..=MAX_TICKET_ADDRESSES)? {
        let ip: IpAddr =
            if u.arbitrary()? { u.arbitrary::<[u8; 4]>()?.into() } else { u.arbitrary::<[u8; 16]>()?.into() };
        if !ip.is_unspecified() {
            addresses.push(SocketAddr::new(ip, u.int_in_range(1..=u16::MAX)?));
        }
    }
    if addresses.is_empty() {
        return Ok(());
    }
    let ticket = Ticket {
        engine: EngineId(u.arbitrary()?),
        incarnation: Incarnation(u.arbitrary()?),
        grant: GrantId(u.arbitrary()?),
        right: if u.arbitrary()? { Right::Read } else { Right::Write },
        expiry: Duration::from_millis(feed::small(u)?.into()),
        layout: u.arbitrary()?,
        host: HostTag(u.arbitrary()?),
        addresses,
    };
    assert_eq!(ticket.to_string().parse::<Ticket>().expect("a whole ticket"), ticket);
    Ok(())
}
