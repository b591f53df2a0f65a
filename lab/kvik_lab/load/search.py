"""The highest rate at which requests hold their goals."""

from __future__ import annotations

from dataclasses import dataclass

from kvik_lab.errors import LabError
from kvik_lab.load.drive import Driver
from kvik_lab.load.spec import Constant, Gamma, Poisson
from kvik_lab.records import Figure
from kvik_lab.records.measures import Goals


@dataclass(frozen=True)
class Tried:
    """A rate, and the share of its requests that held all goals."""

    rate: float
    attained: float


async def search(driver: Driver) -> list[Figure]:
    """Raise the rate twofold until the goals are missed, then halve the interval (in its logarithm).

    The rate that is found is measured a second time, with other prompts; one that does not hold twice counts
    as missed. Figures: `attainment` of each rate that was tried, `rate_held` in requests/s, with how often
    it was measured as a level, and `rate_missed` where one was seen. Raises `LabError` where the lowest rate
    misses.
    """
    spec = driver.spec
    if spec.search is None or spec.goals is None:
        raise LabError("the specification has no search, or no goals")
    wanted = spec.search
    goals = Goals(**spec.goals.model_dump())
    tried: list[Tried] = []
    held: list[float] = []  # rising
    missed, rate = wanted.high, wanted.low
    while len(tried) < wanted.most:
        tried.append(Tried(rate, await _attained(driver, rate, goals)))
        again = bool(held) and rate == held[-1]
        if tried[-1].attained >= wanted.attainment:
            if again:
                break
            held.append(rate)
        else:
            missed = rate
            if again:
                held.pop()
        if not held:
            raise LabError(
                f"{rate:g} requests/s, the lowest rate, do not hold the goals: {tried[-1].attained:.1%} of "
                f"requests did, and {wanted.attainment:.1%} were asked for; lower search.low, or loosen the "
                f"goals"
            )
        rate = _next(held[-1], missed, wanted.precision)
    return _figures(tried, held[-1], missed)


def _next(held: float, missed: float | None, precision: float) -> float:
    """The rate to try; the one that held, a second time, where the interval is narrow enough."""
    if missed is None:
        return held * 2
    return held if missed <= held * (1 + precision) else (held * missed) ** 0.5


async def _attained(driver: Driver, rate: float, goals: Goals) -> float:
    """The share of requests at this rate that hold all goals."""
    arrival = driver.spec.arrival
    if not isinstance(arrival, Constant | Poisson | Gamma):
        raise LabError(f"a search raises a rate, and {arrival.kind} arrivals have none")
    at_rate = arrival.model_copy(update={"rate": rate})
    sent = await driver.open_loop(driver.plan(driver.spec.requests, "measure", driver.dues(at_rate)))
    return sum(goals.met(driver.record(one)) for one in sent) / len(sent)


def _figures(tried: list[Tried], held: float, missed: float | None) -> list[Figure]:
    figures = [
        Figure(metric="attainment", unit="1", value=one.attained, iteration=at, levels={"rate": one.rate})
        for at, one in enumerate(tried)
    ]
    times = sum(one.rate == held for one in tried)
    figures.append(Figure(metric="rate_held", unit="requests/s", value=held, levels={"measured": times}))
    if missed is not None and any(one.rate == missed for one in tried):
        figures.append(Figure(metric="rate_missed", unit="requests/s", value=missed))
    return figures
