"""Roles: started in their order, ended in reverse, and never beside a stale process."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvik.roles import (
    HttpReady,
    LineReady,
    LocalNode,
    PortReady,
    Readiness,
    Role,
    RoleError,
    RoleGraph,
    hosts,
    keeper,
    ports,
)
from kvik.roles.graph import waves
from kvik.roles.ports import free_ports, holders

HERE = {"": LocalNode(sys.executable)}
# Says that it is up, and, when it is told to end, writes its name into the file.
POLITE = """
import os, signal, sys
def end(*_):
    with open(sys.argv[2], "a") as file:
        file.write(sys.argv[1] + "\\n")
    os._exit(0)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # one that comes before it waits is kept
print("up", flush=True)
signal.sigwait([signal.SIGTERM])
end()
"""
LISTENER = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    server.accept()
"""


def polite(name: str, ends: Path, *after: str, ready: Readiness | None = None) -> Role:
    """A role that writes down when it ends."""
    return Role(
        name,
        (sys.executable, "-c", POLITE, name, str(ends)),
        ready or LineReady("up", limit=60.0),
        after=after,
        grace=60.0,
    )


def test_order_of_starts_and_ends(tmp_path: Path) -> None:
    """What waits for others starts after them and ends before them."""
    ends = tmp_path / "ends"
    roles = [polite("router", ends, "prefill", "decode"), polite("prefill", ends), polite("decode", ends)]
    with RoleGraph(roles, HERE, tmp_path) as graph:
        assert list(graph.processes) == ["prefill", "decode", "router"]
        assert graph.dead() == ()
        assert graph.ready_seconds.keys() == {"prefill", "decode", "router"}
    said = ends.read_text().split()
    assert said[0] == "router"
    assert sorted(said[1:]) == ["decode", "prefill"]


def test_orders_that_cannot_be() -> None:
    """Circles, names that are there twice, and roles that are waited for and are not there."""
    with pytest.raises(RoleError, match="wait for each other: a, b"):
        waves([polite("a", Path(), "b"), polite("b", Path(), "a")])
    with pytest.raises(RoleError, match="two roles have one name"):
        waves([polite("a", Path()), polite("a", Path())])
    with pytest.raises(RoleError, match="a waits for c, which is no role"):
        waves([polite("a", Path(), "c")])
    with pytest.raises(RoleError, match="runs on '', and the nodes are far"):
        RoleGraph([polite("a", Path())], {"far": HERE[""]}, Path())


def test_one_that_does_not_come_up_ends_all(tmp_path: Path) -> None:
    """The error has its log; those that were up are ended."""
    ends = tmp_path / "ends"
    broken = Role(
        "broken", (sys.executable, "-c", "raise SystemExit('no memory')"), LineReady("up"), after=("a",)
    )
    with pytest.raises(RoleError, match=r"broken ended with status 1(.|\n)*no memory"):
        RoleGraph([polite("a", ends), broken], HERE, tmp_path).start()
    assert ends.read_text() == "a\n"
    late = polite("late", ends, ready=LineReady("never", limit=0.5))
    with pytest.raises(RoleError, match="late was not ready in time"):
        RoleGraph([late], HERE, tmp_path).start()
    missing = Role("missing", ("/no/such/program",), LineReady("up"))
    with pytest.raises(
        RoleError, match=r"missing ended with status 127(.|\n)*/no/such/program: cannot be started"
    ):
        RoleGraph([missing], HERE, tmp_path).start()


def test_what_another_process_said_is_not_this_ones(tmp_path: Path) -> None:
    """A log of the same name is there already, as of a run before into the same folder."""
    (tmp_path / "broken.log").write_text("up\n")
    broken = Role("broken", (sys.executable, "-c", "raise SystemExit('no memory')"), LineReady("up"))
    with pytest.raises(RoleError, match=r"broken ended with status 1(.|\n)*no memory"):
        RoleGraph([broken], HERE, tmp_path).start()
    assert (tmp_path / "broken.log").read_text() == "up\nno memory\n"


def test_a_kernel_without_such_cables_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one without IPv6: as what this machine lacks, whoever asks."""

    def run(_host: hosts.Host, *command: str) -> str:
        raise RuntimeError(f"{' '.join(command[:3])}: status 2: Error: Unknown device type.")

    monkeypatch.setattr(hosts, "_namespace", lambda: contextlib.nullcontext(-1))
    monkeypatch.setattr(shutil, "which", lambda _name: "/sbin/ip")
    monkeypatch.setattr(hosts.Host, "run", run)
    with pytest.raises(hosts.CannotError, match="ip link add: status 2: Error: Unknown device type"):
        contextlib.ExitStack().enter_context(hosts.two_hosts())


def test_a_thread_is_where_it_was_when_a_namespace_was_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no descriptor left, what it does next would be on a host without any network."""
    entered: list[int] = []
    whole, descriptors = os.open, [True, False]

    def opened(path: str, flags: int) -> int:
        if not descriptors.pop(0):
            raise OSError(24, "Too many open files")
        return whole(path, flags)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(unshare=lambda _what: 0))
    monkeypatch.setattr(hosts, "_enter", entered.append)
    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(OSError, match="Too many open files"):
        contextlib.ExitStack().enter_context(hosts._namespace())
    assert len(entered) == 1


def test_a_stale_process_is_a_finding(tmp_path: Path) -> None:
    """Who has a port that a role needs is named, before anything is started."""
    ends = tmp_path / "ends"
    (port,) = free_ports(1)  # none that another connection gets when it is given back
    with socket.create_server(("127.0.0.1", port)):
        assert [one.pid for one in holders([port])] == [os.getpid()]
        needs = Role(
            "server", (sys.executable, "-c", LISTENER, str(port)), PortReady("127.0.0.1", port), ports=(port,)
        )
        with pytest.raises(
            RoleError, match=rf"server cannot start: port {port} is taken by process {os.getpid()}"
        ):
            RoleGraph([polite("first", ends), needs], HERE, tmp_path).start()
    assert not ends.exists()
    assert not (tmp_path / "first.log").exists()
    with RoleGraph([needs], HERE, tmp_path) as graph:
        assert [one.pid for one in holders([port])] == [graph.processes["server"].pid]
    assert holders([port]) == []


def test_two_roles_of_one_port_are_refused(tmp_path: Path) -> None:
    """The one that has it would answer for the other one."""
    roles = [
        Role(name, (sys.executable, "-c", LISTENER, "9"), PortReady("127.0.0.1", 9), ports=(9,))
        for name in ("one", "two")
    ]
    with pytest.raises(RoleError, match="one and two have one port: 9"):
        RoleGraph(roles, HERE, tmp_path).start()
    assert list(tmp_path.iterdir()) == []


def test_a_role_has_its_folder_and_environment(tmp_path: Path) -> None:
    """Beside what this process has."""
    folder = tmp_path / "work"
    folder.mkdir()
    says = "import os; print(os.getcwd(), os.environ['KEY'], flush=True)"
    role = Role("says", (sys.executable, "-c", f"{says}; import signal; signal.pause()"), LineReady("value"),
                env={"KEY": "value"}, folder=folder)  # fmt: skip
    with RoleGraph([role], HERE, tmp_path) as graph:
        assert graph.processes["says"].said().split() == [str(folder), "value"]
        assert "value" in graph.tail("says")


def test_http_readiness(tmp_path: Path) -> None:
    """Ready means that its path answers 200."""
    (port,) = free_ports(1)
    files = (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port))
    role = Role("files", files, HttpReady("127.0.0.1", port, "/", limit=60.0), folder=tmp_path, ports=(port,))
    with RoleGraph([role], HERE, tmp_path):
        pass


@pytest.mark.parametrize("end", ["closes", "says nothing"])
def test_a_keeper_far_away(tmp_path: Path, end: str) -> None:
    """Its text alone, sent along: it reads what to do, and ends it when nobody is there any more."""
    source = Path(keeper.__file__).read_text()
    ends = tmp_path / "ends"
    asked = {
        "command": [sys.executable, "-c", POLITE, "far", str(ends)], "grace": 60.0, "env": {"A": "b"},
        "folder": str(tmp_path / "made"),
        "lease": 60.0 if end == "closes" else 4.0,
    }  # fmt: skip
    far = subprocess.Popen(
        [sys.executable, "-S", "-c", source, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert far.stdin is not None
    assert far.stdout is not None
    far.stdin.write(json.dumps(asked).encode() + b"\n")
    far.stdin.flush()
    assert far.stdout.readline() == b"up\n"
    assert (tmp_path / "made").is_dir()
    if end == "closes":
        far.stdin.close()
    else:
        began = time.monotonic()
        for _ in range(11):
            far.stdin.write(b".")
            far.stdin.flush()
            with pytest.raises(subprocess.TimeoutExpired):
                far.wait(0.4)  # it is there as long as it hears of us
        assert time.monotonic() - began > 4.0
    assert far.wait(60) == 0
    assert ends.read_text() == "far\n"
    assert (b"nothing was heard of who has started this for 4 s" in far.stdout.read()) == (end != "closes")
    far.stdout.close()


def test_what_is_said_far_away_comes_in_its_order(tmp_path: Path) -> None:
    """Also what goes to two streams: a connection carries each by itself."""
    says = "for n in range(40): print(n, file=[sys.stdout, sys.stderr][n % 2], flush=True)"
    command = [sys.executable, "-c", f"import sys\n{says}"]
    asked = {"command": command, "grace": 60.0, "env": {}, "folder": str(tmp_path), "lease": 60.0}
    with subprocess.Popen(
        [sys.executable, "-S", "-c", Path(keeper.__file__).read_text(), "-"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as far:  # fmt: skip
        assert far.stdin is not None
        assert far.stdout is not None
        far.stdin.write(json.dumps(asked).encode() + b"\n")
        far.stdin.flush()
        assert far.stdout.read().split() == [b"%d" % n for n in range(40)]


def test_ports_as_a_program() -> None:
    """As another machine runs it: its text alone."""
    source = Path(ports.__file__).read_text()
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        asked = [sys.executable, "-S", "-c", source, "holders", str(taken)]
        (found,) = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
        assert (found["port"], found["pid"]) == (taken, os.getpid())
    free = [sys.executable, "-S", "-c", source, "free", "3"]
    assert len(set(json.loads(subprocess.run(free, capture_output=True, check=True).stdout))) == 3
