"""Both sides of a part: a fresh engine with memory here, and a fresh one in another process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

import kvik
from kvik.bench import pattern
from kvik.bench.contenders import as_asked
from kvik.bench.errors import CheckError
from kvik.bench.memory import Memory
from kvik.bench.pages import Cell, Op, PagePlan
from kvik.bench.run import salts
from kvik.bench.target import CLOSE_SECONDS, engine_at
from kvik.selftest.counts import NicCounts, nic_counts
from kvik.selftest.other import EXPIRY_SECONDS, MODULE, Other
from kvik.selftest.plan import Plan


@dataclass
class Sides:
    """What a part works with. `buffer` bytes of either side's memory are used."""

    plan: Plan
    engine: kvik.Engine
    memory: Memory
    other: Other
    buffer: int

    def move(
        self,
        cell: Cell,
        pages: PagePlan,
        ticket: str | kvik.Ticket,
        batch: int,
        deadline: float | None = None,
    ) -> kvik.Transfer:
        """Begin the transfer of one batch."""
        layout = self.memory.layout(cell.page_bytes)
        local = self.memory.pages(layout, pages.initiator_ids(batch))
        call = self.engine.read if cell.op == "read" else self.engine.write
        return call(local, ticket, pages.target_ids(batch), deadline=deadline)

    def judge(self, report: kvik.Report, nbytes: int) -> kvik.Report:
        """`CheckError` where a report says something else than was asked for."""
        if report.bytes != nbytes:
            raise CheckError(f"a transfer of {nbytes} bytes reports {report.bytes}")
        if not as_asked(self.plan.transport, report.transport):
            raise CheckError(
                f"{self.plan.transport} was asked for, and a transfer went over {report.transport}"
            )
        return report

    def open(self, cell: Cell, seed: int) -> tuple[PagePlan, str]:
        """Fill the source of a direction and have all of the other side's pages granted."""
        salt = salts(seed)[cell.op]
        if cell.op == "read":
            self.other.fill(salt)
        else:
            pattern.fill(self.memory.bytes, salt)
        return self.granted(cell, seed)

    def granted(self, cell: Cell, seed: int) -> tuple[PagePlan, str]:
        """The same over memory that is filled already."""
        pages = PagePlan(self.buffer, cell.page_bytes, cell.pages, "scattered", seed)
        ticket = self.other.open(
            cell, buffer=self.buffer, layout="scattered", seed=seed, expiry=EXPIRY_SECONDS * 6
        )
        return pages, ticket

    def blank(self, op: Op) -> None:
        """Overwrite the memory that a direction writes to."""
        if op == "read":
            self.memory.bytes[:] = pattern.POISON
        else:
            self.other.blank()

    def compare(self, cell: Cell, pages: PagePlan, first: int, count: int, seed: int) -> None:
        """Compare every byte of some batches with its source, on the side that they went to."""
        salt = salts(seed)[cell.op]
        if cell.op == "write":
            self.other.check(first, count, salt)
            return
        for batch in range(first, first + count):
            ids, source = pages.initiator_ids(batch), pages.target_ids(batch)
            wrong = pattern.check(self.memory.bytes, cell.page_bytes, ids, source, salt)
            if wrong is not None:
                raise CheckError(str(wrong))

    def small(self, pages: int, page_bytes: int) -> kvik.PageSet:
        """This side's first pages."""
        return self.memory.pages(self.memory.layout(page_bytes), np.arange(pages, dtype=np.uint32))


@dataclass
class Session:
    """Opens sides for the parts, counts what their NICs did, and can cut those of a part that hangs."""

    plan: Plan
    counted: dict[str, list[tuple[NicCounts, NicCounts]]] = field(default_factory=dict)
    _open: list[Other] = field(default_factory=list)

    @contextmanager
    def sides(self, part: str, buffer: int | None = None, *, counted: bool = True) -> Iterator[Sides]:
        """Start both sides; close them at the end, and count before that what their NICs did."""
        wanted = min(buffer or self.plan.buffer, self.plan.buffer)
        with ExitStack() as stack:
            engine = self.engine()
            stack.callback(engine.close, timeout=CLOSE_SECONDS)
            other = stack.enter_context(self._other(wanted))
            usable = min(wanted, other.options.buffer)
            yield Sides(self.plan, engine, Memory(engine, "shared", usable), other, usable)
            if counted:
                counts = (nic_counts(engine.metrics()), other.nics())
                self.counted.setdefault(part, []).append(counts)

    @contextmanager
    def beside(self, sides: Sides) -> Iterator[Sides]:
        """Another other side for the same engine and memory."""
        with self._other(sides.buffer) as other:
            yield replace(sides, other=other)

    def engine(self, secret: str | None = None) -> kvik.Engine:
        """An engine of this side, as the plan says; one with another secret stands beside it."""
        plan = self.plan
        return engine_at(
            plan.listen if secret is None else plan.free_port,
            secret=secret or plan.secret,
            transport=plan.transport,
            nics=plan.nics,
            name="selftest",
        )

    @contextmanager
    def _other(self, buffer: int) -> Iterator[Other]:
        plan = self.plan
        if plan.asked.target is not None:
            other = Other.join(plan.asked.target, plan.secret)
        else:
            options = replace(plan.target_options(plan.free_port), buffer=buffer)
            other = Other.start(options, plan.secret, module=MODULE)
        self._open.append(other)
        try:
            yield other
        finally:
            self._open.remove(other)
            other.close()

    def cut(self) -> None:
        """Cut the control connections of the sides that are open: what waits for them ends."""
        for other in list(self._open):
            other.cut()
