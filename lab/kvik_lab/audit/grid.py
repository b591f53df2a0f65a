"""From rows of printed text to a table: merged and displaced cells put where they belong."""

from __future__ import annotations

from dataclasses import dataclass

from kvik_lab.audit.model import Cell, Table
from kvik_lab.audit.quantity import parse_cell, plain


@dataclass(frozen=True)
class Line:
    """A row of a table as it is printed."""

    cells: tuple[str, ...]
    number: int


def build(header: tuple[str, ...], body: list[Line], line: int, heading: str) -> Table:
    """A table of equal rows. A header that lacks the cell over the row labels gets it; a row that
    lacks the cells merged into it from above gets them from there."""
    width = max([len(header), *(len(row.cells) for row in body)])
    names = tuple(plain(name) for name in header)
    names = _align_header(names, body, width)
    padded = [Line(row.cells + ("",) * (width - len(row.cells)), row.number) for row in body]
    numeric = _numeric_columns(padded, width)
    rows: list[tuple[Cell, ...]] = []
    for row in padded:
        texts = _shifted(row.cells, numeric)
        if texts is not row.cells and rows:
            missing = [i for i, text in enumerate(texts) if text == _MERGED]
            texts = tuple(rows[-1][i].text if i in missing else text for i, text in enumerate(texts))
        rows.append(tuple(Cell(plain(text), row.number, parse_cell(text)) for text in texts))
    return Table(names, tuple(rows), line, heading)


_MERGED = "\0merged"


def _align_header(names: tuple[str, ...], body: list[Line], width: int) -> tuple[str, ...]:
    full = [row for row in body if len(row.cells) == width]
    short = len(names) == width - 1
    displaced = len(names) == width and names[-1] == "" and names[0] != ""
    if (short or displaced) and full and width > 1:
        labels = sum(not parse_cell(row.cells[0]) for row in full)
        values = sum(bool(parse_cell(row.cells[-1])) for row in full)
        if 2 * labels > len(full) and 2 * values > len(full):
            return ("", *names[: width - 1])
    return names + ("",) * (width - len(names))


def _numeric_columns(rows: list[Line], width: int) -> list[bool]:
    """Which columns hold numbers: as the first row says, which has nothing above it to be merged
    with; where it says nothing, as most rows say."""
    answer = []
    for column in range(width):
        texts = [row.cells[column].strip() for row in rows if row.cells[column].strip(" -—*")]
        first = rows[0].cells[column].strip(" -—*") if rows else ""
        if first:
            answer.append(bool(parse_cell(rows[0].cells[column])))
        else:
            answer.append(bool(texts) and sum(bool(parse_cell(text)) for text in texts) * 2 > len(texts))
    return answer


def _shifted(cells: tuple[str, ...], numeric: list[bool]) -> tuple[str, ...]:
    """The cells moved right by as many as are merged from above, when that puts numbers under
    numbers."""
    room = 0
    while room < len(cells) and not cells[-1 - room].strip():
        room += 1
    filled = [bool(parse_cell(text)) for text in cells]

    def wrong(shift: int) -> int:
        pairs = zip(cells, filled, range(shift, len(cells)), strict=False)
        return sum(has != numeric[at] for text, has, at in pairs if text.strip(" -—"))

    if room == 0 or wrong(0) == 0 or not any(filled):
        return cells
    best = min(range(room + 1), key=lambda shift: (wrong(shift), shift))
    return cells if best == 0 or wrong(best) else (_MERGED,) * best + cells[: len(cells) - best]
