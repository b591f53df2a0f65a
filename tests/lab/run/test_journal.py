"""The journal: whole after any end, and one controller's at a time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from kvik_lab.errors import LabError
from kvik_lab.records import Key, Place, RunRecord, Times, dump, mend, read
from kvik_lab.records.schema import Outcome
from kvik_lab.run import cli, control, execute, progress
from kvik_lab.run.build import Planned, resolve
from kvik_lab.run.control import Control
from kvik_lab.run.journal import Journal, is_running
from kvik_lab.run.slots import plan_slots
from kvik_lab.study import load_study
from tests.lab.run.studies import PLAIN, written

ASKING = """
import sys
from pathlib import Path
from kvik_lab.run.journal import is_running
folder = Path(sys.argv[1])
is_running(folder)
print("asks", flush=True)
while True:
    is_running(folder)
"""


def record(name: str, outcome: Outcome = "completed") -> RunRecord:
    """A run with nothing in it."""
    return RunRecord(
        id=name, study="s", key=Key(configuration={"a": 1}), levels={}, place=Place(order=0, start="s1"),
        times=Times(began=0, ended=1), outcome=outcome, error=None if outcome == "completed" else "why",
    )  # fmt: skip


def test_cut_anywhere_it_goes_on(tmp_path: Path) -> None:
    """Whatever was cut off a last line: what was whole before it stays, and what comes next is whole."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    lines = [dump(record(f"r{n}")).encode() for n in range(40)]
    whole = b"".join(lines)
    for _ in range(60):
        cut = rng.randrange(len(whole) + 1)
        file = tmp_path / "runs.jsonl"
        file.write_bytes(whole[:cut])
        mend(file)
        kept = whole[:cut].count(b"\n")
        assert file.read_bytes() == b"".join(lines[:kept]), f"seed {seed}, cut {cut}"
    long = b"x" * 10_000
    file.write_bytes(lines[0] + long)
    mend(file)
    assert file.read_bytes() == lines[0]
    file.write_bytes(long)
    mend(file)
    assert file.read_bytes() == b""


def test_what_is_done_and_what_is_not(tmp_path: Path) -> None:
    """A failed run is to be run again; the last record of an id counts."""
    with Journal.opened(tmp_path / "j", "text", resume=False) as journal:
        journal.add(record("a"))
        journal.add(record("b", "failed"))
        assert [journal.done(one) for one in "abc"] == [True, False, False]
    with Journal.opened(tmp_path / "j", "text", resume=True) as journal:
        assert [journal.done(one) for one in "abc"] == [True, False, False]
        journal.add(record("b"))
    with Journal.opened(tmp_path / "j", "text", resume=True) as journal:
        assert [journal.done(one) for one in "abc"] == [True, True, False]
        assert len(journal.file.read_text().splitlines()) == 3


def test_one_controller_at_a_time(tmp_path: Path) -> None:
    """The lock is held while the journal is open, and by nobody afterwards."""
    assert not is_running(tmp_path)
    with Journal.opened(tmp_path, "text", resume=False):
        assert is_running(tmp_path)
        with (
            pytest.raises(LabError, match="another `kvik lab run` is at work here"),
            Journal.opened(tmp_path, "text", resume=True),
        ):
            pass
    assert not is_running(tmp_path)


def test_asking_whether_it_runs_keeps_no_controller_out(tmp_path: Path) -> None:
    """However often another process asks, a controller can begin at any moment of it."""
    command = [sys.executable, "-c", ASKING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
        try:
            assert asking.stdout is not None
            assert asking.stdout.readline() == "asks\n"
            for _ in range(2000):
                with Journal.opened(tmp_path, "text", resume=False):
                    assert is_running(tmp_path)
            assert asking.poll() is None, "it ended before all were opened"
        finally:
            asking.kill()


def test_what_it_is_not_opened_for(tmp_path: Path) -> None:
    """Another study's runs, runs that are there already, and a resumption of nothing."""
    with (
        pytest.raises(LabError, match="no study was begun here"),
        Journal.opened(tmp_path / "new", "text", resume=True),
    ):
        pass
    with Journal.opened(tmp_path, "text", resume=False) as journal:
        journal.add(record("a"))
    with pytest.raises(LabError, match="has runs already"), Journal.opened(tmp_path, "text", resume=False):
        pass
    with pytest.raises(LabError, match="of another text"), Journal.opened(tmp_path, "other", resume=True):
        pass


def test_the_study_s_text_is_written_once_and_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumption leaves it alone, and a disk that is full leaves what was there."""
    copy = tmp_path / "study.yaml"
    with Journal.opened(tmp_path, "text", resume=False):
        first = copy.stat()
    with Journal.opened(tmp_path, "text", resume=True):
        again = copy.stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with (
            pytest.raises(LabError, match=r"study\.yaml: cannot be written: No space left .*another --out"),
            Journal.opened(tmp_path, "other", resume=False),
        ):
            pass
    assert copy.read_text() == "text"
    with Journal.opened(tmp_path, "other", resume=False) as journal:
        assert copy.read_text() == "other"
        assert sorted(one.name for one in tmp_path.iterdir()) == ["lock", "study.yaml"]
        journal.add(record("a"))


def test_a_look_passes_over_a_record_that_is_being_written(tmp_path: Path) -> None:
    """Under the lock of a controller that is in the midst of its second record."""
    with Journal.opened(tmp_path, "text", resume=False) as journal:
        journal.add(record("a"))
        half = dump(record("b")).encode()[:-20]
        with journal.file.open("ab") as file:
            file.write(half)
        look = Journal(tmp_path)
        look.load()
        assert list(look.records) == ["a"]
        assert is_running(tmp_path)
        assert journal.file.read_bytes().endswith(half), "the look changed the file"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    with (
        pytest.raises(LabError, match=r"file/out: no journal can be kept here: .*Not a directory"),
        Journal.opened(out, "text", resume=False),
    ):
        pass
    assert not is_running(out)


def without_servers(
    monkeypatch: pytest.MonkeyPatch, tried: Callable[[object, Planned, str], RunRecord], dead: list[str]
) -> None:
    """Each run is what `tried` makes of it; `dead` are roles that have ended, until the next start."""

    @contextlib.contextmanager
    def up(_control: Control, _start: object, name: str) -> Iterator[object]:
        dead.clear()
        yield SimpleNamespace(name=name, graph=SimpleNamespace(dead=lambda: dead))

    monkeypatch.setattr(Control, "_up", up)
    monkeypatch.setattr(control, "execute", tried)


def test_a_full_disk_ends_the_study_and_keeps_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named with the file, and when there is room again the study goes on."""
    study, out = written(tmp_path, PLAIN), tmp_path / "out"
    without_servers(monkeypatch, lambda _up, run, _study: record(run.slot.id), [])

    def full(_descriptor: int) -> None:
        """No room for the second record."""
        if (out / "runs.jsonl").exists() and (out / "runs.jsonl").read_bytes().count(b"\n") > 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        stopped = CliRunner().invoke(cli.run, [str(study), "--out", str(out)])
    said = stopped.output.splitlines()[-1]
    assert stopped.exit_code == 1
    assert said.startswith(f"Error: {out}/runs.jsonl: No space left on device; every process has ended")
    assert "1 of 2 runs are completed, and kept in" in said
    assert said.endswith(f"and go on with: kvik lab resume {study} --out {out}")
    assert len((out / "runs.jsonl").read_bytes().splitlines()) == 1
    again = CliRunner().invoke(cli.resume, [str(study), "--out", str(out)])
    assert (again.exit_code, "[2/2]" in again.output) == (0, True), again.output


def test_a_trace_that_has_changed_is_another_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its content is in the key, and the rest of the study is not run with another one."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("as it was")
    text = PLAIN.replace("  load:\n", f"  load:\n    arrival: {{kind: trace, file: {trace}}}\n")
    study, out = written(tmp_path, text), tmp_path / "out"
    starts = resolve(load_study(study), plan_slots(load_study(study)))
    tried: list[str] = []

    def run(_up: object, run: Planned, _study: str) -> RunRecord:
        tried.append(run.slot.id)
        if len(tried) == 2:
            raise KeyboardInterrupt
        key = Key(configuration=execute.configuration(SimpleNamespace(planned=starts[0]), run))  # type: ignore[arg-type]
        return record(run.slot.id).model_copy(update={"key": key})

    without_servers(monkeypatch, run, [])
    assert CliRunner().invoke(cli.run, [str(study), "--out", str(out)]).exit_code == 130
    (first,) = read([out / "runs.jsonl"])
    assert first.key.configuration["files"] == {str(trace): hashlib.sha256(b"as it was").hexdigest()}
    trace.write_text("another one")
    refused = CliRunner().invoke(cli.resume, [str(study), "--out", str(out)])
    assert (refused.exit_code, len(tried)) == (2, 2)
    assert f"{trace}: has changed since run {first.id}" in refused.output
    trace.write_text("as it was")
    assert CliRunner().invoke(cli.resume, [str(study), "--out", str(out)]).exit_code == 0


def test_a_run_that_ends_its_servers_keeps_no_other_from_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one of its start does so each time; the second one is run under the servers after that."""
    study = load_study(written(tmp_path, PLAIN))
    starts = resolve(study, plan_slots(study))
    first, second = (run.slot.id for run in starts[0].runs)
    dead: list[str] = []

    def tried(_up: object, run: Planned, _study: str) -> RunRecord:
        if run.slot.id == first:
            dead.append("decode")
        return record(run.slot.id, "failed" if dead else "completed")

    without_servers(monkeypatch, tried, dead)
    with Journal.opened(tmp_path / "out", "text", resume=False) as journal:
        Control(study, starts, journal, print).run()
    assert {name: one.outcome for name, one in journal.records.items()} == {
        first: "failed", second: "completed",
    }  # fmt: skip


def test_the_time_left_is_that_of_runs_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm that takes twenty times as long as the other has its own time, and no start is counted twice."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    slots = [
        SimpleNamespace(id=f"{start}{n}", levels={"arm": arm, "tokens": n})
        for start, arm in (("a", "quick"), ("b", "slow"), ("c", "quick"), ("d", "slow"))
        for n in (1, 2)
    ]
    starts = [
        SimpleNamespace(start=SimpleNamespace(whole_plot=""), runs=[SimpleNamespace(slot=s) for s in pair])
        for pair in (slots[:2], slots[2:4], slots[4:6], slots[6:])
    ]
    done: set[str] = set()
    told = progress.Progress(slots, starts, SimpleNamespace(done=done.__contains__), lambda _: None)  # type: ignore[arg-type]
    assert told.left() is None
    for start, seconds in zip(starts[:2], (10.0, 200.0), strict=True):
        now[0] += 30.0
        told.started(start, "s")  # type: ignore[arg-type]
        for run in start.runs:
            now[0] += seconds
            done.add(run.slot.id)
            told.ended(record(run.slot.id).model_copy(update={"levels": run.slot.levels}))
    assert told.left() == 2 * (10.0 + 200.0) + 2 * 30.0
    now[0] += 30.0
    told.started(starts[2], "s")  # type: ignore[arg-type]
    assert told.left() == 2 * (10.0 + 200.0) + 30.0
