//! Bringing blocks: a put's way from the client's pages into slots.
//!
//! Invariants:
//! - The store pulls: a client lends its pages for reading and never has a key to write here.
//! - A slot is published or free only after every transfer into it has ended.
//! - What is published was summed after it arrived; what is served later is compared with that.

use crate::BlockKey;
use crate::figures::{Cause, Where};
use crate::index::{Id, Life, Node};
use crate::removing::Removing;
use crate::state::{Filling, Reserved};
use crate::store::{Store, check_keys};
use crate::sums::{summed_layers, sums_after};
use crate::unsaid::Removed;
use crate::windows::Windows;
use kvik_core::{Class, Result, Ticket};
use kvik_engine::{PageSet, Transfer, TransferOptions};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What became of the blocks of a put.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stored {
    /// Blocks that are in the store by this put.
    pub stored: u64,
    /// Blocks that were there, or that somebody else was bringing.
    pub known: u64,
    /// Blocks that the store did not take.
    pub refused: u64,
}

/// Blocks that a put is to bring.
pub(crate) struct Reservation {
    store: Store,
    namespace: u16,
    parent: Option<BlockKey>,
    keys: Vec<BlockKey>,
    /// With the place of each among the keys.
    new: VecDeque<(u32, Filling)>,
    found: Stored,
}

/// Blocks whose bytes are on their way.
struct Window {
    store: Store,
    groups: Vec<Group>,
}

/// Blocks of one slab.
struct Group {
    pages: PageSet,
    fillings: Vec<Filling>,
    transfer: Transfer,
}

impl Store {
    /// Looks at the blocks of a put, which follow one another behind `parent`. Those that are new are to be brought, and
    /// those below from the first one on that its tier does not give at present: no get goes beyond that. Of a put that is
    /// to be durable also those that the log does not have and memory neither.
    ///
    /// # Errors
    /// `InvalidArgument` for no keys, or too many; the machine has no memory.
    pub fn reserve(
        &self,
        namespace: u16,
        parent: Option<BlockKey>,
        keys: &[BlockKey],
        durable: bool,
    ) -> Result<Reservation> {
        check_keys(keys)?;
        let pulse = self.below().map(|below| &below.pulse);
        let stopped = pulse.is_some_and(|pulse| pulse.left().is_zero());
        let shut = self.far().is_some_and(|far| far.objects.is_shut());
        let (store, keys) = (self.clone(), keys.to_vec());
        let mut all =
            Reservation { store, namespace, parent, keys, new: VecDeque::new(), found: Stored::default() };
        let mut state = self.state();
        let mut before = None;
        if let Some(parent) = parent {
            before = state.index.find(namespace, &parent);
            if before.is_none() {
                // What comes after a block that is not here would be found by nobody.
                all.found.refused = all.keys.len() as u64;
                state.figures.refuse(Cause::ParentMissing, all.found.refused);
                return Ok(all);
            }
        }
        let mut again = false;
        for (at, key) in all.keys.iter().enumerate() {
            let is_brought = |below: &Node| {
                let hangs = || pulse.is_some_and(|pulse| pulse.left_of(below.place).is_zero());
                let gives_none = if below.place != 0 { stopped || hangs() } else { shut };
                if below.life == Life::Loading {
                    // Of an object store a read ends by itself.
                    return below.place != 0 && gives_none;
                }
                again |= below.failed || gives_none;
                again || (durable && below.place == 0)
            };
            match state.reserve(namespace, before, *key, is_brought) {
                Ok(Reserved::Here) => all.found.known += 1,
                Ok(Reserved::Busy) => {
                    all.found.known += 1;
                    state.figures.waits += 1;
                }
                Ok(Reserved::New(filling)) => all.new.push_back((at as u32, filling)),
                other => {
                    // Of what comes behind, the policy is to know that it was asked for: it is admitted as a whole.
                    state.ask_for(namespace, &all.keys[at + 1..]);
                    all.found.refused = (all.keys.len() - at) as u64;
                    if let Ok(Reserved::NoRoom(cause)) = other {
                        state.figures.refuse(cause, all.found.refused);
                    }
                    drop(state);
                    return other.map(|_| all);
                }
            }
            before = state.index.find(namespace, key);
        }
        state.counts.known += all.found.known;
        drop(state);
        Ok(all)
    }
}

impl Reservation {
    /// Reads the blocks from the pages of a ticket, of which there is one for each key of the put, and publishes each
    /// as soon as it is whole: then `published` is told.
    ///
    /// # Errors
    /// Why a transfer failed. What was published by then stays; the rest is as if it had never been asked for.
    pub fn pull(
        mut self,
        ticket: &Ticket,
        until: Instant,
        published: impl Fn(Vec<(Id, BlockKey)>),
    ) -> Result<Stored> {
        let mut windows = Windows::new(self.store.state().tenants.shape(self.namespace).bytes());
        let mut ahead = VecDeque::new();
        let mut stored = 0;
        loop {
            while windows.has_room() && !self.new.is_empty() {
                let count = windows.blocks().min(self.new.len());
                windows.begun(count);
                ahead.push_back((count, self.begin(count, ticket, until)?));
            }
            let Some((count, window)) = ahead.pop_front() else { break };
            let blocks = window.finish()?;
            windows.ended(count);
            stored += blocks.len() as u64;
            published(blocks);
        }
        let mut state = self.store.state();
        state.counts.stored += stored;
        let namespace = self.namespace;
        let keys = self.parent.iter().chain(&self.keys);
        let here: Vec<Id> = keys.filter_map(|key| state.index.find(namespace, key)).collect();
        state.touch(namespace, &here, true);
        drop(state);
        let refused = self.keys.len() as u64 - self.found.known - stored;
        // The policy knows of all of them.
        self.keys.clear();
        Ok(Stored { stored, refused, ..self.found })
    }

    /// Begins to read the next window, of `count` blocks.
    fn begin(&mut self, count: usize, ticket: &Ticket, until: Instant) -> Result<Window> {
        let mut slabs: Vec<(u16, Vec<u32>, Vec<Filling>)> = Vec::new();
        for (at, filling) in self.new.drain(..count) {
            match slabs.iter_mut().find(|(slab, ..)| *slab == filling.slot.slab) {
                Some((_, places, fillings)) => {
                    places.push(at);
                    fillings.push(filling);
                }
                None => slabs.push((filling.slot.slab, vec![at], vec![filling])),
            }
        }
        let mut window = Window { store: self.store.clone(), groups: Vec::new() };
        let mut failed = None;
        for (slab, places, fillings) in slabs {
            if failed.is_some() {
                abandon(fillings, &self.store);
                continue;
            }
            match self.read(slab, &fillings, places, ticket, until) {
                Ok((pages, transfer)) => window.groups.push(Group { pages, fillings, transfer }),
                Err(error) => {
                    abandon(fillings, &self.store);
                    failed = Some(error);
                }
            }
        }
        failed.map_or(Ok(window), Err)
    }

    fn read(
        &self,
        slab: u16,
        fillings: &[Filling],
        places: Vec<u32>,
        ticket: &Ticket,
        until: Instant,
    ) -> Result<(PageSet, Transfer)> {
        let slots: Arc<[u32]> = fillings.iter().map(|filling| filling.slot.slot).collect();
        let pages = self.store.state().slabs.pages(slab, slots)?;
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let options = TransferOptions {
            class: Class::Bulk,
            deadline: Some(left),
            confirm: Some(false),
            sums: Some(summed_layers(&pages)?),
            ..TransferOptions::default()
        };
        let transfer = self.store.engine().read(&pages, ticket, Some(places.into()), options)?;
        Ok((pages, transfer))
    }
}

impl Window {
    /// Waits for the bytes, sums and publishes them: which blocks.
    fn finish(mut self) -> Result<Vec<(Id, BlockKey)>> {
        let mut stored = Vec::new();
        while !self.groups.is_empty() {
            let mut group = self.groups.remove(0);
            let sums = group.transfer.wait(None).and_then(|read| sums_after(&read, &group.pages));
            let sums = match sums {
                Ok(sums) => sums,
                Err(error) => {
                    self.groups.push(group);
                    return Err(error);
                }
            };
            let mut state = self.store.state();
            for (filling, sum) in group.fillings.drain(..).zip(sums) {
                let id = filling.id;
                if state.publish(filling, sum) {
                    stored.push((id, state.index.node(id).key));
                }
            }
            drop(state);
            self.store.note_change();
        }
        Ok(stored)
    }
}

impl Drop for Window {
    /// Nothing may land in a slot that is free.
    fn drop(&mut self) {
        for group in self.groups.drain(..) {
            group.transfer.cancel();
            // Its outcome is of no interest any more: when this returns, nothing on this side touches the slots.
            drop(group.transfer.wait(None));
            abandon(group.fillings, &self.store);
        }
    }
}

impl Drop for Reservation {
    /// What was not brought is not there; what was is like any other, also where the put failed later.
    fn drop(&mut self) {
        let left = self.new.drain(..).map(|(_, filling)| filling).collect();
        abandon(left, &self.store);
        let mut state = self.store.state();
        for key in self.keys.iter().rev() {
            if let Some(id) = state.index.find(self.namespace, key) {
                state.list(id);
            }
        }
    }
}

/// The bytes of these did not come. From the last one to the first: those behind go before their parents.
fn abandon(fillings: Vec<Filling>, store: &Store) {
    let mut state = store.state();
    state.figures.refuse(Cause::Lost, fillings.len() as u64);
    let mut removed = Vec::new();
    for filling in fillings.into_iter().rev() {
        let key = state.index.node(filling.id).key;
        let tiers = [Where::Log, Where::Object];
        removed.extend(
            tiers
                .into_iter()
                .filter(|tier| state.unsaid.of(*tier).has(&Removed::Block(key)))
                .map(|tier| (tier, key)),
        );
        state.abandon(filling);
    }
    drop(state);
    Removing(store).soon(removed);
    store.note_change();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Place;
    use crate::pulse::tests::age;
    use crate::write::tests::{KEY, durable, fill, open, put, write};

    #[test]
    fn a_put_of_what_does_not_come_from_below_brings_it_or_leaves_it_there() {
        let folder = std::env::temp_dir().join(format!("kvik-store-again-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&folder));
        let store = open(&folder);
        write(&store, put(&store), |_| {});
        drop(store);
        let store = open(&folder);
        let found = |store: &Store| {
            let reservation = store.reserve(0, None, &[KEY], false).unwrap();
            (reservation.found.known, reservation.new.len())
        };
        assert_eq!(found(&store), (1, 0));
        // Its read hangs, and the disk gives something all the same.
        let (place, pulse) = (store.state().index.ids().next().unwrap(), &store.below().unwrap().pulse);
        let place = store.state().index.node(place).place;
        let (hangs, other) = (pulse.begin(place), pulse.begin(place + 1));
        pulse.end(other);
        age(pulse);
        assert_eq!(found(&store), (0, 1));
        pulse.end(hangs);
        let id = store.state().index.find(0, &KEY).unwrap();
        store.state().index.node_mut(id).failed = true;
        // A reservation that is dropped has brought nothing.
        assert_eq!((found(&store), found(&store)), ((0, 1), (0, 1)));
        assert_eq!(store.state().index.node(id).life, Life::Below);
        let mut reservation = store.reserve(0, None, &[KEY], false).unwrap();
        let (_, filling) = reservation.new.pop_front().unwrap();
        let place = store.state().index.node(id).place;
        fill(&store, filling);
        drop(reservation);
        assert_eq!(store.life(0, &KEY), Some(Life::Resident));
        assert_eq!((found(&store), store.state().index.node(id).failed), ((1, 0), false));
        // The log could not read its copy, so that is none: a durable put writes another one.
        assert_eq!(store.state().index.node(id).place, 0);
        assert_eq!(durable(&store, &[KEY]), 1);
        assert!(store.state().index.node(id).place > place);
        drop(store);
        drop(std::fs::remove_dir_all(&folder));
    }

    #[test]
    fn a_load_that_hangs_keeps_its_slot_and_not_its_block() {
        let folder = std::env::temp_dir().join(format!("kvik-store-hanging-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&folder));
        let store = open(&folder);
        write(&store, put(&store), |_| {});
        drop(store);
        let store = open(&folder);
        let mut state = store.state();
        let id = state.index.find(0, &KEY).unwrap();
        let hanging = state.begin(id, Life::Loading).unwrap().unwrap();
        let (slot, used) = (hanging.slot, state.used());
        assert!(matches!(state.reserve(0, None, KEY, |_| false), Ok(Reserved::Here)));
        let Ok(Reserved::New(filling)) = state.reserve(0, None, KEY, |_| true) else { panic!("it is known") };
        assert!(filling.slot != slot && state.used() == 2 * used);
        drop(state);
        fill(&store, filling);
        let (place, identity) = {
            let state = store.state();
            (Place(state.index.node(id).place), state.tenants.identity(&state.index, id))
        };
        assert!(!store.note_loaded(hanging, Where::Log, place, &identity, Ok(Some(Box::new([1])))));
        assert!(store.life(0, &KEY) == Some(Life::Resident) && store.state().used() == used);
        // What has come is what was put.
        write(&store, id, |_| {});
        drop(store);
        drop(std::fs::remove_dir_all(&folder));
    }
}
