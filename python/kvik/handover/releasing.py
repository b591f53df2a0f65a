"""What a rank gives back without having read it, so that prefill has its KV blocks before they expire.

Of a stream it may be many parts that prefill has not granted yet. A release waits at prefill for its grant,
as one of the transfers that an engine keeps open with one peer, of which loads need some, too. So only some
streams are given back all at once. Of the others the part that is granted last is released first: once that
has ended well the others are granted, and wait for nothing. An engine without steps begins none of them, but
one that has so many streams to give back is not idle.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvik.handover.native import Content, Engine, Native, Ticket, Transfer

logger = logging.getLogger("kvik.handover")

MAX_OPEN_RELEASES = 1024  # a quarter of the transfers that an engine keeps open with one peer
MAX_AT_ONCE = 512  # so many of them may wait for their grants together with others of their stream


class Due(NamedTuple):
    """A ticket that this rank has done with, as one of so many readers that confirm."""

    ticket: str
    readers: int
    content: Content


@dataclass
class Giving:
    """One release; `then`: what is released once it has ended well. deadline: seconds from its beginning."""

    request_id: str
    due: Due
    deadline: float
    then: list[Due] = field(default_factory=list)


class Releasing:
    """The releases of one rank. deadline: seconds, of those that say no other; ticket: reads the text of one;
    count: adds to a sum."""

    def __init__(
        self,
        native: Native,
        engine: Engine,
        deadline: float,
        ticket: Callable[[str], Ticket],
        count: Callable[[str, int], None],
    ) -> None:
        self._native = native
        self._engine = engine
        self._deadline = deadline
        self._ticket = ticket
        self._count = count
        self._waiting: deque[Giving] = deque()
        self._open: list[tuple[Giving, Transfer]] = []

    def give(self, request_id: str, parts: Sequence[Sequence[Due]], deadline: float | None = None) -> None:
        """Give tickets back, by part in the order in which prefill grants these."""
        parts, deadline = [part for part in parts if part], deadline or self._deadline
        if not parts:
            return
        at_once, before = parts[-1], [due for part in parts[:-1] for due in part]
        if len(self._open) + len(self._waiting) + len(before) + len(at_once) <= MAX_AT_ONCE:
            at_once, before = [*before, *at_once], []
        givings = [Giving(request_id, due, deadline) for due in at_once]
        givings[-1].then = before
        self._waiting.extend(givings)
        self._begin()

    def collect(self) -> None:
        """See what has ended, and begin what waits for that."""
        running, self._open = self._open, []
        for giving, transfer in running:
            if not transfer.done:
                self._open.append((giving, transfer))
            elif (error := transfer.error()) is not None:
                self._failed(giving, error)
            else:
                self._count("releases", 1)
                self._waiting.extend(Giving(giving.request_id, due, self._deadline) for due in giving.then)
        self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self._open) < MAX_OPEN_RELEASES:
            giving = self._waiting.popleft()
            ticket, readers, content = giving.due
            try:
                transfer = self._engine.release(
                    self._ticket(ticket), deadline=giving.deadline, readers=readers,
                    tag=giving.request_id, content=content,
                )  # fmt: skip
            except self._native.KvikError as error:
                self._failed(giving, error)
            else:
                self._open.append((giving, transfer))

    def _failed(self, giving: Giving, error: Exception) -> None:
        self._count("releases_failed", 1 + len(giving.then))
        logger.info(
            "kvik: request %s: offer not released, it ends by its expiry: %s", giving.request_id, error
        )
