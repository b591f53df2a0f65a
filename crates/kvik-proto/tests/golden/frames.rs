//! The frames of the control connection.

use crate::format::{Entry, Fields, all};
use crate::formats;
use kvik_core::{Class, Code, Error, GrantId, Layers, Layout, Order, RegionId, Shape, View};
use kvik_proto::{
    Begin, Frame, NicAnswer, NicCall, NicCallKind, NicKey, Nics, Op, PageList, Path, Select, Source,
    TravellingSource, frame_header,
};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

fn view(layers: Layers, parts: u32, ids: &[u32], order: Order) -> View {
    let layout = Arc::new(Layout::new(64, 12, 600, 4000, 4, 1000, layers).unwrap());
    let count = layout.layers();
    View::of_parts(layout, parts, ids.into(), 0..count, 1..3, order).unwrap()
}

fn keys() -> Arc<[NicKey]> {
    [NicKey { key: 1 << 40, base: 0x7F00_0000_1000 }, NicKey { key: 3, base: 0 }].into()
}

fn source(view: View) -> TravellingSource {
    Source { region: RegionId(7), view, slot: 65_535, generation: 1 << 33, keys: keys() }.travelling()
}

fn begin(op: Op, path: Path) -> Begin {
    Begin {
        transfer: 6,
        grant: GrantId(std::array::from_fn(|at| 0xA0 + at as u8)),
        layout: [8, 7, 6, 5, 4, 3, 2, 1],
        content: None,
        op,
        class: Class::Handover,
        path,
        sums: false,
        confirm: true,
        readers: 1,
        time: Duration::from_millis(29_950),
        unit: 1,
        chunk: 1,
        shape: None,
        select: Select::default(),
        source: None,
    }
}

fn moving(op: Op, path: Path, order: Order) -> Begin {
    let shape = Shape { layers: 3, pages: 4, row_bytes: 16_384, run_bytes: 4096, order };
    Begin { unit: 16_384, chunk: 524_288, shape: Some(shape), ..begin(op, path) }
}

/// Every kind of frame, and every form that its fields can take.
fn today() -> Vec<(&'static str, Frame)> {
    let framed = |begin: Begin| Frame::Begin(Box::new(begin));
    let strided = || Layers::Strided { count: 2, stride: 50_000 };
    let at = || Layers::At(vec![100_000, 0, 50_000]);
    let runs = PageList::Runs(vec![(3, 40), (1 << 20, 2)]);
    let ids = PageList::Ids([9, 2, 4_000_000_000, 5].into());
    let some = Select { positions: Some(runs), layers: Some(1..4), slices: Some(2..6), parts: Some(2) };
    let named = Select { positions: Some(ids), ..Select::default() };
    let content = Some(std::array::from_fn(|at| 0x40 + at as u8));
    let read = moving(Op::Read, Path::Channels, Order::LayerFirst);
    let shown = source(view(at(), 1, &[0, 1, 2, 3], Order::LayerFirst));
    let write =
        Begin { source: Some(shown), confirm: false, ..moving(Op::Write, Path::Memory, Order::LayerFirst) };
    let refused = Error::new(Code::GrantExpired, "its time is over, größer als erlaubt");
    let granted = source(view(strided(), 2, &[23, 0, 9], Order::PageFirst));
    let staged = Box::new(granted.clone());
    vec![
        ("beat", Frame::Beat),
        ("begin/read", framed(Begin { sums: true, content, ..read.clone() })),
        ("begin/read-some", framed(Begin { select: some, readers: 4, ..read })),
        ("begin/read-memory", framed(moving(Op::Read, Path::Memory, Order::PageFirst))),
        (
            "begin/write",
            framed(Begin { select: named, ..moving(Op::Write, Path::Channels, Order::PageFirst) }),
        ),
        ("begin/write-memory", framed(write)),
        (
            "begin/write-bulk",
            framed(Begin { class: Class::Bulk, ..moving(Op::Write, Path::Channels, Order::LayerFirst) }),
        ),
        ("begin/confirm", framed(Begin { readers: 4096, ..begin(Op::Confirm, Path::Channels) })),
        ("begin/extend", framed(Begin { confirm: false, ..begin(Op::Extend, Path::Channels) })),
        ("accept", Frame::Accept { transfer: 6, source: None }),
        ("accept/source", Frame::Accept { transfer: 7, source: Some(Box::new(granted)) }),
        ("end", Frame::End { transfer: 6, outcome: Ok(()) }),
        ("end/error", Frame::End { transfer: u64::MAX, outcome: Err(refused) }),
        ("ended", Frame::Ended { transfer: 6 }),
        ("open-channels", Frame::OpenChannels),
        ("goodbye", Frame::Goodbye),
        (
            "notify",
            Frame::Notify {
                topic: 0,
                number: 1 << 33,
                payload: b"KV of request 7 is there".as_slice().into(),
            },
        ),
        ("notify/empty", Frame::Notify { topic: 0, number: 1, payload: [].into() }),
        ("notify/topic", Frame::Notify { topic: 200, number: 2, payload: b"of a library".as_slice().into() }),
        ("noted", Frame::Noted { topic: 0, upto: u64::MAX }),
        ("noted/topic", Frame::Noted { topic: 200, upto: 1 }),
        ("reach", Frame::Reach(NicCall { from: 1, to: 2, kind: NicCallKind::Connect, address: vec![9; 24] })),
        (
            "reach/page",
            Frame::Reach(NicCall { from: 31, to: 2, kind: NicCallKind::ProbePage, address: Vec::new() }),
        ),
        (
            "reached",
            Frame::Reached(NicAnswer {
                from: 1,
                to: 2,
                kind: NicCallKind::Connect,
                moved: false,
                outcome: Ok(vec![8; 24]),
            }),
        ),
        (
            "reached/moved",
            Frame::Reached(NicAnswer {
                from: 31,
                to: 2,
                kind: NicCallKind::Connect,
                moved: true,
                outcome: Ok(vec![8; 32]),
            }),
        ),
        (
            "reached/page",
            Frame::Reached(NicAnswer {
                from: 31,
                to: 2,
                kind: NicCallKind::ProbePage,
                moved: false,
                outcome: Ok(vec![8; 16]),
            }),
        ),
        (
            "not-reached",
            Frame::Reached(NicAnswer {
                from: 1,
                to: 2,
                kind: NicCallKind::Connect,
                moved: false,
                outcome: Err(Error::new(Code::PeerLost, "its port is down")),
            }),
        ),
        ("check", Frame::Check { transfer: 6, at: 3 << 20, sums: vec![u64::MAX, 0x0123_4567_89AB_CDEF] }),
        ("checked", Frame::Checked { transfer: 6, at: 3 << 20 }),
        ("nics", Frame::Nics(Nics { provider: "efa".into(), addresses: vec![vec![7; 32], vec![1]] })),
        ("accept-staged", Frame::AcceptStaged { transfer: 8, source: staged }),
        ("lent", Frame::Lent { transfer: 8, at: 3 << 20, place: 1 << 19 }),
        ("used", Frame::Used { transfer: 8, at: 3 << 20 }),
        ("landed", Frame::Landed { transfer: 8, at: 3 << 20 }),
    ]
}

fn maybe<T>(value: Option<&T>, show: impl Fn(&T) -> String) -> String {
    value.map_or_else(|| "none".to_owned(), show)
}

fn range(range: &Range<u32>) -> String {
    format!("{} to {}", range.start, range.end)
}

fn list(pages: &PageList) -> String {
    match pages {
        PageList::Runs(runs) => format!("runs {runs:?}"),
        PageList::Ids(ids) => format!("ids {ids:?}"),
    }
}

/// Its code and its text are all of an error that travels.
fn show_outcome(outcome: &Result<Vec<u8>, Error>) -> String {
    match outcome {
        Ok(answer) => format!("Ok({answer:?})"),
        Err(Error { code, text, .. }) => format!("Err(Error {{ code: {code:?}, text: {text:?} }})"),
    }
}

fn show_layers(layers: &Layers) -> String {
    match layers {
        Layers::Strided { count, stride } => format!("{count}, {stride} apart"),
        Layers::At(starts) => format!("at {starts:?}"),
    }
}

fn show_source(source: &TravellingSource) -> String {
    let Source { region, view, slot, generation, keys } = source.clone().unfold().unwrap();
    let (layout, layers, slices) = (view.layout(), range(&view.layers()), range(&view.slices()));
    format!(
        "region {}, slot {slot}, generation {generation}, keys {keys:?}; layout: offset {}, {} pages of {} bytes, stride {}, \
         {} slices, stride {}, layers {}; view: layers {layers}, slices {slices}, {} parts, {:?}, {:?}",
        region.0,
        layout.offset(),
        layout.pages(),
        layout.run_bytes(),
        layout.page_stride(),
        layout.slices(),
        layout.slice_stride(),
        show_layers(layout.layer_starts()),
        view.parts(),
        view.pages(),
        view.order(),
    )
}

fn describe_begin(begin: &Begin) -> Fields {
    let Begin {
        transfer,
        grant,
        layout,
        content,
        op,
        class,
        path,
        sums,
        confirm,
        readers,
        time,
        unit,
        chunk,
        ..
    } = begin;
    let Begin { shape, select: Select { positions, layers, slices, parts }, source, .. } = begin;
    let show_shape = |shape: &Shape| {
        let Shape { layers, pages, row_bytes, run_bytes, order } = shape;
        format!("{layers} layers, {pages} pages of {row_bytes} bytes, slices of {run_bytes}, {order:?}")
    };
    vec![
        ("frame", "begin".to_owned()),
        ("transfer", transfer.to_string()),
        ("grant", grant.to_string()),
        ("layout", format!("{layout:02x?}")),
        ("content", maybe(content.as_ref(), |claim| format!("{claim:02x?}"))),
        ("op", format!("{op:?}")),
        ("class", class.to_string()),
        ("path", format!("{path:?}")),
        ("sums", sums.to_string()),
        ("confirm", confirm.to_string()),
        ("readers", readers.to_string()),
        ("time", format!("{} ms", time.as_millis())),
        ("unit", unit.to_string()),
        ("chunk", chunk.to_string()),
        ("shape", maybe(shape.as_ref(), show_shape)),
        ("positions", maybe(positions.as_ref(), list)),
        ("layers", maybe(layers.as_ref(), range)),
        ("slices", maybe(slices.as_ref(), range)),
        ("parts", maybe(parts.as_ref(), u32::to_string)),
        ("source", maybe(source.as_ref(), show_source)),
    ]
}

/// Everything that a frame says. A new kind or field does not compile before it is here too.
fn describe(frame: &Frame) -> Fields {
    let named = |name: &str| ("frame", name.to_owned());
    match frame {
        Frame::Beat => vec![named("beat")],
        Frame::Begin(begin) => describe_begin(begin),
        Frame::Accept { transfer, source } => vec![
            named("accept"),
            ("transfer", transfer.to_string()),
            ("source", maybe(source.as_deref(), show_source)),
        ],
        Frame::End { transfer, outcome } => vec![
            named("end"),
            ("transfer", transfer.to_string()),
            (
                "outcome",
                outcome.as_ref().map_or_else(|e| format!("{}: {}", e.code, e.text), |()| "ok".to_owned()),
            ),
        ],
        Frame::Ended { transfer } => vec![named("ended"), ("transfer", transfer.to_string())],
        Frame::OpenChannels => vec![named("open-channels")],
        Frame::Goodbye => vec![named("goodbye")],
        Frame::Notify { topic, number, payload } => vec![
            named("notify"),
            ("topic", topic.to_string()),
            ("number", number.to_string()),
            ("payload", format!("{:?}", String::from_utf8_lossy(payload))),
        ],
        Frame::Noted { topic, upto } => {
            vec![named("noted"), ("topic", topic.to_string()), ("upto", upto.to_string())]
        }
        Frame::Reach(call) => vec![
            named("reach"),
            ("from", call.from.to_string()),
            ("to", call.to.to_string()),
            ("kind", format!("{:?}", call.kind)),
            ("address", format!("{:?}", call.address)),
        ],
        Frame::Reached(answer) => vec![
            named("reached"),
            ("from", answer.from.to_string()),
            ("to", answer.to.to_string()),
            ("kind", format!("{:?}", answer.kind)),
            ("moved", answer.moved.to_string()),
            ("outcome", show_outcome(&answer.outcome)),
        ],
        Frame::Check { transfer, at, sums } => vec![
            named("check"),
            ("transfer", transfer.to_string()),
            ("at", at.to_string()),
            ("sums", format!("{sums:?}")),
        ],
        Frame::Checked { transfer, at } => {
            vec![named("checked"), ("transfer", transfer.to_string()), ("at", at.to_string())]
        }
        Frame::AcceptStaged { transfer, source } => {
            vec![named("accept-staged"), ("transfer", transfer.to_string()), ("source", show_source(source))]
        }
        Frame::Lent { transfer, at, place } => vec![
            named("lent"),
            ("transfer", transfer.to_string()),
            ("at", at.to_string()),
            ("place", place.to_string()),
        ],
        Frame::Used { transfer, at } => {
            vec![named("used"), ("transfer", transfer.to_string()), ("at", at.to_string())]
        }
        Frame::Landed { transfer, at } => {
            vec![named("landed"), ("transfer", transfer.to_string()), ("at", at.to_string())]
        }
        Frame::Nics(nics) => vec![
            named("nics"),
            ("provider", nics.provider.clone()),
            ("addresses", format!("{:?}", nics.addresses)),
        ],
    }
}

fn encoded(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    bytes
}

fn entries() -> Vec<Entry> {
    today().iter().map(|(name, frame)| Entry::new(name, describe(frame), encoded(frame))).collect()
}

#[test]
fn frames_of_every_release_are_read() {
    for golden in all("frames", &formats(), &entries()) {
        for Entry { name, fields, bytes } in golden.entries {
            let (frame, len) = Frame::decode(&bytes).unwrap().expect("a whole frame");
            assert_eq!(len, bytes.len(), "{:?} {name}", golden.path);
            assert_eq!(
                Entry::new(&name, describe(&frame), vec![]).fields,
                fields,
                "{:?} {name}",
                golden.path
            );
            if golden.is_written_today {
                assert_eq!(encoded(&frame), bytes, "{:?} {name}", golden.path);
            }
        }
    }
}

/// A kind of frame that this release understands has a golden file, and so has each form of a request.
#[test]
fn no_kind_of_frame_is_without_its_golden_file() {
    let kind = |bytes: &[u8]| u16::from_le_bytes([bytes[4], bytes[5]]);
    let kept: BTreeSet<u16> = entries().iter().map(|entry| kind(&entry.bytes)).collect();
    let understood = (0..=u16::MAX).filter(|kind| {
        !Frame::decode(&frame_header(*kind, &[])).is_err_and(|error| error.text.contains("unknown kind"))
    });
    assert_eq!(understood.collect::<BTreeSet<u16>>(), kept);
    let fields: Vec<(String, String)> = entries().into_iter().flat_map(|entry| entry.fields).collect();
    for (field, forms) in [
        ("op", &["Read", "Write", "Confirm", "Extend"][..]),
        ("path", &["Channels", "Memory"]),
        ("sums", &["true", "false"]),
        ("confirm", &["true", "false"]),
        ("shape", &["none", "LayerFirst", "PageFirst"]),
        ("content", &["none", "40"]),
        ("positions", &["none", "runs", "ids"]),
        ("layers", &["none", "to"]),
        ("slices", &["none", "to"]),
        ("parts", &["none", "2"]),
        ("source", &["none", "layers at", "apart", "LayerFirst", "PageFirst"]),
        ("outcome", &["ok", "grant_expired"]),
    ] {
        for form in forms {
            let kept = fields.iter().any(|(name, value)| name == field && value.contains(form));
            assert!(kept, "no golden frame has {field} = {form}");
        }
    }
}
