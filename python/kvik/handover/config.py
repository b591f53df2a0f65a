"""The connector's options: `kv_connector_extra_config`, its variables and the configuration file, resolved.

What each option is, its default and its bounds are in `kvik.config.tables`; the engine's options are those of
`kvik.Engine`, under the same names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvik.config import CONNECTOR, given_values, values
from kvik.config.resolve import look_around
from kvik.errors import InvalidArgument

_WHERE = "kv_connector_extra_config"
_DEFAULTS = CONNECTOR.defaults()


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig:
    """Options of one serving engine's connector; each rank gets the same ones, but for `nics` where they are
    a mapping from rank (`RankPlace.number`). Times are in seconds."""

    listen: tuple[str, ...] = _DEFAULTS["listen"]
    advertise: tuple[str, ...] | None = None
    secret: str | None = field(default=None, repr=False)
    tls: str | None = None
    transport: str = _DEFAULTS["transport"]
    verify: str = _DEFAULTS["verify"]
    channels: int = _DEFAULTS["channels"]
    io_threads: int = _DEFAULTS["io_threads"]
    deadline: float = _DEFAULTS["deadline"]
    memory_cap: int = _DEFAULTS["memory_cap"]
    nics: str | Mapping[int, str] | None = None
    cpus: tuple[int, ...] | None = None
    numa_node: int | None = None
    expiry: float = _DEFAULTS["expiry"]
    max_expiry: float = _DEFAULTS["max_expiry"]
    park_after: float = _DEFAULTS["park_after"]
    release_deadline: float = _DEFAULTS["release_deadline"]
    close_timeout: float = _DEFAULTS["close_timeout"]
    namespace: str | None = None
    report_file: str | None = None

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> ConnectorConfig:
        """Build from `kv_connector_extra_config`, variables and the file.

        Raises `kvik.InvalidArgument` with a line for each thing that is wrong, and what was meant.
        """
        return cls(**values(CONNECTOR, given_values(CONNECTOR, extra, _WHERE), look_around(env)))

    def check_ranks(self, ranks: int, dp: int, dp_size: int) -> None:
        """Refuse `nics` that do not fit the ranks of a server. `ranks`: those of each replica of data
        parallelism; `dp`: the replica that this process is part of; `dp_size`: how many vLLM says there are.

        Of a model without experts vLLM says 1 of any, and then a whole replica too many is not seen.
        """
        if self.nics is None or isinstance(self.nics, str):
            return
        for rank in range(dp * ranks, (dp + 1) * ranks):
            self.nics_of(rank)
        for rank in sorted(self.nics):
            replica = range(rank // ranks * ranks, (rank // ranks + 1) * ranks)
            missing = next((other for other in replica if other not in self.nics), None)
            if missing is not None:
                raise InvalidArgument(
                    f"{_WHERE}: nics names rank {rank}, and not rank {missing}, which is of the same replica"
                )
            if 1 < dp_size <= rank // ranks:
                raise InvalidArgument(
                    f"{_WHERE}: nics names rank {rank}, and this server has ranks 0 to {dp_size * ranks - 1}"
                )

    def nics_of(self, rank: int) -> str | None:
        """The NICs of the rank of this number. Raises `InvalidArgument` where only other ranks have some."""
        if self.nics is None or isinstance(self.nics, str):
            return self.nics
        if rank not in self.nics:
            named = ", ".join(map(str, sorted(self.nics)))
            raise InvalidArgument(
                f"{_WHERE}: nics names no NICs for rank {rank} of this server, but for {named}"
            )
        return self.nics[rank]

    def engine_options(self, name: str, rank_offset: int) -> dict[str, Any]:
        """Keyword arguments of `kvik.Engine` for the rank that is `rank_offset`th on this server.

        A fixed port is counted upwards by rank; port 0 lets the system choose.
        """
        options: dict[str, Any] = {
            "listen": [_port_for_rank(address, rank_offset) for address in self.listen],
            "advertise": [_port_for_rank(address, rank_offset) for address in self.advertise or ()],
            "secret": self.secret,
            "tls": self.tls,
            "transport": self.transport,
            "verify": self.verify,
            "channels": self.channels,
            "io_threads": self.io_threads,
            "deadline": self.deadline,
            "memory_cap": self.memory_cap,
            "nics": self.nics_of(rank_offset),
            "cpus": self.cpus,
            "numa_node": self.numa_node,
            "name": name,
        }
        return {key: value for key, value in options.items() if value not in (None, [])}


def _port_for_rank(address: str, rank_offset: int) -> str:
    """Count a fixed port upwards by rank; leave port 0 and a bare host as they are."""
    host, colon, port = address.rpartition(":")
    bare_host = not colon or not port.isdigit() or (":" in host and not host.startswith("["))
    if bare_host or int(port) == 0:
        return address
    return f"{host}:{int(port) + rank_offset}"
