"""`kvik trace record`: when it ends, and what it says of that."""

import errno
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import kvik
from kvik.stat import engines as engines_of_stat
from kvik.stat.engines import Question, asking
from kvik.trace import file, record
from kvik.trace.cli import trace
from kvik.trace.file import TraceError
from kvik.trace.replay import ReplayOptions, Results, plan
from tests.python.peers import LIMIT, engines, until


def command(*arguments: object) -> Result:
    return CliRunner().invoke(trace, [str(argument) for argument in arguments])


@contextmanager
def recorded_by_command(
    monkeypatch: pytest.MonkeyPatch, path: Path, heard: Callable[[bytes], bytes]
) -> Iterator[Result]:
    """What the command does with a busy engine, which still runs; what it receives goes through `heard`."""
    receive = Question.receive

    def through(self: Question, *arguments: Any) -> bytes:
        piece = receive(self, *arguments)
        return heard(piece) if path.exists() else piece

    monkeypatch.setattr(Question, "receive", through)
    with engines() as start:
        engine = start()
        layout = kvik.Layout(4, 64)
        source, target = engine.allocate(layout.nbytes), engine.allocate(layout.nbytes)
        grant = engine.grant(source.pages(layout, range(4)), use="many")

        def move() -> None:
            assert until(lambda: path.exists() and path.stat().st_size > 0)
            for _ in range(3):
                engine.read(target.pages(layout, range(4)), grant.ticket).wait(LIMIT)

        mover = threading.Thread(target=move, daemon=True)
        mover.start()
        done = command("record", engine.id, "--seconds", LIMIT, "-o", path)
        mover.join(LIMIT)
        assert done.exit_code == 0, done.output
        yield done


def test_a_recording_of_a_quiet_engine_is_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a piece waits once, and not a second time without looking at what interrupts it."""
    here, there = socket.socketpair()
    with engines() as start, here, there, asking(start().id, "trace") as question:
        assert question.receive()  # the first line
        monkeypatch.setattr(engines_of_stat, "wait", lambda *_: [])
        began = time.monotonic()
        question.wait_until(began + LIMIT)
        with pytest.raises(TimeoutError, match="no answer within"):
            question.receive(here)
        assert time.monotonic() - began < LIMIT / 2


def test_an_interrupt_takes_no_piece_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, pieces, begun = tmp_path / "one", list[bytes](), time.monotonic()

    def interrupted(piece: bytes) -> bytes:
        pieces.append(piece)
        if b'"op"' in piece and b'"end"' not in piece:
            signal.raise_signal(signal.SIGINT)
        return piece

    with recorded_by_command(monkeypatch, path, interrupted):
        assert path.read_bytes() == b"".join(pieces)
        found = file.read(path)
        assert found.complete
        assert found.moved
    assert time.monotonic() - begun < LIMIT, "it has ended the recording"


def test_a_disk_that_takes_a_part_of_a_line_gets_the_rest(tmp_path: Path) -> None:
    class NearlyFull(FileIO):
        def write(self, data: Any, /) -> int:
            if self.tell() >= 12:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(bytes(data)[:5])

    with NearlyFull(tmp_path / "one", "xb") as out:
        record._keep(out, b"one line\n")
        with pytest.raises(TraceError, match="one: No space left on device; what was recorded"):
            record._keep(out, b"another\n")
    assert (tmp_path / "one").read_bytes() == b"one line\nanoth"


def test_words_of_a_file_are_words(tmp_path: Path) -> None:
    """And neither markup nor orders to the terminal nor parts of a name."""
    dims = {"pages": 4, "run_bytes": 64, "page_stride": 64, "layers": 1, "layer_stride": None}
    dims |= {"layer_offsets": None, "slices": 1, "slice_stride": 64, "offset": 0}
    said = {
        "t": 0.0, "op": "read", "class": "bulk", "peer": 1, "layout": "a-b", "memory": "host", "pages": [0],
        "layers": [0, 1], "slices": [0, 1], "remote": {"positions": None}, "transport": "[/x]\x1b[2J",
        "checksums": True, "bytes": 64, "outcome": "ok",
    }  # fmt: skip
    lines: list[Any] = [{"format": file.FORMAT, "kvik": "\x1b[2J"}, {"layout": "a-b", "dims": dims}, said]
    path = tmp_path / "odd"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = command("show", path)
    assert done.exit_code == 0, done.output
    assert r"read '[/x]\x1b[2J' ok" in done.output
    assert "\x1b" not in done.output
    trace = file.read(path)
    assert list(plan(trace, Results(ReplayOptions("auto", None, 1, 1, 4, "auto"), trace))[1]) == ["a-b-host"]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines[:2], said | {"memory": "a-b"}]))
    with pytest.raises(TraceError, match="memory 'a-b' is unknown"):
        file.read(path)


def test_a_recording_that_the_engine_cuts_is_not_told_as_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "one"
    cut = recorded_by_command(monkeypatch, path, lambda piece: b"" if b'"op"' in piece else piece)
    with cut as done:
        assert "the engine has ended" not in done.output
        assert "the recording was cut off" in done.output
