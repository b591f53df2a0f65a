"""Studies of the driver `transfers`: pages really moved, on this host and over a shaped link, and what cannot
be."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvik.roles.hosts import CannotError, two_hosts
from kvik_lab import cli
from kvik_lab.errors import LabError
from kvik_lab.gates.judge import judge
from kvik_lab.records import Key, Place, Role, RunRecord, Stated, Times
from kvik_lab.run.build import resolve, varied
from kvik_lab.run.slots import plan_slots
from kvik_lab.study import parse_study
from kvik_lab.transfers.measure import understood
from kvik_lab.transfers.spec import TransferLoad
from tests.lab.gates.scene import finding
from tests.lab.run.studies import PLAIN, commands, finish, processes, records, run, start, wait_for, written

STUDY = """
study: moves
unit: {model: tiny}
factors:
  transport: {levels: [tcp, local], restart: true, sets: {local: {transport: local}}}
  op: {levels: [read, write]}
model: log(transfer_time) ~ transport + op
design: {kind: full, starts: 1, seed: 3}
warmup: {until: count, min: 2, max: 2}
run:
  driver: transfers
  engines: {options: {buffer: 8MiB}}
  load: {op: "{op}", page_bytes: 16384, pages: 20, class: bulk, repetitions: 8}
"""
ALONE = STUDY.replace("[tcp, local], restart: true, sets: {local: {transport: local}}", "[tcp, auto]")
ALONE = ALONE.replace("  transport: {levels: [tcp, auto]}\n", "").replace("transport + op", "op")
LINKED = ALONE.replace("  load:", "  link: {rate: 200mbit, delay: 0.002}\n  load:")
BATCH = 16384 * 20


EVERY = STUDY.replace("[tcp, local]", "[tcp, local, nics]").replace(
    "{local: {transport: local}}",
    "{local: {transport: local}, nics: {transport: nics, engines.env.KVIK_NICS: 'libfabric:tcp'}}",
)
USED = {"tcp": "tcp", "local": "local", "nics": "libfabric"}
"""As what the engines count what moved by each."""


def times(record: RunRecord, metric: str) -> list[float]:
    """The values of a metric."""
    return [one.value for one in record.figures if one.metric == metric]


@pytest.mark.timeout(600)
def test_pages_are_moved_by_each_transport(tmp_path: Path) -> None:
    """Each repetition is a value, those before them are none; the counters show what moved, and by what."""
    out = tmp_path / "out"
    status, said = run("run", written(tmp_path, EVERY), out)
    assert status == 0, said
    assert said.count(", median transfer ") >= 6
    found = records(out)
    assert len(found) == 6
    for one in found.values():
        assert one.outcome == "completed", one.error
        assert len(times(one, "transfer_time")) == len(times(one, "bandwidth")) == 8
        assert len(times(one, "warmup_transfer_time")) == 2
        for seconds, rate in zip(times(one, "transfer_time"), times(one, "bandwidth"), strict=True):
            assert rate == pytest.approx(BATCH / seconds)
        assert one.stated.mode == "transfer"
        assert {role.kind for role in one.roles} == {"target", "load"}
        for gate in ("V2", "V7", "V8"):
            assert finding(one, gate).status == "passed", finding(one, gate)
        assert f"{BATCH * 10:,} bytes by {USED[str(one.levels['transport'])]}" in finding(one, "V7").what
        assert one.verdict != "invalid"
        # What the target counts is what the initiator counts, the other way round.
        (target,) = one.role("target")
        label = 'direction="out"' if one.levels["op"] == "read" else 'direction="in"'
        grown = [
            value - target.before.get(name, 0)
            for name, value in target.after.items()
            if name.startswith("kvik_transfer_bytes_total") and label in name
        ]
        assert sum(grown) == BATCH * 10
    assert processes(out) == []
    table = str(tmp_path / "times.csv")
    asked = ["table", str(out / "runs.jsonl"), "--metric", "transfer_time", "--out", table]
    assert "48 values of transfer_time" in CliRunner().invoke(cli.lab, asked).output


@pytest.mark.timeout(600)
def test_pages_are_moved_over_a_link(tmp_path: Path) -> None:
    """Between two hosts, at the link's rate and no faster than its delay."""
    try:
        with two_hosts(0.002, tmp_path / "cable.log"):
            pass
    except CannotError as cannot:
        pytest.skip(str(cannot))
    out = tmp_path / "out"
    status, said = run("run", written(tmp_path, LINKED), out)
    assert status == 0, said
    found = records(out)
    assert len(found) == 2
    for one in found.values():
        assert {role.kind: role.node for role in one.roles} == {"target": "left", "load": "right"}
        assert min(times(one, "transfer_time")) > 0.004
        assert finding(one, "V7").status == "passed", finding(one, "V7")
    assert processes(out) == []


@pytest.mark.timeout(600)
def test_a_transfer_that_cannot_be_says_why(tmp_path: Path) -> None:
    """No NICs are named: each run has failed, with the engine's words, and a try of its own."""
    out = tmp_path / "out"
    text = STUDY.replace("local: {transport: local}", "nics: {transport: nics}")
    text = text.replace("[tcp, local]", "[tcp, nics]")
    status, said = run("run", written(tmp_path, text), out)
    assert status == 1, said
    wrong = [one for one in records(out).values() if one.levels["transport"] == "nics"]
    assert [one.outcome for one in wrong] == ["failed"] * 2
    for one in wrong:
        assert "FAILED: " in (one.error or "").splitlines()[0], one.error
        assert "KVIK_NICS" in (one.error or ""), one.error


@pytest.mark.timeout(600)
def test_a_target_that_dies_ends_its_run_and_is_started_again(tmp_path: Path) -> None:
    """Nobody waits for it; what was in flight is said, and measured under another start."""
    out = tmp_path / "out"
    controller = start("run", written(tmp_path, ALONE.replace("repetitions: 8", "repetitions: 8000")), out)

    def target() -> int | None:
        """The one that an initiator has come to."""
        log = out / "logs" / "s1" / "target.log"
        if not log.exists() or " came" not in log.read_text():
            return None
        own = [pid for pid, line in commands(out).items() if b"--listen" in line and b"keeper.py" not in line]
        return own[0] if own else None

    wait_for(lambda: target() is not None or controller.poll() is not None, "an initiator came")
    found = target()
    assert found is not None, finish(controller)
    os.kill(found, signal.SIGKILL)
    status, said = finish(controller)
    assert status == 0, said
    assert re.search(r"\[[01]/2\] .*failed: .*target ended", said), said
    assert "start s1.2" in said
    assert {one.outcome for one in records(out).values()} == {"completed"}
    assert processes(out) == []


def moved(transport: str, whole: int, wanted: str = "tcp") -> RunRecord:
    """A run whose initiator counted so many bytes by this transport."""
    name = f'kvik_transfer_bytes_total{{role="initiator",direction="in",transport="{transport}"}}'
    own = Role(name="load", kind="load", start="s1", before={name: 7.0}, after={name: 7.0 + whole})
    return RunRecord(
        id="r1", study="s", key=Key(configuration={}), levels={}, place=Place(order=0, start="s1"),
        times=Times(began=0, ended=1), roles=(own,),
        stated=Stated(mode="transfer", transport=wanted, moved_bytes=BATCH),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("record", "gate", "status", "said"),
    [
        (moved("tcp", BATCH), "V2", "passed", "moved 327,680 bytes"),
        (moved("tcp", BATCH - 1), "V2", "invalid", "moved 327,679 bytes, and the transfers have 327,680"),
        (moved("tcp", 0), "V2", "suspect", "counts no bytes"),
        (moved("tcp", BATCH), "V7", "passed", "327,680 bytes by tcp"),
        (moved("libfabric", BATCH, "nics"), "V7", "passed", "327,680 bytes by libfabric"),
        (moved("tcp", BATCH, "nics"), "V7", "invalid", "bytes by tcp, and nics is stated"),
        (moved("tcp", 0, "nics"), "V7", "suspect", "that pages went over nics is not shown"),
    ],
)
def test_what_the_gates_see(record: RunRecord, gate: str, status: str, said: str) -> None:
    judged = finding(judge(record), gate)
    assert judged.status == status
    assert said in judged.what


def test_what_the_arms_change_is_known_to_the_gates() -> None:
    """And the target has memory for the largest transfer of the whole study."""
    study = parse_study(STUDY.replace("pages: 20", "pages: 20000").replace("{buffer: 8MiB}", "{channels: 2}"))
    assert set(varied(study)) == {"transport"}
    assert set(varied(parse_study(EVERY))) == {"transport", "KVIK_NICS"}
    assert {start.most_bytes for start in resolve(study, plan_slots(study))} == {16384 * 20000}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("driver: transfers", "driver: transfers\n  transport: rdma", "kvik's engines have auto, tcp, local"),
        ("driver: transfers", "driver: transfers\n  roles: {store: {}}", "run.roles.store: the driver tran"),
        (
            "driver: transfers",
            "driver: transfers\n  roles: {target: {count: 2}}",
            "one initiator and one tar",
        ),
        ("driver: transfers", "driver: transfers\n  roles: {load: {node: x}}", "run.roles.load: no node 'x'"),
        ("driver: transfers", "driver: transfers\n  stated: {ttft_floor: 1}", "are of requests"),
        ("pages: 20", "pages: 0", "run.load: pages: Input should be greater than or equal to 1"),
        ("page_bytes: 16384", "page_bytes: 1001", "run.load: page_bytes: Input should be a multiple of 8"),
        ("class: bulk", "class: fast", "run.load: class: Input should be 'handover' or 'bulk'"),
        ("class: bulk", "requests: 4", "run.load: requests: Extra inputs are not permitted"),
        ("until: count, min: 2, max: 2", "until: changepoint, min: 8, max: 9", "write until: count"),
    ],
)
def test_mistakes(before: str, after: str, said: str) -> None:
    """Are said before anything is started."""
    assert before in STUDY
    wrong = parse_study(STUDY.replace(before, after))
    with pytest.raises(LabError, match=said):
        resolve(wrong, plan_slots(wrong))


def test_a_serving_system_has_no_target() -> None:
    wrong = parse_study(PLAIN.replace("driver: emulator", "driver: emulator\n  roles: {target: {}}"))
    with pytest.raises(LabError, match=r"run\.roles\.target: there is no such role in mode disaggregated"):
        resolve(wrong, plan_slots(wrong))


@pytest.mark.parametrize("said", ["", "{", "x\n{\n}\n", 'x\n{\n "format": "kvik-bench-transfer/0"\n}\n'])
def test_what_is_no_result_is_said(said: str) -> None:
    load = TransferLoad.model_validate({"page_bytes": 512, "pages": 1})
    with pytest.raises(LabError, match="the initiator's result cannot be read"):
        understood(said, "127.0.0.1:1", load, began=0, ended=1)
