"""What was asked for, and what is used for it: the NICs or the transport, the other side, sizes and times."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, cast

import kvik
from kvik.bench import facts
from kvik.bench.control import WILDCARDS, is_loopback, join_address, split_address
from kvik.bench.errors import BenchError
from kvik.bench.options import BUFFERS_HELD, size_text
from kvik.bench.target import SECRET_VARIABLE, TargetOptions
from kvik.config import ENGINE, values
from kvik.selftest.hardware import Port, suggested

REPEATS = 5
"""How often a point is measured; the spread is over these."""

BLOCKS = tuple(4096 << power for power in range(0, 11, 2))
"""4 KiB to 4 MiB."""
LEAST_BYTES, MOST_BYTES = 1 << 20, 64 << 30
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Asked:
    """The command line."""

    nics: str | None
    transport: str | None
    target: str | None
    listen: str | None
    seconds_per_point: float
    max_bytes: int
    seed: int


@dataclass(frozen=True)
class Plan:
    """What is done. `why` says where the choice of the transport comes from."""

    asked: Asked
    transport: kvik.TransportName
    nics: str | None
    why: str
    listen: str
    secret: str | None

    @property
    def uses_nics(self) -> bool:
        """Whether every page has to go over NICs."""
        return self.transport == "nics"

    @property
    def own_target(self) -> bool:
        """Whether this command starts the other side."""
        return self.asked.target is None

    @property
    def buffer(self) -> int:
        """Bytes of memory of either side."""
        return self.asked.max_bytes

    @property
    def free_port(self) -> str:
        """Where another engine of this host listens, beside the one that has the address of the plan."""
        return join_address(split_address(self.listen)[0], 0)

    def target_options(self, listen: str) -> TargetOptions:
        """For the other side, as a process of this host or as what `--serve` offers."""
        config = values(ENGINE)
        return TargetOptions(
            buffer=self.buffer,
            memory="shared",
            transport=self.transport,
            channels=config["channels"],
            verify=config["verify"],
            engine_listen=listen,
            nics=self.nics,
        )

    def to_json(self) -> dict[str, Any]:
        """For the report: no address, no secret."""
        asked = self.asked
        return {
            "asked": {
                "nics": asked.nics,
                "transport": asked.transport,
                "other_side": "a process of this host"
                if self.own_target
                else "another kvik selftest --serve",
                "seconds_per_point": asked.seconds_per_point,
                "max_bytes": asked.max_bytes,
                "seed": asked.seed,
            },
            "transport": self.transport,
            "nics": self.nics,
            "why": self.why,
            "secret": self.secret is not None,
        }


def settle(asked: Asked, ports: list[Port]) -> Plan:
    """Decide; `BenchError` or `kvik.KvikError` says what cannot be, before anything is begun."""
    config = values(ENGINE)
    if not LEAST_BYTES <= asked.max_bytes <= MOST_BYTES:
        raise BenchError(f"--max-bytes is from {size_text(LEAST_BYTES)} to {size_text(MOST_BYTES)}")
    available = facts.memory_available()
    held = BUFFERS_HELD * asked.max_bytes
    if available is not None and held > available:
        raise BenchError(
            f"--max-bytes: both sides and the checks take {size_text(held)}, and {available >> 20} MiB are "
            "free; give less"
        )
    transport, nics, why = _chosen(asked, config, ports)
    secret = cast("str | None", config["secret"])
    listen = asked.listen or _listen_for(asked.target)
    for address in (asked.listen, asked.target):
        if address is not None and split_address(address)[0] in WILDCARDS:
            raise BenchError(f"{address}: give an address that the other side can reach, not a wildcard")
    if not is_loopback(split_address(listen)[0]) and secret is None:
        raise BenchError(
            f"{listen} is not loopback: set {SECRET_VARIABLE} to the same secret on both sides, "
            "as engines demand it there"
        )
    return Plan(asked, transport, nics, why, listen, secret)


def _chosen(
    asked: Asked, config: dict[str, Any], ports: list[Port]
) -> tuple[kvik.TransportName, str | None, str]:
    if asked.nics is not None:
        return "nics", asked.nics, "--nics"
    if asked.transport is not None:
        transport = cast("kvik.TransportName", asked.transport)
        if transport == "nics" and config["nics"] is None:
            raise BenchError("--transport nics needs to know which: give --nics, or set KVIK_NICS")
        return transport, config["nics"], "--transport"
    if config["nics"] is not None:
        return "nics", config["nics"], "KVIK_NICS, or the configuration file"
    found = suggested(ports)
    if found is None:
        raise BenchError(
            "no NICs: neither --nics nor KVIK_NICS names any, and /sys/class/infiniband has no EFA device "
            "and no RDMA port that is active; --nics libfabric:tcp or --transport tcp tests kvik without them"
        )
    return "nics", *found


def _listen_for(target: str | None) -> str:
    """Loopback; for a target on another host, the address of this one on the way to it."""
    if target is None:
        return f"{_LOOPBACK}:0"
    host, port = split_address(target)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)  # Sends nothing: it only makes the kernel choose.
            return join_address(sock.getsockname()[0], 0)
    except (OSError, UnicodeError) as error:  # such as a name with two dots in a row
        raise BenchError(f"there is no way from here to {target}: {error}") from error
