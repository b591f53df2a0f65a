"""A server ends when it is told to, at every moment, says why when it must, and leaves no rank behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

from tests.python.emulator import servers
from tests.python.emulator.servers import LIMIT
from tests.python.peers import stop
from tests.python.test_processes import gone

# The command, of which `sys.argv[1]` is done when its ranks are up, and before it serves.
COMMAND = """
import os, signal, sys
from kvik.cli import main
from kvik.emulator.front import Front
whole = Front.start
async def start(front):
    await whole(front)
    print("up", flush=True)
    exec(sys.argv[1])
Front.start = start
main(["emulator", "serve", "--kv-memory", "1MiB", *sys.argv[2:]])
"""


@contextlib.contextmanager
def _server(done: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A server whose ranks are up, and their process ids."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, done, *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        ranks: list[int] = []
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            ranks = servers.ranks_of(server)
            assert ranks
            yield server, ranks
        finally:
            for pid in [server.pid, *ranks]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_signal_between_start_and_service_is_heard() -> None:
    with _server("os.kill(os.getpid(), signal.SIGTERM)") as (server, ranks):
        _, said = server.communicate(timeout=LIMIT)
        assert server.returncode in (0, 1)
        assert "Traceback" not in said
        assert all(map(gone, ranks))


def test_a_port_that_another_server_took_meanwhile_is_named() -> None:
    """Two that are started at once can both have the address until one of them listens."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with _server("sys.stdin.readline()", "--port", str(port)) as (server, ranks):
            other.listen()
            _, said = server.communicate("\n", timeout=LIMIT)
            assert server.returncode == 1
            assert said == f"Error: [Errno 98] http://127.0.0.1:{port}: Address already in use\n"
            assert all(map(gone, ranks))


def test_a_stopped_rank_does_not_outlive_a_killed_server() -> None:
    with _server("") as (server, (rank,)):
        stop(rank)
        server.kill()
        server.wait(LIMIT)
        assert gone(rank)
