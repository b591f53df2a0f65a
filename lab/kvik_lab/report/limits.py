"""What the data cannot say, found from what they lack."""

from __future__ import annotations

from kvik_lab.infer.arrays import needed_in_tail
from kvik_lab.infer.judge import Plan
from kvik_lab.report.answer import where
from kvik_lab.report.cells import Missing
from kvik_lab.report.look import Compared, Looked, Rules
from kvik_lab.report.model import Section
from kvik_lab.report.read import Data
from kvik_lab.report.sizes import Sized


def limits(
    data: Data,
    looked: tuple[Looked, ...],
    compared: tuple[Compared, ...],
    by_size: tuple[Sized, ...],
    rules: Rules,
) -> Section:
    """What the data cannot say, found from what they lack."""
    said: list[str] = []
    single = [_name(data, x) for x in looked if len(x.cell.runs) == 1]
    if single:
        said.append(f"How server starts differ, where there is one: {_list(single)}.")
    loose = [_name(data, x) for x in looked if x.steady is not None and x.steady.headline is None]
    if loose:
        said.append(f"What the level will be where there is no steady state: {_list(loose)}.")
    short = [f"{_name(data, x)} ({x.why})" for x in looked if x.steady is None]
    if short:
        said.append(f"Anything of series that could not be examined: {_list(short)}.")
    need = needed_in_tail(0.99)
    few = [_name(data, x) for x in looked if min((len(r.known) for r in x.cell.runs), default=0) < need]
    if few:
        said.append(f"The 99 % quantile, which takes {need} values of every start: {_list(few)}.")
    gone = [
        _name(data, x) for x in looked if any(isinstance(v, Missing) for r in x.cell.runs for v in r.values)
    ]
    if gone:
        said.append(f"What the missing values would have been: {_list(gone)}.")
    holes = [f"{arm}{_at(data, c)}" for c in data.conditions for arm in data.arms if not data.find(arm, c)]
    if holes:
        said.append(f"Anything of combinations that were not run: {_list(holes)}.")
    if any(c.found is not None and c.found.plan is Plan.SINGLE for c in compared):
        said.append("Whether a difference of two starts would be there between two others.")
    if rules.margin is None and compared:
        said.append("Whether any two are equal: that takes a margin, which was not given (--margin).")
    if by_size:
        said.append("Anything beyond the sizes that were measured.")
    said.append("Whether other hardware, models, or loads behave as what was measured here.")
    return Section("limits", "What these data cannot say", tuple(said))


def _name(data: Data, one: Looked) -> str:
    return f"{one.cell.arm}{_at(data, one.cell.condition)}"


def _list(names: list[str], most: int = 8) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _at(data: Data, condition: tuple[str, ...]) -> str:
    text = where(data, condition)
    return f" at {text}" if text else ""
