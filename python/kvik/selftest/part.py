"""A part of the selftest: what it found, and the bound on its time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from typing import Any, Literal

import kvik
from kvik.bench.errors import BenchError

State = Literal["passed", "failed", "left out"]
Say = Callable[[str], None]

_GRACE_SECONDS = 20.0
"""For a part whose time is over and whose connections were cut, to end by that."""


@dataclass
class Check:
    """One question of a part, and its answer."""

    name: str
    state: State
    said: str
    seconds: float

    @property
    def line(self) -> str:
        """For a person."""
        return f"  {self.state:8}  {self.name}: {self.said}  ({self.seconds:.2f} s)"


@dataclass
class Part:
    """A part and what it has found so far."""

    number: int
    name: str
    title: str
    state: State = "failed"
    said: str = "not begun"
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The result, for a person."""
        return f"part {self.number}, {self.title}: {self.state.upper()}: {self.said}"

    def to_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return asdict(self)

    def settle(self, said: str) -> None:
        """Close the part: it failed if one of its checks did."""
        failed = [check.name for check in self.checks if check.state == "failed"]
        self.state = "failed" if failed else "passed"
        self.said = (
            f"{len(failed)} of {len(self.checks)} checks failed: {', '.join(failed)}" if failed else said
        )


def words(error: BaseException) -> str:
    """An error as kvik's commands show it."""
    return f"{error.code}: {error}" if isinstance(error, kvik.KvikError) else f"{error}" or repr(error)


def checked(part: Part, name: str, question: Callable[[], str], say: Say) -> bool:
    """Ask one question and note the answer. An error is an answer, too."""
    began = time.monotonic()
    state: State = "failed"
    try:
        said = question()
        state = "passed"
    except (kvik.KvikError, BenchError, OSError, ValueError) as error:
        said = words(error)
    check = Check(name, state, said, time.monotonic() - began)
    part.checks.append(check)
    say(check.line)
    return state == "passed"


def bounded(
    part: Part, work: Callable[[Part], None], limit: float, cut: Callable[[], None], interrupt: socket.socket
) -> Part:
    """Run a part for at most `limit` seconds. One that takes longer is `cut`, so that its calls end.

    Every call of kvik has a deadline, so this bound is for what must not happen; a thread that even then does
    not end is left behind, and what it had found is not reported.

    `KeyboardInterrupt` as soon as `interrupt` can be read. It is asked, together with the end of the thread:
    a signal that comes before a wait has begun in the kernel, or to another thread, wakes no join.
    """
    failure: list[BaseException] = []
    done, told = socket.socketpair()

    def run() -> None:
        with told:  # Closing it says that the part is done.
            try:
                work(part)
            except BaseException as error:
                failure.append(error)

    began = time.monotonic()
    thread = threading.Thread(target=run, name=f"selftest-{part.name}", daemon=True)
    thread.start()
    with done:
        late = not _ended(done, interrupt, limit)
        if late:
            cut()
            if not _ended(done, interrupt, _GRACE_SECONDS):
                part = Part(part.number, part.name, part.title)
    part.seconds = time.monotonic() - began
    if late:
        part.state, part.said = "failed", f"not done within {limit:g} s; it was cut short"
    elif failure:
        error = failure[0]
        if not isinstance(error, (kvik.KvikError, BenchError, OSError, ValueError)):
            raise error
        part.state, part.said = "failed", words(error)
    return part


def _ended(done: socket.socket, interrupt: socket.socket, seconds: float) -> bool:
    """Wait for the end of a part; False where it has not come by then."""
    ready = wait((done, interrupt), seconds)
    if interrupt in ready:
        raise KeyboardInterrupt
    return bool(ready)
