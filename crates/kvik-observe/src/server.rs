//! The loop of the thread: it accepts, answers, and lets go of whoever takes too long.

use crate::client::{Client, Next};
use crate::observed::Observed;
use kvik_host::HostError;
use kvik_host::event::{Epoll, Events, Interest};
use kvik_host::unix::UnixListener;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections at once; more are closed without an answer.
const MOST_CLIENTS: usize = 16;
/// How long the listener rests that could not accept, for want of a descriptor.
const REST: Duration = Duration::from_millis(100);
/// How long the end of the engine waits for readers of its last lines.
const LAST_WORDS: Duration = Duration::from_millis(200);

const WAKER: u64 = 0;
const LISTENER: u64 = 1;

pub(crate) struct Server {
    observed: Arc<Observed>,
    epoll: Epoll,
    listener: UnixListener,
    /// The listener is not in the epoll set until then.
    rests_until: Option<Instant>,
    clients: HashMap<u64, Client>,
    next: u64,
}

impl Server {
    pub fn new(observed: Arc<Observed>, listener: UnixListener) -> Result<Server, HostError> {
        let epoll = Epoll::new()?;
        epoll.add(&observed.waker, WAKER, Interest::READ)?;
        epoll.add(&listener, LISTENER, Interest::READ)?;
        Ok(Server { observed, epoll, listener, rests_until: None, clients: HashMap::new(), next: LISTENER })
    }

    pub fn run(&mut self) {
        let mut events = Events::new(MOST_CLIENTS + 2);
        while !self.observed.is_stopping() {
            if !self.turn(&mut events, Duration::from_secs(3600)) {
                return;
            }
        }
        self.leave(&mut events);
    }

    /// Waits, and deals with what came; false when it cannot wait any more.
    fn turn(&mut self, events: &mut Events, most: Duration) -> bool {
        let soonest = self.clients.values().filter_map(Client::until).chain(self.rests_until).min();
        let wait = soonest.map_or(most, |at| at.saturating_duration_since(Instant::now()).min(most));
        if let Err(error) = self.epoll.wait(events, wait) {
            log::error!("the thread that shows an engine cannot wait and ends: {error}");
            return false;
        }
        for event in events.iter() {
            match event.token {
                WAKER => drop(self.observed.waker.drain()),
                LISTENER => self.accept(),
                token => self.serve(token, event.readable),
            }
        }
        for token in self.recorders() {
            self.serve(token, false);
        }
        self.pass_time();
        true
    }

    fn accept(&mut self) {
        let conn = match self.listener.accept() {
            Ok(Some(conn)) => conn,
            Ok(None) => return,
            Err(error) => {
                log::warn!("a connection of kvik stat could not be accepted: {error}");
                self.set_listening(false);
                return;
            }
        };
        let who = match conn.same_user() {
            Ok(who) => who,
            Err(error) => return log::warn!("a connection of kvik stat was refused: {error}"),
        };
        if self.clients.len() >= MOST_CLIENTS {
            return log::warn!("a connection of kvik stat was refused: there are {MOST_CLIENTS} of them");
        }
        self.next += 1;
        match self.epoll.add(&conn, self.next, Interest::READ) {
            Ok(()) => drop(self.clients.insert(self.next, Client::new(conn, who.pid.unwrap_or(0)))),
            Err(error) => log::warn!("a connection of kvik stat could not be watched: {error}"),
        }
    }

    fn set_listening(&mut self, listening: bool) {
        let changed = match listening {
            true => self.epoll.add(&self.listener, LISTENER, Interest::READ),
            false => self.epoll.delete(&self.listener),
        };
        self.rests_until = if listening { None } else { Some(Instant::now() + REST) };
        if let Err(error) = changed {
            log::error!("kvik stat cannot look at this engine any more: {error}");
        }
    }

    fn recorders(&self) -> Vec<u64> {
        self.clients.iter().filter(|(_, client)| client.records()).map(|(token, _)| *token).collect()
    }

    fn serve(&mut self, token: u64, readable: bool) {
        let recorded_by = self.clients.values().find(|client| client.records()).map(|client| client.pid);
        let Some(client) = self.clients.get_mut(&token) else { return };
        if readable && !client.receive(&self.observed, recorded_by) {
            return self.drop_client(token);
        }
        client.feed(&self.observed);
        let interest = match client.flush() {
            Next::Wait => Interest::READ,
            Next::Full => Interest::BOTH,
            Next::Over => return self.drop_client(token),
        };
        if let Err(error) = self.epoll.modify(&client.conn, token, interest) {
            log::debug!("a connection of kvik stat is gone: {error}");
            self.drop_client(token);
        }
    }

    fn drop_client(&mut self, token: u64) {
        let Some(client) = self.clients.remove(&token) else { return };
        if client.records() {
            self.observed.recording.stop();
        }
        if let Err(error) = self.epoll.delete(&client.conn) {
            log::debug!("a connection of kvik stat could not be taken out of the epoll set: {error}");
        }
    }

    fn pass_time(&mut self) {
        let now = Instant::now();
        let late = |client: &Client| client.until().is_some_and(|at| at <= now);
        let tokens: Vec<u64> =
            self.clients.iter().filter(|(_, client)| late(client)).map(|(token, _)| *token).collect();
        tokens.into_iter().for_each(|token| self.drop_client(token));
        if self.rests_until.is_some_and(|at| at <= now) {
            self.set_listening(true);
        }
    }

    /// The engine ends: nobody new comes in, and recordings get their last line.
    fn leave(&mut self, events: &mut Events) {
        if let Err(error) = self.listener.stop() {
            log::debug!("{error}");
        }
        drop(self.epoll.delete(&self.listener));
        let until = Instant::now() + LAST_WORDS;
        for token in self.recorders() {
            if let Some(client) = self.clients.get_mut(&token) {
                client.end_recording(&self.observed);
            }
            self.serve(token, false);
        }
        while !self.clients.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.turn(events, left) {
                return;
            }
        }
    }
}
