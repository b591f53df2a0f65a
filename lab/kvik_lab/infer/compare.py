"""Two configurations, A (the base) and B: is there a difference, how large, and is it small enough not to
matter.

What was replicated decides how. With a block that holds one start of each, the starts are pairs. With blocks
or several starts a side, labels are permuted among starts. With one start a side, nothing can be said of
other starts, and the answer is of these two only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats, Interval, TooFew
from kvik_lab.infer.effect import (
    Difference,
    Equivalence,
    cliffs_delta,
    equivalence,
    log_ratio,
    log_ratio_of_series,
    paired_log_ratio,
)
from kvik_lab.infer.location import hodges_lehmann, shift
from kvik_lab.infer.permute import Block, Permutation, sign_flip, within_blocks
from kvik_lab.infer.steady import Start, Steady, examine
from kvik_lab.infer.table import Starts


class Plan(Enum):
    """What the starts were to each other."""

    PAIRED = "pairs of starts, one pair a block"
    BLOCKED = "starts within blocks"
    GROUPED = "two groups of starts"
    SINGLE = "one start each"


class Conclusion(Enum):
    """What can be said at the level asked."""

    DIFFERENT = "different"
    EQUIVALENT = "equivalent within the margin"
    BOTH = "different, by less than the margin"
    UNDECIDED = "undecided"
    UNSTEADY = "unsteady"


@dataclass(frozen=True)
class Comparison:
    """What two configurations say beside each other; A is the base of the ratio.

    All but `a`, `b` and `notes` are None where a side is unsteady. `shift` is in the values' unit.
    """

    a: Steady
    b: Steady
    plan: Plan
    conclusion: Conclusion
    p: float | None
    test: Permutation | None
    ratio: Interval | None
    shift: Interval | None
    delta: Interval | None
    equivalence: Equivalence | None
    notes: tuple[str, ...]


def compare(
    a: Starts,
    b: Starts,
    margin: float | None = None,
    alpha: float = 0.05,
    smaller_is_better: bool = True,
    seed: int = 1,
) -> Comparison:
    """Compare the steady parts of A's and B's starts, by the means of their logarithms.

    Raises LabError for values that are not positive, starts too short to be looked at, and blocks that only
    one side has.
    """
    for side in (a, b):
        for name, values in side.values.items():
            if (values <= 0).any():
                raise LabError(
                    f"{side.source}: start {name!r} holds {values.min()}: a ratio needs values above 0"
                )
    a, b = _by_block(a), _by_block(b)
    first = examine(a.values, smaller_is_better, alpha, 1.0 - alpha)
    second = examine(b.values, smaller_is_better, alpha, 1.0 - alpha)
    plan = _plan(a, b)
    loose = [s for s, found in ((a, first), (b, second)) if found.headline is None]
    if loose:
        why = tuple(f"{s.source}: {first.why if s is a else second.why}" for s in loose)
        return Comparison(first, second, plan, Conclusion.UNSTEADY, None, None, None, None, None, None, why)
    difference, test, notes = _difference(a, b, first, second, plan, seed)
    same = None if margin is None else equivalence(difference, margin, alpha)
    p = difference.p() if test is None else test.p
    location, delta = _robust(first, second, plan, 1.0 - alpha)
    if isinstance(location, TooFew):
        notes = (*notes, str(location))
    return Comparison(
        first,
        second,
        plan,
        _conclude(p <= alpha, same),
        p,
        test,
        difference.ratio(1.0 - alpha),
        None if isinstance(location, TooFew) else location,
        delta,
        same,
        notes,
    )


def _by_block(side: Starts) -> Starts:
    """The starts in the order of their blocks, so that pairs stand at the same place on both sides."""
    if not side.blocks:
        return side
    order = sorted(side.values, key=lambda start: side.blocks[start])
    return Starts(side.source, {start: side.values[start] for start in order}, side.blocks)


def _plan(a: Starts, b: Starts) -> Plan:
    if bool(a.blocks) != bool(b.blocks):
        have, lack = (a, b) if a.blocks else (b, a)
        raise LabError(
            f"{have.source} says which block each start ran in, {lack.source} does not: both or none"
        )
    if a.blocks:
        only = sorted(set(a.blocks.values()) ^ set(b.blocks.values()))
        if only:
            raise LabError(
                f"block {only[0]!r} holds starts of one file only: there is nothing to compare in it"
            )
        sizes = {n for side in (a, b) for n in Counter(side.blocks.values()).values()}
        return Plan.PAIRED if sizes == {1} and len(a.blocks) > 1 else Plan.BLOCKED
    return Plan.GROUPED if min(len(a.values), len(b.values)) > 1 else Plan.SINGLE


def _log_level(start: Start) -> float:
    values = start.steady
    if values is None:
        raise LabError(f"start {start.name} has no steady part")
    return float(np.log(values).mean())


def _difference(
    a: Starts, b: Starts, first: Steady, second: Steady, plan: Plan, seed: int
) -> tuple[Difference, Permutation | None, tuple[str, ...]]:
    if plan is Plan.SINGLE or min(len(first.starts), len(second.starts)) < 2:
        return _of_two(first, second)
    one = {s.name: _log_level(s) for s in first.starts}
    two = {s.name: _log_level(s) for s in second.starts}
    if plan is Plan.PAIRED:
        x, y = np.array(list(one.values())), np.array(list(two.values()))
        test = sign_flip(y - x, seed=seed)
        return paired_log_ratio(np.exp(x), np.exp(y)), test, _power_note(test)
    names: list[str | None] = [*sorted(set(a.blocks.values()))] or [None]
    blocks = [
        Block(
            np.array([v for s, v in one.items() if a.blocks.get(s) == block]),
            np.array([v for s, v in two.items() if b.blocks.get(s) == block]),
        )
        for block in names
    ]
    test = within_blocks(blocks, seed=seed)
    return _over_blocks(blocks), test, _power_note(test)


def _of_two(first: Steady, second: Steady) -> tuple[Difference, None, tuple[str, ...]]:
    parts = [found.starts[0].steady for found in (first, second)]
    if len(first.starts) != 1 or len(second.starts) != 1 or parts[0] is None or parts[1] is None:
        raise LabError(
            "one side has a single start and the other several: replicate the one, two starts at least"
        )
    note = (
        "one start each: what differs between starts is not in the interval, nor in p; replicate the starts"
    )
    return log_ratio_of_series(parts[0], parts[1]), None, (note,)


def _over_blocks(blocks: list[Block]) -> Difference:
    """The difference within blocks, by least squares with a level for each block."""
    if len(blocks) == 1:
        return log_ratio(np.exp(blocks[0].a), np.exp(blocks[0].b))
    weights = np.array([len(k.a) * len(k.b) / (len(k.a) + len(k.b)) for k in blocks])
    each = np.array([k.b.mean() - k.a.mean() for k in blocks])
    estimate = float((weights * each).sum() / weights.sum())
    rest = []
    for block in blocks:
        pool: Floats = np.concatenate([block.a, block.b - estimate])
        rest.append(pool - pool.mean())
    errors = np.concatenate(rest)
    degrees = float(len(errors) - len(blocks) - 1)
    if degrees < 1:
        raise LabError(
            "no start is left over to measure how starts vary within blocks; replicate starts or blocks"
        )
    variance = float((errors**2).sum()) / degrees
    return Difference(
        estimate, float(np.sqrt(variance / weights.sum())), degrees, "least squares within blocks, of logs"
    )


def _power_note(test: Permutation) -> tuple[str, ...]:
    if test.smallest <= 0.05:
        return ()
    return (f"so few starts can give no p below {test.smallest:.3g}: the test cannot reject at 5 %",)


def _robust(
    first: Steady, second: Steady, plan: Plan, level: float
) -> tuple[Interval | TooFew, Interval | None]:
    x = np.array([np.median(s.steady) for s in first.starts if s.steady is not None])
    y = np.array([np.median(s.steady) for s in second.starts if s.steady is not None])
    if min(len(x), len(y)) < 2:
        return TooFew("the shift of starts' medians", 1, 2), None
    if plan is Plan.PAIRED:
        return hodges_lehmann(y - x, level), cliffs_delta(x, y, level)
    return shift(x, y, level), cliffs_delta(x, y, level)


def _conclude(differs: bool, same: Equivalence | None) -> Conclusion:
    if same is not None and same.equivalent:
        return Conclusion.BOTH if differs else Conclusion.EQUIVALENT
    return Conclusion.DIFFERENT if differs else Conclusion.UNDECIDED
