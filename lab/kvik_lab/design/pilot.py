"""From a pilot's variances to the number of iterations and starts.

Kalibera and Jones (Rigorous Benchmarking in Reasonable Time, ISMM 2013): with T1^2 the variance of iterations
within a start, T2^2 that between starts, c1 what an iteration costs and c2 what a further start costs, the
variance of the mean falls fastest for the cost with r = ceil(sqrt(c2 / c1 * T1^2 / T2^2)) iterations a start.

They take iterations as independent. Successive iterations of a server are often not: with integrated
autocorrelation time tau, many of them tell as much as 1 / tau of their number, so T1^2 * tau takes the place
of T1^2. tau is that of a first-order autoregression, (1 + rho) / (1 - rho), from the lag-1 autocorrelation
within starts, whose bias of about -(1 + 3 rho) / n (Kendall, Biometrika 41, 1954) is undone. All variances
are relative to the squared mean of their configuration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special

from kvik_lab.design.model import FloatArray
from kvik_lab.design.words import unmeasured
from kvik_lab.errors import LabError
from kvik_lab.infer.judge import Plan
from kvik_lab.infer.power import FEWEST_STARTS, MOST_STARTS, effect_seen, starts_for_width
from kvik_lab.report.read import FACTS, RUN, UNIT, is_fact

BLOCK = "block"
"""The column that says which starts ran together, if there is one."""

MOST_ITERATIONS = 1000
"""Recommended at most, where starts hardly differ."""


@dataclass(frozen=True)
class Components:
    """Variances relative to the squared mean, and what they are estimated from."""

    configurations: int
    starts: int
    iterations: int
    iteration: float
    """T1^2: between iterations of a start, at any one time."""
    rho: float
    """Lag-1 autocorrelation within starts."""
    tau: float
    """Integrated autocorrelation time, at least 1."""
    start: float
    """T2^2: between starts, beyond what their iterations explain. 0 where that was negative."""
    start_unadjusted: float
    """The same if iterations were independent."""
    start_upper: float
    """Upper 90 % limit of T2^2."""


@dataclass(frozen=True)
class Allocation:
    """Iterations a start, and starts for the wanted half-width, with what that costs in seconds an arm."""

    iterations: int
    starts: int
    halfwidth: float
    """Relative half-width in the median of simulated experiments."""
    seconds: float
    seen: float | None
    """The difference that the analysis then finds in 80 % of them; None for one arm's mean."""


@dataclass(frozen=True)
class Pilot:
    """What a pilot says about the plan."""

    components: Components
    cost_restart: float
    cost_iteration: float
    warmup: int
    wanted: float
    confidence: float
    comparisons: int
    mean: Allocation
    """For one configuration's mean."""
    difference: Allocation
    """For the difference of two configurations, starts of each."""
    cautious: Allocation
    """For the difference, if the variance between starts is at its upper limit."""
    run_deviation: float
    """Relative deviation of the mean of so many iterations within a start."""
    ratio: float | None
    """Variance between starts over that of a run; none where a run has no variance."""
    notes: tuple[str, ...]


def read_pilot(
    frame: pd.DataFrame, start: str = "start", iteration: str = "iteration", value: str = "value",
    warmup: int = 0,
) -> tuple[tuple[tuple[FloatArray, ...], ...], tuple[str, ...]]:  # fmt: skip
    """The series of each start, in order of iteration, grouped by the other columns (the configuration), and
    notes on what was left out.

    The block, the unit, the run, and what says when, where and with which versions a start was measured are
    of no configuration. Drops rows with a word for a missing value, and the first `warmup` iterations of each
    start. Raises LabError for a missing column, a value that is no positive number, an iteration that is
    there twice, and too few starts or iterations.
    """
    for name in (start, iteration, value):
        if name not in frame.columns:
            raise LabError(f"no column {name!r}; there are {', '.join(map(str, frame.columns))}")
    numbers = pd.to_numeric(frame[value], errors="coerce")
    order = pd.to_numeric(frame[iteration], errors="coerce")
    said, notes = unmeasured(frame[value])
    wrong = ~((said | (np.isfinite(numbers) & (numbers > 0))) & np.isfinite(order))
    if wrong.any():
        row = int(np.flatnonzero(wrong.to_numpy())[0])
        raise LabError(
            f"data row {row + 1}: value and iteration must be numbers, the value above 0; repair or drop it"
        )
    tidy = frame.assign(**{value: numbers.astype(float), iteration: order})[~said]
    beside = [str(name) for name in frame.columns if name not in (start, iteration, value)]
    other = [name for name in beside if name not in (BLOCK, UNIT, RUN) and not is_fact(name)]
    keys = [*other, start]
    if tidy.duplicated([*keys, iteration]).any():
        raise LabError(
            f"an {iteration} is there twice in one {start}; number them through, or name its configuration"
        )
    groups: dict[object, list[FloatArray]] = {}
    short = 0
    for key, rows in tidy.sort_values(iteration).groupby(keys, sort=True, dropna=False):
        series = rows[value].to_numpy(float)[warmup:]
        short += len(series) < 4
        groups.setdefault(key[:-1], []).append(series)
    if short:
        raise LabError(f"{short} starts have fewer than 4 iterations after {warmup} of warm-up; measure more")
    kept = [tuple(series) for series in groups.values() if len(series) > 1]
    if not kept:
        raise LabError(
            "the variance between starts takes two starts of one configuration; restart and repeat"
        )
    if dropped := len(groups) - len(kept):
        notes += (f"{dropped} configurations with a single start are left out",)
    return tuple(kept), notes + _facts_that_vary(tidy, [name for name in beside if is_fact(name)])


def _facts_that_vary(frame: pd.DataFrame, facts: Sequence[str]) -> tuple[str, ...]:
    """A note of what differs between rows, but for when they were measured."""
    found = [name for name in facts if FACTS.get(name.lower()) != "when" and frame[name].nunique() > 1]
    if not found:
        return ()
    return (f"starts differ in {', '.join(found)}, and what that does is in the variance between them",)


def variance_components(groups: Sequence[Sequence[FloatArray]]) -> Components:
    """Method of moments (analysis of variance) over starts within configurations, of any sizes."""
    scaled = [[series / np.mean([s.mean() for s in group]) for series in group] for group in groups]
    flat = [series for group in scaled for series in group]
    sizes = np.array([len(series) for series in flat], float)
    total = float(sizes.sum())
    within = sum(float(np.sum((s - s.mean()) ** 2)) for s in flat) / (total - len(flat))
    typical = total / len(flat)
    rho = _autocorrelation(flat)
    # A mean over correlated values follows them, so their spread about it is too small.
    iteration = within * (typical - 1) / (typical - autocorrelation_time(rho, typical))
    between, df, effective = _between(scaled)
    noise = iteration * autocorrelation_time(rho, effective) / effective
    upper = between * df / special.chdtri(df, 0.9) - noise
    return Components(
        len(groups), len(flat), int(total), iteration, rho, (1 + rho) / (1 - rho),
        max(0.0, between - noise), max(0.0, between - within / effective), max(0.0, float(upper)),
    )  # fmt: skip


def plan_from_pilot(
    components: Components,
    cost_restart: float,
    cost_iteration: float,
    halfwidth: float,
    warmup: int = 0,
    confidence: float = 0.95,
    notes: Sequence[str] = (),
    comparisons: int = 1,
    plan: Plan = Plan.GROUPED,
) -> Pilot:
    """How many iterations a start, and how many starts, give the wanted relative half-width for least time.

    The difference is one of so many `comparisons` of a page, whose intervals hold together with this
    confidence; experiments are simulated and judged by the analysis that a report uses. Costs are seconds;
    the warm-up counts as part of a start. Raises LabError for costs, widths or a confidence that make no
    sense, and where no sensible number of starts reaches the width.
    """
    if cost_restart < 0 or cost_iteration <= 0 or warmup < 0:
        raise LabError(
            "a restart costs 0 s or more, an iteration more than 0 s, a warm-up 0 iterations or more"
        )
    if not 0 < halfwidth < 1 or not 0 < confidence < 1:
        raise LabError("the relative half-width and the confidence are between 0 and 1")
    c2 = cost_restart + warmup * cost_iteration
    said = list(notes)
    r = optimal_iterations(components, c2, cost_iteration)
    if components.start == 0:
        said.append("starts differ by no more than their iterations explain; take the cautious numbers")
    if components.starts - components.configurations < 4:
        said.append("fewer than 4 degrees of freedom between starts: their variance is hardly known")
    effective = components.iteration * autocorrelation_time(components.rho, r) / r

    alpha, cost = 1 - confidence, c2 + r * cost_iteration

    def compared(start: float) -> Allocation:
        spread = math.sqrt(start + effective)
        found = starts_for_width(halfwidth, spread, plan=plan, comparisons=comparisons, alpha=alpha)
        seen = effect_seen(spread, found.starts, plan=plan, comparisons=comparisons, alpha=alpha)
        return Allocation(r, found.starts, found.half_width, found.starts * cost, seen)

    return Pilot(
        components, cost_restart, cost_iteration, warmup, halfwidth, confidence, comparisons,
        _mean(components.start + effective, halfwidth, confidence, r, cost),
        compared(components.start), compared(components.start_upper),
        math.sqrt(effective), components.start / effective if effective > 0 else None, tuple(said),
    )  # fmt: skip


def autocorrelation_time(rho: float, n: float) -> float:
    """n times the variance of the mean of n values over the variance of one, of a first-order
    autoregression."""
    return (1 + rho) / (1 - rho) - 2 * rho * (1 - math.pow(rho, n)) / (n * (1 - rho) ** 2)


def optimal_iterations(components: Components, cost_start: float, cost_iteration: float) -> int:
    """ceil(sqrt(c2 / c1 * T1^2 tau / T2^2)), at least 1 and at most MOST_ITERATIONS."""
    if components.start == 0:
        return MOST_ITERATIONS if cost_start > 0 and components.iteration > 0 else 1
    worth = cost_start / cost_iteration * components.iteration * components.tau / components.start
    return min(MOST_ITERATIONS, max(1, math.ceil(math.sqrt(worth) - 1e-9)))


def _mean(variance: float, wanted: float, confidence: float, iterations: int, cost: float) -> Allocation:
    """Starts for the mean of one arm: Student's t over them."""
    for starts in range(FEWEST_STARTS, MOST_STARTS + 1):
        width = float(special.stdtrit(starts - 1, 0.5 + confidence / 2)) * math.sqrt(variance / starts)
        if width <= wanted:
            return Allocation(iterations, starts, width, starts * cost, None)
    raise LabError(f"more than {MOST_STARTS} starts for a half-width of {wanted:g}; ask for a wider interval")


def _autocorrelation(series: Sequence[FloatArray]) -> float:
    """Lag-1 autocorrelation pooled over starts, its bias undone, from 0 to 0.95."""
    lagged = whole = 0.0
    for one in series:
        left = one - one.mean()
        lagged += float(left[1:] @ left[:-1])
        whole += float(left @ left)
    if whole == 0:
        return 0.0
    n = sum(len(one) for one in series) / len(series)
    raw = lagged / (n - 1) / (whole / n)
    # raw = rho - (1 + 3 rho) / n, solved for rho.
    return float(np.clip((raw + 1 / n) / (1 - 3 / n), 0.0, 0.95)) if n > 3 else 0.0


def _between(groups: Sequence[Sequence[FloatArray]]) -> tuple[float, int, float]:
    """Variance of start means, its degrees of freedom, and the iterations that such a mean stands for."""
    square, df, share = 0.0, 0, 0.0
    for group in groups:
        means = np.array([series.mean() for series in group])
        square += float(np.sum((means - means.mean()) ** 2))
        df += len(group) - 1
        share += sum(1 / len(series) for series in group) * (len(group) - 1) / len(group)
    return square / df, df, df / share
