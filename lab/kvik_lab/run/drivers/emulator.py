"""kvik's emulated engines: real HTTP, real KV pages, real transfers, and no model."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvik.roles.node import Node
from kvik_lab.errors import LabError
from kvik_lab.run.drivers import versions
from kvik_lab.run.drivers.serving import check, http_part, serving
from kvik_lab.run.drivers.system import Part, Setting, Setup, System
from kvik_lab.run.spec import ENGINES, Kind, RunSpec

PAGE_TOKENS = 16
START_LIMIT = 120.0
HELD = 2  # the prefill engine holds a request's KV until its reader has confirmed it
ROLES = {"prefill": "prefill", "decode": "decode", "unified": "both"}
PARTS = "tp"
OF_PARTS = ("kv_memory",)
"""Settings that follow from how many parts an engine has."""
OF_MODEL = ("model_shape", *OF_PARTS)
"""Settings that follow from the model."""
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
        kind: Kind = "decode" if setup.spec.mode == "disaggregated" else "unified"
        return serving(setup, _engine, _page_tokens(setup, kind))

    def code(self, system: System, nodes: Mapping[str, Node]) -> dict[str, str]:
        """kvik's version; of unlike ones each with the engines that have it."""
        seen: dict[str, list[str]] = {}
        by_node: dict[str, str] = {}
        for part in system.parts:
            if part.kind in ENGINES:
                name = part.role.node
                if name not in by_node:
                    by_node[name] = str(json.loads(nodes[name].run([nodes[name].python, "-c", VERSION])))
                seen.setdefault(by_node[name], []).append(part.role.name)
        return {"kvik": versions.said(seen)}


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
    ranks, tokens = setup.role(kind).options.get(PARTS, 1), _page_tokens(setup, kind)
    pages = -(-setup.most_tokens // tokens) + 1
    requests = setup.most_requests * (HELD if kind == "prefill" else 1)
    return (
        pages * requests * setup.shape.page_bytes(tokens, int(ranks) if isinstance(ranks, int | str) else 1)
    )


def _page_tokens(setup: Setup, kind: Kind) -> int:
    """Tokens of a page of KV: the emulator refuses what is no whole number when it starts."""
    said = setup.role(kind).options.get("page_tokens", PAGE_TOKENS)
    return int(said) if isinstance(said, int | str) and str(said).isdigit() and int(said) else PAGE_TOKENS
