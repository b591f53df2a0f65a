"""What the tools of perftest and libibverbs print."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Bandwidth:
    """A row of `ib_write_bw` and its like: bytes of a message, messages, and MB/s (2^20 bytes) on average.

    The rates are those of an emulated processor: they say that bytes were moved, and nothing else.
    """

    size: int
    messages: int
    average: float


_ROW = re.compile(r"^ (\d+)\s+(\d+)\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE)


def bandwidths(output: str) -> list[Bandwidth]:
    """The rows that are in an output; `ValueError` where there is none."""
    rows = [Bandwidth(int(size), int(count), float(mean)) for size, count, mean in _ROW.findall(output)]
    if not rows:
        raise ValueError(f"no row of figures in:\n{output}")
    return rows


@dataclass(frozen=True)
class PingPong:
    """The figures of `ibv_rc_pingpong`: bytes in both directions, and rounds."""

    nbytes: int
    rounds: int


def ping_pongs(output: str) -> list[PingPong]:
    """What each process says; `ValueError` where none does."""
    found = re.findall(r"^(\d+) bytes in [\d.]+ seconds.*\n(\d+) iters in ", output, re.MULTILINE)
    if not found:
        raise ValueError(f"no figures in:\n{output}")
    return [PingPong(int(nbytes), int(rounds)) for nbytes, rounds in found]
