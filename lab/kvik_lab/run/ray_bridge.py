"""Between this host and nodes of Ray: a process that holds them, and small ones that it carries commands for.

    python -m kvik_lab.run.ray_bridge SOCKET ASKED     # ASKED is JSON: address, wait, bundles
    python ray_bridge.py SOCKET NUMBER COMMAND...      # as if COMMAND ran here, and it runs on node NUMBER

The first one prints `HELD` with a JSON list, of each node its address and its host's name, when it has
them, and gives them back when it ends. It alone needs `ray`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

HELD = "kvik-lab holds "
GONE = 255  # the exit status of a command of which nothing more is heard
DRAIN = 20.0  # seconds for commands to end when this process is told to
COMMANDS = 256  # at once, on a node
CHUNK = 1 << 16


class Host:
    """On a node of Ray, as an actor: starts commands, and passes on their input and output."""

    def __init__(self) -> None:
        """None runs."""
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def about(self) -> dict[str, str]:
        """The node's address, and its host's name."""
        ray = importlib.import_module("ray")
        return {"address": ray.util.get_node_ip_address(), "host": platform.node()}

    def start(self, command: Sequence[str]) -> int:
        """Start it; returns its process id. `OSError` where it cannot be started as it should."""
        raylet = os.getppid()
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True, env=_environment(raylet),
        )  # fmt: skip
        try:  # a worker, and what it starts, comes after all others on its host
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, raylet))
        except PermissionError:
            process.kill()
            process.wait()
            raise PermissionError(
                "Ray's workers have a niceness that no time should be measured with, and this user may not "
                "change it; start Ray there with RAY_worker_niceness=0 in its environment"
            ) from None
        self._running[process.pid] = process
        return process.pid

    def send(self, pid: int, data: bytes) -> None:
        """Write to its input; nothing closes it."""
        stdin = cast(IO[bytes], self._running[pid].stdin)
        with contextlib.suppress(BrokenPipeError, ValueError):
            if data:
                stdin.write(data)
            else:
                stdin.close()

    def output(self, pid: int) -> Iterator[tuple[int, bytes]]:
        """What it prints, behind 1 or 2 as the descriptors are; and at its end 0, with its exit status."""
        process = self._running[pid]
        with selectors.DefaultSelector() as both:
            for number, pipe in ((1, process.stdout), (2, process.stderr)):
                both.register(cast(IO[bytes], pipe), selectors.EVENT_READ, number)
            while both.get_map():
                for key, _ in both.select():
                    if data := os.read(key.fd, CHUNK):
                        yield key.data, data
                    else:
                        both.unregister(key.fileobj)
        status = process.wait()
        del self._running[pid]
        yield 0, bytes([status if status >= 0 else 128 - status])


def _environment(raylet: int) -> dict[str, str]:
    """What Ray was started with there, and the devices that it gave: a worker's own has fewer threads for
    OpenMP, and is of Ray's job."""
    pairs = Path(f"/proc/{raylet}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    given = {name: value for name, value in os.environ.items() if "_VISIBLE_" in name}
    return {**dict(pair.split("=", 1) for pair in pairs if "=" in pair), **given}


def hold(path: str, asked: Mapping[str, Any]) -> int:
    """Ask for nodes, and carry commands to them until SIGTERM; returns an exit status."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        print(f"{error}; install it for {sys.executable}: pip install 'kvik-lab[ray]'")
        return 1
    stop = threading.Event()
    try:
        ray.init(address=asked["address"], log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        print(f"Ray at {asked['address']}: {error}")
        return 1
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    group = ray.util.placement_group(asked["bundles"], strategy="STRICT_SPREAD")
    try:
        while not group.wait(min(1.0, asked["wait"])):
            asked = {**asked, "wait": asked["wait"] - 1.0}
            if asked["wait"] <= 0 or stop.is_set():
                free = ray.available_resources()
                print(f"wanted, each on a host of its own: {asked['bundles']}; free: {free}")
                return 1
        hosts = [_host(ray, group, number, bundle) for number, bundle in enumerate(asked["bundles"])]
        about = ray.get([host.about.remote() for host in hosts])
        _serve(path, hosts, ray.get, stop, f"{HELD}{json.dumps(about)}")
    finally:
        ray.util.remove_placement_group(group)
        ray.shutdown()
    return 0


def _host(ray: Any, group: Any, number: int, bundle: Mapping[str, float]) -> Any:
    """An actor with all that one bundle has."""
    more = {name: value for name, value in bundle.items() if name not in ("CPU", "GPU", "memory")}
    place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, number)
    actor = ray.remote(Host).options(
        num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), memory=bundle.get("memory", 0) or None,
        resources=more, scheduling_strategy=place, max_concurrency=COMMANDS,
        # A keeper ends what it keeps, and more than that; killed by Ray, it cannot.
        runtime_env={"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}},
    )  # fmt: skip
    return actor.remote()


def _serve(path: str, hosts: Sequence[Any], get: Any, stop: threading.Event, ready: str) -> None:
    running: list[threading.Thread] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(COMMANDS)
        server.settimeout(1.0)
        print(ready, flush=True)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                thread = threading.Thread(target=_carry, args=(hosts, get, connection), daemon=True)
                thread.start()
                running = [one for one in running if one.is_alive()] + [thread]
    for thread in running:  # their input has ended, too, or does now
        thread.join(DRAIN)


def _carry(hosts: Sequence[Any], get: Any, connection: socket.socket) -> None:
    """One command. Its input and output are descriptors of who asks; what the connection brings back is its
    exit status, and nothing where its node is gone."""
    with connection, contextlib.ExitStack() as stack:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        number, command = json.loads(connection.makefile("rb").readline())
        try:
            _relay(hosts[number], get, command, descriptors, connection)
        except OSError as error:  # as it is there
            _write(descriptors[2], f"cannot be started: {_last(error)}\n".encode())
            with contextlib.suppress(OSError):
                connection.send(bytes([127]))
        except Exception as error:  # of Ray's many: the node, its actor or the cluster is gone
            _write(descriptors[2], f"{type(error).__name__}: {_last(error)}\n".encode())


def _relay(
    host: Any, get: Any, command: Sequence[str], descriptors: Sequence[int], connection: socket.socket
) -> None:
    pid = get(host.start.remote(command))
    feed = threading.Thread(target=_feed, args=(host, get, pid, descriptors[0], connection), daemon=True)
    feed.start()
    try:
        for one in host.output.remote(pid):
            kind, data = get(one)
            if kind:
                _write(descriptors[kind], data)
            else:
                connection.send(data)
    finally:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # for the thread
        feed.join(DRAIN)


def _last(error: Exception) -> str:
    """Of a text that has the stack of a worker before it."""
    return str(error).strip().rpartition("\n")[2]


def _feed(host: Any, get: Any, pid: int, stdin: int, connection: socket.socket) -> None:
    """Its input, until that ends, or who asked has."""
    with contextlib.suppress(Exception), selectors.PollSelector() as both:
        both.register(stdin, selectors.EVENT_READ)
        both.register(connection, selectors.EVENT_READ)
        data = b"."
        while data:
            ready = [key.fd for key, _ in both.select()]
            data = os.read(stdin, CHUNK) if ready == [stdin] else b""
            get(host.send.remote(pid, data))


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    with contextlib.suppress(BrokenPipeError):
        while left:
            left = left[os.write(descriptor, left) :]


def carry(path: str, number: int, command: Sequence[str]) -> int:
    """Have a command run on a node, with this process's input and output; returns its exit status."""
    with socket.socket(socket.AF_UNIX) as bridge:
        try:
            bridge.connect(path)
            socket.send_fds(bridge, [b"."], [0, 1, 2])
            bridge.sendall(json.dumps([number, command]).encode() + b"\n")
            status = bridge.recv(1)
        except OSError as error:
            print(f"the connection to Ray is gone: {error}", file=sys.stderr)
            return GONE
    return status[0] if status else GONE


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.exit(hold(sys.argv[1], json.loads(sys.argv[2])))
    sys.exit(carry(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
