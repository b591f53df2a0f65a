"""The inference's validation report: `python -m tests.lab.validate [SHARE] [decisions | warmup]`.

Prints, for data whose truth is known, what the lab says of it and how far the simulation can be off, with the
naive interval beside. SHARE scales the repetitions (1: some minutes). `decisions` prints only the table of
whole pages, 2,000 of each design and each kind of noise; `warmup` only where warm-ups end. Exit status 1 if a
bound is not kept.
"""

from __future__ import annotations

import sys

import numpy as np

from kvik_lab.infer.power import Spread
from tests.lab import decisions_truth as decisions
from tests.lab import inference_truth as truth
from tests.lab import warmup_truth as warmup

SEED = 1
PAGES = 2000


def main(share: float, only: str = "") -> int:
    """Print the report; 1 if any bound is not kept."""
    print(f"seed {SEED}; errors are simulation errors (one standard error); a line fails outside its bounds")
    if only:
        parts = {"decisions": _decisions, "warmup": _warmups}
        if only not in parts:
            raise SystemExit(f"no part {only!r}; there are: {', '.join(parts)}")
        return 0 if all(parts[only](share)) else 1
    checks = [
        *_decisions(share),
        *_means(share),
        *_starts(share),
        *_quantiles(share),
        *_alarms(share),
        *_steps(share),
        *_plans(share),
        *_warmups(share),
    ]
    return 0 if all(checks) else 1


def _line(what: str, value: float, error: float, low: float, high: float, beside: str = "") -> bool:
    good = low <= value <= high
    bounds = f"[{low:.3g}, {high:.3g}]"
    print(
        f"{what:<58} {value:8.4f} +- {error:.4f}  {bounds:<14} {'ok' if good else 'FAILS':<6}{beside}",
        flush=True,
    )
    return good


def _rate(what: str, rate: truth.Rate, low: float, high: float, beside: str = "") -> bool:
    return _line(what, rate.value, rate.error, low, high, beside)


def _decisions(share: float) -> list[bool]:
    """A line for each design and noise; then the power that its plan promises beside what its pages have."""
    rows = max(20, int(PAGES * share))
    print(f"{rows} pages each; starts vary by 2 %, iterations by 5 %; any: a verdict of no effect")
    head = f"{'any':>6} {'held':>6} {'held':>6} {'decided':>8} {'refused':>8}"
    print(f"{'design':<34} {'iterations':<30} {head}")
    print(f"{'':<65} {'0 %':>6} {'0 %':>6} {'20 %':>6} {'20 %':>8} {'':>8}")
    done = []
    for design in decisions.DESIGNS:
        done += [_page(design, scenario, rows) for scenario in decisions.SCENARIOS]
    print(f"{'design':<34} {'iterations':<12} {'effect':>7} {'planned':>8} {'decided':>8}")
    for design in decisions.DESIGNS:
        for scenario, rho in ((decisions.SCENARIOS[0], 0.0), (decisions.SCENARIOS[1], decisions.RHO)):
            done += [_power(design, scenario, rho, effect, rows) for effect in (0.03, 0.05, 0.07)]
    return done


def _page(design: decisions.Design, scenario: decisions.Scenario, rows: int) -> bool:
    none = decisions.pages(design, scenario, 0.0, rows, SEED)
    some = decisions.pages(design, scenario, 0.2, rows, SEED + 1)
    plain = scenario is decisions.SCENARIOS[0]
    error = 0.0 if rows >= PAGES else 3.0
    # What the truth is of starts that slow down in mid-run, nobody can say: they must only not be refused.
    good = scenario.step > 0 or all(
        0.92 - error * held.error <= held.value <= 0.98 + error * held.error
        for held in (none.held, some.held)
    )
    good &= max(none.refused.value, some.refused.value) <= 0.02
    # One start in ten is slow in one arm and not in the other: an effect, and no wrong verdict of none.
    alarms = none.any_decided.value - error * none.any_decided.error
    good &= alarms <= 0.06 or scenario.odd + scenario.step > 0
    good &= some.decided.value >= 0.95 or not plain
    print(
        f"{design.name:<34} {scenario.name:<30} {none.any_decided.value:6.3f} {none.held.value:6.3f} "
        f"{some.held.value:6.3f} {some.decided.value:8.3f} "
        f"{max(none.refused.value, some.refused.value):8.4f} {'' if good else 'FAILS'}",
        flush=True,
    )
    return good


def _power(
    design: decisions.Design, scenario: decisions.Scenario, rho: float, effect: float, rows: int
) -> bool:
    promised = decisions.planned(design, effect, rho)
    found = decisions.pages(design, scenario, effect, rows, SEED + 2).decided
    good = abs(found.value - promised) <= 0.03 + (0.0 if rows >= PAGES else 3 * found.error)
    print(
        f"{design.name:<34} {scenario.name:<12} {effect:7.2f} {promised:8.3f} {found.value:8.3f} "
        f"{'' if good else 'FAILS'}",
        flush=True,
    )
    return good


def _means(share: float) -> list[bool]:
    done = []
    for n in (30, 100):
        for rho in (0.0, 0.3, 0.6, 0.8):
            ours, naive = truth.mean_coverage(rho, n, int(100_000 * share), SEED)
            low = 0.90 if (rho, n) == (0.8, 30) else 0.92
            done.append(_rate(f"mean holds, AR({rho}), n {n}", ours, low, 0.98, f"naive {naive.value:.3f}"))
    return done


def _starts(share: float) -> list[bool]:
    done = []
    for n in (30, 100):
        for starts in (2, 3, 5, 10):
            for between, rho, uneven in (
                (2.0, 0.0, False),
                (2.0, 0.6, False),
                (0.5, 0.6, True),
                (0.0, 0.6, False),
            ):
                ours, naive = truth.starts_coverage(starts, n, between, rho, int(5_000 * share), SEED, uneven)
                shape = "uneven" if uneven else "even"
                what = f"{starts} starts, sd {between:g}, AR({rho}), n {n}, {shape}"
                done.append(_rate(what, ours, 0.92, 0.98, f"naive {naive.value:.3f}"))
    return done


def _quantiles(share: float) -> list[bool]:
    cases = ((0.5, 6, 2), (0.5, 30, 2), (0.9, 30, 1), (0.95, 59, 1), (0.99, 299, 1), (0.99, 368, 2))
    rows = int(10_000 * share)
    return [
        _rate(
            f"p{100 * q:g} within bounds, {s} side(s), n {n}",
            truth.quantile_coverage(q, n, s, rows, SEED),
            0.945,
            1,
        )
        for q, n, s in cases
    ]


def _alarms(share: float) -> list[bool]:
    kinds = {
        "AR(0)": truth.correlated(0.0),
        "t3": truth.student,
        "5 % outliers": truth.outliers,
        "lognormal": truth.lognormal,
        "AR(0.3)": truth.correlated(0.3),
        "AR(0.6)": truth.correlated(0.6),
        "AR(0.6) with 5 % outliers": truth.correlated_outliers,
        "AR(0.8)": truth.correlated(0.8),
        "AR(0.9)": truth.correlated(0.9),
    }
    done = []
    for n in (30, 100):
        for name, draw in kinds.items():
            rate = truth.false_alarms(draw, n, int(10_000 * share), SEED)
            # One that is at the bound is beyond it by chance every other time.
            done.append(_rate(f"false alarm, {name}, n {n}", rate, 0, 0.05 + 2 * rate.error))
    return done


def _steps(share: float) -> list[bool]:
    done = []
    rows = int(4_000 * share)
    for size, at, n in ((-0.23, 17, 30), (-0.10, 17, 30), (-0.06, 17, 30), (-0.04, 17, 30), (-0.04, 57, 100)):
        found = truth.detection(truth.step_series(rows, SEED, size, at, n), at, size)
        done += _step(f"step {100 * size:g} % at {at} of {n}, noise 2 %", found, size == -0.23)
    for at, n in ((17, 30), (50, 100)):
        found = truth.detection(truth.wandering_step(rows, SEED, at, n), at, -0.15)
        done += _step(f"step -15 at {at} of {n} in AR(0.6)", found, False)
    return done


def _step(what: str, found: truth.Detection, promised: bool) -> list[bool]:
    # Of small steps a location further off than one counts as spurious: no bound is promised.
    low, most = (0.9, 0.1) if promised else (0.0, 1.0)
    return [
        _rate(f"{what}: found within one", found.found, low, 1),
        _line(f"{what}: spurious a series", found.spurious, found.spurious_error, 0, most),
        _rate(f"{what}: found and located", found.located, low, 1),
        _rate(f"{what}: found and sized", found.sized, low, 1),
    ]


def _plans(share: float) -> list[bool]:
    done = []
    spread = Spread(between=0.04, within=0.08, rho=0.5)
    for effect, starts in ((0.0, 4), (0.10, 3), (0.10, 5), (0.15, 3)):
        planned, rate = truth.power_as_planned(effect, spread, starts, 60, int(20_000 * share), SEED)
        reach = 0.03  # as docs/lab/inference.md promises
        what = f"power, effect {effect:g}, {starts} starts: planned {planned:.3f}"
        done.append(_rate(what, rate, planned - reach, planned + reach))
    return done


def _warmups(share: float) -> list[bool]:
    """A line for each warm-up and noise: requests until it ends, what is left then and after a count."""
    rows = max(20, int(500 * share))
    print(f"{rows} warm-ups each, of {warmup.LEAST} to {warmup.MOST} requests; count: after {warmup.LEAST}")
    head = f"{'median':>7} {'p90':>5} {'bound':>6} {'left':>7} {'count':>7}"
    print(f"{'warm-up':<34} {'noise':<16} {head}")
    return [
        _warmup(shape, noise, rho, rows)
        for noise, rho in ((0.02, 0.0), (0.05, 0.6))
        for shape in warmup.SHAPES
    ]


def _warmup(shape: str, noise: float, rho: float, rows: int) -> bool:
    found = warmup.ends(shape, noise, rho, rows, SEED)
    median, late = np.quantile(found.requests, (0.5, 0.9))
    # Of a slow fall in wandering values no more is promised: ten of them do not show it.
    good = found.left <= found.counted * (0.9 if "60" not in shape else 1.0)
    if shape == "none":
        good = late <= 2 * warmup.LEAST and found.bound <= 0.01
    kind = f"{100 * noise:g} %, AR({rho:g})"
    print(
        f"{shape:<34} {kind:<16} {median:7.0f} {late:5.0f} {found.bound:6.3f} {100 * found.left:5.1f} % "
        f"{100 * found.counted:5.1f} % {'' if good else 'FAILS'}",
        flush=True,
    )
    return good


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0, "".join(sys.argv[2:3])))
