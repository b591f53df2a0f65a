"""How well an audit does on the corpus: what it finds of the errors, and what it says that is not so."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvik_lab.audit import Check, audit_text
from tests.lab.corpus.drafting import KINDS, Kind
from tests.lab.corpus.inject import Wrong, numbers
from tests.lab.corpus.layout import Spot, spots
from tests.lab.corpus.roster import Case

_TIME = re.compile(r"(?:(\d+)\s*h\s*)?(?:(\d+)\s*m\s*)?(\d+(?:\.\d+)?)\s*s(?![\w/])")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")
_UNIT = re.compile(r"\s*([KMGT]i?B(?:/s)?|[KMG]bps)")
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def spot_of(check: Check) -> Spot:
    """The place of a check, in the terms of the truth."""
    place = check.place
    if place.table is None:
        return Spot(None, None, None, place.line)
    return Spot(place.table, place.row, place.column, None)


def read(text: str) -> tuple[float, str]:
    """The first value in a text, with its sign, and the unit of bytes that follows it, if there is one."""
    timed = _TIME.search(text)
    if timed and timed.group(2):
        hours, minutes, seconds = (float(group or 0) for group in timed.groups())
        return _signed(text, timed.start(), 3600 * hours + 60 * minutes + seconds), ""
    found = _NUMBER.search(text)
    if found is None:
        return float("nan"), ""
    unit = _UNIT.match(text, found.end())
    value = float(found.group().replace(",", ""))
    return _signed(text, found.start(), value), unit.group(1) if unit else ""


def _signed(text: str, start: int, value: float) -> float:
    before = text[:start].rstrip()
    return -value if before.endswith(("-", "\N{MINUS SIGN}", "↓")) else value


def _size(unit: str) -> float:
    prefix = unit[:1] if unit[:1] in _SCALE else ""
    return 1024.0 ** "KMGT".find(prefix) * 1024 if "i" in unit else _SCALE[prefix]


def names_right(wrong: Wrong, kind: Kind, follows: str) -> bool:
    """Whether a finding names the right value."""
    value, unit = read(follows)
    if unit and wrong.unit[1:2] in ("B", "i") and unit != wrong.unit:
        value *= _size(unit) / _size(wrong.unit)
    if kind == "sign":
        return wrong.low - wrong.slack <= value <= wrong.high + wrong.slack
    low, high = sorted((abs(wrong.low), abs(wrong.high)))
    return low - wrong.slack <= abs(value) <= high + wrong.slack


@dataclass(frozen=True)
class Outcome:
    """What an audit made of one case."""

    case: Case
    found: bool
    misnamed: tuple[Check, ...]
    false_clean: tuple[Check, ...]
    false_beside: tuple[Check, ...]
    derived: int
    recognised: int


def judge(case: Case) -> Outcome:
    """Audit a case's clean text and its spoiled one."""
    injected = case.injected
    clean = audit_text(case.text, case.name, case.kind)
    spoiled = audit_text(injected.text, case.name, case.kind)
    places = {wrong.spot: wrong for wrong in injected.wrong}
    at = [c for c in spoiled.findings if spot_of(c) in places]
    found = any(names_right(places[spot_of(c)], injected.kind, c.follows) for c in at)
    beside = tuple(
        c for c in spoiled.findings if spot_of(c) not in places and spot_of(c) not in injected.tolerated
    )
    shown = spots(case.document)
    derived = {shown[n.id] for n in numbers(case.document)}
    seen = {spot_of(c) for c in clean.checks}
    misnamed = () if found else tuple(at)
    return Outcome(case, found, misnamed, tuple(clean.findings), beside, len(derived), len(derived & seen))


@dataclass(frozen=True)
class Score:
    """The outcomes of many cases, summed up."""

    outcomes: tuple[Outcome, ...]

    @property
    def recall(self) -> float:
        """The share of the errors that were named with the right place and value."""
        return sum(o.found for o in self.outcomes) / len(self.outcomes)

    @property
    def cells(self) -> int:
        """How many cells the tables have."""
        return sum(o.case.document.cells for o in self.outcomes)

    @property
    def false_clean(self) -> float:
        """False alarms in 1,000 cells of the clean tables."""
        return 1000 * sum(len(o.false_clean) for o in self.outcomes) / self.cells

    @property
    def false_beside(self) -> float:
        """False alarms in 1,000 cells of the spoiled tables, beside the error."""
        return 1000 * sum(len(o.false_beside) for o in self.outcomes) / self.cells

    @property
    def recognised(self) -> float:
        """The share of the derived numbers of the clean tables and sentences that were recomputed."""
        return sum(o.recognised for o in self.outcomes) / sum(o.derived for o in self.outcomes)

    def lines(self) -> Iterable[str]:
        """The table that is printed."""
        yield f"{'kind':<10}{'errors':>8}{'found':>8}{'misnamed':>10}{'false beside':>14}"
        for kind in KINDS:
            group = [o for o in self.outcomes if o.case.injected.kind == kind]
            found, misnamed = sum(o.found for o in group), sum(bool(o.misnamed) for o in group)
            beside = sum(len(o.false_beside) for o in group)
            yield f"{kind:<10}{len(group):>8}{found:>8}{misnamed:>10}{beside:>14}"
        yield f"recall {100 * self.recall:.1f} % of {len(self.outcomes)} errors"
        yield f"false alarms in 1,000 cells: {self.false_clean:.2f} clean, {self.false_beside:.2f} spoiled"
        total = sum(o.derived for o in self.outcomes)
        yield f"recognised {100 * self.recognised:.1f} % of {total} derived numbers, {self.cells} cells"

    def missed(self) -> Iterable[str]:
        """What was missed, and what was said that is not so, one line each."""
        for o in self.outcomes:
            if not o.found:
                wrong = o.case.injected.wrong[0]
                said = "; ".join(f"said {c.follows}" for c in o.misnamed) or "said nothing"
                yield f"missed {o.case.name} {o.case.injected.kind} {_at(wrong.spot)}: " + (
                    f"printed {wrong.printed}, right {wrong.right}, {said}"
                )
            for name, checks in (("clean", o.false_clean), ("beside", o.false_beside)):
                for c in checks:
                    said = f"{c.printed} -> {c.follows} ({c.rule})"
                    yield f"false ({name}) {o.case.name} {_at(spot_of(c))}: {said}"


def _at(spot: Spot) -> str:
    return f"line {spot.line}" if spot.table is None else f"table {spot.table} [{spot.row}, {spot.column}]"


def score(cases: Iterable[Case]) -> Score:
    """Judge all cases."""
    return Score(tuple(judge(case) for case in cases))
