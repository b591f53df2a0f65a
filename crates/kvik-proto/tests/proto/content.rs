//! A grant that says what its pages hold serves who states the same, and nobody else.

use crate::memory::{Mem, view};
use crate::world::{World, layout, ms};
use kvik_core::{Code, Content, ContentClaim, GrantId, GrantState, Layers, Layout, Order, Right, Use, View};
use kvik_proto::{Claim, OWN_SESSION, Op, Open, PageList, Path, Select, WorkKind, WorkOutcome};
use std::sync::Arc;

const PATHS: [Path; 3] = [Path::Channels, Path::Memory, Path::OneSided];

/// Content of so many pages: each number is another prompt.
fn content(prompt: u8, pages: usize) -> Content {
    Content::new(&(0..pages).flat_map(|page| [prompt + page as u8; 32]).collect::<Vec<u8>>(), b"all").unwrap()
}

/// Engine 1 has a grant over four pages of a prompt; engine 0 asks.
struct Scene {
    world: World,
    session: u64,
    theirs: Arc<Layout>,
    there: Mem,
    content: Content,
    grant: GrantId,
    right: Right,
}

fn scene(right: Right, uses: Use) -> Scene {
    let (mut world, session) = World::one_sided_pair(17);
    let theirs = layout(8, 8192);
    let there = Mem::for_layout(&theirs, 2);
    let content = content(40, 4);
    let offer = world.offer(1, &there, &view(&theirs, &[6, 1, 5, 2]), right, uses);
    let grant = world.grant_id();
    world.issue(1, grant, kvik_proto::Offer { content: Some(content.clone()), ..offer });
    Scene { world, session, theirs, there, content, grant, right }
}

impl Scene {
    fn open(&mut self, op: Op, path: Path, pages: &[u32], claim: Option<ContentClaim>) -> (Open<Mem>, Mem) {
        let mine = layout(4, 8192);
        let here = Mem::for_layout(&mine, 1);
        let side = view(&mine, &(0..pages.len() as u32).collect::<Vec<u32>>());
        let moves = matches!(op, Op::Read | Op::Write);
        let path = if moves { path } else { Path::Channels };
        let mut open = self.world.open(0, self.grant, op, path, moves.then_some((&here, &side)));
        (open.content, open.extend) = (claim, ms(100_000));
        open.select.positions = moves.then(|| PageList::of(&pages.into()));
        (open, here)
    }

    fn ask(&mut self, op: Op, path: Path, pages: &[u32], claim: Option<ContentClaim>) -> Result<Mem, Code> {
        let (open, here) = self.open(op, path, pages, claim);
        self.run(open).map(|()| here)
    }

    /// Begins it, and does what a NIC would.
    fn run(&mut self, open: Open<Mem>) -> Result<(), Code> {
        let key = self.world.begin(0, self.session, open);
        self.world.settle();
        while let Some(order) = self.world.peers[0].node.session(self.session).next_of(
            Path::OneSided,
            Claim::Next,
            self.world.now,
        ) {
            let WorkKind::Post(op, source, _) = &order.kind else { panic!("no post") };
            let (part, mine, theirs) = (order.part.clone(), &order.region, &self.there);
            match op {
                Op::Write => theirs.write(&source.view, part.clone(), &mine.peek(&order.view, part)),
                _ => mine.write(&order.view, part.clone(), &theirs.peek(&source.view, part)),
            }
            let done = WorkOutcome::Done { extents: 1, verify: ms(0) };
            self.world.peers[0].node.work_done(order.id, done);
            self.world.pump(0);
        }
        self.world.settle();
        self.world.outcome(0, key).expect("an end").map_err(|error| error.code)
    }

    /// The operation that the grant is for.
    fn op(&self) -> Op {
        if self.right == Right::Read { Op::Read } else { Op::Write }
    }

    fn state(&self) -> Option<GrantState> {
        self.world.peers[1].node.grant_state(self.grant)
    }
}

/// Whatever is wrong with a request, it is refused by its name, moves nothing and uses nothing, and the next right one
/// is served.
#[test]
fn who_states_other_content_gets_nothing_and_uses_nothing() {
    for (right, path) in
        [Right::Read, Right::Write].into_iter().flat_map(|right| PATHS.map(|path| (right, path)))
    {
        let mut s = scene(right, Use::Once(1));
        let (op, before) = (s.op(), s.there.all());
        let part = Content::new(s.content.chain().as_flattened(), b"another part").unwrap();
        let link = |at: usize| Some(s.content.chain()[at]);
        let wrong = [
            content(90, 4).claim(3),
            part.claim(3),
            s.content.claim(2),
            s.content.claim(0),
            link(3),
            link(2),
            Some([0; 32]),
        ];
        for claim in wrong {
            for op in [op, Op::Confirm, Op::Extend] {
                assert_eq!(
                    s.ask(op, path, &[0, 1, 2, 3], claim).err(),
                    Some(Code::ContentMismatch),
                    "{op:?}"
                );
            }
        }
        for op in [op, Op::Confirm, Op::Extend] {
            assert_eq!(s.ask(op, path, &[0, 1, 2, 3], None).err(), Some(Code::ContentRequired), "{op:?}");
        }
        let served = std::mem::take(&mut s.world.peers[1].served);
        assert!(served.len() == 24 && served.iter().all(|one| one.refused && one.bytes == 0), "{served:?}");
        assert_eq!((s.state(), s.there.all()), (Some(GrantState::Live), before));
        // It had no more time, either.
        s.world.advance(ms(119_000));
        assert_eq!(s.state(), Some(GrantState::Live));
        let here = s.ask(op, path, &[0, 1, 2, 3], s.content.claim(3)).unwrap();
        let granted = view(&s.theirs, &[6, 1, 5, 2]);
        assert_eq!(here.all(), s.there.peek(&granted, 0..granted.bytes()));
        assert_eq!(s.state(), Some(GrantState::Consumed));
        s.world.assert_quiet();
    }
}

#[test]
fn a_refused_extension_extends_nothing_and_a_right_one_does() {
    for (claim, state) in [(2, GrantState::Expired), (3, GrantState::Live)] {
        let mut s = scene(Right::Read, Use::Many);
        assert_eq!(s.ask(Op::Extend, Path::Channels, &[0], s.content.claim(claim)).is_ok(), claim == 3);
        s.world.advance(ms(120_001));
        assert_eq!(s.state().unwrap_or(GrantState::Expired), state);
    }
}

/// Prompts that begin alike may read what they share, and only the one that goes to the end may use it up.
#[test]
fn a_beginning_is_read_and_not_used_up() {
    for path in PATHS {
        let mut s = scene(Right::Read, Use::Once(1));
        for end in 1..4u32 {
            let pages: Vec<u32> = (0..end).collect();
            let claim = s.content.claim(end as usize - 1);
            assert_eq!(s.ask(Op::Read, path, &pages, claim).err(), Some(Code::ContentMismatch), "{end}");
            let (open, _) = s.open(Op::Read, path, &pages, claim);
            s.run(Open { confirm: false, ..open }).unwrap();
            assert_eq!(s.state(), Some(GrantState::Live));
        }
        s.ask(Op::Read, path, &[2, 3], s.content.claim(3)).unwrap();
        assert_eq!(s.world.peers[1].ended[&s.grant], GrantState::Consumed);
        s.world.assert_quiet();
    }
}

/// The claim is of the last page that is asked for, whatever parts it is asked for in.
#[test]
fn a_prefix_is_claimed_by_its_own_link() {
    let mut s = scene(Right::Read, Use::Many);
    let granted = [6, 1, 5, 2];
    for start in 0..4u32 {
        for end in start + 1..=4 {
            let pages: Vec<u32> = (start..end).collect();
            for link in 0..4 {
                let read = s.ask(Op::Read, Path::Channels, &pages, s.content.claim(link));
                match link == end as usize - 1 {
                    true => {
                        let ids = &granted[start as usize..end as usize];
                        let (got, there) = (read.unwrap(), view(&s.theirs, ids));
                        assert_eq!(
                            got.all()[..there.bytes() as usize],
                            s.there.peek(&there, 0..there.bytes())
                        );
                    }
                    false => {
                        assert_eq!(read.err(), Some(Code::ContentMismatch), "{start} to {end} by {link}")
                    }
                }
            }
        }
    }
    // Pages in four parts: position 4 is the first part of the second page.
    let quarters = Arc::new(Layout::new(0, 8, 2048, 2048, 1, 0, Layers::At(vec![0])).unwrap());
    for (first, count, link) in [(0, 4, 0), (0, 5, 1), (4, 4, 1), (3, 1, 0), (7, 2, 2), (15, 1, 3)] {
        for claimed in 0..4 {
            let here = Mem::for_layout(&quarters, 1);
            let side = view(&quarters, &(0..count).collect::<Vec<u32>>());
            let mut open = s.world.open(0, s.grant, Op::Read, Path::Channels, Some((&here, &side)));
            open.content = s.content.claim(claimed);
            let positions = Some(PageList::Runs(vec![(first, count)]));
            open.select = Select { positions, parts: Some(4), ..Select::default() };
            let read = s.world.transfer(0, s.session, open);
            assert_eq!(read.is_ok(), claimed == link, "{count} from {first}, claimed by {claimed}: {read:?}");
        }
    }
    s.world.assert_quiet();
}

/// What a chain says it says of an order: pages that are left out, repeated or turned are not what was claimed.
#[test]
fn positions_of_a_grant_with_content_are_one_range() {
    for path in PATHS {
        let mut s = scene(Right::Read, Use::Many);
        for pages in [&[1u32, 0][..], &[0, 2], &[0, 0], &[3, 2, 1, 0], &[0, 1, 3, 2], &[2, 0, 1]] {
            let last = *pages.iter().max().unwrap() as usize;
            for link in [pages[pages.len() - 1] as usize, last] {
                let read = s.ask(Op::Read, path, pages, s.content.claim(link));
                assert_eq!(read.err(), Some(Code::InvalidArgument), "{pages:?}");
            }
        }
        assert_eq!(s.ask(Op::Read, path, &[3, 4], s.content.claim(3)).err(), Some(Code::PageNotGranted));
        // Without positions it is all of the grant.
        let (mut open, here) = s.open(Op::Read, path, &[0, 1, 2, 3], s.content.claim(3));
        open.select.positions = None;
        s.run(open).unwrap();
        let granted = view(&s.theirs, &[6, 1, 5, 2]);
        assert_eq!(here.all(), s.there.peek(&granted, 0..granted.bytes()));
        s.world.assert_quiet();
    }
}

#[test]
fn a_grant_that_says_nothing_is_not_taken_for_one_that_does() {
    let (mut world, session) = World::pair(3);
    let layout = layout(4, 8192);
    let (here, there) = (Mem::for_layout(&layout, 1), Mem::for_layout(&layout, 2));
    let all = view(&layout, &[0, 1, 2, 3]);
    let grant = world.grant(1, &there, &all, Right::Read, Use::Once(1));
    for op in [Op::Read, Op::Confirm, Op::Extend] {
        let mut open = world.open(0, grant, op, Path::Channels, (op == Op::Read).then_some((&here, &all)));
        open.content = content(40, 4).claim(3);
        let error = world.transfer(0, session, open).unwrap_err();
        assert_eq!(error.code, Code::ContentMismatch);
        assert!(error.text.contains("does not say what its pages hold"), "{error}");
    }
    assert_eq!(world.peers[1].node.grant_state(grant), Some(GrantState::Live));
}

/// P4 comes first: a grant that has ended says so to everybody.
#[test]
fn an_ended_grant_says_how_it_ended() {
    let mut s = scene(Right::Read, Use::Many);
    s.world.end_grant(1, s.grant, GrantState::Revoked);
    for claim in [None, Some([0; 32]), s.content.claim(3)] {
        assert_eq!(s.ask(Op::Read, Path::Channels, &[0, 1, 2, 3], claim).err(), Some(Code::GrantRevoked));
    }
}

/// A request that came before its grant is looked at like any other once the grant is there.
#[test]
fn a_request_that_waited_for_its_grant_is_compared_too() {
    let mut s = scene(Right::Read, Use::Once(1));
    let later = s.world.grant_id();
    let layout = s.theirs.digest();
    let claims = [None, s.content.claim(2), s.content.claim(3)];
    let keys = claims.map(|claim| {
        let (open, _) = s.open(Op::Read, Path::Channels, &[0, 1, 2, 3], claim);
        s.world.begin(0, s.session, Open { grant: later, layout, readers: 9, confirm: false, ..open })
    });
    s.world.settle();
    let offer = s.world.offer(1, &s.there, &view(&s.theirs, &[6, 1, 5, 2]), Right::Read, Use::Once(1));
    s.world.issue(1, later, kvik_proto::Offer { content: Some(s.content.clone()), ..offer });
    s.world.settle();
    let outcomes = keys.map(|key| s.world.outcome(0, key).unwrap().map_err(|error| error.code));
    assert_eq!(outcomes, [Err(Code::ContentRequired), Err(Code::ContentMismatch), Ok(())]);
}

/// Who is refused has no say in how many readers there are.
#[test]
fn a_refused_reader_does_not_count() {
    let mut s = scene(Right::Read, Use::Once(1));
    let (open, _) = s.open(Op::Read, Path::Channels, &[0, 1, 2, 3], Some([0; 32]));
    s.run(Open { readers: 9, ..open }).unwrap_err();
    s.ask(Op::Confirm, Path::Channels, &[0], s.content.claim(3)).unwrap();
    assert_eq!(s.world.peers[1].ended[&s.grant], GrantState::Consumed);
}

/// An engine's own grants are no exception.
#[test]
fn an_engine_states_content_to_itself_as_well() {
    let mut s = scene(Right::Read, Use::Once(1));
    let mine = layout(4, 8192);
    let (here, side) = (Mem::for_layout(&mine, 1), view(&mine, &[0, 1, 2, 3]));
    for op in [Op::Confirm, Op::Extend, Op::Read] {
        let memory = (op == Op::Read).then_some((&here, &side));
        for claim in [None, s.content.claim(2), Some([0; 32])] {
            let open = Open { content: claim, ..s.world.open(1, s.grant, op, Path::Memory, memory) };
            let error = s.world.try_begin(1, OWN_SESSION, open).unwrap_err();
            let code = if claim.is_none() { Code::ContentRequired } else { Code::ContentMismatch };
            assert_eq!(error.code, code, "{op:?}");
        }
    }
    assert_eq!(s.state(), Some(GrantState::Live));
    let open = Open {
        content: s.content.claim(3),
        ..s.world.open(1, s.grant, Op::Read, Path::Memory, Some((&here, &side)))
    };
    s.world.transfer(1, OWN_SESSION, open).unwrap();
    let granted = view(&s.theirs, &[6, 1, 5, 2]);
    assert_eq!(here.all(), s.there.peek(&granted, 0..granted.bytes()));
}

#[test]
fn content_has_a_link_for_each_whole_page() {
    let mut s = scene(Right::Read, Use::Many);
    let halves = View::of_parts(s.theirs.clone(), 2, [0, 1].into(), 0..1, 0..1, Order::LayerFirst).unwrap();
    for (granted, links) in [(view(&s.theirs, &[6, 1, 5]), 4), (view(&s.theirs, &[6, 1, 5]), 2), (halves, 2)]
    {
        let offer = s.world.offer(1, &s.there, &granted, Right::Read, Use::Many);
        let offer = kvik_proto::Offer { content: Some(content(40, links)), ..offer };
        let (id, now) = (s.world.grant_id(), s.world.now);
        let error = s.world.peers[1].node.grants().give(id, offer, now).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
    }
}
