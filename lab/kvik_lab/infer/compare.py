"""Two configurations, A (the base) and B: is there a difference, how large, and is it small enough not to
matter.

The verdict is read from one interval, that of `judge` over the starts' means after the warm-up that all
starts share: it excludes a ratio of 1, or lies within the margin, or neither. Beside it stand the exact test,
where so few starts can reject at all, and the same interval with the odd starts kept.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats, Interval
from kvik_lab.infer.effect import log_ratio_of_series
from kvik_lab.infer.judge import Judged, Layout, Plan, judge
from kvik_lab.infer.permute import Permutation, within_blocks
from kvik_lab.infer.pooled import Settling
from kvik_lab.infer.power import Promise, starts_needed
from kvik_lab.infer.steady import Steady, common_cut, examine
from kvik_lab.infer.table import Starts

WANTED = 0.8
"""Power at which the starts are counted that would decide what is undecided."""


class Conclusion(Enum):
    """What can be said at the level asked."""

    DIFFERENT = "different"
    EQUIVALENT = "equivalent within the margin"
    BOTH = "different, by less than the margin"
    UNDECIDED = "undecided"
    ONE_START = "of one start each only"
    UNSTEADY = "unsteady"


@dataclass(frozen=True)
class Comparison:
    """What two configurations say beside each other; A is the base of the ratio.

    `ratio` is at the simultaneous level: all of the page's `comparisons` hold together at 1 - alpha. `p` is
    adjusted likewise. `odd` names the starts that were left out, `all_kept` is the ratio with them.
    `difference` is B - A in the values' unit. `cut`: iterations left out of each start as warm-up.
    """

    a: Steady
    b: Steady
    plan: Plan
    conclusion: Conclusion
    ratio: Interval | None
    p: float | None
    odd: tuple[str, ...]
    all_kept: Interval | None
    difference: Interval | None
    cut: int
    alpha: float
    comparisons: int
    margin: float | None
    spread: float | None
    """Standard deviation of one start's level, of logs (in pairs: of half of what a pair's two differ by)."""
    starts: int
    """Starts of the smaller side that counted."""
    levels: Floats
    """Logarithms of the starts' means that counted, in the places of `layout`."""
    layout: Layout
    notes: tuple[str, ...]
    seed: int

    @cached_property
    def test(self) -> Permutation | None:
        """The permutation test: labels of starts dealt anew within blocks (in pairs: signs flipped)."""
        if self.p is None:
            return None
        blocks = [
            tuple(
                self.levels[(self.layout.block == k) & (self.layout.of_arm == side)] for side in (False, True)
            )
            for k in np.unique(self.layout.block)
        ]
        return within_blocks([(x, y) for x, y in blocks if len(x) and len(y)], seed=self.seed)

    @property
    def exact_p(self) -> float | None:
        """The exact test's p, adjusted; None where so few starts can never reject."""
        if self.test is None or self.test.smallest * self.comparisons > self.alpha:
            return None
        return min(1.0, self.test.p * self.comparisons)

    @property
    def exact_starts(self) -> int:
        """Starts an arm with which the exact test could reject at this level."""
        count = 2
        while _smallest(self.plan, count) * self.comparisons > self.alpha:
            count += 1
        return count

    def would_decide(self, effect: float | None = None) -> Promise | None:
        """Starts an arm that would decide an effect (by default the one measured) with a power of 80 %; None
        where nothing is known of the spread, or where over 500 would not do."""
        if self.ratio is None or not self.spread or self.plan is Plan.SINGLE:
            return None
        size = self.ratio.estimate - 1.0 if effect is None else effect
        plan = Plan.PAIRED if self.plan is Plan.PAIRED else Plan.GROUPED
        try:
            return starts_needed(
                size, self.spread, wanted=WANTED, plan=plan, comparisons=self.comparisons, alpha=self.alpha
            )
        except LabError:
            return None


def _smallest(plan: Plan, starts: int) -> float:
    """The least p of the exact test of so many starts an arm."""
    return 2.0 ** (1 - starts) if plan is Plan.PAIRED else 2.0 / math.comb(2 * starts, starts)


def compare(
    a: Starts,
    b: Starts,
    margin: float | None = None,
    alpha: float = 0.05,
    smaller_is_better: bool = True,
    seed: int = 1,
    comparisons: int = 1,
    cut: int | None = None,
    together: tuple[Settling | None, Settling | None] = (None, None),
) -> Comparison:
    """Compare B with A by the means of their starts, as one of so many `comparisons` on a page.

    `together` and `cut`: what all starts of each arm do, and the iterations that are left out of each start
    as warm-up; by default both are judged of these starts, and the longer warm-up is left out of both. Of a
    side with one start or two, each loses its own. Raises LabError for values that are not positive, starts
    too short to be looked at, blocks that only one side has, and a single start beside several.
    """
    if margin is not None and not margin > 0:
        raise LabError(f"the margin is {margin}; say how far a ratio may lie from 1, such as 0.01")
    a, b = _by_block(a), _by_block(b)
    layout = _layout(a, b)
    plan = layout.plan
    first = common_cut([list(side.values.values()) for side in (a, b)]) if cut is None else cut
    one, two = (
        _examined(side, smaller_is_better, alpha, first, settling)
        for side, settling in zip((a, b), together, strict=True)
    )
    loose = [f"{s.source}: {found.why}" for s, found in ((a, one), (b, two)) if not found.steady]
    nothing = Comparison(
        one, two, plan, Conclusion.UNSTEADY, None, None, (), None, None, first, alpha, comparisons,
        margin, None, min(len(one.starts), len(two.starts)), np.array([]), layout, tuple(loose), seed,
    )  # fmt: skip
    if loose:
        return nothing
    if plan is Plan.SINGLE:
        return _of_two(nothing)
    return _judged(nothing, a, b)


def _examined(
    side: Starts, smaller_is_better: bool, alpha: float, cut: int, together: Settling | None
) -> Steady:
    try:
        return examine(side.values, smaller_is_better, alpha, cut, together)
    except LabError as error:
        raise LabError(f"{side.source}: {error}") from error


def _by_block(side: Starts) -> Starts:
    """The starts in the order of their blocks, so that pairs stand at the same place on both sides."""
    if not side.blocks:
        return side
    order = sorted(side.values, key=lambda start: side.blocks[start])
    return Starts(side.source, {start: side.values[start] for start in order}, side.blocks)


def _layout(a: Starts, b: Starts) -> Layout:
    if bool(a.blocks) != bool(b.blocks):
        have, lack = (a, b) if a.blocks else (b, a)
        raise LabError(
            f"{have.source} says which block each start ran in, {lack.source} does not: both or none"
        )
    counts = [Counter(side.blocks.values()) for side in (a, b)]
    only = sorted(set(counts[0]) ^ set(counts[1]))
    if only:
        raise LabError(f"block {only[0]!r} holds starts of one file only: there is nothing to compare in it")
    number = {name: k for k, name in enumerate(sorted(counts[0]))}
    block = [number.get(side.blocks.get(start, ""), 0) for side in (a, b) for start in side.values]
    of_arm = np.arange(len(block)) >= len(a.values)
    return Layout(of_arm, np.array(block, dtype=np.intp))


def _of_two(nothing: Comparison) -> Comparison:
    if len(nothing.a.starts) != len(nothing.b.starts):
        raise LabError(
            "one side has a single start and the other several: replicate the one, two starts at least"
        )
    note = "one start each: what differs between starts is not in the interval; replicate the starts"
    found = log_ratio_of_series(nothing.a.steady[0], nothing.b.steady[0])
    return replace(
        nothing, conclusion=Conclusion.ONE_START, ratio=found.ratio(1.0 - nothing.alpha), notes=(note,)
    )


def _judged(nothing: Comparison, a: Starts, b: Starts) -> Comparison:
    layout = nothing.layout
    means = np.array([part.mean() for side in (nothing.a, nothing.b) for part in side.steady])
    found = judge(np.log(means)[None, :], layout, nothing.alpha, nothing.comparisons)
    if np.isnan(found.low[0]):
        raise LabError("no start is left over to measure how starts vary within blocks; replicate starts")
    kept = found.kept[0]
    names = [f"{side.source}: {start}" for side in (a, b) for start in side.values]
    odd = tuple(name for name, k in zip(names, kept, strict=True) if not k)
    everything = (
        judge(np.log(means)[None, :], layout, nothing.alpha, nothing.comparisons, leave_out=False)
        if odd
        else None
    )
    ratio = _ratio(found, nothing)
    inside = Layout(layout.of_arm[kept], layout.block[kept])
    amount = judge(means[kept][None, :], inside, nothing.alpha, nothing.comparisons, leave_out=False)
    return replace(
        nothing,
        conclusion=_conclude(ratio, nothing.margin),
        ratio=ratio,
        p=float(found.p(nothing.comparisons)[0]),
        odd=odd,
        all_kept=None if everything is None else _ratio(everything, nothing),
        difference=_interval(amount, nothing),
        levels=np.log(means)[kept],
        layout=inside,
        spread=_spread(found, inside),
        starts=int(min(inside.of_arm.sum(), (~inside.of_arm).sum())),
    )


def _interval(found: Judged, of: Comparison) -> Interval:
    level = 1.0 - of.alpha / of.comparisons
    return Interval(float(found.estimate[0]), float(found.low[0]), float(found.high[0]), level, found.method)


def _ratio(found: Judged, of: Comparison) -> Interval:
    return _interval(found, of).of_logs()


def _spread(found: Judged, inside: Layout) -> float:
    """The deviation of one start's level that the standard error stands for."""
    sizes = [int((inside.of_arm == side).sum()) for side in (False, True)]
    return float(found.error[0]) / math.sqrt(1 / sizes[0] + 1 / sizes[1])


def _conclude(ratio: Interval, margin: float | None) -> Conclusion:
    differs = not ratio.holds(1.0)
    if margin is not None and 1 / (1 + margin) < ratio.low and ratio.high < 1 + margin:
        return Conclusion.BOTH if differs else Conclusion.EQUIVALENT
    return Conclusion.DIFFERENT if differs else Conclusion.UNDECIDED
