//! Messages between processes of one host, with descriptors in them.
//!
//! Sockets of type `SEQPACKET` keep the boundaries of messages, so a message and its descriptors come together or
//! not at all. Names are abstract: they leave no file behind and have no permissions either, so each side looks at
//! the [credentials](UnixConn::credentials) of the other before it believes it.
//!
//! All sockets are non-blocking. The `_within` functions wait, for a bounded time.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use crate::error::HostError;
use crate::event::{Interest, wait_ready};
use crate::runs::Io;

/// The most descriptors in one message.
pub const MAX_FDS: usize = 16;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 64;

/// Who is at the other end, as the kernel recorded it when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Effective user.
    pub uid: u32,
    /// Process number, as seen from this PID namespace; `None` if it is not visible from here.
    pub pid: Option<u32>,
}

/// A message that was received.
#[derive(Debug)]
pub struct Received {
    /// Bytes of the message, at the start of the buffer.
    pub len: usize,
    /// Its descriptors, closed on exec.
    pub fds: Vec<OwnedFd>,
}

/// A listening socket with an abstract name.
#[derive(Debug)]
pub struct UnixListener {
    fd: OwnedFd,
}

/// One end of a connection.
#[derive(Debug)]
pub struct UnixConn {
    fd: OwnedFd,
}

impl UnixListener {
    /// Listens under an abstract name (without the leading zero byte).
    pub fn bind(name: &str) -> Result<UnixListener, HostError> {
        let fd = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        let address = abstract_name(name)?;
        let what = || format!("listening on the abstract UNIX socket {name:?}");
        rustix::net::bind(&fd, &address).map_err(|e| HostError::os(what(), e))?;
        rustix::net::listen(&fd, BACKLOG).map_err(|e| HostError::os(what(), e))?;
        Ok(UnixListener { fd })
    }

    /// A connection that waits to be accepted, if any.
    pub fn accept(&self) -> Result<Option<UnixConn>, HostError> {
        loop {
            match rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(fd) => return Ok(Some(UnixConn { fd })),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(e) => return Err(HostError::os("accepting on a UNIX socket", e)),
            }
        }
    }

    /// Refuses every further connection, also while a forked child still holds the socket.
    pub fn stop(&self) -> Result<(), HostError> {
        rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both)
            .map_err(|e| HostError::os("stopping a UNIX listener", e))
    }
}

impl UnixConn {
    /// Connects to an abstract name; waits at most `timeout` for room in the listener's queue.
    pub fn connect(name: &str, timeout: Duration) -> Result<UnixConn, HostError> {
        // A non-blocking connect that finds the queue full cannot be waited for; a blocking one obeys the timeout
        // for sending.
        let fd = socket(SocketFlags::CLOEXEC)?;
        let address = abstract_name(name)?;
        let what = || format!("connecting to the abstract UNIX socket {name:?}");
        let bound = timeout.max(Duration::from_millis(1));
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(bound))
            .map_err(|e| HostError::os(what(), e))?;
        rustix::io::retry_on_intr(|| rustix::net::connect(&fd, &address)).map_err(|e| match e {
            Errno::AGAIN => HostError::TimedOut { what: what(), after: bound },
            other => HostError::os(what(), other),
        })?;
        rustix::io::ioctl_fionbio(&fd, true).map_err(|e| HostError::os(what(), e))?;
        Ok(UnixConn { fd })
    }

    /// Two connected ends in this process.
    pub fn pair() -> Result<(UnixConn, UnixConn), HostError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map(|(a, b)| (UnixConn { fd: a }, UnixConn { fd: b }))
            .map_err(|e| HostError::os("creating a pair of UNIX sockets", e))
    }

    /// Who is at the other end.
    pub fn credentials(&self) -> Result<Credentials, HostError> {
        let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into `found`, which has that many.
        let status = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &mut len,
            )
        };
        if status != 0 || len as usize != size_of::<libc::ucred>() {
            return Err(HostError::last_os("asking who is at the other end of a UNIX socket"));
        }
        Ok(Credentials { uid: found.uid, pid: u32::try_from(found.pid).ok().filter(|pid| *pid != 0) })
    }

    /// As [`credentials`](Self::credentials), refusing every user but this process's own. Both sides ask: an abstract
    /// name can be taken by anybody first.
    pub fn same_user(&self) -> Result<Credentials, HostError> {
        let who = self.credentials()?;
        let own = rustix::process::geteuid().as_raw();
        if who.uid == own {
            return Ok(who);
        }
        let why = format!("it belongs to user {}, this process to {own}; run both as one user", who.uid);
        Err(HostError::ProcessRefused { pid: who.pid.unwrap_or(0), why })
    }

    /// Sends one message with at most [`MAX_FDS`] descriptors, if there is room for it now.
    pub fn send_with_fds(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Io, HostError> {
        if bytes.is_empty() {
            // An empty message cannot be told from the end of the connection.
            return Err(HostError::InvalidArgument("a message has at least one byte".into()));
        }
        if fds.len() > MAX_FDS {
            return Err(HostError::TooManyDescriptors { got: fds.len(), max: MAX_FDS });
        }
        let mut space = [MaybeUninit::<u8>::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(HostError::TooManyDescriptors { got: fds.len(), max: MAX_FDS });
        }
        let sent = rustix::io::retry_on_intr(|| {
            rustix::net::sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
        });
        Io::of("sending on a UNIX socket", sent)
    }

    /// Receives one message with at most `max_fds` descriptors, if one is there. A message that is longer than
    /// `into`, or has more descriptors, is refused, and all descriptors that came with it are closed.
    pub fn recv_with_fds(&self, into: &mut [u8], max_fds: usize) -> Result<Io<Received>, HostError> {
        // One more than is ever taken, so that one too many is counted and not just cut off.
        let mut space = [MaybeUninit::<u8>::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let came = rustix::io::retry_on_intr(|| {
            let mut parts = [IoSliceMut::new(into)];
            rustix::net::recvmsg(&self.fd, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
        });
        let came = match came {
            Ok(came) => came,
            Err(Errno::AGAIN) => return Ok(Io::Blocked),
            Err(e) => return Err(HostError::connection("receiving on a UNIX socket", e)),
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        // From here on `fds` owns whatever came, and an early return closes it.
        if came.flags.contains(ReturnFlags::CTRUNC) {
            let none = "this process has no room for its descriptors: raise ulimit -n";
            let what = if fds.len() > MAX_FDS { "its descriptors did not fit" } else { none };
            return Err(HostError::MessageTruncated { what });
        }
        if came.flags.contains(ReturnFlags::TRUNC) {
            return Err(HostError::MessageTruncated { what: "it is longer than the buffer" });
        }
        if fds.len() > max_fds.min(MAX_FDS) {
            return Err(HostError::TooManyDescriptors { got: fds.len(), max: max_fds.min(MAX_FDS) });
        }
        if came.bytes == 0 {
            return Ok(Io::Closed);
        }
        Ok(Io::Done(Received { len: came.bytes, fds }))
    }

    /// As [`send_with_fds`](Self::send_with_fds), waiting at most `timeout` for room.
    pub fn send_within(
        &self,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<(), HostError> {
        let begun = Instant::now();
        while self.send_with_fds(bytes, fds)? == Io::Blocked {
            self.wait(Interest::WRITE, begun, timeout, "sending on a UNIX socket")?;
        }
        Ok(())
    }

    /// As [`recv_with_fds`](Self::recv_with_fds), waiting at most `timeout` for a message; `None` if the other end
    /// closed the connection.
    pub fn recv_within(
        &self,
        into: &mut [u8],
        max_fds: usize,
        timeout: Duration,
    ) -> Result<Option<Received>, HostError> {
        let begun = Instant::now();
        loop {
            match self.recv_with_fds(into, max_fds)? {
                Io::Done(received) => return Ok(Some(received)),
                Io::Closed => return Ok(None),
                Io::Blocked => self.wait(Interest::READ, begun, timeout, "receiving on a UNIX socket")?,
            }
        }
    }

    fn wait(
        &self,
        interest: Interest,
        begun: Instant,
        timeout: Duration,
        what: &str,
    ) -> Result<(), HostError> {
        if wait_ready(&self.fd, interest, timeout.saturating_sub(begun.elapsed()))? {
            Ok(())
        } else {
            Err(HostError::TimedOut { what: what.into(), after: timeout })
        }
    }
}

impl AsFd for UnixListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsFd for UnixConn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn socket(flags: SocketFlags) -> Result<OwnedFd, HostError> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|e| HostError::os("creating a UNIX socket", e))
}

fn abstract_name(name: &str) -> Result<SocketAddrUnix, HostError> {
    if name.is_empty() {
        return Err(HostError::InvalidArgument("an abstract UNIX socket needs a name".into()));
    }
    SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(|e| HostError::os(format!("name of an abstract UNIX socket: {name:?}"), e))
}
