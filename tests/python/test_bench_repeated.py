"""Repetitions of a benchmark: what was measured until an end that is none is kept, and said to be a part."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from kvik.bench import contenders
from kvik.bench.cli import bench
from kvik.bench.contenders import Kvik
from kvik.bench.errors import BenchError
from kvik.bench.figures import Slice
from kvik.bench.peer import Peer

WARMUP, DONE, ASKED = 1, 2, 5
ONE_CELL = (
    "transfer", "--op", "read", "--transport", "tcp", "--page", "16KiB", "--pages", "5", "--buffer", "8MiB",
    "--repetitions", str(ASKED), "--warmup", str(WARMUP), "--seed", "20261", "--json", "-",
)  # fmt: skip


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        (BenchError("the link is down"), 1, "FAILED: the link is down"),
        (KeyboardInterrupt(), 130, "Interrupted: this is what was measured until then."),
    ],
    ids=["failure", "interrupt"],
)
def test_what_was_repeated_until_the_end_is_kept(
    monkeypatch: pytest.MonkeyPatch, end: BaseException, status: int, said: str
) -> None:
    repeat, run, parts = Kvik.repeat, Kvik._run, list[int]()

    def repeating(self: Kvik, *given: Any) -> Any:
        parts.append(0)
        return repeat(self, *given)

    def running(self: Kvik, walks: Any) -> Slice:
        if sum(parts) == WARMUP + DONE:
            raise end
        if parts:  # not of the checks before
            parts[-1] += 1
        return run(self, walks)

    monkeypatch.setattr(contenders, "REPEAT_SECONDS", 0.0)  # each part is one batch
    monkeypatch.setattr(Kvik, "repeat", repeating)
    monkeypatch.setattr(Kvik, "_run", running)
    ended = CliRunner().invoke(bench, ONE_CELL)
    assert ended.exit_code == status, ended.output
    (cell,) = json.loads(ended.stdout)["cells"]
    assert not cell["complete"]
    (part,) = cell["kvik"]
    assert (len(part["warmup_s"]), len(part["repetitions_s"])) == (WARMUP, DONE)
    assert part["latency_s"]["n"] == DONE
    assert part["counted"] is None
    assert said in ended.stderr
    assert "not finished" in ended.stderr


def test_a_grant_lives_for_as_long_as_repetitions_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how long that is: as long as an engine allows."""
    opened, lives = Peer.open, list[float]()

    def noted(self: Peer, *given: Any, expiry: float, **named: Any) -> str:
        lives.append(expiry)
        return opened(self, *given, expiry=expiry, **named)

    monkeypatch.setattr(Peer, "open", noted)
    ended = CliRunner().invoke(bench, ONE_CELL)
    assert ended.exit_code == 0, ended.output
    assert lives == [7 * 86400.0]
    assert "not finished" not in ended.stderr
