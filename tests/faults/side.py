"""One process of a pair under test: an engine that obeys, and says when its transfers ended and how.

Times are of CLOCK_MONOTONIC, in seconds, which all processes of a machine share.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import kvik
from tests.busy import Watch
from tests.faults.sheets import BLANK, REFILL, Bytes, Mapped, new, old, shuffled
from tests.faults.starter import end_with_starter
from tests.python.peers import Peer, Pipe

Reply = dict[str, Any]
# By what memory came back that was in use when its transfer or grant ended.
METHODS = ("released", "acknowledged", "disconnected")


class Memory:
    """Registered memory by its name: a sheet that is mapped, or allocated by kvik."""

    def __init__(self, engine: kvik.Engine, path: str | None, nbytes: int) -> None:
        self.mapped = None if path is None else Mapped(path, nbytes)
        if self.mapped is None:
            self.region = engine.allocate(nbytes)
        else:
            self.region = engine.register((self.mapped.address, nbytes))

    @contextlib.contextmanager
    def view(self) -> Iterator[Bytes]:
        """Its bytes, for the block only."""
        if self.mapped is not None:
            yield self.mapped.view
        else:
            with memoryview(self.region) as view:
                yield np.frombuffer(view, np.uint8)


class Ending:
    """A transfer that is waited for by a thread of its own, so that the time of its end is known."""

    def __init__(self, transfer: kvik.Transfer) -> None:
        self.transfer = transfer
        self.said: Reply = {}
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        try:
            report = self.transfer.wait()
        except kvik.KvikError as error:
            self.said = {"at": time.monotonic(), "code": error.code, "text": str(error)}
        else:
            at = time.monotonic()
            self.said = {"at": at, "code": "", "mechanism": report.mechanism, "transport": report.transport}


class Side:
    """What a side can be told; each method is a command, and returns its answer."""

    def __init__(self, engine: kvik.Engine) -> None:
        self.engine = engine
        self.memory: dict[str, Memory] = {}
        self.grants: dict[str, kvik.Grant] = {}
        self.endings: list[Ending] = []

    def hold(self, name: str, nbytes: int, path: str | None = None) -> Reply:
        """Register memory."""
        self.memory[name] = Memory(self.engine, path, nbytes)
        return {"address": self.memory[name].region.address, "pid": os.getpid()}

    def fill(self, name: str, what: str, seed: int = 0) -> Reply:
        """Fill memory: `old`, `new`, `blank` or `refill`."""
        with self.memory[name].view() as view:
            if what in ("old", "new"):
                view[:] = (old if what == "old" else new)(view.size, seed)
            else:
                view[:] = BLANK if what == "blank" else REFILL
            del view
        return {}

    def grant(self, name: str, page_bytes: int, right: str, expiry: float = 120.0) -> Reply:
        """Grant all pages of a memory, for many uses."""
        pages, longest = self._pages(name, page_bytes), max(600.0, expiry)
        grant = self.engine.grant(pages, right=right, use="many", expiry=expiry, max_expiry=longest)  # type: ignore[arg-type]
        self.grants[grant.id] = grant
        return {"ticket": str(grant.ticket), "grant": grant.id}

    def promise(self, expiry: float = 60.0) -> Reply:
        """A ticket of a grant that is never given: who reads it waits as long as this side lives."""
        template = self.engine.ticket_template(kvik.Layout(8, 4096))
        return {"ticket": str(template.with_grant(os.urandom(16).hex(), expiry))}

    def begin(
        self, name: str, ticket: str, op: str, page_bytes: int, order: int = 0, **options: Any
    ) -> Reply:
        """Begin a transfer of all pages of a memory; with an order, they are shuffled on this side."""
        pages = self._pages(name, page_bytes, order)
        began = time.monotonic()
        call = self.engine.read if op == "read" else self.engine.write
        self.endings.append(Ending(call(pages, ticket, **options)))
        return {"began": began}

    def begin_part(self, name: str, ticket: str, deadline: float) -> Reply:
        """Begin to read what was promised."""
        pages = self.memory[name].region.pages(kvik.Layout(8, 4096), range(8))
        self.endings.append(Ending(self.engine.read(pages, ticket, deadline=deadline)))
        return {}

    def ends(self, timeout: float) -> Reply:
        """How the transfers that were begun ended, in their order; those that did not by then are `None`."""
        until = time.monotonic() + timeout
        for ending in self.endings:
            ending.thread.join(max(0.0, until - time.monotonic()))
        said = [ending.said or None for ending in self.endings]
        self.endings.clear()
        return {"ends": said}

    def revoke(self, grant: str, timeout: float) -> Reply:
        """Take a grant back: when its pages were free, or that they are in quarantine."""
        began = time.monotonic()
        quarantined = ""
        try:
            self.grants[grant].revoke(timeout)
        except kvik.PagesQuarantined as error:
            quarantined = str(error)
        at = time.monotonic()
        if not quarantined:
            del self.grants[grant]
        return {"at": at, "took": at - began, "quarantined": quarantined}

    def back(self, grant: str, timeout: float) -> Reply:
        """Wait until pages in quarantine are free."""
        state = self.grants[grant].wait(timeout)
        if state is not None:
            del self.grants[grant]
        return {"free": state is not None}

    def let_go(self, name: str, timeout: float = 5.0) -> Reply:
        """Close a region; its memory is unmapped if it was a sheet."""
        memory = self.memory.pop(name)
        memory.region.close(timeout)
        if memory.mapped is not None:
            memory.mapped.unmap()
        return {}

    def use_again(self, name: str, path: str, what: str, seed: int) -> Reply:
        """Close a region and put other memory, filled, at its address."""
        memory = self.memory[name]
        assert memory.mapped is not None
        memory.region.close(5.0)
        memory.mapped.unmap()
        memory.mapped.use_again(path)
        return self.fill(name, what, seed)

    def forget(self, name: str) -> Reply:
        """Unmap memory whose region is closed."""
        mapped = self.memory.pop(name).mapped
        assert mapped is not None
        mapped.unmap()
        return {}

    def pull_away(self, name: str) -> Reply:
        """Unmap registered memory without a word to the engine."""
        mapped = self.memory[name].mapped
        assert mapped is not None
        mapped.unmap()
        return {}

    def come_back(self, name: str, path: str) -> Reply:
        """Put memory where it was pulled away."""
        mapped = self.memory[name].mapped
        assert mapped is not None
        mapped.use_again(path)
        return {}

    def counts(self) -> Reply:
        """What the process and its engine hold."""
        quarantined = _metric(self.engine, "kvik_quarantined_pages")
        threads, fds = (len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("task", "fd"))
        used = "kvik_reclaims_total"
        reclaims = {method: _metric(self.engine, used, f'method="{method}"') for method in METHODS}
        held = {"threads": threads, "fds": fds, "quarantined": quarantined}
        return {"stats": self.engine.stats(), "reclaims": reclaims, **held}

    def stood(self) -> Reply:
        """Seconds since the first such question in which this process stood still: all, and the longest."""
        return {"seconds": self._watch.stood(), "longest": self._watch.longest()}

    @cached_property
    def _watch(self) -> Watch:
        return Watch()  # not before it is asked for: its thread costs a little, which `idle` would count

    def _pages(self, name: str, page_bytes: int, order: int = 0) -> kvik.PageSet:
        region = self.memory[name].region
        layout = kvik.Layout(region.nbytes // page_bytes, page_bytes)
        return region.pages(layout, shuffled(layout.pages, order))


def _metric(engine: kvik.Engine, name: str, label: str = "") -> int:
    """The sum of a metric's series, of those with the label."""
    lines = [line for line in engine.metrics().splitlines() if line.split(" ")[0].split("{")[0] == name]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if label in line)


def side(pipe: Pipe, **options: Any) -> None:
    """The process: it obeys until it hears `bye`."""
    end_with_starter()
    with kvik.Engine(**options) as engine:
        obeys = Side(engine)
        pipe.say(id=engine.id, at=time.monotonic())
        while (call := (heard := pipe.hear()).pop("call")) != "bye":
            try:
                pipe.say(**getattr(obeys, call)(**heard))
            except Exception as error:
                pipe.say(failed=f"{call}: {type(error).__name__}: {error}")


class Handle:
    """The other end: starts a side and talks to it."""

    def __init__(self, **options: Any) -> None:
        self.peer = Peer(side, **options)
        self.pid = self.peer.pid
        self.id, self.up_at = "", 0.0

    def ready(self) -> "Handle":
        """Wait until its engine runs."""
        said = self.peer.hear(120.0)
        self.id, self.up_at = said["id"], said["at"]
        return self

    def tell(self, call: str, **arguments: Any) -> None:
        """Give a command without waiting for its answer."""
        self.peer.say(call=call, **arguments)

    def answer(self, within: float = 60.0) -> Reply:
        """The answer to the oldest command that has had none."""
        said = self.peer.hear(within)
        if "failed" in said:
            raise RuntimeError(said["failed"])
        return said

    def ask(self, call: str, within: float = 60.0, **arguments: Any) -> Reply:
        """Give a command and wait for its answer."""
        self.tell(call, **arguments)
        return self.answer(within)

    def close(self) -> None:
        """End it, whatever state it is in."""
        self.peer.__exit__()
