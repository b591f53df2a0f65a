"""The stub of the native module says what the module has."""

import os
import subprocess
import sys
from pathlib import Path

import kvik

# What only exists for type checkers; `__buffer__` is a method from Python 3.12 on.
ONLY_TYPES = """
kvik._native.(__all__|Explanation|GrantStateName|Ids|LogEntry|Probe|Registrable|RightName|Size|Stream|TransportName|VerifyName)
kvik._native.Region.__(release_)?buffer__
"""


def test_the_stub_fits(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text(ONLY_TYPES)
    argv = ["kvik._native", "--allowlist", str(allowed), "--ignore-unused-allowlist", "--concise"]
    home = Path(kvik.__file__).parents[1]
    env = dict(os.environ) if home.name == "site-packages" else {**os.environ, "MYPYPATH": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", *argv],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
