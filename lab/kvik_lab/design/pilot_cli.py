"""`kvik lab pilot`: measured variances to numbers of iterations and starts."""

from __future__ import annotations

from pathlib import Path

import click

from kvik_lab.design.cells import read_cells
from kvik_lab.design.pilot import plan_from_pilot, read_pilot, variance_components
from kvik_lab.design.tables import as_json, print_pilot, wide_console
from kvik_lab.errors import LabError
from kvik_lab.infer.judge import Plan


@click.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--cost-restart", type=float, required=True, help="Seconds that a further start costs.")
@click.option("--cost-iteration", type=float, required=True, help="Seconds that a further iteration costs.")
@click.option(
    "--halfwidth", type=float, default=0.03, show_default=True, help="Relative half-width that is wanted."
)
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Of all intervals together.")
@click.option(
    "--comparisons", type=click.IntRange(1), default=1, show_default=True, help="Intervals on the page."
)
@click.option("--paired", is_flag=True, help="Arms will run in pairs of starts, one pair a block.")
@click.option(
    "--warmup", type=click.IntRange(0), default=0, help="Iterations of each start that do not count."
)
@click.option(
    "--value", "value", default="value", show_default=True, help="The column with what was measured."
)
@click.option("--start", "start", default="start", show_default=True, help="The column that names the start.")
@click.option(
    "--iteration", default="iteration", show_default=True, help="The column with the iteration's number."
)
@click.option("--json", "to_json", is_flag=True, help="Print JSON.")
def pilot(
    data: Path,
    cost_restart: float,
    cost_iteration: float,
    halfwidth: float,
    confidence: float,
    comparisons: int,
    paired: bool,
    warmup: int,
    value: str,
    start: str,
    iteration: str,
    to_json: bool,
) -> None:
    """Say how many iterations a start, and how many starts, are worth their time.

    DATA is CSV with a row an iteration: its start, its number, its value, as `kvik lab table` writes it.
    Further columns name the configuration, but block, run, unit, and those that say when, where and with
    which versions was measured; starts of one configuration are compared with each other.
    """
    try:
        frame = read_cells(data)
    except LabError as error:
        raise click.UsageError(str(error)) from error
    try:
        groups, notes = read_pilot(frame, start, iteration, value, warmup)
        parts = variance_components(groups)
        kind = Plan.PAIRED if paired else Plan.GROUPED
        found = plan_from_pilot(
            parts, cost_restart, cost_iteration, halfwidth, warmup, confidence, notes, comparisons, kind
        )
    except LabError as error:
        raise click.UsageError(f"{data}: {error}") from error
    if to_json:
        click.echo(as_json(found))
    else:
        print_pilot(found, wide_console())
