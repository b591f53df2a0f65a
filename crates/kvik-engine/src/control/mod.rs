//! The control thread: it listens, connects, shakes hands, reads control frames and lets time pass.
//!
//! It never moves payload, so that heartbeats and deadlines do not wait for data. This file is its loop; what it
//! does with the connections is told in the order of their lives:
//!
//! - [`conns`]: what a connection can be, and what wakes the thread for it;
//! - [`serve`]: how each is served, and leaves;
//! - [`accept`]: strangers that come;
//! - [`reach`]: peers and channels that are dialled;
//! - [`secure`]: TLS handshakes, on a thread of their own;
//! - [`greet`]: handshakes and joins;
//! - [`session`]: control connections, and what their peers make this process hold;
//! - [`local`]: links to processes on this host.

mod accept;
mod conns;
mod greet;
mod local;
mod reach;
mod secure;
mod serve;
mod session;

use crate::commands::ControlCommand;
use crate::inner::Inner;
use crate::peers::Target;
use conns::{Conn, Conns, WAKER};
use kvik_core::{Code, Error, Result};
use kvik_host::clock::boottime;
use kvik_host::descriptors;
use kvik_host::event::{Events, Interest};
use kvik_host::socket::TcpListener;
use kvik_host::thread::{ThreadOptions, be_prompt};
use kvik_host::unix::UnixListener;
use kvik_transport::from_host;
use secure::Securing;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) struct Control {
    inner: Arc<Inner>,
    conns: Conns,
    buffer: Vec<u8>,
    /// Of an engine with TLS.
    securing: Option<Securing>,
}

impl Control {
    pub fn new(
        inner: Arc<Inner>,
        listeners: Vec<TcpListener>,
        unix: Option<UnixListener>,
        options: &ThreadOptions,
    ) -> Result<Control> {
        let securing = Securing::start(&inner.base, options)?;
        let mut conns = Conns::new(inner.base.commands.waker())?;
        for conn in listeners.into_iter().map(Conn::Listener).chain(unix.map(Conn::Unix)) {
            let (_, added) = conns.add(conn, Interest::READ, None);
            added.map_err(|error| from_host(Code::InvalidArgument, error))?;
        }
        Ok(Control { inner, conns, buffer: vec![0; 64 << 10], securing })
    }

    /// Serves all connections until it is told to stop; else returns why it cannot go on. All are cut off then.
    pub fn run(&mut self) -> std::result::Result<(), String> {
        let ended = catch_unwind(AssertUnwindSafe(|| self.serve_all()));
        let cut = catch_unwind(AssertUnwindSafe(|| {
            self.securing = None;
            self.conns.cut_all();
        }));
        let panicked = || Err("the control thread panicked".into());
        if cut.is_err() { panicked() } else { ended.unwrap_or_else(|_| panicked()) }
    }

    fn serve_all(&mut self) -> std::result::Result<(), String> {
        // Heartbeats must not wait for whatever else computes on this machine: a busy peer is not a dead one.
        if let Err(error) = be_prompt() {
            log::debug!("heartbeats are sent at ordinary priority: {error}");
        }
        // Nor for the kernel to make room for one more connection, so that is done while there is none.
        if let Err(error) = descriptors::make_room() {
            log::debug!("a connection may have to wait for room: {error}");
        }
        let mut events = Events::new(64);
        loop {
            let wait = self.inner.base.commands.sleep_until(|| self.next_deadline());
            if let Err(error) = self.conns.wait(&mut events, wait) {
                return Err(format!("the control thread cannot wait for its connections: {error}"));
            }
            for event in events.iter() {
                if event.token == WAKER {
                    drop(self.inner.base.commands.waker().drain());
                } else {
                    self.serve(event.token, event.readable, event.writable);
                }
            }
            for command in self.inner.base.commands.take() {
                if matches!(command, ControlCommand::Stop) {
                    return Ok(());
                }
                self.execute(command);
            }
            self.pass_time();
        }
    }

    fn execute(&mut self, command: ControlCommand) {
        match command {
            ControlCommand::Dial(owner, ticket) => self.dial(owner, &ticket),
            ControlCommand::Meet(address) => self.dial_next(Target::Address(address), None),
            ControlCommand::OpenChannels(session) => self.dial_channels(session),
            ControlCommand::WantWrite(session) => self.conns.set_interest(session, Interest::BOTH),
            ControlCommand::Broken(session, error) => self.end_session(session, error),
            ControlCommand::Forget(session) => self.forget(session),
            ControlCommand::Secured(secured) => self.secured(*secured),
            ControlCommand::FlushLocal => {
                self.conns.local().into_iter().for_each(|token| self.flush_local(token));
            }
            ControlCommand::Stop => {}
        }
    }

    fn forget(&mut self, session: u64) {
        for token in self.conns.of(session) {
            if let Some(conn) = self.conns.remove(token) {
                conn.cut();
            }
        }
    }

    // ---- time ----

    fn next_deadline(&self) -> Option<Duration> {
        let (now, boot) = (Instant::now(), boottime());
        let Inner { base, peers, grants, transfers, .. } = &*self.inner;
        let links = base.transports.local().and_then(|local| local.next_expiry());
        let soonest = self.conns.next_due().into_iter().chain(links).min();
        let soonest = soonest.map(|until| boot + until.saturating_duration_since(now));
        let others = [
            transfers.next_deadline(),
            peers.table.next_redial(),
            grants.next_quarantine(),
            base.observers.inboxes.next_due(),
        ];
        soonest.into_iter().chain(others.into_iter().flatten()).chain(base.protocol.next_timeout()).min()
    }

    fn pass_time(&mut self) {
        let now = Instant::now();
        for token in self.conns.late(now) {
            self.late(token);
        }
        let Inner { base, grants, transfers, .. } = &*self.inner;
        let links = base.transports.local().map(|local| local.expire(now)).unwrap_or_default();
        links.into_iter().for_each(|session| transfers.launch_waiting(session));
        transfers.end_late();
        base.node(|node, now| node.tick(now));
        base.protocol.flush(base.observers.inboxes.due(boottime()));
        grants.tell_quarantine(boottime());
        self.dial_again();
    }

    /// A connection's time is over.
    fn late(&mut self, token: u64) {
        let text = match self.conns.get(token) {
            Some(Conn::Listener(_) | Conn::Unix(_)) => {
                if let Err(error) = self.conns.resume(token) {
                    self.fail(token, from_host(Code::PeerLost, error));
                }
                return;
            }
            Some(Conn::Dialing { .. }) => "nothing answered in time",
            _ => {
                "it took the connection, but did not answer kvik's greeting in time: another protocol's port, or a stopped engine"
            }
        };
        self.fail(token, Error::new(Code::PeerUnreachable, text));
    }
}
