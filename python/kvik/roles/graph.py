"""Roles that wait for one another: started in their order, ended in reverse."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kvik.roles.node import Node, NodeError
from kvik.roles.processes import Process, ProcessError
from kvik.roles.role import Role


class RoleError(Exception):
    """Roles cannot be started as they are described, or one of them did not come up; the text names it,
    with the end of its log, and who has a port that it needs."""


class RoleGraph:
    """Processes of roles. Within a `with` block they run; at its end, and where one does not come up, all
    of them are ended, those first that others did not wait for."""

    def __init__(self, roles: Sequence[Role], nodes: Mapping[str, Node], logs: Path) -> None:
        """`nodes` by the names that roles have; `logs` is the folder for `NAME.log`. `RoleError` for
        roles that wait for each other in a circle, for one that there is not, or run on no node."""
        self.waves = waves(roles)
        self.roles = {role.name: role for role in roles}
        self.nodes = dict(nodes)
        self.logs = logs
        self.processes: dict[str, Process] = {}
        self.ready_seconds: dict[str, float] = {}
        for role in roles:
            if role.node not in self.nodes:
                raise RoleError(f"{role.name} runs on {role.node!r}, and the nodes are {', '.join(nodes)}")

    def start(self) -> None:
        """Start all of them, each wave when the one before is ready. `RoleError`, with all ended again."""
        try:
            self._look_at_ports()
            for wave in self.waves:
                began = time.monotonic()
                for name in wave:
                    role = self.roles[name]
                    log = self.logs / f"{name}.log"
                    self.processes[name] = self.nodes[role.node].launch(role, log)
                for name in wave:
                    self._wait(name, began)
        except (ProcessError, NodeError, OSError) as error:
            self.stop()
            raise RoleError(str(error)) from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all that run, in reverse, each wave side by side; bounded by the roles' grace."""
        for wave in reversed(self.waves):
            running = [self.processes[name] for name in wave if name in self.processes]
            for process in running:
                process.ask_to_stop()
            for process in running:
                process.stop()
        self.processes = {}

    def dead(self) -> tuple[str, ...]:
        """The names of those that have ended by themselves."""
        return tuple(name for name, process in self.processes.items() if not process.alive)

    def tail(self, name: str) -> str:
        """The end of a role's log."""
        return self.processes[name].tail()

    def _look_at_ports(self) -> None:
        """A server that another one's port was promised to would answer for it, or fail in its own words."""
        for node_name, node in self.nodes.items():
            wanted: dict[int, str] = {}
            for role in (role for role in self.roles.values() if role.node == node_name):
                for port in role.ports:
                    if (other := wanted.setdefault(port, role.name)) != role.name:
                        raise RoleError(f"{other} and {role.name} have one port: {port}; give one another")
            taken = node.holders(wanted) if wanted else []
            if taken:
                said = "; ".join(f"{wanted[one.port]} cannot start: {one}" for one in taken)
                raise RoleError(f"{said}; end it, or give the role another port")

    def _wait(self, name: str, began: float) -> None:
        role, process = self.roles[name], self.processes[name]
        with self.nodes[role.node].inside():
            process.wait_until(lambda: role.ready.holds(process), began + role.ready.limit)
        self.ready_seconds[name] = time.monotonic() - began

    def __enter__(self) -> RoleGraph:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def waves(roles: Sequence[Role]) -> list[list[str]]:
    """The names in the order in which they can be started: each wave waits for those before. `RoleError`
    for a circle, for a name that is there twice, and for one that is waited for and is not there."""
    waiting = {role.name: set(role.after) for role in roles}
    if len(waiting) < len(roles):
        raise RoleError(f"two roles have one name: {', '.join(role.name for role in roles)}")
    for name, after in waiting.items():
        if missing := after - waiting.keys():
            raise RoleError(f"{name} waits for {', '.join(sorted(missing))}, which is no role")
    found: list[list[str]] = []
    while waiting:
        wave = [name for name, after in waiting.items() if not after & waiting.keys()]
        if not wave:
            raise RoleError(f"these roles wait for each other: {', '.join(waiting)}")
        found.append(wave)
        for name in wave:
            del waiting[name]
    return found
