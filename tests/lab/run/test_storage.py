"""Studies of the driver `storage`: a file on a disk and in memory, really loaded, and what cannot be."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvik_lab import cli
from kvik_lab.errors import LabError
from kvik_lab.records import RunRecord
from kvik_lab.run.build import resolve, varied
from kvik_lab.run.slots import plan_slots
from kvik_lab.storage import loader
from kvik_lab.study import load_study, parse_study
from tests.docs.pages import ROOT
from tests.lab.run.studies import processes, records, run, written

READY = ROOT / "lab" / "kvik_lab" / "study" / "examples" / "model-loading.yaml"
SIZE = 3 * (1 << 20) + 5
STUDY = """
study: files
unit: {model: tiny}
constants: {size: SIZE}
factors:
  storage:
    levels: [disk, memory]
    restart: true
    sets: {disk: {load.path: DISK}, memory: {load.path: MEMORY}}
model: log(load_time) ~ storage
design: {kind: full, starts: 2, blocks: 2, seed: 3}
warmup: {until: count, min: 1, max: 1}
run:
  driver: storage
  transport: local
  load: {path: "", bytes: "{size}", loads: 8, by: read}
"""


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The same file on a disk and in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        found = tmp_path / "model", Path(memory) / "model"
        content = os.urandom(SIZE)
        for path in found:
            path.write_bytes(content)
        yield found


def study(places: tuple[Path, Path], text: str = STUDY) -> str:
    """With the places in it."""
    return text.replace("SIZE", str(SIZE)).replace("DISK", str(places[0])).replace("MEMORY", str(places[1]))


def on_disk(record: RunRecord) -> bool:
    """Whether the kernel has a cache beside what the file lies on."""
    return record.role("storage")[0].reported["file_system"] != "tmpfs"


@pytest.mark.timeout(600)
def test_a_file_is_loaded_cold_from_everywhere(tmp_path: Path, places: tuple[Path, Path]) -> None:
    """Each run has its loads, what they came from, and a verdict; a report speaks of them."""
    out = tmp_path / "out"
    status, said = run("run", written(tmp_path, study(places)), out)
    assert status == 0, said
    assert "median load 0." in said
    found = records(out)
    assert len(found) == 4
    for one in found.values():
        assert one.outcome == "completed", one.error
        times = [figure.value for figure in one.figures if figure.metric == "load_time"]
        assert len(times) == 8
        assert min(times) > 0
        assert {figure.value for figure in one.figures if figure.metric == "file_bytes"} == {SIZE}
        assert one.stated.mode == "storage"
        if on_disk(one):
            assert {figure.value for figure in one.figures if figure.metric == "resident_share"} == {0.0}
    digests = {one.role("storage")[0].reported["digest"] for one in found.values()}
    assert len(digests) == 1
    assert {one.verdict for one in found.values()} <= {"valid", "suspect"}, said
    assert processes(out) == []
    table = str(tmp_path / "load_time.csv")
    told = CliRunner().invoke(
        cli.lab, ["table", str(out / "runs.jsonl"), "--metric", "load_time", "--out", table]
    )
    assert "32 values of load_time" in told.output
    assert "emulated" not in Path(table).read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.timeout(600)
def test_another_file_than_stated(tmp_path: Path, places: tuple[Path, Path]) -> None:
    """Does not count; and one that is not there is a run that failed, with what to do."""
    text = study(places).replace(f"size: {SIZE}", f"size: {SIZE - 7}").replace(str(places[1]), "/none/of/it")
    out = tmp_path / "out"
    status, said = run("run", written(tmp_path, text.replace("starts: 2, blocks: 2", "starts: 1")), out)
    assert status == 1, said
    assert "/none/of/it: is no file there, or an empty one; put the model's file there" in said
    (wrong,) = [one for one in records(out).values() if one.outcome == "completed"]
    assert wrong.verdict == "invalid"
    assert f"the file has {SIZE:,} bytes, and {SIZE - 7:,} are stated" in said


def test_loads_of_a_file_are_warmed_by_count(places: tuple[Path, Path]) -> None:
    text = study(places).replace("until: count, min: 1, max: 1", "until: changepoint, min: 8, max: 9")
    planned = parse_study(text)
    with pytest.raises(LabError, match="none are sent by the driver storage; write until: count"):
        resolve(planned, plan_slots(planned))


def test_a_mapping_gives_what_reading_gives(places: tuple[Path, Path]) -> None:
    """Byte by byte, also where the file is longer than it was said to be."""
    for short in (0, 3):
        seen = []
        for way in (loader.read_into, loader.copy_into):
            memory = memoryview(bytearray(SIZE - short))
            assert way(places[0], memory, 1 << 20) == SIZE
            seen.append(bytes(memory))
        assert seen[0] == seen[1] == places[0].read_bytes()[: SIZE - short]


def test_what_is_cold_and_what_is_not(places: tuple[Path, Path]) -> None:
    """A file that was just read is in the page cache until it is taken out."""
    places[0].read_bytes()
    assert loader.resident(places[0]) == 1.0
    share = loader.evict(places[0])
    assert share == loader.resident(places[0])
    if loader.found_mount(places[0])["type"] != "tmpfs":
        assert share == 0.0


def test_a_page_that_stays_for_a_moment_is_taken_out(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may hold a page just then; one that somebody goes on holding counts."""
    tries = iter(range(9))
    monkeypatch.setattr(loader, "resident", lambda _: 0.25 if next(tries) < 2 else 0.0)
    assert loader.evict(places[0]) == 0.0
    assert next(tries) == 3
    monkeypatch.setattr(loader, "resident", lambda _: 0.25)
    assert loader.evict(places[0]) == 0.25


def test_no_load_from_memory_waits_for_what_cannot_go(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause before each load of one arm alone would be a difference between the arms."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert loader.evict(places[1]) == 1.0
    assert sum(pauses) == 0


def test_the_mount_of_a_file_is_found_through_links_and_in_any_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").symlink_to("/proc/self/status")
    assert loader.found_mount(tmp_path / "model")["type"] == "proc"
    told = f"1 2 0:3 / / rw - ext4 /dev/a rw\n2 3 0:4 / {tmp_path}/モデル\\040é rw - nfs4 server:/ rw\n"
    monkeypatch.setattr(Path, "read_text", lambda _: told)
    assert loader.found_mount(tmp_path / "モデル é" / "file")["type"] == "nfs4"


def test_an_empty_file_is_refused_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").touch()
    load = {"path": f"{tmp_path}/empty", "bytes": 1, "loads": 1, "warmup": 0, "by": "read", "request": 4096}
    assert loader.main([json.dumps({"storage": {"type": "none"}, "load": load})]) == 1
    assert "is no file there, or an empty one; put the model's file there" in capsys.readouterr().err


def test_the_ready_study() -> None:
    """Each arm mounts and states what its name says, in an order that is drawn within each block."""
    ready = load_study(READY)
    starts = resolve(ready, plan_slots(ready))
    arms = len(ready.factors[0].levels)
    assert len(starts) == arms * ready.design.starts
    orders = [
        tuple(str(one.runs[0].slot.levels["storage"]) for one in starts[at : at + arms])
        for at in range(0, len(starts), arms)
    ]
    assert all(sorted(order) == sorted(ready.factors[0].levels) for order in orders)
    assert len(set(orders)) > 1
    specs = {one.runs[0].slot.levels["storage"]: one.spec for one in starts}
    for name, proto in (("nfs-tcp", "tcp"), ("nfs-rdma", "rdma")):
        assert specs[name].transport == proto
        assert f"proto={proto}" in specs[name].storage.options
        assert specs[name].storage.source == "192.0.2.20:/models"
    assert {specs[name].transport for name in ("disk", "memory")} == {"local"}
    assert {"options", "path", "source", "transport", "type", "protocol"} <= set(varied(ready))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "transport: local",
            "transport: verbs",
            "verbs; a file is loaded by tcp, rdma, local",
        ),
        ("transport: local", "roles: {store: {}}", "run.roles.store: the driver storage starts no servers"),
        ("transport: local", "storage: {source: 'a:/b'}", "nothing is mounted without a type"),
        ("transport: local", "storage: {type: nfs4}", "run.storage.source: nothing to mount"),
        ("transport: local", "stated: {ttft_floor: 1}", "run.stated: hits and first tokens are of requests"),
        ("loads: 8", "loads: 0", "run.load: loads: Input should be greater than or equal to 1"),
        ("by: read", "by: rdma", "run.load: by: Input should be 'read' or 'mmap'"),
        ("transport: local", "roles: {load: {node: x}}", "run.roles.load: no node 'x'; the nodes are local"),
        ("transport: local", "roles: {load: {count: 2}}", "run.roles.load: one loader; write count: 1"),
        ("by: read", "requests: 4", "run.load: requests: Extra inputs are not permitted"),
    ],
)
def test_mistakes(before: str, after: str, said: str) -> None:
    """Are said before anything is mounted."""
    text = STUDY.replace("SIZE", "7").replace("DISK", "/a").replace("MEMORY", "/b")
    assert before in text
    wrong = parse_study(text.replace(before, after))
    with pytest.raises(LabError, match=said):
        resolve(wrong, plan_slots(wrong))
