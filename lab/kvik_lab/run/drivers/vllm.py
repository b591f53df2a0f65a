"""vLLM: one engine that does both, or prefill and decode engines with a connector between them: kvik's, or
vLLM's own over NIXL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvik.demo.engines import Connector
from kvik.demo.engines import Role as ConnectorRole
from kvik.roles.node import Node
from kvik_lab.errors import LabError
from kvik_lab.run.drivers import nixl, versions
from kvik_lab.run.drivers.serving import check, http_part, serving
from kvik_lab.run.drivers.system import Part, Setting, Setup, System
from kvik_lab.run.spec import ENGINES, Kind, RunSpec

START_LIMIT = 600.0
PROGRAMS = ("kvik", "vllm")
FOUND_BY = ("PYTHONPATH", "LD_LIBRARY_PATH")  # variables that say where a role's programs are
NEEDED = (("model", "/path/of/the/checkpoint"), ("block_size", 16))


class Vllm:
    """The driver `vllm`."""

    def check(self, spec: RunSpec) -> None:
        """Roles that go together, each engine with its model and the size of its KV blocks."""
        kinds = check(spec)
        for kind in kinds:
            options = spec.role(kind).options
            for name, such in NEEDED:
                if name not in options:
                    raise LabError(
                        f"run.engines.options: {kind} has no {name}; write {name}: {such} there, or in "
                        f"run.roles.{kind}.options"
                    )
            if type(options["block_size"]) is not int:
                raise LabError(f"{kind}: block_size is {options['block_size']!r}, and no whole number")
        store = spec.roles.get("store")
        if store is not None and store.count and spec.connector != "kvik":
            raise LabError(
                f"run.roles.store: kvik's connector asks it, and run.connector is {spec.connector}; write "
                "connector: kvik, or take the store away"
            )
        if (
            spec.mode == "disaggregated"
            and spec.connector == "nixl"
            and spec.transport not in nixl.TRANSPORTS
        ):
            raise LabError(
                f"run.transport: {spec.transport} is none of NIXL's; write transport: "
                f"{' or '.join(nixl.TRANSPORTS)}"
            )

    def system(self, setup: Setup) -> System:
        """vLLM's servers, with kvik's router before a pair."""
        return serving(setup, _engine, _block_tokens(setup.spec))

    def code(self, system: System, nodes: Mapping[str, Node]) -> dict[str, str]:
        """Versions of kvik and vLLM, and of NIXL and its UCX where engines use it, as far as they are there.
        Where engines have unlike ones, each is named with its roles."""
        engines = [part for part in system.parts if part.kind in ENGINES]
        uses = any(nixl.BACKENDS in part.settings for part in engines)
        programs = (*PROGRAMS, *(nixl.PROGRAMS if uses else ()))
        said: dict[tuple[str, ...], dict[str, str]] = {}
        seen: dict[str, dict[str, list[str]]] = {}
        for part in engines:
            # Packages may lie beside the node's Python, where the role's own environment leads.
            own = [f"{name}={part.role.env[name]}" for name in FOUND_BY if name in part.role.env]
            where = (part.role.node, *own)
            if where not in said:
                said[where] = _versions(nodes[part.role.node], own, programs)
            for name, version in said[where].items():
                seen.setdefault(name, {}).setdefault(version, []).append(part.role.name)
        return {name: versions.said(by_version) for name, by_version in seen.items()}


def _versions(node: Node, env: list[str], programs: tuple[str, ...]) -> dict[str, str]:
    source = Path(versions.__file__).read_text(encoding="utf-8")
    found = json.loads(node.run(["env", *env, node.python, "-c", source, *programs]))
    return {str(name): str(version) for name, version in found.items()}


def _block_tokens(spec: RunSpec) -> int:
    kind: Kind = "decode" if spec.mode == "disaggregated" else "unified"
    return int(str(spec.role(kind).options["block_size"]))


def _engine(setup: Setup, kind: Kind, number: int, port: int, store: str | None) -> Part:
    role = setup.role(kind)
    node = setup.nodes[setup.node(kind, number)]
    command = [node.python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", node.address, "--port", str(port)]
    more: dict[str, Setting] = {"enable_prefix_caching": False, "served_model_name": "model"}
    more = {name: value for name, value in more.items() if name not in role.options}
    command += ["--no-enable-prefix-caching"] if "enable_prefix_caching" in more else []
    command += ["--served-model-name", "model"] if "served_model_name" in more else []
    env = {
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": node.address,
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    asked = nixl.asked(setup.spec, kind)
    more |= {} if asked is None else {nixl.BACKENDS: asked}
    if (kind in nixl.ROLES or store) and nixl.CONFIG not in role.options:
        config = connector(setup.spec, nixl.ROLES.get(kind, "kv_both"), node.address, store)
        command += ["--kv-transfer-config", config]
        more |= {"kv_connector": setup.spec.connector, "transport": setup.spec.transport}
        if setup.spec.connector == "nixl":
            (meeting,) = node.free_ports(1)  # where both sides of NIXL meet before the first transfer
            env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": node.address, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(meeting)}
    return http_part(setup, kind, number, port, command, more, env, START_LIMIT)


def connector(spec: RunSpec, role: ConnectorRole, address: str, store: str | None = None) -> str:
    """The JSON of `--kv-transfer-config` for an engine at this address, which may have a store at another."""
    if spec.connector == "kvik":
        extra: dict[str, object] = {"listen": f"{address}:0", "transport": spec.transport}
        extra |= {} if store is None else {"store": {"address": store}}
        return Connector(role, extra=extra).config()
    return nixl.connector(role)
