"""`kvik demo` from end to end, with emulated engines: what it shows, how it ends, and that nothing stays."""

import os
import re
import signal
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from kvik.demo import emulator_scene, show
from kvik.demo.scene import Ranks, Settings
from tests.python.demo_runs import COLUMNS, CONTROL, LIMIT, Ended, running

SHAPE = "tiny"
SMALL = ("--model-shape", SHAPE, "--lengths", "1,40,300")
pytestmark = pytest.mark.timeout(LIMIT + 60)


def check_good(ended: Ended, lengths: tuple[int, ...]) -> None:
    """All rows are equal, KV moved, and nothing is left."""
    assert ended.status == 0, ended.said
    for length in lengths:
        assert ended.row(length).endswith(" equal"), ended.said
    assert f"{len(lengths)} of {len(lengths)} prompts: the same tokens" in ended.said
    # The second act: whole blocks of the longest prompt, but for the one with its last token.
    blocks = (max(lengths) - 1) // emulator_scene.PAGE_TOKENS
    (again,) = (line for line in ended.plain() if line.strip().startswith("started again"))
    assert re.match(rf" *started again +{blocks} of {blocks} blocks: store .* equal *$", again), again
    assert "The same tokens, and all whole blocks from the store." in ended.said
    assert ended.left == []


def test_in_a_pipe(tmp_path: Path) -> None:
    """Readable in a log: no control codes; the picture is written; the logs are where they were wanted."""
    picture, logs = tmp_path / "demo.svg", tmp_path / "logs"
    with running(*SMALL, "--svg", str(picture), "--logs", str(logs)) as run:
        ended = run.end()
    print(ended.said)
    check_good(ended, (1, 40, 300))
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", ended.said), "control codes in a pipe"
    assert ended.row(1).startswith("1 - ")  # of one token nothing has to move
    assert re.match(r"300 [\d.]+ [KM]iB .* local equal", ended.row(300))
    assert len([line for line in ended.plain() if re.match(r" *300 ", line)]) == 1
    root = ElementTree.parse(picture).getroot()  # noqa: S314 - ours
    texts = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("300 prompt tokens" in text for text in texts)
    names = {"prefill.log", "decode.log", "alone.log", "router.log", "store.log", "restarted.log"}
    assert {file.name for file in logs.iterdir()} >= names


def test_the_picture_adds_up(tmp_path: Path) -> None:
    """The spans' times are those of the measured TTFT, as far as three digits can show it."""
    with running(*SMALL, "--logs", str(tmp_path)) as run:
        ended = run.end()
    check_good(ended, (1, 40, 300))
    times = {}
    for line in ended.plain():
        found = re.match(r" ([\w:, -]+?) +([\d.,]+) (ms|s)\b", line)
        if found:
            times[found[1]] = float(found[2].replace(",", "")) * (1000 if found[3] == "s" else 1)
    print(times)
    spans = {name: ms for name, ms in times.items() if ":" in name}
    for name in ("router: takes it in", "prefill: queue", "prefill: compute", "KV: on the wire",
                 "decode: schedules it", "decode: first token"):  # fmt: skip
        assert name in spans, f"{name} was not measured"
    assert sum(spans.values()) == pytest.approx(times["TTFT, handed over"], rel=0.02, abs=0.1)
    # The rest is what nobody accounts for; most of the time is accounted for.
    assert spans["rest: HTTP, turns"] < times["TTFT, handed over"]


def test_in_a_terminal_of_80_columns(tmp_path: Path) -> None:
    """No line is wider, in colour and while it is live; unequal ranks, over tcp."""
    with running(*SMALL, "--tp", "2:1", "--transport", "tcp", "--logs", str(tmp_path), terminal=True) as run:
        ended = run.end()
    check_good(ended, (1, 40, 300))
    assert "\x1b[" in ended.said
    lines = ended.plain()
    wide = [line for line in lines if len(line) > COLUMNS and str(tmp_path) not in line]
    assert not wide
    assert not any("…" in line for line in lines), "something was cut"
    assert ended.row(300).endswith("tcp equal")


def test_wrong_kv_is_noticed(tmp_path: Path) -> None:
    """The demo can fail: with pages spoilt at their owner the tokens differ, and the exit status says so."""
    with running(*SMALL, "--fault", "wrong-page:after=3", "--logs", str(tmp_path)) as run:
        ended = run.end()
    print(ended.said)
    assert ended.status == 1
    assert ended.row(40).endswith(" equal")
    assert ended.row(300).endswith(" DIFFERENT")
    assert "the KV was not the right one" in ended.said
    assert "Logs are in" in ended.said
    assert ended.left == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C in the middle: everything is stopped when it returns, and no logs stay that nobody wanted."""
    many = ",".join(["300"] * 500)
    env = {"TMPDIR": str(tmp_path)}
    with running("--model-shape", SHAPE, "--lengths", many, terminal=True, env=env) as run:
        # A row of the table: the introduction has the word, too.
        run.wait_for(lambda said: re.search(r"300 .* equal", CONTROL.sub("", said)) is not None)
        assert len(run.pids()) >= 9, "the demo, and a keeper and a process for each of four servers"
        if number is signal.SIGINT:
            run.type(b"\x03")
        else:
            os.kill(run.process.pid, number)
        ended = run.end()
    assert ended.status == 128 + number, ended.said
    assert "everything that was started is stopped" in ended.said
    assert "Traceback" not in ended.said
    assert ended.left == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("kvik-demo")] == []


@pytest.mark.parametrize("moment", ["_enter_buffer", "_exit_buffer", "_check_buffer"])
def test_interrupted_while_it_prints(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the signal leaves half done of a line, the last line comes."""
    whole = getattr(Console, moment)
    signals = [signal.SIGINT]

    def interrupted(console: Console) -> None:
        if moment == "_enter_buffer":
            whole(console)
        if signals:
            os.kill(os.getpid(), signals.pop())
        if moment != "_enter_buffer":
            whole(console)

    def run(*arguments: object) -> bool:
        monkeypatch.setattr(Console, moment, interrupted)
        console = arguments[-1]
        assert isinstance(console, Console)
        console.print("a line")
        raise AssertionError("the signal did not come")

    monkeypatch.setattr(show, "_run", run)
    settings = Settings((1,), SHAPE, Ranks.parse("1"), "auto", None)
    assert show._with_logs(emulator_scene, settings, None, None, tmp_path / "logs") == 128 + signal.SIGINT
    assert signals == []
    assert "everything that was started is stopped" in capsys.readouterr().out


def test_a_link_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    """Without the right to make network namespaces: what is missing, by name, and nothing was started."""
    with running(*SMALL, "--link-rate", "1gbit", env={"TMPDIR": str(tmp_path)}, unprivileged=True) as run:
        ended = run.end()
    assert ended.status == 1, ended.said
    said = " ".join(ended.said.split())
    assert "--link-rate cannot be had here" in said
    assert "CAP_SYS_ADMIN" in said or "iproute2" in said
    assert list(tmp_path.iterdir()) == []
