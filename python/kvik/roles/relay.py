"""A cable with a delay between two network namespaces: `python relay.py LEFT RIGHT DEVICE DELAY MTU`.

`LEFT` and `RIGHT` are files of namespaces (`/proc/PID/fd/N`). In each it makes a TUN device of that name,
and what the kernel sends by one comes out of the other `DELAY` seconds later, packets in their order. It
prints `ready` when both are there; the cable lasts as long as the process. (netem would do the same in
the kernel, where it has that module; TUN needs /dev/net/tun and CAP_NET_ADMIN alone. Source: Linux,
Documentation/networking/tuntap.rst.)

This file needs nothing but the standard library, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
WAITING_BYTES = 256 << 20  # in the cable, each way; a cable that holds more drops packets


class Way:
    """One direction: what came, and when it is due."""

    def __init__(self, source: int, sink: int, delay: float) -> None:
        self.source, self.sink, self.delay = source, sink, delay
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.bytes = 0

    def take(self) -> None:
        """Read what has come."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, 65536)
                if self.bytes < WAITING_BYTES:
                    self.waiting.append((time.monotonic() + self.delay, packet))
                    self.bytes += len(packet)

    def give(self) -> float | None:
        """Pass on what is due; returns when the next packet is, None where none waits."""
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            _, packet = self.waiting.popleft()
            self.bytes -= len(packet)
            # The other device is down, or has no room: a cable drops, and TCP sends again.
            with contextlib.suppress(OSError):
                os.write(self.sink, packet)
        return self.waiting[0][0] if self.waiting else None


def make_device(namespace: str, name: str, mtu: int) -> int:
    """A TUN device in a namespace; a descriptor for its other side. The calling thread stays there."""
    with open(namespace) as file:  # noqa: PTH123
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"{namespace}: cannot be entered")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "mtu", str(mtu), "txqueuelen", "1000"], check=True)
    return device


def main(arguments: list[str]) -> int:
    """Be the cable until a signal comes."""
    left, right, name, delay, mtu = arguments
    one, other = (make_device(namespace, name, int(mtu)) for namespace in (left, right))
    ways = {one: Way(one, other, float(delay)), other: Way(other, one, float(delay))}
    print("ready", flush=True)
    while True:
        due = [at for way in ways.values() if (at := way.give()) is not None]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        for device in select.select(list(ways), [], [], timeout)[0]:
            ways[device].take()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
