"""The transfer benchmark: what it says of its sizes, what it refuses to print, what its checks catch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

import kvik
from kvik.bench import control, pattern
from kvik.bench.cli import bench, parse_counts, parse_sizes, parse_transports
from kvik.bench.contenders import Used
from kvik.bench.errors import BenchError
from kvik.bench.figures import GIB, Series, Slice, percentile
from kvik.bench.limits import Memcpy
from kvik.bench.options import Options, demand_bounded, fit_target, settle_buffer, settle_pages, split_list
from kvik.bench.pages import Cell, PagePlan, Spread, permutation
from kvik.bench.report import FORMAT, percentile_text, seconds_text, table, to_json
from kvik.bench.run import CellResult, KvikResult, Results, default_transports
from kvik.bench.stream import CHUNKS, StreamInitiator, StreamTarget
from kvik.bench.target import TargetOptions, serve

PAGE = 4096
SEED = 20261


def options(**changes: Any) -> Options:
    values: dict[str, Any] = {
        "transports": ("tcp", "local"),
        "ops": ("read", "write"),
        "page_bytes": (16 << 10,),
        "pages": (20, 200),
        "inflight": 1,
        "channels": 4,
        "layout": "scattered",
        "memory": "shared",
        "buffer": 64 << 20,
        "duration": 0.4,
        "unit": "GB/s",
        "verify": "auto",
        "seed": SEED,
    }
    return Options(**(values | changes))


# Options


def test_lists_may_be_repeated_or_separated_by_commas() -> None:
    assert split_list(["a,b", "c", "a", " d ,"]) == ["a", "b", "c", "d"]
    assert parse_sizes(["16KiB,128KiB", "1MiB"], "--page") == [16 << 10, 128 << 10, 1 << 20]
    assert parse_counts(["20,200", "20"], "--pages") == (20, 200)
    assert parse_transports(["tcp,auto"]) == ("tcp", "auto")


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", ""])
def test_counts_are_positive_whole_numbers(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_counts([text], "--pages")


def test_wrong_options_end_with_status_2() -> None:
    runner = CliRunner()
    for arguments in (
        ["--transport", "rdma"],
        ["--page", "many"],
        ["--pages", "0"],
        ["--listen", "127.0.0.1:0", "--target", "127.0.0.1:1"],
        ["--engine-listen", "127.0.0.1:0"],
        ["--listen", "127.0.0.1:0", "--json", "-"],
        ["--json", "no/such/folder/results.json"],
        ["--duration", "3600", "--pages", "1,2,3"],
        ["--warmup", "3"],
        ["--repetitions", "3", "--inflight", "2"],
        ["--listen", "0.0.0.0:0", "--page", "4KiB", "--pages", "1", "--buffer", "2MiB"],
        ["--listen", "192.0.2.1:0", "--page", "4KiB", "--pages", "1", "--buffer", "2MiB"],
    ):
        result = runner.invoke(bench, ["transfer", *arguments])
        assert result.exit_code == 2, (arguments, result.output)
    for arguments in (
        ["context", "--json", "."],
        ["checks", "--json", "no/folder"],
        ["checks", "--page", "x"],
    ):
        result = runner.invoke(bench, arguments)
        assert result.exit_code == 2, (arguments, result.output)


def test_another_host_gets_tcp_alone_and_it_is_said() -> None:
    said: list[str] = []
    assert default_transports(None, control.is_loopback, said.append) == ("tcp", "local")
    assert default_transports("[::1]:7", control.is_loopback, said.append) == ("tcp", "local")
    assert said == []
    assert default_transports("192.0.2.1:7", control.is_loopback, said.append) == ("tcp",)
    assert "another host" in said[0]


# Sizes


def test_changed_sizes_are_said_aloud() -> None:
    said: list[str] = []
    assert settle_pages([1001, 100, 4096], said.append) == (1008, 512, 4096)
    assert len(said) == 2
    assert "1001" in said[0]
    assert "1008" in said[0]

    said.clear()
    assert settle_buffer(1 << 20, [128 << 10], [200], 2, None, said.append) == 50 << 20
    assert "rounded up from 1MiB to 50MiB" in said[0]

    said.clear()
    assert settle_buffer(129 << 20, [16 << 10], [20], 1, None, said.append) == 130 << 20
    assert "multiple of 2MiB" in said[0]


def test_sizes_that_fit_are_not_talked_about() -> None:
    said: list[str] = []
    assert settle_buffer(None, [128 << 10], [2000], 1, 64 << 30, said.append) == 1000 << 20
    assert settle_buffer(None, [16 << 10], [20], 1, 64 << 30, said.append) == 256 << 20
    assert settle_buffer(512 << 20, [16 << 10], [20], 1, 64 << 30, said.append) == 512 << 20
    assert settle_pages([16 << 10], said.append) == (16 << 10,)
    assert said == []


def test_short_memory_shrinks_the_default_aloud_and_refuses_what_cannot_fit() -> None:
    said: list[str] = []
    assert settle_buffer(None, [128 << 10], [2000], 1, 3 << 30, said.append) == 512 << 20
    assert "memory is short" in said[0]
    assert "spreads over" in said[1]
    with pytest.raises(BenchError, match="do not fit"):
        settle_buffer(2 << 30, [16 << 10], [20], 1, 3 << 30, said.append)


def test_a_target_with_less_memory_is_adapted_to_aloud() -> None:
    said: list[str] = []
    plan = options(buffer=64 << 20)
    assert fit_target(plan, 64 << 20, said.append) is plan
    assert said == []
    assert fit_target(plan, 32 << 20, said.append).buffer == 32 << 20
    assert "reduced from 64MiB to the 32MiB" in said[0]
    with pytest.raises(BenchError, match="larger --buffer"):
        fit_target(plan, 1 << 20, said.append)


def test_a_run_is_bounded() -> None:
    demand_bounded(options())
    with pytest.raises(BenchError, match="limit"):
        demand_bounded(options(duration=3600.0))


def test_slices_stay_short_and_many() -> None:
    assert options(duration=0.1).rounds == 4
    assert options(duration=60.0).rounds == 60


# Page plans


@pytest.mark.parametrize("spread", ["contiguous", "scattered"])
def test_batches_of_a_plan_are_disjoint_and_differ_between_the_sides(spread: Spread) -> None:
    plan = PagePlan(64 * PAGE + 100, PAGE, 6, spread, SEED)
    assert plan.batches == 10
    for side in (plan.initiator_ids, plan.target_ids):
        ids = np.concatenate([side(batch) for batch in range(plan.batches)])
        assert ids.dtype == np.uint32
        assert len(set(ids.tolist())) == ids.size == 60
        assert ids.max() < 64
    assert plan.initiator_ids(0).tolist() != plan.target_ids(0).tolist()


def test_contiguous_batches_are_runs_and_scattered_ones_are_not() -> None:
    runs = PagePlan(64 * PAGE, PAGE, 16, "contiguous", SEED)
    assert all(np.all(np.diff(runs.target_ids(batch).astype(int)) == 1) for batch in range(4))
    scattered = PagePlan(1024 * PAGE, PAGE, 256, "scattered", SEED)
    assert np.mean(np.abs(np.diff(scattered.target_ids(0).astype(int))) == 1) < 0.05


def test_the_permutation_depends_on_the_seed_alone() -> None:
    assert sorted(permutation(1000, 7).tolist()) == list(range(1000))
    assert permutation(8, 1).tolist() == [2, 4, 6, 3, 0, 1, 7, 5]
    assert permutation(1000, 7).tolist() != permutation(1000, 8).tolist()


def test_a_plan_refuses_what_does_not_fit() -> None:
    for page, pages in ((PAGE, 65), (4, 1), (1001, 1), (PAGE, 0)):
        with pytest.raises(BenchError):
            PagePlan(64 * PAGE, page, pages, "scattered", SEED)
    with pytest.raises(BenchError):
        PagePlan(64 * PAGE, PAGE, 6, "scattered", SEED).target_ids(10)


# The check of the bytes


def _moved(salt: int) -> tuple[PagePlan, pattern.Bytes]:
    """A destination into which every batch of a plan was moved as it should be."""
    plan = PagePlan(64 * PAGE, PAGE, 16, "scattered", SEED)
    source, destination = np.zeros(64 * PAGE, np.uint8), np.zeros(64 * PAGE, np.uint8)
    pattern.fill(source, salt)
    for batch in range(plan.batches):
        for own, other in zip(plan.initiator_ids(batch), plan.target_ids(batch), strict=True):
            destination[own * PAGE : (own + 1) * PAGE] = source[other * PAGE : (other + 1) * PAGE]
    return plan, destination


def _check(plan: PagePlan, destination: pattern.Bytes, salt: int, batch: int = 1) -> pattern.Mismatch | None:
    return pattern.check(destination, PAGE, plan.initiator_ids(batch), plan.target_ids(batch), salt)


def test_right_bytes_pass_and_another_salt_does_not() -> None:
    plan, destination = _moved(salt=99)
    assert all(_check(plan, destination, 99, batch) is None for batch in range(plan.batches))
    assert _check(plan, destination, 98) is not None


@pytest.mark.parametrize("offset", [0, 7, 1234, PAGE - 1])
def test_a_flipped_byte_is_named(offset: int) -> None:
    plan, destination = _moved(salt=99)
    page = int(plan.initiator_ids(1)[5])
    destination[page * PAGE + offset] ^= 1
    wrong = _check(plan, destination, 99)
    assert wrong is not None
    assert (wrong.page, wrong.offset) == (page, offset)
    assert wrong.found == wrong.expected ^ 1
    assert wrong.source_page == plan.target_ids(1)[5]


def test_swapped_pages_are_named_with_the_page_that_lies_there() -> None:
    plan, destination = _moved(salt=99)
    first, second = (int(page) for page in plan.initiator_ids(1)[2:4])
    pages = destination.reshape(-1, PAGE)
    pages[[first, second]] = pages[[second, first]]
    wrong = _check(plan, destination, 99)
    assert wrong is not None
    assert wrong.page == first
    assert wrong.holds is not None
    assert wrong.holds[0] == plan.target_ids(1)[3]
    assert f"those of source page {wrong.holds[0]}" in str(wrong)


def test_shifted_bytes_and_pages_not_written_are_caught() -> None:
    plan, destination = _moved(salt=99)
    shifted = np.roll(destination, 8)
    assert _check(plan, shifted, 99) is not None
    pattern.poison(destination, PAGE, plan.initiator_ids(1)[-1:])
    wrong = _check(plan, destination, 99)
    assert wrong is not None
    assert wrong.page == plan.initiator_ids(1)[-1]
    assert wrong.found == pattern.POISON


def test_every_word_of_the_pattern_has_its_own_value() -> None:
    buffer = np.zeros(1 << 22, np.uint8)
    pattern.fill(buffer, 3)
    assert np.unique(buffer.view(np.uint64)).size == buffer.size // 8


# Figures


@pytest.mark.parametrize(("percent", "needed"), [(50, 1), (90, 10), (99, 100)])
def test_a_percentile_wants_enough_samples(percent: int, needed: int) -> None:
    assert percentile([1.0] * (needed - 1), percent) is None
    assert percentile([1.0] * needed, percent) == 1.0
    assert percentile_text([1.0] * (needed - 1), percent) == f"n<{needed}"


def test_percentiles_are_values_that_occurred() -> None:
    samples = [float(value) for value in range(100, 0, -1)]
    assert [percentile(samples, p) for p in (50, 90, 99)] == [50.0, 90.0, 99.0]


def test_rates_cpu_and_ratios() -> None:
    own = Series([Slice(GIB, 1.0, 0.5, 0.25), Slice(GIB, 3.0, 0.5, 0.75)])
    limit = Series([Slice(GIB, 0.5, 0.5, 0.0), Slice(GIB, 1.0, 0.5, 0.0)])
    assert own.rate == GIB / 2
    assert own.cpu_per_gib() == (0.5, 0.5)
    ratio = own.ratio_to(limit)
    assert ratio is not None
    assert ratio.low == pytest.approx(1 / 3)
    assert ratio.high == 0.5
    empty = Series()
    assert empty.rate is None
    assert empty.cpu_per_gib() is None
    assert empty.ratio_to(limit) is None


def test_durations_have_a_unit_that_fits() -> None:
    few = {2.5: "2.5 s", 0.0123: "12.3 ms", 98.76e-6: "98.8 us", 5e-9: "5 ns"}
    # What three digits round up to the next unit, and what has more of them.
    for seconds, text in {**few, 0.9997: "1 s", 999.7: "1000 s", 1234.5: "1234 s"}.items():
        assert seconds_text(seconds) == text


# The limits


@pytest.mark.parametrize("spread", ["contiguous", "scattered"])
def test_memcpy_copies_the_pages_of_the_batch(spread: Spread) -> None:
    plan = PagePlan(64 * PAGE, PAGE, 16, spread, SEED)
    source, destination = np.zeros(64 * PAGE, np.uint8), np.zeros(64 * PAGE, np.uint8)
    pattern.fill(source, 5)
    limit = Memcpy(plan, source, destination)
    turn = limit.turn(0.0)
    assert turn.payload == 16 * PAGE
    assert len(turn.latencies_s) == 1
    limit.copy(2)
    for batch, start in ((0, 0), (2, 32)):
        assert pattern.check(destination, PAGE, range(start, start + 16), plan.target_ids(batch), 5) is None


def test_the_tcp_stream_moves_the_bytes_both_ways() -> None:
    here, there = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    pattern.fill(there, 5)
    target = StreamTarget("127.0.0.1", there.data)
    try:
        host, port = control.split_address(target.address)
        initiator = StreamInitiator(host, port, target.token, here.data)
        try:
            initiator.turn("read", 1 << 20, CHUNKS[0])
            assert np.array_equal(here, there)
            pattern.fill(here, 6)
            initiator.turn("write", 3 << 20, CHUNKS[-1])
            assert np.array_equal(here, there)
        finally:
            initiator.close()
    finally:
        target.close()


# The control connection


def _handshake(listener_secret: str | None, opener_secret: str | None) -> tuple[str | None, str | None]:
    """What either side says of a handshake: ``None``, or its error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        said: list[str | None] = [None]

        def listen() -> None:
            sock, _ = server.accept()
            with sock:
                try:
                    control.accept(sock, listener_secret).serve(lambda _: {"fine": True})
                except BenchError as error:
                    said[0] = str(error)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        opener: str | None = None
        try:
            connection = control.connect(f"127.0.0.1:{server.getsockname()[1]}", opener_secret)
            assert connection.request("anything")["fine"] is True
            connection.close()
        except BenchError as error:
            opener = str(error)
        thread.join(timeout=60)
        assert not thread.is_alive()
        return said[0], opener


def test_both_sides_prove_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HANDSHAKE_SECONDS", 60.0)  # in a process that may stand still
    assert _handshake(None, None) == (None, None)
    assert _handshake("s3cret", "s3cret") == (None, None)
    listener, opener = _handshake("s3cret", "other")
    assert listener is not None
    assert "does not know the secret" in listener
    assert opener is not None
    assert opener.startswith("secret_mismatch: ")
    for secrets in (("s3cret", None), (None, "s3cret")):
        said = str(_handshake(*secrets)[1])
        assert said.startswith("secret_required: ")
        assert "set KVIK_SECRET" in said


def test_an_initiator_is_told_why_its_target_has_no_engine() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        options = TargetOptions(1 << 20, "shared", "tcp", 1, "full", address)
        ended: list[BaseException] = []

        def target() -> None:
            try:
                serve(control.Connection(theirs), options, None)
            except kvik.KvikError as error:
                ended.append(error)

        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        connection = control.Connection(ours)
        with pytest.raises(BenchError, match=f"engine did not start.*{address}: take another port"):
            connection.request("hello")
        connection.close()
        thread.join(timeout=60)
        assert isinstance(ended[0], kvik.InvalidArgument)


def test_lines_are_bounded_and_answers_have_a_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = control.Connection(ours)
        with pytest.raises(BenchError, match="no answer"):
            connection.receive(0.05)
        with pytest.raises(BenchError, match="limit"):
            connection.send({"text": "x" * control.LINE_LIMIT})
        sender = threading.Thread(target=theirs.sendall, args=(b"x" * control.LINE_LIMIT,), daemon=True)
        sender.start()
        with pytest.raises(BenchError, match="longer"):
            connection.receive(60.0)
        sender.join(timeout=60)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"GET / HTTP/1.1\n[1]\n")
        connection = control.Connection(ours)
        for text in ("not JSON", "not a JSON object"):
            with pytest.raises(BenchError, match=text):
                connection.receive(60.0)


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "host:²", "host:70000"])
def test_addresses_are_checked(text: str) -> None:
    with pytest.raises(BenchError, match="HOST:PORT"):
        control.split_address(text)


def test_addresses_of_both_families() -> None:
    for text, pair in (("127.0.0.1:1", ("127.0.0.1", 1)), ("[::1]:80", ("::1", 80))):
        assert control.split_address(text) == pair
        assert control.join_address(*pair) == text


# Results


def _results() -> Results:
    turn = Slice(40 << 20, 0.1, 0.05, 0.05, (0.01,) * 5)
    used = Used({"tcp": {"4 channels"}}, {("grant", "generation", "page_checksum")}, {"local: not asked"})
    cell = CellResult(
        Cell("read", 16 << 10, 20), 10, 1, 1 << 20, [KvikResult("tcp", used, Series([turn, turn]))],
        Series([turn, turn]), Series([turn, turn]), complete=True,
    )  # fmt: skip
    target = TargetOptions(64 << 20, "shared", "auto", 4, "auto", "192.0.2.1:7")
    return Results(options(), ["a notice"], target_options=target, cells=[cell])


def test_the_json_schema_is_stable() -> None:
    document = json.loads(json.dumps(to_json(_results())))
    assert document["format"] == FORMAT == "kvik-bench-transfer/1"
    assert list(document) == [
        "format", "complete", "interrupted", "failure", "options", "notices", "initiator", "target", "cells",
    ]  # fmt: skip
    assert document["options"]["seed"] == SEED
    assert {"cpu_model", "cores", "kernel", "kvik", "python", "numpy"} <= set(document["initiator"])
    (cell,) = document["cells"]
    assert set(cell) == {
        "op", "page_bytes", "pages", "batch_bytes", "batches_in_buffer", "inflight", "complete", "kvik",
        "memcpy", "tcp_stream",
    }  # fmt: skip
    (path,) = cell["kvik"]
    assert set(path) == {
        "transport", "used", "checks", "rejected_transports", "payload_bytes", "wall_s", "bytes_per_s",
        "cpu_s_per_gib",
        "latency_s", "rounds", "ratio_to_memcpy", "ratio_to_tcp_stream",
    }  # fmt: skip
    assert path["latency_s"] == {"n": 10, "p50": 0.01, "p90": 0.01, "p99": None}
    assert path["ratio_to_memcpy"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert cell["tcp_stream"]["send_bytes"] == 1 << 20
    assert "192.0.2.1" not in json.dumps(document)


def test_the_table_has_a_row_for_every_contender() -> None:
    assert table(_results()).row_count == 3


# The whole path


def _bench(*arguments: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvik.bench.cli import bench; bench()", "transfer", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "KVIK_SECRET": "a secret of this test"},
        check=False,
    )


SHORT = ("--page", "16KiB", "--pages", "5,50", "--duration", "0.08", "--buffer", "8MiB", "--seed", "5")


@pytest.mark.parametrize(("layout", "memory"), [("scattered", "shared"), ("contiguous", "host")])
def test_a_short_run_measures_and_checks_every_cell(tmp_path: Path, layout: str, memory: str) -> None:
    file = tmp_path / "results.json"
    ended = _bench(*SHORT, "--layout", layout, "--memory", memory, "--inflight", "2", "--json", str(file))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    document = json.loads(file.read_text())
    assert document["complete"] is True
    assert len(document["cells"]) == 4
    for cell in document["cells"]:
        assert cell["complete"] is True
        for path, transport in zip(cell["kvik"], ("tcp", "local"), strict=True):
            assert list(path["used"]) == [transport]
            assert path["payload_bytes"] >= 4 * cell["batch_bytes"]
            assert path["ratio_to_memcpy"]["median"] > 0
    assert "equal in 4 of 4 cells" in ended.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("checks", "--page", "16KiB", "--pages", "5", "--rounds", "2", "--turn", "0.01"),
        ("context", "--shape", "tiny", "--tokens", "64", "--memory", "8MiB"),
    ],
)
def test_standard_output_has_nothing_but_json(words: tuple[str, ...]) -> None:
    """With `--json -`; what is for people is on standard error."""
    ended = CliRunner().invoke(bench, [*words, "--json", "-"])
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["machine"]
    assert "GB/s" in ended.stderr
    assert "GB/s" in CliRunner().invoke(bench, words).stdout


def test_a_wrong_byte_ends_the_run_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = pattern.Mismatch(page=3, source_page=4, offset=17, found=0, expected=1, holds=None)
    monkeypatch.setattr(pattern, "check", lambda *_: wrong)
    ended = CliRunner().invoke(bench, ["transfer", *SHORT, "--op", "read", "--transport", "tcp"])
    assert ended.exit_code == 1
    assert "FAILED" in ended.output
    assert "page 3 at byte 17" in ended.output


def test_repetitions_are_values_of_their_own() -> None:
    """Each of a cell, the first ones apart, and what the engines counted is what was moved."""
    small = ("--page", "16KiB", "--pages", "20", "--buffer", "8MiB", "--seed", str(SEED), "--op", "write")
    ended = _bench(*small, "--repetitions", "5", "--warmup", "2", "--class", "bulk", "--json", "-")
    assert ended.returncode == 0, ended.stderr
    (cell,) = json.loads(ended.stdout)["cells"]
    for part in cell["kvik"]:
        assert (len(part["warmup_s"]), len(part["repetitions_s"])) == (2, 5)
        assert part["latency_s"]["n"] == 5
        for side in ("initiator", "target"):
            before, after = part["counted"][side]
            name = next(
                one
                for one in after
                if one.startswith("kvik_transfer_bytes_total") and f'"{part["transport"]}"' in one
            )
            assert 'class="bulk"' in name
            assert after[name] - before[name] == 7 * cell["batch_bytes"]
    assert cell["tcp_stream"]["rounds"] == []


@pytest.mark.timeout(500)
def test_a_target_that_listens_serves_one_initiator_after_the_other() -> None:
    listener = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from kvik.bench.cli import bench; bench()",
            "transfer",
            *SHORT,
            "--listen",
            "127.0.0.1:0",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVIK_SECRET": "a secret of this test", "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert listener.stdout is not None
        line = listener.stdout.readline()
        assert line.startswith("bench target on ")
        address = line.split()[-1]
        for _ in range(2):
            ended = _bench(*SHORT, "--target", address, "--transport", "auto", "--json", "-")
            assert ended.returncode == 0, ended.stderr
            assert json.loads(ended.stdout)["complete"] is True
    finally:
        listener.kill()
        listener.wait(timeout=60)
    refused = _bench(*SHORT, "--target", address)
    assert refused.returncode == 1
    assert "peer_unreachable: no bench target" in refused.stdout
