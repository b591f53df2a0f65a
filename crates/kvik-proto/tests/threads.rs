//! The protocol under several threads, in every order of their locks that loom finds with a bounded number of
//! preemptions: a grant that is revoked, expires or loses its peer while others claim and report its work.
//!
//! `cargo test -p kvik-proto --features loom --test threads`. The code is the protocol's own; its locks are loom's.
#![cfg(feature = "loom")]

use kvik_core::{
    Class, Code, EngineId, Error, GrantId, GrantState, Incarnation, Layout, Order, RegionId, Right, Use, View,
};
use kvik_proto::{
    Batch, Check, Claim, Closed, Established, Event, Facts, Greeting, Handshake, Identity, Local, Node,
    Offer, Op, Open, Path, Protocol, Secret, Select, Side, Timing, WorkOutcome, WorkRequest,
};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;
use std::time::Duration;

const GRANT: GrantId = GrantId([7; 16]);
const NOW: Duration = Duration::from_secs(100);
const EXPIRY: Duration = Duration::from_secs(200);
const LATER: Duration = Duration::from_secs(201);
const SLOT: u32 = 1;
const PAGE: u64 = 1 << 20;

/// Every order of two threads with at most so many preemptions.
fn model(preemptions: usize, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(f);
}

fn identity(number: u8) -> Identity {
    Identity { engine: EngineId([number; 16]), incarnation: Incarnation(number.into()) }
}

fn local(number: u8) -> Local {
    Local { identity: identity(number), secret: Secret::new(None), facts: Facts::default() }
}

fn shake() -> (Established, Established) {
    let (mut left, mut to_right) = Handshake::open(local(1), [1; 32], Some(identity(2)));
    let (mut right, mut to_left) = (Handshake::listen(local(2), [2; 32]), Vec::new());
    let mut both = (None, None);
    while both.0.is_none() || both.1.is_none() {
        let taken = right.receive(&mut to_right, &mut to_left).unwrap();
        both.1 = both.1.or(taken.map(control));
        let taken = left.receive(&mut to_left, &mut to_right).unwrap();
        both.0 = both.0.or(taken.map(control));
    }
    (both.0.unwrap(), both.1.unwrap())
}

fn control(greeting: Greeting) -> Established {
    match greeting {
        Greeting::Control(established) => established,
        _ => panic!("another greeting"),
    }
}

fn view(pages: u32) -> View {
    let layout = std::sync::Arc::new(Layout::contiguous(pages, PAGE).unwrap());
    View::new(layout, (0..pages).collect::<Vec<_>>().into(), 0..1, 0..1, Order::PageFirst).unwrap()
}

fn open(op: Op, pages: u32) -> Open<u8> {
    let view = view(pages);
    let layout = view.layout().digest();
    Open {
        class: Class::Handover,
        grant: GRANT,
        layout,
        content: None,
        op,
        path: Path::Channels,
        sums: false,
        check: Check::No,
        confirm: true,
        readers: 1,
        deadline: LATER * 2,
        chunk: PAGE,
        side: Some(Side { region: 1, region_id: RegionId(1), view, fence: None }),
        select: Select::default(),
        extend: Duration::ZERO,
    }
}

/// The owner of a grant, with one session, and what its threads have seen.
struct Owner {
    protocol: Protocol<u8>,
    session: u64,
    /// The grant's fence is up.
    raised: AtomicBool,
    /// The pages were said to be the owner's again.
    free: AtomicBool,
    ended: AtomicUsize,
}

/// Bytes by which a peer asks to read the grant's page.
struct Asked(Vec<u8>);

impl Owner {
    /// And a peer that asks for so many pages.
    fn new(pages: u32) -> (Arc<Owner>, Asked) {
        let (theirs, ours) = shake();
        let session = ours.session;
        let owner = Arc::new(Owner {
            protocol: Protocol::new(identity(2), Timing::default()),
            session,
            raised: AtomicBool::new(false),
            free: AtomicBool::new(false),
            ended: AtomicUsize::new(0),
        });
        owner.call(NOW, |node| node.add_session(ours, NOW));
        let mut peer = Node::new(identity(1), Timing::default(), NOW);
        peer.add_session(theirs, NOW);
        peer.session(session).begin(open(Op::Read, pages), NOW).unwrap();
        let mut bytes = Vec::new();
        peer.session(session).take_output(&mut bytes);
        (owner, Asked(bytes))
    }

    /// With the grant, and the peer's request served.
    fn serving(pages: u32) -> Arc<Owner> {
        let (owner, asked) = Owner::new(pages);
        owner.grant(pages);
        owner.receive(&asked);
        owner
    }

    fn call<T>(&self, now: Duration, f: impl FnOnce(&mut Node<u8, &Protocol<u8>>) -> T) -> T {
        let mut node = Node::on(&self.protocol, now);
        let result = f(&mut node);
        while let Some(event) = node.next_event() {
            match event {
                Event::Raise(SLOT) => self.raised.store(true, Ordering::SeqCst),
                Event::GrantEnded(..) => {
                    assert!(self.raised.load(Ordering::SeqCst), "pages are free before their fence is up");
                    self.free.store(true, Ordering::SeqCst);
                    self.ended.fetch_add(1, Ordering::SeqCst);
                }
                _ => {}
            }
        }
        result
    }

    fn grant(&self, pages: u32) {
        let view = view(pages);
        let offer = Offer {
            region: 1,
            region_id: RegionId(1),
            view,
            content: None,
            right: Right::Read,
            uses: Use::Many,
            expires: EXPIRY,
            latest: EXPIRY,
            slot: SLOT,
            generation: 1,
            keys: std::sync::Arc::default(),
            ring: None,
            closed: Closed::default(),
        };
        self.call(NOW, |node| node.grants().give(GRANT, offer, NOW)).unwrap();
    }

    fn receive(&self, asked: &Asked) {
        self.call(NOW, |node| node.session(self.session).receive(&asked.0, NOW));
    }

    fn claim(&self, now: Duration) -> Option<WorkRequest<u8>> {
        self.call(now, |node| node.session(self.session).next_of(Path::Channels, Claim::Next, now))
    }

    /// Claims a piece of work, touches its memory, and reports it.
    fn work(&self, now: Duration) -> bool {
        let Some(request) = self.claim(now) else { return false };
        assert!(!self.free.load(Ordering::SeqCst), "work was given out for pages that are free");
        thread::yield_now();
        assert!(!self.free.load(Ordering::SeqCst), "pages are free while a work request touches them");
        self.call(now, |node| node.work_done(request.id, WorkOutcome::Void));
        true
    }

    /// The same with several pieces of work at once.
    fn work_on_several(&self) {
        let (most, mut given) = (Batch { requests: 4, bytes: u64::MAX }, Vec::new());
        self.call(NOW, |node| {
            node.session(self.session).next_batch(Path::Channels, Claim::Next, most, NOW, &mut given);
        });
        for request in &given {
            assert!(!self.free.load(Ordering::SeqCst), "pages are free while work requests touch them");
            // What must stop is not begun.
            if !request.stop.load(Ordering::Acquire) {
                thread::yield_now();
                assert!(!self.free.load(Ordering::SeqCst), "pages are free while work requests touch them");
            }
        }
        let mut ended = given.iter().map(|request| (request.id, WorkOutcome::Void)).collect();
        self.call(NOW, |node| node.batch_done(&mut ended));
    }

    fn revoke(&self) {
        self.call(NOW, |node| node.grants().end(GRANT, GrantState::Revoked));
    }

    /// Nothing is open, and the pages were given back once.
    fn is_over(&self) {
        assert_eq!(self.ended.load(Ordering::SeqCst), 1, "the grant's end was told once");
        self.call(NOW, |node| {
            assert_eq!((node.open_flows(), node.open_grants(), node.quarantined()), (0, 0, 0));
        });
        assert!(self.claim(NOW).is_none());
    }
}

/// Two threads over one owner.
fn both(owner: &Arc<Owner>, one: impl FnOnce(&Owner) + 'static, other: impl FnOnce(&Owner)) {
    let beside = thread::spawn({
        let owner = owner.clone();
        move || one(&owner)
    });
    other(owner);
    beside.join().unwrap();
}

#[test]
fn a_revoked_grant_is_free_once_when_its_work_has_ended() {
    model(3, || {
        let owner = Owner::serving(1);
        both(&owner, Owner::revoke, |owner| drop(owner.work(NOW)));
        owner.is_over();
    });
}

#[test]
fn a_revoked_grant_is_free_once_when_all_that_was_claimed_at_once_has_ended() {
    model(3, || {
        let owner = Owner::serving(3);
        both(&owner, Owner::revoke, Owner::work_on_several);
        owner.is_over();
    });
}

#[test]
fn a_grant_that_expires_under_a_claim_is_as_one_that_is_revoked() {
    model(3, || {
        let owner = Owner::serving(1);
        both(&owner, |owner| owner.call(LATER, |node| node.tick(LATER)), |owner| drop(owner.work(NOW)));
        owner.is_over();
    });
}

#[test]
fn nobody_claims_from_a_grant_whose_time_is_over() {
    model(3, || {
        let owner = Owner::serving(1);
        both(&owner, |owner| drop(owner.work(NOW)), |owner| assert!(!owner.work(LATER)));
        assert!(!owner.work(NOW));
        owner.is_over();
    });
}

#[test]
fn the_death_of_a_peer_beside_a_revocation_and_work_leaves_nothing_open() {
    model(2, || {
        let owner = Owner::serving(1);
        let dead = |owner: &Owner| {
            let error = Error::new(Code::PeerLost, "the peer is dead");
            owner.call(NOW, |node| node.session(owner.session).close(error));
            owner.work(NOW);
        };
        both(&owner, dead, Owner::revoke);
        owner.is_over();
    });
}

#[test]
fn a_request_that_comes_beside_a_revocation_is_refused_or_stopped() {
    model(3, || {
        let (owner, asked) = Owner::new(1);
        owner.grant(1);
        let request = move |owner: &Owner| {
            owner.receive(&asked);
            owner.work(NOW);
        };
        both(&owner, request, Owner::revoke);
        owner.is_over();
    });
}

#[test]
fn a_request_that_comes_with_its_grant_does_not_wait_for_it_in_vain() {
    model(3, || {
        let (owner, asked) = Owner::new(1);
        both(&owner, move |owner| owner.receive(&asked), |owner| owner.grant(1));
        assert!(owner.work(NOW), "the request waits for a grant that is there");
    });
}

#[test]
fn two_threads_that_copy_both_find_what_two_copies_leave() {
    model(3, || {
        let (owner, _) = Owner::new(1);
        owner.grant(1);
        for _ in 0..2 {
            let mut open = open(Op::Read, 1);
            let side = open.side.as_mut().unwrap();
            (side.region, side.region_id) = (2, RegionId(2));
            owner.call(NOW, |node| node.begin_own(open, NOW)).unwrap();
        }
        // Whoever finds nothing sleeps until something begins: one would do the work of two.
        let take =
            |owner: &Owner| assert!(owner.call(NOW, |node| node.next_copy(NOW)).is_some(), "nothing found");
        both(&owner, take, take);
    });
}

#[test]
fn a_copy_that_begins_while_another_is_taken_is_taken_next() {
    model(3, || {
        let (owner, _) = Owner::new(1);
        owner.grant(1);
        // Other memory: what is read does not lie where it is read from.
        let begin = |owner: &Owner| {
            let mut open = open(Op::Read, 1);
            let side = open.side.as_mut().unwrap();
            (side.region, side.region_id) = (2, RegionId(2));
            owner.call(NOW, |node| node.begin_own(open, NOW)).unwrap();
        };
        begin(&owner);
        let taken = Arc::new(AtomicUsize::new(0));
        let take = {
            let taken = taken.clone();
            move |owner: &Owner| {
                if owner.call(NOW, |node| node.next_copy(NOW)).is_some() {
                    taken.fetch_add(1, Ordering::SeqCst);
                }
            }
        };
        both(&owner, take.clone(), begin);
        while taken.load(Ordering::SeqCst) < 2 {
            let before = taken.load(Ordering::SeqCst);
            take(&owner);
            assert!(taken.load(Ordering::SeqCst) > before, "a copy is left, and no session has its turn");
        }
    });
}
