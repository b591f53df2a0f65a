//! Memory that Python gives to be registered, and what keeps it alive.
//!
//! The export of a buffer is held for as long as the engine has the memory: Python itself then refuses to
//! resize or release it. The engine may let go of it on any of its threads, which must not take the GIL; so
//! the export goes into the inbox, and a thread that has the GIL gives it up.

use crate::args::Natural;
use crate::errors::error;
use crate::gpus::{self, Where};
use crate::process;
use kvik_core::Code;
use kvik_engine::{Memory, RegionMemory};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyTuple};
use std::any::Any;
use std::mem;
use std::ptr::NonNull;

/// A Python object whose memory is registered.
pub enum Export {
    /// The export of its buffer.
    Buffer(PyUntypedBuffer),
    /// A tensor, which has no exports: a reference keeps it alive.
    Object(Py<PyAny>),
}

impl Export {
    /// Gives it up, with the GIL.
    pub fn give_up(self, py: Python<'_>) {
        match self {
            Export::Buffer(buffer) => buffer.release(py),
            Export::Object(object) => drop(object.into_bound(py)),
        }
    }
}

/// Passes what it holds to the inbox when it is dropped, on whichever thread that is.
///
/// After the interpreter's end nobody empties the inbox, so what it holds is leaked, as it must be. In a
/// forked child it is leaked at once: the export belongs to the parent's engine.
struct Keep {
    held: Option<Export>,
    owner: u32,
}

impl Drop for Keep {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            mem::forget(self.held.take());
        } else if let Some(held) = self.held.take() {
            process::current().inbox.put_held(held);
        }
    }
}

/// Memory to register.
pub struct Source {
    /// The memory, with what keeps it alive.
    pub memory: RegionMemory,
    /// Whether a transfer may write it.
    pub writable: bool,
}

/// The memory of a Python object: `(address, nbytes)`, a torch tensor, anything with `__cuda_array_interface__` or with
/// a buffer.
pub fn source(object: &Bound<'_, PyAny>) -> PyResult<Source> {
    if let Ok(pair) = object.cast::<PyTuple>() {
        return from_address(pair);
    }
    let place = gpus::place(object)?;
    if is_tensor(object)? {
        return from_tensor(object, place);
    }
    if let Some(told) = gpus::interface(object)? {
        return gpus::from_interface(&told, Box::new(keep(Export::Object(object.clone().unbind()))));
    }
    if place == Where::Cuda {
        let text = "the object lies on a CUDA device and has no __cuda_array_interface__: give one that has it, a \
                    torch tensor, or (address, nbytes)";
        return Err(error(object.py(), Code::BufferInvalid, text));
    }
    if !has_buffer(object) {
        let text = format!(
            "{} has no memory that kvik can register: give a buffer (bytearray, memoryview, NumPy array), \
             a torch tensor, anything with __cuda_array_interface__, or (address, nbytes)",
            object.get_type().name()?
        );
        return Err(pyo3::exceptions::PyTypeError::new_err(text));
    }
    from_buffer(object)
}

/// Whether an object has the buffer protocol.
pub fn has_buffer(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: the pointer is that of a live object.
    unsafe { pyo3::ffi::PyObject_CheckBuffer(object.as_ptr()) != 0 }
}

/// The export of an object's buffer. By way of a memoryview, which fills in the shape and the strides that
/// some exporters (ctypes) leave out.
pub fn export(object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    PyUntypedBuffer::get(PyMemoryView::from(object)?.as_any())
}

fn from_address(pair: &Bound<'_, PyTuple>) -> PyResult<Source> {
    let (address, bytes) = pair.extract::<(Natural, Natural)>()?;
    if gpus::is_device(pair.py(), address.0)? {
        return gpus::located(pair.py(), address.0, bytes.0, true, Box::new(()));
    }
    located(pair.py(), address.0, bytes.0, true, Box::new(()))
}

fn from_buffer(object: &Bound<'_, PyAny>) -> PyResult<Source> {
    let py = object.py();
    let buffer = export(object).map_err(|cause| {
        let text = "the object does not give its buffer; an array of an unusual dtype can be registered as \
                    array.view(numpy.uint8)";
        let told = error(py, Code::BufferInvalid, text);
        told.set_cause(py, Some(cause));
        told
    })?;
    if !buffer.is_c_contiguous() {
        return Err(not_contiguous(py, "buffer"));
    }
    let (address, bytes, writable) = (buffer.buf_ptr() as u64, buffer.len_bytes() as u64, !buffer.readonly());
    located(py, address, bytes, writable, Box::new(keep(Export::Buffer(buffer))))
}

/// Tensors are told by what they can do, so that torch is never imported.
fn is_tensor(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    for name in ["data_ptr", "is_contiguous", "element_size", "numel", "device"] {
        if !object.hasattr(name)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn from_tensor(tensor: &Bound<'_, PyAny>, place: Where) -> PyResult<Source> {
    let py = tensor.py();
    let device = tensor.getattr("device")?.getattr("type")?.extract::<String>()?;
    if !["cpu", "cuda"].contains(&&*device) {
        let text = format!(
            "the tensor lies on {device:?}; kvik moves host memory and memory of CUDA devices: register one that lies \
             there"
        );
        return Err(error(py, Code::BufferInvalid, text));
    }
    if !tensor.call_method0("is_contiguous")?.extract::<bool>()? {
        return Err(not_contiguous(py, "tensor"));
    }
    let number = |name| -> PyResult<u64> { Ok(tensor.call_method0(name)?.extract::<Natural>()?.0) };
    let Some(bytes) = number("numel")?.checked_mul(number("element_size")?) else {
        return Err(error(py, Code::BufferInvalid, "the tensor is larger than any memory"));
    };
    let (address, keep) = (number("data_ptr")?, Box::new(keep(Export::Object(tensor.clone().unbind()))));
    match device == "cuda" || place == Where::Cuda {
        true => gpus::located(py, address, bytes, true, keep),
        false => located(py, address, bytes, true, keep),
    }
}

fn located(
    py: Python<'_>,
    address: u64,
    bytes: u64,
    writable: bool,
    keep: Box<dyn Any + Send + Sync>,
) -> PyResult<Source> {
    let Ok(len) = usize::try_from(bytes).map(|len| len.min(isize::MAX as usize)) else {
        return Err(error(py, Code::BufferInvalid, "the buffer is larger than the address space"));
    };
    let start = usize::try_from(address).ok().and_then(|address| NonNull::new(address as *mut u8));
    let Some(start) = start.filter(|start| len > 0 && start.addr().checked_add(len).is_some()) else {
        let text = format!(
            "a region takes at least one byte of memory, but {bytes} bytes at {address:#x} were given"
        );
        return Err(error(py, Code::BufferInvalid, text));
    };
    // SAFETY: `keep` holds the export or the tensor, so the bytes stay where they are until it is dropped;
    // for a bare address the caller promises it, as `Engine.register` says.
    let memory = unsafe {
        match writable {
            true => Memory::foreign(start, len, keep),
            false => Memory::foreign_read_only(start, len, keep),
        }
    };
    Ok(Source { memory: memory.into(), writable })
}

fn keep(held: Export) -> Keep {
    Keep { held: Some(held), owner: std::process::id() }
}

fn not_contiguous(py: Python<'_>, what: &str) -> PyErr {
    let text = format!(
        "the {what} is not contiguous: register the {what} that it is a view of, and describe the part with \
         kvik.Layout (offset, strides)"
    );
    error(py, Code::BufferInvalid, text)
}
