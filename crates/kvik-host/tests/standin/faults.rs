//! What goes wrong on demand, and what closing stops.

use crate::said::said_by;
use crate::side::{LEN, Side, nics, pair, post_all, rma, until, wait};
use crate::standin::Control;
use crate::{DEVICE, alone};
use kvik_host::Memory;
use kvik_host::fabric::{Endpoint, Posted, RmaOp, Slot};
use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::Arc;

alone!(the_nth_operation_fails_with_its_reason, [DEVICE], |mut control| {
    let (mut a, b, slot) = pair(&nics()[0], 64);
    control.say("fail device=0 nth=3 status=13");
    for token in 0..5 {
        post_all(&mut a, &b.known, slot, RmaOp::Write, [(0, 4096, token)]);
        until(&mut a, token as usize + 1);
    }
    let failed: Vec<u64> = a.done.iter().filter(|done| done.result.is_err()).map(|done| done.token).collect();
    assert_eq!(failed, [2]);
    let error = a.done[2].result.clone().unwrap_err();
    assert_eq!(error.number, libc::EHOSTUNREACH);
    assert!(error.text.contains("does not answer") && error.text.contains("rdmap0s0-rdm"), "{error}");
    assert_eq!(control.counts()["failed"], 1);
});

alone!(
    operations_fail_at_random_and_the_rest_is_whole,
    [DEVICE, ("KVIK_STANDIN_SEED", "3")],
    |mut control| {
        let (mut a, b, slot) = pair(&nics()[0], 64);
        control.say("fail one_in=4");
        post_all(&mut a, &b.known, slot, RmaOp::Write, (0..64).map(|n| (n << 14, 1 << 14, n as u64)));
        until(&mut a, 64);
        let failed = a.done.iter().filter(|done| done.result.is_err()).count();
        assert!((1..64).contains(&failed), "{failed}");
        let bytes = b.bytes();
        for done in a.done.iter().filter(|done| done.result.is_ok()) {
            let at = (done.token as usize) << 14;
            assert!(bytes[at..at + (1 << 14)].iter().all(|byte| *byte == 1), "operation {}", done.token);
        }
        control.say("clear");
        a.done.clear();
        post_all(&mut a, &b.known, slot, RmaOp::Write, (0..64).map(|n| (n << 14, 1 << 14, n as u64)));
        until(&mut a, 64);
        assert!(a.done.iter().all(|done| done.result.is_ok()));
    }
);

alone!(wrong_keys_rights_ranges_and_addresses_are_errors_of_their_operations, [DEVICE], |_| {
    let (mut a, mut b, slot) = pair(&nics()[0], 64);
    let hidden = b.device.register(b.memory.clone(), false).unwrap();
    let (here, there) = (a.known.clone(), b.known.clone());
    let order = rma(RmaOp::Write, (&here, &there), slot, (0, 4096, 0));
    let mut wrong = [order; 5];
    wrong[0].key ^= 0x5A5A;
    wrong[1].key |= 1 << 40;
    wrong[2].key = hidden.key();
    wrong[3].remote += LEN as u64 - 100;
    // An endpoint that was closed, whose place another one may have now.
    let old = b.endpoint.address().unwrap();
    b.endpoint = Endpoint::open(&b.device, 64).unwrap();
    wrong[4].peer = a.endpoint.add_peer(&old).unwrap();
    let now = a.endpoint.add_peer(&b.endpoint.address().unwrap()).unwrap();
    for (number, order) in wrong.iter_mut().enumerate() {
        order.peer = if number < 4 { now } else { order.peer };
        assert_eq!(a.endpoint.post(order).unwrap(), Posted::Yes);
        until(&mut a, number + 1);
        let error = a.done[number].result.clone().unwrap_err().to_string();
        let word = if number < 4 { "key, range or right" } else { "no endpoint has this address" };
        assert!(error.contains(word), "{number}: {error}");
    }
    assert_eq!(b.landed(2), LEN);
    let mut zero = [0; 32];
    assert!(a.endpoint.add_peer(&zero).is_err());
    zero[0] = 0xFE;
    a.endpoint.add_peer(&zero).unwrap();
});

alone!(memory_that_may_only_be_read_is_a_source_and_no_peer_writes_it, [DEVICE], |_| {
    let (mut a, mut b, slot) = pair(&nics()[0], 64);
    let bytes = NonNull::from(Box::leak(vec![3u8; LEN].into_boxed_slice())).cast();
    // SAFETY: bytes that stay where they are until the process ends, and that nothing else uses.
    let source = Arc::new(unsafe { Memory::foreign_read_only(bytes, LEN, Box::new(())) });
    let known = b.device.register(source.clone(), true).unwrap();
    post_all(&mut a, &known, slot, RmaOp::Read, [(0, LEN, 0)]);
    until(&mut a, 1);
    assert!(a.done[0].result.is_ok() && a.landed(3) == LEN, "{:?}", a.done);
    // Its owner's NIC may send it, too.
    a.memory.copy_in(0, &vec![1; LEN]).unwrap();
    let back = b.endpoint.add_peer(&a.endpoint.address().unwrap()).unwrap();
    let there = a.known.clone();
    assert_eq!(
        b.endpoint.post(&rma(RmaOp::Write, (&known, &there), back, (0, LEN, 0))).unwrap(),
        Posted::Yes
    );
    until(&mut b, 1);
    assert!(b.done[0].result.is_ok() && a.landed(3) == LEN, "{:?}", b.done);
    a.memory.copy_in(0, &vec![1; LEN]).unwrap();
    post_all(&mut a, &known, slot, RmaOp::Write, [(0, LEN, 1)]);
    until(&mut a, 2);
    let mut found = vec![0; LEN];
    source.copy_out(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 3), "a peer has written it");
    assert_eq!(a.done[1].result.clone().unwrap_err().number, libc::EACCES);
});

alone!(memory_that_the_nic_does_not_give_up_is_lost_and_said_to_be, [DEVICE], |mut control| {
    let (a, _b, _) = pair(&nics()[0], 16);
    let Side { known, memory, .. } = a;
    control.say("keep count=1");
    let said = said_by(|| drop(known));
    assert!(said.len() == 1 && said[0].starts_with("ERROR libfabric: giving up memory"), "{said:?}");
    assert!(said[0].ends_with("; 1048576 bytes of memory stay lost"), "{said:?}");
    assert_eq!(Arc::strong_count(&memory), 2);
});

alone!(a_full_queue_takes_more_when_completions_are_taken, [DEVICE, ("KVIK_STANDIN_DEPTH", "4096")], |_| {
    let (mut a, b, slot) = pair(&nics()[0], 4096);
    let (here, there) = (a.known.clone(), b.known.clone());
    let part = |n: usize| (n << 8, 1 << 8, n as u64);
    post_all(&mut a, &there, slot, RmaOp::Write, (0..4096).map(part));
    let order = rma(RmaOp::Write, (&here, &there), slot, part(0));
    assert_eq!(a.endpoint.post(&order).unwrap(), Posted::Full);
    until(&mut a, 1);
    assert_eq!(a.endpoint.post(&order).unwrap(), Posted::Yes);
    until(&mut a, 4097);
});

alone!(a_storm_of_refusals_passes, [DEVICE], |mut control| {
    let (mut a, b, slot) = pair(&nics()[0], 64);
    control.say("again device=0 count=100");
    let (here, there) = (a.known.clone(), b.known.clone());
    let order = rma(RmaOp::Write, (&here, &there), slot, (0, 4096, 9));
    for _ in 0..100 {
        assert_eq!(a.endpoint.post(&order).unwrap(), Posted::Full);
    }
    assert_eq!((a.endpoint.post(&order).unwrap(), a.endpoint.in_flight()), (Posted::Yes, 1));
    until(&mut a, 1);
});

alone!(a_slot_is_used_again_at_once, [DEVICE], |_| {
    let (mut a, b, slot) = pair(&nics()[0], 64);
    let mut c = Side::new(&nics()[0], 3, 64);
    a.endpoint.remove_peer(slot).unwrap();
    assert!(a.endpoint.remove_peer(slot).is_err());
    assert_eq!(a.endpoint.add_peer(&c.endpoint.address().unwrap()).unwrap(), slot);
    // The old peer's key is not the new one's.
    post_all(&mut a, &b.known, slot, RmaOp::Write, [(0, 4096, 0)]);
    post_all(&mut a, &c.known, slot, RmaOp::Write, [(8192, 4096, 1)]);
    until(&mut a, 2);
    a.done.sort_by_key(|done| done.token);
    assert!(a.done[0].result.is_err() && a.done[1].result.is_ok(), "{:?}", a.done);
    assert_eq!((b.landed(1), c.landed(1)), (0, 4096));
});

// As two sessions with one peer do, of which one ends first.
alone!(a_peer_that_was_added_twice_is_known_until_it_was_removed_twice, [DEVICE], |mut control| {
    let (mut a, mut b, slot) = pair(&nics()[0], 64);
    let mut c = Side::new(&nics()[0], 3, 64);
    assert_eq!(a.endpoint.add_peer(&b.endpoint.address().unwrap()).unwrap(), slot);
    // Also with operations on their way.
    post_all(&mut a, &b.known, slot, RmaOp::Write, [(0, 4096, 0)]);
    a.endpoint.remove_peer(slot).unwrap();
    let other = a.endpoint.add_peer(&c.endpoint.address().unwrap()).unwrap();
    assert_ne!(other, slot, "nobody else has its slot");
    post_all(&mut a, &b.known, slot, RmaOp::Write, [(8192, 4096, 1)]);
    until(&mut a, 2);
    assert!(a.done.iter().all(|done| done.result.is_ok()) && b.landed(1) == 8192, "{:?}", a.done);
    a.endpoint.remove_peer(slot).unwrap();
    assert!(a.endpoint.remove_peer(slot).is_err());
    a.endpoint.remove_peer(other).unwrap();
    assert_eq!(control.counts()["slots"], 0);
});

/// Each piece of 8 KiB waits: a whole operation takes seconds.
const SLOWLY: &str = "delay micros=20000";

alone!(closing_the_endpoint_that_is_reached_is_a_fence, [DEVICE], |mut control| {
    let (mut a, mut b, slot) = pair(&nics()[0], 64);
    control.say(SLOWLY);
    post_all(&mut a, &b.known, slot, RmaOp::Write, [(0, LEN, 0)]);
    wait("the first piece", || b.landed(1) > 0);
    b.endpoint = Endpoint::open(&b.device, 64).unwrap();
    let bytes = b.bytes();
    control.say("clear");
    until(&mut a, 1);
    let error = a.done[0].result.clone().unwrap_err().to_string();
    assert!(error.contains("closed"), "{error}");
    assert!(b.bytes() == bytes && b.landed(1) < LEN);
});

alone!(closing_the_endpoint_that_posts_is_a_fence, [DEVICE], |mut control| {
    for op in [RmaOp::Read, RmaOp::Write] {
        let (mut a, b, slot) = pair(&nics()[1], 64);
        control.say(SLOWLY);
        post_all(&mut a, &b.known, slot, op, [(0, LEN, 0)]);
        let landed = |a: &Side| if op == RmaOp::Read { a.landed(2) } else { b.landed(1) };
        wait("the first piece", || landed(&a) > 0);
        a.endpoint = Endpoint::open(&a.device, 64).unwrap();
        let (before, dropped) = (landed(&a), control.counts()["dropped"]);
        // A whole other operation goes its way, and more of the first one does not.
        control.say("clear");
        let (mut c, d, slot) = pair(&nics()[1], 64);
        post_all(&mut c, &d.known, slot, op, [(0, LEN, 0)]);
        until(&mut c, 1);
        assert!(landed(&a) == before && before < LEN && dropped > 0, "{op:?}");
    }
});

alone!(closing_a_registration_is_no_fence, [DEVICE], |mut control| {
    let (mut a, b, slot) = pair(&nics()[0], 64);
    control.say(SLOWLY);
    let Side { known, memory, endpoint, device, .. } = b;
    post_all(&mut a, &known, slot, RmaOp::Write, [(0, LEN, 0)]);
    let landed = || {
        let mut bytes = vec![0; LEN];
        memory.copy_out(0, &mut bytes).unwrap();
        bytes.iter().filter(|byte| **byte == 1).count()
    };
    wait("the first piece", || landed() > 0);
    let order = rma(RmaOp::Write, (&a.known.clone(), &known), slot, (0, 4096, 1)).key;
    drop(known);
    let before = landed();
    control.say("clear");
    until(&mut a, 1);
    assert!(a.done[0].result.is_ok() && before < LEN && landed() == LEN);
    // What begins later is refused.
    let again = device.register(memory.clone(), true).unwrap();
    let here = a.known.clone();
    let late =
        kvik_host::fabric::Rma { key: order, ..rma(RmaOp::Write, (&here, &again), slot, (0, 4096, 1)) };
    assert_eq!(a.endpoint.post(&late).unwrap(), Posted::Yes);
    until(&mut a, 2);
    assert!(a.done[1].result.is_err() && again.key() != order);
    drop(endpoint);
});

alone!(a_device_goes_down_and_comes_back, [DEVICE], |mut control| {
    let (mut a, b, slot) = pair(&nics()[0], 64);
    let (mut c, d, other) = pair(&nics()[1], 64);
    control.say(SLOWLY);
    post_all(&mut a, &b.known, slot, RmaOp::Write, (0..4).map(|n| (0, LEN, n)));
    control.say("down device=0");
    until(&mut a, 4);
    assert!(
        a.done.iter().all(|done| done.result.clone().unwrap_err().number == libc::ENETDOWN),
        "{:?}",
        a.done
    );
    let (here, there) = (a.known.clone(), b.known.clone());
    let order = rma(RmaOp::Write, (&here, &there), slot, (0, 4096, 4));
    let refused = a.endpoint.post(&order).unwrap_err().to_string();
    assert!(refused.contains("Network is down"), "{refused}");
    assert_eq!(a.endpoint.in_flight(), 0);
    // The other one goes on.
    control.say("delay micros=0");
    post_all(&mut c, &d.known, other, RmaOp::Write, [(0, LEN, 0)]);
    until(&mut c, 1);
    assert!(c.done[0].result.is_ok());
    control.say("up device=0");
    assert_eq!(a.endpoint.post(&order).unwrap(), Posted::Yes);
    until(&mut a, 5);
    assert!(a.done[4].result.is_ok());
});

alone!(an_operation_that_never_ends_goes_with_its_endpoint, [DEVICE], |mut control| {
    let (mut a, b, slot) = pair(&nics()[0], 64);
    control.say("stick device=0 count=1");
    post_all(&mut a, &b.known, slot, RmaOp::Write, [(0, 4096, 0)]);
    wait("it is begun", || control.counts()["stuck"] == 1);
    post_all(&mut a, &b.known, slot, RmaOp::Write, [(8192, 4096, 1)]);
    until(&mut a, 1);
    assert_eq!((a.tokens(), a.endpoint.in_flight()), (vec![1], 1));
    a.endpoint = Endpoint::open(&a.device, 64).unwrap();
    let counts = control.counts();
    assert_eq!((counts["stuck"], counts["in_flight"], b.landed(1)), (0, 0, 4096), "{counts:?}");
});

/// Two writes fail whose bytes are on the wire, and a read between them does not.
fn fail_late(control: &mut Control, a: &mut Side, b: &Side, slot: Slot) {
    control.say("late device=0 count=2 status=13");
    post_all(a, &b.known, slot, RmaOp::Write, [(0, 8192, 0)]);
    post_all(a, &b.known, slot, RmaOp::Read, [(8192, 4096, 2)]);
    post_all(a, &b.known, slot, RmaOp::Write, [(LEN - 8192, 8192, 1)]);
    until(a, 3);
    let failed = a.done.drain(..).filter(|done| done.result.is_err());
    assert_eq!(failed.map(|done| done.token).collect::<BTreeSet<_>>(), [0, 1].into());
    assert_eq!((b.landed(1), control.counts()["late"]), (0, 2));
}

alone!(late_bytes_land_on_command_and_only_in_an_endpoint_that_is_open, [DEVICE], |mut control| {
    let (mut a, mut b, slot) = pair(&nics()[0], 64);
    // Who posted them has no power over them.
    fail_late(&mut control, &mut a, &b, slot);
    a.endpoint = Endpoint::open(&a.device, 64).unwrap();
    let slot = a.endpoint.add_peer(&b.endpoint.address().unwrap()).unwrap();
    let whole = b.bytes();
    control.say("land device=1");
    assert!(b.bytes() == whole);
    control.say("land");
    assert_eq!((b.landed(1), control.counts()["landed"]), (2 * 8192, 2));
    // The endpoint that they go to has.
    b.memory.copy_in(0, &whole).unwrap();
    fail_late(&mut control, &mut a, &b, slot);
    b.endpoint = Endpoint::open(&b.device, 64).unwrap();
    control.say("land");
    let counts = control.counts();
    assert_eq!((b.landed(1), counts["late"], counts["landed"]), (0, 0, 2));
});

alone!(completions_that_cannot_be_read_are_an_error_of_their_devices_queues, [DEVICE], |mut control| {
    let nics = nics();
    let (mut a, b, slot) = pair(&nics[0], 64);
    let (mut c, d, other) = pair(&nics[1], 64);
    control.say("blind device=0");
    post_all(&mut a, &b.known, slot, RmaOp::Write, [(0, 4096, 0)]);
    let error = a.endpoint.poll(&mut a.done).unwrap_err();
    assert_eq!(error.number, libc::EIO, "{error}");
    post_all(&mut c, &d.known, other, RmaOp::Write, [(0, 4096, 0)]);
    until(&mut c, 1);
    control.say("clear");
    until(&mut a, 1);
    assert!(a.done[0].result.is_ok());
});

alone!(a_failure_of_which_there_is_no_word_is_an_error_of_the_queue, [DEVICE], |mut control| {
    let (mut a, _, _) = pair(&nics()[0], 64);
    // A library's own threads may be at the queue, too.
    control.say("mute count=3");
    a.endpoint.poll(&mut a.done).unwrap();
    control.say("mute count=1000000000");
    let error = a.endpoint.poll(&mut a.done).unwrap_err();
    assert_eq!((error.number, a.done.len()), (libc::EAGAIN, 0), "{error}");
    control.say("clear");
    a.endpoint.poll(&mut a.done).unwrap();
});

alone!(two_devices_reach_each_other, [], |_| {
    let nics = nics();
    let (mut a, mut b) = (Side::new(&nics[0], 1, 64), Side::new(&nics[1], 2, 64));
    let slot = a.endpoint.add_peer(&b.endpoint.address().unwrap()).unwrap();
    post_all(&mut a, &b.known, slot, RmaOp::Write, [(0, LEN, 0)]);
    until(&mut a, 1);
    assert!(a.done[0].result.is_ok() && b.landed(1) == LEN);
});
