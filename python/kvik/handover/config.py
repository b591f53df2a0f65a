"""The connector's options: `kv_connector_extra_config`, checked.

Unknown keys are refused with the nearest known one, so that a typing error does not silently become a
default.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

SECRET_VARIABLE = "KVIK_SECRET"  # noqa: S105  (the name of a variable)


class ConfigError(ValueError):
    """An option of the connector is unknown or has a value that it cannot have."""


@dataclass(frozen=True)
class ConnectorConfig:
    """Options of one vLLM server's connector; every worker rank gets the same ones.

    listen: HOST:PORT of the rank's kvik engine. Default loopback, because nobody gets in unless told. A fixed
        port is counted upwards by rank (data-parallel index times ranks, plus tensor-parallel index); port 0
        lets the system choose.
    advertise: HOST or HOST:PORT put into tickets, when peers reach this host by another name than it listens
        on.
    secret: shared by all servers that hand over to each other; demanded off loopback. Default: the variable
        KVIK_SECRET, because a command line is visible to every user of the host.
    transport: "auto", or one transport by name; a named one that cannot be used is an error and not a
        substitute.
    verify: page checksums: "auto", "off" or "full"; for who pays for speed with checks that others made.
    channels: parallel paths to one peer; more helps on links that one TCP connection does not fill.
    io_threads: threads that serve channels.
    memory_cap: bound on what kvik itself holds, for example "256MiB".
    cpus: CPU numbers for kvik's threads, to keep them off the model's cores.
    numa_node: NUMA node for kvik's threads and buffers.
    expiry_s: how long finished prefill KV blocks wait for their reader. The bound on what a lost client can
        strand.
    max_expiry_s: how far holders of a ticket may extend that.
    park_after_s: unread KV is held by vLLM's own means for this long, in which its engine steps some 600
        times a second; afterwards an idle engine sleeps, and notices the end of the handover with its next
        step. At or above expiry_s: never.
    load_deadline_s: bound on one load; when it passes the request is recomputed. Longer than the slowest
        honest load.
    release_deadline_s: bound on telling the prefill side that its blocks are not wanted; past it, its expiry
        frees them.
    close_timeout_s: bound on shutdown.
    namespace: what must be equal besides the shape for KV to be exchanged, for example a weights revision.
        Default: the model name and revision of vLLM; set it when the same weights lie under different paths.
    report_file: one JSON line a finished load or recomputed request is appended here, for measurements and
        tests.
    """

    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    secret: str | None = field(default=None, repr=False)
    transport: str = "auto"
    verify: str = "auto"
    channels: int = 4
    io_threads: int = 2
    memory_cap: str = "256MiB"
    cpus: tuple[int, ...] | None = None
    numa_node: int | None = None
    expiry_s: float = 120.0
    max_expiry_s: float = 600.0
    park_after_s: float = 2.0
    load_deadline_s: float = 30.0
    release_deadline_s: float = 5.0
    close_timeout_s: float = 5.0
    namespace: str | None = None
    report_file: str | None = None

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> ConnectorConfig:
        """Build from `kv_connector_extra_config`; `ConfigError` names what is wrong and what was meant."""
        known = {option.name: str(option.type) for option in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in extra.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}{hint}")
            values[key] = _convert(key, known[key], value)
        if values.get("secret") is None and env.get(SECRET_VARIABLE):
            values["secret"] = env[SECRET_VARIABLE]
        config = cls(**values)
        config._check()
        return config

    def _check(self) -> None:
        for option in fields(self):
            if option.name.endswith("_s") and not 0 < getattr(self, option.name) < float("inf"):
                name = option.name
                raise ConfigError(f"kv_connector_extra_config: {name} must be a number of seconds above 0")
        if self.max_expiry_s < self.expiry_s:
            raise ConfigError(
                "kv_connector_extra_config: "
                f"max_expiry_s {self.max_expiry_s:g} is below expiry_s {self.expiry_s:g}"
            )
        for name in ("channels", "io_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"kv_connector_extra_config: {name} must be at least 1")

    def engine_options(self, name: str, rank_offset: int) -> dict[str, Any]:
        """Keyword arguments of `kvik.Engine` for the rank that is `rank_offset`th on this server."""
        options: dict[str, Any] = {
            "listen": _port_for_rank(self.listen, rank_offset),
            "advertise": self.advertise and _port_for_rank(self.advertise, rank_offset),
            "transport": self.transport,
            "verify": self.verify,
            "channels": self.channels,
            "io_threads": self.io_threads,
            "memory_cap": self.memory_cap,
            "deadline": self.load_deadline_s,
            "name": name,
        }
        optional = {"secret": self.secret, "cpus": self.cpus, "numa_node": self.numa_node}
        return options | {key: value for key, value in optional.items() if value is not None}


def _convert(key: str, wanted: str, value: Any) -> Any:
    """Accept JSON's own types only: `"4"` for a number is refused rather than guessed."""
    if value is None and "None" in wanted:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted.startswith("float") and is_number:
        return float(value)
    if wanted.startswith("int") and is_number and isinstance(value, int):
        return value
    if wanted.startswith("str") and isinstance(value, str):
        return value
    if (
        wanted.startswith("tuple")
        and isinstance(value, list | tuple)
        and all(type(item) is int for item in value)
    ):
        return tuple(value)
    meant = wanted.replace("tuple[int, ...]", "list of int").replace(" | None", " or null")
    raise ConfigError(f"kv_connector_extra_config: {key} must be {meant}, not {value!r}")


def _port_for_rank(address: str, rank_offset: int) -> str:
    """Count a fixed port upwards by rank; leave port 0 and a bare host as they are."""
    host, colon, port = address.rpartition(":")
    bare_host = not colon or not port.isdigit() or (":" in host and not host.startswith("["))
    if bare_host or int(port) == 0:
        return address
    return f"{host}:{int(port) + rank_offset}"
