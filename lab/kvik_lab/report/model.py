"""What a report holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

from kvik_lab.errors import LabError
from kvik_lab.report.cells import Estimate, Missing, show
from kvik_lab.report.figures import Figure


class Verdict(Enum):
    """What the data say of a claim."""

    SUPPORTED = "supported"
    NOT_SUPPORTED = "not supported"
    INSUFFICIENT = "insufficient evidence"
    EQUIVALENT = "equivalent within the margin"


@dataclass(frozen=True)
class Interval:
    """Bounds at a level, such as 0.95; an end that is None is one that the data do not bound."""

    low: float | None
    high: float | None
    level: float

    def __str__(self) -> str:
        return f"{show(self.low)} to {show(self.high)} ({100 * self.level:g} %)"


@dataclass(frozen=True)
class NoInterval:
    """None is possible, and why."""

    why: str

    def __str__(self) -> str:
        return f"none possible: {self.why}"


@dataclass(frozen=True)
class Claim:
    """A sentence that somebody may act on, with what it rests on.

    `rests_on`: ids of figures and tables of the report. `unit` belongs to the estimate. `because` says how
    the verdict was reached. `where` names the condition that it is of, for a list of claims of one kind.
    """

    id: str
    sentence: str
    estimate: float | Missing
    unit: str
    interval: Interval | NoInterval
    rests_on: tuple[str, ...]
    verdict: Verdict
    because: str = ""
    where: str = ""


@dataclass(frozen=True)
class Answer:
    """What a page says first: the question, its answer in one sentence, how sure that is, and what would
    change it.

    `claims` are the comparisons behind it, each once; `facts` say when, where and with which versions was
    measured. `more` and `less` are what a ratio above and below 1 is called, and `beside` what it is a ratio
    to.
    """

    question: str
    sentence: str
    sure: str
    change: str
    claims: tuple[Claim, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    more: str = "more"
    less: str = "less"
    beside: str = ""


Cell: TypeAlias = str | float | Missing | Estimate | None


@dataclass(frozen=True)
class Table:
    """Rows of cells; None is a cell that does not exist. Raises LabError for rows of another length."""

    id: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows, 1):
            if len(row) != len(self.columns):
                raise LabError(
                    f"{self.title}: row {number} has {len(row)} cells for {len(self.columns)} columns"
                )


@dataclass(frozen=True)
class Section:
    """Paragraphs, then tables, figures, and claims."""

    id: str
    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class Report:
    """A whole report, its answer first. Raises LabError for an id that is used twice, or a claim resting on
    nothing here."""

    title: str
    sections: tuple[Section, ...]
    answer: Answer | None = None
    schema: Literal["kvik-lab-report/1"] = "kvik-lab-report/1"

    def __post_init__(self) -> None:
        pieces = [piece.id for s in self.sections for piece in (*s.tables, *s.figures)]
        claims = [claim for s in (*self.sections, self.answer) if s is not None for claim in s.claims]
        used = Counter([*(s.id for s in self.sections), *pieces, *(claim.id for claim in claims)])
        if twice := [name for name, count in used.items() if count > 1]:
            raise LabError(f"the report has the id {twice[0]!r} more than once")
        for claim in claims:
            if lost := [name for name in claim.rests_on if name not in pieces]:
                raise LabError(
                    f"claim {claim.id} rests on {lost[0]!r}, which is no table or figure of this report"
                )
            if not claim.rests_on:
                raise LabError(f"claim {claim.id} rests on nothing; name a table or a figure")
