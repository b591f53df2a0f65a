//! The control thread cannot wait any more: something in the process has closed the descriptor that it sleeps on. It is
//! about the descriptors of the whole process, so this process has no other test.

#[path = "engine/common.rs"]
#[allow(dead_code)]
mod common;

use common::{PATIENCE, all, code, engine, many, region, within};
use kvik_core::{Code, Ticket};
use kvik_engine::Preference;
use kvik_host::event::EventFd;
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Longer than this test may take.
const LONG: Duration = Duration::from_secs(3600);

/// The sets that threads of this process sleep on.
fn sets() -> BTreeSet<RawFd> {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let sets = descriptors.filter(|path| {
        std::fs::read_link(path).is_ok_and(|what| what.as_os_str() == "anon_inode:[eventpoll]")
    });
    sets.map(|path| path.file_name().unwrap().to_str().unwrap().parse().unwrap()).collect()
}

/// Puts something else in the place of a set; who waits on it notices when it waits again.
fn take_away(set: RawFd) {
    // SAFETY: it is open, and not closed by this value.
    let mut taken = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(set) });
    rustix::io::dup2(EventFd::new().unwrap(), &mut taken).unwrap();
}

#[test]
fn an_engine_whose_control_thread_cannot_wait_closes_and_leaves_nobody_waiting() {
    let owner = engine(Preference::Tcp);
    let there = region(&owner, 1, 1);
    let grant = owner.grant(&all(&there), many()).unwrap();
    // The kernel accepts for it, and nobody answers: only the control thread would end what waits for that.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let ticket = Ticket { addresses: vec![silent.local_addr().unwrap()], ..grant.ticket().clone() };
    let before = sets();
    let reader = engine(Preference::Tcp);
    let here = region(&reader, 1, 2);
    let taken: Vec<RawFd> = sets().difference(&before).copied().collect();
    assert!(!taken.is_empty());
    taken.into_iter().for_each(take_away);
    // It wakes the thread.
    let transfer = reader.read(&all(&here), &ticket, None, within(LONG)).unwrap();
    assert_eq!(code(transfer.wait(Some(PATIENCE))), Code::EngineClosed);
    assert!(reader.is_closed());
    assert_eq!(code(reader.read(&all(&here), &ticket, None, within(LONG)).map(|_| ())), Code::EngineClosed);
    reader.close(PATIENCE).unwrap();
}
