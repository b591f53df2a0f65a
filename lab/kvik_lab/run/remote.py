"""Other hosts, whatever carries a command there: ssh's connection, a step of a Slurm job, an actor of Ray.

A role runs under a keeper on its own host, whose text is sent along: it ends the role when its stdin
closes, which the end of this process does, and when for `LEASE` seconds no byte came, as from a host that
cannot be reached any more.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import kvik.roles.keeper
import kvik.roles.ports
from kvik.roles.node import COMMAND_LIMIT, Node, NodeError
from kvik.roles.ports import Holder
from kvik.roles.processes import Keeper, Process, ProcessError
from kvik.roles.role import LineReady, Role
from kvik_lab.observe.prometheus import parse
from kvik_lab.records import Counters
from kvik_lab.run import told
from kvik_lab.run.spec import NodeSpec

LEASE = 10.0  # seconds without a byte, either way, after which the other side is taken for dead
BEAT = 2.0  # seconds between two bytes
SETTLE = 2.0  # seconds for a host's end to be seen after that of what it carried
PULSE = 'trap "FAREWELL; exit" TERM; while :; do echo beat; sleep 2 & wait $!; done'

Carry = Callable[[Sequence[str]], list[str]]
"""What is run here so that a command runs there: with its stdin, its output and its exit status."""


class RemoteProcess(Process):
    """A role on another host; its keeper is there, and what carries it is here."""

    def __init__(self, line: Line, role: Role, log: Path, python: str, folder: Path | None) -> None:
        self._line, self._role, self._python = line, role, python
        self._writing = threading.Lock()  # no byte may go to a descriptor that was closed meanwhile
        super().__init__(role.name, role.command, log, role.env, role.grace, role.folder or folder)

    def _launch(self, out: BinaryIO, _env: Mapping[str, str]) -> Keeper:
        source = Path(kvik.roles.keeper.__file__).read_text(encoding="utf-8")
        carrier = subprocess.Popen(
            self._line.carry([self._python, "-S", "-c", source, "-"]), stdin=subprocess.PIPE, stdout=out,
            stderr=out, start_new_session=True, bufsize=0,
        )  # fmt: skip
        asked = {
            "command": list(self._role.command), "grace": self._role.grace,
            "env": {**self._role.env, told.VARIABLE: self._role.name},
            "folder": None if self.folder is None else str(self.folder), "lease": LEASE,
        }  # fmt: skip
        try:
            self._beat(carrier, json.dumps(asked).encode() + b"\n")
        except ProcessError:
            carrier.kill()
            carrier.wait()
            raise
        return carrier

    def beat(self) -> None:
        """Say that we are here; its end is seen elsewhere."""
        with contextlib.suppress(ProcessError):
            self._beat(self._keeper, b".")

    def cut(self) -> None:
        """End what carries it: its host is taken for dead."""
        self._keeper.kill()

    def ask_to_stop(self) -> None:
        """Begin its end, without waiting for it."""
        with self._writing:
            super().ask_to_stop()

    def _beat(self, carrier: Keeper, data: bytes) -> None:
        """Write it at once: what stays in a buffer would fail again when the pipe is closed."""
        left = memoryview(data)
        try:
            with self._writing:
                while left and carrier.stdin is not None and not carrier.stdin.closed:
                    left = left[carrier.stdin.write(left) :]
        except OSError as error:
            raise ProcessError(f"{self._role.name}: the connection to {self._line.name} is gone") from error

    @property
    def lost(self) -> bool:
        """Whether it has ended, and its host is gone; the host is asked, as its sign may end late."""
        return not self.alive and (self._line.is_gone() or not self._line.answers())


class Line:
    """The way to one host: takes commands there, and tells whether the host is still there."""

    def __init__(self, name: str, host: str, carry: Carry, sign: Process | None = None) -> None:
        """`host` for errors. `sign` is a process that ends when the host is gone; a `pulse` makes one."""
        self.name, self.host, self.carry, self.sign = name, host, carry, sign
        self._running: list[RemoteProcess] = []
        self._closed = threading.Event()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Beat within the block, and look whether the host does."""
        watching = threading.Thread(target=self._watch, name=f"beat-{self.name}", daemon=True)
        watching.start()
        try:
            yield
        finally:
            self._closed.set()

    @contextlib.contextmanager
    def pulse(self, python: str, log: Path, limit: float, farewell: str = ":") -> Iterator[None]:
        """Something that beats there, until the end of the block; then, or when nothing more is heard of us,
        it runs `farewell` there. `NodeError` where it does not begin within `limit` seconds."""
        role = Role("pulse", ("sh", "-c", PULSE.replace("FAREWELL", farewell)), LineReady(""), grace=5.0)
        log.write_text("")
        try:
            sign = self.start(role, log, python, None)
        except (OSError, ProcessError) as error:
            raise NodeError(f"node {self.name} ({self.host}): cannot be reached: {error}") from error
        try:
            with self.open():
                try:
                    sign.wait_until(lambda: "beat" in sign.said(), time.monotonic() + limit)
                except ProcessError as error:
                    raise NodeError(f"node {self.name} ({self.host}): cannot be reached: {error}") from error
                self.sign = sign
                yield
        finally:
            sign.stop()

    def start(self, role: Role, log: Path, python: str, folder: Path | None) -> RemoteProcess:
        """Start a role there."""
        process = RemoteProcess(self, role, log, python, folder)
        self._running = [one for one in self._running if one.alive] + [process]
        return process

    def answers(self) -> bool:
        """Whether a command can be run there."""
        try:
            RemoteNode(self, "", "", None).run(["true"])
        except NodeError:
            return False
        return True

    def is_gone(self, settle: float = SETTLE) -> bool:
        """Whether the host is; its sign ends a moment before or after what it carried."""
        return self.sign is None or self.sign.wait(settle) is not None

    def _watch(self) -> None:
        silent, looked, size = 0.0, time.monotonic(), -1
        while not self._closed.wait(BEAT):
            for process in self._running:
                process.beat()
            now = time.monotonic()
            since, looked = now - looked, now
            if isinstance(self.sign, RemoteProcess):
                before, size = size, self.sign.log.stat().st_size
                if size != before:
                    silent = 0.0
                elif since < 2 * BEAT:  # else this machine stood still, and with it what brings the beats
                    silent += since
                if silent > LEASE:
                    for process in self._running:
                        process.cut()
                    return


@dataclass(frozen=True)
class RemoteNode:
    """A host at the end of a line, and the Python of one node there."""

    line: Line
    address: str
    python: str
    folder: Path | None

    def launch(self, role: Role, log: Path) -> Process:
        """Start a role."""
        return self.line.start(role, log, self.python, self.folder)

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Its servers are reached from here, by its address."""
        return contextlib.nullcontext()

    def run(self, command: Sequence[str]) -> str:
        """Run a short command there."""
        where = f"node {self.line.name} ({self.line.host})"
        try:
            status, said, errors = self._communicate(self.line.carry(command))
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NodeError(f"{where}: {_why(error)}") from error
        if status != 0:
            gone = self.line.is_gone(0.0)
            what = "cannot be reached" if gone else f"{command[0]}: status {status}"
            raise NodeError(f"{where}: {what}: {errors.strip()[-500:]}")
        return said

    def _communicate(self, carrier: Sequence[str]) -> tuple[int, str, str]:
        """Its exit status, its output and its errors; not beyond `COMMAND_LIMIT`, and the host's end."""
        until = time.monotonic() + COMMAND_LIMIT
        process = subprocess.Popen(
            carrier, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with process:
            try:
                while True:
                    try:
                        said, errors = process.communicate(timeout=BEAT)
                        return process.returncode, said, errors
                    except subprocess.TimeoutExpired:
                        if time.monotonic() > until or self.line.is_gone(0.0):
                            raise
            finally:
                process.kill()

    def free_ports(self, count: int) -> list[int]:
        """Ports that are free there."""
        return [int(port) for port in self._ports("free", count)]

    def holders(self, wanted: Iterable[int]) -> list[Holder]:
        """Who listens on these ports there."""
        return [Holder(**one) for one in self._ports("holders", *wanted)]

    def engines(self, mark: str) -> dict[str, dict[str, Counters]]:
        """What kvik's engines there count, by the role that they belong to and their id. Raises
        `NodeError`."""
        source = Path(told.__file__).read_text(encoding="utf-8")
        said = json.loads(self.run([self.python, "-c", source, mark]))
        return {
            role: {name: parse(text, f"an engine of {role}") for name, text in texts.items()}
            for role, texts in said.items()
        }

    def _ports(self, *arguments: object) -> list[Any]:
        source = Path(kvik.roles.ports.__file__).read_text(encoding="utf-8")
        found = json.loads(self.run([self.python, "-S", "-c", source, *map(str, arguments)]))
        return list(found)


@dataclass(frozen=True)
class Way:
    """The line to a host, and the host's own address."""

    line: Line
    address: str


class Held:
    """Hosts that are held from one start to the next; others are asked for where one of them is gone, or the
    study asks for others."""

    def __init__(
        self, ways: Callable[[Mapping[str, NodeSpec]], contextlib.AbstractContextManager[Mapping[str, Way]]]
    ) -> None:
        """`ways` asks for them; within its block they are held."""
        self._ask = ways
        self._stack = contextlib.ExitStack()
        self._asked: object = None
        self._ways: Mapping[str, Way] = {}

    @contextlib.contextmanager
    def nodes(self, specs: Mapping[str, NodeSpec], _logs: Path) -> Iterator[dict[str, Node]]:
        """A node on each host. Raises `NodeError`."""
        asked = [(name, spec.host, spec.options) for name, spec in specs.items()]
        if asked != self._asked or not self._answer(specs):
            self.close()
            self._ways = self._stack.enter_context(self._ask(specs))
            self._asked = asked
        yield self._nodes(specs)

    def _nodes(self, specs: Mapping[str, NodeSpec]) -> dict[str, Node]:
        return {
            name: RemoteNode(
                way.line, specs[name].address or way.address, specs[name].python or sys.executable,
                None if (folder := specs[name].folder) is None else Path(folder),
            )
            for name, way in self._ways.items()
        }  # fmt: skip

    def _answer(self, specs: Mapping[str, NodeSpec]) -> bool:
        """Whether all are still there; one that has just vanished may not be known to be gone."""
        try:
            for node in self._nodes(specs).values():
                node.run(["true"])
        except NodeError:
            return False
        return True

    def close(self) -> None:
        """Let go of them."""
        self._asked, self._ways = None, {}
        self._stack.close()


def _why(error: OSError | subprocess.TimeoutExpired) -> str:
    """Without the texts that were sent along."""
    return "cannot be reached" if isinstance(error, subprocess.TimeoutExpired) else f"{error}"
