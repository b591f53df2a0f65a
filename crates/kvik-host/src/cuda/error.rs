//! What the driver says when it refuses something, and what that means.

use super::abi::{self, Code, Table};
use std::ffi::{CStr, c_char};
use std::ptr;

pub use crate::error::CudaError;

impl CudaError {
    /// The driver's refusal.
    pub(super) fn driver(table: &Table, what: impl Into<String>, code: Code) -> CudaError {
        let word = |ask: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text: *const c_char = ptr::null();
            // SAFETY: for a known number a C string that is there for ever is written; for others null, or nothing.
            let known = unsafe { ask(code, &mut text) } == abi::SUCCESS && !text.is_null();
            // SAFETY: as above.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let name = word(table.error_name).unwrap_or_else(|| "an error without a name".into());
        let words = word(table.error_text).map(|words| format!(", {words}")).unwrap_or_default();
        let hint = hint(code).map(|hint| format!("; {hint}")).unwrap_or_default();
        CudaError { what: what.into(), code, text: format!("{name} ({code}{words}){hint}") }
    }

    /// kvik's own refusal.
    pub(super) fn own(what: impl Into<String>, text: impl Into<String>) -> CudaError {
        CudaError { what: what.into(), code: 0, text: text.into() }
    }

    /// Whether nothing of this process works on that device any more: the context is lost, and with it what lay in
    /// its memory. Copies that were in flight have ended.
    pub fn is_lost(&self) -> bool {
        is_lost(self.code)
    }
}

/// Errors that stay: a fault of the device, or a context that is gone.
fn is_lost(code: Code) -> bool {
    matches!(
        code,
        abi::DEINITIALIZED
            | abi::ECC_UNCORRECTABLE
            | abi::NVLINK_UNCORRECTABLE
            | abi::CONTAINED
            | abi::ILLEGAL_ADDRESS
            | abi::LAUNCH_TIMEOUT
            | abi::CONTEXT_IS_DESTROYED
            | abi::ASSERT
            | abi::HARDWARE_STACK_ERROR..=abi::LAUNCH_FAILED
    )
}

fn hint(code: Code) -> Option<&'static str> {
    Some(match code {
        abi::DEINITIALIZED => "the process is ending",
        _ if is_lost(code) => {
            "the device's context is lost, by whatever this process ran on it: all that it does with the device fails \
             from now on, and only a new process can go on"
        }
        abi::OUT_OF_MEMORY => "the device, or what may be locked of the host's memory, has no room left",
        abi::NOT_INITIALIZED => {
            "a process that was forked after CUDA was initialised cannot use it: spawn it instead"
        }
        abi::STUB_LIBRARY => {
            "this is the toolkit's stub, which is there to link against: take its folder out of LD_LIBRARY_PATH"
        }
        abi::DEVICE_UNAVAILABLE => {
            "another process has the device to itself, or its compute mode forbids it (nvidia-smi -q -d COMPUTE)"
        }
        abi::NO_DEVICE => {
            "no GPU is visible: see CUDA_VISIBLE_DEVICES, and give a container its GPUs (--gpus all)"
        }
        abi::INVALID_CONTEXT => "the device's context is gone, or is another one",
        abi::NOT_SUPPORTED => "this device, its driver or this kind of memory cannot do it",
        abi::SYSTEM_NOT_READY => "a service of the machine is not up yet, such as nvidia-fabricmanager",
        abi::SYSTEM_DRIVER_MISMATCH => {
            "the library does not fit the kernel's module: restart the machine after an upgrade; in a container, have \
             nvidia-container-toolkit mount the host's library, and no other one before it"
        }
        abi::UNKNOWN => {
            "often a kernel module that is not loaded (nvidia-modprobe -u -c=0), or a device that fell off"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_says_so_and_nothing_else_does() {
        for code in [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719] {
            assert!(is_lost(code) && hint(code).unwrap().contains("new process"), "{code}");
        }
        for code in [1, 2, 3, 34, 46, 100, 101, 201, 400, 600, 701, 704, 712, 713, 720, 801, 999] {
            assert!(!is_lost(code), "{code}");
            assert!(hint(code).is_none_or(|hint| !hint.contains("new process")), "{code}");
        }
    }
}
