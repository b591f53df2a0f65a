"""KV on GPUs, over vLLM's own layouts.

See `gpu_kv.py` for what is whose.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.python.gpu import environment

ROOT = Path(__file__).parents[2]
LIMIT = 300.0  # seconds; 25 where nothing else runs
pytestmark = pytest.mark.timeout(LIMIT + 30)


@pytest.mark.parametrize("check", ["layouts", "order"])
def test_kv_on_gpus(check: str, tmp_path: Path) -> None:
    """layouts: every byte of every layout arrives. order: nothing is read before it is written, or used
    before it is there."""
    env = environment(tmp_path / "cuda")
    call = [sys.executable, "-m", "tests.vllm.gpu_kv", str(tmp_path / "rendezvous"), check]
    done = subprocess.run(call, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
