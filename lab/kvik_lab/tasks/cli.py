"""``kvik lab tasks``: task files made from a study, read back as a plan, and run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvik_lab.errors import LabError
from kvik_lab.study.load import load_study
from kvik_lab.tasks.exporting import export_tasks
from kvik_lab.tasks.importing import ImportedPlan, import_plan
from kvik_lab.tasks.runner import RunOptions, command_line, dry_run, run_task_file, stop_task_file

_TABLE_WIDTH = 110  # narrower terminals wrap lines and lose no digit
_SHOWN = 12  # levels of one variable in the table
_INTERRUPTED = 130


@click.group()
def tasks() -> None:
    """Make, read and run task files: JSON definitions of shell commands with variables."""


@tasks.command()
@click.argument("study", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write into.")
@click.option("--template", type=click.Path(path_type=Path), help="Template instead of the built-in one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def export(study: Path, out: Path, template: Path | None, as_json: bool) -> None:
    """Write the task files of every pattern of a layered study."""
    try:
        loaded = load_study(study)
        made = export_tasks(loaded, out, template)
        broken = {row.id: loaded.violations(row.levels) for row in loaded.design.patterns}
    except LabError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps([str(path) for path in made], indent=2))
    else:
        click.echo(f"{len(made)} task files in {out}")
    for name, found in broken.items():
        for violation in found:
            click.echo(f"infeasible, and written all the same: {name}: {violation}", err=True)


@tasks.command(name="import")
@click.argument("places", metavar="DIR|FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def import_(places: tuple[Path, ...], as_json: bool) -> None:
    """Print the plan that task files are: what varies between them, and what does not."""
    try:
        plan = import_plan(places)
    except LabError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(_as_json(plan), indent=2))
    else:
        _print(plan)


@tasks.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--from", "start", metavar="ID", help="Task to begin with, whatever was done before.")
@click.option("--reset", is_flag=True, help="Forget what was done before, and end what still runs of it.")
@click.option("--dry-run", "dry", is_flag=True, help="Print the commands with their variables; run nothing.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0), default=3600.0, show_default=True,
    help="Seconds that one command may take; 0 for no limit.",
)  # fmt: skip
@click.option("--state", type=click.Path(path_type=Path), help="Folder of states and logs.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON at the end; progress goes to standard error."
)
def run(
    file: Path, start: str | None, reset: bool, dry: bool, timeout_s: float, state: Path | None, as_json: bool
) -> None:
    """Run a task file from the first task that has not succeeded.

    Exits 1 when a command fails, or its state cannot be written, and 130 when it is interrupted.
    """
    try:
        if dry:
            click.echo(dry_run(file, start))
            return
        signal.signal(signal.SIGTERM, _interrupt)
        options = RunOptions(start, reset, timeout_s or None, state)
        outcome = run_task_file(file, options, lambda line: click.echo(line, err=as_json))
    except LabError as error:
        raise click.UsageError(str(error)) from error
    except BrokenPipeError:
        raise  # who read what is said here has left
    except OSError as error:
        raise click.ClickException(
            f"{error.filename or state or 'the state'}: {error.strerror or error}; what was done before is "
            f"kept. Mend that (make room on a disk that is full), and run the same command: it goes on"
        ) from error
    except KeyboardInterrupt:
        click.echo("interrupted; run the same command to go on with this task", err=True)
        raise click.exceptions.Exit(_INTERRUPTED) from None
    if as_json:
        click.echo(json.dumps({**vars(outcome), "log": str(outcome.log)}, indent=2))
    else:
        for name, groups in outcome.running.items():
            numbers = ", ".join(map(str, groups))
            ends = command_line("stop", file, state)
            click.echo(f"{name}: still running as process group {numbers}; {ends} ends it")
    if outcome.failed is not None:
        click.echo(outcome.text, err=True)
        raise click.exceptions.Exit(1)


@tasks.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--state", type=click.Path(path_type=Path), help="Folder of states and logs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stop(file: Path, state: Path | None, as_json: bool) -> None:
    """End what a task file's commands left running, by the process groups that were recorded."""
    try:
        ended = stop_task_file(file, state)
    except LabError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(ended, indent=2))
        return
    for name, groups in ended.items():
        click.echo(f"{name}: ended process group {', '.join(map(str, groups))}")
    if not ended:
        click.echo("nothing of it runs")


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _as_json(plan: ImportedPlan) -> dict[str, object]:
    return {
        "patterns": list(plan.patterns),
        "constants": dict(plan.constants),
        "by_part": {name: dict(values) for name, values in plan.by_part.items()},
        "labels": list(plan.labels),
        "factors": {name: list(levels) for name, levels in plan.factors.items()},
        "alone": list(plan.alone),
        "alike": dict(plan.alike),
        "files": [
            {"path": str(one.path), "pattern": one.pattern, "part": one.part, "levels": dict(one.levels)}
            for one in plan.files
        ],
    }


def _print(plan: ImportedPlan) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, _TABLE_WIDTH)
    grid = Table(title="what varies", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("variable", "values", "which"):
        grid.add_column(heading)
    for name, levels in plan.factors.items():
        shown = ", ".join(levels[:_SHOWN]) + (", ..." if len(levels) > _SHOWN else "")
        grid.add_row(escape(name), str(len(levels)), escape(shown))
    console.print(grid)
    lines = [f"{len(plan.patterns)} patterns in {len(plan.files)} files"]
    lines += [f"constant: {name} = {value}" for name, value in plan.constants.items()]
    for name, values in plan.by_part.items():
        lines.append(f"by part: {name} = " + ", ".join(f"{value} ({part})" for part, value in values.items()))
    lines += [f"names its pattern: {name}" for name in plan.labels]
    for one in plan.files:
        levels_ = ", ".join(f"{name} = {value}" for name, value in one.levels.items() if name in plan.factors)
        lines.append(f"{one.pattern}{' (consumer)' if one.part == 'consumer' else ''}: {levels_}")
    lines += [f"the same as an earlier one: {name} = {first}" for name, first in plan.alike.items()]
    lines += [f"a consumer alone: {name}" for name in plan.alone]
    for line in lines:
        console.print(line, markup=False)
