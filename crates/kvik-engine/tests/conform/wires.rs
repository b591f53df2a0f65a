//! What a wire does to bytes: whatever it is, no transfer succeeds with wrong bytes, and the next one works.

use crate::common::*;
use crate::pair::{Kind, Op, Pair, whole};
use crate::wire::Harm;
use kvik_core::Code;
use kvik_engine::Verify;
use std::time::Duration;

const KIND: &Kind = &Kind { transport: "tcp", mechanism: "channel", wire: true, ..Kind::NEW };
const PAGES: u32 = 128;
const PAGE: u64 = 64 << 10;

/// Reads with this harm done at a byte of a data channel: the error that it ended with, and what to go on with.
fn harmed(harm: Harm, at: u64, deadline: Duration) -> (Pair, Option<kvik_core::Error>) {
    in_time(deadline, |deadline| harmed_within(harm, at, deadline))
}

/// None where the deadline came before the byte.
fn harmed_within(harm: Harm, at: u64, deadline: Duration) -> Option<(Pair, Option<kvik_core::Error>)> {
    let pair = Pair::new(KIND);
    let (there, here) = pair.regions(PAGES, PAGE);
    let grant = pair.grant(Op::Read, &whole(&there, PAGE));
    let wire = pair.wire.as_ref().unwrap();
    wire.harm(harm, at);
    let began = watch::start();
    let ended = pair.begin(Op::Read, &whole(&here, PAGE), &grant, deadline).wait(Some(deadline + PATIENCE));
    assert!(began.elapsed() < deadline + Duration::from_secs(1), "{harm:?} at {at}: {:?}", began.elapsed());
    let overdue = ended.as_ref().is_err_and(|error| error.code == Code::DeadlineExceeded);
    if wire.harmed() == 0 && overdue {
        return None;
    }
    assert_eq!(wire.harmed(), 1, "{harm:?} at {at}: nothing was harmed");
    assert!(
        ended.is_err() || bytes(&there) == bytes(&here),
        "{harm:?} at {at}: wrong bytes were let through"
    );
    Some((pair, ended.err()))
}

#[test]
fn a_flipped_bit_is_found_and_its_page_and_peer_are_named() {
    let mut random = Random::new();
    for _ in 0..6 {
        // Inside the payload of the channel's first chunk.
        let (pair, error) = harmed(Harm::Flip, 4096 + u64::from(random.below(300_000)), PATIENCE);
        let error = error.expect("a bit was flipped");
        assert_eq!(error.code, Code::ChecksumMismatch, "{error}");
        assert!(error.text.contains("page ") && error.text.contains(&pair.owner.id().to_string()), "{error}");
        pair.pass();
    }
}

#[test]
fn nothing_that_happens_to_a_channel_lets_wrong_bytes_through() {
    let mut random = Random::new();
    for harm in [Harm::Flip, Harm::Truncate, Harm::Repeat, Harm::Skip] {
        for _ in 0..6 {
            let at = 64 + u64::from(random.below(1 << 20));
            let (pair, error) = harmed(harm, at, Duration::from_secs(4));
            println!("{harm:?} at {at}: {error:?}");
            let known = [Code::ChecksumMismatch, Code::ProtocolError, Code::PeerLost, Code::DeadlineExceeded];
            assert!(error.as_ref().is_none_or(|error| known.contains(&error.code)), "{error:?}");
            // A channel that still waits for bytes that never come is no part of what follows.
            if error.is_none_or(|error| error.code != Code::DeadlineExceeded) {
                pair.pass();
            }
        }
    }
}

#[test]
fn bytes_too_many_cut_their_channel_and_the_next_transfer_works() {
    // Inside the payload of the channel's first chunk: what is taken for its trailer is none.
    let (pair, error) = harmed(Harm::Repeat, 200_000, PATIENCE);
    assert_eq!(error.map(|error| error.code), Some(Code::ProtocolError));
    pair.pass();
}

#[test]
fn a_channel_that_stalls_ends_its_transfer_by_the_deadline() {
    let (pair, error) = harmed(Harm::Stall, 200_000, Duration::from_secs(1));
    assert_eq!(error.map(|error| error.code), Some(Code::DeadlineExceeded));
    // The session is alive all the while, and other work goes on: nothing is left in flight.
    let (_, here) = pair.regions(1, PAGE);
    here.close(PATIENCE).unwrap();
}

#[test]
fn a_chunk_that_comes_twice_cuts_its_session_and_the_next_one_works() {
    const PLAIN: &Kind = &Kind { wire: false, ..*KIND };
    let pair = Pair::new(PLAIN);
    for op in crate::pair::OPS {
        let (there, here) = pair.regions(PAGES, PAGE);
        let grant = pair.grant(op, &whole(&there, PAGE));
        pair.mover(op).repeat_at(pair.mover(op).given() + 1);
        let twice = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
        let refused = code(twice.wait(Some(PATIENCE)));
        assert!([Code::ProtocolError, Code::PeerLost].contains(&refused), "{op:?}: {refused:?}");
        pair.run(op, &whole(&here, PAGE), &grant, Verify::Full).unwrap();
        assert!(bytes(&there) == bytes(&here));
    }
}
