"""What an engine's metrics say of its NICs."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

NicCounts = dict[str, dict[str, float]]

_CONNECTIONS = "kvik_nic_connections_opened_total"
_FAILED, _UP, _BYTES = "kvik_nic_failed_operations_total", "kvik_nic_up", "kvik_nic_bytes_total"


def nic_counts(metrics: str) -> NicCounts:
    """For each NIC: bytes `in` and `out`, `failed` operations, and whether it is `up` (1 or 0)."""
    counts: NicCounts = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            key = {_FAILED: "failed", _UP: "up", _BYTES: sample.labels.get("direction", "")}.get(sample.name)
            if key:
                counts.setdefault(sample.labels["nic"], {})[key] = sample.value
    return counts


def ways_opened(metrics: str) -> float:
    """Ways to peers' NICs that all NICs together have opened."""
    families = text_string_to_metric_families(metrics)
    return sum(sample.value for one in families for sample in one.samples if sample.name == _CONNECTIONS)


def summed(all_counts: Iterable[NicCounts]) -> NicCounts:
    """Several engines' counts together; a NIC is up if it was so in all of them."""
    total: NicCounts = {}
    for counts in all_counts:
        for nic, one in counts.items():
            sums = total.setdefault(nic, {"in": 0.0, "out": 0.0, "failed": 0.0, "up": 1.0})
            for key in ("in", "out", "failed"):
                sums[key] += one.get(key, 0.0)
            sums["up"] = min(sums["up"], one.get("up", 0.0))
    return total
