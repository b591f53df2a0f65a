"""Errors put into clean tables, and what a person who recomputed everything would say of each.

The error stands in a derived number. Where that number is itself an input of others (a corrupted total beside
shares of it), those others no longer follow from what is printed either: a finding there is right too, so
those places are tolerated, but only a finding at the error itself counts as having found it. Two derived
cells that were exchanged are both wrong; naming either with its value counts, since a person who mends one
sees the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.lab.corpus.drafting import Draft, Kind, Slip
from tests.lab.corpus.figures import Number
from tests.lab.corpus.layout import Document, Spot, Table, spots, write

_CLEAR = 0.6
"""Units of the last digit by which an error misses what follows: neither rounding nor cutting explains it."""

_PREFIXES = {
    "GB/s": "MB/s",
    "MB/s": "GB/s",
    "KiB": "MiB",
    "MiB": "GiB",
    "GiB": "MiB",
    "MB": "GB",
}


@dataclass(frozen=True)
class Wrong:
    """One wrong number: where it stands, what is printed, and the bounds of the right one, in its unit.

    A finding may name the right value to within `slack` of the bounds.
    """

    spot: Spot
    printed: str
    right: str
    low: float
    high: float
    unit: str
    slack: float


@dataclass(frozen=True)
class Injected:
    """A document with one error."""

    text: str
    kind: Kind
    wrong: tuple[Wrong, ...]
    tolerated: frozenset[Spot]


class CannotInjectError(Exception):
    """A table has no number in which this kind of error would be one."""


def numbers(document: Document) -> list[Number]:
    """All derived numbers that are shown, in order."""
    shown = spots(document)
    found = []
    for block in document.blocks:
        parts = (
            [part for row in block.rows for one in row for part in one.parts]
            if isinstance(block, Table)
            else getattr(block, "parts", ())
        )
        found += [part for part in parts if isinstance(part, Number) and part.rule and part.id in shown]
    return found


def inject(document: Document, draft: Draft, kind: Kind, rng: np.random.Generator) -> Injected:
    """The document with an error of this kind."""
    places = spots(document)
    every = numbers(document)
    in_tables = [n for n in every if places[n.id].table is not None]
    if kind == "swapped":
        slips = _swapped(in_tables, places, rng)
    else:
        slips = [_one(kind, in_tables, draft, places, rng)]
    struck = {slip.number.id for slip in slips}
    wrong = tuple(_wrong(slip, places) for slip in slips)
    downstream = {
        places[n.id] for n in every if n.rule and any(i.id in struck for i in (*n.rule.inputs, *n.rule.kin))
    }
    text = write(document, {slip.number.id: _text(slip) for slip in slips})
    return Injected(text, kind, wrong, frozenset(downstream - {one.spot for one in wrong}))


def _text(slip: Slip) -> str:
    return slip.text if slip.text is not None else slip.number.style.show(slip.wrong)


def _wrong(slip: Slip, places: dict[int, Spot]) -> Wrong:
    number = slip.number
    assert number.rule is not None
    low, high = number.rule.bounds()
    # A count that is named is exact; anything else may be named to one unit of its last digit.
    slack = (0.4 if number.style.exact else 1.001) * number.style.step
    return Wrong(places[number.id], _text(slip), number.text, low, high, number.style.unit, slack)


def _one(
    kind: Kind, in_tables: list[Number], draft: Draft, places: dict[int, Spot], rng: np.random.Generator
) -> Slip:
    if kind in draft.slips:
        pool = [s for s in draft.slips[kind] if s.number.id in places]
    else:
        pool = [slip for n in in_tables for slip in _generic(kind, n, rng)]
    if kind != "unit":
        pool = [s for s in pool if s.number.misfit(s.number.style.rounded(s.wrong)) >= _CLEAR]
    if not pool:
        raise CannotInjectError(kind)
    return pool[int(rng.integers(len(pool)))]


def _generic(kind: Kind, n: Number, rng: np.random.Generator) -> list[Slip]:
    match kind:
        case "digit":
            return _digit(n, rng)
        case "sign":
            # A sign on a change of a few units of the last digit would be an error no larger than rounding.
            signed = n.style.signs != "plain" and abs(n.value) >= 5 * n.style.step
            return [Slip(n, -n.value)] if signed else []
        case "rounding":
            return _rounding(n)
        case "unit":
            other = _PREFIXES.get(n.style.unit)
            return [Slip(n, n.value, n.style.show(n.value, other))] if other else []
        case _:
            return []


def _digit(n: Number, rng: np.random.Generator) -> list[Slip]:
    """One digit replaced, neither the last one nor one that makes the number begin with nought."""
    if n.style.clock:
        return []
    digits = f"{abs(n.value):.{n.style.decimals}f}"
    at = [i for i, c in enumerate(digits) if c.isdigit()]
    spots_ = at[:-1] if len(at) > 2 else at
    if len(at) < 2:
        return []
    spot = int(rng.choice(spots_))
    choices = [d for d in "0123456789" if d != digits[spot] and not (spot == 0 and d == "0")]
    value = float(digits[:spot] + str(rng.choice(choices)) + digits[spot + 1 :])
    return [Slip(n, value if n.value >= 0 else -value)]


def _rounding(n: Number) -> list[Slip]:
    """The value that is nearest to the right one of those that no rounding and no cutting of it gives."""
    if n.rule is None or n.style.clock or n.style.exact:
        return []
    low, high = n.rule.bounds()
    if high - low > 1.01 * n.style.step or n.rule.operation in ("min", "max"):
        return []
    for steps in (2, -2, 3, -3):
        value = n.style.rounded(n.value + steps * n.style.step)
        if n.misfit(value) >= _CLEAR and value * n.value > 0:
            return [Slip(n, value)]
    return []


def _swapped(in_tables: list[Number], places: dict[int, Spot], rng: np.random.Generator) -> list[Slip]:
    """Two cells of one derived column exchanged."""
    pairs = []
    for i, a in enumerate(in_tables):
        for b in in_tables[i + 1 :]:
            same = a.rule and b.rule and a.rule.operation == b.rule.operation and a.style == b.style
            here, there = places[a.id], places[b.id]
            line = here.column == there.column and here.table == there.table
            if same and line and min(a.misfit(b.value), b.misfit(a.value)) >= 2:
                pairs.append((a, b))
    if not pairs:
        pairs = _swapped_along_rows(in_tables, places)
    if not pairs:
        raise CannotInjectError("swapped")
    a, b = pairs[int(rng.integers(len(pairs)))]
    return [Slip(a, b.value), Slip(b, a.value)]


def _swapped_along_rows(in_tables: list[Number], places: dict[int, Spot]) -> list[tuple[Number, Number]]:
    """In a table that stands on its side: two cells of one derived row."""
    return [
        (a, b)
        for i, a in enumerate(in_tables)
        for b in in_tables[i + 1 :]
        if places[a.id].row == places[b.id].row and a.style == b.style
        if min(a.misfit(b.value), b.misfit(a.value)) >= 2
    ]
