"""The engines that can be seen from here, and one question to one of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from kvik.config.words import shown

PREFIX = "kvik-stat-"
PROTOCOL = "kvik-stat/1"
ANSWER_SECONDS = 3.0
"""For an engine to answer; one that runs does in about a millisecond."""

_MESSAGE = 1 << 20
# A line of /proc/net/unix about a socket that listens, __SO_ACCEPTCON being its one flag. Anybody may take a
# name with anything in it, so what does not look like an engine's is none.
_LISTENS = re.compile(rf"\S+: \S+ \S+ 00010000 \S+ \S+ +\S+ @{PREFIX}([0-9a-f]{{32}})", re.ASCII)
_CREDENTIALS = struct.Struct("iII")
_SHORTEST_ID = 4
_ASKED_AT_ONCE = 16


class StatError(Exception):
    """An engine that cannot be asked, or was not found; the text says why."""


@dataclass(frozen=True)
class About:
    """What an engine says of itself."""

    engine: str
    name: str
    pid: int
    version: str
    transport: str
    addresses: tuple[str, ...]
    uptime_s: float

    @property
    def title(self) -> str:
        """The name if it has one, fit for a terminal, or the beginning of its id."""
        return shown(self.name) or self.engine[:8]

    def to_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return asdict(self)


def names() -> list[str]:
    """The ids of the engines that listen in this network namespace, of whichever user."""
    lines = Path("/proc/net/unix").read_text(errors="replace").split("\n")
    return sorted({found[1] for found in map(_LISTENS.fullmatch, lines) if found})


class Question:
    """A connection to an engine that was asked one thing: first ``about``, then pieces of text."""

    def __init__(self, engine: str, what: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._until = time.monotonic() + ANSWER_SECONDS
        try:
            self._socket.settimeout(ANSWER_SECONDS)
            self._socket.connect("\0" + PREFIX + engine)
            pid = self._same_user()
            self._socket.sendall(f"{PROTOCOL} {what}".encode())
            self.about = self._about(self.receive(), pid)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise StatError(f"engine {engine[:8]} does not answer: {error}") from error
        except BaseException:
            self._socket.close()
            raise

    def receive(self, interrupt: socket.socket | None = None) -> bytes:
        """The next piece; empty at the end.

        Raises TimeoutError when the engine takes too long, and InterruptedError when `interrupt` can be read.
        Neither takes a piece away.
        """
        left = self._until - time.monotonic()
        watched = [self._socket] if interrupt is None else [self._socket, interrupt]
        ready = wait(watched, left) if left > 0 else []
        if interrupt is not None and interrupt in ready:
            raise InterruptedError("told to end")
        if not ready:
            raise TimeoutError(f"no answer within {ANSWER_SECONDS:g} s; its process may be stopped")
        return self._socket.recv(_MESSAGE)

    def wait_until(self, until: float) -> None:
        """Let further pieces come until this time of the monotonic clock."""
        self._until = until

    def say(self, message: bytes) -> None:
        """Send a further message."""
        self._socket.sendall(message)

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    def _same_user(self) -> int:
        """Anybody can take an abstract name first: whoever listens must be this user. Gives its process."""
        told = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, user, _ = _CREDENTIALS.unpack(told)
        if user != os.geteuid():
            raise StatError(f"it belongs to user {user}: run kvik stat as that user")
        return int(pid)

    @staticmethod
    def _about(message: bytes, pid: int) -> About:
        if not message:
            raise StatError("it closed the connection: it belongs to another user, or too many ask it")
        try:
            return Question._read_about(json.loads(message), pid)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise StatError(f"its first line makes no sense: {error!r}") from error

    @staticmethod
    def _read_about(told: Any, pid: int) -> About:
        if not isinstance(told, dict) or told.get("protocol") != PROTOCOL:
            raise StatError(f"it does not speak {PROTOCOL}: use the kvik command of its version")
        if "error" in told:
            raise StatError(str(told["error"]))
        engine = str(told["engine"])
        if not engine:
            raise ValueError("its engine has no id")
        return About(
            engine=engine,
            name=str(told["name"]),
            # As seen from here; its own number where its process is not visible from here.
            pid=pid or int(told["pid"]),
            version=str(told["version"]),
            transport=str(told["transport"]),
            addresses=tuple(str(address) for address in told["addresses"]),
            uptime_s=float(told["uptime_s"]),
        )


@contextlib.contextmanager
def asking(engine: str, what: str) -> Iterator[Question]:
    """Ask an engine, and leave at the end."""
    question = Question(engine, what)
    try:
        yield question
    finally:
        question.close()


def snapshot(engine: str) -> tuple[About, str]:
    """What an engine is, and its metrics in the Prometheus text format."""
    with asking(engine, "snapshot") as question:
        pieces = []
        try:
            while piece := question.receive():
                pieces.append(piece)
        except OSError as error:
            raise StatError(f"engine {engine[:8]} broke off its answer: {error}") from error
        return question.about, b"".join(pieces).decode()


def engines() -> tuple[list[About], list[str]]:
    """Every engine of this user, and why others did not answer. They are asked at once."""
    found, silent = [], []
    with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="kvik-stat") as pool:
        for asked in [pool.submit(snapshot, engine) for engine in names()]:
            try:
                found.append(asked.result()[0])
            except StatError as error:
                silent.append(str(error))
    return found, silent


def find(wanted: str) -> About:
    """The one engine of this process number, name, or beginning of an id.

    Raises StatError when there is none or more than one.
    """
    found, silent = engines()
    matches = [about for about in found if _is(about, wanted)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        which = ", ".join(f"{about.engine[:8]} (pid {about.pid}, {about.name!r})" for about in matches)
        raise StatError(f"{wanted!r} fits {len(matches)} engines: {which}; name one by its id")
    there = ", ".join(f"{about.title} (pid {about.pid})" for about in found) or "none"
    text = f"no engine {wanted!r} of this user in this network namespace; those that run: {there}"
    raise StatError("; ".join([text, *silent]))


def _is(about: About, wanted: str) -> bool:
    by_id = len(wanted) >= _SHORTEST_ID and about.engine.startswith(wanted.lower())
    return wanted in (str(about.pid), about.name) or by_id
