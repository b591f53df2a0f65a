//! Registered memory, and pages of it.

use crate::config::MAX_DEADLINE;
use crate::shared::Shared;
use kvik_core::{Code, Error, Layout, Order, RegionId, Result, View};
use kvik_host::Memory;
use kvik_transport::{Held, from_host};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How often a closing region looks whether an order that was just done has let go of the memory.
const LOOK: Duration = Duration::from_millis(2);

/// Memory registered with an engine.
#[derive(Clone)]
pub struct Region {
    pub(crate) inner: Arc<RegionInner>,
}

pub(crate) struct RegionInner {
    pub shared: Arc<Shared>,
    pub id: RegionId,
    addr: usize,
    bytes: u64,
    is_shared: bool,
    memory: Mutex<Option<Held>>,
    weak: Weak<Memory>,
}

impl Region {
    pub(crate) fn new(shared: Arc<Shared>, id: RegionId, memory: Held) -> Region {
        let inner = RegionInner {
            shared,
            id,
            addr: memory.addr(),
            bytes: memory.len() as u64,
            is_shared: memory.fd().is_some(),
            weak: Arc::downgrade(&memory),
            memory: Mutex::new(Some(memory)),
        };
        Region { inner: Arc::new(inner) }
    }

    /// Its number within the engine.
    pub fn id(&self) -> RegionId {
        self.inner.id
    }
    /// Address of its first byte.
    pub fn addr(&self) -> usize {
        self.inner.addr
    }
    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.inner.bytes
    }
    /// Whether kvik allocated it, so that processes on this host can map it.
    pub fn is_shared(&self) -> bool {
        self.inner.is_shared
    }
    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.inner.lock().is_none()
    }

    /// Ends its grants, waits for the transfers that use it, and lets go of the memory.
    ///
    /// # Errors
    /// `RegionBusy` when a transfer still uses it at the timeout; it is then as open as before, without its grants.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        let shared = &self.inner.shared;
        shared.check_fork()?;
        let until = Instant::now() + timeout.min(MAX_DEADLINE);
        let memory = self.inner.lock().take();
        let first = memory.is_some();
        if let Some(memory) = memory {
            shared.withdraw_region(self.id(), &memory);
        }
        // Whoever closes a region that somebody else is closing waits with him.
        while let Some(memory) = self.inner.weak.upgrade() {
            if Instant::now() >= until {
                if first {
                    *self.inner.lock() = Some(memory.clone());
                    shared.show_region(self.id(), &memory);
                }
                return Err(Error::new(
                    Code::RegionBusy,
                    format!(
                        "region {} is still used by a transfer: wait for it or cancel it, and close the region again",
                        self.id().0
                    ),
                ));
            }
            drop(memory);
            shared.wait_progress(LOOK);
        }
        Ok(())
    }

    /// Copies `from` to `offset`.
    ///
    /// # Errors
    /// `PageOutOfRange` beyond the region's end, `RegionClosed`, `BufferInvalid` for read-only memory.
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.memory()?.copy_in(offset, from).map_err(|error| from_host(Code::BufferInvalid, error))
    }

    /// Copies from `offset` into `into`.
    ///
    /// # Errors
    /// `PageOutOfRange` beyond the region's end, `RegionClosed`.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.memory()?.copy_out(offset, into).map_err(|error| from_host(Code::BufferInvalid, error))
    }

    pub(crate) fn memory(&self) -> Result<Held> {
        self.inner.lock().clone().ok_or_else(|| {
            Error::new(
                Code::RegionClosed,
                format!("region {} was closed; register the memory again", self.id().0),
            )
        })
    }
}

impl RegionInner {
    fn lock(&self) -> MutexGuard<'_, Option<Held>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        let memory = self.memory.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(memory) = memory {
            if self.shared.check_fork().is_err() {
                // A forked child leaves everything of its parent's as it is.
                return std::mem::forget(memory);
            }
            self.shared.withdraw_region(self.id, &memory);
        }
    }
}

/// Pages of a region, seen through a layout.
#[derive(Clone)]
pub struct PageSet {
    pub(crate) region: Region,
    pub(crate) view: View,
}

impl PageSet {
    /// The pages with these ids, in this order, over a range of layers and slices (all of them by default).
    ///
    /// # Errors
    /// `PageOutOfRange` when the layout reaches beyond the region, or an id, layer or slice beyond the layout;
    /// `InvalidArgument` for an empty set.
    pub fn new(
        region: &Region,
        layout: Arc<Layout>,
        pages: Arc<[u32]>,
        layers: Option<Range<u32>>,
        slices: Option<Range<u32>>,
    ) -> Result<PageSet> {
        PageSet::of_parts(region, layout, 1, pages, layers, slices)
    }

    /// Parts of pages: each run is seen as `parts` equal parts, and part p of page n has the id `n * parts + p`.
    ///
    /// Part p of a page is part p of each of its slices: so the two parts of a page of `[heads][32 tokens][content]`
    /// are just like two pages of `[heads][16 tokens][content]`.
    ///
    /// # Errors
    /// As for [`PageSet::new`]; `InvalidArgument` also for a number of parts that is 0, above 256, or does not divide
    /// a run into whole bytes.
    pub fn of_parts(
        region: &Region,
        layout: Arc<Layout>,
        parts: u32,
        ids: Arc<[u32]>,
        layers: Option<Range<u32>>,
        slices: Option<Range<u32>>,
    ) -> Result<PageSet> {
        if layout.end() > region.bytes() {
            return Err(Error::new(
                Code::PageOutOfRange,
                format!(
                    "the layout ({}) takes {} bytes, but region {} has {}",
                    layout.shape(),
                    layout.end(),
                    region.id().0,
                    region.bytes()
                ),
            ));
        }
        let (layers, slices) = (layers.unwrap_or(0..layout.layers()), slices.unwrap_or(0..layout.slices()));
        let view = View::of_parts(layout, parts, ids, layers, slices, Order::LayerFirst)?;
        Ok(PageSet { region: region.clone(), view })
    }

    /// The region.
    pub fn region(&self) -> &Region {
        &self.region
    }
    /// Bytes of all its elements.
    pub fn bytes(&self) -> u64 {
        self.view.bytes()
    }
    /// Number of pages, or of parts of pages.
    pub fn len(&self) -> usize {
        self.view.pages().len()
    }
    /// Whether it has no pages; never so for a set that was made.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
