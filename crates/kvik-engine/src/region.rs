//! Registered memory, and pages of it.

use crate::config::MAX_DEADLINE;
use crate::grant::describe;
use crate::inner::Inner;
use crate::regions::ANSWER;
use crate::report::Report;
use crate::sync::lock;
use kvik_core::{Code, Error, Layout, Order, RegionId, Result, View};
use kvik_transport::{RegionMemory, WeakRegionMemory, page_sums};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a closing region looks whether a work request that was just done has let go of the memory.
const LOOK: Duration = Duration::from_millis(2);

/// Memory registered with an engine.
#[derive(Clone)]
pub struct Region {
    pub(crate) inner: Arc<RegionInner>,
}

pub(crate) struct RegionInner {
    pub engine: Arc<Inner>,
    pub id: RegionId,
    addr: usize,
    bytes: u64,
    is_shared: bool,
    device: Option<u32>,
    memory: Mutex<Option<RegionMemory>>,
    weak: WeakRegionMemory,
}

impl Region {
    pub(crate) fn new(engine: Arc<Inner>, id: RegionId, memory: RegionMemory) -> Region {
        let inner = RegionInner {
            engine,
            id,
            addr: memory.addr(),
            bytes: memory.len() as u64,
            is_shared: memory.fd().is_some(),
            device: memory.device().map(|device| device.number()),
            weak: memory.downgrade(),
            memory: Mutex::new(Some(memory)),
        };
        Region { inner: Arc::new(inner) }
    }

    /// Its number within the engine.
    pub fn id(&self) -> RegionId {
        self.inner.id
    }
    /// Address of its first byte: the processor's, or the GPU's.
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
    /// The GPU that it lies on, by its number among those that this process sees; none for memory of the host.
    pub fn device(&self) -> Option<u32> {
        self.inner.device
    }
    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        lock(&self.inner.memory).is_none()
    }

    /// Ends its grants, waits for the transfers that use it, and lets go of the memory.
    ///
    /// # Errors
    /// `RegionBusy` when a transfer that this side began still uses it at the timeout, which says with whom: wait for
    /// it or cancel it. The region is then as open as before, without its grants. Also when a call, a GPU or a NIC
    /// still has the memory: then the region stays closed, since a NIC that has let go of it does not know it again,
    /// and closing it again waits.
    ///
    /// `PagesQuarantined` when nothing does but requests of peers, over grants that have ended: nobody here can do
    /// anything about those. The text names the peers and the pages. The region is closed for all that is new, and
    /// lets go of its memory by itself with the last of them; closing it again waits for that.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        let engine = &self.inner.engine;
        engine.base.setup.check_fork()?;
        let until = Instant::now() + timeout.min(MAX_DEADLINE);
        let memory = lock(&self.inner.memory).take();
        let first = memory.is_some();
        if let Some(memory) = memory {
            engine.regions.withdraw(self.id(), memory, ANSWER);
        }
        // Whoever closes a region that somebody else is closing waits with him.
        while let Some(memory) = self.inner.weak.upgrade() {
            if Instant::now() >= until {
                return Err(self.still_used(memory, first));
            }
            drop(memory);
            engine.base.progress.wait(LOOK);
        }
        engine.regions.forget(self.id());
        Ok(())
    }

    /// Why the region could not be closed in time. Who closes it first opens it again where transfers of this side are
    /// the reason: they still have all that the region takes.
    fn still_used(&self, memory: RegionMemory, first: bool) -> Error {
        let (engine, id) = (&self.inner.engine, self.id());
        let own = engine.transfers.using(id);
        let held = engine.base.node(|node, _| node.holdings_of(id));
        if own.is_empty() && !held.is_empty() {
            let held: Vec<String> = held.iter().map(describe).collect();
            let text = format!(
                "region {} is closed, but its memory is not free yet: {}; it is when the last of these transfers \
                 has let go, which closing the region again waits for",
                id.0,
                held.join("; ")
            );
            return Error::new(Code::PagesQuarantined, text).about_region(id);
        }
        if first && !own.is_empty() {
            *lock(&self.inner.memory) = Some(memory.clone());
            if let Err(error) = engine.regions.show(id, &memory) {
                log::warn!("region {} is open again, and not for every transport: {error}", id.0);
            }
        }
        let by = match own.as_slice() {
            [] if self.device().is_some() => {
                "a copy of its GPU that is still in flight for a transfer that has ended, a process on this host that \
                 has it open and does not close it, or a call that is reading or writing it"
                    .to_owned()
            }
            [] if engine.base.transports.has_devices() => {
                "a call that is reading or writing it, or a NIC whose driver does not let go of it".to_owned()
            }
            [] => "a call that is reading or writing it".to_owned(),
            some => {
                format!("{} transfer(s) of this side: {}", some.len(), some[..some.len().min(4)].join(", "))
            }
        };
        let text = if own.is_empty() {
            format!(
                "region {} is closed, and {by} still has its memory; closing it again waits for that",
                id.0
            )
        } else {
            format!(
                "region {} is still used by {by}; wait for them or cancel them, and close the region again",
                id.0
            )
        };
        Error::new(Code::RegionBusy, text).about_region(id)
    }

    /// Copies `from` to `offset`; on a GPU behind all that its default stream was given before.
    ///
    /// # Errors
    /// `PageOutOfRange` beyond the region's end, `RegionClosed`, `BufferInvalid` for read-only memory.
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.memory()?.copy_in(offset, from)
    }

    /// Copies from `offset` into `into`; on a GPU behind all that its default stream was given before.
    ///
    /// # Errors
    /// `PageOutOfRange` beyond the region's end, `RegionClosed`.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.memory()?.copy_out(offset, into)
    }

    pub(crate) fn memory(&self) -> Result<RegionMemory> {
        lock(&self.inner.memory).clone().ok_or_else(|| {
            Error::new(
                Code::RegionClosed,
                format!("region {} was closed; register the memory again", self.id().0),
            )
            .about_region(self.id())
        })
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        let memory = self.memory.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.engine.base.setup.check_fork().is_err() {
            // A forked child leaves everything of its parent's as it is.
            return std::mem::forget(memory);
        }
        if let Some(memory) = memory {
            // This may be a NIC's own thread, with the end of a transfer: it would wait for itself.
            self.engine.regions.withdraw(self.id, memory, Duration::ZERO);
        }
        // Transfers hold this, so none is left that asks what the NICs said of it.
        self.engine.regions.forget(self.id);
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
            )
            .about_region(region.id()));
        }
        let (layers, slices) = (layers.unwrap_or(0..layout.layers()), slices.unwrap_or(0..layout.slices()));
        let view = View::of_parts(layout, parts, ids, layers, slices, Order::LayerFirst)?;
        Ok(PageSet { region: region.clone(), view })
    }

    /// Some of its pages, by their places in it.
    ///
    /// # Errors
    /// `PageOutOfRange` for a place that it does not have; `InvalidArgument` for none.
    pub fn select(&self, places: impl IntoIterator<Item = usize>) -> Result<PageSet> {
        let pages = self.view.pages();
        let page = |place: usize| {
            pages.get(place).copied().ok_or_else(|| {
                let text = format!("the page set has {} pages, and none at place {place}", pages.len());
                Error::new(Code::PageOutOfRange, text).about_region(self.region.id())
            })
        };
        let ids: Result<Vec<u32>> = places.into_iter().map(page).collect();
        let (layers, slices) = (self.view.layers(), self.view.slices());
        let (layout, order) = (self.view.layout().clone(), self.view.order());
        let view = View::of_parts(layout, self.view.parts(), ids?.into(), layers, slices, order)?;
        Ok(PageSet { region: self.region.clone(), view })
    }

    /// The checksums (XXH3 with 64 bits) of its pages as they are now, page by page: for each `layers` layers of a
    /// page one, over its bytes in the order of layers and slices.
    ///
    /// # Errors
    /// `InvalidArgument` for 0 layers, `RegionClosed`.
    pub fn sums(&self, layers: u32) -> Result<Vec<u64>> {
        page_sums(&self.region.memory()?, &self.view, layers, None)
    }

    /// The same after a read into these pages: what it summed as it placed it is not summed again.
    ///
    /// # Errors
    /// As for [`PageSet::sums`].
    pub fn sums_after(&self, read: &Report, layers: u32) -> Result<Vec<u64>> {
        page_sums(&self.region.memory()?, &self.view, layers, read.sums.as_deref())
    }

    /// Its layers, and of each page of a layer the slices and the bytes of one.
    pub fn shape(&self) -> (u32, u32, u64) {
        let shape = self.view.shape();
        (shape.layers, (shape.row_bytes / shape.run_bytes) as u32, shape.run_bytes)
    }

    /// The digest of their layout, as tickets for them have it.
    pub fn layout_digest(&self) -> [u8; 8] {
        self.view.layout().digest()
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
