"""How the prefill side's KV blocks are held until their reader has them.

At first by the serving engine's own means: the finished request keeps its blocks until the workers report it
as sent. In vLLM that is prompt, because it steps all the time while such a request exists; and it is
expensive for the same reason, several hundred steps a second on an otherwise idle engine. So a handover that
nobody has come for after a while is parked: this side takes a reference of its own on the blocks, the
engine's request ends, and an idle engine sleeps. A parked handover's end is noticed with the next step of any
kind: until then nobody asked for blocks, and a request that waits for blocks makes steps. (vLLM's usage
gauge, which only steps move, shows them as used until then.) Who resets the prefix cache, or pauses the
engine, needs them free as well and makes no step: so an engine that is awake is asked for one where the last
was a while ago (`HeldBlocks.unseen`). One that sleeps is not woken.

A handover in parts (`sending.py`) is held by references of this side from the beginning: its request may be
preempted or aborted while parts of it are being read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

SEEN_FOR_S = 1.0
"""Seconds that what a step has seen of held blocks is good for: how often a step is asked for, too."""


class BlockPool(Protocol):
    """A serving engine's pool of KV blocks, as far as it is used here: vLLM's is the same in 0.28 to 0.33.
    One of its blocks is nobody's, and never free."""

    blocks: list[object]
    num_gpu_blocks: int

    def touch(self, blocks: list[object]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[object]) -> None: ...
    def get_num_free_blocks(self) -> int: ...


@dataclass
class Parked:
    """A handover held by this side; `ranks` have still to say that their grant has ended."""

    blocks: list[int]
    ranks: int


class HeldBlocks:
    """The scheduler side's book of sent requests. Times are seconds of `clock`."""

    def __init__(self, park_after_s: float, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._park_after_s = park_after_s
        self._ranks = ranks
        self._clock = clock
        self._pool: BlockPool | None = None
        self._held: dict[str, tuple[float, list[int]]] = {}
        self._parked: dict[str, Parked] = {}
        self._seen_at = clock()

    def bind(self, pool: BlockPool) -> None:
        """Without a pool (an adapter may not get hold of it) nothing is ever parked."""
        self._pool = pool

    def hold(self, request_id: str, blocks: list[int]) -> None:
        """A finished request's blocks are held by its engine from now on."""
        self._held[request_id] = (self._clock(), blocks)

    def sent(self, request_ids: Iterable[str]) -> None:
        """The engine has let go of these requests."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    @property
    def unseen(self) -> bool:
        """Whether an engine that is awake should make a step: something that this side holds may have ended
        since the last one."""
        return bool(self._parked) and self._clock() - self._seen_at >= SEEN_FOR_S

    def park_overdue(self) -> list[str]:
        """A step begins, which sees what has ended: take references on the blocks of handovers that have
        waited long enough; their request ids."""
        self._seen_at = self._clock()
        overdue = []
        for request_id, (since, _) in self._held.items():
            if self._pool is None or self._clock() - since < self._park_after_s:
                break  # the oldest come first
            overdue.append(request_id)
        for request_id in overdue:
            _, blocks = self._held.pop(request_id)
            if self._pool is not None:
                self._pool.touch([self._pool.blocks[block] for block in blocks])
            self._parked[request_id] = Parked(blocks, self._ranks)
        return overdue

    @property
    def pool_blocks(self) -> int:
        """How many KV blocks the engine has; 0 where references cannot be taken."""
        return 0 if self._pool is None else len(self._pool.blocks)

    @property
    def in_use(self) -> bool:
        """Whether anybody has one of the engine's KV blocks, as far as that can be known: as vLLM asks itself
        before it empties its prefix cache."""
        pool = self._pool
        return pool is not None and pool.num_gpu_blocks - pool.get_num_free_blocks() != 1

    @property
    def can_take(self) -> bool:
        """Whether references can be taken at all."""
        return self._pool is not None

    def take(self, key: str, blocks: list[int]) -> None:
        """Take references on blocks at once, until all ranks have said that the grants of this `key` have
        ended. Only where `can_take`."""
        if self._pool is None:
            raise RuntimeError("kvik: blocks cannot be held without the serving engine's pool")
        self._pool.touch([self._pool.blocks[block] for block in blocks])
        self._parked[key] = Parked(list(blocks), self._ranks)

    def ended(self, counts: Mapping[str, int]) -> None:
        """So many ranks' grants have ended: after the last one the blocks go back, last block first."""
        for request_id, ranks in counts.items():
            parked = self._parked.get(request_id)
            if parked is None:
                continue
            parked.ranks -= ranks
            if parked.ranks <= 0 and self._pool is not None:
                del self._parked[request_id]
                self._pool.free_blocks(self._pool.blocks[block] for block in reversed(parked.blocks))
