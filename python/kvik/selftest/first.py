"""Part 3: what the first transfer between two engines costs, and those after it, phase by phase."""

from __future__ import annotations

import time
from typing import Any

from kvik.bench.options import OPS, size_text
from kvik.bench.pages import Cell, Op
from kvik.bench.report import seconds_text
from kvik.selftest.part import Part, Say
from kvik.selftest.sides import Session

WARM = 5
BLOCK, PAGES = 64 << 10, 16
_SPREAD = 8
"""Bytes of memory, in transfers: each submit moves other pages."""


def first(part: Part, session: Session, say: Say) -> None:
    """For each direction: fresh engines, one cold submit, and `WARM` after it, one at a time."""
    pages = max(1, min(PAGES, session.plan.buffer // _SPREAD // BLOCK))
    part.data |= {"block_bytes": BLOCK, "pages": pages, "submits": []}
    say(f"  {pages} x {size_text(BLOCK)}, one transfer at a time; seconds by phase")
    for op in OPS:
        for row in _submits(session, Cell(op, BLOCK, pages), part.name):
            part.data["submits"].append({"op": op, **row})
            say(
                f"  {op:5} {row['which']:6}  plan {seconds_text(row['plan_s']):>8}  post "
                f"{seconds_text(row['post_s']):>8}  wire {seconds_text(row['wire_s']):>8}  "
                f"total {seconds_text(row['total_s']):>8}  for the caller {seconds_text(row['call_s']):>8}"
            )
    part.settle("; ".join(_line(part.data["submits"], op) for op in OPS))


def _submits(session: Session, cell: Cell, part: str) -> list[dict[str, Any]]:
    rows = []
    with session.sides(part, cell.batch_bytes * _SPREAD) as sides:
        seed = session.plan.asked.seed
        pages, ticket = sides.open(cell, seed)
        sides.blank(cell.op)
        for number in range(WARM + 1):
            began = time.perf_counter()
            report = sides.move(cell, pages, ticket, number).wait()
            call = time.perf_counter() - began
            sides.judge(report, cell.batch_bytes)
            rows.append(
                {
                    "which": f"warm {number}" if number else "cold",
                    "plan_s": report.plan_s,
                    "post_s": report.post_s,
                    "wire_s": report.wire_s,
                    "verify_s": report.verify_s,
                    "total_s": report.total_s,
                    "call_s": call,
                }
            )
        sides.compare(cell, pages, 0, WARM + 1, seed)
    return rows


def _line(rows: list[dict[str, Any]], op: Op) -> str:
    calls = [row["call_s"] for row in rows if row["op"] == op]
    return f"{op}: cold {seconds_text(calls[0])}, warm {seconds_text(min(calls[1:]))} at best"
