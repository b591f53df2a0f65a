//! Engines under TLS, with certificates that the tests make: what moves, who is refused and with what words, and what
//! somebody on the wire sees and can do.

mod certs;
mod claims;
#[allow(dead_code)]
#[path = "../engine/common.rs"]
mod common;
mod crowd;
mod moves;
mod refused;
mod wire;
