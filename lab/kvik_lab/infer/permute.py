"""Permutation tests: what a difference would be if the labels meant nothing.

What is permuted must be exchangeable, and iterations of one start are not: units here are starts (their means
or medians), or the differences of pairs. Where all arrangements can be listed the p-value is exact; otherwise
it is drawn, and its own standard error is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats, Values, series

LISTED = 100_000
"""Arrangements up to which all are gone through."""

_SLACK = 1e-9


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


def sign_flip(differences: Values, draws: int = 20_000, seed: int = 1) -> Permutation:
    """Whether paired differences centre on zero: each could have had the other sign (Fisher 1935).

    One difference a pair (a block, or a pair of starts run one after the other).
    """
    data = series(differences, "the differences")
    n = len(data)
    smallest = min(1.0, 2.0 ** (1 - n))
    if 2**n <= LISTED:
        sums = np.zeros(1)
        for value in data:
            sums = np.concatenate([sums + value, sums - value])
        return _exact(data.sum() / n, sums / n, smallest)
    rng = np.random.default_rng(seed)
    drawn = rng.choice(np.array([-1.0, 1.0]), size=(draws, n)) @ data / n
    return _drawn(data.sum() / n, drawn, smallest)


@dataclass(frozen=True)
class Block:
    """The units of two groups that ran in one block: their labels could have been dealt otherwise within
    it."""

    a: Floats
    b: Floats


def within_blocks(blocks: Sequence[Block], draws: int = 20_000, seed: int = 1) -> Permutation:
    """Whether b differs from a: labels are dealt anew within each block, all unblocked units being one block.

    The statistic is the mean difference b - a, blocks weighted by n_a n_b / (n_a + n_b), which is what gives
    their differences their precision. Raises LabError for a block that lacks a group.
    """
    if not blocks:
        raise LabError("there is no block to compare within; give at least one with units of both groups")
    for i, block in enumerate(blocks):
        if not len(block.a) or not len(block.b):
            raise LabError(
                f"block {i + 1} has units of one group only: nothing to compare there; leave it out"
            )
    weights = np.array([len(b.a) * len(b.b) / (len(b.a) + len(b.b)) for b in blocks])
    weights /= weights.sum()
    observed = float(sum(w * (b.b.mean() - b.a.mean()) for w, b in zip(weights, blocks, strict=True)))
    count = math.prod(math.comb(len(b.a) + len(b.b), len(b.a)) for b in blocks)
    mirrored = all(len(b.a) == len(b.b) for b in blocks)
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
    pool = np.concatenate([block.a, block.b])
    picks = np.array(list(combinations(range(len(pool)), len(block.a))))
    first = pool[picks].sum(axis=1)
    return np.asarray((pool.sum() - first) / len(block.b) - first / len(block.a))


def _drawn_differences(block: Block, draws: int, rng: np.random.Generator) -> Floats:
    pool = np.concatenate([block.a, block.b])
    shuffled = rng.permuted(np.broadcast_to(pool, (draws, len(pool))).copy(), axis=1)
    cut = len(block.a)
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
