"""Where roles run. `LocalNode` is this host, or one of `kvik.roles.hosts`; the lab has nodes on others."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvik.roles import ports
from kvik.roles.hosts import Host
from kvik.roles.ports import LOOPBACK, Holder
from kvik.roles.processes import Process
from kvik.roles.role import Role

COMMAND_LIMIT = 30.0  # seconds for a short command


class NodeError(Exception):
    """A node cannot be reached, or a short command failed there; the text says which and why."""


class Node(Protocol):
    """A host on which roles are started and ended."""

    @property
    def address(self) -> str:
        """The address under which its servers are reached by the other nodes."""

    @property
    def python(self) -> str:
        """The Python that has kvik there."""

    def launch(self, role: Role, log: Path) -> Process:
        """Start a role; its output goes to `log` here. `NodeError` where that is not possible."""

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Within the block the calling thread reaches what this node reaches."""

    def run(self, command: Sequence[str]) -> str:
        """Run a short command there; returns what it prints. `NodeError` when it fails."""

    def free_ports(self, count: int) -> list[int]:
        """Ports that are free there."""

    def holders(self, wanted: Iterable[int]) -> list[Holder]:
        """Who listens on these ports there."""


@dataclass(frozen=True)
class LocalNode:
    """This host, or with `host` a network namespace of it."""

    python: str
    host: Host | None = None

    @property
    def address(self) -> str:
        """Loopback, or the namespace's address on its cable."""
        return LOOPBACK if self.host is None else self.host.v4

    def launch(self, role: Role, log: Path) -> Process:
        """Start a role."""
        with self.inside():
            return Process(role.name, role.command, log, role.env, role.grace, role.folder)

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """The calling thread is on this host within the block."""
        return contextlib.nullcontext() if self.host is None else self.host.inside()

    def run(self, command: Sequence[str]) -> str:
        """Run a short command."""
        try:
            with self.inside():
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=COMMAND_LIMIT, check=False,
                    stdin=subprocess.DEVNULL,
                )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NodeError(f"{command[0]}: {error}") from error
        if done.returncode != 0:
            raise NodeError(f"{command[0]}: status {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def free_ports(self, count: int) -> list[int]:
        """Ports that are free on this host."""
        with self.inside():
            return ports.free_ports(count)

    def holders(self, wanted: Iterable[int]) -> list[Holder]:
        """Who listens on these ports on this host."""
        with self.inside():
            return ports.holders(wanted)
