//! A data thread: many channels, one epoll set.
//!
//! A panic while it serves a channel costs that channel, and one elsewhere all that it has: their sessions are told, and
//! the thread goes on. One that cannot wait for its channels any more tells all their sessions, and ends.

use crate::sums::Checksummer;
use crate::tcp::incoming::Incoming;
use crate::tcp::outgoing::{Outgoing, Progress, TURN, Tools};
use crate::tcp::staged::{Copies, Stagings};
use crate::tcp::{Command, Inbox, Place, Stream};
use crate::{Services, WorkSource, from_host};
use kvik_core::{Class, ClassQueue, Code, Error, Result};
use kvik_host::RunBuffer;
use kvik_host::event::{Epoll, Events, Interest};
use kvik_proto::Claim;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

const WAKER: u64 = 0;
/// A GPU's stream has got somewhere.
const STREAMS: u64 = 1;
/// Turns of channels before the thread looks again at what has happened, if they move less than one of them may.
const TURNS: usize = 16;
/// An idle thread wakes this rarely; everything that matters wakes it at once.
const IDLE_WAIT: Duration = Duration::from_secs(3600);
/// How often one that cannot wait for anything looks whether GPUs are through; and how long one pauses that has panicked,
/// since it may do so again and again.
const PAUSE: Duration = Duration::from_millis(10);

struct Channel {
    session: u64,
    stream: Stream,
    outgoing: Outgoing,
    incoming: Incoming,
    place: Place,
    /// It waits for room in the socket.
    blocked: bool,
    /// There may be something to read, and to write, when it is its turn.
    ready: [bool; 2],
    /// In which queue it waits for its turn.
    queued: Option<Class>,
    /// What its socket is watched for.
    interest: Interest,
}

impl Channel {
    /// The class of what it would do next.
    fn class(&self) -> Class {
        let classes = [self.incoming.class(), self.outgoing.class];
        let wanted = classes.into_iter().zip(self.ready).filter(|(_, ready)| *ready);
        wanted.map(|(class, _)| class).min().unwrap_or_default()
    }

    /// A socket of which nothing is taken would tell of its bytes again and again.
    fn wanted(&self) -> Interest {
        Interest { readable: !self.incoming.waits(), writable: self.blocked }
    }

    /// Whether a GPU has something of it in flight.
    fn is_staged(&self) -> bool {
        self.incoming.stagings.is_busy() || self.outgoing.stagings.is_busy()
    }

    /// When to look again at work requests that must stop and that a GPU has in flight.
    fn watch(&mut self, work: &dyn WorkSource) -> Option<Instant> {
        let stagings = [&mut self.incoming.stagings, &mut self.outgoing.stagings];
        stagings.into_iter().filter_map(|stagings| stagings.watch(work)).min()
    }
}

pub(crate) struct Worker {
    services: Services,
    inbox: Arc<Inbox>,
    epoll: Epoll,
    channels: HashMap<u64, Channel>,
    /// Channels that have something to do, in turn.
    ready: ClassQueue<u64>,
    /// Of channels that were cut, what GPUs still have in flight.
    left: Vec<Stagings>,
    next_token: u64,
    tools: Tools,
    /// What it was told and has not done yet, the first one last.
    commands: Vec<Command>,
    /// Why it must let go of all its channels.
    fault: Option<Error>,
    /// It was told to end, or cannot go on.
    ending: bool,
}

/// Why channels were cut.
fn panicked() -> Error {
    let text = "a data thread of this engine panicked, which is a fault of kvik, and its channels to the peer were cut; a \
                new transfer connects again";
    Error::new(Code::PeerLost, text)
}

impl Worker {
    pub fn new(services: Services, inbox: Arc<Inbox>) -> Result<Worker> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        let epoll = Epoll::new().map_err(fail)?;
        epoll.add(&inbox.waker, WAKER, Interest::READ).map_err(fail)?;
        let copies = Copies::new()?;
        epoll.add(&*copies.flag, STREAMS, Interest::READ).map_err(fail)?;
        let (runs, checksummer, scratch) = (RunBuffer::new(1024), Checksummer::default(), vec![0; 256 << 10]);
        let tools = Tools { runs, checksummer, scratch, copies, moved: [0; 2] };
        let (channels, ready, left) = (HashMap::new(), ClassQueue::default(), Vec::new());
        let (next_token, commands) = (STREAMS + 1, Vec::new());
        let (fault, ending) = (None, false);
        Ok(Worker {
            services,
            inbox,
            epoll,
            channels,
            ready,
            left,
            next_token,
            tools,
            commands,
            fault,
            ending,
        })
    }

    pub fn run(&mut self) {
        let mut events = Events::new(64);
        loop {
            match catch_unwind(AssertUnwindSafe(|| self.turn(&mut events))) {
                Ok(true) => {}
                Ok(false) => return,
                Err(_) => {
                    self.fault = Some(panicked());
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    /// Does what it was told, and what has come since. False: it has ended.
    fn turn(&mut self, events: &mut Events) -> bool {
        if let Some(fault) = self.fault.clone() {
            while let Some(token) = self.channels.keys().next().copied() {
                self.lose(token, fault.clone());
            }
            // GPUs may have told what a panic has kept from being heard.
            self.streams_told();
            self.fault = None;
        }
        if self.commands.is_empty() && !self.ending && !self.hear(events) {
            return true;
        }
        // One by one: what comes after one that panics is left for the next turn.
        while let Some(command) = self.commands.pop() {
            self.execute(command);
        }
        if self.ending {
            self.end();
            return false;
        }
        let mut moved = 0;
        for _ in 0..TURNS {
            match self.next_turn() {
                Some(bytes) if moved + bytes < TURN => moved += bytes,
                _ => break,
            }
        }
        true
    }

    /// Waits until something happens. False: it cannot.
    fn hear(&mut self, events: &mut Events) -> bool {
        let wait = if self.ready.is_empty() { self.wait() } else { Duration::ZERO };
        if let Err(error) = self.epoll.wait(events, wait) {
            let text = format!(
                "a data thread of this engine cannot wait for its channels any more, and has ended ({error}): something \
                 in this process has closed a descriptor of kvik's; restart the process"
            );
            log::error!("{text}");
            (self.fault, self.ending) = (Some(Error::new(Code::PeerLost, text)), true);
            // Before anybody connects again; what it has of channels by then cannot be added, and is told of.
            self.commands = self.inbox.close();
            return false;
        }
        for event in events.iter() {
            if event.token == WAKER {
                if let Err(error) = self.inbox.waker.drain() {
                    log::error!("a data thread cannot read its waker: {error}");
                }
                self.inbox.take(&mut self.commands);
                self.commands.reverse();
            } else if event.token == STREAMS {
                self.streams_told();
            } else if event.closed && self.waits_to_read(event.token) {
                // Nothing of it is read meanwhile, and its end would be told again and again.
                self.lose(event.token, Error::new(Code::PeerLost, "the peer closed a channel"));
            } else {
                self.queue(event.token, [event.readable, event.writable]);
            }
        }
        true
    }

    /// The channel has something to do: to read, or to write.
    fn queue(&mut self, token: u64, ready: [bool; 2]) {
        let Some(channel) = self.channels.get_mut(&token) else { return };
        channel.ready = [channel.ready[0] || ready[0], channel.ready[1] || ready[1]];
        if channel.ready == [false; 2] {
            return;
        }
        let class = channel.class();
        match channel.queued.replace(class) {
            Some(queued) if queued <= class => channel.queued = Some(queued),
            Some(queued) => {
                self.ready.remove(queued, &token);
                self.ready.push(class, token);
            }
            None => self.ready.push(class, token),
        }
    }

    /// Serves the channel whose turn it is: how many bytes it has moved.
    fn next_turn(&mut self) -> Option<u64> {
        let turn = self.ready.turn();
        let token = turn.into_iter().find_map(|class| self.ready.pop(class))?;
        self.tools.moved = [0; 2];
        if catch_unwind(AssertUnwindSafe(|| self.serve(token, turn[0] == Class::Bulk))).is_err() {
            self.lose(token, panicked());
        }
        let moved = self.tools.moved;
        for class in Class::ALL.into_iter().filter(|class| moved[*class as usize] > 0) {
            self.ready.took(class, moved[class as usize]);
        }
        Some(moved.iter().sum())
    }

    /// How long the thread may sleep while nothing happens.
    fn wait(&mut self) -> Duration {
        let channels = self.channels.values_mut().filter_map(|channel| channel.watch(&*self.services.work));
        let left = self.left.iter_mut().filter_map(|stagings| stagings.watch(&*self.services.work));
        let soonest = channels.chain(left).min();
        soonest.map_or(IDLE_WAIT, |at| at.saturating_duration_since(Instant::now()))
    }

    fn waits_to_read(&self, token: u64) -> bool {
        self.channels.get(&token).is_some_and(|channel| channel.incoming.waits())
    }

    /// A GPU has got somewhere. All that any has in flight is looked at before anything else happens: from now on what
    /// is still there has its word to come, whatever becomes of its channel.
    fn streams_told(&mut self) {
        if let Err(error) = self.tools.copies.flag.drain() {
            log::error!("a data thread cannot hear its GPU: {error}");
        }
        self.left.iter_mut().for_each(|stagings| stagings.settle(&*self.services.work));
        self.left.retain(Stagings::holds_work);
        let staged = self.channels.iter().filter(|(_, channel)| channel.is_staged());
        let staged: Vec<u64> = staged.map(|(token, _)| *token).collect();
        for channel in self.channels.values_mut() {
            channel.incoming.stagings.settle(&*self.services.work);
            channel.outgoing.stagings.settle(&*self.services.work);
        }
        for token in staged {
            self.queue(token, [true; 2]);
        }
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Add { session, stream, place } => self.add(session, stream, place),
            Command::Send(session) => {
                let idle: Vec<u64> = self.of(session, |channel| !channel.blocked);
                idle.into_iter().for_each(|token| self.queue(token, [false, true]));
            }
            Command::Halt(session) => {
                for token in self.of(session, |_| true) {
                    let Some(channel) = self.channels.get_mut(&token) else { continue };
                    channel.outgoing.leave_if_stopped(&*self.services.work);
                    channel.incoming.leave_if_stopped(&*self.services.work);
                    // What it waits for may never come, and is nothing to it any more.
                    if channel.is_staged() {
                        self.queue(token, [true; 2]);
                    }
                }
            }
            Command::Cut(session) => {
                self.of(session, |_| true).into_iter().for_each(|token| self.remove(token))
            }
            Command::Stop => self.ending = true,
        }
    }

    fn of(&self, session: u64, which: impl Fn(&Channel) -> bool) -> Vec<u64> {
        let mine = self.channels.iter().filter(|(_, channel)| channel.session == session && which(channel));
        mine.map(|(token, _)| *token).collect()
    }

    fn add(&mut self, session: u64, mut stream: Stream, place: Place) {
        // The session may have ended since: then its `Cut` has been here before, and nobody would ever cut this one.
        if !self.services.sessions.heard(session) {
            return shut_down(stream.cut());
        }
        let token = self.next_token;
        self.next_token += 1;
        let watch = |stream: &Stream| self.epoll.add(stream, token, Interest::READ);
        let added = stream.for_data();
        let added = added.and_then(|()| watch(&stream).map_err(|error| from_host(Code::PeerLost, error)));
        if let Err(error) = added {
            return self.services.sessions.broken(session, error);
        }
        let channel = Channel {
            session,
            stream,
            outgoing: Outgoing::new(),
            incoming: Incoming::new(),
            place,
            blocked: false,
            ready: [false; 2],
            queued: None,
            interest: Interest::READ,
        };
        self.channels.insert(token, channel);
        self.queue(token, [true; 2]);
    }

    fn serve(&mut self, token: u64, bulk_has_its_turn: bool) {
        let Some(channel) = self.channels.get_mut(&token) else { return };
        let claims = channel.place.claims(bulk_has_its_turn);
        channel.queued = None;
        match step(channel, &self.services, &mut self.tools, claims) {
            Ok(blocked) => {
                channel.blocked = blocked;
                // What TLS has of it no event will tell.
                let input = channel.stream.has_input() && !channel.incoming.waits();
                let wanted = channel.wanted();
                if wanted != channel.interest {
                    channel.interest = wanted;
                    if let Err(error) = self.epoll.modify(&channel.stream, token, wanted) {
                        return self.lose(token, from_host(Code::PeerLost, error));
                    }
                }
                self.queue(token, [input, false]);
            }
            Err(error) => self.lose(token, error),
        }
    }

    fn lose(&mut self, token: u64, error: Error) {
        let Some(session) = self.channels.get(&token).map(|channel| channel.session) else { return };
        self.services.sessions.broken(session, error);
        self.remove(token);
    }

    /// Cuts a channel: `shutdown` both ways, since a forked child can hold the socket open.
    fn remove(&mut self, token: u64) {
        let Some(mut channel) = self.channels.remove(&token) else { return };
        // While a forked child holds the socket, its events would keep coming.
        if let Err(error) = self.epoll.delete(&channel.stream) {
            log::debug!("a channel could not be taken out of the epoll set: {error}");
        }
        shut_down(channel.stream.close());
        let stagings =
            [channel.outgoing.abandon(&*self.services.work), channel.incoming.abandon(&*self.services.work)];
        self.left.extend(stagings.into_iter().filter(Stagings::holds_work));
    }

    /// Cuts everything, and waits for the GPUs that still have something in flight: as long as they take, since what
    /// they touch is nobody's until then. Whoever closes the engine is told when that is too long for him.
    fn end(&mut self) {
        drop(self.inbox.close());
        let tokens: Vec<u64> = self.channels.keys().copied().collect();
        tokens.into_iter().for_each(|token| self.remove(token));
        let mut events = Events::new(2);
        while !self.left.is_empty() {
            let wait = self.wait();
            if self.epoll.wait(&mut events, wait).is_err() {
                std::thread::sleep(wait.min(PAUSE));
            }
            if let Err(error) = self.inbox.waker.drain() {
                log::error!("a data thread cannot read its waker: {error}");
            }
            self.streams_told();
        }
    }
}

fn shut_down(result: Result<()>) {
    if let Err(error) = result {
        log::debug!("a channel could not be shut down: {error}");
    }
}

/// Lets a channel do what it can: whether it then waits for room in the socket.
fn step(channel: &mut Channel, services: &Services, tools: &mut Tools, claims: &[Claim]) -> Result<bool> {
    let mut blocked = channel.blocked;
    let [readable, writable] = std::mem::take(&mut channel.ready);
    if readable {
        channel.incoming.advance(services, channel.session, &mut channel.stream, tools)?;
    }
    if writable {
        match channel.outgoing.advance(
            &*services.work,
            channel.session,
            &mut channel.stream,
            tools,
            claims,
        )? {
            Progress::Idle => blocked = !channel.stream.flush()?,
            Progress::Blocked => blocked = true,
            Progress::Yield => {
                blocked = false;
                channel.ready[1] = true;
            }
        }
    }
    // What came may have to be answered, under TLS.
    Ok(blocked || channel.stream.is_behind())
}

#[cfg(test)]
#[path = "../../tests/unit/channel.rs"]
mod tests;
