"""One run under servers that are up: the load, and what was seen around it, as a record."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from kvik.roles import LineReady, Role, RoleGraph
from kvik.roles.node import LocalNode, Node, NodeError
from kvik.roles.processes import Process, ProcessError
from kvik_lab.errors import LabError
from kvik_lab.observe import added, engines_of, scrape
from kvik_lab.records import Key, LoadResult, Place, RunRecord, Times
from kvik_lab.records.schema import Counters, Outcome
from kvik_lab.records.schema import Role as RoleRecord
from kvik_lab.run.build import Planned, PlannedStart, contents, servers, stated
from kvik_lab.run.clients import Seen, client
from kvik_lab.run.drivers.system import Part, System
from kvik_lab.run.nodes import DOCTOR, Look, client_node, recorded
from kvik_lab.run.remote import RemoteNode
from kvik_lab.run.spec import RunSpec

OWN = "kvik_lab_own_cpu_seconds_total"
FACTS = ("machine", "kernel", "cpu", "cores_usable", "memory_bytes", "gpus")  # those that a result depends on

Sources = dict[str, Counters]  # by who told them: a server's page of metrics, engines by their ids, the load


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
    counters: list[dict[str, Sources]] = [{}, {}]
    result: LoadResult | None = None
    own: tuple[RoleRecord, ...] = ()
    after: dict[str, Look] = {}
    error, outcome = None, "completed"
    try:
        before, counters[0] = _look(up)
        seen = _load(up, run)
        result, own, zero = seen.result, seen.roles, seen.result.zero
        after, counters[1] = _look(up)
        for at in (0, 1):
            counters[at] |= {name: {"load": both[at]} for name, both in seen.counters.items()}
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
        roles=(*_roles(up, *counters), *own),
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
        "load": run.load.model_dump(mode="json", by_alias=True, exclude={"url", "seed"}),
        "model": up.planned.model,
        **({"files": files} if (files := contents([run.load])) else {}),
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


def _look(up: Up) -> tuple[dict[str, Look], dict[str, Sources]]:
    """Every node and every server that has counters."""
    looks = {name: Look.at(up.nodes[name], up.mark) for name in used_nodes(up.system, up.planned.spec)}
    far: dict[str, dict[str, Counters]] = {}
    for name in {part.role.node for part in up.system.parts}:  # that of the load alone may have no kvik
        node = up.nodes[name]
        if isinstance(node, RemoteNode):
            far |= node.engines(up.mark)
    counted = {part.role.name: _counted(up, part) for part in up.system.parts}
    for part in up.system.parts:
        if isinstance(up.nodes[part.role.node], RemoteNode):
            counted[part.role.name] |= together(far.get(part.role.name, {}))
    return looks, counted


def together(engines: Mapping[str, Counters]) -> Sources:
    """One source of all engines of a role: where one of them does not answer, or is another one, what they
    have counted together since they told it the last time is not known."""
    return {f"engines {', '.join(sorted(engines))}": added(engines.values())}


def _counted(up: Up, part: Part) -> Sources:
    """What a server counts, and the engines of its processes where they are on this machine. One that does
    not tell is left out: a gate that needs it says so."""
    node = up.nodes[part.role.node]
    found: Sources = {}
    with node.inside():
        if part.url is not None and part.url.startswith("http"):
            with contextlib.suppress(LabError):
                found["server"] = scrape(part.url)
        if isinstance(node, LocalNode):
            with contextlib.suppress(LabError, ProcessError):
                found |= together(engines_of(up.graph.processes[part.role.name].pid))
    return found


def told_twice(before: Sources, after: Sources) -> tuple[Counters, Counters]:
    """What was counted before a run and after it, by who told both times. What is told after the run only
    would else have grown by all that its server has done since its start."""
    first: Counters = {}
    second: Counters = {}
    for source in before.keys() & after.keys():
        first |= before[source]
        second |= after[source]
    return first, second


def _roles(up: Up, before: Mapping[str, Sources], after: Mapping[str, Sources]) -> list[RoleRecord]:
    found = []
    for part in up.system.parts:
        name = part.role.name
        counted = told_twice(before.get(name, {}), after.get(name, {}))
        found.append(
            RoleRecord(
                name=name, kind=part.kind, node=part.role.node, start=up.name, url=part.url,
                ready_seconds=up.ready.get(name), settings=dict(part.settings),
                before=counted[0], after=counted[1], log=f"{up.logs.name}/{name}.log",
            )
        )  # fmt: skip
    return found


def _load(up: Up, run: Planned) -> Seen:
    """The load's own process, from its start to its result. Raises `RunError`."""
    name, base = client_node(run.spec), up.logs / run.slot.id
    node = up.nodes[name]
    made = client(run, up.system, node, up.name, base)
    own = {key: str(value) for key, value in run.spec.role("load").env.items()}
    env = {**made.env, **own, "KVIKLAB_STUDY": up.mark}
    role = Role("load", tuple(made.command), LineReady(""), env, node=name, grace=2.0)
    try:
        process = node.launch(role, base.with_suffix(".load.log"))
    except ProcessError as gone:  # its connection ended while it was told what to start
        raise RunError(str(gone), "lost") from gone
    try:
        _wait(up, run, process, made.why)
        return made.read(process.said())
    finally:
        process.stop()


def _wait(up: Up, run: Planned, process: Process, why: Callable[[str], str | None]) -> None:
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
        said = process.said()
        last = why(said) or said.strip().rpartition("\n")[2] or "it said nothing"
        text = f"the load ended with status {status}: {last}\n{process.tail()}"
        try:
            for node in used_nodes(up.system, up.planned.spec):
                up.nodes[node].run(["true"])
        except NodeError as gone:  # sooner than its roles tell
            raise RunError(f"{gone}\n{text}", "lost") from gone
        raise RunError(text)


def _lost(up: Up, dead: Sequence[str]) -> Outcome:
    """Whether a role is gone with its host."""
    lost = any(getattr(up.graph.processes[name], "lost", False) for name in dead)
    return "lost" if lost else "failed"
