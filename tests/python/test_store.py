"""`kvik.Store` within a process: what goes in comes out, or nothing does; keys are those of Rust."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvik
from kvik.store.client import Get, Put, _awaited
from tests.python.store_rig import NAMESPACE, RUN, Rig

LIMIT = 60.0

GOLDEN = Path(__file__).resolve().parents[1] / "golden/0.1/store_keys.json"


@pytest.fixture
def rig() -> Iterator[Rig]:
    with kvik.Engine() as engine:
        made = Rig(engine, None)
        yield made
        del made.bytes


def test_what_was_put_comes_back_up_to_the_first_that_is_missing(rig: Rig) -> None:
    keys = rig.store.keys(range(32))
    assert len(keys) == 8 * 32
    assert rig.got(keys) == 0
    assert rig.put(keys[: 5 * 32]) == kvik.Stored(5, 0, 0)
    assert rig.got(keys) == 5
    assert rig.put(keys) == kvik.Stored(3, 5, 0)
    assert rig.store.contains(keys) == [True] * 8
    assert rig.store.remove(keys[4 * 32 : 5 * 32]) == 4
    assert rig.got(keys) == 4
    assert rig.store.stat()["blocks"] == 4
    assert rig.store.clear() == 4


def test_blocks_come_one_group_after_the_other(rig: Rig) -> None:
    keys = rig.store.keys(range(32))
    rig.put(keys)
    seen = list(rig.store.get(keys, rig.pages(range(8))))
    assert seen == sorted(set(seen))
    assert (seen[0], seen[-1]) == (1, 8)


def test_a_put_that_is_accepted_goes_on(rig: Rig) -> None:
    keys = rig.store.keys(range(8))
    rig.fill(keys)
    put = rig.store.put(keys, rig.pages(range(2)), ack="accepted")
    assert put.acknowledged() is None
    assert put.wait() == kvik.Stored(2, 0, 0)
    with pytest.raises(kvik.InvalidArgument, match="no log"):
        rig.store.put(keys, rig.pages(range(2)), ack="durable").wait()


def test_a_log_outlives_the_engine(tmp_path: Path) -> None:
    with kvik.Engine() as engine:
        rig = Rig(engine, None, log=tmp_path / "log")
        keys = rig.store.keys(range(32))
        rig.fill(keys)
        assert rig.store.put(keys, rig.pages(range(8)), ack="durable").wait() == kvik.Stored(8, 0, 0)
        with pytest.raises(kvik.StorageFailed, match="process"):
            Rig(engine, None, log=tmp_path / "log")
        del rig.bytes
    del rig
    with kvik.Engine() as engine:
        rig = Rig(engine, None, log=tmp_path / "log")
        assert rig.got(keys) == 8
        assert rig.store.stat()["loaded"] == 8
        del rig.bytes


def test_asyncio(rig: Rig) -> None:
    keys = rig.store.keys(range(16))
    rig.fill(keys)

    async def both() -> int:
        await rig.store.put(keys, rig.pages(range(4)))
        return await rig.store.get(keys, rig.pages(range(4, 8)))

    assert asyncio.run(both()) == 4
    assert np.array_equal(rig.bytes[:, :4], rig.bytes[:, 4:8])


def test_a_task_that_is_cancelled_again_and_again_ends_after_what_it_waits_for() -> None:
    """What has not ended has the task's pages, and whoever ends a loop cancels all tasks of it."""
    ends = threading.Event()
    asked: list[int] = []

    async def cancelled(count: int) -> bool:
        waiting = asyncio.ensure_future(_awaited(lambda: ends.wait(LIMIT), lambda: asked.append(count)))
        await asyncio.sleep(0)  # it has begun
        for number in range(1, count + 1):
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            while not waiting.done() and len(asked) < number:
                await asyncio.sleep(0)
        done = waiting.done()
        ends.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return done

    for count in (1, 2):
        ends.clear()
        asked.clear()
        assert not asyncio.run(cancelled(count))


class Slow:
    """What was begun natively, whose end may take seconds."""

    verified = 0

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.ended_by: list[int] = []

    def cancel(self, here: bool = True) -> None:
        self.ended_by += [threading.get_ident()] if here else []
        self.asked.set()

    def wait(self, _: float | None) -> tuple[int, int, int]:
        assert self.asked.wait(LIMIT)
        return 0, 0, 0

    def next(self, _: float | None) -> None:
        assert self.asked.wait(LIMIT)


@pytest.mark.parametrize("kind", [Put, Get])
def test_the_loop_of_a_cancelled_task_does_not_end_what_that_awaits(kind: Any) -> None:
    """It would stand still meanwhile."""
    slow = Slow()

    async def awaited() -> None:
        await kind(slow)

    async def cancelled() -> None:
        waiting = asyncio.ensure_future(awaited())
        await asyncio.sleep(0)  # it has begun
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancelled())
    assert slow.asked.is_set()
    assert slow.ended_by == []


def test_another_namespace_is_a_miss(rig: Rig) -> None:
    keys = rig.store.keys(range(8))
    rig.put(keys)
    other = rig.store.within(replace(NAMESPACE, kv_dtype="bfloat16"), tenant="two")
    assert other.contains(keys) == [False, False]
    assert other.get(other.keys(range(8)), rig.pages(range(2))).wait() == 0
    assert rig.store.clear_tenant() == 2
    assert other.clear_tenant() == 0
    with pytest.raises(kvik.InvalidArgument, match="salt"):
        rig.store.within(NAMESPACE, tenant="two")


def test_what_cannot_be_is_refused(rig: Rig) -> None:
    keys = rig.store.keys(range(8))
    with pytest.raises(kvik.InvalidArgument, match="32 bytes each"):
        rig.store.get(keys[:-1], rig.pages(range(2)))
    with pytest.raises(kvik.InvalidArgument, match="2 keys and 3 pages"):
        rig.store.get(keys, rig.pages(range(3)))
    with pytest.raises(kvik.InvalidArgument, match="ack="):
        rig.store.put(keys, rig.pages(range(2)), ack="soon")  # type: ignore[arg-type]
    wider = kvik.Layout(2, 2 * RUN)
    with pytest.raises(kvik.ShapeMismatch):
        rig.store.put(keys, rig.region.pages(wider, range(2)))
    with pytest.raises(kvik.ShapeMismatch):
        rig.store.within(NAMESPACE, wider)
    with pytest.raises(kvik.InvalidArgument, match="1 to 128 bytes"):
        rig.store.within(replace(NAMESPACE, salt=b"nobody's"), tenant="")
    with pytest.raises(kvik.InvalidArgument, match="too short"):
        rig.store.keys_of([b"short"])
    with pytest.raises(kvik.InvalidArgument, match="at least one token"):
        kvik.Store.embedded(rig.engine, replace(NAMESPACE, block_tokens=0), rig.layout)
    with pytest.raises(kvik.InvalidArgument, match="memory"):
        kvik.Store.embedded(rig.engine, NAMESPACE, rig.layout, memory=1000)


def test_keys_are_those_of_rust() -> None:
    for vector in json.loads(GOLDEN.read_text()):
        fields = vector["namespace"]
        fields |= {name: tuple(fields[name]) for name in ("layers", "heads")}
        namespace = kvik.Namespace(**fields | {"salt": bytes.fromhex(fields["salt"])})
        items = [(at, bytes.fromhex(key)) for at, key in vector["items"]]
        keys = kvik.store.block_keys(namespace, vector["tokens"], bytes.fromhex(vector["extra"]), items)
        assert keys.hex() == "".join(vector["keys"])
        assert kvik.store.namespace_id(namespace).hex() == vector["id"]
        assert kvik.store.block_keys_of(namespace, [bytes.fromhex(vector["hash"])]).hex() == vector["key_of"]
