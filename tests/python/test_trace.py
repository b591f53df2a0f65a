"""`kvik trace`: what is recorded is what was moved, and what is replayed is what was recorded."""

import io
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import kvik
from kvik.bench import control
from kvik.bench.errors import BenchError, CheckError
from kvik.bench.figures import Slice
from kvik.bench.stream import CHUNKS, StreamInitiator
from kvik.bench.target import serve
from kvik.stat.engines import StatError, asking
from kvik.trace import file, replay
from kvik.trace.cli import trace
from kvik.trace.file import Dims, Moved, Trace, TraceError
from kvik.trace.pattern import Elements
from kvik.trace.record import record
from kvik.trace.replay import Replay, ReplayOptions, Results, execute, judge, plan, target_options
from kvik.trace.show import print_replay
from kvik.trace.target import ReplayPeer, ReplayTarget
from tests.python.peers import LIMIT, engines, random_seed, until

PAGES = 24
WAYS: tuple[tuple[str, kvik.TransportName], ...] = (
    ("read", "tcp"), ("write", "tcp"), ("read", "local"), ("write", "local")
)  # fmt: skip
FIRST = {"format": file.FORMAT, "kvik": "0.0.0"}


def command(*arguments: object) -> Result:
    return CliRunner().invoke(trace, [str(argument) for argument in arguments])


def layouts() -> list[kvik.Layout]:
    """Layer by layer with slices, and page by page with layers inside, of sizes that are no power of two."""
    per_layer = kvik.Layout(PAGES, 488, layers=3, slices=2)
    in_page = kvik.Layout(PAGES, 1000, layers=2, layer_stride=1000, page_stride=2056, offset=24)
    apart = kvik.Layout(PAGES, 512, layers=2, layer_offsets=[0, PAGES * 512 + 4096])
    return [per_layer, in_page, apart]


def dims_of(layout: kvik.Layout) -> Dims:
    """A layout as a recording has it."""
    offsets = layout.layer_offsets
    return Dims(
        digest=layout.digest,
        pages=layout.pages,
        run_bytes=layout.run_bytes,
        page_stride=layout.page_stride,
        layers=layout.layers,
        layer_stride=layout.layer_stride,
        layer_offsets=None if offsets is None else tuple(offsets),
        slices=layout.slices,
        slice_stride=layout.slice_stride,
        offset=layout.offset,
    )


class Recording:
    """A recording of an engine, in a thread of its own."""

    def __init__(self, engine: kvik.Engine, path: Path, seconds: float = 600.0) -> None:
        self._engine, self.path = engine, path
        self._said: list[str] = []
        self._thread = threading.Thread(
            target=record, args=(engine.id, seconds, path, self._said.append), daemon=True
        )
        self._thread.start()
        assert until(lambda: path.exists() and path.stat().st_size > 0)

    def end(self) -> Trace:
        """The engine closes, which ends its recording in order."""
        self._engine.close()
        self._thread.join(LIMIT)
        assert self._said[-1] == "the engine has ended"
        return file.read(self.path)


def pairs(moved: Moved) -> set[tuple[int, int]]:
    """Which page went with which: the recording has them in the order in which they were moved."""
    assert moved.positions is not None
    return set(zip(moved.pages.tolist(), moved.positions.tolist(), strict=True))


def record_some(path: Path) -> tuple[Trace, list[dict[str, Any]]]:
    """A recording of reads and writes over both transports, and what was done."""
    draw, done = random.Random(random_seed()), []
    with engines() as start:
        owner, reader = start(name="owner"), start(name="reader")
        recording = Recording(reader, path)
        for layout in layouts():
            there, here = owner.allocate(layout.nbytes), reader.register(np.zeros(layout.nbytes, np.uint8))
            readable = owner.grant(there.pages(layout, range(PAGES)), use="many")
            writable = owner.grant(there.pages(layout, range(PAGES)), right="write", use="many")
            for op, transport in WAYS:
                count = draw.randint(1, PAGES)
                local, positions = draw.sample(range(PAGES), count), draw.sample(range(PAGES), count)
                move = reader.read if op == "read" else reader.write
                ticket = readable.ticket if op == "read" else writable.ticket
                report = move(here.pages(layout, local), ticket, positions, transport=transport).wait(LIMIT)
                done.append(
                    {
                        "op": op, "transport": transport, "layout": layout.digest, "bytes": report.bytes,
                        "pairs": set(zip(local, positions, strict=True)),
                    }
                )  # fmt: skip
        readable.revoke()
        with pytest.raises(kvik.KvikError):
            reader.read(here.pages(layout, [0]), readable.ticket, [0]).wait(LIMIT)
        return recording.end(), done


def options(**given: Any) -> ReplayOptions:
    plain: dict[str, Any] = {
        "transport": "auto", "speed": None, "inflight": 1, "rounds": 1, "channels": 4, "verify": "auto"
    }  # fmt: skip
    return ReplayOptions(**{**plain, **given})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("trace") / "some.jsonl"
    return path, *record_some(path)


def test_a_recording_is_what_was_moved(recorded: tuple[Path, Trace, list[dict[str, Any]]]) -> None:
    path, trace, done = recorded
    assert trace.complete
    assert trace.notices == []
    ok = [moved for moved in trace.moved if moved.outcome == "ok"]
    assert [moved.outcome for moved in trace.moved if moved.outcome != "ok"] == ["grant_revoked"]
    said = [
        {
            "op": moved.op, "transport": moved.transport, "layout": moved.layout, "bytes": moved.bytes,
            "pairs": pairs(moved),
        }
        for moved in ok
    ]  # fmt: skip
    assert said == done
    for moved, layout in zip(ok[::4], layouts(), strict=True):
        assert trace.layouts[moved.layout].layout() == layout
        assert moved.memory == "host"
        assert 0 < moved.times["total_s"] < LIMIT
    assert [moved.t for moved in ok] == sorted(moved.t for moved in ok)
    text = path.read_text()
    assert "127.0.0.1" not in text
    assert not any(name in text for name in ("owner", "reader"))


@pytest.mark.parametrize(
    "given", [{"transport": "tcp"}, {"transport": "local", "speed": 1.0}, {"inflight": 4, "rounds": 2}]
)
def test_a_replay_moves_the_same_page_sets(
    recorded: tuple[Path, Trace, list[dict[str, Any]]], given: dict[str, Any]
) -> None:
    _, trace, done = recorded
    results = Results(options(**given), trace)
    execute(results, None, None, lambda _: None)
    steps, _ = plan(trace, Results(options(), trace))
    assert [set(zip(step.moved.pages.tolist(), step.positions.tolist(), strict=True)) for step in steps] == [
        one["pairs"] for one in done
    ]
    assert (results.steps, results.compared) == (len(done), len(done))
    assert results.left_out == {"failed with grant_revoked when it was recorded": 1}
    rounds = results.options.rounds
    for series in (results.kvik, results.memcpy, results.stream):
        assert series.payload == rounds * sum(one["bytes"] for one in done)
    assert set(results.used.paths) == {given.get("transport", "local")}
    if "speed" in given:
        assert results.kvik.wall_s >= steps[-1].moved.t - steps[0].moved.t


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_replay_that_moves_other_pages_is_found_out(
    recorded: tuple[Path, Trace, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    _, trace, _ = recorded
    begin = Replay.begin

    def elsewhere(self: Replay, step: Any) -> kvik.Transfer:
        if step.moved.op == op and step.positions.size > 1:
            step = replace(step, positions=np.roll(step.positions, 1))
        return begin(self, step)

    monkeypatch.setattr(Replay, "begin", elsewhere)
    with pytest.raises(Exception, match=r"found 0x.*expected 0x"):
        execute(Results(options(), trace), None, None, lambda _: None)


@pytest.mark.parametrize(
    ("asked", "used", "right"),
    [
        ("nics", "libfabric", True), ("nics", "verbs", True), ("nics", "plugin", True),
        ("auto", "plugin", True), ("nics", "tcp", False), ("local", "tcp", False), ("tcp", "verbs", False),
    ],
)  # fmt: skip
def test_a_transfer_over_another_transport_is_found_out(
    recorded: tuple[Path, Trace, list[dict[str, Any]]],
    asked: kvik.TransportName,
    used: str,
    right: bool,
) -> None:
    """A report has the name of the NICs' library, where `nics` was asked for."""
    results = Results(options(transport=asked), recorded[1])
    step = plan(recorded[1], results)[0][0]

    class Report:
        bytes, transport, mechanism = step.moved.bytes, used, "one of a test"
        checks: tuple[str, ...] = ()
        rejected_transports: tuple[str, ...] = ()

    report = cast(kvik.Report, Report())
    if right:
        judge(step, report, results.options, results)
        assert set(results.used.paths) == {used}
        return
    with pytest.raises(CheckError, match=f"over {used}, not over {asked}"):
        judge(step, report, results.options, results)


class SlowTransfer:
    """A transfer whose end is known so many seconds after it began."""

    def __init__(self, transfer: kvik.Transfer, seconds: float) -> None:
        self._transfer, self._end = transfer, time.monotonic() + seconds

    def wait(self, timeout: float | None = None) -> kvik.Report:
        """As a transfer does."""
        left = max(self._end - time.monotonic(), 0.0)
        if timeout is not None and timeout < left:
            pass_by(timeout)
            raise kvik.WaitTimeout("it goes on")
        pass_by(left)
        return self._transfer.wait(LIMIT)


def pass_by(seconds: float) -> None:
    """Take that long: a slow link or memory is nothing but time."""
    threading.Event().wait(seconds)


@contextmanager
def peer_in_a_thread(*_: object) -> Iterator[ReplayPeer]:
    """A target in this process, whose patience a test can change."""
    ours, theirs = socket.socketpair()

    def target() -> None:
        with theirs, suppress(BenchError):  # the replay sees the connection end, and says so
            serve(control.Connection(theirs), target_options(options(), "127.0.0.1:0"), None, ReplayTarget)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    peer = ReplayPeer(control.Connection(ours), None)
    try:
        yield peer
    finally:
        peer.close()
        thread.join(LIMIT)


@pytest.mark.parametrize("slow", ["stream", "memcpy", "transfer"])
def test_a_target_waits_for_what_takes_longer_than_its_patience(
    recorded: tuple[Path, Trace, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """Each slow part takes twice as long as the target waits for a word, which is longer than either may be
    without a turn."""
    _, trace, done = recorded
    patience, count, payload = 2.0, len(done), sum(one["bytes"] for one in done)
    rate, turns = payload / (2 * patience), list[int]()
    turn, gather, begin = StreamInitiator.turn, Replay._gather, Replay.begin

    def hurry(*_: object) -> tuple[int, float]:
        monkeypatch.setattr(control, "IDLE_SECONDS", patience)
        return CHUNKS[0], rate if slow == "stream" else 1e15

    def paced(self: StreamInitiator, op: str, total: int, chunk: int) -> None:
        turns.append(total)
        if slow == "stream":
            pass_by(total / rate)
        turn(self, op, total, chunk)

    def paused(self: Replay, *arguments: Any) -> None:
        if slow == "memcpy":
            pass_by(2 * patience / count)
        gather(self, *arguments)

    def late(self: Replay, step: Any) -> Any:
        transfer, hurried = begin(self, step), patience == control.IDLE_SECONDS
        return SlowTransfer(transfer, 2 * patience) if slow == "transfer" and hurried else transfer

    monkeypatch.setattr(replay, "_UNHEARD", 0.05)
    monkeypatch.setattr(replay, "_peer", peer_in_a_thread)
    monkeypatch.setattr(replay, "fastest_chunk", hurry)
    monkeypatch.setattr(StreamInitiator, "turn", paced)
    monkeypatch.setattr(Replay, "_gather", paused)
    monkeypatch.setattr(Replay, "begin", late)
    results = Results(options(inflight=count), trace)
    execute(results, None, None, lambda _: None)
    assert [series.payload for series in (results.kvik, results.memcpy, results.stream)] == [payload] * 3
    assert sum(turns) == payload


def stretched(trace: Trace, seconds: float) -> Trace:
    """The recording, as if it had taken so long."""
    ok = [moved.t for moved in trace.moved if moved.outcome == "ok"]
    first, factor = min(ok), seconds / (max(ok) - min(ok))
    return replace(
        trace, moved=[replace(moved, t=first + (moved.t - first) * factor) for moved in trace.moved]
    )


@pytest.mark.parametrize("seconds", [1e-3, 3 * 86400.0])
def test_how_long_a_replay_may_take_does_not_follow_from_the_recording(
    recorded: tuple[Path, Trace, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """A slower link than the recorded one takes longer: all grants live for as long as an engine allows."""
    trace, grant, expiries = stretched(recorded[1], seconds), ReplayPeer.grant, list[float]()

    def noted(self: ReplayPeer, name: str, elements: Elements, right: str, expiry: float) -> str:
        expiries.append(expiry)
        return grant(self, name, elements, right, expiry)

    monkeypatch.setattr(ReplayPeer, "grant", noted)
    results = Results(options(rounds=3), trace)
    execute(results, None, None, lambda _: None)
    assert len(results.kvik.slices) == 3
    assert set(expiries) == {7 * 86400.0}


def test_transfers_that_pile_up_are_late_and_no_failure(
    recorded: tuple[Path, Trace, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a link is slower than the pace, a transfer waits for those before it: longer than by default."""
    monkeypatch.setenv("KVIK_DEADLINE", "1e-9")
    results = Results(options(speed=1.0), recorded[1])
    execute(results, None, None, lambda _: None)
    assert results.kvik.payload == sum(one["bytes"] for one in recorded[2])


def test_rounds_that_outlive_every_grant_are_refused_first(
    recorded: tuple[Path, Trace, list[dict[str, Any]]],
) -> None:
    trace = stretched(recorded[1], 3 * 86400.0)
    with pytest.raises(TraceError, match=r"3 rounds of 3\.0 days .* 7 days: .*--rounds.*--speed"):
        execute(Results(options(rounds=3, speed=1.0), trace), None, None, lambda _: None)


def test_the_commands_show_and_replay(
    recorded: tuple[Path, Trace, list[dict[str, Any]]], tmp_path: Path
) -> None:
    path, _, done = recorded
    shown = command("show", path)
    assert shown.exit_code == 0, shown.output
    assert "read tcp ok" in shown.output
    told = json.loads(command("show", path, "--json").stdout)
    assert told["transfers"] == len(done) + 1
    assert sum(told["bytes_of_transfers"].values()) == len(done)
    assert sum(told["pages_of_transfers"].values()) == len(done)
    result = tmp_path / "replay.json"
    done_so = command("replay", path, "--rounds", 1, "--json", result)
    assert done_so.exit_code == 0, done_so.output
    assert f"Bytes compared in {len(done)} of {len(done)} transfers" in done_so.output
    assert json.loads(result.read_text())["transfers"] == len(done)
    assert command("record", "nobody", "-o", tmp_path / "new").exit_code == 1
    assert command("replay").exit_code == 2
    assert command("replay", path, "--speed", "0").exit_code == 2
    assert command("replay", "--listen", "127.0.0.1:0", "--json", "-").exit_code == 2


@pytest.mark.parametrize(("speed", "ratios"), [(None, 2), (1.0, 0)])
def test_a_rate_that_the_recording_sets_has_no_ratio(speed: float | None, ratios: int) -> None:
    results = Results(options(speed=speed), Trace())
    for series in (results.kvik, results.memcpy, results.stream):
        series.slices.append(Slice(1 << 20, 0.5, 0.1, 0.1))
    console = Console(file=io.StringIO(), width=130)
    print_replay(results, "GB/s", console)
    said = cast(io.StringIO, console.file).getvalue()
    assert said.count("1.00 (1.00-1.00)") == ratios
    assert ("The pace sets the rate" in said) == (speed is not None)


def test_what_comes_too_fast_is_dropped_and_said(tmp_path: Path) -> None:
    pages, moves = 1 << 20, 5
    with engines() as start:
        engine = start()
        layout = kvik.Layout(pages, 8)
        source, target = engine.allocate(layout.nbytes), engine.allocate(layout.nbytes)
        grant = engine.grant(source.pages(layout, range(pages)), use="many")
        scattered = np.random.default_rng(1).permutation(100_000).astype(np.uint32)
        with asking(engine.id, "trace") as question:
            # Nothing is read meanwhile: one long line fills the socket, and then the engine keeps as many
            # page ids as its bound allows, and drops the rest.
            few = engine.grant(source.pages(layout, scattered))
            engine.read(target.pages(layout, scattered), few.ticket).wait(LIMIT)
            for _ in range(moves - 1):
                engine.read(target.pages(layout, range(pages)), grant.ticket).wait(LIMIT)
            question.wait_until(time.monotonic() + LIMIT)
            question.say(b"kvik-stat/1 end")
            path = tmp_path / "fast"
            path.write_bytes(b"".join(iter(question.receive, b"")))
        found = file.read(path)
        assert found.dropped > 0
        assert found.dropped + len(found.moved) == moves
        assert not found.complete
        assert any("missing" in notice for notice in found.notices)
        assert f"kvik_trace_dropped_total {found.dropped}" in engine.metrics()


def test_only_what_begins_after_the_start_is_recorded_and_only_while_it_is(tmp_path: Path) -> None:
    with engines() as start:
        engine = start()
        layout = kvik.Layout(4, 64)
        source, target = engine.allocate(layout.nbytes), engine.allocate(layout.nbytes)
        grant = engine.grant(source.pages(layout, range(4)), use="many")

        def move() -> None:
            engine.read(target.pages(layout, range(4)), grant.ticket).wait(LIMIT)

        move()
        done = command("record", engine.id, "--seconds", 0.1, "-o", tmp_path / "none")
        assert done.exit_code == 0, done.output
        assert file.read(tmp_path / "none").moved == []
        recording = Recording(engine, tmp_path / "one")
        with pytest.raises(StatError, match="one recording at a time"), asking(engine.id, "trace"):
            pass
        assert "exists" in command("record", engine.id, "-o", recording.path).output
        refused = command("record", engine.id, "-o", tmp_path / "refused")
        assert refused.exit_code == 1
        assert "records this engine already" in refused.output
        assert not (tmp_path / "refused").exists(), "and the same command can be tried again"
        move()
        assert len(recording.end().moved) == 1


def test_a_recording_without_one_of_its_lines_says_so(
    recorded: tuple[Path, Trace, list[dict[str, Any]]], tmp_path: Path
) -> None:
    lines = recorded[0].read_text().splitlines()
    ops = [at for at, line in enumerate(lines) if '"op"' in line]
    for lost in (ops[:1], ops[-2:]):
        found = file.read(written(tmp_path / "l", *(line for at, line in enumerate(lines) if at not in lost)))
        assert not found.complete
        assert f"{len(ops) - len(lost)} transfers have a line" in " ".join(found.notices)
    # A line that says what was dropped is no other: the last one says it, too.
    end = json.dumps({"end": {"seconds": 1.0, "transfers": 0, "dropped": 3}})
    assert file.read(written(tmp_path / "l", lines[0], end)).dropped == 3


def test_a_file_that_was_cut_off_is_read_up_to_there(
    recorded: tuple[Path, Trace, list[dict[str, Any]]], tmp_path: Path
) -> None:
    whole = recorded[0].read_bytes()
    expected = recorded[1].moved
    whole_moves = {line for line in whole.split(b"\n") if b'"op"' in line}
    last = whole.rindex(b'"op"')
    # Some places anywhere, and every one within the last line of a transfer. A file that lacks only its last
    # line's end is whole.
    cuts = random.Random(random_seed()).sample(range(len(whole) - 1), 40)
    for cut in sorted({*cuts, *range(last, whole.index(b"\n", last) + 2)}):
        path = tmp_path / "cut"
        path.write_bytes(whole[:cut])
        try:
            found = file.read(path)
        except TraceError:
            assert b"\n" not in whole[:cut]
            continue
        assert not found.complete
        assert any("cut off" in notice for notice in found.notices)
        # A last line that lacks nothing but its end is read, too.
        assert len(found.moved) == sum(line in whole_moves for line in whole[:cut].split(b"\n"))
        assert [moved.t for moved in found.moved] == [moved.t for moved in expected[: len(found.moved)]]


def written(path: Path, *lines: Any) -> Path:
    """A file of lines, which are given as text or as what they say."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "empty"),
        (["no json", "at all"], "line 1"),
        ([{"format": "kvik-trace/3"}], "kvik-trace/3.*reads 'kvik-trace/2'"),
        ([{"format": "kvik-trace/1"}], "kvik-trace/1.*reads 'kvik-trace/2'"),
        ([{"format": None}], "format None"),
        ([FIRST, "{", FIRST], "line 2"),
        ([FIRST, [1]], "line 2"),
        ([FIRST, "[" * 100_000, FIRST], "line 2"),
        ([FIRST, {"op": "read"}], "line 2.*KeyError"),
        ([FIRST, {"layout": "x", "dims": {"pages": 0}}], "line 2"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, lines: list[Any], why: str) -> None:
    path = written(tmp_path / "bad", *lines) if lines else tmp_path / "bad"
    path.touch()
    with pytest.raises(TraceError, match=why):
        file.read(path)
    assert command("show", path).exit_code == 1
    assert command("replay", path).exit_code == 1


def test_what_a_line_may_not_say(recorded: tuple[Path, Trace, list[dict[str, Any]]], tmp_path: Path) -> None:
    lines = [json.loads(line) for line in recorded[0].read_text().splitlines()]
    head, one = lines[:2], next(line for line in lines if "op" in line)
    changes: list[dict[str, Any]] = [
        {"pages": [[0, 1 << 40]]},
        {"pages": [[0, 1 << 21]]},
        {"pages": [-1]},
        {"pages": []},
        {"layers": [2, 1]},
        {"layout": "0" * 16},
        {"op": "erase"},
        {"t": "soon"},
        {"t": float("inf")},
        {"total_s": float("nan")},
        {"remote": None},
        {"remote": {"positions": []}},
    ]
    for change in changes:
        path = written(tmp_path / "changed", *head, {**one, **change})
        with pytest.raises(TraceError, match="line 3"):
            file.read(path)
    # What is well said and makes no sense is left out of a replay.
    for change, why in (({"layers": [0, 9]}, "layers"), ({"bytes": 1}, "size"), ({"parts": 7}, "parts=7")):
        path = written(tmp_path / "changed", *head, {**one, **change})
        with pytest.raises(TraceError, match=why):
            plan(file.read(path), Results(options(), file.read(path)))


def test_owners_ids_beyond_the_layout_widen_it() -> None:
    halves = kvik.Layout(PAGES, 512, slices=2, page_stride=512, slice_stride=PAGES * 512)
    for layout in (*layouts(), halves):
        dims = dims_of(layout)
        elements = Elements(dims, (0, dims.layers), (0, dims.slices), 1)
        far = np.array([3 * PAGES], dtype=np.uint32)
        moved = Moved(
            0.0, "read", "bulk", 1, layout.digest, "host", np.array([1], dtype=np.uint32), (0, dims.layers),
            (0, dims.slices), 1, far, "tcp", True, elements.id_bytes, "ok", 1, {},
        )  # fmt: skip
        trace = Trace("0", {layout.digest: dims}, [moved], seconds=1.0)
        results = Results(options(), trace)
        execute(results, None, None, lambda _: None)
        assert results.compared == 1
        assert any("widened" in notice for notice in results.notices)


def test_the_pattern_tells_every_element_from_every_other() -> None:
    for layout, parts in [(layout, parts) for layout in layouts() for parts in (1, 2)]:
        dims = dims_of(layout)
        elements = Elements(dims, (0, dims.layers), (0, dims.slices), parts)
        memory = np.zeros(layout.nbytes, np.uint8)
        ids = np.arange(PAGES * parts, dtype=np.uint32)
        elements.paint(memory, ids, 5)
        assert elements.check(memory, ids, ids, 5) is None
        assert elements.check(memory, ids, np.roll(ids, 1), 5) is not None
        assert elements.check(memory, ids, ids, 6) is not None
        at = int(np.random.default_rng(2).integers(layout.offset, layout.nbytes))
        flipped = memory.copy()
        flipped[at] ^= 1
        inside = elements.check(flipped, ids, ids, 5) is not None
        elements.poison(memory, ids)
        # What is not part of a page stays as it was.
        assert inside == (memory[at] != 0)
