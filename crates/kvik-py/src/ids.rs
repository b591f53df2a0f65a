//! Page ids (and tokens) as Python gives them: any array, range or sequence of integers.
//!
//! They are copied once into one flat array of `u32`. A copy and not a view, because ids are checked before a
//! transfer and used during it: an array that the caller changes in between would undo the check.

use crate::buffers::{export, has_buffer};
use crate::errors::error;
use kvik_core::Code;
use pyo3::buffer::ElementType;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyRange, PySequence, PyString, PyTuple};
use std::fmt::Display;
use std::sync::Arc;

/// A range of more ids than this is taken for a mistake, not for a reason to allocate gigabytes.
const MOST_OF_A_RANGE: u64 = 1 << 28;

/// The ids of a Python object.
///
/// # Errors
/// `PageOutOfRange`, with its position, for an id below 0 or above 2^32-1; `InvalidArgument` for an array
/// that is not one-dimensional or not of integers; `TypeError` for what is no array, range or sequence of
/// integers.
pub fn ids(object: &Bound<'_, PyAny>) -> PyResult<Arc<[u32]>> {
    if let Ok(range) = object.cast::<PyRange>() {
        return of_range(range);
    }
    if has_buffer(object) {
        return of_buffer(object);
    }
    if object.hasattr("__array__")? {
        return of_buffer(&object.call_method0("__array__")?);
    }
    of_sequence(object)
}

/// Positions in the order of a grant: as ids, and a tuple is (start, stop) with stop excluded.
///
/// # Errors
/// As for [`ids`]; `InvalidArgument` for a tuple that is not of two numbers, or of a stop before its start.
pub fn positions(object: &Bound<'_, PyAny>) -> PyResult<Arc<[u32]>> {
    let Ok(tuple) = object.cast::<PyTuple>() else { return ids(object) };
    let range = match tuple.len() {
        2 => Some(ids(object)?).filter(|ends| ends[0] <= ends[1]),
        _ => None,
    };
    let range = range.ok_or_else(|| {
        let text = "positions as a tuple are (start, stop) with stop excluded; several positions are a list";
        error(object.py(), Code::InvalidArgument, text)
    })?;
    match u64::from(range[1] - range[0]) {
        count if count > MOST_OF_A_RANGE => {
            let text = format!("{count} positions are more than the {MOST_OF_A_RANGE} that a range may give");
            Err(error(object.py(), Code::InvalidArgument, text))
        }
        _ => Ok((range[0]..range[1]).collect()),
    }
}

/// A range is arithmetic: none of its numbers becomes a Python object.
fn of_range(range: &Bound<'_, PyRange>) -> PyResult<Arc<[u32]>> {
    let py = range.py();
    let part = |name| range.getattr(name)?.extract::<i64>();
    let (Ok(start), Ok(stop), Ok(step)) = (part("start"), part("stop"), part("step")) else {
        return Err(error(py, Code::PageOutOfRange, "the range of ids goes beyond 2^32-1, the largest id"));
    };
    // In 128 bits nothing here overflows. A range's step is never 0.
    let (start, stop, step) = (i128::from(start), i128::from(stop), i128::from(step));
    let span = if step > 0 { stop - start } else { start - stop };
    let size = step.abs().max(1);
    let count = if span <= 0 { 0 } else { (span + size - 1) / size };
    for (position, id) in [(0, start), (count - 1, start + (count - 1) * step)] {
        if count > 0 && u32::try_from(id).is_err() {
            return Err(out_of_range(py, position, id));
        }
    }
    if count > i128::from(MOST_OF_A_RANGE) {
        let text = format!("a range of {count} ids is more than the {MOST_OF_A_RANGE} that a range may give");
        return Err(error(py, Code::InvalidArgument, text));
    }
    Ok((0..count as usize).map(|position| (start + position as i128 * step) as u32).collect())
}

fn of_buffer(object: &Bound<'_, PyAny>) -> PyResult<Arc<[u32]>> {
    let py = object.py();
    let buffer = export(object)?;
    let format = buffer.format();
    let wrong = |why: String| Err(error(py, Code::InvalidArgument, why));
    if buffer.dimensions() != 1 || buffer.suboffsets().is_some() {
        let dimensions = buffer.dimensions();
        return wrong(format!(
            "ids take an array of one dimension, this one has {dimensions}: flatten it first"
        ));
    }
    let swapped = matches!(format.to_bytes().first(), Some(b'>' | b'!'));
    if swapped && buffer.item_size() > 1 {
        return wrong(
            "ids take an array in the byte order of this machine: convert it, as with astype('u4')".into(),
        );
    }
    let (count, stride) = (buffer.shape()[0], buffer.strides()[0]);
    let from = Strided { first: buffer.buf_ptr().cast::<u8>(), count, stride };
    let gathered = match (ElementType::from_format(format), buffer.item_size()) {
        (ElementType::UnsignedInteger { bytes: 1 }, 1) => from.gather::<u8>(),
        (ElementType::UnsignedInteger { bytes: 2 }, 2) => from.gather::<u16>(),
        (ElementType::UnsignedInteger { bytes: 4 }, 4) => from.gather::<u32>(),
        (ElementType::UnsignedInteger { bytes: 8 }, 8) => from.gather::<u64>(),
        (ElementType::SignedInteger { bytes: 1 }, 1) => from.gather::<i8>(),
        (ElementType::SignedInteger { bytes: 2 }, 2) => from.gather::<i16>(),
        (ElementType::SignedInteger { bytes: 4 }, 4) => from.gather::<i32>(),
        (ElementType::SignedInteger { bytes: 8 }, 8) => from.gather::<i64>(),
        _ => {
            let format = format.to_string_lossy();
            return wrong(format!(
                "ids take an array of integers, not of format {format:?}: convert it, as with astype('u4')"
            ));
        }
    };
    gathered.map_err(|(position, id)| out_of_range(py, position, id))
}

/// The elements of an exported buffer of one dimension.
struct Strided {
    first: *const u8,
    count: usize,
    stride: isize,
}

impl Strided {
    /// The elements as `u32`, or the first that is none. One allocation, no Python object.
    fn gather<T: Copy + Display + TryInto<u32>>(&self) -> Result<Arc<[u32]>, (i128, String)> {
        let mut bad = None;
        let ids = (0..self.count)
            .map(|position| {
                // SAFETY: the exporter says that `count` elements of this size lie `stride` bytes apart, and
                // keeps them there while the export, which our caller holds, lives. They may be unaligned.
                let value = unsafe {
                    self.first.offset(position as isize * self.stride).cast::<T>().read_unaligned()
                };
                value.try_into().unwrap_or_else(|_| {
                    bad.get_or_insert_with(|| (position as i128, value.to_string()));
                    0
                })
            })
            .collect();
        bad.map_or(Ok(ids), Err)
    }
}

fn of_sequence(object: &Bound<'_, PyAny>) -> PyResult<Arc<[u32]>> {
    let py = object.py();
    let sequence = object.cast::<PySequence>().ok().filter(|_| !object.is_instance_of::<PyString>());
    let Some(sequence) = sequence else {
        let name = object.get_type().name()?;
        return Err(PyTypeError::new_err(format!(
            "ids take an array, a range or a sequence of integers, not {name}"
        )));
    };
    let mut ids = Vec::new();
    for (position, item) in sequence.try_iter()?.enumerate() {
        let item = item?;
        let id =
            item.extract::<u32>().map_err(|cause| match cause.is_instance_of::<PyOverflowError>(py) {
                true => out_of_range(py, position as i128, item),
                false => cause,
            })?;
        ids.push(id);
    }
    Ok(ids.into())
}

fn out_of_range(py: Python<'_>, position: i128, id: impl Display) -> PyErr {
    let text = format!("id {id} (position {position}) is out of range: an id is a number from 0 to 2^32-1");
    error(py, Code::PageOutOfRange, text)
}
