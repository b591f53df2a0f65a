"""`KvikConnector`: vLLM's connector class, dispatching to the scheduler halves or the worker halves.

vLLM builds one instance in its scheduler process and one in each worker. This class translates vLLM's objects
into plain ones and holds no state of its own besides the halves that it is: that of handovers, and that of a
store where there is one. A request is loaded by a handover that was offered to it; else from the store. Hooks
that vLLM offers and that are not overridden here have nothing to do in this connector. Unused arguments are
vLLM's signatures."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvik.handover import native
from kvik.handover.adapters import Adapters
from kvik.handover.config import ConnectorConfig
from kvik.handover.holding import HeldBlocks
from kvik.handover.protocol import RankHello, RankPlace, StepPlan, server_shapes
from kvik.handover.report import ReportFile
from kvik.handover.scheduler import Identity, SchedulerSide
from kvik.handover.worker import WorkerSide
from kvik.serving_cache.config import CacheConfig
from kvik.serving_cache.ledger import Ledger
from kvik.serving_cache.naming import Naming
from kvik.serving_cache.plan import Answer, CachePlan, Kept, merged
from kvik.serving_cache.scheduler import CacheSide
from kvik.serving_cache.tiers import Tiers
from kvik.serving_cache.worker import CacheRank
from kvik.vllm import content, events, layout, log, steps
from kvik.vllm.observe import KvikPromMetrics, KvikStats

logger = logging.getLogger(log.NAME)

KV_SPECS = {"FullAttentionSpec": "gqa", "SlidingWindowSpec": "gqa", "MLAAttentionSpec": "mla"}
NULL_BLOCK = (
    0  # vLLM's KV block for what a window does not need any more (the first of its pool, 0.28 to 0.33)
)

IDLE_WAIT = 4e-3
"""Seconds that a step without tokens waits for a load, for what a store has of a prompt, or for the end of a
send, so that what comes meanwhile is seen by this step, not by the next: what a new request may wait beside
the millisecond that vLLM rests after each such step (0.28 to 0.33). On two shared cores a lookup took 0.7 ms,
a load of 2 MiB 1.0, one of 14 MiB 3.1: with 2 ms the last one was seen a step later, which made it 8.4 to 9.4
ms dearer than the engine's own cache in place of 6.9 to 7.4.
"""


class SetupError(ValueError):
    """This server's configuration is not served by this version; the text names what it is."""


@dataclass
class KvikHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker rank's hello, as vLLM carries it from the worker to the scheduler process."""

    hello: RankHello


@dataclass
class KvikMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's plan, as vLLM carries it from the scheduler process to the workers. asks: the scheduler side
    has not heard of the ranks yet, and wants their hellos. idle: the step computes no token."""

    plan: StepPlan = field(default_factory=StepPlan)
    asks: bool = False
    idle: bool = False
    cache: CachePlan | None = None


@dataclass
class KvikWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """On how many ranks kvik has done with what it holds itself, by request id, segment or save; the hellos
    that were asked for, by rank; what is in the store, by the number of the lookup; why loads of handovers
    have failed, by request id; what each rank has of saves, where KV events are on."""

    parked_ends: Counter[str]
    hellos: dict[int, RankHello] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    kept: dict[int, list[Kept]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvikWorkerMetadata:
        """Add another rank's."""
        return KvikWorkerMetadata(
            self.parked_ends + other.parked_ends,
            self.hellos | other.hellos,
            merged(self.answers, other.answers),
            self.failures | other.failures,
            self.kept | other.kept,
        )


class KvikConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefill/decode handover over kvik, and a store behind vLLM's prefix cache. See the package's
    documentation for the way of a request."""

    # Where loaded tokens came from, in vLLM's per-source counts (0.32 and later).
    _cache_hit_source = getattr(getattr(vllm_base, "CacheHitSource", None), "P2P", None)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log.adopt()
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        extra = dict(transfer.kv_connector_extra_config or {})
        self._cache_config = CacheConfig.from_extra(
            extra.pop("store", None), "kv_connector_extra_config: store"
        )
        config = ConnectorConfig.from_extra(extra)
        _check_setup(parallel, kv_cache_config)
        if self._cache_config.wanted:
            _check_store(vllm_config, kv_cache_config)
        self._groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        config.check_ranks(ranks, parallel.data_parallel_index, parallel.data_parallel_size)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._cache: CacheSide | None = None
        self._cache_rank: CacheRank | None = None
        self._events = events.of(vllm_config, kv_cache_config) if self._cache_config.wanted else None
        self._asked = self._idle = False
        self._flight = steps.Flight()
        report = ReportFile(config.report_file)
        module = native.load()
        if role is KVConnectorRole.SCHEDULER:
            identity = Identity(
                engine_id=str(transfer.engine_id),
                model=content.model_identity(vllm_config, config, self._cache_config),
                ranks=ranks,
                is_producer=bool(transfer.is_kv_producer),
                is_consumer=bool(transfer.is_kv_consumer),
                null_block=NULL_BLOCK if any(map(_window, _specs(kv_cache_config))) else None,
                # With microbatches (DBO) a layer is run twice a step, and written only by the second time.
                streams=not getattr(parallel, "enable_dbo", False),
            )
            held = HeldBlocks(config.park_after, identity.ranks)
            self._items, self._adapters = content.items_of(vllm_config), Adapters()
            self._scheduler = SchedulerSide(
                module, identity, config.expiry, held, report, self._items, self._adapters
            )
            if self._cache_config.wanted:
                model = content.model_content(vllm_config, identity.model, self._cache_config)
                ledger = None if self._events is None else Ledger(ranks, self._events.names)
                naming = Naming(module, model, self._items, self._adapters)
                self._cache = CacheSide(naming, self._cache_config, ranks, held, ledger=ledger)
        else:
            place = _place(parallel)
            if place.rank == 0:  # one warning a server
                _warn_of_policy(transfer)
            self._model_kv = [_model_kv(vllm_config, group) for group in kv_cache_config.kv_cache_groups]
            self._worker = WorkerSide(
                module,
                config,
                role="vllm-" + str(transfer.kv_role).removeprefix("kv_"),
                place=place,
                report=report,
                on_host=_on_host(parallel),
            )

    # Scheduler process.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM's block pool, to hold references of parked handovers."""
        self._on_scheduler().held.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        side = self._on_scheduler()
        self._items.arrived(request)
        side.on_new_request(request)
        if self._cache is not None:
            self._cache.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a load would bring beyond `num_computed_tokens`; a load is always asynchronous. None:
        ask again."""
        side = self._on_scheduler()
        tokens, loads = side.get_num_new_matched_tokens(request, num_computed_tokens)
        if self._cache is None:
            return tokens, loads
        if tokens != 0 or side.is_sending(request.request_id):
            self._cache.pass_over(request.request_id)
            return tokens, loads
        return self._cache.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ARG002
        """A handover brings all of the request's KV, so every group."""
        return tuple(range(len(self._groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks for the request are allocated."""
        block_ids, side = blocks.get_block_ids(), self._on_scheduler()
        if self._cache is not None and self._cache.offers(request.request_id):
            self._cache.update_state_after_alloc(request, block_ids[0], num_external_tokens)
            num_external_tokens = 0  # of a handover
        side.update_state_after_alloc(request, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Where the tokens of a load come from (vLLM 0.32 and later)."""
        source = vllm_base.CacheHitSource
        if self._cache is None or not self._cache.loads(request.request_id):
            return {source.P2P: num_external_tokens} if num_external_tokens else {}
        host, remote = self._cache.sources(request.request_id, num_external_tokens)
        told = {source.HOST: host, source.EXTERNAL_UNSPECIFIED: remote}
        return {name: tokens for name, tokens in told.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KvikMetadata:
        """This step's plan for the workers."""
        side = self._on_scheduler()
        self._flight.began(scheduler_output)
        plan = side.take_plan(lambda wanted: steps.scheduled(scheduler_output, wanted), self._flight.loading)
        idle = scheduler_output.total_num_scheduled_tokens == 0
        cache = None
        if self._cache is not None:
            self._cache.step_began(scheduler_output.num_scheduled_tokens.values())
        if self._cache is not None and side.has_ranks:
            cache = self._cache.take_plan(lambda wanted: steps.scheduled(scheduler_output, wanted))
        return KvikMetadata(plan, not side.has_ranks, idle, cache)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers reported with the last step."""
        meta, side = connector_output.kv_connector_worker_meta, self._on_scheduler()
        meta = meta if isinstance(meta, KvikWorkerMetadata) else KvikWorkerMetadata(Counter())
        if meta.hellos and not side.has_ranks:
            self._set_ranks(meta.hellos)
        side.update_output(connector_output, meta.parked_ends, meta.failures)
        invalid = connector_output.invalid_block_ids or ()
        if self._flight.loading:  # else they are of loads that are awaited, upon which nothing was computed
            side.not_filled(invalid)
        if self._cache is not None:
            received = connector_output.finished_recving or ()
            self._cache.update_output(received, invalid, meta.answers, meta.parked_ends, meta.kept)

    def take_events(self) -> Iterable[Any]:
        """What has come into the store and gone, as vLLM's KV events. vLLM asks at the end of each step, also
        where it publishes none (0.28 to 0.33), so that it is known here when the step has ended."""
        self._flight.ended()
        if self._cache is None:
            return ()
        self._cache.step_ended()
        return () if self._events is None else [*map(self._events.made, self._cache.take_events())]

    def has_pending_push_work(self) -> bool:
        """Whether an idle vLLM makes a step: KV blocks are held for saves, until they have ended; or what
        kvik holds for others was not looked at for a while, once. vLLM asks after each step, and when
        something else has woken it: so a pause finds free what readers have confirmed, and an idle engine
        sleeps on."""
        return (self._cache is not None and self._cache.pending) or self._on_scheduler().held.unseen

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended (vLLM without the hybrid memory allocator)."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. What is saved of it is held by references of kvik's own, so that its end is
        not put off."""
        side = self._on_scheduler()
        if self._cache is not None:
            self._cache.request_finished(request, block_ids[0])
        ended = side.request_finished(request, block_ids)
        self._items.forget(request)
        self._adapters.forget(request)
        return ended

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The ranks' hellos, by tensor-parallel rank."""
        self._hear(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The ranks' hellos, by pipeline stage and tensor-parallel rank."""
        self._hear(metadata.values())

    def _hear(self, metadata: Iterable[KVConnectorHandshakeMetadata]) -> None:
        """Take the ranks' hellos, where they are there. vLLM's `MultiConnector` carries those of one of its
        connectors only, and gives them to all: where that is another one, the first step asks for them.
        """
        hellos = {
            entry.hello.place.rank: entry.hello for entry in metadata if isinstance(entry, KvikHandshake)
        }
        if hellos:
            self._set_ranks(hellos)

    def _set_ranks(self, hellos: dict[int, RankHello]) -> None:
        side = self._on_scheduler()
        side.set_ranks(hellos)
        if self._cache is not None:
            self._cache.set_shape(server_shapes(hellos, len(hellos))[0])

    def reset_cache(self) -> bool | None:
        """Whoever does this may have changed the weights in place: handovers are with servers that were reset
        as often, and what is in the store is forgotten; there this server keeps to itself from now on.
        False, and nothing is done: KV blocks are in use, as those of a load that is on its way. vLLM has not
        emptied its own prefix cache then, and whoever has asked asks again, which must not count twice."""
        side = self._on_scheduler()
        if side.held.in_use or side.loading or (self._cache is not None and not self._cache.reset()):
            return False
        side.reset()
        return True

    # Worker process.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The KV tensors are allocated."""
        if len(self._groups) == 1:  # layers that share another one's KV may be in no group
            memories = [layout.inspect(kv_caches, self._model_kv[0])]
        else:
            memories = [
                layout.inspect({name: kv_caches[name] for name in names if name in kv_caches}, model)
                for names, model in zip(self._groups, self._model_kv, strict=True)
            ]
        device = next(iter(kv_caches.values())).device
        worker = self._on_worker()
        stream = _stream_of(device) if device.type == "cuda" else None
        worker.register(memories, stream)
        if self._cache_config.wanted:
            follows = self._events is not None
            tiers = Tiers(native.load(), self._cache_config, *worker.opened(), stream, follows)
            self._cache_rank = CacheRank(tiers, self._cache_config, worker.rank, follows)

    def get_handshake_metadata(self) -> KvikHandshake:
        """This rank's hello to the scheduler process."""
        return KvikHandshake(self._on_worker().hello())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: start its plan now; `start_load_kv` may come only after the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, KvikMetadata):
            self._asked, self._idle = connector_metadata.asks, connector_metadata.idle
            self._on_worker().begin_step(connector_metadata.plan)
            if self._cache_rank is not None and connector_metadata.cache is not None:
                self._cache_rank.begin_step(connector_metadata.cache)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to do: the step's loads were started when its plan was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """A layer's KV is written: what goes out in parts may be read. Nothing is saved, since the reader
        takes the blocks from the KV tensors themselves."""
        self._on_worker().saved(layer_name)

    def wait_for_save(self) -> None:
        """Nothing to wait for: sent blocks are held until their grant has ended. (vLLM calls this also where
        the forward pass has failed.)"""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Request ids whose sends and loads have ended (vLLM before 0.30).

        Failed loads are named by their blocks (`get_block_ids_with_load_errors`), which is exact for one KV
        cache group; those of a model with several are named by `get_transfer_results`.
        """
        sent, received = self._collect()
        return sent or None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        """Request ids whose sends and loads have ended, and which loads of several KV cache groups have
        failed (vLLM 0.30 and later)."""
        sent, received = self._collect()
        return vllm_base.KVConnectorTransferResults(sent, received, self._on_worker().take_failed())

    def _collect(self) -> tuple[set[str], set[str]]:
        wait, began, cache = IDLE_WAIT if self._idle else 0.0, time.monotonic(), self._cache_rank
        sent, received = self._on_worker().collect(wait, for_sends=cache is None or not cache.awaited)
        if cache is not None:
            cache.collect(wait - (time.monotonic() - began))
            received |= cache.take_received()
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """KV blocks that failed loads were to fill."""
        invalid = self._on_worker().take_invalid_blocks()
        return invalid if self._cache_rank is None else invalid | self._cache_rank.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KvikWorkerMetadata | None:
        """What vLLM's own output has no field for."""
        ends, hellos, answers = self._on_worker().take_parked_ends(), {}, {}
        failures = self._on_worker().take_failures()
        if self._asked:
            hello = self._on_worker().hello()
            self._asked, hellos = False, {hello.place.rank: hello}
        kept = {}
        if self._cache_rank is not None:
            ends, answers = ends + self._cache_rank.take_saved(), self._cache_rank.take_answers()
            if reports := self._cache_rank.take_kept():
                kept[self._on_worker().rank] = reports
        if not (ends or hellos or answers or failures):
            return None
        return KvikWorkerMetadata(Counter(ends), hellos, answers, failures, kept)

    # Both.

    def get_kv_connector_stats(self) -> KvikStats | None:
        """Counts since the last call."""
        if self._worker is not None:
            data = self._worker.take_stats().data
            data |= self._cache_rank.take_stats() if self._cache_rank is not None else {}
        else:
            data = dict(self._on_scheduler().take_counters())
            data |= self._cache.take_counters() if self._cache is not None else {}
        return KvikStats(data=data) if data else None

    def shutdown(self) -> None:
        """vLLM is going down; bounded by `close_timeout`."""
        if self._cache_rank is not None:
            self._cache_rank.close()
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvikStats:
        """Rebuild the counts in the front-end process."""
        return KvikStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvikPromMetrics:
        """Register `vllm:kvik_*`."""
        return KvikPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003
        """Whole graphs may be captured: what no hook has announced goes out when the next step begins."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """Sleep mode moves the KV tensors, and a registered region does not follow (asked by 0.33)."""
        return False

    def _on_scheduler(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("kvik: a scheduler hook was called on the worker's connector")
        return self._scheduler

    def _on_worker(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("kvik: a worker hook was called on the scheduler's connector")
        return self._worker


def _check_setup(parallel: Any, kv_cache_config: Any) -> None:
    """Refuse, by name, what this version does not hand over."""
    sizes = ("decode_context_parallel_size", "prefill_context_parallel_size")
    for name in sizes:
        if getattr(parallel, name, 1) != 1:
            raise SetupError(f"kvik hands over with {name} 1; this server has {getattr(parallel, name)}")
    kinds = [type(spec).__name__ for spec in _specs(kv_cache_config)]
    if not kinds:
        raise SetupError("this model has no KV cache: there is nothing to hand over")
    if any(kind not in KV_SPECS for kind in kinds):
        raise SetupError(
            f"kvik hands over KV of kind {' or '.join(sorted(KV_SPECS))}; this model's is "
            f"{' and '.join(kinds)}"
        )
    # Of the same kind; vLLM itself turns chunked prefill and prefix caching off for them.
    if any(getattr(spec, "non_causal", False) for spec in _specs(kv_cache_config)):
        raise SetupError(
            "kvik hands over and keeps KV that follows from the tokens up to it; in this model a prompt's "
            "tokens see all of the prompt (non_causal), so that KV of its beginning is of that prompt only"
        )
    if len(kinds) > 1 and not hasattr(vllm_base, "KVConnectorTransferResults"):
        raise SetupError(
            "kvik hands over models with several KV cache groups with vLLM 0.30 or later, which can be told "
            f"of a failed load of them; this model has {len(kinds)}: {kinds}"
        )


def _check_store(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse, by name, KV that cannot be kept in a store."""
    why = content.unkept(vllm_config, [_window(spec) for spec in _specs(kv_cache_config)])
    if why is not None:
        raise SetupError(why)


def _warn_of_policy(own: Any) -> None:
    """Warn where vLLM ends requests whose KV load fails. `own` is kvik's own part of the config.

    vLLM follows the policy of the server's config. A connector of a `MultiConnector` is given a copy of that
    config with its own part in place of the whole, whose policy nobody reads. Only a worker can see the
    whole: vLLM makes the server's config the current one while it builds workers' connectors (0.28 to 0.33).
    Where there is none, the policy is not known, and nothing is said of it.
    """
    current = get_current_vllm_config_or_none()
    if current is None or not own.is_kv_consumer:
        return
    if current.kv_transfer_config.kv_load_failure_policy == "fail":
        logger.warning(
            "kvik: kv_load_failure_policy is 'fail' (vLLM's default): a request whose KV load fails "
            'ends with an error. Add "kv_load_failure_policy": "recompute" to --kv-transfer-config '
            "(under MultiConnector: beside its kv_role, not in its list) to compute it here instead."
        )


def _specs(kv_cache_config: Any) -> list[Any]:
    """How vLLM keeps the KV of each group of layers."""
    return [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]


def _window(spec: Any) -> int:
    """How many tokens a token sees, where the KV blocks of others are dropped; 0: all before it. A full
    attention whose layers have windows keeps all blocks."""
    return int(spec.sliding_window) if type(spec).__name__ == "SlidingWindowSpec" else 0


def _model_kv(vllm_config: Any, group: Any) -> layout.ModelKv:
    """How many KV heads the model has, and how they are divided: by ranks, or not at all (MLA)."""
    spec = group.kv_cache_spec
    kind = KV_SPECS[type(spec).__name__]
    heads = 1 if kind == "mla" else int(vllm_config.model_config.get_total_num_kv_heads())
    ranks = vllm_config.parallel_config.tensor_parallel_size
    backends = _backends(vllm_config, group.layer_names)
    return layout.ModelKv(kind, heads, ranks, spec.block_size, _window(spec), backends)


def _backends(vllm_config: Any, layers: Iterable[str]) -> tuple[str, ...]:
    """The names of the attention backends that vLLM has chosen for these layers of this rank."""
    modules = vllm_config.compilation_config.static_forward_context
    known = [modules[name] for name in layers if hasattr(modules.get(name), "get_attn_backend")]
    return tuple(sorted({module.get_attn_backend().get_name() for module in known}))


def _stream_of(device: Any) -> Callable[[], Any]:
    """What gives the stream that vLLM's work on a GPU is launched on by the calling thread."""
    import torch

    return lambda: torch.cuda.current_stream(device)


def _on_host(parallel: Any) -> int:
    """How many ranks of this server are on this host, as far as vLLM says: those of a replica, without what
    other nodes have of it, times the replicas here. Of a model without experts it says 1 of these."""
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    local = int(getattr(parallel, "local_world_size", 0)) or ranks
    return local * max(1, int(getattr(parallel, "data_parallel_size_local", 1)))


def _place(parallel: Any) -> RankPlace:
    """Which worker rank this process is."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return RankPlace(
        tp=int(get_tp_group().rank_in_group),
        tp_size=parallel.tensor_parallel_size,
        pp=int(get_pp_group().rank_in_group),
        pp_size=parallel.pipeline_parallel_size,
        # Not `data_parallel_rank`: in each replica of a model without experts that is 0.
        dp=parallel.data_parallel_index,
    )
