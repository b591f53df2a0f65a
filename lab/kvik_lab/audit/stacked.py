# ruff: noqa: RUF001 - the marks and words that tables print
"""Tables whose layout was lost: every cell became a paragraph of its own, as text copied from a
page has it."""

from __future__ import annotations

from kvik_lab.audit.grid import Line
from kvik_lab.audit.quantity import parse_cell, plain

_LONGEST = 110
_WIDEST = 8
_MISSING = {"-", "—", "–", "n/a", "N/A"}


def stacked(cells: list[tuple[int, str]]) -> tuple[tuple[str, ...], list[Line], int] | None:
    """The table in a run of one-line paragraphs (line number, text): header, rows, first line; or
    None.

    The width is the one under which the header has no number, every column is of one kind, and one
    column or more are numbers. A header may lack the cell over the row labels.
    """
    texts = [plain(text) for _, text in cells]
    for width in range(2, _WIDEST + 1):
        for lacking in (0, 1):
            names = width - lacking
            body = texts[names:]
            if len(body) < 2 * width or len(body) % width or not names:
                continue
            if _fits(texts[:names], body, width):
                numbers = [number for number, _ in cells]
                rows = [
                    Line(tuple(body[at : at + width]), numbers[names + at])
                    for at in range(0, len(body), width)
                ]
                return tuple(texts[:names]), rows, numbers[0]
    return None


def _fits(header: list[str], body: list[str], width: int) -> bool:
    if any(parse_cell(text) for text in header):
        return False
    numeric = 0
    for column in range(width):
        texts = [text for text in body[column::width] if text not in _MISSING]
        values = sum(bool(parse_cell(text)) for text in texts)
        if values not in (0, len(texts)):
            return False
        numeric += column > 0 and values > 0
    return numeric > 0


def candidate(text: str) -> bool:
    """Whether a paragraph can be a cell: short, and no sentence or announcement."""
    return (
        bool(text)
        and len(text) <= _LONGEST
        and text[-1] not in ".:。:"
        and not text.startswith(("#", "- ", "•"))
    )
