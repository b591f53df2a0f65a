"""`kvik lab load` and `kvik lab import`."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import click

from kvik_lab.errors import LabError
from kvik_lab.load.importers import FORMATS, read_foreign
from kvik_lab.load.run import run
from kvik_lab.load.spec import LoadSpec, parse_spec, read_spec
from kvik_lab.load.summary import lines
from kvik_lab.records import LoadResult, dump, write_whole

_PATH = click.Path(path_type=Path)
_ENDED = 130


@click.command()
@click.option("--spec", "source", type=_PATH, required=True, help="Specification of the load, YAML or JSON.")
@click.option(
    "--out", type=_PATH, required=True, help="File for the result: one JSON object, whole or not there."
)
@click.option("--url", help="The server, instead of the specification's.")
@click.option("--seed", type=click.IntRange(min=0), help="Instead of the specification's.")
@click.option("--quiet", is_flag=True, help="Print nothing.")
def load_command(source: Path, out: Path, url: str | None, seed: int | None, quiet: bool) -> None:
    """Send a load to a server and record what its client sees.

    Ends with 0 when the load was sent, also where requests failed: the record says which, and gates judge it.
    Ends with 2 where the load could not be sent at all, and with 130 when it was told to stop.
    """
    try:
        spec = read_spec(source)
        changes = {"url": url, "seed": seed}
        given = {name: value for name, value in changes.items() if value is not None}
        spec = parse_spec({**spec.model_dump(), **given}, "--url")
        if spec.tool != "builtin":
            raise LabError(f"tool: {spec.tool} sends the load of a study (`kvik lab run`); take it away here")
        result = asyncio.run(_until_told(spec))
        write(out, result)
    except LabError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except asyncio.CancelledError:
        click.echo("stopped before its end; nothing was written", err=True)
        sys.exit(_ENDED)
    if not quiet:
        click.echo("\n".join(lines(result.figures)))


async def _until_told(spec: LoadSpec) -> LoadResult:
    task = asyncio.ensure_future(run(spec))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    return await task


@click.command()
@click.argument("form", type=click.Choice(sorted(FORMATS)))
@click.argument("source", type=_PATH)
@click.option("--out", type=_PATH, required=True, help="File for the result, as `kvik lab load` writes it.")
def import_command(form: str, source: Path, out: Path) -> None:
    """Read what another tool has measured into the form of the lab's own load driver."""
    try:
        write(out, read_foreign(form, source))
    except LabError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


def write(path: Path, result: LoadResult) -> None:
    """Write a result so that the file is whole whenever it is there. Raises `LabError`."""
    try:
        write_whole(path, dump(result))
    except OSError as error:
        raise LabError(
            f"{path}: cannot be written: {error.strerror}; give a path in a folder that is there"
        ) from error
