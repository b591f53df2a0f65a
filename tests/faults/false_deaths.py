"""A busy peer is not a dead one: what may slow engines down without one of them being taken for dead.

    python -m tests.faults.false_deaths --minutes 10 --peers 50

A hub and its peers, several engines a process, move bytes now and then and have a transfer each open that
waits all the time. Meanwhile processes keep every core busy, one peer process after the other holds Python's
lock for 5 s or is stopped for 1 s, and a pair on two hosts fills a link whose rate is bounded (`tbf`). Nobody
may be declared dead, and no transfer may end but by success. A machine that stands still makes deaths of its
own: such a run says nothing.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from kvik.roles.hosts import CannotError, Rate, two_hosts
from tests.busy import Watch
from tests.faults.clock import HANG
from tests.faults.crowd import DEADLINE, start
from tests.faults.scene import HostPair
from tests.faults.side import Handle
from tests.faults.tables import print_table
from tests.python.peers import Peer, random_seed, stop

GIL_SECONDS, STOP_SECONDS = 5.0, 1.0
TOO_LONG = 1.5  # seconds: after a stop of this length, who was stopped may rightly be dead
PAUSE = 3.0  # seconds between two mishaps, and between two reads of a peer
LINK = "50mbit"
SAYS_NOTHING = 2  # the exit status of a run that is neither good nor bad
BULK = 16 << 20  # bytes of a transfer on the link: 2.7 s


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compute all the time."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


class InvalidError(Exception):
    """The run says nothing, and why."""


class FullLink:
    """Two engines on two hosts that fill the cable between them, both ways."""

    def __init__(self, stack: contextlib.ExitStack, expiry: float) -> None:
        hosts = stack.enter_context(two_hosts())
        for host in hosts:
            host.shape(Rate.parse(LINK))
        self.pair = HostPair(hosts)
        stack.callback(self.pair.close)
        self.moved = 0
        tickets = {}
        for name, side in self.pair.sides.items():
            side.ask("hold", name="m", nbytes=BULK)
            side.ask("hold", name="t", nbytes=BULK)
            said = side.ask("grant", name="m", page_bytes=65536, right="read", expiry=expiry)
            tickets[name] = said["ticket"]
        self.tickets = {"here": tickets["there"], "there": tickets["here"]}
        self.failures: list[str] = []
        # Two that connect to each other at once close one of two connections, and nobody has died.
        self.begin_at("here")
        self.wait_at("here", DEADLINE)

    def begin_at(self, name: str) -> None:
        """One transfer to a side."""
        ticket = self.tickets[name]
        side = self.pair.sides[name]
        side.ask("begin", name="t", ticket=ticket, op="read", page_bytes=65536, deadline=DEADLINE)

    def wait_at(self, name: str, timeout: float) -> None:
        """Wait for it."""
        side = self.pair.sides[name]
        (end,) = side.ask("ends", within=timeout + HANG, timeout=timeout)["ends"]
        if end is None or end["code"]:
            self.failures.append(str(end))
        self.moved += BULK

    def begin(self) -> None:
        """One transfer each way."""
        for name in self.tickets:
            self.begin_at(name)

    def go_on(self, timeout: float) -> None:
        """Wait for both, and begin the next ones."""
        for name in self.tickets:
            self.wait_at(name, timeout)
        self.begin()

    def lost(self) -> int:
        """Sessions that ended."""
        return sum(int(side.ask("counts")["stats"]["sessions_lost"]) for side in self.pair.sides.values())


@contextlib.contextmanager
def swift() -> Iterator[None]:
    """Ahead of all that is busy, where the user may: a stop of a second must not become one of two."""
    before = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


class Trouble:
    """The mishaps, one after the other."""

    def __init__(self, peers: list[Peer], seed: int) -> None:
        self.peers, self.dice = peers, random.Random(seed)
        self.free_at = [0.0] * len(peers)
        self.waiting: set[int] = set()
        self.stops = self.holds = 0
        self.longest = 0.0  # seconds that a process really stood still

    def strike(self) -> None:
        """Stop one process for a second, or let it hold its lock for five."""
        now = time.monotonic()
        free = [i for i, at in enumerate(self.free_at) if at < now]
        if not free:
            return
        number = self.dice.choice(free)
        peer = self.peers[number]
        if number in self.waiting:
            peer.hear(HANG)
            self.waiting.discard(number)
        if self.dice.random() < 0.4:
            peer.say(call="hold_gil", seconds=GIL_SECONDS)
            self.waiting.add(number)
            self.free_at[number] = now + GIL_SECONDS + 2.0
            self.holds += 1
        else:
            with swift():
                began = time.monotonic()
                stop(peer.pid)
                time.sleep(max(0.0, began + STOP_SECONDS - time.monotonic()))
                os.kill(peer.pid, signal.SIGCONT)
                self.longest = max(self.longest, time.monotonic() - began)
            self.stops += 1

    def over(self) -> None:
        """Wait until none is under way."""
        for number in self.waiting:
            self.peers[number].hear(GIL_SECONDS + HANG)
        self.waiting.clear()


def endure(peers: list[Peer], seconds: float, seed: int, full: FullLink | None) -> Trouble:
    """Let time pass, with mishaps."""
    trouble = Trouble(peers, seed)
    until = time.monotonic() + seconds
    if full is not None:
        full.begin()
    while time.monotonic() < until:
        trouble.strike()
        if full is not None:
            full.go_on(DEADLINE)
        else:
            time.sleep(trouble.dice.random() * PAUSE)
    trouble.over()
    return trouble


def measure(options: argparse.Namespace, seed: int) -> list[list[Any]]:
    """Rows of the table."""
    seconds = options.minutes * 60
    expiry = seconds + 600.0  # of what must not end before the measurement does
    with contextlib.ExitStack() as stack:
        hub = Handle(name="hub").ready()
        stack.callback(hub.close)
        peers = start(max(1, min(options.processes, options.peers)), options.peers, "auto")
        for peer in peers:
            stack.enter_context(peer)
        hub.ask("hold", name="m", nbytes=65536)
        granted = hub.ask("grant", name="m", page_bytes=16384, right="read", expiry=expiry)["ticket"]
        promised = hub.ask("promise", expiry=expiry)["ticket"]
        for peer in peers:
            peer.say(call="work", ticket=granted, promised=promised, deadline=expiry, pause=PAUSE)
        for peer in peers:
            peer.hear(HANG)
        full = None
        try:
            full = FullLink(stack, expiry)
        except CannotError as cannot:
            print(f"without a full link: {cannot}")
        stack.enter_context(busy(options.busy))
        watch = Watch()
        hub.ask("stood")
        trouble = endure(peers, seconds, seed, full)
        still = max(watch.longest(), float(hub.ask("stood")["longest"]))
        for peer in peers:
            peer.say(call="counts")
        counts = [peer.hear(HANG) for peer in peers]
        lost = int(hub.ask("counts")["stats"]["sessions_lost"])
        link_lost = 0 if full is None else full.lost()
    if trouble.longest > TOO_LONG:
        raise InvalidError(f"the machine made {trouble.longest:.1f} s of a stop of {STOP_SECONDS} s")
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    rows: list[list[Any]] = [[
        "hub, peers", options.peers, seconds, trouble.stops, trouble.longest, trouble.holds,
        total["transfers_ok"], total["transfers_failed"] + total["ended"], total["sessions_lost"] + lost,
        total["late"],
    ]]  # fmt: skip
    if full is not None:
        moved = full.moved // BULK
        rows.append([f"full link, {LINK}", 2, seconds, 0, "-", 0, moved, len(full.failures), link_lost, 0])
    if violations(rows) and still > TOO_LONG - STOP_SECONDS:
        raise InvalidError(f"the machine stood still for {still:.1f} s, and {violations(rows)} went wrong")
    return rows


def violations(rows: list[list[Any]]) -> int:
    """Transfers that failed, and deaths."""
    return sum(int(row[7] + row[8]) for row in rows)


def main(arguments: list[str] | None = None) -> int:
    """Endure it; 0 if nobody was taken for dead and no transfer ended, 2 if the run says nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--peers", type=int, default=50)
    parser.add_argument("--processes", type=int, default=10, help="processes that the peers are in")
    parser.add_argument("--busy", type=int, default=8, help="processes that compute all the time")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = random_seed() if options.seed is None else options.seed
    try:
        rows = measure(options, seed)
    except InvalidError as invalid:
        print(f"seed {seed}: this run says nothing: {invalid}; try again on a machine with less to do")
        return SAYS_NOTHING
    heads = [
        "what",
        "peers",
        "s",
        "stops of 1 s",
        "longest s",
        "locks held 5 s",
        "transfers",
        "failed",
        "deaths",
        "late beats",
    ]
    print_table(heads, rows)
    bad = violations(rows)
    print(f"seed {seed}: violations {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
