"""The store, from the scheduler's side: which blocks are asked for, which are put, and by which names.

Nothing here waits. Ranks know no tokens, so the names of blocks are made here, for each rank by its own
namespace; the ranks are ordered to read and to write (`take_orders`) and tell how it ended. A load counts as
many blocks as the rank with the fewest has. The pages of a put are held until every rank has ended with
them; where they would be more than half of the pool, nothing is put.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvik.emulator.pool import Page, PagePool
from kvik.emulator.requests import Request
from kvik.emulator.store_metrics import StoreMetrics
from kvik.handover import digest
from kvik.store import Namespace, block_keys

# Of the pool, the share whose pages may wait for puts: a store that is slow leaves room for requests.
MOST_HELD = 0.5


@dataclass(frozen=True)
class Order:
    """What ranks shall do. kind: "fetch" or "put"; keys: of each rank."""

    kind: str
    fields: Mapping[str, Any]
    keys: list[npt.NDArray[np.uint8]]
    pages: npt.NDArray[np.uint32]


@dataclass
class _Fetch:
    """A load that ranks have been ordered to make. blocks: what each had that has ended."""

    request: Request
    asked: int
    recompute: float | None
    blocks: list[int]


@dataclass
class _Put:
    """A put; ranks: how many have not ended it."""

    pages: list[Page]
    ranks: int


class StoreSide:
    """One replica's.

    recompute: seconds to compute the prompt tokens from one position to another, or None.
    """

    def __init__(
        self,
        namespaces: Sequence[Namespace],
        page_tokens: int,
        pool: PagePool,
        recompute: Callable[[int, int], float | None],
        metrics: StoreMetrics,
    ) -> None:
        self._namespaces = namespaces
        self._page_tokens = page_tokens
        self._pool = pool
        self._recompute = recompute
        self._metrics = metrics
        self._orders: list[Order] = []
        self._fetches: dict[str, _Fetch] = {}
        self._puts: dict[int, _Put] = {}
        self._held = 0
        self._number = 0

    def take_orders(self) -> list[Order]:
        """What ranks shall do, since the last call."""
        orders, self._orders = self._orders, []
        return orders

    # Loads.

    def fetch(self, request: Request) -> bool:
        """Order the blocks behind what is present; False when there is nothing to ask for. Once a request."""
        first = request.present // self._page_tokens
        # At least the last token is computed, to choose the next one.
        last = (request.num_tokens - 1) // self._page_tokens
        if request.asked_store or first >= last or request.present % self._page_tokens:
            return False
        request.asked_store = True
        recompute = self._recompute(first * self._page_tokens, last * self._page_tokens)
        self._fetches[request.request_id] = _Fetch(request, last - first, recompute, [])
        pages = request.page_numbers(request.present, last * self._page_tokens, self._page_tokens)
        keys = self._keys(request, last)
        fields = {"id": request.request_id, "recompute": recompute}
        self._orders.append(Order("fetch", fields, keys, pages))
        self._metrics.blocks("asked", last - first)
        return True

    def fetched(self, loaded: Mapping[str, Any]) -> tuple[Request, int] | None:
        """A rank's load has ended. With the last rank's: the request, and the blocks that all have."""
        fetch = self._fetches[loaded["request_id"]]
        fetch.blocks.append(loaded["blocks"])
        self._metrics.loaded(loaded, fetch.recompute)
        if len(fetch.blocks) < len(self._namespaces):
            return None
        del self._fetches[loaded["request_id"]]
        blocks = min(fetch.blocks)
        self._metrics.blocks("hit", blocks)
        if blocks:
            fetch.request.stored_blocks = fetch.request.present // self._page_tokens + blocks
        return fetch.request, blocks

    # Puts.

    def put(self, request: Request) -> None:
        """Order the whole blocks of a request to be put, where some may be new to the store."""
        count = request.present // self._page_tokens
        if count <= request.stored_blocks:
            return
        if self._held + count > MOST_HELD * len(self._pool.blocks):
            self._metrics.blocks("skipped", count - request.stored_blocks)
            return
        # From the first one on: the store may have lost what it had, and then refuses what comes behind.
        request.stored_blocks = count
        pages = request.pages[:count]
        self._pool.touch(pages)
        self._held += count
        self._number += 1
        self._puts[self._number] = _Put(pages, len(self._namespaces))
        numbers = request.page_numbers(0, count * self._page_tokens, self._page_tokens)
        self._orders.append(Order("put", {"number": self._number}, self._keys(request, count), numbers))

    def ended(self, stored: Mapping[str, Any]) -> None:
        """A rank's put has ended; with the last rank's the pages go back."""
        for result, name in (("put", "stored"), ("known", "known"), ("refused", "refused")):
            self._metrics.blocks(result, stored[name])
        if stored["cause"]:
            self._metrics.failed("put", stored["cause"])
        put = self._puts[stored["number"]]
        put.ranks -= 1
        if put.ranks == 0:
            del self._puts[stored["number"]]
            self._held -= len(put.pages)
            self._pool.free_blocks(reversed(put.pages))

    # Names.

    def _keys(self, request: Request, blocks: int) -> list[npt.NDArray[np.uint8]]:
        """The keys of a request's first blocks, of each rank."""
        tokens = request.all_tokens()[: blocks * self._page_tokens]
        extra = digest.extra_keys(request)
        made: dict[Namespace, npt.NDArray[np.uint8]] = {}
        for namespace in self._namespaces:
            if namespace not in made:
                keys = block_keys(namespace, tokens, extra, [])
                made[namespace] = np.frombuffer(keys, dtype=np.uint8)
        return [made[namespace] for namespace in self._namespaces]
