//! The local link: its messages, with and without descriptors, from a process of the same user.

use crate::feed;
use arbitrary::Unstructured;
use kvik_core::RegionId;
use kvik_host::unix::UnixConn;
use kvik_host::{FenceTable, HugePages, Memory};
use kvik_transport::local::{LocalLink, PeerRegion};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// A message has this many bytes, and one that shows a region on a GPU twice as many.
const MESSAGE: usize = 64;
const ON_GPU: u8 = 4;
const BYTES: usize = 1 << 16;

/// What a message may carry.
struct Carried {
    fence: Arc<FenceTable>,
    memory: Memory,
    plain: File,
    pipe: OwnedFd,
}

static CARRIED: OnceLock<Carried> = OnceLock::new();

fn carried() -> Carried {
    Carried {
        fence: FenceTable::new(16).expect("a table"),
        memory: Memory::shared(BYTES, HugePages::Never).expect("memory"),
        plain: File::open("/dev/null").expect("a file"),
        pipe: std::io::pipe().expect("a pipe").0.into(),
    }
}

/// Messages and what they carry. Whatever comes, a link is up or over, and gives only what was shown and fits.
pub fn local(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let carried = CARRIED.get_or_init(carried);
    let (mine, theirs) = UnixConn::pair().expect("a pair");
    let table = FenceTable::new(4).expect("a table");
    // Where the peer's process is known its memory is looked at: here it is this one.
    let pid = if u.arbitrary().unwrap_or(false) { std::process::id() } else { 0 };
    let link = LocalLink::new(mine, table, pid, [7; 32], || {});
    while !u.is_empty() {
        let Ok((bytes, fd)) = message(&mut u, carried) else { break };
        let fds: &[BorrowedFd<'_>] = fd.as_slice();
        if theirs.send_with_fds(&bytes, fds).is_err() || link.receive().is_err() || link.flush().is_err() {
            break;
        }
    }
    let stop = AtomicBool::new(true);
    if let Ok(fence) = link.fence(&stop) {
        assert!(fence.generation(fence.slots()).is_err() && fence.generation(0).is_ok());
    }
    for id in 0..4 {
        if let Ok(region) = link.region(RegionId(id), &stop) {
            assert!(["memfd", "process_vm_readv", "device memory"].contains(&region.mechanism()));
            // There is no CUDA here to open it with.
            assert!(!matches!(&*region, PeerRegion::Device(device) if device.open(&link, &stop).is_ok()));
        }
    }
}

fn message<'c>(
    u: &mut Unstructured,
    carried: &'c Carried,
) -> arbitrary::Result<(Vec<u8>, Option<BorrowedFd<'c>>)> {
    let mut bytes = vec![0; MESSAGE];
    bytes[0] = u.int_in_range(0..=8)?;
    bytes[4..8].copy_from_slice(&u.int_in_range(0..=5u32)?.to_le_bytes());
    let addr = if u.arbitrary()? { carried.memory.addr() as u64 } else { feed::number(u)? };
    bytes[8..16].copy_from_slice(&addr.to_le_bytes());
    let len = if u.arbitrary()? { BYTES as u64 } else { feed::number(u)? };
    bytes[16..24].copy_from_slice(&len.to_le_bytes());
    if u.ratio(1, 8)? {
        u.fill_buffer(&mut bytes[..])?;
    }
    if bytes[0] == ON_GPU {
        bytes.resize(2 * MESSAGE, 0x5A);
    }
    if u.ratio(1, 16)? {
        bytes.resize(u.int_in_range(1..=2 * MESSAGE)?, 0);
    }
    let fd = match u.int_in_range(0u8..=5)? {
        0 | 1 => Some(carried.fence.fd()),
        2 => carried.memory.fd(),
        3 => Some(carried.plain.as_fd()),
        4 => Some(carried.pipe.as_fd()),
        _ => None,
    };
    Ok((bytes, fd))
}
