//! What the NICs of an engine share with each other and with their pool.

use crate::basics::lock;
use kvik_proto::Nics;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// What an engine's NICs share.
#[derive(Default)]
pub(crate) struct Told {
    /// What peers are told of them.
    nics: Mutex<Nics>,
    /// Transfers for which peers may reach memory here.
    exposed: AtomicUsize,
}

impl Told {
    pub fn set(&self, nics: Nics) {
        *lock(&self.nics) = nics;
    }

    pub fn nics(&self) -> Nics {
        lock(&self.nics).clone()
    }

    /// For so many transfers peers may reach memory here: whether they could not before.
    pub fn expose(&self, transfers: usize) -> bool {
        self.exposed.swap(transfers, Ordering::AcqRel) == 0 && transfers > 0
    }

    /// A NIC is reached at another address from now on: what peers are told.
    pub fn moved(&self, number: usize, address: Vec<u8>) -> Nics {
        let mut nics = lock(&self.nics);
        if let Some(known) = nics.addresses.get_mut(number) {
            *known = address;
        }
        nics.clone()
    }

    /// Whether peers may reach memory here now: a NIC's thread looks after that.
    pub fn is_exposed(&self) -> bool {
        self.exposed.load(Ordering::Acquire) > 0
    }
}

/// Which NICs cannot reach a session's peer for the time being.
pub(super) struct Unreachable {
    nics: usize,
    sessions: Mutex<HashMap<u64, u32>>,
}

impl Unreachable {
    pub fn new(nics: usize) -> Arc<Unreachable> {
        Arc::new(Unreachable { nics, sessions: Mutex::default() })
    }

    /// How many NICs there are.
    pub fn nics(&self) -> usize {
        self.nics
    }

    /// This NIC cannot: whether another may still.
    pub fn mark(&self, session: u64, nic: usize) -> bool {
        let mut sessions = lock(&self.sessions);
        let unreachable = sessions.entry(session).or_default();
        *unreachable |= 1 << nic;
        (unreachable.count_ones() as usize) < self.nics
    }

    /// It may try all of them again.
    pub fn clear_nic(&self, nic: usize) {
        lock(&self.sessions).retain(|_, unreachable| {
            *unreachable &= !(1 << nic);
            *unreachable != 0
        });
    }

    /// It may try again, or need not any more.
    pub fn clear(&self, session: u64, nic: usize) {
        let mut sessions = lock(&self.sessions);
        if let Some(unreachable) = sessions.get_mut(&session) {
            *unreachable &= !(1 << nic);
            if *unreachable == 0 {
                sessions.remove(&session);
            }
        }
    }
}
