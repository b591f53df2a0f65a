//! Registered memory, shared memory, and what is refused of a peer's descriptor.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvik_host::huge_pages::{HugePageFacts, Pool};
use kvik_host::{HostError, HugePages, Memory, PeerMemory};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

mod common;

const LEN: usize = 64 << 10;

fn shared() -> Memory {
    Memory::shared(LEN, HugePages::Auto).unwrap()
}

fn fd_of(memory: &Memory) -> OwnedFd {
    memory.fd().unwrap().try_clone_to_owned().unwrap()
}

fn memfd(len: usize, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("forged", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 256) as u8).collect()
}

fn bytes_of(memory: &Memory, offset: usize, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    memory.copy_out(offset, &mut out).unwrap();
    out
}

#[test]
fn every_way_into_memory_is_bounds_checked() {
    let memory = shared();
    let mut buffer = [0u8; 16];
    for (offset, len) in [(LEN, 1), (LEN - 15, 16), (usize::MAX, 16), (LEN + 1, 0), (1, LEN)] {
        let refused = |result: Result<(), HostError>| {
            assert!(
                matches!(result, Err(HostError::OutOfBounds { size: LEN, .. })),
                "{offset} {len}: {result:?}"
            );
        };
        refused(memory.check(offset, len));
        refused(memory.send_run(offset, len).map(|_| ()));
        refused(memory.recv_run(offset, len).map(|_| ()));
        refused(memory.for_each_chunk(offset, len, &mut buffer, |_| panic!("called")));
        refused(Memory::copy_between(&memory, 0, &memory, offset, len));
        refused(Memory::copy_between(&memory, offset, &memory, 0, len));
        refused(memory.copy_summed(&shared(), [(offset, 0, len)].into_iter()).map(drop));
        refused(memory.copy_summed(&shared(), [(0, offset, len)].into_iter()).map(drop));
        if let Some(slice) = buffer.get_mut(..len) {
            refused(memory.copy_out(offset, slice));
            refused(memory.copy_in(offset, slice));
        }
    }
    memory.check(LEN, 0).unwrap();
    memory.copy_out(LEN - 16, &mut buffer).unwrap();
}

#[test]
fn chunks_cover_the_range_in_order_and_in_small_pieces() {
    let memory = shared();
    let bytes = pattern(LEN);
    memory.copy_in(0, &bytes).unwrap();
    let mut scratch = vec![0; 1 << 20];
    let mut seen = Vec::new();
    memory
        .for_each_chunk(5, LEN - 7, &mut scratch, |piece| {
            assert!(piece.len() <= 16 << 10);
            seen.extend_from_slice(piece);
        })
        .unwrap();
    assert_eq!(seen, bytes[5..LEN - 2]);
    assert!(matches!(memory.for_each_chunk(0, 1, &mut [], |_| ()), Err(HostError::InvalidArgument(_))));
}

#[test]
fn overlapping_copies_move_as_if_through_a_buffer() {
    let memory = shared();
    let bytes = pattern(1000);
    memory.copy_in(0, &bytes).unwrap();
    Memory::copy_between(&memory, 100, &memory, 0, 1000).unwrap();
    assert_eq!(bytes_of(&memory, 100, 1000), bytes);
}

#[test]
fn extents_are_copied_and_summed_in_one_pass() {
    let (from, to) = (shared(), shared());
    from.copy_in(0, &pattern(LEN)).unwrap();
    // Out of order, and not at the same places.
    let extents = [(1024, 128, 512), (0, 2048, 1024), (3000, 4096, 77)];
    let copy = |to: &Memory, extents: &[_]| to.copy_summed(&from, extents.iter().copied()).unwrap();
    let sum = copy(&to, &extents);
    let ranges = extents.map(|(_, at, len)| (at, len));
    assert_eq!(sum, to.sum(ranges.into_iter(), None).unwrap());
    for (from_at, at, len) in extents.into_iter().filter(|_| sum.is_some()) {
        assert_eq!(bytes_of(&to, at, len), bytes_of(&from, from_at, len));
    }
    // Half a stripe in two extents, an odd address, few bytes, and the same memory.
    assert_eq!(copy(&to, &[(0, 0, 100), (100, 128, 500)]), None);
    assert_eq!(copy(&to, &[(0, 32, 1024)]), None);
    assert_eq!(copy(&to, &[(0, 0, 192)]), None);
    assert_eq!(copy(&from, &[(0, 64, 1024)]), None);
}

#[test]
fn foreign_memory_is_kept_until_it_is_dropped() {
    struct Keep(Arc<AtomicBool>, *mut [u8; 64]);
    // SAFETY: the pointer is used by the drop alone.
    unsafe impl Send for Keep {}
    // SAFETY: as above.
    unsafe impl Sync for Keep {}
    impl Drop for Keep {
        fn drop(&mut self) {
            // SAFETY: made by `Box::into_raw` below, and freed only here.
            drop(unsafe { Box::from_raw(self.1) });
            self.0.store(true, Ordering::Release);
        }
    }
    let dropped = Arc::new(AtomicBool::new(false));
    let raw = Box::into_raw(Box::new([0u8; 64]));
    let keep = Box::new(Keep(Arc::clone(&dropped), raw));
    // SAFETY: the box lives until `keep` is dropped, and nothing else refers to it.
    let memory = unsafe { Memory::foreign(NonNull::new(raw.cast()).unwrap(), 64, keep) };
    memory.copy_in(60, b"last").unwrap();
    assert_eq!(bytes_of(&memory, 60, 4), b"last");
    assert!(memory.fd().is_none() && memory.pages().is_none());
    assert!(!dropped.load(Ordering::Acquire));
    drop(memory);
    assert!(dropped.load(Ordering::Acquire));
}

#[test]
fn read_only_memory_is_never_written() {
    let bytes: &'static [u8] = b"constant bytes in the program text";
    let base = NonNull::new(bytes.as_ptr().cast_mut()).unwrap();
    // SAFETY: static, and readable for ever.
    let memory = unsafe { Memory::foreign_read_only(base, bytes.len(), Box::new(())) };
    let source = shared();
    let peer = PeerMemory::map(fd_of(&source), LEN).unwrap();
    for refused in [
        memory.copy_in(0, b"x"),
        memory.recv_run(0, 1).map(|_| ()),
        Memory::copy_between(&memory, 0, &source, 0, 1),
        Memory::copy_between(&memory, 0, &peer, 0, 1),
    ] {
        assert!(matches!(refused, Err(HostError::ReadOnlyMemory)), "{refused:?}");
    }
    Memory::copy_between(&source, 0, &memory, 0, bytes.len()).unwrap();
    assert_eq!(bytes_of(&source, 0, bytes.len()), bytes);
}

#[test]
fn a_peer_sees_what_the_owner_writes() {
    let owner = shared();
    let peer = PeerMemory::map(fd_of(&owner), LEN).unwrap();
    let bytes = pattern(LEN);
    owner.copy_in(0, &bytes).unwrap();
    let copy = shared();
    Memory::copy_between(&copy, 20, &peer, 10, LEN - 20).unwrap();
    assert_eq!(bytes_of(&copy, 20, LEN - 20), bytes[10..LEN - 10]);
    let outside = Memory::copy_between(&copy, 0, &peer, 1, LEN);
    assert!(matches!(outside, Err(HostError::OutOfBounds { .. })));
    assert!(matches!(peer.send_run(LEN, 1), Err(HostError::OutOfBounds { .. })));
}

#[test]
fn nobody_can_map_shared_memory_writable_or_resize_it() {
    let memory = shared();
    let fd = memory.fd().unwrap();
    // SAFETY: the kernel picks the address; the mapping is expected to be refused.
    let mapped = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            LEN,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            fd,
            0,
        )
    };
    assert_eq!(mapped.unwrap_err(), Errno::PERM);
    assert_eq!(rustix::io::pwrite(fd, b"x", 0).unwrap_err(), Errno::PERM);
    assert_eq!(rustix::fs::ftruncate(fd, 0).unwrap_err(), Errno::PERM);
    assert_eq!(rustix::fs::ftruncate(fd, 2 * LEN as u64).unwrap_err(), Errno::PERM);
    assert_eq!(rustix::fs::fcntl_add_seals(fd, SealFlags::WRITE).unwrap_err(), Errno::PERM);
    memory.copy_in(0, b"the owner still can").unwrap();
}

#[test]
fn forged_descriptors_are_refused_each_with_its_own_error() {
    let all = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    assert!(PeerMemory::map(memfd(LEN, all), LEN).is_ok());

    let exe: OwnedFd = std::fs::File::open(std::env::current_exe().unwrap()).unwrap().into();
    assert!(matches!(PeerMemory::map(exe, LEN), Err(HostError::NotMemfd(_))));
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(matches!(PeerMemory::map(socket.into(), LEN), Err(HostError::NotMemfd(_))));

    for missing in [all, SealFlags::FUTURE_WRITE, SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
        match PeerMemory::map(memfd(LEN, all - missing), LEN) {
            Err(HostError::SealMissing { have, want }) => {
                assert_eq!(want, "FUTURE_WRITE|SHRINK|GROW|SEAL");
                assert_ne!(have, want);
            }
            other => panic!("without {missing:?}: {other:?}"),
        }
    }
    for len in [0, 1, LEN - 1, LEN + 1, 2 * LEN, usize::MAX] {
        let result = PeerMemory::map(memfd(LEN, all), len);
        assert!(
            matches!(result, Err(HostError::SizeMismatch { have, .. }) if have == LEN as u64),
            "{len}: {result:?}"
        );
    }
    assert!(matches!(PeerMemory::map(memfd(0, all), 0), Err(HostError::SizeMismatch { .. })));
}

#[test]
fn sizes_need_not_be_whole_pages() {
    for len in [1, 4095, 4097, 100_001] {
        let memory = Memory::shared(len, HugePages::Auto).unwrap();
        memory.copy_in(len - 1, b"z").unwrap();
        let peer = PeerMemory::map(fd_of(&memory), len).unwrap();
        let mut last = [0];
        peer.copy_out(len - 1, &mut last).unwrap();
        assert_eq!(&last, b"z");
    }
    assert!(matches!(Memory::shared(0, HugePages::Auto), Err(HostError::InvalidArgument(_))));
}

#[test]
fn page_size_is_told_with_its_reason() {
    let len = 32 << 20;
    let memory = Memory::shared(len, HugePages::Auto).unwrap();
    let pages = memory.pages().unwrap();
    let small = rustix::param::page_size();
    assert_eq!(pages.page_size == small, !pages.why_not_bigger.is_empty(), "{pages:?}");
    let peer = PeerMemory::map(fd_of(&memory), len).unwrap();
    memory.copy_in(len - 4, b"tail").unwrap();
    let mut tail = [0; 4];
    peer.copy_out(len - 4, &mut tail).unwrap();
    assert_eq!(&tail, b"tail");

    match Memory::shared(len, HugePages::Require) {
        Ok(memory) => assert!(memory.pages().unwrap().page_size > small),
        Err(HostError::HugePagesUnavailable(why)) => assert!(why.contains("vm.nr_hugepages"), "{why}"),
        Err(other) => panic!("{other}"),
    }
    let never = Memory::shared(len, HugePages::Never).unwrap();
    assert_eq!(never.pages().unwrap().page_size, small);
    assert!(!never.pages().unwrap().transparent);
}

/// A cgroup whose processes may have no huge pages of any size.
struct WithoutHugePages(PathBuf);

impl WithoutHugePages {
    fn make(pools: &[Pool]) -> std::io::Result<WithoutHugePages> {
        let root = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].into_iter().map(Path::new);
        let controls = |root: &&Path| {
            fs::read_to_string(root.join("cgroup.controllers")).is_ok_and(|all| all.contains("hugetlb"))
        };
        let root = root.into_iter().find(controls).ok_or(std::io::ErrorKind::Unsupported)?;
        fs::write(root.join("cgroup.subtree_control"), "+hugetlb")?;
        let group = WithoutHugePages(root.join(format!("kvik-test-{}", std::process::id())));
        fs::create_dir(&group.0)?;
        for size in pools.iter().map(|pool| pool.page_size) {
            let unit = ["KB", "MB", "GB"][(size.ilog2() / 10 - 1).min(2) as usize];
            let size = format!("{}{unit}", size >> (size.ilog2() / 10 * 10).min(30));
            fs::write(group.0.join(format!("hugetlb.{size}.max")), "0")?;
        }
        Ok(group)
    }

    fn enter(&self) {
        fs::write(self.0.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    }
}

impl Drop for WithoutHugePages {
    fn drop(&mut self) {
        fs::remove_dir(&self.0).unwrap();
    }
}

#[test]
fn a_container_that_may_have_no_huge_pages_gets_others_and_lives() {
    const LEN: usize = 64 << 20;
    let facts = HugePageFacts::read();
    if let Err(why) = facts.choose(LEN) {
        return println!("not run: {why}");
    }
    let group = match WithoutHugePages::make(&facts.pools) {
        Ok(group) => group,
        Err(error) => return println!("not run: no cgroup without huge pages can be made here ({error})"),
    };
    assert!(common::in_forked_child(|| {
        group.enter();
        let memory = Memory::shared(LEN, HugePages::Auto).unwrap();
        (0..LEN).step_by(4096).for_each(|at| memory.copy_in(at, &[1]).unwrap());
        memory.pages().unwrap().page_size == rustix::param::page_size()
    }));
}

#[test]
fn a_forked_child_uses_memory_and_dropping_it_there_leaves_the_parents() {
    let memory = shared();
    memory.copy_in(0, b"from the parent").unwrap();
    let mut slot = Some(memory);
    let child_was_well = common::in_forked_child(|| {
        let memory = slot.take().unwrap();
        let seen = bytes_of(&memory, 0, 15) == b"from the parent";
        memory.copy_in(100, b"from the child").unwrap();
        drop(memory);
        seen
    });
    assert!(child_was_well);
    let memory = slot.take().unwrap();
    assert_eq!(bytes_of(&memory, 100, 14), b"from the child");
    memory.copy_in(0, b"still here").unwrap();
    assert!(memory.fd().unwrap().as_fd().try_clone_to_owned().is_ok());
}

/// Page faults of this thread that read nothing from a disk.
fn faults() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills `usage`, which is ours; all zero is a valid value of it.
    let usage = unsafe {
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()), 0);
        usage.assume_init()
    };
    usage.ru_minflt
}

#[test]
fn a_mapping_is_populated_with_what_its_owner_touched_and_nothing_else() {
    const STEP: usize = PeerMemory::STEP;
    const PAGE: usize = 4096;
    let owner = Memory::shared(4 * STEP, HugePages::Never).unwrap();
    // All of the second step, and of the third every other 64 KiB.
    owner.copy_in(STEP, &vec![7; STEP]).unwrap();
    let spots = || (2 * STEP..3 * STEP).step_by(128 << 10);
    spots().for_each(|at| owner.copy_in(at, &[7; 64 << 10]).unwrap());
    let held = || rustix::fs::fstat(owner.fd().unwrap()).unwrap().st_blocks as usize * 512;
    let before = held();
    assert!((STEP + STEP / 2..2 * STEP).contains(&before), "{before}");
    let populated = PeerMemory::map(fd_of(&owner), 4 * STEP).unwrap();
    let plain = PeerMemory::map(fd_of(&owner), 4 * STEP).unwrap();
    let mut seen = Vec::new();
    let mut whole = |memory: &PeerMemory| -> Vec<bool> {
        (0..4).map(|step| memory.populate(step * STEP, &mut seen).unwrap()).collect()
    };
    assert_eq!(whole(&populated), [false, true, false, false]);
    assert_eq!(held(), before, "pages were committed that the owner never touched");

    let read = |memory: &PeerMemory| {
        let (before, mut byte) = (faults(), [0; 1]);
        let touched = (STEP..2 * STEP).step_by(PAGE).chain(spots());
        touched.for_each(|at| memory.copy_out(at, &mut byte).unwrap());
        assert_eq!(byte, [7]);
        faults() - before
    };
    let (ready, cold) = (read(&populated), read(&plain));
    assert!(ready <= 2 && cold >= 32, "{ready} faults where it was populated, {cold} where not");

    // What is touched later is found later.
    owner.copy_in(0, &[7; PAGE]).unwrap();
    assert_eq!(whole(&populated), [false, true, false, false]);
    assert_eq!(held(), before + PAGE);
    owner.copy_in(0, &vec![7; STEP]).unwrap();
    assert_eq!(whole(&populated), [true, true, false, false]);
    assert!(populated.populate(5 * STEP, &mut Vec::new()).is_err());
}
