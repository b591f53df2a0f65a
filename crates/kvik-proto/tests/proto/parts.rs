//! Pages that are seen in parts: which of them a grant covers, and that they land where they belong.

use crate::memory::{Mem, Rng, view};
use crate::world::{World, layout};
use kvik_core::{Code, Layers, Layout, Order, Right, Use, View};
use kvik_proto::{OWN_SESSION, Op, PageList, Path, Select};
use std::collections::BTreeSet;
use std::sync::Arc;

const RUN: u64 = 48;

/// Six pages of three heads; `parts` of a page are named by `ids`.
fn parts_of(layout: &Arc<Layout>, parts: u32, ids: &[u32]) -> View {
    let (layers, slices) = (0..layout.layers(), 0..layout.slices());
    View::of_parts(layout.clone(), parts, ids.into(), layers, slices, Order::LayerFirst).unwrap()
}

fn bytes_of(view: &View) -> BTreeSet<u64> {
    view.runs(0..view.bytes()).flat_map(|run| run.offset..run.offset + run.len).collect()
}

fn some(rng: &mut Rng, count: u32) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..count).collect();
    for at in (1..ids.len()).rev() {
        ids.swap(at, rng.below(at + 1));
    }
    ids.truncate(1 + rng.below(count as usize));
    ids
}

/// What is at a position of a grant is served in whatever parts it is seen, and a position beyond it refused by name.
#[test]
fn no_byte_outside_the_grant_is_served_in_any_parts() {
    let mut rng = Rng(std::env::var("KVIK_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(3));
    println!("KVIK_SEED={}", rng.0);
    let strided = Layers::Strided { count: 2, stride: 6 * 200 };
    let theirs = Arc::new(Layout::new(8, 6, RUN, 200, 3, RUN + 2, strided).unwrap());
    let (mut served, mut refused, mut strange) = (0, 0, 0);
    for _ in 0..200 {
        let (mut world, session) = World::pair(rng.next());
        let [granted_in, asked_in] = [0, 1].map(|_| [1u32, 2, 3, 4, 6, 8][rng.below(6)]);
        let granted = parts_of(&theirs, granted_in, &some(&mut rng, 6 * granted_in));
        let times = asked_in / granted_in;
        let count = granted.pages().len() as u32 * times.max(1);
        let mut positions = some(&mut rng, count);
        let beyond = rng.below(3) == 0;
        if beyond {
            let at = rng.below(positions.len());
            positions[at] = [count, count + 1, u32::MAX][rng.below(3)];
        }
        let there = Mem::for_layout(&theirs, 5);
        let grant = world.grant(1, &there, &granted, Right::Read, Use::Many);
        let run = RUN / u64::from(asked_in);
        let layers = Layers::Strided { count: 2, stride: 60 * 3 * run };
        let mine = Arc::new(Layout::new(0, 60, run, 3 * run, 3, run, layers).unwrap());
        let side = view(&mine, &(0..positions.len() as u32).collect::<Vec<u32>>());
        let here = Mem::for_layout(&mine, 1);
        let mut open = world.open(0, grant, Op::Read, Path::Channels, Some((&here, &side)));
        let named = Some(PageList::of(&positions.as_slice().into()));
        open.select = Select { positions: named, parts: Some(asked_in), ..Select::default() };
        let read = world.transfer(0, session, open);
        if !asked_in.is_multiple_of(granted_in) {
            assert_eq!(read.unwrap_err().code, Code::InvalidArgument);
            strange += 1;
        } else if beyond {
            let error = read.unwrap_err();
            assert_eq!(error.code, Code::PageNotGranted, "{error}");
            refused += 1;
        } else {
            assert_eq!(read, Ok(()));
            let id = |position: &u32| granted.pages()[(position / times) as usize] * times + position % times;
            let asked = parts_of(&theirs, asked_in, &positions.iter().map(id).collect::<Vec<u32>>());
            assert!(bytes_of(&asked).is_subset(&bytes_of(&granted)));
            assert_eq!(here.peek(&side, 0..side.bytes()), there.peek(&asked, 0..asked.bytes()));
            served += 1;
        }
        world.assert_quiet();
    }
    assert!(served > 30 && refused > 15 && strange > 30, "{served} served, {refused} and {strange} refused");
}

/// Two engines, the second with a grant; the first asks for it in several ways.
struct Asked {
    world: World,
    session: u64,
    grant: kvik_core::GrantId,
}

impl Asked {
    /// What is then in `side`, or why not.
    fn ask(&mut self, parts: Option<u32>, positions: Option<&[u32]>, side: &View) -> Result<Vec<u8>, Code> {
        let here = Mem::for_layout(side.layout(), 1);
        let mut open = self.world.open(0, self.grant, Op::Read, Path::Channels, Some((&here, side)));
        let positions = positions.map(|named| PageList::of(&named.into()));
        open.select = Select { parts, positions, ..Select::default() };
        let key = self.world.try_begin(0, self.session, open).map_err(|error| error.code)?;
        self.world.settle();
        self.world.assert_quiet();
        match self.world.outcome(0, key) {
            Some(outcome) => outcome.map(|()| here.peek(side, 0..side.bytes())).map_err(|error| error.code),
            None => panic!("the transfer has not ended"),
        }
    }
}

/// All of a grant, in parts that its owner did not think of.
#[test]
fn a_whole_grant_is_seen_in_the_parts_that_the_reader_names() {
    let large = Arc::new(Layout::new(0, 4, 64, 128, 2, 64, Layers::At(vec![0])).unwrap());
    let small = Arc::new(Layout::new(0, 8, 32, 64, 2, 32, Layers::At(vec![0])).unwrap());
    for own in [false, true] {
        let (mut world, session) = World::pair(1);
        let (owner, session) = if own { (0, OWN_SESSION) } else { (1, session) };
        let there = Mem::for_layout(&large, 1);
        let grant = world.grant(owner, &there, &view(&large, &[3, 1]), Right::Read, Use::Many);
        let mut asked = Asked { world, session, grant };
        let side = view(&small, &[0, 5, 2, 7]);
        assert_eq!(asked.ask(None, None, &side), Err(Code::ShapeMismatch));
        for parts in [0, 3, 257, u32::MAX] {
            assert_eq!(asked.ask(Some(parts), None, &side), Err(Code::InvalidArgument), "{parts}");
            assert_eq!(asked.ask(Some(parts), Some(&[6]), &side), Err(Code::InvalidArgument), "{parts}");
        }
        let halves = there.peek(&parts_of(&large, 2, &[6, 7, 2, 3]), 0..256);
        assert_eq!(asked.ask(Some(2), None, &side), Ok(halves));
        let quarters = there.peek(&parts_of(&large, 4, &[12, 13, 14, 15, 4, 5, 6, 7]), 0..256);
        let side = parts_of(&small, 2, &[0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(asked.ask(Some(4), None, &side), Ok(quarters));
        // By position: the last quarter of its first page, the first of its second, and the last again.
        let some = there.peek(&parts_of(&large, 4, &[15, 4, 15]), 0..96);
        let side = parts_of(&small, 2, &[0, 1, 2]);
        assert_eq!(asked.ask(Some(4), Some(&[3, 4, 3]), &side), Ok(some));
    }
}

/// A grant of parts is seen in its own parts, or in smaller ones.
#[test]
fn a_grant_of_parts_stays_one() {
    let (mut world, session) = World::pair(1);
    let theirs = layout(4, 64);
    let there = Mem::for_layout(&theirs, 1);
    let grant = world.grant(1, &there, &parts_of(&theirs, 2, &[0, 3]), Right::Read, Use::Many);
    let mut asked = Asked { world, session, grant };
    let mine = layout(4, 32);
    let there = |ids: &[u32]| there.peek(&parts_of(&theirs, 2, ids), 0..u64::MAX);
    assert_eq!(asked.ask(None, None, &view(&mine, &[0, 1])), Ok(there(&[0, 3])));
    assert_eq!(asked.ask(None, Some(&[1]), &view(&mine, &[2])), Ok(there(&[3])));
    assert_eq!(asked.ask(None, Some(&[2]), &view(&mine, &[0])), Err(Code::PageNotGranted));
    assert_eq!(asked.ask(Some(1), Some(&[0]), &view(&mine, &[0, 1])), Err(Code::InvalidArgument));
    assert_eq!(asked.ask(Some(3), None, &view(&mine, &[0, 1])), Err(Code::InvalidArgument));
    assert_eq!(asked.ask(Some(1), None, &view(&mine, &[0, 1])), Err(Code::InvalidArgument));
}
