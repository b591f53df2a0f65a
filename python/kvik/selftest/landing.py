"""Whether pages land where they belong, and nowhere else: scattered, in random order, every byte compared."""

from __future__ import annotations

import numpy as np

from kvik.bench.errors import CheckError
from kvik.bench.options import size_text
from kvik.bench.pages import Cell, Op
from kvik.selftest.other import still_poisoned
from kvik.selftest.sides import Sides

PAGE_BYTES = (512, 4096, 12_296, 64 << 10)
"""The third is no multiple of a page of the machine or of a line of its cache."""

_PAGES = 32


def lands(op: Op, sides: Sides) -> str:
    """Move two batches of each page size; compare their bytes, and that all other memory is as it was."""
    moved = 0
    seed = sides.plan.asked.seed
    for page_bytes in PAGE_BYTES:
        cell = Cell(op, page_bytes, min(_PAGES, sides.buffer // page_bytes // 4))
        sides.blank(op)
        pages, ticket = sides.open(cell, seed)
        for batch in (0, 1):
            report = sides.move(cell, pages, ticket, batch).wait()
            moved += sides.judge(report, cell.batch_bytes).bytes
        sides.compare(cell, pages, 0, 2, seed)
        if op == "write":
            sides.other.demand_untouched(0, 2)
            continue
        ids = np.concatenate([pages.initiator_ids(batch) for batch in (0, 1)])
        wrong = still_poisoned(sides.memory.bytes, page_bytes, ids)
        if wrong is not None:
            raise CheckError(f"byte {wrong} of this side was changed, outside all pages of the transfer")
    sizes = ", ".join(size_text(size) for size in PAGE_BYTES)
    return (
        f"{moved} bytes in scattered pages of {sizes} are in place, and nothing else was changed; seed {seed}"
    )
