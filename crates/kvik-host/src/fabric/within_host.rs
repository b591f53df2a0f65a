//! EFA between two processes of one host: by the device, and never by shared memory.
//!
//! The provider hands what goes to an endpoint of the same host to libfabric's provider for shared memory, unless it is
//! told not to (`fi_efa(7)`). What that one writes into another process goes on after the own endpoint was closed (seen
//! with libfabric 1.17), so a transfer could not be stopped at its end.

use super::abi::fid_ep;
use super::device::{Object, forbid};
use super::newer::FI_OPT_SHARED_MEMORY_PERMITTED;
use super::{Fabric, FabricError};
use std::ffi::OsStr;

/// What switches it off for a whole process, in libraries that do not know the option.
const VARIABLE: &str = "FI_EFA_ENABLE_SHM_TRANSFER";

/// Before the endpoint is enabled.
///
/// # Errors
/// The library knows no such option, and was not told by its environment either.
pub(super) fn forbid_shared_memory(lib: &Fabric, ep: &Object<fid_ep>) -> Result<(), FabricError> {
    let code = forbid(ep, FI_OPT_SHARED_MEMORY_PERMITTED);
    if code == 0 || std::env::var_os(VARIABLE).is_some_and(|value| is_off(&value)) {
        return Ok(());
    }
    let what = "keeping EFA off shared memory, whose transfers cannot be stopped";
    let mut error = lib.error(what, -code);
    let (major, minor) = lib.version();
    error.text = format!(
        "{}; this is libfabric {major}.{minor}: install 1.21 or newer (the EFA installer has one), or set \
         {VARIABLE}=0 before the process starts",
        error.text
    );
    Err(error)
}

/// As libfabric reads a variable of this kind.
fn is_off(value: &OsStr) -> bool {
    value.to_str().is_some_and(|text| ["0", "no", "false", "off"].contains(&text.to_lowercase().as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_switches_it_off_is_what_libfabric_takes_for_no() {
        for (text, off) in
            [("0", true), ("no", true), ("False", true), ("OFF", true), ("1", false), ("", false)]
        {
            assert_eq!(is_off(OsStr::new(text)), off, "{text:?}");
        }
    }
}
