//! Facts that tell whether a peer is on this host, and what the two may share.
//!
//! They only exclude: copies of one virtual machine can have equal facts. That a peer really is here is proven by
//! a nonce over the UNIX socket.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::error::HostError;

/// Who and where this process is, small enough to be sent to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFacts {
    /// Random number of this start of the kernel.
    pub boot_id: [u8; 16],
    /// Inode of the PID namespace.
    pub pid_namespace: u64,
    /// Inode of the user namespace.
    pub user_namespace: u64,
    /// Inode of the network namespace.
    pub net_namespace: u64,
    /// Effective user.
    pub uid: u32,
    /// Process number in its own PID namespace.
    pub pid: u32,
}

impl HostFacts {
    /// Reads the facts of this process.
    pub fn read() -> Result<HostFacts, HostError> {
        Ok(HostFacts {
            boot_id: boot_id()?,
            pid_namespace: namespace("pid")?,
            user_namespace: namespace("user")?,
            net_namespace: namespace("net")?,
            uid: rustix::process::geteuid().as_raw(),
            pid: std::process::id(),
        })
    }

    /// Why the two cannot use one host's memory, or `None` if nothing speaks against it. A path over shared
    /// memory needs the same kernel, the same network namespace (for the abstract UNIX socket), and the same
    /// user.
    pub fn why_not_local(&self, peer: &HostFacts) -> Option<&'static str> {
        if self.boot_id != peer.boot_id {
            Some("the peer runs on another host")
        } else if self.net_namespace != peer.net_namespace {
            Some(
                "the peer is in another network namespace; give both containers one (host network, or one pod)",
            )
        } else if self.user_namespace != peer.user_namespace {
            Some("the peer is in another user namespace")
        } else if self.uid != peer.uid {
            Some("the peer runs as another user")
        } else {
            None
        }
    }

    /// Why one cannot read the other's memory by its process number, or `None` if nothing speaks against it.
    pub fn why_not_process_vm(&self, peer: &HostFacts) -> Option<&'static str> {
        self.why_not_local(peer).or_else(|| {
            (self.pid_namespace != peer.pid_namespace)
                .then_some("the peer is in another PID namespace; let the containers share it")
        })
    }
}

/// Random bytes that nobody can guess, to be shown and recognised: a nonce.
pub fn nonce() -> Result<[u8; 32], HostError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|e| {
        let source = std::io::Error::from_raw_os_error(e.raw_os_error().unwrap_or(libc::EIO));
        HostError::os("asking the kernel for random bytes", source)
    })?;
    Ok(bytes)
}

fn boot_id() -> Result<[u8; 16], HostError> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string(path).map_err(|e| HostError::os(format!("reading {path}"), e))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    match u128::from_str_radix(&digits, 16) {
        Ok(id) if digits.len() == 32 => Ok(id.to_be_bytes()),
        _ => Err(HostError::InvalidArgument(format!("{path} holds no boot id: {:?}", text.trim()))),
    }
}

fn namespace(kind: &str) -> Result<u64, HostError> {
    let path = format!("/proc/self/ns/{kind}");
    fs::metadata(&path).map(|m| m.ino()).map_err(|e| HostError::os(format!("looking at {path}"), e))
}
