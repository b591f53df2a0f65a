//! Data channels: connections of their own that join a session, carry chunks beside each other, and die alone.
//!
//! Whoever opened a session dials them, at the address of the other side: a process that was started there since
//! answers too. The adversary dials as well, with what it has heard: joins that came before, and keys of other
//! sessions. Whether a join must be let in is known here without asking the node.

use crate::coverage::{Fault, JOIN, State};
use crate::engine::Process;
use crate::link::Chunk;
use crate::memory::Rng;
use crate::world::World;
use kvik_core::{Code, Error};
use kvik_proto::{Greeting, Handshake, Join, JoinKind, MAX_CHANNELS, joined, read_joined, refusal};
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

/// A connection that asks to be a data channel of a session. Its end 0 is who dialled, its end 1 who is asked.
pub struct Channel {
    pub ends: [usize; 2],
    /// What runs at end 1.
    process: Rc<Process>,
    /// Its end 0 is the adversary, who throws away what comes.
    pub forged: bool,
    /// It asks with the key of its session, for a number that there may be.
    genuine: bool,
    index: u16,
    /// Until it has asked.
    shake: Option<Handshake>,
    heard: [Vec<u8>; 2],
    greeting: [VecDeque<u8>; 2],
    /// The session that each end takes it for.
    pub serves: [Option<u64>; 2],
    /// In the order in which they were sent.
    pub chunks: [VecDeque<Chunk>; 2],
    /// Ends that are closed.
    pub cut: [bool; 2],
    /// Nothing goes through any more, and each end will see it.
    pub broken: bool,
}

/// The channels of a session.
#[derive(Default)]
pub struct Channels {
    pub all: Vec<Channel>,
    /// Which ends have seen to it that there are some.
    asked: [bool; 2],
    /// Numbers that have joined.
    taken: BTreeSet<u16>,
    /// Every join that travelled, as the adversary has heard it.
    overheard: Vec<(u16, Vec<u8>)>,
    /// Chunks that were sent.
    sent: u64,
}

impl Channels {
    /// Those over which one side may send.
    pub fn usable(&self, side: usize) -> impl Iterator<Item = usize> {
        let serves = move |channel: &Channel| channel.serves[side].is_some() && !channel.cut[side];
        self.all.iter().enumerate().filter(move |(_, channel)| serves(channel)).map(|(at, _)| at)
    }

    /// A chunk goes out. Nothing comes through to anybody on a channel that is broken or the adversary's.
    pub fn send(&mut self, at: usize, side: usize, mut chunk: Chunk) {
        self.sent += 1;
        chunk.turn = self.sent;
        let channel = &mut self.all[at];
        if !channel.broken && !channel.forged {
            channel.chunks[side].push_back(chunk);
        }
    }

    /// The next chunk of a channel, and whether it overtakes one of another.
    pub fn next_chunk(&mut self, at: usize, from: usize) -> Option<(Chunk, bool)> {
        let chunk = self.all[at].chunks[from].pop_front()?;
        let fronts = self.all.iter().filter_map(|channel| channel.chunks[from].front());
        let overtakes = fronts.into_iter().any(|front| front.turn < chunk.turn);
        Some((chunk, overtakes))
    }

    /// One side has ended the session, or its process has died.
    pub fn cut(&mut self, side: usize) {
        self.all.iter_mut().for_each(|channel| channel.cut[side] = true);
    }
}

impl World {
    /// A session has something to send: sees to it that it has channels, once.
    pub fn ensure_channels(&mut self, engine: usize, session: u64) {
        let at = self.by_session[&session];
        let side = self.links[at].side(engine);
        if std::mem::replace(&mut self.links[at].channels.asked[side], true) {
            return;
        }
        match side {
            0 => self.dial_channels(at, session),
            _ => self.engines[engine].node.session(session).ask_for_channels(),
        }
    }

    /// The peer asks for channels. Only who opened the session knows an address of the other.
    pub fn on_open_channels(&mut self, engine: usize, session: u64) {
        if self.links[self.by_session[&session]].side(engine) == 0 {
            self.ensure_channels(engine, session);
        }
    }

    fn dial_channels(&mut self, at: usize, session: u64) {
        let ends = self.links[at].ends;
        let Some(key) = self.engines[ends[0]].node.established(session).map(|open| open.key) else {
            return;
        };
        for index in 0..1 + self.rng.below(6) as u16 {
            let nonce = self.nonce();
            let join = Join::new(session, index, JoinKind::Data, &key, nonce).encode();
            self.links[at].channels.overheard.push((index, join.clone()));
            self.connect(at, ends, index, join, [false, true]);
        }
    }

    /// A connection to what runs at an address now.
    fn connect(&mut self, at: usize, ends: [usize; 2], index: u16, join: Vec<u8>, kind: [bool; 2]) {
        let nonce = self.nonce();
        let listener = &self.engines[ends[1]];
        let [forged, genuine] = kind;
        self.links[at].channels.all.push(Channel {
            ends,
            process: listener.process.clone(),
            forged,
            genuine,
            index,
            shake: Some(Handshake::listen(listener.local(), nonce)),
            heard: Default::default(),
            greeting: [join.into(), VecDeque::new()],
            serves: [None; 2],
            chunks: Default::default(),
            cut: [false; 2],
            broken: false,
        });
        self.busy.insert(at);
    }

    /// Whether the process that has an end of a channel still runs, and takes part in what comes on it.
    fn has_end(&self, at: usize, channel: usize, side: usize) -> bool {
        let (link, channel) = (&self.links[at], &self.links[at].channels.all[channel]);
        match side {
            0 => !channel.forged && !link.gone[0],
            _ => Rc::ptr_eq(&channel.process, &self.engines[channel.ends[1]].process),
        }
    }

    pub fn channel_actions(&self, at: usize, from: usize, mut found: impl FnMut(usize, Step)) {
        let link = &self.links[at];
        let to = 1 - from;
        for (number, channel) in link.channels.all.iter().enumerate() {
            // What has befallen the connection to a process does not befall the one that was started since.
            let lost = link.lost[from] && Rc::ptr_eq(&channel.process, &link.processes[1]);
            if lost || link.stalled || self.engines[channel.ends[to]].asleep {
                continue;
            }
            if !channel.greeting[from].is_empty() {
                found(number, Step::Greet);
            } else if !channel.chunks[from].is_empty() {
                found(number, Step::Chunk);
            } else if (channel.cut[from] || channel.broken) && !channel.cut[to] {
                found(number, Step::Hangup);
            }
        }
    }

    /// Some of a join, or of its answer, has come.
    pub fn greet_channel(&mut self, at: usize, number: usize, from: usize) -> usize {
        let most = if self.rng.once_in(4) { 40 } else { 200 };
        let piece = 1 + self.rng.below(most);
        let (to, alive) = (1 - from, self.has_end(at, number, 1 - from));
        let channel = &mut self.links[at].channels.all[number];
        let take = piece.min(channel.greeting[from].len());
        let bytes: Vec<u8> = channel.greeting[from].drain(..take).collect();
        let engine = channel.ends[to];
        if !alive || channel.cut[to] {
            return engine;
        }
        channel.heard[to].extend(bytes);
        match to {
            0 => self.hear_answer(at, number),
            _ => self.hear_join(at, number),
        }
        engine
    }

    fn hear_join(&mut self, at: usize, number: usize) {
        let channel = &mut self.links[at].channels.all[number];
        let Some(shake) = &mut channel.shake else { return };
        match shake.receive(&mut channel.heard[1], &mut Vec::new()) {
            Ok(None) => {}
            Ok(Some(Greeting::Join(join))) => {
                channel.shake = None;
                self.join(at, number, &join);
            }
            _ => panic!("a channel greeted otherwise"),
        }
    }

    /// Lets a connection in, or not. It is known which: only into a session of this very process that has not ended,
    /// by who did not open it, with its key, and each number once.
    fn join(&mut self, at: usize, number: usize, join: &Join) {
        let (link, channel) = (&self.links[at], &self.links[at].channels.all[number]);
        let engine = channel.ends[1];
        let asked = engine == link.ends[1] && Rc::ptr_eq(&channel.process, &link.processes[1]);
        let open = asked && self.engines[engine].heard.contains_key(&join.session);
        let fresh = !link.channels.taken.contains(&channel.index);
        let welcome = open && fresh && channel.genuine;
        let state = if asked { self.state_of(at, 1) } else { State::Dead };
        self.coverage.hit(state, JOIN, self.links[at].faults);
        let now = self.engines[engine].now(self.now);
        let result = self.engines[engine].node.join(join, now);
        assert_eq!(
            result.is_ok(),
            welcome,
            "P8: channel {} of session {} asked to join engine {engine}: {result:?}",
            channel.index,
            join.session
        );
        self.coverage.count(if welcome { "joined" } else { "not_joined" });
        let channels = &mut self.links[at].channels;
        let channel = &mut channels.all[number];
        let answer = match &result {
            Ok(()) => joined(),
            Err(error) => refusal(error),
        };
        channel.greeting[1].extend(answer);
        if result.is_ok() {
            channels.taken.insert(channel.index);
            channel.serves[1] = Some(join.session);
            self.hear(engine, join.session);
        } else {
            channel.cut[1] = true;
        }
        self.busy.insert(at);
    }

    fn hear_answer(&mut self, at: usize, number: usize) {
        let session = self.links[at].session;
        let channel = &mut self.links[at].channels.all[number];
        match read_joined(&mut channel.heard[0]) {
            Ok(None) => {}
            Ok(Some(())) => {
                assert_eq!(
                    channel.serves[1], session,
                    "P8: a channel serves another session at its other end"
                );
                channel.serves[0] = session;
                self.busy.insert(at);
            }
            Err(error) => {
                assert_eq!(error.code, Code::ProtocolError);
                self.lose_channel(at, number, 0);
            }
        }
    }

    /// An end sees that the other one is gone.
    pub fn hang_up(&mut self, at: usize, number: usize, from: usize) -> usize {
        let engine = self.links[at].channels.all[number].ends[1 - from];
        self.lose_channel(at, number, 1 - from);
        engine
    }

    /// A session does not go on with fewer channels than it asked for.
    fn lose_channel(&mut self, at: usize, number: usize, side: usize) {
        let alive = self.has_end(at, number, side);
        let session = self.links[at].session;
        let channel = &mut self.links[at].channels.all[number];
        channel.cut[side] = true;
        // What was not let in is part of no session at the side that was asked.
        let session = if side == 0 { session } else { channel.serves[1] };
        if let Some(session) = session.filter(|_| alive) {
            let error = Error::new(Code::PeerLost, "a data channel broke");
            let engine = &mut self.engines[channel.ends[side]];
            let now = engine.clock.at(self.now);
            engine.node.session(session).channel_lost(error, now);
        }
    }

    // ---- the adversary ----

    /// One channel of a session dies, and the others do not.
    pub fn break_channel(&mut self, at: usize) -> bool {
        let link = &mut self.links[at];
        let number = self.rng.below(link.channels.all.len());
        let Some(channel) = link.channels.all.get_mut(number) else { return false };
        channel.broken = true;
        channel.chunks.iter_mut().for_each(VecDeque::clear);
        if self.rng.once_in(2) {
            channel.greeting.iter_mut().for_each(VecDeque::clear);
        }
        link.faults |= Fault::Cut.bit();
        self.busy.insert(at);
        true
    }

    /// The adversary asks to join a session with what it has: a join that it heard, sent to the same engine once more,
    /// back to who sent it or to a third; the key of another session; a number that there is not.
    pub fn misjoin(&mut self, at: usize, other: usize) -> bool {
        let Some(session) = self.links[at].session else { return false };
        let ends = self.links[at].ends;
        let third = self.rng.below(self.engines.len());
        let index = self.rng.below(4) as u16;
        let key = |world: &World, at: usize| {
            let link = &world.links[at];
            let node = &world.engines[link.ends[0]].node;
            link.session.and_then(|session| node.established(session)).map(|open| open.key)
        };
        let nonce = self.nonce();
        let join = |index, key| Join::new(session, index, JoinKind::Data, &key, nonce).encode();
        let asked = match self.rng.below(6) {
            0 => key(self, other).map(|key| (index, join(index, key), ends[1], other == at)),
            1 => key(self, at).map(|key| (MAX_CHANNELS, join(MAX_CHANNELS, key), ends[1], false)),
            kind => {
                let heard = &self.links[at].channels.overheard;
                let to = [ends[1], ends[1], ends[0], third][kind - 2];
                heard.get(self.rng.below(heard.len())).map(|(index, join)| (*index, join.clone(), to, true))
            }
        };
        let Some((index, join, to, genuine)) = asked else { return false };
        self.links[at].faults |= Fault::Duplicate.bit();
        self.connect(at, [ends[0], to], index, join, [true, genuine]);
        true
    }

    /// A chunk comes on a channel of another session.
    pub fn misplace(&mut self, at: usize, other: usize) -> bool {
        let chunks = self.links[at].channels.all.iter().flat_map(|channel| &channel.chunks);
        let Some(chunk) = chunks.filter_map(|chunks| chunks.front()).next().cloned() else { return false };
        let side = self.rng.below(2);
        let Some(channel) = pick(&mut self.rng, self.links[other].channels.usable(1 - side)) else {
            return false;
        };
        self.links[other].channels.send(channel, side, chunk);
        self.links[other].faults |= Fault::Duplicate.bit();
        self.busy.insert(other);
        true
    }
}

/// What can happen on a channel.
pub enum Step {
    Greet,
    Chunk,
    Hangup,
}

/// One of them.
pub fn pick(rng: &mut Rng, from: impl Iterator<Item = usize>) -> Option<usize> {
    let all: Vec<usize> = from.collect();
    all.get(rng.below(all.len())).copied()
}
