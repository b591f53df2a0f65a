"""``kvik config``: what counts, and where it comes from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvik.config import file as files
from kvik.config.resolve import Setting, Surroundings, look_around, settings
from kvik.config.schema import Entry
from kvik.config.tables import ENTRIES
from kvik.errors import InvalidArgument


class _Refused(click.ClickException):
    """The configuration cannot be used."""

    exit_code = 2


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--verbose", is_flag=True, help="Say of each option what it is, in which unit, and why.")
@click.pass_context
def config(ctx: click.Context, as_json: bool, verbose: bool) -> None:
    """Show each option with its value and where that comes from.

    An option given directly (argument, flag, extra config) counts before its variable, that before the
    configuration file, that before the default. The file is the one that KVIK_CONFIG names, else
    ~/.config/kvik/config.toml.
    """
    if ctx.invoked_subcommand is None:
        _show(ENTRIES, as_json, verbose)


def _command(entry: Entry) -> click.Command:
    @click.command(entry.name, help=f"The options of {entry.title}.", short_help=entry.title)
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @click.option("--verbose", is_flag=True, help="Say of each option what it is, in which unit, and why.")
    @click.pass_context
    def command(ctx: click.Context, as_json: bool, verbose: bool) -> None:
        above = ctx.parent.params if ctx.parent else {}
        _show((entry,), as_json or above.get("as_json", False), verbose or above.get("verbose", False))

    return command


for _entry in ENTRIES:
    config.add_command(_command(_entry))


@config.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
def check(path: Path) -> None:
    """Check a configuration file as if KVIK_CONFIG named it: with all other variables as they are.

    A variable counts before the file, and may be wrong itself, or not fit to what the file says.
    """
    around = look_around({**os.environ, files.VARIABLE: str(path)})
    problems: list[str] = []
    for entry in ENTRIES:
        try:
            settings(entry, around=around)
        except InvalidArgument as error:
            problems += str(error).splitlines()
    if problems:
        raise _Refused("\n".join(dict.fromkeys(problems)))  # several entry points may take one option
    many = len(around.file.values) if around.file else 0
    click.echo(f"{path}: {many} option{'' if many == 1 else 's'}, nothing wrong")


def _show(entries: tuple[Entry, ...], as_json: bool, verbose: bool) -> None:
    around = look_around()
    try:
        found = {entry: settings(entry, around=around) for entry in entries}
    except InvalidArgument as error:
        raise _Refused(str(error)) from error
    if as_json:
        click.echo(json.dumps(_document(found, around), indent=2))
        return
    console = Console(highlight=False, soft_wrap=False)
    console.print(Text(f"configuration file: {around.path or 'none'}"), style="dim")
    for entry, its in found.items():
        console.print()
        console.print(_table(entry, its, around, verbose))


def _table(entry: Entry, found: tuple[Setting, ...], around: Surroundings, verbose: bool) -> Table:
    table = Table(title=entry.title, title_justify="left", expand=False, show_lines=verbose)
    table.add_column("option", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold", style="dim")
    for one in found:
        told = Text(one.option.name)
        value = Text(one.option.shown(one.value))
        if verbose:
            about = f"\n{one.option.help} {one.option.reason}\n"
            value.append(about, style="dim")
            value.append(f"{one.option.variable}; {one.option.key}{_unit(one)}", style="dim")
        table.add_row(told, value, Text(_source(one, around)))
    return table


def _unit(one: Setting) -> str:
    return f"; {one.option.kind.unit}" if one.option.kind.unit else ""


def _source(one: Setting, around: Surroundings) -> str:
    """The file by its name only: its path is above the tables."""
    if around.path and one.source.startswith(str(around.path)):
        return around.path.name + one.source.removeprefix(str(around.path))
    return one.source


def _document(found: dict[Entry, tuple[Setting, ...]], around: Surroundings) -> dict[str, Any]:
    return {
        "file": None if around.path is None else str(around.path),
        "options": {entry.name: {one.option.name: _one(one) for one in its} for entry, its in found.items()},
    }


def _one(one: Setting) -> dict[str, Any]:
    hidden = one.option.kind.secret and one.value is not None
    return {
        "value": one.option.shown(one.value) if hidden else one.value,
        "source": one.source,
        "variable": one.option.variable,
        "key": one.option.key,
        "unit": one.option.kind.unit,
    }
