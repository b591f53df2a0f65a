//! A data thread: many channels, one epoll set.

use crate::sums::Summer;
use crate::tcp::incoming::Incoming;
use crate::tcp::outgoing::{Outgoing, Progress, Tools};
use crate::tcp::{Command, Inbox, Stream};
use crate::{Desk, from_host};
use kvik_core::{Code, Error, Result};
use kvik_host::RunBuffer;
use kvik_host::event::{Epoll, Events, Interest};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

const BELL: u64 = 0;
/// Chunks or calls of one channel before another one has its turn.
const TURNS: usize = 16;
/// An idle thread wakes this rarely; everything that matters wakes it at once.
const NAP: Duration = Duration::from_secs(3600);

struct Channel {
    session: u64,
    stream: Stream,
    outgoing: Outgoing,
    incoming: Incoming,
    /// It waits for room in the socket.
    blocked: bool,
    /// It has more to do than its turn allowed.
    eager: bool,
}

impl Channel {
    /// It has more to do than its turn allowed, or than an event will tell.
    fn has_work(&self) -> bool {
        self.eager || self.stream.has_input()
    }
}

pub(crate) struct Worker {
    desk: Arc<dyn Desk>,
    inbox: Arc<Inbox>,
    epoll: Epoll,
    channels: HashMap<u64, Channel>,
    next_token: u64,
    tools: Tools,
}

impl Worker {
    pub fn new(desk: Arc<dyn Desk>, inbox: Arc<Inbox>) -> Result<Worker> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        let epoll = Epoll::new().map_err(fail)?;
        epoll.add(&inbox.bell, BELL, Interest::READ).map_err(fail)?;
        let tools =
            Tools { runs: RunBuffer::new(1024), summer: Summer::default(), scratch: vec![0; 256 << 10] };
        Ok(Worker { desk, inbox, epoll, channels: HashMap::new(), next_token: BELL + 1, tools })
    }

    pub fn run(&mut self) {
        let mut events = Events::new(64);
        let mut commands = Vec::new();
        loop {
            let eager = self.channels.values().any(Channel::has_work);
            let nap = if eager { Duration::ZERO } else { NAP };
            if let Err(error) = self.epoll.wait(&mut events, nap) {
                log::error!("a data thread cannot wait for its channels and ends: {error}");
                return self.end();
            }
            for event in events.iter() {
                if event.token == BELL {
                    if let Err(error) = self.inbox.bell.drain() {
                        log::error!("a data thread cannot hear its bell: {error}");
                    }
                    self.inbox.take(&mut commands);
                    for command in commands.drain(..) {
                        if matches!(command, Command::Stop) {
                            return self.end();
                        }
                        self.obey(command);
                    }
                } else {
                    self.serve(event.token, event.readable, event.writable);
                }
            }
            if eager {
                let eager = self.channels.iter().filter(|(_, channel)| channel.has_work());
                let eager: Vec<_> = eager
                    .map(|(token, channel)| (*token, channel.stream.has_input(), channel.eager))
                    .collect();
                eager.into_iter().for_each(|(token, input, output)| self.serve(token, input, output));
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Add { session, stream } => self.add(session, stream),
            Command::Send(session) => {
                let idle: Vec<u64> = self.of(session, |channel| !channel.blocked);
                idle.into_iter().for_each(|token| self.serve(token, false, true));
            }
            Command::Halt(session) => {
                for token in self.of(session, |_| true) {
                    if let Some(channel) = self.channels.get_mut(&token) {
                        channel.outgoing.leave_if_stopped(&*self.desk);
                        channel.incoming.leave_if_stopped(&*self.desk);
                    }
                }
            }
            Command::Cut(session) => {
                self.of(session, |_| true).into_iter().for_each(|token| self.remove(token))
            }
            Command::Stop => {}
        }
    }

    fn of(&self, session: u64, which: impl Fn(&Channel) -> bool) -> Vec<u64> {
        let mine = self.channels.iter().filter(|(_, channel)| channel.session == session && which(channel));
        mine.map(|(token, _)| *token).collect()
    }

    fn add(&mut self, session: u64, mut stream: Stream) {
        // The session may have ended since: then its `Cut` has been here before, and nobody would ever cut this one.
        if !self.desk.alive(session) {
            return shut_down(stream.cut());
        }
        let token = self.next_token;
        self.next_token += 1;
        let watch = |stream: &Stream| self.epoll.add(stream, token, Interest::READ);
        let added = stream.for_data();
        let added = added.and_then(|()| watch(&stream).map_err(|error| from_host(Code::PeerLost, error)));
        if let Err(error) = added {
            return self.desk.channel_lost(session, error);
        }
        let channel = Channel {
            session,
            stream,
            outgoing: Outgoing::new(),
            incoming: Incoming::new(),
            blocked: false,
            eager: false,
        };
        self.channels.insert(token, channel);
        self.serve(token, true, true);
    }

    fn serve(&mut self, token: u64, readable: bool, writable: bool) {
        let Some(channel) = self.channels.get_mut(&token) else { return };
        match step(channel, &*self.desk, &mut self.tools, readable, writable) {
            Ok(blocked) => {
                if blocked != channel.blocked {
                    let interest = if blocked { Interest::BOTH } else { Interest::READ };
                    channel.blocked = blocked;
                    if let Err(error) = self.epoll.modify(&channel.stream, token, interest) {
                        self.lose(token, from_host(Code::PeerLost, error));
                    }
                }
            }
            Err(error) => self.lose(token, error),
        }
    }

    fn lose(&mut self, token: u64, error: Error) {
        let session = self.channels.get(&token).map(|channel| channel.session);
        self.remove(token);
        if let Some(session) = session {
            self.desk.channel_lost(session, error);
        }
    }

    /// Cuts a channel: `shutdown` both ways, since a forked child can hold the socket open.
    fn remove(&mut self, token: u64) {
        let Some(mut channel) = self.channels.remove(&token) else { return };
        // While a forked child holds the socket, its events would keep coming.
        if let Err(error) = self.epoll.delete(&channel.stream) {
            log::debug!("a channel could not be taken out of the epoll set: {error}");
        }
        shut_down(channel.stream.close());
        channel.outgoing.abandon(&*self.desk);
        channel.incoming.abandon(&*self.desk);
    }

    fn end(&mut self) {
        let tokens: Vec<u64> = self.channels.keys().copied().collect();
        tokens.into_iter().for_each(|token| self.remove(token));
    }
}

fn shut_down(result: Result<()>) {
    if let Err(error) = result {
        log::debug!("a channel could not be shut down: {error}");
    }
}

/// Lets a channel do what it can: whether it then waits for room in the socket.
fn step(
    channel: &mut Channel,
    desk: &dyn Desk,
    tools: &mut Tools,
    readable: bool,
    writable: bool,
) -> Result<bool> {
    let mut blocked = channel.blocked;
    if readable {
        channel.incoming.advance(desk, channel.session, &mut channel.stream, tools, TURNS)?;
    }
    // A channel that only reads now stays as eager to send as it was.
    if writable && (!blocked || channel.outgoing.is_busy() || channel.stream.is_behind()) {
        channel.eager = false;
        match channel.outgoing.advance(desk, channel.session, &mut channel.stream, tools, TURNS)? {
            Progress::Idle => blocked = !channel.stream.flush()?,
            Progress::Blocked => blocked = true,
            Progress::Yield => {
                blocked = false;
                channel.eager = true;
            }
        }
    }
    // What came may have to be answered, under TLS.
    Ok(blocked || channel.stream.is_behind())
}
