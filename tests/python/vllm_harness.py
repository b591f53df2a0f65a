"""vLLM's side of the connector contract, as far as tests need it: its real base class, and a scripted engine.

`stand_in(version)` puts vLLM's own `base.py` and `metrics.py` of one release into `sys.modules`, over empty
stand-ins for what they import, and imports `kvik.vllm` afresh against them. `Server` then drives a
scheduler-side connector and its worker-side connectors through steps in the order of vLLM's runner.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import importlib.util
import inspect
import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from tests.python.fake_engine import FakeNative
from tests.python.handover_harness import Status, across, prompt, request

__all__ = ["Status", "across", "prompt", "request"]  # from the harness without an engine

ROOT = Path(__file__).resolve().parents[2]
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
Blocks = list[int] | tuple[list[int], ...]  # of one group, or of each
REPLACED = (
    "vllm", "torch", "prometheus_client", "msgspec", "zmq",
    "kvik.vllm", "kvik.handover", "kvik.serving_cache",
)  # fmt: skip


def base_tool() -> ModuleType:
    """`tools/vllm_base.py`, which knows the pinned releases and fetches their files."""
    return _load("vllm_base", ROOT / "tools" / "vllm_base.py")


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


VERSIONS = sorted(base_tool().PINNED)


class _Empty(ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class Struct:
    """msgspec's base class of vLLM's events: fields by their annotations, and no others."""

    __struct_fields__: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **_: Any) -> None:
        cls.__struct_fields__ = (*cls.__struct_fields__, *inspect.get_annotations(cls))

    def __init__(self, **given: Any) -> None:
        unknown = given.keys() - set(self.__struct_fields__)
        if unknown:
            raise TypeError(f"Unexpected keyword argument {unknown}")
        for name in self.__struct_fields__:
            if name not in given and not hasattr(type(self), name):
                raise TypeError(f"Missing required argument {name!r}")
            setattr(self, name, given.get(name, getattr(type(self), name, None)))


class CacheHitSource(enum.Enum):
    P2P = "p2p"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


class Factory:
    """vLLM's register of connectors: a name is taken once."""

    known: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls.known:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.known[name] = (module_path, class_name)


class Current:
    """vLLM's current config, which it sets while it builds workers' connectors."""

    config: ClassVar[Any] = None

    @classmethod
    def get(cls) -> Any:
        return cls.config

    @classmethod
    @contextlib.contextmanager
    def set(cls, config: Any) -> Iterator[None]:
        before, cls.config = cls.config, config
        try:
            yield
        finally:
            cls.config = before


@contextlib.contextmanager
def stand_in(version: str) -> Iterator[ModuleType]:
    """Give `kvik.vllm`, imported against vLLM `version`'s own base class."""
    folder = base_tool().fetch(version)

    def replaced(name: str) -> bool:
        return any(name == prefix or name.startswith(prefix + ".") for prefix in REPLACED)

    saved = {name: module for name, module in sys.modules.items() if replaced(name)}
    for name in saved:
        del sys.modules[name]
    ours = logging.getLogger("kvik")  # the adapter lets it speak in vLLM's log
    level, handlers = ours.level, list(ours.handlers)
    try:
        for name in (
            "vllm", "vllm.logger", "vllm.config",
            "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend",
            "vllm.config.kv_events", "vllm.v1.kv_cache_interface", "vllm.v1.core.kv_cache_utils",
            "msgspec", "zmq", "vllm.utils", "vllm.utils.network_utils",
            "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.core.sched.output",
            "vllm.v1.outputs", "vllm.v1.metrics", "vllm.v1.metrics.cache_hit_source",
            "vllm.distributed", "vllm.distributed.parallel_state",
            "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector",
            "vllm.distributed.kv_transfer.kv_connector.factory", V1, "torch", "prometheus_client",
        ):  # fmt: skip
            sys.modules[name] = _Empty(name)
        sys.modules["vllm"].__version__ = version  # type: ignore[attr-defined]
        factory = sys.modules["vllm.distributed.kv_transfer.kv_connector.factory"]
        factory.KVConnectorFactory = Factory  # type: ignore[attr-defined]
        Factory.known.clear()
        sys.modules["vllm.logger"].init_logger = logging.getLogger  # type: ignore[attr-defined]
        sys.modules["vllm.config"].get_current_vllm_config_or_none = Current.get  # type: ignore[attr-defined]
        sys.modules["vllm.v1.metrics.cache_hit_source"].CacheHitSource = CacheHitSource  # type: ignore[attr-defined]
        _load_events(folder)
        for part in ("base", "metrics"):
            loaded = _load(f"{V1}.{part}", folder / V1.replace(".", "/") / f"{part}.py")
            setattr(sys.modules[V1], part, loaded)
        yield importlib.import_module("kvik.vllm")
    finally:
        ours.setLevel(level)
        ours.handlers[:] = handlers
        for name in [name for name in sys.modules if replaced(name)]:
            del sys.modules[name]
        sys.modules.update(saved)
        for name, module in saved.items():  # a package has its modules as attributes, too
            package, _, part = name.rpartition(".")
            if package:
                setattr(sys.modules[package], part, module)


def _load_events(folder: Path) -> None:
    """vLLM's own events, over stand-ins for what makes its hashes."""
    sys.modules["msgspec"].Struct = Struct  # type: ignore[attr-defined]
    utils: Any = sys.modules["vllm.v1.core.kv_cache_utils"]
    sys.modules["vllm.v1.core"].kv_cache_utils = utils  # type: ignore[attr-defined]
    utils.maybe_convert_block_hash = bytes
    utils.generate_block_hash_extra_keys = _extra_keys
    utils.to_event_extra_keys = list
    interface: Any = sys.modules["vllm.v1.kv_cache_interface"]
    sys.modules["vllm.v1"].kv_cache_interface = interface  # type: ignore[attr-defined]
    interface.get_kv_cache_spec_kind = lambda _: SimpleNamespace(value="full_attention")
    interface.get_kv_cache_spec_sliding_window = lambda _: None
    name = "vllm.distributed.kv_events"
    sys.modules["vllm.distributed"].kv_events = _load(name, folder / (name.replace(".", "/") + ".py"))  # type: ignore[attr-defined]


def _extra_keys(request: Any, start: int, _end: int, image: int) -> tuple[tuple[Any, ...] | None, int]:
    """As vLLM's: the salt is in the hash of the first block."""
    return ((request.cache_salt,) if request.cache_salt and not start else None), image


class _Storage:
    def __init__(self, nbytes: int) -> None:
        self._buffer = ctypes.create_string_buffer(nbytes)

    def data_ptr(self) -> int:
        return ctypes.addressof(self._buffer)

    def nbytes(self) -> int:
        return len(self._buffer)


@dataclass
class FakeTensor:
    """A KV tensor [B, H, N, C] with two-byte elements in some storage; `offset` and strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: Any
    offset: int = 0
    dtype: str = "torch.bfloat16"
    device: Any = field(default_factory=lambda: SimpleNamespace(type="cpu"))

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def dim(self) -> int:
        return len(self.shape)

    def element_size(self) -> int:
        return 2

    def untyped_storage(self) -> Any:
        return self.storage

    def data_ptr(self) -> int:
        return int(self.storage.data_ptr()) + 2 * self.offset


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense row-major array."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def kv_tensors(
    blocks: int, layers: int = 3, heads: int | None = 2, slots: int = 4, content: int = 8
) -> dict[str, Any]:
    """KV tensors as vLLM on CPU makes them: one storage, layers after each other. No heads: MLA's."""
    shape = (blocks, slots, content) if heads is None else (blocks, heads, slots, content)
    per_layer = math.prod(shape)
    storage = _Storage(layers * per_layer * 2)
    return {
        layer_name(layer): FakeTensor(shape, dense(shape), storage, layer * per_layer)
        for layer in range(layers)
    }


def vllm_config(
    role: str, tp: int = 1, extra: dict[str, Any] | None = None, kv_heads: int = 2, **parallel: Any
) -> Any:
    """A VllmConfig, as far as the connector looks at it; `kv_heads` are the model's."""
    sizes = {
        "tensor_parallel_size": tp, "pipeline_parallel_size": 1,
        "data_parallel_index": 0, "data_parallel_size": 1,
    }  # fmt: skip
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role=role,
            engine_id=f"engine-{role}",
            is_kv_producer=role in ("kv_producer", "kv_both"),
            is_kv_consumer=role in ("kv_consumer", "kv_both"),
            kv_connector_extra_config=extra or {},
            kv_load_failure_policy="recompute",
        ),
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        model_config=SimpleNamespace(
            model="tiny", revision=None, dtype="bfloat16", quantization=None,
            get_total_num_kv_heads=lambda: kv_heads,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )  # fmt: skip


class FullAttentionSpec:
    """Stands for vLLM's class of that name, by its name."""


class SlidingWindowSpec:
    """Likewise."""

    sliding_window = 6


def kv_cache_config(kinds: tuple[type, ...] = (FullAttentionSpec,), block_tokens: int = 4) -> Any:
    """A KVCacheConfig with one group a kind: three layers each, whose tensors are those of `kv_tensors`."""
    specs = [kind() for kind in kinds]
    for spec in specs:
        spec.block_size = block_tokens
    groups = [
        SimpleNamespace(
            kv_cache_spec=spec, layer_names=[layer_name(len(specs) * layer + group) for layer in range(3)]
        )
        for group, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups)


def layer_name(number: int) -> str:
    """As vLLM names a layer's attention."""
    return f"model.layers.{number}.attn"


class FakePool:
    """vLLM's block pool: reference counts. Its first block is never free."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks
        self.blocks = [SimpleNamespace(block_id=block, ref_cnt=0) for block in range(blocks)]

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return sum(not block.ref_cnt for block in self.blocks[1:])

    def used(self) -> set[int]:
        return {block.block_id for block in self.blocks if block.ref_cnt}


@dataclass
class StepResult:
    sent: set[str]
    received: set[str]
    invalid: set[int]
    failed: set[str]


class Server:
    """One vLLM server: a scheduler-side connector, its workers, and vLLM's bookkeeping around them."""

    def __init__(
        self,
        kvik_vllm: ModuleType,
        native: FakeNative,
        role: str,
        *,
        tp: int = 1,
        pp: int = 1,
        blocks: int = 16,
        extra: dict[str, Any] | None = None,
        model: str = "tiny",
        dims: Mapping[str, int | None] | None = None,
        kv_heads: int | None = None,
        kind: type = FullAttentionSpec,
        kinds: tuple[type, ...] = (),
        handshake: bool = True,
        policy: str = "recompute",
        kv_events: bool = False,
        multimodal: Any = None,
        encoders: Any = None,
        hf_config: Any = None,
        length: int = 4096,
        fitted: bool = False,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        """`dims` as of `kv_tensors`, of each rank; `kv_heads` are the model's where ranks have copies.
        `kinds`: of several groups of layers, whose KV lies in the same tensors. Without `handshake` vLLM
        carries that of another connector, and gives it to this one. kv_events: vLLM publishes them.
        multimodal, encoders: its settings of images, and of encoders on other servers. hf_config: of the
        model; length: of its longest request, and whether vLLM has fitted that to the memory;
        generation: what it is told of generating.
        """
        sys.modules["kvik.handover.native"].load = lambda: native  # type: ignore[attr-defined]
        base = sys.modules[f"{V1}.base"]
        sizes: dict[str, Any] = {"heads": 2, "slots": 4} | dict(dims or {})
        kinds = kinds or (kind,)
        cache = kv_cache_config(kinds, sizes["slots"])
        config = vllm_config(
            role, tp, extra, kv_heads or (sizes["heads"] or 1) * tp, pipeline_parallel_size=pp
        )
        config.model_config.model, config.model_config.hf_config = model, hf_config
        config.model_config.max_model_len = length
        config.model_config.override_generation_config = dict(generation or {})
        config.model_config.original_max_model_len = -1 if fitted else length
        config.model_config.multimodal_config, config.ec_transfer_config = multimodal, encoders
        config.kv_transfer_config.kv_load_failure_policy = policy
        config.kv_events_config = SimpleNamespace(enable_kv_cache_events=True) if kv_events else None
        make = kvik_vllm.KvikConnector
        self.scheduler = make(config, base.KVConnectorRole.SCHEDULER, cache)
        self.workers, self.tensors, hellos = [], [], {}
        state: Any = sys.modules["vllm.distributed.parallel_state"]
        for rank in range(tp * pp):
            place = divmod(rank, tp)
            state.get_pp_group, state.get_tp_group = (
                lambda number=number: SimpleNamespace(rank_in_group=number) for number in place
            )
            with Current.set(config):
                worker = make(config, base.KVConnectorRole.WORKER, cache)
            own = kv_tensors(blocks, **sizes)
            self.tensors.append(
                own
                if len(kinds) == 1
                else {
                    layer_name(len(kinds) * number + group): tensor
                    for number, tensor in enumerate(own.values())
                    for group in range(len(kinds))
                }
            )
            worker.register_kv_caches(self.tensors[rank])
            foreign = base.KVConnectorHandshakeMetadata()
            hellos[place] = across(worker.get_handshake_metadata()) if handshake else foreign
            self.workers.append(worker)
        self.scheduler.set_xfer_handshake_metadata_pp_aware(hellos)
        self.pool = FakePool(blocks)
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.scheduler._scheduler.held._clock = lambda: native.now
        self.sending: dict[str, list[int]] = {}
        self.known: set[str] = set()
        self.reported: Counter[tuple[str, str]] = Counter()
        self.stats: list[dict[str, Any]] = []
        self.events: list[Any] = []

    def plan(self, output: Any = None) -> Any:
        """What the workers are told of a step. output: vLLM's SchedulerOutput, where it computes anything."""
        return across(self.scheduler.build_connector_meta(output or scheduler_output()))

    def step(self, output: Any = None, not_filled: Collection[int] = ()) -> StepResult:
        """One engine step, in the order of vLLM's model runner; ids count when all ranks reported them.
        output: as of `plan`; not_filled: KV blocks that another connector names."""
        meta = self.plan(output)
        result = StepResult(set(), set(), set(not_filled), set())
        worker_meta = None
        for worker in self.workers:
            worker.handle_preemptions(meta)
            worker.bind_connector_metadata(meta)
            worker.start_load_kv(None)
            worker.wait_for_layer_load("model.layers.0.attn")
            worker.save_kv_layer("model.layers.0.attn", None, None)
            worker.wait_for_save()
            self._collect(worker, result)
            more = across(worker.build_connector_worker_meta())
            worker_meta = worker_meta.aggregate(more) if worker_meta and more else worker_meta or more
            worker.clear_connector_metadata()
        reported = SimpleNamespace(
            finished_sending=result.sent,
            finished_recving=result.received,
            invalid_block_ids=result.invalid,
            kv_connector_worker_meta=worker_meta,
        )
        self.scheduler.update_connector_output(reported)
        self.events += self.scheduler.take_events()
        for request_id in result.sent:
            self.pool.free_blocks([self.pool.blocks[block] for block in self.sending.pop(request_id)])
        for side in (self.scheduler, *self.workers):
            if (stats := side.get_kv_connector_stats()) is not None:
                self.stats.append(dict(across(stats).data))
        return result

    def _collect(self, worker: Any, result: StepResult) -> None:
        base: Any = sys.modules[f"{V1}.base"]
        if hasattr(base.KVConnectorBase_V1, "get_transfer_results"):
            transfers = worker.get_transfer_results(set())
            sent, received = transfers.finished_sending, transfers.finished_recving
            assert transfers.failed_recving <= received, "vLLM waits for one that is only said to have failed"
            result.failed |= transfers.failed_recving
        else:
            sent, received = (ids or set() for ids in worker.get_finished(set()))
        result.invalid |= worker.get_block_ids_with_load_errors()
        for kind, ids, complete in (("sent", sent, result.sent), ("received", received, result.received)):
            for request_id in ids:
                assert request_id in self.known, f"unknown request id {request_id!r} was reported"
                self.reported[kind, request_id] += 1
                assert self.reported[kind, request_id] <= len(self.workers), (
                    f"{request_id!r} was reported twice"
                )
                if self.reported[kind, request_id] == len(self.workers):
                    complete.add(request_id)

    def arrive(self, arriving: Any) -> None:
        """A request reaches the scheduler."""
        self.known.add(arriving.request_id)
        self.scheduler.on_new_request(arriving)

    def prefill(
        self, request_id: str, tokens: list[int], blocks: Blocks, **more: Any
    ) -> dict[str, Any] | None:
        """Run a prefill to its end with max_tokens=1; return its parameters."""
        groups = groups_of(blocks)
        done = request(request_id, tokens, {"do_remote_decode": True, "do_remote_prefill": False}, **more)
        self.arrive(done)
        assert self.scheduler.get_num_new_matched_tokens(done, 0) == (0, False)
        self.scheduler.update_state_after_alloc(done, allocated(blocks), 0)
        self.step()
        while not self.scheduler._adapters.settled(done):  # it computes for longer than that takes
            time.sleep(0.001)
        done.num_computed_tokens = len(tokens)
        done.status = Status.FINISHED_LENGTH_CAPPED
        held, params = self.scheduler.request_finished_all_groups(done, groups)
        assert held == (params is not None)
        if held:
            self.sending[request_id] = [block for group in groups for block in group]
            self.pool.touch([self.pool.blocks[block] for block in self.sending[request_id]])
        return dict(params) if held else None

    def fill(self, block: int, value: int) -> None:
        """Write `value` to every byte of one KV block, in every layer of every rank."""
        for address, size in self._runs(block):
            ctypes.memset(address, value, size)

    def values(self, block: int) -> set[int]:
        """The byte values that one KV block holds, over all layers and ranks."""
        return {byte for address, size in self._runs(block) for byte in ctypes.string_at(address, size)}

    def _runs(self, block: int) -> Iterator[tuple[int, int]]:
        for tensors in self.tensors:
            for tensor in tensors.values():
                size = 2 * tensor.stride(0)
                yield tensor.data_ptr() + block * size, size

    def total(self, name: str) -> float:
        """Sum of one count over all steps, ranks and the scheduler."""
        return float(sum(stats.get(name, 0) for stats in self.stats))


def scheduler_output(
    new: Sequence[tuple[str, list[int], int, int]] = (),
    more: Sequence[tuple[str, list[int], int, int]] = (),
    loads: bool = False,
) -> Any:
    """vLLM's SchedulerOutput of one group: of requests that begin, and of others, each the request id, its KV
    blocks (all, or new ones), how many tokens are computed, and how many the step computes. loads: a
    connector loads KV during the step."""
    counts = {one[0]: one[3] for one in (*new, *more)}
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        has_sync_kv_loads=loads,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, blocks, computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[one[0] for one in more],
            new_block_ids=[(one[1],) for one in more],
            num_computed_tokens=[one[2] for one in more],
            resumed_req_ids=set(),
        ),
    )


def groups_of(blocks: Blocks) -> tuple[list[int], ...]:
    """KV blocks by group."""
    return blocks if isinstance(blocks, tuple) else (blocks,)


def allocated(blocks: Blocks) -> Any:
    """vLLM's KVCacheBlocks."""
    return SimpleNamespace(get_block_ids=lambda: groups_of(blocks))


def offer(
    p: Server, tokens: list[int], blocks: Blocks, request_id: str = "p-1", **more: Any
) -> dict[str, Any]:
    """Prefill `tokens` into `blocks` (filled with their own number), and send the parameters through JSON."""
    for block in (block for group in groups_of(blocks) for block in group):
        p.fill(block, block)
    params = p.prefill(request_id, tokens, blocks, **more)
    assert params is not None
    return dict(json.loads(json.dumps(params)))


def admit(d: Server, wanted: Any, blocks: Blocks, local_tokens: int = 0) -> int:
    """Ask for a load and allocate; return the external tokens (0: vLLM computes)."""
    if wanted.request_id not in d.known:
        d.arrive(wanted)
    until = time.monotonic() + 60.0
    while d.scheduler.get_num_new_matched_tokens(wanted, local_tokens)[0] is None:  # an image is being read
        assert time.monotonic() < until
        time.sleep(0.001)
    external, is_async = d.scheduler.get_num_new_matched_tokens(wanted, local_tokens)
    assert (external, is_async) == d.scheduler.get_num_new_matched_tokens(
        wanted, local_tokens
    )  # may be asked again
    assert is_async == (external > 0)
    d.scheduler.update_state_after_alloc(wanted, allocated(blocks), external)
    return int(external)


def grant_of(native: FakeNative, params: dict[str, Any], rank: int = 0) -> Any:
    ticket = native.Ticket(params["kvik"]["tickets"][rank]["ticket"])
    return native.engines[ticket.engine_id].grants[ticket.grant_id]
