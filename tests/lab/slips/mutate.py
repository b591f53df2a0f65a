"""Slips of a printed number: what a person who copies or computes it gets wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvik_lab.audit import Audit
from kvik_lab.audit.quantity import Quantity, quantities
from tests.lab.articles.listing import Item

SLIPS = ("leading digit", "neighbours swapped", "factor of 10", "a cell, repeated")
# a table whose cells became paragraphs has its rows over several lines
_LINES = 12


@dataclass(frozen=True)
class Spot:
    """A marked number in the text: its line from 1, its digits' place in that line, and the digits."""

    line: int
    start: int
    digits: str
    item: Item


def spots(text: str, items: Sequence[Item]) -> list[Spot]:
    """Where the marked numbers stand. Raises ValueError for a mark that the text does not have."""
    lines = text.splitlines()
    used: set[tuple[int, int]] = set()
    found = []
    for item in items:
        spot = next((one for one in _printed(lines, item) if (one.line, one.start) not in used), None)
        if spot is None:
            raise ValueError(f"line {item.line} has no {item.printed}: {item.how}")
        used.add((spot.line, spot.start))
        found.append(spot)
    return found


def _printed(lines: list[str], item: Item) -> Iterator[Spot]:
    for line in range(item.line, min(item.line + _LINES, len(lines) + 1)):
        raw = lines[line - 1].replace("\N{MINUS SIGN}", "-").replace("\N{EN DASH}", "-")
        plain = re.sub(r"[*_`]", " ", raw)
        for quantity in quantities(plain):
            for digits, number in _ends(quantity):
                if abs(number) == abs(item.value):
                    at = plain.find(digits, quantity.span[0])
                    yield Spot(line, at, digits, item)


def _ends(quantity: Quantity) -> list[tuple[str, float]]:
    """The digits of a quantity with their value; of a range, of both ends."""
    ends = [(quantity.digits, quantity.number)]
    if quantity.upper is not None:
        last = re.findall(r"[\d.,]*\d", quantity.text)[-1]
        ends.append((last, quantity.upper))
    return ends


def slips(spot: Spot, audit: Audit) -> Iterator[tuple[str, str]]:
    """The slips that this number can have, each with the digits as they then stand."""
    digits = spot.digits
    first = re.search(r"[1-9]", digits)
    if first:
        yield SLIPS[0], digits[: first.start()] + str(int(first[0]) % 9 + 1) + digits[first.end() :]
    swapped = _swapped(digits)
    if swapped:
        yield SLIPS[1], swapped
    if re.fullmatch(r"[\d.,]+", digits):
        yield SLIPS[2], _tenfold(digits)
    other = _repeated(spot, audit)
    if other:
        yield SLIPS[3], other


def _swapped(digits: str) -> str | None:
    for at in range(len(digits) - 1):
        a, b = digits[at], digits[at + 1]
        if a.isdigit() and b.isdigit() and a != b and (at or b != "0"):
            return digits[:at] + b + a + digits[at + 2 :]
    return None


def _tenfold(digits: str) -> str:
    plain = digits.replace(",", "")
    whole, _, rest = plain.partition(".")
    if not rest:
        return whole + "0"
    moved = (whole + rest[0]).lstrip("0") or "0"
    return moved + ("." + rest[1:] if rest[1:] else "")


def _repeated(spot: Spot, audit: Audit) -> str | None:
    """Another cell of the column in which the number stands; for a number of the text, of the column in
    which it stands too."""
    same = [
        (table, row, column)
        for table in audit.tables
        for row, cells in enumerate(table.rows)
        for column, cell in enumerate(cells)
        for part in cell.parts[:1]
        if part.quantity.digits == spot.digits and (spot.item.kind == "claim" or cell.line == spot.line)
    ]
    for table, row, column in same:
        for other in (row - 1, row + 1):
            if 0 <= other < len(table.rows) and table.rows[other][column].parts:
                digits = table.rows[other][column].parts[0].quantity.digits
                if digits != spot.digits:
                    return digits
    return None


def changed(text: str, spot: Spot, digits: str) -> str:
    """The text with a number's digits replaced."""
    lines = text.split("\n")
    line = lines[spot.line - 1]
    lines[spot.line - 1] = line[: spot.start] + digits + line[spot.start + len(spot.digits) :]
    return "\n".join(lines)


def seen(audit: Audit, spot: Spot, digits: str) -> bool:
    """Whether an audit accuses the changed number: a finding on its line that prints it."""
    wanted = quantities(digits)
    number = abs(wanted[0].number) if wanted else float("nan")
    return any(
        number in (abs(quantity.number), quantity.upper)
        for check in audit.findings
        if check.place.line == spot.line
        for quantity in quantities(check.printed)
    )
