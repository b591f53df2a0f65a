"""A rank's half of a serving engine's store beside a store that stands still."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvik.serving_cache import worker
from kvik.serving_cache.config import CacheConfig
from kvik.serving_cache.plan import CachePlan, Lookup
from kvik.serving_cache.tiers import Tiers
from kvik.serving_cache.worker import LOOKERS, CacheRank

LIMIT = 20.0  # seconds for a busy machine


class Still:
    """Tiers whose store answers nothing until it is let go on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.asks = threading.Semaphore(0)
        self.asked: list[bytes] = []
        self.prefetched: list[bytes] = []

    def look(self, links: bytes) -> tuple[int, int, dict[str, str]]:
        """Waits."""
        self.asked.append(links)
        self.asks.release()
        assert self.goes_on.wait(LIMIT)
        return 1, 0, {}

    def prefetch(self, links: bytes, _host: int) -> None:
        """Notes it."""
        self.prefetched.append(links)

    def close(self) -> None:
        """Nothing is open."""


def test_what_waited_longer_than_its_deadline_asks_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tiers, deadline, count = Still(), 0.2, 40
    rank = CacheRank(cast(Tiers, cast(Any, tiers)), CacheConfig(host_cache=1 << 20, deadline=deadline), 0)
    try:
        lookups = [Lookup(number, bytes([number])) for number in range(count)]
        rank.begin_step(CachePlan(lookups=lookups))
        for _ in range(LOOKERS):
            assert tiers.asks.acquire(timeout=LIMIT)
        now[0] += 2 * deadline
        tiers.goes_on.set()
        for threads in (rank._looks, rank._prefetches):
            threads.shutdown()
        rank.collect()
        answers = rank.take_answers()
        assert len(answers) == count
        assert len(tiers.asked) == LOOKERS
        assert tiers.prefetched == []
        assert sum(answer.blocks for answer in answers.values()) == LOOKERS
    finally:
        tiers.goes_on.set()
        rank.close()
