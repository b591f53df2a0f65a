//! What grants hold, and what engines state of it: right, wrong, or nothing.

use crate::memory::{Mem, Rng};
use crate::world::World;
use kvik_core::{CONTENT_DIGEST_BYTES, Content, ContentClaim, GrantState, Use};
use kvik_proto::{FlowKey, Op, WorkRequest};

const PART: &[u8] = b"layers 0 to 4 of 4";

/// What pages that are filled from a seed hold.
pub fn content(seed: u64, pages: usize, part: &[u8]) -> Content {
    let mut rng = Rng(seed);
    let chain: Vec<u8> =
        (0..pages * CONTENT_DIGEST_BYTES / 8).flat_map(|_| rng.next().to_le_bytes()).collect();
    Content::new(&chain, part).unwrap()
}

/// Some owners say what their pages hold.
pub fn drawn(rng: &mut Rng, seed: u64, pages: usize, parts: u32) -> Option<Content> {
    (parts == 1 && rng.once_in(2)).then(|| content(seed, pages, PART))
}

impl World {
    /// Positions of a grant, for a grant in so many parts more; and whether its owner takes them.
    pub fn positions(&mut self, index: usize, times: u32) -> (Vec<u32>, bool) {
        let ticket = &self.tickets[index];
        let mut all: Vec<u32> = (0..ticket.view.pages().len() as u32 * times).collect();
        let strict = ticket.content.is_some();
        if !strict || self.rng.once_in(12) {
            all.reverse();
            let turn = self.rng.below(all.len());
            all.rotate_left(turn);
            all.truncate(1 + self.rng.below(all.len()));
            let range = all.windows(2).all(|pair| pair[0] + 1 == pair[1]);
            return (all, !strict || range);
        }
        let first = self.rng.below(all.len());
        let count = 1 + self.rng.below(all.len() - first);
        (all[first..first + count].to_vec(), true)
    }

    /// What an engine states of a grant's content, and whether that is right.
    pub fn state(&mut self, index: usize, op: Op, last: usize) -> (Option<ContentClaim>, bool) {
        let (ticket, rng) = (&self.tickets[index], &mut self.rng);
        let Some(content) = &ticket.content else {
            return match rng.once_in(24) {
                true => (Some([7; CONTENT_DIGEST_BYTES]), false),
                false => (None, true),
            };
        };
        let (links, moves) = (content.links(), matches!(op, Op::Read | Op::Write));
        let link = if moves { last } else { links - 1 };
        if !rng.once_in(5) {
            return (content.claim(link), true);
        }
        let other = |seed: u64, part: &[u8]| self::content(seed, links, part).claim(link);
        let claim = match rng.below(4) {
            0 => None,
            1 => other(ticket.seed, b"layers 4 to 8 of 8"),
            2 if links > 1 => content.claim((link + 1 + rng.below(links - 1)) % links),
            _ => other(ticket.seed ^ 2, PART),
        };
        (claim, false)
    }

    /// Whether a transfer that ends with this page and counts as a use would use up more than it states.
    pub fn uses_up_a_beginning(&self, index: usize, last: usize) -> bool {
        let ticket = &self.tickets[index];
        let links = ticket.content.as_ref().map_or(0, Content::links);
        matches!(ticket.uses, Use::Once(_)) && last + 1 < links
    }

    /// A work request was given out. P4: not of a grant that is over, but for flows that other threads are still to stop.
    /// P5: for who states another content than the grant has, or none, nothing is served and nothing used.
    pub fn check_given(&self, engine: usize, order: &WorkRequest<Mem>, key: Option<FlowKey>) {
        let node = &self.engines[engine].node;
        let mut granted = self.engines[engine].given.iter().map(|at| &self.tickets[*at]);
        if let Some(ticket) = granted.find(|ticket| ticket.lease == order.region.lease) {
            let state = node.grant_state(ticket.id);
            assert!(
                state == Some(GrantState::Live) || node.held_stops() > 0,
                "P4: work was given out of grant {}, which is over: {state:?}",
                ticket.id
            );
            assert!(ticket.ready, "P4: work was given out of grant {}, whose pages are in use", ticket.id);
        }
        let mut of = self.begun.iter().rev();
        let of = of.find(|begun| begun.lease == order.region.lease || key == Some(begun.key));
        if let Some(begun) = of {
            assert!(begun.fits, "P5: bytes of a grant with other content move in transfer {:?}", begun.key);
            assert_eq!(
                order.id.class(),
                begun.class,
                "transfer {:?} is served as of another class",
                begun.key
            );
        }
    }
}
