"""Where things lie: the checkout, what is built in it, and the caches outside it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "tools" / "locks"
DIST = ROOT / "dist"
TARGET = ROOT / "target"
LOGS = TARGET / "log"
VENVS = ROOT / ".venv"


def cache_dir() -> Path:
    """The cache shared by all checkouts of this user."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored: each command here would take it from a folder of its own.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "kvik"
