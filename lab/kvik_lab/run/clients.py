"""What makes the load of a run: a process on the load's node, and what its end comes to."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvik.roles.node import Node
from kvik_lab.errors import LabError
from kvik_lab.load.spec import LoadSpec
from kvik_lab.load.tools import TOOLS, installed, read_result
from kvik_lab.records import Counters, LoadResult, read_load
from kvik_lab.records import Role as RoleRecord
from kvik_lab.run.build import Planned
from kvik_lab.run.drivers.system import System, flags, settings
from kvik_lab.run.nodes import client_node
from kvik_lab.storage import measure as files
from kvik_lab.storage.spec import FileLoad
from kvik_lab.transfers import measure as transfers
from kvik_lab.transfers.spec import TransferLoad

ASK_LIMIT = 30.0  # seconds
SECRET = "KVIK_SECRET"  # noqa: S105 - the name of a variable


@dataclass(frozen=True)
class Seen:
    """What a load gives to a run's record: of roles that it looked at itself, too."""

    result: LoadResult
    roles: tuple[RoleRecord, ...] = ()
    counters: Mapping[str, tuple[Counters, Counters]] = field(default_factory=dict)
    """Of roles of the system, by their names: before and after."""


@dataclass(frozen=True)
class Client:
    """A process, and what is read when it has ended well. `why` finds in what it said why it has not. Role
    load's own variables go before `env`."""

    command: Sequence[str]
    read: Callable[[str], Seen]
    env: Mapping[str, str] = field(default_factory=dict)
    why: Callable[[str], str | None] = lambda _: None


def client(run: Planned, system: System, node: Node, start: str, base: Path) -> Client:
    """The client of a run; `base` is the path of its files, without an ending."""
    if isinstance(run.load, FileLoad):
        return _loads_a_file(run, run.load, node, start)
    if isinstance(run.load, TransferLoad):
        return _moves_pages(run, run.load, system, node, start)
    if run.load.tool in TOOLS:
        return _lets_send(run, run.load.model_copy(update={"url": system.target}), node, base)
    return _sends(run.load, system, base)


def check(runs: Sequence[Planned], nodes: Mapping[str, Node]) -> None:
    """Raises `LabError` for a tool that is not where it is to run, before servers are started for it."""
    for run in runs:
        if isinstance(run.load, LoadSpec) and run.load.tool in TOOLS:
            made = installed(run.load.tool, nodes[client_node(run.spec)].python)
            made.command(run.load, "model", Path())


def _sends(load: LoadSpec, system: System, base: Path) -> Client:
    """Requests, by the lab's own driver."""
    asked = {**load.model_dump(mode="json"), "url": system.target}
    spec, out = base.with_suffix(".load.json"), base.with_suffix(".result.json")
    spec.write_text(json.dumps(asked), encoding="utf-8")
    command = [sys.executable, "-m", "kvik.cli", "lab", "load", "--quiet"]
    return Client([*command, "--out", str(out), "--spec", str(spec)], lambda _: Seen(read_load(out)))


def _lets_send(run: Planned, load: LoadSpec, node: Node, base: Path) -> Client:
    """Requests, by another tool."""
    role, began, folder = run.spec.role("load"), time.time_ns(), base.with_suffix(f".{load.tool}").resolve()
    folder.mkdir(exist_ok=True)
    found = installed(load.tool, node.python)
    with node.inside():
        model = load.model or served(load.url)
    return Client(
        found.command(load, model, folder, flags(role.options)),
        lambda _: Seen(read_result(found, load, folder, began=began, ended=time.time_ns())),
        {"DO_NOT_TRACK": "1"},
    )


def served(url: str) -> str:
    """The first model that a server names. Raises `LabError`."""
    try:
        # Straight to the server, as the load goes, whatever proxies the environment names.
        straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with straight.open(f"{url}/v1/models", timeout=ASK_LIMIT) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise LabError(f"{url}/v1/models: {error}; a model can be named by run.load.model") from error


def _loads_a_file(run: Planned, load: FileLoad, node: Node, start: str) -> Client:
    storage, name, began = run.spec.storage.model_dump(), client_node(run.spec), time.time_ns()

    def read(said: str) -> Seen:
        found = files.understood(said, storage, load, node=name, start=start, began=began)
        return Seen(found.result, (found.role,))

    return Client(files.command(node.python, storage, load), read)


def _moves_pages(run: Planned, load: TransferLoad, system: System, node: Node, start: str) -> Client:
    role, began, (target,) = run.spec.role("load"), time.time_ns(), system.parts
    command = transfers.command(node.python, system.target, run.spec.transport, load, flags(role.options))
    secret = {SECRET: target.role.env[SECRET]} if SECRET in target.role.env else {}

    def read(said: str) -> Seen:
        found = transfers.understood(said, system.target, load, began=began, ended=time.time_ns())
        before, after = found.counters["load"]
        own = RoleRecord(
            name="load", kind="load", node=client_node(run.spec), start=start,
            settings=settings(role, {"transport": run.spec.transport}),
            reported={"kvik": found.result.client.version or "unknown"}, before=before, after=after,
        )  # fmt: skip
        return Seen(found.result, (own,), {target.role.name: found.counters["target"]})

    return Client(command, read, secret, transfers.why)
