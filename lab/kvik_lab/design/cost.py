"""What a schedule takes: restarts, hours, money, each with the formula that gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from kvik_lab.design.factor import Factor, Level
from kvik_lab.design.pairs import row_keys
from kvik_lab.design.schedule import ANCHOR, Anchor, Schedule
from kvik_lab.errors import LabError


@dataclass(frozen=True)
class Rates:
    """Minutes a run and a restart, and the price of an hour of what is always rented."""

    minutes_a_run: float | None = None
    minutes_a_restart: float = 0.0
    price_an_hour: float = 0.0
    currency: str = "USD"


@dataclass(frozen=True)
class Figure:
    """A number and how it comes about."""

    value: float
    formula: str


@dataclass(frozen=True)
class Cost:
    """What a schedule takes. Hours and money are none where no time a run is known."""

    restarts: Figure
    hours: Figure | None
    money: Figure | None


def schedule_cost(
    schedule: Schedule,
    rows: pd.DataFrame,
    factors: Sequence[Factor],
    rates: Rates,
    anchor: Anchor | None = None,
) -> Cost:
    """Count starts, add up hours, and price each hour by the levels that it is spent at.

    A start is priced at its hard levels, a run at all of its levels. The index of `rows` holds the ids.
    """
    count = len(schedule.starts)
    own = sum(start.anchor for start in schedule.starts)
    wholes = (count - own) // schedule.blocks
    anchors = f" + {own} of the anchor" if own else ""
    restarts = Figure(
        count, f"{schedule.blocks} block{'s' * (schedule.blocks > 1)} x {wholes} starts{anchors}"
    )
    if rates.minutes_a_run is None:
        return Cost(restarts, None, None)
    runs = schedule.runs + schedule.anchors
    minutes = count * rates.minutes_a_restart + runs * rates.minutes_a_run
    begun = f"{count} starts x {rates.minutes_a_restart:g} min"
    hours = Figure(minutes / 60, f"({begun} + {runs} runs x {rates.minutes_a_run:g} min) / 60")
    return Cost(restarts, hours, _money(schedule, rows, factors, rates, anchor, hours.value))


def _money(
    schedule: Schedule,
    rows: pd.DataFrame,
    factors: Sequence[Factor],
    rates: Rates,
    anchor: Anchor | None,
    hours: float,
) -> Figure | None:
    prices = {factor.name: factor.price_per_hour for factor in factors if factor.price_per_hour}
    if not prices and not rates.price_an_hour:
        return None
    names = [factor.name for factor in factors]
    keys = row_keys(rows, names)
    levels = {str(k): dict(zip(names, key, strict=True)) for k, key in zip(rows.index, keys, strict=True)}
    extra = 0.0
    for start in schedule.starts:
        extra += rates.minutes_a_restart / 60 * _price(start.levels, prices)
        for run in start.runs:
            at = {**start.levels, **(anchor.levels if anchor else {})} if run == ANCHOR else levels[run]
            extra += (rates.minutes_a_run or 0.0) / 60 * _price(at, prices)
    total = hours * rates.price_an_hour + extra
    text = f"{hours:.2f} h x {rates.price_an_hour:g} {rates.currency}/h"
    if prices:
        text += f" + {extra:.2f} {rates.currency} for levels of {', '.join(prices)}"
    return Figure(total, text)


def _price(levels: Mapping[str, Level | None], prices: Mapping[str, Mapping[Level, float]]) -> float:
    total = 0.0
    for name, table in prices.items():
        level = levels.get(name)
        if level is not None:
            total += table.get(level, 0.0)
    return total


def check_rates(rates: Rates) -> None:
    """Raise LabError for a time or a price below 0."""
    for what, value in (
        ("minutes a run", rates.minutes_a_run or 0.0),
        ("minutes a restart", rates.minutes_a_restart),
        ("price an hour", rates.price_an_hour),
    ):
        if not value >= 0:
            raise LabError(f"{what} are {value}; they cannot be below 0")
