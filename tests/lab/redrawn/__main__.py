"""`python -m tests.lab.redrawn`: writes the reports."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvik_lab.errors import LabError
from kvik_lab.report.codec import to_json
from kvik_lab.report.html import to_html
from kvik_lab.report.markdown import to_markdown
from tests.lab.redrawn.coverage import items
from tests.lab.redrawn.printed import NAMES
from tests.lab.redrawn.redraw import redraw


@click.command("python -m tests.lab.redrawn")
@click.argument("names", metavar="[S0 S1 ...]", nargs=-1, type=click.Choice(NAMES))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder for NAME.html, NAME.md and NAME.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def articles_command(names: tuple[str, ...], out: Path, as_json: bool) -> None:
    """Redraw five published articles from the numbers that they print, each beside its audit.

    Without names all are written. The list that is printed says what of them is redrawn.
    """
    written: dict[str, list[str]] = {}
    try:
        for name in names or NAMES:
            written[name] = [str(path) for path in write(name, out)]
    except LabError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.UsageError(f"{error.filename}: cannot be written: {error.strerror}") from error
    if as_json:
        entries = [
            {"article": name, "number": item.number, "what": item.what, "by": item.by, "left_out": item.why}
            for name in written
            for item in items(name)
        ]
        click.echo(json.dumps({"files": written, "checklist": entries}, indent=1))
        return
    _show(written)


def write(name: str, out: Path) -> list[Path]:
    """Write one article's report as HTML, Markdown and JSON. Raises OSError."""
    report = redraw(name)
    out.mkdir(parents=True, exist_ok=True)
    texts = {"html": to_html(report), "md": to_markdown(report), "json": to_json(report)}
    paths = []
    for kind, text in texts.items():
        path = out / f"{name}.{kind}"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _show(written: dict[str, list[str]]) -> None:
    for paths in written.values():
        for path in paths:
            click.echo(path)
    table = Table("article", "no.", "what it has", "redrawn by", "what is left out, and why", box=None)
    for name in written:
        for item in items(name):
            by = ", ".join(item.by) or "not redrawn"
            table.add_row(name, str(item.number), item.what, by, item.why)
    Console(markup=False, highlight=False).print(table)


if __name__ == "__main__":
    articles_command()
