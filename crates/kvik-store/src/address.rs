//! Addresses of servers as people write them.

use kvik_core::{Code, Error, Result};

/// Divides `host:port`; an IPv6 address is in brackets.
///
/// # Errors
/// `InvalidArgument` for what is none.
pub(crate) fn host_and_port(text: &str) -> Result<(&str, u16)> {
    let parts = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    match parts {
        Some((host, port @ 1..)) if is_host(host) => Ok((host, port)),
        _ => {
            let text = format!("{text:?} is no address: write HOST:PORT, and an IPv6 address in brackets");
            Err(Error::new(Code::InvalidArgument, text))
        }
    }
}

/// Names come from lists that others write, and are logged and shown.
fn is_host(host: &str) -> bool {
    let is_one = !host.contains(':') || (host.starts_with('[') && host.ends_with(']'));
    !host.is_empty() && is_one && !host.contains(char::is_control)
}
