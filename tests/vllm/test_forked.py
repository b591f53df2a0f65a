"""The way in which the servers of these tests are started: what is forked is what was asked for, and ends."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from kvik.demo.engines import EngineSpec
from kvik.roles.ports import free_ports
from kvik.roles.processes import descendants
from tests.vllm.forked import ForkParent
from tests.vllm.pairs import START_LIMIT, start_engine

GONE = 60.0  # seconds until every process of a killed server is gone


def test_a_variable_that_imports_have_read_is_refused(
    fork_parent: ForkParent, model: Path, tmp_path: Path
) -> None:
    """A server that would run with another setting than it was given is not started."""
    spec = EngineSpec("threads", env={"OMP_NUM_THREADS": "2"})
    with pytest.raises(AssertionError, match=r"read by imports: \['OMP_NUM_THREADS'\]"):
        start_engine(fork_parent, model, spec, free_ports(1)[0], tmp_path)


def test_nothing_is_left_of_a_killed_server(fork_parent: ForkParent, model: Path, tmp_path: Path) -> None:
    """The server has its own processes, under its keeper; all of them end with it, and its status is told."""
    server = start_engine(fork_parent, model, EngineSpec("killed"), free_ports(1)[0], tmp_path)
    try:
        server.wait_ready(time.monotonic() + START_LIMIT)
        pids = descendants(server.pid)
        names = set()
        for pid in pids:
            with contextlib.suppress(OSError):  # one that has ended meanwhile
                names.add(Path(f"/proc/{pid}/comm").read_text().strip())
        assert names >= {"VLLM::EngineCor", "VLLM::Worker"}, names
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait(GONE) == 128 + signal.SIGKILL
        assert not server.alive
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    finally:
        server.stop()
