"""Two network namespaces that look to kvik like two hosts: own loopback, own addresses, a cable between.

The namespaces have no name and no file: they live while this process holds them open or a process runs in
them. So nothing stays behind, however the tests end. To start something on a host, start it while inside:
children and threads stay in the namespace of the thread that starts them.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000
LIMIT = 10.0  # seconds for a command of the operating system
OWN = "/proc/thread-self/ns/net"


class CannotError(Exception):
    """This machine does not let us make network namespaces; the text says what is missing."""


@dataclass(frozen=True)
class Host:
    """One namespace. `v4` and `v6` are its addresses on the cable."""

    name: str
    v4: str
    v6: str
    fd: int

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is on this host within the block, and so is all that it starts there."""
        before = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(self.fd)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)

    def run(self, *command: str) -> str:
        """Run a short command on this host and return what it prints; raises when it fails."""
        with self.inside():
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: status {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def listening(self) -> list[str]:
        """The `ADDRESS:PORT` of every TCP socket that listens on this host."""
        return sorted(line.split()[3] for line in self.run("ss", "-ltnH").splitlines())

    def connections(self) -> list["Connection"]:
        """The TCP connections of this host."""
        lines = self.run("ss", "-tnHOi", "state", "established").splitlines()
        return [Connection.parse(line) for line in lines]


@dataclass(frozen=True)
class Connection:
    """One established TCP connection, and the bytes that it has carried so far."""

    local: str
    peer: str
    acknowledged: int
    received: int

    @classmethod
    def parse(cls, line: str) -> "Connection":
        """From a line of `ss -tnHOi state established`."""
        _, _, local, peer, *rest = line.split()
        counts = dict(word.split(":", 1) for word in rest if word.count(":") == 1)
        return cls(local, peer, int(counts.get("bytes_acked", 0)), int(counts.get("bytes_received", 0)))


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make both hosts and the cable; raises `CannotError` where that is not allowed or `ip` is missing."""
    for program in ("ip", "ss"):
        if shutil.which(program) is None:
            raise CannotError(f"`{program}` (package iproute2) is not installed")
    with contextlib.ExitStack() as stack:
        left, right = (
            Host(name, f"10.77.1.{number}", f"fd77::{number}", stack.enter_context(_namespace()))
            for number, name in ((1, "left"), (2, "right"))
        )
        other_end = f"/proc/{os.getpid()}/fd/{right.fd}"
        left.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", other_end)
        for host in (left, right):
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "address", "add", f"{host.v4}/24", "dev", "eth0")
            # Without duplicate address detection the address can be used at once.
            host.run("ip", "address", "add", f"{host.v6}/64", "dev", "eth0", "nodad")
            host.run("ip", "link", "set", "eth0", "up")
        yield left, right


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """A descriptor of a new network namespace, which goes when this and all processes in it are gone."""
    before = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            if number in (errno.EPERM, errno.ENOSYS, errno.EINVAL):
                raise CannotError(f"no new network namespace: {os.strerror(number)}")
            raise OSError(number, "unshare")
        made = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
        _enter(before)
    finally:
        os.close(before)
    try:
        yield made
    finally:
        os.close(made)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
