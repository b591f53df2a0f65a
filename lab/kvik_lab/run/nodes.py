"""The nodes of a run: this host, two namespaces of it with a shaped link between, or hosts behind ssh,
or of a cluster."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from kvik.roles.hosts import CannotError, Rate, two_hosts
from kvik.roles.node import LocalNode, Node, NodeError
from kvik_lab.errors import LabError
from kvik_lab.records.schema import Clock
from kvik_lab.records.schema import Node as NodeRecord
from kvik_lab.run import machine
from kvik_lab.run.rays import ray_ways
from kvik_lab.run.remote import Held
from kvik_lab.run.slurm import slurm_ways
from kvik_lab.run.spec import NodeSpec, RunSpec
from kvik_lab.run.ssh import ssh_node

LOCAL, LEFT, RIGHT = "local", "left", "right"
DOCTOR = "doctor"
"""The fact of a node that is the doctor's summary of it."""

Maker = Callable[[Mapping[str, NodeSpec], Path], contextlib.AbstractContextManager[Mapping[str, Node]]]
"""Nodes of one executor, by their names; their logs go into the folder."""


@contextlib.contextmanager
def executors(logs: Path) -> Iterator[dict[str, Maker]]:
    """What makes nodes, by the name that the study file gives. What a cluster gave is held until the end of
    the block."""
    with contextlib.ExitStack() as stack:
        clusters = {name: Held(functools.partial(ways, logs=logs)) for name, ways in CLUSTERS.items()}
        for held in clusters.values():
            stack.callback(held.close)
        yield {"local": _local, "ssh": _ssh, **{name: held.nodes for name, held in clusters.items()}}


@contextlib.contextmanager
def _local(specs: Mapping[str, NodeSpec], _logs: Path) -> Iterator[dict[str, Node]]:
    yield {name: LocalNode(spec.python or sys.executable) for name, spec in specs.items()}


@contextlib.contextmanager
def _ssh(specs: Mapping[str, NodeSpec], logs: Path) -> Iterator[dict[str, Node]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(ssh_node(name, spec, logs)) for name, spec in specs.items()}


CLUSTERS = {"slurm": slurm_ways, "ray": ray_ways}
"""What gives hosts for as long as a study lasts."""


@contextlib.contextmanager
def open_nodes(spec: RunSpec, folder: Path, makers: Mapping[str, Maker]) -> Iterator[dict[str, Node]]:
    """The nodes by name. Raises `LabError` where a link cannot be shaped, `NodeError` for a host that
    does not answer."""
    with contextlib.ExitStack() as stack:
        nodes: dict[str, Node] = {LOCAL: LocalNode(sys.executable)}
        for executor, make in makers.items():
            chosen = {name: one for name, one in spec.nodes.items() if one.executor == executor}
            nodes |= stack.enter_context(make(chosen, folder)) if chosen else {}
        if spec.link is not None:
            try:
                rate = Rate.parse(spec.link.rate)
                left, right = stack.enter_context(two_hosts(spec.link.delay, folder / "cable.log"))
                for host in (left, right):
                    host.shape(rate)
            except (CannotError, ValueError) as error:
                raise LabError(f"run.link: {error}") from error
            nodes |= {LEFT: LocalNode(sys.executable, left), RIGHT: LocalNode(sys.executable, right)}
        yield nodes


def client_node(spec: RunSpec) -> str:
    """The name of the node that the load is made on."""
    role = spec.role("load")
    if (name := role.nodes[0] if role.nodes else role.node) is not None:
        return name
    return RIGHT if spec.link is not None else LOCAL


@dataclass
class Look:
    """What a node said of itself at one moment."""

    facts: dict[str, JsonValue]
    counters: dict[str, float]
    wall: int
    monotonic: int
    own: list[int]

    @classmethod
    def at(cls, node: Node, mark: str) -> Look:
        """Look now. Raises `NodeError`."""
        source = Path(machine.__file__).read_text(encoding="utf-8")
        said = node.run([node.python, "-S", "-c", source, mark])
        try:
            return cls(**json.loads(said))
        except (ValueError, TypeError) as error:
            raise NodeError(f"the node's facts cannot be read: {said[:200]!r}") from error


def examined(node: Node) -> dict[str, JsonValue]:
    """The doctor's summary of a node, or under `unread` why there is none: kvik may not be there."""
    try:
        said = json.loads(node.run([node.python, "-m", "kvik.doctor.summary"]))
    except (NodeError, ValueError) as error:
        return {"unread": str(error)}
    return said if isinstance(said, dict) else {"unread": f"it said {said!r}"[:200]}


def recorded(name: str, before: Look, after: Look) -> NodeRecord:
    """Both looks as a part of a record."""
    clock = Clock(
        wall_before=before.wall, wall_after=after.wall,
        monotonic_before=before.monotonic, monotonic_after=after.monotonic,
        largest_step=abs((after.wall - before.wall) - (after.monotonic - before.monotonic)) / 1e9,
    )  # fmt: skip
    return NodeRecord(name=name, facts=after.facts, before=before.counters, after=after.counters, clock=clock)
