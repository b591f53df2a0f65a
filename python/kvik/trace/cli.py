"""The options of ``kvik trace``."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import cast

import click
from rich.console import Console

import kvik
from kvik import TransportName, VerifyName, signals
from kvik.bench.control import join_address, split_address
from kvik.bench.errors import BenchError
from kvik.bench.options import TRANSPORTS, UNITS
from kvik.bench.target import SECRET_VARIABLE, engine_secret, listen
from kvik.bench.writing import writable, write
from kvik.ranges import Range
from kvik.trace import file
from kvik.trace.file import TraceError
from kvik.trace.record import record as take
from kvik.trace.replay import ReplayOptions, Results, execute, target_options
from kvik.trace.show import print_replay, print_summary, replay_json, summary
from kvik.trace.target import ReplayTarget

_WIDTH = 130
_INTERRUPTED = 130

_FILE = click.Path(path_type=Path, dir_okay=False)


def _speed(_context: click.Context, _parameter: click.Parameter, text: str) -> float | None:
    """How many times the recorded pace; None for `max`."""
    if text == "max":
        return None
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed <= 1e6:
        raise click.BadParameter(f"{text!r} is neither max nor a number of times the recorded pace")
    return speed


@click.group()
def trace() -> None:
    """Record which pages an engine moves, look at a recording, and move it again.

    A recording has page ids, sizes and times. It has no data, no secrets and no addresses.
    """


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


@trace.command()
@click.argument("engine", metavar="PID|NAME|ID")
@click.option(
    "--seconds", type=Range(0.1, 7 * 86400.0), default=60.0, show_default=True,
    help="How long to record; Ctrl-C ends it earlier, in order.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=_FILE, required=True, metavar="FILE", help="A file that is not there yet."
)
def record(engine: str, seconds: float, output: Path) -> None:
    """Record the transfers that a running engine begins.

    Nothing is restarted and no option is needed: the engine writes lines while somebody records, and at other
    times it costs one look at a flag a transfer. An engine that only serves others begins none: record its
    readers. One recording of an engine at a time.
    """
    try:
        with signals.noted() as interrupt:
            take(engine, seconds, output, lambda text: click.echo(text, err=True), interrupt)
        found = file.read(output)
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{len(found.moved)} transfers in {output}")
    for notice in found.notices:
        click.echo(notice, err=True)


@trace.command()
@click.argument("path", type=_FILE, metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def show(path: Path, as_json: bool) -> None:
    """Summarise a recording: transfers, sizes, runs of page ids, extents."""
    try:
        found = file.read(path)
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(summary(found), indent=1))
    else:
        print_summary(found, _console())


@trace.command()
@click.argument("path", type=_FILE, metavar="FILE", required=False)
@click.option("--transport", type=click.Choice(list(TRANSPORTS)), default="auto", show_default=True)
@click.option(
    "--speed", callback=_speed, default="max", show_default=True, metavar="X|max",
    help="Times the recorded pace: 1 makes each call when it was made; max as soon as the one before ended.",
)  # fmt: skip
@click.option(
    "--inflight", type=click.IntRange(1, 256), default=1, show_default=True,
    help="With --speed max: transfers in flight at a time.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Times to replay it."
)
@click.option("--channels", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option(
    "--verify", type=click.Choice(["auto", "off", "sample", "full"]), default="auto", show_default=True
)
@click.option("--unit", type=click.Choice(list(UNITS)), default="GB/s", show_default=True)
@click.option(
    "--json", "json_file", metavar="FILE", callback=writable,
    help="Write the results as JSON; - is standard output.",
)  # fmt: skip
@click.option("--secret", callback=engine_secret, help=f"Of both sides; better in {SECRET_VARIABLE}.")
@click.option("--listen", "listen_on", metavar="HOST:PORT", help="Only be the target, for a --target side.")
@click.option("--target", metavar="HOST:PORT", help="Use the target that listens there.")
def replay(
    path: Path | None,
    transport: str,
    speed: float | None,
    inflight: int,
    rounds: int,
    channels: int,
    verify: str,
    unit: str,
    json_file: str | None,
    secret: str | None,
    listen_on: str | None,
    target: str | None,
) -> None:
    """Move the page sets of a recording again, beside memcpy and a plain TCP stream of the same bytes.

    Without --target, the target is a second process on this host. Bytes are compared before all timing.
    Exit status: 0 replayed and checked, 1 a transfer or a check failed, 2 wrong options, 130 interrupted.
    """
    if (path is None) == (listen_on is None) or (listen_on is not None and target is not None):
        raise click.UsageError("give a FILE to replay, or --listen to be the target of one")
    if listen_on is not None and json_file is not None:
        raise click.UsageError("--listen has no results to write: the side with --target has")
    options = ReplayOptions(
        transport=cast(TransportName, transport),
        speed=speed,
        inflight=inflight,
        rounds=rounds,
        channels=channels,
        verify=cast(VerifyName, verify),
    )
    try:
        if listen_on is not None:
            host, _ = split_address(listen_on)
            say = partial(_console().print, markup=False, highlight=False)
            listen(listen_on, target_options(options, join_address(host, 0)), secret, say, ReplayTarget)
        elif path is not None:
            _replay(path, options, target, secret, unit, json_file)
    except (TraceError, BenchError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except kvik.KvikError as error:
        raise click.ClickException(f"{error.code}: {error}") from error
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _replay(
    path: Path,
    options: ReplayOptions,
    target: str | None,
    secret: str | None,
    unit: str,
    json_file: str | None,
) -> None:
    results = Results(options, file.read(path))
    to_stderr = json_file == "-"
    console = Console(stderr=to_stderr)
    console = console if console.is_terminal else Console(stderr=to_stderr, width=_WIDTH)
    for notice in results.trace.notices:
        console.print(notice, style="yellow", markup=False, highlight=False)
    with console.status("starting") as status:
        execute(results, target, secret, lambda text: status.update(text))
    print_replay(results, unit, console)
    if json_file is not None:
        write(json_file, replay_json(results))
