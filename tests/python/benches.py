"""The programs of `bench/`, as modules: they import one another as they do when they run."""

import importlib
import sys
from types import ModuleType

from tests.python.peers import ROOT

FOLDER = str(ROOT / "bench")


def bench(name: str) -> ModuleType:
    """One of them, by its file's name without its ending."""
    before = list(sys.path)
    sys.path.insert(0, FOLDER)
    try:
        return importlib.import_module(name)
    finally:
        # Some put the checkout there too, as the tests have it in another way.
        sys.path[:] = before
