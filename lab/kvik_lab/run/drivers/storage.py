"""Loads of a model's file: no servers; each run mounts what it reads, if anything, and lets go of it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from kvik.roles.node import Node
from kvik_lab.errors import LabError
from kvik_lab.run.drivers.serving import check_nodes
from kvik_lab.run.drivers.system import Setup, System
from kvik_lab.run.spec import RunSpec

TRANSPORTS = ("tcp", "rdma", "local")


class Storage:
    """The driver `storage`."""

    def check(self, spec: RunSpec) -> None:
        """What goes together of a mount, and no roles but the client's."""
        if spec.transport not in TRANSPORTS:
            raise LabError(f"run.transport: {spec.transport}; a file is loaded by {', '.join(TRANSPORTS)}")
        for name in spec.roles:
            if name != "load":
                raise LabError(f"run.roles.{name}: the driver storage starts no servers; take it away")
        if spec.link is not None:
            raise LabError("run.link: the driver storage makes no link; take it away")
        if spec.stated.model_fields_set:
            raise LabError(
                "run.stated: hits and first tokens are of requests, and a file is loaded; take it away"
            )
        storage = spec.storage
        if storage.type == "none" and (storage.source or storage.options):
            raise LabError("run.storage: nothing is mounted without a type; write type: nfs4, or another")
        if storage.type != "none" and not storage.source:
            raise LabError("run.storage.source: nothing to mount; write it as mount(8) takes it")
        if spec.role("load").count != 1:
            raise LabError("run.roles.load: one loader; write count: 1")
        check_nodes(spec)

    def system(self, setup: Setup) -> System:
        """Nothing that runs."""
        return System((), "", setup.spec.storage.source, 1)

    def code(self, _system: System, _nodes: Mapping[str, Node]) -> dict[str, str]:
        """The lab's own version: its loader is sent to the node."""
        return {"kvik-lab": version("kvik-lab")}
