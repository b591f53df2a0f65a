//! One connection: what it asked for, and how far its answer has gone.

use crate::lines::Writer;
use crate::observed::{Observed, PROTOCOL};
use kvik_core::{Code, Error, Result};
use kvik_host::clock::boottime;
use kvik_host::unix::UnixConn;
use kvik_host::{HostError, Io};
use serde_json::json;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long a connection may take to ask.
const ASKING: Duration = Duration::from_secs(1);
/// How long it may leave its answer unread before it is cut.
const READING: Duration = Duration::from_secs(5);
/// Bytes of a message: well below what a UNIX socket holds.
const PIECE: usize = 32 << 10;
/// A recording writes no further transfer while so much of it is unread.
const UNREAD: usize = 256 << 10;
/// Longer than any request.
const REQUEST: usize = 64;

pub(crate) struct Client {
    pub conn: UnixConn,
    pub pid: u32,
    asked: Asked,
    /// Messages to send, oldest first.
    out: VecDeque<Vec<u8>>,
    /// When it is cut if nothing happens.
    until: Option<Instant>,
}

enum Asked {
    Nothing,
    Snapshot,
    Recording(Box<Writer>),
    /// A recording that has had its last line.
    Ended,
}

/// What becomes of a connection.
#[derive(PartialEq, Eq)]
pub(crate) enum Next {
    /// It has more to ask.
    Wait,
    /// It has more to read than the socket holds.
    Full,
    Over,
}

impl Client {
    pub fn new(conn: UnixConn, pid: u32) -> Client {
        let until = Some(Instant::now() + ASKING);
        Client { conn, pid, asked: Asked::Nothing, out: VecDeque::new(), until }
    }

    pub fn until(&self) -> Option<Instant> {
        self.until
    }

    pub fn records(&self) -> bool {
        matches!(self.asked, Asked::Recording(_))
    }

    /// Takes a request, if there is one. `recorded_by` is who records already.
    ///
    /// # Errors
    /// The connection is over.
    pub fn receive(&mut self, observed: &Observed, recorded_by: Option<u32>) -> Result<()> {
        let mut bytes = [0; REQUEST];
        match self.conn.recv_with_fds(&mut bytes, 0).map_err(|error| left(&error))? {
            Io::Done(message) => self.ask(&bytes[..message.len], observed, recorded_by),
            Io::Blocked => Ok(()),
            Io::Closed => Err(Error::new(Code::PeerLost, "the client has left")),
        }
    }

    fn ask(&mut self, request: &[u8], observed: &Observed, recorded_by: Option<u32>) -> Result<()> {
        let what = request.strip_prefix(PROTOCOL.as_bytes()).and_then(|rest| rest.strip_prefix(b" "));
        match (&self.asked, what) {
            (Asked::Recording(_), _) => {
                self.end_recording(observed);
                return Ok(());
            }
            (Asked::Nothing, Some(b"snapshot")) => {
                self.out.push_back(observed.about());
                self.send(observed.engine.metrics().unwrap_or_default().as_bytes());
                self.asked = Asked::Snapshot;
            }
            (Asked::Nothing, Some(b"trace")) => match recorded_by {
                None => self.record(observed),
                Some(pid) => self.refuse(&format!(
                    "process {pid} records this engine already: one recording at a time; wait for it or end it"
                )),
            },
            (Asked::Nothing, _) => self.refuse(&format!(
                "this engine (kvik {}) answers {PROTOCOL} requests: snapshot, trace; use the kvik command of its version",
                env!("CARGO_PKG_VERSION")
            )),
            _ => return Err(Error::new(Code::ProtocolError, "a second request on one connection")),
        }
        Ok(())
    }

    fn refuse(&mut self, why: &str) {
        self.out.push_back(json!({ "protocol": PROTOCOL, "error": why }).to_string().into_bytes());
        self.asked = Asked::Snapshot;
    }

    fn record(&mut self, observed: &Observed) {
        let mut lines = Vec::new();
        let writer = Writer::new(observed.recording.start(), &mut lines);
        self.out.push_back(observed.about());
        self.send(&lines);
        self.asked = Asked::Recording(Box::new(writer));
        log::info!("process {} records this engine's transfers", self.pid);
    }

    /// Writes what has ended since, as far as the client keeps up.
    pub fn feed(&mut self, observed: &Observed) {
        let Asked::Recording(writer) = &mut self.asked else { return };
        let mut lines = Vec::new();
        let mut unread: usize = self.out.iter().map(Vec::len).sum();
        while unread < UNREAD {
            let (entry, dropped) = observed.recording.take();
            if dropped > 0 {
                writer.dropped(dropped, &mut lines);
            }
            if let Some(entry) = &entry {
                writer.transfer(entry, &mut lines);
            }
            unread += lines.len();
            self.out.extend(lines.chunks(PIECE).map(<[u8]>::to_vec));
            lines.clear();
            if entry.is_none() {
                return;
            }
        }
    }

    /// Ends a recording with what has ended so far, and its last line.
    pub fn end_recording(&mut self, observed: &Observed) {
        if !self.records() {
            return;
        }
        observed.recording.stop();
        let (mut lines, mut rest) = (Vec::new(), 0);
        let Asked::Recording(mut writer) = std::mem::replace(&mut self.asked, Asked::Ended) else { return };
        loop {
            let (entry, dropped) = observed.recording.take();
            rest += dropped;
            let Some(entry) = entry else { break };
            writer.transfer(&entry, &mut lines);
        }
        if rest > 0 {
            writer.dropped(rest, &mut lines);
        }
        writer.end(boottime(), &mut lines);
        self.send(&lines);
        log::info!("process {} has ended its recording", self.pid);
    }

    fn send(&mut self, bytes: &[u8]) {
        self.out.extend(bytes.chunks(PIECE).map(<[u8]>::to_vec));
    }

    /// Sends what the socket takes.
    ///
    /// # Errors
    /// The connection is over.
    pub fn flush(&mut self) -> Result<Next> {
        while let Some(message) = self.out.front() {
            let sent = self.conn.send_with_fds(message, &[]);
            match sent.map_err(|error| left(&error))? {
                Io::Done(_) => {
                    self.out.pop_front();
                    self.until = Some(Instant::now() + READING);
                }
                Io::Blocked => return Ok(Next::Full),
                Io::Closed => return Err(Error::new(Code::PeerLost, "the client has left")),
            }
        }
        match self.asked {
            Asked::Nothing => Ok(Next::Wait),
            Asked::Recording(_) => {
                // It has read everything: it may wait for the next transfer as long as it likes.
                self.until = None;
                Ok(Next::Wait)
            }
            Asked::Snapshot | Asked::Ended => Ok(Next::Over),
        }
    }
}

fn left(error: &HostError) -> Error {
    Error::new(Code::PeerLost, error.to_string())
}
