"""vLLM: one engine that does both, or prefill and decode engines with kvik's connector between them."""

from __future__ import annotations

import json

from kvik.demo.engines import Connector
from kvik.roles.node import Node
from kvik_lab.errors import LabError
from kvik_lab.run.drivers.serving import http_part, named, serving
from kvik_lab.run.drivers.system import Part, Setting, Setup, System
from kvik_lab.run.spec import Kind

START_LIMIT = 600.0
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
VERSIONS = (
    "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in ('kvik', 'vllm')}))"
)


class Vllm:
    """The driver `vllm`."""

    def system(self, setup: Setup) -> System:
        """vLLM's servers, with kvik's router before a pair. Raises `LabError` for what it cannot start."""
        return serving(setup, _engine, _block_tokens(setup))

    def code(self, node: Node) -> dict[str, str]:
        """Versions of kvik and vLLM."""
        return {
            str(name): str(value)
            for name, value in json.loads(node.run([node.python, "-c", VERSIONS])).items()
        }


def _block_tokens(setup: Setup) -> int:
    kind: Kind = "decode" if setup.spec.mode == "disaggregated" else "unified"
    said = setup.role(kind).options.get("block_size")
    if not isinstance(said, int):
        raise LabError(f"run.roles.{kind}.options: block_size is not said; write it, such as block_size: 16")
    return said


def _engine(setup: Setup, kind: Kind, number: int, port: int, store: str | None) -> Part:
    if store is not None:
        raise LabError("run.roles.store: the driver vllm starts no store for its engines; take the role away")
    role = setup.role(kind)
    node = setup.nodes[setup.node(kind, number)]
    if "model" not in role.options:
        raise LabError(f"run.roles.{kind}.options: no model; write model: /path/of/the/checkpoint")
    command = [
        node.python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host",
        node.address,
        "--port",
        str(port),
    ]
    more: dict[str, Setting] = {"enable_prefix_caching": False, "served_model_name": "model"}
    more = {name: value for name, value in more.items() if name not in role.options}
    command += ["--no-enable-prefix-caching"] if "enable_prefix_caching" in more else []
    command += ["--served-model-name", "model"] if "served_model_name" in more else []
    if kind in ROLES and "kv_transfer_config" not in role.options:
        report = setup.logs / f"{named(kind, number, role.count)}-loads.jsonl"
        extra = {"listen": f"{node.address}:0", "transport": setup.spec.transport}
        connector = Connector(ROLES[kind], report, extra=extra)  # type: ignore[arg-type]
        command += ["--kv-transfer-config", connector.config()]
        more |= {"kv_connector": connector.cls, "transport": setup.spec.transport}
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": node.address, "PYTHONUNBUFFERED": "1"}
    return http_part(setup, kind, number, port, command, more, env, START_LIMIT)
