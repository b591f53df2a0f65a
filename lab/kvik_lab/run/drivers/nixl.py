"""vLLM's own connector over NIXL: how it is asked for, and what was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvik.demo.engines import Role
from kvik_lab.run.spec import Kind, RunSpec

CONFIG = "kv_transfer_config"
BACKENDS = "nixl_backends"
"""The setting of an engine that says which backends NIXL was asked to use."""
TRANSPORTS = ("ucx",)
"""What the driver has vLLM's connector use: UCX is NIXL's own default."""
PROGRAMS = ("nixl", "nixl-cu12", "nixl-cu13", "nixl-rocm", "ucx")
"""Whose versions are those of a transfer: the package `nixl` only chooses one of the others."""
ROLES: dict[Kind, Role] = {"prefill": "kv_producer", "decode": "kv_consumer"}
_DEFAULT = ["UCX"]  # vLLM's, where the configuration names no backend


def connector(role: Role) -> str:
    """The JSON of `--kv-transfer-config` for an engine."""
    extra = {"backends": _DEFAULT}
    return json.dumps({
        "kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    })  # fmt: skip


def asked(spec: RunSpec, kind: Kind) -> str | None:
    """The backends that NIXL is to use in engines of a kind; None where they have nothing of NIXL."""
    own = spec.role(kind).options.get(CONFIG)
    if own is not None:
        return backends(str(own))
    uses = spec.driver == "vllm" and spec.connector == "nixl" and spec.mode == "disaggregated"
    return backends(connector(ROLES[kind])) if uses and kind in ROLES else None


def backends(config: str) -> str | None:
    """Those that the JSON of a `--kv-transfer-config` names, with commas; None where it has no NIXL."""
    try:
        said = json.loads(config)
    except ValueError:
        return None  # vLLM says what is wrong with it
    found = dict.fromkeys(str(one) for extra in _extras(said) for one in extra.get("backends") or _DEFAULT)
    return ",".join(found) or None


def _extras(config: Any) -> Iterator[dict[str, Any]]:
    """What NIXL's connectors are told, also those that are one of several (`MultiConnector`)."""
    if not isinstance(config, dict):
        return
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        return
    if str(config.get("kv_connector", "")).startswith("Nixl"):
        yield extra
    several = extra.get("connectors")
    for one in several if isinstance(several, list) else ():
        yield from _extras(one)
