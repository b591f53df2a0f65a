"""The soak of the store, for half a minute: everything it says of a run holds, and it finds what does not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.python.peers import ROOT

SOAK = ROOT / "bench" / "store_soak.py"
HELD: dict[str, Any] = {
    "puts": 9, "gets": 9, "blocks_got": 9, "durable_asked": 9, "wrong": 0, "lost": 0, "died": 0,
    "mismatches": 0, "dropped": 0, "corrupt": 0, "files_leaked": 0, "resident": 10, "resident_bound": 10,
    "files_that_are_no_segments": [],
}  # fmt: skip


@pytest.mark.timeout(300)
def test_clients_and_server_are_killed_and_nothing_is_wrong_or_lost() -> None:
    done = subprocess.run(
        [sys.executable, str(SOAK), "--minutes", "0.3", "--clients", "3", "--every", "3", "--bytes", "1GiB",
         "--memory", "256MiB"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills_of_the_server"] >= 1
    assert result["kills_of_clients"] >= 1


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("store_soak", SOAK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["store_soak"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"wrong": 1},
        {"lost": 1},
        {"died": 1},
        {"files_leaked": 2},
        {"resident": 11},
        {"files_that_are_no_segments": ["x"]},
        {"gets": 0},
    ],
)
def test_what_does_not_hold_is_said(soak: ModuleType, change: dict[str, Any]) -> None:
    assert len(soak.failures(HELD | change)) == len(change)


def test_what_ended_by_itself_was_not_killed(soak: ModuleType) -> None:
    """A client or a server that breaks is started again as one that was killed is: the run has to say so."""
    clients, server = object.__new__(soak.Clients), object.__new__(soak.Server)
    clients.counts, clients._processes, clients._readers = soak.Counts(), {}, []
    for ends, died in ((True, 1), (False, 0)):
        started = [subprocess.Popen(["true"] if ends else ["cat"], stdin=subprocess.PIPE) for _ in range(3)]
        for process in started if ends else ():
            process.wait()
        clients._processes[0], clients._processes[1], server.process = started
        clients.counts.died = 0
        clients.kill(0)
        assert clients.counts.died == died
        assert server.kill() == (not ends)
        clients._processes.pop(0)
        clients.end()
        assert clients.counts.died == 2 * died


def test_a_block_is_its_keys(soak: ModuleType) -> None:
    one, other = soak.content(b"\1" * 32), soak.content(b"\1" * 31 + b"\2")
    assert (one == soak.content(b"\1" * 32)).all()
    assert not (one == other).all()
    assert soak.prompt(7) == soak.prompt(7)
