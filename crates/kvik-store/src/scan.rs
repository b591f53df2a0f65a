//! All blocks of a store, a page at a time, for who looks at what a cluster holds.
//!
//! Invariants:
//! - A block that is here all the time is seen once: it keeps its number in the index, and pages go by numbers. One that
//!   comes or goes meanwhile is seen or not; one that goes and comes again may be seen twice.
//! - The blocks' lock is held for [`SLOTS`] slots and two of the longest [walks](WALK) at most, and then anew. What
//!   segments weigh is computed without it.

use crate::BlockKey;
use crate::figures::Where;
use crate::index::{Id, Index, Life};
use crate::placement::{Lot, SEGMENT, ranked};
use crate::store::Store;
use crate::wire::scan::{Described, Description, PAGE, PART, Page, Scan, Seen, Segment, ShortKey};
use std::collections::HashMap;

/// Slots of the index that are looked at while the lock is held once.
const SLOTS: Id = 256;
/// Blocks that are gone through from a block towards the beginning of its prompt. One that lies deeper is in no segment that is
/// known. Also: how many are, for all blocks together, before the lock is let go of.
const WALK: usize = 2048;
/// Slots and steps of walks for one page, before it ends with what it has.
const MOST: usize = 1 << 16;

/// The bit of a tier.
pub(crate) fn bit(tier: Where) -> u8 {
    1 << tier as u8
}

impl Description {
    /// What a store is, and what its blocks are of: namespaces from this number on, as many as a part has.
    pub fn of(store: &Store, from: u16) -> Description {
        let state = store.state();
        let all = state.tenants.namespaces();
        let count = all.len();
        let namespaces = all.enumerate().skip(usize::from(from)).take(PART).map(|(number, known)| {
            let (tenant, model) = (&state.tenants.tenant(number as u16).name, &known.model);
            Described {
                id: (&known.id).into(),
                tenant: tenant.clone(),
                model: model.clone(),
                block_bytes: known.shape.bytes(),
            }
        });
        Description {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            blocks: state.index.len() as u64,
            namespaces: namespaces.collect(),
            more: count > usize::from(from) + PART,
        }
    }
}

impl Page {
    /// The page of a store that is asked for.
    pub fn of(store: &Store, scan: &Scan) -> Page {
        let mut looking = Looking::new(scan);
        loop {
            let state = store.state();
            let index = &state.index;
            looking.look(index);
            let over = looking.at >= index.end();
            drop(state);
            if over || looking.is_full() {
                return looking.page(!over);
            }
        }
    }
}

/// A page that is being made.
struct Looking<'a> {
    scan: &'a Scan,
    at: Id,
    blocks: Vec<Seen>,
    /// The first blocks of segments, and their places among the page's.
    heads: Vec<BlockKey>,
    places: HashMap<BlockKey, u16>,
    work: usize,
}

impl<'a> Looking<'a> {
    fn new(scan: &'a Scan) -> Looking<'a> {
        let (blocks, heads, places) = (Vec::new(), Vec::new(), HashMap::new());
        Looking { scan, at: scan.from, blocks, heads, places, work: 0 }
    }

    /// Looks at some slots, for as long as the lock may be held.
    fn look(&mut self, index: &Index) {
        let end = self.at.saturating_add(SLOTS).min(index.end());
        let mut walks = Walks::default();
        while self.at < end {
            let node = index.node(self.at);
            let key = (&node.key).into();
            if is_here(node.life) && self.is_wanted(key) {
                let segment = match self.scan.lots.len() > 1 {
                    true if walks.is_tired(index, self.at) => break,
                    true => walks.head(index, self.at).map(|head| self.place(&index.node(head).key)),
                    false => None,
                };
                let memory = if node.life == Life::Resident { bit(Where::Memory) } else { 0 };
                let log = if node.place != 0 { bit(Where::Log) } else { 0 };
                let object = if node.object != 0 { bit(Where::Object) } else { 0 };
                let tiers = memory | log | object;
                self.blocks.push(Seen { key, namespace: node.namespace, tiers, segment });
            }
            self.at += 1;
            self.work += 1;
        }
        self.work += walks.steps;
    }

    fn is_wanted(&self, key: ShortKey) -> bool {
        key.0.trailing_zeros() >= u32::from(self.scan.sample)
    }

    /// The place of a segment in this page.
    fn place(&mut self, head: &BlockKey) -> u16 {
        let next = self.heads.len() as u16;
        let place = *self.places.entry(*head).or_insert(next);
        if place == next {
            self.heads.push(*head);
        }
        place
    }

    /// Whether another look may bring more than a page takes, or enough was done for one.
    fn is_full(&self) -> bool {
        self.blocks.len() + SLOTS as usize > PAGE || self.work >= MOST
    }

    fn page(self, more: bool) -> Page {
        let Looking { scan, at, blocks, heads, .. } = self;
        let segment =
            |head: &BlockKey| Segment { head: head.into(), order: order(&scan.lots, head, scan.order) };
        Page { blocks, segments: heads.iter().map(segment).collect(), next: more.then_some(at) }
    }
}

/// The servers of a segment; none have numbers that a message could not say.
fn order(lots: &[Lot], head: &BlockKey, count: u8) -> Vec<u16> {
    ranked(lots, head, count.into()).into_iter().filter_map(|at| u16::try_from(at).ok()).collect()
}

/// Whether a block's bytes are in some tier.
fn is_here(life: Life) -> bool {
    Life::THERE.contains(&life)
}

/// The ways from blocks to the beginnings of their segments, while the lock is held once.
///
/// A segment is counted from the start of a prompt. What hangs on no other block is such a start, or begins a segment: so it
/// is enough to count from there.
#[derive(Default)]
struct Walks {
    /// Of a block how many are before it, and the first one of its segment; none where that is too far.
    known: HashMap<Id, Option<(usize, Id)>>,
    steps: usize,
}

impl Walks {
    /// Whether the way to this block is for the next time.
    fn is_tired(&self, index: &Index, id: Id) -> bool {
        let parent_known = index.parent(id).is_none_or(|parent| self.known.contains_key(&parent));
        self.steps >= WALK && !parent_known
    }

    /// The first block of the segment that a block is in.
    fn head(&mut self, index: &Index, id: Id) -> Option<Id> {
        let mut trail = vec![id];
        let base = loop {
            let last = trail[trail.len() - 1];
            match index.parent(last) {
                None => break Some(None),
                Some(parent) => match self.known.get(&parent) {
                    Some(known) => break (*known).map(Some),
                    None if trail.len() > WALK => break None,
                    None => trail.push(parent),
                },
            }
            self.steps += 1;
        };
        let found = base.map(|base| {
            // Blocks before the last one of the trail, and where those before it are in its segment, that one's first.
            let before = base.map_or(0, |(depth, _)| depth + 1);
            let depth = before + trail.len() - 1;
            let within = depth % SEGMENT;
            let head = trail.get(within).copied().or(base.map(|(_, head)| head)).unwrap_or(id);
            (depth, head)
        });
        self.known.insert(id, found);
        found.map(|(_, head)| head)
    }
}
