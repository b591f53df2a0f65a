"""The order of the lab's tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# Those that take a minute or two each, longest first. Several processes share the files out in this order
# (`--no-loadscope-reorder`); one that began last would be waited for by all others.
LONG = (
    "run/test_tools.py",
    "tracking/test_server.py",
    "run/test_ray.py",
    "run/test_ssh.py",
    "run/test_slurm.py",
    "run/test_run.py",
    "run/test_transfers.py",
    "test_corpus.py",
    "gates/test_emulated.py",
    "tracking/test_deliver.py",
    "run/test_storage.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, then those with the most tests, as xdist would have it of all."""
    places = {FOLDER / name: place for place, name in enumerate(LONG)}
    counts = Counter(item.path for item in items)
    own = [item for item in items if FOLDER in item.path.parents]
    own.sort(key=lambda item: (places.get(item.path, len(LONG)), -counts[item.path]))
    ordered = iter(own)
    items[:] = [next(ordered) if FOLDER in item.path.parents else item for item in items]
