//! Serving blocks: a get's way from slots to the client's pages.
//!
//! Invariants:
//! - What is lent is pinned until its grant has ended, however it ends.
//! - Only resident blocks are lent, in the order of the keys, from the first one on without a gap.

use crate::BlockKey;
use crate::index::Id;
use crate::state::State;
use crate::store::{Store, check_keys};
use crate::wire::{Ahead, MAX_GROUPS};
use kvik_core::{Result, Right, Ticket, Use};
use kvik_engine::{Grant, GrantOptions, PageSet};
use std::sync::MutexGuard;
use std::time::Duration;

/// Blocks that one client may read.
pub(crate) struct Loan {
    /// Of each block the group that it is in, and its checksum. Blocks of a group have its positions in their order.
    pub blocks: Vec<(u16, u64)>,
    pub groups: Vec<Lent>,
}

/// Blocks of one slab under one grant.
pub(crate) struct Lent {
    pub grant: Grant,
    _pins: Pins,
}

impl Lent {
    pub fn ticket(&self) -> &Ticket {
        self.grant.ticket()
    }
}

/// Keeps blocks where they are.
struct Pins {
    store: Store,
    ids: Vec<Id>,
}

impl Drop for Pins {
    fn drop(&mut self) {
        let mut state = self.store.state();
        self.ids.iter().for_each(|id| state.unpin(*id));
    }
}

impl Store {
    /// Lends the longest run of blocks that are in memory, from the first key on. A single block is lent as a client has
    /// asked for it `ahead`, where its pages are as that takes them to be.
    ///
    /// # Errors
    /// `InvalidArgument` for no keys, too many, or a grant that was asked for twice; what granting says.
    pub fn lend(
        &self,
        mut state: MutexGuard<'_, State>,
        namespace: u16,
        keys: &[BlockKey],
        expiry: Duration,
        ahead: Option<&Ahead>,
    ) -> Result<Loan> {
        check_keys(keys)?;
        let mut found: Vec<Id> = Vec::new();
        let mut blocks = Vec::new();
        let mut slabs: Vec<(u16, Vec<u32>, Pins)> = Vec::new();
        for key in keys {
            if slabs.len() >= MAX_GROUPS {
                break;
            }
            let Some(id) = state.index.find(namespace, key) else { break };
            let Some(slot) = state.pin(id) else { break };
            let group = slabs.iter().position(|(slab, ..)| *slab == slot.slab).unwrap_or_else(|| {
                slabs.push((slot.slab, Vec::new(), Pins { store: self.clone(), ids: Vec::new() }));
                slabs.len() - 1
            });
            let (_, slots, pins) = &mut slabs[group];
            slots.push(slot.slot);
            pins.ids.push(id);
            blocks.push((group as u16, state.index.node(id).sum));
            found.push(id);
        }
        state.touch(namespace, &found, false);
        state.counts.hits += found.len() as u64;
        let pages: Result<Vec<_>> =
            slabs.iter().map(|(slab, slots, _)| state.slabs.pages(*slab, slots.as_slice().into())).collect();
        drop(state);
        let ahead = ahead.filter(|_| blocks.len() == 1);
        let groups: Result<Vec<Lent>> = pages?
            .iter()
            .zip(slabs)
            .map(|(pages, (_, _, pins))| self.lent(pages, pins, expiry, ahead))
            .collect();
        Ok(Loan { blocks, groups: groups? })
    }

    fn lent(&self, pages: &PageSet, pins: Pins, expiry: Duration, ahead: Option<&Ahead>) -> Result<Lent> {
        let options = GrantOptions {
            right: Right::Read,
            uses: Use::Once(1),
            expiry,
            max_expiry: expiry,
            id: ahead.filter(|ahead| ahead.layout == pages.layout_digest()).map(|ahead| ahead.grant),
            ..GrantOptions::default()
        };
        let grant = self.engine().grant(pages, options)?;
        Ok(Lent { grant, _pins: pins })
    }
}
