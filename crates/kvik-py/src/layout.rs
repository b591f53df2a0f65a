//! `kvik.Layout`.

use crate::args::Natural;
use crate::errors::{OrRaise, error};
use kvik_core::{Code, Layers, Layout};
use pyo3::prelude::*;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// How pages lie in a region: arithmetic, so that nothing is built for each page.
///
/// Element (layer, page, slice) is `run_bytes` contiguous bytes that start at
///
///     offset + layer * layer_stride + page * page_stride + slice * slice_stride
///
/// from the start of the region; with `layer_offsets` it is `layer_offsets[layer]` instead of
/// `layer * layer_stride`. Slices divide a page: KV heads, K and V halves, sub-pages. All sizes are bytes.
/// Strides that are left out make elements touch: slices within a page, pages within a layer, layers one
/// after another.
///
/// Raises LayoutMismatch when elements overlap, a count is 0, or an offset goes beyond 2^63.
#[pyclass(name = "Layout", module = "kvik", frozen, eq, hash)]
#[derive(PartialEq, Eq)]
pub struct PyLayout(pub Arc<Layout>);

impl Hash for PyLayout {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.digest().hash(state);
    }
}

#[pymethods]
impl PyLayout {
    #[new]
    #[pyo3(signature = (pages, run_bytes, *, page_stride=None, layers=None, layer_stride=None,
                        layer_offsets=None, slices=Natural::of(1), slice_stride=None, offset=Natural::of(0)),
           text_signature = "(pages, run_bytes, *, page_stride=None, layers=1, layer_stride=None, \
                             layer_offsets=None, slices=1, slice_stride=None, offset=0)")]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keyword arguments")]
    fn new(
        py: Python<'_>,
        pages: Natural,
        run_bytes: Natural,
        page_stride: Option<Natural>,
        layers: Option<Natural>,
        layer_stride: Option<Natural>,
        layer_offsets: Option<Vec<Natural>>,
        slices: Natural,
        slice_stride: Option<Natural>,
        offset: Natural,
    ) -> PyResult<PyLayout> {
        let product = |a: u64, b: u64| {
            let text = "the layout reaches beyond 2^63 bytes; check its counts and sizes";
            a.checked_mul(b).ok_or_else(|| error(py, Code::LayoutMismatch, text))
        };
        let number = |name, given: &Natural| given.within::<u64>(py, name);
        let maybe = |name, given: Option<Natural>| given.map(|given| number(name, &given)).transpose();
        let (pages, slices): (u32, u32) = (pages.within(py, "pages")?, slices.within(py, "slices")?);
        let run_bytes = number("run_bytes", &run_bytes)?;
        let slice_stride = maybe("slice_stride", slice_stride)?.unwrap_or(run_bytes);
        let page_stride = match maybe("page_stride", page_stride)? {
            Some(stride) => stride,
            None => product(slices.into(), slice_stride)?,
        };
        let layers = match layer_offsets {
            Some(offsets) => {
                let fits = maybe("layers", layers)?.is_none_or(|layers| layers == offsets.len() as u64);
                if !fits || layer_stride.is_some() {
                    let text = "layer_offsets says where each layer starts: leave out layer_stride, and \
                                layers too (or make it the number of offsets)";
                    return Err(error(py, Code::InvalidArgument, text));
                }
                let starts = offsets.iter().map(|offset| number("layer_offsets", offset));
                Layers::At(starts.collect::<PyResult<_>>()?)
            }
            None => Layers::Strided {
                count: layers.unwrap_or(Natural::of(1)).within(py, "layers")?,
                stride: match maybe("layer_stride", layer_stride)? {
                    Some(stride) => stride,
                    None => product(pages.into(), page_stride)?,
                },
            },
        };
        let offset = number("offset", &offset)?;
        let layout = Layout::new(offset, pages, run_bytes, page_stride, slices, slice_stride, layers);
        Ok(PyLayout(Arc::new(layout.or_raise(py)?)))
    }

    /// Number of pages.
    #[getter]
    fn pages(&self) -> u32 {
        self.0.pages()
    }

    /// Contiguous bytes of one element.
    #[getter]
    fn run_bytes(&self) -> u64 {
        self.0.run_bytes()
    }

    /// Bytes from one page to the next.
    #[getter]
    fn page_stride(&self) -> u64 {
        self.0.page_stride()
    }

    /// Number of layers.
    #[getter]
    fn layers(&self) -> u32 {
        self.0.layers()
    }

    /// Bytes from one layer to the next; None when `layer_offsets` says where they are.
    #[getter]
    fn layer_stride(&self) -> Option<u64> {
        match self.0.layer_starts() {
            Layers::Strided { stride, .. } => Some(*stride),
            Layers::At(_) => None,
        }
    }

    /// First byte of each layer, from `offset`; None when they are `layer_stride` apart.
    #[getter]
    fn layer_offsets(&self) -> Option<Vec<u64>> {
        match self.0.layer_starts() {
            Layers::Strided { .. } => None,
            Layers::At(offsets) => Some(offsets.clone()),
        }
    }

    /// Slices of a page: KV heads, K and V halves, sub-pages.
    #[getter]
    fn slices(&self) -> u32 {
        self.0.slices()
    }

    /// Bytes from one slice to the next.
    #[getter]
    fn slice_stride(&self) -> u64 {
        self.0.slice_stride()
    }

    /// Bytes from the start of the region to the layout.
    #[getter]
    fn offset(&self) -> u64 {
        self.0.offset()
    }

    /// Bytes that a region with this layout has at least.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.end()
    }

    /// 16 hexadecimal digits that are equal for equal layouts; tickets carry them.
    #[getter]
    fn digest(&self) -> String {
        hex(&self.0.digest())
    }

    fn __repr__(&self) -> String {
        format!("<kvik.Layout {}, {} bytes in all>", self.0.shape(), self.0.end())
    }
}

/// Bytes in hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
