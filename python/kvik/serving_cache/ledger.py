"""What whoever follows a serving engine's store was told of it: which blocks are where, by the engine's own
names.

A block is told as stored in the memory of the processes once all ranks have it there, and as stored on the
server once all ranks have put it, or have found it there. It is told as removed from memory as soon as one
rank says that it has gone, and from the server when a lookup of this engine does not find it, which is all
that can be known of a server that others use, too. What was told is forgotten, and told as removed, where
more blocks were told later than are remembered. Events wait here until the engine takes them; where too many
wait, blocks are not told as stored.

The store's links are not the engine's names: two names may stand for the same block (two names of one
adapter), and one name for two (an image that its client calls the same). So a name is told as stored with the
first block of it, and as removed with the last one."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvik.serving_cache.plan import LINK_BYTES, Answer, Kept

MOST_TOLD = 1 << 18
MOST_WAITING = 1 << 16

Names = Callable[[Any, int], Sequence[bytes]]
"""What the serving engine calls the first blocks of a request, so many at most."""


@dataclass(frozen=True)
class StoredBlocks:
    """Blocks `first` to `end` of a request are there now. host: in the memory of the processes, else on the
    server."""

    host: bool
    request: Any
    first: int
    end: int


@dataclass(frozen=True)
class RemovedBlocks:
    """Blocks of these names are not there any more."""

    host: bool
    names: list[bytes]


Event = StoredBlocks | RemovedBlocks


class _Told:
    """What was told of one tier: names by link, and since which lookup or save; the oldest first."""

    def __init__(self) -> None:
        self.names: OrderedDict[bytes, dict[bytes, int]] = OrderedDict()
        self._links_of: Counter[bytes] = Counter()

    def has(self, link: bytes, name: bytes) -> bool:
        """Whether a block was told by this name."""
        return name in self.names.get(link, ())

    def add(self, link: bytes, name: bytes, number: int) -> bool:
        """A block is there. Whether the name is to be told: it was not, and no other block has it."""
        names = self.names.setdefault(link, {})
        new = name not in names
        names[name] = number
        self._links_of[name] += new
        return new and self._links_of[name] == 1

    def touch(self, link: bytes) -> None:
        """It is the last to be forgotten."""
        if link in self.names:
            self.names.move_to_end(link)

    def drop(self, link: bytes) -> list[bytes]:
        """Names that no block has any more, without this one."""
        gone = []
        for name in self.names.pop(link, ()):
            self._links_of[name] -= 1
            if not self._links_of[name]:
                del self._links_of[name]
                gone.append(name)
        return gone


@dataclass
class _Saving:
    """A save whose end some ranks have not told yet. remote: what those that have have on the server."""

    request: Any
    links: bytes
    number: int
    ranks: int = 0
    remote: int = 1 << 62
    host: int = 1 << 62


@dataclass
class _Waiting:
    """Events that were not taken yet, and how many blocks they tell as stored."""

    events: list[Event] = field(default_factory=list)
    blocks: int = 0


class Ledger:
    """See the module. `ranks` report; `names` gives the engine's names."""

    def __init__(
        self, ranks: int, names: Names, most_told: int = MOST_TOLD, most_waiting: int = MOST_WAITING
    ) -> None:
        self._ranks = ranks
        self._names = names
        self._most_told, self._most_waiting = most_told, most_waiting
        self._host, self._server = _Told(), _Told()
        self._having: dict[bytes, int] = {}  # ranks that have a block in memory, by link, a bit each
        self._saving: dict[str, _Saving] = {}
        self._learned = 0  # the last lookup that has told of a block that is not on the server
        self._waiting = _Waiting()
        self.untold = 0

    def saving(self, key: str, request: Any, links: bytes, number: int) -> None:
        """A save begins. Numbers grow with each save and lookup."""
        self._saving[key] = _Saving(request, links, number)

    def kept(self, rank: int, reports: Iterable[Kept], number: int) -> None:
        """What a rank has of saves that have ended. number: of the last lookup or save that was begun."""
        for report in reports:
            saving = self._saving.get(report.key)
            if saving is not None:
                for link in _links(saving.links, 0, report.host):
                    self._having[link] = self._having.get(link, 0) | 1 << rank
            for link in _links(report.gone, 0, len(report.gone)):
                self._has_gone(rank, link)
            if saving is not None:
                saving.ranks += 1
                saving.host = min(saving.host, report.host)
                saving.remote = min(saving.remote, report.remote)
                if saving.ranks == self._ranks:
                    del self._saving[report.key]
                    self._saved(saving, number)

    def _has_gone(self, rank: int, link: bytes) -> None:
        having = self._having.get(link, 0) & ~(1 << rank)
        if having:
            self._having[link] = having
        else:
            self._having.pop(link, None)
        self._remove(True, self._host.drop(link))

    def _saved(self, saving: _Saving, number: int) -> None:
        """All ranks have said what they have of it."""
        there = self._in_memory(saving.links, saving.host)
        self._store(True, saving.request, saving.links, range(there), number)
        self._store(False, saving.request, saving.links, range(saving.remote), number)

    def _in_memory(self, links: bytes, most: int) -> int:
        """How many of the first blocks all ranks have there, of so many."""
        every, some = (1 << self._ranks) - 1, _links(links, 0, most)
        missing = (place for place, link in enumerate(some) if self._having.get(link) != every)
        return next(missing, len(some))

    def looked(self, request: Any, links: bytes, number: int, answer: Answer) -> None:
        """All ranks have answered a lookup of a request's blocks. What was told since it was asked stays."""
        if answer.sure:
            gone = [
                link
                for link in _links(links, answer.blocks, len(links))
                if (told := self._server.names.get(link)) and max(told.values()) < number
            ]
            for link in reversed(gone):
                self._learned = max(self._learned, number)
                self._remove(False, self._server.drop(link))
        # Maybe by another name than before.
        self._store(True, request, links, range(self._in_memory(links, answer.host)), number)
        if number > self._learned:
            self._store(False, request, links, range(answer.asked, answer.blocks), number)

    def reset(self) -> None:
        """Nothing of what was told is found any more."""
        self._saving.clear()
        self._having.clear()
        for host, tier in ((True, self._host), (False, self._server)):
            for link in list(tier.names):
                self._remove(host, tier.drop(link))

    def take(self) -> list[Event]:
        """Events since the last call, in their order."""
        waiting, self._waiting = self._waiting, _Waiting()
        return waiting.events

    def _store(self, host: bool, request: Any, links: bytes, places: range, number: int) -> None:
        """Tell those of these blocks that were not told, each run of them by one event."""
        tier = self._host if host else self._server
        names = self._names(request, places.stop) if places else ()
        known = _links(links, places.start, places.stop)
        for place, link, name in zip(places, known, names[places.start :], strict=False):
            if self._waiting.blocks >= self._most_waiting and not tier.has(link, name):
                self.untold += 1
            elif tier.add(link, name, number):
                self._tell(host, request, place)
        for link in reversed(known):  # no block is of use without those before it
            tier.touch(link)
        while len(tier.names) > self._most_told:
            self._remove(host, tier.drop(next(iter(tier.names))))

    def _tell(self, host: bool, request: Any, place: int) -> None:
        self._waiting.blocks += 1
        events = self._waiting.events
        last = events[-1] if events else None
        if (
            isinstance(last, StoredBlocks)
            and last.request is request
            and (last.host, last.end) == (host, place)
        ):
            events[-1] = StoredBlocks(host, request, last.first, place + 1)
        else:
            events.append(StoredBlocks(host, request, place, place + 1))

    def _remove(self, host: bool, names: list[bytes]) -> None:
        if not names:
            return
        last = self._waiting.events[-1] if self._waiting.events else None
        if isinstance(last, RemovedBlocks) and last.host == host:
            last.names.extend(names)
        else:
            self._waiting.events.append(RemovedBlocks(host, list(names)))


def _links(links: bytes, first: int, end: int) -> list[bytes]:
    """Those of blocks `first` to `end`, as far as there are any."""
    end = min(end, len(links) // LINK_BYTES)
    return [links[place * LINK_BYTES :][:LINK_BYTES] for place in range(first, end)]
