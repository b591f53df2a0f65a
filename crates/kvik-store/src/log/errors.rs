//! What a log says when its disk refuses something.

use kvik_core::{Code, Error};
use std::io;

/// The disk refused `what`, as in "writing segment 7 of /var/kvik".
pub(super) fn disk(what: &str, error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            let text = format!("{what}: {error}: make room on the disk, or give the log less of it");
            Error::new(Code::StorageFull, text)
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            let text = format!("{what}: {error}: the disk may only be read; look at dmesg for why");
            Error::new(Code::StorageFailed, text)
        }
        io::ErrorKind::InvalidInput => Error::new(Code::InvalidArgument, format!("{what}: {error}")),
        _ => Error::new(Code::StorageFailed, format!("{what}: {error}")),
    }
}

/// Who waited got no further by its deadline.
pub(super) fn late(what: &str, name: &str) -> Error {
    let text =
        format!("the log in {name}: {what}; the disk is slower than what is asked of it, or does not answer");
    Error::new(Code::DeadlineExceeded, text)
}

/// The log may only be read.
pub(super) fn read_only(name: &str) -> Error {
    let text = format!("the log in {name} was opened for reading only: this process may not write there");
    Error::new(Code::StorageFailed, text)
}

/// The log was closed.
pub(super) fn closed() -> Error {
    Error::new(Code::StorageFailed, "the log was closed")
}
