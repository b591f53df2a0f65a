//! Pages of all blocks of a store: each block once, whatever happens meanwhile, and where clients look for it.

use crate::figures::Where;
use crate::index::{Id, Life};
use crate::placement::{Lot, SEGMENT, pieces, ranked};
use crate::scan::bit;
use crate::store::Store;
use crate::wire::Response;
use crate::wire::scan::{Description, PAGE, Page, Scan, Seen, Segment, ShortKey};
use crate::{BlockKey, Chain, NamespaceId, Place, Shape, StoreOptions};
use kvik_engine::{Config, Engine};
use std::collections::{HashMap, HashSet};

fn key(number: u64) -> BlockKey {
    BlockKey(*blake3::hash(&number.to_le_bytes()).as_bytes())
}

/// A store whose blocks have no bytes: only the index is looked at.
fn store() -> Store {
    let store = Store::open(Engine::start(Config::default()).unwrap(), &StoreOptions::default()).unwrap();
    store.namespace(NamespaceId([1; 32]), "one", Shape::new(1, 1, 4096).unwrap(), "tiny@1").unwrap();
    store
}

/// Adds blocks that follow one another.
fn add(store: &Store, keys: &[BlockKey], life: Life) -> Vec<Id> {
    let mut state = store.state();
    let mut last = None;
    let mut one = |key: &BlockKey| {
        let id = state.index.add(*key, last, 0, life);
        last = Some(id);
        id
    };
    keys.iter().map(&mut one).collect()
}

fn lots(count: usize) -> Vec<Lot> {
    (0..count).map(|at| Lot::of(&format!("10.0.0.{at}:7500"))).collect()
}

/// All pages, with something that happens before each but the first one.
fn pages(store: &Store, mut scan: Scan, mut meanwhile: impl FnMut(usize)) -> Vec<Page> {
    let mut all = Vec::new();
    loop {
        let page = Page::of(store, &scan);
        assert!(page.blocks.len() <= PAGE && page.segments.len() <= PAGE);
        let next = page.next;
        all.push(page);
        match next {
            None => return all,
            Some(next) => {
                assert!(next > scan.from);
                scan.from = next;
            }
        }
        meanwhile(all.len());
    }
}

fn seen(pages: &[Page]) -> HashMap<ShortKey, u32> {
    let mut seen = HashMap::new();
    pages.iter().flat_map(|page| &page.blocks).for_each(|block| *seen.entry(block.key).or_default() += 1);
    seen
}

#[test]
fn a_block_that_stays_is_seen_once_whatever_comes_and_goes() {
    let store = store();
    let keys: Vec<BlockKey> = (0..20_000).map(key).collect();
    // Every third one is on its way and not seen, so that pages have fewer blocks than slots.
    let life = |chain| if chain % 3 == 0 { Life::Filling } else { Life::Resident };
    let chains = keys.chunks(100).enumerate().map(|(chain, keys)| add(&store, keys, life(chain)));
    let chains: Vec<Vec<Id>> = chains.collect();
    let mut come = 20_000;
    let all = pages(&store, Scan::default(), |page| {
        // A chain of those behind, and one of those before, goes; others come in their place.
        for chain in [page % 20, 199 - page % 20] {
            let gone: Vec<Id> = chains[chain].iter().rev().copied().collect();
            let mut state = store.state();
            if state.index.find(0, &keys[chain * 100]).is_some() {
                for id in gone {
                    state.index.take_out(id);
                    state.index.release(id);
                }
            }
        }
        let new: Vec<BlockKey> = (come..come + 150).map(key).collect();
        come += 150;
        add(&store, &new, Life::Resident);
    });
    assert!(all.len() >= 13, "{} pages", all.len());
    let seen = seen(&all);
    for chain in 20..180 {
        for key in &keys[chain * 100..chain * 100 + 100] {
            let times = if chain % 3 == 0 { None } else { Some(&1) };
            assert_eq!(seen.get(&key.into()), times, "chain {chain}");
        }
    }
}

#[test]
fn only_what_is_here_is_seen_in_its_tiers() {
    let store = store();
    let lives = [Life::Resident, Life::Below, Life::Loading, Life::Filling];
    let ids: Vec<Id> = (0..).zip(lives).flat_map(|(at, life)| add(&store, &[key(at)], life)).collect();
    {
        let mut state = store.state();
        state.index.node_mut(ids[0]).place = Place(5).0;
        state.index.node_mut(ids[1]).object = Place(6).0;
        state.index.node_mut(ids[2]).place = Place(7).0;
    }
    let [memory, log, object] = Where::ALL.map(bit);
    let page = Page::of(&store, &Scan::default());
    let tiers: Vec<(ShortKey, u8)> = page.blocks.iter().map(|block| (block.key, block.tiers)).collect();
    let expected = [(0, memory | log), (1, object), (2, log)].map(|(at, tiers)| ((&key(at)).into(), tiers));
    assert_eq!(tiers, expected);
    assert!(page.blocks.iter().all(|block| block.namespace == 0 && block.segment.is_none()));
    let told = Description::of(&store, 0);
    assert_eq!((told.blocks, told.more, told.namespaces.len()), (4, false, 1));
    let known = &told.namespaces[0];
    assert_eq!((known.tenant.as_str(), known.model.as_str(), known.block_bytes), ("one", "tiny@1", 4096));
    assert_eq!(Description::of(&store, 1).namespaces, []);
}

/// Where each block's segment lies, as a page says it.
fn orders(pages: &[Page]) -> HashMap<ShortKey, Option<(ShortKey, Vec<u16>)>> {
    let of = |page: &Page, block: &Seen| {
        let segment: Option<&Segment> = block.segment.map(|at| &page.segments[usize::from(at)]);
        (block.key, segment.map(|segment| (segment.head, segment.order.clone())))
    };
    pages.iter().flat_map(|page| page.blocks.iter().map(|block| of(page, block))).collect()
}

#[test]
fn a_page_says_where_clients_look() {
    let (store, lots) = (store(), lots(5));
    let mut expected = HashMap::new();
    // Lengths that end within a segment, at its end, and behind many; some of them put in turns, so that they lie mixed.
    for (prompt, len) in [1usize, 63, 64, 65, 200, 1000, 1999].into_iter().enumerate() {
        let keys: Vec<BlockKey> = (0..len as u64).map(|at| key(prompt as u64 * 10_000 + at)).collect();
        add(&store, &keys, Life::Resident);
        for piece in pieces(Chain::from(&keys), &lots, 3) {
            let order: Vec<u16> = piece.order.iter().map(|at| *at as u16).collect();
            for at in piece.range {
                let head = (&keys[at - at % SEGMENT]).into();
                expected.insert(ShortKey::from(&keys[at]), Some((head, order.clone())));
            }
        }
    }
    let ask = |sample| Scan { from: 0, sample, order: 3, lots: lots.clone() };
    assert_eq!(orders(&pages(&store, ask(0), |_| {})), expected);
    // A sample is of the same blocks everywhere, and says the same of them.
    let some = orders(&pages(&store, ask(2), |_| {}));
    let of_sample = |key: &ShortKey| key.0.is_multiple_of(4);
    expected.retain(|key, _| of_sample(key));
    println!("{} of the sample", some.len());
    assert_eq!(some, expected);
    // Nobody is asked where blocks lie that can lie at one server only.
    let scan = Scan { lots: lots[..1].to_vec(), ..ask(0) };
    assert!(orders(&pages(&store, scan, |_| {})).values().all(Option::is_none));
}

#[test]
fn blocks_that_are_too_deep_are_seen_without_a_segment_and_branches_have_their_own() {
    let (store, lots) = (store(), lots(3));
    let deep: Vec<BlockKey> = (0..6000).map(key).collect();
    let ids = add(&store, &deep, Life::Resident);
    // Prompts that part within the second segment share it, and no later one.
    let branches: Vec<BlockKey> = (0..100).map(|at| key(50_000 + at)).collect();
    {
        let mut state = store.state();
        let mut last = ids[99];
        for key in &branches {
            last = state.index.add(*key, Some(last), 0, Life::Resident);
        }
    }
    let scan = Scan { from: 0, sample: 0, order: 1, lots: lots.clone() };
    let all = pages(&store, scan, |_| {});
    let orders = orders(&all);
    assert_eq!(orders.len(), 6100);
    let head = |key: &BlockKey| orders[&ShortKey::from(key)].as_ref().map(|(head, _)| *head);
    for (at, key) in branches.iter().enumerate() {
        let depth = 100 + at;
        let first = if depth < 128 { &deep[64] } else { &branches[depth - depth % SEGMENT - 100] };
        assert_eq!(head(key), Some(first.into()), "branch {at}");
        let order: Vec<u16> = ranked(&lots, first, 1).into_iter().map(|at| at as u16).collect();
        assert_eq!(orders[&ShortKey::from(key)].as_ref().map(|(_, order)| order), Some(&order));
    }
    for (at, key) in deep.iter().enumerate() {
        match head(key) {
            Some(found) => assert_eq!(found, (&deep[at - at % SEGMENT]).into(), "block {at}"),
            None => assert!(at >= 2048, "block {at}"),
        }
    }
    let unknown = orders.values().filter(|order| order.is_none()).count();
    println!("{unknown} of 6100 are in no segment that is known");
    assert!(unknown > 0);
    let heads: HashSet<ShortKey> = orders.values().flatten().map(|(head, _)| *head).collect();
    assert!(heads.len() < 6100 / 32, "{} segments", heads.len());
}

#[test]
fn a_page_from_behind_the_end_is_the_last_one() {
    let store = store();
    add(&store, &[key(1)], Life::Resident);
    let scan = Scan { from: u32::MAX, ..Scan::default() };
    assert_eq!(Page::of(&store, &scan), Page::default());
}

#[test]
fn what_is_listed_cannot_be_asked_for() {
    let store = store();
    let keys: Vec<BlockKey> = (0..500).map(key).collect();
    add(&store, &keys, Life::Resident);
    let page = Page::of(&store, &Scan { from: 0, sample: 0, order: 2, lots: lots(3) });
    assert_eq!((page.blocks.len(), page.segments.len()), (500, 8));
    let told = [Response::Scanned(page).encode(1), Response::Described(Description::of(&store, 0)).encode(2)]
        .concat();
    // Twelve bytes of a key, or of the namespace's id, are in no answer; eight are, and what follows them may be alike by chance.
    let id = [1; 32];
    for secret in keys.iter().map(|key| &key.0).chain([&id]) {
        assert!(!told.windows(12).any(|bytes| bytes == &secret[..12]), "{secret:?}");
    }
}
