"""`kvik lab` as a command."""

import sys

import pytest
from click.testing import CliRunner

from kvik.cli import Entry
from kvik.lab import cli


def test_help_lists_each_subcommand_and_imports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry("no.such.module", "command", "Does something.")
    monkeypatch.setitem(cli.SUBCOMMANDS, "something", entry)
    result = CliRunner().invoke(cli.lab, ["--help"])
    assert result.exit_code == 0
    assert "Does something." in result.output


def test_a_package_that_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.SUBCOMMANDS, "something", Entry("statsmodels", "command", "Does something."))
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    result = CliRunner().invoke(cli.lab, ["something"])
    assert result.exit_code == 1
    assert "pip install 'kvik[lab]'" in result.output
