"""A prefill server that hands requests over in parts, over the servers of `handover_harness.py`.

`Prefill` has what a serving engine's scheduler has of it: a pool of KV blocks with reference counts, and
requests that are computed in chunks, layer by layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvik.handover.sending import Scheduled
from tests.python.handover_harness import Rank, Side, Status, StepResult, request

SEED = "5a" * 32


class Pool:
    """A pool of KV blocks: reference counts. Its first block is never free."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks
        self.blocks: list[Any] = [SimpleNamespace(ref_cnt=0) for _ in range(blocks)]

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0, "a block is freed twice"
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return sum(not block.ref_cnt for block in self.blocks[1:])

    def used(self) -> set[int]:
        return {number for number, block in enumerate(self.blocks) if block.ref_cnt}


@dataclass
class Running:
    """A request that prefill computes."""

    request: Any
    blocks: list[int]
    computed: int = 0
    started: bool = False


@dataclass
class Prefill:
    """The prefill server `side`, and its requests."""

    side: Side
    pool: Pool = field(init=False)
    running: dict[str, Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = Pool(len(self.side.ranks[0].memory[0]))
        self.offered: set[int] = set()
        self.side.scheduler.held.bind(self.pool)

    def template(self, tokens: list[int], blocks: list[int]) -> dict[str, Any]:
        """What an answer says to who asks; its own offer is taken back by nobody."""
        done = request(
            "asks", tokens, {"do_remote_decode": True, "kvik": {"stream": {}}},
            status=Status.FINISHED_LENGTH_CAPPED, num_computed_tokens=len(tokens),
        )  # fmt: skip
        held, params = self.side.scheduler.request_finished(done, (blocks,))
        assert held
        assert params is not None
        self.offered.update(blocks)
        return dict(json.loads(json.dumps(params))["kvik"]["stream"])

    def streams(self) -> set[int]:
        """The KV blocks in use but for the offer of a template, which is parked after two seconds."""
        return self.pool.used() - self.offered

    def begin(
        self, tokens: list[int], blocks: list[int], template: dict[str, Any], *, local: int = 0,
        seed: str = SEED, request_id: str = "p-1", **more: Any,
    ) -> None:  # fmt: skip
        """A request arrives, of which so many tokens are in the prefix cache."""
        params = {"do_remote_decode": True, "kvik": {"stream": {"seed": seed, "of": template}}}
        arriving = request(request_id, tokens, params, **more)
        self.side.scheduler.on_new_request(arriving)
        assert self.side.scheduler.get_num_new_matched_tokens(arriving, local) == (0, False)
        self.pool.touch([self.pool.blocks[block] for block in blocks])
        self.running[request_id] = Running(arriving, blocks, local)

    def chunk(
        self,
        until: int,
        request_id: str = "p-1",
        *,
        between: Callable[[Rank, int], None] = lambda _rank, _layer: None,
        layers: int | None = None,
        says: bool = True,
        loading: bool = False,
    ) -> StepResult:
        """Compute a request's tokens up to `until` in one step. between: called before each layer of a rank.
        layers: how many are written before the step fails. says: which layers are written. loading: another
        connector loads KV now."""
        one = self.running[request_id]
        tokens = self.side.shape.block_tokens
        known = -(-one.computed // tokens) if one.started else 0
        new = one.blocks[known : -(-until // tokens)]
        scheduled = Scheduled(request_id, new, not one.started, one.computed, until - one.computed)

        def forward(rank: Rank) -> None:
            count = rank.layers[1] - rank.layers[0]
            for layer in range(count if layers is None else layers):
                between(rank, layer)
                if says:
                    rank.compute_layer(layer, one.blocks, range(one.computed, until))
            if not says:
                rank.compute(rank.kv, one.blocks, range(one.computed, until))

        result = self.side.step([scheduled], forward, loading)
        one.started, one.computed = True, until
        return result

    def preempt(self, blocks: list[int], request_id: str = "p-1", local: int = 0) -> None:
        """Free a request's blocks; it begins again in others."""
        one = self.running[request_id]
        self.pool.free_blocks([self.pool.blocks[block] for block in one.blocks])
        assert self.side.scheduler.get_num_new_matched_tokens(one.request, local) == (0, False)
        self.pool.touch([self.pool.blocks[block] for block in blocks])
        one.blocks, one.computed, one.started = blocks, local, False

    def finish(self, request_id: str = "p-1", status: Status = Status.FINISHED_LENGTH_CAPPED) -> Any:
        """The request ends; its answer's parameters."""
        one = self.running.pop(request_id)
        one.request.num_computed_tokens, one.request.status = one.computed, status
        held, params = self.side.scheduler.request_finished(one.request, (one.blocks,))
        if not held:
            self.pool.free_blocks([self.pool.blocks[block] for block in one.blocks])
        return params


def decode_params(template: dict[str, Any], seed: str = SEED) -> dict[str, Any]:
    """What decode is sent."""
    stream = {"seed": seed, "of": template}
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvik": {"stream": stream}}
