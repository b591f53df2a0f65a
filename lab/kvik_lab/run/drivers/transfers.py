"""Transfers between two of kvik's engines: a target that stays for the start, and an initiator for each
run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import get_args

from kvik import TransportName
from kvik.roles import LineReady, Role
from kvik.roles.node import Node
from kvik_lab.errors import LabError
from kvik_lab.run.drivers.emulator import VERSION
from kvik_lab.run.drivers.serving import check_nodes
from kvik_lab.run.drivers.system import Part, Setup, System, environment, flags, settings
from kvik_lab.run.spec import TRANSFER, Kind, RunSpec

TARGET: Kind = "target"
READY = "bench target on "
START_LIMIT = 60.0


class Transfers:
    """The driver `transfers`."""

    def check(self, spec: RunSpec) -> None:
        """A target and a load, and nothing of a serving system."""
        known = get_args(TransportName)
        if spec.transport not in known:
            raise LabError(f"run.transport: {spec.transport}; kvik's engines have {', '.join(known)}")
        for name in spec.roles:
            if name not in TRANSFER:
                raise LabError(
                    f"run.roles.{name}: the driver transfers has {' and '.join(TRANSFER)}; take it away"
                )
        for kind in TRANSFER:
            if spec.role(kind).count != 1:
                raise LabError(f"run.roles.{kind}: one initiator and one target; write count: 1")
        if spec.stated.model_fields_set:
            raise LabError("run.stated: hits and first tokens are of requests; take it away")
        check_nodes(spec)

    def system(self, setup: Setup) -> System:
        """The target: `kvik bench transfer --listen`, with memory for the largest transfer of the study."""
        role, name = setup.role(TARGET), setup.node(TARGET, 0)
        node = setup.nodes[name]
        (port,) = node.free_ports(1)
        address = f"{node.address}:{port}"
        command = [node.python, "-m", "kvik.cli", "bench", "transfer", "--listen", address]
        command += ["--page", f"{setup.most_bytes}B", "--pages", "1", *flags(role.options)]
        ready = LineReady(READY, setup.spec.ready_limit or START_LIMIT)
        made = Role(TARGET, tuple(command), ready, environment(role, setup), node=name, ports=(port,))
        part = Part(made, TARGET, address, settings(role, {"transport": setup.spec.transport}))
        return System((part,), TARGET, address, 1)

    def code(self, system: System, nodes: Mapping[str, Node]) -> dict[str, str]:
        """kvik's version at the target; the initiator's is what it says of itself."""
        node = nodes[system.parts[0].role.node]
        return {"kvik": str(json.loads(node.run([node.python, "-c", VERSION])))}
