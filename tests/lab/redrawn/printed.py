"""The tables of an article as it prints them: texts of cells, and results stated beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvik_lab.errors import LabError
from kvik_lab.report.cells import Estimate, Missing, State
from kvik_lab.report.model import Table

PRINTED = Path(__file__).parent / "printed"
NAMES = ("S0", "S1", "S2", "S3", "S4")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_TIME = re.compile(r"([-+]?)(?:(\d+)m)?(\d+(?:\.\d+)?)s")


@dataclass(frozen=True)
class Printed:
    """A table. `section` is the article's, `said` states results beside the table in words of ours."""

    id: str
    title: str
    section: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    said: tuple[str, ...]

    def column(self, name: str) -> tuple[str, ...]:
        """The texts of a column. Raises LabError for a column that is not there."""
        if name not in self.header:
            raise LabError(f"{self.title} has no column {name!r}: {', '.join(self.header)}")
        at = self.header.index(name)
        return tuple(row[at] for row in self.rows)

    def estimates(self, name: str) -> tuple[Estimate, ...]:
        """A column as numbers without bounds, since none are printed."""
        return tuple(estimate(text) for text in self.column(name))

    def as_table(self) -> Table:
        """As it is printed, with its source."""
        rows = tuple(tuple(gap(text) or text for text in row) for row in self.rows)
        return Table(self.id, self.title, self.header, rows, f"As printed, section {self.section!r}.")


@dataclass(frozen=True)
class Article:
    """An article: its name here, its title, and its tables in their order."""

    name: str
    title: str
    tables: tuple[Printed, ...]

    def __getitem__(self, table: str) -> Printed:
        return next(one for one in self.tables if one.id == table)


def read_article(name: str) -> Article:
    """The facts of an article. Raises LabError for a name that is none of NAMES."""
    if name not in NAMES:
        raise LabError(f"there is no article {name!r}; there are {', '.join(NAMES)}")
    text = (PRINTED / f"{name}.yaml").read_text(encoding="utf-8")
    data: Any = yaml.safe_load(text)
    tables = tuple(
        Printed(
            one["id"],
            one["title"],
            one["section"],
            tuple(one["header"]),
            tuple(tuple(row) for row in one["rows"]),
            tuple(one.get("said", ())),
        )
        for one in data["tables"]
    )
    return Article(name, data["title"], tables)


def gap(text: str) -> Missing | None:
    """Why a cell has no number, if it says so."""
    if text == "in progress":
        return Missing(State.IN_PROGRESS)
    if text.startswith("failed"):
        return Missing(State.FAILED)
    return Missing(State.NOT_MEASURED) if text == "-" else None


def number(text: str) -> float:
    """The first number of a text; minutes and seconds as seconds. Raises LabError where there is none."""
    timed = _TIME.fullmatch(text)
    if timed is not None:
        sign, minutes, seconds = timed.groups()
        value = 60 * float(minutes or 0) + float(seconds)
        return -value if sign == "-" else value
    found = _NUMBER.search(text)
    if found is None:
        raise LabError(f"{text!r} has no number")
    return float(found.group().replace(",", ""))


def estimate(text: str) -> Estimate:
    """A cell as a number without bounds, or why it is missing."""
    missing = gap(text)
    return Estimate(number(text) if missing is None else missing)
