"""vLLM: one engine that does both, or prefill and decode engines with a connector between them: kvik's, or
vLLM's own over NIXL."""

from __future__ import annotations

import json

from kvik.demo.engines import Connector
from kvik.demo.engines import Role as ConnectorRole
from kvik.roles.node import Node
from kvik_lab.errors import LabError
from kvik_lab.run.drivers.serving import check, http_part, serving
from kvik_lab.run.drivers.system import Part, Setting, Setup, System
from kvik_lab.run.spec import Kind, RunSpec

START_LIMIT = 600.0
ROLES: dict[Kind, ConnectorRole] = {"prefill": "kv_producer", "decode": "kv_consumer"}
NIXL_TRANSPORTS = ("ucx",)
"""What the driver has vLLM's connector use: UCX is NIXL's own default."""
VERSIONS = """
import importlib.metadata as m, json
names = {one.metadata["Name"].lower(): one.version for one in m.distributions()}
print(json.dumps({n: names[n] for n in ("kvik", "vllm", "nixl") if n in names}))
"""
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
        if "store" in spec.roles:
            raise LabError("run.roles.store: the driver vllm starts no store for its engines; take it away")
        if (
            spec.mode == "disaggregated"
            and spec.connector == "nixl"
            and spec.transport not in NIXL_TRANSPORTS
        ):
            raise LabError(
                f"run.transport: {spec.transport} is none of NIXL's; write transport: "
                f"{' or '.join(NIXL_TRANSPORTS)}"
            )

    def system(self, setup: Setup) -> System:
        """vLLM's servers, with kvik's router before a pair."""
        return serving(setup, _engine, _block_tokens(setup.spec))

    def code(self, node: Node) -> dict[str, str]:
        """Versions of kvik, vLLM and NIXL, as far as they are there."""
        return {
            str(name): str(one) for name, one in json.loads(node.run([node.python, "-c", VERSIONS])).items()
        }


def _block_tokens(spec: RunSpec) -> int:
    kind: Kind = "decode" if spec.mode == "disaggregated" else "unified"
    return int(str(spec.role(kind).options["block_size"]))


def _engine(setup: Setup, kind: Kind, number: int, port: int, _store: str | None) -> Part:
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
    if kind in ROLES and "kv_transfer_config" not in role.options:
        command += ["--kv-transfer-config", connector(setup.spec, ROLES[kind], node.address)]
        more |= {"kv_connector": setup.spec.connector, "transport": setup.spec.transport}
        if setup.spec.connector == "nixl":
            (meeting,) = node.free_ports(1)  # where both sides of NIXL meet before the first transfer
            env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": node.address, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(meeting)}
    return http_part(setup, kind, number, port, command, more, env, START_LIMIT)


def connector(spec: RunSpec, role: ConnectorRole, address: str) -> str:
    """The JSON of `--kv-transfer-config` for an engine at this address."""
    if spec.connector == "kvik":
        return Connector(role, extra={"listen": f"{address}:0", "transport": spec.transport}).config()
    extra = {"backends": ["UCX"]}
    return json.dumps({
        "kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    })  # fmt: skip
