//! The cap on what kvik holds for itself, and what counts towards it.

use crate::inner::{Inner, lock};
use kvik_core::{Code, Error, Result};
use kvik_transport::tls::{TLS_CONTROL_BYTES, TLS_DATA_BYTES};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a session is charged from its start: its part of the tables, and buffers as they are without load.
const SESSION_BYTES: u64 = 128 << 10;
/// What a data channel is charged: both directions' trailers, and the checksums of what was placed.
const CHANNEL_BYTES: u64 = 32 << 10;

/// The cap, and how much of it is used.
pub(crate) struct Budget {
    used: Arc<AtomicU64>,
    cap: u64,
}

/// A part of the budget, given back when dropped.
pub(crate) struct Lease {
    used: Arc<AtomicU64>,
    bytes: u64,
}

impl Budget {
    pub fn new(cap: u64) -> Budget {
        Budget { used: Arc::default(), cap }
    }

    pub fn take(&self, bytes: u64, what: &str) -> Result<Lease> {
        let mut lease = Lease { used: self.used.clone(), bytes: 0 };
        self.resize(&mut lease, bytes, what)?;
        Ok(lease)
    }

    /// Makes a lease larger, if the cap allows it, or smaller.
    pub fn resize(&self, lease: &mut Lease, bytes: u64, what: &str) -> Result<()> {
        if bytes <= lease.bytes {
            self.used.fetch_sub(lease.bytes - bytes, Ordering::Relaxed);
            lease.bytes = bytes;
            return Ok(());
        }
        let more = bytes - lease.bytes;
        let before = self.used.fetch_add(more, Ordering::Relaxed);
        if before + more <= self.cap {
            lease.bytes = bytes;
            return Ok(());
        }
        self.used.fetch_sub(more, Ordering::Relaxed);
        Err(Error::new(
            Code::MemoryCapReached,
            format!(
                "{what} takes {}, and kvik already holds {} of its {}: raise `memory_cap`, or let some transfers end",
                kvik_core::format_size(more),
                kvik_core::format_size(before),
                kvik_core::format_size(self.cap)
            ),
        ))
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Inner {
    /// What a session is charged to its end.
    pub fn session_bytes(&self) -> u64 {
        SESSION_BYTES + if self.tls.is_some() { TLS_CONTROL_BYTES } else { 0 }
    }

    /// Charges a session for one data channel more, which it keeps to its end.
    pub fn charge_channel(&self, session: u64) -> Result<()> {
        let more = CHANNEL_BYTES + if self.tls.is_some() { TLS_DATA_BYTES } else { 0 };
        let mut tables = lock(&self.tables);
        let Some(link) = tables.links.get_mut(&session) else { return Ok(()) };
        let bytes = link.lease.bytes + more;
        self.budget.resize(&mut link.lease, bytes, "a data channel")?;
        link.kept += more;
        Ok(())
    }

    /// Charges a session for what its peer makes this process hold now.
    ///
    /// # Errors
    /// `MemoryCapReached`: the session must end, since nothing else makes the peer's requests smaller.
    pub fn charge_peer(&self, session: u64, held: u64) -> Result<()> {
        let mut tables = lock(&self.tables);
        let Some(link) = tables.links.get_mut(&session) else { return Ok(()) };
        let bytes = (link.kept - SESSION_BYTES) + held.max(SESSION_BYTES);
        self.budget.resize(&mut link.lease, bytes, "what a peer has sent and asked for")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_grow_to_the_cap_and_come_back() {
        let budget = Budget::new(1000);
        let mut a = budget.take(400, "a").unwrap();
        let b = budget.take(500, "b").unwrap();
        assert_eq!(budget.take(200, "c").err().unwrap().code, Code::MemoryCapReached);
        assert_eq!(budget.resize(&mut a, 501, "a").unwrap_err().code, Code::MemoryCapReached);
        assert_eq!(budget.used(), 900);
        budget.resize(&mut a, 500, "a").unwrap();
        assert_eq!(budget.used(), 1000);
        budget.resize(&mut a, 1, "a").unwrap();
        drop(b);
        assert_eq!(budget.used(), 1);
        drop(a);
        assert_eq!(budget.used(), 0);
    }
}
