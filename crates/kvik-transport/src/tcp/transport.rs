//! TCP channels as a transport: which sessions have channels, and how many.

use super::{Command, Place, Stream, TcpPool};
use crate::basics::lock;
use crate::pace::Pace;
use crate::{Answer, Moved, Queue, RegionMemory, Request, Services, SessionEvents, Transport, TransportId};
use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::thread::ThreadOptions;
use kvik_proto::{Facts, Path};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// How an engine uses TCP.
#[derive(Debug, Clone, Copy)]
pub struct TcpConfig {
    /// Threads that serve channels.
    pub threads: usize,
    /// Channels that a session gets from this side.
    pub channels: u16,
    /// Whether they are under TLS.
    pub tls: bool,
}

/// Moves chunks over the TCP channels of sessions. It reaches every peer that there is a session with.
pub struct Tcp {
    config: TcpConfig,
    pool: TcpPool,
    events: Weak<dyn SessionEvents>,
    sessions: Mutex<HashMap<u64, Session>>,
}

#[derive(Default)]
struct Session {
    asked: bool,
    joined: Arc<AtomicU16>,
    pace: Pace,
}

impl Tcp {
    /// Starts its threads.
    ///
    /// # Errors
    /// `InvalidArgument` where a thread cannot be started as the options say.
    pub fn start(config: TcpConfig, services: &Services, options: &ThreadOptions) -> Result<Tcp> {
        let pool = TcpPool::start(services, config.threads, options)?;
        let events = Arc::downgrade(&services.sessions);
        Ok(Tcp { config, pool, events, sessions: Mutex::default() })
    }

    /// Takes over a channel whose join was accepted.
    pub fn add(&self, session: u64, stream: impl Into<Stream>) {
        let joined = lock(&self.sessions).get(&session).map(|session| session.joined.clone());
        let place = joined.map_or_else(Place::default, |of| Place { index: of.fetch_add(1, Relaxed), of });
        if !self.pool.add(session, stream, place)
            && let Some(events) = self.events.upgrade()
        {
            let text =
                "the data threads of this engine have ended, and its log says why; restart the process";
            events.broken(session, Error::new(Code::PeerLost, text));
        }
    }

    /// Channels of a session that have joined.
    pub fn joined(&self, session: u64) -> u16 {
        lock(&self.sessions).get(&session).map_or(0, |session| session.joined.load(Relaxed))
    }

    /// Whether a session's channels were asked for.
    pub fn is_asked(&self, session: u64) -> bool {
        lock(&self.sessions).get(&session).is_some_and(|session| session.asked)
    }
}

impl Transport for Tcp {
    fn id(&self) -> TransportId {
        TransportId::Tcp
    }

    fn path(&self) -> Path {
        Path::Channels
    }

    fn add_session(&self, session: u64, _peer: &Facts) {
        lock(&self.sessions).insert(session, Session::default());
    }

    fn end_session(&self, session: u64) {
        lock(&self.sessions).remove(&session);
        self.pool.tell(|| Command::Cut(session));
    }

    /// Sockets take any memory.
    fn register(&self, _region: RegionId, _memory: &RegionMemory, _limit: Duration) -> Result<()> {
        Ok(())
    }

    fn withdraw(&self, _region: RegionId, _limit: Duration) {}

    fn answer(&self, request: &Request<'_>) -> Answer {
        match lock(&self.sessions).get(&request.session) {
            Some(session) => Answer::Ready(session.pace.estimate(request.bytes)),
            None => Answer::No("the session with the peer has ended".into()),
        }
    }

    fn open(&self, session: u64) {
        let first = match lock(&self.sessions).get_mut(&session) {
            Some(session) => !std::mem::replace(&mut session.asked, true),
            None => false,
        };
        if first && let Some(events) = self.events.upgrade() {
            events.connect(session);
        }
    }

    fn warm(&self, session: u64, _until: Instant) {
        self.open(session);
    }

    fn wake(&self, queue: Queue) {
        if let Queue::Send(session) = queue {
            self.pool.tell(|| Command::Send(session));
        }
    }

    fn cancel(&self, session: u64) {
        self.pool.tell(|| Command::Halt(session));
    }

    fn mechanism(&self, of: &Moved<'_>) -> String {
        // None have joined yet where nothing had to move.
        let joined = Some(self.joined(of.request.session)).filter(|joined| *joined > 0);
        let channels = joined.unwrap_or(self.config.channels);
        let tls = if self.config.tls { ", tls" } else { "" };
        let device = of.request.memory.and_then(|(_, memory)| memory.device());
        let staged = device.map(|device| format!(", staged for {device}")).unwrap_or_default();
        format!("{channels} channel{}{tls}{staged}", if channels == 1 { "" } else { "s" })
    }

    fn measured(&self, session: u64, bytes: u64, took: Duration) {
        if let Some(session) = lock(&self.sessions).get_mut(&session) {
            session.pace.add(bytes, took);
        }
    }

    fn stop(&self) {
        self.pool.stop();
    }
}
