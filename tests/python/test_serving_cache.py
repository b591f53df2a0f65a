"""A rank's half of a serving engine's store, beside tiers that do as a test says."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

import kvik
import kvik.store
from kvik.handover.protocol import KvShape
from kvik.serving_cache import worker
from kvik.serving_cache.config import CacheConfig
from kvik.serving_cache.naming import ModelContent, Naming
from kvik.serving_cache.plan import CacheLoad, CachePlan, Lookup
from kvik.serving_cache.tiers import Loaded, Stop, Tiers
from kvik.serving_cache.worker import LOOKERS, CacheRank

LIMIT = 60.0  # seconds for a busy machine


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

    def behind(self) -> None:
        """Nothing is to be waited for."""

    def load(self, _links: bytes, _blocks: object, _until: float, _stop: Stop, _behind: object) -> Loaded:
        """Only the first block has not gone."""
        return Loaded(host=1)

    def close(self) -> None:
        """Nothing is open."""


def rank_of(tiers: Still, deadline: float = LIMIT) -> CacheRank:
    return CacheRank(cast(Tiers, cast(Any, tiers)), CacheConfig(host_cache=1 << 20, deadline=deadline), 0)


def test_what_waited_longer_than_its_deadline_asks_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tiers, deadline, count = Still(), 0.2, 40
    rank = rank_of(tiers, deadline)
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


@pytest.mark.parametrize("aborted", [False, True])
def test_an_abort_that_finds_its_load_ended_names_no_block(aborted: bool) -> None:
    """The load has ended on its thread, and the step that would have said so has not come."""
    rank = rank_of(Still())
    try:
        rank.begin_step(CachePlan(loads=[CacheLoad("r", bytes(64), [7, 9], LIMIT)]))
        rank._loads.shutdown()
        rank.begin_step(CachePlan(cancels=["r"] if aborted else []))
        rank.collect()
        assert rank.take_received() == {"r"}
        assert rank.take_invalid_blocks() == (set() if aborted else {9})
    finally:
        rank.close()


@pytest.mark.parametrize("model", ["a" * 600, "/" + "模" * 600, "latin-\udce9"])
def test_any_name_of_a_model_makes_a_namespace(model: str) -> None:
    content, none = ModelContent({"model": model}, lambda: bytes(32), ""), cast(Any, None)
    naming = Naming(cast(Any, kvik), content, none, none)
    naming.set_shape(KvShape("gqa", 2, 1, 8, "float16", 1, (2,), 1, 4, "HNC", 64))
    until = time.monotonic() + LIMIT
    while (namespace := naming.of_rank(0)) is None:
        assert time.monotonic() < until
    assert len(kvik.store.namespace_id(namespace)) == 32


def test_pages_that_a_store_keeps_do_not_keep_a_process() -> None:
    waits, lets_go = threading.Semaphore(0), threading.Event()

    class Kept:
        """A put whose pages the store does not let go of."""

        def wait(self) -> None:
            waits.release()
            if not lets_go.is_set():
                raise kvik.PagesQuarantined("the store reads them")

    tiers = Tiers(kvik, CacheConfig(host_cache=1 << 20), None, None, None)
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(tiers._end, Kept())
        try:
            for _ in range(2):
                assert waits.acquire(timeout=LIMIT)
            tiers.close()
            assert isinstance(ended.exception(LIMIT), kvik.PagesQuarantined)
        finally:
            lets_go.set()


def test_an_idle_step_waits_for_an_answer_and_for_nothing_else() -> None:
    tiers = Still()
    rank = rank_of(tiers)
    later = threading.Timer(0.05, tiers.goes_on.set)
    try:
        rank.collect(threading.TIMEOUT_MAX)  # nobody has asked
        rank.begin_step(CachePlan(lookups=[Lookup(1, b"1")]))
        assert tiers.asks.acquire(timeout=LIMIT)
        rank.collect()
        assert rank.take_answers() == {}
        later.start()
        rank.collect(LIMIT)
        assert list(rank.take_answers()) == [1]
        rank.collect(threading.TIMEOUT_MAX)  # it was taken
    finally:
        later.cancel()
        tiers.goes_on.set()
        rank.close()


def test_a_lookup_that_is_answered_at_the_end_of_the_process_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiers = Still()
    rank = rank_of(tiers)
    rank.begin_step(CachePlan(lookups=[Lookup(1, b"1")]))
    assert tiers.asks.acquire(timeout=LIMIT)
    rank.close()
    tiers.goes_on.set()
    rank._looks.shutdown()
    assert caplog.text == ""
