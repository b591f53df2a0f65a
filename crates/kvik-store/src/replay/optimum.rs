//! What no policy can do better.

use super::trace::Trace;
use std::collections::BTreeSet;

/// Never again.
const NEVER: u32 = u32::MAX;

/// The most hits that any policy can have with room for `capacity` blocks, if it knew the trace.
///
/// After each request, of the blocks in the store and those of the request, the `capacity` blocks stay whose next
/// request comes first; of blocks with the same next request, those nearer to the start of the prompt. A block that
/// never comes again does not stay. This is Belady's rule with one step a request, where a block need not enter.
///
/// It is a maximum, not only a high figure. A stay of a block from one request to its next one earns one hit; at most
/// `capacity` stays overlap between two requests; and to drop the stay that ends last whenever there are too many
/// gives the most stays that fit (Carlisle and Lloyd, "On the k-coloring of intervals", 1995). So no policy has more
/// hits a block. Where each block stands for its whole prefix ([`Trace::broken_chains`] is 0), the next request of a
/// block is never later than that of a block behind it. So the blocks that stay are always whole prefixes, and each
/// hit a block is one of a prefix. Elsewhere it is an upper bound.
pub fn optimum(trace: &Trace, capacity: usize) -> u64 {
    let next = next_requests(trace);
    // The next request and the position in it of each block that stays.
    let mut stays: Vec<Option<(u32, u32)>> = vec![None; trace.blocks()];
    let mut order: BTreeSet<(u32, u32, u32)> = BTreeSet::new();
    let (mut hits, mut at) = (0, 0);
    for (_, blocks) in trace.requests() {
        for (position, block) in blocks.iter().enumerate() {
            if let Some((request, position)) = stays[*block as usize].take() {
                order.remove(&(request, position, *block));
                hits += 1;
            }
            let stay = (next[at], position as u32);
            at += 1;
            if stay.0 != NEVER && order.insert((stay.0, stay.1, *block)) {
                stays[*block as usize] = Some(stay);
            }
        }
        while order.len() > capacity {
            if let Some((_, _, block)) = order.pop_last() {
                stays[block as usize] = None;
            }
        }
    }
    hits
}

/// For each reference, the next request that has the block.
fn next_requests(trace: &Trace) -> Vec<u32> {
    let mut next = vec![NEVER; trace.references()];
    let mut later = vec![NEVER; trace.blocks()];
    let mut at = next.len();
    for (number, (_, blocks)) in trace.requests().enumerate().rev() {
        at -= blocks.len();
        for (position, block) in blocks.iter().enumerate() {
            next[at + position] = later[*block as usize];
        }
        for block in blocks {
            later[*block as usize] = number as u32;
        }
    }
    next
}
