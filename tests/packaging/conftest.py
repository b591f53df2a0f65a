"""The wheels, an environment in which kvik's is alone, and one with its lab."""

import os
import sys
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from zipfile import Path as ZipPath

import pytest

from tests.packaging.commands import ROOT, run

DIST = ROOT / "dist"
PINS = ROOT / "tools" / "locks" / "dev.txt"


@pytest.fixture(scope="session")
def wheel() -> Path:
    """kvik's one wheel in dist/."""
    return _only("kvik-*.whl")


@pytest.fixture(scope="session")
def lab_wheel() -> Path:
    """The lab's one wheel in dist/."""
    return _only("kvik_lab-*.whl")


@pytest.fixture(scope="session")
def empty_env(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it asks for, and nothing else; its folder of programs."""
    home = tmp_path_factory.mktemp("stranger") / "env"
    _install(home, wheel)
    return home / "bin"


@pytest.fixture(scope="session")
def lab_env(wheel: Path, lab_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment into which pip has put `kvik[lab]` from the two wheels, with no index; others' packages
    were there before. Its folder of programs."""
    home = tmp_path_factory.mktemp("lab") / "env"
    asked = [text for file in (wheel, lab_wheel) for text in metadata_of(file).requires or []]
    _install(home, "pip", *(text for text in asked if not text.startswith("kvik")))
    run(home / "bin" / "python", "-m", "pip", "install", "--no-index", "--find-links", DIST, "kvik[lab]")
    return home / "bin"


def metadata_of(wheel: Path) -> Distribution:
    """What a wheel says of itself."""
    (info,) = (entry for entry in ZipPath(wheel).iterdir() if entry.name.endswith(".dist-info"))
    return PathDistribution(info)


def _only(pattern: str) -> Path:
    found = list(DIST.glob(pattern))
    assert len(found) == 1, f"expected one {pattern} in dist/, found {found}"
    return found[0]


def _install(home: Path, *what: object) -> None:
    uv = os.environ["KVIK_TEST_UV"]
    run(uv, "venv", "--no-project", "--python", sys.executable, home)
    install = [uv, "pip", "install", "--python", home / "bin" / "python", "--no-verify-hashes"]
    run(*install, "--constraint", PINS, *what)
