//! Ranks of unequal heads and pages of unequal tokens: every byte of every token of every head lands where it belongs.

use crate::common::*;
use kvik_core::{Code, Error, GrantState, Layers, Layout, Ticket};
use kvik_engine::{Engine, Grant, GrantOptions, PageSet, Preference, Region, Report, TransferOptions};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

const LAYERS: u32 = 3;
const CONTENT: u64 = 96;
const PAGES: u32 = 24;
/// Seven pages of 16 tokens, or three and a half of 32.
const TOKENS: u32 = 112;

/// One rank's KV-cache: pages of `[heads][tokens][content]`, layer by layer.
struct Rank {
    engine: Engine,
    region: Region,
    layout: Arc<Layout>,
    tokens: u32,
    heads: Range<u32>,
    /// Where the tokens of the prompt are.
    pages: Vec<u32>,
}

impl Rank {
    fn new(engine: Engine, tokens: u32, heads: Range<u32>, random: &mut Random) -> Rank {
        let run = u64::from(tokens) * CONTENT;
        let page = run * heads.len() as u64;
        let layers = Layers::Strided { count: LAYERS, stride: page * u64::from(PAGES) };
        let layout = Arc::new(Layout::new(0, PAGES, run, page, heads.len() as u32, run, layers).unwrap());
        let region = engine.allocate(layout.end()).unwrap();
        let pages = random.distinct(TOKENS.div_ceil(tokens), PAGES);
        Rank { engine, region, layout, tokens, heads, pages }
    }

    /// Where a token of a head lies.
    fn at(&self, layer: u32, head: u32, token: u32) -> usize {
        let page = self.pages[(token / self.tokens) as usize];
        let run = self.layout.at(layer, page, head - self.heads.start);
        (run + u64::from(token % self.tokens) * CONTENT) as usize
    }

    fn places(&self) -> impl Iterator<Item = (u32, u32, u32)> {
        let heads = self.heads.clone();
        (0..LAYERS).flat_map(move |layer| {
            heads.clone().flat_map(move |head| (0..TOKENS).map(move |token| (layer, head, token)))
        })
    }

    fn compute(&self) {
        for (layer, head, token) in self.places() {
            self.region.write_at(self.at(layer, head, token), &content(layer, head, token)).unwrap();
        }
    }

    fn check(&self) {
        let found = bytes(&self.region);
        for (layer, head, token) in self.places() {
            let at = self.at(layer, head, token);
            let right = found[at..at + CONTENT as usize] == content(layer, head, token);
            assert!(right, "layer {layer}, head {head}, token {token} is wrong");
        }
        let used = self.places().count() * CONTENT as usize;
        let strange = found.len() - used - found.iter().filter(|byte| **byte == 0).count();
        assert_eq!(strange, 0, "bytes were written beside the tokens");
    }

    /// The prompt's groups of `unit` tokens, as ids of parts of pages.
    fn ids(&self, unit: u32) -> Arc<[u32]> {
        let parts = self.tokens / unit;
        let id = |group: u32| self.pages[(group / parts) as usize] * parts + group % parts;
        (0..TOKENS / unit).map(id).collect()
    }

    fn slices(&self, heads: &Range<u32>) -> Range<u32> {
        heads.start - self.heads.start..heads.end - self.heads.start
    }

    fn grant(&self, options: GrantOptions) -> Grant {
        let ids = self.pages.as_slice().into();
        let pages = PageSet::new(&self.region, self.layout.clone(), ids, None, None).unwrap();
        self.engine.grant(&pages, options).unwrap()
    }

    /// Reads the heads that both have.
    fn read(&self, owner: &Rank, ticket: &Ticket, options: TransferOptions) -> Report {
        self.try_read(owner, ticket, options).unwrap()
    }

    fn try_read(&self, owner: &Rank, ticket: &Ticket, options: TransferOptions) -> Result<Report, Error> {
        let heads = self.heads.start.max(owner.heads.start)..self.heads.end.min(owner.heads.end);
        let unit = self.tokens.min(owner.tokens);
        let (parts, slices) = (self.tokens / unit, Some(self.slices(&heads)));
        let (region, layout) = (&self.region, self.layout.clone());
        let local = PageSet::of_parts(region, layout, parts, self.ids(unit), None, slices).unwrap();
        let options = TransferOptions {
            remote_slices: Some(owner.slices(&heads)),
            remote_parts: Some(owner.tokens / unit),
            ..options
        };
        let positions = (0..TOKENS / unit).collect();
        self.engine.read(&local, ticket, Some(positions), options).unwrap().wait(Some(PATIENCE))
    }
}

/// Never 0, which is what an untouched byte is.
fn content(layer: u32, head: u32, token: u32) -> [u8; CONTENT as usize] {
    let seed = (layer * 64 + head) * 4096 + token;
    std::array::from_fn(|at| 1 + ((seed.wrapping_mul(0x9E37_79B9) >> 8) as usize + at * 37) as u8 % 255)
}

fn ranks(count: u32, heads: u32, tokens: u32, transport: Preference, random: &mut Random) -> Vec<Rank> {
    let each = heads / count;
    let heads = |rank| rank * each..(rank + 1) * each;
    (0..count).map(|rank| Rank::new(engine(transport), tokens, heads(rank), random)).collect()
}

/// All heads of a prompt from `from` ranks to `to` ranks, as a handover goes; how many readers each owner had.
fn hand_over(from: (u32, u32), to: (u32, u32), heads: u32, transport: Preference) -> Vec<usize> {
    let mut random = Random::new();
    let owners = ranks(from.0, heads, from.1, transport, &mut random);
    let readers = ranks(to.0, heads, to.1, transport, &mut random);
    let mut counts = Vec::new();
    for owner in &owners {
        owner.compute();
        let grant = owner.grant(GrantOptions::default());
        let shares =
            |reader: &&Rank| reader.heads.start < owner.heads.end && owner.heads.start < reader.heads.end;
        let readers: Vec<&Rank> = readers.iter().filter(shares).collect();
        let options = TransferOptions { readers: Some(readers.len() as u16), ..TransferOptions::default() };
        for reader in &readers {
            assert_eq!(grant.state(), GrantState::Live, "consumed before the last reader");
            let report = reader.read(owner, grant.ticket(), options.clone());
            let shared = owner.heads.len().min(reader.heads.len()) as u64;
            assert_eq!(report.bytes, u64::from(LAYERS * TOKENS) * shared * CONTENT);
        }
        assert_eq!(grant.wait(PATIENCE), Some(GrantState::Consumed));
        counts.push(readers.len());
    }
    readers.iter().for_each(Rank::check);
    counts
}

#[test]
fn four_ranks_become_two_and_two_become_four() {
    for transport in [Preference::Tcp, Preference::Local] {
        assert_eq!(hand_over((4, 16), (2, 16), 8, transport), [1, 1, 1, 1]);
        assert_eq!(hand_over((2, 16), (4, 16), 8, transport), [2, 2]);
    }
}

#[test]
fn pages_of_unequal_tokens_match_in_parts() {
    for transport in [Preference::Tcp, Preference::Local] {
        for (from, to) in [(16, 32), (32, 16), (64, 16), (48, 16)] {
            assert_eq!(hand_over((1, from), (1, to), 3, transport), [1]);
        }
        // Heads, tokens and readers at once.
        assert_eq!(hand_over((2, 32), (4, 16), 8, transport), [2, 2]);
        assert_eq!(hand_over((4, 16), (1, 64), 8, transport), [1, 1, 1, 1]);
    }
}

#[test]
fn an_engine_hands_over_to_itself() {
    let mut random = Random::new();
    for (from, to) in [(16, 16), (16, 32), (32, 16)] {
        let both = engine(Preference::Auto);
        let owner = Rank::new(both.clone(), from, 0..4, &mut random);
        let reader = Rank::new(both, to, 2..4, &mut random);
        owner.compute();
        let grant = owner.grant(GrantOptions::default());
        assert_eq!(reader.read(&owner, grant.ticket(), TransferOptions::default()).transport.name(), "self");
        assert_eq!(grant.wait(PATIENCE), Some(GrantState::Consumed));
        reader.check();
    }
}

#[test]
fn a_grant_whose_second_reader_died_ends_by_its_expiry() {
    for transport in [Preference::Tcp, Preference::Local] {
        in_time(Duration::from_secs(2), |expiry| second_reader_died(transport, expiry));
    }
}

/// None where the grant had expired before the first reader was done.
fn second_reader_died(transport: Preference, expiry: Duration) -> Option<()> {
    let in_time = |ended: Result<Report, Error>| match ended {
        Err(error) if [Code::GrantExpired, Code::StaleGeneration].contains(&error.code) => None,
        ended => Some(ended.unwrap()),
    };
    let mut random = Random::new();
    let owner = Rank::new(engine(transport), 16, 0..4, &mut random);
    let readers = ranks(2, 4, 16, transport, &mut random);
    owner.compute();
    let grant = owner.grant(GrantOptions { expiry, ..GrantOptions::default() });
    let of_two = TransferOptions { readers: Some(2), ..TransferOptions::default() };
    let unconfirmed = TransferOptions { confirm: Some(false), ..of_two.clone() };
    in_time(readers[1].try_read(&owner, grant.ticket(), unconfirmed))?;
    readers[1].engine.close(PATIENCE).unwrap();
    in_time(readers[0].try_read(&owner, grant.ticket(), of_two))?;
    // Even where the one that is left takes itself for the only one.
    let released = readers[0].engine.release(grant.ticket(), TransferOptions::default()).unwrap();
    in_time(released.wait(Some(PATIENCE)))?;
    assert_eq!(grant.wait(PATIENCE), Some(GrantState::Expired));
    readers[0].check();
    Some(())
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let mut random = Random::new();
    let owner = Rank::new(engine(Preference::Auto), 32, 0..4, &mut random);
    let reader = Rank::new(engine(Preference::Auto), 16, 0..4, &mut random);
    let pages =
        PageSet::new(&owner.region, owner.layout.clone(), [1, 2].into(), Some(1..3), Some(1..3)).unwrap();
    let grant = owner.engine.grant(&pages, many()).unwrap();
    let local = |pages: Range<u32>, layers, slices| {
        let ids: Vec<u32> = pages.collect();
        PageSet::new(&reader.region, reader.layout.clone(), ids.into(), Some(layers), Some(slices)).unwrap()
    };
    let fitting = local(0..4, 0..2, 0..2);
    let read = |local: &PageSet, options: TransferOptions| {
        let read = reader.engine.read(local, grant.ticket(), None, options);
        code(read.and_then(|read| read.wait(Some(PATIENCE))))
    };
    let options = TransferOptions { remote_parts: Some(2), ..TransferOptions::default() };
    let with = |change: &dyn Fn(&mut TransferOptions)| {
        let mut options = options.clone();
        change(&mut options);
        options
    };
    for (given, expected) in [
        (with(&|o| o.remote_layers = Some(0..2)), Code::PageNotGranted),
        (with(&|o| o.remote_layers = Some(1..4)), Code::PageNotGranted),
        (with(&|o| o.remote_slices = Some(2..4)), Code::PageNotGranted),
        (with(&|o| o.remote_slices = Some(2..2)), Code::InvalidArgument),
        (with(&|o| o.remote_layers = Some(Range { start: 2, end: 1 })), Code::InvalidArgument),
        (with(&|o| o.remote_parts = Some(0)), Code::InvalidArgument),
        (with(&|o| o.remote_parts = Some(257)), Code::InvalidArgument),
        (with(&|o| o.remote_parts = Some(5)), Code::InvalidArgument),
        (with(&|o| o.readers = Some(0)), Code::InvalidArgument),
        (with(&|o| o.readers = Some(4097)), Code::InvalidArgument),
        // Several heads of pages of unequal size, without parts: bytes as many, and every second head wrong.
        (with(&|o| o.remote_parts = None), Code::ShapeMismatch),
        (with(&|o| o.remote_parts = Some(4)), Code::ShapeMismatch),
        (with(&|o| o.remote_slices = Some(1..2)), Code::ShapeMismatch),
    ] {
        assert_eq!(read(&fitting, given.clone()), expected, "{given:?}");
    }
    assert_eq!(read(&local(0..3, 0..2, 0..2), options.clone()), Code::ShapeMismatch);
    let beyond =
        reader.engine.read(&fitting, grant.ticket(), Some([0, 1, 2, 4].into()), options.clone()).unwrap();
    let refused = beyond.wait(Some(PATIENCE)).unwrap_err();
    assert!(refused.code == Code::PageNotGranted && refused.text.contains("position 4"), "{refused}");
    let some = TransferOptions { remote_layers: Some(1..2), remote_slices: Some(2..3), ..options };
    read_with(&reader.engine, &local(0..4, 2..3, 3..4), grant.ticket(), some).unwrap();
}

/// Page-major memory goes page by page with pages as large, and layer by layer with others, where it knows of them.
#[test]
fn page_major_memory_takes_pages_of_any_size() {
    let layout = |pages: u32, run: u64| {
        let layers = Layers::Strided { count: 3, stride: run };
        Arc::new(Layout::new(0, pages, run, 3 * run, 1, run, layers).unwrap())
    };
    for (transport, unequal) in [(Preference::Tcp, 12), (Preference::Local, 24)] {
        let (owner, reader) = (engine(transport), engine(transport));
        let (small, large) = (layout(8, 4096), layout(4, 8192));
        let (there, here) = (owner.allocate(small.end()).unwrap(), reader.allocate(large.end()).unwrap());
        fill(&there, 7);
        let set = |region: &Region, layout: &Arc<Layout>| {
            let ids: Vec<u32> = (0..layout.pages()).collect();
            PageSet::new(region, layout.clone(), ids.into(), None, None).unwrap()
        };
        let grant = owner.grant(&set(&there, &small), many()).unwrap();
        let report = read(&reader, &set(&here, &small), grant.ticket()).unwrap();
        assert_eq!(report.extents, 1, "all of the memory is one run");
        assert_eq!(bytes(&there), bytes(&here));

        blank(&here, 0);
        let refused = read(&reader, &set(&here, &large), grant.ticket()).unwrap_err();
        let told =
            refused.code == Code::ShapeMismatch && refused.text.contains("name positions of the grant");
        assert!(told, "{refused}");
        let positions: Arc<[u32]> = (0..8).collect();
        let transfer =
            reader.read(&set(&here, &large), grant.ticket(), Some(positions), TransferOptions::default());
        assert_eq!(transfer.unwrap().wait(Some(PATIENCE)).unwrap().extents, unequal);
        let (from, to) = (bytes(&there), bytes(&here));
        for (layer, page) in (0..3).flat_map(|layer| (0..8).map(move |page| (layer, page))) {
            let a = small.at(layer, page, 0) as usize;
            let b = large.at(layer, page / 2, 0) as usize + (page as usize % 2) * 4096;
            assert_eq!(from[a..a + 4096], to[b..b + 4096], "layer {layer}, page {page}");
        }
    }
}
