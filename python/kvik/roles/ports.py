"""Ports of one host: which are free, and who listens on those that are not.

`python ports.py free COUNT` and `python ports.py holders PORT...` print the same as JSON. This file needs
nothing but the standard library, so that its text can be sent to a machine that has no kvik.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
FIRST_PORT = 10000  # well-known services and their neighbours are below
TRIED = 1000  # ports looked at before none is said to be free
HELD = 64  # ports that a process keeps others from choosing, the latest; no graph of roles has so many
_held: list[int] = []  # sockets, of which nothing is ever sent
_LISTENS = "0A"  # the state LISTEN in /proc/net/tcp (include/net/tcp_states.h)


@dataclass(frozen=True)
class Holder:
    """Who listens on a port. `pid` is 0 where that may not be seen, or the process is in another
    namespace."""

    port: int
    pid: int
    command: str

    def __str__(self) -> str:
        if not self.pid:
            return f"port {self.port} is taken by a process that cannot be seen from here"
        return f"port {self.port} is taken by process {self.pid}: {self.command}"


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that are free now, and that no outgoing connection is given later;
    `OSError` where there are not so many.

    The kernel gives connections that go out a port of `ip_local_port_range`; a server that starts a
    moment later, or again after it was killed, could then find its own taken. So these are chosen at
    random beside that range, and while this process lives no other one's call gives the same ones.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in random.sample(_beside(_ephemeral()), k=TRIED):
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((LOOPBACK, port))
                _hold(port)
                ports.append(port)
            if len(ports) == count:
                return ports
    raise OSError(f"{count} free ports are needed, and of {TRIED} that were tried {len(ports)} are")


def _hold(port: int) -> None:
    """Keep other processes of this network namespace from choosing the port, until it has a server or this
    process ends: by a name that the kernel gives once, and takes back by itself. `OSError` where another
    process holds it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        name.bind(f"\0kvik-port-{port}")
        _held.append(name.detach())
    if len(_held) > HELD:
        os.close(_held.pop(0))


def holders(ports: Iterable[int]) -> list[Holder]:
    """Who listens on these TCP ports, at any address of this host (the calling thread's network
    namespace)."""
    wanted = set(ports)
    sockets: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/thread-self/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                port = int(fields[1].rpartition(":")[2], 16)
                if fields[3] == _LISTENS and port in wanted:
                    sockets[f"socket:[{fields[9]}]"] = port
    owners = _owners(sockets) if sockets else {}
    found = {
        Holder(port, pid, _command(pid)) for name, port in sockets.items() for pid in owners.get(name, {0})
    }
    return sorted(found, key=lambda one: (one.port, one.pid))


def _owners(sockets: Iterable[str]) -> dict[str, set[int]]:
    """The processes that have these sockets, as far as they may be looked at."""
    found: dict[str, set[int]] = {}
    wanted = set(sockets)
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208  (names are enough)
        with contextlib.suppress(OSError):
            for fd in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    name = os.readlink(fd.path)  # noqa: PTH115  (it is no path)
                    if name in wanted:
                        found.setdefault(name, set()).add(pid)
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()[:200]
        )
    return ""


def _ephemeral() -> range:
    """The ports that the kernel gives to connections that go out."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(low), int(high) + 1)


def _beside(taken: range) -> list[int]:
    """Ports that need no privilege and are outside `taken`; all of them, if `taken` leaves hardly any."""
    free = [port for port in range(FIRST_PORT, 65536) if port not in taken]
    return free if len(free) >= TRIED else list(range(FIRST_PORT, 65536))


def main(arguments: list[str]) -> int:
    """`free COUNT` or `holders PORT...`, as JSON."""
    numbers = [int(one) for one in arguments[1:]]
    found = free_ports(*numbers) if arguments[0] == "free" else [asdict(one) for one in holders(numbers)]
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
