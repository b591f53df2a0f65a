"""The front by itself: what becomes of requests whose replica has died."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from kvik.config import EMULATOR
from kvik.emulator.faults import Faults
from kvik.emulator.front import Front
from kvik.emulator.options import Options
from kvik.emulator.requests import Request, Sampling
from kvik.emulator.scheduler import QueueFullError

OPTIONS = Options(**{**EMULATOR.defaults(), "kv_memory": 1 << 20})


class _Replica:
    """One that takes so many requests."""

    dp = 0

    def __init__(self, room: int) -> None:
        self.room = room
        self.requests: list[Request] = []
        self.scheduler = self
        self.load = 0

    def submit(self, request: Request) -> None:
        if len(self.requests) >= self.room:
            raise QueueFullError("too many wait")
        self.requests.append(request)

    def unfinished(self) -> list[Request]:
        return self.requests

    async def close(self, _limit: float = 0.0) -> None:
        """It has nothing."""


def _request(name: str) -> Request:
    return Request(name, np.array([5], dtype=np.uint32), Sampling(1), "tiny")


def test_a_request_for_which_the_successor_has_no_room_ends_by_name() -> None:
    async def run() -> None:
        front: Any = Front(OPTIONS.plan(), 1, Faults(()))
        first, second = _Replica(2), _Replica(1)

        async def start(place: Any) -> None:
            place.replica, place.why = second, ""

        front._start = start
        front._places[0].replica = first
        requests = [_request("a"), _request("b")]
        for request in requests:
            front.submit(request)
        front._died(first, "dp0 rank 0 ended")
        await asyncio.gather(*front._tasks)
        assert second.requests == requests[:1]
        assert "too many wait" in str(requests[1].events.get_nowait().error)
        await front.close()

    asyncio.run(run())


def test_a_request_whose_successor_cannot_be_started_ends_by_name() -> None:
    """Whatever hinders it, such as a machine without room for another process."""

    async def run() -> None:
        front: Any = Front(OPTIONS.plan(), 1, Faults(()))
        dead = _Replica(1)

        async def start(_place: Any) -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        front._start = start
        front._places[0].replica = dead
        request = _request("a")
        front.submit(request)
        front._died(dead, "dp0 rank 0 ended")
        await asyncio.gather(*front._tasks, return_exceptions=True)
        assert "Resource temporarily unavailable" in str(request.events.get_nowait().error)
        assert "Resource temporarily unavailable" in front.health()["dp0"]

    asyncio.run(run())
