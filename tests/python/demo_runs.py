"""Runs of `kvik demo` for the tests: in a pipe or in a terminal of 80 columns, and what they leave behind."""

import contextlib
import ctypes
import fcntl
import os
import pty
import re
import secrets
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT = 240.0  # seconds for one run, whose servers have a minute each to start
COLUMNS = 80
MARK = "DEMO_RUN_OF_TEST"
CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
PR_CAPBSET_DROP = 24
CAP_SYS_ADMIN = 21


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    status: int
    said: str
    left: list[int]  # processes of the run that outlived it

    def plain(self) -> list[str]:
        """The lines without control sequences; what a later one overwrote is a line of its own."""
        return [line for line in re.split(r"[\r\n]+", CONTROL.sub("", self.said)) if line]

    def row(self, length: int) -> str:
        """The table's line of this prompt length, as it was shown last."""
        found = [line for line in self.plain() if re.match(rf" *{length:,} +(?:-|[\d.]+ [KMG]iB) ", line)]
        assert found, f"no row of {length} tokens in:\n{self.said}"
        return " ".join(found[-1].split())


class Run:
    """A run of the demo; `pids()` finds its processes, wherever they went, by a mark that they inherit."""

    def __init__(
        self, options: Sequence[str], terminal: bool = False, env: dict[str, str] | None = None,
        unprivileged: bool = False,
    ) -> None:  # fmt: skip
        """Start it."""
        self.mark = secrets.token_hex(16)
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        full = {**kept, "PYTHONUNBUFFERED": "1", **(env or {}), MARK: self.mark}
        command = [sys.executable, "-m", "kvik.cli", "demo", *options]
        if terminal:
            full["TERM"] = "xterm-256color"
            self._out, end = pty.openpty()
            fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        else:
            self._out, end = os.pipe()
        self.process = subprocess.Popen(
            command, stdin=end if terminal else subprocess.DEVNULL, stdout=end, stderr=end, env=full,
            start_new_session=True, preexec_fn=_becomes(terminal, unprivileged),
        )  # fmt: skip
        os.close(end)
        self._said = b""

    def pids(self) -> list[int]:
        """Processes of this run that are there now."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and f"{MARK}={self.mark}".encode() in _environ(folder):
                    found.append(int(folder.name))
        return found

    def type(self, keys: bytes) -> None:
        """Press keys; in a terminal only."""
        os.write(self._out, keys)

    def wait_for(self, enough: Callable[[str], bool]) -> None:
        """Read until the text is enough; fails when the run ends before, or is too slow."""
        until = time.monotonic() + LIMIT
        while not enough(self._said.decode(errors="replace")):
            assert self._read(until), f"not seen in:\n{self._said.decode(errors='replace')}"

    def end(self, limit: float = LIMIT) -> Ended:
        """Wait for its end."""
        until = time.monotonic() + limit
        while self._read(until):
            pass
        status = self.process.wait(max(0.1, until - time.monotonic()))
        return Ended(status, self._said.decode(errors="replace"), self.pids())

    def close(self) -> None:
        """Stop what is left."""
        for pid in {*self.pids(), self.process.pid} if self.process.poll() is None else self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT)
        os.close(self._out)

    def _read(self, until: float) -> bool:
        """Read a piece; False at the end of the output. Fails when `until` has passed."""
        left = until - time.monotonic()
        assert left > 0, f"no end in time:\n{self._said.decode(errors='replace')}"
        assert select.select([self._out], [], [], left)[0], f"silence:\n{self._said.decode(errors='replace')}"
        try:
            piece = os.read(self._out, 65536)
        except OSError:  # how a terminal says that nobody has it open any more
            return False
        self._said += piece
        return bool(piece)


@contextlib.contextmanager
def running(
    *options: str, terminal: bool = False, env: dict[str, str] | None = None, unprivileged: bool = False
) -> Iterator[Run]:
    """A run that does not outlive the block."""
    run = Run(options, terminal, env, unprivileged)
    try:
        yield run
    finally:
        run.close()


def _environ(folder: Path) -> bytes:
    return (folder / "environ").read_bytes()


def _becomes(terminal: bool, unprivileged: bool) -> Callable[[], None]:
    """What the child does before it becomes the demo."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        if terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if unprivileged and os.geteuid() == 0:
            libc.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)

    return prepare
