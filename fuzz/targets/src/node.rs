//! A whole node, fed as an engine feeds it: frames and chunks of an admitted peer who means no good, time, and its
//! own transfers and grants between them.
//!
//! At the end the connection is cut and every work request given back. Then every transfer that this side began has
//! been reported once, every grant is its owner's again, and nothing waits.

use crate::feed;
use crate::greetings::{identity, shaken};
use arbitrary::Unstructured;
use kvik_core::{
    Class, Code, Content, ContentClaim, Error, GrantId, GrantState, Layout, Order as Sort, RegionId, Right,
    Use, View,
};
use kvik_proto::{
    Check, ChunkHeader, Claim, Event, FlowKey, Frame, Node, OWN_SESSION, Offer, Op, Open, Path, Ring, Select,
    Side, Timing, WorkKind, WorkOutcome, WorkRequest,
};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// No input makes one node do more.
const STEPS: usize = 200;
/// What may be held because of one peer: frames in and out, and page lists.
const MOST_HELD: u64 = 96 << 20;

struct World {
    node: Node<u8>,
    session: u64,
    now: Duration,
    /// Work requests whose memory is in use.
    requests: Vec<WorkRequest<u8>>,
    begun: HashSet<FlowKey>,
    ended: HashSet<GrantId>,
    given: Vec<feed::Fit>,
    view: View,
    ring: Arc<Ring<u8>>,
}

/// Raw bytes for a session, or steps.
pub fn node(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    let mut world = World::new();
    match mode % 2 {
        0 => {
            for piece in data.chunks(usize::from(mode / 2).max(1)).take(STEPS) {
                world.node.session(world.session).receive(piece, world.now);
                world.look();
            }
        }
        _ => {
            let mut u = Unstructured::new(data);
            for _ in 0..STEPS {
                if u.is_empty() || world.step(&mut u).is_err() {
                    break;
                }
                world.look();
            }
        }
    }
    world.end();
}

impl World {
    fn new() -> World {
        let (_, mut established) = shaken(None);
        established.one_sided = true;
        let (session, now) = (established.session, Duration::from_secs(1000));
        let mut node = Node::new(identity(2), Timing::default(), now);
        node.add_session(established, now);
        let layout = Arc::new(Layout::contiguous(16, 8192).expect("a layout"));
        let view = View::new(layout, (0..16).collect(), 0..1, 0..1, Sort::LayerFirst).expect("a view");
        let mut world = World {
            node,
            session,
            now,
            requests: Vec::new(),
            begun: HashSet::new(),
            ended: HashSet::new(),
            given: Vec::new(),
            view,
            ring: Ring::new(9, Arc::default(), 3, 8192),
        };
        world.give(0, Right::Read, Use::Once(2));
        world.give(1, Right::Write, Use::Many);
        world
    }

    fn give(&mut self, number: u8, right: Right, uses: Use) {
        let id = GrantId([number; 16]);
        // Every other one says what it holds.
        let pages = self.view.pages().len();
        let content =
            Content::new(&vec![number; pages * 32], b"all").ok().filter(|_| number.is_multiple_of(2));
        let offer = Offer {
            region: number,
            region_id: RegionId(number.into()),
            view: self.view.clone(),
            content: content.clone(),
            right,
            uses,
            expires: self.now + Duration::from_secs(20),
            latest: self.now + Duration::from_secs(60),
            slot: number.into(),
            generation: 1,
            keys: Default::default(),
            ring: number.is_multiple_of(3).then(|| self.ring.clone()),
            closed: Default::default(),
        };
        if self.node.grants().give(id, offer, self.now).is_ok() {
            let claim = content.and_then(|content| content.claim(pages - 1));
            self.given.push((id, self.view.layout().digest(), self.view.shape(), claim));
        }
    }

    /// What is claimed of a grant: that of one of those here, or nothing.
    fn claim(&self, u: &mut Unstructured) -> arbitrary::Result<Option<ContentClaim>> {
        let claims: Vec<_> = self.given.iter().map(|fit| fit.3).chain([None]).collect();
        u.choose(&claims).copied()
    }

    fn step(&mut self, u: &mut Unstructured) -> arbitrary::Result<()> {
        match u.int_in_range(0u8..=15)? {
            0..=5 => {
                let mut bytes = Vec::new();
                feed::frame(u, &self.given)?.encode(&mut bytes);
                if u.ratio(1, 8)? {
                    let at = u.int_in_range(0..=bytes.len() - 1)?;
                    bytes[at] ^= u.arbitrary::<u8>()?;
                }
                self.node.session(self.session).receive(&bytes, self.now);
            }
            6 | 7 => {
                let header = ChunkHeader {
                    session: if u.ratio(15, 16)? { self.session } else { u.arbitrary()? },
                    transfer: u.int_in_range(0..=64)?,
                    position: u64::from(u.int_in_range(0..=40u32)?) * 4096 + u64::from(u.ratio(1, 16)?),
                    len: 4096 * u.int_in_range(0..=3)?,
                    sums: u.int_in_range(0..=3)?,
                };
                if let Ok(request) = self.node.session(self.session).place(&header, self.now) {
                    self.requests.extend(request);
                }
            }
            8 => {
                let path = if u.arbitrary()? { Path::Channels } else { Path::OneSided };
                self.requests.extend(self.node.session(self.session).next_of(path, Claim::Next, self.now));
            }
            9 => self.requests.extend(self.node.next_copy(self.now)),
            10 | 11 if !self.requests.is_empty() => {
                let request = self.requests.swap_remove(u.choose_index(self.requests.len())?);
                let outcome = match u.int_in_range(0u8..=7)? {
                    0 => WorkOutcome::Void,
                    1 => WorkOutcome::Failed(Error::new(Code::ChecksumMismatch, "a bit")),
                    _ if matches!(request.kind, WorkKind::Sum) => {
                        let units = (request.part.end - request.part.start).div_ceil(request.unit);
                        let sums = vec![u.int_in_range(0..=1)?; units as usize];
                        WorkOutcome::Summed { sums, verify: Duration::ZERO }
                    }
                    _ => WorkOutcome::Done { extents: 1, verify: Duration::ZERO },
                };
                self.node.work_done(request.id, outcome);
            }
            12 => {
                self.now += Duration::from_millis(feed::number(u)?.min(30_000));
                self.node.tick(self.now);
            }
            13 => self.begin(u)?,
            14 => {
                let id = GrantId([u.int_in_range(0..=3)?; 16]);
                match u.arbitrary()? {
                    true => self.node.grants().end(id, GrantState::Revoked),
                    false => drop(self.node.grants().extend(id, Duration::from_secs(5), self.now)),
                }
            }
            _ => self.give(u.int_in_range(2..=3)?, Right::Read, Use::Once(1)),
        }
        Ok(())
    }

    /// A transfer of this side, with the peer or with itself.
    fn begin(&mut self, u: &mut Unstructured) -> arbitrary::Result<()> {
        let op = *u.choose(&[Op::Read, Op::Write, Op::Confirm, Op::Extend])?;
        let path = *u.choose(&[Path::Channels, Path::Memory, Path::OneSided])?;
        let moves = matches!(op, Op::Read | Op::Write);
        let side = moves.then(|| Side {
            region: 9,
            region_id: RegionId(9),
            view: self.view.clone(),
            fence: Some((9, 1)),
        });
        let open = Open {
            grant: GrantId([u.int_in_range(0..=3)?; 16]),
            layout: self.view.layout().digest(),
            content: self.claim(u)?,
            op,
            class: Class::ALL[usize::from(u.ratio(1, 3)?)],
            path,
            sums: u.arbitrary()?,
            check: *u.choose(&[Check::No, Check::Sample, Check::All])?,
            confirm: u.arbitrary()?,
            readers: 1,
            deadline: self.now + Duration::from_secs(5),
            chunk: 8192,
            side,
            select: Select::default(),
            extend: Duration::from_secs(1),
        };
        let begun = match u.ratio(3, 4)? {
            true => self.node.session(self.session).begin(open, self.now),
            false => self.node.begin_own(open, self.now),
        };
        if let Ok(key) = begun {
            assert!(self.begun.insert(key), "two transfers have one number");
        }
        Ok(())
    }

    /// Takes what came of it.
    fn look(&mut self) {
        while let Some(event) = self.node.next_event() {
            match event {
                Event::Finished(finished) => {
                    assert!(
                        self.begun.remove(&finished.key),
                        "{:?} ended twice or never began",
                        finished.key
                    );
                    if finished.key.0 == OWN_SESSION && finished.outcome.is_ok() {
                        continue;
                    }
                }
                Event::GrantEnded(id, _) => assert!(self.ended.insert(id), "grant {id} ended twice"),
                _ => {}
            }
        }
        let held = self.node.held_for(self.session);
        assert!(held <= MOST_HELD, "{held} bytes are held for one peer");
        let mut output = Vec::new();
        self.node.session(self.session).take_output(&mut output);
        let mut at = 0;
        while let Some((_, len)) = Frame::decode(&output[at..]).expect("a node sends whole frames") {
            at += len;
        }
        assert_eq!(at, output.len());
        self.node.take_unsent(&mut Vec::new());
    }

    fn end(mut self) {
        self.node.session(self.session).close(Error::new(Code::PeerLost, "cut"));
        for (id, ..) in std::mem::take(&mut self.given) {
            self.node.grants().end(id, GrantState::Revoked);
        }
        // Transfers within the engine know no connection: they end by their deadline.
        self.now += Duration::from_secs(100_000);
        self.node.tick(self.now);
        self.look();
        for request in std::mem::take(&mut self.requests) {
            assert!(
                request.stop.load(std::sync::atomic::Ordering::Acquire),
                "a work request was not told to stop"
            );
            self.node.work_done(request.id, WorkOutcome::Void);
        }
        // The peer's NIC is cut off last.
        self.node.session(self.session).fenced();
        self.look();
        assert_eq!(self.ring.free(), 3, "slots of a ring never came back");
        assert!(self.begun.is_empty(), "transfers never ended: {:?}", self.begun);
        assert!(self.node.is_quiet() && self.node.quarantined() == 0 && self.node.open_grants() == 0);
        assert_eq!(self.node.held_for(self.session), 0);
    }
}
