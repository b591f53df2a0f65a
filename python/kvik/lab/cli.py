"""`kvik lab`: its subcommands, each imported when it is called."""

from __future__ import annotations

import click

from kvik.cli import Entry, load, write_commands

SUBCOMMANDS: dict[str, Entry] = {
    "advise": Entry("kvik.lab.physics.cli", "advise_command", "Say which transport to use for a model's KV."),
    "articles": Entry(
        "kvik.lab.articles.command", "articles_command", "Redraw five published articles beside their audit."
    ),
    "audit": Entry(
        "kvik.lab.audit.command", "audit", "Recompute published tables and the claims beside them."
    ),
    "check": Entry("kvik.lab.study.cli", "check", "Check a study file, and say what it comes to."),
    "compare": Entry("kvik.lab.infer.cli", "compare_command", "Compare two configurations' measurements."),
    "crossover": Entry(
        "kvik.lab.physics.cli", "crossover_command", "Find where two transports take as long."
    ),
    "fit": Entry("kvik.lab.physics.cli", "fit_command", "Fit models of transfer time to measurements."),
    "pilot": Entry("kvik.lab.design.pilot_cli", "pilot", "Say how many starts and iterations to take."),
    "plan": Entry("kvik.lab.design.plan_cli", "plan", "Say what a study can tell and costs, before it runs."),
    "report": Entry("kvik.lab.report.cli", "report_command", "Write a report of measurements."),
    "schema": Entry("kvik.lab.study.cli", "schema", "Print the JSON schema of study files."),
    "series": Entry("kvik.lab.infer.cli", "series_command", "Find changes and the steady state of series."),
    "tasks": Entry("kvik.lab.tasks.cli", "tasks", "Make, read and run task files."),
}

_EXTRA = {"pandas", "plotly", "pydantic", "scipy", "statsmodels", "yaml"}


class LabGroup(click.Group):
    """A group that knows its subcommands by name, and which package brings what they import."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """All names, without importing anything."""
        return sorted(SUBCOMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand."""
        entry = SUBCOMMANDS.get(cmd_name)
        if entry is None:
            return None
        try:
            return load(entry)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _EXTRA:
                raise
            raise click.ClickException(
                f"`kvik lab {cmd_name}` needs {error.name}, which is not installed: pip install 'kvik[lab]'"
            ) from error

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands from what is known here."""
        write_commands(formatter, SUBCOMMANDS)


@click.group(cls=LabGroup)
def lab() -> None:
    """Design experiments, audit tables, and draw conclusions that hold."""
