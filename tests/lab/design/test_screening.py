"""Two-level plans, by what they must alias and what they must not."""

import itertools

import numpy as np
import pandas as pd
import pytest

from kvik_lab.design.choose import Kind, Wish, choose_rows
from kvik_lab.design.estimability import find_rank
from kvik_lab.design.factor import Factor, Scale
from kvik_lab.design.model import build_model, model_matrix
from kvik_lab.design.screening import (
    columns_needed,
    defining_words,
    find_generators,
    fraction,
    hadamard,
    map_levels,
    pairs_of,
    plackett_burman,
    resolution,
)
from kvik_lab.errors import LabError


@pytest.mark.parametrize(
    ("columns", "wanted", "runs"),
    # The sizes of the smallest fractions in the tables of Box, Hunter and Hunter.
    [(3, 3, 4), (4, 4, 8), (5, 3, 8), (5, 5, 16), (6, 4, 16), (7, 3, 8), (7, 4, 16), (8, 4, 16), (8, 5, 64),
     (9, 4, 32), (10, 5, 128), (11, 3, 16), (15, 3, 16), (16, 4, 32)],
)  # fmt: skip
def test_fractions_are_as_small_as_the_published_tables(columns: int, wanted: int, runs: int) -> None:
    generators = find_generators(columns, wanted)
    assert 2 ** (columns - len(generators)) == runs
    assert resolution(columns, generators) >= wanted
    matrix = fraction(columns, generators)
    assert (matrix.T @ matrix == runs * np.eye(columns)).all()


def test_the_words_that_equal_the_identity_do_so_in_every_row() -> None:
    matrix = fraction(7, ["E=ABC", "F=BCD", "G=-ACD"])
    words = defining_words(7, ["E=ABC", "F=BCD", "G=-ACD"])
    assert len(words) == 7
    for word in words:
        product = np.prod(matrix[:, ["ABCDEFG".index(letter) for letter in word]], axis=1)
        assert abs(product.sum()) == len(matrix)
    others = [w for n in (1, 2, 3) for w in itertools.combinations(range(7), n)]
    assert all(abs(np.prod(matrix[:, list(w)], axis=1).sum()) == 0 for w in others)  # resolution IV


def test_main_effects_of_resolution_4_are_clear_and_of_resolution_3_are_not() -> None:
    for generators, clear in ((["E=ABC", "F=BCD"], True), (["E=AB", "F=CD"], False)):
        matrix = fraction(6, generators)
        pairs = [matrix[:, i] * matrix[:, j] for i, j in itertools.combinations(range(6), 2)]
        rank = find_rank(np.column_stack([np.ones(16), matrix, *pairs]), [str(k) for k in range(22)])
        main = {str(k) for k in range(1, 7)}
        touched = {name for alias in rank.aliases for name, _ in alias.parts} & main
        assert (not touched) == clear


@pytest.mark.parametrize(
    ("columns", "runs", "said"),
    [
        (1, None, "2 runs of 2^1: the full factorial"),
        (3, None, "8 runs of 2^3: the full factorial"),  # whose fraction has resolution III
        (5, None, "16 runs of 2^5: resolution 5"),
        (3, 8, "8 runs of 2^3: the full factorial"),
        (5, 31, "16 runs of 2^5: resolution 5"),
        (5, 32, "32 runs of 2^5: the full factorial"),
        (12, 16, "16 runs of 2^12: resolution 3"),
        (12, 50, "32 runs of 2^12: resolution 4"),
    ],
)
def test_a_fraction_has_resolution_4_or_the_best_that_fits_into_the_runs(
    columns: int, runs: int | None, said: str
) -> None:
    factors = tuple(Factor(f"f{k}", (0, 1)) for k in range(columns))
    model = build_model(" + ".join(factor.name for factor in factors), factors)
    full = itertools.product((0, 1), repeat=columns)
    candidates = pd.DataFrame(full, columns=[factor.name for factor in factors], dtype=object)
    chosen = choose_rows(Wish(Kind.FRACTIONAL, runs), candidates, np.zeros((0, 0)), model)
    assert chosen.notes[0].startswith(said)


def test_resolution_is_counted_in_factors_where_one_takes_two_columns() -> None:
    """Of columns E=ABC has resolution IV; with A and B of one factor, AB is its effect, and CE aliases it."""
    kinds = Factor("kind", tuple("abcd"))
    factors = (kinds, *(Factor(name, (0, 1)) for name in "vwxyz"))
    assert resolution(7, ["E=ABC", "F=ABD", "G=ACD"]) == 4
    assert resolution(7, ["E=ABC", "F=ABD", "G=ACD"], pairs_of(factors)) == 3
    candidates = pd.DataFrame(
        itertools.product("abcd", *[(0, 1)] * 5), columns=["kind", *"vwxyz"], dtype=object
    )
    model = build_model("(kind + v + w + x + y + z)^2", factors)
    for runs, resolution_said in ((None, 4), (32, 4), (16, 3)):
        chosen = choose_rows(Wish(Kind.FRACTIONAL, runs), candidates, np.zeros((0, 0)), model)
        assert f"resolution {resolution_said};" in chosen.notes[0]
        assert chosen.notes[1] == "columns ABCDEFG are, in order, of kind, kind, v, w, x, y, z"
        rank = find_rank(model_matrix(model, chosen.rows), model.names)
        touched = {name for alias in rank.aliases for name, _ in alias.parts if ":" not in name}
        assert bool(touched - {"intercept"}) == (resolution_said == 3)


@pytest.mark.parametrize("order", [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 60, 64, 68, 72])
def test_hadamard_matrices_are_orthogonal(order: int) -> None:
    matrix = hadamard(order)
    assert (np.abs(matrix) == 1).all()
    assert (matrix[:, 0] == 1).all()
    assert (matrix @ matrix.T == order * np.eye(order)).all()


def test_orders_that_the_constructions_do_not_reach_are_refused_and_stepped_over() -> None:
    for order in (6, 10, 52):
        with pytest.raises(LabError, match="no Hadamard matrix"):
            hadamard(order)
    assert plackett_burman(11).shape == (12, 11)
    assert plackett_burman(50).shape == (56, 50)


def test_plackett_burman_of_12_runs_aliases_main_effects_with_interactions_in_part_only() -> None:
    matrix = plackett_burman(11)
    assert (matrix.T @ matrix == 12 * np.eye(11)).all()
    assert (matrix.sum(axis=0) == 0).all()
    for main, i, j in itertools.permutations(range(11), 3):
        assert abs(matrix[:, main] @ (matrix[:, i] * matrix[:, j])) == 4  # a third: the known pattern


def test_factors_of_more_levels_are_mapped_and_nested_ones_are_left_out_where_they_do_not_exist() -> None:
    factors = (
        Factor("mode", ("unified", "disagg")),
        Factor("transport", ("tcp", "efa"), within={"mode": "disagg"}),
        Factor("backend", ("a", "b", "c")),
        Factor("tokens", (1000, 2000, 4000), Scale.LOG2),
    )
    assert columns_needed(factors) == 5
    rows = map_levels(fraction(5, ["E=ABCD"]), factors)
    assert rows["tokens"].value_counts().to_dict() == {1000: 8, 4000: 8}
    assert rows["backend"].value_counts().to_dict() == {"a": 8, "b": 4, "c": 4}
    assert (rows["transport"].isna() == (rows["mode"] == "unified")).all()
    with pytest.raises(LabError, match="5 levels"):
        columns_needed((Factor("x", tuple("abcde")),))


@pytest.mark.parametrize(
    "generators", [["D=AB", "E=AX"], ["D=ABC", "F=AB"], ["D=AAB", "E=AB"], ["A=BC"], ["D=", "E=AB"]]
)
def test_generators_that_do_not_fit_are_refused(generators: list[str]) -> None:
    with pytest.raises(LabError, match="generator"):
        fraction(5, generators)
