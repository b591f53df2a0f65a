//! Memory that Python gives to be registered, and what keeps it alive.
//!
//! The export of a buffer is held for as long as the engine has the memory: Python itself then refuses to
//! resize or release it. The engine may let go of it on any of its threads, which must not take the GIL; so
//! the export goes into the inbox, and a thread that has the GIL gives it up.

use crate::args::{Natural, natural};
use crate::errors::error;
use crate::fork::Owned;
use crate::gpus::{self, Array, Where};
use crate::process::{self, Export};
use kvik_core::Code;
use kvik_engine::{GpuMemory, Memory, RegionMemory};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyTuple};
use std::any::Any;
use std::ptr::NonNull;

/// Passes what it holds to the inbox when it is dropped, on whichever thread that is.
///
/// After the interpreter's end nobody empties the inbox, so what it holds is leaked, as it must be. In a
/// forked child it is leaked at once: the export belongs to the parent's engine.
struct Keep(Owned<Export>);

impl Drop for Keep {
    fn drop(&mut self) {
        if let Some(held) = self.0.take() {
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
    if let Some(array) = gpus::interface(object)? {
        return from_interface(object, &array);
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
    let (py, (address, bytes)) = (pair.py(), pair.extract::<(Natural, Natural)>()?);
    let (address, bytes) = (address.within(py, "address")?, bytes.within(py, "nbytes")?);
    located(py, gpus::of_address(py, address)?, address, bytes, true, Box::new(()))
}

fn from_interface(object: &Bound<'_, PyAny>, array: &Array) -> PyResult<Source> {
    let (py, keep) = (object.py(), keep(Export::Object(object.clone().unbind())));
    let source = located(py, Where::Cuda, array.address, array.bytes, array.writable, keep)?;
    if let (Some(stream), Some(gpu)) = (array.stream, source.memory.device()) {
        gpus::wait_for(py, gpu.number(), stream)?;
    }
    Ok(source)
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
    located(py, Where::Host, address, bytes, writable, keep(Export::Buffer(buffer)))
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
    let number = |name| natural::<u64>(name, &tensor.call_method0(name)?);
    let Some(bytes) = number("numel")?.checked_mul(number("element_size")?) else {
        return Err(error(py, Code::BufferInvalid, "the tensor is larger than any memory"));
    };
    let (address, keep) = (number("data_ptr")?, keep(Export::Object(tensor.clone().unbind())));
    let place = if device == "cuda" { Where::Cuda } else { place };
    located(py, place, address, bytes, true, keep)
}

fn located(
    py: Python<'_>,
    place: Where,
    address: u64,
    bytes: u64,
    writable: bool,
    keep: Box<dyn Any + Send + Sync>,
) -> PyResult<Source> {
    let (Ok(start), Ok(len)) = (usize::try_from(address), usize::try_from(bytes)) else {
        return Err(error(py, Code::BufferInvalid, "the memory is larger than the address space"));
    };
    let host = len.min(isize::MAX as usize);
    let Some(first) = NonNull::new(start as *mut u8).filter(|_| len > 0 && start.checked_add(host).is_some())
    else {
        let text = format!(
            "a region takes at least one byte of memory, but {bytes} bytes at {address:#x} were given"
        );
        return Err(error(py, Code::BufferInvalid, text));
    };
    // SAFETY: `keep` holds the export, the tensor or the object, so the bytes stay where they are until it is dropped;
    // for a bare address the caller promises it, as `Engine.register` says. That memory of a device is there now is
    // asked of the driver.
    let memory = unsafe {
        match (place, writable) {
            (Where::Cuda, _) => {
                GpuMemory::new(start, len, keep).map_err(|cause| gpus::failed(py, &cause))?.into()
            }
            (Where::Host, true) => Memory::foreign(first, host, keep).into(),
            (Where::Host, false) => Memory::foreign_read_only(first, host, keep).into(),
        }
    };
    Ok(Source { memory, writable })
}

fn keep(held: Export) -> Box<Keep> {
    Box::new(Keep(Owned::new(held)))
}

fn not_contiguous(py: Python<'_>, what: &str) -> PyErr {
    let text = format!(
        "the {what} is not contiguous: register the {what} that it is a view of, and describe the part with \
         kvik.Layout (offset, strides)"
    );
    error(py, Code::BufferInvalid, text)
}
