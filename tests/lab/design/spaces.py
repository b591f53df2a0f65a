"""Factors and candidates that several tests use."""

from __future__ import annotations

import itertools

import pandas as pd

from kvik_lab.design.factor import Factor, Scale
from kvik_lab.design.plan import Space

OFFLINE = "online or concurrency == 1"
FULL_MODEL = (
    "(backend + tokens + concurrency + gmu + mbt + online)^2 + tokens^2 + concurrency^2"  # 30 columns
)


def article_factors() -> tuple[Factor, ...]:
    """The factors of the EFA article's plan, with its levels."""
    return (
        Factor("backend", ("unified", "tcp", "efa"), hard=True),
        Factor("tokens", (1000, 2000, 3000, 4000, 6000, 8000, 10000, 12000), Scale.LOG2),
        Factor("concurrency", (1, 2, 4, 8, 16), Scale.LOG2),
        Factor("gmu", (0.3, 0.5, 0.8), Scale.LINEAR, hard=True),
        Factor("mbt", (2048, 4096, 8192), Scale.LOG2, hard=True),
        Factor("online", (False, True)),
    )


def product_space(factors: tuple[Factor, ...]) -> pd.DataFrame:
    """Every combination of levels of factors that are not nested."""
    rows = list(itertools.product(*(factor.levels for factor in factors)))
    return pd.DataFrame(rows, columns=[factor.name for factor in factors])


def article_space() -> Space:
    """The article's factors where a client that is offline sends one request at a time."""
    factors = article_factors()
    rows = product_space(factors)
    possible = rows["online"] | (rows["concurrency"] == 1)
    return Space(
        factors,
        rows[possible].reset_index(drop=True),
        rows[~possible].reset_index(drop=True).assign(constraint=OFFLINE, only=True),
    )


def nested_factors() -> tuple[Factor, ...]:
    """A transport that exists only where prefill and decode are apart."""
    return (
        Factor("mode", ("unified", "disagg"), hard=True),
        Factor("transport", ("tcp", "efa"), within={"mode": "disagg"}, hard=True),
        Factor("tokens", (1000, 2000, 4000), Scale.LOG2),
        Factor("concurrency", (1, 2, 4), Scale.LOG2),
    )


def nested_rows() -> pd.DataFrame:
    """All combinations of `nested_factors`."""
    arms = (("unified", None), ("disagg", "tcp"), ("disagg", "efa"))
    rows = [(*arm, t, c) for arm in arms for t in (1000, 2000, 4000) for c in (1, 2, 4)]
    return pd.DataFrame(rows, columns=["mode", "transport", "tokens", "concurrency"])
