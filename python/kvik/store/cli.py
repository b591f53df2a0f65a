"""``kvik store``: a server that keeps KV for engines that come and go, and what it does."""

from __future__ import annotations

import contextlib
import importlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

import kvik
from kvik import _native, logs, signals
from kvik.config import OBJECT, STORE, flags
from kvik.ranges import Range
from kvik.stat.snapshot import Samples
from kvik.store import scrape
from kvik.store.figures import Figures, figures
from kvik.store.names import StoreOptions
from kvik.store.show import WIDTH, view
from kvik.store.tenants import Tenant

DEFAULT_ADDRESS: str = next(option.default[0] for option in STORE.options if option.name == "listen")
"""Where `serve` listens unless told."""


class _Group(click.Group):
    """Imports the benchmarks and the doctor only when they are called: a server has no need of them."""

    _LATE = ("bench", "doctor")

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, without importing anything."""
        return sorted({*self._LATE, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand."""
        if cmd_name not in self._LATE:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(importlib.import_module(f"kvik.store.{cmd_name}.cli"), cmd_name)
        return command


@click.group(cls=_Group)
def store() -> None:
    """Keep KV for engines that come and go.

    `serve` runs a store; engines use it by `kvik.Store.connect(engine, "HOST:PORT", ...)`, `stat` shows what
    it does, and `doctor` what its servers hold and what is wrong.
    """


@store.command()
@click.option(
    "--etcd",
    metavar="URL",
    help="Enter this server in etcd, for clients that follow the servers there: http://HOST:PORT/PREFIX, or "
    "https, with a lease of ten seconds. Certificates and user: ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY, "
    "ETCDCTL_USER, ETCDCTL_PASSWORD.",
)
@click.option(
    "--etcd-name",
    metavar="HOST:PORT",
    help="What it is called in etcd, where clients resolve it: a name that stays when its address changes, "
    "so that it keeps its share of the blocks. Default: the first address that it advertises.",
)
@flags.options(STORE)
@flags.options(OBJECT)
def serve(etcd: str | None, etcd_name: str | None, **given: Any) -> None:
    """Serve a store to the engines that are admitted, until interrupted."""
    if etcd_name is not None and etcd is None:
        raise click.UsageError("--etcd-name goes with --etcd")
    sizes = {size: given[f"{size}_size"] for size in ("log", "object")}
    below = {name: given.pop(name) for name in OBJECT.defaults()}
    options = flags.chosen(STORE, given)
    logs.to_stderr(options.pop("log_level"), options.pop("log_format"))
    tenants = [Tenant.parse(text) for text in options.pop("tenant") or ()]
    kept = {name: options.pop(name) for name in ("memory", "log", "log_size", "policy")}
    kept |= flags.chosen(OBJECT, below)
    for tier, size in sizes.items():
        if size is not None and kept[tier] is None:
            raise click.UsageError(f"--{tier}-size goes with --{tier}")
    metrics = options.pop("metrics") or ()
    closing = contextlib.ExitStack()
    with flags.telling(OSError), closing as until_closed, kvik.Engine(name="store", **options) as engine:
        server = _native.StoreServer(engine, StoreOptions(tenants=tenants, **kept))
        with scrape.serving(metrics, lambda: server.metrics() + engine.metrics()) as bound:
            pages = "".join(f", metrics on http://{address}/metrics" for address in bound)
            ready = f"kvik store serves on {' '.join(engine.addresses)}{pages}"
            if etcd is not None:
                server.enter(etcd, etcd_name or engine.addresses[0])
            signalled = until_closed.enter_context(signals.ending())
            click.echo(ready)
            signalled()
        server.stop()


@store.command()
@click.argument("address", metavar="[HOST:PORT]", default=DEFAULT_ADDRESS)
@click.option(
    "--interval",
    type=Range(0.1, 3600.0),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Show what happened in one interval, and end.")
@click.option("--json", "as_json", is_flag=True, help="As --once, as one JSON object.")
@click.option("--prometheus", is_flag=True, help="Print the metrics themselves.")
def stat(address: str, interval: float, once: bool, as_json: bool, prometheus: bool) -> None:
    """Show what a store is doing: tiers, tenants, times, refusals.

    HOST:PORT is what `kvik store serve` said that it serves on; without it, 127.0.0.1:7500. Of a store of
    several servers it is what its clients are given: addresses with commas between them, file:PATH,
    dns:NAME:PORT or etcd:http://HOST:PORT/PREFIX. Then the figures are sums, with a line for each server.

    Without --once the view stays and is renewed until Ctrl-C. The secret or TLS that the store demands is
    taken from KVIK_SECRET, KVIK_TLS or the configuration file.
    """
    if prometheus and (once or as_json):
        raise click.UsageError("--prometheus goes without --once and --json")
    interrupted = contextlib.suppress(KeyboardInterrupt)
    with interrupted, flags.telling(), kvik.Engine(name="store-stat") as engine:
        client = _native.StoreClient.connect(engine, [address], 1, None)
        if prometheus:
            click.echo(client.metrics(), nl=False)
            return
        watched = _watch(client, address, interval)
        if as_json:
            click.echo(json.dumps(next(watched).to_json(), indent=1))
        elif once:
            _console().print(view(next(watched)))
        else:
            with Live(console=_console(), auto_refresh=False) as live:
                live.update(_looking(address, interval), refresh=True)
                for now in watched:
                    live.update(view(now), refresh=True)


def _watch(client: _native.StoreClient, address: str, interval: float) -> Iterator[Figures]:
    """What a store did, again after each interval, until it does not answer."""
    before, looked = Samples(client.metrics()), time.monotonic()
    pause = threading.Event()
    while True:
        pause.wait(interval)
        after, now = Samples(client.metrics()), time.monotonic()
        members = client.members()
        up = {name: answers for name, answers, _ in members} if len(members) > 1 else None
        yield figures(address, before, after, now - looked, up)
        before, looked = after, now


def _looking(address: str, interval: float) -> Text:
    """Until there is something to be seen. As it is: rich takes `[fd00::1]` for an order of its own."""
    return Text(f"store at {address}: looking for {interval:g} s")


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
