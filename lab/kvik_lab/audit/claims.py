# ruff: noqa: RUF001, RUF003 - the marks and words that texts print
"""What every reader of claims uses: sentences with their quantities, and checks of single claims."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from kvik_lab.audit.model import Check, Document, Place, Prose, recomputed
from kvik_lab.audit.quantity import Quantity, quantities
from kvik_lab.audit.rules import Family, Value, compute, holds
from kvik_lab.audit.said import Said
from kvik_lab.audit.series import View
from kvik_lab.audit.slips import general


@dataclass(frozen=True)
class Sentence:
    """A sentence of the text, with the quantities in it. `lead` is its paragraph's text before it."""

    document: str
    text: str
    line: int
    heading: str
    table: int | None
    found: tuple[Quantity, ...]
    code: bool
    lead: str = ""

    def before(self, at: int) -> str:
        """The text between a quantity and the one before it."""
        start = self.found[at - 1].span[1] if at else 0
        return self.text[start : self.found[at].span[0]]

    def after(self, at: int) -> str:
        """The text between a quantity and the one after it."""
        end = self.found[at + 1].span[0] if at + 1 < len(self.found) else len(self.text)
        return self.text[self.found[at].span[1] : end]


@dataclass(frozen=True)
class Scene:
    """A document as the readers of claims see it: its columns, and what is known better than it is
    printed."""

    document: Document
    views: tuple[View, ...]
    known: dict[tuple[Place, int], Value]
    said: Said = field(default_factory=Said)

    def near(self, sentence: Sentence) -> list[int]:
        """The tables near a sentence, the nearest first: the one above, the one below, then the
        others."""
        return list(_near(-1 if sentence.table is None else sentence.table, len(self.views)))


@lru_cache(maxsize=1024)
def _near(above: int, count: int) -> tuple[int, ...]:
    return tuple(sorted(range(count), key=lambda i: (abs(i - above - 0.4), i)))


_END = re.compile(r"(?<=[。!?!?])\s*|(?<=[A-Za-z)%\d][.;])\s+(?=[A-Z(*])")


def sentences(document: Document) -> Iterator[Sentence]:
    """The sentences of a document that hold quantities."""
    for line in [*document.prose, *_cells(document)]:
        end = 0
        for text in [line.text] if line.code else _END.split(line.text):
            start = line.text.index(text, end)
            end = start + len(text)
            found = measured(text)
            if found:
                lead = line.text[:start]
                yield Sentence(
                    document.name, text, line.line, line.heading, line.table, found, line.code, lead
                )


_JOINT = re.compile(r"\s*(->|→|=>|⇒|-|to|and|or|vs\.?|versus)\s*")


def measured(text: str) -> tuple[Quantity, ...]:
    """The quantities of a text; of two in a row where the second alone has a unit, as in "from 22 to 200 ms",
    both have it."""
    found = list(quantities(text))
    for at in range(len(found) - 2, -1, -1):
        one, two = found[at], found[at + 1]
        borrows = one.unit.kind == "plain" and two.unit.dimension and two.unit.kind != "tokens"
        if borrows and _JOINT.fullmatch(text[one.span[1] : two.span[0]]):
            found[at] = one.with_unit(two.unit)
    return tuple(found)


# a value with the product of names that it is: "2 GB (min: block × batch)"
_PRODUCT = re.compile(r"\([^()]*[A-Za-z_] [×*] [A-Za-z_][^()]*\)")


def _cells(document: Document) -> Iterator[Prose]:
    """The cells of tables that hold text with numbers in it, as text."""
    for index, table in enumerate(document.tables):
        for row in table.rows:
            for cell in row:
                if (
                    (not cell.parts or _PRODUCT.search(cell.text))
                    and len(cell.text) > 5
                    and quantities(cell.text)
                    and "=" not in cell.text[:12]
                ):
                    yield Prose(cell.text, cell.line, table.heading, index, code=False)


def claim(sentence: Sentence, printed: Quantity, value: Value, rule: str, formula: str) -> Check:
    """The check of a claim: that `printed` is what `value` says."""
    good = holds(printed, value)
    number = value.middle / value.scale
    if printed.number > 0 > number and not printed.signed and not printed.arrow:
        number = -number
    place = Place(sentence.document, None, None, None, sentence.line)
    check = recomputed(place, printed, number, printed.show(number), good, rule, formula)
    return replace(check, diagnosis=None if good else general(printed, value))


def computed(family: Family, inputs: Sequence[Quantity], printed: Quantity) -> Value | None:
    """What a family gives for inputs, without regard to the sign that the text leaves to its words."""
    value = compute(family, inputs, printed)
    if value is None or printed.signed or printed.arrow or value.middle >= 0:
        return value
    return -value


def loose(printed: Quantity) -> Quantity:
    """A quantity that a mark of approximation makes coarser: one unit in its last place, not half."""
    return replace(printed, half=printed.half * 2) if printed.approx else printed
