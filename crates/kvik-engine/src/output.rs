//! Control connections' output: any thread may send what waits.

use crate::control::Ask;
use crate::shared::{Shared, lock};
use kvik_core::{Code, Error, Result};
use kvik_host::Io;
use kvik_host::socket::TcpConn;
use kvik_transport::from_host;
use std::sync::Mutex;

/// A buffer that was needed once is not kept beyond this.
const KEPT: usize = 64 << 10;

/// A session's control connection.
pub(crate) struct ControlConn {
    pub conn: TcpConn,
    out: Mutex<Out>,
}

#[derive(Default)]
struct Out {
    buffer: Vec<u8>,
    sent: usize,
    /// The socket is full, and the control thread waits for room.
    full: bool,
}

impl ControlConn {
    pub fn new(conn: TcpConn) -> ControlConn {
        ControlConn { conn, out: Mutex::default() }
    }

    /// Bytes that are held because the peer has not read them.
    pub fn held(&self) -> u64 {
        lock(&self.out).buffer.capacity() as u64
    }

    /// The socket has room again: the next [`Shared::flush`] sends.
    pub fn has_room(&self) {
        lock(&self.out).full = false;
    }
}

impl Shared {
    /// Sends what waits on a session's control connection, as far as the socket takes it.
    pub fn flush(&self, session: u64) {
        let Some(conn) = lock(&self.conns).get(&session).cloned() else { return };
        if let Err(error) = self.flush_some(session, &conn) {
            self.node(|node, _| node.close_session(session, error));
        }
    }

    fn flush_some(&self, session: u64, conn: &ControlConn) -> Result<()> {
        let mut out = lock(&conn.out);
        while !out.full {
            let Out { buffer, sent, full } = &mut *out;
            if *sent == buffer.len() {
                buffer.clear();
                buffer.shrink_to(KEPT);
                *sent = 0;
                self.take_output(session, buffer);
                if buffer.is_empty() {
                    return Ok(());
                }
            }
            match conn.conn.send(&buffer[*sent..]).map_err(|error| from_host(Code::PeerLost, error))? {
                Io::Done(moved) => *sent += moved,
                Io::Blocked => {
                    *full = true;
                    self.ask(Ask::WantWrite(session));
                }
                Io::Closed => return Err(closed_by_peer()),
            }
        }
        Ok(())
    }
}

/// The error for a control connection that has come to its end.
pub(crate) fn closed_by_peer() -> Error {
    Error::new(
        Code::PeerLost,
        "the peer closed the connection: it ended, or was closed; a new transfer connects again",
    )
}
