"""The options of one emulated server, and what follows from them."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from kvik.bench.facts import memory_available
from kvik.emulator.api import Bounds
from kvik.emulator.compute import parse_compute
from kvik.emulator.faults import Fault, parse_fault
from kvik.emulator.memory import pages_in
from kvik.emulator.rank import Setup
from kvik.emulator.replica import ReplicaPlan
from kvik.emulator.scheduler import Limits
from kvik.emulator.store_option import StoreOption, StorePlan, parse_store
from kvik.emulator.tokens import FIRST_WORD_TOKEN
from kvik.errors import InvalidArgument
from kvik.handover.config import ConnectorConfig
from kvik.handover.digest import canonical
from kvik.handover.scheduler import Identity
from kvik.shapes import ModelShape

# Changes whenever the same tokens would give other bytes (`kvik.emulator.content`).
FUNCTION = "1"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of `kvik.config.EMULATOR`; sizes in bytes, times in seconds."""

    role: str
    model_shape: str
    host: str
    port: int
    tp: int
    dp: int
    page_tokens: int
    kv_memory: int
    plain_memory: bool
    prefix_cache: bool
    transport: str
    listen: tuple[str, ...]
    report_file: str | None
    store: str | None
    compute: str
    load_failure: str
    reread: int
    fault: tuple[str, ...] | None
    allow_faults: bool
    drain: int

    def plan(self) -> ReplicaPlan:
        """What each replica is made from; `InvalidArgument` names the option that cannot be."""
        shape = ModelShape.resolve(self.model_shape)
        shape.check_tp(self.tp)
        if shape.vocab_size < FIRST_WORD_TOKEN:
            raise InvalidArgument(
                f"{shape.name} has {shape.vocab_size} tokens; text needs at least {FIRST_WORD_TOKEN} here"
            )
        pages = pages_in(shape, self.page_tokens, self.tp, self.kv_memory)
        store = None if self.store is None else parse_store(self.store)
        self._check_memory(shape, pages, store)
        connector = {
            name: value
            for name in ("listen", "transport", "report_file")
            if (value := getattr(self, name)) is not None
        }
        # The connector's other options are its own, by their variables or the file.
        namespace = ConnectorConfig.from_extra(connector).namespace or shape.name
        model = {"model": f"kvik-emulator:{namespace}", "function": FUNCTION, "dtype": shape.dtype}
        compute = parse_compute(self.compute)
        return ReplicaPlan(
            setup=Setup(
                role=self.role,
                shape=shape,
                tp=self.tp,
                tp_rank=0,
                dp_rank=0,
                page_tokens=self.page_tokens,
                pages=pages,
                plain_memory=self.plain_memory,
                connector=connector,
                store=None if store is None else StorePlan(store, model["model"], f"{FUNCTION}:{shape.name}"),
                log_level=logging.getLogger().getEffectiveLevel(),
            ),
            identity=Identity(
                engine_id=str(uuid.uuid4()),
                model=model,
                ranks=self.tp,
                is_producer=self.role in ("prefill", "both"),
                is_consumer=self.role in ("decode", "both"),
            ),
            namespace=canonical(model),
            limits=Limits(
                page_tokens=self.page_tokens,
                step_tokens=compute.step_tokens,
                sequences=compute.sequences,
                vocab_size=shape.vocab_size,
                prefix_cache=self.prefix_cache,
                recompute=self.load_failure == "recompute",
                reread=self.reread,
            ),
            compute=compute,
        )

    def _check_memory(self, shape: ModelShape, pages: int, store: StoreOption | None) -> None:
        ranks = self.tp * self.dp
        embedded = 0 if store is None else store.memory
        needed = (pages * shape.page_bytes(self.page_tokens, self.tp) + embedded) * ranks
        available = memory_available()
        if available is not None and needed > available:
            raise InvalidArgument(
                f"--kv-memory and --store: {ranks} rank(s) with {self.kv_memory} bytes of KV and {embedded} "
                f"of a store each need {needed}; this machine has {available} available. Give less, or a "
                "smaller --model-shape."
            )

    def bounds(self, plan: ReplicaPlan) -> Bounds:
        """What a request may ask for."""
        shape = plan.setup.shape
        return Bounds(shape.name, shape.vocab_size, shape.max_context, plan.setup.pages * self.page_tokens)

    def faults(self) -> tuple[Fault, ...]:
        """The faults that are ordered from the start."""
        return tuple(parse_fault(text, self.dp, self.tp) for text in self.fault or ())
