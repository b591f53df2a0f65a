"""The wheel, and an environment in which it is alone."""

import os
import sys
from pathlib import Path

import pytest

from tests.packaging.commands import ROOT, run


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The one wheel in dist/."""
    found = list((ROOT / "dist").glob("kvik-*.whl"))
    assert len(found) == 1, f"expected one wheel in dist/, found {found}"
    return found[0]


@pytest.fixture(scope="session")
def empty_env(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it asks for, and nothing else; its folder of programs."""
    home = tmp_path_factory.mktemp("stranger") / "env"
    uv = os.environ["KVIK_UV"]
    run(uv, "venv", "--no-project", "--python", sys.executable, home)
    pins = ROOT / "tools" / "locks" / "dev.txt"
    install = [uv, "pip", "install", "--python", home / "bin" / "python", "--no-verify-hashes"]
    run(*install, "--constraint", pins, wheel)
    return home / "bin"
