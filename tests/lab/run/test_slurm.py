"""Studies on a node that Slurm gives: their records, a node that vanishes, and what a controller leaves."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvik.roles.hosts import CannotError
from kvik.roles.node import NodeError
from kvik.roles.processes import Process
from kvik_lab.run.slurm import slurm_ways
from kvik_lab.run.spec import NodeSpec
from tests.lab.gates.scene import finding
from tests.lab.run.cluster import Cluster, slurm
from tests.lab.run.studies import (
    GONE,
    LIMIT,
    PLAIN,
    finish,
    lines,
    processes,
    records,
    run,
    shape,
    started,
    wait_for,
    written,
)

BEYOND = """
  driver: emulator
  nodes: {one: {executor: slurm, options: [--time=10], wait: 40}}
  engines: {node: one}
  roles: {router: {node: one}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Slurm; the tests are skipped, by name, where it cannot be had."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(slurm(tmp_path_factory.mktemp("slurm")))
        except CannotError as cannot:
            pytest.skip(str(cannot))
        yield made


def study(requests: int = 4, starts: str = "starts: 1") -> str:
    """All servers on the node, and the client where the controller is."""
    text = PLAIN.replace("\n  driver: emulator\n", BEYOND).replace("starts: 1", starts)
    return text.replace("requests: 4", f"requests: {requests}")


def left(cluster: Cluster, out: Path) -> str:
    """What there still is of a study: its processes, its jobs, and Slurm's programs for them."""
    programs = [
        path.name for path in Path("/proc").glob("[0-9]*")
        if re.match(rb"salloc\0|srun\0", _read(path / "cmdline"))
        and os.fsencode(cluster.config) in _read(path / "environ")
    ]  # fmt: skip
    return " ".join([*map(str, processes(out)), *programs, cluster.ask("squeue", "--noheader")])


def _read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


@pytest.mark.timeout(600)
def test_a_study_over_slurm_interrupted_and_resumed(cluster: Cluster, tmp_path: Path) -> None:
    """Ctrl-C leaves no process, and no job; the records are those of a study on this host."""
    file, out = written(tmp_path, study()), tmp_path / "out"
    with cluster.right.inside(), started("run", file, out) as controller:
        wait_for(lambda: len(records(out)) >= 1 or controller.poll() is not None, "a run has ended")
        os.killpg(controller.pid, signal.SIGINT)
        status, said = finish(controller)
        assert (status, "every process has ended" in said) == (130, True), said
        wait_for(lambda: not left(cluster, out).strip(), "nothing is left", GONE)
        status, said = run("resume", file, out)
        assert status == 0, said
        (tmp_path / "here").mkdir()
        local = written(tmp_path / "here", PLAIN)
        status, said = run("run", local, tmp_path / "local")
    assert status == 0, said
    assert not left(cluster, out).strip()
    found = records(out)
    assert len(found) == 2
    for one in found.values():
        assert (one.outcome, len(one.measured())) == ("completed", 4), said
        assert {role.kind: role.node for role in one.roles} == {
            "prefill": "one", "decode": "one", "router": "one",
        }  # fmt: skip
        facts = {node.name: node.facts for node in one.nodes}
        assert set(facts) == set(one.key.facts) == {"local", "one"}
        assert all(fact["kernel"] and fact["doctor"] for fact in facts.values())
        for gate in ("V1", "V2", "V3", "V4", "V6", "V7"):
            assert finding(one, gate).status == "passed", finding(one, gate)
        assert str(one.role("prefill")[0].url).startswith(f"http://{cluster.left.v4}:")
    assert [shape(one) for one in found.values()] == [
        shape(one) for one in records(tmp_path / "local").values()
    ]


@pytest.mark.timeout(600)
def test_an_allocation_that_is_taken_away(cluster: Cluster, tmp_path: Path) -> None:
    """The run in flight is marked, its start tried again, then given up, and the study goes on."""
    file, out = written(tmp_path, study(300, "starts: 2, blocks: 2")), tmp_path / "out"
    with cluster.right.inside(), started("run", file, out) as controller:
        for name in ("s1", "s1.2"):
            logs = out / "logs" / name
            wait_for(lambda logs=logs: any(logs.glob("*.load.json")), "a run has begun")  # type: ignore[misc]
            cluster.ask("scancel", *cluster.ask("squeue", "--noheader", "--format=%i").split())
            count = {"s1": 1, "s1.2": 2}[name]
            wait_for(lambda count=count: len(lines(out)) >= count, "the run is marked", GONE)  # type: ignore[misc]
        status, said = finish(controller)
    assert status == 1, said
    assert [(one.outcome, one.place.start) for one in lines(out)[:4]] == [
        ("lost", "s1"), ("lost", "s1.2"), ("completed", "s2"), ("completed", "s2"),
    ], said  # fmt: skip
    assert len(lines(out)[0].id) == len(lines(out)[1].id)
    wait_for(lambda: not left(cluster, out).strip(), "nothing is left", GONE)


@pytest.mark.timeout(600)
def test_a_node_that_vanishes_and_a_controller_that_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    """Nobody is told of a cable that is cut, and the run is marked; a kill leaves no process, and no job."""
    file, out = written(tmp_path, study(3000)), tmp_path / "out"
    with cluster.right.inside(), started("run", file, out) as controller:
        wait_for(lambda: any((out / "logs" / "s1").glob("*.load.json")), "a run has begun")
        cluster.cable("down")
        try:
            wait_for(lambda: bool(lines(out)), "the run is marked", GONE)
        finally:
            cluster.cable("up")
        (first,) = lines(out)
        assert first.outcome == "lost", first.error
        assert re.search("node one|prefill", str(first.error))
        wait_for(lambda: any((out / "logs" / "s1.2").glob("*.load.json")), "the study goes on")
        controller.send_signal(signal.SIGKILL)
        finish(controller)
        wait_for(lambda: not left(cluster, out).strip(), "nothing is left", GONE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "wait", "said"),
    [
        (["--partition=other"], 20.0, r"(?s)node one: Slurm gives no allocation.*partition"),
        (["--begin=now+100"], 1.0, r"node one: .* within 1 s \(`wait`\); job \d+ is PENDING, BeginTime"),
    ],
)
def test_an_allocation_that_is_not_given(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    wait: float,
    said: str,
) -> None:
    """Slurm's own words say why; the job is not left in the queue."""

    class Queued(Process):
        """The time that its job has begins when it is in the queue."""

        def wait_until(self, ready: Callable[[], bool], deadline: float) -> None:
            given, queued = deadline - time.monotonic(), re.compile(r"job allocation \d")
            super().wait_until(lambda: bool(queued.search(self.said())), time.monotonic() + LIMIT)
            super().wait_until(ready, time.monotonic() + given)

    monkeypatch.setattr("kvik_lab.run.slurm.Process", Queued)
    spec = NodeSpec.model_validate({"executor": "slurm", "options": options, "wait": wait})
    with (
        cluster.right.inside(),
        pytest.raises(NodeError, match=said),
        slurm_ways({"one": spec}, tmp_path),
    ):
        pass
    assert not cluster.ask("squeue", "--noheader")


def test_a_machine_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As an error of the node, which ends its runs and not the controller."""
    env = subprocess.run(["which", "env"], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "env").symlink_to(env)
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = NodeSpec.model_validate({"executor": "slurm"})
    with (
        pytest.raises(NodeError, match=r"(?s)node one: .*salloc.*No such file"),
        slurm_ways({"one": spec}, tmp_path),
    ):
        pass
