"""A replica's start by itself: which rank is named that does not come up, and what is left of the others."""

from __future__ import annotations

import asyncio
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kvik.config import EMULATOR
from kvik.emulator import replica
from kvik.emulator.faults import Faults
from kvik.emulator.metrics import Metrics
from kvik.emulator.options import Options
from kvik.emulator.replica import RankLink, Replica, ReplicaError
from kvik.emulator.wire import Message
from tests.busy import Watch

PLAN = Options(**{**EMULATOR.defaults(), "kv_memory": 1 << 20, "tp": 2}).plan()


class _Link:
    """A rank that says what it is told to; None: it ends, with this status."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.hello: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.process = SimpleNamespace(wait=lambda: -9)
        self.says: asyncio.Queue[Message | None] = asyncio.Queue()
        self.stepped = None
        self.closed = False

    async def start(self, _setup: object) -> None:
        """It is up."""

    async def next(self) -> Message | None:
        return await self.says.get()

    def kill(self) -> None:
        self.says.put_nowait(None)

    async def close(self, _limit: float) -> None:
        self.closed = True


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[_Link]:
    """The ranks that are started."""
    made: list[_Link] = []

    def link(number: int) -> _Link:
        made.append(_Link(number))
        return made[-1]

    monkeypatch.setattr(replica, "RankLink", link)
    return made


def _replica() -> Replica:
    return Replica(PLAN, 0, Metrics("tiny").replica(0), Faults(()), lambda _replica, _why: None)


async def _started(links: list[_Link]) -> asyncio.Task[None]:
    starting = asyncio.create_task(_replica().start())
    while len(links) < 2 or not all(link.says._getters for link in links):  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    return starting


def test_the_rank_that_does_not_start_is_the_one_that_is_named(links: list[_Link]) -> None:
    """And not one that was ended because of it."""

    async def run() -> None:
        starting = await _started(links)
        links[1].says.put_nowait(Message("failed", {"text": "its port is taken"}))
        links[1].says.put_nowait(None)
        with pytest.raises(ReplicaError, match="dp0 rank 1 ended by signal 9: its port is taken"):
            await starting
        assert all(link.closed for link in links)

    asyncio.run(run())


def test_a_rank_that_dies_before_the_others_are_up_is_noticed(links: list[_Link]) -> None:
    """Also where the last of them says so at that very moment: requests would wait for it for ever."""

    async def run() -> None:
        starting = await _started(links)
        links[0].hello.set_result(None)
        links[0].says.put_nowait(None)
        while links[1].says.empty():  # until it is killed
            await asyncio.sleep(0)
        links[1].hello.set_result(None)
        with pytest.raises(ReplicaError, match="dp0 rank 0 ended by signal 9"):
            await starting

    asyncio.run(run())


def test_a_start_that_is_given_up_leaves_no_rank(links: list[_Link]) -> None:
    async def run() -> None:
        starting = await _started(links)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert all(link.closed for link in links)

    asyncio.run(run())


def test_many_ranks_that_do_not_end_are_ended_at_once() -> None:
    """Also where there are fewer threads than ranks, as on a small machine."""

    async def run() -> tuple[float, float]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        links = [object.__new__(RankLink) for _ in range(16)]
        for link in links:
            link.process, link._hang_up = subprocess.Popen(["sleep", "60"]), lambda: None
        began, watch = time.monotonic(), Watch()
        assert await asyncio.gather(*(link.close(1.0) for link in links)) == [-9] * 16
        return time.monotonic() - began, watch.seconds()

    took, moved = asyncio.run(run())
    assert took >= 1.0
    assert moved < 10.0  # and not 16
