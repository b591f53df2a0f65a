"""`kvik lab effects`: what was measured, by the model that was planned."""

from __future__ import annotations

from pathlib import Path

import click
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvik_lab.design.cells import read_cells, with_levels
from kvik_lab.design.effects import Columns, Effect, Effects, fit_effects
from kvik_lab.design.from_study import study_space
from kvik_lab.design.plan import reachable_model
from kvik_lab.design.tables import as_json, wide_console
from kvik_lab.errors import LabError
from kvik_lab.study import Study, load_study

_FILE = click.Path(path_type=Path)


@click.command("effects")
@click.argument("study", type=_FILE)
@click.argument("data", type=_FILE)
@click.option(
    "--effect", "contrasts", multiple=True,
    help="What matters, such as transport@tokens=4000; as for `kvik lab plan`. Repeatable.",
)  # fmt: skip
@click.option("--value", help="The column with what was measured [the name before the model's ~, or value].")
@click.option("--start", default="start", show_default=True, help="The column that names the start.")
@click.option("--block", default="block", show_default=True, help="The column that names the block.")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Of all intervals together.")
@click.option("--json", "to_json", is_flag=True, help="Print JSON.")
def effects_command(
    study: Path,
    data: Path,
    contrasts: tuple[str, ...],
    value: str | None,
    start: str,
    block: str,
    confidence: float,
    to_json: bool,
) -> None:
    """Estimate the effects of STUDY's model from DATA, against the strata that its plan has.

    DATA is CSV with a row a run or an iteration: a column for each factor, which is empty where the factor
    does not exist, one with what was measured, and `start` where iterations share one; `kvik lab table`
    writes it so. Leave warm-up out.
    """
    try:
        loaded = load_study(study)
        found = study_effects(
            loaded,
            with_levels(read_cells(data), loaded.factors),
            contrasts,
            Columns(value, start, block),
            confidence,
        )
    except LabError as error:
        raise click.UsageError(str(error)) from error
    if to_json:
        click.echo(as_json(found))
    else:
        _print(loaded.name, found)


def study_effects(
    study: Study,
    data: pd.DataFrame,
    contrasts: tuple[str, ...] = (),
    columns: Columns = Columns(),  # noqa: B008 - frozen
    level: float = 0.95,
) -> Effects:
    """The effects of a study: those that are asked for, else each factor's own."""
    if study.model is None:
        raise LabError(f"{study.file}: no model, so nothing says what is estimated; add `model: ...`")
    model = reachable_model(study.model, study_space(study)).model
    return fit_effects(model, data, contrasts, columns, level)


def _print(name: str, found: Effects) -> None:
    console = wide_console()
    kind = "ratio" if found.logarithmic else "difference"
    table = Table(box=SIMPLE_HEAD, title=f"{name}: {found.response}", title_justify="left")
    for column in ("contrast", kind, f"{found.level:.0%} interval", "p", "df", "judged against"):
        table.add_column(column, no_wrap=True)
    for one in found.effects:
        table.add_row(*_cells(one))
    console.print(table, highlight=False, markup=False)
    shared = f" in {found.starts} starts" if found.starts < found.runs else ""
    told = f"{found.runs} rows{shared}; all intervals hold together in {found.level:.0%} of such experiments"
    told += ", each p is of its contrast alone"
    for line in (told, *(f"- {note}" for note in found.notes)):
        console.print(line, highlight=False, markup=False)


def _cells(one: Effect) -> tuple[str, ...]:
    interval = f"{one.low:.4g} to {one.high:.4g}"
    return (one.contrast, f"{one.value:.4g}", interval, f"{one.p:.2g}", f"{one.df:.3g}", one.stratum)
