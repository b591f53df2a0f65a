//! Structure out of a fuzzer's bytes. What is drawn is valid often, and wrong in one field often too.

use arbitrary::{Result, Unstructured};
use kvik_core::{Class, Code, ContentClaim, Error, GrantId, Layers, Layout, Order, RegionId, Shape, View};
use kvik_proto::{
    Begin, Frame, MAX_READERS, NicKey, Nics, Op, PageList, Path, Select, Source, TravellingSource,
};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A small number often, any number sometimes, and the edges.
pub fn number(u: &mut Unstructured) -> Result<u64> {
    Ok(match u.int_in_range(0u8..=9)? {
        0 => u.arbitrary()?,
        1 => u64::MAX - u64::from(u.arbitrary::<u8>()?),
        2 => (1 << 63) - u64::from(u.arbitrary::<u8>()?),
        3 => u64::from(u32::MAX) - u64::from(u.arbitrary::<u8>()?),
        4 => 1 << u.int_in_range(0..=63)?,
        _ => u.int_in_range(0..=32)?,
    })
}

/// The same in 32 bits.
pub fn small(u: &mut Unstructured) -> Result<u32> {
    Ok(number(u)?.try_into().unwrap_or(u32::MAX))
}

fn maybe<T>(u: &mut Unstructured, f: impl FnOnce(&mut Unstructured) -> Result<T>) -> Result<Option<T>> {
    if u.arbitrary()? { f(u).map(Some) } else { Ok(None) }
}

fn some<T>(
    u: &mut Unstructured,
    most: usize,
    mut f: impl FnMut(&mut Unstructured) -> Result<T>,
) -> Result<Vec<T>> {
    (0..u.int_in_range(0..=most)?).map(|_| f(u)).collect()
}

pub fn order(u: &mut Unstructured) -> Result<Order> {
    Ok(if u.arbitrary()? { Order::PageFirst } else { Order::LayerFirst })
}

pub fn layers(u: &mut Unstructured) -> Result<Layers> {
    Ok(match u.arbitrary()? {
        true => Layers::Strided { count: small(u)?, stride: number(u)? },
        false => Layers::At(some(u, 6, number)?),
    })
}

/// A layout that may be refused.
pub fn layout(u: &mut Unstructured) -> Result<kvik_core::Result<Layout>> {
    let (offset, pages, run, page) = (number(u)?, small(u)?, number(u)?, number(u)?);
    let (slices, slice, layers) = (small(u)?, number(u)?, layers(u)?);
    Ok(Layout::new(offset, pages, run, page, slices, slice, layers))
}

/// A layout that is none too large, so that all of its bytes can be listed.
pub fn small_layout(u: &mut Unstructured) -> Result<Layout> {
    let (pages, slices, layers) =
        (u.int_in_range(1..=9u32)?, u.int_in_range(1..=3u32)?, u.int_in_range(1..=3u32)?);
    let (run, gap) = (u.int_in_range(1..=12u64)?, u.int_in_range(0..=3u64)?);
    let (slice, page_first) = (run + gap % 2, u.arbitrary()?);
    let row = slice * u64::from(slices) + gap;
    let (page, layer) =
        if page_first { (row * u64::from(layers), row) } else { (row, row * u64::from(pages)) };
    let starts = match u.arbitrary()? {
        true => Layers::Strided { count: layers, stride: layer },
        false => Layers::At((0..u64::from(layers)).rev().map(|at| at * layer).collect()),
    };
    let offset = u.int_in_range(0..=9u64)?;
    Layout::new(offset, pages, run, page, slices, slice, starts)
        .map_err(|_| arbitrary::Error::IncorrectFormat)
}

/// A view of some of it.
pub fn view(u: &mut Unstructured, layout: &Arc<Layout>) -> Result<View> {
    let divisors: Vec<u32> =
        (1..=12).filter(|parts| layout.run_bytes().is_multiple_of(u64::from(*parts))).collect();
    let parts = *u.choose(&divisors)?;
    let last = layout.pages() * parts - 1;
    let mut ids = some(u, 11, |u| u.int_in_range(0..=last))?;
    ids.push(u.int_in_range(0..=last)?);
    let (layer, slice) = (u.int_in_range(0..=layout.layers() - 1)?, u.int_in_range(0..=layout.slices() - 1)?);
    let (layers, slices) = (layer..layout.layers(), slice..layout.slices());
    View::of_parts(layout.clone(), parts, ids.into(), layers, slices, order(u)?)
        .map_err(|_| arbitrary::Error::IncorrectFormat)
}

pub fn page_list(u: &mut Unstructured) -> Result<PageList> {
    Ok(match u.arbitrary()? {
        true => PageList::Runs(some(u, 6, |u| Ok((small(u)?, small(u)?)))?),
        false => PageList::Ids(some(u, 20, small)?.into()),
    })
}

fn range(u: &mut Unstructured) -> Result<Range<u32>> {
    Ok(small(u)?..small(u)?)
}

fn source(u: &mut Unstructured) -> Result<TravellingSource> {
    let layout = Arc::new(small_layout(u)?);
    let source = Source {
        region: RegionId(small(u)?),
        view: view(u, &layout)?,
        slot: small(u)?,
        generation: number(u)?,
        keys: (0..u.int_in_range(0..=2)?)
            .map(|_| Ok(NicKey { key: number(u)?, base: number(u)? }))
            .collect::<Result<_>>()?,
    };
    Ok(source.travelling())
}

/// A grant that a request may be for: its id, the digest of its layout, its shape, and what claims its content.
pub type Fit = (GrantId, [u8; 8], Shape, Option<ContentClaim>);

/// A request. `fits` gives the shapes and grants that the engine it goes to would serve.
pub fn begin(u: &mut Unstructured, fits: &[Fit]) -> Result<Begin> {
    let mut begin = Begin {
        transfer: u.int_in_range(0..=64)?,
        grant: GrantId([u.int_in_range(0..=3)?; 16]),
        layout: [u.arbitrary()?; 8],
        content: None,
        op: *u.choose(&[Op::Read, Op::Write, Op::Confirm, Op::Extend])?,
        class: Class::ALL[usize::from(u.ratio(1, 3)?)],
        path: *u.choose(&[Path::Channels, Path::Memory, Path::OneSided])?,
        sums: u.arbitrary()?,
        confirm: u.arbitrary()?,
        readers: u.int_in_range(1..=MAX_READERS)?,
        time: Duration::from_millis(small(u)?.into()),
        unit: small(u)?,
        chunk: small(u)?,
        shape: None,
        select: Select::default(),
        source: None,
    };
    if u.ratio(3, 4)? && !fits.is_empty() {
        let (grant, layout, shape, claim) = *u.choose(fits)?;
        (begin.grant, begin.layout, begin.shape, begin.content) = (grant, layout, Some(shape), claim);
        (begin.unit, begin.chunk) = (4096, 4096 * u.int_in_range(1..=3)?);
    }
    if u.ratio(1, 4)? {
        begin.shape = maybe(u, |u| {
            let (layers, pages) = (small(u)?, small(u)?);
            Ok(Shape { layers, pages, row_bytes: number(u)?, run_bytes: number(u)?, order: order(u)? })
        })?;
    }
    if u.ratio(1, 4)? {
        begin.select = Select {
            positions: maybe(u, page_list)?,
            layers: maybe(u, range)?,
            slices: maybe(u, range)?,
            parts: maybe(u, small)?,
        };
    }
    if u.ratio(1, 8)? {
        begin.content = maybe(u, |u| Ok([u.arbitrary()?; 32]))?;
    }
    if u.ratio(1, 3)? {
        begin.source = maybe(u, source)?;
    }
    Ok(begin)
}

/// Any frame.
pub fn frame(u: &mut Unstructured, fits: &[Fit]) -> Result<Frame> {
    let transfer = u.int_in_range(0..=64)?;
    Ok(match u.int_in_range(0u8..=18)? {
        0 => Frame::Beat,
        1..=5 => Frame::Begin(Box::new(begin(u, fits)?)),
        6 => Frame::Accept { transfer, source: maybe(u, source)?.map(Box::new) },
        7 => Frame::End { transfer, outcome: Ok(()) },
        8 => {
            let text = String::from_utf8_lossy(u.bytes(u.len().min(9))?).into_owned();
            Frame::End { transfer, outcome: Err(Error::new(Code::from_wire(u.int_in_range(1..=50)?), text)) }
        }
        9 => Frame::Ended { transfer },
        10 => Frame::OpenChannels,
        11 => {
            Frame::Nics(Nics { provider: String::new(), addresses: vec![u.bytes(u.len().min(9))?.to_vec()] })
        }
        12 => {
            let sums = vec![u.int_in_range(0..=1)?; u.int_in_range(0..=3)?];
            Frame::Check { transfer, at: 4096 * u.int_in_range(0..=3)?, sums }
        }
        13 => Frame::Checked { transfer, at: 4096 * u.int_in_range(0..=3)? },
        14 => Frame::AcceptStaged { transfer, source: Box::new(source(u)?) },
        15 => Frame::Lent { transfer, at: 8192 * u.int_in_range(0..=3)?, place: u.arbitrary()? },
        16 => Frame::Used { transfer, at: 8192 * u.int_in_range(0..=3)? },
        17 => Frame::Landed { transfer, at: 8192 * u.int_in_range(0..=3)? },
        _ => Frame::Goodbye,
    })
}
