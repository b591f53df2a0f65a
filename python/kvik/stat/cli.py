"""The options of ``kvik stat``."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvik.ranges import Range
from kvik.stat import engines
from kvik.stat.engines import StatError
from kvik.stat.show import WIDTH, engine_list, view
from kvik.stat.snapshot import Rates, Snapshot, merged, rates


def _look(engine: str) -> Snapshot:
    return Snapshot(*engines.snapshot(engine))


def _watch(engine: str, interval: float) -> Iterator[Rates]:
    """Rates, one after each interval. Ends with the engine."""
    before = _look(engine)
    pause = threading.Event()
    while True:
        pause.wait(interval)
        try:
            after = _look(engine)
        except StatError:
            if engine not in engines.names():
                return
            raise
        yield rates(before, after)
        before = after


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _list(as_json: bool) -> None:
    found, silent = engines.engines()
    if as_json:
        click.echo(json.dumps([about.to_json() for about in found], indent=1))
    elif found:
        _console().print(engine_list(found))
    elif silent:
        click.echo("no engine of this user answers in this network namespace")
    else:
        click.echo("no engine of this user runs in this network namespace")
    for why in silent:
        click.echo(f"not shown: {why}", err=True)


def _write(text: str) -> None:
    """As it is, also what looks like colours in a name, which `echo` would leave out of a pipe."""
    click.echo(text, nl=False, color=True)


def _prometheus(wanted: str | None) -> None:
    if wanted is not None:
        _write(engines.snapshot(engines.find(wanted).engine)[1])
        return
    snapshots = []
    found, silent = engines.engines()
    for about in found:
        try:
            snapshots.append(engines.snapshot(about.engine))
        except StatError as error:  # It has ended since.
            silent.append(str(error))
    for why in silent:
        click.echo(f"not shown: {why}", err=True)
    _write(merged(snapshots))


def _show(wanted: str, interval: float, once: bool, as_json: bool) -> None:
    about = engines.find(wanted)
    watched = _watch(about.engine, interval)
    if as_json or once:
        now = next(watched, None)
        if now is None:
            raise StatError(f"engine {about.title} has ended")
        if as_json:
            click.echo(json.dumps(now.to_json(), indent=1))
        else:
            _console().print(view(now))
        return
    with Live(console=_console(), auto_refresh=False) as live:
        live.update(Text(f"{about.title}: looking for {interval:g} s"), refresh=True)
        for now in watched:
            live.update(view(now), refresh=True)
    click.echo(f"engine {about.title} has ended")


@click.command()
@click.argument("engine", required=False, metavar="[PID|NAME|ID]")
@click.option(
    "--interval",
    type=Range(0.1, 3600.0),
    default=1.0,
    show_default=True,
    help="Seconds between two looks; rates are means over them.",
)
@click.option("--once", is_flag=True, help="Show the rates of one interval, and end.")
@click.option("--json", "as_json", is_flag=True, help="As --once, or the list of engines, in JSON.")
@click.option(
    "--prometheus",
    is_flag=True,
    help="Print the metrics themselves; without an engine those of all, labelled.",
)
def stat(engine: str | None, interval: float, once: bool, as_json: bool, prometheus: bool) -> None:
    """Show what the engines of this user are doing.

    Without an engine, those that run are listed. With one (its process number, its name, or at least four
    digits of its id), a live view of it is shown until Ctrl-C. Engines in another network namespace, such as
    another container, are not seen: run this inside it.
    """
    if prometheus and (once or as_json):
        raise click.UsageError("--prometheus goes without --once and --json")
    if once and engine is None:
        raise click.UsageError("--once shows one engine: name it by process number, name or id")
    try:
        if prometheus:
            _prometheus(engine)
        elif engine is None:
            _list(as_json)
        else:
            _show(engine, interval, once, as_json)
    except StatError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        return
