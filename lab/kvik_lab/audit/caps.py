# ruff: noqa: RUF001, RUF002 - the marks that texts print
"""Rules of the text that hold over its tables: "keep threads × batch ≤ 4096"."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvik_lab.audit.model import Check, Document, Place, Prose
from kvik_lab.audit.quantity import quantities
from kvik_lab.audit.series import View

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
    most: float
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
            found = [(row, _product(view, row, names)) for row in range(len(table.rows))]
            known = [(row, product) for row, product in found if product is not None]
            over = [(row, product) for row, product in known if product[0] > rule.most]
            if len(known) - len(over) >= max(2, 2 * len(over)):
                for row, (product, formula) in over:
                    place = Place(document.name, index, row, 0, table.rows[row][0].line)
                    text = f"{rule.text}: {formula} = {product:g} exceeds {rule.most:g}"
                    name = " × ".join(names)
                    follows = f"at most {rule.most:g}"
                    yield Check(place, "cell", f"{product:g}", follows, False, name, formula, text, None)


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
        yield _Cap(names, most.number * most.unit.scale, text, line.line)


def _product(view: View, row: int, names: tuple[str, ...]) -> tuple[float, str] | None:
    """The product of named settings in a row: of its columns, or as its label gives them."""
    factors = [_setting(view, row, name) for name in names]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(names):
        return None
    product = 1.0
    for factor in known:
        product *= factor
    return product, " × ".join(f"{factor:g}" for factor in known)


def _setting(view: View, row: int, name: str) -> float | None:
    stem = name.removesuffix("_size").rstrip("s")
    label = re.search(rf"\b{re.escape(stem)}\w*\s*[=:]\s*(\d+)", view.labels[row], re.IGNORECASE)
    if label is not None:
        return float(label[1])
    for series in view.series:
        slot = series.slots[row]
        same = re.fullmatch(rf"{re.escape(stem)}(s|_size| size)?", series.name.strip().lower())
        if slot is not None and series.note == 0 and same:
            return slot.quantity.number
    return None
