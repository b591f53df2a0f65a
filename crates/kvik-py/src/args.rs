//! Arguments as Python gives them, checked into the engine's types.

use crate::errors::{OrRaise, error};
use kvik_core::{Class, Code, Right, Use, parse_size};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use std::ops::Range;
use std::time::Duration;

/// No time is longer; far more than the engine takes, and far less than what a clock can count.
const MOST_SECONDS: f64 = 1e8;

/// A number as it is given. One that is beyond all of its type is kept as text, so that the error can name the argument.
pub struct Number<T>(Result<T, String>);

/// An integer where a number of at least 0 is wanted: anything with `__index__`, so NumPy's integers too.
pub type Natural = Number<u64>;

/// Seconds: anything with `__float__` or `__index__`.
pub type Seconds = Number<f64>;

impl<T: for<'a, 'py> FromPyObject<'a, 'py, Error = PyErr>> FromPyObject<'_, '_> for Number<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Number<T>> {
        match object.extract::<T>() {
            Err(cause) if cause.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Number(Err(shown(&object))))
            }
            number => number.map(Number::of),
        }
    }
}

impl<T> Number<T> {
    /// This number.
    pub const fn of(number: T) -> Number<T> {
        Number(Ok(number))
    }
}

fn given<T: ToString>(number: &Number<T>) -> String {
    number.0.as_ref().map_or_else(String::clone, T::to_string)
}

impl Natural {
    /// The number in the type that its use needs.
    pub fn within<T: TryFrom<u64>>(&self, py: Python<'_>, name: &str) -> PyResult<T> {
        let fits = self.0.as_ref().ok().and_then(|number| T::try_from(*number).ok());
        fits.ok_or_else(|| {
            let (given, most) = (given(self), u64::MAX >> (64 - 8 * size_of::<T>()));
            let text = format!("{name}={given} is out of range: it takes a whole number from 0 to {most}");
            error(py, Code::InvalidArgument, text)
        })
    }
}

/// The number that an object is, in the type that its use needs.
pub fn natural<T: TryFrom<u64>>(name: &str, object: &Bound<'_, PyAny>) -> PyResult<T> {
    object.extract::<Natural>()?.within(object.py(), name)
}

/// Layers or slices as they are given: the first, and the one behind the last.
pub type Ends = (Natural, Natural);

/// Those between.
pub fn range(py: Python<'_>, name: &str, (from, to): Ends) -> PyResult<Range<u32>> {
    Ok(from.within(py, name)?..to.within(py, name)?)
}

/// Bytes, as a number or as text such as `"16KiB"`.
pub fn size(name: &str, object: &Bound<'_, PyAny>) -> PyResult<u64> {
    match object.cast::<PyString>() {
        Ok(text) => parse_size(text.to_str()?).or_raise(object.py()),
        Err(_) => natural(name, object),
    }
}

/// Seconds of at least 0, as a [`Duration`].
pub fn seconds(py: Python<'_>, name: &str, value: Seconds) -> PyResult<Duration> {
    let usable = value.0.as_ref().ok().filter(|value| **value <= MOST_SECONDS);
    usable.and_then(|value| Duration::try_from_secs_f64(*value).ok()).ok_or_else(|| {
        let given = given(&value);
        let text = format!("{name}={given} is no usable time: it takes seconds, from 0 to {MOST_SECONDS}");
        error(py, Code::InvalidArgument, text)
    })
}

/// Seconds where `None` means the default.
pub fn maybe_seconds(py: Python<'_>, name: &str, value: Option<Seconds>) -> PyResult<Option<Duration>> {
    value.map(|value| seconds(py, name, value)).transpose()
}

/// A class by name.
pub fn class(py: Python<'_>, name: &str) -> PyResult<Class> {
    let class = Class::ALL.into_iter().find(|class| class.name() == name);
    class.ok_or_else(|| wrong(py, "traffic_class", name, "\"handover\" or \"bulk\""))
}

/// A right by name.
pub fn right(py: Python<'_>, name: &str) -> PyResult<Right> {
    let right = [Right::Read, Right::Write].into_iter().find(|right| right.name() == name);
    right.ok_or_else(|| wrong(py, "right", name, "\"read\" or \"write\""))
}

/// How often a grant may be used: a number of readers, or `"many"`.
pub fn uses(object: &Bound<'_, PyAny>) -> PyResult<Use> {
    let py = object.py();
    if let Ok(text) = object.cast::<PyString>() {
        return match text.to_str()? {
            "many" => Ok(Use::Many),
            other => Err(wrong(py, "use", other, "a number of readers, or \"many\"")),
        };
    }
    match natural("use", object)? {
        0 => Err(wrong(py, "use", "0", "1 or more readers, or \"many\"")),
        readers => Ok(Use::Once(readers)),
    }
}

/// One text, or several.
pub fn texts(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    if let Ok(text) = object.cast::<PyString>() {
        return Ok(vec![text.to_str()?.to_owned()]);
    }
    object.try_iter()?.map(|item| item?.extract::<String>()).collect::<PyResult<_>>().map_err(|cause| {
        let told = PyTypeError::new_err(format!("{name} takes a str or a list of str"));
        told.set_cause(object.py(), Some(cause));
        told
    })
}

/// The secret. An empty one is refused, because it would look like a secret and protect nothing.
pub fn secret(_name: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let bytes = if let Ok(text) = object.cast::<PyString>() {
        text.to_str()?.as_bytes().to_vec()
    } else if let Ok(bytes) = object.cast::<PyBytes>() {
        bytes.as_bytes().to_vec()
    } else {
        return Err(PyTypeError::new_err("secret takes a str or bytes"));
    };
    if bytes.is_empty() {
        let text = "the secret is empty: give the same random text to every engine, or leave it out for none";
        return Err(error(object.py(), Code::InvalidArgument, text));
    }
    Ok(bytes)
}

/// A value in an error, cut to a length that fits into one line.
fn shown(object: &Bound<'_, PyAny>) -> String {
    let text =
        object.str().map_or_else(|_| "the value".to_owned(), |text| text.to_string_lossy().into_owned());
    text.chars().take(40).collect()
}

/// The error of a word that is none of the choices.
pub fn wrong(py: Python<'_>, name: &str, given: &str, choices: &str) -> PyErr {
    error(py, Code::InvalidArgument, format!("{name}={given:?} is unknown: choose {choices}"))
}
