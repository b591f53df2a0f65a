"""``kvik store bench``: the commands."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvik import _native
from kvik.bench.errors import BenchError
from kvik.config import flags
from kvik.ranges import Range
from kvik.store.bench import copies as measuring
from kvik.store.bench import live, misses, models
from kvik.store.bench.figures import GIB, markdown, text

_WIDTH = 100
_TRANSPORTS = ("local", "tcp")
_THREADS = 2  # as an engine has for copies, where nothing else is asked for

_models = click.option(
    "--models",
    "names",
    default=",".join(models.MODELS),
    show_default=True,
    help="Whose blocks, of 16 tokens each.",
)
_seed = click.option(
    "--seed", type=int, default=None, help="Of what is random; printed, and another each time."
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")


@click.group()
def bench() -> None:
    """Find out what a store is good for."""


@bench.command()
@_models
@click.option("--transports", default="local,tcp", show_default=True, help="Over which the store is reached.")
@click.option("--blocks", type=click.IntRange(1, 1024), default=512, show_default=True, help="Random blocks.")
@click.option(
    "--rounds", type=click.IntRange(1), default=5, show_default=True, help="Everything has a turn in each."
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    default=min(_THREADS, os.cpu_count() or 1),
    show_default="as many as copy in an engine",
    help="Of memcpy.",
)
@click.option("--by-layer", is_flag=True, help="Pages lie layer by layer, as serving engines have them.")
@click.option(
    "--beside",
    multiple=True,
    metavar="COMMAND",
    help="Another store to measure in the same rounds: a program of bench/beside. Repeatable.",
)
@_seed
@_json
def copies(
    names: str,
    transports: str,
    blocks: int,
    rounds: int,
    threads: int,
    by_layer: bool,
    beside: tuple[str, ...],
    seed: int | None,
    as_json: bool,
) -> None:
    """Put and get blocks of five models, beside copies of the same blocks within the machine.

    Figures are ratios to memcpy of the same blocks in the same round, medians of the rounds. Every block that
    comes from the store is verified. `raw` is a transfer of the same pages without a store.
    """
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    plan = measuring.Plan(blocks, rounds, threads, by_layer, seed, beside)
    with flags.telling(BenchError):
        shapes, over = models.chosen(names), _chosen(transports)
        within = [measuring.measure_copies(shape, plan) for shape in shapes]
        cells = [measuring.measure(shape, transport, plan) for transport in over for shape in shapes]
    if as_json:
        click.echo(json.dumps(_told(plan, within, cells), indent=1))
        return
    click.echo(f"{blocks} random blocks, {rounds} rounds, memcpy by {threads} threads, seed {seed}\n")
    click.echo(_copies_table(within, blocks))
    for name, why in {name: why for cell in within for name, why in cell.missing.items()}.items():
        click.echo(f"{name}: not measured, {why}")
    click.echo("\n" + _store_table(cells, blocks))


def _chosen(transports: str) -> list[Any]:
    chosen = transports.split(",")
    for name in chosen:
        if name not in _TRANSPORTS:
            raise click.BadParameter(
                f"{name!r} is none of {', '.join(_TRANSPORTS)}", param_hint="--transports"
            )
    return chosen


def _copies_table(cells: list[measuring.Cell], blocks: int) -> str:
    names = [name for name in cells[0].rounds.times if name != measuring.MEMCPY]
    rows = []
    for cell in cells:
        copy = cell.rounds.median(measuring.MEMCPY) or 1.0
        ratios = [text(cell.rounds.ratio(name, measuring.MEMCPY)) for name in names]
        rows.append([cell.shape.model, text(blocks * cell.shape.bytes / GIB / copy), *ratios])
    return markdown(["model", "memcpy GiB/s", *names], rows)


def _store_table(cells: list[measuring.Cell], blocks: int) -> str:
    columns = [
        "model", "transport", "copies a byte", "memcpy GiB/s", measuring.PUT_ACCEPTED, measuring.PUT_STORED,
        measuring.GET, measuring.RAW, "put to raw", "get to raw", "first block ms", "its bound ms",
    ]  # fmt: skip
    others = [f"{name} {word}" for name in cells[0].beside for word in ("put", "get", "stream")]
    others = [name for name in others if name in cells[0].rounds.times]
    rows = []
    for cell in cells:
        took = cell.rounds
        copy, first = took.median(measuring.MEMCPY) or 1.0, took.median(measuring.FIRST) or 0.0
        rows.append(
            [
                cell.shape.model,
                cell.transport,
                str(measuring.COPIES[cell.transport]),
                text(blocks * cell.shape.bytes / GIB / copy),
                *(
                    text(took.ratio(name, measuring.MEMCPY))
                    for name in (measuring.PUT_ACCEPTED, measuring.PUT_STORED, measuring.GET, measuring.RAW)
                ),
                text(took.ratio(measuring.RAW, measuring.PUT_STORED)),
                text(took.ratio(measuring.RAW, measuring.GET)),
                text(first * 1e3),
                text((2 * copy / blocks + 0.0003) * 1e3),
                *(text(took.ratio(name, measuring.MEMCPY)) for name in others),
            ]
        )
    return markdown([*columns, *others], rows)


def _told(plan: measuring.Plan, within: list[measuring.Cell], cells: list[measuring.Cell]) -> dict[str, Any]:
    return {
        "format": "kvik-store-bench-copies/1",
        "blocks": plan.blocks,
        "threads": plan.threads,
        "by_layer": plan.by_layer,
        "seed": plan.seed,
        "copies": [
            {"model": cell.shape.model, "block_bytes": cell.shape.bytes, "seconds": cell.rounds.times,
             "missing": cell.missing}
            for cell in within
        ],
        "store": [
            {"model": cell.shape.model, "block_bytes": cell.shape.bytes, "transport": cell.transport,
             "seconds": cell.rounds.times}
            for cell in cells
        ],
    }  # fmt: skip


@bench.command(name="misses")
@click.option(
    "--model",
    type=click.Choice(list(models.MODELS)),
    default="qwen2.5-7b",
    show_default=True,
    help="Whose blocks, of 16 tokens each.",
)
@click.option("--transport", type=click.Choice(_TRANSPORTS), default="local", show_default=True)
@click.option("--prompts", type=click.IntRange(1), default=4, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1024, 16384), default=8192, show_default=True)
@click.option(
    "--rate",
    type=Range(1.0, 1e12),
    default=10_000.0,
    show_default=True,
    help="Tokens a second that the engine computes: steps take as long, and the store costs a part of it.",
)
@_seed
@_json
def pure_misses(
    model: str,
    transport: Any,
    prompts: int,
    prompt_tokens: int,
    rate: float,
    seed: int | None,
    as_json: bool,
) -> None:
    """What a store costs where nothing is found: time of an engine's own thread a step, for 8 sizes of steps.

    Each prompt is asked for, which is a miss, and all of its blocks are put as they come. Synchronous:
    the engine waits until the blocks of a step are stored. Asynchronous: it goes on, and their pages are
    in use for one step more.
    """
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    (shape,) = models.chosen(model)
    with flags.telling():
        measured = misses.measure(shape, misses.Plan(transport, prompts, prompt_tokens, rate, seed))
    if as_json:
        told = {str(steps.tokens): steps.rounds.times for steps in measured}
        click.echo(json.dumps({"model": model, "transport": transport, "seconds": told}, indent=1))
        return
    click.echo(f"{prompts} prompts of {prompt_tokens} tokens of {model} over {transport}, none of them known")
    rows = []
    for steps in measured:
        row = [str(steps.tokens)]
        for way in (misses.SYNC, misses.ASYNC):
            spent = steps.rounds.median(way) or 0.0
            row += [text(spent * 1e3, 3), text(100 * spent * rate / steps.tokens, 1)]
        rows.append(row)
    part = f"% of a step at {rate:,.0f} tokens/s"
    click.echo(markdown(["tokens a step", "synchronous ms", part, "asynchronous ms", part], rows))


@bench.command()
@click.argument("trace", type=click.Path(dir_okay=False))
@click.option(
    "--capacities",
    default="1k,3k,10k,30k,50k",
    show_default=True,
    help="Blocks that the cache has room for.",
)
@click.option("--live", "through", is_flag=True, help="Send the requests through a server and a client, too.")
@_json
def replay(trace: str, capacities: str, through: bool, as_json: bool) -> None:
    """Replay a trace of requests against each eviction policy, beside the offline optimum.

    The trace has a JSON object a line, with the ids of a request's blocks in `hash_ids`. A hit is a block of
    the leading run of a request that is in the cache; rates are of all blocks of all requests.
    """
    with flags.telling():
        rows, (requests, references, blocks) = _native.replay_trace(trace, capacities)
        rooms = [room for room, _ in rows if through and room >= live.LEAST]
        lived = {room: live.replayed(Path(trace), room) for room in rooms}
    if as_json:
        told: dict[str, Any] = {"requests": requests, "references": references, "blocks": blocks}
        told["capacities"] = {str(room): dict(rates) for room, rates in rows}
        told["live"] = {str(room): outcome.rate for room, outcome in lived.items()}
        click.echo(json.dumps(told, indent=1))
        return
    click.echo(f"{requests:,} requests, {references:,} references to {blocks:,} blocks")
    table = Table("blocks", *(name for name, _ in rows[0][1]), *(["live", "live s"] if through else []))
    for room, rates in rows:
        cells = [f"{rate:.4f}" for _, rate in rates]
        if through:
            one = lived.get(room)
            cells += ["-", "-"] if one is None else [f"{one.rate:.4f}", f"{one.seconds:.0f}"]
        table.add_row(f"{room:,}", *cells)
    _console().print(table)
    if through and len(lived) < len(rows):
        click.echo(f"live: not measured below {live.LEAST} blocks, which the smallest store has room for")


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)
