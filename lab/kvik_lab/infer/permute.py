"""Permutation tests: what a difference would be if the labels meant nothing.

What is permuted must be exchangeable, and iterations of one start are not: units here are starts (their
means). Where all arrangements can be listed the p-value is exact; otherwise it is drawn, and its own standard
error is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats

LISTED = 100_000
"""Arrangements up to which all are gone through."""

_SLACK = 1e-9

Block: TypeAlias = tuple[Floats, Floats]
"""The units of two groups that ran in one block: their labels could have been dealt otherwise within it."""


@dataclass(frozen=True)
class Permutation:
    """A two-sided permutation test.

    `error` is the standard error of a drawn p, 0 of an exact one. `smallest` is the least p that so few units
    can give: where it exceeds the level of the test, the test cannot reject, whatever the data.
    """

    statistic: float
    p: float
    error: float
    arrangements: int
    exact: bool
    smallest: float


def within_blocks(blocks: Sequence[Block], draws: int = 20_000, seed: int = 1) -> Permutation:
    """Whether b differs from a: labels are dealt anew within each block, all unblocked units being one block.
    Of blocks with one unit of each group, that is flipping the signs of their differences (Fisher 1935).

    The statistic is the mean difference b - a, blocks weighted by n_a n_b / (n_a + n_b), which is what gives
    their differences their precision. Raises LabError for a block that lacks a group.
    """
    if not blocks:
        raise LabError("there is no block to compare within; give at least one with units of both groups")
    for i, (a, b) in enumerate(blocks):
        if not len(a) or not len(b):
            raise LabError(
                f"block {i + 1} has units of one group only: nothing to compare there; leave it out"
            )
    weights = np.array([len(a) * len(b) / (len(a) + len(b)) for a, b in blocks])
    weights /= weights.sum()
    observed = float(sum(w * (b.mean() - a.mean()) for w, (a, b) in zip(weights, blocks, strict=True)))
    count = math.prod(math.comb(len(a) + len(b), len(a)) for a, b in blocks)
    mirrored = all(len(a) == len(b) for a, b in blocks)
    smallest = min(1.0, (2 if mirrored else 1) / count)
    if count <= LISTED:
        sums = np.zeros(1)
        for weight, block in zip(weights, blocks, strict=True):
            sums = np.add.outer(sums, weight * _all_differences(block)).ravel()
        return _exact(observed, sums, smallest)
    rng = np.random.default_rng(seed)
    total = np.zeros(draws)
    for weight, block in zip(weights, blocks, strict=True):
        total += weight * _drawn_differences(block, draws, rng)
    return _drawn(observed, total, smallest)


def _all_differences(block: Block) -> Floats:
    a, b = block
    pool = np.concatenate([a, b])
    picks = np.array(list(combinations(range(len(pool)), len(a))))
    first = pool[picks].sum(axis=1)
    return np.asarray((pool.sum() - first) / len(b) - first / len(a))


def _drawn_differences(block: Block, draws: int, rng: np.random.Generator) -> Floats:
    pool = np.concatenate(block)
    shuffled = rng.permuted(np.broadcast_to(pool, (draws, len(pool))).copy(), axis=1)
    cut = len(block[0])
    return np.asarray(shuffled[:, cut:].mean(axis=1) - shuffled[:, :cut].mean(axis=1))


def _as_large(observed: float, others: Floats) -> int:
    return int((np.abs(others) >= abs(observed) * (1.0 - _SLACK) - np.finfo(float).tiny).sum())


def _exact(observed: float, others: Floats, smallest: float) -> Permutation:
    p = _as_large(observed, others) / len(others)
    return Permutation(float(observed), p, 0.0, len(others), True, smallest)


def _drawn(observed: float, others: Floats, smallest: float) -> Permutation:
    # The observed arrangement is one of them (Phipson and Smyth 2010, Stat. Appl. Genet. Mol. Biol. 9).
    p = (1 + _as_large(observed, others)) / (1 + len(others))
    error = math.sqrt(p * (1.0 - p) / len(others))
    return Permutation(float(observed), p, error, len(others), False, smallest)
