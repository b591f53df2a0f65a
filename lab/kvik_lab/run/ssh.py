"""A node behind OpenSSH: one connection a host, and through it every role and every short command.

The program is the system's `ssh`, so what a person has in `~/.ssh/config` holds here. A role runs under a
keeper on its own host, whose text is sent along: it ends the role when its connection closes, which the
end of this process does, and when for `LEASE` seconds no byte came, as from a host that cannot be reached
any more.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import kvik.roles.keeper
import kvik.roles.ports
from kvik.roles.node import COMMAND_LIMIT, NodeError
from kvik.roles.ports import Holder
from kvik.roles.processes import Keeper, Process, ProcessError
from kvik.roles.role import Role
from kvik_lab.observe.prometheus import parse
from kvik_lab.records import Counters
from kvik_lab.run import told
from kvik_lab.run.spec import NodeSpec

LEASE = 10.0  # seconds without a byte after which a keeper takes us for dead
BEAT = 2.0  # seconds between two bytes
CONNECT_LIMIT = 10  # seconds
LOST = 255  # the exit status of ssh itself
SETTLE = 2.0  # seconds for the connection's end to be seen after that of what it carried


class RemoteProcess(Process):
    """A role on another host; its keeper is there, and `ssh` is here."""

    def __init__(self, node: SshNode, role: Role, log: Path) -> None:
        self._node, self._role = node, role
        self._writing = threading.Lock()  # no byte may go to a descriptor that was closed meanwhile
        super().__init__(role.name, role.command, log, role.env, role.grace, role.folder)

    def _launch(self, out: BinaryIO, _env: Mapping[str, str]) -> Keeper:
        source = Path(kvik.roles.keeper.__file__).read_text(encoding="utf-8")
        remote = shlex.join([self._node.python, "-S", "-c", source, "-"])
        ssh = subprocess.Popen(
            [*self._node.ssh(), self._node.host, f"exec {remote}"], stdin=subprocess.PIPE, stdout=out,
            stderr=out, start_new_session=True, bufsize=0,
        )  # fmt: skip
        folder = self._role.folder or self._node.folder
        asked = {
            "command": list(self._role.command), "grace": self._role.grace,
            "env": {**self._role.env, told.VARIABLE: self._role.name},
            "folder": None if folder is None else str(folder), "lease": LEASE,
        }  # fmt: skip
        try:
            self._beat(ssh, json.dumps(asked).encode() + b"\n")
        except ProcessError:
            ssh.kill()
            ssh.wait()
            raise
        return ssh

    def beat(self) -> None:
        """Say that we are here; its end is seen elsewhere."""
        with contextlib.suppress(ProcessError):
            self._beat(self._keeper, b".")

    def ask_to_stop(self) -> None:
        """Begin its end, without waiting for it."""
        with self._writing:
            super().ask_to_stop()

    def _beat(self, ssh: Keeper, data: bytes) -> None:
        """Write it at once: what stays in a buffer would fail again when the pipe is closed."""
        left = memoryview(data)
        try:
            with self._writing:
                while left and ssh.stdin is not None and not ssh.stdin.closed:
                    left = left[ssh.stdin.write(left) :]
        except OSError as error:
            raise ProcessError(f"{self._role.name}: the connection to {self._node.name} is gone") from error

    @property
    def lost(self) -> bool:
        """Whether ssh itself has ended, and not the role, which may have this status too."""
        return self.wait(0.0) == LOST and self._node.is_gone()


@dataclass
class SshNode:
    """A host behind ssh. Made by `opened`."""

    name: str
    host: str
    address: str
    python: str
    folder: Path | None
    options: tuple[str, ...]
    socket: Path
    connection: Process | None = None
    _running: list[RemoteProcess] = field(default_factory=list)
    _closed: threading.Event = field(default_factory=threading.Event)

    @classmethod
    @contextlib.contextmanager
    def opened(cls, name: str, spec: NodeSpec, logs: Path) -> Iterator[SshNode]:
        """Connect, and let go at the end. Raises `NodeError` for a host that does not answer."""
        host = spec.host or ""
        # Not in the study's folder: the path of a socket has 107 characters at most.
        with tempfile.TemporaryDirectory(prefix="kvik-ssh-") as sockets:
            node = cls(
                name, host, spec.address or host.rpartition("@")[2], spec.python or sys.executable,
                None if spec.folder is None else Path(spec.folder), tuple(spec.options), Path(sockets) / "s",
            )  # fmt: skip
            # Under a keeper: the connection ends with us, and with it what runs there.
            master = [*node.ssh(new=True), "-M", "-N", node.host]
            connection = Process(f"ssh-{name}", master, logs / f"ssh-{name}.log", grace=1.0)
            node.connection = connection
            beating = threading.Thread(target=node._beats, name=f"beat-{name}", daemon=True)
            try:
                try:
                    connection.wait_until(node._connected, time.monotonic() + 2 * CONNECT_LIMIT)
                except ProcessError as error:
                    raise NodeError(f"node {name} ({host}): cannot be reached: {error}") from error
                beating.start()
                yield node
            finally:
                node._closed.set()
                connection.stop()

    def is_gone(self) -> bool:
        """Whether the one connection has ended; it does a moment before or after what it carried."""
        return self.connection is None or self.connection.wait(SETTLE) is not None

    def ssh(self, *, new: bool = False) -> list[str]:
        """`ssh` with its options, without the host; unless `new`, over the one connection or not at all."""
        settings = {
            "BatchMode": "yes", "ControlPath": str(self.socket),
            "ConnectTimeout": str(CONNECT_LIMIT), "ServerAliveInterval": "2", "ServerAliveCountMax": "3",
        }  # fmt: skip
        if not new:
            settings["ProxyCommand"] = f"echo 'the connection to {self.name} is gone' >&2; exit 1"
        said = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        return ["ssh", *said, *self.options]

    def launch(self, role: Role, log: Path) -> Process:
        """Start a role."""
        process = RemoteProcess(self, role, log)
        self._running = [one for one in self._running if one.alive] + [process]
        return process

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Its servers are reached from here, by its address."""
        return contextlib.nullcontext()

    def run(self, command: Sequence[str]) -> str:
        """Run a short command there."""
        try:
            done = subprocess.run(
                [*self.ssh(), self.host, shlex.join(command)], capture_output=True, text=True,
                timeout=COMMAND_LIMIT, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NodeError(f"node {self.name}: ssh {self.host}: {error}") from error
        if done.returncode != 0:
            what = (
                "cannot be reached" if done.returncode == LOST else f"{command[0]}: status {done.returncode}"
            )
            raise NodeError(f"node {self.name} ({self.host}): {what}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def free_ports(self, count: int) -> list[int]:
        """Ports that are free there."""
        return [int(port) for port in self._ports("free", count)]

    def holders(self, wanted: Iterable[int]) -> list[Holder]:
        """Who listens on these ports there."""
        return [Holder(**one) for one in self._ports("holders", *wanted)]

    def engine_counters(self, mark: str) -> dict[str, Counters]:
        """What kvik's engines there count, by the role that they belong to. Raises `NodeError`."""
        source = Path(told.__file__).read_text(encoding="utf-8")
        found: dict[str, Counters] = {}
        for role, texts in json.loads(self.run([self.python, "-c", source, mark])).items():
            counters = found.setdefault(role, {})
            for text in texts:
                for key, value in parse(text, f"an engine of {role}").items():
                    counters[key] = counters.get(key, 0.0) + value
        return found

    def _ports(self, *arguments: object) -> list[Any]:
        source = Path(kvik.roles.ports.__file__).read_text(encoding="utf-8")
        found = json.loads(self.run([self.python, "-S", "-c", source, *map(str, arguments)]))
        return list(found)

    def _beats(self) -> None:
        while not self._closed.wait(BEAT):
            for process in list(self._running):
                process.beat()

    def _connected(self) -> bool:
        check = [*self.ssh(), "-O", "check", self.host]
        try:
            done = subprocess.run(
                check, capture_output=True, timeout=COMMAND_LIMIT, check=False, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):
            return False  # Where there is no `ssh`, the connection's own log says so.
        return done.returncode == 0
