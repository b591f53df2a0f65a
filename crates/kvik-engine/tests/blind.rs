//! The control thread cannot wait any more: something in the process has closed the descriptor that it sleeps on. It is
//! about the descriptors of the whole process, so this process has no other test.

#[path = "engine/common.rs"]
#[allow(dead_code)]
mod common;
#[path = "../../../tests/common/sets.rs"]
mod sets;

use common::{PATIENCE, all, code, engine, many, pages, region, within};
use kvik_core::{Code, GrantState};
use kvik_engine::Preference;
use sets::{sets, take_away};
use std::os::fd::RawFd;
use std::time::Duration;

/// Longer than this test may take.
const LONG: Duration = Duration::from_secs(3600);

#[test]
fn an_engine_whose_control_thread_cannot_wait_closes_and_leaves_nobody_waiting() {
    let owner = engine(Preference::Tcp);
    let theirs = owner.grant(&all(&region(&owner, 1, 1)), many()).unwrap();
    let before = sets();
    let blind = engine(Preference::Tcp);
    let taken: Vec<RawFd> = sets().difference(&before).copied().collect();
    assert!(!taken.is_empty());
    let here = region(&blind, 2, 2);
    // Nobody but the control thread would ever end it.
    let granted = blind.grant(&pages(&here, &[0]), many()).unwrap();
    taken.into_iter().for_each(take_away);
    // A connection is wanted, which wakes the thread. It may fail sooner than the engine closes: nothing can be waited for.
    let read = || blind.read(&pages(&here, &[1]), theirs.ticket(), None, within(LONG));
    let failed = read().and_then(|transfer| transfer.wait(Some(PATIENCE)));
    assert_ne!(code(failed), Code::WaitTimeout);
    assert!(granted.wait(PATIENCE).is_some_and(|state| state != GrantState::Live));
    assert!(blind.is_closed());
    assert_eq!(code(read().map(|_| ())), Code::EngineClosed);
    blind.close(PATIENCE).unwrap();
}
