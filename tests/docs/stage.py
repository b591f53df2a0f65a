"""Where a page's commands run: a folder of its own, on a machine of its own as far as the network goes.

Each page has two hosts, made of network namespaces, so that the ports that it names are free and addresses of
two machines are real. Where namespaces cannot be had, pages of one host run on this machine as it is, one at
a time.
"""

import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvik.roles.hosts import CannotError
from tests.docs.pages import Block
from tests.netns.hosts import Host, two_hosts

HERE, THERE = "192.0.2.10", "192.0.2.11"  # for documentation (RFC 5737), and used by it
# One that leaves before its input has ended may, by luck, end the writer with an error: these read all of it.
PATIENT = " ".join(
    f'{name}() {{ local status=0; command {name} "$@" || status=$?; cat > /dev/null; return $status; }};'
    for name in ("head", "grep")
)
LIMIT = 240.0  # seconds for one block
END_LIMIT = 20.0


class BlockError(Exception):
    """A block did not do what its page says; the text has what it printed."""


@dataclass
class Running:
    """A block that was started. Its output is collected as it comes."""

    block: Block
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _ended: bool = False

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return "".join(self.lines)

    def wait_for(self, text: str) -> None:
        """Wait until it has printed `text`."""
        with self._changed:
            seen = self._changed.wait_for(lambda: text in self.output or self._ended, LIMIT)
        if not seen or text not in self.output:
            raise BlockError(f"{self.block.place}: never printed {text!r}; it printed:\n{self.output}")

    def wait(self) -> None:
        """Wait for its end, and compare its status."""
        try:
            status = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise BlockError(f"{self.block.place}: ran longer than {LIMIT:g} s:\n{self.output}") from None
        self._reader.join(END_LIMIT)
        if status != self.block.status:
            raise BlockError(f"{self.block.place}: status {status}; it printed:\n{self.output}")

    def end(self) -> None:
        """End it and all that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_LIMIT)
                break
        # What a shell started in the background may outlive it; the group is ours alone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._reader.join(END_LIMIT)

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@dataclass
class Stage:
    """The folder and the hosts of one page, and what runs in the background there."""

    folder: Path
    hosts: tuple[Host, Host] | None
    background: list[Running] = field(default_factory=list)
    python: str = ""

    def run(self, block: Block) -> None:
        """Run one block: to its end, or until it has printed what its page waits for."""
        running = Running(block, self._start(block))
        if block.until is not None:
            self.background.append(running)
            running.wait_for(block.until)
            return
        try:
            running.wait()
        except BlockError as error:
            raise BlockError("\n".join([str(error), *map(_heard, self.background)])) from None
        finally:
            running.end()

    def save(self, block: Block) -> None:
        """Write a block that is a file."""
        target = self.folder / str(block.file)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(block.text, encoding="utf-8")

    def _start(self, block: Block) -> subprocess.Popen[str]:
        if block.language == "python":
            self.python = self.python + "\n" + block.text if block.continues else block.text
            name = f"block-{block.line}.py"
            script_file = self.folder.parent / name
            script_file.write_text(self.python, encoding="utf-8")
            command = f"python {script_file}"
        else:
            command = block.text
        if block.other_host and self.hosts is None:
            raise BlockError(f"{block.place}: there is no other host")
        host = None if self.hosts is None else self.hosts[int(block.other_host)]
        # Variables that are exported and the folder that is entered last from block to block, as at a prompt.
        # What runs in the background leaves nothing: it may end while the next block reads what is there.
        state = self.folder.parent / ("state-there" if block.other_host else "state-here")
        save = f"status=$?; {{ export -p; printf 'cd %q' \"$PWD\"; }} > {state}; exit $status"
        trap = f"trap {shlex.quote(save)} EXIT;" if block.until is None else ""
        script = f"set -eo pipefail; {PATIENT} {trap} . {state}; {command}"
        state.touch()
        with host.inside() if host else contextlib.nullcontext():
            return subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=self._env(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def _env(self) -> dict[str, str]:
        # Nor the folder of configuration files of whoever runs the tests.
        not_kept = ("KVIK_", "PYTEST", "XDG_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(not_kept)}
        home = self.folder.parent / "home"
        home.mkdir(exist_ok=True)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**kept, "PATH": path, "HOME": str(home), "TMPDIR": str(home), "PYTHONUNBUFFERED": "1"}

    def end(self) -> None:
        """End what runs in the background, the last first."""
        for running in reversed(self.background):
            running.end()


def _heard(running: Running) -> str:
    return f"in the background, {running.block.place}:\n{running.output}"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No page in another process of pytest is here at the same time: they name the same ports."""
    with Path(__file__).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    """A stage in `folder`, which is empty; what runs on it ends with the block."""
    inner = folder / "page"
    inner.mkdir()
    with contextlib.ExitStack() as stack:
        hosts = None
        with contextlib.suppress(CannotError):
            hosts = stack.enter_context(two_hosts())
        if hosts is not None:
            for host, address in zip(hosts, (HERE, THERE), strict=True):
                host.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        else:
            stack.enter_context(_alone())
        made = Stage(inner, hosts)
        stack.callback(made.end)
        yield made
