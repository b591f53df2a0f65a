"""Files that a benchmark writes when it has ended: what cannot be written is refused before it begins."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click


def writable(_ctx: click.Context, _param: click.Parameter, given: str | None) -> str | None:
    """The path of a click option, or `-` for standard output.

    Raises click's BadParameter where no file can be written there; nothing is written.
    """
    if given is None or given == "-":
        return given
    path = Path(given).absolute()
    if path.is_dir():
        raise click.BadParameter(f"{given} is a folder; name a file")
    if not path.parent.is_dir():
        raise click.BadParameter(f"no folder for {given}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{given} cannot be written")
    return given


def write(given: str, content: object) -> None:
    """Write it as JSON to what `writable` let through. Raises click's ClickException."""
    text = json.dumps(content, indent=1) + "\n"
    try:
        if given == "-":
            click.echo(text, nl=False)
        else:
            Path(given).write_text(text, encoding="utf-8")
    except OSError as error:
        if given == "-":
            raise  # as of all that standard output does not take
        raise click.ClickException(f"{given}: {error.strerror}") from error
