//! One connection: what it asked for, and how far its answer has gone.

use crate::lines::Writer;
use crate::observed::{Observed, PROTOCOL};
use kvik_host::Io;
use kvik_host::clock::boottime;
use kvik_host::unix::UnixConn;
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
    /// Ended transfers wait behind them. The end of another one wakes nobody until all have been taken.
    more: bool,
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
pub(crate) enum Next {
    /// It has more to ask.
    Wait,
    /// It has more to read than the socket holds, or than was written at once.
    Full,
    /// It has had all that it asked for, or has left.
    Over,
}

impl Client {
    pub fn new(conn: UnixConn, pid: u32) -> Client {
        let until = Some(Instant::now() + ASKING);
        Client { conn, pid, asked: Asked::Nothing, out: VecDeque::new(), more: false, until }
    }

    pub fn until(&self) -> Option<Instant> {
        self.until
    }

    pub fn records(&self) -> bool {
        matches!(self.asked, Asked::Recording(_))
    }

    /// Takes a request, if there is one; false when the connection is over. `recorded_by` is who records already.
    pub fn receive(&mut self, observed: &Observed, recorded_by: Option<u32>) -> bool {
        let mut bytes = [0; REQUEST];
        match self.conn.recv_with_fds(&mut bytes, 0) {
            Ok(Io::Done(message)) => self.ask(&bytes[..message.len], observed, recorded_by),
            Ok(Io::Blocked) => true,
            Ok(Io::Closed) | Err(_) => false,
        }
    }

    fn ask(&mut self, request: &[u8], observed: &Observed, recorded_by: Option<u32>) -> bool {
        let what = request.strip_prefix(PROTOCOL.as_bytes()).and_then(|rest| rest.strip_prefix(b" "));
        match (&self.asked, what) {
            (Asked::Recording(_), _) => self.end_recording(observed),
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
            // A second request on one connection.
            _ => return false,
        }
        true
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
        self.more = true;
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
                self.more = false;
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
    pub fn flush(&mut self) -> Next {
        while let Some(message) = self.out.front() {
            match self.conn.send_with_fds(message, &[]) {
                Ok(Io::Done(_)) => {
                    self.out.pop_front();
                    self.until = Some(Instant::now() + READING);
                }
                Ok(Io::Blocked) => {
                    // One that had read everything may have stopped to read since.
                    self.until.get_or_insert_with(|| Instant::now() + READING);
                    return Next::Full;
                }
                Ok(Io::Closed) | Err(_) => return Next::Over,
            }
        }
        match self.asked {
            Asked::Nothing => Next::Wait,
            Asked::Recording(_) if self.more => Next::Full,
            Asked::Recording(_) => {
                // It has read everything: it may wait for the next transfer as long as it likes.
                self.until = None;
                Next::Wait
            }
            Asked::Snapshot | Asked::Ended => Next::Over,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvik_core::{Class, Code, EngineId, Error, Layout, Order, View};
    use kvik_engine::{Config, Ended, Engine};
    use kvik_proto::Select;
    use std::sync::Arc;

    /// A recorder that takes nothing by itself, of an engine that moves nothing, and its end of the connection.
    fn recorder() -> (Engine, Observed, Client, UnixConn) {
        let engine = Engine::start(Config::default()).unwrap();
        let observed = Observed::new(engine.downgrade(), json!({})).unwrap();
        let (conn, other) = UnixConn::pair().unwrap();
        // Room for more than what is written at a time, on every host.
        rustix::net::sockopt::set_socket_send_buffer_size(&conn, 212_992).unwrap();
        let mut client = Client::new(conn, 1);
        client.record(&observed);
        assert!(matches!(client.flush(), Next::Wait));
        (engine, observed, client, other)
    }

    /// A transfer whose line is a message of some 25 KB: of pages none of which follows another.
    fn ended() -> Ended {
        let layout = Arc::new(Layout::contiguous(10_000, 64).unwrap());
        let pages: Vec<u32> = (0..10_000).step_by(2).collect();
        Ended {
            began: boottime(),
            op: "read",
            class: Class::Bulk,
            owner: EngineId::random().unwrap(),
            layout_there: layout.digest(),
            shared_memory: false,
            view: View::new(layout, pages.into(), 0..1, 0..1, Order::LayerFirst).unwrap(),
            select: Select::default(),
            transport: None,
            sums: false,
            outcome: Err(Error::new(Code::PeerLost, "a transfer that moved nothing")),
            bytes: 0,
        }
    }

    #[test]
    fn what_waits_to_be_written_is_not_left_for_the_next_transfer_to_wake() {
        const TRANSFERS: usize = 20;
        let (_engine, observed, mut client, other) = recorder();
        for _ in 0..TRANSFERS {
            observed.recording.put(ended());
        }
        let (mut bytes, mut text) = (vec![0; PIECE], Vec::new());
        loop {
            client.feed(&observed);
            let next = client.flush();
            while let Io::Done(message) = other.recv_with_fds(&mut bytes, 0).unwrap() {
                text.extend_from_slice(&bytes[..message.len]);
            }
            // Nobody wakes it for what still waits, unless it asks to hear when there is room.
            match next {
                Next::Full => assert!(client.until().is_some()),
                _ => break,
            }
        }
        let text = String::from_utf8(text).unwrap();
        assert_eq!(text.lines().filter(|line| line.contains("\"op\"")).count(), TRANSFERS);
        assert!(client.until().is_none());
    }

    #[test]
    fn a_recorder_that_stops_reading_is_cut_when_the_socket_is_full() {
        let (_engine, observed, mut client, _other) = recorder();
        while matches!(client.flush(), Next::Wait) {
            assert!(client.until().is_none());
            observed.recording.put(ended());
            client.feed(&observed);
        }
        assert!(client.until().is_some());
    }
}
