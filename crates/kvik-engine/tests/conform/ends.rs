//! Ends in the middle: whatever ends a transfer, it has ended only when nobody here touches its memory any more.
//!
//! "In the middle" is held: one part is through, and the threads that write the destination are stuck with the next
//! ones in flight. That is the worst moment for every end, and the same one for every transport.

use crate::common::*;
use crate::faulty::End;
use crate::pair::{Kind, Memories, OPS, Op, Pair, foreign, gpu, metric, options, whole};
use kvik_core::{Code, GrantState};
use kvik_engine::{Grant, GrantOptions, PageSet, Region, Transfer, Verify};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PAGES: u32 = 128;
const PAGE: u64 = 64 << 10;
const SHORT: Duration = Duration::from_millis(80);
/// As [`SHORT`], over NICs: what one has in flight is cut a quarter of a second after the end of its transfer, and up to
/// three looks come before that, on a busy machine, too.
const SHORT_OF_NICS: Duration = Duration::from_millis(25);

/// How long a check looks whether something ends too early.
fn short(kind: &Kind) -> Duration {
    if kind.one_sided() { SHORT_OF_NICS } else { SHORT }
}

/// An owner cuts off whoever has its pages in flight over NICs this long after the end of the transfer, or later.
const CUT: Duration = Duration::from_millis(250);

/// Over NICs, a look at the owner's pages that is over so late says nothing: they may be free.
fn too_late(kind: &Kind, ended: Instant) -> bool {
    kind.one_sided() && ended.elapsed() >= CUT
}

/// Each way, until every look came in time: `check` gives false where one came [`too_late`].
fn looks_in_time(kind: &'static Kind, check: fn(&Pair, Op) -> bool) {
    let pair = Pair::new(kind);
    for op in OPS {
        assert!((0..5).any(|_| check(&pair, op)), "{op:?}: the pages were free before each look");
    }
}

/// A transfer of 8 MiB of which one part is through, while the writing threads are stuck.
struct Middle {
    there: Region,
    here: Region,
    theirs: PageSet,
    grant: Grant,
    transfer: Transfer,
}

impl Middle {
    fn reach(pair: &Pair, op: Op, deadline: Duration) -> Middle {
        Middle::with(pair, op, deadline, options(op))
    }

    fn with(pair: &Pair, op: Op, deadline: Duration, options: GrantOptions) -> Middle {
        Middle::begin(pair, op, deadline, options).expect("nothing was ever in flight")
    }

    /// None where the transfer ended before a thread was stuck with a part of it.
    fn begin(pair: &Pair, op: Op, deadline: Duration, options: GrantOptions) -> Option<Middle> {
        let (there, here) = pair.regions(PAGES, PAGE);
        let (theirs, mine) = (whole(&there, PAGE), whole(&here, PAGE));
        let grant = pair.owner.grant(&theirs, options).unwrap();
        pair.mover(op).hold_from(pair.mover(op).given() + 1);
        let transfer = pair.begin(op, &mine, &grant, deadline);
        wait_until("a part in flight", || pair.mover(op).wait_held(1, SHORT) || transfer.is_done());
        if transfer.is_done() {
            pair.mover(op).release();
            return None;
        }
        Some(Middle { there, here, theirs, grant, transfer })
    }

    fn destination(&self, op: Op) -> &Region {
        if op == Op::Read { &self.here } else { &self.there }
    }

    /// It was cut off before anybody looked: threads go on, and nothing of it is left.
    fn let_go(&self, pair: &Pair, op: Op) -> bool {
        pair.mover(op).release();
        drop(self.transfer.wait(Some(PATIENCE)));
        wait_until("no pages in quarantine", || quarantined(pair) == 0.0);
        false
    }

    /// Threads go on, and what moves afterwards writes nothing of this transfer.
    fn release_and_check(&self, pair: &Pair, op: Op, expected: &[Code]) {
        // Whoever began it waits for its own stuck thread, and for nobody else's.
        let pinned = op == Op::Read || pair.kind.own() || pair.kind.one_sided();
        if pinned {
            assert_eq!(
                code(self.transfer.wait(Some(short(pair.kind)))),
                Code::WaitTimeout,
                "{op:?}: ended while in flight"
            );
        }
        pair.mover(op).release();
        let error = self.transfer.wait(Some(PATIENCE)).unwrap_err();
        assert!(expected.contains(&error.code), "{op:?}: {error}");
        if op == Op::Write {
            // The owner's pages are its own when the grant has ended.
            self.grant.revoke(PATIENCE).unwrap();
        }
        let seen = self.destination(op);
        if seen.is_closed() {
            return pair.pass();
        }
        blank(seen, 0xEE);
        pair.pass();
        assert!(bytes(seen).iter().all(|byte| *byte == 0xEE), "{op:?}: memory was written after the end");
    }
}

pub fn a_cancelled_transfer_waits_for_the_work_in_flight(kind: &'static Kind) {
    let pair = Pair::new(kind);
    for op in OPS {
        let middle = Middle::reach(&pair, op, PATIENCE);
        middle.transfer.cancel();
        middle.release_and_check(&pair, op, &[Code::Cancelled]);
        // Nothing of it is left that a region would have to wait for.
        middle.here.close(PATIENCE).unwrap();
    }
}

pub fn a_deadline_ends_what_makes_no_progress(kind: &'static Kind) {
    let pair = Pair::new(kind);
    // What the first transfer takes to open is not what this is about.
    pair.pass();
    for op in OPS {
        let (middle, deadline) = in_time(Duration::from_millis(400), |deadline| {
            Some((Middle::begin(&pair, op, deadline, options(op))?, deadline))
        });
        std::thread::sleep(deadline + Duration::from_millis(50));
        middle.release_and_check(&pair, op, &[Code::DeadlineExceeded]);
        in_time(Duration::from_millis(700), |deadline| lost(kind, op, deadline));
    }
}

/// A work request that is lost: nobody ever says that it failed. None where the deadline came before it.
fn lost(kind: &'static Kind, op: Op, deadline: Duration) -> Option<()> {
    let pair = Pair::new(kind);
    let (there, here) = pair.regions(PAGES, PAGE);
    let grant = pair.grant(op, &whole(&there, PAGE));
    pair.mover(op).end_at(2, End::Lost);
    let (began, busy) = (Instant::now(), watch::start());
    let lost = pair.begin(op, &whole(&here, PAGE), &grant, deadline);
    assert_eq!(code(lost.wait(Some(PATIENCE))), Code::DeadlineExceeded);
    let (took, most) = (began.elapsed(), busy.elapsed());
    assert!(took >= deadline && most < deadline + Duration::from_millis(1800), "{took:?}");
    (pair.mover(op).ended() > 2).then(|| pair.pass())
}

pub fn revoking_waits_for_whoever_writes_or_says_who_it_is(kind: &'static Kind) {
    looks_in_time(kind, revoked);
}

fn revoked(pair: &Pair, op: Op) -> bool {
    let (kind, middle) = (pair.kind, Middle::reach(pair, op, PATIENCE));
    // A stuck reader elsewhere does not keep an owner from its pages; a stuck thread of its own does, and so does
    // a NIC elsewhere whose engine has not answered.
    let held = op == Op::Write || kind.own() || kind.one_sided();
    let (ended, began) = (Instant::now(), watch::start());
    let revoked = middle.grant.revoke(if held { short(kind) } else { PATIENCE });
    assert!(began.elapsed() < Duration::from_secs(2), "{op:?}: {:?}", began.elapsed());
    if held {
        let looks = (quarantined(pair), middle.grant.state(), middle.grant.wait(short(kind)));
        if looks.2.is_some() && too_late(kind, ended) {
            return middle.let_go(pair, op);
        }
        says_who(pair, &middle, revoked.unwrap_err());
        assert_eq!(looks, (f64::from(PAGES), GrantState::Live, None));
        middle.release_and_check(pair, op, &[Code::GrantRevoked]);
        assert_eq!(middle.grant.wait(PATIENCE), Some(GrantState::Revoked));
    } else {
        revoked.unwrap();
        assert_eq!(middle.grant.state(), GrantState::Revoked);
        middle.release_and_check(pair, op, &[Code::GrantRevoked, Code::StaleGeneration]);
    }
    assert_eq!(quarantined(pair), 0.0);
    true
}

fn quarantined(pair: &Pair) -> f64 {
    metric(&pair.owner, "kvik_quarantined_pages")
}

/// The error names pages and holder.
fn says_who(pair: &Pair, middle: &Middle, error: kvik_core::Error) {
    assert_eq!(error.code, Code::PagesQuarantined, "{error}");
    let holder = if pair.kind.own() { "this engine".into() } else { pair.other.id().to_string() };
    assert!(error.text.contains(&holder), "{error} does not name {holder}");
    assert!(error.text.contains(&format!("pages 0-{}", PAGES - 1)), "{error}");
    assert!(error.text.contains(&middle.grant.id().to_string()), "{error}");
}

pub fn expiry_in_the_middle_ends_the_transfer(kind: &'static Kind) {
    let pair = Pair::new(kind);
    for op in OPS {
        assert!((0..5).any(|_| expires_in_the_middle(&pair, op)), "{op:?}: pages were called free each time");
    }
}

/// False where a NIC's connection may have been cut before this process looked: pages are free then.
fn expires_in_the_middle(pair: &Pair, op: Op) -> bool {
    let quarantined = || quarantined(pair) > 0.0;
    // On a busy machine a short one passes before anything has moved.
    let middle = [600, 2400, 9600].into_iter().find_map(|expiry| {
        wait_until("no pages in quarantine", || !quarantined());
        let brief = GrantOptions { expiry: Duration::from_millis(expiry), ..options(op) };
        Middle::begin(pair, op, PATIENCE, brief)
    });
    let middle = middle.expect("nothing was ever in flight");
    if op == Op::Write || pair.kind.own() {
        wait_until("the expiry", || quarantined() || middle.grant.state() != GrantState::Live);
        let state = middle.grant.state();
        if pair.kind.one_sided() && state == GrantState::Expired {
            pair.mover(op).release();
            return false;
        }
        assert_eq!(state, GrantState::Live, "pages were called free");
    } else {
        assert_eq!(middle.grant.wait(PATIENCE), Some(GrantState::Expired));
    }
    middle.release_and_check(pair, op, &[Code::GrantExpired, Code::StaleGeneration]);
    assert_eq!(middle.grant.wait(PATIENCE), Some(GrantState::Expired));
    true
}

pub fn closing_a_region_in_the_middle_says_who_holds_it(kind: &'static Kind) {
    looks_in_time(kind, closed);
}

fn closed(pair: &Pair, op: Op) -> bool {
    let (kind, middle) = (pair.kind, Middle::reach(pair, op, PATIENCE));
    // The initiator's region: its own transfer is its own affair, and it stays open.
    let error = middle.here.close(SHORT).unwrap_err();
    assert_eq!(error.code, Code::RegionBusy, "{error}");
    assert!(error.text.contains(&pair.owner.id().to_string()), "{error}");
    assert!(!middle.here.is_closed());
    let held = op == Op::Write || kind.own() || kind.one_sided();
    let ended = Instant::now();
    let closed = middle.there.close(if held { short(kind) } else { PATIENCE });
    if kind.own() {
        assert!([Code::RegionBusy, Code::PagesQuarantined].contains(&code(closed)));
    } else if held {
        let pages = quarantined(pair);
        if (closed.is_ok() || pages == 0.0) && too_late(kind, ended) {
            return middle.let_go(pair, op);
        }
        says_who(pair, &middle, closed.unwrap_err());
        assert_eq!(pages, f64::from(PAGES));
        assert!(middle.there.is_closed(), "peers do not open it again");
        assert_eq!(code(pair.owner.grant(&middle.theirs, options(op)).map(drop)), Code::RegionClosed);
    } else {
        closed.unwrap();
    }
    middle.release_and_check(pair, op, &[Code::RegionClosed, Code::StaleGeneration]);
    middle.there.close(PATIENCE).unwrap();
    middle.here.close(PATIENCE).unwrap();
    assert_eq!(quarantined(pair), 0.0);
    true
}

pub fn closing_an_engine_is_bounded_and_says_what_it_left(kind: &'static Kind) {
    for op in OPS {
        let pair = Pair::new(kind);
        let middle = Middle::reach(&pair, op, PATIENCE);
        let here = op == Op::Read || kind.one_sided();
        let mover = if here { &pair.other } else { &pair.owner };
        let began = watch::start();
        let error = mover.close(Duration::from_millis(700)).unwrap_err();
        let took = began.elapsed();
        assert!(took < Duration::from_secs(3), "{op:?}: {took:?}");
        assert_eq!(error.code, Code::PagesQuarantined, "{error}");
        if here || kind.own() {
            assert!(!middle.transfer.is_done(), "{op:?}: ended while a thread has it in flight");
        }
        pair.mover(op).release();
        let ended = middle.transfer.wait(Some(PATIENCE)).unwrap_err();
        assert!([Code::EngineClosed, Code::RegionClosed, Code::PeerLost].contains(&ended.code), "{ended}");
        // With the thread gone on, everything is let go of.
        middle.here.close(PATIENCE).unwrap();
        middle.there.close(PATIENCE).unwrap();
        assert!(middle.grant.wait(PATIENCE).is_some());
    }
}

#[test]
fn closing_an_engine_again_waits_for_the_same_end() {
    static TCP: Kind = Kind { transport: "tcp", mechanism: "channel", ..Kind::NEW };
    let pair = Pair::new(&TCP);
    let middle = Middle::reach(&pair, Op::Read, PATIENCE);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| pair.other.close(PATIENCE));
        wait_until("somebody to close it", || pair.other.is_closed());
        let meanwhile = pair.other.close(Duration::ZERO);
        let unfinished = !middle.transfer.is_done();
        pair.mover(Op::Read).release();
        assert_eq!(code(meanwhile), Code::PagesQuarantined);
        assert!(unfinished, "it ended while a thread has it in flight");
        pair.other.close(PATIENCE).unwrap();
        assert!(middle.transfer.is_done());
        first.join().unwrap().unwrap();
    });
}

pub fn a_grant_that_ended_before_serves_nothing(kind: &'static Kind) {
    let pair = Pair::new(kind);
    for op in OPS {
        let (there, here) = pair.regions(4, 16 << 10);
        let grant = pair.grant(op, &whole(&there, 16 << 10));
        grant.revoke(PATIENCE).unwrap();
        let before = (bytes(&there), bytes(&here));
        let late = pair.begin(op, &whole(&here, 16 << 10), &grant, PATIENCE).wait(Some(PATIENCE));
        assert_eq!(code(late), Code::GrantRevoked);
        assert!((bytes(&there), bytes(&here)) == before, "{op:?}: something moved");
    }
}

pub fn a_failed_work_request_fails_its_transfer_alone(kind: &'static Kind) {
    let pair = Pair::new(kind);
    for op in OPS {
        let (there, here) = pair.regions(PAGES, PAGE);
        let grant = pair.grant(op, &whole(&there, PAGE));
        let fresh = Pair::new(kind);
        drop((grant, there, here));
        let (there, here) = fresh.regions(PAGES, PAGE);
        let grant = fresh.grant(op, &whole(&there, PAGE));
        fresh.mover(op).end_at(1, End::Failed);
        let failed = fresh.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
        assert_eq!(code(failed.wait(Some(PATIENCE))), Code::ChecksumMismatch);
        // The grant and the session are as good as before.
        let again = fresh.run(op, &whole(&here, PAGE), &grant, Verify::Full).unwrap();
        assert_eq!(again.bytes, u64::from(PAGES) * PAGE);
        assert!(bytes(&there) == bytes(&here));
    }
    pair.pass();
}

pub fn a_lost_channel_ends_its_transfers_and_the_next_one_works(kind: &'static Kind) {
    // Within an engine there is none.
    if kind.own() {
        return;
    }
    for op in OPS {
        let pair = Pair::new(kind);
        let (there, here) = pair.regions(PAGES, PAGE);
        let grant = pair.grant(op, &whole(&there, PAGE));
        pair.mover(op).lose_channel_at(2);
        let lost = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
        assert_eq!(code(lost.wait(Some(PATIENCE))), Code::PeerLost);
        blank(if op == Op::Read { &here } else { &there }, 0);
        pair.run(op, &whole(&here, PAGE), &grant, Verify::Full).unwrap();
        assert!(bytes(&there) == bytes(&here), "{op:?}");
    }
}

pub fn memory_is_let_go_of_before_the_end_is_told(kind: &'static Kind) {
    let pair = Pair::new(kind);
    let (there, back) = pair.regions(16, PAGE);
    for round in 0..40 {
        let op = OPS[round % 2];
        let gone = Arc::new(AtomicBool::new(false));
        let flag = OnDrop(gone.clone());
        let here = match kind.memory {
            Memories::Foreign => {
                let memory = foreign(16 * PAGE, |buffer| Box::new((buffer, flag)));
                pair.other.register(memory).unwrap()
            }
            Memories::Shared => pair.other.allocate(16 * PAGE).unwrap(),
            Memories::Gpu => pair.other.register(gpu(16 * PAGE, Box::new(flag))).unwrap(),
        };
        let grant = pair.grant(op, &whole(&there, PAGE));
        let transfer = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
        if round % 3 == 2 {
            transfer.cancel();
        }
        drop(transfer.wait(Some(PATIENCE)));
        // Nothing is waited for: whatever is still held now would be held while its owner uses it.
        here.close(Duration::ZERO).unwrap();
        assert!(kind.memory == Memories::Shared || gone.load(Ordering::SeqCst), "round {round}: still held");
    }
    drop(back);
}

/// Regions come and go while they are shown to a peer on this host and while the engine is asked what it
/// holds: nothing of that keeps memory that no transfer uses.
pub fn a_region_that_nobody_uses_closes_at_once(kind: &'static Kind) {
    let pair = Pair::new(kind);
    pair.pass();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                assert!(metric(&pair.other, "kvik_regions") >= 0.0);
            }
        });
        let closed = (0..300).try_for_each(|_| pair.other.allocate(PAGE).unwrap().close(Duration::ZERO));
        over.store(true, Ordering::SeqCst);
        asking.join().unwrap();
        closed.unwrap();
    });
}

struct OnDrop(Arc<AtomicBool>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
