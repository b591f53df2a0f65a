"""kvik's emulated engines: real HTTP, real KV pages, real transfers, and no model."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvik.roles.node import Node
from kvik_lab.errors import LabError
from kvik_lab.run.drivers.serving import check, http_part, serving
from kvik_lab.run.drivers.system import Part, Setting, Setup, System
from kvik_lab.run.spec import Kind, RunSpec

PAGE_TOKENS = 16
START_LIMIT = 120.0
HELD = 2  # the prefill engine holds a request's KV until its reader has confirmed it
ROLES = {"prefill": "prefill", "decode": "decode", "unified": "both"}
VERSION = "import importlib.metadata as m, json; print(json.dumps(m.version('kvik')))"


class Emulator:
    """The driver `emulator`."""

    def check(self, spec: RunSpec) -> None:
        """Roles that go together."""
        check(spec)
        if spec.connector != "kvik":
            raise LabError(f"run.connector: the emulator has kvik's transfers, and not {spec.connector}")

    def system(self, setup: Setup) -> System:
        """Emulated engines, with kvik's router before a pair."""
        return serving(setup, _engine, PAGE_TOKENS)

    def code(self, system: System, nodes: Mapping[str, Node]) -> dict[str, str]:
        """kvik's version."""
        node = nodes[system.parts[0].role.node]
        return {"kvik": str(json.loads(node.run([node.python, "-c", VERSION])))}


def _engine(setup: Setup, kind: Kind, number: int, port: int, store: str | None) -> Part:
    role = setup.role(kind)
    node = setup.nodes[setup.node(kind, number)]
    more: dict[str, Setting] = {
        "role": ROLES[kind], "model_shape": setup.model, "transport": setup.spec.transport,
        "page_tokens": PAGE_TOKENS, "prefix_cache": False, "kv_memory": _memory(setup, kind),
    }  # fmt: skip
    more = {name: value for name, value in more.items() if name not in role.options}
    command = [
        node.python,
        "-m",
        "kvik.cli",
        "emulator",
        "serve",
        "--host",
        node.address,
        "--port",
        str(port),
    ]
    command += ["--listen", f"{node.address}:0"]
    for name, value in more.items():
        flag = "--" + name.replace("_", "-")
        command += ["--no-prefix-cache"] if name == "prefix_cache" else [flag, str(value)]
    command += ["--store", store] if store else []
    return http_part(setup, kind, number, port, command, more, {}, START_LIMIT)


def _memory(setup: Setup, kind: Kind) -> int:
    """Bytes of KV for a rank: for as many requests as are sent at once."""
    ranks = setup.role(kind).options.get("tp", 1)
    pages = -(-setup.most_tokens // PAGE_TOKENS) + 1
    requests = setup.most_requests * (HELD if kind == "prefill" else 1)
    return (
        pages
        * requests
        * setup.shape.page_bytes(PAGE_TOKENS, int(ranks) if isinstance(ranks, int | str) else 1)
    )
