//! TCP sockets, set up the way kvik wants each of them: closed on exec, non-blocking, without Nagle's delay.
//!
//! Bulk data moves by [`SendBatch`](crate::SendBatch) and [`RecvBatch`](crate::RecvBatch), which take any of these.
//! A path is cut by [`TcpConn::shutdown_both`] and never only by closing: a forked child can hold the socket open.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketFlags, SocketType, ipproto,
    sockopt,
};

use crate::error::HostError;
use crate::event::{Interest, wait_ready};
use crate::runs::Io;

/// What may be chosen for a connection. The default leaves the kernel's own tuning alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpOptions {
    /// Bytes of the send buffer; `None` lets the kernel tune it, which is mostly better.
    pub send_buffer: Option<usize>,
    /// Bytes of the receive buffer; `None` lets the kernel tune it, which is mostly better.
    pub recv_buffer: Option<usize>,
}

/// A listening socket.
#[derive(Debug)]
pub struct TcpListener {
    fd: OwnedFd,
}

/// A connection, or one in the making.
#[derive(Debug)]
pub struct TcpConn {
    fd: OwnedFd,
}

impl TcpListener {
    /// Listens on `address`; port 0 lets the kernel choose one. An IPv6 listener takes no IPv4 connections.
    pub fn bind(address: SocketAddr, backlog: u16, options: &TcpOptions) -> Result<TcpListener, HostError> {
        let what = || format!("listening on {address}");
        let fd = socket(address)?;
        sockopt::set_socket_reuseaddr(&fd, true).map_err(|e| HostError::os(what(), e))?;
        if address.is_ipv6() {
            sockopt::set_ipv6_v6only(&fd, true).map_err(|e| HostError::os(what(), e))?;
        }
        // Buffers are set before listening: the window that a connection can ever have is agreed on at its start.
        set_buffers(&fd, options)?;
        rustix::net::bind(&fd, &address).map_err(|e| match e {
            Errno::ADDRINUSE => HostError::os(format!("{}: take another port, or 0 for any", what()), e),
            Errno::ADDRNOTAVAIL => HostError::os(format!("{}: this machine has no such address", what()), e),
            _ => HostError::os(what(), e),
        })?;
        rustix::net::listen(&fd, i32::from(backlog)).map_err(|e| HostError::os(what(), e))?;
        Ok(TcpListener { fd })
    }

    /// The address it listens on, with the port that the kernel chose.
    pub fn local_addr(&self) -> Result<SocketAddr, HostError> {
        local_addr(&self.fd)
    }

    /// Stops listening now, for every process that holds the socket: a forked child would otherwise keep the port
    /// taken, and connections waiting for somebody who is not there.
    pub fn stop(&self) -> Result<(), HostError> {
        shutdown(&self.fd, "stopping to listen")
    }

    /// A connection that waits to be accepted, if any, and where it comes from.
    pub fn accept(&self) -> Result<Option<(TcpConn, SocketAddr)>, HostError> {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let (fd, from) = match rustix::net::acceptfrom_with(&self.fd, flags) {
                Ok(accepted) => accepted,
                Err(Errno::AGAIN) => return Ok(None),
                Err(e) if is_of_the_connection(e) => continue,
                Err(Errno::MFILE | Errno::NFILE) => {
                    return Err(HostError::os("accepting a connection; raise ulimit -n", Errno::MFILE));
                }
                Err(e) => return Err(HostError::os("accepting a connection", e)),
            };
            let Some(from) = from.and_then(|from| SocketAddr::try_from(from).ok()) else { continue };
            set_up(&fd)?;
            return Ok(Some((TcpConn { fd }, from)));
        }
    }
}

impl TcpConn {
    /// Begins to connect. When the socket is writable, [`connected`](Self::connected) says how it went.
    pub fn start_connect(to: SocketAddr, options: &TcpOptions) -> Result<TcpConn, HostError> {
        let fd = socket(to)?;
        set_buffers(&fd, options)?;
        set_up(&fd)?;
        match rustix::net::connect(&fd, &to) {
            // An interrupted connect goes on by itself, like one in progress.
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(TcpConn { fd }),
            Err(e) => Err(connecting(to, e)),
        }
    }

    /// How connecting to `to` went, once the socket is writable.
    pub fn connected(&self, to: SocketAddr) -> Result<(), HostError> {
        sockopt::socket_error(&self.fd)
            .map_err(|e| HostError::os(format!("connecting to {to}"), e))?
            .map_err(|e| connecting(to, e))
    }

    /// Connects, waiting at most `timeout`.
    pub fn connect_within(
        to: SocketAddr,
        options: &TcpOptions,
        timeout: Duration,
    ) -> Result<TcpConn, HostError> {
        let conn = TcpConn::start_connect(to, options)?;
        if !wait_ready(&conn, Interest::WRITE, timeout)? {
            return Err(HostError::TimedOut { what: format!("connecting to {to}"), after: timeout });
        }
        conn.connected(to)?;
        Ok(conn)
    }

    /// This end's address.
    pub fn local_addr(&self) -> Result<SocketAddr, HostError> {
        local_addr(&self.fd)
    }

    /// Sends some of `bytes`. Never raises SIGPIPE.
    pub fn send(&self, bytes: &[u8]) -> Result<Io, HostError> {
        let sent = retry_on_intr(|| rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL));
        Io::of("sending", sent)
    }

    /// Sends some of `parts`, one after the other, in one call. Never raises SIGPIPE.
    pub fn send_parts(&self, parts: &[IoSlice<'_>]) -> Result<Io, HostError> {
        let mut control = SendAncillaryBuffer::default();
        let sent = retry_on_intr(|| rustix::net::sendmsg(&self.fd, parts, &mut control, SendFlags::NOSIGNAL));
        Io::of("sending", sent)
    }

    /// Receives what is there, up to the length of `into`, which is not zero.
    pub fn recv(&self, into: &mut [u8]) -> Result<Io, HostError> {
        if into.is_empty() {
            return Err(HostError::InvalidArgument("nothing can be received into no bytes".into()));
        }
        match retry_on_intr(|| rustix::net::recv(&self.fd, &mut *into, RecvFlags::empty())) {
            Ok((0, _)) => Ok(Io::Closed),
            came => Io::of("receiving", came.map(|(moved, _)| moved)),
        }
    }

    /// The connection is lost when bytes that were sent stay unacknowledged for this long, or wait for this long for
    /// the other side to read on.
    pub fn give_up_after(&self, time: Duration) -> Result<(), HostError> {
        let millis = u32::try_from(time.as_millis()).unwrap_or(u32::MAX).max(1);
        sockopt::set_tcp_user_timeout(&self.fd, millis)
            .map_err(|e| HostError::os("setting TCP_USER_TIMEOUT", e))
    }

    /// Ends both directions now, for every process that holds the socket. A connection that is already gone is
    /// no error.
    pub fn shutdown_both(&self) -> Result<(), HostError> {
        shutdown(&self.fd, "cutting a connection")
    }
}

impl AsFd for TcpListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsFd for TcpConn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn socket(address: SocketAddr) -> Result<OwnedFd, HostError> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP)).map_err(|e| match e {
        Errno::MFILE | Errno::NFILE => HostError::os("creating a TCP socket; raise ulimit -n", e),
        _ => HostError::os(format!("creating a TCP socket for {address}"), e),
    })
}

fn set_buffers(fd: &OwnedFd, options: &TcpOptions) -> Result<(), HostError> {
    if let Some(bytes) = options.send_buffer {
        sockopt::set_socket_send_buffer_size(fd, bytes)
            .map_err(|e| HostError::os(format!("setting a send buffer of {bytes} bytes"), e))?;
    }
    if let Some(bytes) = options.recv_buffer {
        sockopt::set_socket_recv_buffer_size(fd, bytes)
            .map_err(|e| HostError::os(format!("setting a receive buffer of {bytes} bytes"), e))?;
    }
    Ok(())
}

/// Ends both directions of a socket; one that is not connected is no error.
fn shutdown(fd: &OwnedFd, what: &str) -> Result<(), HostError> {
    match rustix::net::shutdown(fd, Shutdown::Both) {
        Ok(()) | Err(Errno::NOTCONN) => Ok(()),
        Err(e) => Err(HostError::os(what, e)),
    }
}

fn set_up(fd: &OwnedFd) -> Result<(), HostError> {
    sockopt::set_tcp_nodelay(fd, true).map_err(|e| HostError::os("setting TCP_NODELAY", e))
}

fn local_addr(fd: &OwnedFd) -> Result<SocketAddr, HostError> {
    let what = "asking for the address of a socket";
    let address = rustix::net::getsockname(fd).map_err(|e| HostError::os(what, e))?;
    SocketAddr::try_from(address).map_err(|e| HostError::os(what, e))
}

fn connecting(to: SocketAddr, error: Errno) -> HostError {
    let hint = match error {
        Errno::CONNREFUSED => ": nothing listens there",
        Errno::NETUNREACH | Errno::HOSTUNREACH => ": there is no way to that address from here",
        _ => "",
    };
    HostError::os(format!("connecting to {to}{hint}"), error)
}

/// Errors that `accept` passes on from the connection it would have given; the listener is well.
fn is_of_the_connection(error: Errno) -> bool {
    matches!(
        error,
        Errno::INTR
            | Errno::CONNABORTED
            | Errno::PROTO
            | Errno::NETDOWN
            | Errno::HOSTDOWN
            | Errno::HOSTUNREACH
            | Errno::NETUNREACH
            | Errno::NOPROTOOPT
            | Errno::NONET
    )
}
