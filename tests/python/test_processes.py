"""Child processes end when they should, however their starter ends."""

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest

from kvik.roles import ports, processes
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet, HttpServer, Process, ProcessError, descendants

# Starts a grandchild in a session of its own that ignores SIGTERM, writes its pid and waits for ever.
STUBBORN = """
import pathlib, signal, subprocess, sys
grandchild = "from signal import *; signal(SIGTERM, SIG_IGN); print('up', flush=True); pause()"
child = subprocess.Popen([sys.executable, "-c", grandchild], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
signal.pause()
"""
# Starts the stubborn one as a `Process`, says so, and waits to be killed.
STARTER = """
import signal, sys, pathlib
from kvik.roles.processes import Process
process = Process("stubborn", [sys.executable, "-c", sys.argv[1], sys.argv[2]], pathlib.Path(sys.argv[3]))
print("started", flush=True)
signal.pause()
"""


def gone(pid: int, within: float = 60.0) -> bool:
    """Whether a process that is not ours has ended in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within)[0])
    finally:
        os.close(handle)


def pid_in(file: Path, within: float = 60.0) -> int:
    """The number in a file, as soon as it is there."""
    until = time.monotonic() + within
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until, f"{file} did not come"
        time.sleep(0.02)
    return int(file.read_text())


@contextlib.contextmanager
def killed_after(pid: int) -> Iterator[None]:
    """What a failing test leaves is not left."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_stop_ends_all_descendants(tmp_path: Path) -> None:
    """Also one with its own session that ignores SIGTERM."""
    with Fleet() as fleet:
        command = [sys.executable, "-c", STUBBORN, str(tmp_path / "pid")]
        process = fleet.add(Process("stubborn", command, tmp_path / "log"))
        grandchild = pid_in(tmp_path / "pid")
        assert process.alive
    assert process.wait(0) is not None
    assert gone(grandchild)


def test_a_keeper_that_is_late_leaves_nothing(tmp_path: Path) -> None:
    """One that stood still while its time for this went by has still everything to end."""
    late = "import sys; from kvik.roles import keeper; keeper.SWEEP_LIMIT = 0.0; keeper.main(sys.argv[1:])"
    command = [sys.executable, "-c", late, "0", sys.executable, "-c", STUBBORN, str(tmp_path / "pid")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as keeper:
        grandchild = pid_in(tmp_path / "pid")
        assert keeper.stdin is not None
        keeper.stdin.close()
    with killed_after(grandchild):
        assert gone(grandchild)


def test_a_keeper_that_stands_still_leaves_nothing(tmp_path: Path) -> None:
    """As one that gets no processor: what it would have ended is ended for it, and so is the keeper."""
    with Fleet() as fleet:
        command = [sys.executable, "-c", STUBBORN, str(tmp_path / "pid")]
        process = fleet.add(Process("stubborn", command, tmp_path / "log", grace=0.0))
        grandchild, child = pid_in(tmp_path / "pid"), process.pid
        os.kill(process.keeper_pid, signal.SIGSTOP)
    with killed_after(grandchild):
        assert process.wait(0) is not None
        assert gone(child)
        assert gone(grandchild)


def test_one_that_is_late_itself_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a keeper that stands still, where its starter did so, too: 100 seconds at each look at the clock."""
    command = [sys.executable, "-c", STUBBORN, str(tmp_path / "pid")]
    process = Process("stubborn", command, tmp_path / "log", grace=0.0)
    grandchild, child = pid_in(tmp_path / "pid"), process.pid
    os.kill(process.keeper_pid, signal.SIGSTOP)
    clock = itertools.count(step=100)
    with killed_after(grandchild):
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
        process._kill_family()
        assert process.wait(0) is not None
        assert gone(child)
        assert gone(grandchild)


def test_a_keeper_that_does_not_end_holds_up_nobody(tmp_path: Path) -> None:
    """As one that waits in the kernel: the processes besides are stopped, too."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass

    class Stuck:
        pid, stdin, killed = ended.pid, None, False

        def poll(self) -> int | None:
            return None

        def wait(self, timeout: float | None = None) -> int:
            raise subprocess.TimeoutExpired("stuck", timeout or 0.0)

        def kill(self) -> None:
            self.killed = True

    class StuckProcess(Process):
        def _launch(self, _out: BinaryIO, _env: Mapping[str, str]) -> Stuck:
            return stuck

    stuck = Stuck()
    with Fleet() as fleet:
        other = fleet.add(Process("other", [sys.executable, "-c", STUBBORN, str(tmp_path / "pid")],
                                  tmp_path / "log", grace=0.0))  # fmt: skip
        fleet.add(StuckProcess("stuck", [], tmp_path / "stuck"))
    assert stuck.killed
    assert not other.alive


def test_a_process_of_any_name_is_found() -> None:
    """The kernel cuts names behind 15 bytes, amid a character."""
    named = (
        'import ctypes; ctypes.CDLL(None).prctl(15, b"a) \\xe3\\x81", 0, 0, 0); print(flush=True); input()'
    )
    with subprocess.Popen(
        [sys.executable, "-c", named], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in descendants(os.getpid())
        child.stdin.write(b"\n")


def test_killed_starter_leaves_nothing(tmp_path: Path) -> None:
    """SIGKILL to the starter: nobody is left to clean up but the keeper."""
    command = [sys.executable, "-c", STARTER, STUBBORN, str(tmp_path / "pid"), str(tmp_path / "log")]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        grandchild = pid_in(tmp_path / "pid")
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.wait(60)
    assert gone(grandchild)


def test_early_end_shows_the_log(tmp_path: Path) -> None:
    """A server that dies at its start is reported at once, with what it said."""
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with Fleet() as fleet:
        server = fleet.add(HttpServer("broken", command, free_ports(1)[0], tmp_path / "log"))
        with pytest.raises(ProcessError, match=r"status 3(.|\n)*no such model"):
            server.wait_ready(time.monotonic() + 60)


def test_deadline_of_readiness(tmp_path: Path) -> None:
    """A server that never answers is given up at the deadline."""
    with Fleet() as fleet:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        server = fleet.add(HttpServer("silent", command, free_ports(1)[0], tmp_path / "log"))
        with pytest.raises(ProcessError, match="not ready in time"):
            server.wait_ready(time.monotonic() + 0.5)


def test_free_ports_are_beside_those_of_connections() -> None:
    """A port that a server gets later cannot be given to a connection meanwhile."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert not [port for port in ports if low <= port <= high]
    for port in ports:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_no_two_processes_choose_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a server listens there, nothing but the choice itself tells that a port is taken."""
    choose = "from kvik.roles.ports import free_ports; print(*free_ports(3), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", choose], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        chosen = [int(port) for port in other.stdout.readline().split()]
        monkeypatch.setattr(ports, "_beside", lambda _taken: chosen)
        monkeypatch.setattr(ports, "TRIED", len(chosen))
        with pytest.raises(OSError, match="1 free ports are needed, and of 3 that were tried 0 are"):
            free_ports(1)
        other.stdin.write("\n")
    assert sorted(free_ports(3)) == sorted(chosen)


def test_http_server_becomes_ready(tmp_path: Path) -> None:
    """Ready means that the health path answers 200."""
    port = free_ports(1)[0]
    command = [
        sys.executable,
        "-m",
        "http.server",
        "--bind",
        "127.0.0.1",
        str(port),
        "--directory",
        str(tmp_path),
    ]
    with Fleet() as fleet:
        server = fleet.add(HttpServer("files", command, port, tmp_path / "log", health="/"))
        server.wait_ready(time.monotonic() + 60)
        assert server.pid > 0
        assert server.healthy()
