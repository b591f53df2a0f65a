"""One run under servers that are up: the load, and what was seen around it, as a record."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from kvik.roles import LineReady, Role, RoleGraph
from kvik.roles.node import LocalNode, Node, NodeError
from kvik.roles.processes import Process, ProcessError
from kvik_lab.errors import LabError
from kvik_lab.observe import engine_counters, scrape
from kvik_lab.records import Key, LoadResult, Place, RunRecord, Times, read_load
from kvik_lab.records.schema import Counters, Outcome
from kvik_lab.records.schema import Role as RoleRecord
from kvik_lab.run.build import Planned, PlannedStart, servers, stated
from kvik_lab.run.drivers.system import Part, System
from kvik_lab.run.nodes import DOCTOR, LOCAL, RIGHT, Look, recorded
from kvik_lab.run.spec import RunSpec
from kvik_lab.run.ssh import SshNode
from kvik_lab.storage import measure
from kvik_lab.storage.spec import FileLoad

OWN = "kvik_lab_own_cpu_seconds_total"
FACTS = ("machine", "kernel", "cpu", "cores_usable", "memory_bytes", "gpus")  # those that a result depends on


@dataclass(frozen=True)
class Up:
    """A start of the servers that is up."""

    name: str
    planned: PlannedStart
    system: System
    graph: RoleGraph
    nodes: Mapping[str, Node]
    logs: Path
    mark: str
    code: Mapping[str, str]
    ready: Mapping[str, float]
    varied: Sequence[str]
    examined: Mapping[str, dict[str, JsonValue]] = field(default_factory=dict)
    """The doctor's summary of each node, when these servers were started."""


class RunError(Exception):
    """A run could not be completed; `outcome` says whether it failed, or its host was lost."""

    def __init__(self, text: str, outcome: Outcome = "failed") -> None:
        super().__init__(text)
        self.outcome: Outcome = outcome


def execute(up: Up, run: Planned, study: str) -> RunRecord:
    """Run it; what goes wrong is in the record. `KeyboardInterrupt` passes."""
    began, zero, cpu = time.time_ns(), 0, _own_cpu()
    before: dict[str, Look] = {}
    counters: list[dict[str, Counters]] = [{}, {}]
    result: LoadResult | None = None
    storage: tuple[RoleRecord, ...] = ()
    after: dict[str, Look] = {}
    error, outcome = None, "completed"
    try:
        before, counters[0] = _look(up)
        result, storage = _load(up, run)
        zero = result.zero
        after, counters[1] = _look(up)
        if dead := up.graph.dead():
            raise RunError(f"{', '.join(dead)} ended during the run\n{up.graph.tail(dead[0])}")
    except RunError as failed:
        error, outcome = str(failed), failed.outcome
    except NodeError as failed:
        error, outcome = str(failed), "lost"
    except LabError as failed:
        error, outcome = str(failed), "failed"
    looks = [name for name in before if name in after]
    for name in looks:
        if isinstance(up.nodes[name], LocalNode):
            after[name].counters[OWN] += _own_cpu() - cpu
        elif result is not None and name == client_node(run.spec):
            after[name].counters[OWN] += result.client.cpu_seconds or 0.0  # the loader, which has ended
        if name in up.examined:
            after[name].facts[DOCTOR] = up.examined[name]
    facts = {
        name: {key: value for key, value in before[name].facts.items() if key in FACTS} for name in before
    }
    return RunRecord(
        id=run.slot.id,
        study=study,
        key=Key(configuration=configuration(up, run), code=dict(up.code), facts=facts),  # type: ignore[arg-type]
        levels=dict(run.slot.levels),
        place=place(up.planned, up.name, run),
        times=Times(began=began, ended=time.time_ns(), zero=zero),
        outcome=outcome,  # type: ignore[arg-type]
        error=error,
        stated=stated(up.planned, run, up.system, up.varied),
        client=None if result is None else result.client,
        requests=() if result is None else result.requests,
        figures=() if result is None else result.figures,
        roles=(*_roles(up, *counters), *storage),
        nodes=tuple(recorded(name, before[name], after[name]) for name in looks),
    )


def _own_cpu() -> float:
    """CPU seconds of this process, and of its children that have ended: the load's is among them."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def configuration(up: Up, run: Planned) -> dict[str, object]:
    """Everything that was set: what makes two runs replicates. Ports, seeds and addresses are none of it."""
    return {
        "levels": dict(run.slot.levels),
        "run": servers(run.spec),
        "load": run.load.model_dump(mode="json", exclude={"url", "seed"}),
        "model": up.planned.model,
    }


def place(planned: PlannedStart, name: str, run: Planned) -> Place:
    """Where a run stands, under the start of this name."""
    start = planned.start
    return Place(
        order=run.slot.order, start=name, group=start.group, whole_plot=start.whole_plot,
        pattern=run.slot.pattern, anchor=run.slot.anchor,
    )  # fmt: skip


def used_nodes(system: System, spec: RunSpec) -> list[str]:
    """The nodes that servers or the load run on."""
    return sorted({part.role.node for part in system.parts} | {client_node(spec)})


def _look(up: Up) -> tuple[dict[str, Look], dict[str, Counters]]:
    """Every node and every server that has counters."""
    looks = {name: Look.at(up.nodes[name], up.mark) for name in used_nodes(up.system, up.planned.spec)}
    far: dict[str, Counters] = {}
    for name in {part.role.node for part in up.system.parts}:  # that of the load alone may have no kvik
        node = up.nodes[name]
        if isinstance(node, SshNode):
            far |= node.engine_counters(up.mark)
    counted = {part.role.name: _counted(up, part) for part in up.system.parts}
    return looks, {name: found | far.get(name, {}) for name, found in counted.items()}


def _counted(up: Up, part: Part) -> Counters:
    """What a server counts, and the engines of its processes where they are on this machine. Nothing
    where it does not tell: a gate that needs it says so."""
    node = up.nodes[part.role.node]
    found: Counters = {}
    with node.inside():
        if part.url is not None and part.url.startswith("http"):
            with contextlib.suppress(LabError):
                found |= scrape(part.url)
        if isinstance(node, LocalNode):
            with contextlib.suppress(LabError, ProcessError):
                found |= engine_counters(up.graph.processes[part.role.name].pid)
    return found


def _roles(up: Up, before: Mapping[str, Counters], after: Mapping[str, Counters]) -> list[RoleRecord]:
    found = []
    for part in up.system.parts:
        name = part.role.name
        found.append(
            RoleRecord(
                name=name, kind=part.kind, node=part.role.node, start=up.name, url=part.url,
                ready_seconds=up.ready.get(name), settings=dict(part.settings),
                before=before.get(name, {}), after=after.get(name, {}), log=f"{up.logs.name}/{name}.log",
            )
        )  # fmt: skip
    return found


def client_node(spec: RunSpec) -> str:
    """The name of the node that the load is made on."""
    role = spec.roles.get("load")
    if role is not None and role.node is not None:
        return role.node
    return RIGHT if spec.link is not None else LOCAL


def _load(up: Up, run: Planned) -> tuple[LoadResult, tuple[RoleRecord, ...]]:
    """The load's own process, from its start to its result; with what is loaded from, where that is a file.
    Raises `RunError`."""
    name = client_node(run.spec)
    node = up.nodes[name]
    base = up.logs / run.slot.id
    began, storage = time.time_ns(), run.spec.storage.model_dump()
    if isinstance(run.load, FileLoad):
        command = measure.command(node.python, storage, run.load)
    else:
        asked = {**run.load.model_dump(mode="json"), "url": up.system.target}
        base.with_suffix(".load.json").write_text(json.dumps(asked), encoding="utf-8")
        command = [sys.executable, "-m", "kvik.cli", "lab", "load", "--quiet"]
        command += ["--out", str(base.with_suffix(".result.json"))]
        command += ["--spec", str(base.with_suffix(".load.json"))]
    env = {"KVIKLAB_STUDY": up.mark}
    role = Role("load", tuple(command), LineReady(""), env, node=name, grace=2.0)
    process = node.launch(role, base.with_suffix(".load.log"))
    try:
        _wait(up, run, process)
        if not isinstance(run.load, FileLoad):
            return read_load(base.with_suffix(".result.json")), ()
        found = measure.understood(process.said(), storage, run.load, node=name, start=up.name, began=began)
        return found.result, (found.role,)
    finally:
        process.stop()


def _wait(up: Up, run: Planned, process: Process) -> None:
    """Until the load has ended: well, or not, or too late, or a server died first."""
    until = time.monotonic() + run.spec.limit
    while (status := process.wait(0.2)) is None:
        if dead := up.graph.dead():
            raise RunError(
                f"{', '.join(dead)} ended during the run\n{up.graph.tail(dead[0])}", _lost(up, dead)
            )
        if time.monotonic() > until:
            raise RunError(f"the load did not end within {run.spec.limit:g} s (run.limit)\n{process.tail()}")
    if status != 0:
        last = process.said().strip().rpartition("\n")[2] or "it said nothing"
        raise RunError(f"the load ended with status {status}: {last}\n{process.tail()}")


def _lost(up: Up, dead: Sequence[str]) -> Outcome:
    """Whether a role is gone with its host."""
    lost = any(getattr(up.graph.processes[name], "lost", False) for name in dead)
    return "lost" if lost else "failed"
