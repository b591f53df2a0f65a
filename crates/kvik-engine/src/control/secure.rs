//! TLS handshakes, which have a thread of their own.
//!
//! A handshake costs a processor up to a millisecond, and whoever reaches the port can begin one. The control thread,
//! on which heartbeats and deadlines depend, makes none: it hands a fresh connection over, and gets it back when it is
//! under TLS, or what came instead.
//!
//! Strangers are bounded twice: so many wait for the thread, and so many are in flight. Where there are more, the one
//! that came first is cut. All are bounded in time: by when the connection was accepted or dialled.

use super::conns::{MAX_STRANGERS, hung_up, unreachable};
use crate::base::Base;
use crate::commands::{ControlCommand, Fresh, Secured};
use crate::sync::{lock, signal};
use kvik_core::{Code, Error, Result};
use kvik_host::Io;
use kvik_host::event::{Epoll, EventFd, Events, Interest};
use kvik_host::thread::{ThreadOptions, spawn_named};
use kvik_transport::from_host;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Strangers that wait for the thread, that are in flight, and that are under TLS and have not greeted: as many
/// together as there may be without TLS.
const MAX_WAITING: usize = MAX_STRANGERS / 4;
const MAX_UNDER_WAY: usize = MAX_STRANGERS / 2;
pub(super) const MAX_UNDER_TLS: usize = MAX_STRANGERS / 4;

const WAKE: u64 = 0;
/// How long it sleeps when nothing is in flight; it is woken for anything new.
const LONG: Duration = Duration::from_secs(3600);

/// The thread's other side.
pub(super) struct Securing {
    base: Arc<Base>,
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

struct Inbox {
    coming: Mutex<(VecDeque<Fresh>, bool)>,
    waker: EventFd,
}

impl Inbox {
    fn wake(&self) {
        signal(&self.waker, "the thread for TLS");
    }
}

impl Securing {
    /// Starts the thread, for an engine with TLS.
    pub fn start(base: &Arc<Base>, options: &ThreadOptions) -> Result<Option<Securing>> {
        if base.setup.tls.is_none() {
            return Ok(None);
        }
        let fail = |error| from_host(Code::InvalidArgument, error);
        let inbox = Arc::new(Inbox { coming: Mutex::default(), waker: EventFd::new().map_err(fail)? });
        let epoll = Epoll::new().map_err(fail)?;
        epoll.add(&inbox.waker, WAKE, Interest::READ).map_err(fail)?;
        let mut shaker = Shaker {
            base: base.clone(),
            inbox: inbox.clone(),
            epoll,
            in_flight: BTreeMap::new(),
            next: WAKE,
        };
        let thread = spawn_named("kvik-tls", options, move || shaker.run()).map_err(fail)?;
        Ok(Some(Securing { base: base.clone(), inbox, thread: Some(thread) }))
    }

    /// Hands a connection over.
    pub fn take(&self, fresh: Fresh) {
        let dropped = {
            let coming = &mut lock(&self.inbox.coming).0;
            coming.push_back(fresh);
            let strangers = || coming.iter().enumerate().filter(|(_, fresh)| fresh.purpose.is_stranger());
            let first = strangers().next().map(|(at, _)| at).filter(|_| strangers().count() > MAX_WAITING);
            first.and_then(|at| coming.remove(at))
        };
        self.inbox.wake();
        if let Some(fresh) = dropped {
            self.base.commands.tell(ControlCommand::Secured(Box::new(Secured {
                fresh,
                outcome: Err(too_many(MAX_WAITING)),
            })));
        }
    }
}

impl Drop for Securing {
    fn drop(&mut self) {
        lock(&self.inbox.coming).1 = true;
        self.inbox.wake();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("the thread for TLS panicked");
        }
    }
}

fn too_many(most: usize) -> Error {
    Error::new(
        Code::MemoryCapReached,
        format!("more than {most} connections to this engine are beginning TLS"),
    )
}

struct Shaker {
    base: Arc<Base>,
    inbox: Arc<Inbox>,
    epoll: Epoll,
    /// In the order in which they came.
    in_flight: BTreeMap<u64, Fresh>,
    next: u64,
}

impl Shaker {
    fn run(&mut self) {
        let mut events = Events::new(64);
        loop {
            let now = Instant::now();
            let soonest = self.in_flight.values().map(|fresh| fresh.until).min();
            let wait = soonest.map_or(LONG, |until| until.saturating_duration_since(now));
            if let Err(error) = self.epoll.wait(&mut events, wait) {
                return log::error!("the thread for TLS cannot wait for its connections and ends: {error}");
            }
            for event in events.iter() {
                match event.token {
                    WAKE => drop(self.inbox.waker.drain()),
                    token => self.serve(token),
                }
            }
            let coming = {
                let (coming, over) = &mut *lock(&self.inbox.coming);
                if *over {
                    return;
                }
                std::mem::take(coming)
            };
            coming.into_iter().for_each(|fresh| self.add(fresh));
            self.end_late();
        }
    }

    fn add(&mut self, fresh: Fresh) {
        let strangers = || self.in_flight.iter().filter(|(_, fresh)| fresh.purpose.is_stranger());
        if fresh.purpose.is_stranger() && strangers().count() >= MAX_UNDER_WAY {
            let oldest = strangers().next().map(|(token, _)| *token);
            oldest.into_iter().for_each(|token| self.end(token, Err(too_many(MAX_UNDER_WAY))));
        }
        self.next += 1;
        let token = self.next;
        let added = self.epoll.add(&fresh.conn, token, Interest::READ);
        self.in_flight.insert(token, fresh);
        match added {
            Ok(()) => self.serve(token),
            Err(error) => self.end(token, Err(from_host(Code::PeerLost, error))),
        }
    }

    fn serve(&mut self, token: u64) {
        let Some(Fresh { conn, .. }) = self.in_flight.get_mut(&token) else { return };
        let outcome = match conn.shake() {
            Ok(Io::Done(_)) => Ok(()),
            Ok(Io::Blocked) => {
                let interest = if conn.is_behind() { Interest::BOTH } else { Interest::READ };
                match self.epoll.modify(&*conn, token, interest) {
                    Ok(()) => return,
                    Err(error) => Err(from_host(Code::PeerLost, error)),
                }
            }
            Ok(Io::Closed) => Err(hung_up(conn.has_heard())),
            Err(error) => Err(unreachable(error)),
        };
        self.end(token, outcome);
    }

    fn end_late(&mut self) {
        let now = Instant::now();
        let late: Vec<u64> =
            self.in_flight.iter().filter(|(_, fresh)| fresh.until <= now).map(|(token, _)| *token).collect();
        for token in late {
            let text = "it took the connection, but did not come to the end of the TLS handshake in time";
            self.end(token, Err(Error::new(Code::PeerUnreachable, text)));
        }
    }

    fn end(&mut self, token: u64, outcome: Result<()>) {
        let Some(fresh) = self.in_flight.remove(&token) else { return };
        if let Err(error) = self.epoll.delete(&fresh.conn) {
            log::debug!("a connection could not be taken out of the epoll set: {error}");
        }
        self.base.commands.tell(ControlCommand::Secured(Box::new(Secured { fresh, outcome })));
    }
}
