"""Studies that run: real engines, real loads, real kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvik.stat import engines
from kvik_lab.observe import engines_of
from kvik_lab.run.execute import together, told_twice
from tests.lab.gates.scene import finding
from tests.lab.run.studies import (
    GONE,
    PLAIN,
    SMALL,
    commands,
    finish,
    processes,
    records,
    run,
    start,
    wait_for,
    written,
)
from tests.python.peers import random_seed

STATED = """
study: stated
unit: {model: tiny}
factors:
  least: {levels: [0.0001, 3600.0]}
model: log(ttft) ~ least
design: {kind: full, starts: 1, seed: 3}
warmup: {until: count, min: 2, max: 2}
run:
  driver: emulator
  engines: {options: {prefix_cache: true}}
  load: {requests: 28, prompt: {tokens: 96, output: 4, shared: {share: 0.667}}}
  stated: {prefix_hit_share: 0.667, ttft_floor: "{least}"}
"""
STORED = """
study: stored
unit: {model: tiny}
factors:
  mode: {levels: [apart, together], restart: true, sets: {together: {mode: unified}}}
model: log(ttft) ~ mode
design: {kind: full, starts: 1, seed: 3}
warmup: {until: count, min: 2, max: 2}
run:
  driver: emulator
  transport: tcp
  # What waits for the store takes at most half of the memory. To compute takes longer than any fetch, on a
  # busy machine, too; and of so many requests the first few may come before their prompt is in the store.
  engines: {options: {kv_memory: 16MiB, compute: "prefill_token=0.01"}}
  roles: {store: {}}
  load: {requests: 58, prompt: {tokens: 96, output: 4, unique: none}}
  stated: {store_hit_share: 0.833}
"""
KILLS = int(os.environ.get("KVIK_TEST_LAB_KILLS", "0"))  # of a longer study: `make soak`


@pytest.mark.timeout(600)
def test_a_study_from_its_plan_to_its_verdicts(tmp_path: Path) -> None:
    """Each planned run once, in two starts, with what was measured and what was counted."""
    study, out = written(tmp_path, PLAIN.replace("starts: 1", "starts: 2, blocks: 2")), tmp_path / "out"
    status, said = run("run", study, out)
    assert status == 0, said
    found = records(out)
    assert len(found) == 4
    assert len((out / "runs.jsonl").read_text().splitlines()) >= 4
    assert {one.outcome for one in found.values()} == {"completed"}
    assert {one.verdict for one in found.values()} <= {"valid", "suspect"}, said
    assert len({one.place.start for one in found.values()}) == 2
    assert {one.place.group for one in found.values()} == {"1", "2"}
    keys = [one.key.digest() for one in found.values()]
    assert sorted(keys.count(key) for key in set(keys)) == [2, 2]
    for one in found.values():
        assert len(one.measured()) == 4
        (prefill,) = one.role("prefill")
        (decode,) = one.role("decode")
        assert (
            prefill.delta('vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}')
            != 0
        )
        assert decode.before.keys() <= decode.after.keys()
        assert one.nodes[0].after["kvik_lab_own_cpu_seconds_total"] > 0
        seen = one.nodes[0].facts["doctor"]
        assert isinstance(seen, dict)
        assert "clock" in seen, seen
    assert processes(out) == []
    again, said = run("run", study, out)
    assert again == 2
    assert "has runs already" in said
    status, said = run("status", study, out)
    assert (status, "4 of 4 runs are completed; it is not running" in said) == (0, True), said
    assert run("resume", study, out)[0] == 0
    assert len(records(out)) == 4


@pytest.mark.timeout(600 + 120 * KILLS)
def test_interrupted_and_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    """Ctrl-C leaves nothing, and says how to go on. Whenever the controller is killed, no run is lost or
    counted twice, and no process is left."""
    seed = random_seed()
    rng = random.Random(seed)
    study, planned = (written(tmp_path), 8) if KILLS else (written(tmp_path, PLAIN), 2)
    out = tmp_path / "out"
    controller = start("run", study, out)
    _interrupt(controller, study, out)
    controller = start("resume", study, out)
    for _ in range(KILLS or 1):
        done = {name for name, one in records(out).items() if one.outcome == "completed"}
        wait_for(lambda: bool(processes(out)), "it has started something")
        time.sleep(rng.uniform(0.0, 4.0))  # the moment is drawn: there is no event to wait for
        controller.send_signal(signal.SIGKILL)
        finish(controller)
        wait_for(lambda: not processes(out), f"all processes have ended (seed {seed})", GONE)
        assert done <= set(records(out)), f"a run was lost (seed {seed})"
        controller = start("resume", study, out)
    status, said = finish(controller)
    assert status in (0, 1), f"{said} (seed {seed})"
    lines = [line for line in (out / "runs.jsonl").read_text().splitlines() if line]
    found = records(out)
    assert len(found) == planned, f"seed {seed}\n{said}"
    assert {one.outcome for one in found.values()} == {"completed"}, f"seed {seed}\n{said}"
    orders = [one.place.order for one in found.values()]
    assert sorted(orders) == list(range(planned)), f"seed {seed}"
    first = [line for line in lines if '"verdict"' in line]
    assert len({line.split('"id":"')[1].split('"')[0] for line in first}) == planned
    assert processes(out) == []


def _interrupt(controller: subprocess.Popen[str], study: Path, out: Path) -> None:
    """Ctrl-C when a run has ended."""
    wait_for(lambda: len(records(out)) >= 1, "a run has ended")
    os.killpg(controller.pid, signal.SIGINT)
    status, said = finish(controller)
    assert status == 130, said
    assert "every process has ended" in said
    assert processes(out) == []
    assert len(records(out)) == 1
    status, said = run("status", study, out)
    assert status == 4, said


@pytest.mark.timeout(600)
def test_servers_that_die_are_started_again(tmp_path: Path) -> None:
    """The run in flight is marked, and run again under another start; the study goes on."""
    study, out = written(tmp_path, PLAIN.replace("requests: 4", "requests: 40")), tmp_path / "out"
    controller = start("run", study, out)
    wait_for(lambda: len(records(out)) >= 1, "a run has ended")
    (victim,) = [
        pid for pid, command in commands(out).items()
        if b"--role\0decode" in command and _parent_is_keeper(pid)
    ]  # fmt: skip
    os.kill(victim, signal.SIGKILL)
    status, said = finish(controller)
    found = records(out)
    assert len(found) == 2, said
    assert status == 0, said
    assert {one.outcome for one in found.values()} == {"completed"}, said
    starts = {one.place.start for one in found.values()}
    assert len(starts) == 2, f"the start was made again: {starts}\n{said}"
    assert processes(out) == []


@pytest.mark.timeout(600)
def test_status_of_a_study_that_runs(tmp_path: Path) -> None:
    """It answers while the controller has the journal, and the study goes on as if nobody had asked."""
    study, out = written(tmp_path, PLAIN.replace("requests: 4", "requests: 40")), tmp_path / "out"
    controller = start("run", study, out)
    wait_for(lambda: len(records(out)) >= 1, "a run has ended")
    controller.send_signal(signal.SIGSTOP)  # in the midst of its second run, which waits for the answers
    try:
        journal = (out / "runs.jsonl").read_bytes()
        for _ in range(2):
            asked, answer = run("status", study, out)
            assert (asked, "1 of 2 runs are completed; it runs" in answer) == (4, True), answer
        assert (out / "runs.jsonl").read_bytes() == journal
    finally:
        controller.send_signal(signal.SIGCONT)
    status, said = finish(controller)
    assert status == 0, said
    assert len((out / "runs.jsonl").read_text().splitlines()) >= 2
    assert {one.outcome for one in records(out).values()} == {"completed"}, said
    asked, answer = run("status", study, out)
    assert (asked, "2 of 2 runs are completed; it is not running" in answer) == (0, True), answer


@pytest.mark.timeout(600)
def test_a_study_of_designed_hits_is_held_to_what_it_states(tmp_path: Path) -> None:
    """The share of hits is that which is stated; and no run is above a floor of an hour."""
    out = tmp_path / "out"
    status, said = run("run", written(tmp_path, STATED), out)
    assert status == 3, said
    found = {one.levels["least"]: one for one in records(out).values()}
    assert set(found) == {0.0001, 3600.0}
    for one in found.values():
        assert finding(one, "V1").status == "passed", finding(one, "V1")
        assert finding(one, "V6").status == "passed", finding(one, "V6")
    assert finding(found[0.0001], "V5").status == "passed", finding(found[0.0001], "V5")
    assert finding(found[3600.0], "V5").status == "invalid"
    assert "28 of 28 first tokens are below the floor" in said


@pytest.mark.timeout(600)
def test_a_study_of_a_store_s_hits_is_held_to_what_it_states(tmp_path: Path) -> None:
    """Of a pair, too, whose decode engine has its KV handed over and asks no store."""
    out = tmp_path / "out"
    status, said = run("run", written(tmp_path, STORED), out)
    assert status == 0, said
    for one in records(out).values():
        for gate in ("V1", "V6"):
            assert finding(one, gate).status == "passed", finding(one, gate)


def _parent_is_keeper(pid: int) -> bool:
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return b"keeper.py" in Path(f"/proc/{parent}/cmdline").read_bytes()


def test_what_cannot_be_run(tmp_path: Path) -> None:
    """Says why, with status 2, before anything is started."""
    text = SMALL.replace("  driver: emulator\n", "  driver: emulator\n  roles: {unified: {}}\n")
    status, said = run("run", written(tmp_path, text), tmp_path / "out")
    assert status == 2
    assert "there is no such role in mode disaggregated" in said
    status, said = run("run", tmp_path / "none.yaml", tmp_path / "out")
    assert (status, "cannot be read" in said) == (2, True)


def test_what_a_server_tells_only_after_a_run_is_not_what_it_did_in_it() -> None:
    """Its page could not be read before: by that, all that it had done since its start were of this run."""
    before = {"engines": {"read": 1.0}}
    after = {"server": {"loaded": 9.0}, "engines": {"read": 3.0, "written": 2.0}}
    assert told_twice(before, after) == ({"read": 1.0}, {"read": 3.0, "written": 2.0})


def test_an_engine_that_tells_only_after_a_run_leaves_the_growth_of_its_role_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has counted since its start is none of the run's, and without it the sum is too small."""
    asked: list[str] = []

    def snapshot(name: str) -> tuple[engines.About, str]:
        asked.append(name)
        if asked == ["a", "b"]:
            raise engines.StatError("it is stopped")
        about = engines.About(name, "", os.getpid(), "1", "tcp", (), 1.0)
        return about, f"moved_total {100.0 * len(asked)}\n"

    monkeypatch.setattr(engines, "names", lambda: ["a", "b"])
    monkeypatch.setattr(engines, "snapshot", snapshot)
    looks = [together(engines_of(os.getpid())) for _ in range(3)]
    assert told_twice(looks[0], looks[1]) == ({}, {})
    assert told_twice(looks[1], looks[2]) == ({"moved_total": 700.0}, {"moved_total": 1100.0})
