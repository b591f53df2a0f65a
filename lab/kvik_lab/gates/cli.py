"""`kvik lab gate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from kvik_lab.errors import LabError
from kvik_lab.gates.judge import GATES, judge_study
from kvik_lab.records import Gate, RunRecord, append, read
from kvik_lab.run.journal import RUNS, is_running

_PATH = click.Path(path_type=Path)
FAILED, INVALID = 2, 3


@click.command()
@click.argument("records", nargs=-1, required=True, type=_PATH)
@click.option(
    "--gate", "chosen", multiple=True, type=click.Choice(sorted(GATES)), help="Only this gate; repeatable."
)
@click.option("--out", type=_PATH, help="Append the records with their verdicts to this file.")
@click.option("--all", "everything", is_flag=True, help="Show what passed and what was not checked, too.")
def gate_command(records: Sequence[Path], chosen: Sequence[Gate], out: Path | None, everything: bool) -> None:
    """Judge the runs of a journal, each beside the others: valid, suspect or invalid, with the reason.

    Ends with 0, with 3 where a run is invalid, and with 2 where records cannot be read or written.
    """
    try:
        if out is not None and out.name == RUNS and is_running(out.parent):
            raise LabError(f"{out}: a study that runs writes there; wait for its end, or give another --out")
        judged = judge_study(read(records), chosen or tuple(GATES))
        for record in judged:
            if out is not None:
                append(out, record)
            click.echo("\n".join(lines(record, everything=everything)))
    except (LabError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(FAILED)
    click.echo(_counted(judged))
    sys.exit(INVALID if any(record.verdict == "invalid" for record in judged) else 0)


def lines(record: RunRecord, *, everything: bool = False) -> list[str]:
    """A run's verdict, and below it each finding that is behind it with what to do."""
    levels = ", ".join(f"{name}={level}" for name, level in record.levels.items() if level is not None)
    verdict = record.verdict or record.outcome
    shown = [f"{verdict:<8} {record.id}  {levels}"]
    for finding in record.findings:
        if everything or finding.status in ("suspect", "invalid"):
            shown.append(f"    {finding.gate} {finding.status}: {finding.what}")
            if finding.remedy:
                shown.append(f"       -> {finding.remedy}")
    return shown


def _counted(judged: Sequence[RunRecord]) -> str:
    parts = []
    for verdict in ("valid", "suspect", "invalid"):
        parts.append(f"{sum(record.verdict == verdict for record in judged)} {verdict}")
    rest = sum(record.verdict is None for record in judged)
    return ", ".join(parts) + (f", {rest} not completed" if rest else "")
