"""``kvik emulator``: the command line."""

from __future__ import annotations

import asyncio
import logging

import click

from kvik.config import EMULATOR, flags


@click.group()
def emulator() -> None:
    """A serving engine without a model: real KV pages, handovers and failures, on any machine."""


@emulator.command()
@flags.options(EMULATOR)
def serve(**given: object) -> None:
    """Serve vLLM's HTTP API with KV that is a function of the tokens."""
    from kvik.emulator.options import Options
    from kvik.emulator.replica import ReplicaError
    from kvik.emulator.serve import serve as run

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    options = Options(**flags.chosen(EMULATOR, given))
    try:
        with flags.telling(ReplicaError, OSError):
            asyncio.run(run(options, lambda address: click.echo(f"listening on {address}")))
    except asyncio.CancelledError:
        raise click.ClickException("ended by a signal before it was up") from None
