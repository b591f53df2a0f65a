"""The secret of a benchmark's control connection is the one that engines have."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvik.bench.cli import bench
from kvik.trace.cli import replay


@pytest.mark.parametrize("command", [bench.commands["transfer"], replay], ids=["bench", "trace"])
@pytest.mark.parametrize("given", [[], ["--secret", "told"]])
def test_a_target_has_the_secret_of_an_engine(
    command: click.Command, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the configuration file too: its engine has that, so the control connection has it."""
    path = tmp_path / "kvik.toml"
    path.write_text('[engine]\nsecret = "of the file"\n', encoding="utf-8")
    path.chmod(0o600)
    monkeypatch.setenv("KVIK_CONFIG", str(path))
    monkeypatch.delenv("KVIK_SECRET", raising=False)
    had: list[str | None] = []

    def take(_address: str, _options: object, secret: str | None, *_further: object) -> None:
        had.append(secret)

    for module in ("kvik.bench.cli", "kvik.trace.cli"):
        monkeypatch.setattr(f"{module}.listen", take)
    ended = CliRunner().invoke(command, ["--listen", "127.0.0.1:0", *given])
    assert ended.exit_code == 0, ended.output
    assert had == ["told" if given else "of the file"]
