//! A peer that was admitted and means no good: it gets an error or is cut off, and never more memory than it pays for.

use crate::memory::{Mem, view};
use crate::world::{World, layout, ms};
use kvik_core::{
    Class, Code, Error, GrantId, GrantState, Layers, Layout, Order, RegionId, Right, Shape, Use, View,
};
use kvik_proto::{
    Begin, Claim, Frame, MAX_FRAME, MAX_PAGES, MAX_READERS, NicAnswer, NicCall, NicCallKind, NicKey, Nics,
    Op, PageList, Path, Select, Source, TravellingSource, frame_header,
};
use proptest::prelude::*;
use std::sync::Arc;

/// Sends a frame to engine 1 as engine 0, whatever its node would say.
fn inject(world: &mut World, session: u64, frames: &[Frame]) {
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.encode(&mut bytes));
    let now = world.now;
    world.peers[1].node.session(session).receive(&bytes, now);
    world.pump(1);
}

/// What engine 1 has sent to engine 0 since.
fn answers(world: &mut World, session: u64) -> Vec<Frame> {
    let bytes: Vec<u8> = world.link(session).control[1].drain(..).collect();
    let (mut frames, mut at) = (Vec::new(), 0);
    while let Some((frame, len)) = Frame::decode(&bytes[at..]).unwrap() {
        frames.push(frame);
        at += len;
    }
    frames
}

fn refusals(frames: &[Frame]) -> Vec<Code> {
    let code = |frame: &Frame| match frame {
        Frame::End { outcome: Err(error), .. } => Some(error.code),
        _ => None,
    };
    frames.iter().filter_map(code).collect()
}

fn begin(transfer: u64, grant: GrantId, op: Op, view: &View) -> Begin {
    let shape = Some(view.shape());
    let (unit, chunk) = (8192, 8192);
    let select = Select::default();
    Begin {
        transfer,
        grant,
        layout: view.layout().digest(),
        content: None,
        op,
        class: Class::Handover,
        path: Path::Channels,
        sums: false,
        confirm: true,
        readers: 1,
        time: ms(30_000),
        unit,
        chunk,
        shape,
        select,
        source: None,
    }
}

fn frame(begin: Begin) -> Frame {
    Frame::Begin(Box::new(begin))
}

/// A large grant: 2^18 pages, without the memory, which no work request here reaches.
fn large(world: &mut World, right: Right) -> (GrantId, View) {
    let mem = Mem::for_layout(&layout(1, 1), 1);
    let pages: Vec<u32> = (0..1 << 18).collect();
    let all = view(&layout(1 << 18, 8192), &pages);
    (world.grant(1, &mem, &all, right, Use::Many), all)
}

#[test]
fn waiting_requests_hold_a_bounded_amount() {
    let (mut world, session) = World::pair(1);
    let (nobody, all) = (GrantId([9; 16]), view(&layout(1 << 18, 8192), &[0]));
    let ids: Arc<[u32]> = (0..1u32 << 18).map(|id| id ^ 1).collect();
    for transfer in 1..41 {
        let mut begin = begin(2 * transfer, nobody, Op::Read, &all);
        begin.select.positions = Some(PageList::Ids(ids.clone()));
        inject(&mut world, session, &[frame(begin)]);
    }
    // 32 of a MiB each are held, the others are not.
    let codes = refusals(&answers(&mut world, session));
    assert_eq!(codes, vec![Code::MemoryCapReached; 40 - 32]);
    world.cut(1, session);
    world.assert_no_leak();
}

#[test]
fn a_few_bytes_do_not_unfold_into_many() {
    let (mut world, session) = World::pair(1);
    let (grant, all) = large(&mut world, Right::Read);
    for transfer in 1..41 {
        let mut begin = begin(2 * transfer, grant, Op::Read, &all);
        begin.select.positions = Some(PageList::Runs(vec![(0, 1 << 18)]));
        inject(&mut world, session, &[frame(begin)]);
    }
    let codes = refusals(&answers(&mut world, session));
    assert!(codes.len() >= 40 - 32 && codes.iter().all(|code| *code == Code::MemoryCapReached), "{codes:?}");
    world.cut(1, session);
    world.assert_no_leak();
}

/// A few bytes of a source stand for a million pages: they are charged as what came while the request waits, and as
/// what they become before they become it.
#[test]
fn a_source_is_charged_before_it_is_unfolded() {
    let (mut world, session) = World::pair(1);
    let pages: Vec<u32> = (0..MAX_PAGES as u32).collect();
    let all = view(&layout(MAX_PAGES as u32, 8192), &pages);
    let source =
        Source { region: RegionId(1), view: all.clone(), slot: 0, generation: 0, keys: Arc::default() };
    let id = world.grant_id();
    let before = world.peers[1].node.held_for(session);
    for transfer in 1..41 {
        let source = Some(source.travelling());
        let begin = Begin { path: Path::Memory, source, ..begin(2 * transfer, id, Op::Write, &all) };
        inject(&mut world, session, &[frame(begin)]);
    }
    assert_eq!(refusals(&answers(&mut world, session)), []);
    let held = world.peers[1].node.held_for(session) - before;
    assert!(held < 100_000, "{held} bytes are held for requests of a few bytes");
    let offer = world.offer(1, &Mem::for_layout(&layout(1, 1), 1), &all, Right::Write, Use::Many);
    world.issue(1, id, offer);
    // Of 4 MiB and a bit for each chunk not even eight fit into what a peer may hold.
    assert_eq!(refusals(&answers(&mut world, session)), [Code::MemoryCapReached; 40 - 7]);
    world.cut(1, session);
    world.assert_no_leak();
}

#[test]
fn many_requests_are_counted() {
    let (mut world, session) = World::pair(1);
    let all = view(&layout(4, 8192), &[0]);
    let frames: Vec<Frame> =
        (1..5000).map(|n| frame(begin(2 * n, GrantId([n as u8; 16]), Op::Read, &all))).collect();
    inject(&mut world, session, &frames);
    assert_eq!(refusals(&answers(&mut world, session)).len(), 4999 - 4096);
    world.advance(ms(1));
    // One that never answers is cut off before its unanswered ends fill the memory.
    let grant = readable(&mut world);
    world.end_grant(1, grant, GrantState::Revoked);
    let mut n = 10_000;
    while world.peers[1].downs.is_empty() {
        let frames: Vec<Frame> = (n..n + 1000).map(|n| frame(begin(2 * n, grant, Op::Read, &all))).collect();
        inject(&mut world, session, &frames);
        world.link(session).control[1].clear();
        n += 1000;
        assert!(n < 100_000);
    }
    world.assert_no_leak();
}

fn readable(world: &mut World) -> GrantId {
    let mem = Mem::for_layout(&layout(4, 8192), 1);
    world.grant(1, &mem, &view(&layout(4, 8192), &[0]), Right::Read, Use::Many)
}

#[test]
fn a_request_of_no_reader_or_too_many_is_no_frame() {
    let all = view(&layout(2, 8192), &[0, 1]);
    for (readers, good) in [(0, false), (1, true), (MAX_READERS, true), (MAX_READERS + 1, false)] {
        let mut bytes = Vec::new();
        frame(Begin { readers, ..begin(2, GrantId([1; 16]), Op::Read, &all) }).encode(&mut bytes);
        let decoded = Frame::decode(&bytes).map(drop).map_err(|error| error.code);
        assert_eq!(decoded, if good { Ok(()) } else { Err(Code::ProtocolError) }, "{readers} readers");
    }
}

#[test]
fn chunks_of_a_byte_are_refused() {
    let (mut world, session) = World::pair(1);
    let (grant, all) = large(&mut world, Right::Write);
    for (n, (unit, chunk)) in [(1, 1), (0, 0), (8192, 8193), (8192, 0), (4096, 8 << 20), (u32::MAX, u32::MAX)]
        .into_iter()
        .enumerate()
    {
        let begin = Begin { unit, chunk, ..begin(2 * n as u64 + 2, grant, Op::Write, &all) };
        inject(&mut world, session, &[frame(begin)]);
        assert_eq!(refusals(&answers(&mut world, session)), [Code::ProtocolError], "{unit} {chunk}");
    }
}

#[test]
fn a_source_that_lies_is_refused() {
    let (mut world, session) = World::pair(1);
    let layout = layout(4, 8192);
    let mem = Mem::for_layout(&layout, 1);
    let all = view(&layout, &[0, 1, 2, 3]);
    let grant = world.grant(1, &mem, &all, Right::Write, Use::Many);
    let source =
        |view: View| Source { region: RegionId(1), view, slot: 0, generation: 0, keys: Arc::default() };
    let short = view(&layout, &[0, 1, 2]);
    let paged = all.clone().with_order(Order::PageFirst);
    for (n, (view, code)) in
        [(Some(short), Code::ShapeMismatch), (Some(paged), Code::ShapeMismatch), (None, Code::ProtocolError)]
            .into_iter()
            .enumerate()
    {
        let begin = Begin {
            path: Path::Memory,
            source: view.map(|view| source(view).travelling()),
            ..begin(2 * n as u64 + 2, grant, Op::Write, &all)
        };
        inject(&mut world, session, &[frame(begin)]);
        assert_eq!(refusals(&answers(&mut world, session)), [code]);
    }
    // A stream of more than 2^63 bytes: some 2^21 pages of 2^43, named again and again.
    let vast = Arc::new(Layout::new(0, 2, 1 << 61, 1 << 61, 1, 0, Layers::At(vec![0])).unwrap());
    assert!(View::new(vast.clone(), vec![0; 64].into(), 0..1, 0..1, Order::LayerFirst).is_err());
}

#[test]
fn success_is_not_taken_from_a_peer_that_cannot_know() {
    for accepted in [false, true] {
        let (mut world, session) = World::pair(1);
        let layout = layout(4, 8192);
        let all = view(&layout, &[0, 1, 2, 3]);
        let grant = world.grant(1, &Mem::for_layout(&layout, 1), &all, Right::Read, Use::Once(1));
        let mut frames =
            vec![frame(begin(2, grant, Op::Read, &all)), Frame::End { transfer: 2, outcome: Ok(()) }];
        inject(&mut world, session, &frames[..1]);
        let now = world.now;
        let request = accepted
            .then(|| world.peers[1].node.session(session).next_of(Path::Channels, Claim::Next, now).unwrap());
        inject(&mut world, session, &frames.split_off(1));
        assert_eq!(world.peers[1].downs[0].1.code, Code::ProtocolError);
        if let Some(request) = request {
            world.peers[1].node.work_done(request.id, kvik_proto::WorkOutcome::Void);
        }
        assert_eq!(world.peers[1].node.grant_state(grant), Some(GrantState::Live));
        world.assert_no_leak();
    }
}

#[test]
fn numbers_of_transfers_only_rise() {
    for numbers in [[4, 4], [4, 2], [3, 5]] {
        let (mut world, session) = World::pair(1);
        let grant = readable(&mut world);
        world.end_grant(1, grant, GrantState::Revoked);
        let all = view(&layout(4, 8192), &[0]);
        let frames = numbers.map(|number| frame(begin(number, grant, Op::Read, &all)));
        inject(&mut world, session, &frames);
        assert_eq!(world.peers[1].downs[0].1.code, Code::ProtocolError, "{numbers:?}");
    }
}

#[test]
fn requests_that_are_not_read_are_not_piled_up_without_end() {
    let (mut world, session) = World::pair(1);
    let pages: Arc<[u32]> = (0..1u32 << 18).map(|id| id ^ 1).collect();
    let all = View::new(layout(1 << 18, 8192), pages.clone(), 0..1, 0..1, Order::LayerFirst).unwrap();
    let mem = Mem::for_layout(&layout(1, 1), 1);
    let mut begun = 0;
    let error = loop {
        let mut open = world.open(0, GrantId([1; 16]), Op::Write, Path::Channels, Some((&mem, &all)));
        open.select.positions = Some(PageList::of(&pages));
        let now = world.now;
        match world.peers[0].node.session(session).begin(open, now) {
            Ok(_) => begun += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.code, Code::MemoryCapReached);
    assert!((16..20).contains(&begun), "{begun}");
    assert!(world.peers[0].node.next_event().is_none(), "the session lives");
}

// ---- frames ----

fn any_view() -> impl Strategy<Value = View> {
    let dims = (1u32..6, 1u32..20, 1u32..4, 1u64..5000, any::<bool>(), any::<bool>());
    let parts = prop_oneof![Just(1u32), Just(2), Just(4)];
    (dims, parts, proptest::collection::vec(any::<u32>(), 1..12)).prop_map(
        |((layers, pages, slices, run, apart, page_first), parts, ids)| {
            let run = run * u64::from(parts);
            let page = run * u64::from(slices) + 3;
            let layer = page * u64::from(pages);
            let starts = match apart {
                true => Layers::At((0..u64::from(layers)).map(|n| n * layer).collect()),
                false => Layers::Strided { count: layers, stride: layer },
            };
            let layout = Layout::new(5, pages, run, page, slices, run, starts).unwrap();
            let ids: Vec<u32> = ids.into_iter().map(|id| id % (pages * parts)).collect();
            let order = if page_first { Order::PageFirst } else { Order::LayerFirst };
            View::of_parts(Arc::new(layout), parts, ids.into(), 0..layers, 0..slices, order).unwrap()
        },
    )
}

fn any_source() -> impl Strategy<Value = TravellingSource> {
    let keys = proptest::collection::vec((any::<u64>(), any::<u64>()), 0..3);
    (any::<u32>(), any_view(), any::<u32>(), any::<u64>(), keys).prop_map(
        |(region, view, slot, generation, keys)| {
            let keys = keys.into_iter().map(|(key, base)| NicKey { key, base }).collect();
            Source { region: RegionId(region), view, slot, generation, keys }.travelling()
        },
    )
}

fn any_range() -> impl Strategy<Value = Option<std::ops::Range<u32>>> {
    proptest::option::of((any::<u32>(), any::<u32>()).prop_map(|(start, end)| start..end))
}

fn any_pages() -> impl Strategy<Value = Option<PageList>> {
    proptest::option::of(prop_oneof![
        proptest::collection::vec((any::<u32>(), any::<u32>()), 0..9).prop_map(PageList::Runs),
        proptest::collection::vec(any::<u32>(), 0..9).prop_map(|ids| PageList::Ids(ids.into())),
    ])
}

fn any_begin() -> impl Strategy<Value = Frame> {
    let op = prop_oneof![Just(Op::Read), Just(Op::Write), Just(Op::Confirm), Just(Op::Extend)];
    let path = prop_oneof![Just(Path::Channels), Just(Path::Memory)];
    let shape = (any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>());
    let first = (0u64..40, 0u8..4, op, path, any::<bool>(), any::<bool>(), 1..=MAX_READERS);
    let second = (any::<u32>(), any::<u32>(), any::<u32>(), proptest::option::of(shape));
    let parts = (proptest::option::of(any::<u32>()), proptest::option::of(any::<[u8; 32]>()));
    let third = (any_pages(), any_range(), any_range(), parts, proptest::option::of(any_source()));
    (first, second, third).prop_map(
        |(first, second, (positions, layers, slices, (parts, content), source))| {
            let (transfer, grant, op, path, sums, confirm, readers) = first;
            let (time, unit, chunk, shape) = second;
            let shape = shape.map(|(layers, pages, row_bytes, run_bytes)| {
                let order = Order::LayerFirst;
                Shape { layers, pages, row_bytes, run_bytes, order }
            });
            let (grant, time) = (GrantId([grant; 16]), ms(time.into()));
            let select = Select { positions, layers, slices, parts };
            let layout = [0; 8];
            frame(Begin {
                transfer,
                grant,
                layout,
                content,
                op,
                class: if sums { Class::Handover } else { Class::Bulk },
                path,
                sums,
                confirm,
                readers,
                time,
                unit,
                chunk,
                shape,
                select,
                source,
            })
        },
    )
}

fn any_outcome() -> impl Strategy<Value = Result<(), Error>> {
    prop_oneof![
        Just(Ok(())),
        (1u16..40, ".{0,40}").prop_map(|(code, text)| Err(Error::new(Code::from_wire(code), text))),
    ]
}

fn any_frame() -> impl Strategy<Value = Frame> {
    prop_oneof![
        Just(Frame::Beat),
        any_begin(),
        (0u64..40, proptest::option::of(any_source().prop_map(Box::new)))
            .prop_map(|(transfer, source)| Frame::Accept { transfer, source }),
        (0u64..40, any_outcome()).prop_map(|(transfer, outcome)| Frame::End { transfer, outcome }),
        (0u64..40).prop_map(|transfer| Frame::Ended { transfer }),
        Just(Frame::OpenChannels),
        Just(Frame::Goodbye),
        (0u8..3, 0u64..4, proptest::collection::vec(any::<u8>(), 0..40))
            .prop_map(|(topic, number, payload)| Frame::Notify { topic, number, payload: payload.into() }),
        (0u8..3, 0u64..4).prop_map(|(topic, upto)| Frame::Noted { topic, upto }),
        proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..9), 0..4)
            .prop_map(|addresses| Frame::Nics(Nics { provider: String::new(), addresses })),
        (0u8..3, 0u8..3, any_call_kind(), proptest::collection::vec(any::<u8>(), 0..40))
            .prop_map(|(from, to, kind, address)| Frame::Reach(NicCall { from, to, kind, address })),
        (0u64..40, 0u64..9, proptest::collection::vec(0u64..3, 0..5))
            .prop_map(|(transfer, at, sums)| Frame::Check { transfer, at: at * 4096, sums }),
        (0u64..40, 0u64..9).prop_map(|(transfer, at)| Frame::Checked { transfer, at: at * 4096 }),
        (0u64..40, any_source())
            .prop_map(|(transfer, source)| Frame::AcceptStaged { transfer, source: Box::new(source) }),
        (0u64..40, 0u64..9, any::<u64>()).prop_map(|(transfer, at, place)| Frame::Lent {
            transfer,
            at: at * 4096,
            place
        }),
        (0u64..40, 0u64..9).prop_map(|(transfer, at)| Frame::Used { transfer, at: at * 4096 }),
        (0u64..40, 0u64..9).prop_map(|(transfer, at)| Frame::Landed { transfer, at: at * 4096 }),
        (0u8..3, 0u8..3, any_call_kind(), any::<bool>(), any_outcome()).prop_map(
            |(from, to, kind, moved, outcome)| {
                Frame::Reached(NicAnswer { from, to, kind, moved, outcome: outcome.map(|()| vec![1]) })
            }
        ),
    ]
}

fn any_call_kind() -> impl Strategy<Value = NicCallKind> {
    prop_oneof![Just(NicCallKind::Connect), Just(NicCallKind::ProbePage)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn frames_come_back(frame in any_frame(), rest in proptest::collection::vec(any::<u8>(), 0..9)) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        let len = bytes.len();
        prop_assert!(len <= MAX_FRAME);
        for cut in 0..len {
            prop_assert!(Frame::decode(&bytes[..cut]).unwrap().is_none());
        }
        bytes.extend(rest);
        let (back, taken) = Frame::decode(&bytes).unwrap().unwrap();
        prop_assert_eq!(taken, len);
        prop_assert_eq!(format!("{back:?}"), format!("{frame:?}"));
    }

    #[test]
    fn garbage_frames_never_panic(kind in 0u16..20, body in proptest::collection::vec(any::<u8>(), 0..300)) {
        let mut bytes = frame_header(kind, &body).to_vec();
        bytes.extend(body);
        let _ = Frame::decode(&bytes);
        let (mut world, session) = World::pair(1);
        let now = world.now;
        world.peers[1].node.session(session).receive(&bytes, now);
    }

    #[test]
    fn a_flipped_bit_is_seen_at_once(frame in any_frame(), bit in any::<usize>()) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        let bit = bit % (bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        let seen = Frame::decode(&bytes).map(drop).map_err(|error| (error.code, error.text.contains("damaged")));
        prop_assert_eq!(seen, Err((Code::ProtocolError, true)));
    }

    /// Any frames in any order, against engines with transfers of their own: no panic, and all of them end.
    #[test]
    fn any_frames_in_any_order_are_survived(frames in proptest::collection::vec(any_frame(), 0..30), seed: u64) {
        let (mut world, session) = World::pair(seed);
        let layout = layout(16, 8192);
        let all = view(&layout, &(0..16).collect::<Vec<u32>>());
        for (n, right) in [(0u8, Right::Read), (1, Right::Write)] {
            let offer = world.offer(1, &Mem::for_layout(&layout, 1), &all, right, Use::Many);
            world.issue(1, GrantId([n; 16]), offer);
        }
        let mut keys = Vec::new();
        for (n, op) in [(0u8, Op::Read), (1, Op::Write), (2, Op::Read)] {
            // Engine 1 is the initiator too, so that every kind of flow is there to be hit.
            let open = world.open(1, GrantId([n; 16]), op, Path::Channels, Some((&Mem::for_layout(&layout, 2), &all)));
            keys.push(world.begin(1, session, open));
        }
        for frame in frames {
            inject(&mut world, session, &[frame]);
            let now = world.now;
            let request = world.peers[1].node.session(session).next_of(Path::Channels, Claim::Next, now);
            if let Some(request) = request {
                let done = kvik_proto::WorkOutcome::Done { extents: 1, verify: ms(0) };
                world.peers[1].node.work_done(request.id, done);
            }
            while let Some(request) = world.peers[1].node.next_copy(now) {
                world.peers[1].node.work_done(request.id, kvik_proto::WorkOutcome::Void);
            }
            world.pump(1);
        }
        world.link(session).lost = true;
        world.peers[0].asleep = true;
        world.cut(1, session);
        for key in keys {
            prop_assert!(world.outcome(1, key).is_some());
        }
        prop_assert!(world.peers[1].node.is_quiet());
    }
}

#[test]
fn frames_that_are_too_long_are_not_waited_for() {
    let bytes = frame_header(1, &vec![0; MAX_FRAME + 1]);
    assert!(Frame::decode(&bytes).is_err_and(|error| error.text.contains("announced")));
    // The longest request fits.
    let ids: Arc<[u32]> = (0..MAX_PAGES as u32).map(|id| id ^ 1).collect();
    let all = View::new(layout(1 << 20, 8192), ids.clone(), 0..1, 0..1, Order::LayerFirst).unwrap();
    let source =
        Source { region: RegionId(1), view: all.clone(), slot: 0, generation: 0, keys: Arc::default() };
    let mut longest = begin(2, GrantId([0; 16]), Op::Write, &all);
    (longest.select.positions, longest.source) = (Some(PageList::Ids(ids)), Some(source.travelling()));
    let mut bytes = Vec::new();
    frame(longest).encode(&mut bytes);
    assert!(matches!(Frame::decode(&bytes), Ok(Some((Frame::Begin(_), _)))));
}
