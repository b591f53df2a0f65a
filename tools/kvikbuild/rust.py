"""Cargo, and the cache of what it builds.

Its output lies outside the checkout, in a folder for each toolchain, so that a fresh clone finds the
third-party crates already built. The crates of a clone are keyed by its path and so pile up; when the folder
has grown past a limit it is removed, unless another build is using it.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

from kvikbuild.paths import cache_dir
from kvikbuild.stage import Context

CACHE_LIMIT = 12 << 30  # bytes


def cargo_env(context: Context) -> dict[str, str]:
    """The environment of every cargo call of the build."""
    return {
        "CARGO_TARGET_DIR": str(target_dir(context)),
        "CARGO_NET_RETRY": "8",
        "CARGO_HTTP_TIMEOUT": "120",
        "CARGO_TERM_COLOR": "never",
        # The native module does not link a Python library: the interpreter that loads it has the symbols.
        "PYO3_BUILD_EXTENSION_MODULE": "1",
        "PYO3_PYTHON": sys.executable,
    }


def target_dir(context: Context) -> Path:
    """Where cargo's output is."""
    given = os.environ.get("CARGO_TARGET_DIR")
    if given:
        return Path(given).resolve()
    version = context.capture(["rustc", "-vV"])
    key = hashlib.sha256(version.encode()).hexdigest()[:12]
    target = cache_dir() / "target" / key
    target.mkdir(parents=True, exist_ok=True)
    return target


def hold_cache(context: Context) -> None:
    """Make room if the cache is too big, then keep it from being removed for as long as this process
    lives."""
    target = target_dir(context)
    lock = (cache_dir() / "target.lock").open("w")
    if not _held and _size(target) > CACHE_LIMIT and _try_exclusive(lock):
        context.say(f"the cache of built crates is over {CACHE_LIMIT >> 30} GiB: starting it anew")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True, exist_ok=True)
    fcntl.flock(lock, fcntl.LOCK_SH)
    _held.append(lock)


_held: list[IO[str]] = []


def _try_exclusive(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(folder: Path) -> int:
    done = subprocess.run(
        ["du", "-sk", str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    return int(done.stdout.split()[0]) << 10 if done.stdout else 0
