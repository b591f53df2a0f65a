"""`kvik selftest`: the whole command over two transports, what fails is said, and what it writes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import kvik
from kvik import signals
from kvik.bench.control import split_address
from kvik.bench.errors import BenchError, CheckError
from kvik.bench.pattern import POISON
from kvik.roles.ports import free_ports
from kvik.selftest import cli, first, hardware, landing, refusals, report, run, summary, sweep
from kvik.selftest.conformance import conformance, questions
from kvik.selftest.counts import nic_counts, summed
from kvik.selftest.ends import cancelled_moving, revoke_gives_back
from kvik.selftest.grid import IN_FLIGHT, THREADS, cell_for
from kvik.selftest.here import Heard
from kvik.selftest.mover import Point, measure
from kvik.selftest.nics import nics
from kvik.selftest.other import still_poisoned
from kvik.selftest.part import Part, bounded, checked
from kvik.selftest.plan import BLOCKS, Asked, Plan, settle
from kvik.selftest.run import Results
from kvik.selftest.sides import Session, Sides
from kvik.selftest.sweep import points

SECRET = "a secret of this test"  # noqa: S105 - no secret of anybody
COMMAND = [sys.executable, "-c", "from kvik.cli import main; main()", "selftest"]
TINY = ("--seconds-per-point", "0.01", "--max-bytes", "2MiB", "--seed", "7")
PARTS = ["here", "conformance", "first", "sweep", "grid", "nics"]


def _run(
    folder: Path, *arguments: str, secret: str | None = None, seconds: float = 150.0
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) if secret is None else {**os.environ, "KVIK_SECRET": secret}
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@contextlib.contextmanager
def _serving(folder: Path, *arguments: str, secret: str) -> Iterator[str]:
    """The other side, as a process; gives its address."""
    process = subprocess.Popen(
        [*COMMAND, "--serve", "127.0.0.1:0", *arguments],
        cwd=folder,
        env={**os.environ, "KVIK_SECRET": secret},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("kvik selftest serves on "))
        yield line.split()[-1]
    finally:
        process.kill()
        process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()


def _plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "nics": None,
        "transport": "tcp",
        "target": None,
        "listen": None,
        "seconds_per_point": 0.01,
        "max_bytes": 2 << 20,
        "seed": 7,
    }
    return settle(Asked(**(values | changes)), [])


def _quiet(_: str) -> None:
    """Say nothing."""


def _quiet_run(*_: object) -> None:
    """Run no part."""


# The whole command


def _demand_schema(document: dict[str, Any]) -> None:
    """What docs/selftest.md says of the report."""
    assert document["format"] == report.FORMAT
    assert document["state"] in ("passed", "failed")
    assert set(document) == {"format", "made", "state", "interrupted", "plan", "log", "parts"}
    assert [part["name"] for part in document["parts"]] == PARTS
    for part in document["parts"]:
        assert set(part) == {"number", "name", "title", "state", "said", "seconds", "checks", "data"}
        assert part["state"] in ("passed", "failed", "left out")
        assert part["said"]
        for check in part["checks"]:
            assert set(check) == {"name", "state", "said", "seconds"}


def _demand_measured(parts: dict[str, Any], fitting: int) -> None:
    submits = [row["which"] for row in parts["first"]["data"]["submits"]]
    series = ["cold", *(f"warm {number}" for number in range(1, 6))]
    assert submits == 2 * [*series, *(f"warmed {number}" for number in range(1, 6))]
    for warm_up in parts["first"]["data"]["warm_ups"]:
        assert warm_up["transports"]
        assert {pair["state"] for pair in warm_up["pairs"]} <= {"opened"}
        assert warm_up["took_s"] > 0
    assert [warm_up["op"] for warm_up in parts["first"]["data"]["warm_ups"]] == ["read", "write"]
    assert {check["state"] for check in parts["first"]["checks"]} == {"passed"}
    assert len(parts["first"]["checks"]) == 4
    assert len(parts["sweep"]["data"]["points"]) == 2 * fitting
    assert len(parts["grid"]["data"]["points"]) == 2 * len(THREADS) * len(IN_FLIGHT)
    for point in [*parts["sweep"]["data"]["points"], *parts["grid"]["data"]["points"]]:
        assert point["compared_bytes"] > 0
        transfers = sum(len(repeat["latencies_s"]) for repeat in point["repeats"])
        moved = sum(repeat["bytes"] for repeat in point["repeats"])
        assert moved == transfers * point["pages"] * point["block_bytes"] > 0
        rates = [repeat["bytes"] / repeat["seconds"] for repeat in point["repeats"]]
        assert (min(rates), max(rates)) == (point["bytes_per_s"]["low"], point["bytes_per_s"]["high"])


@pytest.mark.parametrize("choice", [("--nics", "libfabric:tcp"), ("--transport", "tcp")])
def test_all_parts_pass_and_are_reported(tmp_path: Path, choice: tuple[str, str]) -> None:
    ended = _run(tmp_path, *choice, *TINY)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "PASSED; report in kvik-selftest-" in ended.stdout
    assert "seed 7" in ended.stdout
    (file,) = tmp_path.glob("kvik-selftest-*.json")
    document = json.loads(file.read_text())
    _demand_schema(document)
    parts = {part["name"]: part for part in document["parts"]}
    over_nics = choice[0] == "--nics"
    assert document["state"] == "passed"
    assert [part["state"] for part in parts.values()] == ["passed"] * 5 + [
        "passed" if over_nics else "left out"
    ]
    assert parts["here"]["data"]["used"]["transport"] == ("libfabric" if over_nics else "tcp")
    assert {check["state"] for check in parts["conformance"]["checks"]} == {"passed"}
    fitting, left_out = points(2 << 20, "read")
    assert left_out  # so that this, too, is in the report
    _demand_measured(parts, len(fitting))
    if over_nics:
        assert "libfabric" in " ".join(parts["here"]["data"]["log"])
        moved = sum(one["in"] + one["out"] for one in parts["nics"]["data"]["this_side"].values())
        assert moved > 0
    text = file.with_suffix(".md").read_text()
    assert text == summary.render(document)
    for part in document["parts"]:
        assert f"## Part {part['number']}: {part['title']}\n\n{part['state'].upper()}: " in text


def test_another_process_serves_one_selftest_after_the_other(tmp_path: Path) -> None:
    choice = ("--nics", "libfabric:tcp", *TINY)
    # Each part has a new engine at the same address, on both sides.
    here, there = (("--listen", f"127.0.0.1:{port}") for port in free_ports(2))
    with _serving(tmp_path, *choice, *there, secret=SECRET) as address:
        ended = _run(tmp_path, *choice, *here, "--target", address, "--report", "far.json", secret=SECRET)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        text = (tmp_path / "far.json").read_text()
        assert SECRET not in text + (tmp_path / "far.md").read_text() + ended.stdout
        checks = {check["name"]: check for check in json.loads(text)["parts"][1]["checks"]}
        assert checks["another secret is refused"]["said"] == "refused as SecretMismatch"
        assert checks["a killed peer is noticed, and a new one serves"]["state"] == "left out"

        ended = _run(tmp_path, *choice, "--target", address, "--report", "wrong.json", secret="not " + SECRET)
        assert ended.returncode == 1, ended.stdout + ended.stderr
        document = json.loads((tmp_path / "wrong.json").read_text())
        _demand_schema(document)
        assert [part["state"] for part in document["parts"]] == ["failed"] * 6
        assert all("refused the secret" in part["said"] for part in document["parts"][1:5])
        assert "FAILED: secret_mismatch: the target at" in (tmp_path / "wrong.md").read_text()

    ended = _run(tmp_path, *choice, "--target", address, "--report", "gone.json", secret=SECRET)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "no bench target at" in (tmp_path / "gone.md").read_text()


def test_an_interrupt_ends_it_and_keeps_what_was_found(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--transport", "tcp", "--report", "cut.json", "--seconds-per-point", "60"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any(line.startswith("part 4") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        said = process.stdout.read()
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait(timeout=60)
    assert "INTERRUPTED; report in cut.json" in said
    document = json.loads((tmp_path / "cut.json").read_text())
    assert document["interrupted"]
    assert [part["state"] for part in document["parts"]] == ["passed"] * 3 + ["failed"]
    assert "It was interrupted." in (tmp_path / "cut.md").read_text()


def test_a_reader_that_leaves_ends_no_run(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--transport", "tcp", "--report", "unread.json", *TINY],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("kvik selftest, seed 7")
        process.stdout.close()
        assert process.stderr is not None
        assert (process.stderr.read(), process.wait(timeout=60)) == ("", 0)
    finally:
        process.kill()
        process.wait(timeout=60)
    assert json.loads((tmp_path / "unread.json").read_text())["state"] == "passed"
    assert (tmp_path / "unread.md").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nics", "quark"), "names no NICs"),
        (("--nics", "libfabric:none"), "no NIC of provider"),
        (("--transport", "nics"), "needs to know which"),
        (("--transport", "tcp", "--nics", "efa"), "another"),
        (("--transport", "tcp", "--max-bytes", "1KiB"), "--max-bytes is from 1MiB"),
        (("--transport", "tcp", "--report", "no/folder/a.json"), "no folder"),
        (("--transport", "tcp", "--report", "a.md"), "ends with .json"),
        (("--transport", "tcp", "--target", "nowhere"), "not HOST:PORT"),
        (("--transport", "tcp", "--target", "a..b:7"), "no way from here to a..b:7"),
        (("--transport", "tcp", "--serve", "127.0.0.1:0", "--target", "127.0.0.1:1"), "one of them"),
        (("--transport", "tcp", "--serve", "192.0.2.1:0"), "KVIK_SECRET"),
        (("--transport", "tcp", "--listen", "0.0.0.0:0"), "wildcard"),
    ],
)
def test_what_cannot_begin_ends_with_status_2(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    ended = _run(tmp_path, *arguments)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert said in " ".join(ended.stderr.split())
    assert list(tmp_path.iterdir()) == []


# What is chosen


def _device(folder: Path, name: str, driver: str | None, state: str) -> None:
    port = folder / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    (folder / name / "device").mkdir()
    if driver is not None:
        (folder / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / name / "device" / "driver").symlink_to(folder / "drivers" / driver)


def test_ports_of_the_kernel_and_what_suits_them(tmp_path: Path) -> None:
    assert hardware.ports(tmp_path / "none") == []
    assert hardware.suggested([]) is None
    _device(tmp_path, "mlx5_0", "mlx5_core", "1: DOWN")
    (down,) = hardware.ports(tmp_path)
    assert (down.device, down.driver, down.state, down.active) == ("mlx5_0", "mlx5_core", "1: DOWN", False)
    assert hardware.suggested([down]) is None
    _device(tmp_path, "rxe0", None, "4: ACTIVE")
    both = hardware.ports(tmp_path)
    assert [port.driver for port in both] == ["mlx5_core", "software"]
    assert (hardware.suggested(both) or ("",))[0] == "verbs"
    _device(tmp_path, "rdmap0s6", "efa", "4: ACTIVE")
    assert (hardware.suggested(hardware.ports(tmp_path)) or ("",))[0] == "efa"


def test_what_is_named_goes_before_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="no NICs: neither"):
        _plan(transport=None)
    port = hardware.Port("rxe0", 1, "software", "Ethernet", "4: ACTIVE", "", "", "")
    asked = Asked(None, None, None, None, 1.0, 2 << 20, 7)
    assert (settle(asked, [port]).transport, settle(asked, [port]).nics) == ("nics", "verbs")
    monkeypatch.setenv("KVIK_NICS", "libfabric:tcp")
    assert settle(asked, [port]).nics == "libfabric:tcp"
    assert _plan(nics="efa", transport=None).nics == "efa"


def test_a_target_elsewhere_takes_a_secret_and_an_address_of_this_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert split_address(_plan(target="127.0.0.1:7").listen) == ("127.0.0.1", 0)
    with pytest.raises(BenchError, match="KVIK_SECRET"):
        _plan(listen="192.0.2.1:0")
    monkeypatch.setenv("KVIK_SECRET", SECRET)
    plan = _plan(listen="192.0.2.1:0", target="192.0.2.2:7")
    assert plan.secret == SECRET
    assert SECRET not in json.dumps(plan.to_json())
    assert "192.0.2" not in json.dumps(plan.to_json())


@pytest.mark.parametrize("buffer", [1 << 20, 3 << 20, 256 << 20])
def test_every_point_fits_into_the_memory(buffer: int) -> None:
    cell = cell_for(buffer, "read")
    assert max(THREADS) * max(IN_FLIGHT) * cell.batch_bytes <= buffer
    fitting, left_out = points(buffer, "write")
    assert all(point.least_bytes <= buffer for point in fitting)
    assert [point.cell.page_bytes for point in fitting] + left_out == list(BLOCKS)
    assert BLOCKS == (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)


# Checks that can fail


@pytest.fixture
def sides() -> Iterator[Sides]:
    with Session(_plan()).sides("test", counted=False) as opened:
        yield opened


def _spoiled(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Sides], None]) -> None:
    """After each transfer that is begun and done, something happens to this side's memory."""
    real = Sides.move

    def move(self: Sides, *args: Any, **options: Any) -> kvik.Transfer:
        transfer = real(self, *args, **options)
        with contextlib.suppress(kvik.KvikError):
            transfer.wait()
        spoil(self)
        return transfer

    monkeypatch.setattr(Sides, "move", move)


def test_a_wrong_byte_of_a_page_is_found(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(sides: Sides) -> None:
        moved = np.flatnonzero(sides.memory.bytes != POISON)
        sides.memory.bytes[moved[moved.size // 2]] ^= 1

    _spoiled(monkeypatch, spoil)
    with pytest.raises(CheckError, match=r"page \d+ at byte \d+: found"):
        landing.lands("read", sides)


def test_a_byte_outside_the_pages_is_found(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(sides: Sides) -> None:
        untouched = np.flatnonzero(sides.memory.bytes == POISON)
        sides.memory.bytes[untouched[-1]] = 0

    _spoiled(monkeypatch, spoil)
    with pytest.raises(CheckError, match="outside all pages"):
        landing.lands("read", sides)


def test_a_byte_outside_written_pages_is_found(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sides.move

    def move(self: Sides, cell: Any, pages: Any, ticket: Any, batch: int) -> kvik.Transfer:
        real(self, cell, pages, ticket, pages.batches - 1).wait()  # Pages that nobody asked for.
        return real(self, cell, pages, ticket, batch)

    monkeypatch.setattr(Sides, "move", move)
    with pytest.raises(CheckError, match="outside all pages"):
        landing.lands("write", sides)


def test_bytes_that_come_late_are_found(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(sides: Sides) -> None:
        sides.memory.bytes[:] = 0

    _spoiled(monkeypatch, spoil)
    with pytest.raises(CheckError, match="after the transfer into it had ended"):
        cancelled_moving(sides)


def test_a_grant_that_is_not_revoked_is_found(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(sides.other), "revoke", lambda *_: (0.0, "live"))
    with pytest.raises(CheckError, match="the grant is live"):
        revoke_gives_back(sides)
    with pytest.raises(CheckError, match="it was served, where GrantRevoked was due"):
        refusals.refused(refusals.revoked, sides)


def test_a_refusal_by_another_name_is_found(sides: Sides) -> None:
    lent = sides.other.lend(4, 4096)
    sides.other.revoke(lent)
    local = sides.small(4, 4096)
    with pytest.raises(CheckError, match="fails with GrantRevoked, not with GrantExpired"):
        refusals.expect(lambda: sides.engine.read(local, lent.ticket, range(4)), kvik.GrantExpired)


def test_memory_outside_pages_is_looked_at_to_its_end() -> None:
    buffer = np.full(10 * 512 + 100, POISON, dtype=np.uint8)
    ids = np.array([1, 3], dtype=np.uint32)
    buffer[512:1024] = 0
    assert still_poisoned(buffer, 512, ids) is None
    for wrong in (buffer.size - 1, 2 * 512 + 17, 511):
        buffer[wrong] = 0
        assert still_poisoned(buffer, 512, ids) == wrong


# Parts


def test_one_wrong_answer_does_not_end_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Sides) -> str:
        raise CheckError("on purpose")

    monkeypatch.setattr(
        "kvik.selftest.conformance.questions", lambda _: {"one": fails, "two": lambda _: "fine"}
    )
    part = Part(2, "conformance", "a test")
    conformance(part, Session(_plan()), _quiet)
    assert [(check.name, check.state) for check in part.checks[:2]] == [("one", "failed"), ("two", "passed")]
    assert part.state == "failed"
    assert part.said == "1 of 3 checks failed: one"


def test_every_question_has_its_own_name() -> None:
    assert len(questions(Session(_plan()))) == 13


def _bounded(part: Part, work: Callable[[Part], None], limit: float, cut: Callable[[], None]) -> Part:
    """Run a part that nobody interrupts."""
    with signals.noted() as interrupt:
        return bounded(part, work, limit, cut, interrupt)


def test_a_part_that_hangs_is_cut() -> None:
    released = threading.Event()

    def hangs(part: Part) -> None:
        part.data["begun"] = True
        assert released.wait(60)

    part = _bounded(Part(1, "a", "a test"), hangs, 0.05, released.set)
    assert part.state == "failed"
    assert part.said == "not done within 0.05 s; it was cut short"
    assert part.data == {"begun": True}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_wakes_no_wait_ends_a_run(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    released = threading.Event()

    def signalled(_part: Part, _session: Session, _say: Callable[[str], None]) -> None:
        released.wait(0.2)  # Until the main thread waits: no event says so, and earlier proves less.
        # It goes on waiting in the kernel, which wakes the thread that gets the signal.
        signal.pthread_kill(threading.get_ident(), number)
        assert released.wait(60)

    monkeypatch.setattr(run, "steps", lambda *_: [run.Step("here", "a test", signalled, 60.0)])
    results = Results(_plan())
    with signals.noted() as interrupt:
        run.execute(results, Heard(), _quiet, interrupt)
    released.set()
    assert results.interrupted
    assert [(part.state, part.said) for part in results.parts] == [("failed", "interrupted")]


def test_a_peer_that_dies_fails_its_part_and_not_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed_first(sides: Sides, point: Point, seconds: float) -> dict[str, Any]:
        sides.other.kill()
        return measure(sides, point, seconds)

    monkeypatch.setattr(sweep, "measure", killed_first)
    session = Session(_plan())
    part = _bounded(
        Part(4, "sweep", "a test"), lambda part: sweep.sweep(part, session, _quiet), 60.0, session.cut
    )
    assert part.state == "failed"
    assert "the target ended before it answered" in part.said
    part = _bounded(
        Part(3, "first", "a test"), lambda part: first.first(part, session, _quiet), 60.0, session.cut
    )
    assert (part.state, list(session.counted)) == ("passed", ["first"])


def test_a_warm_up_that_is_none_fails_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = iter([(1, 0.0), (1, 0.0), (2, 3.0), *[(1, 0.0)] * 3])
    monkeypatch.setattr(first, "_opened", lambda _: next(opened))
    session = Session(_plan())
    part = _bounded(
        Part(3, "first", "a test"), lambda part: first.first(part, session, _quiet), 60.0, session.cut
    )
    failed = [check for check in part.checks if check.state == "failed"]
    assert (part.state, [check.name for check in failed]) == ("failed", ["no read after it opened anything"])
    assert failed[0].said == "1 sessions and 3 connections of NICs were opened after the warm-up"


def test_an_error_is_the_answer_of_a_check_and_of_a_part() -> None:
    def refused() -> str:
        raise kvik.GrantExpired("too late")

    part = Part(1, "a", "a test")
    assert not checked(part, "a check", refused, _quiet)
    assert part.checks[0].said == "grant_expired: too late"
    part = _bounded(part, lambda _: print(refused()), 60.0, lambda: None)
    assert (part.state, part.said) == ("failed", "grant_expired: too late")
    with pytest.raises(ZeroDivisionError):
        _bounded(part, lambda _: print(1 // 0), 60.0, lambda: None)


def _counts(**changes: float) -> dict[str, float]:
    return {"in": 10.0, "out": 5.0, "failed": 0.0, "up": 1.0, **changes}


@pytest.mark.parametrize(
    ("idle", "said"),
    [
        (_counts(), ""),
        (_counts(**{"in": 0.0, "out": 0.0}), "it moved nothing"),
        (_counts(failed=3.0), "3 of its operations failed"),
        (_counts(up=0.0), "its port is down"),
    ],
)
def test_a_nic_that_takes_no_part_fails(idle: dict[str, float], said: str) -> None:
    session = Session(_plan(nics="efa", transport=None))
    session.counted["sweep"] = [({"a": _counts(), "b": idle}, {"c": _counts(**{"in": 0.0, "out": 0.0})})]
    part = Part(6, "nics", "a test")
    nics(part, session, _quiet)
    assert part.state == ("failed" if said else "passed")
    assert [check.state for check in part.checks] == ["passed", "failed" if said else "passed", "passed"]
    assert said in part.checks[1].said


def test_counts_are_those_of_the_metrics() -> None:
    text = (
        "# TYPE kvik_nic_bytes_total counter\n"
        'kvik_nic_bytes_total{nic="a",direction="in"} 7\nkvik_nic_bytes_total{nic="a",direction="out"} 8\n'
        "# TYPE kvik_nic_failed_operations_total counter\n"
        'kvik_nic_failed_operations_total{nic="a"} 1\n'
        "# TYPE kvik_nic_up gauge\n"
        'kvik_nic_up{nic="a"} 0\n'
    )
    one = nic_counts(text)
    assert one == {"a": {"in": 7.0, "out": 8.0, "failed": 1.0, "up": 0.0}}
    assert summed([one, {"a": _counts()}]) == {"a": {"in": 17.0, "out": 13.0, "failed": 1.0, "up": 0.0}}


def test_what_cannot_take_a_report_is_told_before_it_is_made(tmp_path: Path) -> None:
    for name in ("one.json", "one.md"):
        (tmp_path / name).mkdir()
        with pytest.raises(BenchError, match=rf"{name} cannot be written: Is a directory"):
            report.files(str(tmp_path / "one.json"))
        (tmp_path / name).rmdir()
        (tmp_path / "one.json").unlink(missing_ok=True)


def test_two_of_one_second_have_a_report_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime.now(UTC)
    assert len({report.new_file(now) for _ in range(3)}) == len(list(tmp_path.iterdir())) == 3


def test_a_report_that_fills_a_disk_has_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cli, "execute", _quiet_run)
    monkeypatch.setattr(report, "write", full)
    ended = CliRunner().invoke(
        cli.selftest, ["--transport", "tcp", "--report", str(tmp_path / "a.json"), *TINY]
    )
    assert ended.exit_code == 1
    assert "PASSED; the report is not whole: [Errno 28] No space left on device" in ended.output


def test_an_interrupted_run_did_not_pass() -> None:
    part = Part(1, "here", "a test", state="passed", said="fine")
    assert Results(_plan(), [part]).passed
    assert not Results(_plan(), [part], interrupted=True).passed
    part.said = "a | b\nc"
    document = report.to_json(Results(_plan(), [part]), datetime.now(UTC))
    assert "| a \\| b c |" in summary.render(document)
