"""A store of another process: over each transport, with a secret, killed, stopped and started again."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import kvik
from kvik import _native
from tests.busy import Watch
from tests.python.peers import LIMIT, ROOT
from tests.python.store_rig import NAMESPACE, Rig, Served

DEADLINE = 1.0
LONG = 60.0
"""Longer than a test takes: what ends before has not ended by its deadline."""
SECRET = "a secret of this test"  # noqa: S105 - no secret of anybody


over_each = pytest.mark.parametrize("transport", ["tcp", "local"])


@over_each
def test_what_one_engine_put_another_one_reads(transport: kvik.TransportName) -> None:
    with Served("--memory", "8MiB") as served:
        with kvik.Engine(transport=transport) as engine:
            rig = Rig(engine, served.address)
            keys = rig.store.keys(range(64))
            assert rig.got(keys) == 0
            assert rig.put(keys) == kvik.Stored(16, 0, 0)
            del rig.bytes
        # The engine has gone, the blocks have not.
        with kvik.Engine(transport=transport) as engine:
            rig = Rig(engine, served.address)
            assert rig.got(keys) == 16
            assert rig.store.contains(keys) == [True] * 16
            assert rig.store.stat()["hits"] == 16
            del rig.bytes


def test_two_clients_of_one_engine() -> None:
    with Served() as one, Served() as other, kvik.Engine() as engine:
        first, second = Rig(engine, one.address), Rig(engine, other.address)
        keys = first.store.keys(range(16))
        first.put(keys)
        assert (first.got(keys), second.got(keys)) == (4, 0)
        # Clients that end leave the others alone, and a new one takes their place at once.
        del first.store
        third = Rig(engine, one.address)
        assert (third.got(keys), second.got(keys)) == (4, 0)
        del second.store, third.store
        assert Rig(engine, one.address).got(keys) == 4


def test_a_store_wants_the_secret() -> None:
    with Served("--secret", SECRET) as served:
        with kvik.Engine(secret=SECRET) as engine:
            rig = Rig(engine, served.address)
            assert rig.put(rig.store.keys(range(4))).stored == 1
            del rig.bytes
        with kvik.Engine(secret="not " + SECRET) as engine, pytest.raises(kvik.SecretMismatch):
            Rig(engine, served.address)


def test_what_is_no_store_is_told_apart() -> None:
    with kvik.Engine() as engine, kvik.Engine() as other:
        layout = kvik.Layout(2, 8192, layers=2, layer_stride=16384)
        with pytest.raises(kvik.StoreUnavailable, match="does not answer as a store"):
            kvik.Store.connect(engine, other.addresses[0], NAMESPACE, layout, deadline=0.5)
        with pytest.raises(kvik.PeerUnreachable):
            kvik.Store.connect(engine, "127.0.0.1:1", NAMESPACE, layout, deadline=0.5)


def test_a_store_that_is_not_there_yet_is_met_when_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, native = threading.Event(), _native.StoreClient

    class Seen:
        @staticmethod
        def connect(*given: Any) -> _native.StoreClient:
            try:
                return native.connect(*given)
            except kvik.PeerUnreachable:
                tried.set()
                raise

    with Served() as served, kvik.Engine() as engine, ThreadPoolExecutor(1) as threads:
        served.kill()
        connect = partial(
            kvik.Store.connect, engine, served.address, NAMESPACE,
            kvik.Layout(2, 8192, layers=2, layer_stride=16384), deadline=LIMIT,
        )  # fmt: skip
        with pytest.raises(kvik.PeerUnreachable):
            connect(again=False)
        monkeypatch.setattr(_native, "StoreClient", Seen)
        store = threads.submit(connect)
        assert tried.wait(LIMIT)
        served.again()
        assert [member.up for member in store.result().members()] == [True]


def _resumes(rig: Rig, keys: bytes, there: int) -> None:
    """Calls succeed again by themselves, with so many blocks."""
    until = time.monotonic() + LIMIT
    while True:
        try:
            assert rig.got(keys, DEADLINE) == there
        except (kvik.StoreUnavailable, kvik.PeerLost, kvik.DeadlineExceeded):
            assert time.monotonic() < until
            time.sleep(
                0.02
            )  # Nobody tells when a store is there again: an engine asks with its next request.
        else:
            return


def _unavailable(rig: Rig, keys: bytes) -> None:
    """One call pays its deadline at most, the next ones nothing; bounds that hold on a busy machine, too."""
    watch = Watch()
    with pytest.raises((kvik.StoreUnavailable, kvik.PeerLost, kvik.DeadlineExceeded, kvik.PeerRestarted)):
        rig.got(keys, DEADLINE)
    assert watch.seconds() < DEADLINE + 3.0
    watch = Watch()
    for _ in range(20):
        with pytest.raises(kvik.StoreUnavailable):
            rig.got(keys, DEADLINE)
    assert watch.seconds() < 5 * DEADLINE


@contextmanager
def _at_once() -> Iterator[None]:
    """StoreUnavailable, long before the deadline of a call."""
    watch = Watch()
    with pytest.raises(kvik.StoreUnavailable):
        yield
    assert watch.seconds() < LONG / 6


@over_each
def test_a_killed_store_costs_no_deadline_and_comes_back_empty(transport: kvik.TransportName) -> None:
    with Served() as served, kvik.Engine(transport=transport) as engine:
        rig = Rig(engine, served.address)
        keys = rig.store.keys(range(32))
        rig.put(keys)
        assert rig.got(keys) == 8
        served.kill()
        for _ in range(20):
            with _at_once():
                rig.got(keys, LONG)
        served.again()
        _resumes(rig, keys, 0)
        assert rig.put(keys).stored == 8
        assert rig.got(keys) == 8
        del rig.bytes


@over_each
def test_a_store_that_is_back_before_it_is_asked_costs_no_request(transport: kvik.TransportName) -> None:
    with Served() as served, kvik.Engine(transport=transport) as engine:
        rig = Rig(engine, served.address)
        keys = rig.store.keys(range(16))
        served.kill()
        # Choosing sends nothing: the client has noticed by itself, and meets the store again by itself.
        _becomes(rig, available=False)
        served.again()
        _becomes(rig, available=True)
        assert rig.got(keys) == 0
        assert rig.put(keys).stored == 4
        del rig.bytes


def _becomes(rig: Rig, *, available: bool) -> None:
    """The client knows by itself whether the store is there."""
    until = time.monotonic() + LIMIT
    while (rig.store.choose(1, 1.0).reason != "unavailable") != available:
        assert time.monotonic() < until, f"it does not notice that the store is there: {available}"
        time.sleep(0.02)  # Nobody is told of it but who asks.


@over_each
def test_a_store_that_is_killed_in_the_middle_of_a_get_ends_it(transport: kvik.TransportName) -> None:
    with Served("--memory", "64MiB") as served, kvik.Engine(transport=transport) as engine:
        # More than a get has on its way at once.
        layout = kvik.Layout(64, 1 << 18, layers=2, layer_stride=64 << 18)
        region = engine.allocate(layout.nbytes)
        store = kvik.Store.connect(engine, served.address, NAMESPACE, layout)
        keys, pages = store.keys(range(4 * 64)), region.pages(layout, range(64))
        assert store.put(keys, pages, deadline=LONG).wait().stored == 64
        get = store.get(keys, pages, deadline=LONG)
        assert get.next() == 1
        served.kill()
        with _at_once():
            get.wait()


@over_each
def test_a_store_that_is_killed_before_it_answers_ends_what_waits(transport: kvik.TransportName) -> None:
    with Served() as served, kvik.Engine(transport=transport) as engine:
        rig = Rig(engine, served.address)
        keys = rig.store.keys(range(16))
        with served.stopped():
            get = rig.store.get(keys, rig.pages(range(4)), deadline=LONG)
            served.process.kill()
            with _at_once():
                get.wait()
        del rig.bytes


def _lent(rig: Rig) -> int:
    """Bytes that are lent."""
    (line,) = [line for line in rig.store.metrics().splitlines() if line.startswith("kvik_store_lent_bytes ")]
    return int(line.split()[1])


@over_each
def test_a_get_whose_task_is_cancelled_gives_back_what_is_lent(transport: kvik.TransportName) -> None:
    gets = 20

    async def give_up(rig: Rig, keys: bytes) -> None:
        async def got() -> int:
            return await rig.store.get(keys, rig.pages(range(16, 32)), deadline=LONG)

        for turns in range(gets):
            task = asyncio.ensure_future(got())
            for _ in range(1 + turns % 3):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with Served() as served, kvik.Engine(transport=transport) as engine:
        rig = Rig(engine, served.address)
        keys = rig.store.keys(range(64))
        rig.put(keys)
        began = time.monotonic()
        asyncio.run(give_up(rig, keys))
        # All of them were asked for, and nothing of them is lent any more.
        while rig.store.stat()["hits"] < gets * 16 or _lent(rig):
            assert time.monotonic() - began < LIMIT, "blocks are lent to nobody"
            time.sleep(0.02)  # Nobody tells a client when the store has what it lent.
        assert rig.got(keys) == 16
        del rig.bytes


@over_each
def test_a_put_whose_task_is_cancelled_leaves_the_pages_alone(transport: kvik.TransportName) -> None:
    async def give_up(engine: kvik.Engine, keys: bytes, pages: kvik.PageSet, turns: int) -> bool:
        async def put() -> kvik.Stored:
            return await store.put(keys, pages, deadline=LONG)

        task = asyncio.ensure_future(put())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        # They are the caller's again: nobody may read them.
        assert re.search(r"^kvik_grants_live 0$", engine.metrics(), re.MULTILINE)
        return task.cancelled()

    blocks, page = 64, 1 << 20
    with Served("--memory", "256MiB") as served, kvik.Engine(transport=transport) as engine:
        layout = kvik.Layout(blocks, page, layers=1)
        store = kvik.Store.connect(engine, served.address, NAMESPACE, layout)
        region = engine.allocate(blocks * page)
        keys = store.keys(range(blocks * store.namespace.block_tokens))
        memory = np.frombuffer(memoryview(region), dtype=np.uint8)
        cancelled = 0
        for turn in range(12):
            memory[:] = turn
            cancelled += asyncio.run(give_up(engine, keys, region.pages(layout, range(blocks)), 1 + turn))
            # What the store took of them before is what was put.
            memory[:] = 0xEE
            there = store.get(keys, region.pages(layout, range(blocks)), deadline=LONG).wait()
            assert (memory[: there * page] == turn).all(), "the store read pages that were the caller's again"
            store.clear()
        assert cancelled > 0
        del memory


@over_each
def test_a_stopped_store_costs_one_deadline_and_its_hits_resume(transport: kvik.TransportName) -> None:
    with Served() as served, kvik.Engine(transport=transport) as engine:
        rig = Rig(engine, served.address)
        keys = rig.store.keys(range(32))
        rig.put(keys)
        with served.stopped():
            _unavailable(rig, keys)
        _resumes(rig, keys, 8)
        del rig.bytes


def test_other_threads_go_on_while_one_asks_what_is_verified() -> None:
    with Served() as served, kvik.Engine() as engine:
        rig = Rig(engine, served.address)
        keys = rig.store.keys(range(32))
        rig.put(keys)
        calls, turns = list[tuple[float, float]](), list[float]()
        with served.stopped():
            get = rig.store.get(keys, rig.pages(range(8)), deadline=DEADLINE)

            def wait() -> None:
                with suppress(kvik.KvikError):
                    get.wait()

            def ask() -> None:
                while waiter.is_alive():
                    began = time.monotonic()
                    assert get.verified == 0
                    calls.append((began, time.monotonic()))

            waiter, asker = threading.Thread(target=wait), threading.Thread(target=ask)
            waiter.start()
            asker.start()
            while asker.is_alive():
                turns.append(time.monotonic())
                time.sleep(0.002)  # a turn of a thread that does something else
            waiter.join()
        # A call takes as long as the thread that waits has the get: some of them are long.
        long = [(began, ended - began) for began, ended in calls if ended - began > 0.02]
        assert long
        middle = [(began + took / 4, began + took * 3 / 4) for began, took in long]
        assert any(first < turn < last for turn in turns for first, last in middle)
        del rig.bytes


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_vanishes_leaves_nothing_behind(how: signal.Signals) -> None:
    with Served("--memory", "4MiB") as served, kvik.Engine() as engine:
        rig = Rig(engine, served.address)
        for _ in range(3):
            client = subprocess.Popen(
                [sys.executable, "-m", "tests.python.store_rig", served.address],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert client.stdout is not None
            assert client.stdout.readline() == "puts\n"
            client.send_signal(how)
            # Others are served meanwhile, and their blocks find room: nothing is pinned or filled for ever.
            for first in range(1000, 1020):
                assert rig.put(rig.store.keys(range(first * 100, first * 100 + 64)), LIMIT).refused == 0
            client.kill()
            client.wait(timeout=LIMIT)
            client.stdout.close()
        keys = rig.store.keys(range(1019 * 100, 1019 * 100 + 64))
        assert rig.got(keys) == 16
        rig.store.clear()
        until = time.monotonic() + LIMIT
        while rig.store.stat()["memory_bytes"] > 0:
            assert time.monotonic() < until, "something of a client that has gone is still held"
            time.sleep(0.02)  # What is lent ends with its grant, of which nobody else hears.
        del rig.bytes
