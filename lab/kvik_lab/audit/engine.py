# ruff: noqa: RUF001 - the marks and words that tables print
"""From a document to its checks: the derived cells of each table, then the claims of the text."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvik_lab.audit import again, series
from kvik_lab.audit.caps import caps
from kvik_lab.audit.claims import Scene
from kvik_lab.audit.derive import Found, find
from kvik_lab.audit.diagnose import diagnose
from kvik_lab.audit.keys import displaced
from kvik_lab.audit.levels import level_counts
from kvik_lab.audit.matrix import rate_checks
from kvik_lab.audit.model import Audit, Check, Document, Place, recomputed
from kvik_lab.audit.quantity import Quantity
from kvik_lab.audit.ratio_rows import ratio_rows
from kvik_lab.audit.rules import Rule, Value, compute, evaluate, holds
from kvik_lab.audit.series import Slot, View
from kvik_lab.audit.text import audit_claims


@dataclass(frozen=True)
class Result:
    """One cell under one accepted rule."""

    found: Found
    view: View
    index: int
    slot: Slot
    value: Value
    holds: bool


def audit_document(document: Document, line: int | None = None) -> Audit:
    """Recompute a document; with a line, its tables and the claims of that line."""
    views = series.refine(
        [series.columns(document.name, i, table) for i, table in enumerate(document.tables)]
    )
    results: list[Result] = []
    extra: list[Check] = []
    for index, table in enumerate(document.tables):
        for view in (views[index], series.rows(document.name, index, table)):
            for found in find(view):
                results += _results(found, view)
        extra += level_counts(document.name, index, table, views[index])
        extra += rate_checks(table, views[index])
        extra += ratio_rows(views[index])
    extra += caps(document, views)
    cells, wrong = _cells(results)
    seen = {check.place for check in cells}
    cells += [check for check in extra if check.place not in seen or _noted(check, cells)]
    known = {(r.slot.place, r.slot.quantity.span[0]): r.value for r in results if r.holds}
    known |= {(place, span[0]): one.value for (place, span), one in wrong.items()}
    cells += displaced(views, {check.place for check in cells})
    scene = Scene(document, tuple(views), known, again.said(document, views))
    claims = audit_claims(scene, line)
    return Audit(document.tables, tuple(cells) + tuple(claims))


def _noted(check: Check, cells: list[Check]) -> bool:
    """Whether what was recomputed at a check's place is another number of the same cell."""
    return all(other.printed != check.printed for other in cells if other.place == check.place)


def _results(found: Found, view: View) -> list[Result]:
    answer = []
    for index, slot in enumerate(found.target.slots):
        value = None if slot is None else evaluate(found.rule, index, slot.quantity)
        if slot is not None and value is not None and not slot.quantity.bound:
            answer.append(Result(found, view, index, slot, value, holds(slot.quantity, value)))
    return answer


_Key = tuple[Place, tuple[int, int]]


def _cells(results: list[Result]) -> tuple[list[Check], dict[_Key, Result]]:
    """The checks, and what is wrong by its place.

    A printed quantity has one check. It holds if one of its rules does with its inputs set right; what
    follows only from a value that does not follow itself is set right with it.
    """
    by_slot: dict[_Key, list[Result]] = {}
    for result in results:
        by_slot.setdefault((result.slot.place, result.slot.quantity.span), []).append(result)
    wrong = {
        key: max(group, key=lambda one: one.found.score)
        for key, group in by_slot.items()
        if not any(one.holds for one in group)
    }
    wrong = {key: one for key, one in wrong.items() if not _mended(by_slot[key], wrong)[0]}
    checks = {key: _check(one, good=False) for key, one in wrong.items()}
    while carried := _unsettled(by_slot, wrong):
        wrong |= carried
        checks |= {key: _carried(one) for key, one in carried.items()}
    for key, group in by_slot.items():
        if key not in checks:
            checks[key] = _check(next((one for one in group if one.holds), group[0]), good=True)
    return [checks[key] for key in by_slot], wrong


def _unsettled(by_slot: dict[_Key, list[Result]], wrong: dict[_Key, Result]) -> dict[_Key, Result]:
    """The cells that do not follow any more once what is wrong is set right."""
    answer = {}
    for key, group in by_slot.items():
        good, changed = (True, None) if key in wrong else _mended(group, wrong)
        if not good and changed is not None:
            answer[key] = changed
    return answer


def _mended(group: list[Result], wrong: dict[_Key, Result]) -> tuple[bool, Result | None]:
    """Whether a cell follows by one of its rules once their inputs are set right; and the rule with the
    value that it then gives, where an input was."""
    changed: Result | None = None
    for one in group:
        slots = one.found.rule.slots(one.index) or []
        inputs = [_right(slot, wrong) for slot in slots]
        if all(a is slot.best for a, slot in zip(inputs, slots, strict=True)):
            if one.holds:
                return True, None
            continue
        rule = one.found.rule
        value = compute(rule.family, inputs, one.slot.quantity, rule.binary, rule.constant)
        if value is not None:
            if holds(one.slot.quantity, value):
                return True, None
            changed = changed or replace(one, value=value, holds=False)
    return False, changed


def _right(slot: Slot, wrong: dict[_Key, Result]) -> Quantity:
    one = wrong.get((slot.place, slot.quantity.span))
    return slot.best if one is None else replace(slot.quantity, number=one.value.middle / one.value.scale)


def _carried(result: Result) -> Check:
    check = _check(result, good=False)
    text = f"{check.rule}: an input does not follow itself; with what does, so {check.follows}"
    return replace(check, text=f"{text}; printed is {check.printed}", diagnosis="carried on from an input")


def written(rule: Rule, names: list[str]) -> str:
    """A rule's formula with names or printed numbers in it."""
    pattern = rule.family.pattern
    if rule.cumulative or rule.family.name == "sum":
        return " + ".join(names)
    if rule.family.name == "product":
        return " × ".join(names)
    if rule.family.name == "share":
        return f"{names[0]} / ({' + '.join(names[1:])})"
    if rule.family.name == "proportion":
        return f"{' × '.join(names)} × {rule.constant:.6g}"
    return pattern.format(*names) if "{" in pattern else f"{pattern}{', '.join(names)}"


_SHIFTED = {
    "base": "the row of 1 above",
    "first": "first row",
    "last": "last row",
    "above": "row above",
    "below": "row below",
}


def _name(found: Found, at: int) -> str:
    one = found.rule.inputs[at]
    name = one.name or f"column {one.position + 1}"
    return f"{name} [{_SHIFTED[one.shift]}]" if one.shift in _SHIFTED else name


def _in_usual_unit(result: Result) -> str:
    """What follows, in the unit of most of the series: that of the cell itself may be wrong."""
    printed = result.slot.quantity
    units = [slot.quantity.unit for slot in result.found.target.slots if slot is not None]
    usual = max(units, key=units.count)
    same = (
        usual.dimension == printed.unit.dimension and units.count(usual) > 1 and result.view.axis == "column"
    )
    if (
        not same
        or usual == printed.unit
        or not printed.unit.symbol
        or printed.unit.symbol not in printed.text
    ):
        return printed.show(result.value.middle / result.value.scale)
    binary = result.found.rule.binary[1]
    factor = usual.binary if binary else usual.scale
    text = printed.text.replace(printed.unit.symbol, usual.symbol)
    return replace(printed, unit=usual, text=text).show(result.value.middle / factor)


def _check(result: Result, *, good: bool) -> Check:
    found, value, printed = result.found, result.value, result.slot.quantity
    slots = found.rule.slots(result.index) or []
    names = [_name(found, at) for at in range(len(found.rule.inputs))]
    if found.rule.family.name == "share":
        names = [names[0], f"all of {names[0]}"]
    rule = f"{found.target.name or 'this'} = {written(found.rule, names)}"
    formula = written(found.rule, [slot.best.text for slot in slots])
    number = value.middle / value.scale
    follows = printed.show(number) if good else _in_usual_unit(result)
    check = recomputed(result.slot.place, printed, number, follows, good, rule, formula)
    return replace(check, diagnosis=None if good else diagnose(found, result.index, value, result.view))
