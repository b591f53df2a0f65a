"""KV on GPUs, over vLLM's own layouts.

See `gpu_kv.py` for what is whose.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.python.gpu import environment

ROOT = Path(__file__).parents[2]
LIMIT = 300.0  # seconds; 25 where nothing else runs
CHECKS = ("layouts", "order")
Started = dict[str, tuple["subprocess.Popen[bytes]", Path]]
pytestmark = pytest.mark.timeout(LIMIT + 150)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A process for each check, and the file of its output. They run side by side, for most of what they do
    is to import vLLM, each on one processor."""
    running: Started = {}
    try:
        for check in CHECKS:
            folder = tmp_path_factory.mktemp(check)
            env, log = environment(folder / "cuda"), folder / "log"
            call = [sys.executable, "-m", "tests.vllm.gpu_kv", str(folder / "rendezvous"), check]
            with log.open("wb") as out:
                process = subprocess.Popen(call, cwd=ROOT, env=env, stdout=out, stderr=out)
            running[check] = (process, log)
        yield running
    finally:
        for process, _ in running.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("check", CHECKS)
def test_kv_on_gpus(check: str, started: Started) -> None:
    """layouts: every byte of every layout arrives. order: nothing is read before it is written, or used
    before it is there."""
    process, log = started[check]
    assert process.wait(LIMIT) == 0, log.read_text(errors="replace")
