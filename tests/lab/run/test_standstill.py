"""A machine that stood still takes nobody for gone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvik.roles import keeper
from kvik.roles.processes import Process
from kvik.roles.role import LineReady, Role
from kvik_lab.run import remote
from kvik_lab.run.remote import LEASE, Line, RemoteProcess


class Clock:
    """Each wait takes what is said; after the last one there is none."""

    def __init__(self, *waits: float) -> None:
        self.now, self.waits = 1000.0, iter(waits)

    def monotonic(self) -> float:
        """As of `time`."""
        return self.now

    def wait(self, _seconds: float) -> bool:
        """As of an event, which comes when there are no more."""
        took = next(self.waits, None)
        self.now += took or 0.0
        return took is None

    def select(self, _read: object, _write: object, _wrong: object, limit: float) -> tuple[list[int], ...]:
        """As of `select`, in which nothing comes."""
        assert limit < LEASE
        assert not self.wait(limit), "more than the lease"
        return [], [], []


@pytest.mark.parametrize(
    ("waits", "left"), [([2.1] * 9, 4), ([2.1] * 4 + [3600.0, 2.1, 2.1], 1), ([3600.0] * 8 + [2.1] * 5, 0)]
)
def test_a_keeper_waits_for_bytes_as_long_as_it_has_its_turns(
    monkeypatch: pytest.MonkeyPatch, waits: list[float], left: int
) -> None:
    clock = Clock(*waits)
    monkeypatch.setattr(keeper, "time", clock)
    monkeypatch.setattr(keeper, "select", clock)
    keeper._wait(3, 4, LEASE)
    assert len(list(clock.waits)) == left


def watched(monkeypatch: pytest.MonkeyPatch, log: Path, *waits: float, beats: int = 0) -> bool:
    """Whether a line gives its host up: after so many waits it beats no more."""
    clock, cut = Clock(*waits), list[bool]()
    line = Line("one", "one", list)
    sign = RemoteProcess.__new__(RemoteProcess)
    sign.log = log
    log.write_text("")

    def beat() -> None:
        nonlocal beats
        beats -= 1
        if beats >= 0:
            log.write_text(log.read_text() + "beat")

    process = SimpleNamespace(beat=beat, cut=lambda: cut.append(True))
    monkeypatch.setattr(remote, "time", clock)
    monkeypatch.setattr(line, "sign", sign)
    monkeypatch.setattr(line, "_closed", clock)
    monkeypatch.setattr(line, "_running", [process])
    line._watch()
    return cut == [True]


def test_a_line_gives_its_host_up_when_no_beat_came(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert watched(monkeypatch, log, *[2.1] * 8)
    assert not watched(monkeypatch, log, *[2.1] * 8, beats=8)
    assert watched(monkeypatch, log, *[2.1] * 20, beats=8)


def test_a_line_does_not_count_its_own_standstill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What brings the beats may have stood still with it."""
    assert not watched(monkeypatch, tmp_path / "log", 2.1, 2.1, 2.1, 3600.0, 2.1, beats=2)
    assert watched(monkeypatch, tmp_path / "log", 2.1, 2.1, 2.1, 3600.0, *[2.1] * 5, beats=2)


@pytest.fixture
def sign(tmp_path: Path) -> Iterator[Process]:
    """Of a host, and its end is not seen yet."""
    process = Process("sign", ["sleep", "1000"], tmp_path / "sign", grace=1.0)
    yield process
    process.stop()


@pytest.mark.parametrize(("answer", "lost"), [("true", False), ("false", True)])
def test_a_host_that_does_not_answer_is_lost_before_its_sign_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sign: Process, answer: str, lost: bool
) -> None:
    """It ends after what it carried, and how long after that is the machine's affair."""
    monkeypatch.setattr(remote.Line.is_gone, "__defaults__", (0.0,))
    said = {"true": [answer]}
    line = Line("one", "one", lambda command: said.get(command[0], ["sh", "-c", "read -r line"]), sign)
    process = line.start(Role("prefill", ("x",), LineReady("")), tmp_path / "log", sys.executable, None)
    assert process.wait(120.0) is not None
    assert process.lost == lost
