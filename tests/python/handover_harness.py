"""A server around `kvik.handover` without a serving engine: scheduler side, ranks, and KV in numpy arrays.

Every element of the KV says which layer, head and token it belongs to, so a read that is off by anything is
seen. The kvik engine underneath is the real one, or the stand-in of `fake_engine.py`.
"""

from __future__ import annotations

import enum
import json
import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvik.handover.config import ConnectorConfig
from kvik.handover.holding import HeldBlocks
from kvik.handover.mapping import heads_of
from kvik.handover.memory import KvMemory
from kvik.handover.native import Native
from kvik.handover.protocol import KvShape, RankPlace
from kvik.handover.report import ReportFile
from kvik.handover.scheduler import Identity, SchedulerSide
from kvik.handover.sending import Scheduled
from kvik.handover.worker import WorkerSide

ITEM = 4  # bytes of an element


class Status(enum.Enum):
    RUNNING = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()


def request(request_id: str, tokens: list[int], params: dict[str, Any] | None = None, **more: Any) -> Any:
    """A request, as far as a handover looks at it."""
    values = {
        "request_id": request_id, "prompt_token_ids": tokens, "num_prompt_tokens": len(tokens),
        "num_tokens": len(tokens), "num_computed_tokens": 0, "kv_transfer_params": params,
        "status": Status.RUNNING, "cache_salt": None, "lora_request": None, "mm_features": [],
        "prompt_embeds": None,
    }  # fmt: skip
    return SimpleNamespace(**(values | more))


def prompt(tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + tokens))


def across(thing: Any) -> Any:
    """What another process gets of an object."""
    return pickle.loads(pickle.dumps(thing))  # noqa: S301  (our own bytes)


def shape_of(
    tp: int = 1,
    kv_heads: int = 2,
    block_tokens: int = 4,
    *,
    kind: str = "gqa",
    layers: int = 2,
    stages: tuple[int, ...] = (),
    content: int = 3,
    order: str = "HNC",
) -> KvShape:
    """The shape of a server; `stages`, the layers of each pipeline stage, replaces `layers`."""
    stages = stages or (layers,)
    heads = max(1, kv_heads // tp)
    return KvShape(
        kind=kind, layers=sum(stages), kv_heads=kv_heads, content=content, dtype="float32", tp=tp,
        stages=stages, heads=heads, block_tokens=block_tokens, order=order,
        block_bytes=heads * block_tokens * content * ITEM,
    )  # fmt: skip


def kv_code(layer: int, head: int, token: int) -> int:
    """What the KV of one token of one head in one layer consists of; never 0."""
    return (layer * 64 + head) * 65536 + token + 1


Kv = npt.NDArray[np.uint32]  # [layers of the rank, blocks, heads of the rank, tokens of a block, content]


def compute(
    kv: Kv,
    block_tokens: int,
    layers: tuple[int, int],
    heads: tuple[int, int],
    blocks: list[int],
    tokens: range,
) -> None:
    """Write the KV of some of the model's layers and heads, for these tokens of a prompt in `blocks`."""
    for token in tokens:
        block, slot = blocks[token // block_tokens], token % block_tokens
        for number, layer in enumerate(range(*layers)):
            codes = [kv_code(layer, head, token) for head in range(*heads)]
            kv[number, block, :, slot, :] = np.asarray(codes, dtype=np.uint32)[:, None]


@dataclass
class StepResult:
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)


class Rank:
    """One worker rank and its KV; `kv` is a view of it whatever the order in memory."""

    def __init__(
        self,
        native: Native,
        role: str,
        place: RankPlace,
        server: KvShape,
        blocks: int,
        report: Path,
        transport: str,
    ) -> None:
        self.layers = server.layers_of(place.pp)
        mine = server.stages[place.pp]
        shape = replace(server, layers=mine, stages=(mine,))
        sizes = {"H": shape.heads, "N": shape.block_tokens, "C": shape.content}
        order = shape.order if len(shape.order) == len(sizes) else "HNC"  # "H[...]": any will do
        self.memory = np.zeros((shape.layers, blocks, *(sizes[letter] for letter in order)), dtype=np.uint32)
        self.kv: Kv = self.memory.transpose(0, 1, *(2 + order.index(letter) for letter in "HNC"))
        self.heads = heads_of(place.tp, shape.tp, shape.kv_heads)
        self.block_tokens = shape.block_tokens
        config = ConnectorConfig(transport=transport)
        self.worker = WorkerSide(native, config, role, place, ReportFile(str(report)))
        memory = KvMemory(
            address=self.memory.ctypes.data,
            nbytes=self.memory.nbytes,
            num_blocks=blocks,
            block_stride=shape.block_bytes,
            layers=tuple(str(layer) for layer in range(*self.layers)),
            layer_offsets=[layer * blocks * shape.block_bytes for layer in range(shape.layers)],
            head_stride=shape.block_bytes // shape.heads,
            shape=shape,
            owner=self.memory,
        )
        self.worker.register([memory])

    def compute_layer(self, layer: int, blocks: list[int], tokens: range) -> None:
        """Write one of the rank's layers (counted from its first), and say so as a serving engine does."""
        first = self.layers[0] + layer
        compute(self.kv[layer : layer + 1], self.block_tokens, (first, first + 1), self.heads, blocks, tokens)
        self.worker.saved(str(first))

    def compute(self, kv: Kv, blocks: list[int], tokens: range) -> None:
        """Write this rank's part of the KV of these tokens of a prompt that lies in `blocks`."""
        compute(kv, self.block_tokens, self.layers, self.heads, blocks, tokens)


class Side:
    """One server. `role` is "prefill" or "decode"; `native` the module `kvik` or its stand-in."""

    def __init__(
        self,
        native: Any,
        role: str,
        shape: KvShape,
        folder: Path,
        *,
        blocks: int = 24,
        transport: str = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.native, self.shape, self.report = native, shape, folder / f"{role}.jsonl"
        identity = Identity(
            engine_id=role,
            model={"model": "tiny"},
            ranks=shape.ranks,
            is_producer=role == "prefill",
            is_consumer=role == "decode",
            streams=True,
        )
        held = HeldBlocks(2.0, shape.ranks, clock)
        self.scheduler = SchedulerSide(native, identity, 120.0, held, ReportFile(str(self.report)))
        places = [
            RankPlace(tp, shape.tp, pp, len(shape.stages))
            for pp in range(len(shape.stages))
            for tp in range(shape.tp)
        ]
        self.ranks = [Rank(native, role, place, shape, blocks, self.report, transport) for place in places]
        self.scheduler.set_ranks(
            {number: across(rank.worker.hello()) for number, rank in enumerate(self.ranks)}
        )
        self.reported: Counter[tuple[str, str]] = Counter()

    def close(self) -> None:
        """End the ranks' engines."""
        for rank in self.ranks:
            rank.worker.close()

    def step(
        self,
        computes: Sequence[Scheduled] = (),
        forward: Callable[[Rank], None] = lambda _: None,
        loading: bool = False,
    ) -> StepResult:
        """One engine step; an id counts when all ranks have reported it. `computes`: the requests that it is
        about, `forward` what a rank does for them, `loading` whether another connector loads KV now."""
        plan = across(self.scheduler.take_plan(lambda _: list(computes), loading))
        result, ends, failures = StepResult(), Counter[str](), dict[str, str]()
        for rank in self.ranks:
            rank.worker.begin_step(plan)
            forward(rank)
            for kind, ids, done in zip(
                ("sent", "received"), rank.worker.collect(), (result.sent, result.received), strict=True
            ):
                for request_id in ids:
                    self.reported[kind, request_id] += 1
                    assert self.reported[kind, request_id] <= len(self.ranks), f"{request_id} {kind} twice"
                    if self.reported[kind, request_id] == len(self.ranks):
                        done.add(request_id)
            result.invalid |= rank.worker.take_invalid_blocks()
            ends.update(rank.worker.take_parked_ends())
            failures |= rank.worker.take_failures()
        output = SimpleNamespace(finished_sending=result.sent, finished_recving=result.received)
        self.scheduler.update_output(output, ends, failures)
        return result

    def write(self, blocks: list[int], tokens: range) -> None:
        """Compute the KV of these tokens of a prompt that lies in `blocks`."""
        for rank in self.ranks:
            rank.compute(rank.kv, blocks, tokens)

    def offer(self, tokens: list[int], blocks: list[int], request_id: str = "p-1") -> dict[str, Any]:
        """Prefill a prompt and offer its KV; the parameters, through JSON."""
        self.write(blocks, range(len(tokens)))
        done = request(request_id, tokens, {"do_remote_decode": True}, status=Status.FINISHED_LENGTH_CAPPED)
        done.num_computed_tokens = len(tokens)
        held, params = self.scheduler.request_finished(done, (blocks,))
        assert held
        return dict(json.loads(json.dumps(params)))

    def admit(self, wanted: Any, blocks: list[int], local_tokens: int = 0) -> int:
        """Ask for a load into `blocks`; the tokens that it brings."""
        self.scheduler.on_new_request(wanted)
        external, _ = self.scheduler.get_num_new_matched_tokens(wanted, local_tokens)
        assert external is not None
        self.scheduler.update_state_after_alloc(wanted, (blocks,), external)
        return external

    def holds(self, blocks: list[int], tokens: range) -> bool:
        """Whether every head of every rank has these tokens of a prompt in `blocks`, and nothing else."""
        for rank in self.ranks:
            right = np.zeros_like(rank.kv)
            rank.compute(right, blocks, tokens)
            if not np.array_equal(rank.kv[:, blocks], right[:, blocks]):
                return False
        return True

    def records(self) -> list[dict[str, Any]]:
        """The lines of the report file."""
        return [json.loads(line) for line in self.report.read_text().splitlines()]
