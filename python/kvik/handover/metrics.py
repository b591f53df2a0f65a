"""Counts of one engine step's loads and grants, as one flat object that adds up over ranks and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvik.handover.native import Report

SUMS = ("bytes", "extents")
TIMES = ("total_s", "wire_s")


class LoadStats:
    """`data` holds sums by name and the list `durations` (seconds of each rank's load)."""

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = dict(data or {})

    def count(self, name: str, amount: float = 1) -> None:
        """Add to one sum."""
        self.data[name] = self.data.get(name, 0) + amount

    def add_load(self, reports: Sequence[Report]) -> None:
        """Add one rank's load that succeeded. Its transfers ran side by side: the slowest gives the time."""
        self.count("loads")
        for name in SUMS:
            self.count(name, sum(getattr(report, name) for report in reports))
        for name in TIMES:
            self.count(name, max(getattr(report, name) for report in reports))
        self.data["durations"] = [
            *self.data.get("durations", ()),
            max(report.total_s for report in reports),
        ]

    def add_stream(self, reports: Sequence[Report]) -> None:
        """Add one rank's load in parts that succeeded. How long it took is how long prefill computed, so that
        it is no duration of a load."""
        self.count("streams")
        self.count("stream_parts", len(reports))
        self.count("stream_bytes", sum(report.bytes for report in reports))
        for name in SUMS:
            self.count(name, sum(getattr(report, name) for report in reports))

    def add(self, other: Mapping[str, Any]) -> None:
        """Add another rank's or interval's `data`."""
        for name, value in other.items():
            if name == "durations":
                self.data[name] = [*self.data.get(name, ()), *value]
            else:
                self.count(name, value)

    def total(self, prefix: str) -> int:
        """Sum of all counts whose name begins with `prefix`."""
        return int(sum(value for name, value in self.data.items() if name.startswith(prefix)))

    def summary(self) -> dict[str, int | float]:
        """What the server's periodic log line shows."""
        loads, seconds = self.data.get("loads", 0), self.data.get("total_s", 0.0)
        megabytes, streamed = (self.data.get(name, 0) / 2**20 for name in ("bytes", "stream_bytes"))
        told = {
            "loads": loads,
            "mean ms": round(seconds / loads * 1e3, 3) if loads else 0,
            "MiB": round(megabytes, 3),
            "MiB/s": round((megabytes - streamed) / seconds, 1) if seconds else 0,
            "streams": int(self.data.get("streams", 0)),
            "failed": self.total("loads_failed"),
            "recomputed": self.total("recomputed_"),
            "grants expired": int(self.data.get("sends_expired", 0)),
        }
        return told | self._store() if any(name.startswith("cache_") for name in self.data) else told

    def _store(self) -> dict[str, int]:
        """Of a store: tokens that were loaded from it, blocks that ranks have saved, and what went wrong."""
        saved = sum(self.data.get(f"cache_{tier}_stored_blocks", 0) for tier in ("host", "remote"))
        failed = sum(self.total(f"cache_{operation}_failed_") for operation in ("lookups", "loads", "saves"))
        return {
            "store hits": int(self.data.get("cache_hit_tokens", 0)),
            "store saved": int(saved),
            "store dropped": int(self.data.get("cache_dropped_blocks", 0)),
            "store failed": failed,
        }
