//! The fence table: generations, slots, forged tables, forked children, and the check around a copy.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvik_host::{FenceTable, ForkGuard, HostError, HugePages, Memory, PeerFence, PeerMemory};
use rustix::fs::{MemfdFlags, SealFlags};

mod common;

fn peer_of(table: &FenceTable) -> PeerFence {
    PeerFence::map(table.fd().try_clone_to_owned().unwrap()).unwrap()
}

#[test]
fn a_peer_sees_every_raise() {
    let table = FenceTable::new(8).unwrap();
    let peer = peer_of(&table);
    assert_eq!((table.slots(), peer.slots()), (8, 8));
    let slot = table.slot().unwrap();
    for _ in 0..3 {
        let before = peer.generation(slot.index()).unwrap();
        let raised = slot.raise().unwrap();
        assert_eq!(raised, before + 1);
        assert_eq!(peer.generation(slot.index()).unwrap(), raised);
        assert_eq!(table.generation(slot.index()).unwrap(), raised);
        assert_eq!(slot.generation().unwrap(), raised);
    }
}

#[test]
fn a_slot_comes_back_only_with_a_higher_generation() {
    let table = FenceTable::new(3).unwrap();
    let peer = peer_of(&table);
    let mut seen = std::collections::HashSet::new();
    for _ in 0..10 {
        let held: Vec<_> = (0..3).map(|_| table.slot().unwrap()).collect();
        assert!(matches!(table.slot(), Err(HostError::FenceFull { slots: 3 })));
        for slot in &held {
            assert!(seen.insert((slot.index(), peer.generation(slot.index()).unwrap())), "used twice");
        }
    }
    assert_eq!(seen.len(), 30);
}

#[test]
fn slots_outside_the_table_are_refused() {
    let table = FenceTable::new(4).unwrap();
    let peer = peer_of(&table);
    for slot in [4, 5, u32::MAX] {
        assert!(matches!(peer.generation(slot), Err(HostError::NoSuchSlot { slots: 4, .. })));
        assert!(matches!(table.generation(slot), Err(HostError::NoSuchSlot { .. })));
        assert!(matches!(table.raise(slot), Err(HostError::NoSuchSlot { .. })));
    }
    for slots in [0, kvik_host::fence::MAX_SLOTS + 1] {
        assert!(matches!(FenceTable::new(slots), Err(HostError::InvalidArgument(_))));
    }
}

#[test]
fn forged_tables_are_refused() {
    let all = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let forge = |len: u64, seals: SealFlags| -> OwnedFd {
        let fd = rustix::fs::memfd_create("forged", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    assert!(PeerFence::map(forge(64, all)).is_ok());
    for len in [0, 7, 65, (u64::from(kvik_host::fence::MAX_SLOTS) + 1) * 8, 1 << 50] {
        assert!(matches!(PeerFence::map(forge(len, all)), Err(HostError::SizeMismatch { .. })), "{len}");
    }
    let shrinkable = forge(64, all - SealFlags::SHRINK);
    assert!(matches!(PeerFence::map(shrinkable), Err(HostError::SealMissing { .. })));
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    assert!(matches!(PeerFence::map(null), Err(HostError::NotMemfd(_))));
}

#[test]
fn a_forked_child_reads_but_never_raises() {
    let table = FenceTable::new(4).unwrap();
    let slot = table.slot().unwrap();
    let generation = slot.raise().unwrap();
    let index = slot.index();
    let mut held = Some(slot);
    let peer = peer_of(&table);
    let child_was_well = common::in_forked_child(|| {
        let slot = held.take().unwrap();
        let reads = peer.generation(index).unwrap() == generation && slot.generation().unwrap() == generation;
        let refused = matches!(slot.raise(), Err(HostError::Forked { .. }))
            && matches!(table.raise(index), Err(HostError::Forked { .. }))
            && matches!(table.slot(), Err(HostError::Forked { .. }));
        drop(slot);
        // A table of the child's own works.
        let own = FenceTable::new(1).unwrap();
        reads && refused && own.slot().unwrap().raise().is_ok()
    });
    assert!(child_was_well);
    assert_eq!(table.generation(index).unwrap(), generation, "the child raised its parent's generation");
    assert_eq!(held.take().unwrap().raise().unwrap(), generation + 1);
}

#[test]
fn a_guard_knows_children_and_grandchildren() {
    let guard = ForkGuard::new().unwrap();
    assert!(!guard.is_child());
    assert!(common::in_forked_child(|| {
        let own = ForkGuard::new().unwrap();
        guard.is_child() && !own.is_child() && common::in_forked_child(|| guard.is_child() && own.is_child())
    }));
    assert!(!guard.is_child());
}

#[test]
fn a_raise_between_the_checks_throws_the_copy_away() {
    let table = FenceTable::new(1).unwrap();
    let peer = peer_of(&table);
    let slot = table.slot().unwrap();
    let granted = slot.generation().unwrap();
    assert_eq!(peer.generation(slot.index()).unwrap(), granted);
    slot.raise().unwrap();
    assert_ne!(peer.generation(slot.index()).unwrap(), granted);
}

/// The owner fills a page with its generation, over and over; whatever a reader accepts is of one generation.
#[test]
fn an_accepted_copy_is_never_torn() {
    const ROUNDS: u64 = 20_000;
    const WORDS: usize = 512;
    let table = FenceTable::new(1).unwrap();
    let page = Memory::shared(WORDS * 8, HugePages::Never).unwrap();
    let (fence, view) =
        (peer_of(&table), PeerMemory::map(page.fd().unwrap().try_clone_to_owned().unwrap(), WORDS * 8));
    let view = view.unwrap();
    let granted = Arc::new(AtomicU64::new(0));
    let done = Arc::new(AtomicBool::new(false));
    let (announce, finished) = (Arc::clone(&granted), Arc::clone(&done));

    let owner = std::thread::spawn(move || {
        let slot = table.slot().unwrap();
        for round in 0..ROUNDS {
            let generation = slot.raise().unwrap();
            let bytes: Vec<u8> = generation.to_ne_bytes().repeat(WORDS);
            page.copy_in(0, &bytes).unwrap();
            announce.store(generation, Ordering::Release);
            // Some grants end at once, some live long enough to be read.
            (0..round % 4 * 200).for_each(|_| std::hint::spin_loop());
        }
        finished.store(true, Ordering::Release);
        slot
    });

    let (mut accepted, mut stale) = (0u64, 0u64);
    let mut copy = vec![0u8; WORDS * 8];
    loop {
        // Read before the attempt: once the owner is done, one more attempt must succeed.
        let last = done.load(Ordering::Acquire);
        let generation = granted.load(Ordering::Acquire);
        let fresh = fence.generation(0).unwrap() == generation && {
            view.copy_out(0, &mut copy).unwrap();
            fence.generation(0).unwrap() == generation
        };
        if fresh {
            accepted += 1;
            assert!(
                copy.chunks_exact(8).all(|word| word == generation.to_ne_bytes()),
                "torn at {generation}"
            );
        } else {
            stale += 1;
        }
        if last {
            assert!(fresh, "nothing changes any more");
            break;
        }
    }
    let slot = owner.join().unwrap();
    assert_eq!(slot.generation().unwrap(), ROUNDS);
    println!("{accepted} copies accepted, {stale} thrown away");
}
