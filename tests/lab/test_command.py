"""`kvik lab` as a command, and how `kvik` finds it."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner

import kvik.cli
from kvik.cli import Entry
from kvik_lab import cli

HEAVY = {"mlflow", "numpy", "pandas", "plotly", "pydantic", "scipy", "statsmodels", "yaml"}
LOADED = """
import json, sys
from click.testing import CliRunner
import kvik
before = set(sys.modules)
from kvik.cli import main
result = CliRunner().invoke(main, ["lab", "--help"])
assert result.exit_code == 0, result.output
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def test_help_lists_each_subcommand_and_imports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry("no.such.module", "command", "Does something.")
    monkeypatch.setitem(cli.SUBCOMMANDS, "something", entry)
    result = CliRunner().invoke(cli.lab, ["--help"])
    assert result.exit_code == 0
    assert "Does something." in result.output


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=50, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert "kvik_lab" in loaded
    assert not loaded & HEAVY


class _Distribution(importlib.metadata.Distribution):
    """One that is not there but in its metadata."""

    def __init__(self, version: str, points: str, summary: str = "Summary: What it is for.\n") -> None:
        said = f"Metadata-Version: 2.4\nName: kvik-lab\nVersion: {version}\n{summary}"
        self._files = {"METADATA": said, "entry_points.txt": f"[{kvik.cli.GROUP}]\n{points}\n"}

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: object) -> None:  # type: ignore[override]
        raise FileNotFoundError(path)


def _installed(monkeypatch: pytest.MonkeyPatch, *distributions: importlib.metadata.Distribution) -> None:
    """Let these be all distributions that bring commands."""

    def points(**wanted: Any) -> importlib.metadata.EntryPoints:
        every: Iterator[importlib.metadata.EntryPoint] = (
            point for distribution in distributions for point in distribution.entry_points
        )
        return importlib.metadata.EntryPoints(every).select(**wanted)

    monkeypatch.setattr(kvik.cli, "entry_points", points)


def _said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(kvik.cli.main, arguments)
    return result.exit_code, " ".join(result.output.split())


def test_without_the_distribution_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch)
    version = importlib.metadata.version("kvik")
    for arguments in (["lab"], ["lab", "--help"], ["lab", "plan", "a.yaml", "--json"]):
        status, said = _said(*arguments)
        assert status == 1
        assert f"kvik-lab, which is not installed: pip install 'kvik[lab]=={version}'" in said
    status, said = _said("--help")
    assert status == 0
    assert f"lab (Not installed: pip install 'kvik[lab]=={version}')" in said


def test_another_version_of_the_lab_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, _Distribution("0.0.7", "lab = kvik_lab.cli:lab"))
    status, said = _said("lab", "schema")
    assert status == 1
    assert "kvik-lab 0.0.7 belongs to kvik 0.0.7" in said
    assert "pip install 'kvik[lab]==" in said


def test_other_distributions_bring_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    points = "more = kvik_lab.cli:lab\nbroken = no.such.module:command\nbench = no.such.module:command"
    _installed(monkeypatch, _Distribution("1.2", points))
    status, said = _said("--help")
    assert status == 0
    assert "more What it is for." in said
    _installed(monkeypatch, _Distribution("1.2", points, summary=""))
    status, told = _said("--help")
    assert (status, "more kvik_lab.cli:lab" in told) == (0, True)
    assert "bench Measure transfers" in said  # kvik's own come first
    assert _said("more", "--help")[0] == 0
    status, said = _said("broken")
    assert status == 1
    assert "`kvik broken` of kvik-lab 1.2 cannot be imported: No module named 'no'" in said
    command = kvik.cli.main.get_command(click.Context(kvik.cli.main), "bench")
    assert command is not None
    assert command.name == "bench"
