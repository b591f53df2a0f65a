"""The answer of a page: each comparison in words, and one sentence over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from kvik_lab.infer.compare import Comparison, Conclusion
from kvik_lab.infer.judge import Plan
from kvik_lab.report.cells import Missing, State, short
from kvik_lab.report.cells import change as as_change
from kvik_lab.report.look import Compared, Rules
from kvik_lab.report.model import Answer, Claim, Interval, NoInterval, Verdict
from kvik_lab.report.read import Data
from kvik_lab.report.sizes import SECONDS, Known, Sized, measured

FACTS = ("when", "where", "versions")
"""What a reader wants to know of any measurement; what is not stated is said not to be."""
MOST_ARMS = 4
"""Arms that the sentence speaks of; of more it counts."""
MANY_TIMES = 3.0
"""Ratio from which on it is told as such: 2,400 % more is hard to read."""


def where(data: Data, condition: tuple[str, ...]) -> str:
    """A condition as text; empty where there is one only."""
    return ", ".join(f"{n} {v}" for n, v in zip(data.others, condition, strict=True))


def answer(
    data: Data, base: str, compared: tuple[Compared, ...], by_size: tuple[Sized, ...], rules: Rules
) -> Answer:
    """What the page says first."""
    claims = [difference(f"C{n}", data, base, one, rules) for n, one in enumerate(compared, 1)]
    crossing = crossovers(data, by_size)
    arms = [arm for arm in data.arms if arm != base]
    others = " or ".join(arms) if len(arms) <= MOST_ARMS else f"any of {len(arms)} others"
    at = f", by {', '.join(data.others)}" if data.others else ""
    better = "less" if rules.smaller_is_better else "more"
    what = "takes less time" if rules.unit in SECONDS else f"gives {better}"
    question = rules.question or f"Which {what}, {base} or {others}{at}?"
    return Answer(
        question,
        marked(sentence(data, base, compared, crossing, rules), {**data.facts, **rules.facts}),
        sure(compared, rules),
        change(compared, rules),
        (*claims, *crossing),
        _facts(data, rules),
        *(("more time", "less time") if rules.unit in SECONDS else ("higher", "lower")),
        base,
    )


def marked(said: str, facts: Mapping[str, str]) -> str:
    """A sentence that says first what was emulated, where something was: it is quoted without the rest."""
    what = facts.get("emulated")
    return f"Emulated ({what}), so not what hardware does: {said}" if what else said


def difference(id_: str, data: Data, base: str, one: Compared, rules: Rules) -> Claim:
    """One arm beside the base under one condition."""
    rests = ("tests", "cells")
    at = where(data, one.condition)
    place = f" at {at}" if at else ""
    if one.found is None or one.found.ratio is None:
        none = Missing(State.NOT_POSSIBLE)
        text = f"{one.arm} and {base}{place}: no comparison."
        why = one.why or "there is no ratio"
        return Claim(id_, text, none, "", NoInterval(why), rests, Verdict.INSUFFICIENT, why, _row(data, one))
    ratio, end = one.found.ratio, one.found.conclusion
    interval = Interval(ratio.low, ratio.high, ratio.level)
    text = f"{one.arm} {amount([ratio.estimate], base, rules)}{place}."
    verdict = Verdict.SUPPORTED
    if end in (Conclusion.EQUIVALENT, Conclusion.BOTH):
        verdict = Verdict.EQUIVALENT
        text = f"{one.arm} and {base} are equal within {100 * (rules.margin or 0.0):g} %{place}."
    elif end is not Conclusion.DIFFERENT:
        verdict = Verdict.INSUFFICIENT
        text = f"Whether {one.arm} and {base} differ{place} is not decided."
    return Claim(
        id_, text, ratio.estimate, "times", interval, rests, verdict, because(one.found), _row(data, one)
    )


def _row(data: Data, one: Compared) -> str:
    several = len(data.arms) > 2 or not data.others
    return ", ".join(filter(None, (one.arm if several else "", where(data, one.condition))))


def amount(ratios: Sequence[float], base: str, rules: Rules) -> str:
    """How much, in words: "takes 21.5 % more time than tcp"; of several ratios to one side of 1, from the
    least to the most."""
    return f"{'takes' if rules.unit in SECONDS else 'is'} {_span(ratios, base, rules)}"


def _span(ratios: Sequence[float], base: str, rules: Rules) -> str:
    """`amount` without its verb; `base` may be empty, where it is known by now."""
    time, more = rules.unit in SECONDS, max(ratios) > 1
    if max(ratios) >= MANY_TIMES:
        least, most, unit = short(min(ratios)), short(max(ratios)), ""
        what, than = f"times as {'long' if time else 'high'}", f" as {base}"
    else:
        sizes = sorted(abs(ratio - 1) for ratio in ratios)
        least, most, unit = _percent(sizes[0]), _percent(sizes[-1]), " %"
        what = f"{'more' if more else 'less'} time" if time else "higher" if more else "lower"
        than = f" than {base}"
    span = least if least == most else f"{least.removesuffix(unit)} to {most}"
    return f"{span} {what}{than if base else ''}"


def because(found: Comparison) -> str:
    """How the verdict was reached, and what would decide it where it is open."""
    parts = []
    if found.conclusion is Conclusion.UNDECIDED:
        needed = found.would_decide()
        size = _percent(abs(found.ratio.estimate - 1)) if found.ratio else ""
        parts.append(
            f"the interval holds 1; {needed.starts} starts an arm would decide a difference of {size} in "
            "80 % of studies"
            if needed is not None
            else f"the interval holds 1, and a difference of {size} would take over 500 starts an arm"
        )
    if found.odd:
        both = (
            ""
            if found.all_kept is None
            else f": {as_change(found.all_kept.low)} to {as_change(found.all_kept.high)}"
        )
        parts.append(f"left out as odd: {', '.join(found.odd)}; with all kept{both}")
    return "; ".join((*parts, *found.notes))


def crossovers(data: Data, by_size: tuple[Sized, ...]) -> list[Claim]:
    """Where the order of two arms changes, as far as sizes were measured."""
    out: list[Claim] = []
    for each in by_size:
        begin = f"At {each.at}: " if each.at else ""
        row = ", ".join(filter(None, ("crossover", each.at)))
        for arm, found, why in each.crossings:
            name = f"X{len(out) + 1}"
            none = Missing(State.NOT_POSSIBLE)
            unit, rests = data.size or "", (each.figure.id,)
            if found is None:
                text = f"{begin}Where {arm} and the base cross cannot be said."
                out.append(
                    Claim(name, text, none, unit, NoInterval(why), rests, Verdict.INSUFFICIENT, why, row)
                )
                continue
            known = measured(found, data)
            verdict = (
                Verdict.SUPPORTED if known.known in (Known.BOUNDED, Known.OUTSIDE) else Verdict.INSUFFICIENT
            )
            interval: Interval | NoInterval = NoInterval(known.known.value)
            if known.known is not Known.OUTSIDE and known.low is not None:
                interval = Interval(known.low, known.high, found.level)
            value = none if known.estimate is None else known.estimate
            notes = "; ".join(found.notes)
            text = begin + known.sentence
            out.append(Claim(name, text, value, unit, interval, rests, verdict, notes, row))
    return out


def sentence(
    data: Data, base: str, compared: tuple[Compared, ...], crossing: Sequence[Claim], rules: Rules
) -> str:
    """The answer in a sentence; of several arms, one for each. Of several crossovers it has none."""
    if not compared:
        return "There is one arm only, and nothing to compare it with."
    arms = list(dict.fromkeys(one.arm for one in compared))
    told = [
        _of_arm(data, base, arm, [c for c in compared if c.arm == arm], rules) for arm in arms[:MOST_ARMS]
    ]
    if len(arms) > MOST_ARMS:
        told.append(f"{len(arms) - MOST_ARMS} more arms are below.")
    only = crossing[0] if len(crossing) == 1 else None
    if only is not None and only.verdict is Verdict.SUPPORTED and not isinstance(only.estimate, Missing):
        told.append(f"They cross near {short(only.estimate)} {data.size}.")
    return " ".join(told)


def _of_arm(data: Data, base: str, arm: str, compared: list[Compared], rules: Rules) -> str:
    """What is known of one arm over all conditions."""
    if len(compared) == 1:
        return difference("", data, base, compared[0], rules).sentence
    parts: list[str] = []
    for kind, group in groupby(sorted(compared, key=_order), _order):
        some = list(group)
        places = "everywhere" if len(some) == len(compared) else _places(data, some)
        parts.append(_kind(kind, some, "" if parts else base, places, rules))
    verb = "takes" if rules.unit in SECONDS else "is"
    begin = f"{arm} {verb}" if min(map(_order, compared)) < 2 else f"{arm} against {base}:"
    return f"{begin} {'; '.join(parts)}."


def _order(one: Compared) -> int:
    """More, less, equal, open, none: the order in which a sentence lists them."""
    if one.found is None or one.found.ratio is None:
        return 4
    end = one.found.conclusion
    if end is Conclusion.DIFFERENT:
        return 0 if one.found.ratio.estimate > 1 else 1
    return 2 if end in (Conclusion.EQUIVALENT, Conclusion.BOTH) else 3


def _kind(kind: int, some: list[Compared], base: str, places: str, rules: Rules) -> str:
    if kind > 1:
        margin = 100 * (rules.margin or 0.0)
        word = {2: f"equal within {margin:g} %", 3: "not decided", 4: "not comparable"}[kind]
        return f"{word} {places}"
    ratios = [one.found.ratio.estimate for one in some if one.found and one.found.ratio]
    return f"{_span(ratios, base, rules)} {places}"


def _places(data: Data, some: list[Compared], most: int = 4) -> str:
    if len(data.others) == 1:
        levels = [one.condition[0] for one in some]
        more = f" and {len(levels) - most} more" if len(levels) > most else ""
        return f"at {data.others[0]} {', '.join(levels[:most])}{more}"
    return f"under {len(some)} conditions" if len(some) > 1 else f"at {where(data, some[0].condition)}"


def sure(compared: tuple[Compared, ...], rules: Rules) -> str:
    """What the error rate is, and what it rests on."""
    found = [c.found for c in compared if c.found is not None and c.found.p is not None]
    if not found:
        return "Nothing is: no comparison has two starts on each side, so how starts differ is not known."
    starts = sorted({f.starts for f in found})
    count = f"{starts[0]}" if len(starts) == 1 else f"{starts[0]} to {starts[-1]}"
    family = found[0].comparisons
    level = f"{100 * (1 - rules.alpha):g} %"
    what = (
        f"The interval is at {level}"
        if family == 1
        else f"All {family} intervals of this page hold together with {level} at least"
    )
    unit = "pairs of starts" if all(f.plan is Plan.PAIRED for f in found) else "starts an arm"
    left = len({name for f in found for name in f.odd})
    odd = f" {left} odd starts are left out, by a rule stated before." if left > 1 else ""
    odd = " One odd start is left out, by a rule stated before." if left == 1 else odd
    return (
        f"{what}. Each rests on {count} {unit}, and on no model of how iterations depend on each other.{odd}"
    )


def change(compared: tuple[Compared, ...], rules: Rules) -> str:
    """What would change the answer: more starts where it is open, a bias where it is decided."""
    found = [
        c.found
        for c in compared
        if c.found is not None and c.found.ratio is not None and c.found.p is not None
    ]
    if not found:
        return (
            "Two starts of each arm at least; five of each tell a difference of 20 % where starts vary by "
            "2 %."
        )
    parts = []
    undecided = [f for f in found if f.conclusion is Conclusion.UNDECIDED]
    if undecided:
        needed = [f.would_decide() for f in undecided]
        counts = sorted(n.starts for n in needed if n is not None)
        if counts:
            span = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
            parts.append(
                f"What is not decided would be with {span} starts an arm, if differences are as measured."
            )
        elif rules.margin is None:
            parts.append("What is not decided is small: say with --margin what would not matter.")
    flips = [
        f
        for f in found
        if f.all_kept is not None and f.ratio is not None and f.all_kept.holds(1.0) != f.ratio.holds(1.0)
    ]
    if flips:
        others = (
            "one verdict would be another" if len(flips) == 1 else f"{len(flips)} verdicts would be others"
        )
        parts.append(f"With odd starts kept, {others}.")
    decided = [f.ratio for f in found if f.conclusion is Conclusion.DIFFERENT and f.ratio is not None]
    if decided:
        nearest = min(r.low - 1 if r.estimate > 1 else 1 - r.high for r in decided)
        parts.append(
            f"What is decided holds unless all starts of an arm share a bias of {_percent(nearest)} or more; "
            "further starts would not show it."
        )
    return " ".join(parts)


def _facts(data: Data, rules: Rules) -> tuple[tuple[str, str], ...]:
    known = {**data.facts, **rules.facts}
    first = [(name, known.pop(name, "not stated")) for name in FACTS]
    files = ", ".join(source.rpartition("/")[2] for source in data.sources)
    return (*first, *known.items(), ("data", files))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.01 else f"{100 * share:.2g} %"
