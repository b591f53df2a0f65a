"""Studies that come with the lab: `kvik lab ready` lists them, and writes one here with what goes with it."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import click
import yaml

EXAMPLES = resources.files("kvik_lab.study") / "examples"


def ready_studies() -> dict[str, str]:
    """By name, what each is about."""
    files = {file.name.removesuffix(".yaml"): file for file in EXAMPLES.iterdir()}
    return {
        name: str(yaml.safe_load(file.read_text(encoding="utf-8")).get("about", ""))
        for name, file in sorted(files.items())
        if file.name.endswith(".yaml")
    }


def files_of(name: str) -> list[Traversable]:
    """A study's own file, and those that are called after it."""
    studies = ready_studies()
    own = [file for file in EXAMPLES.iterdir() if file.name == f"{name}.yaml"]
    more = [
        file
        for file in EXAMPLES.iterdir()
        if file.name.startswith(f"{name}-") and file.name.endswith(".json")
    ]
    return own + sorted(more, key=lambda one: one.name) if name in studies else []


@click.command("ready")
@click.argument("name", required=False)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path(), help="Folder; by default this."
)
def ready_command(name: str | None, out: Path) -> None:
    """List the studies that come with the lab; or write the one called NAME here, to be changed and run.

    A file that is there already stays as it is, and nothing is written.
    """
    studies = ready_studies()
    if name is None:
        width = max(map(len, studies))
        click.echo("\n".join(f"{one:<{width}}  {about}" for one, about in studies.items()))
        return
    if name not in studies:
        raise click.UsageError(f"no ready study {name!r}; there are: {', '.join(studies)}")
    files = {out / file.name: file.read_bytes() for file in files_of(name)}
    if there := [path for path in files if path.exists()]:
        raise click.UsageError(f"{there[0]} is there already; take it away, or give another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.write_bytes(content)
            click.echo(path)
    except OSError as error:
        raise click.UsageError(f"{error.filename}: cannot be written: {error.strerror}") from error
