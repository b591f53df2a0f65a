"""SIGINT and SIGTERM as the end of what a command runs."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Handler(Protocol):
    """What is called in the main thread for a signal."""

    def __call__(self, number: int, frame: FrameType | None, /) -> None: ...


@contextlib.contextmanager
def wakeup() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A pair of sockets; the interpreter writes to the second on every signal, whichever thread gets it."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader, writer
        finally:
            signal.set_wakeup_fd(before)


@contextlib.contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Have SIGINT and SIGTERM handled so, until the end of the block."""
    before = [(number, signal.signal(number, handler)) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler_before in before:
            signal.signal(number, handler_before)


@contextlib.contextmanager
def ending() -> Iterator[Callable[[], object]]:
    """A call that returns at the first SIGINT or SIGTERM; must run in the main thread.

    A signal ends nothing by itself until the end of the block, so that what the first one ended in order is
    not cut off by a second: `timeout` and a terminal send one to a process and to its group.
    """
    with noted() as reader:
        yield lambda: reader.recv(1)


@contextlib.contextmanager
def noted() -> Iterator[socket.socket]:
    """A socket that can be read from the first SIGINT or SIGTERM on; the rest is as with `ending`."""
    with wakeup() as (reader, _), handling(lambda *_: None):
        yield reader
