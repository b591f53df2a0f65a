//! The cap on what kvik holds for itself, and what counts towards it.

use kvik_core::{Code, Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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

impl Lease {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
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
