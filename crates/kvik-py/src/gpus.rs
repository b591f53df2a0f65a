//! Memory of GPUs that Python gives to be registered.
//!
//! An object says where its memory lies by `__cuda_array_interface__` (Numba, CuPy and others), or it is a torch tensor
//! on a CUDA device; `__dlpack_device__` tells other makers' devices apart, which are refused by name. What an object
//! says is not believed: the driver is asked whether such memory is there.

use crate::args::{Natural, natural};
use crate::errors::error;
use kvik_core::Code;
use kvik_engine::CallerStream;
use kvik_host::cuda::{Cuda, Kind, Stream};
use kvik_host::{HostError, device};
use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::time::Duration;

const INTERFACE: &str = "__cuda_array_interface__";
/// How long a registration waits for the stream that its object names.
const LIMIT: Duration = Duration::from_secs(30);

/// Where an object says that its memory lies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Where {
    /// It says nothing, or that it is the host's.
    Host,
    Cuda,
}

/// What DLPack's numbers of devices mean, as far as it is neither the host's memory nor CUDA's.
fn maker(kind: i64) -> &'static str {
    match kind {
        4 => "an OpenCL device",
        7 => "a Vulkan device",
        8 => "a Metal device",
        10 => "a ROCm device",
        14 => "a oneAPI device",
        15 => "a WebGPU device",
        16 => "a Hexagon device",
        17 => "a MAIA device",
        18 => "a Trainium device",
        _ => "a device of another maker",
    }
}

/// Where an object says that its memory lies.
///
/// # Errors
/// `BufferInvalid`: on a device that is not CUDA's.
pub fn place(object: &Bound<'_, PyAny>) -> PyResult<Where> {
    let py = object.py();
    let Some(ask) = object.getattr_opt("__dlpack_device__")? else { return Ok(Where::Host) };
    // Some objects have it and refuse to answer; the other ways to ask are left.
    let Ok((kind, number)) = ask.call0().and_then(|told| told.extract::<(i64, i64)>()) else {
        return Ok(Where::Host);
    };
    match kind {
        // Ordinary memory, and what CUDA or ROCm have locked of it.
        1 | 3 | 11 => Ok(Where::Host),
        2 | 13 => Ok(Where::Cuda),
        other => {
            let maker = maker(other);
            let text = format!(
                "the object lies on {maker} (DLPack device {other}, number {number}); kvik moves host memory and \
                 memory of CUDA devices: copy it there first"
            );
            Err(error(py, Code::BufferInvalid, text))
        }
    }
}

/// What an interface says.
pub struct Array {
    pub address: u64,
    pub bytes: u64,
    pub writable: bool,
    pub stream: Option<u64>,
}

/// What the interface of an object says that has one.
///
/// # Errors
/// What the object raises, but for saying that it has none; `BufferInvalid` for what kvik cannot register.
pub fn interface(object: &Bound<'_, PyAny>) -> PyResult<Option<Array>> {
    object.getattr_opt(INTERFACE)?.map(|told| read(&told)).transpose()
}

/// A stream, as an object says that it is one: by CUDA's protocol, as torch's and CuPy's do, or by the driver's handle.
///
/// # Errors
/// What the object raises; `TypeError` for what is no stream.
pub fn stream(object: Option<&Bound<'_, PyAny>>) -> PyResult<Option<CallerStream>> {
    let Some(object) = object else { return Ok(None) };
    let handle: Natural = if let Some(ask) = object.getattr_opt("__cuda_stream__")? {
        ask.call0()?.extract::<(Natural, Natural)>()?.1
    } else if let Some(handle) = object.getattr_opt("cuda_stream")? {
        handle.extract()?
    } else {
        object.extract().map_err(|_| {
            let kind = object.get_type();
            PyTypeError::new_err(format!(
                "after is a stream of a GPU: an object with __cuda_stream__ or cuda_stream, or the driver's handle, not \
                 {kind}"
            ))
        })?
    };
    let handle = handle.within(object.py(), "after")?;
    // SAFETY: the caller says that it is a stream, and keeps it for the call, as the documentation demands.
    Ok(Some(unsafe { CallerStream::new(handle) }))
}

/// Where an address lies. What a processor may touch is the host's.
pub fn of_address(py: Python<'_>, address: u64) -> PyResult<Where> {
    let Ok(address) = usize::try_from(address) else { return Ok(Where::Host) };
    let known = device::is_device(address).map_err(|cause| failed(py, &cause))?;
    Ok(if known { Where::Cuda } else { Where::Host })
}

/// Where on PCIe the GPU is that memory at an address lies on, as the kernel writes it: `0000:3b:00.0`. None for the
/// host's.
#[pyfunction]
pub fn gpu_address(py: Python<'_>, address: Natural) -> PyResult<Option<String>> {
    let address = address.within(py, "address")?;
    let ask = || -> Result<Option<String>, HostError> {
        let Some(place) = Cuda::locate(address)?.filter(|place| place.kind != Kind::Pinned) else {
            return Ok(None);
        };
        Ok(Some(Cuda::get()?.device(place.device)?.bus().to_owned()))
    };
    py.detach(ask).map_err(|cause| failed(py, &cause))
}

/// Waits until a stream of a GPU has done what it was given so far.
pub fn wait_for(py: Python<'_>, gpu: u32, stream: u64) -> PyResult<()> {
    let wait = || -> Result<(), HostError> {
        let mut own = Stream::new(&Cuda::get()?.device(gpu)?)?;
        match stream {
            1 => own.after_default()?,
            // SAFETY: the object says that it is a stream of the device, which it keeps while it names it.
            _ => unsafe { own.after_stream(stream as usize) }?,
        }
        let mut mark = own.mark()?;
        mark.wait(&mut own, LIMIT)
    };
    py.detach(wait).map_err(|cause| failed(py, &cause))
}

/// The driver's refusal, or kvik's own of what was given.
pub fn failed(py: Python<'_>, cause: &HostError) -> PyErr {
    let code = match cause {
        HostError::Cuda(cuda) if cuda.code == 0 => Code::BufferInvalid,
        HostError::TimedOut { .. } => Code::DeadlineExceeded,
        HostError::Forked { .. } => Code::EngineForked,
        _ => Code::DeviceFailed,
    };
    error(py, code, cause.to_string())
}

fn read(told: &Bound<'_, PyAny>) -> PyResult<Array> {
    let py = told.py();
    let wrong = |why: String| error(py, Code::BufferInvalid, format!("the object's {INTERFACE} {why}"));
    let Ok(told) = told.cast::<PyDict>() else { return Err(wrong("is no dict".into())) };
    let must = |name: &str| {
        told.get_item(name)?.ok_or_else(|| PyKeyError::new_err(format!("{INTERFACE} has no {name:?}")))
    };
    let version: u64 = natural("version", &must("version")?)?;
    if !(2..=3).contains(&version) {
        return Err(wrong(format!("is of version {version}; kvik reads versions 2 and 3")));
    }
    if told.get_item("mask")?.is_some_and(|mask| !mask.is_none()) {
        return Err(wrong("has a mask: register the array without it".into()));
    }
    let Ok(shape) = must("shape")?.cast_into::<PyTuple>() else {
        return Err(wrong("has a shape that is no tuple".into()));
    };
    let shape = shape.iter().map(|side| natural("shape", &side)).collect::<PyResult<Vec<u64>>>()?;
    let kind: String = must("typestr")?.extract()?;
    let item = kind.get(2..).and_then(|size| size.parse::<u64>().ok()).filter(|size| *size > 0);
    let Some(item) = item else { return Err(wrong(format!("has the typestr {kind:?}, without a size"))) };
    let bytes = shape.iter().try_fold(item, |bytes, side| bytes.checked_mul(*side));
    let Some(bytes) = bytes else { return Err(wrong("is larger than any memory".into())) };
    if let Some(strides) = told.get_item("strides")?.filter(|strides| !strides.is_none())
        && bytes > 0
        && !strides.extract::<Vec<i64>>().is_ok_and(|strides| is_contiguous(&shape, &strides, item))
    {
        return Err(wrong(
            "has strides that are not C-contiguous: register the array that it is a view of, and describe the part with \
             kvik.Layout (offset, strides)"
                .into(),
        ));
    }
    let data = must("data")?;
    let Ok((address, read_only)) = data.extract::<(Natural, bool)>() else {
        return Err(wrong("has `data` that is no (address, read-only)".into()));
    };
    let stream = told.get_item("stream")?.filter(|stream| !stream.is_none() && version >= 3);
    let stream = stream.map(|stream| natural::<u64>("stream", &stream)).transpose()?;
    if stream == Some(0) {
        return Err(wrong("names the stream 0, which the interface forbids: 1 is the default stream".into()));
    }
    Ok(Array { address: address.within(py, "data")?, bytes, writable: !read_only, stream })
}

/// Whether elements lie one after the other; sides of one element may have any stride.
fn is_contiguous(shape: &[u64], strides: &[i64], item: u64) -> bool {
    let mut expected = item;
    let sides = shape.iter().zip(strides).rev();
    let whole = sides.into_iter().all(|(side, stride)| {
        let fits = *side == 1 || u64::try_from(*stride) == Ok(expected);
        expected *= side;
        fits
    });
    shape.len() == strides.len() && whole
}
