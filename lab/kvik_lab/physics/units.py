"""Rates, sizes and durations as people write them. A rate says whether it counts bits or bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kvik_lab.errors import LabError

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)"
_RATE = re.compile(_NUMBER + r"\s*([kKmMgGtT]?i?)(bit|bits|bps|b|B|Byte|bytes|byte)(?:/s|ps)?")
_SIZE = re.compile(_NUMBER + r"\s*([kKmMgGtT]?i?)(?:B|bytes)?")
_TIME = re.compile(_NUMBER + r"\s*(ms|us|µs|ns|min|s|h)")


@dataclass(frozen=True)
class Rate:
    """How fast bytes pass; made from bits or from bytes by name, so that neither is taken for the other."""

    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_second) and self.bytes_per_second > 0):
            raise LabError(f"a rate is a number above 0, not {self.bytes_per_second!r}")

    @classmethod
    def of_bits(cls, bits_per_second: float) -> Rate:
        """A line rate as network cards state it."""
        return cls(bits_per_second / 8)

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Read `25Gbit`, `25Gb/s`, `3.1GB/s`, `11GiB/s`. A small b is a bit, a capital B a byte."""
        found = _RATE.fullmatch(text.strip())
        if found is None:
            raise LabError(
                f"{text!r} is no rate; write for example 25Gbit (bits a second) or 3.1GB/s (bytes)"
            )
        number, prefix, unit = found.groups()
        value = float(number) * _factor(prefix)
        if not value > 0:
            raise LabError(f"{text!r}: a rate is above 0")
        return cls(value) if unit[0] == "B" or unit.startswith("byte") else cls.of_bits(value)

    @property
    def bits_per_second(self) -> float:
        """The same rate in bits."""
        return self.bytes_per_second * 8

    def __str__(self) -> str:
        return f"{format_bytes(self.bytes_per_second)}/s"


def _factor(prefix: str) -> float:
    lower = prefix.lower()
    return _BINARY[lower] if lower in _BINARY else _DECIMAL[lower.removesuffix("i")]


def parse_seconds(text: str) -> float:
    """Read `200us`, `1.5ms`, `2s`; seconds. `LabError` for a duration without a unit, unless it is 0."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        if text.strip() == "0":
            return 0.0
        raise LabError(f"{text!r} is no duration; write for example 200us, 1.5ms or 2s")
    return float(found[1]) * _SECONDS[found[2]]


def parse_bytes(text: str) -> float:
    """Read `64MB` (10^6), `64MiB` (2^20) or a plain number of bytes."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise LabError(f"{text!r} is no size; write for example 64MiB, 200MB or 1048576")
    return float(found[1]) * _factor(found[2])


def format_seconds(seconds: float) -> str:
    """A duration with three figures and the unit that keeps it readable."""
    size = abs(seconds)
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if size >= 0.9995 * scale:  # what three figures round up to it: 0.9996 s is 1 s, and not 1e+03 ms
            return (
                f"{seconds / scale:.3g} {unit}" if size < 999.5 * scale else f"{seconds / scale:,.0f} {unit}"
            )
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def format_bytes(size: float) -> str:
    """Bytes with three figures and a decimal prefix."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:.4g} {unit}" if abs(size) >= 100 * scale else f"{size / scale:.3g} {unit}"
    return f"{size:.3g} B"
