//! Which servers a prompt's blocks lie on.
//!
//! A prompt is divided into segments of [`SEGMENT`] blocks, counted from its start. The key of a segment's first block decides
//! where the segment lies: each server has a weight for it, by the server's name alone, and those of the highest weights have
//! it. So each client finds the same servers without asking anybody, a server that comes or goes moves its own share and
//! nothing else, and a beginning that many prompts share takes one segment of one server, not all of them.

use crate::BlockKey;
use crate::chain::Chain;
use std::cmp::Reverse;
use std::ops::Range;

/// Blocks of a segment: so many that a get asks few servers, and so few that a prompt of some thousand tokens is spread.
pub(crate) const SEGMENT: usize = 64;

/// What stands for a server's name among the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lot(pub [u8; 32]);

impl Lot {
    pub fn of(name: &str) -> Lot {
        Lot(blake3::derive_key("kvik store member v1", name.as_bytes()))
    }

    /// Its weight for a segment. A digest, so that weights of different servers are independent of each other.
    fn weight(&self, head: &BlockKey) -> u64 {
        let digest = blake3::keyed_hash(&self.0, &head.0);
        let (bytes, _) = digest.as_bytes().split_first_chunk().unwrap_or((&[0; 8], &[]));
        u64::from_le_bytes(*bytes)
    }
}

/// Blocks of a call that lie on the same servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Their places among the call's keys.
    pub range: Range<usize>,
    /// The servers, those of the highest weights first.
    pub order: Vec<usize>,
    /// Whether the first one begins a segment: then it hangs on no block before it, which may be on another server.
    pub root: bool,
}

/// The first `copies` servers of a segment.
pub(crate) fn ranked(lots: &[Lot], head: &BlockKey, copies: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lots.len()).collect();
    order.sort_by_cached_key(|at| Reverse((lots[*at].weight(head), lots[*at].0)));
    order.truncate(copies);
    order
}

/// Divides a call. Segments that follow one another and lie on the same servers are one piece.
pub(crate) fn pieces(chain: Chain<'_>, lots: &[Lot], copies: usize) -> Vec<Piece> {
    let (first, end) = (chain.start(), chain.start() + chain.keys().len());
    let mut pieces: Vec<Piece> = Vec::new();
    let mut at = first;
    while at < end {
        let start = at - at % SEGMENT;
        let Some(head) = chain.at(start) else { break };
        let (order, until) = (ranked(lots, head, copies), (start + SEGMENT).min(end));
        match pieces.last_mut() {
            Some(last) if last.order == order => last.range.end = until - first,
            _ => pieces.push(Piece { range: at - first..until - first, order, root: at == start }),
        }
        at = until;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random keys from `KVIK_SEED`, which is printed.
    fn keys(count: u64) -> Vec<BlockKey> {
        let seed: u64 = std::env::var("KVIK_SEED").map_or_else(
            |_| std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
            |seed| seed.parse().unwrap(),
        );
        println!("KVIK_SEED={seed}");
        let key =
            |at: u64| BlockKey(*blake3::hash(&[seed.to_le_bytes(), at.to_le_bytes()].concat()).as_bytes());
        (0..count).map(key).collect()
    }

    fn lots(count: usize) -> Vec<Lot> {
        (0..count).map(|at| Lot::of(&format!("10.0.0.{at}:7500"))).collect()
    }

    #[test]
    fn shares_are_even() {
        let (keys, lots) = (keys(20_000), lots(8));
        let mut shares = [0; 8];
        keys.iter().for_each(|head| shares[ranked(&lots, head, 1)[0]] += 1);
        // 2500 each, with a standard deviation of 47: six of them are chance once in 10^8 times.
        println!("{shares:?}");
        assert!(shares.iter().all(|share| (2220..=2780).contains(share)), "{shares:?}");
    }

    #[test]
    fn who_joins_or_leaves_moves_its_own_share() {
        let (keys, all) = (keys(20_000), lots(9));
        let mut moved = 0;
        for head in &keys {
            let (few, many) = (ranked(&all[..8], head, 3), ranked(&all, head, 3));
            // The ninth is put among the others, whose order stays; with it, the last one has a copy no more.
            let others: Vec<usize> = many.iter().copied().filter(|at| *at != 8).collect();
            assert_eq!(others, few[..others.len()]);
            moved += usize::from(many[0] == 8);
        }
        println!("{moved} of {} moved", keys.len());
        assert!((1950..=2500).contains(&moved), "a ninth of 20000 is 2222: {moved}");
    }

    #[test]
    fn the_order_of_the_list_is_of_no_account() {
        let (keys, lots) = (keys(500), lots(5));
        let turned: Vec<Lot> = lots.iter().rev().copied().collect();
        for head in &keys {
            let back: Vec<usize> = ranked(&turned, head, 5).into_iter().map(|at| 4 - at).collect();
            assert_eq!(ranked(&lots, head, 5), back);
        }
    }

    #[test]
    fn a_call_amid_a_prompt_finds_the_same_servers() {
        let (keys, lots) = (keys(400), lots(7));
        let place = |pieces: &[Piece], at: usize| {
            let piece = pieces.iter().find(|piece| piece.range.contains(&at));
            piece.map(|piece| piece.order.clone())
        };
        let whole = pieces(Chain::from(&keys), &lots, 2);
        for from in [1, 63, 64, 65, 130, 399] {
            let part = pieces(Chain::after(&keys[..from], &keys[from..]), &lots, 2);
            assert_eq!((part[0].range.start, part[0].root), (0, from % SEGMENT == 0));
            assert_eq!(part.last().map(|piece| piece.range.end), Some(400 - from));
            (from..400).for_each(|at| assert_eq!(place(&part, at - from), place(&whole, at)));
        }
    }

    #[test]
    fn one_server_has_a_call_in_one_piece() {
        let keys = keys(400);
        let all = pieces(Chain::from(&keys), &lots(1), 3);
        assert_eq!(all, [Piece { range: 0..400, order: vec![0], root: true }]);
    }
}
