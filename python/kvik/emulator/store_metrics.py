"""What `/metrics` tells of the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

LOAD_BUCKETS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
# Of blocks: asked for, for a request; hit: there on all ranks; and of each rank loaded; put: taken by the
# store; known: it had them; refused: by the store. skipped: not put, since too many pages wait for that.
RESULTS = ("asked", "hit", "loaded", "put", "known", "refused", "skipped")
REASONS = ("faster", "unknown", "refresh", "slower", "unavailable", "unstated")


class StoreFamilies:
    """The metrics of all replicas."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, ...]) -> None:
        self._blocks = Counter(
            "kvik_emulator_store_blocks", "Blocks of the store, by what became of them.",
            (*labels, "result"), registry=registry,
        )  # fmt: skip
        self._choices = Counter(
            "kvik_emulator_store_choices", "Loads of ranks that were tried or not, by why.",
            (*labels, "reason"), registry=registry,
        )  # fmt: skip
        self._failures = Counter(
            "kvik_emulator_store_failures", "Loads and puts of ranks that failed, by cause.",
            (*labels, "operation", "cause"), registry=registry,
        )  # fmt: skip
        self._estimated = Counter(
            "kvik_emulator_store_estimated_seconds", "Time that loads were expected to take.",
            labels, registry=registry,
        )  # fmt: skip
        self._recompute = Counter(
            "kvik_emulator_store_recompute_seconds", "Time that computing the same was expected to take.",
            labels, registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "kvik_emulator_store_load_seconds", "Loads of ranks, from asking to the end.", labels,
            buckets=LOAD_BUCKETS, registry=registry,
        )  # fmt: skip

    def replica(self, labels: tuple[str, ...]) -> StoreMetrics:
        """Those of one replica, at zero."""
        return StoreMetrics(
            {result: self._blocks.labels(*labels, result) for result in RESULTS},
            {reason: self._choices.labels(*labels, reason) for reason in REASONS},
            lambda operation, cause: self._failures.labels(*labels, operation, cause),
            self._estimated.labels(*labels),
            self._recompute.labels(*labels),
            self._seconds.labels(*labels),
        )


class StoreMetrics:
    """One replica's share of them."""

    def __init__(
        self,
        blocks: Mapping[str, Any],
        choices: Mapping[str, Any],
        failures: Any,
        estimated: Any,
        recompute: Any,
        seconds: Any,
    ) -> None:
        self._blocks = blocks
        self._choices = choices
        self._failures = failures
        self._estimated = estimated
        self._recompute = recompute
        self._seconds = seconds

    def blocks(self, result: str, count: int) -> None:
        """So many blocks more."""
        self._blocks[result].inc(count)

    def failed(self, operation: str, cause: str) -> None:
        """A load or a put of a rank."""
        self._failures(operation, cause).inc()

    def loaded(self, loaded: Mapping[str, Any], recompute: float | None) -> None:
        """A rank's load has ended; the fields of `store_rank.Loaded`."""
        self._choices[loaded["reason"]].inc()
        self.blocks("loaded", loaded["blocks"])
        if loaded["cause"]:
            self.failed("load", loaded["cause"])
        if loaded["estimated"] is not None and recompute is not None:
            self._estimated.inc(loaded["estimated"])
            self._recompute.inc(recompute)
        if loaded["blocks"]:
            self._seconds.observe(loaded["seconds"])
