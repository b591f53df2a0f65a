//! Who wants the promises to be broken.

use crate::channels::pick;
use crate::coverage::Fault;
use crate::engine::ms;
use crate::nic::{Piece, Post};
use crate::world::World;
use kvik_proto::Nics;

impl World {
    /// Does one bad thing, if it finds somewhere to do it.
    pub fn injure(&mut self) -> bool {
        let engine = self.rng.below(self.engines.len());
        match self.rng.below(24) {
            0..2 => self.on_link(Fault::Delay, |link, _| link.stalled = true),
            2 => self.on_link(Fault::Drop, |link, side| link.lost[side] = true),
            3 => self.double(),
            4 => self.truncate(),
            5 => self.corrupt(),
            6 => self.part(engine),
            7..9 => self.crash(engine),
            9 => self.cut(),
            10 => self.spare(),
            11..13 => self.flip(engine, Fault::Hold),
            13 => self.flip(engine, Fault::Suspend),
            14 => self.shift_clock(engine),
            15 => self.lose_piece(),
            16 => {
                self.fences_hang = true;
                true
            }
            17 => self.say_goodbye(engine),
            18 => self.double_piece(),
            20 => self.some_link().is_some_and(|at| self.break_channel(at)),
            21..23 => self.with_two(World::misjoin),
            23 => self.with_two(World::misplace),
            _ => self.corrupt(),
        }
    }

    fn some_link(&mut self) -> Option<usize> {
        // Old ones are dead.
        let recent = self.links.len().min(6);
        let at = self.links.len() - recent + self.rng.below(recent);
        (recent > 0).then_some(at)
    }

    fn with_two(&mut self, act: impl FnOnce(&mut World, usize, usize) -> bool) -> bool {
        let (one, other) = (self.some_link(), self.some_link());
        one.zip(other).is_some_and(|(one, other)| act(self, one, other))
    }

    fn on_link(&mut self, fault: Fault, strike: impl FnOnce(&mut crate::link::Link, usize)) -> bool {
        let Some(at) = self.some_link() else { return false };
        let side = self.rng.below(2);
        strike(&mut self.links[at], side);
        self.links[at].faults |= fault.bit();
        self.busy.insert(at);
        true
    }

    /// What was stalled goes on, and who slept or held wakes up.
    pub fn relent(&mut self) {
        let engine = self.rng.below(self.engines.len());
        if let Some(at) = self.some_link() {
            self.links[at].stalled = false;
            self.busy.insert(at);
        }
        self.fences_hang &= !self.rng.once_in(3);
        if self.rng.once_in(4) {
            self.posts.iter_mut().for_each(|post| post.late = false);
        }
        let engine = &mut self.engines[engine];
        (engine.hold, engine.asleep, engine.deaf) = (false, false, false);
        self.busy.extend(engine.links.iter());
    }

    /// Everything that the adversary holds is let go.
    pub fn let_go(&mut self) {
        for engine in &mut self.engines {
            (engine.hold, engine.asleep, engine.deaf) = (false, false, false);
        }
        self.links.iter_mut().for_each(|link| link.stalled = false);
        self.busy.extend(0..self.links.len());
        self.fences_hang = false;
        self.posts.iter_mut().for_each(|post| post.late = false);
        (0..self.tickets.len()).for_each(|ticket| self.ready(ticket));
    }

    fn double(&mut self) -> bool {
        let Some(at) = self.some_link() else { return false };
        let side = self.rng.below(2);
        let channels = &self.links[at].channels;
        let mut full = channels.all.iter().filter_map(|channel| channel.chunks[side].front());
        let Some(chunk) = full.next().cloned() else { return false };
        let Some(channel) = pick(&mut self.rng, channels.usable(1 - side)) else { return false };
        self.links[at].channels.send(channel, side, chunk);
        self.links[at].faults |= Fault::Duplicate.bit();
        true
    }

    fn double_piece(&mut self) -> bool {
        // A retransmission, before the operation is complete.
        // One that was given up sends nothing again.
        let sends = |post: &&mut Post| post.request.is_some() && post.mends.is_none();
        let Some(post) = self.posts.iter_mut().find(sends) else { return false };
        let Some((_, piece)) = post.pieces.iter_mut().find(|(_, piece)| *piece == Piece::Done) else {
            return false;
        };
        *piece = Piece::Queued;
        self.links[post.link].faults |= Fault::Duplicate.bit();
        true
    }

    fn lose_piece(&mut self) -> bool {
        let at = self.rng.below(self.posts.len());
        let Some(post) = self.posts.get_mut(at) else { return false };
        let lost = self.rng.below(post.pieces.len());
        post.pieces[lost].1 = Piece::Lost;
        self.links[post.link].faults |= Fault::Drop.bit();
        self.drop_posts();
        true
    }

    /// The connection ends inside of what was sent.
    fn truncate(&mut self) -> bool {
        let Some(at) = self.some_link() else { return false };
        let (side, keep) = (self.rng.below(2), self.rng.below(60));
        // Who sleeps does not see it yet.
        if self.engines[self.links[at].ends[side]].asleep {
            return false;
        }
        let link = &mut self.links[at];
        link.control[side].truncate(keep);
        link.channels.all.iter_mut().for_each(|channel| channel.chunks[side].clear());
        link.faults |= Fault::Truncate.bit();
        self.busy.insert(at);
        let engine = self.break_off(at, side);
        self.pump(engine);
        true
    }

    /// The connection flips a bit on the way.
    fn corrupt(&mut self) -> bool {
        self.on_link(Fault::Corrupt, |link, _| link.flips = true)
    }

    /// An engine is cut off from everybody, and nobody is told.
    fn part(&mut self, engine: usize) -> bool {
        for at in self.engines[engine].links.clone() {
            self.links[at].lost = [true; 2];
        }
        self.strike(engine, Fault::Partition);
        true
    }

    /// A process dies, its machine with it or not, and is started again.
    fn crash(&mut self, at: usize) -> bool {
        let silent = self.rng.once_in(2);
        for link in self.engines[at].links.clone() {
            let side = self.links[link].side(at);
            let link = &mut self.links[link];
            (link.gone[side], link.closed[side]) = (true, true);
            link.channels.cut(side);
            link.lost[side] |= silent;
        }
        self.strike(at, Fault::Crash);
        self.running.retain(|running| running.engine != at);
        for post in self.posts.iter_mut().filter(|post| post.engine == at) {
            post.orphan();
        }
        self.drop_posts();
        self.fences.retain(|(engine, _)| *engine != at);
        self.engines[at].restart(self.now);
        true
    }

    fn cut(&mut self) -> bool {
        let Some(at) = self.some_link() else { return false };
        let side = self.rng.below(2);
        let engine = self.links[at].ends[side];
        let live = !self.links[at].gone[side] && !self.engines[engine].asleep;
        let Some(session) = self.links[at].session.filter(|_| live) else { return false };
        self.links[at].faults |= Fault::Cut.bit();
        self.close(engine, session);
        true
    }

    /// A second connection between two that have one.
    fn spare(&mut self) -> bool {
        let Some(at) = self.some_link() else { return false };
        let [a, b] = self.links[at].ends;
        let (opener, listener) = if self.rng.once_in(2) { (a, b) } else { (b, a) };
        self.dial(opener, listener, self.engines[listener].identity);
        false
    }

    /// A listener says something before the opener knows that the handshake is over: it all comes at once.
    pub fn speak_early(&mut self) {
        let Some(old) = self.some_link() else { return };
        let [opener, listener] = self.links[old].ends;
        if self.engines[opener].asleep || self.engines[listener].asleep {
            return;
        }
        self.dial(opener, listener, self.engines[listener].identity);
        let at = self.links.len() - 1;
        for from in [0, 1, 0] {
            while !self.links[at].control[from].is_empty() {
                let to = self.deliver(at, from);
                self.pump(to);
            }
        }
        let Some(session) = self.links[at].session else { return };
        match self.rng.below(7) {
            6 => self.request_connection(listener, session),
            0 => self.engines[listener].node.session(session).ask_for_channels(),
            4 => self.engines[listener].node.tell_nics(&Nics::default()),
            1 => self.engines[listener].node.goodbye(),
            2 => self.now += ms(600),
            3 => self.notify_on(at, 1),
            _ => {
                let of_opener = |ticket: &crate::world::Ticket| ticket.owner == opener;
                if let Some(ticket) = self.tickets.iter().rposition(of_opener)
                    && self.begin(listener, ticket)
                {
                    self.cancel();
                }
            }
        }
        self.pump(listener);
        self.tick();
    }

    fn flip(&mut self, engine: usize, fault: Fault) -> bool {
        match fault {
            Fault::Hold => self.engines[engine].hold = true,
            _ => self.engines[engine].asleep = true,
        }
        self.strike(engine, fault);
        true
    }

    fn shift_clock(&mut self, engine: usize) -> bool {
        let jump = if self.rng.once_in(2) { 0 } else { self.rng.next() % 6000 };
        let permille = 850 + self.rng.below(300) as u32;
        self.engines[engine].clock.set(self.now, ms(jump), permille);
        self.strike(engine, Fault::Clock);
        true
    }

    fn say_goodbye(&mut self, engine: usize) -> bool {
        if !self.engines[engine].asleep {
            self.engines[engine].node.goodbye();
            self.pump(engine);
        }
        false
    }
}
