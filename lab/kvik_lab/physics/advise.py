"""Which transport for which prompts: each statement with the numbers that it follows from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import special

from kvik_lab.errors import LabError
from kvik_lab.physics.crossover import Crossover, crossover_of_curves, quantile
from kvik_lab.physics.curve import Curve, Method
from kvik_lab.physics.data import Floats
from kvik_lab.physics.kv import ModelKv, kv_size
from kvik_lab.physics.links import Link
from kvik_lab.physics.units import format_bytes
from kvik_lab.physics.workload import Workload

MOST_TOKENS = 1 << 30
ALIKE, UNSURE = OPEN = ("no difference that matters", "insufficient evidence")
"""Verdicts without a fastest link."""


@dataclass(frozen=True)
class Setting:
    """How a model is served: tokens a block, and ranks that each have a link of their own."""

    block_tokens: int = 16
    tp: int = 1
    pp: int = 1


@dataclass(frozen=True)
class Gap:
    """How much faster one link is than another, in seconds; probability, lo, hi: None without errors."""

    faster: str
    slower: str
    seconds: float
    lo: float | None
    hi: float | None
    probability: float | None


@dataclass(frozen=True)
class Row:
    """One prompt length. seconds: by link, None where nothing was measured near that size.

    gap: of the fastest link and the one that it is least surely faster than. verdict: a link's name, "no
    difference that matters", or "insufficient evidence"; undecided: the links that such a verdict is of, the
    fastest first, as all others are slower.
    """

    tokens: int
    bytes: int
    seconds: dict[str, float | None]
    gap: Gap | None
    verdict: str
    extrapolated: bool
    undecided: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cost:
    """What a link costs and carries with the workload. Money is in the currency of the prices.

    busy: share of time that the link moves this workload's KV; waiting: mean seconds a transfer queues for
    it, arrivals being random (Pollaczek and Khinchine), None where it cannot keep up.
    """

    link: str
    mean_seconds: float | None
    per_hour: float | None
    per_million_tokens: float | None
    busy: float | None
    waiting: float | None


@dataclass(frozen=True)
class Advice:
    """The whole answer. crossings: in bytes; in_tokens: the same in prompt tokens, as text. rivals: over the
    whole workload, the fastest link and each other one; overall: that one of them which is least sure."""

    model: str
    bytes_per_token: int
    level: float
    margin: float
    rows: tuple[Row, ...]
    crossings: tuple[Crossover, ...]
    in_tokens: tuple[str, ...]
    costs: tuple[Cost, ...]
    overall: Gap | None
    rivals: tuple[Gap, ...]
    sentences: tuple[str, ...]
    notes: tuple[str, ...]


def advise(
    model: ModelKv,
    links: tuple[Link, ...],
    workload: Workload,
    setting: Setting | None = None,
    *,
    level: float = 0.95,
    margin: float = 0.001,
) -> Advice:
    """Compare links over a workload.

    margin: seconds of difference that do not matter. Raises `LabError` for what does not fit together.
    """
    from kvik_lab.physics.sentences import crossing_in_tokens, say

    setting = setting or Setting()
    if not 0.5 <= level < 1 or not margin >= 0:
        raise LabError("level is a number from 0.5 to below 1, margin a number of seconds from 0")
    rows = tuple(_row(model, links, tokens, setting, level, margin) for tokens in workload.shown)
    sizes = np.array([moved(model, int(tokens), setting) for tokens in workload.lengths], dtype=np.float64)
    crossings = tuple(_cross(first, second, sizes, level) for first, second in combinations(links, 2))
    costs = tuple(_cost(link, workload, sizes) for link in links)
    rivals = _overall(links, workload, sizes, level)
    in_tokens = tuple(
        crossing_in_tokens(found, lambda size: tokens_of(model, size, setting)) for found in crossings
    )
    notes = list(dict.fromkeys(note for found in crossings for note in found.notes))
    notes += [note for link in links if (note := _impossible(link)) is not None]
    partial = Advice(
        model.shape.name,
        model.bytes_per_token(),
        level,
        margin,
        rows,
        crossings,
        in_tokens,
        costs,
        min(rivals, key=_sure, default=None),
        rivals,
        (),
        tuple(notes),
    )
    return Advice(**{**partial.__dict__, "sentences": say(partial, links, workload)})


def moved(model: ModelKv, tokens: int, setting: Setting) -> int:
    """Bytes that one link has to carry for a prompt: all of it, or the largest rank's part."""
    size = kv_size(model, tokens, setting.block_tokens, setting.tp, setting.pp)
    return size.total if setting.tp == setting.pp == 1 else max(size.by_rank)


def tokens_of(model: ModelKv, size: float, setting: Setting) -> int | None:
    """The shortest prompt that has at least `size` bytes to carry, in whole blocks; None if none has."""
    lo, hi = 1, 1
    while moved(model, hi * setting.block_tokens, setting) < size:
        hi *= 2
        if hi > MOST_TOKENS:
            return None
    while lo < hi:
        middle = (lo + hi) // 2
        lo, hi = (
            (lo, middle) if moved(model, middle * setting.block_tokens, setting) >= size else (middle + 1, hi)
        )
    return lo * setting.block_tokens


def covers(link: Link, size: float) -> bool:
    """Whether a link's curve says anything of a size: a line does everywhere, straight pieces inside."""
    knots = link.curve.knots
    return link.curve.method == "line" or bool(knots[0] <= size <= knots[-1])


def beyond(link: Link, size: float) -> bool:
    """Whether a size lies outside of what was measured."""
    knots = link.curve.knots
    return link.measured and not knots[0] <= size <= knots[-1]


def _gap(first: Link, second: Link, weights: tuple[Floats, Floats], level: float) -> Gap:
    """first minus second, of the weighted mean over sizes; the one with the smaller mean is `faster`."""
    ours, theirs = (_mean_and_parts(link.curve, *weights) for link in (first, second))
    mean = ours[0] - theirs[0]
    parts = np.concatenate([ours[1], theirs[1]])
    freedom = np.concatenate([ours[2], theirs[2]])
    names = (second.name, first.name) if mean > 0 else (first.name, second.name)
    size = abs(mean)
    if parts.size == 0:
        return Gap(*names, size, None, None, None)
    total = float(parts.sum())
    welch = float(min(total**2 / np.sum(parts**2 / freedom), 1e9)) if np.isfinite(freedom).any() else 1e9
    half = float(quantile(level, np.array([welch]))[0]) * float(np.sqrt(total))
    return Gap(*names, size, size - half, size + half, float(special.stdtr(welch, size / np.sqrt(total))))


def _mean_and_parts(line: Curve, sizes: Floats, shares: Floats) -> tuple[float, Floats, Floats]:
    basis = shares @ line.basis(sizes)
    parts = np.array([float(basis @ part.covariance @ basis) for part in line.parts])
    return float(basis @ line.coefficients), parts, np.array([part.freedom for part in line.parts])


def _gaps(links: tuple[Link, ...], weights: tuple[Floats, Floats], level: float) -> tuple[Gap, ...]:
    """The fastest link against each rival."""
    means = [_mean_and_parts(link.curve, *weights)[0] for link in links]
    best = links[int(np.argmin(means))]
    shared = 1 - (1 - level) / (len(links) - 1)  # Bonferroni: as many comparisons as rivals
    return tuple(_gap(best, rival, weights, shared) for rival in links if rival is not best)


def _sure(gap: Gap) -> float:
    """The least difference that there may be, in seconds."""
    return gap.seconds if gap.lo is None else gap.lo


def _row(
    model: ModelKv, links: tuple[Link, ...], tokens: int, setting: Setting, level: float, margin: float
) -> Row:
    size = moved(model, tokens, setting)
    at = np.array([float(size)])
    seconds = {link.name: float(link.curve.mean(at)[0]) if covers(link, size) else None for link in links}
    stretched = any(beyond(link, size) for link in links)
    if None in seconds.values():
        return Row(tokens, size, seconds, None, UNSURE, stretched, tuple(seconds))
    gaps = _gaps(links, (at, np.ones(1)), level)
    best, open_ = gaps[0].faster, {gap.slower: said for gap in gaps if (said := verdict(gap, margin)) in OPEN}
    said = UNSURE if UNSURE in open_.values() else ALIKE if open_ else best
    undecided = (best, *open_) if open_ else ()
    return Row(tokens, size, seconds, min(gaps, key=_sure), said, stretched, undecided)


def verdict(gap: Gap, margin: float) -> str:
    """A link where the interval of the difference is above 0, and above the margin somewhere."""
    if gap.lo is None or gap.hi is None:
        return gap.faster if gap.seconds > margin else ALIKE
    if gap.hi <= margin and gap.lo >= -margin:
        return ALIKE
    return gap.faster if gap.lo > 0 else UNSURE


def _overall(links: tuple[Link, ...], workload: Workload, sizes: Floats, level: float) -> tuple[Gap, ...]:
    if not all(covers(link, size) for link in links for size in (sizes.min(), sizes.max())):
        return ()
    return _gaps(links, (sizes, workload.shares), level)


def _cross(first: Link, second: Link, sizes: Floats, level: float) -> Crossover:
    method: Method = "line" if first.curve.method == second.curve.method == "line" else "interpolate"
    lo, hi = float(sizes.min()), float(sizes.max())
    if method == "interpolate":  # which says nothing beyond what both have measured
        lo, hi = (
            max(lo, first.curve.knots[0], second.curve.knots[0]),
            min(hi, first.curve.knots[-1], second.curve.knots[-1]),
        )
    within = (float(lo), float(hi)) if lo < hi else None
    return crossover_of_curves(first.curve, second.curve, method=method, level=level, within=within)


def _impossible(link: Link) -> str | None:
    """Whether a link was measured to be faster than its hardware is."""
    if link.line is None or not link.measured:
        return None
    knots = link.curve.knots
    below = knots[link.curve.mean(knots) < knots / link.line.bytes_per_second]
    if below.size == 0:
        return None
    return (
        f"{link.name}: {format_bytes(float(below[0]))} took less than the line rate of {link.line} allows; "
        "they did not all move, or the line rate is another"
    )


def _cost(link: Link, workload: Workload, sizes: Floats) -> Cost:
    tokens = float(workload.lengths @ workload.shares) + workload.output_tokens
    rate = workload.per_second
    per_million = link.price / (rate * 3600 * tokens) * 1e6 if link.price is not None and rate else None
    if not all(covers(link, size) for size in (sizes.min(), sizes.max())):
        return Cost(link.name, None, link.price, per_million, None, None)
    seconds = link.curve.mean(sizes)
    mean = float(seconds @ workload.shares)
    busy = rate * mean if rate else None
    waiting = None
    if rate and busy is not None and busy < 1:
        waiting = float(rate * (seconds**2 @ workload.shares) / (2 * (1 - busy)))
    return Cost(link.name, mean, link.price, per_million, busy, waiting)
