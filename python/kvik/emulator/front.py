"""The front: all data-parallel replicas of one server, and which of them a request goes to.

A replica that loses a rank ends as a whole, because the others hold shards of KV that is no longer complete.
Its requests begin anew on the replica with the least to do, or on its own successor: prompt and answer so far
are known here, and the KV is loaded again where its offer still stands, or recomputed. A request that sees
two replicas die fails by name. A replica is started again, but not more than three times in a minute.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from kvik.emulator.faults import Faults, parse_fault
from kvik.emulator.metrics import Metrics
from kvik.emulator.replica import Replica, ReplicaError, ReplicaPlan
from kvik.emulator.requests import Event, Request, Status
from kvik.emulator.scheduler import QueueFullError

logger = logging.getLogger("kvik.emulator")

MOST_DEATHS = 1
MOST_STARTS, STARTS_WITHIN_S = 3, 60.0


class UnavailableError(Exception):
    """Nobody here can take a request now; the text says why."""


@dataclass
class Place:
    """Where one replica runs. `replica` is None while it does not; `why` says so."""

    dp: int
    replica: Replica | None = None
    why: str = "starting"
    lost_for_good: bool = False
    given: int = 0
    starts: deque[float] = field(default_factory=deque)


class Front:
    """See the module."""

    def __init__(self, plan: ReplicaPlan, dp: int, faults: Faults) -> None:
        self.plan = plan
        self.faults = faults
        self.metrics = Metrics(plan.setup.shape.name)
        self._places = [Place(number) for number in range(dp)]
        self._views = [self.metrics.replica(number) for number in range(dp)]
        self._where: dict[str, Replica] = {}
        self._homeless: list[Request] = []
        self._tasks: set[asyncio.Task[None]] = set()
        for place in self._places:
            self.metrics.follow(place.dp, partial(_gauges, place))

    async def start(self) -> None:
        """Start all replicas side by side; `ReplicaError` names the first that does not start."""
        results = await asyncio.gather(
            *(self._start(place) for place in self._places), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                await self.close()
                raise result

    async def _start(self, place: Place) -> None:
        place.starts.append(time.monotonic())
        replica = Replica(self.plan, place.dp, self._views[place.dp], self.faults, self._died)
        await replica.start()
        place.replica, place.why = replica, ""

    async def close(self) -> None:
        """End all ranks; bounded."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        replicas = [place.replica for place in self._places if place.replica is not None]
        await asyncio.gather(*(replica.close() for replica in replicas))

    def health(self) -> dict[str, str]:
        """What each replica is: "ok", or why not."""
        return {f"dp{place.dp}": place.why or "ok" for place in self._places}

    def order_fault(self, text: str) -> None:
        """Order a fault of this server; `InvalidArgument` for one that it cannot have."""
        self.faults.order(parse_fault(text, len(self._places), self.plan.setup.tp))

    # Requests.

    def submit(self, request: Request) -> None:
        """Give a request to the replica with the least to do, of equals to the one that was given the fewest;
        `UnavailableError` when there is none."""
        live = [(place, place.replica) for place in self._places if place.replica is not None]
        if not live:
            raise UnavailableError("; ".join(f"{name}: {why}" for name, why in self.health().items()))
        place, replica = min(live, key=lambda entry: (entry[1].load, entry[0].given))
        place.given += 1
        try:
            replica.submit(request)
        except QueueFullError as error:
            raise UnavailableError(str(error)) from error
        self._where[request.request_id] = replica

    def leave(self, request: Request) -> None:
        """The client has its answer, or has left."""
        replica = self._where.pop(request.request_id, None)
        if request in self._homeless:
            self._homeless.remove(request)
            if replica is not None:
                self._views[replica.dp].finished(request, "abort")
        elif replica is not None:
            replica.abort(request)

    # Death.

    def _died(self, replica: Replica, why: str) -> None:
        """A replica has lost a rank: move its requests, start another one in its place."""
        logger.error("%s; the replica ends, its requests begin anew elsewhere", why)
        place = self._places[replica.dp]
        place.replica, place.why = None, why
        requests = [r for r in replica.scheduler.unfinished() if r.request_id in self._where]
        task = asyncio.create_task(self._replace(place, replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        for request in requests:
            request.deaths += 1
            if request.deaths > MOST_DEATHS:
                self._fail(place, request, f"{why}; it was the second replica that died with this request")
            else:
                request.restart()
                self._move(place, request)

    def _move(self, place: Place, request: Request) -> None:
        """Give a request of a replica that has died to another one."""
        try:
            self.submit(request)
        except UnavailableError as error:
            # One that is being started takes it; where all serve, or never will again, nobody comes for it.
            if any(place.replica is None and not place.lost_for_good for place in self._places):
                self._homeless.append(request)
            else:
                self._fail(place, request, str(error))

    def _fail(self, place: Place, request: Request, text: str) -> None:
        request.status = Status.FINISHED_ERROR
        request.events.put_nowait(Event(error=text))
        self._views[place.dp].finished(request, "error")

    async def _replace(self, place: Place, dead: Replica) -> None:
        """Clear away a dead replica and start its successor."""
        await dead.close(0.0)
        while place.starts and time.monotonic() - place.starts[0] > STARTS_WITHIN_S:
            place.starts.popleft()
        try:
            if len(place.starts) > MOST_STARTS:
                raise ReplicaError(f"{place.why}; it was started {len(place.starts)} times in a minute")
            await self._start(place)
            logger.warning("dp%d: started again", place.dp)
        except Exception as error:  # whatever it is: its requests wait for the outcome
            place.lost_for_good, place.why = True, str(error)
            logger.error("dp%d is lost for good: %s", place.dp, error)
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            self._move(place, request)


def _gauges(place: Place) -> dict[str, float]:
    if place.replica is None:
        return {"running": 0, "waiting": 0, "usage": 0, "held": 0}
    return place.replica.scheduler.gauges()
