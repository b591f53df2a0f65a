"""The prefill side's scheduler half of a handover in parts (`streaming.py`): which segments a step completes.

One `Sending` a request, from its arrival until all of its segments are planned. With every step the serving
engine says which requests it computes and how far: a segment whose last token is among these is planned, and
the workers issue the grants of its parts as its layers are written.

Each planned segment is held by references of our own on its blocks (`holding.py`), taken before the engine
can give them to anybody else. So a request that is preempted, aborted or done takes nothing from a reader,
and a granted block is never written again: what ends first is the grant.

Blocks that the engine found in its prefix cache are treated like those that it computes: they may belong to
another request of this very step, and are written only as it goes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvik.handover import digest, streaming
from kvik.handover.holding import HeldBlocks
from kvik.handover.protocol import (
    LINK_BYTES,
    PROTOCOL_VERSION,
    KvShape,
    RefusedError,
    SegmentSend,
    params_of,
)
from kvik.handover.streaming import Division, grant_id, part_bytes, stream_id

logger = logging.getLogger("kvik.handover")


@dataclass
class Scheduled:
    """One request in one engine step: so many of its tokens are there when the step begins, and so many are
    computed by it. `blocks`: new ones, or all where it starts (again)."""

    request_id: str
    blocks: Sequence[int]
    starts: bool
    computed: int
    scheduled: int


class Steps(Protocol):
    """An adapter's view of its engine's step: what of these requests it computes."""

    def __call__(self, wanted: Mapping[str, Sending]) -> list[Scheduled]: ...


@dataclass
class Sending:
    """One request's handover in parts. `check` raises RefusedError where its KV is not certain to be of
    `chain` (any more). `local`: how many of its tokens were in the engine's own cache when it was last asked;
    more, at its start, came from elsewhere, and may turn out not to have come."""

    request_id: str
    seed: bytes
    chain: bytes
    num_tokens: int
    check: Callable[[], None]
    local: int = 0
    blocks: list[int] = field(default_factory=list)
    planned: int = 0
    broken: str | None = None


@dataclass(frozen=True)
class Ended:
    """A request that has ended; `whole`: all of its prompt was handed over in parts."""

    sending: Sending
    whole: bool


class Sendings:
    """The requests that are handed over in parts, of a server with one group of layers."""

    def __init__(
        self, held: HeldBlocks, shape: KvShape, ranks: Sequence[int], template: dict[str, Any]
    ) -> None:
        self._held = held
        self.template = template
        self._shape = shape
        self._division = Division.of(shape)
        self._open: dict[str, Sending] = {}
        self._keys = itertools.count(1)
        ranges = {rank: self._division.layers(shape.stages[rank // shape.tp]) for rank in ranks}
        self._parts = {
            rank: tuple(part_bytes(shape, shape, rank, layers) for layers in of_rank)
            for rank, of_rank in ranges.items()
        }

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def answer(self) -> dict[str, Any]:
        """What `kvik` of an answer's parameters says of streams."""
        return {"version": PROTOCOL_VERSION, "stream": self.template}

    def begin(self, request: Any, chain: Callable[[], bytes], check: Callable[[], None]) -> None:
        """A request has arrived; `chain` makes the content of its prompt, `check` as of `Sending`.
        `RefusedError` says why one that is to be handed over in parts is not."""
        params = params_of(request)
        asked = streaming.asked(params) if params.get("do_remote_decode") else None
        if asked is None or asked.seed is None:
            return
        if digest.canonical(asked.template) != digest.canonical(self.template):
            raise RefusedError("stream_template", "its template is not of this server as it runs now")
        if not self._held.can_take:
            raise RefusedError("stream_pool", "this serving engine shows no pool of KV blocks")
        request_id, num_tokens = request.request_id, request.num_prompt_tokens
        self._open[request_id] = Sending(request_id, asked.seed, chain(), num_tokens, check)

    def found(self, request_id: str, local: int) -> None:
        """The engine has so many of a request's tokens in its own cache, and asks for more."""
        if (sending := self._open.get(request_id)) is not None:
            sending.local = local

    def plan(self, steps: Steps, loading: bool = False) -> list[SegmentSend]:
        """The segments that are complete when the step has run. Their blocks are held from now on. loading:
        another connector loads KV now, for this step or one before it, and may turn out not to have."""
        planned = []
        for one in steps(self._open) if self._open else ():
            sending = self._open[one.request_id]
            if one.starts:
                sending.blocks = list(one.blocks)
                if one.computed > sending.local:
                    sending.broken = "some of its KV comes from another connector"
                elif loading and one.computed:
                    sending.broken = "some of its KV may be what another connector is loading"
            else:
                sending.blocks.extend(one.blocks)
            if sending.broken is None:
                planned += self._segments(sending, one.computed + one.scheduled)
        return planned

    def _segments(self, sending: Sending, computed: int) -> list[SegmentSend]:
        segments, tokens = self._division.segments(sending.num_tokens), self._shape.block_tokens
        made = []
        for number, (first, end) in list(enumerate(segments))[sending.planned :]:
            if end > computed:
                break
            try:
                sending.check()
            except RefusedError as refused:
                sending.broken = str(refused)
                break
            begin, until = first // tokens, -(-end // tokens)
            if len(sending.blocks) < until:
                sending.broken = "not all of its KV blocks are known"
                break
            made.append(
                SegmentSend(
                    # An id of a request came in a header, and has no end of a line.
                    key=f"\n{next(self._keys)}",
                    request_id=sending.request_id,
                    stream_id=stream_id(sending.seed),
                    segments=len(segments),
                    blocks=sending.blocks[begin:until],
                    chain=sending.chain[begin * LINK_BYTES : until * LINK_BYTES],
                    grants={
                        rank: tuple(grant_id(sending.seed, rank, number, part) for part in range(len(parts)))
                        for rank, parts in self._parts.items()
                    },
                    parts=self._parts,
                )
            )
            self._held.take(made[-1].key, made[-1].blocks)
            sending.planned += 1
        return made

    def end(self, request_id: str) -> Ended:
        """A request that is handed over in parts has ended."""
        sending = self._open.pop(request_id)
        whole = sending.planned == len(self._division.segments(sending.num_tokens))
        told = "while they were computed" if whole else f"in part ({sending.broken or 'it has ended early'})"
        logger.info(
            "kvik: request %s: %d tokens handed over %s, in %d segments, as %s", request_id,
            sending.num_tokens, told, sending.planned, streaming.stream_id(sending.seed),
        )  # fmt: skip
        return Ended(sending, whole)
