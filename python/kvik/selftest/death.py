"""Whether a killed peer is noticed in time, and whether a new one serves."""

from __future__ import annotations

import time

import kvik
from kvik.bench.errors import CheckError
from kvik.bench.pages import Cell
from kvik.selftest.ends import IN_TIME_S
from kvik.selftest.refusals import PAGE_BYTES, PAGES
from kvik.selftest.sides import Session, Sides

BUFFER = 8 << 20
_SLACK_S = 0.5
"""For this process to wake up on a busy machine."""

_LONG_S = 30.0


def killed(session: Session, part: str) -> str:
    """Kill the other side in the middle of transfers, then read from a new one."""
    with session.sides(part, BUFFER, counted=False) as old:
        _one_read(old)  # There is a session, so what comes is a loss and no failed connection.
        waiting = old.engine.read(
            old.small(PAGES, PAGE_BYTES), old.other.unknown(PAGE_BYTES), range(PAGES), deadline=_LONG_S
        )
        began = time.monotonic()
        old.other.kill()
        try:
            waiting.wait()
            raise CheckError("a transfer with a killed peer reports success")
        except (kvik.PeerLost, kvik.PeerUnreachable) as error:
            name = type(error).__name__
        took = time.monotonic() - began
        if took > IN_TIME_S + _SLACK_S:
            raise CheckError(f"{name} after {took:.2f} s; within {IN_TIME_S + _SLACK_S} s is due")
        with session.beside(old) as new:
            _one_read(new)
    return f"{name} after {took * 1e3:.0f} ms; a new peer serves the same engine"


def _one_read(sides: Sides) -> None:
    cell, seed = Cell("read", PAGE_BYTES, 64), sides.plan.asked.seed
    sides.blank("read")
    pages, ticket = sides.open(cell, seed)
    sides.judge(sides.move(cell, pages, ticket, 0).wait(), cell.batch_bytes)
    sides.compare(cell, pages, 0, 1, seed)
