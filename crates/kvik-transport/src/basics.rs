//! What every module here uses.

use kvik_core::{Code, Error};
use kvik_host::HostError;
pub(crate) use kvik_host::thread::lock;
use std::sync::atomic::{AtomicBool, Ordering};

/// An error of the machine in the engine's words.
pub fn from_host(code: Code, error: HostError) -> Error {
    let code = match &error {
        HostError::SealMissing { .. } | HostError::SizeMismatch { .. } | HostError::NotMemfd(_) => {
            Code::SealMissing
        }
        HostError::OutOfBounds { .. } => Code::PageOutOfRange,
        HostError::ReadOnlyMemory => Code::InvalidArgument,
        HostError::ProcessRefused { .. } | HostError::NonceMismatch { .. } => Code::TransportUnavailable,
        HostError::Cuda(_) | HostError::Library(_) => Code::DeviceFailed,
        HostError::ProcessGone { .. } | HostError::RemoteUnmapped { .. } => Code::PeerLost,
        _ => code,
    };
    Error::new(code, error.to_string())
}

/// Whether a stop was asked for.
pub(crate) fn stopped(flag: &AtomicBool) -> bool {
    flag.load(Ordering::Acquire)
}
