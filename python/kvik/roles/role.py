"""One role of a serving system: what is started, and when it is ready."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvik.roles.processes import GRACE, PROBE_LIMIT, Process, answers

START_LIMIT = 60.0


class Readiness(Protocol):
    """Says when a process can be used."""

    @property
    def limit(self) -> float:
        """Seconds from its start in which it has to be."""

    def holds(self, process: Process) -> bool:
        """Whether it can be used now; the calling thread is where the process can be reached."""


@dataclass(frozen=True)
class HttpReady:
    """Ready when this path answers 200."""

    host: str
    port: int
    path: str = "/health"
    limit: float = START_LIMIT

    def holds(self, _process: Process) -> bool:
        """Ask once."""
        return answers(self.host, self.port, self.path)

    def __str__(self) -> str:
        return f"http://{self.host}:{self.port}{self.path} answers 200"


@dataclass(frozen=True)
class PortReady:
    """Ready when a connection to this port is accepted."""

    host: str
    port: int
    limit: float = START_LIMIT

    def holds(self, _process: Process) -> bool:
        """Try once."""
        try:
            socket.create_connection((self.host, self.port), PROBE_LIMIT).close()
        except OSError:
            return False
        return True

    def __str__(self) -> str:
        return f"{self.host}:{self.port} accepts a connection"


@dataclass(frozen=True)
class LineReady:
    """Ready when its output has this text in it."""

    text: str
    limit: float = START_LIMIT

    def holds(self, process: Process) -> bool:
        """Read its log."""
        return self.text in process.said()

    def __str__(self) -> str:
        return f"its output has {self.text!r}"


@dataclass(frozen=True)
class Role:
    """What is started on a node. `env` is added to the node's own environment; `ports` are those that it will
    listen on; `after` names the roles that have to be ready first; `grace` is how many seconds it has to end
    by itself when it is told to."""

    name: str
    command: tuple[str, ...]
    ready: Readiness
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    node: str = ""
    ports: tuple[int, ...] = ()
    after: tuple[str, ...] = ()
    grace: float = GRACE
