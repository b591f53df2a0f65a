"""The order of runs: which starts, in which blocks, with which runs, and where the anchors stand.

A block is a replicate group: every start of the plan once, in an order of its own, so that a drift over hours
weighs on all arms alike. Within a start the runs are in random order. An anchor is one configuration that is
measured again and again; what changes in it is drift.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pandas as pd

from kvik_lab.design.factor import Factor, Level
from kvik_lab.design.pairs import row_keys
from kvik_lab.errors import LabError

ANCHOR = "anchor"
"""The id of an anchor's runs."""


class Order(Enum):
    """How the starts of a block are ordered."""

    RANDOMISED = "randomised"
    WILLIAMS = "williams"
    """Each arm equally often at each place and after each other arm, over enough blocks; ABBA for two
    arms."""
    GIVEN = "given"


@dataclass(frozen=True)
class Start:
    """One start of the servers: its hard levels, and its runs in order."""

    block: int
    levels: Mapping[str, Level | None]
    runs: tuple[str, ...]
    anchor: bool
    """Whether the whole start is there for the anchor only."""


@dataclass(frozen=True)
class Anchor:
    """A configuration to repeat. With all hard levels, it has starts of its own at the begin, the middle and
    the end of each block. With easy levels only, each start begins and ends with it, and repeats it after
    each `every` runs."""

    levels: Mapping[str, Level]
    every: int = 8


@dataclass(frozen=True)
class Schedule:
    """All starts in order."""

    starts: tuple[Start, ...]
    blocks: int
    order: Order
    seed: int

    @property
    def runs(self) -> int:
        """Runs of the plan, without anchors."""
        return sum(name != ANCHOR for start in self.starts for name in start.runs)

    @property
    def anchors(self) -> int:
        """Runs of the anchor."""
        return sum(name == ANCHOR for start in self.starts for name in start.runs)


def make_schedule(
    rows: pd.DataFrame,
    factors: Sequence[Factor],
    blocks: int = 1,
    order: Order = Order.RANDOMISED,
    anchor: Anchor | None = None,
    seed: int = 1,
    plots: Sequence[int] | None = None,
    starts_a_block: int = 1,
) -> Schedule:
    """Order `blocks` times `starts_a_block` replicates of the rows, whose ids are the index.

    Rows with the same hard levels share a start, unless `plots` says which rows do. Without a hard factor
    each block is one start. Raises LabError for an anchor with some of the hard levels only, for rows of one
    plot that differ in hard levels, and for a Williams order of other than 2 to 4 arms.
    """
    if blocks < 1 or starts_a_block < 1:
        raise LabError("a schedule needs at least one block, and one start of everything in it")
    hard = [factor.name for factor in factors if factor.hard]
    wholes = _wholes(rows, hard, plots) * starts_a_block
    rng = np.random.default_rng(seed)
    orders = _orders(len(wholes), blocks, order, rng)
    dedicated = anchor is not None and _is_whole(anchor, factors)
    starts: list[Start] = []
    for block, places in enumerate(orders):
        group = []
        for place in places:
            levels, names = wholes[place]
            runs = list(names) if order is Order.GIVEN else [names[k] for k in rng.permutation(len(names))]
            if anchor is not None and not dedicated:
                runs = _with_anchors(runs, anchor.every)
            group.append(Start(block, levels, tuple(runs), False))
        if anchor is not None and dedicated:
            own = Start(block, {n: anchor.levels.get(n) for n in hard}, (ANCHOR,), True)
            middle = (len(group) + 1) // 2
            group = [own, *group[:middle], own, *group[middle:], own]
        starts += group
    return Schedule(tuple(starts), blocks, order, seed)


def williams(arms: int) -> tuple[tuple[int, ...], ...]:
    """Sequences in which each arm is equally often at each place and equally often after each other arm.

    Williams (Australian J. Scientific Research A 2, 1949): `arms` sequences for an even number, twice as many
    for an odd one.
    """
    if arms < 1:
        raise LabError("an order needs an arm")
    zigzag = [0]
    for k in range(1, arms):
        zigzag.append((arms - k // 2) % arms if k % 2 == 0 else (k + 1) // 2)
    square = [tuple((z + shift) % arms for z in zigzag) for shift in range(arms)]
    if arms % 2 and arms > 1:
        square += [row[::-1] for row in square]
    return tuple(square)


def _orders(arms: int, blocks: int, order: Order, rng: np.random.Generator) -> list[list[int]]:
    if order is Order.GIVEN:
        return [list(range(arms)) for _ in range(blocks)]
    if order is Order.RANDOMISED:
        return [[int(k) for k in rng.permutation(arms)] for _ in range(blocks)]
    if not 2 <= arms <= 4:
        raise LabError(f"a Williams order is for 2 to 4 arms, and here are {arms}; take randomised blocks")
    square, names = williams(arms), rng.permutation(arms)
    found: list[list[int]] = []
    while len(found) < blocks:
        # Whole squares; AB is followed by BA, so that two arms run as ABBA.
        picks = range(len(square)) if arms == 2 else rng.permutation(len(square))
        found += [[int(names[a]) for a in square[k]] for k in picks]
    return found[:blocks]


def _wholes(
    rows: pd.DataFrame, hard: Sequence[str], plots: Sequence[int] | None
) -> list[tuple[dict[str, Level | None], list[str]]]:
    keys = row_keys(rows, hard)
    marks: Sequence[object] = keys if plots is None else plots
    if len(marks) != len(rows):
        raise LabError(f"{len(rows)} rows but {len(marks)} plots")
    found: dict[object, tuple[dict[str, Level | None], list[str]]] = {}
    for name, key, mark in zip(rows.index, keys, marks, strict=True):
        levels, names = found.setdefault(mark, (dict(zip(hard, key, strict=True)), []))
        if tuple(levels.values()) != key:
            raise LabError(f"row {name} shares a start with rows of other hard levels: {levels}")
        names.append(str(name))
    return list(found.values())


def _is_whole(anchor: Anchor, factors: Sequence[Factor]) -> bool:
    """Whether an anchor has all hard levels (true) or none (false)."""
    names = {factor.name for factor in factors}
    for name in anchor.levels:
        if name not in names:
            raise LabError(f"the anchor has a level of {name!r}, which is not a factor")
    here = [f.name for f in factors if f.hard and _exists(f, anchor.levels)]
    whole = any(f.hard and f.name in anchor.levels for f in factors)
    if whole and (missing := [name for name in here if name not in anchor.levels]):
        raise LabError(
            f"the anchor has no level of {', '.join(missing)}; give all hard factors a level, or none"
        )
    return whole


def check_anchor(anchor: Anchor, schedule: Schedule, factors: Sequence[Factor]) -> list[dict[str, Level]]:
    """The levels that the anchor's runs have, in each start that it is in: its own, the others of the start.

    Raises LabError where a factor has none, or has one and does not exist there.
    """
    found = []
    for start in schedule.starts:
        if ANCHOR not in start.runs:
            continue
        levels = {k: v for k, v in {**start.levels, **anchor.levels}.items() if v is not None}
        here = [factor.name for factor in factors if _exists(factor, levels)]
        if missing := [name for name in here if name not in levels]:
            raise LabError(
                f"the anchor has no level of {', '.join(missing)}, so it cannot be run; give it one in "
                "design.anchors.at"
            )
        if absent := [name for name in levels if name not in here]:
            where = ", ".join(f"{name}={level}" for name, level in start.levels.items() if level is not None)
            raise LabError(
                f"the anchor has a level of {', '.join(absent)}, which does not exist in a start of {where}; "
                "take it out of design.anchors.at"
            )
        found.append(levels)
    return found


def _exists(factor: Factor, levels: Mapping[str, Level]) -> bool:
    return all(levels.get(name) == level for name, level in factor.within.items())


def _with_anchors(runs: list[str], every: int) -> list[str]:
    if every < 1:
        raise LabError("an anchor is repeated after at least one run")
    parts = [runs[k : k + every] for k in range(0, len(runs), every)]
    return [ANCHOR, *itertools.chain.from_iterable([*part, ANCHOR] for part in parts)]
