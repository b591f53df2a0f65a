"""The two hosts of `kvik.roles.hosts`, with what the tests want to know of their sockets."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from kvik.roles import hosts
from kvik.roles.hosts import CannotError as CannotError  # those who ask for hosts have to expect it


@dataclass(frozen=True)
class Host(hosts.Host):
    """One namespace, whose sockets can be listed."""

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
    """Make both hosts and the cable; raises `CannotError` where that is not allowed or `ss` is missing."""
    if shutil.which("ss") is None:
        raise CannotError("`ss` (package iproute2) is not installed")
    with hosts.two_hosts() as (left, right):
        yield _with_sockets(left), _with_sockets(right)


def _with_sockets(host: hosts.Host) -> Host:
    return Host(host.name, host.v4, host.v6, host.fd)
