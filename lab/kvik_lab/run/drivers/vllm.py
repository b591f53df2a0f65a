"""vLLM: one engine that does both, or prefill and decode engines with kvik's connector between them."""

from __future__ import annotations

import json

from kvik.demo.engines import Connector
from kvik.roles.node import Node
from kvik_lab.errors import LabError
from kvik_lab.run.drivers.serving import check, http_part, serving
from kvik_lab.run.drivers.system import Part, Setting, Setup, System
from kvik_lab.run.spec import Kind, RunSpec

START_LIMIT = 600.0
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
VERSIONS = (
    "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in ('kvik', 'vllm')}))"
)


class Vllm:
    """The driver `vllm`."""

    def check(self, spec: RunSpec) -> None:
        """Roles that go together, each engine with its model and the size of its KV blocks."""
        for kind in check(spec):
            options = spec.roles[kind].options if kind in spec.roles else {}
            for name, such in (("model", "/path/of/the/checkpoint"), ("block_size", 16)):
                if name not in options:
                    raise LabError(f"run.roles.{kind}.options: {name} is not said; write {name}: {such}")
            if not isinstance(options["block_size"], int):
                raise LabError(f"run.roles.{kind}.options: block_size is no whole number")
        if "store" in spec.roles:
            raise LabError("run.roles.store: the driver vllm starts no store for its engines; take it away")

    def system(self, setup: Setup) -> System:
        """vLLM's servers, with kvik's router before a pair."""
        return serving(setup, _engine, _block_tokens(setup))

    def code(self, node: Node) -> dict[str, str]:
        """Versions of kvik and vLLM."""
        return {
            str(name): str(value)
            for name, value in json.loads(node.run([node.python, "-c", VERSIONS])).items()
        }


def _block_tokens(setup: Setup) -> int:
    kind: Kind = "decode" if setup.spec.mode == "disaggregated" else "unified"
    return int(str(setup.role(kind).options["block_size"]))


def _engine(setup: Setup, kind: Kind, number: int, port: int, _store: str | None) -> Part:
    role = setup.role(kind)
    node = setup.nodes[setup.node(kind, number)]
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
        extra = {"listen": f"{node.address}:0", "transport": setup.spec.transport}
        connector = Connector(ROLES[kind], extra=extra)  # type: ignore[arg-type]
        command += ["--kv-transfer-config", connector.config()]
        more |= {"kv_connector": connector.cls, "transport": setup.spec.transport}
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": node.address, "PYTHONUNBUFFERED": "1"}
    return http_part(setup, kind, number, port, command, more, env, START_LIMIT)
