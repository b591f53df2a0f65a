"""Studies on two nodes of Ray: their records, a node that vanishes, and what a controller leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvik.roles.hosts import CannotError
from kvik.roles.node import NodeError
from kvik_lab.run import machine
from kvik_lab.run.rays import ray_ways
from kvik_lab.run.remote import RemoteNode
from kvik_lab.run.spec import NodeSpec
from tests.lab.gates.scene import finding
from tests.lab.run.raylets import Raylets, raylets
from tests.lab.run.studies import (
    GONE,
    PLAIN,
    completed_on_two,
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

BOTH = """
  driver: emulator
  nodes:
    one: {executor: ray, host: "ADDRESS", options: [CPU=1, beyond=1], wait: 8}
    two: {executor: ray, host: "ADDRESS", wait: 8}
  roles: {prefill: {node: one}, decode: {node: two}, router: {node: two}}
"""
MARK = "LAB_TEST_FOLDER"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    """Ray; the tests are skipped, by name, where it cannot be had."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(raylets())
        except CannotError as cannot:
            pytest.skip(str(cannot))
        yield made


@pytest.fixture(autouse=True)
def _marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all that a controller starts on this host can be found."""
    monkeypatch.setenv(MARK, str(tmp_path))


def study(cluster: Raylets, requests: int = 4, starts: str = "starts: 1") -> str:
    """Prefill on the second node, everything else on the head's; the client is where the controller is."""
    text = PLAIN.replace("\n  driver: emulator\n", BOTH.replace("ADDRESS", cluster.address))
    return text.replace("starts: 1", starts).replace("requests: 4", f"requests: {requests}")


def left(out: Path) -> list[Any]:
    """The processes of a study that there still are, and what was started for them."""
    return [*processes(out), *machine.marked(f"{MARK}={out.parent}")]


def _niceness(out: Path) -> Iterator[int]:
    """Of the processes of a study; of one that ends meanwhile there is none."""
    for pid in processes(out):
        with contextlib.suppress(ProcessLookupError):
            yield os.getpriority(os.PRIO_PROCESS, pid)


@pytest.mark.timeout(600)
def test_a_study_over_ray_interrupted_and_resumed(cluster: Raylets, tmp_path: Path) -> None:
    """Ctrl-C leaves no process on any node; the records are those of a study on this host."""
    file, out = written(tmp_path, study(cluster)), tmp_path / "out"
    with cluster.right.inside(), started("run", file, out) as controller:
        wait_for(lambda: len(records(out)) >= 1 or controller.poll() is not None, "a run has ended")
        os.killpg(controller.pid, signal.SIGINT)
        status, said = finish(controller)
        assert (status, "every process has ended" in said) == (130, True), said
        assert left(out) == []
        status, said = run("resume", file, out)
        assert status == 0, said
        assert left(out) == []
        (tmp_path / "here").mkdir()
        status, said = run("run", written(tmp_path / "here", PLAIN), tmp_path / "local")
    assert status == 0, said
    found = records(out)
    completed_on_two(found.values(), said)
    for one in found.values():
        facts = {node.name: node.facts for node in one.nodes}
        assert set(facts) == set(one.key.facts) == {"local", "one", "two"}
        assert all(fact["kernel"] and fact["doctor"] for fact in facts.values())
        for gate in ("V1", "V2", "V3", "V4", "V6", "V7"):
            assert finding(one, gate).status == "passed", finding(one, gate)
        assert str(one.role("prefill")[0].url).startswith(f"http://{cluster.left.v4}:")
        assert str(one.role("decode")[0].url).startswith(f"http://{cluster.right.v4}:")
    assert [shape(one) for one in found.values()] == [
        shape(one) for one in records(tmp_path / "local").values()
    ]


@pytest.mark.timeout(600)
def test_a_node_that_vanishes_and_a_controller_that_is_killed(
    cluster: Raylets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run is marked, its start tried again, then given up; the study goes on when the node is back. A
    kill leaves no process."""
    file, out = written(tmp_path, study(cluster, 600, "starts: 2, blocks: 2")), tmp_path / "out"
    with cluster.right.inside(), started("run", file, out) as controller:
        wait_for(lambda: any((out / "logs" / "s1").glob("*.load.json")), "a run has begun")
        assert set(_niceness(out)) == {os.nice(0)}
        assert cluster.second is not None
        cluster.second.stop()
        wait_for(lambda: len(lines(out)) >= 2 or controller.poll() is not None, "the start is given up")
        first, second = lines(out)[:2]
        assert (first.outcome, first.place.start) == ("lost", "s1"), first.error
        assert (second.outcome, second.place.start) == ("lost", "s1.2"), second.error
        assert "Ray does not give them within 8 s" in str(second.error)
        monkeypatch.delenv(MARK)  # a node is not started for the study
        controller.send_signal(signal.SIGSTOP)  # what is left is tried again when the node is back
        try:
            cluster.start_second()
        finally:
            controller.send_signal(signal.SIGCONT)
        wait_for(lambda: any((out / "logs").glob("s2*/*.load.json")), "the study goes on")
        controller.send_signal(signal.SIGKILL)
        finish(controller)
        wait_for(lambda: not left(out), "nothing is left", GONE)


@pytest.mark.timeout(600)
def test_nodes_that_are_not_given(cluster: Raylets, tmp_path: Path) -> None:
    """Of two on one host only one can be had; and a cluster that there is not says so."""
    here = {"executor": "ray", "host": cluster.address, "wait": 2.0, "options": ["CPU=1", "beyond=1"]}
    spec = NodeSpec.model_validate(here)
    said = (
        r"(?s)nodes one, two: Ray does not give them within 2 s.*wanted, each on a host of its own: .*beyond"
    )
    with (
        cluster.right.inside(),
        pytest.raises(NodeError, match=said),
        ray_ways({"one": spec, "two": spec}, tmp_path),
    ):
        pass


@pytest.mark.timeout(600)
def test_commands_on_a_node(cluster: Raylets, tmp_path: Path) -> None:
    """Their output, their errors and their status come back, and what cannot be started says why."""
    spec = NodeSpec.model_validate({"executor": "ray", "host": cluster.address})
    with cluster.right.inside(), ray_ways({"one": spec}, tmp_path) as ways:
        node = RemoteNode(ways["one"].line, ways["one"].address, sys.executable, None)
        assert node.run(["sh", "-c", "cat; echo said; echo no >&2"]) == "said\n"
        assert len(node.run([sys.executable, "-c", "print('x' * 300_000)"])) == 300_001
        for command, said in (
            (["sh", "-c", "echo why >&2; exit 7"], "sh: status 7: why"),
            (["no-such"], "no-such: status 127: cannot be started: .*No such file"),
        ):
            with pytest.raises(NodeError, match=rf"node one \(.*\): {said}"):
                node.run(command)


def test_a_machine_without_ray_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As an error of the node, which ends its runs and not the controller."""
    (tmp_path / "ray.py").write_text("raise ImportError(\"No module named 'ray'\")\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    spec = NodeSpec.model_validate({"executor": "ray"})
    with (
        pytest.raises(
            NodeError, match=r"(?s)nodes one: .*No module named 'ray'; .*pip install 'kvik-lab\[ray\]'"
        ),
        ray_ways({"one": spec}, tmp_path),
    ):
        pass
