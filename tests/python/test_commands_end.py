"""How commands end: in order also when told so twice, with the status that the documentation gives."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

import kvik
import kvik.cli
from kvik.roles.ports import LOOPBACK, free_ports
from kvik.trace import replay
from tests.python.peers import LIMIT, engines
from tests.python.store_rig import Rig, Served


def test_a_store_that_is_told_to_end_again_and_again_sends_what_it_has_gathered(tmp_path: Path) -> None:
    with Served("--object", f"file://{tmp_path}") as served, engines() as start:
        Rig(start(), served.address).put(bytes(range(96)))
        deadline = time.monotonic() + LIMIT
        while served.process.poll() is None and time.monotonic() < deadline:
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.0005)  # the next signal comes while it ends
        # One that comes when all is done may end the interpreter.
        assert served.process.poll() in (0, -signal.SIGTERM)
        assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 3 * 16384]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["store", "serve", "--log-size", "1GiB"], "--log-size goes with --log"),
        (["store", "serve", "--object-size", "1GiB"], "--object-size goes with --object"),
        (["store", "serve", "--object", "nowhere"], "nowhere"),
        (["store", "stat", "nowhere"], "HOST:PORT"),
        (["store", "doctor", "nowhere"], "HOST:PORT"),
        (["emulator", "serve", "--model-shape", "none"], "none"),
        (["router", "serve", "--prefill", "http://h:1/x?y", "--decode", "http://h:2"], "http://h:1/x?y"),
        (["demo", "--logs", "/proc/none"], "/proc/none"),
        (["bench", "transfer", "--duration", "nan"], "'nan' is not a number"),
        (["bench", "checks", "--turn", "nan"], "'nan' is not a number"),
        (["selftest", "--seconds-per-point", "nan"], "'nan' is not a number"),
        (["stat", "nobody", "--interval", "nan"], "'nan' is not a number"),
        (["trace", "record", "nobody", "-o", "none", "--seconds", "nan"], "'nan' is not a number"),
        (["demo", "--fault", "slow;ded"], "did you mean 'dead'"),
        (["demo", "--tp", "2:1", "--fault", "dead:what=rank,rank=2"], "here it is 0 to 1"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(kvik.cli.main, arguments)
    assert (done.exit_code, said in done.output) == (2, True), done.output


def test_ctrl_c_ends_with_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kvik.cli, "load", lambda _entry: interrupted)
    done = CliRunner().invoke(kvik.cli.main, ["bench"])
    assert (done.exit_code, done.output) == (130, "interrupted\n")


def test_an_emulator_says_in_one_line_what_it_cannot_have() -> None:
    (port,) = free_ports(1)
    with kvik.Engine(f"{LOOPBACK}:{port}"):
        for arguments, said in (
            (["--listen", "0.0.0.0:0"], "takes a `secret`"),
            (["--listen", f"{LOOPBACK}:{port}"], f"{LOOPBACK}:{port}"),
            (["--port", str(port)], f"{LOOPBACK}:{port}: Address already in use"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "kvik", "emulator", "serve", *arguments],
                capture_output=True, text=True, timeout=LIMIT, check=False,
            )  # fmt: skip
            assert done.returncode == 1, done.stderr
            assert said in done.stderr
            assert "Traceback" not in done.stderr


def test_a_target_hears_from_a_replay_whose_turn_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own, which goes on by the waits: every so many seconds until the step is due."""
    now, heard = [0.0], list[float]()

    class Pause:
        def wait(self, seconds: float) -> None:
            now[0] += seconds

    class Target:
        def cpu_s(self) -> float:
            heard.append(now[0])
            return 0.0

    class Step:
        def __init__(self, t: float) -> None:
            self.moved = self
            self.t = t

    monkeypatch.setattr(replay, "_UNHEARD", 2.0)
    monkeypatch.setattr(replay, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(replay, "Event", Pause)
    one = object.__new__(replay.Replay)
    one.options = replay.ReplayOptions("auto", 1.0, 1, 1, 4, "auto")
    one._peer, one._steps, one._heard = Target(), [Step(0.0), Step(9.0)], 0.0  # type: ignore[assignment,list-item]
    results = replay.Results.__new__(replay.Results)
    results.late_s = 0.0
    assert len(list(one._when_due(results))) == 2
    assert heard == [2.0, 4.0, 6.0, 8.0]
    assert (now[0], results.late_s) == (9.0, 0.0)
