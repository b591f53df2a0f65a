"""Whether a transfer ends when it is told to, and whether what has ended stays so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import kvik
from kvik.bench.errors import CheckError
from kvik.bench.pages import Cell, PagePlan
from kvik.bench.pattern import POISON
from kvik.selftest.refusals import PAGE_BYTES, PAGES, expect
from kvik.selftest.sides import Sides

IN_TIME_S = 2.5
"""Seconds beyond which an end is late: docs/promises.md."""

_DEADLINE_S = 0.5
_SHORT_S = 0.001
_LONG_S = 30.0
_BIG_PAGE = 16 << 10
_LATER = 8
"""Transfers after one that has ended, in which something of it would still arrive."""


@contextmanager
def in_time(limit: float, what: str) -> Iterator[None]:
    """`CheckError` if the block takes longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    if took > limit:
        raise CheckError(f"{what} took {took:.2f} s; {limit:.2f} s are the limit")


def _waiting(sides: Sides, deadline: float) -> kvik.Transfer:
    """A transfer that waits for a grant that never comes."""
    ticket = sides.other.unknown(PAGE_BYTES)
    return sides.engine.read(sides.small(PAGES, PAGE_BYTES), ticket, range(PAGES), deadline=deadline)


def _half(sides: Sides, op: str) -> tuple[Cell, PagePlan, str]:
    """A cell of two batches that are half of the memory each."""
    cell = Cell("write" if op == "write" else "read", _BIG_PAGE, sides.buffer // _BIG_PAGE // 2)
    return cell, *sides.granted(cell, sides.plan.asked.seed)


def _later(sides: Sides, cell: Cell, pages: PagePlan, ticket: str) -> None:
    """Move the other half a few times."""
    for _ in range(_LATER):
        sides.judge(sides.move(cell, pages, ticket, 1).wait(), cell.batch_bytes)


def _demand_blank(sides: Sides, cell: Cell, pages: PagePlan) -> None:
    rows = sides.memory.bytes[: pages.buffer_pages * cell.page_bytes].reshape(-1, cell.page_bytes)
    if not bool((rows[pages.initiator_ids(0)] == POISON).all()):
        raise CheckError("memory was written after the transfer into it had ended")


def cancelled_waiting(sides: Sides) -> str:
    """Cancel a transfer that waits."""
    transfer = _waiting(sides, _LONG_S)
    with in_time(IN_TIME_S, "the end after cancel()"):
        transfer.cancel()
        expect(lambda: transfer, kvik.Cancelled)
    return "Cancelled, in time"


def cancelled_moving(sides: Sides) -> str:
    """Cancel a big read while it moves; its memory is this side's own from its end on."""
    cell, pages, ticket = _half(sides, "read")
    transfer = sides.move(cell, pages, ticket, 0)
    with in_time(IN_TIME_S, "the end after cancel()"):
        transfer.cancel()
        ended = _end_of(transfer, kvik.Cancelled)
    sides.memory.bytes[:] = POISON
    _later(sides, cell, pages, ticket)
    _demand_blank(sides, cell, pages)
    return f"{ended}, in time, and nothing came later"


def deadline_waiting(sides: Sides) -> str:
    """A transfer that waits, with a deadline."""
    transfer = _waiting(sides, _DEADLINE_S)
    with in_time(_DEADLINE_S + IN_TIME_S, f"the end of a transfer with a deadline of {_DEADLINE_S} s"):
        said = expect(lambda: transfer, kvik.DeadlineExceeded, kvik.GrantUnknown)
    return f"{said}, by its deadline"


def deadline_moving(sides: Sides) -> str:
    """A deadline that is too short for a big read."""
    cell, pages, ticket = _half(sides, "read")
    with in_time(_SHORT_S + IN_TIME_S, f"the end of a transfer with a deadline of {_SHORT_S} s"):
        ended = _end_of(sides.move(cell, pages, ticket, 0, deadline=_SHORT_S), kvik.DeadlineExceeded)
    sides.memory.bytes[:] = POISON
    _later(sides, cell, pages, ticket)
    _demand_blank(sides, cell, pages)
    return f"{ended}, in time, and nothing came later"


def _end_of(transfer: kvik.Transfer, error: type[kvik.KvikError]) -> str:
    """How a race between a transfer and its end came out: either is right."""
    try:
        transfer.wait()
    except error:
        return error.__name__
    return "done before its end came"


def revoke_gives_back(sides: Sides) -> str:
    """Revoke a grant while pages are written by it: the pages are the owner's own from then on."""
    count = sides.buffer // _BIG_PAGE // 2
    lent = sides.other.lend(count, _BIG_PAGE, right="write")
    local = sides.small(count, _BIG_PAGE)
    transfer = sides.engine.write(local, lent.ticket, range(count))
    took, state = sides.other.revoke(lent)
    if state != "revoked" or took > IN_TIME_S:
        raise CheckError(f"after {took:.2f} s the grant is {state}; revoked within {IN_TIME_S} s is due")
    sides.other.blank()
    with in_time(IN_TIME_S, "the end of the transfer after its grant was revoked"):
        ended = _end_of(transfer, kvik.GrantRevoked)
    # The owner's poison comes back by a new grant of the same pages: nothing of the old one is in it.
    again = sides.other.lend(count, _BIG_PAGE)
    sides.memory.bytes[:] = 0
    for _ in range(_LATER):
        sides.judge(sides.engine.read(local, again.ticket, range(count)).wait(), count * _BIG_PAGE)
    if not bool((sides.memory.bytes[: count * _BIG_PAGE] == POISON).all()):
        raise CheckError("pages were written after their grant was revoked")
    return f"they came back in {took * 1e3:.1f} ms ({ended}), nothing came later, and they were granted again"
