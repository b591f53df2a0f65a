"""Which processes carry a mark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvik_lab.run import machine
from kvik_lab.tasks import shell

LOOKS = 50


@pytest.mark.timeout(600)
def test_a_process_that_becomes_another_program_is_found_at_every_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Within execve its environment reads as empty. What has none at all is not waited for."""
    monkeypatch.setattr(machine, "EXEC_LIMIT", 60.0)  # it may stand still within
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n[ -d /proc/{os.getpid()} ] && exec {program}\n")
    program.chmod(0o755)
    long = {f"LONG_{number}": "x" * 1000 for number in range(100)}  # the moment is the longer for it
    environment = {**os.environ, **long, machine.VARIABLE: "a", shell.MARK: "b"}
    with (
        subprocess.Popen(["sleep", "1000"], env={}) as bare,
        subprocess.Popen([program], env=environment, start_new_session=True) as restless,
    ):
        try:
            for _ in range(LOOKS):
                assert machine.own("a") == [restless.pid]
                assert shell.groups_of("b") == {restless.pid}
        finally:
            bare.kill()
            restless.kill()


def test_a_process_without_its_environment_belongs_to_the_one_that_started_it() -> None:
    """vLLM's workers write their title over it; what they use is the run's all the same."""
    started = "import subprocess; print(subprocess.Popen(['sleep', '1000'], env={}).pid, flush=True); input()"
    with (
        subprocess.Popen(["sleep", "1000"], env={}) as stranger,
        subprocess.Popen(
            [sys.executable, "-c", started], env={**os.environ, machine.VARIABLE: "c"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as engine,
    ):  # fmt: skip
        assert engine.stdout is not None
        worker = int(engine.stdout.readline())
        try:
            assert machine.own("c") == sorted([engine.pid, worker])
        finally:
            os.kill(worker, signal.SIGKILL)
            engine.kill()
            stranger.kill()
