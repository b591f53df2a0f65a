"""The prefill side's worker half of a handover in parts: each grant as soon as its layers are written.

A segment is planned for the step that completes it (`sending.py`). Within the step the serving engine says
which layer it has just written; the grant of a range of layers is issued when all of the range are. What it
did not say, as engines do not that run a whole graph at once, is granted when the next step begins: there is
one only if this one has succeeded, so that what a failed one was to write is never granted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvik.handover.native import Grant, Native
from kvik.handover.protocol import SegmentSend
from kvik.handover.streaming import Division

logger = logging.getLogger("kvik.handover")


class Granting(Protocol):
    """Issues one grant: over these blocks in these layers, with this content."""

    def __call__(
        self, request_id: str, blocks: Sequence[int], layers: tuple[int, int], grant_id: str,
        chain: bytes, part: bytes,
    ) -> Grant: ...  # fmt: skip


@dataclass
class OpenSegment:
    """A segment whose grants are being issued, or read. `parts`: ranges of layers that are still to come, by
    their number."""

    send: SegmentSend
    parts: dict[int, tuple[int, int]]
    grants: list[Grant] = field(default_factory=list)

    @property
    def state(self) -> str:
        """As of `OpenSend`: live while a grant lives or is to come."""
        states = [grant.state for grant in self.grants]
        if self.parts or "live" in states:
            return "live"
        if not states:
            return "revoked"  # before any was issued
        return next((state for state in states if state != "consumed"), "consumed")


@dataclass
class Issued:
    """What became of one request's parts on this rank; `computed_at`: when the last layer was written, by the
    wall clock; `last_at`: when the last grant was issued, by the monotonic one."""

    stream_id: str
    segments: int
    blocks: int = 0
    parts: int = 0
    failed: int = 0
    last_at: float = 0.0
    computed_at: float = 0.0
    ended: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """As of `OpenSegment`, over all that have ended."""
        return next((state for state in self.ended if state != "consumed"), "consumed")


def take_back(native: Native, request_id: str, grants: Iterable[Grant]) -> None:
    """Revoke a request's grants without waiting for who reads them: the blocks are held until they have let
    go."""
    for grant in grants:
        try:
            grant.revoke(0.0)
        except native.KvikError as error:
            logger.info("kvik: request %s: %s", request_id, error)


class Issuing:
    """All segments of one rank. `layers`: the names of its layers, in their order in memory."""

    def __init__(self, native: Native, rank: int, layers: Sequence[str], grant: Granting) -> None:
        self._native = native
        self._rank = rank
        self._numbers = {name: number for number, name in enumerate(layers)}
        self._grant = grant
        self._open: dict[str, OpenSegment] = {}
        self._requests: dict[str, Issued] = {}
        self._filling: list[OpenSegment] = []
        self._written: set[int] = set()
        self._ends: list[str] = []
        self.computed_at = 0.0  # when a step has last written the last layer, by the wall clock

    def begin_step(self, segments: Iterable[SegmentSend], revokes: Iterable[str], division: Division) -> None:
        """A step begins. The one before has run: what it has not said to have written is granted now."""
        revoked = set(revokes)
        for request_id in revoked:
            self._revoke(request_id)
        for one in self._filling:
            self._issue(one, lambda _: True)
        self._filling, self._written = [], set()
        for send in segments:
            ranges = division.layers(len(self._numbers))
            one = OpenSegment(send, dict(enumerate(ranges)))
            self._open[send.key] = one
            request = self._requests.setdefault(send.request_id, Issued(send.stream_id, send.segments))
            request.blocks += len(send.blocks)
            self._filling.append(one)

    def saved(self, layer: str) -> None:
        """The step has written this layer."""
        number = self._numbers.get(layer)
        if number is None:
            return
        self._written.add(number)
        if number == len(self._numbers) - 1:
            self.computed_at = time.time()
        for one in self._filling:
            self._issue(one, self._written.issuperset)

    def _issue(self, one: OpenSegment, ready: Callable[[range], bool]) -> None:
        send, request = one.send, self._requests.get(one.send.request_id)
        for part, layers in list(one.parts.items()):
            if request is None or not ready(range(*layers)):
                continue
            del one.parts[part]
            grant_id = send.grants[self._rank][part]
            try:
                granted = self._grant(
                    send.request_id, send.blocks, layers, grant_id, send.chain, send.parts[self._rank][part]
                )
            except self._native.KvikError as error:
                # The reader waits for it until its deadline, and computes the prompt itself.
                logger.error("kvik: request %s: grant %s not issued: %s", send.request_id, grant_id, error)
                request.failed += 1
                continue
            one.grants.append(granted)
            request.parts += 1
            request.last_at, request.computed_at = time.monotonic(), self.computed_at

    def _revoke(self, request_id: str) -> None:
        """Take back what was granted of a request."""
        for one in self._open.values():
            if one.send.request_id == request_id:
                one.parts.clear()
                take_back(self._native, request_id, one.grants)
        if (request := self._requests.get(request_id)) is not None:
            request.segments = len(request.ended) + sum(
                one.send.request_id == request_id for one in self._open.values()
            )

    def collect(self) -> list[tuple[str, Issued]]:
        """Requests all of whose grants have ended, since the last call."""
        for key, one in list(self._open.items()):
            if (state := one.state) != "live":
                del self._open[key]
                self._ends.append(key)
                self._requests[one.send.request_id].ended.append(state)
        done = [
            (request_id, request)
            for request_id, request in self._requests.items()
            if len(request.ended) >= request.segments
        ]
        for request_id, _ in done:
            del self._requests[request_id]
        return done

    def take_ends(self) -> list[str]:
        """Keys of segments all of whose grants have ended, since the last call."""
        ends, self._ends = self._ends, []
        return ends
