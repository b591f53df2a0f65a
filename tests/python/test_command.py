"""`python -m kvik` is the command `kvik`."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from kvik.demo.telling import command_name


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "kvik", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_the_module_is_the_command() -> None:
    done = run("shapes", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: python -m kvik shapes "), done.stdout
    assert run("--version").stdout.startswith("kvik, version ")


def test_the_module_ends_with_the_status_of_the_command() -> None:
    done = run("no-such-command")
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such command 'no-such-command'" in done.stderr


def test_the_module_does_nothing_when_it_is_imported() -> None:
    importlib.import_module("kvik.__main__")


def test_hints_name_the_module_where_there_is_no_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert command_name() == f"{tmp_path / 'python'} -m kvik"
    (tmp_path / "kvik").touch()
    assert command_name() == str(tmp_path / "kvik")
