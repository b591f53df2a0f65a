"""The half in a worker process: one kvik engine, its grants, and its loads.

Nothing here waits. A step's plan is started before the step's forward pass. In host memory the serving
engine's own work on the plan's KV blocks is done by then. On a GPU it may still run, or not have begun:
grants and reads come behind what its stream was given so far, which the kvik engine sees to, and what is
launched after a load was reported sees it. What has ended is collected by polling flags once a step; the
transfers run in the kvik engine's own threads.

Each request id is reported exactly once: as sent when its grants have ended, as received when its load has
ended. A load is several reads as one (`Engine.read_all`), one for each prefill rank that has some of this
rank's heads and layers (`mapping.py`). Where a model's layers form several groups, each has KV blocks, a
layout and grants of its own in the same memory, and reads of its own in a load. A stream is a load of many
reads, one or more for each of its parts; what this side grants in parts is in `issuing.py`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvik.handover.config import ConnectorConfig
from kvik.handover.issuing import Issued, Issuing, take_back
from kvik.handover.loading import NotKeptError, OpenLoad, Share
from kvik.handover.mapping import releaser
from kvik.handover.memory import KvMemory
from kvik.handover.metrics import LoadStats
from kvik.handover.native import (
    Content,
    Engine,
    Grant,
    Native,
    PartRead,
    Region,
    Report,
    Ticket,
    error_code,
)
from kvik.handover.near import Choice, Spot, choose
from kvik.handover.protocol import (
    GroupSend,
    Load,
    Own,
    RankHello,
    RankPlace,
    Send,
    StepPlan,
    Unwanted,
)
from kvik.handover.releasing import Due, Releasing
from kvik.handover.report import LoadRecord, NicRecord, ReportFile, SendRecord, in_log, loaded
from kvik.handover.streaming import Division
from kvik.handover.tickets import read_ticket

logger = logging.getLogger("kvik.handover")

NOT_READY = "kvik: the worker's KV memory is not registered (or the connector is shut down)"


@dataclass
class OpenSend:
    """The grants over a request's KV blocks, one a group; how many blocks and bytes, and when they were
    issued, by the monotonic clock. computed_at: as of `SendRecord`."""

    grants: list[Grant]
    blocks: int
    nbytes: int
    issued_at: float
    computed_at: float

    @property
    def state(self) -> str:
        """Live while one of them is; then as the first ended that was not consumed."""
        states = [grant.state for grant in self.grants]
        if "live" in states:
            return "live"
        return next((state for state in states if state != "consumed"), "consumed")


class WorkerSide:
    """Worker-process half of a server, for one rank."""

    def __init__(
        self,
        native: Native,
        config: ConnectorConfig,
        role: str,
        place: RankPlace,
        report: ReportFile,
        on_host: int = 0,
    ) -> None:
        """`on_host`: how many of the server's ranks are on this host, which count on there; 0: all of a
        replica."""
        self._native = native
        self._config = config
        self._place = place
        self._name = f"{role}-rank{place.number}"
        self._report = report
        self._on_host = on_host or place.ranks
        self._engine: Engine | None = None
        self._region: Region | None = None
        self._stream: Callable[[], Any] = lambda: None
        self._layouts: list[Any] = []
        self._memories: list[KvMemory] = []
        self._issuing: Issuing | None = None
        self._grants: dict[str, OpenSend] = {}
        self._parked: dict[str, OpenSend] = {}
        self._parked_ends: list[str] = []
        self._loads: dict[str, OpenLoad] = {}
        self._releasing: Releasing | None = None
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._invalid_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._failures: dict[str, str] = {}
        self.stats = LoadStats()

    def register(self, memories: Sequence[KvMemory], stream: Callable[[], Any] | None = None) -> None:
        """Register this rank's KV memory, as each group of layers lies in it, and start its engine. Called
        once. `stream`: for KV on a GPU, what gives the stream that the serving engine's work is launched on;
        KV is granted, and loaded, behind what that was given before.
        """
        if self._engine is not None:
            raise RuntimeError("kvik: KV memory was registered twice in one worker")
        nics = self._choose_nics(memories[0].gpu)
        options = self._config.engine_options(self._name, self._place.number)
        engine = self._native.Engine(**options | nics.options())
        self._engine = engine
        self._releasing = Releasing(
            self._native, engine, self._config.release_deadline, self._ticket,
            lambda name, by: self.stats.count(name, by),
        )  # fmt: skip
        self._region = memories[0].region(engine)
        self._stream = stream or self._stream
        self._layouts = [memory.layout(self._native) for memory in memories]
        if len(memories) == 1:
            layers, rank = memories[0].layers, self._place.rank
            self._issuing = Issuing(self._native, rank, layers, self._grant_part)
        self._memories = list(memories)  # keeps the storage alive for as long as the engine may touch it
        for memory in memories:
            logger.info(
                "kvik: %s: engine %s on %s, NICs %s, %d KV blocks of %d layers in one region of %d bytes, "
                "shape [%s]", self._name, engine.id, ", ".join(engine.addresses),
                nics, memory.num_blocks, memory.shape.layers, memory.nbytes, memory.shape,
            )  # fmt: skip

    def _choose_nics(self, gpu: str | None) -> Choice:
        """The NICs of this rank, whose KV lies on that GPU."""
        number, config = self._place.number, self._config
        placed = config.cpus is not None or config.numa_node is not None
        spot = Spot(gpu, number % self._on_host, self._on_host)
        chosen = choose(config.nics_of(number), spot, placed)
        if chosen.unknown:
            logger.warning(
                "kvik: %s: all NICs of %s are opened, since those near this rank are not known: %s; name "
                "some in nics, or say all there", self._name, chosen.nics, chosen.unknown,
            )  # fmt: skip
        if chosen.nics is not None:
            self._report.write(NicRecord(number, chosen.nics, chosen.why, chosen.unknown))
        return chosen

    def opened(self) -> tuple[Engine, Region, Any]:
        """The engine, its region, and how pages of the first group lie there: for what else uses this
        memory."""
        engine, region = self._ready()
        return engine, region, self._layouts[0]

    @property
    def rank(self) -> int:
        """Its number among the ranks of its data-parallel replica."""
        return self._place.rank

    def hello(self) -> RankHello:
        """What the scheduler side needs to compose tickets for this rank."""
        engine, _ = self._ready()
        templates = [engine.ticket_template(layout) for layout in self._layouts]
        addresses = templates[0].addresses or engine.addresses
        return RankHello(
            place=self._place,
            address=addresses[0],
            kvik_engine_id=engine.id,
            ticket_templates=tuple(str(template) for template in templates),
            layers=tuple(memory.layers for memory in self._memories),
            shapes=tuple(memory.shape for memory in self._memories),
        )

    # One step.

    def begin_step(self, plan: StepPlan) -> None:
        """Start everything that the scheduler side decided on."""
        if self._issuing is not None:
            division = Division.of(self._memories[0].shape)
            self._issuing.begin_step(plan.segments, plan.revokes, division)
        for send in plan.sends:
            self._issue(send)
        for request_id in plan.parks:
            self._park(request_id)
        for load in plan.loads:
            self._start(load)
        for release in plan.releases:
            self._give_back(release.request_id, self._mine(release.parts), release.deadline)
        for request_id in plan.cancels:
            self._cancel(request_id)

    def saved(self, layer: str) -> None:
        """The step that runs has written the KV of this layer."""
        if self._issuing is not None:
            self._issuing.saved(layer)

    def collect(self, wait_s: float = 0.0, *, for_sends: bool = True) -> tuple[set[str], set[str]]:
        """Request ids whose blocks are sent, and whose loads have ended, since the last call.

        wait_s: seconds to wait for a load to end where none has, and `for_sends` where there is none for a
        send; for a step that has nothing else to do.
        """
        if wait_s > 0.0:
            self._await_end(wait_s, for_sends)
        for request_id, send in list(self._grants.items()):
            if (state := send.state) != "live":
                del self._grants[request_id]
                self._sent.add(request_id)
                self._end_send(request_id, send, state)
        for request_id, send in list(self._parked.items()):
            if (state := send.state) != "live":
                del self._parked[request_id]
                self._parked_ends.append(request_id)
                self._end_send(request_id, send, state)
        for request_id, issued in self._issuing.collect() if self._issuing is not None else ():
            self._end_stream(request_id, issued)
        for request_id, open_load in list(self._loads.items()):
            if open_load.done:
                del self._loads[request_id]
                self._end_load(open_load)
        if self._releasing is not None:
            self._releasing.collect()
        sent, self._sent = self._sent, set()
        received, self._received = self._received, set()
        return sent, received

    def take_parked_ends(self) -> list[str]:
        """What this side holds and whose grants have ended, since the last call: request ids of parked
        handovers, and keys of segments."""
        ends, self._parked_ends = self._parked_ends, []
        return ends + (self._issuing.take_ends() if self._issuing is not None else [])

    def take_invalid_blocks(self) -> set[int]:
        """Local KV blocks that a failed load was to fill, since the last call: of a model with one group,
        where such a block tells which tokens are missing."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def take_failed(self) -> set[str]:
        """Request ids of failed loads of a model with several groups, since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def take_failures(self) -> dict[str, str]:
        """Why loads have failed, by request id, since the last call: for the answers of these requests."""
        failures, self._failures = self._failures, {}
        return failures

    def take_stats(self) -> LoadStats:
        """Counts since the last call."""
        stats, self.stats = self.stats, LoadStats()
        return stats

    def close(self) -> None:
        """Cancel loads, end grants and close the engine, within `close_timeout`."""
        for open_load in self._loads.values():
            open_load.cancel()
        if self._engine is not None:
            try:
                self._engine.close(self._config.close_timeout)
            except self._native.KvikError as error:
                logger.warning("kvik: %s: closing: %s", self._name, error)
        self._engine = self._region = None
        self._grants.clear()
        self._parked.clear()
        self._loads.clear()
        self._memories.clear()
        self._issuing = self._releasing = None
        self._report.close()

    # Prefill side.

    def _issue(self, send: Send) -> None:
        """Expose a finished request's blocks to one decode server."""
        grants: list[Grant] = []
        nbytes = 0
        for group, (one, memory) in enumerate(zip(send.groups, self._memories, strict=True)):
            nbytes += len(one.blocks) * memory.shape.layers * memory.shape.block_bytes
            try:
                grants.append(self._grant(send.request_id, group, one))
            except self._native.KvikError as error:
                # The blocks must go back all the same; the reader is told that the grant is unknown.
                logger.error(
                    "kvik: request %s: grant %s not issued: %s", send.request_id,
                    one.grants[self._place.rank], error,
                )  # fmt: skip
                self.stats.count("sends_failed")
                take_back(self._native, send.request_id, grants)
                break
        if grants:
            blocks = sum(len(one.blocks) for one in send.groups)
            self._grants[send.request_id] = OpenSend(
                grants, blocks, nbytes, time.monotonic(), self._written_at()
            )
        else:
            self._sent.add(send.request_id)

    def _grant(self, request_id: str, group: int, send: GroupSend) -> Grant:
        rank = self._place.rank
        content = self._native.Content(send.chain, send.parts[rank])
        return self._expose(request_id, group, send.blocks, None, send.grants[rank], content)

    def _grant_part(
        self, request_id: str, blocks: Sequence[int], layers: tuple[int, int], grant_id: str, chain: bytes,
        part: bytes,
    ) -> Grant:  # fmt: skip
        return self._expose(request_id, 0, blocks, layers, grant_id, self._native.Content(chain, part))

    def _expose(
        self,
        request_id: str,
        group: int,
        blocks: Sequence[int],
        layers: tuple[int, int] | None,
        grant_id: str,
        content: Content,
    ) -> Grant:
        """Grant these KV blocks of a group; `layers`: some of this rank's only."""
        engine, region = self._ready()
        return engine.grant(
            region.pages(self._layouts[group], np.asarray(blocks, dtype=np.uint32), layers=layers),
            right="read",
            use=1,
            expiry=self._config.expiry,
            max_expiry=self._config.max_expiry,
            grant_id=grant_id,
            after=self._stream(),
            tag=request_id,
            content=content,
        )

    def _ticket(self, text: str) -> Ticket:
        """A ticket of an offer, as of `read_ticket`."""
        return read_ticket(self._native, text, bool(self._config.secret or self._config.tls))

    def _wanted(self, own: Own, rank: int) -> Content:
        """The content that a request has a right to on a prefill rank."""
        return self._native.Content(own.chain, own.parts[rank])

    def _end_send(self, request_id: str, send: OpenSend, state: str) -> None:
        """Say and count how a grant has ended. Readers that confirm do so after reading, or to give back what
        they do not need: this side cannot tell which."""
        level = logging.WARNING if state != "consumed" else self._good_level()
        ended = "every reader has confirmed" if state == "consumed" else f"its grant ended as {state}"
        logger.log(
            level, "kvik: request %s: %s, %d KV blocks (%d bytes on %s) go back after %.2f ms", request_id,
            ended, send.blocks, send.nbytes, self._rank_text(),
            (time.monotonic() - send.issued_at) * 1e3,
        )  # fmt: skip
        self.stats.count(f"sends_{state}")
        self._report.write(
            SendRecord(request_id, request_id, state, self._place.rank, len(send.grants), send.computed_at)
        )

    def _written_at(self) -> float:
        """When a step has last written the last layer, by the wall clock; 0: not known."""
        return 0.0 if self._issuing is None else self._issuing.computed_at

    def _end_stream(self, request_id: str, issued: Issued) -> None:
        """Say and count how a request's handover in parts has ended."""
        memory, state = self._memories[0], issued.state
        level = logging.WARNING if state != "consumed" or issued.failed else self._good_level()
        ended = "every reader has confirmed" if state == "consumed" else f"its grants ended as {state}"
        nbytes = issued.blocks * memory.shape.layers * memory.shape.block_bytes
        after_s = time.monotonic() - issued.last_at if issued.parts else 0.0
        logger.log(
            level, "kvik: request %s: %s, %d KV blocks (%d bytes on %s) in %d parts of %s go back %.2f ms "
            "after the last was granted", request_id, ended, issued.blocks, nbytes, self._rank_text(),
            issued.parts, issued.stream_id, after_s * 1e3,
        )  # fmt: skip
        self._report.write(
            SendRecord(
                request_id, issued.stream_id, state, self._place.rank, issued.parts, issued.computed_at
            )
        )
        self.stats.count(f"sends_{state}")
        self.stats.count("sends_failed", issued.failed)
        self.stats.count("sent_streams")

    def _park(self, request_id: str) -> None:
        """Let the engine's request end while its grant lives on. One that ended first was reported."""
        send = self._grants.pop(request_id, None)
        if send is None:
            self._parked_ends.append(request_id)
            return
        self._parked[request_id] = send
        self._sent.add(request_id)

    # Decode side.

    def _start(self, load: Load) -> None:
        """Begin reading this rank's part of the missing blocks of one request."""
        engine, _ = self._ready()
        shares = [Share(group, read) for group in load.groups for read in group.reads[self._place.rank]]
        open_load = self._loads[load.request_id] = OpenLoad(load, shares, time.time())
        reads: list[PartRead] = []
        try:
            for share in shares:
                reads.append(self._read(share))
            open_load.transfer = engine.read_all(
                reads,
                deadline=load.deadline or self._config.deadline,
                after=self._stream(),
                tag=load.request_id,
            )
        except (self._native.KvikError, NotKeptError) as error:
            at = getattr(error, "read", None)
            open_load.refused, open_load.at = error, len(reads) if at is None else at

    def _read(self, share: Share) -> PartRead:
        _, region = self._ready()
        group, read = share
        if group.remote.first < 0:
            raise NotKeptError("prefill has not kept the KV blocks that this server wants in a window")
        # Heads are slices of a layout; None, the whole, where heads lie inside the tokens.
        apart = self._memories[group.group].shape.heads_outermost
        return self._native.Read(
            region.pages(
                self._layouts[group.group],
                np.asarray(group.local.ids, dtype=np.uint32),
                layers=read.local_layers,
                slices=read.local_heads if apart else None,
                parts=group.local.parts,
            ),
            self._ticket(group.tickets[read.rank]),
            range(group.remote.first, group.remote.end),
            confirm=group.to_the_end,
            remote_layers=read.remote_layers,
            remote_slices=read.remote_heads if apart else None,
            remote_parts=group.remote.parts,
            readers=group.readers[read.rank],
            content=self._wanted(group.own, read.rank),
        )

    def _await_end(self, wait_s: float, for_sends: bool) -> None:
        """Wait for the load that was begun first, or without one for the send that was, unless one has ended.
        How it ends is asked afterwards. Nobody needs the end of a send at once, but an idle vLLM steps until
        then, and each step takes its processes' time."""
        loads, sends = list(self._loads.values()), list(self._grants.values())
        if loads and loads[0].transfer is not None and not any(load.done for load in loads):
            with contextlib.suppress(self._native.KvikError):
                loads[0].transfer.wait(wait_s)
        elif for_sends and not loads and sends and all(send.state == "live" for send in sends):
            sends[0].grants[0].wait(wait_s)

    def _end_load(self, ended: OpenLoad) -> None:
        load = ended.load
        self._received.add(load.request_id)
        report = None if ended.transfer is None else ended.transfer.report()
        if report is None:
            self._fail(ended)
            return
        reports = report.reads
        for (group, read), one in zip(ended.shares, reports, strict=True):
            ended_at = ended.began_at + one.total_s
            self._report.write(loaded(load, group, self._place.rank, read.rank, one, ended_at))
        given = [*self._unused(ended), *(due for part in self._mine(load.unread) for due in part)]
        self._give_back(load.request_id, [given])
        if load.deadline is not None:
            self._end_parts(ended, reports)
            return
        self.stats.add_load(reports)
        logger.log(
            self._good_level(),
            "kvik: request %s: KV of prefill's request %s loaded: %d KV blocks, %d bytes on %s, over %s in "
            "%.2f ms", load.request_id, in_log(load.remote_request_id), load.blocks,
            sum(report.bytes for report in reports), self._rank_text(),
            ", ".join(sorted({f"{report.transport} ({report.mechanism})" for report in reports})),
            max(report.total_s for report in reports) * 1e3,
        )  # fmt: skip

    def _end_parts(self, ended: OpenLoad, reports: Sequence[Report]) -> None:
        """All parts of a stream are there."""
        load = ended.load
        self.stats.add_stream(reports)
        last = max(reports, key=lambda report: report.total_s, default=None)
        logger.log(
            self._good_level(),
            "kvik: request %s: %s of prefill loaded: %d KV blocks, %d bytes on %s in %d parts, over %s; the "
            "last took %.2f ms, and was there %.2f ms after it was asked for",
            load.request_id, in_log(load.remote_request_id), load.blocks,
            sum(report.bytes for report in reports), self._rank_text(), len(reports),
            ", ".join(sorted({f"{report.transport} ({report.mechanism})" for report in reports})),
            0.0 if last is None else last.wire_s * 1e3, 0.0 if last is None else last.total_s * 1e3,
        )  # fmt: skip

    def _fail(self, ended: OpenLoad) -> None:
        """A load has failed: its blocks are invalid; the prefill side is told where that can help."""
        load, (error, at) = ended.load, ended.failure()
        code, remote_rank = error_code(error), None if at is None else ended.shares[at].read.rank
        self.stats.count("loads_cancelled" if ended.cancelled else f"loads_failed_{code}")
        self._report.write(
            LoadRecord(
                load.request_id, load.remote_request_id, "failed", code, self._place.rank, remote_rank,
                load.blocks,
            )
        )  # fmt: skip
        if not ended.cancelled:
            self._failures[load.request_id] = code
            # An aborted request's blocks are freed by the engine; naming them here could hit the next owner.
            if load.several_groups:
                self._failed.add(load.request_id)
            else:
                self._invalid_blocks.update(block for group in load.groups for block in group.local_blocks)
            logger.warning(
                "kvik: request %s: load of prefill's request %s from its rank %s failed (%s): %s",
                load.request_id, in_log(load.remote_request_id), remote_rank, code, error,
            )  # fmt: skip
        # Prefill may go on and grant parts of a stream that nobody wants any more; not so where the client
        # has left: prefill has lost it as well.
        patience, unused = None if ended.cancelled else load.deadline, self._unused(ended)
        parts = [unused] if load.deadline is None else [*self._mine(load.unread), *([due] for due in unused)]
        self._give_back(load.request_id, parts, patience)

    def _cancel(self, request_id: str) -> None:
        """Stop the load of an aborted request; it is reported when it has ended."""
        open_load = self._loads.get(request_id)
        if open_load is not None:
            open_load.cancelled = True
            open_load.cancel()

    def _mine(self, parts: Sequence[Unwanted]) -> list[list[Due]]:
        """This rank's share of what nobody reads, by part: each ticket has one releaser."""
        ranks, own = self._place.ranks, self._place.rank
        return [
            [
                Due(ticket, 1, self._wanted(part.own, rank))
                for rank, ticket in part.tickets.items()
                if releaser(rank, ranks) == own
            ]
            for part in parts
        ]

    def _unused(self, ended: OpenLoad) -> list[Due]:
        """The tickets of an ended load that this rank has not used up, and has done with."""
        return [
            Due(group.tickets[read.rank], group.readers[read.rank], self._wanted(group.own, read.rank))
            for group, read in ended.to_release()
        ]

    def _good_level(self) -> int:
        """The level of what went well: one line a request, so that of the first rank, and the others' for
        who looks closer."""
        return logging.INFO if self._place.rank == 0 else logging.DEBUG

    def _rank_text(self) -> str:
        return f"rank {self._place.rank} of {self._place.ranks}"

    def _give_back(self, request_id: str, parts: list[list[Due]], deadline: float | None = None) -> None:
        """Give tickets back, as of `Releasing.give`."""
        if self._releasing is None:
            raise RuntimeError(NOT_READY)
        self._releasing.give(request_id, parts, deadline)

    def _ready(self) -> tuple[Engine, Region]:
        if self._engine is None or self._region is None:
            raise RuntimeError(NOT_READY)
        return self._engine, self._region
