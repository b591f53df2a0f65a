"""The victim, its honest peer, and how both fare: memory, threads, descriptors, transfers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

import kvik
from tests.python.peers import Peer, Pipe, owner

PAGES, PAGE = 16, 64 << 10
SAMPLE = 0.05  # seconds between looks at the victim's process


def honest(pipe: Pipe, *, ticket: str) -> None:
    """Reads all pages again and again, over tcp; says how often, and what went wrong."""
    count, errors, wrong = 0, [], 0
    stop = threading.Event()

    def work() -> None:
        nonlocal count, wrong
        with kvik.Engine(transport="tcp") as engine:
            region = engine.allocate(PAGES * PAGE)
            view = np.frombuffer(memoryview(region), np.uint8)
            pages = region.pages(kvik.Layout(PAGES, PAGE), range(PAGES))
            first = None
            while not stop.is_set():
                view[:] = 0
                try:
                    engine.read(pages, ticket, deadline=10.0).wait()
                except kvik.KvikError as error:
                    errors.append(f"{type(error).__name__}: {error}")
                    time.sleep(0.05)
                    continue
                first = view.copy() if first is None else first
                wrong += int(not (view == first).all())
                count += 1
            del view

    thread = threading.Thread(target=work)
    thread.start()
    while pipe.hear()["do"] == "count":
        pipe.say(count=count, errors=len(errors), wrong=wrong, first=errors[:1])
    stop.set()
    thread.join()


@dataclass
class Figures:
    """The victim's process."""

    rss_mib: float
    threads: int
    fds: int


@dataclass
class Fared:
    """What an attack did."""

    before: Figures
    peak: Figures
    after: Figures
    reads: int
    errors: int
    wrong: int
    ratio: float
    """Transfers a second of the honest peer, against the quiet time just before and after."""
    note: str
    first_error: str


class Scene:
    """A victim with an honest peer that reads from it all the time."""

    def __init__(self, quiet: float) -> None:
        self.quiet = quiet
        self.victim = Peer(owner, pages=PAGES, page_bytes=PAGE, transport="auto")
        try:
            self.ticket = kvik.Ticket(self.victim.hear()["ticket"])
            self.peer = Peer(honest, ticket=str(self.ticket))
        except BaseException:
            self.victim.__exit__()
            raise
        self.address = self.ticket.addresses[0]
        self._wait_for_reads()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in (self.peer, self.victim):
            peer.__exit__()

    @property
    def alive(self) -> bool:
        """Whether the victim's process still runs."""
        return self.victim.process.poll() is None

    def figures(self) -> Figures:
        """The victim's process now."""
        folder = Path(f"/proc/{self.victim.pid}")
        status = dict(
            line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
        )
        fds = len(list((folder / "fd").iterdir()))
        return Figures(int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), fds)

    def counts(self) -> tuple[float, dict[str, int]]:
        """The time, and what the honest peer has done."""
        said = self.peer.ask(do="count")
        return time.monotonic(), said

    def idle(self) -> float:
        """Transfers a second while nobody misbehaves."""
        began, first = self.counts()
        time.sleep(self.quiet)
        ended, last = self.counts()
        return (last["count"] - first["count"]) / (ended - began)

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[Figures]]:
        """Looks at the victim all the time."""
        seen, stop = [self.figures()], threading.Event()

        def look() -> None:
            while not stop.wait(SAMPLE):
                with contextlib.suppress(OSError, KeyError):
                    seen.append(self.figures())

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield seen
        finally:
            stop.set()
            thread.join()

    def _wait_for_reads(self) -> None:
        end = time.monotonic() + 20
        while self.counts()[1]["count"] < 3:
            if time.monotonic() > end:
                raise TimeoutError(f"the honest peer cannot read: {self.counts()}")
            time.sleep(0.05)
