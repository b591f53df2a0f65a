"""What the reports of all articles are put together from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvik_lab.physics.data import Floats
from kvik_lab.report.cells import Estimate, Missing, State
from kvik_lab.report.figures import Curve, Figure, HeatCell, HeatMap, Point
from kvik_lab.report.model import Claim, Interval, NoInterval, Section, Table, Verdict
from tests.lab.redrawn.audited import Audited, audit_article
from tests.lab.redrawn.printed import Article, Printed, gap, number, read_article

ONE_TIMING = "one number a cell, and nothing about its error, is printed"


class Source:
    """An article with its audit, from which sections are made."""

    def __init__(self, name: str) -> None:
        self.article: Article = read_article(name)
        self.audits: Mapping[str, Audited] = audit_article(self.article)

    def __getitem__(self, table: str) -> Printed:
        return self.article[table]

    def section(
        self,
        id_: str,
        title: str,
        printed: Sequence[str],
        text: Iterable[str] = (),
        tables: Iterable[Table] = (),
        figures: Iterable[Figure] = (),
    ) -> Section:
        """A section of printed tables, each followed by its audit, then what the lab makes of them."""
        shown: list[Table] = []
        words = list(text)
        for name in printed:
            table, audited = self[name], self.audits[name]
            shown.append(table.as_table())
            found = audited.as_table(name, table.title)
            if found is None:
                words.append(f"{table.title}: {audited.sentence}")
            else:
                shown.append(found)
        return Section(id_, title, tuple(words), (*shown, *tables), tuple(figures))


def open_claim(
    id_: str, sentence: str, value: float | Missing, unit: str, rests: Sequence[str], because: str
) -> Claim:
    """A claim that the printed numbers cannot decide, since they have no errors."""
    none = NoInterval(ONE_TIMING)
    return Claim(id_, sentence, value, unit, none, tuple(rests), Verdict.INSUFFICIENT, because)


def settled(
    id_: str, sentence: str, value: float, unit: str, rests: Sequence[str], holds: bool, because: str
) -> Claim:
    """A claim of arithmetic, which the printed numbers decide by themselves."""
    verdict = Verdict.SUPPORTED if holds else Verdict.NOT_SUPPORTED
    none = NoInterval("arithmetic on printed numbers")
    return Claim(id_, sentence, value, unit, none, tuple(rests), verdict, because)


def with_interval(
    id_: str, sentence: str, found: Estimate, unit: str, rests: Sequence[str], verdict: Verdict, because: str
) -> Claim:
    """A claim with the 95 % interval of a fit."""
    interval = Interval(found.low, found.high, 0.95)
    return Claim(id_, sentence, found.value, unit, interval, tuple(rests), verdict, because)


def points(x: Iterable[float], y: Iterable[Estimate]) -> tuple[Point, ...]:
    """Points of a curve; what is missing stays missing."""
    return tuple(Point(float(at), value) for at, value in zip(x, y, strict=True))


def curve(name: str, x: Iterable[float], y: Iterable[float], fitted: bool = False) -> Curve:
    """A curve of plain numbers."""
    return Curve(name, points(x, [Estimate(float(value)) for value in y]), fitted)


def numbers(table: Printed, column: str) -> Floats:
    """A column of which every cell has a number."""
    return np.array([number(text) for text in table.column(column)])


def cell(text: str) -> HeatCell:
    """A cell of a heat map; a range such as 285-296 stands at its middle and says so."""
    missing = gap(text)
    return HeatCell(number(text)) if missing is None else HeatCell(missing)


def grid(id_: str, title: str, unit: str, cells: dict[tuple[str, str], HeatCell], signed: bool) -> HeatMap:
    """A heat map of the cells that there are; other combinations count as not measured."""
    rows = tuple(dict.fromkeys(row for row, _ in cells))
    columns = tuple(dict.fromkeys(column for _, column in cells))
    nothing = HeatCell(Missing(State.NOT_MEASURED))
    values = tuple(tuple(cells.get((row, column), nothing) for column in columns) for row in rows)
    return HeatMap(id_, title, unit, rows, columns, values, signed)


def limits(*sentences: str) -> Section:
    """What the printed numbers cannot say."""
    always = "Whether other hardware, models or versions behave as those that were measured."
    return Section("limits", "What the article's numbers cannot say", (*sentences, always))
