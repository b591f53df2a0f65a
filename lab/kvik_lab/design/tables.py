"""A plan and a pilot as tables on a terminal, and as JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from pydantic_core import to_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvik_lab.design.cost import Figure
from kvik_lab.design.effects import Effects
from kvik_lab.design.pairs import MatchedPairs
from kvik_lab.design.pilot import Pilot
from kvik_lab.design.plan import Plan

WIDTH = 110
"""Columns of a terminal at least: narrower ones wrap lines and lose no digit."""

MOST_LEVELS = 6
"""Pairs of levels of one factor that are listed one by one."""

LISTED = 12
"""Ids that are listed before "and so many more"."""


def wide_console() -> Console:
    """Standard output, as wide as the tables need."""
    console = Console()
    console.width = max(console.width, WIDTH)
    return console


def as_json(value: Plan | Pilot | Effects) -> str:
    """The whole value, indented; a frame as a list of rows with their `id`, a level that is not there as
    null."""
    return to_json(value, indent=2, inf_nan_mode="null", fallback=_plain).decode()


def print_plan(plan: Plan, console: Console) -> None:
    """What the plan can tell and what it takes, in the order in which one decides."""
    console.print(f"[bold]{escape(plan.name)}[/bold]", highlight=False)
    _print_sizes(plan, console)
    for note in plan.notes:
        console.print(f"- {note}", highlight=False, markup=False)
    _print_problems(plan, console)
    _print_estimable(plan, console)
    _print_models(plan, console)
    _print_pairs(plan, console)
    _print_power(plan, console)


def print_pilot(pilot: Pilot, console: Console) -> None:
    """Variances, and what follows."""
    parts = pilot.components
    table = _table("measured, relative to the mean", "", "value", "meaning")
    _row(
        table,
        "configurations, starts, iterations",
        f"{parts.configurations}, {parts.starts}, {parts.iterations}",
        "",
    )
    _row(table, "within a start", _percent(math.sqrt(parts.iteration)), "deviation of an iteration, T1")
    _row(table, "between starts", _percent(math.sqrt(parts.start)), "deviation of a start, T2")
    _row(table, "... at most", _percent(math.sqrt(parts.start_upper)), "upper 90 % limit of T2")
    _row(
        table,
        "... if independent",
        _percent(math.sqrt(parts.start_unadjusted)),
        "T2 if iterations were independent",
    )
    _row(
        table,
        "autocorrelation",
        f"{parts.rho:.2f}",
        f"{parts.tau:.1f} iterations tell as much as one independent",
    )
    console.print(table)
    table = _table(
        f"for +-{_percent(pilot.wanted)}, {pilot.comparisons} intervals together at {pilot.confidence:.0%}",
        "",
        "iterations",
        "starts",
        "half-width",
        "seen at 80%",
        "hours",
    )
    for name, one, arms in (
        ("the mean of one arm", pilot.mean, 1),
        ("two arms compared, each", pilot.difference, 2),
        ("two arms, cautious, each", pilot.cautious, 2),
    ):
        hours = f"{one.seconds * arms / 3600:.2f}"
        seen = "-" if one.seen is None else _percent(one.seen)
        _row(table, name, str(one.iterations), str(one.starts), _percent(one.halfwidth), seen, hours)
    console.print(table)
    c2 = pilot.cost_restart + pilot.warmup * pilot.cost_iteration
    r = pilot.difference.iterations
    console.print(
        f"iterations = ceil(sqrt({c2:g} s / {pilot.cost_iteration:g} s x T1^2 tau / T2^2)); "
        f"hours = arms x starts x ({c2:g} s + {r} x {pilot.cost_iteration:g} s) / 3600",
        highlight=False,
    )
    ratio = "unknown" if pilot.ratio is None else f"{pilot.ratio:.2f}"
    console.print(
        f"for a plan: --sigma {pilot.run_deviation:.4g} (deviation of a run of {r} iterations), "
        f"--ratio {ratio} (variance between starts over a run's)",
        highlight=False,
    )
    for note in pilot.notes:
        console.print(f"- {note}", highlight=False, markup=False)


def _print_sizes(plan: Plan, console: Console) -> None:
    table = _table("size", "", "value", "formula")
    for name, figure in plan.sizes.items():
        shown = f"{figure.value:.1%}" if name == "reduction" else f"{figure.value:,.0f}"
        _row(table, name, shown, figure.formula)
    cost = plan.cost
    _row(table, "starts", f"{cost.restarts.value:.0f}", cost.restarts.formula)
    _add(table, "hours", cost.hours, "no time a run is given")
    _add(table, f"money, {plan.setup.rates.currency}", cost.money, "no price or no time is given")
    console.print(table)


def _add(table: Table, name: str, figure: Figure | None, otherwise: str) -> None:
    _row(
        table,
        name,
        "-" if figure is None else f"{figure.value:,.2f}",
        figure.formula if figure else otherwise,
    )


def _print_problems(plan: Plan, console: Console) -> None:
    if plan.excluded:
        table = _table("combinations that constraints exclude", "constraint", "combinations")
        for text, count in plan.excluded.items():
            _row(table, text, f"{count:,}")
        console.print(table)
    if plan.impossible:
        table = _table("rows that cannot run, and are left out", "row", "violates")
        for name, why in plan.impossible.items():
            _row(table, name, "; ".join(why))
        console.print(table)
    if plan.duplicates:
        console.print("[bold]the same combination under several ids[/bold]")
        for group in plan.duplicates:
            console.print(f"- {' = '.join(group)}", highlight=False, markup=False)
    if plan.unreachable:
        table = _table("no plan can estimate", "term", "because in every feasible row", "why")
        for lost in plan.unreachable:
            _row(table, lost.alias.column, lost.alias.text, lost.why)
        console.print(table)


def _print_estimable(plan: Plan, console: Console) -> None:
    if plan.single.aliases:
        table = _table("this plan cannot estimate", "term", "because in every row of it")
        for alias in plan.single.aliases:
            _row(table, alias.column, alias.text)
        console.print(table)
    clear = len(plan.single.estimable)
    title = f"{clear} of {plan.single.columns} coefficients are estimable by themselves"
    sizes = [f"SE optimal {rival.runs}" for rival in plan.rivals]
    aliased = any(one.aliased_with for one in plan.single.coefficients)
    last = ["aliased with"] if aliased else []
    table = _table(title, "coefficient", "SE", "SE alone", "SE scheduled", "VIF", *sizes, *last)
    table.columns[0].no_wrap = True
    alone = {one.name: one.se for one in plan.main_effects}
    for one, all_of in zip(plan.single.coefficients, plan.scheduled.coefficients, strict=True):
        _row(
            table,
            one.name,
            _number(one.se),
            _number(alone.get(one.name)),
            _number(all_of.se),
            _number(one.vif, 1),
            *(_number(rival.se.get(one.name)) for rival in plan.rivals),
            *([", ".join(one.aliased_with)] if aliased else []),
        )
    console.print(table)
    console.print(
        "SE: standard error in deviations of a run, each row run once; alone: of main effects if there were "
        f"no interactions; scheduled: of all starts, which vary {plan.setup.ratio:g} times as a run. "
        f"VIF: variance inflation. D-efficiency {plan.single.d_efficiency:.3f} in this coding.",
        highlight=False,
    )
    for rival in plan.rivals:
        if rival.relative_efficiency is None:
            text = f"all {rival.rank} coefficients; this plan estimates {plan.single.rank}"
        else:
            text = f"a run of this plan tells {rival.relative_efficiency:.0%} of what one of that tells"
        console.print(f"- beside the D-optimal plan of {rival.runs} runs: {text}", highlight=False)


def _print_models(plan: Plan, console: Console) -> None:
    table = _table("models that it carries", "model", "coefficients", "feasible", "this plan")
    for step in plan.steps:
        _row(table, step.model, str(step.columns), str(step.candidates), str(step.rows))
    console.print(table)


def _print_pairs(plan: Plan, console: Console) -> None:
    table = _table("pairs of rows that differ in nothing else", "factor", "levels", "pairs")
    by_factor: dict[str, list[MatchedPairs]] = {}
    for pair in plan.pairs.contrasts:
        by_factor.setdefault(pair.factor, []).append(pair)
    for factor, pairs in by_factor.items():
        if len(pairs) > MOST_LEVELS:
            total = sum(pair.pairs for pair in pairs)
            _row(table, factor, f"{len(pairs)} pairs of levels", str(total))
            continue
        for pair in pairs:
            _row(table, pair.factor, f"{pair.first} | {pair.second}", str(pair.pairs))
    if plan.pairs.contrasts:
        console.print(table)
    else:
        console.print("No two rows differ in one factor only: every comparison rests on the model.")
    if plan.pairs.alone:
        console.print(f"in no pair: {_listed(plan.pairs.alone)}", highlight=False, markup=False)


def _print_power(plan: Plan, console: Console) -> None:
    delta, wanted = plan.setup.delta, plan.setup.wanted_power
    title = (
        f"power for a difference of {_size(plan, delta)}, all {len(plan.powers)} intervals together at 95 %"
    )
    table = _table(
        title, "contrast", "SE", "df", "judged against", "power", f"seen at {wanted:.0%}", "known to"
    )
    for one in plan.powers:
        shown = (
            "not estimable"
            if one.se is None
            else "no df for error"
            if one.power is None
            else f"{one.power:.2f}"
        )
        seen, known = (
            "-" if size is None else _size(plan, size, short=True) for size in (one.smallest, one.halfwidth)
        )
        _row(table, one.contrast, _number(one.se), str(one.df), one.stratum, shown, seen, f"+-{known}")
    console.print(table)
    console.print(
        "power: of simulated experiments, judged as `kvik lab effects` does; known to: median half-width",
        highlight=False,
    )


def _size(plan: Plan, deviations: float, short: bool = False) -> str:
    """A difference in deviations of a run, or as what it is where the deviation is known."""
    sigma = plan.setup.sigma
    if sigma is None:
        return f"{deviations:.2f}" if short else f"{deviations:g} deviations of a run"
    if plan.logarithmic:
        return f"{100 * math.expm1(deviations * sigma):.1f} %"
    return f"{deviations * sigma:.3g}"


def _row(table: Table, *cells: str) -> None:
    """Names of columns have brackets, which rich would take for markup."""
    table.add_row(*(escape(cell) for cell in cells))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for k, name in enumerate(columns):
        table.add_column(name, overflow="fold", justify="left" if k == 0 else "default")
    return table


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _plain(value: pd.DataFrame | np.generic) -> Any:
    """What only pandas and numpy know, of plain values."""
    if isinstance(value, pd.DataFrame):
        return [{"id": str(k), **row} for k, row in value.to_dict("index").items()]
    return value.item()
