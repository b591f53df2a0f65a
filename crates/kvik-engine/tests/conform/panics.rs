//! A data thread panics: its channel is lost, and the session with it. The thread serves the next one.

use crate::common::*;
use crate::pair::{Kind, OPS, Op, Pair, whole};
use kvik_core::Code;

const PAGE: u64 = 64 << 10;

#[test]
fn a_data_thread_that_panics_ends_its_transfers_at_once_and_serves_the_next_session() {
    const TCP: &Kind = &Kind { transport: "tcp", mechanism: "channel", ..Kind::NEW };
    let pair = Pair::new(TCP);
    // More often than there are threads.
    for op in OPS.into_iter().cycle().take(6) {
        pair.pass();
        let (there, here) = pair.regions(64, PAGE);
        let grant = pair.grant(op, &whole(&there, PAGE));
        let sender = if op == Op::Read { &pair.theirs } else { &pair.ours };
        // What other channels send is not all before anybody has heard of it.
        sender.hold_from(sender.given());
        sender.panic_next();
        let transfer = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
        let over = |(name, count): &(&str, u64)| *name == "sessions_open" && *count == 0;
        wait_until("the session to end", || pair.other.stats().iter().any(over));
        sender.release();
        assert_eq!(code(transfer.wait(Some(PATIENCE))), Code::PeerLost, "{op:?}");
        grant.revoke(PATIENCE).unwrap();
        there.close(PATIENCE).unwrap();
        here.close(PATIENCE).unwrap();
    }
    pair.pass();
}
