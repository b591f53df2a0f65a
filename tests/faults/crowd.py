"""Many engines in one process, all connected to one hub: what a host full of peers looks like to it."""

import ctypes
import os
import random
import sys
import threading
import time
from typing import Any

import kvik
from tests.faults.starter import end_with_starter
from tests.python.peers import Peer, Pipe

PAGE = 16 << 10
PAGES = 4
DEADLINE = 30.0  # seconds of a transfer


class Member:
    """One engine, which reads from the hub now and then and has a transfer open that waits all the time."""

    def __init__(self, number: int, transport: str, nics: str | None) -> None:
        name = f"peer {number}"
        self.engine = kvik.Engine(transport=transport, nics=nics, io_threads=1, name=name)  # type: ignore[arg-type]
        self.region = self.engine.allocate(PAGE * PAGES)
        self.pages = self.region.pages(kvik.Layout(PAGES, PAGE), range(PAGES))
        self.open: list[kvik.Transfer] = []
        self.dice = random.Random(number)
        self.engine.on_event(self.tell)

    def tell(self, event: kvik.Event) -> None:
        """Say of each session that is lost, why."""
        if event.kind == "peer_lost":
            print(f"{self.engine.name}: lost {event.name}: {event.reason}", flush=True, file=sys.stderr)

    def wait_on(self, ticket: str, deadline: float) -> None:
        """Begin what does not end before its deadline."""
        self.open.append(self.engine.read(self.pages, ticket, deadline=deadline))

    def work(self, ticket: str, pause: float) -> None:
        """Read now and then, as long as the process lives; failures are in the engine's counts."""
        while True:
            time.sleep(self.dice.uniform(0.5, 1.5) * pause)
            try:
                self.engine.read(self.pages, ticket, deadline=DEADLINE).wait()
            except kvik.KvikError as error:
                print(f"{self.engine.name}: {error}", flush=True, file=sys.stderr)


def crowd(pipe: Pipe, engines: int, first: int, transport: str, nics: str | None) -> None:
    """The process: obeys `connect`, `read`, `work`, `hold_gil`, `counts` and `bye`."""
    end_with_starter()
    members = [Member(first + i, transport, nics) for i in range(engines)]
    pipe.say(ready=True)
    while (call := (heard := pipe.hear()).pop("call")) != "bye":
        if call == "connect":
            for member in members:
                member.engine.explain(heard["ticket"])
        elif call == "read":
            for member in members:
                member.engine.read(member.pages, heard["ticket"], deadline=DEADLINE).wait()
        elif call == "work":
            for member in members:
                if "promised" in heard:
                    member.wait_on(heard["promised"], heard["deadline"])
                arguments = (heard["ticket"], heard["pause"])
                threading.Thread(target=member.work, args=arguments, daemon=True).start()
        elif call == "hold_gil":
            ctypes.PyDLL(None).usleep(int(heard["seconds"] * 1e6))  # which keeps Python's lock
        pipe.say(**_counts(members))
    os._exit(0)


def _counts(members: list[Member]) -> dict[str, Any]:
    names = ("transfers_ok", "transfers_failed", "sessions_opened", "sessions_lost")
    stats = [member.engine.stats() for member in members]
    ended = sum(transfer.done for member in members for transfer in member.open)
    beats = sum(_late_beats(member.engine) for member in members)
    return {name: sum(stat[name] for stat in stats) for name in names} | {"ended": ended, "late": beats}


def _late_beats(engine: kvik.Engine) -> int:
    lines = [line for line in engine.metrics().splitlines() if line.startswith("kvik_heartbeats_late_total ")]
    return int(float(lines[0].split()[1])) if lines else 0


def start(processes: int, engines: int, transport: str, nics: str | None = None) -> list[Peer]:
    """Start processes with as many engines each, and wait for them."""
    sizes = [engines // processes + (i < engines % processes) for i in range(processes)]
    firsts = [sum(sizes[:i]) for i in range(processes)]
    peers = [
        Peer(crowd, engines=size, first=first, transport=transport, nics=nics)
        for size, first in zip(sizes, firsts, strict=True)
    ]
    for peer in peers:
        peer.hear(120.0)
    return peers
