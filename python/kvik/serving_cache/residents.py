"""Which blocks the memory of a rank's process has, so that it can be told which have gone.

A store moves a block out of memory only when none hangs on it: of blocks that follow one another the last one
goes first. So only the last ones are asked for, and those before a block that has gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvik.serving_cache.plan import LINK_BYTES

KEY_BYTES = 32
MOST_KEYS = 1024  # of one question


@dataclass
class _Block:
    """Its key in the store, the block before it, and how many blocks come after it."""

    key: bytes
    before: bytes
    after: int = 0


class Residents:
    """See the module. Blocks are called by their links."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        self._last: dict[bytes, None] = {}  # those that nothing comes after, in order of their coming

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, links: bytes, keys: bytes) -> None:
        """Blocks that begin a prompt are in memory; keys: what the store calls them."""
        before = b""
        for place in range(len(keys) // KEY_BYTES):
            link = links[place * LINK_BYTES :][:LINK_BYTES]
            if link not in self._blocks:
                self._blocks[link] = _Block(keys[place * KEY_BYTES :][:KEY_BYTES], before)
                self._last[link] = None
                if before:
                    self._blocks[before].after += 1
                    self._last.pop(before, None)
            before = link

    def gone(self, contains: Callable[[bytes], Sequence[bool]]) -> list[bytes]:
        """Links of those that are not there any more, which are forgotten. `contains` says of keys whether
        their blocks are there."""
        found: list[bytes] = []
        asked = list(self._last)
        while asked:
            there = self._there(asked, contains)
            missing = [link for link in asked if link not in there]
            found += missing
            asked = [before for before in map(self._forget, missing) if before in self._last]
        return found

    def _there(self, links: list[bytes], contains: Callable[[bytes], Sequence[bool]]) -> set[bytes]:
        there = set()
        for first in range(0, len(links), MOST_KEYS):
            some = links[first : first + MOST_KEYS]
            answers = contains(b"".join(self._blocks[link].key for link in some))
            there |= {link for link, answer in zip(some, answers, strict=True) if answer}
        return there

    def _forget(self, link: bytes) -> bytes:
        """Gives the block before it."""
        before = self._blocks.pop(link).before
        del self._last[link]
        if before in self._blocks:
            self._blocks[before].after -= 1
            if not self._blocks[before].after:
                self._last[before] = None
        return before
