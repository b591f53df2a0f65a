"""A serving system: its roles, where its client sends requests, and what a run of it can be held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvik.roles import Role
from kvik.roles.node import Node
from kvik.shapes import ModelShape
from kvik_lab.errors import LabError
from kvik_lab.run.nodes import LEFT, LOCAL, RIGHT
from kvik_lab.run.spec import Kind, RoleSpec, RunSpec

Setting = bool | int | float | str


@dataclass(frozen=True)
class Part:
    """One role, as a record names it. `settings` are its flags and variables as they were resolved."""

    role: Role
    kind: Kind
    url: str | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """Everything that runs. `entry` is the role that the client talks to, at `target`."""

    parts: tuple[Part, ...]
    entry: str
    target: str
    block_tokens: int


@dataclass(frozen=True)
class Setup:
    """What a system is made from: the resolved run, the nodes, and what all its runs together ask for."""

    spec: RunSpec
    nodes: Mapping[str, Node]
    shape: ModelShape
    model: str
    most_tokens: int
    """Of a prompt and its answer together, over the whole study."""
    most_requests: int
    """At once."""
    most_bytes: int
    """Of one transfer, likewise."""
    logs: Path
    env: Mapping[str, str]
    """Of every role: the study's mark, and the secret."""

    def role(self, kind: Kind) -> RoleSpec:
        """What the study says of a kind of role."""
        return self.spec.role(kind)

    def node(self, kind: Kind, number: int) -> str:
        """The name of the node of one role. With a link prefill is at its left end, or the target of
        transfers, and all else at its right."""
        role = self.role(kind)
        if role.nodes:
            name = role.nodes[number % len(role.nodes)]
        elif role.node is not None:
            name = role.node
        elif self.spec.link is not None:
            name = LEFT if kind in ("prefill", "target") else RIGHT
        else:
            name = LOCAL
        if name not in self.nodes:
            raise LabError(f"run.roles.{kind}: no node {name!r}; the nodes are {', '.join(self.nodes)}")
        return name


class Driver(Protocol):
    """Makes systems of one kind."""

    def check(self, spec: RunSpec) -> None:
        """Raises `LabError` for a run that this kind of system cannot be made for."""

    def system(self, setup: Setup) -> System:
        """The system for a resolved run that was checked. Raises `LabError` for a node that there is not."""

    def code(self, system: System, nodes: Mapping[str, Node]) -> dict[str, str]:
        """Versions of the programs that its roles run, by name."""


def flags(options: Mapping[str, Setting | Sequence[Setting]]) -> list[str]:
    """Options as a command takes them: {kv_memory: 1GiB, verbose: true} is --kv-memory 1GiB --verbose;
    false is --no-NAME; a list repeats the flag."""
    said: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is True:
            said.append(f"--{flag}")
        elif value is False:
            said.append(f"--no-{flag}")
        else:
            for one in value if isinstance(value, list) else [value]:
                said += [f"--{flag}", str(one)]
    return said


def settings(role: RoleSpec, more: Mapping[str, Setting]) -> dict[str, Setting]:
    """Of a record: the flags and variables that the study gives, and those that the driver adds."""
    own = {
        name: " ".join(map(str, one)) if isinstance(one, list) else one for name, one in role.options.items()
    }
    return {**more, **own, **role.env}


def environment(role: RoleSpec, setup: Setup, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a process: what the study gives goes before what the driver says."""
    return {**(more or {}), **setup.env, **{name: str(value) for name, value in role.env.items()}}
