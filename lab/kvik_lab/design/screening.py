"""Plans of two levels a factor, to find the few factors that matter: fractions of the factorial,
Plackett-Burman.

A regular fraction has generators: E=ABC means that the column of E is the product of those of A, B and C. The
words that equal the identity follow (Box and Hunter, Technometrics 3, 1961); the length of the shortest is
the resolution: III aliases main effects with two-factor interactions, IV these with each other, V neither.
Plackett-Burman plans (Biometrika 33, 1946) are columns of a Hadamard matrix: main effects are orthogonal,
each partly aliased with many interactions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from kvik_lab.design.factor import Factor, Level, Scale
from kvik_lab.design.model import FloatArray
from kvik_lab.errors import LabError

LETTERS = "ABCDEFGHJKLMNOPQRSTUVWXYZ"
"""Names of columns; I is the identity."""

MOST_RUNS = 1024
"""Larger fractions are not looked for."""


def two_level_factorial(columns: int) -> FloatArray:
    """All 2**columns combinations of -1 and 1, the first column changing fastest."""
    if not 1 <= columns <= 16:
        raise LabError(f"a factorial of {columns} columns is not for running; take 1 to 16")
    rows = np.arange(2**columns)
    return np.where((rows[:, None] >> np.arange(columns)) & 1, 1.0, -1.0)


def fraction(columns: int, generators: Sequence[str]) -> FloatArray:
    """The regular fraction of `columns` two-level columns with generators such as "E=ABC", "F=-BCD".

    The generated columns are the last ones. Raises LabError for generators that do not fit.
    """
    words = _read(columns, generators)
    base = columns - len(words)
    full = two_level_factorial(base)
    made = [sign * np.prod(full[:, _bits(word, base)], axis=1) for word, sign in words]
    return np.asarray(np.column_stack([full, *made]), np.float64)


def defining_words(columns: int, generators: Sequence[str]) -> tuple[str, ...]:
    """The words that equal I (or -I), shortest first: all products of the generators' words."""
    found = ["".join(LETTERS[k] for k in _bits(word, columns)) for word in _words(columns, generators)]
    return tuple(sorted(found, key=lambda word: (len(word), word)))


def resolution(columns: int, generators: Sequence[str], pairs: Sequence[int] = ()) -> int:
    """The length of the shortest defining word; columns + 1 for the full factorial, which has none.

    Two columns of one factor (`pairs_of`) count as one letter: their product is a main effect of it, like
    each of them.
    """
    return min((_length(word, pairs) for word in _words(columns, generators)), default=columns + 1)


def find_generators(
    columns: int, wanted: int, pairs: Sequence[int] = (), runs: int = MOST_RUNS
) -> tuple[str, ...]:
    """Generators of the smallest regular fraction of at least this resolution; none where only the full one
    is.

    Candidate words are tried longest first, and a choice is taken back as soon as a word gets too short.
    Raises LabError where that would take more than so many runs, or more than MOST_RUNS.
    """
    if wanted < 3 or not 1 <= columns <= 20:
        raise LabError("resolution is 3 or more, of 1 to 20 columns")
    most = min(runs, MOST_RUNS)
    for base in range(1, min(columns, most.bit_length() - 1) + 1):
        words = [w for w in range(1, 2**base) if w.bit_count() >= wanted - 1]
        words.sort(key=lambda word: (-word.bit_count(), word))
        chosen = _choose(words, columns - base, base, wanted, pairs, [0], 0)
        if chosen is not None:
            return tuple(
                f"{LETTERS[base + k]}={''.join(LETTERS[b] for b in _bits(word, base))}"
                for k, word in enumerate(chosen)
            )
    raise LabError(
        f"resolution {wanted} of {columns} columns takes more than {most} runs; screen fewer factors"
    )


def _choose(
    words: list[int], more: int, base: int, wanted: int, pairs: Sequence[int], group: list[int], begin: int
) -> list[int] | None:
    """`more` words from `words[begin:]` such that no product of any of them is shorter than wanted."""
    if more == 0:
        return []
    place = base + more - 1
    for k in range(begin, len(words)):
        word = words[k] | 1 << place
        longer = [word ^ other for other in group]
        if min(_length(w, pairs) for w in longer) < wanted:
            continue
        rest = _choose(words, more - 1, base, wanted, pairs, group + longer, k + 1)
        if rest is not None:
            return [*rest, words[k]]
    return None


def hadamard(order: int) -> FloatArray:
    """A matrix H of 1 and -1 with H H' = order * I and a first column of 1.

    By Sylvester's doubling and Paley's two constructions over the integers modulo a prime, so not for every
    multiple of 4. Raises LabError for an order that these do not reach.
    """
    if order in (1, 2):
        return np.array([[1.0]]) if order == 1 else np.array([[1.0, 1.0], [1.0, -1.0]])
    if order >= 4 and order % 4 == 0:
        if _prime(order - 1):
            return _one_first(_paley_one(order - 1))
        if _prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1:
            return _one_first(_paley_two(order // 2 - 1))
        if order % 8 == 0:
            return np.asarray(np.kron(hadamard(2), hadamard(order // 2)), np.float64)
    raise LabError(f"no Hadamard matrix of order {order} is known here")


def plackett_burman(columns: int) -> FloatArray:
    """The smallest Plackett-Burman plan: runs a multiple of 4 above `columns`, entries -1 and 1."""
    if columns < 1:
        raise LabError("a screening plan needs a factor")
    order = 4 * (columns // 4 + 1)
    while True:
        try:
            return hadamard(order)[:, 1 : columns + 1]
        except LabError:
            order += 4


def columns_needed(factors: Sequence[Factor]) -> int:
    """How many two-level columns a screening plan of these factors takes (see `map_levels`)."""
    return sum(_width(factor) for factor in factors)


def pairs_of(factors: Sequence[Factor]) -> tuple[int, ...]:
    """The columns of each factor that takes two of them, as bits."""
    widths = [_width(factor) for factor in factors]
    return tuple(0b11 << sum(widths[:k]) for k, width in enumerate(widths) if width == 2)


def map_levels(matrix: FloatArray, factors: Sequence[Factor]) -> pd.DataFrame:
    """Give two-level columns to factors, in order.

    A numeric factor takes one column: its lowest and highest level. A categorical one of two levels takes
    one, of three or four levels two, by their four combinations (Addelman, Technometrics 4, 1962); of three,
    the first level stands for two of them. A nested factor has no level where its parents have others.
    """
    data: dict[str, list[Level | None]] = {}
    at = 0
    for factor in factors:
        width = _width(factor)
        if at + width > matrix.shape[1]:
            raise LabError(f"{matrix.shape[1]} columns are too few for {factor.name}")
        code = sum((matrix[:, at + k] > 0).astype(int) << k for k in range(width))
        table = _table(factor)
        data[factor.name] = [table[c] for c in np.atleast_1d(code)]
        at += width
    for factor in factors:
        for parent, level in factor.within.items():
            values = zip(data[factor.name], data[parent], strict=True)
            data[factor.name] = [value if other == level else None for value, other in values]
    return pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in data.items()})


def _width(factor: Factor) -> int:
    if len(factor.levels) < 2:
        raise LabError(f"{factor.name} has one level; leave it out of a screening plan")
    if factor.scale is not Scale.CATEGORICAL or len(factor.levels) == 2:
        return 1
    if len(factor.levels) <= 4:
        return 2
    raise LabError(
        f"{factor.name} has {len(factor.levels)} levels; a screening plan takes 4 of a categorical one"
    )


def _table(factor: Factor) -> list[Level]:
    if factor.scale is not Scale.CATEGORICAL:
        numbers = [level for level in factor.levels if not isinstance(level, str)]
        return [min(numbers), max(numbers)]
    if len(factor.levels) == 3:
        return [factor.levels[0], factor.levels[1], factor.levels[2], factor.levels[0]]
    return list(factor.levels)


def _read(columns: int, generators: Sequence[str]) -> list[tuple[int, int]]:
    """Each generator's word over the base columns as bits, and its sign."""
    base = columns - len(generators)
    if base < 1 or columns > len(LETTERS):
        raise LabError(f"{len(generators)} generators leave no base of {columns} columns")
    found = []
    for k, text in enumerate(generators):
        left, _, right = text.replace(" ", "").partition("=")
        sign = -1 if right.startswith("-") else 1
        letters = right.lstrip("+-")
        good = left == LETTERS[base + k] and set(letters) <= set(LETTERS[:base])
        if not good or len(letters) < 1 or len(set(letters)) < len(letters):
            want = f"{LETTERS[base + k]}=... over {LETTERS[:base]}, each once"
            raise LabError(f"generator {text!r} does not fit here: {want}")
        found.append((sum(1 << LETTERS.index(letter) for letter in letters), sign))
    return found


def _words(columns: int, generators: Sequence[str]) -> list[int]:
    """The products of the generators' words, as bits of columns."""
    base = columns - len(generators)
    found = [0]
    for k, (word, _) in enumerate(_read(columns, generators)):
        found += [other ^ word ^ 1 << (base + k) for other in found]
    return found[1:]


def _length(word: int, pairs: Sequence[int]) -> int:
    return word.bit_count() - sum(word & pair == pair for pair in pairs)


def _bits(word: int, width: int) -> list[int]:
    return [k for k in range(width) if word >> k & 1]


def _prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))


def _jacobsthal(q: int) -> FloatArray:
    """Q[i, j]: 1 where i - j is a square modulo the prime q, -1 where it is not, 0 on the diagonal."""
    squares = {k * k % q for k in range(1, q)}
    character = np.array([0.0] + [1.0 if k in squares else -1.0 for k in range(1, q)])
    result: FloatArray = character[np.subtract.outer(np.arange(q), np.arange(q)) % q]
    return result


def _bordered(q: int, sign: float) -> FloatArray:
    matrix = np.zeros((q + 1, q + 1))
    matrix[0, 1:], matrix[1:, 0] = 1, sign
    matrix[1:, 1:] = _jacobsthal(q)
    return matrix


def _paley_one(q: int) -> FloatArray:
    return np.eye(q + 1) + _bordered(q, -1.0)


def _paley_two(q: int) -> FloatArray:
    conference = _bordered(q, 1.0)
    one, other = np.array([[1.0, 1.0], [1.0, -1.0]]), np.array([[1.0, -1.0], [-1.0, -1.0]])
    return np.kron(conference, one) + np.kron(np.eye(q + 1), other)


def _one_first(matrix: FloatArray) -> FloatArray:
    result: FloatArray = matrix * matrix[:, :1]
    return result
