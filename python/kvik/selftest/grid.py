"""Part 5: how the rate grows with submitting threads and with transfers in flight."""

from __future__ import annotations

from kvik.bench.options import OPS, size_text
from kvik.bench.pages import Cell, Op
from kvik.selftest.mover import Point, measure, rate_text
from kvik.selftest.part import Part, Say
from kvik.selftest.sides import Session
from kvik.selftest.sweep import source

THREADS = (1, 2, 4, 8)
IN_FLIGHT = (1, 4, 16)
"""Of each thread."""

BLOCK, TRANSFER_BYTES = 64 << 10, 1 << 20
_LEAST_BLOCK = 512


def cell_for(buffer: int, op: Op) -> Cell:
    """What a transfer of every point moves: as much as leaves room for the point with most in flight."""
    room = buffer // (max(THREADS) * max(IN_FLIGHT))
    block = BLOCK
    while block > room and block > _LEAST_BLOCK:
        block //= 2
    return Cell(op, block, max(1, min(TRANSFER_BYTES, room) // block))


def grid(part: Part, session: Session, say: Say) -> None:
    """Both directions, every pair of counts."""
    part.data["points"] = []
    with session.sides(part.name) as sides:
        for op in OPS:
            source(sides, op)
            cell = cell_for(sides.buffer, op)
            say(f"  {op} of {cell.pages} x {size_text(cell.page_bytes)}: threads x transfers of each")
            for threads in THREADS:
                for in_flight in IN_FLIGHT:
                    row = measure(
                        sides, Point(cell, threads, in_flight), session.plan.asked.seconds_per_point
                    )
                    part.data["points"].append(row)
                    say(f"  {op:5} {threads} x {in_flight:<2}  {rate_text(row)}")
    part.settle("; ".join(_best(part, op) for op in OPS))


def _best(part: Part, op: Op) -> str:
    rows = [row for row in part.data["points"] if row["op"] == op]
    best = max(rows, key=lambda row: float(row["bytes_per_s"]["median"]))
    return f"{op}: {rate_text(best)} with {best['threads']} threads x {best['in_flight']} in flight"
