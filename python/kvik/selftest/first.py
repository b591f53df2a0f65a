"""Part 3: what the first transfer between two engines costs, cold and after a warm-up, and those after it."""

from __future__ import annotations

import time
from typing import Any

import kvik
from kvik.bench.errors import CheckError
from kvik.bench.options import OPS, size_text
from kvik.bench.pages import Cell, Op
from kvik.bench.report import seconds_text
from kvik.selftest.counts import ways_opened
from kvik.selftest.part import Part, Say, checked
from kvik.selftest.sides import Session, Sides

WARM = 5
BLOCK, PAGES = 64 << 10, 16
_SPREAD = 8
"""Bytes of memory, in transfers: each submit moves other pages."""


def first(part: Part, session: Session, say: Say) -> None:
    """For each direction, one submit at a time: fresh engines, one cold and `WARM` after it; fresh engines
    again, a warm-up and `WARM` after that."""
    pages = max(1, min(PAGES, session.plan.buffer // _SPREAD // BLOCK))
    part.data |= {"block_bytes": BLOCK, "pages": pages, "submits": [], "warm_ups": []}
    say(f"  {pages} x {size_text(BLOCK)}, one transfer at a time; seconds by phase")
    for op in OPS:
        cell = Cell(op, BLOCK, pages)
        for warmed in (False, True):
            with session.sides(part.name, cell.batch_bytes * _SPREAD) as sides:
                _series(part, sides, cell, say, warmed=warmed)
    part.settle("; ".join(_line(part.data, op) for op in OPS))


def _series(part: Part, sides: Sides, cell: Cell, say: Say, *, warmed: bool) -> None:
    """Between these two engines, which have not met: a warm-up if there is to be one, and the submits."""
    seed = sides.plan.asked.seed
    pages, text = sides.open(cell, seed)
    ticket = kvik.Ticket(text)
    sides.blank(cell.op)
    names = ["cold", *(f"warm {number}" for number in range(1, WARM + 1))]
    if warmed:
        names = [f"warmed {number}" for number in range(1, WARM + 1)]
        checked(part, f"warm-up before a {cell.op}", lambda: _warm_up(part, sides, cell.op, ticket), say)
    before = _opened(sides.engine)
    for number, name in enumerate(names):
        began = time.perf_counter()
        report = sides.move(cell, pages, ticket, number).wait()
        call = time.perf_counter() - began
        sides.judge(report, cell.batch_bytes)
        row: dict[str, Any] = {
            "op": cell.op,
            "which": name,
            "plan_s": report.plan_s,
            "post_s": report.post_s,
            "wire_s": report.wire_s,
            "verify_s": report.verify_s,
            "total_s": report.total_s,
            "call_s": call,
        }
        part.data["submits"].append(row)
        say(
            f"  {cell.op:5} {name:8}  plan {seconds_text(row['plan_s']):>8}  post "
            f"{seconds_text(row['post_s']):>8}  wire {seconds_text(row['wire_s']):>8}  "
            f"total {seconds_text(row['total_s']):>8}  for the caller {seconds_text(row['call_s']):>8}"
        )
    if warmed:
        after = _opened(sides.engine)
        checked(part, f"no {cell.op} after it opened anything", lambda: _nothing_opened(before, after), say)
    sides.compare(cell, pages, 0, len(names), seed)


def _warm_up(part: Part, sides: Sides, op: Op, ticket: kvik.Ticket) -> str:
    """Open all that the transfers need; `CheckError` where a NIC has no connection, or more is to do."""
    warmed = sides.engine.warm_up(ticket).wait()
    part.data["warm_ups"].append(
        {
            "op": op,
            "transports": list(warmed.transports),
            "channels": warmed.channels,
            "pairs": [
                {"nic": pair.nic, "peer_nic": pair.peer_nic, "state": pair.state, "reason": pair.reason}
                for pair in warmed.pairs
            ],
            "took_s": warmed.took_s,
        }
    )
    if warmed.failed:
        raise CheckError("; ".join(pair.reason for pair in warmed.failed))
    again = sides.engine.warm_up(ticket).wait()
    if not again.did_nothing:
        raise CheckError(f"a second one should find everything there, and opened {', '.join(again.opened)}")
    pairs = f", {len(warmed.pairs)} pairs of NICs" if warmed.pairs else ""
    return f"{', '.join(warmed.transports)}{pairs} in {seconds_text(warmed.took_s)}"


def _opened(engine: kvik.Engine) -> tuple[int, float]:
    """Sessions and connections of NICs that the engine has opened until now."""
    return engine.stats()["sessions_opened"], ways_opened(engine.metrics())


def _nothing_opened(before: tuple[int, float], after: tuple[int, float]) -> str:
    if before != after:
        raise CheckError(
            f"{after[0] - before[0]} sessions and {after[1] - before[1]:.0f} connections of NICs were opened "
            "after the warm-up"
        )
    return "no session, and no connection of a NIC"


def _line(data: dict[str, Any], op: Op) -> str:
    calls = {row["which"]: row["call_s"] for row in data["submits"] if row["op"] == op}
    best = min(seconds for which, seconds in calls.items() if which.startswith("warm "))
    return (
        f"{op}: cold {seconds_text(calls['cold'])}, after a warm-up {seconds_text(calls['warmed 1'])}, "
        f"later {seconds_text(best)} at best"
    )
