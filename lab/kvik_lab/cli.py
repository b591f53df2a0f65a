"""`kvik lab`: its subcommands, each imported when it is called. `kvik` finds it by its entry point."""

from __future__ import annotations

import click

from kvik.cli import Entry, LazyGroup

SUBCOMMANDS: dict[str, Entry] = {
    "advise": Entry("kvik_lab.physics.cli", "advise_command", "Say which transport to use for a model's KV."),
    "audit": Entry(
        "kvik_lab.audit.command", "audit", "Recompute published tables and the claims beside them."
    ),
    "check": Entry("kvik_lab.study.cli", "check", "Check a study file, and say what it comes to."),
    "compare": Entry("kvik_lab.infer.cli", "compare_command", "Compare two configurations' measurements."),
    "crossover": Entry(
        "kvik_lab.physics.cli", "crossover_command", "Find where two transports take as long."
    ),
    "effects": Entry(
        "kvik_lab.design.effects_cli", "effects_command", "Estimate the effects of a study's model from data."
    ),
    "fit": Entry("kvik_lab.physics.cli", "fit_command", "Fit models of transfer time to measurements."),
    "gate": Entry("kvik_lab.gates.cli", "gate_command", "Judge runs: valid, suspect or invalid, and why."),
    "import": Entry(
        "kvik_lab.load.cli", "import_command", "Read what another tool has measured into a record's form."
    ),
    "load": Entry("kvik_lab.load.cli", "load_command", "Send a load, and record what its client sees."),
    "mlflow": Entry("kvik_lab.tracking.cli", "mlflow_command", "Bring a journal into MLflow."),
    "pilot": Entry("kvik_lab.design.pilot_cli", "pilot", "Say how many starts and iterations to take."),
    "plan": Entry("kvik_lab.design.plan_cli", "plan", "Say what a study can tell and costs, before it runs."),
    "predicted": Entry(
        "kvik_lab.report.predicted",
        "predicted_command",
        "Compare what a move changed with the doctor's prediction.",
    ),
    "ready": Entry("kvik_lab.study.ready", "ready_command", "List ready studies, or write one here."),
    "report": Entry("kvik_lab.report.cli", "report_command", "Write a report of measurements."),
    "resume": Entry("kvik_lab.run.cli", "resume", "Go on with a study that was interrupted."),
    "run": Entry("kvik_lab.run.cli", "run", "Run a study: servers, loads, verdicts, a journal."),
    "schema": Entry("kvik_lab.study.cli", "schema", "Print the JSON schema of study files."),
    "series": Entry("kvik_lab.infer.cli", "series_command", "Find changes and the steady state of series."),
    "status": Entry("kvik_lab.run.cli", "status", "Say how far a study is."),
    "table": Entry("kvik_lab.records.cli", "table_command", "Write one metric of a journal as CSV."),
    "tasks": Entry("kvik_lab.tasks.cli", "tasks", "Make, read and run task files."),
}


@click.group(cls=LazyGroup, entries=SUBCOMMANDS)
def lab() -> None:
    """Design experiments, audit tables, and draw conclusions that hold."""
