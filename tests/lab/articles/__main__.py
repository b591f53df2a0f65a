"""`python -m tests.lab.articles FOLDER`: what the audit recognises and finds in the articles of a folder."""

from pathlib import Path

import click

from kvik_lab.audit import audit_text
from tests.lab.articles.listing import articles
from tests.lab.articles.match import match


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", help="Only the article of this name (S0 to S4).")
def main(folder: Path, only: str | None) -> None:
    """Compare the audit of each article that is present with what a person counted in it."""
    for article in articles():
        if only not in (None, article.name):
            continue
        path = folder / article.file
        if not path.exists():
            click.echo(f"{article.name}: {article.file} is not in {folder}")
            continue
        audit = audit_text(path.read_text(encoding="utf-8"), article.name)
        for line in match(article, audit).lines():
            click.echo(line)


if __name__ == "__main__":
    main()
