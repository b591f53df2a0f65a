"""Nodes behind OpenSSH: one connection a host, and through it every role and every short command.

The program is the system's `ssh`, so what a person has in `~/.ssh/config` holds here.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvik.roles.node import COMMAND_LIMIT, NodeError
from kvik.roles.processes import Process, ProcessError
from kvik_lab.run.remote import Line, RemoteNode
from kvik_lab.run.spec import NodeSpec

CONNECT_LIMIT = 10  # seconds


@dataclass(frozen=True)
class Ssh:
    """`ssh` to one host."""

    name: str
    host: str
    options: Sequence[str]
    socket: Path

    def command(self, *, new: bool = False) -> list[str]:
        """`ssh` with its options, without the host; unless `new`, over the one connection or not at all."""
        settings = {
            "BatchMode": "yes", "ControlPath": str(self.socket),
            "ConnectTimeout": str(CONNECT_LIMIT), "ServerAliveInterval": "2", "ServerAliveCountMax": "3",
        }  # fmt: skip
        if not new:
            settings["ProxyCommand"] = f"echo 'the connection to {self.name} is gone' >&2; exit 1"
        said = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        return ["ssh", *said, *self.options]

    def carry(self, command: Sequence[str]) -> list[str]:
        """Over the one connection; a shell is there."""
        return [*self.command(), self.host, f"exec {shlex.join(command)}"]

    def connected(self) -> bool:
        """Whether the one connection is there."""
        check = [*self.command(), "-O", "check", self.host]
        try:
            done = subprocess.run(
                check, capture_output=True, timeout=COMMAND_LIMIT, check=False, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):
            return False  # Where there is no `ssh`, the connection's own log says so.
        return done.returncode == 0


@contextlib.contextmanager
def ssh_node(name: str, spec: NodeSpec, logs: Path) -> Iterator[RemoteNode]:
    """Connect, and let go at the end. Raises `NodeError` for a host that does not answer."""
    host = spec.host or ""
    # Not in the study's folder: the path of a socket has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="kvik-ssh-") as sockets:
        ssh = Ssh(name, host, spec.options, Path(sockets) / "s")
        # Under a keeper: the connection ends with us, and with it what runs there.
        master = [*ssh.command(new=True), "-M", "-N", host]
        connection = Process(f"ssh-{name}", master, logs / f"ssh-{name}.log", grace=1.0)
        try:
            try:
                connection.wait_until(ssh.connected, time.monotonic() + 2 * CONNECT_LIMIT)
            except ProcessError as error:
                raise NodeError(f"node {name} ({host}): cannot be reached: {error}") from error
            line = Line(name, host, ssh.carry, connection)
            with line.open():
                yield RemoteNode(
                    line, spec.address or host.rpartition("@")[2], spec.python or sys.executable,
                    None if spec.folder is None else Path(spec.folder),
                )  # fmt: skip
        finally:
            connection.stop()
