"""`kvik lab audit`: recompute published tables and say what does not follow."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from kvik_lab.audit import Audit, Check, audit_files
from kvik_lab.errors import LabError


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--all", "everything", is_flag=True, help="List what follows too, not only what does not.")
@click.pass_context
def audit(context: click.Context, files: tuple[Path, ...], as_json: bool, everything: bool) -> None:
    """Recompute the derived cells and claims of tables in Markdown, HTML or CSV.

    Exit status: 0 when all follows, 1 when something does not, 2 when a file cannot be read.
    """
    try:
        result = audit_files(files)
    except LabError as error:
        raise click.UsageError(str(error)) from error
    checks = result.checks if everything else result.findings
    if as_json:
        shown = {
            "counts": counts(result),
            "checks": [asdict(check) for check in checks],
        }
        click.echo(json.dumps(shown, ensure_ascii=False, indent=2))
    else:
        _print(result, checks)
    context.exit(1 if result.findings else 0)


def counts(result: Audit) -> dict[str, int]:
    """How much was read, recognised and found."""
    return {
        "tables": len(result.tables),
        "cells": result.cells,
        "derived_cells": sum(check.kind == "cell" for check in result.checks),
        "claims": sum(check.kind == "claim" for check in result.checks),
        "findings": len(result.findings),
    }


def _print(result: Audit, checks: tuple[Check, ...]) -> None:
    """As compilers do: a line with the place, then the reason, so that editors and grep find both."""
    for check in checks:
        outcome = "holds" if check.holds else f"follows {check.follows}"
        click.echo(f"{_where(check)}: printed {check.printed}, {outcome}")
        click.echo(f"    {check.text}")
        if check.diagnosis:
            click.echo(f"    looks like: {check.diagnosis}")
    click.echo(", ".join(f"{value} {name.replace('_', ' ')}" for name, value in counts(result).items()))


def _where(check: Check) -> str:
    place = check.place
    where = f"{Path(place.document).name}:{place.line}"
    if place.table is None:
        return where
    return f"{where}: table {place.table + 1}, row {(place.row or 0) + 1}, column {(place.column or 0) + 1}"
