"""vLLM servers, and programs that use vLLM, forked from a process in which vLLM is imported already; see
`fork_parent`."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO

from kvik.demo.engines import EngineSpec
from kvik.roles import keeper
from kvik.roles.processes import HttpServer, Keeper, Process
from tests.vllm import fork_parent

ROOT = Path(__file__).parents[2]
IMPORTS = 240.0  # seconds; 10 where nothing else runs
ANSWER = 60.0  # seconds for a fork


class ForkParent:
    """The process that forks; it imports vLLM from its start on, and runs while the `with` block does."""

    def __init__(self, folder: Path) -> None:
        """Start it; its log is in this folder."""
        self.log = folder / "fork-parent.log"
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        self._ready = False
        self._began = dict(os.environ)
        command = [sys.executable, "-m", fork_parent.__name__, str(its.fileno()), keeper.__file__]
        environment = {**os.environ, **EngineSpec("any").environment()}
        with its, self.log.open("wb") as out:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment,
                pass_fds=[its.fileno()],
            )  # fmt: skip

    def fork(
        self, command: Sequence[str], grace: float, out: BinaryIO, environment: Mapping[str, str]
    ) -> Keeper:
        """A keeper with this command, in the network namespace of the calling thread."""
        if not self._ready:
            self._control.settimeout(IMPORTS)
            assert self._control.recv(64) == b"ready", f"vLLM cannot be imported:\n{self.log.read_text()}"
            self._ready = True
        self._control.settimeout(ANSWER)
        watched, holding = os.pipe()
        status, telling = os.pipe()
        network = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        # What imports of the tests' own process have set since is none of the server's.
        own = os.environ.keys() - self._began.keys()
        environment = {name: value for name, value in environment.items() if name not in own}
        asked = {"command": list(command), "grace": grace, "environment": environment}
        try:
            passed = [out.fileno(), watched, network, telling]
            socket.send_fds(self._control, [json.dumps(asked).encode()], passed)
        finally:
            for number in (watched, network, telling):
                os.close(number)
        answer, descriptors, _, _ = socket.recv_fds(self._control, 4096, 1)
        found = json.loads(answer)
        assert "pid" in found, f"no server was forked: {found}"
        return ForkedKeeper(found["pid"], descriptors[0], os.fdopen(holding, "wb"), status)

    def __enter__(self) -> "ForkParent":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:  # it still imports
            self._process.kill()
            self._process.wait()


class ForkedKeeper:
    """A keeper that is not a child of this process, used as if it were."""

    def __init__(self, pid: int, process: int, stdin: IO[bytes], status: int) -> None:
        """`process` and `status` are descriptors: of the process, and to read its exit status from."""
        self.pid = pid
        self.stdin = stdin
        self._process = process
        self._status = status
        self._ended: int | None = None

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._ended

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns its exit status, or raises `subprocess.TimeoutExpired`."""
        if self._ended is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("keeper", timeout or 0.0)
            # Nothing is there to be read when the parent of all was killed.
            self._ended = int(os.read(self._status, 64) or b"-9")
            os.close(self._status)
            os.close(self._process)
        return self._ended

    def kill(self) -> None:
        """End it at once."""
        if self._ended is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)


class ForkedProgram(Process):
    """`python -m MODULE ...`, but forked: with the environment of a server, and without standard input."""

    def __init__(
        self, parent: ForkParent, name: str, module: str, arguments: Sequence[str], log: Path
    ) -> None:
        """Start it."""
        self._parent = parent
        environment = EngineSpec(name, env={"PYTHONPATH": str(ROOT)}).environment()
        super().__init__(name, [sys.executable, "-m", module, *arguments], log, environment)

    def _launch(self, out: BinaryIO, env: Mapping[str, str]) -> Keeper:
        return self._parent.fork(self.command, self.grace, out, env)


class ForkedServer(HttpServer):
    """A vLLM server with the command line and environment of its `EngineSpec`, but forked."""

    def __init__(self, parent: ForkParent, spec: EngineSpec, model: Path, port: int, logs: Path) -> None:
        """Start it; it is up once `wait_ready` returns."""
        self._parent = parent
        super().__init__(
            spec.name, spec.command(model, port), port, logs / f"{spec.name}.log", spec.environment(),
            host=spec.host,
        )  # fmt: skip

    def _launch(self, out: BinaryIO, env: Mapping[str, str]) -> Keeper:
        return self._parent.fork(self.command, self.grace, out, env)
