"""`kvik lab plan`: what a study can tell, and what it takes, before anything runs."""

from __future__ import annotations

from pathlib import Path

import click
import pandas as pd
from rich.console import Console

from kvik_lab.design.cells import read_cells, with_levels
from kvik_lab.design.from_study import Options, plan_study
from kvik_lab.design.plan import Plan
from kvik_lab.design.schedule import ANCHOR
from kvik_lab.design.tables import as_json, print_plan, wide_console
from kvik_lab.errors import LabError
from kvik_lab.study import Study, load_study

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("study", type=click.Path(path_type=Path))
@click.option("--runs", type=click.IntRange(1), help="Rows to choose, instead of the study's own number.")
@click.option(
    "--compare-optimal", "compare", is_flag=True, help="Put optimal plans beside it, as large and smaller."
)
@click.option("--smaller", type=click.IntRange(1), help="Runs of the smaller one.")
@click.option(
    "--effect", "effects", multiple=True, help="What matters, such as transport@tokens=4000. Repeatable."
)
@click.option("--delta", type=float, help="Its size in deviations of a run [1]; with --sigma, 0.05 is 5 %.")
@click.option(
    "--sigma", type=float, help="Deviation of a run, relative for a log(); `kvik lab pilot` measures it."
)
@click.option(
    "--power", type=click.FloatRange(0.05, 0.999), default=0.8, show_default=True, help="Wanted power."
)
@click.option(
    "--ratio", type=click.FloatRange(0),
    help="Variance between starts over a run's [the study's, 1]; `kvik lab pilot` measures it.",
)  # fmt: skip
@click.option(
    "--focus", multiple=True,
    help="A term that matters more to a d-optimal plan [the study's]. Repeatable.",
)  # fmt: skip
@click.option("--williams", is_flag=True, help="Order the starts of 2 to 4 arms by a Williams square.")
@click.option("--ran", type=_FILE, help="CSV of rows that ran already: an id, and a column a factor.")
@click.option("--add", "more", type=click.IntRange(1), help="Rows to add to those.")
@click.option(
    "--beginnings", type=click.IntRange(1), default=10, show_default=True, help="Random beginnings a search."
)
@click.option("--schedule", "order", is_flag=True, help="Also print the starts in order, with their runs.")
@click.option("--json", "to_json", is_flag=True, help="Print JSON, the schedule included.")
def plan(
    study: Path,
    runs: int | None,
    compare: bool,
    smaller: int | None,
    effects: tuple[str, ...],
    delta: float | None,
    sigma: float | None,
    power: float,
    ratio: float | None,
    focus: tuple[str, ...],
    williams: bool,
    ran: Path | None,
    more: int | None,
    beginnings: int,
    order: bool,
    to_json: bool,
) -> None:
    """Say what STUDY can tell and what it takes: estimable effects, their errors, power, hours, money."""
    if (ran is None) != (more is None):
        raise click.UsageError("--ran and --add go together: rows that ran, and how many to add")
    try:
        loaded = load_study(study)
        options = Options(
            runs, ratio, delta, power, sigma, effects, focus, beginnings, williams, compare, smaller,
            None if ran is None else _read_rows(ran, loaded), more,
        )  # fmt: skip
        found = plan_study(loaded, options)
    except LabError as error:
        raise click.UsageError(str(error)) from error
    if to_json:
        click.echo(as_json(found))
        return
    console = wide_console()
    print_plan(found, console)
    if order:
        _print_schedule(found, console)


def _print_schedule(found: Plan, console: Console) -> None:
    for number, start in enumerate(found.schedule.starts, 1):
        levels = ", ".join(f"{name}={level}" for name, level in start.levels.items() if level is not None)
        console.print(f"start {number}, block {start.block + 1}: {levels}", highlight=False, markup=False)
        runs = ", ".join(run if run != ANCHOR else f"[{ANCHOR}]" for run in start.runs)
        console.print(f"  {runs}", highlight=False, markup=False)


def _read_rows(path: Path, study: Study) -> pd.DataFrame:
    """Rows with their ids as index; a level that is not there is an empty cell."""
    rows = with_levels(read_cells(path), study.factors)
    if "id" not in rows.columns:
        raise LabError(f"{path}: needs a column id, a column a factor, and a row a run")
    if (lacking := rows["id"].isna()).any():
        raise LabError(f"{path}: row {int(lacking.argmax()) + 1} has no id")
    return rows.set_index("id")
