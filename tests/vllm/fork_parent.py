"""A process that has imported vLLM and torch once, and forks a server each time it is asked for one.

    python -m tests.vllm.fork_parent SOCKET KEEPER

`SOCKET` is the number of a descriptor, `KEEPER` the file of `kvik.roles.keeper`. `tests.vllm.forked` starts
it and asks it.

A vLLM server is three processes or more, and nine tenths of the CPU seconds of its start are imports, in each
of them. Here they are forks of this process, which has one thread and nothing but imports behind it: the
server's own process, and the engine core and workers that vLLM starts from it. What a server does after its
imports is as ever: its command line is parsed, its model loaded, its KV cache allocated. kvik is not imported
here but by each process of each server.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

# What servers import until they are ready, by the modules that bring the rest.
MODULES = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
)
# Variables in which servers may differ, since nothing reads them during an import.
LATE = (
    "KVIK_SECRET", "PYTEST_CURRENT_TEST", "PYTHONPATH", "VLLM_CPU_KVCACHE_SPACE", "VLLM_HOST_IP",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
)  # fmt: skip
LARGEST = 1 << 20  # bytes of a request
BETWEEN_LOOKS = 5e-4  # seconds that a process of vLLM sleeps between two looks for a message
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Forked:
    """A child of the process that calls its methods."""

    pid: int

    def wait(self) -> int:
        """Wait for its end; returns its exit status, or -n after signal n."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class InChildError(BaseException):
    """Raised in the child after a fork, to leave the frames that are the parent's."""


class Parent:
    """Serves one socket: a request is a server's command, environment and descriptors."""

    def __init__(self, control: socket.socket, keeper: ModuleType, environment: dict[str, str]) -> None:
        """`environment` is that before the imports."""
        self._control = control
        self._keeper = keeper
        self._environment = environment
        self._ends: dict[int, tuple[int, int]] = {}  # descriptor of a child -> its id, where its status goes
        self._selector = selectors.PollSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> Callable[[], int] | None:
        """Fork until the socket is closed. Returns None then; and in each child what it has to do."""
        while True:
            for key, _ in self._selector.select():
                if key.fd != self._control.fileno():
                    self._told(key.fd)
                    continue
                data, descriptors, _, _ = socket.recv_fds(self._control, LARGEST, 4)
                if not data:
                    return None
                job = self._fork(json.loads(data), descriptors)
                if job is not None:
                    return job

    def _told(self, ended: int) -> None:
        """A child has ended: pass on how."""
        pid, status = self._ends.pop(ended)
        self._selector.unregister(ended)
        os.close(ended)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, b"%d" % Forked(pid).wait())
        os.close(status)

    def _fork(self, request: dict[str, object], descriptors: list[int]) -> Callable[[], int] | None:
        log, watched, network, status = descriptors
        environment = request["environment"]
        assert isinstance(environment, dict)
        fixed = self._differing(environment).difference(LATE)
        if fixed:
            self._control.send(json.dumps({"error": f"read by imports: {sorted(fixed)}"}).encode())
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        pid = os.fork()
        if pid == 0:
            self._control.close()
            for number in (status, *self._ends, *(end for _, end in self._ends.values())):
                os.close(number)
            return partial(self._keep, request, log, watched, network)
        ended = os.pidfd_open(pid)
        self._ends[ended] = (pid, status)
        self._selector.register(ended, selectors.EVENT_READ)
        socket.send_fds(self._control, [json.dumps({"pid": pid}).encode()], [ended])
        for descriptor in (log, watched, network):
            os.close(descriptor)
        return None

    def _differing(self, environment: dict[str, str]) -> set[str]:
        names = {*environment, *self._environment}
        return {name for name in names if environment.get(name) != self._environment.get(name)}

    def _keep(self, request: dict[str, object], log: int, watched: int, network: int) -> int:
        """In the child: be the keeper, with a server."""
        os.setsid()
        for number, standard in ((watched, 0), (log, 1), (log, 2)):
            os.dup2(number, standard)
        _enter(network)
        for number in (log, watched, network):
            os.close(number)
        environment, command, grace = request["environment"], request["command"], request["grace"]
        assert isinstance(environment, dict)
        assert isinstance(command, list)
        assert isinstance(grace, float)
        for name in self._differing(environment):
            if name in environment:
                os.environ[name] = environment[name]
            else:
                del os.environ[name]
        try:
            status = self._keeper.keep(grace, _start)
            assert isinstance(status, int)
        except InChildError:
            return _be_server(command)
        return status


def _start(before: Callable[[], None]) -> Forked:
    pid = os.fork()
    if pid != 0:
        return Forked(pid)
    before()
    raise InChildError


def _be_server(command: Sequence[str]) -> int:
    """In the keeper's child: run `python -m MODULE ...` as if it had been started so."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _close_all_but(1, 2)
    os.open(os.devnull, os.O_RDONLY)  # is 0, the lowest that is free
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    option, module = command[1:3]
    assert option == "-m", command
    sys.argv = [module, *command[3:]]
    _begin_fork_server()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _begin_fork_server() -> None:
    """Let this server's other processes be forks, too: of a child made now, before there are other threads.

    It is the standard library's own server for that, but forked from here instead of started anew.
    """
    usual = multiprocessing.util.spawnv_passfds

    def fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        code = args[-1]
        if "forkserver" not in str(code):
            return usual(path, args, passfds)
        pid = os.fork()
        if pid != 0:
            return pid
        try:
            _close_all_but(0, 1, 2, *passfds)
            exec(code, {})  # noqa: S102 - what `python -c` would have been given
        finally:
            os._exit(0)

    multiprocessing.util.spawnv_passfds = fork
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = usual
    # vLLM asks for "spawn" on CPUs.
    contexts = vars(multiprocessing.context)["_concrete_contexts"]
    contexts["spawn"] = contexts["forkserver"]


def _close_all_but(*kept: int) -> None:
    """Close descriptors as an exec would; no object of ours owns one."""
    for number in _open().difference(kept):
        os.close(number)


def _open() -> set[int]:
    """The descriptors of this process."""
    entries = list(Path("/proc/self/fd").iterdir())
    # That of the listing is closed by now.
    return {int(entry.name) for entry in entries if os.path.lexists(entry)}


def _enter(network: int) -> None:
    """Be in a network namespace, which takes privileges where it is not ours already."""
    ours = Path("/proc/self/ns/net").stat()
    if not os.path.samestat(ours, os.fstat(network)):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(network, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def main(control: socket.socket, keeper_file: str) -> int:
    """Import, say so, and serve."""
    environment = dict(os.environ)
    specification = importlib.util.spec_from_file_location("keeper", keeper_file)
    assert specification is not None
    assert specification.loader is not None
    keeper = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(keeper)
    for module in MODULES:
        importlib.import_module(module)
    _let_eager_stages_receive(sys.modules["vllm.v1.worker.cpu_model_runner"])
    _let_waits_sleep(sys.modules["vllm.distributed.device_communicators.shm_broadcast"])
    _check_forkable(control.fileno())
    gc.collect()
    gc.freeze()  # so that collections in children do not touch, and copy, what they share
    control.send(b"ready")
    job = Parent(control, keeper, environment).serve()
    return 0 if job is None else job()


def _let_eager_stages_receive(module: ModuleType) -> None:
    """vLLM makes the buffer into which a later pipeline stage receives when it warms up what it has compiled.
    With `--enforce-eager` nothing is compiled on a CPU, and the first request ends the server: here the
    buffer is made with the model. Compiling would cost a server's start a minute."""
    runner = vars(module)["CPUModelRunner"]
    load = runner.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(self, *args, **kwargs)
        if vars(self)["intermediate_tensors"] is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return loaded

    runner.load_model = load_model


def _let_waits_sleep(module: ModuleType) -> None:
    """vLLM's processes wait for each other in a loop that yields the processor, for a second after each
    message. Three servers on two processors take them from each other so: a third of the tests' time, and on
    Linux 6.18 nothing else of ordinary priority ran for up to two seconds, the tests' relay of heartbeats
    neither, so that engines took each other for dead. Here the loop sleeps. Servers with a command line of
    their own wait as ever."""
    assert "sched_yield" in vars(module), "vLLM waits in another way now"
    vars(module)["sched_yield"] = partial(time.sleep, BETWEEN_LOOKS)


def _check_forkable(control: int) -> None:
    """Nothing but memory may be left behind by the imports."""
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "an import has started a thread"
    assert _open() == {0, 1, 2, control}, f"an import has left descriptors open: {_open()}"
    assert "kvik" not in sys.modules, "kvik is to be imported by each server"


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]))
