"""`/metrics`: vLLM's names where the same thing is counted, `vllm:kvik_*` as kvik's connector has them.

Labels are vLLM's too: `model_name`, and `engine`, the data-parallel index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvik.emulator.requests import Request
from kvik.emulator.scheduler import Observer
from kvik.emulator.store_metrics import StoreFamilies, StoreMetrics
from kvik.handover.metrics import LoadStats

LABELS = ("model_name", "engine")
TTFT_BUCKETS = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
]
TOKEN_BUCKETS = [0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10]
LOAD_BUCKETS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30]
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
REASONS = ("stop", "length", "abort", "error")

COUNTERS = {
    "vllm:prompt_tokens": "Prompt tokens of requests whose first token was computed.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:prefix_cache_queries": "Prompt tokens looked for in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:external_prefix_cache_queries": "Prompt tokens that were not in the prefix cache.",
    "vllm:external_prefix_cache_hits": "Prompt tokens whose KV another server was to hand over.",
    "vllm:kvik_loaded_bytes": "KV bytes read from prefill servers.",
    "vllm:kvik_loads_failed": "KV loads of ranks that ended in an error.",
    "vllm:kvik_requests_recomputed": "Requests whose offered KV was refused.",
    "vllm:kvik_tokens_recomputed": "Prompt tokens computed here because their load failed.",
    "vllm:kvik_grants_expired": "Ranks' grants over KV of finished prefills that no reader came for.",
    "kvik_emulator_steps": "Engine steps.",
    "kvik_emulator_late_steps": "Engine steps that took longer than the compute model says.",
    "kvik_emulator_modelled_seconds": "What the compute model says all steps take, in seconds.",
}
GAUGES = {
    "vllm:num_requests_running": ("running", "Requests that are being computed."),
    "vllm:num_requests_waiting": ("waiting", "Requests that wait for pages or for their KV."),
    "vllm:kv_cache_usage_perc": ("usage", "Share of KV pages in use, from 0 to 1."),
    "kvik_emulator_held_requests": ("held", "Finished requests whose KV is held for its reader."),
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": (TTFT_BUCKETS, "From arrival to the first token."),
    "vllm:inter_token_latency_seconds": (TOKEN_BUCKETS, "From one token to the next."),
    "vllm:e2e_request_latency_seconds": (TTFT_BUCKETS, "From arrival to the end."),
    "vllm:request_queue_time_seconds": (TTFT_BUCKETS, "From arrival until it was first computed on."),
    "vllm:request_prefill_time_seconds": (TTFT_BUCKETS, "From then to the first token."),
    "vllm:request_decode_time_seconds": (TTFT_BUCKETS, "From the first token to the last."),
    "vllm:kvik_load_seconds": (LOAD_BUCKETS, "From the start of a KV load to its end, loads that succeeded."),
}
# Which counts of `LoadStats` and of the scheduler side go where; names are prefixes.
HANDOVER = {
    "vllm:kvik_loaded_bytes": "bytes",
    "vllm:kvik_loads_failed": "loads_failed",
    "vllm:kvik_requests_recomputed": "recomputed_",
    "vllm:kvik_grants_expired": "sends_expired",
}


class Metrics:
    """All metrics of one server."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(name, text, LABELS, registry=self._registry) for name, text in COUNTERS.items()
        }
        self._by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from; of a request that begins anew all tokens, once more.",
            (*LABELS, "source"), registry=self._registry,
        )  # fmt: skip
        self._success = Counter(
            "vllm:request_success", "Requests that ended, by how.", (*LABELS, "finished_reason"),
            registry=self._registry,
        )  # fmt: skip
        self._gauges = {
            name: Gauge(name, text, LABELS, registry=self._registry) for name, (_, text) in GAUGES.items()
        }
        self._histograms = {
            name: Histogram(name, text, LABELS, buckets=buckets, registry=self._registry)
            for name, (buckets, text) in HISTOGRAMS.items()
        }
        self._store = StoreFamilies(self._registry, LABELS)

    def replica(self, dp: int) -> ReplicaMetrics:
        """Those of one data-parallel replica, all of them at zero."""
        labels = (self._model, str(dp))
        return ReplicaMetrics(
            {name: counter.labels(*labels) for name, counter in self._counters.items()},
            {source: self._by_source.labels(*labels, source) for source in SOURCES},
            {reason: self._success.labels(*labels, reason) for reason in REASONS},
            {name: histogram.labels(*labels) for name, histogram in self._histograms.items()},
            self._store.replica(labels),
        )

    def follow(self, dp: int, look: Callable[[], Mapping[str, float]]) -> None:
        """Let the gauges of a replica show what `look` returns whenever they are asked for."""
        for name, (key, _) in GAUGES.items():
            self._gauges[name].labels(self._model, str(dp)).set_function(partial(_value, look, key))

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


def _value(look: Callable[[], Mapping[str, float]], key: str) -> float:
    return look()[key]


class ReplicaMetrics(Observer):
    """One replica's share of them."""

    def __init__(
        self,
        counters: Mapping[str, Any],
        by_source: Mapping[str, Any],
        success: Mapping[str, Any],
        histograms: Mapping[str, Any],
        store: StoreMetrics,
    ) -> None:
        self._counters = counters
        self._by_source = by_source
        self._success = success
        self._histograms = histograms
        self.store = store

    def admitted(self, request: Request) -> None:
        """As vLLM counts them: the external cache is asked for what the local one has not."""
        tokens = request.num_prompt_tokens
        if request.keys:
            self._counters["vllm:prefix_cache_queries"].inc(tokens)
            self._counters["vllm:prefix_cache_hits"].inc(request.local_tokens)
        self._counters["vllm:external_prefix_cache_queries"].inc(tokens - min(tokens, request.local_tokens))
        self._counters["vllm:external_prefix_cache_hits"].inc(request.external_tokens)

    def first_token(self, request: Request, computed: int) -> None:
        """The last prompt token counts as computed here even where its KV was handed over."""
        times, tokens = request.times, request.num_tokens
        local = min(request.local_tokens, tokens - computed)
        self._by_source["local_compute"].inc(computed)
        self._by_source["local_cache_hit"].inc(local)
        self._by_source["external_kv_transfer"].inc(tokens - computed - local)
        if times.first_token is None:  # not one that began anew after a replica's death
            self._counters["vllm:prompt_tokens"].inc(tokens)
            now, began = time.monotonic(), times.computing or times.arrived
            self._histograms["vllm:time_to_first_token_seconds"].observe(now - times.arrived)
            self._histograms["vllm:request_queue_time_seconds"].observe(began - times.arrived)
            self._histograms["vllm:request_prefill_time_seconds"].observe(now - began)
        self._counters["vllm:generation_tokens"].inc()

    def token(self, request: Request, seconds: float) -> None:  # noqa: ARG002  (the observer's signature)
        """Every token but the first."""
        self._counters["vllm:generation_tokens"].inc()
        self._histograms["vllm:inter_token_latency_seconds"].observe(seconds)

    def finished(self, request: Request, reason: str) -> None:
        """Requests by how they ended."""
        now, first = time.monotonic(), request.times.first_token
        self._success[reason].inc()
        self._histograms["vllm:e2e_request_latency_seconds"].observe(now - request.times.arrived)
        if first is not None:
            self._histograms["vllm:request_decode_time_seconds"].observe(now - first)

    def recomputed(self, tokens: int) -> None:
        """Tokens of failed loads."""
        self._counters["vllm:kvik_tokens_recomputed"].inc(tokens)

    def handover(self, data: Mapping[str, Any]) -> None:
        """Counts of a rank or of the scheduler side since the last time."""
        stats = LoadStats(data)
        for seconds in stats.data.get("durations", ()):
            self._histograms["vllm:kvik_load_seconds"].observe(seconds)
        for name, prefix in HANDOVER.items():
            if (amount := stats.total(prefix)) > 0:
                self._counters[name].inc(amount)

    def step(self, seconds: float, *, late: bool) -> None:
        """One step, and whether the machine could not keep up with the compute model."""
        self._counters["kvik_emulator_steps"].inc()
        self._counters["kvik_emulator_modelled_seconds"].inc(seconds)
        if late:
            self._counters["kvik_emulator_late_steps"].inc()
