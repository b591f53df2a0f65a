"""Two network namespaces that look to kvik like two hosts: own loopback, own addresses, a cable between, and
a rate and a delay for that cable.

The namespaces have no name and no file: they live while this process holds them open or a process runs in
them. So nothing stays behind, however their maker ends. To start something on a host, start it while inside:
children and threads stay in the namespace of the thread that starts them.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvik.roles import relay
from kvik.roles.processes import Process, ProcessError

CLONE_NEWNET = 0x40000000
LIMIT = 60.0  # seconds for a command of the operating system
OWN = "/proc/thread-self/ns/net"
CABLE = "eth0"
DELAYED_MTU = 60_000  # of a cable with a delay: few packets, as a program passes each
UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}  # those of tc(8), decimal as there
# What may leave at once before the rate holds: one packet as the kernel hands it over, before it is cut (64
# KiB and its headers).
BURST_BYTES = 66_000
QUEUE_SECONDS = 0.1  # how long a packet may wait at the cable before it is dropped


class CannotError(Exception):
    """This machine does not let us make network namespaces or shape a link; the text says what is missing."""


@dataclass(frozen=True)
class Rate:
    """A link's rate in bits a second, and the words in which it was asked for."""

    bits: float
    text: str

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """From `10gbit`, `2.5gbit` or `500mbit`; `ValueError` for anything else, and below 1 mbit."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?bit)(?:/s)?", text.strip().lower())
        if found is None:
            raise ValueError(f"{text!r} is not a rate; say for example 10gbit, 2.5gbit or 500mbit")
        rate = cls(float(found[1]) * UNITS[found[2]], f"{found[1]}{found[2]}")
        if rate.bits < UNITS["mbit"]:
            raise ValueError(f"{text!r} is too slow for KV; 1mbit is the least")
        return rate

    def seconds(self, nbytes: int) -> float:
        """The time in which `nbytes` pass: bytes / rate, framing not counted."""
        return nbytes * 8 / self.bits

    def floor(self, nbytes: int) -> float:
        """The least time for `nbytes` over a link that was shaped to this rate and idle before."""
        return self.seconds(max(0, nbytes - BURST_BYTES))

    def __str__(self) -> str:
        return self.text


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
        """Run a short command on this host and return what it prints; `RuntimeError` when it fails."""
        with self.inside():
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: status {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def shape(self, rate: Rate) -> None:
        """Let no more than `rate` leave by the cable from now on (a token bucket); `CannotError` where it is
        refused."""
        shape = ["rate", f"{rate.bits:.0f}bit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_SECONDS}s"]
        try:
            self.run("tc", "qdisc", "replace", "dev", CABLE, "root", "tbf", *shape)
        except FileNotFoundError:
            raise CannotError("`tc` (package iproute2) is not installed") from None
        except RuntimeError as error:
            missing = " (its kernel module is sch_tbf)" if "unknown" in str(error) else ""
            raise CannotError(f"the kernel shapes no link here{missing}: {error}") from error

    def sent(self) -> int:
        """The bytes that have left by the cable so far, framing included."""
        (link,) = json.loads(self.run("ip", "-json", "-statistics", "link", "show", CABLE))
        return int(link["stats64"]["tx"]["bytes"])


@contextlib.contextmanager
def two_hosts(delay: float = 0.0, log: Path | None = None) -> Iterator[tuple[Host, Host]]:
    """Make both hosts and the cable; raises `CannotError` where that is not allowed or `ip` is missing.

    With a `delay` (seconds, each way) a process carries the packets (`kvik.roles.relay`); its log is `log`.
    """
    if shutil.which("ip") is None:
        raise CannotError("`ip` (package iproute2) is not installed")
    with contextlib.ExitStack() as stack:
        left, right = (
            Host(name, f"10.77.1.{number}", f"fd77::{number}", stack.enter_context(_namespace()))
            for number, name in ((1, "left"), (2, "right"))
        )
        if delay > 0:
            stack.enter_context(_delaying(left, right, delay, log or Path(os.devnull)))
        try:
            _connect(left, right, made=delay > 0)
        except RuntimeError as error:
            raise CannotError(f"the kernel gives no cable between two hosts here: {error}") from error
        yield left, right


def _connect(left: Host, right: Host, *, made: bool) -> None:
    """Give both hosts their addresses, and the cable where it is not `made` yet."""
    if not made:
        peer = ["peer", "name", CABLE, "netns", _file(right)]
        left.run("ip", "link", "add", CABLE, "type", "veth", *peer)
    for host in (left, right):
        host.run("ip", "link", "set", "lo", "up")
        host.run("ip", "address", "add", f"{host.v4}/24", "dev", CABLE)
        # Without duplicate address detection the address can be used at once.
        host.run("ip", "address", "add", f"{host.v6}/64", "dev", CABLE, "nodad")
        host.run("ip", "link", "set", CABLE, "up")
        _control_congestion(host)


def _control_congestion(host: Host) -> None:
    """Let what leaves by the cable use Linux's default congestion control, whatever this machine uses.

    BBR takes a token bucket, which passes its burst at once, for a fast link: behind one that was shaped to
    1 Gbit/s, two engines' connections lost so much that some stood still for seconds. Where there is no
    cubic, the machine's own stays.
    """
    # The kernel's own routes, of which those of IPv6 have this metric.
    for family, *network in (("-4", "10.77.1.0/24"), ("-6", "fd77::/64", "metric", "256")):
        with contextlib.suppress(RuntimeError):
            host.run("ip", family, "route", "replace", *network, "dev", CABLE, "congctl", "cubic")


@contextlib.contextmanager
def _delaying(left: Host, right: Host, delay: float, log: Path) -> Iterator[None]:
    """A cable that a process carries."""
    devices = [_file(left), _file(right), CABLE, str(delay), str(DELAYED_MTU)]
    process = Process("cable", [sys.executable, "-S", relay.__file__, *devices], log, grace=0.0)
    try:
        process.wait_until(lambda: _has_cable(left) and _has_cable(right), time.monotonic() + LIMIT)
        yield
    except ProcessError as error:
        raise CannotError(f"no cable with a delay: {error}") from error
    finally:
        process.stop()


def _has_cable(host: Host) -> bool:
    return CABLE in host.run("ip", "-br", "link")


def _file(host: Host) -> str:
    return f"/proc/{os.getpid()}/fd/{host.fd}"


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """A descriptor of a new network namespace, which goes when this and all processes in it are gone."""
    before = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            if number in (errno.EPERM, errno.ENOSYS, errno.EINVAL):
                raise CannotError(
                    f"no new network namespace: {os.strerror(number)}; it takes root (CAP_SYS_ADMIN), and in "
                    "a container one that is privileged"
                )
            raise OSError(number, "unshare")
        try:
            made = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
        finally:
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
