"""``kvik emulator``: the command line."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import click

import kvik


@click.group()
def emulator() -> None:
    """A serving engine without a model: real KV pages, handovers and failures, on any machine."""


def _size(_context: click.Context, _parameter: click.Parameter, text: str) -> int:
    try:
        return kvik.parse_size(text)
    except kvik.KvikError as error:
        raise click.BadParameter(str(error)) from error


def _json_object(_context: click.Context, _parameter: click.Parameter, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise click.BadParameter("not a JSON object")
    return value


@emulator.command()
@click.option(
    "--role",
    type=click.Choice(["prefill", "decode", "both"]),
    default="both",
    show_default=True,
    help="Whether it offers KV, takes it, or does either; it answers whole requests in any role.",
)
@click.option(
    "--model-shape",
    metavar="SHAPE",
    default="tiny",
    show_default=True,
    help="Whose KV it has: a preset, a config.json, or layers=4,kv_heads=2,head_size=64,... (kvik.shapes).",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on for HTTP.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8100,
    show_default=True,
    help="Port for HTTP; 0 takes a free one, which the first line of output tells.",
)
@click.option(
    "--tp",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Ranks that share the heads of a model.",
)
@click.option("--dp", type=click.IntRange(1, 64), default=1, show_default=True, help="Replicas of the whole.")
@click.option(
    "--page-tokens",
    type=click.IntRange(1, 65536),
    default=16,
    show_default=True,
    help="Tokens of a KV page; vLLM's own choice on a GPU is 16.",
)
@click.option(
    "--kv-memory",
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    callback=_size,
    help="KV memory of each rank; it is there only as far as it was written.",
)
@click.option(
    "--plain-memory",
    is_flag=True,
    help="Own memory that kvik registers, in place of memory that it allocates and peers can map.",
)
@click.option(
    "--prefix-cache/--no-prefix-cache",
    default=True,
    show_default=True,
    help="Keep the KV of full pages and use it for prompts that begin alike.",
)
@click.option(
    "--transport",
    type=click.Choice(["auto", "tcp", "local"]),
    default="auto",
    show_default=True,
    help="How KV is read; one that was named is used, or the load fails.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:0",
    show_default=True,
    help="Where the first rank's kvik engine listens, the others behind it; off loopback set KVIK_SECRET.",
)
@click.option("--report-file", metavar="PATH", help="Append a JSON line for each load or refused offer.")
@click.option(
    "--compute",
    metavar="MODEL",
    default="instant",
    show_default=True,
    help="How long steps take: a preset, or fixed=,prefill_token=,decode_token=,context_token= in seconds.",
)
@click.option(
    "--load-failure",
    type=click.Choice(["recompute", "fail"]),
    default="recompute",
    show_default=True,
    help="Compute what could not be loaded, or end the request with an error.",
)
@click.option(
    "--reread",
    metavar="N",
    type=click.IntRange(0, 1_000_000),
    default=0,
    show_default=True,
    help="0: each token reads all KV of its request. N: only each Nth does, for very long contexts.",
)
@click.option(
    "--connector",
    metavar="JSON",
    default="{}",
    callback=_json_object,
    help="More options of the handover, as vLLM's kv_connector_extra_config takes them.",
)
@click.option(
    "--fault",
    metavar="SPEC",
    multiple=True,
    help="What goes wrong: slow, stalled, wrong-page or dead, with details (docs/emulator.md); repeatable.",
)
@click.option("--allow-faults", is_flag=True, help="Take further faults by POST /fault.")
@click.option(
    "--drain",
    metavar="SECONDS",
    type=click.IntRange(0, 86400),
    default=5,
    show_default=True,
    help="How long open requests may take to finish after SIGTERM.",
)
def serve(**given: Any) -> None:
    """Serve vLLM's HTTP API with KV that is a function of the tokens."""
    from kvik.emulator.options import Options
    from kvik.emulator.replica import ReplicaError
    from kvik.emulator.serve import serve as run
    from kvik.handover.config import ConfigError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        asyncio.run(run(Options(**given), lambda address: click.echo(f"listening on {address}")))
    except (kvik.KvikError, ReplicaError, ConfigError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except asyncio.CancelledError:
        raise click.ClickException("ended by a signal before it was up") from None
