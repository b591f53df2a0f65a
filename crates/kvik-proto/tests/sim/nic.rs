//! A NIC places the bytes: in pieces, in any order, after the grant was checked, while processes sleep, and from the
//! wire even after the initiator has died or has closed its endpoint. Only the target's own endpoint, closed, stops
//! them.

use crate::coverage::NIC;
use crate::memory::Mem;
use crate::world::World;
use kvik_core::{Code, Error};
use kvik_proto::{Nics, Op, Order, OrderKind, OrderOutcome, Source};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// In the initiator's queue.
    Queued,
    /// On the wire to the owner; with its bytes when it is a write.
    Out(Vec<u8>),
    /// On the wire back.
    Back(Vec<u8>),
    Done,
    Lost,
}

/// An operation of an initiator's NIC.
pub struct Post {
    pub engine: usize,
    pub link: usize,
    /// None once its process or its endpoint is gone.
    pub order: Option<Order<Mem>>,
    /// What is on the wire takes a detour, until the adversary relents.
    pub late: bool,
    op: Op,
    source: Arc<Source>,
    owner: Mem,
    pub pieces: Vec<(Range<u64>, Piece)>,
}

impl Post {
    /// Its process or endpoint is gone: what is on the wire stays there.
    pub fn orphan(&mut self) -> Option<Order<Mem>> {
        self.late = true;
        for (_, piece) in &mut self.pieces {
            if matches!(piece, Piece::Queued | Piece::Back(_)) {
                *piece = Piece::Lost;
            }
        }
        self.order.take()
    }

    pub fn moves(&self) -> bool {
        let waits = |piece: &Piece| matches!(piece, Piece::Queued | Piece::Out(_) | Piece::Back(_));
        let all_done = self.pieces.iter().all(|(_, piece)| *piece == Piece::Done);
        self.pieces.iter().any(|(_, piece)| waits(piece)) || (self.order.is_some() && all_done)
    }

    fn is_over(&self) -> bool {
        self.order.is_none() && !self.moves()
    }
}

impl World {
    pub fn start_post(&mut self, at: usize, side: usize) -> usize {
        let engine = self.links[at].ends[side];
        let now = self.engines[engine].now(self.now);
        let Some(session) = self.links[at].session else { return engine };
        let Some(order) = self.engines[engine].node.next_post(session, now) else { return engine };
        let OrderKind::Post(op, source) = &order.kind else { panic!("no post") };
        let (op, source) = (*op, source.clone());
        let begun = self.begun.binary_search_by_key(&order.region.lease, |begun| begun.lease);
        let ticket = &self.tickets[self.begun[begun.expect("a post without a transfer")].ticket];
        let owner = Mem { arena: ticket.arena.clone(), lease: ticket.lease };
        let exposed = self.links[at].processes[1 - side].arena(source.region);
        assert!(Rc::ptr_eq(&exposed, &owner.arena), "P5: another region was exposed than was granted");
        let third = (order.part.end - order.part.start).div_ceil(3);
        let cuts = order.part.clone().step_by(third as usize);
        let pieces = cuts.map(|from| (from..(from + third).min(order.part.end), Piece::Queued)).collect();
        self.posts.push(Post {
            engine,
            link: at,
            order: Some(order),
            late: false,
            op,
            source,
            owner,
            pieces,
        });
        engine
    }

    /// One piece of an operation moves on.
    pub fn move_post(&mut self, at: usize) -> usize {
        let engine = self.posts[at].engine;
        let waiting: Vec<usize> = self.posts[at].pieces.iter().enumerate().filter_map(waits).collect();
        if let Some(pick) = waiting.get(self.rng.below(waiting.len())) {
            self.move_piece(at, *pick);
        }
        let post = &mut self.posts[at];
        let count = |what: Piece| post.pieces.iter().filter(|(_, piece)| *piece == what).count();
        // One that gave up knows nothing of what is on the wire.
        let done = OrderOutcome::Done { extents: 1, verify: Duration::ZERO };
        let (order, outcome) = if count(Piece::Done) == post.pieces.len() {
            (post.order.take(), done)
        } else if count(Piece::Lost) > 0 && self.rng.once_in(3) {
            (post.orphan(), OrderOutcome::Failed(Error::new(Code::PeerLost, "the NIC gave up")))
        } else {
            (None, done)
        };
        if let Some(order) = order {
            self.engines[engine].node.order_done(order.id, outcome);
        }
        self.drop_posts();
        engine
    }

    fn move_piece(&mut self, at: usize, pick: usize) {
        let link = &self.links[self.posts[at].link];
        let owner_side = 1 - link.side(self.posts[at].engine);
        let stopped = link.fenced[owner_side] || link.gone[owner_side];
        let (state, faults) = (self.state_of(self.posts[at].link, owner_side), link.faults);
        let post = &mut self.posts[at];
        let (part, piece) = post.pieces[pick].clone();
        post.pieces[pick].1 = match (piece, post.op, &post.order) {
            (Piece::Queued, Op::Write, Some(order)) => Piece::Out(order.region.read(&order.view, part)),
            (Piece::Queued, _, Some(_)) => Piece::Out(Vec::new()),
            (Piece::Out(_), _, _) if stopped => Piece::Lost,
            (Piece::Out(bytes), Op::Write, _) => {
                self.coverage.hit(state, NIC, faults);
                post.owner.write(&post.source.view, part, &bytes);
                Piece::Done
            }
            (Piece::Out(_), _, order) => {
                self.coverage.hit(state, NIC, faults);
                let bytes = post.owner.read(&post.source.view, part);
                if order.is_some() { Piece::Back(bytes) } else { Piece::Lost }
            }
            (Piece::Back(bytes), _, Some(order)) => {
                order.region.write(&order.view, part, &bytes);
                Piece::Done
            }
            _ => Piece::Lost,
        };
    }

    /// An engine closes its endpoint of a session, and says so.
    pub fn fence(&mut self, at: usize) -> usize {
        let (engine, session) = self.fences.swap_remove(at);
        let link = self.by_session[&session];
        let side = self.links[link].side(engine);
        self.links[link].fenced[side] = true;
        let mut orders = Vec::new();
        for post in self.posts.iter_mut().filter(|post| post.engine == engine && post.link == link) {
            orders.extend(post.orphan());
        }
        for order in orders {
            let outcome = match self.rng.once_in(2) {
                true => OrderOutcome::Void,
                false => OrderOutcome::Failed(Error::new(Code::PeerLost, "flushed")),
            };
            self.engines[engine].node.order_done(order.id, outcome);
        }
        self.engines[engine].node.fenced(session);
        self.engines[engine].node.tell_nics(&Nics::default());
        self.drop_posts();
        engine
    }

    pub fn drop_posts(&mut self) {
        self.posts.retain(|post| !post.is_over());
    }
}

fn waits((at, (_, piece)): (usize, &(Range<u64>, Piece))) -> Option<usize> {
    matches!(piece, Piece::Queued | Piece::Out(_) | Piece::Back(_)).then_some(at)
}
