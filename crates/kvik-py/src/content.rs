//! `kvik.Content`, and the chain that it is made of.

use crate::args::Natural;
use crate::errors::{OrRaise, error};
use crate::ids::ids;
use kvik_core::{Code, Content, content_chain as chain_of};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::hash::{Hash, Hasher};

/// What the pages of a grant hold, or are taken to hold: a link for each page in their order, and which part of the
/// model's KV they are.
///
/// chain: bytes, 32 for each page, as of `content_chain`: a link stands for all tokens up to the end of its page.
/// part: bytes, in one canonical form, from 1 to 4,096 of them: which part of the model's KV the pages are (layers,
///     heads), and how their bytes lie (kind, dtype, order of dimensions, tokens of a page). Equal bytes mean equal
///     parts, and nothing else is made of them.
///
/// A grant with content serves only who states the same: it compares one value of 32 bytes, which is made of the link of
/// the last page that is asked for, and of the part. `len()` of it is the number of links. It is plain data: it may be
/// used with any engine, and in a forked child. Raises InvalidArgument for bytes that cannot be those.
#[pyclass(name = "Content", module = "kvik", frozen, eq, hash)]
#[derive(PartialEq, Eq)]
pub struct PyContent(pub Content);

/// A class, and what it is called with.
type Reduced<'py> = (Bound<'py, PyAny>, (Bound<'py, PyBytes>, Bound<'py, PyBytes>));

impl Hash for PyContent {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.0.chain(), self.0.part()).hash(state);
    }
}

#[pymethods]
impl PyContent {
    #[new]
    fn new(py: Python<'_>, chain: &[u8], part: &[u8]) -> PyResult<PyContent> {
        Content::new(chain, part).or_raise(py).map(PyContent)
    }

    /// The links, 32 bytes each.
    #[getter]
    fn chain<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.chain().as_flattened())
    }

    /// Which part of the model's KV the pages are.
    #[getter]
    fn part<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.part())
    }

    fn __len__(&self) -> usize {
        self.0.links()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> Reduced<'py> {
        let content = slf.get();
        (slf.get_type().into_any(), (content.chain(slf.py()), content.part(slf.py())))
    }

    fn __repr__(&self) -> String {
        let last = self.0.chain().last().map_or_else(String::new, |link| crate::layout::hex(link));
        format!("<kvik.Content of {} pages, {last:.8}…>", self.0.links())
    }
}

/// The content that an argument gives, where it gives one.
pub fn content(given: Option<&Bound<'_, PyContent>>) -> Option<Content> {
    given.map(|given| given.get().0.clone())
}

/// What stands in for some of the tokens, as it is given: of each the offset of its first token, and its key.
pub type Items = Vec<(Natural, Vec<u8>)>;

/// The same, with offsets that are checked.
pub fn placed<'a>(py: Python<'_>, items: &'a [(Natural, Vec<u8>)]) -> PyResult<Vec<(usize, &'a [u8])>> {
    items.iter().map(|(at, key)| Ok((at.within(py, "an item's offset")?, key.as_slice()))).collect()
}

/// The content digest of a prompt: 32 bytes for each KV block, one after the other, each for all tokens up to its end.
///
/// namespace: what names the model, its weights and dtype. extra: the serving engine's extra keys (LoRA,
/// salt) in one canonical encoding. tokens: any array, range or sequence of integers. block_tokens: tokens of a
/// KV block; the last one may be partial. items: what stands in for some of the tokens (images), in any order: tuples of
/// its first token's offset, and bytes in one canonical encoding that say what it is and how long. Each is in the link of
/// the block where it begins, and in those behind it; one that begins behind the last token is left out. Two prompts share
/// links exactly as far as they share all of it. Raises InvalidArgument for block_tokens=0, PageOutOfRange for a token
/// that is not a number from 0 to 2^32-1.
#[pyfunction]
#[pyo3(signature = (namespace, extra, tokens, block_tokens, items=Vec::new()),
       text_signature = "(namespace, extra, tokens, block_tokens, items=())")]
pub fn content_chain<'py>(
    py: Python<'py>,
    namespace: &[u8],
    extra: &[u8],
    tokens: &Bound<'py, PyAny>,
    block_tokens: Natural,
    items: Items,
) -> PyResult<Bound<'py, PyBytes>> {
    let tokens = ids(tokens)?;
    let block = match block_tokens.within::<usize>(py, "block_tokens")? {
        0 => {
            let text = "block_tokens=0 makes no KV blocks: it takes the number of tokens of one, at least 1";
            return Err(error(py, Code::InvalidArgument, text));
        }
        block => block,
    };
    let items = placed(py, &items)?;
    let chain = py.detach(|| chain_of(namespace, extra, &tokens, block, &items));
    Ok(PyBytes::new(py, chain.as_flattened()))
}
