"""Results as sentences: the estimate, its interval and what they follow from, or why there is none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

from kvik_lab.physics.crossover import (
    AboveOnly,
    BelowOnly,
    Bounded,
    Crossover,
    Everywhere,
    NoCrossing,
    Region,
    Several,
)
from kvik_lab.physics.links import Link
from kvik_lab.physics.units import format_bytes, format_seconds
from kvik_lab.physics.workload import Workload

if TYPE_CHECKING:
    from kvik_lab.physics.advise import Advice, Cost, Gap, Row

SHORT_SHARE = 0.9  # of the time: a link that is busier than this has queues that the mean does not show


def percent(level: float) -> str:
    """0.95 as `95 %`."""
    return f"{level * 100:g} %"


def probability(value: float, digits: int = 4) -> str:
    """That many digits, and never a certainty. Of draws, three: there are a few thousand."""
    least = 10.0**-digits
    if value > 1 - least:
        return f"over {1 - least:.{digits}f}"
    return f"{value:.{digits}f}" if value >= least else f"under {least:.{digits}f}"


def size_text(size: float, unit: str) -> str:
    """A size in the unit of the data."""
    return format_bytes(size) if unit == "bytes" else f"{size:,.0f} {unit}"


def region_text(region: Region, show: Callable[[float], str]) -> str:
    """What a set of crossovers says."""
    if isinstance(region, Bounded):
        return f"from {show(region.lo)} to {show(region.hi)}"
    if isinstance(region, AboveOnly):
        return f"above {show(region.lo)}, without an upper bound"
    if isinstance(region, BelowOnly):
        return f"below {show(region.hi)}, without a lower bound"
    if isinstance(region, Everywhere):
        return "anywhere: the data exclude no size"
    if isinstance(region, NoCrossing):
        return f"none: {region.faster} is faster from {show(region.lo)} to {show(region.hi)}"
    return _several(region, show)


def _several(region: Several, show: Callable[[float], str]) -> str:
    parts = []
    for lo, hi in region.stretches:
        if lo is None:
            parts.append(f"below {show(hi or 0.0)}")
        elif hi is None:
            parts.append(f"above {show(lo)}")
        else:
            parts.append(f"from {show(lo)} to {show(hi)}")
    return " or ".join(parts)


def crossover_sentences(found: Crossover) -> tuple[str, ...]:
    """What a crossover says, without prompts."""
    first, second = found.names

    def show(size: float) -> str:
        return size_text(size, found.unit)

    out = []
    if not found.estimates:
        out.append(f"The means of {first} and {second} do not cross.")
    else:
        out.append(f"The means of {first} and {second} cross at {', '.join(map(show, found.estimates))}.")
    if isinstance(found.region, tuple):
        out.append("No interval is possible: only means are given, and nothing about their errors.")
        out += [
            f"The means change order between {show(bracket.lo)} and {show(bracket.hi)}; no more is shown."
            for bracket in found.region
        ]
    else:
        out.append(f"{percent(found.level)} set of crossovers: {region_text(found.region, show)}.")
    if found.none_in_range is not None and found.faster_throughout is not None:
        lo, hi = map(show, found.range)
        ours, theirs = found.faster_throughout
        out.append(
            f"Probability that they do not cross from {lo} to {hi}: {probability(found.none_in_range, 3)} "
            f"({first} faster throughout: {probability(ours, 3)}; {second}: {probability(theirs, 3)})."
        )
    return tuple(out)


def crossing_in_tokens(found: Crossover, to_tokens: Callable[[float], int | None]) -> str:
    """A crossover as prompt lengths."""

    def show(size: float) -> str:
        tokens = to_tokens(size)
        return f"{tokens:,} tokens" if tokens is not None else "a size that no prompt has"

    first, second = found.names
    if isinstance(found.region, tuple):
        if not found.estimates:
            return f"{first} and {second}: means do not cross; no interval is possible"
        where = ", ".join(map(show, found.estimates))
        return f"{first} and {second}: means cross at {where}; no interval is possible without errors"
    text = region_text(found.region, show)
    if found.estimates:
        text = f"{', '.join(map(show, found.estimates))} ({percent(found.level)}: {text})"
    if found.none_in_range is not None:
        lo, hi = map(show, found.range)
        text += f"; probability of no crossing from {lo} to {hi}: {probability(found.none_in_range, 3)}"
    return f"{first} and {second}: {text}"


def say(advice: Advice, links: tuple[Link, ...], workload: Workload) -> tuple[str, ...]:
    """The answer in sentences."""
    out = [*_by_length(advice), *(f"Crossover of {text}." for text in advice.in_tokens)]
    if not advice.rivals:
        out.append("No answer for the whole workload: some prompts lie beyond what a link was measured with.")
    for gap in advice.rivals:
        out.append(_overall(advice, gap))
        out += _price(advice, gap, workload)
    out += [text for cost in advice.costs if (text := _load(cost))]
    stretched = [f"{row.tokens:,}" for row in advice.rows if row.extrapolated]
    if stretched:
        out.append(
            f"Prompts of {', '.join(stretched)} tokens lie outside of the measured sizes: extrapolated."
        )
    if not any(link.measured for link in links):
        out.append("No link was measured: this follows from stated rates alone and has no interval.")
    return tuple(out)


def _by_length(advice: Advice) -> list[str]:
    """One sentence for each run of prompt lengths with one verdict."""
    out: list[str] = []
    for _, run in groupby(advice.rows, lambda row: (row.verdict, row.undecided)):
        rows = list(run)
        first, last = rows[0], rows[-1]
        where = f"{first.tokens:,} tokens" if first is last else f"{first.tokens:,} to {last.tokens:,} tokens"
        if first.undecided:
            out.append(f"Prompts of {where}: {_undecided(first, advice.margin)}.")
        else:
            gaps = [row.gap for row in (first, last) if row.gap is not None]
            shown = " to ".join(dict.fromkeys(_gap_text(gap, advice.level) for gap in gaps))
            out.append(f"Prompts of {where}: {first.verdict}, faster by {shown}.")
    return out


def _undecided(row: Row, margin: float) -> str:
    """A verdict without a fastest link: of which, where others are slower."""
    slower = [name for name in row.seconds if name not in row.undecided]
    *names, last = row.undecided
    behind = f"; slower: {', '.join(slower)}" if slower else ""
    if row.verdict == "insufficient evidence":
        of = f"{', '.join(names)} or {last}" if slower else "either" if len(row.seconds) == 2 else "any"
        return f"insufficient evidence for {of}{behind}"
    of = f" between {', '.join(names)} and {last}" if slower else ""
    return f"no difference that matters (within {format_seconds(margin)}){of}{behind}"


def _gap_text(gap: Gap, level: float) -> str:
    text = format_seconds(gap.seconds)
    if gap.lo is None or gap.hi is None:
        return text
    return f"{text} ({percent(level)}: {format_seconds(gap.lo)} to {format_seconds(gap.hi)})"


def _overall(advice: Advice, gap: Gap) -> str:
    much = _gap_text(gap, advice.level)
    text = f"Over the whole workload {gap.faster} hands over {much} faster than {gap.slower}"
    if gap.probability is None:
        return text + " a request; nothing is known of the error of that."
    if gap.lo is not None and gap.lo <= 0:
        return (
            text + f": insufficient evidence (probability that it is faster {probability(gap.probability)})."
        )
    return text + f" a request; probability that it is faster: {probability(gap.probability)}."


def _price(advice: Advice, gap: Gap, workload: Workload) -> list[str]:
    costs = {cost.link: cost for cost in advice.costs}
    fast, slow = costs[gap.faster], costs[gap.slower]
    if fast.per_hour is None or slow.per_hour is None:
        return []
    more = fast.per_hour - slow.per_hour
    if more <= 0:
        cheaper = "costs no more" if more == 0 else f"costs {-more:.4g} an hour less"
        return [f"{fast.link} {cheaper} than {slow.link}."]
    text = f"{fast.link} costs {more:.4g} an hour more than {slow.link}"
    if workload.per_second is None:
        return [text + "; what a saved second costs depends on the requests a second, which are not given."]
    if fast.per_million_tokens is not None and slow.per_million_tokens is not None:
        text += f", {fast.per_million_tokens - slow.per_million_tokens:.4g} for a million tokens"
    if gap.seconds == 0 or (gap.lo is not None and gap.lo <= 0):
        return [text + "; there is no evidence that this saves time."]
    each = more / (3600 * workload.per_second)
    text += f"; a saved second of waiting then costs {each / gap.seconds:.3g}"
    if gap.lo is not None and gap.hi is not None:
        text += f" ({percent(advice.level)}: {each / gap.hi:.3g} to {each / gap.lo:.3g})"
    return [text + "."]


def _load(cost: Cost) -> str | None:
    if cost.busy is None:
        return None
    if cost.busy >= 1:
        return (
            f"{cost.link} cannot carry this workload: it would be busy {cost.busy:.0%} of the time; "
            f"{int(cost.busy / SHORT_SHARE) + 1} such links side by side could."
        )
    if cost.waiting is None or cost.mean_seconds is None or cost.waiting <= 0.1 * cost.mean_seconds:
        return None
    wait = format_seconds(cost.waiting)
    return f"{cost.link} is busy {cost.busy:.0%} of the time; a transfer waits {wait} for it in the mean."
