"""Studies on two hosts behind OpenSSH: their records, a host that vanishes, and what a controller leaves."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvik.roles.hosts import CannotError
from kvik.roles.node import NodeError
from kvik.roles.role import LineReady, Role
from kvik_lab.run import execute
from kvik_lab.run.build import Planned
from kvik_lab.run.clients import Client
from kvik_lab.run.remote import Line, RemoteNode, RemoteProcess
from kvik_lab.run.spec import NodeSpec, RunSpec
from kvik_lab.run.ssh import ssh_node
from tests.lab.gates.scene import finding
from tests.lab.run.sshd import Hosts, ssh_hosts
from tests.lab.run.studies import (
    GONE,
    PLAIN,
    completed_on_two,
    finish,
    lines,
    processes,
    records,
    start,
    wait_for,
    written,
)

FILES = """
study: files
unit: {model: tiny}
factors: {by: {levels: [read, mmap]}}
model: log(load_time) ~ by
design: {kind: full, starts: 1, seed: 3}
warmup: {until: count, min: 1, max: 1}
run:
  driver: storage
  transport: local
  roles: {load: {node: one}}
  load: {path: FILE, bytes: 1048581, loads: 8, by: "{by}"}
  nodes:
"""
MOVES = """
study: moves
unit: {model: tiny}
factors: {op: {levels: [read, write]}}
model: log(transfer_time) ~ op
design: {kind: full, starts: 1, seed: 3}
warmup: {until: count, min: 1, max: 1}
run:
  driver: transfers
  engines: {options: {buffer: 8MiB}}
  load: {op: "{op}", page_bytes: 16384, pages: 20, repetitions: 6}
  nodes:
"""
BARE = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S "$@"\n'
"""Python without anything beside its own library."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Both hosts; the tests are skipped, by name, where they cannot be made."""
    try:
        with ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
            yield made
    except CannotError as cannot:
        pytest.skip(str(cannot))


def study(hosts: Hosts, requests: int = 4) -> str:
    """Prefill on one host, everything else on the other; the client is where the controller is."""
    roles = "{prefill: {node: one}, decode: {node: two}, router: {node: two}}"
    where = f"  driver: emulator\n  nodes:\n{hosts.nodes()}  roles: {roles}\n"
    return PLAIN.replace("  driver: emulator\n", where).replace("requests: 4", f"requests: {requests}")


@pytest.mark.timeout(600)
def test_a_study_on_two_hosts_interrupted_and_resumed(hosts: Hosts, tmp_path: Path) -> None:
    """Ctrl-C leaves no process on any host; the records are those of a study on one host."""
    file, out = written(tmp_path, study(hosts)), tmp_path / "out"
    with hosts.right.inside():
        controller = start("run", file, out)
        wait_for(lambda: len(records(out)) >= 1 or controller.poll() is not None, "a run has ended")
        os.killpg(controller.pid, signal.SIGINT)
        status, said = finish(controller)
        assert (status, "every process has ended" in said) == (130, True), said
        assert processes(out) == []
        status, said = finish(start("resume", file, out))
    assert status == 0, said
    assert processes(out) == []
    found = records(out)
    completed_on_two(found.values(), said)
    for one in found.values():
        assert {node.name for node in one.nodes} == {"local", "one", "two"}
        assert all(node.facts["kernel"] and node.clock is not None for node in one.nodes)
        assert set(one.key.facts) == {"local", "one", "two"}
        for gate in ("V1", "V2", "V3", "V4", "V6", "V7"):
            assert finding(one, gate).status == "passed", finding(one, gate)
        assert "bytes by tcp" in finding(one, "V7").what
        assert (out / "logs" / one.place.start / "prefill.log").stat().st_size > 0
    secret = {role.settings.get("KVIK_SECRET") for one in found.values() for role in one.roles}
    assert secret == {None}, "a secret is in no record"


@pytest.mark.timeout(600)
def test_a_file_is_loaded_on_a_host_that_has_python_alone(hosts: Hosts, tmp_path: Path) -> None:
    """Nothing of it asks for kvik there."""
    python, file, out = tmp_path / "python", tmp_path / "model", tmp_path / "out"
    python.write_text(BARE, encoding="utf-8")
    python.chmod(0o755)
    assert subprocess.run([python, "-c", "import kvik"], check=False, capture_output=True).returncode != 0
    file.write_bytes(os.urandom(1048581))
    nodes = hosts.nodes().replace("executor: ssh,", f'executor: ssh, python: "{python}",')
    with hosts.right.inside():
        status, said = finish(start("run", written(tmp_path, FILES.replace("FILE", f"{file}") + nodes), out))
    assert status == 0, said
    found = records(out)
    assert len(found) == 2
    for one in found.values():
        assert (one.outcome, [node.name for node in one.nodes]) == ("completed", ["one"]), one.error
        assert len([figure for figure in one.figures if figure.metric == "load_time"]) == 8
    assert processes(out) == []


@pytest.mark.timeout(600)
def test_pages_are_moved_between_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """Both sides behind ssh; neither is without the secret, which is in no record."""
    roles = "  roles: {target: {node: one}, load: {node: two}}\n"
    text = MOVES.replace("  nodes:\n", f"{roles}  nodes:\n") + hosts.nodes()
    with hosts.right.inside():
        status, said = finish(start("run", written(tmp_path, text), tmp_path / "out"))
    assert status == 0, said
    found = records(tmp_path / "out")
    assert len(found) == 2
    for one in found.values():
        assert {role.kind: role.node for role in one.roles} == {"target": "one", "load": "two"}
        assert len([figure for figure in one.figures if figure.metric == "transfer_time"]) == 6
        for gate in ("V2", "V7"):
            assert finding(one, gate).status == "passed", finding(one, gate)
        assert all("KVIK_SECRET" not in role.settings for role in one.roles)
    assert processes(tmp_path / "out") == []


def test_a_role_whose_connection_is_gone_ends_quietly(tmp_path: Path) -> None:
    """Also where a byte was sent to it after that. What carries it ends when it was told what to start."""
    line = Line("one", "one", lambda _: ["sh", "-c", "read -r line"])
    node = RemoteNode(line, "127.0.0.1", sys.executable, None)
    process = node.launch(Role("prefill", ("true",), LineReady("")), tmp_path / "log")
    assert process.wait(120.0) is not None
    assert isinstance(process, RemoteProcess)
    process.beat()
    process.stop()
    assert not process.alive


def test_a_host_that_vanishes_as_the_load_is_started_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It does not end the study. More is to be written than a pipe holds, and what carries it ends unread."""
    node = RemoteNode(Line("one", "one", lambda _: ["true"]), "127.0.0.1", sys.executable, None)
    made = Client(["true"], lambda _: pytest.fail("there is no result"), {"LONG": "x" * (4 << 20)})
    monkeypatch.setattr(execute, "client", lambda *_: made)
    spec = RunSpec.model_validate({"driver": "emulator", "roles": {"load": {"node": "one"}}})
    run = SimpleNamespace(spec=spec, slot=SimpleNamespace(id="r1"))
    up = SimpleNamespace(nodes={"one": node}, logs=tmp_path, system=None, name="s1", mark="m")
    with pytest.raises(execute.RunError, match="the connection to one is gone") as caught:
        execute._load(cast(execute.Up, up), cast(Planned, run))
    assert caught.value.outcome == "lost"


def test_a_machine_without_ssh_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As an error of the node, which ends its runs and not the controller."""
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = NodeSpec.model_validate({"executor": "ssh", "host": "one"})
    with (
        pytest.raises(NodeError, match=r"(?s)node one .*ssh: cannot be started: .*No such file"),
        ssh_node("one", spec, tmp_path),
    ):
        pass


@pytest.mark.timeout(600)
def test_a_host_that_vanishes_and_a_controller_that_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    """The run in flight is marked, the study goes on when the host is back, and a kill leaves nothing."""
    file, out = written(tmp_path, study(hosts, requests=400)), tmp_path / "out"
    with hosts.right.inside():
        controller = start("run", file, out)
        logs = out / "logs" / "s1"
        wait_for(lambda: any(logs.glob("*.load.json")) or controller.poll() is not None, "a run has begun")
        hosts.cable("down")
        try:
            wait_for(lambda: bool(lines(out)), "the run is marked", GONE)
        finally:
            hosts.cable("up")
        (first,) = lines(out)
        assert first.outcome == "lost", first.error
        assert "prefill" in str(first.error)
        wait_for(lambda: len(lines(out)) >= 2 or controller.poll() is not None, "the study goes on")
        assert len(lines(out)) >= 2, finish(controller)
        assert lines(out)[1].outcome == "completed", lines(out)[1].error
        assert lines(out)[1].id == first.id
        assert lines(out)[1].place.start == "s1.2"
        if controller.poll() is None:
            os.kill(controller.pid, signal.SIGKILL)
        finish(controller)
    wait_for(lambda: not processes(out), "every process has ended", GONE)


@pytest.mark.timeout(600)
def test_a_host_that_does_not_answer_is_named(hosts: Hosts, tmp_path: Path) -> None:
    """All its runs are marked, and the command ends."""
    text = study(hosts).replace(f"root@{hosts.left.v4}", "root@127.0.0.9")
    file, out = written(tmp_path, text), tmp_path / "out"
    with hosts.right.inside():
        status, said = finish(start("run", file, out))
    assert status == 1, said
    assert "node one (root@127.0.0.9): cannot be reached" in said
    assert {one.outcome for one in records(out).values()} == {"lost"}
    assert json.loads((out / "runs.jsonl").read_text().splitlines()[0])["error"]
