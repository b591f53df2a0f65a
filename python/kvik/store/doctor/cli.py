"""The options of ``kvik store doctor``."""

from __future__ import annotations

import json
import sys

import click

import kvik
from kvik.config import flags
from kvik.ranges import Range
from kvik.store.cli import DEFAULT_ADDRESS
from kvik.store.doctor.rules import findings
from kvik.store.doctor.show import finding_lines, survey_lines, to_json
from kvik.store.doctor.survey import MAX_BLOCKS, examine

FOUND = 1


@click.command()
@click.argument("servers", metavar="[SERVERS]...", nargs=-1)
@click.option(
    "--copies",
    type=click.IntRange(1, 16),
    help="How many servers keep each block, as clients have it: fewer are a finding. Unless told, as many as "
    "most blocks have.",
)
@click.option(
    "--deadline",
    type=Range(0.5, 3600.0),
    default=10.0,
    show_default=True,
    help="Seconds for all of it. A server that has not answered by then is named.",
)
@click.option(
    "--max-blocks",
    type=click.IntRange(1000, 1_000_000_000),
    default=MAX_BLOCKS,
    show_default=True,
    help="Copies of blocks to hold at once, some 24 bytes each. Where there are more, a sample is looked at.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all of it, and the findings, as JSON.")
def doctor(
    servers: tuple[str, ...], copies: int | None, deadline: float, max_blocks: int, as_json: bool
) -> None:
    """Look at what the servers of a store hold, where it is uneven, and what would be lost with each.

    SERVERS are what clients are given: addresses, file:PATH, dns:NAME:PORT or
    etcd:http://HOST:PORT/PREFIX; without any, 127.0.0.1:7500. Nothing is changed or read; each server lists
    its blocks. The secret or TLS that the store demands is taken from KVIK_SECRET, KVIK_TLS or the
    configuration file.

    The exit status is 0 where nothing is wrong, 1 where something was found or no server answers, 2 where the
    command is wrong.
    """
    with flags.telling(), kvik.Engine(name="store-doctor") as engine:
        survey = examine(
            engine, servers or (DEFAULT_ADDRESS,), copies=copies, max_blocks=max_blocks, deadline=deadline
        )
    found = findings(survey)
    if as_json:
        click.echo(json.dumps(to_json(survey, found), indent=1))
        sys.exit(FOUND if found else 0)
    for line in survey_lines(survey):
        click.echo(line)
    click.echo("")
    for line in finding_lines(found):
        click.echo(line)
    if not found:
        click.echo("no findings")
    sys.exit(FOUND if found else 0)
