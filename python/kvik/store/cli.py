"""``kvik store``: a server that keeps KV for engines that come and go, and what it does."""

from __future__ import annotations

import importlib
import json
import signal
import socket
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import kvik
from kvik import _native, logs
from kvik.config import STORE, flags

_WIDTH = 100


class _Group(click.Group):
    """Imports the benchmarks only when they are called: a server has no need of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, without importing anything."""
        return sorted({"bench", *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand."""
        if cmd_name != "bench":
            return super().get_command(ctx, cmd_name)
        command: click.Command = importlib.import_module("kvik.store.bench.cli").bench
        return command


@click.group(cls=_Group)
def store() -> None:
    """Keep KV for engines that come and go."""


@store.command()
@flags.options(STORE)
def serve(**given: Any) -> None:
    """Serve a store to the engines that are admitted, until interrupted."""
    options = flags.chosen(STORE, given)
    logs.to_stderr(options.pop("log_level"), options.pop("log_format"))
    kept = [options.pop(name) for name in ("memory", "log", "log_size")]
    try:
        with kvik.Engine(name="store", **options) as engine:
            server = _native.StoreServer(engine, *kept)
            _until_signalled(f"kvik store serves on {' '.join(engine.addresses)}")
            server.stop()
    except kvik.KvikError as error:
        raise click.ClickException(str(error)) from error


def _until_signalled(ready: str) -> None:
    """Say that it is ready, and return at SIGINT or SIGTERM; must run in the main thread."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        click.echo(ready)
        reader.recv(1)
        signal.set_wakeup_fd(-1)


@store.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def stat(address: str, as_json: bool) -> None:
    """Show what a store has done since it began, and what it has now.

    The secret or TLS that it demands is taken from KVIK_SECRET, KVIK_TLS or the configuration file.
    """
    try:
        with kvik.Engine(name="store-stat") as engine:
            counts = _native.StoreClient.connect(engine, address, None).stat()
    except kvik.KvikError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(counts, indent=1))
        return
    table = Table("what", "number", title=f"store at {address}", title_justify="left")
    for name, value in counts.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    _console().print(table)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)
