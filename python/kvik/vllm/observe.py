"""The connector's counts in vLLM's own log line and Prometheus registry."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvik.handover.metrics import LoadStats

LOAD_SECONDS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]


CHOICES = (
    ("faster", "fetched, which took no longer than computing"),
    ("unknown", "fetched, since nothing was measured"),
    ("refresh", "fetched, to see whether computing is still faster"),
    ("slower", "computed, which was faster"),
    ("unavailable", "computed, since the server does not answer"),
)
STORE_COUNTERS = (
    ("asked_blocks", "blocks_asked", "KV blocks that a store was asked for."),
    ("found_blocks", "blocks_found", "KV blocks that it said it has, on all ranks."),
    ("hit_tokens", "hit_tokens", "Tokens that were to be loaded from a store."),
    ("host_blocks", "blocks_loaded_host", "KV blocks that ranks have read from their process' own memory."),
    ("remote_blocks", "blocks_loaded_remote", "KV blocks that ranks have read from a store's server."),
    ("missing_blocks", "blocks_missing", "KV blocks that had gone, or failed, when they were read."),
    ("host_stored_blocks", "blocks_saved_host", "KV blocks that ranks have put into their own memory."),
    ("remote_stored_blocks", "blocks_saved_remote", "KV blocks that ranks have put into a store's server."),
    ("dropped_blocks", "blocks_dropped", "KV blocks that were not saved, since too many waited for it."),
    ("lookups_failed_", "lookups_failed", "Lookups of ranks that a tier did not answer."),
    ("loads_failed_", "loads_failed", "Loads of ranks that ended in an error of a tier."),
    ("saves_failed_", "saves_failed", "Saves of ranks that ended in an error of a tier."),
    *(
        (f"choices_{reason}", f"choices_{reason}", f"Requests whose blocks of a server were {what}.")
        for reason, what in CHOICES
    ),
    ("untold_blocks", "blocks_untold", "KV blocks that no KV event tells of, since too many waited."),
    ("late", "requests_late", "Requests that were computed because an answer came too late."),
    ("requests_not_kept", "requests_not_kept", "Requests of which nothing is kept, by what they are."),
)


class KvikStats(KVConnectorStats):  # type: ignore[misc]
    """Carries `LoadStats.data` from workers and scheduler to the front end."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KvikStats:
        """Add another rank's or step's counts."""
        stats = LoadStats(self.data)
        stats.add(other.data)
        self.data = stats.data
        return self

    def reduce(self) -> dict[str, int | float]:
        """The periodic log line."""
        return LoadStats(self.data).summary()

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.data


class KvikPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus metrics `vllm:kvik_*`, one child an engine index."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        seconds = self._histogram_cls(
            name="vllm:kvik_load_seconds",
            documentation="Seconds from the start of a KV load to its end, loads that succeeded.",
            buckets=LOAD_SECONDS,
            labelnames=labelnames,
        )
        self._seconds = self._per_engine(seconds)
        self._counters = {
            prefix: self._per_engine(self._counter_cls(name=name, documentation=text, labelnames=labelnames))
            for prefix, name, text in (
                ("bytes", "vllm:kvik_loaded_bytes", "KV bytes read from prefill servers."),
                ("streams", "vllm:kvik_streams", "KV loads of ranks that came in parts."),
                ("loads_failed", "vllm:kvik_loads_failed", "KV loads of ranks that ended in an error."),
                ("recomputed_", "vllm:kvik_requests_recomputed", "Requests whose offered KV was refused."),
                (
                    "sends_expired",
                    "vllm:kvik_grants_expired",
                    "Ranks' grants over KV of finished prefills that no reader came for.",
                ),
                *(
                    (f"cache_{count}", f"vllm:kvik_store_{name}", text)
                    for count, name, text in STORE_COUNTERS
                ),
            )
        }

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {index: metric.labels(*values) for index, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval."""
        stats = LoadStats(transfer_stats_data)
        for seconds in stats.data.get("durations", ()):
            self._seconds[engine_idx].observe(seconds)
        for prefix, counters in self._counters.items():
            if (amount := stats.total(prefix)) > 0:
                counters[engine_idx].inc(amount)
