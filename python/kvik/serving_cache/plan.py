"""What passes between the scheduler's half of a store and that of each rank.

Blocks are called by links here: 32 bytes for each whole KV block, over all tokens up to its end and what else
they depend on (`kvik.content_chain`). Each rank makes the store's keys of them, by the namespace of its own
part of the model's KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LINK_BYTES = 32


@dataclass(frozen=True)
class Lookup:
    """How many of these blocks, from the first one on, are there? `number` names the question. rate: tokens
    that the engine computes in a second, where fetching is to be weighed against that."""

    number: int
    links: bytes
    rate: float | None = None


@dataclass(frozen=True)
class CacheLoad:
    """Read blocks into a request's KV blocks `blocks`, within `deadline` seconds. links: from the prompt's
    start on; the last of them are those of `blocks`."""

    request_id: str
    links: bytes
    blocks: list[int]
    deadline: float


@dataclass(frozen=True)
class Save:
    """Write KV blocks, which begin a prompt, and are held until every rank has said that it has ended with
    what is called `key`."""

    key: str
    links: bytes
    blocks: list[int]


@dataclass
class CachePlan:
    """What ranks shall start with one engine step. namespaces: of each rank, told once, and again when it
    changes. cancels: request ids of loads."""

    namespaces: list[Any] | None = None
    lookups: list[Lookup] = field(default_factory=list)
    loads: list[CacheLoad] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)


# Reasons of `Store.choose`. All ranks load, or none: the first of these that any rank gives decides. So a
# link is tried again as soon as one rank wants to; and where it is slow for one, all compute.
REASONS = ("unavailable", "refresh", "slower", "unknown", "faster")
COMPUTED = frozenset({"unavailable", "slower"})


@dataclass(frozen=True)
class Answer:
    """To a lookup: so many blocks are there, the first `host` of them in the memory of the rank's process.
    `ranks` have said so. asked: the server was asked from this block on. sure: by it, and by the process,
    and what is not counted is not there. choice: why the server's are to be fetched or computed, empty where
    that was not weighed."""

    blocks: int
    host: int
    ranks: int = 1
    asked: int = 0
    sure: bool = False
    choice: str = ""

    @property
    def loadable(self) -> int:
        """How many blocks are to be loaded."""
        return self.host if self.choice in COMPUTED else self.blocks

    def with_other(self, other: Answer) -> Answer:
        """With another rank's: what all of them have."""
        given = {self.choice, other.choice}
        return Answer(
            min(self.blocks, other.blocks),
            min(self.host, other.host),
            self.ranks + other.ranks,
            max(self.asked, other.asked),
            self.sure and other.sure,
            next((reason for reason in REASONS if reason in given), ""),
        )


@dataclass(frozen=True)
class Kept:
    """What a rank has of the blocks of a save that has ended: so many of the first ones in the memory of its
    process, and on the server. gone: links of blocks that have left that memory since it said so last."""

    key: str
    host: int
    remote: int
    gone: bytes = b""


def merged(first: dict[int, Answer], second: dict[int, Answer]) -> dict[int, Answer]:
    """Answers of several ranks, by number."""
    made = dict(first)
    for number, answer in second.items():
        made[number] = made[number].with_other(answer) if number in made else answer
    return made
