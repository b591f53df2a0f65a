//! Turns two page sets into a stream: its order, and which pages the owner is asked for.

use crate::region::PageSet;
use kvik_core::{Code, Error, Order, Result, View};
use kvik_proto::{MAX_PAGES, PageList, Select};
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

/// Plans a transfer between `local` and the owner's pages (all of the grant's by default).
///
/// Where both lists name pages one to one, they are sorted by the owner's ids: neighbours there that are neighbours
/// here too become one extent.
pub(crate) fn plan(local: &PageSet, remote: Option<Arc<[u32]>>) -> Result<Plan> {
    let view = &local.view;
    let layout = view.layout().clone();
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
    let order = if layout.page_major() { Order::PageFirst } else { Order::LayerFirst };
    let (mine, theirs) = match remote {
        Some(theirs) if theirs.len() == view.pages().len() && !theirs.is_sorted() => {
            sorted(view.pages(), &theirs)
        }
        other => (view.pages().clone(), other),
    };
    let view = View::new(layout, mine, view.layers(), view.slices(), order)?;
    let extents = view.runs(0..view.bytes()).count() as u64;
    let pages = theirs.as_ref().map(PageList::of);
    Ok(Plan { view, select: Select { pages, layers: None, slices: None }, extents })
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
