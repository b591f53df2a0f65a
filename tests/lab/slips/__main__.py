"""`python -m tests.lab.slips DOCUMENT...`: the mutation score of documents with marks beside them."""

from __future__ import annotations

from pathlib import Path

import click

from tests.lab.slips.score import Score, score


@click.command()
@click.argument("marks", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--folder", type=click.Path(exists=True, path_type=Path), help="Where the documents are.")
@click.option("--missed", is_flag=True, help="List the slips that were not found.")
def main(marks: tuple[Path, ...], folder: Path | None, missed: bool) -> None:
    """Change each marked number of each document in four ways, and count what the audit finds."""
    total = Score()
    for path in marks:
        one = score(path, folder or path.parent)
        total += one
        click.echo("\n".join([path.stem, *one.lines()]))
        if missed:
            click.echo("\n".join(f"    {line}" for line in one.missed))
    if len(marks) > 1:
        click.echo("\n".join(["all", *total.lines()]))


if __name__ == "__main__":
    main()
