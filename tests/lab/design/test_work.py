"""How much a search of thousands of candidates does: counted, not timed."""

import itertools

import pandas as pd

from kvik_lab.design.factor import Factor, Scale
from kvik_lab.design.model import build_model, model_matrix
from kvik_lab.design.optimal import Search, find_optimum


def test_a_search_of_5000_candidates_takes_few_passes() -> None:
    factors = (
        Factor("backend", ("unified", "tcp", "efa")),
        Factor("tokens", tuple(1000 * k for k in (1, 2, 3, 4, 6, 8, 10, 12, 16)), Scale.LOG2),
        Factor("concurrency", (1, 2, 4, 8, 16), Scale.LOG2),
        Factor("gmu", (0.3, 0.5, 0.8, 0.9), Scale.LINEAR),
        Factor("batch", (2048, 4096, 8192), Scale.LOG2),
        Factor("client", ("online", "offline", "both")),
    )
    rows = pd.DataFrame(
        list(itertools.product(*(f.levels for f in factors))), columns=[f.name for f in factors]
    )
    model = build_model("(backend + tokens + concurrency + gmu + batch + client)^2 + tokens^2", factors)
    coded = model_matrix(model, rows)
    assert len(coded) == 4860
    found = find_optimum(coded, 59, search=Search(2))
    # A beginning that exchanges each row a few times, and looks at each candidate for each row once a pass.
    assert found.exchanges < 2 * 59 * 6
    assert found.weighed < 2 * 59 * 15 * len(coded)
