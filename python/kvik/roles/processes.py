"""Child processes with a log, a readiness check with a deadline, and a certain end."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Protocol, TypeVar

from kvik.roles import keeper
from kvik.roles.ports import LOOPBACK

GRACE = 10.0  # seconds between SIGTERM and SIGKILL
POLL = 0.25  # seconds between two looks at a server that is not up yet
PROBE_LIMIT = 2.0  # seconds for one look
TAIL = 60  # lines of a log that go into an error
TAIL_BYTES = 1 << 20  # of a log, at most: it may be longer than memory


class Keeper(Protocol):
    """A keeper that runs. Closing its stdin makes it stop what it keeps. As of `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """The pipe that it watches."""

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns its exit status, or raises `subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """End it at once."""


class ProcessError(Exception):
    """A process ended too early or did not get ready in time; the text has the end of its log."""


class Process:
    """One running command behind a keeper (see `kvik.roles.keeper`); its output goes to `log`."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None,
        grace: float = GRACE, folder: Path | None = None,
    ) -> None:  # fmt: skip
        """Start it. `env` is added to this process's environment; `grace` is the time in seconds that it gets
        to end by itself when it is told to. It works in `folder`, by default in this process's own."""
        self.name = name
        self.grace = grace
        self.folder = folder
        self.log = log
        self.command = tuple(command)
        with log.open("ab") as out:
            self._begins = out.tell()
            self._keeper = self._launch(out, {**os.environ, **(env or {})})

    def _launch(self, out: BinaryIO, env: Mapping[str, str]) -> "Keeper":
        """Start the keeper, and it the command; their output goes to `out`."""
        launcher = [sys.executable, "-S", keeper.__file__, str(self.grace), *self.command]
        return subprocess.Popen(
            launcher, stdin=subprocess.PIPE, stdout=out, stderr=out, env=env, cwd=self.folder,
            start_new_session=True,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._keeper.poll() is None

    @property
    def pid(self) -> int:
        """The command's own process id; raises `ProcessError` when it has ended."""
        listing = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children")
        with contextlib.suppress(FileNotFoundError):
            for pid in listing.read_text().split():
                return int(pid)
        raise ProcessError(f"{self.name} does not run")

    def wait(self, timeout: float) -> int | None:
        """Wait for its end; returns the exit status, or None when `timeout` seconds passed first."""
        try:
            return self._keeper.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    @property
    def keeper_pid(self) -> int:
        """The process id of its keeper, which is there until everything below it has ended."""
        return self._keeper.pid

    def wait_until(self, ready: Callable[[], bool], deadline: float) -> None:
        """Wait until `ready()` holds, at most to `deadline` (monotonic); raises `ProcessError` with the
        log."""
        while not ready():
            status = self.wait(POLL)
            if status is not None:
                raise ProcessError(
                    f"{self.name} ended with status {status} before it was ready\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name} was not ready in time\n{self.tail()}")

    def said(self) -> str:
        """All of its log; not what others wrote into the file before."""
        with self.log.open("rb") as log:
            log.seek(self._begins)
            return log.read().decode(errors="replace")

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join([f"--- the end of {self.log} ---", *last_lines(self.log, self._begins, TAIL)])

    def ask_to_stop(self) -> None:
        """Begin its end, without waiting for it."""
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            self._keeper.stdin.close()

    def stop(self) -> None:
        """End it and all its descendants; bounded."""
        self.ask_to_stop()
        if self.wait(self.grace + keeper.SWEEP_LIMIT + 5.0) is None:
            self._kill_family()

    def _kill_family(self) -> None:
        """What a keeper does that has not done it in time, as on a machine whose processors others spin on.
        Ended alone, it would leave all that is in sessions of its own."""
        # Not by the clock, of which all may have passed before this process has its first turn.
        for _ in range(round(keeper.SWEEP_LIMIT / POLL)):
            family = [pid for pid in descendants(self._keeper.pid)[1:] if _lives(pid)]
            if not family:
                break
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.wait(POLL)
        self._keeper.kill()
        self.wait(5.0)


class HttpServer(Process):
    """A process that serves HTTP and is ready when its health path answers 200."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, log: Path, env: Mapping[str, str] | None = None,
        health: str = "/health", host: str = LOOPBACK, grace: float = GRACE,
    ) -> None:  # fmt: skip
        """Start it; `host` (an IPv4 address) and `port` must be those that the command listens on."""
        super().__init__(name, command, log, env, grace)
        self.host = host
        self.port = port
        self.health = health
        self.url = f"http://{host}:{port}"

    def wait_ready(self, deadline: float) -> None:
        """Wait until it answers, at most to `deadline` (monotonic)."""
        self.wait_until(self.healthy, deadline)

    def healthy(self) -> bool:
        """Whether its health path answers 200 now."""
        return answers(self.host, self.port, self.health)


def answers(host: str, port: int, path: str) -> bool:
    """Whether this path answers 200 now."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_LIMIT)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


P = TypeVar("P", bound=Process)


class Fleet:
    """Everything started within a `with` block; all of it is stopped at the end, the last started first."""

    def __init__(self) -> None:
        """Empty."""
        self.members: list[Process] = []

    def add(self, process: P) -> P:
        """Take over a process."""
        self.members.append(process)
        return process

    def stop(self, *processes: Process) -> None:
        """Stop these (all, when none is named), side by side."""
        chosen = [p for p in self.members if not processes or p in processes]
        for process in reversed(chosen):
            process.ask_to_stop()
        for process in reversed(chosen):
            process.stop()
        self.members = [p for p in self.members if p not in chosen]

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def last_lines(log: Path, begins: int, count: int) -> list[str]:
    """So many last lines of a log that begins at this byte of its file, of its last `TAIL_BYTES`."""
    with log.open("rb") as file:
        file.seek(max(begins, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-count:]


def descendants(pid: int) -> list[int]:
    """A process, and behind it all that it and those below it have started and not left to others."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(_fields(stat)[1]), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, ())
    return found


def _lives(pid: int) -> bool:
    """Whether a process is there and more than its exit status."""
    try:
        return _fields(Path(f"/proc/{pid}/stat"))[0] not in "ZX"
    except OSError:
        return False


def _fields(stat: Path) -> list[str]:
    """State, parent and what follows; the name before it, in parentheses, may have anything in it."""
    return stat.read_bytes().rpartition(b")")[2].decode().split()
