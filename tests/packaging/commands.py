"""Commands that have to succeed."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*argv: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """What a command prints; it has to succeed."""
    done = subprocess.run(
        [str(a) for a in argv], capture_output=True, text=True, timeout=240, check=False, cwd=cwd,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert done.returncode == 0, f"{argv} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
