"""Which series of a table derive from which others, decided by evidence.

A hypothesis is a family of rules with its inputs. At each index where target and inputs are
printed, it hits when the printed interval and the interval that follows from the printed inputs
overlap. Under chance, a hit has about the probability width / spread, where width is that of both
intervals together and spread that of the target's values: its negative logarithm is the hit's
evidence. The logarithm of the number of hypotheses that were tried is taken off, so a rule has to
explain what chance among all tried cannot; a name that speaks of the rule counts as evidence too,
and makes fewer cells suffice. Rules under which cells miss need more evidence than those under
which all hold, because only the former give findings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from kvik_lab.audit import rules as r
from kvik_lab.audit.naming import families_named, level
from kvik_lab.audit.quantity import Quantity, quantities
from kvik_lab.audit.rules import Rule, Value, evaluate, holds
from kvik_lab.audit.series import Series, Slot, View, shifted, words
from kvik_lab.audit.slips import DIGITS, general
from kvik_lab.audit.units import NONE

_CEILING = 7.0
# families that chance fits often: without a name that speaks of them they are taken only whole
_WITHOUT_MISS = ("maximum", "minimum", "median", "geometric mean")
_WIDE = 14
# families that explain what another does too, and say less
_UNUSUAL = {
    "size of difference": 1.0,
    "size of change": 1.0,
    "proportion": 2.0,
    "geometric mean": 1.0,
    "product": 0.5,
}


@dataclass(frozen=True)
class Found:
    """A rule that a target's cells follow: where it holds, where not, and how strong the evidence
    is. `distinct` counts the different values among those that hold, without zeros."""

    target: Series
    rule: Rule
    hits: tuple[int, ...]
    misses: tuple[int, ...]
    score: float
    level: int
    distinct: int = 0


@lru_cache(maxsize=256)  # a text is audited again and again while it is written
def find(view: View) -> tuple[Found, ...]:
    """The accepted rules of a view, each target at most once, none of them another one turned
    around."""
    candidates: list[Found] = []
    for target in itertools.chain.from_iterable(map(_kinds, view.series)):
        candidates += _candidates(view, target)
    candidates.sort(key=_order, reverse=True)
    accepted: list[Found] = []
    for one in candidates:
        if any(_same_cells(one.target, other.target) for other in accepted):
            continue
        if not any(_inverse(one, other) for other in accepted):
            accepted.append(one)
    named = _siblings(view, accepted)
    keys = {found.target.key for found in named}
    return (*(found for found in accepted if found.target.key not in keys), *named)


def _kinds(target: Series) -> list[Series]:
    """A column of percentages and of ratios as two: "65% faster" and "45x faster" do not derive alike."""
    kinds = {slot.quantity.unit.kind for slot in target.slots if slot is not None}
    if not {"percent", "ratio"} <= kinds:
        return [target]
    return [
        replace(target, slots=tuple(_only(kind, slot) for slot in target.slots))
        for kind in ("percent", "ratio")
    ]


def _only(kind: str, slot: Slot | None) -> Slot | None:
    return slot if slot is not None and slot.quantity.unit.kind == kind else None


def _same_cells(one: Series, other: Series) -> bool:
    """Whether two series have cells in common."""
    return one.key == other.key and any(a and b for a, b in zip(one.slots, other.slots, strict=True))


def _siblings(view: View, accepted: list[Found]) -> list[Found]:
    """Series named as others that follow a rule, with the same words around another input's name.

    Where "delta-tcp" is tcp / base and "delta-ipc" is ipc / base, "delta-get" has to be get / base.
    """
    known = {found.target.key for found in accepted if found.level >= 2}
    patterns: dict[tuple[str, frozenset[str]], list[tuple[Found, int]]] = {}
    for found in accepted:
        for at, series in enumerate(found.rule.inputs):
            own = words(series.name)
            if own and own < words(found.target.name) and view.axis == "column":
                rest = words(found.target.name) - own
                patterns.setdefault((found.rule.family.name, rest), []).append((found, at))
    extra = []
    for (_, rest), users in patterns.items():
        for target in view.series:
            if target.key in known or len(users) < 2 or not rest < words(target.name):
                continue
            same = [s for s in view.series if words(s.name) == words(target.name) - rest and s.count]
            if len(same) == 1:
                found, at = users[0]
                inputs = tuple(same[0] if i == at else s for i, s in enumerate(found.rule.inputs))
                extra.append(_judged(Rule(found.rule.family, inputs, found.rule.binary), target))
                known.add(target.key)
    return extra


def _judged(rule: Rule, target: Series) -> Found:
    """A rule whose acceptance needs no evidence of its own."""
    results = {
        index: holds(slot.quantity, value)
        for index, slot in enumerate(target.slots)
        if slot is not None and (value := evaluate(rule, index, slot.quantity)) is not None
    }
    hits = tuple(index for index, good in results.items() if good)
    return Found(target, rule, hits, tuple(index for index in results if index not in hits), 0.0, 3)


def _order(found: Found) -> tuple[float, ...]:
    strength = found.score - 4.0 * len(found.misses)
    simple = -len({series.key for series in found.rule.inputs})
    own = -sum(series.shift != "" for series in found.rule.inputs)
    return (
        min(found.level, 2) > 0,
        found.target.note > 0,
        found.target.position,
        round(strength, 1),
        own,
        simple,
    )


def _inverse(one: Found, other: Found) -> bool:
    """Whether a rule computes an input of another rule from that rule's target, as the other way
    around."""
    targets = {series.key for series in one.rule.inputs}
    return other.target.key in targets and any(s.key == one.target.key for s in other.rule.inputs)


def _candidates(view: View, target: Series) -> list[Found]:
    if target.count == 0:
        return []
    tried = [rule for rule in _hypotheses(view, target) if _applies(rule, target)]
    if view.axis == "row" and families_named(target.name):
        tried = [rule for rule in tried if level(rule, target, view)]
    moved = [any(series.shift for series in rule.inputs) for rule in tried]
    plain = math.log(max(len(moved) - sum(moved), 1))
    found = []
    for rule, away in zip(tried, moved, strict=True):
        one = _assess(rule, target, view, plain + math.log(1 + sum(moved)) / 2 if away else plain)
        if one is not None and _enough(one, target, view):
            found.append(one)
    return found


def _given(rule: Rule, target: Series) -> Iterator[tuple[int, Value | None]]:
    """The indices at which target and inputs are printed, with what follows there; None where the units or
    the numbers forbid the rule. Most rules end at their first cells: nothing is worked out before."""
    for index in target.printed:
        slot = target.slots[index]
        if slot is not None and rule.slots(index) is not None:
            yield index, evaluate(rule, index, slot.quantity)


def _applies(rule: Rule, target: Series) -> bool:
    """Whether a rule's units go together at the first index where all is printed."""
    return next(_given(rule, target), (0, None))[1] is not None


def _spread(target: Series, named: int) -> float:
    """How far the target's values lie apart; where they are few or alike, a part of their size."""
    values = [slot.quantity.number for slot in target.slots if slot is not None]
    size = sorted(abs(v) for v in values)[len(values) // 2]
    spread = max(values) - min(values)
    if named or len(values) < 3:
        return max(spread, (0.1 if len(values) > 2 else 0.5) * size)
    return spread


def _assess(rule: Rule, target: Series, view: View, cost: float) -> Found | None:
    """Where a rule hits and misses, with its score; None when it hits nowhere, applies nowhere, or
    misses more often than any evidence could make good."""
    named = level(rule, target, view)
    allowed = _allowed(rule, target, view, named)
    if allowed < 0:
        return None
    hits: list[int] = []
    misses: list[int] = []
    values: dict[float, tuple[Value, float]] = {}  # what is printed again says nothing again
    misfit = 0.0
    for index, value in _given(rule, target):
        slot = target.slots[index]
        if slot is None or value is None:
            continue
        if holds(slot.quantity, value):
            hits.append(index)
            if slot.quantity.number:
                values[slot.quantity.number] = (value, slot.quantity.half)
        else:
            misses.append(index)
            if len(misses) > allowed:
                return None
            misfit += _distance(slot.quantity.number * value.scale, value.middle)
    if not values:
        return None
    spread = _spread(target, named)
    score = sum(_evidence(value, half, spread) for value, half in values.values()) - _UNUSUAL.get(
        rule.family.name, 0.0
    )
    score -= 2.0 * misfit + _partial(rule, target, view)
    score += (0.0, 3.0, 5.0, 6.0)[named] - cost
    return Found(target, rule, tuple(hits), tuple(misses), score, named, len(values))


def _slip(rule: Rule, target: Series, index: int) -> bool:
    """Whether a slip of digits explains a cell that does not follow: what a level beside the others makes,
    as the size of an element does, is no slip."""
    slot = target.slots[index]
    value = None if slot is None else evaluate(rule, index, slot.quantity)
    if slot is None or value is None:
        return False
    return (general(slot.quantity, value) or "").startswith(DIGITS) or _again(target, index, slot.quantity)


def _again(target: Series, index: int, printed: Quantity) -> bool:
    """Whether a cell repeats the one above or below it."""
    beside = (*target.slots[max(index - 1, 0) : index], *target.slots[index + 1 : index + 2])
    return any(slot is not None and slot.quantity.digits == printed.digits for slot in beside)


def _allowed(rule: Rule, target: Series, view: View, named: int) -> int:
    """How many misses `_enough` can let pass at most, -1 when it lets no hits pass either: most
    rules are wrong, and seen to be on the first cells."""
    name = rule.family.name
    if named:
        most = target.count // 2
    elif view.axis == "row" and name not in ("sum", "mean"):
        return -1
    else:
        away = max(series.position for series in rule.inputs) > target.position
        most = 0 if away or target.note or name in _WITHOUT_MISS else target.count // 3
    return min(most, 1) if name == "proportion" and not rule.stated else most


def _distance(printed: float, follows: float) -> float:
    """How far what is printed lies from what follows: 0 to 1. Slips are small more often than large."""
    size = max(abs(printed), abs(follows))
    return min(abs(printed - follows) / size, 1.0) if size else 0.0


def _partial(rule: Rule, target: Series, view: View) -> float:
    """What a summary of some of the cells beside it, not of all, costs."""
    if rule.family.name not in r.MANY or len(rule.inputs) < 2 or rule.family.name == "product":
        return 0.0
    ends = sorted(series.position for series in rule.inputs)
    others = [s.position for s in view.series if s.note == 0 and s.key != target.key and s.position]
    if view.axis == "row":
        others.append(min(series.position for series in view.series))
    near = ends[-1] == target.position - 1 or ends[0] == target.position + 1
    whole = ends[0] <= min(others) if ends[0] < target.position else ends[-1] >= max(others)
    if view.axis == "row" and not whole:
        # a subtotal begins under another one, or is no subtotal
        above = next((s for s in view.series if s.position == ends[0] - 1), None)
        whole = above is not None and bool(families_named(above.name) & {"sum", "mean"})
    each = 9.0 if view.axis == "row" else 4.0
    return (0.0 if near else each) + (0.0 if whole else each)


def _evidence(value: Value, half: float, spread: float) -> float:
    width = (value.high - value.low) / value.scale + 2 * half
    if width <= 0 or spread <= 0:
        return _CEILING if spread > 0 else 0.0
    return min(max(math.log(max(spread, 1e-300) / width), 0.0), _CEILING)


def _enough(found: Found, target: Series, view: View) -> bool:
    """Whether the evidence suffices to accept a rule."""
    hits, misses = found.distinct, len(found.misses)
    if found.rule.family.name == "proportion" and not found.rule.stated:
        hits -= 1
        if misses and (hits < 3 or misses > 1 or not _slip(found.rule, target, found.misses[0])):
            return False
    if found.level >= 2 and misses == 0 and (found.rule.family.name != "proportion" or found.rule.stated):
        return found.score > -2.0
    if found.level >= 1:
        if hits < 1 or hits < misses:
            return False
        equal = 3.0 if found.level >= 2 else 5.0
        return found.score >= (2.0 if misses == 0 else 4.0 if hits > misses else equal)
    if view.axis == "row" and found.rule.family.name not in ("sum", "mean"):
        return False
    if misses and max(series.position for series in found.rule.inputs) > target.position:
        return False
    if found.rule.family.name in _WITHOUT_MISS or target.note:
        return misses == 0 and hits >= 3 and found.score >= 9.0
    if misses:
        return hits >= 3 and hits >= 2 * misses and found.score >= 9.0
    return hits >= 2 and found.score >= 5.0


_MODES = ((False, False), (True, False), (True, True))


def _hypotheses(view: View, target: Series) -> Iterator[Rule]:
    mains = [s for s in view.series if s.note == 0 and s.key != target.key and s.count]
    mains = [s for s in mains if _near(s, target, len(mains))]
    own = [s for s in view.series if s.position == target.position and s.key != target.key and s.count]
    pool = mains + [s for s in own if s not in mains and s.note < target.note]
    if view.axis == "row" and not families_named(target.name):
        pool = []
    for a, b in itertools.permutations(pool, 2):
        yield from _pair(a, b, target)
    for one in pool:
        yield from _single(one, view, target)
    yield from _runs(mains, target)
    if view.axis == "column" and target.note == 0:
        yield from _proportions(mains, target)
    if view.axis == "column":
        rated = any(slot is not None and slot.quantity.unit.kind == "rate" for slot in target.slots)
        for a, b, c in itertools.permutations(pool if rated and len(pool) <= 8 else (), 3):
            if a.position < b.position:
                for mode in _modes(a, b, c, target):
                    yield Rule(r.RATE, (a, b, c), mode)


def _near(series: Series, target: Series, count: int) -> bool:
    return count <= _WIDE or abs(series.position - target.position) <= _WIDE // 2 or series.position < 3


def _modes(*series: Series) -> tuple[tuple[bool, bool], ...]:
    """The readings of prefixes that differ: one, where no unit can be read in powers of 1024."""
    return _MODES if any(one.prefixed for one in series) else _MODES[:1]


def _pair(a: Series, b: Series, target: Series) -> Iterator[Rule]:
    over, under, kind = a.unit.dimension, b.unit.dimension, target.unit.kind
    alike = over == under or "plain" in (a.unit.kind, b.unit.kind)
    if alike and target.unit.dimension == NONE:
        for family in (r.RATIO, r.CHANGE, r.REDUCTION, r.SIZE):
            yield Rule(family, (a, b))
    if alike and (kind != "percent" or a.unit.kind == "percent"):
        yield Rule(r.DIFFERENCE, (a, b))
        if a.position < b.position:
            for family in (r.SUM, r.MEAN, r.GAP):
                yield Rule(family, (a, b))
    if over != under:
        for mode in _modes(a, b, target):
            yield Rule(r.QUOTIENT, (a, b), mode)
    if a.position < b.position and kind != "percent":
        for mode in _modes(a, b, target):
            yield Rule(r.PRODUCT, (a, b), mode)


def _single(one: Series, view: View, target: Series) -> Iterator[Rule]:
    if view.axis == "column":
        for shift in ("first", "last", "above", "below"):
            other = shifted(one, shift)
            for a, b in ((one, other), (other, one)):
                for family in (r.DIFFERENCE, r.RATIO, r.CHANGE, r.REDUCTION, r.SIZE):
                    yield Rule(family, (a, b))
        if (base := _base(one, target)) is not None:
            yield from (Rule(r.RATIO, pair) for pair in ((one, base), (base, one)))
        yield Rule(r.SUM, (one,), cumulative=True)
        others = [slot for slot in one.slots if slot is not None]
        if len(others) > 2:
            yield from _shares(one)
    if one.note == 0 and target.note == 0:
        if one.unit.scale != target.unit.scale:
            for mode in _modes(one, target):
                yield Rule(r.SAME, (one,), mode)
        yield from _stated(one, target)


def _base(one: Series, target: Series) -> Series | None:
    """The value of a series in the row that a target is relative to: the last one above where it is 1, where
    there are several, one for each group of rows."""
    ones = [at for at, slot in enumerate(target.slots) if slot is not None and slot.quantity.number == 1]
    if len(ones) < 2 or target.unit.kind not in ("plain", "ratio"):
        return None
    bases = [max((at for at in ones if at <= row), default=None) for row in range(len(target.slots))]
    return replace(one, slots=tuple(None if at is None else one.slots[at] for at in bases), shift="base")


def _stated(one: Series, target: Series) -> Iterator[Rule]:
    """A proportion whose factor the target's name states: "KV of 32,768 tokens"."""
    for quantity in quantities(target.name):
        if quantity.unit.kind == "plain":  # the number of an item: "(2) best metric"
            continue
        if quantity.number > 1 and not quantity.decimals and quantity.single and one.unit.kind != "plain":
            factor = quantity.number * quantity.unit.scale
            if one.unit.dimension == target.unit.dimension:
                for mode in _MODES:
                    yield Rule(r.SCALED, (one,), mode, constant=factor, stated=True)


def _proportions(mains: list[Series], target: Series) -> Iterator[Rule]:
    """Products of stated levels with one factor that the cells agree on."""
    levels = [s for s in mains if s.position < target.position and _counted(s) and s.shift == ""][-6:]
    for size in (1, 2, 3, 4):
        for some in itertools.combinations(levels, size):
            constant = _constant(some, target)
            if constant is not None:
                yield Rule(r.SCALED, some, constant=constant)


def _counted(series: Series) -> bool:
    """Whether a series is of stated levels: integers that are exact."""
    return all(slot is None or r.exact(slot.quantity, "proportion") for slot in series.slots)


def _shares(one: Series) -> Iterator[Rule]:
    """A value as a share of the sum of its column."""
    present = [slot for slot in one.slots if slot is not None]
    columns = [Series(one.name, one.position, one.note, (slot,) * len(one.slots), "all") for slot in present]
    yield Rule(r.SHARE, (one, *columns))
    if len(columns) > 3:
        yield Rule(r.SHARE, (one, *columns[:-1]))


def _constant(some: tuple[Series, ...], target: Series) -> float | None:
    """The factor between products of levels and a target for which most cells agree, when there are
    three or more different products; else None."""
    bounds = []
    sizes = set()
    for index, slot in enumerate(target.slots):
        inputs = [series.slots[index] for series in some]
        if slot is None or any(one is None for one in inputs) or not slot.quantity.single:
            continue
        base = math.prod(one.quantity.number * one.quantity.unit.scale for one in inputs if one is not None)
        if not base or not slot.quantity.number:
            continue
        sizes.add(base)
        ends = (
            slot.quantity.low * slot.quantity.unit.scale / base,
            slot.quantity.high * slot.quantity.unit.scale / base,
        )
        bounds.append((min(ends), max(ends)))
    if len(bounds) < 3 or len(sizes) < 3:
        return None
    # a factor inside the most intervals lies at the lower end of one of them
    best = max((low for low, _ in bounds), key=lambda k: sum(_inside(k, ends) for ends in bounds))
    inside = [ends for ends in bounds if _inside(best, ends)]
    if not inside:
        return None
    return (max(low for low, _ in inside) + min(high for _, high in inside)) / 2


def _inside(factor: float, ends: tuple[float, float]) -> bool:
    return ends[0] - 1e-9 * abs(ends[0]) <= factor <= ends[1] + 1e-9 * abs(ends[1])


def _runs(mains: list[Series], target: Series) -> Iterator[Rule]:
    """Aggregates of three or more neighbouring series, and of all that stand on one side."""
    before = [s for s in mains if s.position < target.position]
    after = [s for s in mains if s.position > target.position]
    for side in (before, after):
        runs = (
            {tuple(side[i:j]) for i in range(len(side)) for j in range(i + 3, len(side) + 1)}
            if (len(side) <= 7)
            else {tuple(side[i:]) for i in range(len(side) - 2)}
        )
        for run in sorted(runs, key=lambda run: (len(run), run[0].position)):
            for family in (r.SUM, r.MEAN, r.LARGEST, r.SMALLEST, r.MEDIAN, r.GEOMETRIC, r.PRODUCT):
                yield Rule(family, run)
    for side in (before, after):
        if len(side) == 2:
            for family in (r.LARGEST, r.SMALLEST, r.GEOMETRIC):
                yield Rule(family, tuple(side))
