//! `kvik.Region` and `kvik.PageSet`.

use crate::args::{Ends, Natural, Seconds, range, seconds};
use crate::errors::{OrRaise, error};
use crate::fork::Owned;
use crate::ids;
use crate::layout::PyLayout;
use crate::mark::{self, PyStreamMark};
use crate::process;
use kvik_core::Code;
use kvik_engine::{PageSet, Region};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Memory registered with an engine, from `Engine.register` or `Engine.allocate`.
///
/// It stays registered until `close`, until the engine is closed, or until nothing refers to it any more: no
/// Region, PageSet or Transfer of it, and no live grant. Close it to have the memory back at a known time.
/// Allocated memory has the buffer protocol: `memoryview(region)`.
#[pyclass(name = "Region", module = "kvik", frozen, weakref)]
pub struct PyRegion {
    region: Owned<Region>,
    engine: Py<PyAny>,
    writable: bool,
    /// Views of allocated memory that Python has.
    exports: AtomicUsize,
    /// Set while `close` runs and after it, with the GIL held: from then on there are no new views.
    closing: AtomicBool,
}

impl Drop for PyRegion {
    fn drop(&mut self) {
        self.region.end();
    }
}

impl PyRegion {
    /// The Python object of a region.
    pub fn new(region: Region, engine: Py<PyAny>, writable: bool) -> PyRegion {
        let (exports, closing) = (AtomicUsize::new(0), AtomicBool::new(false));
        PyRegion { region: Owned::new(region), engine, writable, exports, closing }
    }

    /// Refuses a destination that cannot be written.
    pub fn check_writable(&self, py: Python<'_>, what: &str) -> PyResult<()> {
        if self.writable {
            return Ok(());
        }
        let text = format!(
            "{what} writes into the region, but its buffer is read-only: register a writable one (bytearray, \
             not bytes, or a NumPy array whose flags say writeable)"
        );
        Err(error(py, Code::BufferInvalid, text))
    }

    /// Lets go of a caller's memory when its engine has closed. Memory that the engine allocated stays until
    /// the last view of it is gone.
    pub fn abandon(&self, py: Python<'_>) {
        let Some(region) = self.region.here().filter(|region| !region.is_shared()) else { return };
        if let Err(error) = py.detach(|| region.close(Duration::ZERO)) {
            log::warn!(target: "kvik.engine", "a region of a closed engine is not free: {error}");
        }
    }

    fn check_unused(&self, py: Python<'_>) -> PyResult<()> {
        match self.exports.load(Ordering::Acquire) {
            0 => Ok(()),
            views => {
                let text = format!(
                    "the region is still in use: {views} memoryview(s) or array(s) made from it are alive; \
                     delete them (or call memoryview.release()) before closing it"
                );
                Err(error(py, Code::RegionBusy, text))
            }
        }
    }
}

#[pymethods]
impl PyRegion {
    /// Address of the first byte in this process: the processor's, or the GPU's.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.region.get(py)?.addr())
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.region.get(py)?.bytes())
    }

    /// True for memory of `Engine.allocate`, which peers on this host can map.
    #[getter]
    fn shared(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.region.get(py)?.is_shared())
    }

    /// Where it lies: "cpu", or "cuda:0" for the first GPU that this process sees.
    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<String> {
        let device = self.region.get(py)?.device();
        Ok(device.map_or_else(|| "cpu".to_owned(), |number| format!("cuda:{number}")))
    }

    /// True for memory of a GPU.
    #[getter]
    fn is_gpu(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.region.get(py)?.device().is_some())
    }

    /// Put a mark behind what a stream of the region's GPU was given so far: wait for it before its pages go to a call
    /// that takes no stream, such as `Store.put`.
    ///
    /// stream: as `after` of `Engine.read`.
    ///
    /// Returns a StreamMark at once. Raises InvalidArgument for memory of the host, DeviceFailed, RegionClosed,
    /// EngineClosed.
    fn mark(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<PyStreamMark> {
        mark::mark(py, self.region.get(py)?, stream)
    }

    /// True once it was closed, or its engine was.
    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.region.get(py)?.is_closed())
    }

    /// Whether a transfer may write it: False for a registered read-only buffer.
    #[getter]
    fn writable(&self) -> bool {
        self.writable
    }

    /// The engine that it is registered with.
    #[getter]
    fn engine(&self, py: Python<'_>) -> Py<PyAny> {
        self.engine.clone_ref(py)
    }

    /// Pages of this region, for a grant or a transfer.
    ///
    /// ids: page ids within the layout, in the order of the transfer: an array of integers of one dimension
    ///     (NumPy of any integer dtype, memoryview, array, torch CPU tensor), a range, or a sequence of int.
    ///     They are copied once into one flat array: what has been checked must not change under the
    ///     transfer. No Python object is made for an element of an array or range.
    /// layers, slices: None for all, or (start, stop) with stop excluded.
    /// parts: in how many parts a page is seen (1 to 256). Above 1, ids are those of parts: part p of page n
    ///     is n * parts + p. It is part p of each run of the page, of `run_bytes / parts` bytes: so the two
    ///     parts of a page of [heads][32 tokens][content] are just like two pages of
    ///     [heads][16 tokens][content], slices being heads.
    ///
    /// Raises PageOutOfRange (with the position) for what the layout lacks, or a layout beyond the region's
    /// end; InvalidArgument for an empty set, or parts that do not divide a run into whole bytes;
    /// RegionClosed.
    #[pyo3(signature = (layout, ids, layers=None, slices=None, parts=Natural::of(1)),
           text_signature = "($self, layout, ids, layers=None, slices=None, parts=1)")]
    fn pages(
        slf: &Bound<'_, Self>,
        layout: &Bound<'_, PyLayout>,
        ids: &Bound<'_, PyAny>,
        layers: Option<Ends>,
        slices: Option<Ends>,
        parts: Natural,
    ) -> PyResult<PyPageSet> {
        let py = slf.py();
        let region = slf.get().region.get(py)?;
        if region.is_closed() {
            let text = "the region was closed, so it has no pages: register the memory again";
            return Err(error(py, Code::RegionClosed, text));
        }
        let ids = ids::ids(ids)?;
        let layers = layers.map(|ends| range(py, "layers", ends)).transpose()?;
        let slices = slices.map(|ends| range(py, "slices", ends)).transpose()?;
        let (arrangement, parts) = (layout.get().0.clone(), parts.within(py, "parts")?);
        let pages =
            py.detach(|| PageSet::of_parts(region, arrangement, parts, ids, layers, slices)).or_raise(py)?;
        Ok(PyPageSet {
            pages: Owned::new(pages),
            region: slf.clone().unbind(),
            layout: layout.clone().unbind(),
        })
    }

    /// Give the memory back: it is unregistered, and a registered buffer may be resized or freed again.
    ///
    /// timeout: seconds to wait for transfers that use it. Raises RegionBusy if one of this side's still does
    /// then, or at once if Python has views (memoryview, NumPy arrays) of allocated memory; the region stays
    /// open then. Raises RegionBusy, too, if a call, a GPU or a NIC still has its memory: it is closed, and
    /// closing it again waits for that. Raises PagesQuarantined if only transfers of peers do, over grants that have ended: the
    /// region is closed for all that is new, and its memory is given back with the last of them, which
    /// closing it again waits for. Closing twice does nothing else.
    #[pyo3(signature = (timeout=Seconds::of(5.0)), text_signature = "($self, timeout=5.0)")]
    fn close(&self, py: Python<'_>, timeout: Seconds) -> PyResult<()> {
        let (region, timeout) = (self.region.get(py)?, seconds(py, "timeout", timeout)?);
        self.check_unused(py)?;
        self.closing.store(true, Ordering::Release);
        let closed = py.detach(|| region.close(timeout));
        if closed.is_err() && !region.is_closed() {
            self.closing.store(false, Ordering::Release);
        }
        process::current().inbox.give_up_held(py);
        closed.or_raise(py)
    }

    /// # Safety
    /// Python calls this as the buffer protocol says: `view` is valid, and given back to `__releasebuffer__`.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let region = this.region.get(py)?;
        // A consumer that ignores the exception must not find a stale object to release.
        // SAFETY: `view` is valid.
        unsafe { (*view).obj = std::ptr::null_mut() };
        if !region.is_shared() {
            let text = "only memory from Engine.allocate can be viewed through its region; for \
                        registered memory use the object that was registered";
            return Err(error(py, Code::BufferInvalid, text));
        }
        if this.closing.load(Ordering::Acquire) || region.is_closed() {
            return Err(error(py, Code::RegionClosed, "the region was closed, so it has no memory to view"));
        }
        let (start, len) = (region.addr() as *mut _, region.bytes() as ffi::Py_ssize_t);
        // SAFETY: `start..start + len` is mapped while the region is open, and it cannot be closed while
        // `exports` is not 0. `view` takes its own reference to the object.
        if unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, 0, flags) } != 0 {
            return Err(PyErr::fetch(py));
        }
        this.exports.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// # Safety
    /// Python calls this once for each view that `__getbuffer__` made.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.exports.fetch_sub(1, Ordering::AcqRel);
    }

    fn __repr__(&self) -> String {
        let Some(region) = self.region.here() else { return "<kvik.Region of the parent process>".into() };
        if region.is_closed() {
            return "<kvik.Region closed>".into();
        }
        let kind = match (region.is_shared(), self.writable) {
            (true, _) => "shared",
            (false, true) => "registered",
            (false, false) => "registered read-only",
        };
        let gpu = region.device().map(|number| format!(" on cuda:{number}")).unwrap_or_default();
        format!("<kvik.Region {} bytes at {:#x}{gpu}, {kind}>", region.bytes(), region.addr())
    }
}

/// Pages of a region, from `Region.pages`: what a grant gives and a transfer moves. `len()` is the number of
/// pages, or of parts of pages.
#[pyclass(name = "PageSet", module = "kvik", frozen)]
pub struct PyPageSet {
    /// The engine's page set.
    pub pages: Owned<PageSet>,
    /// Where the pages lie.
    pub region: Py<PyRegion>,
    layout: Py<PyLayout>,
}

#[pymethods]
impl PyPageSet {
    /// Bytes of all its elements: what a transfer of it moves.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.pages.get(py)?.bytes())
    }

    /// Where the pages lie.
    #[getter]
    fn region(&self, py: Python<'_>) -> Py<PyRegion> {
        self.region.clone_ref(py)
    }

    /// How they lie there.
    #[getter]
    fn layout(&self, py: Python<'_>) -> Py<PyLayout> {
        self.layout.clone_ref(py)
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.pages.get(py)?.len())
    }

    fn __repr__(&self) -> String {
        match self.pages.here() {
            Some(pages) => format!("<kvik.PageSet {} pages, {} bytes>", pages.len(), pages.bytes()),
            None => "<kvik.PageSet of the parent process>".into(),
        }
    }
}
