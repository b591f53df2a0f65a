//! Plug-ins: that one keeps the promises of `include/kvik/nic.h` (`promises`), and what kvik says to one that
//! does not (`broken`); and memory of devices (`devices`).
//!
//! The promises are checked of the sample, or of the plug-in whose file `KVIK_NIC_LIBRARY` names.

mod broken;
mod devices;
#[path = "../../../../tests/plugin/built.rs"]
mod plugins;
mod promises;
