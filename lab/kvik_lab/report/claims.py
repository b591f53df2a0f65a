"""The ledger of claims, and what the data cannot say."""

from __future__ import annotations

from kvik_lab.infer.compare import Conclusion
from kvik_lab.infer.order import needed_for_bound
from kvik_lab.physics.crossover import Bounded, Crossover, NoCrossing
from kvik_lab.report.cells import Missing, State
from kvik_lab.report.look import Compared, Looked, Rules
from kvik_lab.report.model import Claim, Interval, NoInterval, Section, Verdict
from kvik_lab.report.read import Data
from kvik_lab.report.sizes import Sized, factor_of, statement


def claims(
    data: Data,
    base: str,
    looked: tuple[Looked, ...],
    compared: tuple[Compared, ...],
    by_size: tuple[Sized, ...],
    rules: Rules,
) -> Section:
    """Each sentence that somebody may act on."""
    found: list[Claim] = []
    for number, one in enumerate(compared, 1):
        found.append(_difference(f"C{number}", data, base, one, rules))
    for number, (each, arm, crossing, why) in enumerate(
        [(s, *crossing) for s in by_size for crossing in s.crossings], 1
    ):
        found.append(_crossover(f"X{number}", data, base, arm, each, crossing, why))
    for number, one_look in enumerate(looked, 1):
        found.append(_level(f"M{number}", data, one_look, rules))
    text = "Each sentence stands with its estimate, its interval, the data it rests on, and a verdict."
    return Section("claims", "Claims and what they rest on", (text,), (), (), tuple(found))


def _where(data: Data, condition: tuple[str, ...]) -> str:
    text = ", ".join(f"{n} {v}" for n, v in zip(data.others, condition, strict=True))
    return f" at {text}" if text else ""


def _difference(id_: str, data: Data, base: str, one: Compared, rules: Rules) -> Claim:
    where = _where(data, one.condition)
    rests = ("ratios", "effects")
    if one.found is None or one.found.ratio is None:
        sentence = f"{one.arm} and {base} differ{where}."
        none = Missing(State.NOT_POSSIBLE)
        why = one.why or "there is no ratio"
        return Claim(id_, sentence, none, "", NoInterval(why), rests, Verdict.INSUFFICIENT)
    ratio = one.found.ratio
    interval = Interval(ratio.low, ratio.high, ratio.level)
    lower = ratio.estimate < 1
    better = one.arm if lower == rules.smaller_is_better else base
    worse = base if better == one.arm else one.arm
    percent = 100 * abs(ratio.estimate - 1)
    side = "below" if lower else "above"
    sentence = f"Prefer {better} to {worse}{where}: {one.arm} is {percent:.3g} % {side} {base}."
    verdict, because = _verdict(one, rules)
    if verdict is Verdict.EQUIVALENT:
        margin = 100 * (rules.margin or 0.0)
        sentence = f"{one.arm} and {base} are equal within {margin:g} %{where}."
    return Claim(id_, sentence, ratio.estimate, "times", interval, rests, verdict, because)


def _verdict(one: Compared, rules: Rules) -> tuple[Verdict, str]:
    if one.found is None or one.p is None:
        return Verdict.INSUFFICIENT, one.why
    if one.of_two_starts:
        return Verdict.INSUFFICIENT, (
            "one start on each side: the interval is of these two starts, and how starts differ is not known"
        )
    if one.found.conclusion in (Conclusion.EQUIVALENT, Conclusion.BOTH):
        return Verdict.EQUIVALENT, "two one-sided tests, of this comparison by itself"
    if one.p <= rules.alpha:
        return Verdict.SUPPORTED, f"p = {one.p:.2g}, adjusted for all comparisons"
    notes = "; ".join(one.found.notes)
    return Verdict.INSUFFICIENT, f"p = {one.p:.2g}, adjusted for all comparisons" + (
        f"; {notes}" if notes else ""
    )


def _crossover(
    id_: str, data: Data, base: str, arm: str, each: Sized, found: Crossover | None, why: str
) -> Claim:
    rests = (each.figure.id,)
    none = Missing(State.NOT_POSSIBLE)
    unit = data.size or ""
    if found is None:
        sentence = f"There is a size from which the order of {arm} and {base} changes."
        return Claim(id_, sentence, none, unit, NoInterval(why), rests, Verdict.INSUFFICIENT)
    factor = factor_of(data)[1]
    estimate = found.estimates[0] / factor if len(found.estimates) == 1 else none
    sentence = statement(found, data)
    because = "; ".join(found.notes)
    if isinstance(found.region, NoCrossing):
        sentence = f"There is a size from which the order of {arm} and {base} changes."
        because = statement(found, data)
        no = NoInterval("the set of crossovers is empty")
        return Claim(id_, sentence, none, unit, no, rests, Verdict.NOT_SUPPORTED, because)
    if isinstance(found.region, Bounded):
        interval = Interval(found.region.lo / factor, found.region.hi / factor, found.level)
        return Claim(id_, sentence, estimate, unit, interval, rests, Verdict.SUPPORTED, because)
    no = NoInterval("the data do not bound it on both sides")
    return Claim(id_, sentence, estimate, unit, no, rests, Verdict.INSUFFICIENT, because)


def _level(id_: str, data: Data, one: Looked, rules: Rules) -> Claim:
    sentence = f"{one.cell.arm} has a steady mean{_where(data, one.cell.condition)}."
    if one.steady is None or one.steady.headline is None:
        unsteady = one.steady is not None
        none = Missing(State.NOT_POSSIBLE, "unsteady" if unsteady else "")
        verdict = Verdict.NOT_SUPPORTED if unsteady else Verdict.INSUFFICIENT
        return Claim(id_, sentence, none, rules.unit, NoInterval(one.why), ("cells",), verdict)
    mean = one.steady.headline
    alone = one.steady.over_starts is None
    verdict = Verdict.INSUFFICIENT if alone else Verdict.SUPPORTED
    interval = Interval(mean.low, mean.high, mean.level)
    return Claim(id_, sentence, mean.estimate, rules.unit, interval, ("cells",), verdict, one.why)


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
    need = needed_for_bound(0.99, 1 - rules.alpha)
    few = [_name(data, x) for x in looked if max((len(r.known) for r in x.cell.runs), default=0) < need]
    if few:
        said.append(
            f"A 99 % quantile with a bound, which takes {need} independent values of a start: {_list(few)}."
        )
    gone = [
        _name(data, x) for x in looked if any(isinstance(v, Missing) for r in x.cell.runs for v in r.values)
    ]
    if gone:
        said.append(f"What the missing values would have been: {_list(gone)}.")
    holes = [f"{arm}{_where(data, c)}" for c in data.conditions for arm in data.arms if not data.find(arm, c)]
    if holes:
        said.append(f"Anything of combinations that were not run: {_list(holes)}.")
    if any(c.of_two_starts for c in compared):
        said.append("Whether a difference of two starts would be there between two others.")
    if rules.margin is None and compared:
        said.append("Whether any two are equal: that takes a margin, which was not given (--margin).")
    if by_size:
        said.append("What holds beyond the sizes that were measured, unless the model holds there too.")
    said.append("Whether other hardware, models, or loads behave as what was measured here.")
    return Section("limits", "What these data cannot say", tuple(said))


def _name(data: Data, one: Looked) -> str:
    return f"{one.cell.arm}{_where(data, one.cell.condition)}"


def _list(names: list[str], most: int = 8) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
