"""What the servers of a store hold, as plain data."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kvik import _native
from kvik.stat.snapshot import Samples
from kvik.store.figures import Figures, figures

State: TypeAlias = Literal["whole", "part", "older", "down"]

MAX_BLOCKS = 4_000_000
"""Copies of blocks that are held at once unless told; each takes 24 bytes, and each segment some 40."""


@dataclass(frozen=True)
class Amount:
    """A number of blocks, and their bytes."""

    blocks: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Contents:
    """The blocks of a server. Those that it alone has are counted where clients look for them."""

    held: Amount = Amount()
    memory: Amount = Amount()
    """Of them in memory; a block may lie in several tiers."""
    log: Amount = Amount()
    object: Amount = Amount()
    stray: Amount = Amount()
    """Of them where no client of this list looks."""
    unplaced: Amount = Amount()
    """Of them so deep in a prompt that it is not known where clients look."""
    owed: Amount = Amount()
    """Blocks of the store, wherever they are, that clients look for here."""
    lacking: Amount = Amount()
    """Of those the ones that are not here."""
    lost: Amount = Amount()
    """Blocks that would be gone with it: only it has them, in memory only."""
    away: Amount = Amount()
    """Blocks that would come back with it: only it has them, in its log or its object store."""

    @property
    def in_place(self) -> int:
        """Blocks that are where clients look, as far as that is known."""
        return self.held.blocks - self.stray.blocks


@dataclass(frozen=True)
class Server:
    """A server of the list."""

    name: str
    state: State
    """Whether all of its blocks were looked at, some, none since it cannot list them, or it does not
    answer."""
    why: str
    """Why not all of them were."""
    version: str
    """Of its kvik; empty where it does not say."""
    contents: Contents
    figures: Figures | None
    """What it says of itself, since it began; None where it does not answer, or where ``unread`` says why."""
    unread: str = ""
    """Why its metrics could not be read: another version's may be different."""


@dataclass(frozen=True)
class Namespace:
    """What blocks are of."""

    id: str
    """The first bytes of its id."""
    tenant: str
    model: str
    block_bytes: int
    held: Amount
    """Different blocks."""
    copies: Amount
    """All copies of them."""


@dataclass(frozen=True)
class Survey:
    """What a store holds."""

    servers: tuple[Server, ...]
    namespaces: tuple[Namespace, ...]
    wanted: int | None
    """Copies that were said to be kept; None: nothing was said."""
    copies: int
    """Copies by which places were judged: what was said, or what most blocks have."""
    by_copies: tuple[Amount, ...]
    """Different blocks with no copy where clients look, with one, and so on."""
    short: Amount
    """Different blocks with fewer than ``copies``."""
    short_unseen: Amount
    """Of them those whose others may be on servers that were not looked at."""
    sample: int
    """One block in so many was looked at; figures of blocks are that many times what was found."""
    rows: int
    """Copies that were looked at."""
    segments: int
    segment_blocks: int
    segment_squares: float
    """The sum of the squares of the blocks of each segment."""
    largest_segment: int

    @property
    def blocks(self) -> int:
        """Different blocks."""
        return sum(amount.blocks for amount in self.by_copies)

    def looked_at(self) -> list[Server]:
        """Servers of which all blocks were."""
        return [server for server in self.servers if server.state == "whole"]

    def even(self) -> float:
        """An even share of the blocks that are where clients look, in blocks."""
        servers = self.looked_at()
        return sum(server.contents.in_place for server in servers) / max(len(servers), 1)

    def scatter(self) -> float:
        """The standard deviation of a server's blocks that hashing alone gives.

        A segment goes to a server or does not, with all of its blocks, independently of all others. A sample
        adds its own.
        """
        even, blocks = self.even(), self.segment_blocks
        if not blocks:
            return 0.0
        chance = min(even / blocks, 1.0)
        return math.sqrt(self.segment_squares * chance * (1 - chance) + (self.sample - 1) * even)


def examine(
    engine: _native.Engine,
    servers: Sequence[str],
    *,
    copies: int | None = None,
    max_blocks: int = MAX_BLOCKS,
    deadline: float = 10.0,
) -> Survey:
    """Ask all servers of a store what they hold.

    servers: as for ``kvik.Store.connect``. copies: how many servers keep each block, as clients have it;
    None: what most blocks have. max_blocks: copies of blocks to hold at once, beyond which a sample is looked
    at. deadline: seconds for all of it; who has not answered by then is named.

    Raises what meeting the only server says; StoreUnavailable where none of several answers; InvalidArgument.
    """
    until = time.monotonic() + deadline
    # Who does not answer when it is met leaves half of the time for the others.
    client = _native.StoreClient.connect(engine, list(servers), 1, deadline / 2)
    told = client.survey(copies, max_blocks, max(until - time.monotonic(), deadline / 8))
    return _survey(told, copies)


def _survey(told: dict[str, Any], wanted: int | None) -> Survey:
    return Survey(
        servers=tuple(_server(one) for one in told["servers"]),
        namespaces=tuple(
            Namespace(
                one["id"], one["tenant"], one["model"], one["block_bytes"],
                Amount(*one["held"]), Amount(*one["copies"]),
            )
            for one in told["namespaces"]
        ),
        wanted=wanted,
        copies=told["copies"],
        by_copies=tuple(Amount(*one) for one in told["by_copies"]),
        short=Amount(*told["short"]),
        short_unseen=Amount(*told["short_unseen"]),
        sample=told["sample"],
        rows=told["rows"],
        segments=told["segments"],
        segment_blocks=told["segment_blocks"],
        segment_squares=told["segment_squares"],
        largest_segment=told["largest_segment"],
    )  # fmt: skip


_AMOUNTS = ("held", "memory", "log", "object", "stray", "unplaced", "owed", "lacking", "lost", "away")


def _server(told: dict[str, Any]) -> Server:
    read, unread = None, ""
    if text := told["metrics"]:
        try:
            read = figures(told["name"], Samples(""), Samples(text), 0.0)
        except _native.ProtocolError as error:
            unread = str(error)
    return Server(
        name=told["name"],
        state=told["state"],
        why=told["why"],
        version=told["version"],
        contents=Contents(**{name: Amount(*told[name]) for name in _AMOUNTS}),
        figures=read,
        unread=unread,
    )
