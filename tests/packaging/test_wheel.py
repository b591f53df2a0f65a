"""The wheel as a stranger gets it: what it links, how big it is, and that it works alone in an empty
environment."""

import re
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.commands import ROOT, run

LIMIT = 15_000_000  # bytes
ALLOWED = re.compile(r"(libc|libm|libdl|libpthread|librt|libgcc_s|ld-linux-x86-64)\.so\.\d+")
pytestmark = [pytest.mark.packaging, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def native(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native module out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        assert names == ["kvik/_native.abi3.so"]
        return Path(archive.extract(names[0], tmp_path_factory.mktemp("native")))


def test_name_and_size(wheel: Path) -> None:
    """One file for every Python from 3.11 and glibc from 2.28, and small."""
    assert re.fullmatch(r"kvik-[\d.]+-cp311-abi3-manylinux_2_28_x86_64\.whl", wheel.name)
    assert wheel.stat().st_size < LIMIT


def test_auditwheel_agrees(wheel: Path) -> None:
    """The platform in the name is true."""
    said = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel).split())
    consistent = re.search(r'consistent with the following platform tag: "manylinux_2_(\d+)_x86_64"', said)
    assert consistent, said
    assert int(consistent[1]) <= 28


def test_links_only_the_system(native: Path) -> None:
    """No CUDA, no fabric library, no Python library, no torch: nothing but the C library's own."""
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", native))
    assert needed
    assert [name for name in needed if not ALLOWED.fullmatch(name)] == []


def test_nothing_of_the_build_machine(native: Path) -> None:
    """No search path for libraries, and no path of the checkout."""
    assert not re.search(r"\((RPATH|RUNPATH)\)", run("readelf", "-d", native))
    assert str(ROOT).encode() not in native.read_bytes()


def test_command(empty_env: Path, tmp_path: Path) -> None:
    """`kvik --help` and `--version`, and `python -m kvik`."""
    said = run(empty_env / "kvik", "--help", cwd=tmp_path)
    for name in ("bench", "demo", "router"):
        assert name in said
    version = run(empty_env / "kvik", "--version", cwd=tmp_path)
    assert version.startswith("kvik")
    assert run(empty_env / "python", "-m", "kvik", "--version", cwd=tmp_path) == version


def test_example(empty_env: Path, tmp_path: Path) -> None:
    """The first Python example of the documentation, between two processes."""
    example = ROOT / "examples" / "transfer.py"
    run(empty_env / "python", example, cwd=tmp_path)


def test_demo(empty_env: Path, tmp_path: Path) -> None:
    """`kvik demo` runs where only the wheel is; what it says is for a log: no control codes."""
    said = run(empty_env / "kvik", "demo", "--lengths", "1,100,500", "--svg", "demo.svg", cwd=tmp_path)
    assert "3 of 3 prompts: the same tokens" in said
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", said)
    assert (tmp_path / "demo.svg").read_text().startswith("<svg ")
    assert f"{empty_env / 'kvik'} bench transfer" in said  # a hint that can be typed as it stands


def test_short_benchmark(empty_env: Path, tmp_path: Path) -> None:
    """`kvik bench transfer` runs where only the wheel is."""
    cell = ("--page", "16KiB", "--pages", "20", "--duration", "0.05")
    run(empty_env / "kvik", "bench", "transfer", *cell, cwd=tmp_path)
