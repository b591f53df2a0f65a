//! Sealed memfds: memory that a peer can map and trust to stay there.
//!
//! The owner creates the file, sizes it, makes its one writable mapping, and only then seals it. From then on
//! nobody, the owner included, can map it writable again (`FUTURE_WRITE`), make it shorter, which would kill a
//! reader with SIGBUS (`SHRINK`), make it longer (`GROW`), or change the seals (`SEAL`). The receiver of the
//! descriptor believes none of this and looks.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::{Errno, retry_on_intr};

use crate::error::HostError;
use crate::mapping::Mapping;

/// The seals of every memfd that kvik shares.
pub(crate) const SEALS: SealFlags =
    SealFlags::FUTURE_WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// What `fstatfs` says of a memfd on huge pages.
const HUGETLBFS_MAGIC: i64 = 0x958458f6;

/// Creates a memfd of `file_len` bytes with the owner's writable mapping, sealed. `huge` is the page size of a
/// huge-page pool to take it from; `file_len` is then a multiple of it.
pub(crate) fn create(
    name: &str,
    file_len: usize,
    huge: Option<usize>,
) -> Result<(OwnedFd, Mapping), HostError> {
    let fd = memfd(name, huge)?;
    rustix::fs::ftruncate(&fd, file_len as u64)
        .map_err(|e| HostError::os(format!("sizing shared memory to {file_len} bytes"), e))?;
    if huge.is_some() {
        take_pages(&fd, file_len)?;
    }
    let mapping = Mapping::shared(fd.as_fd(), file_len, true)?;
    rustix::fs::fcntl_add_seals(&fd, SEALS)
        .map_err(|e| HostError::os("sealing shared memory (needs Linux 5.1 or newer)", e))?;
    Ok((fd, mapping))
}

/// Takes the pages of a file from its huge-page pool. A mapping would only reserve them: a container that may have fewer
/// learns of that by SIGBUS, where it touches one too many.
fn take_pages(fd: &OwnedFd, file_len: usize) -> Result<(), HostError> {
    // Where a signal comes, what was taken by then stays, and is not taken again.
    retry_on_intr(|| rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, file_len as u64)).map_err(|e| {
        let what = format!(
            "taking {file_len} bytes of huge pages, which others may have taken meanwhile, or this container may have \
             fewer of (hugetlb.*.max of its cgroup)"
        );
        HostError::os(what, e)
    })
}

fn memfd(name: &str, huge: Option<usize>) -> Result<OwnedFd, HostError> {
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    if let Some(size) = huge {
        // The kernel takes the base-2 logarithm of the page size in the upper bits.
        let log2 = size.trailing_zeros();
        flags |= MemfdFlags::HUGETLB | MemfdFlags::from_bits_retain(log2 << 26);
    }
    // Kernels from 6.3 can be set to refuse memfds that might be executed; older ones do not know the flag.
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        other => other,
    }
    .map_err(|e| HostError::os("creating shared memory with memfd_create", e))
}

/// Checks that `fd` is a memfd with all of [`SEALS`], and gives its size in bytes.
pub(crate) fn check(fd: BorrowedFd<'_>) -> Result<u64, HostError> {
    let have = rustix::fs::fcntl_get_seals(fd).map_err(|e| HostError::NotMemfd(e.to_string()))?;
    if !have.contains(SEALS) {
        return Err(HostError::SealMissing { have: names(have), want: names(SEALS) });
    }
    let stat = rustix::fs::fstat(fd).map_err(|e| HostError::os("looking at a peer's memfd", e))?;
    u64::try_from(stat.st_size).map_err(|_| HostError::NotMemfd(format!("size {}", stat.st_size)))
}

/// The size of the file that holds `len` bytes: exactly that, or the next multiple of its huge page.
pub(crate) fn file_len(fd: BorrowedFd<'_>, len: usize) -> Result<usize, HostError> {
    let fs = rustix::fs::fstatfs(fd).map_err(|e| HostError::os("looking at a peer's memfd", e))?;
    // The type of these fields differs between architectures, hence the casts; both are small and positive.
    #[allow(clippy::unnecessary_cast)]
    let (kind, page) = (fs.f_type as i64, fs.f_bsize as usize);
    if kind == HUGETLBFS_MAGIC { round_up(len, page) } else { Ok(len) }
}

/// `len` rounded up to a multiple of `page`.
pub(crate) fn round_up(len: usize, page: usize) -> Result<usize, HostError> {
    len.checked_next_multiple_of(page)
        .ok_or_else(|| HostError::InvalidArgument(format!("{len} bytes do not fit in an address space")))
}

/// The names of seals, joined by `|`; "none" for none.
fn names(seals: SealFlags) -> String {
    const NAMES: [(SealFlags, &str); 5] = [
        (SealFlags::FUTURE_WRITE, "FUTURE_WRITE"),
        (SealFlags::SHRINK, "SHRINK"),
        (SealFlags::GROW, "GROW"),
        (SealFlags::SEAL, "SEAL"),
        (SealFlags::WRITE, "WRITE"),
    ];
    let found: Vec<&str> =
        NAMES.iter().filter(|(flag, _)| seals.contains(*flag)).map(|(_, name)| *name).collect();
    if found.is_empty() { "none".into() } else { found.join("|") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs where no huge page is free too: a file of them can be made and sealed before any is taken.
    #[test]
    fn a_file_on_huge_pages_is_sealed_and_rounded_to_them() {
        let pools = crate::huge_pages::HugePageFacts::read().pools;
        let Some(page) = pools.last().map(|pool| pool.page_size) else {
            println!("not run: this kernel has no huge pages");
            return;
        };
        let fd = memfd("kvik-test", Some(page)).unwrap();
        rustix::fs::ftruncate(&fd, 2 * page as u64).unwrap();
        assert!(matches!(check(fd.as_fd()), Err(HostError::SealMissing { .. })));
        rustix::fs::fcntl_add_seals(&fd, SEALS).unwrap();
        assert_eq!(check(fd.as_fd()).unwrap(), 2 * page as u64);
        assert_eq!(file_len(fd.as_fd(), page + 1).unwrap(), 2 * page);
        assert_eq!(file_len(fd.as_fd(), 2 * page).unwrap(), 2 * page);
        assert!(file_len(fd.as_fd(), usize::MAX).is_err());
    }

    #[test]
    fn an_ordinary_file_is_exactly_as_long_as_said() {
        let (fd, _mapping) = create("kvik-test", 4097, None).unwrap();
        assert_eq!(check(fd.as_fd()).unwrap(), 4097);
        assert_eq!(file_len(fd.as_fd(), 4097).unwrap(), 4097);
    }

    #[test]
    fn seals_have_names() {
        assert_eq!(names(SealFlags::empty()), "none");
        assert_eq!(names(SealFlags::SHRINK | SealFlags::WRITE), "SHRINK|WRITE");
    }
}
