"""Which page belongs to whom: reference counts, and full pages that may be found again by their content.

A page is in one of three states: used (``refs > 0``), free and cached (``refs == 0``, found by its key), or
free. Free pages are handed out in the order in which they became free, so a cached one lives as long as
memory allows, and requests give back their last pages first, so beginnings outlive ends. `touch` and
`free_blocks` are what `kvik.handover.holding` asks of a serving engine's pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Page:
    """One KV page of every rank; `key` names the tokens up to its end once it is full and its KV is there."""

    __slots__ = ("key", "number", "refs")

    def __init__(self, number: int) -> None:
        self.number = number
        self.refs = 0
        self.key: bytes | None = None


class PagePool:
    """The pages of one data-parallel replica; all its ranks use the same numbers."""

    def __init__(self, pages: int) -> None:
        self.blocks = [Page(number) for number in range(pages)]
        self._free: OrderedDict[int, Page] = OrderedDict((page.number, page) for page in self.blocks)
        self._cached: dict[bytes, Page] = {}

    @property
    def free(self) -> int:
        """How many pages can be handed out."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of pages that are used, from 0 to 1."""
        return 1 - len(self._free) / len(self.blocks)

    def find(self, keys: Sequence[bytes]) -> list[Page]:
        """Cached pages of the longest beginning of `keys`."""
        found = []
        for key in keys:
            page = self._cached.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def can_take(self, found: Sequence[Page], more: int) -> bool:
        """Whether `more` pages can be had besides those that were found."""
        return more <= len(self._free) - sum(page.refs == 0 for page in found)

    def take(self, count: int) -> list[Page]:
        """Hand out free pages, the longest free first, in order of their numbers so that neighbours stay so.

        The caller has asked `can_take`.
        """
        pages = [self._free.popitem(last=False)[1] for _ in range(count)]
        for page in pages:
            page.refs = 1
            self._forget(page)
        pages.sort(key=lambda page: page.number)
        return pages

    def touch(self, blocks: Iterable[Page]) -> None:
        """One more reference on each."""
        for page in blocks:
            if page.refs == 0:
                del self._free[page.number]
            page.refs += 1

    def free_blocks(self, ordered_blocks: Iterable[Page]) -> None:
        """One reference less on each; those without any are free, the first given the first to be reused."""
        for page in ordered_blocks:
            page.refs -= 1
            if page.refs == 0:
                self._free[page.number] = page

    def cache(self, page: Page, key: bytes) -> None:
        """Let a full page be found; the first page with the same content stays the one that is."""
        if page.key is None and key not in self._cached:
            page.key = key
            self._cached[key] = page

    def _forget(self, page: Page) -> None:
        if page.key is not None:
            del self._cached[page.key]
            page.key = None
