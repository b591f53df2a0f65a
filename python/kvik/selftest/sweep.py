"""Part 4: how fast pages of each size move, one thread with a few transfers in flight."""

from __future__ import annotations

from kvik.bench import pattern
from kvik.bench.options import OPS, size_text
from kvik.bench.pages import Cell, Op
from kvik.bench.run import salts
from kvik.selftest.mover import Point, measure, rate_text
from kvik.selftest.part import Part, Say
from kvik.selftest.plan import BLOCKS
from kvik.selftest.sides import Session, Sides

IN_FLIGHT = 4
TRANSFER_BYTES, MOST_PAGES = 8 << 20, 512


def source(sides: Sides, op: Op) -> None:
    """Fill the memory that a direction reads from."""
    salt = salts(sides.plan.asked.seed)[op]
    if op == "read":
        sides.other.fill(salt)
    else:
        pattern.fill(sides.memory.bytes, salt)


def points(buffer: int, op: Op) -> tuple[list[Point], list[int]]:
    """The points of a direction, and the sizes that do not fit into the memory."""
    fitting, left_out = [], []
    for block in BLOCKS:
        pages = min(TRANSFER_BYTES // block, MOST_PAGES, buffer // IN_FLIGHT // 2 // block)
        if pages < 1:
            left_out.append(block)
        else:
            fitting.append(Point(Cell(op, block, pages), 1, IN_FLIGHT))
    return fitting, left_out


def sweep(part: Part, session: Session, say: Say) -> None:
    """Both directions, every size that fits."""
    plan = session.plan
    part.data |= {"points": [], "left_out": []}
    say(f"  1 thread, {IN_FLIGHT} transfers in flight; GB/s: median of the repeats [lowest, highest]")
    with session.sides(part.name) as sides:
        for op in OPS:
            source(sides, op)
            fitting, left_out = points(sides.buffer, op)
            for point in fitting:
                row = measure(sides, point, plan.asked.seconds_per_point)
                part.data["points"].append(row)
                say(f"  {op:5} {size_text(point.cell.page_bytes):>6} x {row['pages']:<3}  {rate_text(row)}")
            part.data["left_out"] = [f"{size_text(block)}: more memory is needed" for block in left_out]
    for line in part.data["left_out"]:
        say(f"  left out  {line} (--max-bytes)")
    part.settle("; ".join(_best(part, op) for op in OPS))


def _best(part: Part, op: Op) -> str:
    rows = [row for row in part.data["points"] if row["op"] == op]
    best = max(rows, key=lambda row: float(row["bytes_per_s"]["median"]))
    return f"{op}: {rate_text(best)} at {size_text(best['block_bytes'])}"
