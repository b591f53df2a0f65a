//! What goes wrong on demand.

use super::over;
use crate::said::said_by;
use crate::{LEN, LIMIT, PAGE, Side, all_are, connected, devices, pair, wait};
use kvik_host::event::{Epoll, Events};
use kvik_host::verbs::{Event, Posted, RmaOp};

/// Posts so many writes of a page each.
fn write(a: &mut Side, b: &Side, count: u64) {
    let known = b.known.clone();
    for token in 0..count {
        assert_eq!(a.gather(RmaOp::Write, &known, token as usize * PAGE, PAGE, token), Posted::Yes);
    }
    a.queue.flush().unwrap();
}

fn results(side: &Side) -> Vec<bool> {
    side.ended().iter().map(|(_, result)| result.is_ok()).collect()
}

/// Both sides are taken down and connected anew, as kvik does after a failure.
fn again(a: Side, b: Side) -> (Side, Side) {
    let (one, other) = (a.device.clone(), b.device.clone());
    drop((a, b));
    connected(&(one, other), 16)
}

over! {
    fn the_nth_request_fails_with_its_status_and_the_rest_is_flushed(control) {
        let (mut a, b) = pair(16);
        control.say("fail device=0 nth=3 status=12");
        write(&mut a, &b, 5);
        a.until("drained", |side| side.queue.is_drained());
        assert_eq!(results(&a), [true, true, false, false, false]);
        assert!(a.ended()[2].1.clone().unwrap_err().to_string().contains("status 12"));
        assert!(a.ended()[3].1.clone().unwrap_err().is_flushed());
        let (mut a, b) = again(a, b);
        write(&mut a, &b, 5);
        a.until_ended(5);
        assert_eq!(results(&a), [true; 5]);
    }
    fn a_refused_post_fails_its_queue_pair(control) {
        let (mut a, b) = pair(16);
        control.say("again device=0 count=1");
        let known = b.known.clone();
        assert_eq!(a.gather(RmaOp::Write, &known, 0, PAGE, 0), Posted::Yes);
        let error = a.queue.flush().unwrap_err().to_string();
        assert!(error.contains("posting to a queue pair of device roce0"), "{error}");
        a.until("drained", |side| side.queue.is_drained());
        assert_eq!((results(&a), b.landed(1)), (vec![false], 0));
    }
    fn a_completion_that_is_lost_leaves_its_request_until_the_end(control) {
        let (mut a, b) = pair(16);
        control.say("lose device=0 count=1");
        write(&mut a, &b, 1);
        wait("the bytes", || b.landed(1) == PAGE && control.counts()["in_flight"] == 0);
        a.poll();
        assert!(a.ended().is_empty() && a.queue.in_flight() == 1);
        a.queue.fail().unwrap();
        a.until("drained", |side| side.queue.is_drained());
        assert_eq!(results(&a), [false]);
    }
    fn a_request_that_never_ends_goes_with_its_queue_pair(control) {
        let (mut a, b) = pair(16);
        control.say("stick device=0 count=1");
        write(&mut a, &b, 3);
        wait("it is begun", || control.counts()["stuck"] == 1);
        a.queue.fail().unwrap();
        a.until("drained", |side| side.queue.is_drained());
        assert_eq!((results(&a), b.landed(1)), (vec![false; 3], 0));
        assert_eq!(control.counts()["stuck"], 0);
    }
    fn late_bytes_land_only_through_a_queue_pair_that_is_open(control) {
        for ended in [false, true] {
            let (mut a, mut b) = pair(16);
            control.say("late device=0 count=1 status=12");
            write(&mut a, &b, 1);
            a.until("drained", |side| side.queue.is_drained());
            assert_eq!((results(&a), b.landed(1), control.counts()["late"]), (vec![false], 0, 1));
            // Who posted them has no power over them; the queue pair that they go to has.
            drop(a);
            if ended {
                b.queue.fail().unwrap();
            }
            control.say("land");
            assert_eq!(b.landed(1), if ended { 0 } else { PAGE });
        }
    }
    fn completions_that_cannot_be_read_are_an_error(control) {
        let (mut a, b) = pair(16);
        control.say("blind device=0");
        write(&mut a, &b, 1);
        let error = a.device.poll(&mut a.done).unwrap_err().to_string();
        assert!(error.contains("taking the completions of device roce0"), "{error}");
        control.say("clear");
        a.until_ended(1);
        assert_eq!(results(&a), [true]);
    }
    fn a_short_loss_of_the_link_is_made_good_and_a_long_one_is_an_error(control) {
        let (mut a, b) = pair(16);
        control.say("down device=1");
        write(&mut a, &b, 1);
        wait("the request", || control.counts()["begun"] == 1);
        control.say("up device=1");
        a.until_ended(1);
        assert_eq!(results(&a), [true]);
        control.say("down device=1");
        write(&mut a, &b, 1);
        a.until_ended(2);
        let error = a.ended()[1].1.clone().unwrap_err();
        assert!(error.to_string().contains("did not answer"), "{error}");
    }
    fn an_address_is_found_where_it_moved_to(control) {
        let (a, b) = pair(16);
        assert_eq!(a.queue.address().gid, a.device.gid().raw);
        // Each time, the table has another order.
        for _ in 0..3 {
            control.say("down");
            control.say("up");
            for side in [&a, &b] {
                let before = side.queue.address().lid;
                side.device.find_gid().unwrap();
                assert_eq!(side.queue.address().lid, before + 1, "the port has another LID, too");
            }
            let depth = 16;
            let (mut c, d) = connected(&(a.device.clone(), b.device.clone()), depth);
            write(&mut c, &d, 1);
            c.until_ended(1);
            assert_eq!((results(&c), d.landed(1)), (vec![true], PAGE));
        }
        // Where nobody looks, the index is another address's.
        control.say("down");
        control.say("up");
        let depth = 16;
        let sides = (Side::on(&a.device, 1, depth), Side::on(&b.device, 2, depth));
        let (mut c, mut d) = sides;
        let (to_c, to_d) = (c.queue.address().encode(), d.queue.address().encode());
        let refused = [crate::try_connect(&mut c, &to_d), crate::try_connect(&mut d, &to_c)];
        assert!(refused.iter().all(|error| error.as_ref().is_err_and(|error| error.contains("does not fit the port"))), "{refused:?}");
    }
    fn a_device_that_has_failed_says_so(control) {
        let (mut a, b) = pair(16);
        let epoll = Epoll::new().unwrap();
        a.device.watch_events(&epoll, 1).unwrap();
        control.say("fatal device=0");
        let (mut told, mut events) = (Vec::new(), Events::new(4));
        epoll.wait(&mut events, LIMIT).unwrap();
        a.device.events(&mut told).unwrap();
        assert!(matches!(told[..], [Event::DeviceFatal { .. }]), "{told:?}");
        write(&mut a, &b, 1);
        a.until_ended(1);
        assert_eq!(results(&a), [false]);
    }
    fn memory_that_the_device_does_not_give_up_is_lost_and_said_to_be(control) {
        let (a, _b) = pair(16);
        let Side { known, memory, .. } = a;
        control.say("keep count=1");
        let said = said_by(|| drop(known));
        let begin = "ERROR libibverbs: giving up memory with device roce0 port 1";
        assert!(said.len() == 1 && said[0].starts_with(begin), "{said:?}");
        assert!(said[0].ends_with("; 4194304 bytes of memory stay lost"), "{said:?}");
        assert_eq!(std::sync::Arc::strong_count(&memory), 2);
    }
    fn a_key_that_was_given_up_is_refused_and_the_owner_is_told(_control) {
        let (mut a, b) = pair(16);
        let old = (b.known.base(), b.known.rkey());
        let Side { known, memory, device, .. } = b;
        drop(known);
        let known = device.register(memory.clone()).unwrap();
        assert_ne!(known.rkey(), old.1);
        assert_eq!(a.gather_to(RmaOp::Write, old, 0, PAGE, 0), Posted::Yes);
        a.queue.flush().unwrap();
        a.until_ended(1);
        let error = a.ended()[0].1.clone().unwrap_err();
        assert!(error.to_string().contains("remote access error"), "{error}");
        let mut told = Vec::new();
        device.events(&mut told).unwrap();
        assert!(matches!(told[..], [Event::QueueFailed { .. }]), "{told:?}");
        let mut bytes = vec![0; LEN];
        memory.copy_out(0, &mut bytes).unwrap();
        assert!(all_are(&bytes, 2) && devices().0.port().device == "roce0");
    }
}
