"""How soon a peer's death is noticed, and how soon it is there again.

    python -m tests.faults.detection --kills 200 --stops 200

One engine, the hub, has transfers open with many peers, each a process of its own: one that waits for a grant
which never comes, and one that moves bytes. In rounds, the peers are killed (or stopped) at random moments.
Measured is the time from each fault until the hub's transfers with that peer have ended, and from its return
(its new engine runs; or SIGCONT) until the hub has read from it again. Defaults everywhere. Time in which the
machine stood still is left out (`tests.faults.clock`).
"""

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

from tests.faults.clock import HANG, Clock
from tests.faults.side import Handle, Reply
from tests.faults.tables import print_table, spread
from tests.python.peers import random_seed, stop

NBYTES = 4 << 20
PAGE = 16 << 10
ENDED, AGAIN = 2.5, 2.0  # seconds: what is promised
SPAN = 0.8  # seconds in which the peers of a round are hit
DEADLINE = 60.0  # seconds: far beyond all that is measured
EXPIRY = 3600.0  # seconds, of what must not end before the measurement does


class Round:
    """The hub and its peers, through all rounds."""

    def __init__(self, count: int, seed: int) -> None:
        self.dice = random.Random(seed)
        self.hub = Handle(name="hub").ready()
        self.hub.ask("hold", name="m", nbytes=NBYTES)
        self.peers = [self.launch(number) for number in range(count)]
        self.tickets = [self.greet(peer) for peer in self.peers]
        self.ended: list[float] = []
        self.again: list[float] = []
        self.codes: Counter[str] = Counter()
        self.wrong: list[str] = []

    def launch(self, number: int) -> Handle:
        """Start a peer, without waiting for it."""
        return Handle(name=f"peer {number}", transport="tcp" if number % 2 else "auto", io_threads=1)

    def greet(self, peer: Handle) -> dict[str, str]:
        """Wait for a peer; the tickets that it gives."""
        peer.ready()
        peer.ask("hold", name="m", nbytes=NBYTES)
        granted = peer.ask("grant", name="m", page_bytes=PAGE, right="read", expiry=EXPIRY)["ticket"]
        return {"granted": granted, "promised": peer.ask("promise", expiry=EXPIRY)["ticket"]}

    def read(self, ticket: str, deadline: float) -> None:
        """The hub begins to read."""
        self.hub.ask("begin", name="m", ticket=ticket, op="read", page_bytes=PAGE, deadline=deadline)

    def wait_on(self, ticket: str) -> None:
        """The hub begins to read what is never granted."""
        self.hub.ask("begin_part", name="m", ticket=ticket, deadline=DEADLINE)

    def run(self, fault: str) -> None:
        """All peers are hit once, and come back."""
        # Who is there for the first time is connected to first, so that what is measured is a session's end.
        for tickets in self.tickets:
            self.read(tickets["granted"], DEADLINE)
        self.hear(HANG)
        for tickets in self.tickets:
            self.wait_on(tickets["promised"])
        order = list(range(len(self.peers)))
        self.dice.shuffle(order)
        hit: dict[int, float] = {}
        clocks: dict[int, Clock] = {}
        for number in order:
            time.sleep(self.dice.random() * 2 * SPAN / len(order))
            clocks[number] = Clock(self.hub)
            self.read(self.tickets[number]["granted"], DEADLINE)
            if fault == "kill":
                os.kill(self.peers[number].pid, signal.SIGKILL)
            else:
                stop(self.peers[number].pid)
            hit[number] = time.monotonic()
        ends = self.hear(HANG)
        self.note({number: at + clocks[number].stood() for number, at in hit.items()}, order, ends)
        for number in order:
            self.again.append(self.come_back(number, fault))

    def hear(self, timeout: float) -> list[Reply | None]:
        """The ends of all that the hub has begun."""
        ends: list[Reply | None] = self.hub.ask("ends", timeout=timeout, within=timeout + 30.0)["ends"]
        return ends

    def note(self, hit: dict[int, float], order: list[int], ends: list[Reply | None]) -> None:
        """What ended when: the waiting ones in the peers' order, the reads in the order of the faults.

        `hit` is when each peer was hit, later by as long as the hub stood still since then.
        """
        whose = [*range(len(order)), *order]
        for number, end in zip(whose, ends, strict=True):
            if end is None:
                self.wrong.append(f"a transfer with peer {number} had not ended")
                continue
            self.codes[end["code"] or "ok"] += 1
            if end["code"]:
                self.ended.append(max(0.0, end["at"] - hit[number]))

    def come_back(self, number: int, fault: str) -> float:
        """A peer returns: seconds until the hub has read from it."""
        if fault == "kill":
            self.peers[number].close()
            self.peers[number] = self.launch(number)
            self.tickets[number] = self.greet(self.peers[number])
            # Its engine has been up since it said so; the memory and the grant took until now.
            clock = Clock(self.hub, self.peers[number])
        else:
            clock = Clock(self.hub)
            os.kill(self.peers[number].pid, signal.SIGCONT)
        while clock.seconds() < 10.0:
            self.read(self.tickets[number]["granted"], 10.0)
            (end,) = self.hear(HANG)
            if end is not None and not end["code"]:
                return max(0.0, float(end["at"]) - clock.began - clock.stood())
        self.wrong.append(f"peer {number} is back, but there was no transfer in 10 s: {end}")
        return 10.0

    def close(self) -> None:
        """End everything."""
        for handle in (self.hub, *self.peers):
            handle.close()


def row(fault: str, count: int, rounds: Round) -> list[object]:
    """A line of the table."""
    words = ", ".join(f"{code} {n}" for code, n in rounds.codes.most_common())
    return [fault, count, len(rounds.ended), *spread(rounds.ended), *spread(rounds.again), words]


def measure(fault: str, count: int, peers: int, seed: int) -> Round:
    """All rounds of a fault."""
    rounds = Round(min(peers, count), seed)
    try:
        for _ in range(-(-count // peers)):
            rounds.run(fault)
    finally:
        rounds.close()
    if max(rounds.ended, default=99.0) >= ENDED:
        rounds.wrong.append(f"{fault}: a transfer ended only {max(rounds.ended, default=99.0):.2f} s later")
    if max(rounds.again) >= AGAIN:
        rounds.wrong.append(
            f"{fault}: a peer that was back was read from only {max(rounds.again):.2f} s later"
        )
    return rounds


def main(arguments: list[str] | None = None) -> int:
    """Measure both; 0 if all was in time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--stops", type=int, default=200)
    parser.add_argument("--peers", type=int, default=20, help="peers of a round")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = random_seed() if options.seed is None else options.seed
    rows: list[Any] = []
    bad: list[str] = []
    for fault, count in (("kill", options.kills), ("stop", options.stops)):
        if count:
            rounds = measure(fault, count, options.peers, seed)
            rows.append(row(fault, len(rounds.again), rounds))
            bad += rounds.wrong
    heads = ["fault", "peers hit", "transfers", *(f"ended {q} s" for q in ("p50", "p99", "max"))]
    print_table([*heads, *(f"again {q} s" for q in ("p50", "p99", "max")), "ends"], rows)
    print(*bad, sep="\n")
    print(f"seed {seed}: violations {len(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
