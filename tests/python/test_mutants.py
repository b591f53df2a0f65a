"""Every mutant of `make mutants` still applies, and says what it breaks and which tests must notice."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A module's tests in a file of their own.
_TESTS_APART = re.compile(r'(?:#\[path = "(.+)"\]\n)?mod tests;')
PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))


def test_there_are_mutants() -> None:
    assert len(PATCHES) >= 12


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_mutant_applies_and_names_tests_that_are_there(patch: Path) -> None:
    done = subprocess.run(
        ["git", "apply", "--check", str(patch)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    head = re.fullmatch(r".+\. Caught by: (.+)", patch.read_text().splitlines()[0])
    assert head is not None
    for test in head[1].split("; "):
        where, _, name = test.partition(" ")
        if where == "python":
            file, _, function = name.partition("::")
            assert f"def {function}(" in (ROOT / file).read_text(), test
            continue
        crate, _, target = where.partition("/")
        modules = name.split("::")
        folder = ROOT / "crates" / crate
        home = folder / ("src" if target == "lib" else f"tests/{target}")
        file_of = home / f"{modules[0]}.rs"
        if not home.is_dir():
            file_of = home.with_suffix(".rs")
        elif target == "lib":
            own = home.joinpath(*modules[:-2]).with_suffix(".rs")  # the last but one is `tests`
            file_of = own if own.exists() else file_of
        elif (own := home.joinpath(*modules[:-1]).with_suffix(".rs")).exists():
            file_of = own  # of a folder within the test program
        if file_of.exists():
            text = file_of.read_text()
            if target == "lib" and (apart := _TESTS_APART.search(text)):
                there = file_of.parent / apart[1] if apart[1] else file_of.with_suffix("") / "tests.rs"
                text = there.read_text()
        else:
            # A line of a table of transports, whose checks are functions of the files beside it.
            assert re.search(rf"^    {modules[0]}: Kind", (home / "main.rs").read_text(), re.MULTILINE), test
            text = "".join(file.read_text() for file in home.glob("*.rs"))
        # A function, or one that a macro for tests over stand-ins makes.
        assert re.search(rf"(fn {modules[-1]}\(|(alone|beside_cuda)!\(\s*{modules[-1]},)", text), test
