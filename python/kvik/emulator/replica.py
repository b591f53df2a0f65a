"""One data-parallel replica: its ranks' processes, its scheduler, and the loop of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvik.emulator import wire
from kvik.emulator.compute import ComputeModel
from kvik.emulator.faults import Faults
from kvik.emulator.metrics import ReplicaMetrics
from kvik.emulator.pool import PagePool
from kvik.emulator.rank import Setup
from kvik.emulator.requests import Request
from kvik.emulator.scheduler import Limits, Scheduler, Step, weigh_ranks
from kvik.emulator.store_side import StoreSide
from kvik.emulator.wire import Message
from kvik.handover import digest, native
from kvik.handover.config import ConnectorConfig
from kvik.handover.holding import HeldBlocks
from kvik.handover.protocol import RankHello
from kvik.handover.report import ReportFile
from kvik.handover.scheduler import Identity, SchedulerSide

logger = logging.getLogger("kvik.emulator")

START_LIMIT_S = 120.0
END_LIMIT_S = 6.0


class ReplicaError(Exception):
    """The replica does not start, or has ended; the text names the rank and how it ended."""


@dataclass(frozen=True)
class ReplicaPlan:
    """Everything that a replica is made from, so that it can be made again."""

    setup: Setup  # with dp_rank and tp_rank to be filled in
    identity: Identity
    namespace: bytes
    limits: Limits
    compute: ComputeModel


class RankLink:
    """The front's end of one rank: its process and the socket to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.hello: asyncio.Future[RankHello] = asyncio.get_running_loop().create_future()
        self.stepped: asyncio.Future[Message] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        ours, theirs = socket.socketpair()
        with theirs:
            self._ours, self._hang_up = ours, ours.close
            command = [sys.executable, "-m", "kvik.emulator.rank", str(theirs.fileno())]
            # In a session of its own, so that a Ctrl-C reaches the front alone.
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )

    async def start(self, setup: Setup) -> None:
        """Say what the rank is."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._ours)
        self._hang_up = self._writer.close
        self.send(Message("setup", {"setup": asdict(setup)}))

    def send(self, message: Message) -> None:
        """Queue a message; a rank that has died is noticed by `messages`."""
        with contextlib.suppress(ConnectionError):
            wire.write_async(self._writer, message)

    async def next(self) -> Message | None:
        """The next message, None when the rank has closed or died."""
        return await wire.receive_async(self._reader)

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self.process.kill()

    async def close(self, limit: float) -> int:
        """Let it end by itself within `limit` seconds, or kill it; its exit status."""
        with contextlib.suppress(ConnectionError):
            self._hang_up()
        # There may be more ranks than threads to wait for them: all of them have until the same moment.
        return await asyncio.to_thread(self._end, time.monotonic() + limit)

    def _end(self, until: float) -> int:
        try:
            return self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Replica:
    """See the module. `on_death` is called once with the reason when a rank is lost while it serves."""

    def __init__(
        self,
        plan: ReplicaPlan,
        dp: int,
        metrics: ReplicaMetrics,
        faults: Faults,
        on_death: Callable[[Replica, str], None],
    ) -> None:
        self.dp = dp
        self._plan = plan
        self._metrics = metrics
        self._faults = faults
        self._on_death = on_death
        self._ranks: list[RankLink] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._serves = False
        self._ended: str | None = None
        config = ConnectorConfig.from_extra(plan.setup.connector)
        self._report = ReportFile(config.report_file)
        identity = replace(plan.identity, engine_id=f"{plan.identity.engine_id}_dp{dp}")
        held = HeldBlocks(config.park_after, identity.ranks)
        self._native = native.load()
        self._side = SchedulerSide(self._native, identity, config.expiry, held, self._report)
        pool = PagePool(plan.setup.pages)
        held.bind(pool)  # type: ignore[arg-type]  # its blocks are pages, to the handover any object
        self._store = self._store_side(pool)
        self.scheduler = Scheduler(
            plan.limits, pool, self._side, identity.ranks, self._keys, metrics, self._store
        )
        tp = plan.setup.tp
        self._weigh = weigh_ranks([plan.setup.shape.heads_of_rank(tp, rank) for rank in range(tp)])

    def _store_side(self, pool: PagePool) -> StoreSide | None:
        setup = self._plan.setup
        if setup.store is None:
            return None
        namespaces = [
            setup.store.namespace(setup.shape, setup.page_tokens, setup.tp, rank) for rank in range(setup.tp)
        ]

        def recompute(first: int, last: int) -> float | None:
            # A model that says nothing of time says nothing to compare with either.
            return self._plan.compute.prefill_seconds(first, last) or None

        return StoreSide(namespaces, setup.page_tokens, pool, recompute, self._metrics.store)

    def _keys(self, request: Request, full_pages: int) -> list[bytes]:
        """Content digests of a request's full pages, by which they are found again."""
        if full_pages == 0:
            return []
        page_tokens = self._plan.limits.page_tokens
        tokens = request.all_tokens()[: full_pages * page_tokens]
        extra = digest.extra_keys(request)
        return digest.links(self._native.content_chain(self._plan.namespace, extra, tokens, page_tokens))

    # Life.

    async def start(self) -> None:
        """Start the ranks; `ReplicaError` when one of them cannot be had. None is left then, nor where this
        is cancelled."""
        try:
            async with asyncio.timeout(START_LIMIT_S):
                hellos = await self._hellos()
        except BaseException as error:
            await self.close(0.0)
            if isinstance(error, TimeoutError):
                text = f"dp{self.dp}: its ranks were not up in {START_LIMIT_S:g} s"
                raise ReplicaError(text) from error
            raise
        self._side.set_ranks(hellos)
        self._serves = True
        self._tasks.append(asyncio.create_task(self._loop()))

    async def _hellos(self) -> dict[int, RankHello]:
        """Start the ranks, and wait until all of them are up."""
        for number in range(self._plan.setup.tp):
            self._ranks.append(RankLink(number))
        for link in self._ranks:
            await link.start(replace(self._plan.setup, tp_rank=link.number, dp_rank=self.dp))
            self._tasks.append(asyncio.create_task(self._listen(link)))
        hellos = {link.number: await link.hello for link in self._ranks}
        if self._ended is not None:  # one that was up has died since
            raise ReplicaError(self._ended)
        return hellos

    async def close(self, limit: float = END_LIMIT_S) -> None:
        """End the ranks, within about `limit` seconds, and everything that waits for them."""
        self._ended = self._ended or "it was closed"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.close(limit) for link in self._ranks))
        self._report.close()

    def _lost(self, link: RankLink, text: str) -> None:
        """A rank has ended or said that it cannot go on: so has the replica."""
        first, self._ended = self._ended is None, self._ended or text
        if not link.hello.done():
            link.hello.set_exception(ReplicaError(self._ended))  # the cause, of whichever rank it is
            link.hello.exception()  # `start` awaits one of them; the others are not forgotten, but the same
        if first:
            # The others hold shards of KV that is no longer whole; readers of them had better hear of it now.
            for other in self._ranks:
                other.kill()
            if self._serves:
                self._on_death(self, text)

    async def _listen(self, link: RankLink) -> None:
        """Take what a rank says, until it ends."""
        try:
            failed = ""
            while (message := await link.next()) is not None:
                if message.kind == "failed":
                    failed = f": {message.fields['text']}"
                else:
                    self._heard(link, message)
            status = await asyncio.to_thread(link.process.wait)
            how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
            self._lost(link, f"dp{self.dp} rank {link.number} {how}{failed}")
        except Exception as error:
            logger.exception("dp%d rank %d: what it said was not understood", self.dp, link.number)
            self._lost(link, f"dp{self.dp} rank {link.number} was not understood: {error}")

    def _heard(self, link: RankLink, message: Message) -> None:
        if message.kind == "hello":
            link.hello.set_result(wire.build(RankHello, message.fields["hello"]))
        elif message.kind == "stepped" and link.stepped is not None:
            link.stepped.set_result(message)
        elif message.kind == "report":
            self._reported(message)
        elif message.kind == "store":
            self.scheduler.on_store(message.fields["fetched"], message.fields["ended"])
            self._wake.set()
        else:
            raise wire.WireError(f"a message {message.kind!r} that nobody waits for")

    def _reported(self, message: Message) -> None:
        news = message.fields
        ended = (news["sent"], news["received"], news["parked"])
        self.scheduler.on_report(*ended, news["invalid"], news["failures"])
        self._metrics.handover(news["stats"])
        self._wake.set()

    # Requests.

    def submit(self, request: Request) -> None:
        """Queue a request; `QueueFullError` when too many wait."""
        self.scheduler.add(request)
        self._wake.set()

    def abort(self, request: Request) -> None:
        """The client has left."""
        self.scheduler.abort(request)
        self._wake.set()

    @property
    def load(self) -> int:
        """Tokens that are still to be computed, and a little for each request: where the next one goes."""
        requests = self.scheduler.unfinished()
        return sum(request.most_tokens - request.num_computed_tokens + 64 for request in requests)

    # Steps.

    async def _loop(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while (step := self.scheduler.schedule()).works:
                    self._send_plan()
                    await self._run(step)
                self._send_plan()
        except Exception as error:
            logger.exception("dp%d: the engine loop has failed", self.dp)
            self._lost(self._ranks[0], f"dp{self.dp}: its engine loop has failed: {error}")

    def _send_plan(self) -> None:
        """Hand over what the handover's scheduler side and the store's want of the ranks."""
        plan = self._side.take_plan()
        if any((plan.sends, plan.loads, plan.parks, plan.releases, plan.cancels)):
            message = Message("plan", {"plan": wire.plain(plan)})
            for link in self._ranks:
                link.send(message)
        self._metrics.handover(dict(self._side.take_counters()))
        for order in self._store.take_orders() if self._store is not None else ():
            for link, keys in zip(self._ranks, order.keys, strict=True):
                link.send(Message(order.kind, order.fields, [keys, order.pages]))

    async def _run(self, step: Step) -> None:
        """One step on all ranks; it takes as long as the compute model says, or longer."""
        loop = asyncio.get_running_loop()
        faults = self._faults.of_step(self.dp)
        for rank, number in faults.signals:
            self._ranks[rank % len(self._ranks)].send(Message("signal", {"number": number}))
        if faults.stand_s is None:
            await loop.create_future()  # for good
        elif faults.stand_s:
            await asyncio.sleep(faults.stand_s)
        began = time.monotonic()
        message = _message(step, self._plan.limits.page_tokens)
        for link in self._ranks:
            link.stepped = loop.create_future()
            link.send(message)
        answers = [await link.stepped for link in self._ranks if link.stepped is not None]
        digests = [answer.arrays[0].view(np.uint64).tolist() for answer in answers]
        seconds = self._plan.compute.seconds(step.prefill, step.decode, step.context)
        left = began + seconds * faults.factor + faults.extra_s - time.monotonic()
        self._metrics.step(seconds, late=left < 0 < seconds)
        if left > 0:
            await asyncio.sleep(left)
        self._order_wrong_pages(step)
        self.scheduler.finish_step(step, list(zip(*digests, strict=True)), self._weigh)

    def _order_wrong_pages(self, step: Step) -> None:
        """Faults that strike a finished prefill, before its pages are granted: messages are in order."""
        for work in step.works:
            request = work.request
            if not work.sample or request.outputs:
                continue
            numbers = request.page_numbers(0, request.num_prompt_tokens, self._plan.limits.page_tokens)
            hit = self._faults.wrong_page(numbers.tolist(), len(self._ranks))
            if hit is not None:
                rank, page, place = hit
                self._ranks[rank].send(Message("flip", {"page": page, "place": place}))


def _message(step: Step, page_tokens: int) -> Message:
    """What a rank has to know of a step; see `rank.Rank._step`."""
    fills, reads = [], []
    filled: list[npt.NDArray[Any]] = []
    read: list[npt.NDArray[Any]] = []
    for work in step.works:
        request, last = work.request, work.first + work.count
        if work.fill_from < last:
            fills.append([work.fill_from])
            filled += [
                request.page_numbers(work.fill_from, last, page_tokens),
                request.chain(work.fill_from, last),
            ]
        if work.sample:
            reads.append([work.read_from, last])
            read.append(request.page_numbers(work.read_from, last, page_tokens))
    return Message("step", {"fills": fills, "reads": reads}, [*filled, *read])
