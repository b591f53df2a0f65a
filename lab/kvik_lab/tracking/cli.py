"""`kvik lab mlflow`."""

from __future__ import annotations

from pathlib import Path

import click

from kvik_lab.errors import LabError
from kvik_lab.tracking.deliver import AwayError, bring


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--to",
    "uri",
    metavar="URI",
    help="Of MLflow's tracking server; by default MLFLOW_TRACKING_URI, or FOLDER/mlflow.db.",
)
def mlflow_command(folder: Path, uri: str | None) -> None:
    """Bring the journal in FOLDER into MLflow: study, starts and runs, nested, with every value of a series.

    What is there already is not brought again, and what was interrupted is completed; so it can be said as
    often as one likes. Exits 1 where the server is away and another try may help.
    """
    try:
        to, runs = bring(folder, uri)
    except AwayError as error:
        raise click.ClickException(f"{error}. What was brought stays; say this command again.") from error
    except LabError as error:
        raise click.UsageError(str(error)) from error
    count = "1 run is" if runs == 1 else f"{runs} runs are"
    click.echo(f"{count} in MLflow at {to.shown}, experiment {to.experiment}")
