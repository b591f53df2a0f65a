//! Turns two page sets into a stream: its order, and which pages the owner is asked for.

use crate::region::PageSet;
use crate::transfer::TransferOptions;
use kvik_core::{Code, Error, MAX_PARTS, Order, Result, View};
use kvik_proto::{MAX_PAGES, PageList, Select};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a chunk on a network: long enough that a call costs little beside its bytes, short enough that its
/// checksum is taken while the bytes are in the cache, and that a transfer of a few MiB uses every channel.
const CHUNK: u64 = 512 << 10;
/// Bytes of a chunk that is copied within the host.
const COPY_CHUNK: u64 = 1 << 20;

/// How a transfer is cut and ordered.
pub(crate) struct Plan {
    /// This side's elements, in the order of the stream.
    pub view: View,
    /// The owner's.
    pub select: Select,
    /// Runs on this side.
    pub extents: u64,
}

/// Plans a transfer between `local` and the owner's pages: all that the grant covers, or what is named of it.
///
/// Where both lists name pages one to one, they are sorted by the owner's ids: neighbours there that are neighbours
/// here too become one extent.
pub(crate) fn plan(local: &PageSet, remote: Option<Arc<[u32]>>, options: &TransferOptions) -> Result<Plan> {
    let view = &local.view;
    for (what, pages) in [("local", Some(view.pages())), ("remote", remote.as_ref())] {
        match pages.map(|pages| pages.len() as u64) {
            Some(0) => {
                return Err(Error::new(Code::InvalidArgument, format!("the {what} page list is empty")));
            }
            Some(count) if count > MAX_PAGES => {
                let text =
                    format!("a transfer of {count} {what} pages is too large: split it at {MAX_PAGES}");
                return Err(Error::new(Code::InvalidArgument, text));
            }
            _ => {}
        }
    }
    check_remote(options)?;
    let order = order(view, remote.as_deref(), options.remote_parts);
    let (mine, theirs) = match remote {
        Some(theirs) if theirs.len() == view.pages().len() && !theirs.is_sorted() => {
            sorted(view.pages(), &theirs)
        }
        other => (view.pages().clone(), other),
    };
    let (layout, parts) = (view.layout().clone(), view.parts());
    let view = View::of_parts(layout, parts, mine, view.layers(), view.slices(), order)?;
    let extents = view.runs(0..view.bytes()).count() as u64;
    let select = Select {
        pages: theirs.as_ref().map(PageList::of),
        layers: options.remote_layers.clone(),
        slices: options.remote_slices.clone(),
        parts: options.remote_parts,
    };
    Ok(Plan { view, select, extents })
}

/// Page by page where that makes longer runs here and no page can be of another size there: as many of them make as
/// many bytes. Where the owner's pages are not named they are taken to be as many, and the owner refuses if they are
/// not. All else goes layer by layer, which fits pages of any size.
fn order(view: &View, remote: Option<&[u32]>, remote_parts: Option<u32>) -> Order {
    let as_many = remote.is_none_or(|theirs| theirs.len() == view.pages().len());
    let whole = view.parts() == 1 && remote_parts.is_none_or(|parts| parts == 1);
    match view.layout().page_major() && as_many && whole {
        true => Order::PageFirst,
        false => Order::LayerFirst,
    }
}

/// What can be known to be wrong with the owner's side before the owner is asked.
fn check_remote(options: &TransferOptions) -> Result<()> {
    for (what, range) in
        [("remote_layers", &options.remote_layers), ("remote_slices", &options.remote_slices)]
    {
        if let Some(Range { start, end }) = range
            && start >= end
        {
            let text = format!("{what} from {start} to {end} are none: name at least one");
            return Err(Error::new(Code::InvalidArgument, text));
        }
    }
    match options.remote_parts {
        Some(parts) if parts == 0 || parts > MAX_PARTS => Err(Error::new(
            Code::InvalidArgument,
            format!("remote_parts is from 1 to {MAX_PARTS}, not {parts}"),
        )),
        _ => Ok(()),
    }
}

/// About how many bytes a chunk has: smaller where a transfer is small, so that every channel has a part of it.
pub(crate) fn chunk_bytes(bytes: u64, network: bool, channels: u16) -> u64 {
    let most = if network { CHUNK } else { COPY_CHUNK };
    bytes.div_ceil(u64::from(channels.max(1))).clamp(64 << 10, most)
}

fn sorted(mine: &[u32], theirs: &[u32]) -> (Arc<[u32]>, Option<Arc<[u32]>>) {
    let mut pairs: Vec<(u32, u32)> = theirs.iter().copied().zip(mine.iter().copied()).collect();
    pairs.sort_unstable();
    let mine = pairs.iter().map(|(_, mine)| *mine).collect();
    let theirs = pairs.iter().map(|(theirs, _)| *theirs).collect();
    (mine, Some(theirs))
}
