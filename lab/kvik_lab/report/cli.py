"""`kvik lab report`."""

from __future__ import annotations

from pathlib import Path

import click

from kvik_lab.errors import LabError
from kvik_lab.infer.table import Columns
from kvik_lab.report.build import build_report
from kvik_lab.report.codec import to_json
from kvik_lab.report.html import to_html
from kvik_lab.report.look import Rules
from kvik_lab.report.markdown import to_markdown
from kvik_lab.report.model import Report
from kvik_lab.report.read import Choice, Data, read

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("report")
@click.argument("files", metavar="DATA...", nargs=-1, required=True, type=_FILE)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Write report.html and report.md here."
)
@click.option("--json", "json_file", type=_FILE, help="Write the report as JSON to this file.")
@click.option("--title", default="Report", show_default=True, help="Title of the report.")
@click.option(
    "--unit",
    help="Unit of the values, where no column unit says it [default: ms]; models take s, ms, us, ns.",
)
@click.option("--arm", help="Column that is compared; by default the files, or a column such as backend.")
@click.option("--base", help="Level of it that the others are compared with; by default the first.")
@click.option("--size", help="Column of the size; by default one named as a unit, such as tokens or mb.")
@click.option("--ignore", multiple=True, help="Column that is no factor; may be given several times.")
@click.option("--margin", type=float, help="Ratio within 1 +- this share counts as equal, such as 0.01.")
@click.option("--alpha", default=0.05, show_default=True, help="Error rate of the page as a whole.")
@click.option("--question", default="", help="What the page answers; by default which arm is better.")
@click.option(
    "--fact", multiple=True, metavar="NAME=TEXT", help="when=, where=, versions=, or more; several times."
)
@click.option("--larger-is-better", is_flag=True, help="Values are rates, not times.")
@click.option("--start", default="start", show_default=True, help="Column of the server start.")
@click.option("--iteration", default="iteration", show_default=True, help="Column of the iteration.")
@click.option("--value", default="value", show_default=True, help="Column of the value.")
@click.option("--block", default="block", show_default=True, help="Column of the block, if any.")
def report_command(
    files: tuple[Path, ...],
    out: Path | None,
    json_file: Path | None,
    title: str,
    unit: str | None,
    arm: str | None,
    base: str | None,
    size: str | None,
    ignore: tuple[str, ...],
    margin: float | None,
    alpha: float,
    question: str,
    fact: tuple[str, ...],
    larger_is_better: bool,
    start: str,
    iteration: str,
    value: str,
    block: str,
) -> None:
    """Make a report of measurements: one HTML file, its Markdown twin, and JSON.

    Each file of DATA is CSV with the columns start, iteration and value; every other column is a factor, but
    those that say the unit, and when, where and with which versions was measured. A value may be a word:
    failed, in progress, not possible, not measured.
    """
    if out is None and json_file is None:
        raise click.UsageError("say where the report goes: --out DIR, --json FILE, or both")
    try:
        data = read(files, Choice(Columns(start, iteration, value, block), arm, size, ignore))
        rules = Rules(_unit(unit, data), base, margin, alpha, not larger_is_better, question, _facts(fact))
        report = build_report(data, rules, title)
    except LabError as error:
        raise click.UsageError(str(error)) from error
    for path in _write(report, out, json_file):
        click.echo(path)


def _unit(given: str | None, data: Data) -> str:
    if given is not None and data.unit is not None and given != data.unit:
        raise LabError(
            f"by the column unit the values are in {data.unit}, and --unit says {given}; leave --unit out"
        )
    return given or data.unit or Rules.unit


def _facts(given: tuple[str, ...]) -> dict[str, str]:
    wrong = [text for text in given if not text.partition("=")[2].strip()]
    if wrong:
        raise LabError(f"--fact {wrong[0]!r} is no NAME=TEXT, such as when=2026-11-20")
    parts = (text.partition("=") for text in given)
    return {name.strip(): text.strip() for name, _, text in parts}


def _write(report: Report, out: Path | None, json_file: Path | None) -> list[Path]:
    files: dict[Path, str] = {}
    if out is not None:
        files = {out / "report.html": to_html(report), out / "report.md": to_markdown(report)}
    if json_file is not None:
        files[json_file] = to_json(report)
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{error.filename}: cannot be written: {error.strerror}") from error
    return list(files)
