"""What every serving system has: engines, kvik's router before a pair, and a store where one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvik.roles import HttpReady, LineReady, Role
from kvik_lab.errors import LabError
from kvik_lab.run.drivers.system import Part, Setting, Setup, System, environment, flags, settings
from kvik_lab.run.nodes import LEFT, LOCAL, RIGHT, client_node
from kvik_lab.run.spec import ENGINES, Kind, RunSpec

STORE_READY = "kvik store serves on "
ONE: tuple[tuple[Kind, int], ...] = (("router", 1), ("store", 0), ("load", 1))
"""Of what there is one at most, and at least."""

Engine = Callable[[Setup, Kind, int, int, str | None], Part]
"""A driver's own: the kind, the number among its kind, the port, and the store's address."""


def serving(setup: Setup, engine: Engine, block_tokens: int) -> System:
    """Engines as the study says, a router before prefill and decode engines, and a store.

    Raises `LabError` for roles that go with no such system.
    """
    kinds = check(setup.spec)
    parts = [] if not _count(setup, "store") else [_store(setup)]
    store = parts[0].url if parts else None
    for kind in kinds:
        parts += [
            engine(setup, kind, number, _port(setup, kind, number), store)
            for number in range(_count(setup, kind))
        ]
    engines = [part for part in parts if part.kind in kinds]
    if setup.spec.mode == "unified":
        return System(tuple(parts), engines[0].role.name, str(engines[0].url), block_tokens)
    router = _router(setup, engines)
    return System((*parts, router), router.role.name, str(router.url), block_tokens)


def check(spec: RunSpec) -> tuple[Kind, ...]:
    """The kinds of engines of a resolved run. Raises `LabError` for roles that go with no such system."""
    kinds: tuple[Kind, ...] = ("prefill", "decode") if spec.mode == "disaggregated" else ("unified",)
    for name in spec.roles:
        if name in (*ENGINES, "target") and name not in kinds:
            raise LabError(f"run.roles.{name}: there is no such role in mode {spec.mode}; take it away")
    for kind in kinds:
        role = spec.roles.get(kind)
        if role is not None and not role.count:
            raise LabError(f"run.roles.{kind}: count is 0, and {spec.mode} serving needs one")
        if role is not None and kind == "unified" and role.count > 1:
            raise LabError(
                "run.roles.unified: kvik's router goes before prefill and decode engines; write count: 1"
            )
    for name, least in ONE:
        role = spec.roles.get(name)
        if role is not None and not least <= role.count <= 1:
            raise LabError(f"run.roles.{name}: count is {role.count}, and one is started; write count: 1")
    if spec.link is not None and spec.mode == "unified":
        raise LabError("run.link: one engine needs no link; let the factor that has several engines set it")
    check_nodes(spec)
    client = spec.nodes.get(client_node(spec))
    if client is not None and client.executor != "local":
        raise LabError("run.roles.load: the client runs where its result can be read; give it a local node")
    return kinds


def check_nodes(spec: RunSpec) -> None:
    """Raises `LabError` for a client on a node that there is not."""
    known = (*spec.nodes, LOCAL, *(() if spec.link is None else (LEFT, RIGHT)))
    if (name := client_node(spec)) not in known:
        raise LabError(f"run.roles.load: no node {name!r}; the nodes are {', '.join(known)}")


def _count(setup: Setup, kind: Kind) -> int:
    if kind == "store":
        return setup.role(kind).count if kind in setup.spec.roles else 0
    return setup.role(kind).count


def _port(setup: Setup, kind: Kind, number: int) -> int:
    return setup.nodes[setup.node(kind, number)].free_ports(1)[0]


def named(kind: Kind, number: int, count: int) -> str:
    """`decode` where there is one of the kind, else `decode-0`, `decode-1`."""
    return kind if count == 1 else f"{kind}-{number}"


def http_part(
    setup: Setup, kind: Kind, number: int, port: int, command: list[str], more: dict[str, Setting],
    env: dict[str, str], limit: float, after: tuple[str, ...] = (),
) -> Part:  # fmt: skip
    """A role that serves HTTP at `port` of its node, and is ready when /health answers 200."""
    role, node_name = setup.role(kind), setup.node(kind, number)
    node = setup.nodes[node_name]
    made = Role(
        named(kind, number, role.count),
        (*command, *flags(role.options)),
        HttpReady(node.address, port, limit=setup.spec.ready_limit or limit),
        environment(role, setup, env),
        node=node_name, ports=(port,), after=after,
    )  # fmt: skip
    return Part(made, kind, f"http://{node.address}:{port}", settings(role, more))


def _store(setup: Setup) -> Part:
    node_name = setup.node("store", 0)
    node, role = setup.nodes[node_name], setup.role("store")
    (port,) = node.free_ports(1)
    address = f"{node.address}:{port}"
    command = [node.python, "-m", "kvik.cli", "store", "serve", "--listen", address, *flags(role.options)]
    made = Role(
        "store",
        tuple(command),
        LineReady(STORE_READY, setup.spec.ready_limit or 60.0),
        environment(role, setup),
        node=node_name,
        ports=(port,),
    )
    return Part(made, "store", address, settings(role, {}))


def _router(setup: Setup, engines: Sequence[Part]) -> Part:
    node_name = setup.node("router", 0)
    node = setup.nodes[node_name]
    (port,) = node.free_ports(1)
    command = [node.python, "-m", "kvik.cli", "router", "serve", "--host", node.address, "--port", str(port)]
    for part in engines:
        command += ["--prefill" if part.kind == "prefill" else "--decode", str(part.url)]
    after = tuple(part.role.name for part in engines)
    return http_part(setup, "router", 0, port, command, {}, {}, 60.0, after)
