# ruff: noqa: RUF001, RUF002 - the marks that texts print
"""Rules of the text that hold over its tables: "keep threads × batch ≤ 4096"."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvik_lab.audit.model import Check, Document, Place, Prose
from kvik_lab.audit.quantity import Quantity, quantities
from kvik_lab.audit.series import View
from kvik_lab.audit.spoken import setting
from kvik_lab.audit.units import NONE, TOKENS, Dimension

_NAME = r"[A-Za-z][A-Za-z_]*"
_CAP = re.compile(
    # From the beginning of a word only: else one of a hundred thousand letters, such as a picture in a page,
    # is tried from each of them.
    rf"(?<![A-Za-z_])(?P<names>{_NAME}(?:\s*[×x*]\s+{_NAME}){{1,7}})\s*"
    r"(?P<mark><=|≤|<|at most|(?:must|may|can) not exceed"
    r"|no more than|up to|under|below|is capped at)?\s*(?P<most>\d.*)"
)
_BINDS = re.compile(r"\b(keep|as long as|must|cap|limit|at most|so)\b", re.IGNORECASE)


@dataclass(frozen=True)
class _Cap:
    names: tuple[str, ...]
    most: Quantity
    text: str
    line: int


def caps(document: Document, views: list[View]) -> Iterator[Check]:
    """A finding for each row whose product exceeds the cap that the nearest such rule states. A table
    counts when most of its rows, and two at least, keep to the rule: it is of another thing else."""
    rules = [rule for line in document.prose if not line.code for rule in _stated(line)]
    for index, view in enumerate(views):
        table = document.tables[index]
        for names in {rule.names for rule in rules}:
            own = [rule for rule in rules if rule.names == names]
            rule = min(own, key=lambda one: abs(one.line - table.line))
            unit = rule.most.unit
            found = [(row, _product(view, row, rule)) for row in range(len(table.rows))]
            known = [(row, product) for row, product in found if product is not None]
            over = [(row, product) for row, product in known if product[0] > rule.most.number]
            if len(known) - len(over) >= max(2, 2 * len(over)):
                for row, (product, formula) in over:
                    place = Place(document.name, index, row, 0, table.rows[row][0].line)
                    printed, most = (f"{n:g} {unit.symbol}".strip() for n in (product, rule.most.number))
                    text = f"{rule.text}: {formula} = {printed} exceeds {most}"
                    name = " × ".join(names)
                    yield Check(place, "cell", printed, f"at most {most}", False, name, formula, text, None)


def _stated(line: Prose) -> Iterator[_Cap]:
    for match in _CAP.finditer(line.text):
        if match["mark"] is None and not _BINDS.search(line.text):
            continue
        found = quantities(match["most"])
        if not found:
            continue
        most = found[0]
        for before, after in itertools.pairwise(found):
            joint = match["most"][before.span[1] : after.span[0]]
            if not re.fullmatch(r"[^.;,()]{0,20}?[=×x*][^.;,()]{0,4}", joint):
                break
            most = after if "=" in joint else most
        names = tuple(name.lower() for name in re.findall(_NAME, match["names"]) if name != "x")
        text = f"{match['names']} {match['mark'] or '≤'} {most.text}"
        yield _Cap(names, most, text, line.line)


def _product(view: View, row: int, rule: _Cap) -> tuple[float, str] | None:
    """The product of named settings in a row, in the unit of the cap: of its columns, or as its label gives
    them. None where one is missing, or where it is of something else than the cap."""
    factors = [_setting(view, row, name) for name in rule.names]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(factors) or _measured(known) != _measured([rule.most]):
        return None
    # prefixes of 1024 on both sides: a product of 4096 does not exceed 4K
    product = math.prod(factor.number * factor.unit.binary for factor in known) / rule.most.unit.binary
    return product, " × ".join(f"{factor.number:g} {factor.unit.symbol}".strip() for factor in known)


def _measured(factors: list[Quantity]) -> list[Dimension]:
    """What is more than a number: tokens are counted as threads are."""
    return [factor.unit.dimension for factor in factors if factor.unit.dimension not in (NONE, TOKENS)]


def _setting(view: View, row: int, name: str) -> Quantity | None:
    stem = name.removesuffix("_size").rstrip("s")
    told = setting(view.labels[row], stem)
    if told is not None:
        return told
    for series in view.series:
        slot = series.slots[row]
        same = re.fullmatch(rf"{re.escape(stem)}(s|_size| size)?", series.name.strip().lower())
        if slot is not None and series.note == 0 and same:
            return slot.quantity
    return None
